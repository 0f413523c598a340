"""A context over a mesh of others: norms, decisions and checkpoints as in one process; their groups stay alive."""

import importlib.util
import math

import pytest
import torch
import torch.distributed as dist
from counting import Collectives
from pool import on_ranks, shared_folder
from reference import batches, plain_fp32_training, small_gpt, train_engine
from test_groups import maps
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import paramp
from paramp.distributed.axes import num_replicas, replicated_axes
from paramp.observe.replica_check import check_replicas


def by_name(sizes):
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def of_torchtitan(pp=1, dp_replicate=1, dp_shard=1, cp=1, tp=1):
    """One axis of all ranks, unflattened; fully_shard shards over dp_shard x cp; axes of size 1 move no data."""
    sizes = {"pp": pp, "dp_replicate": dp_replicate, "fsdp": dp_shard * cp, "tp": tp}
    fake = {name: "fake" for name, size in sizes.items() if size == 1}
    return by_name({"world": 4})._unflatten(0, tuple(sizes.values()), tuple(sizes), backend_override=fake)


def slice_of_torchtitan():
    """What ``parallel_dims.get_mesh(["fsdp", "tp"])`` returns."""
    return of_torchtitan(dp_shard=2, tp=2)["fsdp", "tp"]


def of_older_torchtitan():
    """Axes of size 1 are left out; others are flattened."""
    mesh = by_name({"dp_replicate": 2, "dp_shard": 2})
    mesh["dp_replicate", "dp_shard"]._flatten("dp")
    return mesh


def of_accelerate():
    from accelerate.parallelism_config import ParallelismConfig

    return ParallelismConfig(dp_shard_size=2, tp_size=2).build_device_mesh("cpu")


def of_transformers():
    from transformers.distributed import DistributedConfig
    from transformers.distributed.utils import initialize_distributed_mesh

    _, meshes = initialize_distributed_mesh(DistributedConfig(fsdp_size=2, tp_size=2))
    return meshes.get_mesh(("pp", "dp_replicate", "fsdp", "tp"))


MESHES = {  # and the axes over which fully_shard shards
    "torchtitan": (slice_of_torchtitan, ("fsdp",)),
    "torchtitan-hsdp": (lambda: of_torchtitan(dp_replicate=2, dp_shard=2), ("dp_replicate", "fsdp")),
    "torchtitan-cp": (lambda: of_torchtitan(dp_shard=1, cp=2, tp=2), ("fsdp",)),
    "torchtitan-2025": (of_older_torchtitan, ("dp_replicate", "dp_shard")),
    "accelerate": (of_accelerate, ("dp_shard",)),
    "transformers": (of_transformers, ("fsdp",)),
    "tp": (lambda: by_name({"dp": 2, "tp": 2}), ()),
}
MISSING = {name for name in ("accelerate", "transformers") if importlib.util.find_spec(name) is None}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


PLAN = {"1.up": ColwiseParallel(), "1.down": RowwiseParallel()}


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.LayerNorm(6), Block(), nn.LayerNorm(6))


def sharded(mesh, over):
    """The block sharded over ``tp`` and the axes ``over``; the norms stay plain, the same on every rank."""
    model = build()
    if "tp" in mesh.mesh_dim_names and mesh["tp"].size() > 1:
        parallelize_module(model, mesh["tp"], PLAN)
    if over:
        fully_shard(model[1], mesh=mesh[over])
    return model


