"""Partitions of sequential models into stages."""

import itertools
from types import MethodType

import pytest
import torch
from beside_plain import randn, seeded
from reference import small_gpt
from torch import nn

import paramp
from paramp.config.layout import PipelineConfig
from paramp.parallel.model_families import adapter_for
from paramp.parallel.partition import SequentialPartition, plan_stages, units


def chain(*widths):
    return nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in itertools.pairwise(widths)))


def stages_of(model, *args):
    return plan_stages(list(units(model)), *args)


@pytest.mark.parametrize(
    ("widths", "num_stages", "expected"),
    [
        ((8, 8, 8, 8, 8), 2, [["0", "1"], ["2", "3"]]),
        ((8, 64, 8, 8, 8), 2, [["0"], ["1", "2", "3"]]),
        ((2, 2, 2, 64, 64), 3, [["0", "1"], ["2"], ["3"]]),
        ((8, 8, 8, 8), 3, [["0"], ["1"], ["2"]]),
    ],
)
def test_the_heaviest_stage_is_as_light_as_can_be(widths, num_stages, expected):
    model = chain(*widths)
    plan = stages_of(model, num_stages)
    assert [name for stage in plan for name in stage] == [str(index) for index in range(len(widths) - 1)]
    assert all(plan)
    weight = {str(index): layer.weight.numel() + 1 for index, layer in enumerate(model)}
    found, least = (max(sum(weight[name] for name in stage) for stage in stages) for stages in (plan, expected))
    assert found == least


@pytest.mark.parametrize(
    ("count", "split", "message"),
    [
        (2, ["blocks.9"], r"split: got 'blocks\.9', expected one of embedding, blocks\.0.*did you mean 'blocks\.2'"),
        (2, ["embedding"], "leaves the stage before it empty"),
        (7, None, "got 7 stages, but the model has 6 modules in sequence"),
    ],
)
def test_stages_that_cannot_be(count, split, message):
    with pytest.raises(paramp.ConfigError, match=message):
        stages_of(small_gpt(num_layers=3), count, split)


def again():
    shared, layer = nn.ReLU(), nn.Linear(4, 4)
    return nn.Sequential(layer, shared, layer, shared, nn.Linear(4, 4), shared)


def nested():
    inner = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Tanh(), nn.Linear(4, 4)))
    return nn.Sequential(nn.Linear(4, 4), inner, nn.ReLU(), nn.Sequential(nn.Linear(4, 4)))


def with_forward(model, name, forward=lambda self, x: x + nn.Sequential.forward(self, x)):
    """``model``, of which a module adds its input, by a ``forward`` that was set on the object."""
    module = model.get_submodule(name)
    module.forward = MethodType(forward, module)
    return model


@pytest.mark.parametrize(
    ("build", "names"),
    [
        (lambda: with_forward(nested(), "1"), ["0", "1", "2", "3.0"]),
        (lambda: with_forward(nested(), "", nn.Sequential.forward), ["0", "1.0", "1.1.0", "1.1.1", "2", "3.0"]),
        (nested, ["0", "1.0", "1.1.0", "1.1.1", "2", "3.0"]),
        (again, [*"012345"]),
        (lambda: small_gpt(num_layers=2), ["embedding", "blocks.0", "blocks.1", "norm", "head"]),
    ],
)
def test_a_sequence_is_cut_between_any_two_of_its_modules(build, names):
    """Nested ones included. Stages keep names and weights and add up to the model."""
    model = seeded(build)
    x = torch.randint(0, 120, (2, 5)) if names[0] == "embedding" else randn(2, 4)
    whole = dict(model.named_parameters(remove_duplicate=False))
    assert [name for name, _ in units(model)] == names
    for index, name in enumerate(names[1:], start=1):
        plan = stages_of(model, 2, [name])
        assert plan == [names[:index], names[index:]]
        first, second = SequentialPartition(model).stages(plan)
        assert torch.equal(second(first(x)), model(x))
        held = [pair for part in (first, second) for pair in part.named_parameters(remove_duplicate=False)]
        assert sorted(key for key, _ in held) == sorted(whole)
        assert all(whole[key] is value for key, value in held)


def test_a_forward_that_was_set_on_what_is_split_is_refused():
    with pytest.raises(paramp.ConfigError, match="model: 'Sequential' has a forward that was set on the object"):
        adapter_for(with_forward(nested(), "")).stages(PipelineConfig(size=2), {})
