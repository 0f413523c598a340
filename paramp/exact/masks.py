"""Dropout masks that depend on where an element is in the unsharded global batch, not on the layout.

The mask of a sample is drawn as a whole, from a seed made of the run's seed, the step, the call, the module's name, the
number of the draw in it, and the sample's index in the global batch. A rank takes its part.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from ..base.errors import ConfigError
from ..base.module_surgery import run_within
from ..base.torch_internals import expect
from ..distributed.rng import derive_seed, in_replicated_random, in_sharded_random
from .place import Place

expect("torch._C._current_graph_task_id")


@dataclass
class _Forward:
    """One forward of the module ``name``: how many of this chunk were before, and the draws in this one."""

    name: str
    index: int
    draws: int = 0


class Masks:
    """The masks of a model at ``place``; the arguments are those of :class:`.functions.ExactFunctions`."""

    def __init__(
        self,
        place: Place,
        name_of: Mapping[nn.Module, str],
        divided: Collection[str] = (),
        unsliced: Collection[str] = (),
    ) -> None:
        self._place = place
        self._name_of = name_of
        self._divided = divided
        self._unsliced = tuple(unsliced)
        self._running: list[_Forward] = []
        self._forwards: Counter[str] = Counter()
        self._repeated: set[str] = set()
        self._inside: dict[str, set[str]] = {}
        """The modules in a module, by name."""
        self._earlier: dict[tuple[int, str], dict[str, int]] = {}
        """By the first sample of a chunk and a module that ran: forwards of the modules in it that were before."""
        self._sharded: dict[str, bool] = {}
        """Whether features were sharded where a module ran."""
        self._again: Counter[str] = Counter()
        """As ``_forwards``, of what is computed again in the backward."""

    def watch(self, module: nn.Module) -> None:
        """Count the forwards of ``module`` and its submodules from now on.

        Call it before activation checkpointing is applied, which computes the forward again that it finds.
        """
        for child in module.modules():
            if child in self._name_of:
                inside = {self._name_of[inner] for inner in child.modules() if inner in self._name_of}
                self._inside[self._name_of[child]] = inside
                run_within(child, self._running_in)

    def _running_in(self, module: nn.Module) -> AbstractContextManager[None]:
        return self._forward(self._name_of[module])

    @contextmanager
    def _forward(self, name: str) -> Iterator[None]:
        chunk = self._place.first_sample
        if _is_recomputing():
            if not self._running:
                self._again = Counter(self._earlier.get((chunk, name), {}))
                self._place.sharded_features = self._sharded.get(name, False)
            forwards = self._again
        else:
            forwards = self._forwards
            if forwards[name]:
                self._repeated.add(name)
            else:
                self._sharded[name] = self._place.sharded_features
                self._earlier.pop((chunk, name), None)
                if before := {one: forwards[one] for one in self._inside[name] if forwards[one]}:
                    self._earlier[chunk, name] = before
        index = forwards[name]
        forwards[name] += 1
        self._running.append(_Forward(name, index))
        try:
            yield
        finally:
            self._running.pop()

    def begin_chunk(self) -> None:
        """A forward of another chunk begins, or one outside of chunks."""
        self._forwards.clear()
        self._place.sharded_features = False

    @property
    def module(self) -> str:
        """The name of the innermost module whose forward runs, for messages."""
        return repr(self._running[-1].name) if self._running else "the code outside of the model's modules"

    def dropout(self, input: torch.Tensor, p: float, *, features: bool = False) -> torch.Tensor:
        """Dropout with probability ``p``; with ``features``, of whole channels, dim 1 of ``input``.

        Args:
            input: (samples of the chunk, ...), what this rank has of it.

        Raises:
            ConfigError: the samples or the sharded dim of ``input`` are not known.
        """
        self._check(input, p)
        shape = torch.Size([*input.shape[:2], *[1] * (input.ndim - 2)]) if features else input.shape
        dim = self._sharded_dim(input)
        if features and dim is not None and dim != 1:
            raise ConfigError(
                f"reproducible: dropout of whole channels in {self.module} got a tensor of the shape "
                f"{(*input.shape,)} that is sharded over dim {dim}, expected one that is replicated or sharded over "
                "dim 1; use F.dropout"
            )
        return input * self._noise(shape, p, input, dim)

    def attention_noise(self, shape: torch.Size, p: float, like: torch.Tensor) -> torch.Tensor:
        """What attention weights of ``shape``, (samples, this rank's heads, queries, keys), are multiplied with."""
        self._check(like, p)
        return self._noise(shape, p, like, 1 if self._place.sharded_features else None)

    def _check(self, input: torch.Tensor, p: float) -> None:
        if not 0 <= p <= 1:
            raise ValueError(f"dropout in {self.module}: got the probability {p}, expected 0 to 1")
        if not input.ndim or input.shape[0] != self._place.chunk:
            raise ConfigError(
                f"reproducible: dropout in {self.module} got a tensor of the shape {(*input.shape,)}, expected the "
                f"{self._place.chunk} samples of a chunk in dim 0; reshape it before dropout, and back after it"
            )

    def _sharded_dim(self, input: torch.Tensor) -> int | None:
        place = self._place
        if place.tensor_size == 1 or in_replicated_random():
            return None
        if input.ndim == 3 and place.sharded_features:
            return 2
        if in_sharded_random():
            if input.ndim == 4 or (input.ndim == 3 and place.sequence_parallel):
                return 1
            if input.ndim == 3:
                return 2  # LoRA's, of the input of a rowwise layer that has been computed
        elif not place.sharded_features:
            if not place.sequence_parallel or self._is_unsliced():
                return None
            raise ConfigError(
                f"reproducible: dropout in {self.module} may get a slice of the sequence, but the plan does not say "
                "so; give the module the style 'sharded_random', or 'replicated_random' if each rank has all of it"
            )
        raise ConfigError(
            f"reproducible: dropout in {self.module} got a tensor of the shape {(*input.shape,)} between sharded "
            "layers, expected (samples, sequence, features), or (samples, heads, ..., ...) in sharded_random(); "
            "reshape it, or apply dropout behind the rowwise layer"
        )

    def _is_unsliced(self) -> bool:
        """Whether the module that runs is in one whose output is to be cut along the sequence."""
        name = self._running[-1].name if self._running else ""
        return any(name == one or name.startswith(f"{one}.") for one in self._unsliced)

    def _noise(self, shape: torch.Size, p: float, like: torch.Tensor, dim: int | None) -> torch.Tensor:
        """0 with probability ``p``, else 1 / (1 - p); for each sample this rank's part along ``dim``."""
        name, *draw = self._draw()
        place = self._place
        own = list(shape[1:])
        whole = [*own]
        if dim is not None:
            whole[dim - 1] *= place.tensor_size
        parts = []
        for sample in range(place.first_sample, place.first_sample + shape[0]):
            generator = torch.Generator(like.device)
            generator.manual_seed(derive_seed(place.seed, place.step, place.call, name, *draw, sample))
            drawn = torch.rand(whole, generator=generator, device=like.device, dtype=torch.float32) >= p
            if dim is not None:
                drawn = drawn.narrow(dim - 1, place.tensor_rank * own[dim - 1], own[dim - 1])
            parts.append(drawn)
        kept = torch.stack(parts).to(like.dtype)
        return kept.div_(1 - p) if p < 1 else kept

    def _draw(self) -> tuple[str, int, int]:
        """The module's name, the number of its forward in this chunk, and that of the draw in it."""
        again = _is_recomputing()
        if not self._running:
            how = "is computed again in the backward" if again else "runs"
            raise ConfigError(
                f"reproducible: dropout {how} outside of the forward of a module of the model, expected inside; "
                "call it in a module, and torch.utils.checkpoint with whole modules"
            )
        forward = self._running[-1]
        if again and self._running[0].name in self._repeated:
            raise ConfigError(
                f"reproducible: the module {self._running[0].name!r} draws dropout masks and runs more than once in a "
                "forward, expected once if it is computed again in the backward; set activation_checkpointing to 'none'"
            )
        if forward.name in self._divided:
            raise ConfigError(
                f"reproducible: {self.module} draws dropout masks, and several pipeline stages have it, or a part of "
                "it, so that none knows how many masks were drawn before; use a module of its own for each dropout, "
                "inside what a stage has whole"
            )
        forward.draws += 1
        return forward.name, forward.index, forward.draws - 1


def _is_recomputing() -> bool:
    """Whether a backward runs: forwards in it are those of activation checkpointing."""
    return torch._C._current_graph_task_id() != -1
