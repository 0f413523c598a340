"""Stages whose inputs are whole sequences, and that compute this rank's tokens of them.

What a stage computes for a token may depend on others through attention alone. So the first batch is tried before it
runs: the stage computes the first tokens whole and cut, without gradients, and an output that differs is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from ...base.dtensor import local
from ...base.errors import ConfigError
from ...base.module_surgery import BATCH_NORMS, with_forward
from ...base.trees import map_leaves, tensors
from ...distributed.context import ParallelContext
from ...distributed.rng import forked
from ...distributed.token_positions import ACTIVE
from ..batches import Batch
from .sequence_axis import SequenceAxis, length_of

MIXING = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    *(nn.RNNBase, nn.AvgPool1d, nn.MaxPool1d, nn.AdaptiveAvgPool1d, nn.AdaptiveMaxPool1d, *BATCH_NORMS),
)
"""Layers that mix tokens, or may, without an exchange over ranks."""
TRIED = 2
"""Tokens of each of the parts that a rank has of a sequence, in the trial."""
LARGEST_DIFFERENCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Of outputs in the trial, relative to their norm, by the dtype in which a mode computes."""
LARGEST_OF_FLOAT8 = 0.25
"""The same where linear layers multiply in float8: its scales are of the largest element, which a part may not have.
0.07 is measured for two blocks of GPT."""


