"""Activation checkpointing: repeated blocks keep their inputs only, and compute the rest again in the backward.

Source: Chen et al., *Training deep nets with sublinear memory cost*, 2016; for ``"selective"``: Korthikanti et al.,
*Reducing activation recomputation in large transformer models*, 2022, section 5. torch computes again with the random
numbers, autocast and inputs of the forward (``torch.utils.checkpoint``), so dropout masks are the same.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import checkpoint as torchs

from ..base.errors import ConfigError
from ..base.module_surgery import PassThrough, replace_forward, unbound


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

    def forward(block: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        run = partial(type(block).forward if own is None else own, block)
        if not torch.is_grad_enabled():
            return run(*args, **kwargs)
        return torchs.checkpoint(run, *args, use_reentrant=False, **options, **kwargs)

    replace_forward(block, forward)


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
