"""Parameters sharded over data ranks in the engine, against plain torch in one process."""

import dataclasses
import functools
import gc

import pytest
import torch
from counting import Collectives
from families import cases, family
from pool import on_ranks, run_on_ranks
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import paramp
from paramp.models import GPT, GPTConfig

FSDP2 = {"data": {"shard": 2}}
HSDP = {"data": {"replicate": 2, "shard": 2}}
FSDP2_TP2 = {"data": {"shard": 2}, "tensor": 2}


def own_part(tensor, context):
    return tensor.chunk(context.batch_axis.size)[context.batch_axis.rank]


# ------------------------------------------------------------------------------------------------ fp32 against torch


class Uneven(nn.Module):
    """A block whose parameters have 1, 3, 5 and 7 rows, beside an even pair that the plan shards over ``tp``."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)
        self.three, self.seven, self.six = nn.Linear(6, 3), nn.Linear(3, 7), nn.Linear(7, 6)
        self.gain = nn.Parameter(torch.ones(1))
        self.shift = nn.Parameter(torch.zeros(5))

    def forward(self, x):
        x = x + self.gain * self.down(torch.tanh(self.up(self.norm(x))))
        return x + self.six(torch.tanh(self.seven(self.three(x)))) + F.pad(self.shift, (0, 1))


def uneven_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), Uneven(), Uneven(), nn.Linear(6, 5))


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-4)


def samples(steps, batches):
    generator = torch.Generator().manual_seed(1)
    return [[torch.randn(2, 8, 5, generator=generator) for _ in range(batches)] for _ in range(steps)]


def plain_training(steps, batches):
    """Losses, norms and final weights of a loop in plain torch."""
    model = uneven_model()
    optimizer = adamw(model.parameters())
    losses, norms = [], []
    for window in samples(steps, batches):
        optimizer.zero_grad()
        seen = []
        for x, y in window:
            loss = F.mse_loss(model(x), y)
            (loss / batches).backward()
            seen.append(loss.item())
            losses.append(sum(seen) / len(seen))  # the engine returns the mean of the window so far
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.3).item())
        optimizer.step()
    return losses, norms, model.state_dict()


PLAIN = {"fsdp2": FSDP2, "fsdp4": {"data": {"shard": 4}}, "hsdp2x2": HSDP, "fsdp2·tp2": FSDP2_TP2}


@family
@pytest.mark.parametrize("layout", cases("sharded fp32", list(PLAIN), ["fsdp2", "fsdp2·tp2"], 1))
def test_fp32_follows_a_plain_loop(layout):
    parallel = PLAIN[layout]
    data = parallel["data"]
    size = data["shard"] * data.get("replicate", 1) * parallel.get("tensor", 1)
    run_on_ranks(size, __name__, "follow_plain_loop", {"parallel": parallel})


def follow_plain_loop(world, parallel, steps=20, batches=2):
    losses, norms, expected = plain_training(steps, batches)
    config = {"parallel": parallel, "clip_grad_norm": 0.3, "gradient_accumulation": batches}
    with paramp.launch_from_torch(config) as context:
        plan = {"*.up": "colwise", "*.down": "rowwise"}
        engine, *_ = paramp.initialize(uneven_model(), adamw, F.mse_loss, plan=plan)
        for step, window in enumerate(samples(steps, batches)):
            for index, (x, y) in enumerate(window):
                loss = engine.forward_backward(own_part(x, context), own_part(y, context)).item()
                assert loss == pytest.approx(losses[step * batches + index], abs=1e-5)
                result = engine.step()
            assert result.stepped
            assert result.grad_norm == pytest.approx(norms[step], rel=1e-5)
        for name, value in engine.full_state_dict().items():
            torch.testing.assert_close(value, expected[name], atol=2e-5, rtol=0)


# ------------------------------------------------------------------------------------- the dtype of sums of gradients

SMALL = 2.0**-9
"""1 + 2**-9 is 1.001953125 in fp32 and 1.0 in bf16."""
FP16_WITHOUT_SCALE = {"mode": "16-naive", "init_scale": 1.0}


def bias_gradient(context, reduce_dtype, parts, precision="bf16-naive"):
    """The gradient of the bias of a norm under sequence parallelism, of which each data and tensor rank has a part.

    Args:
        parts: by data rank and tensor rank.
    """
    context.config = dataclasses.replace(context.config, precision=precision, reduce_dtype=reduce_dtype)
    model = nn.Sequential(nn.Identity(), nn.LayerNorm(4), nn.Identity())
    plan = {"0": "scatter_sequence", "1": "sequence", "2": "gather_sequence"}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = paramp.initialize(model, optimizer, lambda output, target: (output * target).sum(), plan=plan)
    target = torch.zeros(1, 2, 4)  # of the sequence each tensor rank has one position
    target[0, :, 0] = torch.tensor(parts[context.batch_axis.rank]) * context.batch_axis.size  # losses are averaged
    engine.forward_backward(torch.randn(1, 2, 4), target)
    gradient = dict(engine.named_parameters())["1.bias"].grad.full_tensor()
    assert not gradient[1:].any()
    return gradient[0].item()


@on_ranks(4)
def test_gradients_are_summed_in_reduce_dtype_over_every_axis(world):
    """pytorch #190626: ``reduce_dtype=float32`` was not honoured over the tensor axis."""
    over_tensor, over_data = [[1.0, SMALL], [0.0, 0.0]], [[1.0, 0.0], [SMALL, 0.0]]
    halves = [[0.5, SMALL / 2], [0.5, SMALL / 2]]
    with paramp.launch_from_torch({"parallel": FSDP2_TP2 | {"sequence_parallel": True}}) as context:
        for parts in (over_tensor, over_data, halves):
            assert bias_gradient(context, "float32", parts) == 1 + SMALL
            assert bias_gradient(context, None, parts) == 1.0  # in bf16, the mode's default
        assert bias_gradient(context, {"dp": "float32", "tp": "float32"}, halves) == 1 + SMALL
        assert bias_gradient(context, {"dp": "float32"}, over_data) == 1 + SMALL
        assert bias_gradient(context, {"tp": "float32"}, over_data) == 1.0
        smaller = [[1.0, 0.0], [SMALL / 8, 0.0]]
        assert bias_gradient(context, None, smaller, FP16_WITHOUT_SCALE) == 1.0  # in fp16
        assert bias_gradient(context, "float32", smaller, FP16_WITHOUT_SCALE) == 1 + SMALL / 8


