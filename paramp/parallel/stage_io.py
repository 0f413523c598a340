"""What crosses a cut between two pipeline stages, and how it travels.

The values at a cut are a tree of tensors and other things. torch's schedules hand over floating-point tensors, each of
which gets a gradient back; so

    a tensor that depends on weights            travels as it is, in the compute dtype
    any other (tokens, masks, tables)           travels unchanged, the bytes of all in one tensor
    numbers, shapes, None, tuples of those      do not travel: for one shape of the batch they are the same each time

A :class:`StageOutput` says which is which, for one cut and one shape of the batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from ..base.errors import ConfigError
from ..precision.policy import Precision

__all__ = ["StageOutput"]

NUMBERS = (int, float, complex, str, type(None), type(...), slice, range, torch.Size)
KINDS = (torch.dtype, torch.device, torch.layout, torch.memory_format)


@dataclass(frozen=True)
class Moving:
    """A floating-point tensor that gradients come back for."""

    shape: torch.Size
    dtype: torch.dtype


@dataclass(frozen=True)
class Fixed:
    """A tensor without gradients."""

    shape: torch.Size
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


@dataclass(frozen=True)
class Constant:
    """A value that is no tensor."""

    value: Any


class _Together(torch.autograd.Function):
    """Copies of tensors, each of which gets a gradient as soon as one of them has one: zeros if it is not used."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(tensor.clone() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return gradients


@dataclass(frozen=True)
class StageOutput:
    """The values at one cut."""

    tree: Any
    """The values, each replaced by what is known of it: :class:`Moving`, :class:`Fixed` or :class:`Constant`."""

    @property
    def leaves(self) -> list[Moving | Fixed | Constant]:
        return tree_leaves(self.tree)

    @staticmethod
    def describe(values: Any, precision: Precision) -> StageOutput:
        """The parcel for ``values``, which were computed with gradients enabled.

        Raises:
            ConfigError: something among them cannot travel.
        """
        return StageOutput(tree_map(lambda value: _describe(value, precision), values))

    def pack(self, values: Any, device: torch.device) -> tuple[torch.Tensor, ...]:
        """The tensors to send for ``values``, on ``device``.

        Raises:
            ConfigError: ``values`` are not what the parcel was made for.
        """
        given, spec = tree_flatten(values)
        leaves, expected = tree_flatten(self.tree)
        if spec != expected or not all(map(_fits, leaves, given)):
            raise ConfigError(
                "pipeline: what a stage hands on changed between two batches of one shape, from "
                f"{self.tree} to {values}; numbers and shapes at a cut may depend on the shape of the batch only, so "
                "pass what depends on its values as tensors, or cut elsewhere"
            )
        moving = [
            _plain(value).to(device, leaf.dtype).contiguous()
            for leaf, value in zip(leaves, given, strict=True)
            if isinstance(leaf, Moving)
        ]
        fixed = [
            _plain(value).detach().to(device)
            for leaf, value in zip(leaves, given, strict=True)
            if isinstance(leaf, Fixed)
        ]
        if fixed or not moving:
            carrier = torch.zeros(self._carrier_size, device=device)
            _write(fixed, carrier)
            moving.append(carrier.requires_grad_(torch.is_grad_enabled()))
        return tuple(moving)

    def unpack(self, tensors: tuple[torch.Tensor, ...], device: torch.device, weights: torch.dtype) -> Any:
        """The values in what :meth:`pack` gave, on ``device``, moving ones in the dtype ``weights``."""
        if len(tensors) > 1:
            tensors = _Together.apply(*tensors)
        moving = iter(tensors)
        fixed = _read(tensors[-1].detach(), [leaf for leaf in self.leaves if isinstance(leaf, Fixed)])

        def value(leaf: Moving | Fixed | Constant) -> Any:
            if isinstance(leaf, Moving):
                return next(moving).to(device, weights)
            if isinstance(leaf, Fixed):
                return next(fixed).to(device)
            return device if isinstance(leaf.value, torch.device) else leaf.value

        return tree_map(value, self.tree)

    def metas(self, requires_grad: bool) -> tuple[torch.Tensor, ...]:
        """What :meth:`pack` gives, on ``meta``."""
        metas = [
            torch.empty(leaf.shape, dtype=leaf.dtype, device="meta", requires_grad=requires_grad)
            for leaf in self.leaves
            if isinstance(leaf, Moving)
        ]
        if len(metas) < sum(not isinstance(leaf, Constant) for leaf in self.leaves) or not metas:
            metas.append(torch.empty(self._carrier_size, device="meta", requires_grad=requires_grad))
        return tuple(metas)

    @property
    def _carrier_size(self) -> int:
        """In fp32 numbers."""
        return -(-sum(leaf.num_bytes for leaf in self.leaves if isinstance(leaf, Fixed)) // 4) or 1


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _describe(value: Any, precision: Precision) -> Moving | Fixed | Constant:
    if isinstance(value, torch.Tensor):
        shape = _plain(value).shape
        moves = value.requires_grad and value.is_floating_point()
        return Moving(shape, precision.compute) if moves else Fixed(shape, value.dtype)
    if isinstance(value, (*NUMBERS, *KINDS)):
        return Constant(value)
    raise ConfigError(
        f"pipeline: a stage hands on {type(value).__name__}, expected tensors, numbers, strings, None, or tuples, "
        "lists and dicts of them; return those, or cut elsewhere (parallel.pipeline.split)"
    )


def _fits(leaf: Moving | Fixed | Constant, value: Any) -> bool:
    if isinstance(leaf, Constant):
        return isinstance(value, torch.device) or bool(value == leaf.value)
    if not isinstance(value, torch.Tensor) or _plain(value).shape != leaf.shape:
        return False
    return value.dtype == leaf.dtype if isinstance(leaf, Fixed) else value.is_floating_point()


def _write(tensors: list[torch.Tensor], carrier: torch.Tensor) -> None:
    if tensors:
        joined = torch.cat([tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in tensors])
        carrier.view(torch.uint8)[: joined.numel()] = joined


def _read(carrier: torch.Tensor, leaves: list[Fixed]) -> Iterator[torch.Tensor]:
    start = 0
    for leaf in leaves:
        part = carrier.view(torch.uint8)[start : start + leaf.num_bytes]
        start += leaf.num_bytes
        yield part.clone().view(leaf.dtype).reshape(leaf.shape)  # copied, because a view has to be aligned
