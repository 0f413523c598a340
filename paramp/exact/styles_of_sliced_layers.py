"""Tensor-parallel styles that compute in slices, on one tensor rank as on several (:mod:`.sums_over_slices`).

Each stands for a style of a plan. The sharded dim of a layer is cut into ``layout.slices`` slices, of which each tensor
rank has the same number; without a tensor axis this rank has all of them, and its parameters stay plain tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from ..base.dtensor import is_dtensor
from ..base.errors import ConfigError
from ..base.module_surgery import replace_forward, run_within, unbound, with_parameters
from ..base.uncompiled import unwatched
from ..parallel.tensor.colwise_and_rowwise import distribute, distribute_packed, is_conv1d, look_up
from ..parallel.tensor.differentiable_collectives import as_shards, gather, local_shard, own_slice
from .exact_layout import ExactLayout
from .forwards_in_microchunk import Forwards
from .sums_over_slices import add_bias, compute_dtype, fan_out, join, split, sum_rows, sum_slices

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def parameter_of(module: nn.Module, name: str) -> torch.Tensor | None:
    """This rank's part of the parameter ``name`` of ``module``; None if there is none."""
    value = module._parameters[name]
    return local_shard(cast(Any, value)) if is_dtensor(value) else value


def parameters_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """This rank's parts of the parameters of ``module`` itself, by name."""
    found = {name: parameter_of(module, name) for name in module._parameters}
    return {name: value for name, value in found.items() if value is not None}


def aliases_of(module: nn.Module, count: int, group: dist.ProcessGroup | None) -> dict[str, tuple[torch.Tensor, ...]]:
    """:func:`parameters_of`, each once for every one of ``count`` slices of this rank; gradients add up over slices."""
    return {name: fan_out(value, count, group, dtype=value.dtype) for name, value in parameters_of(module).items()}


def first_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Callable[[Any], tuple[Any, Any]]]:
    """The first input of a call, None without any, and a function that returns all inputs with another first one."""
    if args:
        return args[0], lambda other: ((other, *args[1:]), kwargs)
    name, value = next(iter(kwargs.items()), ("", None))
    return value, lambda other: ((), kwargs | {name: other})


class SlicedStyle(ParallelStyle):
    """A style that computes in slices. ``device_mesh`` is None without a tensor axis."""

    def __init__(self, forwards: Forwards, *, parts: int = 1, sequence: bool = False) -> None:
        """``parts``: the fused outputs or inputs of the layer; ``sequence``: its whole side (the input of a
        colwise layer, the output of a rowwise one) is a slice of the sequence."""
        super().__init__()
        self._forwards, self.layout = forwards, forwards.layout
        self.parts = parts
        self.sequence = sequence

    def check(self, name: str, module: nn.Module) -> None:
        """Raise a ConfigError if ``module`` cannot be cut into the slices."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh | None) -> nn.Module:
        raise NotImplementedError

    def _check_size(self, name: str, what: str, size: int) -> None:
        slices = self.parts * self.layout.slices
        if size % slices:
            raise ConfigError(
                f"reproducible.slices: got {self.layout.slices}, but {name!r} has {size} {what}, expected a multiple "
                f"of {slices}; choose fewer slices, a power of two of at least the tensor ranks that you will use"
            )

    def _shard(self, module: nn.Module, name: str, dim: int, mesh: DeviceMesh | None) -> None:
        """Shard a parameter over ``mesh``, if there is one; unpack the fused layers of its dim ``dim``."""
        if mesh is not None:
            distribute_packed(module, name, mesh, dim, self.parts)

    def _part(self, module: nn.Module, name: str, dim: int) -> torch.Tensor | None:
        """This rank's part of a parameter, packed."""
        part, dims = parameter_of(module, name), 2 if name == "weight" else 1
        return part if part is None or part.ndim == dims else part.flatten(dim, dim + 1)


