"""LoRA of peft, on models of transformers and on one's own, against a plain torch loop on the model itself."""

import functools
import warnings

import pytest
import torch
from families import cases, family, long
from pool import on_ranks, run_on_ranks
from reference import assert_follows, batches, train_mode
from test_huggingface import build, loss_of
from torch import nn

import paramp

pytest.importorskip("peft")
pytest.importorskip("transformers")

LAYOUTS = {
    "tp2": {"tensor": 2},
    "pp2": {"pipeline": {"size": 2, "microbatches": 2}},
    "pp2-tp2": {"pipeline": {"size": 2, "microbatches": 2}, "tensor": 2},
    "fsdp2": {"data": {"shard": 2}},
}
# Colwise and rowwise layers, and layers that are trained whole.
TARGETS = {
    "llama": {"target_modules": ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"], "modules_to_save": ["lm_head"]},
    "gpt2": {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True},  # fused, and of Conv1D
    "llama-embedding": {"target_modules": ["embed_tokens", "k_proj", "gate_proj"]},
    "own": {"target_modules": ["up", "down"]},
}
OWN_PLAN = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(120, 8)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(8, 120)

    def forward(self, x):
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def own_loss(output, targets):
    return nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten())


def base(name):
    torch.manual_seed(1)
    return Own() if name == "own" else build(name)


def adapted(name, **changes):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft uses what transformers deprecates
        import peft

        torch.manual_seed(2)
        model = peft.get_peft_model(base(name), peft.LoraConfig(r=4, lora_alpha=8, **{**TARGETS[name], **changes}))
    with torch.no_grad():  # zero at the start, which hides mistakes in the gradient of the other half
        for key, parameter in model.named_parameters():
            if "lora" in key:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.train()


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-4)


def initialize(name, model):
    is_split = name == "own" and paramp.get_context().tp.size > 1
    loss = own_loss if name == "own" else loss_of
    return paramp.initialize(model, adamw, loss, **({"plan": OWN_PLAN} if is_split else {}))[0]


def follows(name, layout):
    """Five steps; the engine's model has the weights of the plain one, of which the base is as before."""
    plain = adapted(name)
    optimizer, loss = adamw(plain.parameters()), own_loss if name == "own" else loss_of
    start = {key: value.clone() for key, value in plain.state_dict().items()}
    for x, y in batches(5):
        optimizer.zero_grad()
        loss(plain(x), y).backward()
        optimizer.step()
    with paramp.launch_from_torch({"parallel": LAYOUTS[layout]}) as context:
        engine = initialize(name, adapted(name))
        for batch in batches(5):
            engine.forward_backward(*(one.chunk(context.dp.size)[context.dp.rank] for one in batch))
            assert engine.step().stepped
            engine.zero_grad()
        actual = engine.full_state_dict()
    trained = {key for key, parameter in plain.named_parameters() if parameter.requires_grad}
    assert actual.keys() == start.keys()
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(actual[key], value, atol=2e-5, rtol=0, msg=lambda text, key=key: f"{key}: {text}")
        assert torch.equal(actual[key], start[key]) == (key not in trained), key


@family
@pytest.mark.parametrize("layout", ["tp2", "pp2", "fsdp2", pytest.param("pp2-tp2", marks=long)])
def test_fp32_follows_plain_torch(layout):
    run_on_ranks(4 if layout == "pp2-tp2" else 2, __name__, "follow_plain_torch", {"layout": layout})


MORE = {"tp2": ["gpt2", "llama-embedding"], "pp2": ["gpt2"], "fsdp2": ["gpt2"], "pp2-tp2": []}


def follow_plain_torch(world, layout):
    for name in ("llama", "own", *MORE[layout]):
        follows(name, layout)


def train_half(parallel):
    """Losses, and how far the adapters have gone; the rest stays where it was."""
    build_model = functools.partial(adapted, "llama", modules_to_save=None)
    losses, ways = train_mode(build_model, loss_of, 5, "16-mixed", parallel)
    assert {key for key, way in ways.items() if way.any()} == {key for key in ways if "lora" in key}
    return losses, {key: way for key, way in ways.items() if "lora" in key}


@on_ranks(2)
def half(world, layout, expected):
    assert_follows(train_half(LAYOUTS[layout]), expected, "16-mixed")


@family
@pytest.mark.parametrize("layout", cases("lora in half precision", ["tp2", "pp2"], ["tp2"], 1))
def test_half_precision_follows_its_single_process_run(layout):
    run_on_ranks(2, __name__, "half", {"layout": layout, "expected": train_half({})})


@pytest.mark.parametrize("layout", ["tp2", "pp2", "fsdp2"])
@on_ranks(2)
def test_adapters_are_saved_as_peft_reads_them(world, layout, tmp_path):
    import peft

    x, y = next(batches(1))
    with paramp.launch_from_torch({"parallel": LAYOUTS[layout]}):
        engine = initialize("llama", adapted("llama"))
        engine.forward_backward(x, y)
        engine.step()
        engine.save_pretrained(tmp_path)
        engine.eval()
        expected = engine(x).logits
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded = peft.PeftModel.from_pretrained(base("llama"), str(tmp_path)).eval()
    torch.testing.assert_close(loaded(x).logits, expected, atol=1e-5, rtol=1e-5)


def styles_of(model, plan):
    from paramp.parallel.huggingface.lora import extend_to_adapters
    from paramp.parallel.tensor.plan import resolve_plan

    return extend_to_adapters(model, resolve_plan(plan, [key for key, _ in model.named_modules()]))


def test_what_cannot_be_sharded_is_an_error():
    with pytest.raises(paramp.ConfigError, match=r"up' is a peft.*Linear with DoraLinearVariant.*use_dora"):
        styles_of(adapted("own", use_dora=True), {"base_model.model.layers.*.up": "colwise"})


def test_adapters_without_values_are_an_error():
    from paramp.parallel.adapters import adapter_for

    model = adapted("own").to("meta")
    with pytest.raises(paramp.ConfigError, match=r"layers\.0\.up\.lora_A\.default\.weight' is on the meta device"):
        adapter_for(model).filler()


def test_entries_of_slices_of_the_sequence():
    """Each rank applies one half to its slice, so that half's gradient is partial."""
    model = adapted("own", lora_dropout=0.1)
    plan = {"base_model.model.layers.0.up": "sequence_colwise", "base_model.model.layers.0.down": "sequence_rowwise"}
    found = {
        name.removeprefix("base_model.model.layers.0."): type(style).__name__
        for name, style in styles_of(model, plan).items()
    }
    assert found == {
        "up.base_layer": "Colwise",
        "up.lora_A.default": "PartialGradient",
        "up.lora_B.default": "Colwise",
        "up.lora_dropout.default": "ShardedRandom",
        "down.base_layer": "Rowwise",
        "down.lora_A.default": "Rowwise",
        "down.lora_B.default": "PartialGradient",
        "down.lora_dropout.default": "ShardedRandom",
    }
