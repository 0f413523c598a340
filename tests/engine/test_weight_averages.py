"""engine.ema: the moving average of masters in every layout, its checkpoints, and evaluation with it."""

import pytest
import torch
import torch.nn.functional as F
from pool import on_ranks, shared_folder
from reference import assert_trained, batches, local, rank_slice, small_gpt

import paramp
from paramp.base.dtensor import is_dtensor

DECAY = 0.75
LAYOUTS = {
    "one": {},
    "tp2": {"tensor": 2},
    "dp2-zero1": {"zero": 1},
    "fsdp2": {"data": {"shard": 2}},
    "pp2": {"pipeline": {"size": 2, "microbatches": 2}},
}
MODES = {
    "32-true": {"precision": "32-true"},
    "bf16-true": {"precision": "bf16-true"},
    "bf16-naive": {"precision": "bf16-naive"},
    "16-naive": {"precision": {"mode": "16-naive", "init_scale": 1024.0}, "masters": "remainder"},
}


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
        self.engine, *_ = paramp.initialize(model, make(model), model.loss)
        self.start()

    def start(self):
        self.first = {name: value.double() for name, value in self.engine.full_state_dict().items()}
        self.expected = dict(self.first)
        self.has_moved = False

    def steps(self, count, seed=3, *, overflow=False):
        for x, y in batches(count, seed=seed):
            x, y = (rank_slice(value, self.context.batch_axis.rank, self.context.batch_axis.size) for value in (x, y))
            self.engine.forward_backward(x, y)
            if overflow and self.context.is_main:
                local(next(self.engine.module.parameters()).grad).view(-1)[0] = float("inf")
            assert self.engine.step().stepped != overflow
            self.engine.zero_grad()
            if not overflow:
                self.has_moved = True
                for name, value in self.engine.full_state_dict().items():
                    self.expected[name] = DECAY * self.expected[name] + (1 - DECAY) * value.double()

    def check(self):
        averages = self.engine.ema.full_state_dict()
        if self.has_moved:
            assert_trained(averages, self.expected, self.first, atol=1e-7, rtol=1e-6)
        else:
            assert same({name: value.double() for name, value in averages.items()}, self.expected)


def config(layout, mode="32-true", **changes):
    return {"parallel": LAYOUTS[layout], "ema": {"decay": DECAY}, **MODES[mode], **changes}


def same(actual, expected):
    assert actual.keys() == expected.keys()
    return all(torch.equal(actual[name], value) for name, value in expected.items())


def moves_with_steps(layout, mode, make=adamw):
    with paramp.launch_from_torch(config(layout, mode)) as context:
        run = Run(context, make)
        run.check()
        run.steps(3)
        run.check()
        averages = run.engine.ema.full_state_dict()
        assert not same(averages, run.engine.full_state_dict())
        run.steps(1, overflow=True)
        assert same(run.engine.ema.full_state_dict(), averages)
        run.steps(1, seed=4)
        run.check()
        assert run.engine.check_replicas() == []


@pytest.mark.parametrize("mode", MODES)
def test_moves_with_steps_that_are_made(mode):
    moves_with_steps("one", mode)


@pytest.mark.parametrize(
    ("layout", "mode", "make"),
    [
        ("tp2", "bf16-naive", adamw),
        ("tp2", "32-true", muon_and_adamw),
        ("fsdp2", "32-true", muon_and_adamw),
        ("dp2-zero1", "16-naive", adamw),
        ("dp2-zero1", "bf16-true", adamw),
        ("pp2", "32-true", adamw),
    ],
)
@on_ranks(2)
def test_moves_in_every_layout(world, layout, mode, make):
    moves_with_steps(layout, mode, make)


def bytes_of_averages(config):
    """And their dtypes, on this rank; of a model of 2**13 parameters."""
    with paramp.launch_from_torch(config | {"ema": {"decay": DECAY}}):
        model = torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False), torch.nn.Linear(64, 64, bias=False))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        plan = {"0": "colwise", "1": "rowwise"}
        engine, *_ = paramp.initialize(model, optimizer, F.mse_loss, plan=plan)
        averages = [buffer.average for buffer in engine._weights.buffers]
        return sum(one.nbytes for one in averages), {one.dtype for one in averages}


@pytest.mark.parametrize("mode", ["32-true", "64-true", "bf16-true", "16-naive"])
def test_averages_are_fp32_or_wider(mode):
    expected = (2**16, {torch.float64}) if mode == "64-true" else (2**15, {torch.float32})
    assert bytes_of_averages({"precision": mode}) == expected


@on_ranks(2)
def test_averages_are_sharded_as_masters_are(world):
    for layout in ("tp2", "pp2", "dp2-zero1", "fsdp2"):
        config = {"parallel": LAYOUTS[layout], "precision": "bf16-naive"}
        assert bytes_of_averages(config) == (2**14, {torch.float32}), layout


def test_a_skipped_step_leaves_every_bit():
    """Also of -0, and of an average of weights that are not finite."""
    with paramp.launch_from_torch({"ema": {"decay": DECAY}}):
        model = torch.nn.Linear(2, 2)
        with torch.no_grad():
            model.bias.copy_(torch.tensor([-0.0, 0.0]))
            model.weight.copy_(torch.tensor([[float("inf"), 1.0], [1.0, float("-inf")]]))
        engine, *_ = paramp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), F.mse_loss)
        before = engine.ema.full_state_dict()
        engine.forward_backward(torch.ones(1, 2), torch.ones(1, 2))
        assert engine.step().overflow
        for name, value in engine.ema.full_state_dict().items():
            assert torch.equal(value.view(torch.int32), before[name].view(torch.int32))


