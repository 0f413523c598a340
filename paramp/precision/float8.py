"""Linear layers whose products run in 8 bits, in training: on torchao, or on NVIDIA's Transformer Engine.

A float8 number has 3 bits of mantissa and reaches 448 (e4m3, for inputs and weights), or 2 bits and 57344 (e5m2, for
gradients; Micikevicius et al., "FP8 Formats for Deep Learning", 2022). So each operand is first multiplied by a scale
that takes its largest element to the end of the range:

    scale_x = 448 / max |x|        x8 = e4m3(scale_x * x)        x w^T  ~  (x8 w8^T) / (scale_x scale_w)

and likewise the two products of the backward. ``tensorwise`` has one scale for a tensor; ``rowwise`` one for each row
or column that a product sums over, rounded down to a power of two. Weights, gradients, masters and everything between
the layers stay in the mode's other dtypes; only the operands of these products are rounded, and sums run in fp32.

Under tensor parallelism the operands are DTensors, and torchao asks them for their largest element: that of all ranks.
So what is computed does not depend on the layout.

A cast to float8 saturates: an overflow in a gradient may come out of it finite, or not. Every converted layer therefore
looks at the gradient of its output before the cast, and raises a flag on the device that the engine counts as an
overflow. Of torchao's scales the input needs no such look: an infinite element makes the scale zero and the output NaN.
Transformer Engine scales by what it saw in earlier steps and saturates, so there the input is looked at too.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import math
import types
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from ..base.dtensor import local
from ..base.errors import ConfigError, nearest
from ..base.globs import matches
from ..base.module_surgery import run_within
from ..base.optional_packages import find_torchao, find_transformer_engine
from .policy import Float8, Precision

__all__ = ["Choice", "Library", "choose_layers", "convert", "find_library", "transformer_engine_recipe"]

MULTIPLE = 16
"""What both sizes of a layer have to be multiples of, for the float8 products of a GPU."""
NATIVE_CAPABILITY = (8, 9)
"""The first GPUs that multiply in float8: Ada, then Hopper."""


@dataclass(frozen=True, kw_only=True)
class Library:
    """What the float8 layers of a mode run on here; see :func:`find_library`."""

    name: Literal["torchao", "transformer_engine"]
    emulated: bool
    """Operands are rounded to float8 and multiplied in fp32: the same numbers, without the speed."""
    reason: str
    """A sentence for the user."""


def find_library(float8: Float8, device: torch.device | str, tensor_size: int = 1) -> Library:
    """What float8 layers run on, on ``device`` and over ``tensor_size`` tensor-parallel ranks. Imports none of it.

    Raises:
        ConfigError: nothing that would do is installed.
    """
    without = _why_not_native(torch.device(device))
    instead = ""
    if float8.transformer_engine:
        engine = find_transformer_engine()
        if not engine.found:
            instead = f" in place of Transformer Engine ({engine.reason})"
        elif without:
            instead = f" in place of Transformer Engine, as {without}"
        elif tensor_size > 1:
            instead = " in place of Transformer Engine, whose layers do not take the DTensors of tensor parallelism"
        else:
            return Library(name="transformer_engine", emulated=False, reason=engine.reason)
    torchao = find_torchao()
    if not torchao.found:
        what = "Transformer Engine or torchao" if float8.transformer_engine else "torchao"
        raise ConfigError(f"precision: float8 layers need {what}{instead}, but {torchao.reason}")
    emulated = f", emulated: {without}; the numbers are the same, the speed is not" if without else ""
    return Library(name="torchao", emulated=bool(without), reason=f"{torchao.reason}{instead}{emulated}")


def _why_not_native(device: torch.device) -> str:
    if device.type != "cuda":
        return f"a {device.type.upper()} has no float8 products"
    capability = torch.cuda.get_device_capability(device)
    if capability >= NATIVE_CAPABILITY:
        return ""
    return f"this GPU has compute capability {capability[0]}.{capability[1]}, and float8 products begin with 8.9"


# ------------------------------------------------------------------------------------------------ which layers


@dataclass(frozen=True)
class Choice:
    """Which layers of a model compute in float8, by their names in the whole model."""

    linear: tuple[str, ...]
    norms: tuple[str, ...]
    """Layer norms that Transformer Engine takes over."""
    left: Mapping[str, tuple[str, ...]]
    """Why other linear layers that the mode names keep their dtype -> which."""


def choose_layers(
    model: nn.Module,
    float8: Float8,
    sharded_dims: Mapping[str, int] | None = None,
    tensor_size: int = 1,
) -> Choice:
    """Which layers of the whole ``model`` compute in float8, the same on every rank.

    Those that ``float8.modules`` names and ``float8.skip`` does not, unless they could not: a size is no multiple of
    16, here or on a rank's shard; the layer computes something of its own; an embedding uses its weight.

    Args:
        sharded_dims: the dim of the weight (outputs, inputs) that a tensor-parallel plan shards, by module.

    Raises:
        ConfigError: a glob of the user's that matches no module.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    default = Float8()
    for option in ("modules", "skip"):
        for pattern in getattr(float8, option):
            if pattern not in getattr(default, option) and not any(matches(name, pattern) for name in modules):
                raise ConfigError(
                    f"precision: {option} has {pattern!r}, which no module of the model matches"
                    f"{nearest(pattern, modules)}"
                )
    tables = {id(module.weight) for module in modules.values() if isinstance(module, nn.Embedding)}
    linear: list[str] = []
    norms: list[str] = []
    left: dict[str, list[str]] = {}
    for name, module in modules.items():
        if not any(matches(name, pattern) for pattern in float8.modules):
            continue
        skipped = any(matches(name, pattern) for pattern in float8.skip)
        if isinstance(module, nn.LayerNorm) and not skipped and _is_plain_norm(module):
            norms.append(name)
        if not isinstance(module, nn.Linear):
            continue
        dim = (sharded_dims or {}).get(name)
        why = "named in skip" if skipped else _why_left(module, tables, dim, tensor_size)
        if why:
            left.setdefault(why, []).append(name)
        else:
            linear.append(name)
    return Choice(tuple(linear), tuple(norms), {why: tuple(names) for why, names in left.items()})


