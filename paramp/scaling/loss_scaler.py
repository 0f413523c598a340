"""A loss scaler that makes the same decisions on every rank.

If a gradient overflows, the step is skipped and the scale backs off. torch's GradScaler decides this from the
gradients of one rank (and, given DTensors, from the placements of the first of them), so under tensor or pipeline
parallelism one rank skips while another steps, and the weights diverge without an error.

Here each ``unscale_`` (or ``step`` without it) ends with exactly one all-reduce of a 0/1 flag over the group, whatever
gradients the rank has: none, plain, sparse, or DTensors on several meshes. The number and order of collectives
never depend on the values.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.amp import GradScaler

from ..base.collectives import is_distributed
from .complete_and_unscale_gradients import complete_and_check, dense_gradients, unscale_and_check_
from .copies_per_element import World, current_world
from .loss_scaling_options import LARGEST_COUNT, SMALLEST, LossScaling

if TYPE_CHECKING:
    from .overflow_report import OverflowReport


class DistributedGradScaler(GradScaler):
    """A drop-in replacement of ``torch.amp.GradScaler`` for models that are distributed over processes.

    Every rank of ``group`` calls it with the same optimizers in the same order,
    also a rank that has no gradients or that never called :meth:`scale` (the earlier stages of a pipeline). In one
    process an optimizer without any gradient raises torch's ``No inf checks were recorded``. Several optimizers share
    one scale, and only those that overflowed are skipped. Copies keep ``group``; a pickle does not, because a process
    group belongs to its process.

    Args:
        device: the device of the scale, ``"cuda"`` or ``"cpu"``. None: the GPU if there is one, else the CPU.
        init_scale, growth_factor, backoff_factor, growth_interval, enabled: as in torch.
        hysteresis: the scale backs off from this overflow on, counted since construction or the last growth. Every
            overflow skips the step and restarts the growth interval.
        min_scale, max_scale: floor and ceiling of the scale.
        group: the ranks that decide together. None: the whole world. Without a process group, no collective is used.

    Raises:
        ValueError: an invalid argument, or ``device="cuda"`` without a GPU that torch sees.
    """

    def __init__(
        self,
        device: torch.device | str | None = None,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        hysteresis: int = 1,
        min_scale: float | None = None,
        max_scale: float | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        world = current_world()
        if device is None:
            device = world.device if world else torch.device("cuda" if torch.cuda.is_available() else "cpu")
        device = torch.device(device)
        if enabled:
            LossScaling(  # checks them
                init_scale=init_scale,
                growth_factor=growth_factor,
                backoff_factor=backoff_factor,
                growth_interval=growth_interval,
                hysteresis=hysteresis,
                min_scale=min_scale,
                max_scale=max_scale,
            )
            if device.type == "cuda" and not torch.cuda.is_available():
                raise ValueError(
                    "device: got 'cuda', but torch sees no GPU; leave device out to use the CPU, or pass enabled=False"
                )
        # With "cuda" torch's constructor would disable the scaler if there is no GPU, which raised above.
        super().__init__("cpu", init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        self._device = device.type
        self._group = group
        self._hysteresis, self._min_scale, self._max_scale = hysteresis, min_scale, max_scale
        self._init_overflow_tracker = 0
        self._one = torch.ones((), device=device if device.type == "cuda" and torch.cuda.is_available() else "cpu")
        if enabled:  # not lazily at the first scale(): ranks that never scale a loss unscale gradients all the same
            self._home = device
            self._create_state()

    _has_updated = _has_scaled = False  # since nothing was scaled or unscaled; a loss, until owners reset it

    def scale(self, outputs: Any) -> Any:
        """``outputs``, a tensor or an iterable of tensors, multiplied by the scale; as torch's ``scale``."""
        self._has_updated, self._has_scaled = False, True
        return super().scale(outputs)

    def _create_state(self) -> None:
        self._scale: torch.Tensor | None = None
        self._growth_tracker: torch.Tensor | None = None
        super()._lazy_init_scale_growth_tracker(self._home)
        self._overflow_tracker = torch.full((), self._init_overflow_tracker, dtype=torch.int32, device=self._home)

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        """torch's hook for ``unscale_`` and ``step``; here the ranks agree on the overflow flag.

        fp16 gradients are accepted: a half-precision model whose optimizer steps masters has them. (torch rejects them,
        to detect a model that was made half by mistake.)
        """
        self._has_updated = False
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        complete_and_check(parameters, found_inf)
        gradients = dense_gradients(parameters)
        unscale_and_check_(gradients, inv_scale, found_inf)
        if not gradients and not self.in_group():
            return {}  # no other process can have any, so torch's step() and update() raise
        self.agree(found_inf)
        return {found_inf.device: found_inf}

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Unscale if that was not done, then step the optimizer unless a gradient overflowed; as torch's ``step``."""
        starting = _starting_momenta(optimizer) if self._enabled else []
        result = super().step(optimizer, *args, **kwargs)
        if starting and self.has_overflowed(optimizer):
            for parameter in starting:
                optimizer.state[parameter].pop("momentum_buffer", None)
        return result

    def has_overflowed(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether a gradient of ``optimizer`` was not finite since the last update; synchronises the host."""
        state = self._per_optimizer_states.get(id(optimizer), {}) if self._enabled else {}
        return any(map(bool, state.get("found_inf_per_device", {}).values()))

    def scale_tensor(self) -> torch.Tensor:
        """A copy of the scale, 0-dim float32 on the device; 1 if losses are not scaled. No host synchronisation."""
        return self._scale.clone() if self._enabled and self._scale is not None else self._one.clone()

    def tensors(self) -> list[torch.Tensor]:
        """The tensors that change from step to step, sharing storage; empty if losses are not scaled."""
        if not self._enabled:
            return []
        return [*self._check_scale_growth_tracker("tensors"), self._overflow_tracker]

    def agree(self, found_inf: torch.Tensor) -> None:
        """Set ``found_inf``, 0 or 1 on each rank, to 1 on every rank of the group if it is 1 on any."""
        if self.in_group():
            dist.all_reduce(found_inf, group=self._group)  # a sum, not a maximum: gloo's MAX drops NaN
            found_inf.clamp_(max=1.0)

    def in_group(self) -> bool:
        """Whether other processes decide with this one."""
        return is_distributed(self._group)

    def at_floor(self) -> torch.Tensor:
        """Whether a dynamic scale cannot back off any further, 0-dim bool on the device; no host synchronisation."""
        if not self._enabled or self._scale is None or self._min_scale == self._max_scale is not None:
            return torch.zeros_like(self._one, dtype=torch.bool)
        return self._scale <= (self._min_scale or SMALLEST)

    def diagnose(
        self, named_parameters: Iterable[tuple[str, torch.Tensor]], context: World | None = None
    ) -> OverflowReport:
        """Report the gradients that are not finite, and their ranks. Call it after a skipped step, on every rank.

        It reads the gradients as they are, unscaled or not, so call it before they are set to zero, and before
        :meth:`update`, which changes the scale; after it, it raises a RuntimeError.

        Args:
            named_parameters: this rank's, such as ``model.named_parameters()``.
            context: for the ranks' coordinates. None: the current one, if any.
        """
        from .overflow_report import OverflowReport, find_gradients, gather_findings, refuse_after_update

        refuse_after_update(self._has_updated, self._group)
        of_ranks = gather_findings(find_gradients(named_parameters, context or current_world()), self._group)
        return OverflowReport(float(self.scale_tensor()), tuple(itertools.chain(*of_ranks)), scaled=False)

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Update the scale from the overflow flags since the last update; ``new_scale`` sets it instead."""
        if not self._enabled:
            return
        self._has_updated = True
        if new_scale is not None:
            super().update(new_scale if isinstance(new_scale, torch.Tensor) else float(new_scale))
            return
        states = self._per_optimizer_states.values()
        flags = [flag for state in states for flag in state["found_inf_per_device"].values()]
        if not flags:
            raise AssertionError("No inf checks were recorded prior to update.")
        self.commit(torch.stack(flags).amax())
        self._per_optimizer_states.clear()

    def commit(self, found_inf: torch.Tensor, counts: torch.Tensor | int = 1) -> None:
        """Update the scale from ``found_inf`` (0 or 1, 0-dim, equal on all ranks). No host synchronisation.

        ``counts``: 0 if a finite step does not count towards the growth interval.
        """
        if not self._enabled:
            return
        scale, growth_tracker = self._check_scale_growth_tracker("update")
        overflow = found_inf > 0
        growth_tracker.add_(counts).mul_(~overflow)
        self._overflow_tracker.add_(overflow)
        grows = growth_tracker >= min(self._growth_interval, LARGEST_COUNT)
        backs_off = overflow & (self._overflow_tracker >= min(self._hysteresis, LARGEST_COUNT))
        grown = scale * self._growth_factor
        grown = torch.where(grown.isfinite(), grown, scale)
        target = torch.where(backs_off, scale * self._backoff_factor, torch.where(grows, grown, scale))
        # The limits apply when the scale changes; a scale that the user set outside them stays until then.
        limited = target.clamp(self._min_scale or SMALLEST, self._max_scale)
        scale.copy_(torch.where(backs_off | grows, limited, scale))
        growth_tracker.mul_(~grows)
        self._overflow_tracker.mul_(~grows)

    def state_dict(self) -> dict[str, Any]:
        """The five entries of torch's, and ``hysteresis``, ``min_scale``, ``max_scale`` and ``_overflow_tracker``."""
        state = super().state_dict()
        if self._enabled:
            state |= {"hysteresis": self._hysteresis, "min_scale": self._min_scale, "max_scale": self._max_scale}
            state["_overflow_tracker"] = int(self._overflow_tracker.item())
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this class or of ``torch.amp.GradScaler``.

        Missing entries keep their current values, but overflows, of which torch's has no count, count from 0.
        """
        super().load_state_dict(state_dict)
        if not self._enabled:
            return
        self._hysteresis = state_dict.get("hysteresis", self._hysteresis)
        self._min_scale = state_dict.get("min_scale", self._min_scale)
        self._max_scale = state_dict.get("max_scale", self._max_scale)
        self._overflow_tracker.fill_(state_dict.get("_overflow_tracker", 0))

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        if self._enabled:
            state["_init_overflow_tracker"] = int(self._overflow_tracker.item())
            state["_overflow_tracker"] = None
        state["_group"] = None
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self._enabled:
            self._create_state()

    def __deepcopy__(self, memo: dict[int, Any]) -> DistributedGradScaler:
        copied = type(self).__new__(type(self))
        copied.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        copied._group = self._group
        return copied

    def __copy__(self) -> DistributedGradScaler:
        return self.__deepcopy__({})


def _starting_momenta(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The parameters whose momentum torch's fused SGD allocates in its next step.

    If the device then skips the step, the momentum stays uninitialised and has to be allocated again.
    """
    if not isinstance(optimizer, torch.optim.SGD):
        return []
    groups = (group for group in optimizer.param_groups if group["fused"] and group["momentum"])
    parameters = (parameter for group in groups for parameter in group["params"] if parameter.grad is not None)
    return [one for one in parameters if optimizer.state.get(one, {}).get("momentum_buffer") is None]
