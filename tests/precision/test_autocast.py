"""What norms, softmax and the like compute in, on the CPU as on CUDA."""

import functools
import gc
import warnings

import pytest
import torch
import torch.nn.functional as F
from pool import on_each_device
from small_engines import engine_of, train_step
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import paramp
from paramp.precision import compute_context
from paramp.precision.compute_context import computing
from paramp.precision.fp16_emulation_cpu import emulate_fp16
from paramp.precision.modes import PRESETS

MIXED = [name for name, row in PRESETS.items() if row.autocast]

CALLS = {
    "layer_norm": lambda x: F.layer_norm(x, (8,)),
    "group_norm": lambda x: F.group_norm(x, 2),
    "rms_norm": lambda x: F.rms_norm(x, (8,)),
    "softmax": lambda x: x.softmax(-1),
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
        with FakeTensorMode(), torch.no_grad(), compute_context.widening(PRESETS["bf16-mixed"], "cuda"):
            x = torch.empty(4, 8, device="cuda", dtype=torch.bfloat16)
            assert CALLS[call](x).dtype is torch.float32
    finally:
        torch.set_autocast_enabled("cuda", False)


@on_each_device
def test_operators_inside_others_are_reached_and_what_else_is_as_in_cudas_table(device):
    attention, bilinear = nn.MultiheadAttention(8, 2, device=device), nn.Bilinear(8, 8, 3, device=device)
    x, wide = (torch.randn(3, 2, 8, device=device) for _ in range(2))
    with computing(PRESETS["bf16-mixed"], device):
        output, weights = attention(x, x, x)  # its softmax is called by a function of torch's own
        assert (output.dtype, weights.dtype) == (torch.bfloat16, torch.float32)
        assert F.linear(x[0], x[0]).dtype is F.relu(x.bfloat16()).dtype is torch.bfloat16
        assert x.double().softmax(-1).dtype is torch.float64
        assert torch.arange(3, device=device).sum().dtype is torch.int64
        with torch.autocast(device, enabled=False):
            assert F.layer_norm(x.bfloat16(), (8,)).dtype is torch.bfloat16
    half = x.half()
    with computing(PRESETS["16-mixed"], device):  # operators that mix dtypes take the widest
        assert bilinear(half, wide).dtype is torch.atan2(half, wide).dtype is torch.float32
        assert torch.atan2(half, half).dtype is torch.float16


@pytest.mark.parametrize(("mode", "unit"), [("16-mixed", 2.0**-11), ("bf16-mixed", 2.0**-8)])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_train_in_half_precision_on_the_cpu(kind, mode, unit):
    """oneDNN, which computes an LSTM, has none in fp16 on most CPUs, nor in bf16 on some. Within a few rounding errors
    of fp32."""
    torch.manual_seed(0)
    embedding, layer = nn.Embedding(5, 8), kind(8, 8, batch_first=True)
    trained = dict(nn.ModuleList([embedding, layer]).named_parameters())
    tokens = torch.tensor([[0, 1, 2], [3, 4, 0]])
    expected = layer(embedding(tokens))[0].square().mean()
    expected.backward()
    wanted = {name: parameter.grad for name, parameter in trained.items()}
    embedding.zero_grad()
    layer.zero_grad()
    with emulate_fp16(), computing(PRESETS[mode], "cpu"):
        loss = layer(embedding(tokens))[0].square().mean()
        loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=2 * unit)  # of a square
    for name, parameter in trained.items():
        assert (parameter.grad - wanted[name]).norm() <= 4 * unit * wanted[name].norm(), name


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


def has_replaced():
    """Whether torch has kernels of paramp's for softmax under autocast, and for products."""
    gc.collect()
    keys = {"aten::softmax.int": "AutocastCPU", "aten::mm": "BackendSelect"}
    return [torch._C._dispatch_has_kernel_for_dispatch_key(name, key) for name, key in keys.items()]


def test_kernels_are_replaced_while_a_context_or_an_engine_needs_them():
    assert has_replaced() == [False, False]
    with emulate_fp16(), computing(PRESETS["bf16-mixed"], "cpu"):
        assert has_replaced() == [True, True]
    assert has_replaced() == [False, False]
    with paramp.launch_from_torch({"precision": "16-mixed", "emulate_fp16": True}):
        engine = engine_of(nn.Linear(8, 2))
        train_step(engine, torch.randn(4, 8), torch.randn(4, 2))
        assert has_replaced() == [True, True]
    del engine
    assert has_replaced() == [False, False]


def test_plain_autocast_is_as_it_was():
    assert has_replaced() == [False, False]
    expected = plain_autocast()
    with computing(PRESETS["bf16-mixed"], "cpu"):
        x = torch.randn(4, 8)
        assert torch.tensordot(x, x, ([1], [1])).dtype is torch.float32  # as on CUDA
    kept = compute_context.autocast_kernels("cpu")
    actual = plain_autocast()
    assert has_replaced() == [bool(kept), False]
    assert {name: value.dtype for name, value in actual.items()} == {
        name: value.dtype for name, value in expected.items()
    }
    assert [name for name in expected if not torch.equal(actual[name], expected[name])] == []
    assert expected["tensordot"].dtype is torch.bfloat16


@pytest.mark.parametrize("mode", [name for name in PRESETS if name not in MIXED])
def test_other_modes_compute_in_the_dtype_that_they_have(mode):
    row = PRESETS[mode]
    with computing(row, "cpu"):
        assert F.layer_norm(torch.ones(2, 8, dtype=row.weights), (8,)).dtype is row.norms
        made = torch.zeros(1).dtype
    of_weights = mode.endswith("-true") or mode.startswith("transformer-engine")  # as with Fabric's precisions
    assert made is (row.weights if of_weights else torch.float32)
    assert torch.get_default_dtype() is torch.float32


@pytest.mark.parametrize("mode", ["O2", "16-mixed", "16-naive"])
def test_batch_norm_on_the_cpu(mode):
    """O2 keeps its weights and statistics in fp32, which half-precision inputs meet."""
    torch.manual_seed(0)
    with paramp.launch_from_torch({"precision": {"mode": mode, "init_scale": 4.0}}):
        engine = engine_of(nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(36, 2)))
        norm = engine.module[1]
        expected = torch.float16 if mode == "16-naive" else torch.float32
        assert {norm.weight.dtype, norm.bias.dtype, norm.running_mean.dtype} == {expected}
        assert engine.module[0].weight.dtype is (torch.float32 if mode == "16-mixed" else torch.float16)
        before = norm.weight.detach().clone()
        assert train_step(engine, torch.randn(4, 1, 5, 5), torch.randn(4, 2)).stepped
        assert not torch.equal(norm.weight, before)
        stepped = {id(tensor) for group in engine.optimizer.param_groups for tensor in group["params"]}
        assert (id(norm.weight) in stepped) == (mode != "16-naive")  # fp32 needs no master


HALF_ADAM = [("O3", 1e-8, True), ("16-true", 1e-8, True), ("O3", 1e-4, False)]
HARMLESS = [(mode, 1e-8, False) for mode in ("bf16-true", "16-naive", "O2", "16-mixed")]


@pytest.mark.parametrize(("mode", "eps", "warns"), [*HALF_ADAM, *HARMLESS])
def test_an_eps_that_rounds_to_nothing_is_warned_of(mode, eps, warns):
    with paramp.launch_from_torch({"precision": mode}), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine_of(nn.Linear(4, 4), optimizer=functools.partial(torch.optim.AdamW, eps=eps))
    assert [str(warning.message).startswith(f"optimizer: eps {eps:g} is below") for warning in caught] == [True] * warns
