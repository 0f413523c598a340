"""Comparing replicas bit for bit: weights, masters, their averages, optimizer state and the loss scale.

Weights are replicated on every data rank, on tensor ranks if they are not sharded, and on several stages if they are
tied. Every replica makes the same steps, so training never compares them. If a bit flips in one of them, or a kernel
rounds differently on one device, the replicas diverge without an error. :class:`Replicas` compares them.

Each rank hashes the bits of its tensors (:mod:`paramp.observe.bit_hash`) and sums the hashes by replica group
(:class:`ReplicaGroup`). One all-gather of these few sums gives every rank the same table. Only if a sum differs, the
hashes of single parameters are exchanged to find the difference.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..base.collectives import all_gather_single, broadcast_, gather_objects
from ..base.dtensor import local
from ..base.errors import ReplicaDrift, require
from ..base.wrapped_models import unwrapped
from ..distributed.context import BATCH_ROLES, ParallelContext
from ..distributed.replicated_axes import replicated_axes
from ..optim.flat_weights import FlatWeights
from ..optim.user_optimizer import settings_of
from ..scaling.copies_per_element import TiedParameter
from ..scaling.loss_scaler import DistributedGradScaler
from .bit_hash import hash_bits
from .loops_without_engine import agreed_context
from .recorded_window import WindowRecord
from .same_data import NAMED, different_data, listed

Column = tuple[str, "ReplicaGroup"]
"""A column of the table of sums: the kind of value, and its replica group."""
WEIGHT, MASTER, AVERAGE, STATE, SCALE = "weight", "master", "average", "optimizer state", "loss scale"
SETTING = "setting"


@dataclass(frozen=True, order=True)
class ReplicaGroup:
    """Ranks with replicas of the same values: those that differ only in their coordinates on ``axes`` of the mesh."""

    axes: tuple[str, ...]
    stages: tuple[int, ...] = ()
    """For a tied parameter, the pipeline ranks that hold a copy. Empty: all ranks along the axes."""
    number: int = 0
    """The index among the tied parameters on these pipeline ranks."""


@dataclass(frozen=True)
class Difference:
    """One parameter, or the loss scale, whose bits differ between ranks."""

    kind: str
    """``weight``, ``master`` (or its remainder), ``average`` (of masters), ``optimizer state``, ``loss scale``, or
    ``setting``: a number in the optimizer's param groups, such as the learning rate."""
    parameter: str
    """The name in the whole model; empty for the loss scale; of a setting where it stands."""
    ranks: tuple[int, ...]
    """The ranks that differ from the majority, or on a tie from the value of the lowest rank."""
    others: tuple[int, ...]
    """The ranks of the majority."""
    message: str = field(repr=False)
    names: tuple[tuple[int, str], ...] = field(repr=False)
    """Each rank of the group and the parameter's name there: a tied parameter may have another name in each stage."""

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True)
class _Compared:
    """One parameter's tensors of one kind, on this rank."""

    kind: str
    name: str
    group: ReplicaGroup
    tensors: Callable[[], Sequence[torch.Tensor]]
    """Returns the local tensors in use (or views), so that a repair can write into them."""
    tie: TiedParameter | None = None

    @property
    def column(self) -> Column:
        return self.kind, self.group


def check_replicas(
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    scaler: DistributedGradScaler | None = None,
    *,
    context: ParallelContext | None = None,
) -> list[Difference]:
    """Compare the replicas of a model in a loop without an engine; a collective of the world, which changes nothing.

    Args:
        module: this rank's model, or its stage: plain, in DDP, sharded by ``fully_shard``, or of DTensors on any
            meshes.
        optimizer: of these parameters, whose state is compared too.
        scaler: its scale and counters are compared too.
        context: None: the current one; none is needed in one process.

    Returns:
        What differs, and on which ranks; the same on every rank. It synchronises with the device.

    Raises:
        ConfigError: on every rank: a rank has wrong arguments, or another model than another rank.
        LaunchError: a rank did not call it in time.
    """

    def check(_: ParallelContext | None) -> tuple[nn.Module, dict[str, bool]]:
        is_optimizer = isinstance(optimizer, torch.optim.Optimizer)
        require(optimizer is None or is_optimizer, "optimizer", optimizer, "a torch.optim.Optimizer, or None")
        is_scaler = isinstance(scaler, DistributedGradScaler)
        require(scaler is None or is_scaler, "scaler", scaler, "a paramp.DistributedGradScaler, or None")
        return module, {"optimizer": optimizer is not None, "scaler": scaler is not None}

    context = agreed_context("check_replicas", context, check)
    if context is None:
        return []
    return Replicas(unwrapped(module), optimizer, context.ties, scaler, context).check()


