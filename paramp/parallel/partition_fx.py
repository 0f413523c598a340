"""The pipeline stages of a model that is not sequential: its forward is traced, and the graph partitioned.

``torch.fx`` runs the model's own forward on proxies and records what it does. Modules are not traced but recorded as
calls, so that plans, precision and hooks find them unchanged; only what lies between them, the glue, becomes a graph::

    x ── down1 ── down2 ──── middle ── up2 ── cat ── up1 ──► output
           │         └───────────────────┘     │
           └───────────────────────────────────┘
                             ▲ a stage ends after middle: middle's output is sent, and both skips

A stage is a range of the graph's calls. A value that a later stage needs passes through each stage between. Parameters
that the glue uses itself are held by every stage that uses them, and tied.
"""

from __future__ import annotations

import dis
import inspect
import random
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import fx, nn
from torch.utils._pytree import tree_leaves

from ..base.errors import ConfigError
from ..base.module_surgery import keep_only, names_outside, with_forward
from ..precision import norms
from .partition import check_names, is_sequential, multiplied_parameters, plan_stages

__all__ = ["TracedPartition"]

FACTORIES = ("arange", "empty", "eye", "full", "linspace", "ones", "tensor", "tril_indices", "triu_indices", "zeros")
"""torch functions that take numbers only, which may be proxies here."""
RANDOM = ("normal", "rand", "randint", "randn", "randperm")
"""The same, always recorded: they return other numbers in each call."""
UNBALANCED = 1.5
"""Modules are opened while the heaviest stage has more than this many times an even share."""


class TracedPartition:
    """The partition of any model that takes one input: between any two of the modules that its forward calls.

    Args:
        split: the names at which stages begin. A module that contains one is opened: its forward is traced too.
            None: modules that are too heavy for a stage are opened, except those of ``torch.nn`` and our norms.

    Raises:
        ConfigError: the model cannot be traced, or a name of ``split`` is no module, or is not called.
    """

    def __init__(self, model: nn.Module, num_stages: int, split: Sequence[str] | None) -> None:
        self._model = model
        self._modules = dict(model.named_modules(remove_duplicate=False))
        self.opened: frozenset[str] = frozenset()
        if split is not None:
            check_names(split, [name for name in self._modules if name])
            parts = [name.split(".") for name in split]
            self.opened = frozenset(".".join(names[:end]) for names in parts for end in range(1, len(names)))
        self._graphs = _trace(model, self.opened)
        if split is None:
            self._open_heavy(num_stages)
            return
        names = [name for name, _ in self.units]
        for name in split:
            if not any(known == name or known.startswith(f"{name}.") for known in names):
                raise ConfigError(
                    f"parallel.pipeline.split: got {name!r}, which the forward of {type(model).__name__} does not call "
                    f"by that name; expected one of {', '.join(names)}"
                )

    @property
    def units(self) -> list[tuple[str, nn.Module]]:
        called = [str(node.target) for node in self._graphs[True].nodes if node.op == "call_module"]
        return [(name, self._modules[name]) for name in dict.fromkeys(called)]

    def _open_heavy(self, num_stages: int) -> None:
        closed: set[str] = set()
        while True:
            weights = {name: 1 + multiplied_parameters(unit) for name, unit in self.units}
            norm_weight = sum(weights.values()) / num_stages
            few = len(weights) < num_stages
            if not few:
                stages = plan_stages(self.units, num_stages)
                if max(sum(weights[name] for name in stage) for stage in stages) <= UNBALANCED * norm_weight:
                    return
            heavy = [
                name
                for name, unit in self.units
                if name not in closed and _may_open(unit) and (few or weights[name] > norm_weight / 2)
            ]
            if not heavy:
                return
            name = max(heavy, key=lambda name: weights[name])
            closed.add(name)
            try:
                graphs = _trace(self._model, self.opened | {name})
            except ConfigError:
                continue  # it stays closed
            self._graphs, self.opened = graphs, self.opened | {name}

    def stages(self, plan: Sequence[Sequence[str]]) -> list[nn.Module]:
        stage_of = {name: stage for stage, names in enumerate(plan) for name in names}
        chunks = {mode: _partition(graph, stage_of, len(plan)) for mode, graph in self._graphs.items()}
        names_of: dict[int, list[str]] = {}
        for name, module in self._modules.items():
            names_of.setdefault(id(module), []).append(name)
        kept: list[set[str]] = []
        for stage in range(len(plan)):
            used = [node for mode in chunks for node in chunks[mode][stage].nodes]
            called = [str(node.target) for node in used if node.op == "call_module"]
            got = [str(node.target) for node in used if node.op == "get_attr"]
            kept.append({*got, *(alias for name in called for alias in names_of[id(self._modules[name])])})
        kept[0].update(names_outside(self._model, set().union(*kept)))  # what no stage uses is kept too
        return [
            _stage_module(self._model, kept[stage], {mode: chunks[mode][stage] for mode in chunks}, stage, self.opened)
            for stage in range(len(plan))
        ]


