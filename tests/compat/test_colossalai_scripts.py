"""Scripts in the shape of Colossal-AI's examples, after the changes that docs/from-colossalai.md names, on two ranks.

The references are plain torch loops over the same samples in one process.
"""

import contextlib
import io
import logging
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from pool import on_ranks
from torch import nn
from torch.utils.data import TensorDataset

from paramp import ConfigError
from paramp.compat import colossalai
from paramp.compat.colossalai import nn as col_nn
from paramp.compat.colossalai.context import ParallelMode
from paramp.compat.colossalai.core import global_context as gpc
from paramp.compat.colossalai.logging import disable_existing_loggers, get_dist_logger
from paramp.compat.colossalai.nn.lr_scheduler import LinearWarmupLR
from paramp.compat.colossalai.nn.metric import Accuracy
from paramp.compat.colossalai.trainer import Trainer, hooks
from paramp.compat.colossalai.utils import MultiTimer, get_dataloader, is_using_pp

BATCH, EPOCHS, LR, CLIP = 8, 3, 0.2, 0.5
AMP_CONFIG = """
from paramp.compat.colossalai.amp import AMP_TYPE
BATCH_SIZE = 4
NUM_EPOCHS = 3
DROP_RATE = 0.1
fp16 = dict(mode=AMP_TYPE.{mode}, {scale}=2.0**10)
clip_grad_norm = 0.5
"""


def network():
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.LayerNorm(16), nn.Linear(16, 3))


def samples(count=40, seed=9):
    x = torch.randn(count, 6, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, x[:, :3].argmax(1))


