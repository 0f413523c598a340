""":class:`ParallelContext`: a ``DeviceMesh`` with the axes ``pp``, ``dp`` and ``tp``, and this rank's coordinates.

``tp`` varies fastest over the ranks and ``pp`` slowest. pp=2, dp=1, tp=2 places four ranks like this::

              tp 0     tp 1
    pp 0     rank 0   rank 1     first half of the layers, each split in two
    pp 1     rank 2   rank 3     second half
"""

from __future__ import annotations

import atexit
import itertools
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..base.dtensor import forget_sharding_decisions
from ..base.spans import span
from ..config.schema import Config
from .failures import ending_in_time, failed_after_another, mark_as_echo, wait_for_failures
from .heartbeat import Heartbeat
from .rng import TENSOR_PLACES, RandomStream, derive_seed

ROLES = {"stage": ("pp",), "batch": ("dp",), "tensor": ("tp",)}
"""The role of each mesh axis; the slowest first. ``stage``: each rank has its own parameters. ``batch``: ranks have
parts of the batch and the same parameters, so gradients are summed. ``tensor``: ranks have shards or copies, according
to each DTensor's placements."""
AXES = tuple(name for names in ROLES.values() for name in names)
(PIPELINE_AXIS,) = ROLES["stage"]
"""The only axis along which ranks hold different parameters; along the others they shard or replicate the same ones."""
(DATA_AXIS,) = ROLES["batch"]
"""The axis over which ZeRO shards the optimizer state."""
SECONDS_FOR_THREADS = 0.2
"""The time between the last collective and the end of the interpreter: gloo's threads may still be releasing its
tensors, which needs the interpreter, and a thread that finds it ended aborts the process."""


@dataclass(frozen=True)
class Axis:
    """One axis of the mesh as this rank sees it."""

    rank: int
    size: int
    group: dist.ProcessGroup


@dataclass(eq=False)
class TiedParameter:
    """A parameter that several pipeline stages hold a copy of, such as an embedding tied to the output layer.

    Its gradient is the sum over the copies. :attr:`summed` records the gradient that already holds this sum.
    """

    name: str
    """Its name in this rank's stage."""
    parameter: nn.Parameter
    """This rank's copy."""
    group: dist.ProcessGroup
    """The ranks that hold a copy and have this rank's coordinates on the other axes."""
    owner: bool
    """Whether norms and counts include this rank's copy."""
    summed: tuple[torch.Tensor, int] | None = None
    """The gradient that already holds the sum, and its version at that time (an in-place change increments it)."""


