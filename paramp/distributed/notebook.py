"""Ranks for a function of a notebook: ``paramp.notebook(train, ranks=4)``.

The ranks are new processes, started as ``paramp run`` starts those of a script. They get the function by value
(cloudpickle), because a process that is not the notebook's cannot import what is defined in it. Nothing is forked, so
the notebook may have used CUDA before.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ..base.errors import ConfigError, LaunchError, one_line, require
from ..base.installed_packages import check_installed
from ..base.values_checked_by_type import is_integer
from .first_failure import give_launcher, is_echo, is_lost_connection
from .local_launcher import start_processes

Value = TypeVar("Value")


class RankTraceback(Exception):
    """The traceback of a rank, as the cause of its error in the notebook."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def notebook(fn: Callable[..., Value], *args: Any, ranks: int) -> Value:
    """Call ``fn(*args)`` on new processes of this machine, the ranks of one world, and wait for them.

    In ``fn`` call :func:`paramp.launch_from_torch`, as a script does under torchrun. What the ranks print appears in
    the notebook. It works in any interactive session, and in scripts.

    Args:
        fn: may be defined in the notebook, and use its imports, functions, classes and variables: ranks get copies.
        ranks: the number of processes; each gets a GPU of its own if there are as many.

    Returns:
        What ``fn`` returned on rank 0. It is sent by pickle, so return small things, and tensors on the CPU.

    Raises:
        ConfigError: cloudpickle is not installed, ``ranks`` is not 1 or more, or ``fn`` or ``args`` cannot be pickled.
        Exception: what the first rank that failed has raised, with that rank's traceback as its cause.
        LaunchError: a rank was ended, or its error or value cannot be pickled.
        KeyboardInterrupt: the notebook was interrupted, and the ranks get SIGTERM and 30 seconds to end; or a rank was.
    """
    require(is_integer(ranks) and ranks >= 1, "ranks", ranks, "an integer of 1 or more")
    require(callable(fn), "fn", fn, "a function, which each rank calls")
    check_installed("cloudpickle", "notebook", "notebook")
    with tempfile.TemporaryDirectory(prefix="paramp-notebook-") as name:
        folder = Path(name)
        _write(
            folder / "call",
            (fn, args),
            "fn or its arguments cannot be sent to the ranks; create inside fn what is in the way",
        )
        # The ranks import what the notebook can import, which ignores what is no text.
        places = [place for place in sys.path if isinstance(place, str)]
        program = f"import sys; sys.path[:] = {places!r}; from {__name__} import call_on_rank; call_on_rank({name!r})"
        sys.stdout.flush()
        unreported: list[str] = []
        try:
            code = start_processes([sys.executable, "-c", program], ranks, unreported=unreported.append)
        except SystemExit as stopped:
            raise KeyboardInterrupt from stopped
        if code:
            _raise_error_of_rank(folder, ranks, unreported)
        if not (folder / "value").exists():
            raise LaunchError("notebook: rank 0 ended without returning from fn, as by sys.exit()")
        value: Value = pickle.loads((folder / "value").read_bytes())
        return value


def _write(path: Path, value: Any, problem: str) -> None:
    """Pickle ``value`` to a file; a ConfigError that begins with ``problem`` if it cannot be pickled."""
    import cloudpickle  # type: ignore[import-untyped]

    try:
        content = cloudpickle.dumps(value)
    except Exception as error:
        raise ConfigError(f"notebook: {problem}: {type(error).__name__}: {one_line(str(error))}") from error
    path.write_bytes(content)


def _raise_error_of_rank(folder: Path, ranks: int, unreported: Sequence[str]) -> None:
    """Raise the error that a rank has written; that of a rank that another one made fail comes last.

    ``unreported``: how a rank ended that has written none.
    """
    found = []
    for rank in range(ranks):
        path = folder / f"error-{rank}"
        if path.exists():
            echo, message, text, pickled = pickle.loads(path.read_bytes())
            found.append((echo, path.stat().st_mtime_ns, rank, message, text, pickled))
    if not found or (unreported and all(echo for echo, *_ in found)):
        how = unreported[0] if unreported else "a rank ended itself"  # as the heartbeat does where another one hangs
        raise LaunchError(f"notebook: {how} without an exception; its output says more")
    _, _, rank, message, text, pickled = min(found)
    error: BaseException = LaunchError(f"rank {rank} failed: {message}")
    if pickled is not None:
        error = pickle.loads(pickled)
    raise error from RankTraceback(f"rank {rank} of {ranks}:\n{text}")


def call_on_rank(folder: str) -> None:
    """Call the function in ``folder`` on this rank, and write its value or its error there. It ends the process."""
    place, rank = Path(folder), int(os.environ["RANK"])
    try:
        fn, args = pickle.loads((place / "call").read_bytes())
        value = fn(*args)
        if rank == 0:
            _write(place / "value", value, "what fn returned on rank 0 cannot be sent back; return something else")
    except SystemExit:
        raise
    except BaseException as error:
        _write_error(place / f"error-{rank}", error)
        give_launcher(f"{type(error).__name__}: {error}")
        sys.exit(1)


def _write_error(path: Path, error: BaseException) -> None:
    frames = traceback.format_exception(error.with_traceback(_user_frames(error)))
    pickled: bytes | None = None
    with contextlib.suppress(Exception):  # as of an exception whose arguments are not those of its class
        import cloudpickle

        attempt: bytes = cloudpickle.dumps(error)
        pickle.loads(attempt)
        pickled = attempt
    message = f"{type(error).__name__}: {error}"
    echo = is_echo(error) or is_lost_connection(error)
    path.write_bytes(pickle.dumps((echo, message, "".join(frames), pickled)))


def _user_frames(error: BaseException) -> Any:
    """The traceback of ``error`` without the frame of :func:`call_on_rank`."""
    return error.__traceback__ and (error.__traceback__.tb_next or error.__traceback__)
