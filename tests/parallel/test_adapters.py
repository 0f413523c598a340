"""Which adapter takes a model, and what of the model's own it asks."""

import pytest
from torch import nn
from traceable import UNet

from paramp.base.errors import ConfigError
from paramp.models import GPT
from paramp.parallel.adapters import HuggingFaceAdapter, SequentialAdapter, TracedAdapter, adapter_for


class Reversed(nn.Sequential):
    def forward(self, x):
        for module in reversed(self):
            x = module(x)
        return x


def test_the_first_adapter_that_accepts_a_model_takes_it():
    assert type(adapter_for(GPT.preset("tiny"))) is SequentialAdapter
    assert type(adapter_for(UNet())) is TracedAdapter
    assert type(adapter_for(Reversed(nn.Linear(2, 2)))) is TracedAdapter


def test_transformers_models_are_known_without_importing_the_library():
    library = type("PreTrainedModel", (nn.Module,), {"__module__": "transformers.modeling_utils"})
    assert type(adapter_for(type("Llama", (library,), {})())) is HuggingFaceAdapter
    other = type("PreTrainedModel", (nn.Module,), {"__module__": "elsewhere"})
    assert type(adapter_for(other())) is TracedAdapter


def test_a_models_own_plan_and_split_win():
    class Own(UNet):
        def tensor_parallel_plan(self, tensor_size, sequence_parallel):
            return {"*": f"{tensor_size} {sequence_parallel}"}

        def pipeline_split(self, num_stages):
            return [f"stage of {num_stages}"]

    adapter = adapter_for(Own())
    assert adapter.plan(2, False) == {"*": "2 False"}
    assert adapter.split(3) == ["stage of 3"]
    adapter = adapter_for(UNet())
    assert adapter.split(3) is None
    with pytest.raises(ConfigError, match=r"UNet has no tensor_parallel_plan\(\); pass plan="):
        adapter.plan(2, False)
