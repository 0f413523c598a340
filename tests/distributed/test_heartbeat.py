"""Every other rank names one that is stopped, with its phase; a failure is reported once; no other job is ended."""

import contextlib
import inspect
import json
import math
import re
import threading
from datetime import timedelta
from unittest import mock

import pytest
import torch
from commands import PYTHON, run
from pool import on_ranks
from small_engines import engine_of, train_step
from torch.distributed import HashStore, TCPStore, distributed_c10d

import paramp
from paramp.distributed import first_failure, heartbeat
from paramp.distributed.first_failure import Departures, ending_in_time
from paramp.distributed.heartbeat import Beat, Heartbeat, LivenessMonitor
from paramp.distributed.launch_from_torch_mpi_slurm import _make_heartbeat
from paramp.distributed.launcher_variables import LauncherRank
from paramp.distributed.phase_of_rank import SETUP, ProgressRecord

# ----------------------------------------------------------------------------- ranks of their own, on a shared clock

STOPPED = {  # case: the rank that is stopped, its name, the axis of the others' names, and its phase
    "forward": (2, "rank 2 (pp 2, dp 0, tp 0)", "pp", "in forward of microbatch 2, stage 2, step 2"),
    "backward": (1, "rank 1 (pp 1, dp 0, tp 0)", "pp", "in backward of microbatch 1, stage 1, step 2"),
    "step": (2, "rank 2 (pp 0, dp 2, tp 0)", "pp", "in step, step 2"),
    "checkpoint": (1, "rank 1 (pp 0, dp 1, tp 0)", "pp", "in checkpoint, step 1"),
    "host": (
        0,
        "rank 0 (pp 0, dp 0, tp 0), which hosts the store,",
        "pp",
        "in forward of microbatch 0, stage 0, step 2",
    ),
    "plain": (1, "rank 1 (dp 1)", "dp", "in data, step 2"),
}
FAILURES = {"failure": 1, "plain_failure": 1, "failure_of_host": 0, "plain_failure_of_host": 0}
"""And the rank that fails."""
OTHERS = [*FAILURES, "leave", "later_batch", "save_alone", "left_out", "step_alone"]
DEPARTURES = {  # and how a rank has left
    "departure": "in order: its block or its program ended; every rank has to call it equally often, so this one had "
    "more batches, or that one has left its loop early; give data ranks equal numbers of batches, and end the loop on "
    "all ranks at once",
    "early_exit": "by SystemExit(0)",
}


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    """What the ranks of each case wrote, and their exit codes; all cases run at once."""
    cases = [*STOPPED, *OTHERS, *DEPARTURES]
    for _ in range(3):
        folder = tmp_path_factory.mktemp("output")
        command = [PYTHON, "tests/support/scripts/ranks_that_hang.py", str(folder), *cases]
        result = run(command, timeout=280, PARAMP_LAUNCH_TIMEOUT="200", TORCH_CPP_LOG_LEVEL="ERROR")
        assert result.returncode == 0, result.stderr
        codes = json.loads((folder / "codes.json").read_text())
        texts = {case: [(folder / f"{case}.{rank}").read_text() for rank in range(3)] for case in cases}
        if "choose another port" not in str(texts):  # another program took one of theirs
            break
    return {case: (texts[case], codes[case]) for case in cases}


@pytest.mark.parametrize("case", STOPPED)
def test_a_stopped_rank_is_named_with_its_phase_by_every_other(output, case):
    victim, name, axis, place = STOPPED[case]
    for rank in {0, 1, 2} - {victim}:
        text, code = (found[rank] for found in output[case])
        assert (code, text.count("paramp: ")) == (1, 1), text
        text = text[text.index("paramp: ") :]  # torch may warn before that a store does not answer
        assert text.startswith(f"paramp: {name} has been silent for "), text
        assert f"; it was last seen {place}; ending rank {rank} ({axis} " in text
        assert victim == 0 or text.count("\n") == 1, text


@pytest.mark.parametrize("case", FAILURES)
def test_one_ranks_exception_ends_all_and_is_shown_once(output, case):
    texts, codes = output[case]
    assert codes == [1, 1, 1]
    assert texts.pop(FAILURES[case]).count("disk on fire") == 2  # the line of source, and the message
    if FAILURES[case]:
        assert texts == ["", ""]
    else:  # torch may warn of the store that rank 0 hosts
        assert not any("Traceback" in text or "disk on fire" in text for text in texts)


