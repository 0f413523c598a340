"""Training on several ranks of which every bit is compared with one process's, for ``reproducible=True``.

A body trains a task of :mod:`exact_tasks` and returns what has to be equal: of each step the losses, the gradient norm,
the loss scale and whether it was skipped; at the end a digest of each tensor of a checkpoint, which holds weights,
masters, averages and optimizer state, whole whatever the layout.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from exact_tasks import TASKS, Task
from pool import World, run_on_ranks, shared_folder
from reference import rank_slice

import paramp
from paramp.base.trees import map_tensors
from paramp.checkpoint.dcp_storage import read_tensor
from paramp.checkpoint.open_checkpoint import OpenCheckpoint
from paramp.precision.policy import Precision

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "1": (1, {}),
    "tp2": (2, {"tensor": 2}),
    "tp4": (4, {"tensor": 4}),
    "tp2 + sp": (2, {"tensor": 2, "sequence_parallel": True}),
    "pp2": (2, {"pipeline": 2}),
    "pp2 interleaved": (2, {"pipeline": {"size": 2, "schedule": "interleaved-1f1b"}}),
    "pp2 zero-bubble": (2, {"pipeline": {"size": 2, "schedule": "interleaved-zero-bubble"}}),
    "pp4": (4, {"pipeline": 4}),
    "dp2": (2, {"data": 2}),
    "dp4": (4, {"data": 4}),
    "dp2 + zero1": (2, {"data": 2, "zero": 1}),
    "dp2·tp2": (4, {"data": 2, "tensor": 2}),
    "pp2·tp2": (4, {"pipeline": 2, "tensor": 2}),
    "pp2·dp2·tp2": (8, {"pipeline": 2, "data": 2, "tensor": 2}),
    "fsdp2": (2, {"data": {"shard": 2}}),
    "fsdp4": (4, {"data": {"shard": 4}}),
    "hsdp2x2": (4, {"data": {"replicate": 2, "shard": 2}}),
    "fsdp2·tp2": (4, {"data": {"shard": 2}, "tensor": 2}),
    "fsdp2·tp2 + sp": (4, {"data": {"shard": 2}, "tensor": 2, "sequence_parallel": True}),
    "pp2·fsdp2": (4, {"pipeline": 2, "data": {"shard": 2}}),
    "pp2·fsdp2 interleaved": (4, {"pipeline": {"size": 2, "schedule": "interleaved-1f1b"}, "data": {"shard": 2}}),
}
"""Name -> ranks, and the configuration's ``parallel``."""
Trace = dict[str, Any]
"""``steps``: what each step returned; ``tensors``: a digest by name; ``num_skipped``."""


@dataclass(frozen=True)
class Part:
    """Some steps of a run, in one process group: what comes before and behind them is in other ones."""

    first: int
    stop: int
    load: str | None = None
    """The checkpoint to begin with."""
    save: str | None = None
    """Where to save at the end."""


def with_high_scale(mode: str, task: str) -> Precision:
    """The mode, its loss scaling, if it is dynamic, starting from the task's scale."""
    precision, scales = Precision.parse(mode), TASKS[task].scales
    if precision.scaling is None or mode not in scales:
        return precision
    return replace(precision, scaling=replace(precision.scaling, init_scale=scales[mode]))


def train(
    world: World,
    task: str,
    mode: str,
    layout: str,
    part: Part,
    options: Mapping[str, Any],
) -> Trace | None:
    """A body: the trace of ``part`` on rank 0; ``options`` are further keys of the configuration."""
    config = {
        "parallel": LAYOUTS[layout][1],
        "precision": with_high_scale(mode, task),
        "reproducible": {"chunk": 1, "slices": 4},
        "clip_grad_norm": 1.0,
        "gradient_accumulation": TASKS[task].calls,
    }
    with paramp.launch_from_torch({**config, **TASKS[task].config, **options}) as context:
        run = Run(context, TASKS[task])
        if part.load is not None:
            run.engine.load(part.load)
        steps = [run.step(index) for index in range(part.first, part.stop)]
        path = shared_folder() / "end" if part.save is None else part.save
        run.engine.save(path)
        if world.rank:
            return None
        return {"steps": steps, "tensors": digests(path), "num_skipped": run.engine.num_skipped}


