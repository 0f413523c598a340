"""Elementwise functions whose bits depend on the value of an element only, not on where it is in memory.

torch computes an elementwise function on vectors of 16 to 64 elements, and what is left at the end of a tensor, or what
is strided, with other code, whose bits differ. Here a function runs on contiguous memory whose size is a multiple of
all vector widths; the gradient in its backward too. The mode sets torch to one thread, whose part has one end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, cast

import torch

WIDTH = 128
"""Elements; a multiple of twice the elements of the widest vector, by which torch's loops advance."""


def elementwise(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Tensor:
    """``func``, an elementwise function of torch, perhaps one that changes its first argument in place."""
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
    shape = torch.broadcast_shapes(*(tensor.shape for tensor in tensors))
    if shape.numel() == 0:
        return cast(torch.Tensor, func(*args, **kwargs))
    in_place = _is_in_place(func)
    if in_place and args[0].shape != shape:
        return cast(torch.Tensor, func(*args, **kwargs))  # torch's error
    dtype = _dtype([tensor.dtype for tensor in tensors if tensor.ndim])
    size = math.ceil(shape.numel() / WIDTH) * WIDTH
    flat = [_flat(value, shape, size, dtype) for value in args]
    named = {name: _flat(value, shape, size, dtype) for name, value in kwargs.items()}
    if in_place and flat[0].data_ptr() == args[0].data_ptr():
        flat[0] = flat[0].clone()
    output = func(*flat, **named)
    output = output[: shape.numel()].view(shape)  # the gradient of a slice is contiguous
    return args[0].copy_(output) if in_place else output


def with_contiguous_gradient(output: torch.Tensor) -> torch.Tensor:
    """``output``, whose function gets a contiguous copy of its gradient."""
    if output.requires_grad:
        output.register_hook(_contiguous_copy)
    return output


def _contiguous_copy(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.clone(memory_format=torch.contiguous_format)


def _is_in_place(func: Callable[..., Any]) -> bool:
    return func.__name__.endswith("_") and not func.__name__.endswith("__")


def _dtype(dtypes: list[torch.dtype]) -> torch.dtype | None:
    """The dtype to which torch promotes tensors of ``dtypes``; a tensor of no dims has no influence on it."""
    return reduce(torch.promote_types, dtypes) if dtypes else None


def _flat(value: Any, shape: torch.Size, size: int, dtype: torch.dtype | None) -> Any:
    """``value``, if it is a tensor, broadcast to ``shape``, then contiguous, in one dim, padded to ``size``."""
    if not isinstance(value, torch.Tensor):
        return value
    if not value.ndim and len(shape):
        if not value.requires_grad:
            return value
        value = value if dtype is None or not dtype.is_floating_point else value.to(dtype)
    value = expanded(value, shape).reshape(-1)
    padding = size - value.numel()
    if not padding:
        return value.contiguous()
    # at 1/2 these functions and most derivatives are finite, and integers divide by 1
    return torch.cat([value, value.new_full((padding,), 0.5 if value.is_floating_point() else 1)])


def expanded(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """``tensor`` broadcast to ``shape``; its gradient is added element by element, in one fixed tree."""
    if tensor.shape == torch.Size(shape):
        return tensor
    if not tensor.requires_grad or not torch.is_grad_enabled():
        return tensor.expand(*shape)
    return cast(torch.Tensor, _Expanded.apply(tensor, tuple(shape)))


class _Expanded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        ctx.shape = tensor.shape
        return tensor.expand(shape)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        dtype, added = gradient.dtype, gradient.ndim - len(ctx.shape)
        total = gradient.float() if dtype.itemsize < 4 else gradient  # rounded once, as by torch's sum
        for dim, size in enumerate(gradient.shape):
            if dim < added or ctx.shape[dim - added] != size:
                total = _sum(total, dim)
        return total.reshape(ctx.shape).to(dtype), None


def _sum(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """The sum over ``dim``, which becomes 1, in a tree that depends on its size only."""
    while (size := tensor.shape[dim]) > 1:
        first, second, rest = tensor.split([size // 2, size // 2, size % 2], dim)
        tensor = torch.cat([first + second, rest], dim) if size % 2 else first + second
    return tensor


def with_expanded_operands(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """``func``, exact elementwise arithmetic; operands that it broadcasts have the gradients of :func:`expanded`."""
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
    if not any(tensor.requires_grad for tensor in tensors):
        return func(*args, **kwargs)
    shape = torch.broadcast_shapes(*(tensor.shape for tensor in tensors))
    dtype = _dtype([tensor.dtype for tensor in tensors if tensor.ndim])

    def operand(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.requires_grad or value.shape == shape:
            return value
        if not value.ndim and dtype is not None and dtype.is_floating_point:
            value = value.to(dtype)
        return expanded(value, shape)

    return func(*map(operand, args), **{name: operand(value) for name, value in kwargs.items()})


def gated(input: torch.Tensor, dim: int, sigmoid: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """``F.glu``: the first half of ``input`` along ``dim`` times the sigmoid of the second."""
    first, second = input.chunk(2, dim)
    return first * sigmoid(second)
