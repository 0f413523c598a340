"""Parameters and modules under which bits would depend on the layout are refused by name."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from paramp.base.errors import ConfigError
from paramp.distributed.reproducible.place import Place
from paramp.engine.reproducible.buffers import check_buffers
from paramp.parallel.reproducible.checks import check_modules, check_ties
from paramp.parallel.reproducible.functions import ExactFunctions


def tied(count):
    layers = [nn.Linear(2, 2) for _ in range(count)]
    for layer in layers[1:]:
        layer.weight = layers[0].weight
    return nn.Sequential(*layers)


def test_a_parameter_has_at_most_two_names():
    check_ties(tied(2))
    with pytest.raises(ConfigError, match=r"1.weight and 2.weight are one parameter, expected at most two"):
        check_ties(tied(3))


def test_a_tied_parameter_has_no_hooks():
    model = tied(2)
    model[0].bias.register_hook(lambda gradient: gradient)
    check_ties(model)
    model[0].weight.register_hook(lambda gradient: gradient)
    with pytest.raises(ConfigError, match=r"0.weight and 1.weight are one parameter with hooks"):
        check_ties(model)


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


def test_dropout_that_several_stages_have_is_refused():
    for divided in ([], ["0"]):
        model = nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5))
        mode = ExactFunctions(Place(0, 1, 2), {one: name for name, one in model.named_modules()}, divided=divided)
        mode.watch(model)
        refused = pytest.raises(ConfigError, match="'0' draws dropout masks, and several") if divided else nullcontext()
        with mode, refused:
            model(torch.ones(1, 3))
