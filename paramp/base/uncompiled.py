"""Code that neither ``torch.compile`` nor a mode of torch's functions sees."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch

from .torch_internals import expect, take

expect("torch._C.DisableTorchFunction")

Function = TypeVar("Function", bound=Callable[..., Any])
uncompiled: Callable[[Function], Function] = take("torch._compile._disable_dynamo")
"""``torch.compiler.disable``, which would import the compiler at once."""


def unwatched() -> AbstractContextManager[None]:
    """A context in which torch's functions run as they are: for code whose own calls are none of the model's."""
    return torch._C.DisableTorchFunction()
