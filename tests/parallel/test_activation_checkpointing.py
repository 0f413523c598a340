"""Activation checkpointing: the same bits as without it, and what is computed again."""

import functools
import importlib
import re

import pytest
import torch
from commands import ROOT
from families import SEED, WHOLE, family
from pool import on_ranks
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import paramp
from paramp.models import GPT, GPTConfig
from paramp.parallel.activation_checkpointing import repeated_blocks

HOW = ("full", 2, "selective")
LAYOUTS = {
    "tp2": {"tensor": 2},
    "tp2 + sp": {"tensor": 2, "sequence_parallel": True},
    "pp2": {"pipeline": {"size": 2, "microbatches": 2}},
    "zbv": {"pipeline": {"size": 2, "microbatches": 4, "schedule": "zbv"}},
    "zero1": {"data": 2, "zero": 1},
}


def gpt():
    torch.manual_seed(0)
    shape = {"num_layers": 4, "num_heads": 4, "width": 32, "max_seq_len": 16, "vocab_size": 128, "dropout": 0.1}
    return GPT(GPTConfig(**shape))


def train(how, parallel, precision):
    config = {"parallel": parallel, "precision": precision, "activation_checkpointing": how}
    with paramp.launch_from_torch(config) as context:
        engine, *_ = paramp.initialize(gpt(), functools.partial(torch.optim.AdamW, lr=1e-3), GPT.loss)
        generator = torch.Generator().manual_seed(context.dp.rank)
        losses = []
        for _ in range(2):
            tokens = torch.randint(128, (4, 17), generator=generator)
            losses.append(engine.forward_backward(tokens[:, :-1], tokens[:, 1:].contiguous()).item())
            assert engine.step().stepped
        return losses, engine.full_state_dict()


@pytest.mark.parametrize("layout", LAYOUTS)
@on_ranks(2)
def test_the_same_bits_as_without_it(world, layout):
    """With dropout, so the random numbers are drawn again."""
    for precision in ("32-true", "16-mixed") if layout == "tp2" else ("16-mixed",):
        expected = train("none", LAYOUTS[layout], precision)
        for how in HOW if layout != "zbv" else HOW[:2]:
            losses, weights = train(how, LAYOUTS[layout], precision)
            assert losses == expected[0], (precision, how)
            assert all(torch.equal(value, expected[1][name]) for name, value in weights.items()), (precision, how)


class Count(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().partition("::")[2].partition(".")[0]
        self.calls[name] = self.calls.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


AGAIN = {"none": (16, 4, 16), "full": (32, 8, 24), 3: (24, 6, 20), "selective": (16, 8, 16)}
"""The numbers of linear layers, activations and collectives in a forward and backward."""


@on_ranks(2)
def test_what_is_computed_again(world):
    """Of four blocks with four linear layers each, in which two forwards and two backwards communicate."""
    for how, expected in AGAIN.items():
        with paramp.launch_from_torch({"parallel": {"tensor": 2}, "activation_checkpointing": how}):
            engine, *_ = paramp.initialize(gpt(), functools.partial(torch.optim.SGD, lr=0.1), GPT.loss)
            x = torch.randn(2, 16, 32, requires_grad=True)
            with Count() as count:
                engine.module.blocks(x).sum().backward()
            sums = sum(count.calls.get(name, 0) for name in ("allreduce_", "all_reduce", "recv_"))
            assert (count.calls["addmm"], count.calls["gelu"], sums) == expected, (how, count.calls)


def peak(how, watch_memory):
    """The bytes of all that a forward and backward allocate and have not freed, at most."""
    with paramp.launch_from_torch({"activation_checkpointing": how}):
        torch.manual_seed(0)
        shape = {"num_layers": 12, "num_heads": 4, "width": 128, "max_seq_len": 256, "vocab_size": 256}
        engine, *_ = paramp.initialize(GPT(GPTConfig(**shape)), functools.partial(torch.optim.SGD, lr=0.1), GPT.loss)
        tokens = torch.zeros(4, 256, dtype=torch.int64)
        engine.forward_backward(tokens, tokens)
        engine.zero_grad()
        with watch_memory(torch.device("cpu")) as memory:
            engine.forward_backward(tokens, tokens)
    return memory.peak


@family
def test_the_peaks_of_the_pages_table(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    watch_memory = importlib.import_module("common").watch_memory
    text = (ROOT / "docs" / "step.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`[^|]*|N[^|]*) \| [^|]* \| (\d+) MiB", text, re.MULTILINE)
    found = {'`"none"`': "none", '`"full"`': "full", "N, an integer": 2, '`"selective"`': "selective"}
    assert {name for name, _ in rows} == found.keys()
    for name, expected in rows if WHOLE or SEED else rows[1:2]:
        assert peak(found[name], watch_memory) / 2**20 == pytest.approx(int(expected), rel=0.1), name


def test_blocks_are_the_outermost_modules_that_repeat():
    assert repeated_blocks(gpt()) == [f"blocks.{index}" for index in range(4)]
    twice = nn.ModuleDict({"a": gpt(), "b": nn.ModuleList([nn.Sequential(gpt(), gpt()) for _ in range(2)])})
    assert repeated_blocks(twice) == [*(f"a.blocks.{index}" for index in range(4)), "b.0", "b.1"]
    assert repeated_blocks(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))) == []  # nothing inside to compute again


def test_bad_values_are_errors():
    with paramp.launch_from_torch({"activation_checkpointing": "full"}):
        layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        with pytest.raises(paramp.ConfigError, match="'full', but Sequential has no repeated blocks, expected modules"):
            paramp.initialize(layers, functools.partial(torch.optim.SGD, lr=0.1), nn.functional.mse_loss)
    for value in (0, "some"):
        with pytest.raises(paramp.ConfigError, match=f"activation_checkpointing: got {value!r}, expected"):
            paramp.launch_from_torch({"activation_checkpointing": value}).__enter__()
    split = {"pipeline": {"size": 2, "microbatches": 4, "schedule": "zbv"}}
    with pytest.raises(paramp.ConfigError, match="got 'selective', expected 'full' or 'none', because the schedule"):
        paramp.launch_from_torch({"parallel": split, "activation_checkpointing": "selective"}).__enter__()
