"""Parameters sharded over data ranks, by torch's FSDP2 (``fully_shard``).

Each repeated block is a unit, and so is the rest of each pipeline stage. A unit's parameters are gathered before its
forward and its backward, and freed after both; after the backward its gradients are summed and sharded again::

    sharded fp32 parameters ─► all-gather, in half precision in modes with masters ─► forward, backward of the unit
                            ◄─ reduce-scatter in reduce_dtype (all-reduce over replicas) ◄─ its gradients

In modes with masters the sharded fp32 parameter is the master. Under a pipeline, units stay gathered for the whole
batch, and are reduced after its last backward. Source: torchtitan (Liang et al., 2024) for the combination with tensor
and pipeline parallelism.

In modes with autocast, weights of linear and convolution layers are gathered in the compute dtype, to which autocast
would cast them: its copies of gathered weights would stay until the backward.

Five things are done with private attributes of torch's, each in one method here: the parameters' memory becomes a part
of the flat buffers; parameters of one unit are gathered in two dtypes; partial sums over tensor ranks are reduced in
``reduce_dtype`` too (pytorch #190626); a parameter that got no gradient on this rank is reduced as zeros, because other
ranks may have one; and what a failed batch left is dropped.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..base.dtensor import is_dtensor
from ..base.errors import ConfigError
from ..base.module_surgery import BATCH_NORMS, PassThrough, num_hooks
from ..base.trees import map_tensors
from ..distributed.context import ParallelContext
from ..precision.policy import Precision

CAST_LAYERS = (
    *(nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)
"""Autocast casts their weights; those of derived classes too, unless their forward is another."""


UNCALLED = (
    "paramp: under parallel.data.shard, the parameters of a repeated block are gathered while that block is called; "
    "compute with them in its forward, or keep what others compute with in a module outside of the block"
)


def check_shardable(names_of: Mapping[nn.Parameter, Sequence[str]], context: ParallelContext) -> None:
    """Raise a ConfigError for a parameter without dims, or with hooks on its gradient, which would never be called."""
    if context.config.parallel.shard == 1:
        return
    for parameter, names in names_of.items():
        if not parameter.ndim and parameter.requires_grad:
            raise ConfigError(
                f"model: {names[0]!r} has no dims, expected at least one, because parallel.data.shard is "
                f"{context.config.parallel.shard}; give it the shape (1,), or freeze it"
            )
        if num_hooks(parameter):
            raise ConfigError(
                f"model: {names[0]!r} has a hook on its gradient, expected none, because parallel.data.shard is "
                f"{context.config.parallel.shard} and fully_shard calls no hooks of parameters; change the gradient in "
                "engine.before_step instead"
            )


def check_stages(stages: Sequence[nn.Module], context: ParallelContext) -> None:
    """Raise a ConfigError if two of the model's ``stages`` on one rank share a parameter: a unit is in one stage."""
    pipeline = context.config.parallel.pipeline
    for rank in range(pipeline.size if context.config.parallel.shard > 1 else 0):
        held: dict[nn.Parameter, str] = {}
        for index in pipeline.stages_of(rank):
            own = {parameter: name for name, parameter in stages[index].named_parameters()}
            if both := held.keys() & own.keys():
                name, other = min((held[one], own[one]) for one in both)
                raise ConfigError(
                    f"model: {name!r} and {other!r} are one parameter, in two stages of pipeline rank {rank}, expected "
                    f"one stage, because parallel.data.shard is {context.config.parallel.shard}; choose a schedule "
                    "with one stage a rank, or split the model elsewhere (parallel.pipeline.split)"
                )
            held |= own


