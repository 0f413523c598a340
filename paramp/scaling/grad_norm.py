"""The gradient norm of the logical model: every element counts once, however many ranks hold it.

A rank sums |g|**p over the elements that it holds, each divided by the number of ranks that hold it; one all-reduce
over the world then gives the exact sum (:func:`norm_power`). If several pipeline stages hold a parameter, one copy
counts, with the summed gradient.
"""

import math
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..base.collectives import gather_objects, is_distributed
from ..base.dtensor import local
from ..base.errors import require
from ..base.torch_internals import expect
from .complete_and_unscale_gradients import align_gradients, mark_tied_sums, sum_tied_gradients, writable_gradient
from .copies_per_element import World, current_world, num_replicas
from .local_norm import norm_power
from .step_decision import HostCopy, clip_coefficient

expect("torch._foreach_mul_")


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
        norm_weights = norm_weights_of(owned, context)
        part = norm_power(gradients, norm_weights, norm_type, device)
    except ValueError as error:
        problem = error
    total, num_problems = reduce_norm(part, norm_type, failed=problem is not None)
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
        self._num_failed: HostCopy | None = None

    def keep(self, num_failed: torch.Tensor) -> bool:
        """Keep the number, 0-dim, for :meth:`check`; False if the caller has to read it."""
        assert dist.group.WORLD is not None
        if self._world is None or self._world() is not dist.group.WORLD:
            self._world, self._num_failed = weakref.ref(dist.group.WORLD), None
            return False
        if self._num_failed is None:
            self._num_failed = HostCopy(1, num_failed.dtype, num_failed.device)
        self._num_failed.start(num_failed)
        return True

    def check(self) -> None:
        """Raise a ValueError if a rank failed in the last call."""
        is_current = self._world is not None and dist.is_initialized() and self._world() is dist.group.WORLD
        if is_current and self._num_failed is not None and self._num_failed.take():
            raise ValueError(
                "a rank could not clip its gradients in the last call, so no rank clipped them right; the error of "
                "that rank names the gradient"
            )


_failures = _Failures()


def positive(name: str, value: Any, allowed: str) -> float:
    """``value`` as a float; a ConfigError with ``name`` and ``allowed`` if it is not above 0."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    require(number > 0, name, value, allowed)
    return number


def norm_weights_of(parameters: Sequence[torch.Tensor], context: World | None) -> list[float]:
    """:func:`norm_weight` of each; a single process without a context holds each element once."""
    if context is None and not is_distributed():
        return [1.0] * len(parameters)
    return [norm_weight(parameter, context) for parameter in parameters]


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
    return reduce_norm(norm_power(gradients, norm_weights, norm_type, device), norm_type)[0]


def reduce_norm(part: torch.Tensor, norm_type: float, *, failed: bool = False) -> tuple[torch.Tensor, Any]:
    """The norm, 0-dim, from every rank's :func:`norm_power`; and how many ranks ``failed``, a number or 0-dim."""
    distributed = dist.is_initialized()
    rank, size = (dist.get_rank(), dist.get_world_size()) if distributed and math.isinf(norm_type) else (0, 1)
    # gloo's MAX drops NaN, so for maxima a table with one element per rank is summed, and the maximum taken here.
    table = part.new_zeros(size + 1)
    table[rank] = part
    table[size].fill_(failed)  # an assignment of a number would be a copy to a GPU that waits
    if distributed:
        dist.all_reduce(table)
    norm = table[:size].amax() if math.isinf(norm_type) else table[0].pow(1.0 / norm_type)
    return norm, table[size] if distributed else failed


def count_zeros(gradients: Sequence[torch.Tensor], norm_weights: Sequence[float], device: torch.device) -> torch.Tensor:
    """This rank's part of the number of zero elements, 0-dim float64 on ``device``."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for gradient, norm_weight in zip(gradients, norm_weights, strict=True):
        total += (gradient.numel() - gradient.count_nonzero()).to(device) * norm_weight
    return total
