"""The calls and outputs of a Hugging Face model: without a cache, and with a loss that is weighted by its tokens."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn

from ...base.errors import ConfigError
from ...base.module_surgery import check_forward_of_class, replace_forward, shallow_copy
from ...distributed.token_positions import ACTIVE
from ..loss_and_outputs_of_batch import summed
from ..microbatches import Batch
from ..tensor.sharded_loss import IGNORED
from .router_loss import RouterLoss
from .tokens_that_balance_experts import MASK, masked_by


def without_cache(model: nn.Module) -> nn.Module:
    """``model`` without a cache of keys and values, whose loss is the mean over the microbatch's labels."""
    check_output(model)
    check_forward_of_class("", model)
    options = call_options(model)
    counted, count, named = counting(model), label_count(model), inputs_by_name(model)
    routers, kind = RouterLoss.of(model), type(model)

    def forward(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        kwargs = {**options, **kwargs, "return_dict": True}
        balanced = nullcontext() if routers is None else routers.taken_over(module, count(args, kwargs))
        with masked_by(named(args, kwargs).get(MASK)), balanced:
            return kind.forward(module, *args, **counted(args, kwargs))

    changed = replace_forward(shallow_copy(model), forward)
    if routers is not None:
        routers.add_to(changed)
    return changed


def check_output(model: nn.Module) -> None:
    """Check that the outputs of ``model`` have names."""
    if getattr(model.config, "return_dict", True) is False:
        raise ConfigError(
            f"model: the configuration of {type(model).__name__} has return_dict=False, expected True, so that its "
            "logits and loss can be found by name"
        )


def call_options(model: nn.Module) -> dict[str, Any]:
    """The keyword arguments that disable the cache of keys and values, if ``model`` has one."""
    return {"use_cache": False} if "use_cache" in inspect.signature(type(model).forward).parameters else {}


def calls_causal_loss(model: nn.Module) -> bool:
    """Whether the forward of ``model`` calls transformers' loss of causal models, which shifts labels.

    The name of the function alone does not tell: it is the default of models that compute a loss of their own.
    """
    return getattr(_called_loss(model), "__name__", "") == "ForCausalLMLoss"


def has_given_loss(model: nn.Module) -> bool:
    """Whether the forward of ``model`` calls a ``loss_function`` that is none of transformers'."""
    function = _called_loss(model)
    return function is not None and not str(getattr(function, "__module__", "")).startswith("transformers.")


def shifts_labels(model: nn.Module) -> bool:
    """Whether the loss of ``model`` shifts labels: transformers' of causal models, one in its place, or its forward."""
    from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

    if has_given_loss(model):
        return LOSS_MAPPING.get(str(model.loss_type), ForCausalLMLoss) is ForCausalLMLoss
    return calls_causal_loss(model) or any("shift_labels" in code.co_varnames for code in _forwards(model))


def _called_loss(model: nn.Module) -> Any:
    """The ``loss_function`` of ``model``, without arguments that change nothing; None if its forward calls none."""
    function: Any = getattr(model, "loss_function", None)
    if isinstance(function, partial) and not function.args and function.keywords in ({}, {"ignore_index": IGNORED}):
        function = function.func
    return function if any("loss_function" in code.co_names for code in _forwards(model)) else None


def _forwards(model: nn.Module) -> list[CodeType]:
    """The code of the forwards of its class and those that it inherits from, behind their decorators."""
    found = [inspect.unwrap(vars(kind)["forward"]) for kind in type(model).__mro__ if "forward" in vars(kind)]
    return [function.__code__ for function in found if isinstance(function, FunctionType)]


Count = Callable[[tuple[Any, ...], Mapping[str, Any]], torch.Tensor | None]
"""The number of labels that count, 0-dim, in the arguments of a model; None without labels."""


def inputs_by_name(model: nn.Module) -> Callable[[tuple[Any, ...], Mapping[str, Any]], dict[str, Any]]:
    """A function that names all arguments of a call of ``model``. It does not keep the model."""
    signature = inspect.signature(type(model).forward)

    def named(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        given = signature.bind_partial(None, *args, **kwargs).arguments
        return {**given, **given.get("kwargs", {})}

    return named


def label_count(model: nn.Module) -> Count:
    """How many labels of a call the loss of ``model`` is the mean over. It does not keep the model.

    None also for a loss of speech that is a mean or a sum over samples.
    """
    named, reduction, ignored = inputs_by_name(model), _reduction(model), _ignored(model)
    # A causal model predicts each token from those before it, so its loss ignores the first; decoders shift the inputs.
    first = int(shifts_labels(model) and not getattr(model.config, "is_encoder_decoder", False))

    def count(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
        number = own_count(args, kwargs)
        return number if number is None or not ACTIVE else ACTIVE[-1].total(number)

    def own_count(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
        given = named(args, kwargs)
        labels, left_out = given.get("labels"), given.get("ignore_index", ignored)
        if labels is None or (reduction is not None and given.get("reduction", reduction) != OVER_LABELS):
            return None
        if first and given.get("shift_labels") is not None:
            return (given["shift_labels"] != left_out).sum()
        return (labels[..., first:] != left_out).sum()

    return count


OVER_LABELS = "mean_volume"
"""The ``reduction`` of transformers' losses of speech that is the mean over labels; others are over samples."""
PADDING = {"ParakeetForRNNTLoss": "blank_token_id", "ParakeetForTDTLoss": "pad_token_id"}
"""What labels of transducers are padded with, by the loss: a key of the configuration."""


def _reduction(model: nn.Module) -> str | None:
    """The ``reduction`` of the loss of speech of ``model``, unless a batch names another; None: it has no such loss."""
    if any("ctc_loss_reduction" in code.co_names for code in _forwards(model)):
        return "mean"  # or "sum", which is over samples too
    function = None if has_given_loss(model) else _called_loss(model)
    parameter = None if function is None else inspect.signature(function).parameters.get("reduction")
    return None if parameter is None else parameter.default


def _ignored(model: nn.Module) -> int:
    """The label that the loss of ``model`` leaves out, unless a batch names another one."""
    function: Any = _called_loss(model)
    padding = PADDING.get(getattr(function, "__name__", ""))
    found: int = getattr(function, "keywords", {}).get("ignore_index", IGNORED)
    return found if padding is None else getattr(model.config, padding)


def counting(model: nn.Module) -> Callable[[tuple[Any, ...], dict[str, Any]], dict[str, Any]]:
    """A function that adds the count of its labels to a call of ``model``: a mean over no label would be NaN.

    It takes the call's arguments, and returns its keyword arguments. It does not keep the model.
    """
    count = label_count(model)
    parameters = inspect.signature(type(model).forward).parameters.values()
    takes_count = any(one.kind is one.VAR_KEYWORD for one in parameters)

    def counted(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        if kwargs.get("num_items_in_batch") is not None:
            raise ConfigError(
                "inputs['num_items_in_batch']: got a value, expected none: the labels of all microbatches, accumulated "
                "batches and data ranks are counted; leave it out"
            )
        number = count(args, kwargs) if takes_count else None
        return kwargs if number is None else {**kwargs, "num_items_in_batch": number.clamp(min=1)}

    return counted


def token_loss(model: nn.Module) -> Callable[[Any, Batch], Any]:
    """A function that finds the loss in an output of ``model``: ``(sum, count)`` over the labels of the microbatch.

    So the loss of a step is the mean over the labels of all microbatches, accumulated batches and data ranks. What the
    model adds to it is weighted in the same way; without labels it has the weight of one.
    """
    count_labels = label_count(model)

    def find(output: Any, microbatch: Batch) -> Any:
        loss, count = getattr(output, "loss", None), count_labels(microbatch.args, microbatch.kwargs)
        if loss is None or count is None:
            return loss
        return summed(loss, count), count

    return find


def main_output(output: Any) -> Any:
    """The hidden states in ``output`` of a stage without the model's head."""
    named = (getattr(output, name, None) for name in ("logits", "last_hidden_state"))
    return next((value for value in named if value is not None), output)
