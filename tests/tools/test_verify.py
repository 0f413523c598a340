"""Layer by layer against one process: right models pass, and of wrong ones the layer that is wrong is named."""

import contextlib
import dataclasses
import functools
import io
import json
import math
import re
import sys
import time
from pathlib import Path

import pytest
import torch
from commands import ROOT, python
from families import family, long
from masked_transformer import PLAN as ASSISTANT_PLAN
from masked_transformer import dialogue
from pool import World, run_on_ranks
from pretrained import build
from torch import nn
from verified import WithoutAllReduce

import paramp
from paramp import ConfigError, Precision
from paramp.tools.cli import main
from paramp.tools.verify import launch
from paramp.tools.verify.activation_recorder import RankRecord
from paramp.tools.verify.compare import compare, joined, relative, rounding
from paramp.tools.verify.launch import train
from paramp.tools.verify.options import Options, configure
from paramp.tools.verify.user_code import load_attribute


def see(world, options, run):
    config = configure(options, run)
    with paramp.launch_from_torch(config, device=world.device) as context:
        return train(options, context, configure(options, "single").parallel.pipeline.num_microbatches)


def report_of(model, layout, precision="16-mixed", size=4, of="verified", **options):
    settings = {"parallel": layout, "precision": precision}
    options = Options(model=f"{of}:{model}", settings=settings, **options)
    single = see(World(0, 1, "cpu"), options, "single")
    sharded = run_on_ranks(size, __name__, "see", {"options": options, "run": "sharded"})
    return compare(single, sharded, configure(options, "sharded"))


def of_blocks(model="blocks", plan="RIGHT", layout=None, **options):
    layout = layout or {"tensor": 2, "pipeline": 2}
    own = {"plan": f"verified:{plan}", "batches": "verified:batches", "criterion": "torch.nn.functional:mse_loss"}
    return report_of(model, layout, **(own | options))


LAYOUTS = {
    "pp2·tp2": {"tensor": 2, "pipeline": 2},
    "dp2·tp2": {"tensor": 2, "data": 2, "zero": 1, "sequence_parallel": True},
    "replicate2·fsdp2": {"data": {"replicate": 2, "shard": 2}},
    "fsdp2·tp2": {"data": {"shard": 2}, "tensor": 2},
    "pp2·dp2": {"data": 2, "pipeline": {"size": 2, "schedule": "interleaved-1f1b", "microbatches": 4}},
}


@pytest.mark.parametrize(
    ("layout", "precision"),
    [
        *[("pp2·tp2", "16-mixed"), ("dp2·tp2", "bf16-naive"), ("pp2·dp2", "32-true"), ("replicate2·fsdp2", "16-naive")],
        *(pytest.param(*cell, marks=[family, long]) for cell in [("fsdp2·tp2", "16-mixed"), ("pp2·tp2", "16-naive")]),
    ],
)
def test_a_correct_gpt_is_accepted(layout, precision):
    report = report_of("gpt", LAYOUTS[layout], precision)
    assert report.ok, "\n".join(report.lines())
    assert report.layout == layout
    assert report.random_in is None  # dropout is off
    layers = {layer.name: layer for layer in report.layers}
    for name in ("embedding.tokens", "blocks.0.attention.qkv", "blocks.1.attention.out", "blocks.1.mlp.down", "norm"):
        assert None not in (layers[name].forward, layers[name].gradient, layers[name].weights), name
    assert layers["head"].forward is not None
    assert all(layer.problem is None for layer in report.layers)
    assert ("blocks" in layers) == ("pp" not in layout)  # a module that spans stages returns something else in each
    if "tp" in layout:  # else every sum is made in the same order
        assert 0 < max(layer.forward for layer in report.layers) < report.tolerance
        assert 0 < layers["norm"].gradient < report.tolerance


@pytest.mark.parametrize("precision", ["16-mixed", "16-naive"])
def test_a_correct_user_model_is_accepted(precision):
    report = of_blocks(precision=precision)
    assert report.ok, "\n".join(report.lines())


