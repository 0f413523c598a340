"""Who is where: :class:`ParallelContext`, a ``DeviceMesh`` with the axes ``pp``, ``dp`` and ``tp``.

Ranks are dealt with ``tp`` fastest and ``pp`` slowest. pp=2, dp=1, tp=2 puts four ranks so::

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
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import Store  # type: ignore[attr-defined]  # missing in torch's stubs only
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..config.schema import Config
from .heartbeat import Heartbeat, ending_in_time
from .rng import TENSOR_PLACES, RandomStream, derive_seed

__all__ = ["Axis", "ParallelContext", "TiedParameter", "current_context", "get_context"]

AXES = ("pp", "dp", "tp")
SECONDS_FOR_THE_OTHERS = 2.0
SECONDS_FOR_THREADS = 0.2
ECHO = "_paramp_echo"
"""The mark of an exception that only follows from another rank's."""
PIPELINE_AXIS = "pp"
"""The one axis along which ranks hold different parameters; along the others they shard or replicate the same."""
DATA_AXIS = "dp"
"""The axis over which ZeRO shards what the optimizer keeps."""


@dataclass(frozen=True)
class Axis:
    """One axis of the mesh as this rank sees it."""

    rank: int
    size: int
    group: dist.ProcessGroup


ROLES = {"stage": ("pp",), "batch": ("dp",), "tensor": ("tp",)}
"""What the mesh axes mean. ``stage``: each rank has parameters of its own. ``batch``: ranks have parts of the batch and
the same parameters, so gradients are summed. ``tensor``: ranks have shards or copies, as each DTensor says."""


@dataclass(eq=False)
class TiedParameter:
    """A parameter that several pipeline stages hold a copy of, such as an embedding tied to the output layer.

    Its gradient is the sum over the copies. :attr:`summed` remembers for which gradient the sum was made.
    """

    name: str
    """Its name in this rank's stage."""
    parameter: nn.Parameter
    """This rank's copy."""
    group: dist.ProcessGroup
    """The ranks that hold a copy, at this rank's place on the other axes."""
    owner: bool
    """Whether this rank's copy is the one that norms and counts take."""
    summed: tuple[torch.Tensor, int] | None = None
    """The gradient that already holds the sum, and its version then (an in-place change makes another)."""


