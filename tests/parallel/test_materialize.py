"""Models made in their mode's dtype, and models on meta that are filled shard by shard."""

from contextlib import suppress
from types import MethodType

import pytest
import torch
import torch.distributed as dist
from beside_plain import assert_weights, benchmarks_common
from families import rarely
from pool import on_ranks, run_on_ranks
from small_engines import engine_of
from torch import nn

import paramp
from paramp.base import loop_block_sizes
from paramp.compat import foreign_config_values
from paramp.parallel.materialize import materialize
from paramp.parallel.tensor.colwise_and_rowwise import PackedRowwise
from paramp.precision import modes
from paramp.precision.modes import PRESETS

IN_FP16, IN_BF16 = ("16-naive", "O2", "O3", "16-true", "transformer-engine-float16"), ("bf16-naive", "bf16-true")
WEIGHTS = {
    **dict.fromkeys(("32-true", "16-mixed", "bf16-mixed", "fp8-mixed"), torch.float32),
    **dict.fromkeys(IN_FP16, torch.float16),
    **dict.fromkeys((*IN_BF16, "transformer-engine"), torch.bfloat16),
    "64-true": torch.float64,
}
"""What API.md's table says of each mode."""


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.layer_norm = nn.LayerNorm(4)
        self.own = nn.Parameter(torch.zeros(3, dtype=torch.float64))
        self.register_buffer("scale", torch.ones(3))


@pytest.mark.parametrize("name", [*PRESETS, *modes.ALIASES, *foreign_config_values.ALIASES])
def test_a_model_is_made_in_its_modes_dtype(name):
    expected = WEIGHTS[(modes.ALIASES | foreign_config_values.ALIASES).get(name, name)]
    with paramp.init_module(name, device="cpu"):
        model = Model()
    assert torch.get_default_dtype() is torch.float32
    assert {model.linear.weight.dtype, model.layer_norm.bias.dtype, model.scale.dtype} == {expected}
    assert model.own.dtype is torch.float64
    norm = torch.float32 if name == "O2" else expected
    assert {value.dtype for value in (*model.norm.parameters(), model.norm.running_mean)} == {norm}
    assert isinstance(model.norm.weight, nn.Parameter)
    assert torch.equal(model.norm.running_var, torch.ones(4, dtype=norm))
    assert model.norm.num_batches_tracked.dtype is torch.int64
    assert all(value.device.type == "cpu" for value in model.state_dict().values())


def test_contexts_nest_and_end_with_an_exception():
    with paramp.init_module("bf16-true", device="cpu"):
        with suppress(KeyError), paramp.init_module("O2", device="meta"):
            inner = nn.BatchNorm1d(2)
            raise KeyError
        outer = nn.BatchNorm1d(2)
    found = [(one.weight.dtype, one.weight.device.type) for one in (inner, outer, nn.BatchNorm1d(2))]
    assert found == [(torch.float32, "meta"), (torch.bfloat16, "cpu"), (torch.float32, "cpu")]
    with pytest.raises(paramp.ConfigError, match=r"'17-true'.*did you mean"), paramp.init_module("17-true"):
        pass


# ----------------------------------------------------------------------------------------------------- from meta


def on_meta(build):
    with torch.device("meta"):
        return build()


def filled(build, seed):
    """In one process."""
    model = on_meta(build)
    materialize(model, seed, torch.device("cpu"))
    return model.state_dict()


