"""Initial weights of a Hugging Face model that is built on ``meta``, by its ``_init_weights``."""

from collections.abc import Callable, Container

import torch
from torch import nn

from ...base.errors import ConfigError
from ...base.module_surgery import named_tensors
from ..materialize import outline


def pretrained_filler(model: nn.Module, stored: Container[str] = ()) -> Callable[[nn.Module], None]:
    """A function that fills the tensors of one module of ``model``: the model's own ``_init_weights``.

    It need not fill the tensors of the names ``stored``.

    It is checked on ``meta`` first, where it costs nothing: the tensors' versions show which of them it writes.
    Raises ConfigError if it skips a tensor, or writes tensors of another module.
    """
    tried = outline(model)
    names_of: dict[torch.Tensor, list[str]] = {}
    for name, tensor in named_tensors(tried, remove_duplicate=False):
        if tensor.is_meta:
            names_of.setdefault(tensor, []).append(name)

    owners = _owners(model)

    @torch.no_grad()
    def fill(module: nn.Module) -> None:
        owners.get(type(module), model)._init_weights(module)  # type: ignore[operator]

    written: dict[torch.Tensor, list[str]] = {tensor: [] for tensor in names_of}
    for name, module in tried.named_modules():
        before = {tensor: tensor._version for _, tensor in named_tensors(module) if tensor.is_meta}
        fill(module)
        for tensor, version in before.items():
            if tensor._version != version:
                written[tensor].append(name)
    for tensor, names in names_of.items():
        if not any(name in stored for name in names) and written[tensor] != [name.rpartition(".")[0] for name in names]:
            by = " and ".join(repr(name) for name in written[tensor]) or "no module"
            raise ConfigError(
                f"model: {names[0]!r} of {type(model).__name__} is on the meta device, but its _init_weights "
                f"fills it for {by}, expected one call for each module that has it; build the model on the CPU"
            )
    return fill


def _owners(model: nn.Module) -> dict[type[nn.Module], nn.Module]:
    """The model that initialises modules of a class, for classes that only one of the models in ``model`` has."""
    found: dict[type[nn.Module], set[nn.Module]] = {}
    inner = {name: module for name, module in model.named_modules() if hasattr(module, "_init_weights")}
    for name, module in model.named_modules():
        parent = name
        while parent and parent not in inner:
            parent = parent.rpartition(".")[0]
        found.setdefault(type(module), set()).add(inner[parent])
    return {kind: next(iter(owners)) for kind, owners in found.items() if len(owners) == 1}
