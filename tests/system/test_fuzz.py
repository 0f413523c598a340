"""Random configurations and command lines: each is accepted, or refused in one line that names the key.

``make test-all`` tries thousands and trains twenty of those that are accepted; otherwise a few hundred and two.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import typing
from pathlib import Path

import numpy as np
import pytest
import torch
from families import SEED, family, number
from pool import World, run_on_ranks
from reference import batches, rank_slice, small_gpt
from train_app.settings import FLAGS, Job, TrainConfig, configure, number_or_word

import paramp
from paramp.base.values_checked_by_type import build
from paramp.compat import foreign_config_values, foreign_key_advice
from paramp.compat.colossalai.amp import AMP_TYPE
from paramp.compat.foreign_config_values import _OPTIONS
from paramp.config.files import load
from paramp.config.layout import ParallelConfig, PipelineConfig, TensorConfig
from paramp.config.pipeline_schedules import SCHEDULES
from paramp.config.schema import Config, flatten
from paramp.models import GPT, GPTConfig
from paramp.precision import modes
from paramp.precision.modes import PRESETS, STORAGE, Float8
from paramp.scaling.loss_scaling_options import LossScaling

pytest.importorskip("hypothesis")

from hypothesis import HealthCheck, assume, given, seed, settings
from hypothesis import strategies as st

ALIASES = modes.ALIASES | foreign_config_values.ALIASES


def fuzz(short: int, full: int):
    chosen = settings(
        max_examples=number(short, full),
        derandomize=not SEED,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    return lambda test: family(seed(SEED)(chosen(test)) if SEED else chosen(test))


# ------------------------------------------------------------------------------------------------------- what is drawn

INTEGERS = st.one_of(
    st.integers(-1, 9), st.sampled_from([16, 32, 64, 2**31, 2**63 - 1, 2**63, 2**64, -(2**63), 10**400])
)
NUMBERS = st.one_of(
    st.floats(), st.sampled_from([0.0, -0.0, 0.5, 1.0, 2.0, 1e-45, 1e-320, 1e39, 1e300, math.inf, math.nan])
)
ODD_TEXTS = ["auto", "True", "1", "", " ", "\n", "a\nb", "\0", "\ud800", "nan", "1e999", "x" * 3000, "%s", "{}"]
NAMES_OF_MODES = [*PRESETS, *SCHEDULES, *map(str, ALIASES), "float16", "fp16", "torch.float8_e4m3fn", "torch.nn"]
TEXTS = st.one_of(st.text(max_size=6), st.sampled_from(ODD_TEXTS), st.sampled_from(NAMES_OF_MODES))
ODD = [np.int64(2), np.float32(0.5), np.zeros(3), torch.zeros(2, 2), torch.float16, torch.int8, Path("a"), b"x"]
ODD += [*AMP_TYPE, PRESETS["16-mixed"], LossScaling(), TensorConfig(), object, len, {1, 2}]
SCALARS = st.one_of(st.none(), st.booleans(), INTEGERS, NUMBERS, TEXTS, st.sampled_from(ODD))
ANYTHING = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner),
        st.dictionaries(st.one_of(TEXTS, st.integers(), st.none()), inner, max_size=2),
    ),
    max_leaves=4,
)


def misspelt(names):
    """Names that are nearly one of ``names``."""
    slips = (
        lambda name: name[1:],
        lambda name: name + "s",
        lambda name: name.upper(),
        lambda name: name.title(),
        lambda name: name.replace("_", "-"),
        lambda name: name.replace("e", "", 1),
    )
    return st.builds(lambda name, slip: slip(name), st.sampled_from(sorted(names)), st.sampled_from(slips))


def plausible(hint):
    """Values of the type ``hint``, sensible and not."""
    if dataclasses.is_dataclass(hint):
        return tables(hint)
    if typing.get_origin(hint) is typing.Literal:
        return st.sampled_from(typing.get_args(hint))
    choices = typing.get_args(hint)
    if choices and typing.get_origin(hint) is not tuple:
        return st.one_of(*map(plausible, choices)) if all(isinstance(c, type) or choices for c in choices) else ANYTHING
    known = {
        int: st.one_of(st.integers(1, 4), INTEGERS),
        float: st.one_of(st.floats(1e-3, 10), NUMBERS),
        bool: st.booleans(),
        str: TEXTS,
        type(None): st.none(),
        torch.dtype: st.sampled_from([torch.float16, torch.float32, torch.bfloat16, "fp32", "bf16"]),
    }
    return known.get(hint, st.lists(TEXTS, max_size=3))


PRECISIONS = st.sampled_from([*PRESETS, *ALIASES, AMP_TYPE.APEX, *AMP_TYPE])
SPELLED = {**typing.get_type_hints(LossScaling), **typing.get_type_hints(Float8)}
APEX = {
    "opt_level": st.sampled_from(["O0", "O1", "O2", "O3", "O4", 1]),
    "loss_scale": st.one_of(st.sampled_from(["dynamic", "128.0", "x", "nan"]), NUMBERS),
}


def with_mode(mode):
    """``{"mode": mode, ...}`` with options that it may have."""
    known = _OPTIONS[mode] if isinstance(mode, AMP_TYPE) else [*SPELLED, *STORAGE]
    options = {name: st.one_of(APEX.get(name, plausible(SPELLED.get(name, float))), ANYTHING) for name in sorted(known)}
    return spread(options, misspelt(known)).map(lambda table: {"mode": mode, **table})


def spread(values, other_keys, most=4):
    """Tables with some of the keys of ``values``, and now and then another."""
    own = st.lists(st.sampled_from(sorted(values)), max_size=most, unique=True).flatmap(
        lambda names: st.fixed_dictionaries({name: values[name] for name in names})
    )
    other = st.dictionaries(st.one_of(other_keys, TEXTS), ANYTHING, max_size=1)
    return st.one_of(own, own, own, own, st.builds(lambda a, b: {**b, **a}, own, other))


def tables(cls):
    """Mappings for the dataclass ``cls``, or something else in place of one."""
    hints = typing.get_type_hints(cls)
    special = {
        "precision": st.one_of(PRECISIONS, PRECISIONS.flatmap(with_mode)),
        "schedule": st.sampled_from([*SCHEDULES, "1F1B", "ZBVZeroBubble", "zbw"]),
        "user": st.nothing(),
    }
    values = {}
    for item in dataclasses.fields(cls):
        good = special.get(item.name, st.nothing() if item.name == "user" else plausible(hints[item.name]))
        if item.name != "user":
            values[item.name] = st.one_of(good, good, good, good, ANYTHING)
    if cls is Config:
        values["fp16"] = st.one_of(PRECISIONS, st.sampled_from(list(AMP_TYPE)).flatmap(with_mode), ANYTHING)
        values["BATCH_SIZE"] = ANYTHING
    table = spread(values, misspelt(values), most=5)
    return st.one_of(table, st.integers(0, 4)) if "size" in values else table


CONFIGS = st.one_of(tables(Config), tables(Config), tables(Config), ANYTHING)

TABLES = {
    "": Config,
    "parallel.": ParallelConfig,
    "parallel.tensor.": TensorConfig,
    "parallel.pipeline.": PipelineConfig,
}
TABLES |= {"train.": TrainConfig, "model.": GPTConfig}
KEYS = sorted(f"{table}{item.name}" for table, cls in TABLES.items() for item in dataclasses.fields(cls))
KEYS += ["fp16.mode", "fp16.initial_scale", "precision.mode", "precision.init_scale", "OWN", "parallel.tensor.size.x"]
TOML = st.one_of(
    st.sampled_from(
        ["2", "0", "-1", "true", "None", "[1, 2]", "{size = 2}", '"zbv"', "1e400", "nan", "1979-05-27", "[" * 3000]
    ),
    st.sampled_from(["9" * 5000, "1\nseed = 3", "'", "{", "\0", "a b", "16-mixed"]),
    TEXTS,
)
LINE_TEXTS = TEXTS.filter(lambda text: not text.startswith("-h") and not "--help".startswith(text or "x"))
SETTINGS = st.builds(
    lambda key, sign, value: f"{key}{sign}{value}",
    st.one_of(st.sampled_from(KEYS), misspelt(KEYS), TEXTS),
    st.sampled_from(["=", "=", "=", "=", "", "=="]),
    TOML,
)


def flag_words():
    """A flag and its value, or something like it."""
    flags = sorted(flag.name for flag in FLAGS)
    good = {
        int: st.integers(1, 4).map(str),
        float: st.floats(1e-4, 10).map(str),
        number_or_word: st.sampled_from(["2", "full", "selective"]),
        str: st.sampled_from(["16-mixed", "bf16", "zbv", "1f1b", "fused", "plain", "tiny", "stdlib", "runs"]),
    }
    kinds = {flag.name: flag.kind for flag in FLAGS if flag.kind is not bool}
    fitting = st.sampled_from(sorted(kinds)).flatmap(lambda flag: st.tuples(st.just(flag), good[kinds[flag]]))
    numbers = st.one_of(st.integers(-2, 70), INTEGERS.filter(lambda value: abs(value) < 10**1000), NUMBERS).map(str)
    value = st.one_of(numbers, numbers, LINE_TEXTS)
    known = st.sampled_from(flags)
    slip = misspelt([flag[2:] for flag in flags]).map(lambda name: f"--{name}")
    partition = known.map(lambda flag: flag[:5])
    return st.one_of(
        *[fitting] * 6,
        st.tuples(known, value),
        st.tuples(known, value),
        st.builds(lambda flag, value: (f"{flag}={value}",), known, value),
        st.tuples(st.one_of(known, partition, slip)),
        st.tuples(st.one_of(slip, partition), value),
        st.tuples(st.just("--set"), SETTINGS),
        st.tuples(st.just("--set"), SETTINGS),
        st.tuples(st.just("--config"), st.sampled_from(["launch/tiny.toml", "absent.toml", ".", "README.md", "\0.py"])),
        st.tuples(st.just("--emulate-fp16"), st.one_of(st.sampled_from(["on", "off", "auto"]), value)),
        st.tuples(LINE_TEXTS),
    )


LINES = st.lists(flag_words(), max_size=4).map(lambda groups: [word for group in groups for word in group])


# --------------------------------------------------------------------------------------------------- what has to hold


def plain(name):
    """``name`` in the letters in which advice for other libraries' keys looks for it."""
    return name.lower().replace("-", "_")


