"""Experts over data ranks: each rank of the expert axis has some of them, and computes the tokens of all for these.

A mixture of experts sends each token to the experts that its router chose. With ``parallel.expert`` > 1 the stacked
weights of the experts, (experts, ...), are DTensors that are sharded over their dim 0, and a forward exchanges rows::

    tokens ─► a row for each (token, expert), sorted by expert ─► to the rank of the expert ─► the module's own forward
           ◄─ summed over the experts of a token              ◄─ back                       ◄─ with this rank's experts

The weight of each row travels with it, so that the module's forward has the weights that the router gave, and nothing
else multiplies by them. Rows, weights and their gradients travel by ``all_to_all_single`` with uneven splits. The
numbers of rows are exchanged first and read by the host, once for each forward of a layer. Nothing is dropped: in the
worst case a rank gets all rows of its group. Source: GShard (Lepikhin et al. 2020), without its capacity;
transformers' ``ep_dispatch_experts`` for the interface.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ParallelStyle

from ..base.errors import ConfigError
from ..base.module_surgery import (
    check_forward_of_class,
    named_tensors,
    replace_forward,
    runs_forward_of_class,
    with_parameters,
)
from ..base.uncompiled import uncompiled
from .recognize_stacked_experts import SEE_ROWS, num_experts
from .tensor.colwise_and_rowwise import distribute
from .tensor.differentiable_collectives import local_shard

INPUTS = "hidden_states", "top_k_index", "top_k_weights"
"""The names of the inputs of experts in transformers."""
Run = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Experts of this rank: of rows (rows, features), the router's weight of each (rows,), and their numbers (ranks,
experts), int64. The rows are ordered by the rank that sent them, and then by expert. Even if there are none, the output
depends on the experts' parameters."""


class ExpertParallel(ParallelStyle):
    """A module of stacked experts, each rank with an equal part of them.

    Its parameters, none of them in submodules, are (experts, ...), its attribute ``num_experts`` is their number, and
    its forward is that of transformers: ``(hidden_states, top_k_index, top_k_weights)``, of (tokens, features) and
    (tokens, choices), to (tokens, features). An index of ``num_experts`` or more is no expert.
    """

    is_of_experts = True

    def check(self, name: str, module: nn.Module, size: int) -> None:
        """Raise a ConfigError if ``module`` is no such module, or its experts do not divide over ``size`` ranks."""
        if problem := problem_of(module):
            raise ConfigError(f"plan: {name!r} is a {type(module).__name__} {problem} for the style 'experts'")
        check_forward(name, module)
        if hasattr(getattr(type(module), "num_experts", None), "__set__"):  # have_part could not replace it
            raise ConfigError(
                f"plan: {name!r} is a {type(module).__name__} with num_experts as a property, expected an attribute "
                "that its __init__ sets, because each rank sets it to the number of its experts"
            )
        count = cast(int, module.num_experts)
        if count % size:
            raise ConfigError(f"plan: {name!r} has {count} experts, expected a multiple of parallel.expert {size}")

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self._shard(module, device_mesh)
        group = device_mesh.get_group()

        @uncompiled  # the number of rows differs from call to call
        def forward(module: Any, /, *args: Any, **kwargs: Any) -> torch.Tensor:
            shards = {name: local_shard(value) for name, value in module._parameters.items() if value is not None}
            return output_of_all(module, shards, inputs_in_order(module, args, kwargs), group)

        return replace_forward(module, forward)

    @staticmethod
    def _shard(module: nn.Module, device_mesh: DeviceMesh) -> None:
        for name in [*module._parameters]:
            distribute(module, name, device_mesh, Shard(0))
        have_part(module, device_mesh.size())


def problem_of(module: nn.Module) -> str | None:
    """Why the experts of ``module`` cannot be sharded, to follow its class in a message; None if they can."""
    count = num_experts(module)
    shapes = {own: tuple(value.shape) for own, value in module.named_parameters()}
    if not count or module.num_experts != count or any(shape[:1] != (count,) for shape in shapes.values()):
        has = f"with num_experts {getattr(module, 'num_experts', None)} and the parameters {shapes}"
        return f"{has}, expected parameters (num_experts, ...), one of them of 3 dims or more"
    whole = [name for name, value in named_tensors(module) if value.shape[:1] == (count,)]
    whole = [name for name in whole if name not in module._parameters]
    if whole:
        return f"with {whole[0]!r} of {count} experts, expected parameters of the module itself, no buffers"
    try:
        inspect.signature(type(module).forward).bind(module, None, None, None)
    except TypeError as error:
        return f"whose forward is another ({error}), expected one of hidden states, index and weights"
    return None


def check_forward(name: str, module: nn.Module) -> None:
    """Raise a ConfigError if ``module``, of experts, has a forward of its own, which its parts would not run."""
    if not runs_forward_of_class(module):
        check_forward_of_class(name, module, "ranks that have a part of its experts")


def check_none_replicated(model: nn.Module, styles: Mapping[str, ParallelStyle]) -> None:
    """Raise a ConfigError for a module of ``model`` that could have the style ``experts`` and is not in ``styles``."""
    sharded = {model.get_submodule(name) for name in styles}
    for name, module in model.named_modules():
        if module not in sharded and problem_of(module) is None:
            raise ConfigError(
                f"plan: it leaves {name!r}, a {type(module).__name__} of {module.num_experts} experts, replicated, "
                "expected the style 'experts' for each mixture, because parallel.expert is set"
            )