def _why_left(module: nn.Linear, tables: Collection[int], dim: int | None, tensor_size: int) -> str:
    computed_elsewhere = isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear)
    own = type(module).forward is not nn.Linear.forward or "forward" in module.__dict__
    if own or computed_elsewhere or "weight" not in module._parameters:
        return "they compute something of their own"
    if id(module.weight) in tables:
        return "an embedding uses their weight"
    sizes = list(module.weight.shape)
    if any(size % MULTIPLE for size in sizes):
        return f"a size is no multiple of {MULTIPLE}"
    if dim is not None and sizes[dim] % (MULTIPLE * tensor_size):
        return f"a sharded size is no multiple of {MULTIPLE} x parallel.tensor.size {tensor_size}"
    return ""


def _is_plain_norm(module: nn.LayerNorm) -> bool:
    own = type(module).forward is not nn.LayerNorm.forward or "forward" in module.__dict__
    return not own and len(module.normalized_shape) == 1 and module.elementwise_affine and module.bias is not None


# -------------------------------------------------------------------------------------------------- conversion


def convert(
    module: nn.Module,
    precision: Precision,
    device: torch.device,
    *,
    choice: Choice | None = None,
    tensor_size: int = 1,
    overflow: torch.Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    verbose: bool = True,
) -> nn.Module:
    """Let the chosen layers of ``module`` compute in float8, where the mode has such layers.

    Call it on modules that are on their device and before a tensor-parallel plan is applied. Parameters stay what they
    are, under their names; so do hooks and whatever else a layer has.

    Args:
        choice: of the whole model, of which ``module`` may be a pipeline stage; by default that of ``module``.
        tensor_size: over how many ranks the layers are going to be sharded.
        overflow: 0-dim tensor on the device, which becomes 1 when a layer is given a gradient that is not finite.
        group: ranks that run the same layers on other data, for Transformer Engine's scales.
        verbose: say on standard output which layers compute in float8, and on what.

    Returns:
        ``module``; a new one if it is itself a linear layer.

    Raises:
        ConfigError: nothing that would do is installed, or Transformer Engine does not take the recipe.
    """
    precision = Precision.parse(precision)
    float8 = precision.float8
    if float8 is None:
        return module
    library = find_library(float8, device, tensor_size)
    if choice is None:
        choice = choose_layers(module, float8, tensor_size=tensor_size)
    flag = torch.zeros((), device=device) if overflow is None else overflow
    if verbose:
        _report(choice, library, float8, precision)
    if library.name == "transformer_engine":
        recipe = transformer_engine_recipe(float8.te_recipe)
        module = _replace(module, {*choice.linear, *choice.norms}, lambda old: _engine_layer(old, precision.weights))
        run_within(module, lambda _: _engine_autocast(recipe, group))
    else:
        module = _with_torchao(module, choice, float8, library.emulated)
    for name, layer in module.named_modules():
        if name in choice.linear:
            _watch(layer, flag, inputs=library.name == "transformer_engine")
    return module