def applies(layout, mode):
    with paramp.launch_from_torch(config(layout, mode)) as context:
        run = Run(context)
        run.steps(2)
        engine = run.engine
        kept = [local(one).detach().clone() for one in engine.parameters()]
        whole, averages = engine.full_state_dict(), engine.ema.full_state_dict()
        x, y = next(batches(1, seed=5))
        plain = small_gpt(num_layers=2)
        plain.load_state_dict(averages)
        with engine.ema.applied():
            if mode != "bf16-true":  # whose weights are the rounded averages
                for name, value in engine.full_state_dict().items():  # of fp16, remainders keep 2**-40
                    torch.testing.assert_close(value, averages[name], atol=2.0**-40 * (mode == "16-naive"), rtol=0.0)
            assert same(engine.ema.full_state_dict(), averages)
            for name, value in engine.named_parameters():  # on every rank, also of what others step
                value = value.full_tensor() if is_dtensor(value) else value
                expected = averages[name].to(value.dtype).view(value.shape)
                torch.testing.assert_close(value.detach(), expected, atol=0.0, rtol=0.0)
            loss = engine.evaluate(x, y).item()
            for refused in (engine.step, engine.ema.applied().__enter__, lambda: engine.forward_backward(x, y)):
                with pytest.raises(RuntimeError, match="applied"):
                    refused()
            for refused in (engine.save, engine.load):
                with pytest.raises(RuntimeError, match="applied"):
                    refused("nowhere")
        with torch.no_grad():
            assert loss == pytest.approx(plain.loss(plain(x), y).item(), rel=1e-5 if mode == "32-true" else 2e-2)
        assert all(torch.equal(local(one), value) for one, value in zip(engine.parameters(), kept, strict=True))
        assert same(engine.full_state_dict(), whole)
        with pytest.raises(KeyError), engine.ema.applied():
            raise KeyError
        assert same(engine.full_state_dict(), whole)
        run.steps(1, seed=6)
        run.check()


@pytest.mark.parametrize("mode", MODES)
def test_applied_evaluates_averages_and_restores_weights_and_masters(mode):
    applies("one", mode)


@pytest.mark.parametrize(("layout", "mode"), [("tp2", "32-true"), ("dp2-zero1", "16-naive"), ("pp2", "32-true")])
@on_ranks(2)
def test_applied_in_every_layout(world, layout, mode):
    applies(layout, mode)


@pytest.mark.parametrize(("before", "after"), [("tp2", "dp2-zero1"), ("dp2-zero1", "pp2"), ("pp2", "tp2")])
@on_ranks(2)
def test_another_layout_continues_it(world, before, after):
    path = shared_folder() / "saved"
    with paramp.launch_from_torch(config(before, "bf16-naive")) as context:
        run = Run(context)
        run.steps(2)
        run.engine.save(path)
        averages = run.engine.ema.full_state_dict()
    with paramp.launch_from_torch(config(after, "bf16-naive")) as context:
        resumed = Run(context)
        resumed.steps(1, seed=9)
        resumed.engine.load(path)
        assert same(resumed.engine.ema.full_state_dict(), averages)
        resumed.expected = run.expected
        resumed.steps(2, seed=4)
        resumed.check()


@on_ranks(2)
def test_replicas_of_it_are_compared(world):
    with paramp.launch_from_torch(config("one")) as context:
        engine = Run(context).engine
        buffer = engine._params.weights.buffers[0]
        if context.rank == 1:
            buffer.average[buffer.params[0].start] += 1
        assert [(one.kind, one.parameter) for one in engine.check_replicas()] == [("average", buffer.params[0].name)]


def test_checkpoints_without_it_and_runs_without_it(tmp_path):
    with paramp.launch_from_torch(config("one", ema=None)) as context:
        run = Run(context)
        assert run.engine.ema is None
        run.steps(1)
        run.engine.save(tmp_path / "without")
    for path, weights_only in (("without", False), ("with", True)):
        with paramp.launch_from_torch(config("one")) as context:
            run = Run(context)
            run.steps(2, seed=4)
            run.engine.save(tmp_path / "with")
            run.engine.load(tmp_path / path, weights_only=weights_only)
            run.start()  # it begins as the loaded weights
            run.check()
            run.steps(2)
            run.check()
    with paramp.launch_from_torch(config("one", ema=None)) as context:
        run = Run(context)
        run.engine.load(tmp_path / "with")


def test_it_begins_as_weights_that_are_loaded_into_the_model():
    with paramp.launch_from_torch(config("one", "bf16-naive")) as context:
        run = Run(context)
        run.engine.module.load_state_dict(small_gpt(num_layers=2, seed=8).state_dict())
        run.start()
        run.steps(1)
        run.check()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"decay": 1.0}, "ema.decay: got 1.0, expected a number of 0 or more, below 1"),
        ({"decay": -0.1}, "ema.decay: got -0.1, expected"),
        ({"decay": "0.9"}, "ema.decay: got '0.9', expected a number"),
        ({"dcay": 0.9}, "ema.dcay: no such key, expected one of decay .did you mean 'decay'"),
        (0.9, "ema: got 0.9, expected a table with decay or None"),
    ],
)
def test_values_that_are_refused(value, message):
    with pytest.raises(paramp.ConfigError, match=message):
        paramp.Config(ema=value)


def test_averages_in_inference_mode_leave_training_as_it_was():
    """Scratch memory made there could not be written to outside of it."""
    with paramp.launch_from_torch({**MODES["16-naive"], "ema": {"decay": DECAY}}) as context:
        run = Run(context)
        with torch.inference_mode(), run.engine.ema.applied():
            run.engine.full_state_dict()
        run.steps(1)
        with run.engine.ema.applied():
            pass
