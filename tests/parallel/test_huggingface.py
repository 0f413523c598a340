"""Hugging Face models, by their own plans, against a plain torch loop on the model itself."""

import functools

import pytest
import torch
from families import cases, family, long, number
from pool import on_ranks, run_on_ranks
from reference import assert_follows, assert_strays, batches, rank_slice, train_mode
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import paramp

pytest.importorskip("transformers")

MODELS = {
    # Odd vocabularies do not divide over two ranks.
    "llama": {},
    "llama-tied": {"tie_word_embeddings": True},
    "gpt2": {"vocab_size": 121},
    "gpt2-untied": {"tie_word_embeddings": False},
    # Its norms of queries and keys are whole on each rank, and see that rank's heads.
    "qwen3": {"head_dim": 8},
}
LAYOUTS = {
    "pp2-tp2": {"pipeline": {"size": 2, "microbatches": 2}, "tensor": 2},
    "dp2-tp2": {"tensor": 2, "data": 2},
    "pp2-dp2": {"pipeline": {"size": 2, "microbatches": 4}, "data": 2},
    "pp4": {"pipeline": {"size": 4, "microbatches": 4}},
    "zbv-tp2": {"pipeline": {"size": 2, "schedule": "zbv", "microbatches": 4}, "tensor": 2},
    "interleaved-dp2": {"pipeline": {"size": 2, "schedule": "interleaved-1f1b", "microbatches": 2}, "data": 2},
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
    elif name == "qwen3":
        from transformers.models.qwen3 import Qwen3Config, Qwen3ForCausalLM

        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "max_position_embeddings": 32}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        model = Qwen3ForCausalLM(Qwen3Config(**sizes, **(heads | options)))
    else:
        from transformers.models.gpt2 import GPT2Config, GPT2LMHeadModel

        sizes = {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 32}
        dropout = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
        model = GPT2LMHeadModel(GPT2Config(**(sizes | dropout | options)))
    with torch.no_grad():  # small random weights hide mistakes, and so do norms and biases that do nothing
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.train()


def loss_of(output, targets):
    return F.cross_entropy(output.logits.flatten(0, 1), targets.flatten())


def adamw(parameters):
    # The gradient of a key's bias is zero but for rounding, which Adam would blow up with its own eps of 1e-8.
    return torch.optim.AdamW(parameters, lr=1e-3, eps=1e-5)


