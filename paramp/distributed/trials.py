"""Trials of the user's code, such as of a stage before its first batch: they leave the random streams as they were."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from .rng import forked


@contextmanager
def without_draws(device: torch.device) -> Iterator[None]:
    """A context that restores the default streams of torch (the CPU's and the ``device``'s), Python and NumPy."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with forked(device):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
