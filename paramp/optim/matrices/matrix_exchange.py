"""Whole matrices on one rank each, from the slices that ranks hold of them, and back.

Each rank of a group holds a range of elements of its flattened shard of each matrix: all of it under tensor
parallelism and FSDP2, a part under ZeRO. Each matrix has one owner in the group, so that the owners' work and memory
are about equal. Owners get whole matrices by one all-to-all, and return slices by another (as in Dion, Ahn et al.,
2025)::

    rank 0   A[:, :4]  B[:, :4]       all-to-all     A           step     A'     all-to-all    A'[:, :4]  B'[:, :4]
    rank 1   A[:, 4:]  B[:, 4:]       ---------->       B        --->        B'  ---------->   A'[:, 4:]  B'[:, 4:]

What is sent depends on shapes only, never on values, so that no rank can wait for another.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from ...base.collectives import gather_objects
from ...base.dtensor import is_dtensor, own_part
from ..flat_buffer import FlatParam


class HeldSlice(NamedTuple):
    """What a rank holds of a matrix: elements ``start`` to ``stop - 1`` of a flattened shard."""

    coordinate: tuple[int, ...]
    """The shard's coordinates on the parameter's mesh, 0 on axes over which it is replicated; empty for the whole."""
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


class MatrixExchange:
    """Brings the matrices of one optimizer to their owners, and back.

    Attributes:
        params: the parameters that the optimizer steps, of which this rank holds slices.
        owned: those that this rank owns, and the tensors that the optimizer steps in their place: of the shape in the
            whole model. Between steps these are placeholders without memory; their values are NaN.
        stay: those that every rank steps where they are.
        axes: the mesh's axes along which ranks exchange matrices.
    """

    def __init__(
        self,
        params: Sequence[FlatParam],
        shapes: Mapping[str, torch.Size],
        group: dist.ProcessGroup,
        axes: Sequence[str],
        stay: Sequence[FlatParam],
    ) -> None:
        """A collective of ``group``, whose ranks have the same ``params``.

        ``shapes``: in the whole model, by name; a tensor-parallel style may store other shapes.
        """
        self.axes, self.stay = axes, stay
        dtypes = [param.buffer.masters.dtype for param in params]  # those of optimizer state
        self.params = params
        self._group = group
        self._rank = dist.get_rank(group)
        self._held: list[list[HeldSlice]] = gather_objects([held_slice(param) for param in params], group)
        self._itemsizes = [dtype.itemsize for dtype in dtypes]
        self._owner_of = owners([math.prod(shapes[param.name]) for param in params], len(self._held))
        self._senders = [first_holders(held) for held in zip(*self._held, strict=True)]
        self._shapes = [shapes[param.name] for param in params]
        self._mine = [index for index, owner in enumerate(self._owner_of) if owner == self._rank]
        self.owned = {
            params[index]: _stepped(params[index], self._shapes[index], dtypes[index]) for index in self._mine
        }

    def pairs(self) -> list[tuple[FlatParam, nn.Parameter]]:
        """(parameter, tensor that is stepped in its place) of all that this rank steps."""
        staying = ((param, param.stepped) for param in self.stay)
        return [*self.owned.items(), *((param, stepped) for param, stepped in staying if stepped is not None)]

    def to_owners(self, slices: Sequence[torch.Tensor]) -> dict[FlatParam, torch.Tensor]:
        """The whole matrices that this rank owns; one all-to-all.

        Args:
            slices: of each parameter, 1-dim: what this rank holds, in the dtype of the optimizer's state.
        """
        ranks = range(len(self._held))
        sent = [
            [slices[index] for index in self._owned_by(rank) if self._rank in self._senders[index]] for rank in ranks
        ]
        arriving = [[index for index in self._mine if rank in self._senders[index]] for rank in ranks]
        received = self._all_to_all(
            sent, [[self._num_bytes(rank, index) for index in arriving[rank]] for rank in ranks], slices[0].device
        )
        by_index: dict[int, list[tuple[HeldSlice, torch.Tensor]]] = {index: [] for index in self._mine}
        for rank, chunks in zip(ranks, received, strict=True):
            for index, chunk in zip(arriving[rank], chunks, strict=True):
                by_index[index].append((self._held[rank][index], chunk))
        return {
            self.params[index]: assembled(self.params[index], found, slices[index].dtype).view(self._shapes[index])
            for index, found in by_index.items()
        }

    def from_owners(self, wholes: Mapping[FlatParam, torch.Tensor], slices: Sequence[torch.Tensor]) -> None:
        """Fill ``slices``, as :meth:`to_owners` takes them, from the owners' whole matrices; one all-to-all."""
        ranks = range(len(self._held))
        sent = [
            [
                sliced(wholes[self.params[index]], self.params[index], self._held[rank][index])
                for index in self._mine
                if self._held[rank][index].size
            ]
            for rank in ranks
        ]
        arriving = [[index for index in self._owned_by(rank) if slices[index].numel()] for rank in ranks]
        sizes = [[self._num_bytes(self._rank, index) for index in indices] for indices in arriving]
        received = self._all_to_all(sent, sizes, slices[0].device)
        for index, chunk in zip(itertools.chain(*arriving), itertools.chain(*received), strict=True):
            slices[index].view(torch.uint8).copy_(chunk)

    def _owned_by(self, rank: int) -> Iterator[int]:
        return (index for index, owner in enumerate(self._owner_of) if owner == rank)

    def _num_bytes(self, rank: int, index: int) -> int:
        return self._held[rank][index].size * self._itemsizes[index]

    def _all_to_all(
        self, sent: Sequence[Sequence[torch.Tensor]], sizes: Sequence[Sequence[int]], device: torch.device
    ) -> list[tuple[torch.Tensor, ...]]:
        """Send ``sent[rank]`` to each rank, 1-dim tensors; return the bytes from each, in chunks of ``sizes[rank]``.

        As bytes, because parameters may have different dtypes.
        """
        empty = torch.empty(0, dtype=torch.uint8, device=device)
        given = torch.cat([empty, *(one.contiguous().view(torch.uint8) for to_rank in sent for one in to_rank)])
        num_sent = [sum(one.numel() * one.element_size() for one in to_rank) for to_rank in sent]
        num_received = [sum(from_rank) for from_rank in sizes]
        received = given.new_empty(sum(num_received))
        dist.all_to_all_single(received, given, num_received, num_sent, group=self._group)
        by_rank = received.split(num_received)
        return [one.split(list(chunks)) if chunks else () for one, chunks in zip(by_rank, sizes, strict=True)]


