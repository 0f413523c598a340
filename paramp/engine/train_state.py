"""What of an engine's training is saved, under names that do not depend on the layout, and how it is loaded.

========================================  ==============================================================================
``model.NAME``                            a weight, or its fp32 master where the mode has masters; a buffer of the first
                                          data rank
``optimizer.NAME.KEY``                    what the optimizer keeps for a weight
``data.RANK.NAME``                        a buffer of another data rank: running statistics are each rank's own
``random.stage.STAGE.RANK.I``             the random stream of a stage on a data rank
``random.rank.PP.DP.TP.I``                the default streams of a rank: torch's, Python's, NumPy's
========================================  ==============================================================================

A parameter that has several names is saved under the first of the whole model. Half-precision weights with masters are
not saved: they are their masters, rounded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from ..checkpoint.chunks import Chunk
from ..checkpoint.header import MODEL, Header
from ..distributed.context import ParallelContext, TiedParameter
from ..optim.flat_params import FlatWeights
from ..parallel.stage import Stages
from .state.model_tensors import ModelTensors
from .state.optimizer_state import OptimizerState
from .state.param_chunks import ParamChunks
from .state.random_streams import RandomStreams, saved_layout


class TrainingState:
    """What a rank trains, as chunks of the whole model.

    Every rank calls ``check_model``, ``check_optimizer``, ``load_model``, ``load_optimizer``, ``load_random``, in this
    order; of a checkpoint that has only weights, ``check_model`` and ``load_model``.

    Attributes:
        optimizer: the one whose state it is.
        shapes: those of this rank's parameters in the whole model.
        groups, numbers: plain values to be saved beside the chunks; as those of :class:`OptimizerState`.
    """

    def __init__(
        self,
        module: nn.Module,
        stages: Stages,
        weights: FlatWeights,
        optimizer: torch.optim.Optimizer,
        ties: Sequence[TiedParameter],
        context: ParallelContext,
        first_names: Mapping[str, str],
        shapes: Mapping[str, torch.Size],
    ) -> None:
        """The arguments are those of :class:`~paramp.engine.state.param_chunks.ParamChunks`."""
        self.optimizer = optimizer
        self.shapes = shapes
        self._first_names = first_names
        self._context = context
        params = ParamChunks(module, weights, ties, context, first_names, shapes)
        model, state, random = ModelTensors(params), OptimizerState(optimizer, params), RandomStreams(stages, context)
        self._parts = model, state, random
        self.groups, self.numbers = state.groups, state.numbers
        self.check_model, self.load_model = model.check, model.load
        self.check_optimizer, self.load_optimizer = state.check, state.load
        self.load_random = random.load

    def chunks(self) -> list[Chunk]:
        """All that this rank holds. Of what several ranks hold alike, one writes.

        Raises:
            CheckpointError: something cannot be saved, such as an optimizer's state that is no tensor.
        """
        return [chunk for part in self._parts for chunk in part.chunks()]

    def layout(self) -> dict[str, int]:
        """The sizes on which depends what each rank holds."""
        return saved_layout(self._context)

    def by_first_names(self, header: Header) -> Header:
        """``header``, with what was saved under another name of a parameter under its first."""
        tensors = dict(header.tensors)
        for name, first in self._first_names.items():
            if name != first and (other := tensors.pop(f"{MODEL}{name}", None)) is not None:
                tensors.setdefault(f"{MODEL}{first}", other)
        return replace(header, tensors=tensors)
