"""Mixtures of transformers on every layout with an expert axis, against one process in fp64 with eager experts."""

import functools
import itertools

import pytest
import torch
from families import cases, family, number, rarely
from mixtures import FAMILIES, batch, build
from pool import of_rank_0, on_ranks, run_on_ranks, shared_folder
from reference import farthest, small_moe
from small_engines import assert_same_checkpoints, assert_same_tensors, engine_of, own_part

import paramp
from paramp.base.dtensor import local
from paramp.models import MoEGPT

LAYOUTS = {
    2: {"ep2": {"expert": 2}, "fsdp·ep2": {"data": {"shard": 2}, "expert": 2}},
    4: {
        "ep2·tp2": {"expert": 2, "tensor": 2},
        "ep4": {"expert": 4},
        "dp2·ep2": {"data": 4, "expert": 2},
        "dp2·ep2 + zero1": {"data": 4, "expert": 2, "zero": 1},
        "ep2·pp2": {"expert": 2, "pipeline": 2},
        "fsdp2·ep2": {"data": {"shard": 4}, "expert": 2},
        "hsdp·ep2": {"data": {"replicate": 2, "shard": 2}, "expert": 2},
        "fsdp·ep2·pp2": {"data": {"shard": 2}, "expert": 2, "pipeline": 2},
        "fsdp·ep2·tp2": {"data": {"shard": 2}, "expert": 2, "tensor": 2},
        "fsdp2·cp2·ep2": {"data": {"shard": 2}, "context": 2, "expert": 2},
    },
    8: {
        "fsdp2·ep2·pp2": {"data": {"shard": 4}, "expert": 2, "pipeline": 2},
        "fsdp2·ep2·tp2": {"data": {"shard": 4}, "expert": 2, "tensor": 2},
        "fsdp4·cp2·ep2": {"data": {"shard": 4}, "context": 2, "expert": 2},
        "dp2·cp2·ep2": {"data": 4, "context": 2, "expert": 2},
        "hsdp2·fsdp2·ep2": {"data": {"replicate": 2, "shard": 4}, "expert": 2},
    },
}
"""By the number of ranks. Two that shard parameters shard experts over no axis but that of experts."""
PART = [("Mixtral", "fsdp2·ep2", "SGD"), ("GPT-OSS", "fsdp·ep2", "AdamW"), ("Qwen3-MoE", "fsdp2·ep2·pp2", "SGD")]
SLICES = {"model.layers.*.mlp.experts": "expert_slices"}
"""transformers' plan of GPT-OSS over tensor ranks leaves the experts out, those of the others do not."""
LARGE_LR = 8.0
"""So large that a weight's change in one step shows its gradient to the last bits."""
NUM_STEPS, OVERFLOW = number(5, 9), 2
"""Of the longer training, and its step that is to be skipped. In a tenth step a token of GPT-OSS has two experts whose
scores differ by 5e-7: fp32 may choose the other one, and fp64 is no reference for it."""
OPTIMIZERS = {
    "SGD": functools.partial(torch.optim.SGD, lr=0.5),
    # An eps far above the rounding errors of gradients: Adam would make large steps of those.
    "AdamW": functools.partial(torch.optim.AdamW, lr=0.01, eps=1e-3),
}
WAY = 2.0
"""How far each weight's way may be off, in units of how far it is off in fp32 on one process, which is 6e-6 to 1e-4 of
the way; up to 1.1 are measured."""


CELLS = [
    (size, *cell)
    for size, layouts in LAYOUTS.items()
    for cell in cases(f"expert layouts {size}", [*itertools.product(FAMILIES, layouts, OPTIMIZERS)], PART, 1)
]


@functools.cache
def initial(name):
    return build(name, num_experts=4).state_dict()


@functools.cache
def reference(name):
    """The gradients of one batch and the norm of all."""
    model = build(name, num_experts=4).double()
    tokens = batch(8)
    model(input_ids=tokens, labels=tokens).loss.backward()
    grads = {key: value.grad.clone() for key, value in model.named_parameters() if value.grad is not None}
    return grads, torch.stack([grad.norm() for grad in grads.values()]).norm().item()


@functools.cache
def trained(name, kind, dtype=torch.float64):
    """The weights after the longer training."""
    model = build(name, num_experts=4).to(dtype)
    optimizer = OPTIMIZERS[kind](model.parameters())
    for step, tokens in enumerate(batch(8 * NUM_STEPS).split(8)):
        if step != OVERFLOW:
            optimizer.zero_grad()
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
    return {key: value.detach() for key, value in model.named_parameters()}


def ways(name, weights):
    """How far each weight has gone."""
    return {key: weights[key].double() - value.double() for key, value in initial(name).items() if key in weights}


def engine_for(name, layout, optimizer):
    model = build(name, "grouped_mm" if "zero1" in layout else "eager", num_experts=4)
    return engine_of(model, None, optimizer, plan=SLICES if name == "GPT-OSS" and "tp2" in layout else None)


def stacks_of(engine):
    return [value for key, value in engine.module.named_parameters() if key.endswith("experts.down_proj")]


