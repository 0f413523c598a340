"""The whole model, gathered on every rank."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...base.dtensor import full_tensor
from ...distributed.collectives import broadcast_
from .model_tensors import EXTRA_STATE, ParamChunks


@torch.no_grad()
def full_state_dict(params: ParamChunks) -> dict[str, torch.Tensor]:
    """The result of :meth:`paramp.Engine.full_state_dict`. A collective of the world."""
    own = _local_stages(params)
    stage_axis = params.context.stage_axis
    whole: dict[str, torch.Tensor] = {}
    for rank in range(stage_axis.size):
        description: list[Any] = [[(name, value.shape, value.dtype) for name, value in own.items()]]
        if stage_axis.size > 1:
            dist.broadcast_object_list(description, group=stage_axis.group, group_src=rank)
        for name, shape, dtype in description[0]:
            if rank == stage_axis.rank:
                value = own[name].contiguous()
            else:
                value = torch.empty(shape, dtype=dtype, device=params.context.device)
            broadcast_(value, stage_axis.group, rank)
            whole[name] = value.cpu().clone()
    return whole


def _local_stages(params: ParamChunks) -> dict[str, torch.Tensor]:
    """Full tensors of this rank's stages, on the device."""
    weights, batch_axis = params.weights, params.context.batch_axis
    weights.put_back()
    masters = weights.full_precision()
    by_parameter = {id(p): masters[name] for name, p in zip(weights.names, weights.parameters, strict=True)}
    own: dict[str, torch.Tensor] = {}
    for name, value in params.module.state_dict(keep_vars=True).items():
        if not isinstance(value, torch.Tensor) or name.endswith(EXTRA_STATE):  # Transformer Engine's scales
            continue
        if batch_axis.size > 1 and not isinstance(
            value, nn.Parameter
        ):  # running statistics differ between data ranks: the first rank's
            value = value.clone()
            broadcast_(value, batch_axis.group)
        value = full_tensor(by_parameter.get(id(value), value).detach())
        value = value.reshape(params.shapes.get(name, value.shape))
        own[name] = value.float() if value.is_floating_point() and value.itemsize < 4 else value
    return own
