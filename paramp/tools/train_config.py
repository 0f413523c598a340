"""The configuration of the train script: its sources, the model's shape, and its log."""

import json
import textwrap
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..base.coerce import build, keys, user_path
from ..base.errors import ConfigError, key_name, nearest, shown
from ..checkpoint.header import Header
from ..compat.composer.algorithms import FusedLayerNorm, LowPrecisionLayerNorm
from ..config.files import load, merge, read_file
from ..config.schema import Config, flatten
from ..data.corpus import Corpus
from ..distributed.context import ParallelContext
from ..models.gpt import PRESETS, GPTConfig
from ..models.presets import choose
from ..observe.metrics import set_aside
from ..observe.reporter import Reporter
from .flags import FLAGS, Parser, add_flags, flag_settings, formatter, nested

NORMS: dict[str, list[Any]] = {"plain": [], "low-precision": [LowPrecisionLayerNorm()], "fused": [FusedLayerNorm()]}
"""Value of ``--norms`` -> the algorithms that :func:`paramp.initialize` applies."""
DEFAULTS = {"precision": "16-mixed", "clip_grad_norm": 1.0}
"""The train script's defaults that differ from the library's."""


def build_parser(description: str) -> Parser:
    """The train script's command line."""
    defaults = flatten(load(DEFAULTS))
    others = sorted({key for key in defaults if key.startswith("train.")} - {flag.key for flag in FLAGS})
    others += [f"model.{name}" for name in keys(GPTConfig)]
    epilog = textwrap.fill(f"Keys without a flag of their own: {', '.join(others)}", 78, break_on_hyphens=False)
    parser = Parser(description=description, epilog=epilog, formatter_class=formatter)
    add_flags(parser, defaults)
    group = parser.add_argument_group("configuration")
    group.add_argument("--config", metavar="FILE", help=".toml or .py file; flags replace its values (default: none)")
    explained = "any key, such as model.num_layers=6; replaces flags and file (default: none)"
    group.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], help=explained)
    return parser


def configure(arguments: Sequence[str], description: str = "") -> Config:
    """The configuration of a command line: ``--set`` overrides flags, these ``--config``, this :data:`DEFAULTS`.

    Raises:
        ConfigError: a flag or key is unknown, or a value is not allowed.
        FileNotFoundError: the file of ``--config`` does not exist.
    """
    given, unknown = build_parser(description).parse_known_args(arguments)
    if unknown:
        known = [*(flag.name for flag in FLAGS), "--config", "--set"]
        raise ConfigError(
            f"{key_name(unknown[0])}: no such flag, expected one of {', '.join(known)}{nearest(unknown[0], known)}"
        )
    tree = merge(DEFAULTS, read_file(given.config) if given.config else {})
    tree = merge(tree, flag_settings(given))
    for assignment in given.set:
        key, equals, text = assignment.partition("=")
        if not equals:
            raise ConfigError(f"--set: got {shown(assignment)}, expected KEY=VALUE, such as train.lr=1e-3")
        tree = merge(tree, nested(key, _plain_value(text)))
    return load(tree)


def _plain_value(text: str) -> Any:
    """``text`` as a TOML value (number, true, list) if it is one, else as a string."""
    try:
        table = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):  # RecursionError: brackets nested too deep
        return None if text == "None" else text
    return table["value"] if len(table) == 1 else text


def model_config(config: Config, vocab_size: int | None = None) -> GPTConfig:
    """The shape of the model: the preset ``train.model``, with the fields that ``config.model`` replaces.

    ``max_seq_len`` is ``train.seq_len`` unless ``config.model`` sets it. ``vocab_size`` is that of the data; None: not
    known yet, so the preset's is used.

    Raises:
        ConfigError: a preset or field is unknown, a value is not allowed, or the model is too small for the data.
    """
    job = config.train
    try:
        preset = choose(PRESETS, job.model)
    except ConfigError as error:
        raise ConfigError(f"train.{error}") from None
    fitting = {"max_seq_len": job.seq_len} | ({} if vocab_size is None else {"vocab_size": vocab_size})
    fields = {name: getattr(preset, name) for name in keys(GPTConfig)}
    shape = build(GPTConfig, {**fields, **fitting, **config.model}, "model")
    for name, least in fitting.items():
        value = getattr(shape, name)
        if value < least:
            needs = f"the {least} tokens of {'train.seq_len' if name == 'max_seq_len' else 'the data'}"
            raise ConfigError(f"model.{name}: got {value}, expected at least {needs}")
    return shape


def announce(reporter: Reporter, context: ParallelContext, corpus: Corpus, num_parameters: int) -> None:
    """Log the settings that differ from the default on the main rank, and save the whole configuration as JSON."""
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
    usual = flatten(load(DEFAULTS | {"precision": context.config.precision.name})) | {
        "precision": DEFAULTS["precision"]
    }
    changed = [f"{name} = {value}" for name, value in settings.items() if name not in usual or usual[name] != value]
    reporter.say(f"settings other than the default: {', '.join(changed) or 'none'}")
    reporter.say(", ".join(f"{name} = {value}" for name, value in facts.items() if name != "data_sha256"))
    for line in corpus.notes:
        reporter.say(line)
    if context.config.train.log_dir is not None:
        path = set_aside(user_path(context.config.train.log_dir) / "config.json")
        path.write_text(json.dumps({"config": settings, "run": facts}, indent=2) + "\n", encoding="utf-8")


def announce_resume(reporter: Reporter, context: ParallelContext, found: Path, header: Header) -> None:
    """Log the checkpoint ``found`` that the run resumes from, the settings it overrides, and whether it is finished."""
    job, step = context.config.train, header.values.get("tracked", {}).get("position", {}).get("step", 0)
    reporter.say(f"resumed from {found}, after step {step}")
    for name in ("lr", "weight_decay"):
        asked = getattr(job, name)
        before = header.values.get("config", {}).get(f"train.{name}", asked)
        if before != asked:
            reporter.say(f"train.{name} = {before} from the checkpoint's optimizer is kept; {asked} is not used")
    if step >= job.steps:
        reporter.say(f"all {job.steps} steps are done, and {found} has them; for more, raise --steps")
