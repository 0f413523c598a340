"""Tensor-parallel plans, ``{name of modules: style}``, and their application with DTensor.

A plan is data. Names are globs over the model's module names, with ``*`` for one part between dots; styles are
the keys of :data:`paramp.parallel.tensor.styles.STYLES`, or any ``ParallelStyle`` of torch's. Activations between
layers stay plain tensors.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeAlias, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
)
from torch.nn.utils import parametrize

from ...base.dtensor import is_dtensor
from ...base.errors import ConfigError, nearest
from ...base.module_surgery import PassThrough, carry_over, keeping_ties, matches, turn_off_fast_path
from ..returned_parts import RETURNS_PART
from ..shape_errors import PLAN_ENTRY
from .colwise_and_rowwise import Colwise, PackedColwise, Rowwise
from .expert_slices import ExpertSlices
from .styles import STYLES, GatherSequence, PartialGradient, WholeSequence, sharded_dim

Plan: TypeAlias = dict[str, str | ParallelStyle]


def resolve_plan(plan: Mapping[str, str | ParallelStyle], names: Iterable[str]) -> dict[str, ParallelStyle]:
    """The style of each module among ``names`` that ``plan`` matches; later entries override earlier ones.

    Raises:
        ConfigError: an unknown style, or an entry that matches no module.
    """
    if not isinstance(plan, Mapping):
        raise ConfigError(f"plan: got {type(plan).__name__}, expected a dict of module names and styles")
    names = [name for name in names if name]
    resolved: dict[str, ParallelStyle] = {}
    for pattern, style in plan.items():
        shown_style = repr(style) if isinstance(style, str) else type(style).__name__
        if isinstance(style, str):
            if style not in STYLES:
                known = f"{', '.join(STYLES)}{nearest(style, STYLES)}"
                raise ConfigError(f"plan[{pattern!r}]: got {style!r}, expected one of {known}, or a ParallelStyle")
            style = STYLES[style]()
        elif not isinstance(style, ParallelStyle):
            raise ConfigError(f"plan[{pattern!r}]: got {style!r}, expected a style's name or a ParallelStyle")
        found = [name for name in names if matches(name, pattern)]
        setattr(style, PLAN_ENTRY, f"plan[{pattern!r}] = {shown_style}")
        if not found:
            raise ConfigError(f"plan[{pattern!r}]: no module of the model matches{nearest(pattern, names)}")
        resolved |= dict.fromkeys(found, style)
    return resolved


def sharded_dims(styles: Mapping[str, ParallelStyle]) -> dict[str, int]:
    """The dim of the weight (outputs, inputs) that ``styles`` shard, by module."""
    dims = {name: sharded_dim(style) for name, style in styles.items()}
    return {name: dim for name, dim in dims.items() if dim is not None}


def check_divisible(module: nn.Module, styles: Mapping[str, ParallelStyle], size: int) -> None:
    """Check, the same on every rank, that styles support their layers and that sizes divide over ``size`` ranks."""
    for name, style in styles.items():
        layer = module.get_submodule(name)
        _check_plain_parameters(name, layer, style)
        if isinstance(style, (PackedColwise, ExpertSlices)):
            style.check(name, layer, size)
            _check_packed_hooks(name, layer)
        for kind in (ColwiseParallel, RowwiseParallel):
            own = type(style)._apply in (kind._apply, Colwise._apply, Rowwise._apply)  # others may support more layers
            if own and isinstance(style, kind) and not isinstance(layer, (nn.Linear, nn.Embedding)):
                what = f"{name!r} is a {type(layer).__name__}"
                raise ConfigError(f"plan: {what}: {type(style).__name__} supports Linear and Embedding only")
            features = "out_features" if kind is ColwiseParallel else "in_features"
            if isinstance(layer, nn.Linear) and isinstance(style, kind) and getattr(layer, features) % size:
                has = f"{name!r} has {features} {getattr(layer, features)}"
                raise ConfigError(f"plan: {has}, expected a multiple of parallel.tensor.size {size}")
    if size > 1:
        _check_dropout(module, styles)


def _check_dropout(module: nn.Module, styles: Mapping[str, ParallelStyle]) -> None:
    """Raise a ConfigError if a layer of transformers calls a function of dropout between its sharded layers."""
    for name in (name for name, dim in sharded_dims(styles).items() if dim == 0):
        parent = name.removesuffix(".base_layer").rpartition(".")[0]  # of the layer that LoRA adapts
        layer = module.get_submodule(parent)
        p = getattr(layer, "activation_dropout", 0.0)
        if isinstance(p, (int, float)) and p > 0 and type(layer).__module__.startswith("transformers."):
            raise ConfigError(
                f"plan: {parent!r} has activation_dropout {p}, expected 0.0, because it calls "
                "torch.nn.functional.dropout on each tensor rank's features, for which ranks would draw the same mask; "
                "set model.config.activation_dropout to 0.0 before the model is built, set reproducible, whose masks "
                "differ, or leave the layers around it out of the plan"
            )


REPLACES_PARAMETERS = ColwiseParallel, RowwiseParallel, SequenceParallel, PackedColwise, PartialGradient, ExpertSlices
"""The styles that replace each parameter of their module by a DTensor."""
FIRST_INPUT = ColwiseParallel, RowwiseParallel, SequenceParallel, GatherSequence, WholeSequence
"""The styles that change the first input of their module only, some of them by a hook."""


def _check_plain_parameters(name: str, layer: nn.Module, style: ParallelStyle) -> None:
    """Raise a ConfigError if a tensor of ``layer`` is computed from parameters, which ``style`` would not reach."""
    if not isinstance(style, REPLACES_PARAMETERS):
        return
    for inner, child in layer.named_modules():
        full = f"{name}.{inner}".rstrip(".")
        if isinstance(child, nn.modules.linear.NonDynamicallyQuantizableLinear):
            raise ConfigError(
                f"plan: {full!r} is the output layer of an nn.MultiheadAttention, which computes with its weight and "
                "does not call it; leave it out of the plan, or write an attention of Linear layers and "
                "F.scaled_dot_product_attention"
            )
        if parametrize.is_parametrized(child):
            for tensor, steps in child.parametrizations.items():
                kinds = ", ".join(type(step).__name__.lstrip("_") for step in steps)
                remedy = f"torch.nn.utils.parametrize.remove_parametrizations(layer, {tensor!r})"
                raise ConfigError(_computed(full, tensor, f"the parametrization {kinds}", remedy))
        parts = (own.rpartition("_") for own in child._parameters)
        pruned = next((tensor for tensor, _, end in parts if end == "orig"), None)
        for hook in child._forward_pre_hooks.values():
            tensor = getattr(hook, "name", pruned)
            if isinstance(tensor, str) and tensor not in child._parameters and hasattr(child, tensor):
                kind = type(hook).__name__
                raise ConfigError(_computed(full, tensor, f"the hook {kind}", "the function of torch.nn.utils for it"))


def _computed(name: str, tensor: str, by: str, remedy: str) -> str:
    return (
        f"plan: {name!r} computes its {tensor} from other parameters, by {by}, expected a plain parameter, because "
        f"each tensor rank has a part of it; leave the layer, and those sharded with it, out of the plan, or remove it "
        f"by {remedy}"
    )


def _check_packed_hooks(name: str, layer: nn.Module) -> None:
    for own, parameter in layer.named_parameters(recurse=False):
        if parameter._post_accumulate_grad_hooks:
            raise ConfigError(
                f"plan: {f'{name}.{own}'!r} has a hook that runs after the accumulation and would get the parameter in "
                "another shape; use register_hook, which gets the full gradient, or engine.before_step"
            )


def apply_plan(module: nn.Module, styles: Mapping[str, ParallelStyle], mesh: DeviceMesh) -> None:
    """Apply each of ``styles`` to the submodule of its name, over ``mesh``, their axes. Tied weights stay tied.

    Parameters keep their attributes and hooks. A tensor hook gets the full gradient, as without a plan; a hook that
    runs after the accumulation gets the parameter, a DTensor.

    Raises:
        ConfigError: modules that share a weight are sharded differently, or a style does not support its module.
    """
    before = dict(module.named_parameters(remove_duplicate=False))
    with keeping_ties(module) as ties:
        done: set[int] = set()
        replicated: dict[torch.Tensor, DTensor] = {}
        for name, submodule in list(module.named_modules(remove_duplicate=False)):
            if name in styles and id(submodule) not in done and not isinstance(submodule, PassThrough):
                done.add(id(submodule))
                try:
                    _replicate_buffers(submodule, styles[name], mesh, replicated)
                    styles[name].src_data_rank = None  # equal on all ranks
                    num_hooks = len(submodule._forward_pre_hooks)
                    styles[name]._apply(submodule, mesh)  # parallelize_module of some versions refuses two axes
                    if isinstance(styles[name], FIRST_INPUT) and len(submodule._forward_pre_hooks) > num_hooks:
                        by_position = _first_by_position(submodule)
                        submodule.register_forward_pre_hook(by_position, prepend=True, with_kwargs=True)
                except NotImplementedError as error:
                    raise ConfigError(f"plan: {name!r} is a {type(submodule).__name__}: {error}") from None
                setattr(
                    submodule, PLAN_ENTRY, getattr(styles[name], PLAN_ENTRY, f"plan: {type(styles[name]).__name__}")
                )
                setattr(submodule, RETURNS_PART, _returns_part(styles[name]))
        turn_off_fast_path(module, styles)
        for name, old in before.items():
            new = module.get_parameter(name)
            if new is not old:
                _carry_to_shards(old, new)
        for names in ties:
            layouts = [getattr(module.get_parameter(name), "placements", None) for name in names]
            if any(layout != layouts[0] for layout in layouts):
                tied = " and ".join(names)
                raise ConfigError(f"plan: {tied} are one parameter, but the plan shards them differently")


def _returns_part(style: ParallelStyle) -> bool:
    """Whether a layer with ``style`` returns this rank's part, a plain tensor; classes derived from it may not."""
    kind, layouts = type(style), cast(Any, style)
    of_torch = kind in (Colwise, ColwiseParallel) and layouts.use_local_output
    return kind is PackedColwise or (of_torch and not layouts.output_layouts[0].is_replicate())


