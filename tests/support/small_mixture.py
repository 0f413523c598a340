"""A small mixture of experts whose experts are one stack of matrices: each layer has a shared part and a router."""

import torch
from torch import nn

PLAN = {"*.experts": "experts"}
WIDTH, NUM_EXPERTS, CHOICES = 8, 4, 2


class StackedExperts(nn.Module):
    """A matrix for each expert, which is called as transformers' modules of experts are."""

    def __init__(self, num_experts=NUM_EXPERTS, std=1 / WIDTH):
        super().__init__()
        self.num_experts = num_experts
        self.weight = nn.Parameter(torch.randn(num_experts, WIDTH, WIDTH) * std)

    def forward(self, tokens, index, weights):
        output = torch.zeros_like(tokens)
        for expert in range(self.num_experts):
            token, choice = torch.where(index == expert)
            rows = (tokens[token] @ self.weight[expert]) * weights[token, choice, None]
            output = output.index_add(0, token, rows.to(output.dtype))
        return output


class MixtureLayer(nn.Module):
    """Tokens (tokens, width), to which two of the experts and a shared linear layer add."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.router = nn.Linear(WIDTH, NUM_EXPERTS, bias=False)
        self.experts = StackedExperts()

    def forward(self, x):
        x = x + self.down(torch.relu(self.up(x)))
        scores, index = self.router(x).softmax(-1).topk(CHOICES)
        return x + self.experts(x, index, scores)


def layers(num_layers=2):
    """The same on every call."""
    torch.manual_seed(3)
    return nn.Sequential(*(MixtureLayer() for _ in range(num_layers)))


def tokens(num=16, seed=4):
    return torch.randn(num, WIDTH, generator=torch.Generator().manual_seed(seed))
