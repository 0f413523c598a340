"""The benchmarks run; what they measure is not tested."""

import importlib
import json
import re
import sys
import tempfile
from pathlib import Path

import pytest
from commands import COLD, PYTHON, ROOT, run, succeeded
from families import SEED, WHOLE, family, long
from pool import on_ranks
from torch.nn.modules.module import register_module_forward_pre_hook

import paramp
from paramp.config.pipeline_schedules import SCHEDULES
from paramp.models import ViT
from paramp.models.transformer import Block
from paramp.precision.modes import PRESETS


def benchmark(name):
    if str(ROOT / "benchmarks") not in sys.path:
        sys.path.append(str(ROOT / "benchmarks"))
    return importlib.import_module(name)


def measured(name, arguments):
    """What the benchmark writes with ``--json``; None on a rank that writes nothing."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "table.json")
        benchmark(name).main([*arguments.split(), "--json", str(path)])
        return json.loads(path.read_text()) if path.exists() else None


TABLE_MODES = [] if WHOLE or SEED else ["32-true", "16-naive", "16-true"]
"""Of ``amp_table.py``; empty: all."""


@family
@long
def test_the_table_of_amp_methods_has_a_row_or_a_reason_for_every_mode(capsys):
    result = measured("amp_table", f"--batch-size 2 --rounds 1 --device cpu --modes {' '.join(TABLE_MODES)}")
    rows = {row["row"]: row for row in result["rows"]}
    printed = capsys.readouterr().out
    assert all(name in printed for name in (*rows, *result["cannot_run"]))
    cannot_run = {name.split("(")[-1].rstrip(")") for name in result["cannot_run"]}
    assert {row["mode"] for row in result["rows"]} | {"O1"} >= set(TABLE_MODES or PRESETS) - cannot_run
    assert {"plain torch, fp32", "plain torch, autocast fp16", "plain torch, autocast bf16"} <= rows.keys()
    # AdamW: weights, gradients and two moments of 4 bytes, or weights and gradients of 2 and 12 bytes of masters
    full, naive = (rows[name]["memory_bytes"] for name in ("FP32 training (32-true)", "AMP_TYPE.NAIVE (16-naive)"))
    num_parameters = sum(parameter.numel() for parameter in ViT.preset("tiny").parameters())
    assert full > 16 * num_parameters
    assert naive > 16 * num_parameters
    # beside half of everything, and of a block of gradients in fp32, the block that is being stepped in fp32
    assert rows["16-true"]["memory_bytes"] < (full + 4 * num_parameters) / 1.8 + 16 * num_parameters


def by_hand(arguments="", **layout):
    """The table of ``benchmarks/by_hand.py`` on ``layout``."""
    program, options = benchmark("by_hand"), f"--layers 2 --vocab-size 128 --rounds 1 --device cpu {arguments}"
    return program.measure(program.Layout(**layout), program.parse(options.split()), "32-true", 64, 8)


@family
@long
@on_ranks(2)
def test_other_libraries_compute_the_same_on_data_and_tensor_ranks(world):
    """And the GPT by hand, in each layout; and sharded parameters, as in a loop on fully_shard."""
    for layout, options, against, skipped in (
        ({"dp": 2}, "--against accelerate fsdp2", ["hand", "accelerate", "fsdp2"], []),
        ({"tp": 2}, "--tp 2 --against fabric fsdp2", ["hand", "fsdp2"], ["fabric"]),
        ({"pp": 2}, "--pp 2", ["hand"], []),
    ):
        result = by_hand(options, **layout)
        assert result["seconds"].keys() == {"hand", "again", "paramp", *against}
        assert [row["against"] for row in result["rows"]] == against
        assert list(result["cannot_run"]) == skipped
    (row,) = by_hand("--sharded", dp=2)["rows"]
    assert (row["candidate"], row["against"], row["limit"]) == ("paramp", "fully_shard", 1.02)


@family
@long
def test_the_loop_of_fabric_computes_the_same():
    pytest.importorskip("lightning.fabric")
    paramp.FabricPrecision("32-true")  # from now on mpi4py without an MPI library is no error
    assert [row["against"] for row in by_hand("--against fabric")["rows"]] == ["hand", "fabric"]


@on_ranks(2)
def test_layers_of_experts_by_hand_compute_the_same(world):
    program = benchmark("experts")
    sizes = "--layers 2 --experts 4 --width 16 --hidden 16 --tokens 8 --rounds 1"
    options = program.parse(sizes.split(), 2)
    for mode in options.precision:
        result = program.measure(options, mode, 2)
        assert result["seconds"].keys() == {"hand", "again", "paramp"}
        assert result["ratio"] > 0


def test_a_loop_that_computes_something_else_ends_the_comparison(monkeypatch):
    overhead = benchmark("overhead")
    small = "--layers 2 --width 32 --heads 2 --vocab-size 128 --seq-len 8 --rounds 1 --device cpu"
    assert [row["mode"] for row in measured("overhead", small)["rows"]] == ["32-true", "bf16-mixed"]
    monkeypatch.setattr(overhead, "_loss", lambda output, target: 1.01 * overhead.GPT.loss(output.float(), target))
    with pytest.raises(SystemExit, match=r"32-true: the gradient's norm is .* directly, but .* in paramp"):
        overhead.main(small.split())
    with pytest.raises(SystemExit, match=r"32-true: the gradient's norm is .* by hand, but .* in fsdp2"):
        by_hand("--against fsdp2")


def test_limits_of_a_step_are_widened_by_the_spread_of_one_program():
    program = benchmark("by_hand")
    seconds = {"hand": 1.0, "again": 1.1, "accelerate": 1.0, "paramp": 1.1, program.COMPILED: 1.0}
    rows = program.compare(seconds, {}, program.Layout(tp=2), 512)
    assert {(row["candidate"], row["against"]): (row["limit"], row["holds"]) for row in rows} == {
        ("paramp", "hand"): (1.0, True),  # 1.1 / 1.05, and 1.1 of spread
        ("paramp", "accelerate"): (1.0, True),
        (program.COMPILED, "hand"): (1.0, True),
        (program.COMPILED, "accelerate"): (1.0, True),
        (program.COMPILED, "paramp"): (1 / 1.1, True),
    }
    for layout, expected in (({}, (1.03, False)), ({"tp": 2}, (1.05, True))):
        (row,) = program.compare({"hand": 1.0, "again": 1.0, "paramp": 1.04}, {}, program.Layout(**layout), 128)
        assert (row["limit"], row["holds"]) == expected


PARTS_OF_A_TEST = """
import sys
sys.path[:0] = sys.argv[1:2]
import gpu
gpu.describe = lambda: ("some-gpu", "A GPU.")
gpu.MAX_LINES = 2
gpu.SECONDS_TO_REPORT = 3
SLOW = "import signal, sys, time; signal.signal(signal.SIGINT, lambda *_: (print('reported', flush=True), sys.exit()))"
gpu.PARTS = {
    "slow": gpu.Part(0.1, [["-c", SLOW + "; print('begun', flush=True); time.sleep(60)"]]),
    "good": gpu.Part(1, [["-c", "print(1); print(2); print(3)"]]),
    "bad": gpu.Part(1, [["-c", "import sys; sys.exit(3)"], ["-c", "print('after')"]]),
}
sys.exit(gpu.main(["--results", *sys.argv[2:]]))
"""
REPORTED = (
    "\nbegun\nreported\n",  # it is interrupted before it is ended, and pytest then reports what failed
    "ended at its limit",
    "... (1 lines before)\n2\n3\n```",
    "failed with status 3",
    "after\n```",
    "| bad | **failed** |",
)


def test_parts_for_a_gpu_go_on_after_a_failure_and_keep_their_results(tmp_path):
    command = [PYTHON, "-c", PARTS_OF_A_TEST, str(ROOT / "benchmarks"), str(tmp_path)]
    succeeded(run([*command, "good"]))
    done = run(command)
    assert done.returncode == 1
    assert "good: has passed" in done.stdout
    assert "failed: slow,bad" in done.stdout
    text = (tmp_path / "some-gpu.md").read_text()
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == ["slow", "good", "bad"]
    assert [part for part in REPORTED if part not in text] == []


def test_each_part_for_a_gpu_has_nine_minutes_and_each_test_file_is_in_one():
    parts = benchmark("gpu").PARTS
    assert all(part.minutes <= 9 for part in parts.values())
    system, matrix = "tests/system", "tests/system/test_matrix.py"
    commands = {name: " ".join(parts[name].commands[0]) for name in ("tests", "system", "matrix")}
    assert commands["tests"].endswith(f"--ignore {system}")
    assert commands["system"].endswith(f"{system} --ignore {matrix}")
    assert commands["matrix"].endswith(matrix)


WITHOUT_OPTIONAL_PACKAGES = """
import functools, importlib.machinery
packages = '''
    accelerate datasets hypothesis lightning matplotlib mkdocs mkdocstrings mpi4py peft pytest_timeout pytorch_lightning
    ray rich sklearn tensorboard tokenizers torchao torchtitan transformers triton trl xdist yaml
'''.split()
def find(original, name, *more, **options):
    return None if name.partition(".")[0] in packages else original(name, *more, **options)
