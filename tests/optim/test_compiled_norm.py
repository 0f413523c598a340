"""The sums of squares of the compiled gradient norm, against fp64, and where they are used."""

import pytest
import torch
import torch.nn.functional as F
from compiler import needs_compiler
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import paramp
from paramp.optim.compiled import norm as compiled
from paramp.optim.compiled import step as compiled_step
from paramp.optim.compiled.kernels import inductor_options, step_function
from paramp.optim.compiled.norm import compiled_sums, sums_of_squares
from paramp.optim.grad_norm import LONG, norm_power
from paramp.parallel import compiled_blocks

CPU = torch.device("cpu")


def gradient(size, dtype, factor=1.0):
    return (torch.randn(size, generator=torch.Generator().manual_seed(size)) * factor).to(dtype)


def check(sums):
    """Long and short gradients, whole blocks and not, and some whose squares overflow fp32.

    A block has the same bits wherever it is, so that the norm is the same however ranks divide the gradients.
    """
    for dtype, factor in ((torch.float16, 1e3), (torch.bfloat16, 1e-3), (torch.bfloat16, 1e30)):
        given = [gradient(size, dtype, factor) for size in (LONG, LONG + 512 + 64, 64, LONG + 1)]
        weights = [1.0, 0.5, 0.25, 0.125]
        expected = sum(weight * one.double().square().sum() for weight, one in zip(weights, given, strict=True))
        torch.testing.assert_close(norm_power(given, weights, 2.0, CPU, sums), expected, rtol=1e-6, atol=0)
    given[1][-1] = torch.inf
    assert not norm_power(given, weights, 2.0, CPU, sums).isfinite()
    given[1][-1], given[1][0] = 0, torch.nan
    assert not norm_power(given, weights, 2.0, CPU, sums).isfinite()
    blocks = gradient(LONG, torch.bfloat16).view(-1, 512)
    assert torch.equal(torch.cat([sums(part) for part in blocks.split(5)]), sums(blocks))


def test_the_sums_are_those_of_fp64():
    check(sums_of_squares)


@needs_compiler
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")
def test_compiled_the_sums_are_those_of_fp64():
    from torch._dynamo.utils import counters

    compiled_sums.cache_clear()
    counters.clear()
    check(compiled_sums(inductor_options({})))
    assert counters["stats"]["unique_graphs"] == 2  # one for each dtype


@pytest.mark.filterwarnings("ignore:compile.*run.* eagerly")
@pytest.mark.parametrize(
    ("mode", "compile", "size", "used"),
    [
        ("bf16-naive", True, LONG, True),
        ("bf16-naive", False, LONG, False),
        ("bf16-naive", True, 64, False),
        ("bf16-mixed", True, LONG, False),
    ],
)
def test_the_engine_uses_them_for_long_half_precision_gradients(monkeypatch, mode, compile, size, used):
    calls = []

    def sums(rows):
        calls.append(rows.shape)
        return sums_of_squares(rows)

    monkeypatch.setattr(compiled, "compiled_sums", lambda _: sums)
    monkeypatch.setattr(compiled_step, "compiled_step", lambda variant, _: step_function(variant))
    monkeypatch.setattr(compiled_blocks, "why_not_inductor", lambda *_: None)
    with paramp.launch_from_torch({"precision": mode, "compile": compile}):
        model = nn.Linear(size, 1, bias=False)
        engine, *_ = paramp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), F.mse_loss)
        engine.forward_backward(torch.ones(1, size), torch.ones(1, 1))
        with FlopCounterMode(display=False):  # under which nothing compiled may be called
            engine.step()
        assert not calls
        engine.zero_grad()
        engine.forward_backward(torch.ones(1, size), torch.zeros(1, 1))
        expected = engine.module.weight.grad.double().norm()
        assert engine.step().grad_norm == pytest.approx(expected.item(), rel=1e-6)
    assert bool(calls) is used


def test_options_that_hold_lists_are_keys_of_a_cache():
    first, again, other = (inductor_options({"options": {"cpp.cxx": [None, name]}}) for name in ("g++", "g++", "c++"))
    assert {first: 1}[again] == 1
    assert first != other
    assert inductor_options({"backend": "eager"}) is None
