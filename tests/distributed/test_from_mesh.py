"""A context over a mesh of others: norms, decisions and checkpoints as in one process; their groups stay alive."""

import functools
import math

import pytest
import torch
import torch.distributed as dist
from counting import Collectives
from families import rarely
from pool import on_ranks
from reference import local, plain_fp32_training, small_gpt, train_engine, whole
from small_engines import each_raises, engine_of, train_step
from small_mlp import Block
from test_process_groups import maps
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import paramp


def by_name(sizes):
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def of_torchtitan(pp=1, dp_replicate=1, dp_shard=1, cp=1, tp=1):
    """One axis of all ranks, unflattened; fully_shard shards over dp_shard x cp; axes of size 1 move no data."""
    sizes = {"pp": pp, "dp_replicate": dp_replicate, "fsdp": dp_shard * cp, "tp": tp}
    fake = {name: "fake" for name, size in sizes.items() if size == 1}
    return by_name({"world": 4})._unflatten(0, tuple(sizes.values()), tuple(sizes), backend_override=fake)


def of_transformers(axes, **sizes):
    """Its own."""
    from transformers.distributed import DistributedConfig
    from transformers.distributed.utils import initialize_distributed_mesh

    return initialize_distributed_mesh(DistributedConfig(**sizes))[1].get_mesh(axes)


def of_older_torchtitan():
    """Axes of size 1 are left out; others are flattened."""
    mesh = by_name({"dp_replicate": 2, "dp_shard": 2})
    mesh["dp_replicate", "dp_shard"]._flatten("dp")
    return mesh


MESHES = {  # and the axes over which fully_shard shards
    "torchtitan": (lambda: of_torchtitan(dp_shard=2, tp=2)["fsdp", "tp"], ("fsdp",)),
    "torchtitan-hsdp": (lambda: of_torchtitan(dp_replicate=2, dp_shard=2), ("dp_replicate", "fsdp")),
    "torchtitan-cp": (lambda: of_torchtitan(dp_shard=1, cp=2, tp=2), ("fsdp",)),
    "torchtitan-2025": (of_older_torchtitan, ("dp_replicate", "dp_shard")),
    "accelerate": (lambda: by_name({"dp_shard": 2, "tp": 2}), ("dp_shard",)),
    "transformers": (
        lambda: of_transformers(("pp", "dp_replicate", "fsdp", "tp"), fsdp_size=2, tp_size=2),
        ("dp_replicate", "fsdp"),
    ),
    "tp": (lambda: by_name({"dp": 2, "tp": 2}), ()),
}


PLAN = {"1.up": ColwiseParallel(), "1.down": RowwiseParallel()}


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.LayerNorm(6), Block(6, 10), nn.LayerNorm(6))


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
    return model


@pytest.mark.parametrize("name", rarely(MESHES, "torchtitan-hsdp", "torchtitan-cp", "accelerate"))
@on_ranks(4)
def test_norms_and_skips_on_meshes_of_others_are_those_of_one_process(world, name):
    make, over = MESHES[name]
    reference = backward(build())
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
            assert norm == pytest.approx(torch.linalg.vector_norm(everything, order).item(), rel=1e-6)
        paramp.clip_grad_norm_(model.parameters(), 0.1)
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
        for own, other in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(whole(own.grad), other.grad)
        check_skips(model, world)
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
        scale = scaler.get_scale()
        backward(model, scale)
        if world.rank == number != 3:
            local([*model.parameters()][index].grad).view(-1)[-1] = math.inf
        start = [local(parameter).clone() for parameter in model.parameters()]
        scaler.step(optimizer)
        found = [(one.name, one.place.rank) for one in scaler.diagnose(model.named_parameters()).gradients]
        assert found == ([] if index is None else [([*dict(model.named_parameters())][index], number)])
        scaler.update()
        assert scaler.get_scale() == (scale if index is None else scale / 2)
        for parameter, old in zip(model.parameters(), start, strict=True):
            assert torch.equal(local(parameter), old) == (index is not None)


def parameter_with(gradient, mesh=None, expert=False):
    """A parameter, sharded over ``mesh`` if that is given; of experts, each rank has its own."""

    def place(tensor):
        return tensor if mesh is None else distribute_tensor(tensor, mesh, [Shard(0)])

    parameter = nn.Parameter(place(torch.zeros_like(gradient)))
    parameter.grad = place(gradient)
    if expert:
        parameter.allreduce = False
    return parameter


