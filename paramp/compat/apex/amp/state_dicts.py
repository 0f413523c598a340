"""State dicts of models under amp: in fp32 at every level, so that they hold the masters' values.

Loading one sets masters and weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .session import state
from .weights import AmpWeight, is_low


def keep_state_dicts_fp32(models: Sequence[nn.Module]) -> None:
    """Make ``state_dict()`` of ``models``, and of each module in them, return fp32, and accept it back exactly."""
    for module in nn.ModuleList(models).modules():
        if not isinstance(module, nn.ModuleList) and (module._parameters or module._buffers):
            module.register_state_dict_post_hook(_widen_state)
            module.register_load_state_dict_pre_hook(_load_masters)
            module.register_load_state_dict_post_hook(_note_versions)


def _weights() -> Mapping[int, AmpWeight]:
    return {} if state.session is None else state.session.weights


def _widen_state(module: nn.Module, destination: dict[str, Any], prefix: str, _metadata: Any) -> None:
    weights = _weights()
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        saved = destination.get(prefix + name)
        if tensor is None or saved is None or isinstance(saved, nn.Parameter) or not is_low(saved):
            continue  # a parameter itself, and no copy of its values, was asked for with keep_vars=True
        weight = weights.get(id(tensor))
        destination[prefix + name] = saved.float() if weight is None else weight.full_precision()


@torch.no_grad()
def _load_masters(module: nn.Module, source: Mapping[str, Any], prefix: str, *_: Any) -> None:
    weights = _weights()
    for name, parameter in module._parameters.items():
        weight = weights.get(id(parameter))
        value = source.get(prefix + name)
        if weight is not None and weight.has_master and value is not None and value.shape == weight.stepped.shape:
            weight.stepped.copy_(value)


def _note_versions(module: nn.Module, _incompatible: Any) -> None:
    weights = _weights()
    for parameter in module._parameters.values():
        if id(parameter) in weights:
            weights[id(parameter)].note_version()