def backward(model, factor=1.0):
    """Every rank has the whole batch, so that each gradient is that of one process."""
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    (model(x).square().mean() * factor).backward()


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@pytest.mark.parametrize("name", [name for name in MESHES if name not in MISSING])
@on_ranks(4)
def test_norms_and_skips_on_meshes_of_others_are_those_of_one_process(world, name):
    make, over = MESHES[name]
    reference = build()
    backward(reference)
    everything = torch.cat([parameter.grad.double().flatten() for parameter in reference.parameters()])
    mesh = make()
    groups = [mesh.get_group(index) for index in range(mesh.ndim)]
    model = sharded(mesh, over)
    before = maps()
    with paramp.ParallelContext.from_mesh(mesh) as context:
        assert context.mesh is mesh
        assert (context.pp.size, context.dp.size * context.tp.size) == (1, 4)
        backward(model)
        for order in (1.0, 2.0, 3.0, math.inf):
            with Collectives() as collectives:
                norm = paramp.clip_grad_norm_(model.parameters(), 1e9, order).item()
            assert collectives.counts == {"allreduce": 1}
            expected = torch.linalg.vector_norm(everything, order).item()
            assert abs(norm - expected) <= 1e-6 * expected, (order, norm, expected)
        paramp.clip_grad_norm_(model.parameters(), 0.1)
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
        for own, other in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(whole(own.grad), other.grad)
        check_skips(model, world)
        save_and_load(model, mesh, over)
    assert maps() == before
    for group, size in zip(groups, mesh.shape, strict=True):
        total = torch.ones(())
        dist.all_reduce(total, group=group)
        assert total == size
    with pytest.raises(ValueError, match="from_mesh"):
        paramp.clip_grad_norm_(model.parameters(), 1.0)


