"""What is wrong with a step and is found in the next one, or in a part of a step that most steps leave out."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

import torch

from ..distributed.context import ParallelContext
from ..optim.flat_buffer import FlatParam


def absent_everywhere(
    absent: Sequence[FlatParam], num_present: torch.Tensor, first_names: Mapping[str, str], context: ParallelContext
) -> list[FlatParam]:
    """The parameters of ``absent``, without a gradient on this rank, that have none on any rank.

    ``num_present``, 1-dim float64: the number of ranks with a gradient for each parameter of the whole model.

    Raises:
        RuntimeError: one of the others does not require a gradient here: this rank would add nothing to its gradient.
    """
    present = dict(zip(dict.fromkeys(first_names.values()), num_present.tolist(), strict=True))
    found = [param for param in absent if present[first_names[param.name]]]
    frozen = [repr(param.name) for param in found if not param.parameter.requires_grad]
    if frozen:
        raise RuntimeError(
            f"step(): {', '.join(frozen[:3])}{' ...' * (len(frozen) > 3)} on {context.name_of(context.rank)} does not "
            "require a gradient, but has one on another rank: requires_grad was changed after initialize on some ranks "
            "only; change it on every rank alike"
        )
    return [param for param in absent if param not in found]


def warn_of_vanished_gradient(num_steps: int, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Warn of the step before, the ``num_steps``-th: the gradient of its loss had a norm of 0."""
    names = " and ".join(type(optimizer).__name__ for optimizer in optimizers)
    warnings.warn(
        f"step {num_steps} of {names} was made with a gradient whose norm is exactly 0, though the loss depends on "
        "the model: half-precision gradients may have underflowed. Look at engine.gradient_histogram() between "
        "forward_backward and step, at the loss scale (engine.scaler.get_scale()), at the count that a "
        "criterion returns beside its sum, and at the criterion, whose gradient may be 0",
        stacklevel=2,
    )


def warn_of_schedule(optimizers: Sequence[torch.optim.Optimizer]) -> bool:
    """Warn that the learning rate has changed after a skipped step, if it is a scheduler of torch's; whether it is."""
    is_torchs = any("initial_lr" in group for optimizer in optimizers for group in optimizer.param_groups)
    if is_torchs:
        warnings.warn(
            "the learning rate has changed after a step that was skipped: a scheduler that steps after each batch runs "
            "ahead of the optimizer. Pass it to paramp.initialize, whose scheduler waits for skipped steps, or call "
            "scheduler.step() only `if result.stepped`, the result of engine.step()",
            stacklevel=2,
        )
    return is_torchs
