"""Which parameters of the model have a gradient: ranks learn it in the one all-reduce of a step."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence

import torch

from ..distributed.context import ParallelContext
from ..optim.flat_buffer import FlatParam

IS_TRAINED = operator.attrgetter("requires_grad")
TRAINED = 2.0**-20  # of fewer than 2**20 ranks: their sum stays exact, and below 1


class Presence:
    """Which parameters of the whole model have a gradient, on this rank and on any; they go by their first names.

    Ranks with other parts of the batch or of the model may have gradients for other parameters, and copies of a tied
    parameter have different names.

    Attributes:
        any_frozen: whether a parameter of this rank is frozen, as of the last call of :meth:`here`.
    """

    def __init__(self, params: Sequence[FlatParam], first_names: Mapping[str, str], context: ParallelContext) -> None:
        """``params``: this rank's; ``first_names``: for each name in the whole model, the parameter's first."""
        self._params, self._first_names, self._context = params, first_names, context
        self._parameters = [param.parameter for param in params]
        self._here: tuple[tuple[object, ...], torch.Tensor] | None = None
        self.any_frozen = False

    def here(self, absent: Sequence[FlatParam]) -> torch.Tensor:
        """Of each parameter of the model 1 if it has a gradient on this rank, and :data:`TRAINED` if it is trained.

        1-dim float64; of a tied one the sum over its copies on this rank. A gradient of an earlier batch stays when its
        parameter is frozen. ``absent``: this rank's parameters without a gradient.
        """
        key = tuple(param.name for param in absent), tuple(map(IS_TRAINED, self._parameters))
        if self._here is None or self._here[0] != key:  # cached: a copy to a GPU synchronises
            without = set(key[0])
            numbers = dict.fromkeys(self._first_names.values(), 0.0)
            for param, is_trained in zip(self._params, key[1], strict=True):
                numbers[self._first_names[param.name]] += (param.name not in without) + TRAINED * is_trained
            self._here = key, torch.tensor([*numbers.values()], dtype=torch.float64).to(self._context.device)
            self.any_frozen = not all(key[1])
        return self._here[1]

    def absent_everywhere(self, absent: Sequence[FlatParam], everywhere: torch.Tensor) -> list[FlatParam]:
        """The parameters of ``absent`` that have no gradient on any rank; ``everywhere``: the sum of :meth:`here`.

        Raises:
            RuntimeError: a parameter is frozen here and trained on another rank.
        """
        numbers = dict(zip(dict.fromkeys(self._first_names.values()), everywhere.tolist(), strict=True))
        frozen = [param.name for param in self._params if not param.parameter.requires_grad]
        alone = [repr(name) for name in frozen if numbers[self._first_names[name]] % 1]
        if alone:
            raise RuntimeError(
                f"step(): {', '.join(alone[:3])}{' ...' * (len(alone) > 3)} on "
                f"{self._context.name_of(self._context.rank)} does not require a gradient, but does on another rank: "
                "requires_grad was changed after initialize on some ranks only; change it on every rank alike"
            )
        return [param for param in absent if numbers[self._first_names[param.name]] < 1]
