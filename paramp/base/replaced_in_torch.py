"""Parts of torch and of other trainers that stand otherwise for a while: kernels, attributes, functions.

:func:`replace_kernels` puts kernels of paramp's in the place of torch's, :func:`patched` attributes. With
:data:`redispatch_function` a mode sees what a function of torch's calls. The names stand in ``INVENTORY``
(:mod:`.torch_internals`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import CellType, FunctionType
from typing import Any
from weakref import WeakValueDictionary

import torch

REPLACED: WeakValueDictionary[str, torch.library.Library] = WeakValueDictionary()
"""The kernels of torch's operators that :func:`replace_kernels` has replaced, by their key in the dispatcher."""
_replacing = threading.Lock()


def replace_kernels(
    key: str, kernels: Mapping[Any, Callable[..., Any]], namespace: str = "aten"
) -> torch.library.Library:
    """Replace ``kernels`` of operators of ``INVENTORY`` under ``key`` in this process, while the result is kept.

    Kernels get the dispatcher's keys, then the operator's arguments. Who asks for one ``key`` of a ``namespace`` shares
    them.
    """
    name = key if namespace == "aten" else f"{namespace} {key}"
    with _replacing:
        library = REPLACED.get(name)
        if library is None:
            REPLACED[name] = library = torch.library.Library(namespace, "IMPL")
            for operator, kernel in kernels.items():
                library.impl(operator, kernel, key, with_keyset=True)
    return library


@contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    """A context in which the attribute ``name`` of ``owner``, of ``INVENTORY``, is ``value``."""
    own = {**vars(owner)} if isinstance(owner, type) else {name: getattr(owner, name)}  # a class may inherit it
    setattr(owner, name, value)
    try:
        yield
    finally:
        if name in own:
            setattr(owner, name, own[name])
        else:
            delattr(owner, name)


def _redispatch(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """As ``torch.overrides.redispatch_function``, which torch 2.11 lacks, for a ``func`` in Python."""
    return _unasking(func, {})(*args, **(kwargs or {}))


def _unasking(func: Any, copies: dict[Any, Any]) -> Any:
    """A copy of ``func`` in whose own code ``has_torch_function`` is false; what it calls is intercepted.

    Functions that it decorates, or chooses between, as ``max_pool1d`` does, are its own code. ``copies``: those so far.
    """
    if not isinstance(func, FunctionType):
        return func
    if func in copies:
        return copies[func]
    seen = _Unasking(func.__globals__)
    names = {name: getattr(seen, name) for name in func.__code__.co_names if name in func.__globals__}
    cells = tuple(CellType() for _ in func.__code__.co_freevars)
    copies[func] = copy = FunctionType(func.__code__, func.__globals__ | names, closure=cells)
    copy.__defaults__, copy.__kwdefaults__ = func.__defaults__, func.__kwdefaults__
    for cell, original in zip(cells, func.__closure__ or (), strict=True):
        cell.cell_contents = _unasking(original.cell_contents, copies)
    return copy


class _Unasking:
    """The names of a namespace; ``has_torch_function`` and its variants there, and in modules there, are false."""

    def __init__(self, names: Mapping[str, Any]) -> None:
        self._names = names

    def __getattr__(self, name: str) -> Any:
        if name.startswith("has_torch_function"):
            return lambda *_: False
        found = self._names[name] if name in self._names else self._names["__getattr__"](name)
        return _Unasking(vars(found)) if found in (torch, torch.overrides) else found


redispatch_function: Callable[..., Any] = getattr(torch.overrides, "redispatch_function", _redispatch)
"""Call a function of torch's from a mode that is to see what the function calls."""
