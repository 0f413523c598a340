"""State as JSON, and back, without losing a bit and without ever running code.

JSON has no tuples, no keys but strings, and no number that is not finite. Such values become an object with one key
that no other object here has, ``"<type>"``::

    (0.9, 0.95)               {"<type>": "tuple", "items": [0.9, 0.95]}
    Counter({30: 1})          {"<type>": "Counter", "items": [[30, 1]]}
    tensor([1, 2]), uint8     {"<type>": "tensor", "dtype": "uint8", "shape": [2], "hex": "0102"}

Pickle could hold anything, but reading it runs whatever code the file asks for.
"""

import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ..base.errors import CheckpointError

TYPE = "<type>"
LARGEST_TENSOR = 2**16
"""Bytes. What is larger belongs among a checkpoint's tensors."""


def encode(value: Any, name: str = "value") -> Any:
    """``value``, called ``name`` in messages, as what :func:`json.dumps` takes with ``allow_nan=False``.

    Numbers, strings, None, lists, tuples, dicts, counters, sets, small tensors and arrays, and these in one another.

    Raises:
        CheckpointError: something of another type is in it, named by its place.
    """
    if value is None or isinstance(value, (bool, str)) or type(value) is int:
        return value
    if isinstance(value, (int, np.integer)):
        return int(value)
    if isinstance(value, (float, np.floating)):
        number = float(value)
        return number if math.isfinite(number) else {TYPE: "float", "value": str(number)}
    if isinstance(value, torch.Tensor):
        return _encode_tensor(value.detach().cpu(), name)
    if isinstance(value, np.ndarray):
        return {TYPE: "ndarray", "tensor": _encode_tensor(torch.from_numpy(value.copy()), name)}
    if isinstance(value, list):
        return [encode(item, f"{name}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, (tuple, set, frozenset, deque)):
        items = [encode(item, f"{name}[{index}]") for index, item in enumerate(value)]
        return {TYPE: "tuple" if isinstance(value, tuple) else type(value).__name__, "items": items}
    if isinstance(value, Mapping):
        plain = all(isinstance(key, str) and key != TYPE for key in value)
        if plain and type(value) in (dict, OrderedDict, defaultdict):
            return {key: encode(item, f"{name}.{key}") for key, item in value.items()}
        pairs = [[encode(key, f"a key of {name}"), encode(item, f"{name}[{key!r}]")] for key, item in value.items()]
        return {TYPE: "Counter" if isinstance(value, Counter) else "dict", "items": pairs}
    raise CheckpointError(
        f"{name}: got {type(value).__name__}, which a checkpoint does not hold (it would have to be pickled, and "
        "reading that runs code); expected numbers, strings, tensors, lists and dicts of these from state_dict()"
    )


def _encode_tensor(value: torch.Tensor, name: str) -> Any:
    size = value.numel() * value.element_size()
    if size > LARGEST_TENSOR or value.is_sparse:
        raise CheckpointError(
            f"{name}: got a tensor of {size} bytes, expected at most {LARGEST_TENSOR}; large tensors belong into the "
            "model (register_buffer) or the optimizer's state"
        )
    data = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    dtype = str(value.dtype).removeprefix("torch.")
    return {TYPE: "tensor", "dtype": dtype, "shape": list(value.shape), "hex": data.hex()}


def decode(value: Any) -> Any:
    """What :func:`encode` was given, tensors on the CPU. A type that it does not write is a CheckpointError."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(TYPE)
    if kind is None:
        return {key: decode(item) for key, item in value.items()}
    if kind == "float":
        return float(value["value"])
    if kind == "tensor":
        data = torch.frombuffer(bytearray(bytes.fromhex(value["hex"])) or bytearray(1), dtype=torch.uint8)
        dtype = getattr(torch, value["dtype"])
        whole = data if value["hex"] else data[:0]
        return whole.view(dtype).reshape(value["shape"]).clone()
    if kind == "ndarray":
        return decode(value["tensor"]).numpy()
    if kind in ("dict", "Counter"):
        pairs = {decode(key): decode(item) for key, item in value["items"]}
        return Counter(pairs) if kind == "Counter" else pairs
    makers = {"tuple": tuple, "set": set, "frozenset": frozenset, "deque": deque}
    if kind not in makers:
        expected = ", ".join(makers)
        raise CheckpointError(f"state: of the type {kind!r}, expected one of {expected}; it was not saved here")
    return makers[kind](decode(item) for item in value["items"])
