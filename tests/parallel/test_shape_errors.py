"""Sizes of whole layers in the code of a sharded model: the error names module, line, plan entry and fix."""

import contextlib
import re

import pytest
import torch
import torch.nn.functional as F
from pool import on_ranks
from small_engines import engine_of
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel

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
    "model: '1' fails at test_shape_errors.py:24, 'heads = self.qkv(x).view(batch, length, self.heads, 3, 2)', on a "
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
        if axis == "data":
            norm = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 8))
            with pytest.raises(paramp.ConfigError, match=r"contain 8 elements not 16\. There, '0' \(plan\['0'\]"):
                engine_of(norm, plan={"0": "colwise", "2": "rowwise"}).forward_backward(x[:, 0], x[:, 0])


class Head(nn.Module):
    """Returns a view of what its layer does, in these ``modes``, and a copy of its input in others."""

    def __init__(self, *modes):
        super().__init__()
        self.layer, self.modes = nn.Linear(8, 8), modes

    def forward(self, x):
        return self.layer(x).transpose(1, 2) if self.training in self.modes else x.clone()


class Two(nn.Module):
    """Returns what its first layer does, as a cache or as features, and an output."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.first(x), self.last(x)


@pytest.mark.parametrize("axis", ["data", "pipeline"])
@on_ranks(4)
def test_a_model_that_returns_a_part_of_its_features_is_refused_on_every_rank(world, axis):
    x = torch.ones(4, 3, 8)
    refused = (
        r"^plan.*1.* = .*olwise.*: the model returns what '1.*' does, which on .* choose colwise_gather for it, or"
    )
    with paramp.launch_from_torch({"parallel": {"tensor": 2, axis: 2}}):
        for style in ("colwise", "packed_colwise_2", ColwiseParallel()):
            for name, last in {"1": nn.Linear(8, 8), "1.layer": Head(True, False)}.items():
                engine = engine_of(nn.Sequential(nn.Linear(8, 8), last), plan={name: style})
                calls = [(engine.forward_backward, x, x), (engine.evaluate, x, x), (engine, x)]
                for call, *batch in calls if axis == "data" else calls[:2]:
                    with pytest.raises(paramp.ConfigError, match=refused):
                        call(*batch)
                    engine.zero_grad()
        engine = engine_of(nn.Sequential(nn.Linear(8, 8), Head(False)), plan={"1.layer": "colwise"})
        assert engine.forward_backward(x, x).isfinite()
        with pytest.raises(paramp.ConfigError, match=refused):
            engine.evaluate(x, x)
        engine = engine_of(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), plan={"1": "colwise_gather"})
        assert engine.forward_backward(x, x).isfinite()
        plan = {"1.first": "colwise", "1.last": "colwise_gather"}
        for share in (0, 0.1):
            engine = engine_of(
                nn.Sequential(nn.Linear(8, 8), Two()),
                lambda output, y, share=share: F.mse_loss(output[1], y) + (share * output[0].mean() if share else 0),
                plan=plan,
            )
            for _ in range(3):  # an error that was caught is not the last one
                with pytest.raises(paramp.ConfigError, match=refused) if share else contextlib.nullcontext():
                    engine.forward_backward(x, x)
                engine.zero_grad()
            engine.evaluate(x, x)
        engine = engine_of(nn.Sequential(nn.Linear(8, 8), Head()), plan={"1.layer": "colwise"})
        engine.forward_backward(x, x)
        engine.evaluate(x, x)
        assert not any(module._forward_pre_hooks or module._forward_hooks for module in engine.module.modules())


def test_an_error_without_sharded_layers_is_the_models_own():
    invalid = r"^shape '\[2, 3, 5, 3, 2\]' is invalid for input of size 144$"
    with paramp.launch_from_torch(), pytest.raises(RuntimeError, match=invalid):
        build(heads=5).forward_backward(torch.ones(2, 3, 8), torch.ones(2, 3, 8))
