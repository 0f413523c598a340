"""The process groups of a context: each rank makes only its own, under names on which its members agree."""

import math
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from commands import ROOT, python, succeeded, torchrun
from pool import on_ranks, run_on_ranks
from reference import assert_trained, batches
from small_engines import engine_of, gpt_engine, own_part, train_step
from torch import nn
from torch.distributed import distributed_c10d as c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

import paramp
from paramp.base.collectives import gather_objects
from paramp.distributed import process_groups
from paramp.models import GPT, GPTConfig


def coordinates(rank, sizes):
    """pp, dp and tp of ``rank``: tp varies fastest."""
    _, dp, tp = sizes
    return rank // (dp * tp), rank // tp % dp, rank % tp


def peers(rank, sizes, axes):
    """The ranks whose coordinates are those of ``rank`` on all axes but ``axes``."""

    def others(rank):
        return [place for axis, place in enumerate(coordinates(rank, sizes)) if axis not in axes]

    return [other for other in range(math.prod(sizes)) if others(other) == others(rank)]


def check_group(group, ranks):
    """``group`` has the ``ranks``, its members call it by one name, and it sums over them."""
    assert dist.get_process_group_ranks(group) == ranks
    assert len(set(gather_objects(group.group_name, group))) == 1
    total = torch.tensor([2 ** dist.get_rank()])
    dist.all_reduce(total, group=group)
    assert total.item() == sum(2**rank for rank in ranks)


SIZES = [(2, 1, 2), (1, 2, 2), (2, 2, 1), (1, 4, 1), (1, 1, 4), (4, 1, 1), (2, 2, 2)]


def launch(sizes):
    return paramp.launch_from_torch({"parallel": dict(zip(("pipeline", "data", "tensor"), sizes, strict=True))})


def check_groups(world, sizes):
    with launch(sizes) as context:
        for axis, (name, here) in enumerate(zip(("pp", "dp", "tp"), (context.pp, context.dp, context.tp), strict=True)):
            check_group(here.group, peers(world.rank, sizes, [axis]))
            assert (here.rank, here.size) == (coordinates(world.rank, sizes)[axis], sizes[axis])
            for mesh in (context.mesh, context.mesh[name], context.mesh["dp", "tp"] if axis else context.mesh):
                assert mesh.get_group(name) is here.group
                assert mesh.get_local_rank(name) == here.rank
        check_group(context.model_group, peers(world.rank, sizes, [0, 2]))
        assert context.mesh.get_coordinate() == coordinates(world.rank, sizes)
        check_group(context.mesh["dp", "tp"]._flatten("all").get_group(), peers(world.rank, sizes, [1, 2]))
        stage, last = context.pp.rank, context.pp.size - 1
        assert (context.is_first_stage, context.is_last_stage) == (stage == 0, stage == last)
        assert context.is_main == (world.rank == 0)


@pytest.mark.parametrize("sizes", SIZES)
def test_the_groups_of_a_context_and_their_sums(sizes):
    """tp varies fastest over the ranks, and pp slowest."""
    run_on_ranks(math.prod(sizes), __name__, "check_groups", {"sizes": sizes})


@on_ranks(4)
def test_groups_after_groups_that_only_some_ranks_are_in(world):
    """torch names a group by the number of groups that a process is in, which then differs: its members never meet."""
    with paramp.launch_from_torch({"parallel": {"pipeline": 4}}) as context:
        for holders in ((0, 1, 2), (0, 3), (1, 3)):
            group = context.make_group(f"tie {holders}", context.ranks_along(["pp"], holders))
            if world.rank in holders:
                check_group(group, list(holders))
            else:
                assert group is None
        everyone = torch.arange(4).view(1, 4)
        check_group(context.make_group("save", everyone, backend="gloo"), [0, 1, 2, 3])
        assert context.make_group("world", everyone) is dist.group.WORLD
        pairs = torch.arange(4).view(2, 2)
        for family in (pairs, pairs.t()):  # of one name, and rank 0 is the first of a group in both
            mine = next(ranks for ranks in family.tolist() if world.rank in ranks)
            check_group(context.make_group("pairs", family), mine)
        own = [context.make_group("pairs", pairs, shared=False) for _ in range(2)]
        for group in own:
            check_group(group, next(ranks for ranks in pairs.tolist() if world.rank in ranks))
        assert own[0] is not own[1]


