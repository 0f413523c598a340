"""The data of a rank: its batches, the held-out loss, and errors that are raised on every rank."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from paramp import ConfigError, DataError, Engine, ParallelContext
from paramp.base.collectives import gather_objects
from paramp.base.errors import require
from paramp.checkpoint.header import Header
from paramp.distributed.exact_mode_protocol import numerics_of
from paramp.engine.checkpoint_manager import accumulation_for

from .corpus import Corpus, held_out_windows, load_corpus, training_windows
from .settings import TrainConfig


def check_sizes(context: ParallelContext, job: TrainConfig) -> None:
    """Raise a ConfigError if the batch or the sequence does not divide over the ranks."""
    config, data, accumulation = context.config, context.dp.size, context.config.gradient_accumulation
    what, count = numerics_of(config).batch_divisor(config)
    multiple = data * accumulation * count
    factors = f"data {data} x accumulation {accumulation} x {what} {count}"
    require(not job.batch_size % multiple, "train.batch_size", job.batch_size, f"a multiple of {multiple} ({factors})")
    size = context.tensor_axis.size
    expected = f"a multiple of parallel.tensor.size {size} under sequence_parallel"
    fits = not config.parallel.sequence_parallel or job.seq_len % size == 0
    require(fits, "train.seq_len", job.seq_len, expected)


def keep_global_batch(context: ParallelContext, job: TrainConfig, header: Header) -> str | None:
    """After a change of the number of data ranks, set the accumulation that keeps the checkpoint's global batch.

    Returns a message about the change; None if there is none.
    """
    config, ranks = context.config, context.dp.size
    before, position = header.values.get("layout", {}).get("dp"), header.values.get("tracked", {}).get("position")
    if position is None or position["accumulation"] != config.gradient_accumulation:
        return None
    if numerics_of(config).depends_on_accumulation:
        return None
    saved = (header.values["config"]["gradient_accumulation"], before)
    try:
        accumulation = accumulation_for(job.batch_size, config.parallel.pipeline.num_microbatches, ranks, saved)
    except ConfigError as error:
        raise ConfigError(f"train.{error}") from None
    if accumulation == config.gradient_accumulation:
        return None
    context.config = replace(config, gradient_accumulation=accumulation)
    return (
        f"{ranks} data ranks, before {before}: gradient_accumulation = {accumulation} keeps the global batch of "
        f"{job.batch_size}"
    )


def open_corpus(job: TrainConfig, default_vocab_size: int) -> Corpus:
    """Open ``train.data``. ``default_vocab_size`` is used if neither data nor configuration gives a vocabulary size.

    Raises:
        ConfigError: on every rank: the data cannot be read, is shorter than a sequence, or differs between machines.
            Then inputs on the first pipeline stage would not match targets on the last.
    """
    try:
        options = {name: getattr(job, name) for name in ("validation_data", "tokenizer", "vocab_size", "data_dtype")}
        corpus = load_corpus(job.data, **options, default_vocab_size=default_vocab_size)
        corpus.check_seq_len(job.seq_len)
    except ConfigError as error:
        raise ConfigError(f"train.{error}") from None
    everyone = gather_objects((corpus.sha256, corpus.vocab_size))
    for rank, (sha256, vocab_size) in enumerate(everyone):
        if (sha256, vocab_size) != everyone[0]:
            raise ConfigError(
                f"train.data: rank 0 reads data of the hash {everyone[0][0][:12]} and a vocabulary of "
                f"{everyone[0][1]}, but rank {rank} of {sha256[:12]} and {vocab_size}; use the same data on every "
                "machine ('stdlib' depends on the version of Python)"
            )
    return corpus


class DataPosition:
    """The position of a run in its data, saved in checkpoints: the last completed ``step``.

    ``unevaluated``: the evaluation after it was due, and has not been made.
    ``accumulation`` is the configured one; a run resumed with another number of data ranks may use another.
    """

    def __init__(self, job: TrainConfig, corpus: Corpus, accumulation: int) -> None:
        self._corpus, self._accumulation, self.step, self.unevaluated = corpus, accumulation, 0, False
        self._made = {"lr": job.lr, "weight_decay": job.weight_decay}

    def state_dict(self) -> dict[str, Any]:
        """The step, what identifies the data, and what the optimizer was made with."""
        run = {"step": self.step, "unevaluated": self.unevaluated, "accumulation": self._accumulation}
        return run | {"data": self._corpus.identity(), **self._made}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the step in ``state``; a ConfigError if the run was started with other data."""
        if (difference := self._corpus.difference(state["data"])) is not None:
            raise ConfigError(f"train.data: {difference}; use the data that the run was started with")
        self.step, self.unevaluated = state["step"], state.get("unevaluated", False)
        self._made = {name: state.get(name, value) for name, value in self._made.items()}  # the optimizer is loaded too


class Batches:
    """This rank's ``parts`` of a batch: inputs and targets of each accumulation step, int64 (batch, sequence).

    Each batch is fetched one step ahead, so that a data error (``failure``) is known while the previous step can still
    be saved. ``seconds`` is the duration of the last fetch.
    """

    def __init__(self, context: ParallelContext, job: TrainConfig, corpus: Corpus) -> None:
        self._context, self._job, self._corpus = context, job, corpus
        self.parts: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.seconds = 0.0
        self.failure: Exception | None = None

    def fetch(self, step: int) -> None:
        """Read the batch of ``step``: for each accumulation step this rank's slice of the global batch."""
        start, config, axis, job = time.perf_counter(), self._context.config, self._context.dp, self._job
        size = job.batch_size // config.gradient_accumulation // axis.size
        try:
            with self._context.phase("data"):
                firsts = [(part * axis.size + axis.rank) * size for part in range(config.gradient_accumulation)]
                tokens = self._corpus.training
                self.parts = [training_windows(tokens, job.seq_len, config.seed, step, first, size) for first in firsts]
        except (DataError, OSError) as error:
            self.failure = error
        self.seconds = time.perf_counter() - start


def held_out_loss(engine: Engine, job: TrainConfig, corpus: Corpus) -> float:
    """Mean loss of the held-out sequences, in nats per token; the same sequences in every layout.

    Their number is rounded up to whole global batches, which do not depend on the accumulation.
    Raises a DataError on every rank if the data cannot be read any more.
    """
    axis, accumulation = engine.context.dp, engine.context.config.gradient_accumulation
    batch = job.batch_size // accumulation
    rounds, size = math.ceil(job.eval_sequences / job.batch_size) * accumulation, batch // axis.size
    windows, failure = [], None
    try:
        for index in range(rounds):
            first = index * batch + axis.rank * size
            windows.append(held_out_windows(corpus.held_out, job.seq_len, first, size, rounds * batch))
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
