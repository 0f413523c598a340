"""The hooks that look for non-finite values while a window runs again.

**Forward.** Every module of every stage has hooks before and after its forward. A module with finite inputs and a
non-finite output has produced the value. If a module receives a non-finite value that no module returned, the
enclosing module has produced it. Outputs are checked before and after the hooks of tensor parallelism: these reduce
over ranks, so only the check before them identifies the rank.

**Backward.** :mod:`paramp.observe.graph_hooks` checks each node of autograd's graph. Hooks on parameters check each
microbatch's gradient apart from the sum. Only they work inside reentrant checkpointing, whose graph is created in the
backward.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..base.trees import map_tensors, tensors
from ..base.wrapped_models import class_name, plain_name
from ..distributed.context import ParallelContext
from ..parallel.batches import Batch
from ..pipeline.stage import Stage, Stages
from ..scaling.overflow_report import flaw
from .graph_hooks import GraphHooks
from .overflow_findings import Findings, StagePass

BATCH = "the batch"
CAST = "the cast of the batch to the compute dtype"
CRITERION = "the criterion"
TARGET = "the target"
INPUT = "the model's input"
"""In a loop without an engine: what a function of the user's makes of the batch for the model."""
FORWARDS = ("forward", "loss")
"""Spans in which a forward runs. The recomputation of checkpointing runs in a backward span and is not checked."""
AFTER_NODES = (1, 0, 0)
"""The position of findings of parameter hooks and sums; larger than that of any node."""


