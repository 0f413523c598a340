"""What the mode of equal bits cuts into slices, and what it refuses by name: modules, ties, buffers and styles."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel

import paramp
from paramp.base.errors import ConfigError
from paramp.distributed.reproducible.place import Place
from paramp.engine.reproducible.buffers import check_buffers
from paramp.engine.reproducible.setup import sliced_layers
from paramp.parallel.adapters import adapter_for
from paramp.parallel.reproducible.checks import check_modules, check_ties
from paramp.parallel.tensor.styles import ExpertSlices


def tied(count):
    layers = [nn.Linear(2, 2) for _ in range(count)]
    for layer in layers[1:]:
        layer.weight = layers[0].weight
    return nn.Sequential(*layers)


def test_a_tied_parameter_has_at_most_two_names_and_no_hooks():
    model = tied(2)
    model[0].bias.register_hook(lambda gradient: gradient)
    check_ties(model)
    model[0].weight.register_hook(lambda gradient: gradient)
    with pytest.raises(ConfigError, match=r"0.weight and 1.weight are one parameter with hooks"):
        check_ties(model)
    with pytest.raises(ConfigError, match=r"1.weight and 2.weight are one parameter, expected at most two"):
        check_ties(tied(3))


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (nn.BatchNorm1d(4), "'1' is a BatchNorm1d, which averages over the samples"),
        (nn.InstanceNorm1d(4, track_running_stats=True), "'1' is a InstanceNorm1d, which averages"),
        (nn.MultiheadAttention(4, 2), "'1' is a MultiheadAttention, which computes all heads"),
        (nn.Embedding(4, 2, max_norm=1.0), "'1' is a Embedding, which changes its weights"),
        (nn.Embedding(4, 2, sparse=True), "sparse=False"),
        (nn.Embedding(4, 2, scale_grad_by_freq=True), "scale_grad_by_freq=False"),
    ],
)
def test_modules_are_refused_by_name(module, message):
    check_modules(nn.Sequential(nn.Linear(4, 4), nn.GroupNorm(2, 4), nn.InstanceNorm1d(4), nn.Embedding(4, 2)))
    with pytest.raises(ConfigError, match=message):
        check_modules(nn.Sequential(nn.Linear(4, 4), module))


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.changes = False

    def forward(self, x):
        if self.changes:
            self.count += 1
        return x


def test_a_forward_that_changes_a_buffer_is_refused_in_training():
    model = nn.Sequential(Counting())
    check_buffers({0: model})
    model[0].changes = True
    model(torch.ones(1))  # the first may fill a cache
    model.eval()(torch.ones(1))
    with pytest.raises(ConfigError, match="the forward of '0', a Counting, changes its buffer 'count'"):
        model.train()(torch.ones(1))
    model[0].changes = False
    model(torch.ones(1))


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(32))


def gpt():
    shape = paramp.models.GPTConfig(num_layers=2, num_heads=8, width=32, max_seq_len=16, vocab_size=100)
    return paramp.models.GPT(shape)


def names(model, *, sequence_parallel=False, slices=8, plan=None):
    place = Place(0, 1, slices, None, sequence_parallel)
    return {name: type(style).__name__ for name, style in sliced_layers(adapter_for(model), plan, place).items()}


def test_the_same_layers_are_cut_with_and_without_sequence_parallelism():
    cut = names(gpt())
    assert cut == names(gpt(), sequence_parallel=True)
    assert cut["embedding.tokens"] == "SlicedRows"
    assert cut["head"] == cut["blocks.0.attention.qkv"] == "SlicedColwise"
    assert cut["blocks.1.mlp.down"] == "SlicedRowwise"
    assert cut["blocks.1.norm2"] == cut["norm"] == "SlicedSequence"
    assert "blocks.0.dropout" not in cut
    assert names(nn.Sequential(nn.Linear(4, 4))) == {}  # without a plan nothing is


@pytest.mark.parametrize("where", ["dropout", "extra"])
def test_parameters_beside_slices_of_the_sequence_need_a_style(where):
    model = gpt()
    setattr(model.blocks[1], where, Scale())
    names(model)
    with pytest.raises(ConfigError, match=rf"'blocks.1.{where}', a Scale with parameters"):
        names(model, sequence_parallel=True)


@pytest.mark.parametrize(
    ("style", "slices", "message"),
    [
        ("colwise", 4, r"got 4, but '0' has 6 outputs, expected a multiple of 4"),
        ("rowwise", 8, r"got 8, but '0' has 12 inputs, expected a multiple of 8"),
        ("partial_gradient", 2, r"'0', a Linear, the style PartialGradient, which cannot be computed in slices"),
        (ColwiseParallel(), 2, "the style ColwiseParallel, which cannot be computed in"),
        (ExpertSlices(), 2, "the style ExpertSlices, which cannot be computed in"),
    ],
)
def test_what_cannot_be_cut_is_named(style, slices, message):
    with pytest.raises(ConfigError, match=message):
        names(nn.Sequential(nn.Linear(12, 6)), slices=slices, plan={"0": style})