def maps():
    """The groups that torch knows of."""
    world = c10d._world
    known = (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config, world.pg_to_tag)
    return [set(groups) for groups in known] + [[group for each in world.tags_to_pg.values() for group in each]]


@on_ranks(4)
def test_a_closed_context_leaves_no_groups_and_the_next_one_works(world):
    """Of another layout too: DTensor remembers decisions by the shape of a mesh, and would take a dead group."""
    before = maps()
    for sizes in ((2, 1, 2), (1, 2, 2), (1, 1, 4), (2, 1, 2)):
        with launch(sizes) as context:
            check_group(context.tp.group, peers(world.rank, sizes, [2]))
            context.make_group("some", torch.tensor([[0, 3]]))
            engine = gpt_engine(num_layers=2)
            assert engine.forward_backward(*next(batches(1))).item() == pytest.approx(5.0, abs=0.6)
            assert engine.step().stepped
            assert maps() != before
        assert maps() == before


@pytest.fixture
def rank_of_world():
    """Initialises a fake process group, of which this process is one rank."""

    def start(rank, world_size):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)

    yield start
    if dist.is_initialized():
        dist.destroy_process_group()


def num_groups(monkeypatch, start, rank, world_size):
    """The groups that ``rank`` helps to make to train a GPT with tied embeddings at pp4 x tp2."""
    made = []
    new = c10d._new_process_group_helper

    def counted(*args, **kwargs):
        made.append(args)
        return new(*args, **kwargs)

    monkeypatch.setattr(c10d, "_new_process_group_helper", counted)
    start(rank, world_size)
    config = {"parallel": {"pipeline": 4, "tensor": 2}, "precision": "16-mixed"}
    with paramp.launch(config, rank, world_size, "localhost", 1, device="cpu") as context:
        with torch.device("meta"):
            model = GPT(GPTConfig(num_layers=4, num_heads=2, width=16, max_seq_len=8, vocab_size=32))
        engine, *_ = paramp.initialize(model, torch.optim.AdamW(model.parameters()), GPT.loss)
        assert len(context.ties) == (context.is_first_stage or context.is_last_stage)
        assert engine.context.world_size == world_size
    dist.destroy_process_group()
    monkeypatch.undo()
    return len(made)


@pytest.mark.parametrize("last", [False, True])
def test_a_rank_of_4096_makes_as_many_groups_as_one_of_16(monkeypatch, rank_of_world, last):
    counts = [num_groups(monkeypatch, rank_of_world, size - 1 if last else 0, size) for size in (16, 4096)]
    assert counts == [7, 7]  # the world, pp, dp, tp, the model's, the ties' and that of a rank alone, for cp and ep


@on_ranks(2)
def test_a_group_is_returned_once_every_member_is_in_it(world):
    """Else a member that destroys it at once breaks the connection of one that is still being connected."""
    store, new_group = dist.distributed_c10d._get_default_store(), dist.new_group

    def slow_new_group(*arguments, **options):
        made = new_group(*arguments, **options)
        time.sleep(0.3)
        store.set("last/connected", "")
        return made

    made = process_groups.ProcessGroups("slow")
    with pytest.MonkeyPatch.context() as patch:
        if world.rank == 1:
            patch.setattr(dist, "new_group", slow_new_group)
        made.make("pair", torch.tensor([[0, 1]]), backend="gloo")
    assert store.check(["last/connected"])
    made.destroy()
    dist.barrier()
    if world.rank == 1:
        store.delete_key("last/connected")


