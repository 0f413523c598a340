"""The role of each axis of a mesh, by its usual name or as the user gives it; checks of a mesh that others made.

What the ranks along an axis of each role hold (size-1 axes and absent ones make no difference):

=========  =============================  ==============================  =============================
role       usual names                    parameters                      gradients
=========  =============================  ==============================  =============================
stage      ``pp``                         each rank's own                 each rank's own
replicate  ``dp``, ``ddp``,               replicated                      summed
           ``dp_replicate``
shard      ``dp_shard``, ``fsdp``,        sharded                         summed and sharded
           ``efsdp``
context    ``cp``                         replicated                      summed
expert     ``ep``                         experts are each rank's own,    of experts each rank's own,
                                          the others replicated           the others summed
tensor     ``tp``                         sharded or replicated, by plan  as the parameters
=========  =============================  ==============================  =============================

Along ``replicate``, ``shard`` and ``expert`` ranks have different samples; together they are the data axis. Along
``context`` they have parts of each sequence of the same samples. In a mesh with ``efsdp`` or ``dp_shard`` that paramp
makes, parameters are sharded over ``cp`` too, and those other than experts over ``ep``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..base.errors import ConfigError, nearest, one_line, require, shown
from ..base.torch_internals import expect
from ..config.files import load, read_file
from ..config.layout import DataConfig
from ..config.schema import Config
from ..scaling.copies_per_element import ROLES, Role
from .agreed_arguments import Call, agreed_call, shared_settings

expect("torch.distributed.distributed_c10d")


@dataclass(frozen=True)
class MeshOfOthers:
    """A mesh that others made, and what it says about the layout."""

    mesh: DeviceMesh
    roles: dict[str, Role]
    """The role of each axis, by its name in the mesh; in the mesh's order."""
    config: Config
    """The configuration, with the sizes of the mesh."""
    device: torch.device
    """This rank's."""


def read_mesh(
    mesh: DeviceMesh, config: Config | Mapping[str, Any] | str | Path | None, roles: Mapping[str, str] | None
) -> MeshOfOthers:
    """Check the arguments of :meth:`~paramp.distributed.context.ParallelContext.from_mesh`. Every rank calls it.

    Raises:
        ConfigError: on every rank, if a rank's arguments are invalid or the ranks' differ.
    """
    if not dist.is_initialized():
        raise ConfigError(
            "mesh: torch.distributed is not initialised, so a mesh has no process groups; "
            "call torch.distributed.init_process_group and make the mesh after it"
        )
    return agreed_call("ParallelContext.from_mesh", lambda: _read(mesh, config, roles))


def _read(mesh: DeviceMesh, config: Any, roles: Any) -> tuple[MeshOfOthers, Call]:
    if not isinstance(mesh, DeviceMesh):
        raise ConfigError(
            f"mesh: got {shown(mesh)}, expected a torch.distributed.device_mesh.DeviceMesh; "
            "of an object that holds several meshes, such as transformers', pass the one over which the parameters lie"
        )
    if not mesh.mesh_dim_names:
        raise ConfigError(
            f"mesh: got a mesh of {' x '.join(map(str, mesh.shape))} ranks without names, expected a name for each "
            'axis; pass init_device_mesh(..., mesh_dim_names=("dp", "tp"))'
        )
    found = _roles(mesh.mesh_dim_names, roles)
    _check_ranks(mesh)
    _check_groups(mesh)
    sizes = dict(zip(found.values(), mesh.shape, strict=True))
    checked = MeshOfOthers(mesh, found, _with_sizes(config, sizes), _device(mesh.device_type))
    axes = dict(zip(found, mesh.shape, strict=True))
    settings = {"mesh": axes, "ranks of the mesh": one_line(str(mesh.mesh.tolist())), "roles": found}
    return checked, Call(settings | shared_settings(checked.config))


def _roles(names: tuple[str, ...], given: Any) -> dict[str, Role]:
    """The role of each of the axes ``names``; ``given``: roles of some, as usual names."""
    given = {} if given is None else given
    example = f"roles={{{names[0]!r}: 'tp'}}"
    require(isinstance(given, Mapping), "roles", given, f"a dict from axes to usual names, such as {example}")
    usual = ", ".join(ROLES)
    for name, role in given.items():
        require(name in names, "roles", name, f"an axis of the mesh: {', '.join(names)}{nearest(name, names)}")
        known = isinstance(role, str) and role in ROLES
        require(known, f"roles[{name!r}]", role, f"one of {usual}{nearest(role, ROLES)}")
    found: dict[str, Role] = {}
    for name in names:
        usual_name = given.get(name, name)
        if usual_name not in ROLES:
            raise ConfigError(
                f"mesh: got the axis {name!r}, expected one of {usual}{nearest(name, ROLES)}; "
                f"give its role, such as roles={{{name!r}: 'tp'}}"
            )
        role = ROLES[usual_name]
        first = name if name in found else next((other for other in found if found[other] == role), None)
        if first is not None:
            same = ", ".join(usual for usual in ROLES if ROLES[usual] == role)
            raise ConfigError(
                f"mesh: got the axes {first!r} and {name!r}, which have the same role ({same}), expected one axis of "
                "each role; make them one axis of the mesh, or give one of them another role with roles={...}"
            )
        found[name] = role
    return found


