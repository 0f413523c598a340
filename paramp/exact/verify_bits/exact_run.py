"""The two runs of ``paramp verify --exact``: what they record, and its comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path

import torch

from ...config.reproducible import Reproducible
from ...config.schema import Config
from ...distributed.context import ParallelContext
from ...tools.verify.activation_recorder import RankRecord, local_modules
from ...tools.verify.compare import layout_name
from ...tools.verify.options import Options
from ...tools.verify.two_runs import digest_of, local_rows, prepared
from .bits_report import ExactReport
from .compare_bits import compare_exactly
from .exact_recorder import ExactRecorder
from .tensor_trace import TraceWriter, read

LR = 1e-3
WEIGHT_DECAY = 0.1


def in_exact_mode(config: Config, context_size: int) -> Config:
    """``config`` with ``reproducible``: its own, or True with slices of sequences for ``context_size`` ranks."""
    default = True if context_size == 1 else Reproducible(sequence_slices=2 * context_size)
    return replace(config, reproducible=config.reproducible or default)


def train_exactly(options: Options, context: ParallelContext, num_microbatches: int, trace: Path) -> RankRecord:
    """Train on this rank, and write everything that is computed to files named after ``trace``.

    A batch is split into the calls of an accumulation window; ``num_microbatches`` is the total of a call over all data
    ranks of the sharded run.
    """
    config = context.config
    assert isinstance(config.reproducible, Reproducible)
    chunk, num_calls = config.reproducible.chunk, config.gradient_accumulation
    adamw = partial(torch.optim.AdamW, lr=options.lr or LR, weight_decay=WEIGHT_DECAY)
    least = num_microbatches * num_calls * chunk
    engine, batches, record = prepared(options, context, 2 * least, least, adamw)
    record.microbatch_size = chunk
    if config.reproducible.sequence_slices > 1:  # the first batch has a trial, with outputs of some tokens
        first = next(batches)
        engine.evaluate(local_rows(first, context))
        batches = chain([first], batches)
    writer = TraceWriter(trace)
    with ExactRecorder(engine, local_modules(engine, record), writer) as recorder:
        for step, batch in enumerate(batches, start=1):
            record.batches.append(digest_of(batch))
            size = batch.size // num_calls
            for call in range(num_calls):
                local = local_rows(batch.rows(slice(call * size, (call + 1) * size)), context)
                recorder.begin(step, call, local.size // chunk)
                recorder.loss(engine.forward_backward(local))
                result = engine.step()
            recorder.end_step(result)
            engine.zero_grad()
    writer.close()
    return record


def compare_runs(
    options: Options, folder: Path, config: Config, records: Mapping[str, Sequence[RankRecord]]
) -> ExactReport:
    """Compare the traces in ``folder`` of the ranks of both runs; ``config`` is that of the sharded one."""
    traces = {
        run: [read(folder / f"{run}-{rank}") for rank in range(len(of_ranks))] for run, of_ranks in records.items()
    }
    report = ExactReport(layout_name(config.parallel), config.precision.name, options.steps)
    compare_exactly(records["single"][0], records["sharded"], traces, report)
    return report
