"""What a trial of a module leaves as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import nn

from .dtensor import local
from .torch_internals import take
from .uncompiled import unwatched
from .wrapped_models import is_unit

storage_address: Callable[[torch.Tensor], int] = take("torch._C._storage_address")

MOST_COPIED = 2**16
"""Elements of a parameter of which :func:`keeping_state` makes a copy: scales and the like. Larger ones take memory."""
PLAIN = (bool, int, float, str, type(None))
"""The kinds of attributes that :func:`keeping_state` restores."""


@contextmanager
def keeping_state(module: nn.Module) -> Iterator[None]:
    """Restore the buffers, parameters and attributes of ``module`` on exit, whatever a forward did to them.

    Attributes are restored if they were :data:`PLAIN`. New ones stay: transformers' say that hooks were registered,
    which stay too. A parameter of more than :data:`MOST_COPIED` elements is put back if it was replaced, but keeps what
    was written to it. Parameters under FSDP2 are left alone: its units replace them.
    """
    parameters = nullcontext() if any(map(is_unit, module.modules())) else _keeping_parameters(module)
    with _keeping_buffers(module), _keeping_attributes(module), parameters:
        yield


@contextmanager
def _keeping_attributes(module: nn.Module) -> Iterator[None]:
    tables = [vars(one) for one in module.modules() if not isinstance(one, torch.jit.ScriptModule)]
    torchs = vars(nn.Module())
    plain = [
        {name: value for name, value in table.items() if isinstance(value, PLAIN) and name not in torchs}
        for table in tables
    ]
    try:
        yield
    finally:
        for table, own in zip(tables, plain, strict=True):
            table.update(own)


@contextmanager
def _keeping_parameters(module: nn.Module) -> Iterator[None]:
    modules = [one for one in module.modules() if not isinstance(one, torch.jit.ScriptModule)]
    tables = [(one._parameters, dict(one._parameters)) for one in modules]
    with unwatched():
        memory = {one: local(one).data for one in module.parameters() if one.layout is torch.strided}
        values = {one: kept.clone() for one, kept in memory.items() if kept.numel() <= MOST_COPIED}
    try:
        yield
    finally:
        for table, own in tables:
            table.clear()
            table.update(own)
        with unwatched():
            for one, kept in memory.items():
                if storage_address(local(one)) != storage_address(kept):
                    one.data = kept
                if one in values:
                    kept.copy_(values[one])


@contextmanager
def _keeping_buffers(module: nn.Module) -> Iterator[None]:
    buffers = [(submodule, dict(submodule._buffers.items())) for submodule in module.modules()]
    with unwatched():
        values = {buffer: buffer.clone() for _, own in buffers for buffer in own.values() if buffer is not None}
    try:
        yield
    finally:
        for submodule, own in buffers:  # the forward may have assigned new tensors
            if not isinstance(submodule, torch.jit.ScriptModule):
                submodule._buffers.clear()
                submodule._buffers.update(own)
        with torch.no_grad(), unwatched():
            for buffer, value in values.items():
                if buffer.shape == value.shape:
                    buffer.data.copy_(value)  # moves no counter
                else:  # resized in place
                    buffer.data = value
