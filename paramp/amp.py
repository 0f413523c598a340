"""Mixed precision without an engine, for a loop of one's own (:mod:`paramp.compat.colossalai.amp`)."""

from .compat.colossalai.amp import *  # noqa: F403
from .compat.colossalai.amp import __all__ as __all__
