"""Stages as torch's pipeline schedules take them: a module of tensors, and torch's own stage around it.

Importing this imports torch's schedules, which takes seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage

from ..base import trees
from ..base.observer_spans import Observer, span
from ..base.torch_internals import expect
from ..distributed.context import ParallelContext
from ..distributed.exact_mode_protocol import Numerics
from ..distributed.first_failure import is_lost_connection
from ..parallel.microbatches import Batch
from ..precision.compute_context import default_dtype_of
from .split_backward import SplitBackward
from .stage import Stage
from .stage_output import StageOutput, plain

expect(
    "torch.distributed.pipelining.stage._PipelineStageBase",
    "torch.distributed.pipelining.schedules._Action",
    "torch.distributed.pipelining.schedules._PipelineScheduleRuntime",
)


@dataclass
class StageSetting:
    """What the stages of a rank have in common: where they stand, and whom they notify."""

    context: ParallelContext
    observers: Sequence[Observer]
    numerics: Numerics
    before_last_backward: Callable[[], None] = lambda: None
    """Called before the last full backward of a schedule."""


class LinkedStage(nn.Module):
    """A stage for torch's schedules, which give it the tensors that it receives; it takes the model's inputs itself.

    The last stage keeps its output, any tree, in :attr:`output` for the loss, and returns a stand-in of one element.
    If the forward fails, it calls ``failed`` and returns zeros, so that the schedule continues and no rank waits.
    """

    def __init__(self, stage: Stage, failed: Callable[[Exception], None]) -> None:
        super().__init__()
        self.failed = failed
        self.stage = stage
        self.received: StageOutput | None = None
        """The description of the stage's input; None for the model's inputs."""
        self.sent: StageOutput | None = None
        """The description of its output; None for the model's output."""
        self.microbatches: list[Batch] = []
        self._index = 0
        self.output: Any = None

    def forward(self, *tensors: torch.Tensor) -> Any:
        try:
            return self._run(*tensors)
        except Exception as error:
            if is_lost_connection(error):
                raise
            self.failed(error)
            return self._zeros(tensors)

    def begin(self, index: int) -> None:
        """Choose the microbatch whose forward is next."""
        self._index = index

    def _run(self, *tensors: torch.Tensor) -> Any:
        batch = self.microbatches[self._index]
        args = batch.args if self.received is None else (self.stage.receive(self.received, tensors),)
        self.output = None
        output = self.stage(*args, **batch.kwargs)
        if self.sent is not None:
            return self.sent.pack(output, self.stage.link_device)
        self.output = output
        return torch.zeros(1, device=self.stage.link_device)

    def _zeros(self, tensors: tuple[torch.Tensor, ...]) -> Any:
        """The substitute for an output; it depends on ``tensors``, so that these get gradients."""
        zero = torch.zeros((), requires_grad=torch.is_grad_enabled())
        # Multiplied first: the gradient of a plain sum is an expanded tensor, which cannot be sent.
        anchor = sum(((tensor * 0.0).sum() for tensor in tensors if tensor.requires_grad), zero * 0.0)
        if self.sent is None:
            return anchor.reshape(1).to(self.stage.link_device)
        metas = self.sent.metas(False)
        return tuple(torch.zeros_like(meta, device=self.stage.link_device) + anchor.to(meta.dtype) for meta in metas)

    def no_loss(self, stand_in: torch.Tensor) -> torch.Tensor:
        """A loss of zero, through which every parameter gets a gradient; ``stand_in`` is what the forward returned."""
        if stand_in.requires_grad or self.output is None:
            return stand_in.sum()
        outputs = [plain(tensor) for tensor in trees.tensors(self.output) if tensor.requires_grad]
        return sum(((output * 0.0).sum() for output in outputs), torch.zeros((), device=self.stage.device))