class SequenceInputs:
    """Which inputs of a model are cut, and where: tensors with the batch's tokens in dim 1."""

    def check(self, model: nn.Module, num_stages: int) -> None:
        """Raise a ConfigError for a layer that mixes tokens without an exchange, or stages whose inputs cannot be cut;
        prepare the model's attention."""
        for name, module in model.named_modules():
            if isinstance(module, MIXING):
                raise ConfigError(
                    f"parallel.context.size: {name!r} is a {type(module).__name__}, which mixes tokens that are on "
                    "several ranks; expected attention only. Set it to 1"
                )

    @contextmanager
    def whole(self) -> Iterator[None]:
        """A context in which the model's attention is that of one process."""
        yield

    def tried(self, some: dict[str, Any], whole: Mapping[str, Any]) -> dict[str, Any]:
        """The keyword inputs of the trial: ``some`` has the first tokens of those of ``whole``."""
        return some

    def seen(self, kwargs: Mapping[str, Any]) -> torch.Tensor | None:
        """Which tokens are no padding, bool (batch, tokens); None: all. Outputs for padding may differ in the trial."""
        return None

    def counted(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The keyword inputs of a model in another trainer's loop, with what its own loss is divided by."""
        return kwargs

    def with_count_of_all(self, total: Any, count: Any, axis: SequenceAxis) -> tuple[Any, Any]:
        """The model's own loss, the sum and the count of its labels, with the count that belongs to the sum."""
        return total, axis.total(torch.as_tensor(count, device=axis.device))

    def cut(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], length: int, axis: SequenceAxis
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The inputs with this rank's tokens of sequences of ``length``.

        Raises:
            ConfigError: the length is no multiple of the parts that are cut.
        """
        if length % axis.multiple:
            raise ConfigError(
                f"inputs: got sequences of {length} tokens, expected a multiple of {axis.multiple}, {axis.origin}; "
                "pad them, and leave the padding out of the loss"
            )

        def part(_: str, leaf: Any) -> Any:
            has_tokens = isinstance(leaf, torch.Tensor) and leaf.ndim > 1 and leaf.shape[1] == length
            return axis.cut(leaf, 1) if has_tokens else leaf

        return cast(tuple[Any, dict[str, Any]], map_leaves(part, (args, dict(kwargs)), "inputs"))


def shard_stages(
    stages: Sequence[nn.Module],
    inputs: SequenceInputs,
    own_loss: Callable[[Any, Batch], Any],
    axis: SequenceAxis,
    context: ParallelContext,
) -> tuple[list[nn.Module], Callable[[Any, Batch], Any]]:
    """``stages`` that compute this rank's tokens, and ``own_loss`` of their outputs and whole microbatches."""

    def loss(output: Any, microbatch: Batch) -> Any:
        length = length_of(microbatch.args, microbatch.kwargs)
        found = own_loss(output, Batch(*inputs.cut(microbatch.args, microbatch.kwargs, length, axis)))
        if found is not None and not isinstance(found, (tuple, list)):
            raise ValueError(
                "the model's output has a loss that is a mean, expected (sum, count), because parallel.context cuts "
                "sequences, and ranks have different numbers of labels"
            )
        return found and inputs.with_count_of_all(*found, axis)

    cut = [CutStage(stage, inputs, axis, context, is_first=not index) for index, stage in enumerate(stages)]
    return [with_forward(one.stage, one.forward) for one in cut], loss


@dataclass
class CutStage:
    """A stage whose forward takes whole inputs; a later one gets this rank's tokens of hidden states."""

    stage: nn.Module
    inputs: SequenceInputs
    axis: SequenceAxis
    context: ParallelContext
    is_first: bool
    is_tried: bool = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the stage computes for this rank's tokens."""
        if self.is_first:
            length = length_of(args, kwargs)
            own_args, own_kwargs = self.inputs.cut(args, kwargs, length, self.axis)
        else:
            length = _length_behind(_num_tokens(args) * self.axis.size, kwargs, self.axis)
            own_args, own_kwargs = args, self.inputs.cut((), kwargs, length, self.axis)[1]
        if not self.is_tried and ACTIVE:
            self._try(args, kwargs, length)
            self.is_tried = True
        return self.compute(*own_args, **own_kwargs)

    def compute(self, *args: Any, **kwargs: Any) -> Any:
        """What the stage returns for inputs that are cut, or, in the trial, whole."""
        return self.stage.forward(*args, **kwargs)

    @torch.no_grad()
    def _try(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], length: int) -> None:
        """Raise a ConfigError, on every rank, if the stage computes other outputs for the first tokens when cut."""
        axis, tokens = self.axis, min(TRIED * self.axis.multiple, length)
        if not self.is_first:
            args = axis.joined_tokens(args, length)

        def first(_: str, leaf: Any) -> Any:
            has_tokens = isinstance(leaf, torch.Tensor) and leaf.ndim > 1 and leaf.shape[1] == length
            return leaf.narrow(1, 0, tokens).contiguous() if has_tokens else leaf

        args, some = map_leaves(first, (args, dict(kwargs)), "inputs")
        kwargs = self.inputs.tried(some, kwargs)
        training = [module for module in self.stage.modules() if module.training]
        for module in training:
            module.training = False
        active = ACTIVE[:]
        try:
            with axis.trial(), forked(self.context.device):  # a run that goes on from a checkpoint tries once more
                some_args, some_kwargs = self.inputs.cut(args, kwargs, tokens, axis)
                found = axis.joined_tokens(self.compute(*some_args, **some_kwargs), tokens)
                ACTIVE.clear()
                with self.inputs.whole():
                    expected = self.compute(*args, **kwargs)
        finally:
            ACTIVE[:] = active
            torch.clear_autocast_cache()  # has casts of weights without gradients, which the batch would use
            for module in training:
                module.training = True
        with axis.trial():
            self._compare(found, expected, tokens, self.inputs.seen(kwargs))

    def _compare(self, found: Any, expected: Any, tokens: int, seen: torch.Tensor | None) -> None:
        name = type(self.stage).__name__
        worst = torch.zeros((), dtype=torch.float64, device=self.context.device)
        pairs = zip(tensors(found), tensors(expected), strict=True)
        compares = False
        for ours, theirs in ((local(ours), local(theirs)) for ours, theirs in pairs):
            if theirs.ndim < 2 or not theirs.is_floating_point():
                continue
            compares = True
            if ours.shape != theirs.shape or theirs.shape[1] != tokens:
                raise ConfigError(
                    f"parallel.context.size: {name} returned {tuple(theirs.shape)} for {tokens} tokens, expected the "
                    "tokens in dim 1, because the axis cuts sequences; set it to 1"
                )
            if seen is not None:
                ours, theirs = ours[seen], theirs[seen]
            difference = (ours.double() - theirs.double()).norm() / theirs.double().norm().clamp(min=1e-30)
            worst = torch.maximum(worst, difference)
        for axis in (self.context.cp, self.context.tensor_axis):  # ranks that would wait for one that raises alone
            dist.all_reduce(worst, dist.ReduceOp.MAX, axis.group)
        precision = self.context.config.precision
        most = LARGEST_DIFFERENCE[precision.compute] if precision.float8 is None else LARGEST_OF_FLOAT8
        if compares and not float(worst) <= most:
            raise ConfigError(
                f"parallel.context.size: {name} computes something else from a part of a sequence: its outputs for the "
                f"first {tokens} tokens are off by {float(worst):.2g} of their norm, expected at most {most:g}. It "
                "mixes tokens other than by attention, attends over packed documents, or counts their places itself "
                "(paramp.token_positions counts them over all ranks); set the size to 1"
            )


def _num_tokens(received: Any) -> int:
    """The tokens of what a stage received: those of the first tensor in it that has a dim of them."""
    return next(tensor.shape[1] for tensor in tensors(received) if tensor.ndim > 1)


def _length_behind(padded: int, kwargs: Mapping[str, Any], axis: SequenceAxis) -> int:
    """The tokens of whole sequences in a later stage: of an input to which tokens were added up to ``padded``."""
    lengths = {leaf.shape[1] for leaf in tensors(dict(kwargs)) if leaf.ndim > 1}
    return max((one for one in lengths if one + -one % axis.multiple == padded), default=padded)
