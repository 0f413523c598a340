"""Runs launch/train.py with a mistake in the program that shows on one rank in the third step. The rank is $CULPRIT."""

import os
import runpy
from pathlib import Path

from paramp.tools import train_data

original = train_data.training_windows


def failing(tokens, seq_len, seed, step, first, count):
    if step == 3 and os.environ.get("RANK") == os.environ["CULPRIT"]:
        raise RuntimeError("disk on fire")
    return original(tokens, seq_len, seed, step, first, count)


train_data.training_windows = failing
train = Path(__file__).parents[3] / "launch" / "train.py"
runpy.run_path(str(train), run_name="__main__")
