"""Biases that balance the experts of transformers' mixtures, moved by the tokens of each step.

DeepSeek-V3, GLM-4 MoE, dots1 and others add ``e_score_correction_bias`` to the scores by which experts are chosen, and
transformers never changes it. With ``bias_rate`` in the model's configuration it moves as the biases of
:class:`~paramp.parallel.expert_balance.TokenCounts` do.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ...base.errors import ConfigError
from ...base.module_surgery import SCORE_BIAS, is_router
from ...base.trees import tensors
from ...base.uncompiled import uncompiled
from ..expert_balance import TokenCounts
from .tokens_that_balance_experts import shown_in_forward

RATE = "bias_rate"
"""The key of the model's configuration."""
NAME = "token_counts"
"""The name of the module that is added to what has the bias."""


class ScoreBias(TokenCounts):
    """Counts the tokens of one router, and moves the bias that ``owner``, the router or its block, has."""

    def __init__(self, owner: nn.Module, num_experts: int, bias_rate: float) -> None:
        super().__init__(num_experts)
        self.bias_rate = bias_rate
        vars(self)["_owner"] = owner  # not a submodule

    def moved(self) -> torch.Tensor:
        bias: torch.Tensor = getattr(vars(self)["_owner"], SCORE_BIAS)
        return bias

    def see(self, router: nn.Module, _: Any, output: Any) -> None:
        """A hook behind ``router``, whose output has the index of each token's experts."""
        if self.bias_rate and self.is_counting:
            self._count(next(one for one in tensors(output) if not one.is_floating_point()))

    @uncompiled
    def _count(self, index: torch.Tensor) -> None:
        self(index, shown_in_forward(index))


def move_biases(model: Any) -> None:
    """Let the biases in ``model`` move after each step, if its configuration has a ``bias_rate``, else no longer.

    Raises:
        ConfigError: it has no such biases, or has them as parameters; or the rate is below 0.
    """
    rate = max(getattr(config, RATE, None) or 0.0 for config in (model.config, model.config.get_text_config()))
    if not rate:
        for module in model.modules():
            if isinstance(module, ScoreBias):  # of an engine before
                module.bias_rate = rate
        return
    owners = {name: one for name, one in model.named_modules() if SCORE_BIAS in {**one._buffers, **one._parameters}}
    kind = type(model).__name__
    if rate < 0 or not owners:
        found = "a rate of 0 or more" if owners else f"none, because {kind} has no {SCORE_BIAS}"
        raise ConfigError(f"bias_rate of the model's configuration: got {rate}, expected {found}")
    for name, owner in owners.items():
        if SCORE_BIAS in owner._parameters:
            raise ConfigError(
                f"bias_rate of the model's configuration: got {rate}, but {kind} has {name}.{SCORE_BIAS} as a "
                "parameter, expected a buffer; leave the rate out"
            )
        router = next(one for one in owner.modules() if is_router(one))
        if NAME not in owner._modules:
            owner.add_module(NAME, ScoreBias(owner, len(getattr(owner, SCORE_BIAS)), rate))
            router.register_forward_hook(getattr(owner, NAME).see)
        getattr(owner, NAME).bias_rate = rate  # an engine before may have had another
