"""Whether an optimizer's update needs whole matrices: a step of a small matrix, whole and in halves.

An optimizer is elementwise if each element's update depends on that element's weight, gradient and state alone. Then
ranks can step shards. Muon, Adafactor and LAMB are not; nothing in a class tells, so each that is not known is tried.
Nor does it tell whether the state has copies of weights, which are not to be rounded as moments are.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ...base.errors import ConfigError
from ...distributed.trials import without_draws

_ELEMENTWISE: tuple[type[torch.optim.Optimizer], ...] = (
    *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam),
    *(torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.ASGD),
)
KNOWN = dict.fromkeys(_ELEMENTWISE, False) | dict.fromkeys((torch.optim.Muon, torch.optim.Adafactor), True)
"""torch's optimizers -> whether they need whole matrices. They are not tried: Muon's trial takes seconds where products
in bf16 are slow."""
SHAPE = (256, 320)
"""Of the matrix. Adafactors factor dims of 128 and more, and 8-bit states begin at 4096 elements; a half has both. The
same elements are tried with as many dims as the optimizer's parameters have."""
STEPS = 4
"""Some optimizers only prepare their state in the first steps."""
TOLERANCE = 1e-5
"""Of differences, in the largest change of an element. A false alarm costs communication only."""
LEARNING_RATE = 0.1
"""In place of the group's, which a warmup may have set to 0."""

Matrices = Sequence[torch.Tensor]
Halved = Callable[[torch.Tensor], Matrices]


def needs_whole_matrices(optimizer: torch.optim.Optimizer, device: torch.device) -> bool:
    """Whether ``optimizer``, with the options of any of its groups, steps a matrix otherwise than its shards.

    It is not changed: a copy is tried, with matrices on ``device``. One that cannot be tried needs whole matrices.

    Raises:
        ConfigError: the step of one matrix depends on others, which other ranks have.
    """
    if (known := KNOWN.get(type(optimizer))) is not None:
        return known
    with without_draws(device):
        found = [_tried(optimizer, options, ndim, device) for options, ndim in _distinct_options(optimizer)]
    return any(found)


def steps_slices_alone(
    optimizer: torch.optim.Optimizer, kinds: Iterable[tuple[int, int]], device: torch.device
) -> bool:
    """Whether ``optimizer`` steps each slice along dim 0 of a tensor by itself, as a Muon does for stacks of matrices.

    ``kinds``: the index of the param group and the number of dims of each tensor. Tried as in
    :func:`needs_whole_matrices`.
    """
    with without_draws(device):
        return not any(
            _tried(optimizer, _options(optimizer.param_groups[group]), ndim, device, of_matrices=(_rows,))
            for group, ndim in sorted(set(kinds))
        )


def copies_weights(optimizer: torch.optim.Optimizer, device: torch.device) -> bool:
    """Whether ``optimizer`` keeps a copy or an average of a matrix in its state, as schedule-free ones and ASGD do.

    A copy is tried, as in :func:`needs_whole_matrices`, on a weight that is large beside its gradients and updates.
    """
    if type(optimizer) in KNOWN:
        return type(optimizer) is torch.optim.ASGD
    with without_draws(device):
        return any(_keeps(optimizer, options, ndim, device) for options, ndim in _distinct_options(optimizer))


def _keeps(optimizer: torch.optim.Optimizer, options: dict[str, Any], ndim: int, device: torch.device) -> bool:
    weight, _, *gradients = (one.view(_shape(ndim)) for one in _matrices(torch.float32, device))
    start = 1e6 * weight
    try:
        (after,), tried = _stepped(optimizer, options, [start], [[one] for one in gradients])
        state = list(tried.state[tried.param_groups[0]["params"][0]].values())
    except Exception:  # such as of one that takes 2-dim matrices only, or keeps its state elsewhere
        return False
    tensors = [value for value in state if torch.is_tensor(value)]
    elementwise = [value.float() for value in tensors if value.shape == start.shape]
    return any(bool((value - after).norm() < 0.1 * after.norm()) for value in elementwise)


def _shape(ndim: int) -> tuple[int, ...]:
    ndim = min(ndim, 8)  # 320 columns have no more than six dims of 2
    return (SHAPE[0], -1, *[2] * (ndim - 2)) if ndim > 1 else (-1,)


def _tried(
    optimizer: torch.optim.Optimizer,
    options: dict[str, Any],
    ndim: int,
    device: torch.device,
    of_matrices: Sequence[Halved] | None = None,
) -> bool:
    """As :func:`needs_whole_matrices`, with the options of one group and a tensor of ``ndim`` dims.

    ``of_matrices``: how tensors of several dims are halved. None: in each way that ranks may shard them.
    """
    shape = _shape(ndim)
    for dtype in (torch.float64, torch.float32):  # some kernels are for float32 only
        weight, other, *gradients = (one.view(shape) for one in _matrices(dtype, device))
        try:
            whole = _stepped(optimizer, options, [weight], [[one] for one in gradients])[0][0]
            again = _stepped(optimizer, options, [weight], [[one] for one in gradients])[0][0]
            both = _stepped(optimizer, options, [weight, other], [[one, one.flip(0)] for one in gradients])[0][0]
        except Exception:
            continue
        if torch.equal(whole, weight) or not whole.isfinite().all():
            continue
        if not torch.equal(whole, again):  # it draws random numbers, so there is nothing to compare
            return True
        if not _agree(both, whole, weight):
            raise ConfigError(
                f"optimizer: {type(optimizer).__name__} steps one matrix depending on others, as a clip of its own or "
                "an estimate of the learning rate does, but ranks have different ones; turn that off "
                "(clip_grad_norm in the configuration clips by the norm of the whole model)"
            )
        halves = of_matrices or HALVES if ndim > 1 else HALVES[-1:]
        return not all(_same_in_halves(optimizer, options, weight, gradients, whole, halved) for halved in halves)
    return True


