"""Random streams: the same parameters in every layout, and dropout masks that are equal or independent over ranks.

Parameters: every tensor is drawn in full from a seed made of the run's seed and the parameter's name, then sharded, so
that a model starts the same in every layout (:mod:`paramp.parallel.materialize` does this for models on ``meta``).

Dropout: pipeline and data ranks draw from different streams (:class:`RandomStream`), tensor ranks from the same one
(:mod:`.random_across_tensor_ranks`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


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
        with forked(device) as seed_device:
            seed_device(seed)
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
def forked(device: torch.device) -> Iterator[Callable[[int], None]]:
    """A context that restores the generators of the CPU and of ``device``; yields a function that seeds these alone."""

    def seed(number: int) -> None:
        # torch.manual_seed would seed every GPU, and without one take 1 ms, for a text of the call stack.
        torch.default_generator.manual_seed(number)
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(number)

    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield seed


def random_states(device: torch.device) -> list[torch.Tensor]:
    """The states of torch's default generators of the CPU and, on a GPU, of ``device``; no synchronisation."""
    return [torch.default_generator.get_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def set_random_states(states: list[torch.Tensor], device: torch.device) -> None:
    """Restore torch's default generators to the states that :func:`random_states` returned."""
    torch.default_generator.set_state(states[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)
