"""Linear layers in float8: which, what they compute, in every layout, and that no overflow hides in a cast."""

import contextlib
import copy
import io
import sys
import types
from dataclasses import dataclass, replace
from enum import Enum
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from commands import ROOT, run
from families import rarely
from pool import on_ranks
from reference import whole
from small_engines import engine_of, gpt_engine, train_step
from torch import nn
from trainer_runs import hide

import paramp
from paramp.base.errors import ConfigError
from paramp.base.installed_packages import PackageStatus, find_transformer_engine
from paramp.parallel.tensor.colwise_and_rowwise import PackedColwise, PackedRowwise
from paramp.parallel.tensor.sharding_plan import apply_plan, resolve_plan, sharded_dims
from paramp.parallel.tensor.styles import STYLES
from paramp.precision.capabilities import find_library
from paramp.precision.choose_float8_layers import choose_layers
from paramp.precision.compute_context import computing
from paramp.precision.float8_conversion import convert
from paramp.precision.fp16_emulation_cpu import emulate_fp16
from paramp.precision.modes import PRESETS, Float8, Precision
from paramp.precision.transformer_engine import transformer_engine_recipe

CPU = torch.device("cpu")
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
EACH_RECIPE = pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])


def mode(name="fp8-mixed", **options):
    return Precision.parse({"mode": name, **options})


# -------------------------------------------------------------------------------------------------- which layers


class Scaled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Zoo(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(64, 32)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(32, 48), "odd": nn.Linear(32, 40)}) for _ in range(2)
        )
        self.attention = nn.MultiheadAttention(32, 4)
        self.scaled = Scaled(32, 32)
        self.tied = nn.Linear(32, 64, bias=False)
        self.tied.weight = self.table.weight
        self.lm_head = nn.Linear(32, 64)


def test_linear_layers_of_sizes_that_the_hardware_takes_are_chosen():
    choice = choose_layers(Zoo(), Float8())
    assert choice.linear == ("blocks.0.up", "blocks.1.up")
    assert choice.kept == {
        "a size is not a multiple of 16": ("blocks.0.odd", "blocks.1.odd"),
        "they have their own forward": ("attention.out_proj", "scaled"),
        "an embedding shares their weight": ("tied",),
        "matched by skip": ("lm_head",),
    }


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"modules": ("blocks.1.*", "lm_head")}, ("blocks.1.up",)),
        ({"skip": ("blocks.0.**",)}, ("blocks.1.up", "lm_head")),
        ({"skip": ("**.up",)}, ("lm_head",)),
        ({"modules": ("*",), "skip": ()}, ("lm_head",)),
        ({"modules": ("blocks.*.u?",), "skip": ()}, ("blocks.0.up", "blocks.1.up")),
    ],
)
def test_globs_say_which(options, expected):
    assert choose_layers(Zoo(), Float8(**options)).linear == expected


def test_by_default_layers_with_the_usual_names_of_outputs_are_left_out_at_any_depth():
    def layers():
        names = ("head", "lm_head", "output", "fc", "classifier", "fc1", "heads")
        return nn.ModuleDict({name: nn.Linear(32, 32) for name in names})

    choice = choose_layers(nn.ModuleDict({**layers(), "block": layers()}), Float8())
    assert choice.linear == ("fc1", "heads", "block.fc1", "block.heads")


def test_a_shard_has_to_have_a_size_that_the_hardware_takes():
    model = nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 32))
    for style, expected in (("colwise", ("1",)), ("rowwise", ("0", "1"))):
        dims = sharded_dims(resolve_plan({"0": style}, ["0", "1"]))
        assert choose_layers(model, Float8(), dims, 2).linear == expected
    dims = sharded_dims(resolve_plan({"1": PackedRowwise(3)}, ["0", "1"]))
    assert choose_layers(model, Float8(), dims, 2).linear == ("0",)
    model = nn.Sequential(nn.Linear(96, 192), nn.Linear(192, 96))  # multiples of 16 x 2
    for style in (name for name in STYLES if "wise" in name):
        dims = sharded_dims(resolve_plan(dict.fromkeys("01", style), ["0", "1"]))
        assert dims.keys() == {"0", "1"}
        assert choose_layers(model, Float8(), dims, 2).linear == ("0", "1"), style