def is_unit(module: nn.Module) -> bool:
    """Whether ``module`` is a unit of FSDP2."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    return kind is not None and isinstance(module, kind)


class ShardedUnits:
    """The units of this rank's stages, sharded over the ``shard`` axis and replicated over ``replicate``."""

    def __init__(self, stages: Sequence[nn.Module], blocks: Iterable[str], context: ParallelContext) -> None:
        """Shard the parameters of ``stages``, in place, with their ``blocks`` (names in the model) as units."""
        self._context = context
        self._pipelined = context.stage_axis.size > 1
        self._roots: list[Any] = []
        self._units: list[Any] = []
        self._listeners: list[Callable[[torch.Tensor], None]] = []
        names = list(blocks)
        sharded: set[nn.Parameter] = set()
        for stage in stages:
            self._shard_stage(stage, names, sharded)
            sharded.update(stage.parameters())
        self._set_prefetch(context.config.parallel.data_axes.prefetch)

    # ------------------------------------------------------------------------------------------------------ sharding

    def _shard_stage(self, stage: nn.Module, blocks: Sequence[str], done: set[nn.Parameter]) -> None:
        """Shard one stage; ``done``: the parameters of those before, which a copied module may list again."""
        before = dict(stage.named_parameters(remove_duplicate=False))
        modules = dict(stage.named_modules())
        precision = self._context.config.precision
        if precision.keep_batchnorm_fp32:
            for module in modules.values():
                if isinstance(module, BATCH_NORMS) and next(module.parameters(recurse=False), None) is not None:
                    self._fully_shard(module, None, done)
        for block in map(modules.get, blocks):
            if block is not None and not isinstance(block, PassThrough) and _is_alone(block, before):
                self._fully_shard(block, _gathered_dtype(precision), done)
        self._fully_shard(stage, _gathered_dtype(precision), done, is_root=True)
        for name, new in stage.named_parameters(remove_duplicate=False):
            if before[name] is not new:
                vars(new).update(vars(before[name]))  # attributes that optimizers and others read

    def _fully_shard(
        self, module: nn.Module, dtype: torch.dtype | None, done: set[nn.Parameter], *, is_root: bool = False
    ) -> None:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        context = self._context
        module.register_forward_hook(_without_views)  # before that of fully_shard
        reduce_dtype = context.config.precision.reduce_dtypes.dp
        kept = self._pipelined or is_root or not context.config.parallel.data_axes.reshard_after_forward
        unit: Any = fully_shard(
            module,
            mesh=_data_mesh(context),
            reshard_after_forward=not kept,
            mp_policy=MixedPrecisionPolicy(dtype, reduce_dtype, cast_forward_inputs=False),
            ignored_params={one for one in module.parameters() if one in done or _is_whole(one)},
        )
        unit.set_gradient_divide_factor(1.0)  # the loss is divided by the number of samples on all ranks already
        unit.set_force_sum_reduction_for_comms(True)
        self._units.append(unit)
        if is_root:
            self._roots.append(unit)
        for group in _groups(unit):
            own = group.post_backward
            group.post_backward = partial(self._post_backward, group, own)
            if any(map(self._is_gathered_in_half, group.fsdp_params)):
                for one in group.fsdp_params:
                    one.init_dtype_attrs = partial(self._init_dtypes, one, one.init_dtype_attrs)

    def _is_gathered_in_half(self, one: Any) -> bool:
        """Whether autocast casts the parameter wherever it is used."""
        precision, info = self._context.config.precision, one._module_info
        uses = zip((info.module, *info.shared_modules), (info.param_name, *info.shared_param_names), strict=True)
        if not precision.autocast or precision.float8 is not None:
            return False
        return all(name == "weight" and _runs_cast_layer(module) for module, name in uses)

    def _init_dtypes(self, one: Any, own: Callable[[Any], None], policy: Any) -> None:
        """Set the dtypes of a parameter of a unit that gathers some in half: gradients are reduced as elsewhere."""
        own(policy)
        if self._is_gathered_in_half(one):
            one.param_dtype = self._context.config.precision.compute
        one.reduce_dtype = policy.reduce_dtype or one.orig_dtype

    def _set_prefetch(self, count: int) -> None:
        blocks = [unit for unit in self._units if unit not in self._roots]
        for index, unit in enumerate(blocks if count else []):
            unit.set_modules_to_forward_prefetch(blocks[index + 1 : index + 1 + count])
            unit.set_modules_to_backward_prefetch(blocks[max(0, index - count) : index][::-1])

    def padded_sizes(self) -> dict[nn.Parameter, int]:
        """The elements that each rank's shard of a parameter takes in an all-gather."""
        return {_held(one): one.padded_sharded_param_size.numel() for one in self._params()}

    def use_memory(self, memory: Mapping[nn.Parameter, torch.Tensor]) -> None:
        """Gather each parameter from its ``memory``, 1-dim and of its padded size, where its local tensor is."""
        for one in self._params():
            one.sharded_param = _held(one)
            if one.sharded_param in memory:
                one._sharded_param_data = memory[one.sharded_param]

    def gathered(self, parameter: nn.Parameter) -> torch.Tensor:
        """The gathered parameter that modules have in a batch; ``parameter`` if it was never gathered."""
        found = (one for one in self._params() if _held(one) is parameter and _has_been_gathered(one))
        return next((one._unsharded_param for one in found), parameter)

    def _params(self) -> Iterator[Any]:
        """torch's record of each sharded parameter."""
        return (one for unit in self._units for group in _groups(unit) for one in group.fsdp_params)

    # ------------------------------------------------------------------------------------------------------- batches

    @contextmanager
    def running(self, *, backward: bool) -> Iterator[None]:
        """A context for the forwards of a batch, and their backwards if ``backward``; else nothing stays gathered."""
        self.reshard()
        if backward and self._pipelined:
            for root in self._roots:
                root.set_requires_gradient_sync(False)
                root.set_is_last_backward(False)
                root.set_reshard_after_backward(False)
        with self.resetting():
            yield
        if backward and self._pipelined:
            for root in self._roots:
                self._reduce(root)
        self.reshard()

    @contextmanager
    def resetting(self) -> Iterator[None]:
        """A context for a forward or a backward, after whose failure another batch can follow."""
        try:
            yield
        except BaseException as error:
            self.reset()
            if "mixed torch.Tensor and DTensor" in str(error):
                error.add_note(UNCALLED)
            raise

    def _reduce(self, root: Any) -> None:
        """Reduce the gradients that the backwards of a stage have added up, as torch's own pipeline stages do."""
        root.set_is_last_backward(True)
        root.set_reshard_after_backward(True)
        root.set_requires_gradient_sync(True)
        state = root._get_fsdp_state()
        for one in state._state_ctx.all_states:
            for group in _groups_of(one):
                group.post_backward()
        state._root_post_backward_final_callback()

    def reshard(self) -> None:
        """Free gathered parameters, so that the next forward gathers what a step or a load has written."""
        for unit in self._units:
            unit.reshard()

    def reset(self) -> None:
        """Drop what a failed batch left: gathered parameters and gradients that are not reduced yet."""
        for root in self._roots:
            root.set_requires_gradient_sync(True)
            root.set_is_last_backward(True)
            root.set_reshard_after_backward(True)
            if root._get_fsdp_state()._is_root:
                _reset(root)
        for one in self._params():
            one.unsharded_accumulated_grad = None
            if hasattr(one, "_unsharded_param"):
                one._unsharded_param.grad = None
        self.reshard()

    # ----------------------------------------------------------------------------------------------------- gradients

    def on_gradient(self, call: Callable[[torch.Tensor], None]) -> Callable[[], None]:
        """Call ``call`` with each sharded parameter that a backward gives a gradient, until the result is called."""
        self._listeners.append(call)
        return partial(self._listeners.remove, call)

    def _post_backward(self, group: Any, own: Callable[[], None], *_: Any) -> None:
        """Complete the gradients of a unit before torch's ``own`` method adds them up and reduces them."""
        trained = [one for one in group.fsdp_params if one.sharded_param.requires_grad and _has_been_gathered(one)]
        for one in trained:
            for call in self._listeners if _gradient(one) is not None else ():
                call(one.sharded_param)
        if group.reduce_grads and trained:
            self._complete(trained)
        own()

    def _complete(self, trained: Sequence[Any]) -> None:
        """Give each parameter a gradient, all in one dtype and with the parameters' placements."""
        for one in trained:
            if _gradient(one) is None:  # other ranks may have one, and all take part in the reduction
                one._unsharded_param.grad = torch.zeros_like(one._unsharded_param)
        mixed = len({_gradient(one).dtype for one in trained}) > 1
        if mixed or any(one.unsharded_accumulated_grad is not None or _is_partial(one) for one in trained):
            for one in trained:
                one.accumulate_unsharded_grad_if_needed()
                one.to_accumulated_grad_if_needed()
        for one in filter(_is_partial, trained):
            self._sum_over_tensor_ranks(one)

    def _sum_over_tensor_ranks(self, one: Any) -> None:
        gradient = _gradient(one)
        dtype = self._context.config.precision.reduce_dtypes.tp
        wide = gradient.dtype if dtype is None else torch.promote_types(gradient.dtype, dtype)
        summed = gradient.to(wide).redistribute(placements=one._unsharded_dtensor_spec.placements).to(gradient.dtype)
        if one.unsharded_accumulated_grad is not None:
            one.unsharded_accumulated_grad = summed
        else:
            one._unsharded_param.grad = summed


