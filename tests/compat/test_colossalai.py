"""What Colossal-AI's scripts import and call beside the engine's loop, against plain torch and arithmetic by hand."""

import contextlib
import functools
import io
import math
import re

import pages
import pytest
import torch
from commands import PYTHON, python, torchrun
from families import rarely
from pool import on_ranks, shared_folder
from reference import batches, local, small_gpt
from small_engines import each_raises, engine_of, everywhere, own_part
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paramp
from paramp import ConfigError
from paramp.compat import colossalai
from paramp.compat.colossalai.context import ParallelMode
from paramp.compat.colossalai.core import global_context as gpc
from paramp.compat.colossalai.logging import get_dist_logger
from paramp.compat.colossalai.nn import lr_scheduler as schedules
from paramp.compat.colossalai.utils import get_current_device, get_dataloader

# ------------------------------------------------------------------------------------- global_context and the logger


def test_before_a_launch_questions_are_errors_and_the_logger_writes(capsys):
    assert not any(gpc.is_initialized(mode) for mode in ParallelMode)
    for question in (lambda: gpc.config, gpc.get_global_rank, lambda: gpc.get_world_size(ParallelMode.DATA)):
        with pytest.raises(RuntimeError, match=r"call paramp\.launch_from_torch"):
            question()
    assert get_current_device().type == ("cuda" if torch.cuda.is_available() else "cpu")
    get_dist_logger().info("alone", ranks=[0])
    get_dist_logger().info("another", ranks=[1])
    assert capsys.readouterr().err.endswith("paramp INFO: alone\n")


