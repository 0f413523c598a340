"""What an installation gives to a user's project: types, folders of its own that stay its own, and no file too many."""

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest
from commands import ROOT
from families import family, long

import paramp

SCRIPT = """
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import paramp


def main(data: Dataset[torch.Tensor]) -> None:
    config = {"parallel": {"tensor": 2}, "precision": "16-mixed", "gradient_accumulation": 2, "clip_grad_norm": 1.0}
    with paramp.launch_from_torch(config) as context:
        engine, loader, test_loader, schedule = paramp.initialize(
            lambda: nn.Linear(8, 8),
            lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
            nn.functional.mse_loss,
            DataLoader(data, batch_size=4),
            None,
            lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 10),
        )
        for epoch in range(loader.epoch, 2):
            for x, y in loader:
                loss = engine.forward_backward(x, y)
                result = engine.step()
                schedule.step()
                engine.zero_grad()
                if result.stepped and context.is_main and context.tp.rank == 0:
                    print(epoch, loss.item(), result.grad_norm, result.loss_scale, schedule.get_last_lr())
        print(engine.step().overflow, engine.num_steps, engine.state_dict().keys(), len(loader), test_loader is None)
"""
MISTAKES = {
    "engine.sate_dict()": '"Engine" has no attribute "sate_dict"; maybe "state_dict"?',
    "context.is_mian": '"ParallelContext" has no attribute "is_mian"; maybe "is_main"?',
    "schedule.get_last_rl()": '"Scheduler" has no attribute "get_last_rl"; maybe "get_last_lr"?',
    "paramp.luanch()": 'Module has no attribute "luanch"; maybe "launch"?',
}
MISTAKES_WITH_TORCH = {
    "engine.step().overflwo": '"StepResult" has no attribute "overflwo"; maybe "overflow"?',
    "loader.epohc": '"ShardedLoader[Tensor]" has no attribute "epohc"',
    "test_loader.epoch": 'Item "None" of "ShardedLoader[Any] | None" has no attribute "epoch"',
    "engine.scaler.get_sacle()": '"DistributedGradScaler" has no attribute "get_sacle"',
}


def installed_editable(folder, *others):
    """The Python of a new environment with what an editable installation of this tree adds, and the folders ``others``.

    ``test_an_editable_installation_is_a_path`` shows that it adds nothing else.
    """
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "paramp.pth").write_text(f"{ROOT}\n")
    (packages / "others.pth").write_text("".join(f"{path}\n" for path in others))
    return folder / "bin" / "python"


def output(*command, cwd):
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "MYPY"))}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert not done.stderr, done.stderr
    return done.stdout


@pytest.mark.parametrize("with_torch", [False, pytest.param(True, marks=[family, long])])
def test_mypy_knows_the_types_of_a_script_elsewhere_and_finds_its_mistakes(tmp_path, with_torch):
    """Without torch, whose types take mypy ten seconds, classes of which torch has the base are unknown to it."""
    pytest.importorskip("mypy", reason="mypy is not installed: make test installs it")
    mistakes = MISTAKES | MISTAKES_WITH_TORCH if with_torch else MISTAKES
    public = "".join(f"paramp.{name}\n" for name in paramp.__all__)
    (tmp_path / "right.py").write_text(SCRIPT + public)
    (tmp_path / "wrong.py").write_text(SCRIPT + "".join(f"        {line}\n" for line in mistakes))
    python = installed_editable(tmp_path / "environment", *[sysconfig.get_path("purelib")] * with_torch)
    strict = ["--strict"] if with_torch else ["--disable-error-code", "import-not-found"]
    options = [*strict, "--python-executable", python, "--cache-dir", tmp_path / "cache", "--no-error-summary"]
    found = output(sys.executable, "-m", "mypy", *options, "right.py", "wrong.py", cwd=tmp_path)
    first = SCRIPT.count("\n") + 1
    expected = [rf"wrong\.py:{first + at}: error: .*{re.escape(says)}  .*" for at, says in enumerate(mistakes.values())]
    lines = found.splitlines()
    assert len(lines) == len(expected), found
    assert all(map(re.fullmatch, expected, lines)), found


def test_folders_of_a_user_win_over_those_beside_the_package(tmp_path):
    """An editable installation puts the tree on Python's path, as the last entry, where a folder is no package."""
    assert [path.parent.name for path in ROOT.glob("*/__init__.py")] == ["paramp"]
    taken = [
        "tests/support/pool.py",
        "tests/conftest.py",
        "examples/images.py",
        "launch/train.py",
        "benchmarks/step.py",
    ]
    assert all((ROOT / path).is_file() for path in taken)
    users = [*taken, "tests/helpers.py", "docs.py"]
    for path in users:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    names = ", ".join(path.removesuffix(".py").replace("/", ".") for path in users)
    (tmp_path / "script.py").write_text(
        f"import sys, paramp, {names}\nprint(paramp.__file__, *({names.replace(', ', '.__file__, ')}.__file__))\n"
        "print(sys.path[-1])"
    )
    python = installed_editable(tmp_path / "environment", tmp_path)
    shown, last = output(python, "script.py", cwd=tmp_path).splitlines()
    assert shown.split() == [str(ROOT / "paramp" / "__init__.py"), *(str(tmp_path / path) for path in users)]
    assert last == str(ROOT)


@pytest.fixture
def build(tmp_path, monkeypatch):
    """The build backend's functions, run in this tree; each returns the path of what it made."""
    reason = "the build backend is not installed: make test installs it"
    backend = pytest.importorskip("hatchling.build", reason=reason)
    pytest.importorskip("hatch_fancy_pypi_readme", reason=reason)
    monkeypatch.chdir(ROOT)
    return lambda name: tmp_path / getattr(backend, f"build_{name}")(str(tmp_path))


def test_an_editable_installation_is_a_path(build):
    with zipfile.ZipFile(build("editable")) as wheel:
        (path,) = [name for name in wheel.namelist() if ".dist-info/" not in name]
        assert path.endswith(".pth")
        assert wheel.read(path).decode().splitlines() == [str(ROOT)]


def test_the_wheel_has_the_package_its_licence_and_a_page_without_dead_links(build):
    folder = f"paramp-{paramp.__version__}.dist-info"
    with zipfile.ZipFile(build("wheel")) as wheel:
        names, metadata = set(wheel.namelist()), message_from_bytes(wheel.read(f"{folder}/METADATA"))
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "paramp").rglob("*") if path.is_file()}
    about = ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE")
    assert "paramp/py.typed" in names
    assert names == {name for name in sources if "__pycache__" not in name} | {f"{folder}/{name}" for name in about}
    assert (metadata["Version"], metadata["Author"]) == (paramp.__version__, "The paramp authors")
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata.get_all("Project-URL") is None
    page, readme = metadata.get_payload(), (ROOT / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"\]\((?!https?://)[^)]*\)|<img", page) == []
    readme = re.sub(r"!\[([^]]*)\]\([^)]*\)", r"*(picture: \1)*", readme)
    words = re.sub(r"\[([^]]+)\]\([^)]*\)", r"\1", readme).split()
    assert re.sub(r"\[([^]]+)\]\([^)]*\)", r"\1", page).split() == words


def test_the_source_distribution_has_what_builds_the_wheel(build):
    with tarfile.open(build("sdist")) as archive:
        names = {Path(name).parts[1] for name in archive.getnames()}
    described = {"README.md", "CHANGELOG.md", "LICENSE", "PKG-INFO"}
    assert names == {"paramp", "pyproject.toml", ".gitignore"} | described
