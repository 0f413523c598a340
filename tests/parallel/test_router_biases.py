"""Biases of scores in transformers' mixtures: moved by each token of a step once, by hand; not by a skipped step."""

import functools
import importlib
import warnings

import pytest
import torch
from mixtures import batch, build
from pool import on_ranks
from small_engines import engine_of, own_part, save

import paramp
from paramp.base.module_surgery import SCORE_BIAS as BIAS
from paramp.parallel.expert_balance import token_counts
from paramp.parallel.huggingface.tokens_that_balance_experts import shown
from paramp.parallel.model_families import HuggingFaceAdapter

RATE = 0.25
"""A power of two, so that sums of it are exact."""
LAYER = "model.layers.1.mlp.gate"


def biased(rate=RATE):
    model = build("DeepSeek-V3", num_experts=4)
    model.config.bias_rate = rate
    model.get_submodule(LAYER).e_score_correction_bias.copy_(torch.tensor([0.0, 0.5, -0.5, 0.25]))
    return model


def inputs(tokens):
    return {"input_ids": tokens, "labels": tokens}


def counts_of(state, tokens, **options):
    """How many of the tokens choose each expert, by a plain model with the weights ``state``."""
    model, found = biased(0.0).eval(), []
    model.load_state_dict(state)
    model.get_submodule(LAYER).register_forward_hook(lambda _, args, output: found.append(output[2].flatten()))
    with torch.no_grad():
        model(input_ids=tokens, **options)
    return torch.bincount(torch.cat(found), minlength=4)


def moved(bias, counts):
    return (bias + RATE * (counts.double().mean() - counts).sign()).tolist()


def check_step(num_calls=1, counted=False, length=12, **config):
    """One step moves the bias by the tokens of all calls on all ranks, each once; also after they were ``counted``."""
    tokens, frozen = batch(8, length), functools.partial(torch.optim.SGD, lr=0.0)
    with paramp.launch_from_torch({"gradient_accumulation": num_calls, **config}) as context:
        engine = engine_of(biased(), None, frozen)
        before = engine.full_state_dict()
        parts = own_part(context, tokens)[0].chunk(num_calls)
        if counted:
            engine.count_tokens(map(inputs, parts))
            assert all(one.known.sum() == tokens.numel() * 2 for one in token_counts(engine.module))
        for part in parts:
            engine.forward_backward(inputs(part))
            engine.evaluate(inputs(part))
            totals = [one.total.tolist() for one in token_counts(engine.module)]
            engine.step()
        after = engine.full_state_dict()
    counts = counts_of(before, tokens)
    assert counts.sum() == tokens.numel() * 2
    assert totals in ([], [counts.tolist()])  # none on the first stage
    assert len(set(counts.tolist())) > 2
    assert after[f"{LAYER}.{BIAS}"].tolist() == moved(before[f"{LAYER}.{BIAS}"], counts)


@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("counted", [False, True])
def test_a_step_moves_biases_by_each_token_once(counted, checkpointing):
    check_step(2, counted, activation_checkpointing=checkpointing)


@on_ranks(2)
def test_the_tokens_of_all_ranks_count(world):
    for layout in ({"expert": 2}, {"data": 2}, {"tensor": 2}, {"pipeline": 2}, {"context": 2}):
        check_step(2 if "data" in layout else 1, parallel=layout, activation_checkpointing="full")


def test_a_skipped_step_and_one_without_a_rate_move_nothing(tmp_path):
    first, second = batch(16).split(8)
    precision = {"mode": "16-mixed", "init_scale": 2.0**4}
    with paramp.launch_from_torch({"precision": precision}):
        engine = engine_of(biased(), None)
        before = engine.full_state_dict()[f"{LAYER}.{BIAS}"]
        engine.forward_backward(inputs(first))
        next(engine.parameters()).grad[0] = torch.inf
        assert engine.step().overflow
        assert torch.equal(engine.full_state_dict()[f"{LAYER}.{BIAS}"], before)
        state = engine.full_state_dict()
        engine.forward_backward(inputs(second))
        assert engine.step().stepped
        bias = engine.full_state_dict()[f"{LAYER}.{BIAS}"]
        assert not torch.equal(bias, before)
        assert bias.tolist() == moved(before, counts_of(state, second))
        save(engine, tmp_path / "saved")
        again = engine_of(biased(0.0), None)
        assert torch.equal(again.full_state_dict()[f"{LAYER}.{BIAS}"], before)
        again.load(tmp_path / "saved")
        again.forward_backward(inputs(first))
        again.step()
        assert torch.equal(again.full_state_dict()[f"{LAYER}.{BIAS}"], bias)
    model = biased()
    for rate in (RATE, 0.0, 2 * RATE):  # of engines one after the other
        model.config.bias_rate = rate
        with paramp.launch_from_torch():
            engine = engine_of(model, None, functools.partial(torch.optim.SGD, lr=0.0))
            before = engine.full_state_dict()[f"{LAYER}.{BIAS}"]
            engine.forward_backward(inputs(first))
            engine.step()
            assert (engine.full_state_dict()[f"{LAYER}.{BIAS}"] - before).abs().max() == rate