def test_ranks_that_stay_longer_than_the_one_that_hosts_the_store_end_in_order(output):
    assert output["leave"] == (["", "", ""], [0, 0, 0])


def test_a_later_batch_of_another_size_on_one_rank_ends_all_with_both_shapes(output):
    texts, codes = output["later_batch"]
    assert codes == [1, 1, 1]
    pattern = r"error: inputs\[0\]: (.*) has float32 \((\d), 4\), but (.*) has float32 \((\d), 4\), in batch 5 of"
    ((*found,),) = re.findall(pattern, "".join(texts))  # which ranks have come first is not known
    sizes = {found[0]: found[1]} | dict.fromkeys(found[2].split("), "), found[3])
    assert "rank 1 (pp 1, dp 0, tp 0" in {name.removesuffix(")") for name, size in sizes.items() if size == "4"}
    assert "8" in sizes.values()


@pytest.mark.parametrize("case", DEPARTURES)
def test_the_error_of_the_others_names_a_rank_that_left_early(output, case):
    texts, codes = output[case]
    assert codes == [1, 0, 1]
    error = f"rank 1 (pp 0, dp 1, tp 0) has left after step, step 2, {DEPARTURES[case]}"
    calls = ("step", "evaluate", "forward_backward")
    for text in (texts[0], texts[2]):
        lines = [line for line in text.splitlines() if line.startswith(tuple(f"{call}: " for call in calls))]
        assert lines == [f"{call}: {error}" for call in calls]
    assert "".join(texts).count(f"RuntimeError: forward_backward: {error}") == 1
    assert "paramp: rank 1" not in "".join(texts)  # the error has said it


CALLS = {  # case: the function that rank 1 alone has called, where the others are, and what rank 1 does
    "left_out": ("forward_backward", "in step, step 1", "begins a second batch without a step()"),
    "step_alone": ("step", r"(in|after) [a-z]+( of microbatch 0, stage 0)?, step 2", "steps without a batch since"),
}


@pytest.mark.parametrize("case", CALLS)
def test_a_rank_that_leaves_out_a_step_or_makes_one_more_names_itself(output, case):
    texts, codes = output[case]
    function, where, does = CALLS[case]
    assert codes == [1, 1, 1]
    error = (
        rf"RuntimeError: {function}: every rank has to call it, but rank [02] \(pp 0, dp [02], tp 0\) is {where}, and "
    )
    assert re.search(error + re.escape(f"rank 1 (pp 0, dp 1, tp 0) {does}"), "".join(texts)), texts


def test_a_save_on_one_rank_ends_all_and_names_it(output):
    (first, *others), codes = output["save_alone"]
    assert codes == [1, 1, 1]
    *table, reason = first.splitlines()
    assert table[0].startswith("paramp: no rank has made progress for 6 s; furthest behind: ")
    assert "paramp:   in save, step 2: rank 1" in table
    for rank, text in enumerate([reason + "\n", *others]):
        assert text.startswith("paramp: every rank has waited for the others for "), text
        assert "; engine.save has to be called on every rank, but was on rank 1 only; ending rank " in text
        assert f"; ending rank {rank} (pp 0, dp {rank}, tp 0), which was " in text


def beats(*numbers, record=SETUP):
    return {rank: Beat(number, record) for rank, number in enumerate(numbers)}


def test_the_clock_stands_still_while_this_rank_is_stopped():
    monitor = LivenessMonitor(10.0)
    for now, silent in ((0.0, set()), (1000.0, set()), (1005.0, set()), (1006.0, {0, 1})):
        monitor.update(beats(1, 1), now)
        assert set(monitor.silent()) == silent


def test_a_job_with_an_overdue_beat_is_not_reported_as_without_progress():
    monitor = LivenessMonitor(10.0)
    for now in range(12):
        monitor.update(beats(now, min(now, 6), record=ProgressRecord("step")), float(now))
    assert not monitor.stuck(2.0)
    assert monitor.stuck()


