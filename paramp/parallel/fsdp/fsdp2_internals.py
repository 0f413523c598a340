"""torch's records of the parameters that FSDP2 shards: private attributes, which differ from version to version.

What they are, and which version has which: :mod:`paramp.base.torch_internals`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

from ...base.dtensor import is_dtensor, local, version
from ...base.torch_internals import GROUP, PARAM, STATE, expect, take


def reset(root: Any) -> None:
    """Set torch's records of the batch in ``root``, which failed, to those of none."""
    if hasattr(root, "reset_iter_state"):  # torch 2.13
        root.reset_iter_state()
        return
    TrainingState = take("torch.distributed.fsdp._fully_shard._fsdp_common.TrainingState")

    state = root._get_fsdp_state()
    if state._device.type == "cuda":
        torch.cuda.synchronize(state._device)
    shared, communication = state._state_ctx, state._comm_ctx
    shared.iter_forward_root, shared.post_backward_final_callback_queued = None, False
    communication.all_gather_state = communication.reduce_scatter_state = None
    communication.post_forward_order.clear()
    for one in shared.all_states:
        one._training_state = TrainingState.IDLE
        for group in groups_of(one):
            work = group._all_gather_result and group._all_gather_result.all_gather_work
            if isinstance(work, dist.Work):
                work.wait()
            group._all_gather_result = group._post_reduce_event = group._all_reduce_state = None
            group._reshard_after_forward_event = group._partial_reduce_output = None
            group._post_forward_indices.clear()
            group._training_state = TrainingState.IDLE


@functools.cache
def _check_internals() -> None:
    expect(STATE, GROUP, PARAM)


def groups(unit: Any) -> list[Any]:
    """torch's groups of parameters of a unit."""
    _check_internals()
    return groups_of(unit._get_fsdp_state())


def groups_of(state: Any) -> list[Any]:
    """torch's groups of parameters that are gathered together."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]  # torch 2.11


def drop_prefetched(group: Any) -> None:
    """Drop an all-gather that no forward or backward has used, whose values may be old at the next one."""
    result = group._all_gather_result
    if result is not None:
        if isinstance(result.all_gather_work, dist.Work):
            result.all_gather_work.wait()
        if result.all_gather_event is not None:
            # Not of torch.accelerator's stream, whose wait_event does not wait for a torch.cuda.Event.
            group.device_handle.current_stream().wait_event(result.all_gather_event)
        group._all_gather_result = None


def outside_inference_mode(gather: Callable[[], None]) -> None:
    """Call ``gather``. In the first batch it makes the gathered parameters of later ones too, which are trained."""
    if not torch.is_inference_mode_enabled():
        gather()
        return
    with torch.inference_mode(False), torch.no_grad():
        gather()


def held(one: Any) -> Any:
    """The parameter that the module of torch's record ``one`` has now."""
    return one._module_info.module._parameters[one._module_info.param_name]


@torch.no_grad()
def padded(shard: torch.Tensor, size: int) -> torch.Tensor:
    """``shard`` as 1-dim memory of ``size`` elements; a copy if the memory of ``shard`` has no padding behind it."""
    start, available = shard.storage_offset(), shard.untyped_storage().nbytes() // shard.itemsize
    if shard.numel() and available >= start + size:
        return shard.as_strided((size,), (1,))
    copied = shard.new_zeros(size)
    copied[: shard.numel()].copy_(shard.reshape(-1))
    return copied


def gathered(records: Iterable[Any], parameter: torch.Tensor) -> torch.Tensor:
    """The gathered parameter that modules have in a batch; ``parameter`` if none of ``records`` has gathered it."""
    found = (one for one in records if held(one) is parameter and has_been_gathered(one))
    return next((one._unsharded_param for one in found), parameter)


def states_of_gathered(unit: Any) -> dict[Any, tuple[int, int]]:
    """By torch's record, what differs once a gathered parameter of ``unit``, which runs, was changed in place or given
    another ``.data``; not after a change in place of its ``.data``, which nothing counts."""
    found = {one: one._unsharded_param for group in groups(unit) for one in group.fsdp_params}
    return {record: (version(whole), local(whole).data_ptr()) for record, whole in found.items()}


def replaced(unit: Any) -> list[Any]:
    """torch's records of ``unit`` whose module has another parameter than the gathered one and its shard."""
    return [
        one
        for group in groups(unit)
        for one in group.fsdp_params
        if (now := one._module_info.module._parameters.get(one._module_info.param_name)) is not one.sharded_param
        and now is not getattr(one, "_unsharded_param", None)
    ]


