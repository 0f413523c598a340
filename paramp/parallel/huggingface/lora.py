"""LoRA layers of peft: a layer with two small ones beside it, of which plans and files know only the layer.

The output is that of ``base_layer`` plus that of ``lora_B(lora_A(dropout(x)))``. A plan entry for the layer extends to
them, so that both outputs have one layout::

    colwise   x replicated ─► lora_A, whole ─► hidden, replicated ─► lora_B, outputs sharded ─► sharded
    rowwise   x sharded ─► lora_A, inputs sharded ─► hidden, summed ─► lora_B, whole ─► replicated

No gradient is partial there: each half sums over ranks what it passes on, in one direction. It is partial where the
layer's input or output is a slice of the sequence, of the half that is applied to the slice.
"""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ...base.errors import ConfigError
from ...base.module_surgery import check_forward_of_class, copy_on_meta, replace_forward, shallow_copy
from ..materialize import outline
from ..partition import Partition

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle

PREFIX = "base_model.model."
"""The names of a model's modules, in the ``PeftModel`` around it, start with this."""
WHOLE = "_whole_on_meta"
"""An attribute of each stage: the whole model, on ``meta``."""


def is_of_peft(module: nn.Module, kind: str) -> bool:
    """Whether ``module`` is of the class ``kind`` of peft, which need not be installed."""
    return any(base.__name__ == kind and base.__module__.startswith("peft.") for base in type(module).__mro__)


# ------------------------------------------------------------------------------------------------------------- plans


def without_adapters(model: nn.Module) -> nn.Module:
    """A copy of ``model``, with the same tensors, whose adapted layers are as they were before peft wrapped them."""
    plain = outline(model)
    for module in plain.modules():
        for name, child in module._modules.items():
            while child is not None and (inside := _wrapped(child)):
                child = child.get_submodule(inside)
            module._modules[name] = child
    return plain


def _wrapped(layer: nn.Module) -> str | None:
    """The name of the layer in ``layer`` that peft has wrapped; None if it has not."""
    if is_of_peft(layer, "BaseTunerLayer"):
        return "base_layer"
    return "original_module" if is_of_peft(layer, "ModulesToSaveWrapper") else None


def original_name(name: str) -> str:
    """The name of a tensor before peft wrapped its layer, or of the one that it is a copy of."""
    name = name.removeprefix(PREFIX)
    return re.sub(r"\.(base_layer|original_module|modules_to_save\.[^.]+)(?=\.)", "", name)


def extend_to_adapters(model: nn.Module, styles: Mapping[str, ParallelStyle]) -> dict[str, ParallelStyle]:
    """``styles``, where the modules in an adapted layer of ``model`` have styles in its place, or their own.

    Raises:
        ConfigError: an adapter other than LoRA, or a variant such as DoRA, which needs the whole weight.
    """
    extended: dict[str, ParallelStyle] = {}
    for name, style in styles.items():
        parts = dict(_parts(name, model.get_submodule(name), style))
        extended |= {part: own for part, own in parts.items() if part == name or part not in styles}
    return extended


def _parts(name: str, layer: nn.Module, style: ParallelStyle) -> Iterator[tuple[str, ParallelStyle]]:
    """The modules in ``layer``, called ``name``, that have a style if the layer has ``style``, with theirs."""
    from ..tensor.styles import PartialGradient, ReplicatedRandom, ShardedRandom, sharded_dim

    dim, inside = sharded_dim(style), _wrapped(layer)
    if inside is None or (dim is None and not isinstance(style, PartialGradient)):
        yield name, style
        return
    yield f"{name}.{inside}", style
    if inside == "original_module":
        yield from ((f"{name}.modules_to_save.{key}", style) for key in _keys(layer, "modules_to_save"))
        return
    _check_plain(name, layer, style)
    of_input, of_output = _are_whole(style)
    for half, is_sharded, is_whole in (("lora_A", dim == 1, of_input), ("lora_B", dim == 0, of_output)):
        for key in _keys(layer, half):
            if is_sharded or not is_whole:
                yield f"{name}.{half}.{key}", style if is_sharded else PartialGradient()
    for key in _keys(layer, "lora_dropout"):
        if isinstance(layer.get_submodule(f"lora_dropout.{key}"), nn.Dropout):
            yield f"{name}.lora_dropout.{key}", ReplicatedRandom() if of_input else ShardedRandom()


def _keys(layer: nn.Module, own: str) -> list[str]:
    """The names of the adapters in ``own``, a dict of modules of ``layer``."""
    return [key for key, _ in layer.get_submodule(own).named_children()]


