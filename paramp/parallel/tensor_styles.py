"""Tensor-parallel styles: how one module is sharded over the tensor axis."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ParallelStyle,
    PrepareModuleOutput,
)

from ..base.errors import ConfigError
from ..base.module_surgery import run_within
from ..distributed.rng import replicated_random, sharded_random

__all__ = ["LocalHeads", "PackedColwise", "PackedRowwise", "PartialGradient"]

Forward = Callable[[torch.Tensor], Any]


class ShardedRandom(ParallelStyle):
    """The module's random numbers differ over the tensor axis: for dropout on sharded activations."""

    random = staticmethod(sharded_random)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        contexts: list[Any] = []

        def enter(_module: nn.Module, _inputs: Any) -> None:
            contexts.append(self.random())
            contexts[-1].__enter__()

        def leave(_module: nn.Module, _inputs: Any, _output: Any) -> None:
            contexts.pop().__exit__(None, None, None)

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave, always_call=True)
        return module


class ReplicatedRandom(ShardedRandom):
    """The module's random numbers are equal over the tensor axis, inside one whose numbers are not."""

    random = staticmethod(replicated_random)


class LocalHeads(ShardedRandom):
    """An attention module that computes a rank's own heads, and drops out their weights by itself.

    Args:
        sizes: its attributes that count features of all heads; they are divided by the size of the axis.
    """

    def __init__(self, *sizes: str) -> None:
        super().__init__()
        self.sizes = sizes

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name in self.sizes:
            setattr(module, name, getattr(module, name) // device_mesh.size())
        return super()._apply(module, device_mesh)


class PartialGradient(ParallelStyle):
    """A module that every rank has whole and applies to its own part of an activation, such as a norm of each head.

    Its gradients are the sums of what the ranks find.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in list(module.named_parameters(recurse=False)):
            _distribute(module, name, parameter, device_mesh, Replicate())
        run_within(module, _partial_gradients)
        return module


def _partial_gradients(module: nn.Module) -> AbstractContextManager[None]:
    return _holding(module, {name: _with_partial_gradient(value) for name, value in module._parameters.items()})


@contextmanager
def _holding(module: nn.Module, values: Mapping[str, torch.Tensor | None]) -> Iterator[None]:
    """Inside, the parameters of ``module`` are these tensors."""
    own = module._parameters
    module._parameters = {**own, **values}  # type: ignore[dict-item]
    try:
        yield
    finally:
        module._parameters = own


def _with_partial_gradient(value: torch.Tensor | None) -> torch.Tensor | None:
    return value.to_local(grad_placements=[Partial()]) if isinstance(value, DTensor) else value


class PackedColwise(ParallelStyle):
    """``ColwiseParallel`` for a layer whose outputs are several of one size side by side, such as query, key and value.

    Each rank has its share of every one. The weight of a Linear, (outputs, inputs), is a DTensor (parts, outputs /
    parts, inputs) that is sharded over its dim 1; that of a Hugging Face ``Conv1D`` is stored the other way around.

    Args:
        parts: how many.
    """

    what = "outputs"

    def __init__(self, parts: int = 1) -> None:
        super().__init__()
        self.parts = parts

    def dim(self, module: nn.Module) -> int:
        """The dim of the weight of ``module`` that is shared out."""
        return 1 if _is_conv1d(module) else 0

    def check(self, name: str, module: nn.Module, size: int) -> None:
        """Complain about a ``module`` that does not share out over ``size`` ranks.

        Raises:
            ConfigError: naming it.
        """
        if not (isinstance(module, nn.Linear) or _is_conv1d(module)):
            raise ConfigError(f"plan: {name!r} is a {type(module).__name__}, expected a Linear or a Conv1D")
        features = module.get_parameter("weight").shape[self.dim(module)]
        if features % (self.parts * size):
            raise ConfigError(
                f"plan: {name!r} has {features} {self.what}, expected a multiple of {self.parts} parts x "
                f"parallel.tensor.size {size}"
            )

    def _share(self, module: nn.Module, name: str, dim: int, mesh: DeviceMesh) -> None:
        parameter = module._parameters[name]
        if parameter is None:
            return
        if self.parts > 1:
            unpacked = parameter.detach().unflatten(dim, (self.parts, -1))
            parameter = nn.Parameter(unpacked, parameter.requires_grad)
            dim += 1
        _distribute(module, name, parameter, mesh, Shard(dim))

    def _own(self, module: nn.Module, name: str, dim: int) -> torch.Tensor:
        """A rank's part of a parameter, packed."""
        value = module.get_parameter(name)
        assert isinstance(value, DTensor)
        part: torch.Tensor = value.to_local()
        return part.flatten(dim, dim + 1) if self.parts > 1 else part

    def _weight(self, module: nn.Module) -> torch.Tensor:
        weight = self._own(module, "weight", self.dim(module))
        return weight.t() if _is_conv1d(module) else weight

    def _as_whole(
        self, module: nn.Module, own: Forward, x: DTensor, placement: Shard, bias: torch.Tensor | None = None
    ) -> DTensor:
        """What ``own`` computes, a forward that ``module`` was given (float8), of its packed parameters as DTensors.

        What such a forward asks of a whole tensor, the largest element for instance, is then that of all ranks.
        """
        shards = {
            name: None if value is None else DTensor.from_local(value, x.device_mesh, [placement], run_check=False)
            for name, value in (("weight", self._weight(module)), ("bias", bias))
        }
        with _holding(module, shards):
            return own(x)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self._share(module, "weight", self.dim(module), device_mesh)
        self._share(module, "bias", 0, device_mesh)

        own = module.__dict__.get("forward")

        def forward(x: torch.Tensor) -> torch.Tensor:
            whole = DTensor.from_local(x, device_mesh, [Replicate()], run_check=False)
            bias = None if module._parameters["bias"] is None else self._own(module, "bias", 0)
            if own is not None:
                return self._as_whole(module, own, whole, Shard(0), bias).to_local()
            return F.linear(whole.to_local(grad_placements=[Partial()]), self._weight(module), bias)

        module.__dict__["forward"] = forward
        return module


class PackedRowwise(PackedColwise):
    """``RowwiseParallel`` for a layer whose inputs are several of one size side by side; see :class:`PackedColwise`."""

    what = "inputs"

    def dim(self, module: nn.Module) -> int:
        return 0 if _is_conv1d(module) else 1

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self._share(module, "weight", self.dim(module), device_mesh)
        own = module.__dict__.get("forward")

        def forward(x: torch.Tensor) -> torch.Tensor:
            if own is not None:
                parts = DTensor.from_local(x, device_mesh, [Shard(-1)], run_check=False)
                part = self._as_whole(module, own, parts, Shard(1))
            else:
                part = DTensor.from_local(F.linear(x, self._weight(module)), device_mesh, [Partial()], run_check=False)
            output: torch.Tensor = part.redistribute(placements=[Replicate()]).to_local()
            bias = module._parameters["bias"]
            return output if bias is None else output + bias.to(output.dtype)

        module.__dict__["forward"] = forward
        return module


def _is_conv1d(module: nn.Module) -> bool:
    """Whether ``module`` is the layer of that name in transformers: a Linear whose weight is (inputs, outputs)."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def _distribute(module: nn.Module, name: str, parameter: nn.Parameter, mesh: DeviceMesh, placement: Any) -> None:
    shared = distribute_tensor(parameter.detach(), mesh, [placement])
    module.register_parameter(name, nn.Parameter(shared, parameter.requires_grad))


SEQUENCE = Shard(1)
"""Activations are (batch, sequence, features)."""


class ScatterSequence(PrepareModuleOutput):
    """The module's output (batch, sequence, ...), whole on every rank, is cut along the sequence."""

    def __init__(self) -> None:
        super().__init__(output_layouts=Replicate(), desired_output_layouts=SEQUENCE, use_local_output=True)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def check(_module: nn.Module, _inputs: Any, output: torch.Tensor) -> None:
            if output.shape[1] % device_mesh.size():
                raise ConfigError(
                    f"sequence of {output.shape[1]}: expected a multiple of parallel.tensor.size {device_mesh.size()} "
                    "under sequence_parallel"
                )

        module.register_forward_hook(check)
        return super()._apply(module, device_mesh)
