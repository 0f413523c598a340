"""``paramp run``: starts the ranks of a user's own script on this machine."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator, Sequence

from ..base.errors import ConfigError, key_name, nearest
from ..base.values_checked_by_type import user_path
from .flags import LAYOUT

FLAGS = {flag.name: flag for group in LAYOUT.values() for flag in group}
DP = "parallel.data"


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The flags of ``paramp run``, and the script or ``-m MODULE`` with its own arguments.

    The flags may stand before the script and after it; what comes after ``--`` is the script's in any case.

    Raises:
        ConfigError: an unknown flag comes before the script.
    """
    flags: list[str] = []
    script: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        name, equals, _ = argument.partition("=")
        if argument == "--":
            return flags, [*script, *rest]
        if name in FLAGS:
            flags += [argument] if equals or FLAGS[name].kind is bool else [argument, *_next(rest)]
        elif script or not argument.startswith("-"):
            script.append(argument)
        elif argument == "-m":
            script += [argument, *_next(rest)]
        elif argument in ("-h", "--help"):
            flags.append(argument)
        else:
            known = [*FLAGS, "-m"]
            expected = f"expected one of {', '.join(known)}, or the script first, whose own flags follow it"
            raise ConfigError(f"{key_name(argument)}: no such flag, {expected}{nearest(name, known)}")
    return flags, script


def _next(rest: Iterator[str]) -> list[str]:
    return list(itertools.islice(rest, 1))


def run_script(given: argparse.Namespace) -> int:
    """Start the ranks that the layout needs and wait for them. Returns the script's exit code.

    Raises:
        ConfigError: there is no script, or the layout is not possible.
        FileNotFoundError: the script does not exist.
    """
    program = list(given.script)
    if program in ([], ["-m"]):
        raise ConfigError("run: got no script, expected one, such as paramp run train.py --tp 2 --pp 2")
    if program[0] != "-m" and not user_path(program[0]).exists():
        raise FileNotFoundError(f"run: no file {program[0]!r}; expected a script, or -m and a module")
    folder = user_path(program[0])
    if program[0] != "-m" and folder.is_dir() and not (folder / "__main__.py").exists():
        raise ConfigError(f"run: {program[0]!r} is a folder without __main__.py; expected a script, or -m and a module")
    from ..config.files import load
    from ..distributed.local_launcher import start_processes
    from .flags import flag_settings

    ranks = load(flag_settings(given, LAYOUT)).parallel.least_world_size
    values = {flag.key: getattr(given, flag.key) for flag in FLAGS.values()}
    layout = {key: value for key, value in values.items() if value is not None}
    if DP in layout:
        layout[f"{DP}.replicate"] = layout.pop(DP)
    return start_processes([sys.executable, *program], ranks, json.dumps(layout))
