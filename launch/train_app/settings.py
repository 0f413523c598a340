"""The settings of the train script: its own tables ``[train]`` and ``[model]`` beside the library's configuration."""

from __future__ import annotations

import json
import math
import textwrap
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from paramp import Config, ConfigError
from paramp.base.collectives import gather_objects
from paramp.base.errors import key_name, nearest, require, shown
from paramp.base.values_checked_by_type import build, keys
from paramp.compat import key_advice
from paramp.config.files import load, merge, read_file
from paramp.config.schema import flatten
from paramp.distributed.agreed_arguments import first_difference
from paramp.models import GPT, GPTConfig, MoEGPT, MoEGPTConfig
from paramp.models.preset_model import choose
from paramp.tools.flags import LAYOUT, PRECISION, SEED, Flag, Parser, add_flags, flag_settings, formatter, nested

DEFAULTS = {"precision": "16-mixed", "clip_grad_norm": 1.0}
"""The train script's defaults that differ from the library's."""
PATHS = (
    *("train.data", "train.validation_data", "train.tokenizer"),
    *("train.log_dir", "train.checkpoint_dir", "train.resume"),
)
"""Settings that may differ from machine to machine."""
MODELS = {name: kind for kind in (GPT, MoEGPT) for name in kind.presets}
"""The class of each preset."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The table ``[train]``."""

    model: str = "tiny"
    """A preset of :class:`paramp.models.GPT` or :class:`paramp.models.MoEGPT`. The table ``[model]`` replaces fields of
    it."""
    data: str = "stdlib"
    """``stdlib``: the source of Python's standard library on this machine, as bytes. Else a path, of one of
    :mod:`train_app.formats`."""
    validation_data: str | None = None
    """Data to evaluate on, a path of the same kinds. None: a part of ``data`` is held out."""
    tokenizer: str | None = None
    """The path of a Hugging Face ``tokenizer.json``, or of a folder with one. None: text is read as bytes."""
    vocab_size: int | None = None
    """The size of the vocabulary. None: that of the tokenizer or the data, else the model preset's."""
    data_dtype: Literal["auto", "uint16", "uint32"] = "auto"
    """The dtype of a ``.bin``. ``auto``: that in the ``meta.json`` beside it, else uint16."""
    norms: Literal["plain", "low-precision", "fused"] = "plain"
    """``low-precision``: norms take and return autocast's dtype. ``fused``: the same, with Apex's kernels where they
    are installed (:mod:`paramp.precision.norms`)."""
    seq_len: int = 256
    """Tokens of a sequence."""
    batch_size: int = 32
    """Sequences of an optimizer step over all ranks, accumulation included."""
    steps: int = 300
    """Optimizer steps to train."""
    lr: float = 2e-3
    """The highest learning rate: linear warm-up over 5 % of the steps, then a cosine down to a tenth of it."""
    weight_decay: float = 0.1
    """AdamW's decay of the weight matrices."""
    eval_every: int = 100
    """Steps between evaluations; the last step is always followed by one. If a signal or lost data ends the run before
    one, it is made after a resume."""
    eval_sequences: int = 64
    """Held-out sequences of an evaluation, rounded up to a multiple of ``batch_size``; always the same ones."""
    checkpoint_dir: str | None = None
    """The folder of checkpoints (:mod:`paramp.engine.checkpoint_manager`). The last step is always saved."""
    checkpoint_every: int | None = None
    """Steps between checkpoints. None: only after the last step and before a requested stop."""
    checkpoint_keep_last: int = 3
    """How many of the newest checkpoints are kept."""
    checkpoint_keep_every: int | None = None
    """Checkpoints of steps that are multiples of this are never deleted."""
    checkpoint_keep_best: bool = False
    """Also save after an evaluation whose ``val_loss`` is the lowest so far, and keep that checkpoint."""
    resume: str | None = None
    """``auto``: resume from the newest whole checkpoint in ``checkpoint_dir``, or start at step 1 if there is none.
    Else the path of a checkpoint."""
    log_dir: str | None = None
    """The folder of the run's files, which ``paramp report`` draws. None: these are not written."""
    tensorboard: bool = False
    """Also write scalars for TensorBoard, to the folder ``tensorboard`` in ``log_dir``."""
    trace: int | None = None
    """A step whose timeline is written to ``log_dir`` as ``traces/step-STEP.json``, for ``ui.perfetto.dev``."""
    histogram: int | None = None
    """A step whose gradients are counted by their exponents, in ``gradients.json`` and ``gradients.png`` in
    ``log_dir``."""
    plant_overflow: int | None = None
    """A step in which one weight's gradient is made to overflow, on the last rank alone
    (:mod:`train_app.planted_overflow`)."""
    histogram_every: int | None = None
    """Steps between histograms in ``events.jsonl`` in ``log_dir``, which ``paramp report`` draws over time."""
    peak_tflops: float | None = None
    """One device's peak in 10**12 dense FLOPs a second, for the utilisation (``mfu``). None: from a table of GPUs
    (:mod:`train_app.mfu`); no utilisation for a device that is not in it."""

    def __post_init__(self) -> None:
        counts = ["seq_len", "batch_size", "steps", "eval_every", "eval_sequences", "vocab_size", "checkpoint_every"]
        counts += ["checkpoint_keep_last", "checkpoint_keep_every", "histogram_every"]
        folder, logs, peak = self.checkpoint_dir is not None, self.log_dir is not None, self.peak_tflops
        unsaved, fix = "because there is no checkpoint_dir to", "set it with --checkpoint-dir DIR"
        unlogged = "because there is no log_dir to write to; set it with --log-dir DIR"
        numbers = ((name, getattr(self, name)) for name in counts)
        rules = [(name, number is None or number >= 1, "an integer of 1 or more") for name, number in numbers]
        rules += [
            ("lr", self.lr > 0 and math.isfinite(self.lr), "a finite number above 0"),
            ("weight_decay", self.weight_decay >= 0, "a number of 0 or more"),
            ("peak_tflops", peak is None or 0 < peak < math.inf, "a finite number above 0, or None"),
            ("checkpoint_every", folder or self.checkpoint_every is None, f"None, {unsaved} write to; {fix}"),
            ("checkpoint_keep_best", folder or not self.checkpoint_keep_best, f"False, {unsaved} write to; {fix}"),
            ("checkpoint_dir", self.checkpoint_dir != "", "a path"),
            ("log_dir", self.log_dir != "", "a path"),
            ("resume", self.resume != "", "a path"),
            ("resume", folder or self.resume != "auto", f"the path of a checkpoint, {unsaved} look in; {fix}"),
            ("histogram_every", logs or self.histogram_every is None, f"None, {unlogged}"),
            ("tensorboard", logs or not self.tensorboard, f"False, {unlogged}"),
        ]
        for name in ("trace", "histogram", "plant_overflow"):
            step = getattr(self, name)
            rules.append((name, step is None or 1 <= step <= self.steps, f"a step from 1 to {self.steps}"))
            rules.append((name, logs or step is None or name == "plant_overflow", f"None, {unlogged}"))
        for name, fits, allowed in rules:
            require(fits, name, getattr(self, name), allowed)


