"""Both runs of `paramp verify` on a pool's processes, for several options in one go."""

import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from planted_defects import planted
from pool import run_on_ranks

from paramp.tools.verify import two_runs
from paramp.tools.verify.options import Options, configure
from paramp.tools.verify.report import Report


def run(world, folders: Sequence[Path], run: str, defect: str | None) -> list[int]:
    """One rank of a run for the options in each folder."""
    with planted(defect if run == "sharded" else None):
        return [two_runs.main(folder, run) for folder in folders]


def reports(every: Sequence[Options], defect: str | None = None, tolerance: float | None = None) -> list[Report]:
    """The comparisons for options of one layout; the sharded runs have the ``defect`` of :mod:`planted_defects`."""
    with tempfile.TemporaryDirectory() as name:
        folders = [Path(name) / str(index) for index in range(len(every))]
        for folder, options in zip(folders, every, strict=True):
            folder.mkdir()
            (folder / "options.json").write_text(json.dumps(asdict(options)), encoding="utf-8")
        size = configure(every[0], "sharded").parallel.least_world_size
        for name, number in (("sharded", size), ("single", 1)):
            given = {"folders": folders, "run": name, "defect": defect}
            for codes in run_on_ranks(number, __name__, "run", given):
                assert not any(codes), codes
        return [two_runs.compare_runs(*pair, tolerance) for pair in zip(every, folders, strict=True)]


def report_of(options: Options, defect: str | None = None) -> Report:
    """The comparison for one."""
    return reports([options], defect)[0]