def _check_ranks(mesh: DeviceMesh) -> None:
    ranks, world_size = sorted(mesh.mesh.flatten().tolist()), dist.get_world_size()
    if ranks != list(range(world_size)):
        missing = "" if mesh.get_coordinate() is not None else f" without this rank, {dist.get_rank()}"
        raise ConfigError(
            f"mesh: got a mesh of the ranks {one_line(str(ranks))}{missing}, expected all {world_size} ranks of the "
            "world; pass the whole mesh rather than a part of it such as mesh['tp']"
        )


def _check_groups(mesh: DeviceMesh) -> None:
    """Refuse the ``fake`` groups that some frameworks give to axes on which they do not communicate."""
    for index, name in enumerate(mesh.mesh_dim_names or ()):
        backend = dist.get_backend(mesh.get_group(index))
        if backend == "fake" != dist.get_backend() and mesh.size(index) > 1:
            raise ConfigError(
                f"mesh: the process group of the axis {name!r} has the backend 'fake', which moves no data; "
                "pass the mesh over which the parameters lie"
            )


def _device(kind: str) -> torch.device:
    """This rank's device of a mesh of devices of this ``kind``."""
    if kind not in ("cpu", "cuda"):
        raise ConfigError(f"mesh: got a mesh of the device {kind!r}, expected 'cpu' or 'cuda'")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigError("mesh: got a mesh of the device 'cuda', but torch sees no GPU; make a mesh of 'cpu'")
    try:
        dist.distributed_c10d._get_default_group()._get_backend(torch.device(kind))
    except RuntimeError:
        raise ConfigError(
            f"mesh: got a mesh of the device {kind!r}, for which the world's process group "
            f"({dist.get_backend_config()}) has no backend; make the mesh of the device that it has one for"
        ) from None
    return torch.device("cuda", torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def _with_sizes(source: Any, sizes: Mapping[Role, int]) -> Config:
    """The configuration ``source`` with the ``sizes`` of the mesh; a ConfigError if it has others."""
    replicate, shard = sizes.get("replicate", 1), sizes.get("shard", 1)
    data = {"replicate": replicate, "shard": shard}
    wanted = {
        "tensor": {"size": sizes.get("tensor", 1)},
        "pipeline": {"size": sizes.get("stage", 1)},
        "context": {"size": sizes.get("context", 1)},
        "data": data,
    }
    config = _filled(source, wanted)
    parallel = config.parallel
    names = "tensor", "pipeline", "context"
    given = {**{name: getattr(parallel, name) for name in names}, "data": parallel.data_axes}
    for table, keys in wanted.items():
        for key, size in keys.items():
            value = getattr(given[table], key)
            if value != size:
                path = table if key == "size" or (key == "replicate" and shard == 1) else f"{table}.{key}"
                raise ConfigError(
                    f"parallel.{path}: got {shown(value)}, but the mesh has {size} rank(s) there; leave it out, "
                    "because the mesh gives the sizes"
                )
    return config


def _filled(source: Any, wanted: Mapping[str, Mapping[str, int]]) -> Config:
    """The configuration ``source`` with the sizes ``wanted`` where it gives none."""
    if isinstance(source, Config):  # a size of 1 is one that nobody gave
        given = source.parallel
        axes = {name: getattr(given, name) for name in wanted if name != "data"}
        axes = {name: replace(axis, **wanted[name]) if axis.size == 1 else axis for name, axis in axes.items()}
        data = _with_data_sizes(given.data, wanted["data"])
        return replace(source, parallel=replace(given, data=data, **axes))
    tree = read_file(source) if isinstance(source, (str, Path)) else {} if source is None else source
    tables = tree.get("parallel") if isinstance(tree, Mapping) else tree
    if not isinstance(tables, Mapping | None):
        return load(tree)  # raises, or its sizes are checked
    filled: dict[str, Any] = {}
    for name, sizes in wanted.items():
        table = (tables or {}).get(name)
        if isinstance(table, DataConfig):
            filled[name] = _with_data_sizes(table, sizes)
        elif isinstance(table, Mapping):
            filled[name] = {key: size for key, size in sizes.items() if table.get(key, "auto") == "auto"}
        elif table in (None, "auto"):
            filled[name] = _plain_data(sizes) if name == "data" else sizes
    return load(tree, {"parallel": filled})


def _with_data_sizes(data: int | str | DataConfig, sizes: Mapping[str, int]) -> Any:
    """The value ``data`` of ``parallel.data`` with ``sizes`` where it gives none."""
    if isinstance(data, DataConfig):
        replicate = sizes["replicate"] if data.replicate == "auto" else data.replicate
        return replace(data, replicate=replicate, shard=sizes["shard"] if data.shard == 1 else data.shard)
    return _plain_data(sizes) if data == "auto" else data


def _plain_data(sizes: Mapping[str, int]) -> int | DataConfig:
    """The value of ``parallel.data``: a table only if parameters are sharded."""
    return DataConfig(replicate=sizes["replicate"], shard=sizes["shard"]) if sizes["shard"] > 1 else sizes["replicate"]
