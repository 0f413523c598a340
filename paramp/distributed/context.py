""":class:`ParallelContext`: a ``DeviceMesh``, the roles of its axes, and this rank's coordinates.

The launch functions make a mesh with the axes ``pp``, ``dp`` and ``tp``; ``tp`` varies fastest over the ranks and
``pp`` slowest. pp=2, dp=1, tp=2 places four ranks like this::

              tp 0     tp 1
    pp 0     rank 0   rank 1     first half of the layers, each split in two
    pp 1     rank 2   rank 3     second half

:meth:`ParallelContext.from_mesh` takes a mesh that others made. Code asks for axes by role (:mod:`.mesh_roles`).
"""

from __future__ import annotations

import atexit
import itertools
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..base.collectives import gather_dtensors_over_gloo, is_distributed
from ..base.dtensor import forget_sharding_decisions
from ..base.errors import ConfigError, one_line, require
from ..base.observer_spans import span
from ..base.torch_internals import warn_if_untested
from ..config.schema import Config
from ..scaling.copies_per_element import OPEN, ROLES, Role, TiedParameter
from .error_report import report_uncaught
from .first_failure import IN_ORDER, Departures, ending_in_time, is_echo, mark_as_echo
from .heartbeat import Heartbeat
from .layout_meshes import LayoutMeshes, make_meshes
from .mesh_roles import MeshOfOthers, read_mesh
from .process_groups import ProcessGroups, family_along
from .random_across_tensor_ranks import TENSOR_PLACES
from .rng import RandomStream, derive_seed

DATA_ROLES: tuple[Role, ...] = ("replicate", "shard", "expert")
"""The roles along which ranks have different samples."""
BATCH_ROLES: tuple[Role, ...] = (*DATA_ROLES, "context")
"""The roles along which ranks have different parts of the batch: samples, or tokens of the same samples."""

NO_CONTEXT = "there is no parallel context: call paramp.launch_from_torch(config) first"


@dataclass(frozen=True)
class Axis:
    """One axis of the mesh as this rank sees it, or several axes, flattened."""

    rank: int
    size: int
    group: dist.ProcessGroup


