"""Colossal-AI's hooks of the :class:`~paramp.compat.colossalai.trainer.Trainer`.

Metrics are numbers that are equal on all ranks, so each of these hooks may log on the main rank.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LRScheduler

from ....base.errors import ConfigError
from ....base.trees import tensors
from ....base.values_checked_by_type import user_path
from ...missing import missing
from ..context import ParallelMode
from ..core import global_context
from ..logging import DistributedLogger, get_dist_logger
from ..nn.metric import Accuracy
from ..timer import MultiTimer

if TYPE_CHECKING:
    from ....engine.lr_scheduler import Scheduler

__all__ = [
    "AccuracyHook",
    "BaseHook",
    "LRSchedulerHook",
    "LoadCheckpointHook",
    "LogMemoryByEpochHook",
    "LogMetricByEpochHook",
    "LogMetricByStepHook",
    "LogTimingByEpochHook",
    "LossHook",
    "SaveCheckpointHook",
    "TensorboardHook",
]


class BaseHook:
    """A hook that does nothing. Those with a smaller ``priority`` are called first.

    ``trainer`` is the :class:`~paramp.compat.colossalai.trainer.Trainer` with ``engine``, ``states``, ``cur_epoch`` and
    ``cur_step``.
    ``output`` and ``label`` are those of ``engine.execute_schedule``: None but on the last pipeline stage. Of test data
    they lack the samples that were repeated to fill the last batch, and are empty if these are all of it.
    """

    def __init__(self, priority: int) -> None:
        self.priority = priority

    def after_hook_is_attached(self, trainer: Any) -> None: ...
    def before_train(self, trainer: Any) -> None: ...
    def after_train(self, trainer: Any) -> None: ...
    def before_train_epoch(self, trainer: Any) -> None: ...
    def after_train_epoch(self, trainer: Any) -> None: ...
    def before_train_iter(self, trainer: Any) -> None: ...
    def after_train_iter(self, trainer: Any, output: Any, label: Any, loss: Any) -> None: ...
    def before_test(self, trainer: Any) -> None: ...
    def after_test(self, trainer: Any) -> None: ...
    def before_test_epoch(self, trainer: Any) -> None: ...
    def after_test_epoch(self, trainer: Any) -> None: ...
    def before_test_iter(self, trainer: Any) -> None: ...
    def after_test_iter(self, trainer: Any, output: Any, label: Any, loss: Any) -> None: ...


class _EpochHook(BaseHook):
    """Does the same after epochs of training and of test data."""

    def end_epoch(self, trainer: Any, phase: str) -> None:
        """Called after an epoch of ``phase``, ``train`` or ``test``."""

    def after_train_epoch(self, trainer: Any) -> None:
        self.end_epoch(trainer, "train")

    def after_test_epoch(self, trainer: Any) -> None:
        self.end_epoch(trainer, "test")


class LossHook(_EpochHook):
    """The metric ``Loss``: the mean over the batches of an epoch, of training and of test data.

    With ``gradient_accumulation`` it is the mean over the windows that end in the epoch. Samples that are repeated to
    fill the last test batch count too; ``engine.evaluate(loader)`` counts each once.
    """

    def __init__(self, priority: int = 0) -> None:
        super().__init__(priority)
        self._losses: dict[str, list[torch.Tensor]] = {}

    def before_train_epoch(self, trainer: Any) -> None:
        self._losses["train"] = []

    def before_test_epoch(self, trainer: Any) -> None:
        self._losses["test"] = []

    def after_train_iter(self, trainer: Any, output: Any, label: Any, loss: Any) -> None:
        if not trainer.engine._window.is_open:
            self._losses["train"].append(loss)  # of the whole window

    def after_test_iter(self, trainer: Any, output: Any, label: Any, loss: Any) -> None:
        self._losses["test"].append(loss)

    def end_epoch(self, trainer: Any, phase: str) -> None:
        losses = self._losses[phase]
        trainer.states["metrics"][phase]["Loss"] = float(torch.stack(losses).mean()) if losses else float("nan")


class AccuracyHook(BaseHook):
    """The metric ``Accuracy`` of test data: the correct part of the samples of all data ranks.

    Args:
        accuracy_func: the number of correct samples of a batch, from output and label; or
            :class:`~paramp.compat.colossalai.nn.metric.Accuracy`, which counts the label's elements, such as tokens.

    Raises:
        ConfigError: after a batch: its label has no tensor with the samples in dim 0.
    """

    def __init__(self, accuracy_func: Callable[[Any, Any], Any], priority: int = 0) -> None:
        super().__init__(priority)
        self.accuracy_func = accuracy_func

    def before_test_epoch(self, trainer: Any) -> None:
        self._counts = [0.0, 0.0]  # correct, all

    def after_test_iter(self, trainer: Any, output: Any, label: Any, loss: Any) -> None:
        if output is not None and trainer.engine.context.tensor_axis.rank == 0:  # once for each data rank
            self._counts[0] += float(self.accuracy_func(output, label))
            self._counts[1] += label.numel() if isinstance(self.accuracy_func, Accuracy) else _num_samples(label)

    def after_test_epoch(self, trainer: Any) -> None:
        counts = torch.tensor(self._counts, dtype=torch.float64, device=trainer.engine.context.device)
        dist.all_reduce(counts)
        correct, count = counts.tolist()
        trainer.states["metrics"]["test"]["Accuracy"] = correct / count if count else float("nan")


def _num_samples(label: Any) -> int:
    for tensor in tensors(label):
        if tensor.ndim:
            return len(tensor)
    raise ConfigError(
        f"AccuracyHook: got the label {type(label).__name__} without a tensor that has dims, expected the samples in "
        "dim 0 of one; write a subclass of BaseHook for other labels"
    )


class LRSchedulerHook(BaseHook):
    """Advances a learning-rate scheduler after each complete epoch, or after each batch; the metric ``LR``."""

    def __init__(
        self, lr_scheduler: LRScheduler | Scheduler, by_epoch: bool, store_lr_in_state: bool = True, priority: int = 1
    ) -> None:
        super().__init__(priority)
        self.lr_scheduler = lr_scheduler
        self.by_epoch = by_epoch
        self.store_lr_in_state = store_lr_in_state

    def after_hook_is_attached(self, trainer: Any) -> None:
        of_schedulers = (one for one in trainer.hooks if isinstance(one, LRSchedulerHook))
        ours = [one for one in of_schedulers if isinstance(one.lr_scheduler, LRScheduler)]
        if self in ours:  # not one of initialize's, which the engine tracks already
            number = f"_{ours.index(self)}" if ours.index(self) else ""
            name = f"trainer_lr_scheduler{number}"
            trainer.engine.track(name, self.lr_scheduler, replace=True)  # that of an earlier fit

    def after_train_epoch(self, trainer: Any) -> None:
        if self.store_lr_in_state:
            trainer.states["metrics"]["train"]["LR"] = self.lr_scheduler.get_last_lr()[0]
        if self.by_epoch and trainer.epoch_is_complete:
            self.lr_scheduler.step()

    def after_train_iter(self, trainer: Any, output: Any, label: Any, loss: Any) -> None:
        if not self.by_epoch:
            self.lr_scheduler.step()


class _LogHook(_EpochHook):
    """Writes after every ``interval``-th epoch, on the main rank."""

    def __init__(self, logger: DistributedLogger, interval: int = 1, priority: int = 10) -> None:
        super().__init__(priority)
        self.logger = logger
        self.interval = interval

    def text(self, trainer: Any, phase: str) -> str:
        """What to write after an epoch of ``phase``, ``train`` or ``test``; "" for nothing."""
        raise NotImplementedError

    def end_epoch(self, trainer: Any, phase: str) -> None:
        text = self.text(trainer, phase) if trainer.cur_epoch % self.interval == 0 else ""
        if text:
            self.logger.info(f"[Epoch {trainer.cur_epoch} / {phase.capitalize()}]: {text}", ranks=[0])


class LogMetricByEpochHook(_LogHook):
    """Writes the metrics of an epoch."""

    def text(self, trainer: Any, phase: str) -> str:
        return " | ".join(f"{name} = {value:.5g}" for name, value in trainer.states["metrics"][phase].items())


class LogTimingByEpochHook(_LogHook):
    """Writes the times of the trainer's ``timer``.

    Args:
        log_eval: also of test data.
        ignore_num_train_steps: the first steps, which are slower, to leave out of the mean.
    """

    def __init__(
        self,
        timer: MultiTimer,
        logger: DistributedLogger,
        interval: int = 1,
        priority: int = 10,
        log_eval: bool = True,
        ignore_num_train_steps: int = 0,
    ) -> None:
        super().__init__(logger, interval, priority)
        self.timer = timer
        self.log_eval = log_eval
        self.ignored = ignore_num_train_steps

    def text(self, trainer: Any, phase: str) -> str:
        if phase == "test" and not self.log_eval:
            return ""
        name = phase.capitalize()
        epoch, steps = self.timer.get_timer(f"{name}-epoch"), self.timer.get_timer(f"{name}-step").history
        steps = steps[self.ignored if phase == "train" else 0 :] or steps
        mean = sum(steps) / len(steps)
        return f"{name}-epoch = {epoch.get_elapsed_time():.5g} s | {name}-step, mean = {mean:.5g} s"


class LogMemoryByEpochHook(_LogHook):
    """Writes the peak of the GPU memory since the last line; nothing without a GPU.

    Args:
        log_eval: also after test data.
        report_cpu: no effect.
    """

    def __init__(
        self,
        logger: DistributedLogger,
        interval: int = 1,
        priority: int = 10,
        log_eval: bool = True,
        report_cpu: bool = False,
    ) -> None:
        super().__init__(logger, interval, priority)
        self.log_eval = log_eval

    def text(self, trainer: Any, phase: str) -> str:
        device = trainer.engine.context.device
        if device.type != "cuda" or (phase == "test" and not self.log_eval):
            return ""
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return f"peak of the GPU memory = {peak / 2**20:.1f} MiB"


class LogMetricByStepHook(BaseHook):
    """Shows the loss of each batch in the progress of ``fit(display_progress=True)``."""

    def __init__(self, priority: int = 10) -> None:
        super().__init__(priority)

    def after_train_iter(self, trainer: Any, output: Any, label: Any, loss: Any) -> None:
        trainer.states["step_metrics"] = {"loss": f"{float(loss):.5g}"}

    after_test_iter = after_train_iter


class TensorboardHook(_EpochHook):
    """Writes the loss of each training batch and the metrics of each epoch for TensorBoard.

    Args:
        log_dir: the folder of the files.
        ranks: the ranks in their group of ``parallel_mode`` that write, each to a folder of its own. None: all.

    Raises:
        ConfigError: on every rank: tensorboard is not installed.
    """

    def __init__(
        self,
        log_dir: str,
        ranks: Collection[int] | None = None,
        parallel_mode: ParallelMode = ParallelMode.GLOBAL,
        priority: int = 10,
    ) -> None:
        super().__init__(priority)
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ConfigError('TensorboardHook: run pip install "paramp[tensorboard]", or leave it out') from None
        self.writer = None
        if ranks is None or global_context.get_local_rank(parallel_mode) in ranks:
            folder = user_path(log_dir) / f"rank_{global_context.get_global_rank()}"
            self.writer = SummaryWriter(str(folder))

    def after_train_iter(self, trainer: Any, output: Any, label: Any, loss: Any) -> None:
        if self.writer is not None:
            self.writer.add_scalar("Loss/train", float(loss), trainer.cur_step)

    def after_train(self, trainer: Any) -> None:
        if self.writer is not None:
            self.writer.close()

    def end_epoch(self, trainer: Any, phase: str) -> None:
        if self.writer is not None:
            for name, value in trainer.states["metrics"][phase].items():
                self.writer.add_scalar(f"{name}/{phase}/epoch", value, trainer.cur_step)


class SaveCheckpointHook(BaseHook):
    """Saves the engine after every ``interval``-th epoch, to the folder ``epoch0``, ``epoch1``, ... .

    The checkpoint includes the schedulers of each :class:`LRSchedulerHook`, which are called before.

    Raises:
        ConfigError: before training: ``gradient_accumulation`` leaves a window open at the end of an epoch to save.
    """

    def __init__(self, interval: int = 1, checkpoint_dir: str = "./ckpt", suffix: str = "", priority: int = 10) -> None:
        super().__init__(priority)
        self.interval = interval
        self.checkpoint_dir = user_path(checkpoint_dir).absolute()
        self.suffix = suffix

    def before_train(self, trainer: Any) -> None:
        window = trainer.engine.context.config.gradient_accumulation
        for epoch, batches in trainer._epochs_to_come():
            if epoch % self.interval == 0 and batches % window:
                raise ConfigError(
                    f"gradient_accumulation: got {window}, but SaveCheckpointHook saves after the {batches} batches up "
                    f"to the end of epoch {epoch}, inside of a step; choose a divisor of {batches}, other batches of "
                    "the loader or another max_steps"
                )

    def after_train_epoch(self, trainer: Any) -> None:
        if trainer.cur_epoch % self.interval == 0:
            trainer.engine.save(self.checkpoint_dir / f"epoch{trainer.cur_epoch}{self.suffix}")


class LoadCheckpointHook(BaseHook):
    """Loads what :class:`SaveCheckpointHook` saved, before training; ``fit`` then continues after that epoch.

    It first finishes an epoch that ``max_steps`` had ended early, if the loader has a position (``initialize``).

    Args:
        epoch: -1: the latest.
        finetune: load the weights only, and begin with epoch 0.
        strict: no effect: the checkpoint has to be of the same model.

    Raises:
        FileNotFoundError: there is no such checkpoint.
    """

    def __init__(
        self,
        checkpoint_dir: str = "./ckpt",
        epoch: int = -1,
        finetune: bool = False,
        strict: bool = False,
        suffix: str = "",
        priority: int = 0,
    ) -> None:
        super().__init__(priority)
        self.checkpoint_dir = user_path(checkpoint_dir).absolute()
        self.epoch = epoch
        self.finetune = finetune
        self.suffix = suffix

    def before_train(self, trainer: Any) -> None:
        pattern = re.compile(r"epoch(\d+)" + re.escape(self.suffix))
        found = (pattern.fullmatch(path.name) for path in self.checkpoint_dir.glob("epoch*"))
        epochs = {int(match.group(1)) for match in found if match}
        epoch = max(epochs, default=-1) if self.epoch == -1 else self.epoch
        if epoch not in epochs:
            wanted = "epoch*" if self.epoch == -1 else f"epoch{epoch}"
            raise FileNotFoundError(f"checkpoint_dir: no folder {self.checkpoint_dir / (wanted + self.suffix)}")
        trainer.engine.load(self.checkpoint_dir / f"epoch{epoch}{self.suffix}", weights_only=self.finetune)
        if self.finetune:
            trainer.cur_epoch = 0
        else:
            trainer.cur_epoch = epoch + 1 if trainer.epoch_is_complete else epoch
        get_dist_logger().info(f"epoch {epoch} is loaded from {self.checkpoint_dir}", ranks=[0])


__getattr__ = missing(
    __name__,
    {
        "MetricHook": "write a subclass of BaseHook that sets trainer.states['metrics'][phase][name] to a number",
        "ThroughputHook": "use LogTimingByEpochHook, or write a subclass of BaseHook",
    },
)
