"""The configuration: defaults, precision modes and their other names, files, and what is said of everything else."""

import dataclasses
import functools
import json
import re

import numpy as np
import pytest
import torch
from layouts import sized_layouts
from matrix import ALL_LAYOUTS

import paramp
from paramp.compat.colossalai.amp import AMP_TYPE
from paramp.config.files import load, merge
from paramp.config.schema import Config, flatten
from paramp.precision.modes import PRESETS, Precision


def test_the_defaults_are_one_process_in_fp32_without_clipping():
    config = load(None)
    assert config == Config()
    assert config.precision is PRESETS["32-true"]
    assert (config.parallel.tensor.size, config.parallel.pipeline.size, config.parallel.data) == (1, 1, "auto")
    assert (config.seed, config.clip_grad_norm, config.max_skipped_in_a_row) == (1024, None, 50)
    assert (config.hang_timeout, config.hang_end_after, config.trace_overflow) == (300.0, 4, False)


@pytest.mark.parametrize("mode", sorted(PRESETS))
def test_all_defaults_can_be_written_out(mode):
    written = {"masters": "full", "grad_dtype": None, "reduce_dtype": None, "rounding": "nearest", "ema": None}
    written |= {"optimizer_state": "full", "compile": False, "activation_checkpointing": "none"}
    written |= {"gradient_accumulation": 1, "reproducible": False}
    assert load({"precision": mode} | written).precision == load({"precision": mode}).precision


def test_numbers_of_numpy_are_numbers():
    found = load({"clip_grad_norm": np.float32(0.5)}).clip_grad_norm
    assert (found, type(found)) == (0.5, float)
    config = load({"gradient_accumulation": np.int64(2), "parallel": {"tensor": np.int32(4)}})
    assert config == load({"gradient_accumulation": 2, "parallel": {"tensor": 4}})
    assert {type(config.gradient_accumulation), type(config.parallel.tensor.size)} == {int}
    assert (
        load({"parallel": {"tensor": np.int64(2)}}, {"parallel": {"tensor": {"mode": "1d"}}}).parallel.tensor.size == 2
    )


def scaling(precision, *names):
    return tuple(getattr(precision.scaling, name) for name in names)


LIMITS = ("init_scale", "min_scale", "max_scale")
MOVES = ("growth_factor", "backoff_factor", "growth_interval", "hysteresis")


def test_a_configuration_of_colossalai_is_accepted():
    parallel = {"tensor": {"size": 2, "mode": "1d"}, "pipeline": 2}
    config = load({"BATCH_SIZE": 128, "parallel": parallel, "fp16": {"mode": AMP_TYPE.NAIVE}})
    assert config.BATCH_SIZE == 128
    assert (config.parallel.tensor.size, config.parallel.pipeline.size) == (2, 2)
    # The document's defaults.
    assert scaling(config.precision, *LIMITS, *MOVES) == (2.0**32, 1, 2.0**32, 2, 0.5, 1000, 2)
    named = load({"precision": AMP_TYPE.NAIVE}).precision
    assert scaling(named, "init_scale", "growth_interval", "hysteresis") == (2.0**16, 1000, 2)
    options = {"log_num_zeros_in_grad": True, "initial_scale": 8}
    precision = load({"fp16": {"mode": AMP_TYPE.NAIVE, **options}}).precision
    assert (precision.log_num_zeros, precision.scaling.init_scale) == (True, 8)


def test_torch_amp_has_colossalais_options_and_defaults():
    precision = load({"fp16": {"mode": AMP_TYPE.TORCH}}).precision
    assert precision == PRESETS["16-mixed"]
    assert scaling(precision, "init_scale", "enabled", *MOVES) == (2.0**16, True, 2, 0.5, 2000, 1)
    given = load({"fp16": {"mode": AMP_TYPE.TORCH, "init_scale": 4, "enabled": False}}).precision
    assert scaling(given, "init_scale", "enabled") == (4, False)


