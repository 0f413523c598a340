"""Turns a plain model into an :class:`~paramp.engine.engine.Engine`.

How a model is planned, partitioned and filled depends on its family (:mod:`paramp.parallel.model_families`). Under a
pipeline it is an ``nn.Sequential``, a Hugging Face model, or any other model whose forward can be traced. A model's own
``tensor_parallel_plan(tensor_size, sequence_parallel)`` and ``pipeline_split(num_stages)`` override its family's; the
user's ``plan`` and ``parallel.pipeline.split`` override both.

Optimizers keep their param groups. Several have one loss scale, one norm and one decision whether to step. Each
trained parameter is in exactly one of them, and each of them has at most one scheduler.

A ``DataLoader`` is the same on every rank. It is returned with a sampler that gives each data rank its part, equal
within a model group (:mod:`paramp.data.dataloader`); its ``batch_size`` is that of one data rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from ..base.errors import ConfigError
from ..data.dataloader import shard_loaders
from ..data.loader_position import ShardedLoader, WithPosition
from ..distributed.context import ParallelContext
from ..distributed.exact_mode_protocol import Numerics, numerics_of
from ..optim.flat_weights import FlatWeights
from ..optim.gradient_reduction import gradient_reduction
from ..optim.matrices.matrix_step import exchange_matrices
from ..optim.user_changes.former_parameters import Former, check_former, former_parameters
from ..optim.user_optimizer import groups_by_name, repoint, warn_of_eps, why_weights_are_missed
from .engine import Engine
from .given_model import guard, unguard
from .lr_scheduler import Scheduler, Schedulers, build_schedulers
from .model_of_this_rank import LocalModel, make_local
from .model_plan import ModelPlan, plan_model
from .power_of_two_loss_divisor import Criterion
from .state.model_tensors import ParamChunks
from .user_arguments import (
    Optimizers,
    Parameters,
    apply_algorithms,
    build_optimizers,
    check_untrained,
    mark_trained,
    plain_model,
    prepare_criterion,
    usable_context,
)

if TYPE_CHECKING:
    from typing import Never, TypeAlias

    from torch.distributed.tensor.parallel import ParallelStyle
    from typing_extensions import TypeVar

    Model: TypeAlias = nn.Module | Callable[[], nn.Module]
    GivenOptimizer: TypeAlias = Optimizers | Callable[[Parameters], Optimizers]
    GivenScheduler: TypeAlias = Schedulers | Callable[[torch.optim.Optimizer], LRScheduler]
    Plan: TypeAlias = Mapping[str, str | ParallelStyle]
    Train = TypeVar("Train", default=Any)
    Test = TypeVar("Test", default=Any)
    # None where None is given: the result is then a loader or None. Where something else is given, it vanishes.
    NoTrain = TypeVar("NoTrain", bound=None, default=Never)
    NoTest = TypeVar("NoTest", bound=None, default=Never)
    NoScheduler = TypeVar("NoScheduler", bound=None, default=Never)


@overload
def initialize(
    model: Model,
    optimizer: GivenOptimizer,
    criterion: Criterion | None = ...,
    train_dataloader: DataLoader[Train] | NoTrain = ...,
    test_dataloader: DataLoader[Test] | NoTest = ...,
    lr_scheduler: GivenScheduler | NoScheduler = ...,
    *,
    plan: Plan | None = ...,
    algorithms: Sequence[Any] = ...,
    context: ParallelContext | None = ...,
) -> tuple[Engine, ShardedLoader[Train] | NoTrain, ShardedLoader[Test] | NoTest, Scheduler | NoScheduler]: ...


@overload
def initialize(
    model: Model,
    optimizer: GivenOptimizer,
    criterion: Criterion | None = ...,
    train_dataloader: Any = ...,
    test_dataloader: Any = ...,
    lr_scheduler: GivenScheduler | NoScheduler = ...,
    *,
    plan: Plan | None = ...,
    algorithms: Sequence[Any] = ...,
    context: ParallelContext | None = ...,
) -> tuple[Engine, Any, Any, Scheduler | NoScheduler]: ...


def initialize(
    model: nn.Module | Callable[[], nn.Module],
    optimizer: Optimizers | Callable[[Parameters], Optimizers],
    criterion: Criterion | None = None,
    train_dataloader: Any = None,
    test_dataloader: Any = None,
    lr_scheduler: Schedulers | Callable[[torch.optim.Optimizer], LRScheduler] | None = None,
    *,
    plan: Mapping[str, str | ParallelStyle] | None = None,
    algorithms: Sequence[Any] = (),
    context: ParallelContext | None = None,
) -> tuple[Engine, Any, Any, Scheduler | None]:
    """Prepare ``model`` for the current context's layout and mode. From then on, use it only through the engine.

    Args:
        model: the whole model, on the CPU, a GPU or ``meta`` (filled shard by shard); or a callable that builds it.
        optimizer: a new one over the model's parameters, or a sequence of them; or a callable that creates either.
        criterion: ``(output, target) -> loss``, the mean over the microbatch, or ``(sum, count)``; moved to the device.
            None: the model's output has a ``loss``.
        train_dataloader, test_dataloader: a ``DataLoader`` is sharded; anything else is returned unchanged.
        lr_scheduler: a scheduler of that optimizer, or a sequence of them; or a callable that creates one from each.
        plan: ``{glob over module names: style}`` for tensor parallelism. None: the model's own.
        algorithms: changes to the model's modules; each has ``apply(model, precision)``.
        context: the latest one that is open. None: that one.

    Returns:
        ``(engine, train_dataloader, test_dataloader, lr_scheduler)``: a ``DataLoader`` as a
        :class:`~paramp.data.loader_position.ShardedLoader`, the scheduler wrapped in :class:`Scheduler`.

    Raises:
        RuntimeError: no context is open.
        ConfigError: the context, model, plan, optimizer, scheduler or a loader does not fit the layout or each other.
    """
    context = usable_context(context)
    numerics = numerics_of(context.config)
    loaders = {"train_dataloader": train_dataloader, "test_dataloader": test_dataloader}
    train_dataloader, test_dataloader = shard_loaders(context, consecutive=numerics.consecutive_samples, **loaders)
    if isinstance(test_dataloader, WithPosition) and test_dataloader is not train_dataloader:
        test_dataloader.position.begins_anew = True
    prepare_criterion(criterion, context.device)
    model, compile_options = plain_model(model, optimizer, context)
    check_untrained(model, context)
    unguard(model)
    apply_algorithms(algorithms, model, context.config.precision)
    built, optimizers = build_optimizers(optimizer, model)
    numerics.prepare(context, model, optimizers)
    schedulers = build_schedulers(lr_scheduler, optimizers)
    model_plan = plan_model(model, plan, optimizers, compile_options, numerics, context)
    local_model = make_local(model_plan, numerics, context)
    guard(model, local_model.stages)
    weights = _make_weights(model_plan, local_model, optimizers, numerics, context)
    model_plan.compiled.apply(stage.module for stage in local_model.stages)
    engine = Engine(local_model.stages, weights, built, criterion, model_plan.own_loss, local_model.overflow)
    mark_trained((*model_plan.names_of, *engine.module.parameters()), engine)
    wrapped = Scheduler(schedulers, engine) if schedulers else None
    tracked = {"lr_scheduler": wrapped, "train_dataloader": train_dataloader, "test_dataloader": test_dataloader}
    for name, thing in tracked.items():
        if hasattr(thing, "state_dict"):
            engine.track(name, thing)
    return engine, train_dataloader, test_dataloader, wrapped


def _make_weights(
    plan: ModelPlan,
    model: LocalModel,
    optimizers: Sequence[torch.optim.Optimizer],
    numerics: Numerics,
    context: ParallelContext,
) -> ParamChunks:
    """Move this rank's parameters into flat buffers, create masters, and give optimizers what they step."""
    module = model.stages.module
    group_of = groups_by_name(optimizers, plan.names_of)
    reduction = gradient_reduction(model.ties, model.units, numerics, context)
    weights = FlatWeights(module, optimizers, group_of, reduction, numerics, context)
    exchange_matrices(weights, model.shapes, context)
    for one in weights.by_optimizer:
        one.why_missed = why_weights_are_missed(one.optimizer, plan.names_of, one.by_name())
        try:
            repoint(one.optimizer, plan.names_of, one)
        except ConfigError as error:  # perhaps on this rank only; all raise in choose_step
            one.why_missed = one.why_missed or str(error)
        if not context.config.precision.masters:
            warn_of_eps(one.optimizer)
    if former := former_parameters(plan.names_of, module):
        weights.gradients.before_batch = partial(_put_back_and_check, weights, former)
    return ParamChunks(module, weights, model.ties, context, plan.names_of, model.shapes)


def _put_back_and_check(weights: FlatWeights, former: list[Former]) -> None:
    weights.put_back()
    check_former(former)
