"""Long families of tests: the same assertion for many cases. What a run tries of each is chosen by the environment.

- By default, as in ``make test``: a part, in which most values of a parameter stand once. ``SAMPLE_ONLY`` in
  ``tests/system/test_families.py`` lists the few tests that have none.
- ``PARAMP_TEST_SEED``, any text: a sample of the other cases, and of those marked ``long`` a sixth; always the
  same for one seed (``.ci/run``).
- ``PARAMP_TEST_WHOLE=1``: all cases (``make test-all``, ``make matrix``).
"""

import os
import random
import shlex
from collections.abc import Collection, Iterable, Sequence
from typing import Any, TypeVar

import pytest

Case = TypeVar("Case")

WHOLE = os.environ.get("PARAMP_TEST_WHOLE", "") not in ("", "0")
SEED = os.environ.get("PARAMP_TEST_SEED", "")

family = pytest.mark.family
"""Marks the tests of a family, so that a sample can be run alone: ``pytest -m family``."""

LONG = "long: make test-all runs it, make test-sample a sixth of such cases"
long = pytest.mark.skipif(not (WHOLE or SEED), reason=LONG)
"""With :data:`family`, marks a long case of a test that has others."""


def cases(name: str, everything: Sequence[Case], part: Collection[Case], sample: int) -> list[Case]:
    """What this run tries of the family ``name``: all, the ``part``, or ``sample`` of the others."""
    if WHOLE:
        return list(everything)
    if SEED:
        rest = [case for case in everything if case not in part]
        chosen = random.Random(f"{SEED} {name}").sample(range(len(rest)), min(sample, len(rest)))
        return [rest[index] for index in sorted(chosen)]
    if not (chosen := [case for case in everything if case in part]):
        raise ValueError(f"the family {name!r} has no case by default, expected at least one in {list(part)}")
    return chosen


def rarely(values: Iterable[Any], *by_default: Any) -> list[Any]:
    """``values`` for ``parametrize``; those not in ``by_default`` are long cases. A tuple has several arguments."""
    rows = [(value, value if isinstance(value, tuple) else (value,)) for value in values]
    return [row[0] if row[0] in by_default else pytest.param(*row[1], marks=[family, long]) for row in rows]


def outside_sample(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Of the long cases, the five of six that a sample leaves out."""
    return [
        item
        for item in items
        if not WHOLE and SEED and _is_long(item) and random.Random(f"{SEED} {item.nodeid}").random() > 1 / 6
    ]


def number(part: int, whole: int) -> int:
    """How many this run tries of a family of numbered cases."""
    return whole if WHOLE else part


def offset(name: str, part: int, stride: int) -> slice:
    """Every ``stride``-th of a long list: from the ``part``-th on, from a random one on, or all of the list."""
    if WHOLE:
        return slice(None)
    return slice(random.Random(f"{SEED} {name}").randrange(stride) if SEED else part % stride, None, stride)


def without_a_case(items: Iterable[pytest.Item]) -> list[str]:
    """The tests of ``items``, as a run without variables collects them, of which such a run makes no case."""
    left_out: dict[str, bool] = {}
    for item in items:
        name = item.nodeid.partition("[")[0]
        left_out[name] = left_out.get(name, True) and _is_left_out(item)
    return [name for name in left_out if left_out[name]]


def _is_long(item: pytest.Item) -> bool:
    return any(mark.kwargs.get("reason") == LONG for mark in item.iter_markers("skipif"))


def _is_left_out(item: pytest.Item) -> bool:
    """Whether ``item`` is long, or stands for no case at all."""
    marks = [mark for name in ("skip", "skipif") for mark in item.iter_markers(name) if not mark.args or mark.args[0]]
    reasons = [str(mark.kwargs.get("reason", "")) for mark in marks]
    return any(reason == LONG or reason.startswith("got empty parameter set") for reason in reasons)


def how_to_repeat(nodeid: str) -> str:
    """The command that runs one case of this run's sample again."""
    return f"PARAMP_TEST_SEED={shlex.quote(SEED)} python -m pytest {shlex.quote(nodeid)}"
