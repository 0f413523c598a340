"""Random numbers that do not depend on the layout where they must not, and differ where they must.

Parameters: every tensor is drawn in full from a seed made of the run's seed and the parameter's name, then cut, so
that a model starts the same in every layout (:func:`materialize` does this for models built on ``meta``).

Dropout: pipeline and data ranks draw from different streams. Along the tensor axis an activation is either
replicated, and then its mask must be equal on all ranks, or sharded, and then equal masks would be correlated. So
each rank holds two streams: the default one, equal over ``tp``, and a second one that :func:`sharded_random` swaps in
around the modules that work on shards (Megatron-LM's scheme, Shoeybi et al. 2019, section 3).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from .surgery import keeping_ties

__all__ = ["RandomStreams", "derive_seed", "materialize", "sharded_random"]


def derive_seed(*parts: object) -> int:
    """A seed of 63 bits from ``parts`` (ints and strings): a hash, so that nearby parts give unrelated seeds."""
    text = "\x1f".join(map(str, parts))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


class RandomStreams:
    """The two streams of one rank: seed them once, then :meth:`sharded` swaps the second one in and out."""

    _current: RandomStreams | None = None

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._other: list[torch.Tensor] | None = None

    def seed(self, replicated: int, sharded: int) -> None:
        """Start both streams anew, and make this object the one that :func:`sharded_random` uses."""
        torch.manual_seed(sharded)
        self._other = self._states()
        torch.manual_seed(replicated)
        RandomStreams._current = self

    def close(self) -> None:
        if RandomStreams._current is self:
            RandomStreams._current = None

    @contextmanager
    def sharded(self) -> Iterator[None]:
        """Inside, random numbers come from the stream that differs over ``tp``."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _states(self) -> list[torch.Tensor]:
        states = [torch.get_rng_state()]
        if self._device.type == "cuda":
            states.append(torch.cuda.get_rng_state(self._device))
        return states

    def _swap(self) -> None:
        assert self._other is not None, "the streams are swapped before they are seeded"
        states, self._other = self._other, self._states()
        torch.set_rng_state(states[0])
        if self._device.type == "cuda":
            torch.cuda.set_rng_state(states[1], self._device)


@contextmanager
def sharded_random() -> Iterator[None]:
    """Inside, random numbers differ over the tensor axis. For code that drops out parts of a sharded activation.

    Without a tensor axis, or before ``initialize``, it changes nothing.
    """
    streams = RandomStreams._current
    if streams is None:
        yield
        return
    with streams.sharded():
        yield


def materialize(module: nn.Module, seed: int, device: torch.device, prefix: str = "") -> None:
    """Give the parameters and buffers of ``module`` that are on ``meta`` their initial values, on ``device``.

    Each submodule with tensors on ``meta`` is filled by its own ``reset_parameters()``, with the random state seeded
    by ``seed`` and the submodule's name. The caller's random state is left as it was.

    Raises:
        ValueError: a submodule has tensors on ``meta`` and no ``reset_parameters``.
    """
    with torch.random.fork_rng(devices=[]), keeping_ties(module):
        for name, child in module.named_modules(prefix=prefix):
            tensors = [*child.parameters(recurse=False), *child.buffers(recurse=False)]
            if not any(tensor.is_meta for tensor in tensors):
                continue
            reset = getattr(child, "reset_parameters", None)
            if reset is None:
                raise ValueError(
                    f"model: {name or 'the model'} ({type(child).__name__}) is on the meta device and has no "
                    "reset_parameters(); add one that fills its parameters and buffers, or build it on the CPU"
                )
            child.to_empty(device="cpu", recurse=False)
            torch.manual_seed(derive_seed(seed, name))
            reset()
            child._apply(lambda tensor: tensor.to(device), recurse=False)
