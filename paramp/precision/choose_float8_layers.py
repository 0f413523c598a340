"""The choice of a model's float8 layers: those that match the mode's globs and whose size the hardware supports."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from torch import nn

from ..base.errors import ConfigError, nearest
from ..base.module_surgery import is_router, matches
from .modes import Float8

MULTIPLE = 16
"""Both sizes of a layer have to be multiples of this for the float8 products of a GPU."""


@dataclass(frozen=True)
class Choice:
    """The layers of a model that compute in float8, by their names in the whole model."""

    linear: tuple[str, ...]
    norms: tuple[str, ...]
    """Layer norms that are converted to Transformer Engine's."""
    kept: Mapping[str, tuple[str, ...]]
    """Reason -> the other linear layers, and stacks of experts, that match the mode's globs but keep their dtype."""


def check_checkpointing(library: str, how: str | int) -> None:
    """Raise a ConfigError if ``activation_checkpointing`` is ``how``, and layers of ``library`` cannot be repeated."""
    if library == "transformer_engine" and how != "none":
        raise ConfigError(
            f"activation_checkpointing: got {how!r}, expected 'none', because Transformer Engine's scales "
            "change from one forward to the next, so that a block that runs again computes otherwise; use "
            "transformer_engine.pytorch.checkpoint in the model's forward, or the mode 'fp8-mixed', on torchao"
        )


def choose_layers(
    model: nn.Module, float8: Float8, sharded_dims: Mapping[str, int] | None = None, tensor_size: int = 1
) -> Choice:
    """The layers of the whole ``model`` that compute in float8, the same on every rank.

    Those that match ``float8.modules`` and not ``float8.skip``, except if a size is not a multiple of 16, in the model
    or on a rank's shard; if the layer has a forward of its own; or if an embedding shares its weight.

    Args:
        sharded_dims: the dim of the weight (outputs, inputs) that a tensor-parallel plan shards, by module.

    Raises:
        ConfigError: a glob of the user's matches no module.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    _check_globs(float8, modules)
    routers = tuple(f"{name}." for name, module in modules.items() if is_router(module))
    tables = {id(module.weight) for module in modules.values() if isinstance(module, nn.Embedding)}
    linear, norms = [], []
    kept: dict[str, list[str]] = {}
    for name, module in modules.items():
        if not _any_matches(name, float8.modules):
            continue
        skipped = _any_matches(name, float8.skip)
        if isinstance(module, nn.LayerNorm) and not skipped and _is_plain_norm(module):
            norms.append(name)
        if _is_stack(module):
            kept.setdefault("stacks of experts have no float8 products", []).append(name)
        if not isinstance(module, nn.Linear):
            continue
        dim = (sharded_dims or {}).get(name)
        why = "matched by skip" if skipped else _why_kept(module, tables, dim, tensor_size)
        if not why and name.startswith(routers):
            why = "a router computes in fp32"
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
    """The reason why a linear layer has to keep its dtype; empty if it can compute in float8."""
    computed_elsewhere = isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear)
    own = type(module).forward is not nn.Linear.forward or "forward" in module.__dict__
    if own or computed_elsewhere or "weight" not in module._parameters:
        return "they have their own forward"
    if id(module.weight) in tables:
        return "an embedding shares their weight"
    sizes = list(module.weight.shape)
    if any(size % MULTIPLE for size in sizes):
        return f"a size is not a multiple of {MULTIPLE}"
    if dim is not None and sizes[dim] % (MULTIPLE * tensor_size):
        return f"a sharded size is not a multiple of {MULTIPLE} x parallel.tensor.size {tensor_size}"
    return ""


def _is_stack(module: nn.Module) -> bool:
    """Whether ``module`` has the matrices of several experts in one parameter, of 3 dims."""
    has_three_dims = any(value is not None and value.ndim == 3 for value in module._parameters.values())
    return has_three_dims and not isinstance(module, (nn.Conv1d, nn.ConvTranspose1d))


def _is_plain_norm(module: nn.LayerNorm) -> bool:
    own = type(module).forward is not nn.LayerNorm.forward or "forward" in module.__dict__
    return not own and len(module.normalized_shape) == 1 and module.elementwise_affine and module.bias is not None
