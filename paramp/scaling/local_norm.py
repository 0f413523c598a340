"""The part of a rank in the norm of a model: sums of powers over plain tensors, each element times its norm weight."""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence

import torch

from ..base import loop_block_sizes
from ..base.torch_internals import expect

expect("torch._foreach_norm")

Sums = Callable[[torch.Tensor], torch.Tensor]
"""The sum of squares of each row of a half-precision tensor, 2-dim with rows of ``NORM_BLOCK`` elements; 1-dim fp32."""


def norm_power(
    gradients: Sequence[torch.Tensor],
    norm_weights: Sequence[float],
    norm_type: float,
    device: torch.device,
    sums: Sums | None = None,
) -> torch.Tensor:
    """This rank's part of the norm of plain ``gradients``: sum of weight x |g|**p, or the maximum for p = inf.

    Args:
        gradients, norm_weights, norm_type: as for :func:`total_norm`.
        sums: the sums of squares of long half-precision gradients on a CPU, for p = 2; None: torch's own norms.

    Returns:
        0-dim float64 on ``device``. In float64 the p-th powers of fp32 norms do not overflow for p below 8.
    """
    by_place: dict[tuple[torch.device, torch.dtype], list[int]] = defaultdict(list)
    for index, gradient in enumerate(gradients):
        if norm_weights[index] and gradient.numel():
            by_place[gradient.device, gradient.dtype].append(index)
    parts = [torch.zeros((), dtype=torch.float64, device=device)]
    for (where, _), indices in by_place.items():
        powers = _powers([gradients[index] for index in indices], norm_type, sums)
        counts = _on_device(tuple(norm_weights[index] for index in indices), where)
        parts.append((powers.amax() if math.isinf(norm_type) else (powers * counts).sum()).to(device))
    return torch.stack(parts).amax() if math.isinf(norm_type) else torch.stack(parts).sum()


@functools.lru_cache(maxsize=64)
def _on_device(values: tuple[float, ...], device: torch.device) -> torch.Tensor:
    """``values`` as float64; cached, because a copy to a GPU synchronises."""
    return torch.tensor(values, dtype=torch.float64, device=device)


def _powers(gradients: Sequence[torch.Tensor], norm_type: float, sums: Sums | None) -> torch.Tensor:
    """The sum of |g|**p of each gradient (all of one device and dtype), or its maximum for p = inf; float64."""
    if gradients[0].device.type == "cpu":
        return torch.stack([_blocked_power(gradient, norm_type, sums) for gradient in gradients])
    # Powers of fp16 elements do not overflow in fp32; those of large fp32 and bf16 elements would.
    dtype = gradients[0].dtype
    wide = torch.float32 if dtype is torch.float16 else torch.promote_types(dtype, torch.float64)
    norms = torch.stack(torch._foreach_norm(list(gradients), norm_type, dtype=wide)).double()
    return norms if math.isinf(norm_type) else norms.pow(norm_type)


NORM_BLOCK = 512
"""Elements of a CPU tensor that are summed in fp32."""
LONG = 2**16
"""Elements from which :data:`Sums` are used: a call has its cost, and compiling takes seconds."""


def _blocked_power(gradient: torch.Tensor, norm_type: float, sums: Sums | None = None) -> torch.Tensor:
    """As :func:`_powers` for one gradient on the CPU, from the norms of short blocks, combined in float64.

    On a CPU torch sums all elements of a tensor in fp32, one after the other: for ten million elements the relative
    error of the 2-norm is 4e-4, of the 1-norm 1e-3. With blocks it is below 1e-7.
    """
    wide = torch.promote_types(gradient.dtype, torch.float32)
    flat = gradient.reshape(-1)
    if sums is not None and norm_type == 2 and flat.dtype is not wide and flat.numel() >= LONG:
        rest = flat.numel() % NORM_BLOCK
        power = sums(flat[: flat.numel() - rest].view(-1, NORM_BLOCK)).double().sum()
        if rest:
            power = power + _blocked_power(flat[-rest:], norm_type)
        return _finite_power(power, flat, norm_type)
    if flat.dtype is wide:
        norms = _block_norms(flat, norm_type)
    else:
        size = loop_block_sizes.WIDEN_BLOCK
        scratch, chunks = torch.empty(min(size, flat.numel()), dtype=wide), flat.split(size)
        norms = torch.cat([_block_norms(scratch[: chunk.numel()].copy_(chunk), norm_type) for chunk in chunks])
    if math.isinf(norm_type):
        return norms.double().amax()
    power = norms.double().pow(norm_type).sum()
    return _finite_power(power, flat, norm_type) if wide is torch.float32 else power


def _finite_power(power: torch.Tensor, flat: torch.Tensor, norm_type: float) -> torch.Tensor:
    """``power``; computed again in float64 if it is not finite: powers of large finite elements overflow in fp32."""
    if power.isfinite():
        return power
    return torch.linalg.vector_norm(flat.double(), norm_type).pow(norm_type)


def _block_norms(flat: torch.Tensor, norm_type: float) -> torch.Tensor:
    """The norm of each block of ``flat``, 1-dim."""
    whole = flat.numel() // NORM_BLOCK * NORM_BLOCK
    norms = torch.linalg.vector_norm(flat[:whole].view(-1, NORM_BLOCK), norm_type, dim=1)
    if whole == flat.numel():
        return norms
    return torch.cat([norms, torch.linalg.vector_norm(flat[whole:], norm_type).reshape(1)])
