"""The report on a skipped step names every place where a non-finite value was planted."""

import math
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from families import SEED, WHOLE, family, offset
from pool import on_ranks
from reference import batches, local, rank_slice, small_gpt
from torch import nn

import paramp
from paramp.optim.overflow_report import RankCoordinates

NAN, INF, LARGE = float("nan"), float("inf"), 2.0**40
"""What is planted: the first two are added, the last one is a factor that takes fp16 beyond its range."""


class Planted(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, value, backward):
        ctx.value = value if backward else 0.0
        return x.clone() if backward else spoil(x, value)

    @staticmethod
    def backward(ctx, gradient):
        return spoil(gradient, ctx.value), None, None


def spoil(x, value):
    return x * value if value == LARGE else x + value


class Plant:
    """A hook on a module that spoils its output, or the gradient of that, in one microbatch of each window."""

    def __init__(self, engine, name, microbatch, backward, value):
        self.calls, self.microbatch = 0, microbatch
        self.period = engine._runner.num_microbatches * engine._losses._accumulation
        self.backward, self.value = backward, value
        self.handle = engine.module.get_submodule(name).register_forward_hook(self)

    def __call__(self, module, inputs, output):
        self.calls += 1
        if (self.calls - 1) % self.period == self.microbatch:
            return Planted.apply(output, self.value, self.backward)
        return None


SCALED = {"mode": "16-mixed", "init_scale": 2.0**10}
FOUR = {"size": 2, "microbatches": 4}
LAYOUTS = {
    "one": {"gradient_accumulation": 3},
    "pp2-tp2": {"parallel": {"pipeline": FOUR, "tensor": 2}},
    "interleaved-tp2": {"parallel": {"pipeline": FOUR | {"schedule": "interleaved-1f1b"}, "tensor": 2}},
    "dp2-tp2-sp": {"parallel": {"tensor": 2, "sequence_parallel": True, "pipeline": {"microbatches": 2}}},
    "zbv": {"parallel": {"pipeline": FOUR | {"schedule": "zbv"}}},
    "dp2-zero": {"parallel": {"zero": 1}, "gradient_accumulation": 2},
    "fsdp2": {"parallel": {"data": {"shard": 2}, "pipeline": {"microbatches": 2}}, "gradient_accumulation": 2},
    "fsdp2-tp2": {"parallel": {"data": {"shard": 2}, "tensor": 2}},
    "fsdp2-pp2": {"parallel": {"data": {"shard": 2}, "pipeline": FOUR}},
}
# module, rank, microbatch of the window, whether in the backward, value
PLACES = {
    "one": [
        ("blocks.1.attention.out", 0, 2, False, NAN),
        ("norm", 0, 1, True, INF),
        ("blocks.3.mlp.up", 0, 0, False, LARGE),
    ],
    "pp2-tp2": [
        ("blocks.0.attention.qkv", 1, 2, False, NAN),
        ("blocks.0.mlp", 0, 0, True, INF),
        ("blocks.3.mlp.down", 3, 1, False, INF),
        ("blocks.2.norm1", 2, 3, True, NAN),
        ("embedding", 1, 1, False, INF),
    ],
    "interleaved-tp2": [
        ("blocks.1.mlp.down", 2, 3, False, LARGE),
        ("blocks.2.attention", 1, 0, True, NAN),
        ("blocks.3.norm2", 3, 2, False, NAN),
    ],
    "dp2-tp2-sp": [
        ("blocks.1.mlp.up", 3, 1, False, INF),
        ("blocks.0.norm2", 2, 0, False, NAN),
        ("blocks.3.attention.out", 1, 1, True, INF),
    ],
    "zbv": [
        ("blocks.0", 0, 3, True, NAN),
        ("blocks.3.mlp.down", 0, 1, False, NAN),
        ("blocks.1.attention.qkv", 1, 2, True, INF),
        ("blocks.2.mlp.up", 1, 0, True, LARGE),
    ],
    "dp2-zero": [
        ("blocks.2.mlp.down", 1, 1, False, NAN),
        ("blocks.1.norm1", 1, 0, True, INF),
    ],
    "fsdp2": [
        ("blocks.2.mlp.down", 1, 1, False, NAN),
        ("blocks.1.norm1", 1, 3, True, INF),
        ("blocks.3", 0, 2, True, NAN),
        ("blocks.3.mlp.up", 1, 2, False, LARGE),
    ],
    "fsdp2-tp2": [
        ("blocks.1.mlp.up", 3, 0, False, INF),
        ("blocks.3.attention.out", 1, 0, True, INF),
        ("blocks.0.norm2", 2, 0, True, NAN),
    ],
    "fsdp2-pp2": [
        ("blocks.0.attention.qkv", 1, 2, False, NAN),
        ("blocks.2.norm1", 3, 3, True, NAN),
        ("blocks.3.mlp.down", 2, 1, False, INF),
    ],
}


