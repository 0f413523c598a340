"""The base class of the models here: an ``nn.Sequential`` made from a configuration, with named presets."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from numbers import Integral
from typing import Any, ClassVar, Self, TypeVar

import torch
import torch.nn.functional as F
from torch import nn

from ..base.errors import ConfigError, nearest, require

Config = TypeVar("Config")


class PresetModel(nn.Sequential):
    """``layers``, one after the other, of the shape that ``config`` describes."""

    presets: ClassVar[Mapping[str, Any]]

    def __init__(self, config: Any, layers: Mapping[str, nn.Module]) -> None:
        super().__init__(OrderedDict(layers))
        self.config = config

    @classmethod
    def preset(cls, name: str, **changes: object) -> Self:
        """The model of one of :attr:`presets`; ``changes`` replace fields of its config.

        Raises:
            ConfigError: the preset or a field does not exist, or a value is not allowed.
        """
        return cls(choose(cls.presets, name, **changes))  # type: ignore[call-arg]  # subclasses make their layers

    @staticmethod
    def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy in nats of ``logits`` (..., classes) against class indices or token ids (...), int64."""
        return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def is_count(value: object) -> bool:
    """Whether ``value`` is an integer of 1 or more."""
    return not isinstance(value, bool) and isinstance(value, Integral) and int(value) >= 1


def check_counts(config: Any) -> None:
    """Raise a ConfigError unless every ``int`` field of a configuration, all of which are counts, is 1 or more."""
    for field in fields(config):
        value = getattr(config, field.name)
        require(field.type not in ("int", int) or is_count(value), field.name, value, "an integer of 1 or more")


def equal_stages(blocks: Sequence[str], num_stages: int) -> list[str] | None:
    """The blocks that begin the second and each later stage, of equal numbers; None if there are more stages."""
    if num_stages > len(blocks):
        return None
    return [blocks[len(blocks) * stage // num_stages] for stage in range(1, num_stages)]


def choose(presets: Mapping[str, Config], name: str, **changes: object) -> Config:
    """The preset ``name``, with ``changes`` replacing fields; a ConfigError if one of these does not exist."""
    if name not in presets:
        raise ConfigError(f"model: got {name!r}, expected one of {', '.join(presets)}{nearest(name, presets)}")
    preset: Any = presets[name]
    known = [field.name for field in fields(preset)]
    for change, value in changes.items():
        if change not in known:
            raise ConfigError(
                f"{change}: got {value!r}, but {type(preset).__name__} has no such field; expected one of "
                f"{', '.join(known)}{nearest(change, known)}"
            )
    changed: Config = replace(preset, **changes)
    return changed
