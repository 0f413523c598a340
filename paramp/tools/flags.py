"""The flags of the train script and of ``paramp verify``: a table of flags and the configuration keys they set."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from ..base.errors import ConfigError, one_line


@dataclass(frozen=True)
class Flag:
    """A flag that sets the configuration key ``key``."""

    name: str
    key: str
    kind: Callable[[str], Any]  # bool: the flag takes no value and sets True
    metavar: str | None
    help: str
    unset: str = "none"  # what a default of None means
    choices: Mapping[str, Any] | None = None
    """Allowed values -> the settings they make. None: the configuration checks the value."""


def number_or_word(text: str) -> int | str:
    """``text``, as an integer if it is one."""
    return int(text) if text.lstrip("-").isdigit() else text


EMULATE = "fp16 products by fp32 on CPUs without fp16: auto, on or off"
GROUPS: dict[str, tuple[Flag, ...]] = {
    "layout": (
        Flag("--tp", "parallel.tensor.size", int, "N", "ranks of the tensor axis"),
        Flag("--pp", "parallel.pipeline.size", int, "N", "ranks of the pipeline axis"),
        Flag("--dp", "parallel.data", int, "N", "replicas of the model; auto is world / (tp x pp)"),
        Flag("--fsdp", "parallel.data.shard", int, "N", "data ranks that shard the parameters", "1"),
        Flag("--replicate", "parallel.data.replicate", int, "N", "replicas of the shards", "auto"),
        Flag("--zero", "parallel.zero", int, "STAGE", "1: shard masters and optimizer state over dp"),
        Flag("--sequence-parallel", "parallel.sequence_parallel", bool, None, "shard the sequence over tp in norms"),
    ),
    "pipeline": (
        Flag("--schedule", "parallel.pipeline.schedule", str, "NAME", "order of forwards and backwards"),
        Flag("--stages-per-rank", "parallel.pipeline.stages_per_rank", int, "N", "stages on a rank", "the schedule's"),
        Flag("--microbatches", "parallel.pipeline.microbatches", int, "N", "microbatches of a rank's batch", "as --pp"),
    ),
    "precision": (
        Flag("--precision", "precision", str, "MODE", "such as 32-true, 16-mixed, bf16-mixed, 16-naive, O2"),
        Flag("--optimizer-state", "optimizer_state", str, "HOW", "AdamW's moments between steps: full or bf16", "full"),
        Flag("--norms", "train.norms", str, "KIND", "plain, low-precision or fused"),
        Flag(
            "--emulate-fp16", "emulate_fp16", str, "WHEN", EMULATE, choices={"auto": "auto", "on": True, "off": False}
        ),
    ),
    "model and data": (
        Flag("--model", "train.model", str, "NAME", "preset: tiny, gpt2-124m or gpt2-1.5b"),
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
        Flag(
            "--activation-checkpointing",
            "activation_checkpointing",
            number_or_word,
            "HOW",
            "blocks computed again in the backward: full, selective, or every N-th",
        ),
        Flag("--compile", "compile", bool, None, "compile the repeated blocks and the optimizer step"),
        Flag("--reproducible", "reproducible", bool, None, "the same bits on every layout"),
        Flag("--seed", "seed", int, "N", "seed of weights, dropout and data order"),
        Flag("--eval-every", "train.eval_every", int, "N", "steps between evaluations"),
    ),
    "checkpoints": (
        Flag("--checkpoint-dir", "train.checkpoint_dir", str, "DIR", "where checkpoints go"),
        Flag("--checkpoint-every", "train.checkpoint_every", int, "N", "steps between checkpoints", "the last only"),
        Flag("--resume", "train.resume", str, "CKPT", "checkpoint to resume from; auto: the newest whole one"),
    ),
    "logs": (
        Flag("--log-dir", "train.log_dir", str, "DIR", "where metrics.jsonl, train.log and config.json go"),
        Flag("--tensorboard", "train.tensorboard", bool, None, "also write scalars for TensorBoard"),
    ),
    "diagnosis": (
        Flag("--trace", "train.trace", int, "STEP", "write this step's timeline to the log directory"),
        Flag("--histogram", "train.histogram", int, "STEP", "count this step's gradients by their exponents"),
        Flag("--trace-overflow", "trace_overflow", bool, None, "name the module where a skipped step overflowed"),
    ),
}
"""Group in ``--help`` -> its flags."""
FLAGS = tuple(flag for group in GROUPS.values() for flag in group)


class Parser(argparse.ArgumentParser):
    """Raises a one-line :class:`ConfigError` instead of printing the usage and exiting."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(one_line(message))


def formatter(prog: str) -> argparse.HelpFormatter:
    """A ``--help`` with flag and explanation on one line, and the description without reflowing."""
    return argparse.RawDescriptionHelpFormatter(prog, max_help_position=36)


def add_flags(parser: Parser, defaults: Mapping[str, Any], names: Container[str] | None = None) -> None:
    """Add the flags ``names`` (None: all) to ``parser``, in their groups; ``--help`` shows ``defaults``, by key."""
    for title, flags in GROUPS.items():
        group = parser.add_argument_group(title)  # argparse does not show an empty group
        for flag in flags:
            if names is None or flag.name in names:
                explained = f"{flag.help} (default: {_default(flag, defaults.get(flag.key))})"
                options: dict[str, Any] = {"type": flag.kind, "metavar": flag.metavar, "choices": flag.choices}
                if flag.kind is bool:
                    options = {"action": "store_true", "default": None}
                group.add_argument(flag.name, dest=flag.key, help=explained, **options)


def _default(flag: Flag, value: Any) -> str:
    if value is None:
        return flag.unset
    if flag.kind is bool:
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)


def flag_settings(given: argparse.Namespace) -> dict[str, Any]:
    """The configuration tree that the flags of the command line set."""
    from ..config.files import merge  # which loads torch: a command line is parsed, or refused, without it

    tree: dict[str, Any] = {}
    for flag in FLAGS:
        value = getattr(given, flag.key, None)
        if value is not None:
            tree = merge(tree, nested(flag.key, flag.choices[value] if flag.choices else value))
    return tree


def nested(key: str, value: object) -> dict[str, Any]:
    """``{"a": {"b": value}}`` for the key ``a.b``."""
    first, dot, rest = key.partition(".")
    return {first: nested(rest, value) if dot else value}
