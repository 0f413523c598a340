"""Train a language model over tensor x pipeline x data axes in mixed precision.

torchrun --nproc-per-node 4 launch/train.py --tp 2 --pp 2
torchrun launch/train.py --tp 2 --pp 2          (one machine: starts the four processes itself)
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import sys
import time
import tomllib
import traceback
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

import paramp
from paramp.base.errors import key_name, nearest, one_line, shown
from paramp.checkpoint.header import Header, read_header
from paramp.config.files import load, merge, read_file
from paramp.config.schema import Config, TrainConfig, flatten
from paramp.data.bigram import bigram_loss
from paramp.data.corpus import Corpus, load_corpus
from paramp.data.sampling import held_out_windows, training_windows
from paramp.distributed.collectives import gather_objects
from paramp.distributed.failures import is_echo
from paramp.distributed.launcher_env import find_place, rank_by_any_variable
from paramp.distributed.local_launcher import reported_by_rank_0, start_processes
from paramp.engine.checkpoint_manager import Checkpoints, accumulation_for, find
from paramp.engine.signals import StopRequest
from paramp.observe.mfu import mfu, world_peak_flops
from paramp.observe.reporter import Reporter, check_tensorboard, memory_bytes, set_aside
from paramp.observe.timeline import Timeline
from paramp.tools.plot import check_matplotlib, plot_histogram

# flag -> the configuration key it sets, the type of its value
FLAGS: dict[str, tuple[str, Any]] = {
    "--tp": ("parallel.tensor.size", int),
    "--pp": ("parallel.pipeline.size", int),
    "--dp": ("parallel.data", int),
    "--zero": ("parallel.zero", int),
    "--sequence-parallel": ("parallel.sequence_parallel", bool),
    "--precision": ("precision", str),
    "--schedule": ("parallel.pipeline.schedule", str),
    "--stages-per-rank": ("parallel.pipeline.stages_per_rank", int),
    "--microbatches": ("parallel.pipeline.microbatches", int),
    "--norms": ("train.norms", str),
    "--model": ("train.model", str),
    "--data": ("train.data", str),
    "--tokenizer": ("train.tokenizer", str),
    "--vocab-size": ("train.vocab_size", int),
    "--seq-len": ("train.seq_len", int),
    "--batch-size": ("train.batch_size", int),
    "--steps": ("train.steps", int),
    "--lr": ("train.lr", float),
    "--clip-grad-norm": ("clip_grad_norm", float),
    "--seed": ("seed", int),
    "--eval-every": ("train.eval_every", int),
    "--log-dir": ("train.log_dir", str),
    "--tensorboard": ("train.tensorboard", bool),
    "--trace": ("train.trace", int),
    "--checkpoint-dir": ("train.checkpoint_dir", str),
    "--checkpoint-every": ("train.checkpoint_every", int),
    "--resume": ("train.resume", str),
    "--histogram": ("train.histogram", int),
    "--trace-overflow": ("trace_overflow", bool),
}

NORMS: dict[str, list[Any]] = {
    "plain": [],
    "low-precision": [paramp.algorithms.LowPrecisionLayerNorm()],
    "fused": [paramp.algorithms.FusedLayerNorm()],
}

DEFAULTS = {"precision": "16-mixed", "clip_grad_norm": 1.0}
"""What this script sets where neither flag nor file does."""


def main() -> int:
    """Configure, start what is missing, train; the exit code."""
    launched = False
    try:
        config = configure(sys.argv[1:])
        place = find_place()
        processes = processes_needed(config)
        if processes > 1 and (place is None or place.world_size == 1):
            print(f"one process was started, the layout needs {processes}: starting them on this machine", flush=True)
            return start_processes([sys.executable, *sys.orig_argv[1:]], processes)
        with paramp.launch_from_environment(config) as context:
            launched = True
            return train(context)
    except Exception as error:
        return report(error, launched)


def report(error: Exception, launched: bool) -> int:
    """Print what went wrong, once over all ranks; the exit code."""
    mistakes = (
        paramp.CheckpointError,
        paramp.ConfigError,
        paramp.DataError,
        paramp.LaunchError,
        FileNotFoundError,
        FileExistsError,
        NotADirectoryError,
        PermissionError,
    )
    rank = rank_by_any_variable()
    if is_echo(error) or (not launched and reported_by_rank_0(str(error), rank)):
        return 2 if isinstance(error, mistakes) else 1
    if isinstance(error, (*mistakes, paramp.TrainingDiverged)):
        print(f"error: {error}", file=sys.stderr)
    else:
        details = "".join(traceback.format_exception(error))
        print(f"error: rank {rank} failed\n{details}", file=sys.stderr)
    return 2 if isinstance(error, mistakes) else 1


def configure(arguments: list[str]) -> Config:
    """Flags over file over this script's defaults."""

    class Parser(argparse.ArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise paramp.ConfigError(one_line(message))

    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for flag, (key, kind) in FLAGS.items():
        options: dict[str, Any] = {"action": "store_true", "default": None} if kind is bool else {"type": kind}
        parser.add_argument(flag, dest=key, help=f"sets {key}", **options)
    parser.add_argument("--config", metavar="FILE", help="a .toml or .py file")
    parser.add_argument(
        "--emulate-fp16",
        choices=("auto", "on", "off"),
        help="on CPUs without fp16 arithmetic, compute fp16 products in fp32 and round",
    )
    parser.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], help="any key, e.g. seed=7")
    given, unknown = parser.parse_known_args(arguments)
    if unknown:
        known = [*FLAGS, "--config", "--emulate-fp16", "--set"]
        raise paramp.ConfigError(
            f"{key_name(unknown[0])}: no such flag, expected one of {', '.join(known)}{nearest(unknown[0], known)}"
        )
    tree: dict[str, Any] = merge(DEFAULTS, read_file(given.config) if given.config else {})
    for key, _ in FLAGS.values():
        if (value := getattr(given, key)) is not None:
            tree = merge(tree, nested(key, value))
    if given.emulate_fp16:
        tree = merge(tree, {"emulate_fp16": {"auto": "auto", "on": True, "off": False}[given.emulate_fp16]})
    for assignment in given.set:
        key, equals, text = assignment.partition("=")
        if not equals:
            raise paramp.ConfigError(f"--set: got {shown(assignment)}, expected KEY=VALUE, such as train.lr=1e-3")
        tree = merge(tree, nested(key, plain_value(text)))
    return load(tree)