def check_complaint(error, names):
    """One line of a sensible length that names one of ``names``, or quotes something else that was given."""
    message = str(error)
    assert len(message.splitlines()) == 1, message
    assert message.isprintable(), message
    assert len(message) < 1500, message
    named = re.match(
        r"(argument )?(-?-?[\w.\-/\[\]]+(?:'.*?')?|'.*?'|\".*?\"|[^\s:]+)( KEY=VALUE| \(\d+ characters\))?: ", message
    )
    assert named or re.search(r"(ambiguous option|expected one argument|no file)", message), message
    if named:
        word = re.split(r"[.\[]", named[2].strip("'\"-").replace("/", "."))
        assert {*map(plain, word)} & names or "no such" in message or named[2] in ("config",), message


NAMES = {"fp16", "precision", "config", "set", "user", "mode", "emulate-fp16"} | {
    part for key in KEYS for part in key.split(".")
}
NAMES |= set(SPELLED) | {name for names in _OPTIONS.values() for name in names} | {"dp", "tp", "pp"}
NAMES |= {flag.name.strip("-") for flag in FLAGS}
NAMES |= {*foreign_key_advice.TOP, *foreign_key_advice.NAMES}
NAMES = {*map(plain, NAMES)}


def check_accepted(config):
    """What is printed and saved of a configuration is plain, and makes the same one."""
    flat = flatten(config)
    assert json.loads(json.dumps(flat)).keys() == flat.keys()
    tree = {}
    own = {key: value for key, value in flat.items() if not key.startswith("precision") and not key[0].isupper()}
    for key, value in own.items():
        *path, leaf = key.split(".")
        table = tree
        for part in path:
            table = table.setdefault(part, {})
        table[leaf] = value
    again = load(tree)
    for name in ("parallel", "clip_grad_norm", "gradient_accumulation", "seed", "emulate_fp16"):
        assert getattr(again, name) == getattr(config, name)


