"""Models as torch's own wrappers leave them: compiled ones are compiled by blocks."""

import pytest
import torch
from beside_plain import launch_with_compiler as launch
from beside_plain import randn
from pool import on_ranks
from small_engines import engine_of
from torch import nn

from paramp.base.wrapped_models import without_compilation


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


def build():
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), type("Doubled", (nn.Linear,), {})(8, 8))
    model[2].forward = lambda x: 2.0 * x  # an attribute of the module only
    return model


graphs = []


def counting(graph, inputs):
    graphs.append(graph)
    return graph.forward


def whole(model):
    return torch.compile(model, backend=counting)


def blocks(model):
    for index in (0, 1):
        model[index] = whole(model[index])
    return model


def in_place(model):
    model[0].compile(backend=counting)
    model.compile(backend=counting)
    return model


def forwards(model):
    for module in model:
        module.forward = whole(module.forward)
    return model


def twice(model):
    return whole(nn.Sequential(whole(model[0]), model[1], model[2]))


def train(parallel, change=lambda model: model):
    """The losses of two steps, and the model's weights."""
    with launch({"parallel": parallel}):
        engine = engine_of(change(build()), plan={"*.up": "colwise", "*.down": "rowwise"})
        x = randn(4, 8)
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
    _, options = without_compilation(torch.compile(build(), backend="eager", dynamic=False, fullgraph=True))
    assert options.pop("backend").compiler_name == "eager"
    assert options == {"dynamic": False, "fullgraph": True}
    assert without_compilation(build())[1] is None
    graphs.clear()
    with launch({"compile": {"backend": "eager"}}):
        engine_of(whole(build())).forward_backward(torch.ones(4, 8), torch.ones(4, 8))
        assert not graphs


@pytest.mark.parametrize("axis", ["tensor", "pipeline"])
@on_ranks(2)
def test_a_compiled_model_is_sharded_and_partitioned(world, axis):
    assert_trains_as_plain({axis: 2}, [blocks, in_place])


def part_disabled(model):
    model[0].up = torch.compiler.disable(model[0].up)
    model[1].down.forward = torch.compiler.disable(model[1].down.forward)
    return model


@pytest.mark.parametrize("compile", [False, {"backend": counting}])
def test_a_disabled_module_stays_so_and_asks_for_no_compilation(compile):
    graphs.clear()
    with launch({"compile": compile}, "compile: the graph of .* breaks"):
        engine = engine_of(part_disabled(build()))
        engine.forward_backward(torch.ones(2, 8), torch.ones(2, 8))
    assert [*dict(engine.module.named_parameters())] == [*dict(build().named_parameters())]
    assert bool(graphs) == bool(compile)
    targets = [str(node.target) for graph in graphs for node in graph.graph.nodes]
    assert sum("linear" in target for target in targets) == (2 if compile else 0)  # of the blocks' four
