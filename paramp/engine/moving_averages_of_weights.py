"""Averages of the weights over the steps, to evaluate with and to publish: an exponential moving average.

After each step that was made, ``average += (1 - decay) * (weight - average)``, for the master if the weight has one.
Each rank averages what it steps, so averages are sharded as masters are: over tensor ranks, over stages, and with
ZeRO-1 or FSDP2 over data ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from ..base import loop_block_sizes
from ..base.scratch_memory_cpu import Scratch
from ..checkpoint.chunks import Chunk
from ..checkpoint.header import Header
from ..optim.flat_buffer import Buffer
from .accumulation_window import AccumulationWindow
from .state.full_state import full_state_dict
from .state.model_tensors import ParamChunks

EMA = "ema."
"""The prefix of the names of averages in a checkpoint."""


class WeightAverages:
    """Exponential moving averages of the trained weights, in fp32 (fp64 for fp64 weights): ``engine.ema``.

    They begin as the weights before the first step, and change only by steps that are made: a skipped step leaves
    their bits. Frozen weights and buffers are not averaged.
    """

    def __init__(self, params: ParamChunks, window: AccumulationWindow, decay: float) -> None:
        self._params = params
        self._weights = params.weights
        self._window = window
        self._decay = decay
        self._begun = False
        self._scratch = Scratch()
        for buffer in self._weights.buffers:
            buffer.make_average()

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """The whole model with averaged weights, as :meth:`paramp.Engine.full_state_dict` returns it. A collective."""
        self._window.losses.failure.check_not_alone()
        self._weights.put_back()
        self.begin()
        return full_state_dict(self._params, averages=True)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Put the averages in the place of weights and masters inside ``with engine.ema.applied():``, for evaluations.

        Every rank enters it. On exit weights and masters have their bits of before; until then these are kept in
        additional memory. What the engine returns or writes of the model, such as ``save_pretrained``, is averaged.

        Raises:
            RuntimeError: inside, by a backward, a step, a checkpoint's save or load, or another ``applied()``.
        """
        self._window.check_not_averaged()
        self._weights.put_back()
        self.begin()
        tensors = [values for buffer in self._weights.buffers for values in (buffer.weights, *buffer.masters.state)]
        kept = [values.clone() for values in tensors]
        with self._window.averaged():
            try:
                with torch.no_grad():
                    for buffer, block, average in self._blocks():
                        buffer.masters.write(block, average, self._scratch)
                    self._weights.gather_weights()
                yield
            finally:
                with torch.no_grad():
                    for tensor, values in zip(tensors, kept, strict=True):
                        tensor.copy_(values)

    @torch.no_grad()
    def begin(self) -> None:
        """Set the averages to the weights, until a step has moved them."""
        if self._begun:
            return
        for buffer, block, average in self._blocks():
            average.copy_(buffer.masters.read(block, self._scratch))

    @torch.no_grad()
    def move(self, skip: torch.Tensor, *, compare: bool) -> None:
        """Move the averages towards the stepped weights, unless ``skip``, 0-dim bool on the device.

        ``compare``: weights that the step has left out may have been changed in place (:meth:`Masters.read`).
        """
        self._begun = True
        for buffer, block, average in self._blocks():
            weight = buffer.masters.read(block, self._scratch, compare=compare)
            if weight.dtype is not average.dtype:
                weight = self._scratch.like("weight", weight, average.dtype).copy_(weight)
            moved = self._scratch.like("moved", average, average.dtype)
            torch.lerp(average, weight, 1 - self._decay, out=moved)
            torch.where(skip, average, moved, out=average)  # by a weight of 0 a lerp changes -0, and inf to NaN

    def _blocks(self) -> Iterator[tuple[Buffer, slice, torch.Tensor]]:
        """(buffer, range, averages in it), in blocks that stay in the cache."""
        size = loop_block_sizes.STEP_BLOCK[self._weights.device.type]
        for buffer in self._weights.buffers:
            assert buffer.average is not None
            for start in range(0, buffer.own_size, size):
                block = slice(start, start + size)
                yield buffer, block, buffer.average[block]

    def chunks(self) -> Iterator[Chunk]:
        """All chunks of this rank. Of the ranks that hold the same chunk, one writes it."""
        self.begin()
        yield from self._chunks()

    def _chunks(self) -> Iterator[Chunk]:
        local = set(self._params.stepped_here())
        for buffer in self._weights.buffers:
            assert buffer.average is not None
            for param in buffer.params:
                if param in local:
                    name = f"{EMA}{self._params.first_names[param.name]}"
                    yield self._params.trained(param, name, buffer.average[param.own_range])

    def load(self, read: Callable[[list[Chunk]], None], header: Header, *, everything: bool) -> None:
        """Fill the averages after weights and masters; ``read`` fills chunks from the checkpoint, a collective.

        Those that it lacks, or all without ``everything``, begin as the loaded weights.
        """
        self._begun = False
        self.begin()
        if everything and any(name.startswith(EMA) for name in header.tensors):
            read([chunk for chunk in self._chunks() if chunk.name in header.tensors])
            self._begun = True
