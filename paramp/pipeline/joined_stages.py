"""Several stages of one rank under one module, which has the whole model's names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from ..base.module_surgery import PassThrough, shallow_copy


class Joined:
    """One module that joins several stages (parts) of a model.

    :attr:`module` has the modules, parameters and buffers of all parts, once, under the names that they have in the
    model. They are shared: a parameter that is replaced in it is replaced in the parts. A module with children on
    several parts has one copy in each part and one in :attr:`module`; the copies share their parameters, buffers and
    hooks. :attr:`module` cannot be called; the parts, made by :func:`~paramp.base.module_surgery.keep_only`, can.
    """

    def __init__(self, parts: Iterable[nn.Module]) -> None:
        self.parts = list(parts)
        # (a part's copy of a module, the joint copy, the names of the children that both share)
        self._copies: list[tuple[nn.Module, nn.Module, list[str]]] = []
        self.module = self._join(self.parts)
        if len(self.parts) > 1:
            self.module.__dict__["forward"] = _refuse_to_run

    def _join(self, copies: list[nn.Module]) -> nn.Module:
        """One module for those of the same name in the parts."""
        real = [module for module in copies if not isinstance(module, PassThrough)] or copies
        different = list({id(module): module for module in real}.values())
        if len(different) == 1 or isinstance(different[0], PassThrough):
            return different[0]
        joint = shallow_copy(different[0])
        joint._parameters = {name: value for copy in different for name, value in copy._parameters.items()}
        joint._buffers = {name: value for copy in different for name, value in copy._buffers.items()}
        joint._modules = {}
        for name in dict.fromkeys(name for copy in different for name in copy._modules):
            children = [child for copy in different if (child := copy._modules.get(name)) is not None]
            joint._modules[name] = self._join(children) if children else None
        for copy in different:
            copy._parameters, copy._buffers = joint._parameters, joint._buffers
            shared = [name for name, child in copy._modules.items() if child is joint._modules[name]]
            self._copies.append((copy, joint, shared))
        return joint

    def take_over(self, module: nn.Module) -> None:
        """Replace :attr:`module` by ``module``, and the parts' modules by those of ``module``."""
        if len(self.parts) == 1:
            self.parts = [module]
        self.module = module
        for copy, joint, shared in self._copies:
            for name in shared:
                copy._modules[name] = joint._modules[name]

    def align_modes(self) -> None:
        """Set the parts' copies to training or evaluation mode, as in :attr:`module`."""
        for copy, joint, _ in self._copies:
            copy.training = joint.training


def _refuse_to_run(*_: Any, **__: Any) -> Any:
    raise RuntimeError(
        "engine.module has several pipeline stages that are not consecutive, so it cannot be called; use engine.eval() "
        "and engine(x), or engine.forward_backward(x, y)"
    )