def nested(key: str, value: object) -> dict[str, Any]:
    """``{"a": {"b": value}}`` for the key ``a.b``."""
    for part in reversed(key.split(".")):
        value = {part: value}
    return value  # type: ignore[return-value]


def plain_value(text: str) -> Any:
    """``text`` as TOML reads a value (numbers, true, lists), or as it stands."""
    try:
        table = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):  # numbers too long and brackets too deep for Python among them
        return None if text == "None" else text
    return table["value"] if len(table) == 1 else text


def processes_needed(config: Config) -> int:
    """The smallest world that the layout fits."""
    parallel = config.parallel
    return parallel.tensor.size * parallel.pipeline.size * (1 if parallel.data == "auto" else parallel.data)


class Position:
    """Where a run is in its data: what its checkpoints hold of this script.

    Attributes:
        step: the last one that was made.
    """

    def __init__(self, corpus: Corpus, accumulation: int) -> None:
        """
        Args:
            accumulation: that was asked for; with another number of data ranks than at first another one is in use.
        """
        self._corpus = corpus
        self._accumulation = accumulation
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds."""
        return {"step": self.step, "accumulation": self._accumulation, "data": self._corpus.identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there.

        Raises:
            ConfigError: the data is another now.
        """
        if (difference := self._corpus.difference(state["data"])) is not None:
            raise paramp.ConfigError(f"train.data: {difference}; put back what the run was started with")
        self.step = state["step"]