class Run:
    """A task that is trained in ``context``."""

    def __init__(self, context: paramp.ParallelContext, task: Task) -> None:
        self.task = task
        self.axis = context.batch_axis
        torch.manual_seed(7)
        model = task.build()
        optimizer = task.optimizer(model)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
        self.engine, _, _, self.schedule = paramp.initialize(
            model, optimizer, task.criterion, lr_scheduler=schedule, plan=task.plan
        )

    def step(self, index: int) -> list[Any]:
        """Train one window; its losses, the norm, the scale, and whether the step was made."""
        losses = []
        task, engine = self.task, self.engine
        calls = task.calls - task.flushed
        for call in range(calls):
            batch = map_tensors(self._own, task.batch(index * task.calls + call))
            losses.append(engine.forward_backward(*batch).item().hex())
            result = engine.step()
            if task.between is not None and call < calls - 1:
                task.between(engine, batch)
        if task.flushed:
            result = engine.flush()
        if task.behind is not None:
            task.behind(engine, batch)
        self.schedule.step()
        norm = result.grad_norm
        return [*losses, None if norm is None else float(norm).hex(), result.loss_scale, result.stepped]

    def _own(self, tensor: torch.Tensor) -> torch.Tensor:
        return rank_slice(tensor, self.axis.rank, self.axis.size)


def digests(path: Any) -> dict[str, str]:
    """A digest of each tensor of the checkpoint but random streams."""
    with OpenCheckpoint(path) as checkpoint:
        names = [name for name in checkpoint.header.tensors if not name.startswith(("random.", "data."))]
        return {name: digest(read_tensor(checkpoint, name)) for name in names}


def digest(tensor: torch.Tensor) -> str:
    """Of the dtype, the shape and the bits of ``tensor``."""
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{tensor.dtype} {tuple(tensor.shape)} {hashlib.sha256(data).hexdigest()[:16]}"


def train_modes(world: World, modes: Mapping[str, int], **given: Any) -> dict[str, Trace | None]:
    """A body: the trace of each of the ``modes`` in as many steps, one after another."""
    return {mode: train(world, mode=mode, part=Part(0, steps), **given) for mode, steps in modes.items()}


def trained_in_modes(task: str, modes: Mapping[str, int], layout: str) -> dict[str, Trace]:
    """The traces of one launch of the ranks of ``layout``."""
    given = {"task": task, "modes": modes, "layout": layout, "options": {}}
    traces: dict[str, Trace] = run_on_ranks(LAYOUTS[layout][0], __name__, "train_modes", given)[0]
    return traces


def trained(
    task: str, mode: str, layout: str, part: Part, timeout: float = 240.0, device: str = "cpu", **options: Any
) -> Trace:
    """The trace of ``part`` on the ranks of ``layout``."""
    given = {"task": task, "mode": mode, "layout": layout, "part": part, "options": options}
    trace: Trace = run_on_ranks(LAYOUTS[layout][0], __name__, "train", given, device, timeout)[0]
    return trace


@functools.cache
def reference(task: str, mode: str, steps: int, device: str = "cpu") -> Trace:
    """The trace of one process."""
    return trained(task, mode, "1", Part(0, steps), timeout=1200.0, device=device)


def assert_same_bits(actual: Trace, expected: Trace) -> None:
    """The traces are equal; else a message that names the first step, and the tensors, that differ."""
    first = len(expected["steps"]) - len(actual["steps"])  # of a run that was resumed
    pairs: Sequence[Any] = list(zip(actual["steps"], expected["steps"][first:], strict=True))
    different = [(index, *pair) for index, pair in enumerate(pairs, first) if pair[0] != pair[1]]
    assert not different, "step {}: got {}, expected {}".format(*different[0])
    assert actual["tensors"].keys() == expected["tensors"].keys()
    names = [name for name, value in expected["tensors"].items() if actual["tensors"][name] != value]
    assert not names, f"{len(names)} of {len(expected['tensors'])} tensors differ: {names[:8]}"
    assert actual["num_skipped"] == expected["num_skipped"]
