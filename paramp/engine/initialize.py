"""Turns a plain model into an :class:`~paramp.engine.engine.Engine`.

How a model is planned, partitioned and filled depends on its family (:mod:`paramp.parallel.adapters`). Under a pipeline
it is an ``nn.Sequential``, a Hugging Face model, or any other model whose forward can be traced. A model's own
``tensor_parallel_plan(tensor_size, sequence_parallel)`` and ``pipeline_split(num_stages)`` override its family's; the
user's ``plan`` and ``parallel.pipeline.split`` override both.

Optimizers keep their param groups. Several have one loss scale, one norm and one decision whether to step. Each
trained parameter is in exactly one of them, and each of them has at most one scheduler.

A ``DataLoader`` is the same on every rank. It is returned with a sampler that gives each data rank its part, equal
within a model group (:mod:`paramp.data.dataloader`); its ``batch_size`` is that of one data rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from ..data.dataloader import shard_loaders
from ..distributed.context import ParallelContext
from ..distributed.numerics import numerics_of
from ..parallel.activation_checkpointing import CheckpointedBlocks, repeated_blocks
from ..parallel.adapters import adapter_for
from ..parallel.compiled_blocks import CompiledBlocks
from ..pipeline.joined_stages import Joined
from ..pipeline.tied_stages import tie_stages
from . import model_setup as setup
from .criterion import Criterion
from .engine import Engine
from .lr_scheduler import Scheduler, Schedulers, build_schedulers
from .state.model_tensors import ParamChunks

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle


def initialize(
    model: nn.Module | Callable[[], nn.Module],
    optimizer: setup.Optimizers | Callable[[setup.Parameters], setup.Optimizers],
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
        ``(engine, train_dataloader, test_dataloader, lr_scheduler)``; the scheduler wrapped in :class:`Scheduler`.

    Raises:
        RuntimeError: no context is open.
        ConfigError: the context, model, plan, optimizer, scheduler or a loader does not fit the layout or each other.
    """
    context = setup.usable_context(context)
    numerics = numerics_of(context.config)
    loaders = {"train_dataloader": train_dataloader, "test_dataloader": test_dataloader}
    train_dataloader, test_dataloader = shard_loaders(context, consecutive=numerics.consecutive_samples, **loaders)
    model, options = setup.plain(setup.build_model(model, optimizer), context)
    setup.apply_algorithms(algorithms, model, context.config.precision)
    built, optimizers = setup.build_optimizers(optimizer, model)
    numerics.prepare(context, model, optimizers)
    setup.prepare_criterion(criterion, context.device)
    schedulers = build_schedulers(lr_scheduler, optimizers)
    names_of = setup.read_names(model, optimizers, context)
    adapter = adapter_for(model)
    styles = numerics.plan(adapter, plan, lambda: setup.plan_layers(adapter, plan, context))
    to_float8, overflow = setup.float8_conversion(model, styles, context)
    fill, stored, own_loss = adapter.filler(), adapter.stored(), adapter.own_loss()
    all_stages = setup.partition(adapter, styles, context)
    own = Joined(all_stages[index] for index in context.local_stages)
    numerics.watch(all_stages, own.parts, styles)
    CheckpointedBlocks(model, context.config.activation_checkpointing).apply(own.parts)
    shapes = {name: value.shape for name, value in own.module.named_parameters(remove_duplicate=False)}
    compiled = CompiledBlocks(model, options, context)
    units = setup.shard(own, styles, fill, stored, to_float8, repeated_blocks(model), numerics, context)
    ties = tie_stages(names_of, all_stages, own.module, context)
    weights = setup.flatten_weights(own.module, optimizers, names_of, shapes, ties, units, numerics, context)
    params = ParamChunks(own.module, weights, ties, context, names_of, shapes)
    stages = setup.make_stages(own, compiled, units, numerics, context)
    engine = Engine(stages, params, built, criterion, own_loss, overflow)
    wrapped = Scheduler(schedulers, engine) if schedulers else None
    setup.track(engine, lr_scheduler=wrapped, train_dataloader=train_dataloader, test_dataloader=test_dataloader)
    return engine, train_dataloader, test_dataloader, wrapped
