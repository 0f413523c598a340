"""Sequences over the ranks of the context axis: cutting them, joining outputs, and attention while an engine computes.

Attention is replaced where torch's function is called (``F.scaled_dot_product_attention``) and in transformers' models
(:mod:`paramp.parallel.huggingface.context_inputs`). The replacement holds for the whole process as long as an engine
computes, because a checkpointed block runs its forward again in autograd's own threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast
from weakref import ReferenceType, ref

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ...base.collectives import all_gather_single, all_reduce_
from ...base.dtensor import is_dtensor, local, resized, version
from ...base.errors import ConfigError
from ...base.replaced_in_torch import patched
from ...base.trees import leaves, map_tensors
from ...base.uncompiled import uncompiled
from ...distributed.context import Axis
from ...distributed.token_positions import ACTIVE
from ..loss_and_outputs_of_batch import loss_in, with_loss
from ..microbatches import Batch
from .context_attention import attention, default_method
from .tokens_of_ranks import SequenceLayout
from .visible_keys import Documents

FIRST = "input_ids", "inputs_embeds"
"""The keywords of what has the tokens, if a model has them among its inputs."""


def length_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """The tokens of each sequence of a model's inputs: dim 1 of the first tensor that has it.

    Raises:
        ConfigError: there is none.
    """
    named = [kwargs[name] for name in FIRST if kwargs.get(name) is not None]
    for _, leaf in leaves((named, args, dict(kwargs))):
        if isinstance(leaf, torch.Tensor) and leaf.ndim > 1:
            return leaf.shape[1]
    raise ConfigError(
        "inputs: got no tensor of 2 or more dims, expected one with the tokens in dim 1, because parallel.context cuts "
        "sequences"
    )


class SequenceAxis:
    """How the sequences of one engine are cut over its context axis.

    Attributes:
        multiple: what the length of a whole sequence has to be a multiple of.
        origin: says in a message what this number is.
        device: of this rank.
        num_averaged: over how many ranks the engine averages the gradients of one loss of whole sequences, which each
            of them computes.
    """

    def __init__(self, axis: Axis, device: torch.device, method: str) -> None:
        self._group, self._rank, self.size = axis.group, axis.rank, axis.size
        self.device, self.num_averaged = device, axis.size
        self._method = method
        self._last_seen: tuple[ReferenceType[torch.Tensor], int, torch.Tensor] | None = None
        self.multiple, self.origin = 2 * axis.size, f"twice parallel.context {axis.size}"
        self._documents: tuple[ReferenceType[torch.Tensor], Documents] | None = None

    def layout(self, local_length: int) -> SequenceLayout:
        """That of sequences of which each rank has ``local_length`` tokens."""
        return SequenceLayout(self._group, self._rank, self.size, local_length * self.size)

    def cut(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's tokens of ``whole``, which has a multiple of :attr:`multiple` tokens in ``dim``."""
        return self.layout(whole.shape[dim] // self.size).shard(whole, dim, self._rank)

    def join(self, tokens: torch.Tensor, dim: int) -> torch.Tensor:
        """The whole sequence of this rank's ``tokens``, on every rank, differentiable.

        The gradient is :attr:`num_averaged` times that of this rank's tokens.
        """
        return tokens if self.size == 1 else cast(torch.Tensor, _JoinTokens.apply(tokens, dim, self))

    def positions(self, length: int, device: torch.device | str | None) -> torch.Tensor:
        """The places of this rank's ``length`` tokens, (length,), int64."""
        return self.layout(length).positions(self._rank, "cpu" if device is None else device)

    def joined(self, output: Any, batch: Batch, own_loss: Callable[[], Any] | None = None) -> Any:
        """The ``output`` of a model for the whole inputs of ``batch``; tensors with tokens in dim 1 are joined.

        ``own_loss`` finds the sum and the count of the loss in the output, if it has one: it is then that of all ranks.
        """
        loss = loss_in(output)
        is_mean = isinstance(loss, torch.Tensor)
        if own_loss is not None and (loss.numel() == 1 if is_mean else loss is not None):
            if self.num_averaged > 1:
                total, count = own_loss()
                total, count = self.added(total), self.summed(torch.as_tensor(count))
                output = with_loss(output, total / count.clamp(min=1) if is_mean else (total, count))
            elif not is_mean:  # the sum is of whole sequences already, as a mean is, and the count in the output is not
                output = with_loss(output, own_loss())
        return self.joined_tokens(output, length_of(batch.args, batch.kwargs))

    def added(self, loss: torch.Tensor) -> torch.Tensor:
        """The sum of ``loss`` over the ranks, differentiable; as for :meth:`join`, gradients are averaged later."""
        return cast(torch.Tensor, _AddedLoss.apply(loss, self))

    def joined_tokens(self, tree: Any, length: int) -> Any:
        """The ``tree`` whose tensors with this rank's tokens in dim 1 have those of the sequence of ``length``."""
        padded = length + -length % self.multiple

        def joined(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.ndim < 2 or tensor.shape[1] != padded // self.size:
                return tensor
            if is_dtensor(tensor):  # logits over a sharded vocabulary
                return resized(joined(tensor.to_local()), tensor, 1)
            whole = self.join(tensor, 1)  # no view, of which FSDP2 warns
            return whole if length == padded else whole.narrow(1, 0, length).clone()

        return map_tensors(joined, tree)

    def total(self, count: torch.Tensor) -> torch.Tensor:
        """What the loss of this rank's tokens, which are ``count``, is divided by."""
        return count

    def running(self, tokens: torch.Tensor) -> torch.Tensor:
        """Of ``tokens`` in the last dim, this rank's, those that the module that runs computes."""
        return tokens

    def summed(self, value: torch.Tensor) -> torch.Tensor:
        """The sum of ``value``, of any device, over the ranks of the axis; not differentiable."""
        if self.size > 1:
            value = value.to(self.device, copy=True)
            all_reduce_(value, self._group)
        return value

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A context for what computes whole sequences while an engine computes parts."""
        before = ACTIVE[:]
        ACTIVE.clear()
        try:
            yield
        finally:
            ACTIVE[:] = before

    def trial(self) -> AbstractContextManager[None]:
        """A context for forwards that are tried, and what is computed of their outputs."""
        return nullcontext()

    @contextmanager
    def computing(self) -> Iterator[None]:
        """A context for forwards and backwards, in which attention goes over the whole sequence."""
        ACTIVE.append(self)
        try:
            with (
                patched(F, "scaled_dot_product_attention", scaled_dot_product_attention),
                patched(torch.backends.mha, "_is_fastpath_enabled", False),  # in evaluation it calls no function
            ):
                yield
        finally:
            ACTIVE.remove(self)

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> torch.Tensor:
        """Attention over the whole sequence, with the ``options`` of :func:`.context_attention.attention`.

        ``documents``: (batch or 1, 1, 1, tokens) int, as there. ``dropout`` draws its seed from torch's random stream.
        """
        if options.get("dropout"):
            seed = torch.randint(2**62, (), device=query.device)
            dist.broadcast(seed, group=self._group, group_src=0)
            options["dropout_seed"] = int(seed)
        layout, method = self.layout(query.shape[2]), self._method
        if method == "auto":
            method = default_method(query.shape[1], key.shape[1], layout)
        if (documents := options.pop("documents")) is not None:
            documents = self._known(documents, query.shape[0], layout)
        return attention(query, key, value, layout=layout, method=method, documents=documents, **options)

    def places(self, tensor_axis: Axis, microbatch: Batch) -> SequencePlaces:
        """Where in whole sequences the values of this rank are that ``microbatch`` gives."""
        return SequencePlaces(self, tensor_axis, microbatch)

    def documents(self, seen: torch.Tensor) -> torch.Tensor:
        """The documents of one sequence of which tokens are ``seen``, bool; the same for the same, unchanged tensor."""
        if self._last_seen is None or self._last_seen[0]() is not seen or self._last_seen[1] != version(seen):
            self._last_seen = ref(seen), version(seen), numbers_of(seen)
        return self._last_seen[2]

    def _known(self, numbers: torch.Tensor, batch: int, layout: SequenceLayout) -> Documents:
        """The documents of ``numbers``, (batch or 1, 1, 1, tokens); one exchange for all layers."""
        if self._documents is None or self._documents[0]() is not numbers:
            own = numbers[:, 0, 0].expand(batch, -1).long()
            self._documents = ref(numbers), Documents(own, layout)
        return self._documents[1]


def numbers_of(seen: torch.Tensor) -> torch.Tensor:
    """1 for tokens that are ``seen``, -1 for padding, which sees the others."""
    return seen.bool() * 2 - 1


class _JoinTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, dim: int, axis: SequenceAxis) -> torch.Tensor:
        ctx.dim, ctx.axis = dim, axis
        parts = tokens.new_empty(axis.size, *tokens.shape)
        all_gather_single(parts.view(-1), tokens.contiguous().view(-1), group=axis._group)
        return axis.layout(tokens.shape[dim]).whole(parts.unbind(), dim)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        own = ctx.axis.cut(gradient, ctx.dim)
        return own if ctx.axis.num_averaged == 1 else own * ctx.axis.num_averaged, None, None


class _AddedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, axis: SequenceAxis) -> torch.Tensor:
        ctx.axis = axis
        return axis.summed(loss)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return gradient * ctx.axis.num_averaged, None


def active() -> SequenceAxis:
    """The axis of the engine that computes."""
    return cast(SequenceAxis, ACTIVE[-1])


_plain = F.scaled_dot_product_attention


@uncompiled  # exchanges, and a choice of tiles on the host
def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """As torch's function, over the whole sequence.

    Raises:
        ConfigError: queries and keys are of different sequences, or the mask is none of padding: bool,
            (batch, 1, 1, tokens).
    """
    if not ACTIVE:
        return _plain(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if query.shape[-2] != key.shape[-2]:
        raise ConfigError(
            f"scaled_dot_product_attention: got {query.shape[-2]} queries and {key.shape[-2]} keys, expected as many, "
            "because parallel.context cuts both from one sequence; use context 1 for attention to another one"
        )
    if query.ndim != 4:
        raise ConfigError(
            f"scaled_dot_product_attention: got queries of shape {tuple(query.shape)}, expected (batch, heads, tokens, "
            "features) under parallel.context"
        )
    if attn_mask is not None:
        padding = attn_mask.dtype is torch.bool and attn_mask.ndim == 4 and attn_mask.shape[1:3] == (1, 1)
        if not padding:
            raise ConfigError(
                f"scaled_dot_product_attention: got a mask of {attn_mask.dtype} and shape {tuple(attn_mask.shape)}, "
                "expected none, or one of padding, bool (batch, 1, 1, tokens), under parallel.context: other masks are "
                "not cut; use is_causal=True, and context 1 for masks of your own"
            )
    if query.shape[1] != key.shape[1] and not enable_gqa:
        raise ConfigError(
            f"scaled_dot_product_attention: got {query.shape[1]} heads of queries and {key.shape[1]} of keys, expected "
            "as many, or enable_gqa=True"
        )
    documents = None if attn_mask is None else active().documents(attn_mask)
    return active().attend(query, key, value, causal=is_causal, documents=documents, scale=scale, dropout=dropout_p)


Ranges = tuple[tuple[int, int], ...]


class SequencePlaces:
    """Where in whole sequences the values of a rank's tensors are; tensors are told by their shapes."""

    def __init__(self, axis: SequenceAxis, tensor_axis: Axis, microbatch: Batch) -> None:
        """``microbatch``: one of those that run, whose inputs are whole."""
        self._samples, length = microbatch.size, length_of(microbatch.args, microbatch.kwargs)
        own = axis.positions((length + -length % axis.multiple) // axis.size, "cpu")
        is_cut = len(own) % tensor_axis.size == 0
        self._places = own, torch.arange(length), own.chunk(tensor_axis.size)[tensor_axis.rank] if is_cut else own

    def not_finite(self, value: torch.Tensor) -> Ranges:
        """The places of the tokens of an activation, or of its gradient, that are not finite; empty if not known.

        The tokens are in dim 1, in dim 2 of four (heads before them), or in rows, sequence by sequence.
        """
        value = local(value).detach()
        for places in self._places:
            rows = value.ndim == 2 and len(value) == len(places) * self._samples
            found = value.unflatten(0, (self._samples, -1)) if rows else value
            if found.ndim < 2 or len(found) != self._samples:
                continue
            dims = [dim for dim in (1, 2)[: 1 + (found.ndim == 4)] if found.shape[dim] == len(places)]
            if len(dims) == 1:
                bad = (~found.isfinite()).movedim(dims[0], 0).flatten(1).any(1)
                return _ranges(places[bad.cpu()].tolist())
        return ()


def _ranges(places: list[int]) -> Ranges:
    """Ascending numbers as ranges, each by its first number and the one after its last."""
    starts = [place for index, place in enumerate(places) if not index or places[index - 1] != place - 1]
    ends = [place + 1 for place in places if place + 1 not in set(places)]
    return tuple(zip(starts, ends, strict=True))
