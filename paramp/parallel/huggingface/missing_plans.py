"""What transformers does not say about some of its models: one row of :data:`ARCHITECTURES` each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from ..tensor_styles import LocalHeads, PackedColwise, PackedRowwise


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """What is missing of a model's ``tp_plan`` and ``_pp_plan``. Names are those of the model without a head."""

    tensor: Mapping[str, str | ParallelStyle]
    """Its plan, in transformers' styles or ours."""
    units: tuple[str, ...]
    """What a pipeline stage is made of; of a list of layers, each."""


ARCHITECTURES = {
    "gpt2": Architecture(
        tensor={
            "wte": "embedding_rowwise",
            "h.*.attn": LocalHeads("split_size"),
            "h.*.attn.c_attn": PackedColwise(3),
            "h.*.attn.c_proj": PackedRowwise(),
            "h.*.attn.resid_dropout": "replicated_random",
            "h.*.mlp.c_fc": PackedColwise(),
            "h.*.mlp.c_proj": PackedRowwise(),
        },
        units=("wte", "wpe", "drop", "h", "ln_f"),
    )
}
"""By ``config.model_type``."""
HEAD = "lm_head"


def find_architecture(model: nn.Module) -> tuple[Architecture | None, str]:
    """The row for ``model``, if there is one, and the prefix of the names of its modules below the head."""
    base: Any = model.base_model
    prefix = "" if base is model else f"{model.base_model_prefix}."
    return ARCHITECTURES.get(model.config.model_type), prefix  # type: ignore[union-attr, arg-type]
