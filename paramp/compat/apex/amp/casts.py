"""Functions of the user's that O1 gives tensors of a certain precision: for what torch's autocast does not know.

Within such a function autocast is off, so that it computes in what it is given (as under ``torch.amp.custom_fwd``).
At other levels, and before ``initialize``, the functions are called as they are.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from .errors import AmpError
from .session import state

Function = Callable[..., Any]
Choose = Callable[[list[torch.dtype]], torch.dtype]
"""From the dtypes of a call's arguments, that in which it is to compute."""

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
    """Inside, O1 casts nothing: models compute in fp32, and functions get what they are given."""
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
    """Put casting functions in the place of the registered ones; return what puts these back."""
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
    """As autocast sees it: floating-point tensors, but not those in float64."""
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype is not torch.float64
