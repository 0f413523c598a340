"""``make mutants``: small mistakes are made in the package, one at a time, and the tests that meet them run.

The mistakes (``mutations.py``) are drawn by a seed from all modules, in proportion to the places for them. First all
tests run once without a mistake, and which of them meet which mistake is recorded. Then a mutant is written into a copy
of the tree, and the test cases that meet it run there, until one fails: those in the module's folder, then others, the
shortest first. Those of ``tests/system`` and long ones run if no other fails.

A mutant is killed if a test fails that passes without it, also alone. One with which tests do not end in time, and none
fails, has timed out. One that no test meets lives, as does one that the first ten minutes of its tests do not find.
What the tests meet, and the results, are kept in ``.mutants`` with hashes of what they depend on: a second call goes on
where the first one ended, and runs only what has changed. The call fails if fewer than 97 % are killed of those that
``tests/mutants.toml`` does not argue to be equivalent.
"""

import argparse
import contextlib
import functools
import hashlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import mutations
import warm
from mutations import ROOT, Mutant

KEPT = ROOT / ".mutants"
RECORD = KEPT / "met.json"
ARGUED = ROOT / "tests" / "mutants.toml"
LEAST_KILLED = 0.97
FACTOR, LEAST_SECONDS = 3, 40
"""A run may take as many times as long as without a mistake, and so many seconds more."""
LONG = 20.0
"""Tests that take longer, in seconds, run after all others."""
FIRST, MOST = 8.0, 600.0
"""The seconds of tests in the first run of pytest for a mutant, and in both unless ``--most`` says otherwise."""
TIMED_OUT = re.compile("from pytest-timeout|did not answer within")
"""What a test says that a limit of its own has ended."""
FAILED = re.compile(r"^(?:FAILED|ERROR) (.*)$", re.MULTILINE)


class Timed(NamedTuple):
    """A test case, or a function with all of its cases, and the seconds that it takes."""

    name: str
    seconds: float


def _hash(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


@functools.cache
def _text(path: str) -> str:
    return (ROOT / path).read_text() if (ROOT / path).exists() else ""


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


def _write(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".new").write_text(json.dumps(value))
    path.with_suffix(".new").replace(path)


class Tree:
    """A copy of the tree in ``folder``, in which tests run while a module of the package is another one.

    ``python`` is what ``warm.bare`` returns.
    """

    def __init__(self, folder: Path, python: str) -> None:
        self.folder, self.package, self.log = folder, folder / "paramp", folder / "run.log"
        self.stopped = False
        self._python = python
        listed = subprocess.check_output(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, text=True)
        self._clock = time.time() - 10**6
        for name in listed.splitlines():
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, folder / name)
                os.utime(folder / name, (self._clock, self._clock))

    def run(self, arguments: Iterable[str], seconds: float, **variables: str) -> tuple[str, float]:
        """``passed``, ``failed`` or ``timeout`` of pytest with ``arguments``, and the seconds that it took."""
        temporary = self.folder / "tmp"
        temporary.mkdir()
        command = [self._python, "-m", "pytest", "-q", "--no-header", "--tb=short", "-p", "no:cacheprovider"]
        command += ["-W", "ignore:Module already imported:pytest.PytestAssertRewriteWarning", *arguments]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        environment |= {"PYTHONPATH": str(self.folder), "OMP_NUM_THREADS": "1", warm.BARE: self._python}
        environment |= {"PARAMP_TEST_SHRINK": "0", "PARAMP_TEST_DEVICE": "cpu", "TMPDIR": str(temporary)}
        environment["PARAMP_LAUNCH_TIMEOUT"] = "30"  # ranks that do not meet are an error within the time of a run
        environment |= {"TORCHINDUCTOR_CACHE_DIR": str(self.folder.parent / "inductor")} | variables
        start = time.monotonic()
        try:
            with open(self.log, "wb") as log:
                options = {"stdout": log, "stderr": log, "start_new_session": True}
                code = subprocess.run(command, cwd=self.folder, env=environment, timeout=seconds, **options).returncode
            result = "passed" if code in (0, 5) else "failed"  # 5: no test is left
        except subprocess.TimeoutExpired:
            result = "timeout"
        self.end_processes()
        shutil.rmtree(temporary, ignore_errors=True)
        if self.stopped:
            raise InterruptedError("the runs were stopped")
        return result, time.monotonic() - start

    def end_processes(self) -> None:
        """Those of a run, and what its tests have left behind: all that are in this folder."""
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if Path(os.readlink(process / "cwd")).is_relative_to(self.folder.resolve()):
                    os.kill(int(process.name), signal.SIGKILL)

    @contextlib.contextmanager
    def changed(self, module: str, source: bytes) -> Iterator[None]:
        """Inside, ``module`` of the package has another source."""
        path = self.package / module
        before = path.read_bytes()
        try:
            self._write(path, source)
            yield
        finally:
            self._write(path, before)

    def _write(self, path: Path, source: bytes) -> None:
        path.write_bytes(source)
        self._clock += 2  # so that compiled files of another version are not taken for this one's
        os.utime(path, (self._clock, self._clock))


