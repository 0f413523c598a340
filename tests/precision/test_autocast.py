"""What norms, softmax and the like compute in, on the CPU as on CUDA."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from pool import on_each_device
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import paramp
from paramp.precision import autocast
from paramp.precision.autocast import computing
from paramp.precision.fp16_emulation import emulate_fp16
from paramp.precision.policy import PRESETS

MIXED = [name for name, row in PRESETS.items() if row.autocast]

CALLS = {
    "layer_norm": lambda x: F.layer_norm(x, (8,)),
    "LayerNorm": lambda x: nn.LayerNorm(8, device=x.device)(x),
    "group_norm": lambda x: F.group_norm(x, 2),
    "rms_norm": lambda x: F.rms_norm(x, (8,)),
    "softmax": lambda x: x.softmax(-1),
    "F.softmax": lambda x: F.softmax(x, -1),
    "log_softmax": lambda x: torch.log_softmax(x, -1),
    "exp": torch.exp,
    "power": lambda x: x**2,
    "sum": torch.sum,
    "norm": torch.linalg.vector_norm,
    "mse_loss": lambda x: F.mse_loss(x, x),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.zeros(4, dtype=torch.long, device=x.device)),
}


@on_each_device
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("mode", MIXED)
def test_norms_and_softmax_compute_in_fp32_in_the_mixed_modes(mode, call, device):
    x = torch.randn(4, 8, device=device).to(PRESETS[mode].compute)
    with computing(PRESETS[mode], device):
        result = CALLS[call](x)
    assert result.dtype is torch.float32
    # A GPU adds up in an order that depends on the dtype of what it reads.
    tolerance = 0.0 if device == "cpu" else 1e-6
    torch.testing.assert_close(result, CALLS[call](x.float()), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("call", CALLS)
def test_a_gpu_has_the_same_list(call):
    """On tensors without values, which need no GPU. torch 2.11's own autocast leaves rms_norm out."""
    torch.set_autocast_enabled("cuda", True)
    try:
        with FakeTensorMode(), torch.no_grad(), autocast.widening(PRESETS["bf16-mixed"], "cuda"):
            x = torch.empty(4, 8, device="cuda", dtype=torch.bfloat16)
            assert CALLS[call](x).dtype is torch.float32
    finally:
        torch.set_autocast_enabled("cuda", False)


@on_each_device
def test_operators_inside_others_are_reached(device):
    attention = nn.MultiheadAttention(8, 2, device=device)
    with computing(PRESETS["bf16-mixed"], device):
        x = torch.randn(3, 2, 8, device=device).bfloat16()
        output, weights = attention(x, x, x)  # its softmax is called by a function of torch's own
    assert (output.dtype, weights.dtype) == (torch.bfloat16, torch.float32)


@on_each_device
def test_operators_that_mix_dtypes_take_the_widest(device):
    x, wide = torch.randn(4, 8, device=device).half(), torch.randn(4, 8, device=device)
    layer = nn.Bilinear(8, 8, 3, device=device)
    with computing(PRESETS["16-mixed"], device):
        assert layer(x, wide).dtype is torch.float32
        assert torch.atan2(x, wide).dtype is torch.float32
        assert torch.atan2(x, x).dtype is torch.float16


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_train_in_fp16_on_the_cpu(kind):
    """oneDNN, which computes an LSTM, has none in fp16 on most CPUs. Within a few of fp16's rounding errors of fp32."""
    torch.manual_seed(0)
    embedding, layer = nn.Embedding(5, 8), kind(8, 8, batch_first=True)
    trained = dict(nn.ModuleList([embedding, layer]).named_parameters())
    tokens = torch.tensor([[0, 1, 2], [3, 4, 0]])
    expected = layer(embedding(tokens))[0].square().mean()
    expected.backward()
    wanted = {name: parameter.grad for name, parameter in trained.items()}
    embedding.zero_grad()
    layer.zero_grad()
    with emulate_fp16(), computing(PRESETS["16-mixed"], "cpu"):
        loss = layer(embedding(tokens))[0].square().mean()
        loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=2.0**-11)
    for name, parameter in trained.items():
        assert (parameter.grad - wanted[name]).norm() <= 4 * 2.0**-11 * wanted[name].norm(), name


def plain_autocast():
    """What torch's own autocast makes of operators that the modes widen, and of the gradients."""
    torch.manual_seed(0)
    x, wide = torch.randn(4, 8), torch.randn(4, 8, requires_grad=True)
    more = {
        "tensordot": lambda _: torch.tensordot(x, wide, ([1], [1])),
        "tensordot of batches": lambda _: torch.func.vmap(lambda row: torch.tensordot(row, wide, ([0], [1])))(x),
        "bilinear": lambda _: F.bilinear(x, wide, torch.ones(2, 8, 8)),
        "cdist": lambda _: torch.cdist(x, wide),
        "nuclear_norm": lambda _: torch.linalg.matrix_norm(wide, "nuc"),
    }
    with torch.autocast("cpu", torch.bfloat16):
        results = {name: call(x.bfloat16()) for name, call in (CALLS | more).items()}
    sum(result.float().sum() for result in results.values() if result.requires_grad).backward()
    return results | {"gradient": wide.grad}


