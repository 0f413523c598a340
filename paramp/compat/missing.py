"""Names of another library that are not available here: importing one raises an error that names the replacement."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def missing(module: str, instead: Mapping[str, str], otherwise: str | None = None) -> Callable[[str], Any]:
    """The ``__getattr__`` of ``module`` for names that it does not have.

    Args:
        instead: for each known name, what to use.
        otherwise: the same for every other name. None: these are ordinary AttributeErrors.

    Returns:
        A function that raises: an ImportError, because ``from module import name`` hides the text of an AttributeError.
    """

    def getattribute(name: str) -> Any:
        use = instead.get(name, None if name.startswith("_") else otherwise)
        if use is None:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        raise ImportError(f"{module} has no {name}: {use}", name=module)

    return getattribute