def plain(epochs, batches, *, accumulate=1, clip=CLIP, total=EPOCHS):
    """Plain torch in fp32: the weights, and of each epoch the training loss, test loss and test accuracy."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    scheduler = LinearWarmupLR(optimizer, warmup_steps=1, total_steps=total)
    history = []
    for _ in range(epochs):
        losses = []
        for number, (x, y) in enumerate(batches, 1):
            loss = nn.functional.cross_entropy(model(x), y)
            (loss / accumulate).backward()
            losses.append(loss.item())
            if number % accumulate == 0:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                optimizer.zero_grad()
        scheduler.step()
        with torch.no_grad():
            x, y = samples(24, seed=3).tensors
            output = model(x)
        losses = sum(losses) / len(losses)
        accuracy = (output.argmax(1) == y).double().mean().item()
        history.append((losses, nn.functional.cross_entropy(output, y).item(), accuracy))
    return [parameter.detach() for parameter in model.parameters()], history


def in_order(batch=BATCH):
    x, y = samples().tensors
    return list(zip(x.split(batch), y.split(batch), strict=True))


def check(engine, expected, rounding):
    found = engine.full_state_dict()
    for (name, start), (_, weight) in zip(network().named_parameters(), expected.items(), strict=True):
        way = weight - start.detach()
        assert (found[name] - weight).norm() <= 24 * rounding * way.norm(), name


def names_of(weights):
    return dict(zip((name for name, _ in network().named_parameters()), weights, strict=True))


@contextlib.contextmanager
def shared_folder():
    """A temporary folder that is the same on all ranks."""
    with tempfile.TemporaryDirectory() as folder:
        folders = [folder]
        dist.broadcast_object_list(folders)
        yield Path(folders[0])
        dist.barrier()


@pytest.mark.parametrize(("mode", "scale"), [("TORCH", "init_scale"), ("NAIVE", "initial_scale")])
@on_ranks(2)
def test_the_amp_example_with_its_engine(world, mode, scale):
    """features/amp: a parser, a config file, a schedule that initialize does not get, a loop over the engine."""
    with shared_folder() as folder:
        path = folder / f"config_{world.rank}.py"
        path.write_text(AMP_CONFIG.format(mode=mode, scale=scale))
        parser = colossalai.get_default_parser()
        parser.add_argument("--from_torch", action="store_true")
        args = parser.parse_args(["--config", str(path), "--from_torch"])
        assert (args.backend, args.rank, args.from_torch) == (None, None, True)
        with colossalai.launch_from_torch(config=args.config, backend=args.backend, verbose=False):
            logger = get_dist_logger()
            with contextlib.redirect_stderr(io.StringIO()) as printed:
                logger.info("initialized distributed environment", ranks=[0])
            assert ("initialized" in printed.getvalue()) is (world.rank == 0)
            model = network()
            loader = get_dataloader(dataset=samples(), batch_size=gpc.config.BATCH_SIZE, num_workers=0, pin_memory=True)
            optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
            schedule = LinearWarmupLR(optimizer, warmup_steps=1, total_steps=gpc.config.NUM_EPOCHS)
            engine, loader, _, _ = colossalai.initialize(model, optimizer, nn.CrossEntropyLoss(), loader)
            engine.train()
            for _ in range(gpc.config.NUM_EPOCHS):
                for x, label in loader:
                    engine.zero_grad()
                    output = engine(x)
                    loss = engine.criterion(output, label)
                    engine.backward(loss)
                    engine.step()
                schedule.step()
            weights, _ = plain(EPOCHS, in_order())
            assert engine.num_skipped == 0
            check(engine, names_of(weights), 2.0**-11)


def fit(parallel, extra, *, batch, epochs=EPOCHS, more_hooks=(), test_batch=12):
    """A script of the trainer: the engine, and the metrics of each epoch as a user's hook reads them."""
    timer, logger = MultiTimer(), get_dist_logger()
    with colossalai.launch_from_torch(config={"parallel": parallel, "clip_grad_norm": CLIP, **extra}):
        loader = get_dataloader(samples(), batch_size=batch)
        test_loader = get_dataloader(samples(24, seed=3), add_sampler=False, batch_size=test_batch)
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
        schedule = LinearWarmupLR(optimizer, EPOCHS, warmup_steps=1)
        engine, loader, test_loader, _ = colossalai.initialize(
            model, optimizer, col_nn.CrossEntropyLoss(), loader, test_loader
        )
        assert len(test_loader) == 24 // test_batch  # not sharded
        reader = Reader()
        trainer = Trainer(engine=engine, timer=timer, logger=logger)
        trainer.fit(
            train_dataloader=loader,
            epochs=epochs,
            test_dataloader=test_loader,
            test_interval=1,
            hooks=[
                reader,
                hooks.LossHook(),
                hooks.AccuracyHook(Accuracy()),
                hooks.LogMetricByEpochHook(logger),
                hooks.LogMetricByStepHook(),
                hooks.LogTimingByEpochHook(timer, logger),
                hooks.LogMemoryByEpochHook(logger),
                hooks.LRSchedulerHook(lr_scheduler=schedule, by_epoch=True),
                *more_hooks,
            ],
            display_progress=True,
        )
        assert engine.num_steps * extra.get("gradient_accumulation", 1) == trainer.cur_step == 5 * epochs
        assert is_using_pp() is (gpc.get_world_size(ParallelMode.PIPELINE) > 1)
        assert [name for name, _ in sorted(timer.timers.items())] == [
            "Test-epoch",
            "Test-step",
            "Train-epoch",
            "Train-step",
        ]
        return engine.full_state_dict(), reader.history


class Reader(hooks.BaseHook):
    """A hook as users write them."""

    def __init__(self):
        super().__init__(priority=20)
        self.history = []

    def after_test_epoch(self, trainer):
        metrics = trainer.states["metrics"]
        self.history.append((metrics["train"]["Loss"], metrics["test"]["Loss"], metrics["test"]["Accuracy"]))


LAYOUTS = {"data": ({}, {}, 4), "pipeline": ({"pipeline": 2}, {"NUM_MICRO_BATCHES": 4}, 8)}


@pytest.mark.parametrize("layout", LAYOUTS)
@on_ranks(2)
def test_the_examples_of_the_trainer(world, layout):
    """features/amp, pipeline_parallel and image/resnet: Trainer with its hooks, in fp32, gives the same numbers."""
    parallel, extra, batch = LAYOUTS[layout]
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        weights, history = fit(parallel, extra, batch=batch)
    expected, metrics = plain(EPOCHS, in_order())
    for name, weight in names_of(expected).items():
        assert (weights[name] - weight).abs().max() < 1e-5, name
    torch.testing.assert_close(torch.tensor(history), torch.tensor(metrics), rtol=1e-5, atol=1e-5)
    lines = [line for line in printed.getvalue().splitlines() if "Loss = " in line]
    assert len(lines) == (2 * EPOCHS if world.rank == 0 else 0)
    if world.rank == 0:
        assert f"[Epoch 0 / Train]: Loss = {metrics[0][0]:.4f}"[:-1] in lines[0]
        assert "Accuracy" in lines[1]


