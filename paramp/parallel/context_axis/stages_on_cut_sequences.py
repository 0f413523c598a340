"""Stages whose inputs are whole sequences, and that compute this rank's tokens of them.

What a stage computes for a token may depend on others through attention alone. So the first batch of a kind is tried
before it runs: the stage computes the first tokens whole and cut, without gradients, and an output that differs is an
error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias, cast

import torch
import torch.distributed as dist
from torch import nn

from ...base.collectives import largest_over_ranks
from ...base.dtensor import full_tensor, local
from ...base.errors import ConfigError
from ...base.module_surgery import BATCH_NORMS, with_forward
from ...base.state_over_trials import keeping_state
from ...base.trees import leaves, map_leaves, tensors
from ...base.wrapped_models import is_unit
from ...distributed.context import ParallelContext
from ...distributed.token_positions import ACTIVE
from ...distributed.trials import without_draws
from ..loss_and_outputs_of_batch import loss_in
from ..microbatches import Batch
from ..tensor.sharded_loss import IGNORED
from .cut_sequences import SequenceAxis, length_of
from .weights_in_trial import refusing_other_values, varied

MIXING = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    *(nn.RNNBase, nn.AvgPool1d, nn.MaxPool1d, nn.AdaptiveAvgPool1d, nn.AdaptiveMaxPool1d, *BATCH_NORMS),
)
"""Layers that mix tokens, or may, without an exchange over ranks."""
TRIED = 256
"""Tokens of a sequence in the trial, or as many as all ranks can have parts of."""
COMPARED = 8
"""Tokens whose outputs are compared as one, so that others do not hide a difference at the ends of a rank's parts."""
LARGEST_DIFFERENCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Of such outputs, relative to their norm, by the dtype in which a mode computes."""
LARGEST_OF_LOSS = {torch.float64: 1e-6, torch.float32: 1e-4}
"""Of the model's own loss; models of transformers compute it in fp32 in each mode. Other dtypes as of outputs."""
LARGEST_OF_COUNT = 1e-6
"""Of the count of that loss, relative to it; counts that are weights may be rounded."""
LARGEST_OF_FLOAT8 = 0.25
"""The same where linear layers multiply in float8: its scales are of the largest element, which a part may not have.
0.07 is measured for two blocks of GPT."""

SHAPES = ((), (1,))
"""Of a loss, and of its count."""
OwnLoss: TypeAlias = Callable[[Any, Batch], Any]
"""Finds the model's own loss in an output and its batch: (sum, count), or a mean; None: it has none."""