def _may_open(module: nn.Module) -> bool:
    return is_sequential(module) or not type(module).__module__.startswith(("torch.nn.", norms.__name__))


def _stage_module(
    model: nn.Module, kept: set[str], graphs: dict[bool, fx.Graph], stage: int, opened: frozenset[str]
) -> nn.Module:
    interpreters: dict[bool, fx.Interpreter] = {}

    def forward(received: Any) -> Any:
        mode = part.training
        for name, module in opened_modules:
            _check_mode(name, module, part)
        if mode not in interpreters:  # at the first call: a plan may have changed modules
            interpreters[mode] = fx.Interpreter(part, graph=graphs[mode])
        values = (received,) if stage == 0 else received
        try:
            return interpreters[mode].run(*values)
        finally:
            interpreters[mode].env = {}

    part = with_forward(keep_only(model, kept), forward)
    opened_modules = [(name, module) for name, module in part.named_modules(remove_duplicate=False) if name in opened]
    return part


def _check_mode(name: str, module: nn.Module, model: nn.Module) -> None:
    """Refuse an opened ``module`` in another mode than ``model``, which has one graph for each mode."""
    if module.training == model.training or is_sequential(module) or isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return
    own, other = ("training" if part.training else "evaluation" for part in (module, model))
    raise ConfigError(
        f"parallel.pipeline.split: {name!r} is in {own} mode, the model in {other} mode; a module that is split "
        "has the model's, so split around it, or set the modes of the modules in it instead"
    )


# ------------------------------------------------------------------------------------------------------- the graph


def _partition(graph: fx.Graph, stage_of: dict[str, int], num_stages: int) -> list[fx.Graph]:
    """``graph`` as ``num_stages`` graphs; each takes what the one before returns, a tuple of values."""
    nodes = [node for node in graph.nodes if node.op != "get_attr"]  # each graph gets attributes for itself
    reached = 0
    place: dict[fx.Node, int] = {}
    for node in nodes:
        if node.op == "call_module":
            reached = max(reached, stage_of.get(str(node.target), 0))
        place[node] = num_stages - 1 if node.op == "output" else reached
    last_use = {node: max((place[user] for user in node.users if user in place), default=place[node]) for node in nodes}
    chunks = []
    for stage in range(num_stages):
        received = [node for node in nodes if place[node] < stage <= last_use[node]]
        sent = [node for node in nodes if place[node] <= stage < last_use[node]]
        own = [node for node in nodes if place[node] == stage]
        chunks.append(_submodule(own, received, sent if stage < num_stages - 1 else None))
    return chunks


def _submodule(own: Sequence[fx.Node], received: Sequence[fx.Node], sent: Sequence[fx.Node] | None) -> fx.Graph:
    chunk = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {node: chunk.placeholder(node.name) for node in received}

    def copied(node: fx.Node) -> fx.Node:
        if node not in copies:
            assert node.op == "get_attr"
            copies[node] = chunk.node_copy(node)
        return copies[node]

    for node in own:
        for argument in node.all_input_nodes:
            copied(argument)
        copies[node] = chunk.node_copy(node, copied)
    if sent is not None:
        chunk.output(tuple(copies[node] for node in sent))
    return chunk


# --------------------------------------------------------------------------------------------------------- tracing


