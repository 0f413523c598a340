"""Models in another trainer's loop whose sequences are cut over a context axis, with the losses of whole sequences.

The trainer gives all ranks of a sequence the same batch, and averages gradients over data and context ranks. The model
gets whole sequences, computes this rank's tokens (:mod:`paramp.parallel.context_axis`), and returns whole outputs.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from ..base.module_surgery import replace_forward, unbound
from ..base.trees import map_leaves
from ..distributed.context import ParallelContext
from ..distributed.token_positions import ACTIVE
from ..observe.same_data import SameBatches
from ..parallel.context_axis.cut_sequences import SequenceAxis
from ..parallel.context_axis.stages_on_cut_sequences import CutStage, no_tokens
from ..parallel.loss_and_outputs_of_batch import loss_in
from ..parallel.microbatches import Batch
from ..parallel.model_families import adapter_for


class AddedAxis(SequenceAxis):
    """The context axis of a trainer that has one loss of whole sequences on each of its ranks."""

    def total(self, count: torch.Tensor) -> torch.Tensor:
        """The sum of ``count`` over the ranks."""
        return self.summed(count)


def cut_sequences(model: nn.Module, axis: AddedAxis, context: ParallelContext) -> None:
    """Let the forward of ``model`` take whole sequences and compute this rank's tokens of them, from now on.

    Every rank calls it, and later the model with the same inputs on the ranks of one sequence. It returns whole
    outputs; beside the loss of a model of transformers, while gradients are computed, those of this rank's tokens.

    Raises:
        ConfigError: a layer mixes tokens without an exchange.
    """
    inputs = adapter_for(model).sequence_inputs()
    inputs.check(model, 1)
    cut = _CutModel(model, inputs, axis, context, is_first=True)
    cut.own_forward = unbound(model.forward, model)
    context.num_engines += 1
    same = SameBatches(context, _raise)

    @functools.wraps(cut.own_forward)
    def forward(model: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        batch = Batch(args, kwargs)
        same.check(model.training, batch)
        with axis.computing():
            output = cut.forward(*args, **kwargs)
            is_joined = loss_in(output) is None or not torch.is_grad_enabled()
            return axis.joined(output, batch) if is_joined else output

    replace_forward(model, forward)


class _CutModel(CutStage):
    """A whole model; with its own loss over all ranks' tokens."""

    axis: AddedAxis
    own_forward: Any

    def compute(self, *args: Any, **kwargs: Any) -> Any:
        if not ACTIVE:
            return self.own_forward(self.stage, *args, **kwargs)
        kwargs = self.inputs.counted(args, kwargs)
        output = self.own_forward(self.stage, *args, **kwargs)
        loss = loss_in(output) if "num_items_in_batch" in kwargs else None

        def whole(path: str, leaf: Any) -> Any:
            if leaf is loss and loss is not None:
                return self.axis.added(loss)
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.ndim < 2:
                raise no_tokens(self.stage, path, leaf.shape)
            return leaf

        return map_leaves(whole, output, "output")


def _raise(error: Exception) -> None:
    raise error
