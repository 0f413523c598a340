"""Every code block and every command of README and docs runs."""

import ast
import contextlib
import dataclasses
import importlib
import importlib.util
import io
import os
import re
import shlex
import signal
import sys
import tomllib
from pkgutil import resolve_name
from types import ModuleType
from unittest import mock

import markdown
import pytest
import torch
import torch.distributed as dist
from commands import PYTHON, ROOT, TORCHRUN, run, succeeded
from families import family, long, rarely
from pages import blocks, outputs, read
from pool import on_ranks, run_on_ranks, shared_folder
from train_app.settings import DEFAULTS, configure

import paramp
from paramp.amp import AMP_TYPE
from paramp.checkpoint.convert import inspect
from paramp.compat.apex import amp
from paramp.config.files import load, merge
from paramp.precision.modes import PRESETS

PAGES = ["README.md", *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md"))]
SHORT = ["--steps", "2", "--batch-size", "8", "--seq-len", "16", "--set", "train.eval_sequences=8"]
"""What makes a training command short; a later flag wins over an earlier one."""
SHORT_LOOPS = {
    "    for step in range(3):": "    for step in range(2):",
    "range(training.epoch, 4)": "range(training.epoch, 1)",
    "range(1, 41)": "range(1, 11)",
    "counting(336, seed=0)": "counting(48, seed=0)",  # an odd number of batches, as there
}
"""What makes a page's Python short."""
ON_FOUR = "torchrun --standalone --nproc-per-node 4"
ON_TWO = ON_FOUR.replace("4", "2")
LIKE_MEGATRON = (
    "--tp 2 --pp 2 --sequence-parallel --precision 16-naive --microbatches 4 --batch-size 16 --seq-len 64 --steps 20"
)


def on_one_and_four(example, *flags):
    return [" ".join([start, *flags]) for start in (f"python examples/{example}", f"{ON_FOUR} examples/{example} 2 2")]


RUN_BY = {
    "test_docs.test_the_tutorial_runs_on_four_ranks_and_prints_what_it_shows": [f"{ON_FOUR} examples/tutorial.py 2 2"],
    "test_docs.test_the_command_of_megatrons_page_means_what_theirs_does": [
        f"{ON_FOUR} launch/train.py {LIKE_MEGATRON}"
    ],
    "test_examples.test_an_example_is_the_same_on_one_rank_and_on_four": [
        *("python examples/own_model.py", "paramp run examples/own_model.py --tp 2 --pp 2"),
        *on_one_and_four("huggingface_llama.py"),
    ],
    "test_examples.test_an_example_of_a_model_is_the_same_on_one_rank_and_on_four": [
        *(*on_one_and_four("gpt.py"), *on_one_and_four("vision.py"), *on_one_and_four("vision.py", "--model vit"))
    ],
    "test_examples.test_the_script_of_colossalais_document_trains": [
        *("python examples/colossalai_resnet34.py", "python examples/colossalai_resnet34.py naive"),
        f"{ON_TWO} examples/colossalai_resnet34.py",
    ],
    "test_examples.test_the_apex_script_learns_at_every_level": ["python examples/apex_migration.py"],
    "test_examples.test_the_scaler_example_shows_ranks_that_agree": [f"{ON_TWO} examples/torchs_scaler_diverges.py"],
    "test_prepare_data.test_prepared_tokens_are_what_is_trained_on": [
        f"{ON_FOUR} launch/train.py --tp 2 --pp 2 --data data/own"
    ],
    "test_launch_commands.expected": [f"{ON_FOUR} launch/train.py --tp 2 --pp 2"],
    "test_launch_commands.test_torchrun_on_two_hosts_that_meet_by_name": [
        "torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint node1:29400 launch/train.py"
        " --tp 2 --pp 2"
    ],
    "test_launch_commands.test_mpirun_on_two_hosts": ["launch/mpirun.sh hostfile python launch/train.py --tp 2 --pp 2"],
    "test_launch_commands.test_a_batch_script_of_slurms": ["sbatch launch/slurm.sbatch --steps 300"],
    "test_train_script.test_torchrun_with_one_process_starts_the_four_that_the_layout_needs": [
        "torchrun launch/train.py --tp 2 --pp 2"
    ],
}
"""The test, or its fixture, that runs a command: on two hosts for instance."""
RUN_IN_TEXT = {"source .venv/bin/activate", "pip install -e .", "paramp report runs/tiny"}
"""Commands in the text of the README: two make the tests' environment, one is run after that of ``make train``."""
RUN_ELSEWHERE = {command for commands in RUN_BY.values() for command in commands}


def commands():
    """The commands of all pages, in their order: later ones may read what earlier ones wrote."""
    lines = [line for page in PAGES for block in blocks(page, "sh") for line in block.replace("\\\n", " ").splitlines()]
    return list(dict.fromkeys(filter(None, (" ".join(line.partition("  #")[0].split()) for line in lines))))


def execute(page, *sources, shorten=True):
    """What each block of ``page`` prints: they run in one namespace, as a page may import once."""
    names, printed = {}, []
    for number, source in enumerate(sources):
        for whole, short in SHORT_LOOPS.items() if shorten else ():
            source = source.replace(whole, short)
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(source, f"{page}, block {number}", "exec"), names)
        if dist.is_initialized():
            dist.barrier()  # the next block may read what the first rank has written
        printed.append(out.getvalue())
    return printed


