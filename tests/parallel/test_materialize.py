"""Models made in their mode's dtype, and models on meta that are filled shard by shard."""

import weakref

import pytest
import torch
from pool import on_ranks
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

import paramp
from paramp.base import sizes
from paramp.parallel.materialize import materialize, outline
from paramp.parallel.tensor.linear import PackedRowwise
from paramp.precision.policy import ALIASES, PRESETS

WEIGHTS = {
    "32-true": torch.float32,
    "64-true": torch.float64,
    "16-mixed": torch.float32,
    "bf16-mixed": torch.float32,
    "16-naive": torch.float16,
    "bf16-naive": torch.bfloat16,
    "O2": torch.float16,
    "O3": torch.float16,
    "16-true": torch.float16,
    "bf16-true": torch.bfloat16,
    "fp8-mixed": torch.float32,
    "transformer-engine": torch.bfloat16,
    "transformer-engine-float16": torch.float16,
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


@pytest.mark.parametrize("name", [*PRESETS, *ALIASES])
def test_a_model_is_made_in_its_modes_dtype(name):
    expected = WEIGHTS[ALIASES.get(name, name)]
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
    def fail():
        with paramp.init_module("O2", device="meta"):
            assert nn.BatchNorm1d(2).weight.is_meta
            raise KeyError

    with paramp.init_module("bf16-true", device="cpu"):
        with paramp.init_module("64-true", device="meta"):
            inner = nn.Linear(2, 2)
        with pytest.raises(KeyError):
            fail()
        outer = nn.Linear(2, 2)
        assert nn.BatchNorm1d(2).weight.dtype is torch.bfloat16
    assert (inner.weight.dtype, inner.weight.is_meta) == (torch.float64, True)
    assert (outer.weight.dtype, outer.weight.is_meta) == (torch.bfloat16, False)
    after = nn.BatchNorm1d(2)
    assert (after.weight.dtype, after.weight.device.type) == (torch.float32, "cpu")
    with pytest.raises(paramp.ConfigError, match=r"'17-true'.*did you mean"), paramp.init_module("17-true"):
        pass


# ----------------------------------------------------------------------------------------------------- from meta


class Peak(TorchDispatchMode):
    """Counts the bytes of the tensors that were made inside and are alive, on any device but ``meta``."""

    def __init__(self):
        super().__init__()
        self.now = self.most = 0
        self._known = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        outputs = func(*args, **(kwargs or {}))
        tree_map_only(torch.Tensor, self._note, outputs)
        return outputs

    def _note(self, tensor):
        storage = tensor.untyped_storage()
        if tensor.is_meta or storage._cdata in self._known:
            return
        self._known.add(storage._cdata)
        self.now += storage.nbytes()
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._forget, storage._cdata, storage.nbytes())

    def _forget(self, key, size):
        self._known.discard(key)
        self.now -= size


def test_the_count_of_bytes_follows_what_is_alive():
    with Peak() as peak:
        kept = torch.empty(100)
        view = kept[:10]
        torch.empty(1000)
        assert (peak.now, peak.most) == (400, 4400)
        del kept
        assert peak.now == 400
        del view
        assert peak.now == 0


WIDTH, LAYERS = 256, 16
LAYER = 4 * WIDTH * WIDTH  # bytes in fp32
STAGE = LAYERS // 2 * LAYER


def stack():
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


