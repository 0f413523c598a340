"""Checks for values that are not finite, while a window runs again: hooks on each module, parameter and node.

**Forward.** Every module of every stage has hooks before and after its forward. A module with finite inputs and a
non-finite output has produced the value. If a module receives a non-finite value that no module returned, the
enclosing module has produced it. Outputs are checked before and after the hooks of tensor parallelism: these reduce
over ranks, so only the check before them identifies the rank.

**Backward.** Hooks check each node of autograd's graph (:mod:`.nonfinite_graph_hooks`). Hooks on parameters check each
microbatch's gradient apart from the sum. Only they work inside reentrant checkpointing, whose graph is created in the
backward.

Which value is the first: :mod:`.nonfinite_sightings`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..base.trees import children, map_tensors, tensors
from ..base.uncompiled import unwatched
from ..base.wrapped_models import class_name, plain_name
from ..distributed.context import ParallelContext
from ..parallel.microbatches import Batch
from ..pipeline.stage import Stage, Stages
from ..precision.repeated_forwards import contexts_of_now
from ..scaling.overflow_report import flaw
from .nonfinite_experts import ExpertTokens
from .nonfinite_graph_hooks import GraphHooks
from .nonfinite_sightings import AFTER_NODES, Sightings, StagePass

BATCH = "the batch"
CAST = "the cast of the batch to the compute dtype"
CRITERION = "the criterion"
TARGET = "the target"
INPUT = "the model's input"
"""In a loop without an engine: what a function of the user's makes of the batch for the model."""
FORWARDS = ("forward", "loss")
"""Spans in which a forward runs. The recomputation of checkpointing runs in a backward span and is not checked."""


