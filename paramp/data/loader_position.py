"""The position of a loader in its epoch, which checkpoints save::

engine, loader, *_ = paramp.initialize(model, optimizer, criterion, loader)
engine.load(path)  # of a run that was stopped in the middle of an epoch
for epoch in range(loader.epoch, epochs):
    for x, y in loader:  # first the rest of that epoch
        ...
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch
from torch.utils.data import DataLoader

from ..base.errors import ConfigError
from ..distributed.rng import derive_seed
from .sharded_sampler import ShardedSampler
from .worker_signals import start_workers

T_co = TypeVar("T_co", covariant=True)
EVALUATION: ContextVar[Callable[[WithPosition], None] | None] = ContextVar("EVALUATION", default=None)
"""During an evaluation by the engine: called with each sharded loader of which an iteration begins."""


@dataclass(eq=False)
class LoaderPosition:
    """The position in a sharded loader: the epoch, and the number of batches yielded in it."""

    _generator: torch.Generator
    """The loader's generator, which seeds its workers; reseeded in each epoch."""
    _seed: int
    _unit: int
    """How many samples (or batches, if batches are sharded) one batch of a rank is over all ranks."""
    sampler: ShardedSampler | None
    """The loader's sampler, which skips items on a resume. None: batches are read and dropped."""
    _items_per_batch: int
    """The sampler's items in one batch."""
    own_samplers: list[Any] = field(default_factory=list)
    """Samplers of the user's that shard by themselves; each iteration tells them the epoch, unless the script has told
    them one since the last iteration or load."""
    order: Callable[[], dict[str, int]] = field(init=False, default=dict)
    """What the order of the samples in an epoch depends on beside its number, as a warning calls it."""
    begins_anew: bool = field(init=False, default=False)
    """True for a test loader: after a load, the next iteration begins an epoch; it does not continue one."""
    _next: int = field(init=False, default=0)
    skip: int = field(init=False, default=0)
    """How many batches of its epoch the next iteration leaves out: those before a loaded position."""
    _current: _EpochIterator | None = field(init=False, default=None)
    _calls: list[_SetEpoch] = field(init=False)
    """Of ``own_samplers``."""
    _numbers: list[Any] = field(init=False, default_factory=list)
    """What ``own_samplers`` were told for an epoch that was begun; empty: its number."""

    def __post_init__(self) -> None:
        self._calls = [_SetEpoch.of(sampler) for sampler in self.own_samplers]

    @property
    def _next_epoch(self) -> int:
        return self._next if self.sampler is None else self.sampler.epoch

    @property
    def epoch(self) -> int:
        """The epoch of the last batch, or the next one if that epoch is over; after a load, the one to continue."""
        return self._next_epoch if self._current is None else self._current.epoch

    @property
    def iterator(self) -> Iterator[Any] | None:
        """The last iteration; None before one, and after a load."""
        return self._current

    @property
    def given(self) -> int:
        """How many batches of :attr:`epoch` this rank has got."""
        return self.skip if self._current is None else self._current.yielded

    @property
    def is_running(self) -> bool:
        """Whether more batches may be asked of the last iteration: it has not come to its end."""
        return self._current is not None and not self._current.over

    def begin(self, iterate: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Iterate over the next epoch, or over the rest of a resumed one; ``iterate`` makes the iterator."""
        if self._current is not None and 0 < self._current.yielded == self._current.skipped:
            self._go_to(self._current.epoch)  # nothing was read of this rest of an epoch
            self.skip = self._current.skipped
        elif self._current is not None:
            self._numbers = []
        skip, self.skip = self.skip, 0
        epoch = self._next_epoch
        self._next = epoch + 1
        for index, call in enumerate(self._calls):
            call.look()
            if not call.by_script:
                call(self._numbers[index] if self._numbers else epoch)
            call.by_script = False
        self._numbers = [call.number for call in self._calls]
        self._generator.manual_seed(derive_seed(self._seed, epoch))
        if self.sampler is not None:
            self.sampler.skip = skip * self._items_per_batch
        batches = iterate()
        if self.sampler is None and skip:
            with torch.random.fork_rng(devices=[]):  # their random numbers were drawn before the save
                for _ in itertools.islice(batches, skip):
                    pass
        for call in self._calls:
            call.overlook()
        self._current = _EpochIterator(batches, epoch, skip, skip, self._calls)
        return self._current

    @contextmanager
    def aside(self) -> Iterator[None]:
        """A context in which an iteration is over the whole of :attr:`epoch`; then the position is what it was."""
        before = self._current, self._next, self.skip, self._numbers, self._generator.get_state()
        for call in self._calls:
            call.look()
        told = [(call, call.number, call.by_script) for call in self._calls]
        sampler, epoch = self.sampler, self.epoch
        of_sampler = None if sampler is None else (sampler.epoch, sampler.skip)
        self._current, self.skip, self._numbers = None, 0, []
        self._go_to(epoch)
        try:
            yield
        finally:
            self._current, self._next, self.skip, self._numbers, state = before
            for call, number, by_script in told:
                if number is not None:
                    call(number)
                call.by_script = by_script
            self._generator.set_state(state)
            if sampler is not None and of_sampler is not None:
                sampler.epoch, sampler.skip = of_sampler  # not yet read, if an iterator was made and not used

    def state_dict(self) -> dict[str, Any]:
        """``epoch``, and ``given``: the samples (or batches) of it that all ranks together have yielded.

        In an epoch also its ``order``; and ``told``, what its samplers were told for it, if that is another number.
        """
        state: dict[str, Any] = {"epoch": self.epoch, "given": self.given * self._unit}
        if self.given and (order := self.order()):
            state["order"] = order
        if self.given and any(number != self.epoch for number in self._numbers):
            state["told"] = self._numbers
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state`` in the next iteration; the number of data ranks may differ."""
        if self._current is not None:
            self._current.stale = True
        epoch, given, numbers = state["epoch"], state["given"], state.get("told", [])
        if self.begins_anew and given:
            epoch, given, numbers = epoch + 1, 0, []
        self._current = None
        self._numbers = numbers if len(numbers) == len(self._calls) else []
        for call in self._calls:
            call.look()
            call.by_script = False
        self._go_to(epoch)
        self.skip, rest = divmod(given, self._unit)
        if rest:
            warnings.warn(
                f"loader: the run had read {given} samples of its epoch, not a multiple of the {self._unit} "
                f"that all ranks now read at once; the last {rest} are repeated",
                stacklevel=2,
            )
        before, now = state.get("order", {}), self.order() if given else {}
        names = [name for name in now if before.get(name, now[name]) != now[name]]
        if names:
            changed = "; ".join(f"{name} {now[name]}, was {before[name]}" for name in names)
            warnings.warn(
                f"loader: the checkpoint is from the middle of an epoch in another order ({changed}), so that samples "
                "of it may come twice or not at all; resume with what it had",
                stacklevel=2,
            )

    def _go_to(self, epoch: int) -> None:
        self._next = epoch
        if self.sampler is not None:
            self.sampler.set_epoch(epoch)


@dataclass(eq=False)
class _SetEpoch:
    """``set_epoch`` of a sampler of the user's, in its place: it keeps what the sampler was told, and who did.

    A script calls it, maybe with the number from before, and not every sampler shows a number as ``epoch``: so calls
    are seen. Or it assigns ``epoch``, or calls that of a sampler inside: so :meth:`look` compares what is shown. What
    changes while the sampler is read is its own count, of passes maybe: :meth:`overlook`.
    """

    _call: Callable[..., Any]
    number: Any
    """What the sampler was told last; None if that is not known."""
    _sampler: Any
    _shown: Any
    """Its ``epoch`` after the last call or look, or after it was read."""
    by_script: bool = False
    """Whether the script has told it since the last iteration of a loader began, or since a load."""

    @staticmethod
    def of(sampler: Any) -> _SetEpoch:
        """That of ``sampler``, which loaders may share."""
        if not hasattr(sampler, "__dict__"):
            raise ConfigError(
                f"its {type(sampler).__name__} has __slots__, so that calls of its set_epoch cannot be seen; leave out "
                "__slots__ (slots=True of a dataclass), or derive the class from torch.utils.data.Sampler"
            )
        found = vars(sampler).get("set_epoch")
        if not isinstance(found, _SetEpoch):
            epoch = getattr(sampler, "epoch", None)
            found = vars(sampler)["set_epoch"] = _SetEpoch(sampler.set_epoch, epoch, sampler, epoch)
        return found

    def __call__(self, *args: Any, **options: Any) -> Any:
        result = self._call(*args, **options)
        self.number, self.by_script = next(iter((*args, *options.values())), None), True
        self._shown = getattr(self._sampler, "epoch", None)
        return result

    def look(self) -> None:
        """See an epoch that came without a call here."""
        if (epoch := getattr(self._sampler, "epoch", None)) != self._shown:
            self.number, self.by_script, self._shown = epoch, True, epoch

    def overlook(self) -> None:
        """Take the epoch that is shown now as the sampler's own count."""
        self._shown = getattr(self._sampler, "epoch", None)


@dataclass(eq=False)
class _EpochIterator:
    """The iterator of an epoch; counts the batches it yields."""

    batches: Iterator[Any]
    epoch: int
    yielded: int
    skipped: int
    """How many of ``yielded`` it left out: those before a loaded position."""
    calls: list[_SetEpoch]
    """Of the user's samplers."""
    over: bool = field(init=False, default=False)
    stale: bool = field(init=False, default=False)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self.stale:
            raise RuntimeError(
                "loader: this iterator was made before a checkpoint was loaded; call iter(loader) again, or roll back "
                "with engine.load(..., weights_only=True), which leaves loaders where they are"
            )
        for call in self.calls:
            call.look()
        try:
            batch = next(self.batches)
        except StopIteration:
            if self.yielded:
                self.epoch, self.yielded = self.epoch + 1, 0
            elif not self.over and EVALUATION.get() is None:  # where a rank may have none of few samples
                _refuse_empty(self.batches, self.epoch)
            self.over = True
            raise
        finally:
            for call in self.calls:
                call.overlook()
        self.yielded += 1
        return batch

    def __len__(self) -> int:
        return len(self.batches)  # type: ignore[arg-type]


def _refuse_empty(batches: Iterator[Any], epoch: int) -> None:
    """Raise a ConfigError for an iteration without a batch; of a stream, which may have none, warn after the first."""
    problem = (
        "loader: this iteration gave no batch; its sampler or dataset may be used up, as an iterator is after one "
        "iteration: let its __iter__ begin anew each time"
    )
    if known_length(batches):
        raise ConfigError(problem)
    if epoch:
        warnings.warn(problem, stacklevel=4)


def known_length(items: Any) -> int | None:
    """``len(items)``; None if it is not known before they are read."""
    try:
        return len(items)
    except (TypeError, NotImplementedError):
        return None


class _Epoch:
    """Reads a loader's epoch; not a property, so that a user's class of loaders may set an attribute of this name."""

    def __get__(self, loader: Any, kind: type) -> int:
        return cast(int, self if loader is None else loader.position.epoch)


class WithPosition:
    """A mixin for the class of a sharded loader; it counts the batches it yields."""

    position: LoaderPosition

    epoch = _Epoch()
    """The epoch that the loader is in, 0 before the first; after a load, the one to continue.

    The next one from the moment at which an iteration ends, so that a loop that resumes is
    ``for epoch in range(loader.epoch, epochs)``.
    """

    def __iter__(self) -> Iterator[Any]:
        if (evaluation := EVALUATION.get()) is not None:
            evaluation(self)
        iterate: Callable[[], Iterator[Any]] = super().__iter__  # type: ignore[misc]
        return self.position.begin(lambda: start_workers(self, iterate))

    def state_dict(self) -> dict[str, Any]:
        """The loader's position, for checkpoints."""
        return self.position.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a saved position in the next iteration."""
        self.position.load_state_dict(state_dict)


class ShardedLoader(WithPosition, DataLoader[T_co]):  # type: ignore[misc]
    """A ``DataLoader``, sharded: what :func:`paramp.initialize` returns for one, also of a subclass."""
