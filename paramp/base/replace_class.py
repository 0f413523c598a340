"""Changing the class of modules in place, for example to that of a low-precision norm."""

import copyreg
import sys
import types
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize

from .module_surgery import runs_forward_of_class


def replace_class(
    model: nn.Module,
    old: type[nn.Module],
    new: type[nn.Module],
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
) -> list[str]:
    """Change the class of each module in ``model`` with the forward of ``old`` to ``new``, a subclass, in place.

    Each module stays the same object. So its parameters, buffers, hooks, attributes, mode, names and the optimizer's
    state are kept, and DTensor parameters and hooks of a tensor-parallel plan work; in a wrapper names would change. A
    module of a subclass of ``old`` gets a new class, derived from ``new`` and that subclass. A module whose subclass
    or instance overrides ``forward`` is not changed, nor is one for which ``filter_fn(module, first name)`` is False.

    Returns:
        The first name of each module changed.

    Raises:
        TypeError: ``model`` is not a module, or a module in it is wrapped in DDP or FSDP.
    """
    _check_bare(model)
    assert issubclass(new, old)
    names = []
    for name, module in model.named_modules():
        if _computes_as(module, old) and (filter_fn is None or filter_fn(module, name)):
            _change_class(module, old, new)
            names.append(name)
    return names


def _change_class(module: nn.Module, old: type[nn.Module], new: type[nn.Module]) -> None:
    kind = type(module)
    # torch's parametrizations derive a class from the module's own, and go back to that base when they are removed.
    own = kind.__bases__[0] if parametrize.is_parametrized(module) else kind
    changed = new if own is old else _combined(new, own, old)
    if own is kind:
        module.__class__ = changed
    else:
        kind.__bases__ = (changed,)


def _check_bare(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: got {type(model).__name__}, expected an nn.Module")
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # slow to import; if it is not imported, nothing is wrapped
    wrappers = (DistributedDataParallel, *((fsdp.FullyShardedDataParallel,) if fsdp else ()))
    for name, module in model.named_modules():
        if isinstance(module, wrappers):
            raise TypeError(
                f"{name or 'the model'} is wrapped in {type(module).__name__}, which has recorded the modules as "
                "they are; change the model (wrapper.module) before it is wrapped"
            )


def _computes_as(module: nn.Module, kind: type[nn.Module]) -> bool:
    return isinstance(module, kind) and type(module).forward is kind.forward and runs_forward_of_class(module)


_COMBINED: dict[tuple[type, type, type], type] = {}


def _combined(new: type, own: type, old: type) -> type:
    """A class with the overrides of ``new`` and the rest of ``own``, a subclass of ``old``; cached."""
    key = new, own, old
    if key not in _COMBINED:
        name = new.__name__.replace(old.__name__, own.__name__)
        namespace = {"__reduce_ex__": _reduce_combined, "_combined_from": key, "__module__": own.__module__}
        _COMBINED[key] = types.new_class(name, (new, own), exec_body=lambda body: body.update(namespace))
    return _COMBINED[key]


def _reduce_combined(module: nn.Module, protocol: int) -> Any:
    """For pickle and copy, which look classes up by name: a combined class is not in any module."""
    reduced: Any = object.__reduce_ex__(module, max(2, protocol))
    constructor, arguments, *state = reduced
    if constructor is not copyreg.__newobj__:  # type: ignore[attr-defined]
        return reduced  # the user's class has its own __reduce_ex__
    return _new_combined, (module._combined_from, *arguments[1:]), *state


def _new_combined(made_from: tuple[type, type, type], *arguments: Any) -> Any:
    kind = _combined(*made_from)
    return kind.__new__(kind, *arguments)
