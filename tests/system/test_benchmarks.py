"""The benchmarks run; what they measure is not tested."""

import ast
import importlib
import json
import re
import sys
import tempfile
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from commands import COLD, PYTHON, ROOT, python, run, succeeded
from families import SEED, WHOLE, family
from pool import on_ranks

import paramp
from paramp.config.schedules import SCHEDULES
from paramp.models import GPTConfig, ViT
from paramp.precision.policy import PRESETS

CPU = torch.device("cpu")


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


REFUSED = [
    ("amp_table", "--modes 16-mixd", "got '16-mixd', expected one of 32-true, 64-true, "),
    ("amp_table", "--modes 16-mixd", "(did you mean '16-mixed'?)"),
    ("amp_table", "--rounds 0", "--rounds: got 0, expected 1 or more"),
    ("amp_table", "--batch-size 0", "--batch-size: got 0, expected 1 or more"),
    ("amp_table", "--image-size 0", "--image-size: got 0, expected 1 or more"),
    ("amp_table", "--image-size 9", "image_size: got 9, expected a multiple of patch_size 2"),
    ("amp_table", "--json no/such/table.json", "--json: no folder 'no/such'; make it first"),
    ("amp_table", "--json .", "--json: '.' is a folder, expected a file"),
    ("amp_table", "--preset tny", "(did you mean 'tiny'?)"),
    ("amp_table", "--layouts tp", "got 'tp', expected 1, or such as tp2, dp4 or pp2·tp2"),
    ("amp_table", "--layouts tp2·tp2", "got 'tp2·tp2', expected 1"),
    ("amp_table", "--layouts tp2 --tensor 2", "remove torchrun, --tensor and --pipeline"),
    ("amp_table", "--tensor 2", "--tensor 2 --pipeline 1: got a world of 1, expected a multiple of 2"),
    ("amp_table", "--layouts 1 dp3", "expected a multiple of the 3 data ranks x 1 microbatches of layout dp3"),
    ("step", "--parameters ten", "got 'ten', expected a whole number above 0, such as 100M"),
    ("step", "--parameters 10 --tensors 11", "--tensors: got 11, expected at most --parameters 10"),
    ("step", "--rounds 0", "--rounds: got 0, expected 1 or more"),
    ("by_hand", "--vocab-size 200", "--vocab-size: got 200, expected a multiple of 128"),  # it masks no padding
    ("overhead", "--tp 2", "got a world of 1, expected 2; start it with torchrun --standalone --nproc-per-node 2"),
    ("overhead", "--precision 16-mixed", "--precision: got '16-mixed', expected one of 32-true, bf16-mixed"),
    ("overhead", "--layouts dp2", "--layouts: got dp2, expected tp and pp only"),
    ("overhead", "--layouts pp2 --batch-size 3", "--batch-size: got 3, expected a multiple of --microbatches 4"),
    ("scale", "--layouts dp2", "--layouts: got dp2, but dp follows from the world; remove it"),
    ("scale", "--worlds 6 --layouts pp2·tp2", "none of the worlds [6] is a multiple of pp2·tp2's 4"),
    ("scale", "--precision 16-mixd", "(did you mean '16-mixed'?)"),
    ("reproducible", "--layouts dp2+sp", "got 'dp2+sp', expected such as 1, tp2, tp2+sp, dp2+zero or pp2·tp2"),
    ("reproducible", "--layouts dp2 --batch-size 3", "dp2: --batch-size divides by data ranks x --chunk"),
    ("schedules", "--rounds 0", "--rounds: got 0, expected 1 or more"),
    ("schedules", "--schedules zbw", "invalid choice: 'zbw'"),
    ("schedules", "--json no/such/table.json", "--json: no folder 'no/such'; make it first"),
]


