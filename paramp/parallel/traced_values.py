"""Traced values: they stand for what modules return, while a forward is traced.

Code between modules may change them in place and set their attributes, which is recorded. It may ask for their class:
it is told what the value seems to be, and each question is kept with its answer, to be asked again of the value itself.
Functions in C are told the truth: those of torch read the memory of what says that it is a tensor.
"""

from __future__ import annotations

import builtins
import dataclasses
import dis
import functools
import inspect
import linecache
import operator
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import fx, nn

from ..base.errors import shown_line
from ..base.module_surgery import named_tensors
from ..base.replaced_in_torch import patched
from ..base.torch_internals import take

QUESTIONS = "questions"
"""The key of a node's ``meta`` for the questions about the class of its value."""
TREES = inspect.getfile(take("torch.utils._pytree.tree_map_only"))
ASK_FOR_OTHERS = (__file__, dataclasses.__file__, functools.__file__, torch.__file__, TREES)
"""Files of functions such as ``torch.is_tensor``, which ask for the class because their caller does."""
TRACING = ("attributes_of_trace", "functions_of_trace", "fx_tracing", "traced_values")
"""The files of this package that run between the code of a forward and torch's tracer."""
INSIDE = (torch.__path__[0], *(str(Path(__file__).with_name(f"{name}.py")) for name in TRACING))
"""Where the lines are not that errors name."""
CHECK = "__instancecheck__"
"""The method of abstract and other classes that asks for the class because a ``match`` does."""
HANDLE_PROXIES = tuple(f"{folder}{os.sep}" for folder in (torch.__path__[0], Path(__file__).parents[1]))
"""The folders of torch and paramp, whose own code has to know a traced value; torchvision lies beside them."""


@dataclasses.dataclass
class Question:
    """Whether a value is one of ``kinds``, as in ``isinstance(value, kinds)``."""

    told: str
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
        frame = _asking_frame()
        if frame is None or not _reads_class() or is_size(self.node):
            return Recorded
        kind = type(self.tracer.stand_in(self.node))
        _answer(self, kind, frame)  # as a match asks
        return kind

    def __getattr__(self, k: str) -> fx.proxy.Attribute:
        return _RecordedAttribute(self, k)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("tracer", "node", "root", "attr", "_node"):  # fx's own
            object.__setattr__(self, name, value)
        else:
            self.tracer.create_proxy("call_function", setattr, (self, name, value), {})

    def __setitem__(self, key: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, key, value), {})


def _asking_frame() -> FrameType | None:
    """The frame of the model's code that asks for a class; None if torch or paramp ask."""
    frame = inspect.currentframe()
    while frame is not None and (frame.f_code.co_filename in ASK_FOR_OTHERS or frame.f_code.co_name == CHECK):
        frame = frame.f_back
    return None if frame is None or frame.f_code.co_filename.startswith(HANDLE_PROXIES) else frame


def _reads_class() -> bool:
    """Whether Python itself asks for a class: for the attribute, or for a pattern of a ``match``. Else it is C code."""
    frame = inspect.currentframe()
    while frame is not None and (frame.f_code.co_filename == __file__ or frame.f_code.co_name == CHECK):
        frame = frame.f_back
    return frame is not None and _reads_class_at(frame.f_code, frame.f_lasti)


@functools.lru_cache(maxsize=2**10)
def _reads_class_at(code: CodeType, offset: int) -> bool:
    """Of the instruction at ``offset``; cached, because each trace of a forward asks again."""
    step = [step for step in dis.get_instructions(code) if step.offset <= offset][-1]
    return step.opname == "MATCH_CLASS" or step.argval == "__class__"


def _answer(value: Recorded, kinds: Any, frame: FrameType) -> bool:
    """Whether ``value`` seems to be one of ``kinds``. The question of ``frame`` is kept with the answer."""
    stand_in = value.tracer.stand_in(value.node)
    answer = isinstance(stand_in, kinds)
    value.node.meta.setdefault(QUESTIONS, []).append(Question(shown_kind(stand_in), kinds, answer, line_of(frame)))
    return answer


def shown_kind(value: Any) -> str:
    """The class of ``value``, and the dtype of a tensor: ``torch.FloatTensor`` is a class of some."""
    name = type(value).__name__
    return f"{name} of {value.dtype}" if isinstance(value, torch.Tensor) else name


class _RecordedAttribute(Recorded, fx.proxy.Attribute):
    pass


_OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
IN_PLACE = tuple(f"i{name}" for name in _OPERATORS)
"""The operators that change a tensor in place."""