# ------------------------------------------------------------------------------------------------------------ padding


PADDING = 63
"""A token: one expert gets more tokens than the mean if the padding counts, and fewer if it does not."""


def nearly_even():
    """A model in which tokens, not biases, choose the experts."""
    model = biased()
    model.get_submodule(LAYER).e_score_correction_bias.mul_(2.0**-3)
    return model


def padded(length=12, padding=PADDING):
    """A batch that is padded on the right, and its sequences without the padding."""
    lengths = torch.tensor([length, 7, 4, 9, 5, 3, length - 1, 6])
    mask = torch.arange(length) < lengths[:, None]
    tokens = batch(8, length).where(mask, padding)
    labels = tokens.masked_fill(~mask, -100)
    sequences = [row[None, :size] for row, size in zip(tokens, lengths, strict=True)]
    return {"input_ids": tokens, "attention_mask": mask.long(), "labels": labels}, sequences


def in_a_loop(engine, inputs):
    """The mask is given by its place."""
    engine.backward(engine(inputs["input_ids"], inputs["attention_mask"], labels=inputs["labels"]).loss)


def by_queries(engine, inputs):
    """The mask has those of all queries."""
    tokens, mask = inputs["input_ids"], inputs["attention_mask"].bool()
    causal = torch.ones(2 * tokens.shape[1:], dtype=torch.bool).tril()
    engine.forward_backward(inputs | {"attention_mask": causal & mask[:, None, None]})


def check_padded(num_calls=1, give=paramp.Engine.forward_backward, counted=False, length=12, **config):
    """One step moves the bias by the tokens without padding; by all of them, one would move the other way."""
    whole, sequences = padded(length)
    with paramp.launch_from_torch({"gradient_accumulation": num_calls, **config}) as context:
        engine = engine_of(nearly_even(), None, functools.partial(torch.optim.SGD, lr=0.0))
        before = engine.full_state_dict()
        parts = [part.chunk(num_calls) for part in own_part(context, *whole.values())]
        of_step = [dict(zip(whole, part, strict=True)) for part in zip(*parts, strict=True)]
        if counted:
            engine.count_tokens(of_step)
        for part in of_step:
            give(engine, part)
            totals = [one.total.tolist() for one in token_counts(engine.module)]
            engine.step()
        after = engine.full_state_dict()
    counts = sum(counts_of(before, one) for one in sequences)
    with_padding = counts_of(before, whole["input_ids"], attention_mask=whole["attention_mask"])
    missing, otherwise = (one.double().mean() - one for one in (counts, with_padding))
    assert counts.sum() == whole["attention_mask"].sum() * 2
    assert totals in ([], [counts.tolist()])  # none on the first stage
    assert missing[0] > 0 > otherwise[0]
    assert after[f"{LAYER}.{BIAS}"].tolist() == moved(before[f"{LAYER}.{BIAS}"], counts)


@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("counted", [False, True])
def test_padding_moves_no_bias(counted, checkpointing):
    check_padded(2, counted=counted, activation_checkpointing=checkpointing)


@pytest.mark.parametrize("give", [in_a_loop, by_queries])
def test_padding_moves_no_bias_where_the_mask_is_given_otherwise(give):
    check_padded(give=give)


@on_ranks(2)
def test_padding_of_another_rank_moves_no_bias(world):
    for layout in ({"expert": 2}, {"data": 2}, {"tensor": 2}, {"pipeline": 2}):
        check_padded(2 if "data" in layout else 1, parallel=layout, activation_checkpointing="full")


@on_ranks(2)
def test_what_the_context_axis_adds_to_sequences_moves_no_bias(world):
    """Ten tokens become twelve; with a mask of padding and without one."""
    check_padded(length=10, parallel={"context": 2})
    check_step(length=10, parallel={"context": 2})


@on_ranks(2)
def test_padding_moves_no_bias_in_slices_of_sequences(world):
    for layout in ({"data": 2}, {"context": 2}):
        check_padded(parallel=layout, reproducible={"sequence_slices": 4})


@on_ranks(2)
def test_padding_moves_no_bias_in_stages_that_run_the_whole_forward(world):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HuggingFaceAdapter, "_is_chain", False)
        check_padded(parallel={"pipeline": 2})


def with_adapters(rate):
    """Of attention and of the router."""
    peft, model = pytest.importorskip("peft"), nearly_even()
    model.config.bias_rate = rate
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft uses what transformers deprecates
        options = peft.LoraConfig(r=4, target_modules=["o_proj"], target_parameters=["mlp.gate.weight"])
        model = peft.get_peft_model(model, options)
    torch.manual_seed(2)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:  # one half is zero at the start
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def trained_alone(whole, sequences, lr):
    """By a plain loop whose bias is moved by hand: after each of two steps the bias, and the adapters."""
    model, chosen = with_adapters(0.0), []
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr)
    router = next(one for one in model.modules() if BIAS in one._buffers)
    router.register_forward_hook(
        lambda _, args, output: chosen.append(torch.bincount(output[2].flatten(), minlength=4))
    )
    bias = router.get_buffer(BIAS)
    for _ in range(2):
        for one in sequences:
            model(input_ids=one)
        optimizer.zero_grad()
        model(**whole).loss.backward()
        optimizer.step()
        *counts, with_padding = chosen
        chosen.clear()
        assert moved(bias, sum(counts)) != moved(bias, with_padding)
        bias.copy_(torch.tensor(moved(bias, sum(counts))))
        trained = {name: one.detach().clone() for name, one in model.named_parameters() if one.requires_grad}
        yield bias.tolist(), trained


