"""The loss that balances the experts of a model of transformers, over the tokens of a step.

With ``output_router_logits`` in its configuration, a model adds ``router_aux_loss_coef`` · E · Σ f_i P_i to its loss
(Fedus et al. 2022): f_i is how often expert i is among the most probable of a token, P_i its mean probability, over the
tokens of all layers that the attention mask shows. transformers takes both from one forward. Here they are of the step
so far, on all data ranks, as those of :mod:`paramp.parallel.expert_balance`::

    each stage       sums of its routers, added to those of the stages before    Σ p (fp64), counts and tokens (int64)
    last stage       K · E · Σ counts_i (Σ p)_i / tokens²                        in place of transformers' loss

The sums Σ p are of one microbatch on one data rank, and have the gradient; counts, tokens and K are of the step so far,
in the backward of the step up to it, and of the whole step where they were announced. K is the labels by which
microbatches are weighted, so that over a step these losses add up to the one of all its tokens.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn

from ...base.errors import ConfigError
from ...base.replaced_in_torch import patched
from ..expert_balance import StepCounts, num_chosen
from ..recognize_stacked_experts import num_experts
from .tokens_that_balance_experts import shown

FUNCTION = "load_balancing_loss_func"
"""What the forwards of transformers call for this loss, of the file of their model."""
ARGUMENTS = ("gate_logits", "num_experts", "top_k", "attention_mask")
"""Its parameters. Some encoder-decoders have another function of that name, which stays."""
ROUTERS = "output_router_logits"
"""The input, and the key of the configuration, that asks for the loss."""
NAME = "router_balance"
"""The name of the module that is added to the last stage."""
UNWANTED = (
    "inputs['output_router_logits']: got True, expected it in the model's configuration before initialize "
    "(model.config.output_router_logits = True), because data ranks wait for each other in forwards with that loss"
)


def asks_for_loss(config: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether a forward with the inputs ``kwargs`` of a model with that ``config`` computes the loss of routers."""
    asked = kwargs.get(ROUTERS)
    return bool(getattr(config, ROUTERS, False) if asked is None else asked)


def wants_loss(model: Any) -> bool:
    """Whether the configuration of ``model``, if it has one, asks for the loss."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return asks_for_loss(config, {}) or asks_for_loss(text, {})


class RouterSums(NamedTuple):
    """What routers gave to the tokens of one microbatch."""

    probabilities: torch.Tensor
    """Of each expert, summed over layers and tokens, (experts), fp64."""
    numbers: torch.Tensor
    """How often each expert is among the most probable ones of a token; and the number of tokens; (experts + 1),
    int64."""


class StepBalance(StepCounts):
    """The loss of the balance of one model, by what its routers gave in the step so far."""

    def __init__(self, num_experts: int) -> None:
        super().__init__(num_experts, 2)  # tokens, and weights of microbatches

    def loss(self, sums: RouterSums, num_labels: torch.Tensor | None) -> torch.Tensor:
        """The loss of a microbatch over its weight, 0-dim fp64; ``num_labels``: 0-dim int64, None without labels."""
        weight = torch.ones_like(sums.numbers[:1])
        if num_labels is not None and self.by_labels:
            weight = num_labels.to(weight).view(1)
        counts = torch.cat([sums.numbers, weight])
        if not self.is_counting:
            return (sums.probabilities * self.slope(counts)).sum() / weight.clamp(min=1)[0]
        return self.weighted(sums.probabilities / weight.clamp(min=1), self.add(counts))

    def slope(self, counts: torch.Tensor) -> torch.Tensor:
        """As in the base class, times K, with respect to the sums of probabilities."""
        *_, tokens, weights = counts.double().unbind()
        return self.num_experts * weights * counts[:-2] / tokens.clamp(min=1).square()


def sums_of(
    logits: tuple[torch.Tensor, ...],
    num_choices: int,
    mask: Any,
    before: RouterSums,
) -> RouterSums:
    """The sums of routers, added to those of the layers ``before``.

    Args:
        logits: of each router, (tokens, experts).
        num_choices: how many experts a token has.
        mask: the model's, of which :func:`.tokens_that_balance_experts.shown` says which tokens count.
    """
    probabilities, numbers = before
    for layer in logits:
        each = layer.to(torch.promote_types(layer.dtype, torch.float32)).softmax(-1)
        counted = shown(mask, each)
        chosen = num_chosen(each.topk(num_choices, -1).indices, counted, len(probabilities))
        numbers = numbers + torch.cat([chosen, counted.sum().view(1)])
        probabilities = probabilities + (each * counted.unsqueeze(-1)).sum(0, dtype=torch.float64)
    return RouterSums(probabilities, numbers)


class RouterLoss:
    """Takes the place of transformers' function in the forwards of one model, or of its stages."""

    def __init__(self, model: Any, where: ModuleType) -> None:
        self._where, self._own = where, getattr(where, FUNCTION)
        self.num_experts = next(filter(None, map(num_experts, model.modules())), 0)
        self.is_wanted = wants_loss(model)

    @staticmethod
    def of(model: nn.Module) -> RouterLoss | None:
        """That of ``model``; None if its forward calls no such function."""
        for kind in type(model).__mro__:
            names = getattr(inspect.unwrap(vars(kind).get("forward", RouterLoss.of)), "__globals__", {})
            function = names.get(FUNCTION)
            if function is not None and tuple(inspect.signature(function).parameters) == ARGUMENTS:
                found = RouterLoss(model, sys.modules[names["__name__"]])
                return found if found.num_experts else None
        return None

    def add_to(self, stage: nn.Module) -> None:
        """Add what counts to ``stage``, the last one, if the configuration asks for the loss."""
        if self.is_wanted:
            stage._modules = {**stage._modules, NAME: StepBalance(self.num_experts)}

    def asked_in(self, kwargs: Mapping[str, Any]) -> bool:
        """Whether a forward with the inputs ``kwargs`` computes the loss."""
        asked = kwargs.get(ROUTERS)
        return self.is_wanted if asked is None else bool(asked)

    @contextmanager
    def taken_over(
        self, stage: nn.Module, num_labels: torch.Tensor | None, before: RouterSums | None = None
    ) -> Iterator[list[RouterSums]]:
        """A context for a forward of ``stage``, which computes the loss if it is the last one.

        Args:
            num_labels: that the last stage has, 0-dim; None without labels.
            before: of the stages before.

        Yields:
            A list that gets the sums of this stage and those before.
        """
        balance, found = stage._modules.get(NAME), list[RouterSums]()

        def loss(
            gate_logits: tuple[torch.Tensor, ...] | None,
            num_experts: int,
            top_k: int,
            attention_mask: Any = None,
        ) -> torch.Tensor:
            logits = gate_logits or ()  # none in a stage without routers
            zeros = torch.zeros(num_experts + 1, dtype=torch.int64, device=next(stage.parameters()).device)
            found.append(sums_of(logits, top_k, attention_mask, before or RouterSums(zeros[:-1].double(), zeros)))
            if not isinstance(balance, StepBalance):
                return found[0].probabilities.new_zeros(())
            dtype = functools.reduce(torch.promote_types, [one.dtype for one in logits], torch.float32)
            return balance.loss(found[0], num_labels).to(dtype)

        def unwanted(*args: Any, **kwargs: Any) -> Any:
            if stage.training and torch.is_grad_enabled():
                raise ConfigError(UNWANTED)
            return self._own(*args, **kwargs)

        with patched(self._where, FUNCTION, loss if self.is_wanted else unwanted):
            yield found
