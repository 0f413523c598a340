"""Cross-entropy over a vocabulary that is sharded over the tensor axis."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from ..base.dtensor import full_tensor, is_dtensor, wrap
from ..base.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_loss_depth = 0


@contextmanager
def vocab_parallel_loss(enabled: bool = True, *, smoothing: bool = False) -> Iterator[None]:
    """Compute cross-entropy of DTensor logits with a sharded vocabulary, forward and backward, without gathering them.

    torch's ``loss_parallel``, made to nest: torch's own switches itself off at the end of the innermost. With
    ``smoothing`` labels can be smoothed, which torch's cannot, and what is not sharded is plain, so that losses can be
    masked and added to others; every function of torch inside is then looked at first.
    """
    global _loss_depth
    with ExitStack() as stack:
        if enabled and _loss_depth == 0:
            from torch.distributed.tensor.parallel import loss_parallel

            stack.enter_context(loss_parallel())
        if enabled and smoothing:
            stack.enter_context(_Smoothing())
        _loss_depth += 1
        try:
            yield
        finally:
            _loss_depth -= 1


_SIGNATURE = inspect.signature(F.cross_entropy)


class _Smoothing(TorchFunctionMode):
    """Inside, cross-entropy over a sharded vocabulary takes ``label_smoothing``.

    Functions of torch return plain tensors in place of DTensors that are not sharded: DTensors mix with none.
    ``log_softmax`` and ``nll_loss`` gather the vocabulary, as ``softmax`` does: the gradients of ``loss_parallel`` for
    them are right for the two together only, as in ``cross_entropy``.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.cross_entropy:
            bound = _SIGNATURE.bind(*args, **kwargs)
            bound.apply_defaults()
            given = bound.arguments
            logits = given["input"]
            if is_dtensor(logits) and any(kind.is_shard(_class_dim(logits)) for kind in logits.placements):
                if given["target"].is_floating_point():
                    raise ConfigError(
                        "criterion: cross_entropy got probabilities as target, expected classes where the vocabulary "
                        "is sharded; give the logits' module the style 'colwise_gather' in the plan"
                    )
                if given["label_smoothing"]:
                    names = ("weight", "ignore_index", "reduction", "label_smoothing")
                    return _smoothed(logits, given["target"], **{name: given[name] for name in names})
        elif func in GATHERED:
            args, kwargs = tree_map_only(torch.Tensor, full_tensor, (args, kwargs))
        return tree_map_only(torch.Tensor, _plain_unless_sharded, func(*args, **kwargs))


GATHERED = (F.log_softmax, torch.log_softmax, torch.Tensor.log_softmax, F.nll_loss)


def _plain_unless_sharded(tensor: torch.Tensor) -> torch.Tensor:
    sharded = is_dtensor(tensor) and any(kind.is_shard() for kind in tensor.placements)
    return tensor if sharded else full_tensor(tensor)


def _class_dim(logits: torch.Tensor) -> int:
    return 1 if logits.ndim > 1 else 0


def _smoothed(
    logits: DTensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
) -> torch.Tensor:
    """As ``cross_entropy``, of logits whose classes are sharded; a plain tensor.

    With logits z and nll = -log p_y, each -log p_c is nll + z_y - z_c, so that beside nll only sums of logits are
    needed: sum_c w_c (-log p_c) = W nll + (W z_y - sum_c w_c z_c), with W = sum_c w_c.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate

    dim, values = _class_dim(logits), logits.to_local()
    axis = next(axis for axis, kind in enumerate(logits.placements) if kind.is_shard(dim))
    counted = target != ignore_index
    classes = torch.where(counted, target, 0)
    nll = F.cross_entropy(logits, target, ignore_index=ignore_index, reduction="none")
    weights = values.new_ones(logits.shape[dim]) if weight is None else weight
    first = logits.device_mesh.get_local_rank(axis) * -(-logits.shape[dim] // logits.device_mesh.size(axis))
    size = values.shape[dim]
    own = (classes >= first) & (classes < first + size)
    at_target = values.gather(dim, (classes - first).clamp(0, size - 1).unsqueeze(dim)).squeeze(dim) * own
    weighted = torch.tensordot(values.movedim(dim, -1), weights[first : first + size], 1)
    placements = [Partial() if index == axis else Replicate() for index in range(len(logits.placements))]
    rest = DTensor.from_local(weights.sum() * at_target - weighted, logits.device_mesh, placements, run_check=False)
    nll = full_tensor(nll)
    smooth = (weights.sum() * nll + rest.full_tensor()) / logits.shape[dim]
    losses = (1 - label_smoothing) * weights[classes] * nll + label_smoothing * smooth
    losses = torch.where(counted, losses, 0.0)
    if reduction == "none":
        return losses
    return losses.sum() / (weights[classes] * counted).sum() if reduction == "mean" else losses.sum()


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
