"""Activation checkpointing: the same bits as without it, and what is computed again."""

import copy
import itertools
import re
from collections import Counter
from types import MethodType

import pytest
import torch
from beside_plain import adamw, benchmarks_common, randn, seeded
from commands import ROOT
from counting import Operators
from families import SEED, WHOLE, family, number, rarely
from pages import functions_of, read
from pool import on_ranks
from reference import batches, local, small_gpt
from small_engines import engine_of
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.nn.utils.parametrizations import spectral_norm

import paramp
from paramp.models import GPT
from paramp.parallel.activation_checkpointing import LARGE

HOW = ("full", 2, "selective")
LAYOUTS = {
    "tp2": {"tensor": 2},
    "tp2 + sp": {"tensor": 2, "sequence_parallel": True},
    "pp2": {"pipeline": {"size": 2, "microbatches": 2}},
    "zbv": {"pipeline": {"size": 2, "microbatches": 4, "schedule": "zbv"}},
    "zero1": {"data": 2, "zero": 1},
    "fsdp2": {"data": {"shard": 2}},
}


def train(how, parallel, precision):
    config = {"parallel": parallel, "precision": precision, "activation_checkpointing": how}
    with paramp.launch_from_torch(config) as context:
        engine = engine_of(
            small_gpt(dropout=0.1, num_layers=4 if "pipeline" in parallel else number(2, 4)), GPT.loss, adamw
        )
        losses = []
        for x, y in batches(2, size=4, seed=context.dp.rank):
            losses.append(engine.forward_backward(x, y).item())
            assert engine.step().stepped
        return losses, engine.full_state_dict()


@pytest.mark.parametrize("layout", rarely(LAYOUTS, "tp2 + sp", "zbv"))
@on_ranks(2)
def test_the_same_bits_as_without_it(world, layout):
    """With dropout, so the random numbers are drawn again."""
    for precision in ("32-true", "16-mixed") if layout == "tp2" else ("16-mixed",):
        expected = train("none", LAYOUTS[layout], precision)
        for how in HOW if layout != "zbv" else HOW[:2]:
            losses, weights = train(how, LAYOUTS[layout], precision)
            assert losses == expected[0], (precision, how)
            assert all(torch.equal(value, expected[1][name]) for name, value in weights.items()), (precision, how)


class Counting(nn.Module):
    """A block that changes buffers in each way, by kernels, in place and by new ones, and computes with them."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = spectral_norm(nn.Linear(8, 8)), nn.BatchNorm1d(8)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("large", torch.zeros(LARGE + 1))
        self.register_buffer("table", torch.ones(LARGE + 2))

    def forward(self, x):
        y = self.norm(self.linear(x)) * (self.table[:8] + self.large[:8]) + self.mean
        self.large[:8] += 0.1
        self.mean = 0.9 * self.mean + y.detach().mean(0)
        return x + y


COUNTED = {"one": {}} | {layout: LAYOUTS[layout] for layout in ("pp2", "zbv", "fsdp2")}


@pytest.mark.parametrize("layout", rarely(COUNTED, "one"))
@on_ranks(2)
def test_buffers_change_once(world, layout):
    """And what runs again computes with those of the forward."""
    found = {}
    for how in ("none", *HOW) if layout != "zbv" else ("none", *HOW[:2]):
        with paramp.launch_from_torch({"parallel": COUNTED[layout], "activation_checkpointing": how}):
            engine = engine_of(seeded(lambda: nn.Sequential(*(Counting() for _ in range(4)))))
            losses = []
            for seed in range(3):
                with Operators() as operators:
                    losses.append(engine.forward_backward(randn(8, 8, seed=seed), randn(8, 8)).item())
                engine.step()
            found[how] = losses, engine.full_state_dict()
        assert found[how][0] == found["none"][0], how
        assert all(torch.equal(value, found["none"][1][name]) for name, value in found[how][1].items()), how
        copied = [one.numel() for call, one in operators.calls if call.overloadpacket.__name__ == "clone"]
        assert LARGE + 2 not in copied  # what has stayed as it was


class Rotating(nn.Module):
    """Makes a tensor without a dtype."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return x + self.linear(x * (torch.arange(8) * 1.7).cos().to(x.dtype)).tanh()


def gradients_of_rotating(how, parallel, precision, *, by_calls):
    with paramp.launch_from_torch({"parallel": parallel, "precision": precision, "activation_checkpointing": how}):
        engine = engine_of(seeded(lambda: nn.Sequential(*(Rotating() for _ in range(4)))))
        x = randn(8, 8)
        y = -x.double() if precision == "64-true" else -x  # torch 2.11 has no backward of a loss over two dtypes
        engine.backward(engine.criterion(engine(x), y)) if by_calls else engine.forward_backward(x, y)
        return [parameter.grad.clone() for parameter in engine.parameters()]


