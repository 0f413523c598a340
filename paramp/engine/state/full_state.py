"""The whole model, gathered on every rank."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...base.collectives import broadcast_
from ...base.dtensor import full_tensor, is_dtensor
from ...base.errors import ConfigError
from ...base.values_checked_by_type import user_path
from ...parallel.model_families import adapter_for
from ..shared_failure import SharedFailure
from .model_tensors import EXTRA_STATE, ParamChunks

GATHERED_AS = {torch.int16: torch.int32} | {getattr(torch, f"uint{n}"): torch.int64 for n in (16, 32, 64)}
"""What stands for integers that gloo and NCCL do not gather. int64 and back are the bits of uint64 too."""


def full_state_dict(params: ParamChunks, *, averages: bool = False) -> dict[str, torch.Tensor]:
    """The result of :meth:`paramp.Engine.full_state_dict`; with ``averages`` in place of trained weights. A collective
    of the world."""
    return {name: value.cpu().clone() for name, value in _full_tensors(params, averages=averages)}


def save_pretrained(params: ParamChunks, failure: SharedFailure, folder: str | Path, dtype: torch.dtype | None) -> None:
    """Write the model to a folder, as :meth:`paramp.Engine.save_pretrained` does. A collective of the world."""
    from ...checkpoint.convert import overflow  # imports DTensor

    failure.check_not_alone()
    folder = user_path(folder)
    if dtype is not None and not dtype.is_floating_point:
        raise ConfigError(f"dtype: got {dtype}, expected a floating-point dtype, such as torch.float32")
    adapter = adapter_for(params.module)
    write = adapter.writer()
    weights: dict[str, torch.Tensor] = {}
    overflows: dict[str, str] = {}
    problem: Exception | None = None
    for name, value in _full_tensors(params):
        if params.context.is_main:
            stored = dtype if dtype is not None and value.is_floating_point() else value.dtype
            first = params.first_names.get(name, name)
            weights[name] = weights[first] if first in weights else value.to("cpu", stored, copy=True)
            if found := overflow(value, weights[name]):
                overflows[name] = found
    try:
        if overflows:
            written = adapter.written(params.module, weights)
            if name := next((one for one in overflows if one in written), ""):
                raise ConfigError(f"dtype: {name} has {overflows[name]}; choose a dtype with a larger range, or None")
        if params.context.is_main:
            write(params.module, weights, folder)
    except Exception as error:
        problem = error
    failure.agree(problem)


@torch.no_grad()
def _full_tensors(params: ParamChunks, *, averages: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor of the whole model in turn, on the device of every rank; floating-point ones at least in fp32."""
    tensors = _local_tensors(params, averages=averages)
    stage_axis = params.context.stage_axis
    for rank in range(stage_axis.size):
        described: list[Any] = [
            [(name, params.shapes.get(name, value.shape), _full_dtype(value.dtype)) for name, value in tensors.items()]
        ]
        if stage_axis.size > 1:
            dist.broadcast_object_list(described, group=stage_axis.group, group_src=rank)
        for name, shape, dtype in described[0]:
            if rank == stage_axis.rank:
                value = tensors[name].detach()
                if is_dtensor(value):  # not in float8 either, which gloo does not gather
                    value = full_tensor(value.to(dtype if value.itemsize == 1 else GATHERED_AS.get(dtype, value.dtype)))
                value = value.reshape(shape).to(dtype).contiguous()
            else:
                value = torch.empty(shape, dtype=dtype, device=params.context.device)
            broadcast_(value, stage_axis.group, rank)
            yield name, value


def _full_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype


def _local_tensors(params: ParamChunks, *, averages: bool) -> dict[str, torch.Tensor]:
    """The tensors of this rank's stages, on the device, sharded or not."""
    weights, batch_axis = params.weights, params.context.batch_axis
    weights.put_back()
    masters = weights.full_precision(averages=averages)
    by_parameter = {id(param.parameter): masters[param.name] for param in weights.params}
    tensors: dict[str, torch.Tensor] = {}
    for name, value in params.module.state_dict(keep_vars=True).items():
        if not isinstance(value, torch.Tensor) or name.endswith(EXTRA_STATE):  # Transformer Engine's scales
            continue
        if batch_axis.size > 1 and not isinstance(value, nn.Parameter):
            value = value.clone()  # running statistics differ between data ranks: the first rank's
            broadcast_(value, batch_axis.group)
        tensors[name] = by_parameter.get(id(value), value)
    return tensors
