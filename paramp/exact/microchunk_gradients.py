"""Gradients that are added up in one tree over the microchunks of the global batch."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain

import torch
import torch.distributed as dist
from torch import nn

from ..base import loop_block_sizes
from ..base.torch_internals import expect
from ..distributed.replicated_axes import replicated_axes
from ..optim.flat_buffer import FlatParam
from ..optim.flat_gradients import FlatGradients, GradientReduction
from ..scaling.complete_and_unscale_gradients import sum_tied_gradients
from .gradient_taps import Tap
from .tree_sum import SumTree, Terms, own_slice_of_sum, sum_over, sum_over_

expect("torch._foreach_zero_")


class MicrochunkGradients(GradientReduction):
    """The reduction of gradients that are complete over data ranks after each call.

    The gradient of a call is the tree's sum over its microchunks, this rank's first, in fp32; it is added to that of
    earlier calls of the window, and rounded to the dtype of gradients.
    """

    sums_changes = False

    def attach(self, gradients: FlatGradients) -> None:
        super().attach(gradients)
        self._stages: dict[int, list[FlatParam]] = {}
        self._taps: dict[int, list[Tap]] = {}
        self._experts: dict[int, dict[FlatParam, list[Tap]]] = {}
        self._num_sources = self._num_microchunks = 1
        self._trees: dict[int, SumTree] = {}
        self._expert_trees: dict[int, SumTree] = {}
        self._earlier: dict[FlatParam, torch.Tensor] = {}
        self._in_call = False
        self._written: dict[FlatParam, int] = {}  # versions of tapped parameters after a call
        self.compares_replicas = True
        """Whether the next step compares what tensor ranks replicate."""

    def assign_stages(
        self, stages: Mapping[int, nn.Module], first_names: Mapping[str, str], experts: Collection[str] = ()
    ) -> tuple[dict[str, Tap], dict[str, list[Tap]]]:
        """Tell apart the gradients of ``stages``, this rank's, by their index.

        Args:
            first_names: any name of a parameter of the whole model -> its first name.
            experts: the names of the modules that are shared along the expert axis.

        Returns:
            Taps for the names of tied parameters; and for the parameters of experts, one for each rank of that axis.
        """
        by_parameter = {param.parameter: param for param in self._params}
        self._num_sources = self._context.config.parallel.expert
        taps: dict[str, Tap] = {}
        of_experts: dict[str, list[Tap]] = {}
        for index, stage in stages.items():
            self._stages[index], self._taps[index], self._experts[index] = [], [], {}
            for name, parameter in stage.named_parameters(remove_duplicate=False):
                param = by_parameter.get(parameter)
                if param is None:
                    continue
                first = first_names[name]
                if name.rpartition(".")[0] in experts:
                    what = "of experts that data ranks share"
                    of_experts[name] = [Tap(param, name, what) for _ in range(self._num_sources)]
                    self._experts[index][param] = of_experts[name]
                elif first == name:
                    self._stages[index].append(param)
                else:
                    taps[name] = Tap(param, name, f"which is tied to {param.name!r}")
                    self._taps[index].append(taps[name])
        return taps, of_experts

    def of_microchunk(self, stage: int) -> Iterator[tuple[str, FlatParam, torch.Tensor, int]]:
        """Name, parameter and gradient of the microchunk whose backward through ``stage`` ends, and its data rank.

        Each gradient is of the uses of the parameter under one name, in the shape of its local part. Experts have
        gradients of the microchunks of all ranks that share them.
        """
        rank, params = self._context.dp.rank, self._stages[stage]
        yield from ((param.name, param, param.local_gradient, rank) for param in params if self._has_one(param))
        for tap in self._taps[stage]:
            if tap.microchunk is not None:
                yield tap.name, tap.param, tap.microchunk, rank
        first = rank - rank % self._num_sources
        for taps in self._experts[stage].values():
            for source, tap in enumerate(taps, first):
                if tap.microchunk is not None and not tap.param.reserved:  # a shard's whole gradient has other places
                    yield tap.name, tap.param, tap.microchunk, source

    def of_window(self) -> Iterator[tuple[str, FlatParam, torch.Tensor]]:
        """The gradients of the window, as :meth:`of_microchunk`, before :meth:`before_collection`."""
        params, taps = chain(*self._stages.values(), *self._experts.values()), chain(*self._taps.values())
        yield from ((param.name, param, param.local_gradient) for param in params if self._has_one(param))
        yield from ((tap.name, tap.param, tap.window) for tap in taps if tap.window is not None)

    def _has_one(self, param: FlatParam) -> bool:
        """Whether a gradient of ``param`` was added since its last zero."""
        return param.version != self._zeros[param]

    def begin_call(self, num_microchunks: int) -> None:
        """Prepare a call of ``num_microchunks`` microchunks on each data rank."""
        self._num_microchunks = num_microchunks
        self._trees = {index: SumTree(num_microchunks) for index in self._stages}
        self._expert_trees = {index: SumTree(num_microchunks * self._num_sources) for index in self._stages}
        given = [param for param in self._params if self._has_one(param)]
        self._earlier = {param: param.local_gradient.clone() for param in given}
        self._clear(given)
        for tap in self._every_tap():
            tap.microchunk = None
        self._in_call = True

    def _every_tap(self) -> Iterator[Tap]:
        for experts in self._experts.values():
            yield from chain(*experts.values())
        yield from chain(*self._taps.values())

    @torch.no_grad()
    def end_microchunk(self, stage: int, index: int) -> None:
        """Add the gradients of the microchunk ``index``, whose backward through ``stage`` has just ended."""
        others = [tap.pop() for tap in self._taps[stage]]
        experts = [[tap.pop() for tap in taps] for taps in self._experts[stage].values()]
        if not self._in_call:  # it is computed again, for a diagnosis
            return
        self._trees[stage].add(index, [*self._take(self._stages[stage]), *others])
        for source, terms in enumerate(zip(*experts, strict=True)):
            self._expert_trees[stage].add(source * self._num_microchunks + index, [*terms])

    def _take(self, params: Sequence[FlatParam]) -> Terms:
        """The gradients that the last microchunk gave to ``params``, in fp32; they are dropped where they were."""
        arrived = [param if self._has_one(param) else None for param in params]
        taken = [None if param is None else param.local_gradient.to(torch.float32, copy=True) for param in arrived]
        self._clear([param for param in arrived if param is not None])
        return taken

    def end_last_backward(self) -> None:
        """End a call: sum its gradients over data ranks, and add those of earlier calls. A collective of these."""
        if not self._in_call:
            return
        self._in_call = False
        for stage, params in self._stages.items():
            taps = self._taps[stage]
            found = self._trees[stage].total() or [None] * (len(params) + len(taps))
            sums = self._over_data_ranks(found, [*params, *(tap.param for tap in taps)])
            for param, value in zip(params, sums, strict=False):
                self._write(param, value)
            for tap, value in zip(taps, sums[len(params) :], strict=True):
                if value is not None:
                    tap.window = _sum(tap.window, value, tap.param.local_gradient)
            experts = [*self._experts[stage]]
            found = self._expert_trees[stage].total() or [None] * len(experts)
            for param, value in zip(experts, self._over_data_ranks(found, experts, of_experts=True), strict=True):
                self._write(param, value)
        self._trees, self._expert_trees, self._earlier = {}, {}, {}
        self._written = {tap.param: tap.param.version for tap in chain(*self._taps.values()) if tap.window is not None}

    def _over_data_ranks(self, found: Terms, params: Sequence[FlatParam], *, of_experts: bool = False) -> Terms:
        """The sums over data ranks of what each of these ``found`` for ``params``, of which some may be the same.

        ``of_experts``: over those that have the same experts; the others' microchunks are in ``found``.
        """
        group, device = self._replicas if of_experts else self._context.dp.group, self._context.device
        if not params or group is None or group.size() == 1:
            return found
        values = [
            torch.zeros(param.size, device=device) if value is None else value.reshape(-1)
            for param, value in zip(params, found, strict=True)
        ]
        flat = torch.cat([*values, _presence_of(found, device)])
        sum_over_(flat, group)
        *sums, counts = flat.split([*(param.size for param in params), len(params)])
        return _without_absent(sums, found, counts)

    @property
    def _replicas(self) -> dist.ProcessGroup | None:
        """The data ranks that have the same experts; those of the context axis have the same gradients already."""
        names = self._context.axes_of("replicate")
        return self._context.group_along(names[0]) if names else None

    def _write(self, param: FlatParam, value: torch.Tensor | None) -> None:
        earlier = self._earlier.get(param)
        if value is not None:
            param.local_gradient.copy_(_sum(earlier, value, param.local_gradient))
        elif earlier is not None:
            param.local_gradient.copy_(earlier)

    def _clear(self, params: Sequence[FlatParam]) -> None:
        if params:
            torch._foreach_zero_([param.local_gradient for param in params])
        self._zeros.update((param, param.version) for param in params)

    def forget(self) -> None:
        for tap in self._every_tap():
            tap.microchunk = tap.window = None
        self._trees, self._expert_trees, self._earlier, self._written, self._in_call = {}, {}, {}, {}, False

    def check(self) -> None:
        """As in the base class; also for a change by hand that the gradient of a tied use would miss.

        The first call is a collective of tensor ranks, which have the same gradients of what they replicate, unless one
        has a part of it only, because a tensor of its own was used with sharded ones.
        """
        if self.compares_replicas:
            self.compares_replicas = False
            self._check_replicated()
        for param, version in self._written.items():
            if param.version != version or param.parameter.grad is not param.gradient:
                raise RuntimeError(
                    f"the gradient of {param.name!r}, a tied parameter, was changed by hand, but with reproducible the "
                    "gradients of its uses are added at the step only; do not change it, or untie the parameter"
                )

    def _check_replicated(self) -> None:
        axis = self._context.tensor_axis
        if axis.size == 1:
            return
        axes = set(self._context.axes_of("tensor"))
        params = [param for param in self._params if axes & {*replicated_axes(param.parameter, self._context)}]
        if not params:  # the same on all tensor ranks
            return
        own = torch.tensor([_digest(param.local_gradient) for param in params], device=self._context.device)
        bounds = torch.stack([own, -own])
        dist.all_reduce(bounds, dist.ReduceOp.MAX, group=axis.group)
        for param, most, minus_least in zip(params, *bounds.tolist(), strict=True):
            if most != -minus_least:
                raise RuntimeError(
                    f"reproducible: tensor ranks have different gradients of {param.name!r}, which they replicate: "
                    "what is computed with it is used between a colwise and a rowwise layer, so that each rank has a "
                    "part of the gradient; use it behind the rowwise layer, or leave these layers out of the plan"
                )

    def begin_look(self) -> Iterator[tuple[torch.Tensor, float]]:
        """Those of tied uses."""
        taps = chain(*self._taps.values())
        return ((tap.window, tap.param.norm_weight) for tap in taps if tap.window is not None)

    def before_collection(self, found_inf: torch.Tensor) -> None:
        for tap in chain(*self._taps.values()):
            if tap.window is not None:
                tap.param.local_gradient.add_(tap.window)
                tap.window = None

    @torch.no_grad()
    def reduce(self) -> None:
        """Sum the gradients of tied parameters over the stages that hold a copy."""
        sum_tied_gradients(self._context, self._gradients.parameters, torch.float32, complete=True)


class ShardedMicrochunkGradients(MicrochunkGradients):
    """As :class:`MicrochunkGradients`: a microchunk's gradients are whole, and of a call's each rank gets its shards.

    Units gather parameters as elsewhere, and reduce no gradients. So those of a microchunk are as without them.
    """

    def _take(self, params: Sequence[FlatParam]) -> Terms:
        return [self._take_one(param) for param in params]

    def _take_one(self, param: FlatParam) -> torch.Tensor | None:
        if not param.reserved:  # it has no elements, and is not gathered
            return super()._take([param])[0]
        assert self.units is not None
        gradient = self.units.take_gradient(param.parameter)
        return None if gradient is None else gradient.float() + 0.0  # 0 for -0, as where gradients are added to zeros

    def _over_data_ranks(self, found: Terms, params: Sequence[FlatParam], *, of_experts: bool = False) -> Terms:
        if not params:
            return found
        parallel, device = self._context.config.parallel, self._context.device
        count = parallel.shard * parallel.context.size // (parallel.expert if of_experts else 1)
        lengths = [*(param.reserved for param in params), len(params)]
        present = _presence_of(found, device).expand(count, -1)
        shards = torch.cat([*(_shards(*pair, count, device) for pair in zip(params, found, strict=True)), present], 1)
        parts = shards.split(max(1, loop_block_sizes.SUM_PIECE // count), dim=1)
        own = torch.cat([self._own_shard(part, of_experts) for part in parts])
        *sums, counts = own.split(lengths)
        return _without_absent([value[: param.size] for param, value in zip(params, sums, strict=True)], found, counts)

    def _own_shard(self, shards: torch.Tensor, of_experts: bool) -> torch.Tensor:
        """This rank's row of the sum of ``shards`` over data ranks, which are numbered along the mesh's axes.

        Ranks of the context axis, the last of these, have the same, and other rows. Those of the expert axis have other
        experts.
        """
        context, mesh = self._context, self._context.mesh
        summed = {"shard"} if of_experts else {"shard", "expert"}
        axes = [(dim, mesh.get_group(dim), role) for dim, role in enumerate(context.roles.values())]
        cut = [dim for dim, _, role in axes if role in summed or role == "context"]
        shards = shards.view(*(mesh.size(dim) for dim in cut), -1)
        for dim, group, role in reversed(axes):
            if role == "replicate":
                shards = sum_over(shards, group)
            elif role in summed:
                shards = own_slice_of_sum(shards, group, cut.index(dim))
        return shards.flatten(0, -2)[context.cp.rank]


def _shards(param: FlatParam, value: torch.Tensor | None, count: int, device: torch.device) -> torch.Tensor:
    """All ``count`` shards of a gradient, zeros if it is None, as rows; the last ones may be short."""
    rows = torch.zeros(count, param.reserved, device=device)
    if value is None:
        return rows
    here = param.local_gradient.shape
    if value.ndim > 1 and value.shape[0] == here[0] and value.shape[1] == count * here[1]:  # a part of each expert
        return torch.stack(value.chunk(count, 1)).flatten(1)
    rows.view(-1)[: value.numel()] = value.reshape(-1)
    return rows


def _presence_of(terms: Terms, device: torch.device) -> torch.Tensor:
    """0 for each of ``terms`` that is None, else 1; 1-dim float32 on ``device``, to which nothing is copied."""
    present = torch.ones(len(terms), device=device)
    for index, term in enumerate(terms):
        if term is None:
            present[index].zero_()
    return present


def _without_absent(sums: Sequence[torch.Tensor], terms: Terms, counts: torch.Tensor) -> Terms:
    """``sums`` of the ``terms`` of all ranks, None where no rank has a term.

    ``counts``: the sum of what :func:`_presence_of` returns; the host waits for it only if this rank lacks a term.
    """
    if all(term is not None for term in terms):
        return [*sums]
    return [value if count else None for value, count in zip(sums, counts.tolist(), strict=True)]


def _sum(earlier: torch.Tensor | None, value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """``value``, plus ``earlier`` if it is not None, rounded to the dtype of ``like`` and of its shape."""
    whole = value.view(like.shape)
    return (whole if earlier is None else earlier.to(whole.dtype) + whole).to(like.dtype)


def _digest(tensor: torch.Tensor) -> int:
    values = tensor.detach().reshape(-1).contiguous()  # a tensor without dims has no bytes to view
    return zlib.crc32(values.view(torch.uint8).cpu().numpy().tobytes())
