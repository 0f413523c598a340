"""Cross-entropy over a vocabulary that is sharded over the tensor axis.

Source: Shoeybi et al., *Megatron-LM*, 2019, section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from ...base.collectives import all_reduce_
from ...base.dtensor import full_tensor, is_dtensor, wrap
from ...base.errors import ConfigError
from ...base.held_tensors import held_tensors
from ...base.torch_internals import take
from .differentiable_collectives import local_shard

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_reduction = take("torch.nn._reduction")

tree_map_only = take("torch.utils._pytree.tree_map_only")

IGNORED = -100
"""The label that the losses of torch and transformers leave out by default."""


MIXED = "mixed torch.Tensor and DTensor"
"""A part of the message of torch's error where an operation gets both."""
ON_SHARDS = (
    "paramp: the criterion got a tensor that is sharded over tensor ranks, such as logits of the style 'vocab_logits'; "
    "take .full_tensor() of it, begin with cross_entropy or log_softmax, or give its module a style that gathers, such "
    "as 'colwise_gather'"
)


@contextmanager
def vocab_parallel_loss(
    given: Any = None,
    *,
    others: bool = True,
    computes: bool = True,
    gathered: Callable[[torch.Tensor], torch.Tensor] = full_tensor,
) -> Iterator[None]:
    """A context in which cross-entropy of DTensor logits with a sharded vocabulary is computed without gathering them.

    With ``others``, what other functions of torch return is plain if it is not sharded, because DTensors do not mix
    with plain tensors: so losses can be masked and added to others. They gather the vocabulary where they need to.
    ``gathered`` makes it so, and may raise an error. Without ``computes`` the mode around this one computes
    cross-entropy. ``given``: what a criterion got.
    """
    try:
        with _ShardedVocabulary(others, computes, gathered):
            yield
    except Exception as error:
        if MIXED in str(error) and any(map(is_dtensor, held_tensors(given))):
            error.add_note(ON_SHARDS)
        raise


