"""Attributes of modules that a forward reads and sets while it is traced.

A graph repeats neither: what the code between modules has read is the same in each run, and what it has set is lost.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import fx, nn

from ..base.replaced_in_torch import patched
from ..base.torch_internals import take
from .traced_values import line_of, users_frame

tree_leaves = take("torch.utils._pytree.tree_leaves")

CONSTANT = "_tensor_constant"
"""What the names begin with that fx gives to tensors which no module has, as attributes of the model."""
OF_ALL = frozenset(vars(nn.Module()))
"""The names of the attributes that every module has."""
SET_ATTRIBUTE = nn.Module.__setattr__


class Attributes:
    """The attributes of a model's modules that one trace of its forward reads and sets."""

    def __init__(self) -> None:
        self._reads: dict[tuple[nn.Module, str], str] = {}
        """Those that were read before the forward had set them, and the lines."""
        self._kept: dict[tuple[nn.Module, str], Any] = {}
        """Those that the forward has set, and what they were then."""

    @contextmanager
    def following(self, model: nn.Module) -> Iterator[None]:
        """A context of a trace. On exit the attributes are as before; the constants that the trace has made stay."""
        before = {module: dict(vars(module)) for module in model.modules()}

        def read(module: nn.Module, name: str) -> Any:
            key = (module, name)
            if name not in OF_ALL and not name.startswith("__") and module in before and key not in self._kept:
                frame = None if key in self._reads else users_frame()
                if frame is not None:
                    self._reads[key] = line_of(frame)
            return object.__getattribute__(module, name)

        def write(module: nn.Module, name: str, value: Any) -> None:
            if not name.startswith(CONSTANT):
                self._kept[module, name] = value
            SET_ATTRIBUTE(module, name, value)

        try:
            with patched(nn.Module, "__getattribute__", read), patched(nn.Module, "__setattr__", write):
                yield
        finally:
            for module, own in before.items():
                table = vars(module)
                own |= {name: value for name, value in table.items() if name.startswith(CONSTANT)}
                table.clear()
                table.update(own)

    def read_of_calls(self, model: nn.Module, opened: frozenset[str]) -> dict[str, str]:
        """The attributes that were read of modules that are calls, neither ``model`` nor ``opened``, with the lines.

        Raises a TraceError for one that the forward has read, and then set to what it computes.
        """
        names = {module: name for name, module in model.named_modules()}
        full = {key: f"{names[key[0]]}.{key[1]}".lstrip(".") for key in self._reads}
        for key, line in self._reads.items():
            if any(isinstance(leaf, fx.Proxy) for leaf in tree_leaves(self._kept.get(key))):
                raise fx.proxy.TraceError(
                    f"it reads {full[key]!r} {line}, and then sets it to what it computes of a batch, which tracing "
                    "does not keep for the next one; compute it in each batch, or in a submodule, which keeps it"
                )
        return {full[key]: line for key, line in self._reads.items() if names[key[0]] not in ("", *opened)}
