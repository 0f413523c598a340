"""amp's exception."""

from __future__ import annotations

from ....base.errors import ConfigError


class AmpError(ConfigError, RuntimeError):
    """A mistake in the use of amp. Also a ``RuntimeError``, as Apex raises."""
