"""Runs launch/train.py with a mistake in the program that shows on one rank in the third step. The rank is $CULPRIT."""

import os
import runpy
import sys
from pathlib import Path

TRAIN = Path(__file__).parents[3] / "launch" / "train.py"
sys.path.insert(0, str(TRAIN.parent))

from train_app import batch_reader  # noqa: E402

original = batch_reader.training_windows


def failing(tokens, seq_len, seed, step, first, count):
    if step == 3 and os.environ.get("RANK") == os.environ["CULPRIT"]:
        raise RuntimeError("disk on fire")
    return original(tokens, seq_len, seed, step, first, count)


batch_reader.training_windows = failing
runpy.run_path(str(TRAIN), run_name="__main__")
