"""Sequences cut over the context axis: losses and norms of training against one process in fp64; what is refused."""

import contextlib
import copy
import functools
import itertools
import operator
import warnings
from unittest import mock

import pytest
import torch
from cut_batches import LENGTH, cut_batches
from families import cases, family, number, rarely
from pool import on_ranks, run_on_ranks
from reference import farthest
from small_engines import engine_of, own_part
from torch import nn
from torch.nn import functional as F

import paramp
from paramp import token_positions
from paramp.base.dtensor import local
from paramp.config.files import load
from paramp.models.gpt import GPT, GPTConfig
from paramp.parallel.context_axis import cut_sequences

STEPS, LR = number(2, 20), 0.05
LAYOUTS = {
    "cp4": {"context": 4},
    "cp2·tp2": {"context": 2, "tensor": 2},
    "cp2·tp2 + sp": {"context": 2, "tensor": 2, "sequence_parallel": True},
    "cp2·pp2": {"context": 2, "pipeline": 2},
    "cp2·dp2": {"context": 2, "data": 2},
    "cp2·dp2 + zero1": {"context": 2, "data": 2, "zero": 1},
    "fsdp2·cp2": {"context": 2, "data": {"shard": 2}},
    **{f"cp4 {method}": {"context": {"size": 4, "method": method}} for method in ("ring", "all-gather", "ulysses")},
}
"""On four ranks."""
KINDS = ("GPT", "GPT mean", "Llama", "padded", "packed", "odd length", "window", "sinks")
CELLS = [(kind, layout) for kind in KINDS for layout in LAYOUTS if "GPT" in kind or "sp" not in layout]
PART = [("Llama", "cp4 ring"), ("GPT", "fsdp2·cp2"), ("padded", "cp2·pp2")]


def small_gpt(**options):
    sizes = {"num_layers": 2, "num_heads": 8, "width": 32, "max_seq_len": LENGTH, "vocab_size": 100, "init_std": 0.06}
    return GPT(GPTConfig(**sizes, **options))


def pretrained(kind):
    import transformers

    sizes = {"vocab_size": 100, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 4}
    sizes |= {"num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": 64}
    if kind == "window":
        return transformers.MistralForCausalLM(transformers.MistralConfig(sliding_window=7, **sizes))
    if kind == "sinks":
        sizes |= {"num_local_experts": 2, "num_experts_per_tok": 2, "sliding_window": 7, "pad_token_id": 0}
        model = transformers.GptOssForCausalLM(transformers.GptOssConfig(**sizes))
        model.set_experts_implementation("eager")  # the default has no fp64
        return model
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))


def build(kind):
    torch.manual_seed(0)
    return small_gpt() if kind.startswith("GPT") else pretrained(kind)


def batches(kind):
    for batch in cut_batches(kind, STEPS, length=LENGTH - 3 * (kind == "odd length")):
        if kind == "padded":
            batch["attention_mask"] = torch.ones_like(batch["input_ids"])
            batch["attention_mask"][2, 25:] = batch["attention_mask"][3, :6] = 0
            batch["labels"][3, :6] = -100  # the loss of padding at the end counts, as it does on one process
        yield batch


def summed_loss(output, target):
    loss = F.cross_entropy(output[..., :100].flatten(0, 1).float(), target.flatten(), reduction="sum")
    return loss, (target != -100).sum()


def mean_loss(output, target):
    return F.mse_loss(output[..., :100].float(), target.unsqueeze(-1).expand(-1, -1, 100) / 100)


CRITERIA = {"GPT": summed_loss, "GPT mean": mean_loss}


