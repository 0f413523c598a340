"""The gradient norm of the logical model: every element counts once, however many ranks hold it.

A rank sums |g|**p over the elements that it holds, each divided by the number of ranks that hold it; one all-reduce
over the world then gives the exact sum (:func:`norm_power`). If several pipeline stages hold a parameter, one copy
counts, with the summed gradient.
"""

import functools
import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..base import sizes
from ..base.collectives import gather_objects
from ..base.dtensor import local
from ..base.errors import require
from ..base.torch_internals import expect
from .grad_reduce import align_gradients, mark_tied_sums, sum_tied_gradients, writable_gradient
from .replicas import World, current_world, num_replicas

expect("torch._foreach_mul_", "torch._foreach_norm", "torch._amp_foreach_non_finite_check_and_unscale_")

Sums = Callable[[torch.Tensor], torch.Tensor]
"""The sum of squares of each row of a half-precision tensor, 2-dim with rows of ``NORM_BLOCK`` elements; 1-dim fp32."""


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float | str = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    context: World | None = None,
) -> torch.Tensor:
    """Scale the gradients of the logical model down to ``max_norm``; ``torch.nn.utils.clip_grad_norm_`` for shards.

    Every rank calls it with its own parameters, in any mix of plain tensors and DTensors. Gradients are first
    redistributed to their parameters' placements, and those of tied parameters summed. A plain parameter counts as
    replicated over ``dp`` and ``tp``, and as a different one on each ``pp`` rank of ``context``.

    Args:
        parameters: this rank's parameters; those without a gradient are skipped.
        max_norm: the largest norm allowed, above 0.
        norm_type: p of the p-norm, above 0; ``math.inf`` for the largest magnitude. A string that ``float()`` accepts,
            such as ``"inf"``, counts as that number.
        error_if_nonfinite: raise, on every rank, if the norm is not finite. The host waits for it.
        foreach: ignored, as the foreach path is always used; here for torch's signature.
        context: None: the current one.

    Returns:
        The norm before clipping, 0-dim, float32 (float64 for float64 gradients), equal on every rank.

    Raises:
        ValueError: ``max_norm`` or ``norm_type`` is not above 0; or, on every rank, if any rank has a sparse gradient,
            or plain parameters in a world of several ranks and no context. On GPUs, whose hosts wait in the first call
            only, that rank raises at once and every rank in its next call.
        RuntimeError: the norm is not finite and ``error_if_nonfinite`` is set.
    """
    max_norm = positive("max_norm", max_norm, "a number above 0; do not call this to leave gradients as they are")
    norm_type = positive("norm_type", norm_type, "a number above 0, or math.inf")
    context = context or current_world()
    _failures.check()
    owned = _with_complete_gradients(parameters, context)
    gradients = [local(parameter.grad) for parameter in owned if parameter.grad is not None]
    device = gradients[0].device if gradients else (context.device if context else torch.device("cpu"))
    wide = any(gradient.dtype is torch.float64 for gradient in gradients)
    total = _agreed_norm(owned, gradients, norm_type, device, context).to(torch.float64 if wide else torch.float32)
    if error_if_nonfinite and not bool(total.isfinite()):
        raise RuntimeError(
            f"the gradient norm of order {norm_type} is {float(total)}, so it cannot be clipped; "
            "pass error_if_nonfinite=False to continue"
        )
    if gradients:
        torch._foreach_mul_(gradients, clip_coefficient(total, max_norm).to(gradients[0].device))
    if context is not None:  # the multiplication changed the versions, but they still hold their sums
        ids = {id(parameter) for parameter in owned}
        mark_tied_sums(tie for tie in context.ties if id(tie.parameter) in ids)
    return total


def _with_complete_gradients(
    parameters: torch.Tensor | Iterable[torch.Tensor], context: World | None
) -> list[torch.Tensor]:
    """The ``parameters`` with a gradient, after it is redistributed to their placements and ties are summed."""
    given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    align_gradients(given)
    if context is not None:
        sum_tied_gradients(context, given)
    return [parameter for parameter in given if writable_gradient(parameter) is not None]


