"""What would let results depend on the layout: modules, tied parameters, buffers that a forward changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import nn

from ..base.dtensor import version
from ..base.errors import ConfigError
from ..base.module_surgery import BATCH_NORMS, names_by_parameter, num_hooks, run_within
from ..parallel.expert_balance import StepCounts


def check_modules(model: nn.Module) -> None:
    """Raise a ConfigError for a module whose results depend on what else is in the batch, or on its order."""
    for name, module in model.named_modules():
        problem = None
        if isinstance(module, BATCH_NORMS) or getattr(module, "track_running_stats", False):
            problem = "averages over the samples of a batch, which differ between layouts; use GroupNorm or LayerNorm"
        elif isinstance(module, nn.MultiheadAttention):
            problem = "computes all heads in one product; use F.scaled_dot_product_attention in a module of your own"
        elif isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and (
            module.max_norm is not None or module.sparse or module.scale_grad_by_freq
        ):
            problem = (
                "changes its weights in the forward, has sparse gradients, or scales them by what is in the batch; "
                "set max_norm=None, sparse=False, scale_grad_by_freq=False"
            )
        if problem is not None:
            raise ConfigError(f"reproducible: {name!r} is a {type(module).__name__}, which {problem}")


def check_ties(model: nn.Module) -> None:
    """Raise a ConfigError for a trained tied parameter whose gradients are not the sum of two or not seen whole."""
    for parameter, names in names_by_parameter(model).items():
        if not parameter.requires_grad:  # what is frozen now is never trained
            continue
        if len(names) > 2:
            raise ConfigError(
                f"reproducible: {' and '.join(names)} are one parameter, expected at most two names: the order in "
                "which the gradients of three are added depends on the stages that have them"
            )
        if len(names) > 1 and num_hooks(parameter):
            raise ConfigError(
                f"reproducible: {' and '.join(names)} are one parameter with hooks, which would run on the gradient of "
                "its first use only; remove them"
            )


def check_stages(stages: Sequence[nn.Module]) -> None:
    """Raise a ConfigError for a trained parameter that several pipeline stages have under one name.

    Its gradient is the sum of those of the stages, where one process first adds up the uses in each microchunk.
    """
    parameters = (pair for stage in stages for pair in stage.named_parameters(remove_duplicate=False))
    for name, count in Counter(name for name, parameter in parameters if parameter.requires_grad).items():
        if count > 1:
            raise ConfigError(
                f"reproducible: {count} pipeline stages use {name!r}, expected one for each name, because the order in "
                "which the gradients of its uses are added depends on the stages; use a second module and tie its "
                "parameters, or split where one stage has all uses (parallel.pipeline.split)"
            )


def check_buffers(stages: Mapping[int, nn.Module]) -> None:
    """Let each training forward of ``stages`` raise a ConfigError if it changes a buffer, or puts another in its place.

    Each data rank would change its buffers by its own samples, but for counts of tokens, which are those of all.
    What the first forward changes may be a cache that it fills, so that it is not looked at.
    """
    for stage in stages.values():
        run_within(stage, _ForwardCheck(stage))


class _ForwardCheck:
    """Makes the context of each forward of ``stage``."""

    def __init__(self, stage: nn.Module) -> None:
        modules = [(prefix, one) for prefix, one in stage.named_modules() if not isinstance(one, StepCounts)]
        self._buffers = [(prefix, child, name) for prefix, child in modules for name in child._buffers]
        self._has_run = False

    def __call__(self, stage: nn.Module) -> AbstractContextManager[None] | None:
        is_first, self._has_run = not self._has_run, True
        return None if is_first or not stage.training or not self._buffers else self._checked()

    @contextmanager
    def _checked(self) -> Iterator[None]:
        before = self._state()
        yield
        after = self._state()
        for (prefix, child, name), old, new in zip(self._buffers, before, after, strict=True):
            if old != new:
                raise ConfigError(
                    f"reproducible: the forward of {prefix!r}, a {type(child).__name__}, changes its buffer {name!r}, "
                    "which each data rank would change by its own samples; expected a forward that leaves buffers as "
                    "they are: keep the value outside of the model, change it between the steps, or fill a cache for "
                    "the longest sequence at once"
                )

    def _state(self) -> list[tuple[int, int] | None]:
        buffers: list[torch.Tensor | None] = [child._buffers[name] for _, child, name in self._buffers]
        return [None if buffer is None else (id(buffer), version(buffer)) for buffer in buffers]
