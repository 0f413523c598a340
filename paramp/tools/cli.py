"""Inspect machines, check layouts, plot runs and convert checkpoints. `paramp COMMAND --help` explains each command."""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from ..base.errors import CheckpointError, ConfigError
from ..checkpoint.convert import describe, export_weights, import_weights, inspect
from ..checkpoint.json_codec import encode
from ..config.schema import Config, flatten
from ..precision.foreign_options import as_dtype
from .doctor import doctor
from .flags import Parser, add_flags, flag_settings, formatter
from .plot import plot
from .train_config import NORMS
from .verify.launch import verify
from .verify.options import Options

LAYOUT_FLAGS = (
    *("--tp", "--pp", "--dp", "--zero", "--sequence-parallel"),
    *("--schedule", "--stages-per-rank", "--microbatches", "--precision", "--seed"),
)
"""The train script's flags that ``verify`` has too."""
DEFAULT = "(default: %(default)s)"


def build_parser() -> Parser:
    """A parser with a subparser for each command; the parsed arguments have the command's function as ``run``."""
    parser = Parser(prog="paramp", description=__doc__, formatter_class=formatter)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def add_command(run: Callable[[argparse.Namespace], int | None], explained: str) -> Parser:
        name, sentence = run.__name__.removeprefix("run_"), f"{explained.capitalize()}."
        command = commands.add_parser(name, help=explained, description=sentence, formatter_class=formatter)
        command.set_defaults(run=run)
        return command

    command = add_command(run_doctor, "show what runs on this machine, and why the rest does not")
    command.add_argument("--json", action="store_true", help="print one JSON object (default: off)")
    command = add_command(run_plot, "plot the metrics.jsonl of a run, or compare several")
    command.add_argument("log_dirs", metavar="DIR", nargs="+", help="the --log-dir of a run")
    command.add_argument("--out", metavar="FILE", help="the picture (default: metrics.png in the first DIR)")
    explained = "compare a model on a layout with the same model in one process, layer by layer"
    _add_verify_arguments(add_command(run_verify, explained))
    command = add_command(run_inspect, "show the content of a checkpoint, and whether it is complete")
    command.add_argument("checkpoint", metavar="CKPT", help="the checkpoint's folder")
    command.add_argument("--json", action="store_true", help="print one JSON object (default: off)")
    command = add_command(run_export, "write a checkpoint's weights to one safetensors file")
    command.add_argument("checkpoint", metavar="CKPT", help="the checkpoint's folder")
    command.add_argument("--to", metavar="FILE", required=True, help="file to write, such as model.safetensors")
    command.add_argument("--dtype", metavar="DTYPE", default="fp32", help="fp32, fp16, bf16 or stored (default: fp32)")
    command = add_command(run_import, "make a checkpoint from the weights of a safetensors file")
    command.add_argument("file", metavar="FILE", help="a .safetensors file")
    command.add_argument("--to", metavar="CKPT", required=True, help="the checkpoint folder to make")
    return parser


def run_doctor(given: argparse.Namespace) -> None:
    """Print the report on this machine."""
    print(doctor(as_json=given.json))


def run_plot(given: argparse.Namespace) -> None:
    """Plot, and print the path of the picture."""
    print(plot(given.log_dirs, given.out))


def run_inspect(given: argparse.Namespace) -> int:
    """Print the content of the checkpoint; returns 1 if it is damaged."""
    found = inspect(given.checkpoint)
    print(json.dumps(encode(found), indent=1) if given.json else describe(found))
    return 1 if found["damage"] else 0


def run_export(given: argparse.Namespace) -> None:
    """Export, and print the path of the file."""
    dtype = None if given.dtype == "stored" else as_dtype("--dtype", given.dtype)
    print(export_weights(given.checkpoint, given.to, dtype))


def run_import(given: argparse.Namespace) -> None:
    """Import, and print the path of the checkpoint."""
    print(import_weights(given.file, given.to))


def _add_verify_arguments(command: Parser) -> None:
    command.add_argument("model", metavar="MODULE:NAME", help="a model, or a callable that builds it; or FILE.py:NAME")
    add_flags(command, flatten(Config()), LAYOUT_FLAGS)
    group = command.add_argument_group("model and data")
    for flag, explained in (
        ("--plan", "plan of tensor parallelism (default: the model's own)"),
        ("--batches", "step -> (inputs, targets) (default: random tokens)"),
        ("--criterion", "loss (default: the model's .loss, else cross-entropy)"),
    ):
        group.add_argument(flag, metavar="MODULE:NAME", help=explained)
    group.add_argument(
        "--norms", choices=NORMS, metavar="KIND", default=Options.norms, help=f"{', '.join(NORMS)} {DEFAULT}"
    )
    for flag, kind, metavar, explained in (
        ("--seq-len", int, "N", f"tokens of a random sequence {DEFAULT}"),
        ("--batch-size", int, "N", "samples of a step (default: two a microbatch)"),
        ("--steps", int, "N", f"optimizer steps {DEFAULT}"),
        ("--lr", float, "X", f"learning rate of SGD with momentum {DEFAULT}"),
        ("--timeout", float, "SECONDS", f"limit of each run {DEFAULT}"),
        ("--tolerance", float, "UNITS", "rounding errors that a layer may differ (default: the mode's)"),
    ):
        default = getattr(Options, flag[2:].replace("-", "_"), None)
        group.add_argument(flag, type=kind, metavar=metavar, default=default, help=explained)
    group = command.add_argument_group("configuration and output")
    group.add_argument("--config", metavar="FILE", help=".toml or .py file, for all other keys (default: none)")
    group.add_argument("--json", metavar="FILE", help="write the whole comparison there (default: nowhere)")


def run_verify(given: argparse.Namespace) -> int:
    """Print the comparison; returns 1 if the layout diverges."""
    out = None if given.json is None else Path(given.json)
    if out and not out.parent.is_dir():
        raise ConfigError(f"--json: no folder {str(out.parent)!r} to write {given.json!r} into")
    if out and out.is_dir():
        raise ConfigError(f"--json: {given.json!r} is a folder, expected a file")
    own = {name: value for name, value in vars(given).items() if name in Options.__dataclass_fields__}
    report = verify(Options(**own, settings=flag_settings(given)), given.tolerance)
    if isinstance(report, int):
        return report
    print("\n".join(report.lines()))
    if out:
        out.write_text(json.dumps(report.as_json(), indent=2) + "\n", encoding="utf-8")
    return 0 if report.ok else 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command in ``arguments`` (None: ``sys.argv``); returns the exit code."""
    try:
        given = build_parser().parse_args(arguments)
        return given.run(given) or 0
    except (CheckpointError, ConfigError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