def test_apex_amp_has_colossalais_options_and_defaults():
    def parse(**options):
        return load({"fp16": {"mode": AMP_TYPE.APEX, **options}}).precision

    plain = parse()
    assert plain == Precision.parse(AMP_TYPE.APEX)
    assert dataclasses.replace(plain, scaling=None) == dataclasses.replace(PRESETS["16-mixed"], scaling=None)
    assert scaling(plain, *LIMITS) == (2.0**16, None, 16777216.0)
    assert parse(opt_level="O0") == parse(enabled=False) == PRESETS["32-true"]
    assert parse(opt_level="O2") == PRESETS["O2"]
    assert parse(opt_level="O3") == PRESETS["O3"]
    static = parse(opt_level="O2", loss_scale="128.0", keep_batchnorm_fp32="False", cast_model_outputs=torch.float16)
    assert scaling(static, *LIMITS) == (128, 128, 128)
    assert (static.keep_batchnorm_fp32, static.outputs) == (False, torch.float16)
    assert parse(max_loss_scale=8.0).scaling.init_scale == 8  # as Apex starts at its ceiling
    brain = parse(opt_level="O2", cast_model_type=torch.bfloat16, min_loss_scale=1.0, num_losses=2, verbosity=0)
    assert (brain.weights, brain.compute, brain.norms) == (torch.bfloat16,) * 3
    assert (brain.masters, brain.scaling.min_scale) == (True, 1)


def test_a_mode_given_by_name_accepts_its_options():
    precision = load({"precision": {"mode": "16-naive", "init_scale": 4, "hysteresis": 1}}).precision
    assert (precision.name, *scaling(precision, "init_scale", "hysteresis")) == ("16-naive", 4, 1)
    assert precision.scaling.growth_interval == PRESETS["16-naive"].scaling.growth_interval
    precision = load({"precision": {"mode": "amp_fp8", "recipe": "rowwise", "skip": ["head"]}}).precision
    assert (precision.float8.recipe, precision.float8.skip, precision.scaling) == ("rowwise", ("head",), None)
    static = load({"precision": {"mode": "O3", "init_scale": 128.0}}).precision
    assert scaling(static, *LIMITS) == (128, 128, 128)


ALIASES = {
    "32-true": (32, "fp32", "float32", "O0", torch.float32),
    "16-mixed": (16, "16", "amp", "amp_fp16", "O1", AMP_TYPE.TORCH, "fp16", "float16", torch.float16),
    "bf16-mixed": ("bf16", "bfloat16", torch.bfloat16, "amp_bf16"),
    "16-naive": (AMP_TYPE.NAIVE, "16-naive"),
    "64-true": (64, "64", "fp64", "float64", torch.float64),
    "fp8-mixed": ("amp_fp8",),
    **{name: (name,) for name in ("bf16-naive", "O2", "O3")},
}


def test_aliases_name_a_mode():
    found = {name: Precision.parse(name) for names in ALIASES.values() for name in names}
    assert found == {name: PRESETS[row] for row, names in ALIASES.items() for name in names}


def test_norms_of_a_mode_are_computed_as_the_rest_but_under_autocast():
    """The other columns are those of the page (tests/system/test_docs.py)."""
    assert [name for name, row in PRESETS.items() if row.keep_batchnorm_fp32] == ["O2"]
    assert all(row.norms is (torch.float32 if row.autocast else row.compute) for row in PRESETS.values())
    starts = {name: row.scaling.init_scale for name, row in PRESETS.items() if row.scaling is not None}
    assert starts == dict.fromkeys(starts, 2.0**16) | {"O3": 1}
    intervals = {name: PRESETS[name].scaling.growth_interval for name in starts}
    assert intervals == dict.fromkeys(starts, 2000) | {"16-naive": 1000}
    assert scaling(PRESETS["O3"], *LIMITS) == (1, 1, 1)