class Tracer:
    """Checks one run of a window on this rank's ``stages``, whose indices in the model are ``places``.

    It is an :class:`~paramp.base.spans.Observer` of the engine, and a context manager that registers the hooks.
    With ``in_function``, a function of the user's calls the model and computes the loss, in one ``forward``.
    """

    def __init__(
        self, stages: Stages, places: Sequence[int], context: ParallelContext | None, *, in_function: bool = False
    ) -> None:
        self._stages = dict(zip(places, stages, strict=True))  # key: index in the model
        self.findings = Findings(context)
        """The first non-finite value of each call, microbatch, stage and pass."""
        self.failure: str | None = None
        """The message of the criterion's exception, if a pipeline continued without its loss."""
        names: dict[int, str] = {}
        self._parameters: dict[str, torch.Tensor] = {}
        for stage in stages:
            for name, parameter in stage.module.named_parameters(remove_duplicate=False):
                used = stages.used_for(parameter)
                self._parameters.setdefault(names.setdefault(id(used), plain_name(name)), used)
        self._graph = GraphHooks(names, self.findings)
        self._handles: list[RemovableHandle] = []
        self._kind, self._at = "", StagePass(-1, 0, 0)  # the current span
        self._num_checks = 0
        self._running: list[str] = []  # the stack of running modules
        self._in_function = in_function
        self._batch = ""  # the name of what a non-finite input comes from
        self._batch_is_bad = False

    # ---- called by the engine

    def begin_call(self) -> None:
        """Count a call of ``forward_backward``."""
        self._at = self._at._replace(call=self._at.call + 1)

    @contextmanager
    def span(self, kind: str, stage: int | None = None, microbatch: int | None = None) -> Iterator[None]:
        """Check one operation on one microbatch."""
        self._kind, self._at = kind, StagePass(self._at.call, microbatch or 0, stage or 0)
        if kind in FORWARDS:
            first = f"what stage {stage} received" if stage else self._batch
            self._running = [CRITERION if kind == "loss" else first]
            self._graph.begin(self._running[-1])
        yield
        if kind.startswith("backward"):
            self._check_sums()
        self._kind = ""

    def see_batch(self, batch: Batch) -> None:
        """Check the inputs of the next call, before and after the cast to the compute dtype."""
        inputs = [(path, leaf) for path, leaf in batch.unwrapped().inputs() if isinstance(leaf, torch.Tensor)]
        dtype = next(iter(self._stages.values())).precision.compute
        self._batch, self._batch_is_bad = INPUT if self._in_function else BATCH, False
        # A function of the user's may never cast what this finds too large, such as targets.
        for name, cast in ((BATCH, None),) if self._in_function else ((BATCH, None), (CAST, dtype)):
            for index, (path, tensor) in enumerate(inputs):
                value = tensor.to(cast) if cast and tensor.is_floating_point() else tensor
                if _is_bad(value, masks=True) and (
                    _is_bad(_without_masked(value), masks=True) or (batch.args and not index)
                ):
                    self._batch = name if len(inputs) == 1 else name.replace("the batch", f"{path} of the batch")
                    self._batch_is_bad = True
                    return

    def see_loss(self, output: Any, target: Any, value: torch.Tensor) -> None:
        """Check the criterion's arguments, and its unscaled loss ``value``."""
        if self._check(self._stage_output(), [output], masks=True):
            self.findings.meet(self._at, CRITERION)
        self._check(TARGET, [target], masks=True)
        self._check(self._batch if self._in_function and self._batch_is_bad else CRITERION, [value], masks=True)
        if flaw(value):
            self.findings.failed.add(self.findings.batch(self._at))

    def see_scaled(self, value: torch.Tensor) -> None:
        """Check the scaled loss ``value``, at which the backward of this microbatch begins."""
        if flaw(value) and self.findings.batch(self._at) not in self.findings.failed:
            self.findings.add("backward", CRITERION, value, self._at, self._graph.start)
        self._graph.follow([value], self._at)

    # ---- hooks

    def __enter__(self) -> Tracer:
        done: set[int] = set()
        for stage in self._stages.values():
            self._handles.append(stage.register_forward_hook(self._after_stage))
            for name, module in stage.module.named_modules():
                if isinstance(module, torch.jit.ScriptModule):  # accepts no hooks; its caller is named
                    continue
                # A container that spans stages is copied to each of them, and the copies share one dict of hooks.
                if id(module._forward_hooks) not in done:
                    done.add(id(module._forward_hooks))
                    self._add_hooks(plain_name(name) or f"the model's {class_name(module)}", module)
        for name, parameter in self._parameters.items():
            if parameter.requires_grad:
                self._handles.append(parameter.register_hook(functools.partial(self._on_gradient, name)))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _add_hooks(self, name: str, module: nn.Module) -> None:
        """Register hooks before and after all other forward hooks of ``module``."""
        self._handles += [
            module.register_forward_pre_hook(functools.partial(self._before, name), prepend=True, with_kwargs=True),
            module.register_forward_pre_hook(functools.partial(self._on_inputs, name), with_kwargs=True),
            module.register_forward_hook(functools.partial(self._on_output, name), prepend=True),
            module.register_forward_hook(functools.partial(self._after, name)),
        ]

    def _before(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        """The first hook: a non-finite input was produced by the enclosing module."""
        if self._kind not in FORWARDS:
            return
        if self._check_inputs(args, kwargs):
            self.findings.meet(self._at, name)
        self._running.append(name)
        self._graph.begin(name)

    def _check_inputs(self, args: Any, kwargs: Any) -> bool:
        """Check what a module is called with; True if a value is not finite."""
        if len(self._running) > 1:
            return self._check(self._running[-1], (args, kwargs), received=True)
        # The stage itself: the model's inputs, or what the stage before sent and the model's keyword inputs.
        first = self._check(self._running[-1], args[:1], masks=self._at.stage == 0, received=True)
        others = map_tensors(_without_masked, (args[1:], kwargs))
        return self._check(self._batch, others, masks=True, received=True) or first

    def _on_inputs(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Runs after the module's other pre-hooks."""
        if self._kind in FORWARDS:
            self._check(name, (args, kwargs), module=module)

    def _on_output(self, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        """Runs before the module's other forward hooks."""
        if self._kind in FORWARDS:
            self._check(name, output, module=module)

    def _after(self, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        """Runs after the module's other forward hooks."""
        if self._kind not in FORWARDS:
            return
        self._check(name, output, module=module)
        self._running.pop()
        if len(self._running) == 1:
            self._running = [self._stage_output()]
        self._graph.begin(self._running[-1])

    def _after_stage(self, stage: nn.Module, inputs: Any, output: Any) -> None:
        if self._kind in FORWARDS and isinstance(stage, Stage) and not stage.is_last:  # the last stage: from the loss
            self._graph.follow(list(tensors(output)), self._at)

    def _on_gradient(self, name: str, gradient: torch.Tensor) -> None:
        """The hook of a parameter: checks what is added to its gradient."""
        if not self.findings.has(self._at, backward=True) and flaw(gradient):
            self.findings.add("backward", owner_of(name), gradient, self._at, AFTER_NODES, parameter=name)

    # ---- checks

    def _stage_output(self) -> str:
        stage = self._at.stage
        if self._in_function:
            return CRITERION
        return "the model's output" if self._stages[stage].is_last else f"what stage {stage} sends"

    def _check(
        self, name: str, values: Any, *, module: nn.Module | None = None, masks: bool = False, received: bool = False
    ) -> bool:
        """Check the tensors in the tree ``values``, produced by ``name`` in the forward; True if one is not finite.

        Infinities in tensors that do not require grad are often masks, so they count only with ``masks``.
        """
        self._num_checks += 1
        bad = next((value for value in tensors(values) if _is_bad(value, masks)), None)
        if bad is not None:
            self.findings.meet(self._at, name)
            position = (self._num_checks, 0, 0)
            own = module.named_parameters(recurse=False) if module is not None else ()
            weight = next((name for name, parameter in own if flaw(parameter)), None)
            self.findings.add("forward", name, bad, self._at, position, received=received, weight=weight)
        return bad is not None

    def _check_sums(self) -> None:
        """Look for a non-finite gradient whose summands were all finite."""
        if self.findings.any_backward:
            return
        for name, parameter in self._parameters.items():
            if parameter.grad is not None and flaw(parameter.grad):
                where = owner_of(name), parameter.grad, self._at, AFTER_NODES
                self.findings.add("sum over microbatches", *where, parameter=name)
                return


def _is_bad(value: Any, masks: bool) -> bool:
    kind = flaw(value)
    return kind == "NaN" or (kind == "inf" and (masks or value.requires_grad))


def _without_masked(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` without the infinities of a mask that is added to scores."""
    return tensor.masked_fill(tensor == -torch.inf, 0.0) if tensor.is_floating_point() else tensor


def owner_of(parameter: str) -> str:
    """The name of the module that owns a parameter."""
    return parameter.rpartition(".")[0]
