"""Checkpoints that several processes write and read at once, and disks that are slow.

Everything ends in a whole checkpoint or in an error that says what is wrong, and leaves nothing behind.
"""

import json
import os
import threading
from contextlib import ExitStack

import pytest
from commands import PYTHON
from families import number
from small_engines import filled_engine, value_at
from victims import Run

import paramp
from paramp.base.errors import CheckpointError
from paramp.checkpoint import atomic_dir
from paramp.checkpoint.convert import inspect
from paramp.engine.checkpoint_manager import find

SCRIPT = "tests/support/scripts/save_and_load.py"


@pytest.mark.parametrize(("num_savers", "loads"), [(2, 20), (1, number(20, 5000))])
def test_loads_against_saves_are_each_of_one_save(tmp_path, num_savers, loads):
    """10,000 loads in all with ``make test-all``."""

    def outcome(run):
        assert run.finish(600) == 0, run.log.read_text()
        return json.loads(run.log.read_text().splitlines()[-1])

    path = tmp_path / "saved"
    with ExitStack() as stack:

        def start(what, count, name):
            return stack.enter_context(Run([PYTHON, SCRIPT, what, str(path), str(count)], tmp_path / name))

        savers = [start("save", 0, f"saver {index}") for index in range(num_savers)]
        assert savers[0].wait_for(path.exists), savers[0].log.read_text()
        for loader in [start("load", loads, f"loader {index}") for index in range(2)]:
            assert outcome(loader) == {"calls": loads, "errors": {}}
        for saver in savers:
            saver.process.terminate()
        for found in map(outcome, savers):
            assert found["errors"] == {}
            assert found["calls"] > 0
    assert not inspect(path)["damage"]
    assert [left.name for left in tmp_path.iterdir() if left.is_dir()] == ["saved"]


def test_a_slow_save_is_waited_for_or_refused(tmp_path, monkeypatch):
    """Saves to one path follow each other; loads are of the last one that is whole; other paths are free."""
    path, slow, go_on, write_file = tmp_path / "saved", threading.Event(), threading.Event(), atomic_dir.write_file

    def slow_write(file, parts):
        if file.name == atomic_dir.MANIFEST and not slow.is_set():
            slow.set()
            assert go_on.wait(60)
        return write_file(file, parts)

    with paramp.launch_from_torch({}):
        filled_engine(1.0).save(path)
        first, second, third = filled_engine(2.0), filled_engine(3.0), filled_engine(4.0)
        monkeypatch.setattr(atomic_dir, "write_file", slow_write)
        first.save(path, wait=False)
        assert slow.wait(60)
        monkeypatch.setattr(atomic_dir, "PATIENCE", 0.1)
        with pytest.raises(CheckpointError, match=r"saved' is being saved by another process, for 0\.1 s or longer"):
            second.save(path)
        second.save(tmp_path / "other")  # deletes nothing that is being written
        assert value_at(path) == 1.0
        monkeypatch.setattr(atomic_dir, "PATIENCE", 60.0)
        third.save(path, wait=False)
        go_on.set()
        first.finish_saving()
        third.finish_saving()
        assert value_at(path) == 4.0
    assert sorted(os.listdir(tmp_path)) == ["other", "saved"]


def test_an_unfinished_save_is_no_checkpoint_whatever_the_times_of_folders(tmp_path):
    with paramp.launch_from_torch({}):
        for step, now in ((1, 2e9), (2, 1e9)):
            path = tmp_path / f"step-{step:08d}"
            filled_engine(step).save(path)
            os.utime(path, (now, now))
        left = tmp_path / "step-00000003.partial-0123abcd"
        left.mkdir()
        (tmp_path / "step-00000002.partial-0123abcd").mkdir()  # of one that was saved again
        reported = []
        assert find("auto", tmp_path, reported.append) == tmp_path / "step-00000002"
        assert len(reported) == 1
        assert "step-00000003.partial-0123abcd' is unfinished" in reported[0]
        filled_engine(2.5).save(tmp_path / "step-00000002")
    assert sorted(os.listdir(tmp_path)) == ["step-00000001", "step-00000002"]
