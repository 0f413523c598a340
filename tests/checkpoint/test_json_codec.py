"""State as JSON: everything comes back as it was, and nothing that would need pickle goes in."""

import json
import math
from collections import Counter, deque

import numpy as np
import pytest
import torch
from small_engines import each_raises

from paramp.base.errors import CheckpointError
from paramp.checkpoint.json_codec import decode, encode

VALUES = {
    "plain": {"a": [1, 2.5, True, None, "text"], "b": {"c": {}}},
    "not finite": [float("inf"), -float("inf"), 1e-320, 0.1 + 0.2],
    "tuples": {"betas": (0.9, 0.95), "deep": [((1,), [])]},
    "keys": {1: "one", (2, 3): "pair", None: "none", "<type>": "own"},
    "counter": Counter({30: 2, 60: 1}),
    "sets": [{1, 2}, frozenset({3}), deque([1, 2]), deque([1, 2], maxlen=3)],
    "big": 2**80,
}


def there_and_back(value):
    return decode(json.loads(json.dumps(encode(value), allow_nan=False)))


@pytest.mark.parametrize("name", VALUES)
def test_values_come_back(name):
    back = there_and_back(VALUES[name])
    assert back == VALUES[name]
    assert repr(back) == repr(VALUES[name])


def test_tensors_and_numpys_come_back():
    for dtype in (torch.bool, torch.uint8, torch.float16, torch.bfloat16, torch.float64, torch.int64):
        for shape in ((), (0,), (2, 3)):
            value = torch.randint(0, 2, shape).to(dtype)
            back = there_and_back({"t": value})["t"]
            assert (back.dtype, back.shape) == (dtype, value.shape)
            assert torch.equal(back, value)
    state = np.random.get_state()
    back = there_and_back(list(state))
    assert (back[0], back[1].dtype) == (state[0], np.uint32)
    assert (back[1] == state[1]).all()
    swapped, of_both = np.arange(3).astype(">i4")[::-1], torch.tensor([1 + 2j])
    assert there_and_back(swapped).tolist() == [2, 1, 0]
    for value in (of_both.conj(), of_both.conj().imag):
        assert torch.equal(there_and_back(value), value)
    largest = torch.arange(2**16).to(torch.uint8)  # a byte more is refused
    assert torch.equal(there_and_back(largest), largest)
    assert (encode(np.float32(0.5)), encode(np.int64(3)), encode(np.True_)) == (0.5, 3, True)
    assert math.isnan(there_and_back(float("nan")))


def test_what_would_have_to_be_pickled_is_refused():
    calls = {
        r"value\.a\.hook: got object": lambda: encode({"a": {"hook": object()}}),
        r"value\[0\]: got function": lambda: encode([lambda: 0]),
        r"value\.a: got an array of <U1, a dtype that torch does not have": lambda: encode({"a": np.array(["x"])}),
        r"value: got a tensor of 400000 bytes, expected at most 65536": lambda: encode(torch.zeros(10**5)),
        r"value: got a tensor of 65537 bytes": lambda: encode(torch.zeros(2**16 + 1, dtype=torch.uint8)),
        r"got the type 'os\.system'": lambda: decode({"<type>": "os.system", "items": ["true"]}),
    }
    each_raises(CheckpointError, calls)