def _changing(function: Callable[[Any, Any], Any]) -> Callable[[Recorded, Any], fx.Proxy]:
    return lambda self, other: self.tracer.create_proxy("call_function", function, (self, other), {})


for _name in IN_PLACE:
    setattr(Recorded, f"__{_name}__", _changing(getattr(operator, _name)))


class ValueTracer(fx.Tracer, ABC):
    """A tracer of such values, which tells their classes."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: dict[fx.Node, tuple[nn.Module, tuple[Any, ...], dict[str, Any]]] = {}
        """Modules that are not traced, and their arguments."""
        self._stand_ins: dict[fx.Node, Any] = {}
        """What values are taken for, of whose class the forward has asked."""

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return Recorded(node, self)

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        output = super().call_module(m, forward, args, kwargs)
        if type(output) is Recorded and output.node.op == "call_module":  # if m is traced, one of its modules has it
            self._calls.setdefault(output.node, (m, args, kwargs))
        return output

    def stand_in(self, node: fx.Node) -> Any:
        """What the value of ``node`` is taken for: a tensor, or what the forward of a module returns when traced."""
        if node not in self._stand_ins:
            self._stand_ins[node] = self._taken_for(node)
        return self._stand_ins[node]

    def _taken_for(self, node: fx.Node) -> Any:
        if node.op == "get_attr":
            return dict(named_tensors(self.root))[str(node.target)]
        if node not in self._calls:
            divides = getattr(node.target, "__name__", node.target) in ("chunk", "split", "unbind")
            return () if divides else torch.empty(0)
        returned = self.returned_by(*self._calls[node])
        return returned.tracer.stand_in(returned.node) if issubclass(type(returned), Recorded) else returned

    @abstractmethod
    def returned_by(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the forward of ``module`` returns when it is traced; a tensor if it cannot be."""


@contextmanager
def answering() -> Iterator[None]:
    """A context in which questions about traced values are kept with their answers."""
    is_instance = builtins.isinstance

    def asking(value: Any, kinds: Any) -> bool:
        frame = _asking_frame() if issubclass(type(value), Recorded) else None
        if frame is None or kinds is fx.Proxy or is_size(value.node):  # Proxy: whether it is traced
            return is_instance(value, kinds)
        return _answer(value, kinds, frame)

    with patched(builtins, "isinstance", asking):
        yield


def is_size(node: fx.Node) -> bool:
    """Whether the value of ``node`` is a shape, a number of dims or the like, or computed of such alone."""
    if node.op == "call_method":
        return node.target in ("size", "dim", "numel", "stride", "item", "tolist")
    if node.target is getattr:
        return node.args[1] in ("shape", "ndim", "dtype", "device", "requires_grad", "is_cuda") or is_size(node.args[0])  # type: ignore[arg-type]
    module = getattr(node.target, "__module__", None)
    return module in (operator.add.__module__, "math", "builtins") and all(map(is_size, node.all_input_nodes))


def changes_of(node: fx.Node, *, maybe: bool = False) -> list[fx.Node]:
    """The nodes that change the value of ``node`` in place, also through a view; ``maybe``: or what may be a copy."""
    found = []
    for user in node.users:
        if user.op not in ("call_function", "call_method") or user.args[:1] != (node,) or is_size(user):
            continue
        name = user.target if isinstance(user.target, str) else getattr(user.target, "__name__", "")
        changes = name.endswith("_") and not name.endswith("__") and name not in HARMLESS
        changes = changes or name in ("setattr", "setitem", "__setitem__") or name in IN_PLACE
        if changes:
            found.append(user)
        if changes or name in VIEWS or (maybe and name in MAYBE_COPIES):
            found += changes_of(user, maybe=maybe)
    return found


HARMLESS = ("and_", "or_", "requires_grad_")
"""Names of functions and methods that change nothing, in spite of their last letter."""
VIEWS = ("getattr", "getitem", "detach", "view", "flatten", "squeeze", "unsqueeze", "select", "narrow")
"""Methods and functions that may return a view of their first argument; ``getattr``: its ``data``."""

MAYBE_COPIES = ("to", "type_as", "contiguous", "reshape", "float", "double", "half", "bfloat16", "cuda", "cpu")
"""Those that return their first argument, or a view of it, if it is already what they make of it."""


def users_frame() -> FrameType | None:
    """The innermost frame that is running outside of torch and of the files that trace."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(INSIDE):
        frame = frame.f_back
    return frame


def line_of(frame: FrameType) -> str:
    """The line that ``frame`` is executing, as errors show it."""
    file, line = frame.f_code.co_filename, frame.f_lineno
    return shown_line(file, line, linecache.getline(file, line))
