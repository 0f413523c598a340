"""The loop over epochs: ``Trainer(engine).fit(loader, epochs=3, hooks=[hooks.LossHook()])``."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from ....base.errors import ConfigError
from ....base.trees import map_tensors, tensors
from ....data.dataloader import evaluation_pass, num_repeated
from ....data.loader_position import WithPosition
from ....engine.engine import Engine
from ....engine.evaluation import evaluation_mode
from ..logging import DistributedLogger
from ..timer import MultiTimer
from .hooks import BaseHook


class Trainer:
    """A loop over epochs and batches that calls hooks. Every rank runs it.

    Args:
        engine: from ``initialize``.
        timer: measures ``Train-step``, ``Train-epoch``, ``Test-step`` and ``Test-epoch``.
        logger: writes which hooks are used, and why training ends early.

    Attributes:
        engine: the engine.
        hooks: those of the current run, in the order of their priority.
        states: values that hooks leave for each other; ``states["metrics"]["train"]["Loss"]`` is a number, equal on all
            ranks, from the end of an epoch on.
        cur_epoch: the epoch, from 0; set it to go on after a resume.
        cur_step: the training batches so far, those of the current step not included.
        steps_per_epoch, max_epochs, max_steps: of the current ``fit``.
        epoch_is_complete: False if ``max_steps`` has ended the epoch early, and a run that resumes finishes it.
    """

    def __init__(
        self, engine: Engine, timer: MultiTimer | None = None, logger: DistributedLogger | None = None
    ) -> None:
        self.engine = engine
        self.timer = timer or MultiTimer(on=False)
        self.hooks: list[BaseHook] = []
        self.states: dict[str, Any] = {}
        self.cur_epoch = self.cur_step = self.steps_per_epoch = self.max_epochs = 0
        self.max_steps: int | None = None
        self._train_loader: Any = None
        self._rest: Any = None  # of an epoch that max_steps has ended early: its iterator, and cur_epoch after it
        self._is_fitting = False
        self._logger = logger

    @property
    def epoch_is_complete(self) -> bool:
        loader = self._train_loader
        return not (isinstance(loader, WithPosition) and 0 < loader.position.given < self.steps_per_epoch)

    def fit(
        self,
        train_dataloader: Any,
        epochs: int,
        max_steps: int | None = None,
        test_dataloader: Any | None = None,
        test_interval: int = 1,
        hooks: Sequence[BaseHook] | None = None,
        display_progress: bool = False,
        return_output_label: bool = True,
    ) -> None:
        """Train until ``epochs`` epochs are complete, those of an earlier ``fit`` or of a resumed run included.

        Args:
            train_dataloader, test_dataloader: of pairs ``(data, label)``, with a length, from ``initialize``.
            max_steps: the number of batches after which training ends.
            test_interval: the test data are evaluated after each epoch whose number is a multiple of it.
            display_progress: the main rank shows the batch on its terminal, if stderr is one.
            return_output_label: hooks get the output and the label, on the last pipeline stage.

        Raises:
            ConfigError: a hook is no :class:`~paramp.compat.colossalai.trainer.hooks.BaseHook`.
        """
        self.steps_per_epoch, self.max_epochs, self.max_steps = len(train_dataloader), epochs, max_steps
        self._train_loader = train_dataloader
        self._go_back()
        self._attach(hooks)
        self._is_fitting = True
        try:
            self._call("before_train")
            self.cur_step = self._first_step()
            if _given_before(train_dataloader) >= self.steps_per_epoch:  # a checkpoint before the end of an epoch
                next(iter(train_dataloader), None)
            while self.cur_epoch < epochs and not self._is_over():
                self._run(train_dataloader, "train", display_progress, return_output_label)
                if test_dataloader is not None and self.cur_epoch % test_interval == 0:
                    self._test(test_dataloader, display_progress, return_output_label)
                self.cur_epoch += 1
            if self._is_over() and self._logger is not None:
                self._logger.info(f"training ends after max_steps = {max_steps} batches", ranks=[0])
            self._call("after_train")
        finally:
            self._is_fitting = False

    def evaluate(
        self,
        test_dataloader: Any,
        hooks: Sequence[BaseHook] | None = None,
        display_progress: bool = False,
        return_output_label: bool = True,
    ) -> None:
        """Evaluate the data of ``test_dataloader``; the arguments are those of :meth:`fit`.

        A hook of ``fit`` may call it. Training then goes on as before, and the metrics are among its ``states``.
        """
        with self._aside():
            self._attach(hooks)
            self._test(test_dataloader, display_progress, return_output_label)

    def predict(self, data: Any) -> Any:
        """The model's output for ``data`` in evaluation mode, without gradients; None but on the last stage."""
        with self._aside():
            self.engine.eval()
            return self.engine.execute_schedule(iter([(data, data)]), forward_only=True, return_loss=False)[0]

    def _go_back(self) -> None:
        """Let this ``fit`` begin with the rest of the epoch that ``max_steps`` of the one before has ended early."""
        rest, self._rest, loader = self._rest, None, self._train_loader
        if isinstance(loader, WithPosition) and rest == (loader.position.iterator, self.cur_epoch):
            loader.load_state_dict(loader.state_dict())
            self.cur_epoch -= 1

    def _epochs_to_come(self) -> Iterator[tuple[int, int]]:
        """In ``before_train``, each epoch of this ``fit``, and how many batches it trains on up to the epoch's end."""
        last = math.inf if self.max_steps is None else self.max_steps - self._first_step()
        trained = 0
        for number, epoch in enumerate(range(self.cur_epoch, self.max_epochs), start=1):
            if trained >= last:
                return
            trained = int(min(number * self.steps_per_epoch - self._given(), last))
            yield epoch, trained

    def _given(self) -> int:
        """The batches of the first epoch of a ``fit`` that an earlier run has trained on."""
        given = _given_before(self._train_loader)
        return given if given < self.steps_per_epoch else 0  # those of the epoch before, which has only to be ended

    def _first_step(self) -> int:
        """:attr:`cur_step` at the start of a ``fit``."""
        return max(self.cur_step, self.cur_epoch * self.steps_per_epoch + self._given())

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """In a hook of ``fit``, a context that leaves the hooks and the modes of the modules as they were."""
        if not self._is_fitting:
            yield
            return
        hooks = self.hooks
        with evaluation_mode(self.engine.module):
            try:
                yield
            finally:
                self.hooks = hooks

    def _attach(self, hooks: Sequence[BaseHook] | None) -> None:
        for hook in hooks or ():
            if not isinstance(hook, BaseHook):
                raise ConfigError(f"hooks: got {hook!r}, expected objects of subclasses of trainer.hooks.BaseHook")
        self.hooks = sorted(hooks or (), key=lambda hook: hook.priority)
        if not self._is_fitting:
            self.states = {"metrics": {"train": {}, "test": {}}}
        if self._logger is not None and self.hooks:
            names = ", ".join(type(hook).__name__ for hook in self.hooks)
            self._logger.info(f"hooks, in the order of their calls: {names}", ranks=[0])
        self._call("after_hook_is_attached")

    def _test(self, loader: Any, display_progress: bool, return_output_label: bool) -> None:
        self._call("before_test")
        with torch.no_grad():
            self._run(loader, "test", display_progress, return_output_label)
        self._call("after_test")

    def _run(self, loader: Any, phase: str, display_progress: bool, return_output_label: bool) -> None:
        """One epoch of ``phase``, ``train`` or ``test``."""
        training, name = phase == "train", phase.capitalize()
        shows = display_progress and self.engine.context.is_main and sys.stderr.isatty()
        self.engine.train(training)
        self._call(f"before_{phase}_epoch")
        self.timer.start(f"{name}-epoch")
        with nullcontext() if training else evaluation_pass(repeats=True):
            first, count = (_given_before(loader) if training else 0) + 1, len(loader)
            batches = iter(loader)
            for number in range(first, count + 1):
                self._call(f"before_{phase}_iter")
                self.timer.start(f"{name}-step")
                output, label, loss = self._step(batches, training, return_output_label)
                self.timer.stop(f"{name}-step", keep_in_history=True)
                if not training and number == count:
                    output, label = _without_repeats(output, label, num_repeated(loader))
                self._call(f"after_{phase}_iter", output, label, loss)
                self.cur_step += training
                if shows:
                    self._show(f"[Epoch {self.cur_epoch} / {name}] {number}/{count}", last=number == count)
                if training and self._is_over() and number < count:
                    self._rest = batches, self.cur_epoch + 1
                    break
            else:
                next(batches, None)  # its end, so that a checkpoint does not resume in this epoch
        self.timer.stop(f"{name}-epoch", keep_in_history=True)
        self._call(f"after_{phase}_epoch")

    def _step(self, batches: Any, training: bool, return_output_label: bool) -> Any:
        if training:
            self.engine.zero_grad()
        results = self.engine.execute_schedule(
            batches, forward_only=not training, return_output_label=return_output_label
        )
        if training:
            self.engine.step()
        return results

    def _show(self, text: str, *, last: bool) -> None:
        values = "".join(f", {name} {value}" for name, value in self.states.get("step_metrics", {}).items())
        print(f"\r{text}{values}", end="\n" if last else "", file=sys.stderr, flush=True)

    def _is_over(self) -> bool:
        return self.max_steps is not None and self.cur_step >= self.max_steps

    def _call(self, moment: str, *results: Any) -> None:
        for hook in self.hooks:
            getattr(hook, moment)(self, *results)


def _without_repeats(output: Any, label: Any, repeated: float) -> tuple[Any, Any]:
    """``output`` and ``label`` of a batch without its last samples, which are there twice."""
    size = next((len(one) for one in tensors((label, output)) if one.ndim), 0)
    if not size or not repeated:
        return output, label
    kept = int(max(size - repeated, 0))

    def rows(tensor: torch.Tensor) -> torch.Tensor:
        """Those of the samples that stay; a sample may have several, such as its tokens."""
        if not tensor.ndim or len(tensor) % size:
            return tensor
        return tensor[: len(tensor) // size * kept]

    return map_tensors(rows, output), map_tensors(rows, label)


def _given_before(loader: Any) -> int:
    """How many batches of its epoch the next iteration leaves out, because a checkpoint was loaded."""
    return loader.position.skip if isinstance(loader, WithPosition) else 0
