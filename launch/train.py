"""Train a language model over tensor x pipeline x data axes in mixed precision.

torchrun --nproc-per-node 4 launch/train.py --tp 2 --pp 2
torchrun launch/train.py --tp 2 --pp 2          (one machine: starts the four processes itself)
"""

from __future__ import annotations

import functools
import math
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from train_app.batch_reader import (
    Batches,
    DataPosition,
    check_sizes,
    held_out_loss,
    keep_global_batch,
    max_over_ranks,
    open_corpus,
    raise_on_all_ranks,
)
from train_app.corpus import Corpus, bigram_loss
from train_app.mfu import mfu, world_peak_flops
from train_app.planted_overflow import planted_overflow
from train_app.reporter import (
    Reporter,
    announce,
    announce_end,
    announce_resume,
    check_tensorboard,
    facts_of,
    memory_bytes,
)
from train_app.settings import Job, TrainConfig, all_settings, check_same, configure

import paramp
from paramp.base.installed_packages import check_installed
from paramp.base.values_checked_by_type import user_path
from paramp.checkpoint.open_checkpoint import open_together
from paramp.distributed.error_report import report_failure
from paramp.distributed.launcher_variables import find_place
from paramp.distributed.local_launcher import start_processes
from paramp.engine.checkpoint_manager import Checkpoints, check_folder, find
from paramp.engine.lr_scheduler import Scheduler
from paramp.engine.signals import StopRequest
from paramp.observe.timeline import Timeline
from paramp.tools.metrics import set_aside
from paramp.tools.plot import plot_histogram
from paramp.tools.verify.options import NORMS


def main() -> int:
    """Configure, start missing processes, train. Returns the exit code."""
    try:
        config, job = configure(sys.argv[1:], str(__doc__))
        place, processes = find_place(), config.parallel.least_world_size
        if processes > 1 and (place is None or place.world_size == 1):
            print(f"one process was started, the layout needs {processes}: starting them on this machine", flush=True)
            return start_processes([sys.executable, *sys.orig_argv[1:]], processes)
        with paramp.launch_from_environment(config) as context:
            return train(context, job)
    except Exception as error:
        return report_failure(error)


def train(context: paramp.ParallelContext, settings: Job) -> int:
    """Train on one rank. Returns the exit code."""
    job = settings.train
    check_same(settings)
    check_folder("train.log_dir", None if job.log_dir is None else user_path(job.log_dir))
    if job.tensorboard:  # on every rank, before data and model are loaded
        check_tensorboard()
    if job.histogram is not None:
        check_installed("matplotlib", "plot", "train.histogram")
    configured = context.config.gradient_accumulation
    found, saved_position = find_checkpoint(context, job)
    check_sizes(context, job)
    corpus = open_corpus(job, default_vocab_size=settings.model_config().vocab_size)
    model = settings.build_model(corpus.vocab_size)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    engine, lr_scheduler = initialize(job, model)
    position = DataPosition(job, corpus, configured)
    engine.track("position", position)
    if found is not None:
        engine.load(found, check=False)  # find_checkpoint has checked it
        follow_schedule(lr_scheduler, job.steps)
    resumed_at = None if found is None else position.step
    facts = facts_of(context, corpus, num_parameters)
    shown = all_settings(context.config, settings) | facts
    with StopRequest() as stop, Reporter(job, context.is_main, resumed_at, shown) as reporter:
        announce(reporter, context, settings, facts, corpus.notes)
        if found is not None:
            announce_resume(reporter, job, found, saved_position)
        run = Run(
            engine=engine,
            job=job,
            lr_scheduler=lr_scheduler,
            batches=Batches(context, job, corpus),
            position=position,
            corpus=corpus,
            reporter=reporter,
            checkpoints=open_checkpoints(job),
            flops=model.flops_per_token(job.seq_len) * job.batch_size * job.seq_len,
            peak_flops=world_peak_flops(context, None if job.peak_tflops is None else job.peak_tflops * 1e12),
            baseline=bigram_loss(corpus) if context.is_main and corpus.unit == "byte" else None,
        )
        return train_steps(run, stop)


def find_checkpoint(context: paramp.ParallelContext, job: TrainConfig) -> tuple[Path | None, dict[str, Any]]:
    """The checkpoint to resume from and the :class:`DataPosition` in it.

    It may change the accumulation, to keep the global batch.
    """
    show: Callable[[str], None] = functools.partial(print, flush=True) if context.is_main else lambda text: None
    found = find(job.resume, job.checkpoint_dir, show)
    if found is None:
        return None, {}
    assert torch.distributed.group.WORLD is not None
    with open_together(found, torch.distributed.group.WORLD, check=False) as checkpoint:  # find has checked it
        header = checkpoint.header
    if (change := keep_global_batch(context, job, header)) is not None:
        show(change)
    return found, header.values.get("tracked", {}).get("position", {})