@on_ranks(2)
def test_a_block_that_runs_again_has_the_default_dtype_of_the_mode(world):
    for precision, (layout, by_calls) in itertools.product(
        ("bf16-true", "64-true"), (("zero1", False), ("zero1", True), ("pp2", False), ("zbv", False))
    ):
        expected, found = (
            gradients_of_rotating(how, LAYOUTS[layout], precision, by_calls=by_calls) for how in ("none", "full")
        )
        assert all(map(torch.equal, found, expected)), (precision, layout, by_calls)


def test_a_copy_of_a_block_with_a_forward_of_its_own_computes_with_its_own_weights():
    with paramp.launch_from_torch({"activation_checkpointing": "full"}):
        model, x = seeded(lambda: nn.Sequential(Rotating(), Rotating())), randn(8, 8)
        model[0].forward = MethodType(Rotating.forward, model[0])
        engine = engine_of(model)
        copied, expected = copy.deepcopy(engine.module), engine.module(x)
        engine.forward_backward(x, -x)
        assert engine.step().stepped
        assert torch.equal(copied(x), expected)


WIDTH, TOKENS = 128, 64


def kept_bytes(precision, parallel, how, num_layers, vocab_size=128):
    """Bytes that a forward of :data:`TOKENS` keeps for the backward, weights left out, each storage once."""
    with paramp.launch_from_torch({"precision": precision, "parallel": parallel, "activation_checkpointing": how}):
        engine = engine_of(
            small_gpt(num_layers=num_layers, width=WIDTH, max_seq_len=TOKENS, vocab_size=vocab_size), GPT.loss, adamw
        )
        weights = {local(one).untyped_storage().data_ptr() for one in engine.parameters()}
        kept = {}

        def keep(tensor):
            own = local(tensor)
            storage = (own.wait() if isinstance(own, AsyncCollectiveTensor) else own).untyped_storage()
            kept[storage.data_ptr()] = storage
            return tensor

        tokens = torch.zeros(1, TOKENS, dtype=torch.int64)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            engine.forward_backward(tokens, tokens)
        return sum(storage.nbytes() for pointer, storage in kept.items() if pointer not in weights)


SPLIT = {"tensor": 2, "sequence_parallel": True}
KEPT = [
    ("16-mixed", "mixed", {}, "none"),
    ("16-mixed", "mixed", SPLIT, "none"),
    ("32-true", "32-true", {"tensor": 2}, "none"),
    ("64-true", "64-true", {}, "none"),
    ("fp8-mixed", "mixed", SPLIT, "none"),
    ("O2", "naive", {"tensor": 2}, "none"),
    ("bf16-naive", "naive", SPLIT, "none"),
    ("bf16-naive", "naive", SPLIT, "full"),
    ("bf16-true", "true", {"tensor": 2}, "none"),
    ("transformer-engine", "true", {}, "none"),
    ("transformer-engine", "true", SPLIT, "none"),
    ("32-true", "32-true", SPLIT, "none"),
    ("32-true", "32-true", SPLIT, "full"),
    ("16-mixed", "mixed", {}, "full"),
    ("bf16-mixed", "mixed", {"tensor": 2}, "none"),
]


@pytest.mark.parametrize(("mode", "name", "parallel", "how"), rarely(KEPT, KEPT[1], KEPT[3], KEPT[5], KEPT[-1]))
@on_ranks(2)
def test_bytes_that_a_block_keeps(world, mode, name, parallel, how):
    """Those that docs/memory.md computes."""
    by_page = functions_of("docs/memory.md")["bytes_a_token"]
    two, three = (kept_bytes(mode, parallel, how, num_layers) for num_layers in (2, 3))
    casts = 2 * 12 * WIDTH**2 / parallel.get("tensor", 1) if mode in ("16-mixed", "bf16-mixed") and how == "none" else 0
    expected = by_page(name, WIDTH, **parallel, checkpointed=how == "full")
    assert (three - two - casts) / TOKENS == pytest.approx(expected, rel=0.02)


