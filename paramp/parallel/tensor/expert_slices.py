"""Experts of which each tensor rank has a slice of the hidden features, with an expert axis or without one.

The first matrix of each expert is sharded over its outputs and the second over its inputs, as a pair of colwise and
rowwise layers. So one sum over tensor ranks follows, of each token's output, in its dtype::

    tokens, weights ─► enter ─► this rank's slice of every expert ─► sum over tensor ranks

With an expert axis a rank has slices of some experts only, and tokens travel to them between ranks with the same
slices (:mod:`paramp.parallel.expert_dispatch`). The sum follows their way back: it is of tokens, fewer than rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from ...base.errors import ConfigError
from ...base.module_surgery import replace_forward, with_parameters
from ...base.torch_internals import take
from ...base.uncompiled import uncompiled
from ..expert_dispatch import check_forward, have_part, inputs_in_order, output_of_all
from .colwise_and_rowwise import distribute, distribute_packed
from .differentiable_collectives import enter, local_shard, on_first_rank, sum_over_ranks

tree_map = take("torch.utils._pytree.tree_map")

UP, DOWN, UP_BIAS, DOWN_BIAS = "gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias"


class ExpertSlices(ParallelStyle):
    """A module of stacked experts, each tensor rank with a slice of the hidden features of every expert.

    Without ``dims`` its parameters are those of transformers: ``gate_up_proj`` (experts, 2 x features, hidden) and
    ``down_proj`` (experts, hidden, features), or both with their last two dims swapped, and the biases of both or none.
    Gate and up are one behind the other, or take turns if the module's ``is_concatenated`` is False, as in GPT-OSS.
    Where they are one behind the other, they are stored as two, so that a rank has a slice of each:
    ``gate_up_proj`` as a DTensor (experts, 2, features, hidden).

    Args:
        dims: for each parameter of another module the dim of the hidden features, between which its forward may have
            functions of each alone only; None for a parameter that is added to an expert's output.
    """

    slices_experts = True

    def __init__(self, dims: Mapping[str, int | None] | None = None) -> None:
        super().__init__()
        self._dims = dims

    def check(self, name: str, module: nn.Module, size: int) -> None:
        """Check that ``module`` has such weights, and that their features divide over ``size`` ranks."""
        shapes = {own: tuple(value.shape) for own, value in module.named_parameters()}
        dims = self._dims_of(module)
        if dims is None or dims.keys() != shapes.keys():
            expected = ", ".join(self._dims or ()) or (
                "gate_up_proj (experts, 2 x features, hidden) and down_proj (experts, hidden, features), or both with "
                "their last two dims swapped, and the biases of both or of none"
            )
            raise ConfigError(f"plan: {name!r} has the parameters {shapes}, expected {expected}")
        check_forward(name, module)
        for own, dim in dims.items():
            if dim is None:
                continue
            if not 0 < dim < len(shapes[own]):
                raise ConfigError(
                    f"plan: {name!r} has {own} {shapes[own]}, but dims has {dim} for it, expected one of its dims but "
                    "the first, which is of experts"
                )
            features = shapes[own][dim] // (2 if own in (UP, UP_BIAS) and self._dims is None else 1)
            if features % size:
                raise ConfigError(
                    f"plan: {name!r} has {features} features, expected a multiple of parallel.tensor.size {size}"
                )

    def _dims_of(self, module: nn.Module) -> Mapping[str, int | None] | None:
        """The dim of the hidden features in each parameter of ``module``; None if it has others."""
        if self._dims is not None:
            return self._dims
        shapes = {own: tuple(value.shape) for own, value in module.named_parameters()}
        if len(shapes.get(DOWN, ())) != 3:
            return None
        for up, down in ((1, 2), (2, 1)):
            experts, features, hidden = (shapes[DOWN][dim] for dim in (0, down, up))
            stack = (experts, 2 * features, hidden) if up == 1 else (experts, hidden, 2 * features)
            biases = {UP_BIAS: (experts, 2 * features), DOWN_BIAS: (experts, hidden)} if len(shapes) > 2 else {}
            if shapes == {UP: stack, DOWN: shapes[DOWN], **biases}:
                return {own: {UP: up, DOWN: down, UP_BIAS: 1, DOWN_BIAS: None}[own] for own in shapes}
        return None

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """``device_mesh``: the tensor axis, or the expert axis and the tensor axis."""
        dims = self._dims_of(module)
        assert dims is not None
        packed = (UP, UP_BIAS) if self._dims is None and getattr(module, "is_concatenated", True) else ()
        over_experts: list[Placement] = [Shard(0)] * (device_mesh.ndim - 1)
        for name, dim in dims.items():
            if dim is None:
                distribute(module, name, device_mesh, *over_experts, Replicate())
            else:
                distribute_packed(module, name, device_mesh, dim, 2 if name in packed else 1, over_experts)
        group = device_mesh.get_group(device_mesh.ndim - 1)

        def slices(module: nn.Module) -> dict[str, torch.Tensor]:
            found = {name: local_shard(cast(DTensor, module._parameters[name])) for name in dims}
            for name, dim in dims.items():
                if dim is None:
                    found[name] = on_first_rank(found[name], group)
                elif name in packed:
                    found[name] = found[name].flatten(dim, dim + 1)
            return found

        def enter_each(value: Any) -> Any:
            return enter(value, group) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

        def forward(module: nn.Module, /, *args: Any, **kwargs: Any) -> torch.Tensor:
            args, kwargs = tree_map(enter_each, (args, kwargs))
            with with_parameters(module, slices(module)):
                return sum_over_ranks(type(module).forward(module, *args, **kwargs), group)

        if device_mesh.ndim == 1:
            return replace_forward(module, forward)
        have_part(module, device_mesh.size(0))
        expert_group = device_mesh.get_group(0)

        @uncompiled  # the number of rows differs from call to call
        def dispatching(module: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
            tokens, index, weights = inputs_in_order(module, args, kwargs)
            inputs = enter(tokens, group), index, enter(weights, group)
            return sum_over_ranks(output_of_all(module, slices(module), inputs, expert_group), group)

        return replace_forward(module, dispatching)