# ------------------------------------------------------------------------------------ several ranks in one process


class Ended(BaseException):
    pass


class Ranks:
    """Heartbeats on one store, with a clock that is turned by hand and without threads."""

    def __init__(self, size, end_after=None, host="the launcher"):
        self.now, self.written, self.left, store = 0.0, [], [], HashStore()
        store.set_timeout(timedelta(seconds=10))  # of a key that no rank writes
        options = {"end_after": end_after, "host": host}
        self.all = [Heartbeat(store, rank, size, 10.0, **options) for rank in range(size)]
        for one in self.all:
            one._interval, one._clock = 0.0, lambda: self.now

    def seconds(self, count, *silent):
        """Every rank beats once a second, but for the ``silent`` ones; those that ended are returned."""
        ended = set()
        for _ in range(count):
            self.now += 1.0
            for rank, one in enumerate(self.all):
                if rank in silent or rank in ended or rank in self.left:
                    continue
                try:
                    one._exchange()
                except Ended:
                    ended.add(rank)
        return ended

    def leave(self, rank, error=None):
        self.all[rank].leave(error)
        self.all[rank]._leave()
        self.left.append(rank)


@pytest.fixture
def start(monkeypatch):
    """Makes :class:`Ranks`."""

    def end(reason=""):
        raise Ended

    def make(*args, **kwargs):
        ranks = Ranks(*args, **kwargs)
        monkeypatch.setattr(heartbeat, "write_stderr", ranks.written.append)
        return ranks

    monkeypatch.setattr(heartbeat, "end_process", end)
    monkeypatch.setattr(heartbeat.time, "sleep", lambda _: None)
    return make


def test_a_silent_rank_is_named_by_all(start):
    ranks = start(4)
    assert ranks.seconds(20) == set()
    with ranks.all[2].span("forward", 1, 3), ranks.all[0].span("step"):
        assert ranks.seconds(1) == set()  # the last beat, with the phase
        assert ranks.seconds(11, 2) == set()  # exactly the time-out since that was read
        assert ranks.seconds(1, 2) == {0, 1, 3}
    assert ranks.written == [  # and nothing of a job without progress
        "paramp: rank 2 has been silent for 11 s; it was last seen in forward of microbatch 3, stage 1, step 1; "
        f"ending rank {rank}, which was in {'setup' if rank else 'step'}, step 1\n"
        for rank in (0, 1, 3)
    ]


def test_only_the_leader_reads_all_beats(start, monkeypatch):
    ranks, read_all, numbers = start(4), heartbeat.read_all, []
    monkeypatch.setattr(heartbeat, "read_all", lambda store, keys: numbers.append(len(keys)) or read_all(store, keys))
    ranks.seconds(2)
    assert numbers == [4, 2, 2, 2] * 2  # with the failure report


def test_ranks_that_were_lost_together_are_named_together(start):
    ranks = start(4)
    ranks.all[0]._interval = 1.0
    ranks.seconds(3)
    ranks.seconds(1, 1)
    assert ranks.seconds(11, 1, 3) == {0, 2}
    text = "rank 1 has been silent for 11 s; it was last seen in setup, step 1; rank 3 has been silent for 10 s"
    assert text in ranks.written[0]


@pytest.mark.parametrize(("left", "silent", "ended"), [([], 0, {1, 2, 3}), ([0, 1], 3, {2})])
def test_a_silent_rank_is_named_whoever_leads(start, left, silent, ended):
    """The leader itself; and by the next one, when the leader and another have left, which nobody misses."""
    ranks = start(4)
    ranks.seconds(3)
    for rank in left:
        ranks.leave(rank)
    assert ranks.seconds(30) == set()
    assert not ranks.written
    assert ranks.seconds(12, silent) == ended
    assert all(line.startswith(f"paramp: rank {silent} has been silent for ") for line in ranks.written)


def test_rank_0_waits_with_the_store_until_all_have_left(start, monkeypatch):
    ranks, seen = start(3, host=""), []

    def linger(all_have_left, _):
        for rank in (1, 2):
            seen.extend([all_have_left(), all_have_left()])
            ranks.leave(rank)
        seen.append(all_have_left())

    monkeypatch.setattr(heartbeat, "linger", linger)
    ranks.leave(0)
    assert seen == [False] * 4 + [True]
    start(3).leave(0)  # without waiting: the launcher has the store
    assert len(seen) == 5