def test_the_pages_table_is_what_its_function_computes():
    by_page = functions_of("docs/memory.md")["bytes_a_token"]
    lines = read("docs/memory.md").partition("| mode | a block keeps |")[2].partition("\n\n")[0].splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in lines]
    for names, (_, *cells) in zip((["32-true"], ["mixed"], ["naive", "true"]), rows, strict=True):
        whole, split, full = cells
        full, _, full_split = full.partition("; with sequence parallelism ")
        for name, tensor in itertools.product(names, (1, 2, 4)):
            for cell, sequence, again in ((whole, 0, 0), (split, 1, 0), (full, 0, 1), (full_split, 1, 1)):
                options = {"tensor": tensor, "sequence_parallel": sequence, "checkpointed": again}
                assert by_page(name, 1, **options) == eval(cell, {"t": tensor}), (name, cell)
                assert name != "32-true" or by_page("64-true", 1, **options) == 2 * by_page(name, 1, **options)


@on_ranks(2)
def test_bytes_that_logits_keep(world):
    for mode, tensor in itertools.product(("bf16-naive", "32-true", "16-mixed", "64-true"), (1, 2)):
        small, large = (kept_bytes(mode, {"tensor": tensor}, "full", 2, vocab_size) for vocab_size in (128, 1024))
        entries = (1024 - 128) / tensor  # of a rank
        casts = 2 * entries * WIDTH * (mode == "16-mixed")  # of the weight
        assert large - small - casts == (8 if mode == "64-true" else 4) * entries * TOKENS, (mode, tensor)


AGAIN = {
    "none": ((16, 4, 4, 16), []),
    "full": ((32, 8, 8, 24), [0, 1, 2, 3]),
    2: ((24, 6, 6, 20), [0, 2]),
    3: ((24, 6, 6, 20), [0, 3]),
    "selective": ((16, 4, 8, 16), [0, 1, 2, 3]),
}
"""The numbers of linear layers, attentions, activations and collectives in both ways; the blocks that run twice."""


@on_ranks(2)
def test_what_is_computed_again(world):
    """Of four blocks with four linear layers each, in which two forwards and two backwards communicate."""
    for how, (expected, twice) in AGAIN.items():
        with paramp.launch_from_torch({"parallel": {"tensor": 2}, "activation_checkpointing": how}):
            engine, ran = engine_of(small_gpt(dropout=0.1), GPT.loss), Counter()
            for index, block in enumerate(engine.module.blocks):
                block.attention.dropout = 0.0  # attention with dropout is several operators on a CPU
                block.mlp.register_forward_pre_hook(lambda *_, index=index, ran=ran: ran.update([index]))
            x = torch.randn(2, 16, 32, requires_grad=True)
            with Operators() as operators:
                engine.module.blocks(x).sum().backward()
            calls = Counter(function.name().partition("::")[2].partition(".")[0] for function, _ in operators.calls)
            sums = sum(calls[name] for name in ("allreduce_", "all_reduce", "recv_"))
            attention = calls["_scaled_dot_product_flash_attention_for_cpu"]
            assert (calls["addmm"], attention, calls["gelu"], sums) == expected, (how, calls)
            assert [index for index in range(4) if ran[index] == 2] == twice, (how, ran)


def test_selective_checkpointing_keeps_attention():
    """Its kernel, which a CPU uses without dropout."""
    for how, expected in (("none", 4), ("full", 8), ("selective", 4)):
        with paramp.launch_from_torch({"activation_checkpointing": how}):
            engine, x = engine_of(small_gpt(), GPT.loss), torch.randn(2, 16, 32, requires_grad=True)
            with Operators() as operators:
                engine.module.blocks(x).sum().backward()
        calls = [function.overloadpacket.__name__ for function, _ in operators.calls]
        assert calls.count("_scaled_dot_product_flash_attention_for_cpu") == expected, how


def peak(how):
    """The bytes of all that a forward and backward allocate and have not freed, at most."""
    with paramp.launch_from_torch({"activation_checkpointing": how}):
        engine = engine_of(small_gpt(num_layers=12, width=128, max_seq_len=256, vocab_size=256), GPT.loss)
        tokens = torch.zeros(4, 256, dtype=torch.int64)
        engine.forward_backward(tokens, tokens)
        engine.zero_grad()
        with benchmarks_common().watch_memory(torch.device("cpu")) as memory:
            engine.forward_backward(tokens, tokens)
    return memory.peak


@family
def test_the_peaks_of_the_pages_table():
    text = (ROOT / "docs" / "step.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`[^|]*|N[^|]*) \| [^|]* \| (\d+) MiB", text, re.MULTILINE)
    found = {'`"none"`': "none", '`"full"`': "full", "N, an integer": 2, '`"selective"`': "selective"}
    assert {name for name, _ in rows} == found.keys()
    for name, expected in rows if WHOLE or SEED else rows[1:2]:
        assert peak(found[name]) / 2**20 == pytest.approx(int(expected), rel=0.1), name