def initialize(job: TrainConfig, model: paramp.models.GPT) -> tuple[paramp.Engine, Scheduler]:
    """The engine, with AdamW that decays only matrices, and the learning-rate scheduler."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": job.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=job.lr,
        betas=(0.9, 0.95),
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(step, job.steps))
    engine, _, _, lr_scheduler = paramp.initialize(
        model, optimizer, model.loss, lr_scheduler=schedule, algorithms=NORMS[job.norms]
    )
    assert lr_scheduler is not None
    return engine, lr_scheduler


def learning_rate_factor(step: int, total: int) -> float:
    """Linear warm-up over the first 5 % of the steps, then a cosine down to a tenth."""
    warmup = max(1, total // 20)
    if step < warmup:
        return (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))


def follow_schedule(lr_scheduler: Scheduler, steps: int) -> None:
    """Set the rates of the next step: those that were loaded are of a run of perhaps another number of steps."""
    (schedule,) = lr_scheduler.schedulers
    factor = learning_rate_factor(schedule.last_epoch, steps)
    schedule._last_lr = [base * factor for base in schedule.base_lrs]
    for group, rate in zip(schedule.optimizer.param_groups, schedule._last_lr, strict=True):
        group["lr"] = rate


def open_checkpoints(job: TrainConfig) -> Checkpoints | None:
    """The checkpoints in ``train.checkpoint_dir``; None without one."""
    if job.checkpoint_dir is None:
        return None
    return Checkpoints(
        job.checkpoint_dir,
        job.checkpoint_every,
        job.checkpoint_keep_last,
        job.checkpoint_keep_every,
        keep_best="min" if job.checkpoint_keep_best else None,
    )


@dataclass(frozen=True, kw_only=True)
class Run:
    """The objects and constants of a run."""

    engine: paramp.Engine
    job: TrainConfig
    lr_scheduler: Scheduler
    batches: Batches
    position: DataPosition
    corpus: Corpus
    reporter: Reporter
    checkpoints: Checkpoints | None
    flops: int
    """FLOPs that the model needs for one step."""
    peak_flops: float | None
    """FLOPs per second of all devices together; None if unknown."""
    baseline: float | None
    """The loss of a byte-bigram model, in nats per byte. None on other ranks than the main one, and for tokens."""


def train_steps(run: Run, stop: StopRequest) -> int:
    """Run the remaining steps. Returns the exit code."""
    context, job = run.engine.context, run.job
    first = run.position.step + 1
    run.batches.fetch(first)
    raise_on_all_ranks(context, run.batches.failure)
    if run.position.unevaluated:  # the run was ended before it
        late: dict[str, Any] = {"step": run.position.step}
        evaluate(run, run.position.step, late)
        save(run, run.position.step, ending=False, val_loss=late["val_loss"])
        report(run, late, None)
    for step in range(first, job.steps + 1):
        record, timeline = train_step(run, step)
        if step < job.steps:
            run.batches.fetch(step + 1)
        signal, failed = agree(run, record, stop)
        ending = bool(signal or failed)
        run.position.unevaluated = step % job.eval_every == 0 or step == job.steps
        if run.position.unevaluated and not ending:
            evaluate(run, step, record)
        save(run, step, ending, record.get("val_loss"))
        report(run, record, timeline)
        if failed:
            raise_on_all_ranks(context, run.batches.failure)
        if signal:
            saved = "nothing was saved" if run.checkpoints is None else "--resume auto continues from there"
            run.reporter.say(f"stopped after step {step} by signal {signal}; {saved}")
            return 128 + signal
    run.engine.finish_saving()
    announce_end(run.reporter, job)
    return 0


def train_step(run: Run, step: int) -> tuple[dict[str, Any], Timeline | None]:
    """Run one optimizer step. Returns its record for ``metrics.jsonl``, and its timeline if it is traced."""
    engine = run.engine
    with planted_overflow(engine) if step == run.job.plant_overflow else nullcontext() as planted:
        if planted is not None:
            run.reporter.say(f"step {step}: by --plant-overflow, {planted} leaves the range of fp16")
        record, result, timeline = timed_step(run, step)
        if engine.config.trace_overflow and result.overflow and engine.num_skipped_in_a_row == 1:
            found = engine.diagnose_overflow()
            run.reporter.say(f"step {step} was skipped: {found}")
            run.reporter.record(step, found)
            ranks, scale = engine.context.world_size, engine.scaler.get_scale()
            everyone = f"all {ranks} ranks" if ranks > 1 else "the optimizer"
            run.reporter.say(f"{everyone} skipped step {step}; the loss scale was {result.loss_scale:g}, now {scale:g}")
    if engine.replicas_found is not None:
        run.reporter.record(step, engine.replicas_found)
    return record, timeline


def timed_step(run: Run, step: int) -> tuple[dict[str, Any], paramp.StepResult, Timeline | None]:
    """Run one optimizer step. Returns its record, its result and its timeline, as :func:`train_step` says."""
    engine, job, config = run.engine, run.job, run.engine.context.config
    start, data_seconds = time.perf_counter(), run.batches.seconds
    engine.train()
    with engine.recording() if step == job.trace else nullcontext() as timeline:
        for part, (x, y) in enumerate(run.batches.parts):
            engine.zero_grad()
            engine.forward_backward(x, y, return_loss=False)
            if part == config.gradient_accumulation - 1:
                count_gradients(run, step)
            result = engine.step()
    learning_rate = run.lr_scheduler.get_last_lr()[0]
    run.lr_scheduler.step()
    run.position.step = step
    if engine.context.device.type == "cuda":
        torch.cuda.synchronize(engine.context.device)  # so that the time includes the optimizer's kernels
    seconds = time.perf_counter() - start + data_seconds
    record = {
        "step": step,
        "loss": result.loss,
        "grad_norm": result.grad_norm,
        "loss_scale": result.loss_scale,
        "skipped": int(result.overflow),
        "lr": learning_rate,
        "tokens_per_second": job.batch_size * job.seq_len / seconds,
        "step_seconds": seconds,
        "data_seconds": data_seconds,
        "memory_bytes": memory_bytes(engine.context.device),
        "mfu": mfu(run.flops, seconds, run.peak_flops),
    }
    return record, result, timeline


def count_gradients(run: Run, step: int) -> None:
    """Record the histogram of the gradients if it is due; that of ``--histogram`` is drawn too. Every rank calls it."""
    job = run.job
    in_turn = job.histogram_every is not None and step % job.histogram_every == 0
    if step != job.histogram and not in_turn:
        return
    histogram = run.engine.gradient_histogram()
    run.reporter.record(step, histogram)
    if step == job.histogram and run.engine.context.is_main:
        folder = user_path(str(job.log_dir))
        numbers, picture = set_aside(folder / "gradients.json"), set_aside(folder / "gradients.png")
        histogram.save(numbers)
        plot_histogram(histogram, picture)
        run.reporter.say(f"{histogram.describe()}; {numbers} and {picture.name}")


def agree(run: Run, record: dict[str, Any], stop: StopRequest) -> tuple[int, bool]:
    """Whether to stop: the signal that any rank received (0: none), and whether any rank failed to read its next batch.

    The same all-reduce replaces the memory and data times in ``record`` by their maxima over all ranks.
    """
    memory, record["data_seconds"], signal, failed = max_over_ranks(
        run.engine.context,
        record["memory_bytes"],
        record["data_seconds"],
        stop.received or 0,
        run.batches.failure is not None,
    )
    record["memory_bytes"] = int(memory)
    return int(signal), bool(failed)


def evaluate(run: Run, step: int, record: dict[str, Any]) -> None:
    """Record the validation loss. If the data cannot be read any more, save before the error ends the run."""
    start = time.perf_counter()
    try:
        record["val_loss"] = held_out_loss(run.engine, run.job, run.corpus)
    except paramp.DataError:
        save(run, step, ending=True)
        raise
    run.position.unevaluated = False
    record["val_seconds"] = time.perf_counter() - start


def save(run: Run, step: int, ending: bool, val_loss: float | None = None) -> None:
    """Write a checkpoint if one is due after ``step`` or the run is ending. When ending, wait until it is written."""
    last = step == run.job.steps
    if run.checkpoints is not None and (ending or last or run.checkpoints.due(step, val_loss)):
        saved = run.checkpoints.save(run.engine, step, metric=val_loss, wait=ending)
        if ending:
            run.reporter.say(f"saved {saved}")


def report(run: Run, record: dict[str, Any], timeline: Timeline | None) -> None:
    """Log a step: its record, and its timeline and evaluation if there are any."""
    run.reporter.step(record)
    if timeline is not None:
        trace = run.reporter.record(record["step"], timeline)
        run.reporter.say(f"{timeline.describe()}; {trace}")
    if "val_loss" in record:
        baseline = "" if run.baseline is None else f" (a byte-bigram model: {run.baseline:.4f})"
        run.reporter.say(
            f"step {record['step']}: validation loss {record['val_loss']:.4f} nats/{run.corpus.unit}{baseline}; "
            f"{run.engine.num_skipped} of {record['step']} steps skipped so far"
        )
        if run.baseline is not None and record["val_loss"] > run.baseline and record["step"] == run.job.steps:
            run.reporter.say(f"after {run.job.steps} steps the byte-bigram model still predicts better: raise --steps")


if __name__ == "__main__":
    sys.exit(main())
