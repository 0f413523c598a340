"""Several optimizers, and those that need whole matrices where ranks have shards, against one process."""

import functools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from counting import Collectives
from families import cases, family
from lamb import ClipsItself, Elementwise, Lamb, Named, OfElements, OfMatricesOnly, Random
from pool import on_ranks, run_on_ranks, shared_folder
from reference import assert_trained, batches, rank_slice, small_gpt
from torch import nn

import paramp
from paramp.optim.matrices.exchange import owners
from paramp.optim.matrices.trial import ELEMENTWISE, needs_whole_matrices

CPU = torch.device("cpu")


def split(model):
    """The 2-dim weights of the blocks, and the other parameters."""
    hidden = [value for name, value in model.named_parameters() if name.startswith("blocks.") and value.ndim == 2]
    chosen = set(hidden)
    return hidden, [value for value in model.parameters() if value not in chosen]


def muon_and_adamw(model):
    hidden, rest = split(model)
    return [torch.optim.Muon(hidden, lr=1e-3), torch.optim.AdamW(rest, lr=1e-3, eps=1e-4)]


def adamw_and_lamb(model):
    """Both count steps: the first in tensors, the second in Python numbers."""
    hidden, rest = split(model)
    return [torch.optim.AdamW(rest, lr=1e-3, eps=1e-4), Lamb(hidden, lr=0.01)]


def lamb(model):
    """Over all parameters: replicated and 1-dim ones too."""
    return Lamb(model.parameters(), lr=0.01)


def adafactor(model):
    return [torch.optim.Adafactor(model.parameters(), lr=0.01)]


def plain_steps(model):
    """Elementwise optimizers that step themselves, each a part of the model."""
    hidden, rest = split(model)
    half = len(rest) // 2
    return [
        torch.optim.RMSprop(hidden, lr=1e-3, momentum=0.5, eps=1e-4),
        torch.optim.NAdam(rest[:half], lr=1e-3, eps=1e-4),
        OfElements(rest[half:], lr=1e-3, eps=1e-4),
    ]


def one_process(make, steps, noise=0.0, dtype=torch.float32):
    """The weights after a plain torch loop, whose gradients are multiplied by 1 + ``noise`` x standard normal."""
    model = small_gpt(num_layers=2).to(dtype)
    made = make(model)
    generator = torch.Generator().manual_seed(1)
    for x, y in batches(steps):
        model.zero_grad()
        logits = model(x)
        F.cross_entropy(logits.reshape(-1, logits.shape[-1]), y.reshape(-1)).backward()
        for parameter in model.parameters():
            parameter.grad *= 1 + noise * torch.randn(parameter.shape, generator=generator)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in made if isinstance(made, list) else [made]:
            optimizer.step()
    return model.state_dict()


def start(parallel, make, precision="32-true", **options):
    context = paramp.launch_from_torch({"parallel": parallel, "precision": precision, "clip_grad_norm": 1.0} | options)
    model = small_gpt(num_layers=2)
    return context, paramp.initialize(model, make(model), model.loss)[0]


def train(engine, steps, first=0):
    """The losses of ``steps`` steps."""
    axis, losses = engine.context.batch_axis, []
    for x, y in list(batches(first + steps))[first:]:
        losses.append(float(engine.forward_backward(*(rank_slice(one, axis.rank, axis.size) for one in (x, y)))))
        assert engine.step().stepped
    return losses


def trained(parallel, make, steps, precision="32-true"):
    context, engine = start(parallel, make, precision)
    with context:
        train(engine, steps)
        return engine.full_state_dict()


def distance(weights, others):
    return max((weights[name] - other).abs().max().item() for name, other in others.items())


NAIVE = {"mode": "16-naive", "init_scale": 1024.0}
LAYOUTS = {
    "tp2": (2, {"tensor": 2}),
    "dp2 + zero1": (2, {"zero": 1}),
    "pp2·tp2": (4, {"pipeline": {"size": 2, "microbatches": 2}, "tensor": 2}),
    "dp2·tp2 + zero1": (4, {"tensor": 2, "zero": 1}),
    "fsdp2": (2, {"data": {"shard": 2}}),
    "fsdp4": (4, {"data": {"shard": 4}}),
    "hsdp2x2": (4, {"data": {"replicate": 2, "shard": 2}}),
    "fsdp2·tp2": (4, {"data": {"shard": 2}, "tensor": 2}),
    "fsdp2·pp2": (4, {"data": {"shard": 2}, "pipeline": {"size": 2, "microbatches": 2}}),
}