@pytest.mark.parametrize(("name", "arguments", "message"), REFUSED)
def test_bad_options_are_reported_before_anything_runs(name, arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        benchmark(name).main(arguments.split())
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


TABLE_MODES = [] if WHOLE or SEED else ["32-true", "16-naive", "16-true"]
"""Of ``amp_table.py``; empty: all."""


@family
def test_the_table_of_amp_methods_has_a_row_or_a_reason_for_every_mode(capsys):
    result = measured("amp_table", f"--batch-size 2 --rounds 1 --device cpu --modes {' '.join(TABLE_MODES)}")
    rows = {row["row"]: row for row in result["rows"]}
    printed = capsys.readouterr().out
    assert all(name in printed for name in (*rows, *result["cannot_run"]))
    cannot_run = {name.split("(")[-1].rstrip(")") for name in result["cannot_run"]}
    assert {row["mode"] for row in result["rows"]} | {"O1"} >= set(TABLE_MODES or PRESETS) - cannot_run
    documented = ["FP32 training", "AMP_TYPE.NAIVE", *([] if TABLE_MODES else ["AMP_TYPE.TORCH", "AMP_TYPE.APEX O1"])]
    assert all(any(row.startswith(name) for row in rows) for name in documented)
    assert {"plain torch, fp32", "plain torch, autocast fp16", "plain torch, autocast bf16"} <= rows.keys()
    # AdamW: weights, gradients and two moments of 4 bytes, or weights and gradients of 2 and 12 bytes of masters
    full, naive = (rows[name]["memory_bytes"] for name in ("FP32 training (32-true)", "AMP_TYPE.NAIVE (16-naive)"))
    num_parameters = sum(parameter.numel() for parameter in ViT.preset("tiny").parameters())
    assert full > 16 * num_parameters
    assert naive > 16 * num_parameters
    # beside half of everything, and of a block of gradients in fp32, the block that is being stepped in fp32
    assert rows["16-true"]["memory_bytes"] < (full + 4 * num_parameters) / 1.8 + 16 * num_parameters


def test_the_table_takes_aliases_and_the_size_of_images():
    result = measured("amp_table", "--rounds 1 --batch-size 2 --device cpu --modes fp32 O1 --image-size 4")
    assert result["model"] == "vit tiny, 4 x 4"
    assert {row["mode"] for row in result["rows"] if "plain" not in row["row"]} == {"32-true", "O1"}


def test_a_table_without_a_row_says_why_once():
    rows = {"a": ("nonsense", print), "b": ("nonsense", print), "c": ("32-true", "something else")}
    with pytest.raises(SystemExit, match=r"^no row can run:\nConfigError: .*\nsomething else$") as ended:
        benchmark("amp_table").run(rows, {}, lambda: ViT.preset("tiny"), (2, 1, 8, 8), 10, 1, "cpu")
    assert str(ended.value).count("nonsense") == 1


def test_a_layout_runs_in_processes_of_its_own(tmp_path):
    path = tmp_path / "table.json"
    options = ["--layouts", "1", "--modes", "fp32", "--rounds", "1", "--batch-size", "2", "--device", "cpu"]
    done = succeeded(python("benchmarks/amp_table.py", *options, "--json", str(path)))
    rows = json.loads(path.read_text())["layouts"]["1"]["rows"]
    assert {"plain torch, fp32", "FP32 training (32-true)"} <= {row["row"] for row in rows}
    assert "samples/s by layout" in done.stdout


def test_layouts_are_written_as_they_are_read():
    layout = benchmark("common").Layout
    assert layout.parse("tp2xpp4") == layout(pp=4, tp=2)
    assert [str(layout.parse(text)) for text in ("1", "dp2", "tp2·pp4")] == ["1", "dp2", "pp4·tp2"]


def test_each_candidate_is_prepared_and_run_once_per_round():
    common = benchmark("common")
    happened = []
    turns = {
        name: common.Turn(lambda name=name: happened.append(name), lambda number: happened.append(number))
        for name in "ab"
    }
    seconds = common.take_turns(turns, 2, CPU, warm_up=1)
    assert happened == [0, "a", 0, "b", 1, "b", 1, "a", 2, "a", 2, "b"]
    assert {name: len(values) for name, values in seconds.items()} == {"a": 2, "b": 2}


def test_memory_counts_what_stays_and_what_an_operation_needs_inside():
    with benchmark("common").watch_memory(CPU) as memory:
        kept = torch.ones(1000)
        temporary = torch.ones(3000)
        del temporary
        again = torch.ones(500)
    assert memory.kept == 4 * (kept.numel() + again.numel())
    assert memory.peak == 4 * 4000


def test_host_reads_and_collectives_are_counted():
    def read():
        value = torch.ones(1)
        value.item(), float(value), value.tolist(), bool(value > 0)
        dist.all_reduce(value)

    with paramp.launch_from_torch():
        assert benchmark("step").count(read, CPU) == (1, 4)


def test_waits_for_a_gpu_are_counted_without_torchs_own_warning_about_counting_them(monkeypatch):
    def set_mode(mode):  # torch 2.11 to 2.13
        if mode == "warn":
            message = "Synchronization debug mode is a prototype feature and does not yet detect all operations"
            warnings.warn(message, stacklevel=2)

    def two_waits():
        for _ in range(2):
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)

    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)
    assert benchmark("step").count(two_waits, torch.device("cuda")) == (0, 2)


