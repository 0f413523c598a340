"""Modules with parameters that compute the slices of a sequence one by one.

The bits of a row may depend on how many rows there are, and the gradient of a weight on the order of its tokens. So
each slice is a call of its own, in every layout, and the gradients of its weights are summed in a tree over the slices
of all ranks of the context axis, before they are rounded to the dtype of the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from ..base.dtensor import is_dtensor, resized
from ..base.errors import ConfigError
from ..base.module_surgery import replace_forward, unbound, with_parameters
from ..base.uncompiled import unwatched
from ..distributed.token_positions import ACTIVE
from .running_modules import Forwards
from .sliced_styles import parameter_of
from .slices import fan_out, join, split


def check_sequences(model: nn.Module) -> None:
    """Raise a ConfigError for a module that cannot compute slices of a sequence."""
    from ..parallel.context_axis.sharded_stages import MIXING

    for name, module in model.named_modules():
        problem = None
        if isinstance(module, MIXING):
            problem = "mixes tokens, or may; expected attention only"
        elif module._parameters and (not name or any(True for child in module.children() for _ in child.parameters())):
            problem = "has parameters beside modules; put them in a module of their own, that gets the tokens"
        if problem is not None:
            raise ConfigError(
                f"reproducible.sequence_slices: {name or 'the model'!r}, a {type(module).__name__}, {problem}, or set "
                "it to 1"
            )


def slice_sequences(module: nn.Module, forwards: Forwards) -> None:
    """Let the modules in ``module`` that have parameters compute slice by slice from now on."""
    for child in module.modules():
        if any(value is not None for value in child._parameters.values()):
            replaced = vars(child).get("forward")
            run = type(child).forward if replaced is None else unbound(replaced, child)
            replace_forward(child, partial(_in_slices, forwards, run))


def _in_slices(forwards: Forwards, run: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """``run``, a forward of ``module``, of each slice of the sequence in its one tensor.

    Where no engine computes, as where a stage is tried with whole sequences, ``run`` itself.
    """
    if not ACTIVE:
        return run(module, *args, **kwargs)
    first = None if args else next(iter(kwargs))  # the name of what is given by keyword
    x = args[0] if first is None else kwargs[first]
    others = [*args[1:], *(value for name, value in kwargs.items() if name != first)]
    count = forwards.layout.local_sequence_slices
    dim = _dim_of_tokens(forwards, module, x, others, count)
    with unwatched():
        own = {name: parameter_of(module, name) for name, value in module._parameters.items() if value is not None}
        group = forwards.layout.sequences.group
        aliases = {
            name: fan_out(value, count, group, dtype=value.dtype) for name, value in own.items() if value is not None
        }
        slices = split(x, count, dim)
    forwards.sliced[f"{type(module).__name__} in {forwards.module}"] += 1
    outputs = []
    for index, one in enumerate(slices):
        with forwards.in_slice(), with_parameters(module, {name: each[index] for name, each in aliases.items()}):
            given = kwargs if first is None else kwargs | {first: one}
            outputs.append(run(module, *([one, *args[1:]] if args else ()), **given))
    with unwatched():
        return _joined(outputs, dim)


def _dim_of_tokens(forwards: Forwards, module: nn.Module, x: Any, others: Sequence[Any], count: int) -> int:
    """The dim of ``x`` that has the tokens, which divides into ``count`` slices."""
    dims = x.ndim if isinstance(x, torch.Tensor) else 0
    if dims == 3 or (dims in (1, 2) and not x.is_floating_point()):
        dim = min(dims - 1, 1)
        if x.shape[dim] % count == 0 and not any(isinstance(one, torch.Tensor) for one in others):
            return dim
    shape = tuple(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__
    raise ConfigError(
        f"reproducible.sequence_slices: {forwards.module}, a {type(module).__name__}, got {shape}"
        f"{' and other tensors' if any(isinstance(one, torch.Tensor) for one in others) else ''}, expected one tensor, "
        f"(samples, tokens, features), or (samples, tokens) of ints, with a multiple of {count} tokens; set it to 1"
    )


def _joined(outputs: Sequence[Any], dim: int) -> Any:
    first = outputs[0]
    if is_dtensor(first):  # logits over a sharded vocabulary
        return resized(join([one.to_local() for one in outputs], dim), first, dim)
    return join(outputs, dim)
