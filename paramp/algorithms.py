"""Composer's algorithms for ``paramp.initialize(..., algorithms=[...])``."""

from .compat.composer.algorithms import *  # noqa: F403
from .compat.composer.algorithms import __all__ as __all__