@pytest.mark.parametrize(
    ("wrong", "layer", "what", "precision"),
    [
        ({"plan": "NO_ALL_REDUCE"}, "block2.down", "forward", "16-mixed"),
        ({"plan": "BIAS_ON_EACH_RANK"}, "block1.down", "forward", "bf16-naive"),
        ({"model": "normalized"}, "block0.activation", "forward", "16-mixed"),
        ({"plan": "HALF_GRADIENT"}, "block1.down", "gradient", "bf16-naive"),
    ],
)
def test_a_wrong_layer_is_named(wrong, layer, what, precision):
    report = of_blocks(precision=precision, **wrong)
    assert not report.ok
    first, where = report.first
    assert (first.name, where) == (layer, what), "\n".join(report.lines())
    assert f"the first layer that diverges: {layer} ({what}" in [*report.lines()][-1]


class ReluBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 32)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


def relu_blocks():
    return nn.Sequential(*(ReluBlock() for _ in range(4)))


def wide_batches(step):
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(step))
    return x, x.roll(1, dims=1)


RELU_PLAN = {"*.up": "colwise", "*.down": "rowwise"}
SEEDS = (3, 16, 17)


def dialogue_batches(step):
    batch = dialogue(step, size=4)
    return {**batch, "bias": paramp.whole(batch["bias"])}


def llama():
    return build("Llama")


@pytest.mark.parametrize("layout", [{"tensor": 2}, {"pipeline": 2}])
def test_models_with_named_inputs_and_outputs_are_compared(layout):
    """One with a loss of its own, on mappings with masks; one of transformers on random tokens."""
    own = {"plan": "masked_transformer:PLAN"} if "tensor" in layout else {}
    run = functools.partial(report_of, layout=layout, size=2, precision="32-true", steps=2)
    right = run("assistant", **own, batches=f"{__name__}:dialogue_batches", of="masked_transformer")
    assert right.ok, "\n".join(right.lines())
    assert {layer.name for layer in right.layers} >= {"blocks.0.attention.query", "blocks.3"}
    of_tokens = run("llama", of=__name__)
    assert of_tokens.ok, "\n".join(of_tokens.lines())


def test_a_wrong_layer_of_a_model_with_named_inputs_is_named():
    wrong = report_of(
        "assistant",
        {"tensor": 2},
        "32-true",
        size=2,
        of="masked_transformer",
        plan=f"{__name__}:WRONG_ASSISTANT",
        batches=f"{__name__}:dialogue_batches",
    )
    assert not wrong.ok
    assert any("blocks.2.down" in line for line in wrong.lines() if "first layer" in line)


WRONG_ASSISTANT = {**ASSISTANT_PLAN, "blocks.2.down": WithoutAllReduce()}


def test_values_near_the_kink_of_a_relu_are_accepted():
    options = Options(model=f"{__name__}:relu_blocks", plan=f"{__name__}:RELU_PLAN", batches=f"{__name__}:wide_batches")
    options = dataclasses.replace(options, criterion="torch.nn.functional:mse_loss")
    reports = []
    for seed in SEEDS:
        settings = {"parallel": {"tensor": 2}, "precision": "16-mixed", "seed": seed}
        own = dataclasses.replace(options, settings=settings)
        single = see(World(0, 1, "cpu"), own, "single")
        sharded = run_on_ranks(2, __name__, "see", {"options": own, "run": "sharded"})
        reports.append(compare(single, sharded, configure(own, "sharded")))
        assert reports[-1].ok, "\n".join(reports[-1].lines())
    assert max(layer.weights or 0.0 for report in reports for layer in report.layers) > reports[0].tolerance


@pytest.mark.parametrize("what", ["gradient", "step", "weights"])
def test_a_layer_with_a_wrong_gradient_on_one_rank_is_named(what):
    """By hand, in what one tensor rank saw."""
    settings = {"parallel": {"tensor": 2}}
    options = Options(model="verified:blocks", plan="verified:RIGHT", batches="verified:batches", settings=settings)
    options = dataclasses.replace(options, criterion="torch.nn.functional:mse_loss")
    single = see(World(0, 1, "cpu"), options, "single")
    sharded = run_on_ranks(2, __name__, "see", {"options": options, "run": "sharded"})
    config = configure(options, "sharded")
    assert compare(single, sharded, config).ok
    changed = {"gradient": sharded[1].gradient, "step": sharded[1].after_first, "weights": sharded[1].end}[what]
    start, name = sharded[1].start, "block2.down.bias"
    if what == "weights":  # as far as no value on the other side of a kink takes it
        changed[name] = start[name] - (changed[name] - start[name]) * 2
    else:
        changed[name] = changed[name] * 0.9
    layer, where = compare(single, sharded, config).first
    assert (layer.name, where) == ("block2.down", what)
    assert compare(single, sharded, config, tolerance=1e9).ok


