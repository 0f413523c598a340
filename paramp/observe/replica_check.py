"""Whether ranks that should hold the same do: weights, masters, optimizer state and the loss scale, bit for bit.

Weights are there several times: on every data rank, on every tensor rank where they are not sharded, on several stages
where they are tied. Every copy makes the same steps, so that nothing ever compares them; a bit that flips in one of
them, or a kernel that rounds otherwise on one device, stays unseen while the copies part. :class:`Replicas` compares.

Each rank hashes the bits of what it holds on its device, and adds the hashes up by who else holds the same
(:class:`Sharing`). One all-gather of these few sums shows every rank the same table. Only where that shows a
difference, the hashes of the parameters are exchanged, to name it.

The hash is a sum of 32-bit words, each times an odd 64-bit number that depends on its place, modulo 2**64. Multiplying
by an odd number loses nothing, so that a change in a single word always shows. Changes in several may cancel out, with
a chance of about 2**-32 if they are such as signs alone, of 2**-64 in general.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ..base.dtensor import local
from ..base.errors import ReplicaDrift
from ..distributed.axes import replicated_axes
from ..distributed.collectives import all_gather_shards, gather_objects
from ..distributed.context import DATA_AXIS, PIPELINE_AXIS, ParallelContext, TiedParameter
from ..optim.flat_params import FlatWeights
from ..optim.loss_scaler import DistributedGradScaler

__all__ = ["Difference", "Replicas", "hash_bits"]

BLOCK = {"cpu": 2**18, "cuda": 2**22}
"""Words that are hashed at once. The hash needs twice eight bytes for each, beside the tensor."""
NAMED = 4
"""Ranks, and differences, that a message spells out."""
WEIGHT, MASTER, STATE, SCALE = "weight", "master", "optimizer state", "loss scale"


@dataclass(frozen=True, order=True)
class Sharing:
    """Who holds the same: ranks that differ in their places on some axes of the mesh only."""

    axes: tuple[str, ...]
    stages: tuple[int, ...] = ()
    """Of a tied parameter, the pipeline ranks that hold a copy. Empty: all along the axes."""
    number: int = 0
    """Which of the tied parameters that these pipeline ranks hold."""


@dataclass(frozen=True)
class Difference:
    """One parameter, or the loss scale, of which some ranks hold other bits than the others."""

    kind: str
    """``weight``, ``master`` (or its remainder), ``optimizer state`` or ``loss scale``."""
    parameter: str
    """Its name in the whole model; empty for the loss scale."""
    ranks: tuple[int, ...]
    """The ranks that differ: all but the largest number of equal ones, among equally many those without the lowest."""
    others: tuple[int, ...]
    """The ranks that they differ from."""
    message: str = field(repr=False)
    names: tuple[tuple[int, str], ...] = field(repr=False)
    """Each rank that holds it, and its name there: stages may know a tied parameter by different names."""

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True)
class _Part:
    """What is compared at once: one parameter's tensors of one kind, on this rank."""

    kind: str
    name: str
    sharing: Sharing
    tensors: Callable[[], Sequence[torch.Tensor]]
    """They share storage with what is in use."""
    tie: TiedParameter | None = None

    @property
    def column(self) -> tuple[str, Sharing]:
        return self.kind, self.sharing


