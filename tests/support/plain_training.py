"""A plain fp64 training in one process, without any paramp: what random sequences of calls are compared with.

The model, the optimizer and the criterion are made here for both sides. All that an engine adds to them is written a
second time, from its documentation: accumulation windows, the loss scaler's rule, skipped steps, which parameters are
stepped, what a checkpoint holds, how averages of weights move.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

WIDTH = 8
BATCH, LENGTH = 8, 4
"""Samples of a batch over all data ranks, and positions of a sample."""
NUM_BLOCKS = 4
LAST = NUM_BLOCKS + 1
PLAN = {"*.up": "colwise", "*.down": "rowwise"}
PLAN_OF_ENDS = {"0.proj": "colwise_gather", f"{LAST}.proj": "colwise_gather"}
SEQUENCE_PLAN = {
    "0": "scatter_sequence",
    "*.up": "sequence_colwise",
    "*.down": "sequence_rowwise",
    **{f"{block}.norm": "sequence" for block in range(1, NUM_BLOCKS + 1)},
    f"{LAST}": "gather_sequence",
}
GAINS = {"scalar": (), "vector": (1,), "none": None}
"""The shape of each block's own parameter. FSDP2 takes none without dims; no style of sequence parallelism fits one."""
GAMMA = 0.9
"""By which a step of the learning-rate scheduler multiplies."""
ALWAYS_TRAINED = f"{LAST}.norm.weight"
"""Never frozen, so that every loss has a gradient."""
TIED = ("0.proj.weight", f"{LAST}.proj.weight")


