"""Tensor parallelism by plan: ``{name of modules: style}``, on DTensor.

A plan is data. Names are globs over the model's module names, ``*`` standing for one part between dots; styles are
the keys of :data:`STYLES` or any ``ParallelStyle`` of torch's own. Activations between layers stay plain tensors.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from .precision import ConfigError, nearest
from .randomness import sharded_random
from .shards import wrap
from .surgery import keeping_ties

__all__ = ["STYLES", "Plan", "apply_plan", "check_divisible", "mask_tail", "resolve_plan", "vocab_parallel_loss"]

Plan = dict[str, str | ParallelStyle]


class ShardedRandom(ParallelStyle):
    """The module's random numbers differ over the tensor axis: for dropout on sharded activations."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        contexts: list[Any] = []

        def enter(_module: nn.Module, _inputs: Any) -> None:
            contexts.append(sharded_random())
            contexts[-1].__enter__()

        def leave(_module: nn.Module, _inputs: Any, _output: Any) -> None:
            contexts.pop().__exit__(None, None, None)

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave, always_call=True)
        return module


SEQUENCE = Shard(1)
"""Activations are (batch, sequence, features)."""


class ScatterSequence(PrepareModuleOutput):
    """The module's output (batch, sequence, ...), whole on every rank, is cut along the sequence."""

    def __init__(self) -> None:
        super().__init__(output_layouts=Replicate(), desired_output_layouts=SEQUENCE, use_local_output=True)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def check(_module: nn.Module, _inputs: Any, output: torch.Tensor) -> None:
            if output.shape[1] % device_mesh.size():
                raise ConfigError(
                    f"sequence of {output.shape[1]}: expected a multiple of parallel.tensor.size {device_mesh.size()} "
                    "under sequence_parallel"
                )

        module.register_forward_hook(check)
        return super()._apply(module, device_mesh)


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
    "sequence_colwise": lambda: ColwiseParallel(input_layouts=SEQUENCE),
    "sequence_rowwise": lambda: RowwiseParallel(output_layouts=SEQUENCE),
    "sequence_vocab_logits": lambda: ColwiseParallel(
        input_layouts=SEQUENCE, output_layouts=Shard(-1), use_local_output=False
    ),
    "sharded_random": ShardedRandom,
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
        matches = [name for name in names if _matches(name, pattern)]
        if not matches:
            raise ConfigError(f"plan[{pattern!r}]: no module of the model matches{nearest(pattern, names)}")
        resolved |= dict.fromkeys(matches, style)
    return resolved


def _matches(name: str, pattern: str) -> bool:
    parts, patterns = name.split("."), pattern.split(".")
    return len(parts) == len(patterns) and all(map(fnmatch.fnmatchcase, parts, patterns))


def check_divisible(module: nn.Module, styles: Mapping[str, ParallelStyle], size: int) -> None:
    """Complain, on every rank alike, about a layer whose features do not share out evenly over ``size`` ranks.

    Raises:
        ConfigError: naming the layer.
    """
    for name, style in styles.items():
        layer = module.get_submodule(name)
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
            if name in styles and id(submodule) not in done:
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


_loss_depth = 0


@contextmanager
def vocab_parallel_loss(enabled: bool = True) -> Iterator[None]:
    """Cross-entropy of DTensor logits whose vocabulary is sharded, forward and backward, without gathering them.

    torch's ``loss_parallel``, made to nest: torch's own switches itself off at the end of the innermost.
    """
    global _loss_depth
    with ExitStack() as stack:
        if enabled and _loss_depth == 0:
            stack.enter_context(loss_parallel())
        _loss_depth += 1
        try:
            yield
        finally:
            _loss_depth -= 1


def mask_tail(logits: torch.Tensor, size: int) -> torch.Tensor:
    """``logits`` with all but the first ``size`` entries of the last dim at the lowest finite value of the dtype.

    A DTensor may be sharded over its last dim, as :class:`ColwiseParallel` leaves it.
    """
    total = logits.shape[-1]
    if size == total:
        return logits
    if not isinstance(logits, DTensor):
        return _mask_from(logits, size)
    shard = next((axis for axis, kind in enumerate(logits.placements) if kind.is_shard(logits.ndim - 1)), None)
    offset = 0
    if shard is not None:
        mesh = logits.device_mesh
        chunk = -(-total // mesh.size(shard))  # DTensor cuts like torch.chunk
        offset = mesh.get_local_rank(shard) * chunk
    return wrap(_mask_from(logits.to_local(), max(0, size - offset)), logits)


def _mask_from(logits: torch.Tensor, start: int) -> torch.Tensor:
    if start >= logits.shape[-1]:
        return logits
    masked = torch.arange(logits.shape[-1], device=logits.device) >= start
    return logits.masked_fill(masked, torch.finfo(logits.dtype).min)