def muon_drifts(world, layout):
    expected = one_process(muon_and_adamw, 20)
    allowed = 3 * distance(one_process(muon_and_adamw, 20, noise=1e-7), expected)
    assert 0 < distance(trained(LAYOUTS[layout][1], muon_and_adamw, 20), expected) <= allowed


@family
@pytest.mark.parametrize("layout", cases("muon", list(LAYOUTS), ["tp2"], 1))
def test_muon_and_adamw_drift_no_more_than_rounding_makes_one_process(layout):
    """Muon's Newton-Schulz runs in bfloat16, which makes 1e-5 of a difference of 1e-7 in the gradients."""
    run_on_ranks(LAYOUTS[layout][0], __name__, "muon_drifts", {"layout": layout})


def follows(world, layout, makes):
    start = small_gpt(num_layers=2).state_dict()
    # Rounded to bfloat16 by Muon, gradients that are 1e-16 apart are equal.
    exact = one_process(muon_and_adamw, 3, dtype=torch.float64)
    assert_trained(trained(LAYOUTS[layout][1], muon_and_adamw, 3, "64-true"), exact, start, atol=1e-12)
    for make in makes:
        expected = one_process(globals()[make], 6)
        assert_trained(trained(LAYOUTS[layout][1], globals()[make], 6), expected, start, atol=2e-5, what=make)


MAKES = ["lamb", "adamw_and_lamb", "adafactor", "plain_steps"]
WHOLE = [(layout, tuple(MAKES)) for layout in LAYOUTS]
SHORT = [("tp2", ("lamb",)), ("dp2 + zero1", ("adafactor",)), ("fsdp2", ("adamw_and_lamb",))]


@family
@pytest.mark.parametrize(("layout", "makes"), cases("whole matrices", [*SHORT, *WHOLE], SHORT, 1))
def test_optimizers_of_whole_matrices_follow_one_process(layout, makes):
    run_on_ranks(LAYOUTS[layout][0], __name__, "follows", {"layout": layout, "makes": makes})


PLAN = {"layers.0": "colwise", "layers.2": "rowwise"}


class Uneven(nn.Module):
    """Its rows are not divided by the ranks, or are fewer than these; one layer gets no gradients."""

    def __init__(self):
        torch.manual_seed(5)
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))
        self.spare = nn.Linear(4, 3)
        self.double()

    def forward(self, x):
        return self.layers(x)


def rows(model):
    """Optimizers of the matrices, and of the others."""
    matrices = [value for value in model.parameters() if value.ndim == 2]
    others = [value for value in model.parameters() if value.ndim != 2]
    return [
        [Lamb(matrices, lr=0.01), OfElements(others, lr=0.01)],
        [torch.optim.Adafactor(model.parameters(), lr=0.01)],
    ]


def steps_uneven_shards(world, parallel):
    x, y = torch.randn(8, 5, generator=torch.Generator().manual_seed(6), dtype=torch.float64).split([4, 1], dim=1)
    for index in range(2):
        plain = Uneven()
        made = rows(plain)[index]
        for _ in range(4):
            plain.zero_grad()
            F.mse_loss(plain(x), y).backward()
            for optimizer in made:
                optimizer.step()
        with paramp.launch_from_torch({"parallel": parallel, "precision": "64-true"}) as context:
            model, axis = Uneven(), context.batch_axis
            plan = PLAN if "tensor" in parallel else None
            engine, *_ = paramp.initialize(model, rows(model)[index], F.mse_loss, plan=plan)
            for _ in range(4):
                engine.forward_backward(*(rank_slice(one, axis.rank, axis.size) for one in (x, y)))
                assert engine.step().stepped
                engine.zero_grad()
            start = Uneven().state_dict()
            assert_trained(engine.full_state_dict(), plain.state_dict(), start, atol=1e-12, still="spare")


UNEVEN = ["fsdp2", "fsdp4", "hsdp2x2", "fsdp2·tp2"]


