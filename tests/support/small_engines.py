"""Small engines: how tests make, train, fill and save them, and what they compare of them."""

import functools
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from reference import local, rank_slice, small_gpt
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import functional as F

import paramp
from paramp.checkpoint.open_checkpoint import OpenCheckpoint
from paramp.checkpoint.resharding import read_tensor

sgd = functools.partial(torch.optim.SGD, lr=0.1)


def engine_of(model: Any, criterion: Any = F.mse_loss, optimizer: Any = sgd, **options: Any) -> paramp.Engine:
    return paramp.initialize(model, optimizer, criterion, **options)[0]


def gpt_engine(**changes: Any) -> paramp.Engine:
    model = small_gpt(**changes)
    return engine_of(model, model.loss, functools.partial(torch.optim.AdamW, lr=1e-3))


def own_part(context: paramp.ParallelContext, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """This data rank's part of the tensors of a batch."""
    return [rank_slice(tensor, context.dp.rank, context.dp.size) for tensor in tensors]


def run_batch(engine: Any, x: torch.Tensor, y: torch.Tensor | None = None):
    """The loss of a batch that is this rank's already, with a backward."""
    y = x if y is None else y
    if engine.precision.weights is torch.float64 and y.is_floating_point():
        y = y.double()  # torch 2.11 has no backward of an `mse_loss` of two dtypes
    return engine.forward_backward(x, y)


def train_step(engine: Any, x: torch.Tensor, y: torch.Tensor | None = None):
    """One step on a batch that is this rank's already; its result."""
    run_batch(engine, x, y)
    return engine.step()


# ------------------------------------------------------------------------------------------- engines of one value


def filled_engine(value: float, size: int = 4, **options: Any):
    """An engine of two layers, all whose weights are ``value``."""
    model = nn.Sequential(nn.Linear(size, size), nn.Linear(size, size))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return engine_of(model, **options)


def save(engine: Any, path: Path, wait: bool = True) -> None:
    engine.save(path, wait=wait)
    engine.finish_saving()


def only_value(tensors: Iterable[torch.Tensor]) -> float:
    (value,) = {value for tensor in tensors for value in tensor.unique().tolist()}
    return value


def value_at(path: Path, **options: Any) -> float:
    """The one value of all weights in the checkpoint at ``path``."""
    engine = filled_engine(0.0, **options)
    engine.load(path)
    return only_value(engine.full_state_dict().values())


# ------------------------------------------------------------------------------------------ gradients made by hand

TIED = ["embedding.tokens.weight", "head.weight"]
"""One parameter of a small GPT, in a pipeline on two stages."""


def gradients_at(step: int) -> dict[str, torch.Tensor]:
    """Of all parameters of a small GPT of two layers. Sums of two of them are exact."""
    named = small_gpt(num_layers=2).named_parameters()
    torch.manual_seed(step)
    return {name: torch.randn_like(value).bfloat16().float() / 64 for name, value in named}


def set_gradients(engine: Any, whole: Mapping[str, torch.Tensor]) -> None:
    """Set this rank's terms of the gradients ``whole``."""
    context = engine.context
    # Shards hold sums over data ranks, and what ZeRO has reduced too.
    terms = 1 if context.config.parallel.shard > 1 or context.config.parallel.zero else context.dp.size
    for name, value in engine.named_parameters():
        tied = context.pp.size > 1 and name in TIED  # and summed over both stages
        gradient = whole[TIED[0] if tied else name].view(value.shape) / (terms * (1 + tied))
        if isinstance(value, DTensor):
            gradient = distribute_tensor(gradient, value.device_mesh, value.placements)
        local(value.grad).copy_(local(gradient))


# ----------------------------------------------------------------------------------------------------- assertions


def assert_same_tensors(actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    assert [name for name, value in expected.items() if not torch.equal(actual[name], value)] == []


def assert_same_checkpoints(path: Path | str, other: Path | str) -> None:
    """The same tensors but random streams, to the bit, and values beside them that do not depend on the layout."""
    (tensors, values), (expected, expected_values) = _contents(path), _contents(other)
    assert_same_tensors(tensors, expected)
    assert [value.dtype for value in tensors.values()] == [expected[name].dtype for name in tensors]
    assert values == expected_values


def _contents(path: Path | str) -> tuple[dict[str, torch.Tensor], list[Any]]:
    with OpenCheckpoint(path) as checkpoint:
        names = [name for name in checkpoint.header.tensors if not name.startswith(("random.", "data."))]
        values = checkpoint.header.values
        return {name: read_tensor(checkpoint, name) for name in names}, [values[key] for key in ("scaler", "counts")]


def each_raises(error: Any, calls: Mapping[str, Callable[[], Any]]) -> None:
    """Each call raises ``error`` with a message that matches its key."""
    for words, call in calls.items():
        with pytest.raises(error, match=words):
            call()


def everywhere(value: Any) -> list[Any]:
    """What each rank has passed."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


# ------------------------------------------------------------------------------------------- values that are planted

LARGE = 2.0**40
"""A factor, where other values are added."""


class Planted(torch.autograd.Function):
    """The identity, but that the output, or with ``backward`` its gradient, is spoilt with ``value``."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, value: float, backward: bool) -> torch.Tensor:
        ctx.value = value if backward else 0.0
        return x.clone() if backward else _spoil(x, value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _spoil(gradient, ctx.value), None, None


def _spoil(x: torch.Tensor, value: float) -> torch.Tensor:
    return x * value if value == LARGE else x + value


def numpys(gradients: Iterable[torch.Tensor]) -> tuple[dict[int, int], int, int, int]:
    """numpy's counts of binary exponents in whole gradients, of zeros, of what is not finite, and of all elements."""
    values = np.concatenate([gradient.detach().double().numpy().ravel() for gradient in gradients])
    finite = values[np.isfinite(values) & (values != 0)]
    exponents, counts = np.unique(np.floor(np.log2(np.abs(finite))).astype(int), return_counts=True)
    found = dict(zip(exponents.tolist(), counts.tolist(), strict=True))
    return found, int((values == 0).sum()), int((~np.isfinite(values)).sum()), values.size
