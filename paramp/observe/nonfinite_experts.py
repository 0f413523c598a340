"""Which experts got how many tokens, and which of them produced what is not finite, while a window runs again.

The forward of a stack of experts (:func:`~paramp.parallel.recognize_stacked_experts.num_experts`) takes tokens, the
index of each token's experts and their weights, as those of transformers. Over several ranks each rank sees the experts
of its own tokens, by their index in the whole stack.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..base.dtensor import local
from ..base.trees import tensors
from ..base.wrapped_models import plain_name
from ..distributed.context import ParallelContext
from ..parallel.recognize_stacked_experts import SEE_ROWS, num_experts
from ..scaling.overflow_report import gather_findings, non_finite_experts


def stacked_parameters(module: nn.Module) -> set[str]:
    """The names of the parameters in ``module`` that are stacks of experts."""
    stacks = {name: one for name, one in module.named_modules() if num_experts(one)}
    return {
        plain_name(f"{name}.{own}") for name, one in stacks.items() for own, _ in one.named_parameters(recurse=False)
    }


class ExpertTokens:
    """Follows the stacks of experts of this rank in one run of a window."""

    def __init__(self, context: ParallelContext | None) -> None:
        self._counts: dict[str, torch.Tensor] = {}
        self._counts_tokens = context is None or context.tensor_axis.rank == 0  # tensor ranks have the same tokens
        self._index = torch.empty(0, 0)  # of the call that runs: the experts of each token
        self._blamed: set[int] | None = None

    @contextmanager
    def following(self) -> Iterator[None]:
        """A context in which experts over several ranks show what each computed."""
        token = SEE_ROWS.set(self._see_rows)
        try:
            yield
        finally:
            SEE_ROWS.reset(token)

    def begin(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Count the tokens of a call of ``module``, if it is a stack of experts."""
        total = num_experts(module)
        if not total:
            return
        from ..parallel.expert_dispatch import inputs_in_order  # imports DTensor

        try:
            _, index, _ = inputs_in_order(module, args, kwargs)
        except (TypeError, ValueError):  # it takes others
            return
        if not isinstance(index, torch.Tensor) or index.is_floating_point() or index.ndim != 2:
            return
        self._index, self._blamed = index.detach(), None
        if self._counts_tokens:
            counts = torch.bincount(index.flatten(), minlength=total)[:total]
            self._counts[name] = counts + self._counts.get(name, 0)

    def blamed(self, module: nn.Module, output: Any) -> tuple[int, ...]:
        """The experts that may have produced a non-finite ``output`` of ``module``; none if it is no stack of them.

        Known from what each computed over several ranks; else from their weights, or as those of all bad tokens.
        """
        if not num_experts(module):
            return ()
        if self._blamed is not None:
            return tuple(sorted(self._blamed))
        weights = [non_finite_experts(one, local(one).detach()) for one in module.parameters(recurse=False)]
        if any(weights):
            return tuple(sorted(set().union(*weights)))
        rows = next((one for one in map(local, tensors(output)) if one.shape[:1] == self._index.shape[:1]), None)
        if rows is None:
            return ()
        bad = [set(of_token) for of_token in self._index[~rows.flatten(1).isfinite().all(1)].tolist()]
        return tuple(sorted((bad and set.intersection(*bad)) or set().union(*bad)))

    def _see_rows(self, rows: torch.Tensor, experts: torch.Tensor) -> None:
        self._blamed = set(experts[~rows.isfinite().all(1)].tolist())

    def everywhere(self) -> dict[str, tuple[int, ...]]:
        """The number of tokens of each expert, by the name of the stack, over all ranks; a collective of the world."""
        here = {name: one.tolist() for name, one in self._counts.items()}
        found: dict[str, tuple[int, ...]] = {}
        for name, counts in (item for (of_rank,) in gather_findings([here]) for item in of_rank.items()):
            found[name] = tuple(map(sum, zip(found.get(name, (0,) * len(counts)), counts, strict=True)))
        return found
