"""Colossal-AI's mixed precision without an engine (:mod:`paramp.compat.colossalai.amp`)."""

from .compat.colossalai.amp import *  # noqa: F403
from .compat.colossalai.amp import __all__ as __all__