@family
@pytest.mark.parametrize("layout", cases("uneven matrices", UNEVEN, ["fsdp2"], 1))
def test_uneven_and_empty_shards(layout):
    run_on_ranks(LAYOUTS[layout][0], __name__, "steps_uneven_shards", {"parallel": LAYOUTS[layout][1]})


@on_ranks(2)
def test_sharded_runs_have_the_bits_of_runs_without(world):
    """With masters and loss scaling; a 1-dim slice of ZeRO is neither a matrix nor all of it."""
    for make in (lamb, muon_and_adamw, plain_steps):
        expected = trained({}, make, 3, NAIVE)
        for layout in ("dp2 + zero1", "fsdp2"):
            actual = trained(LAYOUTS[layout][1], make, 3, NAIVE)
            assert all(torch.equal(value, expected[name]) for name, value in actual.items()), (make, layout)


def states(optimizers):
    return [
        value.clone() if torch.is_tensor(value) else value
        for optimizer in optimizers
        for state in optimizer.state.values()
        for value in state.values()
    ]


def same(ones, others):
    return all(torch.equal(*map(torch.as_tensor, pair)) for pair in zip(ones, others, strict=True))


def num_state_elements(optimizer, key):
    """Over the world."""
    count = torch.tensor(sum(state[key].numel() for state in optimizer.state.values()))
    dist.all_reduce(count)
    return int(count)


@pytest.mark.parametrize(("layout", "mode"), [("tp2", "16-mixed"), ("tp2", "16-naive"), ("fsdp2", "16-naive")])
@on_ranks(2)
def test_an_overflow_on_one_rank_skips_all_optimizers_everywhere(world, layout, mode):
    context, engine = start(LAYOUTS[layout][1], muon_and_adamw, NAIVE | {"mode": mode})
    with context:
        x, y = next(batches(1))
        engine.forward_backward(x, y)
        assert engine.step().stepped
        muon, hidden = engine.optimizer[0], split(small_gpt(num_layers=2))[0]
        # State is on the owners only, each of which has some.
        assert muon.state
        assert num_state_elements(muon, "momentum_buffer") == sum(one.numel() for one in hidden)
        assert {state["momentum_buffer"].shape for state in muon.state.values()} <= {one.shape for one in hidden}
        before, weights = states(engine.optimizer), engine.full_state_dict()
        for bad in range(2):
            engine.forward_backward(x, y)
            if world.rank == bad:
                gradient = engine.module.get_parameter("blocks.0.mlp.up.weight").grad
                gradient._local_tensor.view(-1)[0] = float("inf")
            result = engine.step()
            assert (result.stepped, result.overflow) == (False, True)
            assert same(states(engine.optimizer), before)
            assert all(torch.equal(value, weights[name]) for name, value in engine.full_state_dict().items())
        engine.forward_backward(x, y)
        assert engine.step().stepped
        assert not same(states(engine.optimizer), before)


def save(world, layout, make, path):
    context, engine = start(LAYOUTS[layout][1], globals()[make], gradient_accumulation=1)
    with context:
        train(engine, 3)
        engine.save(path)
        return train(engine, 3, first=3)


def resume(world, layout, make, path, onwards=None):
    """The next losses of a run that loads; it saves again first if ``onwards`` is a path."""
    context, engine = start(LAYOUTS[layout][1] if layout else {}, globals()[make])
    with context:
        train(engine, 1, first=20)  # what it has done before does not matter
        engine.load(path)
        if onwards:
            engine.save(onwards)
        return train(engine, 3, first=3)


CHECKPOINTS = [(layout, make) for layout in LAYOUTS for make in ("muon_and_adamw", *MAKES)]


@family
@pytest.mark.parametrize(
    ("layout", "make"), cases("matrix checkpoints", CHECKPOINTS, [("tp2", "muon_and_adamw"), ("fsdp2", "lamb")], 1)
)
def test_checkpoints_go_to_one_process_and_back(layout, make, tmp_path):
    there, back, options = str(tmp_path / "there"), str(tmp_path / "back"), {"layout": layout, "make": make}
    size = LAYOUTS[layout][0]
    expected = run_on_ranks(size, __name__, "save", options | {"path": there})[0]
    tolerance = 1e-3 if "muon" in make else 1e-5
    assert resume(None, None, make, there, onwards=back) == pytest.approx(expected, rel=tolerance)
    assert run_on_ranks(size, __name__, "resume", options | {"path": back})[0] == pytest.approx(expected, rel=tolerance)