def check_gradients(engine, context, name, grads, norm):
    """Make a step of SGD with :data:`LARGE_LR`, whose gradients are ``grads``, of the norm ``norm``."""
    (tokens,) = own_part(context, batch(8))
    engine.forward_backward({"input_ids": tokens, "labels": tokens})
    assert float(engine.step().grad_norm) == pytest.approx(norm, rel=1e-6)
    before, after = initial(name), engine.full_state_dict()
    found = {key: (before[key].double() - after[key].double()) / LARGE_LR for key in grads}
    assert (error := farthest(found, grads))[0] <= 1e-5, error


def check_cell(world, name, layout, kind):
    parallel = LAYOUTS[world.size][layout]
    of_one_process = of_rank_0(reference, name)
    expected, in_fp32 = of_rank_0(trained, name, kind), of_rank_0(trained, name, kind, torch.float32)
    with paramp.launch_from_torch({"parallel": parallel}) as context:
        engine = engine_for(name, layout, functools.partial(torch.optim.SGD, lr=LARGE_LR))
        check_gradients(engine, context, name, *of_one_process)
        is_sharded = isinstance(parallel.get("data"), dict)
        shards = parallel["data"]["shard"] * parallel.get("context", 1) if is_sharded else parallel["expert"]
        shards *= parallel.get("tensor", 1)
        assert all(local(value).numel() * shards == value.numel() for value in stacks_of(engine))
        rest = parallel["data"]["shard"] * parallel.get("context", 1) if is_sharded else 1
        norms = [value for key, value in engine.named_parameters() if key.endswith("input_layernorm.weight")]
        assert {value.numel() / local(value).numel() for value in norms} == {rest}
        others = [value for key, value in engine.named_parameters() if ".experts." not in key]
        cut = 1 if name == "GPT-OSS" else parallel.get("tensor", 1)  # whose plan here has the experts only
        assert rest * cut in {value.numel() / max(local(value).numel(), 1) for value in others}

        engine = engine_for(name, layout, OPTIMIZERS[kind])
        for step, tokens in enumerate(batch(8 * NUM_STEPS).split(8)):
            (tokens,) = own_part(context, tokens)
            engine.forward_backward({"input_ids": tokens, "labels": tokens})
            if step == OVERFLOW and context.rank == context.world_size - 1:
                local(stacks_of(engine)[-1].grad).view(-1)[-1] = float("inf")
            assert engine.step().stepped == (step != OVERFLOW)
        found = engine.full_state_dict()
        assert (error := farthest(found, expected))[0] <= 1e-5, error
        of_fp32 = farthest(ways(name, in_fp32), ways(name, expected))
        error = farthest(ways(name, {key: found[key] for key in expected}), ways(name, expected))
        assert error[0] <= WAY * of_fp32[0], (error, of_fp32)
        assert not engine.check_replicas()


@family
@pytest.mark.parametrize(("size", "name", "layout", "kind"), CELLS)
def test_gradients_and_a_training_are_those_of_one_process(size, name, layout, kind):
    run_on_ranks(size, __name__, "check_cell", {"name": name, "layout": layout, "kind": kind})


@on_ranks(4)
def test_without_a_plan_tensor_ranks_compute_whole_experts_of_gpt_oss(world):
    of_one_process = of_rank_0(reference, "GPT-OSS")
    with paramp.launch_from_torch({"parallel": LAYOUTS[4]["ep2·tp2"]}) as context:
        engine = engine_of(build("GPT-OSS", num_experts=4), None, functools.partial(torch.optim.SGD, lr=LARGE_LR))
        assert all(local(value).numel() * 2 == value.numel() for value in stacks_of(engine))
        check_gradients(engine, context, "GPT-OSS", *of_one_process)
        assert not engine.check_replicas()


CHAINS = {
    "cut sequences": (LAYOUTS[4]["fsdp2·cp2·ep2"], LAYOUTS[4]["ep4"], LAYOUTS[4]["fsdp2·cp2·ep2"]),
    "slices": (LAYOUTS[4]["ep2·tp2"], LAYOUTS[4]["ep4"], LAYOUTS[4]["fsdp·ep2·tp2"]),
}
"""Layouts in which each of four ranks has a quarter of the experts' weights."""


@pytest.mark.parametrize("chain", rarely(CHAINS, "slices"))
@on_ranks(4)
def test_checkpoints_go_to_and_from_experts_beside_cut_sequences_and_in_slices(world, chain):
    """With the optimizer's state, masters of half-precision weights and averages, to the bit."""
    folder, saved = shared_folder(), None
    config = {"precision": {"mode": "16-naive", "init_scale": 128.0}, "ema": {"decay": 0.5}}
    for index, parallel in enumerate(CHAINS[chain]):
        with paramp.launch_from_torch({**config, "parallel": parallel}) as context:
            engine = engine_of(small_moe(), MoEGPT.loss, OPTIMIZERS["AdamW"])
            stacks = [one for name, one in engine.named_parameters() if "experts" in name]
            assert all(local(one).numel() * 4 == one.numel() for one in stacks)
            if index:
                engine.load(f"{folder}/{index - 1}")
            else:
                engine.forward_backward(*own_part(context, batch(8), batch(8)))
                assert engine.step().stepped
            found = [engine.full_state_dict(), engine.ema.full_state_dict()]
            saved = saved or found
            for one, expected in zip(found, saved, strict=True):
                assert_same_tensors(one, expected)
            engine.save(f"{folder}/{index}")
            if index:
                assert_same_checkpoints(f"{folder}/{index}", f"{folder}/{index - 1}")
