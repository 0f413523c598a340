"""Hugging Face models, by their own plans, against a plain torch loop on the model itself."""

import copy
import functools
import random
from types import MethodType

import pytest
import torch
from beside_plain import adamw, assert_weights
from families import cases, family, number
from pool import on_ranks
from reference import batches, local
from small_engines import engine_of, own_part
from torch.nn import functional as F

import paramp
from paramp.config.layout import PipelineConfig
from paramp.parallel.model_families import adapter_for

pytest.importorskip("transformers")

import pretrained
import transformers
from transformers.loss.loss_utils import ForCausalLMLoss

from paramp.parallel.huggingface.decoder_partition import PretrainedPartition
from paramp.parallel.huggingface.encoder_decoder_partition import CalledUnitsPartition
from paramp.parallel.huggingface.model_output import label_count, without_cache
from paramp.parallel.huggingface.pretrained_plan import pretrained_plan
from paramp.parallel.huggingface.pretrained_weights import pretrained_filler
from paramp.parallel.materialize import InitialValues, materialize
from paramp.parallel.partition import plan_stages
from paramp.parallel.tensor.sharding_plan import check_divisible, resolve_plan

MODELS = {
    # Odd vocabularies do not divide over two ranks.
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "gpt2": ("GPT-2", {"vocab_size": 121}),
    "gpt2-untied": ("GPT-2", {"tie_word_embeddings": False}),
    # Its norms of queries and keys are whole on each rank, and see that rank's heads.
    "qwen3": ("Qwen3", {}),
}
LAYOUTS = {
    "pp2-tp2": {"pipeline": {"size": 2, "microbatches": 2}, "tensor": 2},
    "dp2-tp2": {"tensor": 2, "data": 2},
    "pp4": {"pipeline": {"size": 4, "microbatches": 4}},
    "zbv-tp2": {"pipeline": {"size": 2, "schedule": "zbv", "microbatches": 4}, "tensor": 2},
    "interleaved-dp2": {"pipeline": {"size": 2, "schedule": "interleaved-1f1b", "microbatches": 2}, "data": 2},
}


def build(name, **changes):
    model, options = MODELS[name]
    return pretrained.build(model, **(options | changes))


def loss_of(output, targets):
    return F.cross_entropy(output.logits.flatten(0, 1), targets.flatten())


GPT2_DROPOUT = {"attn_pdrop": 0.5, "resid_pdrop": 0.5}
DROPOUTS = [
    ("llama", {"attention_dropout": 0.5, "num_key_value_heads": 4}),
    ("gpt2", GPT2_DROPOUT),
    ("gpt2", GPT2_DROPOUT | {"attn_implementation": "eager", "reorder_and_upcast_attn": True}),  # by its module
]


def drop_output(attention):
    """Add dropout behind the output layer, as in models with code of their own."""
    kind = type(attention)

    def forward(self, *args, **kwargs):
        output, weights = kind.forward(self, *args, **kwargs)
        return self.dropout(output), weights

    attention.__class__ = type("Dropping", (kind,), {"forward": forward})
    attention.dropout = torch.nn.Dropout(0.5)


@on_ranks(4)
def test_attention_dropout_differs_between_heads_of_ranks_and_the_rest_does_not(world):
    for name, changes in DROPOUTS:
        llama = name == "llama"
        with paramp.launch_from_torch({"parallel": {"tensor": 2, "data": 2}}) as context:
            torch.manual_seed(0)
            model = build(name, **changes)
            attention = model.model.layers[0].self_attn if llama else model.transformer.h[0].attn
            out = attention.o_proj if llama else attention.c_proj
            if llama:
                drop_output(attention)
            with torch.no_grad():  # equal heads: only dropout can make them differ
                for parameter in attention.parameters():
                    parameter.fill_(0.1)
            engine = engine_of(model, loss_of, adamw)
            seen = {}
            out.register_forward_hook(lambda _, inputs, __, seen=seen: seen.update(mixed=inputs[0]))
            attention.register_forward_hook(lambda _, __, output, seen=seen: seen.update(output=output[0]))
            engine.forward_backward(*next(batches(1)))
            for key, equal in (("mixed", False), ("output", True)):
                mine = local(seen[key].detach()).contiguous()
                both = [torch.empty_like(mine) for _ in range(2)]
                torch.distributed.all_gather(both, mine, group=context.tp.group)
                assert torch.equal(*both) == equal, (name, changes, key)


