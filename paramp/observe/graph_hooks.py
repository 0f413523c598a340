"""Hooks on the nodes of autograd's graph that look for non-finite gradients.

A hook sees the gradients that enter and leave its node (local tensors of DTensors). A node belongs to the innermost
module that ran when the node was created. autograd numbers nodes in the order of creation (``Node._sequence_nr``), so
recording the number where each module begins and ends is enough. This holds for every schedule, for a split backward,
for tied weights and for activation checkpointing.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..base.torch_internals import expect
from ..scaling.overflow_report import flaw
from .overflow_findings import Findings, StagePass

expect("torch._C._autograd")

PASSING = ("ToCopyBackward0", "TBackward0", "TransposeBackward0", "ViewBackward0", "UnsafeViewBackward0")
"""Names of autograd nodes that may lie between a parameter and its use: casts and views."""
ACCUMULATE = "torch::autograd::AccumulateGrad"
COLLECTIVES = ("Redistribute", "FromTorchTensor", "AllReduce", "AllGather", "ReduceScatter", "AllToAll")
"""Substrings of the names of nodes whose gradients may come from other ranks."""


@dataclass(frozen=True)
class _Node:
    """What is known of an autograd node before its backward."""

    at: StagePass
    module: str
    operation: str
    position: tuple[int, int, int]
    parameters: Sequence[str | None]
    """For each gradient that leaves the node, the name of its parameter; None for activations."""


class GraphHooks:
    """Hooks on the nodes of autograd's graph."""

    def __init__(self, names: Mapping[int, str], findings: Findings) -> None:
        self._names = names  # parameter names by id()
        self._findings = findings
        self._numbers: list[int] = []  # first sequence number of each module run
        self._modules: list[str] = []  # the module of each entry of _numbers

    def begin(self, module: str) -> None:
        """Assign the nodes that autograd creates from now on to ``module``."""
        self._numbers.append(torch._C._autograd._get_sequence_nr())
        self._modules.append(module)

    @property
    def start(self) -> tuple[int, int, int]:
        """A position in the backward before all nodes."""
        return -len(self._numbers), 0, 0

    def follow(self, outputs: Iterable[Any], at: StagePass) -> None:
        """Register a hook on each node that ``outputs`` depend on."""
        nodes = [leaf.grad_fn for leaf in outputs if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None]
        seen = set(nodes)
        while nodes:
            node = nodes.pop()
            node.register_hook(functools.partial(self._after_node, self._describe(node, at)))  # no cycle to the node
            for next_, _ in node.next_functions:
                if next_ is not None and next_ not in seen and next_.name() != ACCUMULATE:
                    seen.add(next_)
                    nodes.append(next_)

    def _describe(self, node: Any, at: StagePass) -> _Node:
        number, operation = node._sequence_nr(), node.name()
        index = bisect.bisect_right(self._numbers, number) - 1
        # Findings of tensor ranks are ordered by position. Ranks run the same modules, so module indices compare. Nodes
        # in a module may differ between ranks; nodes of collectives come last, to blame the rank that computed a value.
        position = (-index, any(name in operation for name in COLLECTIVES), self._numbers[index] - number)
        parameters = [self._parameter_behind(next_) for next_, _ in node.next_functions]
        return _Node(at, self._modules[index], operation, position, parameters)

    def _parameter_behind(self, node: Any) -> str | None:
        """The name of the parameter whose gradient goes to ``node``; None for an activation."""
        while node is not None and node.name() in PASSING:
            node = node.next_functions[0][0]
        return None if node is None or node.name() != ACCUMULATE else self._names.get(id(node.variable))

    def _after_node(
        self, node: _Node, gradients: Sequence[torch.Tensor | None], received: Sequence[torch.Tensor | None]
    ) -> None:
        """Autograd's hook: ``received`` are the gradients that enter the node, ``gradients`` those that leave it."""
        if self._findings.has(node.at, backward=True):
            return
        bad = [index for index, gradient in enumerate(gradients) if flaw(gradient)]
        entered = next((gradient for gradient in received if flaw(gradient)), None)
        value = entered if entered is not None else gradients[bad[0]] if bad else None
        if value is None:
            return
        only = {node.parameters[index] for index in bad}
        # If an activation's gradient is bad too, the operation is to blame, not a single weight's gradient.
        parameter = None if entered is not None or None in only else node.parameters[bad[0]]
        where = node.module, value, node.at, node.position
        self._findings.add(
            "backward", *where, received=entered is not None, parameter=parameter, operation=node.operation
        )
