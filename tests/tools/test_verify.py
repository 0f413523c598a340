"""Layer by layer against one process: right models pass, and of wrong ones the layer that is wrong is named."""

import itertools
import json
import math
import os
import re
import sys
import time
from dataclasses import replace
from functools import partial

import pytest
import torch
import verified
from commands import ROOT, python
from families import rarely
from masked_transformer import PLAN as ASSISTANT_PLAN
from masked_transformer import dialogue
from pretrained import build
from small_engines import each_raises
from torch import nn
from verified import WithoutAllReduce, blocks
from verify_runs import report_of as compared

import paramp
from paramp import ConfigError, Precision
from paramp.parallel.microbatches import Batch
from paramp.tools.cli import main
from paramp.tools.verify import options, two_runs
from paramp.tools.verify.activation_recorder import RankRecord
from paramp.tools.verify.compare import compare, distance, joined, layout_name, rounding
from paramp.tools.verify.options import Options, configure
from paramp.tools.verify.two_runs import replay, train
from paramp.tools.verify.user_code import build_model, choose_criterion, load_attribute, load_batches

MSE = "torch.nn.functional:mse_loss"
BLOCKS = Options(model="verified:blocks", plan="verified:RIGHT", batches="verified:batches", criterion=MSE)


def here(name, **settings):
    """Options for a model of this file, and its batches."""
    return Options(model=f"{__name__}:{name}", batches=f"{__name__}:wide_batches", criterion=MSE, settings=settings)


def alone(options, folder):
    """The record of a training in one process."""
    config = configure(options, "single")
    with paramp.launch_from_torch(config, device="cpu") as context:
        return train(options, context, config.parallel.pipeline.num_microbatches, folder)


def report_of(options, layout, precision="16-mixed", **settings):
    return compared(replace(options, settings={"parallel": layout, "precision": precision, **settings}))


LAYOUTS = {
    "pp2·tp2": {"tensor": 2, "pipeline": 2},
    "dp2·tp2": {"tensor": 2, "data": 2, "zero": 1, "sequence_parallel": True},
    "replicate2·fsdp2": {"data": {"replicate": 2, "shard": 2}},
    "pp2·dp2": {"data": 2, "pipeline": {"size": 2, "schedule": "interleaved-1f1b", "microbatches": 4}},
    "cp2": {"context": 2},
}


ACCEPTED = [
    ("pp2·tp2", "16-mixed"),
    ("dp2·tp2", "bf16-naive"),
    ("pp2·dp2", "32-true"),
    ("replicate2·fsdp2", "16-naive"),
    ("cp2", "32-true"),
]


def test_a_layout_is_named_by_its_axes_of_several_ranks():
    for name, layout in {"1": {}, **LAYOUTS}.items():
        config = configure(replace(BLOCKS, settings={"parallel": layout}), "sharded")
        assert layout_name(config.parallel) == name


@pytest.mark.parametrize(("layout", "precision"), rarely(ACCEPTED, ACCEPTED[0], ACCEPTED[4]))
def test_a_correct_gpt_is_accepted(layout, precision):
    steps = 1 if layout == "cp2" else 3  # context ranks try the first batch, here the only one
    report = report_of(Options(model="verified:gpt", steps=steps), LAYOUTS[layout], precision)
    assert report.ok, "\n".join(report.lines())
    assert report.layout == layout
    assert report.random_in is None  # dropout is off
    layers = {layer.name: layer for layer in report.layers}
    for name in ("embedding.tokens", "blocks.0.attention.qkv", "blocks.1.mlp.down", "norm"):
        assert None not in (layers[name].forward, layers[name].gradient, layers[name].step), name
    if "tp" in layout:  # else every sum is made in the same order
        assert 0 < max(layer.forward for layer in report.layers) < report.tolerance
        assert 0 < layers["norm"].gradient < report.tolerance


def dialogue_batches(step):
    batch = dialogue(step, size=4)
    return {**batch, "bias": paramp.whole(batch["bias"])}


def llama():
    return build("Llama")


WRONG_ASSISTANT = {**ASSISTANT_PLAN, "blocks.2.down": WithoutAllReduce()}
ASSISTANT = Options(model="masked_transformer:assistant", batches=f"{__name__}:dialogue_batches", steps=2)
TP2, PP2, DP2 = {"tensor": 2}, {"pipeline": 2}, {"data": 2}


