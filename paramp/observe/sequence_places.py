"""Where in whole sequences the values of a rank's tensors are, if the context axis cuts sequences."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..base.dtensor import local
from ..distributed.context import ParallelContext
from ..parallel.batches import Batch

Ranges = tuple[tuple[int, int], ...]


class SequencePlaces:
    """The places of an engine's tokens; tensors are told by their shapes."""

    def __init__(self, context: ParallelContext) -> None:
        from ..parallel.context_axis.sequence_axis import SequenceAxis, length_of

        self._axis, self._tensor = SequenceAxis(context), context.tensor_axis
        self._length_of: Callable[..., int] = length_of
        self._microbatches = context.config.parallel.pipeline.num_microbatches
        self._length = self._samples = 0

    def see_batch(self, batch: Batch) -> None:
        """Take the length of the sequences from the inputs that run next, which are whole."""
        self._length = self._length_of(batch.args, batch.kwargs)
        self._samples = batch.size // self._microbatches

    def not_finite(self, value: torch.Tensor) -> Ranges:
        """The places of the tokens of an activation, or of its gradient, that are not finite; empty if not known.

        The tokens are in dim 1, in dim 2 of four (heads before them), or in rows, sequence by sequence.
        """
        value = local(value).detach()
        whole = torch.arange(self._length)
        part = self._axis.positions((self._length + -self._length % self._axis.multiple) // self._axis.size, "cpu")
        slices = part.chunk(self._tensor.size)[self._tensor.rank] if len(part) % self._tensor.size == 0 else part
        for places in (part, whole, slices):
            rows = value.ndim == 2 and len(value) == len(places) * self._samples
            found = value.unflatten(0, (self._samples, -1)) if rows else value
            if found.ndim < 2 or len(found) != self._samples:
                continue
            dims = [dim for dim in (1, 2)[: 1 + (found.ndim == 4)] if found.shape[dim] == len(places)]
            if len(dims) == 1:
                bad = (~found.isfinite()).movedim(dims[0], 0).flatten(1).any(1)
                return _ranges(places[bad.cpu()].tolist())
        return ()


def _ranges(places: list[int]) -> Ranges:
    """Ascending numbers as ranges, each by its first number and the one after its last."""
    starts = [place for index, place in enumerate(places) if not index or places[index - 1] != place - 1]
    ends = [place + 1 for place in places if place + 1 not in set(places)]
    return tuple(zip(starts, ends, strict=True))
