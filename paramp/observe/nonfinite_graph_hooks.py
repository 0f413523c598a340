"""Hooks on the nodes of autograd's graph, which find where a backward makes values that are not finite."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from ..base.torch_internals import expect
from ..scaling.overflow_report import flaw
from .nonfinite_sightings import Position, Sightings, StagePass

expect("torch._C._autograd")

PASSING = ("ToCopyBackward0", "TBackward0", "TransposeBackward0", "ViewBackward0", "UnsafeViewBackward0")
"""Names of autograd nodes that may lie between a parameter and its use: casts and views."""
ACCUMULATE = "torch::autograd::AccumulateGrad"
COLLECTIVES = (
    *("Redistribute", "FromTorchTensor", "AllReduce", "AllGather", "ReduceScatter", "AllToAll", "ExchangeRows"),
    *("OfQueries", "OfHeads"),  # attention over the context axis
)
"""Substrings of the names of nodes whose gradients may come from other ranks."""


class GraphHooks:
    """Hooks on the nodes of autograd's graph.

    A hook sees the gradients that enter and leave its node (local tensors of DTensors). A node belongs to the innermost
    module that ran when the node was created. autograd numbers nodes in the order of creation (``Node._sequence_nr``),
    so recording the number where each module begins and ends is enough. This holds for every schedule, for a split
    backward, for tied weights and for activation checkpointing.
    """

    def __init__(self, names: Mapping[int, str], seen: Sightings) -> None:
        self._names = names  # parameter names by id()
        self._seen = seen
        self._numbers: list[int] = []  # first sequence number of each module run
        self._modules: list[str] = []  # the module of each entry of _numbers

    def begin(self, module: str) -> None:
        """Assign the nodes that autograd creates from now on to ``module``."""
        self._numbers.append(torch._C._autograd._get_sequence_nr())
        self._modules.append(module)

    @property
    def start(self) -> Position:
        """A position in the backward before all nodes."""
        return -len(self._numbers), 0, 0

    def follow(self, outputs: Iterable[Any], at: StagePass) -> None:
        """Register a hook on each node that ``outputs`` depend on."""
        nodes = [leaf.grad_fn for leaf in outputs if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None]
        known = set(nodes)
        while nodes:
            node = nodes.pop()
            node.register_hook(self._hook(node, at))
            for next_, _ in node.next_functions:
                if next_ is not None and next_ not in known and next_.name() != ACCUMULATE:
                    known.add(next_)
                    nodes.append(next_)

    def _hook(self, node: Any, at: StagePass) -> Callable[[Any, Any], None]:
        """The hook of ``node``, called with the gradients that leave and that enter it; no cycle to the node."""
        number, operation = node._sequence_nr(), node.name()
        index = bisect.bisect_right(self._numbers, number) - 1
        module, seen = self._modules[index], self._seen
        # Values of tensor ranks are ordered by position. Ranks run the same modules, so module indices compare. Nodes
        # in a module may differ between ranks; nodes of collectives come last, to blame the rank that computed a value.
        position = (-index, any(name in operation for name in COLLECTIVES), self._numbers[index] - number)
        parameters = [self._parameter_behind(next_) for next_, _ in node.next_functions]

        def check(gradients: Sequence[torch.Tensor | None], received: Sequence[torch.Tensor | None]) -> None:
            if seen.has_backward(at):
                return
            bad = [index for index, gradient in enumerate(gradients) if flaw(gradient)]
            entered = next((gradient for gradient in received if flaw(gradient)), None)
            value = entered if entered is not None else gradients[bad[0]] if bad else None
            if value is None:
                return
            # If an activation's gradient is bad too, the operation is to blame, not a single weight's gradient.
            only = entered is None and all(parameters[index] is not None for index in bad)
            parameter = parameters[bad[0]] if only else None
            details = {"parameter": parameter, "operation": operation}
            seen.add("backward", module, value, at, position, received=entered is not None, **details)

        return check

    def _parameter_behind(self, node: Any) -> str | None:
        """The name of the parameter whose gradient goes to ``node``; None for an activation."""
        while node is not None and node.name() in PASSING:
            node = node.next_functions[0][0]
        return None if node is None or node.name() != ACCUMULATE else self._names.get(id(node.variable))