@on_ranks(2)
def test_padding_moves_no_bias_beside_adapters_which_train_as_in_one_process(world):
    """Experts of the second step are chosen by the bias and by the router that the first has moved."""
    (whole, sequences), lr = padded(padding=60), 0.5
    expected = [*trained_alone(whole, sequences, lr)]
    for parallel in ({"expert": 2}, {"data": {"shard": 2}, "expert": 2}):
        with paramp.launch_from_torch({"parallel": parallel}) as context:
            engine = engine_of(with_adapters(RATE), None, functools.partial(torch.optim.SGD, lr=lr))
            part = dict(zip(whole, own_part(context, *whole.values()), strict=True))
            for bias, trained in expected:
                engine.forward_backward(part)
                assert engine.step().stepped
                state = engine.full_state_dict()
                assert [value.tolist() for name, value in state.items() if name.endswith(BIAS)] == [bias]
                for name, value in trained.items():
                    torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-6, msg=name)


def test_a_mask_that_does_not_say_which_tokens_are_padding_is_an_error():
    added = {"attention_mask": torch.zeros(8, 1, 12, 12)}
    with paramp.launch_from_torch():
        engine = engine_of(nearly_even(), None)
        with pytest.raises(paramp.ConfigError, match=r"got torch.float32 \(8, 1, 12, 12\) for 96 tokens, expected"):
            engine.forward_backward(padded()[0] | added)
    with pytest.raises(paramp.ConfigError, match=r"got torch.bool \(4, 12\) for 96 tokens, expected"):
        shown(torch.ones(4, 12, dtype=torch.bool), torch.zeros(96, 2))


# ------------------------------------------------------------------------------------------------------- other models


SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}
SIZES |= {"num_key_value_heads": 4, "num_experts_per_tok": 2, "pad_token_id": 0, "moe_intermediate_size": 16}
DEEP = {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
OTHERS = {
    "Glm4MoeForCausalLM": ("glm4_moe", DEEP, LAYER),
    "Dots1ForCausalLM": ("dots1", DEEP, LAYER),
    "MiniMaxM2ForCausalLM": ("minimax_m2", {"num_local_experts": 4}, "model.layers.1.mlp"),
}


def other(kind, **options):
    """A model of another class, from the same random numbers on every call."""
    torch.manual_seed(5)
    folder, sizes, _ = OTHERS.get(kind, ("ernie4_5_moe", {}, ""))
    found = getattr(importlib.import_module(f"transformers.models.{folder}"), kind)
    return found(found.config_class(intermediate_size=32, **(SIZES | sizes | options))).train()


@pytest.mark.parametrize(("kind", "choices"), [*((kind, 2) for kind in OTHERS), ("Dots1ForCausalLM", 1)])
def test_other_models_with_such_a_bias_move_it_too(kind, choices):
    """MiniMax-M2 has it beside its router, and in half-precision weights it is not rounded; also one expert a token."""
    tokens, owner = batch(8), OTHERS[kind][2]
    with paramp.launch_from_torch({"precision": "bf16-naive"}):
        model = other(kind, bias_rate=RATE, num_experts_per_tok=choices)
        model.get_submodule(owner).e_score_correction_bias.copy_(torch.tensor([0.001, 0.0, 1.001, 0.0]))
        engine = engine_of(model, None, functools.partial(torch.optim.SGD, lr=0.0))
        engine.forward_backward(inputs(tokens))
        counts = engine.module.get_submodule(owner).token_counts.total.clone()
        before, bias = (
            torch.tensor([0.001, 0.0, 1.001, 0.0]),
            engine.module.get_submodule(owner).e_score_correction_bias,
        )
        assert counts.sum() == tokens.numel() * choices
        assert counts[2] == tokens.numel()  # scores are below 1
        engine.step()
        assert bias.tolist() == (before + RATE * (counts.double().mean() - counts).sign().float()).tolist()


@pytest.mark.parametrize(
    ("kind", "rate", "words"),
    [
        ("Ernie4_5_MoeForCausalLM", RATE, "e_score_correction_bias as a parameter, expected a buffer"),
        ("Dots1ForCausalLM", -1.0, "got -1.0, expected a rate of 0 or more"),
        ("Mixtral", RATE, "expected none, because MixtralForCausalLM has no e_score_correction_bias"),
    ],
)
def test_a_rate_that_would_do_nothing_is_an_error(kind, rate, words):
    with paramp.launch_from_torch():
        model = build("Mixtral") if kind == "Mixtral" else other(kind)
        model.config.bias_rate = rate
        with pytest.raises(paramp.ConfigError, match=words):
            engine_of(model, None)
