"""Units of FSDP2 over the stages of a rank."""

import functools

import pytest
import torch
from counting import Collectives
from pool import on_ranks
from torch import nn

import paramp
from paramp.parallel.fsdp.checks import is_unit
from paramp.parallel.fsdp.records import groups


@on_ranks(4)
def test_a_parameter_in_two_stages_of_one_rank_is_refused(world):
    pipeline = {"size": 2, "schedule": "interleaved-1f1b", "split": ["1", "2", "3"]}
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    model[2].weight = model[0].weight
    with paramp.launch_from_torch({"parallel": {"pipeline": pipeline, "data": {"shard": 2}}}):
        found = "'0.weight' and '2.weight' are one parameter, in two stages of pipeline rank 0, expected one stage"
        with pytest.raises(paramp.ConfigError, match=found):
            paramp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.functional.mse_loss)


class SomeBlocks(nn.Module):
    """Runs the first block, and one of the two others."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))
        self.chosen = 1

    def forward(self, x):
        return self.blocks[self.chosen](self.blocks[0](x))


@on_ranks(2)
def test_data_ranks_that_run_different_blocks_raise_at_the_step(world):
    """The blocks have equal shapes: without a check each rank would compute with halves of two blocks."""
    torch.manual_seed(0)
    model = SomeBlocks()
    with paramp.launch_from_torch({"parallel": {"data": {"shard": 2}}}):
        engine, *_ = paramp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.functional.mse_loss)
        for chosen in (1, 2):  # the same on both ranks
            engine.module.chosen = chosen
            engine.evaluate(torch.ones(2, 4), torch.zeros(2, 4))
            engine.forward_backward(torch.ones(2, 4), torch.zeros(2, 4))
            assert engine.step().stepped
        before = engine.full_state_dict()
        engine.module.chosen = 1 + world.rank
        engine.forward_backward(torch.ones(2, 4), torch.zeros(2, 4), return_loss=False)
        with pytest.raises(RuntimeError, match="data ranks ran different blocks of the model"):
            engine.step()
        after = engine.full_state_dict()
        assert all(torch.equal(value, after[name]) for name, value in before.items())


@on_ranks(2)
def test_what_was_gathered_early_and_not_used_is_gathered_again(world):
    """The forward of the first block begins to gather the second, which the evaluation leaves out."""
    with paramp.launch_from_torch({"parallel": {"data": {"shard": 2, "prefetch": 1}}}):
        model = SomeBlocks()
        engine, *_ = paramp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.functional.mse_loss)
        x, y = torch.ones(2, 4), torch.zeros(2, 4)
        engine.module.chosen = 2
        engine.evaluate(x, y)
        with torch.no_grad():
            for parameter in engine.parameters():
                parameter.to_local().mul_(2.0)
        engine.module.chosen = 1
        plain = SomeBlocks()
        plain.load_state_dict(engine.full_state_dict())
        torch.testing.assert_close(engine.evaluate(x, y), nn.functional.mse_loss(plain(x), y).detach())


def gathered_early(engine):
    """A list that gets, when a block begins to compute, its name and the blocks that are gathered or about to be."""
    blocks = {name: module for name, module in engine.module.named_modules() if name and is_unit(module)}
    seen = []

    def see(name, *_):
        found = (other for other, block in blocks.items() for group in groups(block) if group._all_gather_result)
        seen.append((name, [*found]))

    for name, block in blocks.items():
        block[0].register_forward_pre_hook(functools.partial(see, name))
    return seen


@on_ranks(2)
def test_prefetch_gathers_the_next_blocks_while_one_computes(world):
    following = ["1", "2", "3"]
    for count in (0, 1, 2):
        with paramp.launch_from_torch({"parallel": {"data": {"shard": 2, "prefetch": count}}}):
            model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)))
            engine, *_ = paramp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.functional.mse_loss)
            seen = gathered_early(engine)
            engine.evaluate(torch.ones(2, 4), torch.zeros(2, 4))
        assert seen == [(str(index), following[index : index + count]) for index in range(4)]


@on_ranks(4)
def test_prefetch_with_several_stages_on_a_rank(world):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(8)))
    x, y = torch.randn(2, 8, 4)
    expected = nn.functional.mse_loss(model(x), y).detach()
    pipeline = {"size": 2, "schedule": "interleaved-1f1b"}
    with paramp.launch_from_torch({"parallel": {"pipeline": pipeline, "data": {"shard": 2, "prefetch": 1}}}) as context:
        engine, *_ = paramp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.functional.mse_loss)
        own = slice(4 * context.dp.rank, 4 * context.dp.rank + 4)
        torch.testing.assert_close(engine.forward_backward(x[own], y[own]), expected)
        assert engine.step().stepped
        seen = gathered_early(engine)
        engine.evaluate(x[own], y[own])
        ends = [4, 8] if context.pp.rank else [2, 6]  # of the rank's stages, whose blocks are gathered only for them
        for name, early in seen:
            assert early in ([], [] if int(name) + 1 in ends else [str(int(name) + 1)])
        assert any(early for _, early in seen)


def gathered_now(engine):
    """The units whose parameters this rank has in whole; "" is the rest of the model, of each stage one."""
    units = {name: module for name, module in engine.module.named_modules() if is_unit(module)}
    return [name for name, unit in units.items() if any(group.is_unsharded for group in groups(unit))]


class Chain(nn.Module):
    """Four equal blocks between two layers, which are the rest of the model."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


