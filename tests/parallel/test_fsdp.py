"""Units of FSDP2 over the stages of a rank."""

import pytest
import torch
from pool import on_ranks
from torch import nn

import paramp


@on_ranks(4)
def test_a_parameter_in_two_stages_of_one_rank_is_refused(world):
    pipeline = {"size": 2, "schedule": "interleaved-1f1b", "split": ["1", "2", "3"]}
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    model[2].weight = model[0].weight
    with paramp.launch_from_torch({"parallel": {"pipeline": pipeline, "data": {"shard": 2}}}):
        found = "'0.weight' and '2.weight' are one parameter, in two stages of pipeline rank 0, expected one stage"
        with pytest.raises(paramp.ConfigError, match=found):
            paramp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.functional.mse_loss)
