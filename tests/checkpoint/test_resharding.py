"""A checkpoint of one process, loaded and saved by ranks that shard parameters over data ranks, has the same bits."""

import functools
from functools import partial

import pytest
import torch
from families import cases, family
from layouts import layouts
from matrix import from_small_scale
from pool import on_ranks, run_on_ranks, shared_folder
from small_engines import assert_same_checkpoints, assert_same_tensors, engine_of, own_part, train_step
from torch import nn

import paramp
from paramp.checkpoint.open_checkpoint import OpenCheckpoint
from paramp.parallel.tensor.colwise_and_rowwise import PackedRowwise

TWO_STAGES = {"size": 2, "schedule": "interleaved-1f1b", "microbatches": 2}
LAYOUTS = layouts("fsdp4, hsdp2x2, fsdp2·tp2, fsdp2·pp2, dp2·tp2 + zero1, pp2·dp2 + zero1")
LAYOUTS["fsdp2·pp2, two stages a rank"] = {"data": {"shard": 2}, "pipeline": TWO_STAGES}
PLAN = {"table": "vocab", "blocks.*.packed": "packed_colwise_3", "blocks.*.back": PackedRowwise(3)}
PLAN |= {"head": "colwise_gather"}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.packed, self.back = nn.Linear(8, 24), nn.Linear(24, 8)
        self.three, self.one, self.wide = nn.Linear(8, 3), nn.Linear(3, 1), nn.Linear(1, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x):
        x = x + self.back(torch.tanh(self.packed(x)))
        return self.frozen(x + self.wide(torch.tanh(self.one(self.three(x)))))


class Model(nn.Module):
    """Shards that are uneven or empty, packed weights, a frozen layer in each block, a tie, and a buffer."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(14, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(8, 14, bias=False)
        self.head.weight = self.table.weight
        self.gain = nn.Parameter(torch.ones(1))
        self.nothing = nn.Parameter(torch.ones(0, 4))
        self.register_buffer("offset", torch.full((3,), 0.1))

    def forward(self, x):
        x = self.table(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x * self.gain + self.offset.sum())


def cross_entropy(output, target):
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def batch(engine, seed):
    return own_part(engine.context, *torch.randint(0, 14, (2, 8, 5), generator=torch.Generator().manual_seed(seed)))


def launch(precision, parallel):
    config = {"parallel": parallel, "precision": from_small_scale(precision), "ema": {"decay": 0.5}}
    return paramp.launch_from_torch(config)


def start(context, seed):
    torch.manual_seed(seed)
    plan = PLAN if context.tp.size > 1 else None
    engine = engine_of(Model(), cross_entropy, partial(torch.optim.AdamW, lr=0.05), plan=plan)
    train(engine, 2)
    return engine


def train(engine, count):
    for step in range(count):
        assert train_step(engine, *batch(engine, step)).stepped


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """``saved(mode)``: a checkpoint of one process, and the losses with its weights and with their averages."""

    @functools.cache
    def save(precision):
        path = tmp_path_factory.mktemp("saved") / "checkpoint"
        with launch(precision, {}) as context:
            engine = start(context, 1)
            engine.save(path)
            return str(path), losses(engine)

    return save


def losses(engine):
    loss = engine.evaluate(*batch(engine, 9)).item()
    with engine.ema.applied():
        return loss, engine.evaluate(*batch(engine, 9)).item()


@on_ranks(4)
def load_and_save(world, precision, path, expected, layout):
    """The loaded weights and averages are in use, and saved again; what this layout itself saves is one process's."""
    folder = shared_folder()
    with launch(precision, LAYOUTS[layout]) as context:
        engine = start(context, 2)
        engine.save(folder / "own")
        own = engine.full_state_dict(), engine.ema.full_state_dict()
        assert losses(engine) != pytest.approx(expected, rel=1e-3)
        engine.load(path)
        assert losses(engine) == pytest.approx(expected, rel=1e-3)
        engine.save(folder / "again")
        train(engine, 1)
        engine.load(folder / "own")
        for before, after in zip(own, (engine.full_state_dict(), engine.ema.full_state_dict()), strict=True):
            assert_same_tensors(after, before)
    assert_same_checkpoints(folder / "again", path)
    return str(folder / "own")


EVERYTHING = [
    (layout, precision) for layout in LAYOUTS for precision in ("16-naive", "32-true", "64-true", "bf16-true")
]
PART = {("fsdp2·tp2", "16-naive")}


@family
@pytest.mark.parametrize(("layout", "precision"), cases("resharding", EVERYTHING, PART, 1))
def test_a_checkpoint_keeps_its_bits_between_layouts(saved, layout, precision, tmp_path):
    path, expected = saved(precision)
    options = {"precision": precision, "path": path, "expected": expected, "layout": layout}
    own = run_on_ranks(4, __name__, "load_and_save", options)[0]
    with launch(precision, {}) as context:
        engine = start(context, 3)
        engine.load(own)
        engine.save(tmp_path / "one")
    assert_same_checkpoints(tmp_path / "one", own)
    with OpenCheckpoint(own) as checkpoint:
        dtypes = {name: tensor.dtype for name, tensor in checkpoint.header.tensors.items()}
    weights = {"bf16-true": torch.bfloat16, "64-true": torch.float64}.get(precision, torch.float32)
    assert {dtypes[f"model.{name}"] for name in ("table.weight", "blocks.0.three.bias")} == {weights}
    assert dtypes["model.blocks.0.frozen.weight"] is (torch.float16 if precision == "16-naive" else weights)
    assert {dtype for name, dtype in dtypes.items() if name.startswith("ema.")} == {
        torch.float64 if precision == "64-true" else torch.float32
    }
