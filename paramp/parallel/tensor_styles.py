"""Tensor-parallel styles, which shard one module over the tensor axis.

A style is a class, torch's own or one below. Plans use its name in :data:`STYLES`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)
from torch.utils._pytree import tree_map

from ..base.dtensor import is_dtensor
from ..base.errors import ConfigError
from ..base.module_surgery import run_within
from ..distributed.rng import replicated_random, sharded_random

SEQUENCE = Shard(1)
"""Activations are (batch, sequence, features)."""
Forward = Callable[[torch.Tensor], Any]


class ShardedRandom(ParallelStyle):
    """A module whose random numbers differ over the tensor axis: for dropout on sharded activations."""

    random = staticmethod(sharded_random)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        run_within(module, lambda _: self.random())
        return module


class ReplicatedRandom(ShardedRandom):
    """A module whose random numbers are equal over the tensor axis, inside a :class:`ShardedRandom` module."""

    random = staticmethod(replicated_random)


class LocalHeads(ShardedRandom):
    """An attention module that computes its rank's heads, with different dropout masks on each rank.

    ``sizes`` are its attributes with the number of features of all heads. They are divided by the size of the axis.
    """

    def __init__(self, *sizes: str) -> None:
        super().__init__()
        self.sizes = sizes

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name in self.sizes:
            setattr(module, name, getattr(module, name) // device_mesh.size())
        return super()._apply(module, device_mesh)


class PartialGradient(ParallelStyle):
    """A replicated module with partial gradients: each rank applies it to its slice, such as a norm of each head."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in list(module.named_parameters(recurse=False)):
            _distribute(module, name, parameter, device_mesh, Replicate())
        run_within(module, _partial_gradients)
        return module


def _partial_gradients(module: nn.Module) -> AbstractContextManager[None]:
    partial = [Partial()]
    own = module._parameters.items()
    sums = {name: value.to_local(grad_placements=partial) for name, value in own if is_dtensor(value)}
    return _with_parameters(module, sums)


@contextmanager
def _with_parameters(module: nn.Module, values: Mapping[str, torch.Tensor | None]) -> Iterator[None]:
    """A context in which the parameters of ``module`` are ``values``."""
    own = module._parameters
    module._parameters = {**own, **values}  # type: ignore[dict-item]
    try:
        yield
    finally:
        module._parameters = own


class PackedColwise(ParallelStyle):
    """``ColwiseParallel`` for a layer with several fused outputs of the same size, such as query, key and value.

    Each rank has a shard of each of the ``parts``. The weight of a Linear, (outputs, inputs), is stored as a DTensor
    (parts, outputs / parts, inputs) that is sharded over its dim 1; the weight of a Hugging Face ``Conv1D`` has inputs
    and outputs swapped.
    """

    what = "outputs"

    def __init__(self, parts: int = 1) -> None:
        super().__init__()
        self.parts = parts

    def dim(self, module: nn.Module) -> int:
        """The dim of the weight of ``module`` that is sharded."""
        return 1 if _is_conv1d(module) else 0

    def check(self, name: str, module: nn.Module, size: int) -> None:
        """Check that ``module`` is a linear layer whose sharded size divides over ``size`` ranks."""
        if not (isinstance(module, nn.Linear) or _is_conv1d(module)):
            raise ConfigError(f"plan: {name!r} is a {type(module).__name__}, expected a Linear or a Conv1D")
        features = module.get_parameter("weight").shape[self.dim(module)]
        if features % (self.parts * size):
            multiple = f"{self.parts} parts x parallel.tensor.size {size}"
            raise ConfigError(f"plan: {name!r} has {features} {self.what}, expected a multiple of {multiple}")

    def _shard(self, module: nn.Module, name: str, dim: int, mesh: DeviceMesh) -> None:
        parameter = module._parameters[name]
        if parameter is None:
            return
        if self.parts > 1:
            unpacked = parameter.detach().unflatten(dim, (self.parts, -1))
            parameter = nn.Parameter(unpacked, parameter.requires_grad)
            dim += 1
        _distribute(module, name, parameter, mesh, Shard(dim))

    def _own(self, module: nn.Module, name: str, dim: int) -> torch.Tensor:
        """This rank's shard of a parameter, packed."""
        value = module.get_parameter(name)
        assert isinstance(value, DTensor)
        part: torch.Tensor = value.to_local()
        return part.flatten(dim, dim + 1) if self.parts > 1 else part

    def _weight(self, module: nn.Module) -> torch.Tensor:
        weight = self._own(module, "weight", self.dim(module))
        return weight.t() if _is_conv1d(module) else weight

    def _run_on_dtensors(
        self, module: nn.Module, own: Forward, x: DTensor, placement: Shard, bias: torch.Tensor | None = None
    ) -> DTensor:
        """Run ``own``, a forward that replaces the module's (float8), with its packed parameters as DTensors.

        Reductions in it over a whole tensor, such as its largest element, then cover all ranks.
        """
        shards = {
            name: None if value is None else DTensor.from_local(value, x.device_mesh, [placement], run_check=False)
            for name, value in (("weight", self._weight(module)), ("bias", bias))
        }
        with _with_parameters(module, shards):
            return own(x)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self._shard(module, "weight", self.dim(module), device_mesh)
        self._shard(module, "bias", 0, device_mesh)
        own = module.__dict__.get("forward")

        def forward(x: torch.Tensor) -> torch.Tensor:
            whole = DTensor.from_local(x, device_mesh, [Replicate()], run_check=False)
            bias = None if module._parameters["bias"] is None else self._own(module, "bias", 0)
            if own is not None:
                return self._run_on_dtensors(module, own, whole, Shard(0), bias).to_local()
            return F.linear(whole.to_local(grad_placements=[Partial()]), self._weight(module), bias)

        module.__dict__["forward"] = forward
        return module


class PackedRowwise(PackedColwise):
    """``RowwiseParallel`` for a layer with several fused inputs of the same size; see :class:`PackedColwise`."""

    what = "inputs"

    def dim(self, module: nn.Module) -> int:
        return 0 if _is_conv1d(module) else 1

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self._shard(module, "weight", self.dim(module), device_mesh)
        own = module.__dict__.get("forward")

        def forward(x: torch.Tensor) -> torch.Tensor:
            if own is not None:
                parts = DTensor.from_local(x, device_mesh, [Shard(-1)], run_check=False)
                part = self._run_on_dtensors(module, own, parts, Shard(1))
            else:
                part = DTensor.from_local(F.linear(x, self._weight(module)), device_mesh, [Partial()], run_check=False)
            output: torch.Tensor = part.redistribute(placements=[Replicate()]).to_local()
            bias = module._parameters["bias"]
            return output if bias is None else output + bias.to(output.dtype)

        module.__dict__["forward"] = forward
        return module


def _is_conv1d(module: nn.Module) -> bool:
    """Whether ``module`` is transformers' ``Conv1D``, a Linear whose weight is (inputs, outputs)."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def _distribute(module: nn.Module, name: str, parameter: nn.Parameter, mesh: DeviceMesh, placement: Any) -> None:
    distributed = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)  # equal on all ranks
    module.register_parameter(name, nn.Parameter(distributed, parameter.requires_grad))


class ExpertSlices(ParallelStyle):
    """The fused experts of a Hugging Face layer: each rank has a slice of the features of every expert.

    ``gate_up_proj`` (experts, 2 x features, hidden) is stored as a DTensor (experts, 2, features, hidden) that is
    sharded over its dim 2; ``down_proj`` (experts, hidden, features) is sharded over its dim 2. The forward takes
    activations and routing weights, whose gradients are partial on each rank.
    """

    def check(self, name: str, module: nn.Module, size: int) -> None:
        """Check that ``module`` has such weights, and that their features divide over ``size`` ranks."""
        shapes = {own: tuple(value.shape) for own, value in module.named_parameters()}
        up, down = (shapes.get(own, ()) for own in ("gate_up_proj", "down_proj"))
        if len(shapes) != 2 or len(down) != 3 or up != (down[0], 2 * down[2], down[1]):
            raise ConfigError(
                f"plan: {name!r} has the parameters {shapes}, expected gate_up_proj (experts, 2 x features, hidden) "
                "and down_proj (experts, hidden, features)"
            )
        if down[2] % size:
            raise ConfigError(
                f"plan: {name!r} has {down[2]} features, expected a multiple of parallel.tensor.size {size}"
            )

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        up = module.get_parameter("gate_up_proj")
        unpacked = nn.Parameter(up.detach().unflatten(1, (2, -1)), up.requires_grad)
        _distribute(module, "gate_up_proj", unpacked, device_mesh, Shard(2))
        _distribute(module, "down_proj", module.get_parameter("down_proj"), device_mesh, Shard(2))

        def enter(value: Any) -> Any:
            if not (isinstance(value, torch.Tensor) and value.is_floating_point()):
                return value
            whole = DTensor.from_local(value, device_mesh, [Replicate()], run_check=False)
            return whole.to_local(grad_placements=[Partial()])

        def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
            args, kwargs = tree_map(enter, (args, kwargs))
            up, down = (cast(DTensor, module.get_parameter(name)).to_local() for name in ("gate_up_proj", "down_proj"))
            with _with_parameters(module, {"gate_up_proj": up.flatten(1, 2), "down_proj": down}):
                part = type(module).forward(module, *args, **kwargs)
            summed = DTensor.from_local(part, device_mesh, [Partial()], run_check=False)
            output: torch.Tensor = summed.redistribute(placements=[Replicate()]).to_local()
            return output

        module.__dict__["forward"] = forward
        return module


class ScatterSequence(PrepareModuleOutput):
    """Shard the module's replicated output (batch, sequence, ...) along the sequence."""

    def __init__(self) -> None:
        super().__init__(output_layouts=Replicate(), desired_output_layouts=SEQUENCE, use_local_output=True)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def check(_module: nn.Module, _inputs: Any, output: torch.Tensor) -> None:
            if output.shape[1] % device_mesh.size():
                multiple = f"a multiple of parallel.tensor.size {device_mesh.size()} under sequence_parallel"
                raise ConfigError(f"sequence of {output.shape[1]}: expected {multiple}")

        module.register_forward_hook(check)
        return super()._apply(module, device_mesh)