# ------------------------------------------------------------------------------------------- activation checkpointing


def gpt(dropout=0.0, **changes):
    torch.manual_seed(0)
    shape = {"num_layers": 4, "num_heads": 4, "width": 32, "max_seq_len": 16, "vocab_size": 128}
    return GPT(GPTConfig(**(shape | changes), dropout=dropout))


@on_ranks(2)
def test_activation_checkpointing_changes_no_bit(world):
    def losses(how):
        config = {"parallel": FSDP2, "precision": "bf16-mixed", "activation_checkpointing": how}
        with paramp.launch_from_torch(config) as context:
            engine, *_ = paramp.initialize(gpt(dropout=0.2), functools.partial(torch.optim.SGD, lr=0.5), GPT.loss)
            results = []
            for step in range(3):
                tokens = torch.randint(128, (4, 17), generator=torch.Generator().manual_seed(step))
                x, y = (own_part(part, context) for part in (tokens[:, :-1], tokens[:, 1:]))
                results.append(engine.forward_backward(x, y).item())
                results.append(float(engine.step().grad_norm))
            return results

    expected = losses("none")
    for how in ("full", "selective", 2):
        assert losses(how) == expected
    assert len(set(expected)) == len(expected)


# ------------------------------------------------------------------------------------------------ what is gathered


class OwnForward(nn.Linear):
    def forward(self, x):
        return super().forward(x) + self.weight.sum()


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear, self.own = nn.LayerNorm(8), nn.Linear(8, 8), OwnForward(8, 8)
        self.table, self.head = nn.Embedding(8, 8), nn.Linear(8, 8, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x):
        return self.head(self.own(self.linear(self.norm(x)))) + self.table.weight.sum()


