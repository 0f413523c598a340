"""Partitioning of a model into pipeline stages.

There are three partitions: :class:`SequentialPartition` here, for ``nn.Sequential``; one for Hugging Face models
(:mod:`paramp.parallel.huggingface.decoder_partition`); and one for all other models, which are traced
(:mod:`paramp.parallel.partition_fx`). In every stage, modules and parameters have the names of the whole model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from itertools import accumulate
from typing import Protocol

from torch import nn

from ..base.errors import ConfigError, nearest
from ..base.module_surgery import check_forward_of_class, has_own_forward, keep_only, names_outside


class Partition(Protocol):
    """One model that can be split into stages."""

    @property
    def units(self) -> list[tuple[str, nn.Module]]:
        """The modules that stages consist of, by name, in the order of their calls."""

    @property
    def opened(self) -> frozenset[str]:
        """Names of modules whose submodules may be on several stages, so that no stage calls the module itself."""

    def stages(self, plan: Sequence[Sequence[str]]) -> list[nn.Module]:
        """The module of each stage, with the units named in ``plan``; together the stages have all parameters.

        The input of the first stage is the model's input, of each other one the output of the stage before.
        """


def is_sequential(module: nn.Module) -> bool:
    """Whether ``module`` is an ``nn.Sequential`` that does not override ``forward``, in its class or on the object."""
    if not isinstance(module, nn.Sequential):
        return False
    return type(module).forward is nn.Sequential.forward and not has_own_forward(module)


def units(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The modules that ``model`` applies one after the other, by name; nested ``nn.Sequential`` modules are opened."""
    for name, child in model._modules.items():  # named_children() would skip a module that is used twice
        if child is None:
            continue
        if is_sequential(child):
            yield from units(child, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", child


class SequentialPartition:
    """The partition of an ``nn.Sequential``, which may contain others: between any two of its modules."""

    opened: frozenset[str] = frozenset()

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.units = list(units(model))

    def stages(self, plan: Sequence[Sequence[str]]) -> list[nn.Module]:
        outside = names_outside(self._model, [name for stage in plan for name in stage])
        return [keep_only(self._model, [*stage, *(outside if stage is plan[0] else ())]) for stage in plan]


def partition_model(
    model: nn.Module, partition: Partition, num_stages: int, split: Sequence[str] | None
) -> list[nn.Module]:
    """The module of each stage of ``model``; ConfigError if the stages would not compute the same as the model."""
    plan = plan_stages(partition.units, num_stages, split)
    _check_split_modules(model, plan, partition.opened)
    stages = partition.stages(plan)
    _check_statistics(model, stages)
    return stages


HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def _check_split_modules(model: nn.Module, plan: Sequence[Sequence[str]], opened: Collection[str]) -> None:
    """Raise a ConfigError for hooks on split modules, and for forwards that were set on them.

    They would run on parts, once per stage, or not at all.
    """
    for name, module in model.named_modules(remove_duplicate=False):
        prefix = f"{name}." if name else ""
        num_stages = sum(any(unit.startswith(prefix) for unit in units) for units in plan)
        if num_stages < 2 and name not in opened:
            continue
        check_forward_of_class(name, module)
        if hooks := [hook for kind in HOOKS for hook in getattr(module, kind).values()]:
            what = ", ".join(getattr(hook, "__qualname__", repr(hook)) for hook in hooks)
            raise ConfigError(
                f"parallel.pipeline.size: {name or 'the model'} has hooks ({what}), but is split into stages, which "
                "run separately; put the hooks on modules that are on one stage, or make them modules"
            )


def _check_statistics(model: nn.Module, stages: Sequence[nn.Module]) -> None:
    """Raise a ConfigError for a module with running statistics on several stages: each would update its own copy."""
    held = [{id(module) for module in stage.modules()} for stage in stages]
    for name, module in model.named_modules():
        if getattr(module, "running_mean", None) is not None and sum(id(module) in there for there in held) > 1:
            raise ConfigError(
                f"parallel.pipeline.split: {name!r} ({type(module).__name__}) is called on several stages, each of "
                "which would have separate running statistics; split so that one stage makes all its calls, or use "
                "one module per call"
            )


def buffers_of_several(stages: Sequence[nn.Module]) -> frozenset[str]:
    """The names of the buffers that several of ``stages`` have; one may have several names."""
    held = [
        {
            f"{path}.{name}".removeprefix("."): id(buffer)
            for path, module in stage.named_modules(remove_duplicate=False)
            for name, buffer in module._buffers.items()
            if buffer is not None
        }
        for stage in stages
    ]
    counts = Counter(key for names in held for key in set(names.values()))
    return frozenset(name for names in held for name, key in names.items() if counts[key] > 1)


def plan_stages(
    units: Sequence[tuple[str, nn.Module]], num_stages: int, split: Sequence[str] | None = None
) -> list[list[str]]:
    """The names of the units of each stage. ``split`` names the first unit of the second and each later stage.

    None: minimise the largest stage, by the number of multiplied parameters (embedding lookups cost nothing).
    """
    names = [name for name, _ in units]
    if len(names) < num_stages:
        raise ConfigError(
            f"parallel.pipeline.size: got {num_stages} stages, but the model has {len(names)} modules in sequence; "
            f"expected at most {len(names)} (size x stages_per_rank)"
        )
    later = _balanced([multiplied_parameters(unit) for _, unit in units], num_stages)
    starts = [0, *(later if split is None else _positions(names, split))]
    return [names[start:end] for start, end in zip(starts, [*starts[1:], len(names)], strict=True)]


def _positions(names: Sequence[str], split: Sequence[str]) -> list[int]:
    check_names(split, names)
    positions: list[int] = []
    for name in split:
        # "blocks" means the first of its modules.
        position = next(i for i, known in enumerate(names) if known == name or known.startswith(f"{name}."))
        if position <= (positions[-1] if positions else 0):
            raise ConfigError(
                f"parallel.pipeline.split: got {list(split)}, where {name!r} leaves the stage before it empty; "
                "name modules in the model's order, without its first one"
            )
        positions.append(position)
    return positions


def check_names(split: Sequence[str], names: Sequence[str]) -> None:
    """Check that each entry of ``split`` is one of ``names``, or the parent of one."""
    for name in split:
        if not any(known == name or known.startswith(f"{name}.") for known in names):
            raise ConfigError(
                f"parallel.pipeline.split: got {name!r}, expected one of {', '.join(names)}{nearest(name, names)}"
            )


def _balanced(weights: Sequence[int], num_stages: int) -> list[int]:
    """The first units of the later stages that minimise the weight of the heaviest stage (linear partition)."""
    total = [0, *accumulate(1 + weight for weight in weights)]
    # best[n]: the minimal weight of the heaviest stage for the first n modules, and the starts of its stages.
    best = [(float(cost), [0]) for cost in total]

    def with_last(start: int, end: int) -> tuple[float, list[int]]:
        return max(best[start][0], total[end] - total[start]), [*best[start][1], start]

    for stage in range(1, num_stages):
        best = [
            min((with_last(start, end) for start in range(stage, end)), default=(float("inf"), []))
            for end in range(len(total))
        ]
    return best[-1][1][1:]


def multiplied_parameters(module: nn.Module) -> int:
    """The number of parameters of ``module`` that are multiplied with activations: all but those of embeddings."""
    looked_up = {id(child.weight) for child in module.modules() if isinstance(child, nn.Embedding)}
    return sum(parameter.numel() for parameter in module.parameters() if id(parameter) not in looked_up)