@on_ranks(4)
def test_experts_are_each_ranks_own_and_stages_too(world):
    def norm_of(*parameters):
        return paramp.clip_grad_norm_(parameters, 1e9).item()

    with paramp.ParallelContext.from_mesh(by_name({"dp": 2, "ep": 2})) as context:
        expert = parameter_with(torch.full((2,), 1.0 + context.mesh.get_local_rank("ep")), expert=True)
        dense = parameter_with(torch.full((2,), 3.0))
        assert norm_of(expert, dense) == pytest.approx(math.sqrt(2 * (1 + 4 + 9)))
        assert norm_of(parameter_with(torch.arange(4.0), context.mesh["ep"])) == pytest.approx(math.sqrt(14))
    for mesh in (
        by_name({"efsdp": 2, "ep": 2}),
        of_transformers(("pp", "dp_replicate", "efsdp", "ep"), fsdp_size=4, ep_size=2),
    ):
        with paramp.ParallelContext.from_mesh(mesh) as context:
            gradient = torch.full((4,), 3.0 + context.mesh.get_local_rank("ep"))
            assert norm_of(parameter_with(gradient, context.mesh["efsdp"], expert=True)) == pytest.approx(10.0)
    with paramp.ParallelContext.from_mesh(by_name({"tp": 2, "pipe": 2}), roles={"pipe": "pp"}) as context:
        assert norm_of(parameter_with(torch.full((1,), 3.0 + context.pp.rank))) == 5.0
        assert context.pp.rank == world.rank % 2
        assert dist.get_process_group_ranks(context.model_group) == [0, 1, 2, 3]


def initialize(context=None):
    return paramp.initialize(nn.Linear(2, 2), torch.optim.SGD, context=context)


@on_ranks(4)
def test_a_mesh_whose_ranks_are_in_another_order(world):
    with paramp.ParallelContext.from_mesh(DeviceMesh("cpu", [[3, 1], [0, 2]], mesh_dim_names=("dp", "tp"))) as context:
        assert context.coordinates == {"dp": int(world.rank in (0, 2)), "tp": int(world.rank in (1, 2))}
        square, line, gradient = init_device_mesh("cpu", (2, 2)), init_device_mesh("cpu", (4,)), torch.arange(4.0)
        for mesh, *placements in (
            (context.mesh["tp"], Shard(0)),
            (square, Replicate(), Shard(0)),
            (square, Shard(0), Replicate()),  # ranks 0 and 1, which differ in both coordinates
            (line, Shard(0)),
            (line, Replicate()),
            (context.mesh["dp", "tp"]._flatten("all"), Shard(0)),
        ):
            parameter = nn.Parameter(distribute_tensor(torch.zeros(4), mesh, placements))
            parameter.grad = distribute_tensor(gradient, mesh, placements)
            norm = paramp.clip_grad_norm_([parameter], 1e9).item()
            assert norm == pytest.approx(math.sqrt(14)), (mesh, placements)
        with pytest.raises(paramp.ConfigError, match=r"the axis 'dp' that do not ascend, \[\[3, 1\], \[0, 2\]\]"):
            initialize()


# --------------------------------------------------------------------------------------------------------- the engine

ROLES = {"model": "tp", "pipe": "pp", "batch": "ddp"}


def gpt_loss(logits, target):
    return nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), target.reshape(-1))


AXES = ("model pipe", "model batch", "model fsdp", "fsdp pipe", "batch pipe", "dp_replicate dp_shard")