def placeholder(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor with the memory of one element, which is NaN."""
    return torch.full((), math.nan, dtype=dtype, device=device).expand(shape)


def _stepped(param: FlatParam, shape: torch.Size, dtype: torch.dtype) -> nn.Parameter:
    stepped = nn.Parameter(placeholder(shape, dtype, param.parameter.device))
    vars(stepped).update(vars(param.parameter))  # some optimizers read attributes
    return stepped


def held_slice(param: FlatParam) -> HeldSlice:
    """What this rank holds of ``param``."""
    parameter = param.parameter
    if not is_dtensor(parameter):
        return HeldSlice((), *param.own)
    own = parameter.device_mesh.get_coordinate()
    assert own is not None
    pairs = zip(own, parameter.placements, strict=True)
    return HeldSlice(tuple(0 if placement.is_replicate() else place for place, placement in pairs), *param.own)


def owners(sizes: Sequence[int], num_ranks: int) -> list[int]:
    """The rank that owns each matrix: the largest first, each to the rank with the fewest elements so far."""
    loads, found = [0] * num_ranks, [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        found[index] = loads.index(min(loads))
        loads[found[index]] += sizes[index]
    return found


def first_holders(held: Iterable[HeldSlice]) -> set[int]:
    """Of the ranks that hold the same elements, the first; none for empty slices."""
    first: dict[HeldSlice, int] = {}
    for rank, one in enumerate(held):
        if one.size:
            first.setdefault(one, rank)
    return set(first.values())


def assembled(param: FlatParam, found: Iterable[tuple[HeldSlice, torch.Tensor]], dtype: torch.dtype) -> torch.Tensor:
    """The whole of ``param`` from the bytes of its slices, in the shape in which it is stored."""
    whole = torch.empty(param.parameter.shape, dtype=dtype, device=param.parameter.device)
    shards: dict[tuple[int, ...], torch.Tensor] = {}
    for held, chunk in found:
        if held.coordinate not in shards:
            shards[held.coordinate] = whole.new_empty(_region(whole, param, held).numel())
        shards[held.coordinate][held.start : held.stop].view(torch.uint8).copy_(chunk)
    for coordinate, shard in shards.items():
        region = _region(whole, param, HeldSlice(coordinate, 0, 0))
        region.copy_(shard.view(region.shape))
    return whole


def sliced(whole: torch.Tensor, param: FlatParam, held: HeldSlice) -> torch.Tensor:
    """The slice ``held`` of ``whole``, 1-dim."""
    return _region(whole.reshape(param.parameter.shape), param, held).reshape(-1)[held.start : held.stop]


def _region(whole: torch.Tensor, param: FlatParam, held: HeldSlice) -> torch.Tensor:
    """The view of a shard in ``whole``."""
    return own_part(whole, param.parameter, held.coordinate) if is_dtensor(param.parameter) else whole