def gpt_engine(**changes):
    model = small_gpt(**changes)
    return paramp.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-3), model.loss)[0]


def window(engine, seed=3):
    """One window of accumulation; its step's result."""
    for x, y in batches(engine._losses._accumulation, seed=seed):
        engine.zero_grad()
        dp = engine.context.dp
        engine.forward_backward(rank_slice(x, dp.rank, dp.size), rank_slice(y, dp.rank, dp.size))
        result = engine.step()
    return result


def find_planted(layout, chosen=slice(None)):
    with paramp.launch_from_torch({"precision": SCALED} | LAYOUTS[layout]) as context:
        engine = gpt_engine()
        assert window(engine).stepped
        with pytest.raises(RuntimeError, match="no step was skipped"):
            engine.diagnose_overflow()
        for name, rank, index, backward, value in PLACES[layout][chosen]:
            plant = Plant(engine, name, index, backward, value) if context.rank == rank else None
            assert window(engine).overflow
            origin = engine.diagnose_overflow().origin
            if plant is not None:
                plant.handle.remove()
            call, microbatch = divmod(index, engine._runner.num_microbatches)
            found = (origin.module, origin.place.rank, origin.call, origin.microbatch, origin.during, origin.kind)
            during, kind = "backward" if backward else "forward", "NaN" if value != value else "inf"
            assert found == (name, rank, call, microbatch, during, kind), found
            axes = dict(origin.place.axes)
            assert context.rank != rank or axes == context.coordinates
            assert origin.place.stage in context.config.parallel.pipeline.stages_of(axes["pp"])
            assert window(engine).stepped


def test_planted_overflows_are_named_in_one_process():
    find_planted("one")
    assert sum(len(places) for places in PLACES.values()) == 30


ON_FOUR = {"pp2-tp2": 1, "interleaved-tp2": 0, "dp2-tp2-sp": 1, "fsdp2-tp2": 1, "fsdp2-pp2": 0}
ON_TWO = {"zbv": 0, "dp2-zero": 1} | ({"fsdp2": 0} if WHOLE or SEED else {})
"""And at which place ``make test``, which tries every second one, begins."""


@family
@pytest.mark.parametrize(
    ("layout", "chosen"),
    [(layout, offset(f"planted {layout}", first, 2)) for layout, first in ON_FOUR.items()],
    ids=ON_FOUR,
)
@on_ranks(4, cuda=True)
def test_planted_overflows_are_named_on_four_ranks(world, layout, chosen):
    find_planted(layout, chosen)


@family
@pytest.mark.parametrize(
    ("layout", "chosen"),
    [(layout, offset(f"planted {layout}", first, 2)) for layout, first in ON_TWO.items()],
    ids=ON_TWO,
)
@on_ranks(2, cuda=True)
def test_planted_overflows_are_named_on_two_ranks(world, layout, chosen):
    find_planted(layout, chosen)


# ------------------------------------------------------------------------------------------------- kinds and messages


def test_for_an_overflow_of_scaled_gradients_the_report_advises_a_lower_rate_or_scale():
    with paramp.launch_from_torch({"precision": {"mode": "16-naive", "init_scale": 2.0**24}}):
        engine = gpt_engine(num_layers=1)
        assert window(engine).overflow
        report = engine.diagnose_overflow()
    assert report.scale == 2.0**24
    assert report.origin.during == "backward"
    assert report.origin.helped_by_scale
    assert 0 < report.origin.largest <= torch.finfo(torch.float16).max
    assert str(report).startswith(f"backward overflow in {report.origin.module}: inf")
    assert "lower the learning rate or the initial scale" in str(report)


