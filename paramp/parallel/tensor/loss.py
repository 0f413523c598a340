"""Cross-entropy over a vocabulary that is sharded over the tensor axis.

Source: Shoeybi et al., *Megatron-LM*, 2019, section 3.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from torch.nn import _reduction
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from ...base.dtensor import full_tensor, is_dtensor
from ...base.errors import ConfigError
from ...base.local_leaves import SPECS, grad, register_hook, with_local
from ...distributed.collectives import all_reduce_
from .exchange import as_shards, local_shard

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


SHARING = "_paramp_reshaped"
"""The attribute of DTensors whose memory :func:`_reshaped` shares: a list, empty until one of them was changed.

Autograd does not know that they share it, so the others would have the new values without the new graph.
"""


@contextmanager
def vocab_parallel_loss(*, others: bool = True) -> Iterator[None]:
    """A context in which cross-entropy of DTensor logits with a sharded vocabulary is computed without gathering them.

    With ``others``, what other functions of torch return is plain if it is not sharded, because DTensors do not mix
    with plain tensors: so losses can be masked and added to others. They gather the vocabulary where they need to.
    """
    with _ShardedVocabulary(others):
        yield


class _ShardedVocabulary(TorchFunctionMode):
    def __init__(self, others: bool) -> None:
        super().__init__()
        self._others = others

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        sharing = [*_sharing((*args, *kwargs.values()))]
        if not sharing:
            return self._run(func, args, kwargs)
        if any(vars(tensor)[SHARING] for tensor in sharing) and func.__name__ != "__get__":
            raise RuntimeError(
                "criterion: the logits were changed in place through another view of the same memory (view, reshape or "
                "flatten), expected changes of new tensors where the vocabulary is sharded, such as logits = logits / 2"
            )
        nodes = [tensor.grad_fn for tensor in sharing]
        output = self._run(func, args, kwargs)
        for tensor, node in zip(sharing, nodes, strict=True):
            if tensor.grad_fn is not node:
                vars(tensor)[SHARING].append(True)
                vars(tensor)[SHARING] = []
        return output

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is F.cross_entropy and _has_sharded_classes(args[0] if args else kwargs.get("input")):
            return _cross_entropy(*args, **kwargs)
        if func is torch.autograd.grad:
            return grad(func, *args, **kwargs)
        if func is torch.Tensor.register_hook and is_dtensor(args[0]):
            return register_hook(func, *args, **kwargs)
        if func in (torch.Tensor.flatten, torch.Tensor.view, torch.Tensor.reshape) and not kwargs:
            shape = _shape_of_rows(func, *args)
            if shape is not None:
                return _reshaped(args[0], shape)
        output = func(*args, **kwargs)
        if not self._others:
            return output
        if isinstance(output, torch.Tensor):
            return _plain_unless_sharded(output)
        return tree_map_only(torch.Tensor, _plain_unless_sharded, output) if isinstance(output, tuple) else output


def _sharing(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Those of ``values``, or the tensors that they are views of, that share their memory with other DTensors."""
    for value in values:
        if is_dtensor(value):
            base = value if value._base is None else value._base
            if SHARING in vars(base):
                yield base
        elif isinstance(value, (tuple, list)):
            yield from _sharing(value)
        elif isinstance(value, dict):
            yield from _sharing(value.values())


def _plain_unless_sharded(tensor: torch.Tensor) -> torch.Tensor:
    sharded = is_dtensor(tensor) and any(kind.is_shard() for kind in tensor.placements)
    return tensor if sharded else full_tensor(tensor)


def _shape_of_rows(func: Any, logits: torch.Tensor, *args: Any) -> list[int] | None:
    """The dims before the last that ``func`` gives ``logits``, sharded over their last dim, which it keeps; else None.

    At most one is -1.
    """
    if not is_dtensor(logits) or len(logits.placements) > 1 or not logits.placements[0].is_shard(logits.ndim - 1):
        return None
    if func is torch.Tensor.flatten:
        return [-1] if args in ((0, -2), (0, logits.ndim - 2)) else None
    sizes = [*args[0]] if len(args) == 1 and isinstance(args[0], (tuple, list)) else [*args]
    return sizes[:-1] if len(sizes) > 1 and sizes[-1] == logits.shape[-1] else None


def _reshaped(logits: DTensor, shape: list[int]) -> torch.Tensor:
    """``logits`` with the dims ``shape`` before the last, over which they are sharded, without DTensor's dispatch."""
    rows = local_shard(logits)
    rows = rows.reshape(*shape, rows.shape[-1])
    base = logits if logits._base is None else logits._base
    specs = vars(base).setdefault(SPECS, {})
    whole = as_shards(rows, logits.device_mesh, rows.ndim - 1, logits.shape[-1], specs)
    vars(whole)[SHARING] = vars(base).setdefault(SHARING, [])
    return whole


def _class_dim(logits: torch.Tensor) -> int:
    return 1 if logits.ndim > 1 else 0


