"""Plans for models for which transformers has none: one row of :data:`ARCHITECTURES` each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from ..tensor.colwise_and_rowwise import PackedColwise, PackedRowwise
from ..tensor.styles import LocalHeads


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A replacement for a model's missing ``tp_plan`` and ``_pp_plan``. Names are those of the model without a head."""

    tensor: Mapping[str, str | ParallelStyle]
    """The tensor-parallel plan, in transformers' styles or ours."""
    units: tuple[str, ...]
    """The modules that pipeline stages consist of, in the order of their calls; each layer of a list is one. Those that
    a variant of the model lacks are left out, and its heads come last."""
    is_chain: bool = False
    """Whether hidden states are all that one unit passes to the next, and the model takes them as inputs_embeds."""


def _feed_forward(block: str, up: str, down: str) -> dict[str, str | ParallelStyle]:
    return {f"{block}.{up}": "colwise", f"{block}.{down}": "rowwise"}


def _attention(block: str, inputs: tuple[str, ...], output: str) -> dict[str, str | ParallelStyle]:
    return {**{f"{block}.{name}": "colwise" for name in inputs}, f"{block}.{output}": "rowwise"}


QKV = ("q_proj", "k_proj", "v_proj")
ARCHITECTURES = {
    "gpt2": Architecture(
        tensor={
            "wte": "embedding_rowwise",
            "h.*.attn": LocalHeads("split_size"),
            "h.*.attn.c_attn": PackedColwise(3),
            "h.*.attn.c_proj": PackedRowwise(),
            "h.*.attn.attn_dropout": "sharded_random",  # called under reorder_and_upcast_attn
            "h.*.attn.resid_dropout": "replicated_random",
            "h.*.mlp.c_fc": PackedColwise(),
            "h.*.mlp.c_proj": PackedRowwise(),
        },
        units=("wte", "wpe", "drop", "h", "ln_f"),
        is_chain=True,
    ),
    "gemma2": Architecture(tensor={}, units=("embed_tokens", "layers", "norm")),  # it caps logits behind its head
    "bert": Architecture(
        tensor={
            **_attention("encoder.layer.*.attention", ("self.query", "self.key", "self.value"), "output.dense"),
            **_feed_forward("encoder.layer.*", "intermediate.dense", "output.dense"),
        },
        units=("embeddings", "encoder.layer", "pooler"),
    ),
    "vit": Architecture(
        tensor={**_attention("layers.*.attention", QKV, "o_proj"), **_feed_forward("layers.*.mlp", "fc1", "fc2")},
        units=("embeddings", "layers", "layernorm", "pooler"),
    ),
    "clip_vision_model": Architecture(
        tensor={
            **_attention("encoder.layers.*.self_attn", QKV, "out_proj"),
            **_feed_forward("encoder.layers.*.mlp", "fc1", "fc2"),
        },
        units=("embeddings", "pre_layrnorm", "encoder.layers", "post_layernorm"),
    ),
    # Of each of the two stacks.
    "t5": Architecture(
        tensor={
            "embed_tokens": "embedding_rowwise",
            **_attention("block.*.layer.*.*Attention", ("q", "k", "v", "relative_attention_bias"), "o"),
            "block.*.layer.*.*Attention": LocalHeads("n_heads"),
            **_feed_forward("block.*.layer.*.DenseReluDense", "wi*", "wo"),
            "block.*.layer.*.DenseReluDense.dropout": "sharded_random",
        },
        units=tuple(
            f"{stack}.{name}"
            for stack in ("encoder", "decoder")
            for name in ("embed_tokens", "block", "final_layer_norm")
        ),
    ),
    # Of the encoder and of the decoder.
    "whisper": Architecture(
        tensor={
            **_attention("layers.*.self_attn", QKV, "out_proj"),
            **_attention("layers.*.encoder_attn", QKV, "out_proj"),
            "layers.*.*_attn": LocalHeads("num_heads"),
            **_feed_forward("layers.*", "fc1", "fc2"),
            "layers.*.*_layer_norm": "replicate",
        },
        units=(
            *(f"encoder.{name}" for name in ("conv1", "conv2", "embed_positions", "layers", "layer_norm")),
            *(f"decoder.{name}" for name in ("embed_tokens", "embed_positions", "layers", "layer_norm")),
        ),
    ),
    "llava": Architecture(
        tensor={},
        units=(
            *(f"vision_tower.{name}" for name in ("embeddings", "pre_layrnorm", "encoder.layers", "post_layernorm")),
            "multi_modal_projector",
            *(f"language_model.{name}" for name in ("embed_tokens", "layers", "norm")),
        ),
    ),
}
"""By ``config.model_type``."""
DECODER = Architecture(tensor={}, units=("embed_tokens", "layers", "norm"), is_chain=True)
"""The row of a model that has these modules, and no pipeline plan."""
HEADS: Mapping[str, str | ParallelStyle] = {"lm_head": "colwise_gather_output", "shared": "embedding_rowwise"}
"""The styles of a model's own modules, beside the base model."""
HEAD = "lm_head"
DROPOUTS: Mapping[str, Mapping[str, str]] = {
    "t5gemma": {"**.layers.*.mlp.dropout": "sharded_random"},
    "t5gemma2": {"**.layers.*.mlp.dropout": "sharded_random"},
}
"""Dropout between a colwise and a rowwise layer that the ``tp_plan`` leaves out, by ``config.model_type``."""


def find_architecture(model: nn.Module) -> tuple[Architecture | None, str]:
    """The row for ``model``, or None, and the prefix of the names of its modules without the head."""
    base: Any = model.base_model
    prefix = "" if base is model else f"{model.base_model_prefix}."
    row = ARCHITECTURES.get(model.config.model_type)  # type: ignore[union-attr, arg-type]
    planned = any(name.startswith(prefix) for name in getattr(model, "_pp_plan", None) or ())
    if row is None and not planned and all(hasattr(base, name) for name in DECODER.units):
        row = DECODER
    return row, prefix


def tensor_entries(model: nn.Module) -> dict[str, str | ParallelStyle]:
    """The tensor-parallel plan of ``model``: its own, and for each model in it (a vision tower) that of its row."""
    entries: dict[str, str | ParallelStyle] = dict(getattr(model, "tp_plan", None) or {})
    for name, module in model.named_modules():
        row = ARCHITECTURES.get(getattr(getattr(module, "config", None), "model_type", ""))
        if row is not None and hasattr(module, "tp_plan"):  # a model, not one of its layers
            prefix = name and f"{name}."
            entries |= {f"{prefix}{pattern}": style for pattern, style in row.tensor.items()}
            entries = {**HEADS, **entries}
    if entries:
        entries |= DROPOUTS.get(model.config.model_type, {})  # type: ignore[union-attr, arg-type]
    return entries
