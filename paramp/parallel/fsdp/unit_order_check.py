"""The order in which data ranks gather and reduce units: checked before each collective to be the same on each rank.

Ranks that ran different blocks would gather halves of two parameters, or wait for each other without end. So each rank
follows the orders of collectives that the ranks have agreed on, and asks the others, through the store of the launch,
only where it leaves them::

    first batch   [gather 1] ? [gather 2] ? [gather 3] ? [reduce 3] ? ...        ?: every rank posts what comes next
    later batches [gather 1]   [gather 2]   [gather 3]   [reduce 3]   ...        no messages
    one rank      [gather 1] ! [gather 3]                                        !: it posts that, and the others, who
                                                                                 wait for it in [gather 2], answer

Where known orders part, as with blocks that are left out at random, every rank posts each time. The host exchanges
these messages, so nothing waits for a GPU. On a GPU the others do not answer: a rank that leaves the known orders alone
raises after ``hang_timeout``.
"""

from __future__ import annotations

import itertools
import operator
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # missing in torch's stubs only

from ...base.backward_running import in_backward
from ...base.collectives import all_gather_single, broadcast_, reduce_scatter_single
from ...distributed.context import BATCH_ROLES, ParallelContext

FORWARD, BACKWARD, REDUCTION = range(3)
PLACES = "the forward of", "the backward of", "the reduction of the gradients of"
END = -1
"""In place of a collective: the end of a batch."""
FORK = -2
"""In place of the next collective: the known orders part here."""
LOSS = -3
"""A sum over the data ranks between a forward and its backward, for the loss."""
CHANGED = -4
"""And below, by what is trained now: before a batch, other parameters are trained than in the one before."""
SECONDS_BETWEEN_QUESTIONS = 0.5
"""A rank that waits so long for a collective asks whether another one has left the known orders."""
MAX_KNOWN = 2**16
"""Places in known orders, after which all ranks forget them and begin anew."""
DEFAULT_TIMEOUT = 300.0

_serials = itertools.count()


