"""Every other rank names one that is stopped, with its phase; a failure is reported once; no other job is ended."""

import inspect
import json
import re
import threading

import pytest
import torch
from commands import PYTHON, run
from pool import on_ranks
from torch.distributed import HashStore, distributed_c10d

import paramp
from paramp.distributed import failures, heartbeat
from paramp.distributed.failures import ending_in_time
from paramp.distributed.heartbeat import Heartbeat
from paramp.distributed.liveness import SETUP, Beat, LivenessMonitor, PhaseTracker, ProgressRecord

# --------------------------------------------------------------------------------------------- ranks of their own


CASES = ["forward", "backward", "step", "checkpoint", "host", "failure", "wait", "leave", "plain", "plain_failure"]


ALIVE = ["later_batch", "departure", "save_alone"]
"""Cases in which no process is stopped, but ranks do not call the same."""


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    """What each rank of each case wrote, and its exit code; all cases run at once."""
    return run_cases(tmp_path_factory, CASES)


@pytest.fixture(scope="module")
def output_of_living(tmp_path_factory):
    return run_cases(tmp_path_factory, ALIVE)


def run_cases(tmp_path_factory, cases):
    for _ in range(3):
        folder = tmp_path_factory.mktemp("output")
        command = [PYTHON, "tests/support/scripts/ranks_that_hang.py", str(folder), *cases]
        # On a busy machine the store's host may end before a rank has read all, of which torch's C++ code warns.
        result = run(command, timeout=280, PARAMP_LAUNCH_TIMEOUT="200", TORCH_CPP_LOG_LEVEL="ERROR")
        assert result.returncode == 0, result.stderr
        codes = json.loads((folder / "codes.json").read_text())
        texts = {(case, rank): (folder / f"{case}.{rank}").read_text() for case in cases for rank in range(3)}
        if not any("choose another port" in text for text in texts.values()):  # another program took one of the ten
            break
    return {case: [(texts[case, rank], codes[case][rank]) for rank in range(3)] for case in cases}


@pytest.mark.parametrize(
    ("case", "victim", "place"),
    [
        ("forward", "rank 2 (pp 2, dp 0, tp 0)", "in forward of microbatch 2, stage 2, step 2"),
        ("backward", "rank 1 (pp 1, dp 0, tp 0)", "in backward of microbatch 1, stage 1, step 2"),
        ("step", "rank 2 (pp 0, dp 2, tp 0)", "in step, step 2"),
        ("checkpoint", "rank 1 (pp 0, dp 1, tp 0)", "in checkpoint, step 1"),
        ("plain", "rank 1 (dp 1)", "in data, step 2"),
    ],
)
def test_a_stopped_rank_is_named_with_its_phase_by_every_other(output, case, victim, place):
    others = [(rank, *found) for rank, found in enumerate(output[case]) if f"rank {rank} " not in victim]
    for rank, text, code in others:
        assert code == 1
        assert text.count("\n") == 1, text
        assert text.startswith(f"paramp: {victim} has been silent for "), text
        axis = "dp" if case == "plain" else "pp"
        assert f"; it was last seen {place}; ending rank {rank} ({axis} " in text
    assert len(others) == 2


def test_a_stopped_rank_that_hosts_the_store_is_named_too(output):
    for text, code in output["host"][1:]:
        assert code == 1
        assert text.count("paramp: ") == 1
        assert "rank 0 (pp 0, dp 0, tp 0), which hosts the store, has been silent for " in text
        assert "; it was last seen in forward of microbatch 0, stage 0, step 2; ending rank " in text


@pytest.mark.parametrize("case", ["failure", "plain_failure"])
def test_one_ranks_exception_ends_all_and_is_shown_once(output, case):
    texts, codes = zip(*output[case], strict=True)
    assert codes == (1, 1, 1)
    assert sum(text.count("disk on fire") for text in texts) == 2  # the line of source, and the message
    assert not texts[0]
    assert not texts[2]


def test_the_leader_describes_a_job_that_waits_and_that_goes_on(output):
    assert output["wait"][1:] == [("", 0)] * 2
    text, code = output["wait"][0]
    assert code == 0
    assert text.splitlines() == [
        "paramp: no rank has made progress for 6 s",
        "paramp:   in step, step 1: ranks 0-1",
        "paramp:   in data, step 1: rank 2",
    ]


