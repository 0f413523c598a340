"""The plan of a model that computes in slices, on one tensor rank as on several, and what cannot be cut."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from ..base.errors import ConfigError
from ..base.module_surgery import PassThrough
from ..parallel.tensor.colwise_and_rowwise import (
    SEQUENCE,
    Colwise,
    PackedColwise,
    PackedRowwise,
    Rowwise,
    has_forward_of,
    is_conv1d,
)
from ..parallel.tensor.styles import GatherSequence, ScatterSequence, ShardedRandom, SliceOfSequence, WholeSequence
from .exact_experts import ExactExperts
from .forwards_in_microchunk import Forwards
from .styles_of_sliced_layers import SlicedColwise, SlicedRows, SlicedRowwise, SlicedSequence, SlicedStyle


def sliced_plan(
    model: nn.Module,
    styles: Mapping[str, ParallelStyle],
    with_sequence: Mapping[str, ParallelStyle],
    forwards: Forwards,
) -> dict[str, ParallelStyle]:
    """The styles in slices for ``styles``, those of the layout.

    Args:
        with_sequence: the styles under sequence parallelism. What that applies to slices of the sequence is cut in
            every layout.

    Raises:
        ConfigError: a style or a layer cannot be cut.
    """
    found = {name: _sliced(name, model.get_submodule(name), style, forwards) for name, style in styles.items()}
    for name, style in with_sequence.items():
        module = model.get_submodule(name)
        if name not in found and isinstance(style, SliceOfSequence) and module._parameters:
            found[name] = SlicedSequence(forwards)
    for name, style in found.items():
        if isinstance(style, SlicedStyle):
            style.check(name, model.get_submodule(name))
    _check_slices_of_sequence(model, styles)
    return {
        name: style
        for name, style in found.items()
        if forwards.layout.tensor_size > 1 or isinstance(style, SlicedStyle)
    }


def _check_slices_of_sequence(model: nn.Module, styles: Mapping[str, ParallelStyle]) -> None:
    """Raise a ConfigError for a parameter whose gradient each tensor rank would have for its slice of the sequence."""
    beside = {name.rpartition(".")[0] for name, style in styles.items() if isinstance(style, SliceOfSequence)}
    for name, style in styles.items():
        if isinstance(style, (Colwise, Rowwise)) and SEQUENCE in (style.input_layouts[0], style.output_layouts[0]):
            parent = name.rpartition(".")[0]
            beside |= {parent, parent.rpartition(".")[0]}
    beside.discard("")
    for name, module in model.named_modules():
        around = {".".join(name.split(".")[:count]) for count in range(1, name.count(".") + 2)}
        is_alone = name not in styles or type(styles[name]) is ShardedRandom
        if any(isinstance(styles.get(one), WholeSequence) for one in (name, *around)):
            continue
        if is_alone and module._parameters and around & beside:
            raise ConfigError(
                f"reproducible: {name!r}, a {type(module).__name__} with parameters, is beside modules that are "
                "applied to slices of the sequence, but the plan does not say what it is applied to; give it a style, "
                "such as 'sequence', or set parallel.sequence_parallel to False"
            )


def _sliced(name: str, module: nn.Module, style: ParallelStyle, forwards: Forwards) -> ParallelStyle:
    if forwards.layout.sequence_parallel and type(style) is ShardedRandom and ".lora_dropout." in name:
        raise ConfigError(
            f"reproducible: {name!r} is dropout of what is sharded over the sequence in some layers and over the "
            "features in others, expected none under parallel.sequence_parallel; set lora_dropout to 0"
        )
    if isinstance(style, (ShardedRandom, ScatterSequence, GatherSequence, WholeSequence)):
        return style
    if type(style) is SliceOfSequence and not any(True for child in module.children() for _ in child.parameters()):
        return SlicedSequence(forwards, sequence=True) if module._parameters else ShardedRandom()
    is_linear = has_forward_of(module, nn.Linear)
    if type(style) is Colwise and is_linear:
        layout, own = style.input_layouts[0], style.use_local_output
        gathers = style.output_layouts[0].is_replicate()
        return SlicedColwise(forwards, sequence=not layout.is_replicate(), gathers=gathers, logits=not own)
    if type(style) is Rowwise:
        sequence, scatters = not style.output_layouts[0].is_replicate(), style.input_layouts[0].is_replicate()
        if is_linear:
            return SlicedRowwise(forwards, sequence=sequence, scatters=scatters)
        if has_forward_of(module, nn.Embedding):
            return SlicedRows(forwards, sequence=sequence)
    if is_linear or is_conv1d(module):
        if type(style) is PackedRowwise:
            return SlicedRowwise(forwards, parts=style.parts)
        if type(style) is PackedColwise:
            return SlicedColwise(forwards, parts=style.parts)
    raise ConfigError(
        f"reproducible: the plan has for {name!r}, a {type(module).__name__}, the style {type(style).__name__}, which "
        "cannot be computed in slices; leave it out of the plan (plan={} for a model without tensor ranks), or set "
        "reproducible to False"
    )


def apply_sliced_plan(module: nn.Module, styles: Mapping[str, ParallelStyle]) -> None:
    """Apply ``styles`` to the submodules of a stage on one tensor rank."""
    own = dict(module.named_modules())
    for name, style in styles.items():
        if name in own and not isinstance(own[name], PassThrough):
            assert isinstance(style, (SlicedStyle, ExactExperts))
            style._apply(own[name], None)
