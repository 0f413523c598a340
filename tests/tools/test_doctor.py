"""The doctor's report on made-up machines."""

import json
import os
import re
import subprocess
import sys
import tomllib
import types

import pytest
import torch
from commands import ROOT

import paramp
from paramp.base.installed_packages import PackageStatus
from paramp.precision.modes import PRESETS
from paramp.tools import doctor
from paramp.tools.cli import main

KEYS = {
    *("versions", "commit", "device", "devices", "gpu_problems", "backends", "launcher", "mpi", "slurm"),
    *("apex", "torchao", "transformer_engine", "compile", "modes"),
}


@pytest.fixture
def bare(tmp_path, monkeypatch):
    """No launcher, no GPU, no program on the path, and a folder in front of everything that is installed."""
    for name in list(os.environ):
        if name.startswith(("SLURM_", "OMPI_", "PMI_", "MPI_")) or name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    (tmp_path / "bin").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "apex", None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(doctor, "has_native_fp16", lambda kind: kind == "cuda")
    return tmp_path


def put(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def gpu(monkeypatch, major, minor, torchao=None, transformer_engine=None):
    """A GPU, and the versions of the packages that are installed beside it."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    found = types.SimpleNamespace(name="GPU X", major=major, minor=minor)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: found)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    for name, version in (("torchao", torchao), ("transformer_engine", transformer_engine)):
        status = PackageStatus(found=version is not None, version=version, reason=f"as for {name}")
        monkeypatch.setattr(doctor, f"find_{name}", lambda status=status: status)


def test_the_command_prints_text_and_json_and_exits_with_0(bare, capsys):
    assert main(["doctor"]) == 0
    screen = capsys.readouterr().out
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found.keys() == KEYS
    page = (ROOT / "docs" / "doctor.md").read_text(encoding="utf-8")
    assert all(f"`{key}`" in page for key in KEYS)
    assert found["modes"].keys() == PRESETS.keys()
    assert len(screen.splitlines()) < 40
    for name, mode in found["modes"].items():
        assert mode["why"] in screen
        assert any(line.split()[:2] == [name, mode["runs"]] for line in screen.splitlines())
    assert f"torch {torch.__version__}" in screen
    assert "launcher  none: a world of one" in screen
    why = f"this CPU has no fp16 arithmetic: {doctor.IN_FP32}; compiled blocks run eagerly"
    for name in ("16-mixed", "16-naive", "O2", "16-true"):
        assert found["modes"][name] == {"runs": "emulated", "why": why}
    assert found["modes"]["32-true"] == {"runs": "natively", "why": "float32 products"}


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (RuntimeError("the NVIDIA driver is too old\nFor debugging set a variable"), "the NVIDIA driver is too old"),
        (torch.cuda.DeferredCudaCallError(), "DeferredCudaCallError"),
    ],
    ids=["two_lines", "empty"],
)
def test_a_gpu_that_cannot_be_used_is_a_line_of_the_report(error, why, bare, monkeypatch, capsys):
    """A machine whose only GPU cannot be used counts as one without."""

    def properties(index):
        raise error

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    assert main(["doctor"]) == 0
    assert f"GPU 0 cannot be used: {why}" in capsys.readouterr().out
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["device"], found["gpu_problems"]) == ("cpu", [f"GPU 0 cannot be used: {why}"])


def test_the_version_stands_in_one_place(capsys):
    """In the package; pyproject.toml reads it there, and the newest entry of the changelog is of it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "version" not in project["project"]
    assert "version" in project["project"]["dynamic"]
    assert project["tool"]["hatch"]["version"] == {"path": "paramp/__init__.py"}
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.M)
    assert newest is not None
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["--version"])
    assert capsys.readouterr().out == f"paramp {paramp.__version__}\n"
    assert newest[1] == paramp.__version__ == doctor.examine()["versions"]["paramp"]


def test_a_clone_and_its_worktrees_show_their_commits_without_git(tmp_path, monkeypatch):
    clone, tree = tmp_path / "clone", tmp_path / "tree"
    clone.mkdir()

    def git(*arguments):
        result = subprocess.run(["git", "-C", str(clone), *arguments], check=True, capture_output=True, text=True)
        return result.stdout.strip()

    def commit():
        git("-c", "user.name=A", "-c", "user.email=a@b", "commit", "-q", "--allow-empty", "-m", str(len(made)))
        made.append(git("rev-parse", "HEAD"))
        return made[-1]

    made: list[str] = []
    git("init", "-q")
    assert [doctor._commit(folder) for folder in (tmp_path, clone)] == [None, None]
    shown = []

    def show(folder):
        with monkeypatch.context() as without:
            without.setenv("PATH", "")
            shown.append(doctor._commit(folder))

    commit()
    show(clone)  # a branch in a file of its own
    git("pack-refs", "--all")
    show(clone)
    git("worktree", "add", "-q", "-b", "B", str(tree))
    commit()
    show(tree)
    show(clone)
    git("checkout", "-q", "--detach")
    commit()
    show(clone)
    assert shown == [sha[:10] for sha in (made[0], made[0], made[0], made[1], made[2])]
    assert len(set(made)) == 3
    monkeypatch.setattr(doctor, "_commit", lambda _: shown[0])
    assert f"paramp    {paramp.__version__} (commit {shown[0]}), Python" in doctor.doctor()


