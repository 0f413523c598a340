"""Parameters sharded over data ranks: what is summed, gathered, sent and kept."""

import copy
import dataclasses
import gc
import itertools
import re

import pytest
import torch
from beside_plain import adamw, assert_weights, randn, seeded
from counting import Collectives
from families import rarely
from pool import on_ranks
from reference import local, small_gpt
from small_engines import assert_same_tensors, engine_of, own_part, train_step
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

import paramp
from paramp.models import GPT
from paramp.precision.modes import PRESETS

FSDP2 = {"data": {"shard": 2}}
SMALL = 2.0**-9
"""1 + 2**-9 is 1.001953125 in fp32 and 1.0 in bf16."""
FP16_WITHOUT_SCALE = {"mode": "16-naive", "init_scale": 1.0}
FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32


def bias_gradient(context, reduce_dtype, parts, precision="bf16-naive"):
    """The gradient of the bias of a norm under sequence parallelism, of which each data and tensor rank has a part.

    Args:
        parts: by data rank and tensor rank.
    """
    context.config = dataclasses.replace(context.config, precision=precision, reduce_dtype=reduce_dtype)
    model = nn.Sequential(nn.Identity(), nn.LayerNorm(4), nn.Identity())
    plan = {"0": "scatter_sequence", "1": "sequence", "2": "gather_sequence"}
    engine = engine_of(model, lambda output, target: (output * target).sum(), plan=plan)
    target = torch.zeros(1, 2, 4)  # of the sequence each tensor rank has one position
    target[0, :, 0] = torch.tensor(parts[context.batch_axis.rank]) * context.batch_axis.size  # losses are averaged
    with Collectives() as collectives:
        engine.forward_backward(torch.randn(1, 2, 4), target, return_loss=False)
    assert collectives.counts["allreduce"] == 2 + 1  # over tensor ranks of weight and bias; of the unit of counts
    gradient = dict(engine.named_parameters())["1.bias"].grad.full_tensor()
    assert not gradient[1:].any()
    return gradient[0].item()


@on_ranks(4)
def test_gradients_are_summed_in_reduce_dtype_over_every_axis(world):
    """pytorch #190626: ``reduce_dtype=float32`` was not honoured over the tensor axis."""
    over_tensor, over_data = [[1.0, SMALL], [0.0, 0.0]], [[1.0, 0.0], [SMALL, 0.0]]
    halves = [[0.5, SMALL / 2], [0.5, SMALL / 2]]
    with paramp.launch_from_torch({"parallel": FSDP2 | {"tensor": 2, "sequence_parallel": True}}) as context:
        for parts in (over_tensor, over_data, halves):
            assert bias_gradient(context, "float32", parts) == 1 + SMALL
            assert bias_gradient(context, None, parts) == 1.0  # in bf16, the mode's default
        assert bias_gradient(context, {"dp": "float32", "tp": "float32"}, halves) == 1 + SMALL
        assert bias_gradient(context, {"dp": "float32"}, over_data) == 1 + SMALL
        assert bias_gradient(context, {"tp": "float32"}, over_data) == 1.0
        smaller = [[1.0, 0.0], [SMALL / 8, 0.0]]
        assert bias_gradient(context, None, smaller, FP16_WITHOUT_SCALE) == 1.0  # in fp16
        assert bias_gradient(context, "float32", smaller, FP16_WITHOUT_SCALE) == 1 + SMALL / 8


@on_ranks(4)
def test_fsdp2_alone_sums_over_the_tensor_axis_in_the_dtype_of_the_parameters(world):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32)
    over_tensor = 1.0 if torch.__version__ < "2.15.0.dev0" else 1 + SMALL
    for parts, expected in (([1.0, SMALL, 0.0, 0.0], over_tensor), ([1.0, 0.0, SMALL, 0.0], 1 + SMALL)):
        norm = parallelize_module(nn.LayerNorm(4), mesh["tp"], SequenceParallel())
        fully_shard(norm, mesh=mesh["dp"], mp_policy=policy)
        output = norm(torch.randn(1, 1, 4)).to_local()  # of a sequence of two positions, one on each tensor rank
        (output[..., 0].sum() * parts[world.rank] * 2).backward()  # gradients are averaged over dp
        found = norm.bias.grad.full_tensor()[0].item()
        assert found == expected


