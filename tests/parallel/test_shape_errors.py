"""Sizes of whole layers in the code of a sharded model: the error names module, line, plan entry and fix."""

import re

import pytest
import torch
import torch.nn.functional as F
from pool import on_ranks
from torch import nn

import paramp


class Attention(nn.Module):
    def __init__(self, heads, outputs):
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(8, outputs), nn.Linear(outputs // 3, 8)

    def forward(self, x):
        batch, length, _ = x.shape
        heads = self.qkv(x).view(batch, length, self.heads, 3, 2)
        query, key, value = (part.transpose(1, 2) for part in heads.unbind(3))
        return x + self.out(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))


def build(heads, outputs=24):
    model = nn.Sequential(nn.Linear(8, 8), Attention(heads, outputs))
    plan = {"*.qkv": "colwise", "1.out": "rowwise"}
    return paramp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), F.mse_loss, plan=plan)[0]


MESSAGE = (
    "model: '1' fails at test_shape_errors.py:21, 'heads = self.qkv(x).view(batch, length, self.heads, 3, 2)', on a "
    "tensor rank: shape '[2, 3, 4, 3, 2]' is invalid for input of size 72. There, '1.qkv' (plan['*.qkv'] = 'colwise') "
    "has a weight of (12, 8), of (24, 8); '1.out' (plan['1.out'] = 'rowwise')"
)


@pytest.mark.parametrize("axis", ["data", "pipeline"])
@on_ranks(4)
def test_a_written_number_of_heads_is_named_on_every_rank(world, axis):
    """Under a pipeline by the first probe of the stages. The first data rank has the other's message."""
    x = torch.ones(2, 3, 8)
    with paramp.launch_from_torch({"parallel": {"tensor": 2, axis: 2}}) as context:
        x = x.repeat_interleave(context.stage_axis.size, 0)
        engine = build(heads=4)
        calls = [lambda: engine.forward_backward(x, x), lambda: engine.evaluate(x, x)]
        for call in calls if axis == "pipeline" else [*calls, lambda: engine(x)]:
            with pytest.raises(paramp.ConfigError, match=f"^{re.escape(MESSAGE)}.* write -1 for the number of heads"):
                call()
        assert build(heads=-1).forward_backward(x, x).isfinite()
        for heads in (3, -1):  # which -1 does not help
            undivided = r"\. The 18 outputs are 3 heads of 6, and 2 tensor ranks do not divide 3 heads: choose a paral"
            with pytest.raises(paramp.ConfigError, match=undivided):
                build(heads, outputs=18).forward_backward(x, x)


def test_an_error_without_sharded_layers_is_the_models_own():
    invalid = r"^shape '\[2, 3, 5, 3, 2\]' is invalid for input of size 144$"
    with paramp.launch_from_torch(), pytest.raises(RuntimeError, match=invalid):
        build(heads=5).forward_backward(torch.ones(2, 3, 8), torch.ones(2, 3, 8))