def test_ranks_that_stay_longer_than_the_one_that_hosts_the_store_end_in_order(output):
    assert output["leave"] == [("", 0)] * 3


def test_a_later_batch_of_another_size_on_one_rank_ends_all_with_both_shapes(output_of_living):
    texts, codes = zip(*output_of_living["later_batch"], strict=True)
    assert codes == (1, 1, 1)
    pattern = r"ConfigError: inputs\[0\]: (.*) has float32 \((\d), 4\), but (.*) has float32 \((\d), 4\), in batch 5 of"
    ((*found,),) = re.findall(pattern, "".join(texts))  # which ranks have come first is not known
    sizes = {found[0]: found[1]} | dict.fromkeys(found[2].split("), "), found[3])
    assert "rank 1 (pp 1, dp 0, tp 0" in {name.removesuffix(")") for name, size in sizes.items() if size == "4"}
    assert "8" in sizes.values()


def test_the_error_of_the_others_names_a_rank_that_left_early(output_of_living):
    texts, codes = zip(*output_of_living["departure"], strict=True)
    assert codes == (1, 0, 1)
    error = (
        "forward_backward: rank 1 (pp 0, dp 1, tp 0) has left after step, step 2, in order: its block or its program "
        "ended; every rank has to call it equally often, so this one had more batches, or that one has left its loop "
    )
    assert texts[0].startswith(error)
    # On a busy machine rank 0, which hosts the store, may end before rank 2 has read it.
    assert texts[2].startswith((error, "forward_backward: the store of this launch has ended")), texts[2]
    found = "".join(texts)
    assert found.count(f"RuntimeError: {error}") == 1
    assert "paramp: rank 1" not in found  # the error has said it


def test_a_save_on_one_rank_ends_all_and_names_it(output_of_living):
    (first, *others), codes = zip(*output_of_living["save_alone"], strict=True)
    assert codes == (1, 1, 1)
    *table, reason = first.splitlines()
    assert table[0].startswith("paramp: no rank has made progress for 6 s; furthest behind: ")
    assert "paramp:   in save, step 2: rank 1" in table
    for rank, text in enumerate([reason + "\n", *others]):
        assert text.startswith("paramp: every rank has waited for the others for "), text
        assert "; engine.save has to be called on every rank, but was on rank 1 only; ending rank " in text
        assert f"; ending rank {rank} (pp 0, dp {rank}, tp 0), which was " in text


# ------------------------------------------------------------------------------------------------ liveness monitor


def beats(*numbers, record=SETUP):
    return {rank: Beat(number, record) for rank, number in enumerate(numbers)}


def test_a_rank_is_silent_when_its_beats_number_does_not_change():
    monitor = LivenessMonitor(10.0)
    for now in range(9):
        monitor.update(beats(now, now, min(now, 3)), now=100.0 + now)
        assert not monitor.silent()
    monitor.update(beats(9, 9, 3), 113.0)
    assert not monitor.silent()  # exactly ten
    monitor.update(beats(10, 9, 3), 114.0)
    (found,) = monitor.silent().items()
    assert (found[0], found[1][0], found[1][1].number) == (2, 11.0, 3)
    monitor.update(beats(11, 9, 3), 115.0)
    assert set(monitor.silent(tolerance=9.0)) == {1, 2}  # the rank that fell silent a little later counts with it


def test_the_clock_stands_still_while_this_rank_is_stopped():
    monitor = LivenessMonitor(10.0)
    monitor.update(beats(1, 1), 0.0)
    monitor.update(beats(1, 1), 1000.0)
    assert not monitor.silent()
    monitor.update(beats(1, 1), 1005.0)
    assert not monitor.silent()
    monitor.update(beats(1, 1), 1006.0)
    assert set(monitor.silent()) == {0, 1}


def test_a_rank_that_left_is_not_missed():
    monitor = LivenessMonitor(10.0)
    monitor.update(beats(1, 1), 0.0)
    for now in range(1, 30):
        monitor.update({0: Beat(now)}, float(now))
    assert not monitor.silent()