def changed(plan=None, **attributes):
    """A Llama with another plan, or with attributes of its first layer that the plan lacks."""
    model = build("llama")
    model._tp_plan = model._tp_plan if plan is None else plan
    for name, value in attributes.items():
        getattr(model.model.layers[0], name).extra = value
    return model


EXTRA_NORM = {"self_attn": torch.nn.LayerNorm(8)}
REFUSED_PLANS = {
    "heads": (
        lambda: build("llama", num_key_value_heads=1),
        "LlamaForCausalLM has num_key_value_heads 1; expected a divisor of 1",
    ),
    "odd heads": (lambda: build("gpt2", n_embd=30, n_head=3), "GPT2LMHeadModel has num_attention_heads 3"),
    "heads of a part": (
        lambda: pretrained.build("LLaVA", text={"num_key_value_heads": 1}),
        "LlavaForConditionalGeneration has num_key_value_heads 1; expected a divisor of 1",
    ),
    "inner": (lambda: build("gpt2", n_inner=33), r"h\.0\.mlp\.c_fc' has 33 outputs, expected a multiple of 1 parts x"),
    "style": (
        lambda: changed({"model.layers.*.mlp": "grouped_gemm"}),
        r"has for 'model\.layers\.\*\.mlp' the style 'grouped_gemm'.*pass plan=",
    ),
    "no plan": (lambda: changed({}), "has no tp_plan; pass plan="),
    # Each rank would apply them to its own heads or features, and no rank would sum their gradients.
    "norm of heads": (lambda: changed(**EXTRA_NORM), r"'model\.layers\.0\.self_attn\.extra\.weight'.*pass plan="),
    "scale of features": (
        lambda: changed(mlp=torch.nn.Parameter(torch.ones(1))),
        r"its parameter 'model\.layers\.0\.mlp\.extra'",
    ),
    "dropout by a function": (
        lambda: pretrained.build("Whisper", activation_dropout=0.5),
        r"'encoder\.layers\.0' has activation_dropout 0\.5, expected 0\.0.*set model\.config\.activation_dropout to",
    ),
}


@pytest.mark.parametrize("what", REFUSED_PLANS)
def test_plans_that_cannot_be_applied(what):
    build_model, message = REFUSED_PLANS[what]
    model = build_model()
    with pytest.raises(paramp.ConfigError, match=message):
        check_divisible(model, resolve_plan(pretrained_plan(model, 2, False), dict(model.named_modules())), 2)


@pytest.mark.parametrize("tied", [False, True])
def test_an_output_layer_is_whole_if_it_has_the_weight_of_a_whole_embedding(tied):
    plan = pretrained_plan(pretrained.build("GPT-NeoX", tie_word_embeddings=tied), 2, False)
    assert (plan.get("lm_head"), plan.get("gpt_neox.embed_in")) == (None if tied else "colwise_gather", None)


def test_the_dropout_between_the_layers_of_an_mlp_differs_between_ranks():
    sizes = {key: value for key, value in pretrained.DECODER.items() if "position" not in key} | {"head_dim": 8}
    config = transformers.T5GemmaConfig(encoder=sizes, decoder=sizes)
    plan = pretrained_plan(transformers.T5GemmaForConditionalGeneration(config), 2, False)
    for stack in ("encoder", "decoder"):
        assert plan[f"model.{stack}.layers.0.mlp.dropout"] == "sharded_random"
        assert f"model.{stack}.layers.0.dropout" not in plan


def with_forward(forward):
    return type("Other", (type(build("llama")),), {"forward": forward})(build("llama").config)


def with_extra():
    model = build("llama")
    model.model.extra = torch.nn.Linear(2, 2)
    return model


def without_pipeline_plan():
    model = pretrained.build("GPT-NeoX")
    model._pp_plan = {}
    return model


def doubled_embeddings(self, *args, inputs_embeds=None, **kwargs):
    embeds = None if inputs_embeds is None else 2 * inputs_embeds
    return super(type(self), self).forward(*args, inputs_embeds=embeds, **kwargs)


