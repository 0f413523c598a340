"""Small sizes of the loops over memory (``paramp.base.loop_block_sizes``): the tests' small models take several turns
of each, and a mistake in a later one than the first shows.

Every test runs with :data:`SMALL`, on the pool's ranks too, but for those marked ``real_sizes``. Processes that a test
starts take them from :data:`VARIABLE` (``tests/support/warm.py``); those that start from cold have the real ones.
"""

import copy
import os
from typing import Any

VARIABLE = "PARAMP_TEST_SIZES"
SMALL: dict[str, Any] = {"WIDEN_BLOCK": 512, "BUCKET": 2**11, "KEPT": 192, "APART": 256, "HUGE": 2**14}
SMALL |= {"SUM_PIECE": 512, "SAMPLED_RUN": 4, "COUNTED": 100, "TRACE_FILE": 2**14}
SMALL["CHECKED_READ"] = 1000
for _name, _size in {"STEP_BLOCK": 192, "SQUARES_BLOCK": 768, "HASHED_WORDS": 100, "ATTENTION_TILE": 4}.items():
    SMALL[_name] = {"cpu": _size, "cuda": _size}
"""By name in ``paramp.base.loop_block_sizes``."""
_real: dict[str, Any] = {}


def use(small: bool) -> None:
    """Give this process, and those that it starts, the small sizes or the real ones."""
    from paramp.base import loop_block_sizes

    if not _real:
        _real.update({name: getattr(loop_block_sizes, name) for name in SMALL})
    for name, value in (SMALL if small else _real).items():
        setattr(loop_block_sizes, name, copy.copy(value))
    os.environ[VARIABLE] = "small" if small else "real"


def are_small() -> bool:
    """Whether this process has the small sizes."""
    return os.environ.get(VARIABLE) == "small"
