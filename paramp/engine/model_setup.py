"""The steps of :func:`paramp.initialize`, in its order.

The order matters. Names and ties are read from the whole model; only then is it partitioned into stages. Weights are
sharded over the tensor axis in full precision, masters are copied from that, and only then are weights rounded to half.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import torch
from torch import nn

from ..base.collectives import equal_everywhere, gather_objects
from ..base.dtensor import is_dtensor, resolved
from ..base.errors import ConfigError, one_line
from ..base.module_surgery import named_tensors, num_hooks
from ..base.wrapped_models import check_plain, without_compilation
from ..distributed.context import BATCH_ROLES, ParallelContext, get_context
from ..distributed.numerics import Numerics
from ..distributed.replicated_axes import broadcast_replicas
from ..optim.flat_weights import FlatWeights
from ..optim.gradient_reduction import gradient_reduction
from ..optim.matrices.owners import exchange_matrices
from ..optim.user_optimizer import (
    check_optimizers,
    groups_by_name,
    names_by_parameter,
    repoint,
    warn_of_eps,
)
from ..parallel.adapters import ModelAdapter
from ..parallel.compiled_blocks import CompiledBlocks, check_compiler
from ..parallel.fsdp.unit_checks import check_embeddings, check_scripted, check_shardable, check_stages
from ..parallel.fsdp.units import ShardedUnits
from ..parallel.materialize import materialize, outline
from ..parallel.partition import partition_model
from ..pipeline.joined_stages import Joined
from ..pipeline.stage import Stage, Stages
from ..precision.capabilities import find_library
from ..precision.float8 import convert
from ..precision.float8_layers import check_checkpointing, choose_layers
from ..precision.policy import Precision
from ..scaling.replicas import TiedParameter
from .compute_context import ComputeContext
from .engine import Engine

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle

EMULATED = (
    "compile: {!r} computes fp16 products in fp32 on this CPU, operator by operator, which compiled code "
    "does not speed up; the blocks run eagerly"
)
Parameters: TypeAlias = Iterable[nn.Parameter]
Optimizers: TypeAlias = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]


def usable_context(context: ParallelContext | None) -> ParallelContext:
    """The current context, which ``context`` has to be unless it is None.

    Raises:
        ConfigError: it is another one; the mesh has axes that the engine does not train over, or ranks in an order in
            which process groups do not number them; or a package that the mode needs is not installed.
    """
    current = get_context()
    if context not in (None, current):
        raise ConfigError(f"context: got {context!r}, expected the latest one that is open, {current!r}")
    mesh = current.mesh
    for index, (name, role) in enumerate(current.roles.items()):
        if mesh.size(index) > 1 and role in ("context", "expert"):
            raise ConfigError(
                f"mesh: got the axis {name!r} of {mesh.size(index)} ranks, over which the engine does not train, "
                "expected pp, dp, dp_shard and tp only; in your own loop, paramp.DistributedGradScaler and "
                "paramp.clip_grad_norm_ work on it"
            )
        if (mesh.mesh.diff(dim=index) < 0).any():
            raise ConfigError(
                f"mesh: got ranks along the axis {name!r} that do not ascend, {one_line(str(mesh.mesh.tolist()))}, "
                "expected ascending ones; make the mesh with init_device_mesh"
            )
    if [role for role in current.roles.values() if role in BATCH_ROLES] == ["shard", "replicate"]:
        raise ConfigError(
            f"mesh: got the axes {', '.join(current.roles)}, expected the one that replicates parameters before the "
            "one that shards them, as fully_shard needs it"
        )
    if current.config.precision.float8 is not None:
        library = find_library(current.config.precision.float8, current.device, current.tensor_axis.size)
        check_checkpointing(library.name, current.config.activation_checkpointing)
    return current


# ------------------------------------------------------------------------------------------------ user arguments


def build_model(model: nn.Module | Callable[[], nn.Module], optimizer: Any) -> nn.Module:
    """``model``, or the model that it returns if it is a callable."""
    if isinstance(model, nn.Module):
        return model
    if not callable(optimizer):
        raise ConfigError(
            "optimizer: got an optimizer for a model that is yet to be built, expected a callable; "
            "pass one, such as lambda parameters: torch.optim.AdamW(parameters)"
        )
    return model()


def plain(model: nn.Module, context: ParallelContext) -> tuple[nn.Module, dict[str, Any] | None]:
    """``model`` without ``torch.compile``, and the options to compile its blocks with; None: they run eagerly.

    The configuration's options replace the model's own.

    Raises:
        ConfigError: DDP, FSDP or DTensors distribute it already; it is compiled and the schedule splits backwards; or a
            rank has no compiler.
    """
    model, options = without_compilation(model)
    check_plain(model)
    config = context.config
    if options is not None and config.compile_options is None:
        replace(config, compile=True)  # raises if the layout does not go with it
    options = config.compile_options if config.compile_options is not None else options
    check_compiler(options, context)
    if options is not None and ComputeContext.in_layout(context).emulate:
        if context.is_main:
            warnings.warn(EMULATED.format(config.precision.name), stacklevel=3)
        return model, None
    return model, options


def apply_algorithms(algorithms: Sequence[Any], model: nn.Module, precision: Precision) -> None:
    """Apply each of ``algorithms`` to the modules of ``model``, in place."""
    valid = isinstance(algorithms, Iterable) and not isinstance(algorithms, str)
    if not valid or any(isinstance(one, type) or not callable(getattr(one, "apply", None)) for one in algorithms):
        raise ConfigError(
            f"algorithms: got {algorithms!r}, expected a list of objects with apply(model, precision), such as "
            "[paramp.algorithms.LowPrecisionLayerNorm()]"
        )
    for algorithm in algorithms:
        algorithm.apply(model, precision)


def build_optimizers(
    optimizer: Optimizers | Callable[[Parameters], Optimizers], model: nn.Module
) -> tuple[Optimizers, Sequence[torch.optim.Optimizer]]:
    """``optimizer``, or what it returns for the parameters of ``model`` if it is a callable; and as a sequence.

    A sequence is returned as a tuple.
    """
    built = optimizer(model.parameters()) if callable(optimizer) else optimizer
    if isinstance(built, torch.optim.Optimizer):
        return built, [built]
    if not isinstance(built, Sequence) or not all(isinstance(one, torch.optim.Optimizer) for one in built):
        raise ConfigError(
            f"optimizer: got {built!r}, expected an optimizer, a sequence of them, or a callable that creates either"
        )
    if not built:
        raise ConfigError("optimizer: got an empty sequence, expected at least one optimizer")
    for index, one in enumerate(built):
        if any(one is other for other in built[:index]):
            raise ConfigError(f"optimizer: got one {type(one).__name__} twice in the sequence; pass each once")
    return tuple(built), tuple(built)


def prepare_criterion(criterion: Any, device: torch.device) -> None:
    """Check that ``criterion`` is None or callable; move a module to ``device``."""
    if criterion is not None and not callable(criterion):
        raise ConfigError(f"criterion: got {criterion!r}, expected a function of output and target")
    if isinstance(criterion, nn.Module):
        criterion.to(device)


# --------------------------------------------------------------------------------------------------- the whole model


def read_names(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], context: ParallelContext
) -> dict[nn.Parameter, list[str]]:
    """All names of each parameter of the whole model. Checks the model and the optimizers. A collective."""
    names_of = names_by_parameter(model)
    check_embeddings(model, context)
    check_scripted(model, context)
    check_shardable(names_of, context)
    is_split = context.tensor_axis.size > 1 or context.stage_axis.size > 1
    _check_same_model(model, context, with_hooks=is_split)
    check_optimizers(optimizers, names_of)
    return names_of


def _check_same_model(model: nn.Module, context: ParallelContext, *, with_hooks: bool) -> None:
    """Check that every rank built the same parameters and buffers; else raise on every rank, with the first difference.

    They have to agree, because values of one rank are broadcast into the memory of others. ``with_hooks``: compare the
    numbers of hooks too, because hooks of a sharded parameter communicate.
    """
    own: list[tuple[Any, ...]] = [
        (
            *(name, tuple(value.shape), value.dtype, value.requires_grad, *(["meta"] if value.is_meta else [])),
            *([f"{count} hooks"] if with_hooks and count else []),
        )
        for name, value in named_tensors(model)
        for count in [num_hooks(value)]
    ]
    # With thousands of ranks, gathering all lists takes seconds, so they are gathered only if their digests differ.
    if equal_everywhere(own, context.device):
        return
    models = gather_objects(own)
    for rank, theirs in enumerate(models):
        if theirs != models[0]:
            pairs = itertools.zip_longest(models[0], theirs, fillvalue="nothing more")
            first, other = next(pair for pair in pairs if pair[0] != pair[1])
            raise ConfigError(f"model: rank 0 has {first}, but rank {rank} has {other}; build the same on every rank")


def plan_layers(
    adapter: ModelAdapter, plan: Mapping[str, str | ParallelStyle] | None, context: ParallelContext
) -> dict[str, ParallelStyle]:
    """The tensor-parallel style of each module, from the user's ``plan``, else from the model's own."""
    size = context.tensor_axis.size
    if plan is None and size > 1:
        plan = adapter.plan(size, context.config.parallel.sequence_parallel)
    if not plan:
        return {}
    from ..parallel.huggingface.lora import extend_to_adapters
    from ..parallel.tensor.sharding_plan import check_divisible, resolve_plan

    if isinstance(plan, Mapping):
        plan = {adapter.full_name(pattern): style for pattern, style in plan.items()}
    styles = resolve_plan(plan, [name for name, _ in adapter.model.named_modules(remove_duplicate=False)])
    styles = extend_to_adapters(adapter.model, styles)
    check_divisible(adapter.model, styles, size)
    return styles


def float8_conversion(
    model: nn.Module, styles: Mapping[str, ParallelStyle], context: ParallelContext
) -> tuple[Callable[[nn.Module], nn.Module], torch.Tensor]:
    """A function that converts the chosen layers of a stage to float8; the choice is made on the whole ``model``.

    And a 0-dim tensor, which the layers set to 1 when they receive a non-finite gradient.
    """
    overflow = torch.zeros((), device=context.device)
    precision, size = context.config.precision, context.tensor_axis.size
    if precision.float8 is None:
        return (lambda module: module), overflow
    dims: dict[str, int] = {}
    if styles:
        from ..parallel.tensor.sharding_plan import sharded_dims

        dims = sharded_dims(styles)
    conversion = functools.partial(
        convert,
        precision=precision,
        device=context.device,
        choice=choose_layers(model, precision.float8, dims, size),
        tensor_size=size,
        overflow=overflow,
        group=context.batch_axis.group,
        verbose=context.is_main,
    )
    return conversion, overflow


def partition(adapter: ModelAdapter, styles: Mapping[str, ParallelStyle], context: ParallelContext) -> list[nn.Module]:
    """The module of each pipeline stage, also of other ranks' stages; the model if there is one stage only."""
    pipeline = context.config.parallel.pipeline
    if pipeline.num_stages == 1:
        return [adapter.single_stage()]
    split = adapter.split(pipeline.num_stages) if pipeline.split is None else pipeline.split
    split = split and [adapter.full_name(name) for name in split]
    units = adapter.partition(pipeline.num_stages, split)
    for name in units.opened & styles.keys():
        raise ConfigError(
            f"plan: {name!r} is split by the pipeline, so a style for it would have no effect; split around it "
            "(parallel.pipeline.split), or give styles to the modules in it"
        )
    stages = partition_model(adapter.model, units, pipeline.num_stages, split)
    check_stages(stages, context)
    return stages


