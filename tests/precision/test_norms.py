"""Low-precision and fused norms: what they compute, and putting them into models, against torch's norms in float64."""

import copy
import pickle
import sys
import warnings

import pytest
import torch
import torch.nn.functional as F
from pool import on_each_device, on_ranks
from reference import batches, small_gpt, whole
from small_engines import engine_of, train_step
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.utils import parametrize

import paramp
from paramp import algorithms, functional
from paramp.nn import FusedLayerNorm, FusedRMSNorm, LPGroupNorm, LPLayerNorm, LPRMSNorm
from paramp.parallel.tensor.sharding_plan import apply_plan
from paramp.parallel.tensor.styles import STYLES
from paramp.precision import norms

WIDTH, GROUPS = 48, 6
IS_PLAIN_CUDA = norms._is_plain_cuda

NORMS = {
    "layer": (LPLayerNorm, nn.LayerNorm, (WIDTH,), {}),
    "layer, no bias": (LPLayerNorm, nn.LayerNorm, (WIDTH,), {"bias": False}),
    "layer, no weights": (LPLayerNorm, nn.LayerNorm, (WIDTH,), {"elementwise_affine": False}),
    "layer, two dims": (LPLayerNorm, nn.LayerNorm, ((4, WIDTH),), {"eps": 1e-3}),
    "group": (LPGroupNorm, nn.GroupNorm, (GROUPS, 6 * GROUPS), {}),
    "group, no weights": (LPGroupNorm, nn.GroupNorm, (GROUPS, 6 * GROUPS), {"affine": False}),
    "rms": (LPRMSNorm, nn.RMSNorm, (WIDTH,), {}),
    "rms, eps": (LPRMSNorm, nn.RMSNorm, (WIDTH,), {"eps": 1e-2}),
    "fused layer": (FusedLayerNorm, nn.LayerNorm, (WIDTH,), {}),
    "fused layer, no weights": (FusedLayerNorm, nn.LayerNorm, (WIDTH,), {"elementwise_affine": False}),
    "fused rms": (FusedRMSNorm, nn.RMSNorm, (WIDTH,), {}),
}
LOW = [torch.bfloat16, torch.float16]


def made(name, replacement=True, device="cpu", dtype=torch.float32):
    """A norm whose weights are not what they start as, or the plain one with the same."""
    new, plain, args, options = NORMS[name]
    generator = torch.Generator().manual_seed(5)
    norm = (new if replacement else plain)(*args, **options)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return norm.to(device, dtype)


def samples(name, offset=0.0, device="cpu", dtype=torch.float32):
    """An input and an output's gradient."""
    generator = torch.Generator().manual_seed(6)
    shape = (8, 6 * GROUPS, 5) if "group" in name else (16, 4, WIDTH)
    x, gradient = (torch.randn(shape, generator=generator) for _ in range(2))
    return (x + offset).to(device, dtype), gradient.to(device, dtype)


def run(norm, x, gradient):
    """The output, and the gradients of the input and of the weights."""
    x = x.clone().requires_grad_()
    output = norm(x)
    output.backward(gradient.to(output.dtype))
    return [output.detach(), x.grad, *(parameter.grad for parameter in norm.parameters())]


def ulp(dtype, at):
    """The distance of neighbours of ``dtype`` at a magnitude; ``at`` in float64."""
    smallest = torch.finfo(dtype).smallest_normal
    exponent = torch.frexp(at.abs().clamp(min=smallest)).exponent - 1  # at is 1.f x 2**exponent
    return torch.finfo(dtype).eps * torch.exp2(exponent.double())


# ---------------------------------------------------------------------------------------------------- what is computed