@on_ranks(2)
def test_a_sharded_weight_that_is_not_finite_is_named(world):
    with paramp.launch_from_torch({"precision": SCALED, "parallel": {"data": {"shard": 2}}}):
        engine = gpt_engine(num_layers=2)
        if world.rank == 1:
            with torch.no_grad():
                local(engine.module.get_parameter("blocks.1.mlp.up.bias"))[3] = NAN
        assert window(engine).overflow
        origin = engine.diagnose_overflow().origin
        assert (origin.during, origin.module, origin.weight) == ("forward", "blocks.1.mlp.up", "bias")


def test_a_weight_that_is_not_finite_is_named():
    with paramp.launch_from_torch({"precision": SCALED}):
        engine = gpt_engine(num_layers=2)
        with torch.no_grad():
            engine.module.get_parameter("blocks.1.mlp.up.bias")[3] = NAN
        assert window(engine).overflow
        report = engine.diagnose_overflow()
    assert (report.kind, report.origin.module, report.origin.weight) == ("forward", "blocks.1.mlp.up", "bias")
    assert str(report).startswith(
        "no scale helps: blocks.1.mlp.up produced NaN in the forward of microbatch 0 on rank 0 (pp 0, dp 0, tp 0, "
        "stage 0); its bias is not finite itself"
    )


class Masked(nn.Module):
    """A mask of infinities that are meant, and one that cuts a hole into what overflows."""

    def __init__(self):
        super().__init__()
        self.mask = nn.Identity()
        self.scores, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.trap = False

    def forward(self, x):
        mask = self.mask(torch.full((4,), -INF).where(torch.arange(4) > 1, 0.0))
        x = self.last(torch.softmax(self.scores(x) + mask, dim=-1))
        if self.trap:
            x = torch.where(x < 50, x, torch.exp(x * 1e4)) + torch.where(x > 1e6, torch.sqrt(x - 1e9), 0.0)
        return x


def test_infinities_of_masks_are_ignored():
    torch.manual_seed(0)
    with paramp.launch_from_torch({"precision": "32-true"}):
        model = nn.Sequential(Masked(), nn.Linear(4, 4))
        engine, *_ = paramp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), F.mse_loss)
        x = torch.randn(4, 4)
        plant = Plant(engine, "0.last", 0, True, NAN)
        engine.forward_backward(x, x)
        assert engine.step().overflow
        report = engine.diagnose_overflow()
        assert (report.origin.module, report.origin.during) == ("0.last", "backward")
        plant.handle.remove()
        model[0].trap = True  # NaN in what is not selected: the loss is finite, and its derivative is not
        loss = engine.forward_backward(x, x)
        assert loss.isfinite()
        assert engine.step().overflow
        report = engine.diagnose_overflow()
    assert (report.kind, report.origin.module) == ("backward", "0")
    assert str(report).startswith("no scale helps: 0 produced NaN in the backward of microbatch 0")


def test_overflows_outside_of_modules_are_named():
    with paramp.launch_from_torch({"precision": "32-true"}):
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        spoilt = {"criterion": 0.0}
        engine, *_ = paramp.initialize(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            lambda output, target: F.mse_loss(output, target) + spoilt["criterion"],
        )
        good, bad = torch.ones(2, 4), torch.full((2, 4), NAN)
        for name, x, y, more in (
            ("the batch", bad, good, 0.0),
            ("the target", good, bad, 0.0),
            ("the criterion", good, good, NAN),
        ):
            spoilt["criterion"] = more
            engine.forward_backward(x, y)
            if more:  # a constant leaves the gradients finite
                engine.module[0].weight.grad.fill_(NAN)
            assert engine.step().overflow
            assert engine.diagnose_overflow().origin.module == name