class Met:
    """The test cases that meet each of ``mutants``. :attr:`seconds` has those that pass without one."""

    def __init__(self, mutants: Sequence[Mutant], files: Sequence[str]) -> None:
        self._mutants, self._files = mutants, files
        texts = [path.read_text() for path in sorted((ROOT / "paramp").rglob("*.py"))]
        self._hash = _hash(*texts, *map(_text, files), *(mutant.name for mutant in mutants))
        record = _read(RECORD)
        self.is_known = record.get("hash") == self._hash
        self._names: dict[str, list[str]] = record["met"] if self.is_known else {}
        self.seconds: dict[str, float] = record["seconds"] if self.is_known else {}

    def record(self, tree: Tree) -> str:
        """Run all tests in ``tree``, which then is of no other use, and keep what they meet. Returns how it went."""
        mutations.insert(tree.package, self._mutants, tree.folder / "met")
        report = tree.folder / "report.xml"
        arguments = ["--numprocesses", "2", "--dist", "loadfile", f"--junitxml={report}"]
        result, seconds = tree.run([*arguments, *self._files], 7200)
        if not report.exists():
            return f"{result} in {seconds:.0f} s\n{tree.log.read_text()[-2000:]}"
        cases = {_name(case): case for case in ElementTree.parse(report).iter("testcase")}
        wrong = {name for name, case in cases.items() if {"failure", "error"} & {child.tag for child in case}}
        self.seconds = {name: float(case.get("time", 0)) for name, case in cases.items() if name not in wrong}
        met = mutations.read(tree.folder / "met")
        names = (mutant.name for mutant in self._mutants)
        self._names = {name: sorted(met[number] & self.seconds.keys()) for number, name in enumerate(names)}
        _write(RECORD, {"hash": self._hash, "met": self._names, "seconds": self.seconds})
        self.is_known = True
        left_out = f"; left out, as they fail without a mistake: {' '.join(sorted(wrong))}" if wrong else ""
        return f"{result} in {seconds:.0f} s{left_out}"

    def tests(self, mutant: Mutant) -> list[Timed]:
        """What meets ``mutant``, in the order in which it is to run."""
        met = [Timed(name, self.seconds[name]) for name in self._names.get(mutant.name, ())]
        own = f"tests/{mutant.module.partition('/')[0]}/"

        def place(one: Timed) -> tuple[bool, bool, float]:
            is_last = one.name.startswith("tests/system/") or one.seconds > LONG
            return is_last, not one.name.startswith(own), one.seconds

        return sorted(met, key=place)


def _name(case: ElementTree.Element) -> str:
    """As pytest names it. (The report's ``file`` is where a function is defined: of decorated ones the decorator's.)"""
    return f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"


def test_files(under: Sequence[str]) -> list[str]:
    """Paths of the test files in ``under``, folders or files."""
    found = sorted(path.relative_to(ROOT) for path in (ROOT / "tests").rglob("test_*.py"))
    return [str(file) for file in found if any(file.is_relative_to(one) for one in under)]


class Results:
    """What became of each mutant: ``killed``, ``lived``, ``timed out`` or ``not covered``."""

    def __init__(self, met: Met, most: float = MOST) -> None:
        self._met, self._most = met, most
        self._path, self._lock = KEPT / "results.json", threading.Lock()
        self._kept = _read(self._path)
        self._alone: dict[str, str] = self._kept.setdefault("alone", {})

    def _hash(self, mutant: Mutant, killer: str, most: float) -> str:
        """Of what the result depends on: the test that has found the mistake, or else all that run."""
        names = [killer] if killer else sorted(one.name for one in self._tests(mutant, most))
        files = sorted({name.partition("::")[0] for name in names})
        return _hash(_text(f"paramp/{mutant.module}"), mutant.text, *names, *(_text(file) for file in files))

    def _tests(self, mutant: Mutant, most: float) -> list[Timed]:
        """What is run for ``mutant``: the first of what meets it, those that begin within ``most`` seconds."""
        tests = self._met.tests(mutant)
        return tests[: _first(tests, most)]

    def how(self, mutant: Mutant) -> str:
        """What became of ``mutant``, or "" if that is not known. Seconds beyond those given may have been tried."""
        kept = {"how": "", "hash": "", "by": "", "most": self._most} | self._kept.get(mutant.name, {})
        is_enough = kept["how"] == "killed" or kept["most"] >= self._most
        return kept["how"] if is_enough and kept["hash"] == self._hash(mutant, kept["by"], kept["most"]) else ""

    def run(self, mutant: Mutant, tree: Tree) -> str:
        """Run the tests of ``mutant``, a few first, as most mutants fail in those. Returns how it went."""
        tests = self._tests(mutant, self._most)
        number = _first(tests, FIRST)
        how, killer = "lived" if tests else "not covered", ""
        for batch in filter(None, (tests[:number], tests[number:])):
            end, killer = self.end(mutant, batch, tree)
            how = end or how
            if killer:
                break
        with self._lock:
            found = {"how": how, "hash": self._hash(mutant, killer, self._most), "by": killer, "most": self._most}
            self._kept[mutant.name] = found
            _write(self._path, self._kept)
        return f"{how}: {mutant.name} {killer}"

    def end(self, mutant: Mutant, batch: Sequence[Timed], tree: Tree) -> tuple[str, str]:
        """``killed`` and the test of ``batch`` that has found ``mutant``; ``timed out``, or nothing, and no name."""
        files = [one.name.partition("::")[0] for one in batch]
        names = sorted((one.name for one in batch), key=lambda name: files.index(name.partition("::")[0]))
        limit = LEAST_SECONDS + FACTOR * sum(one.seconds for one in batch)
        while names:
            with tree.changed(mutant.module, mutant.apply(_text(f"paramp/{mutant.module}").encode())):
                result, _ = tree.run(["-x", "-rfE", *names], limit)
            log = tree.log.read_text(errors="replace")
            if result == "timeout" or (result == "failed" and TIMED_OUT.search(log)):
                return "timed out", ""
            if result == "passed":
                return "", ""
            failed = FAILED.search(log)  # the name of a case, and a reason
            first = next((name for name in names if failed and f"{failed[1]} ".startswith(f"{name} ")), names[0])
            if self._passes_alone(first, tree):
                return "killed", first
            names.remove(first)
        return "", ""

    def _passes_alone(self, name: str, tree: Tree) -> bool:
        """Whether the test passes without a mistake, and without those that ran before it when that was recorded."""
        file = _text(name.partition("::")[0])
        if self._alone.get(name) != _hash(file):
            result, _ = tree.run([name], LEAST_SECONDS + FACTOR * self._met.seconds[name])
            if result != "passed":
                return False
            self._alone[name] = _hash(file)
        return True


