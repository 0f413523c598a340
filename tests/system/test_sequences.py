"""Random sequences of calls of an engine beside a plain fp64 training in one process.

In ``64-true`` weights agree to 1e-12. In the other modes decisions, the loss scale and all counts agree exactly, and
weights within the mode's rounding. With ``reproducible`` a sequence also ends with the same bits as in one process.
A failure prints its seed and its shortest sequence; either of them in
``PARAMP_TEST_SEQUENCE`` is run alone.
"""

import json
import os

import pytest
import sequences
from families import SEED, WHOLE, family

NUM_SHORT, NUM_SAMPLED, NUM_WHOLE = 8, 8, 500
WITH_FEATURES = ("sharded", "sequence", "ema", "compile", "exact", "sharded ema", "sequence exact", "sharded exact ema")
"""What there is besides in further sequences: one of each in a sample, and this many in ``make test-all``."""
NUM_WITH_FEATURES = 60
SHRINKS = os.environ.get("PARAMP_TEST_SHRINK", "") != "0"
REPLAYED = os.environ.get("PARAMP_TEST_SEQUENCE", "")


def seeds():
    if REPLAYED:
        return [REPLAYED]
    if WHOLE:
        plain = [str(number) for number in range(NUM_WHOLE)]
        return plain + [f"{features} {number}" for features in WITH_FEATURES for number in range(NUM_WITH_FEATURES)]
    plain = [f"{SEED or 'short'} {number}" for number in range(NUM_SAMPLED if SEED else NUM_SHORT)]
    return plain + ([f"{SEED} {features}" for features in WITH_FEATURES] if SEED else [])


@family
@pytest.mark.parametrize("seed", seeds())
def test_an_engine_does_what_plain_training_does(seed):
    case = json.loads(seed) if seed.startswith("{") else sequences.draw(seed, 2 if seed.startswith("short") else 4)
    failure = sequences.run(case)
    if failure is not None and SHRINKS and not seed.startswith("{"):
        case, failure = sequences.shrink(case, failure)
    assert failure is None, sequences.report(seed, case, failure)


@pytest.mark.parametrize("name", sequences.FIXED)
def test_an_engine_with_a_feature_does_what_plain_training_does(name):
    assert (failure := sequences.run(sequences.FIXED[name])) is None, failure


def test_a_seed_of_each_feature_draws_the_same_sequence_with_it_every_time():
    assert {name for seed in WITH_FEATURES for name in seed.split()} == set(sequences.FEATURES) == set(sequences.FIXED)
    for seed in WITH_FEATURES:
        case = sequences.draw(seed, 4)
        assert case == sequences.draw(seed, 4) != sequences.draw(f"{seed} 2", 4)
        assert all(case[name] for name in ("ema", "exact", "compile") if name in seed.split())
