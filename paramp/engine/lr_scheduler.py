"""A learning-rate scheduler that advances only with optimizer steps that were made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.optim.lr_scheduler import LRScheduler

from ..base.errors import ConfigError
from .engine import Engine

HAS_STEPPED = "engine_has_stepped"
SCHEDULERS = "schedulers"
"""The key of the states of several schedulers."""
Schedulers: TypeAlias = LRScheduler | Sequence[LRScheduler]


class Scheduler:
    """A learning-rate scheduler whose ``step()`` advances only if the engine has stepped since the last call.

    It does not advance after a skipped step or while gradients accumulate. Other attributes are those of the wrapped
    scheduler, which are set there too; of several, ``schedulers``, the first one's, to read only. On a GPU the host
    does not wait for the decision of a step: the scheduler advances when the next step begins, or when one of its
    attributes is read.
    """

    optimizer: torch.optim.Optimizer
    base_lrs: list[float | torch.Tensor]
    last_epoch: int

    def __init__(self, schedulers: Sequence[LRScheduler], engine: Engine) -> None:
        self._schedulers = tuple(schedulers)
        self._engine = engine
        self._seen = engine.num_steps
        self._due: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        engine.before_step.append(self._advance)

    def step(self, *args: Any, **kwargs: Any) -> None:
        self._advance()
        self._due = args, kwargs
        if self._engine.context.device.type != "cuda":
            self._advance()

    def _advance(self) -> None:
        if self._due is None:
            return
        (args, kwargs), self._due = self._due, None
        steps = self._engine.num_steps
        if steps > self._seen:
            self._seen = steps
            for scheduler in self._schedulers:
                scheduler.step(*args, **kwargs)

    @property
    def schedulers(self) -> tuple[LRScheduler, ...]:
        """The wrapped schedulers, up to date."""
        self._advance()
        return self._schedulers

    def get_last_lr(self) -> list[Any]:
        """The learning rates of the schedulers' param groups, one scheduler after the other."""
        return [rate for scheduler in self.schedulers for rate in scheduler.get_last_lr()]

    def state_dict(self) -> dict[str, Any]:
        """The wrapped scheduler's, and ``engine_has_stepped``: whether, since the last call of :meth:`step`.

        Of several schedulers a list of states, under ``schedulers``.
        """
        states = [scheduler.state_dict() for scheduler in self.schedulers]
        state = states[0] if len(states) == 1 else {SCHEDULERS: states}
        return state | {HAS_STEPPED: self._engine.num_steps > self._seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a ``state_dict()`` of this or of the wrapped scheduler, at the engine's current step."""
        state = dict(state_dict)
        has_stepped = bool(state.pop(HAS_STEPPED, False))
        states = state.get(SCHEDULERS, [state])
        if len(states) != len(self._schedulers):
            raise ConfigError(
                f"lr_scheduler: got the states of {len(states)} schedulers, expected those of {len(self._schedulers)}; "
                "initialize with the schedulers that were saved, or load with weights_only=True"
            )
        self._due = None
        self._seen = self._engine.num_steps - has_stepped
        if has_stepped:  # perhaps in another process: torch's schedulers warn if no step came before
            for scheduler in self._schedulers:
                scheduler.optimizer._opt_called = True  # type: ignore[attr-defined]
        for scheduler, saved in zip(self._schedulers, states, strict=True):
            scheduler.load_state_dict(saved)

    if not TYPE_CHECKING:  # it would hide misspelled names; `schedulers` has what only one class of schedulers has

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_"):  # an incomplete copy has no attributes yet
                raise AttributeError(name)
            return getattr(self.schedulers[0], name)

        def __setattr__(self, name: str, value: Any) -> None:
            is_own = name.startswith("_") or hasattr(type(self), name)
            if is_own or not any(hasattr(scheduler, name) for scheduler in self.schedulers):
                super().__setattr__(name, value)
            elif len(self._schedulers) > 1:
                raise AttributeError(
                    f"lr_scheduler: {name!r} is an attribute of {len(self._schedulers)} schedulers; set it on each of "
                    "lr_scheduler.schedulers that it is meant for"
                )
            else:
                setattr(self._schedulers[0], name, value)


def build_schedulers(
    lr_scheduler: Schedulers | Callable[[torch.optim.Optimizer], LRScheduler] | None,
    optimizers: Sequence[torch.optim.Optimizer],
) -> list[LRScheduler]:
    """``lr_scheduler`` as a list, or the scheduler that it returns for each of ``optimizers`` if it is a callable.

    Raises:
        ConfigError: it is nothing of that, or a scheduler steps none of ``optimizers``, or one that another steps.
    """
    if lr_scheduler is None:
        return []
    if isinstance(lr_scheduler, LRScheduler):
        schedulers = [lr_scheduler]
    elif callable(lr_scheduler):
        schedulers = [lr_scheduler(optimizer) for optimizer in optimizers]
    elif isinstance(lr_scheduler, Sequence) and all(isinstance(each, LRScheduler) for each in lr_scheduler):
        schedulers = list(lr_scheduler)
    else:
        raise ConfigError(
            f"lr_scheduler: got {lr_scheduler!r}, expected a scheduler, a callable that makes one, or with several "
            "optimizers a sequence of schedulers"
        )
    stepped = [id(getattr(scheduler, "optimizer", optimizers[0])) for scheduler in schedulers]
    if not set(stepped) <= set(map(id, optimizers)):
        raise ConfigError("lr_scheduler: steps another optimizer than the one given; create it from that one")
    if len(set(stepped)) < len(stepped):
        raise ConfigError("lr_scheduler: got two schedulers of one optimizer, expected at most one for each")
    return schedulers
