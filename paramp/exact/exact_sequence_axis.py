"""Sequences in slices whose bits do not depend on how many ranks of the context axis have them.

Each rank has consecutive slices. Layers compute them one by one (:mod:`.sliced_sequences`). Attention is one call for
each slice of queries, with the keys and values of the whole sequence, and gradients of these are summed over the slices
of queries in one tree. Losses are of whole sequences, on every rank.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from ..base.backward_running import in_backward
from ..base.collectives import gather_objects, largest_over_ranks
from ..base.dtensor import is_dtensor, resized
from ..base.errors import ConfigError
from ..base.uncompiled import unwatched
from ..distributed.context import Axis, ParallelContext
from ..distributed.token_positions import ACTIVE
from ..parallel.context_axis.cut_sequences import SequenceAxis, SequencePlaces, scaled_dot_product_attention
from ..parallel.context_axis.tokens_of_ranks import SequenceLayout
from ..parallel.context_axis.visible_keys import Sees, Tile, VisibleKeys
from ..parallel.microbatches import Batch
from . import attention as products
from .dropout_masks import Masks
from .forwards_in_microchunk import Forwards
from .sums_over_slices import aligned, fan_out, split


class ExactSequenceAxis(SequenceAxis):
    """How the sequences of one engine are cut, over one rank as over several.

    Attributes:
        masks: of the dropout of attention, from when the model is known.
    """

    masks: Masks

    def __init__(self, context: ParallelContext, forwards: Forwards, inside: Callable[[], Any]) -> None:
        """``inside``: makes the context in which the exact mode computes."""
        super().__init__(context.cp, context.device, context.config.parallel.context.method)
        self._forwards, self._inside, self._sizes = forwards, inside, forwards.layout
        self.multiple, self.origin = self._sizes.sequences.count, "reproducible.sequence_slices"
        self.num_averaged = 1  # gradients are summed over the axis

    def layout(self, local_length: int) -> SequenceLayout:
        return SequenceLayout(self._group, self._rank, self.size, local_length * self.size, "contiguous")

    def cut(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        """As in the base class; modules then know how many tokens there are."""
        own = super().cut(whole, dim)
        if not in_backward():  # which cuts gradients
            self._forwards.cut_tokens = own.shape[dim]
        return own

    def total(self, count: torch.Tensor) -> torch.Tensor:
        """``count`` of all ranks."""
        return self.summed(count)

    def running(self, tokens: torch.Tensor) -> torch.Tensor:
        """In a mixture of experts, those of the slice that runs."""
        mixture, count = self._forwards.mixture, self._sizes.local_sequence_slices
        return tokens if mixture is None else split(tokens, count, -1)[mixture.index]

    def compare_modules(self) -> None:
        """Compare which modules have run over the ranks of the axis, which sum their gradients together.

        Raises:
            RuntimeError: on each of them: they differ.
        """
        ran, self._forwards.sliced = self._forwards.sliced, Counter()
        if self.size == 1:
            return
        number = zlib.crc32(repr(sorted(ran.items())).encode())
        most, minus_least = largest_over_ranks([number, -number], self.device, self._group)
        if most == -minus_least:
            return
        of_ranks = gather_objects(ran, self._group)
        names = {name for one in of_ranks for name in one}
        name = min(name for name in names if len({one[name] for one in of_ranks}) > 1)
        raise RuntimeError(
            f"reproducible: a {name} has run {' and '.join(str(one[name]) for one in of_ranks)} times on the ranks of "
            "the context axis, expected the same number: the forward depends on the tokens that a rank has; set "
            "parallel.context to 1"
        )

    @property
    def slice(self) -> int:
        """Which slice of the sequence a mixture of experts computes, over all ranks of the axis; 0 where none does."""
        mixture = self._forwards.mixture
        return 0 if mixture is None else self._rank * self._sizes.local_sequence_slices + mixture.index

    def places(self, tensor_axis: Axis, microbatch: Batch) -> SequencePlaces:
        """As in the base class; tensor ranks have no parts of the tokens."""
        return super().places(Axis(0, 1, tensor_axis.group), microbatch)

    def trial(self) -> AbstractContextManager[None]:
        return self._forwards.aside()

    @contextmanager
    def computing(self) -> Iterator[None]:
        ACTIVE.append(self)
        try:
            with self._inside():
                yield
        finally:
            ACTIVE.remove(self)

    scaled_dot_product_attention = staticmethod(scaled_dot_product_attention)

    def of_whole_rows(self, loss: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """``loss`` of logits and targets, which in a model's forward are those of all ranks."""

        def whole(input: torch.Tensor, target: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            forwards = self._forwards
            if ACTIVE and (forwards.sees_parts or (forwards.trying and not forwards.slicing)):
                input, target = self._rows(input), self._rows(target)
            return loss(input, target, *args, **kwargs)

        return whole

    def _rows(self, rows: torch.Tensor) -> torch.Tensor:
        """The ``rows`` of tokens, (samples of a microchunk x tokens, ...), of whole sequences."""
        samples, group = self._sizes.microchunk, self._group
        if self.size == 1 or group is None:
            return rows
        if rows.shape[0] % samples:
            raise ConfigError(
                f"cross_entropy in {self._forwards.module}: got {rows.shape[0]} rows, expected those of {samples} "
                "samples, reproducible.chunk"
            )
        if is_dtensor(rows):
            return resized(self._rows(rows.to_local()), rows, 0)
        return self.join(rows.unflatten(0, (samples, -1)), 1).flatten(0, 1)

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> torch.Tensor:
        """Attention over the whole sequence, as in the base class.

        Raises:
            ConfigError: with sinks.
        """
        if options.get("sinks") is not None:
            raise ConfigError(
                f"reproducible.sequence_slices: attention in {self._forwards.module} has sinks, expected none; set it "
                "to 1"
            )
        with unwatched():
            return self._attend(query, key, value, **options)

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        causal: bool,
        documents: torch.Tensor | None,
        window: int | None = None,
        scale: float | None = None,
        dropout: float = 0.0,
        softcap: float | None = None,
        sinks: None = None,
    ) -> torch.Tensor:
        count, own = self._sizes.local_sequence_slices, query.shape[2]
        masks: list[torch.Tensor | None] = [None] * count
        blind = None
        if causal or window is not None or documents is not None:
            visible, blind = self._visible(own, causal, window, documents, query.device)
            masks = [*visible.chunk(count, 2)]
        noises: list[torch.Tensor | None] = [None] * count
        if dropout:
            shape = torch.Size([*query.shape[:3], own * self.size])
            like = products.computing(query)
            noises = [*self.masks.attention_noise(shape, dropout, like, rows=True).chunk(count, 2)]
        keys, values = (self._of_all(one, count) for one in (key, value))
        outputs = []
        for queries, of_key, of_value, mask, noise in zip(
            split(query, count, 2), keys, values, masks, noises, strict=True
        ):
            outputs.append(
                products.attention(
                    _given(noise),
                    queries,
                    of_key,
                    of_value,
                    attn_mask=None if mask is None else aligned(mask),
                    dropout_p=dropout,
                    scale=scale,
                    enable_gqa=True,
                    softcap=softcap,
                )
            )
        output = torch.cat(outputs, 2)
        return output if blind is None else output.masked_fill(blind, 0)

    def _of_all(self, local: torch.Tensor, count: int) -> list[torch.Tensor]:
        """The keys or values of the whole sequence, (samples, heads, tokens, features), for each slice of queries."""
        by_token, group = local.transpose(1, 2), self._group if self.size > 1 else None
        return [one.transpose(1, 2) for one in fan_out(by_token, count, group, sequence=group is not None)]

    def _visible(
        self,
        own: int,
        causal: bool,
        window: int | None,
        documents: torch.Tensor | None,
        device: torch.device,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Which keys each of this rank's ``own`` queries sees, bool (samples or 1, 1, own, tokens).

        The second value says which queries see no key, bool (samples, 1, own, 1), if any can be so: torch's
        attention gives 0 for them. The first value has the query's own key there, because a softmax needs one.
        """
        length = own * self.size
        known = None if documents is None else self._known(documents, documents.shape[0], self.layout(own))
        tile = Tile(slice(0, own), slice(0, length), self._rank * own, 0, Sees.MASKED)
        seen = VisibleKeys(causal, window, known).mask(tile, device)
        if documents is None:
            return seen, None
        blind = ~seen.any(-1, keepdim=True)
        is_own = self.positions(own, device)[:, None] == torch.arange(length, device=device)
        return seen | blind & is_own, blind


def _given(noise: torch.Tensor | None) -> products.Noise:
    """A function that returns ``noise``, whatever is asked."""

    def given(shape: torch.Size, p: float, like: torch.Tensor) -> torch.Tensor:
        assert noise is not None
        assert noise.shape == shape
        return noise

    return given