def test_a_job_without_progress_is_reported_after_each_timeout():
    monitor = LivenessMonitor(10.0)
    reported = []
    for now in range(40):
        monitor.update(beats(now, now, record=ProgressRecord("data", step=4)), float(now))
        if monitor.stuck():
            reported.append(now)
    assert reported == [11, 22, 33]
    record = ProgressRecord("data", step=4)
    monitor.update({0: Beat(40, record), 1: Beat(40, record, num_done=1)}, 40.0)
    monitor.update(beats(41, 41, record=record), 46.0)
    assert not monitor.stuck()
    for number, now in ((42, 50.0), (43, 54.0), (44, 58.0)):  # a phase begins at 50
        monitor.update({0: Beat(number, record), 1: Beat(number, ProgressRecord("step", step=4))}, now)
    assert not monitor.stuck()


def test_a_job_with_an_overdue_beat_is_not_reported_as_without_progress():
    monitor = LivenessMonitor(10.0)
    for now in range(12):
        monitor.update(beats(now, min(now, 6), record=ProgressRecord("step")), float(now))
    assert not monitor.stuck(2.0)
    assert monitor.stuck()


@pytest.mark.parametrize(
    ("records", "waits"),
    [
        (["forward", "backward"], True),
        (["loss", "step"], True),
        (["step", "save"], True),
        (["forward", "data"], False),
        (["checkpoint", "step"], False),
        (["evaluation", "evaluation"], False),
        (["compilation", "forward"], False),
    ],
)
def test_only_ranks_in_a_batch_or_before_a_save_wait_for_each_other(records, waits):
    monitor = LivenessMonitor(10.0)
    phases = [ProgressRecord(kind, waiting=PhaseTracker().span(kind)._record.waiting) for kind in records]
    for now in range(25):
        monitor.update({rank: Beat(now, phase) for rank, phase in enumerate(phases)}, float(now))
    assert monitor.seconds_waiting() == (24.0 if waits else 0.0)
    monitor.update({rank: Beat(25, phase, num_done=1) for rank, phase in enumerate(phases)}, 25.0)
    assert monitor.seconds_waiting() == 0.0


def test_a_program_that_reports_no_phases_is_not_stuck():
    monitor = LivenessMonitor(10.0)
    for now in range(40):
        monitor.update(beats(now, now), float(now))
        assert not monitor.stuck()


# ------------------------------------------------------------------------------------ several ranks in one process


class Ended(BaseException):
    pass


class Ranks:
    """Heartbeats on one store, with a clock that is turned by hand and without threads."""

    def __init__(self, size, monkeypatch, timeout=10.0, end_after=None):
        self.now = 0.0
        self.written = []
        self.left = []
        store = HashStore()
        self.all = [
            Heartbeat(store, rank, size, timeout, end_after=end_after, clock=lambda: self.now, host="the launcher")
            for rank in range(size)
        ]
        for one in self.all:
            one._interval = 0.0

        def end():
            raise Ended

        monkeypatch.setattr(heartbeat, "end_process", end)
        monkeypatch.setattr(heartbeat, "write_stderr", self.written.append)
        monkeypatch.setattr(heartbeat, "SECONDS_OF_GRACE", 5.0)
        monkeypatch.setattr(heartbeat.time, "sleep", lambda _: None)

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

    def leave(self, rank, failed=False):
        self.all[rank].stop(failed=failed)
        self.all[rank]._failed = failed
        self.all[rank]._leave()
        self.left.append(rank)


def test_a_silent_rank_is_named_by_all(monkeypatch):
    ranks = Ranks(4, monkeypatch)
    assert ranks.seconds(20) == set()
    with ranks.all[2].span("forward", 1, 3):
        assert ranks.seconds(1) == set()  # the last beat, with the phase
        assert ranks.seconds(9, 2) == set()
        assert ranks.seconds(4, 2) == {0, 1, 3}
    assert len(ranks.written) == 3
    for rank, line in zip((0, 1, 3), ranks.written, strict=True):
        assert line == (
            "paramp: rank 2 has been silent for 11 s; it was last seen in forward of microbatch 3, stage 1, step 1; "
            f"ending rank {rank}, which was in setup, step 1\n"
        )


