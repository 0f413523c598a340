"""Random streams as chunks of a checkpoint: the streams of stages, and each rank's default streams."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator

import numpy as np
import torch

from ...checkpoint.chunks import Chunk, whole_chunk
from ...checkpoint.header import Header
from ...checkpoint.json_codec import decode, encode
from ...distributed.context import ParallelContext
from ...distributed.rng import RandomStream, derive_seed, random_states, set_random_states
from ...pipeline.stage import Stages

STAGE, RANK = "random.stage.", "random.rank."
PYTHON_STATE = 2**15
"""Bytes for the states of Python's and NumPy's streams as JSON: 2 x 624 numbers of 32 bits."""


def saved_layout(context: ParallelContext) -> dict[str, int]:
    """The sizes that determine what each rank holds, by their names in checkpoints."""
    pipeline = context.config.parallel.pipeline
    return {
        "pp": context.stage_axis.size,
        "dp": context.dp.size,
        **({"cp": context.cp.size} if context.cp.size > 1 else {}),
        "tp": context.tensor_axis.size,
        "stages": pipeline.num_stages,
        "zero": context.config.parallel.zero,
    }


class RandomStreams:
    """The states of the random streams of this rank, uint8 tensors."""

    def __init__(self, stages: Stages, context: ParallelContext) -> None:
        self._context = context
        self._engine = context.num_engines  # the engine under construction is not counted yet
        self._streams = list(zip(context.local_stages, stages.streams, strict=True))
        axes = context.stage_axis, context.batch_axis, context.tensor_axis
        self._rank_prefix = RANK + "".join(f"{axis.rank}." for axis in axes)

    def chunks(self) -> Iterator[Chunk]:
        """All states. A stage's stream is equal on all tensor ranks; the first one writes it."""
        first = self._context.tensor_axis.rank == 0
        for stage, stream in self._streams:
            for name, state in zip(self._stage_names(stage, stream), stream.states, strict=True):
                yield whole_chunk(name, state, written=first)
        for index, state in enumerate(_default_states(self._context.device)):
            yield whole_chunk(f"{self._rank_prefix}{index}", state)

    def _stage_names(self, stage: int, stream: RandomStream) -> list[str]:
        data_rank = self._context.batch_axis.rank
        return [f"{STAGE}{stage}.{data_rank}.{index}" for index in range(len(stream.states))]

    def load(self, read: Callable[[list[Chunk]], None], header: Header, num_steps: int) -> None:
        """Restore the streams; in another layout, seed them from the number of steps made.

        ``read`` fills chunks from the checkpoint, a collective.
        """
        chunks = list(self.chunks())
        loaded = {
            chunk.name: chunk.slices[0].values.clone()  # as a stream's states are never changed in place
            for chunk in chunks
            if chunk.name in header.tensors and header.tensors[chunk.name].shape == chunk.shape
        }
        read([whole_chunk(name, values) for name, values in loaded.items()])
        saved, layout = header.values["layout"], saved_layout(self._context)
        same_places = all(saved.get(name, 1) == layout.get(name, 1) for name in ("stages", "cp"))
        for stage, stream in self._streams:
            names = self._stage_names(stage, stream)
            if same_places and all(name in loaded for name in names):
                stream.states = [loaded[name] for name in names]
            else:
                begun = self._context.activation_stream(stage, engine=self._engine, num_steps=num_steps)
                stream.states = begun.states
        names = [chunk.name for chunk in chunks if chunk.name.startswith(self._rank_prefix)]
        if saved == layout and all(name in loaded for name in names):
            *default, encoded = (loaded[name] for name in names)
            set_random_states(default, self._context.device)
            python, numpy = decode(json.loads(encoded.numpy().tobytes()))
            random.setstate(python)
            np.random.set_state(tuple(numpy))
        else:
            torch.manual_seed(derive_seed(self._context.config.seed, "resumed", num_steps))


def _default_states(device: torch.device) -> list[torch.Tensor]:
    """The states of the default streams, 1-dim uint8: torch's, and Python's and NumPy's as JSON, padded."""
    text = json.dumps(encode([random.getstate(), list(np.random.get_state())])).encode()
    # Padded, because a tensor in a checkpoint must have the expected shape.
    return [*random_states(device), torch.frombuffer(bytearray(text.ljust(PYTHON_STATE)), dtype=torch.uint8)]
