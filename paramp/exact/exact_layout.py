"""What slices, microchunks and random numbers depend on: a rank's part of the layout, and the position in the run."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True)
class SequenceSlices:
    """How each sequence is cut."""

    count: int = 1
    """Slices, over all ranks of the context axis; 1: sequences are whole."""
    group: dist.ProcessGroup | None = None
    """The ranks of the context axis; None if there is one only."""


@dataclass(frozen=True)
class ExactLayout:
    """How layers and batches are cut, the same in every layout, and what this rank has of it."""

    seed: int
    """The run's seed; of a later engine in a context, one made of it and the engine's number."""
    microchunk: int
    """Samples that one forward takes."""
    slices: int
    """Slices into which each sharded dim of a layer is cut, over all tensor ranks."""
    tensor_group: dist.ProcessGroup | None = None
    """The ranks of the tensor axis; None if there is one only."""
    sequence_parallel: bool = False
    """Whether tensor ranks have slices of the sequence between sharded layers."""
    sequences: SequenceSlices = SequenceSlices()

    @property
    def tensor_size(self) -> int:
        """The number of tensor ranks."""
        return 1 if self.tensor_group is None else self.tensor_group.size()

    @property
    def tensor_rank(self) -> int:
        """This rank on the tensor axis."""
        return 0 if self.tensor_group is None else self.tensor_group.rank()

    @property
    def local_slices(self) -> int:
        """The slices of a sharded dim that this rank has."""
        return self.slices // self.tensor_size

    @property
    def cuts_sequences(self) -> bool:
        """Whether sequences are computed in slices."""
        return self.sequences.count > 1

    @property
    def context_size(self) -> int:
        """The number of ranks of the context axis, each of which has consecutive slices of a sequence."""
        return 1 if self.sequences.group is None else self.sequences.group.size()

    @property
    def context_rank(self) -> int:
        """This rank on the context axis."""
        return 0 if self.sequences.group is None else self.sequences.group.rank()

    @property
    def local_sequence_slices(self) -> int:
        """The slices of a sequence that this rank has."""
        return self.sequences.count // self.context_size


@dataclass(frozen=True)
class Position:
    """Where in the run the microchunk is whose forward or backward runs, the same in every layout."""

    step: int = 0
    """Windows of accumulation that were ended, skipped steps included."""
    call: int = 0
    """The index of the call of ``forward_backward`` in its window."""
    first_sample: int = 0
    """The index of its first sample in the global batch of this call."""
