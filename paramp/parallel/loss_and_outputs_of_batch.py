"""What a model returns for a batch: the loss in it, those of the microbatches as one, the same on every rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from ..base.collectives import broadcast_
from ..base.trees import children, leaves, map_leaves, map_tensors, rebuilt, step_to, tensors


def join(parts: list[Any]) -> Any:
    """The outputs (or targets) of the microbatches as those of the batch.

    Tensors are concatenated along dim 0; of those without dims, such as losses, floating-point ones are averaged. A
    loss of an output that is ``(sum, count)`` is summed. Other values are the first part's.
    """
    if len(parts) == 1:
        return parts[0]
    values = [dict(leaves(part)) for part in parts]
    summed = _sum_and_count(parts[0])

    def joined(path: str, first: Any) -> Any:
        if path in summed:
            return sum(value[path] for value in values)
        if not isinstance(first, torch.Tensor):
            return first
        several = [value[path] for value in values]
        if first.ndim:
            return torch.cat(several)
        return torch.stack(several).mean() if first.is_floating_point() else first

    return map_leaves(joined, parts[0])


def loss_in(output: Any) -> Any:
    """The ``loss`` of ``output``, a mapping, dataclass or other object; None if it has none."""
    return output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)


def summed(loss: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """The sum over ``count`` labels that has the mean ``loss``; without labels ``loss``, or 0 for the mean of none."""
    total = loss * count.to(loss.device).clamp(min=1)
    return torch.where((count.to(loss.device) == 0) & loss.isnan(), 0, total)


def with_loss(output: Any, loss: Any) -> Any:
    """``output``, a mapping or dataclass, with another ``loss``."""
    parts, own = children(output) or {}, loss_in(output)
    return rebuilt(output, {key: loss if child is own else child for key, child in parts.items()})


def _sum_and_count(output: Any) -> set[str]:
    """The paths of the sum and the count that are the loss in ``output``; none if it has no such loss."""
    loss = loss_in(output)
    if not isinstance(loss, (tuple, list)) or len(loss) != 2:
        return set()
    keys = [key for key, child in (children(output) or {}).items() if child is loss]
    return {path for key in keys for path, _ in leaves(loss, step_to(output, key))}


def broadcast_tree(tree: Any, device: torch.device, group: dist.ProcessGroup, src: int = 0) -> Any:
    """The ``tree`` of tensors and other values of the rank ``src`` of ``group``, on every rank of it.

    Other values must pickle. Tensors are plain; on the other ranks they are on ``device``.
    """
    shapes = [map_tensors(lambda tensor: torch.empty_like(tensor, device="meta"), tree)]
    dist.broadcast_object_list(shapes, group=group, group_src=src)
    if dist.get_rank(group) != src:
        tree = map_tensors(lambda meta: torch.empty_like(meta, device=device), shapes[0])
    for tensor in tensors(tree):
        broadcast_(tensor, group, src)
    return tree
