"""Which ranges of the flat buffers are stepped alike: the work of a step, in as few kernels as its options allow."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from .grad_norm import NORM_BLOCK
from .param_buffer import Buffer, FlatParam, aligned

__all__ = ["StepRange", "StepRanges"]


@dataclass(frozen=True)
class StepRange:
    """Neighbours in a buffer that are stepped with the same options, the same norm weight and the same step count."""

    buffer: Buffer
    start: int
    """In the buffer."""
    own_start: int
    """In this rank's part of it."""
    length: int
    group: int
    norm_weight: float
    params: tuple[FlatParam, ...]

    def in_blocks(self) -> Iterator[torch.Tensor]:
        """The gradient, 1-dim, split where a block of the norm begins: so it adds up to the same bits on any layout."""
        stop = self.start + self.length
        first = min(aligned(self.start, NORM_BLOCK), stop)
        for part in (self.buffer.gradients[self.start : first], self.buffer.gradients[first:stop]):
            if part.numel():
                yield part


class StepRanges:
    """The ranges that this rank steps, from step to step.

    A parameter without a gradient on any rank is not stepped, and Adam's bias correction counts each parameter's own
    steps. So parameters run together only if they have missed the same steps.

    Attributes:
        everything: the ranges if every parameter is stepped.
    """

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        self._buffers = buffers
        self._missed: dict[FlatParam, int] = {}  # equal for parameters that have missed the same steps
        self._histories = itertools.count(1)
        self._absent: tuple[FlatParam, ...] = ()
        self.everything = self._current = self._made()

    def without(self, absent: Sequence[FlatParam]) -> list[StepRange]:
        """What the next step steps, where no rank has a gradient for the parameters in ``absent``."""
        if tuple(absent) != self._absent:
            self._absent = tuple(absent)
            self._current = self._made(self._absent)
        # Whether this step is skipped is known on the device only, so the absent are counted apart in either case.
        missed: dict[int, int] = {}
        for param in absent:
            before = self._missed.get(param, 0)
            if before not in missed:
                missed[before] = next(self._histories)
            self._missed[param] = missed[before]
        return self._current

    def set_step_counts(self, steps: Mapping[FlatParam, int]) -> None:
        """Take up from a loaded state how often each parameter was stepped: those with equal counts run together."""
        most = max(steps.values(), default=0)
        self._missed = {param: count - most for param, count in steps.items()}  # histories made later are above 0
        self._current = self._made(self._absent)

    def _made(self, absent: Sequence[FlatParam] = ()) -> list[StepRange]:
        return [part for buffer in self._buffers for part in _ranges_of(buffer, set(absent), self._missed)]


def _ranges_of(buffer: Buffer, absent: set[FlatParam], missed: Mapping[FlatParam, int]) -> Iterator[StepRange]:
    here = (param for param in buffer.params if param.own[0] < param.own[1])
    for kind, neighbours in itertools.groupby(
        here, lambda param: (param in absent, param.group, param.norm_weight, missed.get(param, 0))
    ):
        params = tuple(neighbours)
        if not kind[0]:
            low = max(params[0].start, buffer.own_start)
            high = min(params[-1].start + aligned(params[-1].size), buffer.own_start + buffer.own_size)
            yield StepRange(
                buffer, low, low - buffer.own_start, high - low, params[0].group, params[0].norm_weight, params
            )
