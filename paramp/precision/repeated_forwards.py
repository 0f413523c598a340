"""The contexts of a forward, for a backward in a loop without an engine: checkpointing repeats forwards in it.

The mode is not known there, but what its contexts have set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial

import torch

from .autocast_kernels import depth
from .compute_context import default_dtype, widening
from .fp16_emulation_cpu import emulate_fp16, is_emulated
from .modes import PRESETS


def contexts_of_now() -> Callable[[], AbstractContextManager[None]]:
    """Makes contexts with the default dtype, the widening and the emulation of fp16 products of now."""
    widened = [device_type for device_type, count in depth.items() if count]
    return partial(_contexts, torch.get_default_dtype(), widened, is_emulated())


@contextmanager
def _contexts(dtype: torch.dtype, widened: Sequence[str], emulated: bool) -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(default_dtype(dtype))
        for device_type in widened:
            stack.enter_context(widening(PRESETS["16-mixed"], device_type))
        if emulated:
            stack.enter_context(emulate_fp16())
        yield
