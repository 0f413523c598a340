"""A batch: positional and keyword inputs of the model, and a target, which are trees of tensors; and its microbatches.

The batch is in dim 0. Its size is that of the first positional tensor, else of the first tensor of the target, else of
the first keyword tensor that has more than 1 there. A tensor of this size is split. What is no tensor, has no dims or
has 1 in dim 0 goes whole to every microbatch, and so does a tensor in :func:`whole`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch

from ..base.errors import ConfigError
from ..base.trees import leaves, map_leaves


class Whole:
    """A tensor that every microbatch gets whole; :func:`whole` makes one."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def whole(tensor: torch.Tensor) -> Any:
    """Mark an input, such as a mask of dims (T, T), that is not split along dim 0 into microbatches.

    It is for ``inputs`` and ``target`` of :meth:`Engine.forward_backward` and the like; the model gets ``tensor``.

    Raises:
        ConfigError: ``tensor`` is not a tensor.
    """
    if not isinstance(tensor, torch.Tensor):
        raise ConfigError(f"whole: got {type(tensor).__name__}, expected a tensor")
    return Whole(tensor)


@dataclass(frozen=True)
class Batch:
    """The part of one data rank, or one microbatch of it."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    target: Any = None

    @staticmethod
    def of(inputs: Any, target: Any = None) -> Batch:
        """The batch of ``inputs``: a tensor, a tuple or list (positional), a mapping (keywords), or a batch already.

        Raises:
            ConfigError: ``inputs`` is something else.
        """
        if isinstance(inputs, Batch):
            return inputs
        if isinstance(inputs, Mapping) and all(isinstance(name, str) for name in inputs):
            return Batch((), dict(inputs), target)
        if isinstance(inputs, (tuple, list)):
            return Batch(tuple(inputs), {}, target)
        if not isinstance(inputs, (torch.Tensor, Whole)):
            raise ConfigError(
                f"inputs: got {type(inputs).__name__}, expected a tensor, a tuple of the model's positional inputs or "
                "a mapping of its keyword inputs, with the batch in dim 0"
            )
        return Batch((inputs,), {}, target)

    @staticmethod
    def called_with(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Batch:
        """The batch of a call: of one tuple, list or mapping as :meth:`of`, else of arguments as a model takes them.

        A named tuple is one argument.
        """
        if len(args) == 1 and not kwargs and (type(args[0]) in (tuple, list) or isinstance(args[0], Mapping)):
            return Batch.of(args[0])
        return Batch(args, kwargs)

    def __str__(self) -> str:
        """The shapes of the inputs, for messages."""
        return ", ".join(
            f"{path} {tuple(leaf.shape)}" for path, leaf in self.inputs() if isinstance(leaf, torch.Tensor)
        )

    def leaves(self) -> Iterator[tuple[str, Any]]:
        """The path and value of each leaf: of positional inputs, keyword inputs, target."""
        return chain(self.inputs(), leaves(self.target, "target"))

    def inputs(self) -> Iterator[tuple[str, Any]]:
        """The path and value of each leaf of the inputs."""
        return chain(leaves(self.args, "inputs"), leaves(self.kwargs, "inputs"))

    @property
    def size(self) -> int:
        """The number of samples.

        Raises:
            ConfigError: there is no tensor to read it from.
        """
        return self._first()[1]

    def _first(self) -> tuple[str, int]:
        """The path of the tensor that has the number of samples in dim 0, and this number."""
        for one in chain(_sizes(self.args, "inputs"), _sizes(self.target, "target")):
            return one
        kwargs = [*_sizes(self.kwargs, "inputs")]
        if not kwargs:
            raise ConfigError("inputs: got no tensor with dims, expected at least one with the batch in dim 0")
        return next((one for one in kwargs if one[1] != 1), kwargs[0])

    def split(self, num_microbatches: int) -> list[Batch]:
        """The microbatches: equal parts along dim 0.

        Raises:
            ConfigError: the size is no multiple of their number, or a tensor has another size in dim 0.
        """
        first, size = self._first()
        if size == 0 or size % num_microbatches:
            raise ConfigError(
                f"batch: got {size} samples on each data rank, expected a multiple of the {num_microbatches} "
                "microbatches (parallel.pipeline.microbatches)"
            )
        each = size // num_microbatches

        def microbatch(rows: slice) -> Batch:
            return self._mapped(lambda path, leaf: _unwrapped(_rows(path, leaf, size, first, rows)))

        return [microbatch(slice(start, start + each)) for start in range(0, size, each)]

    def rows(self, rows: slice | list[int]) -> Batch:
        """The samples ``rows``, as a batch.

        Raises:
            ConfigError: a tensor does not have the batch's size in dim 0.
        """
        first, size = self._first()
        return self._mapped(lambda path, leaf: _rows(path, leaf, size, first, rows))

    def unwrapped(self) -> Batch:
        """The batch as one microbatch, of whatever sizes."""
        return self._mapped(lambda _, leaf: _unwrapped(leaf))

    def _mapped(self, function: Callable[[str, Any], Any]) -> Batch:
        args, kwargs = (map_leaves(function, tree, "inputs") for tree in (self.args, self.kwargs))
        return Batch(args, kwargs, map_leaves(function, self.target, "target"))


def _unwrapped(leaf: Any) -> Any:
    return leaf.tensor if isinstance(leaf, Whole) else leaf


def _sizes(tree: Any, path: str) -> Iterator[tuple[str, int]]:
    """The path of each tensor with dims in ``tree``, and its size in dim 0."""
    return (
        (inner, leaf.shape[0]) for inner, leaf in leaves(tree, path) if isinstance(leaf, torch.Tensor) and leaf.ndim
    )


def _rows(path: str, leaf: Any, size: int, first: str, rows: slice | list[int]) -> Any:
    """What the samples ``rows`` get of a leaf of a batch of ``size`` samples, which is that of the tensor ``first``."""
    if not isinstance(leaf, torch.Tensor):
        if hasattr(leaf, "__array__") and getattr(leaf, "shape", None) != ():
            raise ConfigError(f"{path}: got {type(leaf).__name__}, expected a tensor; convert it with torch.as_tensor")
        return leaf.item() if hasattr(leaf, "__array__") else leaf  # a scalar of NumPy, or a number
    if leaf.ndim == 0 or (leaf.shape[0] == 1 and size != 1):
        return leaf
    if leaf.shape[0] != size:
        raise ConfigError(
            f"{path}: got shape {tuple(leaf.shape)}, expected {size} samples in dim 0, as in {first}, or 1; mark a "
            "tensor that is not split into microbatches with paramp.whole(tensor)"
        )
    return leaf if rows == slice(0, size) else leaf[rows]