@on_ranks(4)
def test_the_global_context_is_the_current_one(world):
    with paramp.launch_from_torch({"parallel": {"tensor": 2, "pipeline": 2}, "NUM_EPOCHS": 7}) as context:
        assert gpc.config.NUM_EPOCHS == 7
        assert gpc.get_global_rank() == world.rank
        modes = {"GLOBAL": (world.rank, 4), "MODEL": (world.rank, 4), "DATA": (0, 1)}
        modes |= {"PIPELINE": (world.rank // 2, 2), "TENSOR": (world.rank % 2, 2), "PARALLEL_1D": (world.rank % 2, 2)}
        for name, place in modes.items():
            mode = ParallelMode[name]
            assert (gpc.get_local_rank(mode), gpc.get_world_size(mode)) == place
            assert (gpc.is_first_rank(mode), gpc.is_last_rank(mode)) == (place[0] == 0, place[0] == place[1] - 1)
            assert gpc.is_initialized(mode)
        assert gpc.get_ranks_in_group(ParallelMode.TENSOR) == [world.rank // 2 * 2, world.rank // 2 * 2 + 1]
        assert (gpc.data_parallel_size, gpc.pipeline_parallel_size, gpc.tensor_parallel_size) == (1, 2, 2)
        assert get_current_device() == context.device
        with pytest.raises(ValueError, match="parallel_mode: got 'tp'"):
            gpc.get_group("tp")
    with paramp.launch_from_torch({}):
        assert not gpc.is_initialized(ParallelMode.PIPELINE)  # scripts ask this to know whether there are stages
        gpc.destroy()
        assert not gpc.is_initialized(ParallelMode.GLOBAL)


@on_ranks(4)
def test_the_logger_speaks_on_the_ranks_it_is_told(world):
    logger = get_dist_logger("test")
    assert get_dist_logger("test") is logger
    with paramp.launch_from_torch({"parallel": {"tensor": 2}}), contextlib.redirect_stderr(io.StringIO()) as printed:
        logger.info("first", ranks=[0])
        logger.info("everyone, 100 %")
        logger.warning("second of each pair", ParallelMode.TENSOR, [1])
        logger.debug("too fine")
        folder = shared_folder()
        logger.log_to_file(folder, suffix="x")
        logger.error("kept")
        assert "test ERROR: kept" in (folder / f"rank_{world.rank}_x.log").read_text()
        logger.logger.handlers.pop().close()
        with pytest.raises(ConfigError, match="level: got 'INF', expected"):
            logger.set_level("INF")
    lines = [line.split("] ")[1] for line in printed.getvalue().splitlines()]
    expected = ["test INFO: first"] * (world.rank == 0) + ["test INFO: everyone, 100 %"]
    assert lines == expected + ["test WARNING: second of each pair"] * (world.rank % 2) + ["test ERROR: kept"]


# ------------------------------------------------------------------------------------------------------------ loaders


def read(loader):
    return [int(value) for (batch,) in loader for value in batch]


def given_back(*loaders):
    """The loaders that initialize returns."""
    model = nn.Linear(1, 1)
    _, *given, _ = paramp.initialize(model, torch.optim.SGD(model.parameters()), None, *loaders, plan={})
    return given


@pytest.mark.parametrize("shuffle", [False, True])
@on_ranks(4)
def test_each_data_rank_gets_its_part_and_once_is_enough(world, shuffle):
    data = TensorDataset(torch.arange(13))
    with paramp.launch_from_torch({"parallel": {"tensor": 2}}) as context:
        loader = get_dataloader(data, shuffle=shuffle, batch_size=2, pin_memory=True, num_workers=0)
        for ours in (loader, given_back(loader)[0]):
            parts = everywhere(read(ours))
            assert (parts[0], parts[2]) == (parts[1], parts[3])
            assert sorted({*parts[0], *parts[2]}) == list(range(13))
            assert len(parts[0]) == len(parts[2]) == 7
            assert (parts[0] == [0, 2, 4, 6, 8, 10, 12]) is not shuffle
        assert context.dp.size == 2
        whole = get_dataloader(data, add_sampler=False, batch_size=2)
        assert read(whole) == read(*given_back(whole)[:1]) == list(range(13))


def test_a_loader_without_a_launch_is_for_one_process_and_repeats_with_its_seed():
    data = TensorDataset(torch.arange(50))
    one, same, other = (get_dataloader(data, shuffle=True, seed=seed, batch_size=10) for seed in (3, 3, 4))
    assert isinstance(one, DataLoader)
    first = read(one)
    assert sorted(first) == list(range(50))
    assert first == read(same) != read(other)
    assert first != read(one)  # the next epoch
    assert len(get_dataloader(data, batch_size=20, drop_last=True)) == 2


# ---------------------------------------------------------------------------------------------------------- schedules


def scheduled(name="CosineAnnealingWarmupLR", total_steps=8, **options):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2.0)
    return optimizer, getattr(schedules, name)(optimizer, total_steps, **options)


def rates(optimizer, scheduler, steps=9):
    found = []
    for _ in range(steps):
        found += scheduler.get_last_lr()
        optimizer.step()
        scheduler.step()
    return found


def cosine(step, total, floor=0.0):
    return floor + (2.0 - floor) * (1 + math.cos(math.pi * step / total)) / 2


RISE = [0.5, 1.0, 1.5, 2.0]
SCHEDULES = {
    "CosineAnnealingLR": ({"eta_min": 0.5}, [cosine(step, 8, 0.5) for step in range(9)]),
    "CosineAnnealingWarmupLR": ({"warmup_steps": 4}, [*RISE, *(cosine(step, 4) for step in range(5))]),
    "FlatAnnealingLR": ({"pct_start": 0.5}, [2.0] * 4 + [cosine(step, 4) for step in range(5)]),
    "FlatAnnealingWarmupLR": (
        {"warmup_steps": 4, "pct_start": 0.5, "eta_min": 0.25},
        [*RISE, 2.0, 2.0, *(cosine(step, 2, 0.25) for step in range(3))],
    ),
    "LinearWarmupLR": ({"warmup_steps": 3}, [0.5, 1.0, 1.5, 2.0, 1.6, 1.2, 0.8, 0.4, 0.0]),
    "MultiStepLR": ({"milestones": [2, 5]}, [2.0] * 2 + [0.2] * 3 + [0.02] * 4),
    "MultiStepWarmupLR": ({"warmup_steps": 4, "milestones": [6]}, [*RISE, 2.0, 2.0, 0.2, 0.2, 0.2]),
    "PolynomialLR": ({"power": 2.0, "end_lr": 1.0}, [1.0 + ((8 - step) / 8) ** 2 for step in range(9)]),
    "PolynomialWarmupLR": ({"warmup_steps": 4, "end_lr": 0.0}, [*RISE, 2.0, 1.5, 1.0, 0.5, 0.0]),
}


def test_schedules_by_hand_and_from_their_state():
    public = {name for name, kind in vars(schedules).items() if getattr(kind, "__module__", "") == schedules.__name__}
    assert set(SCHEDULES) == {name for name in public if not name.startswith("_")}
    for name, (options, values) in SCHEDULES.items():
        assert rates(*scheduled(name, **options)) == pytest.approx(values), name
    options, values = SCHEDULES["CosineAnnealingWarmupLR"]
    stopped, resumed = (scheduled(**options) for _ in range(2))
    rates(*stopped, 5)
    for one, other in zip(resumed, stopped, strict=True):
        one.load_state_dict(other.state_dict())
    assert rates(*resumed, 4) == pytest.approx(values[5:])
    refused = {
        "warmup_steps: got 8, expected 0 to 7": lambda: scheduled("LinearWarmupLR", warmup_steps=8),
        "pct_start: got 2": lambda: scheduled("FlatAnnealingLR", pct_start=2),
        "milestones: got none": lambda: scheduled("MultiStepWarmupLR"),
    }
    each_raises(ConfigError, refused)


def test_a_scheduler_that_initialize_was_not_given_drives_the_engines_optimizer():
    with paramp.launch_from_torch({"fp16": {"mode": paramp.amp.AMP_TYPE.NAIVE, "initial_scale": 4.0}}):
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=2.0)
        scheduler = schedules.CosineAnnealingLR(optimizer, total_steps=2)
        engine = engine_of(model, optimizer=optimizer)
        engine.forward_backward(torch.ones(4, 3), torch.ones(4, 1))
        next(model.parameters()).grad.fill_(math.inf)
        assert engine.step().overflow
        scheduler.step()  # no warning of torch's that the optimizer has not stepped: the order was right
        assert engine.optimizer.param_groups[0]["lr"] == pytest.approx(1.0)


# --------------------------------------------------------------------------------------------------- execute_schedule


def check_schedule(context):
    """The loss and output of the whole batch in plain torch; each option on the way."""
    model = small_gpt(num_layers=2)
    x, y = next(batches(1))
    output = model(x).detach()
    loss, (mine,), (x, y) = model.loss(output, y).item(), own_part(context, output), own_part(context, x, y)
    engine = engine_of(model, model.loss)
    pair, last = (x, y), context.is_last_stage

    def check(returned, *, with_output=True, with_loss=True):
        found, label, value = returned
        assert (found is not None, label is not None) == (with_output and last, with_output and last)
        if found is not None:
            assert (found - mine).abs().max() < 1e-4
            assert not found.requires_grad
            assert torch.equal(label, y)
        assert (value is not None) is with_loss
        if value is not None:
            assert abs(value.item() - loss) < 1e-4

    engine.eval()
    without_loss = {"forward_only": True, "return_loss": False}
    check(engine.execute_schedule(iter([pair]), forward_only=True))
    check(engine.execute_schedule(iter([pair]), **without_loss), with_loss=False)
    nothing = engine.execute_schedule(iter([pair]), **without_loss, return_output_label=False)
    check(nothing, with_output=False, with_loss=False)
    gradients = [parameter.grad for _, parameter in engine.named_parameters() if parameter.grad is not None]
    assert not any(local(gradient).any() for gradient in gradients)
    engine.train()
    steps = iter([pair, pair])
    check(engine.execute_schedule(steps))
    assert engine.step().stepped
    engine.zero_grad()
    found, label, value = engine.execute_schedule(steps, return_output_label=False)
    assert (found, label) == (None, None)
    assert value.item() < loss  # it has learned
    with pytest.raises(StopIteration):
        engine.execute_schedule(steps)
    refused = {
        "return_loss: got False": lambda: engine.execute_schedule(iter([pair]), return_loss=False),
        "data_iter: got list, expected an iterator": lambda: engine.execute_schedule([pair]),
        "data_iter: yielded Tensor, expected a pair": lambda: engine.execute_schedule(iter([x])),
    }
    each_raises(ValueError, refused)


def test_the_schedule_on_one_rank_in_microbatches():
    with paramp.launch_from_torch({"parallel": {"pipeline": {"size": 1, "microbatches": 2}}}) as context:
        check_schedule(context)
    with paramp.launch_from_torch({}):  # a forward without loss needs no criterion
        model = nn.Linear(3, 2)
        engine = engine_of(model, None)
        x, y = torch.ones(4, 3), torch.zeros(4)
        output, label, loss = engine.execute_schedule(iter([[x, y]]), forward_only=True, return_loss=False)
        assert torch.equal(output, model(x))
        assert torch.equal(label, y)
        assert loss is None
        with pytest.raises(ValueError, match="criterion: initialize got none"):
            engine.execute_schedule(iter([(x, y)]))


@pytest.mark.parametrize("parallel", [{"pipeline": 2, "tensor": 2}, {"data": 2, "tensor": 2}])
@on_ranks(4)
def test_the_schedule_on_four_ranks(world, parallel):
    with paramp.launch_from_torch({"parallel": parallel}) as context:
        check_schedule(context)


@on_ranks(2)
def test_the_configuration_of_colossalais_own_examples(world):
    """Nothing in half precision, no tensor parallelism, and as many microbatches as it says; as a dict and a file."""
    for microbatches, path in ((4, None), (2, shared_folder() / f"{world.rank}.py")):
        parallel = {"pipeline": 2, "tensor": {"size": 1, "mode": None}}
        config = {"NUM_MICRO_BATCHES": microbatches, "parallel": parallel, "fp16": {"mode": None}}
        if path is not None:
            path.write_text("\n".join(f"{key} = {value}" for key, value in config.items()))
        with colossalai.launch_from_torch(config=path or config):
            model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
            engine, *_ = colossalai.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.MSELoss())
            calls = []
            engine.module.register_forward_hook(lambda *_, calls=calls: calls.append(1))
            for _ in range(2):
                calls.clear()  # the first one may compute more, to learn shapes
                engine.zero_grad()
                engine.execute_schedule(iter([(torch.ones(8, 3), torch.ones(8, 2))]))
            assert len(calls) == microbatches
            assert gpc.config.precision.name == "32-true"


