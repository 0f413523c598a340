"""The key ``reproducible``: training with the same bits on every layout."""

from __future__ import annotations

from dataclasses import dataclass

from ..base.errors import ConfigError, require

MODES = ("32-true", "16-mixed", "bf16-mixed", "16-naive", "bf16-naive")
"""The precision modes in which training is reproducible."""


@dataclass(frozen=True, kw_only=True)
class Reproducible:
    """How batches and layers are cut, the same in every layout."""

    chunk: int = 1
    """Samples in one forward. The number of microbatches follows from it."""
    slices: int = 8
    """Slices of each dim over which a plan shards a layer: a power of two, no less than the number of tensor ranks."""
    sequence_slices: int = 1
    """Slices of each sequence, computed one by one: a power of two, no less than the size of the context axis."""

    def __post_init__(self) -> None:
        require(self.chunk >= 1, "chunk", self.chunk, "an integer of 1 or more")
        for name in ("slices", "sequence_slices"):
            require(is_power_of_two(getattr(self, name)), name, getattr(self, name), "a power of two, such as 8")


def is_power_of_two(number: int) -> bool:
    """Whether ``number`` is 1, 2, 4, ..."""
    return number > 0 and number & (number - 1) == 0


def check_data_ranks(number: int) -> None:
    """Raise a ConfigError unless ``number``, of data ranks, is a power of two, as the tree of sums needs."""
    if not is_power_of_two(number):
        raise ConfigError(
            f"parallel.data: got {number} data ranks, expected a power of two, because reproducible is set"
        )
