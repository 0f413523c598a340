"""The sums of squares of the gradient norm, compiled by ``torch.compile`` for half-precision gradients on a CPU.

torch's own norms read fp32 there, so half-precision gradients are widened into memory first. For fp32 gradients, and on
GPUs, a compiled pass is no faster.
"""

from __future__ import annotations

import functools

import torch

from ...base.torch_internals import take
from ...distributed.context import ParallelContext
from ...scaling.local_norm import Sums
from .kernels import InductorOptions, inductor_options

is_in_torch_dispatch_mode = take("torch.utils._python_dispatch.is_in_torch_dispatch_mode")
"""Under such a mode, as that of a counter of operations, nothing compiled may be called."""


def sums_for(context: ParallelContext) -> Sums | None:
    """The compiled sums, with ``compile`` in the configuration, on a CPU; else None."""
    options = inductor_options(context.config.compile_options)
    if options is None or context.device.type != "cpu":
        return None
    return compiled_sums(options)


def sums_of_squares(rows: torch.Tensor) -> torch.Tensor:
    """The sum of squares of each row of ``rows``, 2-dim half precision; 1-dim fp32."""
    return rows.float().square().sum(1)


@functools.cache
def compiled_sums(options: InductorOptions) -> Sums:
    """:func:`sums_of_squares`, compiled with Inductor's ``options``; compiling takes seconds, in its first call."""
    return torch.compile(sums_of_squares, dynamic=True, fullgraph=True, options=dict(options))
