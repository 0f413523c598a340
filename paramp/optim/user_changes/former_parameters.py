"""Parameters of the model that ``initialize`` was given, in whose place the model has others since.

Shards, and what is filled from ``meta``, are new parameters. A script that has collected parameters before, for a
penalty in the criterion or to freeze or clamp them, or a module that keeps some in a list too, still has the old ones.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import nn


class Former(NamedTuple):
    """A parameter that was replaced on this rank, by its name."""

    name: str
    reference: weakref.ref[nn.Parameter]
    """Its memory is not kept."""
    state: tuple[bool, int]
    """The :func:`_state` that :func:`check_former` expects."""


def former_parameters(names_of: Mapping[nn.Parameter, Sequence[str]], module: nn.Module) -> list[Former]:
    """Those in whose place ``module``, of this rank, has others; ``names_of``: all names of each one before."""
    found = dict(module.named_parameters(remove_duplicate=False))
    return [
        Former(name, weakref.ref(one), _state(one))
        for one, names in names_of.items()
        for name in [next((name for name in names if name in found), None)]
        if name is not None and found[name] is not one and one.grad is None
    ]


def check_former(former: list[Former]) -> None:
    """Raise a RuntimeError if one of them has got a gradient, which is dropped, or was changed; forget dead ones."""
    alive = [(one, parameter) for one in former if (parameter := one.reference()) is not None]
    former[:] = [one for one, _ in alive]
    problems = []
    for one, parameter in alive:
        if parameter.grad is not None:
            parameter.grad = None
            problems.append(f"{one.name!r} of the model that initialize was given has a gradient")
        elif _state(parameter) != one.state:
            problems.append(f"{one.name!r} of the model that initialize was given was changed")
    if problems:
        raise RuntimeError(
            f"{problems[0]}, but the engine trains another parameter in its place, such as a shard, so that this "
            "would be lost; take parameters from engine.module, and for a penalty on weights use the optimizer's "
            "weight_decay, or compute it in the model's forward, from attributes such as self.weight"
        )


def _state(parameter: nn.Parameter) -> tuple[bool, int]:
    """Whether it is trained, and how often it was changed in place.

    A frozen one may share its memory, and so the count, with the one in its place.
    """
    return parameter.requires_grad, parameter._version if parameter.requires_grad else 0