@fuzz(150, 2000)
@given(tree=CONFIGS)
def test_a_configuration_is_accepted_or_refused_in_one_line(tree):
    try:
        config = load(tree)
    except paramp.ConfigError as error:
        check_complaint(error, NAMES)
    except FileNotFoundError:
        assert isinstance(tree, (str, Path))
    else:
        check_accepted(config)


@fuzz(150, 2000)
@given(words=LINES)
def test_a_command_line_is_accepted_or_refused_in_one_line(words):
    try:
        config, job = configure(words)
    except (paramp.ConfigError, FileNotFoundError) as error:
        check_complaint(error, NAMES)
    else:
        check_accepted(config)
        tables = {}
        for key, value in flatten(job).items():
            table, _, name = key.partition(".")
            tables.setdefault(table, {})[name] = value
        assert build(Job, tables, "") == job


# ----------------------------------------------------------------------------------------------- what was accepted runs


SIZES = [{}, {"tensor": 2}, {"tensor": 2, "sequence_parallel": True}, {"pipeline": {"size": 2}}, {"data": 2}]
PIPELINE = {
    "schedule": st.sampled_from(sorted(SCHEDULES)),
    "microbatches": st.integers(1, 6),
    "stages_per_rank": st.integers(1, 3),
}
OPTIONS = {
    "clip_grad_norm": st.one_of(st.none(), plausible(float)),
    "gradient_accumulation": st.integers(1, 3),
    "masters": st.sampled_from([None, "full", "remainder"]),
    "grad_dtype": st.sampled_from([None, "fp32", "fp16"]),
    "reduce_dtype": st.sampled_from([None, "fp32", "bf16", {"dp": "fp32"}]),
    "seed": plausible(int),
    "emulate_fp16": st.sampled_from([True, False, "auto"]),
}
PARALLEL = st.builds(
    lambda size, pipeline, zero: {"data": 1} | size | {"pipeline": size.get("pipeline", {}) | pipeline, "zero": zero},
    st.sampled_from(SIZES),
    st.fixed_dictionaries({}, optional=PIPELINE),
    st.integers(0, 1),
)
"""Of a world of one or of two."""
TRAINABLE = st.builds(
    lambda parallel, precision, rest: {"parallel": parallel, "precision": precision, **rest},
    PARALLEL,
    st.one_of(st.sampled_from(sorted(PRESETS)), st.sampled_from(sorted(PRESETS)).flatmap(with_mode)),
    st.fixed_dictionaries({}, optional=OPTIONS),
)


