"""Traced values: they stand for what modules return, while a forward is traced.

Code between modules may change them in place and set their attributes, which is recorded. It may ask for their class:
it is told what the value seems to be, and each question is kept with its answer, to be asked again of the value itself.
"""

from __future__ import annotations

import abc
import builtins
import dataclasses
import functools
import inspect
import linecache
import operator
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import fx, nn

from ..base.errors import shown_line
from ..base.torch_internals import patched

QUESTIONS = "questions"
"""The key of a node's ``meta`` for the questions about the class of its value."""
ASK_FOR_OTHERS = (__file__, abc.__file__, "<frozen abc>", dataclasses.__file__, functools.__file__)
"""Files of functions such as ``is_tensor``, which ask for the class because their caller does."""
HANDLE_PROXIES = tuple(f"{folder}{os.sep}" for folder in (torch.__path__[0], Path(__file__).parents[1]))
"""The folders of torch and paramp, whose own code has to know a traced value; torchvision lies beside them."""


@dataclasses.dataclass
class Question:
    """Whether a value is one of ``kinds``, as in ``isinstance(value, kinds)``."""

    told: type
    """What the value is taken for."""
    kinds: Any
    answer: bool
    line: str
    """The line that asks."""


class Recorded(fx.Proxy):
    """A traced value. Code between modules may ask for its class, change it in place and set its attributes."""

    tracer: ValueTracer

    @property  # type: ignore[misc]  # its value cannot be set
    def __class__(self) -> type:
        frame = inspect.currentframe()
        while frame is not None and frame.f_code.co_filename in ASK_FOR_OTHERS:
            frame = frame.f_back
        if frame is None or frame.f_code.co_filename.startswith(HANDLE_PROXIES) or is_size(self.node):
            return Recorded
        asked: list[Question] = self.node.meta.setdefault(QUESTIONS, [])
        told = asked[0].told if asked else self.tracer.class_of(self.node)
        asked.append(Question(told, told, True, line_of(frame)))  # as a match asks; isinstance changes it
        self.tracer.asked.append(asked[-1])
        return told

    def __getattr__(self, k: str) -> fx.proxy.Attribute:
        return _RecordedAttribute(self, k)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("tracer", "node", "root", "attr", "_node"):  # fx's own
            object.__setattr__(self, name, value)
        else:
            self.tracer.create_proxy("call_function", setattr, (self, name, value), {})


class _RecordedAttribute(Recorded, fx.proxy.Attribute):
    pass


_OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
IN_PLACE = tuple(f"i{name}" for name in _OPERATORS)
"""The operators that change a tensor in place."""


def _changing(function: Callable[[Any, Any], Any]) -> Callable[[Recorded, Any], fx.Proxy]:
    return lambda self, other: self.tracer.create_proxy("call_function", function, (self, other), {})


for _name in IN_PLACE:
    setattr(Recorded, f"__{_name}__", _changing(getattr(operator, _name)))


class ValueTracer(fx.Tracer):
    """A tracer of such values, which tells their classes."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: dict[fx.Node, tuple[nn.Module, tuple[Any, ...], dict[str, Any]]] = {}
        """Modules that are not traced, and their arguments."""
        self.asked: list[Question] = []
        """The latest questions, of which those that isinstance has asked are no more."""

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return Recorded(node, self)

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        output = super().call_module(m, forward, args, kwargs)
        if type(output) is Recorded and output.node.op == "call_module":  # if m is traced, one of its modules has it
            self._calls.setdefault(output.node, (m, args, kwargs))
        return output

    def class_of(self, node: fx.Node) -> type:
        """What the value of ``node`` is taken for: a tensor, or what the forward of a module returns when traced."""
        if node not in self._calls:
            divides = getattr(node.target, "__name__", node.target) in ("chunk", "split", "unbind")
            return tuple if divides else torch.Tensor
        returned = self.returned_by(*self._calls[node])
        return returned.tracer.class_of(returned.node) if issubclass(type(returned), Recorded) else type(returned)

    def returned_by(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the forward of ``module`` returns when it is traced; a tensor if it cannot be."""
        raise NotImplementedError


@contextmanager
def answering() -> Iterator[None]:
    """A context in which questions about traced values are kept with their answers."""
    is_instance = builtins.isinstance

    def asking(value: Any, kinds: Any) -> bool:
        if not issubclass(type(value), Recorded):
            return is_instance(value, kinds)
        asked = value.tracer.asked
        before = len(asked)
        answer = is_instance(value, kinds)
        while len(asked) > before:  # one for each of kinds, if it asks at all
            question = asked.pop()
            question.kinds, question.answer = kinds, answer
        return answer

    def is_tensor(value: Any) -> bool:
        return isinstance(value, torch.Tensor)  # torch's own asks in a file of torch

    with patched(torch, "is_tensor", is_tensor), patched(builtins, "isinstance", asking):
        yield


def is_size(node: fx.Node) -> bool:
    """Whether the value of ``node`` is a shape, a number of dims or the like, or computed of such alone."""
    if node.op == "call_method":
        return node.target in ("size", "dim", "numel", "stride", "item", "tolist")
    if node.target is getattr:
        return node.args[1] in ("shape", "ndim", "dtype", "device", "requires_grad", "is_cuda") or is_size(node.args[0])  # type: ignore[arg-type]
    module = getattr(node.target, "__module__", None)
    return module in (operator.add.__module__, "math", "builtins") and all(map(is_size, node.all_input_nodes))


def line_of(frame: FrameType) -> str:
    """The line that ``frame`` is executing, as errors show it."""
    file, line = frame.f_code.co_filename, frame.f_lineno
    return shown_line(file, line, linecache.getline(file, line))