@on_ranks(2)
def test_autocast_makes_no_copies_of_gathered_weights(world):
    """It would keep them until the backward. Weights are gathered as it would cast them, others in fp32."""
    found = []
    for parallel in (FSDP2, {"data": 2}):
        seen = set()
        with paramp.launch_from_torch({"parallel": parallel, "precision": "bf16-mixed"}) as context:
            model = seeded(lambda: nn.Sequential(*(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)) for _ in range(2))))
            for layer in model[0]:
                layer.register_forward_hook(lambda one, *_, seen=seen: seen.add((type(one), one.weight.dtype)))
            engine = engine_of(model)
            engine.forward_backward(*own_part(context, *randn(2, 8, 8)))
            assert engine.step().stepped
            found.append((seen, engine.full_state_dict()))
    (gathered, weights), (copies, expected) = found
    assert gathered == {(nn.LayerNorm, torch.float32), (nn.Linear, torch.bfloat16)}
    assert copies == {(nn.LayerNorm, torch.float32), (nn.Linear, torch.float32)}
    assert_same_tensors(weights, expected)  # each rank's gradient is rounded to bf16, their sum is not


@pytest.mark.parametrize(
    ("precision", "linear", "batch_norm"),
    [("16-naive", FP16, FP16), ("bf16-naive", BF16, BF16), ("O2", FP16, FP32), ("fp8-mixed", FP32, FP32)],
)
@on_ranks(2)
def test_a_mode_gathers_weights_in_its_dtype(world, precision, linear, batch_norm):
    """The batch norms of O2 are gathered in fp32, each as a unit of its own. Shards are fp32 throughout."""
    seen = {}
    with paramp.launch_from_torch({"parallel": FSDP2, "precision": precision}) as context:
        layers = seeded(lambda: nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Linear(32, 16)))
        for name, layer in layers.named_children():
            layer.register_forward_hook(
                lambda one, *_, name=name: seen.update({name: (one.weight.dtype, [*one.weight.shape])})
            )
        engine = engine_of(layers)
        assert isinstance(layers[1], FSDPModule) is (precision == "O2")
        assert ("Float8" in type(layers[0]).__name__) is (precision == "fp8-mixed")
        engine.forward_backward(*own_part(context, randn(32, 16), randn(32, 16)))
        assert engine.step().stepped
        assert {one.dtype for group in engine.optimizer.param_groups for one in group["params"]} == {FP32}
    assert seen == {"0": (linear, [32, 16]), "1": (batch_norm, [32]), "2": (linear, [16, 32])}


OF_WEIGHTS = {"64-true": torch.float64, **dict.fromkeys(("16-true", "O3", "transformer-engine-float16"), FP16)}
OF_WEIGHTS |= dict.fromkeys(("bf16-true", "transformer-engine"), BF16)
"""The modes whose shards are not in fp32."""


@on_ranks(2)
def test_shards_between_steps_are_in_fp32_or_the_dtype_of_the_modes_weights(world):
    for mode in PRESETS:
        with paramp.launch_from_torch({"parallel": FSDP2, "precision": mode}) as context:
            engine = engine_of(seeded(lambda: nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16))))
            train_step(engine, *own_part(context, randn(32, 16), randn(32, 16)))
            shards = [local(one) for one in engine.parameters()]
            assert sum(one.numel() for one in shards) == (2 * 16 * 32 + 16 + 32) / 2
            assert {one.dtype for one in shards} == {OF_WEIGHTS.get(mode, FP32)}, mode


