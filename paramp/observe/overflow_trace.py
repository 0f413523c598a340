"""The diagnosis of a skipped step: the origin of the first non-finite value.

The batches of the skipped step are rerun (:mod:`paramp.observe.replay`) with hooks that check every module
(:mod:`paramp.observe.overflow_hooks`) and every gradient (:mod:`paramp.observe.graph_hooks`). The origin is the first
non-finite value over all ranks (:mod:`paramp.observe.overflow_findings`).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from ..distributed.collectives import gather_objects
from ..optim.overflow_report import NonFiniteGradient, Origin, OverflowReport, gather_findings
from ..parallel.stage import Stages
from .overflow_hooks import Tracer, owner_of
from .replay import Window

NOT_RECORDED = (
    "the module, microbatch and data rank are not known, because the engine was not given the batch: call "
    "forward_backward(x, y)"
)
FINITE_AGAIN = (
    "a rerun of the batch gave finite values: the gradients or weights were changed by hand, the batch was "
    "overwritten, or the model is not deterministic"
)


def investigate(
    window: Window,
    run: Callable[[torch.Tensor], Tracer],
    find: Callable[[], list[NonFiniteGradient]],
    add_up: Callable[[], object],
) -> OverflowReport:
    """Find the origin of the overflow in ``window``, whose step was skipped. A collective of the world.

    Args:
        run: reruns the window at a loss scale, 0-dim, from zero gradients, without a reduction over data ranks.
        find: returns this rank's non-finite gradients.
        add_up: reduces the gradients over all ranks, as a step does.
    """
    assert window.scale is not None
    scale = float(window.scale)
    of_step = _gathered(find)
    if not window.calls:
        return OverflowReport(scale, of_step, None, NOT_RECORDED)
    tracer = run(window.scale)
    origin = tracer.findings.origin()
    gradients = _gathered(find)
    if origin is None and not gradients:
        # Each rank's gradients are finite, so the sum over ranks has overflowed.
        add_up()
        gradients = _gathered(find)
        if gradients:
            first = gradients[0]
            module = owner_of(first.name)
            origin = Origin("sum over ranks", module, first.place, first.kind, 0, None, first.largest, first.name)
    elif origin is not None and origin.during == "backward":
        # If everything is finite at a scale of 1, the loss scale is the cause.
        helped = scale > 1 and run(torch.ones_like(window.scale)).findings.origin() is None
        origin = replace(origin, helped_by_scale=helped)
    failure = next(filter(None, gather_objects(tracer.failure)), None)
    problem = f"the rerun failed: {failure}" if failure else FINITE_AGAIN if origin is None else ""
    return OverflowReport(scale, (gradients or of_step) if problem else gradients, origin, problem)


def _gathered(find: Callable[[], list[NonFiniteGradient]]) -> tuple[NonFiniteGradient, ...]:
    return tuple(found for own in gather_findings(find()) for found in own)


def stages_by_parameter(stages: Stages, places: Sequence[int]) -> dict[str, int]:
    """Parameter name -> the index in the model (``places``) of the first of this rank's ``stages`` that has it."""
    found: dict[str, int] = {}
    for place, stage in zip(places, stages, strict=True):
        for name, _ in stage.module.named_parameters(remove_duplicate=False):
            found.setdefault(name, place)
    return found
