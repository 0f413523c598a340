"""The data of the train script: the batches of each rank, the held-out loss, and errors raised on every rank."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from ..base.collectives import gather_objects
from ..base.errors import ConfigError, DataError, require
from ..checkpoint.header import Header
from ..data.corpus import Corpus, load_corpus
from ..data.sampling import held_out_windows, training_windows
from ..distributed.context import ParallelContext
from ..distributed.numerics import numerics_of
from ..engine.checkpoint_manager import accumulation_for
from ..engine.engine import Engine


def check_sizes(context: ParallelContext) -> None:
    """Raise a ConfigError if the batch or the sequence does not divide over the ranks."""
    config, job = context.config, context.config.train
    data, accumulation = context.batch_axis.size, config.gradient_accumulation
    what, parts = numerics_of(config).batch_divisor(config)
    multiple = data * accumulation * parts
    factors = f"data {data} x accumulation {accumulation} x {what} {parts}"
    require(not job.batch_size % multiple, "train.batch_size", job.batch_size, f"a multiple of {multiple} ({factors})")
    size = context.tensor_axis.size
    expected = f"a multiple of parallel.tensor.size {size} under sequence_parallel"
    fits = not config.parallel.sequence_parallel or job.seq_len % size == 0
    require(fits, "train.seq_len", job.seq_len, expected)


def keep_global_batch(context: ParallelContext, header: Header) -> str | None:
    """After a change of the number of data ranks, set the accumulation that keeps the checkpoint's global batch.

    Returns a message about the change; None if there is none.
    """
    config, ranks = context.config, context.batch_axis.size
    before, position = header.values.get("layout", {}).get("dp"), header.values.get("tracked", {}).get("position")
    if position is None or position["accumulation"] != config.gradient_accumulation:
        return None
    if numerics_of(config).depends_on_accumulation:
        return None
    saved = (header.values["config"]["gradient_accumulation"], before)
    microbatches = config.parallel.pipeline.num_microbatches
    accumulation = accumulation_for(config.train.batch_size, microbatches, ranks, saved)
    if accumulation == config.gradient_accumulation:
        return None
    context.config = replace(config, gradient_accumulation=accumulation)
    return (
        f"{ranks} data ranks, before {before}: gradient_accumulation = {accumulation} keeps the global batch of "
        f"{config.train.batch_size}"
    )


def open_corpus(context: ParallelContext, default_vocab_size: int) -> Corpus:
    """Open ``train.data``. ``default_vocab_size`` is used if neither data nor configuration gives a vocabulary size.

    Raises:
        ConfigError: on every rank: the data cannot be read, is shorter than a sequence, or differs between machines.
            Then inputs on the first pipeline stage would not match targets on the last.
    """
    job = context.config.train
    try:
        options = {name: getattr(job, name) for name in ("validation_data", "tokenizer", "vocab_size", "data_dtype")}
        corpus = load_corpus(job.data, **options, default_vocab_size=default_vocab_size)
        corpus.check_seq_len(job.seq_len)
    except ConfigError as error:
        raise ConfigError(f"train.{error}") from None
    found = gather_objects((corpus.sha256, corpus.vocab_size))
    for rank, (sha256, vocab_size) in enumerate(found):
        if (sha256, vocab_size) != found[0]:
            raise ConfigError(
                f"train.data: rank 0 reads data of the hash {found[0][0][:12]} and a vocabulary of {found[0][1]}, but "
                f"rank {rank} of {sha256[:12]} and {vocab_size}; use the same data on every machine ('stdlib' depends "
                "on the version of Python)"
            )
    return corpus


class DataPosition:
    """The position of a run in its data, saved in checkpoints: the last completed ``step``.

    ``accumulation`` is the configured one; a run resumed with another number of data ranks may use another.
    """

    def __init__(self, corpus: Corpus, accumulation: int) -> None:
        self._corpus, self._accumulation, self.step = corpus, accumulation, 0

    def state_dict(self) -> dict[str, Any]:
        """The step, and what identifies the data."""
        return {"step": self.step, "accumulation": self._accumulation, "data": self._corpus.identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the step in ``state``; a ConfigError if the run was started with other data."""
        if (difference := self._corpus.difference(state["data"])) is not None:
            raise ConfigError(f"train.data: {difference}; use the data that the run was started with")
        self.step = state["step"]


class Batches:
    """This rank's ``parts`` of a batch: inputs and targets of each accumulation step, int64 (batch, sequence).

    Each batch is fetched one step ahead, so that a data error (``failure``) is known while the previous step can still
    be saved. ``seconds`` is the duration of the last fetch.
    """

    def __init__(self, context: ParallelContext, corpus: Corpus) -> None:
        self._context, self._corpus = context, corpus
        self.parts: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.seconds = 0.0
        self.failure: Exception | None = None

    def fetch(self, step: int) -> None:
        """Read the batch of ``step``."""
        start = time.perf_counter()
        try:
            with self._context.phase("data"):
                self.parts = [self._part(step, part) for part in range(self._context.config.gradient_accumulation)]
        except (DataError, OSError) as error:
            self.failure = error
        self.seconds = time.perf_counter() - start

    def _part(self, step: int, part: int) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's slice of accumulation step ``part`` of the global batch."""
        config, axis = self._context.config, self._context.batch_axis
        size = config.train.batch_size // config.gradient_accumulation // axis.size
        first = (part * axis.size + axis.rank) * size
        return training_windows(self._corpus.training, config.train.seq_len, config.seed, step, first, size)


def evaluate(engine: Engine, corpus: Corpus) -> float:
    """Mean loss of the held-out sequences, in nats per token; the same sequences in every layout.

    Raises a DataError on every rank if the data cannot be read any more.
    """
    config, axis = engine.context.config, engine.context.batch_axis
    batch = config.train.batch_size // config.gradient_accumulation
    rounds, size = math.ceil(config.train.eval_sequences / batch), batch // axis.size
    windows, failure = [], None
    try:
        for index in range(rounds):
            first = index * batch + axis.rank * size
            windows.append(held_out_windows(corpus.held_out, config.train.seq_len, first, size, rounds * batch))
    except (DataError, OSError) as error:
        failure = error
    raise_on_all_ranks(engine.context, failure)
    return sum(float(engine.evaluate(x, y)) for x, y in windows) / rounds


def raise_on_all_ranks(context: ParallelContext, failure: Exception | None) -> None:
    """Raise the first rank's ``failure`` on every rank, as a DataError with its message. A collective."""
    (failed,) = max_over_ranks(context, float(failure is not None))
    if not failed:
        return
    messages = gather_objects(failure and str(failure))
    raise DataError(next(message for message in messages if message is not None)) from failure


def max_over_ranks(context: ParallelContext, *numbers: float) -> list[float]:
    """The maximum over the world of each of ``numbers``, all finite; one all-reduce."""
    values = torch.tensor(numbers, dtype=torch.float64, device=context.device)
    dist.all_reduce(values, dist.ReduceOp.MAX)
    return values.tolist()