def train_two_steps(world, tree):
    """The results of two steps, or what was complained of."""
    try:
        with paramp.launch_from_torch(tree, device=world.device) as context:
            config = context.config
            torch.manual_seed(0)
            model = small_gpt(num_layers=4, init_std=0.2)
            engine, *_ = paramp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), GPT.loss)
            size = config.parallel.pipeline.num_microbatches * context.dp.size
            results = []
            for x, y in batches(2 * config.gradient_accumulation, size=size, length=8):
                x, y = (rank_slice(tensor, context.dp.rank, context.dp.size) for tensor in (x, y))
                loss = engine.forward_backward(x, y).item()
                result = engine.step()
                engine.zero_grad()
                results.append((loss, result.overflow, result.loss_scale))
            assert engine.num_steps + engine.num_skipped == 2
            return results
    except paramp.ConfigError as error:
        return str(error)


@fuzz(2, 20)
@given(tree=TRAINABLE)
def test_what_is_accepted_trains(tree):
    try:
        parallel = load(tree).parallel
    except paramp.ConfigError:
        assume(False)
    size = parallel.tensor.size * parallel.pipeline.size * parallel.data
    if size == 1:
        found = [train_two_steps(World(0, 1, "cpu"), tree)]
    else:
        found = run_on_ranks(size, __name__, "train_two_steps", {"tree": tree})
    assert all(repr(other) == repr(found[0]) for other in found)
    if isinstance(found[0], str):
        check_complaint(found[0], NAMES | {"batch", "plan", "model", "optimizer"})
        return
    assert all(math.isfinite(loss) and math.isfinite(scale) and scale > 0 for loss, _, scale in found[0]), found[0]