class Last(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.block = ReluBlock()
        self.factor = factor

    def forward(self, x):
        return self.block(x) * self.factor


def overflowing():
    return Last(1e6)


def not_a_number():
    return Last(math.nan)


def without_parameters():
    return nn.Identity()


def with_an_argument(width):
    return nn.Linear(width, width)


def no_batches():
    return wide_batches(1)


def zero_dim_batches(step):
    return torch.tensor(1.0), torch.tensor(1.0)


def lone_batches(step):
    return wide_batches(step)[0]


@pytest.mark.parametrize(
    ("model", "precision", "conclusion"),
    [
        (
            "overflowing",
            "16-mixed",
            r"nothing was compared: the first step overflows in both runs.*; lower init_scale ",
        ),
        (
            "not_a_number",
            "16-mixed",
            r".* not finite in both runs, first in \(model\) \(forward, microbatch 0 of step 1",
        ),
        ("not_a_number", "32-true", r".*the values are not finite in both runs, first in \(model\) \(forward"),
    ],
)
def test_a_model_without_finite_values_is_neither_accepted_nor_blamed_on_the_layout(model, precision, conclusion):
    own = Options(
        model=f"{__name__}:{model}",
        batches=f"{__name__}:wide_batches",
        criterion="torch.nn.functional:mse_loss",
        settings={"precision": precision},
    )
    records = see(World(0, 1, "cpu"), own, "single")
    report = compare(records, [records], configure(own, "sharded"))
    lines = [*report.lines()]
    assert not report.ok
    assert report.first is None
    assert re.match(conclusion, lines[-1]), lines[-1]
    assert "DIVERGES" not in "\n".join(lines)


@pytest.mark.parametrize(
    ("skipped", "ok"), [({}, True), ({"single": 0}, False), ({"sharded": 0}, False), ({"sharded": 1}, False)]
)
def test_a_step_that_only_one_run_skips_is_a_failure(skipped, ok):
    """The gradient's norm is not finite there; by hand."""
    own = Options(
        model=f"{__name__}:relu_blocks",
        batches=f"{__name__}:wide_batches",
        criterion="torch.nn.functional:mse_loss",
        settings={"precision": "16-mixed"},
    )
    runs = {run: see(World(0, 1, "cpu"), own, "single") for run in ("single", "sharded")}
    for run, step in skipped.items():
        runs[run].skipped[step] = True
    report = compare(runs["single"], [runs["sharded"]], configure(own, "sharded"))
    assert report.ok is ok
    if 0 in skipped.values():
        run = next(iter(skipped))
        assert [*report.lines()][-1].startswith(f"nothing was compared: the first step overflows in the {run} run; ")


def test_a_forward_that_draws_random_numbers_is_reported():
    report = of_blocks("noisy", layout={"tensor": 2}, size=2)
    assert not report.ok
    assert report.random_in == "block0.activation"
    assert any("draws random numbers (block0.activation)" in line for line in report.lines())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "unseeded"}, r"model: 'block0.up.weight' has different initial values in the two runs"),
        ({"batches": "verified:batches_of_the_layout"}, r"batches: the batch of step 1 differs between the runs"),
    ],
)
def test_runs_that_cannot_be_compared_are_errors(changes, message):
    with pytest.raises(ConfigError, match=message):
        of_blocks(layout={"tensor": 2}, size=2, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "verified:RIGHT"}, r"model: 'verified:RIGHT' is dict, expected an nn.Module, or a callable"),
        ({"model": "verified:block"}, r"model: 'verified' has no 'block' \(did you mean 'blocks'\?\)"),
        ({"model": "verifed:blocks"}, r"model: no module 'verifed' on Python's path"),
        ({"model": "none.py:blocks"}, r"model: no file 'none.py'"),
        ({"batches": "verified:TWO_BATCHES"}, r"batches: 'verified:TWO_BATCHES' has 2 batches, expected 3"),
        ({"batches": "verified:uneven_batches"}, r"batches: .*, step 1: target: got shape \(7, 16\), expected 8"),
        ({"batches": None}, r"batches: Sequential has a Linear as its first layer and no Embedding"),
        ({"model": f"{__name__}:with_an_argument"}, r"model: .* is function, expected an nn.Module, or a callable"),
        ({"model": f"{__name__}:without_parameters"}, r"model: .* has no parameter to train"),
        ({"batches": f"{__name__}:no_batches"}, r"batches: .* is function, expected a function of the step"),
        ({"batches": f"{__name__}:zero_dim_batches"}, r"batches: .*, step 1: inputs: got no tensor with dims"),
        (
            {"batches": f"{__name__}:lone_batches"},
            r"batches: .* gave Tensor for step 1, expected a pair .* or a mapping",
        ),
        ({"criterion": None}, r"criterion: the targets are floating-point numbers, for which there is no default"),
        ({"settings": {"parallel": {"data": 3}}}, r"batch_size: got 8, expected a multiple of 3, the microbatches of"),
    ],
)
def test_user_errors_are_reported_by_the_single_run(changes, message):
    own = {"model": "verified:blocks", "batches": "verified:batches", "criterion": "torch.nn.functional:mse_loss"}
    with pytest.raises(ConfigError, match=message):
        see(World(0, 1, "cpu"), Options(**(own | changes)), "single")


