"""Linear layers and embeddings whose weight is sharded over the tensor axis, computed on local tensors.

Parameters are DTensors. The forward takes plain tensors and computes on this rank's shards, with the communication of
:mod:`paramp.parallel.tensor.differentiable_collectives`, because DTensor's dispatch costs up to 2 ms of Python a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from ...base.dtensor import LOCAL_SHARDS, is_dtensor
from ...base.errors import ConfigError
from ...base.module_surgery import has_own_forward, replace_forward, with_parameters
from .differentiable_collectives import (
    as_shards,
    enter,
    gather,
    gather_and_enter,
    local_shard,
    on_first_rank,
    own_slice,
    sum_over_ranks,
    sum_slices,
)

SEQUENCE = Shard(1)
"""Activations are (batch, sequence, features)."""


class Colwise(ColwiseParallel):
    """``ColwiseParallel`` that computes a Linear on local tensors.

    A Linear whose forward was replaced (float8) or overridden, and an Embedding, run on DTensors, as torch's style.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not has_forward_of(module, nn.Linear) or self.desired_input_layouts != (Replicate(),):
            return super()._apply(module, device_mesh)
        distribute(module, "weight", device_mesh, Shard(0))
        distribute(module, "bias", device_mesh, Shard(0))
        group, layout, gathers = device_mesh.get_group(), self.input_layouts[0], self.output_layouts[0].is_replicate()

        def forward(module: nn.Module, input: torch.Tensor) -> torch.Tensor:
            x = _plain(input, layout)
            x = enter(x, group) if layout.is_replicate() else gather_and_enter(x, group, SEQUENCE.dim)
            output = F.linear(x, _local(module, "weight"), _local(module, "bias"))
            if gathers:
                return gather(output, group, -1)
            if self.use_local_output:
                return output
            return as_shards(output, device_mesh, -1, output.shape[-1] * device_mesh.size())

        return replace_forward(module, forward)


class Rowwise(RowwiseParallel):
    """``RowwiseParallel`` that computes a Linear, or an Embedding that is looked up only, on local tensors.

    Others run on DTensors: see :class:`Colwise`.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        group, sums = device_mesh.get_group(), self.output_layouts[0].is_replicate()
        if is_lookup(module, device_mesh.size()):
            distribute(module, "weight", device_mesh, Shard(0))

            def rows_of(module: nn.Module, input: torch.Tensor) -> torch.Tensor:
                rows = look_up(module, input, group)
                return sum_over_ranks(rows, group) if sums else sum_slices(rows, group, SEQUENCE.dim)

            return replace_forward(module, rows_of)
        if not has_forward_of(module, nn.Linear):
            return super()._apply(module, device_mesh)
        distribute(module, "weight", device_mesh, Shard(1))
        distribute(module, "bias", device_mesh, Replicate())
        slices = self.input_layouts[0].is_replicate()

        def forward(module: nn.Module, input: torch.Tensor) -> torch.Tensor:
            x = own_slice(_plain(input, Replicate()), group, -1) if slices else _plain(input, Shard(-1))
            weight, bias = _local(module, "weight"), _local(module, "bias")
            bias = None if bias is None else on_first_rank(bias, group)
            if sums:
                return _summed_linear(x, weight, bias, group)
            return sum_slices(F.linear(x, weight, bias), group, SEQUENCE.dim)

        return replace_forward(module, forward)


def has_forward_of(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether calling ``module`` calls the forward of torch's ``kind``, with parameters of its own."""
    is_plain = "forward" not in module.__dict__ and type(module).forward is kind.forward
    return is_plain and "weight" in module._parameters


def is_lookup(module: nn.Module, size: int) -> bool:
    """Whether ``module`` is an Embedding that only looks up rows, which divide over ``size`` ranks."""
    if not isinstance(module, nn.Embedding) or not has_forward_of(module, nn.Embedding):
        return False
    others = module.max_norm is not None or module.scale_grad_by_freq or module.sparse
    return not others and module.num_embeddings % size == 0