CASES = [
    (BLOCKS, LAYOUTS["pp2·tp2"], "16-mixed", None, None),
    (BLOCKS, LAYOUTS["pp2·tp2"], "16-naive", None, None),
    (replace(BLOCKS, plan="verified:NO_ALL_REDUCE"), LAYOUTS["pp2·tp2"], "16-mixed", "block2.down", "forward"),
    (replace(BLOCKS, plan="verified:BIAS_ON_EACH_RANK"), TP2, "bf16-naive", "block1.down", "forward"),
    (replace(BLOCKS, model="verified:normalized"), TP2, "16-mixed", "block0.activation", "forward"),
    (replace(BLOCKS, plan="verified:HALF_GRADIENT"), LAYOUTS["pp2·tp2"], "bf16-naive", "block1.down", "gradient"),
    # A loss of its own, mappings with masks, and random tokens for a model of transformers.
    (replace(ASSISTANT, plan="masked_transformer:PLAN"), TP2, "32-true", None, None),
    (ASSISTANT, PP2, "32-true", None, None),
    (replace(ASSISTANT, plan=f"{__name__}:WRONG_ASSISTANT"), TP2, "32-true", "blocks.2.down", "forward"),
    (Options(model=f"{__name__}:llama", steps=2), TP2, "32-true", None, None),
    (Options(model=f"{__name__}:llama", steps=2), PP2, "32-true", None, None),
]
BY_DEFAULT = CASES[5], CASES[8]


@pytest.mark.parametrize(("options", "layout", "precision", "layer", "what"), rarely(CASES, *BY_DEFAULT))
def test_a_wrong_layer_is_named(options, layout, precision, layer, what):
    """And a right model is accepted."""
    report = report_of(options, layout, precision)
    lines = "\n".join(report.lines())
    assert report.ok == (layer is None), lines
    assert options.model != ASSISTANT.model or {"blocks.0.attention.query", "blocks.3"} <= {
        x.name for x in report.layers
    }
    if layer is not None:
        first, where = report.first
        assert (first.name, where) == (layer, what), lines
        assert f"the first layer that diverges: {layer} ({what}" in lines.splitlines()[-1]


class ReluBlock(nn.Module):
    def __init__(self, factor=None):
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.factor = factor

    def forward(self, x):
        x = x + self.down(torch.relu(self.up(x)))
        return x if self.factor is None else x * self.factor


def relu_blocks():
    return nn.Sequential(*(ReluBlock() for _ in range(4)))


def wide_batches(step):
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(step))
    return x, x.roll(1, dims=1)


# ------------------------------------------------------------------------------------------- what cannot be compared


def too_large():
    """Of which ``sums`` has a gradient that no loss scale of 1 or more keeps in fp16."""
    return ReluBlock(2.0**12)


def sums(output, target):
    return (output.float() - target).square().sum()


def not_a_number():
    return ReluBlock(math.nan)


def test_after_an_overflow_the_scale_is_lowered_until_the_step_is_made():
    options = replace(here("too_large"), criterion=f"{__name__}:sums")
    report = report_of(options, DP2, precision={"mode": "16-mixed", "init_scale": 2.0**16})
    assert report.ok, "\n".join(report.lines())
    assert report.overflows == []
    assert min(report.grad_norms["single"]) > 65504 / 2.0**10  # so the first scale was too large


@pytest.mark.parametrize("precision", ["16-mixed", "O3", "32-true"])
def test_a_model_without_finite_values_is_neither_accepted_nor_blamed_on_the_layout(precision):
    report = report_of(here("not_a_number"), DP2, precision)
    lines = [*report.lines()]
    assert (report.ok, report.first) == (False, None)
    assert report.overflows == ["single", "sharded"]
    where = r"first in \(model\) \(forward, microbatch 0 of step 1\); lower init_scale or correct the model"
    assert re.match(f"not everything was compared: step 1 overflows in single and sharded, .*{where}", lines[-1]), lines
    assert "DIVERGES" not in "\n".join(lines)


