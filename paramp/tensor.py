"""Tensor parallelism by plan: ``{name of modules: style}``, on DTensor.

A plan is data. Names are globs over the model's module names, ``*`` standing for one part between dots; styles are
the keys of :data:`STYLES` or any ``ParallelStyle`` of torch's own. Activations between layers stay plain tensors.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from .precision import ConfigError, nearest
from .randomness import replicated_random, sharded_random
from .shards import wrap
from .surgery import LeftOut, keeping_ties, run_within

__all__ = [
    "STYLES",
    "LocalHeads",
    "PackedColwise",
    "PackedRowwise",
    "PartialGradient",
    "Plan",
    "apply_plan",
    "check_divisible",
    "mask_tail",
    "matches",
    "resolve_plan",
    "sharded_dim",
    "vocab_parallel_loss",
]

Plan = dict[str, str | ParallelStyle]
Forward = Callable[[torch.Tensor], Any]


class ShardedRandom(ParallelStyle):
    """The module's random numbers differ over the tensor axis: for dropout on sharded activations."""

    random = staticmethod(sharded_random)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        contexts: list[Any] = []

        def enter(_module: nn.Module, _inputs: Any) -> None:
            contexts.append(self.random())
            contexts[-1].__enter__()

        def leave(_module: nn.Module, _inputs: Any, _output: Any) -> None:
            contexts.pop().__exit__(None, None, None)

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave, always_call=True)
        return module


class ReplicatedRandom(ShardedRandom):
    """The module's random numbers are equal over the tensor axis, inside one whose numbers are not."""

    random = staticmethod(replicated_random)


