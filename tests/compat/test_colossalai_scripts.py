"""Scripts in the shape of Colossal-AI's examples, after the changes that docs/from-colossalai.md names, on two ranks.

The references are plain torch loops over the same samples in one process.
"""

import contextlib
import io
import logging
from unittest import mock

import pytest
import torch
from pool import on_ranks, shared_folder
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset
from trainer_runs import LR, check_classifier, classifier, in_batches, plain_epochs, samples, sgd

from paramp import ConfigError
from paramp.compat import colossalai
from paramp.compat.colossalai import nn as col_nn
from paramp.compat.colossalai.context import ParallelMode
from paramp.compat.colossalai.core import global_context as gpc
from paramp.compat.colossalai.logging import disable_existing_loggers, get_dist_logger
from paramp.compat.colossalai.nn.lr_scheduler import LinearWarmupLR
from paramp.compat.colossalai.nn.metric import Accuracy
from paramp.compat.colossalai.trainer import Trainer, hooks
from paramp.compat.colossalai.utils import (
    MultiTimer,
    Timer,
    get_dataloader,
    is_dp_rank_0,
    is_no_pp_or_last_stage,
    is_tp_rank_0,
    is_using_pp,
    print_rank_0,
)

BATCH, EPOCHS, CLIP = 8, 3, 0.5
RATES = [0.5 * LR, LR, 0.5 * LR]
"""Of the epochs: one to warm up, and then down in a line."""
AMP_CONFIG = """
from paramp.compat.colossalai.amp import AMP_TYPE
BATCH_SIZE = 4
NUM_EPOCHS = 3
DROP_RATE = 0.1
fp16 = dict(mode=AMP_TYPE.{mode}, {scale}=2.0**10)
clip_grad_norm = 0.5
"""


def plain(epochs=EPOCHS, accumulate=1):
    """The model, and of each epoch the training loss, test loss and test accuracy."""
    x, y = samples(24, seed=3).tensors
    history = []
    for model, loss in plain_epochs([in_batches(BATCH)] * epochs, rates=RATES, clip=CLIP, accumulate=accumulate):
        with torch.no_grad():
            output = model(x)
        accuracy = (output.argmax(1) == y).double().mean().item()
        history.append((loss, cross_entropy(output, y).item(), accuracy))
    return model, history


@pytest.mark.parametrize(("mode", "scale"), [("TORCH", "init_scale"), ("NAIVE", "initial_scale")])
@on_ranks(2)
def test_the_amp_example_with_its_engine(world, mode, scale):
    """features/amp: a parser, a config file, a schedule that initialize does not get, a loop over the engine."""
    path = shared_folder() / f"config_{world.rank}.py"
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
        model = classifier()
        loader = get_dataloader(dataset=samples(), batch_size=gpc.config.BATCH_SIZE, num_workers=0, pin_memory=True)
        optimizer = sgd(model.parameters())
        schedule = LinearWarmupLR(optimizer, warmup_steps=1, total_steps=gpc.config.NUM_EPOCHS)
        engine, loader, _, _ = colossalai.initialize(model, optimizer, nn.CrossEntropyLoss(), loader)
        engine.train()
        for _ in range(gpc.config.NUM_EPOCHS):
            for x, label in loader:
                engine.zero_grad()
                output = engine(x)
                assert output.dtype is torch.float32
                engine.backward(engine.criterion(output, label))
                engine.step()
            schedule.step()
        assert engine.num_skipped == 0
        check_classifier(engine.full_state_dict(), plain()[0])


class Reader(hooks.BaseHook):
    """A hook as users write them: it reads the metrics of each epoch."""

    def __init__(self):
        super().__init__(priority=20)
        self.history = []

    def after_test_epoch(self, trainer):
        metrics = trainer.states["metrics"]
        self.history.append((metrics["train"]["Loss"], metrics["test"]["Loss"], metrics["test"]["Accuracy"]))


class Looks(hooks.LoadCheckpointHook):
    """Evaluates and predicts before the first batch after a checkpoint, and after each; training goes on as before."""

    def before_train_epoch(self, trainer):
        states = trainer.states
        trainer.evaluate(trainer._train_loader, hooks=[hooks.LossHook()])
        assert trainer.states is states
        assert states["metrics"]["test"]["Loss"] > 0
        trainer.predict(samples().tensors[0])
        assert trainer.engine.module.training

    def after_train_iter(self, trainer, *_):
        self.before_train_epoch(trainer)


