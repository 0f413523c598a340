"""Sequences in slices with ``reproducible=True``: the same bits on any number of ranks of the context axis."""

from functools import partial

import pytest
import torch
from exact_tasks import GEMMA2, LLAMA, LONG, SMALL, mixtures, next_token
from exact_training import CONTEXT_LAYOUTS, Part, assert_same_bits, reference, trained
from families import cases, family, number
from pool import on_ranks
from small_engines import engine_of
from torch import nn
from torch.nn import functional as F

import paramp
from paramp.config.files import load
from paramp.config.reproducible import MODES
from paramp.models import MoEGPT

OTHERS = ("tp2", "dp2", "pp2", "fsdp2")
EVERYTHING = [
    (f"sequences: {task}", layout, mode)
    for task in LONG
    for layout in (*CONTEXT_LAYOUTS, *OTHERS)
    for mode in MODES
    if not (LONG[task].plan == {} and ("tp" in layout or "pp" in layout))
]
PART = [
    ("sequences: gpt", "cp4", "bf16-naive"),
    ("sequences: llama, padded", "cp2", "32-true"),
]
STEPS = number(2, 6)


@family
@pytest.mark.parametrize(("task", "layout", "mode"), cases("exact sequences", EVERYTHING, PART, 3))
def test_cut_sequences_have_the_same_bits(task, layout, mode):
    expected = reference(task, mode, STEPS)
    assert_same_bits(trained(task, mode, layout, Part(0, STEPS)), expected)


@family
@pytest.mark.parametrize(
    ("before", "after"), cases("exact sequences resumed", [("cp4", "1"), ("fsdp2·cp2", "cp4")], [("cp4", "1")], 1)
)
def test_a_run_that_was_stopped_goes_on_in_another_layout(before, after, tmp_path):
    path, task, mode = str(tmp_path / "checkpoint"), "sequences: gpt", "32-true"
    expected = reference(task, mode, STEPS)
    trained(task, mode, before, Part(0, STEPS // 2, save=path))
    assert_same_bits(trained(task, mode, after, Part(STEPS // 2, STEPS, load=path)), expected)


@on_ranks(2)
def test_it_trains_as_plain_torch_does(world):
    """Equal bits alone would also be those of a mistake that every layout makes."""
    for build, task, plain, plan in (
        (partial(SMALL, dropout=0.0), LONG["gpt"], next_token, None),
        (LLAMA, LONG["llama, own loss"], None, None),
        (GEMMA2, LONG["llama, own loss"], None, {}),
    ):
        batch = task.batch(0)
        torch.manual_seed(7)
        model = build()
        start = {name: value.clone() for name, value in model.state_dict().items()}
        loss = model(**batch[0], use_cache=False).loss if plain is None else plain(model(batch[0]), batch[1])
        loss.backward()
        how = {"slices": 4, "sequence_slices": 8}
        with paramp.launch_from_torch({"reproducible": how, "parallel": {"context": 2}}):
            torch.manual_seed(7)
            engine = engine_of(build(), plain, partial(torch.optim.SGD, lr=1.0), plan=plan)
            torch.testing.assert_close(engine.forward_backward(*batch), loss.detach(), rtol=1e-5, atol=0)
            engine.step()
            found = engine.full_state_dict()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(start[name] - found[name], parameter.grad, rtol=1e-3, atol=1e-6, msg=name)


class Block(nn.Module):
    """Tokens to logits; ``kind`` names what no slices are computed of."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.table, self.head = kind, nn.Embedding(100, 8), nn.Linear(8, 100)
        self.inside = nn.Conv1d(8, 8, 1) if kind == "convolution" else nn.LayerNorm(8)
        if kind == "parameter":
            self.scale = nn.Parameter(torch.ones(8))

    def forward(self, tokens):
        x = self.table(tokens)
        if self.kind == "some tokens" and int(tokens[0, 0]):
            return self.head(self.inside(x))
        if self.kind == "other weight":
            return F.linear(x, self.table.weight)
        if self.kind == "mean":
            x = x - x.mean(-1, keepdim=True)
        if self.kind == "product":
            x = x @ x.transpose(1, 2) @ x
        if self.kind == "channels":
            x = F.dropout1d(x, 0.5)
        return self.head(x[:, 0] if self.kind == "no tokens" else x)


REFUSED = {
    "convolution": "'0.inside', a Conv1d, mixes tokens",
    "parameter": "'0', a Block, has parameters beside modules",
    "other weight": r"linear in '0' got a parameter of another module",
    "mean": "mean in '0' got tokens whose number differs",
    "product": "matmul in '0' got tokens whose number differs",
    "channels": "dropout in '0' got a tensor .* whose whole channels are dropped",
    "no tokens": r"'0', a Linear, got \(1, 8\), expected one tensor",
}


@on_ranks(1)
def test_what_has_no_slices_is_refused_by_name(world):
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    with paramp.launch_from_torch({"reproducible": {"sequence_slices": 4}}):
        for kind, message in REFUSED.items():
            with pytest.raises(paramp.ConfigError, match=message):
                engine_of(nn.Sequential(Block(kind)), next_token).forward_backward(tokens, tokens)
        with pytest.raises(paramp.ConfigError, match="sequences of 6 tokens, expected a multiple of 4, reproducible"):
            engine_of(nn.Sequential(Block("")), next_token).forward_backward(tokens[:, :6], tokens[:, :6])
        with pytest.raises(paramp.ConfigError, match="is a mixture of experts, whose rows have no slices"):
            engine_of(mixtures(), MoEGPT.loss)


@on_ranks(2)
def test_a_forward_that_depends_on_a_ranks_tokens_is_an_error_before_ranks_wait(world):
    tokens = torch.zeros(1, 16, dtype=torch.int64)
    tokens[0, 8] = 1  # the first of rank 1; of the tokens that are tried it has others
    with paramp.launch_from_torch({"reproducible": {"sequence_slices": 4}, "parallel": {"context": 2}}):
        engine = engine_of(nn.Sequential(Block("some tokens")), next_token)
        with pytest.raises(RuntimeError, match="a LayerNorm in '0' has run 0 and 1 times on the ranks of the"):
            engine.forward_backward(tokens, tokens)


@pytest.mark.parametrize(
    ("parallel", "slices", "message"),
    [
        ({"context": 2}, 1, "parallel.context.size: got 2, expected a power of two, at most .*sequence_slices 1"),
        ({"context": 3}, 4, "parallel.context.size: got 3, expected a power of two"),
        ({"context": {"size": 2, "method": "ring"}}, 4, "parallel.context.method: got 'ring', expected auto or all-ga"),
        ({"tensor": 2, "sequence_parallel": True}, 4, "parallel.sequence_parallel: got True, expected False"),
        ({}, 3, "sequence_slices: got 3, expected a power of two"),
    ],
)
def test_layouts_that_cut_no_slices_are_refused(parallel, slices, message):
    with pytest.raises(paramp.ConfigError, match=message):
        load({"parallel": parallel, "reproducible": {"sequence_slices": slices}})
