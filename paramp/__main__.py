"""``python -m paramp COMMAND``: what can be done with a run beside training it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from .doctor import doctor
from .plot import plot
from .precision import ConfigError


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
    return parser


def run_plot(arguments: argparse.Namespace) -> None:
    """Draw, and print where."""
    print(plot(arguments.log_dirs, arguments.out))


def run_doctor(arguments: argparse.Namespace) -> None:
    """Print what was found."""
    print(doctor(as_json=arguments.json))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command in ``arguments`` (None: the process's own); the exit code."""
    try:
        given = build_parser().parse_args(arguments)
        given.run(given)
    except (ConfigError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
