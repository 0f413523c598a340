"""Modules with parameters, and mixtures of experts, that compute the slices of a sequence one by one.

The bits of a row may depend on how many rows there are, and the gradient of a weight on the order of its tokens. So
each slice is a call of its own, in every layout, and the gradients of its weights are summed in a tree over the slices
of all ranks of the context axis, before they are rounded to the dtype of the weights.

A mixture is the module that has the experts, with its router and what else is in it. Its whole forward computes one
slice at a time, because it chooses experts and sums over tokens in code of its own. Each module in it uses its
parameters through an alias for the slice that runs (:class:`~paramp.exact.forwards_in_microchunk.MixtureSlices`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from ..base.dtensor import is_dtensor, resized
from ..base.errors import ConfigError
from ..base.module_surgery import replace_forward, unbound, with_parameters
from ..base.trees import map_tensors, tensors
from ..base.uncompiled import unwatched
from ..distributed.token_positions import ACTIVE
from .forwards_in_microchunk import Forwards
from .styles_of_sliced_layers import aliases_of, first_input, parameters_of
from .sums_over_slices import join, split, sum_slices


def check_sequences(model: nn.Module) -> None:
    """Raise a ConfigError for a module that cannot compute slices of a sequence."""
    from ..parallel.context_axis.stages_on_cut_sequences import MIXING

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


def slice_sequences(module: nn.Module, forwards: Forwards, experts: Collection[str] = ()) -> None:
    """Let the modules in ``module`` that have parameters compute slice by slice from now on, and mixtures as a whole.

    ``experts``: the names of the modules of experts, which look their parameters up themselves.
    """
    for name, child in module.named_modules():
        if name not in experts and any(value is not None for value in child._parameters.values()):
            _replace(child, _in_slices, forwards)
    inside = dict(module.named_modules())
    for name in sorted({name.rpartition(".")[0] for name in experts if name in inside}):
        _replace(inside[name], _mixture_in_slices, forwards)


def _replace(module: nn.Module, within: Any, forwards: Forwards) -> None:
    replaced = vars(module).get("forward")
    run = type(module).forward if replaced is None else unbound(replaced, module)
    replace_forward(module, partial(within, forwards, run))


def _in_slices(forwards: Forwards, run: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """``run``, a forward of ``module``, of each slice of the sequence in its one tensor.

    Where no engine computes, as where a stage is tried with whole sequences, ``run`` itself. In a mixture the tensors
    are of one slice.
    """
    if not ACTIVE:
        return run(module, *args, **kwargs)
    if forwards.mixture is not None:
        with unwatched():
            used = {name: forwards.mixture.use(module, name, value) for name, value in parameters_of(module).items()}
        with with_parameters(module, used):
            return run(module, *args, **kwargs)
    x, with_first = first_input(args, kwargs)
    count = forwards.layout.local_sequence_slices
    dim = _dim_of_tokens(forwards, module, x, args, kwargs)
    with unwatched():
        aliases = aliases_of(module, count, forwards.layout.sequences.group)
        slices = split(x, count, dim)
    forwards.sliced[f"{type(module).__name__} in {forwards.module}"] += 1
    outputs = []
    for index, one in enumerate(slices):
        with forwards.in_slice(), with_parameters(module, {name: each[index] for name, each in aliases.items()}):
            of_one, named = with_first(one)
            outputs.append(run(module, *of_one, **named))
    with unwatched():
        return _joined(outputs, dim)


def _mixture_in_slices(forwards: Forwards, run: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """``run``, a forward of the mixture ``module``, of each slice; of numbers that it returns, the mean over slices."""
    if not ACTIVE or forwards.slicing:
        return run(module, *args, **kwargs)
    x, with_first = first_input(args, kwargs)
    dim = _dim_of_tokens(forwards, module, x, args, kwargs)
    with unwatched():
        slices = split(x, forwards.layout.local_sequence_slices, dim)
    outputs = []
    with forwards.in_mixture() as mixture:
        for mixture.index, one in enumerate(slices):
            of_one, named = with_first(one)
            outputs.append(run(module, *of_one, **named))
    with unwatched():
        each = zip(*(tensors(output) for output in outputs), strict=True)
        joined = iter([_of_all_slices(forwards, module, several, slices[0]) for several in each])
        return map_tensors(lambda _: next(joined), outputs[0])


def _of_all_slices(
    forwards: Forwards, module: nn.Module, several: Sequence[torch.Tensor], inputs: torch.Tensor
) -> torch.Tensor:
    """An output of a mixture, of whole sequences, from those of its slices; ``inputs``: of one slice."""
    first = several[0]
    if first.ndim > 2 and first.shape[:2] == inputs.shape[:2]:
        return join(several, 1)
    if first.ndim or not first.is_floating_point():
        raise ConfigError(
            f"reproducible.sequence_slices: {forwards.module}, a {type(module).__name__} with experts, returned "
            f"{tuple(first.shape)} for {tuple(inputs.shape[:2])} tokens, expected (samples, tokens, ...), or a number, "
            "of which the mean over slices is taken; set it to 1"
        )
    sequences = forwards.layout.sequences
    return (sum_slices(several, sequences.group) / sequences.count).to(first.dtype)


def _dim_of_tokens(forwards: Forwards, module: nn.Module, x: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """The dim of ``x``, the first input, that has the tokens, which divides into slices.

    Of 4 dims it is the one that is as long as the tokens of what came before with 3 dims.
    """
    count, others = forwards.layout.local_sequence_slices, [*args, *kwargs.values()][1:]
    dims = x.ndim if isinstance(x, torch.Tensor) else 0
    if not any(isinstance(one, torch.Tensor) for one in others):
        if dims == 3 or (dims in (1, 2) and not x.is_floating_point()):
            dim = min(dims - 1, 1)
            if x.shape[dim] % count == 0 and x.shape[dim] == (forwards.cut_tokens or x.shape[dim]):
                forwards.num_tokens = x.shape[dim]
                return dim
        fitting = [dim for dim in (1, 2) if dims == 4 and x.shape[dim] == forwards.num_tokens]
        if len(fitting) == 1:
            return fitting[0]
    shape = tuple(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__
    tokens = forwards.cut_tokens or "this rank's"
    raise ConfigError(
        f"reproducible.sequence_slices: {forwards.module}, a {type(module).__name__}, got {shape}"
        f"{' and other tensors' if any(isinstance(one, torch.Tensor) for one in others) else ''}, expected one tensor, "
        "(samples, tokens, features), the same with heads before or behind the tokens, as many heads as tokens "
        f"excepted, or (samples, tokens) or (tokens,) of ints, with {tokens} tokens, a multiple of "
        f"{count}; give each token a value of its own, or set it to 1"
    )


def _joined(outputs: Sequence[Any], dim: int) -> Any:
    first = outputs[0]
    if is_dtensor(first):  # logits over a sharded vocabulary
        return resized(join([one.to_local() for one in outputs], dim), first, dim)
    return join(outputs, dim)