@on_each_device
@pytest.mark.parametrize("offset", [0.0, 50.0])
@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("name", NORMS)
def test_under_autocast_the_output_is_low_with_fp32_statistics_and_the_parameters_are_not_touched(
    name, dtype, offset, device
):
    """Of the rounded operands the result is the exact one rounded once, also where the mean is far from zero.

    torch's own low-precision kernels on a CPU put gradients of weights up to 16 units off there.
    """
    x, gradient = (value.to(dtype).float() for value in samples(name, offset, device))
    norm, reference = made(name, device=device), made(name, False, dtype=torch.float64)
    reference.load_state_dict(made(name, dtype=dtype).state_dict())
    with torch.autocast(device, dtype=dtype):
        output, *gradients = run(norm, x, gradient)
    assert output.dtype is dtype
    assert all(value.dtype is torch.float32 for value in (*norm.parameters(), *gradients))
    exact = run(reference, x.cpu().double(), gradient.cpu().double())
    for value, wanted in zip((output, *gradients), exact, strict=True):
        assert ((value.cpu().double() - wanted).abs() <= ulp(dtype, wanted.abs().max())).all()
    apart = (output.cpu().double() - exact[0]).abs()
    assert (apart <= 0.51 * ulp(dtype, exact[0]) + 1e-4 * (1 + offset / 10)).all()


@on_each_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *LOW])
@pytest.mark.parametrize("name", [name for name in NORMS if "fused" not in name])
def test_without_autocast_they_are_the_plain_norms_bit_for_bit(name, dtype, device):
    x, gradient = samples(name, 3.0, device, dtype)
    results = run(made(name, device=device, dtype=dtype), x, gradient)
    expected = run(made(name, False, device, dtype), x, gradient)
    for value, reference in zip(results, expected, strict=True):
        assert value.dtype is dtype
        assert torch.equal(value, reference)


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("name", ["fused layer", "fused layer, no weights", "fused rms"])
def test_fused_norms_of_low_precision_models_have_fp32_statistics_too(name, dtype):
    x, gradient = samples(name, 50.0, dtype=dtype)
    norm, reference = made(name, dtype=dtype), made(name, False, dtype=torch.float64)
    reference.load_state_dict(norm.state_dict())
    for value, exact in zip(run(norm, x, gradient), run(reference, x.double(), gradient.double()), strict=True):
        assert value.dtype is dtype
        assert ((value.double() - exact).abs() <= ulp(dtype, exact.abs().max())).all()


