"""Activation checkpointing: repeated blocks keep their inputs only, and compute the rest again in the backward.

Source: Chen et al., *Training deep nets with sublinear memory cost*, 2016; for ``"selective"``: Korthikanti et al.,
*Reducing activation recomputation in large transformer models*, 2022, section 5. torch computes again with the random
numbers, autocast and inputs of the forward (``torch.utils.checkpoint``), so dropout masks are the same. Buffers, which
torch leaves to what runs again, are those of the forward too, and are changed once.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.utils import checkpoint as torchs

from ..base.errors import ConfigError
from ..base.module_surgery import PassThrough, replace_forward, unbound
from ..base.uncompiled import unwatched

LARGE = 2**16
"""Elements of a buffer from which on it is copied only if the first forward in training changes it: tables and masks
that stay as they are would take memory."""
Key: TypeAlias = tuple[str, str]
"""Of a buffer: the name of its module in a block, and its own."""


def repeated_blocks(model: nn.Module) -> list[str]:
    """The names of the blocks that repeat in ``model``, such as a transformer's layers, in its order.

    They are modules with children whose class occurs more than once among the entries of a list, such as a
    ``ModuleList`` or a ``Sequential``. Blocks inside blocks do not count.
    """
    groups: defaultdict[tuple[str, type[nn.Module]], list[str]] = defaultdict(list)
    for name, module in model.named_modules():
        parent, _, last = name.rpartition(".")
        if last.isdigit() and any(module.children()):
            groups[parent, type(module)].append(name)
    names = {name for group in groups.values() if len(group) > 1 for name in group}
    return [name for name, _ in model.named_modules() if name in names and not _is_inside(name, names)]


def _is_inside(name: str, names: set[str]) -> bool:
    """Whether one of the modules around ``name`` is in ``names``."""
    parts = name.split(".")
    return any(".".join(parts[:index]) in names for index in range(1, len(parts)))


class CheckpointedBlocks:
    """Those of the repeated ``blocks`` of ``model`` that are checkpointed, for the value ``how`` of the configuration.

    Raises:
        ConfigError: there are none.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[str], how: str | int) -> None:
        if how != "none" and not blocks:
            raise ConfigError(
                f"activation_checkpointing: got {how!r}, but {type(model).__name__} has no repeated blocks, expected "
                "modules of one class, with children, in a ModuleList or Sequential; use torch.utils.checkpoint in its "
                "forward, and 'none' here"
            )
        self.names = [] if how == "none" else blocks[:: how if isinstance(how, int) else 1]
        self._options: dict[str, Any] = {"context_fn": _selective_contexts} if how == "selective" else {}

    def apply(self, parts: Iterable[nn.Module]) -> None:
        """Checkpoint those that are in ``parts``, this rank's stages, in training."""
        for part in parts:
            modules = dict(part.named_modules())
            for block in map(modules.get, self.names):
                if block is not None and not isinstance(block, PassThrough):
                    _checkpoint(block, self._options)


def _checkpoint(block: nn.Module, options: dict[str, Any]) -> None:
    replaced: Callable[..., Any] | None = block.__dict__.get("forward")
    own = None if replaced is None else unbound(replaced, block)
    changing: dict[Key, bool] = {}

    def forward(block: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        run = partial(type(block).forward if own is None else own, block)
        if not torch.is_grad_enabled():
            return run(*args, **kwargs)
        return torchs.checkpoint(_Repeatable(block, run, changing), *args, use_reentrant=False, **options, **kwargs)

    replace_forward(block, forward)


class _Repeatable:
    """A forward of ``block``, whose repetitions have copies of the buffers with their values before it."""

    def __init__(self, block: nn.Module, run: Callable[..., Any], changing: dict[Key, bool]) -> None:
        """``changing``: which :data:`LARGE` buffers forwards in training change, as far as that is known."""
        self._block, self._run, self._changing = block, run, changing
        self._before: dict[Key, torch.Tensor] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # torch runs eagerly what assigns buffers; docs/step.md says what it compiles
            return self._run(*args, **kwargs)
        now = self._buffers()
        if self._before is None:
            self._before = _copies({key: one for key, one in now.items() if self._changing.get(key, True)})
            output = self._run(*args, **kwargs)
            self._drop_constant(now)
            return output
        self._put(_copies(self._before))  # there may be another repetition
        try:
            return self._run(*args, **kwargs)
        finally:
            self._put(now)

    def _buffers(self) -> dict[Key, torch.Tensor]:
        return {
            (name, own): one
            for name, module in self._block.named_modules()
            for own, one in module._buffers.items()
            if one is not None
        }

    def _put(self, buffers: Mapping[Key, torch.Tensor]) -> None:
        for (name, own), one in buffers.items():
            self._block.get_submodule(name)._buffers[own] = one

    def _drop_constant(self, given: Mapping[Key, torch.Tensor]) -> None:
        """Drop the copies of large buffers that the forward, which was ``given`` them, has not changed."""
        assert self._before is not None
        for key in [key for key, copied in self._before.items() if copied.numel() > LARGE]:
            if key not in self._changing and self._block.training:
                is_same = self._buffers().get(key) is given[key]
                with unwatched():
                    self._changing[key] = not (is_same and torch.equal(_bits(given[key]), _bits(self._before[key])))
            if not self._changing.get(key, True):
                del self._before[key]


def _bits(buffer: torch.Tensor) -> torch.Tensor:
    """In which NaN is equal to itself, and of which torch compares every dtype."""
    return buffer.contiguous().reshape(-1).view(torch.uint8)


def _copies(buffers: Mapping[Key, torch.Tensor]) -> dict[Key, torch.Tensor]:
    with torch.no_grad(), unwatched():
        copies = {id(one): one.clone() for one in buffers.values()}  # one for several names
    return {key: copies[id(one)] for key, one in buffers.items()}


PRODUCTS = (
    *("mm", "addmm", "bmm", "baddbmm", "convolution", "all_reduce"),
    *("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu"),
    *("_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention", "_flash_attention_forward"),
)
"""The operators whose outputs ``"selective"`` keeps: they take most of the time, for little of the memory."""


def _selective_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """The contexts of a block's forward and of its repetition."""
    forward, again = torchs.create_selective_checkpoint_contexts(_keep_products)
    if "torch.distributed.tensor" not in sys.modules or torch.compiler.is_compiling():
        return forward, again
    from .tensor.differentiable_collectives import keeping_inputs  # imports DTensor, which other layouts do not need

    return _within(keeping_inputs(), forward), _within(keeping_inputs(), again)


@contextmanager
def _within(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with outer, inner:
        yield


def _keep_products(_context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> torchs.CheckpointPolicy:
    name = operator.name().partition("::")[2].partition(".")[0]
    return torchs.CheckpointPolicy.MUST_SAVE if name in PRODUCTS else torchs.CheckpointPolicy.PREFER_RECOMPUTE