def test_the_step_has_a_row_or_a_reason_for_every_candidate(capsys, monkeypatch):
    step = benchmark("step")
    monkeypatch.setattr(step, "why_not_inductor", lambda *_: "compiling takes too long for a test")
    result = measured("step", "--parameters 0.03M --tensors 7 --rounds 1 --device cpu")
    rows = {row["row"]: row for row in result["rows"]}
    assert rows.keys() | result["cannot_run"].keys() == {row.name for row in step.ROWS}
    assert {step.FULL, step.HALF, "paramp 16-mixed", "paramp 16-naive"} <= rows.keys()
    printed = capsys.readouterr().out
    assert all(name in printed for name in (*rows, *result["cannot_run"]))
    # AdamW's weight, gradient and two moments of 4 bytes; or 2 + 2 + 4 + 8 and the masters' gradients
    assert rows[step.FULL]["bytes_kept"] == pytest.approx(16, rel=0.01)
    assert rows[step.HALF]["bytes_kept"] == pytest.approx(20, rel=0.01)
    assert rows[step.FULL]["collectives"] == 0


def test_all_candidates_of_the_step_compute_the_same():
    step = benchmark("step")
    sizes = step.sizes_of(1000, 3)
    sources = torch.randn(1000).mul_(step.SCALE * step.NORM / 1000**0.5).split(sizes)
    rows = [row for row in step.ROWS if row.name in (step.FULL, step.HALF, "paramp 16-mixed", "paramp 16-naive")]
    weights = {}
    for row in rows:
        with paramp.launch_from_torch(row.config, device=CPU):
            candidate = row.make(sizes, CPU)
            for sign in (1, -1, 1):
                candidate.fill([sign * source for source in sources])
                result = candidate.step()
            is_ours = isinstance(candidate, step.Ours)
            module = candidate.engine.module if is_ours else candidate.model
            weights[row.name] = torch.cat([weight.detach().float() for weight in module.parameters()])
            if is_ours:
                assert float(result.grad_norm) == pytest.approx(step.NORM, rel=0.1)
    for row in rows:
        # Three steps of lr 1e-6; fp16 has steps of 6e-8 there.
        assert weights[row.name].abs().max() > 5e-7
        torch.testing.assert_close(weights[row.name], weights[row.baseline], rtol=1e-4, atol=1.2e-7)


SMALL = "--layers 2 --width 32 --heads 2 --vocab-size 128 --seq-len 8 --rounds 1 --device cpu"


def test_the_loop_on_torch_trains_as_the_engine_does_and_skips_large_layouts():
    assert [row["mode"] for row in measured("overhead", SMALL)["rows"]] == ["32-true", "bf16-mixed"]
    reasons = measured("overhead", "--layouts pp64·tp64 --device cpu")["cannot_run"]
    assert "pp64·tp64 does not run here: it has 4096 ranks" in reasons["pp64·tp64"]


@on_ranks(2)
def test_the_loop_on_torch_is_correct_in_every_layout(world):
    overhead = benchmark("overhead")
    shape = GPTConfig(num_layers=2, num_heads=2, width=32, max_seq_len=8, vocab_size=128, tied=False)
    for layout in ({"tp": 2}, {"pp": 2}):
        result = overhead.run(["32-true"], overhead.Layout(**layout), shape, 4, 8, 2, 1, "cpu")
        assert (result is None) == (world.rank > 0)


def options_by_hand(arguments):
    return benchmark("by_hand").parse(arguments.split())


