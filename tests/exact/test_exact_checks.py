"""What ``initialize`` refuses under ``reproducible=True``, by name: modules, ties, layers and styles."""

import contextlib

import pytest
import torch
from pool import on_ranks
from reference import small_gpt
from small_engines import engine_of
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel

import paramp
from paramp.exact.exact_model_checks import check_buffers
from paramp.parallel.tensor.colwise_and_rowwise import PackedColwise, PackedRowwise
from paramp.parallel.tensor.styles import ExpertSlices


def behind(module):
    return nn.Sequential(nn.Linear(4, 4), nn.GroupNorm(2, 4), nn.InstanceNorm1d(4), nn.Embedding(4, 2), module)


def tied(count, hooked=False):
    layers = [nn.Linear(2, 2) for _ in range(count)]
    for layer in layers[1:]:
        layer.weight = layers[0].weight
    layers[0].bias.register_hook(lambda gradient: gradient)
    if hooked:
        layers[0].weight.register_hook(lambda gradient: gradient)
    return nn.Sequential(*layers)


def start(model, **config):
    slices = config.pop("slices", 8)
    plan = config.pop("plan", None)
    with paramp.launch_from_torch({"reproducible": {"chunk": 1, "slices": slices}, **config}):
        engine_of(model, optimizer=torch.optim.AdamW, plan=plan)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (nn.BatchNorm1d(4), "'4' is a BatchNorm1d, which averages over the samples"),
        (nn.InstanceNorm1d(4, track_running_stats=True), "'4' is a InstanceNorm1d, which averages"),
        (nn.MultiheadAttention(4, 2), "'4' is a MultiheadAttention, which computes all heads"),
        (nn.Embedding(4, 2, max_norm=1.0), "'4' is a Embedding, which changes its weights"),
        (nn.Embedding(4, 2, sparse=True), "sparse=False"),
        (nn.Embedding(4, 2, scale_grad_by_freq=True), "scale_grad_by_freq=False"),
        (tied(2, hooked=True), r"0.weight and 4.1.weight are one parameter with hooks"),
        (tied(3), r"1.weight and 4.2.weight are one parameter, expected at most two"),
    ],
)
def test_modules_are_refused_by_name(module, message):
    start(behind(nn.Sequential(tied(2), tied(3).requires_grad_(False))))
    with pytest.raises(paramp.ConfigError, match=message):
        start(behind(module))


def test_a_buffer_that_was_made_in_inference_mode_is_not_changed():
    layer = nn.Linear(4, 4)
    with torch.inference_mode():
        layer.register_buffer("fixed", torch.ones(4))
    check_buffers({0: layer})
    assert all(layer(torch.ones(4)).requires_grad for _ in range(2))


@pytest.mark.parametrize(
    ("style", "slices", "message"),
    [
        ("colwise", 4, r"got 4, but '0' has 6 outputs, expected a multiple of 4"),
        ("rowwise", 8, r"got 8, but '0' has 12 inputs, expected a multiple of 8"),
        ("partial_gradient", 2, r"'0', a Linear, the style PartialGradient, which cannot be computed in slices"),
        (ColwiseParallel(), 2, "the style ColwiseParallel, which cannot be computed in"),
        (ExpertSlices(), 2, "the style ExpertSlices, which cannot be computed in"),
    ],
)
def test_what_cannot_be_cut_is_named(style, slices, message):
    with pytest.raises(paramp.ConfigError, match=message):
        start(nn.Sequential(nn.Linear(12, 6)), slices=slices, plan={"0": style})


def test_a_conv1d_has_inputs_and_outputs_the_other_way_round():
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D
    for style, message in (PackedColwise(), r"'0' has 6 outputs"), (PackedRowwise(), r"'0' has 12 inputs"):
        with pytest.raises(paramp.ConfigError, match=message):
            start(nn.Sequential(conv1d(6, 12)), plan={"0": style})


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(32))


class Shared(nn.Module):
    """A layer that is called before and behind another one."""

    def __init__(self):
        super().__init__()
        self.shared, self.mid, self.head = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        return self.head(self.shared(self.mid(self.shared(x))))


@on_ranks(2)
def test_a_module_that_several_stages_call_is_refused_on_every_rank(world):
    for split, trained in ("mid", True), ("mid", False), ("head", True):
        model, refused = Shared(), contextlib.nullcontext()
        model.shared.requires_grad_(trained)
        if split == "mid" and trained:
            refused = pytest.raises(paramp.ConfigError, match=r"2 pipeline stages use 'shared\.weight'.* second module")
        with refused:
            start(model, plan={}, parallel={"pipeline": {"size": 2, "split": [split]}})


@on_ranks(2)
def test_parameters_beside_slices_of_the_sequence_need_a_style(world):
    for where in ("dropout", "extra"):
        model = small_gpt(num_layers=2)
        setattr(model.blocks[1], where, Scale())
        with pytest.raises(paramp.ConfigError, match=rf"'blocks.1.{where}', a Scale with parameters"):
            start(model, slices=4, parallel={"tensor": 2, "sequence_parallel": True})
    gpt = small_gpt(num_layers=2)
    for model, blocks in ((gpt, "blocks."), (nn.Sequential(*gpt.blocks), "")):
        plan = {f"{blocks}*.mlp.up": "sequence_colwise", f"{blocks}*.mlp.down": "sequence_rowwise"}
        with pytest.raises(paramp.ConfigError, match=rf"'{blocks}0.norm1', a LayerNorm with parameters, is beside"):
            start(model, slices=4, plan=plan, parallel={"tensor": 2, "sequence_parallel": True})


@on_ranks(2)
def test_dropout_of_lora_on_sharded_features_is_refused_beside_slices_of_the_sequence(world):
    peft, parallel = pytest.importorskip("peft"), {"tensor": 2, "sequence_parallel": True}
    plan = {"0": "colwise", "1": "rowwise"}

    def adapted(*targets):
        options = peft.LoraConfig(target_modules=list(targets), lora_dropout=0.1)
        return peft.get_peft_model(nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16)), options)

    start(adapted("0"), plan=plan, parallel=parallel)
    with pytest.raises(paramp.ConfigError, match=r"model\.1\.lora_dropout\.default' is dropout of what"):
        start(adapted("0", "1"), plan=plan, parallel=parallel)


class Terms(nn.Module):
    """Called with ``number`` inputs."""

    def __init__(self, number):
        super().__init__()
        self.weight, self.number = nn.Parameter(torch.ones(())), number

    def forward(self, *terms):
        return sum(terms) * self.weight


class CallsTerms(nn.Module):
    def __init__(self, number):
        super().__init__()
        self.terms = Terms(number)

    def forward(self, x):
        return self.terms(*[x] * self.terms.number)


@pytest.mark.parametrize(("number", "got"), [(0, "NoneType"), (2, "several tensors")])
@on_ranks(2)
def test_modules_on_slices_of_the_sequence_take_one_tensor(world, number, got):
    x, reproducible = torch.ones(2, 4, 8), {"chunk": 1, "slices": 2}
    with paramp.launch_from_torch({"reproducible": reproducible, "parallel": {"tensor": 2}}):
        engine = engine_of(CallsTerms(number), plan={"terms": "sequence"})
        with pytest.raises(paramp.ConfigError, match=f"a Terms, which .* got {got}, expected one tensor"):
            engine.forward_backward(x, x)