@pytest.mark.parametrize("name", NORMS)
def test_the_autocast_that_is_active_at_the_forward_and_on_its_device_decides(name):
    norm, plain = made(name), made(name, False)
    x, _ = samples(name)
    for dtype in (*LOW, LOW[0]):
        with torch.autocast("cpu", dtype=dtype):
            assert norm(x).dtype is dtype
            assert norm(x.half()).dtype is dtype
            with torch.autocast("cpu", enabled=False):
                assert torch.equal(norm(x), plain(x))
            assert norm(x.double()[:0].float()).dtype is dtype  # an empty batch
    torch.set_autocast_enabled("cuda", True)
    try:
        assert torch.equal(norm(x), plain(x))
    finally:
        torch.set_autocast_enabled("cuda", False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert norm.double()(x.double()).dtype is torch.float64  # autocast leaves float64 alone


def test_traces_and_compiled_modules_have_them_as_one_call():
    model = nn.Sequential(made("layer"), made("rms"), made("fused layer"))
    x, _ = samples("layer")
    traced = torch.fx.symbolic_trace(model)
    assert sum(node.op == "call_function" for node in traced.graph.nodes) == 3
    for dtype in LOW:
        with torch.autocast("cpu", dtype=dtype):
            assert torch.equal(traced(x), model(x))
            assert traced(x).dtype is dtype


# ------------------------------------------------------------------------------------------------------------- Apex


@pytest.fixture
def apex(tmp_path, monkeypatch):
    """A stand-in for NVIDIA's Apex, whose functions record their calls; CPU tensors count as its GPU's."""
    kernels = """
import torch.nn.functional as F
calls = []
def fused_layer_norm_affine(x, weight, bias, shape, eps):
    calls.append(("layer affine", x.dtype, weight.dtype, shape))
    return F.layer_norm(x, shape, weight, bias, eps)
def fused_layer_norm(x, shape, eps):
    calls.append(("layer", x.dtype, shape))
    return F.layer_norm(x, shape, None, None, eps)
def fused_rms_norm_affine(x, weight, shape, eps):
    calls.append(("rms affine", x.dtype, weight.dtype, shape, eps))
    return F.rms_norm(x, shape, weight, eps)
def fused_rms_norm(x, shape, eps):
    calls.append(("rms", x.dtype, shape, eps))
    return F.rms_norm(x, shape, None, eps)
"""
    for path, text in {
        "apex/__init__.py": "",
        "apex/optimizers/__init__.py": "",
        "apex/normalization/__init__.py": "",
        "apex/normalization/fused_layer_norm.py": kernels,
        "fused_layer_norm_cuda.py": "",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("apex", "apex.normalization", "apex.normalization.fused_layer_norm", "fused_layer_norm_cuda"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(norms, "_is_plain_cuda", lambda tensor: not isinstance(tensor, DTensor))
    monkeypatch.setattr(norms, "FP32_STATISTICS", ("cpu",))
    norms._apex_norms.cache_clear()
    yield tmp_path
    norms._apex_norms.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] in ("apex", "fused_layer_norm_cuda")]:
        del sys.modules[name]


def test_fused_norms_call_apex_with_arguments_in_autocasts_dtype(apex, monkeypatch):
    """And for tensors on a CPU torch's own functions, of the same values."""
    x, _ = samples("layer")
    eps = torch.finfo(torch.float32).eps
    low, wide = torch.bfloat16, torch.float32
    with torch.autocast("cpu", dtype=low):
        outputs = [made(name)(x) for name in ("fused layer", "fused layer, no weights", "fused rms")]
    outputs.append(made("fused layer")(x))
    nn_only = [FusedLayerNorm(WIDTH, bias=False)(x), made("fused layer").half()(x.half()).float()]
    assert [output.dtype for output in outputs] == [low, low, low, wide]
    assert torch.equal(outputs[3], made("layer", False)(x))
    assert torch.equal(nn_only[0], F.layer_norm(x, (WIDTH,)))
    assert sys.modules["apex.normalization.fused_layer_norm"].calls == [
        ("layer affine", low, low, (WIDTH,)),
        ("layer", low, (WIDTH,)),
        ("rms affine", low, low, (WIDTH,), eps),
        ("layer affine", wide, wide, (WIDTH,)),
        ("layer affine", torch.float16, torch.float16, (WIDTH,)),  # a bias is missing before: torch's own
    ]
    sys.modules["apex.normalization.fused_layer_norm"].calls.clear()
    monkeypatch.setattr(norms, "_is_plain_cuda", IS_PLAIN_CUDA)
    assert torch.equal(made("fused layer")(x), outputs[3])
    assert torch.equal(made("fused rms")(x), made("rms", False)(x))
    assert not sys.modules["apex.normalization.fused_layer_norm"].calls


def test_an_apex_that_does_not_load_is_said_so_once(apex):
    (apex / "fused_layer_norm_cuda.py").write_text("raise ImportError('undefined symbol')\n")
    x, _ = samples("layer")
    with pytest.warns(UserWarning, match=r"Apex is installed but does not load \(undefined symbol\)"):
        output = made("fused layer")(x)
    assert torch.equal(output, made("layer", False)(x))
    made("fused layer")(x)


def test_pypis_apex_changes_nothing(apex):
    (apex / "apex/normalization/__init__.py").unlink()
    (apex / "apex/normalization/fused_layer_norm.py").unlink()
    (apex / "apex/__init__.py").write_text("raise ImportError('pyramid')\n")
    x, _ = samples("layer")
    assert torch.equal(made("fused layer")(x), made("layer", False)(x))


# ------------------------------------------------------------------------------------------------------- the surgery


class Described(nn.LayerNorm):
    """A subclass with everything but a forward."""

    def __init__(self, width, label):
        super().__init__(width)
        self.label = label

    def extra_repr(self):
        return f"{super().extra_repr()}, label={self.label}"


class Remade(Described):
    """Its class makes no object without its arguments, so that copies get them too."""

    def __new__(cls, width, label):
        return super().__new__(cls)

    def __getnewargs__(self):
        return *self.normalized_shape, self.label


class Shifted(nn.LayerNorm):
    def forward(self, x):
        return super().forward(x) + 1


class Mixed(nn.Module):
    """Norms in many places; ``again`` and ``first`` are one module, ``tied`` has the weight of ``first``."""

    def __init__(self, width=8):
        super().__init__()
        self.first = nn.LayerNorm(width)
        self.inner = nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width, eps=1e-3), Described(width, "mine"))
        self.again = self.first
        self.tied = nn.LayerNorm(width)
        self.tied.weight = self.first.weight
        self.shifted = Shifted(width)
        self.patched = nn.LayerNorm(width)
        self.patched.forward = lambda x: x * 2
        self.group = nn.GroupNorm(2, width)
        self.rms = nn.RMSNorm(width)

    def forward(self, x):
        x = self.again(self.inner(self.first(x)))
        return self.rms(self.group(self.patched(self.shifted(self.tied(x))).mT).mT)


