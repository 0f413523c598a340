"""NVIDIA's Transformer Engine: its recipe, the conversion of torch's layers to its layers, and its float8 context."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..base.errors import ConfigError, nearest

HOOKS = (
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
    *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    *("_backward_pre_hooks", "_backward_hooks"),
)


def transformer_engine_recipe(options: Mapping[str, Any] | None) -> Any:
    """Transformer Engine's ``DelayedScaling`` with ``options``; ``fp8_format`` may be a name such as ``"HYBRID"``."""
    te = importlib.import_module("transformer_engine.common.recipe")
    given = dict(options or {})
    known = list(inspect.signature(te.DelayedScaling).parameters)
    for name in given:
        if name not in known:
            expected = f"expected some of {', '.join(known)}{nearest(name, known)}"
            raise ConfigError(f"te_recipe: DelayedScaling has no {name!r}, {expected}")
    wanted = given.get("fp8_format")
    if isinstance(wanted, str):
        formats = list(te.Format.__members__)
        if wanted not in formats:
            expected = f"expected one of {', '.join(formats)}{nearest(wanted, formats)}"
            raise ConfigError(f"te_recipe: fp8_format: got {wanted!r}, {expected}")
        given["fp8_format"] = te.Format[wanted]
    try:
        return te.DelayedScaling(**given)
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(f"te_recipe: DelayedScaling does not accept {dict(options or {})}: {error}") from None


def engine_layer(old: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Transformer Engine's counterpart of a Linear or LayerNorm, with its parameters (of ``dtype``), hooks and mode."""
    te = importlib.import_module("transformer_engine.pytorch")
    new: nn.Module
    if isinstance(old, nn.Linear):
        options = {"bias": old.bias is not None, "params_dtype": dtype, "device": old.weight.device}
        new = te.Linear(old.in_features, old.out_features, **options)
    else:
        assert isinstance(old, nn.LayerNorm)
        new = te.LayerNorm(old.normalized_shape[0], eps=old.eps)
    for name, parameter in old.named_parameters(recurse=False):
        setattr(new, name, parameter)
    for name in HOOKS:
        getattr(new, name).update(getattr(old, name))
    return new.train(old.training)


def engine_autocast(recipe: Any, group: dist.ProcessGroup | None) -> Any:
    """A context in which its layers compute in float8; maxima for the scales are reduced over ``group``."""
    te = importlib.import_module("transformer_engine.pytorch")
    if hasattr(te, "autocast"):
        return te.autocast(enabled=True, recipe=recipe, amax_reduction_group=group)
    return te.fp8_autocast(enabled=True, fp8_recipe=recipe, fp8_group=group)  # before Transformer Engine 2.9
