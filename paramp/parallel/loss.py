"""Cross-entropy over a vocabulary that is sharded over the tensor axis."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from ..base.dtensor import is_dtensor, wrap

_loss_depth = 0


@contextmanager
def vocab_parallel_loss(enabled: bool = True) -> Iterator[None]:
    """Compute cross-entropy of DTensor logits with a sharded vocabulary, forward and backward, without gathering them.

    torch's ``loss_parallel``, made to nest: torch's own switches itself off at the end of the innermost.
    """
    global _loss_depth
    with ExitStack() as stack:
        if enabled and _loss_depth == 0:
            from torch.distributed.tensor.parallel import loss_parallel

            stack.enter_context(loss_parallel())
        _loss_depth += 1
        try:
            yield
        finally:
            _loss_depth -= 1


def mask_tail(logits: torch.Tensor, size: int) -> torch.Tensor:
    """``logits`` with all but the first ``size`` entries of the last dim at the lowest finite value of the dtype.

    Args:
        logits: (..., vocabulary), floating point; a DTensor may be sharded over its last dim.
    """
    total = logits.shape[-1]
    if size == total:
        return logits
    if not is_dtensor(logits):
        return _mask_from(logits, size)
    shard = next((axis for axis, kind in enumerate(logits.placements) if kind.is_shard(logits.ndim - 1)), None)
    offset = 0
    if shard is not None:
        mesh = logits.device_mesh
        chunk = -(-total // mesh.size(shard))  # DTensor shards as torch.chunk does
        offset = mesh.get_local_rank(shard) * chunk
    return wrap(_mask_from(logits.to_local(), max(0, size - offset)), logits)


def _mask_from(logits: torch.Tensor, start: int) -> torch.Tensor:
    if start >= logits.shape[-1]:
        return logits
    masked = torch.arange(logits.shape[-1], device=logits.device) >= start
    return logits.masked_fill(masked, torch.finfo(logits.dtype).min)