class Replicas:
    """Compares what this rank holds with the ranks that hold the same, and repairs it."""

    def __init__(
        self,
        module: nn.Module,
        weights: FlatWeights,
        ties: Iterable[TiedParameter],
        optimizer: torch.optim.Optimizer,
        scaler: DistributedGradScaler,
        context: ParallelContext,
    ) -> None:
        self._weights = weights
        self._context = context
        self._names = tuple(context.mesh.mesh_dim_names or ())
        self._optimizer = optimizer
        self._columns: list[tuple[str, Sharing]] | None = None
        self._num_steps = 0  # made or skipped
        parts = [_Part(SCALE, "", self._sharing(self._names), scaler.tensors)]
        parts += self._weight_parts(module, ties)
        parts += self._stepped_parts({part.name: part for part in parts})
        self._parts = [part for part in parts if part.sharing.axes]

    # ------------------------------------------------------------------------------------------- who holds the same

    def _sharing(self, axes: Iterable[str], stages: Sequence[int] = (), number: int = 0) -> Sharing:
        """``axes`` without those of one rank, in the order of the mesh."""
        mesh, wanted = self._context.mesh, set(axes)
        long = (name for index, name in enumerate(self._names) if name in wanted and mesh.size(index) > 1)
        return Sharing(tuple(long), tuple(stages), number)

    def _weight_parts(self, module: nn.Module, ties: Iterable[TiedParameter]) -> list[_Part]:
        """One for each parameter, trained or not."""
        tie_of = {tie.parameter: tie for tie in ties}
        numbers: Counter[tuple[int, ...]] = Counter()  # ties come in the same order on all ranks that hold them
        sharings: dict[nn.Parameter, Sharing] = {}
        for parameter, tie in tie_of.items():
            stages = tuple(self._stage_of(rank) for rank in dist.get_process_group_ranks(tie.group))
            axes = {*replicated_axes(parameter, self._context), PIPELINE_AXIS}
            sharings[parameter] = self._sharing(axes, stages, numbers[stages])
            numbers[stages] += 1
        return [
            _Part(
                WEIGHT,
                name,
                sharings.get(parameter) or self._sharing(replicated_axes(parameter, self._context)),
                partial(_local_tensor, parameter),
                tie_of.get(parameter),
            )
            for name, parameter in module.named_parameters()
        ]

    def _stepped_parts(self, part_of: Mapping[str, _Part]) -> list[_Part]:
        """Masters and optimizer state of what this rank steps.

        Under ZeRO each data rank has others, and each stage deals out its copy of a tied parameter in its own way.
        """
        parts: list[_Part] = []
        for param, stepped, buffer in self._weights.pairs():
            weight = part_of[param.name]
            sharing, tie = weight.sharing, weight.tie
            if buffer.num_parts > 1:
                sharing, tie = self._sharing(set(sharing.axes) - {DATA_AXIS, PIPELINE_AXIS}), None
            for stored in buffer.masters.state:
                parts.append(_Part(MASTER, param.name, sharing, partial(_one, stored[buffer.own_range(param)]), tie))
            parts.append(_Part(STATE, param.name, sharing, partial(_states, self._optimizer, stepped), tie))
        return parts

    def _stage_of(self, rank: int) -> int:
        """The place of ``rank`` on the pipeline axis."""
        place = (self._context.mesh.mesh == rank).nonzero()[0].tolist()
        return int(place[self._names.index(PIPELINE_AXIS)])

    def _groups(self, sharing: Sharing) -> torch.Tensor:
        """The ranks that hold the same, a row for each such group, the lowest rank first."""
        mesh = self._context.mesh.mesh
        if sharing.stages:
            mesh = mesh.index_select(self._names.index(PIPELINE_AXIS), torch.tensor(sharing.stages))
        shared = [self._names.index(name) for name in sharing.axes]
        size = math.prod(mesh.shape[axis] for axis in shared)
        return mesh.movedim(shared, list(range(mesh.ndim - len(shared), mesh.ndim))).reshape(-1, size)

    # --------------------------------------------------------------------------------------------------- comparing

    @torch.no_grad()
    def check(self) -> list[Difference]:
        """Compare; every rank calls it, and gets the same answer. Waits for the device."""
        columns = self._agreed_columns()
        if not columns:
            return []
        hashes = self._hashes()
        device = self._context.device
        sums = torch.zeros(len(columns), dtype=torch.int64, device=device)
        place = torch.tensor([columns.index(part.column) for part in self._parts], device=device)
        sums.index_add_(0, place, hashes)
        table = sums.new_empty(self._context.world_size, len(columns))
        all_gather_shards(table.view(-1), sums)
        suspects = list(self._unequal(columns, table.cpu()))
        return self._located(suspects, hashes) if suspects else []

    def _hashes(self) -> torch.Tensor:
        """One for each part, int64, on the device."""
        hashes = [torch.zeros((), dtype=torch.int64, device=self._context.device) for _ in self._parts]
        for total, part in zip(hashes, self._parts, strict=True):
            for number, tensor in enumerate(part.tensors()):
                total += hash_bits(tensor) * (2 * number + 1)
        return torch.stack(hashes)

    def _agreed_columns(self) -> list[tuple[str, Sharing]]:
        """What the ranks' sums are made for, over the whole world; asked for once."""
        if self._columns is None:
            everyone = gather_objects({part.column for part in self._parts})
            self._columns = sorted(set[tuple[str, Sharing]]().union(*everyone))
        return self._columns

    def _unequal(
        self, columns: Sequence[tuple[str, Sharing]], table: torch.Tensor
    ) -> Iterator[tuple[tuple[str, Sharing], tuple[int, ...]]]:
        """The columns in which the ranks of a group do not have the same, and that group."""
        for column, values in zip(columns, table.T, strict=True):
            groups = self._groups(column[1])
            of_group = values[groups]
            for ranks in groups[(of_group != of_group[:, :1]).any(dim=1)].tolist():
                yield column, tuple(ranks)

    def _located(
        self, suspects: Sequence[tuple[tuple[str, Sharing], tuple[int, ...]]], hashes: torch.Tensor
    ) -> list[Difference]:
        """What in ``suspects``, the same list on every rank, differs."""
        own = hashes.tolist()
        mine = {
            index: [(part.name, own[place]) for place, part in enumerate(self._parts) if part.column == column]
            for index, (column, ranks) in enumerate(suspects)
            if self._context.rank in ranks
        }
        everyone = gather_objects(mine)
        found = []
        for index, ((kind, _), ranks) in enumerate(suspects):
            for copies in zip(*(everyone[rank][index] for rank in ranks), strict=True):
                names = {rank: name for rank, (name, _) in zip(ranks, copies, strict=True)}
                values = {rank: value for rank, (_, value) in zip(ranks, copies, strict=True)}
                if len(set(values.values())) > 1:
                    found.append(self._difference(kind, names, values))
        return found

    def _difference(self, kind: str, names: Mapping[int, str], values: Mapping[int, int]) -> Difference:
        """Who differs, where each rank of a group holds the hash in ``values``, in the order of the ranks."""
        usual = Counter(values.values()).most_common(1)[0][0]  # the first of those that are as common
        ranks = tuple(rank for rank, value in values.items() if value != usual)
        others = tuple(rank for rank, value in values.items() if value == usual)
        name = names[ranks[0]]
        what = f"the {kind} of {name!r}" if name else f"the {kind}"
        differ = "differs" if len(ranks) == 1 else "differ"
        message = f"{what} on {self._reported(ranks)} {differ} from {self._reported(others)}"
        return Difference(kind, name, ranks, others, message, tuple(names.items()))

    def _reported(self, ranks: Sequence[int]) -> str:
        """The ranks with their places on the mesh, if there are few."""
        reported = [self._context.name_of(rank) for rank in ranks[:NAMED]]
        if len(ranks) > NAMED:
            reported.append(f"{len(ranks) - NAMED} more")
        return ", ".join(reported)

    # --------------------------------------------------------------------------------------------------- repairing

    def check_in_turn(self) -> None:
        """Count a step, made or skipped, and after every ``check_replicas_every`` of them stop or repair.

        Raises:
            ReplicaDrift: as :meth:`stop_or_repair`.
        """
        config = self._context.config
        self._num_steps += 1
        if config.check_replicas_every is not None and self._num_steps % config.check_replicas_every == 0:
            self.stop_or_repair(repair=config.repair_replicas)

    def stop_or_repair(self, *, repair: bool) -> None:
        """Compare, and if there is a difference stop every rank, or repair it and warn on the main rank.

        Raises:
            ReplicaDrift: naming what differs, the same on every rank.
        """
        differences = self.check()
        if not differences:
            return
        reported = "; ".join(str(difference) for difference in differences[:NAMED])
        if len(differences) > NAMED:
            reported += f"; and {len(differences) - NAMED} more"
        if not repair:
            raise ReplicaDrift(
                f"replicas: {reported}. Ranks that hold the same have parted: suspect memory or a kernel of those that "
                "differ, or code that changes weights on some ranks only; go on from a checkpoint, or set "
                "repair_replicas to copy the lowest rank's"
            )
        self.repair(differences)
        if self._context.is_main:
            warnings.warn(f"replicas: {reported}; copied from the lowest rank that holds it", stacklevel=4)

    @torch.no_grad()
    def repair(self, differences: Iterable[Difference]) -> None:
        """Copy all that belongs to the parameters in ``differences`` from the lowest rank that holds it to the others.

        Every rank calls it with what :meth:`check` returned.
        """
        affected = {(self._stage_of(rank), name) for found in differences for rank, name in found.names}
        stage = self._stage_of(self._context.rank)
        # Stages may have tied parameters in different orders, but sort the groups that hold them alike.
        for part in sorted(self._parts, key=lambda part: part.column):
            if (stage, part.name) in affected:
                for tensor in filter(torch.Tensor.numel, part.tensors()):
                    self._copy_from_lowest(tensor, part)
        self._weights.write_back()

    def _copy_from_lowest(self, tensor: torch.Tensor, part: _Part) -> None:
        """Along one axis after the other, from its first rank."""
        whole = tensor.contiguous()
        bits = whole.view(-1).view(torch.uint8)  # neither gloo nor NCCL moves the int16 of remainders
        for name in part.sharing.axes:
            tied = part.tie is not None and name == PIPELINE_AXIS
            group = part.tie.group if part.tie is not None and tied else self._context.mesh.get_group(name)
            dist.broadcast(bits, group=group, group_src=0)
        if whole is not tensor:
            tensor.copy_(whole)