@functools.cache
def reference(kind):
    """Loss and gradient norm of each step in one process, in fp64."""
    model, found = build(kind).double(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for batch in batches(kind):
        if kind in CRITERIA:
            loss = CRITERIA[kind](model(batch["input_ids"]).double(), batch["labels"])
            loss = loss[0] / loss[1] if isinstance(loss, tuple) else loss
        else:
            loss = model(**batch, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        found.append((float(loss.detach()), float(nn.utils.get_total_norm([p.grad for p in model.parameters()]))))
        optimizer.step()
    return found


def train(context, kind, model=None):
    engine = engine_of(model or build(kind), CRITERIA.get(kind), functools.partial(torch.optim.SGD, lr=LR))
    found = []
    for batch in batches(kind):
        batch = dict(zip(batch, own_part(context, *batch.values()), strict=True))
        inputs = (batch["input_ids"], batch["labels"]) if kind in CRITERIA else (batch,)
        loss = engine.forward_backward(*inputs)
        found.append((float(loss), float(engine.step().grad_norm)))
        engine.zero_grad()
    return engine, found


@family
@pytest.mark.parametrize(("kind", "layout"), cases("context axis", CELLS, PART, 3))
@on_ranks(4)
def test_losses_and_norms_are_those_of_one_process(world, kind, layout):
    with paramp.launch_from_torch({"parallel": LAYOUTS[layout], "clip_grad_norm": 1e9}) as context:
        engine, found = train(context, kind)
        assert sum(found, ()) == pytest.approx(sum(reference(kind), ()), rel=1e-5)
        assert not engine.check_replicas()


def wide(kind):
    """The model in fp64, in which transformers' norms do not compute."""
    model = build(kind)
    for name, module in [*model.named_modules()]:
        if type(module).__name__.endswith("RMSNorm"):
            model.set_submodule(name, nn.RMSNorm(module.weight.shape, module.variance_epsilon))
    return model.double()


def wide_loss(output, labels):
    """Of the next tokens, in fp64, which transformers' own loss is not."""
    logits = getattr(output, "logits", output)[:, :-1, :100].flatten(0, 1)
    target = labels[:, 1:].flatten()
    return F.cross_entropy(logits, target, reduction="sum"), (target != -100).sum()


GRADIENTS = itertools.product(
    ("Llama", "padded", "packed", "window", "GPT"), ("ring", "all-gather", "ulysses"), (2, 4, 8)
)


@pytest.mark.parametrize(
    ("kind", "method", "size"),
    rarely(GRADIENTS, ("packed", "ring", 8), ("packed", "all-gather", 4), ("packed", "ulysses", 2)),
)
def test_gradients_of_all_parameters_are_those_of_one_process_in_fp64(kind, method, size):
    run_on_ranks(size, __name__, "gradients_in_fp64", {"kind": kind, "method": method, "size": size})


def gradients_in_fp64(world, kind, method, size):
    config = {"parallel": {"context": {"size": size, "method": method}}, "precision": "64-true"}
    with paramp.launch_from_torch(config) as context:
        (batch, *_) = batches(kind)
        labels = batch.pop("labels")
        model = wide(kind)
        loss, count = wide_loss(model(batch["input_ids"]) if kind == "GPT" else model(**batch, use_cache=False), labels)
        (loss / count).backward()
        engine = engine_of(wide(kind), wide_loss, functools.partial(torch.optim.SGD, lr=16.0))
        batch = dict(zip(batch, own_part(context, *batch.values()), strict=True))
        (labels,) = own_part(context, labels)
        engine.forward_backward(batch["input_ids"] if kind == "GPT" else batch, labels)
        engine.step()
        stepped, parameters = engine.full_state_dict(), dict(model.named_parameters())
        found = {name: (value.detach() - stepped[name]) / 16 for name, value in parameters.items()}
        worst = farthest(found, {name: value.grad for name, value in parameters.items()})
        assert worst[0] <= 1e-12, worst


QUICK, AOT = {"backend": "eager", "dynamic": False}, {"backend": "aot_eager"}
COMPILED = [("packed", QUICK), *((kind, AOT) for kind in ("GPT", "Llama", "packed"))]


@pytest.mark.parametrize(("kind", "compiler"), rarely(COMPILED, COMPILED[0]))
@on_ranks(2)
def test_compiled_blocks_attend_over_whole_sequences(world, kind, compiler):
    """Attention runs between their graphs, also in the trial, whose attention is that of one process."""
    config = {"parallel": {"context": 2}, "compile": compiler, "clip_grad_norm": 1e9}
    with paramp.launch_from_torch(config) as context:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")  # torch's compiler has some of its own
            found = train(context, kind)[1]
        breaks = [str(one.message) for one in caught if "the graph of" in str(one.message)]
        assert bool(breaks) == context.is_main
        assert sum(found, ()) == pytest.approx(sum(reference(kind), ()), rel=1e-5)


class OwnModel(nn.Module):
    """A bidirectional encoder with a mask of padding in memory of its own, whose own loss is a sum and a count."""

    def __init__(self):
        super().__init__()
        self.mask = torch.empty(0, dtype=torch.bool)
        self.tokens, self.places = nn.Embedding(100, 16), nn.Embedding(LENGTH, 16)
        self.qkv, self.head = nn.Linear(16, 48), nn.Linear(16, 100)

    def forward(self, tokens, seen, labels):
        hidden = self.tokens(tokens) + self.places(paramp.token_positions(tokens.shape[1], tokens.device))
        q, k, v = (part.unflatten(-1, (4, 4)).transpose(1, 2) for part in self.qkv(hidden).chunk(3, -1))
        if self.mask.shape != seen[:, None, None].shape:
            self.mask = torch.empty_like(seen[:, None, None])
        self.mask.copy_(seen[:, None, None])
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask)
        logits = self.head(hidden + mixed.transpose(1, 2).flatten(2))
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return {"loss": (loss, (labels != -100).sum())}


def gradients_of(model, loss, count):
    """Those of the mean loss in one process, by name; the model has none afterwards."""
    (loss / count).backward()
    found = {name: value.grad for name, value in model.named_parameters()}
    model.zero_grad()
    return found


def assert_gradients(engine, inputs, expected, tolerance, run=None):
    """A step of SGD with the rate 16 moves each weight by its gradient; ``run``: in place of ``forward_backward``."""
    start = engine.full_state_dict()
    (run or engine.forward_backward)(*inputs)
    engine.step()
    stepped = engine.full_state_dict()
    for name, gradient in expected.items():
        way = (start[name] - stepped[name]) / 16
        assert (way - gradient).norm() <= tolerance * gradient.norm(), name


@on_ranks(2)
def test_a_model_of_ones_own_has_the_gradients_of_one_process(world):
    torch.manual_seed(0)
    model = OwnModel().double()
    with paramp.launch_from_torch({"parallel": {"context": 2}, "precision": "64-true"}):
        engine = engine_of(copy.deepcopy(model), None, functools.partial(torch.optim.SGD, lr=16.0))
        for rolled, batch in enumerate(itertools.islice(batches("padded"), 2)):
            inputs = batch["input_ids"], batch["attention_mask"].bool().roll(rolled, 0), batch["labels"]
            model.load_state_dict(engine.full_state_dict())
            assert_gradients(engine, (inputs,), gradients_of(model, *model(*inputs)["loss"]), 1e-12)


class Teacher(nn.Module):
    """A criterion with attention and positions of its own, which sees whole sequences."""

    def __init__(self):
        super().__init__()
        self.model = build("GPT").double()

    def forward(self, output, tokens):
        with torch.no_grad():
            wanted = self.model(tokens.flip(1))
        return F.mse_loss(output, wanted)


@on_ranks(2)
def test_a_teacher_in_the_criterion_sees_whole_sequences(world):
    tokens = next(batches("GPT"))["input_ids"]
    model, teacher = build("GPT").double(), Teacher()
    expected = gradients_of(model, teacher(model(tokens), tokens), 1)
    with paramp.launch_from_torch({"parallel": {"context": 2}, "precision": "64-true"}):
        engine = engine_of(model, teacher, functools.partial(torch.optim.SGD, lr=16.0))
        assert_gradients(engine, (tokens, tokens), expected, 1e-12)


class Skipping(nn.Module):
    """Attention in its own forward, positions, and a value that skips a layer: traced, and in stages."""

    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(100, 16), nn.Embedding(LENGTH, 16)
        self.first, self.second, self.head = nn.Linear(16, 48), nn.Linear(16, 48), nn.Linear(16, 100)

    def forward(self, tokens):
        start = self.tokens(tokens) + self.places(token_positions(tokens.shape[1], tokens.device))
        hidden = start
        for layer in (self.first, self.second):
            parts = layer(hidden).unflatten(-1, (3, 4, 4)).transpose(1, 3)  # (batch, heads, 3, tokens, features)
            mixed = F.scaled_dot_product_attention(parts[:, :, 0], parts[:, :, 1], parts[:, :, 2], is_causal=True)
            hidden = hidden + mixed.transpose(1, 2).flatten(2)
        return self.head(hidden + start)


@on_ranks(4)
def test_stages_of_a_traced_model_attend_over_whole_sequences(world):
    torch.manual_seed(0)
    model, (batch, *_) = Skipping().double(), batches("GPT")
    tokens, labels = batch["input_ids"], batch["labels"]
    expected = gradients_of(model, *summed_loss(model(tokens), labels))
    parallel = {"context": 2, "pipeline": {"size": 2, "split": ["second"]}}
    with paramp.launch_from_torch({"parallel": parallel, "precision": "64-true"}):
        engine = engine_of(model, summed_loss, functools.partial(torch.optim.SGD, lr=16.0))
        assert len([*engine.module.parameters()]) < len(expected)
        assert_gradients(engine, (tokens, labels), expected, 1e-6)  # the loss is in fp32


LARGE_LAYOUTS = {
    "fsdp2·cp2·pp2": {"data": {"shard": 2}, "context": 2, "pipeline": 2},
    "fsdp2·cp2·tp2": {"data": {"shard": 2}, "context": 2, "tensor": 2},
    "hsdp2·fsdp2·cp2": {"data": {"shard": 2, "replicate": 2}, "context": 2},
}
"""On eight ranks."""


@pytest.mark.parametrize("layout", rarely(LARGE_LAYOUTS, "fsdp2·cp2·pp2"))
@on_ranks(8)
def test_data_ranks_that_shard_may_have_sequences_of_other_lengths(world, layout):
    """A length that is new to one of them only is tried on all: they would wait for each other."""
    model, (batch, *_) = build("GPT").double(), batches("GPT")
    whole = batch["input_ids"], batch["labels"]
    with paramp.launch_from_torch({"parallel": LARGE_LAYOUTS[layout], "precision": "64-true"}) as context:
        rows = zip(*(tensor.chunk(context.dp.size) for tensor in whole), strict=True)
        parts = [[one[:, : LENGTH - 8 * index] for one in row] for index, row in enumerate(rows)]
        losses = [summed_loss(model(tokens), labels) for tokens, labels in parts]
        expected = gradients_of(model, *map(sum, zip(*losses, strict=True)))
        engine = engine_of(model, summed_loss, functools.partial(torch.optim.SGD, lr=16.0))
        engine.forward_backward(*own_part(context, *whole))
        engine.zero_grad()
        assert_gradients(engine, parts[context.dp.rank], expected, 1e-6)


@on_ranks(2)
def test_outputs_and_evaluations_are_of_whole_sequences(world):
    (batch, *_) = batches("GPT")
    tokens, target = batch["input_ids"], batch["labels"]
    with paramp.launch_from_torch({"parallel": {"context": 2}}):
        model = build("GPT")
        whole = model(tokens).detach()
        engine = engine_of(model, summed_loss)
        loss, count = summed_loss(whole, target)
        torch.testing.assert_close(engine(tokens).detach(), whole, rtol=1e-5, atol=1e-6)
        engine.backward(engine.criterion(engine(tokens), target))
        first = float(engine.step().grad_norm)
        assert first == pytest.approx(reference("GPT")[0][1], rel=1e-5)
        engine = engine_of(build("GPT"), summed_loss)
        loader = [(tokens[:1], target[:1]), (tokens[1:], target[1:])]
        for given in ((tokens, target), (loader,)):
            assert float(engine.evaluate(*given)) == pytest.approx(float(loss / count), rel=1e-6)
        output, label, _ = engine.execute_schedule(iter([(tokens, target)]), forward_only=True)
        torch.testing.assert_close(output, whole, rtol=1e-5, atol=1e-6)
        assert torch.equal(label, target)
        layer, x = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), torch.randn(2, 8, 8)  # has kernels
        expected = F.mse_loss(layer.eval()(x), x).item()
        assert engine_of(layer, F.mse_loss).evaluate(x, x).item() == pytest.approx(expected, rel=1e-5)