def execute_on_rank(world, page, sources, folder, shorten=True):
    sys.argv = [page]
    amp.reset()  # an earlier test of this process may have initialized it
    with contextlib.chdir(folder):
        return execute(page, *sources, shorten=shorten)


TUTORIAL = "docs/tutorial.md"


WITH_PYTHON = [page for page in PAGES if blocks(page, "python") and page != TUTORIAL]
LONGER = [f"docs/{name}.md" for name in ("float8", "from-composer", "from-transformers", "models", "reproducible")]


@family
@pytest.mark.parametrize("page", rarely(WITH_PYTHON, *(page for page in WITH_PYTHON if page not in LONGER)))
def test_the_python_of_a_page_runs_on_four_ranks(page, tmp_path):
    run_on_ranks(4, __name__, "execute_on_rank", {"page": page, "sources": blocks(page, "python"), "folder": tmp_path})


@family
@pytest.mark.parametrize("how", ["short", pytest.param("whole", marks=long)])
def test_the_tutorial_runs_on_four_ranks_and_prints_what_it_shows(how, tmp_path):
    """To 2 %. Lines are in the order of the ranks, and equal ones once. Short loops print something else."""
    sources = blocks(TUTORIAL, "python")
    shortened = [number for number, source in enumerate(sources) if any(loop in source for loop in SHORT_LOOPS)]
    given = {"page": TUTORIAL, "sources": sources, "folder": tmp_path, "shorten": how == "short"}
    printed = [*zip(*run_on_ranks(4, __name__, "execute_on_rank", given), strict=True)]
    compared = slice(shortened[0] if how == "short" else None)
    for found, shown in zip(printed[compared], outputs(TUTORIAL)[compared], strict=True):
        lines = dict.fromkeys(line for text in found for line in text.splitlines())
        assert_alike("\n".join(lines), (shown or "").strip())


def assert_alike(found, expected):
    number = re.compile(r"\d+(?:\.\d+)?(?:e-?\d+)?")
    assert number.sub("N", found) == number.sub("N", expected), found
    numbers, expected_numbers = ([*map(float, number.findall(text))] for text in (found, expected))
    assert numbers == pytest.approx(expected_numbers, rel=0.02), found