@pytest.mark.parametrize("option", ["modules", "skip"])
def test_a_glob_that_matches_nothing_is_refused(option):
    with pytest.raises(ConfigError, match=r"blocks.\*.upp.*did you mean 'blocks.[01].up'"):
        choose_layers(Zoo(), Float8(**{option: ("blocks.*.upp",)}))


def test_layers_keep_what_they_have_and_copies_compute_with_their_own_weights(capsys):
    model = Zoo().eval()
    model.again = layer = model.blocks[0]["up"]
    layer.label = "kept"
    layer.weight.requires_grad_(False)
    seen = []
    layer.register_forward_hook(lambda *_: seen.append(True))
    names = [(name, id(value)) for name, value in model.named_parameters(remove_duplicate=False)]
    model = convert(model, mode(), CPU)
    assert "3 linear layers" in capsys.readouterr().out
    assert [(name, id(value)) for name, value in model.named_parameters(remove_duplicate=False)] == names
    new = model.blocks[0]["up"]
    assert new is model.again
    assert type(new).__name__ == type(convert(nn.Linear(32, 32), mode(), CPU)).__name__ == "Float8Linear"
    assert type(model.blocks[0]["odd"]) is nn.Linear
    assert (new.label, new.training, new.weight.requires_grad) == ("kept", False, False)
    x, other = torch.randn(16, 32), copy.deepcopy(model)
    with torch.no_grad():
        other.again.weight.zero_()
        other.again.bias.zero_()
    assert not other.again(x).any()
    assert new(x).any()
    assert seen == [True, True]


def test_a_model_without_such_layers_is_warned_of():
    with pytest.warns(UserWarning, match=r"converts no linear layer.*not a multiple of 16: 0\)"):
        convert(nn.Sequential(nn.Linear(30, 30)), mode(), CPU)


# ------------------------------------------------------------------------------------------- what they compute


def quantized(x, dtype, dim=None):
    """``x`` rounded to float8 and back, in float64: one scale, or one for what a product sums over along ``dim``."""
    x = x.double()
    largest = x.abs().amax() if dim is None else x.abs().amax(dim, keepdim=True)
    scale = (torch.finfo(dtype).max / largest).float()
    if dim is not None:
        scale = torch.exp2(torch.floor(torch.log2(scale)))
    return (x.float() * scale).to(dtype).double() / scale.double()


def by_hand(x, weight, gradient, recipe):
    """The output and the gradients of input and weight, in float64, of matrices."""
    if recipe == "tensorwise":
        x8, w8, g8 = quantized(x, E4M3), quantized(weight, E4M3), quantized(gradient, E5M2)
        return x8 @ w8.T, g8 @ w8, g8.T @ x8
    return (
        quantized(x, E4M3, 1) @ quantized(weight, E4M3, 1).T,
        quantized(gradient, E4M3, 1) @ quantized(weight, E4M3, 0),
        quantized(gradient, E4M3, 0).T @ quantized(x, E4M3, 0),
    )


@EACH_RECIPE
@pytest.mark.parametrize(
    ("name", "weights", "compute"),
    [
        ("fp8-mixed", torch.float32, torch.bfloat16),
        ("transformer-engine", torch.bfloat16, torch.bfloat16),
        ("transformer-engine-float16", torch.float16, torch.float16),
    ],
)
def test_products_are_those_of_rounded_operands(name, weights, compute, recipe):
    """Against float64: only the operands are rounded, to float8, and each result once, to the compute dtype."""
    torch.manual_seed(0)
    precision = mode(name, recipe=recipe)
    layer = nn.Linear(32, 48).to(weights)
    x = torch.randn(2, 8, 32).to(compute).requires_grad_()
    gradient = torch.randn(2, 8, 48).to(compute)
    layer = convert(layer, precision, CPU)
    with emulate_fp16() if compute is torch.float16 else contextlib.nullcontext():
        with computing(precision, "cpu"):
            y = layer(x)
        y.backward(gradient)
    assert (y.dtype, layer.weight.grad.dtype, x.grad.dtype) == (compute, weights, compute)
    flat = x.detach().flatten(0, 1), layer.weight.detach(), gradient.flatten(0, 1)
    output, input_gradient, weight_gradient = by_hand(*flat, recipe)
    # The product is rounded, and the sum with the bias once more.
    bias = layer.bias.detach().double()
    near = {"rtol": 1.01 * torch.finfo(compute).eps, "atol": 1e-5}
    torch.testing.assert_close(y.detach().flatten(0, 1).double(), output + bias, **near | {"atol": 2e-2})
    torch.testing.assert_close((y - layer.bias.to(compute)).detach().flatten(0, 1).double(), output, atol=3e-2, rtol=0)
    torch.testing.assert_close(x.grad.flatten(0, 1).double(), input_gradient, **near)
    torch.testing.assert_close(layer.weight.grad.double(), weight_gradient, **near)
    plain = flat[0].double() @ flat[1].double().T
    assert (output - plain).abs().max() > 0.03, "float8 is coarser than that"