@pytest.mark.parametrize("data", [{"shard": 4}, {"replicate": 2, "shard": 2}], ids=["fsdp4", "hsdp2x2"])
@on_ranks(4)
def test_collectives_are_those_of_the_units(world, data):
    """All-gathers of each block, and of the rest of the model, in a forward and backward; one control all-reduce."""
    with paramp.launch_from_torch({"parallel": {"data": data}}) as context:
        engine = engine_of(small_gpt(), GPT.loss, adamw)
        (x,) = own_part(context, torch.zeros(4, 8, dtype=torch.int64))
        for _ in range(2):
            with Collectives() as batch:
                engine.forward_backward(x, x, return_loss=False)
            with Collectives() as step:
                assert engine.step().stepped
            engine.zero_grad()
    num_units = 4 + 1
    assert batch.counts["reduce_scatter"] == num_units
    assert num_units <= batch.counts["allgather"] <= 2 * num_units
    assert batch.counts["allreduce"] == (num_units if "replicate" in data else 0)
    assert batch.counts.total() == sum(batch.counts[kind] for kind in ("reduce_scatter", "allgather", "allreduce"))
    assert step.counts == {"allreduce": 1}


def allocated():
    """Bytes of the storages of all tensors that Python knows."""
    gc.collect()
    tensors = [one for one in gc.get_objects() if isinstance(one, torch.Tensor) and not isinstance(one, DTensor)]
    return sum({one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}.values())


@pytest.mark.parametrize("precision", rarely(["32-true", "16-mixed", "16-naive"], "16-naive"))
@on_ranks(2)
def test_a_rank_keeps_its_shards_only(world, precision):
    """16 bytes a parameter over the ranks; within a batch also the parameters of a unit or two."""
    with paramp.launch_from_torch({"parallel": FSDP2, "precision": precision}):
        before, peaks = allocated(), []
        engine = engine_of(lambda: small_gpt(num_layers=8, width=64), GPT.loss, adamw)
        count = sum(parameter.numel() for parameter in engine.parameters())
        unit = sum(parameter.numel() for parameter in engine.module.blocks[0].parameters())
        for block in engine.module.blocks:
            block.register_forward_hook(lambda *_: peaks.append(allocated() - before))
        tokens = torch.zeros(1, 8, dtype=torch.int64)
        for _ in range(2):
            engine.forward_backward(tokens, tokens)
            engine.step()
            engine.zero_grad()
        kept = 16 * count / 2 * 1.05 + 2**18 * 4  # of scratch
        assert allocated() - before <= kept
        gathered = 4 * (2 * unit + count - 8 * unit)
        assert max(peaks) <= kept + gathered + 2**16


@pytest.mark.parametrize("pipeline", [1, 2])
@on_ranks(4)
def test_a_block_that_is_frozen_before_a_first_batch_or_one_of_another_size_has_no_gradient(world, pipeline):
    """Stages are tried with such batches first, with all parameters trained."""
    parallel = {"data": {"shard": 4 // pipeline}, "pipeline": {"size": pipeline, "split": ["2"][: pipeline - 1]}}
    model = seeded(lambda: nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))))
    plain = copy.deepcopy(model)
    with paramp.launch_from_torch({"precision": "64-true", "parallel": parallel}) as context:
        plain.double()
        engine = engine_of(model)
        held = dict(engine.named_parameters())
        for size, frozen in ((8, "0"), (16, "2"), (16, "")):
            for name, parameter in plain.named_parameters():
                for one in (parameter, held.get(name, parameter)):
                    one.requires_grad_(name.partition(".")[0] != frozen)
            x = torch.randn(size, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(size))
            plain.zero_grad()
            nn.functional.mse_loss(plain(x), x).backward()
            gradients = [one.grad for one in plain.parameters() if one.grad is not None]
            engine.zero_grad()
            engine.forward_backward(*own_part(context, x, x))
            norm = torch.nn.utils.get_total_norm(gradients)
            assert float(engine.step().grad_norm) == pytest.approx(float(norm), rel=1e-12)
            torch.optim.SGD([one for one in plain.parameters() if one.requires_grad], lr=0.1).step()
        assert_weights(engine.full_state_dict(), plain.state_dict(), atol=1e-12)


