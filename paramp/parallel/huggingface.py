"""Hugging Face models: their tensor-parallel plans in our styles, and their pipeline stages.

Nothing here imports transformers. A model says itself how it may be shared out (``tp_plan``, ``_pp_plan``), or an
:class:`Architecture` says it here. Its own forward computes each stage, masks and rotary embeddings included::

    first stage    input_ids ──► embedding ──► its layers ──► (no norm, no head) ──► hidden states
    later stage    inputs_embeds = hidden states ──► its layers ──► ...
    last stage     inputs_embeds = hidden states ──► its layers ──► norm ──► head ──► logits

Modules of other stages are left out (:class:`~paramp.base.module_surgery.PassThrough`); each layer keeps its place in the list, so that
an index into the configuration still finds it. In every layout the model's output is its ``logits`` tensor; that of a
model without a head, its ``last_hidden_state``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from ..base.errors import ConfigError
from ..base.globs import matches
from ..base.module_surgery import PassThrough, keep_only, names_outside, with_forward
from .materialize import outline
from .tensor_plan import Plan
from .tensor_styles import LocalHeads, PackedColwise, PackedRowwise

__all__ = [
    "ARCHITECTURES",
    "Architecture",
    "PretrainedPartition",
    "is_pretrained",
    "pretrained_filling",
    "pretrained_plan",
    "returning_logits",
]

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
    "replicate": None,
}
"""The style that does what transformers' style of that name does; None: nothing to do."""
WHOLE_IF_UNEVEN = ("embedding_rowwise", "colwise_gather_output", "colwise_rep")
"""Styles of embeddings and output layers. Where the vocabulary does not divide, every rank has all of it."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """What transformers does not say about a model. Names are those of the model without a head."""

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


def is_pretrained(model: nn.Module) -> bool:
    """Whether ``model`` is one of the transformers library."""
    return any(
        kind.__name__ == "PreTrainedModel" and kind.__module__.startswith("transformers.")
        for kind in type(model).__mro__
    )


def _architecture(model: nn.Module) -> tuple[Architecture | None, str]:
    """What is known here about ``model``, and the prefix of its names."""
    base: Any = model.base_model
    prefix = "" if base is model else f"{model.base_model_prefix}."
    return ARCHITECTURES.get(model.config.model_type), prefix  # type: ignore[union-attr, arg-type]


# ------------------------------------------------------------------------------------------------------- from meta


def pretrained_filling(model: nn.Module) -> Callable[[nn.Module], None]:
    """What gives the tensors of a module of ``model`` itself their first values: the model's own ``_init_weights``.

    It is tried on ``meta``, where it costs nothing: what it writes shows in the tensors' versions.

    Raises:
        ConfigError: it leaves a tensor out, or writes those of another module.
    """
    tried = outline(model)
    names_of: dict[torch.Tensor, list[str]] = {}
    for name, tensor in _named_tensors(tried):
        if tensor.is_meta:
            names_of.setdefault(tensor, []).append(name)

    @torch.no_grad()
    def fill(module: nn.Module) -> None:
        model._init_weights(module)  # type: ignore[operator]

    written: dict[torch.Tensor, list[str]] = {tensor: [] for tensor in names_of}
    for name, module in tried.named_modules():
        before = {tensor: tensor._version for _, tensor in _named_tensors(module) if tensor.is_meta}
        fill(module)
        for tensor, version in before.items():
            if tensor._version != version:
                written[tensor].append(name)
    for tensor, names in names_of.items():
        if written[tensor] != [name.rpartition(".")[0] for name in names]:
            by = " and ".join(repr(name) for name in written[tensor]) or "no module"
            raise ConfigError(
                f"model: {names[0]!r} of {type(model).__name__} is on the meta device, but its _init_weights "
                f"fills it for {by}, where one call for each module that has it is expected; build the model on the CPU"
            )
    return fill


def _named_tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]


# ------------------------------------------------------------------------------------------------ tensor parallelism


def pretrained_plan(model: nn.Module, size: int, sequence_parallel: bool) -> Plan:
    """The plan of ``model`` for ``size`` ranks, from its own ``tp_plan`` or :data:`ARCHITECTURES`.

    Raises:
        ConfigError: it has none, has an entry that is unknown here, leaves out a parameter of which each rank would see
            a part only, or its heads do not divide.
    """
    kind = type(model).__name__
    if sequence_parallel:
        raise ConfigError(f"parallel.sequence_parallel: {kind} has no plan for it; set it to False, or pass plan=")
    known, prefix = _architecture(model)
    if known is not None:
        entries: dict[str, Any] = {f"{prefix}{name}": style for name, style in known.tensor.items()}
        entries[HEAD] = "colwise_gather_output"
    else:
        entries = dict(getattr(model, "tp_plan", None) or {})
    if not entries:
        raise ConfigError(
            f"parallel.tensor.size: got {size}, but {kind} has no tp_plan; pass plan= to initialize, with the names of "
            "its modules"
        )
    plan = _translated(model, entries, size)
    _leave_ties_whole(model, plan)
    _share_attention(model, plan, size)
    return plan


def _translated(model: nn.Module, entries: Mapping[str, Any], size: int) -> Plan:
    modules = {name: module for name, module in model.named_modules() if name}
    parameters = [name for name, _ in model.named_parameters()]
    plan: Plan = {}
    covered: set[str] = set()
    for pattern, kind in entries.items():
        names = [name for name in modules if matches(name, pattern)]
        covered.update(names)
        inside = [name for name in parameters if matches(name, pattern)]
        if not names and not inside:
            continue  # plans also name what only some variants of a model have
        if inside or (isinstance(kind, str) and kind not in TENSOR_STYLES and kind not in OWN_STYLES):
            raise ConfigError(
                f"parallel.tensor.size: {type(model).__name__} wants {pattern!r} to be {kind!r}, which is not known "
                f"here ({', '.join(TENSOR_STYLES)} of modules are); pass plan= to initialize"
            )
        if kind in WHOLE_IF_UNEVEN:
            names = [name for name in names if _num_rows(modules[name]) % size == 0]
        style = TENSOR_STYLES.get(kind, kind) if isinstance(kind, str) else kind
        if style is not None:
            plan |= {name: style if isinstance(style, (str, ParallelStyle)) else style() for name in names}
    _check_regions(model, plan, covered)
    return plan


def _check_regions(model: nn.Module, plan: Plan, covered: Collection[str]) -> None:
    """Refuse a parameter beside layers whose outputs are shared out, of which the plan does not say what it is.

    Each rank may give it its own heads or features only, so that nobody would have its whole gradient.
    """
    shared = (name for name, style in plan.items() if style == "colwise" or isinstance(style, PackedColwise))
    for parent in dict.fromkeys(name.rpartition(".")[0] for name in shared):
        for name, _ in model.get_submodule(parent).named_parameters():
            name = f"{parent}.{name}".lstrip(".")
            owner = name.rpartition(".")[0]
            if owner == parent or owner not in covered:
                raise ConfigError(
                    f"parallel.tensor.size: the tp_plan of {type(model).__name__} shares out layers of "
                    f"{parent or 'the model'!r}, but says nothing of its parameter {name!r}, of which each rank may "
                    "see a part only; pass plan= to initialize, where it has a style such as 'partial_gradient'"
                )


OWN_STYLES = ("replicated_random",)


def _num_rows(module: nn.Module) -> int:
    weight = getattr(module, "weight", None)
    return weight.shape[0] if isinstance(weight, torch.Tensor) else 0


def _leave_ties_whole(model: nn.Module, plan: Plan) -> None:
    """Take modules out of ``plan`` that share a weight with one that is not in it."""
    sharing: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        sharing.setdefault(id(parameter), []).append(name.rpartition(".")[0])
    for names in sharing.values():
        if any(name not in plan for name in names):
            for name in names:
                plan.pop(name, None)


def _share_attention(model: nn.Module, plan: Plan, size: int) -> None:
    """Check that the heads divide over ``size`` ranks, and let each drop out its own heads' weights by itself."""
    config: Any = model.config
    shared = {
        parent
        for name, style in plan.items()
        if (style == "colwise" or isinstance(style, PackedColwise)) and "att" in (parent := name.rpartition(".")[0])
    }
    if not shared:
        return
    for attribute in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, attribute, None)
        if isinstance(heads, int) and heads % size:
            raise ConfigError(
                f"parallel.tensor.size: got {size}, but {type(model).__name__} has {attribute} {heads}; expected a "
                f"divisor of {heads}"
            )
    if not (getattr(config, "attention_dropout", 0) or getattr(config, "attn_pdrop", 0)):
        return
    for name in shared:
        plan.setdefault(name, "sharded_random")
        for child, module in model.get_submodule(name).named_children():
            if isinstance(module, nn.Dropout):
                plan.setdefault(f"{name}.{child}", "replicated_random")