def _has_sharded_classes(logits: torch.Tensor) -> bool:
    """Whether the classes of ``logits`` are sharded, over one axis, and nothing else is."""
    if not is_dtensor(logits):
        return False
    others = [kind for kind in logits.placements if not kind.is_replicate()]
    return len(others) == 1 and others[0].is_shard(_class_dim(logits))


def _cross_entropy(
    input: DTensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """:func:`torch.nn.functional.cross_entropy` of logits whose classes are sharded; a plain tensor, on every rank."""
    if target.is_floating_point():
        raise ConfigError(
            "criterion: cross_entropy got probabilities as target, expected classes because the vocabulary is sharded; "
            "give the logits' module the style 'colwise_gather' in the plan"
        )
    if size_average is not None or reduce is not None:
        reduction = _reduction.legacy_get_string(size_average, reduce)
    dim, target = _class_dim(input), full_tensor(target).long()
    group = input.device_mesh.get_group(next(axis for axis, kind in enumerate(input.placements) if kind.is_shard()))
    rows = local_shard(input).movedim(dim, -1)
    rows = rows.float() if rows.dtype.itemsize < 4 else rows  # as under autocast
    weights = rows.new_ones(1).expand(input.shape[dim]) if weight is None else full_tensor(weight).to(rows.dtype)
    return cast(torch.Tensor, _Loss.apply(rows, target, weights, ignore_index, label_smoothing, reduction, group))


class _Loss(torch.autograd.Function):
    """The weighted cross-entropy of each row, its sum or its mean, without a collective in the backward.

    With logits z, L = log sum_c exp z_c, class weights w, smoothing s and C classes, the loss of the class y is

        (1 - s) w_y (L - z_y) + s / C sum_c w_c (L - z_c) = a L - b,

    where a = (1 - s) w_y + s / C sum_c w_c. Its gradient for z_c is a softmax(z)_c - (1 - s) w_y [c = y] - s / C w_c.
    The mean is the sum divided by that of w_y. Rows of the class ``ignore_index`` have a = b = w_y = 0.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        target: torch.Tensor,
        weights: torch.Tensor,
        ignore_index: int,
        smoothing: float,
        reduction: str,
        group: dist.ProcessGroup,
    ) -> torch.Tensor:
        """The losses of ``logits``, (..., this rank's classes), and their classes ``target``, (...), int64.

        ``weights``, (classes), are those of all classes.
        """
        size, num_classes = logits.shape[-1], weights.shape[0]
        first = group.rank() * -(-num_classes // group.size())  # DTensor shards as torch.chunk does
        ignored = target == ignore_index
        index = target.masked_fill(ignored, 0)
        own_weight = weights.gather(0, index.reshape(-1)).view_as(index)  # out of range: an error, as in torch
        scale = own_weight = own_weight.masked_fill_(ignored, 0.0)
        index = index - first
        mine = (index >= 0) & (index < size)
        place = index.clamp_(0, size - 1).unsqueeze(-1)
        largest = logits.amax(-1)
        all_reduce_(largest, group, dist.ReduceOp.MAX)
        exponentials = (logits - largest.unsqueeze(-1)).exp_()  # of NaN: NaN, whatever the maximum has made of it
        picked, factor, part = logits.gather(-1, place).squeeze(-1), scale, None
        if smoothing:
            scale = scale * (1 - smoothing)
            part = weights[first : first + size] * (smoothing / num_classes)
            factor = (scale + smoothing / num_classes * weights.sum()).masked_fill_(ignored, 0.0)
        scale = scale * mine
        subtracted = torch.where(mine, scale * picked, 0.0)
        if part is not None:
            subtracted += (logits * part).sum(-1)  # no matmul, which autocast computes in half precision
        sums = torch.stack([exponentials.sum(-1), subtracted])
        all_reduce_(sums, group)
        losses = (factor * (largest + sums[0].log()) - sums[1]).masked_fill_(ignored, 0.0)
        total = own_weight.sum() if reduction == "mean" else None
        ctx.save_for_backward(exponentials.div_(sums[0].unsqueeze(-1)), factor, place, scale, part, total, ignored)
        if total is not None:
            return losses.sum() / total
        return losses if reduction == "none" else losses.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        softmax, factor, place, scale, part, total, ignored = ctx.saved_tensors
        gradient = gradient if total is None else gradient / total
        result = softmax * (factor * gradient).unsqueeze(-1)
        result.scatter_add_(-1, place, -(scale * gradient).unsqueeze(-1))
        if part is not None:
            result.sub_(part * (gradient * ~ignored).unsqueeze(-1))
        return result, *[None] * 6


def mask_tail(logits: torch.Tensor, size: int) -> torch.Tensor:
    """``logits`` with all but the first ``size`` entries of the last dim set to the lowest finite value of the dtype.

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
    part = local_shard(logits)
    masked = _mask_from(part, max(0, size - offset))
    return logits if masked is part else with_local(logits, masked)


def _mask_from(logits: torch.Tensor, start: int) -> torch.Tensor:
    if start >= logits.shape[-1]:
        return logits
    masked = torch.arange(logits.shape[-1], device=logits.device) >= start
    return logits.masked_fill(masked, torch.finfo(logits.dtype).min)
