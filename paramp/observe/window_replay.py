"""The diagnosis of a skipped step: its recorded batches run again with a trace, which gives the report.

What is kept of a step is in :mod:`paramp.observe.recorded_window`, where values are seen in
:mod:`paramp.observe.nonfinite_hooks`, what a person reads in :mod:`paramp.scaling.overflow_report`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from ..base.errors import ConfigError, TrainingDiverged
from ..base.wrapped_models import is_compiled, plain_name
from ..distributed.context import ParallelContext
from ..scaling.overflow_report import NonFiniteGradient, Origin, OverflowReport, find_gradients, gather_findings
from .loops_without_engine import OwnModel, agreed_context, checked_scale
from .nonfinite_experts import stacked_parameters
from .nonfinite_hooks import Tracer, owner_of
from .recorded_window import RecordedBatch, WindowRecord, record_batch

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
    window: WindowRecord,
    rerun: Callable[[RecordedBatch, torch.Tensor, Tracer], None],
    gradients: Gradients,
    context: ParallelContext | None,
    *,
    skipped: bool,
    in_function: bool = False,
) -> OverflowReport:
    """Find the origin of the overflow in ``window``, and drop its gradients. A collective of the world.

    Args:
        rerun: runs a batch forward and backward at a loss scale, 0-dim, with a tracer and without a reduction over
            data ranks.
        skipped: whether the window's step was skipped for an overflow.
        in_function: ``rerun`` calls a function of the user's, which computes the loss too.

    Raises:
        RuntimeError: it was not, or the window had no step yet.
    """
    if window.scale is None or not skipped:
        raise RuntimeError("diagnose_overflow: no step was skipped; call it after one that was, before the next batch")
    step_scale = window.scale
    indices = context.local_stages if context else [0]
    stage_of, stacks = _stages_of_parameters(window, indices), stacked_parameters(window.stages.module)

    def run(scale: torch.Tensor) -> Tracer:
        tracer = Tracer(window.stages, indices, context, in_function=in_function)
        gradients.drop()
        with torch.enable_grad(), window.again() as calls, tracer:
            for call in calls:
                tracer.see_batch(call.batch)
                rerun(call, scale, tracer)
        return tracer

    def find() -> tuple[NonFiniteGradient, ...]:
        named = ((plain_name(name), parameter) for name, parameter in window.stages.module.named_parameters())
        everyone = gather_findings(find_gradients(named, context, stage_of, stacks))
        return tuple(gradient for of_rank in everyone for gradient in of_rank)

    try:
        of_step = find()
        if not window.calls:
            return OverflowReport(float(step_scale), of_step, None, NOT_RECORDED)
        tracer, origin, non_finite = _find_origin(step_scale, run, find, gradients)
        failure = next((text for (text,) in gather_findings([tracer.failure]) if text), None)
        problem = f"the rerun failed: {failure}" if failure else FINITE_AGAIN if origin is None else ""
        compiled = any(map(is_compiled, window.stages.modules()))
        unknown = "; ".join(filter(None, (problem, EAGERLY if compiled else "")))  # for the hooks
        gradients_of = (non_finite or of_step) if problem else non_finite
        if origin is not None and origin.during != "forward":
            origin = replace(origin, experts=_experts_of(origin, non_finite))
        return OverflowReport(float(step_scale), gradients_of, origin, unknown, tracer.experts.everywhere())
    finally:
        gradients.drop()


def _find_origin(
    step_scale: torch.Tensor,
    run: Callable[[torch.Tensor], Tracer],
    find: Callable[[], tuple[NonFiniteGradient, ...]],
    gradients: Gradients,
) -> tuple[Tracer, Origin | None, tuple[NonFiniteGradient, ...]]:
    """What a rerun at ``step_scale`` saw, the origin, and the gradients that are not finite then."""
    tracer = run(step_scale)
    origin, non_finite = tracer.seen.origin(), find()
    if origin is None:
        # Each rank's gradients are finite, so the sum over ranks has overflowed. FSDP2 has already made it.
        if not non_finite:
            gradients.complete()
            non_finite = find()
        if non_finite:
            origin = _origin_in_sum(non_finite[0])
    elif origin.during == "backward":
        # If everything is finite at a scale of 1, the loss scale is the cause.
        helped = float(step_scale) > 1 and run(torch.ones_like(step_scale)).seen.origin() is None
        origin = replace(origin, helped_by_scale=helped)
    return tracer, origin, non_finite


def _experts_of(origin: Origin, gradients: Iterable[NonFiniteGradient]) -> tuple[int, ...]:
    """The experts whose gradients are not finite, if the module of ``origin`` is a stack of experts."""
    found = [one for one in gradients if owner_of(one.name) == origin.module]
    return tuple(sorted({expert for one in found for expert in one.experts}))


def _stages_of_parameters(window: WindowRecord, indices: Sequence[int]) -> dict[str, int]:
    """By its name, the first stage that has each parameter; ``indices``: the indices of this rank's stages."""
    stage_of: dict[str, int] = {}
    for index, stage in zip(indices, window.stages, strict=True):
        for name, _ in stage.module.named_parameters(remove_duplicate=False):
            stage_of.setdefault(plain_name(name), index)
    return stage_of


