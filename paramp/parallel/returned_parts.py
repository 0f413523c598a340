"""Refuses a model that returns what a ``colwise`` layer returns: on each tensor rank another part of the features.

A criterion would take the part for the whole, and most of them train on it without an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..base.dtensor import is_dtensor
from ..base.errors import ConfigError
from ..base.trees import tensors
from ..base.wrapped_models import is_compiled
from .compiled_blocks import EAGER
from .shape_errors import PLAN_ENTRY

RETURNS_PART = "_paramp_returns_part"
"""The attribute of a module that a plan shards: whether it returns this rank's part of its features, a plain tensor."""


def refuse_returned_parts(model: nn.Module) -> None:
    """Check the first output of ``model`` in training, and the first in evaluation; the same on every tensor rank.

    Its forward raises a ConfigError if a tensor of them is what the last sharded layer has returned, or a view of it.
    """
    if any(getattr(module, RETURNS_PART, False) for module in model.modules()):
        outputs = _FirstOutputs()
        outputs.hooks = [model.register_forward_pre_hook(outputs.begin), model.register_forward_hook(outputs.check)]


class _FirstOutputs:
    """The outputs of a model that are still to be checked."""

    def __init__(self) -> None:
        self.hooks: list[RemovableHandle] = []  # of the model, until both are checked
        self._modes = {True, False}  # training, evaluation
        self._handles: list[RemovableHandle] = []
        self._last: tuple[nn.Module, torch.Tensor] | None = None  # what the last sharded layer returned, if a part

    def begin(self, model: nn.Module, _: Any) -> None:
        self._end()  # of a forward that failed
        if model.training in self._modes:
            self._handles = [module.register_forward_hook(self._see) for module in _sharded(model)]

    def _see(self, module: nn.Module, _: Any, output: Any) -> None:
        self._last = (module, output) if getattr(module, RETURNS_PART) and isinstance(output, torch.Tensor) else None

    def check(self, model: nn.Module, _: Any, output: Any) -> None:
        last = self._last
        self._end()
        if last is not None and any(_share_memory(last[1], one) for one in tensors(output)):
            name = next(name for name, module in model.named_modules() if module is last[0])
            raise ConfigError(
                f"{getattr(last[0], PLAN_ENTRY)}: the model returns what {name!r} does, which on each tensor rank is "
                "its part of the features; choose colwise_gather for it, or, for logits that cross_entropy gets, "
                "vocab_logits (for sequence_colwise: sequence_vocab_logits)"
            )
        self._modes.discard(model.training)
        if not self._modes:
            for hook in self.hooks:
                hook.remove()

    def _end(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._last = [], None


def _sharded(module: nn.Module) -> Iterator[nn.Module]:
    """The modules in ``module`` that a plan shards, without those in compiled blocks, which hooks would make eager."""
    if is_compiled(module) or EAGER in vars(module):
        return
    if hasattr(module, RETURNS_PART):
        yield module
    for child in module.children():
        yield from _sharded(child)


def _share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    if is_dtensor(other) or other.layout is not torch.strided or not one.numel():
        return False
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
