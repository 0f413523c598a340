"""Models as torch's own wrappers leave them: compiled ones are compiled by blocks."""

import pytest
import torch
from beside_plain import launch_with_compiler as launch
from beside_plain import randn
from families import family, rarely
from pool import on_ranks
from small_engines import assert_same_tensors, engine_of
from small_mlp import Block
from torch import nn

from paramp.base.wrapped_models import without_compilation


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


def assert_trains_as_plain(parallel, ways):
    losses, weights = train(parallel)
    for way in ways:
        graphs.clear()
        others, theirs = train(parallel, way)
        assert graphs, way  # compiled with the model's own backend
        assert others == losses, way
        assert_same_tensors(theirs, weights)


def test_a_compiled_model_is_compiled_by_blocks():
    assert_trains_as_plain({}, [whole, blocks, in_place, forwards, twice])


@family
@pytest.mark.parametrize("axis", rarely(["tensor", "pipeline"], "pipeline"))
@on_ranks(2)
def test_a_compiled_model_is_sharded_and_partitioned(world, axis):
    assert_trains_as_plain({axis: 2}, [blocks, in_place])


def part_disabled(model):
    model[0].up = torch.compiler.disable(model[0].up)
    model[1].down.forward = torch.compiler.disable(model[1].down.forward)
    return model


@pytest.mark.parametrize(
    ("change", "compile", "products"),
    [
        (part_disabled, False, None),
        (part_disabled, {"backend": counting}, 2),
        (whole, {"backend": "eager"}, None),
        (lambda model: torch.compile(model, backend=counting, dynamic=False, fullgraph=True), False, 4),
    ],
)
def test_parts_that_are_disabled_stay_so_and_the_configuration_wins(change, compile, products):
    """How many of the blocks' four products the test's backend was given; None: it was not called."""
    graphs.clear()
    with launch({"compile": compile}, "compile: the graph of .* breaks"):
        engine = engine_of(change(build()))
        engine.forward_backward(torch.ones(2, 8), torch.ones(2, 8))
    assert [*dict(engine.module.named_parameters())] == [*dict(build().named_parameters())]
    targets = [str(node.target) for graph in graphs for node in graph.graph.nodes]
    assert (sum("linear" in target for target in targets) if graphs else None) == products


@pytest.mark.parametrize("given", [{}, {"dynamic": False}, {"dynamic": True, "fullgraph": True}])
def test_the_options_of_a_compiled_model_are_those_that_it_was_given(given):
    in_place = build()
    in_place.compile(backend=counting, **given)
    for compiled in (torch.compile(build(), backend=counting, **given), in_place):
        _, options = without_compilation(compiled)
        del options["backend"]  # torch's, around this one
        assert options == {"dynamic": None, "fullgraph": False} | given
