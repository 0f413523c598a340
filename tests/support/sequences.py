"""Random sequences of calls of an engine: how they are drawn, run on ranks, shortened and replayed.

A case is plain data: a mode, a model, an optimizer, a layout and a list of operations, ``["step"]`` or
``["edit", "0.proj.weight", "clamp", 7]``. An operation that does not apply where it stands does nothing, so that any
part of a sequence is a sequence too. ``["reload", layout, mode]`` saves, and goes on in another layout, and perhaps in
another mode.

The words of a seed choose what else there is: in ``"sharded ema 3"`` FSDP2 and HSDP among the layouts, and averages of
the weights (:data:`FEATURES`). With ``exact`` the sequence also runs in one process, and both end with the same bits.
"""

import json
import random
import re
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from exact_training import digests
from matrix import ALL_LAYOUTS
from plain_training import LAST, NAMES, TIED
from pool import run_on_ranks

Case = dict[str, Any]
SECONDS = 30.0
"""That the ranks have for a segment of a sequence."""
SHRINKING = 90.0
"""Seconds, and about as many attempts, that are spent on making a failing sequence shorter."""

SCHEDULES = ("gpipe", "1f1b", "interleaved-1f1b", "looped-bfs", "interleaved-zero-bubble", "zbv", "dualpipev")
SPLIT_BACKWARD = SCHEDULES[-3:]
"""Schedules that neither FSDP2 nor compiled blocks go with."""
LAYOUTS = ["1", "dp2", "dp2 + zero1", "tp2", "pp2", "dp2·tp2", "dp2·tp2 + zero1", "pp2·tp2", "pp2·dp2"]
LAYOUTS += ["pp2·dp2 + zero1"]
SHARDED_LAYOUTS = ["fsdp2", "fsdp4", "hsdp2x2", "fsdp2·tp2", "fsdp2·pp2"]
SEQUENCE_LAYOUTS = ["tp2 + sp", "dp2·tp2 + sp", "pp2·tp2 + sp"]
FEATURES = ("sharded", "sequence", "ema", "compile", "exact")
"""``sequence``: sequence parallelism; ``exact``: ``reproducible=True``."""
EXACT_MODES = ("32-true", "16-mixed", "bf16-mixed", "16-naive", "bf16-naive")
HALF = {"16-naive": True, "bf16-naive": True, "O2": True, "O3": False, "16-true": False, "bf16-true": False}
"""Modes with half-precision weights: whether they have masters."""
MODES = {"64-true": 12, "32-true": 3, "16-mixed": 3, "bf16-mixed": 1, **dict.fromkeys(HALF, 1), "16-naive": 3, "O2": 2}
"""And how often each is drawn."""
FULL = ("64-true", "32-true")


# ------------------------------------------------------------------------------------------------------------- drawing


def _batch(rng: random.Random) -> int:
    return rng.randrange(10**6)


def _module(rng: random.Random) -> list[Any]:
    return [rng.choice([*NAMES, "0.", "1.", "4."])]


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
    "freeze": (2, _module),
    "thaw": (1, _module),
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
OF_AVERAGES = {"averages": (4, lambda rng: [_batch(rng)])}


def draw_layout(rng: random.Random, largest: int, features: Collection[str] = ()) -> dict[str, Any]:
    """One without the features, or more often one with them."""
    special = (SHARDED_LAYOUTS if "sharded" in features else []) + (SEQUENCE_LAYOUTS if "sequence" in features else [])
    special += ["fsdp2·tp2 + sp"] if {"sharded", "sequence"} <= {*features} else []
    names = special if special and rng.random() < 0.7 else LAYOUTS
    world, parallel = ALL_LAYOUTS[rng.choice([name for name in names if ALL_LAYOUTS[name][0] <= largest])]
    if "pipeline" in parallel:
        splits = not {"sharded", "compile"} & {*features}
        schedule = rng.choice([name for name in SCHEDULES if splits or name not in SPLIT_BACKWARD])
        microbatches = max(rng.choice([2, 4]), 4 * (schedule == "dualpipev"))
        parallel = parallel | {"pipeline": {"size": 2, "schedule": schedule, "microbatches": microbatches}}
    elif rng.random() < 0.3:
        parallel = parallel | {"pipeline": {"microbatches": 2}}
    return {"world": world, "parallel": parallel}


