"""``python -m paramp COMMAND``: what can be done beside training."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from ..base.errors import CheckpointError, ConfigError
from ..checkpoint.convert import describe, export_weights, import_weights, inspect
from ..checkpoint.json_codec import encode
from ..config.files import merge
from ..precision.foreign_options import as_dtype
from .doctor import doctor
from .plot import plot
from .verify.launch import verify
from .verify.options import ALGORITHMS, Options


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
    command.add_argument("--json", action="store_true", help="one JSON object, with the keys of paramp/tools/doctor.py")
    command.set_defaults(run=run_doctor)
    command = commands.add_parser("inspect", help="say what is in a checkpoint, and whether it is whole")
    command.add_argument("checkpoint", metavar="CKPT", help="its folder")
    command.add_argument(
        "--json", action="store_true", help="one JSON object, with the keys of paramp/checkpoint/convert.py"
    )
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
    add_verify(
        commands.add_parser("verify", help="compare a model on a layout with itself in one process, layer by layer")
    )
    return parser


LAYOUT = {
    "--tp": (("parallel", "tensor", "size"), int),
    "--pp": (("parallel", "pipeline", "size"), int),
    "--dp": (("parallel", "data"), int),
    "--zero": (("parallel", "zero"), int),
    "--sequence-parallel": (("parallel", "sequence_parallel"), bool),
    "--schedule": (("parallel", "pipeline", "schedule"), str),
    "--stages-per-rank": (("parallel", "pipeline", "stages_per_rank"), int),
    "--microbatches": (("parallel", "pipeline", "microbatches"), int),
    "--precision": (("precision",), str),
    "--seed": (("seed",), int),
}
"""Flag of ``verify`` -> the configuration key it sets, the type of its value."""


def add_verify(command: argparse.ArgumentParser) -> None:
    """The arguments of ``verify``."""
    command.add_argument(
        "model", metavar="MODULE:ATTRIBUTE", help="a model, or a callable that builds it; or FILE.py:..."
    )
    for flag, (path, kind) in LAYOUT.items():
        options: dict[str, Any] = {"action": "store_true", "default": None} if kind is bool else {"type": kind}
        command.add_argument(flag, dest=".".join(path), help=f"sets {'.'.join(path)}", **options)
    command.add_argument("--config", metavar="FILE", help="a .toml or .py file, for all other keys")
    command.add_argument("--plan", metavar="MODULE:NAME", help="for tensor parallelism; default: the model's own")
    command.add_argument("--batches", metavar="MODULE:NAME", help="step -> (inputs, targets); default: random tokens")
    command.add_argument("--criterion", metavar="MODULE:NAME", help="default: the model's .loss, else cross-entropy")
    command.add_argument("--norms", choices=ALGORITHMS, default=Options.norms)
    command.add_argument("--steps", type=int, default=Options.steps)
    command.add_argument("--batch-size", type=int, help="samples a step; default: two a microbatch")
    command.add_argument("--seq-len", type=int, default=Options.seq_len, help="of random tokens")
    command.add_argument("--lr", type=float, default=Options.lr, help="of SGD with momentum")
    command.add_argument("--timeout", type=float, metavar="SECONDS", default=Options.timeout, help="of each run")
    command.add_argument("--tolerance", type=float, metavar="UNITS", help="rounding errors that a layer may be apart")
    command.add_argument("--json", metavar="FILE", help="write all that was found there, too")
    command.set_defaults(run=run_verify)


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


def run_verify(arguments: argparse.Namespace) -> int:
    """Print the comparison; the exit code."""
    given = vars(arguments)
    if arguments.json is not None and not Path(arguments.json).parent.is_dir():
        raise ConfigError(f"--json: no folder {str(Path(arguments.json).parent)!r} to write {arguments.json!r} into")
    if arguments.json is not None and Path(arguments.json).is_dir():
        raise ConfigError(f"--json: {arguments.json!r} is a folder, expected a file")
    settings: dict[str, Any] = {}
    for path, _ in LAYOUT.values():
        if (value := given[".".join(path)]) is not None:
            for part in reversed(path):
                value = {part: value}
            settings = merge(settings, value)
    own = {name: given[name] for name in Options.__dataclass_fields__ if name in given}
    report = verify(Options(**own, settings=settings), arguments.tolerance)
    if isinstance(report, int):
        return report
    print("\n".join(report.lines()))
    if arguments.json is not None:
        Path(arguments.json).write_text(json.dumps(report.as_json(), indent=2) + "\n", encoding="utf-8")
    return 0 if report.ok else 1


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