def tree_of(values):
    """The configuration with each value at its path."""
    tree = {}
    for path, value in values.items():
        *tables, key = path.split(".")
        functools.reduce(lambda table, name: table.setdefault(name, {}), tables, tree)[key] = value
    return tree


def pipeline(size=2, schedule="1f1b", **options):
    return {"parallel.pipeline": {"size": size, "schedule": schedule} | options}


SHARDED = {"parallel.data": {"shard": 2}}
NAIVE, TORCH, APEX = ({"mode": mode} for mode in (AMP_TYPE.NAIVE, AMP_TYPE.TORCH, AMP_TYPE.APEX))
ERRORS = [
    ({"paralel": {}}, r"paralel: no such key.*did you mean 'parallel'"),
    ({"parallel.tensor.sise": 2}, r"parallel\.tensor\.sise: no such key.*'size'"),
    ({"parallel.tensor.mode": "2d"}, r"parallel\.tensor\.mode: got '2d', expected '1d'"),
    ({"parallel.tensor": "two"}, r"parallel\.tensor: got 'two', expected a table"),
    ({"parallel.tensor": {"size": 2, "mode": None}}, r"parallel\.tensor\.mode: got None, expected '1d', because"),
    ({"parallel.data": 1.5}, r"parallel\.data: got 1\.5, expected an integer or 'auto'"),
    ({"parallel.data": True}, r"parallel\.data: got True"),
    ({"parallel.zero": 4}, r"parallel\.zero: got 4, expected 0 or 1"),
    (
        {"parallel.zero": 3},
        r"parallel\.zero: got 3; here, write \{'parallel': \{'data': \{'shard': 4\}\}\}; stages 2 and",
    ),
    ({"fp16": True}, r"^fp16: got True; here, write \{'precision': '16-mixed'\}$"),
    (
        {"gradient_clipping": 0.5},
        r"^gradient_clipping: got 0\.5, as in DeepSpeed; here, write \{'clip_grad_norm': 0\.5\}$",
    ),
    ({"optimizer": {"type": "AdamW"}}, r"optimizer: got .*; here, pass a torch\.optim optimizer to paramp\.initialize"),
    ({"precision": True}, r"^precision: got True; here, write \{'precision': '16-mixed'\}$"),
    ({"parallel.sequence_parallel": True}, r"parallel\.sequence_parallel: got True, expected False"),
    ({"compile.bakcend": "eager"}, r"compile: got 'bakcend', expected one of .*did you mean 'backend'"),
    ({"compile.fullgraph": "no"}, r"compile\.fullgraph: got 'no', expected True or False"),
    ({"compile.backend": None}, r"compile\.backend: got None, expected the name of a backend or a callable"),
    ({"compile.dynamic": "yes"}, r"compile\.dynamic: got 'yes', expected True, False or None"),
    ({"compile.options": 3}, r"compile\.options: got 3, expected a table of the backend's options"),
    (pipeline(2, "1f2b"), r"parallel\.pipeline\.schedule: got '1f2b', expected one of gpipe, 1f1b, .*mean '1f1b'"),
    (pipeline(2, "zbw"), r"parallel\.pipeline\.schedule: got 'zbw', expected .*did you mean 'zbv'"),
    (pipeline(4, microbatches=2), r"parallel\.pipeline\.microbatches: got 2, expected at least 4"),
    (pipeline(3, split=["a"]), r"parallel\.pipeline\.split: got \['a'\], expected 2"),
    (pipeline(2, "zbv", split=["a"]), r"expected 3 module names, .* after the first of 4, 2 on each of 2 ranks"),
    (pipeline(stages_per_rank=2), r"stages_per_rank: got 2, expected 1 for the schedule '1f1b'"),
    (pipeline(2, "DualPipeV", stages_per_rank=3), r"per_rank: got 3, expected 2 for the schedule 'dualpipev'"),
    (pipeline(2, "looped-bfs", stages_per_rank=0), r"stages_per_rank: got 0, expected an integer of 1 or more"),
    (pipeline(3, "dualpipev", microbatches=5), r"got 5, expected at least 6, 2 for each of the 3 ranks, for the sch"),
    (pipeline(2, "interleaved-1f1b", microbatches=7), r"got 7, expected a multiple of 3, such as 6, because .* in 3 r"),
    (pipeline(4, "interleaved-zero-bubble", microbatches=9), r"got 9, expected a multiple of 2, such as 8"),
    *(
        (
            pipeline(2, name) | SHARDED,
            rf"parallel\.pipeline\.schedule: got '{name}', expected 1f1b, gpipe, interleaved-1f1b or looped-bfs, "
            r"because data\.shard is 2, and fully_shard loses gradients of backwards that run in two halves",
        )
        for name in ("interleaved-zero-bubble", "zbv", "dualpipev")
    ),
    (SHARDED | {"parallel.zero": 1}, r"zero: got 1, expected 0, because data\.shard shards masters and optimizer st"),
    (
        SHARDED | {"precision": "16-naive", "masters": "remainder"},
        r"masters: got 'remainder', expected 'full', because parallel\.data\.shard is 2",
    ),
    (
        SHARDED | {"precision": "16-naive", "grad_dtype": "fp32"},
        r"grad_dtype: got torch\.float32, expected None, because parallel\.data\.shard is 2, .* in reduce_dtype",
    ),
    ({"parallel.data.shard": 0}, r"parallel\.data\.shard: got 0, expected an integer of 1 or more"),
    ({"parallel.data.prefetch": -1}, r"prefetch: got -1, expected an integer of 0 or more"),
    ({"parallel.data.shards": 2}, r"shards: no such key.*did you mean 'shard'"),
    ({"train.lr": 0.1}, r"train: no key of the library, but a table of launch/train\.py, .*remove it here, or give"),
    ({"model": {"width": 8}}, r"model: no key of the library, but a table of launch/train\.py"),
    ({"precision": "17-mixed"}, r"precision: got '17-mixed', expected one of .*did you mean '16-mixed'"),
    ({"fp16": np.zeros(3)}, r"fp16: got array\(\[0\., 0\., 0\.\]\), expected"),
    ({"precision": "16-mixed", "fp16": TORCH}, r"fp16: given together with precision"),
    ({"fp16": TORCH | {"hysteresis": 2}}, r"fp16\.hysteresis: no such option of AMP_TYPE\.TORCH"),
    ({"fp16": TORCH | {"opt_level": "O2"}}, r"fp16\.opt_level: .*belongs to AMP_TYPE\.APEX\)"),
    ({"fp16": NAIVE | {"init_scale": 2}}, r"fp16\.init_scale.*did you mean 'initial_scale'"),
    ({"fp16": NAIVE | {"initial_scale": "big"}}, r"fp16\.initial_scale: got 'big', expected a num"),
    ({"fp16": NAIVE | {"backoff_factor": 2}}, r"fp16\.backoff_factor: got 2\.0, expected a number betw"),
    ({"fp16": {}}, r"fp16\.mode: got None, expected one of AMP_TYPE\.APEX, AMP_TYPE\.TORCH"),
    ({"fp16": APEX | {"opt_level": "O4"}}, r"fp16\.opt_level: got 'O4', expected one of O0, O1"),
    ({"fp16": APEX | {"opt_level": ["O1"]}}, r"fp16\.opt_level: got \['O1'\], expected one of O0"),
    ({"fp16": APEX | {"keep_batchnorm_fp32": True}}, r"keep_batchnorm_fp32: got True with opt_level 'O1'"),
    ({"fp16": APEX | {"loss_scale": "big"}}, r"fp16\.loss_scale: got 'big', expected 'dynamic'"),
    ({"fp16": APEX | {"min_loss_scale": "4"}}, r"fp16\.min_loss_scale: got '4', expected a number"),
    ({"precision": {"mode": "16-mixed", "init_scale": "x"}}, r"precision\.init_scale: got 'x', expected a number"),
    ({"precision": {"mode": "32-true", "init_scale": 2}}, r"precision\.init_scale: no such option of mode '32-true'"),
    ({"precision": {"mode": "fp8-mixed", "te_recipe": {}}}, r"precision\.te_recipe: no such option of mode 'fp8-mi"),
    ({"precision": {"mode": "fp8-mixed", "recipe": "x"}}, r"precision\.recipe: got 'x', expected 'tensorwise' or"),
    ({"precision": {"mode": "16-naive", "grad_dtype": "int8"}}, r"grad_dtype: got 'int8', expected a floating"),
    ({"precision": "16-mixed", "masters": "remainder"}, r"expected 'full', because the mode has no masters; 16-naive"),
    ({"precision": "16-naive", "masters": "rest"}, r"masters: got 'rest', expected 'full' or 'remainder' or None"),
    ({"precision": "O2", "grad_dtype": "bf16"}, r"grad_dtype: got 'bf16', expected torch\.float16 or torch\.float32"),
    ({"grad_dtype": "float64"}, r"grad_dtype: got 'float64', expected torch\.float32"),
    ({"reduce_dtype": {"dp": "fp32", "ep": "fp32"}}, r"reduce_dtype\.ep: no such axis, expected one of dp, tp, pp"),
    ({"reduce_dtype": "half-ish"}, r"reduce_dtype\.dp: got 'half-ish', expected a floating-point dtype"),
    ({"clip_grad_norm": 0}, r"clip_grad_norm: got 0\.0, expected a finite number above 0, or None"),
    ({"clip_grad_norm": "1"}, r"clip_grad_norm: got '1', expected a number or None"),
    ({"gradient_accumulation": 2.0}, r"gradient_accumulation: got 2\.0, expected an integer"),
    ({"seed": -1}, r"seed: got -1"),
    ({"NUM_MICRO_BATCHES": "4"} | pipeline(), "NUM_MICRO_BATCHES: got '4', expected an integer"),
    ({"NUM_MICRO_BATCHES": 1} | pipeline(), "NUM_MICRO_BATCHES: microbatches: got 1, expected at least 2"),
    ({"NUM_MICRO_BATCHES": 4} | pipeline(microbatches=2), r"got 4, but parallel\.pipeline\.microbatches is 2"),
]
ODD = [
    ({"a\nb": 1}, r"'a\\nb': no such key, expected one of parallel, "),
    ({"": 1}, r"'': no such key"),
    ({None: 1}, r"None: no such key"),
    ({"x" * 3000: 1}, r"'x{199}\.\.\. \(3002 characters\): no such key"),
    ({"precision": {"mode": "16-mixed", "a b": 1}}, r"precision\.'a b': no such option"),
    ({"precision": "x" * 3000}, r"precision: got 'x{199}\.\.\. \(3002 characters\), expected one of 32-true, "),
    ({"seed": 10**5000}, r"seed: got a value of the type int \(.*digits.*\), expected a signed 64"),
    ({"seed": 2**63}, r"seed: got 9223372036854775808, expected a signed 64-bit integer"),
    ({"gradient_accumulation": 2**63}, r"gradient_accumulation: got 9223372036854775808, expected a signed 64-bit"),
    ({"clip_grad_norm": 10**400}, r"clip_grad_norm: got 10+\.\.\. \(401 characters\), expected a number or None"),
    ({"parallel": {"tensor": {"mode": np.zeros(2)}}}, r"tensor\.mode: got array\(\[0., 0.\]\), expected '1d'"),
    ({"seed": torch.zeros(2, 2)}, r"seed: got tensor\(\[\[0., 0.\], \[0., 0.\]\]\), expected an integer"),
    ({"precision": {"mode": "16-mixed", "init_scale": 1e39}}, r"precision\.init_scale: got 1e\+39, expected a num"),
    ({"precision": {"mode": "16-mixed", "init_scale": 1e-46}}, r"precision\.init_scale: got 1e-46, expected a num"),
]