def hash_bits(tensor: torch.Tensor) -> torch.Tensor:
    """A hash of the bits of ``tensor``, 0-dim int64, on its device; no host synchronisation."""
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    multipliers = _multipliers(tensor.device)
    for number, words in enumerate(_words(tensor).split(len(multipliers))):
        total += (words * multipliers[: len(words)]).sum() * (2 * number + 1)
    return total


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of ``tensor`` as 1-dim int32, filled up with zeros; a view of it where it fits."""
    octets = tensor.detach().reshape(-1).view(torch.uint8)
    if octets.numel() % 4 or octets.storage_offset() % 4:
        octets = F.pad(octets, (0, -octets.numel() % 4))
    return octets.view(torch.int32)


@functools.cache
def _multipliers(device: torch.device) -> torch.Tensor:
    """Odd numbers for a block, int64, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(-(2**63), 2**63 - 1, (BLOCK[device.type],), generator=generator).bitwise_or_(1).to(device)


def _local_tensor(parameter: nn.Parameter) -> list[torch.Tensor]:
    return [local(parameter).detach()]


def _one(tensor: torch.Tensor) -> list[torch.Tensor]:
    return [tensor]


def _states(optimizer: torch.optim.Optimizer, stepped: nn.Parameter) -> list[torch.Tensor]:
    """What the optimizer keeps for each element of ``stepped``."""
    state = optimizer.state.get(stepped, {})
    return [
        value
        for _, value in sorted(state.items())
        if isinstance(value, torch.Tensor) and value.numel() == stepped.numel()
    ]
