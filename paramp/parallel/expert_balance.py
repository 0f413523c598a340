"""How many tokens each expert of a mixture got in a step: what balances the experts, by a loss or by biases of scores.

Both are defined over the global batch, of which a forward sees one microbatch on one data rank. So counts are added up
over data ranks in each forward, and over the forwards of a step, each token once: a forward that activation
checkpointing repeats adds nothing.

**The loss** (Fedus et al. 2022) is E · Σ f_i P_i, where f_i is the share of choices that expert i got and P_i its mean
probability, in the global batch. It is the mean over microbatches of E · Σ f_i P_i(microbatch), so that f, which is not
differentiated, is all that a microbatch needs to know of the others. Qiu et al. 2025 (*Demons in the detail*, arXiv
2501.11873) keep the counts of the microbatches so far in a buffer, and take f from it. Here a forward does so, and a
backward takes f from what the buffer has by then. Where all forwards of a step precede its backwards, that is the
global batch, and the gradient is exact: with one microbatch, and with the schedules ``gpipe`` and ``looped-bfs``.
Elsewhere it is exact after :meth:`paramp.Engine.count_tokens`, which runs all forwards of a step without gradients, and
so announces its counts: all of its forwards and backwards then take f from these.

**The biases** (Wang et al. 2024, *Auxiliary-loss-free load balancing*, arXiv 2408.15664; DeepSeek-V3) are added to the
scores by which experts are chosen, not to their weights. After a step that was made, each moves by a fixed rate towards
equal counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable

from ..base.backward_running import in_backward
from ..base.collectives import all_reduce_
from ..base.errors import ConfigError
from ..base.uncompiled import uncompiled

REENTRANT = (
    "TokenCounts: a backward repeats a forward that was not counted, expected one with gradients; call "
    "torch.utils.checkpoint with use_reentrant=False, or use activation_checkpointing of the configuration"
)
DROPPED = (
    "TokenCounts: the counts of this forward were dropped before its backward; call zero_grad() before the forward, or "
    "after the step"
)
EACH_ONCE = (
    "call it before each step, with the batches of its calls of forward_backward in their order, each of them once"
)
APART = (
    "count_tokens: got a call with reproducible in the configuration, expected none: the loss of the balance then has "
    "the counts of each chunk alone; leave one of the two out"
)
OTHER_COUNTS = (
    "count_tokens: its batches have {announced} choices of experts (with output_router_logits also tokens and labels), "
    f"but those of the step have {{found}}; {EACH_ONCE}"
)


class StepCounts(nn.Module):
    """Whole numbers that forwards of a step add up, on all data ranks, as often on each of them.

    In an engine they are those of the step so far. Without one they are those of one forward on this rank.

    Attributes:
        total: of the step so far, (experts + others), int64: choices of each expert first.
        announced: what the total of the whole step will be; None if :func:`announcing` has not found it.
        by_labels: whether the loss is the model's own, in which microbatches are weighted by their labels.
    """

    total: torch.Tensor
    by_labels = True

    def __init__(self, num_experts: int, num_others: int = 0) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.register_buffer("total", torch.zeros(num_experts + num_others, dtype=torch.int64), persistent=False)
        self.announced: torch.Tensor | None = None
        self._group: dist.ProcessGroup | None = None
        self._adds_up = self._apart = self._announces = False
        self._num_added = 0  # forwards in the step so far

    def join(self, data_ranks: dist.ProcessGroup | None, *, apart: bool = False) -> None:
        """Add up over ``data_ranks`` and forwards from now on, until :meth:`end_step` or :meth:`restart`.

        ``apart``: the loss of the balance has the counts of its forward alone, for training with the same bits on every
        layout: which forwards were before depends on it, and only the sum of all does not.
        """
        self._group, self._adds_up, self._apart = data_ranks, True, apart

    def __getstate__(self) -> dict[str, Any]:
        """What a copy gets: it counts for itself."""
        return vars(self) | {"_group": None, "_adds_up": False, "announced": None}

    @property
    def is_counting(self) -> bool:
        """Whether a forward is one whose counts are wanted: with gradients, or in :func:`announcing`."""
        return self.training and (self._announces or torch.is_grad_enabled())

    @property
    def known(self) -> torch.Tensor:
        """What is known of the total of the step: all of it if it was announced, else that of the forwards so far."""
        return self.total if self.announced is None else self.announced

    def add(self, counts: torch.Tensor) -> torch.Tensor:
        """Add ``counts`` of a forward on this rank, as :attr:`total`; return what is :attr:`known` then."""
        if not self._adds_up:
            return counts
        if in_backward():
            if not self._num_added:
                raise RuntimeError(REENTRANT)
            return counts if self._apart else self.known.clone()
        everywhere = counts.clone()
        if self._group is not None:
            all_reduce_(everywhere, self._group)
        if self._announces:
            self.known.add_(everywhere)
        if not torch.is_grad_enabled():
            return everywhere
        self._num_added += 1
        self.total = self.total + everywhere  # not in place, for uncounted_if_failed
        return counts if self._apart else self.known.clone()

    def slope(self, counts: torch.Tensor) -> torch.Tensor:
        """The derivatives of the loss, with ``counts`` as :attr:`total`, by the probabilities: (experts), fp64."""
        raise NotImplementedError

    def weighted(self, values: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Σ slope_i values_i, 0-dim, by what :meth:`add` returned; the gradient by what is known in the backward."""
        if self._adds_up and not self._apart and torch.is_grad_enabled():
            return cast(torch.Tensor, _WithLaterCounts.apply(values, counts, self))
        return (self.slope(counts).to(values.dtype) * values).sum()

    def check_announced(self) -> None:
        """Raise a ValueError if the step that ends has other numbers than were announced.

        Of all experts together: another kernel, or a sum in another order, may break ties between scores otherwise.
        """
        found, announced = (
            [int(one[: self.num_experts].sum()), *one[self.num_experts :].tolist()] for one in (self.total, self.known)
        )
        if found != announced:
            raise ValueError(OTHER_COUNTS.format(found=found, announced=announced))

    def end_step(self, skip: torch.Tensor) -> None:
        """Forget the step; ``skip``, 0-dim bool: it was not made."""
        self.restart()

    def restart(self) -> None:
        """The next forward is the first of a step, of which nothing is known."""
        self.total.zero_()
        self.announced, self._num_added = None, 0


