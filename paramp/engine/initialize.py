"""From a plain model to an :class:`~paramp.engine.engine.Engine`: cut it, share it out, round it, hand it to the optimizer.

The order matters. Names and ties are read off the whole model; only then is it cut into stages. Weights are shared
out over the tensor axis in full precision, masters are copied from that, and only then are weights rounded to half.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.optim.lr_scheduler import LRScheduler

from ..base.dtensor import local
from ..base.errors import ConfigError
from ..base.module_surgery import Joined
from ..data.dataloader import shard_loaders
from ..distributed.collectives import gather_objects
from ..distributed.context import ParallelContext, TiedParameter, get_context
from ..optim.flat_params import FlatWeights
from ..optim.user_optimizer import (
    check_elementwise,
    check_optimizer,
    groups_by_name,
    names_by_parameter,
    repoint,
    warn_of_eps,
)
from ..parallel.huggingface import (
    PretrainedPartition,
    is_pretrained,
    pretrained_filling,
    pretrained_plan,
    returning_logits,
)
from ..parallel.materialize import check_materializable, is_on_meta, materialize, outline, reset_parameters
from ..parallel.partition import Partition, SequentialPartition, is_sequential, plan_stages
from ..parallel.partition_fx import TracedPartition
from ..parallel.pipeline import Stage, Stages
from ..parallel.tensor_plan import apply_plan, check_divisible, resolve_plan
from ..precision.float8 import choose_layers, convert, find_library
from .engine import Engine
from .loss_window import Criterion
from .lr_scheduler import Scheduler

__all__ = ["initialize"]

Parameters: TypeAlias = Iterable[nn.Parameter]


def initialize(
    model: nn.Module | Callable[[], nn.Module],
    optimizer: torch.optim.Optimizer | Callable[[Parameters], torch.optim.Optimizer],
    criterion: Criterion | None = None,
    train_dataloader: Any = None,
    test_dataloader: Any = None,
    lr_scheduler: LRScheduler | Callable[[torch.optim.Optimizer], LRScheduler] | None = None,
    *,
    plan: Mapping[str, str | ParallelStyle] | None = None,
    algorithms: Sequence[Any] = (),
) -> tuple[Engine, Any, Any, Scheduler | None]:
    """Prepare ``model`` for the current context's layout and mode.

    Args:
        model: the whole model, on the CPU, a GPU or ``meta``; or a callable that builds it. Its parameters are moved
            and cut, so use it through the engine from here on. One on ``meta`` is cut there, and filled shard by shard
            (:mod:`paramp.parallel.materialize`).
        optimizer: a fresh optimizer over the model's parameters, whose param groups are kept and re-pointed at this
            rank's weights or masters; or a callable that makes one from the parameters.
        criterion: ``(output, target) -> loss``, the mean over the microbatch, or ``(sum, count)``.
        train_dataloader, test_dataloader: any ``DataLoader``, the same on every rank: it comes back with a sampler that
            gives each data rank its part, equal in a model group (:mod:`paramp.data.dataloader`). Its ``batch_size`` is that
            of one data rank. Anything else is returned as it is.
        lr_scheduler: a scheduler over that optimizer, or a callable that makes one from it.
        plan: ``{glob over module names: style}`` for tensor parallelism (:mod:`paramp.parallel.tensor_plan`). None: the model's own
            ``tensor_parallel_plan(tensor_size, sequence_parallel)``, or that of a Hugging Face model
            (:mod:`paramp.parallel.huggingface`).
        algorithms: changes to the model's modules, applied before it is cut; each has ``apply(model, precision)``.

    The criterion, where it is a module, is moved to the device.

    With ``parallel.pipeline.size`` above 1 the model is an ``nn.Sequential``, a Hugging Face model, or any other of
    one input whose forward can be traced (:mod:`paramp.parallel.partition_fx`). A Hugging Face model's output is its logits. A
    model's own ``pipeline_split(num_stages)`` says where stages begin when ``parallel.pipeline.split`` does not.

    Returns:
        ``(engine, train_dataloader, test_dataloader, lr_scheduler)``; the scheduler wrapped in :class:`Scheduler`.

    Raises:
        RuntimeError: nothing was launched.
        ConfigError: the model, plan, optimizer, scheduler or a loader does not fit the layout or each other.
    """
    context = get_context()
    float8 = context.config.precision.float8
    if float8 is not None:
        find_library(float8, context.device, context.tp.size)
    train_dataloader, test_dataloader = shard_loaders(
        context, train_dataloader=train_dataloader, test_dataloader=test_dataloader
    )
    if not isinstance(model, nn.Module):
        if isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigError(
                "optimizer: got a finished optimizer for a model that is yet to be built; "
                "pass a callable, such as lambda parameters: torch.optim.AdamW(parameters)"
            )
        model = model()
    _check_algorithms(algorithms)
    for algorithm in algorithms:
        algorithm.apply(model, context.config.precision)
    if not isinstance(optimizer, torch.optim.Optimizer):
        if not callable(optimizer):
            raise ConfigError(f"optimizer: got {optimizer!r}, expected an optimizer or a callable that makes one")
        optimizer = optimizer(model.parameters())
    if criterion is not None and not callable(criterion):
        raise ConfigError(f"criterion: got {criterion!r}, expected a function of output and target")
    scheduler = _check_scheduler(lr_scheduler, optimizer)

    names_of = names_by_parameter(model)
    _check_same_model(model, context)
    check_optimizer(optimizer, names_of)
    styles = resolve_plan(
        _find_plan(model, plan, context), [name for name, _ in model.named_modules(remove_duplicate=False)]
    )
    check_divisible(model, styles, context.tp.size)
    choice = None if float8 is None else choose_layers(model, float8, styles, context.tp.size)
    fill = _filling(model)
    stages = _partition(model, styles, context)
    held = [
        _parameter_names(stages, context.config.parallel.pipeline.stages_of(rank)) for rank in range(context.pp.size)
    ]
    places = context.config.parallel.pipeline.stages_of(context.pp.rank)
    joined = Joined(stages[place] for place in places)
    shapes = {name: value.shape for name, value in joined.module.named_parameters(remove_duplicate=False)}
    overflow = torch.zeros((), device=context.device)
    in_float8 = functools.partial(
        convert,
        precision=context.config.precision,
        device=context.device,
        choice=choice,
        tensor_size=context.tp.size,
        overflow=overflow,
        group=context.dp.group,
        verbose=context.is_main,
    )
    module = _share_out(joined.module, styles, fill, in_float8, context)
    joined.take_over(module)
    ties = _tie_stages(names_of, held, module, context)
    context.ties.extend(ties)
    weights = FlatWeights(module, context.config.precision, context, groups_by_name(optimizer, names_of), ties)
    weights.follow_loads(module)
    check_elementwise(optimizer, weights)
    repoint(optimizer, names_of, weights)
    if not context.config.precision.masters:
        warn_of_eps(optimizer)
    own_stages = Stages(
        joined,
        [
            Stage(
                part,
                context.config.precision,
                context.device,
                is_first=place == 0,
                is_last=place == len(stages) - 1,
                random=context.activation_stream(place),
            )
            for place, part in zip(places, joined.parts, strict=True)
        ],
    )
    if isinstance(criterion, nn.Module):
        criterion.to(context.device)
    first_names = {name: own[0] for own in names_of.values() for name in own}
    engine = Engine(own_stages, weights, ties, optimizer, criterion, context, first_names, shapes, overflow)
    following = None if scheduler is None else Scheduler(scheduler, engine)
    tracked = {"lr_scheduler": following, "train_dataloader": train_dataloader, "test_dataloader": test_dataloader}
    for name, thing in tracked.items():
        if hasattr(thing, "state_dict"):
            engine.track(name, thing)
    return engine, train_dataloader, test_dataloader, following


def _check_algorithms(algorithms: Any) -> None:
    right = isinstance(algorithms, Iterable) and not isinstance(algorithms, str)
    if not right or any(isinstance(one, type) or not callable(getattr(one, "apply", None)) for one in algorithms):
        raise ConfigError(
            f"algorithms: got {algorithms!r}, expected a list of objects with apply(model, precision), such as "
            "[paramp.algorithms.LowPrecisionLayerNorm()]"
        )


def _check_same_model(model: nn.Module, context: ParallelContext) -> None:
    mine = [(name, tuple(value.shape), value.requires_grad) for name, value in model.named_parameters()]
    # In a world of thousands a list of parameters from every rank takes seconds to read; they are asked for only if
    # their digests, which every rank sees, differ.
    digests = gather_objects(hashlib.sha256(repr(mine).encode()).hexdigest())
    if len(set(digests)) == 1:
        return
    models = gather_objects(mine)
    for rank, theirs in enumerate(models):
        if theirs != models[0]:
            first, other = next(
                pair
                for pair in itertools.zip_longest(models[0], theirs, fillvalue="no parameter")
                if pair[0] != pair[1]
            )
            raise ConfigError(f"model: rank 0 has {first}, where rank {rank} has {other}; build the same on every rank")


def _check_scheduler(
    lr_scheduler: LRScheduler | Callable[[torch.optim.Optimizer], LRScheduler] | None, optimizer: torch.optim.Optimizer
) -> LRScheduler | None:
    if lr_scheduler is None:
        return None
    if not isinstance(lr_scheduler, LRScheduler) and not callable(lr_scheduler):
        raise ConfigError(f"lr_scheduler: got {lr_scheduler!r}, expected a scheduler or a callable that makes one")
    scheduler = lr_scheduler if isinstance(lr_scheduler, LRScheduler) else lr_scheduler(optimizer)
    if getattr(scheduler, "optimizer", optimizer) is not optimizer:
        raise ConfigError("lr_scheduler: it steps another optimizer than the one given; make it from that one")
    return scheduler


def _find_plan(
    model: nn.Module, plan: Mapping[str, str | ParallelStyle] | None, context: ParallelContext
) -> Mapping[str, str | ParallelStyle]:
    parallel = context.config.parallel
    if plan is not None or context.tp.size == 1:
        return plan or {}
    own = getattr(model, "tensor_parallel_plan", None)
    if own is None and is_pretrained(model):
        return pretrained_plan(model, context.tp.size, parallel.sequence_parallel)
    if own is None:
        raise ConfigError(
            f"parallel.tensor.size: got {context.tp.size}, but {type(model).__name__} has no tensor_parallel_plan(); "
            'pass plan={"layers.*.up": "colwise", "layers.*.down": "rowwise"} to initialize, with your names'
        )
    found: Mapping[str, str | ParallelStyle] = own(context.tp.size, parallel.sequence_parallel)
    return found


def _partition(model: nn.Module, styles: Mapping[str, ParallelStyle], context: ParallelContext) -> list[nn.Module]:
    """The module of each pipeline stage; the model where there is one stage only."""
    size, split = context.config.parallel.pipeline.num_stages, context.config.parallel.pipeline.split
    if size == 1:
        return [returning_logits(model) if is_pretrained(model) else model]
    own_split = getattr(model, "pipeline_split", None)
    if split is None and own_split is not None:
        split = own_split(size)
    partition: Partition
    if is_sequential(model):
        partition = SequentialPartition(model)
    elif is_pretrained(model):
        partition = PretrainedPartition(model)
    else:
        partition = TracedPartition(model, size, split)
    for name in partition.opened & styles.keys():
        raise ConfigError(
            f"plan: {name!r} is opened by the pipeline's cut, so a style for it would not run; cut around it "
            "(parallel.pipeline.split), or give styles to the modules in it"
        )
    stage_names = plan_stages(partition.units, size, split)
    _check_hooks(model, stage_names, partition.opened)
    stages = partition.stages(stage_names)
    _check_statistics(model, stages)
    return stages


HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def _check_hooks(model: nn.Module, stage_names: Sequence[Sequence[str]], opened: Collection[str]) -> None:
    """Refuse hooks on modules that are taken apart: they would run once a stage, on parts, or not at all.

    Raises:
        ConfigError: naming them.
    """
    for name, module in model.named_modules(remove_duplicate=False):
        prefix = f"{name}." if name else ""
        chunks = sum(any(unit.startswith(prefix) for unit in names) for names in stage_names)
        hooks = [hook for kind in HOOKS for hook in getattr(module, kind).values()]
        if hooks and (chunks > 1 or name in opened):
            what = ", ".join(getattr(hook, "__qualname__", repr(hook)) for hook in hooks)
            raise ConfigError(
                f"parallel.pipeline.size: {name or 'the model'} has hooks ({what}), but is cut into stages, which run "
                "in turn; put them on modules that stay whole, or make them modules of their own"
            )


def _check_statistics(model: nn.Module, stages: Sequence[nn.Module]) -> None:
    """Refuse a module with running statistics that several stages call: each would update its own.

    Raises:
        ConfigError: naming it.
    """
    held = [{id(module) for module in stage.modules()} for stage in stages]
    for name, module in model.named_modules():
        if getattr(module, "running_mean", None) is not None and sum(id(module) in there for there in held) > 1:
            raise ConfigError(
                f"parallel.pipeline.split: {name!r} ({type(module).__name__}) is called on several stages, each of "
                "which would have running statistics of its own; cut so that one stage makes all its calls, or use a "
                "module for each"
            )


def _filling(model: nn.Module) -> Callable[[nn.Module], None]:
    """What fills a module of ``model`` whose tensors are on ``meta``.

    Raises:
        ValueError: a module could not be filled.
    """
    if is_pretrained(model) and any(is_on_meta(module) for module in model.modules()):
        return pretrained_filling(model)
    check_materializable(model)
    return reset_parameters


def _share_out(
    module: nn.Module,
    styles: Mapping[str, ParallelStyle],
    fill: Callable[[nn.Module], None],
    in_float8: Callable[[nn.Module], nn.Module],
    context: ParallelContext,
) -> nn.Module:
    """Move a stage's tensors to the device, and cut them over the tensor axis; what is on ``meta`` is filled then.

    Every data and tensor rank gets the values of the stage's first rank, whatever each was built with.
    """
    precision = context.config.precision
    module._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(context.device))
    _broadcast([tensor for _, tensor in _named_tensors(module) if not tensor.is_meta], context)
    whole = outline(module)  # with its own layers, whose classes say how they are filled
    module = in_float8(module)
    if context.tp.size > 1:
        apply_plan(module, styles, context.mesh["tp"])
    on_meta = [name for name, tensor in _named_tensors(module) if tensor.is_meta]
    materialize(
        module,
        context.config.seed,
        context.device,
        whole=whole,
        fill=fill,
        dtype=None if precision.masters else precision.weights,  # masters are made from what was drawn
        keep_batchnorm_fp32=precision.keep_batchnorm_fp32,
    )
    filled = dict(_named_tensors(module))
    _broadcast([filled[name] for name in on_meta], context)
    return module


def _named_tensors(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]


def _broadcast(tensors: Iterable[torch.Tensor], context: ParallelContext) -> None:
    """Give every data and tensor rank of a stage the values of the stage's first rank; of shards, its own."""
    for tensor in tensors:
        if context.dp.size > 1:
            dist.broadcast(local(tensor).detach(), group=context.dp.group, group_src=0)
        shared_out = isinstance(tensor, DTensor) and any(placement.is_shard() for placement in tensor.placements)
        if context.tp.size > 1 and not shared_out:
            dist.broadcast(local(tensor).detach(), group=context.tp.group, group_src=0)