def _without_views(_: nn.Module, __: Any, output: Any) -> Any:
    """``output`` with tensors that are no views, but share their memory.

    The caller may change it in place. Of a view, autograd would then call no hook that gathers for the backward.
    """
    return map_tensors(lambda one: one if one._base is None else _NoView.apply(one), output)


class _NoView(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, view: torch.Tensor) -> torch.Tensor:
        return view.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def _runs_cast_layer(module: nn.Module) -> bool:
    """Whether the forward of ``module`` is that of a layer whose weight autocast casts."""
    return any(isinstance(module, kind) and type(module).forward is kind.forward for kind in CAST_LAYERS)


def _is_whole(parameter: nn.Parameter) -> bool:
    """Whether every rank has all of a parameter, which has no elements to shard, or no dims and is frozen."""
    return not parameter.ndim or not parameter.numel()


def _gathered_dtype(precision: Precision) -> torch.dtype | None:
    """The dtype in which parameters are gathered and computed with; None: that of the sharded parameters."""
    return precision.weights if precision.masters else None


def _data_mesh(context: ParallelContext) -> Any:
    """The mesh over which units are sharded: its last axis shards, the one before, if there is one, replicates."""
    axes = (*context.axes_of("replicate"), *context.axes_of("shard"))
    return context.mesh[tuple(name for name in axes if context.mesh[name].size() > 1)]