class TokenCounts(StepCounts):
    """The number of tokens that chose each of ``num_experts``: a module that a router calls in training.

    In an engine it counts the step so far, on all data ranks, so that every data rank has to call it as often. Without
    an engine it counts one call on this rank.

    Attributes:
        bias: for the scores by which experts are chosen, (experts), fp32; None with a ``bias_rate`` of 0.
        total: counts of the step so far, (experts), int64.
    """

    bias: torch.Tensor | None

    def __init__(self, num_experts: int, bias_rate: float = 0.0) -> None:
        """``bias_rate``: what a step moves each bias by."""
        super().__init__(num_experts)
        self.bias_rate = bias_rate
        self.register_buffer("bias", torch.zeros(num_experts, dtype=torch.float32) if bias_rate else None)

    def reset_parameters(self) -> None:
        """Set counts and biases to zero."""
        self.total.zero_()
        if self.bias is not None:
            self.bias.zero_()

    @uncompiled
    def forward(self, index: torch.Tensor, shown: torch.Tensor | None = None) -> torch.Tensor:
        """Count the experts that tokens choose; return the counts so far, (experts).

        Args:
            index: of each token, (tokens, choices), int64.
            shown: which tokens count, (tokens,), bool; None: all do. Leave padding out of it.
        """
        return self.add(num_chosen(index, shown, self.num_experts))

    @uncompiled
    def balance(self, counts: torch.Tensor, probabilities: torch.Tensor) -> torch.Tensor:
        """The loss of the balance, 0-dim: E · Σ f_i P_i.

        Args:
            counts: what :meth:`forward` returned, (experts): f in the loss. In an engine the gradient has f of the step
                up to the backward; both have that of the whole step after :meth:`paramp.Engine.count_tokens`.
            probabilities: of each token (tokens, experts), floating point; P is its mean over tokens.
        """
        return self.weighted(probabilities.mean(0), counts)

    def slope(self, counts: torch.Tensor) -> torch.Tensor:
        """As in the base class, with respect to P: E · f."""
        return self.num_experts * (counts.double() / counts.sum().clamp(min=1))  # counts may overflow in half precision

    @torch.no_grad()
    def end_step(self, skip: torch.Tensor) -> None:
        """Move the biases towards equal counts, unless ``skip``, 0-dim bool; forget the step."""
        if (bias := self.moved()) is not None:
            missing = self.total.sum() - self.num_experts * self.total  # integers: a tie stays one
            bias.add_(missing.sign() * ~skip, alpha=self.bias_rate)
        self.restart()

    def moved(self) -> torch.Tensor | None:
        """The bias that steps move, (experts)."""
        return self.bias


