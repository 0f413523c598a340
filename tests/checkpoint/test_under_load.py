"""Checkpoints that several processes write and read at once, and disks that are full, slow or read-only.

Everything ends in a whole checkpoint or in an error that says what is wrong, and leaves nothing behind.
"""

import errno
import json
import os
import resource
import tempfile
import threading
import time
from contextlib import ExitStack, contextmanager

import pytest
import torch
from commands import PYTHON
from families import number
from victims import Run

import paramp
from paramp.base.errors import CheckpointError
from paramp.checkpoint import atomic_dir
from paramp.checkpoint.open_checkpoint import problems
from paramp.engine.checkpoint_manager import find

SCRIPT = "tests/support/scripts/save_and_load.py"


@pytest.mark.parametrize(
    ("num_savers", "loads"), [pytest.param(2, 20, id="four"), pytest.param(1, number(20, 5000), id="three")]
)
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
        for saver in savers:
            found = outcome(saver)
            assert found["errors"] == {}
            assert found["calls"] > 1
    assert not problems(path)
    assert [left.name for left in tmp_path.iterdir() if left.is_dir()] == ["saved"]


def engine_of(value, size=64):
    """An engine of one layer, all whose weights are ``value``."""
    model = torch.nn.Linear(size, size)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return paramp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.nn.functional.mse_loss)[0]


def save(engine, path, wait):
    engine.save(path, wait=wait)
    engine.finish_saving()


def weights_in(path, size=64):
    """The one value of all weights in the checkpoint at ``path``."""
    other = engine_of(0.0, size)
    other.load(path)
    (value,) = {value for tensor in other.full_state_dict().values() for value in tensor.unique().tolist()}
    return value


@contextmanager
def file_size_limit(size):
    """Files cannot become larger than ``size`` bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.fixture
def full_in_the_manifest(monkeypatch):
    """A disk that is full when half of a manifest is written."""
    write_file = atomic_dir.write_file

    def fail(path, parts):
        if path.name != atomic_dir.MANIFEST:
            return write_file(path, parts)
        path.write_bytes(b"".join(parts)[:50])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    @contextmanager
    def full():
        with monkeypatch.context() as patched:
            patched.setattr(atomic_dir, "write_file", fail)
            yield

    return full


@pytest.mark.parametrize("wait", [True, False])
def test_a_save_that_fails_leaves_the_last_one_and_nothing_else(tmp_path, full_in_the_manifest, wait):
    path = tmp_path / "saved"
    with paramp.launch_from_torch({}):
        engine_of(1.0).save(path)
        engine = engine_of(2.0)
        for disk, reason in (
            (lambda: file_size_limit(4096), "File too large"),
            (full_in_the_manifest, "No space left on device"),
        ):
            with disk(), pytest.raises(CheckpointError, match=rf"saved' was not written: rank 0 failed: .*{reason}"):
                save(engine, path, wait)
            assert os.listdir(tmp_path) == ["saved"]
            assert weights_in(path) == 1.0
        save(engine, path, wait)
        assert weights_in(path) == 2.0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")
def test_a_full_disk_has_room_again_for_the_next_save(tmp_path):
    """Room for two checkpoints: a save that a killed process left is deleted, and its place taken."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.system(f"mount -t tmpfs -o size=256k none {disk}"):
        pytest.skip("no file system can be mounted here")
    try:
        with paramp.launch_from_torch({}):
            engine_of(1.0, 128).save(disk / "step-00000001")
            left = disk / "step-00000002.partial-0123abcd"
            left.mkdir()
            (left / "rank-00000.safetensors").write_bytes(bytes(120_000))
            (disk / "step-00000002.partial-lock").touch()
            engine_of(3.0, 128).save(disk / "step-00000003")
            assert sorted(os.listdir(disk)) == ["step-00000001", "step-00000003"]
            with pytest.raises(CheckpointError, match="No space left on device"):
                engine_of(4.0, 128).save(disk / "step-00000004")
            assert sorted(os.listdir(disk)) == ["step-00000001", "step-00000003"]
            atomic_dir.remove(disk / "step-00000001")
            engine_of(4.0, 128).save(disk / "step-00000004")
            assert weights_in(disk / "step-00000004", 128) == 4.0
    finally:
        os.system(f"umount -l {disk}")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become a user who may not write there")
def test_a_read_only_folder_is_an_error_that_says_so(tmp_path):
    folder = tmp_path / "folder"
    with paramp.launch_from_torch({}):
        engine = engine_of(1.0)
        engine.save(folder / "saved")
        folder.chmod(0o555)
        for above in folder.parents:
            if above.is_relative_to(tempfile.gettempdir()) and above.stat().st_mode & 0o5 != 0o5:
                above.chmod(0o755)
        os.seteuid(65534)
        try:
            with pytest.raises(CheckpointError, match=r"rank 0 failed: PermissionError: .*Permission denied"):
                engine.save(folder / "saved")
            assert weights_in(folder / "saved") == 1.0
        finally:
            os.seteuid(0)
        assert os.listdir(folder) == ["saved"]


def test_a_slow_save_is_waited_for_or_refused(tmp_path, monkeypatch):
    """Saves to one path follow each other; loads are of the last one that is whole; other paths are free."""
    path, slow, go_on, write_file = tmp_path / "saved", threading.Event(), threading.Event(), atomic_dir.write_file

    def slow_write(file, parts):
        if file.name == atomic_dir.MANIFEST and not slow.is_set():
            slow.set()
            assert go_on.wait(60)
        return write_file(file, parts)

    with paramp.launch_from_torch({}):
        engine_of(1.0).save(path)
        first, second, third = engine_of(2.0), engine_of(3.0), engine_of(4.0)
        monkeypatch.setattr(atomic_dir, "write_file", slow_write)
        first.save(path, wait=False)
        assert slow.wait(60)
        monkeypatch.setattr(atomic_dir, "PATIENCE", 0.1)
        with pytest.raises(CheckpointError, match=r"saved' is being saved by another process, for 0\.1 s or longer"):
            second.save(path)
        second.save(tmp_path / "other")  # deletes nothing that is being written
        assert weights_in(path) == 1.0
        monkeypatch.setattr(atomic_dir, "PATIENCE", 60.0)
        third.save(path, wait=False)
        go_on.set()
        first.finish_saving()
        third.finish_saving()
        assert weights_in(path) == 4.0
    assert sorted(os.listdir(tmp_path)) == ["other", "saved"]


def test_a_clock_that_jumps_changes_nothing(tmp_path, monkeypatch):
    with paramp.launch_from_torch({}):
        for step, now in ((1, 2e9), (2, 1e9)):
            monkeypatch.setattr(time, "time", lambda now=now: now)
            path = tmp_path / f"step-{step:08d}"
            engine_of(step).save(path)
            os.utime(path, (now, now))
        left = tmp_path / "step-00000003.partial-0123abcd"
        left.mkdir()
        os.utime(left, (0, 0))
        reported = []
        assert find("auto", tmp_path, reported.append) == tmp_path / "step-00000002"
        assert len(reported) == 1
        assert "step-00000003.partial-0123abcd' is unfinished" in reported[0]
        engine_of(2.5).save(tmp_path / "step-00000002")
        assert weights_in(tmp_path / "step-00000002") == 2.5
    assert sorted(os.listdir(tmp_path)) == ["step-00000001", "step-00000002"]
