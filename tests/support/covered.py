"""Which lines of the package each test runs, in all of its processes, as coverage.py records them.

Where ``COVERAGE_PROCESS_START`` names the file that :func:`configure` writes, every process of a test run writes a file
beside it: new interpreters by coverage.py's own means, forked ones by ``warm.py``. A line is ascribed to the test
function whose name pytest has in ``PYTEST_CURRENT_TEST``. What runs while files are collected, or in a fixture that
several tests use, is ascribed to the test file.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

RECORDING = "COVERAGE_PROCESS_START" in os.environ
NAME = re.compile(r"tests/[\w/]+\.py(?:::\w+)*")
SETTINGS = """\
[run]
include = {package}/*
data_file = {folder}/lines
parallel = true
context = ${{PYTEST_CURRENT_TEST-}}
patch = _exit
disable_warnings = no-data-collected, module-not-imported, module-not-measured, trace-changed, dynamic-conflict
"""


def configure(folder: Path, package: Path) -> dict[str, str]:
    """The environment of processes that write the lines of ``package`` that they run into ``folder``."""
    folder.mkdir()
    (folder / "settings").write_text(SETTINGS.format(folder=folder, package=package))
    return {"COVERAGE_PROCESS_START": str(folder / "settings")}


def read(folder: Path, package: Path) -> tuple[dict[str, dict[str, int]], dict[str, dict[str, float]]]:
    """What was written there: by module and test, the lines as a number with their bits set, and by test function,
    its seconds and how many of its phases failed."""
    from coverage import CoverageData, CoverageException

    lines: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for path in folder.glob("lines.*"):
        data = CoverageData(str(path))
        try:
            data.read()
            found = {file: data.contexts_by_lineno(file) for file in data.measured_files()}
        except CoverageException:  # of a process that was killed while it wrote
            continue
        for file, tests in found.items():
            module = str(Path(file).relative_to(package))
            for line, contexts in tests.items():
                for context in contexts:
                    lines[module][_name(context)] |= 1 << line
    return lines, json.loads((folder / "tests.json").read_text())


def _name(context: str) -> str:
    """The test function, or "" for the file: in a process that has begun in one test and runs another, the second."""
    own = NAME.match(context.rpartition("|")[2]) or NAME.match(context)
    return own[0] if own and "::" in own[0] else ""


@contextlib.contextmanager
def by(test: str) -> Iterator[None]:
    """Inside, lines are ascribed to ``test``, a value of ``PYTEST_CURRENT_TEST``. At the end they are written."""
    recorder = sys.modules["coverage"].Coverage.current() if RECORDING else None
    if recorder is None:
        yield
        return
    before = os.environ.get("PYTEST_CURRENT_TEST", "")
    os.environ["PYTEST_CURRENT_TEST"] = test  # of processes that are started inside
    recorder.switch_context(test.partition("[")[0].partition(" ")[0])
    try:
        yield
    finally:
        os.environ["PYTEST_CURRENT_TEST"] = before
        recorder.switch_context(before.partition("[")[0].partition(" ")[0])


# ------------------------------------------------------------------------------------- hooks, where conftest.py says so

_seconds: dict[str, dict[str, float]] = defaultdict(lambda: {"seconds": 0.0, "failed": 0})


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    with by(item.nodeid):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef, request):
    if fixturedef.scope == "function":
        return (yield)
    with by(request.node.nodeid.partition("::")[0] or "tests"):
        return (yield)


def pytest_runtest_logreport(report):
    own = _seconds[report.nodeid.partition("[")[0]]
    own["seconds"] = round(own["seconds"] + report.duration, 3)
    own["failed"] += report.failed


def pytest_sessionfinish():
    Path(os.environ["COVERAGE_PROCESS_START"]).with_name("tests.json").write_text(json.dumps(_seconds))