OF_OUTPUTS = {
    "its loss": lambda output: output.loss,
    "its loss and logits": lambda output: 2 * output.loss + output.logits.square().mean(),
    "a sum and a count": lambda output: output["loss"],
    "their quotient": lambda output: output["loss"][0] / output["loss"][1],
}


@pytest.mark.parametrize("in_loop", [True, False])
@pytest.mark.parametrize("kind", OF_OUTPUTS)
@on_ranks(2)
def test_a_loss_of_whole_outputs_has_the_gradients_of_one_process(world, kind, in_loop):
    """Ranks have different numbers of labels."""
    torch.manual_seed(0)
    (batch, *_) = batches("padded")
    model, loss_of = wide("Llama"), OF_OUTPUTS[kind]
    if "loss" not in kind:
        model = OwnModel().double()
        batch = {"tokens": batch["input_ids"], "seen": batch["attention_mask"].bool(), "labels": batch["labels"]}
    output = model.eval()(**batch)
    loss = loss_of(output)
    loss, count = loss if isinstance(loss, tuple) else (loss, 1)
    expected = gradients_of(model, loss, count)
    with paramp.launch_from_torch({"parallel": {"context": 2}, "precision": "64-true"}):
        shown = []  # to the criterion too, in evaluation and training
        criterion = None if in_loop else lambda output: shown.append(output) or loss_of(output)
        engine = engine_of(model, criterion, functools.partial(torch.optim.SGD, lr=16.0))
        shown += [engine.train(mode)(**batch) for mode in (False, True)]
        shown.append(engine.execute_schedule(iter([batch]), forward_only=True)[0])
        run = (lambda batch: engine.backward(loss_of(engine(**batch)))) if in_loop else None
        assert_gradients(engine, (batch,), expected, 1e-6, run)
        assert len(shown) == 3 if in_loop else len(shown) > 4
        for one in shown:
            torch.testing.assert_close(one["loss"], output["loss"], rtol=1e-6, atol=0)


