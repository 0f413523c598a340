"""Explains an error about shapes in the forward of a model whose layers are sharded over the tensor axis.

A ``colwise`` layer returns this rank's part of its outputs. Code that has the sizes of the whole layer written into it,
such as ``self.query(x).view(batch, length, heads, head_size)``, then fails deep inside torch.
"""

from __future__ import annotations

import math
import re
import traceback
from collections.abc import Iterator, Sequence
from types import TracebackType

import torch
from torch import nn

from ..base.dtensor import is_dtensor
from ..base.errors import ConfigError, at_users_line, one_line

PLAN_ENTRY = "_paramp_plan_entry"
"""The attribute of a sharded module with the entry of the plan, as messages show it."""
ABOUT_SHAPES = re.compile(r"\b(shapes?|sizes?|dimensions?|split_with_sizes|should contain \d+ elements)\b")
WRITTEN = (
    "If the model runs without tensor parallelism, a size of the whole layer is written into it: write -1 for the "
    "number of heads, as in view(batch, length, -1, head_size), or take it from the tensor's shape; or choose another "
    "style in the plan, such as colwise_gather"
)
NAMED = 4
"""The most sharded layers that a message names."""


def explanation(error: Exception, model: nn.Module) -> str | None:
    """What to change, for an ``error`` about shapes in a module of ``model`` with sharded layers; else None."""
    text = one_line(str(error))
    if isinstance(error, (ConfigError, torch.OutOfMemoryError)) or not ABOUT_SHAPES.search(text):
        return None
    names = {module: name for name, module in model.named_modules()}
    for module in _modules_of(error.__traceback__):
        planned = [one for one in module.modules() if hasattr(one, PLAN_ENTRY)]
        if module not in names or not planned:
            continue
        name = f"{names[module]!r}" if names[module] else f"the {type(module).__name__}"
        layers = "; ".join(_described(names[one], one) for one in planned[:NAMED])
        advice = _undivided(text, planned) or WRITTEN
        return f"model: {name} fails{at_users_line(error)}, on a tensor rank: {text}. There, {layers}. {advice}"
    return None


def _modules_of(frames: TracebackType | None) -> Iterator[nn.Module]:
    """The modules whose methods were running, innermost first."""
    for frame, _ in reversed(list(traceback.walk_tb(frames))):
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module):
            yield module


def _described(name: str, module: nn.Module) -> str:
    """A sharded layer, its entry in the plan, and what this rank has of its weight."""
    entry, weight = getattr(module, PLAN_ENTRY), getattr(module, "weight", None)
    if not is_dtensor(weight):
        return f"{name!r} follows {entry}"
    return f"{name!r} ({entry}) has a weight of {tuple(weight.to_local().shape)}, of {tuple(weight.shape)}"


def _undivided(text: str, planned: Sequence[nn.Module]) -> str:
    """What to change if the sizes in ``text``, torch's message, are of heads that do not divide over the tensor ranks.

    An empty string if they divide, or are of no heads of a layer in ``planned``.
    """
    found = re.search(r"\[(-?\d+(?:, -?\d+)*)\]", text)
    sizes = [int(size) for size in found[1].split(", ")] if found else []
    for weight in (getattr(one, "weight", None) for one in planned):
        if not is_dtensor(weight) or weight.to_local().shape[0] == weight.shape[0]:
            continue
        outputs, ranks = weight.shape[0], weight.shape[0] // weight.to_local().shape[0]
        for index, heads in enumerate(sizes):
            size = math.prod(sizes[index + 1 :])
            for parts in (1, 2, 3):  # of a fused layer, of which each is cut into heads
                whole = outputs // parts
                if size > 1 and whole % size == 0 and heads in (-1, whole // size) and whole // size % ranks:
                    count = whole // size
                    return (
                        f"The {whole} outputs are {count} heads of {size}, and {ranks} tensor ranks do not divide "
                        f"{count} heads: choose a parallel.tensor.size that does, another number of heads, or another "
                        "style in the plan, such as colwise_gather"
                    )
    return ""
