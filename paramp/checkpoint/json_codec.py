"""A JSON codec for state: exact to the bit, and decoding runs no code.

JSON has no tuples, only string keys, and only finite numbers. Other values become an object with the reserved key
``"<type>"``::

    (0.9, 0.95)               {"<type>": "tuple", "items": [0.9, 0.95]}
    Counter({30: 1})          {"<type>": "Counter", "items": [[30, 1]]}
    tensor([1, 2]), uint8     {"<type>": "tensor", "dtype": "uint8", "shape": [2], "hex": "0102"}

Pickle supports any object, but reading it runs any code that the file contains.
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
"""Bytes. Larger tensors belong among a checkpoint's tensors."""


def encode(value: Any, name: str = "value") -> Any:
    """``value``, called ``name`` in messages, encoded for :func:`json.dumps` with ``allow_nan=False``.

    Supported: numbers, strings, None, lists, tuples, dicts, counters, sets, small tensors and arrays, and nested ones.

    Raises:
        CheckpointError: it contains another type; the message names the path to it.
    """
    if value is None or isinstance(value, (bool, str)) or type(value) is int:
        return value
    if isinstance(value, np.bool_):
        return bool(value)
    if isinstance(value, (int, np.integer)):
        return int(value)
    if isinstance(value, (float, np.floating)):
        number = float(value)
        return number if math.isfinite(number) else {TYPE: "float", "value": str(number)}
    if isinstance(value, torch.Tensor):
        return _encode_tensor(value.detach().cpu(), name)
    if isinstance(value, np.ndarray):
        return {TYPE: "ndarray", "tensor": _encode_tensor(_as_tensor(value, name), name)}
    if isinstance(value, list):
        return [encode(item, f"{name}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, (tuple, set, frozenset, deque)):
        items = [encode(item, f"{name}[{index}]") for index, item in enumerate(value)]
        kind = "tuple" if isinstance(value, tuple) else type(value).__name__
        bound = {"maxlen": value.maxlen} if isinstance(value, deque) and value.maxlen is not None else {}
        return {TYPE: kind, "items": items} | bound
    if isinstance(value, Mapping):
        plain = all(isinstance(key, str) and key != TYPE for key in value)
        if plain and type(value) in (dict, OrderedDict, defaultdict):
            return {key: encode(item, f"{name}.{key}") for key, item in value.items()}
        pairs = [[encode(key, f"a key of {name}"), encode(item, f"{name}[{key!r}]")] for key, item in value.items()]
        return {TYPE: "Counter" if isinstance(value, Counter) else "dict", "items": pairs}
    raise CheckpointError(
        f"{name}: got {type(value).__name__}, which a checkpoint cannot store (it would have to be pickled, and "
        "reading that runs code); expected numbers, strings, tensors, lists and dicts of these from state_dict()"
    )


def _as_tensor(array: Any, name: str) -> torch.Tensor:
    try:
        return torch.from_numpy(array.astype(array.dtype.newbyteorder("=")))  # torch has no other byte order
    except TypeError:
        raise CheckpointError(
            f"{name}: got an array of {array.dtype}, a dtype that torch does not have; expected an array of numbers, "
            "or array.tolist()"
        ) from None


def _encode_tensor(value: torch.Tensor, name: str) -> Any:
    size = value.numel() * value.element_size()
    if size > LARGEST_TENSOR or value.is_sparse:
        raise CheckpointError(
            f"{name}: got a tensor of {size} bytes, expected at most {LARGEST_TENSOR}; put large tensors into the "
            "model (register_buffer) or the optimizer's state"
        )
    plain = torch.empty(value.shape, dtype=value.dtype, device="cpu").copy_(value)  # of a conjugate or a view too
    data = plain.reshape(-1).view(torch.uint8).numpy().tobytes()
    dtype = str(value.dtype).removeprefix("torch.")
    return {TYPE: "tensor", "dtype": dtype, "shape": list(value.shape), "hex": data.hex()}


def decode(value: Any) -> Any:
    """The value that :func:`encode` got, tensors on the CPU. A CheckpointError for a type that it does not write."""
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
    if kind == "deque":
        return deque((decode(item) for item in value["items"]), value.get("maxlen"))
    makers = {"tuple": tuple, "set": set, "frozenset": frozenset}
    if kind not in makers:
        expected = ", ".join((*makers, "deque"))
        raise CheckpointError(f"state: got the type {kind!r}, expected one of {expected}; paramp did not save it")
    return makers[kind](decode(item) for item in value["items"])