class _ShardedVocabulary(TorchFunctionMode):
    def __init__(self, others: bool, computes: bool, gathered: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._others = others
        self._computes = computes
        self._gathered = gathered

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._computes and func is F.cross_entropy and has_sharded_classes(args[0] if args else kwargs.get("input")):
            return cross_entropy(*args, **kwargs)
        output = func(*args, **kwargs)
        if not self._others:
            return output
        if isinstance(output, torch.Tensor):
            return self._plain_unless_sharded(output)
        return tree_map_only(torch.Tensor, self._plain_unless_sharded, output) if isinstance(output, tuple) else output

    def _plain_unless_sharded(self, tensor: torch.Tensor) -> torch.Tensor:
        if not is_dtensor(tensor) or any(kind.is_shard() for kind in tensor.placements):
            return tensor
        return self._gathered(tensor)


def _class_dim(logits: torch.Tensor) -> int:
    return 1 if logits.ndim > 1 else 0


def has_sharded_classes(logits: object) -> bool:
    """Whether ``logits``, of cross-entropy, are a DTensor with sharded classes, over one axis, and nothing else is."""
    if not is_dtensor(logits):
        return False
    others = [kind for kind in logits.placements if not kind.is_replicate()]
    return len(others) == 1 and others[0].is_shard(_class_dim(logits))


def group_of_classes(logits: torch.Tensor) -> dist.ProcessGroup | None:
    """The ranks over which the classes of ``logits`` are sharded; None for a plain tensor."""
    if not is_dtensor(logits):
        return None
    axis = next(axis for axis, kind in enumerate(logits.placements) if kind.is_shard())
    return logits.device_mesh.get_group(axis)


def cross_entropy(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = IGNORED,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    *,
    slices: Slices | None = None,
) -> torch.Tensor:
    """:func:`torch.nn.functional.cross_entropy` of logits whose classes are sharded; a plain tensor, on every rank.

    Args:
        input: a DTensor that :func:`has_sharded_classes`, or with ``slices`` also a plain tensor.
        slices: how this rank's classes are cut and added up, if the result is to have the same bits however many ranks
            have the others; None for sums that are as fast as they can be.

    Raises:
        ConfigError: ``target`` holds probabilities.
        ValueError: the shapes of ``input``, ``target`` and ``weight`` do not fit, or another argument is invalid.
    """
    if target.is_floating_point():
        raise ConfigError(
            "criterion: cross_entropy got probabilities as target, expected classes because the vocabulary is sharded; "
            "give the logits' module the style 'colwise_gather' in the plan"
        )
    if size_average is not None or reduce is not None:
        reduction = _reduction.legacy_get_string(size_average, reduce)
    dim, target, weight = _class_dim(input), full_tensor(target).long(), full_tensor(weight)
    _check_arguments(input.shape, dim, target, weight, reduction, label_smoothing)
    rows = local_shard(cast("DTensor", input)).movedim(dim, -1)
    if slices is not None:
        rows = rows.contiguous()
    rows = rows.float() if rows.dtype.itemsize < 4 else rows  # as under autocast
    weights = rows.new_ones(1).expand(input.shape[dim]) if weight is None else weight.to(rows.dtype)
    options = ignore_index, label_smoothing, reduction
    return cast(torch.Tensor, _Loss.apply(rows, target, weights, *options, group_of_classes(input), slices or Slices()))


def _all_reduced(terms: list[torch.Tensor], group: dist.ProcessGroup | None) -> torch.Tensor:
    (term,) = terms
    if group is not None:
        all_reduce_(term, group)
    return term


def _check_arguments(
    shape: torch.Size, dim: int, target: torch.Tensor, weight: torch.Tensor | None, reduction: str, smoothing: float
) -> None:
    """Raise a ValueError where torch does, with what it would say: for logits of ``shape`` with classes in ``dim``."""
    _reduction.get_enum(reduction)
    expected = (*shape[:dim], *shape[dim + 1 :])
    if target.shape != expected:
        raise ValueError(
            f"cross_entropy got a target of shape {tuple(target.shape)} for logits of shape {tuple(shape)}, "
            f"expected {expected}: one class for each row of logits"
        )
    if weight is not None and weight.shape != shape[dim : dim + 1]:
        raise ValueError(
            f"cross_entropy got a weight of shape {tuple(weight.shape)}, expected {(shape[dim],)}: one for each class"
        )
    if not 0 <= smoothing <= 1:
        raise ValueError(f"cross_entropy got label_smoothing={smoothing}, expected a number from 0 to 1")


@dataclass(frozen=True)
class Slices:
    """How the sums over this rank's classes are computed."""

    count: int = 1
    """Slices of the classes, each of which has a term in a sum."""
    add: Callable[[list[torch.Tensor], dist.ProcessGroup | None], torch.Tensor] = _all_reduced
    """The sum of the terms of all ranks of a group, None if there is one rank, on each of them."""


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
        group: dist.ProcessGroup | None,
        slices: Slices,
    ) -> torch.Tensor:
        """The losses of ``logits``, (..., this rank's classes), and their classes ``target``, (...), int64.

        ``weights``, (classes), are those of all classes.
        """
        size, num_classes = logits.shape[-1], weights.shape[0]
        # DTensor shards as torch.chunk does.
        first = 0 if group is None else group.rank() * -(-num_classes // group.size())
        ignored = target == ignore_index
        index = target.masked_fill(ignored, 0)
        own_weight = weights.gather(0, index.reshape(-1)).view_as(index)  # out of range: an error, as in torch
        scale = factor = own_weight = own_weight.masked_fill_(ignored, 0.0)
        index, part = index - first, None
        largest = logits.amax(-1)
        ctx.is_sharded = group is not None
        if group is not None:
            all_reduce_(largest, group, dist.ReduceOp.MAX)
        if smoothing:
            scale = scale * (1 - smoothing)
            part = weights[first : first + size] * (smoothing / num_classes)
            factor = (scale + smoothing / num_classes * weights.sum()).masked_fill_(ignored, 0.0)
        softmax, terms = _exponentials_and_sums(logits, index, largest, scale, part, slices.count)
        sums = slices.add(terms, group)
        losses = (factor * (largest + sums[0].log()) - sums[1]).masked_fill_(ignored, 0.0)
        total = own_weight.sum() if reduction == "mean" else None
        ctx.save_for_backward(softmax.div_(sums[0].unsqueeze(-1)), factor, index, scale, part, total, ignored)
        if total is not None:
            return losses.sum() / total
        return losses if reduction == "none" else losses.sum()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # once_differentiable would let gradients through that do not depend on another, as those of a loss.
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            fix = (
                "in a plan, give the logits' module the style 'colwise_gather'" if ctx.is_sharded else "leave that out"
            )
            raise ConfigError(
                "criterion: got create_graph=True, expected gradients of the first order, because cross_entropy over a "
                f"sharded vocabulary, and that of reproducible, has no others; {fix}"
            )
        softmax, factor, index, scale, part, total, ignored = ctx.saved_tensors
        gradient = gradient if total is None else gradient / total
        gradient = gradient.expand_as(ignored).masked_fill(ignored, 0.0)  # NaN in a mean without labels
        result = softmax * (factor * gradient).unsqueeze(-1)
        mine, position = _position(index, result.shape[-1])
        # -0.0 is what changes no element, a zero with a sign included.
        result.scatter_add_(-1, position, torch.where(mine, -(scale * gradient), -0.0).unsqueeze(-1))
        if part is not None:
            result.sub_(part * gradient.unsqueeze(-1))
        return result, *[None] * 7


def _position(index: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Whether the classes ``index`` (...), counted from the first of ``size``, are among them; and where: (..., 1)."""
    return (index >= 0) & (index < size), index.clamp(0, size - 1).unsqueeze(-1)


def _exponentials_and_sums(
    logits: torch.Tensor,
    index: torch.Tensor,
    largest: torch.Tensor,
    scale: torch.Tensor,
    part: torch.Tensor | None,
    num_slices: int,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The exponentials of ``logits - largest``, and of each row their sum and what its loss subtracts: (2, ...).

    These are this rank's terms of the sums over all classes: ``scale`` x the logit of the class, and the sum of
    ``part``, a weight for each class, x logits. Each of ``num_slices`` has terms of its own.
    """
    size = logits.shape[-1] // num_slices
    exponentials, sums = [], []
    for number, own in enumerate(logits.split(size, -1)):
        exponentials.append((own - largest.unsqueeze(-1)).exp_())  # of NaN: NaN, whatever the maximum has made of it
        mine, position = _position(index - number * size, size)
        subtracted = torch.where(mine, scale * own.gather(-1, position).squeeze(-1), 0.0)
        if part is not None:  # no matmul, which autocast computes in half precision
            subtracted += (own * part[number * size :][:size]).sum(-1)
        sums.append(torch.stack([exponentials[-1].sum(-1), subtracted]))
    return exponentials[0] if num_slices == 1 else torch.cat(exponentials, -1), sums


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
    return logits if masked is part else wrap(masked, logits)


def _mask_from(logits: torch.Tensor, start: int) -> torch.Tensor:
    if start >= logits.shape[-1]:
        return logits
    masked = torch.arange(logits.shape[-1], device=logits.device) >= start
    return logits.masked_fill(masked, torch.finfo(logits.dtype).min)