def test_the_mode_is_bf16_mixed_but_for_its_linear_layers():
    assert replace(PRESETS["fp8-mixed"], name="bf16-mixed", float8=None) == PRESETS["bf16-mixed"]


def test_rowwise_scales_are_more_exact_where_rows_differ_in_size():
    torch.manual_seed(0)
    layer, x = nn.Linear(32, 48, bias=False), torch.randn(16, 32) * torch.logspace(-6, 0, 16)[:, None]
    exact = F.linear(x.double(), layer.weight.double())
    errors = []
    for recipe in ("tensorwise", "rowwise"):
        output = convert(copy.deepcopy(layer), mode(recipe=recipe), CPU)(x)
        errors.append(((output - exact).norm(dim=1) / exact.norm(dim=1)).max())
    assert errors[1] < 0.1 < errors[0]


def test_autocast_takes_an_fp32_input_as_it_does_for_a_linear():
    layer = convert(nn.Linear(32, 32), mode(), CPU)
    x = torch.randn(16, 32)
    with computing(mode(), "cpu"):
        assert torch.equal(layer(input=x), layer(x.bfloat16()))
    assert layer(x).dtype is torch.float32


def test_torchs_encoder_evaluates_with_its_float8_layers():
    """In evaluation torch has a kernel for a whole layer, which calls no module."""
    layer = convert(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), mode(), CPU).eval()
    with mock.patch.object(layer.linear1, "forward", wraps=layer.linear1.forward) as forward, torch.no_grad():
        layer(torch.randn(2, 8, 32))
    assert forward.call_count == 1


# --------------------------------------------------------------------------------------------------- overflow


@EACH_RECIPE
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_raises_the_flag_in_a_gradient_and_is_seen_in_the_output_of_an_input(value, recipe):
    """So that torchao's layers need not look at their inputs."""
    flag = torch.zeros(())
    layer = convert(nn.Linear(32, 32), mode(recipe=recipe), CPU, overflow=flag)
    x = torch.randn(16, 32)
    y = layer(x)
    gradient = torch.ones_like(y)
    y.backward(gradient, retain_graph=True)
    assert flag == 0
    gradient[3, 5] = value
    y.backward(gradient)
    assert flag == 1
    x[3, 5] = value
    assert not layer(x)[3].isfinite().any()


def test_a_cast_of_torchaos_makes_an_infinity_the_largest_number():
    convert(nn.Linear(32, 32), mode(), CPU)  # which imports torchao without its messages
    from torchao.float8.float8_utils import to_fp8_saturated

    for dtype, largest in ((E4M3, 448.0), (E5M2, 57344.0)):
        values = to_fp8_saturated(torch.tensor([torch.inf, -torch.inf]), dtype)
        assert values.float().tolist() == [largest, -largest]


class Spoilt(torch.autograd.Function):
    """The identity, whose gradient goes through a function."""

    @staticmethod
    def forward(ctx, x, spoil):
        ctx.spoil = spoil
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.spoil(gradient), None