def test_the_program_of_reproducible_prints_one_line_on_every_layout(tmp_path):
    """Without the mode its loss, norm and weights are others on two tensor ranks."""
    with_mode = blocks("docs/reproducible.md", "python")[0]
    without = with_mode.replace("reproducible=True", "reproducible=False")

    def line(source, size):
        given = {"page": "docs/reproducible.md", "sources": [source], "folder": tmp_path}
        return run_on_ranks(size, __name__, "execute_on_rank", given)[0][0]

    assert line(with_mode, 1) == line(with_mode, 2) == line(with_mode, 4) != ""
    pairs = zip(line(without, 1).split(), line(without, 2).split(), strict=True)
    assert [first != other for first, other in pairs] == [True, True, True]


def test_commands_in_the_text_of_the_readme_are_run_too():
    """By tests, as the blocks are, or by ``.ci/run``."""
    programs = r"`((?:make|paramp|pip|python|source|torchrun) [^`]*)`"
    commands_in_text = set(re.findall(programs, re.sub(r"^```.*?^```$", "", read("README.md"), flags=re.M | re.S)))
    run_by_ci = {line for line in read(".ci/run").splitlines() if line.startswith("make ")}
    assert commands_in_text - run_by_ci - set(commands()) - RUN_IN_TEXT == set()


def test_commands_run_by_other_tests_exist():
    for name in RUN_BY:
        module, _, function = name.partition(".")
        assert hasattr(importlib.import_module(module), function), name
    assert set(commands()) >= RUN_ELSEWHERE  # a page has each of them


def dry_run(*words):
    """What ``make`` would run, without the options of the ``make`` that runs the tests."""
    return succeeded(run(["make", "--dry-run", "--no-print-directory", *words], MAKEFLAGS="", ARGS="")).stdout


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A folder that looks like the project's, in which commands leave what they write."""
    folder = tmp_path_factory.mktemp("clone")
    for path in ROOT.iterdir():
        if path.name not in ("runs", "data", "build"):
            (folder / path.name).symlink_to(path)
    return folder


COMMANDS = [command for command in commands() if command not in RUN_ELSEWHERE]
BY_DEFAULT = [
    *(command for command in COMMANDS if "--" not in command or "runs/" in command),
    "paramp doctor --json",
    "python launch/prepare_data.py README.md docs --output data/own",
]
"""Among them those that write what others read."""


@family
@pytest.mark.parametrize("command", rarely(COMMANDS, *BY_DEFAULT))
def test_a_command_runs(command, clone):
    words = shlex.split(command)
    if words[0] == "make":
        dry_run(*words[1:])  # each of them takes minutes; test_make_train_is_what_the_readme_says trains
        return
    if words[:2] == ["paramp", "report"] and not (clone / words[2]).exists():
        run_command(next(one for one in COMMANDS if f"--log-dir {words[2]}" in one), clone)
    run_command(command, clone)


def run_command(command, clone):
    words = shlex.split(command)
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])  # `python` itself starts warm
    if "launch/train.py" in words:
        words += [*SHORT, *(["--histogram", "2"] if "--histogram" in words else [])]
    succeeded(run(words, cwd=clone, PATH=path, PYTHONPATH=str(ROOT)))


def test_pages_have_the_code_of_their_examples():
    for page, names in (("README.md", ["own_model"]), ("docs/tutorial.md", ["tutorial_model", "tutorial"])):
        for name in names:
            code = read(f"examples/{name}.py").partition('"""\n\n')[2]
            assert f"```python\n{code}```" in read(page)
    assert len(read("examples/tutorial.py").splitlines()) <= 60


def test_a_finished_run_of_the_tutorial_says_so_when_it_is_repeated(tmp_path, monkeypatch):
    """After one epoch of 3 batches, of which two make a step and the last one another."""
    source = next(block for block in blocks("docs/tutorial.md", "python") if "FOLDER =" in block)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["tutorial.py", "1", "1"])
    for is_first in (True, False):
        *before, last = execute("docs/tutorial.md", source)[0].splitlines()
        assert len(before) == is_first
        assert last == "all 2 steps are done; weights of step-00000002 are in runs/tutorial/model.pt"