def _report(choice: Choice, library: Library, float8: Float8, precision: Precision) -> None:
    if not choice.linear:
        named = "the model has none" if float8.modules == Float8().modules else "modules names none of the model's"
        why = "; ".join(f"{reason}: {_listing(names)}" for reason, names in choice.left.items()) or named
        warnings.warn(
            f"precision: {precision.name!r} converts no linear layer to float8 ({why}), so all "
            f"compute in {precision.compute}",
            stacklevel=3,
        )
        return
    scales = float8.recipe if library.name == "torchao" else "delayed"
    unused = "; its te_recipe has no effect there" if float8.te_recipe and library.name == "torchao" else ""
    left = "".join(f"; not {_listing(names)} ({reason})" for reason, names in choice.left.items())
    print(
        f"paramp: {len(choice.linear)} linear layers compute in float8 with {scales} scales{left}. "
        f"On {library.reason}{unused}.",
        flush=True,
    )


def _listing(names: Collection[str], most: int = 3) -> str:
    shown = [name or "the model" for name in names][:most]
    return ", ".join(shown) + (f" and {len(names) - most} more" if len(names) > most else "")


def _replace(module: nn.Module, names: Collection[str], make: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """``module`` with what ``make`` makes of each of its modules called ``names``; one for each that is shared."""
    made: dict[int, nn.Module] = {}
    for name, old in list(module.named_modules(remove_duplicate=False)):
        if name not in names:
            continue
        if id(old) not in made:
            made[id(old)] = make(old)
        if not name:
            return made[id(old)]
        owner, _, leaf = name.rpartition(".")
        module.get_submodule(owner)._modules[leaf] = made[id(old)]
    return module


# ----------------------------------------------------------------------------------------------------- torchao


def _with_torchao(module: nn.Module, choice: Choice, float8: Float8, emulated: bool) -> nn.Module:
    with _quiet_import():
        from torchao.float8 import (  # type: ignore[import-untyped]
            Float8LinearConfig,
            convert_to_float8_training,
        )
    # Padding costs nothing where the number of tokens is a multiple of 16 already, which the products need.
    config = replace(Float8LinearConfig.from_recipe_name(float8.recipe), emulate=emulated, pad_inner_dim=not emulated)

    def make(old: nn.Module) -> nn.Module:
        new: nn.Module = convert_to_float8_training(old, config=config)
        new.__dict__.update(old.__dict__)  # its parameters, hooks, mode and whatever else it was given
        return new

    return _replace(module, choice.linear, make)


@contextmanager
def _quiet_import() -> Iterator[None]:
    """Keeps back what torchao says while it is imported, of kernels that it has for other machines and of torch."""

    def allow(record: logging.LogRecord) -> bool:
        text = record.getMessage()
        return not (text.startswith("Failed to load ") or "register_constant() on Enum subclasses" in text)

    loggers = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
    for logger in loggers:
        logger.addFilter(allow)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(allow)


# ------------------------------------------------------------------------------------------ Transformer Engine


def transformer_engine_recipe(options: Mapping[str, Any] | None) -> Any:
    """Transformer Engine's ``DelayedScaling`` of ``options``, its ``fp8_format`` by name such as ``"HYBRID"``.

    Raises:
        ConfigError: an option that it does not have or take.
    """
    te = importlib.import_module("transformer_engine.common.recipe")
    given = dict(options or {})
    known = list(inspect.signature(te.DelayedScaling).parameters)
    for name in given:
        if name not in known:
            raise ConfigError(
                f"te_recipe: DelayedScaling has no {name!r}, expected some of {', '.join(known)}{nearest(name, known)}"
            )
    wanted = given.get("fp8_format")
    if isinstance(wanted, str):
        formats = list(te.Format.__members__)
        if wanted not in formats:
            raise ConfigError(
                f"te_recipe: fp8_format: got {wanted!r}, expected one of {', '.join(formats)}{nearest(wanted, formats)}"
            )
        given["fp8_format"] = te.Format[wanted]
    try:
        return te.DelayedScaling(**given)
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(f"te_recipe: DelayedScaling does not take {dict(options or {})}: {error}") from None


def _engine_layer(old: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Transformer Engine's counterpart of a Linear or LayerNorm, with its parameters, hooks and mode."""
    te = importlib.import_module("transformer_engine.pytorch")
    new: nn.Module
    if isinstance(old, nn.Linear):
        new = te.Linear(
            old.in_features,
            old.out_features,
            bias=old.bias is not None,
            params_dtype=dtype,
            device=old.weight.device,
        )
    else:
        assert isinstance(old, nn.LayerNorm)
        new = te.LayerNorm(old.normalized_shape[0], eps=old.eps)
    for name, parameter in old.named_parameters(recurse=False):
        setattr(new, name, parameter)
    for name in HOOKS:
        getattr(new, name).update(getattr(old, name))
    return new.train(old.training)


HOOKS = (
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
    *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    *("_backward_pre_hooks", "_backward_hooks"),
)


def _engine_autocast(recipe: Any, group: dist.ProcessGroup | None) -> Any:
    te = importlib.import_module("transformer_engine.pytorch")
    if hasattr(te, "autocast"):
        return te.autocast(enabled=True, recipe=recipe, amax_reduction_group=group)
    return te.fp8_autocast(enabled=True, fp8_recipe=recipe, fp8_group=group)  # before Transformer Engine 2.9


# ---------------------------------------------------------------------------------------------------- overflow


def _watch(layer: nn.Module, flag: torch.Tensor, *, inputs: bool) -> None:
    """Give ``layer`` a forward of its own; see :func:`_forward`."""
    layer.__dict__["_overflow"] = flag
    layer.__dict__["_inputs_saturate"] = inputs
    layer.__dict__["forward"] = types.MethodType(_forward, layer)  # a method, so that a deep copy computes with its own


def _forward(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """The layer's own forward, with overflows noted in its flag.

    What autocast would do to a Linear is done to the input: torchao does it for CUDA's autocast alone.
    """
    device = x.device.type
    if torch.is_autocast_enabled(device):
        x = x.to(torch.get_autocast_dtype(device))
    if layer._inputs_saturate and torch.is_grad_enabled():
        _note(layer._overflow, x)
    with torch.autocast(device, enabled=False):
        output: torch.Tensor = type(layer).forward(layer, x)
    if output.requires_grad:
        flag = layer._overflow
        output.register_hook(lambda gradient: _note(flag, gradient))
    return output


@torch.no_grad()
def _note(flag: torch.Tensor, value: torch.Tensor) -> None:
    """Raise ``flag`` if an element of this rank's part of ``value`` is not finite, without waiting for the device."""
    part = local(value)
    if part.numel():
        largest = torch.linalg.vector_norm(part, math.inf)  # NaN stays NaN
        flag.logical_or_(~torch.isfinite(largest))
