"""Start ranks, inspect machines, check layouts, show runs, convert checkpoints.

`paramp COMMAND --help` explains each command.
"""

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence

from ..base.errors import CheckpointError, ConfigError
from ..base.values_checked_by_type import user_path
from .flags import Parser, formatter

# Other imports are in the functions that need them: help that lists the commands shows before torch has loaded.

DEFAULT = "(default: %(default)s)"


def build_parser(given: str | None) -> Parser:
    """A parser with a subparser for each command; the parsed arguments have the command's function as ``run``.

    Only the command ``given`` has its arguments.
    """
    parser = Parser(prog="paramp", description=__doc__, formatter_class=formatter)
    version = f"paramp {importlib.import_module('paramp').__version__}"
    parser.add_argument("--version", action="version", version=version, help="print paramp's version")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, (run, add_arguments, explained) in COMMANDS.items():
        sentence = f"{explained.capitalize()}."
        command = commands.add_parser(name, help=explained, description=sentence, formatter_class=formatter)
        command.set_defaults(run=run)
        if name == given:
            add_arguments(command)
    return parser


def _add_doctor_arguments(command: Parser) -> None:
    command.add_argument("--json", action="store_true", help="print one JSON object (default: off)")


def _add_plot_arguments(command: Parser) -> None:
    command.add_argument("log_dirs", metavar="DIR", nargs="+", help="the --log-dir of a run")
    command.add_argument("--out", metavar="FILE", help="the picture (default: metrics.png in the first DIR)")


def _add_report_arguments(command: Parser) -> None:
    command.add_argument("folder", metavar="RUN", help="the folder of a run: --log-dir, or that of paramp.Metrics")
    explained = "write it every N seconds, or 10, until the run ends; the browser follows (default: once)"
    command.add_argument("--live", metavar="N", nargs="?", type=float, const=10.0, help=explained)


def _add_inspect_arguments(command: Parser) -> None:
    command.add_argument("checkpoint", metavar="CKPT", help="the checkpoint's folder, or a folder of checkpoints")
    command.add_argument("--json", action="store_true", help="print one JSON object (default: off)")


def _add_export_arguments(command: Parser) -> None:
    command.add_argument("checkpoint", metavar="CKPT", help="the checkpoint's folder")
    command.add_argument("--to", metavar="FILE", required=True, help="file to write, such as model.safetensors")
    command.add_argument("--dtype", metavar="DTYPE", default="fp32", help="fp32, fp16, bf16 or stored (default: fp32)")


def _add_import_arguments(command: Parser) -> None:
    command.add_argument("file", metavar="FILE", help="a .safetensors file")
    command.add_argument("--to", metavar="CKPT", required=True, help="the checkpoint folder to make")


def run_doctor(given: argparse.Namespace) -> None:
    """Print the report on this machine."""
    from .doctor import doctor

    print(doctor(as_json=given.json))


def run_plot(given: argparse.Namespace) -> None:
    """Plot, and print the path of the picture."""
    from .plot import plot

    print(plot(given.log_dirs, given.out))


def run_report(given: argparse.Namespace) -> None:
    """Write the page, and print its path; with ``--live`` again and again, until the run ends or Ctrl-C."""
    from .report.run_page import finish, report

    try:
        for count, path in enumerate(report(given.folder, given.live)):
            if not count:
                print(path, flush=True)
    except KeyboardInterrupt:
        finish(given.folder)


def run_inspect(given: argparse.Namespace) -> int:
    """Print the content of the checkpoint, or a list of those in the folder; returns 1 if one is damaged."""
    import json

    from ..checkpoint.convert import describe, inspect
    from ..checkpoint.json_codec import encode

    found = inspect(given.checkpoint)
    print(json.dumps(encode(found), indent=1) if given.json else describe(found))
    return 1 if found["damage"] else 0


def run_export(given: argparse.Namespace) -> None:
    """Export, and print the path of the file."""
    from ..checkpoint.convert import export_weights
    from ..precision.modes import as_dtype

    dtype = None if given.dtype == "stored" else as_dtype("--dtype", given.dtype)
    print(export_weights(given.checkpoint, given.to, dtype))


def run_import(given: argparse.Namespace) -> None:
    """Import, and print the path of the checkpoint."""
    from ..checkpoint.convert import import_weights

    print(import_weights(given.file, given.to))


