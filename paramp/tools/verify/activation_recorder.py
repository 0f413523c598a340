"""The record of one rank of a run: module outputs, the gradient of the first step, weights and losses."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ...base.dtensor import is_dtensor, local
from ...base.module_surgery import PassThrough
from ...base.trees import tensors
from ...distributed.rng import random_states
from ...engine.engine import Engine

BUDGET = 2**30
"""Above this many bytes of recorded outputs, microbatches after the first are not recorded."""


@dataclass(eq=False)
class RankRecord:
    """The record of one rank; its attributes are written to a file."""

    batch_rank: int
    """The rank on the data axis."""
    tensor_rank: int
    """The rank on the tensor axis."""
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)
    batches: list[str] = field(default_factory=list)
    """A hash of each step's global batch."""
    microbatch_size: int = 0
    activations: list[dict[str, Any]] = field(default_factory=list)
    """The module outputs in the first step, in the order in which calls ended: ``module``, ``microbatch``, ``call``
    (index among the module's calls in this microbatch) and ``tensors`` (local tensors, floating point, on the CPU)."""
    modules: list[str] = field(default_factory=list)
    """The names of this rank's modules, with all names of shared ones."""
    packed: list[int] = field(default_factory=list)
    """The numbers of blocks (such as 3 for query, key and value) in layers that shard each block separately
    (:class:`paramp.parallel.tensor.linear.PackedColwise`)."""
    random_in: str | None = None
    """The first module whose forward changed torch's random state."""
    trained: list[str] = field(default_factory=list)
    """The names of this rank's trained parameters."""
    start: dict[str, torch.Tensor] = field(default_factory=dict)
    """The whole model's weights before the first step. ``gradient``: its gradient in the first step. ``after_first``,
    ``end``: its weights after the first and the last step. On pipeline rank 0 only, because all ranks have the same."""
    gradient: dict[str, torch.Tensor] = field(default_factory=dict)
    after_first: dict[str, torch.Tensor] = field(default_factory=dict)
    end: dict[str, torch.Tensor] = field(default_factory=dict)


class ActivationRecorder:
    """Records the outputs of an engine's modules in the forwards of :meth:`~paramp.Engine.forward_backward`.

    A context manager that registers forward hooks. It is also an :class:`~paramp.base.observer_spans.Observer` of the
    engine, from which it gets the microbatch of each forward.
    """

    def __init__(self, engine: Engine, record: RankRecord) -> None:
        self.record = record
        modules = local_modules(engine, record)
        self._device, self._observers = engine.context.device, engine.observers
        self._microbatch: int | None = None
        self._calls: Counter[str] = Counter()
        self._random: list[torch.Tensor] | None = None
        self._bytes = 0
        self._hooks = [module.register_forward_hook(functools.partial(self._record, name)) for name, module in modules]
        self._hooks.append(engine.module.register_forward_pre_hook(self._keep_random_state))
        self._observers.append(self)

    def __enter__(self) -> ActivationRecorder:
        return self

    def __exit__(self, *_: object) -> None:
        self._observers.remove(self)
        for hook in self._hooks:
            hook.remove()

    def begin_call(self) -> None:
        """Part of the observer interface; not needed here."""

    @contextmanager
    def span(self, kind: str, stage: int | None = None, microbatch: int | None = None) -> Iterator[None]:
        """Record the modules that run inside, if ``kind`` is a forward."""
        if kind != "forward" or (microbatch and self._bytes > BUDGET):
            yield
            return
        self._microbatch = microbatch
        self._calls.clear()
        try:
            yield
        finally:
            self._microbatch = self._random = None

    def _record(self, name: str, _module: nn.Module, _inputs: Any, output: Any) -> None:
        if self._microbatch is None:
            return
        if self._random is not None and self.record.random_in is None:
            pairs = zip(self._random, random_states(self._device), strict=True)
            self.record.random_in = None if all(torch.equal(*pair) for pair in pairs) else name
        found = [tensor for tensor in tensors(output) if tensor.is_floating_point()]
        copies = [local(tensor).detach().to("cpu", copy=True) for tensor in found]
        self._bytes += sum(copy.nbytes for copy in copies)
        call = {"module": name, "microbatch": self._microbatch, "call": self._calls[name], "tensors": copies}
        self.record.activations.append(call)
        self._calls[name] += 1

    def _keep_random_state(self, *_: Any) -> None:
        self._random = random_states(self._device)


def local_modules(engine: Engine, record: RankRecord) -> list[tuple[str, nn.Module]]:
    """This rank's modules, each under its first name; ``record`` gets what tells how their outputs are joined."""
    own = [(name, module) for name, module in engine.module.named_modules() if not isinstance(module, PassThrough)]
    every = engine.module.named_modules(remove_duplicate=False)
    record.modules = [name for name, module in every if not isinstance(module, PassThrough)]
    record.packed = sorted({parts for _, module in own if (parts := _num_packed(module)) > 1})
    return own


def _num_packed(module: nn.Module) -> int:
    """The number of separately sharded blocks in the weight of ``module``, which is 3-dim then; else 1."""
    weight: torch.Tensor | None = module._parameters.get("weight")
    linear = isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
    if not linear or weight is None or not is_dtensor(weight) or weight.ndim != 3:
        return 1
    from torch.distributed.tensor import Shard

    placement = weight.placements[-1]  # those before are of data axes
    return weight.shape[placement.dim - 1] if isinstance(placement, Shard) else 1


@torch.no_grad()
def first_gradient(engine: Engine) -> dict[str, torch.Tensor]:
    """The unscaled gradient of the first step by parameter name, in the form of :meth:`~paramp.Engine.full_state_dict`.

    After the first step it equals SGD's momentum buffer. The buffer is copied over the weights temporarily, so that it
    is gathered from shards, stages and data ranks in the same way. A collective of the world.
    """
    optimizer = engine.optimizer
    stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    weights = [parameter.detach().clone() for parameter in stepped]
    for parameter in stepped:
        parameter.copy_(optimizer.state[parameter]["momentum_buffer"])
    engine._weights.write_back()
    gradient = engine.full_state_dict()
    for parameter, weight in zip(stepped, weights, strict=True):
        parameter.copy_(weight)
    engine._weights.write_back()
    return gradient
