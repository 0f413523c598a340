"""Data sent from one pipeline stage to the next: hidden states, and other values that its modules return.

A stage returns a tree of tensors and other values. torch's schedules send floating-point tensors, each of which gets a
gradient back. Therefore

    a tensor that depends on weights            is sent in the compute dtype (reproducible: in its own)
    one of them without dims, such as a loss    is sent in its own dtype: its gradient is as large as the loss scale
    one of them in fp64, such as a sum          is sent in fp64: the compute dtype may not hold it
    other tensors (tokens, masks, tables)       are sent unchanged, the bytes of all of them in one tensor
    numbers, shapes, None, tuples of those      are not sent: they are constant for one shape of the batch

A :class:`StageOutput` describes such a tree, for one stage and one shape of the batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..base.dtensor import is_dtensor
from ..base.errors import ConfigError
from ..base.trees import leaves, map_leaves, tensors
from ..parallel.batch_key import CONSTANTS


class SentTensor:
    """A tensor of a stage's output. Not a dataclass, which would be a part of the tree and not a leaf of it."""

    def __init__(self, shape: torch.Size, dtype: torch.dtype, *, has_gradient: bool, overlaps: bool = False) -> None:
        self.shape = shape
        self.dtype = dtype
        self.has_gradient = has_gradient
        """Whether a gradient is sent back; else the tensor's bytes are sent."""
        self.overlaps = overlaps
        """Whether in one process it would share memory with another tensor of the output, as a view of it does."""

    def __repr__(self) -> str:
        return f"{tuple(self.shape)} {self.dtype}"

    @property
    def num_bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


