"""Pipeline stages of a model that is not sequential: its forward is traced, and the graph partitioned.

``torch.fx`` records the model's forward. Modules are calls in the graph, so that plans, precision and hooks apply to
them unchanged; only the code between them, the glue, is traced::

    x ── down1 ── down2 ──── middle ── up2 ── cat ── up1 ──► output
           │         └───────────────────┘     │
           └───────────────────────────────────┘
                             ▲ a stage ends after middle: middle's output and both skips are sent

A stage is a range of the graph's calls. A value that a later stage needs is sent through each stage between; keyword
inputs are not sent, because every rank of a model group has the batch. Parameters that the glue uses directly are on
every stage that uses them, and are tied. The forward is traced for each set of inputs that it is called with.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import fx, nn

from ..base.dtensor import refusing_changes
from ..base.errors import ConfigError
from ..base.module_surgery import keep_only, names_outside, replace_forward
from ..base.state_over_trials import PLAIN
from ..base.trees import leaves, tensors
from ..precision import norms
from .attributes_of_trace import CONSTANT
from .batch_key import CONSTANTS
from .fx_tracing import IS_MADE, READS, Call, call_of, check_mode, key_of, likely_calls, skeleton, trace
from .partition import check_names, is_sequential, multiplied_parameters, plan_stages
from .traced_values import QUESTIONS, changes_of, shown_kind

MAX_CALLS = 16
"""The number of calls with different inputs whose graphs are cached."""
UNBALANCED = 1.5
"""Modules are opened while the heaviest stage has more than this multiple of the average number of parameters."""


class TracedPartition:
    """The partition of any model, between any two of the modules that its forward calls.

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
        self._skeleton = skeleton(model)
        self._traced = self._traces(self.opened)
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
        return [(name, self._modules[name]) for name in _modules_called(self._traced)]

    def _traces(self, opened: frozenset[str]) -> list[dict[bool, fx.Graph]]:
        """The graphs of each likely call that can be traced; a ConfigError if none can."""
        traced, failed = [], []
        for call in likely_calls(self._skeleton):
            try:
                traced.append(trace(self._skeleton, opened, call))
            except ConfigError as error:
                failed.append(error)
        if not traced:
            raise failed[-1]
        return traced

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
                self._traced = self._traces(self.opened | {name})
            except ConfigError:
                continue  # it stays closed
            self.opened |= {name}

    def stages(self, plan: Sequence[Sequence[str]]) -> list[nn.Module]:
        graphs = _Graphs(self._skeleton, self.opened, plan)
        names_of: dict[nn.Module, list[str]] = {}
        for name, module in self._modules.items():
            names_of.setdefault(module, []).append(name)
        kept: list[set[str]] = [{*names} for names in plan]
        for traced in self._traced:
            for index, used in enumerate(graphs.names_used(traced)):
                kept[index] |= used
        for names in kept:
            names.update([alias for name in names & self._modules.keys() for alias in names_of[self._modules[name]]])
        kept[0].update(names_outside(self._model, set().union(*kept)))  # parameters that no stage uses are kept too
        return [_stage_module(self._model, names, graphs, index) for index, names in enumerate(kept)]


def _modules_called(traced: Sequence[Mapping[bool, fx.Graph]]) -> list[str]:
    """The modules that the forward calls in training, in order; those of later graphs between those of the first."""
    merged: list[str] = []
    for graphs in traced:
        position = 0
        for name in dict.fromkeys(str(node.target) for node in graphs[True].nodes if node.op == "call_module"):
            if name not in merged:
                merged.insert(position, name)
            position = merged.index(name) + 1
    return merged


@dataclass
class _StageGraph:
    graph: fx.Graph
    keywords: list[str]
    """The paths to the keyword inputs' tensors that the placeholders after those for what it receives are."""
    shared: list[str] = field(default_factory=list)
    """Those of them that later stages use too."""
    attributes: list[str] = field(default_factory=list)
    """The names of the model's tensors that the code between modules uses, here and on other stages."""
    reads: dict[str, str] = field(default_factory=dict)
    """The attributes of modules that the trace has read once for all runs, with the lines."""
    interpreter: _Interpreter | None = None
    """Runs the graph; made at the first call, because a plan may change modules before."""