def look_up(module: nn.Module, tokens: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The rows ``tokens`` (any dims, integers) that this rank has, and 0 for others' rows; dims of ``tokens`` + 1."""
    table = cast(nn.Embedding, module)
    on_host = tokens.device.type == "cpu" and not torch.compiler.is_compiling()
    if on_host and tokens.numel():  # elsewhere it would synchronise
        low, high = (int(value) for value in torch.aminmax(tokens))
        if low < 0 or high >= table.num_embeddings:
            raise IndexError(f"token {low if low < 0 else high}, expected one of 0 to {table.num_embeddings - 1}")
    weight = _local(module, "weight")
    rows, padding = weight.shape[0], table.padding_idx
    first = group.rank() * rows
    index = tokens - first
    others = (index < 0) | (index >= rows)
    if padding is not None:
        padding = padding - first if 0 <= padding - first < rows else None
    return F.embedding(index.masked_fill(others, 0), weight, padding).masked_fill(others.unsqueeze(-1), 0.0)


def _plain(x: torch.Tensor, layout: Placement) -> torch.Tensor:
    """``x``, or its local part in ``layout`` if another style has left it a DTensor."""
    return x.redistribute(placements=[layout]).to_local() if is_dtensor(x) else x


def _local(module: nn.Module, name: str) -> Any:
    """This rank's shard of the parameter ``name`` of ``module``; None if it has none."""
    parameter: Any = module._parameters[name]
    return None if parameter is None else local_shard(parameter)


def _summed_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, group: dist.ProcessGroup
) -> torch.Tensor:
    """The sum over ``group`` of ``F.linear`` of ``x`` (..., this rank's inputs)."""
    if bias is None:
        return sum_over_ranks(F.linear(x, weight), group)
    # With a bias and more dims than 2 the output is a view, and autograd copies the gradient of one changed in place.
    rows = F.linear(x.reshape(-1, x.shape[-1]), weight, bias)
    return sum_over_ranks(rows, group).view(*x.shape[:-1], weight.shape[0])


def distribute(
    module: nn.Module, name: str, mesh: DeviceMesh, *placements: Placement, is_partial: bool = False
) -> None:
    """Make the parameter ``name`` of ``module``, equal on all ranks, a DTensor. Without the parameter, do nothing.

    The module computes on its :func:`~.differentiable_collectives.local_shard`, whose gradient may be partial.
    """
    parameter: Any = module._parameters[name]
    if parameter is not None:
        distributed = distribute_tensor(parameter.detach(), mesh, placements, src_data_rank=None)
        module.register_parameter(name, nn.Parameter(distributed, parameter.requires_grad))
        vars(module).setdefault(LOCAL_SHARDS, {})[name] = is_partial