@on_ranks(2)
def test_the_tutorial_saves_and_ends_on_every_rank_after_the_batch_of_a_ctrl_c_to_one(world):
    """In its first batch, of an accumulation of two."""
    source = next(block for block in blocks(TUTORIAL, "python") if "FOLDER =" in block)
    folder = shared_folder()
    source = source.replace("runs/tutorial", str(folder / "run"))

    def interrupted(engine):
        if world.rank == 1:
            os.kill(os.getpid(), signal.SIGINT)
        zero_grad(engine)

    zero_grad = paramp.Engine.zero_grad
    patches = mock.patch.object(paramp.Engine, "zero_grad", interrupted), mock.patch.object(sys, "argv", ["", "2", "1"])
    with patches[0], patches[1], pytest.raises(SystemExit) as end:
        execute(TUTORIAL, source)
    assert end.value.code == (130 if world.rank == 1 else 143)
    (saved,) = (folder / "run").glob("step-*")
    assert saved.name == "step-00000001"
    assert not inspect(saved)["damage"]


def test_the_table_of_extras_is_that_of_the_project():
    extras = tomllib.loads(read("pyproject.toml"))["project"]["optional-dependencies"]
    table = {}
    for names, brought in re.findall(r"^\| (`.*?) \| (.*?) \|", read("docs/index.md").partition("| extra |")[2], re.M):
        row = dict.fromkeys(re.findall(r"`(\w+)`", names), brought)
        packages = {re.match(r"[\w-]+", one)[0] for name in row for one in extras[name]}
        assert "all" in row or packages == set(brought.partition(", and ")[0].split(", ")), names
        table |= row
    assert table.keys() == extras.keys() - {"docs", "test", "hosts", "dev"}
    left_out = set(re.findall(r"`(\w+)`", table["all"]))
    assert set(re.search(r"\[(.*)\]", *extras["all"])[1].split(",")) == table.keys() - left_out - {"all"}


DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def test_the_table_of_modes_is_what_the_modes_are():
    section = read("docs/precision.md").partition("## All modes")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in lines[2:]]
    assert [row[0].strip("`") for row in rows] == list(PRESETS)
    assert f"the [{len(PRESETS)} precision modes](docs/precision.md) need" in read("README.md")
    for name, also, weights, compute, masters, scaling in rows:
        mode = PRESETS[name.strip("`")]
        for alias in filter(None, also.split(", ")):
            given, _, level = alias.replace("`", "").partition(" with opt_level=")
            value = eval(given, {"torch": torch, "AMP_TYPE": AMP_TYPE})
            options = {"fp16": {"mode": value, "opt_level": level.strip('"')}} if level else {"precision": value}
            assert load(options).precision == mode, alias
        assert mode.weights is DTYPES[weights.partition(",")[0]]
        assert ("norms too" in weights, "batch norms fp32" in weights) == (
            bool(mode.masters) and not mode.keep_batchnorm_fp32,
            mode.keep_batchnorm_fp32,
        )
        assert mode.compute is DTYPES[compute.partition(",")[0].removeprefix("autocast to ")]
        assert mode.autocast == compute.startswith("autocast to ")
        assert (mode.float8 is not None) == compute.endswith(", linear layers in float8")
        assert bool(mode.masters) == (masters == "yes")
        found = mode.scaling
        if found is None:
            assert not scaling.isascii()  # a dash
        elif found.min_scale == found.max_scale is not None:
            assert scaling == f"static, {found.init_scale:g}"
        else:
            assert scaling == ("dynamic" if found.hysteresis == 1 else "dynamic, with hysteresis")