def _parameter_names(stages: Sequence[nn.Module], places: Iterable[int]) -> set[str]:
    """The names of what the stages at ``places`` hold."""
    return {name for place in places for name, _ in stages[place].named_parameters(remove_duplicate=False)}


def _tie_stages(
    names_of: Mapping[nn.Parameter, list[str]], held: Sequence[set[str]], module: nn.Module, context: ParallelContext
) -> list[TiedParameter]:
    """The parameters of this rank's ``module`` that other pipeline ranks hold too, with equal values.

    Args:
        held: the names of the parameters that each pipeline rank holds.

    Returns:
        Such parameters, with groups to sum over. What only stages of one rank share is one parameter there anyway.

    Raises:
        ConfigError: the ranks shard such a parameter differently.
    """
    ties: list[TiedParameter] = []
    for names in names_of.values():
        own_names = [next((name for name in names if name in there), None) for there in held]
        holders = [rank for rank, name in enumerate(own_names) if name is not None]
        if len(holders) < 2:
            continue
        # One group for each place on the other axes; every rank takes part in making all of them.
        columns = context.mesh.mesh.flatten(1).T.tolist()
        group = context.make_group([[column[rank] for rank in holders] for column in columns])
        name = own_names[context.pp.rank]
        parameter = None if name is None else module.get_parameter(name)
        layouts = gather_objects(None if parameter is None else str(getattr(parameter, "placements", "whole")))
        if len({layout for layout in layouts if layout is not None}) > 1:
            raise ConfigError(f"plan: {' and '.join(names)} are one parameter, but it shards them differently")
        if name is None or parameter is None or group is None:
            continue
        dist.broadcast(local(parameter).detach(), group=group, group_src=0)
        ties.append(TiedParameter(name, parameter, group, owner=context.pp.rank == holders[0]))
    return ties
