"""Which forwards run in a microchunk: how often each module has run, and whether its features are sharded."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from ..base.backward_running import in_backward
from ..base.errors import ConfigError
from ..base.module_surgery import run_within
from ..base.uncompiled import unwatched
from ..distributed.token_positions import ACTIVE
from .exact_layout import ExactLayout, Position
from .sums_over_slices import fan_out


@dataclass
class Forward:
    """One forward of the module ``name``: how many of this microchunk were before, and the draws in this one."""

    name: str
    index: int
    draws: int = 0


class MixtureSlices:
    """The slices of the sequence that one forward of a mixture of experts computes one by one.

    Attributes:
        index: of the slice that runs.
    """

    def __init__(self, forwards: Forwards) -> None:
        self.index = 0
        self._forwards = forwards
        self._aliases: dict[tuple[nn.Module, str, int], tuple[torch.Tensor, ...]] = {}

    def use(
        self,
        module: nn.Module,
        name: str,
        value: torch.Tensor,
        source: int = 0,
        tap: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """``value``, the parameter ``name`` of ``module``, for the slice that runs.

        Its gradient is the sum over the slices of all ranks of the context axis.

        Args:
            source: which data rank's tokens they are, of those that share experts.
            tap: what the parameter is used through, once for all slices.
        """
        key = module, name, source
        if key not in self._aliases:
            layout = self._forwards.layout
            tapped = value if tap is None else tap(value)
            count, group = layout.local_sequence_slices, layout.sequences.group
            self._aliases[key] = fan_out(tapped, count, group, dtype=tapped.dtype)
            self._forwards.sliced[f"{type(module).__name__} in {self._forwards.module}"] += 1
        return self._aliases[key][self.index]


class Forwards:
    """The forwards of this rank's modules, in microchunks and where activation checkpointing computes them again.

    Attributes:
        layout: of this rank.
        position: a function that returns the position in the run.
        fused: 0 if activations have all features. Behind a colwise layer of the plan, until a rowwise one, they may be
            sharded in their features or heads, on one tensor rank too: then the number of its fused outputs, 3 for
            query, key and value, each of which is sharded. A plain tensor does not show it.
        slicing: whether a module computes one slice of the sequence.
        trying: whether a stage is tried, whose own code then runs in none of the modules that are watched.
        num_tokens: of each sequence, those of this rank, in the module that computed slices last.
        cut_tokens: the same, of the inputs that the forward which runs has cut; 0 if it has cut none, as a later stage.
        mixture: the slices of the mixture of experts that runs; None if none does.
        sliced: how often each module has done so, by how messages name it, since context ranks last compared it.
    """

    def __init__(self, layout: ExactLayout, position: Callable[[], Position] = Position) -> None:
        self.layout, self.position, self.fused = layout, position, 0
        self.slicing = self.trying = False
        self.num_tokens = self.cut_tokens = 0
        self.mixture: MixtureSlices | None = None
        self.sliced: Counter[str] = Counter()
        self._running: list[Forward] = []
        self._counts: Counter[str] = Counter()
        self._repeated: set[str] = set()
        self._inside: dict[str, set[str]] = {}
        """The modules in a module, by name."""
        self._earlier: dict[tuple[int, str], dict[str, int]] = {}
        """By the first sample of a microchunk and a module that ran: forwards of the modules in it that were before."""
        self._fused_at: dict[str, int] = {}
        """``fused`` where a module ran."""
        self._again: Counter[str] = Counter()
        """As ``_counts``, of what is computed again in the backward."""

    def watch(self, module: nn.Module, name_of: Mapping[nn.Module, str]) -> None:
        """Count the forwards of ``module`` and its submodules from now on, by their names in the whole model.

        Call it before activation checkpointing is applied, which computes the forward again that it finds.
        """
        for child in module.modules():
            if child in name_of:
                self._inside[name_of[child]] = {name_of[inner] for inner in child.modules() if inner in name_of}
                run_within(child, lambda module: self._forward(name_of[module]))

    @contextmanager
    def _forward(self, name: str) -> Iterator[None]:
        first_sample = self.position().first_sample
        if in_backward():
            if not self._running:
                self._again = Counter(self._earlier.get((first_sample, name), {}))
                self.fused = self._fused_at.get(name, 0)
            counts = self._again
        else:
            counts = self._counts
            if counts[name]:
                self._repeated.add(name)
            else:
                self._fused_at[name] = self.fused
                self._earlier.pop((first_sample, name), None)
                if before := {one: counts[one] for one in self._inside[name] if counts[one]}:
                    self._earlier[first_sample, name] = before
        index = counts[name]
        counts[name] += 1
        self._running.append(Forward(name, index))
        try:
            yield
        finally:
            self._running.pop()

    def of_layer(self, forward: Callable[..., torch.Tensor], leaves: int | None = None) -> Callable[..., torch.Tensor]:
        """``forward`` of a layer of the plan, whose calls of torch run as they are: their shapes are those of slices.

        ``leaves``: :attr:`fused` behind it; None: as before.
        """

        @functools.wraps(forward)
        def run(module: nn.Module, *args: object, **kwargs: object) -> torch.Tensor:
            with unwatched():
                output = forward(module, *args, **kwargs)
            if leaves is not None:
                self.fused = leaves
            return output

        return run

    @contextmanager
    def in_slice(self) -> Iterator[None]:
        """A context for a forward of one slice of the sequence."""
        self.slicing = True
        try:
            yield
        finally:
            self.slicing = False

    @contextmanager
    def in_mixture(self) -> Iterator[MixtureSlices]:
        """A context for the forward of a mixture of experts, slice by slice."""
        self.mixture = MixtureSlices(self)
        try:
            with self.in_slice():
                yield self.mixture
        finally:
            self.mixture = None

    @contextmanager
    def aside(self) -> Iterator[None]:
        """A context for forwards that do not count."""
        counted = self._running, self._counts, self._repeated, self._earlier, self._fused_at, self.fused
        sliced, cut_tokens = self.sliced.copy(), self.cut_tokens
        self._running, self._counts, self._repeated, self._earlier, self._fused_at = [], Counter(), set(), {}, {}
        self.fused = self.cut_tokens = 0
        self.trying = True
        try:
            yield
        finally:
            self._running, self._counts, self._repeated, self._earlier, self._fused_at, self.fused = counted
            self.sliced, self.cut_tokens = sliced, cut_tokens
            self.trying = False

    @property
    def sees_parts(self) -> bool:
        """Whether the code that runs is the model's, on all of this rank's tokens, which are fewer on more ranks."""
        return self.layout.cuts_sequences and bool(ACTIVE and self._running) and not self.slicing

    def begin(self) -> None:
        """A forward of another microchunk begins, or one outside of microchunks."""
        self._counts.clear()
        self.fused = self.cut_tokens = 0

    @property
    def is_sharded(self) -> bool:
        """Whether this rank may have a part of the features or heads of activations."""
        return bool(self.fused) and self.layout.tensor_size > 1

    @property
    def module(self) -> str:
        """The name of the innermost module whose forward runs, for messages."""
        return repr(self._running[-1].name) if self._running else "the code outside of the model's modules"

    @property
    def innermost(self) -> str:
        """The name of the innermost module whose forward runs; empty outside of the model's modules."""
        return self._running[-1].name if self._running else ""

    def drawing(self) -> Forward:
        """The forward that draws a mask.

        Raises:
            ConfigError: none runs, or it is computed again and which one it is of several is not known.
        """
        again = in_backward()
        if not self._running:
            how = "is computed again in the backward" if again else "runs"
            raise ConfigError(
                f"reproducible: dropout {how} outside of the forward of a module of the model, expected inside; "
                "call it in a module, and torch.utils.checkpoint with whole modules"
            )
        if again and self._running[0].name in self._repeated:
            raise ConfigError(
                f"reproducible: the module {self._running[0].name!r} draws dropout masks and runs more than once in a "
                "forward, expected once if it is computed again in the backward; set activation_checkpointing to 'none'"
            )
        return self._running[-1]
