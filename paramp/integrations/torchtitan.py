"""torchtitan in fp16: ``paramp.integrations.torchtitan.adopt(config)`` of any ``Trainer.Config`` of torchtitan's.

torchtitan trains in bf16 or fp32. It has no loss scaling, and its clip sees the gradients of one mesh at a time.
:class:`ParampTrainer` is its ``Trainer`` with four changes, each of which goes through what torchtitan calls itself:

- ``fully_shard`` computes in the configured precision (torchtitan installs its policy in every layout).
- The gradient of the loss is scaled where it enters the model; the loss that is logged stays as it is. This holds for
  the chunked loss, whose backward runs inside its forward, and for pipelines, which call the loss themselves.
- A step unscales, agrees over the world whether a gradient overflowed, clips by the norm of the whole model, and steps
  the optimizers and the schedule on every rank or on none.
- Checkpoints hold the scaler's state under ``loss_scaler``, and the metrics the scale and the number of skipped steps.

Importing this module imports torchtitan, which takes some seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal, get_args

import torch

from ..base.errors import ConfigError
from ..distributed.context import ParallelContext
from ..optim.grad_norm import clip_grad_norm_
from ..optim.loss_scaler import DistributedGradScaler
from ..precision.policy import LossScaling

try:
    from torchtitan.components.loss import BaseLoss, ChunkedLossWrapper  # type: ignore[import-not-found]
    from torchtitan.distributed import utils as dist_utils  # type: ignore[import-not-found]
    from torchtitan.trainer import Trainer  # type: ignore[import-not-found]
except ImportError as error:
    raise ConfigError(
        f'paramp.integrations.torchtitan: torchtitan cannot be imported ({error}); run pip install "paramp[torchtitan]"'
    ) from error

Name = Literal["float16", "bfloat16", "float32"]

MESHES = (
    ("pp", "dp_replicate", "fsdp", "tp"),
    ("pp", "dp_replicate", "dp_shard", "cp", "tp"),
)
"""The axes over which torchtitan lays parameters: with its backend ``partial_dtensor``, and with the others."""


class ScaledLoss(BaseLoss):  # type: ignore[misc]  # untyped base
    """A loss of torchtitan's whose gradient is multiplied by the loss scale; its value is not."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseLoss.Config):  # type: ignore[misc]
        """The configuration of the loss."""

        loss_fn: Any
        """The ``Config`` of the loss that is computed."""

    def __init__(self, config: Any, *, compile_config: Any = None) -> None:
        self.loss_fn = config.loss_fn.build(compile_config=compile_config)
        self.scaler: DistributedGradScaler | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The loss, 0-dim float32, and its metrics."""
        loss, metrics = self.loss_fn(*args, **kwargs)
        if loss.requires_grad:
            loss.register_hook(self._scale)
        return loss, metrics

    def _scale(self, gradient: torch.Tensor) -> torch.Tensor:
        assert self.scaler is not None
        return gradient * self.scaler.scale_tensor()


class ParampTrainer(Trainer):  # type: ignore[misc]  # untyped base
    """torchtitan's ``Trainer`` with a loss scale, skipped steps and clipping that all ranks agree on.

    Make its ``Config`` with :func:`adopt`. A subclass of ``Trainer`` gets the same with
    ``class Mine(ParampTrainer, Theirs)`` and a ``Config`` of theirs with the two fields of this one.

    Attributes:
        scaler: the :class:`~paramp.DistributedGradScaler`; its group is the world.
        num_skipped: the number of skipped steps since this process started.
        context: a :class:`~paramp.ParallelContext` over torchtitan's mesh; :meth:`close` closes it.

    Raises:
        ConfigError: the precision is unknown, or fp16 is asked for weights that are stored in bf16.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):  # type: ignore[misc]
        """torchtitan's configuration, and how to compute and scale."""

        precision: Name = "float16"
        """The dtype of ``fully_shard``'s computation, in place of ``training.mixed_precision_param``."""
        loss_scaling: LossScaling = field(default_factory=LossScaling)
        """The loss scale with ``float16``. Otherwise it is 1, and a step is skipped for a gradient that is not
        finite."""

    def __init__(self, config: Any) -> None:
        _check(config)
        config.training = replace(config.training, mixed_precision_param=config.precision)
        config.loss = _scaled(config.loss)
        super().__init__(config)
        scaling = config.loss_scaling if config.precision == "float16" else LossScaling.static(1.0)
        self.scaler = DistributedGradScaler(self.device, **asdict(scaling))
        loss = self.loss_fn.loss_fn if isinstance(self.loss_fn, ChunkedLossWrapper) else self.loss_fn
        loss.scaler = self.scaler
        self.context = ParallelContext.from_mesh(_mesh(self.parallel_dims))
        self.num_skipped = 0
        if config.checkpoint.enable:
            self.checkpointer.states["loss_scaler"] = self.scaler

    def train_step(self, data_iterator: Any) -> None:
        """One step of torchtitan's, on every rank or on none."""
        with ExitStack() as stack:
            for owner, name, function in (
                (dist_utils, "clip_grad_norm_", self._clip),
                (self.optimizers, "step", self._step),
                (self.lr_schedulers, "step", self._advance),
                (self.metrics_processor, "log", self._log),
            ):
                stack.enter_context(_replaced(owner, name, function))
            self._clipped = False
            super().train_step(data_iterator)

    def _clip(self, _: Any, parameters: Any, max_norm: float, *args: Any, **kwargs: Any) -> torch.Tensor:
        """For torchtitan's ``clip_grad_norm_``: unscale, agree on overflow, clip by the norm of the whole model."""
        self.scaler.unscale_(self.optimizers)  # the container has the parameters of all its optimizers
        self._clipped = True
        return clip_grad_norm_(parameters, max_norm, context=self.context)

    def _step(self, step: Callable[[], None]) -> None:
        if not self._clipped:
            raise RuntimeError(
                "torchtitan stepped its optimizers without torchtitan.distributed.utils.clip_grad_norm_, so the "
                "gradients are still scaled; this version of torchtitan is not supported, expected one like 0.3.0"
            )
        self._stepped = not self.scaler.has_overflowed(self.optimizers)
        if self._stepped:
            step()
        self.num_skipped += not self._stepped
        self.scaler.update()

    def _advance(self, step: Callable[[], None]) -> None:
        """For the schedule's ``step``: not after a skipped step, as in :class:`paramp.Engine`."""
        if self._stepped:
            step()

    def _log(self, log: Callable[..., None], *args: Any, extra_metrics: Any = None, **kwargs: Any) -> None:
        ours = {"loss_scale": self.scaler.get_scale(), "skipped_steps": self.num_skipped}
        log(*args, extra_metrics={**(extra_metrics or {}), **ours}, **kwargs)

    def close(self) -> None:
        """Close the context, then what torchtitan closes."""
        if hasattr(self, "context"):
            self.context.close()
        super().close()


