"""rounding="stochastic": its mean, its edges, and the same bits in every layout."""

import functools
import itertools

import pytest
import torch
from families import rarely
from pool import on_ranks
from reference import batches, small_gpt
from small_engines import (
    TIED,
    assert_same_tensors,
    each_raises,
    engine_of,
    gradients_at,
    own_part,
    set_gradients,
    train_step,
)
from torch import nn

import paramp
from paramp.compat.colossalai.amp.convert import convert_to_amp
from paramp.precision.stochastic_rounding import BitStream, key_of, random_bits, round_state, rounded

HALF = [torch.float16, torch.bfloat16]
VALUES = [1.0001, -1.0003, 0.1, -123.456, 3e-5, -5e-8, 1e-7, 3e-9, 65503.0, -1e-39]


def bits(count, step=0, name="weight"):
    return random_bits(torch.arange(count), key_of(7, name), torch.tensor(step))


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("dtype", HALF)
def test_the_mean_is_exact_and_results_are_the_two_neighbours(dtype, value):
    exact = torch.full((10_000,), value)
    found = rounded(exact, bits(10_000), dtype)
    error = (found.double().mean() - exact[0].double()).abs()
    assert error <= 3 * found.double().std() / 100 or ((found == 0).all() and abs(value) < 1e-12)
    nearest = exact[:1].to(dtype)
    around = [nearest, torch.nextafter(nearest, nearest + 1e9), torch.nextafter(nearest, nearest - 1e9)]
    assert torch.isin(found, torch.cat(around)).all()
    assert len(found.unique()) <= 2


def test_to_nearest_an_update_below_one_part_in_512_is_lost():
    """Of each normal number of bfloat16. The smallest update that is not lost is at most twice as large."""
    numbers = torch.arange(0x80, 0x7F80, dtype=torch.int16).view(torch.bfloat16)[:-1].double()
    for factor, kept in ((2.0**-9 * 0.999, False), (2.0**-8 * 1.001, True)):
        for sign in (1, -1):
            moved = (numbers * (1 + sign * factor)).bfloat16() != numbers
            assert moved.all() if kept else not moved.any()


@pytest.mark.parametrize("dtype", HALF)
def test_numbers_of_the_dtype_stay(dtype):
    """All 65536: also subnormal numbers, both zeros, infinities and NaN."""
    numbers = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    found = rounded(numbers.float(), bits(2**16), dtype)
    nan = numbers.isnan()
    assert torch.equal(found[~nan].view(torch.int16), numbers[~nan].view(torch.int16))
    assert found[nan].isnan().all()


@pytest.mark.parametrize("dtype", HALF)
def test_only_values_that_round_to_infinity_become_infinite(dtype):
    largest = torch.tensor(torch.finfo(dtype).max, dtype=dtype)
    limit = largest.item() + (largest.item() - torch.nextafter(largest, -largest).item()) / 2
    below, above = (torch.tensor(limit * factor).float().expand(1000) for factor in (1 - 2.0**-20, 1 + 2.0**-20))
    for sign in (1, -1):
        assert torch.equal(rounded(sign * below, bits(1000), dtype), (sign * largest).expand(1000))
        assert rounded(sign * above, bits(1000), dtype).isinf().all()


def test_bits_are_uniform_and_differ_by_element_step_and_name():
    first = bits(100_000)
    short = torch.arange(100_000, dtype=torch.int32)
    assert torch.equal(first, random_bits(short, key_of(7, "weight"), torch.tensor(0)))
    for position in range(32):
        assert abs((first >> position & 1).double().mean() - 0.5) < 5 * 0.5 / 100_000**0.5
    word = BitStream(key_of(7, "weight"), torch.tensor(0))(short, 1)  # of optimizer state
    for other in (bits(100_000, step=1), bits(100_000, name="bias"), first.roll(1), word):
        assert abs(torch.corrcoef(torch.stack([first, other]).double())[0, 1]) < 0.016
    assert (first != random_bits(torch.arange(100_000) + 2**32, key_of(7, "weight"), torch.tensor(0))).sum() > 99_000


LAYOUTS = {"dp2": {}, "tp2": {"tensor": 2}, "pp2": {"pipeline": {"size": 2, "microbatches": 2}}}