def _trace(model: nn.Module, opened: frozenset[str]) -> dict[bool, fx.Graph]:
    """The graphs of ``model`` in training (True) and in evaluation (False), between which its forward may branch."""
    modes = {module: module.training for module in model.modules()}
    for name in sorted(opened):
        _check_mode(name, model.get_submodule(name), model)
    start = _random_states()
    graphs = {}
    try:
        for training in (True, False):
            model.train(training)
            tracer = _Tracer(opened)
            with tracer.recording_factories():
                graphs[training] = tracer.trace(model)
            moved = [source for source, state in _random_states().items() if state != start[source]]
            if moved:
                raise fx.proxy.TraceError(
                    f"it draws random numbers from {' and '.join(moved)} between its modules, which would be the same "
                    "in each step; use torch.rand and the like, or F.dropout"
                )
    except Exception as error:
        raise ConfigError(
            f"parallel.pipeline.size: {type(model).__name__} is no nn.Sequential, and tracing its forward failed"
            f"{_where(error)}: {error}. Put what depends on values into a module of its own, which is not traced, "
            "or make the model an nn.Sequential"
        ) from error
    finally:
        for module, training in modes.items():
            module.training = training
        for source, restore in RESTORE.items():
            restore(start[source])
    return graphs


def _random_states() -> dict[str, Any]:
    """The states of the generators that a forward may use, comparable by value."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    return {
        "Python's random": random.getstate(),
        "numpy": (kind, tuple(keys), *rest),
        "torch's generator": torch.get_rng_state().numpy().tobytes(),
    }


RESTORE: dict[str, Callable[[Any], None]] = {
    "Python's random": random.setstate,
    "numpy": np.random.set_state,
    "torch's generator": lambda state: torch.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8)),
}


def _where(error: Exception) -> str:
    """The line of the user's code that an exception came from."""
    inside = (torch.__path__[0], __file__)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(inside)]
    return f" at {frames[-1].filename}:{frames[-1].lineno} ({frames[-1].line})" if frames else ""


class _Tracer(fx.Tracer):
    proxy_buffer_attributes = True

    def __init__(self, opened: frozenset[str]) -> None:
        super().__init__()
        self._opened = opened
        self._modes = _modes()

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name not in self._opened

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Any, list[Any]]:
        # The model's one input; its other parameters take their defaults.
        return root_fn, [self.root, self.create_proxy("placeholder", "x", (), {})]

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        if _modes() != self._modes:
            raise fx.proxy.TraceError(
                "it computes inside torch.no_grad(), torch.autocast() or the like, which tracing does not see"
            )
        return super().create_node(*args, **kwargs)

    def to_bool(self, obj: fx.Proxy) -> bool:
        # torch's own trace_asserts knows the bytecode of older Pythons only.
        frame = inspect.currentframe()
        while frame is not None and frame.f_code.co_filename.startswith((torch.__path__[0], __file__)):
            frame = frame.f_back
        if frame is None or not _asserts(frame):
            return super().to_bool(obj)
        where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        self.create_proxy("call_function", _check, (obj, f"the model's assertion at {where} failed"), {})
        return True

    @contextmanager
    def recording_factories(self) -> Iterator[None]:
        """Inside, functions such as ``torch.arange`` take proxies in place of numbers."""
        originals = {name: getattr(torch, name) for name in (*FACTORIES, *RANDOM)}

        def recording(name: str) -> Callable[..., Any]:
            def function(*args: Any, **kwargs: Any) -> Any:
                if name in RANDOM or any(isinstance(leaf, fx.Proxy) for leaf in tree_leaves((args, kwargs))):
                    return self.create_proxy("call_function", originals[name], args, kwargs)
                return originals[name](*args, **kwargs)

            return function

        try:
            for name in originals:
                setattr(torch, name, recording(name))
            yield
        finally:
            for name, original in originals.items():
                setattr(torch, name, original)


def _check(condition: object, message: str) -> None:
    if not condition:
        raise AssertionError(message)


def _modes() -> tuple[bool, ...]:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        *map(torch.is_autocast_enabled, ("cpu", "cuda")),
    )


def _asserts(frame: FrameType) -> bool:
    """Whether ``frame`` is about to raise AssertionError should the value that it tests be false."""
    following = [step.opname for step in dis.get_instructions(frame.f_code) if step.offset > frame.f_lasti]
    return "LOAD_ASSERTION_ERROR" in following[:2] or "LOAD_COMMON_CONSTANT" in following[:2]
