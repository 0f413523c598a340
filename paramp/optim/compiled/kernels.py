"""The step of a range of a buffer as one function of tensors, which Inductor compiles to one loop.

Widen the gradient, unscale and clip it, step the master, round it to the weight: every value is read once and written
once. What changes from step to step (learning rate, step count, scale) is in a tensor of coefficients, so that nothing
is compiled again; what differs otherwise is a :class:`Variant`, each compiled once in a process.

Inductor's loops for CPUs have two limits. They are not vectorised over int16. And a 16-bit element that is both read
and written in place costs a failed store-to-load forwarding for each vector. So on a CPU a kernel reads and writes
remainders in int32, and writes weights beside the old ones; its caller copies both while they are in the cache.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Options = Mapping[str, Any]
Update = tuple[torch.Tensor, list[torch.Tensor]]


@dataclass(frozen=True)
class Family:
    """The arithmetic of one kind of optimizer."""

    coefficients: Callable[[torch.Tensor, torch.Tensor], Sequence[torch.Tensor]]
    """``(options, steps)`` -> the coefficients but the first, the gradient's factor. ``options`` are columns in the
    order of :attr:`options`, one row for each range, and ``steps`` the number of the step; all float64."""
    options: Callable[[Options], tuple[float, ...]]
    """A group's options as numbers; the first is the learning rate, 0 if that is a tensor."""
    update: Callable[[torch.Tensor, torch.Tensor, Sequence[torch.Tensor], torch.Tensor, Variant], Update]
    """``(value, gradient, state, coefficients, variant)`` -> the new value and state, all in one dtype."""


def _rate(group: Options) -> float:
    return 0.0 if torch.is_tensor(group["lr"]) else float(group["lr"])


def _adam_options(group: Options) -> tuple[float, ...]:
    decay, (beta1, beta2) = float(group["weight_decay"]), group["betas"]
    decoupled = bool(group.get("decoupled_weight_decay"))
    return _rate(group), decay * decoupled, decay * (not decoupled), float(beta1), float(beta2), float(group["eps"])


def _adam_coefficients(options: torch.Tensor, steps: torch.Tensor) -> Sequence[torch.Tensor]:
    lr, decay, l2, beta1, beta2, eps = options.unbind(1)
    inverse_root = (1 - beta2**steps).rsqrt()
    return 1 - lr * decay, l2, 1 - beta1, beta2, 1 - beta2, lr / (1 - beta1**steps), inverse_root, eps


def _adam(
    value: torch.Tensor, gradient: torch.Tensor, state: Sequence[torch.Tensor], c: torch.Tensor, variant: Variant
) -> Update:
    exp_avg, exp_avg_sq, *largest = state
    if variant.has_l2:
        gradient = gradient + c[2] * value
    exp_avg = exp_avg + c[3] * (gradient - exp_avg)
    exp_avg_sq = c[4] * exp_avg_sq + c[5] * gradient * gradient
    largest = [torch.maximum(one, exp_avg_sq) for one in largest]
    root = (largest[0] if largest else exp_avg_sq).sqrt()
    return c[1] * value - c[6] * exp_avg / (root * c[7] + c[8]), [exp_avg, exp_avg_sq, *largest]


def _sgd_options(group: Options) -> tuple[float, ...]:
    return _rate(group), float(group["weight_decay"]), float(group["momentum"])


def _sgd_coefficients(options: torch.Tensor, _: torch.Tensor) -> Sequence[torch.Tensor]:
    return options.unbind(1)


def _sgd(
    value: torch.Tensor, gradient: torch.Tensor, state: Sequence[torch.Tensor], c: torch.Tensor, variant: Variant
) -> Update:
    if variant.has_l2:
        gradient = gradient + c[2] * value
    momentum = [c[3] * one + gradient for one in state]
    change = momentum[0] if momentum else gradient
    if variant.nesterov:
        change = gradient + c[3] * change
    return value - c[1] * change, momentum


ADAM = Family(_adam_coefficients, _adam_options, _adam)
SGD = Family(_sgd_coefficients, _sgd_options, _sgd)
FAMILIES: dict[type[torch.optim.Optimizer], Family] = {
    torch.optim.Adam: ADAM,
    torch.optim.AdamW: ADAM,
    torch.optim.SGD: SGD,
}