class Replicas:
    """Compares this rank's values with its replica groups, and repairs differences."""

    def __init__(
        self,
        module: nn.Module,
        weights: FlatWeights | torch.optim.Optimizer | None,
        ties: Iterable[TiedParameter],
        scaler: DistributedGradScaler | None,
        context: ParallelContext,
    ) -> None:
        """:attr:`every`: after how many steps an engine compares; None: never.

        ``weights``: what is stepped, or, where that is the parameters themselves, the optimizer if it is known.
        """
        self._weights = weights if isinstance(weights, FlatWeights) else None
        self._context = context
        self._names = tuple(context.roles)
        self._columns: list[Column] | None = None
        self._num_steps = 0  # made or skipped
        self.last: list[Difference] | None = None
        """What :meth:`check_in_turn` found after the last step; None if it did not compare then."""
        self.every = context.config.check_replicas_every
        compared = [] if scaler is None else [_Compared(SCALE, "", self._group(self._names), scaler.tensors)]
        of_weights = self._of_weights(module, ties)
        compared += of_weights.values()
        if self._weights is not None:
            compared += self._of_stepped(of_weights, self._weights)
            compared += self._of_settings([each.optimizer for each in self._weights.by_optimizer])
        elif isinstance(weights, torch.optim.Optimizer):
            for name, parameter in module.named_parameters():
                weight = of_weights[name]
                states = partial(_states, weights, parameter)
                compared.append(_Compared(STATE, name, weight.group, states, weight.tie))
        self._compared = [each for each in compared if each.group.axes]

    # -------------------------------------------------------------------------------------------- replica groups

    def _group(self, axes: Iterable[str], stages: Sequence[int] = (), number: int = 0) -> ReplicaGroup:
        """The group over ``axes`` without axes of size 1, in the order of the mesh."""
        mesh, wanted = self._context.mesh, set(axes)
        long = (name for index, name in enumerate(self._names) if name in wanted and mesh.size(index) > 1)
        return ReplicaGroup(tuple(long), tuple(stages), number)

    def _of_weights(self, module: nn.Module, ties: Iterable[TiedParameter]) -> dict[str, _Compared]:
        """The parameters, trained or frozen, by name."""
        tie_of = {tie.parameter: tie for tie in ties}
        numbers: Counter[tuple[int, ...]] = Counter()  # ties have the same order on all ranks that hold them
        groups: dict[nn.Parameter, ReplicaGroup] = {}
        for parameter, tie in tie_of.items():
            stages = tuple(self._stage_of(rank) for rank in dist.get_process_group_ranks(tie.group))
            axes = {*replicated_axes(parameter, self._context), *self._context.axes_of("stage")}
            groups[parameter] = self._group(axes, stages, numbers[stages])
            numbers[stages] += 1
        compared = {}
        for name, parameter in module.named_parameters():
            group = groups.get(parameter) or self._group(replicated_axes(parameter, self._context))
            compared[name] = _Compared(WEIGHT, name, group, partial(_local_tensor, parameter), tie_of.get(parameter))
        return compared

    def _of_stepped(self, of_weights: Mapping[str, _Compared], flat: FlatWeights) -> Iterator[_Compared]:
        """Masters, averages and optimizer state of the parameters that this rank steps.

        Under ZeRO they differ between data ranks, and stages shard their copies of a tied parameter independently. Of
        a matrix that is stepped whole, one of the ranks that exchange it has the state.
        """
        for param in flat.params:
            if param.stepped is None:
                continue
            buffer = param.buffer
            group, tie = self._group_of_stepped(of_weights[param.name], partitioned=buffer.num_parts > 1)
            averages = [] if buffer.average is None else [(AVERAGE, buffer.average)]
            for kind, stored in [*((MASTER, master) for master in buffer.masters.state), *averages]:
                values = stored[param.own_range]
                yield _Compared(kind, param.name, group, partial(list, (values,)), tie)
        for weights in flat.by_optimizer:
            for param, stepped in weights.pairs():
                weight, axes = of_weights[param.name], weights.exchanged_axes(param)
                group, tie = self._group_of_stepped(weight, partitioned=param.buffer.num_parts > 1, exchanged=axes)
                yield _Compared(STATE, param.name, group, partial(_states, weights.optimizer, stepped), tie)

    def _of_settings(self, optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[_Compared]:
        """The numbers in param groups that users set; what steps count there has no default."""
        for name, optimizer, group, key in sorted(settings_of(optimizers), key=lambda setting: setting[0]):
            if key in optimizer.defaults and _numbers(group[key]):
                values = partial(_setting, group, key, self._context.device)
                yield _Compared(SETTING, name, self._group(self._names), values)

    def _group_of_stepped(
        self, weight: _Compared, *, partitioned: bool, exchanged: Sequence[str] = ()
    ) -> tuple[ReplicaGroup, TiedParameter | None]:
        if not (partitioned or exchanged):
            return weight.group, weight.tie
        differ = self._context.axes_of("stage", *(BATCH_ROLES if partitioned else ()))
        return self._group(set(weight.group.axes).difference(differ, exchanged)), None

    def _stage_of(self, rank: int) -> int:
        """The coordinate of ``rank`` on the pipeline axis; 0 if there is none."""
        coordinates = self._context.coordinates_of(rank)
        return next((coordinates[name] for name in self._context.axes_of("stage")), 0)

    # --------------------------------------------------------------------------------------------------- comparing

    @torch.no_grad()
    def check(self) -> list[Difference]:
        """Compare all values. A world collective with the same result on every rank; synchronises with the device."""
        if self._columns is None:
            everyone = gather_objects({each.column for each in self._compared})
            self._columns = sorted(set[Column]().union(*everyone))
        columns, device = self._columns, self._context.device
        if not columns:
            return []
        hashes = torch.zeros(len(self._compared), dtype=torch.int64, device=device)
        for total, each in zip(hashes, self._compared, strict=True):
            for number, tensor in enumerate(each.tensors()):
                total += hash_bits(tensor) * (2 * number + 1)
        sums = torch.zeros(len(columns), dtype=torch.int64, device=device)
        places = [columns.index(each.column) for each in self._compared]  # none, where a stage has no replicas
        sums.index_add_(0, torch.tensor(places, dtype=torch.int64, device=device), hashes)
        table = sums.new_empty(self._context.world_size, len(columns))
        all_gather_single(table.view(-1), sums)
        suspects: list[tuple[Column, tuple[int, ...]]] = []  # with the ranks of a group that differ
        for column, values in zip(columns, table.cpu().T, strict=True):
            groups = self._context.ranks_along(column[1].axes, column[1].stages)
            of_group = values[groups]
            suspects += [(column, tuple(ranks)) for ranks in groups[(of_group != of_group[:, :1]).any(dim=1)].tolist()]
        return self._located(suspects, hashes.tolist()) if suspects else []

    def _located(self, suspects: Sequence[tuple[Column, tuple[int, ...]]], hashes: Sequence[int]) -> list[Difference]:
        """The parameters that differ in ``suspects``, the same list on every rank."""
        # those of a column are in the same order on all ranks of its group, so zip() pairs replicas
        mine = {
            index: [
                (each.name, value) for each, value in zip(self._compared, hashes, strict=True) if each.column == column
            ]
            for index, (column, ranks) in enumerate(suspects)
            if self._context.rank in ranks
        }
        everyone = gather_objects(mine)
        differences = []
        for index, ((kind, _), ranks) in enumerate(suspects):
            for copies in zip(*(everyone[rank][index] for rank in ranks), strict=True):
                if len({value for _, value in copies}) > 1:
                    differences.append(self._difference(kind, dict(zip(ranks, copies, strict=True))))
        return sorted(differences, key=lambda each: each.kind != SETTING)  # the cause of all others comes first

    def _difference(self, kind: str, copies: Mapping[int, tuple[str, int]]) -> Difference:
        """Describe the difference between a group's ranks, each with its name of a parameter and its hash."""
        # On a tie the value of the lowest rank is the usual one.
        usual = Counter(value for _, value in copies.values()).most_common(1)[0][0]
        ranks = tuple(rank for rank, (_, value) in copies.items() if value != usual)
        others = tuple(rank for rank, (_, value) in copies.items() if value == usual)
        name = copies[ranks[0]][0]
        what = f"the {kind} of {name!r}" if name else f"the {kind}"
        differ = "differs" if len(ranks) == 1 else "differ"
        message = f"{what} on {listed(ranks, self._context)} {differ} from {listed(others, self._context)}"
        names = tuple((rank, local_name) for rank, (local_name, _) in copies.items())
        return Difference(kind, name, ranks, others, message, names)

    # --------------------------------------------------------------------------------------------------- repairing

    def check_in_turn(self, every: int, window: WindowRecord) -> None:
        """Count a step, made or skipped; after every ``every`` steps compare.

        A difference is raised on every rank, or repaired with a warning on the main rank. ``window``: the last step's,
        in which a model group may have had different data.

        Raises:
            ReplicaDrift: there is a difference, and ``repair_replicas`` is not set; the same message on every rank.
        """
        self._num_steps += 1
        self.last = None if self._num_steps % every else self.check()
        if not (differences := self.last):
            return
        reported = "; ".join(str(difference) for difference in differences[:NAMED])
        if len(differences) > NAMED:
            reported += f"; and {len(differences) - NAMED} more"
        batches = [call.batch for call in window.calls or ()]
        if (where := different_data(batches, self._context)) is not None:
            reported += f". A model group had different data: {where}"
        settings = any(difference.kind == SETTING for difference in differences)
        if settings or not self._context.config.repair_replicas:
            raise ReplicaDrift(
                f"replicas: {reported}. Replicas have diverged: check memory and kernels of the ranks that "
                "differ, and code that changes weights or the optimizer's settings on some ranks only; continue from a "
                "checkpoint, or set repair_replicas to copy the lowest rank's values (of weights, not of settings)",
                differences,
            )
        self.repair(differences)
        if self._context.is_main:
            warnings.warn(f"replicas: {reported}; copied from the lowest rank that holds it", stacklevel=3)

    @torch.no_grad()
    def repair(self, differences: Iterable[Difference]) -> None:
        """Copy all kinds of values of the parameters in ``differences`` from the lowest rank of their group."""
        affected = {(self._stage_of(rank), name) for each in differences for rank, name in each.names}
        stage, stage_axes = self._stage_of(self._context.rank), self._context.axes_of("stage")
        # Stages may have tied parameters in different orders; sorting makes the order of broadcasts equal.
        for each in sorted(self._compared, key=lambda each: each.column):
            if (stage, each.name) not in affected:
                continue
            for tensor in each.tensors():
                for axis in each.group.axes:  # in turn, from the first rank along it
                    group = each.tie.group if each.tie and axis in stage_axes else self._context.group_along(axis)
                    broadcast_(tensor, group)
        if self._weights is not None:
            self._weights.write_back()


def _local_tensor(parameter: nn.Parameter) -> list[torch.Tensor]:
    return [local(parameter).detach()]


def _numbers(value: Any) -> list[float]:
    """The numbers of a param group's ``value``; empty if it is something else."""
    values = value if isinstance(value, (list, tuple)) else [value]
    return [float(one) for one in values] if all(map(_is_number, values)) else []


def _is_number(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _setting(group: Mapping[str, Any], key: str, device: torch.device) -> list[torch.Tensor]:
    return [torch.tensor(_numbers(group.get(key)), dtype=torch.float64, device=device)]


def _states(optimizer: torch.optim.Optimizer, stepped: nn.Parameter) -> list[torch.Tensor]:
    """The optimizer's state tensors with one value per element of ``stepped``, sorted by key."""
    values = [value for _, value in sorted(optimizer.state.get(stepped, {}).items())]
    return [local(value) for value in values if isinstance(value, torch.Tensor) and value.numel() == stepped.numel()]
