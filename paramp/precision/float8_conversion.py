"""Float8 training of linear layers, with torchao or NVIDIA's Transformer Engine.

A float8 number has 3 mantissa bits and a maximum of 448 (e4m3, for inputs and weights), or 2 bits and 57344 (e5m2, for
gradients; Micikevicius et al., "FP8 Formats for Deep Learning", 2022). So each operand is first multiplied by a scale
that maps its largest element to that maximum:

    scale_x = 448 / max |x|        x8 = e4m3(scale_x * x)        x w^T  ~  (x8 w8^T) / (scale_x scale_w)

and the two products of the backward likewise. ``tensorwise`` has one scale per tensor; ``rowwise`` one for each row
or column that a product sums over, rounded down to a power of two. Weights, gradients, masters and activations keep
the mode's other dtypes; only the operands of these products are rounded, and sums run in fp32.

Under tensor parallelism the operands are DTensors, from which torchao gets the largest element over all ranks. So the
result does not depend on the layout.

A cast to float8 saturates, so that an infinity in a gradient may become finite. Every converted layer therefore checks
the gradient of its output before the cast, and sets a flag on the device that the engine counts as an overflow. With
torchao's scales the input needs no check: an infinite element makes the scale zero and the output NaN. Transformer
Engine scales by the largest elements of earlier steps and saturates, so its layers check the input too.
"""

from __future__ import annotations

import logging
import math
import types
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ..base.dtensor import local
from ..base.module_surgery import run_within, turn_off_fast_path
from .capabilities import Library, find_library
from .choose_float8_layers import MULTIPLE, Choice, choose_layers
from .modes import Float8, Precision
from .transformer_engine import engine_autocast, engine_layer, transformer_engine_recipe


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
    """Convert the chosen layers of ``module`` to float8, if the mode has such layers.

    Call it on modules that are on their device, before a tensor-parallel plan is applied. Parameters, their names
    and hooks do not change.

    Args:
        choice: made on the whole model, of which ``module`` may be a pipeline stage. None: made on ``module``.
        tensor_size: the number of ranks over which the layers will be sharded.
        overflow: 0-dim, on the device; set to 1 when a layer gets a gradient that is not finite.
        group: ranks that run the same layers on other data, for Transformer Engine's scales.
        verbose: print which layers compute in float8, and with which library.

    Returns ``module``, or a new one if it is itself a linear layer. Raises ConfigError if no suitable library is
    installed, or Transformer Engine does not accept the recipe.
    """
    float8 = precision.float8
    if float8 is None:
        return module
    library = find_library(float8, device, tensor_size)
    choice = choice or choose_layers(module, float8, tensor_size=tensor_size)
    if verbose:
        _report(choice, library, float8, precision)
    if library.saturates:
        module = _with_transformer_engine(module, choice, precision, group)
    else:
        module = _with_torchao(module, choice, float8, library.emulated)
    flag = torch.zeros((), device=device) if overflow is None else overflow
    _report_overflow(module, choice, flag, library.saturates)
    turn_off_fast_path(module, choice.linear)
    return module


def _report_overflow(module: nn.Module, choice: Choice, flag: torch.Tensor, saturates: bool) -> None:
    """Make the chosen layers of ``module`` set ``flag`` when they get a gradient that is not finite."""
    probe = torch.zeros_like(flag, requires_grad=True)
    probe.grad = flag
    for name, layer in module.named_modules():
        if name in choice.linear:  # a method, so that a deep copy uses its own flag
            forward = types.MethodType(_forward, layer)
            own = {"overflow_flag": flag, "_probe": probe, "_inputs_saturate": saturates, "forward": forward}
            layer.__dict__.update(own)


def _report(choice: Choice, library: Library, float8: Float8, precision: Precision) -> None:
    if not choice.linear:
        named = "the model has none" if float8.modules == Float8().modules else "modules matches none of the model's"
        why = "; ".join(f"{reason}: {_listing(names)}" for reason, names in choice.kept.items()) or named
        warnings.warn(
            f"precision: {precision.name!r} converts no linear layer to float8 ({why}), so all "
            f"compute in {precision.compute}",
            stacklevel=3,
        )
        return
    scales = float8.recipe if library.name == "torchao" else "delayed"
    unused = "; its te_recipe has no effect there" if float8.te_recipe and library.name == "torchao" else ""
    kept = "".join(f"; not {_listing(names)} ({reason})" for reason, names in choice.kept.items())
    print(
        f"paramp: {len(choice.linear)} linear layers compute in float8 with {scales} scales{kept}. "
        f"On {library.reason}{unused}.",
        flush=True,
    )


