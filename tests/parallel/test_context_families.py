"""Models of transformers whose sequences are cut over the context axis, against one process in fp64, or refused."""

import copy
import functools
import importlib
import inspect

import pytest
import torch
import torch.nn.functional as F
from cut_batches import cut_batches
from families import cases, family
from pages import read
from pool import on_ranks
from small_engines import engine_of
from torch import nn

import paramp

pytest.importorskip("transformers")

from pretrained import DECODER, TOKENS

STEPS, WINDOW, LR = 3, 7, 0.05
SIZES = {**DECODER, "vocab_size": 100, "num_hidden_layers": 2, "max_position_embeddings": 64}
HEADS = {**SIZES, "head_dim": 8}
WINDOWS = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
BOTH_WAYS = {**WINDOWS, "sliding_window": 12}  # 7, as Gemma3 counts
GPT2 = {"vocab_size": 100, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, **TOKENS}
GPT2 |= dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)
OPT = {"vocab_size": 100, "hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
OPT |= {"max_position_embeddings": 64, "word_embed_proj_dim": 32, "dropout": 0.0, **TOKENS}
MLA = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6}
MLA |= {"num_key_value_heads": 4}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
ROUTED = {**EXPERTS, "n_routed_experts": 4, "first_k_dense_replace": 1, "n_shared_experts": 1, "n_group": 1}
ROUTED |= {"topk_group": 1}
T5GEMMA = {"encoder": {**HEADS, **WINDOWS}, "decoder": HEADS, "is_encoder_decoder": False, "num_labels": 100}
T5GEMMA |= {"classifier_dropout_rate": 0.0, "attention_dropout": 0.0, "dropout_rate": 0.0}
WHISPER = {"vocab_size": 100, "d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 64}
WHISPER |= {"max_target_positions": 64, **TOKENS}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

FAMILIES = {
    "AFMoE": ("afmoe", "AfmoeForCausalLM", {**HEADS, **EXPERTS, **WINDOWS, "num_experts": 4, "num_dense_layers": 1}),
    "Apertus": ("apertus", "ApertusForCausalLM", SIZES),
    "Arcee": ("arcee", "ArceeForCausalLM", HEADS),
    "BioGPT": ("biogpt", "BioGptForCausalLM", {**SIZES, **NO_DROPOUT}),
    "BitNet": ("bitnet", "BitNetForCausalLM", SIZES),
    "Cohere": ("cohere", "CohereForCausalLM", SIZES),
    "Cohere2": ("cohere2", "Cohere2ForCausalLM", {**HEADS, **WINDOWS}),
    "DeepSeek-V2": ("deepseek_v2", "DeepseekV2ForCausalLM", {**SIZES, **MLA, **ROUTED}),
    "DeepSeek-V3": ("deepseek_v3", "DeepseekV3ForCausalLM", {**SIZES, **MLA, **ROUTED, "n_group": 2}),
    "DiffLlama": ("diffllama", "DiffLlamaForCausalLM", SIZES),
    "dots1": ("dots1", "Dots1ForCausalLM", {**HEADS, **ROUTED}),
    "ERNIE 4.5": ("ernie4_5", "Ernie4_5ForCausalLM", HEADS),
    "EXAONE 4": ("exaone4", "Exaone4ForCausalLM", {**HEADS, "sliding_window": WINDOW, "sliding_window_pattern": 2}),
    "FlexOlmo": ("flex_olmo", "FlexOlmoForCausalLM", {**SIZES, "num_experts": 4, "num_experts_per_tok": 2}),
    "Gemma": ("gemma", "GemmaForCausalLM", HEADS),
    "Gemma2": ("gemma2", "Gemma2ForCausalLM", {**HEADS, "sliding_window": WINDOW, "attn_logit_softcapping": 5.0}),
    "Gemma3": ("gemma3", "Gemma3ForCausalLM", {**HEADS, **WINDOWS}),
    "Gemma3 both ways": ("gemma3", "Gemma3ForCausalLM", {**HEADS, **BOTH_WAYS, "use_bidirectional_attention": True}),
    "GLM": ("glm", "GlmForCausalLM", HEADS),
    "GLM-4": ("glm4", "Glm4ForCausalLM", HEADS),
    "GLM-4 MoE": ("glm4_moe", "Glm4MoeForCausalLM", {**HEADS, **ROUTED}),
    "GPT-2": ("gpt2", "GPT2LMHeadModel", {**GPT2, "scale_attn_by_inverse_layer_idx": True}),
    "GPTBigCode": ("gpt_bigcode", "GPTBigCodeForCausalLM", GPT2),
    "GPT-NeoX": ("gpt_neox", "GPTNeoXForCausalLM", SIZES),
    "GPT-OSS": ("gpt_oss", "GptOssForCausalLM", {**HEADS, **EXPERTS, "num_local_experts": 4, "sliding_window": WINDOW}),
    "Granite": ("granite", "GraniteForCausalLM", {**SIZES, "attention_multiplier": 0.3}),
    "Granite MoE": ("granitemoe", "GraniteMoeForCausalLM", {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "Helium": ("helium", "HeliumForCausalLM", HEADS),
    "Hunyuan": ("hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM", HEADS),
    "Llama": ("llama", "LlamaForCausalLM", SIZES),
    "MiniCPM3": ("minicpm3", "MiniCPM3ForCausalLM", {**SIZES, **MLA}),
    "MiniMax-M2": ("minimax_m2", "MiniMaxM2ForCausalLM", {**HEADS, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "Ministral": ("ministral", "MinistralForCausalLM", {**HEADS, "sliding_window": WINDOW}),
    "Mistral": ("mistral", "MistralForCausalLM", {**SIZES, "sliding_window": WINDOW}),
    "Mixtral": ("mixtral", "MixtralForCausalLM", {**SIZES, "num_local_experts": 4}),
    "ModernBERT": ("modernbert", "ModernBertForMaskedLM", {**SIZES, "local_attention": 14}),
    "ModernBERT decoder": ("modernbert_decoder", "ModernBertDecoderForCausalLM", {**SIZES, "local_attention": 8}),
    "nanochat": ("nanochat", "NanoChatForCausalLM", SIZES),
    "Nemotron": ("nemotron", "NemotronForCausalLM", HEADS),
    "OLMo": ("olmo", "OlmoForCausalLM", SIZES),
    "OLMo 2": ("olmo2", "Olmo2ForCausalLM", SIZES),
    "OLMo 3": ("olmo3", "Olmo3ForCausalLM", {**SIZES, **WINDOWS}),
    "OLMoE": ("olmoe", "OlmoeForCausalLM", {**SIZES, "num_experts": 4, "num_experts_per_tok": 2}),
    "OPT": ("opt", "OPTForCausalLM", OPT),
    "Persimmon": ("persimmon", "PersimmonForCausalLM", {**SIZES, "num_key_value_heads": 4}),
    "Phi": ("phi", "PhiForCausalLM", SIZES),
    "Phi3": ("phi3", "Phi3ForCausalLM", {**SIZES, "original_max_position_embeddings": 64}),
    "Qwen2": ("qwen2", "Qwen2ForCausalLM", {**SIZES, "use_sliding_window": True, **WINDOWS}),
    "Qwen2 MoE": (
        *("qwen2_moe", "Qwen2MoeForCausalLM"),
        {**SIZES, **EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 32},
    ),
    "Qwen3": ("qwen3", "Qwen3ForCausalLM", HEADS),
    "Qwen3 MoE": ("qwen3_moe", "Qwen3MoeForCausalLM", {**HEADS, **EXPERTS, "num_experts": 4}),
    "Seed-OSS": (
        *("seed_oss", "SeedOssForCausalLM"),
        {**HEADS, "attention_dropout": 0.0, "residual_dropout": 0.0},
    ),
    "SmolLM3": ("smollm3", "SmolLM3ForCausalLM", {**SIZES, "no_rope_layers": [1, 0]}),
    "StableLM": ("stablelm", "StableLmForCausalLM", SIZES),
    "StarCoder2": ("starcoder2", "Starcoder2ForCausalLM", {**SIZES, "sliding_window": WINDOW}),
    "T5Gemma encoder": ("t5gemma", "T5GemmaForTokenClassification", T5GEMMA),
    "Whisper decoder": ("whisper", "WhisperForCausalLM", WHISPER),  # whose own loss shifts no labels
}
"""The module in transformers, the class, the options of its configuration; as in docs/models.md."""
KINDS = ("padded", "packed")
NOT_PACKED = frozenset({"AFMoE", "BioGPT", "GPT-OSS", "Granite MoE", "ModernBERT", "OPT", "T5Gemma encoder"})
"""Those that attend from one packed document to another, as transformers' masks of them do."""
RIGHT = frozenset({"Gemma2", "OPT"})
"""Those whose padding is on the right: what sees nothing is NaN in fp64, or positions are counted without it."""
EVERYTHING = [(name, kind) for name in FAMILIES for kind in KINDS if kind == "padded" or name not in NOT_PACKED]
PART = [("Gemma3", "packed"), ("Gemma3 both ways", "padded"), ("OPT", "padded"), ("Whisper decoder", "padded")]
NO_ATTENTION = {**HEADS, "layer_types": ["linear_attention", "full_attention"]}
NEXT = {**NO_ATTENTION, **EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 16}
NEXT |= {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
JAMBA = {**SIZES, "num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False}
CHUNKS = {**HEADS, "num_local_experts": 2, "layer_types": ["chunked_attention", "full_attention"]}
SMALL = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
LONG = {"rope_parameters": LONG, "original_max_position_embeddings": 32}
USED = {"use_sliding_window": True}
REFUSED_PART = ["Llama 4", "MiniMax", "Phi3, long", "PhiMoE"]
REFUSED = {
    "BLOOM": ("bloom", "BloomForCausalLM", {**SMALL, "n_head": 4}),
    "Jamba": ("jamba", "JambaForCausalLM", JAMBA),
    "LFM2": ("lfm2", "Lfm2ForCausalLM", {**SIZES, "layer_types": ["conv", "full_attention"]}),
    "Llama 4": ("llama4", "Llama4ForCausalLM", CHUNKS),
    "Mamba": ("mamba", "MambaForCausalLM", SMALL),
    "MiniMax": ("minimax", "MiniMaxForCausalLM", {**NO_ATTENTION, "num_local_experts": 2}),
    "Qwen3-Next": ("qwen3_next", "Qwen3NextForCausalLM", NEXT),
    "RWKV": ("rwkv", "RwkvForCausalLM", SMALL),
    "Llama, dynamic": ("llama", "LlamaForCausalLM", {**SIZES, "rope_parameters": DYNAMIC}),
    "Phi3, long": ("phi3", "Phi3ForCausalLM", {**SIZES, **LONG}),
    "PhiMoE": ("phimoe", "PhimoeForCausalLM", {**SIZES, "num_local_experts": 4, "sliding_window": WINDOW}),
    "Qwen2 MoE, window": ("qwen2_moe", "Qwen2MoeForCausalLM", {**SIZES, **EXPERTS, **WINDOWS, **USED}),
}
TEXTS = {
    "BLOOM": "BloomForCausalLM computes attention of its own",
    "Jamba": "'model.layers.0.mamba.conv1d' is a Conv1d, which mixes tokens",
    "LFM2": "'model.layers.0.conv.conv' is a Conv1d, which mixes tokens",
    "Llama 4": "Llama4ForCausalLM has layers of the type 'chunked_attention'",
    "Mamba": "'backbone.layers.0.mixer.conv1d' is a Conv1d, which mixes tokens",
    "MiniMax": "MiniMaxForCausalLM has layers of the type 'linear_attention'",
    "Qwen3-Next": "'model.layers.0.linear_attn.conv1d' is a Conv1d, which mixes tokens",
    "RWKV": "RwkvForCausalLM computes attention of its own",
    "Llama, dynamic": "'model.rotary_emb' has rotary positions of the type 'dynamic'",
    "Phi3, long": "'model.rotary_emb' has rotary positions of the type 'longrope'",
    "PhiMoE": "a PhimoeAttention, does not pass its sliding window to attention",
    "Qwen2 MoE, window": "a Qwen2MoeAttention, does not pass its sliding window to attention",
}
CONFIGURATIONS = {"gemma3": "Gemma3TextConfig", "llama4": "Llama4TextConfig"}


def build(name):
    """A model in fp32 whose weights are large enough to show mistakes, the same on every call."""
    folder, kind, options = (FAMILIES | REFUSED)[name]
    module = importlib.import_module(f"transformers.models.{folder}")
    torch.manual_seed(5)
    model_class = getattr(module, kind)
    configuration = getattr(module, CONFIGURATIONS.get(folder, ""), model_class.config_class)
    model = model_class(configuration(**copy.deepcopy(options)))
    generator = torch.Generator().manual_seed(6)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.nan_to_num_().add_(0.05 * torch.randn(parameter.shape, generator=generator))
    if model._can_set_experts_implementation():  # the default has no fp64
        model.set_experts_implementation("eager")
    return model.train()


def batches(name, kind):
    for batch in cut_batches(kind, STEPS, lowest=3):
        if kind == "padded":  # less than a window, beyond which some models compute NaN in fp64
            batch["attention_mask"] = torch.ones_like(batch["input_ids"])
            padding = slice(27, None) if name in RIGHT else slice(6)
            batch["attention_mask"][2, 27:] = batch["attention_mask"][3, padding] = 0
            batch["labels"][2, 27:] = batch["labels"][3, padding] = -100
        yield batch


def reference(name, kind):
    """Loss and gradient norm of each step in one process, in fp64."""
    model, found = build(name).double(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    options = {"use_cache": False} if "use_cache" in inspect.signature(type(model).forward).parameters else {}
    for batch in batches(name, kind):
        loss = model(**batch, **options).loss
        optimizer.zero_grad()
        loss.backward()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        found += [loss.item(), nn.utils.get_total_norm(gradients).item()]
        optimizer.step()
    return found


@family
@pytest.mark.parametrize(("name", "kind"), cases("context families", EVERYTHING, PART, 3))
@on_ranks(2)
def test_each_family_trains_as_in_one_process(world, name, kind):
    with paramp.launch_from_torch({"parallel": {"context": 2}, "clip_grad_norm": 1e9}):
        engine, found = engine_of(build(name), None, functools.partial(torch.optim.SGD, lr=LR)), []
        for batch in batches(name, kind):
            found += [float(engine.forward_backward(batch)), float(engine.step().grad_norm)]
            engine.zero_grad()
        assert found == pytest.approx(reference(name, kind), rel=1e-5)


def test_the_page_names_these_families():
    names = read("docs/models.md").partition("in one plain fp64 loop:\n")[2].partition(".\n")[0].replace("\n", " ")
    shown = {name.removeprefix("the ").replace("'s ", " ") for name in names.split(", ")}
    assert shown == {name for name in FAMILIES if name != "Gemma3 both ways"}


@family
@pytest.mark.parametrize("name", cases("refused families", [*REFUSED], REFUSED_PART, 2))
@on_ranks(2)
def test_layers_without_an_exchange_are_refused_by_name(world, name):
    with (
        paramp.launch_from_torch({"parallel": {"context": 2}}),
        pytest.raises(paramp.ConfigError, match=TEXTS[name]),
    ):
        engine_of(build(name), None)


@on_ranks(2)
def test_batches_that_would_train_otherwise_are_errors(world):
    with paramp.launch_from_torch({"parallel": {"context": 2}}):
        with pytest.raises(paramp.ConfigError, match="attends over packed documents"):
            engine_of(build("OPT"), None).forward_backward(next(batches("OPT", "packed")))
        with pytest.raises(paramp.ConfigError, match="counts their places itself"):
            engine_of(build("OPT"), None).forward_backward(next(batches("Llama", "padded")))


@on_ranks(2)
def test_models_with_one_config_object_are_refused(world):
    batch, model = next(batches("Llama", "plain")), build("Llama")
    with paramp.launch_from_torch({"parallel": {"context": 2}}):
        engine = engine_of(model, None)
        teacher = type(model)(model.config)
        with pytest.raises(paramp.ConfigError, match=r"config object of LlamaForCausalLM .*copy\.deepcopy"):
            engine_of(teacher, None)
        with pytest.raises(paramp.ConfigError, match=r"its model, or one with the same config.*copy\.deepcopy"):
            teacher(**batch)
        teacher.set_attn_implementation("sdpa")
        with pytest.raises(paramp.ConfigError, match="its config object has the attention 'sdpa', expected that of"):
            engine.forward_backward(batch)


@pytest.mark.parametrize("kind", ["padded", "positional mask", "packed"])
@on_ranks(2)
def test_a_later_batch_of_another_kind_is_tried_too(world, kind):
    """Of OPT, which counts positions without padding, and attends from one document to another."""
    plain, later = next(batches("Llama", "plain")), next(batches("OPT", "packed"))
    plain["position_ids"] = torch.arange(plain["input_ids"].shape[1]).repeat(4, 1)
    if kind != "packed":
        mask = torch.ones(4, 64, dtype=torch.long)
        mask[1, :40] = 0  # in the first tokens there is nothing else
        later = {name: F.pad(plain[name], (64 - plain[name].shape[1], 0)) for name in ("input_ids", "labels")}
        later |= {"attention_mask": mask}
        plain = {**later, "attention_mask": torch.ones_like(mask)}
    with paramp.launch_from_torch({"parallel": {"context": 2}}):
        engine = engine_of(build("OPT"), None)

        def train(batch):
            if kind != "positional mask":
                return engine.forward_backward(batch)
            logits = engine(batch["input_ids"], batch["attention_mask"]).logits
            return engine.backward(F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()))

        for _ in range(2):
            train(plain)
            engine.step()
            engine.zero_grad()
        with pytest.raises(paramp.ConfigError, match="computes something else from a part of a sequence"):
            train(later)


@pytest.mark.parametrize(("name", "parallel"), [("Llama", {"data": {"shard": 2}}), ("Qwen3 MoE", {"expert": 2})])
@on_ranks(4)
def test_data_ranks_that_meet_in_a_forward_try_a_kind_of_batch_together(world, name, parallel):
    """When the samples of only one of them have padding, or a mask at all."""
    plain, padded = next(batches(name, "plain")), next(batches(name, "padded"))
    masked = {**plain, "attention_mask": torch.ones_like(padded["attention_mask"])}
    found = []
    for batch in (plain, masked, padded):
        model = build(name)
        found += [model(**batch).loss.item()]
    with paramp.launch_from_torch({"parallel": {"context": 2, **parallel}}) as context:
        engine, losses = engine_of(build(name), None), []
        for batch in (plain, masked, padded):
            own = {name: value.chunk(2)[context.dp.rank] for name, value in batch.items()}
            if batch is masked and context.dp.rank == 0:
                del own["attention_mask"]
            losses += [float(engine.forward_backward(own))]
            engine.zero_grad()
        assert losses == pytest.approx(found, rel=1e-5)


@on_ranks(2)
def test_a_mask_of_three_dims_is_refused(world):
    batch = next(batches("Llama", "plain"))
    length = batch["input_ids"].shape[1]
    batch["attention_mask"] = torch.ones(4, length, length, dtype=torch.long)
    refused = pytest.raises(paramp.ConfigError, match=r"'attention_mask'.*expected \(batch, tokens\)")
    with paramp.launch_from_torch({"parallel": {"context": 2}}), refused:
        engine_of(build("Llama"), None).forward_backward(batch)