def test_surgery_keeps_all_that_a_norm_is():
    """Modules and parameters stay the objects that they were, so that ties, optimizers, hooks and references hold."""
    torch.manual_seed(0)
    model, x = Mixed(), torch.randn(2, 3, 8)
    model.inner[1].bias.requires_grad_(False)
    model.tied.eval()
    seen = []
    model.first.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    model.first.weight.register_hook(lambda gradient: seen.append(gradient.dtype))
    optimizer = torch.optim.AdamW(model.parameters())
    model(x).sum().backward()
    optimizer.step()

    def everything():
        modules = [(name, id(module), module.training) for name, module in model.named_modules(remove_duplicate=False)]
        parameters = [(name, id(value)) for name, value in model.named_parameters(remove_duplicate=False)]
        return modules, parameters, [value.requires_grad for value in model.parameters()]

    before, state = everything(), copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    expected = model(x)
    assert functional.apply_low_precision_layernorm(model, optimizers=optimizer) == 4
    kinds = [type(module) for module in model.children()]
    assert kinds == [LPLayerNorm, nn.Sequential, LPLayerNorm, Shifted, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm]
    assert type(model.inner[1]) is LPLayerNorm
    assert functional.apply_low_precision_groupnorm(model) == functional.apply_low_precision_rmsnorm(model) == 1
    assert (type(model.group), type(model.rms)) == (LPGroupNorm, LPRMSNorm)
    assert everything() == before
    torch.testing.assert_close((model.state_dict(), optimizer.state_dict()), state, rtol=0, atol=0)
    assert torch.equal(model(x), expected)
    seen.clear()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(x).float().sum().backward()
    assert seen == [torch.bfloat16, torch.bfloat16, torch.float32]  # the hook twice, since it has two names
    moved = model.first.weight.detach().clone()
    optimizer.step()
    assert not torch.equal(model.first.weight, moved)


def test_a_subclass_without_a_forward_stays_one():
    model = Mixed()
    functional.apply_low_precision_layernorm(model)
    norm = model.inner[2]
    assert isinstance(norm, LPLayerNorm)
    assert isinstance(norm, Described)
    assert type(norm).__name__ == "LPDescribed"
    assert repr(norm) == f"LP{Described(8, 'mine')}"
    assert repr(norm).startswith("LPDescribed((8,), eps=1e-05, elementwise_affine=True, ")
    assert repr(norm).endswith(", label=mine)")
    x = torch.randn(2, 8)
    for other in (copy.deepcopy(norm), copy.copy(norm), pickle.loads(pickle.dumps(norm))):
        assert (type(other), other.label) == (type(norm), "mine")
        with torch.autocast("cpu", dtype=torch.float16):
            assert torch.equal(other(x), norm(x))
            assert other(x).dtype is torch.float16
    another = nn.Sequential(Described(8, "other"), Remade(8, "again"))
    functional.apply_low_precision_layernorm(another)
    assert type(another[0]) is type(norm)
    for remade in (copy.deepcopy(another[1]), pickle.loads(pickle.dumps(another[1]))):
        assert repr(remade) == repr(another[1]) == f"LP{Remade(8, 'again')}"


def test_a_parametrized_norm_stays_parametrized():
    class Doubled(nn.Module):
        def forward(self, weight):
            return 2 * weight

    model = nn.Sequential(nn.LayerNorm(8))
    parametrize.register_parametrization(model[0], "weight", Doubled())
    x = torch.randn(2, 8)
    expected = model(x)
    assert functional.apply_low_precision_layernorm(model) == 1
    assert torch.equal(model(x), expected)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(x).dtype is torch.bfloat16
    parametrize.remove_parametrizations(model[0], "weight")
    assert type(model[0]) is LPLayerNorm