class First(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.active = True

    def forward(self, x):
        return x + self.proj(x) if self.active else x


class Block(nn.Module):
    def __init__(self, gain: str) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        shape = GAINS[gain]
        self.gain = 1.0 if shape is None else nn.Parameter(torch.ones(shape))
        self.register_buffer("shift", torch.zeros(WIDTH))
        self.active = True

    def forward(self, x):
        if not self.active:
            return x
        return x + self.gain * self.down(torch.tanh(self.up(self.norm(x)))) + self.shift


class Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.active = True

    def forward(self, x):
        x = self.norm(x)
        return x + self.proj(x) if self.active else x


class Planned(nn.Sequential):
    """With plans of its own, of which the layout chooses one."""

    ends = False

    def tensor_parallel_plan(self, tensor_size: int, sequence_parallel: bool) -> dict[str, str]:
        return (SEQUENCE_PLAN if sequence_parallel else PLAN) | (PLAN_OF_ENDS if self.ends else {})


def build_model(case: dict[str, Any], seed: int) -> nn.Sequential:
    """The model in fp32. Its values are multiples of 1/64, which every mode represents."""
    tied, frozen, gain = case["tied"], case["frozen"], case.get("gain", "scalar")
    model = (Planned if gain == "none" else nn.Sequential)(First(), *(Block(gain) for _ in range(NUM_BLOCKS)), Last())
    model.ends = case["shard_ends"]
    if tied:
        model[LAST].proj.weight = model[0].proj.weight
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            noise = torch.randn(tensor.shape, generator=generator)
            tensor.copy_(((0.3 * noise + (tensor == 1) * 0.7) * 64).round() / 64)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    return model


def build_optimizer(kind: str, lr: float, model: nn.Module) -> torch.optim.Optimizer:
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": others, "lr": lr / 2, "weight_decay": 0.0}]
    optimizers = {
        "sgd": lambda: torch.optim.SGD(groups, lr=lr, momentum=0.9),
        "sgd-plain": lambda: torch.optim.SGD(groups, lr=lr),
        "sgd-dampened": lambda: torch.optim.SGD(groups, lr=lr, momentum=0.9, dampening=0.1),
        "adam": lambda: torch.optim.Adam(groups, lr=lr, eps=1e-2),
        "adamw": lambda: torch.optim.AdamW(groups, lr=lr, eps=1e-2),
        "adamw-foreach": lambda: torch.optim.AdamW(groups, lr=lr, eps=1e-2, foreach=True),
        "rmsprop": lambda: torch.optim.RMSprop(groups, lr=lr, eps=1e-2, momentum=0.5),
        "nadam": lambda: torch.optim.NAdam(groups, lr=lr, eps=1e-2),
    }
    return optimizers[kind]()


def mean_loss(output, target):
    return nn.functional.mse_loss(output, target)


def counted_loss(output, target):
    """``(sum, count)`` over the positions that the target marks."""
    mask = target[..., 0] > -0.3
    return ((output - target).square().mean(-1) * mask).sum(), mask.sum()


CRITERIA = {"mean": mean_loss, "counted": counted_loss}


def batch_of(seed: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The batch over all data ranks. Its values are multiples of 1/64. If the seed is negative nothing of it counts."""
    generator = torch.Generator().manual_seed(abs(seed))
    x, y = ((torch.randn(BATCH, LENGTH, WIDTH, generator=generator) * 64).round() / 64 for _ in range(2))
    if seed < 0:
        y[..., 0] = -1.0
    return x.to(dtype), y.to(dtype)


def edited(values: torch.Tensor, kind: str, seed: int) -> torch.Tensor:
    """What an edit of ``kind`` makes of a whole weight; all its values are representable in half precision."""
    if kind == "clamp":
        return values.clamp(-0.25, 0.25)
    if kind == "halve":
        return values * 0.5
    generator = torch.Generator().manual_seed(seed)
    return ((torch.randn(values.shape, generator=generator) * 0.3 * 64).round() / 64).to(values.dtype)


SURE_OVERFLOW = 2.0**40
"""A loss scale at which fp16 gradients overflow whatever they are."""


class ScaleRule:
    """The loss scale, as documented: every overflow skips and restarts the growth interval; the scale backs off from
    the ``hysteresis``-th overflow on, counted since the beginning or the last growth. A move ends within the limits."""

    def __init__(self, init_scale, growth_interval, hysteresis, min_scale, max_scale) -> None:
        self.scale = init_scale
        self.growth_interval, self.hysteresis = growth_interval, hysteresis
        self.min_scale, self.max_scale = min_scale, max_scale
        self.good_steps = 0
        self.overflows = 0

    def update(self, overflow: bool) -> None:
        if overflow:
            self.good_steps = 0
            self.overflows += 1
            if self.overflows >= self.hysteresis:
                self._move(self.scale / 2)
            return
        self.good_steps += 1
        if self.good_steps == self.growth_interval:
            self.good_steps = self.overflows = 0
            self._move(self.scale * 2)

    def _move(self, scale: float) -> None:
        self.scale = min(max(scale, self.min_scale), self.max_scale)


class PlainTraining:
    """The other side of an engine, over ``dp`` parts of each batch."""

    def __init__(self, case: dict[str, Any]) -> None:
        self.case = case
        self.tied = case["tied"]
        self.model = build_model(case, seed=1).double()
        self.optimizer = build_optimizer(case["optimizer"], case["lr"], self.model)
        self.criterion = CRITERIA[case["criterion"]]
        self.accumulation = case["accumulation"]
        self.rule = None if case["scaling"] is None else ScaleRule(**case["scaling"])
        self.num_steps = self.num_skipped = self.in_a_row = 0
        self.scheduled_at = 0  # the number of steps when the scheduler last advanced
        self.averages: dict[str, torch.Tensor] | None = None  # of the weights; those of now until the first step
        self.modes = {case["mode"]}  # that it was trained in
        self.way = dict.fromkeys(self.parameters(), 0.0)
        self.num_roundings = 0
        self.hooks: dict[int, Any] = {}
        self.begin_segment()

    def begin_segment(self) -> None:
        """A fresh engine: hooks, frozen parameters and switches are those of the beginning."""
        for handle in self.hooks.values():
            handle.remove()
        self.hooks = {}
        self.zeroed: set[str] = set()
        self.inactive: dict[int, int | None] = {}
        for name, parameter in self.parameters().items():
            parameter.requires_grad_(name not in self.case["frozen"])
        self.restart_window()

    # ---------------------------------------------------------------------------------------------------- names

    def parameters(self) -> dict[str, nn.Parameter]:
        return dict(self.model.named_parameters())

    def first_name(self, name: str) -> str:
        return TIED[0] if self.tied and name == TIED[1] else name

    def is_tied(self, name: str) -> bool:
        return self.tied and name in TIED

    # --------------------------------------------------------------------------------------------------- window

    def restart_window(self) -> None:
        self.num_calls = 0
        self.drop()

    def drop(self) -> None:
        self.model.zero_grad(set_to_none=True)
        self.loss_sum = self.loss_weight = 0.0
        self.forced: set[str] = set()
        self.ended = False
        self.num_backwards = 0
        self.has_backward = False  # since the last call of step()

    @property
    def waiting(self) -> bool:
        """Gradients wait for a step."""
        return bool(self.num_calls or (self.num_backwards and not self.ended))

    def zero_grad(self) -> None:
        if self.num_calls == 0:
            self.drop()

    def switch(self, part: int, parts: int) -> None:
        """Set the switches of data rank ``part``."""
        for index, module in enumerate(self.model):
            module.active = index not in self.inactive or (
                self.inactive[index] is not None and self.inactive[index] % parts != part
            )

    def forward_backward(self, seed: int, parts: int, poisoned: int | None = None) -> float:
        if self.ended:
            self.drop()
        x, y = batch_of(seed, torch.float64)
        for part, (inputs, target) in enumerate(zip(x.chunk(parts), y.chunk(parts), strict=True)):
            self.switch(part, parts)
            if part == poisoned:
                inputs = inputs.clone()
                inputs[0, 0, 0] = float("inf")
            loss = self.criterion(self.model(inputs), target)
            if isinstance(loss, tuple):
                loss[0].backward()
                self.loss_sum += loss[0].item()
                self.loss_weight += loss[1].item()
            else:
                (loss / (parts * self.accumulation)).backward()
                self.loss_sum += loss.item()
                self.loss_weight += 1.0
        self.num_backwards += 1
        self.has_backward = True
        return self.mean_loss()

    def mean_loss(self) -> float:
        return self.loss_sum / self.loss_weight if self.loss_weight else float("nan")

    @torch.no_grad()
    def evaluate(self, seed: int, parts: int) -> float:
        x, y = batch_of(seed, torch.float64)
        total = weight = 0.0
        for part, (inputs, target) in enumerate(zip(x.chunk(parts), y.chunk(parts), strict=True)):
            self.switch(part, parts)
            loss = self.criterion(self.model(inputs), target)
            total += float(loss[0] if isinstance(loss, tuple) else loss)
            weight += float(loss[1]) if isinstance(loss, tuple) else 1.0
        return total / weight if weight else float("nan")

    @torch.no_grad()
    def output(self, seed: int, part: int, parts: int) -> torch.Tensor:
        self.switch(part, parts)
        return self.model(batch_of(seed, torch.float64)[0].chunk(parts)[part])

    def step(self) -> dict[str, Any]:
        """What the step of an engine would report; None for what is not known while accumulating."""
        self.num_calls += 1
        self.has_backward = False
        scale = 1.0 if self.rule is None else self.rule.scale
        if self.num_calls < self.accumulation:
            return {"stepped": False, "overflow": False, "loss_scale": scale, "grad_norm": None, "loss": None}
        self.num_calls, self.ended = 0, True
        self.averages = self.averages_now()
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        if not self.loss_weight and not self.forced:  # nothing was counted
            self.in_a_row = 0
            return {"stepped": False, "overflow": False, "loss_scale": scale, "grad_norm": 0.0, "loss": float("nan")}
        if self.case["criterion"] == "counted":
            for gradient in gradients:
                gradient /= self.loss_weight or 1.0
        overflow = (
            bool(self.forced) or scale >= SURE_OVERFLOW or not all(gradient.isfinite().all() for gradient in gradients)
        )
        norm = float("nan") if overflow else float(torch.stack([g.norm() for g in gradients]).norm())
        if not overflow:
            self._step(gradients, norm)
        self.num_steps += not overflow
        self.num_skipped += overflow
        self.in_a_row = self.in_a_row + 1 if overflow else 0
        if self.rule is not None:
            self.rule.update(overflow)
        loss = self.mean_loss()
        return {"stepped": not overflow, "overflow": overflow, "loss_scale": scale, "grad_norm": norm, "loss": loss}

    def _step(self, gradients: list[torch.Tensor], norm: float) -> None:
        clip = self.case["clip"]
        if clip is not None:
            for gradient in gradients:
                gradient *= min(1.0, clip / (norm + 1e-6))
        before = {name: parameter.detach().clone() for name, parameter in self.parameters().items()}
        self.optimizer.step()
        for name, parameter in self.parameters().items():
            self.way[name] += float((parameter.detach() - before[name]).norm())
        self.num_roundings += self.case["rounds_weights"]
        decay = self.case.get("ema") or 0.0
        weights = self.trained_weights()
        self.averages = {
            name: decay * average + (1 - decay) * weights[name] for name, average in self.averages_now().items()
        }

    def trained_weights(self) -> dict[str, torch.Tensor]:
        """Copies of those that were not frozen when the engine was made."""
        pairs = self.parameters().items()
        return {name: value.detach().clone() for name, value in pairs if name not in self.case["frozen"]}

    def averages_now(self) -> dict[str, torch.Tensor]:
        return self.trained_weights() if self.averages is None else self.averages

    @torch.no_grad()
    def evaluate_averages(self, seed: int, parts: int) -> float:
        """The loss of a batch with the averages in the place of the weights."""
        kept, weights = self.trained_weights(), self.parameters()
        for name, average in self.averages_now().items():
            weights[name].copy_(average)
        loss = self.evaluate(seed, parts)
        for name, value in kept.items():
            weights[name].copy_(value)
        return loss

    def schedule(self) -> None:
        if self.num_steps > self.scheduled_at:
            self.scheduled_at = self.num_steps
            for group in self.optimizer.param_groups:
                group["lr"] *= GAMMA

    @torch.no_grad()
    def edit(self, name: str, kind: str, seed: int) -> None:
        parameter = self.parameters()[name]
        parameter.copy_(edited(parameter, kind, seed))
        self.num_roundings += self.case["half"]

    # ----------------------------------------------------------------------------------------------- checkpoints

    def snapshot(self) -> dict[str, Any]:
        counts = ("num_steps", "num_skipped", "in_a_row", "scheduled_at", "num_roundings", "way", "rule", "modes")
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "mode": self.case["mode"]}
        state["averages"] = self.averages_now()
        return copy.deepcopy(state | {name: getattr(self, name) for name in counts})

    def load_weights(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.way = dict(state["way"])
        self.averages = None
        self.restart_window()

    def load(self, state: dict[str, Any]) -> None:
        """Go on from ``state``. From another mode only the scale and what it counts is taken, if both move it."""
        state = copy.deepcopy(state)
        mode, own = self.case["mode"], self.rule
        if mode not in state["modes"]:
            state["num_roundings"] += self.case["half"]
        if mode != state["mode"] and own is not None and (saved := state["rule"]) is not None:
            own.scale, own.good_steps, own.overflows = saved.scale, saved.good_steps, saved.overflows
        if mode != state.pop("mode"):
            state["rule"] = own
            state["modes"].add(mode)
        self.model.load_state_dict(state.pop("model"))
        saved = state.pop("optimizer")
        self.optimizer.load_state_dict(saved)
        # torch casts NAdam's product, a float32 number, to the weights' dtype, so that the run would go on otherwise.
        for index, values in saved["state"].items():
            if "mu_product" in values:
                parameter = [each for group in self.optimizer.param_groups for each in group["params"]][index]
                self.optimizer.state[parameter]["mu_product"] = values["mu_product"]
        for name, value in state.items():
            setattr(self, name, value)
        self.restart_window()
