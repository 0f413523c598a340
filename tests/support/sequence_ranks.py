"""What a rank does in a segment of a random sequence: each operation on an engine and on the plain training."""

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from plain_training import CRITERIA, GAMMA, PlainTraining, batch_of, build_model, build_optimizer, edited, plan_of
from pool import World
from reference import local
from sequences import Case
from torch.distributed.tensor import DTensor, distribute_tensor

import paramp

ROUNDING = {"64-true": 2.0**-53, "32-true": 2.0**-24, "bf16": 2.0**-8}
"""The rounding error of a mode's dtype; fp16's where a mode is not in it."""
UNITS = 32
"""Of the way that a weight has gone, by which it may be elsewhere: as in the matrix of modes and layouts."""
EXACT = 1e-12


class Failing(Exception):
    """What a criterion raises that is to fail."""


class Criterion:
    """The case's criterion, which fails at its call ``fail_at`` if that is not None."""

    fail_at: int | None = None

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __call__(self, output, target):
        if self.fail_at is not None:
            self.fail_at -= 1
            if self.fail_at < 0:
                raise Failing("on purpose")
        return CRITERIA[self.kind](output, target)


def zero_gradient(parameter: torch.nn.Parameter) -> None:
    parameter.grad.zero_()


def local_part(whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """What a rank holds of ``whole`` where it holds ``like`` of it: data ranks divide what a tensor rank has."""
    for axis, placement in reversed([*enumerate(getattr(like, "placements", ()))]):
        dim = getattr(placement, "dim", None)  # also of a shard that has a stride
        if dim is not None:
            parts = whole.chunk(like.device_mesh.size(axis), dim)
            index = like.device_mesh.get_local_rank(axis)
            whole = parts[index] if index < len(parts) else whole.narrow(dim, 0, 0)
    return whole


def like(whole: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
    """``whole``, sharded as ``held`` is."""
    new = whole.to(held.dtype)
    return distribute_tensor(new, held.device_mesh, held.placements) if isinstance(held, DTensor) else new


def run_segment(world: World, case: Case, begin: str | None, end: str, last: bool, start: int) -> str | None:
    """Run ``case["operations"]`` from the checkpoint ``begin`` and save to ``end``; what differed first."""
    precision = case["mode"] if case["scaling"] is None else {"mode": case["mode"], **case["scaling"]}
    config = {
        "parallel": case["layout"]["parallel"],
        "precision": precision,
        "masters": case["masters"],
        "clip_grad_norm": case["clip"],
        "gradient_accumulation": case["accumulation"],
        "max_skipped_in_a_row": None,
        "hang_timeout": None,
        "ema": {"decay": case["ema"]} if case.get("ema") else None,
        "compile": {"backend": "eager"} if case.get("compile") else False,
        "reproducible": {"chunk": 1, "slices": 4} if case.get("exact") else False,
    }
    operations = [["check"], *case["operations"], *([] if last else [["save_end"]])]
    with _warnings_of(case), paramp.launch_from_torch(config, device="cpu") as context:
        runner = SegmentRunner(world, case, context, begin, end)
        for index, (name, *arguments) in enumerate(operations, start - 1):
            where = f"at operation {index}, {[name, *arguments]}"
            try:
                getattr(runner, name)(*arguments)
                runner.check()
                found = runner.agreed()
            except Exception as error:
                raise AssertionError(f"{where}: {type(error).__name__}: {error}") from error
            if found:
                return f"{where}: {found}"
    return None


@contextmanager
def _warnings_of(case: Case) -> Iterator[None]:
    """Without those that the operations bring about: on edits through ``.data`` and on batches without a step, and of
    and in compiled blocks."""
    ignored = [".* was changed in place without moving its version counter"]
    ignored += ["forward_backward: the second batch before a step", ".* batches have run, and step.. was never called"]
    if case.get("compile"):
        ignored += ["compile: ", "The .grad attribute of a Tensor that is not a leaf"]
        ignored += ["`torch.jit.script_method` is deprecated", ".*Function'> should not be instantiated"]
    with warnings.catch_warnings():
        for message in ignored:
            warnings.filterwarnings("ignore", message)
        yield


class SegmentRunner:
    """An engine and the plain training; one method for each operation."""

    def __init__(self, world: World, case: Case, context: Any, begin: str | None, end: str) -> None:
        self.world, self.case, self.context, self.end = world, case, context, end
        self.parts, self.part = context.dp.size, context.dp.rank
        self.pipelined = context.pp.size > 1
        self.sharded = isinstance(case["layout"]["parallel"].get("data"), dict)
        self.exact = case.get("exact", False)
        self.dtype = torch.float64 if case["mode"] == "64-true" else torch.float32
        self.plain = PlainTraining(case)
        self.problems: list[str] = []
        self.saved: tuple[str, dict[str, Any]] | None = None
        self.handles: list[Any] = []
        self.criterion = Criterion(case["criterion"])
        model = build_model(case, seed=1 if begin is None else 2)
        if case["hooked"] is not None and not self.sharded:  # FSDP2 calls no gradient hooks
            for whole in (model, self.plain.model):
                parameter = whole.get_parameter(case["hooked"])
                if parameter.requires_grad:
                    parameter.register_hook(lambda gradient: gradient * 0.5)
        self.engine, _, _, self.scheduler = paramp.initialize(
            model,
            build_optimizer(case["optimizer"], case["lr"], model),
            self.criterion,
            lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, GAMMA),
            plan=plan_of(case),
        )
        if begin is not None:
            self.engine.load(begin)
            self.plain.load(torch.load(f"{begin}.plain", weights_only=False))

    # -------------------------------------------------------------------------------------------------- comparison

    def agreed(self) -> str | None:
        """What any rank has found; the same on every rank."""
        count = torch.tensor(float(len(self.problems)))
        dist.all_reduce(count)
        if not count:
            return None
        found: list[Any] = [None] * self.world.size
        dist.all_gather_object(found, self.problems)
        return "\n".join(f"rank {rank}: {text}" for rank, texts in enumerate(found) for text in texts[:6])

    def expect(self, what: str, actual: Any, expected: Any) -> None:
        if actual != expected:
            self.problems.append(f"{what}: the engine has {actual}, expected {expected}")

    def expect_close(self, what: str, actual: float | None, expected: float | None, exact: float = 1e-9) -> None:
        """Finite and close, or neither finite."""
        if actual is None or expected is None:
            return self.expect(what, actual, expected)
        if not math.isfinite(actual) or not math.isfinite(expected):
            return self.expect(f"{what} is finite", math.isfinite(actual), math.isfinite(expected))
        tolerance = max(exact, UNITS * self.rounding)
        if abs(actual - expected) > tolerance * max(1.0, abs(expected)):
            self.problems.append(f"{what}: the engine has {actual!r}, expected {expected!r}")
        return None

    def expect_error(self, what: str, kinds: type[Exception] | tuple[type[Exception], ...], call: Any) -> None:
        """``call`` raises one of ``kinds``."""
        try:
            call()
        except kinds:
            return
        self.problems.append(f"{what}: expected an error, got none")

    @property
    def rounding(self) -> float:
        """The largest rounding error of the modes so far."""
        return max(ROUNDING.get(mode, ROUNDING.get(mode[:4], 2.0**-11)) for mode in self.plain.modes)

    def way(self, name: str) -> float:
        """How far the weight ``name`` has gone; at least a tenth of what the one did that went farthest, because a
        gradient that is small by cancellation is no more exact than a large one."""
        return max(self.plain.way[name], 0.1 * max(self.plain.way.values()))

    def expect_weight(self, name: str, actual: torch.Tensor, expected: torch.Tensor, first: str, half: bool) -> None:
        distance, norm = (float(one.norm()) for one in (actual.detach().double() - expected, expected))
        if self.plain.modes == {"64-true"}:
            allowed = EXACT * (1 + norm)
        else:
            allowed = self.rounding * (UNITS * self.way(first) + (self.plain.num_roundings + half) * norm)
            allowed += ROUNDING["32-true"] * (1 + self.plain.num_steps) * norm + 1e-7
        if not distance <= allowed:
            text = f"{distance:.3g} from the expected one of norm {norm:.3g}, allowed {allowed:.3g}"
            self.problems.append(f"{name}: {text}")

    @torch.no_grad()
    def check(self) -> None:
        """Compare all that a rank holds."""
        engine, plain = self.engine, self.plain
        weights = plain.parameters()
        for name, parameter in engine.named_parameters():
            first = plain.first_name(name)
            whole = weights[first].detach()
            self.expect_weight(name, local(parameter), local_part(whole, parameter), first, self.case["half"])
        for name, buffer in engine.module.named_buffers():
            if name.endswith("shift"):
                self.expect(f"{name} is as saved", torch.equal(buffer.double(), plain.model.get_buffer(name)), True)
        counts = (engine.num_steps, engine.num_skipped, engine.num_skipped_in_a_row)
        self.expect("steps made, skipped, and in a row", counts, (plain.num_steps, plain.num_skipped, plain.in_a_row))
        if plain.rule is not None:
            self.expect("the loss scale", engine.scaler.get_scale(), plain.rule.scale)
        ours, theirs = (one.optimizer.param_groups for one in (engine, plain))
        self.expect("lr", *([round(float(group["lr"]), 12) for group in groups] for groups in (ours, theirs)))

    def check_whole(self, what: str = "full_state_dict") -> None:
        """Compare the whole model, masters where there are, or ``averages`` of weights; a collective."""
        of_weights, plain = what == "full_state_dict", self.plain
        weights = plain.model.state_dict()
        averages = {} if of_weights else plain.averages_now()
        actual = (self.engine if of_weights else self.engine.ema).full_state_dict()
        self.expect(f"names of {what}", sorted(actual), sorted(weights))
        for name, value in actual.items():
            first = plain.first_name(name)
            if first in plain.way:
                expected = averages.get(first, weights[name])
                distance = float((value.double() - expected).norm())
                rounded = plain.num_roundings + (self.case["half"] and self.case["rounds_weights"])
                allowed = self.rounding * (UNITS * self.way(first) + rounded * float(expected.norm()))
                if not distance <= allowed + 1e-6:
                    self.problems.append(f"{what}: {name}: {distance:.3g} away, allowed {allowed:.3g}")

    def holding(self, name: str) -> list[tuple[str, torch.nn.Parameter]]:
        """This rank's parameters that are ``name`` or tied to it."""
        first = self.plain.first_name(name)
        return [pair for pair in self.engine.named_parameters() if self.plain.first_name(pair[0]) == first]

    # ------------------------------------------------------------------------------------------------------- batches

    def own_batch(self, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        return tuple(tensor.chunk(self.parts)[self.part].clone() for tensor in batch_of(seed, self.dtype))

    def _backward(self, x: torch.Tensor, y: torch.Tensor, how: str) -> float | None:
        engine = self.engine
        if how == "loop" and not self.pipelined:
            return float(engine.backward(engine.criterion(engine(x), y)))
        if how == "schedule":
            return float(engine.execute_schedule(iter([(x, y)]), return_output_label=False)[2])
        loss = engine.forward_backward(x, y, return_loss=how != "no loss")
        return None if loss is None else float(loss)

    def backward(self, seed: int, how: str, infinite_on: int | None = None) -> None:
        x, y = self.own_batch(seed)
        if self.part == infinite_on:
            x[0, 0, 0] = float("inf")
        loss = self._backward(x, y, how)
        expected = self.plain.forward_backward(seed, self.parts, poisoned=infinite_on)
        if loss is not None:
            self.expect_close("the loss", loss, expected, 1e-6)

    def nothing_counted(self, seed: int) -> None:
        if self.case["criterion"] == "counted":
            self.backward(-1 - seed, "plain")

    def infinite_batch(self, seed: int, part: int) -> None:
        self.backward(seed, "plain", part % self.parts)

    def failing_criterion(self, seed: int, at: int, how: str, part: int | None) -> None:
        """The criterion fails at its call ``at``, on one data rank or on all; then the window is dropped."""
        if self.case["accumulation"] > 1:
            how = "plain"  # without a loss the failure may be raised by the step, which is some calls away

        def call() -> None:
            self._backward(*self.own_batch(seed), how)
            if how == "no loss":  # a failure elsewhere may be raised by the next call only
                self.engine.step()

        if self.sharded:
            part = None  # data ranks that share shards wait for each other in the model
        if part is None or part % self.parts == self.part:
            calls = 1 if how == "loop" else self.context.config.parallel.pipeline.num_microbatches
            self.criterion.fail_at = at % calls
        self.expect_error("a criterion that fails", Exception, call)
        self.criterion.fail_at = None
        self._drop_window()

    def _drop_window(self) -> None:
        self.engine.zero_grad()
        self.plain.restart_window()

    def evaluate(self, seed: int, what: str) -> None:
        x, y = self.own_batch(seed)
        if what == "output":
            self.engine.eval()
            output = self.engine(x).detach()
            self.engine.train()
            expected = self.plain.output(seed, self.part, self.parts)
            self.expect_close("the output", float((output.double() - expected).norm() / expected.norm()), 0.0, 1e-6)
        elif what == "failing":
            self.criterion.fail_at = 0
            self.expect_error("a failing evaluation", (Failing, ValueError), lambda: self.engine.evaluate(x, y))
            self.criterion.fail_at = None
        else:
            loss = float(self.engine.evaluate(x, y))
            self.expect_close("the loss of an evaluation", loss, self.plain.evaluate(seed, self.parts), 1e-6)

    # ---------------------------------------------------------------------------------------------------------- steps

    def step(self) -> None:
        plain = self.plain
        if not plain.has_backward:
            self.expect_error("a step without a backward", RuntimeError, self.engine.step)
            return
        result = self.engine.step()
        expected = plain.step()
        for name in ("stepped", "overflow", "loss_scale"):
            self.expect(name, getattr(result, name), expected[name])
        self.expect_close("grad_norm", result.grad_norm, expected["grad_norm"])
        self.expect_close("the loss of the step", result.loss, expected["loss"])

    def guarded_step(self) -> None:
        self.expect_error("optimizer.step()", RuntimeError, self.engine.optimizer.step)

    def zero_grad(self, of: str) -> None:
        (self.engine if of == "engine" else self.engine.optimizer).zero_grad()
        self.plain.zero_grad()

    def infinite_gradient(self, rank: int, name: str) -> None:
        plain = self.plain
        parameter = plain.parameters()[plain.first_name(name)]
        if not plain.has_backward or parameter.grad is None or plain.first_name(name) in plain.zeroed:
            return
        if self.exact and plain.is_tied(name):
            return  # refused
        made = torch.zeros(())
        if self.world.rank == rank % self.world.size or self.exact:  # which depends on no layout
            for own, value in self.holding(name):
                if (own == name or not self.pipelined) and local(value.grad).numel():
                    local(value.grad).view(-1)[0] = float("inf")
                    made += 1
        dist.all_reduce(made)
        if made:
            plain.forced.add(plain.first_name(name))

    def diagnose(self) -> None:
        """Ask why the last step was skipped, which leaves all but the gradients as it was."""
        if self.plain.ended and self.plain.in_a_row:
            self.engine.diagnose_overflow()
            self.plain.drop()

    def averages(self, seed: int) -> None:
        """Compare the averages, and an evaluation with them."""
        self.check_whole("averages")
        with self.engine.ema.applied():
            loss = float(self.engine.evaluate(*self.own_batch(seed)))
        expected = self.plain.evaluate_averages(seed, self.parts)
        self.expect_close("the loss of an evaluation with averages", loss, expected, 1e-6)

    def whole(self) -> None:
        self.check_whole()
        if self.engine.ema is not None:
            self.check_whole("averages")
        self.expect("differences between replicas", self.engine.check_replicas(), [])

    # ---------------------------------------------------------------------------------------- changes by the user

    def _frozen_by(self, name: str) -> list[str]:
        names = [own for own in self.plain.parameters() if own == self.plain.first_name(name)]
        names += [own for own in self.plain.parameters() if name.endswith(".") and own.startswith(name)]
        return [own for own in names if own not in self.case["frozen"]]

    def freeze(self, name: str, trained: bool = False) -> None:
        for own in self._frozen_by(name):
            self.plain.parameters()[own].requires_grad_(trained)
            for _, parameter in self.holding(own):
                parameter.requires_grad_(trained)

    def thaw(self, name: str) -> None:
        self.freeze(name, trained=True)

    def switch(self, index: int, part: int | str | None) -> None:
        """Leave a module out of the forward, on one data rank or on all, or take it in again."""
        if part == "on":
            self.plain.inactive.pop(index, None)
        else:
            self.plain.inactive[index] = part  # type: ignore[assignment]
        modules = dict(self.engine.module.named_modules())
        if str(index) in modules:
            modules[str(index)].active = part == "on" or (part is not None and part % self.parts != self.part)

    @torch.no_grad()
    def edit(self, name: str, kind: str, seed: int, how: int) -> None:
        plain = self.plain
        if self.exact and self.case["half"] and kind != "copy":
            return  # of rounded weights in one process, of fp32 ones in FSDP2: other bits
        first = plain.first_name(name)
        whole = edited(plain.parameters()[first], kind, seed)
        if how >= 2:  # by loading a state
            held = self.engine.module.state_dict()
            state = {own: like(whole, value) for own, value in held.items() if plain.first_name(own) == first}
            self.engine.module.load_state_dict(state, strict=False, assign=how == 3)
        else:
            for _, parameter in self.holding(name):
                target = parameter.data if how == 0 else parameter
                if kind == "clamp":
                    target.clamp_(-0.25, 0.25)
                elif kind == "halve":
                    target.mul_(0.5)
                else:
                    local(target).copy_(local_part(whole, parameter))
        plain.edit(first, kind, seed)
        if how == 3:
            self.check_whole()  # which takes the values into the engine's own parameters

    def lr(self, factor: float) -> None:
        for optimizer in (self.engine.optimizer, self.plain.optimizer):
            for group in optimizer.param_groups:
                group["lr"] *= factor

    def schedule(self) -> None:
        self.scheduler.step()
        self.plain.schedule()

    def hook(self, name: str, kind: str, _: int) -> None:
        """A gradient hook: one that halves, or one that zeroes what has been added up."""
        plain = self.plain
        first = plain.first_name(name)
        if not plain.parameters()[first].requires_grad or (kind == "accumulated" and plain.waiting):
            return
        if self.sharded or (self.exact and plain.is_tied(name)):
            return  # FSDP2 calls none; the exact mode refuses it
        for parameter in (plain.parameters()[first], *(value for _, value in self.holding(first))):
            if kind == "tensor":
                self.handles.append(parameter.register_hook(lambda gradient: gradient * 0.5))
            else:
                self.handles.append(parameter.register_post_accumulate_grad_hook(zero_gradient))
        if kind == "accumulated":
            plain.zeroed.add(first)

    def unhook(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles = []
        self.plain.zeroed.clear()

    def scale(self, value: float) -> None:
        if self.plain.rule is not None and not self.plain.waiting:
            self.engine.scaler.update(value)
            self.plain.rule.scale = value

    def gradient(self, name: str, change: str) -> None:
        """Change a gradient between backward and step, where ZeRO has not reduced it yet."""
        plain = self.plain
        parameter = plain.parameters()[plain.first_name(name)]
        if not plain.has_backward or parameter.grad is None or self.context.config.parallel.zero:
            return
        for own in (parameter, *(value for _, value in self.holding(name))):
            if change == "none":
                own.grad = None
            else:
                own.grad.mul_(0.5)
        if change == "none":
            plain.forced.discard(plain.first_name(name))

    def thaw_frozen(self, seed: int) -> None:
        """Train what was frozen when the engine was made: no optimizer state is there for it."""
        if not self.case["frozen"] or self.case["accumulation"] > 1:
            return
        name = self.case["frozen"][seed % len(self.case["frozen"])]
        if int(name.partition(".")[0]) in self.plain.inactive:
            return  # a module that the forward leaves out gives no gradient: nothing would be trained
        self.zero_grad("engine")
        for _, parameter in self.holding(name):
            parameter.requires_grad_(True)

        def call() -> None:
            self._backward(*self.own_batch(seed), "plain")
            self.engine.step()

        self.expect_error("training what was frozen", (RuntimeError, ValueError), call)
        for _, parameter in self.holding(name):
            parameter.requires_grad_(False)
        self._drop_window()

    # ----------------------------------------------------------------------------------------------------- checkpoints

    def save(self, how: str) -> None:
        folder = f"{self.end}-own"
        if self.plain.waiting:
            self.expect_error("save within a window", paramp.CheckpointError, lambda: self.engine.save(folder))
            return
        self.engine.save(folder, wait=how == "wait")
        self.saved = folder, self.plain.snapshot()

    def load(self) -> None:
        if self.saved is not None:
            self.engine.load(self.saved[0])
            self.plain.load(self.saved[1])

    def load_weights(self) -> None:
        if self.saved is not None:
            self.engine.load(self.saved[0], weights_only=True)
            self.plain.load_weights(self.saved[1])

    def save_end(self) -> None:
        """Save for the next segment, after the steps that end the window."""
        while self.plain.waiting:
            self.backward(0, "plain")
            self.step()
            self.check()
        self.whole()
        self.engine.save(self.end)
        if self.world.rank == 0:
            torch.save(self.plain.snapshot(), f"{self.end}.plain")