def train(context: paramp.ParallelContext) -> int:
    """The whole job on one rank; the exit code."""
    job = context.config.train
    if job.tensorboard:
        check_tensorboard()
    if job.histogram is not None:
        check_matplotlib("train.histogram")
    folder = None if job.checkpoint_dir is None else Path(job.checkpoint_dir)
    found = find(job.resume, folder, say_on(context))
    header = None if found is None else read_header(found)
    accumulation = context.config.gradient_accumulation
    if header is not None:
        keep_global_batch(context, header)
    config = context.config
    shares = context.dp.size * config.gradient_accumulation * config.parallel.pipeline.num_microbatches
    if job.batch_size % shares:
        raise paramp.ConfigError(
            f"train.batch_size: got {job.batch_size}, expected a multiple of {shares} "
            f"(data {context.dp.size} x accumulation {config.gradient_accumulation} x microbatches "
            f"{shares // context.dp.size // config.gradient_accumulation})"
        )
    try:
        corpus = load_corpus(
            job.data,
            validation_data=job.validation_data,
            tokenizer=job.tokenizer,
            vocab_size=job.vocab_size,
            data_dtype=job.data_dtype,
            default_vocab_size=paramp.models.GPT.own_vocab_size(job.model),
        )
        corpus.check_seq_len(job.seq_len)
        model = paramp.models.GPT.preset(job.model, max_seq_len=job.seq_len, vocab_size=corpus.vocab_size)
    except paramp.ConfigError as error:
        raise paramp.ConfigError(f"train.{error}") from None
    check_same_data(context, corpus)
    if config.parallel.sequence_parallel and job.seq_len % context.tp.size:
        raise paramp.ConfigError(
            f"train.seq_len: got {job.seq_len}, expected a multiple of parallel.tensor.size {context.tp.size} under "
            "sequence_parallel"
        )
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": job.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=job.lr,
        betas=(0.9, 0.95),
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(step, job.steps))
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    flops = model.flops_per_token(job.seq_len) * job.batch_size * job.seq_len
    peak = world_peak_flops(context, None if job.peak_tflops is None else job.peak_tflops * 1e12)
    engine, _, _, scheduler = paramp.initialize(
        model, optimizer, model.loss, lr_scheduler=schedule, algorithms=NORMS[job.norms]
    )
    assert scheduler is not None

    position = Position(corpus, accumulation)
    engine.track("position", position)
    if found is not None:
        engine.load(found, check=False)
    checkpoints = None
    if folder is not None:
        checkpoints = Checkpoints(folder, job.checkpoint_every, job.checkpoint_keep_last, job.checkpoint_keep_every)

    with (
        StopRequest() as stop,
        Reporter(
            job.steps,
            job.log_dir,
            enabled=context.is_main,
            tensorboard=job.tensorboard,
            resumed_at=position.step if found is not None else None,
        ) as reporter,
    ):
        announce(reporter, context, corpus, num_parameters)
        if header is not None:
            reporter.say(f"resumed from {found}, after step {position.step}")
            say_what_stays(header, job, reporter)
        baseline = ""
        if context.is_main and corpus.unit == "byte":
            baseline = f" (a byte-bigram model: {bigram_loss(corpus):.4f})"
        batches = Batches(context, corpus)
        batches.fetch(position.step + 1)
        complain_together(context, batches.failure)
        for step in range(position.step + 1, job.steps + 1):
            start, data_seconds = time.perf_counter(), batches.seconds
            engine.train()
            with engine.recording() if step == job.trace else nullcontext() as timeline:
                for part, (x, y) in enumerate(batches.parts):
                    engine.zero_grad()
                    engine.forward_backward(x, y, return_loss=False)
                    if step == job.histogram and part == config.gradient_accumulation - 1:
                        save_histogram(engine, Path(str(job.log_dir)), reporter)
                    result = engine.step()
            learning_rate = scheduler.get_last_lr()[0]
            scheduler.step()
            position.step = step
            if context.device.type == "cuda":
                torch.cuda.synchronize(context.device)  # or the optimizer's kernels would not be in the time
            seconds = time.perf_counter() - start + data_seconds
            if config.trace_overflow and result.overflow and engine.num_skipped_in_a_row == 1:
                reporter.say(f"step {step} was skipped: {engine.diagnose_overflow()}")
            if step < job.steps:
                batches.fetch(step + 1)
            memory, data_seconds, asked, failed = largest(
                context,
                memory_bytes(context.device),
                data_seconds,
                float(stop.received or 0),
                float(batches.failure is not None),
            )
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
                "memory_bytes": int(memory),
                "mfu": mfu(flops, seconds, peak),
            }
            ending = bool(asked or failed)
            if checkpoints is not None and (ending or step == job.steps or checkpoints.due(step)):
                saved = checkpoints.save(engine, step, wait=ending)
                if ending:
                    reporter.say(f"saved {saved}")
            if not ending and (step % job.eval_every == 0 or step == job.steps):
                start = time.perf_counter()
                record["val_loss"] = evaluate(engine, corpus)
                record["val_seconds"] = time.perf_counter() - start
            reporter.step(record)
            if timeline is not None and context.is_main:
                save_trace(timeline, Path(str(job.log_dir)), reporter)
            if "val_loss" in record:
                reporter.say(
                    f"step {step}: validation loss {record['val_loss']:.4f} nats/{corpus.unit}{baseline}; "
                    f"{engine.num_skipped} of {step} steps skipped so far"
                )
            if failed:
                complain_together(context, batches.failure)
            if asked:
                rest = "nothing was saved" if checkpoints is None else "--resume auto goes on from there"
                reporter.say(f"stopped after step {step} by signal {int(asked)}; {rest}")
                return 128 + int(asked)
        engine.finish_saving()
    return 0


