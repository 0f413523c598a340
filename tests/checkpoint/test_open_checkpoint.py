"""Checkpoints that are replaced while they are read."""

import errno
import os
import resource
from contextlib import ExitStack
from unittest import mock

import pytest
from pool import on_ranks, shared_folder
from small_engines import filled_engine, only_value, value_at

import paramp
from paramp.base.errors import CheckpointError
from paramp.checkpoint import open_checkpoint
from paramp.checkpoint.open_checkpoint import OpenCheckpoint
from paramp.checkpoint.resharding import read_tensor
from paramp.engine.checkpoint_manager import checkpoints_in


def test_what_was_opened_is_read_though_it_was_replaced(tmp_path):
    """And its folder is there until it is closed."""
    path = tmp_path / "saved"
    with paramp.launch_from_torch({}):
        filled_engine(1.0).save(path)
        with OpenCheckpoint(path) as checkpoint:
            filled_engine(2.0).save(path)
            held = [name for name in os.listdir(tmp_path) if name != "saved"]
            assert len(held) == 1
            assert checkpoint.problems() == []
            assert only_value([read_tensor(checkpoint, "model.0.weight")]) == 1.0
            filled_engine(3.0).save(path)
            assert held[0] in os.listdir(tmp_path)
        filled_engine(4.0).save(path)
        assert os.listdir(tmp_path) == ["saved"]
        assert value_at(path) == 4.0


def test_between_its_two_renames_the_old_one_is_read_and_stays_there(tmp_path):
    path = tmp_path / "step-00000001"
    with paramp.launch_from_torch({}):
        filled_engine(1.0).save(path)
        (tmp_path / "latest").symlink_to(path)
        path.rename(tmp_path / "step-00000001.replaced")
        assert checkpoints_in(tmp_path) == [(1, path)]
        assert value_at(path) == value_at(tmp_path / "latest") == 1.0
        full = mock.patch.object(os, "fsync", side_effect=OSError(errno.ENOSPC, "No space left on device"))
        with full, pytest.raises(CheckpointError, match="No space left"):
            filled_engine(2.0).save(path)
        assert value_at(path) == 1.0
        assert sorted(os.listdir(tmp_path)) == ["latest", "step-00000001.replaced"]
        filled_engine(2.0).save(path)
        assert sorted(os.listdir(tmp_path)) == ["latest", "step-00000001"]


@on_ranks(2)
def test_all_ranks_read_one_save(world):
    """One rank opens the checkpoint before it is replaced, the other after that."""
    open_folder, attempts, opened = open_checkpoint._open_folder, open_checkpoint.ATTEMPTS, []
    with paramp.launch_from_torch({}) as context:
        folder = shared_folder()
        for value in (1.0, 2.0):
            filled_engine(value).save(folder / str(value))

        def open_old_first(path):
            opened.append(path)
            return open_folder(folder / "1.0" if len(opened) == 1 and context.rank == 1 else path)

        open_checkpoint._open_folder = open_old_first
        try:
            assert value_at(folder / "2.0") == 2.0
            assert len(opened) == 2
            open_checkpoint._open_folder = lambda path: open_folder(folder / f"{context.rank + 1}.0")
            open_checkpoint.ATTEMPTS = 2
            with pytest.raises(CheckpointError, match=r"different checkpoints on different ranks"):
                value_at(folder / "2.0")
            open_checkpoint._open_folder = open_old_first
            (folder / "1.0" / "checkpoint.json").unlink(missing_ok=True)
            opened.clear()
            with pytest.raises(CheckpointError, match=r"checkpoint.json' is missing"):  # it has its name still
                value_at(folder / "1.0")
        finally:
            open_checkpoint._open_folder, open_checkpoint.ATTEMPTS = open_folder, attempts


def test_more_files_than_a_process_may_open(tmp_path):
    """The limit is raised, as far as the system lets it."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with paramp.launch_from_torch({}):
        filled_engine(1.0).save(tmp_path / "saved")
        soft = min(set(range(10_000)) - set(map(int, os.listdir("/proc/self/fd"))))  # not one more
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, limits[1]))
        try:
            with ExitStack() as stack:
                for _ in range(soft // 4 + 1):  # each has four files open
                    assert not stack.enter_context(OpenCheckpoint(tmp_path / "saved")).damage
            assert value_at(tmp_path / "saved") == 1.0
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
