"""torchtitan in fp16: ``paramp.integrations.torchtitan.adopt(config)`` of a configuration of torchtitan's ``Trainer``.

torchtitan trains in bf16 or fp32 and has no loss scaling. :class:`ParampTrainer` is its ``Trainer`` with four changes,
each in what torchtitan itself calls:

- ``fully_shard`` computes in the configured precision (torchtitan installs its policy in every layout).
- The gradient of the loss is scaled where it enters the model; the loss that is logged is not. This holds for the
  chunked loss, whose backward runs inside its forward, and for pipelines, which call the loss themselves.
- A step unscales, agrees over the world whether a gradient overflowed, clips by the norm of the whole model, and steps
  the optimizers and the schedule on every rank or on none.
- Checkpoints hold the scaler's state under ``loss_scaler``; the metrics hold the scale and the number of skipped steps.

torchtitan is imported by :func:`adopt`, not with this module.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, field, fields, make_dataclass, replace
from typing import Any, Literal, get_args

import torch

from ..base.errors import ConfigError, require
from ..distributed.context import ParallelContext
from ..optim.grad_norm import clip_grad_norm_
from ..optim.loss_scaler import DistributedGradScaler
from ..precision.policy import LossScaling

Dtype = Literal["float16", "bfloat16", "float32"]

MESHES = (
    ("pp", "dp_replicate", "fsdp", "tp"),
    ("pp", "dp_replicate", "dp_shard", "cp", "tp"),
)
"""The axes over which torchtitan lays parameters: with its backend ``partial_dtensor``, and with the others."""


def adopt(config: Any, *, precision: Dtype = "float16", loss_scaling: LossScaling | None = None) -> Any:
    """The configuration of a :class:`ParampTrainer` from ``config``, a ``Trainer.Config`` of torchtitan.

    ``config.build()`` then makes the trainer, and torchtitan's command line takes it from a config registry. For the
    configuration of a subclass of ``Trainer``, the trainer is a subclass of that.

    Args:
        config: such as ``llama3_debugmodel()`` returns. Its components are shared with the result.
        precision: the dtype in which ``fully_shard`` computes. Weights and optimizers stay in ``training.dtype``.
        loss_scaling: used with ``float16``. In the others the scale is 1, and a step is skipped for a gradient that
            is not finite. None: the defaults of :class:`LossScaling`.

    Raises:
        ConfigError: torchtitan is not installed, ``config`` is of something else, or ``precision`` does not fit it.
    """
    trainer = _torchtitan("trainer").Trainer
    if not isinstance(config, trainer.Config) or isinstance(config, ParampTrainer.Adopted):
        raise ConfigError(f"config: got {type(config).__qualname__}, expected a Trainer.Config of torchtitan's")
    _check(precision, config)
    values = {one.name: getattr(config, one.name) for one in fields(config) if one.init}
    of: Any = type(config)
    kind = _adopted(of).Config
    return kind(**values, precision=precision, loss_scaling=loss_scaling or LossScaling())


class ParampTrainer:
    """What :func:`adopt` adds to torchtitan's ``Trainer``, whose attributes and methods it also has.

    Attributes:
        scaler: the :class:`~paramp.DistributedGradScaler`; its group is the world.
        num_skipped: the number of skipped steps since this process made the trainer.
        context: a :class:`~paramp.ParallelContext` over torchtitan's mesh; :meth:`close` closes it.
    """

    def __init__(self, config: Any) -> None:
        _check(config.precision, config)
        config.training = replace(config.training, mixed_precision_param=config.precision)
        config.loss = _with_scaled_gradient(config.loss)
        super().__init__(config)  # type: ignore[call-arg]  # torchtitan's
        host: Any = self
        scaling = config.loss_scaling if config.precision == "float16" else LossScaling.static(1.0)
        self.scaler = DistributedGradScaler(host.device, **asdict(scaling))
        loss = host.loss_fn
        (loss if isinstance(loss, ScaledLoss) else loss.loss_fn).scaler = self.scaler
        names = MESHES[host.parallel_dims.spmd_backend != "partial_dtensor"]
        mesh = host.parallel_dims.get_optional_mesh(list(names), include_singleton_axes=True)
        self.context = ParallelContext.from_mesh(mesh)
        self.num_skipped = 0
        if config.checkpoint.enable:
            host.checkpointer.states["loss_scaler"] = self.scaler

    def train_step(self, data_iterator: Any) -> None:
        """One step of torchtitan's, on every rank or on none."""
        host: Any = self
        self._clipped = False
        with ExitStack() as stack:
            for owner, name, function in (
                (_torchtitan("distributed.utils"), "clip_grad_norm_", self._clip),
                (host.optimizers, "step", self._step),
                (host.lr_schedulers, "step", self._advance),
                (host.metrics_processor, "log", self._log),
            ):
                stack.enter_context(_replaced(owner, name, function))
            super().train_step(data_iterator)  # type: ignore[misc]  # torchtitan's

    def _clip(self, _: Any, parameters: Any, max_norm: float, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Unscale, agree on overflow, and clip by the norm of the whole model."""
        host: Any = self
        self.scaler.unscale_(host.optimizers)  # the container has the parameters of all its optimizers
        self._clipped = True
        return clip_grad_norm_(parameters, max_norm, context=self.context)

    def _step(self, step: Callable[[], None]) -> None:
        host: Any = self
        if not self._clipped:
            raise RuntimeError(
                "torchtitan stepped its optimizers and did not call torchtitan.distributed.utils.clip_grad_norm_, so "
                "the gradients are still scaled; this version of torchtitan is not supported, expected one like 0.3.0"
            )
        self._stepped = not self.scaler.has_overflowed(host.optimizers)
        if self._stepped:
            step()
        self.num_skipped += not self._stepped
        self.scaler.update()

    def _advance(self, step: Callable[[], None]) -> None:
        if self._stepped:  # a schedule does not advance after a skipped step, as in paramp.Engine
            step()

    def _log(self, log: Callable[..., None], *args: Any, extra_metrics: Any = None, **kwargs: Any) -> None:
        ours = {"loss_scale": self.scaler.get_scale(), "skipped_steps": self.num_skipped}
        log(*args, extra_metrics={**(extra_metrics or {}), **ours}, **kwargs)

    def close(self) -> None:
        """Close the context, then what torchtitan closes."""
        if hasattr(self, "context"):
            self.context.close()
        super().close()  # type: ignore[misc]  # torchtitan's

    class Adopted:
        """Marks the configurations that :func:`adopt` returns."""

        __slots__ = ()


class ScaledLoss:
    """A loss of torchtitan's whose gradient is multiplied by the loss scale; its value is not."""

    scaler: DistributedGradScaler

    def __init__(self, config: Any, **options: Any) -> None:
        self.loss_fn = config.loss_fn.build(**options)

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The loss, 0-dim float32, and its metrics."""
        loss, metrics = self.loss_fn(*args, **kwargs)
        if loss.requires_grad:
            loss.register_hook(lambda gradient: gradient * self.scaler.scale_tensor())
        return loss, metrics


def _torchtitan(name: str) -> Any:
    """The module ``torchtitan.{name}``."""
    try:
        return importlib.import_module(f"torchtitan.{name}")
    except ImportError as error:
        raise ConfigError(
            f'adopt: torchtitan cannot be imported ({error}); run pip install "paramp[torchtitan]"'
        ) from error


@functools.cache
def _adopted(config: type) -> Any:
    """The subclass of the trainer of ``config``; its ``Config`` has two fields more."""
    trainer: type = config._owner  # type: ignore[attr-defined]
    added = [("precision", Dtype, "float16"), ("loss_scaling", LossScaling, field(default_factory=LossScaling))]
    bases = (config, ParampTrainer.Adopted)
    made = make_dataclass("Config", added, bases=bases, kw_only=True, slots=True)
    return type(
        f"Paramp{trainer.__name__}", (ParampTrainer, trainer), {"Config": made}
    )  # this registers it for build()


@functools.cache
def _scaled_loss() -> Any:
    """:class:`ScaledLoss` as one of torchtitan's losses."""
    base = _torchtitan("components.loss").BaseLoss
    made = make_dataclass("Config", [("loss_fn", Any)], bases=(base.Config,), kw_only=True, slots=True)
    return type("ScaledLoss", (ScaledLoss, base), {"Config": made})


def _with_scaled_gradient(config: Any) -> Any:
    """The configuration of a loss with a :class:`ScaledLoss` in it, where its gradient enters the model."""
    if isinstance(config, _torchtitan("components.loss").ChunkedLossWrapper.Config):
        return replace(config, loss_fn=_with_scaled_gradient(config.loss_fn))
    return _scaled_loss().Config(loss_fn=config)


def _check(precision: str, config: Any) -> None:
    require(precision in get_args(Dtype), "precision", precision, f"one of {', '.join(get_args(Dtype))}")
    if precision == "float16" and config.training.dtype != "float32":
        raise ConfigError(
            f"training.dtype: got {config.training.dtype!r} with precision 'float16', expected 'float32', because "
            "small updates of half-precision weights are lost"
        )


@contextmanager
def _replaced(owner: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Let ``owner.name(...)`` call ``function(what it was, ...)``."""
    own = name in vars(owner)
    before = getattr(owner, name)
    setattr(owner, name, functools.partial(function, before))
    try:
        yield
    finally:
        if own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)
