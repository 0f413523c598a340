"""Functions that run outside of the graphs of ``torch.compile``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from .torch_internals import take

Function = TypeVar("Function", bound=Callable[..., Any])
uncompiled: Callable[[Function], Function] = take("torch._compile._disable_dynamo")
"""``torch.compiler.disable``, which would import the compiler at once."""
