"""Which epoch a loader is in, and how many of its batches were given out: what a checkpoint saves of it."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ..distributed.rng import derive_seed
from .sharded_sampler import ShardedSampler


@dataclass(eq=False)
class LoaderPosition:
    """Where the user of a sharded loader is: in which epoch, and how many of its batches were given out."""

    _generator: torch.Generator
    """Of the loader, from which its workers get their seeds: another one in each epoch."""
    _seed: int
    _unit: int
    """What one batch of a rank stands for over all ranks: in samples, or in batches where these are sharded."""
    _sampler: ShardedSampler | None
    """The loader's, which can skip what was given before; None: batches are read and dropped."""
    _items_per_batch: int
    """That the sampler yields for one batch."""
    _next: int = 0
    _skip: int = 0
    _current: _Given | None = None

    @property
    def _next_epoch(self) -> int:
        return self._next if self._sampler is None else self._sampler.epoch

    def begin(self, iterate: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """The batches of the next epoch, or the rest of one, from the iterator that ``iterate`` makes."""
        skip, self._skip = self._skip, 0
        epoch = self._next_epoch
        self._next = epoch + 1
        self._generator.manual_seed(derive_seed(self._seed, epoch))
        if self._sampler is not None:
            self._sampler.skip = skip * self._items_per_batch
        batches = iterate()
        if self._sampler is None and skip:
            with torch.random.fork_rng(devices=[]):  # what was drawn for these was drawn before
                for _ in itertools.islice(batches, skip):
                    pass
        self._current = _Given(batches, epoch, skip)
        return self._current

    def state_dict(self) -> dict[str, int]:
        """``epoch`` and, in all ranks' samples (or batches), how much of it was given out."""
        current = self._current
        if current is None:
            return {"epoch": self._next_epoch, "given": self._skip * self._unit}
        return {"epoch": current.epoch, "given": current.given * self._unit}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Let the next iteration go on from ``state``, of this number of data ranks or another."""
        if self._current is not None:
            self._current.stale = True
        self._current, self._next = None, state["epoch"]
        if self._sampler is not None:
            self._sampler.set_epoch(state["epoch"])
        self._skip, rest = divmod(state["given"], self._unit)
        if rest:
            warnings.warn(
                f"loader: the run had read {state['given']} samples of its epoch, no multiple of the {self._unit} that "
                f"all ranks read at once now; the last {rest} come again",
                stacklevel=2,
            )


@dataclass(eq=False)
class _Given:
    """An iteration's batches, counted as they are given out."""

    batches: Iterator[Any]
    epoch: int
    given: int
    stale: bool = False

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self.stale:
            raise RuntimeError("loader: this iteration was begun before a checkpoint was loaded; begin another one")
        try:
            batch = next(self.batches)
        except StopIteration:
            if self.given:
                self.epoch, self.given = self.epoch + 1, 0
            raise
        self.given += 1
        return batch

    def __len__(self) -> int:
        return len(self.batches)  # type: ignore[arg-type]


class WithPosition:
    """Added to the class of a sharded loader: it counts the batches that it gives out."""

    position: LoaderPosition

    def __iter__(self) -> Iterator[Any]:
        return self.position.begin(super().__iter__)  # type: ignore[misc]

    def state_dict(self) -> dict[str, int]:
        """The loader's position, for checkpoints."""
        return self.position.state_dict()

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Go on from there."""
        self.position.load_state_dict(state_dict)