def _listing(names: Collection[str], most: int = 3) -> str:
    shown = [name or "the model" for name in names][:most]
    return ", ".join(shown) + (f" and {len(names) - most} more" if len(names) > most else "")


def _replace(module: nn.Module, names: Collection[str], make: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """Replace the modules of ``module`` called ``names`` by ``make`` of them; a shared module is replaced once."""
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


def _with_transformer_engine(
    module: nn.Module, choice: Choice, precision: Precision, group: dist.ProcessGroup | None
) -> nn.Module:
    assert precision.float8 is not None
    recipe = transformer_engine_recipe(precision.float8.te_recipe)
    module = _replace(module, {*choice.linear, *choice.norms}, lambda old: engine_layer(old, precision.weights))
    run_within(module, lambda _: engine_autocast(recipe, group))
    return module


def _with_torchao(module: nn.Module, choice: Choice, float8: Float8, emulated: bool) -> nn.Module:
    with _quiet_import():
        from torchao.float8 import (  # type: ignore[import-untyped]
            Float8GemmConfig,
            Float8LinearConfig,
            convert_to_float8_training,
        )
    config = replace(
        Float8LinearConfig.from_recipe_name(float8.recipe),
        emulate=emulated,
        pad_inner_dim=not emulated,  # the products need a multiple of 16 tokens; if it is one, padding costs nothing
        gemm_config_output=Float8GemmConfig(use_fast_accum=False),  # on Hopper its sums have fewer bits than fp32
    )

    def make(old: nn.Module) -> nn.Module:
        new: nn.Module = convert_to_float8_training(old, config=config)
        new.__dict__.update(old.__dict__)  # its parameters, hooks, mode and any other attributes
        return new

    return _replace(module, choice.linear, make)


@contextmanager
def _quiet_import() -> Iterator[None]:
    """Suppress log messages during the import of torchao, about kernels for other machines and about torch."""

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


def _forward(layer: Any, input: torch.Tensor) -> torch.Tensor:
    """The layer's forward, which sets its flag on an overflow.

    The input is cast as autocast casts the input of a Linear, which torchao does only for CUDA's autocast.
    """
    x, device = input, input.device.type
    if torch.is_autocast_enabled(device):
        x = x.to(torch.get_autocast_dtype(device))
    if layer._inputs_saturate and torch.is_grad_enabled():
        _flag_overflow(layer.overflow_flag, x)
    with torch.autocast(device, enabled=False):
        output: torch.Tensor = _whole_products(layer, x) if layer._inputs_saturate else type(layer).forward(layer, x)
    if torch.compiler.is_compiling():
        return _Probe.apply(output, layer._probe)
    if output.requires_grad:
        flag = layer.overflow_flag
        output.register_hook(lambda gradient: _flag_overflow(flag, gradient))
    return output


def _whole_products(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """The output of Transformer Engine's ``layer``, which takes a multiple of 16 tokens only: zeros are added to ``x``.

    They change neither the largest elements nor, because their outputs are cut off again, a gradient.
    """
    tokens = x.reshape(-1, x.shape[-1])
    missing = -len(tokens) % MULTIPLE
    if not missing:
        whole: torch.Tensor = type(layer).forward(layer, x)
        return whole
    output: torch.Tensor = type(layer).forward(layer, F.pad(tokens, (0, 0, 0, missing)))[: len(tokens)]
    return output.reshape(*x.shape[:-1], -1)


class _Probe(torch.autograd.Function):
    """``output``, whose gradient is checked in a compiled backward, which can have neither hooks nor side effects.

    So whether it is not finite is the gradient of ``probe``, 0-dim, which autograd adds to the flag.
    """

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, probe: torch.Tensor) -> torch.Tensor:
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return gradient, (~gradient.isfinite()).any().float()


@torch.no_grad()
def _flag_overflow(flag: torch.Tensor, value: torch.Tensor) -> None:
    """Set the 0-dim ``flag`` if an element of this rank's part of ``value`` is not finite; no synchronisation."""
    part = local(value)
    if part.numel():
        largest = torch.linalg.vector_norm(part, math.inf)  # NaN stays NaN
        flag.logical_or_(~torch.isfinite(largest))
