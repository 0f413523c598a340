"""Casts of the inputs of a user's functions under O1, for functions that torch's autocast does not handle.

In such a function autocast is off, so that it computes in the dtype of its inputs (as with ``torch.amp.custom_fwd``).
At other levels, and before ``initialize``, the functions are called unchanged.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ....base.torch_internals import take
from .errors import AmpError
from .session import state

tree_leaves = take("torch.utils._pytree.tree_leaves")
tree_map_only = take("torch.utils._pytree.tree_map_only")

Function = Callable[..., Any]
Choose = Callable[[list[torch.dtype]], torch.dtype]
"""Chooses the compute dtype of a call from the dtypes of its arguments."""

_registered: list[tuple[Any, str, Choose]] = []


def _half(_dtypes: list[torch.dtype]) -> torch.dtype:
    return torch.float16 if state.session is None else state.session.precision.compute


def _float(_dtypes: list[torch.dtype]) -> torch.dtype:
    return torch.float32


def _widest(dtypes: list[torch.dtype]) -> torch.dtype:
    return functools.reduce(torch.promote_types, dtypes)


def half_function(function: Function) -> Function:
    """Under O1, call ``function`` with its floating-point tensors in half precision. A decorator."""
    return _casting(function, _half)


def float_function(function: Function) -> Function:
    """Under O1, call ``function`` with its floating-point tensors in fp32. A decorator."""
    return _casting(function, _float)


def promote_function(function: Function) -> Function:
    """Under O1, call ``function`` with its floating-point tensors in the widest dtype among them. A decorator."""
    return _casting(function, _widest)


def register_half_function(module: Any, name: str) -> None:
    """:func:`half_function` for ``module.name``, from the next ``initialize`` at O1 on.

    Raises:
        AmpError: ``module`` has no such function.
    """
    _register(module, name, _half)


def register_float_function(module: Any, name: str) -> None:
    """:func:`float_function` for ``module.name``; see :func:`register_half_function`."""
    _register(module, name, _float)


def register_promote_function(module: Any, name: str) -> None:
    """:func:`promote_function` for ``module.name``; see :func:`register_half_function`."""
    _register(module, name, _widest)


@contextmanager
def disable_casts() -> Iterator[None]:
    """A context in which O1 does not cast: models compute in fp32, and functions get their arguments unchanged."""
    session = state.session
    if session is None:
        yield
        return
    before, session.casts_active = session.casts_active, False
    try:
        with torch.autocast(session.device.type, enabled=False):
            yield
    finally:
        session.casts_active = before


def patch_registered() -> list[Callable[[], None]]:
    """Replace the registered functions by casting ones; return functions that restore them."""
    undo: list[Callable[[], None]] = []
    for module, name, choose in _registered:
        original = getattr(module, name)
        setattr(module, name, _casting(original, choose))
        undo.append(functools.partial(setattr, module, name, original))
    _registered.clear()
    return undo


def _register(module: Any, name: str, choose: Choose) -> None:
    if not callable(getattr(module, name, None)):
        raise AmpError(f"amp: no function named {name!r} in {getattr(module, '__name__', module)!r} to register")
    _registered.append((module, name, choose))


def _casting(function: Function, choose: Choose) -> Function:
    @functools.wraps(function)
    def casting(*args: Any, **kwargs: Any) -> Any:
        session = state.session
        if session is None or not session.properties.patch_torch_functions or not session.casts_active:
            return function(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if _is_castable(leaf)]
        if tensors:
            wanted = choose([tensor.dtype for tensor in tensors])
            args, kwargs = tree_map_only(
                torch.Tensor, lambda tensor: tensor.to(wanted) if _is_castable(tensor) else tensor, (args, kwargs)
            )
        with torch.autocast(session.device.type, enabled=False):
            return function(*args, **kwargs)

    return casting


def _is_castable(value: object) -> bool:
    """Whether autocast would cast ``value``: floating-point tensors, except float64."""
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype is not torch.float64
