"""Folders that are whole or not there, and every kind of damage to one."""

import json
import os
import random
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from pool import on_ranks
from reference import batches, small_gpt

import paramp
from paramp.base.errors import CheckpointError, ConfigError
from paramp.checkpoint import atomic_dir
from paramp.checkpoint.atomic_dir import Written
from paramp.checkpoint.open_checkpoint import OpenCheckpoint, problems
from paramp.checkpoint.run_folder import checkpoints_in
from paramp.engine.checkpoint_manager import Checkpoints, find

EVIL = b"cposix\nsystem\n(S'touch EXECUTED'\ntR."
"""A pickle that runs a command."""


def listed(path):
    """The files of a checkpoint, as its manifest has them."""
    with OpenCheckpoint(path) as checkpoint:
        return checkpoint.files


def train_and_save(folder, steps, **config):
    with paramp.launch_from_torch({"precision": "16-mixed"} | config):
        model = small_gpt(num_layers=1)
        engine, *_ = paramp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), model.loss)
        checkpoints = Checkpoints(folder, every=1, keep_last=2, keep_every=4)
        for step, (x, y) in enumerate(batches(steps), start=1):
            engine.forward_backward(x, y)
            engine.step()
            checkpoints.save(engine, step)
        return engine.full_state_dict()


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A folder with two checkpoints."""
    folder = tmp_path_factory.mktemp("pair")
    train_and_save(folder, 2)
    return folder


def test_old_checkpoints_are_thinned_out(tmp_path):
    train_and_save(tmp_path, 7)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000004", "step-00000006", "step-00000007"]
    assert all(not problems(path) for path in tmp_path.iterdir())


def truncate(file, chance):
    data = file.read_bytes()
    file.write_bytes(data[: chance.randrange(len(data))])


def flip_a_bit(file, chance):
    data = bytearray(file.read_bytes())
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    file.write_bytes(data)


def delete(file, chance):
    file.unlink()


def append(file, chance):
    with file.open("ab") as opened:
        opened.write(chance.randbytes(chance.randrange(1, 9)))


def test_two_hundred_damages_are_found_by_name_and_the_checkpoint_before_is_used(pair, tmp_path):
    chance = random.Random(6)
    with paramp.launch_from_torch({}):
        for number in range(200):
            folder = shutil.copytree(pair, tmp_path / str(number))
            file = chance.choice(sorted((folder / "step-00000002").iterdir()))
            damage = (truncate, flip_a_bit, delete, append)[number % 4]
            damage(file, chance)
            said = []
            assert find("auto", folder, said.append) == folder / "step-00000001", (damage, file)
            assert len(said) == 1
            assert repr(str(file)) in said[0], (damage, said)
            shutil.rmtree(folder)


def test_a_damaged_checkpoint_is_not_loaded(pair, tmp_path):
    folder = shutil.copytree(pair, tmp_path / "copy")
    for path in sorted(folder.iterdir()):
        flip_a_bit(path / "rank-00000.safetensors", random.Random(1))
    with paramp.launch_from_torch({"precision": "16-mixed"}):
        model = small_gpt(num_layers=1, seed=2)
        engine, *_ = paramp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), model.loss)
        before = engine.full_state_dict()
        with pytest.raises(CheckpointError, match=r"rank-00000.safetensors' is damaged"):
            engine.load(folder / "step-00000002")
        assert all(torch.equal(value, before[name]) for name, value in engine.full_state_dict().items())
        with pytest.raises(CheckpointError, match=r"none of the checkpoints in .* is complete"):
            find("auto", folder, lambda _: None)
        with pytest.raises(CheckpointError, match="is damaged"):
            find(str(folder / "step-00000001"), None)
        assert find("auto", tmp_path / "nowhere") is None


def test_pickles_in_a_checkpoint_are_not_executed(pair, tmp_path, monkeypatch):
    """Neither added nor in the place of its own files."""
    monkeypatch.chdir(tmp_path)
    folder = shutil.copytree(pair, tmp_path / "copy")
    newest = folder / "step-00000002"
    for name in (".metadata", "evil.pkl", "__0_0.distcp", "rank-00001.safetensors"):
        (newest / name).write_bytes(EVIL)
    with paramp.launch_from_torch({"precision": "16-mixed"}):
        model = small_gpt(num_layers=1)
        engine, *_ = paramp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), model.loss)
        assert find("auto", folder) == newest
        engine.load(newest)
        for name in ("manifest.json", "checkpoint.json", "rank-00000.safetensors"):
            whole = (newest / name).read_bytes()
            (newest / name).write_bytes(EVIL)
            with pytest.raises(CheckpointError, match=name):
                engine.load(newest)
            (newest / name).write_bytes(whole)
    assert not (tmp_path / "EXECUTED").exists()


def test_what_was_not_finished_is_no_checkpoint(pair, tmp_path):
    folder = shutil.copytree(pair, tmp_path / "copy")
    (folder / "step-00000002").rename(folder / "step-00000003.partial-0a1b2c3d")
    said = []
    with paramp.launch_from_torch({}):
        assert find("auto", folder, said.append) == folder / "step-00000001"
    assert len(said) == 1
    assert "step-00000003.partial-0a1b2c3d' is unfinished" in said[0]


def test_replacing_a_checkpoint_leaves_one_at_every_moment(pair, tmp_path, monkeypatch):
    path = shutil.copytree(pair / "step-00000001", tmp_path / "step-00000001")
    partial = shutil.copytree(pair / "step-00000002", tmp_path / "step-00000001.partial-00000001")
    files = listed(partial)

    class Interrupted(Exception):
        pass

    rename, renamed = type(path).rename, []

    def interrupt(self, target):
        renamed.append(self)
        if len(renamed) == 2:
            raise Interrupted
        return rename(self, target)

    with monkeypatch.context() as patched:
        patched.setattr(type(path), "rename", interrupt)
        with pytest.raises(Interrupted):
            atomic_dir.publish(partial, path, files)
    assert not path.exists()
    assert checkpoints_in(tmp_path) == [(1, path)]
    assert not problems(path)
    assert listed(path) == listed(pair / "step-00000001")
    assert not path.exists()  # who reads moves nothing
    atomic_dir.publish(partial, path, files)
    assert listed(path) == listed(pair / "step-00000002")
    assert [found.name for found in tmp_path.iterdir()] == ["step-00000001"]


def test_every_file_is_on_the_disk_before_the_rename(tmp_path, monkeypatch):
    path, synced, missing = tmp_path / "saved", set(), []
    sync, rename = os.fsync, type(tmp_path).rename

    def note_sync(descriptor):
        synced.add(os.fstat(descriptor).st_ino)
        sync(descriptor)

    def check_and_rename(self, target):
        if target == path:
            files = [self, *self.iterdir()]
            missing.append([file.name for file in files if file.stat().st_ino not in synced])
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(type(tmp_path), "rename", check_and_rename)
    with paramp.launch_from_torch({}):
        model = torch.nn.Linear(2, 2)
        engine, *_ = paramp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1))
        engine.save(path)
    assert len(listed(path)) > 1
    assert missing == [[]]


def test_a_file_that_the_first_rank_does_not_see_is_an_error(pair, tmp_path):
    partial = shutil.copytree(pair / "step-00000001", tmp_path / "step-00000001.partial-00000001")
    files = listed(partial) | {"rank-00001.safetensors": Written(3, "0" * 64)}
    message = r"rank-00001.safetensors' was written by another rank, but is not visible on rank 0; all machines have to"
    with pytest.raises(CheckpointError, match=message):
        atomic_dir.publish(partial, tmp_path / "step-00000001", files)
    assert not (tmp_path / "step-00000001").exists()


@on_ranks(2)
def test_a_run_does_not_begin_among_later_checkpoints(world):
    """Its own would be older, and be passed over or thinned out."""
    with paramp.launch_from_torch({}):
        folders = [tempfile.mkdtemp(prefix="paramp-test-")]
        torch.distributed.broadcast_object_list(folders)
        folder = Path(folders[0])
        assert find(None, folder) is None
        model = torch.nn.Linear(2, 2)
        engine, *_ = paramp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1))
        checkpoints = Checkpoints(folder, keep_last=2)
        for step in (10, 20):
            checkpoints.save(engine, step, wait=True)
        with pytest.raises(
            ConfigError, match=r"has checkpoints of an earlier run, up to step-00000020; continue from there"
        ):
            find(None, folder)
        with pytest.raises(ConfigError, match=r"up to step-00000020"):
            find(str(folder / "step-00000010"), folder)
        assert find(str(folder / "step-00000020"), folder) == folder / "step-00000020"
        assert find(str(folder / "step-00000010"), None) == folder / "step-00000010"
        for step in (1, 2, 3):
            checkpoints.save(engine, step, wait=True)
        torch.distributed.barrier()  # the first rank thins out when it has saved
        names = sorted(path.name for path in folder.iterdir())
        assert names == ["step-00000002", "step-00000003", "step-00000010", "step-00000020"]


def test_the_remains_of_a_checkpoint_are_replaced(pair, tmp_path):
    path = shutil.copytree(pair / "step-00000001", tmp_path / "saved")
    (path / "manifest.json").unlink()
    with paramp.launch_from_torch({}):
        model = torch.nn.Linear(2, 2)
        engine, *_ = paramp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1))
        engine.save(path)
    assert not problems(path)


def test_something_else_is_not_replaced(tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("years of work")
    with paramp.launch_from_torch({}):
        model = torch.nn.Linear(2, 2)
        engine, *_ = paramp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1))
        with pytest.raises(CheckpointError, match="exists and is not a checkpoint"):
            engine.save(tmp_path / "thesis")
        engine.save(tmp_path / "new" / "deep" / "checkpoint")
        engine.save(tmp_path / "new" / "deep" / "checkpoint")
    assert (tmp_path / "thesis" / "chapter.txt").read_text() == "years of work"


@on_ranks(2)
def test_a_rank_that_cannot_write_is_every_ranks_error(world):
    with paramp.launch_from_torch({}) as context:
        folders = [tempfile.mkdtemp(prefix="paramp-test-")]
        torch.distributed.broadcast_object_list(folders)
        (folder,) = folders
        model = torch.nn.Linear(2, 2)
        engine, *_ = paramp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1))
        blocked = Path(folder) / "file"
        blocked.write_text("")
        with pytest.raises(CheckpointError, match="was not written: rank 0 failed: NotADirectoryError"):
            engine.save(blocked / "checkpoint")
        engine.save(blocked / "checkpoint", wait=False)
        with pytest.raises(CheckpointError, match="was not written: rank 0 failed: NotADirectoryError"):
            engine.finish_saving()
        engine.save(blocked / "checkpoint", wait=False)
        with pytest.raises(CheckpointError, match="was not written: rank 0 failed: NotADirectoryError"):
            engine.save(Path(folder) / "next")
        if context.rank == 1:
            engine.optimizer.state[next(engine.module.parameters())] = {"odd": object()}
        with pytest.raises(CheckpointError, match=r"optimizer.weight.odd: got object as state"):
            engine.save(Path(folder) / "checkpoint")

    def save_and_leave():
        with paramp.launch_from_torch({}):
            model = torch.nn.Linear(2, 2)
            engine, *_ = paramp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1))
            engine.save(blocked / "checkpoint", wait=False)

    with pytest.raises(CheckpointError, match="was not written: rank 0 failed: NotADirectoryError"):
        save_and_leave()


def test_a_folder_with_another_manifest_is_not_replaced(tmp_path):
    (tmp_path / "manifest.json").write_text('{"name": "a web page"}')
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "manifest.json").write_text('{"name": "a web page"}')
    for folder in (tmp_path, alone):
        with (
            pytest.raises(CheckpointError, match="exists and is not a checkpoint"),
            atomic_dir.new_folder(folder),
        ):
            pass


def rewrite(path, change):
    """Change a checkpoint's header, and give it a manifest that fits."""
    header = json.loads((path / "checkpoint.json").read_text())
    change(header)
    files = listed(path)
    files["checkpoint.json"] = atomic_dir.write_json(path / "checkpoint.json", header)
    (path / "manifest.json").write_bytes(atomic_dir._manifest(files))


