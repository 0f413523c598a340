"""A GPT for `paramp verify --exact`, with a fault of one ulp on one rank, which the key FAULT names.

FAULT is a table: ``kind`` (as in :data:`paramp.exact.verify_bits.tensor_trace.KINDS`), ``rank``, ``name`` (of a module
or a parameter), and ``nth``, the forward of that rank in which it is, or for what a step changes the step.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import nn
from verified import gpt

import paramp
from paramp.base.dtensor import local
from paramp.engine.engine import Engine
from paramp.exact.microchunk_gradients import MicrochunkGradients

INTS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def bump_(tensor: torch.Tensor) -> torch.Tensor:
    """Add one ulp to an element in the middle of a contiguous tensor, or to a small number away from zero."""
    with torch._C.DisableTorchFunction(), torch.no_grad():
        bits = tensor.view(-1).view(INTS[tensor.element_size()])
        bits[len(bits) // 2] += 1
    return tensor


def bumped(tensor: torch.Tensor) -> torch.Tensor:
    return bump_(tensor.clone(memory_format=torch.contiguous_format))


class Faulty(torch.autograd.Function):
    """The identity, but for one ulp forward or backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, backward: bool) -> torch.Tensor:
        ctx.backward = backward
        return x.view_as(x) if backward else bumped(x.detach())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return bumped(gradient) if ctx.backward else gradient, None


class Fault:
    """That of this rank, if it has one."""

    def __init__(self) -> None:
        context = paramp.get_context()
        fault = dict(context.config.user.get("FAULT", {}))
        here = context.world_size > 1 and context.rank == fault.get("rank")
        self.kind, self.name = (fault["kind"], fault.get("name", "")) if here else ("", "")
        self.nth, self.calls = fault.get("nth", 0), -1

    def now(self, kind: str) -> bool:
        """Count a call; whether the fault is of this kind and in this call."""
        if self.kind != kind:
            return False
        self.calls += 1
        return self.calls == self.nth


class Scale(nn.Module):
    """Times a weight, whose gradient has the fault."""

    def __init__(self, width: int, fault: Fault) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.fault = fault

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (Faulty.apply(self.weight, True) if self.fault.now("weight gradient") else self.weight)


def faulty_gpt() -> nn.Module:
    """:func:`verified.gpt` with the fault in a forward or a backward; for that of a weight's with a Scale in it."""
    model, fault = gpt(), Fault()
    if paramp.get_context().config.user.get("FAULT", {}).get("kind") == "weight gradient":
        block = model.get_submodule("blocks.1")
        block.dropout = nn.Sequential(block.dropout, Scale(32, fault))

    def hook(_module: nn.Module, _inputs: Any, output: torch.Tensor) -> torch.Tensor | None:
        if fault.kind == "backward" and output.requires_grad and fault.now("backward"):
            output.register_hook(bumped)
        return Faulty.apply(output, False) if fault.now("forward") else None

    if fault.kind in ("forward", "backward"):
        model.get_submodule(fault.name).register_forward_hook(hook)
    return model


def criterion(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The cross-entropy, with the fault in it."""
    value = F.cross_entropy(output.flatten(0, -2), target.flatten())
    if paramp.get_context() not in _of_loss:
        _of_loss[paramp.get_context()] = Fault()
    return Faulty.apply(value, False) if _of_loss[paramp.get_context()].now("loss") else value


_of_loss: WeakKeyDictionary[Any, Fault] = WeakKeyDictionary()


@contextmanager
def planted() -> Iterator[None]:
    """A context in which a step, or the sum of its gradients, has the fault."""
    step, end_last_backward = Engine.step, MicrochunkGradients.end_last_backward

    def faulty_step(engine: Engine) -> Any:
        result, fault = step(engine), Fault()
        if fault.kind in ("master", "optimizer state", "weight") and engine.num_steps == fault.nth:
            name, _, key = fault.name.rpartition(".") if fault.kind == "optimizer state" else (fault.name, "", "")
            (param,) = (param for param in engine._weights.params if param.name == name)
            values = {
                "master": lambda: engine._weights.exact(param),
                "weight": lambda: local(param.parameter),
                "optimizer state": lambda: engine.optimizer.state[param.stepped][key],
            }
            bump_(values[fault.kind]())
        return result

    def faulty_sum(gradients: MicrochunkGradients) -> None:
        in_call, fault = gradients._in_call, Fault()  # else of an evaluation
        end_last_backward(gradients)
        if fault.kind == "gradient" and in_call:
            (param,) = (param for param in gradients._params if param.name == fault.name)
            bump_(param.local_gradient)

    with (
        mock.patch.object(Engine, "step", faulty_step),
        mock.patch.object(MicrochunkGradients, "end_last_backward", faulty_sum),
    ):
        yield
