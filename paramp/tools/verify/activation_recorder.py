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

from ...base.dtensor import as_real, is_dtensor, is_inexact, local, version
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
    stage_rank: int = 0
    """The rank on the pipeline axis."""
    context_rank: int = 0
    """The rank on the context axis."""
    losses: list[float] = field(default_factory=list)
    """Of each step; the same for all lists but ``modules``, ``packed`` and ``trained``."""
    grad_norms: list[float] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)
    batches: list[str] = field(default_factory=list)
    """A hash of the global batch."""
    microbatch_size: int = 0
    activations: list[dict[str, Any]] = field(default_factory=list)
    """The module outputs in the order in which calls ended: ``step`` (from 1), ``module``, ``microbatch``, ``call``
    (index among the module's calls in this microbatch) and ``tensors`` (local tensors, floating point or complex, on
    the CPU)."""
    modules: list[str] = field(default_factory=list)
    """The names of this rank's modules, with all names of shared ones."""
    packed: list[int] = field(default_factory=list)
    """The numbers of blocks (such as 3 for query, key and value) in layers that shard each block separately
    (:class:`paramp.parallel.tensor.colwise_and_rowwise.PackedColwise`)."""
    replicas: list[str] = field(default_factory=list)
    """What differed between replicas after a step, the same on every rank."""
    random_in: str | None = None
    """The first module whose forward changed torch's random state."""
    updated: str | None = None
    """The first buffer that a forward changed; running statistics, which no training reads, aside."""
    trained: list[str] = field(default_factory=list)
    """The names of this rank's trained parameters."""
    start: dict[str, torch.Tensor] = field(default_factory=dict)
    """The whole model's weights before the first step. ``gradients``: its gradient in each step. ``steps``: the change
    of its weights. On pipeline rank 0 only, because all ranks have the same."""
    gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)
    steps: list[dict[str, torch.Tensor]] = field(default_factory=list)

    def forget_step(self) -> None:
        """Remove the last step, which is made again."""
        step = len(self.losses)
        self.activations = [output for output in self.activations if output["step"] < step]
        for values in (self.losses, self.grad_norms, self.skipped, self.gradients, self.steps):
            values.pop()


class ActivationRecorder:
    """Records the outputs of an engine's modules in the forwards of :meth:`~paramp.Engine.forward_backward`.

    A context manager that registers forward hooks. It is also an :class:`~paramp.base.observer_spans.Observer` of the
    engine, from which it gets the microbatch of each forward.
    """

    def __init__(self, engine: Engine, record: RankRecord) -> None:
        self.record = record
        self._modules = modules = local_modules(engine, record)
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
        later = microbatch or self.record.losses  # than the first microbatch of the first step
        if kind != "forward" or (later and self._bytes > BUDGET):
            yield
            return
        self._microbatch = microbatch
        self._calls.clear()
        before = self._versions()
        try:
            yield
        finally:
            self._microbatch = self._random = None
            changed = (name for name, now in self._versions().items() if now != before.get(name, now))
            self.record.updated = self.record.updated or next(changed, None)

    def _record(self, name: str, _module: nn.Module, _inputs: Any, output: Any) -> None:
        if self._microbatch is None:
            return
        if self._random is not None and self.record.random_in is None:
            pairs = zip(self._random, random_states(self._device), strict=True)
            self.record.random_in = None if all(torch.equal(*pair) for pair in pairs) else name
        found = [tensor for tensor in tensors(output) if is_inexact(tensor)]
        copies = [local(tensor).detach().to("cpu", copy=True) for tensor in found]
        self._bytes += sum(copy.nbytes for copy in copies)
        at = {"step": len(self.record.losses) + 1, "module": name, "microbatch": self._microbatch}
        self.record.activations.append({**at, "call": self._calls[name], "tensors": copies})
        self._calls[name] += 1

    def _versions(self) -> dict[str, tuple[int, int]]:
        """Which tensor each buffer is, and how often it has been written in place."""
        found: dict[str, tuple[int, int]] = {}
        for name, module in self._modules:
            if getattr(module, "running_mean", None) is None:
                own = module.named_buffers(prefix=name, recurse=False)
                found |= {path: (id(buffer), version(buffer)) for path, buffer in own}
        return found

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
def gradient_of(engine: Engine, norm: float) -> dict[str, torch.Tensor]:
    """The gradient of the last step, unscaled and before clipping to 1, in the form of ``full_state_dict``.

    It is SGD's momentum buffer, which is copied over the weights for a moment, so that it is gathered from shards,
    stages and data ranks as they are. The weights then are as before, even if they were wrong. A collective.

    Args:
        norm: the gradient's.
    """
    optimizer = engine.optimizer
    stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    both = [*stepped, *(local(parameter) for parameter in engine.module.parameters())]
    kept = [tensor.detach().clone() for tensor in both]
    for parameter in stepped:
        parameter.copy_(optimizer.state[parameter]["momentum_buffer"] * max(1.0, norm))
    engine._weights.write_back()
    gradient = engine.full_state_dict()
    for tensor, value in zip(both, kept, strict=True):
        tensor.copy_(value)
    return gradient


@torch.no_grad()
def perturb(engine: Engine, unit: float, generator: torch.Generator) -> None:
    """Change each weight at random by up to ``unit`` times itself, except integers; of an engine of one process."""
    stepped = [parameter for group in engine.optimizer.param_groups for parameter in group["params"]]
    frozen = [parameter for parameter in engine.module.parameters() if not parameter.requires_grad]
    for tensor in (tensor for tensor in map(as_real, (*stepped, *frozen)) if tensor.is_floating_point()):
        noise = torch.rand(tensor.shape, dtype=torch.float64, generator=generator).mul_(2.0).sub_(1.0)
        tensor.copy_(tensor.double() * (1.0 + unit * noise.to(tensor.device)))
    engine._weights.write_back()
