"""Experts over data ranks: gradients, norms, decisions and checkpoints are those of one process."""

import pytest
import torch
import torch.nn.functional as F
from families import cases, family
from mixtures import FAMILIES, batch, build
from pool import on_ranks, shared_folder
from small_engines import engine_of, own_part
from torch import nn

import paramp
from paramp.base.dtensor import local

LR = 8.0
"""So large that a weight's change shows its gradient to the last bits."""
LAYOUTS = {
    "ep4": {"expert": 4},
    "dp2·ep2": {"data": 4, "expert": 2},
    "dp2·ep2 + zero1": {"data": 4, "expert": 2, "zero": 1},
    "ep2·tp2": {"expert": 2, "tensor": 2},
    "ep2·pp2": {"expert": 2, "pipeline": 2},
}


def reference(name):
    """Names of parameters, their gradients and the norm of all, in fp64 on one process with eager experts."""
    model = build(name, num_experts=4).double()
    tokens = batch(8)
    model(input_ids=tokens, labels=tokens).loss.backward()
    grads = {key: value.grad for key, value in model.named_parameters() if value.grad is not None}
    return grads, torch.stack([grad.norm() for grad in grads.values()]).norm().item()


def errors(engine, before, expected):
    """For each parameter the distance of its gradient, as one step of SGD shows it, from the expected one."""
    largest = max(grad.norm() for grad in expected.values())
    found = {key: (before[key].double() - value.double()) / LR for key, value in engine.full_state_dict().items()}
    return {key: float((found[key] - grad).norm() / max(grad.norm(), 1e-3 * largest)) for key, grad in expected.items()}


@family
@pytest.mark.parametrize("name", cases("expert axis", [*FAMILIES], ["Mixtral"], 1))
@on_ranks(4)
def test_gradients_are_those_of_one_process(world, name):
    expected, norm = reference(name)
    before = build(name, num_experts=4).state_dict()
    for layout, parallel in LAYOUTS.items():
        if name == "OLMoE" and "pp2" in layout:  # transformers has no pipeline plan of it
            continue
        with paramp.launch_from_torch({"parallel": parallel}) as context:
            model = build(name, "grouped_mm" if "zero1" in layout else "eager", num_experts=4)
            engine = engine_of(model, None, lambda parameters: torch.optim.SGD(parameters, lr=LR))
            (tokens,) = own_part(context, batch(8))
            engine.forward_backward({"input_ids": tokens, "labels": tokens})
            assert float(engine.step().grad_norm) == pytest.approx(norm, rel=1e-6)
            worst = max(errors(engine, before, expected).items(), key=lambda pair: pair[1])
            assert worst[1] < 1e-5, (layout, worst)
            stacks = [one for key, one in engine.module.named_parameters() if key.endswith("experts.down_proj")]
            assert all(local(one).shape[0] * parallel["expert"] == one.shape[0] == 4 for one in stacks)


class Experts(nn.Module):
    """Four experts, each a matrix."""

    def __init__(self, width=8):
        super().__init__()
        self.num_experts = 4
        self.weight = nn.Parameter(torch.randn(4, width, width))

    def forward(self, tokens, index, weights):
        output = torch.zeros_like(tokens)
        for expert in range(self.num_experts):
            token, place = torch.where(index == expert)
            rows = (tokens[token] @ self.weight[expert]) * weights[token, place, None]
            output = output.index_add(0, token, rows.to(output.dtype))
        return output


class Mixture(nn.Module):
    """Tokens (tokens, 1 + 8): the first feature is the expert that is chosen, the others are transformed."""

    def __init__(self):
        super().__init__()
        self.enter, self.experts, self.scale = nn.Linear(8, 8), Experts(), nn.Parameter(torch.ones(()))

    def forward(self, x):
        index = x[:, :1].long()
        return self.experts(self.enter(x[:, 1:]), index, self.scale.expand(len(x), 1))


def mixture():
    torch.manual_seed(3)
    return Mixture()


PLAN = {"experts": "experts"}


def tokens_for(*experts):
    features = torch.randn(len(experts), 8, generator=torch.Generator().manual_seed(4))
    return torch.cat([torch.tensor(experts, dtype=torch.float32).unsqueeze(1), features], 1)


@on_ranks(4)
def test_ranks_without_tokens_take_part_and_have_gradients_of_zero(world):
    """All tokens go to one expert; or some to none, an index of no expert, and none at all on one data rank."""
    for chosen in ([2] * 8, [3, 4, 4, 0, 1, 4, 4, 4], [4] * 8):
        x = tokens_for(*chosen)
        plain = mixture().double()
        F.mse_loss(plain(x.double()), torch.zeros(8, 8, dtype=torch.float64)).backward()
        with paramp.launch_from_torch({"parallel": {"expert": 4}}) as context:
            engine = engine_of(mixture(), plan=PLAN)
            for _ in range(2):  # the second finds buffers that were used
                engine.forward_backward(*own_part(context, x, torch.zeros(8, 8)))
                gradient, expected = local(engine.module.experts.weight.grad), plain.experts.weight.grad.float()
                torch.testing.assert_close(gradient, expected[context.dp.rank : context.dp.rank + 1])
                engine.zero_grad()


