"""engine.ema: the moving average of masters in every layout, its checkpoints, and evaluation with it."""

import functools
import math

import pytest
import torch
from families import rarely
from layouts import layouts
from pool import on_ranks
from reference import assert_trained, batches, local, small_gpt, whole
from small_engines import assert_same_tensors, each_raises, engine_of, everywhere, own_part, train_step
from torch import nn

import paramp

DECAY = 0.75
LAYOUTS = layouts("1, tp2, dp2-zero1, fsdp2, pp2")
NAIVE = {"mode": "16-naive", "init_scale": 1024.0}


def config(layout="1", precision="32-true", decay=DECAY):
    masters = {"masters": "remainder"} if precision is NAIVE else {}
    return {"parallel": LAYOUTS[layout], "precision": precision, "ema": decay and {"decay": decay}, **masters}


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)


def muon_and_adamw(model):
    """The first optimizer's matrices are stepped whole by their owners."""
    matrices = [value for name, value in model.named_parameters() if value.ndim == 2 and "blocks" in name]
    rest = [value for name, value in model.named_parameters() if value.ndim != 2 or "blocks" not in name]
    return [torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(rest, lr=1e-2, eps=1e-4)]


class Run:
    """An engine, and the average of its masters computed by hand from whole models."""

    def __init__(self, context, make=adamw):
        model = small_gpt(num_layers=2)
        self.context = context
        self.engine = engine_of(model, model.loss, make(model))
        self.start()

    def start(self):
        self.first = {name: value.double() for name, value in self.engine.full_state_dict().items()}
        self.expected = dict(self.first)
        self.check()

    def steps(self, count, seed=3, *, overflow=False):
        for x, y in batches(count, seed=seed):
            self.engine.forward_backward(*own_part(self.context, x, y))
            if overflow and self.context.is_main:
                local(next(self.engine.module.parameters()).grad).view(-1)[0] = math.inf
            assert self.engine.step().stepped != overflow
            self.engine.zero_grad()
            if not overflow:
                for name, value in self.engine.full_state_dict().items():
                    self.expected[name] = DECAY * self.expected[name] + (1 - DECAY) * value.double()
        self.check()

    def check(self):
        averages = self.engine.ema.full_state_dict()
        if any(not torch.equal(value, self.first[name]) for name, value in self.expected.items()):
            assert_trained(averages, self.expected, self.first, atol=1e-7, rtol=1e-6)
        else:
            assert_same_tensors({name: value.double() for name, value in averages.items()}, self.expected)


CASES = [
    ("1", "32-true", adamw),
    ("1", "bf16-true", adamw),
    ("1", "bf16-naive", adamw),
    ("tp2", "bf16-naive", adamw),
    ("tp2", "32-true", muon_and_adamw),
    ("fsdp2", "32-true", muon_and_adamw),
    ("dp2-zero1", NAIVE, adamw),
    ("dp2-zero1", "bf16-true", adamw),
    ("pp2", "32-true", adamw),
]


@pytest.mark.parametrize(
    "number", rarely(range(len(CASES)), 1, 5, 6), ids=["-".join(map(str, case[:2])) for case in CASES]
)
@on_ranks(lambda number: 1 if CASES[number][0] == "1" else 2)
def test_averages_follow_the_steps_that_are_made_and_take_the_place_of_weights(world, number):
    layout, precision, make = CASES[number]
    with paramp.launch_from_torch(config(layout, precision)) as context:
        run = Run(context, make)
        engine = run.engine
        with torch.inference_mode(), engine.ema.applied():  # what is made there could not be written to elsewhere
            engine.full_state_dict()
        run.steps(3)
        averages = engine.ema.full_state_dict()
        run.steps(1, overflow=True)
        assert_same_tensors(engine.ema.full_state_dict(), averages)
        kept = [local(one).detach().clone() for one in engine.parameters()]
        weights = engine.full_state_dict()
        x, y = next(batches(1, seed=5))
        plain = small_gpt(num_layers=2)
        plain.load_state_dict(averages)
        with engine.ema.applied():
            if precision != "bf16-true":  # whose weights are the rounded averages
                for name, value in engine.full_state_dict().items():  # of fp16, remainders keep 2**-40
                    torch.testing.assert_close(value, averages[name], atol=2.0**-40 * (precision is NAIVE), rtol=0.0)
            assert_same_tensors(engine.ema.full_state_dict(), averages)
            for name, value in engine.named_parameters():  # on every rank, also of what others step
                found = whole(value.detach())
                assert torch.equal(found, averages[name].to(found.dtype).view(found.shape)), name
            loss = engine.evaluate(x, y).item()
            calls = [engine.step, engine.ema.applied().__enter__, lambda: engine.forward_backward(x, y)]
            for refused in (*calls, lambda: engine.save("nowhere"), lambda: engine.load("nowhere")):
                with pytest.raises(RuntimeError, match="applied"):
                    refused()
            assert not engine.flush().stepped  # of a window that is empty
        with torch.no_grad():
            assert loss == pytest.approx(plain.loss(plain(x), y).item(), rel=1e-5 if precision == "32-true" else 2e-2)
        assert all(torch.equal(local(one), value) for one, value in zip(engine.parameters(), kept, strict=True))
        assert_same_tensors(engine.full_state_dict(), weights)
        with pytest.raises(KeyError), engine.ema.applied():
            raise KeyError
        engine.forward_backward(x, y)
        with engine.ema.applied(), pytest.raises(RuntimeError, match="applied"):
            engine.flush()
        engine.zero_grad()
        assert_same_tensors(engine.full_state_dict(), weights)
        run.steps(1, seed=4)
        assert engine.check_replicas() == []