finder = importlib.machinery.PathFinder
finder.find_spec = functools.partial(find, finder.find_spec)
"""
AS_IF_BESIDE_A_GPU = """
import sys, pytest, torch
torch.cuda.device_count = lambda: 1
sys.exit(pytest.main(sys.argv[1:]))
"""


@family
@long
def test_the_tests_for_a_gpu_are_found_with_torch_numpy_safetensors_and_pytest_alone(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_OPTIONAL_PACKAGES)
    some = [] if WHOLE or SEED else ["tests/system/test_one_gpu.py", "tests/system/test_fuzz.py"]
    module, name, *options = benchmark("gpu").PYTEST
    assert (module, name) == ("-m", "pytest")
    command = [sys.executable, "-c", AS_IF_BESIDE_A_GPU, *options, "--collect-only", *some]
    done = succeeded(run(command, **COLD, PYTHONPATH=f"{tmp_path}:{ROOT}", PYTEST_DISABLE_PLUGIN_AUTOLOAD="1"))
    assert "test_one_gpu.py::test_a_step_never_waits_for_the_gpu[16-naive-cuda]" in done.stdout
    assert re.search(r"SKIPPED .*test_fuzz.py:\d+: could not import 'hypothesis'", done.stdout)


@family
@long
@on_ranks(2)
def test_the_table_of_schedules_has_a_row_for_every_schedule(world):
    """And comparing replicas is measured against a step."""
    schedules = measured("schedules", "--rounds 1 --microbatches 4 --width 32 --seq-len 8")
    sizes = "--layers 1 --width 12 --seq-len 4 --batch-size 1 --rounds 1"
    replicas = measured("replicas", f"{sizes} --precision 32-true")
    if world.rank == 0:
        rows = {row["schedule"]: row for row in schedules["rows"]}
        assert list(rows) == list(SCHEDULES)
        assert rows["1f1b"]["theoretical_bubble"] == pytest.approx(1 / 5)
        assert all(0 <= row["least_bubble"] <= row["median_bubble"] < 1 for row in rows.values())
        (row,) = replicas["rows"]
        assert row["fraction"] == pytest.approx(row["check_seconds"] / row["step_seconds"] / 100)


@on_ranks(2)
def test_a_step_with_sequences_over_ranks_is_that_by_hand(world):
    """The program ends with an error if the norms of their gradients differ."""
    result = measured("context_axis", "--rounds 1 --layers 1 --width 64 --tokens 16")
    assert result is None or list(result["medians"]) == ["by hand", "again", "paramp"]


def test_the_cost_of_reproducible_is_a_ratio_in_the_same_chunks():
    sizes = "--layers 1 --widths 64 --head-size 8 --vocab-size 128 --seq-len 8 --batch-size 4 --chunk 2 --rounds 1"
    seen = []

    def note(module, args):
        if isinstance(module, Block):
            seen.append((module, len(args[0])))

    with register_module_forward_pre_hook(note):
        (row,) = measured("reproducible", f"{sizes} --precision 32-true")["rows"]
    blocks = [*dict(seen)]  # without the mode, without it again, with it
    steps = [*blocks, *blocks, *blocks[::-1]]  # the first of each, a round to warm up, and one that is measured
    assert seen == [(module, 2) for module in steps for _ in range(2)]
    assert row["ratio"] == pytest.approx(row["seconds"] / row["seconds_without"])
    assert (row["layout"], row["goal"]) == ("1", None)