def some_tensor(header):
    return next(item for name, item in header["tensors"].items() if name.startswith("model.") and item["shape"])


FORGED = {
    "no parts": lambda header: some_tensor(header).update(chunks=[]),
    "half a part": lambda header: some_tensor(header)["chunks"][0][1].__setitem__(0, 1),
    "a file elsewhere": lambda header: some_tensor(header)["chunks"][0].__setitem__(2, "../step-00000001/rank-00000"),
    "a dtype that is none": lambda header: some_tensor(header).update(dtype="manual_seed"),
    "a shape below zero": lambda header: some_tensor(header).update(shape=[-1]),
    "no scaler": lambda header: header["values"].pop("scaler"),
    "a layout that is a number": lambda header: header["values"].update(layout=3),
    "no tensors": lambda header: header.pop("tensors"),
    "another dtype": lambda header: some_tensor(header).update(dtype="int32"),
}


@pytest.mark.parametrize("name", FORGED)
def test_what_a_forged_checkpoint_says_is_refused(pair, tmp_path, name):
    path = shutil.copytree(pair / "step-00000002", tmp_path / "forged")
    rewrite(path, FORGED[name])
    with paramp.launch_from_torch({"precision": "16-mixed"}):
        model = small_gpt(num_layers=1)
        engine, *_ = paramp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), model.loss)
        with pytest.raises(CheckpointError, match=r"is not a checkpoint header|does not have .* as checkpoint\.json"):
            engine.load(path)


@pytest.mark.parametrize("name", ["../other", "/dev/zero", ".hidden", "a/b", ""])
def test_a_manifest_names_files_of_its_folder_only(pair, tmp_path, name):
    path = shutil.copytree(pair / "step-00000002", tmp_path / "forged")
    files = listed(path) | {name: Written(0, "0" * 64)}
    (path / "manifest.json").write_bytes(atomic_dir._manifest(files))
    (found,) = problems(path)
    assert "manifest.json' is damaged" in found


def test_a_folder_that_cannot_be_written_to_is_an_error_before_the_run(tmp_path):
    (tmp_path / "file").write_text("")
    with paramp.launch_from_torch({}):
        for folder in (tmp_path / "file", tmp_path / "file" / "below"):
            with pytest.raises(ConfigError, match=r"checkpoint_dir: .* cannot be written to: "):
                find(None, folder)
        for path in ("", "/", "x" * 300, str(tmp_path / "none")):
            with pytest.raises(CheckpointError):
                find(path, None)