class Batches:
    """This data rank's parts of the global batches, fetched a step ahead: so that what is wrong with the data is known
    while there is a whole step to save."""

    def __init__(self, context: paramp.ParallelContext, corpus: Corpus) -> None:
        self._context = context
        self._corpus = corpus
        self.parts: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Inputs and targets, one pair for each accumulation step."""
        self.seconds = 0.0
        """That the last fetch took."""
        self.failure: Exception | None = None
        """What went wrong in it, on this rank."""

    def fetch(self, step: int) -> None:
        """Read what ``step`` needs."""
        start = time.perf_counter()
        try:
            with self._context.phase("data"):
                count = self._context.config.gradient_accumulation
                self.parts = [rank_batch(self._context, self._corpus, step, part) for part in range(count)]
        except (paramp.DataError, OSError) as error:
            self.failure = error
        self.seconds = time.perf_counter() - start


def complain_together(context: paramp.ParallelContext, failure: Exception | None) -> None:
    """Raise the first rank's ``failure`` on every rank, if there is any.

    Raises:
        DataError: with its message.
    """
    (failed,) = largest(context, float(failure is not None))
    if not failed:
        return
    messages = gather_objects(failure and str(failure))
    raise paramp.DataError(next(message for message in messages if message is not None)) from failure


def say_on(context: paramp.ParallelContext) -> Callable[[str], None]:
    """``print`` on the main rank."""
    return functools.partial(print, flush=True) if context.is_main else lambda text: None


def say_what_stays(header: Header, job: TrainConfig, reporter: Reporter) -> None:
    """Say which settings of the checkpoint hold where others were asked for, and if there is nothing left to do."""
    for name in ("lr", "weight_decay"):
        asked = getattr(job, name)
        before = header.values.get("config", {}).get(f"train.{name}", asked)
        if before != asked:
            reporter.say(f"train.{name} stays {before}, as the checkpoint's optimizer has it; {asked} is not used")
    if header.values.get("tracked", {}).get("position", {}).get("step", 0) >= job.steps:
        reporter.say(f"nothing is left to do up to step {job.steps}")


def keep_global_batch(context: paramp.ParallelContext, header: Header) -> None:
    """With another number of data ranks than the checkpoint's, let accumulation make up the same global batch."""
    config = context.config
    before, position = header.values.get("layout", {}).get("dp"), header.values.get("tracked", {}).get("position")
    if position is None or position["accumulation"] != config.gradient_accumulation:
        return
    accumulation = accumulation_for(
        config.train.batch_size,
        config.parallel.pipeline.num_microbatches,
        context.dp.size,
        (header.values["config"]["gradient_accumulation"], before),
    )
    if accumulation != config.gradient_accumulation:
        context.config = replace(config, gradient_accumulation=accumulation)
        say_on(context)(
            f"{context.dp.size} data ranks, at first {before}: gradient_accumulation = {accumulation} keeps the "
            f"global batch of {config.train.batch_size}"
        )


