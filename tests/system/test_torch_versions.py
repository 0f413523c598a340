"""The tool behind ``make test TORCH=...``: what it installs, and the page that it writes."""

import re
import tomllib

import torch_versions
from commands import ROOT

from paramp.base.torch_internals import OLDEST

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_any_torch_from_the_oldest_tested_one_on_fits():
    assert f"torch>={OLDEST}" in PROJECT["dependencies"]
    assert f"installs beside any torch from {OLDEST} on." in torch_versions.PAGE.read_text()


def test_only_the_version_of_torch_is_replaced():
    before = (ROOT / "constraints.txt").read_text().splitlines()
    after = torch_versions.constraints("2.15.0").splitlines()
    changed = [(one, other) for one, other in zip(before, after, strict=True) if one != other]
    assert changed == [("torch==2.13.0", "torch==2.15.0")]
    found = torch_versions.requirements("test", PROJECT["optional-dependencies"])
    assert "rich>=13" in found  # of `all`, in `test`


def test_every_host_of_the_environment_is_known():
    """Each pinned trainer can be left out, and the tests that stand for a host exist."""
    pinned = set(re.findall(r"^(\w+)==", torch_versions.constraints("2.15.0"), re.MULTILINE)) - {"torch", "coverage"}
    assert pinned <= set(torch_versions.HOSTS)
    for _, tests in torch_versions.HOSTS.values():
        assert (ROOT / "tests" / f"{tests.replace('.', '/')}.py").is_file()
    assert all((ROOT / path).exists() for path in torch_versions.SELECTION)


def test_the_page_has_the_table(tmp_path, monkeypatch):
    """And a row replaces the earlier one of its version."""
    lines = torch_versions.PAGE.read_text().splitlines()
    assert sum(line.startswith("|---") for line in lines) == 1
    page = tmp_path / "versions.md"
    page.write_text("# Title\n\n| torch | failed |\n|---|---|\n| 2.9.1 | 3 |\n| 2.11.0 | 1 |\n\nEnd.\n")
    monkeypatch.setattr(torch_versions, "PAGE", page)
    torch_versions.write("| 2.11.0 | 0 |")
    torch_versions.write("| 2.10.0 | 5 |")
    rows = "| 2.9.1 | 3 |\n| 2.10.0 | 5 |\n| 2.11.0 | 0 |"
    assert page.read_text() == f"# Title\n\n| torch | failed |\n|---|---|\n{rows}\n\nEnd.\n"
