"""Gradients by their binary exponents, against numpy on the whole gradients."""

import json
import math

import pytest
import torch
from pool import on_ranks
from reference import batches
from small_engines import filled_engine, gpt_engine, numpys, own_part, train_step
from torch.distributed.tensor import DTensor

import paramp
from paramp.observe.grad_histogram import GradientHistogram
from paramp.tools.plot import draw_histogram, plot_histogram

SCALED = {"mode": "16-naive", "init_scale": 2.0**12}


def test_the_counts_equal_numpys():
    with paramp.launch_from_torch({"precision": SCALED}):
        engine = gpt_engine(num_layers=1)
        engine.forward_backward(*next(batches(1)))
        gradients = [parameter.grad for _, parameter in engine.named_parameters()]
        gradients[3].view(-1)[:2] = torch.tensor([math.inf, math.nan])
        histogram = engine.gradient_histogram()
    counts, zeros, bad, total = numpys(gradients)
    assert histogram.counts == counts
    assert (histogram.zeros, histogram.non_finite, bad, histogram.total) == (zeros, bad, 2, total)
    whole = torch.cat([gradient.reshape(-1) for gradient in gradients])
    assert histogram.largest == whole[whole.isfinite()].abs().max()
    assert (histogram.scale, histogram.dtype) == (2.0**12, torch.float16)
    assert histogram.underflow == (whole.abs() < 2.0**-14).sum() / whole.numel()


def test_gradients_of_a_past_step_are_refused():
    with paramp.launch_from_torch({"precision": SCALED}):
        engine = gpt_engine(num_layers=1)
        for batch in batches(2):
            engine.forward_backward(*batch)
            assert engine.gradient_histogram().total > 0
            engine.step()
            with pytest.raises(RuntimeError, match="between forward_backward and step"):
                engine.gradient_histogram()
            engine.zero_grad()


@pytest.mark.parametrize("parallel", [{"tensor": 2}, {"zero": 1, "data": 2}, {"tensor": 2, "sequence_parallel": True}])
@on_ranks(2)
def test_each_element_is_counted_once_over_ranks(world, parallel):
    with paramp.launch_from_torch({"precision": "32-true", "parallel": parallel}) as context:
        engine = gpt_engine(num_layers=1)
        batch = own_part(context, *next(batches(1)))
        train_step(engine, *batch)  # shows where gradients lie
        engine.forward_backward(*batch)
        replaced = next(engine.module.parameters())
        replaced.grad = replaced.grad.clone()  # then every data rank has all of it, under ZeRO too
        histogram = engine.gradient_histogram()
        gradients = [parameter.grad for parameter in engine.module.parameters()]
        whole = [one.full_tensor() if isinstance(one, DTensor) else one for one in gradients]
        weights = engine.full_state_dict()
    sizes = [value.numel() for name, value in weights.items() if name != "head.weight"]  # which is tied
    assert histogram.total == pytest.approx(sum(sizes))
    if parallel == {"tensor": 2}:
        counts, zeros, *_ = numpys(whole)
        assert histogram.counts == pytest.approx(counts)
        assert histogram.zeros == pytest.approx(zeros)


@on_ranks(2)
def test_counts_are_summed_over_stages_and_averaged_over_data_ranks(world):
    totals = []
    for parallel in ({"pipeline": 2}, {"data": 2}):
        with paramp.launch_from_torch({"precision": "32-true", "parallel": parallel}):
            engine = filled_engine(0.25)
            x = torch.ones(2, 4) * (1 + world.rank * (parallel == {"data": 2}))
            engine.forward_backward(x, -x)
            totals.append(engine.gradient_histogram())
    assert [histogram.total for histogram in totals] == [40, 40]
    assert all(count % 0.5 == 0 for count in totals[1].counts.values())


HAND_MADE = GradientHistogram({-20: 1.0, -14: 2.0, 3: 1.0}, 4.0, 0.0, 12.0, 1024.0, torch.float16)


def test_underflow_headroom_and_other_scales_equal_hand_arithmetic():
    assert HAND_MADE.total == 8
    assert HAND_MADE.underflow == 5 / 8
    assert HAND_MADE.headroom == pytest.approx(math.log2(65504 / 12))
    higher, lower = HAND_MADE.at_scale(2.0**16), HAND_MADE.at_scale(512.0)
    assert higher.counts == {-14: 1.0, -8: 2.0, 9: 1.0}
    assert (higher.underflow, lower.underflow) == (4 / 8, 7 / 8)
    assert higher.headroom == pytest.approx(HAND_MADE.headroom - 6)
    assert (lower.largest, lower.scale) == (6.0, 512.0)
    for scale in (1000.0, 0.0, -1024.0):
        with pytest.raises(ValueError, match="times a power of two"):
            HAND_MADE.at_scale(scale)
    assert GradientHistogram({}, 0.0, 0.0, 0.0, 1.0, torch.float32).headroom == math.inf
    weights = torch.nn.ParameterList([torch.zeros(2, dtype=torch.complex64)])
    weights[0].grad = torch.tensor([1 + 0j, 3j]).conj()
    both = paramp.gradient_histogram(weights)
    assert (both.counts, both.zeros, both.largest) == ({0: 1.0, 1: 1.0}, 2.0, 3.0)
    assert HAND_MADE.describe() == "gradients at a loss scale of 1024 in float16: 62.50% underflow, headroom 2**12.4"


def test_the_json_file_and_the_picture_are_written(tmp_path, monkeypatch):
    HAND_MADE.save(tmp_path / "gradients.json")
    saved = json.loads((tmp_path / "gradients.json").read_text())
    assert saved["counts"] == {"-20": 1, "-14": 2, "3": 1}
    assert (saved["zeros"], saved["underflow"], saved["dtype"]) == (4, 5 / 8, "float16")
    (axes,) = draw_histogram(HAND_MADE).axes
    bars = {bar.get_x(): bar.get_height() for bar in axes.patches}
    assert {place: bars[place] for place in (-20, -14, 3)} == {-20: 1 / 8, -14: 2 / 8, 3: 1 / 8}
    assert min(bars) < -24
    assert bars[min(bars)] == 4 / 8
    assert [round(float(line.get_xdata()[0])) for line in axes.lines] == [-24, -14, 16]
    plot_histogram(HAND_MADE, tmp_path / "gradients.png")
    assert (tmp_path / "gradients.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(paramp.ConfigError, match=r'matplotlib is not installed; run pip install "paramp\[plot\]"'):
        plot_histogram(HAND_MADE, tmp_path / "gradients.png")
