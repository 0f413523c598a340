"""Experts and their routers: routers compute in fp32 in every mode, and experts in the mode's dtype.

A router multiplies each token by a row for each expert and chooses the few experts with the largest results. Rounded to
half precision, many results are equal or change places, so that other experts are chosen and trained. So a router runs
outside of autocast, and half-precision weights and inputs are widened for its forward: the product, the softmax and the
scores are in fp32. Gradients are rounded once, to the dtype of the weights.

It covers the routers of transformers, torchtitan and paramp, by the names of their classes
(:func:`~paramp.base.module_surgery.is_router`). A router of another library computes in the mode's dtype, as any module
does, unless its own forward leaves autocast.

The products of experts follow the mode as those of linear layers do: ``F.grouped_mm`` by its kernel for autocast
(:mod:`.compute_context`), ``torch.bmm`` and ``F.linear`` by torch's. Neither torchao nor Transformer Engine has float8
layers for them here, so that in float8 modes they compute in the mode's other dtype, and are named.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from ..base.errors import ConfigError
from ..base.module_surgery import is_router, replace_forward, unbound, with_parameters
from ..base.trees import map_tensors
from .modes import Precision

HALF = (torch.float16, torch.bfloat16)
SCALE_INPUTS = ("Llama4Router", "JetMoeTopKGating", "InklingTopkRouter")
"""Routers whose scores the model multiplies by what experts get, so that they have to have the weights' dtype."""


def check_grouped_products(model: nn.Module, precision: Precision) -> None:
    """Raise a ConfigError if experts of ``model``, one of transformers', call ``F.grouped_mm`` in fp64."""
    for name, module in model.named_modules() if precision.compute is torch.float64 else ():
        config = getattr(module, "config", None)
        is_stack = hasattr(module, "is_concatenated")  # transformers gives that to experts
        if is_stack and getattr(config, "_experts_implementation", None) == "grouped_mm":
            raise ConfigError(
                f"precision: got {precision.name!r}, but {name!r} calls F.grouped_mm, which torch has in float32, "
                "float16 and bfloat16 only; call model.set_experts_implementation('eager'), or choose another mode"
            )


def keep_routers_wide(model: nn.Module, precision: Precision) -> None:
    """Let the routers in ``model`` compute in fp32 from now on, in place, if the mode computes in half precision."""
    for module in model.modules() if precision.compute in HALF else ():
        replaced = vars(module).get("forward")
        if is_router(module) and not hasattr(replaced, MARK):
            run = type(module).forward if replaced is None else unbound(replaced, module)
            replace_forward(module, _in_fp32(run))


MARK = "computes_in_fp32"
"""An attribute of the forwards that :func:`keep_routers_wide` has made."""


def _in_fp32(run: Any) -> Any:
    """``run``, a forward of a router and its inputs, in fp32."""

    @functools.wraps(run)
    def forward(router: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        stored = next((value.dtype for value in router.parameters()), torch.float32)
        with _wide(router):
            args, kwargs = map_tensors(_widened, (args, kwargs))
            output = run(router, *args, **kwargs)
        if stored in HALF and type(router).__name__ in SCALE_INPUTS:
            return map_tensors(lambda value: value.to(stored) if value.is_floating_point() else value, output)
        return output

    setattr(forward, MARK, True)
    return forward


@contextmanager
def _wide(router: nn.Module) -> Iterator[None]:
    """A context without autocast, in which the half-precision parameters of ``router`` are in fp32."""
    with ExitStack() as stack:
        device = next((parameter.device.type for parameter in router.parameters()), "cpu")
        stack.enter_context(torch.autocast(device, enabled=False))
        for module in router.modules():
            own = module._parameters.items()
            half = {name: _widened(value) for name, value in own if value is not None and value.dtype in HALF}
            if half:
                stack.enter_context(with_parameters(module, half))
        yield


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in HALF else tensor