def check_skips(model, world):
    """An inf on one rank, in a shard and in a plain parameter, skips the step of every rank; without one all step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = paramp.DistributedGradScaler(init_scale=4.0)
    for number, index in enumerate((0, 2, 4, None)):  # a plain one, and the two weights of the block
        optimizer.zero_grad()
        backward(model, scaler.get_scale())
        if index is not None and world.rank == number:
            local([*model.parameters()][index].grad).view(-1)[-1] = math.inf
        start = [local(parameter).clone() for parameter in model.parameters()]
        scale = scaler.get_scale()
        scaler.step(optimizer)
        found = [(one.name, one.place.rank) for one in scaler.diagnose(model.named_parameters()).gradients]
        assert found == ([] if index is None else [([*dict(model.named_parameters())][index], number)])
        scaler.update()
        assert scaler.get_scale() == (scale if index is None else scale / 2)
        for parameter, old in zip(model.parameters(), start, strict=True):
            assert torch.equal(local(parameter), old) == (index is not None)
    find_drift(model, optimizer, scaler, world)
    model.scale = scaler.state_dict()


def find_drift(model, optimizer, scaler, world):
    """A change in a plain parameter, in the state of one, in a shard that is replicated, and in the scale."""
    parameters = [*model.parameters()]
    changed = [("weight", "0.weight", parameters[0]), ("optimizer state", "0.bias", momentum(optimizer, parameters[1]))]
    ranks = [replica_ranks(parameter, paramp.get_context()) for parameter in parameters]
    if len(ranks[2]) > 1:
        changed.append(("weight", "1.up.weight", parameters[2]))
    for kind, name, tensor in changed:
        assert check_replicas(model, optimizer, scaler) == []
        others = ranks[[*dict(model.named_parameters())].index(name)]
        kept = local(tensor).clone()
        if world.rank == 3:
            local(tensor).detach().view(-1)[0] += 1.0
        (found,) = check_replicas(model, optimizer, scaler)
        assert (found.kind, found.parameter, found.ranks) == (kind, name, (3,))
        if world.rank == 3:
            assert found.others == tuple(others[:-1])
            local(tensor).detach().copy_(kept)


def momentum(optimizer, parameter):
    return optimizer.state[parameter]["momentum_buffer"]


def replica_ranks(parameter, context):
    """The ranks that hold what this one holds of ``parameter``."""
    own = (parameter.device_mesh.get_coordinate(), parameter.placements) if isinstance(parameter, DTensor) else None
    shards = [None] * context.world_size
    place = own and [index for index, kind in zip(*own, strict=True) if not kind.is_replicate()]
    dist.all_gather_object(shards, place)
    return [rank for rank, other in enumerate(shards) if other == place]


def save_and_load(model, mesh, over):
    folder = shared_folder()
    dcp.save({"model": model.state_dict(), "scaler": model.scale}, checkpoint_id=folder)
    other = sharded(mesh, over)
    state = {"model": other.state_dict(), "scaler": paramp.DistributedGradScaler().state_dict()}
    dcp.load(state, checkpoint_id=folder)
    other.load_state_dict(state["model"])
    scaler = paramp.DistributedGradScaler()
    scaler.load_state_dict(state["scaler"])
    assert scaler.get_scale() == 0.5
    for own, loaded in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(whole(own), whole(loaded))


@on_ranks(2)
def test_plain_norms_under_a_tensor_parallel_mesh_and_a_step_on_one_rank_each(world):
    mesh = by_name({"model": 2})
    model = build()
    parallelize_module(model, mesh, PLAN)
    reference = build()
    backward(reference)
    backward(model)
    expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), 1e9)
    with paramp.ParallelContext.from_mesh(mesh, roles={"model": "tp"}) as context:
        torch.testing.assert_close(paramp.clip_grad_norm_(model.parameters(), 1e9), expected)
        assert (context.tp.rank, context.tp.size, context.dp.size) == (world.rank, 2, 1)
        assert context.tp.group is mesh.get_group()
        assert context.config.parallel.tensor.size == 2
        assert context.name_of(1) == "rank 1 (model 1)"


@on_ranks(4)
def test_experts_are_each_ranks_own_and_stages_too(world):
    with paramp.ParallelContext.from_mesh(by_name({"dp": 2, "ep": 2})) as context:
        expert, dense = (nn.Parameter(torch.zeros(2)) for _ in range(2))
        expert.allreduce = False
        ep = context.mesh.get_local_rank("ep")
        expert.grad, dense.grad = torch.full((2,), 1.0 + ep), torch.full((2,), 3.0)
        norm = paramp.clip_grad_norm_([expert, dense], 1e9)
        assert norm.item() == pytest.approx(math.sqrt(2 * (1 + 4 + 9)))
        assert replicated_axes(expert, context) == ["dp"]
        placed = nn.Parameter(distribute_tensor(torch.zeros(4), context.mesh["ep"], [Shard(0)]))
        placed.grad = distribute_tensor(torch.arange(4.0), context.mesh["ep"], [Shard(0)])
        assert paramp.clip_grad_norm_([placed], 1e9).item() == pytest.approx(math.sqrt(14))
    with paramp.ParallelContext.from_mesh(by_name({"efsdp": 2, "ep": 2}), roles={"efsdp": "fsdp"}) as context:
        mesh = context.mesh["efsdp"]
        expert = nn.Parameter(distribute_tensor(torch.zeros(4), mesh, [Shard(0)]))
        expert.allreduce = False
        ep = context.mesh.get_local_rank("ep")
        expert.grad = distribute_tensor(torch.full((4,), 3.0 + ep), mesh, [Shard(0)])
        assert paramp.clip_grad_norm_([expert], 1e9).item() == pytest.approx(10.0)
    with paramp.ParallelContext.from_mesh(by_name({"tp": 2, "pipe": 2}), roles={"pipe": "pp"}) as context:
        own = nn.Parameter(torch.zeros(1))
        own.grad = torch.full((1,), 3.0 + context.pp.rank)
        assert paramp.clip_grad_norm_([own], 1e9).item() == 5.0
        assert context.pp.rank == world.rank % 2
        assert dist.get_process_group_ranks(context.model_group) == [0, 1, 2, 3]


@on_ranks(4)
def test_a_mesh_whose_ranks_are_in_another_order(world):
    with paramp.ParallelContext.from_mesh(DeviceMesh("cpu", [[3, 1], [0, 2]], mesh_dim_names=("dp", "tp"))) as context:
        assert context.coordinates == {"dp": int(world.rank in (0, 2)), "tp": int(world.rank in (1, 2))}
        square, line = init_device_mesh("cpu", (2, 2)), init_device_mesh("cpu", (4,))
        for mesh, placements, expected, copies in (
            (context.mesh["tp"], [Shard(0)], ["dp"], 2),
            (square, [Replicate(), Shard(0)], ["tp"], 2),
            (square, [Shard(0), Replicate()], [], 2),  # ranks 0 and 1, which differ in both coordinates
            (line, [Shard(0)], [], 1),
            (line, [Replicate()], ["dp", "tp"], 4),
        ):
            tensor = distribute_tensor(torch.zeros(4), mesh, placements)
            assert replicated_axes(tensor, context) == expected, (mesh, placements)
            assert num_replicas(tensor, context) == copies
        with pytest.raises(paramp.ConfigError, match=r"the axis 'dp' that do not ascend, \[\[3, 1\], \[0, 2\]\]"):
            paramp.initialize(nn.Linear(2, 2), lambda parameters: torch.optim.SGD(parameters))


# --------------------------------------------------------------------------------------------------------- the engine


@pytest.mark.parametrize("sizes", [{"model": 2, "pipe": 2}, {"model": 2, "batch": 2}])
@on_ranks(4)
def test_an_engine_on_a_mesh_of_others_trains_as_one_process(world, sizes):
    """The tensor axis is the slowest, which it never is on a mesh of paramp's own."""
    mesh, roles = by_name(sizes), {"model": "tp", "pipe": "pp", "batch": "ddp"}
    losses, _ = plain_fp32_training(4)
    parallel = {"pipeline": {"schedule": "gpipe"}, "sequence_parallel": True, "zero": int("batch" in sizes)}
    config = {"clip_grad_norm": 1.0, "parallel": parallel}
    roles = {name: role for name, role in roles.items() if name in sizes}
    with paramp.ParallelContext.from_mesh(mesh, config, roles=roles) as context:
        adamw = {"optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)}
        actual, _ = train_engine(context, small_gpt, gpt_loss, 4, **adamw)
        torch.testing.assert_close(actual, losses, atol=1e-5, rtol=0)
        model = small_gpt(num_layers=2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        engine, *_ = paramp.initialize(model, optimizer, model.loss, context=context)
        meshes = {value.device_mesh for _, value in engine.named_parameters() if isinstance(value, DTensor)}
        assert meshes == {mesh["model"]}
        check_drift(engine, world)
        folder = shared_folder()
        engine.save(folder / "saved")
        kept = engine.full_state_dict()
        with torch.no_grad():
            for _, value in engine.named_parameters():
                local(value).zero_()
        engine.load(folder / "saved")
        for name, value in engine.full_state_dict().items():
            assert torch.equal(value, kept[name])


def gpt_loss(logits, target):
    return nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), target.reshape(-1))