def dropped_embeddings(self, *args, inputs_embeds=None, **kwargs):
    embeds = None if inputs_embeds is None else F.dropout(inputs_embeds, random.random(), self.training)
    return super(type(self), self).forward(*args, inputs_embeds=embeds, **kwargs)


def norm_twice(self, *args, **kwargs):
    output = super(type(self), self).forward(*args, **kwargs)
    output.logits = self.model.norm(output.logits)
    return output


REFUSED_PARTITIONS = {
    "extra": (with_extra, r"parameters that are not in .*model\.extra\.weight, model\.extra\.bias"),
    "other embeddings": (lambda: with_forward(doubled_embeddings), r"does not just apply .* one after the other"),
    "dropout": (lambda: with_forward(dropped_embeddings).eval(), "in training mode it computes more, such as dropout"),
    "no plan": (without_pipeline_plan, "has no pipeline plan"),
    "twice": (lambda: with_forward(norm_twice), r"it calls model\.norm 2 times"),
    "on meta": (lambda: on_meta("llama"), r"'model\.embed_tokens\.weight' of LlamaForCausalLM is on the meta"),
}


@pytest.mark.parametrize("what", REFUSED_PARTITIONS)
def test_models_that_cannot_be_partitioned(what):
    build_model, message = REFUSED_PARTITIONS[what]
    model = build_model()
    modes, states = [module.training for module in model.modules()], (torch.get_rng_state().tolist(), random.getstate())
    with pytest.raises(paramp.ConfigError, match=message):
        PretrainedPartition(model)
    assert [module.training for module in model.modules()] == modes
    assert (torch.get_rng_state().tolist(), random.getstate()) == states


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_outputs_have_names_and_no_cache(name):
    x, model = torch.arange(8).reshape(2, 4), build(name)
    wrapped = without_cache(model)
    for options in ({}, {"return_dict": False}, {"attention_mask": torch.ones_like(x), "labels": None}):
        output = wrapped(x, **options)
        assert type(output) is type(model(x))
        assert torch.equal(output.logits, model(x).logits)
        assert output.past_key_values is None
    with pytest.raises(paramp.ConfigError, match=r"num_items_in_batch.*leave it out"):
        wrapped(input_ids=x, labels=x, num_items_in_batch=3)
    copied, expected = copy.deepcopy(wrapped), wrapped(x).logits
    with torch.no_grad():
        next(model.parameters()).zero_()
    assert torch.equal(copied(x).logits, expected), "it computes with its own weights"
    assert not torch.equal(wrapped(x).logits, expected)
    with pytest.raises(paramp.ConfigError, match=r"set on the object by paramp.*build the model anew"):
        without_cache(copied)
    model.config.return_dict = False
    for use in (without_cache, PretrainedPartition):
        with pytest.raises(paramp.ConfigError, match=r"(CausalLM|HeadModel) has return_dict=False"):
            use(model)


@pytest.mark.parametrize("num_stages", [1, 2])
def test_a_forward_that_was_set_on_the_object_is_refused(num_stages):
    """Stages, and the model without a cache, are copies that run the forward of the class."""
    model, pipeline = build("llama"), PipelineConfig(size=num_stages)
    model.forward = MethodType(type(model).forward, model)  # as peft sets it, for its signature
    adapter_for(model).stages(pipeline, {})
    model.forward = MethodType(norm_twice, model)
    with pytest.raises(paramp.ConfigError, match="'LlamaForCausalLM' has a forward that was set on the object"):
        adapter_for(model).stages(pipeline, {})