@pytest.mark.parametrize("is_mean", [True, False])
@on_ranks(2)
def test_a_window_of_batches_and_losses_of_outputs_is_one_mean(world, is_mean):
    """The two batches have different numbers of labels."""
    torch.manual_seed(0)
    given, model = list(itertools.islice(batches("padded"), 2)), wide("Llama") if is_mean else OwnModel().double()
    given[1]["labels"][:, 10:] = -100
    total, count = 0.0, 0
    for one in given:
        if is_mean:
            counted = (one["labels"][:, 1:] != -100).sum()
            pair = model(**one).loss * counted, counted
        else:
            one |= {"tokens": one.pop("input_ids"), "seen": one.pop("attention_mask").bool()}
            model.mask = torch.empty(0, dtype=torch.bool)
            pair = model(**one)["loss"]
        total, count = total + pair[0], count + pair[1]
    expected = gradients_of(model, total, count)
    config = {"parallel": {"context": 2}, "precision": "64-true", "gradient_accumulation": 2}
    with paramp.launch_from_torch(config):
        engine = engine_of(model, None, functools.partial(torch.optim.SGD, lr=16.0))

        def run():
            engine.forward_backward(given[0])
            assert not engine.step().stepped
            engine.backward(engine(**given[1])["loss"])

        assert_gradients(engine, (), expected, 1e-6, run)


LABELLED = {
    "BertForMaskedLM": {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0},
    "LlamaForTokenClassification": {"num_labels": 100, "classifier_dropout": 0},
}