@pytest.mark.parametrize(
    ("error", "ended"),
    [
        (None, set()),
        (SystemExit(), set()),
        (SystemExit(0), set()),
        (SystemExit(3), {0}),
        (SystemExit("why"), {0}),
        (KeyboardInterrupt(), {0}),
        (ValueError(), {0}),
    ],
    ids=repr,
)
def test_the_others_end_after_a_rank_that_failed_and_go_on_after_one_that_exits(start, error, ended):
    ranks = start(2)
    ranks.seconds(3)
    ranks.leave(1, error)
    assert (ranks.seconds(5), ranks.seconds(10)) == (set(), ended)
    assert not ranks.written  # the rank that failed says why


def test_a_job_in_which_every_rank_waits_in_a_batch_ends(start):
    ranks = start(3, end_after=3)
    ranks.leave(2)
    with ranks.all[0].span("batch"), ranks.all[1].span("batch"):
        with ranks.all[0].span("forward", 0, 1):
            pass
        assert ranks.seconds(33) == set()
        table = (
            "paramp: no rank has made progress for 10 s; furthest behind: rank 1\n"
            "paramp:   after forward of microbatch 1, stage 0, step 1: rank 0\n"
            "paramp:   in batch, step 1: rank 1\n"
            "paramp:   has left: rank 2\n"
        )
        assert ranks.written == [table] * 2
        assert ranks.seconds(3) == {0, 1}
    reason = (
        "every rank has waited for the others for 33 s: after forward of microbatch 1, stage 0, step 1: rank 0; in "
        "batch, step 1: rank 1; has left: rank 2"
    )
    assert ranks.written[2:] == [
        table,
        f"paramp: {reason}; ending rank 0, which was after forward of microbatch 1, stage 0, step 1\n",
        f"paramp: {reason}; ending rank 1, which was in batch, step 1\n",
    ]


@pytest.mark.parametrize(
    ("phases", "end_after", "ended"),
    [
        (["forward", "backward"], 1, {0, 1}),
        (["loss", "step"], 1, {0, 1}),
        (["step", "save"], 1, {0, 1}),
        (["backward input", "backward weight"], 1, {0, 1}),
        (["step", "batch"], None, set()),
        (["step", None], 1, set()),
        (["forward", "data"], 1, set()),
        (["checkpoint", "step"], 1, set()),
        (["evaluation", "evaluation"], 1, set()),
        (["compilation", "forward"], 1, set()),
    ],
)
def test_only_ranks_in_a_batch_or_before_a_save_wait_for_each_other(start, phases, end_after, ended):
    """A job in which one may be slow goes on. None: between two batches."""
    ranks = start(2, end_after)
    with contextlib.ExitStack() as stack:
        for one, phase in zip(ranks.all, phases, strict=True):
            with contextlib.ExitStack() as batch:
                batch.enter_context(one.span("batch"))
                batch.enter_context(one.span(phase or "forward"))
                if phase is not None:
                    stack.enter_context(batch.pop_all())
        assert ranks.seconds(100) == ended
    assert ranks.written
    assert ended or all(text.startswith("paramp: no rank has made progress for 10 s") for text in ranks.written)


@pytest.mark.parametrize("phase", ["forward", "loss", "backward", "step"])
def test_ranks_wait_in_phases_of_a_loop_without_an_engine(start, phase):
    ranks = start(2, end_after=4)
    with ranks.all[0].span(phase), ranks.all[1].span(phase):
        assert ranks.seconds(43) == set()
        assert ranks.seconds(4) == {0, 1}
    ranks = start(2, end_after=4)
    with ranks.all[0].span("epoch"), ranks.all[1].span("epoch"), ranks.all[0].span(phase), ranks.all[1].span(phase):
        assert ranks.seconds(100) == set()