class Constant:
    """A value that is not a tensor."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return repr(self.value)


class _Copied(torch.autograd.Function):
    """Copies of tensors. If any of them gets a gradient, all do: zeros for those that are not used.

    The gradients are made contiguous, because schedules that split the backward send them without a copy.
    """

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(tensor.clone() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(gradient.contiguous() for gradient in gradients)


@dataclass(frozen=True)
class StageOutput:
    """The description of a stage's output, as it is sent to the next stage."""

    tree: Any
    """The output with each value replaced by a :class:`SentTensor` or a :class:`Constant`."""

    @staticmethod
    def describe(values: Any, dtype: torch.dtype | None, overlapping: Sequence[torch.Tensor] = ()) -> StageOutput:
        """Describe ``values``, a stage's output that was computed with gradients enabled.

        ``dtype``: of the differentiable tensors that are sent. None: their own. ``overlapping``: those that the stage
        has got as copies, but which share memory in one process.
        """
        sent = list(map(plain, tensors(values)))
        received = sum(any(_share_memory(one, other) for other in overlapping) for one in sent)

        def described(path: str, value: Any) -> SentTensor | Constant:
            leaf = _describe(path, value, dtype)
            if isinstance(leaf, SentTensor):
                count = sum(_share_memory(plain(value), other) for other in sent)  # with itself too
                leaf.overlaps = count > 1 or (
                    received > 1 and any(_share_memory(plain(value), other) for other in overlapping)
                )
            return leaf

        return StageOutput(map_leaves(described, values))

    def overlapping(self, values: Any) -> list[torch.Tensor]:
        """Those of the received ``values`` that would share memory with others in one process."""
        pairs = zip(leaves(self.tree), leaves(values), strict=True)
        return [value for (_, leaf), (_, value) in pairs if isinstance(leaf, SentTensor) and leaf.overlaps]

    def pack(self, values: Any, device: torch.device) -> tuple[torch.Tensor, ...]:
        """The tensors to send for ``values``, which have to match the description, on ``device``."""
        output, expected = list(leaves(values)), list(leaves(self.tree))
        same = [path for path, _ in output] == [path for path, _ in expected]
        if not same or not all(_fits(leaf, value) for (_, leaf), (_, value) in zip(expected, output, strict=True)):
            raise ConfigError(
                "pipeline: the output of a stage changed between two batches of the same shape, from "
                f"{self.tree} to {values}, or a tensor has a gradient that the first one had not; expected numbers, "
                "shapes and gradients that depend on the batch's shape only: return values that depend on the data as "
                "tensors, use the same weights in each batch, or split elsewhere"
            )
        differentiable: list[torch.Tensor] = []
        fixed: list[torch.Tensor] = []
        for (_, leaf), (_, value) in zip(expected, output, strict=True):
            if isinstance(leaf, Constant):
                continue
            if leaf.has_gradient:
                differentiable.append(plain(value).to(device, leaf.dtype).contiguous())
            else:
                fixed.append(plain(value).detach().to(device).contiguous().reshape(-1).view(torch.uint8))
        if fixed or not differentiable:
            carrier = torch.zeros(self._carrier_size, device=device)
            if fixed:
                carrier.view(torch.uint8)[: sum(map(len, fixed))] = torch.cat(fixed)
            differentiable.append(carrier.requires_grad_(torch.is_grad_enabled()))
        return tuple(differentiable)

    def unpack(self, tensors: tuple[torch.Tensor, ...], device: torch.device, dtype: torch.dtype | None) -> Any:
        """The values packed in ``tensors``, on ``device``; differentiable ones in ``dtype``, or as they were sent."""
        if torch.is_grad_enabled():
            tensors = _Copied.apply(*tensors)
        differentiable = iter(tensors)
        fixed = _read(tensors[-1].detach(), self._fixed)

        def value(_: str, leaf: SentTensor | Constant) -> Any:
            if isinstance(leaf, Constant):
                return device if isinstance(leaf.value, torch.device) else leaf.value
            if leaf.has_gradient:
                return next(differentiable).to(device, _dtype_of(leaf, dtype))
            return next(fixed).to(device)

        return map_leaves(value, self.tree)

    def metas(self, requires_grad: bool) -> tuple[torch.Tensor, ...]:
        """Tensors on ``meta`` with the shapes and dtypes of those that :meth:`pack` returns."""
        metas = [
            torch.empty(leaf.shape, dtype=leaf.dtype, device="meta", requires_grad=requires_grad)
            for _, leaf in leaves(self.tree)
            if isinstance(leaf, SentTensor) and leaf.has_gradient
        ]
        if self._fixed or not metas:
            metas.append(torch.empty(self._carrier_size, device="meta", requires_grad=requires_grad))
        return tuple(metas)

    @property
    def _fixed(self) -> list[SentTensor]:
        """The tensors without a gradient."""
        return [leaf for _, leaf in leaves(self.tree) if isinstance(leaf, SentTensor) and not leaf.has_gradient]

    @property
    def _carrier_size(self) -> int:
        """The number of fp32 elements of the tensor that carries the fixed tensors' bytes."""
        return -(-sum(leaf.num_bytes for leaf in self._fixed) // 4) or 1


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The local part of ``tensor``, differentiably."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def _describe(path: str, value: Any, dtype: torch.dtype | None) -> SentTensor | Constant:
    if isinstance(value, torch.Tensor):
        if is_dtensor(value) and not all(placement.is_replicate() for placement in value.placements):
            raise ConfigError(
                f"pipeline: a stage returns a tensor that is sharded over ranks{path and f' at {path}'}, as logits of "
                "'vocab_logits' and outputs of torch's SequenceParallel() are, and the next one would get this rank's "
                "part only; split behind what computes with it (parallel.pipeline.split), let the plan gather it "
                "('colwise_gather'), or, if the next stage computes with parts, return these: "
                "SequenceParallel(use_local_output=True)"
            )
        shape = plain(value).shape
        differentiable = value.requires_grad and value.is_floating_point()
        if value.requires_grad and value.is_complex():
            raise ConfigError(
                f"pipeline: a stage returns a {value.dtype} tensor with a gradient{path and f' at {path}'}, expected "
                "real ones; return torch.view_as_real of it, or split elsewhere (parallel.pipeline.split)"
            )
        if differentiable and dtype is None and not plain(value).is_contiguous():
            raise ConfigError(
                f"reproducible: a pipeline stage returns a strided tensor{path and f' at {path}'}, which the next one "
                "gets contiguous, so that kernels may give other bits than in one process; split elsewhere "
                "(parallel.pipeline.split), or return tensor.contiguous()"
            )
        return SentTensor(shape, _dtype_of(value, dtype if differentiable else None), has_gradient=differentiable)
    if isinstance(value, CONSTANTS):
        return Constant(value)
    raise ConfigError(
        f"pipeline: a stage returns {type(value).__name__}{path and f' at {path}'}, expected tensors, numbers, "
        "strings, None, or tuples, lists, mappings and dataclasses of them; change its output, or split elsewhere "
        "(parallel.pipeline.split)"
    )


def _share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether a change of ``one`` in place changes ``other``; parts of one tensor, such as query and key, may not."""
    storage = one.untyped_storage()
    if one.is_meta or not one.numel() or storage.data_ptr() != other.untyped_storage().data_ptr():
        return False
    if one is other:
        return True
    touched = torch.zeros(storage.nbytes(), dtype=torch.bool, device=one.device)
    _bytes_of(one, touched).fill_(True)
    return bool(_bytes_of(other, touched).any())


def _bytes_of(tensor: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """The elements of ``memory`` where ``tensor`` has its bytes in its storage; once each where it is expanded."""
    width = tensor.itemsize
    shape = [size if stride else 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    strides = [stride * width for stride in tensor.stride()]
    return memory.as_strided((*shape, width), (*strides, 1), tensor.storage_offset() * width)


def _dtype_of(value: torch.Tensor | SentTensor, dtype: torch.dtype | None) -> torch.dtype:
    """``dtype``, or that of a ``value`` which keeps its own: without dims, in fp64, or with None for ``dtype``."""
    return value.dtype if dtype is None or not value.shape or value.dtype is torch.float64 else dtype


def _fits(leaf: SentTensor | Constant, value: Any) -> bool:
    if isinstance(leaf, Constant):
        return isinstance(value, torch.device) or bool(value == leaf.value)
    if not isinstance(value, torch.Tensor) or plain(value).shape != leaf.shape:
        return False
    if leaf.has_gradient:
        return value.is_floating_point()
    return value.dtype == leaf.dtype and not (value.requires_grad and torch.is_grad_enabled())


def _read(carrier: torch.Tensor, parts: list[SentTensor]) -> Iterator[torch.Tensor]:
    start = 0
    for leaf in parts:
        part = carrier.view(torch.uint8)[start : start + leaf.num_bytes]
        start += leaf.num_bytes
        yield part.clone().view(leaf.dtype).reshape(leaf.shape)  # copied, because a view has to be aligned
