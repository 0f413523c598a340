"""Random numbers that are independent or equal over the tensor axis.

Along it an activation is either replicated, and its dropout mask must be equal on all ranks, or sharded, and the ranks'
masks must be independent: :func:`sharded_random` wraps the modules that work on shards (Shoeybi et al. 2019, section
3).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..base.uncompiled import unwatched
from .rng import derive_seed, forked

Place = tuple[int, int, torch.device]
"""Rank and size of the tensor axis, and the device."""

TENSOR_PLACES: list[Place] = []
"""Those of each open context; the last one is in use where a model does not know its own."""

KEPT_PLACE = "tensor_place"
"""The attribute, a :data:`Place` or None, of modules that enter :func:`sharded_random` by themselves."""


def place_on(mesh: DeviceMesh) -> Place:
    """The place of this rank on ``mesh``, the tensor axis."""
    is_gpu = mesh.device_type == "cuda"
    device = torch.device("cuda", torch.cuda.current_device()) if is_gpu else torch.device(mesh.device_type)
    return mesh.get_local_rank(), mesh.size(), device


def keep_place(module: nn.Module, mesh: DeviceMesh) -> None:
    """Give the modules in ``module`` that keep a place this rank's on ``mesh``, the tensor axis."""
    for part in module.modules():
        if hasattr(part, KEPT_PLACE):
            setattr(part, KEPT_PLACE, place_on(mesh))


@contextmanager
def sharded_random(place: Place | None = None) -> Iterator[None]:
    """A context in which random numbers differ over the tensor axis, for dropout on a sharded activation.

    The stream's seed is drawn from the current stream, so that activation checkpointing, which restores the current
    stream, draws the same mask again. Without a tensor axis nothing changes. ``place``: on the model's tensor axis;
    None: on that of the latest context.
    """
    rank, size, device = place or (TENSOR_PLACES[-1] if TENSOR_PLACES else (0, 1, torch.device("cpu")))
    if size == 1:
        with _within(True):
            yield
        return
    with unwatched():  # not a draw of the model
        common = int(torch.randint(2**62, ()))
    with forked(device) as seed:
        seed(derive_seed(common, rank))
        COMMON.append((itertools.count(common), device))
        try:
            with _within(True):
                yield
        finally:
            COMMON.pop()


COMMON: list[tuple[Iterator[int], torch.device]] = []
"""For each active :func:`sharded_random`, seeds that are equal over the tensor axis, and its device."""


@contextmanager
def replicated_random() -> Iterator[None]:
    """A context within :func:`sharded_random` in which random numbers are equal over the tensor axis again.

    For dropout on a replicated activation. Outside of :func:`sharded_random` nothing changes.
    """
    if not COMMON:
        with _within(False):
            yield
        return
    seeds, device = COMMON[-1]
    with forked(device) as seed, _within(False):
        seed(derive_seed(next(seeds), "replicated"))
        yield


SHARDED: list[bool] = []
"""For each open :func:`sharded_random` True, for each :func:`replicated_random` False, with one tensor rank too."""


def in_sharded_random() -> bool:
    """Whether the innermost of :func:`sharded_random` and :func:`replicated_random` is the first."""
    return bool(SHARDED) and SHARDED[-1]


def in_replicated_random() -> bool:
    """Whether it is the second."""
    return bool(SHARDED) and not SHARDED[-1]


@contextmanager
def _within(sharded: bool) -> Iterator[None]:
    if torch.compiler.is_compiling():  # nobody asks there, and the graph would break
        yield
        return
    SHARDED.append(sharded)
    try:
        yield
    finally:
        SHARDED.pop()