def padded(seed, types=0, size=8, length=7):
    """Rows of different lengths: tokens, the attention mask, and labels that ignore the padding and, in two, all.

    With ``types`` of tokens, if there are any.
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(2, 120, (size, length), generator=generator)
    mask = (torch.arange(length) < torch.randint(2, length + 1, (size, 1), generator=generator)).long()
    labels = torch.where(mask.bool(), x, -100)
    labels[-2:] = -100
    batch = {"input_ids": x * mask, "attention_mask": mask, "labels": labels}
    return batch | {"token_type_ids": x % types} if types else batch


def part_of(batch, context):
    return dict(zip(batch, own_part(context, *batch.values()), strict=True))


OWN_LOSS = [
    *((name, "pp2-tp2") for name in MODELS),
    *((name, layout) for name in ("llama", "gpt2") for layout in ("dp2-tp2", "pp4", "interleaved-dp2")),
    ("llama-tied", "zbv-tp2"),
]
PART = {("gpt2", "interleaved-dp2"), ("llama-tied", "zbv-tp2")}


@family
@pytest.mark.parametrize(("name", "layout"), cases("own loss", OWN_LOSS, PART, 1))
@on_ranks(4)
def test_the_models_own_loss_is_the_mean_over_all_tokens(world, name, layout):
    """Over microbatches, of which one has no label, accumulated batches and data ranks; GPT-2 with types of tokens."""
    model, types = build(name), 3 * name.startswith("gpt2")
    plain = adamw(model.parameters())
    with paramp.launch_from_torch({"parallel": LAYOUTS[layout], "gradient_accumulation": 2}) as context:
        engine = engine_of(build(name), None, adamw)
        for step in range(number(2, 3)):
            window = [padded(2 * step, types), padded(2 * step + 1, types)]
            plain.zero_grad()
            expected = model(**{key: torch.cat([batch[key] for batch in window]) for key in window[0]}).loss
            expected.backward()
            plain.step()
            for batch in window:
                loss = engine.forward_backward(part_of(batch, context))
                stepped = engine.step().stepped
            assert stepped
            assert loss.item() == pytest.approx(expected.item(), abs=1e-5)
        weights = engine.full_state_dict()
        assert_weights(weights, model.state_dict(), atol=2e-5)
        batch = padded(9, types)
        shown = model.eval()(**batch)
        assert engine.evaluate(batch).item() == pytest.approx(shown.loss.item(), abs=1e-5)
        model.load_state_dict(weights)  # of weights that may be 2e-5 off, logits are more
        shown = model(**batch)
        engine.eval()
        output = engine(batch)
        assert type(output) is type(shown)
        torch.testing.assert_close(output.logits, shown.logits.detach(), atol=2e-5, rtol=1e-5)


def choosing():
    """A model that chooses one of two texts; its loss is a mean over samples."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = transformers.BertConfig(vocab_size=128, hidden_dropout_prob=0, attention_probs_dropout_prob=0, **sizes)
    return transformers.BertForMultipleChoice(config)


TINY = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


def of_speech():
    """A model with the CTC loss, a mean over samples of what each label costs."""
    torch.manual_seed(0)
    convolutions = {"conv_dim": (16,), "conv_stride": (4,), "conv_kernel": (8,), "num_feat_extract_layers": 1}
    positions = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
    config = transformers.Wav2Vec2Config(vocab_size=128, ctc_loss_reduction="mean", **TINY, **convolutions, **positions)
    return transformers.Wav2Vec2ForCTC(config).eval()


def transducer(kind="TDT"):
    """TDT: its loss is such a mean unless the batch names another ``reduction``, its labels are padded with 2."""
    torch.manual_seed(0)
    encoder = {"num_mel_bins": 16, "subsampling_conv_channels": 8, "conv_kernel_size": 3, **TINY}
    sizes = {"vocab_size": 129, "blank_token_id": 128, "decoder_hidden_size": 16, "num_decoder_layers": 1}
    config = getattr(transformers, f"Parakeet{kind}Config")(encoder_config=encoder, **sizes)
    return getattr(transformers, f"ParakeetFor{kind}")(config).eval()


def heard(x, name, padding, *shape, **options):
    sound = torch.randn(4, *shape, generator=torch.Generator().manual_seed(2))
    return {name: sound, "labels": unequal(x, padding)["labels"]} | options


def transduced(x, **options):
    options |= {"attention_mask": torch.ones(4, 64).long(), "decoder_input_ids": F.pad(x, (1, 0), value=128)}
    return heard(x, "input_features", 2, 64, 16, **options)


