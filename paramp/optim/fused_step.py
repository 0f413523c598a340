"""The optimizer step over flat buffers, in torch's fused kernels.

The step is memory-bound, so it runs in blocks that stay in the cache, and finishes each block before the next: widen
the gradient, step the master, round it to the weight. The divisor, which unscales and clips, and the decision to skip
are tensors, so that the host does not synchronise with a GPU. This is for AdamW, Adam and SGD (:class:`FusedStep`). Any
other optimizer runs its own ``step()`` (:mod:`.choose_step`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from ..base import loop_block_sizes
from ..base.scratch_memory_cpu import Scratch
from ..base.torch_internals import expect
from ..precision.stochastic_rounding import round_state
from .flat_buffer import Buffer, FlatParam, StepRange, aligned, step_ranges
from .flat_state import FlatState, Options, State
from .flat_weights import NO_GROUP, OptimizerWeights
from .masters import ALL, Masters
from .user_changes.refused_changes import check_unchanged

expect("torch._fused_adam_", "torch._fused_adamw_", "torch._fused_sgd_")

Update = Callable[..., None]
"""``update(weight, gradient, state, grad_scale=..., found_inf=...)``; may overwrite the gradient."""


def num_step_hooks(optimizer: torch.optim.Optimizer) -> int:
    """How many hooks its ``step()`` has, with those of every optimizer but torch's own, which only watch."""
    of_all = (*_global_optimizer_pre_hooks.values(), *_global_optimizer_post_hooks.values())
    num_of_all = sum(not getattr(hook, "__module__", "").startswith("torch.") for hook in of_all)
    return num_of_all + len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks)


@dataclass(frozen=True)
class Kernel:
    """A fused kernel of torch's for one kind of optimizer."""

    states: Callable[[Options], tuple[str, ...]]
    """The names of its state tensors with a group's options; all have the weight's shape and are zero at first."""
    counts_steps: bool
    """Whether its state has the number of steps, as ``step``."""
    bind: Callable[[Options, torch.Tensor], Update]
    """The update with a group's options and a step count, 0-dim."""


def _rate(options: Options) -> float | torch.Tensor:
    """The learning rate as the kernels take it; a schedule may have set one of NumPy's."""
    return options["lr"] if isinstance(options["lr"], torch.Tensor) else float(options["lr"])


def _adam(options: Options, step: torch.Tensor) -> Update:
    kernel = torch._fused_adamw_ if options.get("decoupled_weight_decay") else torch._fused_adam_
    fixed = {name: options[name] for name in ("weight_decay", "eps", "amsgrad", "maximize")} | {"lr": _rate(options)}
    fixed |= {"beta1": float(options["betas"][0]), "beta2": float(options["betas"][1])}

    def update(weight: torch.Tensor, gradient: torch.Tensor, state: State, **scaling: Any) -> None:
        first, second = [state["exp_avg"]], [state["exp_avg_sq"]]
        most = [state["max_exp_avg_sq"]] if options["amsgrad"] else []
        kernel([weight], [gradient], first, second, most, [step], **fixed, **scaling)

    return update


def _sgd(options: Options, _: torch.Tensor) -> Update:
    fixed = {name: options[name] for name in ("momentum", "dampening", "weight_decay", "nesterov", "maximize")}
    # A momentum of zeros gives the same result as a first step would, also if the first step is skipped.
    fixed |= {"lr": _rate(options), "is_first_step": False}

    def update(weight: torch.Tensor, gradient: torch.Tensor, state: State, **scaling: Any) -> None:
        momenta = [state["momentum_buffer"]] if options["momentum"] else []
        torch._fused_sgd_([weight], [gradient], momenta, **fixed, **scaling)

    return update


def _adam_states(options: Options) -> tuple[str, ...]:
    return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if options["amsgrad"] else ("exp_avg", "exp_avg_sq")


KERNELS: dict[type[torch.optim.Optimizer], Kernel] = {
    torch.optim.Adam: Kernel(_adam_states, True, _adam),
    torch.optim.AdamW: Kernel(_adam_states, True, _adam),
    torch.optim.SGD: Kernel(lambda options: ("momentum_buffer",) if options["momentum"] else (), False, _sgd),
}


