"""Explains an error about shapes in the forward of a model whose layers are sharded over the tensor axis.

A ``colwise`` layer returns this rank's part of its outputs. Code that has the sizes of the whole layer written into it,
such as ``self.query(x).view(batch, length, heads, head_size)``, then fails deep inside torch.
"""

from __future__ import annotations

import linecache
import os
import re
import traceback
from collections.abc import Iterator
from types import TracebackType

import torch
from torch import nn

from ..base.dtensor import is_dtensor
from ..base.errors import ConfigError, one_line

PLAN_ENTRY = "_paramp_plan_entry"
"""The attribute of a sharded module with the entry of the plan, as messages show it."""
ABOUT_SHAPES = re.compile(r"\b(shapes?|sizes?|dimensions?|split_with_sizes)\b")
NAMED = 4
"""The most sharded layers that a message names."""
LIBRARIES = tuple(os.path.dirname(os.path.dirname(path)) + os.sep for path in (torch.__file__, __file__))


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
        return (
            f"model: {name} fails{_line_of(error)} on a tensor rank: {text}. There, {layers}. If the model runs "
            "without tensor parallelism, a size of the whole layer is written into it: write -1 for the number of "
            "heads, as in view(batch, length, -1, head_size), or take it from the tensor's shape; or choose another "
            "style in the plan, such as colwise_gather"
        )
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


def _line_of(error: Exception) -> str:
    """The innermost line outside of torch and this package, with its source; an empty string without one."""
    for frame, number in reversed(list(traceback.walk_tb(error.__traceback__))):
        file = frame.f_code.co_filename
        if not file.startswith((*LIBRARIES, "<")):
            source = linecache.getline(file, number).strip()
            return f" at {os.path.basename(file)}:{number}" + (f", {source!r}," if source else "")
    return ""