def _add_verify_arguments(command: Parser) -> None:
    from ..config.schema import Config, flatten
    from .flags import add_flags
    from .verify.options import FLAGS, NORMS, Options

    command.add_argument("model", metavar="MODULE:NAME", help="a model, or a callable that builds it; or FILE.py:NAME")
    add_flags(command, FLAGS, flatten(Config()))
    group = command.add_argument_group("model and data")
    for flag, explained in (
        ("--plan", "plan of tensor parallelism (default: the model's own)"),
        ("--batches", "step -> (inputs, target), or a mapping of keyword inputs (default: random tokens)"),
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
        ("--lr", float, "X", "learning rate (default: 0.1 of SGD; --exact: 0.001 of AdamW)"),
        ("--timeout", float, "SECONDS", f"limit of each run {DEFAULT}"),
        ("--tolerance", float, "TIMES", "how many times as far apart as by rounding values may be (default: 4)"),
    ):
        default = getattr(Options, flag[2:].replace("-", "_"), None)
        group.add_argument(flag, type=kind, metavar=metavar, default=default, help=explained)
    explained = "train with reproducible, compare every bit, name the first tensor that differs (default: off)"
    group.add_argument("--exact", action="store_true", help=explained)
    group = command.add_argument_group("configuration and output")
    group.add_argument("--config", metavar="FILE", help=".toml or .py file, for all other keys (default: none)")
    group.add_argument("--json", metavar="FILE", help="write the whole comparison there (default: nowhere)")


def run_verify(given: argparse.Namespace) -> int:
    """Print the comparison; returns 1 if the layout diverges."""
    import json

    from .flags import flag_settings
    from .verify.options import FLAGS, Options
    from .verify.two_runs import verify

    out = None if given.json is None else user_path(given.json)
    if out and not out.parent.is_dir():
        raise ConfigError(f"--json: no folder {str(out.parent)!r} to write {given.json!r} into")
    if out and out.is_dir():
        raise ConfigError(f"--json: {given.json!r} is a folder, expected a file")
    own = {name: value for name, value in vars(given).items() if name in Options.__dataclass_fields__}
    report = verify(Options(**own, settings=flag_settings(given, FLAGS)), given.tolerance)
    if isinstance(report, int):
        return report
    print("\n".join(report.lines()))
    if out:
        out.write_text(json.dumps(report.as_json(), indent=2) + "\n", encoding="utf-8")
    return 0 if report.ok else 1


def _add_run_arguments(command: Parser) -> None:
    from ..config.schema import Config, flatten
    from .flags import LAYOUT, add_flags

    command.usage = (
        "paramp run [FLAGS] SCRIPT [FLAGS] [ARGUMENTS] [-- ARGUMENTS]\n       paramp run [FLAGS] -m MODULE ..."
    )
    add_flags(command, LAYOUT, flatten(Config()))
    explained = "the script, or -m MODULE, and its own arguments; after -- none is a flag of this command"
    command.add_argument("script", metavar="SCRIPT", nargs=argparse.REMAINDER, help=explained)


def run_run(given: argparse.Namespace) -> int:
    """Start the ranks of a script; returns its exit code."""
    from .run_script import run_script

    return run_script(given)


Command = tuple[Callable[[argparse.Namespace], int | None], Callable[[Parser], None], str]
COMMANDS: dict[str, Command] = {
    "run": (run_run, _add_run_arguments, "start the ranks of a script of one's own on this machine"),
    "doctor": (run_doctor, _add_doctor_arguments, "show what runs on this machine, and why the rest does not"),
    "report": (run_report, _add_report_arguments, "write the page of a run, one file that a browser shows"),
    "plot": (run_plot, _add_plot_arguments, "plot the metrics.jsonl of a run, or compare several"),
    "verify": (
        run_verify,
        _add_verify_arguments,
        "compare a model on a layout with the same model in one process, layer by layer",
    ),
    "inspect": (
        run_inspect,
        _add_inspect_arguments,
        "show a checkpoint, or list a folder of them, and what is damaged",
    ),
    "export": (run_export, _add_export_arguments, "write a checkpoint's weights to one safetensors file"),
    "import": (run_import, _add_import_arguments, "make a checkpoint from the weights of a safetensors file"),
}
"""What a command runs, what adds its arguments to its parser, and its line in the help."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command in ``arguments`` (None: ``sys.argv``); without one, print the help. Returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = build_parser(arguments[0] if arguments else None)
    if not arguments:
        parser.print_help()
        return 0
    try:
        if arguments[0] == "run":
            from .run_script import split_arguments

            flags, script = split_arguments(arguments[1:])
            given = parser.parse_args(["run", *flags])
            given.script = script
        else:
            given = parser.parse_args(arguments)
        return given.run(given) or 0
    except (CheckpointError, ConfigError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