@pytest.mark.parametrize("kind", LABELLED)
@on_ranks(2)
def test_a_rank_without_labels_adds_nothing_to_a_loss_that_takes_no_count(world, kind):
    import transformers

    sizes = {"vocab_size": 100, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    model_class = getattr(transformers, kind)
    torch.manual_seed(0)
    model = model_class(model_class.config_class(num_attention_heads=4, **sizes, **LABELLED[kind])).train()
    batch = {**next(batches("Llama")), "attention_mask": torch.ones(4, LENGTH, dtype=torch.long)}
    batch["labels"] = batch["input_ids"].masked_fill(torch.arange(LENGTH) >= 5, -100)  # a quarter of the first rank's
    loss = model(**batch).loss
    norm = float(nn.utils.get_total_norm(gradients_of(model, loss, 1).values()))
    with paramp.launch_from_torch({"parallel": {"context": 2}}):
        engine = engine_of(model, None)
        torch.testing.assert_close(engine(**batch).loss, loss, rtol=1e-5, atol=0)
        engine.forward_backward(batch)
        assert float(engine.step().grad_norm) == pytest.approx(norm, rel=1e-5)


@on_ranks(2)
def test_an_overflow_in_one_part_of_a_sequence_skips_the_step_on_every_rank(world):
    with paramp.launch_from_torch({"parallel": {"context": 2}, "precision": "16-mixed"}) as context:
        engine = engine_of(build("Llama"), None)
        before = engine.full_state_dict()
        for rank in range(2):
            (batch, *_) = batches("Llama")
            engine.forward_backward(batch)
            if context.cp.rank == rank:
                next(iter(engine.module.parameters())).grad.view(-1)[0] = float("inf")
            assert engine.step().overflow
            engine.zero_grad()
        after = engine.full_state_dict()
        assert all(torch.equal(before[name], after[name]) for name in before)


@on_ranks(4)
def test_ranks_of_the_axis_are_one_data_rank(world):
    with paramp.launch_from_torch({"parallel": {"context": 2, "data": 2}}) as context:
        assert (context.cp.size, context.dp.size, context.batch_axis.size) == (2, 2, 4)
        assert context.mesh.mesh_dim_names == ("pp", "dp", "cp", "tp")
        group = torch.distributed.get_process_group_ranks(context.model_group)
        assert group == [2 * context.dp.rank, 2 * context.dp.rank + 1]
        data = torch.utils.data.TensorDataset(torch.arange(8))
        loader = torch.utils.data.DataLoader(data, batch_size=2)
        _, loader, *_ = paramp.initialize(build("GPT"), torch.optim.SGD, summed_loss, loader)
        seen = torch.cat([torch.cat(list(batch)) for batch in loader])
        both = [torch.empty_like(seen) for _ in range(2)]
        torch.distributed.all_gather(both, seen, group=context.cp.group)
        assert torch.equal(*both)
        torch.distributed.all_gather(both, seen, group=context.dp.group)
        assert sorted(torch.cat(both).tolist()) == [*range(8)]
    for other in ("pipeline", "tensor"):
        with paramp.launch_from_torch({"parallel": {"context": 2, other: 2}}) as context:
            assert torch.distributed.get_process_group_ranks(context.model_group) == [0, 1, 2, 3]


@pytest.mark.parametrize("size", [2, 4])
@on_ranks(4)
def test_a_rank_has_one_part_of_the_first_half_and_its_counterpart_from_the_end(world, size):
    """In training; the trial of the first batch, of that part and of whole sequences, is without gradients."""
    model, seen, tokens = nn.Sequential(nn.Embedding(16, 8)), [], torch.arange(16).expand(2, 16)

    def see(module, inputs):
        seen.append((inputs[0].tolist(), module.training, torch.is_grad_enabled()))

    model[0].register_forward_pre_hook(see)
    with paramp.launch_from_torch({"parallel": {"context": size}}) as context:
        engine = engine_of(model)
        for _ in range(2):
            engine(tokens)
    first, last = {2: [(0, 3), (1, 2)], 4: [(0, 7), (1, 6), (2, 5), (3, 4)]}[size][context.cp.rank]
    length = 8 // size
    part = [[one * length + place for one in (first, last) for place in range(length)]] * 2
    batch = (part, True, True)
    assert seen == [(tokens.tolist(), False, False), (part, False, False), batch, batch]


@on_ranks(4)
def test_a_checkpoint_goes_on_in_another_layout(world, tmp_path):
    with paramp.launch_from_torch({"parallel": {"context": 4}, "precision": "16-naive"}) as context:
        engine, _ = train(context, "Llama")
        saved = engine.full_state_dict()
        engine.save(tmp_path)
        engine.finish_saving()
    with paramp.launch_from_torch({"parallel": {"context": 2, "tensor": 2}, "precision": "16-naive"}) as context:
        engine = engine_of(build("Llama"), None, functools.partial(torch.optim.SGD, lr=LR))
        engine.load(tmp_path)
        loaded = engine.full_state_dict()
        assert all(torch.equal(loaded[name], saved[name]) for name in saved)


@pytest.mark.parametrize("every", ["full", "selective"])
@on_ranks(2)
def test_checkpointed_blocks_attend_over_whole_sequences_again(world, every):
    config = {"parallel": {"context": 2}, "activation_checkpointing": every, "clip_grad_norm": 1e9}
    with paramp.launch_from_torch(config) as context:
        assert sum(train(context, "packed")[1], ()) == pytest.approx(sum(reference("packed"), ()), rel=1e-5)


class Grouped(nn.Linear):
    """Attention of four heads to the keys of some of them, and the values of as many."""

    def __init__(self, num_key_heads):
        super().__init__(8, 8)
        self.num_key_heads = num_key_heads

    def forward(self, x):
        heads = super().forward(x).unflatten(-1, (4, 2)).transpose(1, 2)
        kept = heads[:, : self.num_key_heads]
        mixed = F.scaled_dot_product_attention(heads, kept, kept, is_causal=True, enable_gqa=True)
        return mixed.transpose(1, 2).flatten(2)


@on_ranks(2)
def test_without_a_method_the_shapes_of_a_call_choose_it(world):
    x = torch.randn(2, 16, 8, generator=torch.Generator().manual_seed(0))
    for num_key_heads, expected in ((4, "ulysses"), (2, "all-gather")):
        with (
            paramp.launch_from_torch({"parallel": {"context": 2}}),
            mock.patch.object(cut_sequences, "attention", wraps=cut_sequences.attention) as attention,
        ):
            engine_of(Grouped(num_key_heads), F.mse_loss).forward_backward(x, x)
        assert {call.kwargs["method"] for call in attention.call_args_list} == {expected}


def dropout_gpt(context):
    """Losses and norms of a GPT with dropout, and the seeds of its attention on all ranks, by data and tensor rank."""
    seeds, attention = [], cut_sequences.attention

    def seen(*args, **options):
        seeds.extend([options["dropout_seed"]] if options["dropout"] else [])  # none in the trial
        return attention(*args, **options)

    torch.manual_seed(0)
    with mock.patch.object(cut_sequences, "attention", seen):
        found = train(context, "GPT", small_gpt(dropout=0.3))[1]
    everyone = [None] * context.world_size
    torch.distributed.all_gather_object(everyone, (context.cp.rank, context.dp.rank, context.tp.rank, seeds))
    return found, everyone


@pytest.mark.real_sizes  # of which attention has one tile
@pytest.mark.parametrize("other", ["tensor", "data"])
@on_ranks(4)
def test_the_parts_of_a_sequence_have_one_seed_of_dropout_in_each_layer_and_step(world, other):
    """And draw the same masks again where blocks are checkpointed."""
    found = {}
    for checkpointing in (None, "full"):
        config = {"parallel": {"context": 2, other: 2}, "activation_checkpointing": checkpointing}
        with paramp.launch_from_torch({key: value for key, value in config.items() if value}) as context:
            found[checkpointing], everyone = dropout_gpt(context)
        seeds = {}
        for _, data, tensor, drawn in everyone:
            assert seeds.setdefault((data, tensor), drawn) == drawn
        drawn = [seed for row in seeds.values() for seed in row]
        again = 1 if checkpointing is None else 2
        assert len(drawn) == again * len({*drawn}) == again * 2 * 2 * STEPS  # layers, ranks of the other axis, steps
    assert sum(found["full"], ()) == pytest.approx(sum(found[None], ()), rel=1e-5)


class Counted(nn.Module):
    """Tokens with embedded positions, which it counts itself, or over all ranks."""

    def __init__(self, positions):
        super().__init__()
        self.positions = positions
        self.tokens, self.places = nn.Embedding(100, 8), nn.Embedding(LENGTH, 8)

    def forward(self, tokens):
        return self.tokens(tokens) + self.places(self.positions(tokens.shape[1]))


def kept_for(lasts):
    """Counts positions over all ranks, and keeps them while a table of ``lasts(its length, the tokens)`` is enough."""
    table = torch.arange(0)

    def positions(length):
        nonlocal table
        if not lasts(len(table), length):
            table = token_positions(length)
        return table[:length]

    return positions


class Headed(nn.Module):
    """Tokens, of whose hidden states a function makes the outputs."""

    def __init__(self, outputs):
        super().__init__()
        self.outputs = outputs
        self.tokens = nn.Embedding(100, 8)

    def forward(self, tokens):
        return self.outputs(self.tokens(tokens))


def of_next_token(hidden):
    """A loss of each token and the next one that this rank has: (sum, count)."""
    found = (hidden[:, 1:] - hidden[:, :-1]).square().mean(-1)
    return {"loss": (found.sum(), torch.tensor(found.numel()))}


class OwnShift(nn.Module):
    """A language model whose own loss is of the next labels of this rank."""

    def __init__(self):
        super().__init__()
        self.tokens, self.head = nn.Embedding(100, 16), nn.Linear(16, 100)

    def forward(self, tokens, labels):
        logits, labels = self.head(self.tokens(tokens)), labels[:, 1:]
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels.flatten(), reduction="sum")
        return {"logits": logits, "loss": (loss, (labels != -100).sum())}