def linear(scale, **config):
    """An engine whose one weight gets a gradient of ``scale`` times the mean of x, in fp16."""
    config = {"precision": {"mode": "16-naive", "init_scale": scale}, "clip_grad_norm": None} | config
    context = paramp.launch_from_torch(config)
    model = nn.Sequential(nn.Linear(1, 1, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    return context, paramp.initialize(model, optimizer, lambda output, _: output.mean())[0]


def test_an_overflow_in_the_sum_over_microbatches_is_named():
    context, engine = linear(2.0**16, gradient_accumulation=2)
    with context:
        for _ in range(2):  # each gives half of 2**16 times 1.5, and fp16 ends below 2**16
            engine.forward_backward(torch.full((2, 1), 1.5), torch.zeros(2, 1))
            result = engine.step()
        assert result.overflow
        report = engine.diagnose_overflow()
    assert report.kind == "sum"
    origin = report.origin
    assert (origin.during, origin.parameter, origin.call, origin.kind) == (
        "sum over microbatches",
        "0.weight",
        1,
        "inf",
    )
    assert "set grad_dtype to 'float32'" in str(report)


@pytest.mark.parametrize("parallel", [{}, {"zero": 1}, {"data": {"shard": 2}}], ids=["dp2", "zero1", "fsdp2"])
@on_ranks(2)
def test_an_overflow_in_the_sum_over_data_ranks_is_named(world, parallel):
    context, engine = linear(2.0**16, parallel=parallel)
    with context:
        engine.forward_backward(torch.full((2, 1), 1.5), torch.zeros(2, 1))
        assert engine.step().overflow
        report = engine.diagnose_overflow()
        assert (report.kind, report.origin.during, report.origin.parameter) == ("sum", "sum over ranks", "0.weight")
        assert "set reduce_dtype to 'float32'" in str(report)
        engine.forward_backward(torch.full((2, 1), 0.5), torch.zeros(2, 1))
        assert engine.step().stepped


def test_a_gradient_that_was_changed_by_hand_is_reported_as_finite_in_the_rerun():
    context, engine = linear(2.0)
    with context:
        engine.forward_backward(torch.ones(2, 1), torch.zeros(2, 1))
        engine.module[0].weight.grad.fill_(INF)
        assert engine.step().overflow
        report = engine.diagnose_overflow()
    assert report.kind == "gradients"
    assert [(found.name, found.count, found.size) for found in report.gradients] == [("0.weight", 1, 1)]
    assert "a rerun of the batch gave finite values" in str(report)


def test_without_forward_backward_the_report_lists_gradients_only():
    with paramp.launch_from_torch({"precision": SCALED}):
        engine = gpt_engine(num_layers=1)
        plant = Plant(engine, "blocks.0.mlp", 0, True, INF)
        x, y = next(batches(1))
        engine.backward(engine.criterion(engine(x), y))
        plant.handle.remove()
        assert engine.step().overflow
        report = engine.diagnose_overflow()
    assert (report.kind, report.origin) == ("gradients", None)
    assert "call forward_backward(x, y)" in str(report)


def plant_in_weight(engine, name, microbatch):
    """Spoil what one microbatch adds to the gradient of a parameter."""
    calls = []

    def hook(gradient):
        calls.append(None)
        return gradient * NAN if (len(calls) - 1) % engine._runner.num_microbatches == microbatch else None

    return engine._stages.used_for(engine.module.get_parameter(name)).register_hook(hook)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-zero-bubble"])
@on_ranks(2)
def test_an_overflow_in_the_gradient_of_a_single_weight_is_named(world, schedule):
    """In the split backward too, where gradients of weights are computed apart."""
    with paramp.launch_from_torch({"parallel": {"pipeline": FOUR | {"schedule": schedule}}}) as context:
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
        engine, *_ = paramp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), F.mse_loss)
        rank = 1 if schedule == "1f1b" else 0
        for microbatch in (0, 2):
            handle = plant_in_weight(engine, "2.bias", microbatch) if context.rank == rank else None
            engine.forward_backward(torch.ones(8, 4), torch.ones(8, 4))
            assert engine.step().overflow
            report = engine.diagnose_overflow()
            if handle is not None:
                handle.remove()
            origin = report.origin
            assert (report.kind, origin.parameter, origin.module) == ("weight gradient", "2.bias", "2")
            assert (origin.microbatch, origin.place.rank) == (microbatch, rank)
            assert [found.name for found in report.gradients] == ["2.bias"]