def _is_alone(block: nn.Module, parameters: Mapping[str, nn.Parameter]) -> bool:
    """Whether ``block`` has parameters, and shares none with the rest of the stage, whose ``parameters`` are given."""
    own = [id(parameter) for parameter in dict(block.named_parameters(remove_duplicate=False)).values()]
    everywhere = [id(parameter) for parameter in parameters.values()]
    return bool(own) and all(everywhere.count(one) == own.count(one) for one in set(own))


def _reset(root: Any) -> None:
    """Set torch's records of the batch in ``root``, which failed, to those of none."""
    if hasattr(root, "reset_iter_state"):  # torch 2.13
        root.reset_iter_state()
        return
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

    state = root._get_fsdp_state()
    if state._device.type == "cuda":
        torch.cuda.synchronize(state._device)
    shared, communication = state._state_ctx, state._comm_ctx
    shared.iter_forward_root, shared.post_backward_final_callback_queued = None, False
    communication.all_gather_state = communication.reduce_scatter_state = None
    communication.post_forward_order.clear()
    for one in shared.all_states:
        one._training_state = TrainingState.IDLE
        for group in _groups_of(one):
            work = group._all_gather_result and group._all_gather_result.all_gather_work
            if isinstance(work, dist.Work):
                work.wait()
            group._all_gather_result = group._post_reduce_event = group._all_reduce_state = None
            group._reshard_after_forward_event = group._partial_reduce_output = None
            group._post_forward_indices.clear()
            group._training_state = TrainingState.IDLE


def _groups(unit: Any) -> list[Any]:
    return _groups_of(unit._get_fsdp_state())


def _groups_of(state: Any) -> list[Any]:
    """torch's groups of parameters that are gathered together."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]  # torch 2.11


def _held(one: Any) -> Any:
    """The parameter that the module of torch's record ``one`` has now."""
    return one._module_info.module._parameters[one._module_info.param_name]


def _has_been_gathered(one: Any) -> bool:
    return hasattr(one, "_unsharded_param")


def _gradient(one: Any) -> Any:
    """The gradient of a gathered parameter that is not reduced over data ranks yet; None if there is none."""
    accumulated = one.unsharded_accumulated_grad
    return one._unsharded_param.grad if accumulated is None else accumulated


def _is_partial(one: Any) -> bool:
    """Whether the gradient has other placements on the tensor axis than the parameter."""
    gradient = _gradient(one)
    return is_dtensor(gradient) and gradient.placements != one._unsharded_dtensor_spec.placements