@pytest.mark.parametrize(
    ("precision", "most"),
    [
        ("32-true", STAGE // 2 + LAYER),
        ("bf16-true", STAGE // 4 + LAYER),
        # the masters and the weights, at the end, and once more the bucket that moves in
        ("16-naive", STAGE // 2 + STAGE // 4 + LAYER // 2 + LAYER // 4),
        ("O2", STAGE // 2 + STAGE // 4 + LAYER // 2 + LAYER // 4),
    ],
)
@pytest.mark.real_sizes  # long tensors begin apart, which takes a page each
@on_ranks(4)
def test_a_rank_holds_its_shards_and_one_bucket_at_most(world, precision, most):
    """A bucket of weights, or of masters, is there twice while it moves in; here it is one shard of one layer."""
    sizes.BUCKET, whole = WIDTH * WIDTH // 2, sizes.BUCKET
    try:
        check_what_a_rank_holds(precision, most)
    finally:
        sizes.BUCKET = whole


@pytest.mark.parametrize(
    ("parallel", "shards"),
    [
        ({"data": {"shard": 4}}, LAYERS * LAYER // 4),
        ({"data": {"replicate": 2, "shard": 2}}, LAYERS * LAYER // 2),
        ({"data": {"shard": 2}, "tensor": 2}, LAYERS * LAYER // 4),
        ({"data": {"shard": 2}, "pipeline": 2}, STAGE // 2),
    ],
)
@pytest.mark.real_sizes  # long tensors begin apart, which takes a page each
@on_ranks(4)
def test_a_rank_holds_its_shards_over_data_ranks_and_one_bucket_at_most(world, parallel, shards):
    """The shards are the masters, and there is no copy beside them."""
    sizes.BUCKET, whole = WIDTH * WIDTH // 4, sizes.BUCKET
    try:
        check_what_a_rank_holds("16-naive", shards + LAYER, **parallel)
    finally:
        sizes.BUCKET = whole


def check_what_a_rank_holds(precision, most, **parallel):
    with torch.device("meta"):
        model = stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parallel = parallel or {"pipeline": 2, "tensor": 2}
    plan = {str(index): "colwise" if index % 2 == 0 else "rowwise" for index in range(LAYERS)}
    with (
        paramp.launch_from_torch({"parallel": parallel, "precision": precision, "seed": 5}),
        Peak() as peak,
    ):
        engine, *_ = paramp.initialize(model, optimizer, plan=plan if "tensor" in parallel else None)
        slack = 0.15 * LAYER  # the states of random streams, of 5 kB each, and of the scaler
        assert most <= peak.most + slack  # everything was counted
        assert peak.most <= most + slack
        actual = engine.full_state_dict()
    with torch.device("meta"):
        reference = stack()
    materialize(reference, 5, torch.device("cpu"))
    stored = WEIGHTS[precision] if precision.endswith("true") else torch.float32  # masters are not rounded
    for name, value in reference.state_dict().items():
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


PLAN = {
    "table": "vocab",
    "packed": "packed_colwise_3",
    "back": PackedRowwise(3),
    "head": "colwise_gather",
}


@pytest.mark.parametrize("precision", ["32-true", "16-naive", "O2"])
@pytest.mark.parametrize("parallel", [{"data": {"shard": 4}}, {"data": {"shard": 2}, "tensor": 2}])
@on_ranks(4)
def test_weights_sharded_over_data_ranks_start_as_unsharded_ones_do(world, parallel, precision):
    """With a vocabulary of 10 and the packed dim of 3, which the ranks do not divide."""
    with torch.device("meta"):
        model, reference = Tied(), Tied()
    materialize(reference, 3, torch.device("cpu"))
    with paramp.launch_from_torch({"parallel": parallel, "seed": 3, "precision": precision}) as context:
        plan = PLAN if context.tp.size > 1 else None
        engine, *_ = paramp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), plan=plan)
        module = engine.module
        assert module.head.weight is module.table.weight
        assert not any(value.is_meta for value in (*module.parameters(), *module.buffers()))
        assert sum(value.to_local().numel() for value in module.parameters()) < 512 / 3
        actual = engine.full_state_dict()
    expected = reference.state_dict()
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(actual[name], value), name


@on_ranks(2)
def test_packed_and_tied_weights_start_as_unsharded_ones_do(world):
    with torch.device("meta"):
        model, reference = Tied(), Tied()
    materialize(reference, 3, torch.device("cpu"))
    with paramp.launch_from_torch({"parallel": {"tensor": 2}, "seed": 3}):
        engine, *_ = paramp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), plan=PLAN)
        module = engine.module
        assert module.head.weight is module.table.weight
        assert not any(value.is_meta for value in (*module.parameters(), *module.buffers()))
        assert module.packed.weight.shape == (3, 8, 8)
        assert module.packed.weight.to_local().shape == (3, 4, 8)
        actual = engine.full_state_dict()
    expected = reference.state_dict()
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(actual[name], value), name


class Counts(nn.Linear):
    """Its reset computes something beside its tensors."""

    def reset_parameters(self):
        super().reset_parameters()
        self.table = torch.arange(3.0)


def test_what_was_given_stays_and_what_a_reset_computes_is_kept():
    with torch.device("meta"):
        model = nn.Sequential(Counts(2, 2), nn.Linear(2, 2))
    model[1].bias = nn.Parameter(torch.full((2,), 7.0))
    whole = outline(model)
    materialize(model, 0, torch.device("cpu"), whole=whole, dtype=torch.bfloat16)
    assert torch.equal(model[0].table, torch.arange(3.0))
    assert model[0].weight.dtype is torch.bfloat16
    assert model[1].bias.tolist() == [7.0, 7.0]
    assert whole[0].weight.is_meta


class Masked(nn.Module):
    """Fills its weight, and forgets the buffer that its constructor made."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3))
        self.register_buffer("mask", torch.ones(3))

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)


def test_what_a_module_on_meta_does_not_fill_is_an_error():
    with paramp.init_module("32-true", device="meta"):
        model = Masked()
    with pytest.raises(ValueError, match=r"reset_parameters\(\) of Masked does not fill 'mask'"):
        materialize(model, 1, torch.device("cpu"))