# ------------------------------------------------------------------------------------------------------- the output


def returning_logits(model: nn.Module) -> nn.Module:
    """``model`` with its logits as its output, and without a cache of keys and values.

    Raises:
        ConfigError: its configuration wants tuples.
    """
    _check_output(model)
    options = _options(model)

    def forward(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("labels") is not None:
            raise ConfigError(
                "labels: got some, but the model's output is its logits here, and its loss would be lost; leave them "
                "out, and give initialize a criterion of logits and targets"
            )
        return _main_tensor(type(model).forward(changed, *args, **({**options, **kwargs, "return_dict": True})))

    changed = with_forward(model, forward)
    return changed


def _check_output(model: nn.Module) -> None:
    if getattr(model.config, "return_dict", True) is False:
        raise ConfigError(
            f"model: the configuration of {type(model).__name__} has return_dict=False, expected True, so that its "
            "logits can be told from its other outputs"
        )


def _options(model: nn.Module) -> dict[str, Any]:
    return {"use_cache": False} if "use_cache" in inspect.signature(type(model).forward).parameters else {}


def _main_tensor(output: Any) -> Any:
    for name in ("logits", "last_hidden_state"):
        if getattr(output, name, None) is not None:
            return getattr(output, name)
    return output


# ---------------------------------------------------------------------------------------------------- the pipeline


class PretrainedPartition:
    """The cut of a Hugging Face model: between its embeddings, each of its layers, its norm and its head.

    Raises:
        ConfigError: it has no plan for it, has parameters elsewhere, or does more than apply its units one by one.
    """

    opened: frozenset[str] = frozenset()

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        _check_output(model)
        known, prefix = _architecture(model)
        names = (
            {f"{prefix}{name}" for name in known.units} | {HEAD} if known else set(getattr(model, "_pp_plan", ()) or ())
        )
        if not names:
            raise ConfigError(
                f"parallel.pipeline.size: {type(model).__name__} has no pipeline plan (_pp_plan); set the size to 1, "
                "or add its units to paramp.parallel.huggingface.ARCHITECTURES"
            )
        self.units: list[tuple[str, nn.Module]] = []
        for name, module in model.named_modules():
            if name in names and isinstance(module, nn.ModuleList):
                self.units += [(f"{name}.{index}", layer) for index, layer in module.named_children()]
            elif name in names:
                self.units.append((name, module))
        self._check_on_device()
        outside = [
            name for name in names_outside(model, [name for name, _ in self.units]) if not _is_buffer(model, name)
        ]
        if outside:
            raise ConfigError(
                f"parallel.pipeline.size: {type(model).__name__} has parameters outside of what its pipeline plan "
                f"names: {', '.join(outside)}; set the size to 1"
            )
        self._check_calls()

    def stages(self, plan: Sequence[Sequence[str]]) -> list[nn.Module]:
        return [self._stage(names, index == 0) for index, names in enumerate(plan)]

    def _stage(self, names: Sequence[str], is_first: bool) -> nn.Module:
        model = self._model
        everywhere = names_outside(model, [name for name, _ in self.units])  # tables of rotary embeddings
        shells = [name for name, module in model.named_modules() if name and not any(module.children())]
        inside = [name for name in shells if not any(f"{name}.".startswith(f"{unit}.") for unit, _ in self.units)]
        part = keep_only(model, [*names, *everywhere, *inside])
        for name, _ in self.units:
            if name not in names:
                _replace(part, model, name, _Nothing() if name in self._positions else PassThrough())
        options = _options(model)

        def forward(x: torch.Tensor) -> Any:
            inputs = {"input_ids": x} if is_first else {"inputs_embeds": x}
            return _main_tensor(type(model).forward(stage, **inputs, **options))

        stage = with_forward(part, forward)
        return stage

    @property
    def _positions(self) -> set[str]:
        """Units that give something to add to the hidden states: embeddings other than that of the tokens."""
        tokens = self._model.get_input_embeddings()  # type: ignore[operator]
        return {name for name, module in self.units if isinstance(module, nn.Embedding) and module is not tokens}

    def _check_on_device(self) -> None:
        tensors = [*self._model.named_parameters(), *self._model.named_buffers()]
        for name in (name for name, tensor in tensors if tensor.is_meta):
            raise ConfigError(
                f"parallel.pipeline.size: {name!r} of {type(self._model).__name__} is on the meta device, but cutting "
                "a Hugging Face model means to run it; build it on the CPU"
            )

    @torch.no_grad()
    def _check_calls(self) -> None:
        """Put the units in the order in which the forward calls them, which neither plans nor registration tell.

        The model without its units has to hand on what it is given, or stages would do something twice.
        """
        first = next(self._model.parameters())
        with torch.random.fork_rng(devices=[]):
            hidden = torch.randn(1, 2, self._model.config.hidden_size)  # type: ignore[union-attr, arg-type]
        hidden = hidden.to(first.device, first.dtype)
        calls: list[str] = []
        shell = self._stage([], is_first=False)
        for name, _ in self.units:
            shell.get_submodule(name).register_forward_pre_hook(lambda *_, name=name: calls.append(name))
        try:
            same = torch.equal(shell(hidden), hidden)
            reason = "it computes more"
        except Exception as error:
            same, reason = False, f"{type(error).__name__}: {error}"
        tokens = self._model.get_input_embeddings()  # type: ignore[operator]
        order = [name for name, module in self.units if module is tokens] + calls  # embeddings are given here
        known = dict(self.units)
        if same and sorted(order) != sorted(known):
            same = False
            odd = [name for name in known if order.count(name) != 1]
            reason = f"it calls {', '.join(odd)} {order.count(odd[0])} times"
        if not same:
            raise ConfigError(
                f"parallel.pipeline.size: {type(self._model).__name__} cannot be cut, since its forward does not just "
                f"apply {', '.join(known)} one after the other ({reason}); set the size to 1"
            )
        self.units = [(name, known[name]) for name in order]


class _Nothing(PassThrough):
    """Stands for position embeddings, which the first stages have added already."""

    def forward(self, x: Any = None, *args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.zeros((), device=x.device)


def _is_buffer(model: nn.Module, name: str) -> bool:
    owner, _, leaf = name.rpartition(".")
    return leaf in model.get_submodule(owner)._buffers


def _replace(part: nn.Module, model: nn.Module, name: str, substitute: nn.Module) -> None:
    """Put ``substitute`` at ``name`` of ``part``, in the place among its siblings that it has in ``model``."""
    owner, _, leaf = name.rpartition(".")
    _restore_path(part, model, owner)
    parent = part.get_submodule(owner)
    found = {**parent._modules, leaf: substitute}
    order = list(model.get_submodule(owner)._modules)
    parent._modules = {key: found[key] for key in order if key in found}


def _restore_path(part: nn.Module, model: nn.Module, path: str) -> None:
    """Make sure that ``part`` has the module at ``path``, with nothing in it."""
    names = path.split(".") if path else []
    for end in range(1, len(names) + 1):
        parent = part.get_submodule(".".join(names[: end - 1]))
        if names[end - 1] not in parent._modules:
            parent._modules[names[end - 1]] = keep_only(model.get_submodule(".".join(names[:end])), ())
