"""Tracing of a model's forward as a graph, with ``torch.fx`` and additions to it.

The additions are factories such as ``torch.arange`` of traced sizes (:mod:`paramp.parallel.functions_of_trace`),
assertions about traced values (:mod:`paramp.parallel.branches_of_trace`), and errors for code that a graph would not
repeat: what is computed of parameters alone, ``torch.no_grad()`` and the like, attributes that the forward sets
(:mod:`paramp.parallel.attributes_of_trace`), and random numbers from other generators
(:mod:`paramp.parallel.generators_of_trace`).
"""

from __future__ import annotations

import dataclasses
import inspect
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx, nn

from ..base.errors import ConfigError
from ..base.module_surgery import named_tensors
from ..base.torch_internals import take
from ..base.trees import children, leaves, map_leaves, map_tensors, rebuilt, tensors
from .attributes_of_trace import CONSTANT, OF_ALL, Attributes
from .branches_of_trace import asserted, may_be_caught, required
from .functions_of_trace import Functions, Place
from .generators_of_trace import Generators
from .materialize import outline
from .partition import is_sequential
from .traced_values import INSIDE, ValueTracer, changes_of, line_of, users_frame

tree_leaves = take("torch.utils._pytree.tree_leaves")
storage_address: Callable[[torch.Tensor], int] = take("torch._C._storage_address")

READS = "reads"
"""The key of the output node's ``meta`` for the attributes that code between modules reads of modules that are calls:
their names, with the lines."""
IS_MADE = "is made"
"""The key of a node's ``meta`` that says that it gets a tensor which the trace has made of numbers."""
TABLES = ("_parameters", "_buffers", "_modules")
"""The attributes with a module's tensors and submodules."""
Call = tuple[tuple[Any, ...], tuple[tuple[str, Any], ...]]
"""The arguments of a forward, positional and keyword, with ``...`` in place of each tensor in them."""


def call_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
    """What a trace of a forward with these arguments depends on."""

    def kind(value: Any) -> Any:
        return map_tensors(lambda _: ..., value)  # type: ignore[arg-type, return-value]

    return tuple(map(kind, args)), tuple((name, kind(value)) for name, value in sorted(kwargs.items()))


def key_of(call: Call) -> tuple[tuple[str, str], ...]:
    """What tells ``call`` from others; not its own ``repr``, which a dataclass may define."""
    return tuple((path, repr(leaf)) for path, leaf in leaves(call))