def plain_training(name, steps):
    model = build(name)
    optimizer = adamw(model.parameters())
    losses = []
    for x, y in batches(steps):
        optimizer.zero_grad()
        loss = loss_of(model(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses, {key: value.detach().clone() for key, value in model.state_dict().items()}


FP32 = [
    *((name, "pp2-tp2") for name in MODELS),
    *((name, layout) for name in ("llama", "gpt2") for layout in ("dp2-tp2", "pp4")),
    ("llama", "pp2-dp2"),
    ("llama-tied", "zbv-tp2"),
    ("gpt2", "interleaved-dp2"),
]
STEPS = number(3, 5)
IN_OTHER_CASES = {("llama", "pp2-tp2"), ("llama-tied", "pp2-tp2"), ("gpt2", "dp2-tp2"), ("llama", "pp4")}


@family
@pytest.mark.parametrize(
    ("name", "layout"), cases("hugging face in fp32", FP32, [case for case in FP32 if case not in IN_OTHER_CASES], 1)
)
@on_ranks(4)
def test_fp32_follows_plain_torch(world, name, layout):
    expected, weights = plain_training(name, STEPS)
    with paramp.launch_from_torch({"parallel": LAYOUTS[layout], "clip_grad_norm": 1.0}) as context:
        model = build(name)
        engine, *_ = paramp.initialize(model, adamw, loss_of)
        for (x, y), loss in zip(batches(STEPS), expected, strict=True):
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
        torch.testing.assert_close(engine(x).logits, model.eval()(x).logits.detach(), atol=1e-5, rtol=1e-5)


def train_pretrained(name, precision, parallel, **options):
    return train_mode(functools.partial(build, name), loss_of, 5, precision, parallel, **options)


@on_ranks(4)
def follow(world, name, precision, expected):
    assert_follows(train_pretrained(name, precision, LAYOUTS["pp2-tp2"]), expected, precision)
    assert_strays(train_pretrained(name, precision, LAYOUTS["pp2-tp2"], halve_on_rank=3), expected, precision)


@pytest.mark.parametrize(
    ("name", "precision"), [("llama", "16-mixed"), pytest.param("gpt2", "16-naive", marks=[family, long])]
)
def test_half_precision_follows_its_single_process_run(name, precision):
    expected = train_pretrained(name, precision, {})
    run_on_ranks(4, __name__, "follow", {"name": name, "precision": precision, "expected": expected})


@on_ranks(4)
def test_an_overflow_on_one_rank_skips_everywhere(world):
    for name in ("llama-tied", "gpt2"):
        config = {"parallel": LAYOUTS["pp2-tp2"], "precision": "16-mixed"}
        with paramp.launch_from_torch(config):
            model = build(name)
            engine, *_ = paramp.initialize(model, adamw, loss_of)
            x, y = next(batches(1))
            for rank in range(4):
                before = {key: value.clone() for key, value in engine.full_state_dict().items()}
                engine.forward_backward(x, y)
                if world.rank == rank:
                    gradient = list(engine.named_parameters())[-1][1].grad
                    local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
                    local.view(-1)[-1] = float("inf")
                result = engine.step()
                assert (result.stepped, result.overflow) == (False, True)
                assert all(torch.equal(value, before[key]) for key, value in engine.full_state_dict().items())
                engine.zero_grad()
            assert engine.num_skipped == 4


@on_ranks(4)
def test_attention_dropout_differs_between_heads_of_ranks_and_the_rest_does_not(world):
    import torch.distributed as dist

    for name in ("llama", "gpt2"):
        dropout = {"attention_dropout": 0.5} if name == "llama" else {"attn_pdrop": 0.5, "resid_pdrop": 0.5}
        with paramp.launch_from_torch({"parallel": {"tensor": 2, "data": 2}}) as context:
            torch.manual_seed(0)
            model = build(name, **dropout, num_key_value_heads=4) if name == "llama" else build(name, **dropout)
            attention = model.model.layers[0].self_attn if name == "llama" else model.transformer.h[0].attn
            out = attention.o_proj if name == "llama" else attention.c_proj
            value = attention.v_proj.weight if name == "llama" else attention.c_attn.weight
            with torch.no_grad():  # equal heads: only dropout can make them differ
                for parameter in attention.parameters():
                    parameter.copy_(torch.full_like(parameter, 0.1))
                value.fill_(0.1)
            engine, *_ = paramp.initialize(model, adamw, loss_of)
            seen = {}

            def record(_module, inputs, output, seen=seen, out=out):
                key, value = ("mixed", inputs) if _module is out else ("output", output)
                seen[key] = value[0].detach()

            out.register_forward_hook(record)
            attention.register_forward_hook(record)
            x, y = next(batches(1))
            engine.forward_backward(x, y)
            for key, equal in (("mixed", False), ("output", True)):
                own = seen[key].to_local() if isinstance(seen[key], DTensor) else seen[key]
                both = [torch.empty_like(own) for _ in range(2)]
                dist.all_gather(both, own.contiguous(), group=context.tp.group)
                assert torch.equal(*both) == equal, (name, key)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("llama", {"num_key_value_heads": 1}, "LlamaForCausalLM has num_key_value_heads 1; expected a divisor of 1"),
        ("gpt2", {"n_embd": 30, "n_head": 3}, "GPT2LMHeadModel has num_attention_heads 3"),
        ("gpt2", {"n_inner": 33}, r"h\.0\.mlp\.c_fc' has 33 outputs, expected a multiple of 1 parts x"),
    ],
)
def test_sizes_that_do_not_divide(name, changes, message):
    from paramp.parallel.huggingface.plan import pretrained_plan
    from paramp.parallel.tensor.plan import check_divisible, resolve_plan

    model = build(name, **changes)

    def check():
        plan = pretrained_plan(model, 2, False)
        check_divisible(model, resolve_plan(plan, [key for key, _ in model.named_modules()]), 2)

    with pytest.raises(paramp.ConfigError, match=message):
        check()