class Saturating(nn.Sequential):
    """A float8 layer that is given an infinite gradient, of which nothing is left in what comes out of it."""

    def __init__(self):
        super().__init__(nn.Linear(32, 32), nn.Linear(32, 32).requires_grad_(False))
        self.overflows = False

    def forward(self, x):
        hidden = Spoilt.apply(self[0](x), lambda gradient: gradient.nan_to_num(1.0, 1.0, -1.0))  # a saturating cast
        return Spoilt.apply(self[1](hidden), self.spoil)

    def spoil(self, gradient):
        gradient = gradient.clone()
        if self.overflows:
            gradient[(0,) * gradient.ndim] = torch.inf
        return gradient


def mean_square(output, target):
    return (output - target).square().mean()


@pytest.mark.parametrize("name", ["fp8-mixed", "transformer-engine", "transformer-engine-float16"])
@pytest.mark.parametrize("layout", rarely([{}, {"tensor": 2}, {"data": {"shard": 2}}], {"tensor": 2}))
@on_ranks(2)
def test_an_overflow_that_saturation_hides_skips_the_step_on_all_ranks(world, name, layout):
    with paramp.launch_from_torch({"parallel": layout, "precision": name}):
        torch.manual_seed(0)
        model = Saturating()
        optimizer = torch.optim.SGD([model[0].weight, model[0].bias], lr=0.01)
        engine = engine_of(model, mean_square, optimizer, plan={"0": "colwise", "1": "rowwise"})
        x = torch.randn(16, 32)
        for overflows in (False, True, False):
            engine.module.overflows = overflows and world.rank == 1
            engine.forward_backward(x, x)
            gradients = [parameter.grad for _, parameter in engine.named_parameters() if parameter.grad is not None]
            assert len(gradients) == 2
            assert all(gradient.isfinite().all() for gradient in gradients), "the gradients show it: nothing is tested"
            result = engine.step()
            assert (result.stepped, result.overflow) == (not overflows, overflows)
            if overflows:
                engine.diagnose_overflow()  # runs the batch again, whose overflow is none of the next step's
            engine.zero_grad()
        engine.module.overflows = True
        engine.forward_backward(x, x)
        engine.zero_grad()  # a window that is dropped takes its overflow along
        engine.module.overflows = False
        engine.forward_backward(x, x)
        assert engine.step().stepped
        engine.zero_grad()
        engine.module.overflows = True
        engine.forward_backward(x, x)
        engine.before_step.append(lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.step()
        engine.zero_grad()  # so does one whose step was begun
        engine.before_step.clear()
        engine.module.overflows = False
        engine.forward_backward(x, x)
        assert engine.step().stepped


# ------------------------------------------------------------------------------------------------- every layout


STYLES_OF_TWO = {
    "plain": ("colwise", "rowwise"),
    "sequence": ("sequence_colwise", "sequence_rowwise"),
    "packed": (PackedColwise(3), PackedRowwise(3)),  # what is between has the order of a packed layer's rank
}


@EACH_RECIPE
@pytest.mark.parametrize("styles", STYLES_OF_TWO)
@on_ranks(2)
def test_shards_have_the_scales_of_the_whole(world, styles, recipe):
    """In fp32, where the order of sums hardly matters: a scale of one rank's own would be off by a float8 rounding."""

    def part(tensor):
        return tensor.chunk(2, 1)[world.rank] if styles == "sequence" else tensor

    def run(x, gradient, plan=None):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(32, 96), nn.ReLU(), nn.Linear(96, 32))
        model = convert(model, mode(recipe=recipe), CPU, tensor_size=2 if plan else 1, verbose=False)
        if plan:
            apply_plan(model, resolve_plan(plan, ["0", "1", "2"]), context.mesh["tp"])
        x = x.clone().requires_grad_()
        y = model(x)
        y.backward(gradient)
        return y.detach(), x.grad, {name: whole(one.grad).reshape(-1) for name, one in model.named_parameters()}

    torch.manual_seed(2)
    x, gradient = torch.randn(2, 16, 32), torch.randn(2, 16, 32)
    with paramp.launch_from_torch({"parallel": {"tensor": 2}}) as context:
        y, x_gradient, gradients = run(x, gradient)
        *own, own_gradients = run(part(x), part(gradient), dict(zip("02", STYLES_OF_TWO[styles], strict=True)))
    torch.testing.assert_close(own, [part(y), part(x_gradient)], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(own_gradients, gradients, rtol=1e-5, atol=1e-4)


# --------------------------------------------------------------------------------------------- what is installed


def test_without_transformer_engine_and_torchao_the_error_names_both(monkeypatch):
    hide(monkeypatch, "torchao", "transformer_engine")
    with pytest.raises(ConfigError, match=r"need Transformer Engine or torchao in place of .*but no package torchao"):
        find_library(Float8(transformer_engine=True), CPU)


@on_ranks(2)
def test_without_torchao_each_rank_names_the_extra_before_anything(world):
    with pytest.MonkeyPatch.context() as patch, paramp.launch_from_torch({"precision": "fp8-mixed"}):
        hide(patch, "torchao")
        # Each rank has its own model, which the first collective would find.
        model = nn.Linear(16 if world.rank else 32, 16)
        with pytest.raises(ConfigError, match=r'float8 layers need torchao, but .*pip install "paramp\[fp8\]"'):
            engine_of(model)


def test_emulation_is_said_once_and_importing_torchao_says_nothing():
    source = """
import torch, paramp
with paramp.launch_from_torch({"precision": "fp8-mixed"}) as context:
    model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 30))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = paramp.initialize(model, optimizer, torch.nn.functional.mse_loss)
    engine.forward_backward(torch.randn(16, 32), torch.randn(16, 30))
    engine.step()
"""
    result = run([sys.executable, "-W", "error", "-c", source], cwd=ROOT, PYTHONPATH=str(ROOT), CUDA_VISIBLE_DEVICES="")
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    (line,) = result.stdout.splitlines()
    assert line.startswith(
        "paramp: 1 linear layers compute in float8 with tensorwise scales; not 1 (a size is not a mu"
    )
    assert "emulated: a CPU has no float8 products" in line


@on_ranks(2)
def test_only_the_main_rank_says_which_layers_are_converted(world):
    with contextlib.redirect_stdout(io.StringIO()) as printed, paramp.launch_from_torch({"precision": "fp8-mixed"}):
        engine_of(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 30)))
    lines = [line for line in printed.getvalue().splitlines() if "compute in float8" in line]
    assert len(lines) == (1 if world.rank == 0 else 0)
    assert all("emulated: a CPU has no float8" in line and "not 1 (a size is not a mu" in line for line in lines)