def fit(parallel=None, *, batch=4, epochs=EPOCHS, max_steps=None, hook=None, **extra):
    """A script of the trainer: the weights, the metrics of each epoch, and what was printed."""
    timer, logger, reader = MultiTimer(), get_dist_logger(), Reader()
    config = {"parallel": parallel or {}, "clip_grad_norm": CLIP, **extra}
    with contextlib.redirect_stderr(io.StringIO()) as printed, colossalai.launch_from_torch(config=config):
        loader = get_dataloader(samples(), batch_size=batch)
        test_loader = get_dataloader(samples(24, seed=3), add_sampler=False, batch_size=12)
        model = classifier()
        optimizer = sgd(model.parameters())
        schedule = LinearWarmupLR(optimizer, EPOCHS, warmup_steps=1)
        engine, loader, test_loader, _ = colossalai.initialize(
            model, optimizer, col_nn.CrossEntropyLoss(), loader, test_loader
        )
        assert len(test_loader) == 2  # not sharded
        trainer = Trainer(engine=engine, timer=timer, logger=logger)
        used = [
            *(reader, hooks.LossHook(), hooks.AccuracyHook(Accuracy()), hooks.LogMetricByEpochHook(logger)),
            *(hooks.LogMetricByStepHook(), hooks.LogTimingByEpochHook(timer, logger)),
            *(hooks.LogMemoryByEpochHook(logger), hooks.LRSchedulerHook(lr_scheduler=schedule, by_epoch=True)),
            *([hook] if hook else []),
        ]
        options = {"test_dataloader": test_loader, "test_interval": 1, "display_progress": True}
        trainer.fit(train_dataloader=loader, epochs=epochs, max_steps=max_steps, hooks=used, **options)
        steps = max_steps or 5 * epochs
        assert engine.num_steps * extra.get("gradient_accumulation", 1) == trainer.cur_step == steps
        assert loader.epoch == steps // 5
        assert is_using_pp() is (gpc.get_world_size(ParallelMode.PIPELINE) > 1)
        assert sorted(timer.timers) == ["Test-epoch", "Test-step", "Train-epoch", "Train-step"]
        return engine.full_state_dict(), reader.history, printed


@pytest.mark.parametrize("layout", ["data", "pipeline"])
@on_ranks(2)
def test_the_examples_of_the_trainer(world, layout):
    """features/amp, pipeline_parallel and image/resnet: Trainer with its hooks, in fp32, gives the same numbers."""
    if layout == "data":
        weights, history, printed = fit()
    else:
        weights, history, printed = fit({"pipeline": 2}, batch=BATCH, NUM_MICRO_BATCHES=4)
    expected, metrics = plain()
    check_classifier(weights, expected, 2.0**-20, least=0)
    assert {type(number) for epoch in history for number in epoch} == {float}
    torch.testing.assert_close(torch.tensor(history), torch.tensor(metrics), rtol=1e-5, atol=1e-5)
    lines = [line for line in printed.getvalue().splitlines() if "Loss = " in line]
    assert len(lines) == (2 * EPOCHS if world.rank == 0 else 0)
    if world.rank == 0:
        assert f"[Epoch 0 / Train]: Loss = {metrics[0][0]:.4f}"[:-1] in lines[0]
        assert "Accuracy" in lines[1]