@pytest.mark.parametrize("labelled", [range(64), [10, 40]])
@on_ranks(2)
def test_labels_that_a_model_shifts_itself_are_refused_whatever_they_are(world, labelled):
    """Also where no label is at the end of a rank's part."""
    torch.manual_seed(0)
    tokens, labels = torch.randint(0, 100, (8, 64)), torch.full((8, 64), -100)
    labels[:, labelled] = tokens[:, labelled]
    with paramp.launch_from_torch({"parallel": {"context": 2}}):
        engine = engine_of(OwnShift(), None)
        with pytest.raises(paramp.ConfigError, match="own loss of OwnShift for the first 64 tokens is off by 1"):
            engine.forward_backward((tokens, labels))


@on_ranks(2)
def test_a_loss_in_fp32_of_outputs_in_fp64_is_no_mistake(world):
    """As those of transformers."""
    with paramp.launch_from_torch({"parallel": {"context": 2}, "precision": "64-true"}):
        engine = engine_of(build("Llama"), None)
        for batch in batches("Llama"):
            engine.forward_backward(batch)
            engine.step()


class Shifted(nn.Module):
    """Adds a little of an earlier token, ``far`` before."""

    def __init__(self, far, share=0.3):
        super().__init__()
        self.tokens, self.far, self.share = nn.Embedding(100, 100), far, share

    def forward(self, tokens):
        x = self.tokens(tokens)
        return x + self.share * F.pad(x, (0, 0, self.far, 0))[:, : tokens.shape[1]]


class Masked(nn.Module):
    """Attention with a mask of its own."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(100, 8)

    def forward(self, tokens):
        x = self.tokens(tokens).unsqueeze(1)
        mask = torch.ones(tokens.shape[1], tokens.shape[1]).tril().bool()
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask).squeeze(1)


def mean(output, target):
    return output.mean()


def mean_size(output, target):
    return output.abs().mean()


def first_mean(output, target):
    return output[0].mean() + output[1]


class SetUp(nn.Module):
    """Its first batch sets up a weight."""

    def __init__(self):
        super().__init__()
        self.tokens, self.scale, self.is_set = nn.Embedding(100, 8), nn.Parameter(torch.zeros(1)), False

    def forward(self, tokens):
        x = self.tokens(tokens)
        if not self.is_set:
            self.is_set = True
            self.scale.data.copy_(1 / x.std())
        return x * self.scale


REFUSED_BATCHES = {
    "positions": (lambda: Counted(torch.arange), summed_loss, "counts their places itself"),
    "positions of longer ones": (lambda: Counted(kept_for(operator.ge)), summed_loss, "counts their places itself"),
    "pooled": (lambda: Headed(lambda x: x[..., :3].mean(1)), mean, "output of shape \\(2, 3\\), expected tokens"),
    "a number of each": (lambda: Headed(lambda x: x.mean((1, 2))), mean, "output of shape \\(2,\\), expected tokens"),
    "last token": (lambda: Headed(lambda x: x[:, -1, 0]), mean, "output of shape \\(2,\\), expected tokens"),
    "a sum beside tokens": (
        lambda: Headed(lambda x: (x, x.sum())),
        first_mean,
        "output\\[1\\] of shape \\(\\), expected",
    ),
    "flat tokens": (lambda: Headed(lambda x: x[..., 0].flatten()), mean, "output of shape \\(64,\\), expected tokens"),
    "own shift": (lambda: Headed(of_next_token), None, "own loss of Headed for the first 32 tokens is off by"),
    "set up": (SetUp, mean, "the forward changes the parameter 'scale', which each rank"),
    "transform": (lambda: Headed(lambda x: torch.fft.fft(x, dim=1)), mean_size, "mixes tokens other than by attention"),
    "masked": (Masked, mean, "other masks are not cut"),
    "mean of its own": (lambda: Headed(lambda x: {"loss": x.square().mean()}), None, "expected \\(sum, count\\)"),
    "far shift": (lambda: Shifted(20), summed_loss, "mixes tokens other than by attention"),
    "ends of parts": (lambda: Shifted(1, 0.005), summed_loss, "the first 256 tokens .* mixes tokens other than"),
    "farther apart than 256": (lambda: Shifted(256), summed_loss, None),
    "length": (lambda: Counted(paramp.token_positions), summed_loss, "expected a multiple of 4"),
}


@pytest.mark.parametrize("case", REFUSED_BATCHES)
@on_ranks(2)
def test_what_would_train_otherwise_is_an_error_at_the_first_batch(world, case):
    make, criterion, text = REFUSED_BATCHES[case]
    with paramp.launch_from_torch({"parallel": {"context": 2}}):
        engine = engine_of(make(), criterion)
        length = {"length": 30, "far shift": 64, "ends of parts": 512, "farther apart than 256": 512}.get(case, LENGTH)
        tokens = torch.randint(0, 100, (2, length))
        for _ in range(2):  # an error that was caught is not the last one
            with pytest.raises((paramp.ConfigError, ValueError), match=text) if text else contextlib.nullcontext():
                engine.forward_backward(tokens, None if criterion is None else tokens)
            engine.zero_grad()


class Later(nn.Linear):
    """Adds the token before."""

    def forward(self, x):
        x = super().forward(x)
        return x + F.pad(x, (0, 0, 1, 0))[:, :-1]


@on_ranks(4)
def test_each_stage_is_tried(world):
    tokens = torch.arange(LENGTH).repeat(4, 1)
    with paramp.launch_from_torch({"parallel": {"context": 2, "pipeline": 2}}):
        for layers in ((nn.Linear, Later), (Later, nn.Linear)):
            engine = engine_of(nn.Sequential(nn.Embedding(100, 8), *(kind(8, 8) for kind in layers)), mean)
            with pytest.raises(paramp.ConfigError, match="mixes tokens other than by attention"):
                engine.forward_backward(tokens, tokens)


@on_ranks(2)
def test_labels_are_shifted_for_transformers_loss_and_refused_for_another(world):
    from transformers.loss.loss_utils import ForCausalLMLoss

    (batch, *_) = batches("Llama")
    model = build("Llama")
    expected = float(model(**batch).loss.detach())
    with paramp.launch_from_torch({"parallel": {"context": 2}}):
        model.loss_function = functools.partial(ForCausalLMLoss, ignore_index=-100)
        assert float(engine_of(model, None).forward_backward(batch)) == pytest.approx(expected, rel=1e-5)
        model, zeros = build("Llama"), {**batch, "labels": batch["labels"].clamp(min=0), "ignore_index": 0}
        assert float(engine_of(model, None).forward_backward(zeros)) == pytest.approx(expected, rel=1e-5)
        for function in (functools.partial(ForCausalLMLoss, ignore_index=0), lambda **_: torch.zeros(())):
            model = build("Llama")
            model.loss_function = function
            engine = engine_of(model, None)
            with pytest.raises(paramp.ConfigError, match="another loss_function than transformers'"):
                engine.forward_backward(batch)
            engine(input_ids=batch["input_ids"])


@on_ranks(2)
def test_logits_of_some_tokens_are_refused(world):
    (batch, *_) = batches("Llama")
    with paramp.launch_from_torch({"parallel": {"context": 2}}):
        engine = engine_of(build("Llama"), None).eval()
        assert engine(input_ids=batch["input_ids"], logits_to_keep=0).logits.shape[1] == LENGTH
        for kept in (1, torch.tensor([3])):
            with pytest.raises(paramp.ConfigError, match="'logits_to_keep'"):
                engine(input_ids=batch["input_ids"], logits_to_keep=kept)


@on_ranks(2)
def test_documents_may_be_given_as_to_flash_attention(world):
    (batch, *_) = batches("packed")
    batch = {name: value[1:2] for name, value in batch.items()}
    batch["labels"] = batch["input_ids"]
    expected = float(build("packed")(**batch, use_cache=False).loss.detach())
    limits = torch.tensor([0, 11, 20, LENGTH], dtype=torch.int32)
    flash = {"cu_seq_lens_q": limits, "cu_seq_lens_k": limits, "max_length_q": 12, "max_length_k": 12}
    with paramp.launch_from_torch({"parallel": {"context": 2}}):
        engine = engine_of(build("packed"), None)
        assert float(engine.forward_backward({**batch, **flash})) == pytest.approx(expected, rel=1e-5)
        engine.step()
        with pytest.raises(paramp.ConfigError, match=r"expected cu_seq_lens_q and an equal .* the 32 tokens"):
            engine.forward_backward({**batch, **flash, "cu_seq_lens_k": limits + 1})


@pytest.mark.parametrize("length", [3, 9])
@pytest.mark.parametrize("kind", ["decoder", "encoder"])
@on_ranks(2)
def test_padding_of_a_few_tokens_is_seen_by_none_and_has_no_loss(world, kind, length):
    """An encoder would see what is behind."""
    tokens = next(batches("Llama"))["input_ids"][:, :length] % 8
    batch = {"input_ids": tokens, "labels": tokens}
    torch.manual_seed(0)
    model = (pretrained("Llama") if kind == "decoder" else encoder()).eval()
    loss = float(model(**batch).loss.detach())
    with paramp.launch_from_torch({"parallel": {"context": 2}}):
        found = engine_of(model, None).evaluate(batch)
        assert float(found) == pytest.approx(loss, rel=1e-5)


def on_meta_too(length):
    assert paramp.token_positions(length, "meta").device.type == "meta"
    return paramp.token_positions(length)


@on_ranks(2)
def test_positions_that_are_counted_over_ranks_are_right_and_on_the_device_that_is_asked_for(world):
    """Also those that a model keeps for the next batch of that length, which the trial's whole sequences may have."""
    for positions, length in ((on_meta_too, LENGTH), (kept_for(operator.eq), 512)):
        with paramp.launch_from_torch({"parallel": {"context": 2}}):
            model = Counted(positions)
            model.places = nn.Embedding(length, 8)
            tokens = torch.randint(0, 100, (2, length))
            whole = model(tokens).detach()
            torch.testing.assert_close(engine_of(model)(tokens).detach(), whole)


