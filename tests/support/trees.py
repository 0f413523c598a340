"""Copies of the tree, in which tests run while a module of the package is another one."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import warm

ROOT = Path(__file__).parents[2]


class Tree:
    """A copy in ``folder``. ``python`` is what ``warm.bare`` returns."""

    def __init__(self, folder: Path, python: str) -> None:
        self.folder = folder
        self.package = folder / "paramp"
        self.log = folder / "run.log"
        self.stopped = False
        self._python = python
        listed = subprocess.run(
            ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, check=True, capture_output=True, text=True
        )
        for name in listed.stdout.splitlines():
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, folder / name)
        self._clock = time.time() - 10**6
        for path in folder.rglob("*.py"):
            os.utime(path, (self._clock, self._clock))

    def run(self, arguments: Iterable[str], seconds: float, **variables: str) -> tuple[str, float]:
        """``passed``, ``failed`` or ``timeout`` of pytest with ``arguments``, and the seconds that it took."""
        if self.stopped:
            raise InterruptedError("the runs were stopped")
        temporary = self.folder / "tmp"
        temporary.mkdir()
        command = [self._python, "-m", "pytest", "-q", "--no-header", "--tb=short", "-p", "no:cacheprovider"]
        command += ["-W", "ignore:Module already imported:pytest.PytestAssertRewriteWarning", *arguments]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        environment |= {"PYTHONPATH": str(self.folder), "OMP_NUM_THREADS": "1", warm.BARE: self._python}
        environment |= {"PARAMP_TEST_SHRINK": "0", "PARAMP_TEST_DEVICE": "cpu", "TMPDIR": str(temporary)}
        environment |= {"TORCHINDUCTOR_CACHE_DIR": str(self.folder.parent / "inductor")} | variables
        start = time.monotonic()
        with open(self.log, "wb") as log:
            process = subprocess.Popen(
                command, cwd=self.folder, env=environment, stdout=log, stderr=log, start_new_session=True
            )
            try:
                code = process.wait(seconds)
                result = "passed" if code in (0, 5) else "failed"  # 5: no test is left
            except subprocess.TimeoutExpired:
                result = "timeout"
                process.kill()  # and so the process that the server has forked for it
                process.wait()
        self.end_processes()
        shutil.rmtree(temporary, ignore_errors=True)
        if self.stopped:
            raise InterruptedError("the runs were stopped")
        return result, time.monotonic() - start

    def end_processes(self) -> None:
        """Those of a run, and what its tests have left behind: all that are in this folder."""
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if os.readlink(process / "cwd").startswith(f"{self.folder}/") or os.path.samefile(
                    process / "cwd", self.folder
                ):
                    os.kill(int(process.name), signal.SIGKILL)

    @contextlib.contextmanager
    def changed(self, module: str, source: bytes) -> Iterator[None]:
        """Inside, ``module`` of the package has another source."""
        path = self.package / module
        before = path.read_bytes()
        self._write(path, source)
        try:
            yield
        finally:
            self._write(path, before)

    def _write(self, path: Path, source: bytes) -> None:
        path.write_bytes(source)
        self._clock += 2  # so that compiled files of another version are not taken for this one's
        os.utime(path, (self._clock, self._clock))
