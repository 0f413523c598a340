"""Random sequences of calls of an engine: how they are drawn, run on ranks, shortened and replayed.

A case is plain data: a mode, a model, an optimizer, a layout and a list of operations, ``["step"]`` or
``["edit", "0.proj.weight", "clamp", 7]``. An operation that does not apply where it stands does nothing, so that any
part of a sequence is a sequence too. ``["reload", layout, mode]`` saves, and goes on in another layout, and perhaps in
another mode.
"""

from __future__ import annotations

import json
import random
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from plain_training import ALWAYS_TRAINED, LAST, NUM_BLOCKS, TIED
from pool import run_on_ranks

Case = dict[str, Any]
SECONDS = 30.0
"""That the ranks have for a segment of a sequence."""
SHRINKING = 90.0
"""Seconds, and about as many attempts, that are spent on making a failing sequence shorter."""

SCHEDULES = ("gpipe", "1f1b", "interleaved-1f1b", "looped-bfs", "interleaved-zero-bubble", "zbv", "dualpipev")
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "1": (1, {}),
    "dp2": (2, {"data": 2}),
    "dp2 + zero1": (2, {"data": 2, "zero": 1}),
    "tp2": (2, {"tensor": 2}),
    "pp2": (2, {"pipeline": 2}),
    "dp2·tp2": (4, {"data": 2, "tensor": 2}),
    "dp2·tp2 + zero1": (4, {"data": 2, "tensor": 2, "zero": 1}),
    "pp2·tp2": (4, {"pipeline": 2, "tensor": 2}),
    "pp2·dp2": (4, {"pipeline": 2, "data": 2}),
    "pp2·dp2 + zero1": (4, {"pipeline": 2, "data": 2, "zero": 1}),
}
HALF = {"16-naive": True, "bf16-naive": True, "O2": True, "O3": False, "16-true": False, "bf16-true": False}
"""Modes with half-precision weights: whether they have masters."""
MODES = {"64-true": 12, "32-true": 3, "16-mixed": 3, "bf16-mixed": 1, **dict.fromkeys(HALF, 1), "16-naive": 3, "O2": 2}
"""And how often each is drawn."""
SCALED = {"16-mixed", "16-naive", "O2"}


# ------------------------------------------------------------------------------------------------------------- drawing

NAMES = [
    TIED[0],
    *(f"{block}.{name}" for block in range(1, NUM_BLOCKS + 1) for name in ("norm.bias", "up.weight", "up.bias")),
    *(f"{block}.{name}" for block in range(1, NUM_BLOCKS + 1) for name in ("down.weight", "down.bias", "gain")),
    *(f"{LAST}.norm.bias", TIED[1]),
]
"""Of parameters that operations name; all but :data:`ALWAYS_TRAINED`."""
assert ALWAYS_TRAINED not in NAMES


def _batch(rng: random.Random) -> int:
    return rng.randrange(10**6)