class Hidden(nn.Module):
    """Tokens with embedded positions, layers, and what is behind a gate."""

    def __init__(self, positions, table=0.02, head=0.1, mean=0.0):
        super().__init__()
        self.positions = positions
        self.tokens, self.places = nn.Embedding(100, 16), nn.Embedding(LENGTH, 16)
        self.block = nn.ModuleList(nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16)) for _ in range(2))
        self.gate, self.head = nn.Parameter(torch.zeros(1)), nn.Linear(16, 100)
        nn.init.normal_(self.places.weight, mean, std=table)
        nn.init.normal_(self.head.weight, std=head)
        nn.init.constant_(self.head.bias, -0.0)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.places(self.positions(tokens.shape[1]))
        for block in self.block:
            x = x + block(x)
        return self.head(x + self.gate * self.mixed(x))

    def mixed(self, x):
        return x


class Gated(Hidden):
    def mixed(self, x):
        return x.cumsum(1)


VACUOUS = {
    "a table of zeros": lambda: Hidden(torch.arange, table=0.0),
    "a table of ones": lambda: Hidden(torch.arange, table=0.0, mean=1.0),
    "a head of zeros": lambda: Hidden(torch.arange, table=0.2, head=0.0),
    "a gate of zero": lambda: Gated(token_positions),
}


@pytest.mark.parametrize("mode", ["32-true", "16-naive"])
@pytest.mark.parametrize("case", VACUOUS)
@on_ranks(2)
def test_weights_that_are_zero_hide_nothing(world, case, mode):
    with paramp.launch_from_torch({"parallel": {"context": 2}, "precision": mode}):
        engine = engine_of(VACUOUS[case](), summed_loss)
        before, counters = bits(engine), [one._version for one in engine.module.parameters()]
        tokens = torch.randint(0, 100, (2, LENGTH))
        with pytest.raises(paramp.ConfigError, match="mixes tokens other than by attention"):
            engine.forward_backward(tokens, tokens)
        assert bits(engine) == before
        assert [one._version for one in engine.module.parameters()] == counters