def by_hand(arguments="", **layout):
    """The table of ``benchmarks/by_hand.py`` on ``layout``."""
    program, options = benchmark("by_hand"), f"--layers 2 --vocab-size 128 --rounds 1 --device cpu {arguments}"
    return program.measure(program.Layout(**layout), options_by_hand(options), "32-true", 64, 8)


@on_ranks(2)
def test_other_libraries_compute_the_same_on_data_and_tensor_ranks(world):
    """And the GPT by hand, in each layout."""
    for layout, options, against, skipped in (
        ({"dp": 2}, "--against accelerate fsdp2", ["hand", "accelerate", "fsdp2"], []),
        ({"tp": 2}, "--tp 2 --against fabric fsdp2", ["hand", "fsdp2"], ["fabric"]),
        ({"pp": 2}, "--pp 2", ["hand"], []),
    ):
        result = by_hand(options, **layout)
        assert result["seconds"].keys() == {"hand", "again", "paramp", *against}
        assert [row["against"] for row in result["rows"]] == against
        assert list(result["cannot_run"]) == skipped


@on_ranks(2)
def test_sharded_parameters_compute_the_same_as_in_a_loop_on_fully_shard(world):
    (row,) = by_hand("--sharded", dp=2)["rows"]
    assert (row["candidate"], row["against"], row["limit"]) == ("paramp", "fully_shard", 1.02)


def test_a_loop_that_computes_something_else_ends_the_comparison(monkeypatch):
    overhead = benchmark("overhead")
    monkeypatch.setattr(overhead, "_loss", lambda output, target: 1.01 * overhead.GPT.loss(output.float(), target))
    with pytest.raises(SystemExit, match=r"32-true: the gradient's norm is .* directly, but .* in paramp"):
        overhead.main(SMALL.split())
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
    seconds = {"hand": 1.0, "again": 1.0, "paramp": 1.04}
    (row,) = program.compare(seconds, {}, program.Layout(), 128)
    assert (row["limit"], row["holds"]) == (1.03, False)
    (row,) = program.compare(seconds, {}, program.Layout(tp=2), 128)
    assert row["holds"]


def test_shapes_of_models_are_scaled_down_on_a_cpu():
    def sizes(arguments):
        options = options_by_hand(arguments)
        return options.layers, options.widths, options.head_size, options.vocab_size, options.seq_lens

    assert sizes("--shape smollm-1.7b --device cpu --layers 6") == (6, [128], 64, 3072, [64])
    assert sizes("--shape llama-2-7b --device cuda") == (32, [4096], 128, 32000, [1024])
    assert sizes("--shape llama-2-7b --device cpu")[3] == 2048


PARTS_OF_A_TEST = """
import sys
sys.path[:0] = sys.argv[1:2]
import gpu
gpu.describe = lambda: ("some-gpu", "A GPU.")
gpu.MAX_LINES = 2
gpu.SECONDS_TO_REPORT = 3
SLEEP = "import signal, sys, time; signal.signal(signal.SIGINT, {}); print('begun', flush=True); time.sleep(60)"
gpu.PARTS = {
    "slow": gpu.Part(0.1, [["-c", SLEEP.format("lambda *_: (print('reported', flush=True), sys.exit())")]]),
    "deaf": gpu.Part(0.1, [["-c", SLEEP.format("signal.SIG_IGN")]]),
    "good": gpu.Part(1, [["-c", "print(1); print(2); print(3)"]]),
    "bad": gpu.Part(1, [["-c", "import sys; sys.exit(3)"], ["-c", "print('after')"]]),
}
sys.exit(gpu.main(["--results", *sys.argv[2:]]))
"""
REPORTED = (
    "\nbegun\nreported\n",  # it is interrupted before it is ended, and pytest then reports what failed
    "\nbegun\n```",
    "... (1 lines before)\n2\n3\n```",
    "failed with status 3",
    "after\n```",
    "| bad | **failed** |",
    "print(1)",  # the command
)


def test_parts_for_a_gpu_go_on_after_a_failure_and_keep_their_results(tmp_path):
    command = [PYTHON, "-c", PARTS_OF_A_TEST, str(ROOT / "benchmarks"), str(tmp_path)]
    succeeded(run([*command, "good"]))
    done = run(command)
    assert done.returncode == 1
    assert "good: has passed" in done.stdout
    assert "failed: slow,deaf,bad" in done.stdout
    text = (tmp_path / "some-gpu.md").read_text()
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == ["slow", "deaf", "good", "bad"]
    assert text.count("ended at its limit") == 2
    assert [part for part in REPORTED if part not in text] == []


