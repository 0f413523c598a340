"""Parameters that a user puts in the place of the model's.

``load_state_dict(assign=True)`` and ``module.weight = nn.Parameter(...)`` replace one by another. Steps, hooks and
checkpoints use the original, which is a view of a flat buffer: it gets the replacement's value, and is put back.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ...base.dtensor import is_dtensor, local
from ...base.module_surgery import names_by_parameter


class ModelParameters:
    """The parameters of ``module`` at construction, under all of their names.

    Attributes:
        replaced: called with the parameters that :meth:`put_back` has put back.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.replaced: Callable[[Sequence[nn.Parameter]], None] = lambda _: None
        self._names = names_by_parameter(module)
        self._shapes = {one: one.shape for one in self._names}
        self._record()

    def _record(self) -> None:
        """Record every module's parameters and children in flat lists, which compare without a Python loop."""
        # TorchScript modules have tables of another class, whose parameters cannot be replaced.
        tables = [
            table
            for module in self._module.modules()
            for table in (module._parameters, module._modules)
            if isinstance(table, dict)
        ]
        self._tables: list[dict[str, Any]] = [table for table in tables for _ in table]
        self._keys = [key for table in tables for key in table]
        self._held = [value for table in tables for value in table.values()]

    @torch.no_grad()
    def put_back(self) -> list[nn.Parameter]:
        """Copy the values of replacements into the parameters that they replaced, put these back, and return them.

        Raises:
            RuntimeError: a parameter got another shape; a replacement differs in shape, dtype or placements; or a
                parameter that several modules share was replaced in only some of them, or by different values.
        """
        for own in [one for one, shape in self._shapes.items() if one.shape != shape]:  # as tied embeddings' ``.data``
            name, shape = self._names[own][0], tuple(own.shape)
            raise RuntimeError(f"{name!r} got the shape {shape} after initialize; resize (token embeddings) before it")
        if all(map(operator.is_, map(dict.get, self._tables, self._keys), self._held)):
            return []
        found = dict(self._module.named_parameters(remove_duplicate=False))
        replaced = {
            own: {name: found[name] for name in names if name in found}
            for own, names in self._names.items()
            if any(found.get(name, own) is not own for name in names)
        }
        for own, given in replaced.items():
            _check_replacement(own, given)
        for own, given in replaced.items():
            value = next(iter(given.values()))
            local(own).copy_(local(value))
            own.requires_grad_(value.requires_grad)
            for name in given:
                owner, _, leaf = name.rpartition(".")
                setattr(self._module.get_submodule(owner), leaf, own)  # an RNN has it in a list too
        self._record()
        self.replaced([*replaced])
        return list(replaced)


def _check_replacement(own: nn.Parameter, given: dict[str, nn.Parameter]) -> None:
    for name, value in given.items():
        if _layout(value) != _layout(own):
            raise RuntimeError(
                f"{name!r} was replaced after initialize by a parameter of {_layout(value)}, but the model's own has "
                f"{_layout(own)}; use a matching one, or change values in place (copy_, load_state_dict without "
                "assign=True)"
            )
    first, *others = given.values()
    if len(given) > 1 and any(one is own or not torch.equal(local(one), local(first)) for one in (*others, first)):
        raise RuntimeError(
            f"{' and '.join(map(repr, given))} are one parameter, which was replaced after initialize under only some "
            "of these names, or by different values; untie before initialize, or change values in place"
        )


def _layout(parameter: nn.Parameter) -> str:
    placed = f" on {parameter.device_mesh} as {parameter.placements}" if is_dtensor(parameter) else ""
    return f"shape {tuple(parameter.shape)} and {parameter.dtype}{placed}"
