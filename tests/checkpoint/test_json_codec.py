"""State as JSON: everything comes back as it was, and nothing that would need pickle goes in."""

import json
import math
from collections import Counter, deque

import numpy as np
import pytest
import torch

from paramp.base.errors import CheckpointError
from paramp.checkpoint.json_codec import decode, encode

VALUES = {
    "plain": {"a": [1, 2.5, True, None, "text"], "b": {"c": {}}},
    "not finite": [float("inf"), -float("inf"), 1e-320, 0.1 + 0.2],
    "tuples": {"betas": (0.9, 0.95), "deep": [((1,), [])]},
    "keys": {1: "one", (2, 3): "pair", None: "none", "<type>": "own"},
    "counter": Counter({30: 2, 60: 1}),
    "sets": [{1, 2}, frozenset({3}), deque([1, 2])],
    "big": 2**80,
}


@pytest.mark.parametrize("name", VALUES)
def test_values_come_back(name):
    text = json.dumps(encode(VALUES[name]), allow_nan=False)
    back = decode(json.loads(text))
    assert back == VALUES[name]
    assert repr(back) == repr(VALUES[name])


def test_nan_comes_back():
    assert math.isnan(decode(json.loads(json.dumps(encode(float("nan")), allow_nan=False))))


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.float16, torch.bfloat16, torch.float64, torch.int64])
@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_tensors_come_back(dtype, shape):
    value = torch.randint(0, 2, shape).to(dtype)
    back = decode(json.loads(json.dumps(encode({"t": value}))))["t"]
    assert back.dtype is dtype
    assert back.shape == value.shape
    assert torch.equal(back, value)


def test_numpy_comes_back():
    state = np.random.get_state()
    back = decode(json.loads(json.dumps(encode(list(state)))))
    assert back[0] == state[0]
    assert back[1].dtype == np.uint32
    assert (back[1] == state[1]).all()
    assert encode(np.float32(0.5)) == 0.5
    assert encode(np.int64(3)) == 3


class Callback:
    pass


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"a": {"hook": Callback()}}, r"value\.a\.hook: got Callback"),
        ([lambda: 0], r"value\[0\]: got function"),
        (torch.zeros(10**5), r"value: got a tensor of 400000 bytes, expected at most 65536"),
    ],
)
def test_what_would_have_to_be_pickled_is_refused(value, words):
    with pytest.raises(CheckpointError, match=words):
        encode(value)


def test_an_unknown_type_is_refused():
    with pytest.raises(CheckpointError, match=r"got the type 'os\.system'"):
        decode({"<type>": "os.system", "items": ["true"]})
