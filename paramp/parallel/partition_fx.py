"""Pipeline stages of a model that is not sequential: its forward is traced, and the graph partitioned.

``torch.fx`` records the model's forward. Modules are calls in the graph, so that plans, precision and hooks apply to
them unchanged; only the code between them, the glue, is traced::

    x ── down1 ── down2 ──── middle ── up2 ── cat ── up1 ──► output
           │         └───────────────────┘     │
           └───────────────────────────────────┘
                             ▲ a stage ends after middle: middle's output and both skips are sent

A stage is a range of the graph's calls. A value that a later stage needs is sent through each stage between.
Parameters that the glue uses directly are on every stage that uses them, and are tied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx, nn

from ..base.errors import ConfigError
from ..base.module_surgery import keep_only, names_outside, with_forward
from ..precision import norms
from .partition import check_names, is_sequential, multiplied_parameters, plan_stages
from .tracing import check_mode, trace

UNBALANCED = 1.5
"""Modules are opened while the heaviest stage has more than this multiple of the average number of parameters."""


class TracedPartition:
    """The partition of any model with one input, between any two of the modules that its forward calls.

    A module that contains a name in ``split`` is opened: its forward is traced too. Without ``split``, modules that are
    too large for a stage are opened, except those of ``torch.nn`` and paramp's norms.
    """

    def __init__(self, model: nn.Module, num_stages: int, split: Sequence[str] | None) -> None:
        self._model = model
        self._modules = dict(model.named_modules(remove_duplicate=False))
        self.opened: frozenset[str] = frozenset()
        if split is not None:
            check_names(split, [name for name in self._modules if name])
            parts = [name.split(".") for name in split]
            self.opened = frozenset(".".join(names[:end]) for names in parts for end in range(1, len(names)))
        self._graphs = trace(model, self.opened)
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
            average = sum(weights.values()) / num_stages
            few = len(weights) < num_stages
            if not few:
                stages = plan_stages(self.units, num_stages)
                if max(sum(weights[name] for name in stage) for stage in stages) <= UNBALANCED * average:
                    return
            may_open = [name for name, unit in self.units if name not in closed and _may_open(unit)]
            heavy = [name for name in may_open if few or weights[name] > average / 2]
            if not heavy:
                return
            name = max(heavy, key=lambda name: weights[name])
            closed.add(name)
            try:
                graphs = trace(self._model, self.opened | {name})
            except ConfigError:
                continue  # it stays closed
            self._graphs, self.opened = graphs, self.opened | {name}

    def stages(self, plan: Sequence[Sequence[str]]) -> list[nn.Module]:
        stage_of = {name: stage for stage, names in enumerate(plan) for name in names}
        by_mode = {mode: _partition_graph(graph, stage_of, len(plan)) for mode, graph in self._graphs.items()}
        stage_graphs = [{mode: graphs[stage] for mode, graphs in by_mode.items()} for stage in range(len(plan))]
        names_of: dict[nn.Module, list[str]] = {}
        for name, module in self._modules.items():
            names_of.setdefault(module, []).append(name)
        kept: list[set[str]] = []
        for graphs in stage_graphs:
            used = [node for graph in graphs.values() for node in graph.nodes]
            called = [str(node.target) for node in used if node.op == "call_module"]
            got = [str(node.target) for node in used if node.op == "get_attr"]
            kept.append({*got, *(alias for name in called for alias in names_of[self._modules[name]])})
        kept[0].update(names_outside(self._model, set().union(*kept)))  # parameters that no stage uses are kept too
        parts = zip(kept, stage_graphs, strict=True)
        return [_stage_module(self._model, *part, index == 0, self.opened) for index, part in enumerate(parts)]


def _may_open(module: nn.Module) -> bool:
    return is_sequential(module) or not type(module).__module__.startswith(("torch.nn.", norms.__name__))


def _stage_module(
    model: nn.Module, kept: set[str], graphs: dict[bool, fx.Graph], is_first: bool, opened: frozenset[str]
) -> nn.Module:
    interpreters: dict[bool, fx.Interpreter] = {}

    def forward(received: Any) -> Any:
        mode = part.training
        for name, module in opened_modules:
            check_mode(name, module, part)
        if mode not in interpreters:  # at the first call: a plan may have changed modules
            interpreters[mode] = fx.Interpreter(part, graph=graphs[mode])
        values = (received,) if is_first else received
        try:
            return interpreters[mode].run(*values)
        finally:
            interpreters[mode].env = {}

    part = with_forward(keep_only(model, kept), forward)
    opened_modules = [(name, module) for name, module in part.named_modules(remove_duplicate=False) if name in opened]
    return part


def _partition_graph(graph: fx.Graph, stage_of: dict[str, int], num_stages: int) -> list[fx.Graph]:
    """``graph`` as ``num_stages`` graphs; the input of each is the output of the one before, a tuple of values."""
    nodes = [node for node in graph.nodes if node.op != "get_attr"]  # each graph reads attributes itself
    reached = 0
    stage_at: dict[fx.Node, int] = {}
    for node in nodes:
        if node.op == "call_module":
            reached = max(reached, stage_of.get(str(node.target), 0))
        stage_at[node] = num_stages - 1 if node.op == "output" else reached
    last_use = {node: max([stage_at[node], *(stage_at[user] for user in node.users)]) for node in nodes}
    stage_graphs = []
    for stage in range(num_stages):
        received = [node for node in nodes if stage_at[node] < stage <= last_use[node]]
        sent = [node for node in nodes if stage_at[node] <= stage < last_use[node]]
        own = [node for node in nodes if stage_at[node] == stage]
        stage_graphs.append(_stage_graph(own, received, sent if stage < num_stages - 1 else None))
    return stage_graphs


def _stage_graph(own: Sequence[fx.Node], received: Sequence[fx.Node], sent: Sequence[fx.Node] | None) -> fx.Graph:
    stage_graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {node: stage_graph.placeholder(node.name) for node in received}

    def copied(node: fx.Node) -> fx.Node:
        if node not in copies:
            assert node.op == "get_attr"
            copies[node] = stage_graph.node_copy(node)
        return copies[node]

    for node in own:
        for argument in node.all_input_nodes:
            copied(argument)
        copies[node] = stage_graph.node_copy(node, copied)
    if sent is not None:
        stage_graph.output(tuple(copies[node] for node in sent))
    return stage_graph