def save_trace(timeline: Timeline, folder: Path, reporter: Reporter) -> None:
    """Write the timeline of a step as ``trace.json``, and report its bubble."""
    trace = set_aside(folder / "trace.json")
    timeline.save(trace)
    reporter.say(f"{timeline.describe()}; {trace}")


def save_histogram(engine: paramp.Engine, folder: Path, reporter: Reporter) -> None:
    """Write where the gradients lie as ``gradients.json`` and ``gradients.png``, and say it; on every rank."""
    histogram = engine.gradient_histogram()
    if not engine.context.is_main:
        return
    numbers, picture = set_aside(folder / "gradients.json"), set_aside(folder / "gradients.png")
    histogram.save(numbers)
    plot_histogram(histogram, picture)
    reporter.say(f"{histogram.describe()}; {numbers} and {picture.name}")


def check_same_data(context: paramp.ParallelContext, corpus: Corpus) -> None:
    """Complain on every rank if machines read different data: stages would see inputs and targets that do not match.

    Raises:
        ConfigError: naming two ranks.
    """
    seen = gather_objects((corpus.sha256, corpus.vocab_size))
    for rank, theirs in enumerate(seen):
        if theirs != seen[0]:
            raise paramp.ConfigError(
                f"train.data: rank 0 reads data of the hash {seen[0][0][:12]} and a vocabulary of {seen[0][1]}, "
                f"rank {rank} of {theirs[0][:12]} and {theirs[1]}; put the same on every machine ('stdlib' is that of "
                "its Python)"
            )


def largest(context: paramp.ParallelContext, *numbers: float) -> list[float]:
    """Each of this rank's ``numbers``, which are finite, or another rank's where that is larger; one all-reduce."""
    values = torch.tensor(numbers, dtype=torch.float64, device=context.device)
    dist.all_reduce(values, dist.ReduceOp.MAX)
    return values.tolist()


def learning_rate_factor(step: int, total: int) -> float:
    """Linear warm-up over the first 5 % of the steps, then a cosine down to a tenth."""
    warmup = max(1, total // 20)
    if step < warmup:
        return (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))


def rank_batch(
    context: paramp.ParallelContext, corpus: Corpus, step: int, part: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """This data rank's slice of accumulation step ``part`` of the global batch."""
    job = context.config.train
    size = job.batch_size // context.config.gradient_accumulation // context.dp.size
    first = (part * context.dp.size + context.dp.rank) * size
    return training_windows(corpus.training, job.seq_len, context.config.seed, step, first, size)


def evaluate(engine: paramp.Engine, corpus: Corpus) -> float:
    """Mean loss over the held-out windows, in nats a token; the same windows in every layout."""
    context, job = engine.context, engine.context.config.train
    batch = job.batch_size // context.config.gradient_accumulation
    rounds = math.ceil(job.eval_sequences / batch)
    size = batch // context.dp.size
    windows, failure = [], None
    try:
        windows = [
            held_out_windows(corpus.held_out, job.seq_len, index * batch + context.dp.rank * size, size, rounds * batch)
            for index in range(rounds)
        ]
    except (paramp.DataError, OSError) as error:
        failure = error
    complain_together(context, failure)
    losses = [float(engine.evaluate(x, y)) for x, y in windows]
    return sum(losses) / rounds


def announce(reporter: Reporter, context: paramp.ParallelContext, corpus: Corpus, num_parameters: int) -> None:
    """Print the resolved configuration once, and save it beside the metrics."""
    if not context.is_main:
        return
    settings = flatten(context.config)
    facts = {
        "world_size": context.world_size,
        "data_size": context.dp.size,
        "device": str(context.device),
        "torch": torch.__version__,
        "data_sha256": corpus.sha256,
        "data_files": corpus.num_files,
        "data_vocab_size": corpus.vocab_size,
        f"data_{corpus.unit}s": len(corpus.training) + len(corpus.held_out),
        "parameters": num_parameters,
    }
    for name, value in (settings | facts).items():
        reporter.say(f"{name} = {value}")
    for note in corpus.notes:
        reporter.say(note)
    if context.config.train.log_dir is not None:
        path = set_aside(Path(context.config.train.log_dir) / "config.json")
        path.write_text(json.dumps({"config": settings, "run": facts}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