def _mode(mode: str, scaling: dict[str, Any] | None = None, masters: str | None = None) -> Case:
    is_rounded = not HALF.get(mode, True)
    return {"mode": mode, "scaling": scaling, "half": mode in HALF, "rounds_weights": is_rounded, "masters": masters}


def draw_mode(rng: random.Random, names: list[str], *, sharded: bool = False) -> Case:
    mode = rng.choices(names, [MODES[name] for name in names])[0]
    scaling = None
    if mode in ("16-mixed", "16-naive", "O2"):
        scaling = {
            "init_scale": 2.0 ** rng.randrange(3, 10),
            "growth_interval": rng.randrange(1, 4),
            "hysteresis": rng.randrange(1, 4),
            "min_scale": rng.choice([1.0, 4.0]),
            "max_scale": 2.0 ** rng.randrange(10, 13),
        }
    masters = rng.choice(["full", "remainder"][: 2 - sharded]) if mode in ("16-naive", "bf16-naive") else None
    return _mode(mode, scaling, masters)


def draw(seed: str, largest: int) -> Case:
    """The case of ``seed``, on at most ``largest`` ranks."""
    rng = random.Random(f"sequence {seed}")
    features = [word for word in seed.split() if word in FEATURES]
    exact = "exact" in features
    modes = [*(EXACT_MODES if exact else MODES)]
    mode = draw_mode(rng, modes, sharded="sharded" in features)
    full = mode["mode"] in FULL
    optimizers = ["sgd", "sgd-plain"]
    if full:
        more = ["sgd-dampened", "adam", "adamw", "adamw-foreach", "rmsprop", "nadam"]
        optimizers += ["adam", "adamw"] if exact else more
    optimizer = rng.choice(optimizers)
    case = {
        **mode,
        "tied": rng.random() < 0.5,
        "shard_ends": rng.random() < 0.3,
        "frozen": rng.choice([[], [], [], rng.sample(NAMES[:-1], 3), [name for name in NAMES if name[0] in "01"]]),
        "criterion": rng.choice(["mean", "counted"]),
        "accumulation": rng.choice([1, 1, 1, 2, 3]),
        "clip": rng.choice([None, 0.5]) if full else 0.5,
        "optimizer": optimizer,
        "lr": 0.05 if optimizer.startswith("sgd") else 0.01,
        "layout": draw_layout(rng, largest, features),
        "hooked": rng.choice([None, None, rng.choice(NAMES[1:-1])]),
    }
    length, others = rng.randrange(6, 22), [name for name in modes if (name in FULL) == full]
    case["operations"] = _draw_operations(rng, length, largest, others, features)
    return _with_features(case, rng, features) if features else case


def _draw_operations(
    rng: random.Random, length: int, largest: int, modes: list[str], features: Collection[str]
) -> list[list[Any]]:
    table = OPERATIONS | (OF_AVERAGES if "ema" in features else {})
    operations: list[list[Any]] = []
    while len(operations) < length:
        if rng.random() < 0.3:  # the common loop, which random calls would rarely hit upon
            operations += [["backward", _batch(rng), "plain"], ["step"]]
            operations += [["zero_grad", "engine"]] * rng.randrange(2)
            continue
        (name,) = rng.choices([*table], [often for often, _ in table.values()])
        arguments = table[name][1](rng)
        if name == "reload":
            arguments = [draw_layout(rng, largest, features), {}]
            if rng.random() < 0.3:
                arguments[1] = draw_mode(rng, modes, sharded="sharded" in features)
        operations.append([name, *arguments])
    return operations


def _with_features(case: Case, rng: random.Random, features: Collection[str]) -> Case:
    """``case`` with what the features add and what goes with none of them left out."""
    sharded, exact = "sharded" in features, "exact" in features
    if exact and (sharded or (case["tied"] and case["hooked"] == TIED[0])):
        case["hooked"] = None
    case |= {name: name in features for name in ("compile", "exact")}
    case["ema"] = rng.choice([0.75, 0.9]) if "ema" in features else None
    case["gain"] = "none" if "sequence" in features else "vector" if sharded else "scalar"
    if sharded:
        case["operations"] = [_reduced_in_one_order(*one) for one in case["operations"]]
    if exact:  # what does the same in every layout; no shard has a gradient hook, so no layout may
        left_out = ("gradient", "hook") if sharded else ("gradient",)
        case["operations"] = [_of_any_layout(*one) for one in case["operations"] if one[0] not in left_out]
    if case["gain"] == "none":
        text = json.dumps({key: case[key] for key in ("frozen", "hooked", "operations")}).replace(".gain", ".up.bias")
        case |= json.loads(text)
        case["frozen"] = sorted({*case["frozen"]})
    return case


