"""The trace of one rank: every tensor of its steps, in files, so that memory does not limit how many there are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from ...base import loop_block_sizes

KINDS = (
    *("forward", "loss", "backward", "weight gradient", "gradient", "norm", "decision"),
    *("master", "optimizer state", "weight"),
)
"""What is compared, in the order in which a step computes it: the output of a module; the loss of a microbatch, or of a
call; the gradient of a module's output; the gradient of a weight by one microbatch, and by all; the gradient norm;
whether the step is skipped, and the loss scale; then what the step changes."""
OF_MODULES = ("forward", "backward")
"""The kinds whose names are modules'."""


@dataclass(frozen=True, kw_only=True)
class Key:
    """What a tensor is, in both runs."""

    step: int
    """From 1."""
    kind: str
    """One of :data:`KINDS`."""
    name: str
    """Of the module or the parameter; of optimizer state with its key at the end."""
    call: int = 0
    """The index of the call of ``forward_backward`` in the step."""
    microbatch: int | None = None
    """Its index in the call, over all data ranks; None for what all of them make."""
    index: tuple[int, int] = (0, 0)
    """Of the module's calls in this microbatch, and of the tensors in its output."""


@dataclass(frozen=True)
class Entry:
    """A tensor that a rank has."""

    key: Key
    values: torch.Tensor
    offsets: tuple[int, ...] | None = None
    """Where they are in the whole tensor; None if that is not known, or they are all of it."""
    partial: bool = False
    """Whether the whole tensor is the sum over tensor ranks."""


class TraceWriter:
    """Writes the entries of one rank to files, numbered after their common ``path``."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._held: list[dict[str, object]] = []
        self._bytes = self._num_files = 0

    def add(
        self, key: Key, values: torch.Tensor, offsets: Sequence[int] | None = None, *, partial: bool = False
    ) -> None:
        """Copy ``values``, a plain tensor, and write them later."""
        copied = values.detach().to("cpu", copy=True)
        place = None if offsets is None else tuple(offsets)
        self._held.append({"key": asdict(key), "values": copied, "offsets": place, "partial": partial})
        self._bytes += copied.nbytes
        if self._bytes >= loop_block_sizes.TRACE_FILE:
            self.close()

    def close(self) -> None:
        """Write what is held."""
        torch.save(self._held, _file(self._path, self._num_files))
        self._held, self._bytes, self._num_files = [], 0, self._num_files + 1


def read(path: Path) -> Iterator[Entry]:
    """The entries of a trace, in their order. Their tensors stay in the files until they are used."""
    number = 0
    while (file := _file(path, number)).exists():
        for entry in torch.load(file, weights_only=True, mmap=True):
            yield Entry(Key(**entry.pop("key")), **entry)
        number += 1


def _file(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}-{number}.pt")