@pytest.mark.parametrize("mode", ["16-mixed", "bf16-mixed"])
@on_ranks(2)
def test_rounding_under_autocast_hides_no_small_difference(world, mode):
    """Of positions that are a fiftieth of the tokens' values."""
    with paramp.launch_from_torch({"parallel": {"context": 2}, "precision": mode}):
        tokens = torch.randint(0, 100, (2, LENGTH))
        with pytest.raises(paramp.ConfigError, match="mixes tokens other than by attention"):
            engine_of(Hidden(torch.arange, table=0.02), summed_loss).forward_backward(tokens, tokens)
        engine_of(Hidden(token_positions, table=0.02), summed_loss).forward_backward(tokens, tokens)


@on_ranks(4)
def test_weights_that_are_gathered_in_half_as_one_are_tried_so(world):
    """FSDP2's only unit is the model itself."""
    torch.manual_seed(0)
    model, (batch, *_) = OwnModel(), batches("padded")
    inputs = batch["input_ids"], batch["attention_mask"].bool(), batch["labels"]
    total, count = model(*inputs)["loss"]
    config = {"parallel": {"context": 2, "data": {"shard": 2}}, "precision": "bf16-mixed"}
    with paramp.launch_from_torch(config) as context:
        own = tuple(one.chunk(2)[context.dp.rank] for one in inputs)
        found = engine_of(model, None).forward_backward(own)
        assert float(found) == pytest.approx((total / count).item(), rel=1e-2)


class Conditioned(nn.Module):
    """Takes a mask as attention does, (batch, 1, 1, tokens), and features of each sample."""

    def __init__(self, num_features):
        super().__init__()
        self.tokens, self.condition = nn.Embedding(100, 16), nn.Linear(num_features, 16)

    def forward(self, tokens, mask, condition):
        x = self.tokens(tokens) + self.condition(condition).view(-1, 1, 16)
        x = x.unflatten(-1, (4, 4)).transpose(1, 2)
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask).transpose(1, 2).flatten(2)


@on_ranks(2)
def test_masks_of_four_dims_are_cut_and_features_of_samples_are_not(world):
    torch.manual_seed(0)
    mask = torch.rand(2, 1, 1, LENGTH) < 0.8
    tokens, condition = torch.randint(0, 100, (2, LENGTH)), torch.randn(2, LENGTH, dtype=torch.float64)
    with paramp.launch_from_torch({"parallel": {"context": 2}, "precision": "64-true"}):
        model = Conditioned(LENGTH).double()
        expected = model(tokens, mask, condition)
        found = engine_of(copy.deepcopy(model), summed_loss)(tokens, mask, condition[:, None])
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        with pytest.raises(RuntimeError) as caught:
            engine_of(model, summed_loss)(tokens, mask, condition)
        assert "that part of inputs[0][0], inputs[0][1], inputs[0][2]. An input" in caught.value.__notes__[0]


def bits(engine):
    """Of each local weight, in which -0 is not 0."""
    values = [local(one.detach()) for one in engine.module.parameters()]
    return [one.view(torch.int16 if one.itemsize == 2 else torch.int32).tolist() for one in values]


@pytest.mark.parametrize("free", [True, False])
@on_ranks(4)
def test_weights_have_their_own_values_after_the_trial(world, free):
    """Also those that units of FSDP2 keep gathered."""
    torch.manual_seed(0)
    model, tokens = Hidden(token_positions, table=0.0), torch.randint(0, 100, (2, LENGTH))
    model.block[0].requires_grad_(False)
    for one in (model.block[1][1].weight, model.head.bias):
        nn.init.constant_(one, -0.0)
    expected = model(tokens).detach()
    parallel = {"context": 2, "data": {"shard": 2, "reshard_after_forward": free}}
    with paramp.launch_from_torch({"parallel": parallel}):
        engine = engine_of(model)
        before, counters = bits(engine), [one._version for one in engine.module.parameters()]
        torch.testing.assert_close(engine(tokens).detach(), expected)
        assert bits(engine) == before
        assert [one._version for one in engine.module.parameters()] == counters


@on_ranks(2)
def test_a_value_that_is_that_of_whole_sequences_on_each_rank_is_an_output(world):
    with paramp.launch_from_torch({"parallel": {"context": 2}}):
        model = Headed(lambda x: (x, torch.tensor(2.5)))
        whole, scale = engine_of(model, first_mean)(torch.arange(LENGTH)[None])
        assert torch.equal(whole, model.tokens.weight[None, :LENGTH])
        assert float(scale) == 2.5


def encoder_decoder():
    import transformers

    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(d_model=16, d_ff=16, num_layers=1, num_heads=2, vocab_size=8)
    )


def encoder():
    import transformers

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    return transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=8, **sizes))


def on_meta():
    with torch.device("meta"):
        return pretrained("Llama")


REFUSED_MODELS = {
    "convolution": ("data", lambda: nn.Sequential(nn.Conv1d(4, 4, 3)), "'0' is a Conv1d, which mixes tokens"),
    "encoder-decoder": ("data", encoder_decoder, "expected a model of one sequence"),
    "stages of an encoder": ("pipeline", encoder, "expected a decoder that is built on the CPU"),
    "stages of a decoder on meta": ("pipeline", on_meta, "expected a decoder that is built on the CPU"),
}


@on_ranks(4)
def test_layers_that_mix_tokens_and_stages_that_run_the_whole_forward_are_refused(world):
    for other, make, text in REFUSED_MODELS.values():
        launched = paramp.launch_from_torch({"parallel": {"context": 2, other: 2}})
        with launched, pytest.raises(paramp.ConfigError, match=text):
            engine_of(make(), None)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"parallel": {"context": 0}}, "parallel.context.size: got 0"),
        ({"parallel": {"context": {"size": 2, "method": "rings"}}}, "ring"),
        ({"parallel": {"context": 2}, "reproducible": True}, "parallel.context.size: got 2, .*sequence_slices 1"),
        ({"parallel": {"context": 2, "data": {"shard": 2}, "expert": 4}}, "parallel.expert: got 4, .*a divisor of 2"),
    ],
)
def test_settings_that_do_not_go_with_the_axis(config, text):
    with pytest.raises(paramp.ConfigError, match=text):
        load(config)
