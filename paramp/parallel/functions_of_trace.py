"""Functions that a forward calls while it is traced.

A trace of what some of them do would be wrong, so that they are recorded themselves. Others make constants of the
graph, of numbers or of parameters.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from types import CodeType
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.overrides import TorchFunctionMode

from ..base.replaced_in_torch import patched
from ..base.torch_internals import take
from .traced_values import answering, users_frame

tree_leaves = take("torch.utils._pytree.tree_leaves")
storage_address: Callable[[torch.Tensor], int] = take("torch._C._storage_address")

FACTORIES = ("arange", "empty", "eye", "full", "linspace", "ones", "tensor", "tril_indices", "triu_indices", "zeros")
"""torch functions of numbers, which are patched to accept proxies."""
RANDOM = ("normal", "rand", "randint", "randn", "randperm")
"""The same, but always recorded, because they return different numbers in each call."""
FUNCTION_META = type(torch.autograd.Function)
"""Where ``apply``, also under a name that a file has given to it, looks up the ``forward`` that it calls."""
NO_SETUP = torch.autograd.Function.setup_context
OF_KIND = ("to", "type_as", "expand_as", "view_as", "reshape_as")
"""Methods that take the shape, the dtype or the device alone of the second tensor."""
Place = tuple[CodeType | None, int]
"""Some code, and the offset of an instruction in it."""


class Functions:
    """The functions that one trace of a forward calls.

    Attributes:
        made: the tensors that factories have made of numbers, and the places of the calls; not of recorded calls.
    """

    def __init__(self, create_proxy: Callable[..., fx.Proxy], recorded: frozenset[Place]) -> None:
        """``create_proxy`` is that of the tracer; ``recorded``: the calls of factories that are in the graph."""
        self._create_proxy = create_proxy
        self._recorded = recorded
        self.made: list[tuple[torch.Tensor, Place]] = []

    @contextmanager
    def recorded(self, model: nn.Module) -> Iterator[None]:
        """A context of a trace of ``model``."""
        self._of_parameters = _OfParameters(model)
        with answering(), self._factories(), self._autograd_functions(), self._of_parameters:
            yield

    def is_of_parameters(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor``, which the trace has met, was computed of parameters or buffers of the model alone."""
        return tensor in self._of_parameters

    @contextmanager
    def _factories(self) -> Iterator[None]:
        """A context in which functions such as ``torch.arange`` accept proxies instead of numbers.

        They are patched, as a ``TorchFunctionMode`` does not see calls such as ``torch.empty(proxy, 3)``. Attention is
        recorded by its name, because ``parallel.context`` replaces it while an engine computes.
        """
        originals = {name: getattr(torch, name) for name in (*FACTORIES, *RANDOM)}

        def recording(name: str) -> Callable[..., Any]:
            def function(*args: Any, **kwargs: Any) -> Any:
                frame = users_frame()
                place = (None, 0) if frame is None else (frame.f_code, frame.f_lasti)
                is_recorded = name in RANDOM or place in self._recorded
                if is_recorded or any(isinstance(leaf, fx.Proxy) for leaf in tree_leaves((args, kwargs))):
                    return self._create_proxy("call_function", originals[name], args, kwargs)
                made = originals[name](*args, **kwargs)
                self.made.append((made, place))
                return made

            return function

        def attention(*args: Any, **kwargs: Any) -> Any:
            return self._create_proxy("call_function", _attention, args, kwargs)

        with ExitStack() as stack:
            for name in originals:
                stack.enter_context(patched(torch, name, recording(name)))
            stack.enter_context(patched(F, "scaled_dot_product_attention", attention))
            yield

    @contextmanager
    def _autograd_functions(self) -> Iterator[None]:
        """A context in which autograd functions are recorded: a trace of their forward would lose their backward."""
        applied: Any = None
        has_grad = False

        def is_call(function: type, inputs: Sequence[Any]) -> bool:
            # torch's own, such as that of checkpoint, trace what they run; so do others that get a function.
            is_proxy = [isinstance(one, fx.Proxy) for one in inputs]
            runs = any(callable(one) for one, is_one in zip(inputs, is_proxy, strict=True) if not is_one)
            return any(is_proxy) and not runs and not function.__module__.startswith("torch.")

        def attribute(function: Any, name: str) -> Any:
            nonlocal applied, has_grad
            found = type.__getattribute__(function, name)
            if name == "_backward_cls":  # what apply asks for first; it turns gradients off for forward
                applied, has_grad = function, torch.is_grad_enabled()
            if name not in ("forward", "setup_context"):
                return found
            if name == "forward":
                if applied is not function:  # code of the model asks for it, to call it without apply
                    return found
                applied = None
            own_setup = type.__getattribute__(function, "setup_context")
            has_setup = own_setup is not NO_SETUP

            @functools.wraps(found)
            def forward(*args: Any, **kwargs: Any) -> Any:
                inputs = args if has_setup else args[1:]
                if is_call(function, inputs):
                    with torch.set_grad_enabled(has_grad):
                        return self._create_proxy("call_function", function.apply, inputs, kwargs)
                return found(*args, **kwargs)

            def setup(context: Any, inputs: tuple[Any, ...], output: Any) -> None:
                if not is_call(function, inputs):
                    own_setup(context, inputs, output)

            return forward if name == "forward" else setup if has_setup else found

        with patched(FUNCTION_META, "__getattribute__", attribute):
            yield


class _OfParameters(TorchFunctionMode):
    """Knows what the forward computes of the model's parameters and buffers alone: constants of the graph otherwise."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        given = (*model.parameters(), *model.buffers())
        self._given = {id(one) for one in given}
        self._known = set(map(_memory, given))
        self._computed: list[torch.Tensor] = []
        """Held, so that no other tensor gets their memory."""

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return id(tensor) not in self._given and _memory(tensor) in self._known

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        returned = func(*args, **kwargs)
        name = func.__name__
        if name.startswith("new_") or name.rpartition("_")[2] == "like":  # of their shape and dtype alone
            return returned
        read = tree_leaves(args[:1] if name in OF_KIND else (args, kwargs))
        if any(isinstance(one, torch.Tensor) and _memory(one) in self._known for one in read):
            changed = [args[0]] if func is torch.Tensor.__setitem__ else tree_leaves(returned)
            made = [one for one in changed if isinstance(one, torch.Tensor)]
            self._computed += made
            self._known.update(map(_memory, made))
        return returned


def _memory(tensor: torch.Tensor) -> int:
    """What views of a tensor and its ``.data`` have in common."""
    if tensor.layout is torch.strided and not tensor.is_meta and not nn.parameter.is_lazy(tensor):
        with suppress(RuntimeError):  # those of torch.func's transforms have none
            return storage_address(tensor)
    return id(tensor)


def _attention(*args: Any, **kwargs: Any) -> torch.Tensor:
    return F.scaled_dot_product_attention(*args, **kwargs)
