"""The step of a range of a buffer as one function of tensors, which Inductor compiles to one loop.

Widen the gradient, unscale and clip it, step the master, round it to the weight: every value is read once and written
once. What changes from step to step (learning rate, step count, scale) is in a tensor of coefficients, so that nothing
is compiled again; what differs otherwise is a :class:`Variant`, each compiled once in a process.

Inductor's loops for CPUs have three limits:

- They are not vectorised over int16. So a kernel reads and writes remainders in int32, and its caller converts them
  while they are in the cache.
- They go over as many elements at once as a vector has in fp32, unless each of the loops that are fused has 16-bit
  elements (:func:`_store`).
- Going over fp32 vectors, a 16-bit vector is written by a masked store of twice its width. The load of the next one has
  to wait for it, if it is in the same tensor. So kernels with remainders, whose integers need the shorter loop, write
  weights beside the old ones, and their caller copies them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...base.torch_internals import expect, older_than

expect("torch._foreach_copy_")

DROPS_ROUNDINGS = older_than("2.13")
"""Whether Inductor's loops for CPUs keep fp32 values in place of those that were rounded to 16 bits, in spite of the
option ``emulate_precision_casts``."""

Options = Mapping[str, Any]


@dataclass(frozen=True)
class Family:
    """The arithmetic of one kind of optimizer."""

    coefficients: Callable[[torch.Tensor, torch.Tensor], Sequence[torch.Tensor]]
    """``(options, steps)`` -> the coefficients but the first, the gradient's factor. ``options`` are columns in the
    order of :attr:`options`, one row for each range, and ``steps`` the number of the step; all float64."""
    options: Callable[[Options], tuple[float, ...]]
    """A group's options as numbers; the first is the learning rate, 0 if that is a tensor."""
    state: Callable[[torch.Tensor, Sequence[torch.Tensor], torch.Tensor], list[torch.Tensor]]
    """``(gradient, state, coefficients)`` -> the new state, all in one dtype."""
    value: Callable[[torch.Tensor, torch.Tensor, Sequence[torch.Tensor], torch.Tensor, Variant], torch.Tensor]
    """``(value, gradient, new state, coefficients, variant)`` -> the new value."""


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


def _adam_state(gradient: torch.Tensor, state: Sequence[torch.Tensor], c: torch.Tensor) -> list[torch.Tensor]:
    exp_avg, exp_avg_sq, *largest = state
    exp_avg = exp_avg + c[3] * (gradient - exp_avg)
    exp_avg_sq = c[4] * exp_avg_sq + c[5] * gradient * gradient
    return [exp_avg, exp_avg_sq, *(torch.maximum(one, exp_avg_sq) for one in largest)]


def _adam_value(
    value: torch.Tensor, _: torch.Tensor, state: Sequence[torch.Tensor], c: torch.Tensor, __: Variant
) -> torch.Tensor:
    return c[1] * value - c[6] * state[0] / (state[-1].sqrt() * c[7] + c[8])


def _sgd_options(group: Options) -> tuple[float, ...]:
    return _rate(group), float(group["weight_decay"]), float(group["momentum"])


def _sgd_coefficients(options: torch.Tensor, _: torch.Tensor) -> Sequence[torch.Tensor]:
    return options.unbind(1)


def _sgd_state(gradient: torch.Tensor, state: Sequence[torch.Tensor], c: torch.Tensor) -> list[torch.Tensor]:
    return [c[3] * one + gradient for one in state]


def _sgd_value(
    value: torch.Tensor, gradient: torch.Tensor, state: Sequence[torch.Tensor], c: torch.Tensor, variant: Variant
) -> torch.Tensor:
    change = state[0] if state else gradient
    if variant.nesterov:
        change = gradient + c[3] * change
    return value - c[1] * change


ADAM = Family(_adam_coefficients, _adam_options, _adam_state, _adam_value)
SGD = Family(_sgd_coefficients, _sgd_options, _sgd_state, _sgd_value)
FAMILIES: dict[type[torch.optim.Optimizer], Family] = {
    torch.optim.Adam: ADAM,
    torch.optim.AdamW: ADAM,
    torch.optim.SGD: SGD,
}


@dataclass(frozen=True, kw_only=True)
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
    family = variant.family
    store = _store if variant.device == "cpu" and not variant.has_remainder else _copy

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
        if variant.has_l2:
            scaled = scaled + coefficients[2] * old
        states = family.state(scaled, [one.to(dtype) for one in state], coefficients)
        if skip is not None:
            states = [torch.where(skip, one.to(dtype), other) for one, other in zip(state, states, strict=True)]
        states = [store(one, other) for one, other in zip(state, states, strict=True)]
        new = family.value(old, scaled, states, coefficients, variant)
        if skip is not None:
            new = torch.where(skip, old, new)
        if master is not None:
            new = store(master, new)
        if remainder is not None:
            store(remainder, left_over(new, weight.dtype))
        (weight if rounded is None else rounded).copy_(new)

    # torch.compile counts recompilations, of which it allows a few, by code object.
    step.__code__ = step.__code__.replace(co_name=f"step_{len(_made)}")
    _made.append(variant)
    return step