OPERATIONS: dict[str, tuple[int, Callable[[random.Random], list[Any]]]] = {
    "backward": (6, lambda rng: [_batch(rng), rng.choice(["plain", "no loss", "loop", "schedule"])]),
    "nothing_counted": (1, lambda rng: [_batch(rng)]),
    "step": (5, lambda rng: []),
    "zero_grad": (3, lambda rng: [rng.choice(["engine", "optimizer"])]),
    "infinite_gradient": (2, lambda rng: [rng.randrange(4), rng.choice(NAMES)]),
    "infinite_batch": (1, lambda rng: [_batch(rng), rng.randrange(2)]),
    "failing_criterion": (
        2,
        lambda rng: [_batch(rng), rng.randrange(2), rng.choice(["plain", "no loss"]), rng.choice([None, 0, 1])],
    ),
    "evaluate": (2, lambda rng: [_batch(rng), rng.choice(["loss", "output", "failing"])]),
    "freeze": (2, lambda rng: [rng.choice([*NAMES, "0.", "1.", "4."])]),
    "thaw": (1, lambda rng: [rng.choice([*NAMES, "0.", "1.", "4."])]),
    "switch": (2, lambda rng: [rng.choice([0, 2, 3, 4, LAST]), rng.choice([None, 0, 1, "on"])]),
    "edit": (3, lambda rng: [rng.choice(NAMES), rng.choice(["clamp", "halve", "copy"]), _batch(rng), rng.randrange(4)]),
    "lr": (2, lambda rng: [rng.choice([0.5, 0.7, 1.5])]),
    "schedule": (2, lambda rng: []),
    "hook": (2, lambda rng: [rng.choice(NAMES), rng.choice(["tensor", "accumulated"]), _batch(rng)]),
    "unhook": (1, lambda rng: []),
    "save": (2, lambda rng: [rng.choice(["wait", "async"])]),
    "load": (2, lambda rng: []),
    "reload": (2, lambda rng: []),
    "load_weights": (1, lambda rng: []),
    "guarded_step": (1, lambda rng: []),
    "scale": (1, lambda rng: [2.0 ** rng.choice([2, 5, 10, 40])]),
    "diagnose": (1, lambda rng: []),
    "whole": (1, lambda rng: []),
    "gradient": (1, lambda rng: [rng.choice(NAMES), rng.choice(["none", "halved"])]),
    "thaw_frozen": (1, lambda rng: [_batch(rng)]),
}
"""By name: how often it is drawn, and its arguments."""


def draw_layout(rng: random.Random, largest: int) -> dict[str, Any]:
    world, parallel = LAYOUTS[rng.choice([name for name, (size, _) in LAYOUTS.items() if size <= largest])]
    parallel = dict(parallel)
    size = parallel.pop("pipeline", 1)
    if size > 1:
        schedule = rng.choice(SCHEDULES)
        parallel["pipeline"] = {"size": size, "schedule": schedule, "microbatches": rng.choice([2, 4])}
        if schedule == "dualpipev":
            parallel["pipeline"]["microbatches"] = 4
    elif rng.random() < 0.3:
        parallel["pipeline"] = {"microbatches": 2}
    return {"world": world, "parallel": parallel}


def draw_mode(rng: random.Random, names: list[str]) -> dict[str, Any]:
    mode = rng.choices(names, [MODES[name] for name in names])[0]
    scaling = None
    if mode in SCALED:
        scaling = {
            "init_scale": 2.0 ** rng.randrange(3, 10),
            "growth_interval": rng.randrange(1, 4),
            "hysteresis": rng.randrange(1, 4),
            "min_scale": rng.choice([1.0, 4.0]),
            "max_scale": 2.0 ** rng.randrange(10, 13),
        }
    return {
        "mode": mode,
        "scaling": scaling,
        "half": mode in HALF,
        "rounds_weights": not HALF.get(mode, True),
        "masters": rng.choice(["full", "remainder"]) if mode in ("16-naive", "bf16-naive") else None,
    }


def draw(seed: str, largest: int) -> Case:
    """The case of ``seed``, on at most ``largest`` ranks."""
    rng = random.Random(f"sequence {seed}")
    mode = draw_mode(rng, list(MODES))
    exact = mode["mode"] in ("64-true", "32-true")
    optimizers = ["sgd", "sgd-plain"]
    if exact:
        optimizers += ["sgd-dampened", "adam", "adamw", "adamw-foreach", "rmsprop", "nadam"]
    optimizer = rng.choice(optimizers)
    others = ["64-true", "32-true"] if exact else [name for name in MODES if name not in ("64-true", "32-true")]
    return {
        **mode,
        "tied": rng.random() < 0.5,
        "shard_ends": rng.random() < 0.3,
        "frozen": rng.choice([[], [], [], rng.sample(NAMES[:-1], 3), [name for name in NAMES if name[0] in "01"]]),
        "criterion": rng.choice(["mean", "counted"]),
        "accumulation": rng.choice([1, 1, 1, 2, 3]),
        "clip": rng.choice([None, 0.5]) if exact else 0.5,
        "optimizer": optimizer,
        "lr": 0.05 if optimizer.startswith("sgd") else 0.01,
        "layout": draw_layout(rng, largest),
        "hooked": rng.choice([None, None, rng.choice(NAMES[1:-1])]),
        "operations": _draw_operations(rng, rng.randrange(6, 22), largest, others),
    }