@on_ranks(4)
def test_an_overflow_in_an_expert_skips_the_step_of_all(world):
    with paramp.launch_from_torch({"precision": "16-mixed", "parallel": {"data": 4, "expert": 2}}) as context:
        engine = engine_of(mixture(), plan=PLAN)
        x, y = own_part(context, tokens_for(*range(4), *range(4)), torch.zeros(8, 8))
        before = engine.full_state_dict()
        engine.forward_backward(x, y)
        if context.rank == 3:
            local(engine.module.experts.weight.grad)[1, 2, 3] = float("inf")
        scale, result = engine.scaler.get_scale(), engine.step()
        assert (result.stepped, result.overflow, engine.scaler.get_scale()) == (False, True, scale / 2)
        assert all(torch.equal(value, before[key]) for key, value in engine.full_state_dict().items())
        assert not engine.check_replicas()


@on_ranks(4)
def test_checkpoints_are_loaded_on_other_sizes_of_the_axis(world):
    """With optimizer state, masters of half-precision weights and ZeRO's parts, to the bit."""
    folder = shared_folder()
    layouts = [{"expert": 4}, {"data": 4, "expert": 2, "zero": 1}, {"expert": 2, "tensor": 2}, {"tensor": 4}]
    saved, precision = None, {"mode": "16-naive", "init_scale": 128.0}
    for index, parallel in enumerate(layouts):
        with paramp.launch_from_torch({"precision": precision, "parallel": parallel}) as context:
            adamw = lambda parameters: torch.optim.AdamW(parameters, lr=0.1)  # noqa: E731
            engine = engine_of(mixture(), optimizer=adamw, plan=PLAN if "expert" in parallel else {})
            if index:
                engine.load(f"{folder}/{index - 1}")
                assert all(torch.equal(value, saved[key]) for key, value in engine.full_state_dict().items())
            else:
                x, y = own_part(context, tokens_for(*range(4), *range(4)), torch.zeros(8, 8))
                engine.forward_backward(x.half(), y.half())
                assert engine.step().stepped
            saved = engine.full_state_dict()
            engine.save(f"{folder}/{index}")


@on_ranks(2)
def test_data_ranks_evaluate_as_many_batches(world):
    """The one with fewer runs its last batch again, for the tokens of the other."""
    with paramp.launch_from_torch({"parallel": {"expert": 2}}) as context:
        engine = engine_of(mixture(), plan=PLAN)
        batches = [(tokens_for(0, 1, 2, 3), torch.zeros(4, 8))] * (2 + context.dp.rank)
        loss = float(engine.evaluate(batches))
        assert loss == pytest.approx(F.mse_loss(mixture()(batches[0][0]), batches[0][1]).item(), rel=1e-6)


@on_ranks(2)
def test_what_cannot_be_sharded_is_refused_by_name(world):
    refused = [
        (
            {"expert": 2, "data": {"shard": 2}},
            "16-mixed",
            PLAN,
            r"parallel.expert: got 2, expected 1, because data.shard",
        ),
        ({"expert": 4, "data": 2}, "16-mixed", PLAN, r"parallel.expert: got 4, expected a divisor of 2"),
        ({"expert": 2}, "16-mixed", {}, r"the plan of Mixture names no experts"),
        ({"expert": 2}, "16-mixed", {"enter": "experts"}, r"'enter' is a Linear with num_experts None"),
    ]
    for parallel, precision, plan, message in refused:
        config = {"precision": precision, "parallel": parallel}
        with pytest.raises(paramp.ConfigError, match=message), paramp.launch_from_torch(config):
            engine_of(mixture(), plan=plan)
    with pytest.raises(paramp.ConfigError, match=r"parallel.expert: got 2, expected 1, because reproducible is set"):
        paramp.Config(parallel={"expert": 2}, reproducible=True)


def of_submodule(experts):
    experts.inside = nn.Module()
    experts.inside.weight = nn.Parameter(torch.randn(4, 8))


def of_buffer(experts):
    experts.register_buffer("offsets", torch.zeros(4, 8))


class OtherForward(Experts):
    def forward(self, tokens, chosen):
        return tokens


@on_ranks(2)
def test_experts_that_would_stay_whole_are_refused_by_name(world):
    """Of a module whose ranks would have some of what belongs to the experts, and all of the rest; and others."""
    refused = {
        r"'experts' is a Experts with 'inside.weight' of 4 experts, expected parameters of the module": of_submodule,
        r"'experts' is a Experts with 'offsets' of 4 experts, expected parameters of the module": of_buffer,
        r"'experts' is a OtherForward whose forward is another": lambda one: setattr(one, "__class__", OtherForward),
    }
    with paramp.launch_from_torch({"parallel": {"expert": 2}}):
        for message, change in refused.items():
            model = mixture()
            change(model.experts)
            with pytest.raises(paramp.ConfigError, match=message):
                engine_of(model, plan=PLAN)
        two = nn.Sequential(mixture(), mixture())
        with pytest.raises(paramp.ConfigError, match=r"leaves '1.experts', a Experts of 4 experts, replicated"):
            engine_of(two, plan={"0.experts": "experts"})
