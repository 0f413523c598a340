"""Local tensors of DTensors and back, counters of changes in place, dense memory, real parts of complex numbers."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import torch

from .errors import ConfigError
from .torch_internals import expect, take

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

expect("torch._debug_has_internal_overlap")

LOCAL_SHARDS = "_paramp_local_shards"
"""The attribute of a module that computes on local tensors: ``{parameter: whether its gradient is partial}``."""
PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
"""The classes of most tensors, of which nothing needs to be asked."""


def is_dtensor(value: Any) -> TypeGuard[DTensor]:
    """Whether ``value`` is a DTensor. Does not import ``torch.distributed.tensor``: no DTensor exists before that."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The local tensor of a DTensor (same storage, any dims and dtype); a plain tensor is returned unchanged."""
    return tensor if type(tensor) in PLAIN or not is_dtensor(tensor) else tensor._local_tensor


def full_tensor(value: Any) -> Any:
    """Gather a DTensor, a collective of its mesh; any other value is returned unchanged."""
    return value.full_tensor() if is_dtensor(value) else value


def version(tensor: torch.Tensor) -> int:
    """A counter that grows with every in-place change of ``tensor`` or of its local tensor.

    Always 0 for inference tensors, which have none, and which only code in inference mode can change.
    """
    own = 0 if tensor.is_inference() else tensor._version
    # autograd's accumulation changes only the DTensor's counter, our kernels only the local tensor's
    return own if type(tensor) in PLAIN or not is_dtensor(tensor) else own + version(tensor._local_tensor)


@contextmanager
def refusing_changes(named: Iterable[tuple[str, torch.Tensor]], error: Callable[[str], Exception]) -> Iterator[None]:
    """A context that raises ``error`` of its name for one of the tensors that was changed in place inside."""
    before = [(name, tensor, version(tensor)) for name, tensor in named]
    yield
    for name, tensor, then in before:
        if version(tensor) != then:
            raise error(name)


