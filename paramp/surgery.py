"""Replacing parameters of a model without losing what they have in common."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

__all__ = ["cast_parameters", "keeping_ties"]


@contextmanager
def keeping_ties(module: nn.Module) -> Iterator[list[tuple[str, ...]]]:
    """Parameters that have several names in ``module`` are one parameter again afterwards: the first name's.

    Yields:
        The names of each such parameter.
    """
    names_of: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names_of.setdefault(id(parameter), []).append(name)
    shared = [tuple(names) for names in names_of.values() if len(names) > 1]
    yield shared
    for first, *others in shared:
        parameter = module.get_parameter(first)
        for name in others:
            owner, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(owner), leaf, parameter)


def cast_parameters(module: nn.Module, dtype: torch.dtype) -> None:
    """Store the floating-point parameters and buffers of ``module`` in ``dtype``; tied ones stay tied.

    Parameters are replaced, not changed in place, because assigning ``.data`` does not work for DTensors.
    """
    with keeping_ties(module):
        for submodule in module.modules():
            for name, parameter in list(submodule.named_parameters(recurse=False)):
                if parameter.is_floating_point() and parameter.dtype is not dtype:
                    setattr(submodule, name, nn.Parameter(parameter.detach().to(dtype), parameter.requires_grad))
            for name, buffer in list(submodule.named_buffers(recurse=False)):
                if buffer.is_floating_point():
                    submodule._buffers[name] = buffer.to(dtype)