@pytest.mark.parametrize("axes", rarely(AXES, "model fsdp"))
@on_ranks(4)
def test_an_engine_on_a_mesh_of_others_trains_as_one_process(world, axes):
    """The tensor or data axis is the slowest, which it never is on a mesh of paramp's own."""
    mesh, adamw = by_name(dict.fromkeys(axes.split(), 2)), functools.partial(torch.optim.AdamW, lr=1e-3)
    losses, _ = plain_fp32_training(4)
    assert abs(losses[-1] - losses[0]) > 1e-4
    parallel = {"pipeline": {"schedule": "gpipe"}, "sequence_parallel": "model" in axes, "zero": int("batch" in axes)}
    roles = {name: ROLES[name] for name in axes.split() if name in ROLES}
    config = {"clip_grad_norm": 1.0, "parallel": parallel}
    with paramp.ParallelContext.from_mesh(mesh, config, roles=roles) as context:
        assert context.name_of(3) == "rank 3 ({} 1, {} 1)".format(*axes.split())
        if "model" in axes:
            assert context.tp.group is mesh.get_group("model")
            assert (context.tp.rank, context.tp.size, context.config.parallel.tensor.size) == (world.rank // 2, 2, 2)
        actual, _ = train_engine(context, small_gpt, gpt_loss, 4, optimizer=adamw)
        torch.testing.assert_close(actual, losses, atol=1e-5, rtol=0)
        model = small_gpt(num_layers=2)
        engine, *_ = paramp.initialize(model, adamw, model.loss, context=context)
        parameters = [value for _, value in engine.named_parameters()]
        if axes in ("model pipe", "model batch"):
            assert {value.device_mesh for value in parameters if isinstance(value, DTensor)} == {mesh["model"]}
        elif axes != "batch pipe":
            assert max(local(value).numel() / value.numel() for value in parameters) <= 0.5


@on_ranks(4)
def test_the_engine_refuses_axes_that_it_does_not_train_over(world):
    with paramp.ParallelContext.from_mesh(by_name({"dp": 2, "ep": 2})) as context:
        with pytest.raises(paramp.ConfigError, match=r"the axis 'ep' of 2 ranks.*clip_grad_norm_"):
            initialize(context)
        with paramp.launch_from_torch(), pytest.raises(paramp.ConfigError, match="the latest one that is open"):
            initialize(context)
    expected = pytest.raises(
        paramp.ConfigError, match="dp_shard, cp, expected one that shards parameters over the ranks"
    )
    with paramp.ParallelContext.from_mesh(by_name({"dp_shard": 2, "cp": 2})) as context, expected:
        initialize(context)
    expected = pytest.raises(paramp.ConfigError, match="dp_shard, dp_replicate, expected the one that replicates")
    with paramp.ParallelContext.from_mesh(by_name({"dp_shard": 2, "dp_replicate": 2})) as context, expected:
        initialize(context)


# --------------------------------------------------------------------------------------------------------- bad input


def wrong_arguments():
    """The error that every rank raises, and the arguments."""
    square = by_name({"dp": 2, "tp": 1})
    return {
        "mesh: got None, expected a torch.distributed.device_mesh.DeviceMesh": (None,),
        r"got a mesh of 2 x 1 ranks without names.*mesh_dim_names=": (init_device_mesh("cpu", (2, 1)),),
        r"'dp_shards', expected one of pp, .*did you mean 'dp_shard'.*roles=": (by_name({"dp_shards": 2}),),
        r"'dp' and 'ddp', which have the same role \(dp, ddp, dp_replicate\)": (by_name({"dp": 1, "ddp": 2}),),
        "'dp' and 'dp', which have the same role": (DeviceMesh("cpu", [[0, 1]], mesh_dim_names=("dp", "dp")),),
        r"ranks \[.\], expected all 2 ranks of the world; pass the whole mesh": (square["tp"],),
        r"mesh of the ranks \[1\].*expected all 2 ranks": (DeviceMesh("cpu", [1], mesh_dim_names=("dp",)),),
        r"roles\['dp'\]: got 'data', expected one of pp, dp": (square, None, {"dp": "data"}),
        "roles: got 'model', expected an axis of the mesh: dp, tp": (square, None, {"model": "tp"}),
        r"roles: got \['tp'\], expected a dict.*\{'dp': 'tp'\}": (square, None, ["tp"]),
        "parallel.data.shard: got 2, but the mesh has 1": (square, {"parallel": {"data": {"shard": 2}}}),
        "parallel.tensor: got 2, but the mesh has 1": (square, paramp.Config(parallel={"tensor": 2})),
        r"parallel.tensor: got 2, but the mesh has 1 rank\(s\) there; leave it": (square, {"parallel": {"tensor": 2}}),
        r"parallel.tensor: got 2, but the mesh has 1 ra": (square, {"parallel": {"tensor": {"size": 2}}}),
        r"parallel.pipeline: got 2, but the mesh has 1 rank\(s\) there": (square, {"parallel": {"pipeline": 2}}),
        r"parallel.data: got 1, but the mesh has 2 rank\(s\) there": (square, {"parallel": {"data": 1}}),
        "paralel: no such key": (square, {"paralel": 1}),
        "no file": (square, "nowhere.toml"),
        "a mesh of the device 'meta', expected 'cpu'": (DeviceMesh("meta", [[0, 1]], mesh_dim_names=("dp", "tp")),),
    }


@on_ranks(2)
def test_wrong_arguments_are_an_error_on_every_rank(world):
    make = paramp.ParallelContext.from_mesh
    for message, (mesh, *others) in wrong_arguments().items():
        config, roles = (*others, None, None)[:2]
        before = maps()
        each_raises((paramp.ConfigError, FileNotFoundError), {message: lambda: make(mesh, config, roles=roles)})  # noqa: B023
        assert maps() == before
    mesh = by_name({"dp": 2})
    fake = by_name({"world": 2})._unflatten(0, (2, 1), ("dp", "tp"), backend_override={"dp": "fake"})

    def second(value):
        return value if world.rank else None

    each_raises(
        paramp.ConfigError,
        {
            r"^(rank 1: )?roles\['dp'\]: got 'data'": lambda: make(mesh, roles=second({"dp": "data"})),
            r"roles: rank 0 has {'dp': 'replicate'}, but .*'shard'}": lambda: make(mesh, roles=second({"dp": "fsdp"})),
            r"clip_grad_norm: rank 0 has None, but rank 1 has 1\.0": lambda: make(
                mesh, second({"clip_grad_norm": 1.0})
            ),
            "'dp' has the backend 'fake', which moves no data": lambda: make(fake),
        },
    )
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
            assert train_step(engine_of(nn.Linear(2, 2)), torch.ones(2, 2)).stepped
        dist.all_reduce(torch.ones(()), group=mesh.get_group())
    finally:
        dist.destroy_process_group()
    dist.init_process_group("cuda:gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(paramp.ConfigError, match=r"the device 'cpu', for which .* \(cuda:gloo\) has no backend"):
            paramp.ParallelContext.from_mesh(by_name({"dp": 1}))
    finally:
        dist.destroy_process_group()