class ParallelContext:
    """The process groups of one run. A context manager: its exit destroys the groups that it made.

    Attributes:
        config: the resolved configuration.
        mesh: the ``DeviceMesh``, axes ``("pp", "dp", "tp")``, those of size 1 included; ``dp_replicate`` and
            ``dp_shard`` in place of ``dp`` where parameters are sharded; ``ep`` after ``dp`` with an expert axis, and
            ``efsdp`` and ``ep`` in place of ``dp_shard``; ``cp`` before ``tp`` with a context axis; or that of
            :meth:`from_mesh`.
        shard_mesh: the same ranks with ``dp_shard`` as one axis, over which all but experts are sharded; ``mesh``
            unless that has ``efsdp`` or ``cp``.
        expert_mesh: the same ranks with ``efsdp`` and ``cp`` as one axis, ``efsdp``, over which experts are sharded;
            ``mesh`` unless that has both.
        roles: the role of each axis of the mesh, by its name there, in the mesh's order.
        rank, world_size, local_rank: the rank of this process in the world, and on its machine.
        serial: the number of this context in the process, equal on every rank; negative in a world of one rank, which
            other ranks do not count.
        num_engines: how many engines ``initialize`` has made in it.
        device: the device of this rank.
        pp, dp, cp, ep, tp: the :class:`Axis` of each name, of size 1 where the mesh has none; ``dp`` is
            ``dp_replicate`` and ``dp_shard`` flattened, and ``ep`` with them. ``stage_axis``, ``tensor_axis``: the same
            by role.
        batch_axis: the :class:`Axis` of the ranks with different parts of the batch, whose gradients are summed: ``dp``
            and ``cp`` flattened.
        experts_axis: the ranks of ``batch_axis`` that have the same experts; all of them where FSDP2 shards parameters,
            and sums their gradients.
        model_group: the ranks that are given the same samples (pp x cp x tp).
        ties: parameters that several stages hold, recorded by ``initialize``.
        departures: which rank has left the context first.
        heartbeat: reports this rank's phase to the other ranks and watches them; None if there is none.
    """

    def __init__(
        self,
        config: Config,
        device: torch.device,
        local_rank: int,
        *,
        owns_world: bool,
        heartbeat: Heartbeat | None = None,
        mesh: MeshOfOthers | None = None,
    ) -> None:
        self.config = config
        self.rank, self.world_size, self.local_rank = dist.get_rank(), dist.get_world_size(), local_rank
        self.device = device
        self.ties: list[TiedParameter] = []
        self._owns_world = owns_world
        over_gloo = device.type == "cuda" and dist.get_backend() == "gloo"
        self._gathers = gather_dtensors_over_gloo() if over_gloo else None
        self._process = os.getpid()
        self.serial = next(_serials if self.world_size > 1 else _serials_alone)
        self.num_engines = 0
        self._groups = ProcessGroups(f"paramp/{self.serial}")
        self.before_close: list[Callable[[], None]] = []
        """Called when the context is closed, before its process groups are destroyed."""
        self.replicated_axes: dict[Any, list[str]] = {}
        """What :func:`~paramp.distributed.replicated_axes.replicated_axes` has found: its time grows with the world."""
        if mesh is None:
            meshes = make_meshes(config.parallel, self.world_size, device, self._groups)
        else:
            meshes = LayoutMeshes(mesh.mesh, mesh.mesh, mesh.mesh)
        self.mesh, self.shard_mesh, self.expert_mesh = meshes
        self.roles = {name: ROLES[name] for name in self.mesh.mesh_dim_names or ()} if mesh is None else mesh.roles
        self.pp = self.stage_axis = self._axis("stage")
        self.dp = self._axis(*DATA_ROLES)
        self.cp, self.ep = self._axis("context"), self._axis("expert")
        self.batch_axis = self._axis(*BATCH_ROLES) if self.cp.size > 1 else self.dp
        apart = bool(self.axes_of("expert")) and config.parallel.shard == 1
        self.experts_axis = self._axis("replicate", "shard", "context") if apart else self.batch_axis
        self.tp = self.tensor_axis = self._axis("tensor")
        self.model_group = self._own_group("model", self._family("stage", "context", "tensor"))
        TENSOR_PLACES.append((self.tensor_axis.rank, self.tensor_axis.size, device))
        if mesh is None:  # the same on every rank, so that a model built after this is the same everywhere
            torch.manual_seed(config.seed)
        self.departures = Departures(f"paramp/context/{self.serial}", self.rank, self.world_size)
        self.heartbeat = heartbeat
        if heartbeat is not None:
            heartbeat.start(self.name_of)
        OPEN.append(self)

    @classmethod
    def from_mesh(
        cls,
        mesh: DeviceMesh,
        config: Config | Mapping[str, Any] | str | Path | None = None,
        *,
        roles: Mapping[str, str] | None = None,
    ) -> ParallelContext:
        """A context over a mesh that you or another framework made. Every rank of the world calls it.

        Leaving it destroys the few process groups that it makes, and leaves the mesh's and the world's alive. It does
        not seed torch's random streams, and has no heartbeat. The mesh may have axes in any order; those without a role
        in it have size 1. What a role means for parameters and gradients: :mod:`paramp.distributed.mesh_roles`. A plain
        parameter counts as replicated except over ``pp``, and over ``ep`` if its attribute ``allreduce`` is False,
        which marks experts in Megatron-Core and DeepSpeed.

        Args:
            mesh: of all ranks of the world, with a name for each axis.
            config: as for :func:`~paramp.distributed.launch_from_torch_mpi_slurm.launch_from_torch`; the mesh gives
                the sizes in ``parallel``.
            roles: usual names (``pp``, ``tp``, ``dp``, ``ddp``, ``dp_replicate``, ``dp_shard``, ``fsdp``, ``cp``,
                ``ep``) of axes that have others, or another meaning: ``{"model": "tp"}``. At most one axis of a role.

        Raises:
            ConfigError: on every rank: the mesh has no names, an axis without a known role, two axes of one role, other
                ranks than the world's or a device that torch or the process groups do not have; ``roles`` or
                ``config`` are invalid or do not fit the mesh; or ranks passed different arguments.
            LaunchError: a rank did not call it in time.
        """
        report_errors()
        warn_if_untested()
        checked = read_mesh(mesh, config, roles)
        device = checked.device
        local_rank = dist.get_node_local_rank(fallback_rank=dist.get_rank() if device.index is None else device.index)
        return cls(checked.config, device, local_rank, owns_world=False, mesh=checked)

    def _axis(self, *roles: Role) -> Axis:
        """The axis of the mesh with one of ``roles``; of several the flattened one; of none one of size 1."""
        names, family = self.axes_of(*roles), self._family(*roles)
        size = family.shape[1]
        # An axis of size 1 may have a group that moves no data, such as torchtitan's.
        group = self.group_along(names[0]) if len(names) == 1 and size > 1 else self._own_group(roles[0], family)
        return Axis(dist.get_rank(group), size, group)

    def _family(self, *roles: Role) -> torch.Tensor:
        """The groups of ranks along the axes of ``roles``: 2-dim int, each ascending."""
        dims = [dim for dim, role in enumerate(self.roles.values()) if role in roles]
        return family_along(self.mesh.mesh, dims).sort(dim=1).values

    def axes_of(self, *roles: Role) -> tuple[str, ...]:
        """The names of the mesh's axes that have one of ``roles``, in the mesh's order."""
        return tuple(name for name, role in self.roles.items() if role in roles)

    def group_along(self, name: str) -> dist.ProcessGroup:
        """This rank's process group along the axis ``name`` of the mesh."""
        return self.mesh.get_group([*self.roles].index(name))  # by name, torch may return a flattened axis of that name

    def coordinates_of(self, rank: int) -> dict[str, int]:
        """The coordinate of ``rank`` on each axis of the mesh, by the axis's name."""
        return dict(zip(self.roles, (self.mesh.mesh == rank).nonzero()[0].tolist(), strict=True))

    @property
    def coordinates(self) -> dict[str, int]:
        """This rank's coordinate on each axis of the mesh, by the axis's name."""
        return self.coordinates_of(self.rank)

    @property
    def local_stages(self) -> list[int]:
        """The indices of this rank's pipeline stages."""
        return list(self.config.parallel.pipeline.stages_of(self.stage_axis.rank))

    @property
    def counts_loss(self) -> bool:
        """Whether this rank's losses count: on one of the ranks with the same part of the batch, of the last stage."""
        return self.is_last_stage and self.tensor_axis.rank == 0

    def ranks_along(self, axes: Sequence[str], stages: Sequence[int] = ()) -> torch.Tensor:
        """The groups of ranks whose coordinates differ on ``axes`` only.

        Args:
            axes: in the order of the mesh.
            stages: the pipeline ranks to include. Empty: all.

        Returns:
            2-dim int, groups x ranks of a group, both in the order of the mesh.
        """
        names, ranks = [*self.roles], self.mesh.mesh
        if stages:
            ranks = ranks.index_select(names.index(self.axes_of("stage")[0]), torch.tensor(stages))
        return family_along(ranks, [names.index(name) for name in axes])

    def make_group(
        self, name: str, family: torch.Tensor, backend: str | None = None, *, shared: bool = True
    ) -> dist.ProcessGroup | None:
        """The group of ``family`` that has this rank; None if none has (:meth:`.process_groups.ProcessGroups.make`)."""
        return self._groups.make(name, family, backend, shared=shared)

    def _own_group(self, name: str, family: torch.Tensor) -> dist.ProcessGroup:
        """The group of a ``family`` that has every rank."""
        return cast(dist.ProcessGroup, self.make_group(name, family))

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
        return f"rank {rank} ({', '.join(f'{name} {index}' for name, index in self.coordinates_of(rank).items())})"

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
        """Destroy the process groups of this context. Closing twice is harmless; a forked process closes nothing."""
        if self not in OPEN or not self._is_of_process():
            return
        with ExitStack() as ends:  # each is called, the last one first, also after one that fails
            ends.callback(self._destroy)
            for end in self.before_close:
                ends.callback(end)
            self.before_close.clear()

    def _is_of_process(self) -> bool:
        """Whether this process is the rank; False in one forked from it, which has copies of the rank's connections."""
        return os.getpid() == self._process

    def _destroy(self) -> None:
        place = OPEN.index(self)
        del OPEN[place], TENSOR_PLACES[place]
        self._leave(None)
        self.ties.clear()
        self._gathers = None
        forget_sharding_decisions()
        self._groups.take_from(self.mesh, world=self._owns_world)
        if not dist.is_initialized():
            return
        if self._owns_world:
            dist.destroy_process_group()
            self.departures.linger()
            return
        self._groups.destroy()

    def __enter__(self) -> ParallelContext:
        self.check_open()
        return self

    def check_open(self) -> None:
        """Raise a RuntimeError if the context was closed."""
        if self not in OPEN:
            raise RuntimeError(f"{self!r} was closed, and its process groups are destroyed; make another context")

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if not self._is_of_process():
            return
        self.departures.explain(error)
        failed = isinstance(error, Exception) and self.world_size > 1
        quiet = failed and error is not None and self.departures.failed_after_another(error)
        quiet = self._leave(error) or quiet
        if error is not None:
            mark_as_echo(error, quiet or is_echo(error))
        try:
            with ending_in_time(error if failed else None, quiet=quiet):
                self.close()
        except RuntimeError as problem:  # a broken group cannot be destroyed cleanly; the process ends anyway
            if error is None:
                raise
            warnings.warn(f"the process groups were not closed cleanly: {problem}", stacklevel=2)
        if failed:
            self.departures.linger()

    def _leave(self, error: BaseException | None) -> bool:
        """Report that this rank leaves, and whether by an ``error``. True: it was about to end for a silent one."""
        heartbeat, self.heartbeat = self.heartbeat, None
        if heartbeat is not None and heartbeat.lost_host:
            self.departures.drop_store()
        else:
            after = "" if heartbeat is None else f" {heartbeat.record}"
            how = IN_ORDER if error is None else f"by {one_line(repr(error))}"
            self.departures.announce(f"{self.name_of(self.rank)} has left{after}, {how}")
        return heartbeat is not None and heartbeat.leave(error)

    def __repr__(self) -> str:
        sizes = " x ".join(f"{name} {size}" for name, size in zip(self.roles, self.mesh.shape, strict=True))
        return f"ParallelContext({sizes}, rank {self.rank} of {self.world_size}, {self.device})"


