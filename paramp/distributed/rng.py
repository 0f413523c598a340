"""Random streams: the same parameters in every layout, and dropout masks that are equal or independent over ranks.

Parameters: every tensor is drawn in full from a seed made of the run's seed and the parameter's name, then sharded, so
that a model starts the same in every layout (:mod:`paramp.parallel.materialize` does this for models on ``meta``).

Dropout: pipeline and data ranks draw from different streams (:class:`RandomStream`). Along the tensor axis an
activation is either replicated, and its mask must be equal on all ranks, or sharded, and the ranks' masks must be
independent: :func:`sharded_random` wraps the modules that work on shards (Shoeybi et al. 2019, section 3).
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from ..base.torch_internals import expect

expect("torch._C.DisableTorchFunction")


def derive_seed(*parts: object) -> int:
    """A seed of 63 bits from ``parts`` (ints and strings): a hash, so that nearby parts give unrelated seeds."""
    text = "\x1f".join(map(str, parts))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


class RandomStream:
    """A separate stream of random numbers. Inside this context it replaces torch's default stream.

    A pipeline stage enters it for its forward. Outside, torch's default stream continues as if nothing had been drawn,
    equal on all ranks, so that shuffled data loaders of one model group agree.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self._device = device
        self._outer: list[torch.Tensor] | None = None
        with forked(device):
            torch.manual_seed(seed)
            self.states = random_states(device)
            """The stream's generator states while it is not entered; they may be set. Never changed in place."""

    def __enter__(self) -> None:
        self._outer = random_states(self._device)
        set_random_states(self.states, self._device)

    def __exit__(self, *_: object) -> None:
        assert self._outer is not None
        self.states = random_states(self._device)
        set_random_states(self._outer, self._device)


@contextmanager
def cpu_seeds() -> Iterator[Callable[[int], object]]:
    """A context that restores the CPU's generator; yields a function that seeds it, and no other device's.

    ``torch.manual_seed`` would seed every GPU too, and ``fork_rng(devices=[])`` restores none.
    """
    with torch.random.fork_rng(devices=[]):
        yield torch.default_generator.manual_seed


def forked(device: torch.device) -> AbstractContextManager[None]:
    """A context that restores torch's default generators of the CPU and, on a GPU, of ``device``."""
    return torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])


def random_states(device: torch.device) -> list[torch.Tensor]:
    """The states of torch's default generators of the CPU and, on a GPU, of ``device``; no synchronisation."""
    return [torch.default_generator.get_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def set_random_states(states: list[torch.Tensor], device: torch.device) -> None:
    """Restore torch's default generators to the states that :func:`random_states` returned."""
    torch.default_generator.set_state(states[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)


TENSOR_PLACES: list[tuple[int, int, torch.device]] = []
"""Rank and size of the tensor axis, and the device, of each open context; the last one is in use."""


@contextmanager
def sharded_random() -> Iterator[None]:
    """A context in which random numbers differ over the tensor axis, for dropout on a sharded activation.

    The stream's seed is drawn from the current stream, so that activation checkpointing, which restores the current
    stream, draws the same mask again. Without a tensor axis nothing changes.
    """
    rank, size, device = TENSOR_PLACES[-1] if TENSOR_PLACES else (0, 1, torch.device("cpu"))
    if size == 1:
        with _within(True):
            yield
        return
    with torch._C.DisableTorchFunction():  # not a draw of the model
        common = int(torch.randint(2**62, ()))
    with forked(device):
        torch.manual_seed(derive_seed(common, rank))
        COMMON.append(itertools.count(common))
        try:
            with _within(True):
                yield
        finally:
            COMMON.pop()


COMMON: list[Iterator[int]] = []
"""For each active :func:`sharded_random`, seeds that are equal over the tensor axis."""


@contextmanager
def replicated_random() -> Iterator[None]:
    """A context within :func:`sharded_random` in which random numbers are equal over the tensor axis again.

    For dropout on a replicated activation. Outside of :func:`sharded_random` nothing changes.
    """
    if not COMMON:
        with _within(False):
            yield
        return
    with forked(TENSOR_PLACES[-1][2]), _within(False):
        torch.manual_seed(derive_seed(next(COMMON[-1]), "replicated"))
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
