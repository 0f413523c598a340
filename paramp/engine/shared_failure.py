"""A failure on one rank, raised by every rank in the same call.

A rank on which a batch fails (its data, the model's forward or backward, the criterion) does not raise at once: the
others would wait for it in the next collective. It records the error, takes part in what follows, and sets a flag in
the next all-reduce of all ranks, that of the loss or of the step. If the flag is set, every rank raises: its own error
if it has one, else an error with the message and the coordinates of the rank that failed.

Along the tensor axis, and along the data axes if parameters are sharded over them or tokens go to experts there, ranks
have collectives in the forward and backward themselves. If one of them fails alone, the others wait there forever; so
it raises at once, and the job ends when it leaves the context.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist

from ..base.collectives import gather_objects
from ..base.errors import AfterBatchError, ConfigError
from ..base.observer_spans import STEP
from ..base.torch_internals import expect
from ..distributed.context import BATCH_ROLES, ParallelContext
from ..distributed.first_failure import SECONDS_OF_GRACE, is_lost_connection
from ..distributed.phase_of_rank import SAVE, WAITING
from ..scaling.step_decision import HostCopy

expect("torch.distributed.distributed_c10d")

KINDS = ConfigError, ValueError, RuntimeError
"""The exceptions of the other ranks: the first that is a base class of the error's, else the last."""
IN_BATCH = WAITING - {STEP, SAVE}
"""The phases of a rank in a batch."""
SAME_CALLS = "call both equally often on every rank, and not under a condition such as `if rank == 0`"
SAME_KIND = "in one accumulation window; return the same kind for every microbatch, on every rank"


