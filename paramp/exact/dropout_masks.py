"""Dropout masks that depend on where an element is in the unsharded global batch, not on the layout.

The mask of a sample is drawn as a whole, from a seed made of the run's seed, a later engine's number in its context,
the step, the call, the module's name, the number of the draw in it, and the sample's index in the global batch. A rank
takes its part.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from ..base.errors import ConfigError
from ..distributed.random_across_tensor_ranks import in_replicated_random, in_sharded_random
from ..distributed.rng import derive_seed
from .forwards_in_microchunk import Forwards


class Masks:
    """The dropout masks of a model whose ``forwards`` run."""

    def __init__(self, forwards: Forwards, divided: Collection[str] = (), unsliced: Collection[str] = ()) -> None:
        """``divided``: the names of modules that several pipeline stages have, or parts of; ``unsliced``: those of
        modules in which no tensor rank has a slice of the sequence yet."""
        self._forwards, self._layout = forwards, forwards.layout
        self._divided, self._unsliced = divided, tuple(unsliced)

    @property
    def _module(self) -> str:
        return self._forwards.module

    def dropout(self, input: torch.Tensor, p: float, *, features: bool = False) -> torch.Tensor:
        """Dropout with probability ``p``; with ``features``, of whole channels, dim 1 of ``input``.

        Args:
            input: (samples of the microchunk, ...), what this rank has of it.

        Raises:
            ConfigError: the samples or the sharded dim of ``input`` are not known.
        """
        self._check(input, p)
        shape = torch.Size([*input.shape[:2], *[1] * (input.ndim - 2)]) if features else input.shape
        dim = self._sharded_dim(input)
        if self._layout.cuts_sequences and (features or input.ndim != 3):
            raise ConfigError(
                f"reproducible.sequence_slices: dropout in {self._module} got a tensor of the shape "
                f"{(*input.shape,)}{' whose whole channels are dropped' if features else ''}, expected (samples, "
                "tokens, features) and F.dropout; set it to 1"
            )
        if features and dim is not None and dim != 1:
            raise ConfigError(
                f"reproducible: dropout of whole channels in {self._module} got a tensor of the shape "
                f"{(*input.shape,)} that is sharded over dim {dim}, expected one that is replicated or sharded over "
                "dim 1; use F.dropout"
            )
        return input * self._noise(shape, p, input, dim, 1)

    def attention_noise(self, shape: torch.Size, p: float, like: torch.Tensor, *, rows: bool = False) -> torch.Tensor:
        """What attention weights of ``shape``, (samples, this rank's heads, queries, keys), are multiplied with.

        ``rows``: the queries are this rank's tokens.
        """
        self._check(like, p)
        return self._noise(shape, p, like, 1 if self._forwards.fused else None, 2 if rows else None)

    def _check(self, input: torch.Tensor, p: float) -> None:
        if not 0 <= p <= 1:
            raise ValueError(f"dropout in {self._module}: got the probability {p}, expected 0 to 1")
        if not input.ndim or input.shape[0] != self._layout.microchunk:
            raise ConfigError(
                f"reproducible: dropout in {self._module} got a tensor of the shape {(*input.shape,)}, expected the "
                f"{self._layout.microchunk} samples of a chunk in dim 0; reshape it before dropout, and back after it"
            )

    def _sharded_dim(self, input: torch.Tensor) -> int | None:
        layout, fused = self._layout, self._forwards.fused
        if layout.tensor_size == 1 or in_replicated_random():
            return None
        if input.ndim == 3 and fused:
            return 2
        if in_sharded_random():
            if input.ndim == 4 or (input.ndim == 3 and layout.sequence_parallel):
                return 1
            if input.ndim == 3:
                return 2  # LoRA's, of the input of a rowwise layer that has been computed
        elif not fused:
            if not layout.sequence_parallel or self._is_unsliced():
                return None
            raise ConfigError(
                f"reproducible: dropout in {self._module} may get a slice of the sequence, but the plan does not say "
                "so; give the module the style 'sharded_random', or 'replicated_random' if each rank has all of it"
            )
        raise ConfigError(
            f"reproducible: dropout in {self._module} got a tensor of the shape {(*input.shape,)} between sharded "
            "layers, expected (samples, sequence, features), or (samples, heads, ..., ...) in sharded_random(); "
            "reshape it, or apply dropout behind the rowwise layer"
        )

    def _is_unsliced(self) -> bool:
        """Whether the module that runs is in one whose output is to be cut along the sequence."""
        name = self._forwards.innermost
        return any(name == one or name.startswith(f"{one}.") for one in self._unsliced)

    def _noise(
        self, shape: torch.Size, p: float, like: torch.Tensor, dim: int | None, tokens: int | None
    ) -> torch.Tensor:
        """0 with probability ``p``, else 1 / (1 - p); for each sample this rank's part along ``dim``, and of
        ``tokens``, the dim of what the context axis cuts."""
        name, *draw = self._draw()
        layout, at = self._layout, self._forwards.position()
        local = list(shape[1:])
        whole = [*local]
        cut: list[tuple[int, int]] = []
        for axis, rank, size in (
            (dim, layout.tensor_rank, layout.tensor_size),
            (tokens, layout.context_rank, layout.context_size),
        ):
            if axis is not None and size > 1:
                whole[axis - 1] *= size
                cut.append((axis - 1, rank))
        parts = []
        for sample in range(at.first_sample, at.first_sample + shape[0]):
            generator = torch.Generator(like.device)
            generator.manual_seed(derive_seed(layout.seed, at.step, at.call, name, *draw, sample))
            drawn = torch.rand(whole, generator=generator, device=like.device, dtype=torch.float32) >= p
            for axis, rank in cut:
                drawn = drawn.narrow(axis, rank * local[axis], local[axis])
            parts.append(drawn)
        kept = torch.stack(parts).to(like.dtype)
        return kept.div_(1 - p) if p < 1 else kept

    def _draw(self) -> tuple[str, int, int]:
        """The module's name, the number of its forward in this microchunk, and that of the draw in it."""
        forward = self._forwards.drawing()
        if forward.name in self._divided:
            raise ConfigError(
                f"reproducible: {self._module} draws dropout masks, and several pipeline stages have it, or a "
                "part of it, so that none knows how many masks were drawn before; use a module of its own for each "
                "dropout, inside what a stage has whole"
            )
        forward.draws += 1
        return forward.name, forward.index, forward.draws - 1