class ParallelContext:
    """The process groups of one run. A context manager: leaving it destroys the groups that it made.

    Attributes:
        config: the resolved configuration.
        mesh: the ``DeviceMesh``, axes ``("pp", "dp", "tp")``, those of size 1 included.
        rank, world_size, local_rank: this process among all, and on its machine.
        device: where this rank computes.
        pp, dp, tp: an :class:`Axis` each.
        model_group: the ranks that together hold one replica of the model (pp x tp).
        ties: parameters that several stages hold, recorded by ``initialize``.
        heartbeat: tells the other ranks where this one is, and watches them; None where nothing does.
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
        parallel = config.parallel
        sizes = (parallel.pipeline.size, parallel.data_size(world_size), parallel.tensor.size)
        self.config = config
        self.rank = rank
        self.world_size = world_size
        self.local_rank = local_rank
        self.device = device
        self.ties: list[TiedParameter] = []
        self._owns_world = owns_world
        self._serial = next(_serials)
        self._extra_groups: list[dist.ProcessGroup] = []
        self.before_close: list[Callable[[], None]] = []
        """Called when the context is left, while its process groups are still there."""
        self.mesh: DeviceMesh = init_device_mesh(device.type, sizes, mesh_dim_names=AXES)
        self.pp, self.dp, self.tp = (self._axis(name) for name in AXES)
        replicas = self.mesh.mesh.permute(1, 0, 2).flatten(1).tolist()
        self.model_group = cast(dist.ProcessGroup, self.make_group(replicas))
        TENSOR_PLACES.append((self.tp.rank, self.tp.size, device))
        # The same on every rank: a model built from here on is the same everywhere.
        torch.manual_seed(config.seed)
        self.heartbeat = heartbeat
        if heartbeat is not None:
            heartbeat.start(self.name_of)
        _contexts.append(self)

    def _axis(self, name: str) -> Axis:
        return Axis(self.mesh.get_local_rank(name), self.mesh.size(AXES.index(name)), self.mesh.get_group(name))

    @property
    def stage_axis(self) -> Axis:
        """The axis along which each rank has stages of its own."""
        return self.pp

    @property
    def batch_axis(self) -> Axis:
        """The axis over which the batch is sharded and gradients are summed."""
        return self.dp

    @property
    def tensor_axis(self) -> Axis:
        """The axis over which layers are sharded by plan."""
        return self.tp

    @property
    def coordinates(self) -> dict[str, int]:
        """This rank's place on each axis of the mesh, by the axis's name."""
        return {name: self.mesh.get_local_rank(name) for name in self.mesh.mesh_dim_names or ()}

    @property
    def local_stages(self) -> list[int]:
        """The indices of the pipeline stages that this rank has."""
        return list(self.config.parallel.pipeline.stages_of(self.stage_axis.rank))

    @property
    def counts_loss(self) -> bool:
        """Whether this rank's losses count: on one rank of each model group, which has the last stage."""
        return self.is_last_stage and self.tensor_axis.rank == 0

    def make_group(self, rank_lists: Sequence[Sequence[int]], backend: str | None = None) -> dist.ProcessGroup | None:
        """The group of this rank's list among ``rank_lists``, which every rank passes alike; None if it is in none."""
        mine = None
        for ranks in rank_lists:
            group = dist.new_group(list(ranks), backend=backend)
            if self.rank in ranks:
                mine = group
        if mine is not None:
            self._extra_groups.append(mine)
        return mine

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank has the model's first stage."""
        return self.pp.rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank has the model's last stage, and so its outputs: in V-shaped schedules the first rank."""
        pipeline = self.config.parallel.pipeline
        return self.pp.rank == pipeline.rank_of(pipeline.num_stages - 1)

    @property
    def is_main(self) -> bool:
        """True on the one rank that prints and writes files."""
        return self.rank == 0

    def name_of(self, rank: int) -> str:
        """A rank with its place on the mesh: ``rank 2 (pp 1, dp 0, tp 0)``."""
        place = (self.mesh.mesh == rank).nonzero()[0].tolist()
        return f"rank {rank} ({', '.join(f'{name} {index}' for name, index in zip(AXES, place, strict=True))})"

    def phase(self, name: str) -> AbstractContextManager[None]:
        """A context around what this rank does outside of the engine, such as ``data`` or ``checkpoint``.

        If the job hangs, the other ranks' logs say that this one was there (:mod:`paramp.distributed.heartbeat`).
        """
        return nullcontext() if self.heartbeat is None else self.heartbeat.span(name)

    def activation_stream(self, stage: int | None = None) -> RandomStream:
        """The stream that dropout draws from: another in each stage and on each data rank, equal over ``tp``.

        Args:
            stage: the index of a pipeline stage. None: this rank's first.
        """
        stage = self.pp.rank if stage is None else stage
        return RandomStream(derive_seed(self.config.seed, "activations", stage, self.dp.rank), self.device)

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
        _forget_sharding_decisions()
        if not dist.is_initialized():
            return
        if self._owns_world:
            dist.destroy_process_group()
            # gloo's threads may still be letting go of the last collective's tensors, for which they need the
            # interpreter; a script that ends here would pull it away from under them and die with an abort.
            time.sleep(SECONDS_FOR_THREADS)
            return
        for group in {self.pp.group, self.dp.group, self.tp.group, *self._extra_groups}:
            if group is not dist.group.WORLD:
                dist.destroy_process_group(group)

    def __enter__(self) -> ParallelContext:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        failed = isinstance(error, Exception) and self.world_size > 1
        store = dist.distributed_c10d._get_default_store() if failed and dist.is_initialized() else None
        quiet = store is not None and self._follows_another(error, store)
        quiet = self._stop_heartbeat(error) or quiet
        if quiet and error is not None:
            error.__dict__[ECHO] = True
        try:
            with ending_in_time(error if failed else None, quiet=quiet):
                self.close()
        except RuntimeError as problem:  # a broken group cannot be closed in order; the process ends anyway
            if error is None:
                raise
            warnings.warn(f"the process groups were not closed in order: {problem}", stacklevel=2)
        if store is not None and self.rank == 0:
            self._stay_for_the_others(store)

    def _stop_heartbeat(self, error: BaseException | None = None) -> bool:
        """Tell the other ranks that this one leaves, because of ``error`` if it is one.

        Returns:
            Whether this rank was about to end because another had fallen silent.
        """
        if self.heartbeat is None:
            return False
        heartbeat, self.heartbeat = self.heartbeat, None
        heartbeat.stop(failed=error is not None and not (isinstance(error, SystemExit) and not error.code))
        return heartbeat.ending

    def _follows_another(self, error: BaseException | None, store: Store) -> bool:
        """Whether another rank failed before this one.

        A rank that dies breaks the connections of its peers, so that one error surfaces on all ranks, or every rank
        finds the same mistake in the configuration. The first to note its failure in the shared store is the one
        that reports it.
        """
        try:
            return store.add(self._failures, 1) > 1
        except RuntimeError:  # the process that hosted the store has ended
            return _is_lost_connection(error)

    def _stay_for_the_others(self, store: Store) -> None:
        """Rank 0 often hosts the store: leave the others a moment to look who failed first."""
        deadline = time.monotonic() + SECONDS_FOR_THE_OTHERS
        try:
            while store.add(self._failures, 0) < self.world_size and time.monotonic() < deadline:
                time.sleep(0.02)
        except RuntimeError:  # it was not the host, and the host has ended
            return

    @property
    def _failures(self) -> str:
        return f"paramp/failed/{self._serial}"

    def __repr__(self) -> str:
        sizes = " x ".join(f"{name} {axis.size}" for name, axis in zip(AXES, (self.pp, self.dp, self.tp), strict=True))
        return f"ParallelContext({sizes}, rank {self.rank} of {self.world_size}, {self.device})"