@dataclass(frozen=True, kw_only=True)
class Job:
    """The train script's tables, which the library does not know."""

    train: TrainConfig = field(default_factory=TrainConfig)
    model: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the model's config that replace those of the preset ``train.model``."""

    def model_config(self, vocab_size: int | None = None) -> GPTConfig:
        """The shape of the model: the preset ``train.model``, with the fields that ``model`` replaces.

        ``max_seq_len`` is ``train.seq_len`` unless ``model`` sets it. ``vocab_size`` is that of the data; None: not
        known yet, so the preset's is used.

        Raises:
            ConfigError: a preset or field is unknown, a value is not allowed, or the model is too small for the data.
        """
        try:
            preset = choose({name: kind.presets[name] for name, kind in MODELS.items()}, self.train.model)
        except ConfigError as error:
            raise ConfigError(f"train.{error}") from None
        fitting = {"max_seq_len": self.train.seq_len} | ({} if vocab_size is None else {"vocab_size": vocab_size})
        shape = build(type(preset), {**vars(preset), **fitting, **self.model}, "model")
        for name, least in fitting.items():
            needs = f"at least the {least} tokens of {'train.seq_len' if name == 'max_seq_len' else 'the data'}"
            require(getattr(shape, name) >= least, f"model.{name}", getattr(shape, name), needs)
        return shape

    def build_model(self, vocab_size: int) -> GPT:
        """The model, for data of ``vocab_size`` tokens; errors as :meth:`model_config`."""
        return MODELS[self.train.model](self.model_config(vocab_size))


