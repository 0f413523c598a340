"""Hugging Face models, by their own plans, against a plain torch loop on the model itself."""

import pytest
import torch
from pool import on_ranks
from reference import batches, rank_slice
from torch.nn import functional as F

import paramp

pytest.importorskip("transformers")

MODELS = {
    # Odd vocabularies do not divide over two ranks.
    "llama": {},
    "llama-tied": {"tie_word_embeddings": True},
    "gpt2": {"vocab_size": 121},
    "gpt2-untied": {"tie_word_embeddings": False},
}
LAYOUTS = {
    "pp2-tp2": {"pipeline": {"size": 2, "microbatches": 2}, "tensor": 2},
    "dp2-tp2": {"tensor": 2, "data": 2},
    "pp2-dp2": {"pipeline": {"size": 2, "microbatches": 4}, "data": 2},
    "pp4": {"pipeline": {"size": 4, "microbatches": 4}},
}


def build(name, **changes):
    """A small model with random weights. Importing from the submodules is much faster than from transformers."""
    options = {"vocab_size": 120, "bos_token_id": 0, "eos_token_id": 1, **MODELS.get(name, {}), **changes}
    torch.manual_seed(5)
    if name.startswith("llama"):
        from transformers.models.llama import LlamaConfig, LlamaForCausalLM

        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "max_position_embeddings": 32}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        model = LlamaForCausalLM(LlamaConfig(**sizes, **(heads | options)))
    else:
        from transformers.models.gpt2 import GPT2Config, GPT2LMHeadModel

        sizes = {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 32}
        dropout = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
        model = GPT2LMHeadModel(GPT2Config(**(sizes | dropout | options)))
    with torch.no_grad():  # small random weights hide mistakes, and so do norms and biases that do nothing
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.train()


def loss_of(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def plain_training(name, steps):
    model = build(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for x, y in batches(steps):
        optimizer.zero_grad()
        loss = loss_of(model(x).logits, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses, {key: value.detach().clone() for key, value in model.state_dict().items()}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MODELS)
@on_ranks(4)
def test_fp32_follows_plain_torch(world, name, layout):
    expected, weights = plain_training(name, 10)
    with paramp.launch_from_torch({"parallel": LAYOUTS[layout], "clip_grad_norm": 1.0}) as context:
        model = build(name)
        engine, *_ = paramp.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-3), loss_of)
        for (x, y), loss in zip(batches(10), expected, strict=True):
            x, y = (rank_slice(t, context.dp.rank, context.dp.size) for t in (x, y))
            assert engine.forward_backward(x, y).item() == pytest.approx(loss, abs=1e-5)
            assert engine.step().stepped
            engine.zero_grad()
        actual = engine.full_state_dict()
        assert actual.keys() == weights.keys()
        for key, value in weights.items():
            torch.testing.assert_close(
                actual[key], value, atol=2e-5, rtol=0, msg=lambda text, key=key: f"{key}: {text}"
            )
        engine.eval()
        model = build(name)
        model.load_state_dict(actual)
        x, _ = next(batches(1))
        torch.testing.assert_close(engine(x), model.eval()(x).logits.detach(), atol=1e-5, rtol=1e-5)
