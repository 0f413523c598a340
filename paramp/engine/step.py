"""The optimizer's step: a decision equal on every rank, whether to skip it and the gradients' divisor; then the update.

Each rank makes one pass over its gradients. One small all-reduce over the world adds up the findings. On a GPU all
values computed from it stay on the device: the result and the counters of steps are read only on access.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..base.collectives import all_reduce_
from ..base.errors import ConfigError
from ..optim import user_optimizer
from ..optim.choose_step import Step, choose_step, guarding
from ..optim.compiled.compiled_step import fused_step_for, is_in_torch_dispatch_mode, sums_for
from ..optim.flat_buffer import FlatParam
from ..scaling.grad_norm import count_zeros
from ..scaling.loss_scaler import DistributedGradScaler
from ..scaling.step_decision import NUM_SUMS, HostCopy, StepDecision, decide
from .accumulation_window import AccumulationWindow, WindowLosses
from .moving_averages_of_weights import WeightAverages
from .shared_failure import SharedFailure
from .state.model_tensors import ParamChunks
from .which_parameters_have_gradients import Presence


class StepResult:
    """The result of :meth:`Engine.step`; equal on every rank.

    The values are on the device. The first access waits for the step and reads all of them.
    """

    __slots__ = ("_stepping", "_values", "_with_zeros")

    def __init__(
        self, values: torch.Tensor | Sequence[float | None], *, stepping: bool = True, with_zeros: bool = False
    ) -> None:
        """``stepping`` is False while gradients accumulate.

        ``values``: the loss scale and, at the end of a window, 0 for a step that was made, 1 for an overflow or 2 for
        another reason to skip it, gradient norm, number of zeros and loss; 1-dim float64, or numbers, None for unknown
        values.
        """
        self._values: torch.Tensor | Sequence[float | None] = values
        self._stepping = stepping
        self._with_zeros = with_zeros

    def _read(self, index: int) -> float | None:
        if isinstance(self._values, torch.Tensor):
            self._values = self._values.tolist()
        return self._values[index]

    @property
    def stepped(self) -> bool:
        """Whether the weights changed. False while gradients accumulate, after an overflow, or if all counts were 0."""
        return self._stepping and not self._read(1)

    @property
    def overflow(self) -> bool:
        """Whether a gradient was not finite on some rank, so that all ranks skipped the step."""
        return self._stepping and self._read(1) == 1

    @property
    def loss_scale(self) -> float:
        """The loss scale of this step's gradients; 1 if losses are not scaled."""
        return self._read(0) or 0.0

    @property
    def grad_norm(self) -> float | None:
        """The norm of the whole model's gradient before clipping; None while accumulating; not finite on overflow."""
        return self._read(2) if self._stepping else None

    @property
    def num_zeros(self) -> int | None:
        """The number of zero elements in the whole model's gradient; None unless the mode has ``log_num_zeros``."""
        zeros = self._read(3) if self._stepping and self._with_zeros else None
        return None if zeros is None else round(zeros)

    @property
    def loss(self) -> float | None:
        """The true loss of the window, as :meth:`Engine.forward_backward` returns it; None while accumulating."""
        return self._read(4) if self._stepping else None

    def __repr__(self) -> str:
        names = ("stepped", "overflow", "loss_scale", "grad_norm", "num_zeros", "loss")
        return f"StepResult({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"


