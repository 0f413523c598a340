"""What one rank computes in a batch, module by module, and what its first step's gradient was.

:class:`ActivationRecorder` sits among an engine's observers, which tell it which microbatch a forward belongs to, and hooks the
modules. :func:`first_gradient` reads the whole model's gradient off an optimizer that keeps it.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.utils._pytree import tree_leaves

from ...base.dtensor import local
from ...base.module_surgery import PassThrough
from ...engine.engine import Engine

__all__ = ["ActivationRecord", "ActivationRecorder", "first_gradient"]

BUDGET = 2**30
"""Bytes of outputs from which on no further microbatch is noted; the first one is in any case."""


@dataclass(frozen=True)
class ActivationRecord:
    """What one call of a module returned."""

    module: str
    """Its first name in the whole model."""
    microbatch: int
    call: int
    """Which call of the module in this microbatch, from 0."""
    tensors: list[torch.Tensor]
    """This rank's part of the floating-point tensors in its output, on the CPU."""


class ActivationRecorder:
    """Notes what the modules of an engine return, in the forwards of :meth:`~paramp.Engine.forward_backward`.

    Attributes:
        notes: in the order in which the calls ended.
        modules: every name of every module that this rank has.
        packed: in how many parts the outputs of layers lie side by side, each of which is shared out
            (:class:`paramp.parallel.tensor_styles.PackedColwise`).
        random_in: the first module after whose call torch's random state was another than at the beginning of the
            forward; None if there is none.
    """

    def __init__(self, engine: Engine) -> None:
        self.notes: list[ActivationRecord] = []
        own = [(name, module) for name, module in engine.module.named_modules() if not isinstance(module, PassThrough)]
        every = engine.module.named_modules(remove_duplicate=False)
        self.modules = [name for name, module in every if not isinstance(module, PassThrough)]
        self.packed = sorted({parts for _, module in own if (parts := _packed_parts(module)) > 1})
        self.random_in: str | None = None
        self._device = engine.context.device
        self._observers = engine.observers
        self._microbatch: int | None = None
        self._calls: Counter[str] = Counter()
        self._random: list[torch.Tensor] | None = None
        self._bytes = 0
        self._hooks = [module.register_forward_hook(functools.partial(self._note, name)) for name, module in own]
        self._hooks.append(engine.module.register_forward_pre_hook(self._begin))
        self._observers.append(self)

    def close(self) -> None:
        """ActivationRecord nothing any more."""
        self._observers.remove(self)
        for hook in self._hooks:
            hook.remove()

    def begin_call(self) -> None:
        """A batch begins (:class:`paramp.base.spans.Observer`)."""

    @contextmanager
    def span(self, kind: str, stage: int | None = None, microbatch: int | None = None) -> Iterator[None]:
        """What runs inside is one operation on one microbatch."""
        if kind != "forward" or (microbatch and self._bytes > BUDGET):
            yield
            return
        self._microbatch = microbatch
        self._calls.clear()
        try:
            yield
        finally:
            self._microbatch = self._random = None

    def _begin(self, _module: nn.Module, _inputs: Any) -> None:
        self._random = self._random_state()

    def _note(self, name: str, _module: nn.Module, _inputs: Any, output: Any) -> None:
        if self._microbatch is None:
            return
        if self._random is not None and self.random_in is None and self._has_drawn(self._random):
            self.random_in = name
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
        copies = [local(tensor).detach().to("cpu", copy=True) for tensor in tensors]
        self._bytes += sum(copy.nbytes for copy in copies)
        self.notes.append(ActivationRecord(name, self._microbatch, self._calls[name], copies))
        self._calls[name] += 1

    def _random_state(self) -> list[torch.Tensor]:
        states = [torch.get_rng_state()]
        return [*states, torch.cuda.get_rng_state(self._device)] if self._device.type == "cuda" else states

    def _has_drawn(self, before: list[torch.Tensor]) -> bool:
        return not all(torch.equal(old, new) for old, new in zip(before, self._random_state(), strict=True))


def _packed_parts(module: nn.Module) -> int:
    """How many parts the weight of ``module`` has that are shared out each: a dim more than the layer's own two."""
    weight: torch.Tensor | None = module._parameters.get("weight")
    linear = isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
    if not linear or not isinstance(weight, DTensor) or weight.ndim != 3:
        return 1
    placement = weight.placements[0]
    return weight.shape[placement.dim - 1] if isinstance(placement, Shard) else 1


@torch.no_grad()
def first_gradient(engine: Engine) -> dict[str, torch.Tensor]:
    """The gradient of the first step, as :meth:`~paramp.Engine.full_state_dict` gives weights: whole and unscaled.

    Right after that step it is the momentum of an SGD that has one. It stands in the place of the weights for a moment,
    so that it is put together from shards, stages and data ranks as they are. Every rank has to call it.
    """
    optimizer = engine.optimizer
    stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    weights = [parameter.detach().clone() for parameter in stepped]
    for parameter in stepped:
        parameter.copy_(optimizer.state[parameter]["momentum_buffer"])
    engine._weights.gather_weights()
    gradient = engine.full_state_dict()
    for parameter, weight in zip(stepped, weights, strict=True):
        parameter.copy_(weight)
    engine._weights.gather_weights()
    return gradient