def _agreed_norm(
    owned: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    norm_type: float,
    device: torch.device,
    context: World | None,
) -> torch.Tensor:
    """:func:`total_norm` of the local ``gradients`` of ``owned``; a ValueError on every rank if any rank has one."""
    problem, part = None, torch.zeros((), dtype=torch.float64, device=device)
    try:
        for gradient in gradients:
            if gradient.layout is not torch.strided:
                raise ValueError(
                    f"a gradient of shape {tuple(gradient.shape)} is sparse, which clip_grad_norm_ does not support; "
                    "call .to_dense() on it first"
                )
        norm_weights = [norm_weight(parameter, context) for parameter in owned]
        part = norm_power(gradients, norm_weights, norm_type, device)
    except ValueError as error:
        problem = error
    total, num_problems = _reduce(part, norm_type, failed=problem is not None)
    if isinstance(num_problems, torch.Tensor) and num_problems.device.type in DELAYED and _failures.keep(num_problems):
        if problem is not None:
            raise problem
    elif num_problems:  # so that no rank waits for one that has raised
        problems = gather_objects(problem and str(problem)) if dist.is_initialized() else [str(problem)]
        rank, message = next((rank, text) for rank, text in enumerate(problems) if text is not None)
        raise ValueError(f"rank {rank}: {message}" if len(problems) > 1 else message) from problem
    return total


DELAYED = {"cuda"}
"""The devices for whose values the host does not wait."""


class _Failures:
    """The number of ranks that failed in the last call, read in the next one. The first call in a world reads its own:
    most mistakes are in every call."""

    def __init__(self) -> None:
        self._world: weakref.ref[dist.ProcessGroup] | None = None
        self._read: Callable[[], float] | None = None

    def keep(self, num_failed: torch.Tensor) -> bool:
        """Keep the number, 0-dim, for :meth:`check`; False if the caller has to read it."""
        assert dist.group.WORLD is not None
        if self._world is None or self._world() is not dist.group.WORLD:
            self._world, self._read = weakref.ref(dist.group.WORLD), None
            return False
        self._read = _start_read(num_failed)
        return True

    def check(self) -> None:
        """Raise a ValueError if a rank failed in the last call."""
        read, self._read = self._read, None
        is_current = self._world is not None and dist.is_initialized() and self._world() is dist.group.WORLD
        if read is not None and is_current and read():
            raise ValueError(
                "a rank could not clip its gradients in the last call, so no rank clipped them right; the error of "
                "that rank names the gradient"
            )


_failures = _Failures()


