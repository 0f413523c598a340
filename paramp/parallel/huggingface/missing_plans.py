"""Plans for models for which transformers has none: one row of :data:`ARCHITECTURES` each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from ..tensor_styles import LocalHeads, PackedColwise, PackedRowwise


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A replacement for a model's missing ``tp_plan`` and ``_pp_plan``. Names are those of the model without a head."""

    tensor: Mapping[str, str | ParallelStyle]
    """The tensor-parallel plan, in transformers' styles or ours."""
    units: tuple[str, ...]
    """The modules that pipeline stages consist of; each layer of a list is one."""


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
    """The row for ``model``, or None, and the prefix of the names of its modules without the head."""
    base: Any = model.base_model
    prefix = "" if base is model else f"{model.base_model_prefix}."
    return ARCHITECTURES.get(model.config.model_type), prefix  # type: ignore[union-attr, arg-type]
