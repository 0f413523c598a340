"""Paths as users write them."""

from __future__ import annotations

import os
from pathlib import Path


def user_path(path: str | os.PathLike[str]) -> Path:
    """``path``, with the home folder in place of a leading ``~`` or ``~name``, as a shell would have it.

    A home folder that is not known leaves the path as it is.
    """
    return Path(os.path.expanduser(path))
