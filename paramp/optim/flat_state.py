"""The state of an optimizer in flat tensors, of which the optimizer has views, and what loading a state does to them.

They are allocated at the start: torch's fused SGD leaves its momentum uninitialised if its first step is skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..base.errors import ConfigError
from ..base.staggered_memory_cpu import zeros_apart
from .flat_buffer import Buffer, FlatParam
from .flat_weights import OptimizerWeights

Options = Mapping[str, Any]
State = Mapping[str, torch.Tensor]


class FlatState:
    """The optimizer's state of the weights that this rank steps.

    Attributes:
        names: of the state's tensors.
        names_of_groups: those that the optimizer has, for each of its param groups.
        flat: for each buffer one tensor of each name, as long as this rank's part of it.
        steps: the number of steps of each parameter, 1-dim float32 on the device.
        step_of: views of them.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        weights: OptimizerWeights,
        states: Callable[[Options], tuple[str, ...]],
        *,
        counts_steps: bool,
    ) -> None:
        """``states``: the names of a group's state tensors; ``counts_steps``: its state has the number of steps too."""
        self._weights, self._states, self._counts_steps = weights, states, counts_steps
        self.names = sorted({name for group in optimizer.param_groups for name in states(group)})
        self.flat: dict[Buffer, dict[str, torch.Tensor]] = {
            buffer: {name: zeros_apart(buffer.own_size, dtype, weights.device) for name in self.names}
            for buffer in weights.buffers
            for dtype in [torch.bfloat16 if buffer.rounds_state else buffer.masters.dtype]
        }
        self.steps = torch.zeros(len(weights.params), dtype=torch.float32, device=weights.device)
        self.step_of: dict[FlatParam, torch.Tensor] = dict(zip(weights.params, self.steps.unbind(), strict=True))
        self._loading: dict[str, Any] | None = None
        self._hand_over(optimizer)
        optimizer.register_load_state_dict_pre_hook(self._before_load)
        optimizer.register_load_state_dict_post_hook(self._after_load)

    def _hand_over(self, optimizer: torch.optim.Optimizer) -> None:
        self.names_of_groups = [self._states(group) for group in optimizer.param_groups]
        for group, names in zip(optimizer.param_groups, self.names_of_groups, strict=True):
            held = {id(tensor) for tensor in group["params"]}
            for param, stepped in self._weights.pairs():
                if id(stepped) not in held:
                    continue
                of_buffer = self.flat[param.buffer]
                state = {name: of_buffer[name][param.own_range].view(stepped.shape) for name in names}
                if self._counts_steps:
                    state["step"] = self.step_of[param]
                if state:
                    optimizer.state[stepped] = state

    def _before_load(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        """Raise a ConfigError if a group to load has an option that needs state which this engine has not allocated."""
        for ours, theirs in zip(optimizer.param_groups, state_dict["param_groups"], strict=False):  # torch checks that
            options = {**ours, **theirs}
            if missing := set(self._states(options)).difference(self.names):
                option = next(name for name in options if missing.isdisjoint(self._states({**options, name: 0})))
                raise ConfigError(
                    f"optimizer: got a state to load with {option}={options[option]}, for which the optimizer given to "
                    f"initialize has no {missing.pop()!r}; set {option} before initialize"
                )
        self._loading = state_dict  # torch casts loaded state to the dtype of the stepped tensor: half, for remainders

    @torch.no_grad()
    def _after_load(self, optimizer: torch.optim.Optimizer) -> None:
        """Copy the loaded state into the flat tensors, and give the optimizer its views again."""
        assert self._loading is not None
        saved: dict[int, Mapping[str, Any]] = {}
        for theirs, ours in zip(self._loading["param_groups"], optimizer.param_groups, strict=True):
            for key, stepped in zip(theirs["params"], ours["params"], strict=True):
                saved[id(stepped)] = self._loading["state"].get(key, {})
        self._loading = None
        self._hand_over(optimizer)
        for _, stepped in self._weights.pairs():
            for name, value in optimizer.state.get(stepped, {}).items():
                found = saved.get(id(stepped), {}).get(name)
                if found is None:  # saved before its first step
                    value.zero_()
                else:
                    value.copy_(torch.as_tensor(found).reshape(value.shape))
