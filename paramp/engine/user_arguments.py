"""What a user passes to :func:`paramp.initialize`, checked before any of it changes."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from ..base.errors import ConfigError, one_line
from ..base.wrapped_models import check_plain, without_compilation
from ..distributed.context import DATA_ROLES, ParallelContext, get_context
from ..parallel.compiled_blocks import check_compiler
from ..precision.capabilities import find_library
from ..precision.choose_float8_layers import check_checkpointing
from ..precision.compute_context import ComputeContext
from ..precision.modes import Precision

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
        trains = role != "expert" or mesh.size(index) == current.config.parallel.expert
        if mesh.size(index) > 1 and not trains:
            raise ConfigError(
                f"mesh: got the axis {name!r} of {mesh.size(index)} ranks, over which the engine does not train, "
                "expected pp, dp, dp_shard, cp and tp only; in your own loop, paramp.DistributedGradScaler and "
                "paramp.clip_grad_norm_ work on it"
            )
        if (mesh.mesh.diff(dim=index) < 0).any():
            raise ConfigError(
                f"mesh: got ranks along the axis {name!r} that do not ascend, {one_line(str(mesh.mesh.tolist()))}, "
                "expected ascending ones; make the mesh with init_device_mesh"
            )
    parallel = current.config.parallel
    if parallel.expert > 1 and [mesh[name].size() for name in current.axes_of("expert")] != [parallel.expert]:
        raise ConfigError(
            f"parallel.expert: got {parallel.expert}, but the mesh has no axis of {parallel.expert} ranks for experts; "
            "make one with the name ep, or leave it out"
        )
    if parallel.expert > 1 and parallel.shard > 1 and current.shard_mesh is mesh:
        raise ConfigError(
            f"mesh: got the axes {', '.join(current.roles)}, expected none for experts beside the one that shards "
            "parameters: all others are sharded over both; launch with parallel.data.shard and parallel.expert"
        )
    if [role for role in current.roles.values() if role in ("expert", "tensor")] == ["tensor", "expert"]:
        raise ConfigError(
            f"mesh: got the axes {', '.join(current.roles)}, expected the one for experts before the tensor axis, over "
            "which each expert may be sharded too"
        )
    if current.cp.size > 1 and parallel.shard > 1 and current.shard_mesh is mesh:
        raise ConfigError(
            f"mesh: got the axes {', '.join(current.roles)}, expected one that shards parameters over the ranks of dp "
            "and cp together; launch with parallel.data.shard and parallel.context"
        )
    if [role for role in current.roles.values() if role in DATA_ROLES] == ["shard", "replicate"]:
        raise ConfigError(
            f"mesh: got the axes {', '.join(current.roles)}, expected the one that replicates parameters before the "
            "one that shards them, as fully_shard needs it"
        )
    if current.config.precision.float8 is not None:
        library = find_library(current.config.precision.float8, current.device, current.tensor_axis.size)
        check_checkpointing(library.name, current.config.activation_checkpointing)
    return current


def plain_model(
    model: nn.Module | Callable[[], nn.Module], optimizer: Any, context: ParallelContext
) -> tuple[nn.Module, dict[str, Any] | None]:
    """The model, built and without ``torch.compile``, and the options to compile its blocks with; None: they run
    eagerly.

    The configuration's options replace the model's own.

    Raises:
        ConfigError: an optimizer came with a callable; DDP, FSDP or DTensors distribute the model already; it is
            compiled and the schedule splits backwards; or a rank has no compiler.
    """
    if not isinstance(model, nn.Module):
        if not callable(optimizer):
            raise ConfigError(
                "optimizer: got an optimizer for a model that is yet to be built, expected a callable; "
                "pass one, such as lambda parameters: torch.optim.AdamW(parameters)"
            )
        model = model()
    model, options = without_compilation(model)
    check_plain(model)
    config = context.config
    if options is not None and config.compile_options is None:
        replace(config, compile=True)  # raises if the layout does not go with it
    options = config.compile_options if config.compile_options is not None else options
    check_compiler(options, context)
    if options is not None and ComputeContext(config.precision, context.device, config.emulate_fp16).emulate:
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


engine_of: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""A weak reference to the latest engine that trains each parameter, of the model as it was and as it is now."""


def check_untrained(model: nn.Module, context: ParallelContext) -> None:
    """Raise a ConfigError if an engine of ``context`` trains a parameter of ``model``.

    A second engine would move the parameter to other memory, and the first one would step what nothing computes with.
    """
    for name, parameter in model.named_parameters():
        engine = engine_of[parameter]() if parameter in engine_of else None
        if engine is not None and engine.context is context:
            raise ConfigError(
                f"model: {name!r} is trained by an engine already, expected a new model; call initialize once for each "
                "model and its optimizer, and use the engine that it returned. For another run build the model and "
                "the optimizer again"
            )


def mark_trained(parameters: Iterable[nn.Parameter], engine: Any) -> None:
    """Record in :data:`engine_of` that ``engine`` trains those of ``parameters`` that require gradients."""
    for parameter in parameters:
        if parameter.requires_grad:
            engine_of[parameter] = weakref.ref(engine)


def prepare_criterion(criterion: Any, device: torch.device) -> None:
    """Check that ``criterion`` is None or callable; move a module to ``device``."""
    if isinstance(criterion, torch.optim.Optimizer):
        raise ConfigError(
            f"criterion: got the optimizer {type(criterion).__name__}, expected a function of output and target; "
            "initialize takes (model, optimizer, criterion)"
        )
    if isinstance(criterion, type):
        name = criterion.__name__
        raise ConfigError(
            f"criterion: got the class {name}, expected a function of output and target, such as {name}()"
        )
    if criterion is not None and not callable(criterion):
        raise ConfigError(f"criterion: got {criterion!r}, expected a function of output and target")
    if isinstance(criterion, nn.Module):
        criterion.to(device)