class _Graphs:
    """The graphs of every stage, for each call that the model is made with."""

    def __init__(self, model: nn.Module, opened: frozenset[str], plan: Sequence[Sequence[str]]) -> None:
        self.model = model
        self.opened = opened
        self._stage_of = {name: stage for stage, names in enumerate(plan) for name in names}
        self.num_stages = len(plan)
        self._cache: dict[Any, dict[bool, list[_StageGraph]]] = {}

    def of(self, call: Call) -> dict[bool, list[_StageGraph]]:
        """The graphs of all stages in both modes."""
        key = key_of(call)
        if key not in self._cache:
            _check_constants(call)
            if len(self._cache) == MAX_CALLS:
                self._cache.pop(next(iter(self._cache)))
            self._cache[key] = self._partitioned(trace(self.model, self.opened, call))
        return self._cache[key]

    def _partitioned(self, graphs: Mapping[bool, fx.Graph]) -> dict[bool, list[_StageGraph]]:
        """``graphs`` cut into those of each stage; a ConfigError if stages would have different values of a tensor."""
        _check_changes(graphs.values(), self._stage_of, self.num_stages)
        parts = {mode: _partition_graph(graph, self._stage_of, self.num_stages) for mode, graph in graphs.items()}
        used = [{name for one in modes for name in one.attributes} for modes in zip(*parts.values(), strict=True)]
        for mode, stages in parts.items():
            reads = graphs[mode].output_node().meta[READS]
            for index, one in enumerate(stages):
                others = set().union(*used[:index], *used[index + 1 :])
                # A tensor that the graph gets on the stage of its module is what the module has just set.
                one.reads = {name: line for name, line in reads.items() if name in others or name not in used[index]}
                one.attributes = [name for name in one.attributes if name in others]
        return parts

    def names_used(self, graphs: Mapping[bool, fx.Graph]) -> list[set[str]]:
        """The modules that each stage calls in ``graphs``, and what the code between them uses.

        These graphs are not cached: what the trace of a batch makes of numbers has the default dtype of its forward.
        """
        stages = zip(*self._partitioned(graphs).values(), strict=True)
        return [
            {str(node.target) for one in modes for node in one.graph.nodes if node.op in ("get_attr", "call_module")}
            for modes in stages
        ]


def _may_open(module: nn.Module) -> bool:
    return is_sequential(module) or not type(module).__module__.startswith(("torch.nn.", norms.__name__))


def _stage_module(model: nn.Module, kept: set[str], graphs: _Graphs, index: int) -> nn.Module:
    """A stage's module: called with the model's inputs on the first stage, with what it received and keywords later."""

    def forward(part: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        call, values = (call_of(args, kwargs), tensors(args)) if index == 0 else args[0]
        for name in opened_names:
            check_mode(name, part.get_submodule(name), part)
        stage_graph = graphs.of(call)[part.training][index]
        if stage_graph.interpreter is None or stage_graph.interpreter.module is not part:
            _check_names(part, stage_graph.graph, graphs.model, call)
            stage_graph.interpreter = _Interpreter(part, graph=stage_graph.graph)
        try:
            inputs = dict(leaves(kwargs)) if stage_graph.keywords else {}
            shared = {f"inputs{path}": inputs[path] for path in stage_graph.shared}
            attributes = {name: operator.attrgetter(name)(part) for name in stage_graph.attributes}
            shared |= {f"parallel.pipeline.split: {name!r}": value for name, value in attributes.items()}
            others = [one for one in shared.items() if not isinstance(one[1], nn.Parameter)]  # FSDP2 writes into these
            made = stage_graph.interpreter.made
            with (
                _refusing_other_values(stage_graph.interpreter.tables(stage_graph.reads)),
                refusing_changes(others, changed),
                refusing_changes(made, changed_constant),
            ):
                output = stage_graph.interpreter.run(*values, *(inputs[path] for path in stage_graph.keywords))
        finally:
            stage_graph.interpreter.env = {}
        return output if is_last else (call, output)

    def changed_constant(line: str) -> ConfigError:
        return ConfigError(
            f"parallel.pipeline.split: a tensor that the code between modules makes of numbers alone is changed in "
            f"place {line}, but tracing has made it once for all batches; change a copy, or make it in a submodule"
        )

    def changed(name: str) -> ConfigError:
        return ConfigError(
            f"{name}: stage {index} of the pipeline changes it in place, and other stages use it, each of which has a "
            "tensor of its own; change a copy, or split so that one stage has all that uses it"
        )

    is_last = index == graphs.num_stages - 1
    part = replace_forward(keep_only(model, kept), forward)
    opened_names = [name for name, _ in part.named_modules(remove_duplicate=False) if name in graphs.opened]
    return part


class _Interpreter(fx.Interpreter):
    """Calls modules and functions with dicts and lists in place of those of a graph, which cannot be changed.

    An error in the code between modules names its line in the model's forward, not the node of the graph.
    """

    def __init__(self, module: nn.Module, graph: fx.Graph) -> None:
        super().__init__(module, graph=graph)
        self.extra_traceback = False
        nodes = [node for node in graph.nodes if node.meta.get(IS_MADE)]
        self.made = [(node.meta.get("line", ""), getattr(module, str(node.target))) for node in nodes]
        """The tensors that the trace has made of numbers, with the lines that use them."""
        self._tables: list[Read] | None = None

    def tables(self, reads: Mapping[str, str]) -> list[Read]:
        """Where the attributes ``reads`` of the modules of this stage are."""
        if self._tables is None:  # run() caches the submodules, too
            parts = [(name, line, name.rpartition(".")) for name, line in reads.items()]
            found = [(name, line, owner, attribute) for name, line, (owner, _, attribute) in parts]
            self._tables = [
                (name, line, vars(self.module.get_submodule(owner)), attribute)
                for name, line, owner, attribute in found
                if _has(self.module, owner)
            ]
        return self._tables

    def run_node(self, n: fx.Node) -> Any:
        try:
            value = super().run_node(n)
        except Exception as error:
            if n.op in ("call_function", "call_method") and "line" in n.meta and error.args:
                error.args = (f"{error.args[0]} {n.meta['line']}", *error.args[1:])
            raise
        for question in n.meta.get(QUESTIONS, ()):
            if isinstance(value, question.kinds) != question.answer:
                raise ConfigError(
                    f"parallel.pipeline.split: the code between modules asks for the class of a {shown_kind(value)} "
                    f"{question.line}, which tracing took for a {question.told}; ask in a submodule, or split "
                    "around this code"
                )
        return value

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> Any:
        return _plain(super().fetch_args_kwargs_from_env(n))


def _plain(value: Any) -> Any:
    if isinstance(value, fx.immutable_collections.immutable_dict):
        return {name: _plain(part) for name, part in value.items()}
    if isinstance(value, fx.immutable_collections.immutable_list):
        return [_plain(part) for part in value]
    if not isinstance(value, tuple) or isinstance(value, torch.Size):
        return value
    parts = map(_plain, value)
    return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)