# ------------------------------------------------------------------------------------------------- this rank's stages


def shard(
    stages: Joined,
    styles: Mapping[str, ParallelStyle],
    fill: Callable[[nn.Module], None],
    stored: Callable[[str], torch.Tensor | None],
    to_float8: Callable[[nn.Module], nn.Module],
    blocks: Sequence[str],
    numerics: Numerics,
    context: ParallelContext,
) -> ShardedUnits | None:
    """Move the tensors of ``stages`` to the device, and shard them over the tensor axis; fill those on ``meta``.

    All replicas get the values of the first rank that has one, whatever the other ranks were built with.

    Returns:
        The units whose parameters are sharded over data ranks too, with ``blocks`` among them; None if none are.
    """
    precision, module = context.config.precision, stages.module
    placed: dict[torch.Tensor, torch.Tensor] = {}

    def place(tensor: torch.Tensor) -> torch.Tensor:
        if tensor not in placed:  # False for another name of the same tensor
            moved = tensor if tensor.is_meta else tensor.to(context.device)
            # A DTensor keeps the strides of the whole parameter, which differ from those of its local part.
            placed[tensor] = moved.contiguous() if isinstance(tensor, nn.Parameter) else resolved(moved)
        return placed[tensor]

    module._apply(place)
    broadcast_replicas([tensor for _, tensor in named_tensors(module) if not tensor.is_meta], context)
    whole = outline(module)  # with the layers' own classes, which define how they are filled
    module = to_float8(module)
    if styles and context.tensor_axis.size > 1:
        from ..parallel.tensor.sharding_plan import apply_plan

        apply_plan(module, styles, context.mesh[context.axes_of("tensor")])
    else:
        numerics.apply_styles(module, styles)
    stages.take_over(module)
    units = None
    if context.config.parallel.shard > 1:
        units = ShardedUnits(stages.parts, blocks, context, reduces=numerics.units_reduce)
    on_meta = [name for name, tensor in named_tensors(module) if tensor.is_meta]
    materialize(
        module,
        context.config.seed,
        context.device,
        whole=whole,
        fill=fill,
        stored=stored,
        dtype=None if precision.masters else precision.weights,  # masters start from the full-precision values
        keep_batchnorm_fp32=precision.keep_batchnorm_fp32,
    )
    filled = dict(named_tensors(module))
    broadcast_replicas([filled[name] for name in on_meta], context)
    return units


