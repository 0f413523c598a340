"""Training on several ranks of which every bit is compared with one process's, for ``reproducible=True``.

A body trains a task of :mod:`exact_tasks` and returns what has to be equal: of each step the losses, the gradient norm,
the loss scale and whether it was skipped; at the end a digest of each tensor of a checkpoint, which holds weights,
masters, averages and optimizer state, whole whatever the layout.
"""

import functools
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from exact_tasks import TASKS, Task
from matrix import ALL_LAYOUTS
from pool import World, run_on_ranks, shared_folder
from reference import rank_slice

import paramp
from paramp.base.trees import map_tensors
from paramp.checkpoint.open_checkpoint import OpenCheckpoint
from paramp.checkpoint.resharding import read_tensor
from paramp.precision.modes import Precision

NAMES = ["1", "tp2", "tp4", "tp2 + sp", "pp2", "pp2 interleaved", "pp2 zero-bubble", "pp4", "dp2", "dp4", "dp2 + zero1"]
NAMES += ["dp2·tp2", "pp2·tp2", "pp2·dp2·tp2", "fsdp2", "fsdp4", "hsdp2x2", "fsdp2·tp2", "fsdp2·tp2 + sp", "pp2·fsdp2"]
LAYOUTS = {name: ALL_LAYOUTS[name] for name in [*NAMES, "pp2·fsdp2 interleaved"]}
"""Those of any model."""
EXPERT_LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "ep2": (2, {"expert": 2}),
    "ep4": (4, {"expert": 4}),
    "ep2·tp2": (4, {"expert": 2, "tensor": 2}),
    "ep2·tp2 + sp": (4, {"expert": 2, "tensor": 2, "sequence_parallel": True}),
    "ep2·pp2": (4, {"expert": 2, "pipeline": 2}),
    "ep2·pp2 zero-bubble": (4, {"expert": 2, "pipeline": {"size": 2, "schedule": "zbv"}}),
    "dp2·ep2": (4, {"data": 4, "expert": 2}),
    "dp2·ep2 + zero1": (4, {"data": 4, "expert": 2, "zero": 1}),
    "fsdp·ep2": (2, {"data": {"shard": 2}, "expert": 2}),
    "fsdp2·ep2": (4, {"data": {"shard": 4}, "expert": 2}),
    "hsdp·ep2": (4, {"data": {"replicate": 2, "shard": 2}, "expert": 2}),
    "fsdp·ep2·tp2": (4, {"data": {"shard": 2}, "expert": 2, "tensor": 2}),
    "fsdp·ep2·pp2": (4, {"data": {"shard": 2}, "expert": 2, "pipeline": 2}),
}
"""Those of models with experts."""
CONTEXT_LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "cp2": (2, {"context": 2}),
    "cp4": (4, {"context": 4}),
    "cp2·tp2": (4, {"context": 2, "tensor": 2}),
    "cp2·pp2": (4, {"context": 2, "pipeline": 2}),
    "dp2·cp2": (4, {"data": 2, "context": 2}),
    "dp2·cp2 + zero1": (4, {"data": 2, "context": 2, "zero": 1}),
    "fsdp2·cp2": (4, {"data": {"shard": 2}, "context": 2}),
}
"""Those that cut sequences."""
CONTEXT_EXPERT_LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "cp2·ep2": (4, {"context": 2, "expert": 2}),
    "fsdp2·cp2·ep2": (4, {"data": {"shard": 2}, "context": 2, "expert": 2}),
}
"""Those of models with experts that do so."""
EVERY_LAYOUT = LAYOUTS | EXPERT_LAYOUTS | CONTEXT_LAYOUTS | CONTEXT_EXPERT_LAYOUTS
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


def train(world: World, task: str, mode: str, layout: str, part: Part, options: Mapping[str, Any]) -> Trace | None:
    """A body: the trace of ``part`` on rank 0; ``options`` are further keys of the configuration."""
    config = {
        "parallel": EVERY_LAYOUT[layout][1],
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
        self.axis = context.dp
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
        task, engine, axis = self.task, self.engine, self.axis
        calls = task.calls - task.flushed
        for call in range(calls):
            batch = map_tensors(
                lambda one: rank_slice(one, axis.rank, axis.size), task.batch(index * task.calls + call)
            )
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


def digests(path: Any) -> dict[str, str]:
    """A digest of each tensor of the checkpoint but random streams."""
    with OpenCheckpoint(path) as checkpoint:
        names = [name for name in checkpoint.header.tensors if not name.startswith(("random.", "data."))]
        return {name: digest(read_tensor(checkpoint, name)) for name in names}


def digest(tensor: torch.Tensor) -> str:
    """Of the dtype, the shape and the bits of ``tensor``."""
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{tensor.dtype} {tuple(tensor.shape)} {hashlib.sha256(data).hexdigest()[:16]}"


def trained_in_modes(task: str, modes: Mapping[str, int], layout: str) -> dict[str, Trace]:
    """The trace of each of the ``modes`` in as many steps, on the ranks of ``layout``."""
    return {mode: trained(task, mode, layout, Part(0, steps)) for mode, steps in modes.items()}


def trained(
    task: str, mode: str, layout: str, part: Part, timeout: float = 240.0, device: str = "cpu", **options: Any
) -> Trace:
    """The trace of ``part`` on the ranks of ``layout``."""
    given = {"task": task, "mode": mode, "layout": layout, "part": part, "options": options}
    return run_on_ranks(EVERY_LAYOUT[layout][0], __name__, "train", given, device, timeout)[0]


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
