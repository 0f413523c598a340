"""Inputs and attention of a Hugging Face model whose sequences are cut over the context axis.

The attention of transformers' models is looked up by name, and its mask made by the model; one of four dims passes
unchanged. So the model gets, in place of a mask of padding, the number of each token's document, (batch, 1, 1, tokens),
-1 for padding, and attention reads it. Labels are shifted before they are cut.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ...base.errors import ConfigError
from ...base.uncompiled import uncompiled
from ...distributed.token_positions import ACTIVE
from ..context_axis.cut_sequences import SequenceAxis, active, numbers_of
from ..context_axis.stages_on_cut_sequences import SequenceInputs
from ..tensor.sharded_loss import IGNORED
from .model_output import call_options, calls_causal_loss, counting, has_given_loss, shifts_labels
from .router_loss import ROUTERS, asks_for_loss

NAME = "paramp_context"
"""The name of the attention in transformers' registry."""
LAYERS = "full_attention", "sliding_attention"
"""The layer types of transformers' configurations that :func:`context_attention` computes."""
POSITIONS = frozenset({"position_ids"})
"""Inputs with the tokens in the last dim."""

KEPT = "logits_to_keep"
"""The input that says of which tokens logits are computed."""
LIMITS = "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"
"""Inputs of flash attention: where packed documents begin and end, and how long they are."""


