"""Masters follow weights that are changed in place, however they are stored: which changes, and in which step."""

import contextlib
import functools
import itertools
import math
import warnings
from unittest import mock

import pytest
import torch
from beside_plain import seeded
from pool import on_ranks
from reference import local
from small_engines import engine_of, train_step
from test_compiled_step import replace_kernels
from torch import nn

import paramp
from paramp.compat.apex import amp
from paramp.optim.user_changes.weights_changed_in_place import ChangedWeights, _Sample

RATE = 2.0**-12
HALF = {"precision": {"mode": "16-naive", "init_scale": 4.0}}
DATA = {"parallel": {"data": 2}}
WIDTH = 200
"""Of a layer whose weight has three runs, of which a step looks at one row each."""
UNSEEN = WIDTH * WIDTH // 2
"""An element of that weight in a row that no sample of the first steps has."""
sgd = functools.partial(torch.optim.SGD, lr=RATE)
OPTIMIZERS = {"fused": sgd, "own step": functools.partial(sgd, foreach=True)}


def loss(output, target):
    """Whose gradient is 1 in each weight of a linear layer given ones."""
    return output.sum() + 0 * target.sum()


def linear(make="fused", width=WIDTH):
    return engine_of(seeded(nn.Linear, width, width, False), loss, OPTIMIZERS[make])


def step(engine, value=1.0):
    return train_step(engine, torch.full((1, next(iter(engine.parameters())).shape[1]), value))


def flat(engine):
    """The weight, past the counter of its changes."""
    return engine.module.weight.data.view(-1)


def assert_followed(engine, element, value):
    """The master of ``element``, which was set to ``value``, is one step from there."""
    assert flat(engine)[element].item() == pytest.approx(value - RATE, abs=2.0**-11)
    assert engine.full_state_dict()["weight"].view(-1)[element].item() == value - RATE


@contextlib.contextmanager
def warned():
    """The first words of what is warned of."""
    found = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield found
    found += [str(one.message).partition(" was changed")[0] for one in caught]


def in_inference_mode(weight):
    with torch.inference_mode():
        weight.view(-1)[UNSEEN] = 0.375