@on_ranks(2)
def test_autocast_makes_no_copies_of_gathered_weights(world):
    """It would keep them until the backward. Weights are gathered as it would cast them, others in fp32."""
    seen = {}

    def run(parallel, precision):
        with paramp.launch_from_torch({"parallel": parallel, "precision": precision}) as context:
            torch.manual_seed(0)
            model = nn.Sequential(Mixed(), Mixed())
            model[0].linear.register_forward_hook(
                lambda module, *_: seen.update({name: value.dtype for name, value in module.named_parameters()})
            )
            for name in ("norm", "own", "head"):
                model[0].get_submodule(name).register_forward_hook(
                    lambda module, *_, name=name: seen.update({name: module.weight.dtype})
                )
            engine, *_ = paramp.initialize(model, functools.partial(torch.optim.SGD, lr=0.1), F.mse_loss)
            x, y = torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(2))
            engine.forward_backward(own_part(x, context), own_part(y, context))
            assert engine.step().stepped
            return engine.full_state_dict()

    weights = run(FSDP2, "bf16-mixed")
    half, full = torch.bfloat16, torch.float32
    assert seen == {"weight": half, "bias": full, "norm": full, "own": full, "head": full}
    expected = run({"data": 2}, "bf16-mixed")
    for name, weight in weights.items():  # each rank's gradient is rounded to bf16, their sum is not
        assert torch.equal(weight, expected[name]), name
    assert seen == dict.fromkeys(seen, full)
    run(FSDP2, "32-true")
    assert seen == dict.fromkeys(seen, full)


@pytest.mark.parametrize("name", ["fsdp4", "hsdp2x2"])
@on_ranks(4)
def test_collectives_are_those_of_the_units(world, name):
    """All-gathers of each block, and of the rest of the model, in a forward and backward; one control all-reduce."""
    with paramp.launch_from_torch({"parallel": PLAIN[name]}) as context:
        engine, *_ = paramp.initialize(gpt(), adamw, GPT.loss)
        x = own_part(torch.zeros(4, 8, dtype=torch.int64), context)
        for _ in range(2):
            with Collectives() as batch:
                engine.forward_backward(x, x, return_loss=False)
            with Collectives() as step:
                assert engine.step().stepped
            engine.zero_grad()
    num_units = 4 + 1
    assert batch.counts["reduce_scatter"] == num_units
    assert num_units <= batch.counts["allgather"] <= 2 * num_units
    assert batch.counts["allreduce"] == (num_units if name == "hsdp2x2" else 0)
    assert batch.counts.total() == sum(batch.counts[kind] for kind in ("reduce_scatter", "allgather", "allreduce"))
    assert step.counts == {"allreduce": 1}


# ------------------------------------------------------------------------------------------------------------ memory


def allocated():
    """Bytes of the storages of all tensors that Python knows."""
    gc.collect()
    tensors = [one for one in gc.get_objects() if isinstance(one, torch.Tensor) and not isinstance(one, DTensor)]
    return {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}


@on_ranks(2)
def test_a_rank_keeps_its_shards_only(world):
    """16 bytes a parameter over the ranks; within a batch also the parameters of a unit or two."""
    for precision in ("32-true", "16-mixed", "16-naive"):
        config = {"parallel": FSDP2, "precision": precision}
        with paramp.launch_from_torch(config):
            before = sum(allocated().values())
            engine, *_ = paramp.initialize(lambda: gpt(num_layers=8, width=64), adamw, GPT.loss)
            count = sum(parameter.numel() for parameter in engine.parameters())
            unit = sum(parameter.numel() for parameter in engine.module.blocks[0].parameters())
            root = count - 8 * unit
            peaks = []

            def see(*_, peaks=peaks, before=before):
                peaks.append(sum(allocated().values()) - before)

            for block in engine.module.blocks:
                block.register_forward_hook(see)
            tokens = torch.zeros(1, 8, dtype=torch.int64)
            for _ in range(2):
                engine.forward_backward(tokens, tokens)
                engine.step()
                engine.zero_grad()
            scratch = 2**18 * 4
            assert sum(allocated().values()) - before <= 16 * count / 2 * 1.05 + scratch
            gathered = 4 * (2 * unit + root)
            assert max(peaks) <= 16 * count / 2 * 1.05 + scratch + gathered + 2**16
        del engine