def test_a_file_is_loaded_once_and_shadows_no_module(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])  # which gets the file's folder, as for a script
    file = tmp_path / "random.py"
    file.write_text("class Thing:\n    pass\n\nthing = Thing()\n")
    kind, thing = (load_attribute(f"{file}:{name}", "model") for name in ("Thing", "thing"))
    assert type(thing) is kind
    assert hasattr(__import__("random"), "gauss")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["blocks"], "model: got 'blocks', expected module:attribute or path/to/file.py:attribute"),
        (["a:b", "--batches", "c"], "batches: got 'c', expected module:attribute"),
        (["a:b", "--tp", "0"], "parallel.tensor.size: got 0, expected an integer of 1 or more"),
        (["a:b", "--precision", "15"], "precision: got '15', expected one of"),
        (["a:b", "--steps", "0"], "steps: got 0, expected an integer of 1 or more"),
        (["a:b", "--lr", "inf"], "lr: got inf, expected a finite number above 0"),
        (["a:b", "--tolerance", "nan"], "tolerance: got nan, expected a finite number of 0 or more"),
        (["a:b", "--json", "none/report.json"], "--json: no folder 'none' to write 'none/report.json' into"),
        (["a:b", "--tp", "x"], "argument --tp: invalid int value: 'x'"),
    ],
)
def test_bad_input_exits_with_2(arguments, message, capsys):
    assert main(["verify", *arguments]) == 2
    assert message in capsys.readouterr().err


def verify(*arguments):
    own = ["--batches", "verified:batches", "--criterion", "torch.nn.functional:mse_loss", "--tp", "2"]
    return python("-m", "paramp", "verify", *arguments, *own, PYTHONPATH=f"{ROOT}:{ROOT / 'tests' / 'support'}")


def test_the_command_names_the_layer_and_exits_with_1(tmp_path):
    file = tmp_path / "report.json"
    arguments = ["--plan", "verified:NO_ALL_REDUCE", "--precision", "16-mixed", "--json", str(file)]
    result = verify("verified:blocks", *arguments)
    assert result.returncode == 1, result.stdout + result.stderr
    last = result.stdout.splitlines()[-1]
    assert re.fullmatch(
        r"the first layer that diverges: block2\.down \(forward, microbatch 0 of step 1: \d+\.\d units, allowed 32\)",
        last,
    )
    found = json.loads(file.read_text())
    assert (found["ok"], found["first"]) == (False, {"layer": "block2.down", "what": "forward"})
    assert [layer["name"] for layer in found["layers"]][:3] == ["block0.up", "block0.activation", "block0.down"]
    assert found["layers"][0]["forward"] <= 32


def run_in(world, folder, run):
    """The exit code of a rank, and its error output."""
    output = io.StringIO()
    with contextlib.redirect_stderr(output):
        return launch.main(folder, run), output.getvalue()


