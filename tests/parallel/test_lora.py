"""LoRA of peft, on models of transformers and on one's own, against a plain torch loop on the model itself."""

import copy
import functools
import itertools
import warnings

import mixtures
import pytest
import torch
from beside_plain import train_both
from families import number, rarely
from pool import on_ranks, run_on_ranks, shared_folder
from reference import batches
from small_engines import engine_of, own_part
from small_mlp import Block
from test_huggingface import build, loss_of
from torch import nn

import paramp
from paramp.parallel.huggingface.lora import extend_to_adapters
from paramp.parallel.model_families import adapter_for
from paramp.parallel.tensor.sharding_plan import resolve_plan

pytest.importorskip("peft")
pytest.importorskip("transformers")

LAYOUTS = {
    "tp2": {"tensor": 2},
    "pp2": {"pipeline": {"size": 2, "microbatches": 2}},
    "pp2-tp2": {"pipeline": {"size": 2, "microbatches": 2}, "tensor": 2},
    "fsdp2": {"data": {"shard": 2}},
    "tp2-sequence": {"tensor": 2},
}
# Colwise and rowwise layers, and layers that are trained whole.
TARGETS = {
    "llama": {"target_modules": ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"], "modules_to_save": ["lm_head"]},
    "gpt2": {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True},  # fused, and of Conv1D
    "llama-embedding": {"target_modules": ["embed_tokens", "k_proj", "gate_proj"]},
    "llama-added": {"target_modules": ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]},  # by transformers
    "own": {"target_modules": ["up", "down"]},
}
OWN_PLAN = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}
SEQUENCE_PLAN = {"embedding": "scatter_sequence", "head": "gather_sequence"}
SEQUENCE_PLAN |= {"layers.*.up": "sequence_colwise", "layers.*.down": "sequence_rowwise"}


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(120, 8), nn.Linear(8, 120)
        self.layers = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x):
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def own_loss(output, targets):
    return nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten())


def base(name):
    torch.manual_seed(1)
    return Own() if name == "own" else build(name.removesuffix("-embedding").removesuffix("-added"))


def adapted(name, **changes):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft uses what transformers deprecates
        import peft

        torch.manual_seed(2)
        model, config = base(name), peft.LoraConfig(r=4, lora_alpha=8, **{**TARGETS[name], **changes})
        if name == "llama-added":
            model.add_adapter(config)
        else:
            model = peft.get_peft_model(model, config)
    with torch.no_grad():  # zero at the start, which hides mistakes in the gradient of the other half
        for key, parameter in model.named_parameters():
            if "lora" in key:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.train()


adamw = functools.partial(torch.optim.AdamW, lr=1e-2, eps=1e-4)


def loss_for(name):
    return own_loss if name == "own" else loss_of


def initialize(name, model, layout=None):
    plan = OWN_PLAN if name == "own" and paramp.get_context().tp.size > 1 else None
    plan = SEQUENCE_PLAN if layout == "tp2-sequence" else plan
    return engine_of(model, loss_for(name), adamw, plan=plan)


def follows(world, name, layout):
    """The engine's model has the weights of the plain one, of which the base is as before."""
    plain = adapted(name)
    start = {key: value.clone() for key, value in plain.state_dict().items()}
    with paramp.launch_from_torch({"parallel": LAYOUTS[layout]}) as context:
        engine = initialize(name, adapted(name), layout)
        train_both(context, engine, plain, batches(number(3, 5)), loss_for(name), adamw, atol=2e-5)
        trained = {key for key, parameter in plain.named_parameters() if parameter.requires_grad}
        for key, value in engine.full_state_dict().items():
            assert torch.equal(value, start[key]) == (key not in trained), key


CELLS = [*itertools.product(TARGETS, ("tp2", "pp2", "fsdp2")), ("llama", "pp2-tp2"), ("own", "pp2-tp2")]
CELLS += [("own", "tp2-sequence")]
PART = [
    ("llama-embedding", "tp2"),
    ("own", "tp2"),
    ("own", "tp2-sequence"),
    ("gpt2", "tp2"),
    ("llama-added", "pp2"),
    ("llama", "fsdp2"),
]


@pytest.mark.parametrize(("name", "layout"), rarely(CELLS, *PART))
def test_fp32_follows_plain_torch(name, layout):
    run_on_ranks(4 if layout == "pp2-tp2" else 2, __name__, "follows", {"name": name, "layout": layout})


SAVED = [("llama", "tp2"), ("llama-added", "pp2"), ("llama-added", "tp2"), ("llama", "fsdp2")]


