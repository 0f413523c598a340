"""Composer's surgery on norms: ``apply_low_precision_layernorm`` and the others."""

from .compat.composer.functional import *  # noqa: F403
from .compat.composer.functional import __all__ as __all__