def adopt(
    config: Any, *, precision: Name = "float16", loss_scaling: LossScaling | None = None
) -> ParampTrainer.Config:
    """The configuration of a :class:`ParampTrainer`, from one of torchtitan's ``Trainer``.

    ``config.build()`` then makes the trainer, and torchtitan's command line takes it from a config registry.

    Args:
        config: a ``Trainer.Config``, such as ``llama3_debugmodel()`` returns. Its components are shared.
        precision: the dtype of computation. Weights, gradients and optimizers stay in ``training.dtype``.
        loss_scaling: None: the defaults of :class:`LossScaling`.

    Raises:
        ConfigError: ``config`` is of another trainer, or ``precision`` does not fit it.
    """
    if type(config) is not Trainer.Config:
        raise ConfigError(
            f"config: got {type(config).__qualname__}, expected torchtitan's Trainer.Config; for another trainer "
            "derive a class from ParampTrainer and it"
        )
    values = {one.name: getattr(config, one.name) for one in fields(config) if one.init}
    adopted = ParampTrainer.Config(**values, precision=precision, loss_scaling=loss_scaling or LossScaling())
    _check(adopted)
    return adopted


def _check(config: Any) -> None:
    if config.precision not in get_args(Name):
        raise ConfigError(f"precision: got {config.precision!r}, expected one of {', '.join(get_args(Name))}")
    if config.precision == "float16" and config.training.dtype != "float32":
        raise ConfigError(
            f"training.dtype: got {config.training.dtype!r} with precision 'float16', expected 'float32': small "
            "updates of half-precision weights are lost"
        )


def _scaled(config: Any) -> Any:
    """The configuration of the loss with a :class:`ScaledLoss` in it, where its gradient enters the model."""
    if isinstance(config, ChunkedLossWrapper.Config):
        return replace(config, loss_fn=_scaled(config.loss_fn))
    return config if isinstance(config, ScaledLoss.Config) else ScaledLoss.Config(loss_fn=config)


def _mesh(parallel_dims: Any) -> Any:
    """torchtitan's mesh of all ranks, with the axes over which parameters lie, those of size 1 included."""
    names = MESHES[parallel_dims.spmd_backend != "partial_dtensor"]
    return parallel_dims.get_optional_mesh(list(names), include_singleton_axes=True)


@contextmanager
def _replaced(owner: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Let ``owner.name(...)`` call ``function(what it was, ...)``, for one step of torchtitan's."""
    own = name in vars(owner)
    before = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: function(before, *args, **kwargs))
    try:
        yield
    finally:
        setattr(owner, name, before) if own else delattr(owner, name)