_made: list[Variant] = []


class InductorOptions(dict[str, Any]):
    """Options for Inductor, as a part of a cache's key."""

    def __hash__(self) -> int:  # type: ignore[override]  # a dict has none, as it may change; these do not
        return hash(repr(sorted(self.items())))


def inductor_options(compile_options: Options | None) -> InductorOptions | None:
    """Inductor's own options among those for ``torch.compile``; None if nothing is compiled, or by another backend."""
    if compile_options is None or compile_options.get("backend", "inductor") != "inductor":
        return None
    return InductorOptions(compile_options.get("options") or {})


def _store(target: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Store ``value``; returns what to read in its place.

    Inductor writes the result of a foreach operation to its target directly. After ``copy_``, or if ``value`` were used
    further, a loop of its own would copy it, which has no 16-bit elements; and Inductor goes over a vector of 16-bit
    elements at once only if all the loops that it fuses have some.
    """
    torch._foreach_copy_([target], [value])
    return target if target.dtype is value.dtype else value


def _copy(target: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """As :func:`_store`, for a GPU, on which Inductor fuses no foreach operations with others, and for remainders."""
    target.copy_(value)
    return value


@functools.cache
def compiled_step(variant: Variant, options: InductorOptions) -> Callable[..., None]:
    """:func:`step_function`, compiled with Inductor's ``options``; compiling takes seconds, in its first call."""
    settings = dict(options) | {"emulate_precision_casts": True, "triton.cudagraphs": False}
    return torch.compile(step_function(variant), dynamic=True, fullgraph=True, options=settings)


def _exact(weight: torch.Tensor, master: torch.Tensor | None, remainder: torch.Tensor | None) -> torch.Tensor:
    """The values to step: those of ``weight``, changed in place, where the master does not round to it."""
    wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
    exact = master if remainder is None else joined(weight, remainder)
    if exact is None:
        return wide
    return torch.where(rounded(exact, weight.dtype) == wide, exact, wide)


def rounded(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``value``, float32 or wider, rounded to ``dtype``; in its own dtype.

    Without ``emulate_precision_casts`` Inductor would drop the casts.
    """
    if DROPS_ROUNDINGS and dtype.itemsize == 2:
        return by_arithmetic(value, dtype)
    return value.to(dtype).to(value.dtype)


def by_arithmetic(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """:func:`rounded` of float32 to ``dtype``, float16 or bfloat16, without a cast; a zero may lose its sign."""
    bits = value.view(torch.int32)
    if dtype is torch.bfloat16:
        nearest = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).view(torch.float32)
        return torch.where(value.isnan(), value, nearest)  # whose bits may overflow
    # fp32 numbers near 1.5 * 2**13 * 2**e are as far apart as fp16 numbers from 2**e on.
    exponent = (bits & 0x7F800000).clamp(113 << 23, 143 << 23)
    shift = 1.5 * (exponent + (13 << 23)).view(torch.float32)
    nearest = (value + shift) - shift
    return torch.where(nearest.abs() > 65504.0, value * torch.inf, nearest)


def joined(weight: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """:func:`~paramp.optim.remainder_masters.join` without operations in place."""
    wide = weight.float()
    bits = wide.view(torch.int32)
    if weight.dtype is torch.bfloat16:
        return (bits + remainder).view(torch.float32)
    exponent = (bits & 0x7F800000).clamp(min=113 << 23)
    return wide - remainder.float() * (exponent - (26 << 23)).view(torch.float32)


def left_over(master: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The remainder of ``master`` (float32) over its rounding to ``dtype``, as ``remainder_masters.split``; int32."""
    wide = rounded(master, dtype)
    bits = wide.view(torch.int32)
    exponent = bits & 0x7F800000
    if dtype is torch.bfloat16:
        left, least = master.view(torch.int32) - bits, -(2**15)
    else:
        inverse = ((24 << 23) - exponent.clamp(min=113 << 23)).view(torch.float32)  # -1 / 2**(e - 26), exact
        left, least = ((master - wide) * inverse).round().to(torch.int32), 1 - 2**15
    return torch.where(exponent < 0x7F800000, left.clamp(least, 2**15 - 1), 0)
