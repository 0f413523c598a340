"""The process groups of one rank: only those that it is in, so that their number does not grow with the world.

Groups come in families: disjoint sets of ranks, at most one of which has this rank, such as the groups along one axis
of the mesh. torch's ``DeviceMesh`` has every rank of the world call ``new_group`` for every group of a family. Here a
rank makes one call for a family:

- ``split_group``, by every rank of the world, if the world's communicator can be split (NCCL's, bound to a device) and
  is its only backend;
- else ``new_group(use_local_synchronization=True)``, by the members of the group only.

The members wait for each other, so every rank makes its groups in the same order of families.
"""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

from ..base.replaced_in_torch import patched
from ..base.torch_internals import expect

expect("torch.distributed.distributed_c10d", "torch.distributed.device_mesh.DeviceMesh")


def family_along(mesh: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    """The groups of ranks whose coordinates differ on ``dims`` of ``mesh`` only.

    Args:
        mesh: int, any dims: ranks.
        dims: ascending.

    Returns:
        2-dim int, groups x ranks of a group, both in the order of the mesh.
    """
    size = math.prod(mesh.shape[dim] for dim in dims)
    return mesh.movedim(list(dims), list(range(mesh.ndim - len(dims), mesh.ndim))).reshape(-1, size)


class ProcessGroups:
    """Makes this rank's process groups in one context, and destroys them."""

    def __init__(self, prefix: str) -> None:
        """``prefix``: of the groups' names; the same on every rank, and no other context's in the process."""
        self._prefix = prefix
        self._made: list[dist.ProcessGroup] = []
        self._names: Counter[str] = Counter()
        self._shared: list[tuple[torch.Tensor, str | None, dist.ProcessGroup]] = []

    def make(
        self, name: str, family: torch.Tensor, backend: str | None = None, *, shared: bool = True
    ) -> dist.ProcessGroup | None:
        """The group of ``family`` that has this rank; None if none has.

        Every rank calls it with the same families in the same order. Families with equal groups share one process
        group, and the group of all ranks is the world's.

        Args:
            name: of the family, for logs; others may have it too.
            family: 2-dim int on the CPU, groups x ranks of a group; disjoint, the ranks of a group ascending.
            backend: None: the world's.
            shared: False: a group of its own, such as for a thread.
        """
        if shared and backend is None and family.shape == (1, dist.get_world_size()):
            return dist.group.WORLD
        for known, its_backend, group in self._shared:
            if shared and its_backend == backend and torch.equal(known, family):
                return group
        mine = [int(rank) for rank in family[(family == dist.get_rank()).any(dim=1)].flatten()]
        splits = backend is None and _world_splits()
        if not (mine or splits):
            return None
        # By default the name has the number of groups that this process is in. That differs between ranks, for example
        # if a parameter is tied between some stages only, and ranks that call one group by two names wait forever:
        # gloo's to connect, NCCL's to be destroyed (pytorch #190396).
        # Families of one name differ in the key, equal on every rank, the groups of a family in their first rank, and
        # several groups of the same ranks in their number.
        key = zlib.crc32(str(family.tolist()).encode())
        full_name = f"{self._prefix}/{name}/{key:x}/{mine[0] if mine else 'none'}"
        self._names[full_name] += 1
        if (number := self._names[full_name]) > 1:
            full_name = f"{full_name}/{number}"
        with patched(c10d, "_process_group_name", lambda *_, **__: full_name):
            if splits:
                made = dist.split_group(split_ranks=family.tolist(), group_desc=name)
            else:
                with patched(c10d._get_default_group(), "bound_device_id", None):  # else it is split from the world
                    made = dist.new_group(mine, backend=backend, use_local_synchronization=True, group_desc=name)
                if dist.get_backend(made) == "gloo":
                    # A member that is connected and destroys the group at once would break the connection of one that
                    # is still in its own call: "Gloo connectFullMesh failed with ... Connection closed by peer".
                    dist.barrier(made)
        if made is not None:
            self._made.append(made)
            if shared:
                self._shared.append((family, backend, made))
        return made

    def take_from(self, mesh: DeviceMesh, *, world: bool) -> None:
        """Remove the groups, and that of the ``world``, from those that ``mesh`` holds.

        torch 2.11 and 2.12 never free the mesh of a DTensor that was computed with. Its groups would keep their
        threads, which poll.
        """
        registry = mesh._get_root_mesh()._pg_registry
        for name, group in list(registry.items()):
            if world or any(group is one for one in self._made):
                del registry[name]

    def destroy(self) -> None:
        """Destroy the groups, the last one first: NCCL's members wait for each other in this too."""
        self._shared.clear()
        while self._made:
            dist.destroy_process_group(self._made.pop())


def _world_splits() -> bool:
    """Whether groups are split from the world's communicator.

    With a device bound at ``init_process_group``, NCCL connects it at once; torch's ``new_group`` would then split it
    too, and wait for ranks that are not in the group.
    """
    world = c10d._get_default_group()
    if world.bound_device_id is None or not torch.accelerator.is_available():
        return False
    if len({part.rpartition(":")[2] for part in dist.get_backend_config().split(",")}) > 1:
        return False  # split_group would hand NCCL's options to gloo
    return bool(world._get_backend(world.bound_device_id).supports_splitting)
