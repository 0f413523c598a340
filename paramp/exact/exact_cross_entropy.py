"""Cross-entropy with the same bits whether a rank has all classes of the logits or a shard of them.

The classes are cut into as many slices as the layers' dims, and a rank has some of them. Each slice is the same calls
of the same shapes on contiguous memory wherever it is: its exponentials, and its sum of each row. The sums are added in
one binary tree over the slices of all ranks. What is left, logarithms and the mean, is of tensors that have no classes,
and the backward is of products, sums and quotients, which are rounded the same way whatever is beside them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ..base.dtensor import full_tensor, is_dtensor
from ..base.errors import ConfigError
from ..parallel.tensor import sharded_loss as any_order
from ..parallel.tensor.sharded_loss import group_of_classes, has_sharded_classes
from .exact_layout import ExactLayout
from .tree_sum import sum_over, tree_sum


def cross_entropy(
    layout: ExactLayout,
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    *options: Any,
    **named: Any,
) -> torch.Tensor:
    """:func:`torch.nn.functional.cross_entropy`, of logits with whole or sharded classes.

    If the number of classes is no multiple of the slices of ``layout``, whole classes are one slice. The gradient has
    the dtype and the layout of ``input``.

    Args:
        input: (rows, classes), (classes,) or (rows, classes, ...); floating point. A plain tensor, or a DTensor. One
            that is sharded in another way than over its classes alone is gathered.
        target: classes, of the shape of ``input`` without its classes; or probabilities of whole classes, for which
            torch's own function is called.
        options, named: the function's further arguments, from ``size_average`` on.

    Returns:
        A plain tensor, float32 for half-precision logits, else of their dtype.

    Raises:
        ConfigError: ``input`` is a sum that the ranks have not added up yet; or its classes are sharded, and do not
            divide by the slices, or ``target`` holds probabilities.
        ValueError: the shapes of ``input``, ``target`` and ``weight`` do not fit, or another argument is invalid.
    """
    if not has_sharded_classes(input):
        input = _whole(input)
        if target.is_floating_point():
            return F.cross_entropy(input, full_tensor(target), full_tensor(weight), *options, **named)
    slices = any_order.Slices(_own_slices(layout, input), _sum_in_tree)
    return any_order.cross_entropy(input, target, weight, *options, **named, slices=slices)


def _whole(logits: torch.Tensor) -> torch.Tensor:
    if is_dtensor(logits) and any(kind.is_partial() for kind in logits.placements):
        raise ConfigError(
            f"criterion: cross_entropy got logits with the placements {logits.placements}, expected logits that are "
            "summed up, because in the mode reproducible sums have one order; give their module the style "
            "'rowwise' or 'vocab_logits' in the plan"
        )
    whole: torch.Tensor = full_tensor(logits)
    return whole


def _sum_in_tree(terms: list[torch.Tensor], group: dist.ProcessGroup | None) -> torch.Tensor:
    return sum_over(tree_sum(terms), group)


def _own_slices(layout: ExactLayout, logits: torch.Tensor) -> int:
    """The slices into which this rank's classes of ``logits`` are cut."""
    num_classes, group = logits.shape[1 if logits.ndim > 1 else 0], group_of_classes(logits)
    size = 1 if group is None else group.size()
    if num_classes % layout.slices == 0 and layout.slices % size == 0:
        return layout.slices // size
    if size == 1:
        return 1
    raise ConfigError(
        f"criterion: cross_entropy got logits of {num_classes} classes sharded over {size} ranks, expected classes "
        f"that divide by reproducible.slices = {layout.slices}, and slices that divide by the ranks; pad the "
        f"vocabulary to {-(-num_classes // layout.slices) * layout.slices} classes, or give the logits' module the "
        "style 'colwise_gather' in the plan"
    )
