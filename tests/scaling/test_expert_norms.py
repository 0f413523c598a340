"""Norms that other systems were reported to get wrong with experts on several ranks; each value is published there."""

import math
from dataclasses import replace

import pytest
import torch
from layouts import layouts
from pool import on_ranks
from small_engines import engine_of, own_part
from torch import nn

import paramp
from paramp.precision.modes import PRESETS


class Stack(nn.Module):
    def __init__(self, num_experts, rows, columns):
        super().__init__()
        self.num_experts = num_experts
        self.weight = nn.Parameter(torch.ones(num_experts, rows, columns))

    def forward(self, tokens, index, weights):
        chosen = nn.functional.one_hot(index.flatten(), self.num_experts).to(tokens.dtype)
        return torch.einsum("te,tr,erc->tc", chosen * weights, tokens, self.weight)


class Summed(nn.Module):
    """The sum of all elements of the expert that a sample names, and ``share`` times that of the dense ones."""

    def __init__(self, dense, experts, share):
        super().__init__()
        self.dense, self.experts, self.share = nn.Parameter(torch.ones(dense)), Stack(*experts), share

    def forward(self, index):
        ones = index.new_ones(len(index), self.experts.weight.shape[1], dtype=torch.float32)
        of_experts = self.experts(ones, index, ones[:, :1]).sum(1, keepdim=True)
        return of_experts + self.share * self.dense.sum()


def weighted(output, target):
    return (output * target).mean()


# Elements of the dense parameter, shape of the experts' stack; the gradient of each dense element, and of each of an
# expert's; the norm.
PUBLISHED = {
    "Megatron-LM #6470": (1, (2, 1, 1), 1.0, (1.0, 1.0), math.sqrt(3)),
    "DeepSpeed #8478": (1, (4, 1, 1), 0.0, (2.0, 4.0, 6.0, 8.0), 10.954452),
    "Automodel #3816": (16, (2, 4, 4), 1.0, (10.0, 0.1), 40.201493),
}
LAYOUTS = layouts("ep2·tp2, dp2·ep2, dp2·ep2 + zero1")


@pytest.mark.parametrize("source", PUBLISHED)
@on_ranks(4)
def test_the_norm_of_experts_is_the_published_one(world, source):
    """The norm is that of the whole model, each expert once, and all ranks clip by it."""
    dense, shape, of_dense, of_experts, norm = PUBLISHED[source]
    index = torch.arange(8).view(8, 1) % shape[0]
    target = torch.tensor(of_experts)[index] * shape[0]  # a mean over the samples
    for layout, parallel in LAYOUTS.items():
        precision = replace(PRESETS["32-true"], log_num_zeros=True)
        config = {"parallel": parallel, "precision": precision, "clip_grad_norm": 1.0}
        with paramp.launch_from_torch(config) as context:
            model = Summed(dense, shape, of_dense / float(target.mean()))
            engine = engine_of(
                model, weighted, lambda parameters: torch.optim.SGD(parameters, lr=1.0), plan={"experts": "experts"}
            )
            engine.forward_backward(*own_part(context, index, target))
            assert engine.gradient_histogram().total == pytest.approx(dense + math.prod(shape)), layout
            result = engine.step()
            assert float(result.grad_norm) == pytest.approx(norm, rel=1e-6), layout
            assert result.num_zeros == (dense if of_dense == 0 else 0), layout
            after = engine.full_state_dict()
            engine.zero_grad()
            engine.forward_backward(*own_part(context, index, 0 * target))
            assert engine.step().num_zeros == dense + math.prod(shape), layout
            torch.testing.assert_close(after["dense"], 1 - torch.full((dense,), of_dense / norm))
            expected = 1 - torch.tensor(of_experts).view(-1, 1, 1).expand(shape) / norm
            torch.testing.assert_close(after["experts.weight"], expected)