@pytest.mark.parametrize(("run", "step"), [(None, 0), ("single", 0), ("sharded", 0), ("sharded", 1)])
def test_a_step_that_only_one_run_skips_is_a_failure(run, step):
    runs = {name: record_of(losses=(1.0, 1.0)) for name in ("single", "sharded")}
    if run is not None:
        runs[run].skipped[step] = True
    report = compare(runs["single"], [], [runs["sharded"]], in_fp16())
    assert report.ok is (run is None)
    if run is not None:
        assert [*report.lines()][-1].startswith(f"not everything was compared: step {step + 1} overflows in {run}; ")


def test_replicas_that_differ_are_a_failure():
    runs = [record_of(), record_of()]
    runs[1].replicas.append("after step 1: layer.weight differs")
    report = compare(runs[0], [], runs[1:], in_fp16())
    assert not report.ok
    assert [*report.lines()][-2:] == [
        "after step 1: layer.weight differs",
        "tp2 does not follow the single process: replicas differ",
    ]


def test_a_forward_that_draws_random_numbers_is_reported():
    report = report_of(replace(BLOCKS, model="verified:noisy"), TP2)
    assert not report.ok
    assert report.random_in == "block0.activation"
    assert any("draws random numbers (block0.activation)" in line for line in report.lines())


class RunningMean(nn.Linear):
    """Subtracts a mean of the inputs of all calls so far, and has a batch norm, whose statistics no training reads."""

    def __init__(self, width):
        super().__init__(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.register_buffer("mean", torch.zeros(width))
        with torch.inference_mode():
            self.register_buffer("fixed", torch.ones(width), persistent=False)

    def forward(self, x):
        with torch.no_grad():
            self.mean.lerp_(x.detach().float().mean(0), 0.5)
        return super().forward(x - self.mean) + self.norm(x)


def running_mean():
    return nn.Sequential(nn.Linear(32, 32), RunningMean(32))


class Rotation(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, dtype=torch.complex64))

    def forward(self, x):
        return x * self.weight


class Parts(nn.Module):
    def forward(self, x):
        return x.real + x.imag


def rotated():
    return nn.Sequential(nn.Linear(32, 32), Rotation(32), Parts())


def test_complex_weights_and_outputs_are_compared():
    report = report_of(here("rotated"), {"data": 2}, "32-true")
    assert report.ok, "\n".join(report.lines())
    (rotation,) = (layer for layer in report.layers if layer.name == "1")
    assert None not in (rotation.forward, rotation.gradient, rotation.step)


def with_nan():
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    with torch.no_grad():
        model[1].weight[2, 3] = math.nan
    return model


def test_a_buffer_that_the_forward_changes_is_named():
    report = report_of(here("running_mean"), {"data": 2}, "32-true")
    assert not report.ok
    assert report.updated == "1.mean"
    assert any("the forward changes the buffer 1.mean, which each data rank" in line for line in report.lines())


def test_a_weight_that_is_nan_is_named():
    with pytest.raises(ConfigError, match=r"model: '1.weight' has NaN among its initial values, first at \[2, 3\]"):
        report_of(here("with_nan"), {"data": 2}, "32-true")


def test_a_file_of_the_train_script_gives_the_layout_and_the_mode():
    options = Options(model="a:b", config=str(ROOT / "launch" / "tiny.toml"), settings={"precision": "bf16-mixed"})
    config = configure(options, "sharded")
    assert (config.parallel.tensor.size, config.parallel.pipeline.size, config.precision.name) == (2, 2, "bf16-mixed")


def test_runs_that_cannot_be_compared_are_errors():
    """Other weights or batches in each layout."""

    def run(**changes):
        return lambda: report_of(replace(BLOCKS, **changes), TP2)

    weights = r"model: 'block0.up.weight' has different initial values in the two runs"
    batches = r"batches: the batch of step 1 differs between the runs"
    of_layout = run(batches="verified:batches_of_the_layout")
    each_raises(ConfigError, {weights: run(model="verified:unseeded"), batches: of_layout})


def with_an_argument(width):
    return nn.Linear(width, width)


def zero_dim_batches(step):
    return torch.tensor(1.0), torch.tensor(1.0)


def lone_batches(step):
    return wide_batches(step)[0]