class SequenceInputs:
    """Which inputs of a model are cut, and where: tensors with the batch's tokens in dim 1, and masks of padding."""

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

    def named(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The inputs, in which what depends on a name is given by it."""
        return args, dict(kwargs)

    def content(self, kwargs: Mapping[str, Any]) -> tuple[bool, ...]:
        """What batches with inputs of the same names may differ in, so that each of these kinds is tried."""
        return ()

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
        dtype = torch.float64 if isinstance(count, float) else None  # not torch's default, which may be half precision
        return total, axis.total(torch.as_tensor(count, dtype=dtype, device=axis.device))

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
            dim = dim_of_tokens(leaf, length)
            return leaf if dim is None else axis.cut(leaf, dim)

        return cast(tuple[Any, dict[str, Any]], map_leaves(part, (args, dict(kwargs)), "inputs"))


def shard_stages(
    stages: Sequence[nn.Module],
    inputs: SequenceInputs,
    own_loss: OwnLoss,
    axis: SequenceAxis,
    context: ParallelContext,
) -> tuple[list[nn.Module], OwnLoss]:
    """``stages`` that compute this rank's tokens, and ``own_loss`` of their outputs and whole microbatches."""

    def loss(output: Any, microbatch: Batch) -> Any:
        length = length_of(microbatch.args, microbatch.kwargs)
        found = own_loss(output, Batch(*inputs.cut(microbatch.args, microbatch.kwargs, length, axis)))
        if found is not None and not isinstance(found, (tuple, list)):
            raise ValueError(
                "the model's output has a loss that is a mean, expected (sum, count), because parallel.context cuts "
                "sequences, and ranks have different numbers of labels"
            )
        if found is None:
            return None
        total, count = found
        return inputs.with_count_of_all(total, count, axis)

    cut = [CutStage(stage, inputs, axis, context, not index, own_loss) for index, stage in enumerate(stages)]
    return [with_forward(one.stage, one.forward) for one in cut], loss


@dataclass
class CutStage:
    """A stage whose forward takes whole inputs; a later one gets this rank's tokens of hidden states."""

    stage: nn.Module
    inputs: SequenceInputs
    axis: SequenceAxis
    context: ParallelContext
    is_first: bool
    own_loss: OwnLoss = lambda output, _: loss_in(output)
    _tried: set[Any] = field(default_factory=set, init=False)
    """The kinds of batches that have been tried."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the stage computes for this rank's tokens."""
        if self.is_first:
            args, kwargs = self.inputs.named(args, kwargs)
            length = length_of(args, kwargs)
            own_args, own_kwargs = self.inputs.cut(args, kwargs, length, self.axis)
        else:
            length = _length_behind(_num_tokens(args) * self.axis.size, kwargs, self.axis)
            own_args, own_kwargs = args, self.inputs.cut((), kwargs, length, self.axis)[1]
        if ACTIVE and self._is_new(kind := self._kind_of(args, kwargs)):
            self._try(args, kwargs, length)
            self._tried.add(kind)  # not before: the next call of a model that is refused is refused too
        return self.compute(*own_args, **own_kwargs)

    def compute(self, *args: Any, **kwargs: Any) -> Any:
        """What the stage returns for inputs that are cut, or, in the trial, whole."""
        return self.stage.forward(*args, **kwargs)

    def _kind_of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """What tells batches apart that are tried each: which inputs they have, with or without padding, and so on."""
        found = list(leaves((args, dict(kwargs)), "inputs"))
        inputs = [(path, one.dtype, one.ndim) for path, one in found if isinstance(one, torch.Tensor)]
        content = self.inputs.content(kwargs)
        return (*inputs, *((path, one) for path, one in found if isinstance(one, (bool, str))), content)

    def _is_new(self, kind: Any) -> bool:
        """Whether no batch of this ``kind`` has been tried, here or, where data ranks wait, on one of them."""
        is_new = kind not in self._tried
        if self._gathers_weights or self.context.config.parallel.expert > 1:  # data ranks meet in a forward
            is_new = any(largest_over_ranks([is_new], self.context.device, self.context.dp.group))
        return is_new

    @cached_property
    def _gathers_weights(self) -> bool:
        """Whether FSDP2 shards the stage, or a module in it."""
        return self.context.config.parallel.data_axes.shard > 1 or any(map(is_unit, self.stage.modules()))

    @torch.no_grad()
    def _try(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], length: int) -> None:
        """Raise a ConfigError, on every rank, if the stage computes other outputs for the first tokens when cut."""
        axis, tokens = self.axis, min(TRIED + -TRIED % self.axis.multiple, length)
        if not self.is_first:
            args = axis.joined_tokens(args, length)

        def first(_: str, leaf: Any) -> Any:
            dim = dim_of_tokens(leaf, length)
            if dim is None:
                return leaf
            part = leaf.narrow(dim, 0, tokens).contiguous()
            # Labels that are left out could be just those whose place in a rank's part matters.
            return part.masked_fill(part == IGNORED, 0) if part.dtype is torch.int64 else part

        args, some = map_leaves(first, (args, dict(kwargs)), "inputs")
        kwargs = self.inputs.tried(some, kwargs)
        if is_wide := self._is_wide:
            args, kwargs = map_leaves(_widened, (args, dict(kwargs)), "inputs")
        training = [module for module in self.stage.modules() if module.training]
        for module in training:
            module.training = False
        try:
            # A run that goes on from a checkpoint tries once more, and draws the same numbers.
            device = self.context.device
            wide = torch.autocast(device.type, enabled=False) if is_wide else nullcontext()
            with axis.trial(), keeping_state(self.stage), varied(self.stage), without_draws(device), wide:
                some_args, some_kwargs = self.inputs.cut(args, kwargs, tokens, axis)
                # First, so that a table of places that the model keeps is found in the part, and does not stay.
                with axis.paused():
                    with self.inputs.whole(), refusing_other_values(self.stage):
                        expected = self.compute(*args, **kwargs)
                    whole_loss = self._own_loss(expected, args, kwargs)
                try:
                    output = self.compute(*some_args, **some_kwargs)
                except Exception as error:
                    error.add_note(self._note_on(args, kwargs, tokens))
                    raise
                found = axis.joined_tokens(output, tokens)
                loss = self._own_loss(output, some_args, some_kwargs)
        finally:
            torch.clear_autocast_cache()  # has casts of weights without gradients, which the batch would use
            for module in training:
                module.training = True
        seen = self.inputs.seen(kwargs)
        with axis.trial():
            self._compare(found, expected, tokens, seen)
            if axis.size > 1 and (seen is None or bool(seen.all())):  # labels of padding may count
                self._compare_losses(axis.summed(loss) if axis.num_averaged > 1 else loss, whole_loss, tokens)

    def _note_on(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], tokens: int) -> str:
        found = leaves((args, dict(kwargs)), "inputs")
        names = ", ".join(path for path, leaf in found if dim_of_tokens(leaf, tokens) is not None)
        return (
            f"parallel.context.size: {type(self.stage).__name__} computed a part of the first {tokens} tokens, with "
            f"that part of {names}. An input that has as many elements in dim 1, but no tokens, is not cut as (batch, "
            "1, features)"
        )

    def _own_loss(self, output: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor:
        """(sum, count, 1) of the model's own loss, or (mean, 1, 0), float64; (nan, 1, 0) if it has none."""
        loss = self.own_loss(output, Batch(args if self.is_first else (), dict(kwargs)))
        is_pair = isinstance(loss, (tuple, list)) and len(loss) == 2
        pair = loss if is_pair else (loss, 1)
        if not all(isinstance(one, (int, float)) or getattr(one, "shape", None) in SHAPES for one in pair):
            pair, is_pair = (float("nan"), 1), False
        if is_pair and ACTIVE and self.axis.num_averaged == 1:  # the sum is of whole sequences on each rank
            pair = self.inputs.with_count_of_all(pair[0], pair[1], self.axis)
        numbers = [*(float(full_tensor(one)) for one in pair), float(is_pair)]
        return torch.tensor(numbers, dtype=torch.float64, device=self.axis.device)

    def _compare(self, found: Any, expected: Any, tokens: int, seen: torch.Tensor | None) -> None:
        compared, differences = [], []
        losses = [id(one) for one in tensors(loss_in(expected))]
        paths = [path for path, leaf in leaves(expected, "output") if isinstance(leaf, torch.Tensor)]
        for path, ours, theirs in zip(paths, tensors(found), tensors(expected), strict=True):
            is_exact = not (theirs.is_floating_point() or theirs.is_complex())
            if is_exact or (theirs.numel() == 1 and id(theirs) in losses):
                continue
            ours, theirs = local(ours), local(theirs)
            if ours.shape != theirs.shape or (theirs.ndim > 1 and theirs.shape[1] != tokens):
                raise no_tokens(self.stage, path, theirs.shape)
            compared.append((path, theirs.shape))
            differences.append(_difference(ours, theirs, seen if theirs.ndim > 1 else None))
        for (path, shape), difference in zip(compared, self._largest(differences), strict=True):
            if difference <= self._most:
                continue
            if len(shape) < 2:
                raise no_tokens(self.stage, path, shape)
            raise ConfigError(
                f"parallel.context.size: {type(self.stage).__name__} computes something else from a part of a "
                f"sequence: its outputs for the first {tokens} tokens are off by {difference:.2g} of their norm, "
                f"expected at most {self._most:g}. It mixes tokens other than by attention, attends over packed "
                "documents, or counts their places itself (paramp.token_positions counts them over all ranks); set "
                "the size to 1"
            )

    def _compare_losses(self, found: torch.Tensor, expected: torch.Tensor, tokens: int) -> None:
        """Compare (sum, count) of all ranks with that of whole sequences."""
        mean = expected[0] / expected[1]
        difference = (found[0] / found[1] - mean).abs() / mean.abs().clamp(min=1)  # it may be the sum of + and -
        # The mean of other labels may be close to that of all.
        missing = ((found[1] / expected[1] - 1).abs() > LARGEST_OF_COUNT) * expected[2]
        difference = torch.maximum(difference, missing).where(mean.isfinite(), 0)  # no label, no loss
        (largest,) = self._largest([difference])
        if not largest <= LARGEST_OF_LOSS.get(self._tried_dtype, self._most):
            raise ConfigError(
                f"parallel.context.size: the own loss of {type(self.stage).__name__} for the first {tokens} tokens is "
                f"off by {largest:.2g}, expected that of whole sequences as (sum, count) over the ranks. Labels are "
                "cut as tokens are: shift them before the model gets them, or give a criterion, which gets whole "
                "outputs; or set the size to 1"
            )

    def _largest(self, differences: list[torch.Tensor]) -> list[float]:
        """Those of all ranks, which would wait for one that raises alone."""
        if not differences:
            return []
        largest = torch.stack(differences).to(self.context.device)
        for axis in (self.context.cp, self.context.tensor_axis):
            dist.all_reduce(largest, dist.ReduceOp.MAX, axis.group)
        return largest.tolist()

    @property
    def _is_wide(self) -> bool:
        """Whether the trial computes in fp32 what a batch computes under autocast. FSDP2 may gather half weights."""
        is_cast = torch.is_autocast_enabled(self.context.device.type)
        return is_cast and self.context.config.precision.float8 is None and not self._gathers_weights

    @property
    def _most(self) -> float:
        is_float8 = self.context.config.precision.float8 is not None
        return LARGEST_OF_FLOAT8 if is_float8 else LARGEST_DIFFERENCE[self._tried_dtype]

    @property
    def _tried_dtype(self) -> torch.dtype:
        return torch.float32 if self._is_wide else self.context.config.precision.compute


def _difference(ours: torch.Tensor, theirs: torch.Tensor, seen: torch.Tensor | None) -> torch.Tensor:
    """The largest of any :data:`COMPARED` tokens, dim 1, relative to their norm; 0-dim. Tokens not ``seen`` are 0."""
    dtype = torch.promote_types(theirs.dtype, torch.float32)
    ours, theirs = ours.to(dtype), theirs.to(dtype)
    if seen is not None:
        hidden = ~seen.reshape(*seen.shape, *(1,) * (theirs.ndim - 2))
        ours, theirs = ours.masked_fill(hidden, 0), theirs.masked_fill(hidden, 0)
    dim = min(1, theirs.ndim - 1)
    differences, norms = ([part.norm() for part in _parts(one, dim)] for one in (ours - theirs, theirs))
    usual = theirs.norm() / len(norms) ** 0.5  # outputs of a few tokens may be near 0
    return (torch.stack(differences) / torch.stack(norms).clamp(min=usual / 10 + 1e-30)).max().double()


def _parts(outputs: torch.Tensor, dim: int) -> Sequence[torch.Tensor]:
    return outputs.split(COMPARED, dim) if outputs.ndim else (outputs,)


def dim_of_tokens(leaf: Any, length: int) -> int | None:
    """The dim of the ``length`` tokens: 1, or 3 in a mask of dims (batch, 1, 1, tokens); None: there is none."""
    if not isinstance(leaf, torch.Tensor) or leaf.ndim < 2:
        return None
    if leaf.shape[1] == length:
        return 1
    return 3 if leaf.shape[1:] == (1, 1, length) else None


def _widened(_: str, leaf: Any) -> Any:
    is_half = isinstance(leaf, torch.Tensor) and leaf.dtype in (torch.float16, torch.bfloat16)
    return leaf.float() if is_half else leaf


def no_tokens(stage: nn.Module, path: str, shape: torch.Size) -> ConfigError:
    """The error of an output that depends on which tokens a rank has."""
    return ConfigError(
        f"{type(stage).__name__}: got {path} of shape {tuple(shape)}, expected tokens in dim 1 of all it returns, "
        "because each rank of the context axis has some of them; return the outputs of tokens, and compute what is of "
        "whole sequences from them, in the criterion or the loop; or set parallel.context.size to 1"
    )


def _num_tokens(received: Any) -> int:
    """The tokens of what a stage received: those of the first tensor in it that has a dim of them."""
    return next(tensor.shape[1] for tensor in tensors(received) if tensor.ndim > 1)


def _length_behind(padded: int, kwargs: Mapping[str, Any], axis: SequenceAxis) -> int:
    """The tokens of whole sequences in a later stage: of an input to which tokens were added up to ``padded``."""
    lengths = {leaf.shape[1] for leaf in tensors(dict(kwargs)) if leaf.ndim > 1}
    return max((one for one in lengths if one + -one % axis.multiple == padded), default=padded)