def test_a_model_that_is_a_norm_keeps_its_dtype_and_the_number_is_logged(caplog):
    model = nn.LayerNorm(4, dtype=torch.bfloat16)
    with caplog.at_level("INFO", logger="paramp.compat.composer.functional"):
        assert functional.apply_fused_layernorm(model, torch.optim.SGD(model.parameters())) == 1
    assert caplog.messages == ["LayerNorm: 1 x FusedLayerNorm instead of LayerNorm"]
    assert type(model) is FusedLayerNorm
    assert model.weight.dtype is model(torch.ones(2, 4, dtype=torch.bfloat16)).dtype is torch.bfloat16


WITH_EFFECT = [None, "amp", "amp_fp16", "bf16", "amp_bf16", "16-mixed", "bf16-mixed", 16]
WITHOUT = ["fp32", "fp16", "amp_fp8", "32-true", "16-naive", "bf16-naive", paramp.Precision.parse("16-naive")]


@pytest.mark.parametrize(
    ("precision", "effect"), [(one, one in WITH_EFFECT) for one in (*WITH_EFFECT, *WITHOUT)], ids=str
)
def test_precisions_with_an_effect_and_those_that_are_said_to_have_none(precision, effect):
    model = Mixed()
    name = getattr(precision, "name", precision)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert functional.apply_low_precision_layernorm(model, precision=precision) == 4 * effect
        assert functional.apply_low_precision_layernorm(model, precision) == 0  # all done, which is no mistake
        assert functional.apply_low_precision_groupnorm(model, precision) == effect
    said = [(one.category, f"has no effect in precision '{name}'" in str(one.message)) for one in caught]
    assert said == [(norms.NoEffectWarning, True)] * (0 if effect else 3)
    assert (type(model.first), type(model.group)) == (
        (LPLayerNorm, LPGroupNorm) if effect else (nn.LayerNorm, nn.GroupNorm)
    )


def test_a_precision_that_is_not_known():
    with pytest.raises(paramp.ConfigError, match=r"precision: got 'amp_fp17', expected one of .*or one of fp16, fp8"):
        functional.apply_low_precision_rmsnorm(Mixed(), "amp_fp17")


EACH_KIND = {
    (functional.apply_low_precision_layernorm, algorithms.LowPrecisionLayerNorm): (nn.LayerNorm, LPLayerNorm),
    (functional.apply_low_precision_groupnorm, algorithms.LowPrecisionGroupNorm): (nn.GroupNorm, LPGroupNorm),
    (functional.apply_low_precision_rmsnorm, algorithms.LowPrecisionRMSNorm): (nn.RMSNorm, LPRMSNorm),
    (functional.apply_fused_layernorm, algorithms.FusedLayerNorm): (nn.LayerNorm, FusedLayerNorm),
    (functional.apply_fused_rmsnorm, algorithms.FusedRMSNorm): (nn.RMSNorm, FusedRMSNorm),
}


@pytest.mark.parametrize(("ways", "kinds"), EACH_KIND.items(), ids=[one.__name__ for _, one in EACH_KIND])
def test_algorithms_take_the_mode_that_is_trained_in_and_a_model_without_such_norms_is_named(ways, kinds):
    (apply, algorithm), (plain, new) = ways, kinds
    without = nn.Sequential(nn.Linear(2, 2), Shifted(2))
    with pytest.warns(norms.NoEffectWarning, match=f"Sequential has no {plain.__name__} with torch's own forward"):
        assert apply(without) == 0
    assert type(without[1]) is Shifted
    model, full = Mixed(), paramp.Precision.parse("32-true")
    if new.__name__.startswith("LP"):
        with pytest.warns(norms.NoEffectWarning, match="has no effect in precision '32-true'"):
            assert algorithm().apply(model, full) == 0
        full = paramp.Precision.parse("amp_bf16")
    assert algorithm().apply(model, full) > 0
    assert any(type(module) is new for module in model.modules())