MOVES = [("fsdp2·tp2", "tp2"), ("fsdp2·tp2", "dp2 + zero1"), ("tp2", "fsdp2·tp2"), ("dp2 + zero1", "hsdp2x2")]
MOVES += [("fsdp4", "fsdp2·pp2"), ("hsdp2x2", "fsdp2"), ("fsdp2", "tp2")]


@family
@pytest.mark.parametrize(("before", "after"), cases("matrix moves", MOVES, [("fsdp2", "tp2")], 1))
def test_checkpoints_go_to_other_layouts(before, after, tmp_path):
    path = str(tmp_path / "saved")
    for make, tolerance in (("muon_and_adamw", 1e-3), ("lamb", 1e-5), ("plain_steps", 1e-5)):
        options = {"make": make, "path": path}
        expected = run_on_ranks(LAYOUTS[before][0], __name__, "save", options | {"layout": before})[0]
        actual = run_on_ranks(LAYOUTS[after][0], __name__, "resume", options | {"layout": after})[0]
        assert actual == pytest.approx(expected, rel=tolerance), make


@on_ranks(2)
def test_a_checkpoint_has_state_that_the_first_rank_does_not_step(world):
    def make(model):
        last = [model.norm.weight, model.norm.bias]
        rest = [value for name, value in model.named_parameters() if not name.startswith("norm.")]
        return [torch.optim.AdamW(rest), Lamb(last)]

    path = shared_folder() / "saved"
    for loading in (False, True):
        context, engine = start({"pipeline": 2}, make)
        with context:
            train(engine, 1 + loading)
            engine.load(path) if loading else engine.save(path)
            assert [state["step"] for state in engine.optimizer[1].state.values()] == [1, 1] * (world.rank == 1)
            kinds = [{type(state["step"]) for state in one.state.values()} for one in engine.optimizer]
            assert kinds == [{torch.Tensor}, {int} if world.rank == 1 else set()]


@pytest.mark.parametrize("layout", ["tp2", "fsdp2"])
@on_ranks(2)
def test_a_step_exchanges_matrices_once(world, layout):
    context, engine = start(LAYOUTS[layout][1], muon_and_adamw)
    with context:
        train(engine, 1)
        engine.forward_backward(*next(batches(1)), return_loss=False)
        with Collectives() as within:
            engine.step()
        assert within.counts == {"allreduce": 1, "alltoall": 3}
        # The gradient and the weight to the owner, and the weight back: of two ranks each sends about half.
        shards = sum(4 * param.size for param in engine._weights.params if param.optimizer == 0)
        given = [args[1].numel() for args in within.all_to_alls]
        kept = [args[3][world.rank] for args in within.all_to_alls]
        assert sum(given) - sum(kept) == pytest.approx(3 / 2 * shards, rel=0.1)


REPLICAS = {
    "dp2·tp2": {"tensor": 2},
    "dp2·tp2 + zero1": {"tensor": 2, "zero": 1},
    "hsdp2x2": {"data": {"replicate": 2, "shard": 2}},
    "fsdp2·tp2": {"data": {"shard": 2}, "tensor": 2},
}


@family
@pytest.mark.parametrize("layout", cases("matrix replicas", list(REPLICAS), ["dp2·tp2"], 1))
def test_replicas_of_owners_are_compared(layout):
    run_on_ranks(4, __name__, "replicas", {"layout": layout})


def replicas(world, layout):
    """Of sharded weights, and of norms, of which tensor ranks have copies."""
    context, engine = start(REPLICAS[layout], lamb)
    with context:
        train(engine, 2)
        assert engine.check_replicas() == []
        if context.rank >= 2:
            next(iter(engine.optimizer.state.values()))["first"].view(-1)[0] += 1
        kinds = {found.kind for found in engine.check_replicas()}
        assert kinds == ({"optimizer state"} if layout in ("dp2·tp2", "hsdp2x2") else set())


# ----------------------------------------------------------------------------------------------------- the trial


class Warm(torch.optim.AdamW):
    """A subclass is tried too."""


def model_and(kind, **options):
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    return kind(model.parameters(), **options)


