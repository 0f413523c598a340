"""From the gradients of a backward to complete ones: redistributed to their parameters' placements, summed over the
copies of tied parameters, checked and unscaled."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist

from ..base.collectives import sum_
from ..base.dtensor import is_dtensor, local, resolved, version, wrap
from ..base.torch_internals import expect
from .copies_per_element import TiedParameter, World, current_world

expect("torch._foreach_mul_", "torch._foreach_norm", "torch._amp_foreach_non_finite_check_and_unscale_")

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement


def align_gradients(parameters: Iterable[torch.Tensor], reduce_dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    """Redistribute each DTensor gradient to its parameter's placements, in ``.grad``.

    DTensor keeps the placements that the backward produced: vocabulary-parallel embeddings get replicated gradients,
    norms under sequence parallelism get partial sums. Partial sums are reduced with one collective for each mesh axis
    and dtype; a replicated gradient of a sharded parameter is sliced without a collective.

    Args:
        reduce_dtype: accumulation dtype. None: the gradients' own dtype.

    Returns:
        The unsliced local gradients that were sliced: an overflow in a part that this rank drops counts too.
    """
    mismatched = [parameter for parameter in parameters if _is_mismatched(parameter)]
    if not mismatched:
        return []
    partial: dict[tuple[DeviceMesh, int], list[torch.Tensor]] = defaultdict(list)
    summed = [_summed_placements(cast("DTensor", parameter.grad), partial) for parameter in mismatched]
    for (mesh, axis), chunks in partial.items():
        sum_(chunks, mesh.get_group(axis), reduce_dtype)
    whole = []
    for parameter, placements in zip(mismatched, summed, strict=True):
        gradient, wanted = cast("DTensor", parameter.grad), cast("DTensor", parameter).placements
        if placements != wanted:
            whole.append(local(gradient))
        parameter.grad = wrap(local(gradient), gradient, placements=placements).redistribute(placements=wanted)
    return whole


def _is_mismatched(parameter: torch.Tensor) -> bool:
    gradient = parameter.grad
    return is_dtensor(gradient) and is_dtensor(parameter) and gradient.placements != parameter.placements


def _summed_placements(
    gradient: DTensor, partial: dict[tuple[DeviceMesh, int], list[torch.Tensor]]
) -> tuple[Placement, ...]:
    """The placements of ``gradient`` after its partial sums are reduced. Tensors to reduce are added to ``partial``.

    Averages are scaled beforehand. Other reductions, such as maxima, stay partial and are left to DTensor.
    """
    from torch.distributed.tensor import Partial, Replicate

    placements = list(gradient.placements)
    for axis, placement in enumerate(placements):
        if isinstance(placement, Partial):
            if placement.reduce_op not in ("sum", "avg"):
                break
            values = local(gradient)
            if placement.reduce_op == "avg":
                values.div_(gradient.device_mesh.size(axis))
            partial[gradient.device_mesh, axis].append(values)
            placements[axis] = Replicate()
    return tuple(placements)


def sum_tied_gradients(
    context: World,
    parameters: Iterable[torch.Tensor],
    reduce_dtype: torch.dtype | None = None,
    *,
    complete: bool = False,
) -> None:
    """Replace the gradient of each tied parameter among ``parameters`` by the sum over its copies.

    A gradient that already holds the sum is not changed. A copy without a gradient counts as zero, and gets the sum;
    if no copy has one, all keep None.

    Args:
        reduce_dtype: the dtype of the sums. None: the gradients' own.
        complete: every copy has a gradient. Else the ranks ask each other, and the host waits for it.
    """
    if not context.ties:
        return
    wanted = {id(parameter) for parameter in parameters}
    by_group: dict[dist.ProcessGroup, list[TiedParameter]] = defaultdict(list)
    for tie in context.ties:
        if id(tie.parameter) in wanted and not _is_summed(tie):
            by_group[tie.group].append(tie)
    for group, ties in by_group.items():
        present = ties if complete else _with_gradients(ties, group)
        sum_([_dense_gradient(tie.parameter) for tie in present], group, reduce_dtype)
        mark_tied_sums(present)


def _with_gradients(ties: list[TiedParameter], group: dist.ProcessGroup) -> list[TiedParameter]:
    """Those of ``ties`` that have a gradient on any rank of ``group``; a collective."""
    counts = torch.tensor([float(tie.parameter.grad is not None) for tie in ties])
    counts = counts.to(local(ties[0].parameter).device)
    dist.all_reduce(counts, group=group)
    return [tie for tie, count in zip(ties, counts.tolist(), strict=True) if count]


def _dense_gradient(parameter: torch.Tensor) -> torch.Tensor:
    """The local gradient of ``parameter``, to be summed in place; zeros are made if it has none."""
    gradient = writable_gradient(parameter)
    if gradient is None:
        parameter.grad = gradient = torch.zeros_like(parameter)
    elif gradient.layout is not torch.strided:  # other stages' may be dense, and so is the sum
        parameter.grad = gradient = gradient.to_dense()
    return local(gradient)


def writable_gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    """The gradient of ``parameter``, which is replaced by a dense copy if elements of it share memory."""
    gradient = parameter.grad
    if gradient is not None and not is_dtensor(gradient) and gradient.layout is torch.strided:
        dense = resolved(gradient)
        if dense is not gradient:
            parameter.grad = gradient = dense
    return gradient


def mark_tied_sums(ties: Iterable[TiedParameter]) -> None:
    """Record that the gradients of ``ties`` hold their sums; call it again after scaling one in place."""
    for tie in ties:
        gradient = tie.parameter.grad
        tie.summed = None if gradient is None else (gradient, version(gradient))


def _is_summed(tie: TiedParameter) -> bool:
    gradient = tie.parameter.grad
    return tie.summed is not None and tie.summed[0] is gradient and tie.summed[1] == version(gradient)


@torch.no_grad()
def unscale_and_check_(gradients: Iterable[torch.Tensor], inv_scale: torch.Tensor, found_inf: torch.Tensor) -> None:
    """Multiply plain dense ``gradients`` by ``inv_scale`` in place; set ``found_inf`` to 1 if an element is not finite.

    Each element is checked separately, before the multiplication, so large finite values whose sum would overflow do
    not count. One fused pass for each device and dtype, two for bfloat16 on a GPU.

    Args:
        gradients: of any shape, device and floating-point or complex dtype.
        inv_scale, found_inf: 0-dim float32.
    """
    buckets: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = defaultdict(list)
    for gradient in gradients:
        memory = gradient.conj() if gradient.is_conj() else gradient  # of which a real factor scales either
        real = torch.view_as_real(memory) if memory.is_complex() else memory  # torch's kernel takes no others
        buckets[real.device, real.dtype].append(real)
    for (device, dtype), bucket in buckets.items():
        flag = torch.zeros((), dtype=torch.float32, device=device)
        factor = inv_scale.to(device, non_blocking=True)
        if dtype is torch.bfloat16 and device.type != "cpu":  # torch's kernel has no bfloat16 on GPUs
            _unscale_bfloat16_(bucket, flag, factor)
        else:
            torch._amp_foreach_non_finite_check_and_unscale_(bucket, flag, factor)
        found_inf.copy_(torch.maximum(found_inf, flag.to(found_inf.device, non_blocking=True)))


def _unscale_bfloat16_(gradients: Sequence[torch.Tensor], flag: torch.Tensor, factor: torch.Tensor) -> None:
    """torch's ``_amp_foreach_non_finite_check_and_unscale_`` for bfloat16: two fused passes, whatever their number.

    ``factor`` is rounded to bfloat16, as torch rounds it there; powers of two are exact.
    """
    if present := [gradient for gradient in gradients if gradient.numel()]:
        largest = torch._foreach_norm(present, math.inf)  # one of its elements, or NaN
        flag.copy_(torch.maximum(flag, ~torch.stack(largest).isfinite().all()))
        torch._foreach_mul_(present, factor.bfloat16())  # fused for a factor of their dtype only


@torch.no_grad()
def complete_and_check(parameters: Sequence[torch.Tensor], found_inf: torch.Tensor) -> None:
    """Redistribute each gradient to its parameter's placements, and sum those of tied parameters; in place.

    Args:
        found_inf: 0-dim float32; set to 1 if an element of a gradient that this rank drops is not finite. The elements
            that it keeps are not checked here; use :func:`unscale_and_check_`.
    """
    unscale_and_check_(align_gradients(parameters), torch.ones_like(found_inf), found_inf)
    context = current_world()
    if context is not None:
        sum_tied_gradients(context, parameters)


def dense_gradients(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The local dense gradients of ``parameters``; of sparse gradients, the values."""
    dense = []
    for parameter in parameters:
        gradient = writable_gradient(parameter)
        if gradient is not None and gradient.is_sparse:
            # Entries of the same index are summed; in fp16 the sum may overflow even if the entries do not.
            parameter.grad = gradient = gradient.coalesce()
            dense.append(gradient._values())
        elif gradient is not None:
            dense.append(local(gradient))
    return dense
