"""Hooks on the nodes of autograd's graph that look for non-finite gradients.

A hook sees the gradients that enter and leave its node, the local parts of DTensors. A node belongs to the innermost
module that ran when the node was made. autograd numbers its nodes in that order (``Node._sequence_nr``), so it is
enough to record the number where each module begins and ends. This holds for every schedule, for a split backward, for
tied weights and for activation checkpointing.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..optim.overflow_report import flaw
from .overflow_findings import Findings, StagePass

PASSING = ("ToCopyBackward0", "TBackward0", "TransposeBackward0", "ViewBackward0", "UnsafeViewBackward0")
"""autograd's names of the operations that may lie between a parameter and its use."""
ACCUMULATE = "torch::autograd::AccumulateGrad"
COLLECTIVES = ("Redistribute", "FromTorchTensor", "AllReduce", "AllGather", "ReduceScatter", "AllToAll")
"""Parts of the names of operations whose outputs may come from other ranks."""


@dataclass(frozen=True)
class _Node:
    """A node of autograd's graph, as known before its backward."""

    at: StagePass
    module: str
    operation: str
    position: tuple[int, int, int]
    parameters: Sequence[str | None]
    """For each of its outputs the parameter whose gradient it is; None for activations."""


class GraphHooks:
    """Hooks on the nodes of autograd's graph."""

    def __init__(self, names: Mapping[int, str], findings: Findings) -> None:
        self._names = names  # of parameters, by their id
        self._findings = findings
        self._numbers: list[int] = []  # sequence numbers from which on nodes belong to another module
        self._modules: list[str] = []  # these modules

    def begin(self, module: str) -> None:
        """Assign the nodes that autograd makes from here on to ``module``."""
        self._numbers.append(torch._C._autograd._get_sequence_nr())
        self._modules.append(module)

    @property
    def start(self) -> tuple[int, int, int]:
        """A position before those of all nodes."""
        return -len(self._numbers), 0, 0

    def follow(self, outputs: Iterable[Any], at: StagePass) -> None:
        """Put a hook on each node that ``outputs`` depend on."""
        nodes = [leaf.grad_fn for leaf in outputs if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None]
        seen = set(nodes)
        while nodes:
            node = nodes.pop()
            node.register_hook(functools.partial(self._after_node, self._describe(node, at)))  # must not hold the node
            for next_, _ in node.next_functions:
                if next_ is not None and next_ not in seen and next_.name() != ACCUMULATE:
                    seen.add(next_)
                    nodes.append(next_)

    def _describe(self, node: Any, at: StagePass) -> _Node:
        number, operation = node._sequence_nr(), node.name()
        index = bisect.bisect_right(self._numbers, number) - 1
        # Tensor ranks run the same modules, so their indices compare; nodes inside a module may differ between ranks.
        position = (-index, any(name in operation for name in COLLECTIVES), self._numbers[index] - number)
        parameters = [self._parameter_behind(next_) for next_, _ in node.next_functions]
        return _Node(at, self._modules[index], operation, position, parameters)

    def _parameter_behind(self, node: Any) -> str | None:
        """The name of the parameter whose gradient goes to ``node``; None if it is an activation's."""
        while node is not None and node.name() in PASSING:
            node = node.next_functions[0][0]
        return None if node is None or node.name() != ACCUMULATE else self._names.get(id(node.variable))

    def _after_node(
        self, node: _Node, gradients: Sequence[torch.Tensor | None], received: Sequence[torch.Tensor | None]
    ) -> None:
        """The hook itself: ``received`` are the gradients that enter the node, ``gradients`` those that leave it."""
        if self._findings.has(node.at, backward=True):
            return
        bad = [index for index, gradient in enumerate(gradients) if flaw(gradient)]
        entered = next((gradient for gradient in received if flaw(gradient)), None)
        value = entered if entered is not None else gradients[bad[0]] if bad else None
        if value is None:
            return
        only = {node.parameters[index] for index in bad}
        # A bad activation gradient beside it means that the operation failed as a whole.
        parameter = None if entered is not None or None in only else node.parameters[bad[0]]
        where = node.module, value, node.at, node.position
        self._findings.add(
            "backward", *where, received=entered is not None, parameter=parameter, operation=node.operation
        )