class Tracer:
    """Checks one run of a window on this rank's ``stages``, whose indices in the model are ``indices``.

    It is an :class:`~paramp.base.observer_spans.Observer` of the engine, and a context manager that registers hooks.
    With ``in_function``, a function of the user's calls the model and computes the loss, in one ``forward``.
    """

    def __init__(
        self, stages: Stages, indices: Sequence[int], context: ParallelContext | None, *, in_function: bool = False
    ) -> None:
        self._stages = dict(zip(indices, stages, strict=True))
        self.seen = Sightings(context)
        """The first non-finite value of each call, microbatch, stage and pass."""
        self.failure: str | None = None
        """The message of the criterion's exception, if a pipeline continued without its loss."""
        names: dict[int, str] = {}
        self._parameters: dict[str, torch.Tensor] = {}
        for stage in stages:
            for name, parameter in stage.module.named_parameters(remove_duplicate=False):
                used = stages.used_for(parameter)
                self._parameters.setdefault(names.setdefault(id(used), plain_name(name)), used)
        self._graph = GraphHooks(names, self.seen)
        self._handles: list[RemovableHandle] = []
        self.experts = ExpertTokens(context)
        self._following = ExitStack()
        self._kind, self._at = "", StagePass(-1, 0, 0)  # the current span
        self._num_checks = 0
        self._running: list[str] = []  # the stack of running modules
        self._in_function = in_function
        self.contexts: Callable[[], AbstractContextManager[None]] = nullcontext
        """Makes the contexts in which the last module's forward ran."""
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

    def see_batch(self, batch: Any) -> None:
        """Check the inputs of the next call, before and after the cast to the compute dtype.

        A function of the user's takes any tree of tensors, and may never cast what is too large here, such as targets.
        """
        dtype = next(iter(self._stages.values())).precision.compute
        casts: list[tuple[str, torch.dtype | None]] = [(BATCH, None), (CAST, dtype)]
        self._batch, self._batch_is_bad = BATCH, False
        if self._in_function:
            batch, casts, self._batch = _tree_as_batch(batch), casts[:1], INPUT
        inputs = [(path, leaf) for path, leaf in batch.unwrapped().inputs() if isinstance(leaf, torch.Tensor)]
        for name, cast in casts:
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
            self._meet(CRITERION)
        self._check(TARGET, [target], masks=True)
        self._check(self._batch if self._in_function and self._batch_is_bad else CRITERION, [value], masks=True)
        if flaw(value):
            self.seen.failed.add(self.seen.batch(self._at))

    def see_scaled(self, value: torch.Tensor) -> None:
        """Check the scaled loss ``value``, at which the backward of this microbatch begins."""
        if flaw(value) and self.seen.batch(self._at) not in self.seen.failed:
            self.seen.add("backward", CRITERION, value, self._at, self._graph.start)
        self._graph.follow([value], self._at)

    # ---- hooks

    def __enter__(self) -> Tracer:
        self._following.enter_context(self.experts.following())
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
                self._handles.append(parameter.register_hook(partial(self._on_gradient, name)))
        return self

    def __exit__(self, *_: object) -> None:
        self._following.close()
        for handle in self._handles:
            handle.remove()

    def _add_hooks(self, name: str, module: nn.Module) -> None:
        """Register hooks before and after all other forward hooks of ``module``."""
        before, on_inputs, on_output, after = (
            partial(_aside, hook, name) for hook in (self._before, self._on_inputs, self._on_output, self._after)
        )
        self._handles += [
            module.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
            module.register_forward_pre_hook(on_inputs, with_kwargs=True),
            module.register_forward_hook(on_output, prepend=True),
            module.register_forward_hook(after),
        ]

    def _before(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        """The first hook: a non-finite input was produced by the enclosing module."""
        if self._kind not in FORWARDS:
            return
        if len(self._running) > 1:
            bad = self._check(self._running[-1], (args, kwargs), received=True)
        else:  # the stage itself: the model's inputs, or what the stage before sent and the model's keyword inputs
            bad = self._check(self._running[-1], args[:1], masks=self._at.stage == 0, received=True)
            others = map_tensors(_without_masked, (args[1:], kwargs))
            bad = self._check(self._batch, others, masks=True, received=True) or bad
        if bad:
            self._meet(name)
        self.contexts = contexts_of_now()
        self.experts.begin(name, module, args, kwargs)
        self._running.append(name)
        self._graph.begin(name)

    def _on_inputs(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Runs after the module's other pre-hooks."""
        self._on_output(name, module, None, (args, kwargs))

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
        if not self.seen.has_backward(self._at) and flaw(gradient):
            self.seen.add("backward", owner_of(name), gradient, self._at, AFTER_NODES, parameter=name)

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
        if bad is None:
            return False
        self._meet(name)
        weights = module.named_parameters(recurse=False) if module is not None else ()
        weight = next((name for name, parameter in weights if flaw(parameter)), None)
        experts = self.experts.blamed(module, bad) if module is not None else ()
        details = {"weight": weight, "experts": experts}
        self.seen.add("forward", name, bad, self._at, (self._num_checks, 0, 0), received=received, **details)
        return True

    def _meet(self, module: str) -> None:
        self.seen.met.add((self._at.call, self._at.microbatch, module))

    def _check_sums(self) -> None:
        """Look for a non-finite gradient whose summands were all finite."""
        if self.seen.has_backward():
            return
        for name, parameter in self._parameters.items():
            gradient = parameter.grad
            if gradient is not None and flaw(gradient):
                self.seen.add("sum over microbatches", owner_of(name), gradient, self._at, AFTER_NODES, parameter=name)
                return


def _aside(hook: Callable[..., None], *args: Any) -> None:
    """Call a ``hook`` where no mode of torch's functions sees it, such as the exact mode's, which refuses sums."""
    with unwatched():
        hook(*args)


def _tree_as_batch(tree: Any) -> Batch:
    """What a function of the user's is given, as a batch."""
    if isinstance(tree, Mapping) and all(isinstance(name, str) for name in tree):
        return Batch((), dict(tree))
    parts = children(tree)
    return Batch((tree,) if parts is None else tuple(parts.values()))


def _is_bad(value: Any, masks: bool) -> bool:
    kind = flaw(value)
    return kind == "NaN" or (kind == "inf" and (masks or value.requires_grad))


def _without_masked(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` without the infinities of a mask that is added to scores."""
    return tensor.masked_fill(tensor == -torch.inf, 0.0) if tensor.is_floating_point() else tensor


def owner_of(parameter: str) -> str:
    """The name of the module that owns a parameter."""
    return parameter.rpartition(".")[0]