@pytest.mark.parametrize(("capability", "emulated"), [((8, 0), True), ((8, 9), False), ((9, 0), False)])
def test_gpus_with_float8_products_are_used(monkeypatch, capability, emulated):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    library = find_library(Float8(), "cuda")
    assert (library.name, library.emulated) == ("torchao", emulated)
    assert ("compute capability 8.0" in library.reason) == emulated


def scaled_mm(calls):
    """In place of ``torch._scaled_mm``: in float64, of what a GPU's takes."""

    def product(a, b, scale_a, scale_b, bias, scale_result, out_dtype, use_fast_accum):
        assert a.shape[1] % 16 == b.shape[0] % 16 == b.shape[1] % 16 == 0, (a.shape, b.shape)
        assert a.stride(1) == b.stride(0) == 1, "row-major, and column-major"
        calls.append(use_fast_accum)
        result = (a.double() * scale_a) @ (b.double() * scale_b)
        return result.to(out_dtype) if bias is None else (result + bias).to(out_dtype)

    return product


@EACH_RECIPE
@pytest.mark.parametrize("tokens", [32, 10])
def test_the_products_of_a_gpu_are_padded_and_accumulated_in_fp32(monkeypatch, recipe, tokens):
    """They have the numbers of the emulation, which pads nothing; torchao rounds a rowwise product to bf16."""
    torch.manual_seed(0)
    calls = []
    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm(calls))
    layer = nn.Linear(32, 48)
    x, gradient = torch.randn(tokens, 32), torch.randn(tokens, 48)
    results = []
    for without in ("", "emulated"):
        monkeypatch.setattr("paramp.precision.capabilities.why_not_native_float8", lambda device, why=without: why)
        model = convert(copy.deepcopy(layer), mode(recipe=recipe), CPU)
        own = x.clone().requires_grad_()
        output = model(own)
        output.backward(gradient)
        results.append([output.detach(), own.grad, model.weight.grad, model.bias.grad])
    assert calls == [False] * 3
    for value, expected in zip(*results, strict=True):
        torch.testing.assert_close(value, expected, rtol=0, atol=2.0**-8 * float(expected.abs().max()))


