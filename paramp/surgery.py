"""Taking models apart, and replacing their parameters, without losing names or what parameters have in common."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

__all__ = ["LeftOut", "cast_parameters", "keep_only", "keeping_ties", "names_outside", "with_forward"]


class LeftOut(nn.Module):
    """Stands where a model calls a module that another pipeline stage has; hands on what it is given first."""

    def forward(self, x: Any = None, *args: Any, **kwargs: Any) -> Any:
        return kwargs.get("hidden_states", x)


def with_forward(module: nn.Module, forward: Callable[..., Any]) -> nn.Module:
    """A copy of ``module``, sharing its modules and parameters under the same names, that computes ``forward``."""
    changed = copy.copy(module)
    changed.__dict__["forward"] = forward
    return changed


def keep_only(module: nn.Module, paths: Collection[str], prefix: str = "") -> nn.Module:
    """``module`` with only the modules, parameters and buffers called ``paths``, under the names that they have.

    What leads to them is copied, without its other contents; they themselves are shared.
    """
    part = copy.copy(module)
    part._modules = {}
    for name, child in module._modules.items():  # named_children() would pass over a module that comes again
        path = f"{prefix}{name}"
        if child is None or path in paths:
            part._modules[name] = child
        elif any(wanted.startswith(f"{path}.") for wanted in paths):
            part._modules[name] = keep_only(child, paths, f"{path}.")
    part._parameters = {
        name: value for name, value in module._parameters.items() if value is None or f"{prefix}{name}" in paths
    }
    part._buffers = {
        name: value for name, value in module._buffers.items() if value is None or f"{prefix}{name}" in paths
    }
    return part


def names_outside(module: nn.Module, paths: Iterable[str]) -> list[str]:
    """The parameters and buffers of ``module`` that neither are among ``paths`` nor lie in a module that is."""
    known = set(paths)
    tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return [name for name, _ in tensors if known.isdisjoint(_prefixes(name))]


def _prefixes(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[: count + 1]) for count in range(len(parts))]


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
                if buffer.is_floating_point() and not _is_frequencies(submodule, name):
                    submodule._buffers[name] = buffer.to(dtype)


def _is_frequencies(module: nn.Module, name: str) -> bool:
    """Whether a buffer holds the frequencies of a Hugging Face rotary embedding.

    They are multiplied by positions in fp32 and their rounding errors too, so these models keep them in fp32.
    """
    return "inv_freq" in name and type(module).__module__.startswith("transformers.")
