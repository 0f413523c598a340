"""Parameters sharded over data ranks, by torch's FSDP2 (``fully_shard``).

Each repeated block is a unit, and so is the rest of each pipeline stage; with an expert axis experts are units too,
over fewer ranks. A unit's parameters are gathered before its forward and its backward, and freed after both; after the
backward its gradients are summed and sharded again::

    sharded fp32 parameters ─► all-gather, in half precision in modes with masters ─► forward, backward of the unit
                            ◄─ reduce-scatter in reduce_dtype (all-reduce over replicas) ◄─ its gradients

In modes with masters the sharded fp32 parameter is the master. Under a pipeline, units stay gathered for the whole
batch, and are reduced after its last backward. Source: torchtitan (Liang et al., 2024) for the combination with tensor
and pipeline parallelism.

In modes with autocast, weights of linear and convolution layers are gathered in the compute dtype, to which autocast
would cast them: its copies of gathered weights would stay until the backward.

Seven things are done with private attributes of torch's, each in one method here: the parameters' memory becomes a part
of the flat buffers; parameters of one unit are gathered in two dtypes; partial sums over tensor ranks are reduced in
``reduce_dtype`` too (pytorch #190626, which 2.15 has mended); a parameter that got no gradient on this rank is reduced
as zeros, because other ranks may have one; gathered parameters that were trained for a trial are as frozen as their
shards again; what a failed batch left is dropped; and what is gathered in inference mode can be trained.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from ...base.dtensor import local
from ...base.errors import AfterBatchError
from ...base.module_surgery import BATCH_NORMS, PassThrough, thawed_since
from ...base.torch_internals import older_than
from ...distributed.context import ParallelContext
from ...precision.modes import Precision
from . import fsdp2_internals
from .unit_hooks import GatheredWeights, UnitOutput, hook_bases
from .unit_order_check import END, UnitOrder

SHARDS_FLOATS_ALONE = older_than("2.12")
"""``fully_shard`` cannot shard frozen integers, and loses the imaginary parts of frozen complex parameters."""

CAST_LAYERS = (
    *(nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)
"""Autocast casts their weights; those of derived classes too, unless their forward is another."""

ERRORS = {
    "mixed torch.Tensor and DTensor": (
        "paramp: under parallel.data.shard, the parameters of a repeated block are gathered while it is called; "
        "compute with them in its forward, or keep what others compute with in a module outside of the block. Those "
        "outside of blocks are freed if the forward calls torch.autograd.grad; set data.shard to 1 then, and zero=1 to "
        "share the optimizer's state"
    ),
    "must have the same dtype": (
        "paramp: under parallel.data.shard, mixed modes gather the weights of linear and convolution layers in half "
        "precision, also where autocast is off; give a layer that computes in fp32 a class with a forward of its own"
    ),
}
"""Parts of the messages of torch's errors, and what they mean here."""


