"""The CI workflow is valid YAML, asks for no more rights than it needs, and calls what exists."""

import os
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_workflow_calls_what_exists_and_may_only_read():
    yaml = pytest.importorskip("yaml")
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    assert workflow["permissions"] == {"contents": "read"}
    commands = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    assert ".ci/run" in commands
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    made = {command.split()[1] for command in commands if command.startswith("make ")}
    assert made
    assert made <= targets
    assert "pull_request" not in workflow["jobs"]["gpu"]["if"]
