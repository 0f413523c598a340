"""What a training script prints and writes beside the record of each step."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from ..checkpoint.header import Header
from ..config.schema import flatten
from ..data.corpus import Corpus
from ..distributed.context import ParallelContext
from ..engine.engine import Engine
from ..observe.reporter import Reporter, set_aside
from ..observe.timeline import Timeline
from .plot import plot_histogram


def announce(reporter: Reporter, context: ParallelContext, corpus: Corpus, num_parameters: int) -> None:
    """Print the resolved configuration once, and save it beside the metrics."""
    if not context.is_main:
        return
    settings = flatten(context.config)
    facts = {
        "world_size": context.world_size,
        "data_size": context.batch_axis.size,
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
    for line in corpus.notes:
        reporter.say(line)
    if context.config.train.log_dir is not None:
        path = set_aside(Path(context.config.train.log_dir) / "config.json")
        path.write_text(json.dumps({"config": settings, "run": facts}, indent=2) + "\n", encoding="utf-8")


def announce_kept_settings(reporter: Reporter, context: ParallelContext, header: Header) -> None:
    """Report the settings of the checkpoint that replace those of the command line, and whether any step remains."""
    job = context.config.train
    for name in ("lr", "weight_decay"):
        asked = getattr(job, name)
        before = header.values.get("config", {}).get(f"train.{name}", asked)
        if before != asked:
            reporter.say(f"train.{name} stays {before}, as the checkpoint's optimizer has it; {asked} is not used")
    if header.values.get("tracked", {}).get("position", {}).get("step", 0) >= job.steps:
        reporter.say(f"nothing is left to do up to step {job.steps}")


def save_trace(timeline: Timeline, folder: Path, reporter: Reporter) -> None:
    """Write the timeline of a step as ``trace.json``, and report its bubble."""
    trace = set_aside(folder / "trace.json")
    timeline.save(trace)
    reporter.say(f"{timeline.describe()}; {trace}")


def save_histogram(engine: Engine, folder: Path, reporter: Reporter) -> None:
    """Write the exponents of the gradients as ``gradients.json`` and ``gradients.png``. Every rank calls it."""
    histogram = engine.gradient_histogram()
    if not engine.context.is_main:
        return
    numbers, picture = set_aside(folder / "gradients.json"), set_aside(folder / "gradients.png")
    histogram.save(numbers)
    plot_histogram(histogram, picture)
    reporter.say(f"{histogram.describe()}; {numbers} and {picture.name}")