@pytest.mark.parametrize(("kept", "calls"), [(False, False), (False, True), (True, False)])
@on_ranks(2)
def test_blocks_are_gathered_one_after_another_and_freed(world, kept, calls):
    """By ``forward_backward``, or by ``engine(x)`` and ``engine.backward(loss)``."""
    x, y = torch.ones(2, 4), torch.zeros(2, 4)
    with paramp.launch_from_torch({"parallel": {"data": {"shard": 2, "reshard_after_forward": not kept}}}):
        model = Chain()
        engine, *_ = paramp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.functional.mse_loss)
        forward, backward = [], []
        for index, block in enumerate(model.blocks):

            def see(module, inputs, output, index=index):
                forward.append({*gathered_now(engine)})
                output.register_hook(lambda _: backward.append((index, {*gathered_now(engine)})))

            block[0].register_forward_hook(see)
        for _ in range(4):  # the first batches are compared between ranks
            forward.clear()
            backward.clear()
            with Collectives() as collectives:
                if calls:
                    engine.backward(engine.criterion(engine(x), y))
                else:
                    engine.forward_backward(x, y, return_loss=False)
            assert gathered_now(engine) == []
            engine.step()
            engine.zero_grad()
        names = [f"blocks.{index}" for index in range(4)]
        again = 5 if calls else 0 if kept else 4
        assert collectives.counts["allgather"] == 5 + again
        if kept:
            assert forward == [{"", *names[: index + 1]} for index in range(4)]
        else:
            assert forward == [{"", name} for name in names]
            assert [index for index, _ in backward] == [3, 2, 1, 0]
            assert all({"", names[index]} == found for index, found in backward), backward


@on_ranks(4)
def test_under_a_pipeline_a_stage_stays_gathered_for_a_batch(world):
    pipeline = {"size": 2, "microbatches": 3, "split": ["blocks.2"]}
    with paramp.launch_from_torch({"parallel": {"pipeline": pipeline, "data": {"shard": 2}}}) as context:
        model = Chain()
        engine, *_ = paramp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.functional.mse_loss)
        own = {"", *(f"blocks.{2 * context.pp.rank + index}" for index in range(2))}
        x, seen = torch.ones(3, 4), []
        for _ in range(4):  # the first finds shapes, and several are compared between ranks
            engine.forward_backward(x, x)
        layer = engine.module.get_submodule(max(own))[0]
        layer.register_forward_hook(lambda *_: seen.append({*gathered_now(engine)}))
        layer.register_full_backward_hook(lambda *_: seen.append({*gathered_now(engine)}))
        with Collectives() as collectives:
            engine.forward_backward(x, x)
        assert seen == [own] * 6
        assert collectives.counts["allgather"] == collectives.counts["reduce_scatter"] == len(own)
        assert gathered_now(engine) == []


@on_ranks(2)
def test_models_that_data_ranks_cannot_train_together_are_refused(world):
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    table = nn.Sequential(nn.Embedding(4, 4, max_norm=1.0), nn.Linear(4, 4))
    parts = nn.ParameterDict({"phase": nn.Parameter(torch.ones(3, dtype=torch.complex64))})
    for data in (2, {"shard": 2}):
        with paramp.launch_from_torch({"parallel": {"data": data}}):
            with pytest.raises(paramp.ConfigError, match=r"'0' has max_norm=1, expected none, because each of 2 data"):
                paramp.initialize(table, sgd, nn.functional.mse_loss)
            if data != 2:
                with pytest.raises(paramp.ConfigError, match=r"'phase' has the dtype torch.complex64, expected a real"):
                    paramp.initialize(parts, sgd, nn.functional.mse_loss)


@on_ranks(2)
def test_a_scripted_module_is_refused_by_name(world):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.warns((DeprecationWarning, FutureWarning), match="script"):
        model[1] = torch.jit.script(model[1])
    for config in ({"parallel": {"data": {"shard": 2}}}, {"precision": "bf16-naive"}, {"precision": "16-true"}):
        found = pytest.raises(paramp.ConfigError, match=r"model: '1' is a module of torch.jit, expected a plain one")
        with paramp.launch_from_torch(config), found:
            paramp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.functional.mse_loss)


@on_ranks(4)
def test_a_batch_of_another_shape_drops_no_gradients_of_the_window(world):
    """torch's pipeline prepares for the shape of each batch, and drops gradients of sharded parameters as it does."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))
    batches = [tuple(torch.randn(2, 8, length, 8)) for length in (3, 5)]
    losses = [nn.functional.mse_loss(model(x), y) for x, y in batches]
    (sum(losses) / 2).backward()
    expected = torch.stack([parameter.grad.double().square().sum() for parameter in model.parameters()]).sum().sqrt()
    config = {"parallel": {"pipeline": 2, "data": {"shard": 2}}, "gradient_accumulation": 2}
    with paramp.launch_from_torch(config) as context:
        engine, *_ = paramp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.functional.mse_loss)
        for x, y in batches:
            engine.forward_backward(*(one.chunk(2)[context.batch_axis.rank] for one in (x, y)))
            result = engine.step()
        torch.testing.assert_close(float(result.grad_norm), float(expected), rtol=1e-5, atol=0)