class ParallelContext:
    """The process groups of one run. A context manager: its exit destroys the groups that it made.

    Attributes:
        config: the resolved configuration.
        mesh: the ``DeviceMesh``, axes ``("pp", "dp", "tp")``, those of size 1 included.
        rank, world_size, local_rank: the rank of this process in the world, and on its machine.
        serial: the number of this context in the process, equal on every rank.
        num_engines: how many engines ``initialize`` has made in it.
        device: the device of this rank.
        pp, dp, tp: the :class:`Axis` of each name; ``stage_axis``, ``batch_axis``, ``tensor_axis``: the same by role.
        model_group: the ranks that together hold one replica of the model (pp x tp).
        ties: parameters that several stages hold, recorded by ``initialize``.
        heartbeat: reports this rank's phase to the other ranks and watches them; None if there is none.
    """

    def __init__(
        self,
        config: Config,
        *,
        rank: int,
        world_size: int,
        local_rank: int,
        device: torch.device,
        owns_world: bool,
        heartbeat: Heartbeat | None = None,
    ) -> None:
        self.config = config
        self.rank = rank
        self.world_size = world_size
        self.local_rank = local_rank
        self.device = device
        self.ties: list[TiedParameter] = []
        self._owns_world = owns_world
        self.serial = next(_serials)
        self.num_engines = 0
        self._extra_groups: list[dist.ProcessGroup] = []
        self.before_close: list[Callable[[], None]] = []
        """Called when the context is closed, before its process groups are destroyed."""
        self.mesh: DeviceMesh = init_device_mesh(device.type, _mesh_shape(config, world_size), mesh_dim_names=AXES)
        self.pp, self.dp, self.tp = self.stage_axis, self.batch_axis, self.tensor_axis = [
            Axis(self.mesh.get_local_rank(name), self.mesh.size(index), self.mesh.get_group(name))
            for index, name in enumerate(AXES)
        ]
        replicas = self.mesh.mesh.movedim(AXES.index(DATA_AXIS), 0).flatten(1).tolist()
        self.model_group = cast(dist.ProcessGroup, self.make_group(replicas))
        TENSOR_PLACES.append((self.tensor_axis.rank, self.tensor_axis.size, device))
        # The same on every rank, so that a model built after this is the same everywhere.
        torch.manual_seed(config.seed)
        self.heartbeat = heartbeat
        if heartbeat is not None:
            heartbeat.start(self.name_of)
        _contexts.append(self)

    @property
    def coordinates(self) -> dict[str, int]:
        """This rank's coordinate on each axis of the mesh, by the axis's name."""
        return {name: self.mesh.get_local_rank(name) for name in self.mesh.mesh_dim_names or ()}

    @property
    def local_stages(self) -> list[int]:
        """The indices of this rank's pipeline stages."""
        return list(self.config.parallel.pipeline.stages_of(self.stage_axis.rank))

    @property
    def counts_loss(self) -> bool:
        """Whether this rank's losses count: on one rank of each model group, which has the last stage."""
        return self.is_last_stage and self.tensor_axis.rank == 0

    def make_group(self, rank_lists: Sequence[Sequence[int]], backend: str | None = None) -> dist.ProcessGroup | None:
        """The group of the list that has this rank; None if none has. Every rank passes the same ``rank_lists``."""
        groups = [dist.new_group(list(ranks), backend=backend) for ranks in rank_lists]
        mine = [group for group, ranks in zip(groups, rank_lists, strict=True) if self.rank in ranks]
        self._extra_groups += mine[-1:]
        return mine[-1] if mine else None

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank has the model's first stage."""
        return self.stage_axis.rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank has the model's last stage, and so its outputs; in V-shaped schedules it is the first."""
        pipeline = self.config.parallel.pipeline
        return self.stage_axis.rank == pipeline.rank_of(pipeline.num_stages - 1)

    @property
    def is_main(self) -> bool:
        """True on the only rank that prints and writes files."""
        return self.rank == 0

    def name_of(self, rank: int) -> str:
        """A rank with its coordinates on the mesh: ``rank 2 (pp 1, dp 0, tp 0)``."""
        coordinates = (self.mesh.mesh == rank).nonzero()[0].tolist()
        return f"rank {rank} ({', '.join(f'{name} {index}' for name, index in zip(AXES, coordinates, strict=True))})"

    def phase(self, name: str) -> AbstractContextManager[None]:
        """A context for a phase outside the engine, such as ``data`` or ``checkpoint``.

        If the job hangs, the other ranks report that this rank was in it (:mod:`paramp.distributed.heartbeat`). While
        torch's profiler is active, it is a range there.
        """
        return span([] if self.heartbeat is None else [self.heartbeat], name)

    def activation_stream(
        self, stage: int | None = None, *, engine: int = 0, num_steps: int | None = None
    ) -> RandomStream:
        """The stream that dropout draws from: different in each stage, engine and data rank, equal over ``tp``.

        Args:
            stage: the index of a pipeline stage. None: this rank's first.
            engine: the number of the engine in this context.
            num_steps: the number of steps after which the stream begins. None: before the first step.
        """
        place = [self.stage_axis.rank if stage is None else stage, self.batch_axis.rank]
        later = [] if num_steps is None else [num_steps]
        other = ["engine", engine] if engine else []
        return RandomStream(derive_seed(self.config.seed, "activations", *place, *later, *other), self.device)

    def close(self) -> None:
        """Destroy the process groups of this context. Closing twice is harmless."""
        if self not in _contexts:
            return
        try:
            while self.before_close:
                self.before_close.pop()()
        finally:
            self._destroy()

    def _destroy(self) -> None:
        place = _contexts.index(self)
        del _contexts[place], TENSOR_PLACES[place]
        self._stop_heartbeat()
        self.ties.clear()
        forget_sharding_decisions()
        if not dist.is_initialized():
            return
        if self._owns_world:
            dist.destroy_process_group()
            time.sleep(SECONDS_FOR_THREADS)
            return
        for group in {self.pp.group, self.dp.group, self.tp.group, *self._extra_groups}:
            if group is not dist.group.WORLD:
                dist.destroy_process_group(group)

    def __enter__(self) -> ParallelContext:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        failed = isinstance(error, Exception) and self.world_size > 1
        store = dist.distributed_c10d._get_default_store() if failed and dist.is_initialized() else None
        key = f"paramp/failed/{self.serial}"
        quiet = store is not None and error is not None and failed_after_another(store, key, error)
        quiet = self._stop_heartbeat(error) or quiet
        if quiet and error is not None:
            mark_as_echo(error)
        try:
            with ending_in_time(error if failed else None, quiet=quiet):
                self.close()
        except RuntimeError as problem:  # a broken group cannot be destroyed cleanly; the process ends anyway
            if error is None:
                raise
            warnings.warn(f"the process groups were not closed cleanly: {problem}", stacklevel=2)
        if store is not None and self.rank == 0:
            wait_for_failures(store, key, self.world_size)

    def _stop_heartbeat(self, error: BaseException | None = None) -> bool:
        """Report to the other ranks that this one leaves, and whether because of an ``error``.

        Returns True if this rank was about to end because another one is silent.
        """
        if self.heartbeat is None:
            return False
        heartbeat, self.heartbeat = self.heartbeat, None
        heartbeat.stop(failed=error is not None and not (isinstance(error, SystemExit) and not error.code))
        return heartbeat.ending

    def __repr__(self) -> str:
        sizes = " x ".join(f"{name} {axis.size}" for name, axis in zip(AXES, (self.pp, self.dp, self.tp), strict=True))
        return f"ParallelContext({sizes}, rank {self.rank} of {self.world_size}, {self.device})"


def _mesh_shape(config: Config, world_size: int) -> tuple[int, ...]:
    """The size of each axis, in the order of ``ROLES``."""
    parallel = config.parallel
    return parallel.pipeline.size, parallel.data_size(world_size), parallel.tensor.size


_contexts: list[ParallelContext] = []
_serials = itertools.count()


@atexit.register
def _close_all() -> None:
    """Close contexts launched without a ``with``; not after an error, because other ranks may not close theirs."""
    if not hasattr(sys, "last_value"):
        while _contexts:
            _contexts[-1].close()
    for context in _contexts:
        context._stop_heartbeat(sys.last_value)
    if _contexts:
        time.sleep(SECONDS_FOR_THREADS)


def get_context() -> ParallelContext:
    """The context of the latest ``launch`` that is still open.

    Raises:
        RuntimeError: nothing was launched, or the context was closed.
    """
    context = current_context()
    if context is None:
        raise RuntimeError("there is no parallel context: call paramp.launch_from_torch(config) first")
    return context


def current_context() -> ParallelContext | None:
    """As :func:`get_context`, but None if there is no open context."""
    return _contexts[-1] if _contexts else None