@pytest.mark.parametrize(("name", "layout"), rarely(SAVED, SAVED[1], SAVED[3]))
@on_ranks(2)
def test_adapters_are_saved_alone_as_peft_and_transformers_read_them(world, name, layout):
    import peft

    folder = shared_folder()
    x, y = next(batches(1))
    with paramp.launch_from_torch({"parallel": LAYOUTS[layout]}):
        given = adapted(name)
        engine = initialize(name, given)
        engine.forward_backward(x, y)
        engine.step()
        engine.save_pretrained(folder)
        for inner in (engine.module.model, engine.module.base_model):
            with pytest.raises(RuntimeError, match="this rank has a part of the model only"):
                inner.save_pretrained(folder)
        for use in (given.model.save_pretrained, given.model) if layout == "pp2" else ():
            with pytest.raises(RuntimeError, match=r"another stage trains 'model\.layers"):
                use(folder)
        assert not list(folder.glob("model*"))
        engine.eval()
        expected = engine(x).logits
        loaded = base(name).eval()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if name == "llama-added":
                loaded.load_adapter(folder)
            else:
                loaded = peft.PeftModel.from_pretrained(loaded, str(folder)).eval()
        torch.testing.assert_close(loaded(x).logits, expected, atol=1e-5, rtol=1e-5)
        fill(engine, "input_layernorm.weight", 1e5)  # is not written
        engine.save_pretrained(folder, dtype=torch.float16)
        fill(engine, "lora_B.default.weight", 1e5)
        with pytest.raises(paramp.ConfigError, match=r"lora_B\.default\.weight has values up to 100000"):
            engine.save_pretrained(folder, dtype=torch.float16)


@torch.no_grad()
def fill(engine, ending, value):
    for name, parameter in engine.named_parameters():
        if name.endswith(ending):
            parameter.fill_(value)


def mixture_with_adapters(target):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft uses what transformers deprecates
        import peft

        config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], target_parameters=[target])
        model = peft.get_peft_model(mixtures.build("Mixtral", num_experts=4), config)
    torch.manual_seed(2)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            nn.init.normal_(parameter, std=0.1)
    return model


@on_ranks(2)
def test_adapters_beside_experts_over_ranks_are_those_of_one_process_and_of_experts_are_refused(world):
    tokens, plain = mixtures.batch(8), mixture_with_adapters("mlp.gate.weight")
    plain(input_ids=tokens, labels=tokens).loss.backward()
    trained = {name: value for name, value in plain.named_parameters() if value.requires_grad}
    expected = {name: value.detach() - value.grad for name, value in trained.items()}
    assert any(".mlp.gate.lora_B" in name for name in expected)
    for parallel in ({"expert": 2}, {"data": {"shard": 2}, "expert": 2}):
        with paramp.launch_from_torch({"parallel": parallel}) as context:
            sgd = functools.partial(torch.optim.SGD, lr=1.0)
            engine = engine_of(mixture_with_adapters("mlp.gate.weight"), None, sgd)
            (own,) = own_part(context, tokens)
            engine.forward_backward({"input_ids": own, "labels": own})
            assert engine.step().stepped
            found = engine.full_state_dict()
            for name, value in expected.items():
                torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-7, msg=name)
            with pytest.raises(paramp.ConfigError, match=r"layers.0.mlp.experts' is a ParamWrapper .*lora_A"):
                engine_of(mixture_with_adapters("mlp.experts.gate_up_proj"), None, sgd)


def styles_of(model, plan):
    return extend_to_adapters(model, resolve_plan(plan, [key for key, _ in model.named_modules()]))


def test_what_cannot_be_sharded_or_filled_is_an_error():
    with pytest.raises(paramp.ConfigError, match=r"up' is a peft.*Linear with DoraLinearVariant.*use_dora"):
        styles_of(adapted("own", use_dora=True), {"base_model.model.layers.*.up": "colwise"})
    with pytest.raises(paramp.ConfigError, match=r"layers\.0\.up\.lora_A\.default\.weight' is on the meta device"):
        adapter_for(adapted("own").to("meta")).initial_values()
    model = adapted("own")
    model.forward = print
    with pytest.raises(paramp.ConfigError, match="'PeftModel' has a forward that was set on the object"):
        adapter_for(model).single_stage()


def test_a_deep_copy_computes_with_its_own_weights():
    """As a frozen reference of the policy does."""
    model, x = adapted("llama").eval(), torch.arange(8).reshape(2, 4)
    wrapped = adapter_for(model).single_stage()
    copied, expected = copy.deepcopy(wrapped), wrapped(x).logits
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    assert torch.equal(copied(x).logits, expected)
    assert torch.equal(wrapped(x).logits, model(x).logits)


def test_entries_of_slices_of_the_sequence():
    """Each rank applies one half to its slice, so that half's gradient is partial."""
    model = adapted("own", lora_dropout=0.1)
    layer = "base_model.model.layers.0."
    styles = styles_of(model, {f"{layer}up": "sequence_colwise", f"{layer}down": "sequence_rowwise"})
    assert {name.removeprefix(layer): type(style).__name__ for name, style in styles.items()} == {
        "up.base_layer": "Colwise",
        "up.lora_A.default": "PartialGradient",
        "up.lora_B.default": "Colwise",
        "up.lora_dropout.default": "ShardedRandom",
        "down.base_layer": "Rowwise",
        "down.lora_A.default": "Rowwise",
        "down.lora_B.default": "PartialGradient",
        "down.lora_dropout.default": "ShardedRandom",
    }
