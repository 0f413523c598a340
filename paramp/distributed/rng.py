"""Random numbers that do not depend on the layout where they must not, and differ where they must.

Parameters: every tensor is drawn in full from a seed made of the run's seed and the parameter's name, then sharded, so
that a model starts the same in every layout (:mod:`paramp.parallel.materialize` does this for models on ``meta``).

Dropout: pipeline and data ranks draw from different streams (:class:`RandomStream`). Along the tensor axis an
activation is either replicated, and then its mask must be equal on all ranks, or sharded, and then equal masks would be
correlated: :func:`sharded_random` goes around the modules that work on shards (Shoeybi et al. 2019, section 3).
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch


def derive_seed(*parts: object) -> int:
    """A seed of 63 bits from ``parts`` (ints and strings): a hash, so that nearby parts give unrelated seeds."""
    text = "\x1f".join(map(str, parts))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


class RandomStream:
    """A stream of random numbers of its own: entered, it takes the place of torch's default one.

    A pipeline stage enters it for its forward. Outside, torch's default stream goes on as if nothing had been drawn,
    equal on all ranks, so that shuffled data loaders of one model group agree.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self._device = device
        self._outer: list[torch.Tensor] | None = None
        with _forked(device):
            torch.manual_seed(seed)
            self.states = random_states(device)
            """Where the stream stands, outside of it; setting them winds it there. Never changed in place."""

    def __enter__(self) -> None:
        self._outer = random_states(self._device)
        set_random_states(self.states, self._device)

    def __exit__(self, *_: object) -> None:
        assert self._outer is not None
        self.states = random_states(self._device)
        set_random_states(self._outer, self._device)


def _forked(device: torch.device) -> AbstractContextManager[None]:
    return torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])


def random_states(device: torch.device) -> list[torch.Tensor]:
    """Where torch's default streams stand, that of the CPU and that of a GPU; no synchronisation."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def set_random_states(states: list[torch.Tensor], device: torch.device) -> None:
    """Wind torch's default streams to where :func:`random_states` found them."""
    torch.set_rng_state(states[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)


TENSOR_PLACES: list[tuple[int, int, torch.device]] = []
"""Rank and size of the tensor axis, and the device, of each open context; the latest one is in use."""


@contextmanager
def sharded_random() -> Iterator[None]:
    """Inside, random numbers differ over the tensor axis. For code that drops out parts of a sharded activation.

    The stream starts from a number drawn from the current one, so that activation checkpointing, which restores the
    current one, draws the same mask again. Without a tensor axis nothing changes.
    """
    rank, size, device = TENSOR_PLACES[-1] if TENSOR_PLACES else (0, 1, torch.device("cpu"))
    if size == 1:
        yield
        return
    common = int(torch.randint(2**62, ()))
    with _forked(device):
        torch.manual_seed(derive_seed(common, rank))
        COMMON.append(itertools.count(common))
        try:
            yield
        finally:
            COMMON.pop()


COMMON: list[Iterator[int]] = []
"""For each :func:`sharded_random` that is entered, numbers that are equal over the tensor axis."""


@contextmanager
def replicated_random() -> Iterator[None]:
    """Inside, within :func:`sharded_random`, random numbers are equal over the tensor axis again.

    For code that drops out parts of a replicated activation. Outside of :func:`sharded_random` nothing changes.
    """
    if not COMMON:
        yield
        return
    with _forked(TENSOR_PLACES[-1][2]):
        torch.manual_seed(derive_seed(next(COMMON[-1]), "replicated"))
        yield