WRONG_OPTIONS = {
    r"model: 'verified:RIGHT' is dict, expected an nn.Module, or a callable": {"model": "verified:RIGHT"},
    r"model: 'verified' has no 'block' \(did you mean 'blocks'\?\)": {"model": "verified:block"},
    r"model: no module 'verifed' on Python's path": {"model": "verifed:blocks"},
    r"model: no file 'none.py'": {"model": "none.py:blocks"},
    r"model: .* is function, expected an nn.Module, or a callable": {"model": f"{__name__}:with_an_argument"},
    r"model: .* has no parameter to train": {"model": "torch.nn:Identity"},
    r"batches: 'verified:TWO_BATCHES' has 2 batches, expected 3": {"batches": "verified:TWO_BATCHES"},
    r"batches: .*, step 1: target: got shape \(7, 16\), expected 8": {"batches": "verified:uneven_batches"},
    r"batches: Sequential has a Linear as its first layer and no Embedding": {"batches": None},
    r"batches: .* is function, expected a function of the step": {"batches": f"{__name__}:relu_blocks"},
    r"batches: .*, step 1: inputs: got no tensor with dims": {"batches": f"{__name__}:zero_dim_batches"},
    r"batches: .* gave Tensor for step 1, expected a pair .* or a map": {"batches": f"{__name__}:lone_batches"},
    r"criterion: the targets are floating-point numbers, for which there is no default": {"criterion": None},
    r"batch_size: got 8, expected a multiple of 3, the micro": {"settings": {"parallel": {"data": 3}}},
}


@pytest.mark.parametrize("message", WRONG_OPTIONS)
def test_wrong_options_are_errors(message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        alone(replace(BLOCKS, plan=None, **WRONG_OPTIONS[message]), tmp_path)


def test_batches_may_be_a_list():
    listed, called = (
        Options(model="verified:blocks", batches=f"verified:{name}", steps=2) for name in ("TWO_BATCHES", "batches")
    )
    pairs = zip(*(load_batches(one, blocks(), 1, 8) for one in (listed, called)), strict=True)
    found = [
        [torch.equal(*both) for both in zip(one.args, other.args, strict=True)]
        + [torch.equal(one.target, other.target)]
        for one, other in pairs
    ]
    assert found == [[True, True]] * 2


def test_without_a_criterion_it_is_the_models_loss_else_the_cross_entropy_else_the_outputs_own():
    options, plain, own = Options(model="a:b"), blocks(), blocks()
    own.loss = lambda output, target: output.mean()
    tokens = torch.tensor([[1, 2]])
    labelled, unlabelled = Batch.of(tokens, tokens), Batch.of({"input_ids": tokens})
    assert choose_criterion(options, own, labelled) is own.loss
    logits = torch.randn(1, 2, 5)
    expected = nn.functional.cross_entropy(logits[0], tokens[0])
    assert choose_criterion(options, plain, labelled)(logits, tokens) == expected
    assert choose_criterion(options, plain, unlabelled) is None


def test_a_file_is_loaded_once_shadows_no_module_and_imports_from_its_folder_first(tmp_path, monkeypatch):
    other = tmp_path / "other"
    other.mkdir()
    monkeypatch.setattr(sys, "path", [str(other), *sys.path])
    for folder in (tmp_path, other):
        (folder / "beside_the_file.py").write_text(f"folder = {folder.name!r}\n")
    file = tmp_path / "random.py"
    file.write_text("from beside_the_file import folder\n\nclass Thing:\n    pass\n\nthing = Thing()\n")
    kind, thing = (load_attribute(f"{file}:{name}", "model") for name in ("Thing", "thing"))
    assert type(thing) is kind
    assert load_attribute(f"{file}:folder", "model") == tmp_path.name
    assert hasattr(__import__("random"), "gauss")


# ------------------------------------------------------------------------------------------------------ the command


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("blocks", "model: got 'blocks', expected module:attribute or path/to/file.py:attribute"),
        ("a:b --batches c", "batches: got 'c', expected module:attribute"),
        ("a:b --tp 0", "parallel.tensor.size: got 0, expected an integer of 1 or more"),
        ("a:b --precision 15", "precision: got '15', expected one of"),
        ("a:b --steps 0", "steps: got 0, expected an integer of 1 or more"),
        ("a:b --lr inf", "lr: got inf, expected a finite number above 0"),
        ("a:b --tolerance nan", "tolerance: got nan, expected a finite number of 0 or more"),
        ("a:b --exact --tolerance 1", "tolerance: got 1.0, expected none with exact, which compares bits"),
        ("a:b --json none/report.json", "--json: no folder 'none' to write 'none/report.json' into"),
        ("a:b --tp x", "argument --tp: invalid int value: 'x'"),
    ],
)
def test_bad_input_exits_with_2(arguments, message, capsys):
    assert main(["verify", *arguments.split()]) == 2
    assert message in capsys.readouterr().err