def _draw_operations(rng: random.Random, length: int, largest: int, modes: list[str]) -> list[list[Any]]:
    names, weights = list(OPERATIONS), [often for often, _ in OPERATIONS.values()]
    operations: list[list[Any]] = []
    while len(operations) < length:
        if rng.random() < 0.3:  # the common loop, which random calls would rarely hit upon
            operations += [["backward", _batch(rng), "plain"], ["step"]]
            operations += [["zero_grad", "engine"]] * rng.randrange(2)
            continue
        (name,) = rng.choices(names, weights)
        arguments = OPERATIONS[name][1](rng)
        if name == "reload":
            arguments = [draw_layout(rng, largest), draw_mode(rng, modes) if rng.random() < 0.3 else {}]
        operations.append([name, *arguments])
    return operations


# ------------------------------------------------------------------------------------------------------------- running


def segments(case: Case) -> Iterator[tuple[Case, int]]:
    """The case of each segment, with its own layout, mode and operations, and the index of the first of them."""
    start, current = 0, []
    for index, operation in enumerate(case["operations"]):
        if operation[0] == "reload":
            yield case | {"operations": current}, start
            case, start, current = case | operation[2] | {"layout": operation[1]}, index + 1, []
        else:
            current.append(operation)
    yield case | {"operations": current}, start


def run(case: Case) -> str | None:
    """What differed between the engine and the plain training; None if nothing."""
    with tempfile.TemporaryDirectory(prefix="paramp-sequence-") as folder:
        previous: str | None = None
        parts = list(segments(case))
        for number, (segment, start) in enumerate(parts):
            layout = segment["layout"]
            arguments = {"case": segment, "begin": previous}
            arguments |= {"end": str(Path(folder) / f"{number}"), "last": number == len(parts) - 1}
            try:
                found = run_on_ranks(
                    layout["world"], "sequence_ranks", "run_segment", arguments | {"start": start}, timeout=SECONDS
                )[0]
            except AssertionError as error:
                return f"{error} (in the layout {layout})"
            if found is not None:
                return f"{found} (in the layout {layout})"
            previous = arguments["end"]
    return None


# ----------------------------------------------------------------------------------------------------------- shrinking


def shrink(case: Case, failure: str, fails: Callable[[Case], str | None] = run) -> tuple[Case, str]:
    """A shorter case that fails, and how."""
    deadline = time.monotonic() + SHRINKING

    def attempt(**changes: Any) -> bool:
        nonlocal case, failure
        if time.monotonic() > deadline or all(case[key] == value for key, value in changes.items()):
            return False
        found = fails(case | changes)
        if found is None:
            return False
        case, failure = case | changes, found
        return True

    if where := re.search(r"at operation (\d+)", failure):
        attempt(operations=case["operations"][: int(where[1]) + 1])
    for size in (6, 3, 1):
        index = len(case["operations"]) - size
        while index >= 0:
            attempt(operations=case["operations"][:index] + case["operations"][index + size :])
            index = min(index, len(case["operations"])) - size
    for plain in (
        {"frozen": []},
        {"hooked": None},
        {"tied": False},
        {"shard_ends": False},
        {"accumulation": 1},
        {"criterion": "mean"},
        {"clip": None},
        {"optimizer": "sgd-plain"},
        {"mode": "64-true", "scaling": None, "half": False, "rounds_weights": False, "masters": None},
    ):
        attempt(**plain)
    for size in (2, 1):
        index = len(case["operations"]) - size
        while index >= 0:
            attempt(operations=case["operations"][:index] + case["operations"][index + size :])
            index = min(index, len(case["operations"])) - size
    return case, failure


def report(seed: str, case: Case, failure: str) -> str:
    """What a failed test prints."""
    text = json.dumps(case, ensure_ascii=False)
    return (
        f"the sequence of seed {seed} fails. PARAMP_TEST_SEQUENCE={seed} replays it; its shortest failing form is\n"
        f"PARAMP_TEST_SEQUENCE='{text}'\n{failure}"
    )
