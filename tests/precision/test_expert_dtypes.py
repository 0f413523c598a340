"""What experts and their routers compute in, in each mode."""

import functools
import importlib

import pytest
import torch
import torch.nn.functional as F
from families import cases, family
from mixtures import BACKENDS, FAMILIES, FEATURES, NUM_EXPERTS, SIZES, Products, Routing, batch, build, build_own
from pool import on_ranks

import paramp
from paramp.precision.compute_context import autocast_kernels, computing
from paramp.precision.fp16_emulation_cpu import emulate_fp16
from paramp.precision.modes import PRESETS

HALF = (torch.float16, torch.bfloat16)
MODES = [name for name, row in PRESETS.items() if row.compute in HALF]
EVERYTHING = [(mode, kind, backend) for mode in MODES for kind in FAMILIES for backend in BACKENDS]
PART = [
    ("16-mixed", "Mixtral", "grouped_mm"),
    ("bf16-mixed", "Qwen3-MoE", "grouped_mm"),
    ("16-naive", "DeepSeek-V3", "grouped_mm"),
    ("bf16-naive", "GPT-OSS", "grouped_mm"),
    ("fp8-mixed", "OLMoE", "grouped_mm"),
    ("O2", "GPT-OSS", "batched_mm"),
    ("16-mixed", "DeepSeek-V3", "batched_mm"),
    ("bf16-mixed", "OLMoE", "eager"),
    ("16-true", "Qwen3-MoE", "eager"),
]


def criterion(output, target):
    return F.cross_entropy(output.logits.flatten(0, 1), target.flatten())


def engine_of(model):
    return paramp.initialize(model, functools.partial(torch.optim.SGD, lr=0.1), criterion)[0]


def reference(model, chosen):
    """The gradients of ``model`` in fp64 on one process, with eager experts and the routing ``chosen``."""
    model.set_experts_implementation("eager")
    model.double()
    with Routing(chosen):
        criterion(model(input_ids=batch()), batch()).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def errors(found, expected):
    least = 1e-3 * max(gradient.norm() for gradient in expected.values())
    return {
        name: ((found[name].double() - wanted).norm() / max(wanted.norm(), least)).item()
        for name, wanted in expected.items()
    }


def tolerance(row):
    """A few rounding errors of the coarsest operands."""
    return 8 * 2.0**-4 if row.float8 else 8 * torch.finfo(row.compute).eps


@family
@pytest.mark.parametrize(("mode", "kind", "backend"), cases("experts", EVERYTHING, PART, 4))
def test_experts_compute_in_the_modes_dtype_and_routers_in_fp32(mode, kind, backend, capsys):
    """Forward and backward. Gradients are those of fp64 with the same routing, within the mode's rounding errors.

    In float8 modes experts compute in the mode's other dtype, which is said.
    """
    row = PRESETS[mode]
    with paramp.launch_from_torch({"precision": mode, "emulate_fp16": True}):
        engine = engine_of(build(kind, backend))
        with Products() as products, Routing() as routing:
            engine.forward_backward({"input_ids": batch()}, batch())
        scale = engine.scaler.get_scale()
        found = {name: value.grad.double() / scale for name, value in engine.named_parameters()}
    assert products.dtypes == {"experts": {row.compute}, "router": {torch.float32}}
    wrong = errors(found, reference(build(kind), routing.chosen))
    assert {name: error for name, error in wrong.items() if not error <= tolerance(row)} == {}
    said = "experts (stacks of experts have no float8 products" in capsys.readouterr().out
    assert said == (row.float8 is not None)


OVER_RANKS = [(mode, kind) for mode in MODES for kind in (*FAMILIES, "MoEGPT")]


@family
@pytest.mark.parametrize(("mode", "kind"), cases("experts over ranks", OVER_RANKS, [("16-mixed", "MoEGPT")], 2))
@on_ranks(2)
def test_experts_over_data_ranks_compute_in_the_modes_dtype_and_routers_in_fp32(world, mode, kind):
    config = {"precision": mode, "emulate_fp16": True, "parallel": {"expert": 2}}
    with paramp.launch_from_torch(config), Products(num_experts=6) as products:
        if kind == "MoEGPT":
            model = build_own(num_experts=6)
            engine = paramp.initialize(model, functools.partial(torch.optim.SGD, lr=0.1), model.loss)[0]
            engine.forward_backward(batch(), batch())
        else:
            engine_of(build(kind, "grouped_mm", num_experts=6)).forward_backward({"input_ids": batch()}, batch())
    assert products.dtypes == {"experts": {PRESETS[mode].compute}, "router": {torch.float32}}


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_expert_without_tokens_has_a_zero_gradient(backend):
    with paramp.launch_from_torch({"precision": "16-mixed", "emulate_fp16": True}):
        model = build("Mixtral", backend)
        for layer in model.model.layers:
            layer.mlp.gate.register_forward_hook(without_the_last_expert)
        engine = engine_of(model)
        engine.forward_backward({"input_ids": batch()}, batch())
        for name, parameter in engine.named_parameters():
            if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
                assert [bool(part.any()) for part in parameter.grad] == [True] * (NUM_EXPERTS - 1) + [False], name
        assert engine.step().stepped


def without_the_last_expert(_module, _args, output):
    logits, scores, chosen = output
    return logits, scores, chosen % (NUM_EXPERTS - 1)


ENDS = [3, 3, 10, 14]
"""The rows of four experts, of which one has none, and two rows that are none's."""