OWN = ["--batches", "verified:batches", "--criterion", MSE, "--tp", "2"]


def verify(*arguments):
    path = f"{ROOT}:{ROOT / 'tests' / 'support'}"
    return python("-m", "paramp", "verify", *arguments, *OWN, PYTHONPATH=path)


def test_the_command_names_the_layer_and_exits_with_1(tmp_path):
    file = tmp_path / "report.json"
    arguments = ["--plan", "verified:NO_ALL_REDUCE", "--precision", "16-mixed", "--json", str(file)]
    result = verify("verified:blocks", *arguments)
    assert result.returncode == 1, result.stdout + result.stderr
    where = r"block2\.down \(forward, microbatch 0 of step 1: \d+\.\d times rounding, allowed 4\)"
    assert re.fullmatch(f"the first layer that diverges: {where}", result.stdout.splitlines()[-1])
    found = json.loads(file.read_text())
    assert (found["ok"], found["first"]) == (False, {"layer": "block2.down", "what": "forward"})
    assert [layer["name"] for layer in found["layers"]][:3] == ["block0.up", "block0.activation", "block0.down"]
    assert found["layers"][0]["forward"] <= 4


@pytest.mark.parametrize(
    ("model", "code", "message", "run"),
    [
        ("fails_when_sharded", 1, "RuntimeError: no shards, please", "sharded run failed (2 processes)"),
        ("RIGHT", 2, "error: model: 'verified:RIGHT' is dict", "sharded run failed (2 processes)"),
    ],
)
def test_a_run_that_fails_is_named_and_its_error_is_printed_once(model, code, message, run):
    result = verify(f"verified:{model}", "--plan", "verified:RIGHT")
    assert result.returncode == code, result.stderr
    assert result.stderr.count(message) == 1
    assert f"error: the {run}" in result.stderr
    assert "layer" not in result.stdout


def hangs():
    time.sleep(600)


def test_a_run_that_takes_too_long_shows_where_it_is_and_ends():
    seconds = 20 if "PARAMP_TEST_COLD" in os.environ else 2  # ranks that start from cold import torch first
    result = verify(f"{__file__}:hangs", "--timeout", str(seconds))
    assert result.returncode == 1
    assert "error: the sharded run failed (2 processes)" in result.stderr
    assert result.stderr.count(f"Timeout (0:00:{seconds:02})!") == 2  # both ranks, each with the line that it waits in
    assert result.stderr.count("most recent call first") >= 2
    assert len(re.findall(r'test_verify\.py", line \d+ in hangs', result.stderr)) == 2


def test_the_model_may_be_a_module():
    assert build_model(Options(model="verified:MODEL"), 1) is verified.MODEL


