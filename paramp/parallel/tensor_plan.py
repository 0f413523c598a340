"""Tensor parallelism by plan: ``{name of modules: style}``, on DTensor.

A plan is data. Names are globs over the model's module names, ``*`` standing for one part between dots; styles are
the keys of :data:`STYLES` or any ``ParallelStyle`` of torch's own. Activations between layers stay plain tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from ..base.errors import ConfigError, nearest
from ..base.globs import matches
from ..base.module_surgery import PassThrough, keeping_ties
from .tensor_styles import (
    SEQUENCE,
    PackedColwise,
    PackedRowwise,
    PartialGradient,
    ReplicatedRandom,
    ScatterSequence,
    ShardedRandom,
)

__all__ = ["STYLES", "Plan", "apply_plan", "check_divisible", "resolve_plan", "sharded_dim"]

Plan = dict[str, str | ParallelStyle]


STYLES: dict[str, Callable[[], ParallelStyle]] = {
    # A Linear whose outputs are shared out, and one whose inputs are: a pair needs one all-reduce each way.
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    # A colwise Linear whose output is gathered, for a last layer without a partner.
    "colwise_gather": lambda: ColwiseParallel(output_layouts=Replicate()),
    # An Embedding whose rows, the vocabulary, are shared out.
    "vocab": lambda: RowwiseParallel(input_layouts=Replicate()),
    # A Linear to logits whose vocabulary stays shared out, as a DTensor: the loss reduces it.
    "vocab_logits": lambda: ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    # Between pairs, each rank keeps a piece of the sequence.
    "sequence": lambda: SequenceParallel(use_local_output=True),
    "scatter_sequence": ScatterSequence,
    # A module without weights whose input is gathered, to a whole sequence on every rank.
    "gather_sequence": lambda: PrepareModuleInput(
        input_layouts=SEQUENCE, desired_input_layouts=Replicate(), use_local_output=True
    ),
    "sequence_colwise": lambda: ColwiseParallel(input_layouts=SEQUENCE),
    "sequence_rowwise": lambda: RowwiseParallel(output_layouts=SEQUENCE),
    "sequence_vocab_logits": lambda: ColwiseParallel(
        input_layouts=SEQUENCE, output_layouts=Shard(-1), use_local_output=False
    ),
    "sharded_random": ShardedRandom,
    "replicated_random": ReplicatedRandom,
    # A rowwise Linear whose input is whole.
    "rowwise_scatter": lambda: RowwiseParallel(input_layouts=Replicate()),
    # A module with weights that works on each rank's own part of an activation.
    "partial_gradient": PartialGradient,
}


def resolve_plan(plan: Mapping[str, str | ParallelStyle], names: Iterable[str]) -> dict[str, ParallelStyle]:
    """The style of each module among ``names`` that ``plan`` covers; a later entry wins over an earlier one.

    Raises:
        ConfigError: an unknown style, or an entry that matches nothing.
    """
    if not isinstance(plan, Mapping):
        raise ConfigError(f"plan: got {type(plan).__name__}, expected a dict from names of modules to styles")
    names = [name for name in names if name]
    resolved: dict[str, ParallelStyle] = {}
    for pattern, style in plan.items():
        if isinstance(style, str):
            if style not in STYLES:
                raise ConfigError(
                    f"plan[{pattern!r}]: got {style!r}, expected one of {', '.join(STYLES)}{nearest(style, STYLES)}, "
                    "or a ParallelStyle"
                )
            style = STYLES[style]()
        elif not isinstance(style, ParallelStyle):
            raise ConfigError(f"plan[{pattern!r}]: got {style!r}, expected a style's name or a ParallelStyle")
        found = [name for name in names if matches(name, pattern)]
        if not found:
            raise ConfigError(f"plan[{pattern!r}]: no module of the model matches{nearest(pattern, names)}")
        resolved |= dict.fromkeys(found, style)
    return resolved


def sharded_dim(style: ParallelStyle | None) -> int | None:
    """The dim of a Linear's weight (outputs, inputs) that ``style`` shares out; None for one that leaves it whole."""
    if isinstance(style, (RowwiseParallel, PackedRowwise)):
        return 1
    return 0 if isinstance(style, (ColwiseParallel, PackedColwise)) else None


def check_divisible(module: nn.Module, styles: Mapping[str, ParallelStyle], size: int) -> None:
    """Complain, on every rank alike, about a layer that its style does not take or cannot share out evenly.

    Raises:
        ConfigError: naming the layer.
    """
    for name, style in styles.items():
        layer = module.get_submodule(name)
        if isinstance(style, PackedColwise):
            style.check(name, layer, size)
        for kind in (ColwiseParallel, RowwiseParallel):
            own = type(style)._apply is kind._apply  # another's may take what it likes
            if own and not isinstance(layer, (nn.Linear, nn.Embedding)):
                raise ConfigError(
                    f"plan: {name!r} is a {type(layer).__name__}: {type(style).__name__} takes Linear and Embedding "
                    "only"
                )
        if not isinstance(layer, nn.Linear):
            continue
        for kind, what in ((ColwiseParallel, "out_features"), (RowwiseParallel, "in_features")):
            if isinstance(style, kind) and getattr(layer, what) % size:
                raise ConfigError(
                    f"plan: {name!r} has {what} {getattr(layer, what)}, expected a multiple of parallel.tensor.size "
                    f"{size}"
                )


def apply_plan(module: nn.Module, styles: Mapping[str, ParallelStyle], mesh: DeviceMesh) -> None:
    """Apply each of ``styles`` to the submodule of its name, where ``module`` has it. Ties between weights are kept.

    Raises:
        ConfigError: modules that share a weight are sharded differently.
    """
    with keeping_ties(module) as shared:
        done: set[int] = set()
        for name, submodule in list(module.named_modules(remove_duplicate=False)):
            if name in styles and id(submodule) not in done and not isinstance(submodule, PassThrough):
                done.add(id(submodule))
                try:
                    parallelize_module(submodule, mesh, styles[name])
                except NotImplementedError as error:
                    raise ConfigError(f"plan: {name!r} is a {type(submodule).__name__}: {error}") from None
        for names in shared:
            layouts = [getattr(module.get_parameter(name), "placements", None) for name in names]
            if any(layout != layouts[0] for layout in layouts):
                raise ConfigError(
                    f"plan: {' and '.join(names)} are one parameter, but the plan shards them differently"
                )