@pytest.mark.parametrize("layout", ["hsdp2x2", "fsdp2-pp2", "fsdp2-tp2"])
@on_ranks(4)
def test_an_overflow_in_the_gradient_of_a_single_sharded_weight_is_named(world, layout):
    """As the rank computes it, before it is summed into the shards of all."""
    more = {"hsdp2x2": {"pipeline": {"microbatches": 4}}, "fsdp2-pp2": {"pipeline": FOUR}, "fsdp2-tp2": {"tensor": 2}}
    with paramp.launch_from_torch({"parallel": {"data": {"shard": 2}} | more[layout]}) as context:
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
        plan = {"1": "colwise", "2": "rowwise"}
        engine, *_ = paramp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), F.mse_loss, plan=plan)
        x = torch.ones(8, 4)
        rank = 3
        for microbatch in {0, engine._runner.num_microbatches - 1}:
            engine.forward_backward(x, x)
            assert engine.step().stepped
            handle = plant_in_weight(engine, "2.bias", microbatch) if context.rank == rank else None
            engine.forward_backward(x, x)
            assert engine.step().overflow
            report = engine.diagnose_overflow()
            if handle is not None:
                handle.remove()
            origin = report.origin
            assert (report.kind, origin.parameter, origin.module) == ("weight gradient", "2.bias", "2"), report
            assert (origin.microbatch, origin.place.rank) == (microbatch, rank)
            assert {found.name for found in report.gradients} == {"2.bias"}


@pytest.mark.parametrize("kind", ["full backward hook", "hook of the output", "hook before the forward"])
def test_an_overflow_in_a_users_hook_is_named(kind):
    with paramp.launch_from_torch({"precision": SCALED}):
        engine = gpt_engine(num_layers=2)
        module = engine.module.get_submodule("blocks.1.norm2")
        handle = {
            "full backward hook": lambda: module.register_full_backward_hook(
                lambda module, gradients, _: tuple(gradient * NAN for gradient in gradients)
            ),
            "hook of the output": lambda: module.register_forward_hook(
                lambda module, inputs, output: output.register_hook(lambda gradient: gradient * NAN) and None
            ),
            "hook before the forward": lambda: module.register_forward_pre_hook(
                lambda module, inputs: tuple(value * NAN for value in inputs)
            ),
        }[kind]()
        assert window(engine).overflow
        origin = engine.diagnose_overflow().origin
        handle.remove()
    assert (origin.module, origin.during) == ("blocks.1.norm2", "forward" if "forward" in kind else "backward")


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        self.reentrant = reentrant

    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(self.second, self.first(x), use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
def test_overflows_under_activation_checkpointing_are_named(reentrant):
    with paramp.launch_from_torch({"precision": "32-true"}):
        model = nn.Sequential(Checkpointed(reentrant), nn.Linear(4, 4))
        engine, *_ = paramp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), F.mse_loss)
        for backward in (True, False):
            handle = model.get_submodule("0.second.0").register_forward_hook(
                lambda module, inputs, output, backward=backward: Planted.apply(output, NAN, backward)
            )
            engine.forward_backward(torch.ones(2, 4), torch.ones(2, 4))
            assert engine.step().overflow
            origin = engine.diagnose_overflow().origin
            handle.remove()
            assert (origin.module, origin.during) == ("0.second.0", "backward" if backward else "forward")


# ----------------------------------------------------------------------------------- training goes on as it would have


class Stateful(nn.Module):
    """Running statistics, dropout, and a buffer that is replaced."""

    def __init__(self):
        super().__init__()
        self.norm, self.linear, self.dropout = nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Dropout(0.5)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count = self.count + 1
        return x + self.dropout(torch.tanh(self.linear(self.norm(x))))


def train_with(config, diagnosed):
    """Weights, running statistics, results and random numbers of a run in which the third window overflows."""
    with paramp.launch_from_torch(config) as context:
        model = nn.Sequential(*(Stateful() for _ in range(4)))
        engine, *_ = paramp.initialize(model, torch.optim.AdamW(model.parameters(), lr=0.01), F.mse_loss)
        results = []
        for index in range(5):
            for _ in range(engine._losses._accumulation):
                generator = torch.Generator().manual_seed(10 * index + context.dp.rank)
                x = torch.randn(8, 8, generator=generator)
                engine.zero_grad()
                engine.forward_backward(x, x * 1e30 if index == 2 and context.dp.rank == 0 else x)
                result = engine.step()
            results.append((result.stepped, result.loss_scale, result.grad_norm if result.stepped else None))
            torch.rand(3)  # the default stream is not where the window left it
            if diagnosed and result.overflow:
                assert engine.diagnose_overflow().kind != "unknown"
        return engine.full_state_dict(), results, torch.rand(3)


