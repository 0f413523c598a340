"""``make test-all``: all tests with every case of the long families, a part after another, each started from cold.

A part is a folder of tests or a file of ``tests/system``. One that has passed leaves a mark with the commit in
``.pytest-parts``, so that the next call goes on after it; with uncommitted changes nothing is marked.
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
MARKS = ROOT / ".pytest-parts"


def parts() -> list[str]:
    """The folders that have tests, and in place of ``system`` its files."""
    folders = sorted({path.parent for path in (ROOT / "tests").glob("*/test_*.py")} - {ROOT / "tests" / "system"})
    return [str(path.relative_to(ROOT)) for path in [*folders, *sorted((ROOT / "tests" / "system").glob("test_*.py"))]]


def main(wanted: list[str]) -> int:
    git = ["git", "-C", str(ROOT)]
    is_clean = not subprocess.check_output([*git, "status", "--porcelain"])
    commit = subprocess.check_output([*git, "rev-parse", "HEAD"], text=True) if is_clean else ""
    failed = False
    for part in wanted or parts():
        mark = MARKS / part.replace("/", ".")
        if is_clean and mark.exists() and mark.read_text() == commit:
            print(f"{part}: has passed", flush=True)
            continue
        print(f"{part}:", flush=True)
        environment = os.environ | {"PARAMP_TEST_WHOLE": "1", "PARAMP_TEST_COLD": "1"}
        code = subprocess.call([sys.executable, "-m", "pytest", "-q", part], cwd=ROOT, env=environment)
        failed |= bool(code)
        if is_clean and not code:
            MARKS.mkdir(exist_ok=True)
            mark.write_text(commit)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