@dataclass(frozen=True)
class Variant:
    """What is compiled for itself."""

    family: Family
    device: str
    weight: torch.dtype
    gradient: torch.dtype
    state: torch.dtype
    num_states: int
    has_master: bool
    has_remainder: bool
    nesterov: bool
    has_l2: bool
    """Whether it has L2 decay. A factor of 0 does not leave it out: the gradient of an infinite weight would be NaN."""


def step_function(variant: Variant) -> Callable[..., None]:
    """The step of a range, uncompiled; all tensors 1-dim, of one length.

    Called with ``(weight, master, remainder, gradient, state, coefficients, skip, rounded)``. ``master`` (fp32) and
    ``remainder`` (int16; on a CPU int32) are None where the variant has none. ``skip``, 0-dim bool, or None: step. The
    new value is written to the master, and rounded to ``rounded``, of the weight's dtype, or if that is None to the
    weight.
    """
    update = variant.family.update

    def step(
        weight: torch.Tensor,
        master: torch.Tensor | None,
        remainder: torch.Tensor | None,
        gradient: torch.Tensor,
        state: list[torch.Tensor],
        coefficients: torch.Tensor,
        skip: torch.Tensor | None,
        rounded: torch.Tensor | None,
    ) -> None:
        old = _exact(weight, master, remainder)
        dtype = old.dtype
        scaled = gradient.to(dtype) * coefficients[0]
        new, states = update(old, scaled, [one.to(dtype) for one in state], coefficients, variant)
        if skip is not None:
            new = torch.where(skip, old, new)
            states = [torch.where(skip, one.to(dtype), other) for one, other in zip(state, states, strict=True)]
        for one, other in zip(state, states, strict=True):
            one.copy_(other)
        if master is not None:
            master.copy_(new)
        if remainder is not None:
            remainder.copy_(left_over(new, new.to(weight.dtype)))
        (weight if rounded is None else rounded).copy_(new)

    # torch.compile counts recompilations, of which it allows a few, by code object.
    step.__code__ = step.__code__.replace(co_name=f"step_{len(_made)}")
    _made.append(variant)
    return step


_made: list[Variant] = []


@functools.cache
def compiled_step(variant: Variant, options: tuple[tuple[str, Any], ...]) -> Callable[..., None]:
    """:func:`step_function`, compiled with Inductor's ``options``; compiling takes seconds, in its first call."""
    settings = dict(options) | {"emulate_precision_casts": True, "triton.cudagraphs": False}
    return torch.compile(step_function(variant), dynamic=True, fullgraph=True, options=settings)


def _exact(weight: torch.Tensor, master: torch.Tensor | None, remainder: torch.Tensor | None) -> torch.Tensor:
    """The values to step: those of ``weight`` where the master does not round to it, because it was changed in place.

    Without ``emulate_precision_casts`` Inductor would drop the rounding.
    """
    wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
    exact = master if remainder is None else joined(weight, remainder)
    if exact is None:
        return wide
    return torch.where(exact.to(weight.dtype).to(wide.dtype) == wide, exact, wide)


def joined(weight: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """:func:`~paramp.optim.master_residuals.join` without operations in place."""
    wide = weight.float()
    bits = wide.view(torch.int32)
    if weight.dtype is torch.bfloat16:
        return (bits + remainder).view(torch.float32)
    exponent = (bits & 0x7F800000).clamp(113 << 23, 142 << 23)
    return wide - remainder.float() * (exponent - (26 << 23)).view(torch.float32)


def left_over(master: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The remainder of ``master`` (float32) over its rounding ``weight``: that of ``master_residuals.split``; int32."""
    wide = weight.float()
    bits = wide.view(torch.int32)
    exponent = bits & 0x7F800000
    if weight.dtype is torch.bfloat16:
        left, least = master.view(torch.int32) - bits, -(2**15)
    else:
        scale = exponent.clamp(113 << 23, 142 << 23)
        inverse = ((153 << 23) - scale + (127 << 23)).view(torch.float32)  # 1 / 2**(e - 26), exact
        left, least = ((wide - master) * inverse).round().to(torch.int32), 1 - 2**15
    return torch.where(exponent < 0x7F800000, left.clamp(least, 2**15 - 1), 0)
