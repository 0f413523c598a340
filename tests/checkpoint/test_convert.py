"""Export, import and inspect, and the files of tensors, which the package ``safetensors`` reads too."""

import copy
import json
import re
import shutil

import pytest
import safetensors.torch
import torch
from reference import batches
from small_engines import assert_same_tensors, filled_engine, gpt_engine

import paramp
from paramp.base.errors import CheckpointError
from paramp.checkpoint.safetensors_io import DTYPES, TensorFile, write_tensors
from paramp.tools.cli import main


def bits(value):
    return value.contiguous().reshape(-1).view(torch.uint8)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint after a skipped step and two others in 16-naive, and the model's weights then."""
    path = tmp_path_factory.mktemp("exchange") / "checkpoint"
    with paramp.launch_from_torch({"precision": {"mode": "16-naive", "init_scale": 64.0}}):
        engine = gpt_engine()
        for batch in batches(3):
            engine.forward_backward(*batch)
            if not engine.num_skipped:
                next(engine.module.parameters()).grad.fill_(torch.inf)
            engine.step()
        engine.save(path)
        return path, engine.full_state_dict()


def test_safetensors_files_are_what_the_package_reads_and_writes(tmp_path):
    tensors = {}
    for name, dtype in DTYPES.items():
        value = torch.randint(0, 2, (3, 2)).to(torch.float32 if dtype.itemsize == 1 else torch.int32)
        tensors[name] = value.to(dtype)
    tensors |= {"scalar": torch.tensor(3.5), "empty": torch.zeros(0, 4), "strided": torch.arange(6.0).view(2, 3).t()}
    shapes = {name: (value.dtype, value.shape) for name, value in tensors.items()}
    written = write_tensors(tmp_path / "ours", shapes, tensors.__getitem__, {"format": "pt"})
    assert written.size == (tmp_path / "ours").stat().st_size
    theirs = safetensors.torch.load_file(tmp_path / "ours")
    assert theirs.keys() == tensors.keys()
    safetensors.torch.save_file({name: value.contiguous() for name, value in tensors.items()}, tmp_path / "theirs")
    ours = TensorFile(tmp_path / "ours")
    for name, value in tensors.items():
        for found in (theirs[name], TensorFile(tmp_path / "theirs").read(name), ours.read(name)):
            assert found.dtype is value.dtype
            assert found.shape == value.shape
            assert torch.equal(bits(found), bits(value)), name
        assert ours.shapes[name] == (value.dtype, tuple(value.shape))
        if value.ndim == 2 and value.numel():
            assert torch.equal(bits(ours.read(name, (slice(1, 3), slice(0, 1)))), bits(value[1:3, :1]))
    assert ours.read("empty", (slice(0, 0), slice(1, 3))).shape == (0, 2)


def test_what_is_no_safetensors_file_is_refused(tmp_path):
    file = tmp_path / "model.safetensors"
    write_tensors(file, {"a": (torch.float32, (2,))}, lambda _: torch.ones(2))
    data = file.read_bytes()
    replaced = ((b'"F32"', b'"F33"'), (b'"data_offsets":[0', b'"data_offsets":[4'), (data[8:9], b"x"))
    damaged = [data[:5], data[:40], data[:-1], b"\xff" * 8 + data[8:], *(data.replace(*pair, 1) for pair in replaced)]
    for wrong in damaged:
        file.write_bytes(wrong)
        with pytest.raises(CheckpointError, match="not a complete safetensors file"):
            TensorFile(file)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "stored"])
def test_export_writes_the_model(saved, tmp_path, dtype, capsys):
    path, weights = saved
    file = tmp_path / "new" / "model.safetensors"
    assert main(["export", str(path), "--to", str(file), "--dtype", dtype]) == 0
    assert capsys.readouterr().out.strip() == str(file)
    exported = safetensors.torch.load_file(file)
    wanted = {"fp32": torch.float32, "bf16": torch.bfloat16, "stored": torch.float32}[dtype]
    assert exported.keys() == {name for name in weights if name != "head.weight" or "head.weight" in exported}
    assert all(torch.equal(value, weights[name].to(wanted)) for name, value in exported.items())
    assert main(["export", str(path), "--to", str(file)]) == 2
    assert "exists already" in capsys.readouterr().err


def test_a_weight_that_overflows_in_the_dtype_is_not_exported(tmp_path, capsys):
    path, file = tmp_path / "checkpoint", tmp_path / "model.safetensors"
    with paramp.launch_from_torch({}):
        engine = filled_engine(torch.inf)
        lowest = -torch.finfo(torch.float32).max
        engine.module[1].weight.data[1:3] = torch.tensor([[lowest], [-1e9]])  # as masks have it
        engine.save(path / "infinite")
        engine.module[1].weight.data[0] = 1e5
        engine.save(path / "large")
    assert main(["export", str(path / "large"), "--to", str(file), "--dtype", "fp16"]) == 2
    assert "--dtype: 1.weight has values up to 100000, which overflow in float16" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [path]
    for name, dtype in (("infinite", "fp16"), ("large", "bf16")):
        assert main(["export", str(path / name), "--to", str(tmp_path / name), "--dtype", dtype]) == 0