def _first_by_position(module: nn.Module) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]:
    """A hook of ``module`` before those of styles, which take its first input by position."""
    inputs: Iterable[inspect.Parameter] = ()
    with suppress(ValueError):  # of a builtin, as in torch.nn.cpp
        inputs = inspect.signature(module.forward).parameters.values()
    first = next((one.name for one in inputs if one.kind is one.POSITIONAL_OR_KEYWORD), None)

    def by_position(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args or not kwargs:
            return None
        if first not in kwargs:
            raise ConfigError(
                f"plan: {type(module).__name__}, whose style changes its first input, is called with the keywords "
                f"{', '.join(kwargs)} alone, expected that input by its position{f' or as {first!r}' if first else ''}"
            )
        return (kwargs.pop(first),), kwargs

    return by_position


def _carry_to_shards(old: nn.Parameter, new: nn.Parameter) -> None:
    """Copy the attributes and hooks of ``old`` to ``new``, which is this rank's shard of it."""
    hooks = old._backward_hooks
    carry_over(old, new)
    if hooks and is_dtensor(new):
        new._backward_hooks = None
        new.register_hook(partial(_run_on_whole, hooks, old.shape, new.placements))


def _run_on_whole(
    hooks: Mapping[int, Callable[[torch.Tensor], Any]],
    shape: torch.Size,
    placements: Sequence[Placement],
    gradient: torch.Tensor,
) -> torch.Tensor:
    """Run tensor hooks on the full ``gradient`` in the model's shape, as they may depend on all of it."""
    if not hooks:
        return gradient
    sharded = cast(DTensor, gradient)
    whole = sharded.full_tensor().reshape(shape)
    for hook in tuple(hooks.values()):
        result = hook(whole)
        whole = whole if result is None else result
    # Every rank has all of it, so nothing is communicated.
    return distribute_tensor(whole.reshape(sharded.shape), sharded.device_mesh, placements, src_data_rank=None)


def _replicate_buffers(
    module: nn.Module, style: ParallelStyle, mesh: DeviceMesh, made: dict[torch.Tensor, DTensor]
) -> None:
    """Make the DTensors of buffers here, because ``style`` would use a broadcast, which not every dtype supports.

    ``made`` has those of other modules, so that a shared buffer stays shared.
    """
    if isinstance(style, (ColwiseParallel, RowwiseParallel, SequenceParallel)):
        for child in module.modules():
            for name, buffer in child._buffers.items():
                if buffer is not None and not is_dtensor(buffer):
                    whole = DTensor.from_local(buffer, mesh, [Replicate()], run_check=False)
                    child._buffers[name] = made.setdefault(buffer, whole)