KNOWN = sorted(ELEMENTWISE, key=lambda kind: kind.__name__)


@pytest.mark.parametrize("kind", [Elementwise, Warm, *KNOWN], ids=lambda kind: kind.__name__)
def test_elementwise_optimizers_keep_their_shards(kind, monkeypatch):
    monkeypatch.setattr("paramp.optim.matrices.trial.ELEMENTWISE", set())
    optimizer = model_and(kind)
    before = [parameter.clone() for group in optimizer.param_groups for parameter in group["params"]]
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0)  # a warmup from 0
    random = torch.get_rng_state()
    assert not needs_whole_matrices(optimizer, CPU)
    assert torch.equal(torch.get_rng_state(), random)
    assert schedule.get_last_lr() == [0.0]
    after = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert same(before, after)


@pytest.mark.parametrize("kind", [Lamb, OfMatricesOnly, Random, torch.optim.Adafactor], ids=lambda kind: kind.__name__)
def test_others_are_found(kind):
    assert needs_whole_matrices(model_and(kind), CPU)


def test_muon_and_what_cannot_be_tried_get_whole_matrices():
    model = nn.Sequential(nn.Linear(4, 8, bias=False))
    assert needs_whole_matrices(torch.optim.Muon(model.parameters()), CPU)
    two = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    assert needs_whole_matrices(Named(two, names=["0.weight", "1.weight"]), CPU)


def test_each_number_of_dims_is_tried():
    class Other(Lamb):
        def ratio(self, parameter, update):
            return super().ratio(parameter, update) if parameter.ndim == self.of else 1.0

    for of, layer in ((1, nn.Linear(2, 2)), (3, nn.Conv1d(2, 2, 2)), (4, nn.Conv2d(2, 2, 2)), (5, nn.Conv3d(2, 2, 2))):
        for own in (True, False):
            optimizer = Other(layer.parameters())
            optimizer.of = of if own else 2 if of > 2 else 3
            assert needs_whole_matrices(optimizer, CPU) is own, of


def test_a_trial_has_four_steps_of_a_small_matrix():
    class Seen(Lamb):
        shapes, most = set(), 0

        def step_one(self, parameter, group, state):
            super().step_one(parameter, group, state)
            Seen.shapes.add(tuple(parameter.shape))
            Seen.most = max(Seen.most, state["step"])

    for layer, shape in ((nn.Linear(2, 2, bias=False), (256, 320)), (nn.Conv1d(2, 2, 2, bias=False), (256, 160, 2))):
        Seen.shapes = set()
        assert needs_whole_matrices(Seen(layer.parameters()), CPU)
        assert max(Seen.shapes) == shape
        assert Seen.most == 4
    Seen.shapes = set()
    Seen.ratio = lambda *_: 1.0
    assert not needs_whole_matrices(Seen([nn.Parameter(torch.ones(3))]), CPU)
    assert max(Seen.shapes) == (256 * 320,)


def test_options_of_every_group_are_tried():
    class Either(Lamb):
        def step_one(self, parameter, group, state):
            self.whole = group["whole"]
            super().step_one(parameter, group, state)

        def ratio(self, parameter, update):
            return super().ratio(parameter, update) if self.whole else 1.0

    def groups(*whole):
        return [{"params": nn.Linear(2, 2).parameters(), "whole": one, "lr": 0.0} for one in whole]

    assert not needs_whole_matrices(Either(groups(False, False)), CPU)
    assert needs_whole_matrices(Either(groups(False, True)), CPU)


@on_ranks(2)
def test_steps_that_depend_on_other_matrices_are_refused(world):
    for parallel in ({"tensor": 2}, {"zero": 1}, {"pipeline": 2}, {"data": {"shard": 2}}):
        with pytest.raises(paramp.ConfigError, match=r"ClipsItself steps one matrix depending on others"):
            start(parallel, lambda model: ClipsItself(model.parameters()))
        paramp.get_context().close()


def test_owners_have_about_equal_loads():
    assert owners([4, 8, 2, 2], 2) == [1, 0, 1, 1]
    assert owners([], 2) == []


# -------------------------------------------------------------------------------------------- several optimizers


def linear(**options):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    first, second = (torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model)
    return model, first, second