def differs_from_shard(one: Any) -> bool:
    """Whether this rank's part of the gathered parameter of torch's record ``one`` has other values than its shard."""
    whole, shard = local(one._unsharded_param).detach(), local(one.sharded_param).detach()
    dim, mesh = one.fsdp_placement.dim, one.mesh_info
    parts = whole.chunk(mesh.shard_mesh_size, dim)
    own = parts[mesh.shard_mesh_rank] if mesh.shard_mesh_rank < len(parts) else whole.narrow(dim, 0, 0)
    # By their bits, since a weight may be NaN.
    return not torch.equal(own.contiguous().view(torch.uint8), shard.to(own.dtype).contiguous().view(torch.uint8))


def drop_gradients(records: Iterable[Any]) -> None:
    """Drop the gradients of gathered parameters, which are not reduced yet."""
    for one in records:
        if _adds_up_apart(one):
            one.unsharded_accumulated_grad = None
        if has_been_gathered(one):
            one._unsharded_param.grad = None


def has_been_gathered(one: Any) -> bool:
    """Whether torch has made the gathered parameter of its record ``one``."""
    return hasattr(one, "_unsharded_param")


def _adds_up_apart(one: Any) -> bool:
    """Whether torch adds gradients up apart from ``.grad``, as up to 2.14; from 2.15 on autograd does in ``.grad``."""
    return not isinstance(getattr(type(one), "unsharded_accumulated_grad", None), property)


def gradient_of(one: Any) -> Any:
    """The gradient of a gathered parameter that is not reduced over data ranks yet; None if there is none."""
    accumulated = one.unsharded_accumulated_grad
    return one._unsharded_param.grad if accumulated is None else accumulated


def _placements(one: Any) -> Any:
    """The placements of the gathered parameter, a DTensor, on the tensor axis."""
    return (one._unsharded_dtensor_spec if hasattr(one, "_unsharded_dtensor_spec") else one._tp_spec).placements


def is_mismatched(one: Any) -> bool:
    """Whether the gradient has other placements on the tensor axis than the parameter."""
    gradient = gradient_of(one)
    return is_dtensor(gradient) and gradient.placements != _placements(one)


def zeros(one: Any) -> torch.Tensor:
    """A gradient of zeros for a gathered parameter, of the dtype in which autograd would give it one."""
    return torch.zeros_like(one._unsharded_param, dtype=one._unsharded_param.grad_dtype)


def is_added_up(one: Any) -> bool:
    """Whether earlier backwards have left a gradient in the dtype in which it is reduced, apart from ``.grad``."""
    return _adds_up_apart(one) and one.unsharded_accumulated_grad is not None


def to_reduce_dtype(one: Any) -> None:
    """Bring a gradient to the dtype in which it is reduced, with what earlier backwards have added up."""
    if _adds_up_apart(one):
        one.accumulate_unsharded_grad_if_needed()
        one.to_accumulated_grad_if_needed()
        return
    parameter, dtype = one._unsharded_param, one.unsharded_grad_dtype
    gradient, parameter.grad = parameter.grad, None
    parameter.grad_dtype = dtype  # else torch refuses a gradient of another dtype
    parameter.grad = gradient.to(dtype)


def sum_over_tensor_ranks(one: Any, dtype: torch.dtype | None) -> None:
    """Bring a gradient to the parameter's placements on the tensor axis; None: sum in the gradient's own ``dtype``."""
    gradient = gradient_of(one)
    wide = gradient.dtype if dtype is None else torch.promote_types(gradient.dtype, dtype)
    summed = gradient.to(wide).redistribute(placements=_placements(one)).to(gradient.dtype)
    if is_added_up(one):
        one.unsharded_accumulated_grad = summed
    else:
        one._unsharded_param.grad = summed


def take_gradient(one: Any) -> torch.Tensor | None:
    """The local gradient of a gathered parameter, which torch has not cast, and drop it there; None if it has none.

    Raises:
        RuntimeError: it is not complete over tensor ranks.
    """
    if not has_been_gathered(one):
        return None
    if is_mismatched(one):
        raise RuntimeError(
            f"the gradient of a parameter of {type(one._module_info.module).__name__} has the placements "
            f"{gradient_of(one).placements}, expected those of the parameter, because reproducible is set; give the "
            "layer a style of the tensor plan"
        )
    gradient, one._unsharded_param.grad = one._unsharded_param.grad, None
    return None if gradient is None else local(gradient)
