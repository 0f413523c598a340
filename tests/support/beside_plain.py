"""An engine that trains beside a plain torch loop on the whole batch, and what has to be equal of the two."""

import fnmatch
import functools
import importlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from commands import ROOT
from reference import whole
from small_engines import own_part, sgd
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import paramp

adamw = functools.partial(torch.optim.AdamW, lr=1e-3, eps=1e-5)
"""The gradient of a key's bias is zero but for rounding, which Adam's own eps of 1e-8 would blow up."""


@contextmanager
def launch_with_compiler(config: Mapping[str, Any], *ignored: str) -> Iterator[paramp.ParallelContext]:
    """A context in which warnings that torch hides elsewhere, of its own compiler, and those ``ignored`` are none."""
    with warnings.catch_warnings(), paramp.launch_from_torch(config) as context:
        for message in ("The .grad attribute of a Tensor that is not a leaf", *ignored):
            warnings.filterwarnings("ignore", message)
        for message in ("`torch.jit.script_method` is deprecated", ".*Function'> should not be instantiated"):
            warnings.filterwarnings("ignore", message, DeprecationWarning)
        yield context


def benchmarks_common() -> Any:
    """``benchmarks/common.py``, which measures memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        return importlib.import_module("common")


def seeded(build: Callable[..., nn.Module], *args: Any, seed: int = 0) -> Any:
    """``build(*args)``, with the same random weights each time."""
    torch.manual_seed(seed)
    return build(*args)


def randn(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def plain_step(model: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor, clip: float = float("inf")) -> None:
    """One step of a plain torch loop."""
    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward()
    nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()


def copy_weights(engine: paramp.Engine, plain: nn.Module) -> None:
    """Give ``plain`` the weights of a tensor-parallel engine."""
    plain.load_state_dict({name: whole(value) for name, value in engine.module.named_parameters()}, strict=False)


def assert_gradients(engine: Any, plain: nn.Module, atol: float = 1e-6, rtol: float = 0.0, where: str = "") -> None:
    """Of the parameters that this rank has; one without a gradient has a gradient of zero."""
    for name, parameter in engine.named_parameters():
        expected = plain.get_parameter(name).grad
        given = whole(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
        _assert_close(f"{where} {name}", given, torch.zeros_like(given) if expected is None else expected, atol, rtol)


def _assert_close(name: str, actual: torch.Tensor, expected: torch.Tensor, atol: float, rtol: float) -> None:
    torch.testing.assert_close(actual, expected, atol=atol, rtol=rtol, msg=lambda text: f"{name}: {text}")


def assert_weights(actual: dict, expected: dict, atol: float, rtol: float = 0.0) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        _assert_close(name, actual[name], value, atol, rtol)


def assert_moved(name: str, parameter: torch.Tensor, start: torch.Tensor, least: float) -> None:
    """It has moved so far that the comparison would see another gradient."""
    way = (parameter.detach() - start).abs().max().item() if parameter.numel() else least
    assert way >= least, f"{name} has moved by {way:g} only"


class CountDTensors(TorchDispatchMode):
    """``found``: operators that got DTensors, but views and detach, which only wrap."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types and not any(name in str(func) for name in ("detach", "view", "alias")):
            self.found.append(str(func))
        return NotImplemented if DTensor in types else func(*args, **(kwargs or {}))


def train_both(
    context: paramp.ParallelContext,
    engine: paramp.Engine,
    plain: nn.Module,
    batches: Iterable[Sequence[torch.Tensor]],
    criterion: Callable[..., torch.Tensor] = F.mse_loss,
    optimizer: Any = sgd,
    *,
    clip: float | None = None,
    accumulation: int = 1,
    atol: float = 1e-6,
    rtol: float = 0.0,
    still: Sequence[str] = (),
) -> None:
    """Train both on the batches. Losses, gradient norms and weights are equal.

    ``still``: patterns of the names of parameters whose gradient is zero but for rounding.
    """
    stepped = optimizer(plain.parameters())
    start = {name: value.detach().clone() for name, value in plain.state_dict().items()}
    losses: list[float] = []
    trained: set[str] = set()
    for x, y in batches:
        loss = criterion(plain(x), y)
        (loss / accumulation).backward()
        losses.append(loss.item())
        found = engine.forward_backward(*own_part(context, x, y)).item()
        assert found == pytest.approx(sum(losses) / len(losses), abs=1e-5)  # the mean of the window so far
        result = engine.step()
        assert result.stepped == (len(losses) == accumulation)
        if result.stepped:
            norm = nn.utils.clip_grad_norm_(plain.parameters(), clip or float("inf")).item()
            assert result.grad_norm == pytest.approx(norm, rel=1e-4)
            stepped.step()
            trained |= {name for name, one in plain.named_parameters() if one.grad is not None}
            stepped.zero_grad()
            engine.zero_grad()
            losses.clear()
    assert_weights(engine.full_state_dict(), plain.state_dict(), atol, rtol)
    for name in (one for one in trained if not any(fnmatch.fnmatch(one, pattern) for pattern in still)):
        assert_moved(name, plain.get_parameter(name), start[name], 10 * atol)
