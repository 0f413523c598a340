"""Flags that set configuration keys, as tables: those of the layout and the mode, which several commands have."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias

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


Groups: TypeAlias = Mapping[str, tuple[Flag, ...]]
"""Group in ``--help`` -> its flags."""

LAYOUT: Groups = {
    "layout": (
        Flag("--tp", "parallel.tensor.size", int, "N", "ranks of the tensor axis"),
        Flag("--pp", "parallel.pipeline.size", int, "N", "ranks of the pipeline axis"),
        Flag("--dp", "parallel.data", int, "N", "replicas of the model; auto is world / (tp x pp x cp)"),
        Flag("--fsdp", "parallel.data.shard", int, "N", "data ranks that shard the parameters", "1"),
        Flag("--replicate", "parallel.data.replicate", int, "N", "replicas of the shards", "auto"),
        Flag("--ep", "parallel.expert", int, "N", "data ranks that share the experts of each mixture"),
        Flag("--cp", "parallel.context.size", int, "N", "ranks that share each sequence"),
        Flag("--zero", "parallel.zero", int, "STAGE", "1: shard masters and optimizer state over dp"),
        Flag("--sequence-parallel", "parallel.sequence_parallel", bool, None, "shard the sequence over tp in norms"),
    ),
    "pipeline": (
        Flag("--schedule", "parallel.pipeline.schedule", str, "NAME", "order of forwards and backwards"),
        Flag("--stages-per-rank", "parallel.pipeline.stages_per_rank", int, "N", "stages on a rank", "the schedule's"),
        Flag("--microbatches", "parallel.pipeline.microbatches", int, "N", "microbatches of a rank's batch", "as --pp"),
    ),
}
"""The flags of every command that starts ranks."""
PRECISION = (
    Flag("--precision", "precision", str, "MODE", "such as 32-true, 16-mixed, bf16-mixed, 16-naive, O2"),
    Flag("--init-scale", "precision.init_scale", float, "X", "first loss scale, of a mode that scales", "the mode's"),
)
SEED = Flag("--seed", "seed", int, "N", "seed of weights, dropout and data order")


class Parser(argparse.ArgumentParser):
    """Raises a one-line :class:`ConfigError` instead of printing the usage and exiting."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(one_line(message))


def formatter(prog: str) -> argparse.HelpFormatter:
    """A ``--help`` with flag and explanation on one line, and the description without reflowing."""
    return argparse.RawDescriptionHelpFormatter(prog, max_help_position=36)


def add_flags(parser: Parser, groups: Groups, defaults: Mapping[str, Any]) -> None:
    """Add the flags of ``groups`` to ``parser``; ``--help`` shows ``defaults``, by key."""
    for title, flags in groups.items():
        group = parser.add_argument_group(title)
        for flag in flags:
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


def flag_settings(given: argparse.Namespace, groups: Groups) -> dict[str, Any]:
    """The configuration tree that the flags of ``groups`` set on a command line."""
    from ..config.files import merge  # which loads torch: a command line is parsed, or refused, without it

    tree: dict[str, Any] = {}
    for flag in itertools.chain.from_iterable(groups.values()):
        value = getattr(given, flag.key)
        if value is not None:
            tree = merge(tree, nested(flag.key, flag.choices[value] if flag.choices else value))
    return tree


def nested(key: str, value: object) -> dict[str, Any]:
    """``{"a": {"b": value}}`` for the key ``a.b``."""
    first, dot, rest = key.partition(".")
    return {first: nested(rest, value) if dot else value}