def test_a_job_without_progress_is_reported_after_each_timeout(start):
    """Counted from the last beginning or end of a phase of any rank."""
    ranks, reported = start(3), []
    with ranks.all[0].span("data"):
        for _ in range(40):
            ranks.seconds(1)
            reported += [ranks.now] * (len(ranks.written) - len(reported))
        assert reported == [12.0, 23.0, 34.0]
        places = "paramp:   in data, step 1: rank 0\nparamp:   in setup, step 1: ranks 1-2\n"
        assert ranks.written == [f"paramp: no rank has made progress for 10 s\n{places}"] * 3
    ranks.seconds(5)
    with ranks.all[1].span("step"):
        ranks.seconds(12)
        assert len(ranks.written) == 3
        ranks.seconds(1)
        assert len(ranks.written) == 4


SILENT_STORES = {  # case: the host, the seconds before, and the text
    "launcher": (
        "the launcher",
        1,
        "the store has not answered for 11 s: the launcher, which hosts it, is stopped or lost",
    ),
    "rank 0": ("", 3, "rank 0, which hosts the store, has been silent for 11 s; it was last seen in setup, step 1"),
    "never seen": ("", 0, "rank 0, which hosts the store, has been silent for 11 s"),
}


@pytest.mark.parametrize("case", SILENT_STORES)
def test_a_silent_store_is_named_with_its_host(start, case):
    host, seconds, text = SILENT_STORES[case]
    ranks = start(2, host=host)
    ranks.seconds(seconds)
    waits = iter(range(30))

    class Clock:
        def wait(self, _):
            ranks.now += 1.0
            return next(waits, None) is None

    ranks.all[1]._stopped = Clock()
    with pytest.raises(Ended):
        ranks.all[1]._watch_store()
    assert ranks.written == [f"paramp: {text}; ending rank 1, which was in setup, step 1\n"]
    assert ranks.now == seconds + 12.0  # a second until it first looks, however many answers there were before


def test_a_store_that_answers_is_never_called_silent(start):
    ranks = start(2)
    waits = iter(range(30))

    class Clock:
        def wait(self, _):
            ranks.seconds(1)
            return next(waits, None) is None

    ranks.all[1]._stopped = Clock()
    ranks.all[1]._watch_store()
    assert (ranks.now, ranks.written) == (31.0, [])


def test_beats_go_over_a_connection_of_their_own():
    """A rank whose program waits for the store, over the launch's connection, beats."""
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    reader, one = store.clone(), Heartbeat(store, 0, 1, 1000.0)
    one._interval = 0.01
    waiting = threading.Thread(target=store.get, args=("answer",))
    with one:
        one.start("rank {}".format)
        waiting.start()
        try:
            numbers = (Beat.decode(reader.get("beat/0")).number for _ in range(100_000))
            first = next(numbers)
            assert any(number > first + 20 for number in numbers)
            assert waiting.is_alive()
        finally:
            reader.set("answer", "")
            waiting.join()


# --------------------------------------------------------------------------------------------------- small parts


def alone(timeout=10.0):
    return Heartbeat(HashStore(), 0, 1, timeout)


@pytest.mark.parametrize(
    ("file", "phase"), [("/torch/_dynamo/convert_frame.py", "compilation"), ("/bdb.py", "debugger")]
)
def test_a_rank_that_compiles_or_is_in_a_debugger_does_not_wait(file, phase):
    """The code of this module is run under the name of a file of theirs."""
    one, found = alone(), []
    code = compile("found.append(one._beat().record)", f"/lib{file}", "exec")
    with one.span("batch"), one.span("forward", 0, 1):
        exec(code, {"one": one, "found": found})
        found.append(one._beat().record)
    exec(code, {"one": one, "found": found})
    inside, without, outside = found
    assert (str(inside), inside.waiting) == (f"in {phase} of microbatch 1, stage 0, step 1", False)
    assert (str(without), without.waiting) == ("in forward of microbatch 1, stage 0, step 1", True)
    assert str(outside) == "after batch, step 1"


