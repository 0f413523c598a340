"""Experts that are sharded over the tensor axis, beside an expert axis and without one."""

import functools

import pytest
import torch
import torch.nn.functional as F
from families import cases, family
from pool import on_ranks
from reference import small_moe
from small_engines import engine_of, own_part
from small_mixture import CHOICES, NUM_EXPERTS, WIDTH, tokens
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import paramp
from paramp.base.dtensor import local
from paramp.models import MoEGPT
from paramp.parallel.tensor.styles import ExpertSlices

FEATURES = 12


class GatedExperts(nn.Module):
    """Three matrices for each expert, and biases of two of them, by names of its own."""

    def __init__(self):
        super().__init__()
        self.num_experts = NUM_EXPERTS
        self.gate = nn.Parameter(torch.randn(NUM_EXPERTS, WIDTH, FEATURES) / WIDTH)
        self.enter = nn.Parameter(torch.randn(NUM_EXPERTS, WIDTH, FEATURES) / WIDTH)
        self.enter_bias = nn.Parameter(torch.randn(NUM_EXPERTS, FEATURES))
        self.leave = nn.Parameter(torch.randn(NUM_EXPERTS, FEATURES, WIDTH) / FEATURES)
        self.leave_bias = nn.Parameter(torch.randn(NUM_EXPERTS, WIDTH))

    def forward(self, tokens, index, weights):
        output = torch.zeros_like(tokens)
        for expert in range(self.num_experts):
            token, choice = torch.where(index == expert)
            rows = tokens[token]
            inside = F.silu(rows @ self.gate[expert]) * (rows @ self.enter[expert] + self.enter_bias[expert])
            rows = (inside @ self.leave[expert] + self.leave_bias[expert]) * weights[token, choice, None]
            output = output.index_add(0, token, rows.to(output.dtype))
        return output


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, NUM_EXPERTS)
        self.experts = GatedExperts()

    def forward(self, x):
        scores, index = self.router(x).softmax(-1).topk(CHOICES)
        return x + self.experts(tokens=x, weights=scores, index=index)


def layers():
    torch.manual_seed(3)
    return nn.Sequential(Layer(), Layer())


DIMS = {"gate": 2, "enter": 2, "enter_bias": 1, "leave": 1, "leave_bias": None}
PLAN = {"*.experts": ExpertSlices(DIMS)}
LAYOUTS = {
    "tp4": {"tensor": 4},
    "dp2·tp2": {"data": 2, "tensor": 2},
    "ep2·tp2": {"expert": 2, "tensor": 2},
    "ep4": {"expert": 4},
    "fsdp·ep2·tp2": {"data": {"shard": 2}, "expert": 2, "tensor": 2},
    "ep2·tp2 + zero1": {"expert": 2, "tensor": 2, "zero": 1},
}


@family
@pytest.mark.parametrize("layout", cases("expert slices", [*LAYOUTS], ["ep2·tp2", "ep2·tp2 + zero1"], 1))
@on_ranks(4)
def test_a_stack_of_ones_own_has_the_gradients_and_the_norm_of_one_process(world, layout):
    """Of weights, biases, routers and inputs, in fp64; and each rank has its part only."""
    x, y, parallel = tokens().double(), torch.zeros(16, WIDTH).double(), LAYOUTS[layout]
    plain, entered = layers().double(), x.clone().requires_grad_()
    F.mse_loss(plain(entered), y).backward()
    norm = torch.nn.utils.get_total_norm([one.grad for one in plain.parameters()]).item()
    with paramp.launch_from_torch({"parallel": parallel, "precision": "64-true"}) as context:
        model = layers()
        engine = engine_of(model, optimizer=functools.partial(torch.optim.SGD, lr=1.0), plan=PLAN)
        before = engine.full_state_dict()
        sharded = {"enter": WIDTH * FEATURES, "enter_bias": FEATURES, "leave_bias": WIDTH}
        num_experts = NUM_EXPERTS // (parallel["data"]["shard"] if "fsdp" in layout else parallel.get("expert", 1))
        for name, size in sharded.items():
            slices = 1 if name == "leave_bias" else parallel.get("tensor", 1)
            assert local(getattr(engine.module[0].experts, name)).numel() == num_experts * size // slices, name
        part, target = own_part(context, x, y)
        part.requires_grad_()
        engine.forward_backward(part, target)
        assert float(engine.step().grad_norm) == pytest.approx(norm, rel=1e-12)
        for name, value in engine.full_state_dict().items():
            gradient = plain.get_parameter(name).grad
            torch.testing.assert_close(before[name] - value, gradient, rtol=1e-10, atol=1e-12, msg=name)
        (expected,) = own_part(context, entered.grad)
        torch.testing.assert_close(part.grad, expected, rtol=1e-10, atol=1e-12)
        assert not engine.check_replicas()


@on_ranks(4)
def test_an_overflow_in_a_slice_of_one_rank_skips_the_step_of_all_and_names_the_expert(world):
    with paramp.launch_from_torch({"precision": "16-mixed", "parallel": {"expert": 2, "tensor": 2}}) as context:
        model = small_moe()
        engine = engine_of(model, MoEGPT.loss)
        text = torch.randint(3, 30, (8, 9), generator=torch.Generator().manual_seed(1))
        for name in ("gate_up_proj", "down_proj"):
            engine.zero_grad()
            before, scale = engine.full_state_dict(), engine.scaler.get_scale()
            engine.forward_backward(*own_part(context, text[:, :-1], text[:, 1:]))
            if context.rank == 3:  # its second expert is the last of all
                local(engine.module.blocks[1].mlp.experts.get_parameter(name).grad)[-1].view(-1)[5] = float("inf")
            result = engine.step()
            assert (result.stepped, result.overflow, engine.scaler.get_scale()) == (False, True, scale / 2)
            assert all(torch.equal(value, before[key]) for key, value in engine.full_state_dict().items())
            (found,) = engine.diagnose_overflow().gradients
            assert found.name == f"blocks.1.mlp.experts.{name}"
            assert found.experts == (len(engine.full_state_dict()[found.name]) - 1,)


@on_ranks(2)
def test_what_cannot_be_sliced_is_refused_by_name(world):
    refused = {
        r"'0.experts' has the parameters .*, expected gate_up_proj \(experts, 2 x features": ExpertSlices(),
        r"'0.experts' has the parameters .*, expected gate, enter": ExpertSlices({"gate": 2, "enter": 2}),
        r"'0.experts' has leave_bias \(4, 8\), but dims has 2 for it": ExpertSlices(DIMS | {"leave_bias": 2}),
    }
    with paramp.launch_from_torch({"parallel": {"tensor": 2}}):
        for message, style in refused.items():
            with pytest.raises(paramp.ConfigError, match=message):
                engine_of(layers(), plan={"*.experts": style})
        model = layers()
        model[0].experts.forward = lambda *inputs: 0
        with pytest.raises(paramp.ConfigError, match=r"'0.experts' has a forward that was set on the object"):
            engine_of(model, plan={"*.experts": ExpertSlices(DIMS)})


@on_ranks(4)
def test_a_mesh_with_the_tensor_axis_before_that_of_experts_is_refused(world):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "ep"))
    context = paramp.ParallelContext.from_mesh(mesh, {"parallel": {"expert": 2}})
    with context, pytest.raises(paramp.ConfigError, match="got the axes tp, ep, expected the one for experts before"):
        engine_of(layers(), plan=PLAN)
