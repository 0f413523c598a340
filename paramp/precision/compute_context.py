"""The context in which a model computes in a mode: autocast, the default dtype, and emulated fp16 products on a CPU.

On CUDA autocast widens operators that lose accuracy in half precision to fp32: norms, softmax, exponentials, powers,
sums, losses. On the CPU it does not: they run in the dtype of their input, so that a model gives different results.
:func:`computing` closes that gap: inside it the operators that CUDA's table widens compute in fp32 on the CPU too, and
products of experts in half, by kernels of paramp's (:mod:`.autocast_kernels`), which torch has while a context
is open, or what :func:`autocast_kernels` returns is kept. CPUs without fp16 arithmetic compute products of fp16 in fp32
(:mod:`.fp16_emulation_cpu`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch

from ..base.replaced_in_torch import REPLACED, replace_kernels
from .autocast_kernels import KEYS, depth, narrowed, operator_kernels
from .capabilities import has_native_fp16
from .fp16_emulation_cpu import emulate_fp16, fp16_kernels
from .modes import Precision


@dataclass(frozen=True)
class ComputeContext:
    """The compute context of one model on one device: of forward, criterion and backward."""

    precision: Precision
    device: torch.device
    emulation: bool | Literal["auto"] | None = "auto"
    """``emulate_fp16`` of the configuration. ``"auto"`` or None: if the device has no fp16 arithmetic."""
    cache: bool | None = None
    """False: autocast keeps no weights that it has cast, as they may change. None: as the caller has set it."""

    @functools.cached_property
    def emulate(self) -> bool:
        """Whether fp16 products are computed in fp32 and rounded."""
        if self.precision.compute is not torch.float16:
            return False
        return not has_native_fp16(self.device) if self.emulation in ("auto", None) else bool(self.emulation)

    @functools.cached_property
    def kernels(self) -> list[torch.library.Library]:
        """What replaces kernels of torch in :meth:`enter`: kept from the first one on, as long as this object is."""
        cast = autocast_kernels(self.device.type) if self.precision.autocast else []
        return [*cast, fp16_kernels()] if self.emulate else cast

    def __getstate__(self) -> dict[str, Any]:
        """What a copy gets: not the kernels, which cannot be copied."""
        return {name: value for name, value in vars(self).items() if name != "kernels"}

    @contextmanager
    def enter(self, *, autocast: bool = False) -> Iterator[None]:
        """The context around modules that enter autocast themselves, as pipeline stages do, and for their backwards.

        With ``autocast``, for a forward: also autocast and the default dtype, if the mode has them.
        """
        # The backward needs the widening too, because checkpointing recomputes forwards in it.
        compute = functools.partial(computing, cache=self.cache) if autocast else widening
        emulation = emulate_fp16() if self.emulate else nullcontext()
        _ = self.kernels
        with emulation, compute(self.precision, self.device.type):
            yield


def autocast_kernels(device_type: str) -> list[torch.library.Library]:
    """The kernels for ``device_type``, which torch has as long as the result is kept; empty: there are none for it."""
    if device_type not in KEYS:
        return []
    key = KEYS[device_type].name
    kept = [REPLACED.get(key) or replace_kernels(key, operator_kernels(device_type))]
    fallback = getattr(torch.ops.transformers, "grouped_mm_fallback", None)  # once transformers has defined it
    if fallback is not None:
        kernels = {fallback.default: functools.partial(narrowed, fallback.default, device_type)}
        kept.append(REPLACED.get(f"transformers {key}") or replace_kernels(key, kernels, "transformers"))
    return kept


@contextmanager
def widening(precision: Precision, device_type: str) -> Iterator[None]:
    """The part of :func:`computing` that the backward needs too, because checkpointing recomputes forwards in it."""
    kept = autocast_kernels(device_type) if precision.autocast else []
    if not kept:
        yield
        return
    depth[device_type] += 1
    try:
        yield
    finally:
        depth[device_type] -= 1


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """A context in which tensors that are made without a dtype get ``dtype``."""
    outer = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(outer)


def default_dtype_of(precision: Precision) -> AbstractContextManager[None]:
    """The default dtype of a forward in a mode, which a backward needs too: checkpointing recomputes forwards in it."""
    return default_dtype(precision.weights) if precision.default_dtype else nullcontext()


@contextmanager
def computing(precision: Precision, device_type: str, *, cache: bool | None = None) -> Iterator[None]:
    """A context of a forward in the mode ``precision`` on ``device_type``; ``cache``: see :class:`ComputeContext`."""
    autocast = torch.autocast(device_type, precision.compute, True, cache) if precision.autocast else nullcontext()
    with autocast, widening(precision, device_type), default_dtype_of(precision):
        yield


def to_compute(tensor: torch.Tensor, precision: Precision, device: torch.device | None = None) -> torch.Tensor:
    """A model's input on ``device``; a floating-point one in the compute dtype."""
    return moved(tensor, device, precision.compute if tensor.is_floating_point() else None)


def moved(tensor: torch.Tensor, device: torch.device | None, dtype: torch.dtype | None = None) -> torch.Tensor:
    """``tensor`` on ``device``, in ``dtype``; the host does not wait for a copy from pinned memory."""
    return tensor.to(device, dtype, non_blocking=tensor.device.type == "cpu")


def to_outputs(tensor: torch.Tensor, precision: Precision) -> torch.Tensor:
    """A model's output; a floating-point one in the mode's dtype for outputs, by default fp32 or wider."""
    if not tensor.is_floating_point():
        return tensor
    dtype = precision.outputs or torch.promote_types(tensor.dtype, torch.float32)
    if tensor.dtype is dtype:
        return tensor
    return tensor.to(dtype)
