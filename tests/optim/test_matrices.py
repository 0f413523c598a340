"""Several optimizers, and those that need whole matrices where ranks have shards, against one process."""

import functools
import itertools
import math

import pytest
import torch
from beside_plain import randn, train_both
from counting import Collectives
from families import cases, family
from lamb import (
    ClipsItself,
    Elementwise,
    Lamb,
    Named,
    OfElements,
    OfMatricesOnly,
    Random,
    ScheduleFree,
    Slow,
    adafactor,
    lamb,
)
from layouts import sized_layouts
from pool import on_ranks, run_on_ranks
from reference import assert_trained, batches, local, small_gpt
from small_engines import assert_same_tensors, each_raises, engine_of, everywhere, own_part, sgd, train_step
from torch import nn
from torch.nn import functional as F

import paramp
from paramp.optim.matrices.matrix_exchange import owners
from paramp.optim.matrices.needs_whole_matrices import KNOWN, copies_weights, needs_whole_matrices

CPU = torch.device("cpu")


def split(model):
    """The 2-dim weights of the blocks, and the other parameters."""
    hidden = [value for name, value in model.named_parameters() if name.startswith("blocks.") and value.ndim == 2]
    chosen = set(hidden)
    return hidden, [value for value in model.parameters() if value not in chosen]


def muon_and_adamw(model):
    hidden, rest = split(model)
    return [torch.optim.Muon(hidden, lr=1e-3), torch.optim.AdamW(rest, lr=1e-3, eps=1e-4)]


def lamb_of_the_last_norm(model):
    """In a pipeline the first rank steps nothing of it. Both count steps: AdamW in tensors, Lamb in Python numbers."""
    last = [model.norm.weight, model.norm.bias]
    rest = [value for name, value in model.named_parameters() if not name.startswith("norm.")]
    return [torch.optim.AdamW(rest, lr=1e-3, eps=1e-4), Lamb(last, lr=0.01)]


def plain_steps(model):
    """Elementwise optimizers that step themselves, each a part of the model."""
    hidden, rest = split(model)
    half = len(rest) // 2
    return [
        torch.optim.RMSprop(hidden, lr=1e-3, momentum=0.5, eps=1e-4),
        torch.optim.NAdam(rest[:half], lr=1e-3, eps=1e-4),
        OfElements(rest[half:], lr=1e-3, eps=1e-4),
    ]


