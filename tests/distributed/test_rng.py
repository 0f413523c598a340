"""The same start in every layout; dropout that differs where it must and nowhere else."""

import pytest
import torch
from families import rarely
from pool import on_ranks
from reference import SMALL, batches
from small_engines import assert_same_tensors, engine_of, everywhere, gpt_engine, train_step
from torch import nn
from torch.utils.checkpoint import checkpoint

import paramp
from paramp.distributed import random_across_tensor_ranks
from paramp.distributed.random_across_tensor_ranks import replicated_random, sharded_random
from paramp.models import GPT
from paramp.models.transformer import Attention
from paramp.parallel.materialize import materialize

LAYOUTS = [{"pipeline": 2, "tensor": 2}, {"data": 2, "tensor": 2, "sequence_parallel": True}, {"pipeline": 4}]


def meta_gpt():
    with torch.device("meta"):
        return GPT(SMALL)


def filled(seed=5):
    model = meta_gpt()
    materialize(model, seed, torch.device("cpu"))
    return model.state_dict()


@pytest.mark.parametrize("parallel", LAYOUTS)
@on_ranks(4)
def test_a_model_on_meta_starts_the_same_in_every_layout(world, parallel):
    with paramp.launch_from_torch({"parallel": parallel, "seed": 5}):
        engine, *_ = paramp.initialize(meta_gpt, lambda parameters: torch.optim.SGD(parameters, lr=0.1))
        assert_same_tensors(engine.full_state_dict(), filled())


@on_ranks(4)
def test_a_model_built_after_launch_is_the_same_on_every_rank(world):
    """And shuffled loaders agree within a model group."""
    with paramp.launch_from_torch({"parallel": {"pipeline": 2, "tensor": 2}, "seed": 11}):
        model = GPT(SMALL)
        first = model.head.weight[0, 0].item()
        assert everywhere(first) == [first] * 4
        engine_of(model, model.loss)
        order = next(iter(torch.utils.data.DataLoader(range(50), shuffle=True, batch_size=50))).tolist()
        assert everywhere(order) == [order] * 4
    torch.manual_seed(11)
    assert GPT(SMALL).head.weight[0, 0].item() == first


class Draws(nn.Module):
    """Records a number of the stage's stream, one for shards, and one more of the stage's."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.drawn = []

    def forward(self, x):
        before = torch.rand(()).item()
        with sharded_random():
            sharded = torch.rand(()).item()
        self.drawn.append((before, sharded, torch.rand(()).item()))
        return x * self.weight


@on_ranks(8)
def test_streams_differ_over_pp_and_dp_and_over_tp_only_for_shards(world):
    with paramp.launch_from_torch({"parallel": {"pipeline": 2, "data": 2, "tensor": 2}}) as context:
        engine = engine_of(nn.Sequential(Draws(), Draws()), plan={})
        torch.manual_seed(0)
        engine.forward_backward(torch.ones(4, 1), torch.ones(4, 1))
        outside = torch.rand(()).item()
        (unit,) = engine.module.children()
        seen = everywhere(((context.pp.rank, context.dp.rank), unit.drawn[-2:]))
    torch.manual_seed(0)
    assert outside == torch.rand(()).item()  # the default stream goes on as if nothing had been drawn
    stages = dict(seen)
    assert len({draws[0][0] for draws in stages.values()}) == 4
    for place, draws in seen:
        for (before, _, after), (first, _, last) in zip(draws, stages[place], strict=True):
            assert (before, after) == (first, last)
    sharded = [sharded for _, draws in seen for _, sharded, _ in draws]
    assert len(set(sharded)) == 16  # eight ranks, two microbatches


@pytest.mark.parametrize(("axis", "plan"), [("tensor", {"0": "sequence"}), ("context", {})])
@on_ranks(2)
def test_a_module_on_slices_of_the_sequence_draws_other_numbers_on_each_rank(world, axis, plan):
    with paramp.launch_from_torch({"parallel": {axis: 2}}):
        engine = engine_of(nn.Sequential(Draws()), plan=plan)
        engine.forward_backward(torch.ones(2, 4, 1), torch.ones(2, 4, 1))
        (unit,) = engine.module.children()
        first, second = everywhere(unit.drawn[-1])
    assert not {*first} & {*second}


@on_ranks(2)
def test_checkpointed_dropout_on_shards_draws_the_same_mask_again(world):
    with paramp.launch_from_torch({"parallel": {"tensor": 2}}):
        x = torch.ones(1000, requires_grad=True)

        def drop(value):
            with sharded_random():
                return nn.functional.dropout(value, 0.5)

        output = checkpoint(drop, x, use_reentrant=False)
        output.sum().backward()
        assert torch.equal(output.detach(), x.grad)
        first, second = everywhere(output.tolist())
        assert first != second


@pytest.mark.parametrize("sequence_parallel", rarely([False, True], True))
@on_ranks(4)
def test_dropout_in_the_model_follows_the_rule(world, sequence_parallel):
    """tp 4: masks on replicated activations are equal, masks on pieces of the sequence are not; again the same ones."""
    runs, parallel = [], {"tensor": 4, "sequence_parallel": sequence_parallel}
    for _ in range(2):
        masks = {}
        with paramp.launch_from_torch({"parallel": parallel}) as context:
            engine = gpt_engine(dropout=0.5)
            for name, module in engine.module.named_modules():
                if isinstance(module, Attention):  # whatever context is opened later
                    assert module.tensor_place == (context.tp.rank, 4, context.device)
                if isinstance(module, nn.Dropout):
                    module.register_forward_hook(
                        lambda _, inputs, output, masks=masks, name=name: masks.update({name: (output == 0).tolist()})
                    )
            losses = [train_step(engine, *batch).loss for batch in batches(2)]
        runs.append((losses, everywhere(masks)))
    assert runs[0] == runs[1]
    (*_, gathered), embedding, block = runs[0], "embedding.dropout", "blocks.0.dropout"
    assert all(other[embedding] == gathered[0][embedding] for other in gathered)
    assert len({str(other[block]) for other in gathered}) == (4 if sequence_parallel else 1)


def test_filling_a_model_on_meta_seeds_no_gpu(monkeypatch):
    """Its values depend on seed and name; all generators, which belong to the user, stay as they are."""
    seeded = []
    for name in ("manual_seed", "manual_seed_all"):
        monkeypatch.setattr(torch.cuda, name, seeded.append)
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: False)
    torch.manual_seed(7)
    assert seeded == [7]  # torch seeds every GPU
    before = torch.get_rng_state()
    start, other = filled(5), filled(6)
    assert not torch.equal(start["blocks.0.mlp.up.weight"], start["blocks.1.mlp.up.weight"])
    assert not torch.equal(other["head.weight"], start["head.weight"])
    assert torch.equal(other["head.weight"], other["embedding.tokens.weight"])
    assert seeded == [7]
    assert torch.equal(torch.get_rng_state(), before)


def test_dropout_on_shards_seeds_no_gpu(monkeypatch):
    """The generators of the context's device, here the CPU's, are restored; those of others must stay as they are."""
    seeded = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    monkeypatch.setattr(random_across_tensor_ranks, "TENSOR_PLACES", [(1, 2, torch.device("cpu"))])
    before = torch.get_rng_state()
    with sharded_random():
        sharded = torch.rand(())
        with replicated_random():
            assert torch.rand(()) != sharded
    assert not torch.equal(torch.get_rng_state(), before)  # the stream's seed was drawn from it
    assert seeded == []
