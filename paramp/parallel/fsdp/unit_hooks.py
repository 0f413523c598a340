"""Hooks of the forward of a unit of FSDP2: what its output and its gathered weights need around torch's own hooks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ...base.errors import ConfigError
from ...base.held_tensors import held_tensors
from ...base.torch_internals import expect, take
from ...base.trees import map_tensors, tensors
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
    def refuse_replaced(self, module: nn.Module, _: Any) -> None:
        """Raise a ConfigError for a parameter that the caller has replaced: the unit would gather its own over it."""
        for one in fsdp2_internals.replaced(module):
            raise ConfigError(
                f"parallel.data.shard: {self._names[one]!r} has another tensor in its place, as by "
                "torch.func.functional_call, expected the parameter, because a block gathers its own before its "
                "forward; call functional_call there, of a module in the block, or set data.shard to 1"
            )

    @uncompiled
    def begin(self, module: nn.Module, _: Any) -> None:
        # A cast from an earlier call, under no_grad, say, would get its gradient after the unit has reduced this one's.
        torch.clear_autocast_cache()
        with unwatched():
            self._before = fsdp2_internals.states_of_gathered(module)

    @uncompiled
    def check(self, module: nn.Module, *_: Any) -> None:
        with unwatched():
            replaced = fsdp2_internals.replaced(module)
            for one, state in fsdp2_internals.states_of_gathered(module).items():
                # Parametrizations, such as peft's of parameters, write to a weight what it has.
                written = state != self._before.get(one) and fsdp2_internals.differs_from_shard(one)
                if written or one in replaced:
                    self._changed.append(self._names[one])


class UnitOutput:
    """The output of a unit, so that autograd calls the hook that gathers the unit for the backward.

    It would call none of a view that the caller changes in place, so a view becomes a tensor of its own with the same
    memory. Tensors of one base stay views, since what changes one changes the others: there their base has the hook.
    ``fully_shard`` finds no tensors in objects of other classes; without the hook, the backward reads freed memory.
    """

    def __init__(self) -> None:
        self._first = 0  # autograd's number of the first operation of the unit

    @uncompiled  # of experts, a unit in a block
    def begin(self, *_: Any) -> None:
        self._first = torch._C._autograd._get_sequence_nr()

    @uncompiled
    def prepare(self, module: Any, _: Any, output: Any) -> Any:
        sharing = Counter(id(_base(tensor)) for tensor in tensors(output))

        def without_view(tensor: torch.Tensor) -> torch.Tensor:
            base = _base(tensor)
            is_kept = base is tensor or (sharing[id(base)] > 1 and self._has_made(base))
            return tensor if is_kept else _NoView.apply(tensor)

        output = map_tensors(without_view, output)
        leaves = tree_leaves(output)
        for tensor in leaves:
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(_refuse_graph)  # before that of fully_shard, which gathers the unit
        if torch.is_grad_enabled() and not all(isinstance(leaf, torch.Tensor) for leaf in leaves):
            seen = set(map(id, leaves))
            hidden = [_base(tensor) for tensor in held_tensors(output) if id(tensor) not in seen]
            # An object may also carry tensors of earlier units.
            made = [tensor for tensor in hidden if self._has_made(tensor)]
            if made:
                module._get_fsdp_state()._register_pre_backward_hook(made)
        return output

    def _has_made(self, tensor: torch.Tensor) -> bool:
        return tensor.grad_fn is not None and tensor.grad_fn._sequence_nr() >= self._first


def hook_bases(own: Callable[[Any], Any], output: Any) -> Any:
    """Call ``own``, fully_shard's method that registers its hook on an ``output``, with bases in place of views."""
    bases = map_tensors(_base, output)
    hooked = own(bases)
    return hooked if bases is output else output


def _base(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that ``tensor`` is a view of, or itself."""
    return tensor if tensor._base is None else tensor._base


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