def sharded_dim(style: ParallelStyle | None) -> int | None:
    """The dim of a Linear's weight (outputs, inputs) that ``style`` shards; None if it does not shard the weight."""
    if isinstance(style, (RowwiseParallel, PackedRowwise)):
        return 1
    return 0 if isinstance(style, (ColwiseParallel, PackedColwise)) else None


STYLES: dict[str, Callable[[], ParallelStyle]] = {
    # A Linear whose outputs are sharded, and one whose inputs are: a pair needs one all-reduce in each direction.
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    # A colwise Linear whose output is gathered, for a last layer without a rowwise partner.
    "colwise_gather": lambda: ColwiseParallel(output_layouts=Replicate()),
    # A Linear of two or three fused layers, one after the other in its rows: gate and up; query, key and value.
    "packed_colwise_2": lambda: PackedColwise(2),
    "packed_colwise_3": lambda: PackedColwise(3),
    # An Embedding whose rows, the vocabulary, are sharded.
    "vocab": lambda: RowwiseParallel(input_layouts=Replicate()),
    # A Linear to logits whose vocabulary stays sharded, as a DTensor: the loss reduces it.
    "vocab_logits": lambda: ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    # Between such pairs each rank keeps a slice of the sequence.
    "sequence": lambda: SequenceParallel(use_local_output=True),
    "scatter_sequence": ScatterSequence,
    # A module without weights whose input is gathered to the whole sequence on every rank.
    "gather_sequence": lambda: PrepareModuleInput(
        input_layouts=SEQUENCE, desired_input_layouts=Replicate(), use_local_output=True
    ),
    "sequence_colwise": lambda: ColwiseParallel(input_layouts=SEQUENCE),
    "sequence_rowwise": lambda: RowwiseParallel(output_layouts=SEQUENCE),
    "sequence_vocab_logits": lambda: ColwiseParallel(
        input_layouts=SEQUENCE, output_layouts=Shard(-1), use_local_output=False
    ),
    "sharded_random": ShardedRandom,
    "replicated_random": ReplicatedRandom,
    # A rowwise Linear whose input is replicated.
    "rowwise_scatter": lambda: RowwiseParallel(input_layouts=Replicate()),
    # A replicated module that each rank applies to its slice of an activation.
    "partial_gradient": PartialGradient,
}
"""The styles by the names that plans use."""
