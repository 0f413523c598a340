"""Random generators that exist before a trace: a draw of theirs would be a constant of the graph."""

from __future__ import annotations

import functools
import gc
import inspect
import pickle
import random
import sys
from collections.abc import Callable, Iterator
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from ..base.held_tensors import NUMBERS_AND_TEXT


def _set_bits(generator: np.random.Generator, state: Any) -> None:
    generator.bit_generator.state = state


STATES: dict[type, tuple[Callable[[Any], Any], Callable[[Any, Any], None]]] = {
    random.Random: (random.Random.getstate, random.Random.setstate),
    np.random.RandomState: (lambda one: one.get_state(), lambda one, state: one.set_state(state)),
    np.random.Generator: (lambda one: one.bit_generator.state, _set_bits),
    torch.Generator: (
        lambda one: one.get_state().numpy().tobytes(),
        lambda one, state: one.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8)),
    ),
}
"""How the state of a random generator of each class is read, and set."""


class Generators:
    """The random generators that exist before a trace, with their states then: those of torch, Python and numpy, those
    that modules of the model hold, and the global variables of files. One that the forward makes is not among them.
    """

    def __init__(self, model: nn.Module) -> None:
        self._names: dict[Any, str] = {
            random.random.__self__: "Python's random",  # type: ignore[attr-defined]
            np.random.rand.__self__: "numpy",  # type: ignore[attr-defined]
            torch.default_generator: "torch's generator",
        }
        for name, module in model.named_modules():
            owner = f"module {name!r}" if name else type(module).__name__
            for generator in _held(vars(module), *map(vars, type(module).__mro__)):
                self._names.setdefault(generator, f"the {type(generator).__name__} that {owner} holds")
        for name, loaded in list(sys.modules.items()):
            variables = dict(vars(loaded)) if isinstance(loaded, ModuleType) else {}
            if not any(map(_kind_of, set(map(type, variables.values())))):  # classes, for values are some 100,000
                continue
            for variable, value in variables.items():
                if _kind(value):
                    self._names.setdefault(value, f"{name}.{variable}")
        self._start = self._states()

    def _states(self) -> dict[Any, bytes]:
        return {one: pickle.dumps(STATES[_kind(one)][0](one)) for one in self._names}  # type: ignore[index]

    def draws(self) -> str | None:
        """What is wrong if numbers were drawn from one, or it was seeded, since the trace began; None if not."""
        moved = [self._names[one] for one, state in self._states().items() if state != self._start[one]]
        if not moved:
            return None
        return (
            f"outside of its modules it draws random numbers from {' and '.join(moved)}, which would be the same in "
            "each step; use torch.rand and the like, or F.dropout, or draw them in a submodule"
        )

    def restore(self) -> None:
        for one, state in self._start.items():
            STATES[_kind(one)][1](one, pickle.loads(state))  # type: ignore[index]


def _kind(value: Any) -> type | None:
    """The class in STATES that ``value`` is of. ``isinstance`` would ask ``value``, which may warn."""
    return _kind_of(type(value))  # type: ignore[arg-type]  # classes are hashable


@functools.lru_cache(maxsize=2**14)
def _kind_of(cls: type) -> type | None:
    """Cached, because a trace asks for all that the modules of the model hold."""
    return next((kind for kind in cls.__mro__ if kind in STATES), None)


APART = (*NUMBERS_AND_TEXT, torch.Tensor, nn.Module, type, ModuleType)


def _held(*values: Any) -> Iterator[Any]:
    """The random generators that ``values`` hold, in containers, attributes and closures, but not in other modules."""
    seen: dict[int, Any] = {}
    waiting = list(values)
    while waiting:
        one = waiting.pop()
        if _kind(one):
            yield one
        elif id(one) not in seen and not issubclass(type(one), APART):
            seen[id(one)] = one
            if isinstance(one, FunctionType):  # not its globals
                waiting += gc.get_referents(one.__closure__, one.__defaults__, one.__kwdefaults__)
            elif inspect.isroutine(one):  # a method of a generator, say
                waiting += [getattr(one, "__self__", None), getattr(one, "__func__", None)]
            else:
                waiting += gc.get_referents(one)