def check_same(job: Job) -> None:
    """Check that all ranks have the same settings, paths aside, which may differ from machine to machine. A collective.

    Raises:
        ConfigError: on every rank, with the first setting that a rank has different from rank 0.
    """
    own = {key: value for key, value in flatten(job).items() if key not in PATHS}
    if difference := first_difference([json.dumps(settings) for settings in gather_objects(own)]):
        raise ConfigError(difference)


def all_settings(config: Config, job: Job) -> dict[str, Any]:
    """Every setting of both by its key, with plain values for printing and for JSON."""
    return flatten(config) | flatten(job)


EMULATE = "fp16 products by fp32 on CPUs without fp16: auto, on or off"
WHENS = {"auto": "auto", "on": True, "off": False}
BLOCKS = "blocks computed again in the backward: full, selective, or every N-th"


def number_or_word(text: str) -> int | str:
    """``text``, as an integer if it is one."""
    return int(text) if text.lstrip("-").isdigit() else text


GROUPS: dict[str, tuple[Flag, ...]] = {
    **LAYOUT,
    "precision": (
        *PRECISION,
        Flag("--optimizer-state", "optimizer_state", str, "HOW", "AdamW's moments between steps: full or bf16", "full"),
        Flag("--norms", "train.norms", str, "KIND", "plain, low-precision or fused"),
        Flag("--emulate-fp16", "emulate_fp16", str, "WHEN", EMULATE, choices=WHENS),
    ),
    "model and data": (
        Flag("--model", "train.model", str, "NAME", "preset: tiny, tiny-moe, gpt2-124m or gpt2-1.5b"),
        Flag("--data", "train.data", str, "PATH", "text, tokens or a saved dataset; stdlib: Python's own source"),
        Flag("--tokenizer", "train.tokenizer", str, "PATH", "tokenizer.json, or its folder", "bytes"),
        Flag("--vocab-size", "train.vocab_size", int, "N", "tokens that exist", "the data's"),
        Flag("--seq-len", "train.seq_len", int, "N", "tokens of a sequence"),
    ),
    "optimization": (
        Flag("--batch-size", "train.batch_size", int, "N", "sequences of a step, over all ranks"),
        Flag("--steps", "train.steps", int, "N", "optimizer steps"),
        Flag("--lr", "train.lr", float, "X", "highest learning rate"),
        Flag("--clip-grad-norm", "clip_grad_norm", float, "X", "largest norm of the whole gradient"),
        Flag("--activation-checkpointing", "activation_checkpointing", number_or_word, "HOW", BLOCKS),
        Flag("--compile", "compile", bool, None, "compile the repeated blocks and the optimizer step"),
        Flag("--reproducible", "reproducible", bool, None, "the same bits on every layout"),
        SEED,
        Flag("--eval-every", "train.eval_every", int, "N", "steps between evaluations"),
    ),
    "checkpoints": (
        Flag("--checkpoint-dir", "train.checkpoint_dir", str, "DIR", "where checkpoints go"),
        Flag("--checkpoint-every", "train.checkpoint_every", int, "N", "steps between checkpoints", "the last only"),
        Flag("--resume", "train.resume", str, "CKPT", "checkpoint to resume from; auto: the newest whole one"),
    ),
    "logs": (
        Flag("--log-dir", "train.log_dir", str, "DIR", "where the files for paramp report go"),
        Flag("--tensorboard", "train.tensorboard", bool, None, "also write scalars for TensorBoard"),
    ),
    "diagnosis": (
        Flag("--trace", "train.trace", int, "STEP", "write this step's timeline to the log directory"),
        Flag("--histogram", "train.histogram", int, "STEP", "count this step's gradients by their exponents"),
        Flag("--histogram-every", "train.histogram_every", int, "N", "steps between histograms for paramp report"),
        Flag("--trace-overflow", "trace_overflow", bool, None, "name the module where a skipped step overflowed"),
        Flag("--plant-overflow", "train.plant_overflow", int, "STEP", "make a gradient overflow in this step"),
    ),
}
"""Group in ``--help`` -> its flags."""
FLAGS = tuple(flag for group in GROUPS.values() for flag in group)


