"""Models under amp: checks, the cast of their weights, their forward, and their state dicts.

A model keeps its class. Its ``forward`` becomes an :class:`AmpForward`, which casts inputs and outputs.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ....base.module_surgery import cast_parameters
from ....base.torch_internals import take
from ....base.trees import children, rebuilt
from ....base.wrapped_models import is_unit
from ....precision.compute_context import ComputeContext
from ....precision.modes import Precision
from ...masters_that_users_change import round_to_weights
from .errors import AmpError
from .session import state
from .weight_and_gradient import is_low

tree_map = take("torch.utils._pytree.tree_map")

WRAPPERS = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel")


def check_models(models: Sequence[object], *, cast: bool) -> None:
    """Raise an AmpError for an object that is not a model, is wrapped already, or is in half precision already."""
    for model in models:
        if not isinstance(model, nn.Module):
            raise AmpError(f"models: got {type(model).__name__}, expected a torch.nn.Module or a list of them")
        wrapper = next((kind.__name__ for kind in type(model).__mro__ if kind.__name__ in WRAPPERS), None)
        if wrapper is not None:
            raise AmpError(f"models: got a model in {wrapper}; wrap the model that amp.initialize returns instead")
        if cast and any(map(is_unit, model.modules())):
            raise AmpError(
                "models: got a model under fully_shard, which keeps its own record of the parameters, so that they "
                'cannot be cast; use opt_level "O1", or the mp_policy of fully_shard'
            )
        for what, tensors in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
            for name, tensor in tensors:
                if is_low(tensor):
                    raise AmpError(
                        f"models: {what} {name} is {tensor.dtype}, expected torch.float32; pass amp.initialize the "
                        "model in fp32 at every opt_level, without calling .half() on it"
                    )


def cast_models(models: Sequence[nn.Module], precision: Precision) -> list[tuple[nn.Parameter, nn.Parameter]]:
    """Cast the weights of ``models``; return pairs of each replaced parameter and the new one.

    Parameters that models share stay shared. The old parameters keep their full precision.
    """
    together = nn.ModuleList(models)
    before = dict(together.named_parameters(remove_duplicate=False))
    cast_parameters(together, precision.weights, keep_batchnorm_fp32=precision.keep_batchnorm_fp32, replace=True)
    return [(before[name], new) for name, new in together.named_parameters() if new is not before[name]]


@dataclass(frozen=True)
class Casts:
    """The casts of a model's inputs and outputs."""

    precision: Precision
    inputs: torch.dtype | None
    """The dtype to which floating-point inputs are cast. None: they are not cast."""
    outputs: torch.dtype | None
    """The dtype to which floating-point outputs are cast. None: fp32 at least."""


class AmpForward:
    """The forward of ``module`` with the casts of its level.

    An object, not a closure, so that it is copied and pickled with the module.
    """

    def __init__(self, module: nn.Module, casts: Casts) -> None:
        forward = module.forward
        while isinstance(forward, AmpForward):  # of an earlier session
            forward = forward.__wrapped__  # type: ignore[attr-defined]
        functools.update_wrapper(self, forward)  # also keeps it, as __wrapped__, and its signature
        self.module = module
        self.casts = casts
        self.computes: dict[torch.device, ComputeContext] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        casts = self.casts
        if casts.inputs is not None:
            args, kwargs = _map_cast((args, kwargs), casts.inputs)
        active = state.session is None or state.session.casts_active
        device = next((parameter.device for parameter in self.module.parameters()), torch.device("cpu"))
        compute = self.computes.setdefault(device, ComputeContext(casts.precision, device))
        with compute.enter(autocast=active):
            output = self.__wrapped__(*args, **kwargs)  # type: ignore[attr-defined]
        return _map_cast(output, casts.outputs)


def _cast(value: Any, dtype: torch.dtype | None) -> Any:
    """``value`` with its floating-point tensors in ``dtype``; None: in fp32 at least."""
    if isinstance(value, torch.Tensor):
        wanted = torch.promote_types(value.dtype, torch.float32) if dtype is None else dtype
        return value.to(wanted) if value.is_floating_point() else value
    if _has_to(value):  # a batch of the user's own class
        return value if isinstance(value, nn.Module) else value.to(dtype or torch.float32)
    parts = children(value)  # of dataclasses, and of mappings that torch's pytrees treat as leaves
    if parts is None:
        return value
    changed = rebuilt(value, {key: _map_cast(part, dtype) for key, part in parts.items()})
    return changed if isinstance(changed, type(value)) else type(value)(changed)


def _has_to(value: object) -> bool:
    return callable(getattr(value, "to", None)) and not isinstance(value, type)


def _map_cast(tree: Any, dtype: torch.dtype | None) -> Any:
    return tree_map(lambda leaf: _cast(leaf, dtype), tree, is_leaf=_has_to)


def refuse_assigned_weights(models: Sequence[nn.Module]) -> None:
    """Make ``load_state_dict(assign=True)`` of ``models``, and of each module in them, raise an AmpError."""
    for module in nn.ModuleList(models).modules():
        if module._parameters:
            module.register_load_state_dict_pre_hook(_check_not_assigned)


def _check_not_assigned(module: nn.Module, source: Mapping[str, Any], prefix: str, options: Any, *_: Any) -> None:
    if not options.get("assign_to_params_buffers", False):
        return
    for name, parameter in module._parameters.items():
        if id(parameter) in state.weights and source.get(prefix + name, parameter) is not parameter:
            raise AmpError(
                f"load_state_dict: assign=True replaces {prefix + name}, which an optimizer under amp steps, so "
                "that it would not be trained any more; leave assign out"
            )


# State dicts are in fp32 at every level, so that they have the masters' values. Loading one sets masters and weights.


def keep_state_dicts_fp32(models: Sequence[nn.Module]) -> None:
    """Make ``state_dict()`` of ``models``, and of each module in them, return fp32, and load it back exactly."""
    for module in nn.ModuleList(models).modules():
        if not isinstance(module, nn.ModuleList) and (module._parameters or module._buffers):
            module.register_state_dict_post_hook(_widen_state)
            module.register_load_state_dict_pre_hook(_load_masters)
            module.register_load_state_dict_post_hook(_note_versions)


def _widen_state(module: nn.Module, destination: dict[str, Any], prefix: str, _metadata: Any) -> None:
    weights = state.weights
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        saved = destination.get(prefix + name)
        if tensor is None or saved is None or isinstance(saved, nn.Parameter) or not is_low(saved):
            continue  # with keep_vars=True the entry is the parameter itself
        weight = weights.get(id(tensor))
        destination[prefix + name] = saved.float() if weight is None else weight.full_precision()


@torch.no_grad()
def _load_masters(module: nn.Module, source: Mapping[str, Any], prefix: str, *_: Any) -> None:
    weights = state.weights
    for name, parameter in module._parameters.items():
        weight = weights.get(id(parameter))
        value = source.get(prefix + name)
        if weight is not None and weight.has_master and value is not None and value.shape == weight.stepped.shape:
            weight.stepped.copy_(value)
            round_to_weights([weight])


def _note_versions(module: nn.Module, _incompatible: Any) -> None:
    weights = state.weights
    for parameter in module._parameters.values():
        if id(parameter) in weights:
            weights[id(parameter)].note_version()
