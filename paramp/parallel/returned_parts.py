"""Refuses a model that returns what a ``colwise`` layer returns: on each tensor rank another part of the features.

A criterion would take the part for the whole, and most of them train on it without an error. Of layers before the last
one the model may return it, as attention returns the keys for a cache, but no gradient may come from there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.hooks import RemovableHandle

from ..base.dtensor import is_dtensor
from ..base.errors import ConfigError
from ..base.trees import map_tensors
from ..base.wrapped_models import is_compiled
from .compiled_blocks import EAGER
from .shape_errors import PLAN_ENTRY

RETURNS_PART = "_paramp_returns_part"
"""The attribute of a module that a plan shards: whether it returns this rank's part of its features, a plain tensor."""


def refuse_returned_parts(model: nn.Module) -> None:
    """Check the first output of ``model`` in training, and the first in evaluation; the same on every tensor rank.

    Its forward raises a ConfigError if a tensor of them is what the last sharded layer has returned, or a view of it.
    The backward does for what an earlier one has returned, if the loss uses it; a model that returns such parts in
    training is checked each time.
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
        self._parts: dict[StorageWeakRef, nn.Module] = {}  # what sharded layers returned; does not keep its memory
        self._last: nn.Module | None = None  # the last of them, if it returned a part

    def begin(self, model: nn.Module, _: Any) -> None:
        self._end()  # of a forward that failed
        if model.training in self._modes:
            self._handles = [module.register_forward_hook(self._see) for module in _sharded(model)]

    def _see(self, module: nn.Module, _: Any, output: Any) -> None:
        is_part = getattr(module, RETURNS_PART) and _has_storage(output)
        self._last = module if is_part else None
        if is_part:
            self._parts[StorageWeakRef(output.untyped_storage())] = module

    def check(self, model: nn.Module, _: Any, output: Any) -> Any:
        last, parts = self._last, self._parts
        self._end()
        earlier = []

        def guarded(one: torch.Tensor) -> torch.Tensor:
            layer = parts.get(StorageWeakRef(one.untyped_storage())) if _has_storage(one) else None
            if layer is not None:
                name = next(name for name, module in model.named_modules() if module is layer)
                text = (
                    f"{getattr(layer, PLAN_ENTRY)}: the model returns what {name!r} does, which on each tensor rank is "
                    "its part of the features; choose colwise_gather for it, or, for logits that cross_entropy gets, "
                    "vocab_logits (for sequence_colwise: sequence_vocab_logits)"
                )
                if layer is last:
                    raise ConfigError(text)
                earlier.append(name)
                return _NoGradient.apply(one, text) if one.requires_grad else one
            return one

        output = map_tensors(guarded, output)
        if not (earlier and model.training):
            self._modes.discard(model.training)
        if not self._modes:
            for hook in self.hooks:
                hook.remove()
        return output

    def _end(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._parts, self._last = [], {}, None


class _NoGradient(torch.autograd.Function):
    """A part, for which a gradient is the error ``text``."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, text: str) -> torch.Tensor:
        ctx.text = text
        return part.detach()

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> NoReturn:
        raise ConfigError(ctx.text)


def _sharded(module: nn.Module) -> Iterator[nn.Module]:
    """The modules in ``module`` that a plan shards, without those in compiled blocks, which hooks would make eager."""
    if is_compiled(module) or EAGER in vars(module):
        return
    if hasattr(module, RETURNS_PART):
        yield module
    for child in module.children():
        yield from _sharded(child)


def _has_storage(one: Any) -> bool:
    return isinstance(one, torch.Tensor) and not is_dtensor(one) and one.layout is torch.strided