_serials, _serials_alone = itertools.count(), itertools.count(-1, -1)


@atexit.register
def _close_all() -> None:
    """Close contexts launched without a ``with``; not after an error, because other ranks may not close theirs."""
    for context in [context for context in reversed(OPEN) if context._is_of_process()]:
        if hasattr(sys, "last_value"):
            context._leave(sys.last_value)
        else:
            context.close()


def get_context() -> ParallelContext:
    """The context of the latest ``launch`` that is still open.

    Raises:
        RuntimeError: nothing was launched, or the context was closed.
    """
    context = current_context()
    if context is None:
        raise RuntimeError(NO_CONTEXT)
    return context


def required_context(function: str, context: ParallelContext | None) -> ParallelContext | None:
    """``context``, or the current one for None, for the public ``function``; None in one process without any.

    Raises:
        ConfigError: it is not a context, or was closed; or there is none in a world of several ranks.
    """
    require(context is None or isinstance(context, ParallelContext), "context", context, "a ParallelContext, or None")
    require(context is None or context in OPEN, "context", context, "one that is open; this one was closed")
    context = context or current_context()
    if context is None and is_distributed():
        raise ConfigError(
            f"{function}: got no context in a world of {dist.get_world_size()} ranks, so it is not known what the "
            "other ranks hold; call paramp.ParallelContext.from_mesh(mesh) or paramp.launch_from_torch(config) first"
        )
    return context


def current_context() -> ParallelContext | None:
    """As :func:`get_context`, but None if there is no open context."""
    return OPEN[-1] if OPEN else None


def report_errors() -> None:
    """From now on, report an error that ends this program (:mod:`.error_report`), with the rank that has left first."""
    report_uncaught(lambda error: context.departures.explain(error) if (context := current_context()) else None)