def _check_constants(call: Call) -> None:
    """Raise a ConfigError for an input that is neither a tensor nor a constant that its ``repr`` tells from others."""
    args, kwargs = call
    for path, value in (*leaves(args, "inputs"), *leaves(dict(kwargs), "inputs")):
        if not isinstance(value, CONSTANTS):
            raise ConfigError(
                f"{path}: got {type(value).__name__}, expected tensors, numbers, strings, None, or tuples, lists, "
                "mappings and dataclasses of them, because the trace for a pipeline would keep what others hold; "
                "leave it out, or make it an attribute of a module that is not split"
            )


def _check_names(part: nn.Module, graph: fx.Graph, model: nn.Module, call: Call) -> None:
    """Check that the stage ``part`` has what ``graph`` uses; give it the constants that the trace has made."""
    for node in graph.nodes:
        name = str(node.target)
        if node.op == "get_attr" and name.startswith(CONSTANT):
            setattr(part, name, getattr(model, name))
        elif node.op in ("get_attr", "call_module") and not _has(part, name):
            inputs = ", ".join([f"{len(call[0])} positional", *(name for name, _ in call[1])])
            raise ConfigError(
                f"parallel.pipeline.split: with these inputs ({inputs}) a stage uses {name!r} of "
                f"{type(model).__name__}, which it lacks: stages have what the forward uses with the inputs without a "
                "default, and with those that are None by default too; give a tensor the default None, make a flag an "
                "attribute of the model, or split elsewhere"
            )


Read: TypeAlias = tuple[str, str, dict[str, Any], str]
"""The name of an attribute, the line that reads it, its module's attributes, and its name there."""
IMMUTABLE = frozenset(PLAIN)


@contextmanager
def _refusing_other_values(reads: Sequence[Read]) -> Iterator[None]:
    """A context whose exit raises a ConfigError if an attribute of ``reads`` has another value than before."""
    before = [table.get(attribute) for _, _, table, attribute in reads]
    # Plain values, most of all, are the same object or not; others may be changed in place.
    parts = [None if type(value) in IMMUTABLE else dict(leaves(value)) for value in before]
    yield
    for (name, line, table, attribute), value, its in zip(reads, before, parts, strict=True):
        now = table.get(attribute)
        if its is None and now is value:
            continue
        if not _is_same(dict(leaves(now)), {"": value} if its is None else its):
            raise ConfigError(
                f"parallel.pipeline.split: the code between modules reads {name!r} {line}, which the forward of "
                f"{name.rpartition('.')[0]!r} sets, and tracing has read once; return it from that forward"
            )