def test_an_imported_file_is_loaded_and_the_rest_stays(saved, tmp_path, capsys):
    _, weights = saved
    file, path = tmp_path / "model.safetensors", tmp_path / "imported"
    # with every name of a tied weight, as other programs write them
    safetensors.torch.save_file({name: value.clone() for name, value in weights.items()}, file)
    assert main(["import", str(file), "--to", str(path)]) == 0
    with paramp.launch_from_torch({"precision": {"mode": "16-mixed", "init_scale": 64.0}, "ema": {"decay": 0.5}}):
        engine, tracked = gpt_engine(seed=1), torch.optim.SGD([torch.ones(1)], lr=0.5)
        engine.track("thing", tracked)
        engine.forward_backward(*next(batches(1)))
        assert engine.step().stepped
        before, random = copy.deepcopy(engine.optimizer.state_dict()["state"]), torch.get_rng_state()
        groups, scaler = copy.deepcopy(engine.optimizer.state_dict()["param_groups"]), engine.scaler.state_dict()
        assert scaler["_growth_tracker"] == 1
        engine.load(path)
        assert_same_tensors(engine.full_state_dict(), weights)
        assert_same_tensors(engine.ema.full_state_dict(), weights)
        assert (engine.num_steps, engine.num_skipped) == (1, 0)
        assert engine.scaler.state_dict() == scaler
        assert engine.optimizer.state_dict()["param_groups"] == groups
        assert tracked.param_groups[0]["lr"] == 0.5
        after = engine.optimizer.state_dict()["state"]
        assert before.keys() == after.keys() != set()
        for index, state in before.items():
            assert_same_tensors(after[index], state)
        assert torch.equal(torch.get_rng_state(), random)
    assert main(["inspect", str(path)]) == 0
    assert "weights only, imported from model.safetensors" in capsys.readouterr().out


def test_inspect_says_what_is_there_and_what_is_damaged(saved, tmp_path, capsys):
    path = shutil.copytree(saved[0], tmp_path / "copy")
    (path / "evil.pkl").write_bytes(b"cos\nsystem\n(S'touch /tmp/never'\ntR.")
    assert main(["inspect", str(path)]) == 0
    out = capsys.readouterr().out
    assert "complete" in out.splitlines()[0]
    assert "saved after 2 steps, 1 skipped; pp 1, dp 1, tp 1" in out
    assert "precision 16-naive; AdamW" in out
    assert "evil.pkl is not one of them, and is not read" in out
    assert re.search(r"model\.embedding\.tokens\.weight +float32 +\(128, 32\)", out)
    file = path / "rank-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-3] ^= 8
    file.write_bytes(data)
    assert main(["inspect", str(path), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["damage"] == [f"{str(file)!r} is damaged: its checksum differs from the manifest's"]
    assert found["values"]["counts"][:2] == [2, 1]
    config = found["values"]["config"]
    assert (config["precision.scaling.init_scale"], config["parallel.zero"]) == (64.0, 0)
    unfinished = tmp_path / "copy.partial-0123abcd"
    unfinished.mkdir()
    shutil.copytree(saved[0], tmp_path / "step-00000002")
    (tmp_path / "logs").mkdir()
    assert main(["inspect", str(tmp_path)]) == 1
    title, head, *lines = capsys.readouterr().out.splitlines()
    assert title == f"{tmp_path}: 3 checkpoints"
    assert head.split() == ["checkpoint", "steps", "skipped", "layout", "size", "saved"]
    row = r" +2 +1 +pp 1, dp 1, tp 1, stages 1, zero 0 +\d\.\d MB  20.{17}  "
    assert re.fullmatch(f"  copy{row}incomplete: .*checksum differs.*", lines[0])
    assert re.fullmatch(r"  copy\.partial-0123abcd +incomplete: .* is unfinished: saving it was interrupted", lines[1])
    assert re.fullmatch(f"  step-00000002{row}complete", lines[2])
    assert len(lines) == 3
    shutil.rmtree(unfinished)
    shutil.rmtree(path)
    assert main(["inspect", str(tmp_path), "--json"]) == 0
    (listed,) = json.loads(capsys.readouterr().out)["checkpoints"]
    assert (listed["steps"], listed["skipped"], listed["layout"]["tp"], listed["damage"]) == (2, 1, 1, [])
    path = tmp_path / "step-00000002"
    (path / "manifest.json").unlink()
    assert main(["inspect", str(path)]) == 1
    assert "manifest.json' is missing" in capsys.readouterr().out
    assert main(["inspect", str(tmp_path / "none")]) == 1
    assert "no such checkpoint" in capsys.readouterr().out