def _forget_sharding_decisions() -> None:
    """Empty DTensor's caches. They compare meshes by ranks and names alone, so that an entry made for a mesh of this
    context would be taken for an equal mesh of the next one, with process groups that are gone."""
    from torch.distributed.tensor import _collective_utils, _redistribute, _sharding_prop, debug

    clear_all = getattr(debug, "_clear_sharding_prop_cache", None)
    # These hold meshes, and with each mesh its groups and their threads, which poll.
    clear_planners = getattr(_redistribute, "clear_redistribute_planner_cache", None)
    for clear in (clear_all, clear_planners):
        if clear is not None:
            clear()
    cached = [
        getattr(_redistribute, name, None) for name in ("_gen_transform_infos", "_gen_transform_infos_non_cached")
    ]
    cached.append(getattr(getattr(_collective_utils, "MeshTopoInfo", None), "build_from_mesh", None))
    propagator = getattr(_sharding_prop, "ShardingPropagator", None)
    cached.append(getattr(propagator, "_propagate_tensor_meta_cached", None))
    for function in cached:
        clear = getattr(function, "cache_clear", None)
        if clear is not None:
            clear()


def _is_lost_connection(error: BaseException | None) -> bool:
    while error is not None:
        text = str(error).lower()
        if isinstance(error, dist.DistError) or (
            isinstance(error, RuntimeError) and any(word in text for word in ("gloo", "nccl", "connection", "socket"))
        ):
            return True
        error = error.__cause__ or error.__context__
    return False


def is_echo(error: BaseException) -> bool:
    """Whether ``error``, which left a context, only follows from another rank's, which reports it."""
    return ECHO in error.__dict__


def report_once() -> None:
    """Make the interpreter end without a traceback for errors that only follow from another rank's."""
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if not is_echo(error):
            previous(kind, error, traceback)

    if not getattr(previous, "reports_once", False):
        hook.reports_once = True  # type: ignore[attr-defined]
        sys.excepthook = hook


_contexts: list[ParallelContext] = []
_serials = itertools.count()


@atexit.register
def _close_all() -> None:
    """Close what a script launched without a ``with``; not after an error, when other ranks may wait for this one."""
    if not hasattr(sys, "last_value"):
        while _contexts:
            _contexts[-1].close()
    for context in _contexts:
        context._stop_heartbeat(sys.last_value)


def get_context() -> ParallelContext:
    """The context of the latest ``launch`` that is still open.

    Raises:
        RuntimeError: nothing was launched, or the context was left.
    """
    context = current_context()
    if context is None:
        raise RuntimeError("there is no parallel context: call paramp.launch_from_torch(config) first")
    return context


def current_context() -> ParallelContext | None:
    """As :func:`get_context`, or None where nothing was launched."""
    return _contexts[-1] if _contexts else None
