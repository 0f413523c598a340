"""torchtitan in fp16: ``paramp.integrations.torchtitan.adopt(config)`` of a configuration of torchtitan's ``Trainer``.

torchtitan trains in bf16 or fp32 and has no loss scaling. :class:`ParampTrainer` is its ``Trainer`` with five changes,
each in what torchtitan itself calls:

- ``fully_shard`` computes in the configured precision (torchtitan installs its policy in every layout).
- The gradient of the loss is scaled where it enters the model; the loss that is logged is not. This holds for the
  chunked loss, whose backward runs inside its forward, and for pipelines, which call the loss themselves.
- A step unscales, agrees over the world whether a gradient overflowed, clips by the norm of the whole model, and steps
  the optimizers and the schedule on every rank or on none.
- ``context_parallel_degree`` cuts sequences by paramp's axis (:mod:`.torchtitan_sequences`).
- Checkpoints hold the scaler's state under ``loss_scaler``; the metrics hold the scale and the number of skipped steps.

torchtitan is imported by :func:`adopt`, not with this module.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, field, fields, make_dataclass, replace
from typing import Any, Literal, get_args

import torch

from ..base.errors import ConfigError, require
from ..distributed.context import ParallelContext
from ..scaling.grad_norm import clip_grad_norm_
from ..scaling.loss_scaler import DistributedGradScaler
from ..scaling.loss_scaling_options import LossScaling, resumed_state
from . import torchtitan_sequences as sequences

Dtype = Literal["float16", "bfloat16", "float32"]

MESHES = (
    ("pp", "dp_replicate", "fsdp", "tp"),
    ("pp", "dp_replicate", "dp_shard", "cp", "tp"),
)
"""The axes over which torchtitan lays parameters: with its backend ``partial_dtensor``, and with the others."""
WORKS_WITH = "0.3.0 and the main branch of 21 August 2026"
"""The versions of torchtitan that have all names below, with the meaning they have here."""
IN_PACKAGE = (
    *("trainer.Trainer.Config", "trainer.Trainer.train_step", "trainer.Trainer.close"),
    *("components.loss.BaseLoss.Config", "components.loss.ChunkedLossWrapper.Config.loss_fn"),
    "distributed.utils.clip_grad_norm_",
)
"""What is used of the package ``torchtitan``."""
BF16_ALONE = ("models.common.moe.GroupedExperts.Config", "models.common.attention.VarlenAttention.Config")
"""The configurations of modules whose forward casts to bf16; looked up for fp16."""
INJECTED = "models.common.aux_loss.AuxLoss.Config"
"""That of losses whose gradient torchtitan adds in the backward, as if the loss scale were 1; after 0.3.0."""
IN_CONFIG = (
    *("_owner", "build", "loss", "model_spec", "checkpoint.enable"),
    *("training.dtype", "training.mixed_precision_param", "parallelism.context_parallel_degree"),
)
"""What is used of a ``Trainer.Config``."""
IN_TRAINER = (
    *("device", "loss_fn", "checkpointer", "optimizers.step", "lr_schedulers.step", "metrics_processor.log"),
    *("parallel_dims.spmd_backend", "parallel_dims.get_optional_mesh"),
)
"""What is used of a ``Trainer``."""


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
        ConfigError: torchtitan is not installed or lacks a name that is used here, ``config`` is of something else, or
            ``precision`` does not fit it: with ``float16`` the weights are not fp32, or a module, such as torchtitan's
            routed experts, computes in bf16 whatever the precision; or ``context_parallel_degree`` is over 1 and
            something else does not fit that.
    """
    for path in IN_PACKAGE:
        _torchtitan(path)
    trainer = _torchtitan("trainer.Trainer")
    kind: Any = type(config)
    if not isinstance(config, trainer.Config) or issubclass(getattr(kind, "_owner", object), ParampTrainer):
        raise ConfigError(f"config: got {type(config).__qualname__}, expected a Trainer.Config of torchtitan's")
    _check_config(precision, config)
    values = {one.name: getattr(config, one.name) for one in fields(config) if one.init}
    return _adopted(kind).Config(**values, precision=precision, loss_scaling=loss_scaling or LossScaling())