def test_plain_autocast_is_as_it_was():
    autocast._install("cpu")._destroy()
    autocast._install.cache_clear()
    expected = plain_autocast()  # with torch's kernels only
    with computing(PRESETS["bf16-mixed"], "cpu"):
        x = torch.randn(4, 8)
        assert torch.tensordot(x, x, ([1], [1])).dtype is torch.float32  # as on CUDA
    actual = plain_autocast()
    assert {name: value.dtype for name, value in actual.items()} == {
        name: value.dtype for name, value in expected.items()
    }
    assert [name for name in expected if not torch.equal(actual[name], expected[name])] == []
    assert expected["tensordot"].dtype is torch.bfloat16


@on_each_device
def test_matrix_products_stay_low_and_what_is_fp64_or_whole_is_left_alone(device):
    x = torch.randn(4, 8, device=device)
    with computing(PRESETS["bf16-mixed"], device):
        assert F.linear(x, x).dtype is torch.bfloat16
        assert F.relu(x.bfloat16()).dtype is torch.bfloat16
        assert x.double().softmax(-1).dtype is torch.float64
        assert torch.arange(3, device=device).sum().dtype is torch.int64
        with torch.autocast(device, enabled=False):
            assert F.layer_norm(x.bfloat16(), (8,)).dtype is torch.bfloat16


@pytest.mark.parametrize("mode", [name for name in PRESETS if name not in MIXED])
def test_other_modes_compute_in_the_dtype_that_they_have(mode):
    row = PRESETS[mode]
    with computing(row, "cpu"):
        assert F.layer_norm(torch.ones(2, 8, dtype=row.weights), (8,)).dtype is row.norms
        made = torch.zeros(1).dtype
    assert made is (row.weights if row.default_dtype else torch.float32)
    assert torch.get_default_dtype() is torch.float32


class Normed(nn.Module):
    """A norm of what is half precision, whose forward may be computed anew in the backward."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.again = again
        self.linear = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False) if self.again else self.inner(x)

    def inner(self, x):
        return self.norm(self.linear(x))


def test_a_checkpointed_forward_computes_the_same_again():
    gradients = []
    x = torch.randn(4, 8)
    for again in (False, True):
        with paramp.launch_from_torch({"precision": "bf16-mixed"}):
            model = Normed(again)
            engine, *_ = paramp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), F.mse_loss)
            engine.forward_backward(x, x)  # torch complains if a dtype is not what it was
            gradients.append(model.linear.weight.grad)
    assert torch.equal(*gradients)


@pytest.mark.parametrize("mode", ["O2", "16-mixed", "16-naive"])
def test_batch_norm_on_the_cpu(mode):
    """O2 keeps its weights and statistics in fp32, which half-precision inputs meet."""
    torch.manual_seed(0)
    with paramp.launch_from_torch({"precision": {"mode": mode, "init_scale": 4.0}}):
        model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.LazyLinear(2))
        model(torch.randn(2, 1, 5, 5))
        engine, *_ = paramp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), F.mse_loss)
        norm = engine.module[1]
        expected = torch.float16 if mode == "16-naive" else torch.float32
        assert {norm.weight.dtype, norm.bias.dtype, norm.running_mean.dtype} == {expected}
        assert engine.module[0].weight.dtype is (torch.float32 if mode == "16-mixed" else torch.float16)
        before = norm.weight.detach().clone()
        engine.forward_backward(torch.randn(4, 1, 5, 5), torch.randn(4, 2))
        assert engine.step().stepped
        assert not torch.equal(norm.weight, before)
        stepped = {id(tensor) for group in engine.optimizer.param_groups for tensor in group["params"]}
        assert (id(norm.weight) in stepped) == (mode != "16-naive")  # fp32 needs no master


@pytest.mark.parametrize(("mode", "eps", "warns"), [("O3", 1e-8, True), ("16-true", 1e-8, True), ("O3", 1e-4, False)])
def test_an_eps_that_rounds_to_nothing_is_warned_of(mode, eps, warns):
    with paramp.launch_from_torch({"precision": mode}), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = nn.Linear(4, 4)
        paramp.initialize(model, torch.optim.AdamW(model.parameters(), eps=eps), F.mse_loss)
    assert [str(warning.message).startswith(f"optimizer: eps {eps:g} is below") for warning in caught] == [True] * warns


@pytest.mark.parametrize("mode", ["bf16-true", "16-naive", "O2", "16-mixed"])
def test_modes_in_which_eps_is_harmless_do_not_warn(mode):
    with paramp.launch_from_torch({"precision": mode}):
        model = nn.Linear(4, 4)
        paramp.initialize(model, torch.optim.AdamW(model.parameters()), F.mse_loss)
