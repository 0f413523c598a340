"""Random sequences of calls of an engine beside a plain fp64 training in one process.

In ``64-true`` weights agree to 1e-12. In the other modes decisions, the loss scale and all counts agree exactly, and
weights within the mode's rounding. A failure prints its seed and its shortest sequence; either of them in
``PARAMP_TEST_SEQUENCE`` is run alone.
"""

import json
import os

import pytest
import sequences
from families import SEED, WHOLE, family

NUM_SHORT, NUM_SAMPLED, NUM_WHOLE = 12, 15, 500
SHRINKS = os.environ.get("PARAMP_TEST_SHRINK", "") != "0"
REPLAYED = os.environ.get("PARAMP_TEST_SEQUENCE", "")


def seeds():
    if REPLAYED:
        return [REPLAYED]
    if WHOLE:
        return [str(number) for number in range(NUM_WHOLE)]
    return [f"{SEED or 'short'} {number}" for number in range(NUM_SAMPLED if SEED else NUM_SHORT)]


@family
@pytest.mark.parametrize("seed", seeds())
def test_an_engine_does_what_plain_training_does(seed):
    case = json.loads(seed) if seed.startswith("{") else sequences.draw(seed, 2 if seed.startswith("short") else 4)
    failure = sequences.run(case)
    if failure is not None and SHRINKS and not seed.startswith("{"):
        case, failure = sequences.shrink(case, failure)
    assert failure is None, sequences.report(seed, case, failure)


def test_a_failing_sequence_is_shortened_to_what_it_takes():
    def fails(case):
        names = [operation[0] for operation in case["operations"]]
        if case["tied"] and "step" in names and "lr" in names[names.index("step") :]:
            return "at operation 30, ['lr']: made up"
        return None

    case = sequences.draw("any", 2) | {"tied": True, "accumulation": 3}
    case["operations"] = [["lr", 0.5], ["backward", 1, "plain"], ["step"]] * 9 + [["zero_grad"]] * 3 + [["lr", 0.7]] * 9
    short, failure = sequences.shrink(case, fails(case), fails)
    assert short["operations"] == [["step"], ["lr", 0.5]]
    assert (short["tied"], short["accumulation"], short["frozen"]) == (True, 1, [])
    assert failure == fails(short)


def test_a_seed_draws_the_same_sequence_every_time():
    assert sequences.draw("7", 4) == sequences.draw("7", 4) != sequences.draw("8", 4)