def drawn():
    torch.manual_seed(1)
    return torch.randn(16, 32), torch.randn(4, 32, 24) / 8, torch.randn(16, 24)


def grouped(x, weights, gradient, product, mode):
    """The product of each group, and the gradients; the backward runs without autocast, as in an engine."""
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    with computing(PRESETS[mode], "cpu"):
        output = product(x, weights)
    output.backward(gradient[: len(output)].to(output.dtype))
    return output.detach(), x.grad, weights.grad


def one_by_one(x, weights):
    starts = [0, *ENDS]
    return torch.cat([x[start:end] @ weight for start, end, weight in zip(starts, ENDS, weights, strict=False)])


def by_group(x, weights):
    return F.grouped_mm(x, weights, offs=torch.tensor(ENDS, dtype=torch.int32))


def by_transformers(x, weights):
    return torch.ops.transformers.grouped_mm_fallback(x, weights, torch.tensor(ENDS, dtype=torch.int32))


@pytest.mark.parametrize("product", [by_group, by_transformers])
@pytest.mark.parametrize("mode", ["16-mixed", "bf16-mixed"])
def test_grouped_products_are_those_of_one_expert_at_a_time_and_rows_of_none_are_zero(
    mode, product, monkeypatch, request
):
    """To the bit: as autocast computes those. A row of none may hold anything, and so may memory that is not filled."""
    importlib.import_module("transformers.integrations.moe")
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    deterministic = torch.are_deterministic_algorithms_enabled()
    request.addfinalizer(lambda: torch.use_deterministic_algorithms(deterministic))
    torch.use_deterministic_algorithms(True)  # torch then fills it with NaN
    x, weights, gradient = drawn()
    with emulate_fp16():
        expected = grouped(x, weights, gradient, one_by_one, mode)
        x[ENDS[-1] :] = gradient[ENDS[-1] :] = float("nan")
        output, of_x, of_weights = grouped(x, weights, gradient, product, mode)
        for rows, columns in ((28, 24), (32, 20)) if product is by_group else ():
            with pytest.raises(RuntimeError, match="multiple of 16 bytes"):  # no sizes but multiples of 8
                grouped(x[:, :rows], weights[:, :rows, :columns].contiguous(), gradient, product, mode)
    assert output.dtype is PRESETS[mode].compute
    assert torch.equal(output[: ENDS[-1]], expected[0])
    assert torch.equal(of_x[: ENDS[-1]], expected[1][: ENDS[-1]])
    assert torch.equal(of_weights, expected[2])
    assert not output[ENDS[-1] :].any()
    assert not of_x[ENDS[-1] :].any()


def test_plain_autocast_computes_grouped_products_as_torch_does():
    kept = autocast_kernels("cpu")
    x, weights, _ = drawn()
    with torch.autocast("cpu", torch.bfloat16):
        assert kept
        assert by_group(x, weights).dtype is torch.float32


def test_grouped_products_in_fp64_are_refused_by_name():
    refused = pytest.raises(paramp.ConfigError, match=r"64-true.*'model.layers.0.mlp.experts' calls F.grouped_mm")
    with paramp.launch_from_torch({"precision": "64-true"}), refused:
        engine_of(build("Mixtral", "grouped_mm"))


def test_grouped_products_are_what_transformers_chooses():
    assert build("Mixtral", None).config._experts_implementation == "grouped_mm"


FULL = [*(("32-true", backend) for backend in BACKENDS), ("64-true", "eager"), ("64-true", "batched_mm")]


@pytest.mark.parametrize(("mode", "backend"), FULL)
def test_in_full_precision_experts_and_routers_compute_in_it(mode, backend):
    with paramp.launch_from_torch({"precision": mode}):
        engine = engine_of(build("Mixtral", backend))
        with Products() as products:
            engine.forward_backward({"input_ids": batch()}, batch())
    dtype = PRESETS[mode].weights
    assert products.dtypes == {"experts": {dtype}, "router": {dtype}}


def test_biases_that_balance_the_experts_are_not_rounded():
    with paramp.launch_from_torch({"precision": "bf16-naive"}):
        model = build("DeepSeek-V3")
        model.model.layers[1].mlp.gate.e_score_correction_bias.fill_(1.001)
        engine = engine_of(model)
        router = engine.module.model.layers[1].mlp.gate
        assert router.e_score_correction_bias.unique().tolist() == [pytest.approx(1.001, abs=1e-6)]
        assert router.weight.dtype is torch.bfloat16


@pytest.mark.parametrize("kind", ["Llama4ForCausalLM", "JetMoeForCausalLM"])
def test_scores_that_scale_what_experts_get_have_the_dtype_of_the_weights(kind):
    """Another dtype would make the experts' products fail."""
    folder = {"Llama4ForCausalLM": "llama4", "JetMoeForCausalLM": "jetmoe"}[kind]
    made = getattr(importlib.import_module(f"transformers.models.{folder}"), kind)
    options = SIZES | {"num_local_experts": NUM_EXPERTS, "intermediate_size": FEATURES, "num_experts_per_tok": 1}
    options |= {"kv_channels": 8, "intermediate_size_mlp": 48}
    with paramp.launch_from_torch({"precision": "bf16-naive"}):
        engine = engine_of(made(made.config_class(**options)))
        with Products() as products:
            engine.forward_backward({"input_ids": batch()}, batch())
    assert products.dtypes == {"experts": {torch.bfloat16}, "router": {torch.float32}}