@on_ranks(2)
def test_a_run_of_the_trainer_goes_on_from_its_checkpoint(world):
    """One epoch, then two in new objects: bit for bit as in one run, the schedule included."""
    with shared_folder() as folder, contextlib.redirect_stderr(io.StringIO()):
        whole, metrics = fit({}, {}, batch=4)
        fit({}, {}, batch=4, epochs=1, more_hooks=[hooks.SaveCheckpointHook(checkpoint_dir=str(folder))])
        assert [one.name for one in folder.iterdir()] == ["epoch0"]
        again, last = fit({}, {}, batch=4, more_hooks=[hooks.LoadCheckpointHook(checkpoint_dir=str(folder))])
        with pytest.raises(FileNotFoundError, match="epoch7"):
            fit({}, {}, batch=4, more_hooks=[hooks.LoadCheckpointHook(checkpoint_dir=str(folder), epoch=7)])
    assert last == metrics[1:]
    assert all(torch.equal(again[name], value) for name, value in whole.items())


@on_ranks(2)
def test_the_trainer_accumulates_as_the_engine_does(world):
    """features/gradient_accumulation, with the trainer: the loss of a window counts once."""
    with contextlib.redirect_stderr(io.StringIO()):
        weights, history = fit({}, {"gradient_accumulation": 5}, batch=4, epochs=1)
    expected, metrics = plain(1, in_order(), accumulate=5)
    for name, weight in names_of(expected).items():
        assert (weights[name] - weight).abs().max() < 1e-5, name
    assert history[0][0] == pytest.approx(metrics[0][0], rel=1e-5)


def test_the_trainer_ends_after_max_steps_and_predicts(tmp_path):
    with colossalai.launch_from_torch({}):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        loader = get_dataloader(samples(), batch_size=BATCH)
        engine, loader, _, _ = colossalai.initialize(model, optimizer, nn.CrossEntropyLoss(), loader)
        trainer = Trainer(engine)
        written = hooks.TensorboardHook(log_dir=str(tmp_path), ranks=[0])
        trainer.fit(loader, epochs=3, max_steps=7, hooks=[hooks.LossHook(), written])
        assert list((tmp_path / "rank_0").glob("events.*"))
        assert (trainer.cur_step, trainer.cur_epoch, engine.num_steps) == (7, 2, 7)
        x, _ = in_order()[0]
        assert torch.equal(trainer.predict(x), model(x))


def test_loggers_of_others_are_quiet(monkeypatch):
    monkeypatch.setattr(logging.root.manager, "loggerDict", {})
    ours, other, third = (logging.getLogger(name) for name in ("paramp", "other", "third"))
    levels = lambda: [one.level for one in (ours, other, third)]  # noqa: E731
    disable_existing_loggers(include=["other"])
    assert levels() == [logging.NOTSET, logging.WARNING, logging.NOTSET]
    disable_existing_loggers()
    assert levels() == [logging.NOTSET, logging.WARNING, logging.WARNING]


def test_what_is_not_there_says_what_to_use():
    for module, name, instead in [
        (colossalai.utils, "save_checkpoint", r"engine\.save\(folder\)"),
        (col_nn, "Linear", r"initialize\(\.\.\., plan"),
        (col_nn, "Lamb", "AdamW"),
        (hooks, "ThroughputHook", "BaseHook"),
    ]:
        with pytest.raises(ImportError, match=f"has no {name}: .*{instead}"):
            exec(f"from {module.__name__} import {name}")
    with pytest.raises(ImportError, match="cannot import name 'Linaer'"):
        exec(f"from {col_nn.__name__} import Linaer")
    with pytest.raises(ConfigError, match="hooks: got 'loss', expected objects of"):
        Trainer(engine=None).fit([], 1, hooks=["loss"])