def _rows(matrix: torch.Tensor) -> Matrices:
    return matrix.tensor_split(2, 0)


def _columns(matrix: torch.Tensor) -> Matrices:
    return matrix.tensor_split(2, 1)


def _elements(matrix: torch.Tensor) -> Matrices:
    return matrix.flatten().tensor_split([SHAPE[0] * SHAPE[1] // 2 + 64])


HALVES = (_rows, _columns, _elements)
"""The shards of tensor parallelism and FSDP2, and of ZeRO."""


def _same_in_halves(
    optimizer: torch.optim.Optimizer,
    options: dict[str, Any],
    weight: torch.Tensor,
    gradients: Matrices,
    whole: torch.Tensor,
    halved: Halved,
) -> bool:
    """Whether two copies of ``optimizer`` that step a half each get to the halves of ``whole``."""
    parts = [halved(weight), halved(whole), *(halved(one) for one in gradients)]
    for half, expected, *own in zip(*parts, strict=True):
        try:
            (stepped,), _ = _stepped(optimizer, options, [half], [[one] for one in own])
        except Exception:  # such as Muon's, which takes 2-dim matrices only
            return False
        if not _agree(stepped, expected, half):
            return False
    return True


def _agree(one: torch.Tensor, other: torch.Tensor, before: torch.Tensor) -> bool:
    return bool((one - other).abs().max() <= TOLERANCE * (other - before).abs().max())


def _matrices(dtype: torch.dtype, device: torch.device) -> Iterator[torch.Tensor]:
    """Two weights and the gradients of each step; their halves have different norms."""
    generator = torch.Generator().manual_seed(0)
    rows, columns = (torch.linspace(0.1, 2.0, size) for size in SHAPE)
    for number in range(2 + STEPS):
        noise = torch.randn(SHAPE, generator=generator)
        scale = rows[:, None] * columns if number < 2 else 1 / rows[:, None] + columns**2
        yield (noise * scale).to(device, dtype)


def _distinct_options(optimizer: torch.optim.Optimizer) -> list[tuple[dict[str, Any], int]]:
    """The options of each group, without groups that differ in the learning rate only, with each number of dims."""
    found: dict[tuple[str, int], tuple[dict[str, Any], int]] = {}
    for group in optimizer.param_groups:
        options = _options(group)
        shown = repr({key: value for key, value in options.items() if key != "initial_lr"})
        for ndim in sorted({parameter.ndim for parameter in group["params"]}):
            found.setdefault((shown, ndim), (options, ndim))
    return list(found.values())


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a param group, with the learning rate of a trial."""
    options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    if "lr" in options:
        rate = options["lr"]
        options["lr"] = torch.full_like(rate, LEARNING_RATE) if torch.is_tensor(rate) else LEARNING_RATE
    return options


def _stepped(
    optimizer: torch.optim.Optimizer, options: dict[str, Any], weights: Matrices, gradients: Sequence[Matrices]
) -> tuple[list[torch.Tensor], torch.optim.Optimizer]:
    """``weights`` after steps of a copy of ``optimizer``, with one element of ``gradients`` a step; and the copy."""
    parameters = [nn.Parameter(one.clone(memory_format=torch.contiguous_format)) for one in weights]
    tried = _copied(optimizer, {**copy.deepcopy(options), "params": parameters})
    train = getattr(type(tried), "train", None)
    if callable(train):  # schedule-free ones step in that mode only
        train(tried)
    for of_step in gradients:
        for parameter, gradient in zip(parameters, of_step, strict=True):
            parameter.grad = gradient.clone(memory_format=torch.contiguous_format)
        tried.step()
    return [parameter.detach() for parameter in parameters], tried


def _copied(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> torch.optim.Optimizer:
    """A copy of ``optimizer`` with ``group`` as its only param group, and neither state nor hooks.

    Not made by its constructor, which may need more arguments than its groups have.
    """
    if any(optimizer.state.values()):  # some constructors, such as Adagrad's, make the state
        return type(optimizer)([group], **optimizer.defaults)
    tried = type(optimizer).__new__(type(optimizer))
    own = {"param_groups", "state", "step", "zero_grad"}  # a scheduler replaces step() by one of the original's
    kept = {key: value for key, value in vars(optimizer).items() if key not in own and "_hooks" not in key}
    hooks: dict[str, Any] = {key: OrderedDict() for key in vars(optimizer) if "_hooks" in key}
    memo = {id(parameter): parameter for one in optimizer.param_groups for parameter in one["params"]}
    vars(tried).update(copy.deepcopy(kept, memo) | hooks)
    tried.param_groups, tried.state = [group], defaultdict(dict)
    return tried