class SlicedColwise(SlicedStyle):
    """A linear layer whose outputs are cut: its input's gradient is a sum over slices."""

    def __init__(self, forwards: Forwards, *, gathers: bool = False, logits: bool = False, **options: Any) -> None:
        """``gathers``: every rank gets all outputs; ``logits``: they stay a DTensor on several ranks."""
        super().__init__(forwards, **options)
        self.gathers, self.logits = gathers, logits

    def check(self, name: str, module: nn.Module) -> None:
        self._check_size(name, "outputs", module.get_parameter("weight").shape[1 if is_conv1d(module) else 0])

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh | None) -> nn.Module:
        layout, parts, dim = self.layout, self.parts, 1 if is_conv1d(module) else 0
        self._shard(module, "weight", dim, device_mesh)
        self._shard(module, "bias", 0, device_mesh)

        def forward(module: nn.Module, /, *args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
            (x,) = *args, *kwargs.values()  # Conv1D has another name for it
            weight, bias = self._part(module, "weight", dim), self._part(module, "bias", 0)
            assert weight is not None
            count, group = layout.local_slices, layout.tensor_group
            inputs = fan_out(x, count, group, sequence=self.sequence and group is not None)
            weight = (weight.t() if dim else weight).to(inputs[0].dtype)
            weights = split(weight, count, 0, parts)
            biases = [None] * count if bias is None else split(bias.to(inputs[0].dtype), count, 0, parts)
            output = join([F.linear(*one) for one in zip(inputs, weights, biases, strict=True)], -1, parts)
            if group is None or device_mesh is None:
                return output
            if self.gathers:
                return gather(output, group, -1)
            return as_shards(output, device_mesh, -1, output.shape[-1] * group.size()) if self.logits else output

        return replace_forward(module, self._forwards.of_layer(forward, 0 if self.gathers or self.logits else parts))


class SlicedRowwise(SlicedStyle):
    """A linear layer whose inputs are cut: its output is a sum over slices."""

    def __init__(self, forwards: Forwards, *, scatters: bool = False, **options: Any) -> None:
        """``scatters``: the input is whole on every rank."""
        super().__init__(forwards, **options)
        self.scatters = scatters

    def check(self, name: str, module: nn.Module) -> None:
        self._check_size(name, "inputs", module.get_parameter("weight").shape[0 if is_conv1d(module) else 1])

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh | None) -> nn.Module:
        layout, parts, dim = self.layout, self.parts, 0 if is_conv1d(module) else 1
        self._shard(module, "weight", dim, device_mesh)
        if device_mesh is not None:
            from torch.distributed.tensor import Replicate

            distribute(module, "bias", device_mesh, Replicate())

        def forward(module: nn.Module, /, *args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
            (x,) = *args, *kwargs.values()
            weight, bias = self._part(module, "weight", dim), parameter_of(module, "bias")
            assert weight is not None
            count, group = layout.local_slices, layout.tensor_group
            if self.scatters and group is not None:
                x = own_slice(x, group, -1)
            dtype, sequence = compute_dtype(x), self.sequence and group is not None
            weights = split((weight.t() if dim == 0 else weight).to(dtype), count, 1, parts)
            terms = [F.linear(*one) for one in zip(split(x.to(dtype), count, -1, parts), weights, strict=True)]
            total = sum_slices(terms, group, sequence=sequence)
            if bias is not None:
                pieces = slices_of_sequence(total, layout, sharded=sequence)
                total = add_bias(total, bias, pieces, group if sequence else None)
            return total.to(terms[0].dtype)

        return replace_forward(module, self._forwards.of_layer(forward, 0))


class SlicedRows(SlicedStyle):
    """An Embedding whose rows are sharded. A row is looked up as it is, so nothing is cut."""

    def check(self, name: str, module: nn.Module) -> None:
        self._check_size(name, "embeddings", module.get_parameter("weight").shape[0])

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh | None) -> nn.Module:
        group = self.layout.tensor_group
        self._shard(module, "weight", 0, device_mesh)

        def forward(module: nn.Module, input: torch.Tensor) -> torch.Tensor:
            table, weight = cast(nn.Embedding, module), parameter_of(module, "weight")
            assert weight is not None
            if group is None:
                return F.embedding(input, weight, table.padding_idx)
            with with_parameters(module, {"weight": weight}):
                return sum_rows(look_up(module, input, group), group, sequence=self.sequence)

        return replace_forward(module, self._forwards.of_layer(forward))


class SlicedSequence(SlicedStyle):
    """A module with replicated parameters that is applied to slices of the sequence, such as a norm."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh | None) -> nn.Module:
        layout = self.layout
        replaced = vars(module).get("forward")
        run = type(module).forward if replaced is None else unbound(replaced, module)
        if device_mesh is not None:
            from torch.distributed.tensor import Replicate

            for name in list(module._parameters):
                distribute(module, name, device_mesh, Replicate())

        def forward(module: nn.Module, /, *args: Any, **kwargs: Any) -> torch.Tensor:
            x, with_first = first_input(args, kwargs)
            _check_inputs(module, x, [*args, *kwargs.values()][1:])
            sharded = self.sequence and layout.tensor_group is not None
            count, group = slices_of_sequence(x, layout, sharded=sharded), layout.tensor_group if sharded else None
            aliases = aliases_of(module, count, group)
            outputs = []
            for index, one in enumerate(split(x, count, 1) if count > 1 else [x]):
                with with_parameters(module, {name: several[index] for name, several in aliases.items()}):
                    of_one, named = with_first(one)
                    outputs.append(run(module, *of_one, **named))
            return join(outputs, 1) if count > 1 else outputs[0]

        return replace_forward(module, forward)


def _check_inputs(module: nn.Module, x: Any, others: Sequence[Any]) -> None:
    several = any(isinstance(value, torch.Tensor) and (value.ndim > 1 or value.requires_grad) for value in others)
    if several or not isinstance(x, torch.Tensor):
        raise ConfigError(
            f"reproducible: a {type(module).__name__}, which is applied to slices of the sequence, got "
            f"{'several tensors' if several else type(x).__name__}, expected one tensor; leave it out of the plan"
        )


def slices_of_sequence(x: torch.Tensor, layout: ExactLayout, *, sharded: bool) -> int:
    """The slices into which this rank cuts the sequence, dim 1 of ``x``, of which it has a part if it is ``sharded``.

    Raises:
        ConfigError: the sequence is sharded, and does not divide into the slices.
    """
    count = layout.local_slices if sharded else layout.slices
    length = x.shape[1] if x.ndim > 2 else 0
    if length and length % count == 0:
        return count
    if sharded:
        raise ConfigError(
            f"sequence of {length * layout.tensor_size}: expected a multiple of reproducible.slices {layout.slices} "
            "under sequence_parallel"
        )
    return 1


def use_through(module: nn.Module, taps: Mapping[str, Callable[[torch.Tensor], torch.Tensor]]) -> None:
    """Let ``module`` compute with what ``taps`` make of its parameters, by their names in it."""

    def parameters(module: nn.Module) -> AbstractContextManager[None]:
        with unwatched():
            own = {name: parameter_of(module, name) for name in taps}
            used = {name: taps[name](value) for name, value in own.items() if value is not None}
        return with_parameters(module, used)

    run_within(module, parameters)
