"""Folders that are whole or not there, and every kind of damage to one."""

import contextlib
import json
import random
import shutil
from unittest import mock

import pytest
import torch
from pool import on_ranks, shared_folder
from reference import batches
from small_engines import assert_same_tensors, each_raises, everywhere, filled_engine, gpt_engine, save, train_step
from torch.testing._internal.two_tensor import TwoTensor

import paramp
from paramp.base.errors import CheckpointError, ConfigError
from paramp.checkpoint import atomic_dir, safetensors_io
from paramp.checkpoint.atomic_dir import Written
from paramp.checkpoint.convert import inspect
from paramp.checkpoint.open_checkpoint import OpenCheckpoint
from paramp.engine.checkpoint_manager import Checkpoints, find

EVIL = b"cposix\nsystem\n(S'touch EXECUTED'\ntR."
"""A pickle that runs a command."""
MIXED = {"precision": "16-mixed"}


def listed(path):
    """The files of a checkpoint, as its manifest has them."""
    with OpenCheckpoint(path) as checkpoint:
        return checkpoint.files


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a run of seven steps."""
    folder = tmp_path_factory.mktemp("trained")
    with paramp.launch_from_torch(MIXED):
        engine = gpt_engine(num_layers=1)
        checkpoints = Checkpoints(folder, every=1, keep_last=2, keep_every=4)
        for step, batch in enumerate(batches(7), start=1):
            train_step(engine, *batch)
            checkpoints.save(engine, step)
    return folder


@pytest.fixture
def folder(trained, tmp_path):
    """A copy of its last two checkpoints."""
    for name in ("step-00000006", "step-00000007"):
        shutil.copytree(trained / name, tmp_path / "copy" / name)
    return tmp_path / "copy"


def test_old_checkpoints_are_thinned_out(trained):
    assert sorted(path.name for path in trained.iterdir()) == ["step-00000004", "step-00000006", "step-00000007"]
    assert all(not inspect(path)["damage"] for path in trained.iterdir())


# ------------------------------------------------------------------------------------------------------------ damage


def truncate(data, chance):
    return data[: chance.randrange(len(data))]


def flip_a_bit(data, chance):
    place, bit = chance.randrange(len(data)), 1 << chance.randrange(8)
    return data[:place] + bytes([data[place] ^ bit]) + data[place + 1 :]


def append(data, chance):
    return data + chance.randbytes(chance.randrange(1, 9))


def test_two_hundred_damages_are_found_by_name_and_the_checkpoint_before_is_used(folder):
    chance = random.Random(6)
    with paramp.launch_from_torch({}):
        for number in range(200):
            file = chance.choice(sorted((folder / "step-00000007").iterdir()))
            damage, whole, said = (truncate, flip_a_bit, append, None)[number % 4], file.read_bytes(), []
            file.write_bytes(damage(whole, chance)) if damage else file.unlink()
            assert find("auto", folder, said.append) == folder / "step-00000006", (damage, file)
            assert len(said) == 1
            assert repr(str(file)) in said[0], (damage, said)
            file.write_bytes(whole)


@on_ranks(2)
def test_a_bit_in_any_file_of_any_rank_is_found_before_a_load(world):
    """Each rank compares a part of the files."""
    with paramp.launch_from_torch({"parallel": {"zero": 1}}):
        path, engine = shared_folder() / "saved", filled_engine(1.0)
        engine.save(path)
        for name in ("checkpoint.json", "rank-00000.safetensors", "rank-00001.safetensors"):
            whole = (path / name).read_bytes()
            everywhere(None)
            if world.rank == 0:
                (path / name).write_bytes(whole[:-2] + bytes([whole[-2] ^ 1]) + whole[-1:])
            everywhere(None)
            each_raises(CheckpointError, {f"{name}' is damaged: its checksum differs": lambda: engine.load(path)})
            if world.rank == 0:
                (path / name).write_bytes(whole)
            everywhere(None)
        engine.load(path)


def test_a_damaged_checkpoint_is_not_loaded(folder):
    for path in folder.iterdir():
        file = path / "rank-00000.safetensors"
        file.write_bytes(flip_a_bit(file.read_bytes(), random.Random(1)))
    with paramp.launch_from_torch(MIXED):
        engine = gpt_engine(num_layers=1, seed=2)
        before, newest = engine.full_state_dict(), folder / "step-00000007"
        calls = {
            r"rank-00000.safetensors' is damaged": lambda: engine.load(newest),
            r"none of the checkpoints in .* is complete": lambda: find("auto", folder, lambda _: None),
            "is damaged": lambda: find(str(newest), None),
        }
        each_raises(CheckpointError, calls)
        assert_same_tensors(engine.full_state_dict(), before)
        assert find("auto", folder / "nowhere") is None


def test_pickles_in_a_checkpoint_are_not_executed(folder, monkeypatch):
    """Neither added nor in the place of its own files."""
    monkeypatch.chdir(folder.parent)
    newest = folder / "step-00000007"
    for name in (".metadata", "evil.pkl", "__0_0.distcp", "rank-00001.safetensors"):
        (newest / name).write_bytes(EVIL)
    with paramp.launch_from_torch(MIXED):
        engine = gpt_engine(num_layers=1)
        assert find("auto", folder) == newest
        engine.load(newest)
        for name in ("manifest.json", "checkpoint.json", "rank-00000.safetensors"):
            whole = (newest / name).read_bytes()
            (newest / name).write_bytes(EVIL)
            each_raises(CheckpointError, {name: lambda: engine.load(newest)})
            (newest / name).write_bytes(whole)
    assert not (folder.parent / "EXECUTED").exists()


def some_tensor(header):
    return next(item for name, item in header["tensors"].items() if name.startswith("model.") and item["shape"])


FORGED = {
    "no parts": lambda header: some_tensor(header).update(chunks=[]),
    "half a part": lambda header: some_tensor(header)["chunks"][0][1].__setitem__(0, 1),
    "a file elsewhere": lambda header: some_tensor(header)["chunks"][0].__setitem__(2, "../step-00000006/rank-00000"),
    "a dtype that is none": lambda header: some_tensor(header).update(dtype="manual_seed"),
    "a shape below zero": lambda header: some_tensor(header).update(shape=[-1]),
    "no scaler": lambda header: header["values"].pop("scaler"),
    "a layout that is a number": lambda header: header["values"].update(layout=3),
    "no tensors": lambda header: header.pop("tensors"),
    "another dtype": lambda header: some_tensor(header).update(dtype="int32"),
}


def test_what_a_forged_checkpoint_says_is_refused(folder):
    """A header that was changed, with a manifest that fits; and a manifest of files outside of its folder."""
    path = folder / "step-00000007"
    text, files = (path / "checkpoint.json").read_text(), listed(path)
    with paramp.launch_from_torch(MIXED):
        engine = gpt_engine(num_layers=1)
        for change in FORGED.values():
            header = json.loads(text)
            change(header)
            new = atomic_dir.write_json(path / "checkpoint.json", header)
            (path / "manifest.json").write_bytes(atomic_dir._manifest(files | {"checkpoint.json": new}))
            words = r"is not a checkpoint header|does not have .* as checkpoint\.json"
            each_raises(CheckpointError, {words: lambda: engine.load(path)})
    for name in ("../other", "/dev/zero", ".hidden", "a/b", ""):
        (path / "manifest.json").write_bytes(atomic_dir._manifest(files | {name: Written(0, "0" * 64)}))
        (found,) = inspect(path)["damage"]
        assert "manifest.json' is damaged" in found


# --------------------------------------------------------------------------------------------- what may be replaced


def test_only_checkpoints_and_their_remains_are_replaced(tmp_path):
    places = {"thesis": "chapter.txt", "page": "manifest.json", "page with folders": "manifest.json"}
    for place, name in places.items():
        (tmp_path / place).mkdir()
        (tmp_path / place / name).write_text('{"name": "years of work"}')
    (tmp_path / "page with folders" / "empty").mkdir()
    with paramp.launch_from_torch({}):
        engine = filled_engine(1.0)
        for place, name in places.items():
            each_raises(
                CheckpointError, {"exists and is not a checkpoint": lambda at=place: engine.save(tmp_path / at)}
            )
            assert (tmp_path / place / name).read_text() == '{"name": "years of work"}'
        path = tmp_path / "new" / "deep" / "checkpoint"
        engine.save(path)
        engine.save(path)
        (path / "export").mkdir()
        each_raises(CheckpointError, {"has 'export', which no save writes, so it is not": lambda: engine.save(path)})
        (path / "export").rmdir()
        (path / "manifest.json").unlink()
        assert inspect(path)["damage"]
        engine.save(path)
        assert not inspect(path)["damage"]


@pytest.mark.parametrize("seen", [None, b"of"])
def test_a_file_that_the_first_rank_does_not_see_is_an_error(folder, seen):
    """Not at all, or not yet whole."""
    partial = (folder / "step-00000007").rename(folder / "step-00000008.partial-00000001")
    if seen is not None:
        (partial / "rank-00001.safetensors").write_bytes(seen)
    files = listed(partial) | {"rank-00001.safetensors": Written(3, "0" * 64)}
    message = r"rank-00001.safetensors' was written by another rank, but is not visible on rank 0; all machines have to"
    with pytest.raises(CheckpointError, match=message):
        atomic_dir.publish(partial, folder / "step-00000008", files)
    assert not (folder / "step-00000008").exists()


@on_ranks(2)
def test_a_run_does_not_begin_among_later_checkpoints(world):
    """Its own would be older, and be passed over or thinned out."""
    with paramp.launch_from_torch({}):
        folder = shared_folder()
        assert find(None, folder) is None
        engine, checkpoints = filled_engine(1.0), Checkpoints(folder, keep_last=2)
        for step in (10, 20):
            checkpoints.save(engine, step, wait=True)
        tenth, last = str(folder / "step-00000010"), folder / "step-00000020"
        each_raises(
            ConfigError,
            {
                r"has checkpoints of an earlier run, up to step-00000020; continue": lambda: find(None, folder),
                r"up to step-00000020": lambda: find(tenth, folder),
            },
        )
        assert find(str(last), folder) == last
        assert str(find(tenth, None)) == tenth
        for step in (1, 2, 3):
            checkpoints.save(engine, step, wait=True)
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["step-00000002", "step-00000003", "step-00000010", "step-00000020"]


@on_ranks(2)
def test_a_rank_that_cannot_write_is_every_ranks_error(world):
    """Of a save that is waited for, or when it ends, at the next save, and when the context is left."""
    with paramp.launch_from_torch({}):
        folder = shared_folder()
        (folder / "file").touch()
        engine = filled_engine(1.0)
        words, blocked = "was not written: rank 0 failed: NotADirectoryError", folder / "file" / "checkpoint"
        for wait in (True, False):
            each_raises(CheckpointError, {words: lambda wait=wait: save(engine, blocked, wait)})
        engine.save(blocked, wait=False)
        each_raises(CheckpointError, {words: lambda: engine.save(folder / "next")})
        full = mock.patch.object(safetensors_io, "write_file", side_effect=OSError(28, "No space left on device"))
        of_second = r"checkpoint' was not written: rank 1 failed: .*No space left on device"
        with full if world.rank == 1 else contextlib.nullcontext():
            each_raises(CheckpointError, {of_second: lambda: engine.save(folder / "checkpoint")})
        everywhere(None)  # rank 0 has deleted what was there
        assert everywhere([path.name for path in folder.iterdir()]) == [["file"]] * 2
        weight = next(engine.module.parameters())
        quantized = TwoTensor(torch.zeros_like(weight), torch.zeros_like(weight))
        for odd, found in ((object(), "object as state"), (quantized, "TwoTensor as state.*no quantized state")):
            if world.rank == 1:
                engine.optimizer.state[weight] = {"odd": odd}
            words_of_state = f"optimizer.0.weight.odd: got {found}"
            each_raises(CheckpointError, {words_of_state: lambda: engine.save(folder / "checkpoint")})

    def save_and_leave():
        with paramp.launch_from_torch({}):
            filled_engine(1.0).save(blocked, wait=False)

    each_raises(CheckpointError, {words: save_and_leave})


def test_a_lock_may_be_opened_by_whoever_may_open_a_plain_file_there(tmp_path):
    (tmp_path / "plain").touch()
    with atomic_dir._locked(tmp_path / "checkpoint"):
        modes = [path.stat().st_mode for path in tmp_path.iterdir()]
    assert modes == [modes[0]] * 2


def test_a_folder_that_cannot_be_written_to_is_an_error_before_the_run(tmp_path):
    (tmp_path / "file").write_text("")
    with paramp.launch_from_torch({}):
        for folder in (tmp_path / "file", tmp_path / "file" / "below"):
            with pytest.raises(ConfigError, match=r"checkpoint_dir: .* cannot be written to: "):
                find(None, folder)
        for path in ("", "/", "x" * 300, str(tmp_path / "none")):
            with pytest.raises(CheckpointError):
                find(path, None)
