"""Compilation of a model's repeated blocks with ``torch.compile``: equal blocks share one compilation.

Modules, names and state stay as they are; only calls of the blocks change::

    block(x) ─► parameters sharded over the tensor axis: their local shards ─► the compiled function of blocks like it

torch compiles at the first call, and again where an input's shape, the training mode or the like has changed. Within
the compiled function there are plain tensors only, because DTensors cost a multiple of what they hold. A layer that
computes on DTensors, as a style of torch's own or float8 does over several tensor ranks, runs eagerly between two
compiled parts of its block.

Activation checkpointing is inside the compiled function, as torch advises: the compiler then computes again what the
choice says (:mod:`paramp.parallel.activation_checkpointing`).
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook

from ..base.dtensor import is_dtensor
from ..base.errors import ConfigError
from ..base.module_surgery import PassThrough
from ..distributed.collectives import gather_objects
from ..distributed.context import ParallelContext
from .activation_checkpointing import repeated_blocks

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
LOCAL_SHARDS = "_paramp_local_shards"
"""The attribute of a module that computes on local shards: ``{parameter: whether its gradient is partial}``."""
INSTALL = 'or choose a backend that needs none: compile={"backend": "aot_eager"}'


class CompiledBlocks:
    """The blocks of the whole ``model`` that are compiled.

    Args:
        options: of ``torch.compile``; None: no block is compiled.
    """

    def __init__(self, model: nn.Module, options: Mapping[str, Any] | None, context: ParallelContext) -> None:
        self._options = options
        self._context = context
        self.names = [] if options is None else repeated_blocks(model)
        if options is not None and not self.names and context.is_main:
            warnings.warn(
                f"compile: {type(model).__name__} has no repeated blocks, so it runs eagerly; expected modules of one "
                "class, with children, in a ModuleList or Sequential",
                stacklevel=3,
            )

    def apply(self, parts: Iterable[nn.Module]) -> None:
        """Compile those that are in ``parts``, this rank's stages, whose parameters are sharded already."""
        if self._options is None:
            return
        alike: defaultdict[object, list[tuple[str, nn.Module]]] = defaultdict(list)
        for part in parts:
            modules = dict(part.named_modules())
            for name in self.names:
                block = modules.get(name)
                if block is not None and not isinstance(block, PassThrough):
                    alike[_signature(block)].append((name, block))
        breaks = _Breaks(self._context)
        for group in alike.values():
            run = _compiled(type(group[0][1]).__name__, self._options)
            for name, block in group:
                _run_dtensors_eagerly(block)
                block._compiled_call_impl = _Call(name, block, run, breaks)


def _signature(block: nn.Module) -> object:
    """What is equal in blocks that share a compilation."""
    tensors = [*block.named_parameters(), *block.named_buffers()]
    return type(block), tuple((name, value.shape, value.dtype) for name, value in tensors)


def _compiled(name: str, options: Mapping[str, Any]) -> Callable[..., Any]:
    """A compiled function that calls the block that is its first argument."""

    def run(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return block._call_impl(*args, **kwargs)

    # torch keeps what it has compiled, up to a limit, with a function's code: so each has its own.
    own = FunctionType(run.__code__.replace(co_name=name), globals(), name)
    copied = {key: dict(value) if isinstance(value, Mapping) else value for key, value in options.items()}
    return torch.compile(own, **copied)


def _run_dtensors_eagerly(block: nn.Module) -> None:
    """Keep the modules in ``block`` that compute on DTensors out of the compiled function."""
    for module in block.modules():
        local = vars(module).get(LOCAL_SHARDS, {})
        if any(is_dtensor(value) and name not in local for name, value in module._parameters.items()):
            module._compiled_call_impl = torch.compiler.disable(
                module._call_impl, reason=f"{type(module).__name__} computes on DTensors"
            )


class _Call:
    """What calling a compiled block calls."""

    def __init__(self, name: str, block: nn.Module, run: Callable[..., Any], breaks: _Breaks) -> None:
        self._name, self._block, self._run, self._breaks = name, block, run, breaks
        modules = list(block.modules())
        self._hooks = [getattr(module, hooks) for module in modules for hooks in HOOKS]
        self._num_hooks = sum(map(len, self._hooks))
        self._shards = [
            (module, parameter, is_partial)
            for module in modules
            for parameter, is_partial in vars(module).get(LOCAL_SHARDS, {}).items()
        ]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # torch does not notice hooks that come later.
        if sum(map(len, self._hooks)) != self._num_hooks or _has_any_global_hook():
            return self._block._call_impl(*args, **kwargs)
        if not self._shards:
            return self._breaks.watch(self._name, self._run, self._block, *args, **kwargs)
        from .tensor.exchange import local_shard  # imports DTensor, which other layouts do not need

        wholes = [(module, name, module._parameters[name]) for module, name, _ in self._shards]
        try:
            for (module, name, whole), (_, _, is_partial) in zip(wholes, self._shards, strict=True):
                module._parameters[name] = local_shard(whole, is_partial=is_partial)  # type: ignore[arg-type,assignment]
            return self._breaks.watch(self._name, self._run, self._block, *args, **kwargs)
        finally:
            for module, name, whole in wholes:
                module._parameters[name] = whole


class _Breaks:
    """Reports each break in a block's graph once."""

    def __init__(self, context: ParallelContext) -> None:
        from torch._dynamo.utils import graph_break_reasons

        self._found: list[Any] = graph_break_reasons
        self._reported: set[object] = set()
        # Other data and tensor ranks run the same blocks.
        self._reports = context.batch_axis.rank == 0 and context.tensor_axis.rank == 0

    def watch(self, name: str, run: Callable[..., Any], block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Call ``run``, and warn of the breaks that torch found meanwhile."""
        before = len(self._found)
        result = run(block, *args, **kwargs)
        if len(self._found) > before:
            self._report(name, block, self._found[before:])
        return result

    def _report(self, name: str, block: nn.Module, found: Iterable[Any]) -> None:
        for one in found:
            where = one.user_stack[-1] if one.user_stack else None
            place = "" if where is None else f" at {where.filename}:{where.lineno}, in {where.name}"
            reason = one.reason.strip().split("\n")[0]
            if self._reports and (place, reason) not in self._reported:
                self._reported.add((place, reason))
                warnings.warn(
                    f"compile: the graph of {name!r}, a {type(block).__name__}, breaks{place}: {reason}", stacklevel=4
                )


def check_compiler(options: Mapping[str, Any] | None, context: ParallelContext) -> None:
    """Raise a ConfigError on every rank if the backend of ``options`` lacks its compiler on one. A collective."""
    if options is None or options.get("backend", "inductor") != "inductor":
        return
    for rank, missing in enumerate(gather_objects(_missing_compiler(context.device))):
        if missing is not None:
            raise ConfigError(f"compile: rank {rank} has {missing}, {INSTALL}")


def _missing_compiler(device: torch.device) -> str | None:
    """What torch's default backend lacks on ``device``, with the fix; None if nothing."""
    if device.type == "cuda":
        from torch.utils._triton import has_triton

        return None if has_triton() else "no Triton that works on its GPU, which torch's default backend needs; install"
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return "no C++ compiler, which torch's default backend needs on CPUs; install one, such as g++"
    return None