def unshifted():
    """A decoder whose own loss is the mean over all labels, the first ones too."""
    torch.manual_seed(0)
    sizes = {"d_model": 32, "decoder_layers": 1, "decoder_ffn_dim": 64, "decoder_attention_heads": 4, "dropout": 0}
    return transformers.BartForCausalLM(transformers.BartConfig(vocab_size=128, **sizes))


def summed_loss(logits, labels, vocab_size, num_items_in_batch=None, **_):
    logits, labels = logits[:, :-1].reshape(-1, vocab_size), labels[:, 1:].flatten()
    if num_items_in_batch is None:
        return F.cross_entropy(logits, labels)
    return F.cross_entropy(logits, labels, reduction="sum") / num_items_in_batch


NO_COUNT = {"num_items_in_batch": None}


def calling(function):
    model = build("llama")
    model.loss_function = function
    return model


def unequal(x, left_out=-100):
    return {"input_ids": x, "labels": x.masked_fill(torch.arange(6) > 1 + x[:, :1] % 5, left_out)}


OWN_LOSSES = {
    "unshifted, none of one sample": (unshifted, lambda x: {"input_ids": x, "labels": x.where(x != x[:1], -100)}),
    "of one's own": (lambda: calling(summed_loss), unequal),
    "of one's own, a mean": (lambda: calling(lambda **kwargs: summed_loss(**{**kwargs, **NO_COUNT})), unequal),
    "of transformers, partial": (lambda: calling(functools.partial(ForCausalLMLoss, ignore_index=-100)), unequal),
    "of transformers, partial, without 3": (
        lambda: calling(functools.partial(ForCausalLMLoss, ignore_index=3)),
        lambda x: unequal(x, 3),
    ),
    "without 3": (lambda: build("llama"), lambda x: {**unequal(x, 3), "ignore_index": 3}),
    "of speech": (of_speech, lambda x: heard(x, "input_values", -100, 160)),
    "transducer": (transducer, transduced),
    "transducer, over labels": (transducer, functools.partial(transduced, reduction="mean_volume")),
    "choosing": (choosing, lambda x: {"input_ids": x.unflatten(1, (2, 3)), "labels": x[:, 0] % 2}),
    "unshifted": (unshifted, lambda x: {"input_ids": x, "labels": x.masked_fill(torch.arange(6) > x[:, :1] % 5, -100)}),
}


@pytest.mark.parametrize("kind", OWN_LOSSES)
def test_a_loss_that_shifts_no_labels_counts_the_first_ones(kind):
    """Of microbatches of one sample, which have different numbers of labels, or one each."""
    make, batch_of = OWN_LOSSES[kind]
    batch = batch_of(torch.randint(2, 120, (4, 6), generator=torch.Generator().manual_seed(1)))
    model = make()
    expected = model(**batch).loss
    expected.backward()
    norm = float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))
    with paramp.launch_from_torch({"parallel": {"pipeline": {"size": 1, "microbatches": 4}}}):
        engine = engine_of(make(), None, adamw)
        assert float(engine.forward_backward(batch)) == pytest.approx(float(expected.detach()), rel=1e-5)
        assert engine.step().grad_norm == pytest.approx(norm, rel=1e-4)


def test_blank_labels_of_a_transducer_do_not_count():
    """Of RNN-T, whose loss itself needs torchaudio."""
    count, labels = label_count(transducer("RNNT")), torch.tensor([[5, 2, 128], [7, 128, 128]])
    assert count((), {"labels": labels}) == 3
    assert count((), {"labels": labels, "reduction": "mean"}) is None


@pytest.mark.parametrize("through_criterion", [False, True])
@on_ranks(2)
def test_the_models_own_loss_is_that_mean_in_a_loop_of_calls_too(world, through_criterion):
    """The second data rank has fewer labels than the first. Without a criterion, in evaluation mode."""
    model = build("llama")
    batch = padded(4)
    batch["labels"][4:, 1:] = -100
    batch["labels"][4, 1:3] = 5
    expected = model(**batch).loss
    expected.backward()
    with paramp.launch_from_torch({"parallel": {"data": 2}}) as context:
        engine = engine_of(build("llama"), None, adamw).train(through_criterion)
        output = engine(part_of(batch, context))
        with torch.no_grad():
            engine(part_of(padded(5), context))
        assert isinstance(engine.criterion(output), tuple) == through_criterion  # else a mean, of which loops add up
        loss = engine.backward(engine.criterion(output) if through_criterion else output.loss)
        norm = engine.step().grad_norm
        assert loss.item() == pytest.approx(expected.item(), abs=1e-5)
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        assert norm == pytest.approx(torch.nn.utils.get_total_norm(gradients).item(), abs=1e-5)


