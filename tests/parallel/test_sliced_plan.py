"""The plan in slices: what is cut, and what is refused by name."""

import pytest
import torch
from torch import nn

import paramp
from paramp.distributed.reproducible.place import Place
from paramp.engine.reproducible.setup import sliced_layers
from paramp.parallel.adapters import adapter_for


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(32))

    def forward(self, x):
        return x * self.weight


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


def test_a_model_without_a_plan_is_not_cut():
    assert names(nn.Sequential(nn.Linear(4, 4))) == {}


@pytest.mark.parametrize("where", ["dropout", "extra"])
def test_parameters_beside_slices_of_the_sequence_need_a_style(where):
    model = gpt()
    setattr(model.blocks[1], where, Scale())
    names(model)
    with pytest.raises(paramp.ConfigError, match=rf"'blocks.1.{where}', a Scale with parameters"):
        names(model, sequence_parallel=True)


@pytest.mark.parametrize(
    ("style", "slices", "message"),
    [
        ("colwise", 4, r"got 4, but '0' has 6 outputs, expected a multiple of 4"),
        ("rowwise", 8, r"got 8, but '0' has 12 inputs, expected a multiple of 8"),
        ("partial_gradient", 2, r"'0', a Linear, the style PartialGradient, which cannot be computed in slices"),
    ],
)
def test_what_cannot_be_cut_is_named(style, slices, message):
    with pytest.raises(paramp.ConfigError, match=message):
        names(nn.Sequential(nn.Linear(12, 6)), slices=slices, plan={"0": style})


def test_styles_of_torchs_own_and_of_experts_are_refused():
    from torch.distributed.tensor.parallel import ColwiseParallel

    from paramp.parallel.tensor.styles import ExpertSlices

    for style in (ColwiseParallel(), ExpertSlices()):
        with pytest.raises(paramp.ConfigError, match=f"the style {type(style).__name__}, which cannot be computed in"):
            names(nn.Sequential(nn.Linear(8, 8)), plan={"0": style})
