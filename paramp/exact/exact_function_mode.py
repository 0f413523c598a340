"""What the code of a model calls of torch, run so that its bits do not depend on the layout.

A mode of torch's functions, active around the forward of a microchunk, and around the backward, in which activation
checkpointing computes forwards again. Attention runs in one call for each key/value head, products of batches in one
for each matrix, elementwise functions on padded memory, dropout with masks of the global batch. On activations whose
features are sharded over tensor ranks it refuses functions whose result would differ there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ..base.dtensor import is_dtensor
from ..base.errors import ConfigError
from ..base.replaced_in_torch import redispatch_function
from ..base.torch_internals import expect
from ..distributed.token_positions import ACTIVE
from . import attention as products
from . import covered_functions as names
from .calls_that_divide_features import check_broadcast, divided_features
from .dropout_masks import Masks
from .elementwise import elementwise, expanded, gated, with_expanded_operands
from .forwards_in_microchunk import Forwards

if TYPE_CHECKING:
    from .exact_sequence_axis import ExactSequenceAxis

expect("torch._ops")
_OF_PARAMETERS = "data_ptr", "size", "stride", "dim", "numel", "is_floating_point", "register_hook", "__set__"
"""Functions of parameters that read no values."""
Call = Callable[..., Any]


class ExactFunctions(TorchFunctionMode):
    """The mode for a model whose ``forwards`` run.

    Args:
        masks: of its dropout.
        sequences: how sequences are cut; None: they are whole.
        replaced: functions of torch, and what is called instead of them, with the same arguments.
    """

    def __init__(
        self,
        forwards: Forwards,
        masks: Masks,
        replaced: Mapping[Call, Call] | None = None,
        sequences: ExactSequenceAxis | None = None,
    ) -> None:
        super().__init__()
        self._forwards, self._masks, self._sequences = forwards, masks, sequences
        self._tensor_size = forwards.layout.tensor_size
        self._replaced = dict(replaced or {})
        self._rules = self._made_rules()

    @property
    def _module(self) -> str:
        return self._forwards.module

    @property
    def _is_sharded(self) -> bool:
        return self._forwards.is_sharded

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = func.overloadpacket if isinstance(func, torch._ops.OpOverload) else func
        name, kwargs = func.__name__, kwargs or {}
        if name == "__get__":  # attributes: most of the calls, and none has bits
            return func(*args, **kwargs)
        if self._is_sharded:
            self._check_parameters(name, [*args, *kwargs.values()])
            self._check_features(name, args, kwargs)
        if self._forwards.sees_parts and name not in _OF_PARAMETERS:
            self._check_tokens(name, [*args, *kwargs.values()])
        if name in names.SHAPES:
            return func(*args, **kwargs)
        if func in self._replaced:
            return self._replaced[func](*args, **kwargs)
        rule = self._rules.get(name)
        if isinstance(func, FunctionType) and name not in names.REFUSED:
            with self:  # it is opened, so that what it calls comes here
                return redispatch_function(func, types, args, kwargs)
        if any(map(is_dtensor, args)):
            return self._of_logits(func, args, kwargs)
        return self._others(func, args, kwargs) if rule is None else rule(func, args, kwargs)

    def _of_logits(self, func: Call, args: Any, kwargs: Any) -> Any:
        """Functions of logits whose vocabulary is sharded over tensor ranks."""
        name = func.__name__
        is_exact = name in names.EXACT or (name in names.ARITHMETIC and kwargs.get("alpha", 1) in (1, -1))
        sharded = (one for one in args if is_dtensor(one) and any(kind.is_shard() for kind in one.placements))
        if not is_exact and next(sharded, None) is not None:
            raise ConfigError(
                f"reproducible: {name} in {self._module} got logits whose vocabulary is sharded over tensor "
                "ranks, expected cross_entropy or elementwise arithmetic; give the logits' module the style "
                "'colwise_gather' in the plan"
            )
        return func(*args, **kwargs)

    def _made_rules(self) -> dict[str, Callable[[Call, Any, Any], Any]]:
        return {
            **dict.fromkeys(names.ELEMENTWISE, self._elementwise),
            **dict.fromkeys(names.ARITHMETIC, self._arithmetic),
            **dict.fromkeys((*names.RANDOM, *names.RANDOM_IN_TRAINING), self._random),
            **dict.fromkeys(names.LAST_DIM, self._last_dim),
            **dict.fromkeys(names.PRODUCTS, self._product),
            **dict.fromkeys(names.REFUSED, self._refused),
            **dict.fromkeys(("dropout", "dropout_", "feature_dropout", "feature_dropout_"), self._dropout),
            **dict.fromkeys(("expand", "expand_as", "broadcast_to"), self._expand),
            "scaled_dot_product_attention": self._attention,
            "glu": self._glu,
        }

    def _elementwise(self, func: Call, args: Any, kwargs: Any) -> Any:
        if "out" in kwargs:
            raise ConfigError(
                f"reproducible: {func.__name__} in {self._module} got out=, expected none; use what it returns"
            )
        return elementwise(func, args, kwargs)

    def _arithmetic(self, func: Call, args: Any, kwargs: Any) -> Any:
        if kwargs.get("alpha", 1) not in (1, -1) or kwargs.get("rounding_mode") is not None:
            return self._elementwise(func, args, kwargs)  # in vectors a fused multiply-add
        if not (self._forwards.fused or self._forwards.sees_parts) or "out" in kwargs:
            return func(*args, **kwargs)
        if self._is_sharded:
            check_broadcast(
                f"{func.__name__} in {self._module}",
                [value for value in args if isinstance(value, torch.Tensor)],
            )
        return with_expanded_operands(func, args, kwargs)

    def _expand(self, func: Call, args: Any, kwargs: Any) -> Any:
        if not args or not args[0].requires_grad:
            return func(*args, **kwargs)
        sizes = func(args[0].detach(), *args[1:], **kwargs).shape
        return args[0].view_as(args[0]) if sizes == args[0].shape else expanded(args[0], sizes)

    def _attention(self, func: Call, args: Any, kwargs: Any) -> Any:
        mask = kwargs["attn_mask"] if "attn_mask" in kwargs else args[3] if len(args) > 3 else None
        if mask is not None and mask.requires_grad and self._is_sharded and (mask.ndim < 3 or mask.shape[-3] == 1):
            raise ConfigError(
                f"reproducible: scaled_dot_product_attention in {self._module} got an attn_mask of the shape "
                f"{(*mask.shape,)} that requires gradients, expected one for each head where heads are sharded"
            )
        self._check_whole_code("attention")
        if self._sequences is not None and ACTIVE:
            return self._sequences.scaled_dot_product_attention(*args, **kwargs)
        return products.attention(self._masks.attention_noise, *args, **kwargs)

    def _product(self, func: Call, args: Any, kwargs: Any) -> Any:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        if "out" in kwargs or min(tensor.ndim for tensor in tensors[-2:]) < 3:
            return self._others(func, args, kwargs)
        if self._forwards.sees_parts and tensors[-2].shape[-1] != 1:  # a product of one term is rounded once
            return self._others(func, args, kwargs)
        return (products.baddbmm if func.__name__ == "baddbmm" else products.matmul)(*args, **_renamed(kwargs))

    def _glu(self, func: Call, args: Any, kwargs: Any) -> Any:
        input, dim = _bound(args, kwargs, input=None, dim=-1)
        return gated(input, dim, lambda half: elementwise(torch.sigmoid, (half,), {}))

    def _dropout(self, func: Call, args: Any, kwargs: Any) -> Any:
        input, p, train = _bound(args, kwargs, input=None, p=0.5, train=True)
        if not train or not p:
            return func(*args, **kwargs)
        self._check_whole_code("dropout")
        output = self._masks.dropout(input, p, features=func.__name__.startswith("feature"))
        return input.copy_(output) if func.__name__.endswith("_") else output

    def _random(self, func: Call, args: Any, kwargs: Any) -> Any:
        index = names.RANDOM_IN_TRAINING.get(func.__name__)
        if index is not None and not kwargs.get("training", kwargs.get("train", args[index : index + 1] == (True,))):
            return self._elementwise(func, args, kwargs) if "rrelu" in func.__name__ else func(*args, **kwargs)
        raise ConfigError(
            f"reproducible: {func.__name__} in {self._module} draws random numbers that depend on the layout, "
            "expected none in a forward but dropout; use F.dropout or nn.Dropout, or draw before training"
        )

    def _last_dim(self, func: Call, args: Any, kwargs: Any) -> Any:
        dim = kwargs["dim"] if "dim" in kwargs else args[names.LAST_DIM[func.__name__]]
        return func(*args, **kwargs) if dim in (-1, args[0].ndim - 1) else self._others(func, args, kwargs)

    def _refused(self, func: Call, args: Any, kwargs: Any) -> Any:
        raise ConfigError(
            f"reproducible: {func.__name__} in {self._module} has bits that depend on the layout; use "
            f"{names.REFUSED[func.__name__]}"
        )

    def _others(self, func: Call, args: Any, kwargs: Any) -> Any:
        """Functions that only run where each tensor rank has whole features."""
        if self._forwards.sees_parts and func.__name__ not in names.EXACT - {"linear"}:
            floating = [one for one in args if isinstance(one, torch.Tensor) and one.is_floating_point()]
            if floating:
                raise ConfigError(
                    f"reproducible.sequence_slices: {func.__name__} in {self._module} got tokens whose number differs "
                    "between ranks of the context axis, expected elementwise functions, attention, softmax over the "
                    "last dim and dropout; call it in a module that has parameters of its own, which computes slices, "
                    "or set it to 1"
                )
        of_two = func.__name__ in ("max", "min") and len(args) > 1 and isinstance(args[1], torch.Tensor)
        if self._is_sharded and func.__name__ not in names.EXACT and not of_two:
            raise ConfigError(
                f"reproducible: {func.__name__} in {self._module} got activations that are sharded over "
                f"{self._tensor_size} tensor ranks, between a colwise and a rowwise layer, expected "
                "elementwise functions, attention, softmax over the last dim, products of batches and dropout; "
                "call it behind the rowwise layer, or leave these layers out of the plan"
            )
        return func(*args, **kwargs)

    def _check_whole_code(self, name: str) -> None:
        """Raise a ConfigError for what is defined over the whole sequence, and called with one slice of it."""
        if self._forwards.slicing:
            raise ConfigError(
                f"reproducible.sequence_slices: {name} in {self._module}, which computes one slice of the sequence at "
                "a time, expected it outside of modules that have parameters of their own, and of mixtures of experts; "
                "or set it to 1"
            )

    def _check_tokens(self, name: str, args: Any) -> None:
        """Raise a ConfigError for a parameter whose gradient would be added up over this rank's tokens."""
        if any(isinstance(value, nn.Parameter) and value.requires_grad for value in args):
            raise ConfigError(
                f"reproducible.sequence_slices: {name} in {self._module} got a parameter of another module, expected "
                "it in the forward of the module that has it, which computes slices; or set it to 1"
            )

    def _check_features(self, name: str, args: Any, kwargs: Any) -> None:
        """Raise a ConfigError for what divides or reorders features, of which each tensor rank has some."""
        divided = divided_features(name, args, kwargs)
        if divided is not None and divided != self._forwards.fused:
            raise ConfigError(
                f"reproducible: {name} in {self._module} divides or reorders features between a colwise and a "
                f"rowwise layer, of which each of {self._tensor_size} tensor ranks has some only; give the "
                "colwise layer the style 'packed_colwise_2' or 'packed_colwise_3' if its outputs are fused ones, "
                "write -1 for the number of heads, of which a rank has some, and do not join outputs of two layers"
            )

    def _check_parameters(self, name: str, args: Any) -> None:
        """Raise a ConfigError for a parameter whose gradient each tensor rank would have for its features.

        A linear layer that is not in the plan takes what is replicated, as LoRA's beside a sharded one: else its sizes
        would not fit, but for one of each head.
        """
        if name == "linear" and args[0].ndim <= 3:
            return
        if any(isinstance(value, nn.Parameter) and value.requires_grad for value in args):
            raise ConfigError(
                f"reproducible: {name} in {self._module} got a parameter between a colwise and a rowwise layer, "
                f"where each of {self._tensor_size} tensor ranks has its own features, so that its gradient would "
                "be a part; apply it behind the rowwise layer, or leave these layers out of the plan"
            )


def _bound(args: Any, kwargs: Mapping[str, Any], **defaults: Any) -> tuple[Any, ...]:
    """The arguments of a call, in the order of ``defaults``; ``training`` is torch's other name of ``train``."""
    kwargs = {"train" if name == "training" else name: value for name, value in kwargs.items()}
    return (*args, *[kwargs.get(name, default) for name, default in [*defaults.items()][len(args) :]])


def _renamed(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The operands of a product under the names that :mod:`.attention` gives them."""
    new = {"self": "left", "input": "left", "other": "right", "tensor2": "right", "mat2": "right"}
    return {**kwargs} if "batch1" in kwargs else {new.get(name, name): value for name, value in kwargs.items()}
