"""Layouts by their names: ``dp2·tp2 + zero1`` has two data ranks of two tensor ranks each, and ZeRO-1."""

import math
import re
from typing import Any

AXES = {"dp": "data", "tp": "tensor", "pp": "pipeline", "cp": "context"}


def sized_layouts(names: str, **pipeline: Any) -> dict[str, tuple[int, dict[str, Any]]]:
    """Name -> ranks, and the configuration's ``parallel``; ``names`` have commas between them.

    ``sp`` is sequence parallelism. Experts are shared out over data ranks: ``dp2·ep2`` and ``fsdp2·ep2`` have four.
    ``pipeline``: further options of the layouts that have stages.
    """
    return {name: _layout(name, pipeline) for name in names.split(", ")}


def layouts(names: str, **pipeline: Any) -> dict[str, dict[str, Any]]:
    """The same without the number of ranks."""
    return {name: parallel for name, (_, parallel) in sized_layouts(names, **pipeline).items()}


def _layout(name: str, pipeline: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    found = re.findall(r"([a-z]+)([\dx]*)", name)
    sizes = {axis: [int(one) for one in (number or "1").split("x")] for axis, number in found}
    parallel: dict[str, Any] = {AXES[axis]: size for axis, (size, *_) in sizes.items() if axis in AXES}
    (experts,) = sizes.get("ep", [1])
    for axis in {"dp", "fsdp", "hsdp"} & sizes.keys():
        *replicate, ranks = sizes[axis]
        shards = {"shard": ranks * experts} | ({"replicate": replicate[0]} if replicate else {})
        parallel["data"] = ranks * experts if axis == "dp" else shards
    if "pp" in sizes and pipeline:
        parallel["pipeline"] = {"size": parallel["pipeline"], **pipeline}
    parallel |= {"expert": experts} if "ep" in sizes else {}
    parallel |= {"sequence_parallel": True} if "sp" in sizes else {}
    parallel |= {"zero": 1} if "zero" in sizes else {}
    return math.prod(map(math.prod, sizes.values())), parallel