def test_what_colossalai_leaves_out_with_none():
    for config in (
        {"parallel": {"pipeline": None, "tensor": {"size": 1, "mode": None}}, "fp16": {"mode": None}},
        {"parallel": {"pipeline": 1, "tensor": None}, "fp16": None, "NUM_MICRO_BATCHES": 4},
        {"parallel": None},
    ):
        with colossalai.launch_from_torch(config=config) as context:
            pipeline = context.config.parallel.pipeline
            assert (context.pp.size, context.tp.size, pipeline.num_microbatches) == (1, 1, 1)
            assert context.config.precision.name == "32-true"


# ------------------------------------------------------------------------------------------ launching without a with

SCRIPT = """
import sys, torch, torch.distributed as dist, paramp
from paramp.compat.colossalai.core import global_context as gpc
paramp.launch_from_torch(config=dict(NUM_EPOCHS=3))
total = torch.ones(1)
dist.all_reduce(total)
sys.stdout.write(f"sum {{total.item()}} {{gpc.config.NUM_EPOCHS}}\\n")  # in one piece: two ranks write to one pipe
if {fails}:
    for _ in range(300):  # gloo's threads still hold these tensors when the script ends
        dist.all_reduce(torch.ones(100), async_op=True)
    raise ValueError("mine")
"""


