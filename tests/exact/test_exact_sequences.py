"""Sequences in slices with ``reproducible=True``: the same bits on any number of ranks of the context axis."""

from functools import partial

import pytest
import torch
from beside_plain import seeded
from exact_tasks import (
    GEMMA2,
    LLAMA,
    LONG,
    SMALL,
    labelled,
    mixtures,
    next_token,
    of_60_tokens,
    output_loss,
    padded,
    tokens,
)
from exact_training import CONTEXT_EXPERT_LAYOUTS, CONTEXT_LAYOUTS, Part, assert_same_bits, reference, trained
from families import cases, family, number, rarely
from mixtures import build as build_mixture
from pool import on_ranks, run_on_ranks
from small_engines import engine_of
from small_mixture import StackedExperts
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import paramp
from paramp.config.files import load
from paramp.config.reproducible import MODES
from paramp.models import MoEGPT

OTHERS = ("tp2", "dp2", "pp2", "fsdp2")
EVERYTHING = [
    (f"sequences: {task}", layout, mode)
    for place, task in enumerate(LONG)
    for turn, layout in enumerate((*CONTEXT_LAYOUTS, *OTHERS), place + 2)
    for mode in (MODES if task in ("gpt", "llama") else MODES[turn % len(MODES) :][:1])
    if not (LONG[task].plan == {} and ("tp" in layout or "pp" in layout))
]
"""Two tasks in each mode on each layout, the others on each layout in one of the modes, in turn."""
PART = [("sequences: llama, padded", "cp2", "32-true")]
STEPS = number(2, 6)


@family
@pytest.mark.parametrize(("task", "layout", "mode"), cases("exact sequences", EVERYTHING, PART, 3))
def test_cut_sequences_have_the_same_bits(task, layout, mode):
    expected = reference(task, mode, STEPS)
    assert_same_bits(trained(task, mode, layout, Part(0, STEPS)), expected)


OF_EXPERTS = [
    (f"sequences: {task}", layout, mode)
    for task, modes, layouts in (
        ("mixtures", MODES, (*CONTEXT_EXPERT_LAYOUTS, "cp2·tp2")),
        ("mixtures", ("32-true", "bf16-naive"), ("cp2", "cp4", "cp2·pp2", "dp2·cp2 + zero1", "fsdp2·cp2")),
        ("mixtures", ("16-mixed",), (*OTHERS, "ep2")),
        ("mixtures, checkpointed", ("16-mixed",), ("cp2", *CONTEXT_EXPERT_LAYOUTS)),
        ("mixtures, chunks of 2", ("bf16-mixed",), ("cp2", "cp2·ep2", "cp2·tp2")),
        *((name, ("32-true", "bf16-naive"), ("cp2·tp2", "cp2·pp2")) for name in ("Mixtral", "DeepSeek-V3")),
        *((name, ("16-mixed", "bf16-mixed"), CONTEXT_EXPERT_LAYOUTS) for name in ("Mixtral", "DeepSeek-V3")),
        *((name, ("bf16-naive", "16-mixed"), CONTEXT_EXPERT_LAYOUTS) for name in ("Qwen3-MoE", "OLMoE")),
        ("Mixtral, padded", ("32-true", "bf16-mixed"), ("cp4", "fsdp2·cp2·ep2")),
    )
    for layout in layouts
    for mode in modes
]
PART_OF_EXPERTS = [("sequences: mixtures", "cp2·ep2", "16-mixed")]


@family
@pytest.mark.parametrize(("task", "layout", "mode"), cases("exact mixtures cut", OF_EXPERTS, PART_OF_EXPERTS, 3))
def test_mixtures_of_cut_sequences_have_the_same_bits(task, layout, mode):
    if "mixtures" not in task:
        pytest.importorskip("transformers")
    steps = number(2, 4)
    assert_same_bits(trained(task, mode, layout, Part(0, steps)), reference(task, mode, steps))


RESUMED = [
    ("gpt", "cp4", "1"),
    ("gpt", "fsdp2·cp2", "cp4"),
    ("mixtures", "fsdp2·cp2·ep2", "cp2·tp2"),
    ("mixtures", "cp2·ep2", "1"),
]