OF_TE = {"transformer-engine", "transformer-engine-float16"}


@pytest.mark.parametrize(
    ("capability", "packages", "natively"),
    [
        ((7, 0), {"torchao": "1"}, {"32-true", "64-true", "16-mixed", "16-naive", "O2", "O3", "16-true"}),
        ((8, 0), {"torchao": "1"}, set(PRESETS) - {"fp8-mixed"} - OF_TE),
        ((9, 0), {"torchao": "1"}, set(PRESETS)),
        ((9, 0), {"transformer_engine": "2.1"}, set(PRESETS) - {"fp8-mixed"}),
        ((9, 0), {}, set(PRESETS) - {"fp8-mixed"} - OF_TE),
    ],
)
def test_native_modes_follow_from_the_gpus_capability_and_packages(bare, monkeypatch, capability, packages, natively):
    gpu(monkeypatch, *capability, **packages)
    found = doctor.examine()
    modes = found["modes"]
    assert {name for name, mode in modes.items() if mode["runs"] == "natively"} == natively
    if "torchao" in packages:
        assert {mode["runs"] for mode in modes.values()} <= {"natively", "emulated"}
    else:
        assert modes["fp8-mixed"] == {"runs": "no", "why": "as for torchao"}
    if "transformer_engine" in packages:
        assert modes["transformer-engine"] == {"runs": "natively", "why": "Transformer Engine 2.1"}
    assert found["devices"][0] == {"kind": "cuda", "name": "GPU X", "capability": "{}.{}".format(*capability)}
    assert (found["device"], found["backends"]["chosen"]) == ("cuda", "nccl")


def test_a_gpu_compiles_with_triton_only(bare, monkeypatch):
    gpu(monkeypatch, 9, 0)
    monkeypatch.setitem(sys.modules, "triton", None)
    assert doctor.examine()["compile"] == {"runs": False, "why": "no package triton is installed"}
    monkeypatch.delitem(sys.modules, "triton")
    put(bare / "triton" / "__init__.py", "raise AssertionError('imported')\n")
    assert doctor.examine()["compile"] == {"runs": True, "why": None}


def test_the_unrelated_apex_package_is_named(bare, monkeypatch):
    monkeypatch.delitem(sys.modules, "apex")
    put(bare / "apex" / "__init__.py", "raise AssertionError('imported')\n")
    found = doctor.examine()["apex"]
    assert found["kind"] == "wrong"
    assert "not NVIDIA's" in found["reason"]
    assert found["reason"] in doctor.doctor()


SLURM = {"JOB_ID": "71", "STEP_ID": "0", "PROCID": "3", "LOCALID": "1", "NTASKS": "4", "JOB_NODELIST": "gpu[01-02]"}


def test_missing_torchrun_variables_are_reported_without_an_exception(bare, monkeypatch):
    """And the job of Slurm is."""
    with monkeypatch.context() as patch:
        patch.setenv("RANK", "0")
        found = doctor.examine()["launcher"]
        assert found["name"] is None
        assert "WORLD_SIZE" in found["problem"]
        assert found["problem"] in doctor.doctor()
        assert main(["doctor"]) == 0
    for name, value in SLURM.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    put(bare / "bin" / "srun", "#!/bin/sh\n")
    found = doctor.examine()
    assert found["launcher"] == {"name": "slurm", "rank": 3, "world_size": 4, "problem": None}
    assert found["slurm"] == {"job": "71", "nodes": "gpu[01-02]", "tasks": "4", "srun": str(bare / "bin" / "srun")}
    assert "launcher  slurm: rank 3 of 4" in doctor.doctor()


@pytest.mark.parametrize(
    ("program", "kind"),
    [
        ("#!/bin/sh\necho 'mpirun (Open MPI) 5.0.3'\n", "Open MPI"),
        ("#!/bin/sh\necho 'HYDRA build details:'\necho 'Version: 4.2'\n", "MPICH"),
        ("#!/bin/sh\necho who knows\n", "an unknown kind"),
        ("not a program\x00", "an unknown kind"),
    ],
)
def test_the_kind_of_mpirun_is_recognised_and_a_broken_one_is_no_exception(bare, program, kind):
    put(bare / "bin" / "mpirun", program)
    found = doctor.examine()["mpi"]
    assert (found["mpirun"], found["path"]) == (kind, str(bare / "bin" / "mpirun"))
    assert f"mpirun of {kind} at" in doctor.doctor()
    assert main(["doctor"]) == 0