def build_parser(description: str) -> Parser:
    """The train script's command line."""
    defaults = all_settings(load(DEFAULTS), Job())
    others = sorted({key for key in defaults if key.startswith("train.")} - {flag.key for flag in FLAGS})
    others += [f"model.{name}" for name in keys(MoEGPTConfig)]
    epilog = textwrap.fill(f"Keys without a flag of their own: {', '.join(others)}", 78, break_on_hyphens=False)
    parser = Parser(description=description, epilog=epilog, formatter_class=formatter)
    add_flags(parser, GROUPS, defaults)
    group = parser.add_argument_group("configuration")
    group.add_argument("--config", metavar="FILE", help=".toml or .py file; flags replace its values (default: none)")
    explained = "any key, such as model.num_layers=6; replaces flags and file (default: none)"
    group.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], help=explained)
    return parser


def configure(arguments: Sequence[str], description: str = "") -> tuple[Config, Job]:
    """The settings of a command line: ``--set`` overrides flags, these ``--config``, this :data:`DEFAULTS`.

    Raises:
        ConfigError: a flag or key is unknown, or a value is not allowed.
        FileNotFoundError: the file of ``--config`` does not exist.
    """
    given, unknown = build_parser(description).parse_known_args(arguments)
    if unknown:
        raise ConfigError(_problem_of_flag(*unknown))
    tree = merge(DEFAULTS, read_file(given.config) if given.config else {})
    tree = merge(tree, flag_settings(given, GROUPS))
    for assignment in given.set:
        key, equals, text = assignment.partition("=")
        if not equals:
            raise ConfigError(f"--set: got {shown(assignment)}, expected KEY=VALUE, such as train.lr=1e-3")
        tree = merge(tree, nested(key, _plain_value(text)))
    tables = {name: tree.pop(name) for name in keys(Job) if name in tree}
    for name, table in tree.items():
        of_script = isinstance(table, Mapping) and table.keys() & {*keys(TrainConfig), *keys(MoEGPTConfig)}
        if of_script and name not in keys(Config) and (meant := nearest(name, keys(Job))):
            raise ConfigError(f"{name}: no such table{meant}")
    return load(tree), build(Job, tables, "")


def _problem_of_flag(given: str, *following: str) -> str:
    """What is wrong with a flag that does not exist, or what to write in its place; ``following`` may be its value."""
    name, equals, text = given.partition("=")
    if not equals:
        text = following[0] if following and not following[0].startswith("--") else "true"
    key = name.lstrip("-").replace("-", "_").lower()
    known = [*(flag.name for flag in FLAGS), "--config", "--set"]
    if f"--{key.replace('_', '-')}" not in known:
        places = {*all_settings(load(DEFAULTS), Job()), *(f"model.{name}" for name in keys(MoEGPTConfig))}
        for place in places & {key, f"train.{key}", f"model.{key}"}:
            return f"{key_name(name)}: no such flag; write --set {place}={text}"
        if advice := key_advice.advice(key, _plain_value(text), load, show=_as_flags):
            return f"{key_name(name)}: {advice}"
    return f"{key_name(name)}: no such flag, expected one of {', '.join(known)}{nearest(name.lower(), known)}"


def _as_flags(tree: Any, path: str = "") -> str:
    """A configuration as arguments of this script."""
    if not isinstance(tree, Mapping):
        wanted = "precision" if path == "precision.mode" else path
        flag = next((flag for flag in FLAGS if flag.key in (wanted, f"{wanted}.size")), None)
        if flag is None or tree is False:
            return f"--set {path}={tree if isinstance(tree, str) else json.dumps(tree)}"
        return flag.name if flag.kind is bool else f"{flag.name} {tree}"
    return " ".join(_as_flags(value, f"{path}.{key}" if path else key) for key, value in tree.items())


def _plain_value(text: str) -> Any:
    """``text`` as a TOML value (number, true, list) if it is one, else as a string."""
    try:
        table = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):  # RecursionError: brackets nested too deep
        return None if text == "None" else text
    return table["value"] if len(table) == 1 else text