def _origin_in_sum(first: NonFiniteGradient) -> Origin:
    """The origin if ``first`` is finite on each rank."""
    return Origin(
        during="sum over ranks",
        module=owner_of(first.name),
        place=first.place,
        kind=first.kind,
        call=0,
        microbatch=None,
        largest=first.largest,
        parameter=first.name,
    )


def trace_overflow(
    model: nn.Module,
    loss: Callable[[Any], torch.Tensor],
    batches: Iterable[Any],
    *,
    scale: float,
    context: ParallelContext | None = None,
) -> OverflowReport:
    """Why a step was skipped in a loop without an engine: the first value that is not finite, its module and its rank.

    Every rank calls it after the skipped step, before the weights change. It runs the batches again with hooks, forward
    and backward, and leaves no gradients; random streams and buffers are as before.

    Args:
        model: what ``loss`` calls: plain, in DDP, sharded by ``fully_shard``, or of DTensors.
        loss: returns the unscaled loss of one of ``batches``, 0-dim, as the loop gives it to ``scaler.scale``.
        batches: those of the skipped step, one for each backward; the data rank's own. Each is any object, or one of
            :func:`record_batch`.
        scale: the loss scale of the skipped step: ``scaler.get_scale()`` before ``scaler.update()``. Without loss
            scaling 1.
        context: None: the current one; none is needed in one process.

    Returns:
        The same on every rank. ``call`` of its origin is the index in ``batches``.

    Raises:
        ConfigError: on every rank: a rank has wrong arguments, or others than another rank; or the model has
            pipeline stages.
        LaunchError: a rank did not call it in time.
    """
    recorded: list[RecordedBatch] = []

    def check(context: ParallelContext | None) -> tuple[nn.Module, dict[str, Any]]:
        recorded.extend(_checked_batches(loss, batches, context))
        return model, {"scale": checked_scale(scale), "number of batches": len(recorded)}

    context = agreed_context("trace_overflow", context, check)
    stages = OwnModel(model, context)
    calls = [one._replace(number=number) for number, one in enumerate(recorded)]
    step_scale = torch.tensor(scale, dtype=torch.float32, device=stages.device)
    window = WindowRecord(stages, calls, step_scale, torch.device("cuda" if len(recorded[0].random) > 1 else "cpu"))
    rerun = partial(_rerun_loss, stages, loss)
    report = diagnose_overflow(window, rerun, stages, context, skipped=True, in_function=True)
    unknown = report.unknown.replace(FINITE_AGAIN, f"{FINITE_AGAIN}; or scale or batches are not those of the step")
    if stages.is_compiled and EAGERLY not in unknown:
        unknown = "; ".join(filter(None, (unknown, EAGERLY)))
    return replace(report, unknown=unknown, scaled=report.origin is not None)  # those of the step may be unscaled


def _rerun_loss(
    stages: OwnModel, loss: Callable[[Any], torch.Tensor], call: RecordedBatch, scale: torch.Tensor, tracer: Tracer
) -> None:
    """Run the user's ``loss`` of a batch forward and backward at the loss scale ``scale``, with ``tracer``."""
    tracer.begin_call()
    try:
        with stages.running(backward=True):
            with tracer.span("forward", 0, 0):
                value = _checked_loss(loss(call.batch))
                tracer.see_loss(None, None, value)
                scaled = value * scale.to(value.device)
                tracer.see_scaled(scaled)
            with tracer.span("backward", 0, 0), tracer.contexts():
                scaled.backward()
    except Exception as error:  # recorded, so that no rank waits for this one
        tracer.failure = f"{type(error).__name__}: {error}"


def _checked_batches(loss: Any, batches: Any, context: ParallelContext | None) -> list[RecordedBatch]:
    """The arguments of :func:`trace_overflow` as recorded batches; a ConfigError if they are wrong."""
    if context is not None and context.stage_axis.size > 1:
        raise ConfigError(
            f"trace_overflow: got a context of {context.stage_axis.size} pipeline stages, whose schedule runs the "
            "batches; use an engine, or scaler.diagnose(model.named_parameters()), which names gradients"
        )
    if not callable(loss):
        raise ConfigError(f"loss: got {type(loss).__name__}, expected a function from a batch to its loss")
    if isinstance(batches, (torch.Tensor, Mapping, RecordedBatch)) or not isinstance(batches, Iterable):
        raise ConfigError(f"batches: got {type(batches).__name__}, expected a list of the batches of the step")
    recorded = [one if isinstance(one, RecordedBatch) else record_batch(one) for one in batches]
    if not recorded:
        raise ConfigError("batches: got none, expected those of the skipped step")
    if len({len(one.random) for one in recorded}) > 1:
        raise ConfigError("batches: CUDA was first used after some were recorded; record them after model.to('cuda')")
    return recorded


def _checked_loss(value: Any) -> torch.Tensor:
    """``value``, what a function of the user's returned; a ConfigError unless it is a loss."""
    if isinstance(value, torch.Tensor) and value.numel() == 1 and value.requires_grad:
        return value
    shown = type(value).__name__
    if isinstance(value, torch.Tensor):
        shown = f"a tensor of shape {tuple(value.shape)}" + ("" if value.requires_grad else " without a gradient")
    raise ConfigError(f"loss: returned {shown}, expected a tensor of one element with a gradient")


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
