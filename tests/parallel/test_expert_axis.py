"""Experts over data ranks: what becomes of idle ranks, overflows and checkpoints, and what is refused."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from families import rarely
from pool import on_ranks, shared_folder
from small_engines import assert_same_checkpoints, assert_same_tensors, engine_of, own_part
from small_mixture import WIDTH, StackedExperts, layers, tokens
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import paramp
from paramp.base.dtensor import local


class Experts(StackedExperts):
    """Experts whose weights are of order 1."""

    def __init__(self, num_experts):
        super().__init__(num_experts, std=1.0)


class Mixture(nn.Module):
    """Tokens (tokens, 1 + 8): the first feature is the expert that is chosen, the others are transformed."""

    def __init__(self, num_experts):
        super().__init__()
        self.enter, self.experts = nn.Linear(8, 8), Experts(num_experts)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x):
        index = x[:, :1].long()
        return self.experts(self.enter(x[:, 1:]), weights=self.scale.expand(len(x), 1), index=index)


def mixture(num_experts=4):
    torch.manual_seed(3)
    return Mixture(num_experts)


PLAN = {"experts": "experts"}


def tokens_for(*experts):
    features = torch.randn(len(experts), 8, generator=torch.Generator().manual_seed(4))
    return torch.cat([torch.tensor(experts, dtype=torch.float32).unsqueeze(1), features], 1)


class InDouble(Experts):
    """Experts whose output is wider than their input, as it is narrower under autocast."""

    def forward(self, tokens, index, weights):
        return super().forward(tokens, index, weights).double()


@on_ranks(4)
def test_ranks_without_tokens_take_part_and_have_gradients_of_zero(world):
    """All tokens go to one expert; or some to none, an index of no expert, and none at all on one data rank."""
    for chosen in ([2] * 8, [3, 4, 4, 0, 1, 4, 4, 4], [4] * 8):
        x = tokens_for(*chosen)
        plain = mixture().double()
        F.mse_loss(plain(x.double()), torch.zeros(8, 8, dtype=torch.float64)).backward()
        for parallel, kind in (
            ({"expert": 4}, Experts),
            ({"expert": 4}, InDouble),
            ({"data": {"shard": 4}, "expert": 2}, Experts),
        ):
            with paramp.launch_from_torch({"parallel": parallel}) as context:
                model = mixture()
                model.experts.__class__ = kind
                engine = engine_of(model, plan=PLAN)
                # A rank of the expert axis has neighbours, which the one that shards them over other ranks splits.
                expert = context.rank if "data" not in parallel else (0, 2, 1, 3)[context.rank]
                for _ in range(2):  # the second finds buffers that were used
                    engine.forward_backward(*own_part(context, x, torch.zeros(8, 8)))
                    gradient, expected = local(engine.module.experts.weight.grad), plain.experts.weight.grad.float()
                    torch.testing.assert_close(gradient, expected[expert : expert + 1])
                    engine.zero_grad()


class ScaledInputs(StackedExperts):
    """Experts whose inputs are scaled by the weights, which then pass a function that is not linear."""

    def forward(self, tokens, index, weights):
        output = torch.zeros_like(tokens)
        for expert in range(self.num_experts):
            token, choice = torch.where(index == expert)
            rows = torch.tanh((tokens[token] * weights[token, choice, None]) @ self.weight[expert])
            output = output.index_add(0, token, rows)
        return output


def with_scaled_inputs(frozen):
    model = mixture()
    model.experts.__class__ = ScaledInputs
    if frozen is not None:
        model.get_parameter(frozen).requires_grad_(False)
    return model


@on_ranks(4)
def test_experts_get_the_weights_of_their_tokens(world):
    """Whatever they do with them; also if the experts or the router are frozen."""
    x = tokens_for(0, 1, 1, 3, 3, 3, 2, 4)
    for frozen in (None, "experts.weight", "scale"):
        plain = with_scaled_inputs(None).double()
        F.mse_loss(plain(x.double()), torch.zeros(8, 8, dtype=torch.float64)).backward()
        with paramp.launch_from_torch({"parallel": {"expert": 4}}) as context:
            engine = engine_of(with_scaled_inputs(frozen), plan=PLAN)
            before = engine.full_state_dict()
            engine.forward_backward(*own_part(context, x, torch.zeros(8, 8)))
            engine.step()
            for name, value in engine.full_state_dict().items():
                gradient = torch.zeros_like(value) if name == frozen else plain.get_parameter(name).grad.float()
                torch.testing.assert_close((before[name] - value) / 0.1, gradient, rtol=1e-4, atol=2e-6, msg=name)


class Seen(StackedExperts):
    def forward(self, tokens, index, weights):
        self.seen = index, weights, tokens
        return super().forward(tokens, index, weights)


def in_order(index, weights, rows):
    return torch.tensor(sorted(torch.cat([index, weights, rows], 1).tolist()))


@on_ranks(4)
def test_experts_of_ones_own_get_a_row_for_each_choice_that_any_rank_made_of_them(world):
    """With the weight of the router, and their number on this rank as index; on all tensor ranks alike.

    An axis that is smaller than the data axis has the tokens of its own data ranks.
    """
    plain, given = layers(1), []
    plain[0].experts.register_forward_pre_hook(lambda _, args: given.extend(args))
    plain(tokens())
    hidden, index, weights = given
    for parallel in ({"expert": 4}, {"expert": 2, "tensor": 2}, {"expert": 2, "data": 4}):
        with paramp.launch_from_torch({"parallel": parallel}) as context:
            model = layers(1)
            model[0].experts.__class__ = Seen
            engine = engine_of(model, plan={"*.experts": "experts"})
            engine.forward_backward(*own_part(context, tokens(), tokens()))
            experts, count = engine.module[0].experts, 4 // parallel["expert"]
            data_ranks = {rank // context.tp.size for rank in dist.get_process_group_ranks(context.ep.group)}
            rank_of_token = torch.arange(16) // (16 // context.dp.size)
            is_here = torch.isin(rank_of_token, torch.tensor([*data_ranks]))[:, None]
            token, choice = torch.where(is_here & (index // count == context.coordinates["ep"]))
            expected = in_order(index[token, choice, None] % count, weights[token, choice, None], hidden[token])
            assert experts.num_experts == count
            assert experts.seen[0].shape == experts.seen[1].shape == (len(token), 1)
            torch.testing.assert_close(in_order(*experts.seen), expected)


@on_ranks(4)
def test_an_overflow_in_an_expert_skips_the_step_of_all(world):
    for parallel in ({"data": 4}, {"data": {"shard": 4}}, {"data": {"replicate": 2, "shard": 2}}):
        config = {"precision": "16-mixed", "parallel": {"expert": 2, **parallel}}
        with paramp.launch_from_torch(config) as context:
            engine = engine_of(mixture(), plan=PLAN)
            x, y = own_part(context, tokens_for(*range(4), *range(4)), torch.zeros(8, 8))
            before = engine.full_state_dict()
            engine.forward_backward(x, y)
            if context.rank == 3:
                local(engine.module.experts.weight.grad)[-1, 2, 3] = float("inf")
            scale, result = engine.scaler.get_scale(), engine.step()
            assert (result.stepped, result.overflow, engine.scaler.get_scale()) == (False, True, scale / 2)
            assert all(torch.equal(value, before[key]) for key, value in engine.full_state_dict().items())
            assert not engine.check_replicas()


@on_ranks(4)
def test_replicas_of_experts_that_drift_apart_are_found(world):
    """Where replicas of the shards have the same experts, and nowhere else."""
    for parallel, found in ({"replicate": 2, "shard": 2}, True), ({"shard": 4}, False):
        with paramp.launch_from_torch({"parallel": {"data": parallel, "expert": 2}}) as context:
            engine = engine_of(mixture(), plan=PLAN)
            if context.rank == 3:
                local(engine.module.experts.weight)[-1, 2, 3] += 1.0
            names = [difference.parameter for difference in engine.check_replicas()]
            assert names == ["experts.weight"] * found


CHAINS = {
    "sharded": (
        *({"expert": 4}, {"data": {"shard": 4}, "expert": 2}, {"data": 4, "expert": 2, "zero": 1}),
        *({"data": {"replicate": 2, "shard": 2}, "expert": 2}, {"expert": 2, "tensor": 2}),
    ),
    "whole": (
        {"expert": 2, "tensor": 2},
        {"data": {"shard": 4}},
        {"data": {"shard": 4}, "expert": 4},
        {"tensor": 4},
        {"data": 4},
    ),
}


@pytest.mark.parametrize("chain", rarely(CHAINS, "sharded"))
@on_ranks(4)
def test_checkpoints_are_loaded_on_other_sizes_of_the_axis(world, chain):
    """With optimizer state, masters of half-precision weights, averages, and parts of ZeRO and FSDP2, to the bit."""
    folder = shared_folder()
    saved = averages = None
    config = {"precision": {"mode": "16-naive", "init_scale": 128.0}, "ema": {"decay": 0.5}}
    for index, parallel in enumerate(CHAINS[chain]):
        with paramp.launch_from_torch({**config, "parallel": parallel}) as context:
            adamw = lambda parameters: torch.optim.AdamW(parameters, lr=0.1)  # noqa: E731
            engine = engine_of(mixture(), optimizer=adamw, plan=PLAN if "expert" in parallel else {})
            x, y = own_part(context, tokens_for(*range(4), *range(4)), torch.zeros(8, 8))
            if index:
                engine.load(f"{folder}/{index - 1}")
                assert_same_tensors(engine.full_state_dict(), saved)
                assert_same_tensors(engine.ema.full_state_dict(), averages)
            else:
                engine.forward_backward(x.half(), y)
                assert engine.step().stepped
            saved, averages = engine.full_state_dict(), engine.ema.full_state_dict()
            engine.save(f"{folder}/{index}")
            if index:  # the optimizer's state and masters too
                assert_same_checkpoints(f"{folder}/{index}", f"{folder}/{index - 1}")
            engine.forward_backward(x.half(), y)
            assert engine.step().stepped
            masters, found = engine.full_state_dict(), engine.ema.full_state_dict()
            assert not torch.equal(masters["experts.weight"], saved["experts.weight"])
            for name, value in found.items():  # by the decay of 0.5
                torch.testing.assert_close(value, (averages[name] + masters[name]) / 2)


@on_ranks(4)
def test_fewer_experts_than_ranks_are_sharded_over_their_next_dim(world):
    """Each rank of the expert axis has one of two experts, and two ranks half of its matrix each."""
    folder, x = shared_folder(), tokens_for(0, 1, 1, 0, 1, 1, 1, 1)
    plain = mixture(2).double()
    F.mse_loss(plain(x.double()), torch.zeros(8, 8, dtype=torch.float64)).backward()
    with paramp.launch_from_torch({"parallel": {"data": {"shard": 4}, "expert": 2}}) as context:
        engine = engine_of(mixture(2), plan=PLAN)
        assert context.mesh.mesh_dim_names == ("pp", "dp_replicate", "efsdp", "ep", "tp")
        assert context.shard_mesh.mesh_dim_names == ("pp", "dp_replicate", "dp_shard", "tp")
        assert local(engine.module.experts.weight).shape == (1, 4, 8)
        engine.forward_backward(*own_part(context, x, torch.zeros(8, 8)))
        engine.step()
        for name, value in engine.full_state_dict().items():
            parameter = plain.get_parameter(name)
            torch.testing.assert_close(value, (parameter - 0.1 * parameter.grad).float())
        saved = engine.full_state_dict()
        engine.save(f"{folder}/saved")
    with paramp.launch_from_torch({"parallel": {"data": {"shard": 4}}}) as context:
        assert context.shard_mesh is context.mesh
        engine = engine_of(mixture(2))
        engine.load(f"{folder}/saved")
        assert_same_tensors(engine.full_state_dict(), saved)


@on_ranks(2)
def test_data_ranks_evaluate_as_many_batches(world):
    """The one with fewer runs its last batch again, for the tokens of the other."""
    with paramp.launch_from_torch({"parallel": {"expert": 2}}) as context:
        engine = engine_of(mixture(), plan=PLAN)
        batches = [(tokens_for(0, 1, 2, 3), torch.zeros(4, 8))] * (2 + context.dp.rank)
        loss = float(engine.evaluate(batches))
        assert loss == pytest.approx(F.mse_loss(mixture()(batches[0][0]), batches[0][1]).item(), rel=1e-6)


@on_ranks(4)
def test_experts_or_routers_that_are_frozen_stay(world):
    """The others are those of one process; also with ranks that shard experts."""
    x, y = tokens(), torch.zeros(16, WIDTH)
    for frozen in ("experts", "router"):
        plain = layers()
        freeze(plain, frozen)
        optimizer = torch.optim.SGD([one for one in plain.parameters() if one.requires_grad], lr=0.1)
        F.mse_loss(plain(x), y).backward()
        optimizer.step()
        for parallel in ({"data": 4, "expert": 2}, {"data": {"shard": 4}, "expert": 2}):
            with paramp.launch_from_torch({"parallel": parallel}) as context:
                model = layers()
                freeze(model, frozen)
                engine = engine_of(model, plan={"*.experts": "experts"})
                engine.forward_backward(*own_part(context, x, y))
                assert engine.step().stepped
                for name, value in engine.full_state_dict().items():
                    torch.testing.assert_close(value, plain.state_dict()[name], msg=f"{parallel} {name}")
                    assert torch.equal(value, layers().state_dict()[name]) == (frozen in name)


def freeze(model, part):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(part not in name)


@on_ranks(4)
def test_an_expert_axis_of_a_given_mesh_is_refused_beside_one_that_shards_parameters(world):
    """Those of other modules would be sharded over two of its axes, which no mesh of others has as one."""
    for given, message in (
        ((2, 2), r"got the axes efsdp, ep, expected none for experts"),
        ((4, 1), r"parallel.expert: got 2, but the mesh has no axis of 2 ranks for experts; make one with the name ep"),
    ):
        mesh = init_device_mesh("cpu", given, mesh_dim_names=("efsdp", "ep"))
        context = paramp.ParallelContext.from_mesh(mesh, {"parallel": {"expert": 2}})
        with context, pytest.raises(paramp.ConfigError, match=message):
            engine_of(mixture(), plan=PLAN)


@on_ranks(2)
def test_what_cannot_be_sharded_is_refused_by_name(world):
    sizes = r"parallel.expert: got 4, expected a divisor of 2"
    refused = [
        ({"expert": 4, "data": {"shard": 2}}, PLAN, f"{sizes}, because data.shard is 2"),
        ({"expert": 4, "data": 2}, PLAN, sizes),
        ({"expert": 2}, {}, r"the plan of Mixture names no experts"),
        ({"expert": 2}, {"enter": "experts"}, r"'enter' is a Linear with num_experts None"),
    ]
    for parallel, plan, message in refused:
        config = {"precision": "16-mixed", "parallel": parallel}
        with pytest.raises(paramp.ConfigError, match=message), paramp.launch_from_torch(config):
            engine_of(mixture(), plan=plan)


def of_submodule(experts):
    experts.inside = nn.Module()
    experts.inside.weight = nn.Parameter(torch.randn(4, 8))


def of_buffer(experts):
    experts.register_buffer("offsets", torch.zeros(4, 8))


class Counting(Experts):
    num_experts = property(lambda experts: len(experts.weight))


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
        r"'experts' is a Counting with num_experts as a property": lambda one: setattr(one, "__class__", Counting),
        r"'experts' has a forward that was set on the object": lambda one: setattr(one, "forward", lambda *inputs: 0),
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
