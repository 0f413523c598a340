"""Where a value that is not finite came from: the batches of a skipped step are run again, and watched.

**Forward.** Hooks go around every module of every stage. A module whose input is finite and whose output is not has
produced the value; if it *receives* one that no module before it has handed on, the module around it did. Hooks look
before those of tensor parallelism reduce an output over ranks as well as after them, so that the rank is known.

**Backward.** Each node of autograd's graph gets a hook that sees the gradients that go in and come out, on DTensors the
local parts. A node belongs to the innermost module that ran when it was made. autograd numbers the nodes in the order
in which they are made (``Node._sequence_nr``), so that noting the number where each module begins and ends is enough.
That holds for every schedule, also where the backward is split, with tied weights, and with activation checkpointing.
Hooks on the parameters tell what is added to a gradient from what it adds up to; they alone see into the reentrant kind
of checkpointing, whose graph is made in the backward.

**Which is first** is decided by the order in which one process would compute, not by the clock: by call and microbatch,
the forward before the backward, then stages in their order, then by the sequence of checks, which is the same on all
tensor ranks of a stage. Infinities in a forward whose loss is finite are often meant (a mask), and count only if the
backward of a module that saw one fails.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from ..base.module_surgery import keeping_buffers
from ..distributed.collectives import gather_objects
from ..distributed.context import ParallelContext
from ..distributed.rng import RandomStream, random_states, set_random_states
from ..optim.overflow_report import (
    During,
    Kind,
    NonFiniteGradient,
    Origin,
    OverflowReport,
    RankCoordinates,
    flaw,
    gather_findings,
    largest_finite,
)
from ..parallel.stage import Stage, Stages

__all__ = ["Tracer", "Window", "find_origin", "investigate", "stages_by_parameter"]

BATCH = "the batch"
CAST = "the cast of the batch to the compute dtype"
CRITERION = "the criterion"
TARGET = "the target"
FORWARDS = ("forward", "loss")
"""Kinds of spans in which a forward runs; what checkpointing computes again runs in a backward's."""
PASSING = ("ToCopyBackward0", "TBackward0", "TransposeBackward0", "ViewBackward0", "UnsafeViewBackward0")
"""autograd's names of what may lie between a parameter and its use."""
ACCUMULATE = "torch::autograd::AccumulateGrad"
TALKING = ("Redistribute", "FromTorchTensor", "AllReduce", "AllGather", "ReduceScatter", "AllToAll")
"""What is in the names of operations that ranks do together: what comes out of one may come from another rank."""
AFTER_NODES = (1, 0, 0)
"""The position of what is seen when a backward is through."""


# ------------------------------------------------------------------------------------------------ what is run again


@dataclass(frozen=True)
class Call:
    """One call of ``forward_backward``: its batch, not copied, and where random streams stood."""

    x: torch.Tensor
    y: torch.Tensor
    default: list[torch.Tensor]
    streams: list[list[torch.Tensor]]
    """Of each stage that has a stream of its own."""


class Window:
    """The calls of a window of accumulation, kept until the next one begins.

    Attributes:
        calls: None if gradients came from elsewhere too, so that they cannot be had again.
        scale: the loss scale of the window's step, 0-dim, once that was taken; else None.
    """

    def __init__(self, stages: Stages, device: torch.device) -> None:
        self._stages = stages
        self._device = device
        self._streams = [stage.random for stage in stages if isinstance(stage.random, RandomStream)]
        self.calls: list[Call] | None = []
        self.scale: torch.Tensor | None = None

    def add(self, batch: tuple[torch.Tensor, torch.Tensor] | None) -> None:
        """A backward begins, of ``batch`` if it is known."""
        if self.scale is not None:
            self.calls, self.scale = [], None
        if batch is None:
            self.calls = None
        elif self.calls is not None:
            streams = [stream.states for stream in self._streams]
            self.calls.append(Call(*batch, random_states(self._device), streams))

    @property
    def is_open(self) -> bool:
        """Whether there are gradients of it that no step has taken."""
        return self.scale is None and (self.calls is None or len(self.calls) > 0)

    def drop(self) -> None:
        """The gradients of an unfinished window were dropped."""
        if self.scale is None:
            self.calls = []

    def end(self, scale: torch.Tensor) -> None:
        """Its step was taken, with gradients that carry ``scale``."""
        self.scale = scale

    @contextmanager
    def again(self) -> Iterator[Iterator[Call]]:
        """The calls, random streams wound back for each; afterwards streams and buffers are what they were before."""
        assert self.calls is not None
        default, streams = random_states(self._device), [stream.states for stream in self._streams]
        with keeping_buffers(self._stages):
            try:
                yield (self._wound_back(call) for call in self.calls)
            finally:
                self._wind(default, streams)

    def _wound_back(self, call: Call) -> Call:
        self._wind(call.default, call.streams)
        return call

    def _wind(self, default: list[torch.Tensor], streams: Sequence[list[torch.Tensor]]) -> None:
        set_random_states(default, self._device)
        for stream, states in zip(self._streams, streams, strict=True):
            stream.states = states