@on_ranks(2)
def test_averages_are_fp32_or_wider_and_sharded_as_masters_are(world):
    """Of 2**13 parameters on two ranks."""
    cases = [("tp2", mode) for mode in ("32-true", "64-true", "bf16-true", "16-naive")]
    for layout, mode in cases + [(layout, "bf16-naive") for layout in ("tp2", "pp2", "dp2-zero1", "fsdp2")]:
        with paramp.launch_from_torch(config(layout, mode)):
            model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
            engine = engine_of(model, plan={"0": "colwise", "1": "rowwise"})
            averages = [buffer.average for buffer in engine._weights.buffers]
        expected = torch.float64 if mode == "64-true" else torch.float32
        assert {one.dtype for one in averages} == {expected}
        assert sum(one.numel() for one in averages) == 2**12, layout


def test_a_skipped_step_leaves_every_bit():
    """Also of -0, and of an average of weights that are not finite."""
    with paramp.launch_from_torch(config()):
        model = nn.Linear(2, 2)
        with torch.no_grad():
            model.bias.copy_(torch.tensor([-0.0, 0.0]))
            model.weight.copy_(torch.tensor([[math.inf, 1.0], [1.0, -math.inf]]))
        engine = engine_of(model)
        before = engine.ema.full_state_dict()
        assert train_step(engine, torch.ones(1, 2)).overflow
        for name, value in engine.ema.full_state_dict().items():
            assert torch.equal(value.view(torch.int32), before[name].view(torch.int32))


def test_they_begin_as_parameters_that_have_replaced_the_models():
    with paramp.launch_from_torch(config()):
        engine = engine_of(nn.Linear(2, 2))
        new = {name: value + 1 for name, value in engine.module.state_dict().items()}
        engine.module.load_state_dict(new, assign=True)
        assert_same_tensors(engine.ema.full_state_dict(), new)


def test_a_step_without_anything_to_count_leaves_them():
    with paramp.launch_from_torch(config()):
        engine = engine_of(nn.Linear(2, 2), lambda output, counted: ((output * counted).sum(), counted.sum()))
        assert train_step(engine, torch.ones(1, 2), torch.ones(1, 2)).stepped
        before = engine.ema.full_state_dict()
        assert not train_step(engine, torch.ones(1, 2), torch.zeros(1, 2)).stepped
        assert all(torch.equal(value, before[name]) for name, value in engine.ema.full_state_dict().items())
        assert not torch.equal(before["weight"], engine.full_state_dict()["weight"])


@on_ranks(2)
def test_replicas_of_it_are_compared(world):
    with paramp.launch_from_torch(config()):
        engine = engine_of(nn.Linear(2, 2, bias=False))
        if world.rank == 1:
            engine._params.weights.buffers[0].average[0] += 1
        found = [(one.kind, one.parameter) for one in engine.check_replicas()]
        assert everywhere(found) == [[("average", "weight")]] * 2


def test_checkpoints_without_it_and_runs_without_it(tmp_path):
    def without():
        model = small_gpt(num_layers=2, seed=8)
        return engine_of(model, model.loss, adamw(model))

    with paramp.launch_from_torch(config(decay=None)):
        engine = without()
        assert engine.ema is None
        train_step(engine, *next(batches(1)))
        engine.save(tmp_path / "without")
    with paramp.launch_from_torch(config()) as context:
        run = Run(context)
        run.steps(2, seed=4)
        run.engine.save(tmp_path / "with")
        run.engine.load(tmp_path / "without")
        run.start()  # it begins as the loaded weights
        run.steps(2)
    with paramp.launch_from_torch(config(decay=None)):
        without().load(tmp_path / "with")


def test_values_that_are_refused():
    values = {
        "ema.decay: got 1.0, expected a number of 0 or more, below 1": {"decay": 1.0},
        "ema.decay: got -0.1, expected": {"decay": -0.1},
        "ema.decay: got '0.9', expected a number": {"decay": "0.9"},
        "ema.dcay: no such key, expected one of decay .did you mean 'decay'": {"dcay": 0.9},
        "ema: got 0.9, expected a table with decay or None": 0.9,
    }
    calls = {message: functools.partial(paramp.Config, ema=value) for message, value in values.items()}
    each_raises(paramp.ConfigError, calls)
