"""Which changes of weights masters follow, in which step, and that a step without changes compares nothing."""

import warnings

import pytest
import torch
from pool import on_ranks
from torch import nn

import paramp
from paramp.base import sizes
from paramp.base.dtensor import local
from paramp.optim import master_storage
from paramp.optim.changes.in_place import ChangedWeights
from paramp.optim.matrices.step import MatrixStep
from paramp.optim.param_buffer import ALIGNMENT

RATE = 2.0**-12
HALF = {"precision": {"mode": "16-naive", "init_scale": 4.0}}
WIDTH = 200
"""Of a layer whose weight has three runs, of which a step looks at one row each."""
UNSEEN = WIDTH * WIDTH // 2
"""An element of that weight in a row that no sample of the first steps has."""
OPTIMIZERS = {
    "fused": lambda parameters: torch.optim.SGD(parameters, lr=RATE),
    "own step": lambda parameters: torch.optim.SGD(parameters, lr=RATE, foreach=True),
}


def loss(output, target):
    """Whose gradient is 1 in each weight of a linear layer given ones."""
    return output.sum() + 0 * target.sum()


def engine_of(make=OPTIMIZERS["fused"], width=WIDTH):
    torch.manual_seed(3)
    model = nn.Linear(width, width, bias=False)
    return paramp.initialize(model, make(model.parameters()), loss)[0]


def step(engine, value=1.0):
    width = next(iter(engine.parameters())).shape[1]
    engine.forward_backward(torch.full((1, width), value), torch.ones(1, width))
    result = engine.step()
    engine.zero_grad()
    return result


def assert_followed(engine, weight, element, value):
    """The master of ``element``, which was set to ``value``, is one step from there."""
    assert weight.detach().view(-1)[element].item() == pytest.approx(value - RATE, abs=2.0**-11)
    assert engine.full_state_dict()["weight"].view(-1)[element].item() == value - RATE


@pytest.fixture
def comparisons(monkeypatch):
    """The number of elements in each comparison of weights with masters."""
    found, follow = [], master_storage.follow

    def counted(weight, master, scratch=None):
        found.append(weight.numel())
        follow(weight, master, scratch)

    monkeypatch.setattr(master_storage, "follow", counted)
    return found


