"""The compute context of forward, criterion and backward, for the engine and other front ends; the checked criterion.

A :class:`ComputeContext` has up to three parts. fp16 products are emulated on CPUs without fp16 arithmetic
(:mod:`paramp.precision.fp16_emulation_cpu`). Autocast and the default dtype follow the mode, with norms and softmax in
fp32 on the CPU as on CUDA (:mod:`paramp.precision.autocast`). In the criterion, cross-entropy takes logits whose
vocabulary is sharded (:mod:`paramp.parallel.tensor.sharded_loss`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal
from weakref import ReferenceType, ref

import torch
from torch import nn

from ..base.dtensor import full_tensor, is_dtensor
from ..base.trees import map_tensors
from ..distributed.context import ParallelContext, current_context
from ..distributed.numerics_protocol import Numerics
from ..parallel.batch_outputs import loss_in
from ..parallel.batches import Batch
from ..precision.autocast import autocast_kernels, computing, moved, widening
from ..precision.capabilities import has_native_fp16
from ..precision.fp16_emulation_cpu import emulate_fp16, fp16_kernels
from ..precision.modes import Precision
from .loss_counts import as_count

if TYPE_CHECKING:
    from ..parallel.context_axis.sequence_axis import SequenceAxis

DEFAULT = Numerics()

Loss = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
"""The mean over a microbatch, or ``(sum, count)``."""
Criterion = Callable[..., Loss]
OwnLoss = Callable[[Any, Batch], Loss | None]
"""The loss in a model's output for a microbatch; None if it has none."""


@dataclass(frozen=True)
class ComputeContext:
    """The compute context of one model on one device."""

    precision: Precision
    device: torch.device
    emulation: bool | Literal["auto"] | None = "auto"
    """``emulate_fp16`` of the configuration. ``"auto"`` or None: if the device has no fp16 arithmetic."""
    sharded: bool = False
    """Whether parameters are DTensors, so that the vocabulary of the logits may be sharded."""

    numerics: Numerics = DEFAULT
    sequences: SequenceAxis | None = None
    """The context axis, over which attention goes and outputs are joined; None: sequences are whole."""

    @staticmethod
    def of(model: nn.Module, precision: Precision) -> ComputeContext:
        """The context of ``model``, on the device of its first parameter, with the current ``emulate_fp16``."""
        context = current_context()
        first = next(model.parameters(), None)
        device = first.device if first is not None else context.device if context else torch.device("cpu")
        emulation = context.config.emulate_fp16 if context else "auto"
        return ComputeContext(precision, device, emulation, sharded=any(map(is_dtensor, model.parameters())))

    @staticmethod
    def in_layout(context: ParallelContext, numerics: Numerics = DEFAULT) -> ComputeContext:
        """The context of an engine in ``context``."""
        config, sharded, axis = context.config, context.tensor_axis.size > 1, sequence_axis(context, numerics)
        return ComputeContext(config.precision, context.device, config.emulate_fp16, sharded, numerics, axis)

    @functools.cached_property
    def emulate(self) -> bool:
        """Whether fp16 products are computed in fp32 and rounded."""
        if self.precision.compute is not torch.float16:
            return False
        return not has_native_fp16(self.device) if self.emulation in ("auto", None) else bool(self.emulation)

    @functools.cached_property
    def kernels(self) -> list[torch.library.Library]:
        """What replaces kernels of torch in :meth:`enter`: kept from the first one on, as long as this object is."""
        cast = autocast_kernels(self.device.type) if self.precision.autocast else []
        return [*cast, fp16_kernels()] if self.emulate else cast

    def __getstate__(self) -> dict[str, Any]:
        """What a copy gets: not the kernels, which cannot be copied."""
        return {name: value for name, value in vars(self).items() if name != "kernels"}

    @contextmanager
    def enter(self, *, autocast: bool = False) -> Iterator[None]:
        """The context for a backward, and around modules that enter autocast themselves, as pipeline stages do.

        With ``autocast``, for a forward: also autocast and the default dtype, if the mode has them.
        """
        # The backward needs the widening too, because checkpointing recomputes forwards in it.
        compute = computing if autocast else widening
        inside = self.numerics if self.sequences is None else self.sequences
        _ = self.kernels
        with emulate_fp16(self.emulate), compute(self.precision, self.device.type), inside.computing():
            yield

    def joined(self, output: Any, batch: Batch) -> Any:
        """The ``output`` for ``batch``, with the tokens of all ranks of the context axis."""
        return output if self.sequences is None else self.sequences.joined(output, batch)

    def sharded_loss(self, *, in_model: bool = False) -> AbstractContextManager[None]:
        """The context for a criterion: cross-entropy over a sharded vocabulary; ``in_model``, for a whole forward."""
        if not self.sharded:
            return nullcontext()
        # This imports DTensor, which other layouts do not need.
        from ..parallel.tensor.sharded_loss import vocab_parallel_loss

        return vocab_parallel_loss(others=not in_model, computes=not self.numerics.computes_cross_entropy)


