"""Hooks of the forward of a unit of FSDP2: what its output and its gathered weights need around torch's own hooks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ...base.errors import ConfigError
from ...base.held_tensors import held_tensors
from ...base.torch_internals import expect, take
from ...base.trees import map_tensors
from ...base.uncompiled import uncompiled, unwatched
from . import fsdp2_internals

expect("torch._C._autograd")

tree_leaves = take("torch.utils._pytree.tree_leaves")


class GatheredWeights:
    """The gathered parameters of a unit, whose forward must not change them: the shards would keep their values."""

    def __init__(self, names: Mapping[Any, str], changed: list[str]) -> None:
        """``names``: of the parameters in the model, by torch's records of them; ``changed`` gets those of some."""
        self._names, self._changed = names, changed
        self._before: dict[Any, tuple[int, int]] = {}

    @uncompiled
    def begin(self, module: nn.Module, _: Any) -> None:
        # A cast from an earlier call, under no_grad, say, would get its gradient after the unit has reduced this one's.
        torch.clear_autocast_cache()
        with unwatched():
            self._before = fsdp2_internals.states_of_gathered(module)

    @uncompiled
    def check(self, module: nn.Module, *_: Any) -> None:
        with unwatched():
            for one, state in fsdp2_internals.states_of_gathered(module).items():
                # Parametrizations, such as peft's of parameters, write to a weight what it has.
                written = state != self._before.get(one) and fsdp2_internals.differs_from_shard(one)
                if written or fsdp2_internals.is_replaced(one):
                    self._changed.append(self._names[one])


class UnitOutput:
    """The output of a unit, so that autograd calls the hook that gathers the unit for the backward.

    It would call none of a view that the caller changes in place, so the tensors are no views, but share the memory.
    ``fully_shard`` finds no tensors in objects of other classes; without the hook, the backward reads freed memory.
    """

    def __init__(self) -> None:
        self._first = 0  # autograd's number of the first operation of the unit

    @uncompiled  # of experts, a unit in a block
    def begin(self, *_: Any) -> None:
        self._first = torch._C._autograd._get_sequence_nr()

    @uncompiled
    def prepare(self, module: Any, _: Any, output: Any) -> Any:
        output = map_tensors(lambda tensor: tensor if tensor._base is None else _NoView.apply(tensor), output)
        leaves = tree_leaves(output)
        for tensor in leaves:
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(_refuse_graph)  # before that of fully_shard, which gathers the unit
        if torch.is_grad_enabled() and not all(isinstance(leaf, torch.Tensor) for leaf in leaves):
            seen = set(map(id, leaves))
            hidden = [
                tensor if tensor._base is None else tensor._base
                for tensor in held_tensors(output)
                if id(tensor) not in seen
            ]
            # An object may also carry tensors of earlier units.
            made = [tensor for tensor in hidden if tensor.grad_fn and tensor.grad_fn._sequence_nr() >= self._first]
            if made:
                module._get_fsdp_state()._register_pre_backward_hook(made)
        return output


def _refuse_graph(_: torch.Tensor) -> None:
    """Raise a ConfigError in a backward that is recorded for another one, which would read freed parameters."""
    if torch.is_grad_enabled():
        raise ConfigError(
            "parallel.data.shard: got create_graph=True, expected gradients of the first order, because the backward "
            "of a backward does not gather parameters; set data.shard to 1, and zero=1 to share the optimizer's state"
        )


class _NoView(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, view: torch.Tensor) -> torch.Tensor:
        return view.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient
