"""Compilation of a model's repeated blocks with ``torch.compile``: equal blocks share one compilation.

Modules, names and state stay as they are; only calls of the blocks change::

    block(x) ─► parameters sharded over the tensor axis: their local shards ─► the compiled function of blocks like it

torch compiles at the first call, and again where an input's shape, the training mode or the like has changed. Within
the compiled function there are plain tensors only. A block with a layer that computes on DTensors, as a style of
torch's own or float8 does over several tensor ranks, runs eagerly.

A unit of FSDP2 gathers its parameters before the compiled function and frees them after, in its hooks.

Activation checkpointing is inside the compiled function, as torch advises: the compiler then computes again what the
choice says (:mod:`paramp.parallel.activation_checkpointing`).
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from ..base.collectives import gather_different
from ..base.compilers import why_not_inductor
from ..base.dtensor import LOCAL_SHARDS, is_dtensor
from ..base.errors import ConfigError, first_line
from ..base.module_surgery import PassThrough
from ..base.torch_internals import take
from ..base.wrapped_models import is_unit
from ..distributed.context import ParallelContext

_has_any_global_hook = take("torch.nn.modules.module._has_any_global_hook")

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
DEFAULT = "inductor"
"""torch's default backend."""
EAGER = "_eager_forward"
"""The attribute with the forward of a unit of FSDP2, which is compiled without its hooks: they gather and reshard."""
OWN_HOOKS = "paramp.", "torch.distributed.fsdp."
"""The packages whose hooks are no user's."""
TORCH = str(Path(torch.__file__).parent)
"""Lines in it tell a user nothing."""
INSTALL = 'install it, or choose a backend that needs none: compile={"backend": "aot_eager"}'


class CompiledBlocks:
    """Those of the repeated ``blocks`` of the whole ``model`` that are compiled: all or none.

    Args:
        options: of ``torch.compile``; None: no block is compiled.
    """

    def __init__(
        self, model: nn.Module, blocks: Sequence[str], options: Mapping[str, Any] | None, context: ParallelContext
    ) -> None:
        self._options = options
        self._context = context
        self.names = [] if options is None else blocks
        if options is not None and not self.names and context.is_main:
            warnings.warn(
                f"compile: {type(model).__name__} has no repeated blocks, so it runs eagerly; expected modules of one "
                "class, with children, in a ModuleList or Sequential",
                stacklevel=4,
            )

    def apply(self, parts: Iterable[nn.Module]) -> None:
        """Compile those that are in ``parts``, this rank's stages, whose parameters are sharded already."""
        if self._options is None:
            return
        alike: defaultdict[object, list[tuple[str, nn.Module]]] = defaultdict(list)
        reports = _Reports(self._context)
        for part in parts:
            modules = dict(part.named_modules())
            for name in self.names:
                block = modules.get(name)
                if block is None or isinstance(block, PassThrough):
                    continue
                if where := _on_dtensors(block, self._context):
                    why = "computes on DTensors"
                elif where := self._unrepeatable_dropout(block):
                    why = "draws differently on tensor ranks: its graph breaks, and 'selective' needs it whole"
                if where:
                    reports.warn(where, f"{name!r} runs eagerly, because {where} {why}")
                    continue
                if where := _with_hooks(block):
                    reports.warn(where, f"{name!r} runs eagerly while {where} has hooks")
                alike[_signature(block)].append((name, block))
        for group in alike.values():
            run = _compiled(type(group[0][1]).__name__, self._options, is_unit(group[0][1]))
            for name, block in group:
                if is_unit(block):
                    vars(block)[EAGER] = vars(block).get("forward") or MethodType(type(block).forward, block)
                    block.forward = _Call(name, block, run, reports)
                else:
                    block._compiled_call_impl = _Call(name, block, run, reports)

    def _unrepeatable_dropout(self, block: nn.Module) -> str | None:
        """The name and class of a dropout in ``block`` that compiled selective checkpointing could not repeat."""
        selective = self._context.config.activation_checkpointing == "selective"
        if selective and self._context.tensor_axis.size > 1:
            for name, module in block.named_modules():
                if isinstance(module, nn.Dropout) and module.p:
                    return _named(name, module)
        return None


def _signature(block: nn.Module) -> object:
    """What is equal in blocks that share a compilation."""
    if any(map(_hooks, _compiled_modules(block))):
        return block  # torch compiles the numbers of hooks, which differ
    tensors = [*block.named_parameters(), *block.named_buffers()]
    return type(block), tuple((name, value.shape, value.dtype) for name, value in tensors)


def _compiled_modules(block: nn.Module) -> Iterator[nn.Module]:
    """The modules in ``block`` whose hooks are inside the compiled function."""
    return (module for module in block.modules() if module is not block or not is_unit(block))


def _outside_units(block: nn.Module) -> Iterator[nn.Module]:
    """``block`` and the modules in it, without the units of FSDP2 in it, such as experts, which gather their own."""
    yield block
    for child in block.children():
        if not is_unit(child):
            yield from _outside_units(child)


def _compiled(name: str, options: Mapping[str, Any], of_unit: bool) -> Callable[..., Any]:
    """A compiled function that calls the block that is its first argument; ``of_unit``: without its own hooks."""

    def call(block: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        return block._call_impl(*args, **kwargs)

    def forward(block: Any, /, *args: Any, **kwargs: Any) -> Any:
        return block._eager_forward(*args, **kwargs)

    run = forward if of_unit else call
    # torch keeps what it has compiled, up to a limit, with a function's code: so each has its own.
    function = FunctionType(run.__code__.replace(co_name=name), globals(), name)
    copied: Any = {key: dict(value) if isinstance(value, Mapping) else value for key, value in options.items()}
    return torch.compile(function, **copied)


def _on_dtensors(block: nn.Module, context: ParallelContext) -> str | None:
    """The name and class of a module in ``block`` that computes on DTensors; None if there is none."""
    axes = set(context.axes_of("tensor"))  # over others parameters are gathered
    for name, module in block.named_modules():
        local = vars(module).get(LOCAL_SHARDS, {})
        for own, value in module._parameters.items():
            if is_dtensor(value) and own not in local and axes.intersection(value.device_mesh.mesh_dim_names or ()):
                return _named(name, module)
    return None


def _with_hooks(block: nn.Module) -> str | None:
    """The name and class of a module in ``block`` that has hooks of the user's; None if there is none."""
    for name, module in block.named_modules():
        if module is block and is_unit(block):
            continue
        if len(_hooks(module)) > _num_own_hooks(module):
            return _named(name, module)
    return None


def _named(name: str, module: nn.Module) -> str:
    """The module ``name`` in a block, as messages about the block name it; empty: the block itself."""
    return f"{name!r}, a {type(module).__name__}, in it" if name else f"it, a {type(module).__name__},"


def _hooks(module: nn.Module) -> list[Any]:
    return [hook for hooks in HOOKS for hook in getattr(module, hooks).values()]


def _num_own_hooks(module: nn.Module) -> int:
    """How many hooks of ``module`` are paramp's, which are compiled, or those of a unit in a unit, such as experts."""
    return sum(str(getattr(hook, "__module__", "")).startswith(OWN_HOOKS) for hook in _hooks(module))


class _Call:
    """What calling a compiled block calls."""

    def __init__(self, name: str, block: nn.Module, run: Callable[..., Any], reports: _Reports) -> None:
        self._name, self._block, self._run, self._reports = name, block, run, reports
        modules = list(_compiled_modules(block))
        self._hooks = [getattr(module, hooks) for module in modules for hooks in HOOKS]
        self._num_hooks = sum(map(_num_own_hooks, modules))
        self._eager = vars(block)[EAGER] if is_unit(block) else block._call_impl
        self._shards = [
            (module, parameter, is_partial)
            for module in _outside_units(block)
            for parameter, is_partial in vars(module).get(LOCAL_SHARDS, {}).items()
        ]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # torch does not notice hooks that come later, and compiles again for what they have collected.
        if sum(map(len, self._hooks)) != self._num_hooks or _has_any_global_hook():
            return self._eager(*args, **kwargs)
        if not self._shards:
            return self._reports.run(self._name, self._run, self._block, *args, **kwargs)
        from .tensor.differentiable_collectives import local_shard  # imports DTensor, which other layouts do not need

        wholes = [module._parameters[name] for module, name, _ in self._shards]
        try:
            for (module, name, is_partial), whole in zip(self._shards, wholes, strict=True):
                module._parameters[name] = local_shard(whole, is_partial=is_partial)  # type: ignore[arg-type,assignment]
            return self._reports.run(self._name, self._run, self._block, *args, **kwargs)
        finally:
            for (module, name, _), whole in zip(self._shards, wholes, strict=True):
                module._parameters[name] = whole


class _Reports:
    """Warnings of what is not compiled, each once."""

    def __init__(self, context: ParallelContext) -> None:
        self._breaks: list[Any] = take("torch._dynamo.utils.graph_break_reasons")
        self._reported: set[object] = set()
        # Other data and tensor ranks run the same blocks.
        self._reports = context.batch_axis.rank == 0 and context.tensor_axis.rank == 0

    def warn(self, key: object, message: str) -> None:
        """Warn, unless it was done for ``key`` before."""
        if self._reports and key not in self._reported:
            warnings.warn(f"compile: {message}", stacklevel=2)
        self._reported.add(key)

    def run(self, name: str, run: Callable[..., Any], block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Call ``run`` of ``block``, and warn of the breaks in its graph that torch found meanwhile."""
        before = len(self._breaks)
        result = run(block, *args, **kwargs)
        for graph_break in self._breaks[before:]:
            frames = [
                frame for frame in graph_break.user_stack if not frame.filename.startswith(TORCH)
            ] or graph_break.user_stack
            where = frames[-1] if frames else None
            place = "" if where is None else f" at {where.filename}:{where.lineno}, in {where.name}"
            reason = first_line(graph_break.reason)
            what = f"the graph of {name!r}, a {type(block).__name__}, breaks{place}: {reason}"
            self.warn((place, reason), what)
        return result


def check_compiler(options: Mapping[str, Any] | None, context: ParallelContext) -> None:
    """Raise a ConfigError on every rank if the backend of ``options`` lacks its compiler on one. A collective."""
    backend = None if options is None else options.get("backend", DEFAULT)
    is_default = getattr(backend, "compiler_name", backend) == DEFAULT
    reason = why_not_inductor(context.device.type, {}) if is_default else None
    # Every rank takes part: a model may come compiled on some ranks only.
    for rank, missing in enumerate(gather_different(reason, context.device)):
        if missing is not None:
            raise ConfigError(f"compile: on rank {rank} {missing}; {INSTALL}")