def test_the_commands_flags_are_its_options(monkeypatch):
    seen = []
    monkeypatch.setattr(two_runs, "verify", lambda *given: seen.append(given) or 1)
    flags = "--norms fused --lr 0.5 --seq-len 8 --batch-size 4 --steps 2 --timeout 9 --tolerance 6 --seed 3"
    assert main(["verify", "verified:gpt", *flags.split()]) == 1
    ((given, tolerance),) = seen
    found = given.norms, given.lr, given.seq_len, given.batch_size, given.steps, given.timeout, tolerance
    assert found == ("fused", 0.5, 8, 4, 2, 9.0, 6.0)
    layout = "--tp 2 --cp 2 --replicate 2 --fsdp 2 --sequence-parallel --pp 2 --schedule looped-bfs --stages-per-rank 3"
    assert main(["verify", "verified:gpt", *layout.split(), "--microbatches", "4"]) == 1
    parallel = {"tensor": 2, "context": 2, "data": {"replicate": 2, "shard": 2}, "sequence_parallel": True}
    parallel |= {"pipeline": {"size": 2, "schedule": "looped-bfs", "stages_per_rank": 3, "microbatches": 4}}
    assert configure(seen[1][0], "sharded").parallel == paramp.Config(parallel=parallel).parallel
    assert main(["verify", "verified:gpt", "--dp", "2", "--zero", "1"]) == 1
    assert configure(seen[2][0], "sharded").parallel == paramp.Config(parallel={"data": 2, "zero": 1}).parallel
    with paramp.launch_from_torch(configure(given, "single"), device="cpu") as context:
        assert context.config.seed == 3
        engine, batches, _ = two_runs.prepared(given, context, 4, 1, partial(torch.optim.SGD, lr=0.1))
        norms = {type(one) for one in engine.module.modules() if isinstance(one, nn.LayerNorm)}
        assert norms == {paramp.nn.FusedLayerNorm}
        assert {batch.args[0].shape for batch in batches} == {(4, 8)}


# --------------------------------------------------------------------------------------------- distances, by hand


def test_distances_equal_hand_arithmetic():
    expected = torch.tensor([3.0, 4.0])
    assert distance(torch.tensor([3.0, 4.5]), expected) == (0.5, 5.0)
    assert distance(torch.tensor([0.0]), torch.tensor([0.0])) == (0.0, 0.0)
    nan = torch.tensor([math.nan, 4.0])
    assert distance(nan, expected) == (math.inf, 5.0)
    assert distance(expected, nan)[0] == math.inf
    assert distance(nan, nan)[0] is None
    lowest = torch.finfo(torch.float16).min
    masked = torch.tensor([3.0, 4.0, lowest, -math.inf], dtype=torch.float16)
    other = torch.tensor([3.0, 4.5, lowest, -math.inf], dtype=torch.float16)
    assert distance(other, masked) == (0.5, 5.0)
    numbers = torch.tensor([3.0 + 4.0j, complex(-math.inf, 0.0)])
    assert distance(numbers + torch.tensor([0.5j, 0.0]), numbers) == (0.5, 5.0)
    assert distance(torch.tensor([3.0 + 4.0j]), torch.tensor([3.0 + 4.0j]).conj()) == (8.0, 5.0)
    units = {"16-naive": -11, "bf16-mixed": -8, "32-true": -24, "64-true": -53, "fp8-mixed": -4}
    assert {mode: rounding(Precision.parse(mode)) for mode in units} == {mode: 2.0**x for mode, x in units.items()}


def record_of(losses=(1.0,), norm=1.0, **values):
    """That of a rank, by hand: equal in all steps; tensors by name for ``gradients`` and ``steps``, and ``output``."""
    ones = {"layer.weight": torch.ones(2, 2, dtype=torch.float64)}
    gradients = values.get("gradients", ones)
    each = {"gradients": [gradients] * len(losses), "steps": [values.get("steps", gradients)] * len(losses)}
    each |= {"losses": [*losses], "grad_norms": [norm] * len(losses), "skipped": [False] * len(losses)}
    output = values.get("output", ones["layer.weight"])
    calls = [{"step": 1, "module": "layer", "microbatch": 0, "call": 0, "tensors": [output]}]
    names = {"trained": [*each["gradients"][0]], "modules": ["layer"], "start": ones}
    return RankRecord(batch_rank=0, tensor_rank=0, activations=calls, **names, **each)


def in_fp16(mode="16-mixed"):
    return configure(Options(model="a:b", settings={"parallel": TP2, "precision": mode}), "sharded")


def with_one_value(what, value):
    tensor = torch.full((2, 2), value, dtype=torch.float64)
    named = {"layer.weight": tensor}
    given = {"forward": {"output": tensor}, "gradient": {"gradients": named}, "step": {"steps": named}}
    given["gradient"]["steps"] = {"layer.weight": torch.ones(2, 2, dtype=torch.float64)}
    return record_of(**({"loss": {"losses": (value,)}, "gradient norm": {"norm": value}} | given)[what])


