"""The steps of :func:`paramp.initialize` for training with the same bits on every layout."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from ..base.errors import ConfigError
from ..base.module_surgery import PassThrough
from ..base.spans import Observer
from ..config.reproducible import Reproducible, check_data_ranks
from ..distributed.axes import tensor_mesh
from ..distributed.context import ParallelContext
from ..engine.losses import WindowLosses
from ..engine.shared_failure import SharedFailure
from ..engine.state.model_tensors import ParamChunks
from ..engine.step import StepCounters
from ..observe.replay import WindowBatches
from ..optim.choose_step import why_not_fused
from ..parallel.adapters import ModelAdapter
from ..pipeline.joined_stages import Joined
from ..pipeline.stage import Stages
from .buffers import check_buffers
from .checks import check_modules, check_ties
from .chunk_gradients import ChunkGradients, Tap
from .chunks import ChunkRun
from .cublas import choose_workspace
from .functions import ExactFunctions
from .place import Place
from .totals import ChunkTotals

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle


def prepare(context: ParallelContext, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> Place | None:
    """The place of this rank, if training is reproducible in ``context``; torch is set to one thread.

    On GPUs torch's deterministic algorithms are used until the context is closed.

    Raises:
        ConfigError: the number of data ranks is no power of two, the results of a module or an optimizer depend on
            the layout, or cuBLAS may have read another workspace (:mod:`paramp.exact.cublas`).
    """
    config = context.config
    how = config.reproducible
    if not isinstance(how, Reproducible):
        return None
    check_data_ranks(context.batch_axis.size)
    check_modules(model)
    check_ties(model)
    for reason in filter(None, map(why_not_fused, optimizers)):
        raise ConfigError(
            "optimizer: expected torch's AdamW, Adam or SGD in fused kernels, which step each element alone, because "
            f"reproducible is set, but {reason}"
        )
    torch.set_num_threads(1)  # kernels split their work, and some sums, by the number of threads
    if context.device.type == "cuda":
        choose_workspace()  # launched contexts have; those over a mesh of others' have not
        _use_deterministic_algorithms(context)
    tensor = context.tensor_axis
    group = tensor.group if tensor.size > 1 else None
    return Place(config.seed, how.chunk, how.slices, group, config.parallel.sequence_parallel)


def _use_deterministic_algorithms(context: ParallelContext) -> None:
    was, warned = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    context.before_close.append(partial(torch.use_deterministic_algorithms, was, warn_only=warned))


def sliced_layers(
    adapter: ModelAdapter, plan: Mapping[str, str | ParallelStyle] | None, place: Place
) -> dict[str, ParallelStyle]:
    """The style of each module, in slices, from the user's ``plan``, else from the model's own, if it has one."""
    from .plan import sliced_plan

    own = _resolved(adapter, plan if plan is not None else _plan_of(adapter, place, place.sequence_parallel))
    with_sequence = own if plan is not None else _resolved(adapter, _plan_of(adapter, place, True))
    return sliced_plan(adapter.model, own, with_sequence, place)


def _plan_of(adapter: ModelAdapter, place: Place, sequence_parallel: bool) -> Mapping[str, str | ParallelStyle]:
    """The model's own plan; none if it has none and the layout needs none."""
    try:
        return adapter.plan(place.tensor_size, sequence_parallel)
    except ConfigError:
        if place.tensor_size > 1 and sequence_parallel == place.sequence_parallel:
            raise
        return {}


def _resolved(adapter: ModelAdapter, plan: Mapping[str, str | ParallelStyle]) -> dict[str, ParallelStyle]:
    if not plan:
        return {}
    from ..parallel.huggingface.lora import extend_to_adapters
    from ..parallel.tensor.sharding_plan import resolve_plan

    plan = {adapter.full_name(pattern): style for pattern, style in plan.items()}
    styles = resolve_plan(plan, [name for name, _ in adapter.model.named_modules(remove_duplicate=False)])
    return extend_to_adapters(adapter.model, styles)


def apply_styles(module: nn.Module, styles: Mapping[str, ParallelStyle], context: ParallelContext) -> None:
    """Apply ``styles`` to this rank's ``module``: over the tensor axis, or in slices on one tensor rank too."""
    mesh = tensor_mesh(context) if context.tensor_axis.size > 1 else None
    if styles and context.config.reproducible:
        from .plan import apply_sliced_plan

        apply_sliced_plan(module, styles, mesh)
    elif styles and mesh is not None:
        from ..parallel.tensor.sharding_plan import apply_plan

        apply_plan(module, styles, mesh)


def watched(
    place: Place | None,
    all_stages: Sequence[nn.Module],
    styles: Mapping[str, ParallelStyle],
    context: ParallelContext,
) -> Joined:
    """This rank's stages; with a ``place``, what they call of torch has the same bits on every layout.

    Call it before activation checkpointing is applied.
    """
    own = Joined(all_stages[index] for index in context.local_stages)
    if place is None:
        return own
    from ..parallel.tensor.styles import ScatterSequence
    from .loss import cross_entropy  # imports DTensor

    names: dict[nn.Module, str] = {}
    stages_of: defaultdict[str, set[int]] = defaultdict(set)
    for index, stage in enumerate(all_stages):
        for name, module in stage.named_modules():
            if not isinstance(module, PassThrough):
                stages_of[names.setdefault(module, name)].add(index)
                stages_of[name].add(index)
    own.functions = ExactFunctions(
        place,
        names,
        {F.cross_entropy: partial(cross_entropy, place)},
        divided={name for name, found in stages_of.items() if len(found) > 1},
        unsliced=[name for name, style in styles.items() if isinstance(style, ScatterSequence)],
    )
    for part in own.parts:
        own.functions.watch(part)
    return own


def chunk_run(
    stages: Stages,
    params: ParamChunks,
    losses: WindowLosses,
    batches: WindowBatches,
    failure: SharedFailure,
    counters: StepCounters,
    observers: list[Observer],
) -> ChunkRun | None:
    """What runs the batches of an engine in chunks, one of its ``observers``; None if training is not reproducible."""
    gradients, context, functions = params.weights.gradients.reduction, params.context, stages.functions
    if functions is None or not isinstance(gradients, ChunkGradients):
        return None
    own = dict(zip(context.local_stages, (stage.module for stage in stages), strict=True))
    _attach(stages.module, gradients.assign_stages(own, params.first_names))
    losses.totals = ChunkTotals(functions.place, context)
    check_buffers(own)
    run = ChunkRun(functions, gradients, losses, batches, failure, counters, context)
    observers.append(run)
    return run


def _attach(module: nn.Module, taps: Mapping[str, Tap]) -> None:
    """Let the submodules of ``module`` use tied parameters through ``taps``, by the parameters' names."""
    by_module: defaultdict[str, dict[str, Tap]] = defaultdict(dict)
    for name, tap in taps.items():
        owner, _, own = name.rpartition(".")
        by_module[owner][own] = tap
    for owner, own_taps in by_module.items():
        from .styles import use_through

        use_through(module.get_submodule(owner), own_taps)