def test_pages_have_the_versions_of_the_project():
    project = tomllib.loads(read("pyproject.toml"))["project"]
    python, torchs = project["requires-python"].removeprefix(">="), project["dependencies"][0].removeprefix("torch>=")
    assert [re.match(r"[\w-]+", one)[0] for one in project["dependencies"]] == ["torch", "numpy", "safetensors"]
    for page in ("README.md", "docs/index.md", "CONTRIBUTING.md"):
        assert f"You need Python {python} or newer" in read(page)
    assert f"The core needs torch ({torchs} or newer), numpy and safetensors" in read("README.md")
    assert paramp.__version__ in read("CHANGELOG.md")
    (pinned,) = re.findall(r"^torch==(\d+\.\d+)\.", read("constraints.txt"), re.MULTILINE)
    assert f"with the torch that `constraints.txt` pins, {pinned}." in read("docs/tested.md")


@family
@pytest.mark.parametrize("how", ["settings", pytest.param("run", marks=long)])
def test_make_train_is_what_the_readme_says(how, clone):
    words = shlex.split(dry_run("train").replace("\\\n", " "))
    command = words[words.index("launch/train.py") :]
    assert f"{ON_FOUR} launch/train.py --config launch/tiny.toml --plant-overflow 40" in " ".join(words)
    assert command[-2:] == ["--log-dir", "runs/tiny"]
    config, job = configure(["--config", str(ROOT / "launch" / "tiny.toml")])
    layout = config.parallel.tensor.size, config.parallel.pipeline.size, config.precision.name, job.train.data
    assert layout == (2, 2, "16-mixed", "stdlib")
    assert (job.train.steps, config.trace_overflow, job.train.plant_overflow) == (60, True, None)
    if how == "run":
        short = [*ON_FOUR.split()[1:], *command, *SHORT, "--plant-overflow", "2", "--trace", "1"]
        shown = succeeded(run([*TORCHRUN, *short], cwd=clone, PYTHONPATH=str(ROOT))).stdout
        assert "all 4 ranks skipped step 2" in shown
        assert "a byte-bigram model" in shown
        succeeded(run([PYTHON, "-m", "paramp", "report", "runs/tiny"], cwd=clone, PYTHONPATH=str(ROOT)))


def test_the_command_of_megatrons_page_means_what_theirs_does():
    config, job = configure(shlex.split(LIKE_MEGATRON))
    layout, train = config.parallel, job.train
    assert (layout.tensor.size, layout.pipeline.size, layout.sequence_parallel) == (2, 2, True)
    assert (config.precision.name, layout.pipeline.microbatches) == ("16-naive", 16 // 4)
    assert (train.batch_size, train.seq_len, train.steps, config.clip_grad_norm) == (16, 64, 20, 1.0)


FLAGS_OF_MEGATRONS_PAGE = {
    "--tp 2": {"parallel": {"tensor": 2}},
    "--pp 2": {"parallel": {"pipeline": 2}},
    "--pp 2 --schedule interleaved-1f1b --stages-per-rank 2": {
        "parallel": {"pipeline": {"size": 2, "schedule": "interleaved-1f1b", "stages_per_rank": 2}}
    },
    "--tp 2 --sequence-parallel": {"parallel": {"tensor": 2, "sequence_parallel": True}},
    "--zero 1": {"parallel": {"zero": 1}},
    "--ep 2": {"parallel": {"expert": 2}},
    "--cp 2": {"parallel": {"context": 2}},
    "--fsdp 4": {"parallel": {"data": {"shard": 4}}},
    "--precision 16-naive": {"precision": "16-naive"},
    "--precision bf16-naive": {"precision": "bf16-naive"},
    "--precision 16-naive --init-scale 64 --set precision.hysteresis=3": {
        "precision": {"mode": "16-naive", "init_scale": 64.0, "hysteresis": 3}
    },
    "--precision bf16-naive --set grad_dtype=float32": {"precision": "bf16-naive", "grad_dtype": "float32"},
    "--pp 2 --microbatches 4": {"parallel": {"pipeline": {"size": 2, "microbatches": 4}}},
    "--activation-checkpointing full": {"activation_checkpointing": "full"},
    "--clip-grad-norm 0.5 --seed 7": {"clip_grad_norm": 0.5, "seed": 7},
}


@pytest.mark.parametrize("flags", FLAGS_OF_MEGATRONS_PAGE)
def test_flags_beside_those_of_megatron_give_the_configuration_between_them(flags):
    own = configure(shlex.split(flags))[0]
    expected = load(merge(DEFAULTS, FLAGS_OF_MEGATRONS_PAGE[flags]))
    assert own == expected
    assert own != configure([])[0]


def test_settings_in_place_of_what_only_megatron_has_are_taken():
    table = read("docs/from-megatron.md").partition("## What is not there")[2]
    names = {"N": 2, "dataclasses": dataclasses, "paramp": paramp}
    found = [load(eval(f"dict({text})", names)) for text in re.findall(r"`(\w+=[^`]+)`", table)]
    assert found[:2] == [load(FLAGS_OF_MEGATRONS_PAGE[flags]) for flags in ("--ep 2", "--cp 2")]
    assert [config.precision.log_num_zeros for config in found[2:]] == [True]


def test_the_index_lists_every_page_and_the_reference_every_public_name():
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"index.md"}
    assert pages <= set(re.findall(r"\]\(([\w-]+\.md)[#)]", read("docs/index.md")))
    shown = {
        name for path in (ROOT / "docs/reference").glob("*.md") for name in re.findall(r"^::: (\S+)", read(path), re.M)
    }
    names = {name for name in paramp.__all__ if not isinstance(getattr(paramp, name), (str, ModuleType))}
    assert len(names) > 15
    assert {f"paramp.{name}" for name in names} - shown == set()
    members = r"^::: (\S+)\n    options:\n      (?:inherited_)?members: \[(.*)\]"
    for path in (ROOT / "docs/reference").glob("*.md"):
        for owner, listed in re.findall(members, read(path), re.M):
            lacking = [name for name in filter(None, listed.split(", ")) if not hasattr(resolve_name(owner), name)]
            assert not lacking, owner


