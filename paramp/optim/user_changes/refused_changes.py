"""Changes that no step would follow, which are errors: of an optimizer after initialize, of weights in a step hook."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Collection, Sequence
from typing import Any

import torch

GIVEN_OTHERS = (
    "optimizer: its param groups were given other parameters after initialize, which the step does not follow; "
    "pass it all parameters before, each in its group; later freeze some, or change options of groups"
)


def is_step_replaced(optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``step`` was replaced on the instance, but by torch's schedulers, whose own calls that of the class."""
    step: Any = vars(optimizer).get("step")
    is_schedulers = hasattr(step, "_wrapped_by_lr_sched") and step.__wrapped__ is type(optimizer).step
    return step is not None and not is_schedulers


def check_unchanged(
    optimizer: torch.optim.Optimizer,
    num_hooks: int,
    params: Sequence[Sequence[torch.Tensor]],
    names: Sequence[Collection[str]],
    needed: Sequence[Collection[str]],
) -> None:
    """Check an optimizer whose ``step()`` the engine does not call, because a fused step computes the same.

    Args:
        num_hooks: how many its ``step()`` has.
        params: those of each param group at initialize.
        names: of the state tensors that the optimizer has for each group.
        needed: the names of those that the step needs with each group's options.

    Raises:
        RuntimeError: it was changed after initialize in a way that the fused step would ignore.
    """
    is_replaced = is_step_replaced(optimizer)
    if num_hooks > 1 or is_replaced:  # one is the engine's own
        raise RuntimeError(
            f"optimizer: {'its step() was replaced' if is_replaced else 'step hooks were registered'} after "
            "initialize, but the engine does not call its step(); do so before, so that it does"
        )
    found = [group["params"] for group in optimizer.param_groups]
    are_alike = [*map(len, found)] == [*map(len, params)]
    if not (are_alike and all(map(operator.is_, itertools.chain(*found), itertools.chain(*params)))):
        raise RuntimeError(GIVEN_OTHERS)
    for there, required in zip(names, needed, strict=True):
        if missing := set(required).difference(there):
            raise RuntimeError(
                f"optimizer: an option was set after initialize that needs {missing.pop()!r} in its state; "
                "set it before"
            )
    if any(group.get("dampening") for group in optimizer.param_groups):
        raise RuntimeError(
            "optimizer: dampening was set after initialize, with which the first step differs from the others; set it "
            "before, so that the engine calls the optimizer's own step()"
        )


def check_stepped(optimizer: torch.optim.Optimizer, stepped: Collection[torch.Tensor]) -> None:
    """Check an optimizer whose own step is called: raise a RuntimeError if a group has others than those ``stepped``.

    Their gradients carry the loss scale, and their state is in no checkpoint.
    """
    if any(one not in stepped for group in optimizer.param_groups for one in group["params"]):
        raise RuntimeError(GIVEN_OTHERS)


def changed_in_step(what: str) -> RuntimeError:
    """The error for a weight that was changed in an optimizer's own step, whose result is then written over it."""
    return RuntimeError(
        f"optimizer: {what} was changed in its step(), as by a step hook, but the step writes over it; change "
        "what optimizer.param_groups hold there, or weights after the step"
    )