class StepCounters:
    """Counters of steps on the device. Reading them waits for the last step only, not for work queued after it.

    The values are, in this order: optimizer steps made; steps skipped; steps skipped in a row up to now; the number
    of those in a row that left the loss scale at its floor; and of the last steps in a row, how many were made with a
    gradient whose norm is 0.
    """

    SIZE = 5

    def __init__(self, device: torch.device) -> None:
        self._counts = torch.zeros(self.SIZE, dtype=torch.int64, device=device)
        self._on_host = HostCopy(self.SIZE, torch.int64, device)

    def add(self, skip: torch.Tensor, overflow: torch.Tensor, at_floor: torch.Tensor, vanished: torch.Tensor) -> None:
        """Count a step: skipped or not, for an overflow or not, with the loss scale at its floor or not; 0-dim bool.

        ``vanished``, 0-dim bool: it was made with the gradient of a loss, whose norm is 0.
        """
        self._counts[2:4].mul_(overflow)
        self._counts[4:].mul_(vanished)
        self._counts += torch.stack([~skip, overflow, overflow, overflow & at_floor, vanished])
        self._on_host.start(self._counts)

    @property
    def made(self) -> torch.Tensor:
        """The number of optimizer steps made, 0-dim int64 on the device; a view."""
        return self._counts[0]

    def load(self, counts: Sequence[int]) -> None:
        """Set the values to ``counts``, as :meth:`read` returned them; those missing at the end are 0."""
        rest = [0] * (self.SIZE - len(counts))
        self._counts.copy_(torch.tensor([*counts, *rest]))
        self._on_host.start(self._counts)

    def read(self) -> list[int]:
        """The values after the last :meth:`add`."""
        return self._on_host.read()

    def skips(self) -> list[int]:
        """What tells whether training goes on: steps made, skipped, skipped in a row, and of these at the floor."""
        return self.read()[:4]

    def stop_after_skip(self, max_skipped: int | None) -> bool:
        """Whether training stops if the next step is skipped too; never if ``max_skipped`` is None.

        The counts of the steps before decide, so the host waits for a step only if its skip would stop the training.
        """
        if max_skipped is None:
            return False
        _, _, in_a_row, at_floor = self.skips()
        return in_a_row >= max_skipped - 1 or at_floor > 0


