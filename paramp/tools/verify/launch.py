"""``paramp verify``: start both runs on this machine, and compare them."""

from __future__ import annotations

import json
import math
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import torch

from ...base.errors import ConfigError
from ...distributed.local_launcher import start_processes
from .compare import compare
from .options import Options, configure
from .report import Report
from .run import RankRecord


def verify(options: Options, tolerance: float | None = None) -> Report | int:
    """Run the model in one process and then sharded, on this machine, and compare.

    Returns:
        The report; or the exit code of a run that failed, which has printed the reason.

    Raises:
        ConfigError: the options are wrong, or the runs cannot be compared.
    """
    if tolerance is not None and not 0 <= tolerance < math.inf:
        raise ConfigError(f"tolerance: got {tolerance}, expected a finite number of 0 or more")
    config = configure(options, "sharded")
    parallel = config.parallel
    assert isinstance(parallel.data, int)
    sizes = {"single": 1, "sharded": parallel.tensor.size * parallel.pipeline.size * parallel.data}
    with tempfile.TemporaryDirectory(prefix="paramp-verify-") as name:
        folder = Path(name)
        (folder / "options.json").write_text(json.dumps(asdict(options)), encoding="utf-8")
        records: dict[str, list[RankRecord]] = {}
        for run, size in sizes.items():
            code = start_processes([sys.executable, "-m", "paramp.tools.verify.run", name, run], size)
            if code:
                print(f"error: the {run} run failed ({size} process{'es' if size > 1 else ''})", file=sys.stderr)
                return 2 if code == 2 else 1
            records[run] = [
                RankRecord(**torch.load(folder / f"{run}-{rank}.pt", weights_only=True, mmap=True))
                for rank in range(size)
            ]
        return compare(records["single"][0], records["sharded"], config, tolerance)