# ------------------------------------------------------------------------------------------ Transformer Engine


class Format(Enum):
    E4M3 = 1
    E5M2 = 2
    HYBRID = 3


@dataclass
class DelayedScaling:
    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str = "max"

    def __post_init__(self):
        assert self.fp8_format is not Format.E5M2, "Pure E5M2 training is not supported."


@pytest.fixture
def stand_in(monkeypatch):
    """Modules of the names of Transformer Engine's, which compute in the input's dtype and record their arguments."""
    entered = []

    class Linear(nn.Module):
        def __init__(self, in_features, out_features, bias, params_dtype, device):
            super().__init__()
            self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=params_dtype, device=device))
            self.bias = nn.Parameter(torch.empty(out_features, dtype=params_dtype, device=device)) if bias else None

        def forward(self, x):
            assert entered[-1]["inside"]
            assert x.numel() // x.shape[-1] % 16 == 0, "FP8 execution requires a multiple of 16 tokens"
            return F.linear(x.nan_to_num(1, 448, -448), self.weight, self.bias)

        def get_extra_state(self):
            return torch.zeros(3, dtype=torch.uint8)

        def set_extra_state(self, state):
            pass

    class LayerNorm(nn.Module):
        def __init__(self, size, eps):
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.empty(size)), nn.Parameter(torch.empty(size))
            self.eps = eps

        def forward(self, x):
            return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)

    class Autocast:
        def __init__(self, **arguments):
            self.arguments = arguments

        def __enter__(self):
            entered.append({**self.arguments, "inside": True})

        def __exit__(self, *_):
            entered[-1]["inside"] = False

    for name, contents in {
        "transformer_engine": {},
        "transformer_engine.common": {},
        "transformer_engine.common.recipe": {"DelayedScaling": DelayedScaling, "Format": Format},
        "transformer_engine.pytorch": {"Linear": Linear, "LayerNorm": LayerNorm, "autocast": Autocast},
    }.items():
        module = types.ModuleType(name)
        module.__dict__.update(contents)
        monkeypatch.setitem(sys.modules, name, module)
        owner, _, leaf = name.rpartition(".")
        if owner:
            setattr(sys.modules[owner], leaf, module)
    monkeypatch.setattr(
        "paramp.precision.capabilities.find_transformer_engine", lambda: PackageStatus(found=True, reason="stand-in")
    )
    monkeypatch.setattr("paramp.precision.capabilities.why_not_native_float8", lambda device: "")
    return entered


def test_a_recipe_is_translated_or_refused(stand_in):
    options = {"fp8_format": "E4M3", "amax_history_len": 16, "amax_compute_algo": "max"}
    assert transformer_engine_recipe(options) == DelayedScaling(fp8_format=Format.E4M3, amax_history_len=16)
    assert transformer_engine_recipe({"fp8_format": Format.E4M3}).fp8_format is Format.E4M3
    assert transformer_engine_recipe(None) == DelayedScaling()
    for options, message in (
        ({"amax_history_length": 16}, r"no 'amax_history_length'.*did you mean 'amax_history_len'"),
        ({"fp8_format": "HYBRIDE"}, r"got 'HYBRIDE', expected one of E4M3, E5M2, HYBRID \(did you mean 'HYBRID'\?\)"),
        ({"fp8_format": "E5M2"}, "Pure E5M2 training is not supported"),
    ):
        with pytest.raises(ConfigError, match=message):
            transformer_engine_recipe(options)