def distribute_packed(
    module: nn.Module, name: str, mesh: DeviceMesh, dim: int, parts: int, before: Sequence[Placement] = ()
) -> None:
    """Shard the parameter ``name`` of ``module`` over ``mesh`` along ``dim``, in which ``parts`` layers are fused.

    With more than one each rank has a shard of each of them: ``dim`` becomes two, of which the second is sharded.
    ``before``: the placements on the other dims of ``mesh``, which precede.
    """
    parameter = module._parameters[name]
    if parameter is not None and parts > 1:
        unpacked = parameter.detach().unflatten(dim, (parts, -1))
        module.register_parameter(name, nn.Parameter(unpacked, parameter.requires_grad))
        dim += 1
    distribute(module, name, mesh, *before, Shard(dim))


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
        return 1 if is_conv1d(module) else 0

    def check(self, name: str, module: nn.Module, size: int) -> None:
        """Check that ``module`` is a linear layer that computes as one, and whose size divides over ``size`` ranks."""
        kind = type(module).__name__
        if not (isinstance(module, nn.Linear) or is_conv1d(module)):
            raise ConfigError(f"plan: {name!r} is a {kind}, expected a Linear or a Conv1D")
        if has_own_forward(module) or not (is_conv1d(module) or type(module).forward is nn.Linear.forward):
            raise ConfigError(
                f"plan: {name!r} is a {kind} with a forward of its own, expected that of a Linear, because each rank "
                "computes its shard as that does; move what the forward adds into another module, or leave the layer, "
                "and those sharded with it, out of the plan"
            )
        features = module.get_parameter("weight").shape[self.dim(module)]
        if features % (self.parts * size):
            multiple = f"{self.parts} parts x parallel.tensor.size {size}"
            raise ConfigError(f"plan: {name!r} has {features} {self.what}, expected a multiple of {multiple}")

    def _local(self, module: nn.Module, name: str, dim: int) -> Any:
        """This rank's shard of a parameter, packed; None if there is none."""
        shard = _local(module, name)
        return shard.flatten(dim, dim + 1) if shard is not None and self.parts > 1 else shard

    def _weight(self, module: nn.Module) -> torch.Tensor:
        weight: torch.Tensor = self._local(module, "weight", self.dim(module))
        return weight.t() if is_conv1d(module) else weight

    def _run_on_dtensors(
        self,
        module: nn.Module,
        own: Callable[[torch.Tensor], Any],
        x: DTensor,
        placement: Shard,
        bias: torch.Tensor | None = None,
    ) -> DTensor:
        """Run ``own``, a forward that replaces the module's (float8), with its packed parameters as DTensors.

        Reductions in it over a whole tensor, such as its largest element, then cover all ranks.
        """
        shards = {
            name: None if value is None else DTensor.from_local(value, x.device_mesh, [placement], run_check=False)
            for name, value in (("weight", self._weight(module)), ("bias", bias))
        }
        with with_parameters(module, shards):
            return own(x)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        distribute_packed(module, "weight", device_mesh, self.dim(module), self.parts)
        distribute_packed(module, "bias", device_mesh, 0, self.parts)
        replaced, group = module.__dict__.get("forward"), device_mesh.get_group()

        def forward(module: nn.Module, /, *args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
            (x,) = *args, *kwargs.values()  # Conv1D has another name for it
            bias = self._local(module, "bias", 0)
            if replaced is not None:
                whole = DTensor.from_local(x, device_mesh, [Replicate()], run_check=False)
                return self._run_on_dtensors(module, replaced, whole, Shard(0), bias).to_local()
            return F.linear(enter(x, group), self._weight(module), bias)

        return replace_forward(module, forward)


class PackedRowwise(PackedColwise):
    """``RowwiseParallel`` for a layer with several fused inputs of the same size; see :class:`PackedColwise`."""

    what = "inputs"

    def dim(self, module: nn.Module) -> int:
        return 0 if is_conv1d(module) else 1

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        distribute_packed(module, "weight", device_mesh, self.dim(module), self.parts)
        replaced, group = module.__dict__.get("forward"), device_mesh.get_group()

        def forward(module: nn.Module, /, *args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
            (x,) = *args, *kwargs.values()
            bias = module._parameters["bias"]
            if replaced is None:
                own = None if bias is None else on_first_rank(bias, group)
                return _summed_linear(x, self._weight(module), own, group)
            parts = DTensor.from_local(x, device_mesh, [Shard(-1)], run_check=False)
            part = self._run_on_dtensors(module, replaced, parts, Shard(1))
            output: torch.Tensor = part.redistribute(placements=[Replicate()]).to_local()
            return output if bias is None else output + bias.to(output.dtype)

        return replace_forward(module, forward)


def is_conv1d(module: nn.Module) -> bool:
    """Whether ``module`` is transformers' ``Conv1D``, a Linear whose weight is (inputs, outputs)."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")