def test_only_the_leader_reads_all_beats(monkeypatch):
    ranks, read_all, numbers = Ranks(4, monkeypatch), heartbeat.read_all, []
    monkeypatch.setattr(heartbeat, "read_all", lambda store, keys: numbers.append(len(keys)) or read_all(store, keys))
    ranks.seconds(2)
    assert numbers == [4, 2, 2, 2] * 2  # with the failure report


def test_ranks_that_were_lost_together_are_named_together(monkeypatch):
    ranks = Ranks(4, monkeypatch)
    ranks.all[0]._interval = 1.0
    ranks.seconds(3)
    ranks.seconds(1, 1)
    assert ranks.seconds(11, 1, 3) == {0, 2}
    assert (
        "rank 1 has been silent for 11 s; it was last seen in setup, step 1; rank 3 has been silent for 10 s"
        in (ranks.written[0])
    )


def test_a_silent_leader_is_named_too(monkeypatch):
    ranks = Ranks(3, monkeypatch)
    ranks.seconds(3)
    assert ranks.seconds(12, 0) == {1, 2}
    assert all(line.startswith("paramp: rank 0 has been silent for ") for line in ranks.written)


def test_the_next_one_leads_when_the_leader_has_left(monkeypatch):
    ranks = Ranks(4, monkeypatch)
    ranks.seconds(3)
    ranks.leave(0)
    ranks.leave(1)
    assert ranks.seconds(30) == set()
    assert not ranks.written
    assert ranks.seconds(12, 3) == {2}
    assert ranks.written[0].startswith("paramp: rank 3 has been silent for ")


def test_a_world_of_one_waits_for_nobody_when_it_ends(monkeypatch):
    monkeypatch.setattr(failures, "linger", lambda *_: pytest.fail("it waits"))
    with paramp.launch_from_torch():
        pass


def test_a_rank_that_failed_ends_the_others_quietly(monkeypatch):
    ranks = Ranks(3, monkeypatch)
    ranks.seconds(3)
    ranks.leave(1, failed=True)
    assert ranks.seconds(5) == set()
    assert ranks.seconds(3) == {0, 2}
    assert not ranks.written


def test_a_job_of_a_users_loop_waits_for_four_timeouts():
    assert inspect.signature(paramp.start_heartbeat).parameters["end_after"].default == 4


def test_a_job_in_which_every_rank_waits_in_a_batch_ends(monkeypatch):
    ranks = Ranks(3, monkeypatch, end_after=3)
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


@pytest.mark.parametrize(("other", "end_after"), [("data", 1), ("checkpoint", 1), ("evaluation", 1), ("step", None)])
def test_a_job_in_which_a_rank_may_be_slow_goes_on(monkeypatch, other, end_after):
    ranks = Ranks(2, monkeypatch, end_after=end_after)
    with ranks.all[0].span("step"), ranks.all[1].span("batch"), ranks.all[1].span(other):
        assert ranks.seconds(100) == set()
    assert ranks.written
    assert all(text.startswith("paramp: no rank has made progress for 10 s") for text in ranks.written)


def test_a_job_whose_ranks_are_between_two_batches_goes_on(monkeypatch):
    ranks = Ranks(2, monkeypatch, end_after=1)
    for one in ranks.all:
        with one.span("batch"), one.span("forward", 0, 0):
            pass
    with ranks.all[0].span("step"):
        assert ranks.seconds(100) == set()


@pytest.mark.parametrize(
    ("file", "phase"), [("/torch/_dynamo/convert_frame.py", "compilation"), ("/bdb.py", "debugger")]
)
def test_a_rank_that_compiles_or_is_in_a_debugger_does_not_wait(file, phase):
    """The code of this module is run under the name of a file of theirs."""
    one = Heartbeat(HashStore(), 0, 1, 10.0)
    names = {"one": one, "found": []}
    code = compile("found.append(one._beat().record)", f"/lib{file}", "exec")
    with one.span("batch"), one.span("forward", 0, 1):
        exec(code, names)
        names["found"].append(one._beat().record)
    exec(code, names)
    inside, without, outside = names["found"]
    assert (str(inside), inside.waiting) == (f"in {phase} of microbatch 1, stage 0, step 1", False)
    assert (str(without), without.waiting) == ("in forward of microbatch 1, stage 0, step 1", True)
    assert str(outside) == "after batch, step 1"


