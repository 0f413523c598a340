"""``apex.multi_tensor_apply``, for scripts that import it: without Apex's kernels, as after an install without them."""

from __future__ import annotations

from typing import Any

__all__ = ["MultiTensorApply", "multi_tensor_applier"]


class MultiTensorApply:
    """Calls one of Apex's kernels on lists of tensors; here it is never available.

    Attributes:
        available: False, which scripts ask before they use it.
        chunk_size: elements of a chunk; unused.
    """

    available = False

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def __call__(self, op: Any, noop_flag_buffer: Any, tensor_lists: Any, *args: Any) -> Any:
        """Raises an ImportError, because the kernels that ``op`` names are not there."""
        raise ImportError(
            "multi_tensor_applier: it calls kernels of NVIDIA's Apex, which are not here; call paramp.clip_grad_norm_ "
            "for a norm, torch._foreach_mul_ for a scale, or torch.optim.AdamW(..., fused=True) for a step"
        )


multi_tensor_applier = MultiTensorApply(2048 * 32)
