"""Gathers of DTensors on GPUs over gloo, for ranks that share one.

The operator that DTensor calls reads the GPU's memory from the host under gloo, and the process dies (pytorch #152645).
The plain all-gather copies through the host.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.library import Library

from ..base.collectives import all_gather_single
from ..base.torch_internals import expect

expect("torch.ops._c10d_functional", "torch.distributed.distributed_c10d")

_gathers: Library | None = None


def gather_dtensors_over_gloo(dispatch_key: str = "CUDA") -> None:
    """Let DTensors on GPUs be gathered over gloo; once in a process."""
    global _gathers
    if _gathers is None:
        _gathers = Library("_c10d_functional", "IMPL")
        _gathers.impl("all_gather_into_tensor", _gather, dispatch_key)
        _gathers.impl("all_gather_into_tensor_out", _gather_out, dispatch_key)


def _gather(own: torch.Tensor, group_size: int, group: Any) -> torch.Tensor:
    own = own.reshape(-1) if own.ndim == 0 else own
    return _gather_out(own, group_size, group, out=own.new_empty(own.shape[0] * group_size, *own.shape[1:]))


def _gather_out(own: torch.Tensor, _group_size: int, group: Any, *, out: torch.Tensor) -> torch.Tensor:
    if isinstance(group, str):
        group = dist.distributed_c10d._resolve_process_group(group)  # type: ignore[attr-defined, arg-type]
    all_gather_single(out, own.contiguous(), group=group)
    return out