def check_same(config):
    expected, actual = train_with(config, diagnosed=False), train_with(config, diagnosed=True)
    assert [stepped for stepped, *_ in actual[1]] == [True, True, False, True, True]
    assert actual[1] == expected[1]
    assert torch.equal(actual[2], expected[2])
    assert all(torch.equal(value, expected[0][name]) for name, value in actual[0].items())


def test_training_continues_bit_equal_after_a_diagnosis():
    check_same({"precision": SCALED, "gradient_accumulation": 2, "clip_grad_norm": 1.0})


class Rare(nn.Linear):
    """Fails once in eight calls, by chance."""

    def forward(self, x):
        return super().forward(x) * (NAN if torch.rand(()) < 1 / 8 else 1.0)


def test_the_rerun_draws_the_same_random_numbers():
    with paramp.launch_from_torch({"precision": "32-true", "max_skipped_in_a_row": None}):
        model = nn.Sequential(nn.Linear(4, 4), Rare(4, 4))
        engine, *_ = paramp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), F.mse_loss)
        found = []
        for _ in range(60):
            engine.forward_backward(torch.ones(2, 4), torch.ones(2, 4))
            if engine.step().overflow:
                found.append(engine.diagnose_overflow().origin.module)
    assert len(found) > 3
    assert set(found) == {"1"}


@pytest.mark.parametrize(
    "parallel",
    [{"pipeline": {"size": 2, "schedule": "zbv", "microbatches": 4}}, {"zero": 1}, {"data": {"shard": 2}}],
    ids=["zbv", "zero", "fsdp"],
)
@on_ranks(2)
def test_training_on_two_ranks_continues_bit_equal_after_a_diagnosis(world, parallel):
    check_same({"precision": {"mode": "16-naive", "init_scale": 16.0}, "parallel": parallel})


# ------------------------------------------------------------------------------------------------------------ stopping


def train_until_stopped(engine, steps=30):
    """How many windows were skipped until training stopped, and the error."""
    for index in range(steps):
        try:
            assert window(engine).overflow
        except paramp.TrainingDiverged as error:
            return index + 1, error
    return None


@on_ranks(2, cuda=True)
def test_training_stops_after_many_skipped_steps(world):
    config = {"parallel": {"pipeline": 2}, "precision": SCALED, "max_skipped_in_a_row": 3}
    with paramp.launch_from_torch(config, device=world.device) as context:
        engine = gpt_engine(num_layers=2)
        assert window(engine).stepped
        plant = Plant(engine, "blocks.1.mlp", 1, False, NAN) if context.rank == 1 else None
        assert window(engine).overflow
        if plant is not None:
            plant.handle.remove()
        assert engine.num_skipped_in_a_row == 1
        assert window(engine).stepped
        assert engine.num_skipped_in_a_row == 0
        plant = Plant(engine, "blocks.1.mlp", 1, False, NAN) if context.rank == 1 else None
        skipped, error = train_until_stopped(engine)
        assert (skipped, engine.num_skipped_in_a_row, engine.num_skipped, engine.num_steps) == (3, 3, 4, 2)
        assert str(error).startswith(
            "training stopped after optimizer step 6, because 3 steps in a row were skipped: no scale helps: "
            "blocks.1.mlp produced NaN in the forward of microbatch 1 on rank 1 (pp 1, dp 0, tp 0, stage 1)"
        )
        assert error.report.origin.module == "blocks.1.mlp"
        assert engine.full_state_dict()  # what is to be saved is there
        if plant is not None:
            plant.handle.remove()
        assert window(engine).stepped  # whoever goes on all the same may


@pytest.mark.parametrize(
    ("scaling", "most", "expected"),
    [
        ({"init_scale": 4.0, "min_scale": 1.0, "hysteresis": 1}, 50, 3),  # 4, 2, then 1 does not help either
        ({"init_scale": 2.0, "min_scale": 2.0, "hysteresis": 1}, 50, 2),
        ({"init_scale": 4.0, "min_scale": 4.0, "max_scale": 4.0}, 5, 5),  # a scale that stays has no floor to reach
        ({"init_scale": 4.0, "min_scale": 1.0}, None, None),
        ({"init_scale": 4.0, "min_scale": 1.0}, 1, 1),
    ],
)
def test_training_stops_at_the_floor_of_the_scale(scaling, most, expected):
    with paramp.launch_from_torch({"precision": {"mode": "16-naive"} | scaling, "max_skipped_in_a_row": most}):
        model = nn.Linear(4, 4)
        engine, *_ = paramp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), F.mse_loss)
        nothing = torch.full((2, 4), NAN)
        stopped = None
        for index in range(6):
            engine.forward_backward(nothing, nothing)
            try:
                assert engine.step().overflow
            except paramp.TrainingDiverged as error:
                stopped, message = index + 1, str(error)
                break
        assert stopped == expected
        if expected in (2, 3):
            assert "with the loss scale at its floor: no scale helps: the batch" in message