def sequence_axis(context: ParallelContext, numerics: Numerics) -> SequenceAxis | None:
    """How sequences are cut in ``context``; None: they are whole."""
    axis: SequenceAxis | None = numerics.sequence_axis()
    if axis is None and context.cp.size > 1:
        from ..parallel.context_axis.sequence_axis import SequenceAxis

        axis = SequenceAxis(context.cp, context.device, context.config.parallel.context.method)
    return axis


class CheckedCriterion:
    """The user's criterion, else the model's own loss, with checks of the losses, in the context ``compute``."""

    def __init__(self, criterion: Criterion | None, own_loss: OwnLoss, compute: ComputeContext) -> None:
        self._criterion = criterion
        self._own_loss = own_loss
        self.compute = compute
        self._found: tuple[ReferenceType[torch.Tensor], torch.Tensor] | None = None

    @property
    def is_given(self) -> bool:
        """Whether ``initialize`` got a criterion."""
        return self._criterion is not None

    def of(self, output: Any, microbatch: Batch) -> Loss:
        """The loss of a microbatch, from the model's output and, if there is one, the target; as :meth:`__call__`."""
        if self._criterion is not None:
            output = self.compute.joined(output, microbatch)
            return self(*((output,) if microbatch.target is None else (output, microbatch.target)))
        return _found(self._own_loss(output, microbatch))

    def find_count(self, output: Any, batch: Batch) -> None:
        """Remember the count of the model's own loss in ``output``, for :meth:`counted`; not the loss."""
        loss, self._found = loss_in(output), None
        if self._criterion is None and isinstance(loss, torch.Tensor):
            counted = self._own_loss(output, batch)
            if isinstance(counted, tuple):
                self._found = ref(loss), counted[1]

    def counted(self, loss: Any) -> Any:
        """``loss``; as ``(sum, count)`` if it is the mean in the output that :meth:`find_count` was given last."""
        if self._found is None or not isinstance(loss, torch.Tensor) or self._found[0]() is not loss:
            return loss
        count = self._found[1]
        return loss * count.to(loss.device).clamp(min=1), count

    def __call__(self, *args: Any, **kwargs: Any) -> Loss:
        """The loss of this rank's output and target, as plain 0-dim tensors; not reduced over ranks.

        Tensors in ``args`` and ``kwargs`` are moved to the device.

        Raises:
            ValueError: there is no criterion, or it returned neither one element nor ``(sum, count)``.
        """
        if self._criterion is None:
            return _found(self.counted(loss_in(args[0] if args else None)))
        args, kwargs = map_tensors(lambda tensor: moved(tensor, self.compute.device), (args, kwargs))
        with self.compute.sharded_loss():
            return _checked(self._criterion(*args, **kwargs))


def _found(loss: Any) -> Loss:
    """The model's own ``loss``, as :func:`_checked` returns it; a ValueError if it is None."""
    if loss is None:
        raise ValueError(
            "criterion: initialize got none, and the model's output has no loss; pass one as its third argument, "
            "or return a mapping or dataclass with a loss"
        )
    return _checked(loss)


def _checked(loss: Any) -> Loss:
    """``loss`` as plain 0-dim tensors, or a ValueError unless it is one element, or ``(sum, count)``.

    A count that is no number stays as it is, for :class:`CountUnit` to raise.
    """
    parts, expected = ([*loss], 2) if isinstance(loss, (tuple, list)) else ([loss], 1)
    if len(parts) != expected or not isinstance(parts[0], torch.Tensor) or parts[0].numel() != 1:
        raise ValueError(
            "criterion: expected a tensor of one element, or (sum, count) of two, got "
            + ", ".join(str(tuple(part.shape)) if isinstance(part, torch.Tensor) else repr(part) for part in parts)
        )
    is_plain = type(parts[0]) is torch.Tensor and not parts[0].ndim
    value = parts[0] if is_plain else full_tensor(parts[0]).reshape(())
    return (value, as_count(full_tensor(parts[1]))) if expected == 2 else value