@on_ranks(2)
def test_a_run_of_the_trainer_goes_on_from_its_checkpoint(world):
    """Two epochs, then one in new objects: bit for bit as in one run, the schedule included.

    Or a part of them: 7 batches, and 10, which are both of them to the end.
    """
    folder, others = shared_folder(), shared_folder()
    whole, metrics, _ = fit(hook=hooks.SaveCheckpointHook(2, str(others)))
    assert sorted(one.name for one in others.iterdir()) == ["epoch0", "epoch2"]
    fit(epochs=2, hook=hooks.SaveCheckpointHook(checkpoint_dir=str(folder)))
    assert sorted(one.name for one in folder.iterdir()) == ["epoch0", "epoch1"]
    again, last, _ = fit(hook=hooks.LoadCheckpointHook(checkpoint_dir=str(folder)))
    with pytest.raises(FileNotFoundError, match="epoch7"):
        fit(hook=hooks.LoadCheckpointHook(checkpoint_dir=str(folder), epoch=7))
    assert last == metrics[2:]
    assert all(torch.equal(again[name], value) for name, value in whole.items())
    for max_steps in (7, 10):
        folder = str(shared_folder())
        fit(max_steps=max_steps, hook=hooks.SaveCheckpointHook(checkpoint_dir=folder))
        again, last, _ = fit(hook=Looks(checkpoint_dir=folder))
        assert (len(last), last[-1]) == (3 - max_steps // 5, metrics[2])
        assert all(torch.equal(again[name], value) for name, value in whole.items())
    early, folder = hooks.BaseHook(priority=0), shared_folder()  # saves after the last batch, before the epoch's end
    early.after_train_iter = lambda trainer, *_: trainer.cur_step == 4 and trainer.engine.save(folder / "epoch0")
    fit(epochs=1, hook=early)
    _, last, _ = fit(hook=hooks.LoadCheckpointHook(checkpoint_dir=str(folder)))
    assert len(last) == 2
    (others / "epoch10").mkdir(exist_ok=True)
    trainer = mock.Mock()
    hooks.LoadCheckpointHook(str(others)).before_train(trainer)
    assert (trainer.engine.load.call_args.args, trainer.cur_epoch) == ((others / "epoch10",), 11)
    schedules = [LinearWarmupLR(sgd(classifier().parameters()), EPOCHS, warmup_steps=1) for _ in range(2)]
    trainer.hooks = [hooks.LRSchedulerHook(lr_scheduler=one, by_epoch=True) for one in schedules]
    for hook in trainer.hooks:
        hook.after_hook_is_attached(trainer)
    tracked = dict(call.args for call in trainer.engine.track.call_args_list)
    assert tracked == dict(zip(("trainer_lr_scheduler", "trainer_lr_scheduler_1"), schedules, strict=True))


@on_ranks(2)
def test_the_trainer_accumulates_as_the_engine_does(world):
    """features/gradient_accumulation, with the trainer: the loss of a window counts once."""
    weights, history, _ = fit(gradient_accumulation=5, epochs=1)
    expected, metrics = plain(1, accumulate=5)
    check_classifier(weights, expected, 2.0**-20, least=0)
    assert history[0][0] == pytest.approx(metrics[0][0], rel=1e-5)
    with pytest.raises(ConfigError, match=r"gradient_accumulation: got 2, but SaveCheckpointHook .* the 5 batches"):
        fit(gradient_accumulation=2, epochs=1, hook=hooks.SaveCheckpointHook(checkpoint_dir=str(shared_folder())))
    with pytest.raises(ConfigError, match=r"gradient_accumulation: got 5, .* the 7 batches up to the end of epoch 1"):
        fit(gradient_accumulation=5, max_steps=7, hook=hooks.SaveCheckpointHook(checkpoint_dir=str(shared_folder())))


def test_windows_go_on_in_the_next_epoch_and_begin_anew_in_a_later_one(tmp_path):
    """Three batches an epoch and two a window, from epoch 1 on, which ends inside of a window."""
    with colossalai.launch_from_torch({"gradient_accumulation": 2}):
        model, loader = classifier(), get_dataloader(samples(24), batch_size=8)
        engine, loader, _, _ = colossalai.initialize(model, sgd(model.parameters()), nn.CrossEntropyLoss(), loader)
        trainer, seen, losses, found = Trainer(engine), hooks.BaseHook(priority=20), [], []
        trainer.cur_epoch = 1
        seen.after_train_iter = lambda trainer, output, label, loss: losses.append(loss.item())
        seen.after_train_epoch = lambda trainer: found.append(trainer.states["metrics"]["train"]["Loss"])
        trainer.fit(loader, epochs=3, hooks=[hooks.LossHook(), hooks.SaveCheckpointHook(2, str(tmp_path)), seen])
    assert found == pytest.approx([losses[1], (losses[3] + losses[5]) / 2])
    assert [one.name for one in tmp_path.iterdir()] == ["epoch2"]


def test_the_trainer_ends_after_max_steps_and_predicts(tmp_path):
    with colossalai.launch_from_torch({}):
        model = classifier()
        loader = get_dataloader(samples(), batch_size=BATCH)
        engine, loader, _, _ = colossalai.initialize(model, sgd(model.parameters()), nn.CrossEntropyLoss(), loader)
        trainer = Trainer(engine, logger=get_dist_logger())
        written = hooks.TensorboardHook(log_dir=str(tmp_path), ranks=[0])
        with contextlib.redirect_stderr(io.StringIO()) as printed:
            trainer.fit(loader, epochs=3, max_steps=7, hooks=[hooks.LossHook(), written])
        assert "training ends after max_steps = 7 batches" in printed.getvalue()
        assert list((tmp_path / "rank_0").glob("events.*"))
        assert (trainer.cur_step, trainer.cur_epoch, engine.num_steps) == (7, 2, 7)
        x, _ = in_batches(BATCH)[0]
        assert torch.equal(trainer.predict(x), model(x))
        trainer.fit(loader, epochs=3)  # which begins with the rest of the second epoch
        assert (trainer.cur_step, trainer.cur_epoch, engine.num_steps) == (15, 3, 15)


@pytest.mark.parametrize(("count_correct", "expected"), [(Accuracy(), 10 / 12), (lambda output, label: 1, 1 / 2)])
def test_the_accuracy_of_tokens_or_of_what_a_function_counts(count_correct, expected):
    """Of two sequences of six tokens, the second with two mistakes."""
    label = torch.arange(12).view(2, 6)
    output = torch.eye(12)[label.clamp(max=9)]
    trainer = mock.Mock(states={"metrics": {"test": {}}})
    with colossalai.launch_from_torch({}) as context:
        trainer.engine.context = context
        hook = hooks.AccuracyHook(count_correct)
        hook.before_test_epoch(trainer)
        hook.after_test_iter(trainer, output, label, None)
        hook.after_test_epoch(trainer)
    assert trainer.states["metrics"]["test"]["Accuracy"] == expected
    other = hooks.AccuracyHook(lambda output, label: 1)
    other.before_test_epoch(trainer)
    with pytest.raises(ConfigError, match="AccuracyHook: got the label dict without a tensor that has dims"):
        other.after_test_iter(trainer, output, {"number": 1}, None)


class Five(torch.utils.data.Dataset):
    """Five samples, of which the first is right; the label has two keys."""

    def __len__(self):
        return 5

    def __getitem__(self, index):
        return torch.tensor([1.0, 0.0]), {"class": torch.tensor(int(index > 0)), "weight": torch.tensor(1.0)}


class FiveInTurn(Five, IterableDataset):
    def __iter__(self):
        return map(self.__getitem__, range(5))


@pytest.mark.parametrize("kind", ["samples", "one sample each", "batches", "stream", "sampler"])
@on_ranks(2)
def test_the_accuracy_counts_samples_once_that_fill_the_last_round(world, kind):
    options = {
        "samples": {"batch_size": 2},
        "one sample each": {"batch_size": 1},
        "batches": {"batch_sampler": [[0, 1], [2], [3, 4]]},
        "stream": {"batch_size": 2},
        "sampler": {"batch_size": 2, "sampler": DistributedSampler(Five(), 2, world.rank, shuffle=False)},
    }
    loader = DataLoader(FiveInTurn() if kind == "stream" else Five(), **options[kind])
    with colossalai.launch_from_torch({}):
        model = nn.Linear(2, 2, bias=False)
        nn.init.eye_(model.weight)
        optimizer, criterion = sgd(model.parameters()), lambda output, label: cross_entropy(output, label["class"])
        engine, _, loader, _ = colossalai.initialize(model, optimizer, criterion, None, loader)
        trainer, correct = Trainer(engine), lambda output, label: (output.argmax(-1) == label["class"]).sum()
        trainer.evaluate(loader, hooks=[hooks.AccuracyHook(correct)])
    assert trainer.states["metrics"]["test"]["Accuracy"] == 1 / 5


@pytest.mark.parametrize(("options", "expected"), [({}, [0, 1, 2]), ({"test_interval": 2}, [0, 2])])
def test_the_trainer_evaluates_after_each_epoch_or_every_few(options, expected):
    hook, tested = hooks.BaseHook(priority=1), []
    hook.before_test = lambda trainer: tested.append(trainer.cur_epoch)
    with colossalai.launch_from_torch({}):
        model, loader = classifier(), get_dataloader(samples(), batch_size=40)
        engine, loader, _, _ = colossalai.initialize(model, sgd(model.parameters()), nn.CrossEntropyLoss(), loader)
        Trainer(engine).fit(loader, epochs=3, test_dataloader=loader, hooks=[hook], **options)
    assert tested == expected


def test_a_timer_gives_seconds_from_start_to_stop():
    timer = Timer()
    with mock.patch("paramp.compat.colossalai.timer.time") as clock:
        clock.perf_counter.side_effect = [2.0, 5.0, 7.0, 8.0]
        for expected in (3.0, 1.0):
            timer.start()
            assert timer.stop(keep_in_history=True) == timer.get_elapsed_time() == expected
    assert (timer.get_history_sum(), timer.get_history_mean()) == (4.0, 2.0)


@pytest.mark.parametrize("axis", ["data", "tensor", "pipeline"])
@on_ranks(2)
def test_ranks_know_their_places(world, axis):
    with colossalai.launch_from_torch(config={"parallel": {axis: 2}}, verbose=False):
        first, last = world.rank == 0, world.rank == 1
        assert is_dp_rank_0() is (first or axis != "data")
        assert is_tp_rank_0() is (first or axis != "tensor")
        assert is_no_pp_or_last_stage() is (last or axis != "pipeline")
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            print_rank_0("once")
        assert printed.getvalue() == ("once\n" if first else "")


def test_loggers_of_others_are_quiet(monkeypatch):
    monkeypatch.setattr(logging.root.manager, "loggerDict", {})
    loggers = [logging.getLogger(name) for name in ("paramp", "other", "third")]
    disable_existing_loggers(include=["other"])
    assert [one.level for one in loggers] == [logging.NOTSET, logging.WARNING, logging.NOTSET]
    disable_existing_loggers()
    assert [one.level for one in loggers] == [logging.NOTSET, logging.WARNING, logging.WARNING]
