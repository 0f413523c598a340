"""paramp inside Hugging Face's ``Trainer``: ``ParampTrainer(model, TrainingArguments(..., fp16=True), ...)``.

The trainer's loop stays; its accelerator is adopted (:func:`~paramp.integrations.accelerate.adopt`):

- ``fp16=True`` works on CPUs, where ``Trainer`` ignores it without a word, and with tensor parallelism. All ranks share
  one :class:`~paramp.DistributedGradScaler`, and in every precision a gradient that is not finite on some rank skips
  the step on every rank. The learning rate's schedule does not advance then.
- ``max_grad_norm`` clips by the norm of the whole model, of unscaled gradients, for any mix of plain tensors and
  DTensors. ``Trainer`` has its own clipping for several meshes, which takes the scaled gradients.
- ``fsdp=True`` and tensor parallelism work on CPUs too.
- The logs of training have two more entries, ``loss_scale`` and ``skipped_steps``. Checkpoints hold both.

:class:`ParampTrainerMixin` does the same for a subclass of ``Trainer``, such as TRL's:
``class T(ParampTrainerMixin, SFTTrainer)``. transformers is imported when :class:`ParampTrainer` is first asked for.
"""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..base.errors import ConfigError
from .accelerate import adopt

log = logging.getLogger(__name__)
SKIPPED_STEPS = "skipped_steps.txt"
"""The file in a checkpoint that holds the number of skipped steps."""
HOOKS = (
    *("create_accelerator_and_postprocess", "_build_accelerator_args", "_prepare_for_training"),
    *("_clip_grad_norm", "_get_grad_norm", "_save_scaler", "_load_scaler", "log"),
)
"""The methods of ``Trainer`` that the mixin overrides."""


class ParampTrainerMixin:
    """What makes a subclass of ``transformers.Trainer`` train with paramp; stands before it in the bases.

    Raises:
        ConfigError: when the class is made, if no other base has the methods of ``Trainer``; when the trainer is made,
            if its arguments ask for what steps or scales by itself (DeepSpeed, FSDP1, XLA, LOMO, layerwise optimizers),
            for ``nn.DataParallel``, or for a device other than a CPU or CUDA; when it
            trains, if trainable weights are fp16.
    """

    accelerator: Any
    args: Any
    model: Any
    _skipped_before: int = 0

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        missing = [name for name in HOOKS if not hasattr(super(ParampTrainerMixin, cls), name)]
        if missing:
            raise ConfigError(
                f"{cls.__name__}: its bases after ParampTrainerMixin lack {', '.join(missing)}; expected a subclass of "
                "transformers.Trainer, of a version that this one of paramp supports (tested: 5.23)"
            )

    def create_accelerator_and_postprocess(self) -> None:
        """As ``Trainer``'s; the accelerator is adopted."""
        _check_arguments(self.args, self.model)
        if self.args.fsdp and self.args.device.type == "cpu":
            _allow_fsdp_on_cpus()
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        adopt(self.accelerator)

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        arguments: dict[str, Any] = super()._build_accelerator_args(**kwargs)  # type: ignore[misc]
        layout = arguments.get("parallelism_config")
        loaded_sharded = getattr(self.model, "is_distributed_loading_by_transformers", False)
        if layout is not None and loaded_sharded and self.args.device.type == "cpu":
            layout._validate_accelerator = functools.partial(_check_size, layout)
        return arguments

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        _check_weights(self.model, self.args)
        return super()._prepare_for_training(*args, **kwargs)  # type: ignore[misc]

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
        norm: torch.Tensor = self.accelerator.clip_grad_norm_(model.parameters(), self.args.max_grad_norm)
        return norm

    def _get_grad_norm(self, model: nn.Module, grad_norm: torch.Tensor | None = None) -> torch.Tensor:
        if grad_norm is not None:
            return grad_norm
        norm: torch.Tensor = self.accelerator.clip_grad_norm_(model.parameters(), float("inf"))
        return norm

    @property
    def skipped_steps(self) -> int:
        """The number of steps that were skipped because a gradient was not finite, also before a resumed checkpoint."""
        return self._skipped_before + int(self.accelerator.num_skipped)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As ``Trainer``'s; the logs of training steps also get ``loss_scale`` and ``skipped_steps``."""
        if "loss" in logs:
            logs |= {"loss_scale": self.accelerator.loss_scale, "skipped_steps": self.skipped_steps}
        super().log(logs, start_time)  # type: ignore[misc]

    def _save_scaler(self, output_dir: str) -> None:
        super()._save_scaler(output_dir)  # type: ignore[misc]
        if self.args.should_save:
            (Path(output_dir) / SKIPPED_STEPS).write_text(f"{self.skipped_steps}\n", encoding="utf-8")

    def _load_scaler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        if self.accelerator.scaler is not None:
            if not (Path(checkpoint) / "scaler.pt").is_file():
                log.warning(f"{checkpoint} holds no loss scale; it starts at {self.accelerator.loss_scale:g}")
            super()._load_scaler(checkpoint)  # type: ignore[misc]
        skipped = Path(checkpoint) / SKIPPED_STEPS
        if skipped.is_file():
            self._skipped_before = int(skipped.read_text(encoding="utf-8")) - int(self.accelerator.num_skipped)


