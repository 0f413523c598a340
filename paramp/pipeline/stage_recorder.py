"""torch's pipeline stage, with its forwards, backwards and failures reported. Importing this imports its schedules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.distributed.pipelining import PipelineStage

from ..base.spans import Observer, span
from ..base.torch_internals import expect
from ..distributed.first_failure import is_lost_connection
from ..distributed.numerics import Numerics
from .split_backward import SplitBackward

expect(
    "torch.distributed.pipelining.stage._PipelineStageBase",
    "torch.distributed.pipelining.schedules._Action",
    "torch.distributed.pipelining.schedules._PipelineScheduleRuntime",
)


class RecordedStage(PipelineStage):
    """A ``PipelineStage`` that reports its forwards and backwards to observers as spans."""

    observers: Sequence[Observer]
    numerics: Numerics
    before_last_backward: Callable[[], None]
    """Called before the last full backward of a schedule."""
    begin: Callable[[int], None]
    """Called with the number of a microbatch before its forward."""
    failed: Callable[[Exception], None]
    """Called where a backward fails."""

    def _span(self, kind: str, microbatch: int) -> AbstractContextManager[None]:
        return span(self.observers, kind, self.stage_index, microbatch)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self.numerics.begin_forward(fwd_chunk_id)
        with self._span("forward", fwd_chunk_id):
            self.begin(fwd_chunk_id)
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        if last_backward and full_backward:
            self.before_last_backward()
        self.numerics.begin_backward(bwd_chunk_id)
        with self._span("backward" if full_backward else "backward input", bwd_chunk_id):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        if full_backward:
            self.numerics.end_backward(self.stage_index, bwd_chunk_id)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        self.numerics.begin_backward(bwd_chunk_id)
        with self._span("backward weight", bwd_chunk_id):
            super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)
        self.numerics.end_backward(self.stage_index, bwd_chunk_id)

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> tuple[tuple[torch.Tensor | None, ...], Any]:
        """The gradients of the inputs, and what the second half of a backward needs.

        Where it fails it calls :attr:`failed`, so that the schedule continues and no rank waits. Inputs without a
        gradient get zeros, because torch 2.11 cannot send None.
        """
        inputs, rest = bwd_kwargs.get("input_values", ()), None
        gradients: tuple[torch.Tensor | None, ...] = (None,) * len(inputs)
        try:
            gradients, rest = self._run_backward(backward_type, bwd_kwargs, last_backward)
        except Exception as error:
            if is_lost_connection(error):
                raise
            cause = error.__cause__ if backward_type == "full" else None  # torch wraps what fails there
            self.failed(cause if isinstance(cause, Exception) else error)
        return tuple(map(_zeros_for_none, inputs, gradients)), rest

    def _post_metadata_inference_cleanup(self) -> None:
        """Nothing: torch's drops the gradients of parameters of FSDP2, which earlier calls of a window have left there.

        torch 2.13 calls it for the first batch of a shape, after it has run the stage to find the shapes of tensors. It
        does not run this one, which is made with them.
        """

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