def _are_whole(style: ParallelStyle) -> tuple[bool, bool]:
    """Whether the input and the output of a layer with ``style`` are replicated over the tensor axis."""
    from ..tensor.colwise_and_rowwise import PackedColwise, PackedRowwise
    from ..tensor.styles import PartialGradient

    if isinstance(style, PartialGradient):
        return False, False
    if isinstance(style, PackedColwise):
        return not isinstance(style, PackedRowwise), isinstance(style, PackedRowwise)
    layouts: Any = style
    return layouts.input_layouts[0].is_replicate(), layouts.output_layouts[0].is_replicate()


def _check_plain(name: str, layer: nn.Module, style: ParallelStyle) -> None:
    """Check that ``layer`` is adapted by LoRA alone, whose halves fit the layer's ``style``."""
    variants = sorted(type(one).__name__ for one in getattr(layer, "lora_variant", {}).values())
    is_lora = is_of_peft(layer, "LoraLayer") and not variants
    of_embedding = len(getattr(layer, "lora_embedding_A", ())) > 0 and _are_whole(style)[1]
    if not is_lora or not (of_embedding or _keys(layer, "lora_A")):
        kind = f"{type(layer).__module__}.{type(layer).__name__}{''.join(f' with {one}' for one in variants)}"
        raise ConfigError(
            f"plan: {name!r} is a {kind}, which cannot be sharded, expected LoRA of a Linear or of an Embedding with "
            "replicated outputs, without variants such as use_dora; or set parallel.tensor.size to 1"
        )


# ------------------------------------------------------------------------------------------------------------- stages


class WrappedPartition:
    """The ``partition`` of the model in ``wrapper``, a ``PeftModel``; each stage has the same wrapper."""

    def __init__(self, wrapper: nn.Module, partition: Partition) -> None:
        self._wrapper, self._partition = wrapper, partition
        self.units = [(f"{PREFIX}{name}", module) for name, module in partition.units]
        self.opened = frozenset(f"{PREFIX}{name}" for name in partition.opened)

    def stages(self, plan: Sequence[Sequence[str]]) -> list[nn.Module]:
        stages = self._partition.stages([[name.removeprefix(PREFIX) for name in names] for names in plan])
        whole = copy_on_meta(self._wrapper)
        return [wrapped(self._wrapper, stage, whole) for stage in stages]


def wrapped(wrapper: nn.Module, stage: nn.Module, whole: nn.Module | None = None) -> nn.Module:
    """A copy of ``wrapper``, a ``PeftModel``, around ``stage``, which it calls. ``whole``: a copy of it on ``meta``."""
    check_forward_of_class("", wrapper)

    def forward(self: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        return self.get_submodule("base_model.model")(*args, **kwargs)

    own, given = (inspect.signature(one) for one in (forward, stage.forward))
    parameters = [own.parameters["self"], *given.parameters.values()]
    forward.__signature__ = given.replace(parameters=parameters)  # type: ignore[attr-defined]
    changed = replace_forward(shallow_copy(wrapper), forward)
    tuner = shallow_copy(wrapper.get_submodule("base_model"))
    tuner._modules = {**tuner._modules, "model": stage}
    changed._modules = {**changed._modules, "base_model": tuner}
    changed.__dict__[WHOLE] = whole or copy_on_meta(wrapper)
    return changed


def write_adapters(module: nn.Module, weights: dict[str, torch.Tensor], folder: Path) -> None:
    """Write the adapters in ``weights``, full tensors by name, to a folder that ``PeftModel.from_pretrained`` reads.

    Args:
        module: the ``PeftModel``, or one of its pipeline stages.
        weights: on the CPU.
    """
    whole: Any = module.__dict__[WHOLE]
    whole.save_pretrained(str(folder), state_dict=weights)


def written_of_adapters(whole: Any, weights: dict[str, torch.Tensor]) -> Collection[str]:
    """The names of those of ``weights`` that peft writes of the adapters of ``whole``, and what it keeps with them.

    All, if it writes a tensor that is none of them.
    """
    from peft import get_peft_model_state_dict

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what it writes; it warns again when it does
        of_adapters = [get_peft_model_state_dict(whole, weights, name) for name in whole.peft_config]
    written = {value.data_ptr() for one in of_adapters for value in one.values()}
    names = {name for name, value in weights.items() if value.data_ptr() in written}
    return names if written <= {weights[name].data_ptr() for name in names} else weights


def check_filled(model: nn.Module) -> None:
    """Raise a ConfigError for an adapter on ``meta``: what fills the model does not know how adapters start."""
    for name, parameter in model.named_parameters():
        if parameter.is_meta and re.search(r"\.lora_(embedding_)?[AB]\.|\.lora_magnitude_vector\.", name):
            raise ConfigError(
                f"model: {name!r} is on the meta device, expected an adapter with values; build the model on the CPU"
            )
