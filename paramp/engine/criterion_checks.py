"""Checks of losses: that there is one, of no weight that FSDP2 has sharded, and of no parameter that nothing steps."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from ..base.dtensor import full_tensor, is_dtensor, version
from ..base.errors import ConfigError
from .user_arguments import engine_of


def required(loss: Any) -> Any:
    """The model's own ``loss``; a ValueError if it is None."""
    if loss is None:
        raise ValueError(
            "criterion: initialize got none, and the model's output has no loss; pass one as its third argument, "
            "or return a mapping or dataclass with a loss"
        )
    return loss


def gathered(value: Any, axes: Sequence[str]) -> Any:
    """What a criterion has computed, gathered if it is a DTensor: of outputs, which are sharded over ``axes``.

    Raises:
        ConfigError: it is of a shard of a weight, whose gradient would be of this rank's samples alone.
    """
    if is_dtensor(value) and value.requires_grad and not {*(value.device_mesh.mesh_dim_names or ())} <= {*axes}:
        raise ConfigError(
            "criterion: it uses a weight of which this rank has a shard (parallel.data.shard gathers those of a block "
            "while it is called only); compute what depends on weights in the model's forward, or use the optimizer's "
            "weight_decay"
        )
    return full_tensor(value)


def training_nothing_of(criterion: Any) -> Callable[[], AbstractContextManager[None]]:
    """Makes contexts for backwards; a ConfigError on exit if a parameter of the criterion's own got a gradient.

    A parameter that an engine trains may get one: that engine drops it before its next window. What a function refers
    to is not its own, because it may be a discriminator.
    """
    while isinstance(criterion, partial):
        criterion = criterion.func
    owner = getattr(criterion, "__self__", criterion)  # of a method
    # Another method than forward is like a function: its module may hold a discriminator, which something else trains.
    is_whole = owner is criterion or getattr(criterion, "__name__", "") == "forward"
    modules = () if not isinstance(owner, nn.Module) else owner.named_modules() if is_whole else [("", owner)]
    # Weak, because the whole model may be among its modules. Those in evaluation mode are of a fixed network.
    trained = [
        (name, weakref.ref(one))
        for path, module in modules
        if module.training
        for name, one in module.named_parameters(path, recurse=False)
        if one.requires_grad
    ]
    return partial(_training_none_of, trained) if trained else nullcontext


@contextmanager
def _training_none_of(named: Sequence[tuple[str, Callable[[], nn.Parameter | None]]]) -> Iterator[None]:
    before = [(name, one, _gradient(one)) for name, reference in named if (one := reference()) is not None]
    yield
    for name, one, (gradient, changes) in before:
        now, changes_now = _gradient(one)
        is_changed = now is not gradient or changes_now != changes
        if is_changed and engine_of.get(one, lambda: None)() is None:
            raise ConfigError(
                f"criterion: its parameter {name!r} got a gradient, which the engine neither unscales nor sums over "
                "ranks, nor steps; make the criterion a module of the model, whose forward computes the loss, or, "
                "for a fixed network, call its eval() before initialize, or freeze it with requires_grad_(False)"
            )


def _gradient(parameter: nn.Parameter) -> tuple[torch.Tensor | None, int]:
    """The gradient of ``parameter``, and a counter that grows with its changes in place."""
    gradient = parameter.grad
    return gradient, 0 if gradient is None else version(gradient)
