"""A plain fp64 training in one process, without any paramp: what random sequences of calls are compared with.

The model, the optimizer and the criterion are made here for both sides. All that an engine adds to them is written a
second time, from its documentation: accumulation windows, the loss scaler's rule, skipped steps, which parameters are
stepped, what a checkpoint holds, how averages of weights move.
"""

import copy
from collections.abc import Iterator
from functools import partial
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
SEQUENCE_PLAN = {"0": "scatter_sequence", "*.up": "sequence_colwise", "*.down": "sequence_rowwise"}
SEQUENCE_PLAN |= {f"{block}.norm": "sequence" for block in range(1, NUM_BLOCKS + 1)} | {f"{LAST}": "gather_sequence"}
GAINS = {"scalar": (), "vector": (1,), "none": None}
"""The shape of each block's own parameter. FSDP2 takes none without dims; no style of sequence parallelism fits one."""
GAMMA = 0.9
"""By which a step of the learning-rate scheduler multiplies."""
TIED = ("0.proj.weight", f"{LAST}.proj.weight")
NAMES = [
    TIED[0],
    *(f"{block}.{name}" for block in range(1, NUM_BLOCKS + 1) for name in ("norm.bias", "up.weight", "up.bias")),
    *(f"{block}.{name}" for block in range(1, NUM_BLOCKS + 1) for name in ("down.weight", "down.bias", "gain")),
    *(f"{LAST}.norm.bias", TIED[1]),
]
"""Of parameters that operations name. The last norm's weight is never frozen, so that every loss has a gradient."""


class End(nn.Module):
    """The first module, or with a norm the last one."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH) if norm else nn.Identity()
        self.proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.active = True

    def forward(self, x):
        x = self.norm(x)
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
        return x + self.gain * self.down(torch.tanh(self.up(self.norm(x)))) + self.shift if self.active else x


class Planned(nn.Sequential):
    """With plans of its own, of which the layout chooses one."""

    ends = False

    def tensor_parallel_plan(self, tensor_size: int, sequence_parallel: bool) -> dict[str, str]:
        return (SEQUENCE_PLAN if sequence_parallel else PLAN) | (PLAN_OF_ENDS if self.ends else {})


def plan_of(case: dict[str, Any]) -> dict[str, str] | None:
    """What is passed for the model; None: it has plans of its own."""
    return None if case.get("gain") == "none" else PLAN | PLAN_OF_ENDS if case["shard_ends"] else PLAN


def randn(*shape: int, generator: torch.Generator, factor: float = 1.0) -> torch.Tensor:
    """Multiples of 1/64, which every mode represents."""
    return (torch.randn(shape, generator=generator) * factor * 64).round() / 64


def build_model(case: dict[str, Any], seed: int) -> nn.Sequential:
    """The model in fp32."""
    gain = case.get("gain", "scalar")
    blocks = (Block(gain) for _ in range(NUM_BLOCKS))
    model = (Planned if gain == "none" else nn.Sequential)(End(norm=False), *blocks, End(norm=True))
    model.ends = case["shard_ends"]
    if case["tied"]:
        model[LAST].proj.weight = model[0].proj.weight
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            noise = torch.randn(tensor.shape, generator=generator)
            tensor.copy_(((0.3 * noise + (tensor == 1) * 0.7) * 64).round() / 64)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in case["frozen"])
    return model


OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, momentum=0.9),
    "sgd-plain": torch.optim.SGD,
    "sgd-dampened": partial(torch.optim.SGD, momentum=0.9, dampening=0.1),
    "adam": partial(torch.optim.Adam, eps=1e-2),
    "adamw": partial(torch.optim.AdamW, eps=1e-2),
    "adamw-foreach": partial(torch.optim.AdamW, eps=1e-2, foreach=True),
    "rmsprop": partial(torch.optim.RMSprop, eps=1e-2, momentum=0.5),
    "nadam": partial(torch.optim.NAdam, eps=1e-2),
}


def build_optimizer(kind: str, lr: float, model: nn.Module) -> torch.optim.Optimizer:
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": others, "lr": lr / 2, "weight_decay": 0.0}]
    return OPTIMIZERS[kind](groups, lr=lr)


def counted_loss(output, target):
    """``(sum, count)`` over the positions that the target marks."""
    mask = target[..., 0] > -0.3
    return ((output - target).square().mean(-1) * mask).sum(), mask.sum()


CRITERIA = {"mean": nn.functional.mse_loss, "counted": counted_loss}


def batch_of(seed: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The batch over all data ranks. If the seed is negative nothing of it counts."""
    generator = torch.Generator().manual_seed(abs(seed))
    x, y = (randn(BATCH, LENGTH, WIDTH, generator=generator) for _ in range(2))
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
    # Odd multiples of 1/128, far from weights that are near their initial ones: a master whose rounding is set again
    # keeps its bits, which FSDP2 with its fp32 weights cannot know.
    return (randn(*values.shape, generator=generator, factor=0.3) + 1 / 128).to(values.dtype)


