"""Whether ``torch.compile`` can make kernels on this machine, looked up without importing its parts."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CXX = {"darwin": "clang++", "win32": "cl"}
"""The C++ compiler that Inductor takes where ``CXX`` is not set, by platform; elsewhere ``g++``."""


def why_not_inductor(device: str, options: Mapping[str, Any]) -> str | None:
    """Why Inductor cannot make kernels for ``device``, ``"cpu"`` or ``"cuda"``; None if it can.

    Args:
        options: those of ``torch.compile``; a ``backend`` other than Inductor makes no kernels.
    """
    backend = options.get("backend", "inductor")
    if backend != "inductor":
        return f"the backend {backend!r} makes no kernels"
    if device == "cuda":
        return None if importlib.util.find_spec("triton") else "no package triton is installed"
    compiler = os.environ.get("CXX") or CXX.get(sys.platform, "g++")
    if shutil.which(compiler) is None:
        return f"no C++ compiler {compiler} is on the path (or name another in CXX)"
    folder = sysconfig.get_path("include")
    if not Path(folder, "Python.h").is_file():
        return f"Python's headers are not installed: no {Path(folder, 'Python.h')}"
    return None