def _reduced_in_one_order(name: str, *arguments: Any) -> list[Any]:
    """The operation, or one like it after which the backward of each data rank comes to the same modules: to the
    first ones, which it reaches if they compute something with trained weights (docs/sharded.md)."""
    if name == "switch" and arguments[0] == 0 and arguments[1] != "on":
        return [name, 0, None]
    return [name, "4."] if (name, *arguments) == ("freeze", "1.") else [name, *arguments]


def _of_any_layout(name: str, *arguments: Any) -> list[Any]:
    """The operation, or one like it that does the same in every layout."""
    others = {("backward", "loop"): "plain", ("switch", 0): None, ("switch", 1): None}
    if len(arguments) == 2 and name != "reload":
        return [name, arguments[0], others.get((name, arguments[1]), arguments[1])]
    return [name, *arguments]


# --------------------------------------------------------------------------------------------------------------- fixed

PLAIN = _mode("64-true")
SCALING = {"init_scale": 64.0, "growth_interval": 2, "hysteresis": 1, "min_scale": 1.0, "max_scale": 1024.0}
MIXED, NAIVE = _mode("16-mixed", SCALING), _mode("16-naive", SCALING, "full")


def layout(name: str, **pipeline: Any) -> dict[str, Any]:
    """The layout ``name``; ``pipeline``: its schedule and microbatches, if it has stages."""
    world, parallel = ALL_LAYOUTS[name]
    return {"world": world, "parallel": parallel | ({"pipeline": {"size": 2, **pipeline}} if pipeline else {})}


def fixed(name: str, *pieces: list[list[Any]], **changes: Any) -> Case:
    """A case in the layout ``name``, whose operations are those of the pieces."""
    case = {"tied": True, "shard_ends": False, "frozen": ["2.up.weight"], "criterion": "mean", "accumulation": 1}
    case |= {"clip": 0.5, "optimizer": "sgd", "lr": 0.05, "hooked": None, "layout": layout(name)}
    return PLAIN | case | changes | {"operations": [operation for piece in pieces for operation in piece]}


def _trained(seed: int) -> list[list[Any]]:
    return [["backward", seed, "plain"], ["step"], ["zero_grad", "engine"]]


def _saved(how: str) -> list[list[Any]]:
    """A save, a step that is lost, and the load."""
    return [["save", how], *_trained(8), ["load"]]


def _gone_on(name: str, **pipeline: Any) -> list[list[Any]]:
    return [["reload", layout(name, **pipeline), {}], *_trained(9)]