ParampTrainer: Any
"""``transformers.Trainer`` with :class:`ParampTrainerMixin`."""


def __getattr__(name: str) -> Any:
    """Make :class:`ParampTrainer` when it is first asked for, because importing transformers takes seconds."""
    if name != "ParampTrainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _trainer()


@functools.cache
def _trainer() -> type[ParampTrainerMixin]:
    """The class ``ParampTrainer``; a ConfigError if transformers or accelerate is not installed."""
    try:
        from transformers import Trainer
    except ImportError as error:
        raise ConfigError(
            f'ParampTrainer: transformers cannot be imported ({error}); run pip install "paramp[transformers]"'
        ) from None
    doc = "``transformers.Trainer`` with :class:`ParampTrainerMixin`."
    return type("ParampTrainer", (ParampTrainerMixin, Trainer), {"__doc__": doc, "__module__": __name__})


def _check_arguments(arguments: Any, model: nn.Module | None) -> None:
    """Raise for what Accelerate does not show, or shows too late; ``adopt`` checks the rest."""
    device, optimizer = arguments.device.type, getattr(arguments.optim, "value", arguments.optim)
    distributed = getattr(getattr(model, "config", None), "distributed_config", None)
    fsdp = arguments.fsdp_plugin_args or {}
    for is_used, what, instead in (
        (arguments.deepspeed, "deepspeed, which scales, clips and steps by itself", "use fsdp=True or DDP"),
        (device not in ("cpu", "cuda"), f"device: got {device!r}", "use a CPU (use_cpu=True) or CUDA"),
        (fsdp.get("fsdp_version") == 1, "fsdp_config: version 1", 'pass fsdp_config={"version": 2}'),
        (
            arguments.n_gpu > 1,
            f"nn.DataParallel on {arguments.n_gpu} GPUs",
            "start one process for each GPU with torchrun, or hide all GPUs but one",
        ),
        (
            optimizer in ("lomo", "adalomo") or optimizer.endswith("layerwise"),
            f"optim={optimizer!r}, which steps during the backward, so that it cannot skip a step",
            'use another one, such as optim="adamw_torch"',
        ),
        (
            getattr(arguments.parallelism_config, "cp_size", 1) > 1,
            "parallelism_config with cp_size over 1, with which Trainer adds up losses of parts of sequences",
            "use paramp.integrations.accelerate.adopt in a loop of your own, or paramp.initialize",
        ),
        (
            getattr(distributed, "pp_size", None) not in (None, 1),
            "a model loaded with DistributedConfig(pp_size=...), whose ranks hold different layers",
            "use tp_size and fsdp_size, or paramp.initialize for a pipeline",
        ),
    ):
        if is_used:
            raise ConfigError(f"TrainingArguments: {what}; ParampTrainer does not support it; {instead}")


def _check_weights(model: nn.Module, arguments: Any) -> None:
    """Raise for trainable fp16 weights, into which the optimizer's small updates would vanish without masters."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype is torch.float16:
            cause = " (evaluate() with fp16_full_eval=True makes them so)" if arguments.fp16_full_eval else ""
            raise ConfigError(
                f"model: got fp16 weights for training, {name} for instance{cause}; expected fp32 weights, which "
                "fp16=True computes with in fp16: load the model with dtype=torch.float32"
            )


def _check_size(layout: Any, accelerator: Any) -> None:
    """What ``layout``, Accelerate's ``ParallelismConfig``, checks of a model that transformers sharded over CPUs.

    Accelerate does not accept tensor parallelism on CPUs. It only has to know the layout to distribute the data. With
    another number of processes, its own method raises.
    """
    if layout.total_size != accelerator.num_processes:
        type(layout)._validate_accelerator(layout, accelerator)


def _allow_fsdp_on_cpus() -> None:
    """Let the next accelerator use FSDP2, which Accelerate leaves out on CPUs without a word, to train with DDP."""
    from accelerate.state import PartialState  # type: ignore[import-untyped]
    from accelerate.utils import DistributedType  # type: ignore[import-untyped]

    if PartialState._shared_state.get("distributed_type") == DistributedType.MULTI_CPU:
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