def test_a_silent_store_is_named_with_its_host(monkeypatch):
    ranks = Ranks(2, monkeypatch)
    ranks.seconds(3)
    one = ranks.all[1]
    waits = iter(range(30))

    class Clock:
        def wait(self, _):
            ranks.now += 1.0
            return next(waits, None) is None

    one._stopped = Clock()
    with pytest.raises(Ended):
        one._watch_store()
    assert ranks.written == [
        "paramp: the store has not answered for 11 s: the launcher, which hosts it, is stopped or lost; ending rank 1, "
        "which was in setup, step 1\n"
    ]


# --------------------------------------------------------------------------------------------------- small parts


def test_the_defaults_are_those_of_the_page():
    config = paramp.Config()
    assert (config.hang_timeout, config.hang_end_after, failures.LONGEST_WAIT) == (300.0, 4, 30 * 60.0)
    assert failures.SECONDS_OF_GRACE == 5.0
    assert Heartbeat(HashStore(), 0, 1, config.hang_timeout)._interval == 1.0
    assert distributed_c10d.default_pg_timeout.total_seconds() == 30 * 60.0  # gloo's


def test_the_engine_reports_its_phases(tmp_path):
    kinds = []

    class Recording(Heartbeat):
        def span(self, kind, stage=None, microbatch=None):
            kinds.append(kind)
            return super().span(kind, stage, microbatch)

    x = torch.ones(2, 2)
    with paramp.launch_from_torch({}) as context:
        context.heartbeat = Recording(HashStore(), 0, 1, 10.0)
        model = torch.nn.Linear(2, 2)
        engine, *_ = paramp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.nn.functional.mse_loss)
        engine.forward_backward(x, x)
        engine.step()
        assert kinds == ["batch", "forward", "loss", "backward", "step"]
        kinds.clear()
        engine.evaluate(x, x)
        assert kinds[0] == "evaluation"
        kinds.clear()
        engine.save(tmp_path / "saved")
        assert kinds == ["save", "checkpoint"]


@on_ranks(2)
def test_a_call_of_every_rank_is_not_waited_for_when_one_has_left(world):
    if world.rank == 1:
        failures.Departures("test of one that left", 1, 2).announce("rank 1 has left")
    else:
        with pytest.raises(RuntimeError, match=r"engine\.save: every rank has to call it, but rank 1 has left"):
            failures.Departures("test of one that left", 0, 2).gather("save", "engine.save")
        failures.LONGEST_WAIT, before = 0.1, failures.LONGEST_WAIT
        try:
            with pytest.raises(RuntimeError, match=r"but others have not in 0\.1 s"):
                failures.Departures("test of one that never comes", 0, 2).gather("save", "engine.save")
        finally:
            failures.LONGEST_WAIT = before
    torch.distributed.barrier()


def test_phases_lie_within_each_other():
    one = Heartbeat(HashStore(), 0, 1, 10.0)
    places = []
    for kind in ("forward", "step"):
        with one.span("evaluation"), one.span(kind, 1, 2):
            places.append(str(one._tracker.record))
        places.append(str(one._tracker.record))
    with pytest.raises(KeyError), one.span("data"):
        raise KeyError
    places.append(str(one._tracker.record))
    assert places == [
        "in forward of microbatch 2, stage 1, step 1",
        "after evaluation, step 1",
        "in step of microbatch 2, stage 1, step 1",
        "after evaluation, step 1",
        "after data, step 2",
    ]
    assert (one._tracker.step, one._tracker.num_done) == (2, 2)
    one.stop()


def test_a_beat_survives_encoding():
    beat = Beat(7, ProgressRecord("forward", True, 0, 1, 12), num_done=3, gone=True)
    assert Beat.decode(beat.encode().encode()) == beat


@pytest.mark.parametrize("quiet", [True, False])
def test_an_error_is_reported_although_closing_never_returns(monkeypatch, quiet):
    written, ended = [], threading.Event()
    monkeypatch.setattr(failures, "SECONDS_OF_GRACE", 0.01)
    monkeypatch.setattr(failures, "write_stderr", written.append)
    monkeypatch.setattr(failures, "end_process", ended.set)
    with ending_in_time(ValueError("disk full"), quiet=quiet):
        assert ended.wait(120)
    assert [text.strip() for text in written] == ([] if quiet else ["ValueError: disk full"])