@family
@pytest.mark.parametrize(
    ("task", "before", "after"), cases("exact sequences resumed", RESUMED, [("gpt", "cp4", "1")], 1)
)
def test_a_run_that_was_stopped_goes_on_in_another_layout(task, before, after, tmp_path):
    path, task, mode = str(tmp_path / "checkpoint"), f"sequences: {task}", "32-true"
    expected = reference(task, mode, STEPS)
    trained(task, mode, before, Part(0, STEPS // 2, save=path))
    assert_same_bits(trained(task, mode, after, Part(STEPS // 2, STEPS, load=path)), expected)


def balance_slices(model):
    """Let the routers of a MoEGPT have the mean of the losses of each slice."""

    def forward(router, x):
        each = [type(router).forward(router, tokens) for tokens in x.split(2)]  # 8 slices of 16 tokens
        index, weights, losses = zip(*each, strict=True)
        return torch.cat(index), torch.cat(weights), torch.stack(losses).mean()

    for block in model.blocks:
        block.mlp.router.forward = partial(forward, block.mlp.router)


def all_labelled(batches):
    """As ``batches``, with labels of padding too: a query that sees no key has a loss."""

    def labelled_padding(call):
        (batch,) = batches(call)
        return ({**batch, "labels": batch["input_ids"]},)

    return labelled_padding


def nothing(model):
    """Leave the model as it is."""


PLAIN = {
    "gpt": (partial(SMALL, dropout=0.0), tokens(), next_token, None, nothing),
    "llama": (LLAMA, labelled, None, None, nothing),
    "llama, padded": (LLAMA, all_labelled(padded), None, None, nothing),
    "gemma2": (GEMMA2, labelled, None, {}, nothing),
    "mixtures": (partial(mixtures, dropout=0.0, balance_weight=1.0), tokens(), MoEGPT.loss, None, balance_slices),
    "DeepSeek-V3": (partial(build_mixture, "DeepSeek-V3", "eager", 4), of_60_tokens(labelled), None, None, nothing),
}


@pytest.mark.parametrize("name", rarely(PLAIN, "llama, padded", "gemma2", "mixtures"))
@on_ranks(2)
def test_it_trains_as_plain_torch_does(world, name):
    """Equal bits alone would also be those of a mistake that every layout makes."""
    build, batches, plain, plan, change = PLAIN[name]
    batch, model = batches(0), seeded(build, seed=7)
    change(model)
    loss = model(**batch[0], use_cache=False).loss if plain is None else plain(model(batch[0]), batch[1])
    assert_loss_and_gradients(model, loss, seeded(build, seed=7), batch, plain, plan)


def assert_loss_and_gradients(model, loss, same, batch, criterion, plan=None):
    """A step of SGD shows that those of the model ``same`` on two ranks are those of the plain model and ``loss``."""
    loss.backward()
    how = {"slices": 4, "sequence_slices": 8}
    with paramp.launch_from_torch({"reproducible": how, "parallel": {"context": 2}}):
        engine = engine_of(same, criterion, partial(torch.optim.SGD, lr=1.0), plan=plan)
        torch.testing.assert_close(engine.forward_backward(*batch), loss.detach(), rtol=1e-5, atol=0)
        engine.step()
        found = engine.full_state_dict()
    for name, parameter in model.named_parameters():
        way = parameter.detach() - found[name]
        torch.testing.assert_close(way, parameter.grad, rtol=1e-3, atol=1e-6, msg=name)


class Summing(nn.Module):
    """A GPT that computes its loss, a sum and a count, of labels of which ranks have different numbers."""

    def __init__(self, kind=""):
        super().__init__()
        self.kind, self.inside = kind, SMALL(dropout=0.0)

    def forward(self, tokens, labels):
        logits = self.inside(tokens)
        if self.kind == "shifts":
            logits, labels = logits[:, :-1], labels[:, 1:]
        count = torch.tensor(len(labels)) if self.kind == "of samples" else (labels != -100).sum()
        rows = logits.flatten(0, 1), labels.flatten()
        if self.kind == "mean":
            return {"loss": (F.cross_entropy(*rows) * count, count)}
        return {"loss": (F.cross_entropy(*rows, reduction="sum"), count)}


def own_mean(output):
    """A criterion."""
    total, count = output["loss"]
    return total / count


@pytest.mark.parametrize("criterion", [None, own_mean])
@on_ranks(2)
def test_a_models_own_sum_has_the_count_of_all_ranks(world, criterion):
    inputs, labels = tokens()(0)
    batch = {"tokens": inputs, "labels": labels.masked_fill(torch.arange(labels.shape[1]) < 5, -100)}
    model = seeded(Summing, seed=7)
    assert_loss_and_gradients(model, own_mean(model(**batch)), seeded(Summing, seed=7), (batch,), criterion)


@on_ranks(2)
def test_an_own_loss_that_is_not_that_of_whole_sequences_is_refused(world):
    inputs, labels = tokens()(0)
    with paramp.launch_from_torch({"reproducible": {"sequence_slices": 8}, "parallel": {"context": 2}}):
        for kind in ("shifts", "of samples", "mean"):
            with pytest.raises(paramp.ConfigError, match="the own loss of Summing for the first 16 tokens is off by"):
                engine_of(Summing(kind), None).forward_backward({"tokens": inputs, "labels": labels})


class Reading(nn.Embedding):
    """Keeps what each forward reads."""

    def __init__(self):
        super().__init__(8, 8)
        self.read = []

    def forward(self, tokens):
        self.read.append(tokens.tolist())
        return super().forward(tokens)


@pytest.mark.parametrize(("slices", "expected"), [(1, [[*range(8)]]), (4, [[0, 1], [2, 3], [4, 5], [6, 7]])])
@on_ranks(1)
def test_a_module_computes_as_many_consecutive_slices(world, slices, expected):
    tokens, reading = torch.arange(8)[None], Reading()
    with paramp.launch_from_torch({"reproducible": {"sequence_slices": slices}}):
        engine = engine_of(nn.Sequential(reading, nn.Linear(8, 8)), next_token)
        engine.forward_backward(tokens, tokens)
        reading.read.clear()  # the first batch is tried on whole sequences too
        engine.zero_grad()
        engine.forward_backward(tokens, tokens)
        assert reading.read == [[one] for one in expected]


def shapes_of_attention(world):
    """Of the query, the key and the value in each call of torch's that this rank makes in a forward."""
    shapes = []

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if "scaled_dot_product" in function.name() and "backward" not in function.name():
                shapes.append([tuple(one.shape) for one in args[:3]])
            return function(*args, **(kwargs or {}))

    how = {"slices": 2, "sequence_slices": 4}
    with paramp.launch_from_torch({"reproducible": how, "parallel": {"context": world.size}}):
        engine = engine_of(SMALL(dropout=0.0), next_token)
        engine.forward_backward(*tokens(1)(0))  # the first batch is tried on whole sequences too
        engine.zero_grad()
        with Watching():
            engine.forward_backward(*tokens(1)(0))
    return shapes


@pytest.mark.parametrize("ranks", [1, 2])
def test_attention_is_one_call_for_a_slice_of_queries_and_a_head_with_all_keys(ranks):
    """Of a sample of 16 tokens in 4 slices: in each of two blocks, for each of four heads."""
    found = run_on_ranks(ranks, __name__, "shapes_of_attention", {})
    assert found == [[[(1, 1, 4, 8), (1, 1, 16, 8), (1, 1, 16, 8)]] * (2 * 4 * 4 // ranks)] * ranks


class Dropping(nn.LayerNorm):
    def forward(self, x):
        return F.dropout(super().forward(x), 0.5)


class Attending(nn.LayerNorm):
    def forward(self, x):
        return F.scaled_dot_product_attention(*[super().forward(x).unsqueeze(1)] * 3).squeeze(1)


class Constant(nn.LayerNorm):
    def forward(self):
        return self.weight


INSIDE = {
    "convolution": lambda: nn.Conv1d(8, 8, 1),
    "recurrent": lambda: nn.GRU(8, 8),
    "dropout inside": lambda: Dropping(8),
    "attention inside": lambda: Attending(8),
    "no input": lambda: Constant(8),
    "other ints": lambda: nn.Embedding(100, 8),
}


class Block(nn.Module):
    """Tokens to logits; ``kind`` names what no slices are computed of."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.table, self.head = kind, nn.Embedding(100, 8), nn.Linear(8, 100)
        self.inside = INSIDE.get(kind, lambda: nn.LayerNorm(8))()
        if kind == "parameter":
            self.scale = nn.Parameter(torch.ones(8))

    def forward(self, tokens):
        x = self.table(tokens)
        if self.kind.endswith(" inside") or (self.kind == "some tokens" and int(tokens[0, 0])):
            return self.head(self.inside(x))
        if self.kind == "other weight":
            return F.linear(x, self.table.weight)
        if self.kind == "no input":
            x = x * self.inside()
        if self.kind == "other ints":  # half as many as tokens
            x = x + self.inside(tokens[0, :4]).repeat_interleave(2, 0)
        if self.kind == "mean":
            x = x - x.mean(-1, keepdim=True)
        if self.kind == "product":
            x = x @ x.transpose(1, 2) @ x
        if self.kind == "product of one term":
            x = x[..., :1] @ x.new_full((1, 1, 8), 0.7)
        if self.kind == "channels":
            x = F.dropout1d(x, 0.5)
        return self.head(x[:, 0] if self.kind == "no tokens" else x)


REFUSED = {
    "convolution": "'0.inside', a Conv1d, mixes tokens",
    "recurrent": "'0.inside', a GRU, mixes tokens",
    "parameter": "'0', a Block, has parameters beside modules",
    "other weight": r"linear in '0' got a parameter of another module",
    "mean": "mean in '0' got tokens whose number differs",
    "product": "matmul in '0' got tokens whose number differs",
    "channels": "dropout in '0' got a tensor .* whose whole channels are dropped",
    "dropout inside": "dropout in '0.inside', which computes one slice of the sequence at a time",
    "attention inside": "attention in '0.inside', which computes one slice of the sequence at a time",
    "no tokens": r"'0', a Linear, got \(1, 8\), expected one tensor",
    "no input": "'0', a Constant, got NoneType, expected one tensor",
    "other ints": r"'0', a Embedding, got \(4,\), expected one tensor, .* of ints, with 8 tokens",
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
        model = Block("product of one term")  # which is rounded once
        expected = next_token(model(tokens), tokens)
        engine = engine_of(nn.Sequential(model), next_token)
        torch.testing.assert_close(engine.forward_backward(tokens, tokens), expected.detach())


class DroppingExperts(StackedExperts):
    def forward(self, rows, index, weights):
        return F.dropout(super().forward(rows, index, weights), 0.5, self.training)


class Routed(nn.Module):
    """A mixture of experts that returns tokens; ``kind`` names what no slices are computed of."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.router = kind, nn.Linear(8, 4)
        self.experts = DroppingExperts() if kind == "in experts" else StackedExperts()
        self.out = nn.Linear(8, 8)

    def forward(self, x):
        weights, index = self.router(x.flatten(0, -2)).softmax(-1).topk(2)
        y = self.experts(x.flatten(0, -2), index, weights).view_as(x)
        if self.kind == "attention":
            y = F.scaled_dot_product_attention(*[y.unsqueeze(1)] * 3).squeeze(1)
        if self.kind == "dropout":
            y = F.dropout(y, 0.5)
        return (y, index) if self.kind == "index" else y


class Around(nn.Module):
    """A block of which a mixture is a part."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.table, self.mixture, self.head = kind, nn.Embedding(100, 8), Routed(kind), nn.Linear(8, 100)

    def forward(self, tokens):
        x = self.table(tokens)
        if self.kind == "outside":
            rows = x.flatten(0, -2)
            x = x + self.mixture.experts(rows, torch.zeros_like(rows[:, :1]).long(), rows[:, :1]).view_as(x)
        found = self.mixture(x)
        return self.head(x + (found[0] if isinstance(found, tuple) else found))


REFUSED_OF_EXPERTS = {
    "attention": "attention in '0.mixture', which computes one slice of the sequence at a time",
    "dropout": "dropout in '0.mixture', which computes one slice of the sequence at a time",
    "in experts": "bernoulli_ in a DroppingExperts draws random numbers for the rows of one expert",
    "index": r"'0', a Routed with experts, returned \(2, 2\) for \(1, 2\) tokens, expected \(samples, tokens",
    "outside": "a StackedExperts in '0' is called outside of the module that has it",
}


@on_ranks(1)
def test_mixtures_that_compute_no_slices_are_refused_by_name(world):
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    with paramp.launch_from_torch({"reproducible": {"sequence_slices": 4}}):
        for kind, message in REFUSED_OF_EXPERTS.items():
            engine = engine_of(nn.Sequential(Around(kind)), next_token, plan={"**.experts": "experts"})
            with pytest.raises(paramp.ConfigError, match=message):
                engine.forward_backward(tokens, tokens)


@on_ranks(1)
def test_attention_with_sinks_and_the_loss_of_routers_are_refused_by_name(world):
    pytest.importorskip("transformers")
    inputs, targets = {"input_ids": torch.ones(1, 8, dtype=torch.int64)}, torch.ones(1, 8, dtype=torch.int64)
    with paramp.launch_from_torch({"reproducible": {"slices": 4, "sequence_slices": 4}}):
        with pytest.raises(paramp.ConfigError, match="GptOssAttention, has parameters beside modules"):
            engine_of(build_mixture("GPT-OSS", num_experts=4), output_loss).forward_backward(inputs, targets)
        model = build_mixture("Mixtral", num_experts=4)
        model.config.output_router_logits = True
        with pytest.raises(paramp.ConfigError, match="output_router_logits is True, expected False"):
            engine_of(model, output_loss)


@on_ranks(2)
def test_a_forward_that_depends_on_a_ranks_tokens_is_an_error_before_ranks_wait(world):
    tokens = torch.zeros(1, 512, dtype=torch.int64)
    tokens[0, 256] = 1  # the first of rank 1; of the tokens that are tried it has others
    with paramp.launch_from_torch({"reproducible": {"sequence_slices": 4}, "parallel": {"context": 2}}):
        engine = engine_of(nn.Sequential(Block("some tokens")), next_token)
        with pytest.raises(RuntimeError, match="a LayerNorm in '0' has run 0 and 1 times on the ranks of the"):
            engine.forward_backward(tokens, tokens)


class LastToken(nn.Sequential):
    def forward(self, tokens):
        return super().forward(tokens)[:, -1, 0]


@on_ranks(2)
def test_an_output_of_the_last_token_is_refused_as_it_is_another_one_on_each_rank(world):
    tokens = torch.arange(16)[None]
    with paramp.launch_from_torch({"reproducible": {"sequence_slices": 4}, "parallel": {"context": 2}}):
        engine = engine_of(nn.Sequential(LastToken(nn.Embedding(16, 8))), next_token)
        with pytest.raises(paramp.ConfigError, match=r"output of shape \(1,\), expected tokens in dim 1"):
            engine.forward_backward(tokens, tokens)


@pytest.mark.parametrize(
    ("parallel", "slices", "message"),
    [
        ({"context": 2}, 1, "parallel.context.size: got 2, expected a power of two, at most .*sequence_slices 1"),
        ({"context": 3}, 4, "parallel.context.size: got 3, expected a power of two"),
        ({"context": {"size": 2, "method": "ring"}}, 4, "parallel.context.method: got 'ring', expected auto or all-ga"),
        ({"context": {"size": 2, "method": "ulysses"}}, 4, "parallel.context.method: got 'ulysses', expected auto or "),
        ({"tensor": 2, "sequence_parallel": True}, 4, "parallel.sequence_parallel: got True, expected False"),
        ({}, 3, "sequence_slices: got 3, expected a power of two"),
    ],
)
def test_layouts_that_cut_no_slices_are_refused(parallel, slices, message):
    with pytest.raises(paramp.ConfigError, match=message):
        load({"parallel": parallel, "reproducible": {"sequence_slices": slices}})