@on_ranks(4)
def test_stages_with_a_frozen_block_are_tried_on_one_data_rank_alone(world):
    """The one with a batch of another size: it gathers no block more often than the other one."""
    model = seeded(lambda: nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))))
    plain = copy.deepcopy(model).double()
    parallel = {"data": {"shard": 2}, "pipeline": {"size": 2, "split": ["2"], "microbatches": 4}}
    with paramp.launch_from_torch({"precision": "64-true", "parallel": parallel}) as context:
        engine = engine_of(model)
        for sizes, frozen in (((4, 4), ""), ((8, 4), "1"), ((8, 12), "2")):
            for name, parameter in (*engine.named_parameters(), *plain.named_parameters()):
                parameter.requires_grad_(name.partition(".")[0] != frozen)
            batches = [randn(size, 4, seed=size, dtype=torch.float64) for size in sizes]
            plain.zero_grad()
            sum(nn.functional.mse_loss(plain(x), x) / 2 for x in batches).backward()
            torch.optim.SGD([one for one in plain.parameters() if one.requires_grad], lr=0.1).step()
            assert train_step(engine, batches[context.dp.rank], batches[context.dp.rank]).stepped
            engine.zero_grad()
        assert_weights(engine.full_state_dict(), plain.state_dict(), atol=1e-12)


UNFROZEN = [*itertools.product(("1f1b", "looped-bfs"), ("16-naive", "bf16-true"))]


@pytest.mark.parametrize(("schedule", "precision"), rarely(UNFROZEN, UNFROZEN[0], UNFROZEN[3]))
@on_ranks(4)
def test_what_was_unfrozen_on_one_stage_is_refused_by_name_on_every_rank(world, schedule, precision):
    """Before the first batch and before a later one; the ranks of the other stage wait for it in the schedule."""
    pipeline = {"size": 2, "schedule": schedule, "microbatches": 4}
    x = randn(8, 4)
    for index, first in ((0, True), (7, False)):
        model = seeded(lambda: nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(8))))
        name = f"{index}.0.bias"
        model.get_parameter(name).requires_grad_(False)
        with paramp.launch_from_torch(
            {"precision": precision, "parallel": {"data": {"shard": 2}, "pipeline": pipeline}}
        ):
            engine = engine_of(model)
            held = [parameter for its_name, parameter in engine.named_parameters() if its_name == name]
            losses = [engine.forward_backward(x, x).item() for _ in range(not first)]
            engine.zero_grad()
            for parameter in held:
                parameter.requires_grad_(True)
            for _ in range(2):
                with pytest.raises(ValueError, match=re.escape(f"{name!r} was frozen")):
                    engine.forward_backward(x, x)
            assert all(parameter.requires_grad for parameter in held)
            for parameter in held:
                parameter.requires_grad_(False)
            losses += [engine.forward_backward(x, x).item()]
            assert engine.step().stepped
            assert len({*losses}) == 1


@pytest.mark.parametrize("pipeline", [1, 2])
@on_ranks(4)
def test_what_was_unfrozen_is_refused_by_name_before_the_first_batch(world, pipeline):
    """torch would refuse a parameter in half precision halfway through its first batch, and fail in the next ones."""
    parallel = {"data": {"shard": 4 // pipeline}, "pipeline": {"size": pipeline, "split": ["2"][: pipeline - 1]}}
    x = torch.ones(4, 4)
    losses = []
    with paramp.launch_from_torch({"precision": "16-naive", "parallel": parallel}) as context:
        for thawed in (False, True):
            model = seeded(lambda: nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))))
            for layer in (model[0], model[2]):
                layer.weight.requires_grad_(False)
            engine = engine_of(model)
            names = [name for name, parameter in engine.module.named_parameters() if not parameter.requires_grad]
            if thawed:
                if pipeline == 1:
                    engine.module.get_parameter(names[0]).requires_grad_(world.rank == 3)
                    with pytest.raises(RuntimeError, match=f"on some data ranks only.*; rank 3 .* {names[0]!r}"):
                        engine.forward_backward(x, x)
                for name in names:
                    engine.module.get_parameter(name).requires_grad_(True)
                for _ in range(2):
                    with pytest.raises(ValueError, match=re.escape(f"{names[0]!r} was frozen")):
                        engine.forward_backward(x, x)
                for name in names:
                    engine.module.get_parameter(name).requires_grad_(False)
            losses.append([])
            for _ in range(3):
                losses[-1].append(engine.forward_backward(*own_part(context, x, x)))
                engine.step()
        assert losses[0] == losses[1]