class ShardedUnits:
    """The units of this rank's stages, sharded over the ``shard`` axis and replicated over ``replicate``.

    With an expert or context axis, all but experts are sharded over all of these axes (the context's ``shard_mesh``),
    and experts over those but the expert axis (its ``expert_mesh``).
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        blocks: Iterable[str],
        context: ParallelContext,
        *,
        experts: Collection[str] = (),
        reduces: bool = True,
    ) -> None:
        """Shard the parameters of ``stages``, in place, with their ``blocks`` (names in the model) as units.

        Args:
            experts: names of the modules whose parameters are sharded over the expert axis already.
            reduces: units sum gradients over data ranks; else :meth:`take_gradient` returns those of this rank.
        """
        self._context = context
        self._pipelined = context.stage_axis.size > 1
        self._reduces = reduces
        self._roots: list[Any] = []
        self._units: list[Any] = []
        self._records: dict[nn.Parameter, Any] = {}
        self._names: dict[Any, str] = {}
        self._changed: list[str] = []
        self._listeners: list[Callable[[torch.Tensor], None]] = []
        self._order = UnitOrder(context)
        self.sum_for_loss_ = self._order.sum_for_loss_
        names = list(blocks)
        sharded: set[nn.Parameter] = set()
        for stage in stages:
            self._shard_stage(stage, names, experts, sharded)
            sharded.update(stage.parameters())
        every = {parameter: name for stage in stages for name, parameter in stage.named_parameters()}
        self._names.update((one, every[fsdp2_internals.held(one)]) for one in self._params())
        trained = self._trained()
        self._order.watch([*self._names.values()], trained)
        named = ((name, one) for one, name in self._names.items())
        self._frozen = [pair for pair, is_trained in zip(named, trained, strict=True) if not is_trained]

    # ------------------------------------------------------------------------------------------------------ sharding

    def _shard_stage(
        self, stage: nn.Module, blocks: Sequence[str], experts: Collection[str], done: set[nn.Parameter]
    ) -> None:
        """Shard one stage; ``done``: the parameters of those before, which a copied module may list again."""
        before = dict(stage.named_parameters(remove_duplicate=False))
        modules = dict(stage.named_modules())
        precision = self._context.config.precision
        if precision.keep_batchnorm_fp32:
            for name, module in modules.items():
                if isinstance(module, BATCH_NORMS) and next(module.parameters(recurse=False), None) is not None:
                    self._fully_shard(module, repr(name), None, done)
        for name in filter(modules.__contains__, experts):
            self._fully_shard(modules[name], repr(name), _gathered_dtype(precision), done, of_experts=True)
        units: list[Any] = []
        for name in blocks:
            block = modules.get(name)
            if block is None or name in experts or isinstance(block, PassThrough):
                continue
            if _is_alone(block, before):
                self._fully_shard(block, repr(name), _gathered_dtype(precision), done)
                units.append(block)
        _set_prefetch(units, self._context.config.parallel.data_axes.prefetch)
        self._fully_shard(stage, "the rest of the model", _gathered_dtype(precision), done, is_root=True)
        for name, new in stage.named_parameters(remove_duplicate=False):
            if before[name] is not new:
                vars(new).update(vars(before[name]))  # attributes that optimizers and others read

    def _fully_shard(
        self,
        module: nn.Module,
        name: str,
        dtype: torch.dtype | None,
        done: set[nn.Parameter],
        *,
        is_root: bool = False,
        of_experts: bool = False,
    ) -> None:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        context = self._context
        output, weights = UnitOutput(), GatheredWeights(self._names, self._changed)
        module.register_forward_pre_hook(output.begin)
        module.register_forward_pre_hook(weights.begin)
        module.register_forward_hook(weights.check)  # like the next one before that of fully_shard
        module.register_forward_hook(output.prepare)
        # Given in any case: without it torch reduces in ``dtype``, but from 2.15 on in that of the sharded parameters.
        reduce_dtype = context.config.precision.reduce_dtypes.dp or dtype
        kept = self._pipelined or is_root or not context.config.parallel.data_axes.reshard_after_forward
        mesh = _data_mesh(context, of_experts=of_experts)
        unit: Any = fully_shard(
            module,
            mesh=mesh,
            reshard_after_forward=not kept,
            mp_policy=MixedPrecisionPolicy(dtype, reduce_dtype, cast_forward_inputs=False),
            ignored_params={one for one in module.parameters() if one in done or _is_whole(one)},
            shard_placement_fn=partial(_experts_placement, mesh.size(-1)) if of_experts else None,
        )
        module.register_forward_pre_hook(weights.refuse_replaced, prepend=True)  # before that of fully_shard
        state = unit._get_fsdp_state()
        state._register_pre_backward_hook = partial(hook_bases, state._register_pre_backward_hook)
        unit.set_gradient_divide_factor(1.0)  # the loss is divided by the number of samples on all ranks already
        unit.set_force_sum_reduction_for_comms(True)
        self._order.follow(unit, name)
        self._units.append(unit)
        if is_root:
            self._roots.append(unit)
        for group in fsdp2_internals.groups(unit):
            own = group.post_backward
            group.post_backward = partial(self._post_backward, group, own)
            gathering = group.wait_for_unshard
            group.wait_for_unshard = partial(fsdp2_internals.outside_inference_mode, gathering)
            if any(map(self._is_gathered_in_half, group.fsdp_params)):
                for one in group.fsdp_params:
                    one.init_dtype_attrs = partial(self._init_dtypes, one, one.init_dtype_attrs)

    def _is_gathered_in_half(self, one: Any) -> bool:
        """Whether autocast casts the parameter wherever it is used."""
        precision, info = self._context.config.precision, one._module_info
        uses = zip((info.module, *info.shared_modules), (info.param_name, *info.shared_param_names), strict=True)
        if not precision.autocast or precision.float8 is not None or not self._reduces:
            return False
        return all(name == "weight" and _runs_cast_layer(module) for module, name in uses)

    def _init_dtypes(self, one: Any, own: Callable[[Any], None], policy: Any) -> None:
        """Set the dtypes of a parameter of a unit that gathers some in half: gradients are reduced as elsewhere."""
        own(policy)
        if self._is_gathered_in_half(one):
            one.param_dtype = self._context.config.precision.compute
        one.reduce_dtype = policy.reduce_dtype or one.orig_dtype

    def padded_sizes(self) -> dict[nn.Parameter, int]:
        """The elements that each rank's shard of a parameter takes in an all-gather."""
        return {fsdp2_internals.held(one): one.padded_sharded_param_size.numel() for one in self._params()}

    def use_memory(self, memory: Mapping[nn.Parameter, torch.Tensor]) -> None:
        """Gather each parameter from its ``memory``, 1-dim and of its padded size, where its local tensor is."""
        for one in self._params():
            one.sharded_param = fsdp2_internals.held(one)
            self._records[one.sharded_param] = one
            if one.sharded_param in memory:
                one._sharded_param_data = memory[one.sharded_param]

    def put_back(self, memory: Mapping[nn.Parameter, torch.Tensor]) -> None:
        """Gather the parameters that modules have, as in :meth:`use_memory`, after some were replaced for a while.

        ``load_state_dict(assign=True)`` has a hook of ``fully_shard``, which then gathers the replacements.
        """
        self.use_memory(memory)
        for one in self._params():
            if one.sharded_param not in memory:  # frozen; its shard begins the memory that has the padding too
                size = one.padded_sharded_param_size.numel()
                one._sharded_param_data = fsdp2_internals.padded(local(one.sharded_param), size)

    def gathered(self, parameter: nn.Parameter) -> torch.Tensor:
        """The gathered parameter that modules have in a batch; ``parameter`` if it was never gathered."""
        return fsdp2_internals.gathered(self._params(), parameter)

    def _params(self) -> Iterator[Any]:
        """torch's record of each sharded parameter."""
        return (one for unit in self._units for group in fsdp2_internals.groups(unit) for one in group.fsdp_params)

    def _trained(self) -> tuple[bool, ...]:
        """Which of them require a gradient."""
        return tuple(fsdp2_internals.held(one).requires_grad for one in self._params())

    # ------------------------------------------------------------------------------------------------------- batches

    @contextmanager
    def running(self, *, backward: bool) -> Iterator[None]:
        """A context for the forwards of a batch, and their backwards if ``backward``; else nothing stays gathered."""
        self.reshard()
        if backward and self._pipelined:
            for root in self._roots:
                _set_reducing(root, False)
        elif backward and not self._reduces:
            for root in self._roots:
                root.set_requires_gradient_sync(False)
        self._order.begin(backward=backward)
        self._changed.clear()
        with self.resetting():
            if backward:
                self._order.compare_trained(self._trained())
            frozen = ((name, fsdp2_internals.held(one)) for name, one in self._frozen)
            if backward and not self._pipelined and (error := thawed_since(frozen)):
                raise error  # torch would refuse it halfway through its first batch, and run the next one
            yield
            if not self._reduces:
                fsdp2_internals.drop_gradients(self._params())  # of a batch that is run again
            if backward and self._pipelined:
                for root in self._roots:
                    self._reduce(root)
            self._order.check(END)
        self.reshard()
        if self._changed:  # not before, because a rank may have changed other ranks' shards alone
            raise AfterBatchError(
                f"parallel.data.shard: the model's forward changes {self._changed[0]!r}, which is gathered for it "
                "from shards that would keep their values; change it between steps, by its name in "
                "engine.named_parameters(), or set data.shard to 1"
            )

    @contextmanager
    def resetting(self) -> Iterator[None]:
        """A context for a forward or a backward, after whose failure another batch can follow."""
        try:
            yield
        except BaseException as error:
            self.reset()
            for text, advice in ERRORS.items():
                if text in str(error):
                    error.add_note(advice)
            raise

    def _reduce(self, root: Any) -> None:
        """Reduce the gradients that the backwards of a stage have added up, as torch's own pipeline stages do."""
        _set_reducing(root, True)
        state = root._get_fsdp_state()
        for one in state._state_ctx.all_states:
            for group in fsdp2_internals.groups_of(one):
                group.post_backward()
        state._root_post_backward_final_callback()

    def reshard(self) -> None:
        """Free gathered parameters, so that the next forward gathers what a step or a load has written."""
        for unit in self._units:
            groups = fsdp2_internals.groups(unit)
            for group in groups:
                fsdp2_internals.drop_prefetched(group)
            if not all(group.is_sharded for group in groups):
                unit.reshard()

    def after_reshard(self, call: Callable[[], object]) -> Callable[[], object]:
        """``call`` behind :meth:`reshard`: a call of the module itself leaves gathered parameters in it."""

        def resharded() -> object:
            self.reshard()
            return call()

        return resharded

    def follow_shards(self) -> None:
        """Let gathered parameters require a gradient where their shards do, as torch does when it gathers them."""
        for one in filter(fsdp2_internals.has_been_gathered, self._params()):
            one._unsharded_param.requires_grad_(one.sharded_param.requires_grad)

    def reset(self) -> None:
        """Drop what a failed batch left: gathered parameters and gradients that are not reduced yet."""
        for root in self._roots:
            _set_reducing(root, True)
            if root._get_fsdp_state()._is_root:
                fsdp2_internals.reset(root)
        fsdp2_internals.drop_gradients(self._params())
        self.reshard()

    # ----------------------------------------------------------------------------------------------------- gradients

    def on_gradient(self, call: Callable[[torch.Tensor], None]) -> Callable[[], None]:
        """Call ``call`` with each sharded parameter that a backward gives a gradient, until the result is called."""
        self._listeners.append(call)
        return partial(self._listeners.remove, call)

    def take_gradient(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Take this rank's gradient of all of ``parameter``, a shard, which no unit has reduced; None if it has none.

        Units reduce none in training with the same bits on every layout. It is a plain tensor, of the dtype in which
        the parameter is gathered; over the tensor axis this rank's part.
        """
        return fsdp2_internals.take_gradient(self._records[parameter])

    def _post_backward(self, group: Any, own: Callable[[], None], *_: Any) -> None:
        """Complete the gradients of a unit before torch's ``own`` method adds them up and reduces them."""
        ran = [one for one in group.fsdp_params if fsdp2_internals.has_been_gathered(one)]
        if not ran:
            return  # the unit has not run yet, as in a pipeline's first microbatch
        trained = [one for one in ran if one.sharded_param.requires_grad]
        for one in trained:
            if (gradient := one._unsharded_param.grad) is not None and gradient.is_sparse:
                one._unsharded_param.grad = gradient.to_dense()
            for call in self._listeners if fsdp2_internals.gradient_of(one) is not None else ():
                call(one.sharded_param)
        if group.reduce_grads and self._reduces and trained:
            self._complete(trained)
        own()

    def _complete(self, trained: Sequence[Any]) -> None:
        """Give each parameter a gradient, all in one dtype and with the parameters' placements."""
        for one in trained:
            if fsdp2_internals.gradient_of(one) is None:  # other ranks may have one, and all take part in the reduction
                one._unsharded_param.grad = fsdp2_internals.zeros(one)
        mixed = len({fsdp2_internals.gradient_of(one).dtype for one in trained}) > 1
        if mixed or any(fsdp2_internals.is_added_up(one) or fsdp2_internals.is_mismatched(one) for one in trained):
            for one in trained:
                fsdp2_internals.to_reduce_dtype(one)
        for one in filter(fsdp2_internals.is_mismatched, trained):
            fsdp2_internals.sum_over_tensor_ranks(one, self._context.config.precision.reduce_dtypes.tp)


def _set_reducing(root: Any, reducing: bool) -> None:
    """Let the backwards of a stage reduce its gradients and free its parameters, or keep both for a later one."""
    root.set_requires_gradient_sync(reducing)
    root.set_is_last_backward(reducing)
    root.set_reshard_after_backward(reducing)


def _set_prefetch(blocks: Sequence[Any], count: int) -> None:
    """Let each of a stage's ``blocks`` begin to gather the next ``count``."""
    for index, unit in enumerate(blocks if count else []):
        unit.set_modules_to_forward_prefetch(list(blocks[index + 1 : index + 1 + count]))
        unit.set_modules_to_backward_prefetch(list(blocks[max(0, index - count) : index][::-1]))


def _runs_cast_layer(module: nn.Module) -> bool:
    """Whether the forward of ``module`` is that of a layer whose weight autocast casts."""
    return any(isinstance(module, kind) and type(module).forward is kind.forward for kind in CAST_LAYERS)


def _is_whole(parameter: nn.Parameter) -> bool:
    """Whether every rank has all of a parameter, which has no elements to shard, or no dims and is frozen.

    With torch 2.11 also one of integers or complex numbers: it makes shards that require gradients, which integers
    cannot, and gathers complex numbers in the dtype of the unit.
    """
    is_unusual = SHARDS_FLOATS_ALONE and not parameter.is_floating_point()
    return not parameter.ndim or not parameter.numel() or is_unusual


def _gathered_dtype(precision: Precision) -> torch.dtype | None:
    """The dtype in which parameters are gathered and computed with; None: that of the sharded parameters."""
    return precision.weights if precision.masters else None


def _data_mesh(context: ParallelContext, *, of_experts: bool) -> Any:
    """The mesh over which units are sharded: its last axis shards, the one before, if there is one, replicates.

    The ranks that shard experts may be one: the expert axis has the others.
    """
    mesh = context.expert_mesh if of_experts else context.shard_mesh
    axes = (*context.axes_of("replicate"), *context.axes_of("shard"))
    if mesh is context.shard_mesh is not context.mesh:
        axes = "dp_replicate", "dp_shard"
    return mesh[tuple(name for name in axes if mesh[name].size() > 1 or name == axes[-1])]


def _experts_placement(size: int, stack: nn.Parameter) -> Any:
    """How ``size`` ranks shard a stack of experts: whole experts if they can be equal parts, else a part of each.

    The dim is the first that divides, but for the last one of a matrix.
    """
    from torch.distributed.tensor import Shard

    lengths = local(stack).shape[: max(2, stack.ndim - 1)]
    return Shard(next((dim for dim, length in enumerate(lengths) if not length % size), 0))


def _is_alone(block: nn.Module, parameters: Mapping[str, nn.Parameter]) -> bool:
    """Whether ``block`` has parameters, and shares none with the rest of the stage, whose ``parameters`` are given."""
    inside = Counter(map(id, dict(block.named_parameters(remove_duplicate=False)).values()))
    everywhere = Counter(map(id, parameters.values()))
    return bool(inside) and all(everywhere[key] == count for key, count in inside.items())
