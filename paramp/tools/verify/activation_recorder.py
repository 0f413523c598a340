"""Recording the output of every module on one rank, and the gradient of the first step.

:class:`ActivationRecorder` hooks the modules, and is an observer of the engine, which passes it each forward's
microbatch. :func:`first_gradient` takes the whole model's gradient from the optimizer's momentum.
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
from torch.utils._pytree import tree_leaves

from ...base.dtensor import is_dtensor, local
from ...base.module_surgery import PassThrough
from ...engine.engine import Engine

BUDGET = 2**30
"""Bytes of recorded outputs beyond which only the first microbatch is recorded."""


@dataclass(frozen=True)
class ActivationRecord:
    """The output of one call of a module."""

    module: str
    """Its first name in the whole model."""
    microbatch: int
    call: int
    """The index of the call among those of the module in this microbatch."""
    tensors: list[torch.Tensor]
    """The local parts of the floating-point tensors in it, on the CPU."""


class ActivationRecorder:
    """Records the outputs of an engine's modules, in the forwards of :meth:`~paramp.Engine.forward_backward`.

    A context manager, and an :class:`~paramp.base.spans.Observer` of the engine inside.

    Attributes:
        records: in the order in which the calls ended.
        modules: every name of every module of this rank.
        packed: the numbers of blocks side by side in outputs of layers, each of which is sharded
            (:class:`paramp.parallel.tensor_styles.PackedColwise`).
        random_in: the first module that drew random numbers, by torch's random state after its call; None if none did.
    """

    def __init__(self, engine: Engine) -> None:
        self.records: list[ActivationRecord] = []
        own = [(name, module) for name, module in engine.module.named_modules() if not isinstance(module, PassThrough)]
        every = engine.module.named_modules(remove_duplicate=False)
        self.modules = [name for name, module in every if not isinstance(module, PassThrough)]
        self.packed = sorted({parts for _, module in own if (parts := _num_packed(module)) > 1})
        self.random_in: str | None = None
        self._device = engine.context.device
        self._observers = engine.observers
        self._microbatch: int | None = None
        self._calls: Counter[str] = Counter()
        self._random: list[torch.Tensor] | None = None
        self._bytes = 0
        self._hooks = [module.register_forward_hook(functools.partial(self._record, name)) for name, module in own]
        self._hooks.append(engine.module.register_forward_pre_hook(self._begin))
        self._observers.append(self)

    def __enter__(self) -> ActivationRecorder:
        return self

    def __exit__(self, *_: object) -> None:
        self._observers.remove(self)
        for hook in self._hooks:
            hook.remove()

    def begin_call(self) -> None:
        """A call of ``forward_backward`` begins."""

    @contextmanager
    def span(self, kind: str, stage: int | None = None, microbatch: int | None = None) -> Iterator[None]:
        """Record what runs inside if it is a forward, of one microbatch."""
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

    def _record(self, name: str, _module: nn.Module, _inputs: Any, output: Any) -> None:
        if self._microbatch is None:
            return
        if self._random is not None and self.random_in is None and self._has_drawn(self._random):
            self.random_in = name
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
        copies = [local(tensor).detach().to("cpu", copy=True) for tensor in tensors]
        self._bytes += sum(copy.nbytes for copy in copies)
        self.records.append(ActivationRecord(name, self._microbatch, self._calls[name], copies))
        self._calls[name] += 1

    def _random_state(self) -> list[torch.Tensor]:
        states = [torch.get_rng_state()]
        return [*states, torch.cuda.get_rng_state(self._device)] if self._device.type == "cuda" else states

    def _has_drawn(self, before: list[torch.Tensor]) -> bool:
        return not all(torch.equal(old, new) for old, new in zip(before, self._random_state(), strict=True))


def _num_packed(module: nn.Module) -> int:
    """The number of blocks in the weight of ``module`` that are sharded each; they have a dim of their own."""
    weight: torch.Tensor | None = module._parameters.get("weight")
    linear = isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
    if not linear or weight is None or not is_dtensor(weight) or weight.ndim != 3:
        return 1
    from torch.distributed.tensor import Shard

    placement = weight.placements[0]
    return weight.shape[placement.dim - 1] if isinstance(placement, Shard) else 1


@torch.no_grad()
def first_gradient(engine: Engine) -> dict[str, torch.Tensor]:
    """The unscaled gradient of the first step by parameter name, in the form of :meth:`~paramp.Engine.full_state_dict`.

    Right after that step it equals SGD's momentum buffer. That is written over the weights for a moment, so that it is
    gathered from shards, stages and data ranks as they are. A collective of the world.
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