COUNTED = {
    "the parameter": lambda weight: weight[WIDTH // 2, 0].fill_(0.375),
    "a view of it": lambda weight: weight.view(-1)[UNSEEN].fill_(0.375),
    "detached": lambda weight: weight.detach()[WIDTH // 2, 0].fill_(0.375),
    "foreach": lambda weight: torch._foreach_copy_([weight], [torch.full_like(weight, 0.375)]),
    "init": lambda weight: nn.init.constant_(weight, 0.375),
    "numbers": lambda weight: weight.__setitem__((WIDTH // 2, 0), 0.375),
}


@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.parametrize("edit", COUNTED)
def test_a_change_that_torch_counts_is_followed_in_the_next_step_and_compared_once(edit, make, comparisons):
    with paramp.launch_from_torch(HALF):
        engine = engine_of(OPTIMIZERS[make])
        weight = engine.module.weight
        step(engine)
        with torch.no_grad():
            COUNTED[edit](weight)
        comparisons.clear()
        assert step(engine).stepped
        assert sum(comparisons) >= weight.numel()
        comparisons.clear()
        step(engine)
        assert comparisons == []
        assert engine.full_state_dict()["weight"].view(-1)[UNSEEN].item() == 0.375 - 2 * RATE


def test_a_change_in_inference_mode_is_followed():
    with paramp.launch_from_torch(HALF):
        engine = engine_of()
        with torch.inference_mode():
            engine.module.weight.view(-1)[UNSEEN] = 0.375
        step(engine)
        assert_followed(engine, engine.module.weight, UNSEEN, 0.375)


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_a_change_before_a_skipped_step_is_followed(make):
    with paramp.launch_from_torch(HALF):
        engine = engine_of(OPTIMIZERS[make])
        with torch.no_grad():
            engine.module.weight.view(-1)[UNSEEN] = 0.375
        assert step(engine, float("inf")).overflow
        assert step(engine).stepped
        assert_followed(engine, engine.module.weight, UNSEEN, 0.375)


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_an_announced_change_of_one_element_is_followed_without_a_warning(make):
    with paramp.launch_from_torch(HALF):
        engine = engine_of(OPTIMIZERS[make])
        step(engine)
        engine.module.weight.data.view(-1)[UNSEEN] = 0.375
        engine.weights_changed()
        step(engine)
        assert_followed(engine, engine.module.weight, UNSEEN, 0.375)


@pytest.mark.real_sizes
def test_a_change_that_is_neither_counted_nor_announced_nor_sampled_is_overwritten():
    """What docs/masters.md warns of: the master is rounded to the weight again."""
    with paramp.launch_from_torch(HALF):
        engine = engine_of()
        before = engine.full_state_dict()["weight"].view(-1)[UNSEEN].item()
        engine.module.weight.data.view(-1)[UNSEEN] = 0.375
        step(engine)
        assert engine.full_state_dict()["weight"].view(-1)[UNSEEN].item() == before - RATE


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_the_sample_finds_an_edit_of_a_whole_weight_in_its_step_and_warns_once(make, comparisons):
    with paramp.launch_from_torch(HALF):
        engine = engine_of(OPTIMIZERS[make])
        weight = engine.module.weight
        step(engine)
        weight.data.fill_(0.375)
        with pytest.warns(UserWarning, match=r"'weight' was changed in place .* call engine.weights_changed\(\)"):
            step(engine)
        assert_followed(engine, weight, UNSEEN, 0.375)
        weight.data.view(-1)[UNSEEN] = -0.25  # from then on every step compares everything, without a warning
        step(engine)
        assert_followed(engine, weight, UNSEEN, -0.25)
        comparisons.clear()
        step(engine)
        assert sum(comparisons) >= weight.numel()


@pytest.mark.parametrize("element", [0, 64 * 15 + 63])
def test_the_sample_goes_round_a_parameter(element):
    """One of 16 rows is seen in 16 steps, whichever it is."""
    with paramp.launch_from_torch(HALF):
        engine = engine_of(width=32)
        for _ in range(3):
            step(engine)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(16):
                engine.module.weight.data.view(-1)[element] = 0.375
                step(engine)
        assert [str(one.message).partition(" was")[0] for one in caught] == ["'weight'"]
        assert_followed(engine, engine.module.weight, element, 0.375)


@pytest.mark.real_sizes
def test_every_row_of_every_parameter_is_in_the_samples_of_a_turn():
    assert (ALIGNMENT, sizes.SAMPLED_RUN) == (64, 256)
    with paramp.launch_from_torch(HALF):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(200, 200), nn.LayerNorm(200), nn.Linear(200, 1))
        engine, *_ = paramp.initialize(model, torch.optim.SGD(model.parameters(), lr=RATE), loss)
        ((sample, buffer),) = ((one, one.buffer) for one in engine._weights.changes._samples)
        for param in buffer.params:
            for element in {0, param.size // 2, param.size - 1, *range(0, param.size, 64 * 97)}:
                before = buffer.masters.stepped.clone()
                buffer.masters.stepped[param.start + element] += 1
                seen = [step for step in range(256) if sample.changed_rows(step).any()]
                assert sample.name_of(sample.changed_rows(seen[0])) == param.name
                assert seen[0] < -(-param.size // ALIGNMENT)
                buffer.masters.stepped.copy_(before)


def test_not_a_number_is_no_change():
    """Its bits differ between conversions."""
    with paramp.launch_from_torch(HALF):
        engine = engine_of(width=8)
        (buffer,) = engine._weights.buffers
        buffer.masters.stepped[:64].view(torch.int32).fill_(0x7F812345)
        buffer.weights[:64].view(torch.int16).fill_(0x7E01)
        (sample,) = engine._weights.changes._samples
        assert not sample.changed_rows(0).any()
        buffer.weights[3] = 1.0
        assert sample.changed_rows(0).all()


class Event:
    def __init__(self):
        self.calls = []

    def record(self):
        self.calls.append("record")

    def synchronize(self):
        self.calls.append("synchronize")


def test_on_a_gpu_a_finding_counts_from_the_next_step_on():
    """The host waits for the copy of the last step's number only."""
    with paramp.launch_from_torch(HALF):
        engine = engine_of()
        changes = ChangedWeights(engine._weights.buffers, torch.device("cpu"))
        changes._copied = event = Event()
        engine.module.weight.data.fill_(0.375)
        changes.agree(changes.look()[0])
        assert (changes.due, event.calls) == (False, ["record"])
        changes.end_step()
        with pytest.warns(UserWarning, match="'weight' was changed in place"):
            changes.look()
        assert (changes.due, event.calls) == (True, ["record", "synchronize"])
        changes.end_step()
        assert changes.due


@pytest.mark.parametrize("value", [0.0, -0.0, float("inf")])
def test_a_remainder_is_not_joined_with_the_weight_of_another(value):
    """A zero with a negative remainder would be NaN in bfloat16; each step compares, so it needs no announcement."""
    with paramp.launch_from_torch({"precision": "bf16-naive", "masters": "remainder"}):
        engine = engine_of()
        step(engine)
        engine.module.weight.data[1:] = value
        step(engine)
        expected = torch.full((WIDTH - 1, WIDTH), value - RATE)
        torch.testing.assert_close(engine.full_state_dict()["weight"][1:], expected, rtol=2.0**-8, atol=1e-7)


LAYOUTS = {
    "tensor": {"parallel": {"tensor": 2}},
    "data": {"parallel": {"data": 2}, "ema": {"decay": 0.5}},
    "zero": {"parallel": {"data": 2, "zero": 1}},
}


EDITS = {
    "of a parameter, which a DTensor counts itself": lambda model: model[0].weight.mul_(0.5),
    "of the memory of a DTensor": lambda model: local(model[0].weight).mul_(0.5),
    "of a replica": lambda model: model[1].weight.mul_(0.5),
}


def engine_on(layout):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.LayerNorm(WIDTH))
    plan = {"0": "colwise_gather"} if layout == "tensor" else None
    return paramp.initialize(model, torch.optim.SGD(model.parameters(), lr=RATE), loss, plan=plan)[0]


def step_on(engine):
    engine.forward_backward(torch.ones(2, WIDTH), torch.ones(2, WIDTH))
    assert engine.step().stepped
    engine.zero_grad()


@on_ranks(2)
def test_layouts_compare_only_after_changes_and_follow_them(world):
    found, follow = [], master_storage.follow
    master_storage.follow = lambda weight, *others: (found.append(weight.numel()), follow(weight, *others))
    try:
        for layout, others in LAYOUTS.items():
            with paramp.launch_from_torch(HALF | others):
                engine = engine_on(layout)
                for _ in range(2):
                    step_on(engine)
                found.clear()
                for _ in range(2):
                    step_on(engine)
                assert found == [], layout
                for edit in EDITS.values():
                    with torch.no_grad():
                        edit(engine.module)
                    before = {name: one.detach().clone() for name, one in engine.named_parameters()}
                    step_on(engine)
                    assert found, layout
                    for name, one in engine.named_parameters():
                        moved = local(one.detach() - before[name])
                        assert moved.abs().max() < 0.01, (layout, name)
                    found.clear()
    finally:
        master_storage.follow = follow


@on_ranks(2)
def test_what_one_rank_has_found_every_rank_follows(world):
    """Replicas would differ otherwise: here of the norm's weight, which no sample of this step sees."""
    with paramp.launch_from_torch(HALF | LAYOUTS["tensor"]):
        engine = engine_on("tensor")
        step_on(engine)
        linear, norm = engine.module
        norm.weight.data[0] = 0.375  # of the row that the last step has seen
        if world.rank == 0:
            linear.weight.to_local().data.fill_(0.25)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step_on(engine)
        (text,) = (str(one.message) for one in caught)
        assert text.startswith(("'0.weight'" if world.rank == 0 else "a weight of another rank") + " was changed")
        assert abs(engine.full_state_dict()["1.weight"][0].item() - 0.375) < 0.01
        assert engine.check_replicas() == []


@on_ranks(2)
def test_a_step_of_whole_matrices_follows_what_is_counted(world):
    with paramp.launch_from_torch(HALF | LAYOUTS["tensor"]):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.LayerNorm(WIDTH))
        linear, norm = model
        optimizers = [torch.optim.Muon([linear.weight], lr=RATE), torch.optim.SGD(norm.parameters(), lr=RATE)]
        engine, *_ = paramp.initialize(model, optimizers, loss, plan={"0": "colwise_gather"})
        assert isinstance(engine._optimizer_step.updates[0], MatrixStep)
        step_on(engine)
        with torch.no_grad():
            engine.module[0].weight.fill_(0.375)
        step_on(engine)
        assert (engine.full_state_dict()["0.weight"] - 0.375).abs().max() < 0.01
        assert not engine._weights.changes.due