_SKIPPED = [["backward", 7, "plain"], ["infinite_gradient", 1, "1.up.weight"], ["step"], ["diagnose"]]
_EDITED = [["edit", "3.down.weight", "copy", 5, 0], ["freeze", "1."], *_trained(3), ["thaw", "1."]]
_AVERAGES = [["averages", 4]]
FIXED: dict[str, Case] = {
    "sharded": fixed(
        "fsdp2",
        *(_trained(1), _SKIPPED, _saved("async"), _EDITED, [["edit", "1.down.weight", "copy", 6, 3]], _trained(4)),
        *([["whole"]], _gone_on("hsdp2x2"), _gone_on("tp2")),
        **NAIVE | {"gain": "vector"},
    ),
    "sequence": fixed(
        "tp2 + sp",
        *(_trained(1), _SKIPPED, _EDITED, [["evaluate", 3, "output"]], _gone_on("pp2", schedule="gpipe")),
        **PLAIN | {"gain": "none", "shard_ends": True, "optimizer": "adamw", "lr": 0.01},
    ),
    "ema": fixed(
        "dp2 + zero1",
        *([["edit", "1.up.weight", "clamp", 5, 0]], _AVERAGES, _trained(1), _AVERAGES, _SKIPPED, _AVERAGES, _EDITED),
        *(_saved("wait"), _AVERAGES, _trained(2), [["load_weights"]], _AVERAGES, _trained(5), _AVERAGES),
        *(_gone_on("1"), _AVERAGES),
        **NAIVE | {"masters": "remainder", "ema": 0.75},
    ),
    "compile": fixed(
        "1",
        *(_trained(1), [["switch", 2, None]], _trained(2), [["switch", 2, "on"]], _SKIPPED, _EDITED),
        *([["hook", "2.up.bias", "tensor", 1]], _trained(4), [["evaluate", 3, "loss"]]),
        compile=True,
    ),
    "exact": fixed(
        "tp2",
        *(_trained(1), _SKIPPED, _saved("wait"), _AVERAGES, _EDITED, _gone_on("dp2"), _AVERAGES),
        **MIXED | {"ema": 0.75, "exact": True},
    ),
}
"""A short sequence for each feature, by hand, so that a default run has each of them in use."""


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
    """What differed between the engine and the plain training, or another run in one process; None if nothing."""
    found, bits = run_once(case)
    if found is not None or not case.get("exact"):
        return found
    one = {"world": 1, "parallel": {}}
    operations = [[name, one, *rest[1:]] if name == "reload" else [name, *rest] for name, *rest in case["operations"]]
    found, alone = run_once(case | {"layout": one, "operations": operations})
    if found is not None:
        return f"{found} (in one process)"
    different = sorted(name for name in alone.keys() | bits.keys() if alone.get(name) != bits.get(name))
    return f"at the end other bits than in one process: {different}" if different else None


def run_once(case: Case) -> tuple[str | None, dict[str, str]]:
    """What differed between the engine and the plain training, if anything, and digests of what it ended with."""
    with tempfile.TemporaryDirectory(prefix="paramp-sequence-") as folder:
        end: str | None = None
        parts = list(segments(case))
        for number, (segment, start) in enumerate(parts):
            begin, end = end, str(Path(folder) / f"{number}")
            is_last = number == len(parts) - 1 and not case.get("exact")
            given = {"case": segment, "begin": begin, "end": end, "last": is_last, "start": start}
            try:
                (found, *_) = run_on_ranks(
                    segment["layout"]["world"], "sequence_ranks", "run_segment", given, timeout=SECONDS
                )
            except AssertionError as error:
                found = error
            if found is not None:
                return f"{found} (in the layout {segment['layout']})", {}
        return None, digests(end) if case.get("exact") else {}


# ----------------------------------------------------------------------------------------------------------- shrinking

PLAINER: list[Case] = [{"frozen": []}, {"hooked": None}, {"ema": None}, {"compile": False}, {"exact": False}]
PLAINER += [{"tied": False}, {"shard_ends": False}, {"accumulation": 1}, {"criterion": "mean"}, {"clip": None}]
PLAINER += [{"optimizer": "sgd-plain"}, PLAIN]


def shrink(case: Case, failure: str, fails: Callable[[Case], str | None] = run) -> tuple[Case, str]:
    """A shorter case that fails, and how."""
    deadline = time.monotonic() + SHRINKING

    def attempt(**changes: Any) -> None:
        nonlocal case, failure
        if time.monotonic() > deadline or all(case.get(key) == value for key, value in changes.items()):
            return
        found = fails(case | changes)
        # the exact mode has no 64-true
        if found is not None and ("ConfigError" in found) == ("ConfigError" in failure):
            case, failure = case | changes, found

    def leave_out(*sizes: int) -> None:
        for size in sizes:
            index = len(case["operations"]) - size
            while index >= 0:
                attempt(operations=case["operations"][:index] + case["operations"][index + size :])
                index = min(index, len(case["operations"])) - size

    if where := re.search(r"at operation (\d+)", failure):
        attempt(operations=case["operations"][: int(where[1]) + 1])
    leave_out(6, 3, 1)
    for plainer in PLAINER:
        attempt(**plainer)
    leave_out(2, 1)
    return case, failure


def report(seed: str, case: Case, failure: str) -> str:
    """What a failed test prints."""
    text = json.dumps(case, ensure_ascii=False)
    return (
        f"the sequence of seed {seed} fails. PARAMP_TEST_SEQUENCE={seed} replays it; its shortest failing form is\n"
        f"PARAMP_TEST_SEQUENCE='{text}'\n{failure}"
    )