def test_plans_that_are_not_known():
    from paramp.parallel.huggingface.plan import pretrained_plan

    model = build("llama")
    model._tp_plan = {"model.layers.*.mlp": "grouped_gemm"}
    with pytest.raises(
        paramp.ConfigError, match=r"has for 'model\.layers\.\*\.mlp' the style 'grouped_gemm'.*pass plan="
    ):
        pretrained_plan(model, 2, False)
    model._tp_plan = {}
    with pytest.raises(paramp.ConfigError, match="has no tp_plan; pass plan="):
        pretrained_plan(model, 2, False)
    with pytest.raises(paramp.ConfigError, match="sequence_parallel"):
        pretrained_plan(model, 2, True)


def test_parameters_that_the_plan_lacks_among_sharded_layers():
    """Each rank would apply them to its own heads or features, and no rank would sum their gradients."""
    from paramp.parallel.huggingface.plan import pretrained_plan

    model = build("llama")
    for layer in model.model.layers:
        layer.self_attn.q_norm = torch.nn.LayerNorm(8)
    with pytest.raises(
        paramp.ConfigError, match=r"its parameter 'model\.layers\.0\.self_attn\.q_norm\.weight'.*pass plan="
    ):
        pretrained_plan(model, 2, False)
    model._tp_plan |= {"model.layers.*.self_attn.q_norm": "replicated_with_grad_allreduce"}
    assert pretrained_plan(model, 2, False)["model.layers.3.self_attn.q_norm"] == "partial_gradient"
    model.model.layers[0].mlp.alpha = torch.nn.Parameter(torch.ones(1))
    with pytest.raises(paramp.ConfigError, match=r"its parameter 'model\.layers\.0\.mlp\.alpha'"):
        pretrained_plan(model, 2, False)


def test_vocabularies_that_do_not_divide_are_replicated():
    from paramp.parallel.huggingface.plan import pretrained_plan

    even, odd = (pretrained_plan(build("gpt2", vocab_size=size), 2, False) for size in (120, 121))
    assert even.keys() - odd.keys() == {"transformer.wte", "lm_head"}


def test_models_that_cannot_be_partitioned():
    from paramp.parallel.huggingface.partition import PretrainedPartition

    model = build("llama")
    model.model.extra = torch.nn.Linear(2, 2)
    with pytest.raises(
        paramp.ConfigError, match=r"parameters that are not in .*model\.extra\.weight, model\.extra\.bias"
    ):
        PretrainedPartition(model)

    class Doubling(type(build("llama"))):
        def forward(self, *args, inputs_embeds=None, **kwargs):
            embeds = None if inputs_embeds is None else 2 * inputs_embeds
            return super().forward(*args, inputs_embeds=embeds, **kwargs)

    model = Doubling(build("llama").config)
    with pytest.raises(paramp.ConfigError, match=r"does not just apply .* one after the other"):
        PretrainedPartition(model)
    model = build("llama")
    model._pp_plan = {}
    with pytest.raises(paramp.ConfigError, match="has no pipeline plan"):
        PretrainedPartition(model)


def test_outputs_have_names_and_no_cache():
    from paramp.parallel.huggingface.output import without_cache
    from paramp.parallel.huggingface.partition import PretrainedPartition

    x = torch.arange(8).reshape(2, 4)
    for name in ("llama", "gpt2"):
        model = build(name)
        changed = without_cache(model)
        for options in ({}, {"return_dict": False}, {"attention_mask": torch.ones_like(x), "labels": None}):
            output = changed(x, **options)
            assert torch.equal(output.logits, model(x).logits)
            assert output.past_key_values is None
        with pytest.raises(paramp.ConfigError, match=r"num_items_in_batch.*leave it out"):
            changed(input_ids=x, labels=x, num_items_in_batch=3)
        model.config.return_dict = False
        for use in (without_cache, PretrainedPartition):
            with pytest.raises(paramp.ConfigError, match=r"(CausalLM|HeadModel) has return_dict=False"):
                use(model)