SURE_OVERFLOW = 2.0**40
"""A loss scale at which fp16 gradients overflow whatever they are."""


class ScaleRule:
    """The loss scale, as documented: every overflow skips and restarts the growth interval; the scale backs off from
    the ``hysteresis``-th overflow on, counted since the beginning or the last growth. A move ends within the limits."""

    def __init__(self, init_scale, growth_interval, hysteresis, min_scale, max_scale) -> None:
        self.scale = init_scale
        self.growth_interval, self.hysteresis = growth_interval, hysteresis
        self.min_scale, self.max_scale = min_scale, max_scale
        self.good_steps = self.overflows = 0

    def update(self, overflow: bool) -> None:
        factor = 1.0
        if overflow:
            self.good_steps = 0
            self.overflows += 1
            factor = 0.5 if self.overflows >= self.hysteresis else 1.0
        else:
            self.good_steps += 1
            if self.good_steps == self.growth_interval:
                self.good_steps = self.overflows = 0
                factor = 2.0
        if factor != 1.0:
            self.scale = min(max(self.scale * factor, self.min_scale), self.max_scale)


class PlainTraining:
    """The other side of an engine, over ``parts`` of each batch, one of each data rank."""

    def __init__(self, case: dict[str, Any]) -> None:
        self.case = case
        self.model = build_model(case, seed=1).double()
        self.optimizer = build_optimizer(case["optimizer"], case["lr"], self.model)
        self.rule = None if case["scaling"] is None else ScaleRule(**case["scaling"])
        self.num_steps = self.num_skipped = self.in_a_row = 0
        self.scheduled_at = 0  # the number of steps when the scheduler last advanced
        self.averages: dict[str, torch.Tensor] | None = None  # of the weights; those of now until the first step
        self.modes = {case["mode"]}  # that it was trained in
        self.way = dict.fromkeys(self.parameters(), 0.0)
        self.num_roundings = 0
        self.zeroed: set[str] = set()  # whose gradients a hook zeroes
        self.inactive: dict[int, int | None] = {}  # modules that the forward leaves out, on a data rank or on all
        self.restart_window()

    def parameters(self) -> dict[str, nn.Parameter]:
        return dict(self.model.named_parameters())

    def first_name(self, name: str) -> str:
        return TIED[0] if self.is_tied(name) else name

    def is_tied(self, name: str) -> bool:
        return self.case["tied"] and name in TIED

    # --------------------------------------------------------------------------------------------------- window

    def restart_window(self) -> None:
        self.num_calls = 0
        self.drop()

    def drop(self) -> None:
        self.model.zero_grad(set_to_none=True)
        self.loss_sum = self.loss_weight = 0.0
        self.forced: set[str] = set()  # whose gradients were made infinite
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
            off = self.inactive.get(index, "nowhere")
            module.active = off == "nowhere" or (off is not None and off % parts != part)

    def _losses(self, seed: int, parts: int, poisoned: int | None = None) -> Iterator[tuple[torch.Tensor, float]]:
        """The loss of each part, and its count or 1."""
        x, y = batch_of(seed, torch.float64)
        for part, (inputs, target) in enumerate(zip(x.chunk(parts), y.chunk(parts), strict=True)):
            self.switch(part, parts)
            if part == poisoned:
                inputs = inputs.clone()
                inputs[0, 0, 0] = float("inf")
            loss = CRITERIA[self.case["criterion"]](self.model(inputs), target)
            yield (loss[0], loss[1].item()) if isinstance(loss, tuple) else (loss, 1.0)

    def forward_backward(self, seed: int, parts: int, poisoned: int | None = None) -> float:
        if self.ended:
            self.drop()
        share = 1 if self.case["criterion"] == "counted" else parts * self.case["accumulation"]
        for loss, weight in self._losses(seed, parts, poisoned):
            (loss / share).backward()
            self.loss_sum += loss.item()
            self.loss_weight += weight
        self.num_backwards += 1
        self.has_backward = True
        return self.mean_loss()

    def mean_loss(self) -> float:
        return self.loss_sum / self.loss_weight if self.loss_weight else float("nan")

    @torch.no_grad()
    def evaluate(self, seed: int, parts: int) -> float:
        losses, weights = zip(*self._losses(seed, parts), strict=True)
        return float(sum(losses)) / sum(weights) if sum(weights) else float("nan")

    @torch.no_grad()
    def output(self, seed: int, part: int, parts: int) -> torch.Tensor:
        self.switch(part, parts)
        return self.model(batch_of(seed, torch.float64)[0].chunk(parts)[part])

    def step(self) -> dict[str, Any]:
        """What the step of an engine would report; None for what is not known while accumulating."""
        self.num_calls += 1
        self.has_backward = False
        scale = 1.0 if self.rule is None else self.rule.scale
        report = {"stepped": False, "overflow": False, "loss_scale": scale, "grad_norm": None, "loss": None}
        if self.num_calls < self.case["accumulation"]:
            return report
        self.num_calls, self.ended = 0, True
        self.averages = self.averages_now()
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        if not self.loss_weight and not self.forced:  # nothing was counted
            self.in_a_row = 0
            return report | {"grad_norm": 0.0, "loss": float("nan")}
        if self.case["criterion"] == "counted":
            torch._foreach_div_(gradients, self.loss_weight or 1.0)
        finite = all(gradient.isfinite().all() for gradient in gradients)
        overflow = bool(self.forced) or scale >= SURE_OVERFLOW or not finite
        norm = float("nan") if overflow else float(torch.stack([g.norm() for g in gradients]).norm())
        if not overflow:
            self._step(gradients, norm)
        self.num_steps += not overflow
        self.num_skipped += overflow
        self.in_a_row = self.in_a_row + 1 if overflow else 0
        if self.rule is not None:
            self.rule.update(overflow)
        return report | {"stepped": not overflow, "overflow": overflow, "grad_norm": norm, "loss": self.mean_loss()}

    def _step(self, gradients: list[torch.Tensor], norm: float) -> None:
        if self.case["clip"] is not None:
            torch._foreach_mul_(gradients, min(1.0, self.case["clip"] / (norm + 1e-6)))
        before = {name: parameter.detach().clone() for name, parameter in self.parameters().items()}
        self.optimizer.step()
        for name, parameter in self.parameters().items():
            self.way[name] += float((parameter.detach() - before[name]).norm())
        self.num_roundings += self.case["rounds_weights"]
        decay, weights = self.case.get("ema") or 0.0, self.trained_weights()
        averages = self.averages_now().items()
        self.averages = {name: decay * average + (1 - decay) * weights[name] for name, average in averages}

    def trained_weights(self) -> dict[str, torch.Tensor]:
        """Copies of those that were not frozen when the engine was made."""
        pairs = self.parameters().items()
        return {name: value.detach().clone() for name, value in pairs if name not in self.case["frozen"]}

    def averages_now(self) -> dict[str, torch.Tensor]:
        return self.trained_weights() if self.averages is None else self.averages

    @torch.no_grad()
    def evaluate_averages(self, seed: int, parts: int) -> float:
        """The loss of a batch with the averages in the place of the weights."""
        kept = self.trained_weights()
        self.model.load_state_dict(self.averages_now(), strict=False)
        loss = self.evaluate(seed, parts)
        self.model.load_state_dict(kept, strict=False)
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
        state |= {"averages": self.averages_now()}
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
        if mode != state.pop("mode"):
            if own is not None and (saved := state["rule"]) is not None:
                own.scale, own.good_steps, own.overflows = saved.scale, saved.good_steps, saved.overflows
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