class PretrainedInputs(SequenceInputs):
    """The inputs of one model of the transformers library; ``is_chain``: of whose stages each gets hidden states."""

    def __init__(self, model: nn.Module, *, is_chain: bool) -> None:
        self._model: Any = model
        self._is_chain = is_chain
        self._parameters = inspect.signature(type(model).forward).parameters
        self._options, self._counted = call_options(model), counting(model)
        self._shifts = calls_causal_loss(model)
        self._shifts_itself = shifts_labels(model) and not self._shifts
        self._has_given_loss = has_given_loss(model)

    def check(self, model: nn.Module, num_stages: int) -> None:
        from transformers import AttentionInterface

        super().check(model, num_stages)
        kind, config = type(self._model).__name__, self._model.config.get_text_config()
        for name in getattr(config, "layer_types", None) or ():
            if name not in LAYERS:
                raise ConfigError(
                    f"parallel.context.size: {kind} has layers of the type {name!r}, expected {' or '.join(LAYERS)}, "
                    "which exchange keys and values; set it to 1"
                )
        if getattr(config, "is_encoder_decoder", False) or not self._model._can_set_attn_implementation():
            raise ConfigError(
                f"parallel.context.size: {kind} computes attention of its own, expected a model of one sequence that "
                "looks it up in transformers' AttentionInterface; set it to 1"
            )
        for problem in (_untold_window(model, config), _length_of_rope(model)):
            if problem is not None:
                raise ConfigError(f"parallel.context.size: {problem}; set it to 1")
        if num_stages > 1 and not self._is_chain:
            raise ConfigError(
                f"parallel.context.size: the stages of {kind} run all of its forward, expected a decoder that is built "
                "on the CPU, whose stages get hidden states alone; set it to 1, or parallel.pipeline.size"
            )
        if config._attn_implementation == NAME:
            raise ConfigError(
                f"parallel.context.size: the config object of {kind} has an engine's attention already, that of "
                "another model with it, or of this one; build each model from a copy.deepcopy(config), or call "
                "model.set_attn_implementation('sdpa') if the other engine is no longer used"
            )
        AttentionInterface.register(NAME, context_attention)
        self._own = config._attn_implementation
        self._model.set_attn_implementation(NAME)

    @contextmanager
    def whole(self) -> Iterator[None]:
        self._model.set_attn_implementation(self._own)
        try:
            yield
        finally:
            self._model.set_attn_implementation(NAME)

    def named(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given = {**dict(zip(list(self._parameters)[2:], args[1:], strict=False)), **kwargs}
        return args[:1], {name: value for name, value in given.items() if value is not None}

    def content(self, kwargs: Mapping[str, Any]) -> tuple[bool, ...]:
        mask = self.seen(kwargs)
        if mask is not None:  # padding, also before the first token, and packed documents that the mask counts
            found = [~mask.all(), ~mask[:, 0].all(), (kwargs["attention_mask"] > 1).any()]
        elif (documents := _documents(kwargs)) is not None:
            found = [documents.diff(dim=1).any()]
        else:
            return ()
        return tuple(torch.stack(found).tolist())

    def tried(self, some: dict[str, Any], whole: Mapping[str, Any]) -> dict[str, Any]:
        some = {name: value for name, value in some.items() if name not in LIMITS}
        if ROUTERS in self._parameters:  # of whose logits there is a row for each token of all samples
            some[ROUTERS] = False
        if self.seen(whole) is not None:  # whose first tokens may all be padding, or none of them
            mask, tokens = whole["attention_mask"], some["attention_mask"].shape[1]
            places = torch.linspace(0, mask.shape[1] - 1, tokens, device=mask.device).round().long()
            some["attention_mask"] = mask[:, places]
        documents = None if whole.get("attention_mask") is not None else _documents(whole)
        if documents is None or not bool(documents.diff(dim=1).any()):
            return some
        positions = some["position_ids"]  # some models attend over documents, which their first tokens do not show
        halves = torch.arange(positions.shape[1], device=positions.device) % (positions.shape[1] // 2)
        return {**some, "position_ids": halves.expand_as(positions)}

    def seen(self, kwargs: Mapping[str, Any]) -> torch.Tensor | None:
        mask = kwargs.get("attention_mask")
        return mask.bool() if isinstance(mask, torch.Tensor) and mask.ndim == 2 else None

    def counted(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        kwargs = {**self._options, **kwargs}
        if asks_for_loss(self._model.config, kwargs):
            raise ConfigError(
                f"inputs[{ROUTERS!r}]: got True, expected False beside the context axis outside of paramp's engine, "
                "because the loss of routers would be that of a rank's tokens; set it to False"
            )
        if kwargs.get("num_items_in_batch") is not None:
            return kwargs
        kwargs = self._counted(args, kwargs)
        if kwargs.get("labels") is not None and "num_items_in_batch" not in kwargs:
            raise ConfigError(
                f"inputs['labels']: got labels for {type(self._model).__name__}, whose loss is a mean that takes no "
                "num_items_in_batch, expected none, because ranks have different numbers of labels; compute the loss "
                "of its logits in the loop"
            )
        return kwargs

    def with_count_of_all(self, total: Any, count: Any, axis: SequenceAxis) -> tuple[Any, Any]:
        return total, count  # which transformers' loss was given (label_count)

    def cut(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], length: int, axis: SequenceAxis
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        found = self._model.config.get_text_config()._attn_implementation
        if found != NAME:
            raise ConfigError(
                f"{type(self._model).__name__}: its config object has the attention {found!r}, expected that of its "
                "engine, which was replaced through this model or another one with the same config object; build the "
                "other one from copy.deepcopy(config), or give this model to a new engine"
            )
        args, kwargs = self.named(args, kwargs)
        if "past_key_values" in kwargs:
            raise ConfigError(
                f"inputs['past_key_values']: got {type(kwargs['past_key_values']).__name__}, expected none, because "
                "parallel.context cuts sequences, and a rank has the keys of its tokens only; pass whole sequences, "
                "and generate with a model that is not cut"
            )
        kept = kwargs.get(KEPT, 0)
        if isinstance(kept, torch.Tensor) or kept:
            raise ConfigError(
                f"inputs[{KEPT!r}]: got {kept}, expected none, because parallel.context cuts sequences, and a rank "
                "would keep those of its tokens; index the logits of the output"
            )
        limits = {name: kwargs.pop(name) for name in LIMITS if name in kwargs}
        found = {name: self._part(name, value, length, axis) for name, value in kwargs.items()}
        first = next((leaf for leaf in (*args, *kwargs.values()) if isinstance(leaf, torch.Tensor)), None)
        added = -length % axis.multiple
        if "position_ids" not in kwargs and self._takes("position_ids"):
            found["position_ids"] = axis.positions((length + added) // axis.size, axis.device)[None]
        documents = _packed(limits, first, length) if limits else _documents(kwargs)
        if documents is None and added:  # of which only later tokens are hidden by their places
            documents = torch.ones(1, length, dtype=torch.long, device=axis.device)
        if documents is not None:
            found["attention_mask"] = axis.cut(_padded(documents, 1, length, axis, 0), 1)[:, None, None]
        if "labels" in kwargs:
            labels, ignored = kwargs["labels"], kwargs.get("ignore_index", IGNORED)
            if self._has_given_loss:
                raise ConfigError(
                    f"inputs['labels']: {type(self._model).__name__} has another loss_function than transformers', "
                    "expected none, because parallel.context cuts sequences, and it would get a rank's tokens; give a "
                    "criterion, or set the size to 1"
                )
            if self._shifts_itself:
                raise ConfigError(
                    f"inputs['labels']: {type(self._model).__name__} shifts them in its forward, expected a model with "
                    "transformers' loss, whose labels are shifted before they are cut; give a criterion, or set "
                    "parallel.context.size to 1"
                )
            if self._shifts:
                labels = kwargs.get("shift_labels", F.pad(labels, (0, 1), value=ignored)[:, 1:])
                found["shift_labels"] = axis.cut(_padded(labels, 1, length, axis, ignored), 1)
            found["labels"] = axis.cut(_padded(labels, 1, length, axis, ignored), 1)
        names = list(self._parameters)[1:]
        return tuple(self._part(name, value, length, axis) for name, value in zip(names, args, strict=False)), found

    def _takes(self, name: str) -> bool:
        kinds = {parameter.kind for parameter in self._parameters.values()}
        return name in self._parameters or inspect.Parameter.VAR_KEYWORD in kinds

    def _part(self, name: str, value: Any, length: int, axis: SequenceAxis) -> Any:
        """This rank's tokens of the input ``name``."""
        if isinstance(value, tuple):  # of the stage before, which has sums of routers too
            value = value[0]
        if not isinstance(value, torch.Tensor) or value.ndim == 0:
            return value
        dim = value.ndim - 1 if name in POSITIONS else 1
        if name == "attention_mask" and value.ndim != 2:
            raise ConfigError(
                f"inputs['attention_mask']: got shape {tuple(value.shape)}, expected (batch, tokens), because "
                "parallel.context cuts sequences, and which keys a query sees is then said by places and documents; "
                "set the size to 1"
            )
        if value.ndim < 2 or value.ndim > 3 or value.shape[dim] != length:
            raise ConfigError(
                f"inputs[{name!r}]: got shape {tuple(value.shape)}, expected {length} tokens in dim {dim}, and 2 or 3 "
                "dims, because parallel.context cuts sequences; leave it out, or set the size to 1"
            )
        return axis.cut(_padded(value, dim, length, axis, 0), dim)


def _untold_window(model: nn.Module, config: Any) -> str | None:
    """Why attention would not know the sliding window, which only the model's mask has."""
    layers = getattr(config, "layer_types", None) or ("sliding_attention",)
    if getattr(config, "sliding_window", None) is None or "sliding_attention" not in layers:
        return None
    names = {type(module): name for name, module in model.named_modules()}  # reading a source takes long: once for each
    for kind, name in names.items():
        if kind.__name__.endswith("Attention") and "sliding_window=" not in _source(kind):
            return f"{name!r}, a {kind.__name__}, does not pass its sliding window to attention, expected one that does"
    return None


def _source(kind: type) -> str:
    """The source text of a class; empty if it has none, as in a program without a file."""
    with suppress(OSError, TypeError):
        return inspect.getsource(kind)
    return ""


def _length_of_rope(model: nn.Module) -> str | None:
    """Why a rank's positions would be embedded otherwise than those of the whole sequence."""
    for name, module in model.named_modules():
        kinds = getattr(module, "rope_type", None)
        for kind in kinds.values() if isinstance(kinds, dict) else (kinds,):
            if kind in ("dynamic", "longrope"):
                return f"{name!r} has rotary positions of the type {kind!r}, which depend on the length of the sequence"
    return None


def _padded(tensor: torch.Tensor, dim: int, length: int, axis: SequenceAxis, value: int) -> torch.Tensor:
    """``tensor`` with a multiple of tokens that can be cut."""
    more = -length % axis.multiple
    return F.pad(tensor, (0, 0) * (tensor.ndim - 1 - dim) + (0, more), value=value) if more else tensor


def _documents(inputs: Mapping[str, Any]) -> torch.Tensor | None:
    """The number of each token's document, (batch, tokens), -1 for padding; None: each sequence is one without any."""
    mask, positions = inputs.get("attention_mask"), inputs.get("position_ids")
    if isinstance(mask, torch.Tensor) and mask.ndim == 2:
        return numbers_of(mask)
    if positions is not None and positions.ndim == 2:
        starts = F.pad(positions.diff(dim=1) != 1, (1, 0))
        return starts.cumsum(1) + 1
    return None


def _packed(limits: Mapping[str, Any], first: torch.Tensor | None, length: int) -> torch.Tensor:
    """The number of each token's document, (1, tokens), by the ``limits`` that flash attention takes."""
    found = [limits.get(name) for name in LIMITS[:2]]
    starts, ends = (x if isinstance(x, torch.Tensor) and x.ndim == 1 else torch.zeros(1) for x in found)
    shape = (1, length) if first is None else tuple(first.shape[:2])
    if not torch.equal(starts, ends) or int(starts[-1]) != length or shape[0] != 1:
        raise ConfigError(
            f"inputs: got {', '.join(limits)} for a batch of shape {shape}, expected cu_seq_lens_q "
            f"and an equal cu_seq_lens_k, 1-dim, from 0 to the {length} tokens of a batch of 1"
        )
    places = torch.arange(length, device=starts.device, dtype=starts.dtype)
    return torch.searchsorted(starts, places, right=True)[None]


@uncompiled
def context_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention by the interface of transformers: (batch, heads, tokens, features) to (batch, tokens, heads, features).

    ``attention_mask``: the number of each token's document, (batch, 1, 1, tokens), -1 for padding.

    Raises:
        ConfigError: it is called outside of an engine's forwards and backwards, or with a bias.
    """
    kind = type(module).__name__
    if not ACTIVE:
        raise ConfigError(
            f"{kind}: its model, or one with the same config object, was given to an engine with parallel.context > 1, "
            "whose attention it has; call the engine, build another model from copy.deepcopy(config), or call "
            "model.set_attn_implementation('sdpa') when the engine is no longer used"
        )
    if position_bias is not None:
        raise ConfigError(f"{kind}: attention with position_bias is not cut under parallel.context; set the size to 1")
    if attention_mask is not None and (attention_mask.is_floating_point() or attention_mask.shape[1:3] != (1, 1)):
        raise ConfigError(
            f"{kind}: its attention gets a mask of {attention_mask.dtype} and shape {tuple(attention_mask.shape)}, "
            "expected the one of its model, because others are not cut under parallel.context; set the size to 1"
        )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if sliding_window is not None and not causal and kind == "T5GemmaSelfAttention":
        sliding_window += 1  # its mask has this distance too, for which others pass one more
    output = active().attend(
        query,
        key,
        value,
        causal=causal,
        documents=attention_mask,
        window=sliding_window,
        scale=scaling,
        softcap=softcap,
        sinks=s_aux,
        dropout=dropout,
    )
    return output.transpose(1, 2).contiguous(), None