def test_the_defaults_are_those_of_the_page():
    config = paramp.Config()
    assert (config.hang_timeout, config.hang_end_after, first_failure.LONGEST_WAIT) == (300.0, 4, 30 * 60.0)
    assert inspect.signature(paramp.start_heartbeat).parameters["end_after"].default == 4  # of a user's own loop
    place = LauncherRank("torchrun", rank=0, world_size=2, local_rank=0)
    for end_after, longest in ((None, math.inf), (3, 900.0)):
        assert _make_heartbeat(paramp.Config(hang_end_after=end_after), HashStore(), place)._longest_wait == longest
    assert first_failure.SECONDS_OF_GRACE == 5.0
    one = alone(config.hang_timeout)  # reads of a failure in an interval, and looks once in an interval whether to end
    assert first_failure.SECONDS_OF_GRACE + one._patience + 2 * one._interval < 10
    assert (alone(config.hang_timeout)._interval, alone(2.0)._interval) == (1.0, 0.4)
    assert distributed_c10d.default_pg_timeout.total_seconds() == 30 * 60.0  # gloo's


def test_the_engine_reports_its_phases(tmp_path):
    x = torch.ones(2, 2)
    with paramp.launch_from_torch({}) as context:
        context.heartbeat = alone()
        engine, rest = engine_of(torch.nn.Linear(2, 2)), []
        mean_loss = engine._window.mean_loss  # for which ranks wait after the backward
        engine._window.mean_loss = lambda: rest.append(context.heartbeat._beat().record.waiting) or mean_loss()
        for call, kinds in (
            (lambda: train_step(engine, x), ["batch", "forward", "loss", "backward", "step"]),
            (lambda: engine.evaluate(x, x), ["evaluation", "forward"]),
            (lambda: engine.save(tmp_path / "saved"), ["save", "checkpoint"]),
        ):
            with mock.patch.object(context.heartbeat, "span", side_effect=context.heartbeat.span) as span:
                call()
            assert [one.args[0] for one in span.call_args_list][: len(kinds)] == kinds
        assert rest == [True]  # behind the backward it is in the batch still


def test_only_the_first_second_batch_without_a_step_waits_for_the_other_ranks():
    x = torch.ones(2, 2)
    with paramp.launch_from_torch({"gradient_accumulation": 2}) as context:
        context.heartbeat = alone()
        engine = engine_of(torch.nn.Linear(2, 2))
        warns = pytest.warns(UserWarning, match="the second batch before a step")
        with mock.patch.object(context.departures, "gather") as gather, warns:
            counts = []
            for _ in range(3):
                engine.forward_backward(x, x)
                counts.append(gather.call_count)
        assert counts == [0, 1, 1]


@on_ranks(2)
def test_a_call_of_every_rank_is_not_waited_for_when_one_has_left(world):
    if world.rank == 1:
        departures = Departures("test of one that left", 1, 2)
        departures.announce("rank 1 has left")
        assert departures.first() == "rank 1 has left"
    else:
        with pytest.raises(RuntimeError, match=r"engine\.save: every rank has to call it, but rank 1 has left"):
            Departures("test of one that left", 0, 2).gather("save", "engine.save")
        for text, notes in (("Connection closed", ["paramp: rank 1 has left"]), ("of another kind", None)):
            Departures("test of one that left", 0, 2).explain(lost := RuntimeError(text))
            assert getattr(lost, "__notes__", None) == notes
        error = pytest.raises(RuntimeError, match=r"but others have not in 0\.1 s")
        with mock.patch.object(first_failure, "LONGEST_WAIT", 0.1), error:
            Departures("test of one that never comes", 0, 2).gather("save", "engine.save")
        with mock.patch.object(first_failure, "linger") as linger:
            departures = Departures("test of one that left", 0, 2)
            departures.linger()
            departures.linger()  # in an error's way out: a launcher ends this rank soon after the others
        assert linger.call_count == 1
    torch.distributed.barrier()


@pytest.mark.parametrize("quiet", [True, False])
def test_an_error_is_reported_although_closing_never_returns(monkeypatch, quiet):
    written, ended = [], threading.Event()
    monkeypatch.setattr(first_failure, "SECONDS_OF_GRACE", 0.01)
    monkeypatch.setattr(first_failure, "write_stderr", written.append)
    monkeypatch.setattr(first_failure, "end_process", lambda reason: ended.set())
    with ending_in_time(ValueError("disk full"), quiet=quiet):
        assert ended.wait(120)
    assert [text.strip() for text in written] == ([] if quiet else ["ValueError: disk full"])