class SharedFailure:
    """The failure of this rank, until every rank has raised it. One for each engine of ``context``.

    Attributes:
        is_alone: whether this rank has failed alone, while others wait for it.
        num_failed: the sum of the flags of the last step, which is read in the next call if it is late.
        is_shared: whether failures are known only from a sum over ranks, or on a GPU; else they are raised at once.
    """

    def __init__(self, context: ParallelContext, *, data_ranks_wait: bool) -> None:
        """``data_ranks_wait``: for each other in forwards."""
        self._context = context
        self._key = f"paramp/failed_batch/{context.serial}/{context.num_engines}"
        axes = context.axes_of("tensor", *(BATCH_ROLES if data_ranks_wait else ()))
        self._axes = "data and tensor axes" if data_ranks_wait else "tensor axis"
        groups = context.ranks_along(axes).tolist()
        self._peers = next(ranks for ranks in groups if context.rank in ranks)
        self._num_batches = 0
        self._met: set[str] = set()
        self._local_error: Exception | None = None
        self.is_alone = False
        self.find_late: Callable[[], Exception | None] = lambda: None
        """The error of this rank, None if it has none, that only the device knew of; called when ranks have failed."""
        self.kind: str | None = None
        """What the losses of this window are on this rank, for an error if ranks differ."""
        self._published_kind: str | None = None
        self.num_failed = HostCopy(1, torch.float64, context.device)
        self.is_shared = context.world_size > 1 or self.num_failed.is_late

    def check_not_alone(self) -> None:
        """Raise on a rank that has failed alone: the others take part in none of what it would do now."""
        if self.is_alone:
            raise RuntimeError("a batch failed on this rank alone, and others wait for it in the model; end the job")

    def begin_batch(self) -> None:
        """Count a batch, on every rank; raise on a rank that has failed alone."""
        self.check_not_alone()
        self._num_batches += 1

    def record(self, error: Exception) -> None:
        """Keep ``error``, of a batch on this rank, for the next all-reduce; raise it at once if there will be none."""
        self.raise_if_alone(error)
        self._local_error = self._local_error or error

    def raise_if_alone(self, error: Exception) -> None:
        """Raise ``error``, of a batch on this rank, if the other ranks cannot take part in what follows."""
        alone = self.is_alone or self._context.world_size == 1 or is_lost_connection(error)
        if not alone and not isinstance(error, AfterBatchError) and not self._peers_failed_too():
            self.is_alone = alone = True
            error.add_note(f"paramp: other ranks of the {self._axes} did not fail, and wait for this one; end the job")
        if alone:
            raise error

    def raise_alone(self, error: Exception) -> NoReturn:
        """Raise ``error`` of a batch for which other ranks wait, or will wait, in collectives of it."""
        self.is_alone = True
        raise error

    def take(self) -> Exception | None:
        """Return the recorded error, and clear it."""
        error, self._local_error = self._local_error, None
        return error

    def flag(self) -> torch.Tensor:
        """1 if this rank failed, else 0; 1-dim float64 of one element, to be summed over all ranks."""
        return torch.full((1,), float(self._local_error is not None), dtype=torch.float64, device=self._context.device)

    def publish(self, num_failed: torch.Tensor, *, wait: bool = False) -> None:
        """Raise on every rank if the sum of the flags, 0-dim, is not 0; called only with :attr:`is_shared`.

        On a GPU, without ``wait``, the host does not wait for the sum: the next :meth:`check` raises.
        """
        self._published_kind = self.kind
        if self.num_failed.is_late and not wait:
            self.num_failed.start(num_failed)
        elif num_failed:
            self._raise(self._found())

    def check(self) -> None:
        """Raise on every rank if a published sum was not 0; and on a rank that has failed alone."""
        self.check_not_alone()
        if self.num_failed.take():
            self._raise(self._found())

    def _found(self) -> Exception | None:
        """The error of this rank, when the sum of all flags was not 0."""
        late = self.find_late()
        return self.take() or late

    def agree(self, error: Exception | None, group: dist.ProcessGroup | None = None) -> None:
        """Raise on every rank of ``group`` (None: the world) if one has an ``error``; a collective.

        On a rank that has failed alone it raises at once.
        """
        self.check_not_alone()
        if error is not None and (self._context.world_size == 1 or is_lost_connection(error)):
            raise error
        num_failed = torch.full((1,), float(error is not None), device=self._context.device)
        dist.all_reduce(num_failed, group=group)
        if num_failed:  # the host waits
            self._raise(error, group)

    def meet(self, function: str, phases: Collection[str], does: str) -> None:
        """Wait, the first time, for all ranks to come here for ``function``: a place that a rank may reach by mistake.

        Not a collective: what other ranks wait in, if they do not come, is one. With a heartbeat only. ``does``: what
        this rank does here.

        Raises:
            RuntimeError: another rank is in one of ``phases`` of this step, so that it will not come.
        """
        heartbeat = self._context.heartbeat
        if heartbeat is None or function in self._met:
            return
        self._met.add(function)

        def elsewhere() -> str:
            found = heartbeat.seen_in(phases)
            return found and f"{found}, and {self._context.name_of(self._context.rank)} {does}; {SAME_CALLS}"

        self._context.departures.gather(f"{self._key}/{function}", function, elsewhere)

    def agree_in_step(self, error: Exception | None) -> None:
        """:meth:`agree` in a ``step()`` without a backward since the last one, which may be this rank's alone."""
        self.meet("step", IN_BATCH, "steps without a batch since the last step")
        self.agree(error)

    def _raise(self, own: Exception | None, group: dist.ProcessGroup | None = None) -> NoReturn:
        if own is not None and self._context.world_size == 1:
            raise own
        name = self._context.name_of(self._context.rank)
        described = None if own is None else (_kind(own), _text(own), name)
        everyone, kinds = zip(*gather_objects((described, (self._published_kind, name)), group), strict=True)
        alike = len({failure and failure[1] for failure in everyone}) == 1
        if own is not None and (alike or not isinstance(own, StopIteration)):  # which alone would end a loop silently
            raise own
        first_of = {kind: rank for kind, rank in reversed(kinds) if kind}
        if not any(everyone) and len(first_of) > 1:
            (one, rank), (other, another) = first_of.items()
            raise ValueError(f"criterion: returned {one} on {rank}, and {other} on {another} {SAME_KIND}")
        kind, text, rank = next(failure for failure in everyone if failure is not None)
        raise KINDS[kind](text if rank in text else f"{text}; on {rank}")

    def failed_alike(self, error: BaseException, number: int) -> bool:
        """Whether the forward of this ``number`` in the user's loop fails on all ranks that meet in it, as here.

        The answer, for which a rank may wait, is the same on each of them that asks.
        """
        if len(self._peers) == 1:
            return True
        if isinstance(error, AfterBatchError) or not isinstance(error, Exception) or is_lost_connection(error):
            return False
        what = f"forward/{number}"
        answer = str(self._peers_failed_too(what))
        key = f"{self._key}/{what}/answer/{self._peers[0]}"
        return dist.distributed_c10d._get_default_store().compare_set(key, "", answer) == b"True"

    def _peers_failed_too(self, what: str | None = None) -> bool:
        """Whether all ranks failed that have collectives with this one in the model; ``what``: None for a batch."""
        if len(self._peers) == 1:
            return True
        # Not a collective: ranks that did not fail would not take part in it.
        store, key = dist.distributed_c10d._get_default_store(), f"{self._key}/{what or self._num_batches}"
        store.set(f"{key}/{self._context.rank}", "")
        try:
            store.wait([f"{key}/{rank}" for rank in self._peers], timedelta(seconds=SECONDS_OF_GRACE))
        except RuntimeError:  # from the store, after the timeout
            return False
        return True


def _kind(error: Exception) -> int:
    if isinstance(error, StopIteration):
        return KINDS.index(ValueError)
    return next((index for index, kind in enumerate(KINDS) if isinstance(error, kind)), len(KINDS) - 1)


def _text(error: Exception) -> str:
    text = str(error)
    if isinstance(error, StopIteration):
        return "data_iter: has no further batch, but other ranks have one"
    return (
        text if isinstance(error, ConfigError) or text.startswith("criterion: ") else f"{type(error).__name__}: {text}"
    )