def test_wrapped_models_and_what_is_no_optimizer_are_refused():
    with paramp.launch_from_torch():
        wrapped = nn.parallel.DistributedDataParallel(nn.Sequential(nn.LayerNorm(4)))
        with pytest.raises(TypeError, match=r"the model is wrapped in DistributedDataParallel.*before it is wrapped"):
            functional.apply_low_precision_layernorm(wrapped)
        inside = nn.Sequential(nn.LayerNorm(4), wrapped)
        with pytest.raises(TypeError, match="1 is wrapped in DistributedDataParallel"):
            functional.apply_fused_layernorm(inside)
        assert type(inside[0]) is nn.LayerNorm
    fsdp = nn.Sequential(nn.GroupNorm(2, 4))
    fsdp.__class__ = FullyShardedDataParallel  # wrapping for real wants a GPU
    with pytest.raises(TypeError, match="FullyShardedDataParallel"):
        functional.apply_low_precision_groupnorm(fsdp)
    with pytest.raises(TypeError, match="model: got str"):
        functional.apply_low_precision_layernorm("model")
    model = nn.LayerNorm(4)
    with pytest.raises(TypeError, match="optimizers: got Parameter"):
        functional.apply_low_precision_layernorm(model, optimizers=list(model.parameters()))
    optimizers = [torch.optim.SGD([model.weight]), torch.optim.SGD([model.bias])]
    assert functional.apply_low_precision_layernorm(model, optimizers=optimizers) == 1


# --------------------------------------------------------------------------------------------- under tensor parallelism


@pytest.mark.parametrize("style", ["sequence", "partial_gradient", "replicated"])
@pytest.mark.parametrize(
    "ways", [one for one in EACH_KIND if "Group" not in one[1].__name__], ids=lambda ways: ways[1].__name__
)
@on_ranks(2, cuda=True)
def test_shards_of_a_sequence_before_and_after_the_plan(world, ways, style):
    """The collectives of the plain norm, which has none, and the numbers of the whole norm in one process."""
    (apply, _), (kind, _) = ways, EACH_KIND[ways]
    # Named, because torch 2.11 takes NCCL for a mesh of the whole world, and the ranks may share a GPU.
    backend = {"tp": torch.distributed.get_backend()}
    mesh = init_device_mesh(world.device, (2,), mesh_dim_names=("tp",), backend_override=backend)
    generator = torch.Generator().manual_seed(1)
    x, gradient = (torch.randn(4, 6, 16, generator=generator).to(world.device) for _ in range(2))
    low, gradient = x.bfloat16(), gradient.bfloat16()

    def build():
        model = nn.Sequential(kind(16))
        with torch.no_grad():
            model[0].weight.copy_(torch.linspace(0.5, 1.5, 16).bfloat16())
        return model.to(world.device)

    def shard(tensor):
        return tensor if style == "replicated" else tensor.chunk(2, 1)[world.rank]

    reference = build().double()
    exact_x = low.double().requires_grad_()
    exact = reference(exact_x)
    exact.backward(gradient.double())
    for order in (["plan"], ["surgery", "plan"], ["plan", "surgery"]):
        model = build()
        for what in order:
            if what == "plan" and style != "replicated":
                apply_plan(model, {"0": STYLES[style]()}, mesh)
            elif what == "surgery":
                assert apply(model) == 1
        part = shard(x).clone().requires_grad_()
        with CommDebugMode() as collectives, torch.autocast(world.device, dtype=torch.bfloat16):
            output = model(part)
            output.backward(shard(gradient).to(output.dtype))
        assert collectives.get_total_counts() == 0
        found = model[0].weight.grad
        assert found.dtype is torch.float32
        if style != "replicated":
            assert found.placements == (Partial(),)
            assert isinstance(model[0].weight, DTensor)
        if "surgery" not in order:
            continue
        assert output.dtype is torch.bfloat16
        for value, expected in (
            (output, shard(exact)),
            (part.grad, shard(exact_x.grad)),
            (whole(found), reference[0].weight.grad),
        ):
            # each rank's part of a summed gradient is rounded
            assert ((value.double() - expected).abs() <= 2 * ulp(torch.bfloat16, expected.abs().max())).all()


@on_ranks(2)
def test_fused_norms_as_an_algorithm_with_a_pipeline(world):
    with paramp.launch_from_torch({"parallel": {"pipeline": 2}, "precision": "bf16-mixed"}):
        model = small_gpt()
        engine = engine_of(model, model.loss, algorithms=[algorithms.FusedLayerNorm()])
        kinds = {type(module) for module in engine.module.modules() if isinstance(module, nn.LayerNorm)}
        assert kinds == {FusedLayerNorm}
        assert train_step(engine, *next(batches(1))).stepped