@dataclass(frozen=True)
class StepBlock:
    """Views of a part of a step range, kept from step to step: making them costs microseconds each."""

    masters: Masters
    gradient: torch.Tensor
    state: State
    random_bits: Callable[[], Iterator[tuple[slice, Callable[[int], torch.Tensor]]]] | None
    """Of each parameter in it, as :meth:`Buffer.random_bits` yields them, if state is rounded stochastically."""

    def store_state(self, state: State, stepped: State) -> None:
        """Store the values ``stepped`` in ``state``, which are some of :attr:`state`."""
        if self.random_bits is None or not state:
            for name, value in state.items():
                if stepped[name] is not value:
                    value.copy_(stepped[name])
            return
        for part, bits in self.random_bits():
            round_state([value[part] for value in state.values()], [stepped[name][part] for name in state], bits)


class StepRanges:
    """The ranges that this rank steps. A parameter without a gradient on any rank is not stepped.

    Adam's bias correction uses each parameter's own step count, so only parameters that have missed the same steps
    share a range.
    """

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        self._buffers = buffers
        self._missed: dict[FlatParam, int] = {}  # equal for parameters that have missed the same steps
        self._histories = itertools.count(1)
        self._absent: tuple[FlatParam, ...] = ()
        self._current = step_ranges(buffers)

    def without(self, absent: Sequence[FlatParam]) -> list[StepRange]:
        """The ranges of the next step, in which no rank has a gradient for the parameters in ``absent``."""
        if tuple(absent) != self._absent:
            self._absent = tuple(absent)
            self._current = step_ranges(self._buffers, self._absent, self._missed)
        # Only the device has the flag that skips this step, so the absent get a separate history in either case.
        missed: dict[int, int] = {}
        for param in absent:
            before = self._missed.get(param, 0)
            if before not in missed:
                missed[before] = next(self._histories)
            self._missed[param] = missed[before]
        return self._current

    def set_step_counts(self, steps: Mapping[FlatParam, int]) -> None:
        """Set each parameter's step count from a loaded state: parameters with equal counts share ranges again."""
        most = max(steps.values(), default=0)
        self._missed = {param: count - most for param, count in steps.items()}  # histories made later are above 0
        self._current = step_ranges(self._buffers, self._absent, self._missed)