def resolved(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, or a dense copy if its memory does not hold its elements: if several share some, as after
    ``expand()``, so that it could not be written to; or if they are to be conjugated or negated yet."""
    tensor = tensor.resolve_conj().resolve_neg()
    return tensor.contiguous() if torch._debug_has_internal_overlap(tensor) == 1 else tensor


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``; a complex one with its real and imaginary parts along a last dim.

    In the same memory, unless it is to be conjugated yet.
    """
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def is_inexact(tensor: torch.Tensor) -> bool:
    """Whether the elements are floating-point or complex numbers."""
    return tensor.is_floating_point() or tensor.is_complex()


def wrap(
    part: torch.Tensor,
    like: DTensor,
    *,
    placements: Sequence[Placement] | None = None,
    shape: torch.Size | None = None,
) -> DTensor:
    """Make a DTensor with the local tensor ``part`` (any dims and dtype; not copied), on the mesh of ``like``.

    ``placements`` and ``shape`` are the DTensor's. None: those of ``like``.
    """
    from torch.distributed.tensor import DTensor

    if placements is None and shape is None and not torch.compiler.is_compiling():
        return of_spec(part, like._spec)
    logical = like if shape is None else torch.empty(shape, device="meta")
    return DTensor.from_local(
        part,
        like.device_mesh,
        like.placements if placements is None else placements,
        run_check=False,
        shape=logical.shape,
        stride=logical.stride(),
    )


def resized(part: torch.Tensor, like: DTensor, dim: int) -> DTensor:
    """A DTensor laid out as ``like``, but for the size of ``dim``, which is not sharded: that of its local ``part``."""
    return wrap(part, like, shape=torch.Size([*like.shape[:dim], part.shape[dim], *like.shape[dim + 1 :]]))


def of_spec(part: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """Make a DTensor with the local tensor ``part`` (any dims and dtype; not copied), laid out as in ``spec``.

    It is as ``DTensor.from_local``, without the time that this takes to find the layout.
    """
    return cast("DTensor", _OfSpec.apply(part, spec))


class _OfSpec(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, spec: DTensorSpec) -> DTensor:
        from torch.distributed.tensor import DTensor

        ctx.set_materialize_grads(False)
        own = copy.copy(spec)  # DTensor's operators may write to it
        if part.dtype is not spec.tensor_meta.dtype:  # type: ignore[union-attr]
            own.tensor_meta = spec.tensor_meta._replace(dtype=part.dtype)  # type: ignore[union-attr]
        ctx.placements = own.placements
        return DTensor(part.view_as(part), own, requires_grad=part.requires_grad)

    @staticmethod
    def backward(ctx: Any, gradient: DTensor | None) -> tuple[torch.Tensor | None, None]:
        if gradient is None:
            return None, None
        if gradient.placements != ctx.placements:
            gradient = gradient.redistribute(placements=ctx.placements)
        return gradient.to_local(), None


def own_part(whole: torch.Tensor, like: DTensor, coordinate: Sequence[int] | None = None) -> torch.Tensor:
    """This rank's shard of the plain tensor ``whole``, as a view, by the mesh and placements of ``like``.

    Args:
        whole: any dtype; its shape is the global shape of ``like``.
        coordinate: the shard of the rank with these coordinates on the mesh. None: this rank's own.

    Raises:
        ConfigError: a placement of ``like`` is neither Shard, nor Replicate, nor the one of FSDP2 over tensor shards.
    """
    from torch.distributed.tensor import Replicate, Shard

    _StridedShard = take("torch.distributed.tensor.placement_types._StridedShard")

    def order(axis: int) -> tuple[bool, int]:
        # FSDP2 shards what tensor ranks hold, but its axes come first in the mesh: _StridedShard says so.
        strided = isinstance(like.placements[axis], _StridedShard)
        return strided, -axis if strided else axis

    part = whole
    for axis in sorted(range(len(like.placements)), key=order):
        placement = like.placements[axis]
        if isinstance(placement, Shard | _StridedShard):
            size = like.device_mesh.size(axis)
            rank = like.device_mesh.get_local_rank(axis) if coordinate is None else coordinate[axis]
            chunks = part.chunk(size, placement.dim)  # a dim shorter than the axis gives fewer chunks than ranks
            part = chunks[rank] if rank < len(chunks) else part.narrow(placement.dim, 0, 0)
        elif not isinstance(placement, Replicate):
            raise ConfigError(
                f"plan: got the placement {placement} for a weight on meta, expected Shard or Replicate; "
                "build the model on the CPU"
            )
    return part


def forget_sharding_decisions() -> None:
    """Clear DTensor's caches. Called before the process groups of a mesh are destroyed.

    The cache keys hold only the ranks and dim names of a mesh. A later launch with an equal mesh would get an entry of
    this one, whose process groups no longer exist.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return
    names = ("_collective_utils", "_redistribute", "_sharding_prop", "DTensor._op_dispatcher")
    collectives, redistribute, propagation, dispatcher = (take(f"torch.distributed.tensor.{name}") for name in names)

    def clear(owner: Any, name: str, method: str = "__call__") -> None:
        getattr(getattr(owner, name, None), method, lambda: None)()  # some versions of torch lack some of them

    # As debug._clear_sharding_prop_cache, whose module imports the inductor: 0.8 s at the end of a run.
    clear(dispatcher.sharding_propagator, "propagate_op_sharding", "cache_clear")
    clear(torch._C, "_clear_DTensor_sharding_propagator_cache")
    # These caches keep meshes alive, and so their process groups and the threads of those groups.
    clear(redistribute, "clear_redistribute_planner_cache")
    clear(redistribute, "_gen_transform_infos", "cache_clear")
    clear(redistribute, "_gen_transform_infos_non_cached", "cache_clear")
    clear(getattr(collectives, "MeshTopoInfo", None), "build_from_mesh", "cache_clear")
    clear(getattr(propagation, "ShardingPropagator", None), "_propagate_tensor_meta_cached", "cache_clear")