@pytest.mark.parametrize("ranks", rarely([1, 2], 1))
def test_a_script_without_a_with_closes_quietly(ranks, tmp_path):
    script, path = tmp_path / "script.py", f"{paramp.__path__[0]}/.."
    script.write_text(SCRIPT.format(fails=False))
    cold = ("--no-python", "env", "PARAMP_TEST_COLD=1", PYTHON)  # the ranks, whose ends are tested
    result = torchrun(ranks, *cold, str(script), PYTHONPATH=path)
    assert (result.returncode, result.stdout.count(f"sum {ranks}.0 3")) == (0, ranks), result.stderr
    assert not re.search("Traceback|Warning", result.stderr)
    script.write_text(SCRIPT.format(fails=True))
    alone = python("-W", "error", str(script), PYTHONPATH=path)
    assert alone.returncode == 1
    assert alone.stderr.rstrip().endswith("ValueError: mine")


def test_the_names_in_the_pages_table_are_there():
    table = pages.read("docs/from-colossalai.md").partition("## What is available")[2].partition("\n## ")[0]
    found = []
    for cell in re.findall(r"^\| (.*?) \|", table, re.MULTILINE):
        owner = ""
        for name in re.findall(r"`([\w.]+)(?:\(.*?\))?`", cell):
            owner = name.rpartition(".")[0] or owner
            found.append(f"{owner}.{name.rpartition('.')[2]}".removeprefix(".").removeprefix("colossalai."))
    replaced = {"engine.model", "utils.save_checkpoint", "utils.load_checkpoint", "img.cuda"}
    names = [name for name in found if name not in replaced and not name.startswith("engine.")]
    assert len(names) > 20
    for name in names:
        assert functools.reduce(getattr, name.split("."), colossalai), name
    for name in ("launch_from_slurm", "launch_from_openmpi", "launch"):
        assert callable(getattr(colossalai, name))
