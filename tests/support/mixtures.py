"""Small random mixtures of experts of transformers, what their products compute in, and routing that is replayed."""

import importlib
from collections import defaultdict
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from paramp.models import MoEGPT, MoEGPTConfig

NUM_EXPERTS, FEATURES = 5, 40
"""No other size of the models is one of them, or of twice the features, so that they tell products apart."""
SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}
SIZES |= {"num_key_value_heads": 4, "max_position_embeddings": 32, "num_experts_per_tok": 2}
SIZES |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LOW_RANK = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
WITH_SHARED = {"n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
BY_CLASS: dict[str, dict[str, Any]] = {
    "MixtralForCausalLM": {"intermediate_size": FEATURES, "num_local_experts": NUM_EXPERTS},
    "Qwen3MoeForCausalLM": {"moe_intermediate_size": FEATURES, "num_experts": NUM_EXPERTS},
    "DeepseekV3ForCausalLM": {"moe_intermediate_size": FEATURES, "intermediate_size": 48, **LOW_RANK, **WITH_SHARED}
    | {"n_routed_experts": NUM_EXPERTS},
    "GptOssForCausalLM": {"intermediate_size": FEATURES, "num_local_experts": NUM_EXPERTS, "sliding_window": 8}
    | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "OlmoeForCausalLM": {"intermediate_size": FEATURES, "num_experts": NUM_EXPERTS},
}
FOLDERS = {"Mixtral": "mixtral", "Qwen3-MoE": "qwen3_moe", "DeepSeek-V3": "deepseek_v3", "GPT-OSS": "gpt_oss"}
FOLDERS |= {"OLMoE": "olmoe"}
FAMILIES = dict(zip(FOLDERS, BY_CLASS, strict=True))
"""The class of each family, by its name in the docs."""
BACKENDS = ("eager", "batched_mm", "grouped_mm")


def build(family: str, backend: str | None = "eager", num_experts: int = NUM_EXPERTS) -> Any:
    """The model of ``family``, in fp32, the same on every call; None: the backend that transformers chooses."""
    name = FAMILIES[family]
    sizes = {
        key: num_experts if "experts" in key and value == NUM_EXPERTS else value
        for key, value in BY_CLASS[name].items()
    }
    kind = getattr(importlib.import_module(f"transformers.models.{FOLDERS[family]}"), name)
    torch.manual_seed(5)
    model = kind(kind.config_class(**SIZES, **sizes))
    generator = torch.Generator().manual_seed(6)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    if backend is not None:
        model.set_experts_implementation(backend)
    return model.train()


def build_own(num_experts: int = NUM_EXPERTS) -> MoEGPT:
    """A :class:`MoEGPT` of these sizes."""
    torch.manual_seed(5)
    sizes = {"num_layers": 2, "num_heads": 4, "width": 32, "max_seq_len": 32, "vocab_size": 64}
    return MoEGPT(MoEGPTConfig(**sizes, num_experts=num_experts, expert_width=FEATURES))


def batch(num_samples: int = 4, length: int = 12) -> torch.Tensor:
    """Tokens."""
    return torch.randint(3, 60, (num_samples, length), generator=torch.Generator().manual_seed(7))


class Products(TorchDispatchMode):
    """The dtypes of all operands in products of experts and of routers, forward and backward."""

    def __init__(self, num_experts: int = NUM_EXPERTS) -> None:
        super().__init__()
        self._num_experts = num_experts
        self.dtypes: defaultdict[str, set[torch.dtype]] = defaultdict(set)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(name in str(func) for name in ("mm.", "mm_fallback", "mv.", "dot.")):
            operands = [value for value in args if isinstance(value, torch.Tensor) and value.is_floating_point()]
            sizes = {size for value in operands for size in value.shape[-2:]}
            of_experts = not sizes.isdisjoint((FEATURES, 2 * FEATURES))
            if of_experts or self._num_experts in sizes:
                self.dtypes["experts" if of_experts else "router"] |= {value.dtype for value in operands}
        return func(*args, **(kwargs or {}))


class Routing(TorchFunctionMode):
    """Records what ``topk`` chooses, in the order of the calls; or, given a record, chooses the same."""

    def __init__(self, chosen: list[torch.Tensor] | None = None) -> None:
        super().__init__()
        self.chosen: list[torch.Tensor] = []
        self._given = None if chosen is None else iter(chosen)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") != "topk":
            return result
        if self._given is None:
            self.chosen.append(result.indices)
            return result
        indices = next(self._given)
        return type(result)((args[0].gather(-1, indices), indices))