def _start_read(value: torch.Tensor) -> Callable[[], float]:
    """Start to copy ``value``, 0-dim, to the host; the function returned waits for that copy only."""
    if value.device.type == "cpu":
        return value.clone().item
    copy = torch.empty((), dtype=value.dtype, pin_memory=True).copy_(value, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def read() -> float:
        copied.synchronize()
        return copy.item()

    return read


def positive(name: str, value: Any, allowed: str) -> float:
    """``value`` as a float; a ConfigError with ``name`` and ``allowed`` if it is not above 0."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    require(number > 0, name, value, allowed)
    return number


def clip_coefficient(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """The factor that scales ``norm`` down to ``max_norm``, at most 1 (torch's formula, with its 1e-6)."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


def norm_weight(parameter: torch.Tensor, context: World | None) -> float:
    """The norm weight of ``parameter``: 1 / the number of ranks that hold each of its elements."""
    for tie in context.ties if context else ():
        if tie.parameter is parameter and not tie.owner:
            return 0.0
    return 1.0 / num_replicas(parameter, context)


def total_norm(
    gradients: Sequence[torch.Tensor], norm_weights: Sequence[float], norm_type: float, device: torch.device
) -> torch.Tensor:
    """The norm over the world of the plain ``gradients`` of all ranks, by one all-reduce; 0-dim float64 on ``device``.

    Args:
        gradients: local tensors of any shape.
        norm_weights: the weight of the elements of each gradient of this rank (:func:`norm_weight`).
        norm_type: p of the p-norm; ``math.inf`` for the largest magnitude.
    """
    return _reduce(norm_power(gradients, norm_weights, norm_type, device), norm_type)[0]


def norm_power(
    gradients: Sequence[torch.Tensor],
    norm_weights: Sequence[float],
    norm_type: float,
    device: torch.device,
    sums: Sums | None = None,
) -> torch.Tensor:
    """This rank's part of the norm of plain ``gradients``: sum of weight x |g|**p, or the maximum for p = inf.

    Args:
        gradients, norm_weights, norm_type: as for :func:`total_norm`.
        sums: the sums of squares of long half-precision gradients on a CPU, for p = 2; None: torch's own norms.

    Returns:
        0-dim float64 on ``device``. In float64 the p-th powers of fp32 norms do not overflow for p below 8.
    """
    by_place: dict[tuple[torch.device, torch.dtype], list[int]] = defaultdict(list)
    for index, gradient in enumerate(gradients):
        if norm_weights[index] and gradient.numel():
            by_place[gradient.device, gradient.dtype].append(index)
    parts = [torch.zeros((), dtype=torch.float64, device=device)]
    for (where, _), indices in by_place.items():
        powers = _powers([gradients[index] for index in indices], norm_type, sums)
        counts = _on_device(tuple(norm_weights[index] for index in indices), where)
        parts.append((powers.amax() if math.isinf(norm_type) else (powers * counts).sum()).to(device))
    return torch.stack(parts).amax() if math.isinf(norm_type) else torch.stack(parts).sum()


@functools.lru_cache(maxsize=64)
def _on_device(values: tuple[float, ...], device: torch.device) -> torch.Tensor:
    """``values`` as float64; cached, because a copy to a GPU synchronises."""
    return torch.tensor(values, dtype=torch.float64, device=device)


def _powers(gradients: Sequence[torch.Tensor], norm_type: float, sums: Sums | None) -> torch.Tensor:
    """The sum of |g|**p of each gradient (all of one device and dtype), or its maximum for p = inf; float64."""
    if gradients[0].device.type == "cpu":
        return torch.stack([_blocked_power(gradient, norm_type, sums) for gradient in gradients])
    # Powers of fp16 elements do not overflow in fp32; those of large fp32 and bf16 elements would.
    wide = torch.float32 if gradients[0].dtype is torch.float16 else torch.float64
    norms = torch.stack(torch._foreach_norm(list(gradients), norm_type, dtype=wide)).double()
    return norms if math.isinf(norm_type) else norms.pow(norm_type)


NORM_BLOCK = 512
"""Elements of a CPU tensor that are summed in fp32."""
FAR = 2**23
"""Elements from which on a CPU tensor does not fit into the cache."""
REGIONS = 4
"""Parts in which such a tensor is read at the same time: a core fetches several streams of memory faster than one."""
LONG = 2**16
"""Elements from which :data:`Sums` are used: a call has its cost, and compiling takes seconds."""


def _blocked_power(gradient: torch.Tensor, norm_type: float, sums: Sums | None = None) -> torch.Tensor:
    """As :func:`_powers` for one gradient on the CPU, from the norms of short blocks, combined in float64.

    On a CPU torch sums all elements of a tensor in fp32, one after the other: for ten million elements the relative
    error of the 2-norm is 4e-4, of the 1-norm 1e-3. With blocks it is below 1e-7.
    """
    wide = torch.promote_types(gradient.dtype, torch.float32)
    flat = gradient.reshape(-1)
    if sums is not None and norm_type == 2 and flat.dtype is not wide and flat.numel() >= LONG:
        rest = flat.numel() % NORM_BLOCK
        power = sums(flat[: flat.numel() - rest].view(-1, NORM_BLOCK)).double().sum()
        if rest:
            power = power + _blocked_power(flat[-rest:], norm_type)
        return _finite_power(power, flat, norm_type)
    if flat.dtype is wide:
        norms = _block_norms(flat, norm_type)
    else:
        size = sizes.WIDEN_BLOCK
        scratch, chunks = torch.empty(min(size, flat.numel()), dtype=wide), flat.split(size)
        norms = torch.cat([_block_norms(scratch[: chunk.numel()].copy_(chunk), norm_type) for chunk in chunks])
    if math.isinf(norm_type):
        return norms.double().amax()
    power = norms.double().pow(norm_type).sum()
    return _finite_power(power, flat, norm_type) if wide is torch.float32 else power


def _finite_power(power: torch.Tensor, flat: torch.Tensor, norm_type: float) -> torch.Tensor:
    """``power``; computed again in float64 if it is not finite: powers of large finite elements overflow in fp32."""
    if power.isfinite():
        return power
    return torch.linalg.vector_norm(flat.double(), norm_type).pow(norm_type)


def _block_norms(flat: torch.Tensor, norm_type: float) -> torch.Tensor:
    """The norm of each block of ``flat``, 1-dim, in any order."""
    regions = REGIONS if flat.numel() >= FAR else 1
    whole = flat.numel() // (regions * NORM_BLOCK) * (regions * NORM_BLOCK)
    blocks = flat[:whole].view(regions, -1, NORM_BLOCK).transpose(0, 1)
    norms = torch.linalg.vector_norm(blocks, norm_type, dim=2).flatten()
    if whole == flat.numel():
        return norms
    rest = [torch.linalg.vector_norm(one, norm_type).reshape(1) for one in flat[whole:].split(NORM_BLOCK)]
    return torch.cat([norms, *rest])


def count_zeros(gradients: Sequence[torch.Tensor], norm_weights: Sequence[float], device: torch.device) -> torch.Tensor:
    """This rank's part of the number of zero elements, 0-dim float64 on ``device``."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for gradient, norm_weight in zip(gradients, norm_weights, strict=True):
        total += (gradient.numel() - gradient.count_nonzero()).to(device) * norm_weight
    return total


def _reduce(part: torch.Tensor, norm_type: float, *, failed: bool = False) -> tuple[torch.Tensor, Any]:
    """The norm, 0-dim, from every rank's :func:`norm_power`; and how many ranks ``failed``, a number or 0-dim."""
    distributed = dist.is_available() and dist.is_initialized()
    rank, size = (dist.get_rank(), dist.get_world_size()) if distributed and math.isinf(norm_type) else (0, 1)
    # gloo's MAX drops NaN, so for maxima a table with one element per rank is summed, and the maximum taken here.
    table = part.new_zeros(size + 1)
    table[rank] = part
    table[size].fill_(failed)  # an assignment of a number would be a copy to a GPU that waits
    if distributed:
        dist.all_reduce(table)
    norm = table[:size].amax() if math.isinf(norm_type) else table[0].pow(1.0 / norm_type)
    return norm, table[size] if distributed else failed


@torch.no_grad()
def unscale_and_check_(gradients: Iterable[torch.Tensor], inv_scale: torch.Tensor, found_inf: torch.Tensor) -> None:
    """Multiply plain dense ``gradients`` by ``inv_scale`` in place; set ``found_inf`` to 1 if an element is not finite.

    Each element is checked separately, before the multiplication, so large finite values whose sum would overflow do
    not count. One fused pass for each device and dtype, two for bfloat16 on a GPU.

    Args:
        gradients: of any shape, device and floating-point dtype.
        inv_scale, found_inf: 0-dim float32.
    """
    buckets: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = defaultdict(list)
    for gradient in gradients:
        buckets[gradient.device, gradient.dtype].append(gradient)
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