def test_counts_of_skipped_steps_continue_after_a_load():
    with paramp.launch_from_torch({"precision": SCALED, "max_skipped_in_a_row": 3}):
        engine = gpt_engine(num_layers=1)
        engine._counters.load([7, 4, 2])
        assert (engine.num_steps, engine.num_skipped, engine.num_skipped_in_a_row) == (7, 4, 2)
        Plant(engine, "norm", 0, False, NAN)
        assert train_until_stopped(engine)[0] == 1


# ----------------------------------------------------------------------------------------------- the scaler by itself


@on_ranks(2)
def test_a_stand_alone_scaler_names_parameters_and_ranks(world):
    scaler = paramp.DistributedGradScaler(init_scale=8.0)
    with paramp.launch_from_torch({"parallel": {"tensor": 2}}):
        model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
        scaler.scale(model(torch.ones(2, 3)).sum()).backward()
        model[1].weight.grad = torch.tensor([[3.0, INF]]) if world.rank == 1 else torch.ones(1, 2)
        if world.rank == 0:
            model[0].bias.grad[0] = NAN
        report = scaler.diagnose(model.named_parameters())
    first, second = report.gradients
    assert (first.name, first.place, first.kind) == (
        "0.bias",
        RankCoordinates(0, (("pp", 0), ("dp", 0), ("tp", 0)), 0),
        "NaN",
    )
    assert (second.name, second.place, second.kind) == (
        "1.weight",
        RankCoordinates(1, (("pp", 0), ("dp", 0), ("tp", 1)), 0),
        "inf",
    )
    assert (second.count, second.size, second.largest, report.scale) == (1, 2, 3.0, 8.0)
    assert "gradient of 1.weight on rank 1 (pp 0, dp 0, tp 1, stage 0): inf, 1 of 2 elements" in str(report)
    assert str(report).endswith("the largest finite magnitude in the others is 3")


def test_a_stand_alone_scaler_works_without_a_process_group():
    scaler = paramp.DistributedGradScaler(init_scale=8.0)
    model = nn.Linear(2, 1)
    model.weight.grad = torch.full((1, 2), INF)
    assert [str(found.place) for found in scaler.diagnose(model.named_parameters()).gradients] == ["rank 0"]
    assert not dist.is_initialized()
    assert local(model.weight.grad).isinf().all()


def skipped_linear(model, x, **config):
    """An engine whose only step was skipped."""
    engine, *_ = paramp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.nn.functional.mse_loss)
    engine.forward_backward(x, torch.full_like(x, config.pop("target", 0.0)))
    assert engine.step().overflow
    return engine


def test_a_finite_batch_that_leaves_the_range_of_fp16_is_not_called_infinite():
    with paramp.launch_from_torch({"precision": "16-mixed"}):
        model = torch.nn.Linear(4, 4)
        assert "the cast of the batch to the compute dtype produced inf" in str(
            skipped_linear(model, torch.full((2, 4), 1e5)).diagnose_overflow()
        )
        assert "the batch produced inf" in str(
            skipped_linear(torch.nn.Linear(4, 4), torch.full((2, 4), math.inf)).diagnose_overflow()
        )


def test_an_overflow_in_a_scripted_module_is_named_by_its_caller():
    with paramp.launch_from_torch({"max_skipped_in_a_row": 2}):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a FutureWarning from torch 2.15 on
            model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.jit.script(torch.nn.Linear(4, 4)))
        engine = skipped_linear(model, torch.ones(2, 4), target=math.nan)
        assert "the target produced NaN" in str(engine.diagnose_overflow())
        x = torch.ones(2, 4)
        engine.forward_backward(x, x * math.nan)
        with pytest.raises(paramp.TrainingDiverged, match="2 steps in a row were skipped"):
            engine.step()