@pytest.mark.parametrize(
    ("model", "code", "message"),
    [
        ("fails_when_sharded", 1, "RuntimeError: no shards, please"),
        ("RIGHT", 2, "error: model: 'verified:RIGHT' is dict"),
    ],
)
def test_a_run_that_fails_is_named_and_its_error_is_printed_once(model, code, message, monkeypatch, capfd):
    def start(command, size):
        folder, run = Path(command[-2]), command[-1]
        if size == 1:
            code, output = run_in(World(0, 1, "cpu"), folder, run)
            codes = [code]
        else:
            found = run_on_ranks(size, __name__, "run_in", {"folder": folder, "run": run})
            codes, output = [code for code, _ in found], "".join(text for _, text in found)
        print(output, file=sys.stderr)
        return max(codes)

    monkeypatch.setattr(launch, "start_processes", start)
    own = ["--batches", "verified:batches", "--criterion", "torch.nn.functional:mse_loss", "--plan", "verified:RIGHT"]
    assert main(["verify", f"verified:{model}", "--tp", "2", *own]) == code
    output = capfd.readouterr()
    assert output.err.count(message) == 1
    run = "sharded run failed (2 processes)" if code == 1 else "single run failed (1 process)"
    assert f"error: the {run}" in output.err
    assert "layer" not in output.out


def test_distances_equal_hand_arithmetic():
    expected = torch.tensor([3.0, 4.0])
    assert relative(torch.tensor([3.0, 4.5]), expected) == pytest.approx(0.1)
    assert relative(torch.tensor([3.0, 4.5]), expected, least=10.0) == pytest.approx(0.05)
    assert relative(torch.tensor([0.0]), torch.tensor([0.0])) == 0.0
    assert relative(torch.tensor([1.0]), torch.tensor([0.0])) == math.inf
    assert relative(torch.tensor([math.nan, 4.0]), expected) == math.inf
    lowest = torch.finfo(torch.float16).min
    masked = torch.tensor([3.0, 4.0, lowest, -math.inf], dtype=torch.float16)
    other = torch.tensor([3.0, 4.5, lowest, -math.inf], dtype=torch.float16)
    assert relative(other, masked) == pytest.approx(0.1)
    units = {"16-naive": -11, "bf16-mixed": -8, "32-true": -24, "64-true": -53, "fp8-mixed": -4}
    for mode, exponent in units.items():
        assert rounding(Precision.parse(mode)) == 2.0**exponent


ALLOWED = {  # units of the first step, of its loss, and of weights after it, as on the page
    "16-mixed": (32, 4, 1024),
    "bf16-mixed": (32, 4, 128),
    "32-true": (32, 32, 2.0**23),
    "64-true": (32, 32, 2.0**52),
    "fp8-mixed": (6, 4, 8),
}


@pytest.mark.parametrize("mode", ALLOWED)
def test_what_is_allowed(mode):
    """By hand: less is accepted, more is not. Halving a gradient makes as many units as weights may be apart later."""
    config = configure(Options(model="a:b", settings={"parallel": {"tensor": 2}, "precision": mode}), "sharded")
    unit = rounding(config.precision)

    def report(**factors):
        values = dict.fromkeys(("gradient", "step", "weights", "first loss", "later loss"), 1.0) | factors
        tensors = {"gradient": "gradient", "after_first": "step", "end": "weights"}
        return RankRecord(
            batch_rank=0,
            tensor_rank=0,
            losses=[values["first loss"], values["later loss"]],
            grad_norms=[1.0, 1.0],
            skipped=[False, False],
            trained=["layer.weight"],
            start={"layer.weight": torch.zeros(2, 2, dtype=torch.float64)},
            **{
                name: {"layer.weight": torch.full((2, 2), values[key], dtype=torch.float64)}
                for name, key in tensors.items()
            },
        )

    first, loss, later = ALLOWED[mode]
    loss_unit = max(unit, 2.0**-24)
    limits = {"gradient": first * unit, "step": first * unit, "weights": later * unit, "first loss": loss * loss_unit}
    for what, limit in (limits | {"later loss": later * unit}).items():
        for part in (0.8, 1.2):
            found = compare(report(), [report(**{what: 1.0 + part * limit})], config)
            assert found.ok == (part < 1), (what, part)
    halved = compare(report(), [report(gradient=0.5)], config)
    assert halved.layers[0].gradient == later


