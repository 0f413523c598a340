"""Tensor-parallel plans of Hugging Face models: their ``tp_plan``, translated to paramp's styles."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from ...base.errors import ConfigError
from ...base.module_surgery import matches, names_by_parameter
from ..tensor.colwise_and_rowwise import PackedColwise, PackedRowwise
from ..tensor.expert_slices import ExpertSlices
from ..tensor.sharding_plan import Plan
from .missing_plans import tensor_entries

TENSOR_STYLES: dict[str, str | Callable[[], ParallelStyle] | None] = {
    "colwise": "colwise",
    "rowwise": "rowwise",
    "packed_colwise": lambda: PackedColwise(2),
    "packed_rowwise": lambda: PackedRowwise(2),
    "colwise_gather_output": "colwise_gather",
    "colwise_rep": "colwise_gather",
    "rowwise_split_input": "rowwise_scatter",
    "rowwise_rep": "rowwise_scatter",
    "embedding_rowwise": "vocab",
    "replicated_with_grad_allreduce": "partial_gradient",
    "moe_tp_experts": ExpertSlices,
    "replicate": None,
    "replicated_random": "replicated_random",  # ours, in ARCHITECTURES
    "sharded_random": "sharded_random",
}
"""The equivalent of each style of transformers; None: no style is needed."""
WHOLE_IF_UNEVEN = ("embedding_rowwise", "colwise_gather_output", "colwise_rep")
"""Styles of embeddings and output layers. These are replicated if the vocabulary size is not divisible."""


def pretrained_plan(model: nn.Module, size: int, sequence_parallel: bool) -> Plan:
    """The plan of ``model`` for ``size`` ranks, from its ``tp_plan`` or :data:`ARCHITECTURES`."""
    kind = type(model).__name__
    if sequence_parallel:
        raise ConfigError(f"parallel.sequence_parallel: {kind} has no plan for it; set it to False, or pass plan=")
    entries = tensor_entries(model)
    if not entries:
        raise ConfigError(
            f"parallel.tensor.size: got {size}, but {kind} has no tp_plan; pass plan= to initialize, with the names of "
            "its modules"
        )
    plan = _translated(model, entries, size)
    _replicate_ties(model, plan)
    _shard_attention(model, plan, size)
    return plan


def expert_modules(model: nn.Module) -> list[str]:
    """The modules of ``model`` that its ``base_model_ep_plan``, or that of a model in it, dispatches tokens to."""
    found: list[str] = []
    for name, module in model.named_modules():
        entries = getattr(getattr(module, "config", None), "base_model_ep_plan", None) or {}
        if getattr(module, "base_model", None) is module:
            prefix = name and f"{name}."
            found += [prefix + pattern for pattern, style in entries.items() if style == "ep_dispatch_experts"]
    return found


def _translated(model: nn.Module, entries: Mapping[str, Any], size: int) -> Plan:
    modules = {name: module for name, module in model.named_modules() if name}
    parameters = [name for name, _ in model.named_parameters()]
    plan: Plan = {}
    covered: set[str] = set()
    experts = [pattern for pattern, kind in entries.items() if kind == "moe_tp_experts"]  # it shards their parameters
    for pattern, kind in entries.items():
        names = [name for name in modules if matches(name, pattern)]
        covered.update(names)
        inside = [name for name in parameters if matches(name, pattern) and pattern.rpartition(".")[0] not in experts]
        if not names and not inside:
            continue  # plans also name what only some variants of a model have
        if inside or (isinstance(kind, str) and kind not in TENSOR_STYLES):
            raise ConfigError(
                f"parallel.tensor.size: the tp_plan of {type(model).__name__} has for {pattern!r} the style {kind!r}, "
                f"expected one of {', '.join(TENSOR_STYLES)}, for modules; pass plan= to initialize"
            )
        if kind in WHOLE_IF_UNEVEN:
            names = [name for name in names if len(getattr(modules[name], "weight", ())) % size == 0]
        style = TENSOR_STYLES.get(kind, kind) if isinstance(kind, str) else kind
        if style is not None:
            plan |= {name: style if isinstance(style, (str, ParallelStyle)) else style() for name in names}
    _check_regions(model, plan, covered)
    return plan


def _check_regions(model: nn.Module, plan: Plan, covered: Collection[str]) -> None:
    """Raise a ConfigError for a parameter beside sharded layers without a plan entry: its gradient may be partial."""
    known = {*covered, *plan}
    sharded = (name for name, style in plan.items() if style == "colwise" or isinstance(style, PackedColwise))
    for parent in dict.fromkeys(name.rpartition(".")[0] for name in sharded):
        for name, _ in model.get_submodule(parent).named_parameters():
            name = f"{parent}.{name}".lstrip(".")
            owner = name.rpartition(".")[0]
            if owner == parent or owner not in known:
                raise ConfigError(
                    f"parallel.tensor.size: the tp_plan of {type(model).__name__} shards layers of "
                    f"{parent or 'the model'!r}, but has no entry for its parameter {name!r}, whose gradient may be "
                    "partial on each rank; pass plan= to initialize, with a style for it such as 'partial_gradient'"
                )


def _replicate_ties(model: nn.Module, plan: Plan) -> None:
    """Remove modules from ``plan`` that share a weight with one that is not in it."""
    sharing = [[name.rpartition(".")[0] for name in names] for names in names_by_parameter(model).values()]
    while mixed := [names for names in sharing if len({name in plan for name in names}) > 1]:
        for name in {name for names in mixed for name in names}:  # it may share another weight
            plan.pop(name, None)


def _shard_attention(model: nn.Module, plan: Plan, size: int) -> None:
    """Check that the heads divide over ``size`` ranks, and make attention dropout differ between ranks."""
    sharded = {
        parent
        for name, style in plan.items()
        if (style == "colwise" or isinstance(style, PackedColwise)) and "att" in (parent := name.rpartition(".")[0])
    }
    for name in sharded:
        config = _nearest_config(model, name)
        for attribute in ("num_attention_heads", "num_key_value_heads"):
            heads = getattr(config, attribute, None)
            if isinstance(heads, int) and heads % size:
                raise ConfigError(
                    f"parallel.tensor.size: got {size}, but {type(model).__name__} has {attribute} {heads}; expected a "
                    f"divisor of {heads}"
                )
        if not any(getattr(config, attribute, 0) for attribute in ATTENTION_DROPOUTS):
            continue
        plan.setdefault(name, "sharded_random")
        for child, module in model.get_submodule(name).named_children():
            if isinstance(module, nn.Dropout):
                plan.setdefault(f"{name}.{child}", "replicated_random")


ATTENTION_DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob", "dropout_rate")
"""The names in configurations of the dropout of attention weights."""


def _nearest_config(model: nn.Module, name: str) -> Any:
    """The configuration of the module ``name`` of ``model``, or of the first module around it that has one."""
    while name and not hasattr(model.get_submodule(name), "config"):
        name = name.rpartition(".")[0]
    return model.get_submodule(name).config