@pytest.mark.parametrize("name", ["Llama", "T5"])
@on_ranks(2)
def test_values_of_all_units_are_an_error_in_a_pipeline(world, name):
    """The last stage would return its own, or zeros for others' after a batch without them; also by a configuration."""
    model, built, batch = pretrained.build(name), pretrained.build(name), next(pretrained.batches(name, 1))
    with paramp.launch_from_torch({"parallel": {"pipeline": {"size": 2, "microbatches": 2}}}):
        engine = engine_of(built, None, adamw).eval()
        shown = engine(**batch, output_hidden_states=False).logits
        torch.testing.assert_close(shown, model.eval()(**batch).logits.detach(), atol=1e-5, rtol=1e-5)
        for key in ("output_hidden_states", "output_attentions"):
            message = rf"inputs\['{key}'\]: got True, expected False in a pipeline"
            with pytest.raises(paramp.ConfigError, match=message):
                engine(**batch, **{key: True})
        built.get_decoder().config.output_hidden_states = True  # T5's has one of its own
        with pytest.raises(paramp.ConfigError, match=r"inputs\['output_hidden_states'\]: got True"):
            engine(**batch)


@pytest.mark.parametrize(("kind", "name"), [(PretrainedPartition, "Llama"), (CalledUnitsPartition, "T5")])
def test_a_second_positional_input_is_an_error_in_a_pipeline(kind, name):
    """It is the mask, which the later stages would be without."""
    partition, x = kind(pretrained.build(name)), next(batches(1))[0]
    first, _ = partition.stages(plan_stages(partition.units, 2))
    with pytest.raises(paramp.ConfigError, match=rf"got 2 positional inputs for {name}For.*pass a mapping"):
        first(x, torch.ones_like(x))


def test_layers_keep_their_places():
    """Qwen's layers look up their kind of attention by their index in the configuration."""
    kinds = ["full_attention", "sliding_attention"] * 2
    model = build("qwen3", sliding_window=3, use_sliding_window=True, layer_types=kinds)
    partition = PretrainedPartition(model)
    split = ["model.layers.1", "model.layers.2", "model.layers.3"]
    x, expected = next(batches(1))[0], model(next(batches(1))[0]).logits
    stages = partition.stages(plan_stages(partition.units, 4, split))
    for own in (stages, copy.deepcopy(stages)):  # copies have weights of their own
        torch.testing.assert_close(functools.reduce(lambda value, stage: stage(value), own, x).logits, expected)
        with torch.no_grad():
            model.lm_head.weight.zero_()


def on_meta(name):
    kind, config = type(build(name)), build(name).config
    with torch.device("meta"):
        return kind(config)


@on_ranks(2)
def test_a_model_on_meta_is_filled_shard_by_shard_by_its_own_init_weights(world):
    expected = on_meta("llama-tied")
    materialize(expected, 5, torch.device("cpu"), values=InitialValues(pretrained_filler(expected)))
    assert expected.model.layers[0].mlp.up_proj.weight.std().item() == pytest.approx(0.02, rel=0.1)
    built = build("llama-tied").model.rotary_emb
    assert torch.equal(expected.model.rotary_emb.inv_freq, built.inv_freq)
    with paramp.launch_from_torch({"parallel": {"tensor": 2}, "seed": 5}):
        engine = engine_of(on_meta("llama-tied"), loss_of, adamw)
        assert torch.equal(engine.module.model.rotary_emb.inv_freq, built.inv_freq)
        assert_weights(engine.full_state_dict(), expected.state_dict(), atol=0)
        with pytest.raises(
            paramp.ConfigError, match=r"h\.0\.attn\.c_proj\.weight' of GPT2LMHeadModel is on the meta .*and 't"
        ):
            engine_of(on_meta("gpt2"), loss_of, adamw)