def one_process(make, steps, dtype=torch.float32):
    """The weights after a plain torch loop."""
    model = small_gpt(num_layers=2).to(dtype)
    made = make(model)
    for x, y in batches(steps):
        model.zero_grad()
        logits = model(x)
        F.cross_entropy(logits.reshape(-1, logits.shape[-1]), y.reshape(-1)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in made:
            optimizer.step()
    return model.state_dict()


def start(parallel, make, precision="32-true"):
    context = paramp.launch_from_torch({"parallel": parallel, "precision": precision, "clip_grad_norm": 1.0})
    model = small_gpt(num_layers=2)
    return context, engine_of(model, model.loss, make(model))


def train(engine, steps, first=0):
    """The losses of ``steps`` steps."""
    results = [train_step(engine, *own_part(engine.context, *one)) for one in list(batches(first + steps))[first:]]
    assert all(result.stepped for result in results)
    return [float(result.loss) for result in results]


def trained(parallel, make, steps, precision="32-true"):
    context, engine = start(parallel, make, precision)
    with context:
        train(engine, steps)
        return engine.full_state_dict()


NAIVE = {"mode": "16-naive", "init_scale": 1024.0}
LAYOUTS = sized_layouts("tp2, dp2 + zero1, pp2, pp2·tp2, dp2·tp2, dp2·tp2 + zero1")
LAYOUTS |= sized_layouts("fsdp2, fsdp4, hsdp2x2, fsdp2·tp2, fsdp2·pp2, 1")
on_its_ranks = on_ranks(lambda layout, **_: LAYOUTS[layout][0])


def segment(world, layout, make, path, number):
    """The weights after two steps from the checkpoint of the segment before."""
    context, engine = start(LAYOUTS[layout][1], MAKES[make], mode_for(make))
    with context:
        if number:
            train(engine, 1, first=20)  # what it has done before a load does not matter
            engine.load(f"{path} {number - 1}")
        train(engine, 2, first=2 * number)
        assert engine.check_replicas() == []
        engine.save(f"{path} {number}")
        return engine.full_state_dict()


def mode_for(make):
    """Rounded to bfloat16 by Muon, gradients that are 1e-16 apart are equal."""
    return "64-true" if "muon" in make else "32-true"


MAKES = {make.__name__: make for make in (muon_and_adamw, lamb, lamb_of_the_last_norm, adafactor, plain_steps)}
IN_TURN = [(layout, "1", layout) for layout in LAYOUTS]
IN_TURN += [("fsdp2·tp2", "tp2", "dp2 + zero1"), ("tp2", "fsdp2·tp2", "fsdp2"), ("fsdp2", "tp2", "1")]
IN_TURN += [("dp2 + zero1", "hsdp2x2", "fsdp2"), ("fsdp4", "fsdp2·pp2", "pp2·tp2")]
PART = [(("tp2", "1", "tp2"), "lamb"), (("fsdp2", "tp2", "1"), "muon_and_adamw")]
PART += [(("1", "1", "1"), "adafactor")]  # whose state has other shapes than its weights
EVERYTHING = [(layouts, make) for layouts in IN_TURN for make in MAKES]


@family
@pytest.mark.parametrize(("layouts", "make"), cases("whole matrices", EVERYTHING, PART, 2))
def test_optimizers_of_whole_matrices_follow_one_process(layouts, make, tmp_path):
    """In each of the layouts in turn, by checkpoints."""
    for number, layout in enumerate(layouts):
        given = {"layout": layout, "make": make, "path": str(tmp_path / make), "number": number}
        ranks = LAYOUTS[layout][0]
        found = segment(None, **given) if ranks == 1 else run_on_ranks(ranks, __name__, "segment", given)[0]
    exact = mode_for(make) == "64-true"
    expected = one_process(MAKES[make], 2 * len(layouts), torch.float64 if exact else torch.float32)
    begun = small_gpt(num_layers=2).state_dict()
    assert_trained(found, expected, begun, atol=1e-12 if exact else 2e-5, what=f"{make} on {layouts}")


def uneven():
    """Its rows are not divided by the ranks, or are fewer than these; one parameter gets no gradients."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))
    model[4].spare = nn.Parameter(torch.randn(3, 4))
    return model.double()


@family
@pytest.mark.parametrize("layout", cases("uneven matrices", ["fsdp2", "fsdp4", "hsdp2x2", "fsdp2·tp2"], ["fsdp2"], 1))
@on_its_ranks
def test_uneven_and_empty_shards(world, layout):
    parallel = LAYOUTS[layout][1]
    given = [randn(8, 5, seed=step, dtype=torch.float64).split([4, 1], dim=1) for step in range(4)]
    plan = {"0": "colwise", "2": "rowwise"} if "tensor" in parallel else None
    for kind in (Lamb, torch.optim.Adafactor, OfElements):
        make = functools.partial(kind, lr=0.01)
        with paramp.launch_from_torch({"parallel": parallel, "precision": "64-true"}) as context:
            engine = engine_of(uneven(), optimizer=make, plan=plan)
            train_both(context, engine, uneven(), given, optimizer=make, atol=1e-12)


@on_ranks(2)
def test_sharded_runs_have_the_bits_of_runs_without(world):
    """With masters and loss scaling; a 1-dim slice of ZeRO is neither a matrix nor all of it."""
    for make in (lamb, muon_and_adamw, plain_steps):
        expected = trained({}, make, 3, NAIVE)
        for layout in ("dp2 + zero1", "fsdp2"):
            assert_same_tensors(trained(LAYOUTS[layout][1], make, 3, NAIVE), expected)


def states(optimizers):
    values = [value for one in optimizers for state in one.state.values() for value in state.values()]
    return {index: torch.as_tensor(value).clone() for index, value in enumerate(values)}


@pytest.mark.parametrize(("layout", "mode"), [("tp2", "16-mixed"), ("fsdp2", "16-naive")])
@on_ranks(2)
def test_an_overflow_on_one_rank_skips_all_optimizers_everywhere(world, layout, mode):
    """Each rank has the whole state of some matrices, and no other has it."""
    context, engine = start(LAYOUTS[layout][1], muon_and_adamw, NAIVE | {"mode": mode})
    with context:
        x, y = next(batches(1))
        assert train_step(engine, x, y).stepped
        momenta = everywhere([state["momentum_buffer"].shape for state in engine.optimizer[0].state.values()])
        assert all(momenta)
        assert sorted(itertools.chain(*momenta)) == sorted(one.shape for one in split(small_gpt(num_layers=2))[0])
        before, weights = states(engine.optimizer), engine.full_state_dict()
        for bad in range(2):
            engine.forward_backward(x, y)
            if world.rank == bad:
                local(engine.module.get_parameter("blocks.0.mlp.up.weight").grad).view(-1)[0] = float("inf")
            result = engine.step()
            assert (result.stepped, result.overflow) == (False, True)
            assert_same_tensors(states(engine.optimizer), before)
            assert_same_tensors(engine.full_state_dict(), weights)
        assert train_step(engine, x, y).stepped


OF_TWO = [[(12, 16), (4, 10)], [(16, 8), (10, 12)]]
OF_FOUR = [[(12, 16)], [(16, 8)], [(10, 12)], [(4, 10)]]
"""The matrices of each owner: the largest one left goes to the owner that has the fewest elements."""
OWNED = {"hsdp2x2": OF_TWO * 2, "dp2·tp2": OF_TWO * 2, "dp2·tp2 + zero1": OF_FOUR, "dp4 + zero1": OF_FOUR}


@on_ranks(4)
def test_owners_are_the_ranks_of_one_replica_or_all_data_ranks_of_zero(world):
    """The owner alone has the momentum."""
    for layout, expected in OWNED.items():
        parallel = LAYOUTS[layout][1] if layout in LAYOUTS else {"data": 4, "zero": 1}
        plan = {"[02]": "colwise", "[13]": "rowwise"} if "tensor" in parallel else None
        with paramp.launch_from_torch({"parallel": parallel}) as context:
            layers = [nn.Linear(*one, bias=False) for one in itertools.pairwise((8, 16, 12, 10, 4))]
            engine = engine_of(nn.Sequential(*layers), optimizer=torch.optim.Muon, plan=plan)
            assert train_step(engine, *own_part(context, randn(4, 8), randn(4, 4))).stepped
            momenta = [state["momentum_buffer"] for state in engine.optimizer.state.values()]
            found = everywhere([tuple(one.shape) for one in momenta])
        assert [sorted(one) for one in found] == [sorted(one) for one in expected], layout


def two_muons_and_adamw(model):
    hidden, rest = split(model)
    return [torch.optim.Muon(hidden[::2]), torch.optim.Muon(hidden[1::2]), torch.optim.AdamW(rest)]


@pytest.mark.real_sizes  # the number of buffers
@pytest.mark.parametrize(
    ("layout", "mode"),
    [
        *((layout, "32-true") for layout in ("tp2", "fsdp2", "fsdp4", "dp2 + zero1")),
        ("tp2", "16-naive"),
        ("tp2", "bf16-true"),
    ],
)
@on_its_ranks
def test_a_step_exchanges_matrices_once(world, layout, mode):
    """Three all-to-alls for each optimizer of matrices."""
    for make in (muon_and_adamw, two_muons_and_adamw):
        context, engine = start(LAYOUTS[layout][1], make, NAIVE if mode == "16-naive" else mode)
        with context:
            train(engine, 1)
            engine.forward_backward(*own_part(context, *next(batches(1))), return_loss=False)
            with Collectives() as within:
                engine.step()
            others = {"allreduce": 1} | ({"allgather": len(engine.optimizer)} if "zero" in layout else {})
            assert within.counts == others | {"alltoall": 3 * (len(engine.optimizer) - 1)}
            if "zero" in layout:
                continue
            # The gradient and the weight to the owner, and the weight back: a rank keeps what it owns itself.
            hidden = [one for name, one in engine.named_parameters() if name.startswith("blocks.") and one.ndim == 2]
            shards = sum((2 if mode == "bf16-true" else 4) * one.numel() for one in hidden) / world.size
            given = [args[1].numel() for args in within.all_to_alls]
            kept = [args[3][world.rank] for args in within.all_to_alls]
            expected = 3 * (world.size - 1) / world.size * shards
            assert sum(given) - sum(kept) == pytest.approx(expected, rel=0.1)


# ----------------------------------------------------------------------------------------------------- the trial


class Warm(torch.optim.AdamW):
    """A subclass is tried too."""


def two_layers():
    return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))


TRIED = {Elementwise: False, ScheduleFree: False, Warm: False} | KNOWN


@pytest.fixture
def all_are_tried(monkeypatch):
    monkeypatch.setattr("paramp.optim.matrices.needs_whole_matrices.KNOWN", {})


@pytest.mark.parametrize("kind", [kind for kind, whole in TRIED.items() if not whole], ids=lambda kind: kind.__name__)
def test_elementwise_optimizers_keep_their_shards(kind, all_are_tried):
    """The trial changes nothing; a rate of 0, as in a warmup, does not mislead it."""
    model = two_layers()
    optimizer, before = kind(model.parameters()), {name: one.clone() for name, one in model.state_dict().items()}
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0)
    optimizer.state.setdefault(model[0].weight, {})  # as a method that looks for state may leave it
    random = torch.get_rng_state()
    assert not needs_whole_matrices(optimizer, CPU)
    assert copies_weights(optimizer, CPU) is (kind in (torch.optim.ASGD, ScheduleFree))
    assert torch.equal(torch.get_rng_state(), random)
    assert schedule.get_last_lr() == [0.0]
    assert_same_tensors(model.state_dict(), before)


def test_others_and_what_cannot_be_tried_get_whole_matrices(all_are_tried):
    for kind in (Lamb, OfMatricesOnly, Random, torch.optim.Adafactor):
        assert needs_whole_matrices(kind(two_layers().parameters()), CPU), kind
    muon = torch.optim.Muon(nn.Linear(4, 8, bias=False).parameters(), ns_steps=1)
    assert needs_whole_matrices(muon, CPU)
    assert not copies_weights(muon, CPU)
    assert needs_whole_matrices(Named(two_layers(), names=["0.weight", "1.weight"]), CPU)
    assert needs_whole_matrices(Slow(two_layers().parameters()), CPU)


class Partly(Lamb):
    """It needs whole matrices of one number of dims, and in groups that say so."""

    def __init__(self, groups, ndim):
        super().__init__(groups)
        self.ndim, self.seen = ndim, set()

    def step_one(self, parameter, group, state):
        self.whole = group.get("whole", True)
        super().step_one(parameter, group, state)
        seen.add((tuple(parameter.shape), state["step"]))

    def ratio(self, parameter, update):
        return super().ratio(parameter, update) if self.whole and parameter.ndim == self.ndim else 1.0


seen = set()
LAYERS = {
    (256 * 320,): (1, nn.LayerNorm(3)),
    (256, 320): (2, nn.Linear(2, 2, bias=False)),
    (256, 160, 2): (3, nn.Conv1d(2, 2, 2, bias=False)),
    (256, 80, 2, 2): (4, nn.Conv2d(2, 2, 2, bias=False)),
    (256, 40, 2, 2, 2): (5, nn.Conv3d(2, 2, 2, bias=False)),
}


@pytest.mark.parametrize("shape", LAYERS, ids=str)
def test_each_number_of_dims_is_tried_in_four_steps_of_a_small_matrix(shape):
    own, layer = LAYERS[shape]
    for ndim in (own, 2 if own > 2 else 3):
        seen.clear()
        assert needs_whole_matrices(Partly(layer.parameters(), ndim), CPU) is (ndim == own), ndim
        shapes, steps = zip(*seen, strict=True)
        assert shape in shapes
        assert (max(map(math.prod, shapes)), max(steps)) == (256 * 320, 4)


def test_options_of_every_group_are_tried():
    for second in (False, True):
        groups = [{"params": nn.Linear(2, 2).parameters(), "whole": one, "lr": 0.0} for one in (False, second)]
        assert needs_whole_matrices(Partly(groups, 2), CPU) is second


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

decaying = functools.partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5)


def linear():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    return model, *(sgd(layer.parameters()) for layer in model)


def test_optimizers_and_schedulers_that_do_not_fit():
    model, first, second = linear()
    other, both = torch.optim.AdamW([model[1].bias]), (first, second)
    for message, (optimizers, schedulers) in {
        r"'1\.bias' is a parameter of optimizers 1 and 2 \(SGD and AdamW\)": ((first, second, other), None),
        r"'1\.weight' are in none of the 2 optimizers": ((first, other), None),
        "one SGD twice": ((first, first), None),
        "optimizer: .*an empty sequence": ((), None),
        "expected an optimizer, a sequence of them, or a callable": ((first, model[1].parameters()), None),
        "an empty sequence": (lambda parameters: [], None),
        "two schedulers of one optimizer": (both, [decaying(first), decaying(first)]),
        "steps another optimizer": (both, [decaying(sgd(model.parameters()))]),
        "expected a scheduler, a callable": (both, [decaying]),
    }.items():
        with paramp.launch_from_torch(), pytest.raises(paramp.ConfigError, match=message):
            engine_of(model, optimizer=optimizers, lr_scheduler=schedulers)


def test_parameters_in_none_stay():
    model, first, _ = linear()
    with paramp.launch_from_torch():
        engine = engine_of(model, optimizer=[first])
        assert engine.optimizer == (first,)
        before = engine.full_state_dict()
        train_step(engine, torch.ones(2, 4))
        changed = {name for name, value in engine.full_state_dict().items() if not torch.equal(value, before[name])}
        assert changed == {"0.weight", "0.bias"}


def test_the_optimizers_methods_are_the_engines():
    with paramp.launch_from_torch():
        engine = engine_of(linear()[0], optimizer=lambda parameters: [sgd([one]) for one in parameters])
        engine.forward_backward(torch.ones(2, 4), torch.zeros(2, 4))
        engine.optimizer[2].zero_grad()
        assert not any(parameter.grad.any() for parameter in engine.parameters())
        each_raises(RuntimeError, {r"call engine\.step\(\)": engine.optimizer[3].step})


@pytest.mark.parametrize("several", [False, True])
def test_schedulers_of_several_optimizers_advance_together_and_are_saved(several, tmp_path):
    model, first, second = linear()
    given = [decaying(second), decaying(first)] if several else decaying
    with paramp.launch_from_torch():
        engine, _, _, schedule = paramp.initialize(model, [first, second], F.mse_loss, lr_scheduler=given)
        for expected in (0.05, 0.025):
            engine.forward_backward(torch.ones(2, 4), torch.zeros(2, 4))
            schedule.step()  # before the engine's step, it waits
            engine.step()
            schedule.step()
            assert schedule.get_last_lr() == pytest.approx([expected] * 2)
        engine.save(tmp_path / "saved")
        state = schedule.state_dict()
        for load, rate in (
            (lambda: schedule.load_state_dict(state), 1.0),
            (lambda: engine.load(tmp_path / "saved"), 0.025),
        ):
            first.param_groups[0]["lr"] = second.param_groups[0]["lr"] = 1.0
            for one in schedule.schedulers:
                one.last_epoch = 7
                one._last_lr = [1.0]
            load()
            assert [one.param_groups[0]["lr"] for one in (first, second)] == pytest.approx([rate] * 2)
            assert [one.last_epoch for one in schedule.schedulers] == [2, 2]
            assert schedule.get_last_lr() == pytest.approx([0.025] * 2)
        schedule.schedulers[0].gamma = 0.25
        assert (schedule.gamma, schedule.schedulers[1].gamma) == (0.25, 0.5)  # others are the first one's
        with pytest.raises(AttributeError, match="'gamma' is an attribute of 2 schedulers; set it on each"):
            schedule.gamma = 0.125
        with pytest.raises(paramp.ConfigError, match="the states of 1 schedulers, expected those of 2"):
            schedule.load_state_dict(decaying(first).state_dict())


def test_a_checkpoint_of_other_optimizers_is_refused(tmp_path):
    """Or of the same in another order."""
    with paramp.launch_from_torch():
        for number, saved in enumerate((torch.optim.SGD, torch.optim.AdamW)):
            model, *_ = linear()
            optimizers = [saved(model[0].parameters()), torch.optim.SGD(model[1].parameters())]
            engine_of(model, optimizer=optimizers).save(tmp_path / str(number))
            model, first, _ = linear()
            engine = engine_of(model, optimizer=[first, torch.optim.AdamW(model[1].parameters())])
            expected = rf"expected the checkpoint's {saved.__name__} \(1 groups\), SGD"
            with pytest.raises(paramp.CheckpointError, match=rf"got SGD \(1 groups\), AdamW \(1 groups\), {expected}"):
                engine.load(tmp_path / str(number))