@pytest.mark.parametrize("mode", rarely(["bf16-true", "16-true"], "bf16-true"))
@pytest.mark.parametrize("layout", LAYOUTS)
@on_ranks(2)
def test_every_layout_rounds_each_weight_by_its_index_in_the_whole_tensor(world, layout, mode):
    """Two steps by gradients made by hand."""
    config = {"parallel": LAYOUTS[layout], "precision": mode, "rounding": "stochastic", "seed": 7}
    with paramp.launch_from_torch(config) as context:
        model = small_gpt(num_layers=2)
        engine = engine_of(model, model.loss, functools.partial(torch.optim.SGD, lr=0.125))
        dtype = engine.precision.weights
        expected = {name: value.to(dtype) for name, value in small_gpt(num_layers=2).named_parameters()}
        for step, (x, y) in enumerate(batches(2)):
            whole = gradients_at(step)
            engine.forward_backward(*own_part(context, x, y))
            set_gradients(engine, whole)
            assert engine.step().stepped
            engine.zero_grad()
            for name, value in expected.items():
                moved = value.float() - 0.125 * whole[name].to(dtype).float()
                drawn = random_bits(torch.arange(value.numel()), key_of(7, name), torch.tensor(step))
                expected[name] = rounded(moved.view(-1), drawn, dtype).view(value.shape)
        assert engine.check_replicas() == []
        found = engine.full_state_dict()
    assert torch.equal(*(found[name] for name in TIED))
    assert_same_tensors({name: found[name] for name in expected}, {n: value.float() for n, value in expected.items()})


@on_ranks(2)
def test_zero_rounds_as_without(world):
    states = []
    for zero in (0, 1):
        with paramp.launch_from_torch({"parallel": {"zero": zero}, "precision": "bf16-true", "rounding": "stochastic"}):
            model = small_gpt(num_layers=2)
            engine = engine_of(model, model.loss, functools.partial(torch.optim.AdamW, lr=1e-3, eps=1e-4))
            for x, y in batches(2):
                assert train_step(engine, x, y).stepped
                engine.zero_grad()
            states.append(engine.full_state_dict())
    assert_same_tensors(*states)


def start():
    with paramp.init_module("bf16-true"):
        model = nn.Linear(64, 64, bias=False)
    nn.init.ones_(model.weight)
    return engine_of(model, lambda output, _: output.mean(), functools.partial(torch.optim.SGD, lr=1e-3))


def step(engine, value=64.0):
    result = train_step(engine, torch.full((4, 64), value), torch.zeros(4))
    engine.zero_grad()
    return result


def test_small_updates_are_not_lost_and_runs_resume(tmp_path):
    with paramp.launch_from_torch({"precision": "bf16-true"}):
        engine = start()
        step(engine)
        assert (engine.full_state_dict()["weight"] == 1).all()
    with paramp.launch_from_torch({"precision": {"mode": "bf16-true", "rounding": "stochastic"}}):
        engine = start()
        for index in range(5):
            assert step(engine).stepped
            if index == 2:
                engine.save(tmp_path / "saved")
        weight = engine.full_state_dict()["weight"]
        assert abs(weight.mean() - 0.995) <= 3 * weight.std() / 64
        assert step(engine, float("nan")).overflow
        assert torch.equal(engine.full_state_dict()["weight"], weight)
        engine.load(tmp_path / "saved")
        for _ in range(2):
            step(engine)
        assert torch.equal(engine.full_state_dict()["weight"], weight)


def test_what_refuses_it():
    options = {"mode": "bf16-true", "rounding": "stochastic"}
    model = nn.Linear(4, 4)
    adamw = torch.optim.AdamW(model.parameters(), eps=1e-4)
    calls = {
        rf"rounding: got 'stochastic', expected 'nearest'.*{mode}": functools.partial(
            paramp.Config, precision=mode, rounding="stochastic"
        )
        for mode in ("32-true", "16-mixed", "bf16-naive", "O2")
    }
    calls |= {
        "rounding: got 'up'": lambda: paramp.Config(precision="bf16-true", rounding="up"),
        "rounding: got 'stochastic', which needs": lambda: engine_of(
            model, optimizer=functools.partial(torch.optim.RMSprop, eps=1e-4)
        ),
        "rounding: got 'stochastic', expected 'nearest'": lambda: convert_to_amp(model, adamw, None, options),
    }
    with paramp.launch_from_torch({"precision": options}):
        each_raises(paramp.ConfigError, calls)
    assert paramp.Config(precision="O2", rounding="nearest").precision.rounding == "nearest"


def test_the_states_of_a_parameter_are_rounded_independently():
    halfway, index = torch.full((4096,), 1 + 2.0**-8), torch.arange(4096)
    stored = [torch.empty(4096, dtype=torch.bfloat16) for _ in range(3)]
    round_state(stored, [halfway] * 3, lambda word: random_bits(index, word, torch.tensor(3)))
    for one, other in itertools.combinations(stored, 2):
        assert (one == other).float().mean().item() == pytest.approx(0.5, abs=0.05)