def test_each_part_for_a_gpu_has_nine_minutes_and_each_test_file_is_in_one():
    parts = benchmark("gpu").PARTS
    assert all(part.minutes <= 9 for part in parts.values())
    system, matrix = "tests/system", "tests/system/test_matrix.py"
    commands = {name: parts[name].commands[0] for name in ("tests", "system", "matrix")}
    chosen = {name: [word for word in command if word in (system, matrix)] for name, command in commands.items()}
    assert chosen == {"tests": [system], "system": [system, matrix], "matrix": [matrix]}
    ignored = {name: command[command.index("--ignore") + 1] for name, command in commands.items() if name != "matrix"}
    assert ignored == {"tests": system, "system": matrix}


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
def test_the_tests_for_a_gpu_are_found_with_torch_numpy_safetensors_and_pytest_alone(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_OPTIONAL_PACKAGES)
    some = [] if WHOLE or SEED else ["tests/system/test_one_gpu.py", "tests/system/test_fuzz.py"]
    module, name, *options = benchmark("gpu").PYTEST
    assert (module, name) == ("-m", "pytest")
    command = [sys.executable, "-c", AS_IF_BESIDE_A_GPU, *options, "--collect-only", *some]
    done = succeeded(run(command, **COLD, PYTHONPATH=f"{tmp_path}:{ROOT}", PYTEST_DISABLE_PLUGIN_AUTOLOAD="1"))
    assert "test_one_gpu.py::test_a_step_never_waits_for_the_gpu[16-naive-cuda]" in done.stdout
    assert re.search(r"SKIPPED .*test_fuzz.py:\d+: could not import 'hypothesis'", done.stdout)


def test_a_machine_without_a_gpu_says_so_in_one_line():
    done = python("benchmarks/gpu.py", CUDA_VISIBLE_DEVICES="")
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(r"make gpu: torch \S+ in \S+ sees no GPU on this machine\n", done.stderr)


BUILD_TWO = """
import json
from scale import Layout, build
print(json.dumps([build(world, world - 1, Layout(pp=2, tp=2), "16-mixed") for world in (8, 512)]))
"""


def test_a_rank_of_a_large_world_makes_the_same_collectives_and_groups():
    done = succeeded(python("-c", BUILD_TWO, PYTHONPATH=f"{ROOT}:{ROOT / 'benchmarks'}"))
    small, large = json.loads(done.stdout)
    assert small["collectives"] == large["collectives"] > 0
    assert small["groups"] == large["groups"] <= 32


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
        assert row["layout"] == "tensor 1 x data 2"
        assert row["fraction"] == pytest.approx(row["check_seconds"] / row["step_seconds"] / 100)


def test_the_start_is_measured_up_to_the_first_step():
    startup = benchmark("startup")
    for source in (startup.PLAIN, (ROOT / "examples/own_model.py").read_text()):
        changed = ast.parse(startup.until_first_step(source))
        (loop,) = (node for node in ast.walk(changed) if isinstance(node, ast.For))
        assert "zero_grad()" in ast.unparse(loop.body[-5])
        assert ast.unparse(loop.body[-1]) == "os._exit(0)"


def test_ways_of_saving_are_measured_against_a_copy(capsys):
    found = measured("checkpoints", "--tensors 2 --width 8 --rounds 1")
    assert found["bytes"] == 2 * (3 * 64 * 4 + 4)
    assert found["stall"] == pytest.approx(found["seconds"]["save, wait=False"] / found["seconds"]["copy"])
    assert "torch.save" in capsys.readouterr().out


def test_the_cost_of_reproducible_is_a_ratio_in_the_same_chunks():
    sizes = "--layers 1 --widths 64 --head-size 8 --vocab-size 128 --seq-len 8 --batch-size 2 --rounds 1"
    (row,) = measured("reproducible", f"{sizes} --precision 32-true")["rows"]
    assert row["ratio"] == pytest.approx(row["seconds"] / row["seconds_without"])
    assert (row["layout"], row["goal"]) == ("1", None)
