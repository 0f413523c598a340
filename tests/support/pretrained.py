"""Small random models of Hugging Face families, their padded batches, and a plain torch loop on each."""

import copy
import importlib
from collections.abc import Iterator
from typing import Any

import torch

VOCAB = 128
NUM_SAMPLES = 4
LENGTH = 12
SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
DECODER = {**SIZES, **HEADS, **TOKENS, "max_position_embeddings": 32}
VIT = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "image_size": 8}
GPT2 = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 32, **TOKENS}
GPT2 |= {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
T5 = {"vocab_size": VOCAB, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
T5 |= {"decoder_start_token_id": 0, "pad_token_id": 0, "feed_forward_proj": "gated-gelu"}
WHISPER = {"d_model": 32, "encoder_layers": 4, "encoder_attention_heads": 4, "encoder_ffn_dim": 64, "num_mel_bins": 8}
WHISPER |= {"max_source_positions": 8, "classifier_proj_size": 16, "num_labels": 10, "vocab_size": VOCAB, **TOKENS}
WHISPER |= {"decoder_layers": 1, "decoder_attention_heads": 4, "decoder_ffn_dim": 64, "activation_dropout": 0.0}
NO_DROPOUT = {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
IMAGE_TOKEN = VOCAB - 1

FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Llama": ("llama", "LlamaForCausalLM", DECODER),
    "Mistral": ("mistral", "MistralForCausalLM", {**DECODER, "sliding_window": 4}),
    "Qwen2": ("qwen2", "Qwen2ForCausalLM", {**DECODER, "tie_word_embeddings": True}),
    "Qwen3": ("qwen3", "Qwen3ForCausalLM", {**DECODER, "head_dim": 8}),
    "Phi3": ("phi3", "Phi3ForCausalLM", {**DECODER, "original_max_position_embeddings": 32}),
    "Gemma2": ("gemma2", "Gemma2ForCausalLM", {**DECODER, "head_dim": 8, "sliding_window": 4}),
    "Gemma3": ("gemma3", "Gemma3ForCausalLM", {**DECODER, "head_dim": 8, "sliding_window": 4}),
    "GPT-2": ("gpt2", "GPT2LMHeadModel", GPT2),
    "GPT-NeoX": ("gpt_neox", "GPTNeoXForCausalLM", {**SIZES, **TOKENS, "num_attention_heads": 4}),
    "Mixtral": ("mixtral", "MixtralForCausalLM", {**DECODER, "num_local_experts": 4}),
    "BERT": ("bert", "BertForMaskedLM", {**SIZES, **NO_DROPOUT, "num_attention_heads": 4, "pad_token_id": 0}),
    "ViT": ("vit", "ViTForImageClassification", {**VIT, **NO_DROPOUT, "patch_size": 2, "num_labels": 10}),
    "T5": ("t5", "T5ForConditionalGeneration", T5),
    "Whisper": ("whisper", "WhisperForAudioClassification", WHISPER),
    "LLaVA": ("llava", "LlavaForConditionalGeneration", {"image_token_index": IMAGE_TOKEN}),
}
"""By the name in the docs: the module in transformers, the class, the options of its configuration.

Importing from the submodules is much faster than from transformers.
"""


def build(family: str, **changes: Any) -> torch.nn.Module:
    """The model of ``family``, in fp32, the same on every call; ``changes`` of its configuration.

    ``text``: changes of the configuration of LLaVA's decoder.
    """
    folder, kind, options = FAMILIES[family]
    options = options | changes
    module = importlib.import_module(f"transformers.models.{folder}")
    torch.manual_seed(5)
    model = getattr(module, kind)(_configuration(folder, getattr(module, kind), options))
    generator = torch.Generator().manual_seed(6)
    with torch.no_grad():  # small random weights hide mistakes, and so do norms and biases that do nothing
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model.train()


def _configuration(folder: str, kind: Any, options: dict[str, Any]) -> Any:
    options = copy.deepcopy(options)  # configurations keep and change what they are given
    if folder == "llava":
        from transformers.models.clip import CLIPVisionConfig
        from transformers.models.llama import LlamaConfig
        from transformers.models.llava import LlavaConfig

        vision = CLIPVisionConfig(**VIT, patch_size=4)
        text = LlamaConfig(**{**DECODER, "num_hidden_layers": 2, **options.pop("text", {})})
        return LlavaConfig(vision_config=vision, text_config=text, **options)
    if folder == "gemma3":
        from transformers.models.gemma3 import Gemma3TextConfig

        return Gemma3TextConfig(**options)
    return kind.config_class(**options)


def batches(family: str, count: int) -> Iterator[dict[str, torch.Tensor]]:
    """Batches of keyword inputs with ``labels``; those with tokens are padded on the right, to different lengths."""
    generator = torch.Generator().manual_seed(3)
    return (_batch(family, generator) for _ in range(count))


def _batch(family: str, generator: torch.Generator) -> dict[str, torch.Tensor]:
    def tokens(length: int) -> torch.Tensor:
        return torch.randint(3, IMAGE_TOKEN, (NUM_SAMPLES, length), generator=generator)

    lengths = torch.tensor([LENGTH, LENGTH - 3, LENGTH - 7, LENGTH - 1])[:, None]
    mask = (torch.arange(LENGTH) < lengths).long()
    if family in ("ViT", "Whisper"):
        labels = torch.randint(0, 10, (NUM_SAMPLES,), generator=generator)
        shape, name = ((3, 8, 8), "pixel_values") if family == "ViT" else ((8, 16), "input_features")
        return {name: torch.randn(NUM_SAMPLES, *shape, generator=generator), "labels": labels}
    input_ids = tokens(LENGTH) * mask
    batch = {"input_ids": input_ids, "attention_mask": mask}
    if family == "T5":
        target = tokens(8)
        return batch | {"labels": target.masked_fill(torch.arange(8) >= lengths // 2, -100)}
    if family == "BERT":
        return batch | {"labels": tokens(LENGTH).masked_fill(mask == 0, -100)}
    if family == "LLaVA":
        input_ids[:, :4] = IMAGE_TOKEN
        batch["pixel_values"] = torch.randn(NUM_SAMPLES, 3, 8, 8, generator=generator)
        mask = mask * (torch.arange(LENGTH) >= 4)
    return batch | {"labels": input_ids.masked_fill(mask == 0, -100)}


def plain_losses(model: torch.nn.Module, family: str, count: int, optimizer: torch.optim.Optimizer) -> list[float]:
    """The losses of ``count`` steps of a plain torch loop, which trains ``model``."""
    losses = []
    for batch in batches(family, count):
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