COUNTED = {
    "the parameter": lambda weight: weight[WIDTH // 2, 0].fill_(0.375),
    "a view of it": lambda weight: weight.view(-1)[UNSEEN].fill_(0.375),
    "detached": lambda weight: weight.detach()[WIDTH // 2, 0].fill_(0.375),
    "foreach": lambda weight: torch._foreach_copy_([weight], [torch.full_like(weight, 0.375)]),
    "init": lambda weight: nn.init.constant_(weight, 0.375),
    "numbers": lambda weight: weight.__setitem__((WIDTH // 2, 0), 0.375),
    "inference mode": in_inference_mode,
}


@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.parametrize("edit", COUNTED)
def test_a_change_that_torch_counts_is_followed_in_the_next_step_and_compared_once(edit, make):
    """Masters of other elements go on. A later change that is neither counted nor announced nor sampled is overwritten,
    as docs/masters.md warns."""
    with paramp.launch_from_torch(HALF):
        engine = linear(make)
        step(engine)
        before, old = engine.full_state_dict()["weight"], engine.module.weight.detach().clone()
        with torch.no_grad():
            COUNTED[edit](engine.module.weight)
        edited = torch.where(engine.module.weight == old, before, engine.module.weight.float())
        assert engine.full_state_dict()["weight"].equal(edited)  # as saved
        step(engine)
        assert engine.full_state_dict()["weight"].equal(edited - RATE)
        assert_followed(engine, UNSEEN, 0.375)
        flat(engine)[UNSEEN] = -0.25
        step(engine)
        assert_followed(engine, UNSEEN, 0.375 - RATE)
        assert engine.module.weight.equal(engine.full_state_dict()["weight"].half())


@pytest.mark.parametrize(("width", "element"), [(WIDTH, UNSEEN), (32, -1)])
@pytest.mark.parametrize("make", OPTIMIZERS)
def test_an_announced_change_of_one_element_is_followed_without_a_warning(make, width, element):
    """Also of the last one of a weight that fills its buffer, without padding behind it."""
    with paramp.launch_from_torch(HALF):
        engine = linear(make, width)
        step(engine)
        flat(engine)[element] = 0.375
        engine.weights_changed()
        assert step(engine).stepped
        assert_followed(engine, element, 0.375)


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_a_change_that_torch_counts_before_a_step_that_is_skipped_is_followed(make):
    with paramp.launch_from_torch(HALF):
        engine = linear(make)
        COUNTED["inference mode"](engine.module.weight)
        assert step(engine, math.inf).overflow
        assert step(engine).stepped
        assert_followed(engine, UNSEEN, 0.375)


class Asked(nn.Linear):
    """A layer that is used when asked, beside one that is always."""

    asked = True

    def __init__(self):
        super().__init__(WIDTH, WIDTH, False)
        self.other = nn.Linear(WIDTH, WIDTH, False)

    def forward(self, x):
        return self.other(x) + (super().forward(x) if self.asked else 0)


@pytest.mark.filterwarnings("ignore:compile.*run.* eagerly")
@pytest.mark.parametrize(
    ("edit", "make"),
    [*itertools.product([*COUNTED, "announced"], [*OPTIMIZERS, "compiled"]), ("not announced", "compiled")],
)
def test_a_change_before_a_step_without_a_gradient_of_the_weight_is_followed_in_it(edit, make, monkeypatch):
    """By averages too, and without a warning."""
    replace_kernels(monkeypatch)
    with paramp.launch_from_torch(HALF | {"ema": {"decay": 0.5}, "compile": make == "compiled"}):
        engine = engine_of(seeded(Asked), loss, OPTIMIZERS.get(make, sgd))
        step(engine)
        engine.zero_grad()
        if edit in COUNTED:
            with torch.no_grad():
                COUNTED[edit](engine.module.weight)
        else:
            flat(engine)[UNSEEN] = 0.375
        if edit == "announced":
            engine.weights_changed()
        assert step(engine, math.inf).overflow
        before = engine.ema.full_state_dict()["weight"].view(-1)[UNSEEN]
        engine.module.asked = False
        step(engine)
        assert engine.ema.full_state_dict()["weight"].view(-1)[UNSEEN] == (before + 0.375) / 2
        engine.module.asked = True
        step(engine)
        assert_followed(engine, UNSEEN, 0.375)


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_the_sample_finds_an_edit_of_a_whole_weight_in_its_step_and_warns_once(make):
    with paramp.launch_from_torch(HALF):
        engine = linear(make)
        step(engine)
        flat(engine).fill_(0.375)
        with pytest.warns(UserWarning, match=r"'weight' was changed in place .* call engine.weights_changed\(\)"):
            step(engine)
        assert_followed(engine, UNSEEN, 0.375)
        flat(engine)[UNSEEN] = -0.25  # from then on every step compares everything, without a warning
        step(engine)
        assert_followed(engine, UNSEEN, -0.25)


@pytest.mark.real_sizes
@pytest.mark.parametrize(
    ("name", "element"), [("0.weight", 0), ("0.weight", 39_999), ("1.weight", 70), ("1.bias", 199)]
)
def test_the_sample_goes_round_each_parameter_in_256_steps_or_as_many_as_it_has_rows(name, element):
    """Of 64 elements each: one row of every 256 is seen in a step."""
    with paramp.launch_from_torch(HALF):
        model = seeded(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH, False), nn.LayerNorm(WIDTH)))
        engine = engine_of(model, loss, sgd)
        weight = engine.module.get_parameter(name).data.view(-1)
        with warned() as found:
            for _ in range(min(256, math.ceil(len(weight) / 64))):
                weight[element] = 0.375
                train_step(engine, torch.ones(1, WIDTH))
        assert found == [repr(name)]


@pytest.mark.real_sizes
def test_the_sample_has_64_of_every_16384_elements_and_all_in_256_steps():
    """The rows that it looks at, found by edits: of each binary digit of a row's number, in the rows that have it."""
    with paramp.launch_from_torch(HALF):
        (buffer,) = linear()._weights.buffers
        sample, rows = _Sample(buffer), buffer.weights.view(-1, 64)
        numbers, kept = torch.arange(len(rows)), rows.clone()
        seen = torch.zeros(256, math.ceil(WIDTH**2 / 16_384), dtype=torch.int64)
        for digit in range(10):
            rows[numbers >> digit & 1 == 1, 0] = 2.0
            for step in range(256):
                seen[step] += sample.changed_rows(step) << digit
            rows.copy_(kept)
        assert (seen // 256).unique(dim=0).tolist() == [[0, 1, 2]]  # one of every 256 in each step
        assert seen.unique().tolist() == [*range(WIDTH**2 // 64)]
        for element in range(64):
            rows[:, element] = 2.0
            assert sample.changed_rows(0).all(), element
            rows.copy_(kept)


@pytest.mark.parametrize("way", ["full_state_dict", "save"])
def test_an_edit_that_nothing_has_found_yet_is_in_the_state_and_in_a_checkpoint(tmp_path, way):
    with paramp.launch_from_torch(HALF):
        engine = linear()
        step(engine)
        expected = engine.full_state_dict()["weight"].clone()
        flat(engine)[UNSEEN] = expected.view(-1)[UNSEEN] = 0.375
        if way == "save":
            engine.save(tmp_path / "edited")
            engine = linear()
            engine.load(tmp_path / "edited")
        assert engine.full_state_dict()["weight"].equal(expected)


@pytest.mark.parametrize("how", ["load_state_dict", "engine.load"])
def test_what_is_loaded_is_in_the_masters_at_once(tmp_path, how):
    with paramp.launch_from_torch(HALF):
        engine = linear()
        step(engine)
        expected = engine.full_state_dict()["weight"].clone()
        if how == "load_state_dict":
            engine.module.load_state_dict({"weight": expected.fill_(0.375)})
        else:
            engine.save(tmp_path / "saved")
            step(engine)
            engine.load(tmp_path / "saved")
        (master,) = engine.optimizer.param_groups[0]["params"]
        assert master.view(-1).equal(expected.view(-1))


def test_not_a_number_is_no_change():
    """Its bits differ between conversions."""
    with paramp.launch_from_torch(HALF):
        engine = linear(width=8)
        with torch.no_grad():
            engine.module.weight.fill_(torch.nan)
        step(engine)
        flat(engine).view(torch.int16).fill_(0x7E01)
        step(engine)
        flat(engine)[3] = 1.0
        with pytest.warns(UserWarning, match="'weight' was changed in place"):
            step(engine)


def test_on_a_gpu_a_finding_counts_from_the_next_step_on():
    """The host waits for the copy of the last step's number only."""
    with paramp.launch_from_torch(HALF):
        engine = linear()
        changes = ChangedWeights(engine._weights.buffers, torch.device("cpu"))
        changes._num_found._copied = event = mock.Mock()
        changes.agree(changes.look()[0])  # which has found nothing
        for _ in range(2):
            changes.look()
        assert event.mock_calls == [mock.call.record(), mock.call.synchronize()]
        event.reset_mock()
        flat(engine).fill_(0.375)
        changes.agree(changes.look()[0])
        assert (changes.due, event.mock_calls) == (False, [mock.call.record()])
        changes.end_step()
        with pytest.warns(UserWarning, match="'weight' was changed in place"):
            changes.look()
        assert (changes.due, event.mock_calls) == (True, [mock.call.record(), mock.call.synchronize()])
        changes.end_step()
        assert changes.due


@pytest.mark.parametrize("rows", [slice(1, WIDTH), slice(UNSEEN // WIDTH, UNSEEN // WIDTH + 1)])
@pytest.mark.parametrize("value", [0.0, -0.0, float("inf")])
def test_a_remainder_is_not_joined_with_the_weight_of_another(value, rows):
    """A zero with a negative remainder would be NaN in bfloat16; each step compares, so it needs no announcement."""
    with paramp.launch_from_torch({"precision": "bf16-naive", "masters": "remainder"}):
        engine = linear()
        step(engine)
        engine.module.weight.data[rows] = value
        step(engine)
        found = engine.full_state_dict()["weight"][rows]
        torch.testing.assert_close(found, torch.full_like(found, value - RATE), rtol=2.0**-8, atol=1e-7)


def fill(model, *_):
    local(model[0].weight).fill_(0.375)


@pytest.mark.parametrize("when", ["pre", "post"])
@on_ranks(2)
def test_a_change_by_a_step_hook_is_an_error_where_the_step_writes_over_it(world, when):
    """It holds in fp32, where the step is made in the weights, but not where it is made on the owner of a matrix."""
    matrices = {"parallel": {"tensor": 2}}
    for config, make in ((HALF | DATA, sgd), (DATA, sgd), (matrices, torch.optim.Muon)):
        with paramp.launch_from_torch(config):
            model = seeded(lambda: nn.Sequential(nn.Linear(8, 8, False)))
            optimizer = make(model.parameters(), lr=RATE)
            getattr(optimizer, f"register_step_{when}_hook")(functools.partial(fill, model))
            engine = engine_of(model, loss, optimizer, plan={"0": "colwise_gather"} if config is matrices else None)
            if config is DATA:
                step(engine)
                torch.testing.assert_close(model[0].weight, torch.full((8, 8), 0.375), atol=0.01, rtol=0)
            else:
                with pytest.raises(RuntimeError, match=r"'0.weight' was changed in its step\(\), as by a step hook"):
                    step(engine)


LAYOUTS = {
    "tensor": {"parallel": {"tensor": 2}},
    "data": {"parallel": {"data": 2}, "ema": {"decay": 0.5}},
    "zero": {"parallel": {"data": 2, "zero": 1}},
    "whole matrices": {"parallel": {"tensor": 2}},
}
EDITS = {
    "of a parameter, which a DTensor counts itself": lambda model: model[0].weight.mul_(0.5),
    "of the memory of a DTensor": lambda model: local(model[0].weight).mul_(0.5),
    "of a replica": lambda model: model[1].weight.mul_(0.5),
}


def engine_on(layout):
    torch.manual_seed(3)
    linear, norm = model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.LayerNorm(WIDTH))
    plan = {"0": "colwise_gather"} if "tensor" in LAYOUTS[layout]["parallel"] else None
    muon = torch.optim.Muon(linear.parameters(), lr=RATE)
    optimizers = [muon, sgd(norm.parameters())] if layout == "whole matrices" else sgd(model.parameters())
    return engine_of(model, loss, optimizers, plan=plan)


def step_on(engine):
    assert train_step(engine, torch.ones(2, WIDTH)).stepped


@pytest.mark.real_sizes
@on_ranks(2)
def test_layouts_compare_only_after_changes_and_follow_them(world):
    """What is neither counted nor sampled, in the 101st row of a weight, is overwritten."""
    for layout, others in LAYOUTS.items():
        with paramp.launch_from_torch(HALF | others):
            engine = engine_on(layout)
            for _ in range(2):
                step_on(engine)
            weight = local(engine.module[0].weight).data.view(-1)
            before = weight[6400].item()
            weight[6400] = 2.0
            step_on(engine)
            assert abs(weight[6400].item() - before) < 0.01, layout
            for edit in EDITS.values():
                with torch.no_grad():
                    edit(engine.module)
                before = {name: one.detach().clone() for name, one in engine.named_parameters()}
                step_on(engine)
                for name, one in engine.named_parameters():
                    assert local(one.detach() - before[name]).abs().max() < 0.01, (layout, name)


@on_ranks(2)
def test_a_change_of_a_weight_in_no_group_is_followed_without_a_warning(world):
    for layout, make in (("data", sgd), ("whole matrices", torch.optim.Muon)):
        with paramp.launch_from_torch(HALF | LAYOUTS[layout]):
            model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.LayerNorm(WIDTH))
            plan = {"0": "colwise_gather"} if "tensor" in LAYOUTS[layout]["parallel"] else None
            engine = engine_of(model, loss, make(model[0].parameters(), lr=RATE), plan=plan)
            with torch.no_grad():
                model[1].weight.fill_(0.375)
            for _ in range(2):
                step_on(engine)


@pytest.mark.parametrize("finder", [0, 1])
@on_ranks(2)
def test_what_one_rank_has_found_every_rank_follows(world, finder):
    """Replicas would differ otherwise: here of the norm's weight, which no sample of this step sees."""
    with paramp.launch_from_torch(HALF | LAYOUTS["tensor"]):
        engine = engine_on("tensor")
        step_on(engine)
        linear, norm = engine.module
        if world.rank == finder:
            linear.weight.to_local().data.fill_(0.25)
        for value in (0.375, -0.25):  # in the first step, and in those after it
            norm.weight.data[0] = value  # of a row that the step does not sample
            with warned() as found:
                step_on(engine)
            of_rank = "'0.weight'" if world.rank == finder else "a weight of another rank"
            assert found == ([of_rank] if value > 0 else [])
            assert abs(engine.full_state_dict()["1.weight"][0].item() - value) < 0.01
        assert engine.check_replicas() == []


PRECISIONS = [{"mode": "16-naive", "init_scale": 4.0}, {"mode": "bf16-naive"}]


@pytest.mark.parametrize("masters", ["full", "remainder"])
@pytest.mark.parametrize("precision", PRECISIONS, ids=str)
def test_every_weight_keeps_its_bits_after_an_edit_and_a_skipped_step(precision, masters):
    """Subnormal numbers, zeros of both signs, infinities."""
    with paramp.launch_from_torch({"precision": precision, "masters": masters}):
        engine = engine_of(seeded(nn.Linear, 2**16, 1, False), loss, sgd)
        dtype = engine.precision.weights
        values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
        edited = values.masked_fill(values.isnan(), 0)[None]
        with torch.no_grad():
            engine.module.weight.copy_(edited)
        for _ in range(2):
            assert train_step(engine, torch.full((1, 2**16), torch.inf)).overflow
            assert torch.equal(engine.module.weight.view(torch.int16), edited.view(torch.int16))


@pytest.mark.parametrize("changed", ["weights", "masters"])
@pytest.mark.parametrize("convert", ["convert_to_amp", "apex"])
def test_masters_of_converted_models_follow_too(convert, changed):
    """They stay as they are where they themselves were changed."""
    model = seeded(nn.Linear, 4, 4)
    optimizer = sgd(model.parameters())
    if convert == "apex":
        model, optimizer = amp.initialize(model, optimizer, opt_level="O2", loss_scale=4.0, verbosity=0)
    else:
        model, optimizer, _ = paramp.amp.convert_to_amp(model, optimizer, None, PRECISIONS[0])
    masters = [master for group in optimizer.param_groups for master in group["params"]]
    edited = list(model.parameters()) if changed == "weights" else masters
    for before_backward in (True, False, False):
        for parameter in edited if before_backward else []:
            parameter.data.fill_(0.25)
        value = model(torch.ones(1, 4)).float().sum()
        with amp.scale_loss(value, optimizer) if convert == "apex" else contextlib.nullcontext(value) as scaled:
            scaled.backward() if convert == "apex" else optimizer.backward(scaled)
        for parameter in [] if before_backward else edited:
            parameter.data.fill_(0.25)
        optimizer.step()
        optimizer.zero_grad()
        assert {value for parameter in masters for value in parameter.flatten().tolist()} == {0.25 - RATE}
    for parameter in model.parameters():
        assert parameter.detach().float().unique().tolist() == [0.25 - RATE]


def test_masters_add_up_steps_that_fp16_rounds_away():
    """The numbers of docs/masters.md."""
    one = torch.ones((), dtype=torch.float16)
    assert one + 1e-4 == one
    assert (torch.nextafter(one, 2 * one) - one).item() == pytest.approx(1e-3, rel=0.03)
    for mode, expected in (("O3", 1.0), ("16-naive", 1 - 20 * 1e-4)):
        with paramp.launch_from_torch({"precision": {"mode": mode, "init_scale": 4.0}}):
            model = nn.Linear(1, 1, bias=False)
            nn.init.ones_(model.weight)
            engine = engine_of(model, loss, functools.partial(sgd, lr=1e-4))
            for _ in range(20):
                assert train_step(engine, torch.ones(1, 1)).stepped
            assert engine.full_state_dict()["weight"].item() == pytest.approx(expected, abs=1e-6), mode
            assert (engine.module.weight.item() < 1) == (mode == "16-naive")