def test_every_microbatch_of_every_data_rank_is_compared():
    """Three steps of two samples a microbatch, of 16 tokens, by default. The records of two data ranks are by hand."""
    settings = {"parallel": {"data": 2, "pipeline": {"microbatches": 2}}, "precision": "16-mixed"}
    own = Options(model="verified:gpt", settings=settings)
    single = see(World(0, 1, "cpu"), own, "single")
    assert (len(single.losses), single.microbatch_size, own.timeout) == (3, 2, 600.0)
    assert {one["microbatch"] for one in single.activations} == {0, 1, 2, 3}
    assert {one["tensors"][0].shape for one in single.activations if one["module"] == "norm"} == {(2, 16, 32)}

    def of_data_rank(rank, wrong):
        found = []
        for one in single.activations:
            if one["microbatch"] // 2 == rank:
                is_wrong = (one["module"], one["microbatch"]) == ("blocks.1.mlp.down", wrong)
                values = [tensor * (1.1 if is_wrong else 1.0) for tensor in one["tensors"]]
                found.append({**one, "microbatch": one["microbatch"] - 2 * rank, "tensors": values})
        return dataclasses.replace(single, batch_rank=rank, activations=found)

    for wrong in (None, 0, 1, 2, 3):
        records = [of_data_rank(rank, wrong) for rank in range(2)]
        report = compare(single, records, configure(own, "sharded"))
        assert report.ok == (wrong is None)
        if wrong is not None:
            layer, where = report.first
            assert (layer.name, where, layer.microbatch) == ("blocks.1.mlp.down", "forward", wrong)


@pytest.mark.parametrize(("given", "expected"), [({}, 2.0**10), ({"init_scale": 64.0}, 64.0)])
def test_both_runs_start_from_a_low_loss_scale_and_full_masters(given, expected):
    settings = {"precision": {"mode": "16-naive", **given}, "masters": "remainder"}
    for run in ("single", "sharded"):
        precision = configure(Options(model="a:b", settings=settings), run).precision
        assert (precision.scaling.init_scale, precision.masters) == (expected, True)


def hangs():
    time.sleep(600)


@family
@long
def test_a_run_that_takes_too_long_shows_where_it_is_and_ends():
    result = verify(f"{__file__}:hangs", "--timeout", "2")
    assert result.returncode == 1
    assert "Timeout (0:00:02)!" in result.stderr
    assert "most recent call first" in result.stderr
    assert "error: the single run failed (1 process)" in result.stderr


def test_shards_are_joined():
    whole = torch.arange(2 * 12.0).view(2, 12)
    plain = whole.chunk(2, dim=1)
    assert torch.equal(next(joined(plain, whole, [])), whole)
    packed = [torch.cat([part.chunk(2, dim=1)[rank] for part in whole.chunk(3, dim=1)], dim=1) for rank in range(2)]
    assert [torch.equal(joined, whole) for joined in joined(packed, whole, [3])] == [False, True]
    heads = torch.arange(24.0).view(2, 4, 3)  # samples, heads, features
    merged = [part.flatten(0, 1) for part in heads.chunk(2, dim=1)]
    assert [torch.equal(joined, heads.flatten(0, 1)) for joined in joined(merged, heads.flatten(0, 1), [2])] == [
        False,
        True,
    ]
    assert not [*joined([whole[:, :5], whole[:, 5:11]], whole, [])]
    assert not [*joined([whole[:1, :6], whole[:1, 6:]], whole, [])]


def test_the_zero_gradient_of_a_key_bias_is_compared_with_its_layer():
    """Its gradient is zero but for what cancelled out badly."""
    noise = torch.tensor([1e-9, -2e-9])
    records = {
        name: RankRecord(
            batch_rank=0,
            tensor_rank=0,
            losses=[1.0],
            grad_norms=[1.0],
            skipped=[False],
            trained=["key.weight", "key.bias"],
            start={"key.weight": torch.ones(2, 2), "key.bias": torch.zeros(2)},
            gradient={"key.weight": torch.ones(2, 2), "key.bias": noise * sign},
            after_first={"key.weight": torch.ones(2, 2) * 2, "key.bias": noise * sign},
            end={"key.weight": torch.ones(2, 2) * 2, "key.bias": noise * sign},
        )
        for name, sign in (("single", 1.0), ("sharded", -1.0))
    }
    options = Options(model="a:b", settings={"parallel": {"tensor": 2}, "precision": "16-mixed"})
    report = compare(records["single"], [records["sharded"]], configure(options, "sharded"))
    assert report.ok
    assert 0 < report.layers[0].gradient < 1e-3
