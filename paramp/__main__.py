"""``python -m paramp COMMAND``: what can be done with a run beside training it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import NoReturn

from .doctor import doctor
from .encoding import encode
from .errors import CheckpointError
from .exchange import describe, export_weights, import_weights, inspect
from .plot import plot
from .precision import ConfigError
from .spellings import as_dtype


class Parser(argparse.ArgumentParser):
    """One line for a mistake, where argparse prints the usage as well."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{self.prog}: {message}")


def build_parser() -> Parser:
    """A subparser for each command; its ``run`` takes the arguments and does the work."""
    parser = Parser(prog="python -m paramp", description=__doc__)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    command = commands.add_parser("plot", help="draw a run's metrics.jsonl, or several for comparison")
    command.add_argument("log_dirs", metavar="LOGDIR", nargs="+", help="the --log-dir of a run")
    command.add_argument("--out", metavar="FILE", help="default: metrics.png in the first LOGDIR")
    command.set_defaults(run=run_plot)
    command = commands.add_parser("doctor", help="say what of paramp runs on this machine, and why the rest does not")
    command.add_argument("--json", action="store_true", help="one JSON object, with the keys of paramp/doctor.py")
    command.set_defaults(run=run_doctor)
    command = commands.add_parser("inspect", help="say what is in a checkpoint, and whether it is whole")
    command.add_argument("checkpoint", metavar="CKPT", help="its folder")
    command.add_argument("--json", action="store_true", help="one JSON object, with the keys of paramp/exchange.py")
    command.set_defaults(run=run_inspect)
    command = commands.add_parser("export", help="write a checkpoint's weights to one safetensors file")
    command.add_argument("checkpoint", metavar="CKPT", help="its folder")
    command.add_argument("--to", metavar="FILE", required=True, help="such as model.safetensors")
    command.add_argument("--dtype", default="fp32", help="fp32 (the default), fp16, bf16, or stored: as they are there")
    command.set_defaults(run=run_export)
    command = commands.add_parser("import", help="make a checkpoint of a safetensors file's weights")
    command.add_argument("file", metavar="FILE", help="a .safetensors file")
    command.add_argument("--to", metavar="CKPT", required=True, help="the folder to make")
    command.set_defaults(run=run_import)
    return parser


def run_plot(arguments: argparse.Namespace) -> None:
    """Draw, and print where."""
    print(plot(arguments.log_dirs, arguments.out))


def run_doctor(arguments: argparse.Namespace) -> None:
    """Print what was found."""
    print(doctor(as_json=arguments.json))


def run_inspect(arguments: argparse.Namespace) -> int:
    """Print what was found; 1 if the checkpoint is damaged."""
    found = inspect(arguments.checkpoint)
    print(json.dumps(encode(found), indent=1) if arguments.json else describe(found))
    return 1 if found["damage"] else 0


def run_export(arguments: argparse.Namespace) -> None:
    """Export, and print where to."""
    dtype = None if arguments.dtype == "stored" else as_dtype("--dtype", arguments.dtype)
    print(export_weights(arguments.checkpoint, arguments.to, dtype))


def run_import(arguments: argparse.Namespace) -> None:
    """Import, and print where to."""
    print(import_weights(arguments.file, arguments.to))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command in ``arguments`` (None: the process's own); the exit code."""
    try:
        given = build_parser().parse_args(arguments)
        return given.run(given) or 0
    except (CheckpointError, ConfigError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
