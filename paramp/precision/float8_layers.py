"""Which layers of a model compute in float8: those that the mode's globs name, of a size that the hardware takes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from torch import nn

from ..base.errors import ConfigError, nearest
from ..base.globs import matches
from .policy import Float8

MULTIPLE = 16
"""What both sizes of a layer have to be multiples of, for the float8 products of a GPU."""


@dataclass(frozen=True)
class Choice:
    """Which layers of a model compute in float8, by their names in the whole model."""

    linear: tuple[str, ...]
    norms: tuple[str, ...]
    """Layer norms that Transformer Engine takes over."""
    kept: Mapping[str, tuple[str, ...]]
    """Why other linear layers that the mode names keep their dtype -> which."""


def choose_layers(
    model: nn.Module, float8: Float8, sharded_dims: Mapping[str, int] | None = None, tensor_size: int = 1
) -> Choice:
    """Which layers of the whole ``model`` compute in float8, the same on every rank.

    Those that ``float8.modules`` names and ``float8.skip`` does not, unless they could not: a size is no multiple of
    16, here or on a rank's shard; the layer computes something of its own; an embedding uses its weight.

    Args:
        sharded_dims: the dim of the weight (outputs, inputs) that a tensor-parallel plan shards, by module.

    Raises:
        ConfigError: a glob of the user's that matches no module.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    _check_globs(float8, modules)
    tables = {id(module.weight) for module in modules.values() if isinstance(module, nn.Embedding)}
    linear, norms = [], []
    kept: dict[str, list[str]] = {}
    for name, module in modules.items():
        if not _any_matches(name, float8.modules):
            continue
        skipped = _any_matches(name, float8.skip)
        if isinstance(module, nn.LayerNorm) and not skipped and _is_plain_norm(module):
            norms.append(name)
        if not isinstance(module, nn.Linear):
            continue
        dim = (sharded_dims or {}).get(name)
        why = "named in skip" if skipped else _why_kept(module, tables, dim, tensor_size)
        if why:
            kept.setdefault(why, []).append(name)
        else:
            linear.append(name)
    return Choice(tuple(linear), tuple(norms), {why: tuple(names) for why, names in kept.items()})


def _check_globs(float8: Float8, names: Collection[str]) -> None:
    """Raise a ConfigError for a glob of the user's that matches none of ``names``."""
    default = Float8()
    for option in ("modules", "skip"):
        for pattern in getattr(float8, option):
            if pattern not in getattr(default, option) and not any(matches(name, pattern) for name in names):
                problem = f"precision: {option} has {pattern!r}, which no module of the model matches"
                raise ConfigError(problem + nearest(pattern, names))


def _any_matches(name: str, patterns: Collection[str]) -> bool:
    return any(matches(name, pattern) for pattern in patterns)


def _why_kept(module: nn.Linear, tables: Collection[int], dim: int | None, tensor_size: int) -> str:
    """Why a linear layer keeps its dtype, which it has to; empty if it can compute in float8."""
    computed_elsewhere = isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear)
    own = type(module).forward is not nn.Linear.forward or "forward" in module.__dict__
    if own or computed_elsewhere or "weight" not in module._parameters:
        return "they compute something of their own"
    if id(module.weight) in tables:
        return "an embedding uses their weight"
    sizes = list(module.weight.shape)
    if any(size % MULTIPLE for size in sizes):
        return f"a size is no multiple of {MULTIPLE}"
    if dim is not None and sizes[dim] % (MULTIPLE * tensor_size):
        return f"a sharded size is no multiple of {MULTIPLE} x parallel.tensor.size {tensor_size}"
    return ""


def _is_plain_norm(module: nn.LayerNorm) -> bool:
    own = type(module).forward is not nn.LayerNorm.forward or "forward" in module.__dict__
    return not own and len(module.normalized_shape) == 1 and module.elementwise_affine and module.bias is not None