@pytest.mark.parametrize("sizes", [{"model": 2, "fsdp": 2}, {"dp_replicate": 2, "dp_shard": 2}])
@on_ranks(4)
def test_an_engine_shards_parameters_over_a_mesh_of_others(world, sizes):
    losses, _ = plain_fp32_training(4)
    parallel = {"sequence_parallel": "model" in sizes}
    roles = {"model": "tp"} if "model" in sizes else None
    config = {"clip_grad_norm": 1.0, "parallel": parallel}
    with paramp.ParallelContext.from_mesh(by_name(sizes), config, roles=roles) as context:
        adamw = {"optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)}
        actual, _ = train_engine(context, small_gpt, gpt_loss, 4, **adamw)
        torch.testing.assert_close(actual, losses, atol=1e-5, rtol=0)
        model = small_gpt(num_layers=2)
        engine, *_ = paramp.initialize(model, adamw["optimizer"], model.loss, context=context)
        sizes_of = {value.to_local().numel() / value.numel() for _, value in engine.named_parameters()}
        assert max(sizes_of) <= 0.5


def check_drift(engine, world):
    """A norm is replicated over tensor ranks, and over data ranks, but not over stages."""
    x, y = next(batches(1))
    engine.forward_backward(x, y)
    engine.step()
    assert engine.check_replicas() == []
    norm = next(value for name, value in engine.named_parameters() if "norm" in name)
    if world.rank == 3:
        local(norm).detach().view(-1)[0] += 1.0
    (found,) = engine.check_replicas()
    assert (found.ranks, found.others) == ((3,), (1,) if engine.context.pp.size > 1 else (0, 1, 2))
    engine._replicas.repair([found])


@on_ranks(4)
def test_the_engine_refuses_axes_that_it_does_not_train_over(world):
    for sizes in ({"cp": 4}, {"dp": 2, "ep": 2}):
        with paramp.ParallelContext.from_mesh(by_name(sizes)) as context:
            name = [*sizes][-1]
            with pytest.raises(paramp.ConfigError, match=f"the axis '{name}' of {sizes[name]} ranks.*clip_grad_norm_"):
                paramp.initialize(nn.Linear(2, 2), lambda parameters: torch.optim.SGD(parameters), context=context)
            with paramp.launch_from_torch(), pytest.raises(paramp.ConfigError, match="the latest one that is open"):
                paramp.initialize(nn.Linear(2, 2), lambda parameters: torch.optim.SGD(parameters), context=context)
    expected = pytest.raises(paramp.ConfigError, match="dp_shard, dp_replicate, expected the one that replicates")
    with paramp.ParallelContext.from_mesh(by_name({"dp_shard": 2, "dp_replicate": 2})) as context, expected:
        paramp.initialize(nn.Linear(2, 2), lambda parameters: torch.optim.SGD(parameters), context=context)


# --------------------------------------------------------------------------------------------------------- bad input


def wrong_arguments():
    """Arguments, and the error that every rank raises."""
    square = by_name({"dp": 2, "tp": 1})
    yield (None,), "mesh: got None, expected a torch.distributed.device_mesh.DeviceMesh"
    yield (init_device_mesh("cpu", (2, 1)),), r"mesh: got a mesh of 2 x 1 ranks without names.*mesh_dim_names="
    yield (by_name({"dp_shards": 2}),), r"the axis 'dp_shards', expected one of pp, .*did you mean 'dp_shard'.*roles="
    yield (
        (by_name({"dp": 1, "ddp": 2}),),
        r"the axes 'dp' and 'ddp', which have the same role \(dp, ddp, dp_replicate\)",
    )
    yield (
        (DeviceMesh("cpu", [[0, 1]], mesh_dim_names=("dp", "dp")),),
        "the axes 'dp' and 'dp', which have the same role",
    )
    yield (
        (square["tp"],),
        r"mesh: got a mesh of the ranks \[.\], expected all 2 ranks of the world; pass the whole mesh",
    )
    yield (
        (DeviceMesh("cpu", [1], mesh_dim_names=("dp",)),),
        r"mesh: got a mesh of the ranks \[1\].*expected all 2 ranks",
    )
    yield (square, None, {"dp": "data"}), r"roles\['dp'\]: got 'data', expected one of pp, dp"
    yield (square, None, {"model": "tp"}), r"roles: got 'model', expected an axis of the mesh: dp, tp"
    yield (square, None, ["tp"]), r"roles: got \['tp'\], expected a dict.*\{'dp': 'tp'\}"
    for parallel in ({"tensor": 2}, {"tensor": {"size": 2}}, {"pipeline": 2}, {"data": 1}):
        (key,) = parallel
        yield (square, {"parallel": parallel}), rf"parallel.{key}: got ., but the mesh has . rank\(s\) there; leave it"
    sharded = {"parallel": {"data": {"shard": 2}}}
    yield (square, sharded), r"parallel.data.shard: got 2, but the mesh has 1"
    given = paramp.Config(parallel={"tensor": 2})
    yield (square, given), r"parallel.tensor: got 2, but the mesh has 1"
    yield (square, {"paralel": 1}), "paralel: no such key"
    yield (square, "nowhere.toml"), "no file"
    yield (DeviceMesh("meta", [[0, 1]], mesh_dim_names=("dp", "tp")),), "a mesh of the device 'meta', expected 'cpu'"


@on_ranks(2)
def test_wrong_arguments_are_an_error_on_every_rank(world):
    for arguments, message in wrong_arguments():
        names, before = ("mesh", "config", "roles"), maps()
        with pytest.raises((paramp.ConfigError, FileNotFoundError), match=message):
            paramp.ParallelContext.from_mesh(**dict(zip(names, arguments, strict=False)))
        assert maps() == before
    mesh = by_name({"dp": 2})
    with pytest.raises(paramp.ConfigError, match=r"^(rank 1: )?roles\['dp'\]: got 'data'"):
        paramp.ParallelContext.from_mesh(mesh, roles={"dp": "data"} if world.rank else None)
    with pytest.raises(paramp.ConfigError, match=r"roles: rank 0 has {'dp': 'replicate'}, but rank 1 .*'shard'}"):
        paramp.ParallelContext.from_mesh(mesh, roles={"dp": "fsdp"} if world.rank else None)
    with pytest.raises(paramp.ConfigError, match=r"clip_grad_norm: rank 0 has None, but rank 1 has 1\.0"):
        paramp.ParallelContext.from_mesh(mesh, {"clip_grad_norm": 1.0} if world.rank else None)
    fake = by_name({"world": 2})._unflatten(0, (2, 1), ("dp", "tp"), backend_override={"dp": "fake"})
    with pytest.raises(paramp.ConfigError, match="'dp' has the backend 'fake', which moves no data"):
        paramp.ParallelContext.from_mesh(fake)
    with pytest.raises(RuntimeError, match="no parallel context"):
        paramp.get_context()


def test_one_context_after_another_and_one_that_is_left_twice():
    with pytest.raises(paramp.ConfigError, match=r"torch.distributed is not initialised.*init_process_group"):
        paramp.ParallelContext.from_mesh(None)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        if not torch.cuda.is_available():
            with pytest.raises(paramp.ConfigError, match="the device 'cuda', but torch sees no GPU; make a mesh of"):
                paramp.ParallelContext.from_mesh(init_device_mesh("cuda", (1,), mesh_dim_names=("dp",)))
        mesh = by_name({"dp": 1})
        torch.manual_seed(5)
        expected = torch.get_rng_state()
        with paramp.ParallelContext.from_mesh(mesh) as context:
            assert torch.equal(torch.get_rng_state(), expected)
            assert paramp.get_context() is context
        context.close()
        with pytest.raises(RuntimeError, match=r"ParallelContext\(dp 1, .*was closed.*make another"):
            context.__enter__()
        given = paramp.Config(precision="16-mixed", parallel={"pipeline": {"microbatches": 2}})
        with paramp.ParallelContext.from_mesh(mesh, given) as context:
            assert context.config.precision.name == "16-mixed"
            model = nn.Linear(2, 2)
            engine, *_ = paramp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.functional.mse_loss)
            engine.forward_backward(torch.ones(2, 2), torch.zeros(2, 2))
            assert engine.step().stepped
        dist.all_reduce(torch.ones(()), group=mesh.get_group())
    finally:
        dist.destroy_process_group()
    dist.init_process_group("cuda:gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(paramp.ConfigError, match=r"the device 'cpu', for which .* \(cuda:gloo\) has no backend"):
            paramp.ParallelContext.from_mesh(by_name({"dp": 1}))
    finally:
        dist.destroy_process_group()
