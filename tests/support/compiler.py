"""The mark of tests that compile kernels."""

import pytest

from paramp.base.compilers import why_not_inductor

WHY_NOT = why_not_inductor("cpu", {})
needs_compiler = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