def flatten_weights(
    module: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    names_of: Mapping[nn.Parameter, list[str]],
    shapes: Mapping[str, torch.Size],
    ties: Sequence[TiedParameter],
    units: ShardedUnits | None,
    numerics: Numerics,
    context: ParallelContext,
) -> FlatWeights:
    """Move the parameters of ``module`` into flat buffers, create masters, and give optimizers what they step.

    ``shapes``: of this rank's parameters in the whole model.
    """
    group_of = groups_by_name(optimizers, names_of)
    reduction = gradient_reduction(ties, units, numerics, context)
    weights = FlatWeights(module, optimizers, group_of, reduction, numerics, context)
    exchange_matrices(weights, shapes, context)
    for one in weights.by_optimizer:
        repoint(one.optimizer, names_of, one)
        if not context.config.precision.masters:
            warn_of_eps(one.optimizer)
    return weights


def make_stages(
    stages: Joined,
    compiled: CompiledBlocks,
    units: ShardedUnits | None,
    numerics: Numerics,
    context: ParallelContext,
) -> Stages:
    """This rank's modules, compiled, as stages that compute in the mode's precision, each with a random stream."""
    compiled.apply(stages.parts)
    _redirect_saving(stages.module, context)
    last = context.config.parallel.pipeline.num_stages - 1
    stage = functools.partial(
        Stage, precision=context.config.precision, device=context.device, keeps_dtypes=numerics.keeps_dtypes
    )
    stream = functools.partial(context.activation_stream, engine=context.num_engines)
    return Stages(
        stages,
        [
            stage(part, is_first=index == 0, is_last=index == last, random=stream(index))
            for index, part in zip(context.local_stages, stages.parts, strict=True)
        ],
        units,
    )


def _redirect_saving(module: nn.Module, context: ParallelContext) -> None:
    """Make ``module.save_pretrained`` an error where this rank has a part of the model only."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise RuntimeError(
            "engine.module.save_pretrained: this rank has a part of the model only; call "
            "engine.save_pretrained(folder) on every rank"
        )

    if hasattr(module, "save_pretrained") and (
        context.stage_axis.size > 1 or any(map(is_dtensor, module.parameters()))
    ):
        module.__dict__["save_pretrained"] = refuse


def track(engine: Engine, **parts: Any) -> None:
    """Include the state of each of ``parts`` that has a ``state_dict`` in the engine's checkpoints."""
    for name, part in parts.items():
        if hasattr(part, "state_dict"):
            engine.track(name, part)