def _first(tests: Sequence[Timed], seconds: float) -> int:
    """How many of ``tests`` begin within so many ``seconds``."""
    ends = itertools.accumulate(one.seconds for one in tests)
    return sum(end - one.seconds < seconds for one, end in zip(tests, ends, strict=True))


def run_all(results: Results, mutants: Sequence[Mutant], jobs: int) -> None:
    """Run the tests of the ``mutants``, of as many at a time as ``jobs``, each in a tree."""
    left = iter(enumerate(mutants, 1))

    def go_on(tree: Tree) -> None:
        for number, mutant in left:
            print(f"{number}/{len(mutants)} {results.run(mutant, tree)}", flush=True)

    with tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True) as folder:
        python = warm.bare()
        trees = [Tree(Path(folder) / str(number), python) for number in range(min(jobs, len(mutants)))]
        with ThreadPoolExecutor(jobs) as threads:
            try:
                for done in [threads.submit(go_on, tree) for tree in trees]:
                    done.result()
            except BaseException:
                for tree in trees:
                    tree.stopped = True
                    tree.end_processes()
                raise


def _stop(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # timeout(1) sends two, and the second would end the clean-up
    sys.exit("stopped")


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num", type=int, default=150, help="how many are drawn")
    parser.add_argument("--seed", default="1", help="by which they are drawn")
    parser.add_argument("--only", nargs="+", default=[""], help="parts of the names of those that are drawn")
    parser.add_argument("--tests", nargs="+", default=["tests"], help="folders and files of tests: no others are run")
    parser.add_argument("--most", type=float, default=MOST, help="how many seconds of tests are run for each")
    parser.add_argument("--jobs", type=int, default=2, help="how many run at a time")
    given = parser.parse_args(words)
    mutants = mutations.drawn(given.num, given.seed, given.only)
    met = Met(mutants, test_files(given.tests))
    if not met.is_known:
        with tempfile.TemporaryDirectory(prefix="m-", dir="/tmp", ignore_cleanup_errors=True) as folder:
            print(met.record(Tree(Path(folder) / "tree", sys.executable)), flush=True)
    if not met.is_known:
        return 1
    results = Results(met, given.most)
    run_all(results, [mutant for mutant in mutants if not results.how(mutant)], given.jobs)
    argued = {one["mutant"] for one in tomllib.loads(ARGUED.read_text()).get("equivalent", [])}
    how = {mutant: results.how(mutant) for mutant in mutants}
    counted = {mutant: end for mutant, end in how.items() if end == "killed" or mutant.name not in argued}
    for mutant, end in counted.items():
        if end != "killed":
            print(f"{end}: {mutant.name}\n    {mutant.show(_text(f'paramp/{mutant.module}').encode())}")
    wrong = [mutant.name for mutant in counted if mutant.name in argued]
    for name in wrong:
        print(f"{ARGUED.name}: {name} is argued to be equivalent, but a test fails")
    counts = Counter(counted.values())
    killed = counts["killed"] / max(1, len(counted))
    print(
        f"{len(mutants)} mutants: {counts['killed']} killed ({killed:.1%} of those not argued about), "
        f"{counts['lived'] + counts['not covered']} lived ({counts['not covered']} met by no test), "
        f"{counts['timed out']} timed out, {len(mutants) - len(counted)} argued to be equivalent"
    )
    return int((bool(counted) and killed < LEAST_KILLED) or bool(wrong))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _stop)
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