@pytest.fixture(scope="module")
def site():
    """What the site adds to its theme."""
    path = ROOT / "docs" / "site" / "hooks.py"
    spec = importlib.util.spec_from_file_location("site_hooks", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("line", "is_loaded"),
    [
        ('<script src="https://unpkg.com/a.js"></script>', True),
        ('<link rel="stylesheet" href="//fonts.googleapis.com/css">', True),
        ('<img alt="x" src="https://img.shields.io/a.svg">', True),
        ('<a href="https://pytorch.org">torch</a> <script src="assets/a.js"></script>', False),
    ],
)
def test_a_page_that_loads_something_over_the_network_fails_the_build(site, line, is_loaded, caplog):
    site.on_post_page(f"<html>{line}</html>")
    assert bool(caplog.records) == is_loaded


def test_cells_of_tables_have_the_heads_of_their_columns(site):
    page = markdown.markdown("| | `a` b | c |\n|-|-|-|\n| x | y | |", extensions=["tables", site.LabelledTables()])
    assert re.findall(r"<td.*?</td>", page) == ["<td>x</td>", '<td data-label="a b">y</td>', '<td data-label="c"></td>']


def test_the_messages_to_look_up_are_messages_of_the_code():
    """``...`` stands for values, as in the page's tables. Messages of torch and gloo are left out."""
    texts = set()
    for path in (ROOT / "paramp").rglob("*.py"):
        for node in ast.walk(ast.parse(read(path))):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            texts.add("".join(str(part.value) if isinstance(part, ast.Constant) else "..." for part in parts))
    messages = set(re.findall(r"^\| a? ?`([^`]* [^`]*)`", read("docs/troubleshooting.md"), re.MULTILINE))
    messages -= {"terminate called without an active exception", "_apply(): Couldn't swap ..."}
    messages -= {"Attempted to ... an invalid python storage"}
    assert len(messages) > 25
    for message in messages:
        pattern = ".*".join(map(re.escape, message.strip(". ").split("...")))
        assert any(re.search(pattern, text) for text in texts), message
