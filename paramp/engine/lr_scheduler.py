"""A learning-rate scheduler that advances only with optimizer steps that were made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from ..base.errors import ConfigError
from .engine import Engine

HAS_STEPPED = "engine_has_stepped"


class Scheduler:
    """A learning-rate scheduler whose ``step()`` advances only if the engine has stepped since the last call.

    It does not advance after a skipped step or while gradients accumulate. Other attributes are those of the wrapped
    scheduler. On a GPU the host does not wait for the decision of a step: the scheduler advances when the next step
    begins, or when one of its attributes is read.
    """

    def __init__(self, scheduler: LRScheduler, engine: Engine) -> None:
        self._scheduler = scheduler
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
            self._scheduler.step(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        """The wrapped scheduler's, and ``engine_has_stepped``: whether, since the last call of :meth:`step`."""
        self._advance()
        return self._scheduler.state_dict() | {HAS_STEPPED: self._engine.num_steps > self._seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a ``state_dict()`` of this or of the wrapped scheduler, at the engine's current step."""
        self._due = None
        has_stepped = bool(state_dict.get(HAS_STEPPED))
        self._seen = self._engine.num_steps - has_stepped
        if has_stepped:  # perhaps in another process: torch's schedulers warn if no step came before
            self._engine.optimizer._opt_called = True  # type: ignore[attr-defined]
        self._scheduler.load_state_dict({name: value for name, value in state_dict.items() if name != HAS_STEPPED})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # an incomplete copy has no attributes yet
            raise AttributeError(name)
        self._advance()
        return getattr(self._scheduler, name)


def build_scheduler(
    lr_scheduler: LRScheduler | Callable[[torch.optim.Optimizer], LRScheduler] | None, optimizer: torch.optim.Optimizer
) -> LRScheduler | None:
    """``lr_scheduler``, or the scheduler that it returns for ``optimizer`` if it is a callable."""
    if lr_scheduler is None:
        return None
    if not isinstance(lr_scheduler, LRScheduler) and not callable(lr_scheduler):
        raise ConfigError(f"lr_scheduler: got {lr_scheduler!r}, expected a scheduler or a callable that makes one")
    scheduler = lr_scheduler if isinstance(lr_scheduler, LRScheduler) else lr_scheduler(optimizer)
    if getattr(scheduler, "optimizer", optimizer) is not optimizer:
        raise ConfigError("lr_scheduler: steps another optimizer than the one given; create it from that one")
    return scheduler