class ParampTrainer:
    """What :func:`adopt` adds to torchtitan's ``Trainer``, whose attributes and methods it also has.

    Attributes:
        scaler: the :class:`~paramp.DistributedGradScaler`; its group is the world.
        num_skipped: the number of skipped steps since this process made the trainer.
        context: a :class:`~paramp.ParallelContext` over torchtitan's mesh; :meth:`close` closes it.
    """

    def __init__(self, config: Any) -> None:
        _check_config(config.precision, config)
        config.training = replace(config.training, mixed_precision_param=config.precision)
        config.loss = _with_scaled_gradient(config.loss)
        cuts = config.parallelism.context_parallel_degree > 1
        with sequences.building(config) if cuts else nullcontext():
            super().__init__(config)  # type: ignore[call-arg]  # torchtitan's
        trainer: Any = self
        saves = config.checkpoint.enable
        _check_names(trainer, (*IN_TRAINER, "checkpointer.states") if saves else IN_TRAINER, "Trainer")
        scaling = config.loss_scaling if config.precision == "float16" else LossScaling.static(1.0)
        self.scaler = CheckpointedScaler(trainer.device, **asdict(scaling))
        loss = trainer.loss_fn
        (loss if isinstance(loss, ScaledLoss) else loss.loss_fn).scaler = self.scaler
        names = MESHES[trainer.parallel_dims.spmd_backend != "partial_dtensor"]
        mesh = trainer.parallel_dims.get_optional_mesh(list(names), include_singleton_axes=True)
        self.context = ParallelContext.from_mesh(mesh)
        self.num_skipped = 0
        self._cut = sequences.CutBatches(trainer) if cuts else None
        if saves:
            trainer.checkpointer.states["loss_scaler"] = self.scaler

    def train_step(self, data_iterator: Any) -> None:
        """One step of torchtitan's, on every rank or on none."""
        trainer: Any = self
        self._clipped = False
        with ExitStack() as stack:
            for owner, name, function in (
                (_torchtitan("distributed.utils"), "clip_grad_norm_", self._clip),
                (trainer.optimizers, "step", self._step),
                (trainer.lr_schedulers, "step", self._advance),
                (trainer.metrics_processor, "log", self._log),
            ):
                stack.enter_context(_replaced(owner, name, function))
            if self._cut is not None:
                stack.enter_context(self._cut.running())
            super().train_step(data_iterator)  # type: ignore[misc]  # torchtitan's

    def _clip(self, _: Any, parameters: Any, max_norm: float, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Unscale, agree on overflow, and clip by the norm of the whole model.

        The norm is 0 for a step that is skipped: the main branch of torchtitan stops at one that is not finite.
        """
        trainer: Any = self
        self.scaler.unscale_(trainer.optimizers)  # the container has the parameters of all its optimizers
        self._clipped = True
        self._norm = clip_grad_norm_(parameters, max_norm, context=self.context)
        self._stepped = not self.scaler.has_overflowed(trainer.optimizers)
        return self._norm if self._stepped else torch.zeros_like(self._norm)

    def _step(self, step: Callable[[], None]) -> None:
        if not self._clipped:
            raise RuntimeError(
                "torchtitan stepped its optimizers and did not call torchtitan.distributed.utils.clip_grad_norm_, so "
                f"the gradients are still scaled; this version of torchtitan is not supported, expected {WORKS_WITH}"
            )
        if self._stepped:
            step()
        self.num_skipped += not self._stepped
        self.scaler.update()

    def _advance(self, step: Callable[[], None]) -> None:
        if self._stepped:  # a schedule does not advance after a skipped step, as in paramp.Engine
            step()

    def _log(self, log: Callable[..., None], *args: Any, extra_metrics: Any = None) -> None:
        ours = {"loss_scale": self.scaler.get_scale(), "skipped_steps": self.num_skipped}
        log(*args[:-1], float(self._norm), extra_metrics={**(extra_metrics or {}), **ours})

    def close(self) -> None:
        """Close the context, then what torchtitan closes."""
        if hasattr(self, "context"):
            self.context.close()
        super().close()  # type: ignore[misc]  # torchtitan's


class CheckpointedScaler(DistributedGradScaler):
    """The scaler of a trainer, which may load the state of a run in another precision."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a scale and its counters, but not from a run without fp16, whose scale is fixed; settings stay."""
        super().load_state_dict(resumed_state(self.state_dict(), state_dict))


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


def _torchtitan(path: str) -> Any:
    """``torchtitan.{path}``, a name in a module; a ConfigError if torchtitan is not installed or lacks it."""
    name = "torchtitan"
    try:
        value = importlib.import_module(name)
        for part in path.split("."):
            name = f"{name}.{part}"
            value = getattr(value, part) if hasattr(value, part) else importlib.import_module(name)
    except ImportError as error:
        missing = str(error.name) if isinstance(error, ModuleNotFoundError) else ""
        if missing and name != "torchtitan" and name.startswith(missing):  # not one that torchtitan needs
            raise _missing([name]) from None
        raise ConfigError(
            f'adopt: torchtitan cannot be imported ({error}); run pip install "paramp[torchtitan]"'
        ) from error
    return value


def _missing(names: Sequence[str]) -> ConfigError:
    version = getattr(sys.modules["torchtitan"], "__version__", "of an unknown version")
    return ConfigError(
        f"adopt: torchtitan {version} has no {', '.join(names)}; expected a version that has, as {WORKS_WITH}"
    )


def _check_names(owner: Any, names: Sequence[str], where: str) -> None:
    """Raise a ConfigError for those ``names``, such as ``"checkpoint.enable"``, that ``owner`` does not have."""
    missing = []
    for name in names:
        try:
            operator.attrgetter(name)(owner)
        except AttributeError:
            missing.append(f"{where}.{name}")
    if missing:
        raise _missing(missing)


@functools.cache
def _adopted(config: type) -> Any:
    """The subclass of the trainer of ``config``; its ``Config`` has two fields more."""
    trainer: type = config._owner  # type: ignore[attr-defined]
    added = [("precision", Dtype, "float16"), ("loss_scaling", LossScaling, field(default_factory=LossScaling))]
    made = make_dataclass("Config", added, bases=(config,), kw_only=True, slots=True)
    # This registers it for build().
    return type(f"Paramp{trainer.__name__}", (ParampTrainer, trainer), {"Config": made})


@functools.cache
def _scaled_loss() -> Any:
    """:class:`ScaledLoss` as one of torchtitan's losses."""
    base = _torchtitan("components.loss.BaseLoss")
    made = make_dataclass("Config", [("loss_fn", Any)], bases=(base.Config,), kw_only=True, slots=True)
    return type("ScaledLoss", (ScaledLoss, base), {"Config": made})


def _with_scaled_gradient(config: Any) -> Any:
    """The configuration of a loss with a :class:`ScaledLoss` in it, where its gradient enters the model."""
    if isinstance(config, _torchtitan("components.loss.ChunkedLossWrapper.Config")):
        return replace(config, loss_fn=_with_scaled_gradient(config.loss_fn))
    return _scaled_loss().Config(loss_fn=config)


def _check_config(precision: str, config: Any) -> None:
    """Raise a ConfigError unless ``config`` has what is used here, and all of it computes in ``precision``."""
    require(precision in get_args(Dtype), "precision", precision, f"one of {', '.join(get_args(Dtype))}")
    _check_names(config, IN_CONFIG, "Trainer.Config")
    if config.parallelism.context_parallel_degree > 1:
        sequences.check_config(config)
    if precision != "float16":
        return
    if config.training.dtype != "float32":
        raise ConfigError(
            f"training.dtype: got {config.training.dtype!r} with precision 'float16', expected 'float32', because "
            "small updates of half-precision weights are lost"
        )
    if config.model_spec is None:
        return
    _check_names(config.model_spec, ("model.traverse",), "Trainer.Config.model_spec")
    for path in BF16_ALONE:
        names = [name for name, *_ in config.model_spec.model.traverse(_torchtitan(path))]
        if names:
            raise ConfigError(
                f"precision: got 'float16', but torchtitan's {path.split('.')[-2]} computes in bfloat16 whatever the "
                f"precision ({names[0]}, the first of {len(names)}); use precision='bfloat16'"
            )
    if importlib.util.find_spec("torchtitan.models.common.aux_loss") is not None:
        names = [name for name, *_ in config.model_spec.model.traverse(_torchtitan(INJECTED))]
        if names:
            raise ConfigError(
                "precision: got 'float16', but torchtitan adds gradients of auxiliary losses without the loss scale "
                f"({names[0]}, the first of {len(names)}), so that they would be lost; use precision='bfloat16'"
            )


@contextmanager
def _replaced(owner: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Let ``owner.name(...)`` call ``function(what it was, ...)``."""
    is_on_owner = name in vars(owner)
    before = getattr(owner, name)
    setattr(owner, name, functools.partial(function, before))
    try:
        yield
    finally:
        if is_on_owner:
            setattr(owner, name, before)
        else:
            delattr(owner, name)
