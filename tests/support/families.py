"""Long families of tests: the same assertion for many cases. What a run tries of each is chosen by the environment.

- By default, as in ``make test``: a part, in which most values of a parameter stand once.
- ``PARAMP_TEST_SEED``, any text: a sample of the other cases, always the same for one seed (``.ci/run``).
- ``PARAMP_TEST_WHOLE=1``: all cases (``make test-all``, ``make matrix``).
"""

from __future__ import annotations

import os
import random
from collections.abc import Collection, Sequence
from typing import TypeVar

import pytest

Case = TypeVar("Case")

WHOLE = os.environ.get("PARAMP_TEST_WHOLE", "") not in ("", "0")
SEED = os.environ.get("PARAMP_TEST_SEED", "")

family = pytest.mark.family
"""Marks the tests of a family, so that a sample can be run alone: ``pytest -m family``."""

long = pytest.mark.skipif(not (WHOLE or SEED), reason="long: make test-sample and make test-all run it")
"""With :data:`family`, marks a single long test."""


def cases(name: str, everything: Sequence[Case], part: Collection[Case], sample: int) -> list[Case]:
    """What this run tries of the family ``name``: all, the ``part``, or ``sample`` of the others."""
    if WHOLE:
        return list(everything)
    if SEED:
        rest = [case for case in everything if case not in part]
        chosen = random.Random(f"{SEED} {name}").sample(range(len(rest)), min(sample, len(rest)))
        return [rest[index] for index in sorted(chosen)]
    return [case for case in everything if case in part]


def number(part: int, whole: int) -> int:
    """How many this run tries of a family of numbered cases."""
    return whole if WHOLE else part


def offset(name: str, part: int, stride: int) -> slice:
    """Every ``stride``-th of a long list: from the ``part``-th on, from a random one on, or all of the list."""
    if WHOLE:
        return slice(None)
    return slice(random.Random(f"{SEED} {name}").randrange(stride) if SEED else part % stride, None, stride)