class FusedStep:
    """AdamW, Adam and SGD in torch's fused kernels. The optimizer keeps its groups and its state."""

    calls_optimizer = False
    """Whether it calls the optimizer's own ``step()``."""

    def __init__(self, optimizer: torch.optim.Optimizer, weights: OptimizerWeights) -> None:
        self._optimizer, self._weights = optimizer, weights
        self._kernel = KERNELS[type(optimizer)]
        self._state = FlatState(optimizer, weights, self._kernel.states, counts_steps=self._kernel.counts_steps)
        self._steps = self._state.steps
        self._scratch = Scratch()
        self._step_ranges, self._ranges = StepRanges(weights.buffers), list[StepRange]()
        self._blocks: dict[tuple[StepRange, int], list[StepBlock]] = {}
        self._counts: tuple[tuple[FlatParam, ...], torch.Tensor] | None = None
        self._params_of_groups = [list(group["params"]) for group in optimizer.param_groups]
        self._checked: object = None  # what was found in order last
        optimizer.register_load_state_dict_post_hook(lambda _: self.state_loaded())

    def __call__(self, divisor: torch.Tensor, skip: torch.Tensor, absent: Sequence[FlatParam]) -> None:
        """Step every parameter but ``absent``, with its gradient divided by ``divisor``, unless ``skip`` is 1.

        Args:
            divisor, skip: 0-dim on the device, float64 and float32; the second is 0 or 1.
        """
        self._check_unchanged()
        current = self._step_ranges.without(absent)
        if current is not self._ranges:
            self._ranges = current
            self._blocks.clear()
        ranges = [one for one in current if one.group != NO_GROUP]
        compare = self._weights.changes.due
        if compare and (absent or len(ranges) < len(current)):  # masters that are not stepped follow too
            self._weights.follow_changes()
            compare = False
        if self._kernel.counts_steps:
            counted = self._counted(absent)
            self._steps.add_(counted)  # the kernels expect the number of the current step
        self._run(ranges, divisor, skip, compare=compare)
        if self._kernel.counts_steps:
            self._steps.sub_(counted * skip)  # undo it if the kernels skipped the step: the host does not know
        if self._weights.is_partitioned:
            self._weights.gather_weights()

    def _run(self, ranges: Sequence[StepRange], divisor: torch.Tensor, skip: torch.Tensor, *, compare: bool) -> None:
        """``compare``: weights may have been changed in place (:meth:`Masters.read`)."""
        device = self._steps.device.type
        scale = (divisor.reciprocal() if device == "cpu" else divisor).float()
        for step_range in ranges:
            options = self._optimizer.param_groups[step_range.group]
            names = self._kernel.states(options)
            update = self._kernel.bind(options, self._state.step_of[step_range.params[0]])
            for block in self._in_blocks(step_range, loop_block_sizes.STEP_BLOCK[device]):
                # Read, step and write a block, while it is in the cache. Half-precision weights without masters are
                # stepped in fp32 and rounded once. torch's fused SGD for the CPU computes wrong momenta in half
                # precision. State in half precision is widened and rounded likewise.
                master = block.masters.read(ALL, self._scratch, compare=compare)
                wide = torch.promote_types(master.dtype, torch.float32)
                master_in = self._widened("master", master, wide)
                gradient_in, left = self._gradient_in(block.gradient, wide, divisor, scale)
                state = {name: block.state[name] for name in names}
                state_in = {name: self._widened(name, value, wide) for name, value in state.items()}
                update(master_in, gradient_in, state_in, grad_scale=left, found_inf=skip)
                block.store_state(state, state_in)
                block.masters.write_stepped(ALL, master_in, self._scratch)

    def _in_blocks(self, step_range: StepRange, size: int) -> list[StepBlock]:
        """The blocks of a range, of at most ``size`` elements."""
        key = step_range, size
        if key not in self._blocks:
            length = step_range.length
            size = aligned(-(-length // -(-length // size)))  # of about one size, so that no block is short
            self._blocks[key] = [self._block(step_range, at, min(size, length - at)) for at in range(0, length, size)]
        return self._blocks[key]

    def _block(self, step_range: StepRange, start: int, length: int) -> StepBlock:
        buffer, first = step_range.buffer, step_range.start + start
        own = slice(step_range.own_start + start, step_range.own_start + start + length)
        state = {name: value[own] for name, value in self._state.flat[buffer].items()}
        bits = partial(buffer.random_bits, own) if buffer.rounds_state else None
        return StepBlock(buffer.masters.part(own), buffer.gradients[first : first + length], state, bits)

    def _check_unchanged(self) -> None:
        """Raise a RuntimeError for changes to the optimizer since initialize that this step would ignore."""
        optimizer, names, num_hooks = self._optimizer, self._state.names_of_groups, num_step_hooks(self._optimizer)
        needed = [self._kernel.states(group) for group in optimizer.param_groups]
        given = [([*map(id, group["params"])], group.get("dampening")) for group in optimizer.param_groups]
        found = num_hooks, vars(optimizer).get("step"), names, needed, given
        if found != self._checked:
            check_unchanged(optimizer, num_hooks, self._params_of_groups, names, needed)
            self._checked = found

    def _gradient_in(
        self, gradient: torch.Tensor, wide: torch.dtype, exact_scale: torch.Tensor, scale: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The gradient for the kernel, in the dtype ``wide``, and the divisor to pass to the kernel, or None.

        On a GPU the kernel divides by ``scale``, and writes the quotient back. On a CPU its division costs 12 ms for
        100 M elements, and a product with the inverse, ``scale``, in the cache 5 ms; and gradients in memory would be
        written. The kernel accepts only an fp32 divisor, so fp64 gradients are divided beforehand.
        """
        on_cpu = gradient.device.type == "cpu"
        if gradient.dtype is wide is torch.float32 and not on_cpu:
            return gradient, scale
        scaled = self._scratch.like("gradient", gradient, wide)
        if gradient.dtype is wide is torch.float32:
            return torch.mul(gradient, scale, out=scaled), None
        scaled.copy_(gradient)
        if wide is torch.float64:
            return scaled.div_(exact_scale), None
        return (scaled.mul_(scale), None) if on_cpu else (scaled, scale)

    def _widened(self, what: str, block: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """``block`` in ``dtype``: itself, or a copy that the next block overwrites."""
        return block if block.dtype is dtype else self._scratch.like(what, block, dtype).copy_(block)

    def _counted(self, absent: Sequence[FlatParam]) -> torch.Tensor:
        """For each parameter 1 if it is stepped, 0 if it is in ``absent``; 1-dim float32 on the device."""
        key = tuple(absent)
        if self._counts is None or self._counts[0] != key:  # cached: a copy to a GPU synchronises
            counts = [float(param not in absent) for param in self._weights.params]
            self._counts = key, torch.tensor(counts, device=self._steps.device)
        return self._counts[1]

    def state_loaded(self) -> None:
        """Update the step ranges after the optimizer's state was changed in place."""
        steps = self._steps.int().tolist()
        self._step_ranges.set_step_counts(dict(zip(self._weights.params, steps, strict=True)))