class OptimizerStep:
    """Makes the optimizers' steps, or skips them, with the gradients of a window.

    Attributes:
        updates: for each optimizer the fused step, or its own.
        counters: of the steps made and skipped.
        averages: of the weights, which follow the steps that are made; None if there are none.
    """

    def __init__(
        self,
        params: ParamChunks,
        scaler: DistributedGradScaler,
        losses: WindowLosses,
        window: AccumulationWindow,
        failure: SharedFailure,
        counters: StepCounters,
    ) -> None:
        context, weights = params.context, params.weights
        self._optimizers = [one.optimizer for one in weights.by_optimizer]
        self._changes, self._gradients = weights.changes, weights.gradients
        self._norm_power = weights.numerics.norm_power
        self._presence = Presence(self._gradients.params, params.first_names, context)
        self._scaler, self._losses, self._window = scaler, losses, window
        self._failure, self.counters = failure, counters
        self.averages: WeightAverages | None = None
        self._context = context
        self._device = context.device
        self._differ = context.batch_axis.size * context.stage_axis.size > 1
        self._rates: list[object] = []  # of learning, in the last step
        self._moves = self._warned = False
        self._nothing = torch.zeros(1, dtype=torch.float64, device=self._device)
        self._sums = sums_for(context)
        self.updates: list[Step] = []
        problem = None
        try:
            self.updates += [choose_step(one, fused_step_for(context)) for one in weights.by_optimizer]
        except ConfigError as error:  # on some ranks only: others may step no parameter of that optimizer
            problem = error
        failure.agree(problem)
        self._guards = [guarding(*pair) for pair in zip(self._optimizers, self.updates, strict=True)]
        for optimizer in self._optimizers:
            user_optimizer.replace_zero_grad(optimizer, window.drop)

    def make(self, scale: torch.Tensor) -> StepResult:
        """Step, or skip the step, with gradients that carry ``scale``, 0-dim float32; update scale and counters."""
        self._look_back()
        decision, absent = self._decide(self._gradients.complete(), scale)
        if self.averages is not None:
            self.averages.begin()
        for optimizer, update, guard in zip(self._optimizers, self.updates, self._guards, strict=True):
            with guard:
                update(decision.divisor, decision.skip.float(), absent)
            optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers step even after a skipped step
        if self._changes.watches:
            self._changes.end_step()
        if self.averages is not None:
            self.averages.move(decision.skip, compare=bool(absent))
        for counts in self._window.counts:
            counts.end_step(decision.skip)
        return self._record(decision)

    def _look_back(self) -> None:
        """Warn of the step before: of a gradient whose norm is 0, and of a schedule that a skipped step has moved."""
        made, _, skipped, _, vanished = self.counters.read()
        if vanished == 1:  # the first in a row
            user_optimizer.warn_of_vanished_gradient(made, self._optimizers)
        rates = [group.get("lr") for optimizer in self._optimizers for group in optimizer.param_groups]
        rates = [getattr(one, "_version", one) for one in rates]  # schedules fill tensors
        moves = rates != (self._rates or rates)
        if skipped and moves and self._moves and not self._warned:  # at this step and the one before
            self._warned = user_optimizer.warn_of_schedule(self._optimizers)
        self._rates, self._moves = rates, moves

    def _decide(self, found_inf: torch.Tensor, scale: torch.Tensor) -> tuple[StepDecision, list[FlatParam]]:
        """The decision of all ranks, and the parameters that no data rank has a gradient for; a collective.

        ``found_inf``: what :meth:`FlatGradients.complete` returned.
        """
        changed = self._changes.look() if self._changes.watches else self._nothing
        is_shared = self._context.world_size > 1
        presence = [self._presence.here(self._gradients.absent)] if is_shared else []
        control = torch.cat([self._findings(found_inf), self._losses.findings(), *presence, changed])
        if is_shared:
            all_reduce_(control)
        absent = self._gradients.absent
        # The host waits for the numbers only if they matter: tensor ranks alone differ only in what is frozen.
        if is_shared and (self._presence.any_frozen or (absent and self._differ)):
            absent = self._presence.absent_everywhere(absent, control[NUM_SUMS:-1])
        max_norm = self._context.config.clip_grad_norm
        decision = decide(control[:NUM_SUMS], scale, self._losses.size, self._window.mean_factor, max_norm)
        if self._failure.is_shared:
            self._failure.publish(decision.num_failed)
        if self._losses.unit.is_used:
            self._losses.unit.follow(decision.mean_count)
        if self._changes.watches:
            self._changes.agree(control[-1])
        return decision, absent

    def _findings(self, found_inf: torch.Tensor) -> torch.Tensor:
        """This rank's terms of the flag, the gradient's sum of squares and its number of zeros; float64, 3 elements."""
        zeros = self._nothing[0]
        if self._context.config.precision.log_num_zeros:
            stepped = [param for param in self._gradients.params if param.own[0] < param.own[1]]  # without padding
            norm_weights = [param.norm_weight for param in stepped]
            zeros = count_zeros([param.stepped_gradient for param in stepped], norm_weights, self._device)
        sums = None if self._sums is None or is_in_torch_dispatch_mode() else self._sums
        squares = self._norm_power(*self._gradients.for_norm, 2.0, self._device, sums)
        return torch.stack([found_inf.double(), squares, zeros])

    def _record(self, decision: StepDecision) -> StepResult:
        precision = self._context.config.precision
        self._scaler.commit(decision.overflow, ~decision.skip)
        # A loss of 0 has no gradient that could underflow. That of gradients which were set by hand is NaN.
        vanished = ~decision.skip & (decision.values[2] == 0) & (decision.values[4].abs() > 0)
        self.counters.add(decision.skip, decision.overflow, self._scaler.at_floor(), vanished)
        result = StepResult(decision.values, with_zeros=precision.log_num_zeros)
        if precision.verbose and self._context.is_main and self._scaler.get_scale() != result.loss_scale:
            print(f"paramp: loss scale changes from {result.loss_scale:g} to {self._scaler.get_scale():g}", flush=True)
        return result
