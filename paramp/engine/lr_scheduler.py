"""A learning-rate scheduler that advances only with steps that were made."""

from __future__ import annotations

from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from .engine import Engine

__all__ = ["Scheduler"]


class Scheduler:
    """A learning-rate scheduler that stands still while the optimizer does.

    ``step()`` advances the wrapped scheduler only if the engine has stepped since the last call: not after a step
    skipped for an overflow, and not while gradients accumulate. Everything else is the wrapped scheduler's.

    On a GPU the host does not wait to know: the scheduler advances when the next step begins, or when something of it
    is read.
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
        """Make the step that is due."""
        if self._due is None:
            return
        (args, kwargs), self._due = self._due, None
        steps = self._engine.num_steps
        if steps > self._seen:
            self._seen = steps
            self._scheduler.step(*args, **kwargs)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from what the wrapped scheduler's ``state_dict()`` gave, at the engine's present step."""
        self._due = None
        self._seen = self._engine.num_steps
        self._scheduler.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # also while a copy of it is being made
            raise AttributeError(name)
        self._advance()
        return getattr(self._scheduler, name)