def have_part(module: nn.Module, size: int) -> None:
    """Let ``module`` be of one of ``size`` equal parts of its experts."""
    vars(module)["num_experts"] = cast(int, module.num_experts) // size


def inputs_in_order(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The inputs of experts as of :func:`dispatched`, also those given by the names that their class has for them."""
    if kwargs:
        bound = inspect.signature(type(module).forward).bind(module, *args, **kwargs)
        # What has no name there goes by transformers'.
        args = *bound.args[1:], *(bound.kwargs[name] for name in sorted(bound.kwargs, key=INPUTS.index))
    tokens, index, weights = args
    return tokens, index, weights


def output_of_all(
    module: Any,
    shards: Mapping[str, torch.Tensor],
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    group: dist.ProcessGroup,
) -> torch.Tensor:
    """The output of the experts of ``group`` for this rank's tokens, by the forward of ``module``.

    Args:
        shards: the parameters of this rank's experts, by name.
        inputs: as of :func:`dispatched`.
    """
    dtype = inputs[1].dtype

    def run(rows: torch.Tensor, weights: torch.Tensor, received: torch.Tensor) -> torch.Tensor:
        if not len(rows):
            return no_rows(rows, shards.values())
        size, num_local = received.shape
        experts = torch.arange(num_local, device=rows.device).repeat(size).repeat_interleave(received.flatten())
        with with_parameters(module, shards):
            output: torch.Tensor = type(module).forward(
                module, rows, experts.view(-1, 1).to(dtype), weights.view(-1, 1)
            )
        return output.to(rows.dtype)  # as on a rank without rows

    return dispatched(run, inputs, module.num_experts, group)


def dispatched(
    run: Run,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    num_local: int,
    group: dist.ProcessGroup | None,
) -> torch.Tensor:
    """The output of all experts of ``group`` for this rank's tokens; every rank calls it.

    Args:
        run: this rank's ``num_local`` experts.
        inputs: tokens (tokens, features), and the index and weight of their experts, (tokens, choices).
        group: None: this rank has all experts.
    """
    tokens, index, weights = inputs
    size = 1 if group is None else group.size()
    chosen = index.reshape(-1)
    order = chosen.argsort(stable=True)
    counts = torch.bincount(chosen, minlength=num_local * size)[: num_local * size].view(size, num_local)
    received = counts if group is None else torch.empty_like(counts)
    if group is not None:
        dist.all_to_all_single(received, counts, group=group)
    sent, taken = torch.stack([counts.sum(1), received.sum(1)]).tolist()  # the host reads them
    order = order[: sum(sent)]  # what has no expert comes last
    token = order.div(index.shape[1], rounding_mode="floor")
    rows, of_rows = _exchange((tokens[token], weights.reshape(-1)[order]), taken, sent, group)
    (rows,) = _exchange((run(rows, of_rows, received),), sent, taken, group)
    if (see := SEE_ROWS.get()) is not None:
        see(rows.detach(), chosen[order])
    return torch.zeros_like(tokens).index_add_(0, token, rows.to(tokens.dtype))


def _exchange(
    tensors: tuple[torch.Tensor, ...], taken: list[int], sent: list[int], group: dist.ProcessGroup | None
) -> tuple[torch.Tensor, ...]:
    """Of each of ``tensors`` (rows, ...) ``sent[i]`` rows to each rank i, and ``taken[i]`` from it, in its order."""
    if group is None:
        return tensors
    return cast("tuple[torch.Tensor, ...]", ExchangeRows.apply(taken, sent, group, *tensors))


def no_rows(rows: torch.Tensor, weights: Iterable[torch.Tensor]) -> torch.Tensor:
    """``rows``, of which there are none, as the output of ``weights``, whose gradient is zero.

    The ranks that have rows wait for this one in the backward.
    """
    return cast(torch.Tensor, _NoRows.apply(rows, *weights))


class ExchangeRows(torch.autograd.Function):
    """Rows to and from each rank of a group, of several tensors at once."""

    @staticmethod
    def forward(
        ctx: Any, taken: list[int], sent: list[int], group: dist.ProcessGroup, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.back = sent, taken, group
        results = tuple(tensor.new_empty(sum(taken), *tensor.shape[1:]) for tensor in tensors)
        work = [
            # gloo reads memory as if it were contiguous
            dist.all_to_all_single(result, tensor.contiguous(), taken, sent, group=group, async_op=True)
            for result, tensor in zip(results, tensors, strict=True)
        ]
        for one in work:
            one.wait()
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        needed = ctx.needs_input_grad[3:]  # the same on every rank
        given = tuple(gradient for gradient, needs in zip(gradients, needed, strict=True) if needs)
        back = iter(_exchange(given, *ctx.back))
        return None, None, None, *(next(back) if needs else None for needs in needed)


class _NoRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        ctx.like = rows, weights
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, weights = ctx.like
        needed = zip((rows, *weights), ctx.needs_input_grad, strict=True)
        return tuple(torch.zeros_like(tensor) if needs else None for tensor, needs in needed)
