"""The compiled step of an engine's optimizer and the compiled sums of its norm, and whether they are used."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence

import torch

from ...base import loop_block_sizes
from ...base.torch_internals import take
from ...distributed.context import ParallelContext
from ...scaling.local_norm import Sums
from ..flat_buffer import StepRange
from ..flat_weights import OptimizerWeights
from ..fused_step import FusedStep, StepBlock
from ..remainder_masters import RemainderMasters
from .kernels import (
    FAMILIES,
    Family,
    InductorOptions,
    Variant,
    compiled_step,
    inductor_options,
    joined,
    step_function,
)

is_in_torch_dispatch_mode = take("torch.utils._python_dispatch.is_in_torch_dispatch_mode")
"""Under such a mode, as that of a counter of operations, nothing compiled may be called."""

TRIED = 2**16
"""Elements of the step with which each kernel is compared with its uncompiled function. Inductor decides by this first
call whether a kernel uses several threads: only if each has at least 512 elements."""


def fused_step_for(context: ParallelContext) -> Callable[[torch.optim.Optimizer, OptimizerWeights], FusedStep]:
    """Makes the step of an optimizer that has fused kernels: compiled if the configuration asks for it with Inductor.

    Every rank has Inductor's compiler then (:func:`paramp.parallel.compiled_blocks.check_compiler`).
    """
    settings, precision = inductor_options(context.config.compile_options), context.config.precision
    in_kernels = precision.rounding == "stochastic" or precision.optimizer_state == "bf16"  # in torch's kernels only
    if settings is None or in_kernels:
        return FusedStep
    return functools.partial(CompiledStep, settings=settings)


class CompiledStep(FusedStep):
    """AdamW, Adam and SGD in one loop over memory for each range.

    The loop compares each weight with its master, for nothing on a CPU: memory that is written is read first anyway.

    On a CPU a range with remainders runs in blocks, whose weights and remainders are copied while they are in the cache
    (:mod:`paramp.optim.compiled.kernels`). A call costs some 35 us for each block.

    Args:
        settings: options for Inductor.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, weights: OptimizerWeights, settings: InductorOptions) -> None:
        super().__init__(optimizer, weights)
        self._settings = settings
        self._family: Family = FAMILIES[type(optimizer)]
        self._on_cpu = weights.device.type == "cpu"
        self._options: tuple[tuple[tuple[float, ...], ...], torch.Tensor] | None = None
        self._index = {param: index for index, param in enumerate(weights.params)}
        self._first: tuple[tuple[int, ...], torch.Tensor] | None = None
        self._kernels: dict[Variant, Callable[..., None] | None] = {}
        weights.changes.leave_out(weights.buffers)

    def _run(self, ranges: Sequence[StepRange], divisor: torch.Tensor, skip: torch.Tensor, *, compare: bool) -> None:
        if not ranges:  # of this optimizer, another stage or data rank has the parameters
            return
        if compare and (not self._on_cpu or skip):  # a step that is skipped leaves masters as they are
            self._weights.follow_changes()
        if self._on_cpu and skip:  # known without a wait
            return
        if is_in_torch_dispatch_mode():  # such as a FLOP counter, under which nothing is compiled from then on
            super()._run(ranges, divisor, skip, compare=True)
            return
        flag = None if self._on_cpu else skip.bool()
        rows = self._coefficients(ranges, divisor)
        by_dtype = {dtype: rows.to(dtype).unbind() for dtype in (torch.float32, torch.float64)}
        for index, step_range in enumerate(ranges):
            kernel = self._kernel_for(step_range)
            if kernel is None:
                super()._run([step_range], divisor, skip, compare=True)
                continue
            row = by_dtype[torch.promote_types(step_range.buffer.masters.dtype, torch.float32)][index]
            names = self._names(step_range)
            in_blocks = self._on_cpu and isinstance(step_range.buffer.masters, RemainderMasters)
            size = loop_block_sizes.STEP_BLOCK["cpu"] if in_blocks else step_range.length
            for block in self._in_blocks(step_range, size):
                self._compiled_block(kernel, block, names, row, flag)

    def _compiled_block(
        self,
        kernel: Callable[..., None],
        block: StepBlock,
        names: Sequence[str],
        row: torch.Tensor,
        skip: torch.Tensor | None,
    ) -> None:
        """Step a block in place."""
        masters, gradient, weight = block.masters, block.gradient, block.masters.weight
        master = masters.stepped if masters.has_master else None
        remainder = masters.remainders if isinstance(masters, RemainderMasters) else None
        state = [block.state[name] for name in names]
        if not self._on_cpu or remainder is None:
            kernel(weight, master, remainder, gradient, state, row, skip, None)
            return
        rounded = self._scratch.like("rounded", weight, weight.dtype)
        wide = self._widened("remainder", remainder, torch.int32)
        kernel(weight, master, wide, gradient, state, row, skip, rounded)
        weight.copy_(rounded)
        remainder.copy_(wide)

    def _names(self, step_range: StepRange) -> tuple[str, ...]:
        return self._kernel.states(self._optimizer.param_groups[step_range.group])

    def _kernel_for(self, step_range: StepRange) -> Callable[..., None] | None:
        """The compiled function for a range; None if it does not compute what the function does uncompiled."""
        masters, options = step_range.buffer.masters, self._optimizer.param_groups[step_range.group]
        variant = Variant(
            family=self._family,
            device=self._weights.device.type,
            weight=masters.weight.dtype,
            gradient=step_range.buffer.gradients.dtype,
            state=masters.dtype,
            num_states=len(self._names(step_range)),
            has_master=masters.has_master,
            has_remainder=isinstance(masters, RemainderMasters),
            nesterov=bool(options.get("nesterov")),
            has_l2=bool(options["weight_decay"]) and not options.get("decoupled_weight_decay"),
        )
        if variant not in self._kernels:
            kernel = compiled_step(variant, self._settings)
            is_right = agrees(kernel, variant, self._weights.device)
            if not is_right:
                text = "compile: the optimizer step differs from the uncompiled one, so torch's kernels are used"
                warnings.warn(text, stacklevel=2)
            self._kernels[variant] = kernel if is_right else None
        return self._kernels[variant]

    def _coefficients(self, ranges: Sequence[StepRange], divisor: torch.Tensor) -> torch.Tensor:
        """The coefficients of each range, one row each; float64 on the device, without a wait for it."""
        groups = [self._optimizer.param_groups[one.group] for one in ranges]
        rows = tuple((*self._family.options(group), -1.0 if group["maximize"] else 1.0) for group in groups)
        if self._options is None or self._options[0] != rows:
            self._options = rows, self._to_device(torch.tensor(rows, dtype=torch.float64))
        options = self._options[1]
        for index, group in enumerate(groups):
            if torch.is_tensor(group["lr"]):
                options[index, 0].copy_(group["lr"])
        first = tuple(self._index[one.params[0]] for one in ranges)
        if self._first is None or self._first[0] != first:
            self._first = first, self._to_device(torch.tensor(first))
        steps = self._steps[self._first[1]].double()
        scale = options[:, -1] / divisor
        return torch.stack([scale, *self._family.coefficients(options[:, :-1], steps)], 1)

    def _to_device(self, values: torch.Tensor) -> torch.Tensor:
        """``values`` on the device; from pinned memory, so that the host does not wait."""
        return values if self._on_cpu else values.pin_memory().to(self._weights.device, non_blocking=True)


