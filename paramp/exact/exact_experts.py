"""Mixtures of experts whose bits do not depend on where experts are, and on how many microchunks are on their ranks.

The bits of a product may depend on its number of rows. So each expert computes the rows of one microchunk in one call,
in every layout: the module's own forward, as if it had that expert alone. With an expert axis, a rank has rows of the
microchunks that run on all ranks of the axis at once::

    rows of one microchunk, by expert ─► ranks of the experts ─► a call for each (microchunk, expert) ─► back

A token adds up what its experts return in their order. Each microchunk uses the weights through a tap of its own
(:class:`~paramp.exact.gradient_taps.Tap`), so that its gradient takes its place in the tree.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle
from torch.utils._python_dispatch import TorchDispatchMode

from ..base.errors import ConfigError
from ..base.module_surgery import OF_CLASS, names_by_parameter, num_hooks, replace_forward, with_parameters
from ..parallel.expert_dispatch import (
    ExpertParallel,
    check_forward,
    dispatched,
    inputs_in_order,
    no_rows,
    problem_of,
)
from .elementwise import with_contiguous_gradient
from .forwards_in_microchunk import Forwards
from .gradient_taps import Tap
from .styles_of_sliced_layers import parameters_of
from .sums_over_slices import aligned


class ExactExperts(ExpertParallel):
    """A module of stacked experts, on one rank as over the expert axis.

    Attributes:
        taps: by parameter of the module, for the microchunk of each rank of the expert axis; none without this axis.
    """

    def __init__(self, forwards: Forwards, size: int) -> None:
        """``size``: of the expert axis."""
        super().__init__()
        self._forwards, self._size = forwards, size
        self.taps: dict[str, list[Tap]] = {}

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh | None) -> nn.Module:
        """``device_mesh``: the expert axis; not used if it has one rank."""
        group = None
        if self._size > 1:
            assert device_mesh is not None
            self._shard(module, device_mesh)
            group = device_mesh.get_group()

        def forward(module: Any, /, *args: Any, **kwargs: Any) -> torch.Tensor:
            if self._forwards.sees_parts:
                raise ConfigError(
                    f"reproducible.sequence_slices: a {type(module).__name__} in {self._forwards.module} is called "
                    "outside of the module that has it, expected inside, which computes slices; or set it to 1"
                )
            inputs = inputs_in_order(module, args, kwargs)
            return dispatched(partial(self._run, module, inputs[1].dtype), inputs, module.num_experts, group)

        setattr(forward, OF_CLASS, True)  # for the next engine of the model
        return replace_forward(module, self._forwards.of_layer(forward))

    def _run(
        self,
        module: nn.Module,
        dtype: torch.dtype,
        rows: torch.Tensor,
        of_rows: torch.Tensor,
        counts: torch.Tensor,
    ) -> torch.Tensor:
        """The output for ``rows`` with the weights ``of_rows``; ``counts`` (microchunks, experts): those of each call.

        ``dtype``: of an index.
        """
        numbers: list[list[int]] = counts.tolist()  # the host reads them
        outputs = []
        each_source = [sum(of_experts) for of_experts in numbers]
        parts = zip(rows.split(each_source), of_rows.split(each_source), numbers, strict=True)
        for source, (part, of_part, of_experts) in enumerate(parts):
            weights = self._weights(module, source)
            if not any(of_experts):
                outputs.append(no_rows(part, weights.values()))
                continue
            each = {name: value.unbind(0) for name, value in weights.items()}
            calls = zip(part.split(of_experts), of_part.split(of_experts), strict=True)
            for expert, (of_one, routed) in enumerate(calls):
                if len(of_one):
                    alone = {name: values[expert] for name, values in each.items()}
                    index = torch.zeros_like(routed, dtype=dtype)
                    outputs.append(_of_one_expert(module, alone, of_one, (index.view(-1, 1), routed.view(-1, 1))))
        return torch.cat(outputs)

    def _weights(self, module: nn.Module, source: int) -> dict[str, torch.Tensor]:
        """This rank's parameters, by name, for the microchunk of the rank ``source`` of the axis."""
        used, mixture = parameters_of(module), self._forwards.mixture
        for name, value in used.items():
            tap = self.taps[name][source] if name in self.taps else None
            if mixture is not None:
                used[name] = mixture.use(module, name, value, source, tap)
            elif tap is not None:
                used[name] = tap(value)
        return used


def _of_one_expert(
    module: nn.Module, weights: Mapping[str, torch.Tensor], rows: torch.Tensor, choice: tuple[torch.Tensor, ...]
) -> torch.Tensor:
    """What the forward of ``module`` makes of ``rows`` if its only expert has ``weights``; with the router's choice."""
    alone = {name: aligned(weight).unsqueeze(0) for name, weight in weights.items()}
    with _with_one_expert(module), with_parameters(module, alone), _WithoutDraws(module):
        output = type(module).forward(module, rows.clone(), *choice)  # a copy begins at a multiple of 64 bytes
    return with_contiguous_gradient(output.to(rows.dtype))


class _WithoutDraws(TorchDispatchMode):
    """Refuses what draws random numbers, which the functions of :mod:`.exact_function_mode` do not see here."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._module = module

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise ConfigError(
                f"reproducible: {func.overloadpacket.__name__} in a {type(self._module).__name__} draws random numbers "
                "for the rows of one expert, or may, expected no dropout, attention or random function in the forward "
                "of experts; call dropout outside of the mixture"
            )
        return func(*args, **(kwargs or {}))


@contextmanager
def _with_one_expert(module: nn.Module) -> Iterator[None]:
    count = module.num_experts
    vars(module)["num_experts"] = 1
    try:
        yield
    finally:
        vars(module)["num_experts"] = count


def exact_experts(
    model: nn.Module, styles: Mapping[str, ParallelStyle], size: int, forwards: Forwards
) -> dict[str, ExactExperts]:
    """The style of each module of experts in ``styles`` over ``size`` ranks; of one that is no stack, none.

    Raises:
        ConfigError: experts have a forward of their own; or there are several ranks, and a parameter of experts is tied
            or has hooks.
    """
    stacks = [name for name in styles if problem_of(model.get_submodule(name)) is None]
    for stack in stacks:
        check_forward(stack, model.get_submodule(stack))
    if size > 1:
        names = names_by_parameter(model)
        for stack in stacks:
            for own, parameter in model.get_submodule(stack).named_parameters():
                if num_hooks(parameter) or len(names[parameter]) > 1:
                    raise ConfigError(
                        f"reproducible: {stack}.{own}, of experts that data ranks share, is tied or has hooks, "
                        "expected neither, because the gradients of its uses are kept apart until all have arrived; "
                        "untie it, and remove them"
                    )
    return {name: ExactExperts(forwards, size) for name in stacks}
