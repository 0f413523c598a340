"""Masters as a half-precision weight and 16 more bits."""

import functools

import pytest
import torch
from reference import small_gpt, train_engine
from small_engines import assert_same_tensors, engine_of, train_step

import paramp
from paramp.models import GPT
from paramp.optim.remainder_masters import join, split

ADAMW = functools.partial(torch.optim.AdamW, lr=0.01)


def every_weight(dtype):
    """Each finite number of ``dtype`` but -0, whose place in the order of floats 0 has."""
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    return values[values.isfinite() & ((values != 0) | ~values.signbit())]


def there_and_back(master, dtype):
    weight, remainder = torch.empty_like(master, dtype=dtype), torch.empty_like(master, dtype=torch.int16)
    split(master, weight, remainder)
    return weight, join(weight, remainder)


@pytest.mark.parametrize("seed", range(4))
def test_every_fp16_weight_with_any_remainder_comes_back(seed):
    weights = every_weight(torch.float16).repeat(8)
    generator = torch.Generator().manual_seed(seed)
    remainders = torch.randint(1 - 2**15, 2**15, weights.shape, generator=generator, dtype=torch.int16)
    masters = join(weights, remainders)
    exponents = torch.frexp(weights.double())[1].clamp(min=-13) - 1  # of 1.5 it is 0
    exponents[weights == 0] = -14
    exact = weights.double() - remainders.double() * torch.exp2(exponents.double() - 26)
    assert torch.equal(masters, exact.float())
    rounded, back = there_and_back(masters, torch.float16)
    assert torch.equal(rounded, masters.half())
    kept = masters.abs() <= torch.finfo(torch.float16).max  # beyond, fp16 itself has nothing
    error = (back - masters).abs()[kept]
    assert error.max() <= 2.0**-40
    assert not error[masters[kept].abs() >= 2.0**-14].any()


@pytest.mark.parametrize("mode", ["16-naive", "bf16-naive"])
def test_a_skipped_step_changes_no_bit(mode):
    """Masters on and beside each tie of two neighbours, where fp16 is subnormal too, and zeros of both signs."""
    dtype = torch.float16 if mode == "16-naive" else torch.bfloat16
    weights = every_weight(dtype)[:-1]
    above = (weights.view(torch.int16) + 1).view(dtype)
    ties = (weights.double() + above.double()) / 2
    values = torch.cat([ties + steps * 2.0**-42 for steps in range(-5, 6)]).float()
    values = torch.cat([values[values.abs() < 6e4], torch.tensor([0.0, -0.0, 2.0**-60, -(2.0**-60)])])
    with paramp.launch_from_torch({"precision": {"mode": mode}, "masters": "remainder"}):
        model = torch.nn.Linear(len(values), 1, bias=False)
        model.weight.data.copy_(values)
        engine = engine_of(model, optimizer=functools.partial(torch.optim.AdamW, lr=0.1))
        (buffer,) = engine._weights.buffers

        def bits():
            stored = [tensor.view(torch.int16).clone() for tensor in (buffer.weights, *buffer.masters.state)]
            return [*stored, engine.full_state_dict()["weight"].view(torch.int32)]

        before = bits()
        assert not train_step(engine, torch.full((1, len(values)), float("inf")), torch.zeros(1, 1)).stepped
        assert all(map(torch.equal, before, bits()))


@pytest.mark.parametrize(("mode", "distance"), [("16-naive", 1e-5), ("bf16-naive", 0.0)])
def test_losses_of_ten_steps_equal_those_of_full_masters(mode, distance):
    losses = []
    for masters in ("full", "remainder"):
        with paramp.launch_from_torch({"precision": mode, "masters": masters}) as context:
            found, ways = train_engine(context, small_gpt, GPT.loss, 10, optimizer=ADAMW)
        losses.append(found)
        assert min(way.abs().max() for way in ways.values()) > 0.03  # of steps of 0.01
    full, remainder = torch.tensor(losses, dtype=torch.float64)
    assert (full - remainder).abs().max() <= distance


class Loading(torch.nn.Linear):
    """Its bias may be loaded by another name too, beside what torch loads or in its place."""

    def __init__(self):
        super().__init__(4, 4)
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(super().forward(x))

    def _load_from_state_dict(self, state_dict, prefix, *others):
        if "alone" not in state_dict:
            super()._load_from_state_dict(state_dict, prefix, *others)
        for name in {"beside", "alone"} & state_dict.keys():
            self.bias.copy_(state_dict[name])


@pytest.mark.parametrize("name", ["bias", "beside", "alone"])
def test_a_load_of_one_weight_leaves_the_masters_of_others(name):
    """But for those of a module that calls no hooks of torch's."""
    with paramp.launch_from_torch({"precision": "bf16-naive", "masters": "remainder"}):
        engine = engine_of(Loading(), optimizer=ADAMW)
        train_step(engine, torch.ones(2, 4))
        before = engine.full_state_dict()
        loaded = before["bias"].bfloat16()
        with torch.no_grad():
            engine.module.load_state_dict({name: loaded}, strict=False)
        expected = before | {"bias": loaded.float()}
        if name == "alone":
            expected["weight"] = before["weight"].bfloat16().float()
        assert not before["bias"].equal(expected["bias"])
        assert_same_tensors(engine.full_state_dict(), expected)


@pytest.mark.parametrize("low", [-14, -17, -30])
def test_the_error_of_a_round_trip(low):
    """None from 2**-14 up; from 2**-17 only of ties; below, one step of the remainder, 2**-40, at most."""
    generator = torch.Generator().manual_seed(low + 40)
    magnitudes = torch.exp2(torch.rand(2**20, generator=generator) * (15.9 - low) + low)
    ties = torch.arange(2**7) * 2.0**-24 + 2.0**-25 + 2.0 ** max(low, -17)
    magnitudes[: 2**8] = torch.cat([ties, ties + 2.0**-40])
    masters = torch.where(torch.rand(2**20, generator=generator) < 0.5, magnitudes, -magnitudes)
    rounded, back = there_and_back(masters, torch.float16)
    error, is_tie = (back - masters).abs(), (rounded.double() - masters).abs() == 2.0**-25
    assert error.max() <= (0.0 if low == -14 else 2.0**-40)
    assert not error[(magnitudes >= 2.0**-17) & ~(is_tie & (magnitudes < 2.0**-14))].any()
    assert error[is_tie].any() == (low != -14)


def test_bfloat16_loses_a_unit_of_ties_only():
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (2**20,), generator=generator).to(torch.int32)
    masters = bits.view(torch.float32)
    masters = masters[masters.isfinite() & (masters.abs() < torch.finfo(torch.bfloat16).max)]
    weights, back = there_and_back(masters, torch.bfloat16)
    apart = (back.view(torch.int32) - masters.view(torch.int32)).abs()
    assert apart.max() <= 1
    ties = masters.view(torch.int32) & 0xFFFF == 0x8000
    assert ties.any()
    assert not apart[~ties].any()
    assert torch.equal(weights, masters.to(torch.bfloat16))


def test_a_weight_that_is_not_finite_has_no_remainder():
    inf = float("inf")  # far behind the first ones; of the largest fp32 number bfloat16 makes one too
    masters = torch.tensor([1.0] * 5000 + [inf, -inf, float("nan"), 1e6, torch.finfo(torch.float32).max, 1.0])
    for dtype in (torch.float16, torch.bfloat16):
        _, back = there_and_back(masters, dtype)
        assert torch.equal(back.isfinite(), masters.to(dtype).isfinite())