class UnitOrder:
    """The order of the units of this rank's stages, over the data ranks that have shards or replicas of them."""

    def __init__(self, context: ParallelContext) -> None:
        """A collective of the data ranks."""
        self._context = context
        self._ranks = _ranks_with(context, BATCH_ROLES)
        self._shards = set(_ranks_with(context, ("shard", "expert", "context")))
        self._runs_alone = dist.get_backend() == "fake"  # only this rank runs
        serial = torch.tensor(next(_serials), device=context.device)
        broadcast_(serial, context.batch_axis.group)
        key = f"paramp/units/{context.serial}/{serial.item()}/{self._ranks[0]}"
        self._store = PrefixStore(key, dist.distributed_c10d._get_default_store())
        self._names: list[str] = []
        self._known: dict[int, int] = {}  # what follows each place: a collective, or FORK
        self._place = 0  # a hash of the collectives since the beginning of the batch
        self._num_batches = self._num_collectives = 0
        self._num_posts = 0
        self._last = END  # what the ranks agreed on in the last post
        self._parameters: Sequence[str] = ()
        self._at_first: tuple[bool, ...] = ()
        self._trained: tuple[bool, ...] | None = None  # of the parameters, what the ranks have agreed on
        self._repeat: dict[int, Callable[[], Any]] = {}
        self._broken = ""
        self._failed = False  # in this batch ranks differed, and each of them has raised

    def follow(self, unit: Any, name: str) -> None:
        """Check each collective of ``unit``, one of FSDP2's, which ``name`` names in errors."""
        number = len(self._names)
        self._names.append(name)
        unit.set_custom_all_gather(_CheckedCollective(self, number, all_gather_single))
        unit.set_custom_reduce_scatter(_CheckedCollective(self, number, reduce_scatter_single))

    def watch(self, parameters: Sequence[str], trained: tuple[bool, ...]) -> None:
        """The names of all ``parameters`` of the units, and which are trained at first."""
        self._parameters, self._at_first = parameters, trained

    def begin(self, *, backward: bool) -> None:
        """Begin a batch; ``backward``: its orders are not those of a batch without."""
        self._place = int(backward)
        self._num_batches += 1
        self._num_collectives = 0
        self._failed = False

    def compare_trained(self, trained: tuple[bool, ...]) -> None:
        """Check that each data rank trains the same parameters in a batch, as their reductions have to have one size.

        A rank asks the others before its first batch, and when it has changed some. ``trained``: as of :meth:`watch`.

        Raises:
            RuntimeError: another rank has not changed them, or otherwise; on each rank that can be reached.
        """
        if trained == self._trained or self._runs_alone:
            return
        if self._broken:
            raise RuntimeError(self._broken)
        names = [repr(name) for name in itertools.compress(self._parameters, map(operator.ne, trained, self._at_first))]
        text = f"{', '.join(names[:3])}{' ...' * (len(names) > 3)}" if names else "none"
        self._store.set(f"changed/{self._context.rank}", text)
        self._agree(CHANGED - zlib.crc32(bytes(trained)), self._known.get(self._place))
        self._trained = trained

    def check(self, tag: int) -> None:
        """Check that every data rank runs the collective ``tag`` next, or is at the END of its batch.

        Raises:
            RuntimeError: another one runs another one, or does not answer; on each rank that can be reached.
        """
        if self._runs_alone:
            return
        if self._broken:
            raise RuntimeError(self._broken)
        # Some batches have a sum for the loss and others not, on all ranks alike: it does not part known orders.
        place = hash((self._place, tag)) if tag == LOSS else self._place
        known = self._known.get(place)
        expected = self._known.get(self._place) if known is None else known
        if known != tag:
            self._agree(tag, expected)
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            self._known[place] = tag if known is None else FORK
        if tag != LOSS:
            self._place = hash((self._place, tag))
        self._num_collectives += 1

    def run(self, tag: int, call: Callable[..., Any], output: torch.Tensor, given: torch.Tensor, **options: Any) -> Any:
        """Check and run the collective ``call`` of the unit, and wait for it on a CPU."""
        self.check(tag)
        is_async = options.pop("async_op", False)
        if is_async or output.device.type != "cpu" or self._runs_alone:
            return call(output, given, async_op=is_async, **options)
        sizes, dtype = (output.numel(), given.numel()), given.dtype
        self._repeat[tag] = lambda: call(*(torch.zeros(size, dtype=dtype) for size in sizes), **options)
        self._wait(call(output, given, async_op=True, **options), tag)
        return None

    def sum_for_loss_(self, values: torch.Tensor) -> None:
        """Sum ``values`` over the data ranks, in place: a collective between a forward and its backward.

        Nothing in a batch that has failed because ranks differ: the others do not come to it any more.
        """
        if self._failed or self._broken:
            return
        group = self._context.batch_axis.group
        self.run(LOSS, lambda output, _, **options: dist.all_reduce(output, group=group, **options), values, values)

    # ---------------------------------------------------------------------------------------------------- agreements

    def _agree(self, tag: int, expected: int | None) -> None:
        """Post ``tag``, and wait until every rank has posted it; on known orders ``expected`` follows."""
        leaves = expected not in (None, FORK)
        number = self._post(tag)
        if leaves:  # the others may be waiting in the collective that they expect
            self._store.set(f"left/{number}", f"{self._num_batches} {self._num_collectives}")
        if self._store.add(f"{number}/{tag}", 1) == len(self._ranks):
            self._forget(number - 1)
            self._store.set(f"{number}/agreed", "")
        limit = self._context.config.hang_timeout or DEFAULT_TIMEOUT
        began = asked = time.monotonic()
        while not self._store.check([f"{number}/agreed"]):
            time.sleep(0.0005 if (now := time.monotonic()) - began < SECONDS_BETWEEN_QUESTIONS else 0.02)
            if now - asked < SECONDS_BETWEEN_QUESTIONS:
                continue
            asked = now
            posted = self._posted(number)
            if len({*posted.values()}) > 1 and self._shards <= posted.keys():
                others = {*posted.values()} - {tag}  # they wait in what they have posted, if that is a collective
                self._fail(posted, (others.pop() if len(others) == 1 else expected) if leaves else None)
            if leaves and now - began > limit:
                self._broken = self._describe_alone(tag, cast(int, expected), posted, limit)
                raise RuntimeError(self._broken)
        self._last = tag

    def _post(self, tag: int) -> int:
        """Write what comes next on this rank. Returns the number of the agreement."""
        self._num_posts += 1
        self._store.set(f"of/{self._context.rank}", f"{self._num_posts} {tag}")
        return self._num_posts

    def _posted(self, number: int) -> dict[int, int]:
        """What each rank that takes part in the agreement ``number`` has posted."""
        posted = {}
        for rank in self._ranks:
            if self._store.check([f"of/{rank}"]):
                its_number, tag = map(int, self._store.get(f"of/{rank}").split())
                if its_number == number:
                    posted[rank] = tag
        return posted

    def _forget(self, number: int) -> None:
        """Delete the keys of a past agreement, which every rank has left."""
        if number:
            for key in (f"{number}/{self._last}", f"{number}/agreed"):
                self._store.delete_key(key)

    def _wait(self, work: Any, tag: int) -> None:
        """Wait for a collective, in which a rank that has left the known orders does not take part."""
        waiting = _Waiting(work, has_timeout=tag % 3 != REDUCTION)
        while not waiting.is_done():
            number = self._num_posts + 1
            here = f"{self._num_batches} {self._num_collectives - 1}"
            if self._store.check([f"left/{number}"]) and self._store.get(f"left/{number}").decode() == here:
                self._post(tag)
                try:
                    waiting.finish()  # the rank that left takes part now, so that later collectives match
                except RuntimeError:
                    self._broken = self._describe(self._posted(number))
                    raise RuntimeError(self._broken) from None
                self._fail(self._posted(number), None)

    # -------------------------------------------------------------------------------------------------------- errors

    def _fail(self, posted: Mapping[int, int], awaited: int | None) -> NoReturn:
        """Raise because of what ranks ``posted``, after taking part in the ``awaited`` collective of the others."""
        text = self._describe(posted)
        self._failed = True
        if awaited in self._repeat:
            self._repeat[awaited]()
        elif (awaited is not None and awaited > CHANGED) or self._context.device.type != "cpu":
            self._broken = text
        raise RuntimeError(text)

    def _describe(self, posted: Mapping[int, int]) -> str:
        if changed := [rank for rank, tag in posted.items() if tag <= CHANGED]:
            now = (f"{self._context.name_of(rank)} has changed {self._changed_on(rank)}" for rank in changed)
            return (
                "requires_grad was changed after initialize on some data ranks only, which reduce gradients together "
                f"(parallel.data.shard): {'; '.join(now)}; change it on every rank alike"
            )
        first = min(posted.values(), key=self._progress)
        running = [rank for rank, tag in posted.items() if tag == first]
        others = [(rank, tag) for rank, tag in posted.items() if tag != first]
        skipped = self._name(first) if first >= 0 and first % 3 == FORWARD else self._name_place(first)
        where = "; ".join(f"{self._context.name_of(rank)}, which is at {self._name_place(tag)}" for rank, tag in others)
        return _explain(f"{skipped} runs on {self._list(running)}, but is skipped on {where}")

    def _describe_alone(self, tag: int, expected: int, posted: Mapping[int, int], seconds: float) -> str:
        missing = [rank for rank in self._ranks if rank not in posted]
        return _explain(
            f"{self._context.name_of(self._context.rank)} is at {self._name_place(tag)}, where all ranks came to "
            f"{self._name_place(expected)} before, and {self._list(missing)} did not answer within {seconds:g} s"
        )

    def _progress(self, tag: int) -> tuple[int, int]:
        """How far in a batch a rank is that comes to ``tag``."""
        number, kind = divmod(tag, 3)
        if tag in (END, LOSS):
            return (2, 0) if tag == END else (0, len(self._names))
        return (0, number) if kind == FORWARD else (1, -number)

    def _changed_on(self, rank: int) -> str:
        return self._store.get(f"changed/{rank}").decode()

    def _name(self, tag: int) -> str:
        return self._names[tag // 3]

    def _name_place(self, tag: int) -> str:
        if tag < 0:
            return {END: "the end of the batch", LOSS: "the loss"}.get(tag, "a change of requires_grad")
        return f"{PLACES[tag % 3]} {self._name(tag)}"

    def _list(self, ranks: Sequence[int]) -> str:
        return ", ".join(map(self._context.name_of, ranks))


def _explain(what: str) -> str:
    return (
        "data ranks ran different blocks of the model, but gather the parameters of each together "
        f"(parallel.data.shard): {what}; run the same blocks on every data rank, in the same order: choose them by "
        "random numbers that are the same on every data rank, or by a decision that all ranks reduced together"
    )


def _ranks_with(context: ParallelContext, roles: Sequence[Any]) -> list[int]:
    """The ranks whose place differs from this rank's only on axes of ``roles``."""
    groups = context.ranks_along(context.axes_of(*roles)).tolist()
    return next(ranks for ranks in groups if context.rank in ranks)


class _Waiting:
    """Waits for a collective. gloo's reduce-scatters wait without a timeout, so that a thread has to do it."""

    def __init__(self, work: Any, *, has_timeout: bool) -> None:
        self._work = work
        self._error: RuntimeError | None = None
        self._thread = None if has_timeout else threading.Thread(target=self._run, daemon=True)
        if self._thread is not None:
            self._thread.start()

    def _run(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            self._error = error

    def finish(self) -> None:
        """Wait until the collective is done; raise its error."""
        if self._thread is None:
            self._work.wait()
            return
        self._thread.join()
        if self._error is not None:
            raise self._error

    def is_done(self) -> bool:
        """Wait for a while. Returns whether the collective is done; raises its error."""
        if self._thread is not None:
            self._thread.join(SECONDS_BETWEEN_QUESTIONS)
            if self._thread.is_alive():
                return False
            self.finish()
            return True
        try:
            self._work.wait(timedelta(seconds=SECONDS_BETWEEN_QUESTIONS))
        except RuntimeError:
            if not self._work.is_completed():  # the end of the while
                return False
            self._work.wait()  # raises its error; without one it ended just after the while
        return True


class _CheckedCollective:
    """What FSDP2 calls in place of ``call``, a collective of the unit ``number``."""

    def __init__(self, order: UnitOrder, number: int, call: Callable[..., Any]) -> None:
        self._order, self._tag, self._call = order, 3 * number, call

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, **options: Any) -> Any:
        kind = BACKWARD if in_backward() else FORWARD
        if self._call is reduce_scatter_single:
            kind = REDUCTION
        return self._order.run(self._tag + kind, self._call, output_tensor, input_tensor, **options)
