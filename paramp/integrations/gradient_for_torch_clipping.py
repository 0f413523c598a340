"""The gradient of the whole model as one tensor, for torch's clipping functions.

These do not support a mix of plain tensors and DTensors, or several meshes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from ..base.collectives import is_distributed
from ..base.dtensor import is_dtensor
from ..scaling.complete_and_unscale_gradients import align_gradients, dense_gradients
from ..scaling.grad_norm import reduce_norm, total_norm
from ..scaling.local_norm import norm_power

ELEMENTWISE = ("mul_", "clamp_", "clamp_min_", "clamp_max_")
"""The methods that torch's clipping functions use."""
INF = float("inf")


def logical_parameter(parameters: Iterable[torch.Tensor], device_type: str) -> torch.Tensor:
    """A 0-dim parameter whose gradient represents the gradients of ``parameters``, over all ranks.

    If all are plain, its norm is that of this rank, whose gradients may differ from those of others until these
    exchange them, but infinite or NaN if that of another rank is; beside DTensors plain ones are the same on every
    rank. It is on ``device_type`` if this rank has no gradient.
    """
    parameters = list(parameters)
    align_gradients(parameters)
    with_gradient = [(part, parameter) for parameter in parameters for part in dense_gradients([parameter])]
    parts = [part for part, _ in with_gradient]
    device = parts[0].device if parts else torch.device(device_type)
    logical = torch.zeros((), device=device).as_subclass(LogicalGradient)
    logical.parts = parts
    logical.is_sharded = any(map(is_dtensor, parameters))
    logical.norm_weights = [1.0 / _num_replicas(parameter) for _, parameter in with_gradient]
    surrogate = torch.zeros_like(logical).as_subclass(torch.Tensor).requires_grad_()
    surrogate.grad = logical
    return surrogate


class LogicalGradient(torch.Tensor):
    """The gradient of the whole model, of which this rank has ``parts``; others have more if it ``is_sharded``.

    Its own value has no meaning. Elementwise methods apply to each part, and its norm is the whole model's. Clamping
    makes NaN of infinite elements: as finite ones they would hide from the step that the gradient has overflowed.
    """

    parts: list[torch.Tensor]
    is_sharded: bool
    norm_weights: list[float]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        logical = args[0] if args else None
        if func is torch.linalg.vector_norm and isinstance(logical, LogicalGradient):
            norm_type = float(args[1]) if len(args) > 1 else 2.0
            if logical.is_sharded:
                return total_norm(logical.parts, logical.norm_weights, norm_type, logical.device).float()
            power = norm_power(logical.parts, [1.0] * len(logical.parts), norm_type, logical.device)
            own = power if math.isinf(norm_type) else power.pow(1.0 / norm_type)
            if is_distributed():  # a norm that is not finite is every rank's
                norm = reduce_norm(power, norm_type)[0]
                own = torch.where(norm.isfinite(), own, norm)
            return own.float()
        if getattr(func, "__name__", "") in ELEMENTWISE and isinstance(logical, LogicalGradient):
            for part in logical.parts:
                if func.__name__ != "mul_":
                    part.masked_fill_(part.abs() == INF, float("nan"))
                getattr(part, func.__name__)(*args[1:], **kwargs)
            return logical
        return super().__torch_function__(func, types, args, kwargs)


def _num_replicas(parameter: torch.Tensor) -> int:
    """How many ranks of the world hold each element of ``parameter``, in a loop without a pipeline axis."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    if not is_dtensor(parameter):
        return world
    shards = 1
    for size, placement in zip(parameter.device_mesh.mesh.shape, parameter.placements, strict=True):
        shards *= 1 if placement.is_replicate() else size
    return world // shards