@pytest.mark.parametrize("mode", ["16-mixed", "bf16-mixed", "32-true", "64-true", "fp8-mixed"])
def test_what_is_allowed(mode):
    """Four times what rounding makes of it, which is what perturbed runs do, and at least one rounding error."""
    unit = rounding(in_fp16(mode).precision)
    for what in ("forward", "gradient", "step", "loss", "gradient norm"):
        least = 2.0**-24 if what in ("loss", "gradient norm") else unit
        for perturbed, noise in (([1.0, 1.0], least), ([1.0 - 2 * least, 1.0 + 6 * least], 6 * least)):
            runs = [with_one_value(what, value) for value in perturbed]
            for part in (0.5, 1.5):
                other = with_one_value(what, 1.0 + part * 4 * noise)
                ranks = [other] if what in ("loss", "gradient norm") else [record_of(), other]
                found = compare(record_of(), runs, ranks, in_fp16(mode))
                assert found.ok == (part < 1), (what, part)
                if part < 1:
                    continue
                assert compare(record_of(), runs, ranks, in_fp16(mode), tolerance=1e20).ok
                last = [*found.lines()][-1]
                if what in ("loss", "gradient norm"):
                    assert last == f"tp2 does not follow the single process: the {what} diverges"
                else:
                    assert (found.first[0].name, found.first[1]) == ("layer", what)


def test_the_unit_is_that_of_the_farthest_of_all_steps():
    """The change of the first step is 0 but for the perturbed run, that of the second but for the layout."""

    def with_changes(*sizes):
        steps = [{"layer.weight": torch.full((2, 2), size, dtype=torch.float64)} for size in sizes]
        return replace(record_of(losses=(1.0, 1.0)), steps=steps)

    single, perturbed = with_changes(0.0, 0.0), [with_changes(1.0, 0.0), with_changes(0.5, 0.0)]
    for size in (3.9, 4.1):
        report = compare(single, perturbed, [with_changes(0.0, size)], in_fp16())
        assert report.layers[0].step == pytest.approx(size)
        assert report.ok == (size < 4)


def test_the_zero_gradient_of_a_key_bias_is_rounding():
    """It is zero but for what cancelled out badly, differently in each run."""

    def record(*noise):
        return record_of(gradients={"key.weight": torch.ones(2, 2), "key.bias": 1e-9 * torch.tensor(noise)})

    report = compare(record(1.0, -2.0), [record(2.0, 1.0)], [record(-1.0, 2.0)], in_fp16())
    assert report.ok
    assert [0 < layer.gradient < 2 for layer in report.layers if layer.name == "key"] == [True]


def test_a_module_that_several_stages_call_is_not_compared():
    """One without weights may get other values where they are not used."""
    stages = [record_of(), record_of(output=torch.zeros(2, 2).double())]
    stages[1].stage_rank, stages[1].start = 1, {}
    report = compare(record_of(), [], stages, in_fp16())
    assert report.ok
    assert report.layers[0].problem == "several stages call it"


def test_an_output_of_context_ranks_is_whole_or_of_their_own_tokens():
    """Of eight tokens one rank has the first and the last two, and another the others, before channels or behind."""
    whole = torch.arange(48.0).double().view(2, 8, 3)
    ends, middle = whole[:, [0, 1, 6, 7]], whole[:, 2:6]
    every = (whole, whole, whole), (whole, ends, middle), (whole.mT, ends.mT, middle.mT)
    for (expected, *parts), error in itertools.product(every, (0, 1)):
        size = torch.nn.utils.get_total_norm(parts).item()
        parts[1] = parts[1].clone()
        parts[1][1, 2, 0] += error
        ranks = [record_of(output=part) for part in parts]
        ranks[1].context_rank = 1
        report = compare(record_of(output=expected), [], ranks, in_fp16())
        assert report.layers[0].forward == pytest.approx(error / (size * 2.0**-11))
        assert report.ok == (not error)


