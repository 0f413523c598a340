"""Why a step was skipped: the origin of the first non-finite value.

The batches of the skipped step run again (:mod:`paramp.observe.replay`) under hooks that check every module
(:mod:`paramp.observe.overflow_hooks`) and every gradient (:mod:`paramp.observe.graph_hooks`). The first non-finite
value of all ranks is the origin (:mod:`paramp.observe.overflow_findings`).
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
    "which module, microbatch and data rank it was is not known, because the engine was not given the batch: call "
    "forward_backward(x, y)"
)
FINITE_AGAIN = (
    "run again, the batch gave finite values: the gradients or weights were changed by hand, the batch was "
    "overwritten, or the model does not compute the same twice"
)


def investigate(
    window: Window,
    run: Callable[[torch.Tensor], Tracer],
    find: Callable[[], list[NonFiniteGradient]],
    add_up: Callable[[], object],
) -> OverflowReport:
    """Find out why the step that ended ``window`` was skipped. A collective of the world.

    Args:
        run: runs the window again at a loss scale, 0-dim, from gradients of zero, without a reduction over data ranks.
        find: this rank's non-finite gradients.
        add_up: completes the gradients over all ranks, as a step does.
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
        # Each rank's gradients are finite: the sum over ranks is left.
        add_up()
        gradients = _gathered(find)
        if gradients:
            first = gradients[0]
            module = owner_of(first.name)
            origin = Origin("sum over ranks", module, first.place, first.kind, 0, None, first.largest, first.name)
    elif origin is not None and origin.during == "backward":
        # If all is finite at a scale of 1, the scale is the cause.
        helped = scale > 1 and run(torch.ones_like(window.scale)).findings.origin() is None
        origin = replace(origin, helped_by_scale=helped)
    failure = next(filter(None, gather_objects(tracer.failure)), None)
    problem = f"run again, it failed: {failure}" if failure else FINITE_AGAIN if origin is None else ""
    return OverflowReport(scale, (gradients or of_step) if problem else gradients, origin, problem)


def _gathered(find: Callable[[], list[NonFiniteGradient]]) -> tuple[NonFiniteGradient, ...]:
    return tuple(found for own in gather_findings(find()) for found in own)


def stages_by_parameter(stages: Stages, places: Sequence[int]) -> dict[str, int]:
    """The first of this rank's ``stages``, which have the indices ``places``, with each parameter, by its name."""
    found: dict[str, int] = {}
    for place, stage in zip(places, stages, strict=True):
        for name, _ in stage.module.named_parameters(remove_duplicate=False):
            found.setdefault(name, place)
    return found