def test_each_parameter_is_in_one_optimizer():
    model, first, second = linear()
    other = torch.optim.AdamW([model[1].bias])
    for given, message in (
        ((first, second, other), r"'1\.bias' is a parameter of optimizers 1 and 2 \(SGD and AdamW\)"),
        ((first, other), r"'1\.weight' are in none of the 2 optimizers"),
        ((first, first), "one SGD twice"),
        ((), "an empty sequence"),
        ((first, model[1].parameters()), "expected an optimizer, a sequence of them, or a callable"),
        (lambda parameters: [], "an empty sequence"),
    ):
        with paramp.launch_from_torch(), pytest.raises(paramp.ConfigError, match=message):
            paramp.initialize(model, given, F.mse_loss)


def test_parameters_in_none_stay():
    model, first, _ = linear()
    with paramp.launch_from_torch():
        engine, *_ = paramp.initialize(model, [first], F.mse_loss)
        assert engine.optimizer == (first,)
        before = engine.full_state_dict()
        engine.forward_backward(torch.ones(2, 4), torch.zeros(2, 4))
        engine.step()
        changed = {name for name, value in engine.full_state_dict().items() if not torch.equal(value, before[name])}
        assert changed == {"0.weight", "0.bias"}


def test_the_optimizers_methods_are_the_engines():
    with paramp.launch_from_torch():
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        make = lambda parameters: [torch.optim.SGD([one], lr=0.1) for one in parameters]  # noqa: E731
        engine, *_ = paramp.initialize(model, make, F.mse_loss)
        engine.forward_backward(torch.ones(2, 4), torch.zeros(2, 4))
        engine.optimizer[2].zero_grad()
        assert not any(parameter.grad.any() for parameter in engine.parameters())
        with pytest.raises(RuntimeError, match=r"call engine\.step\(\)"):
            engine.optimizer[3].step()


def test_schedulers_of_several_optimizers_advance_together():
    make = functools.partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5)
    for several in (False, True):
        model, first, second = linear()
        given = [make(second), make(first)] if several else make
        with paramp.launch_from_torch():
            engine, _, _, schedule = paramp.initialize(model, [first, second], F.mse_loss, lr_scheduler=given)
            for expected in (0.05, 0.025):
                engine.forward_backward(torch.ones(2, 4), torch.zeros(2, 4))
                schedule.step()  # before the engine's step, it waits
                engine.step()
                schedule.step()
                assert schedule.get_last_lr() == pytest.approx([expected] * 2)
            state = schedule.state_dict()
            first.param_groups[0]["lr"] = second.param_groups[0]["lr"] = 1.0
            schedule.schedulers[0].last_epoch = 7
            schedule.load_state_dict(state)
            assert [one.last_epoch for one in schedule.schedulers] == [2, 2]
            schedule.schedulers[0].gamma = 0.25
            assert (schedule.gamma, schedule.schedulers[1].gamma) == (0.25, 0.5)  # others are the first one's
            with pytest.raises(paramp.ConfigError, match="the states of 1 schedulers, expected those of 2"):
                schedule.load_state_dict(make(first).state_dict())


def test_schedulers_that_do_not_fit_the_optimizers():
    make = functools.partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5)
    model, first, second = linear()
    for given, message in (
        ([make(first), make(first)], "two schedulers of one optimizer"),
        ([make(torch.optim.SGD(model.parameters(), lr=0.1))], "steps another optimizer"),
        ([make], "expected a scheduler, a callable"),
    ):
        with paramp.launch_from_torch(), pytest.raises(paramp.ConfigError, match=message):
            paramp.initialize(model, [first, second], F.mse_loss, lr_scheduler=given)


def test_a_checkpoint_of_other_optimizers_is_refused(tmp_path):
    with paramp.launch_from_torch():
        model, first, second = linear()
        engine, *_ = paramp.initialize(model, [first, second], F.mse_loss)
        engine.save(tmp_path / "saved")
        model, first, second = linear()
        adamw = torch.optim.AdamW(model[1].parameters())
        engine, *_ = paramp.initialize(model, [first, adamw], F.mse_loss)
        message = r"got SGD \(1 groups\), AdamW \(1 groups\), expected the checkpoint's SGD \(1 groups\), SGD"
        with pytest.raises(paramp.CheckpointError, match=message):
            engine.load(tmp_path / "saved")
