"""Models as torch's own wrappers leave them: compiled ones are compiled by blocks, distributed ones are refused."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from pool import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import paramp


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Doubled(nn.Linear):
    pass


def build():
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), Doubled(8, 8))
    model[2].forward = lambda x: 2.0 * x  # an attribute of the module only
    return model


graphs = []


def counting(graph, inputs):
    graphs.append(graph)
    return graph.forward


def compiled(thing):
    return torch.compile(thing, backend=counting)


def whole(model):
    return compiled(model)


def blocks(model):
    for index in (0, 1):
        model[index] = compiled(model[index])
    return model


def in_place(model):
    model[0].compile(backend=counting)
    model.compile(backend=counting)
    return model


def forwards(model):
    for module in model:
        module.forward = compiled(module.forward)
    return model


def twice(model):
    return compiled(nn.Sequential(compiled(model[0]), model[1], model[2]))


def train(parallel, change=lambda model: model):
    """The losses of two steps, and the model's weights."""
    with warnings.catch_warnings(), paramp.launch_from_torch({"parallel": parallel}):
        # torch hides these, but not if they are errors
        warnings.filterwarnings("ignore", "The .grad attribute")
        warnings.filterwarnings("ignore", ".*Function'> should not be instantiated", DeprecationWarning)
        model = change(build())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        plan = {"*.up": "colwise", "*.down": "rowwise"}
        engine, *_ = paramp.initialize(model, optimizer, F.mse_loss, plan=plan)
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
        losses = []
        for _ in range(2):
            losses.append(engine.forward_backward(x, x.flip(0)).item())
            engine.step()
        return losses, engine.full_state_dict()


WAYS = (whole, blocks, in_place, forwards, twice)


def assert_trains_as_plain(parallel, ways=WAYS):
    losses, weights = train(parallel)
    for way in ways:
        graphs.clear()
        others, theirs = train(parallel, way)
        assert graphs, way  # compiled with the model's own backend
        assert others == losses, way
        assert [*theirs] == [*weights], way
        assert all(torch.equal(value, weights[name]) for name, value in theirs.items()), way


def test_a_compiled_model_is_compiled_by_blocks():
    assert_trains_as_plain({})


def test_its_options_are_kept_and_those_of_the_configuration_win():
    from paramp.base.wrapped_models import without_compilation

    _, options = without_compilation(torch.compile(build(), backend="eager", dynamic=False, fullgraph=True))
    assert options.pop("backend").compiler_name == "eager"
    assert options == {"dynamic": False, "fullgraph": True}
    assert without_compilation(build())[1] is None
    graphs.clear()
    with warnings.catch_warnings(), paramp.launch_from_torch({"compile": {"backend": "eager"}}):
        warnings.filterwarnings("ignore", "The .grad attribute")
        model = whole(build())
        engine, *_ = paramp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), F.mse_loss)
        engine.forward_backward(torch.randn(4, 8), torch.randn(4, 8))
        assert not graphs


@pytest.mark.parametrize("axis", ["tensor", "pipeline"])
@on_ranks(2)
def test_a_compiled_model_is_sharded_and_partitioned(world, axis):
    assert_trains_as_plain({axis: 2}, [blocks, in_place])


@on_ranks(2)
def test_models_that_are_distributed_already_are_refused(world):
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.tensor import distribute_module

    def in_ddp(model, mesh):
        return nn.parallel.DistributedDataParallel(model)

    def in_fsdp(model, mesh):
        with warnings.catch_warnings(action="ignore"):
            return FullyShardedDataParallel(model, device_id=torch.device("cpu"))

    def fsdp2(model, mesh):
        fully_shard(model[1], mesh=mesh)
        return model

    def dtensors(model, mesh):
        return distribute_module(model, mesh)

    def compiled_ddp(model, mesh):
        return compiled(in_ddp(model, mesh))

    expected = {
        in_ddp: r"it is a DistributedDataParallel, expected the plain model; remove DistributedDataParallel\(",
        compiled_ddp: "it is a DistributedDataParallel",
        in_fsdp: r"it is a FullyShardedDataParallel, .*parallel\.data\.shard shards",
        fsdp2: r"'1' is sharded by fully_shard, .*remove fully_shard.*data\.shard does.*DistributedGradScaler",
        dtensors: r"'0.up.weight' is a DTensor already, .*build a new model .*or remove parallelize_module",
    }
    for wrap, message in expected.items():
        with paramp.launch_from_torch({"parallel": {"data": 2}}):
            model = wrap(build(), init_device_mesh("cpu", (2,)))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            with pytest.raises(paramp.ConfigError, match=f"^model: {message}"):
                paramp.initialize(model, optimizer, F.mse_loss)


def part_disabled(model):
    model[0].up = torch.compiler.disable(model[0].up)
    model[1].down.forward = torch.compiler.disable(model[1].down.forward)
    return model


@pytest.mark.parametrize("compile", [False, {"backend": counting}])
def test_a_disabled_module_stays_so_and_asks_for_no_compilation(compile):
    graphs.clear()
    with warnings.catch_warnings(), paramp.launch_from_torch({"compile": compile}):
        warnings.filterwarnings("ignore", "compile: the graph of .* breaks|The .grad attribute")
        model = part_disabled(build())
        engine, *_ = paramp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), F.mse_loss)
        engine.forward_backward(torch.ones(2, 8), torch.ones(2, 8))
    assert [*dict(engine.module.named_parameters())] == [*dict(build().named_parameters())]
    assert bool(graphs) == bool(compile)
    targets = [str(node.target) for graph in graphs for node in graph.graph.nodes]
    assert sum("linear" in target for target in targets) == (2 if compile else 0)  # of the blocks' four