WIDTH, LAYERS = 256, 16
LAYER = 4 * WIDTH * WIDTH  # bytes in fp32
ALL, STAGE = LAYERS * LAYER, LAYERS // 2 * LAYER
PP2_TP2 = {"pipeline": 2, "tensor": 2}
# The masters and the weights, at the end, and once more the bucket that moves in. Of shards over data ranks the
# masters are the shards, and there is no copy beside them.
HELD = [
    (PP2_TP2, "32-true", STAGE // 2 + LAYER),
    (PP2_TP2, "bf16-true", STAGE // 4 + LAYER),
    (PP2_TP2, "16-naive", STAGE // 2 + STAGE // 4 + LAYER // 2 + LAYER // 4),
    (PP2_TP2, "O2", STAGE // 2 + STAGE // 4 + LAYER // 2 + LAYER // 4),
    ({"data": {"shard": 4}}, "16-naive", ALL // 4 + LAYER),
    ({"data": {"replicate": 2, "shard": 2}}, "16-naive", ALL // 2 + LAYER),
    ({"data": {"shard": 2}, "tensor": 2}, "16-naive", ALL // 4 + LAYER),
    ({"data": {"shard": 2}, "pipeline": 2}, "16-naive", STAGE // 2 + LAYER),
]


def stack():
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


@pytest.mark.parametrize(("parallel", "precision", "most"), rarely(HELD, HELD[0], HELD[3], *HELD[5:7]))
@pytest.mark.real_sizes  # long tensors begin apart, which takes a page each
@on_ranks(4)
def test_a_rank_holds_its_shards_and_one_bucket_at_most(world, parallel, precision, most):
    """A bucket of weights, or of masters, is there twice while it moves in; here it is one shard of one layer."""
    model = on_meta(stack)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = {str(index): "colwise" if index % 2 == 0 else "rowwise" for index in range(LAYERS)}
    with (
        pytest.MonkeyPatch.context() as patch,
        paramp.launch_from_torch({"parallel": parallel, "precision": precision, "seed": 5}),
    ):
        patch.setattr(loop_block_sizes, "BUCKET", WIDTH * WIDTH // (4 if "data" in parallel else 2))
        with benchmarks_common().watch_memory(torch.device("cpu")) as memory:
            engine = engine_of(model, None, optimizer, plan=plan if "tensor" in parallel else None)
        # The slack: states of random streams, of 5 kB each, and of the scaler. The least: everything was counted.
        assert memory.peak == pytest.approx(most, abs=0.15 * LAYER)
        actual = engine.full_state_dict()
    stored = WEIGHTS[precision] if precision.endswith("true") else torch.float32  # masters are not rounded
    for name, value in filled(stack, 5).items():
        assert torch.equal(actual[name], value.to(stored).float())


class Tied(nn.Module):
    """Packed layers, an uneven vocabulary, a tie, a layer with a buffer, and a parent that fills nothing itself."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(10, 8)
        self.packed = nn.Linear(8, 24)
        self.back = nn.Linear(24, 8)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.table.weight

    def reset_parameters(self):
        raise AssertionError("it has no tensors of its own")


PLAN = {"table": "vocab", "packed": "packed_colwise_3", "back": PackedRowwise(3), "head": "colwise_gather"}
SHARDED = [
    ({"tensor": 2}, "32-true"),
    *(({"data": {"shard": 4}}, precision) for precision in ("32-true", "16-naive", "O2")),
    *(({"data": {"shard": 2}, "tensor": 2}, precision) for precision in ("32-true", "16-naive", "O2")),
]


@pytest.mark.parametrize(("parallel", "precision"), SHARDED)
def test_weights_that_are_sharded_start_as_unsharded_ones_do(parallel, precision):
    """With a vocabulary of 10 and the packed dim of 3, which the ranks do not divide."""
    run_on_ranks(4 if "data" in parallel else 2, __name__, "start", {"parallel": parallel, "precision": precision})


def start(world, parallel, precision):
    with paramp.launch_from_torch({"parallel": parallel, "seed": 3, "precision": precision}) as context:
        model = on_meta(Tied)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine = engine_of(model, None, optimizer, plan=PLAN if context.tp.size > 1 else None)
        module = engine.module
        assert module.head.weight is module.table.weight
        assert not any(value.is_meta for value in (*module.parameters(), *module.buffers()))
        if "data" in parallel:
            assert sum(value.to_local().numel() for value in module.parameters()) < 512 / 3
        else:
            assert module.packed.weight.shape == (3, 8, 8)
            assert module.packed.weight.to_local().shape == (3, 4, 8)
        assert_weights(engine.full_state_dict(), filled(Tied, 3), atol=0)


class Counts(nn.Linear):
    """Its reset computes something beside its tensors."""

    def reset_parameters(self):
        super().reset_parameters()
        self.table = torch.arange(3.0)


def test_what_was_given_stays_and_what_a_reset_computes_is_kept():
    model = on_meta(lambda: nn.Sequential(Counts(2, 2), nn.Linear(2, 2)))
    model[1].bias = nn.Parameter(torch.full((2,), 7.0))
    model[0].forward = MethodType(Counts.forward, model[0])
    with paramp.launch_from_torch({"precision": "bf16-true"}):
        module = engine_of(model).module
    assert torch.equal(module[0].table, torch.arange(3.0))
    assert module[0].forward.__self__ is module[0]
    assert module[0].weight.dtype is torch.bfloat16
    assert module[1].bias.tolist() == [7.0, 7.0]


class RankNumbers(nn.Linear):
    """Its reset has other values on each rank, as one that draws from NumPy has."""

    def reset_parameters(self):
        nn.init.constant_(self.weight, dist.get_rank() + 1)


@on_ranks(2)
def test_replicas_start_equal_even_if_a_reset_has_other_values_on_each_rank(world):
    with paramp.launch_from_torch({}):
        assert torch.equal(engine_of(on_meta(lambda: RankNumbers(2, 2, bias=False))).module.weight, torch.ones(2, 2))