def padded(seed, size=8, length=7):
    """Rows of different lengths: tokens, the attention mask, and labels that ignore the padding and, in two, all."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(2, 120, (size, length), generator=generator)
    lengths = torch.randint(2, length + 1, (size, 1), generator=generator)
    mask = (torch.arange(length) < lengths).long()
    labels = torch.where(mask.bool(), x, -100)
    labels[-2:] = -100
    return {"input_ids": x * mask, "attention_mask": mask, "labels": labels}


OWN_LOSS = [(name, layout) for name in ("llama", "gpt2") for layout in ("pp2-tp2", "dp2-tp2", "pp4", "interleaved-dp2")]


@family
@pytest.mark.parametrize(
    ("name", "layout"), cases("own loss", OWN_LOSS, {("llama", "pp2-tp2"), ("gpt2", "interleaved-dp2")}, 1)
)
@on_ranks(4)
def test_the_models_own_loss_is_the_mean_over_all_tokens(world, name, layout):
    """Over microbatches, of which one has no label, accumulated batches and data ranks."""
    model = build(name)
    plain = adamw(model.parameters())
    with paramp.launch_from_torch({"parallel": LAYOUTS[layout], "gradient_accumulation": 2}) as context:
        engine, *_ = paramp.initialize(build(name), adamw)
        for step in range(3):
            window = [padded(2 * step), padded(2 * step + 1)]
            plain.zero_grad()
            whole = {key: torch.cat([batch[key] for batch in window]) for key in window[0]}
            expected = model(**whole).loss
            expected.backward()
            plain.step()
            for batch in window:
                own = {key: rank_slice(value, context.dp.rank, context.dp.size) for key, value in batch.items()}
                loss = engine.forward_backward(own)
                stepped = engine.step().stepped
            assert stepped
            assert loss.item() == pytest.approx(expected.item(), abs=1e-5)
        for key, value in engine.full_state_dict().items():
            torch.testing.assert_close(value, model.state_dict()[key], atol=2e-5, rtol=0)
        batch = padded(9)
        assert engine.evaluate(batch).item() == pytest.approx(model.eval()(**batch).loss.item(), abs=1e-5)


@on_ranks(2)
def test_values_of_all_units_are_an_error_in_a_pipeline(world):
    """The last stage would return its own, from which hidden_states[0] is not the embedding."""
    model = build("llama")
    batch = padded(4)
    batch.pop("labels")
    with paramp.launch_from_torch({"parallel": {"pipeline": {"size": 2, "microbatches": 2}}}):
        engine, *_ = paramp.initialize(build("llama"), adamw)
        engine.eval()
        for name in ("output_hidden_states", "output_attentions"):
            with pytest.raises(
                paramp.ConfigError, match=rf"inputs\['{name}'\]: got True, expected False in a pipeline"
            ):
                engine(**batch, **{name: True})
        shown = engine(**batch, output_hidden_states=False).logits
        torch.testing.assert_close(shown, model.eval()(**batch).logits.detach(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("through_criterion", [False, True])
@on_ranks(2)
def test_the_models_own_loss_is_that_mean_in_a_loop_of_calls_too(world, through_criterion):
    """The second data rank has fewer labels than the first."""
    model = build("llama")
    batch = padded(4)
    batch["labels"][4:, 1:] = -100
    batch["labels"][4, 1:3] = 5
    expected = model(**batch).loss
    expected.backward()
    with paramp.launch_from_torch({"parallel": {"data": 2}}) as context:
        engine, *_ = paramp.initialize(build("llama"), adamw)
        output = engine({key: rank_slice(value, context.dp.rank, 2) for key, value in batch.items()})
        loss = engine.backward(engine.criterion(output) if through_criterion else output.loss)
        norm = engine.step().grad_norm
        assert loss.item() == pytest.approx(expected.item(), abs=1e-5)
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        assert norm == pytest.approx(torch.nn.utils.get_total_norm(gradients).item(), abs=1e-5)


def test_units_are_in_the_order_of_their_calls():
    """Phi registers the dropout of its embeddings after its layers."""
    from paramp.parallel.huggingface.partition import PretrainedPartition
    from paramp.parallel.partition import plan_stages

    phi = pytest.importorskip("transformers.models.phi")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = phi.PhiForCausalLM(phi.PhiConfig(vocab_size=64, bos_token_id=0, eos_token_id=1, embd_pdrop=1.0, **sizes))
    partition = PretrainedPartition(model)
    names = ["embed_tokens", "embed_dropout", "layers.0", "layers.1", "final_layernorm"]
    assert [name for name, _ in partition.units] == [*(f"model.{name}" for name in names), "lm_head"]
    first, _ = partition.stages(plan_stages(partition.units, 2, ["model.layers.0"]))
    assert not first(torch.ones(1, 2, dtype=torch.long)).any()  # dropped out on the first stage

    llama = type(build("llama"))

    class Twice(llama):
        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            output.logits = self.model.norm(output.logits)
            return output

    with pytest.raises(paramp.ConfigError, match=r"it calls model\.norm 2 times"):
        PretrainedPartition(Twice(build("llama").config))
    with torch.device("meta"):
        model = llama(build("llama").config)
    with pytest.raises(paramp.ConfigError, match=r"'model\.embed_tokens\.weight' of LlamaForCausalLM is on the meta"):
        PretrainedPartition(model)


def test_layers_keep_their_places():
    """Qwen's layers look up their kind of attention by their index in the configuration."""
    from paramp.parallel.huggingface.partition import PretrainedPartition
    from paramp.parallel.partition import plan_stages

    qwen = pytest.importorskip("transformers.models.qwen3")
    torch.manual_seed(0)
    config = qwen.Qwen3Config(
        vocab_size=120,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=32,
        sliding_window=3,
        use_sliding_window=True,
        layer_types=["full_attention", "sliding_attention", "full_attention", "sliding_attention"],
    )
    model = qwen.Qwen3ForCausalLM(config)
    partition = PretrainedPartition(model)
    split = ["model.layers.1", "model.layers.2", "model.layers.3"]
    x = next(batches(1))[0]
    value = x
    for stage in partition.stages(plan_stages(partition.units, 4, split)):
        value = stage(value)
    torch.testing.assert_close(value.logits, model(x).logits)


