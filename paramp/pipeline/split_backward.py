"""A stage's backward in two halves, for schedules that run them separately (zero bubble: Qi et al. 2023).

The first half computes the gradients of the inputs, for which the stage before waits; the second those of the weights::

    inputs ◄─── node ◄─── node ◄─── outputs    the way: nodes of the autograd graph that the first half runs
                 │         │           │
                 ▼         ▼           ▼
              weights   weights     weights    the second half starts at nodes of the way, and at outputs beside it

A node of the way runs in both halves, for one kind of gradients each; the gradients that it received are kept between.
torch's own halves (``stage_backward_input``, ``stage_backward_weight``) do not start at outputs beside the way. So they
silently omit weights that affect an output which no input affects: all weights of a stage after a frozen stage, and
tables that are passed to later stages.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

Gradients: TypeAlias = tuple[torch.Tensor | None, ...]
BESIDE = None
"""In the starts of a backward, stands for the outputs beside the way."""


@dataclass
class _Group:
    """Weights whose gradients are computed together, because they have a common start."""

    weights: dict[torch.Tensor, None]  # as an ordered set
    starts: dict[Node | None, None]


class SplitBackward:
    """The backward of one microbatch through a stage: :meth:`inputs` is the first half, :meth:`weights` the second.

    Args:
        outputs: the stage's outputs, or its loss.
        gradients: of ``outputs``. None: ones.
        inputs: the stage's inputs; only leaf tensors that require a gradient get one.
    """

    def __init__(
        self, outputs: Iterable[torch.Tensor], gradients: Sequence[torch.Tensor | None] | None, inputs: Sequence[Any]
    ) -> None:
        self._inputs = inputs
        outputs = list(outputs)
        gradients = [torch.ones_like(output) for output in outputs] if gradients is None else gradients
        pairs = zip(outputs, gradients, strict=True)
        # The edges keep the graph alive for the second half; nodes of Python functions would not.
        self._roots = [(get_gradient_edge(output), gradient) for output, gradient in pairs if output.requires_grad]
        self._received: dict[Node, Gradients] = {}
        users = _users(edge.node for edge, _ in self._roots)
        leaves = {_variable(node): node for node in users if node.name() == "torch::autograd::AccumulateGrad"}
        self._wanted = [value for value in inputs if isinstance(value, torch.Tensor) and value in leaves]
        self._way = _closure((leaves.pop(value) for value in self._wanted), users)
        self._groups = self._grouped(leaves, users)

    def _grouped(self, leaves: dict[torch.Tensor, Node], users: dict[Node, list[Node]]) -> list[_Group]:
        beside = _users(edge.node for edge, _ in self._roots if edge.node not in self._way)
        group_of: dict[Node | None, _Group] = {}
        for weight, node in leaves.items():
            starts = self._starts(node, users) if self._way else {}
            if node in beside:
                starts[BESIDE] = None
            group = _Group({weight: None}, starts)
            for other in [group_of[start] for start in starts if start in group_of]:
                group.weights |= other.weights
                group.starts |= other.starts
            group_of |= dict.fromkeys(group.starts, group)
        return list({id(group): group for group in group_of.values()}.values())

    def _starts(self, node: Node, users: dict[Node, list[Node]]) -> dict[Node | None, None]:
        """The nodes of the way that pass a gradient to ``node`` through nodes beside the way."""
        starts: dict[Node | None, None] = {}
        seen, todo = {node}, [node]
        while todo:
            for user in users[todo.pop()]:
                if user in self._way:
                    starts[user] = None
                elif user not in seen:
                    seen.add(user)
                    todo.append(user)
        return starts

    def inputs(self) -> Gradients:
        """The gradients of the inputs; None for an input without one."""
        starts = [start for group in self._groups for start in group.starts if start is not BESIDE]
        gradient_of: dict[torch.Tensor, torch.Tensor | None] = {}
        with ExitStack() as hooks:
            for start in starts:
                hooks.enter_context(start.register_prehook(partial(self._received.__setitem__, start)))
            if self._wanted:
                edges, starting = zip(*self._roots, strict=True)
                gradients = torch.autograd.grad(edges, self._wanted, starting, retain_graph=True, allow_unused=True)
                gradient_of = dict(zip(self._wanted, gradients, strict=True))
        return tuple(gradient_of.get(value) if isinstance(value, torch.Tensor) else None for value in self._inputs)

    def weights(self) -> None:
        """Accumulate the gradients of the weights in their ``.grad``, with hooks, as a full backward does."""
        for group in self._groups:
            pairs = [pair for start in group.starts for pair in self._starting_gradients(start)]
            with ExitStack() as hooks:
                # If this run also reaches one start from another, that uses the gradients recorded in the first half.
                for start in group.starts:
                    if start in self._received:
                        hooks.enter_context(start.register_prehook(partial(_instead, self._received[start])))
                if pairs:
                    edges, starting = zip(*pairs, strict=True)
                    torch.autograd.backward(edges, starting, retain_graph=True, inputs=list(group.weights))

    def _starting_gradients(self, start: Node | None) -> Iterator[tuple[GradientEdge, torch.Tensor | None]]:
        if start is BESIDE:
            yield from (root for root in self._roots if root[0].node not in self._way)
        else:
            for index, gradient in enumerate(self._received.get(start, ())):
                if gradient is not None:
                    yield GradientEdge(start, index), gradient


def _users(roots: Iterable[Node]) -> dict[Node, list[Node]]:
    """For each node of the graph of ``roots``, the nodes that pass it a gradient."""
    users: dict[Node, list[Node]] = {root: [] for root in roots}
    todo = list(users)
    while todo:
        node = todo.pop()
        for used, _ in node.next_functions:
            if used is not None:
                if used not in users:
                    users[used] = []
                    todo.append(used)
                users[used].append(node)
    return users


def _closure(nodes: Iterable[Node], users: dict[Node, list[Node]]) -> set[Node]:
    """``nodes``, and all nodes that pass them a gradient, directly or through others."""
    closure = set(nodes)
    todo = list(closure)
    while todo:
        fresh = {user for user in users[todo.pop()] if user not in closure}
        closure |= fresh
        todo += fresh
    return closure


def _variable(node: Any) -> torch.Tensor:
    variable: torch.Tensor = node.variable
    return variable


def _instead(gradients: Gradients, _: Gradients) -> Gradients:
    return gradients
