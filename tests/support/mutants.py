"""``make mutants``: small mistakes are made in the package, one at a time, and the tests that run those lines run.

The mistakes (``mutations.py``) are drawn by a seed from all modules, in proportion to the places for them. First every
test file runs once without a mistake, while the lines that its tests run are recorded (``covered.py``). A mutant is
written into a copy of the tree, and the test functions that run its lines run there, the shortest first, until one
fails. Those of ``tests/system`` and long ones run if no other fails. Of a mutant whose lines run when files are
collected, or in a fixture that several tests use, the whole files run.

A mutant is killed if a test fails that passes without it. One with which tests do not end in time, and none fails, has
timed out. One that no test runs lives, as does one that the first ten minutes of its tests (``--most``) do not find.
Lines and results are kept in ``.mutants`` with hashes of what they depend on, so that a second call runs only what is
missing or has changed. The call fails if fewer than 97 % are killed of those that ``tests/mutants.toml`` does not argue
to be equivalent.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import itertools
import json
import queue
import re
import shutil
import signal
import sys
import tempfile
import threading
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

import covered
import mutations
import warm
from mutations import ROOT, Mutant
from trees import Tree

KEPT = ROOT / ".mutants"
ARGUED = ROOT / "tests" / "mutants.toml"
LEAST_KILLED = 0.97
FACTOR, LEAST_SECONDS = 3, 40
"""A run may take as many times as long as without a mistake, and so many seconds more."""
LONG = 20.0
"""Tests that take longer, in seconds, run after all others."""
BATCHES = (8.0, 30.0, 120.0)
"""The seconds of tests in the first run of pytest for a mutant, in the second, and in all others."""
MOST_TIMEOUTS = 2
TIMED_OUT = re.compile("from pytest-timeout|did not answer within")
"""What a test says that a limit of its own has ended."""
FAILED = re.compile(r"^(?:FAILED|ERROR) (tests/[\w/]+\.py(?:::\w+)*)", re.MULTILINE)


class Timed(NamedTuple):
    """A test function or file, and the seconds that it takes."""

    name: str
    seconds: float

    @property
    def file(self) -> str:
        return self.name.partition("::")[0]


def _hash(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


@functools.cache
def _text(path: str) -> str:
    return (ROOT / path).read_text() if (ROOT / path).exists() else ""


def _write(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".new").write_text(json.dumps(value))
    path.with_suffix(".new").replace(path)


# ------------------------------------------------------------------------------------------------- what the tests run


class Lines:
    """What the test ``files`` run of the package, as far as it is recorded."""

    def __init__(self, files: Sequence[str]) -> None:
        self.files = files
        self.records = {file: record for file in files if (record := self._kept(file))}

    def _place(self, file: str) -> Path:
        return KEPT / "lines" / f"{file.replace('/', '.')}.json"

    def _kept(self, file: str) -> dict[str, Any] | None:
        record = json.loads(self._place(file).read_text()) if self._place(file).exists() else {}
        if not record or record["hash"] != self._hash(file, record["lines"]):
            return None
        record["lines"] = {
            module: {test: int(lines, 16) for test, lines in tests.items()} for module, tests in record["lines"].items()
        }
        return record

    def _hash(self, file: str, modules: Sequence[str]) -> str:
        return _hash(_text(file), *(_text(f"paramp/{module}") for module in sorted(modules)))

    def missing(self) -> list[str]:
        return [file for file in self.files if file not in self.records]

    def record(self, file: str, tree: Tree) -> str:
        """Run ``file`` and keep what it runs. Returns how it went."""
        folder = tree.folder / "lines"
        result, seconds = tree.run([file], 1800, **covered.configure(folder, tree.package))
        how = f"{result} in {seconds:.0f} s"
        if (folder / "tests.json").exists():
            found, tests = covered.read(folder, tree.package)
            inside = {module: mutations.lines_in_functions(module) for module in found}
            lines = {
                module: {test: hex(line & inside[module]) for test, line in by.items() if line & inside[module]}
                for module, by in found.items()
            }
            lines = {module: by for module, by in lines.items() if by}
            record = {"hash": self._hash(file, list(lines)), "seconds": seconds, "tests": tests, "lines": lines}
            _write(self._place(file), record | {"imports": sorted(found)})
            self.records[file] = self._kept(file) or {}
            failed = [name for name, test in tests.items() if test["failed"]]
            how += f"; left out, as they fail without a mistake: {' '.join(failed)}" if failed else ""
        else:
            how += f"\n{tree.log.read_text()[-2000:]}"
        shutil.rmtree(folder)
        return how

    def tests(self, mutant: Mutant) -> tuple[list[Timed], set[str]]:
        """What runs ``mutant``, in the order in which it is to run, and tests that fail without a mistake."""
        mask = sum(1 << line for line in mutant.lines)
        first, rest, failing = [], [], set()
        for file, record in self.records.items():
            by = {test: lines for test, lines in record["lines"].get(mutant.module, {}).items() if lines & (mask or -1)}
            tests = record["tests"]
            failing |= {name for name, test in tests.items() if test["failed"]}
            first += [Timed(name, tests[name]["seconds"]) for name in by if name in tests and name not in failing]
            if "" in by or (not mask and mutant.module in record["imports"]):
                whole = Timed(file, record["seconds"])
                (first if by else rest).append(whole)

        def key(one: Timed) -> tuple[bool, float]:
            return one.file.startswith("tests/system/") or one.seconds > LONG, one.seconds

        return sorted(first, key=key) + sorted(rest, key=key), failing


def test_files(under: Sequence[str]) -> list[str]:
    """Paths of the test files in ``under``, folders or files."""
    found = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py"))
    return [file for file in found if any(f"{file}/".startswith(f"{one.rstrip('/')}/") for one in under)]


def batches(tests: Sequence[Timed]) -> Iterator[list[Timed]]:
    """Those of each run of pytest: the first is short, as most mutants fail in it."""
    batch: list[Timed] = []
    number = 0
    for one in tests:
        most = BATCHES[min(number, len(BATCHES) - 1)]
        if batch and sum(other.seconds for other in batch) + one.seconds > most:
            yield batch
            batch, number = [], number + 1
        batch.append(one)
    if batch:
        yield batch


# ------------------------------------------------------------------------------------------------------------- running


class Results:
    """What became of each mutant: ``killed``, ``lived``, ``timed out`` or ``not covered``."""

    def __init__(self, lines: Lines, most: float) -> None:
        self._lines = lines
        self._most = most
        self._path = KEPT / "results.json"
        self._kept: dict[str, dict[str, Any]] = json.loads(self._path.read_text()) if self._path.exists() else {}
        self._lock = threading.Lock()
        self._killers: dict[str, Counter[str]] = {}
        self._passing: dict[str, bool] = {}

    def _hash(self, mutant: Mutant, killer: str) -> str:
        """Of what the result depends on: the test that has found the mistake, or else all that run."""
        names = [killer] if killer else sorted(one.name for one in self._tests(mutant)[0])
        files = sorted({name.partition("::")[0] for name in names})
        return _hash(_text(f"paramp/{mutant.module}"), mutant.text, *names, *(_text(file) for file in files))

    def _tests(self, mutant: Mutant) -> tuple[list[Timed], set[str]]:
        """What is run for ``mutant``: the first of what runs its lines, as long as may be."""
        tests, failing = self._lines.tests(mutant)
        ends = itertools.accumulate(one.seconds for one in tests)
        return [one for one, end in zip(tests, ends, strict=True) if end - one.seconds < self._most], failing

    def how(self, mutant: Mutant) -> str:
        """What became of ``mutant``, or "" if that is not known."""
        kept = self._kept.get(mutant.name, {})
        return kept["how"] if "by" in kept and kept["hash"] == self._hash(mutant, kept["by"]) else ""

    def _passes(self, test: str, tree: Tree) -> bool:
        """Whether ``test`` passes without a mistake. Each that has found one is asked once."""
        if test not in self._passing:
            self._passing[test] = tree.run([test], LONG * FACTOR + LEAST_SECONDS)[0] == "passed"
            if not self._passing[test]:
                print(f"{test}: fails without a mistake, which does not count", flush=True)
        return self._passing[test]

    def run(self, mutant: Mutant, tree: Tree) -> str:
        """Run the tests of ``mutant``. Returns how it went."""
        tests, failing = self._tests(mutant)
        killers = self._killers.setdefault(mutant.module, Counter())
        known = [one for one in tests if killers[one.name] and one.seconds <= LONG]
        tests = list(dict.fromkeys(sorted(known, key=lambda one: -killers[one.name])[:3] + tests))
        how, killer, spent, timeouts = "lived" if tests else "not covered", "", 0.0, 0
        source = mutant.apply(_text(f"paramp/{mutant.module}").encode())
        for batch in batches(tests):
            files = dict.fromkeys(one.file for one in batch)
            names = [one.name for file in files for one in batch if one.file == file]
            left_out = [f"--deselect={name}" for name in failing if name.partition("::")[0] in names]
            limit = LEAST_SECONDS + FACTOR * sum(one.seconds for one in batch)
            with tree.changed(mutant.module, source):
                result, seconds = tree.run(["-x", "-rfE", *left_out, *names], limit)
            spent += seconds
            log = tree.log.read_text(errors="replace")
            if result == "timeout" or (result == "failed" and TIMED_OUT.search(log)):
                timeouts += 1
            elif result == "failed":
                failed = FAILED.search(log)
                killer = failed[1] if failed else names[0]
                if self._passes(killer, tree):
                    how = "killed"
                    break
                killer = ""
            if timeouts:
                how = "timed out"
                if timeouts == MOST_TIMEOUTS:
                    break
        with self._lock:
            killers[killer] += bool(killer)
            self._kept[mutant.name] = {"hash": self._hash(mutant, killer), "how": how, "by": killer, "seconds": spent}
            _write(self._path, self._kept)
        return f"{how} in {spent:.0f} s: {mutant.name} {killer}"


def in_trees(function: Callable[[Any, Tree], str], work: Sequence[Any], jobs: int) -> None:
    """Call ``function`` with each of ``work`` and a tree, as many at a time as ``jobs``; print what it returns."""
    if not work:
        return
    with tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True) as folder:
        python = warm.bare()
        trees = [Tree(Path(folder) / str(number), python) for number in range(min(jobs, len(work)))]
        free: queue.SimpleQueue[Tree] = queue.SimpleQueue()
        for tree in trees:
            free.put(tree)

        def one(item: Any) -> str:
            tree = free.get()
            try:
                return function(item, tree)
            finally:
                free.put(tree)

        with ThreadPoolExecutor(len(trees)) as threads:
            try:
                for number, done in enumerate(as_completed([threads.submit(one, item) for item in work]), 1):
                    print(f"{number}/{len(work)} {done.result()}", flush=True)
            except BaseException:
                threads.shutdown(wait=False, cancel_futures=True)
                for tree in trees:
                    tree.stopped = True
                for tree in trees:
                    tree.end_processes()
                raise


def _stop(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # timeout(1) sends two, and the second would end the clean-up
    sys.exit("stopped")


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num", type=int, default=150, help="how many are drawn; 0: the lines are recorded only")
    parser.add_argument("--seed", default="1", help="by which they are drawn")
    parser.add_argument("--only", nargs="+", default=[""], help="parts of the names of those that are drawn")
    parser.add_argument("--tests", nargs="+", default=["tests"], help="folders and files of tests: no others are run")
    parser.add_argument("--most", type=float, default=600, help="seconds of tests that are run for a mutant")
    parser.add_argument("--jobs", type=int, default=2, help="how many run at a time")
    given = parser.parse_args(words)
    lines = Lines(test_files(given.tests))
    in_trees(lambda file, tree: f"{file}: {lines.record(file, tree)}", lines.missing(), given.jobs)
    results = Results(lines, given.most)
    mutants = mutations.drawn(given.num, given.seed, given.only)
    in_trees(results.run, [mutant for mutant in mutants if not results.how(mutant)], given.jobs)
    how = {mutant: results.how(mutant) for mutant in mutants}
    argued = {one["mutant"] for one in tomllib.loads(ARGUED.read_text()).get("equivalent", [])}
    counted = [mutant for mutant in mutants if how[mutant] == "killed" or mutant.name not in argued]
    for mutant in counted:
        if how[mutant] != "killed":
            print(f"{how[mutant]}: {mutant.name}\n    {mutant.show(_text(f'paramp/{mutant.module}').encode())}")
    wrong = [mutant.name for mutant in counted if mutant.name in argued]
    for name in wrong:
        print(f"{ARGUED.name}: {name} is argued to be equivalent, but a test fails")
    counts = Counter(how[mutant] for mutant in counted)
    killed = counts["killed"] / max(1, len(counted))
    print(
        f"{len(mutants)} mutants: {counts['killed']} killed ({killed:.1%} of those not argued about), "
        f"{counts['lived'] + counts['not covered']} lived ({counts['not covered']} on lines that no test runs), "
        f"{counts['timed out']} timed out, {len(mutants) - len(counted)} argued to be equivalent"
    )
    for file in lines.missing():
        print(f"{file}: does not run without a mistake")
    return int((bool(counted) and killed < LEAST_KILLED) or bool(wrong) or bool(lines.missing()))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _stop)
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