def test_transformer_engines_layers_take_over_weights_hooks_and_names(stand_in, capsys):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32, eps=1e-3), nn.Linear(32, 20))
    seen = []
    model[0].register_forward_hook(lambda *_: seen.append(True))
    x = torch.randn(16, 32)
    expected = model(x)
    names = [(name, id(value)) for name, value in model.named_parameters()]
    precision = mode("transformer-engine", te_recipe={"fp8_format": "HYBRID"})
    group, flag = object(), torch.zeros(())
    model = convert(model, precision, CPU, group=group, overflow=flag)
    assert "On stand-in" in capsys.readouterr().out
    assert [type(layer).__module__ for layer in model] == [__name__, __name__, "torch.nn.modules.linear"]
    assert [(name, id(value)) for name, value in model.named_parameters()] == names
    torch.testing.assert_close(model(x), expected)
    assert len(seen) == 2
    assert stand_in == [{"enabled": True, "recipe": DelayedScaling(), "amax_reduction_group": group, "inside": False}]
    assert flag == 0
    x[0, 0] = torch.inf
    with torch.no_grad():
        model(x)
    assert flag == 0, "evaluation does not count"
    assert model(x).isfinite().all()
    assert flag == 1, "a saturated input is an overflow"


def test_an_engine_on_transformer_engine_keeps_its_state_out_of_the_model(stand_in):
    with paramp.launch_from_torch({"precision": "transformer-engine"}):
        model = nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32))
        names = list(model.state_dict())
        engine = engine_of(model)
        x = torch.randn(16, 32)
        assert train_step(engine, x).stepped
        assert list(engine.full_state_dict()) == names
        x[0, 0] = torch.inf
        assert train_step(engine, x, torch.zeros(16, 32)).overflow
        for zeroes in (False, True):  # in a loop of one's own, where the forward comes before gradients are dropped
            loss = engine.criterion(engine(x), torch.zeros(16, 32))
            if zeroes:
                engine.zero_grad()
            engine.backward(loss)
            assert engine.step().overflow


@pytest.mark.parametrize("shape", [(16,), (10,), (2, 5), (3, 1, 7), ()])
def test_transformer_engines_layers_get_a_multiple_of_16_tokens(stand_in, shape):
    """And the numbers are those of the layer without a padding."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 32))
    model = convert(copy.deepcopy(plain), mode("transformer-engine"), CPU)
    x, gradient = torch.randn(*shape, 32), torch.randn(*shape, 32)
    results = []
    for one in (plain, model):
        own = x.clone().requires_grad_()
        output = one(own)
        output.backward(gradient)
        results.append([output.detach(), own.grad, *(parameter.grad for parameter in one.parameters())])
    for value, expected in zip(*results, strict=True):
        torch.testing.assert_close(value, expected)


@pytest.mark.parametrize("how", ["full", "selective", 2])
def test_activation_checkpointing_on_transformer_engine_is_refused(stand_in, how):
    """Its scales are delayed, so that a block that runs again would round its operands otherwise."""
    message = rf"activation_checkpointing: got {how!r}, expected 'none', because .*'fp8-mixed'"
    with (
        paramp.launch_from_torch({"precision": "transformer-engine", "activation_checkpointing": how}),
        pytest.raises(ConfigError, match=message),
    ):
        gpt_engine()


def test_under_tensor_parallelism_torchao_takes_its_place(stand_in):
    library = find_library(Float8(transformer_engine=True), CPU, tensor_size=2)
    assert library.name == "torchao"
    assert "in place of Transformer Engine, whose layers do not support the DTensors" in library.reason


@pytest.mark.skipif(not find_transformer_engine().found, reason=find_transformer_engine().reason)
@pytest.mark.cuda
@pytest.mark.parametrize("name", ["transformer-engine", "transformer-engine-float16"])
def test_transformer_engine_itself(name):
    device = torch.device("cuda")
    precision = mode(name, te_recipe={"fp8_format": "HYBRID", "amax_history_len": 16, "amax_compute_algo": "max"})
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64)).to(device, precision.weights)
    x = torch.randn(32, 64, device=device, dtype=precision.compute)
    expected = model(x)
    flag = torch.zeros((), device=device)
    model = convert(model, precision, device, overflow=flag)
    y = model(x)
    assert (y - expected).norm() < 2.0**-3 * expected.norm()
    y.backward(torch.full_like(y, torch.inf))
    assert flag == 1
