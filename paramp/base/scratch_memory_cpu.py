"""Memory for temporaries that is used again."""

from __future__ import annotations

import torch

from . import loop_block_sizes


class Scratch:
    """Temporaries by name, kept between uses: on a CPU a new tensor of megabytes costs a page fault for each 4 KiB."""

    def __init__(self) -> None:
        self._held: dict[str, torch.Tensor] = {}

    def like(self, name: str, block: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """A tensor of the shape of ``block``, 1-dim, uninitialised; the next one of this ``name`` overwrites it."""
        if block.numel() > loop_block_sizes.KEPT:
            return torch.empty_like(block, dtype=dtype)
        held = self._held.get(name)
        if held is None or held.numel() < block.numel() or held.dtype is not dtype:
            with torch.inference_mode(False):  # whose tensors cannot be written to outside of it
                held = self._held[name] = torch.empty_like(block, dtype=dtype)
        return held if held.numel() == block.numel() else held[: block.numel()]
