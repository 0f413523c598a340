"""Records everything that an engine computes in its steps: outputs, gradients, losses, and what a step changes."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ...base.dtensor import is_dtensor, local
from ...base.observer_spans import Observer
from ...base.trees import tensors
from ...base.uncompiled import unwatched
from ...checkpoint.chunks import chunk_of
from ...config.reproducible import Reproducible
from ...distributed.token_positions import ACTIVE
from ...engine.engine import Engine
from ...engine.state.optimizer_state import OPTIMIZER, OptimizerState
from ...engine.step import StepResult
from ...optim.flat_buffer import FlatParam
from ..exact_sequence_axis import ExactSequenceAxis
from ..microchunk_gradients import MicrochunkGradients
from ..microchunk_run import MicrochunkTotals
from .tensor_trace import Key, TraceWriter


class ExactRecorder(Observer):
    """Writes what an engine with ``reproducible`` computes to a trace.

    A context manager that registers forward hooks, and hooks of the outputs' gradients. It is also an
    :class:`~paramp.base.observer_spans.Observer` of the engine, the last one: a span ends here before the engine adds
    up the gradients of its microbatch.
    """

    def __init__(self, engine: Engine, modules: Sequence[tuple[str, nn.Module]], trace: TraceWriter) -> None:
        """``modules``: this rank's, with their names in the whole model."""
        gradients, totals = engine._weights.gradients.reduction, engine._losses.totals
        assert isinstance(gradients, MicrochunkGradients)
        assert isinstance(totals, MicrochunkTotals)
        self._engine, self._gradients, self._totals, self._trace = engine, gradients, totals, trace
        gradients.compares_replicas = False  # a difference between tensor ranks is for the report
        self._data_rank = engine.context.dp.rank
        reproducible = engine.context.config.reproducible
        self._num_slices = reproducible.sequence_slices if isinstance(reproducible, Reproducible) else 1
        self._step = self._call = self._num_microbatches = 0
        self._microbatch: int | None = None
        self._calls: Counter[tuple[str, int]] = Counter()
        self._seen: set[Key] = set()
        self._hooks = [
            module.register_forward_hook(functools.partial(self._see_output, name)) for name, module in modules
        ]
        engine.observers.append(self)
        engine.before_step.append(self._see_gradients)

    def __enter__(self) -> ExactRecorder:
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.observers.remove(self)
        self._engine.before_step.remove(self._see_gradients)
        for hook in self._hooks:
            hook.remove()

    def begin(self, step: int, call: int, num_microbatches: int) -> None:
        """The ``call``-th call of ``forward_backward`` of ``step`` follows, with ``num_microbatches`` on this rank."""
        self._step, self._call, self._num_microbatches = step, call, num_microbatches
        self._seen.clear()

    @contextmanager
    def span(self, kind: str, stage: int | None = None, microbatch: int | None = None) -> Iterator[None]:
        """Record what runs inside."""
        if microbatch is None:
            yield
            return
        whole = self._data_rank * self._num_microbatches + microbatch
        if kind == "forward":
            self._calls.clear()
            self._microbatch = whole
        try:
            yield
        finally:
            self._microbatch = None
        if kind == "loss":
            value = self._totals.of(self._call, whole)
            if value is not None:
                self._trace.add(self._key("loss", "", whole), value)
        elif kind in ("backward", "backward weight"):
            for name, param, value, data_rank in self._gradients.of_microchunk(stage or 0):
                whole = data_rank * self._num_microbatches + microbatch
                self._add_part(self._key("weight gradient", name, whole), param, value)

    def _key(self, kind: str, name: str, microbatch: int | None = None, index: tuple[int, int] = (0, 0)) -> Key:
        return Key(step=self._step, kind=kind, name=name, call=self._call, microbatch=microbatch, index=index)

    def _see_output(self, name: str, _module: nn.Module, _inputs: Any, output: Any) -> None:
        if self._microbatch is None:  # not in a forward that is trained on, or one again for activation checkpointing
            return
        with unwatched():
            found = [tensor for tensor in tensors(output) if tensor.is_floating_point()]
            number = ACTIVE[-1].slice if ACTIVE and isinstance(ACTIVE[-1], ExactSequenceAxis) else 0
            call = self._calls[name, number] * self._num_slices + number  # of a mixture, a rank has some slices
            for index, tensor in enumerate(found):
                key = self._key("forward", name, self._microbatch, (call, index))
                self._add(key, tensor)
                if tensor.requires_grad:
                    tensor.register_hook(functools.partial(self._see_gradient, replace(key, kind="backward")))
        self._calls[name, number] += 1

    def _see_gradient(self, key: Key, gradient: torch.Tensor) -> None:
        if key not in self._seen:  # a backward in two halves may come here twice
            self._seen.add(key)
            with unwatched():
                self._add(key, gradient)

    def _add(self, key: Key, tensor: torch.Tensor) -> None:
        partial = is_dtensor(tensor) and any(placement.is_partial() for placement in tensor.placements)
        self._trace.add(key, local(tensor), partial=partial)

    def _add_part(self, key: Key, param: FlatParam, values: torch.Tensor) -> None:
        """Record ``values``, which has the layout of ``param`` on this rank."""
        shape = self._engine._params.shapes[param.name]
        for part in chunk_of(key.name, param.parameter, values, shape=shape).slices:
            self._trace.add(key, part.values, part.offsets)

    def _see_gradients(self) -> None:
        """Record the gradients of the window; those of tied parameters by name, before they are added up."""
        for name, param, value in self._gradients.of_window():
            self._add_part(self._key("gradient", name), param, value)

    def loss(self, value: torch.Tensor) -> None:
        """Record what a call of ``forward_backward`` returned."""
        self._trace.add(self._key("loss", ""), value)

    @torch.no_grad()
    def end_step(self, result: StepResult) -> None:
        """Record the result of a step, and what it has changed."""
        engine = self._engine
        numbers = {"norm": [result.grad_norm or 0.0]}
        numbers["decision"] = [float(result.overflow), result.loss_scale, engine.scaler.get_scale()]
        for kind, values in numbers.items():
            self._trace.add(self._key(kind, ""), torch.tensor(values, dtype=torch.float64))
        first_names, params = engine._params.first_names, engine._params
        for param in engine._weights.params:
            if param.buffer.masters.state and param.own[0] < param.own[1]:
                chunk = params.trained(param, param.name, engine._weights.exact(param))
                for part in chunk.slices:
                    self._trace.add(self._key("master", first_names[param.name]), part.values, part.offsets)
        for chunk in OptimizerState(params).chunks():
            for part in chunk.slices:
                self._trace.add(
                    self._key("optimizer state", chunk.name.removeprefix(OPTIMIZER)), part.values, part.offsets
                )
        for param in engine._weights.params:
            self._add_part(self._key("weight", first_names[param.name]), param, local(param.parameter))