# ------------------------------------------------------------------------------------------------------ what is seen


@dataclass(frozen=True)
class Sighting:
    """The first value that was not finite in one pass of one microbatch through one stage, on one rank."""

    origin: Origin
    position: tuple[int, int, int]
    """When it is computed among the others of its pass and stage; tensor ranks may be compared in it."""
    received: bool
    """It was there already when the module or operation began, though nothing before had been seen to make it."""
    seen_in_forward: bool = False
    """A backward's: its module had met values that are not finite in the forward of the microbatch."""


@dataclass(frozen=True)
class _Visit:
    """What is known of a node of autograd's graph before its backward."""

    where: tuple[int, int, int]
    """Call, microbatch and stage."""
    module: str
    operation: str
    position: tuple[int, int, int]
    parameters: Sequence[str | None]
    """The parameter whose gradient each of its outputs is; None for activations."""


class Tracer:
    """Watches one run of a window on this rank; an :class:`~paramp.base.spans.Observer`.

    Attributes:
        sightings: the first of each call, microbatch, stage and pass.
        failed: data rank, call and microbatch of each loss that was not finite.
    """

    def __init__(self, stages: Stages, places: Sequence[int], context: ParallelContext) -> None:
        self._stages = dict(zip(places, stages, strict=True))
        self._context = context
        self._names: dict[int, str] = {}
        self._parameters: dict[str, nn.Parameter] = {}
        for stage in stages:
            for name, parameter in stage.module.named_parameters(remove_duplicate=False):
                self._parameters.setdefault(self._names.setdefault(id(parameter), name), parameter)
        self._handles: list[RemovableHandle] = []
        self._call = -1
        self._kind, self._stage, self._microbatch = "", 0, 0
        self._looks = 0
        self._running: list[str] = []  # what runs now, the innermost last
        self._bounds: tuple[list[int], list[str]] = ([], [])  # numbers of nodes, and what ran from there on
        self._given_finite = False  # the batch, before it was cast
        self.failure: str | None = None
        """What the criterion raised, where a pipeline went on without it."""
        self._met: set[tuple[int, int, str]] = set()  # call, microbatch and what met a value that is not finite
        self.sightings: dict[tuple[int, int, int, str], Sighting] = {}
        self.failed: set[tuple[int | None, int, int | None]] = set()

    # ---- told by the engine

    def begin_call(self) -> None:
        self._call += 1

    @contextmanager
    def span(self, kind: str, stage: int | None = None, microbatch: int | None = None) -> Iterator[None]:
        self._kind, self._stage, self._microbatch = kind, stage or 0, microbatch or 0
        if kind in FORWARDS:
            self._running = [CRITERION if kind == "loss" else self._received()]
            self._bound()
        yield
        if kind.startswith("backward"):
            self._check_sums()
        self._kind = ""

    def see_loss(self, output: torch.Tensor, target: torch.Tensor, value: torch.Tensor) -> None:
        """The criterion made ``value``, not scaled yet."""
        if self._look(self._handed_on(), [output], everything=True):
            self._met.add((self._call, self._microbatch, CRITERION))
        self._look(TARGET, [target], everything=True)
        self._look(CRITERION, [value], everything=True)
        if flaw(value):
            self.failed.add(self._batch())

    def see_scaled(self, value: torch.Tensor) -> None:
        """The backward of this microbatch will begin at ``value``."""
        if flaw(value) and self._batch() not in self.failed:
            self._note("backward", CRITERION, value, (-len(self._bounds[0]), 0, 0))
        self._follow([value])

    # ---- hooks

    def __enter__(self) -> Tracer:
        done: set[int] = set()
        for stage in self._stages.values():
            self._handles.append(stage.register_forward_hook(self._after_stage))
            for name, module in stage.module.named_modules():
                if isinstance(module, torch.jit.ScriptModule):  # takes no hooks: what is around it is named
                    continue
                # What leads to the modules of several stages is there in copies, which share their hooks.
                if id(module._forward_hooks) not in done:
                    done.add(id(module._forward_hooks))
                    self._go_around(name or f"the model's {type(module).__name__}", module)
        for name, parameter in self._parameters.items():
            if parameter.requires_grad:
                self._handles.append(parameter.register_hook(functools.partial(self._arrived, name)))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _go_around(self, name: str, module: nn.Module) -> None:
        """Hooks before and after all those that ``module`` has."""
        before = functools.partial(self._before, name)
        after = functools.partial(self._after, name)
        self._handles += [
            module.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
            module.register_forward_pre_hook(functools.partial(self._given, name), with_kwargs=True),
            module.register_forward_hook(functools.partial(self._made, name), prepend=True),
            module.register_forward_hook(after),
        ]

    def _before(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        """First of all: what is wrong here comes from what runs around the module."""
        if self._kind not in FORWARDS:
            return
        outermost = len(self._running) == 1
        everything = outermost and self._stage == 0
        if self._look(self._running[-1], (args, kwargs), everything=everything, received=True):
            self._met.add((self._call, self._microbatch, name))
        self._running.append(name)
        self._bound()

    def _given(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        """After the module's other hooks on its inputs."""
        if self._kind in FORWARDS:
            self._look(name, (args, kwargs), module=module)

    def _made(self, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        """Before the module's other hooks on its output."""
        if self._kind in FORWARDS:
            self._look(name, output, module=module)

    def _after(self, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        """Last of all."""
        if self._kind not in FORWARDS:
            return
        self._look(name, output, module=module)
        self._running.pop()
        if len(self._running) == 1:
            self._running = [self._handed_on()]
        self._bound()

    def _after_stage(self, stage: nn.Module, inputs: Any, output: Any) -> None:
        if self._kind in FORWARDS and isinstance(stage, Stage) and not stage.is_last:  # the loss has the last one's
            self._follow(tree_leaves(output))

    def _bound(self) -> None:
        """The nodes that autograd makes from here on belong to what runs now."""
        self._bounds[0].append(torch._C._autograd._get_sequence_nr())
        self._bounds[1].append(self._running[-1])

    def _follow(self, outputs: Iterable[Any]) -> None:
        """Put a hook on each node that ``outputs`` of this stage and microbatch depend on."""
        left = [leaf.grad_fn for leaf in outputs if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None]
        seen = set(left)
        while left:
            node = left.pop()
            number, operation = node._sequence_nr(), node.name()
            index = bisect.bisect_right(self._bounds[0], number) - 1
            # The modules that run are the same on all tensor ranks, but what else runs between their bounds may differ.
            position = (-index, any(word in operation for word in TALKING), self._bounds[0][index] - number)
            visit = _Visit(
                (self._call, self._microbatch, self._stage),
                self._bounds[1][index],
                operation,
                position,
                [self._parameter_behind(next_) for next_, _ in node.next_functions],
            )
            node.register_hook(functools.partial(self._after_node, visit))  # which must not hold the node
            for next_, _ in node.next_functions:
                if next_ is not None and next_ not in seen and next_.name() != ACCUMULATE:
                    seen.add(next_)
                    left.append(next_)

    def _parameter_behind(self, node: Any) -> str | None:
        """The name of the parameter whose gradient goes to ``node``; None if it is an activation's."""
        while node is not None and node.name() in PASSING:
            node = node.next_functions[0][0]
        return None if node is None or node.name() != ACCUMULATE else self._names.get(id(node.variable))

    def _after_node(
        self,
        visit: _Visit,
        gradients: Sequence[torch.Tensor | None],
        received: Sequence[torch.Tensor | None],
    ) -> None:
        """The hook of a node: ``gradients`` come out of it, ``received`` went in."""
        if (*visit.where, "backward") in self.sightings:
            return
        bad = [index for index, gradient in enumerate(gradients) if flaw(gradient)]
        came = next((gradient for gradient in received if flaw(gradient)), None)
        value = came if came is not None else gradients[bad[0]] if bad else None
        if value is None:
            return
        only = {visit.parameters[index] for index in bad}
        self._note(
            "backward",
            visit.module,
            value,
            visit.position,
            where=visit.where,
            received=came is not None,
            parameter=None if came is not None or None in only else visit.parameters[bad[0]],
            operation=visit.operation,
        )

    def _arrived(self, name: str, gradient: torch.Tensor) -> None:
        """The hook of a parameter: what is added to its gradient."""
        if (self._call, self._microbatch, self._stage, "backward") not in self.sightings and flaw(gradient):
            self._note("backward", _owner(name), gradient, AFTER_NODES, parameter=name)

    # ---- noting

    def _batch(self) -> tuple[int, int, int]:
        return self._context.dp.rank, self._call, self._microbatch

    def see_batch(self, batch: torch.Tensor) -> None:
        """What the next call is given, before anything is cast."""
        self._given_finite = flaw(batch) is None

    def _received(self) -> str:
        if self._stage == 0 and self._given_finite:
            return CAST
        return BATCH if self._stage == 0 else f"what stage {self._stage} received"

    def _handed_on(self) -> str:
        return "the model's output" if self._stages[self._stage].is_last else f"what stage {self._stage} sends"

    def _counts(self, value: Any, everything: bool = False) -> bool:
        """Whether ``value`` is a tensor that is not finite, and not for a reason: masks are infinite on purpose."""
        kind = flaw(value)
        return kind == "NaN" or (kind == "inf" and (everything or value.requires_grad))

    def _look(
        self,
        name: str,
        values: Any,
        *,
        module: nn.Module | None = None,
        everything: bool = False,
        received: bool = False,
    ) -> bool:
        """Note in the forward what is not finite among ``values``, which ``name`` made; whether there is any."""
        self._looks += 1
        bad = next((value for value in tree_leaves(values) if self._counts(value, everything)), None)
        if bad is not None:
            self._met.add((self._call, self._microbatch, name))
            self._note("forward", name, bad, (self._looks, 0, 0), received=received, weight=_bad_weight(module))
        return bad is not None

    def _check_sums(self) -> None:
        """Note a gradient that is not finite though every part of it was."""
        if any(key[-1] == "backward" for key in self.sightings):
            return
        for name, parameter in self._parameters.items():
            if parameter.grad is not None and (kind := flaw(parameter.grad)):
                self._note(
                    "sum over microbatches", _owner(name), parameter.grad, AFTER_NODES, parameter=name, kind=kind
                )
                return

    def _note(
        self,
        during: During,
        module: str,
        value: torch.Tensor,
        position: tuple[int, int, int],
        *,
        where: tuple[int, int, int] | None = None,
        kind: Kind | None = None,
        received: bool = False,
        parameter: str | None = None,
        weight: str | None = None,
        operation: str | None = None,
    ) -> None:
        call, microbatch, stage = where or (self._call, self._microbatch, self._stage)
        key = (call, microbatch, stage, "forward" if during == "forward" else "backward")
        if key in self.sightings:
            return
        found = kind or flaw(value)
        assert found is not None
        place = RankCoordinates.here(self._context, stage)
        origin = Origin(
            during, module, place, found, call, microbatch, largest_finite(value), parameter, weight, operation
        )
        met = during == "backward" and (call, microbatch, module) in self._met
        self.sightings[key] = Sighting(origin, position, received, met)


def _owner(parameter: str) -> str:
    """The name of the module that has a parameter."""
    return parameter.rpartition(".")[0]


def _bad_weight(module: nn.Module | None) -> str | None:
    """The name of a parameter of ``module`` itself that is not finite."""
    own = module.named_parameters(recurse=False) if module is not None else ()
    return next((name for name, parameter in own if flaw(parameter)), None)


# ---------------------------------------------------------------------------------------------- what follows from it


def find_origin(tracer: Tracer) -> Origin | None:
    """The first value that was not finite on any rank, or None; the same on every rank, a collective of the world."""
    everyone = gather_findings([(list(tracer.sightings.values()), tracer.failed)])
    sightings = [sighting for ((own, _),) in everyone for sighting in own]
    failed = {loss for ((_, losses),) in everyone for loss in losses}
    failed |= {_batch_of(sighting) for sighting in sightings if sighting.seen_in_forward}
    count = [one for one in sightings if one.origin.during != "forward" or _batch_of(one) in failed]
    return min(count, key=_order).origin if count else None


def _batch_of(sighting: Sighting) -> tuple[int | None, int, int | None]:
    origin = sighting.origin
    return origin.place.dp, origin.call, origin.microbatch


def _order(sighting: Sighting) -> tuple[Any, ...]:
    origin = sighting.origin
    stage = origin.place.stage or 0
    backward = origin.during != "forward"
    return (
        origin.call,
        origin.microbatch or 0,
        backward,
        -stage if backward else stage,
        sighting.position,
        sighting.received,
        origin.place.rank,
    )


def investigate(
    window: Window,
    run: Callable[[torch.Tensor], Tracer],
    find: Callable[[], list[NonFiniteGradient]],
    add_up: Callable[[], object],
) -> OverflowReport:
    """Find out why the step that ended ``window`` was skipped; a collective of the world.

    Args:
        run: runs the window again at a loss scale, from gradients of zero, without a reduction over data ranks.
        find: this rank's gradients that are not finite.
        add_up: completes the gradients over all ranks, as a step does.
    """
    assert window.scale is not None
    scale = float(window.scale)
    of_step = _gathered(find)
    if not window.calls:
        note = (
            "which module, microbatch and data rank it was is not known, because the engine was not given the batch: "
            "call forward_backward(x, y)"
        )
        return OverflowReport(scale, of_step, note=note)
    tracer = run(window.scale)
    origin = find_origin(tracer)
    gradients = _gathered(find)
    if origin is None and not gradients:
        add_up()
        gradients = _gathered(find)
        origin = _of_sum(gradients[0]) if gradients else None
    elif origin is not None and origin.during == "backward":
        helped = scale > 1 and find_origin(run(torch.ones_like(window.scale))) is None
        origin = replace(origin, helped_by_scale=helped)
    note = ""
    failures = gather_objects(tracer.failure)
    if any(failures):
        gradients = gradients or of_step
        note = f"run again, it failed: {next(failure for failure in failures if failure)}"
    elif origin is None:
        gradients = gradients or of_step
        note = (
            "run again, the batch gave finite values: the gradients or weights were changed by hand, the batch was "
            "overwritten, or the model does not compute the same twice"
        )
    return OverflowReport(scale, gradients, origin, note)


def _gathered(find: Callable[[], list[NonFiniteGradient]]) -> tuple[NonFiniteGradient, ...]:
    return tuple(found for own in gather_findings(find()) for found in own)


def _of_sum(found: NonFiniteGradient) -> Origin:
    return Origin("sum over ranks", _owner(found.name), found.place, found.kind, 0, None, found.largest, found.name)


def stages_by_parameter(stages: Stages, places: Sequence[int]) -> dict[str, int]:
    """The first stage of this rank that has each of its parameters."""
    found: dict[str, int] = {}
    for place, stage in zip(places, stages, strict=True):
        for name, _ in stage.module.named_parameters(remove_duplicate=False):
            found.setdefault(name, place)
    return found