@torch.no_grad()
def agrees(kernel: Callable[..., None], variant: Variant, device: torch.device) -> bool:
    """Whether ``kernel`` computes the step of ``variant`` as its function does uncompiled, but for rounding."""
    results, on_cpu = [], device.type == "cpu"
    for function in (kernel, step_function(variant)):
        generator = torch.Generator().manual_seed(1)
        noise = [torch.rand(TRIED, generator=generator) + 0.5 for _ in range(2 + variant.num_states)]
        exact, gradient, *state = (one.to(device) for one in noise)
        weight = exact.to(variant.weight)
        master = exact.clone() if variant.has_master else None
        low = torch.arange(TRIED, device=device).remainder(256).to(torch.int32 if on_cpu else torch.int16)
        remainder = low if variant.has_remainder else None
        rounded = torch.zeros_like(weight) if on_cpu and variant.has_remainder else None
        states = [one.to(variant.state) for one in state]
        coefficients = torch.tensor([0.01, 0.99, 0.02, 0.1, 0.9, 0.1, 0.01, 1.0, 1e-8], device=device)
        row = coefficients.to(torch.promote_types(variant.state, torch.float32))
        skip = None if on_cpu else torch.zeros((), dtype=torch.bool, device=device)
        function(weight, master, remainder, gradient.to(variant.gradient), states, row, skip, rounded)
        new = weight if rounded is None else rounded
        if remainder is not None:
            new = joined(new, remainder)
        results.append([one for one in (new, master, *states) if one is not None])
    compared = zip(*results, strict=True)  # another order of multiplication may round to a neighbour
    return all(
        torch.allclose(one, other, rtol=1e-5 if one.itemsize > 2 else 0.01, atol=1e-5) for one, other in compared
    )


def sums_for(context: ParallelContext) -> Sums | None:
    """The sums of squares of the gradient norm, compiled, for half-precision gradients on a CPU; None: not compiled.

    torch's own norms read fp32 there, so half-precision gradients are widened into memory first. For fp32 gradients,
    and on GPUs, a compiled pass is no faster.
    """
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