ALL = [(tree_of(values), message) for values, message in ERRORS]
ALL += [(tree, rf"^(parallel\.)?{message}") for tree, message in ODD]


@pytest.mark.parametrize(("tree", "message"), ALL)
def test_errors_name_the_key_the_value_and_what_is_allowed(tree, message):
    """In one short line."""
    with pytest.raises(paramp.ConfigError, match=message) as caught:
        load(tree)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1000


def test_toml_and_python_files_give_the_same_configuration(tmp_path):
    texts = {
        "run.toml": 'LAYERS = 3\nprecision = "16-naive"\n[parallel]\ntensor = 2\n[parallel.pipeline]\nsize = 2\n',
        "run.py": "CONFIG = dict(LAYERS=3, precision='16-naive', parallel=dict(tensor=2, pipeline=dict(size=2)))\n",
        "flat.py": "import os\nfrom paramp.amp import AMP_TYPE\n"
        "LAYERS = 3\nprecision = '16-naive'\nparallel = dict(tensor=2, pipeline=dict(size=2))\n",
    }
    texts["beside.py"] = "LAYERS, OTHER, lr, precision = 9, 4, 0.1, 'bf16'\n" + texts["run.py"]  # CONFIG wins
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    toml, python, flat, beside = (load(tmp_path / name) for name in texts)
    assert toml == python == flat == load(str(tmp_path / "run.toml"))
    assert (toml.LAYERS, beside.LAYERS, beside.OTHER) == (3, 3, 4)
    (tmp_path / "beside.py").write_text("import numpy\nseed = numpy.int64(1)\n" + texts["run.py"])
    with pytest.warns(UserWarning, match=r"seed: is no key beside CONFIG in .*; if it is meant as one, write it into"):
        assert load(tmp_path / "beside.py") == toml