def test_the_worlds_communicator_is_split_by_every_rank(monkeypatch, rank_of_world):
    """With NCCL, a rank that is in no group of a family still has to take part in the split."""
    calls = []

    def split_group(split_ranks, group_desc):
        calls.append((split_ranks, group_desc, c10d._process_group_name([], use_hashed_name=True)))
        mine = next((ranks for ranks in split_ranks if 5 in ranks), None)
        return mine and dist.new_group(mine, use_local_synchronization=True)

    rank_of_world(5, 8)
    monkeypatch.setattr(process_groups, "_world_splits", lambda: True)
    monkeypatch.setattr(dist, "split_group", split_group)
    made = process_groups.ProcessGroups("run")
    pairs, ends = torch.arange(8).view(4, 2), torch.tensor([[0, 6], [1, 7]])
    group = made.make("tp", pairs)
    assert made.make("same", pairs.clone()) is group
    assert made.make("ends", ends) is None
    assert calls == [(pairs.tolist(), "tp", "run/tp/180f919e/4"), (ends.tolist(), "ends", "run/ends/d4ede17f/none")]
    made.destroy()
    assert list(c10d._world.pg_map) == [dist.group.WORLD]


@pytest.mark.parametrize(
    ("backend", "bound", "splits"),
    [("nccl", True, True), ("cpu:gloo,cuda:nccl", True, False), ("nccl", False, False), ("gloo", False, False)],
)
def test_a_world_is_split_where_all_of_it_is_one_communicator_that_is_connected(monkeypatch, backend, bound, splits):
    """``bound``: to a device."""
    world = SimpleNamespace(
        bound_device_id=torch.device("cuda", 0) if bound else None,
        _get_backend=lambda device: SimpleNamespace(supports_splitting=True),
    )
    monkeypatch.setattr(c10d, "_get_default_group", lambda: world)
    monkeypatch.setattr(dist, "get_backend_config", lambda: str(c10d.BackendConfig(dist.Backend(backend))))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert process_groups._world_splits() == splits


CLOSED = """
import sys, torch, paramp
from torch.distributed.tensor import Replicate, distribute_tensor

decisions = torch._C._get_DTensor_sharding_propagator_cache_stats
with paramp.launch_from_torch() as context:
    one = distribute_tensor(torch.ones(4, 4), context.mesh["tp"], [Replicate()])
    for _ in range(3):
        one + 1
    print(decisions())
print(decisions(), "torch.distributed.tensor.debug" in sys.modules)
"""


def test_a_context_that_is_closed_forgets_decisions_of_dtensor_and_imports_nothing_for_it():
    """torch's function for it is in a module that imports the inductor."""
    result = succeeded(python("-c", CLOSED, PYTHONPATH=str(ROOT)))
    assert result.stdout.splitlines() == ["(2, 1)", "(0, 0) False"]  # hits and misses


@on_ranks(4)
def test_ties_between_the_same_stages_share_a_group(world):
    with paramp.launch_from_torch({"parallel": {"pipeline": {"size": 4, "split": ["2", "4", "6"]}}}) as context:
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(8)))
        model[2].weight, model[3].weight = model[0].weight, model[1].weight
        engine_of(model)
        assert len(context.ties) == (2 if world.rank < 2 else 0)
        for tie in context.ties:
            check_group(tie.group, [0, 1])
            assert tie.group is context.ties[0].group


def tied_chain():
    """Eight layers: 0 and 7 share a weight; 1, 3 and 6; 2 and 5; and 4 and 7 a bias."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(8)))
    for first, *others in ((0, 7), (1, 3, 6), (2, 5)):
        for other in others:
            model[other].weight = model[first].weight
    model[7].bias = model[4].bias
    return model


@pytest.mark.parametrize("schedule", [{"size": 4}, {"size": 2, "schedule": "interleaved-1f1b", "stages_per_rank": 2}])
@on_ranks(4)
def test_ties_between_several_stages_follow_plain_torch(world, schedule):
    split = [str(2 * index) for index in range(1, 4)]
    reference, start = tied_chain(), tied_chain().state_dict()
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    with paramp.launch_from_torch({"parallel": {"pipeline": {"microbatches": 4, "split": split, **schedule}}}):
        engine = engine_of(tied_chain())
        for number in range(3):
            x, y = torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(number))
            plain.zero_grad()
            nn.functional.mse_loss(reference(x), y).backward()
            plain.step()
            train_step(engine, *own_part(engine.context, x, y))
        assert_trained(engine.full_state_dict(), reference.state_dict(), start, atol=1e-6)


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a GPU for each of two ranks")
def test_nccl_splits_the_worlds_communicator():
    done = torchrun(2, "tests/support/scripts/nccl_groups.py")
    assert done.returncode == 0, done.stderr