class _WithLaterCounts(torch.autograd.Function):
    """:meth:`StepCounts.weighted`, with the counts of the backward in the gradient."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, counts: torch.Tensor, of: StepCounts) -> torch.Tensor:
        ctx.of, ctx.dtype = of, values.dtype
        return (of.slope(counts).to(values.dtype) * values).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        if not ctx.of._num_added:
            raise RuntimeError(DROPPED)
        return gradient * ctx.of.slope(ctx.of.known).to(ctx.dtype), None, None


def num_chosen(index: torch.Tensor, shown: torch.Tensor | None, num_experts: int) -> torch.Tensor:
    """How often an expert is in ``index``, (tokens, choices), of the tokens ``shown``, (tokens,): (experts), int64."""
    counted = torch.ones_like(index) if shown is None else shown.to(index.dtype).unsqueeze(-1).expand_as(index)
    return index.new_zeros(num_experts).scatter_add_(0, index.reshape(-1), counted.reshape(-1))


def token_counts(module: nn.Module) -> list[StepCounts]:
    """Those in ``module``: in their forwards data ranks wait for each other."""
    return [one for one in module.modules() if isinstance(one, StepCounts)]


def restart_all(all_counts: Sequence[StepCounts]) -> None:
    """Restart all of them."""
    for one in all_counts:
        one.restart()


@contextmanager
def counted_alone(module: nn.Module) -> Iterator[None]:
    """A context in which forwards of ``module`` count for themselves: other data ranks may run none."""
    joined = [one for one in token_counts(module) if one._adds_up]
    for one in joined:
        one._adds_up = False
    try:
        yield
    finally:
        for one in joined:
            one._adds_up = True


@contextmanager
def uncounted_if_failed(
    all_counts: Sequence[StepCounts], fails_everywhere: Callable[[BaseException], bool]
) -> Iterator[None]:
    """A context for a forward: one that fails leaves ``all_counts`` as they were.

    ``fails_everywhere``: whether it does on all ranks that have counted it, which would differ otherwise.
    """
    before = [(one.total, one._num_added) for one in all_counts]
    try:
        yield
    except BaseException as error:
        has_counted = any(one.total is not total for one, (total, _) in zip(all_counts, before, strict=True))
        if has_counted and fails_everywhere(error):
            for one, (total, num_added) in zip(all_counts, before, strict=True):
                one.total, one._num_added = total, num_added
        raise


@contextmanager
def announcing(all_counts: Sequence[StepCounts]) -> Iterator[None]:
    """A context for the forwards of a whole step, without gradients: on exit ``all_counts`` have announced its total.

    Raises:
        ConfigError: their losses have the counts of each forward alone.
    """
    if any(one._apart for one in all_counts):
        raise ConfigError(APART)
    restart_all(all_counts)
    for one in all_counts:
        one.announced, one._announces = torch.zeros_like(one.total), True
    try:
        yield
    except BaseException:
        restart_all(all_counts)
        raise
    finally:
        for one in all_counts:
            one._announces = False