def test_the_names_of_a_python_file_have_any_value_that_their_keys_have(tmp_path):
    """What else it imports or makes is no setting, whatever its name."""
    (tmp_path / "flat.py").write_text(
        "import torch\nfrom torch import compile\nfrom enum import Enum\nimport random as seed\n"
        "from paramp.amp import AMP_TYPE\nfrom paramp.config.schema import EmaConfig\n"
        "other, half, dtype, missing = Enum('Other', 'A').A, torch.float16, torch.float16, None\n"
        "def compile(model): return model\n"
        "from torch.nn import DataParallel as Parallel\ncompiler = torch.compile\nclass precisions: pass\n"
        "fp16, grad_dtype, hang_timeout, ema = AMP_TYPE.NAIVE, torch.float32, None, EmaConfig(decay=0.5)\n"
    )
    expected = {"fp16": AMP_TYPE.NAIVE, "grad_dtype": torch.float32, "hang_timeout": None, "ema": {"decay": 0.5}}
    assert load(tmp_path / "flat.py") == load(expected)


def test_colossalais_number_of_microbatches_counts_in_every_configuration():
    for value, size, expected in [(4, 2, 4), (None, 2, 2), (4, {"size": 2, "microbatches": 4}, 4), (4, 1, 1)]:
        config = load({"NUM_MICRO_BATCHES": value, "parallel": {"pipeline": size}})
        assert (config.parallel.pipeline.num_microbatches, config.NUM_MICRO_BATCHES) == (expected, value)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("broken.toml", "parallel = [", r"broken\.toml' is not valid TOML"),
        ("broken.py", "def (", r"broken\.py' does not run: SyntaxError"),
        ("broken.py", "1 / 0", r"broken\.py' does not run: ZeroDivisionError: division by zero"),
        ("run.py", "import paramp\nconfig = paramp.Config()\n", r"config in .*run\.py' is a Config, expected the dict"),
        ("run.yaml", "", r"expected \.toml or \.py"),
        ("run.py", "import os\n_private = 1\nparalell = dict(tensor=2)\n", r"paralell: no such key.*'parallel'"),
        ("run.py", "hang_timout = None\n", r"hang_timout: no such key.*'hang_timeout'"),
        ("run.py", "import torch\ngrad_dtyp = torch.float32\n", r"grad_dtyp: no such key.*'grad_dtype'"),
        ("run.py", "import numpy as np\nprecision = np.float16\n", r"precision: got <class 'numpy\.float16'>"),
        ("run.py", "from numpy import float32\ngrad_dtyp = float32\n", r"grad_dtyp: no such key.*'grad_dtype'"),
        *(
            ("run.py", f"import numpy, torch, paramp.config.schema as of\n{name} = {value}\n", f"{name}: no such key")
            for name, value in (
                ("gradient_acumulation", "numpy.int64(4)"),
                ("clip_grad_nrm", "torch.tensor(0.5)"),
                ("emaa", "of.EmaConfig(decay=0.9)"),
            )
        ),
    ],
)
def test_invalid_files_are_errors(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(paramp.ConfigError, match=message):
        load(tmp_path / name)
    with pytest.raises(FileNotFoundError, match=r"no file .*absent\.toml"):
        load(tmp_path / "absent.toml")


def test_overrides_replace_single_values():
    base = {"parallel": {"tensor": 2, "pipeline": {"size": 2, "microbatches": 4}}, "fp16": {"mode": AMP_TYPE.NAIVE}}
    tree = merge(base, {"parallel": {"tensor": {"size": 4}, "pipeline": {"schedule": "gpipe"}}, "precision": "bf16"})
    config = load(tree)
    assert config.parallel.tensor.size == 4
    assert (config.parallel.pipeline.microbatches, config.parallel.pipeline.schedule) == (4, "gpipe")
    assert config.precision.name == "bf16-mixed"
    # the number of an axis replaces none of the other keys of its table
    tables = {"data": {"shard": 2}, "pipeline": {"size": 2, "schedule": "gpipe"}, "tensor": {"mode": None}}
    parallel = load(merge({"parallel": tables}, {"parallel": {"data": 4, "pipeline": 4, "tensor": 1}})).parallel
    assert (parallel.data.replicate, parallel.shard) == (4, 2)
    assert (parallel.pipeline.size, parallel.pipeline.schedule, parallel.tensor.mode) == (4, "gpipe", None)
    assert load(merge({"parallel": tables}, {"parallel": {"data": "auto"}})).parallel.shard == 2
    # fp16 is another name for precision: one of the two replaces the other, and both together are an error
    fp16 = {"fp16": {"mode": AMP_TYPE.NAIVE}}
    assert load(merge({"precision": "16-mixed"}, fp16)).precision.name == "16-naive"
    with pytest.raises(paramp.ConfigError, match="fp16: given together with precision"):
        load(merge({"precision": "16-mixed"}, {"precision": "32-true"} | fp16))


@pytest.mark.parametrize(
    ("parallel", "fits", "size", "does_not", "message"),
    [
        ({"tensor": 2, "pipeline": 2}, 8, 2, 6, "tensor 2 x pipeline 2 = 4 does not divide the world of 6 ranks"),
        ({"tensor": 2, "data": 3}, 6, 3, 4, "x data 3 = 6, but the world has 4 ranks"),
        ({"tensor": 2, "data": {"shard": 2}}, 8, 4, 6, "x shard 2 = 4 does not divide the world of 6 ranks"),
        ({"data": {"replicate": 2}}, 2, 2, 8, "x data 2 = 2, but the world has 8 ranks"),  # plain replicas
        ({"data": {"replicate": 3, "shard": 2}}, 6, 6, 8, r"replicate 3 = 6, but the world has 8.*data\.replicate"),
    ],
)
def test_the_data_axis_fills_the_world(parallel, fits, size, does_not, message):
    found = load({"parallel": parallel}).parallel
    assert found.data_size(fits) == size
    with pytest.raises(paramp.ConfigError, match=message):
        found.data_size(does_not)
    if parallel.get("data") == {"shard": 2}:
        assert (found.shard, found.least_world_size) == (2, 4)


def test_layouts_that_tests_name_are_those_of_the_support_matrix():
    plain = {name: one for name, one in ALL_LAYOUTS.items() if re.fullmatch(r"\S+( \+ \S+)?", name)}
    assert len(plain) > 20
    assert sized_layouts(", ".join(plain)) == plain


def test_flatten_gives_plain_values_for_objects_of_any_type():
    own = {"OWN": [torch.zeros(1), (1, torch.float16), "x"], "BIG": 10**5000, "TABLE": {"inner": {1, 2}}}
    flat = flatten(load(own | {"LONG": object, "NAME": "x", "parallel": {"tensor": 2}}))
    assert json.loads(json.dumps(flat)) == flat
    assert (flat["parallel.tensor.size"], flat["NAME"], flat["precision"]) == (2, "x", "32-true")
    assert flat["OWN"] == ["tensor([0.])", [1, "torch.float16"], "x"]
    assert flat["TABLE.inner"] == "{1, 2}"
    assert flat["BIG"].startswith("a value of the type int (")
    assert flat["LONG"] == "builtins.object"


def test_objects_that_ranks_make_alike_are_equal_in_their_configurations():
    def make():
        def backend(graph, inputs):
            return graph.forward

        return backend

    def found(backend):
        return flatten(Config(compile={"backend": backend}))["compile.backend"]

    assert found(make()) == found(make()) == f"{__name__}.{make.__qualname__}.<locals>.backend"
    assert found(functools.partial(make())) == found(functools.partial(make())) != found(functools.partial(make))


def test_a_configuration_is_frozen_and_may_be_made_directly():
    options = {"ema": {"decay": 0.5}, "precision": "transformer-engine-float16"}
    config = load(options | {"WIDTH": 3})
    parts = [config, load({"reproducible": {"slices": 2}}).reproducible]
    for part in parts:
        parts += filter(dataclasses.is_dataclass, vars(part).values())
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(part, dataclasses.fields(part)[0].name, None)
        with pytest.raises(TypeError, match="positional"):
            type(part)(dataclasses.astuple(part)[0])
    assert {"EmaConfig", "Float8", "LossScaling", "TensorConfig"} < {type(part).__name__ for part in parts}
    with pytest.raises(AttributeError, match="no key 'HEIGHT'"):
        _ = config.HEIGHT
    tree = {"precision": "16-mixed", "parallel": {"tensor": 2}}
    assert Config(**tree) == load(tree)
    with pytest.raises(paramp.ConfigError, match="precision: got 'fp17'"):
        Config(precision="fp17")


def test_the_resolved_configuration_has_the_dtypes_of_gradients_and_masters():
    def storage(tree):
        flat = flatten(load(tree))
        return [flat[f"precision.{key}"] for key in ("masters", "grad_dtype", "reduce_dtype.dp", "reduce_dtype.tp")]

    assert storage({}) == ["none", "float32", "float32", "float32"]
    assert storage({"precision": "16-naive"}) == ["full", "float16", "float16", "float16"]
    given = {"masters": "remainder", "grad_dtype": "fp32", "reduce_dtype": {"dp": torch.bfloat16}}
    resolved = ["remainder", "float32", "bfloat16", "float32"]
    assert storage({"precision": "16-naive"} | given) == resolved
    assert storage({"precision": {"mode": "16-naive"} | given}) == resolved
    assert storage({"fp16": {"mode": AMP_TYPE.NAIVE}} | given) == resolved
