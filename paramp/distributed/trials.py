"""Runs of the user's code beside the training, such as trials and diagnoses: random streams stay as they were."""

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