def test_every_microbatch_of_every_data_rank_is_compared(tmp_path):
    """Three steps of two samples a microbatch, of 16 tokens, by default. The records of two data ranks are by hand."""
    settings = {"parallel": {"data": 2, "pipeline": {"microbatches": 2}}, "precision": "16-mixed"}
    options = Options(model="verified:gpt", settings=settings)
    single = alone(options, tmp_path)
    assert (len(single.losses), single.microbatch_size, options.timeout) == (3, 2, 600.0)
    assert {one["microbatch"] for one in single.activations} == {0, 1, 2, 3}
    assert {one["tensors"][0].shape for one in single.activations if one["module"] == "norm"} == {(2, 16, 32)}

    lengths = [sum(float(step[name].norm()) ** 2 for name in single.trained) ** 0.5 for step in single.steps]
    assert min(single.grad_norms) > 1
    assert lengths == pytest.approx([0.1] * 3, rel=1e-3)

    def of_data_rank(rank, wrong):
        found = []
        for one in single.activations:
            if one["microbatch"] // 2 == rank:
                is_wrong = (one["module"], one["microbatch"]) == ("blocks.1.mlp.down", wrong)
                values = [tensor * (1.1 if is_wrong else 1.0) for tensor in one["tensors"]]
                found.append({**one, "microbatch": one["microbatch"] - 2 * rank, "tensors": values})
        return replace(single, batch_rank=rank, activations=found)

    for wrong in (None, 0, 1, 2, 3):
        report = compare(single, [], [of_data_rank(rank, wrong) for rank in range(2)], configure(options, "sharded"))
        assert report.ok == (wrong is None)
        if wrong is not None:
            layer, where = report.first
            assert (layer.name, where, layer.where[where]) == ("blocks.1.mlp.down", "forward", (1, wrong))


def test_each_step_starts_from_equal_states(tmp_path, monkeypatch):
    """With half the change in each step, only that differs; and twice more from weights changed at random."""
    given = Options(model="verified:gpt", settings={"precision": "16-mixed"})
    record = alone(given, tmp_path)
    monkeypatch.setattr(options, "CLIP", 0.5)
    with paramp.launch_from_torch(configure(given, "single"), device="cpu") as context:
        again, *perturbed = replay(given, context, 1, tmp_path)
    every = (record, again, *perturbed)
    outputs, same, *others = [[tensor for call in each.activations for tensor in call["tensors"]] for each in every]
    assert len(outputs) == len(same) > 0
    assert all(map(torch.equal, outputs, same))
    assert len(others) == 2
    assert not any(torch.equal(one[0], other[0]) for one, other in itertools.combinations((outputs, *others), 2))
    for one, other in zip(record.steps, again.steps, strict=True):
        assert all(0.49 < other[name].norm() / one[name].norm() < 0.51 for name in record.trained)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, 2.0**10),
        ({"init_scale": 64.0}, 64.0),
        ({"init_scale": 2.0**12, "min_scale": 2.0**11}, 2.0**11),
        ({"init_scale": 2.0**12, "enabled": False}, 2.0**12),
    ],
)
def test_both_runs_start_from_a_low_loss_scale_and_full_masters(given, expected):
    settings = {"precision": {"mode": "16-naive", **given}, "masters": "remainder"}
    for run in ("single", "sharded"):
        precision = configure(Options(model="a:b", settings=settings), run).precision
        assert (precision.name, precision.scaling.init_scale, precision.masters) == ("16-naive", expected, True)


def test_shards_are_joined():
    whole = torch.arange(2 * 12.0).view(2, 12)
    plain = whole.chunk(2, dim=1)
    assert torch.equal(next(joined(plain, whole, [])), whole)
    packed = [torch.cat([part.chunk(2, dim=1)[rank] for part in whole.chunk(3, dim=1)], dim=1) for rank in range(2)]
    heads = torch.arange(24.0).view(2, 4, 3)  # samples, heads, features
    merged = [part.flatten(0, 1) for part in heads.chunk(2, dim=1)]
    for parts, expected, factor in ((packed, whole, 3), (merged, heads.flatten(0, 1), 2)):
        assert [torch.equal(found, expected) for found in joined(parts, expected, [factor])] == [False, True]
        ranks = [replace(record_of(output=part), tensor_rank=rank, packed=[factor]) for rank, part in enumerate(parts)]
        assert compare(record_of(output=expected), [], ranks, in_fp16()).ok
    assert not [*joined([whole[:, :5], whole[:, 5:11]], whole, [])]
    assert not [*joined([whole[:1, :6], whole[:1, 6:]], whole, [])]