def _is_same(now: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    """Whether each leaf is the object that it was, or an equal number or string."""
    return now.keys() == before.keys() and all(
        one is before[path] or (isinstance(one, PLAIN) and type(one) is type(before[path]) and one == before[path])
        for path, one in now.items()
    )


def _has(module: nn.Module, name: str) -> bool:
    try:
        operator.attrgetter(name)(module)
    except AttributeError:
        return False
    return True


def _stage_at(graph: fx.Graph, stage_of: Mapping[str, int], num_stages: int) -> dict[fx.Node, int]:
    """The stage of each node of ``graph`` that is not local, in their order."""
    reached = 0
    stage_at: dict[fx.Node, int] = {}
    for node in graph.nodes:
        if node.op == "call_module":
            reached = max(reached, stage_of.get(str(node.target), 0))
        if not _is_local(node):
            stage_at[node] = num_stages - 1 if node.op == "output" else reached
    return stage_at


def _partition_graph(graph: fx.Graph, stage_of: Mapping[str, int], num_stages: int) -> list[_StageGraph]:
    """``graph`` as one graph for each stage, whose input is the output of the one before, a tuple of values."""
    stage_at = _stage_at(graph, stage_of, num_stages)
    nodes = list(stage_at)
    last_use = {node: max([stage_at[node], *(stage_at[user] for user in node.users)]) for node in nodes}
    stage_graphs = []
    for stage in range(num_stages):
        received = [node for node in nodes if stage_at[node] < stage <= last_use[node]]
        sent = [node for node in nodes if stage_at[node] <= stage < last_use[node]]
        calls = [node for node in nodes if stage_at[node] == stage]
        stage_graphs.append(_stage_graph(calls, received, sent if stage < num_stages - 1 else None))
    for stage, one in enumerate(stage_graphs):
        later = {path for other in stage_graphs[stage + 1 :] for path in other.keywords}
        one.shared = [path for path in one.keywords if path in later]
    return stage_graphs


def _check_changes(graphs: Iterable[fx.Graph], stage_of: Mapping[str, int], num_stages: int) -> None:
    """Raise a ConfigError for a tensor that one stage changes in place, and another has a copy of."""
    stages: dict[str, set[int]] = {}
    changed: dict[str, fx.Node] = {}
    for graph in graphs:
        stage_at = _stage_at(graph, stage_of, num_stages)
        for node in graph.nodes:
            if _is_local(node):
                name = str(node.target) if node.op == "get_attr" else f"inputs{node.meta['keyword']}"
                changes = changes_of(node)
                at = {stage_at[user] for user in (*node.users, *changes)}
                if changes and node.op == "placeholder":  # what used it before had the right value
                    at = {stage for stage in at if stage >= min(stage_at[change] for change in changes)}
                stages.setdefault(name, set()).update(at)
                changed.update((name, change) for change in changes[:1])
    for name, change in changed.items():
        if len(stages[name]) > 1:
            raise ConfigError(
                f"parallel.pipeline.split: the code between modules changes {name!r} in place "
                f"{change.meta.get('line', '')}, and uses it on stages {' and '.join(map(str, sorted(stages[name])))}, "
                "each of which would have a value of its own; split so that one stage has all of this code, or use the "
                "result of the change, which is sent"
            )


def _is_local(node: fx.Node) -> bool:
    """Whether every stage has the value itself: attributes, and keyword inputs."""
    return node.op == "get_attr" or ("keyword" in node.meta and node.op == "placeholder")


def _stage_graph(calls: Sequence[fx.Node], received: Sequence[fx.Node], sent: Sequence[fx.Node] | None) -> _StageGraph:
    stage_graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {node: stage_graph.placeholder(node.name) for node in received}
    keywords: list[str] = []

    def copied(node: fx.Node) -> fx.Node:
        if node not in copies:
            assert _is_local(node)
            copies[node] = stage_graph.node_copy(node)
            if node.op == "placeholder":
                keywords.append(node.meta["keyword"])
        return copies[node]

    for node in calls:
        for argument in node.all_input_nodes:
            copied(argument)
        copies[node] = stage_graph.node_copy(node, copied)
    if sent is not None:
        stage_graph.output(tuple(copies[node] for node in sent))
    gets = [node for node in copies.values() if node.op == "get_attr" and not node.meta.get(IS_MADE)]
    return _StageGraph(stage_graph, keywords, attributes=[str(node.target) for node in gets])
