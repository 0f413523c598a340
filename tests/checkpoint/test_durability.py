"""What a crash leaves of each way to save: the old checkpoint or the new one, whole; the new one once a save is done.

Each save is recorded (:mod:`disk`), and every folder that a crash at any moment may leave is loaded.
"""

import re

import pytest
import torch
from disk import NEEDS_ROOM, after, crashes, lines, make, picture_of, recording
from families import family, number
from pool import run_on_ranks
from small_engines import filled_engine, only_value, save

import paramp
from paramp.base.errors import CheckpointError
from paramp.checkpoint.atomic_dir import remove
from paramp.checkpoint.convert import export_weights, import_weights
from paramp.checkpoint.open_checkpoint import OpenCheckpoint
from paramp.checkpoint.safetensors_io import TensorFile
from paramp.engine.checkpoint_manager import Checkpoints, find

RANDOM = re.compile(r"partial-[0-9a-f]{8}")


@pytest.fixture
def disk(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    return folder


class Loaded:
    """The one value of all weights in a checkpoint. What has the bytes of a checkpoint before is not loaded again."""

    def __init__(self):
        self._engine = filled_engine(0.0)
        self._values = {}

    def __call__(self, path):
        with OpenCheckpoint(path) as checkpoint:
            assert checkpoint.problems() == []
            digest = checkpoint.digest
        if digest not in self._values:
            self._engine.load(path)
            self._values[digest] = only_value(self._engine.full_state_dict().values())
        return self._values[digest]


def value_or_none(loaded, path):
    """None: there is no checkpoint of that name, which has to be so, and not half of one."""
    try:
        return loaded(path)
    except CheckpointError as error:
        if "no such checkpoint" not in str(error):
            raise
        return None


def check_every_crash(before, operations, tmp_path, path, values):
    """At each crash ``path`` has one of ``values``, in the order of their saves, and none that is older than a note."""
    loaded, found = Loaded(), set()
    for index, (where, notes, picture) in enumerate(crashes(before, operations)):
        folder = make(picture, tmp_path / f"crash {index}")
        value = value_or_none(loaded, folder / path)
        least = max([-1, *(values.index(float(note)) for note in notes)])
        assert value in [None, *values][least + 1 :], f"{value} {where}"
        found.add(value)
    return found


# ------------------------------------------------------------------------------------------------- one process


@pytest.mark.parametrize("wait", [True, False])
def test_a_crash_leaves_the_old_checkpoint_or_the_new_one(disk, tmp_path, wait):
    """In a new folder of a new folder, and where a checkpoint is replaced; a later save cleans up."""
    with paramp.launch_from_torch({}):
        with recording(disk) as recorder:
            for value in (1.0, 2.0):
                save(filled_engine(value), disk / "runs" / "a" / "saved", wait)
                recorder.note(str(value))
        recorder.check()
        found = check_every_crash({}, recorder.operations, tmp_path, "runs/a/saved", [1.0, 2.0])
        assert found == {None, 1.0, 2.0}
        loaded, engine = Loaded(), filled_engine(3.0)
        by_names = {
            tuple(sorted(str(path.relative_to(crash)) for path in crash.rglob("*"))): crash
            for crash in tmp_path.glob("crash *")
        }
        for folder in by_names.values():
            save(engine, folder / "runs" / "a" / "saved")
            assert [left.name for left in (folder / "runs" / "a").iterdir()] == ["saved"]
            assert loaded(folder / "runs" / "a" / "saved") == 3.0


@pytest.mark.parametrize("wait", [True, False])
def test_the_order_of_a_save(disk, wait):
    """Data before names, names before what they replace is deleted."""
    with paramp.launch_from_torch({}):
        save(filled_engine(1.0), disk / "saved")
        with recording(disk) as recorder:
            save(filled_engine(2.0), disk / "saved", wait)
    recorder.check()
    partial, doomed = dict.fromkeys(name for line in lines(recorder.operations) for name in RANDOM.findall(line))
    text = "\n".join(lines(recorder.operations)).replace(partial, "new").replace(doomed, "doomed")
    *order, first, second, third, folder, lock = text.splitlines()
    files = ("rank-00000.safetensors", "checkpoint.json", "manifest.json")
    assert order == [
        "create saved.partial-lock",
        "mkdir saved.new",
        *(f"{kind} saved.new/{name}" for name in files for kind in ("create", "write", "sync")),
        "sync saved.new",
        "rename saved to saved.replaced",
        "rename saved.new to saved",
        "sync .",
        "rename saved.replaced to saved.doomed",
        "sync .",
    ]
    assert {first, second, third} == {f"unlink saved.doomed/{name}" for name in files}
    assert (folder, lock) == ("rmdir saved.doomed", "unlink saved.partial-lock")
    (disk / "saved" / "notes.txt").write_text("mine")  # so that the folder stays
    with recording(disk) as recorder:
        remove(disk / "saved")
    assert lines(recorder.operations)[:2] == ["unlink saved/manifest.json", "sync saved"]


@family
@pytest.mark.parametrize("place", range(number(3, 24)))
def test_a_crash_after_a_killed_save_and_another_one(disk, tmp_path, place):
    """The names that a killed process has changed may not be on the disk when the next process deletes what it left."""
    again = tmp_path / "again"
    with paramp.launch_from_torch({}):
        save(filled_engine(1.0), disk / "saved")
        before = picture_of(disk)
        with recording(disk) as first:
            save(filled_engine(2.0), disk / "saved")
        # After the renames first, then after every other operation.
        renames = [index + 1 for index, one in enumerate(first.operations) if one.kind == "rename"]
        places = list(dict.fromkeys([*renames, *range(len(first.operations))]))
        done = first.operations[: places[place % len(places)]]
        make(after(before, done), again)
        with recording(again) as second:
            save(filled_engine(3.0), again / "saved")
            second.note("3.0")
        second.check()
        check_every_crash(before, [*done, *second.operations], tmp_path, "saved", [1.0, 2.0, 3.0])


def test_a_crash_of_a_run_leaves_its_newest_and_its_best_checkpoint(disk, tmp_path):
    """While a run makes its folder, thins out old checkpoints and writes which is the best."""
    metrics = {1: 3.0, 2: 1.0, 3: 2.0, 4: 0.5}
    with paramp.launch_from_torch({}):
        loaded, engine = Loaded(), filled_engine(1.0)
        with recording(disk) as recorder:
            checkpoints = Checkpoints(disk / "new" / "run", keep_last=1, keep_best="min")
            assert checkpoints.newest() is None
            for step, metric in metrics.items():
                engine = filled_engine(float(step))
                checkpoints.save(engine, step, metric=metric, wait=step % 2 == 0)
                engine.finish_saving()
                recorder.note(str(step))
        recorder.check()
        assert sorted(path.name for path in (disk / "new" / "run").iterdir()) == ["best.json", "step-00000004"]
        seen = set()
        for index, (where, notes, picture) in enumerate(crashes({}, recorder.operations)):
            folder = make(picture, tmp_path / f"crash {index}") / "new" / "run"
            last = max(map(int, notes), default=0)
            newest, best = find("auto", folder, lambda _: None), Checkpoints(folder).best()
            assert (0 if newest is None else loaded(newest)) in (last, last + 1), where
            # The best of the saves that were done; or of the next, of which best.json may be there already.
            bests = [min(list(metrics)[:count], key=metrics.get, default=0) for count in (last, last + 1)]
            assert (0 if best is None else loaded(best)) in bests, where
            seen.add((newest and newest.name, best and best.name))
        assert len(seen) >= 6


def record_of_a_rank(world, parallel, wait, disk):
    plan = {"0": "colwise", "1": "rowwise"} if "tensor" in parallel else None
    with paramp.launch_from_torch({"parallel": parallel}):
        with recording(disk) as recorder:
            for value in (1.0, 2.0):
                torch.distributed.barrier()
                save(filled_engine(value, plan=plan), disk / "saved", wait)
                torch.distributed.barrier()
                recorder.note(str(value))
        return recorder.operations


@pytest.mark.parametrize(
    ("parallel", "wait"),
    [({"data": 2, "zero": 1}, True), ({"tensor": 2}, False), ({"pipeline": 2}, True), ({"data": {"shard": 2}}, False)],
)
def test_a_crash_of_several_ranks_leaves_the_old_checkpoint_or_the_new_one(disk, tmp_path, parallel, wait):
    """Each rank writes a file; the records of all are put in order, and what is left is loaded in one process."""
    records = run_on_ranks(2, __name__, "record_of_a_rank", {"parallel": parallel, "wait": wait, "disk": disk})
    operations = [one for record in records for one in record]
    assert after({}, operations) == picture_of(disk)
    for name, record in zip(("rank-00000", "rank-00001"), records, strict=True):
        assert sum(line.endswith(f"/{name}.safetensors") and line.startswith("write") for line in lines(record)) == 2
    notes = [one for one in records[0] if one.kind != "note"] + records[1]  # true once the later rank has written it
    with paramp.launch_from_torch({}):
        assert check_every_crash({}, notes, tmp_path, "saved", [1.0, 2.0]) == {None, 1.0, 2.0}


def test_a_crash_leaves_an_exported_file_or_none(disk, tmp_path):
    """A file of weights, in a new folder; and the checkpoint that is made of it."""
    with paramp.launch_from_torch({}):
        save(filled_engine(1.0), disk / "saved")
        before = picture_of(disk)
        with recording(disk) as recorder:
            export_weights(disk / "saved", disk / "new" / "weights.safetensors")
            recorder.note("exported")
            import_weights(disk / "new" / "weights.safetensors", disk / "new" / "imported")
            recorder.note("imported")
        recorder.check()
        loaded = Loaded()
        for index, (where, notes, picture) in enumerate(crashes(before, recorder.operations)):
            folder = make(picture, tmp_path / f"crash {index}")
            assert loaded(folder / "saved") == 1.0
            for name, note, value in (
                ("weights.safetensors", "exported", value_of_file),
                ("imported", "imported", loaded),
            ):
                path = folder / "new" / name
                if note in notes or path.exists():
                    assert value(path) == 1.0, where


def value_of_file(path):
    file = TensorFile(path)
    return only_value(file.read(name) for name in file.shapes)


@pytest.mark.parametrize(("exists", "wait"), [(True, True), (False, False)])
def test_a_disk_that_is_full_at_any_moment_of_a_save(tmp_path, exists, wait):
    """An error if and only if a crash could lose the new checkpoint; the old one stays; the next save works."""
    with paramp.launch_from_torch({}):
        old, new, next_, loaded, failed = filled_engine(1.0), filled_engine(2.0), filled_engine(3.0), Loaded(), []
        for full_at in range(100):
            disk, error = tmp_path / f"disk {full_at}", None
            path = disk / "runs" / "saved"
            disk.mkdir()
            if exists:
                save(old, path)
            with recording(disk, full_at=full_at) as recorder:
                try:
                    save(new, path, wait)
                except CheckpointError as raised:
                    error = str(raised)
            recorder.check()
            if recorder.failed is None:
                break
            failed.append(recorder.failed)
            assert value_or_none(loaded, path) in (1.0 if exists else None, 2.0), failed
            kept = make(after(recorder.before, recorder.operations, only_synced=True), tmp_path / f"kept {full_at}")
            assert value_or_none(loaded, kept / "runs" / "saved") == (2.0 if error is None else 1.0 if exists else None)
            if error is not None:
                assert re.search(r"saved' was not written: rank 0 failed: .*No space left on device", error)
                assert {name.name for name in path.parent.glob("*")} <= {"saved", "saved.replaced"}
            save(next_, path)
            assert loaded(path) == 3.0
            assert [left.name for left in path.parent.iterdir()] == ["saved"]
        assert error is None
        assert {line.split()[0] for line in failed} == set(NEEDS_ROOM)
        assert len(failed) >= 15