class RecordedStage(PipelineStage):
    """A ``PipelineStage`` that reports its forwards, backwards and failures."""

    def __init__(
        self,
        linked: LinkedStage,
        index: int,
        setting: StageSetting,
        inputs: tuple[torch.Tensor, ...],
        outputs: tuple[torch.Tensor, ...],
    ) -> None:
        group = setting.context.pp.group
        num_stages = setting.context.config.parallel.pipeline.num_stages
        device = linked.stage.link_device
        super().__init__(linked, index, num_stages, device, input_args=inputs, output_args=outputs, group=group)
        self.setting = setting
        self.linked = linked

    def _span(self, kind: str, microbatch: int) -> AbstractContextManager[None]:
        return span(self.setting.observers, kind, self.stage_index, microbatch)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self.setting.numerics.begin_forward(fwd_chunk_id)
        with self._span("forward", fwd_chunk_id):
            self.linked.begin(fwd_chunk_id)
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        if last_backward and full_backward:
            self.setting.before_last_backward()
        self.setting.numerics.begin_backward(bwd_chunk_id)
        with self._span("backward" if full_backward else "backward input", bwd_chunk_id):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        if full_backward:
            self.setting.numerics.end_backward(self.stage_index, bwd_chunk_id)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        self.setting.numerics.begin_backward(bwd_chunk_id)
        with self._span("backward weight", bwd_chunk_id):
            super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)
        self.setting.numerics.end_backward(self.stage_index, bwd_chunk_id)

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> tuple[tuple[torch.Tensor | None, ...], Any]:
        """The gradients of the inputs, and what the second half of a backward needs.

        Where it fails it calls ``linked.failed``, so that the schedule continues and no rank waits. Inputs without a
        gradient get zeros, because torch 2.11 cannot send None.
        """
        inputs, rest = bwd_kwargs.get("input_values", ()), None
        gradients: tuple[torch.Tensor | None, ...] = (None,) * len(inputs)
        try:
            with default_dtype_of(self.linked.stage.precision):
                gradients, rest = self._run_backward(backward_type, bwd_kwargs, last_backward)
        except Exception as error:
            if is_lost_connection(error):
                raise
            cause = error.__cause__ if backward_type == "full" else None  # torch wraps what fails there
            self.linked.failed(cause if isinstance(cause, Exception) else error)
        return tuple(map(_zeros_for_none, inputs, gradients)), rest

    def _post_metadata_inference_cleanup(self) -> None:
        """Nothing: torch's drops the gradients of parameters of FSDP2, which earlier calls of a window have left there.

        torch 2.13 calls it for the first batch of a shape, after it has run the stage to find the shapes of tensors. It
        does not run this one, which is made with them.
        """

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[Any]:
        """As torch's from 2.12 on: what 2.11 sends keeps the graph, and with it activations, until the batch ends."""
        operations = super().get_fwd_send_ops(fwd_chunk_id)
        for operation in operations:
            operation.tensor = operation.tensor.detach()
        return operations

    def _get_init_p2p_neighbors_ops(self) -> list[Any]:
        """As torch's up to 2.14, without those with this rank itself, which torch 2.11 runs and gloo refuses."""
        return [one for one in super()._get_init_p2p_neighbors_ops() if one.group_peer != self.group_rank]

    def _run_backward(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool
    ) -> tuple[tuple[torch.Tensor | None, ...], Any]:
        """As torch's, except the two halves of a split backward, in which torch's loses gradients."""
        if backward_type == "input":
            split = SplitBackward(bwd_kwargs["stage_output"], bwd_kwargs["output_grads"], bwd_kwargs["input_values"])
            return split.inputs(), split
        if backward_type == "weight":
            if bwd_kwargs["param_groups"] is not None:  # the first half did not fail
                bwd_kwargs["param_groups"].weights()
            (loss,) = bwd_kwargs["stage_output"] if self.is_last else (None,)
            if loss is not None and not loss._is_view():
                loss.detach_()  # the schedule keeps it, and with it its graph
            return (), None
        return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)


def _zeros_for_none(value: torch.Tensor, gradient: torch.Tensor | None) -> torch.Tensor | None:
    return torch.zeros_like(value) if gradient is None and value.requires_grad else gradient
