"""The diagnosis of a skipped step: the origin of the first non-finite value.

The batches of the skipped step are rerun (:mod:`paramp.observe.replay`) with hooks that check every module
(:mod:`paramp.observe.overflow_hooks`) and every gradient (:mod:`paramp.observe.graph_hooks`). The origin is the first
non-finite value over all ranks (:mod:`paramp.observe.overflow_findings`).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import torch

from ..base.errors import TrainingDiverged
from ..distributed.collectives import gather_objects
from ..distributed.context import ParallelContext
from ..optim.overflow_report import NonFiniteGradient, Origin, OverflowReport, find_gradients, gather_findings
from .overflow_hooks import Tracer, owner_of
from .replay import Call, Window

NOT_RECORDED = (
    "the module, microbatch and data rank are not known, because the engine was not given the batch: call "
    "forward_backward(x, y)"
)
FINITE_AGAIN = (
    "a rerun of the batch gave finite values: the gradients or weights were changed by hand, the batch was "
    "overwritten, or the model is not deterministic"
)

EAGERLY = "compiled blocks ran eagerly in the rerun of the batch"


class Gradients(Protocol):
    """The gradients of a window on this rank."""

    def drop(self) -> None:
        """Make them zero."""

    def complete(self) -> object:
        """Reduce them over all ranks, as a step does."""


def diagnose_overflow(
    window: Window,
    rerun: Callable[[Call, torch.Tensor, Tracer], None],
    gradients: Gradients,
    context: ParallelContext,
    *,
    skipped: bool,
) -> OverflowReport:
    """Find the origin of the overflow in ``window``, and drop its gradients. A collective of the world.

    Args:
        rerun: runs a batch forward and backward at a loss scale, 0-dim, with a tracer and without a reduction over
            data ranks.
        skipped: whether the window's step was skipped for an overflow.

    Raises:
        RuntimeError: it was not, or the window had no step yet.
    """
    if window.scale is None or not skipped:
        raise RuntimeError("diagnose_overflow: no step was skipped; call it after one that was, before the next batch")
    stage_of = _stages_by_parameter(window, context)

    def run(scale: torch.Tensor) -> Tracer:
        tracer = Tracer(window.stages, context.local_stages, context)
        gradients.drop()
        with torch.enable_grad(), window.again() as calls, tracer:
            for call in calls:
                tracer.see_batch(call.batch)
                rerun(call, scale, tracer)
        return tracer

    def find() -> tuple[NonFiniteGradient, ...]:
        own = find_gradients(window.stages.module.named_parameters(), context, stage_of)
        return tuple(found for of_rank in gather_findings(own) for found in of_rank)

    try:
        return _investigate(window, run, find, gradients)
    finally:
        gradients.drop()


def divergence(counts: Sequence[int], diagnose: Callable[[], OverflowReport]) -> TrainingDiverged:
    """The error that ends the training after a skipped step, with its diagnosis; on every rank.

    ``counts``: steps made, steps skipped, those skipped in a row, and of these the ones at the loss scale's floor.
    """
    steps, skipped, in_a_row, at_floor = counts
    report: OverflowReport | str
    try:
        report = diagnose()
    except Exception as error:  # training stops on every rank even if the diagnosis fails
        report = f"no diagnosis could be made: {type(error).__name__}: {error}"
    floor = " with the loss scale at its floor" if at_floor else ""
    return TrainingDiverged(
        f"training stopped after optimizer step {steps + skipped}, because {in_a_row} steps in a row were "
        f"skipped{floor}: {report}",
        report,
    )


def _investigate(
    window: Window,
    run: Callable[[torch.Tensor], Tracer],
    find: Callable[[], tuple[NonFiniteGradient, ...]],
    gradients: Gradients,
) -> OverflowReport:
    """The report on ``window``; ``run`` reruns it at a loss scale, ``find`` returns all ranks' non-finite gradients."""
    assert window.scale is not None
    scale = float(window.scale)
    of_step = find()
    if not window.calls:
        return OverflowReport(scale, of_step, None, NOT_RECORDED)
    tracer = run(window.scale)
    origin = tracer.findings.origin()
    non_finite = find()
    if origin is None:
        # Each rank's gradients are finite, so the sum over ranks has overflowed. FSDP2 has already made it.
        if not non_finite:
            gradients.complete()
            non_finite = find()
        if non_finite:
            first = non_finite[0]
            module = owner_of(first.name)
            origin = Origin("sum over ranks", module, first.place, first.kind, 0, None, first.largest, first.name)
    elif origin is not None and origin.during == "backward":
        # If everything is finite at a scale of 1, the loss scale is the cause.
        helped = scale > 1 and run(torch.ones_like(window.scale)).findings.origin() is None
        origin = replace(origin, helped_by_scale=helped)
    failure = next(filter(None, gather_objects(tracer.failure)), None)
    problem = f"the rerun failed: {failure}" if failure else FINITE_AGAIN if origin is None else ""
    compiled = any(module._compiled_call_impl is not None for module in window.stages.modules())
    unknown = "; ".join(filter(None, (problem, EAGERLY if compiled else "")))  # for the hooks
    return OverflowReport(scale, (non_finite or of_step) if problem else non_finite, origin, unknown)


def _stages_by_parameter(window: Window, context: ParallelContext) -> dict[str, int]:
    """Parameter name -> the index in the model of the first of this rank's stages that has it."""
    found: dict[str, int] = {}
    for place, stage in zip(context.local_stages, window.stages, strict=True):
        for name, _ in stage.module.named_parameters(remove_duplicate=False):
            found.setdefault(name, place)
    return found
