"""Weights in a trial: where all elements of a parameter are one value, its own may hide what a stage computes.

A table of positions that is 0, a gate that is 0 before a layer, or a head of zeros give the same outputs whatever the
stage does with tokens. So each element of such a parameter gets another value for the trial, and its own after it.

A forward that changes parameters is refused: each rank would compute them from its own tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from ...base.dtensor import local
from ...base.errors import ConfigError
from ...base.uncompiled import unwatched
from ...base.wrapped_models import is_unit
from ..fsdp import fsdp2_internals

BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""An integer of as many bytes as an element has."""
LEAST = 0.03
"""By what elements move at least, relative to a value above 1; at most by twice that, up or down."""


@contextmanager
def varied(stage: nn.Module) -> Iterator[None]:
    """A context in which no parameter of ``stage``, which runs, has the same finite value in all its elements.

    Ranks move replicas alike. The parameters have their own bits after it, and no version counter moves: values are
    written through ``.data``. Units of FSDP2 inside of ``stage`` gather both.
    """
    units = [module for module in stage.modules() if is_unit(module) and module is not stage]
    _free_gathered(units)
    with unwatched():
        constant = _constant(stage)
    try:
        with unwatched():
            for place, values, own in constant:
                noise = torch.Generator(values.device).manual_seed(place)
                values.uniform_(-LEAST, LEAST, generator=noise)
                values.add_(values.sign(), alpha=LEAST).mul_(own.abs().clamp(min=1)).add_(own)
        _free_gathered(units)
        yield
    finally:
        _free_gathered(units)
        for _, values, own in constant:
            values.view(BITS[values.itemsize]).copy_(own.view(BITS[values.itemsize]))  # which tells -0 from 0
        _free_gathered(units)


def _constant(stage: nn.Module) -> list[tuple[int, torch.Tensor, torch.Tensor]]:
    """The place, the values on this rank and the first of them, 0-dim, of each parameter whose elements are equal."""
    every = []
    for place, parameter in enumerate(stage.parameters()):
        values = local(parameter).data
        dense = values.layout is torch.strided and 0 not in values.stride() and values.numel() > 0
        if dense and values.is_floating_point() and values.itemsize in BITS and not values.is_meta:
            every.append((place, values, values[(0,) * values.ndim].clone()))
    if not every:
        return []
    equal = [
        (values.view(BITS[values.itemsize]) == own.view(BITS[own.itemsize])).all() & own.isfinite()
        for _, values, own in every
    ]
    found = torch.stack(equal).tolist()
    return [one for one, is_equal in zip(every, found, strict=True) if is_equal]


def _free_gathered(units: list[nn.Module]) -> None:
    """Let ``units`` gather, on streams of their own, what has been written until now."""
    for unit in units:
        for group in fsdp2_internals.groups(unit):
            fsdp2_internals.drop_prefetched(group)
        unit.reshard()  # type: ignore[operator]
    if units and torch.accelerator.is_available():
        torch.accelerator.synchronize()


@contextmanager
def refusing_other_values(stage: nn.Module) -> Iterator[None]:
    """A context that raises a ConfigError for a parameter of ``stage`` that has other values after it.

    Unlike :func:`~paramp.base.dtensor.refusing_changes` it finds changes through ``.data``, and allows those to the
    values that were there, as of peft. It finds no other order of the same values, and asks no quantized tensors.
    """
    dense = [(name, one) for name, one in stage.named_parameters() if type(local(one).data) is torch.Tensor]
    weights = [(name, one, _sum_of_bits(one)) for name, one in dense]
    yield
    changed = [_sum_of_bits(one) != before for _, one, before in weights]
    if changed and torch.stack(changed).any():
        name = next(name for (name, _, _), is_changed in zip(weights, changed, strict=True) if is_changed)
        raise ConfigError(
            f"parallel.context.size: the forward changes the parameter {name!r}, which each rank would compute from "
            "its own tokens; change it between steps, or set the size to 1"
        )


def _sum_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of the elements as integers, in which NaN is equal to itself; 0-dim int64."""
    values = local(tensor).data
    with unwatched():
        return values.reshape(-1).view(torch.uint8 if values.itemsize == 1 else torch.int16).sum()