class LocalHeads(ShardedRandom):
    """An attention module that computes a rank's own heads, and drops out their weights by itself.

    Args:
        sizes: its attributes that count features of all heads; they are divided by the size of the axis.
    """

    def __init__(self, *sizes: str) -> None:
        super().__init__()
        self.sizes = sizes

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name in self.sizes:
            setattr(module, name, getattr(module, name) // device_mesh.size())
        return super()._apply(module, device_mesh)


class PartialGradient(ParallelStyle):
    """A module that every rank has whole and applies to its own part of an activation, such as a norm of each head.

    Its gradients are the sums of what the ranks find.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in list(module.named_parameters(recurse=False)):
            _distribute(module, name, parameter, device_mesh, Replicate())
        run_within(module, _partial_gradients)
        return module


def _partial_gradients(module: nn.Module) -> AbstractContextManager[None]:
    return _holding(module, {name: _with_partial_gradient(value) for name, value in module._parameters.items()})


@contextmanager
def _holding(module: nn.Module, values: Mapping[str, torch.Tensor | None]) -> Iterator[None]:
    """Inside, the parameters of ``module`` are these tensors."""
    own = module._parameters
    module._parameters = {**own, **values}  # type: ignore[dict-item]
    try:
        yield
    finally:
        module._parameters = own


def _with_partial_gradient(value: torch.Tensor | None) -> torch.Tensor | None:
    return value.to_local(grad_placements=[Partial()]) if isinstance(value, DTensor) else value


class PackedColwise(ParallelStyle):
    """``ColwiseParallel`` for a layer whose outputs are several of one size side by side, such as query, key and value.

    Each rank has its share of every one. The weight of a Linear, (outputs, inputs), is a DTensor (parts, outputs /
    parts, inputs) that is sharded over its dim 1; that of a Hugging Face ``Conv1D`` is stored the other way around.

    Args:
        parts: how many.
    """

    what = "outputs"

    def __init__(self, parts: int = 1) -> None:
        super().__init__()
        self.parts = parts

    def dim(self, module: nn.Module) -> int:
        """The dim of the weight of ``module`` that is shared out."""
        return 1 if _is_conv1d(module) else 0

    def check(self, name: str, module: nn.Module, size: int) -> None:
        """Complain about a ``module`` that does not share out over ``size`` ranks.

        Raises:
            ConfigError: naming it.
        """
        if not (isinstance(module, nn.Linear) or _is_conv1d(module)):
            raise ConfigError(f"plan: {name!r} is a {type(module).__name__}, expected a Linear or a Conv1D")
        features = module.get_parameter("weight").shape[self.dim(module)]
        if features % (self.parts * size):
            raise ConfigError(
                f"plan: {name!r} has {features} {self.what}, expected a multiple of {self.parts} parts x "
                f"parallel.tensor.size {size}"
            )

    def _share(self, module: nn.Module, name: str, dim: int, mesh: DeviceMesh) -> None:
        parameter = module._parameters[name]
        if parameter is None:
            return
        if self.parts > 1:
            unpacked = parameter.detach().unflatten(dim, (self.parts, -1))
            parameter = nn.Parameter(unpacked, parameter.requires_grad)
            dim += 1
        _distribute(module, name, parameter, mesh, Shard(dim))

    def _own(self, module: nn.Module, name: str, dim: int) -> torch.Tensor:
        """A rank's part of a parameter, packed."""
        value = module.get_parameter(name)
        assert isinstance(value, DTensor)
        part: torch.Tensor = value.to_local()
        return part.flatten(dim, dim + 1) if self.parts > 1 else part

    def _weight(self, module: nn.Module) -> torch.Tensor:
        weight = self._own(module, "weight", self.dim(module))
        return weight.t() if _is_conv1d(module) else weight

    def _as_whole(
        self, module: nn.Module, own: Forward, x: DTensor, placement: Shard, bias: torch.Tensor | None = None
    ) -> DTensor:
        """What ``own`` computes, a forward that ``module`` was given (float8), of its packed parameters as DTensors.

        What such a forward asks of a whole tensor, the largest element for instance, is then that of all ranks.
        """
        shards = {
            name: None if value is None else DTensor.from_local(value, x.device_mesh, [placement], run_check=False)
            for name, value in (("weight", self._weight(module)), ("bias", bias))
        }
        with _holding(module, shards):
            return own(x)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self._share(module, "weight", self.dim(module), device_mesh)
        self._share(module, "bias", 0, device_mesh)

        own = module.__dict__.get("forward")

        def forward(x: torch.Tensor) -> torch.Tensor:
            whole = DTensor.from_local(x, device_mesh, [Replicate()], run_check=False)
            bias = None if module._parameters["bias"] is None else self._own(module, "bias", 0)
            if own is not None:
                return self._as_whole(module, own, whole, Shard(0), bias).to_local()
            return F.linear(whole.to_local(grad_placements=[Partial()]), self._weight(module), bias)

        module.__dict__["forward"] = forward
        return module


class PackedRowwise(PackedColwise):
    """``RowwiseParallel`` for a layer whose inputs are several of one size side by side; see :class:`PackedColwise`."""

    what = "inputs"

    def dim(self, module: nn.Module) -> int:
        return 0 if _is_conv1d(module) else 1

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self._share(module, "weight", self.dim(module), device_mesh)
        own = module.__dict__.get("forward")

        def forward(x: torch.Tensor) -> torch.Tensor:
            if own is not None:
                parts = DTensor.from_local(x, device_mesh, [Shard(-1)], run_check=False)
                part = self._as_whole(module, own, parts, Shard(1))
            else:
                part = DTensor.from_local(F.linear(x, self._weight(module)), device_mesh, [Partial()], run_check=False)
            output: torch.Tensor = part.redistribute(placements=[Replicate()]).to_local()
            bias = module._parameters["bias"]
            return output if bias is None else output + bias.to(output.dtype)

        module.__dict__["forward"] = forward
        return module


def _is_conv1d(module: nn.Module) -> bool:
    """Whether ``module`` is the layer of that name in transformers: a Linear whose weight is (inputs, outputs)."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def _distribute(module: nn.Module, name: str, parameter: nn.Parameter, mesh: DeviceMesh, placement: Any) -> None:
    shared = distribute_tensor(parameter.detach(), mesh, [placement])
    module.register_parameter(name, nn.Parameter(shared, parameter.requires_grad))


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


def matches(name: str, pattern: str) -> bool:
    """Whether ``name`` is one that ``pattern`` means.

    ``*`` stands for one part between dots or for some of it, ``**`` for any number of parts.
    """
    return _match(name.split("."), pattern.split("."))


def _match(parts: Sequence[str], patterns: Sequence[str]) -> bool:
    if not patterns:
        return not parts
    if patterns[0] == "**":
        return any(_match(parts[skipped:], patterns[1:]) for skipped in range(len(parts) + 1))
    return bool(parts) and fnmatch.fnmatchcase(parts[0], patterns[0]) and _match(parts[1:], patterns[1:])


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
            if name in styles and id(submodule) not in done and not isinstance(submodule, LeftOut):
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