def likely_calls(model: nn.Module) -> list[Call]:
    """Calls of ``model`` with the arguments without a default; then also with those that are None by default."""
    _, *parameters = inspect.signature(type(model).forward).parameters.values()
    parameters = [one for one in parameters if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
    required = [one for one in parameters if one.default is one.empty]
    by_position = [one for one in required if one.kind is not one.KEYWORD_ONLY]
    keywords = [one.name for one in required if one.kind is one.KEYWORD_ONLY]
    if not required and parameters:
        by_position = parameters[:1]
    optional = [one.name for one in parameters if one.default is None and one not in by_position]
    args = (...,) * len(by_position)
    given = [keywords, [*keywords, *optional]] if optional else [keywords]
    return [(args, tuple((name, ...) for name in sorted(names))) for names in given]


def skeleton(model: nn.Module) -> nn.Module:
    """A copy of ``model`` to trace: each parameter and buffer is one number in memory, whatever its shape."""
    copied = outline(model)
    copies = dict(zip(model.modules(), copied.modules(), strict=True))
    thin = {tensor: _thin(tensor) for _, tensor in named_tensors(model)}

    def replaced(_: str, value: Any) -> Any:
        if isinstance(value, nn.Module):
            return copies.get(value, value)
        return thin.get(value, value) if isinstance(value, torch.Tensor) else value

    for module in copies.values():
        for name, value in vars(module).items():  # a list of submodules, say
            if name not in TABLES:
                vars(module)[name] = map_leaves(replaced, value)
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                table[name] = None if tensor is None else thin[tensor]  # type: ignore[assignment]
    return copied


def _thin(tensor: torch.Tensor) -> torch.Tensor:
    if nn.parameter.is_lazy(tensor):
        return tensor
    thin = torch.zeros((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)
    return nn.Parameter(thin, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else thin


def trace(model: nn.Module, opened: frozenset[str], call: Call) -> dict[bool, fx.Graph]:
    """The graphs of ``call`` of ``model`` in training mode (True) and evaluation mode (False), which may differ.

    The forwards of the modules called ``opened`` are traced too; other modules are calls in the graph. The tensors in
    inputs are placeholders; ``meta["keyword"]`` is the path to those in keyword inputs.
    """
    try:
        inspect.signature(type(model).forward).bind(model, *call[0], **dict(call[1]))
    except TypeError as error:
        raise ConfigError(f"inputs: the forward of {type(model).__name__} does not take them: {error}") from None
    modes = {module: module.training for module in model.modules()}
    for name in sorted(opened):
        check_mode(name, model.get_submodule(name), model)
    generators = Generators(model)
    tensors = [pair for pair in named_tensors(model) if not nn.parameter.is_lazy(pair[1])]
    before = [(*_state(one), one.data) for _, one in tensors]  # held, so that no other tensor gets its address
    graphs = {}
    try:
        for training in (True, False):
            model.train(training)
            # As an engine's steps and evaluations compute; outside of inference mode, for steps use its constants too.
            with torch.inference_mode(False), torch.set_grad_enabled(training):
                graphs[training] = _traced(model, opened, call, generators)
        if changed := [name for (name, one), state in zip(tensors, before, strict=True) if _state(one) != state[:2]]:
            raise fx.proxy.TraceError(
                f"it changes {changed[0]!r}, which it gets from parameters() or the like, outside of its modules: "
                "tracing does not record that; change it in a submodule, or between steps"
            )
    except Exception as error:
        raise ConfigError(
            f"parallel.pipeline.size: {type(model).__name__} is not an nn.Sequential, and tracing its forward failed"
            f"{_where(error)}: {generators.draws() or error}. Move code that depends on sizes or values into a "
            "submodule, which is not traced, or make the model an nn.Sequential"
        ) from error
    finally:
        for module, training in modes.items():
            module.training = training
        generators.restore()
    return graphs


def _traced(model: nn.Module, opened: frozenset[str], call: Call, generators: Generators) -> fx.Graph:
    """The graph of ``call``. It makes tensors of numbers in each run if the forward changes them in place.

    Others are constants, on whose values the forward may branch.
    """
    recorded: frozenset[Place] = frozenset()
    while True:
        tracer = _Tracer(opened, call, generators, recorded)
        graph = tracer.trace(model)
        changed = tracer.changed_factories()
        if not changed:
            graph.output_node().meta[READS] = tracer.attributes.read_of_calls(model, opened)
            return graph
        recorded |= changed


def _state(tensor: torch.Tensor) -> tuple[int, int]:
    """What differs once ``tensor`` was changed in place, or given another ``.data``."""
    return tensor._version, storage_address(tensor)


def _where(error: Exception) -> str:
    """The line of the user's code that an exception came from."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(INSIDE)]
    return f" at {frames[-1].filename}:{frames[-1].lineno} ({frames[-1].line})" if frames else ""


class _Tracer(ValueTracer):
    proxy_buffer_attributes = True

    def __init__(
        self, opened: frozenset[str], call: Call, generators: Generators, recorded: frozenset[Place] = frozenset()
    ) -> None:
        super().__init__()
        self._opened = opened
        self._call = call
        self._generators = generators
        self._modes = _modes()
        self._functions = Functions(self.create_proxy, recorded)
        self.attributes = Attributes()
        self.returned: Any = None
        """What the forward has returned."""
        self._refused: fx.proxy.TraceError | None = None
        """What the last branch on a traced value has raised, which the forward may have caught."""

    def trace(self, root: Any, concrete_args: Any = None) -> fx.Graph:
        with self.attributes.following(root), self._functions.recorded(root):
            graph = super().trace(root, concrete_args)
        if self._refused is not None:
            raise self._refused
        return graph

    def changed_factories(self) -> set[Place]:
        """The calls that make tensors of numbers alone, which the forward changes in place with what it computes.

        Nodes that get what such calls have made are marked by :data:`IS_MADE`.
        """
        places = {storage_address(made): place for made, place in self._functions.made if made.layout is torch.strided}
        changed = set()
        for node in self.graph.nodes:
            if node.op == "get_attr" and str(node.target).startswith(CONSTANT):
                constant = getattr(self.root, str(node.target))
                if constant.layout is not torch.strided:
                    continue
                address = storage_address(constant)
                node.meta[IS_MADE] = address in places
                changes = changes_of(node, maybe=address in places)
                if changes and address in places:
                    changed.add(places[address])
                elif changes and address not in self._in_containers():
                    raise fx.proxy.TraceError(
                        f"it changes a tensor in place {changes[0].meta.get('line', '')}, which is a constant of the "
                        "trace; make it by torch.zeros or the like, or in a submodule, or keep it as a buffer"
                    )
        return changed

    def _in_containers(self) -> set[int]:
        """The storages of the tensors in containers that modules hold."""
        held = [
            value
            for module in self.root.modules()
            for name, value in vars(module).items()
            if name not in OF_ALL and not name.startswith(CONSTANT)
        ]
        return {storage_address(one) for one in tensors(held) if one.layout is torch.strided}

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name not in self._opened

    def returned_by(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._check_draws()

        def kind(_: str, value: Any) -> Any:
            return ... if isinstance(value, fx.Proxy) else value

        args, kwargs = map_leaves(kind, (args, kwargs))
        tracer = _Tracer(frozenset(), (args, tuple(kwargs.items())), self._generators)
        try:
            tracer.trace(module)
        except Exception:
            return torch.empty(0)
        finally:
            self._generators.restore()
        return tracer.returned

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Any, list[Any]]:
        args, keywords = self._call

        def run(root: nn.Module, *proxies: fx.Proxy) -> Any:
            self.returned = root_fn(root, *proxies, **named)
            return self.returned

        def placeholder(path: str, value: Any) -> Any:
            return self.create_proxy("placeholder", f"input{path}", (), {}) if value is ... else value

        def keyword(path: str, value: Any) -> Any:
            proxy = placeholder(path, value)
            if value is ...:
                proxy.node.meta["keyword"] = path
            return proxy

        inputs, named = map_leaves(placeholder, args), map_leaves(keyword, dict(keywords))
        return run, [self.root, *inputs]

    def create_arg(self, a: Any) -> Any:
        # torch.func's transforms compute unseen.
        is_of_parameters = isinstance(a, torch.Tensor) and (a.requires_grad or self._functions.is_of_parameters(a))
        if is_of_parameters and not isinstance(a, nn.Parameter):
            raise fx.proxy.TraceError(
                "it computes with parameters or buffers that it gets from parameters(), buffers() or the like, which "
                "tracing does not record; use attributes, such as self.up.weight, or compute it in a submodule"
            )
        # A graph takes no other mappings than dicts, and makes dataclasses of all their fields.
        if isinstance(a, nn.Module) or not (isinstance(a, Mapping) or dataclasses.is_dataclass(a)):
            return super().create_arg(a)
        parts = children(a)
        if parts is None or type(a) in (dict, fx.immutable_collections.immutable_dict):
            return super().create_arg(a)

        def container(parts: dict[str, Any]) -> Any:
            return rebuilt(a, parts)

        return self.create_node("call_function", container, (super().create_arg(parts),), {})

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        if _modes() != self._modes:
            raise fx.proxy.TraceError(
                "it computes inside torch.no_grad(), torch.autocast() or the like, which tracing does not record"
            )
        self._check_draws()
        node = super().create_node(*args, **kwargs)
        frame = users_frame()
        if frame is not None:
            node.meta["line"] = line_of(frame)
        return node

    def _check_draws(self) -> None:
        if (draws := self._generators.draws()) is not None:
            raise fx.proxy.TraceError(draws)

    def to_bool(self, obj: fx.Proxy) -> bool:
        # torch's own trace_asserts supports the bytecode of older Python versions only.
        frame = users_frame()
        must: bool | None = None
        if frame is not None:
            where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
            message = f"the model's assertion at {where} failed"
            must = asserted(frame.f_code, frame.f_lasti)
            if must is None and not may_be_caught(frame, _Tracer.trace.__code__):
                message = f"the model's forward raises an error at {where}"
                must = required(frame.f_code, frame.f_lasti, str(obj.node.target))
        if must is None:
            self._refused = fx.proxy.TraceError(
                "this control flow depends on a size or a value of a tensor. Tracing records it only if it is assert, "
                "or if with a branch that just raises an error, outside of try and with"
            )
            raise self._refused
        self.create_proxy("call_function", _require, (obj, must, message), {})
        return must


def _require(condition: object, must: bool, message: str) -> None:
    if bool(condition) is not must:
        raise AssertionError(message)


def _modes() -> tuple[bool, ...]:
    autocast = map(torch.is_autocast_enabled, ("cpu", "cuda"))
    return (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *autocast)


def check_mode(name: str, module: nn.Module, model: nn.Module) -> None:
    """Raise a ConfigError for an opened ``module`` in another mode than ``model``, which has one graph per mode."""
    if module.training == model.training or is_sequential(module) or isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return
    mode, other = ("training" if one.training else "evaluation" for one in (module, model))
    raise ConfigError(
        f"parallel.pipeline.split: {name!r} is in {mode} mode, the model in {other} mode, but a module that is split "
        "has the model's mode; split around it, or set the modes of the modules in it instead"
    )
