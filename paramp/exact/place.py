"""Where in the run a forward is: what slices and random numbers depend on, the same in every layout."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist


@dataclass(eq=False)
class Place:
    """The position of this rank, and of the chunk that it runs, in the global batch.

    A chunk is the samples that one forward takes. The engine sets what changes from chunk to chunk.
    """

    seed: int
    """The run's seed."""
    chunk: int
    """Samples of a chunk."""
    slices: int
    """Slices into which each sharded dim of a layer is cut, over all tensor ranks."""
    tensor_group: dist.ProcessGroup | None = None
    """The ranks of the tensor axis; None if there is one only."""
    sequence_parallel: bool = False
    """Whether tensor ranks have slices of the sequence between sharded layers."""
    step: int = 0
    """Windows of accumulation that were ended, skipped steps included."""
    call: int = 0
    """The index of the call of ``forward_backward`` in its window."""
    first_sample: int = 0
    """The index in the global batch of this call of the first sample of the chunk that runs."""
    sharded_features: bool = False
    """Whether the last layer of the plan that ran was a colwise one, on one tensor rank too: then activations may be
    sharded in their features or heads, until a rowwise one. A plain tensor does not show whether it is."""

    parts: int = 1
    """The fused outputs of that colwise layer, each of which is sharded: 3 for query, key and value."""

    @property
    def tensor_size(self) -> int:
        """The number of tensor ranks."""
        return 1 if self.tensor_group is None else self.tensor_group.size()

    @property
    def tensor_rank(self) -> int:
        """This rank on the tensor axis."""
        return 0 if self.tensor_group is None else self.tensor_group.rank()

    @property
    def own_slices(self) -> int:
        """The slices of a sharded dim that this rank has."""
        return self.slices // self.tensor_size
