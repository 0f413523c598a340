"""The training step of a GPT in other libraries: the candidates of by_hand.py beside the step written by hand.

Each is written as its library's documents say. A layout or device that a library does not support is a ValueError with
the reason, as is a library that is not installed.
"""

from __future__ import annotations

import importlib
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from overhead import ADAMW, AUTOCAST, MAX_NORM, Direct
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from paramp import ParallelContext
from paramp.models import GPT


class Peer(ABC):
    """A library that wraps the model and the optimizer, and replicates both on every data rank."""

    package: ClassVar[str]

    def __init__(self, model: GPT, context: ParallelContext, mode: str) -> None:
        if context.tp.size * context.pp.size > 1:
            raise ValueError(f"{self.package} has no tensor or pipeline parallelism for this model")
        if context.device.type == "cuda" and context.world_size > torch.cuda.device_count():
            raise ValueError(f"{self.package} gives every rank a GPU of its own")
        self.library = importlib.import_module(self.package)
        self.norm = torch.zeros(())
        self._wrap(model, torch.optim.AdamW(model.parameters(), **ADAMW), context, mode)

    @abstractmethod
    def _wrap(self, model: GPT, optimizer: torch.optim.Optimizer, context: ParallelContext, mode: str) -> None:
        """Make the library's model and optimizer."""


class Accelerate(Peer):
    package = "accelerate"

    def _wrap(self, model: GPT, optimizer: torch.optim.Optimizer, context: ParallelContext, mode: str) -> None:
        self.library.state.AcceleratorState._reset_state(reset_partial_state=True)  # it remembers the last mode
        self.accelerator = self.library.Accelerator(
            mixed_precision="no" if AUTOCAST[mode] is None else "bf16", cpu=context.device.type == "cpu"
        )
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)

    def train(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        self.accelerator.backward(GPT.loss(self.model(x), y))
        self.norm = self.accelerator.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self.optimizer.step()


class Fabric(Peer):
    package = "lightning.fabric"

    def _wrap(self, model: GPT, optimizer: torch.optim.Optimizer, context: ParallelContext, mode: str) -> None:
        parallel = {"devices": context.world_size, "strategy": "ddp" if context.world_size > 1 else "auto"}
        with warnings.catch_warnings(action="ignore"):  # of the machine's launchers
            self.fabric = self.library.Fabric(accelerator=context.device.type, precision=mode, **parallel)
            self.fabric.launch()
        self.model, self.optimizer = self.fabric.setup(model, optimizer)

    def train(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        self.fabric.backward(GPT.loss(self.model(x), y))
        self.norm = self.fabric.clip_gradients(self.model, self.optimizer, max_norm=MAX_NORM)
        self.optimizer.step()


class FullyShard(Direct):
    """torch's ``parallelize_module`` and ``fully_shard``, with the norm over the local tensors of both."""

    def __init__(self, model: GPT, context: ParallelContext, mode: str) -> None:
        if context.pp.size > 1:
            raise ValueError("fully_shard under a hand-written pipeline is not compared")
        super().__init__(model, context, mode, 1)

    def _shard_data(self, module: nn.Module, context: ParallelContext, mode: str) -> None:
        compute = None if mode == "32-true" else torch.bfloat16
        policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32 if compute else None)
        self.dtype = None  # the policy casts
        mesh = context.mesh["dp" if context.config.parallel.shard == 1 else "dp_shard"]
        for part in (*module.blocks, module):  # type: ignore[misc]  # GPT's
            fully_shard(part, mesh=mesh, mp_policy=policy)


PEERS: dict[str, Callable[[Any, ParallelContext, str], Any]] = {
    "accelerate": Accelerate,
    "fabric": Fabric,
    "fsdp2": FullyShard,
}