def on_meta(name):
    kind, config = type(build(name)), build(name).config
    with torch.device("meta"):
        return kind(config)


@on_ranks(2)
def test_a_model_on_meta_is_filled_shard_by_shard_by_its_own_init_weights(world):
    from paramp.parallel.huggingface.initial_weights import pretrained_filler
    from paramp.parallel.materialize import materialize

    expected = on_meta("llama-tied")
    materialize(expected, 5, torch.device("cpu"), fill=pretrained_filler(expected))
    assert expected.model.layers[0].mlp.up_proj.weight.std().item() == pytest.approx(0.02, rel=0.1)
    built = build("llama-tied").model.rotary_emb
    assert torch.equal(expected.model.rotary_emb.inv_freq, built.inv_freq)
    with paramp.launch_from_torch({"parallel": {"tensor": 2}, "seed": 5}):
        engine, *_ = paramp.initialize(on_meta("llama-tied"), adamw, loss_of)
        actual = engine.full_state_dict()
        assert torch.equal(engine.module.model.rotary_emb.inv_freq, built.inv_freq)
        for key, value in expected.state_dict().items():
            assert torch.equal(actual[key], value), key
        with pytest.raises(
            paramp.ConfigError, match=r"h\.0\.attn\.c_proj\.weight' of GPT2LMHeadModel is on the meta .*and 't"
        ):
            paramp.initialize(on_meta("gpt2"), adamw, loss_of)
