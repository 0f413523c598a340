"""Where a rank is in its program, on a slate that the other processes of its machine can read.

What a rank tells the others by messages is as old as its last message. A slate is a few bytes of shared memory: it
shows the very place in which a process was stopped, and writing it takes less than a microsecond.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import tempfile
from pathlib import Path
from typing import NamedTuple

__all__ = ["SETUP", "ProgressRecord", "Where"]


class Where(NamedTuple):
    """A place in the program."""

    phase: str
    """``setup``, ``data``, ``forward``, ``loss``, ``backward``, ``step``, ``evaluation``, ``checkpoint``, ..."""
    inside: bool = True
    """False: that phase has ended, and no other has begun."""
    stage: int | None = None
    microbatch: int | None = None
    step: int = 1
    """Which call of the engine's ``step``."""

    def __str__(self) -> str:
        preposition = "in" if self.inside else "after"
        microbatch = "" if self.microbatch is None else f" of microbatch {self.microbatch}"
        stage = "" if self.stage is None else f", stage {self.stage}"
        return f"{preposition} {self.phase}{microbatch}{stage}, step {self.step}"


SETUP = Where("setup")
"""Before the first phase that the program tells."""
RECORD = struct.Struct("=32s?qqqq")
"""The phase, whether inside, the stage and the microbatch (-1 where there is none), the step; phases ended in it."""


class ProgressRecord:
    """One rank's place, and the number of phases that have ended in this step."""

    def __init__(self, memory: mmap.mmap | bytearray) -> None:
        self._memory = memory

    @staticmethod
    def path(launch: str, rank: int) -> Path:
        """Where the slate of ``rank`` is, in the launch of that name."""
        folder = Path("/dev/shm")
        return (folder if os.access(folder, os.W_OK) else Path(tempfile.gettempdir())) / f"paramp-{launch}-{rank}"

    @staticmethod
    def create(path: Path) -> ProgressRecord:
        """A slate at ``path``, which is new; one that nobody else can read where there is no place for a file."""
        try:
            descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW, 0o600)
            with open(descriptor, "r+b") as file:
                file.truncate(RECORD.size)
                record = ProgressRecord(mmap.mmap(file.fileno(), RECORD.size))
        except OSError:
            record = ProgressRecord(bytearray(RECORD.size))
        record.write(SETUP, 0)
        return record

    @staticmethod
    def find(path: Path) -> ProgressRecord | None:
        """The slate at ``path``; None where there is none, as for a rank of another machine."""
        with contextlib.suppress(OSError, ValueError), path.open("rb") as file:
            return ProgressRecord(mmap.mmap(file.fileno(), RECORD.size, access=mmap.ACCESS_READ))
        return None

    def write(self, where: Where, done: int) -> None:
        """Replace what is written."""
        phase, inside, stage, microbatch, step = where
        RECORD.pack_into(
            self._memory,
            0,
            phase.encode(),
            inside,
            -1 if stage is None else stage,
            -1 if microbatch is None else microbatch,
            step,
            done,
        )

    def read(self) -> tuple[Where, int]:
        """What is written."""
        phase, inside, stage, microbatch, step, done = RECORD.unpack_from(self._memory)
        name = phase.rstrip(b"\0").decode(errors="replace")
        return Where(name, inside, None if stage < 0 else stage, None if microbatch < 0 else microbatch, step), done
