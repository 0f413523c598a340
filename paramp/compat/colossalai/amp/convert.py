"""Mixed precision for a user's own loop: a model, an optimizer and a criterion, each wrapped for one mode.

    model, optimizer, criterion = convert_to_amp(model, optimizer, criterion, AMP_TYPE.TORCH)
    loss = criterion(model(x), y)
    optimizer.backward(loss)
    optimizer.clip_grad_norm(model, 1.0)
    optimizer.step()
    optimizer.zero_grad()

The wrappers need no launch and no engine. If ``torch.distributed`` is initialised, all ranks agree on every overflow:
with plain parameters, DTensors, and the stages of a user's own pipeline. Data parallelism is up to the caller: wrap the
converted model in ``DistributedDataParallel``, or average the gradients before the step.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ....base.dtensor import is_dtensor
from ....base.errors import ConfigError
from ....base.module_surgery import names_by_parameter
from ....base.wrapped_models import is_unit
from ....distributed.context import current_context
from ....optim.user_optimizer import check_elementwise, check_optimizer, repoint, warn_of_eps, why_weights_are_missed
from ....parallel.tensor.sharded_loss import vocab_parallel_loss
from ....pipeline.stage import Stage
from ....precision.compute_context import ComputeContext
from ....precision.fp32_routers import keep_routers_wide
from ....precision.modes import Precision
from ...foreign_config_values import AMP_TYPE
from .optimizer import AmpOptimizer
from .weights import Weights, to_be_stepped

Options = Mapping[str, Any]
Mode = AMP_TYPE | str | int | Precision | Options
WRAPPERS = (DistributedDataParallel, DataParallel)

_optimizers: WeakSet[AmpOptimizer] = WeakSet()
"""Those of the conversions so far."""


class AmpModel(Stage):
    """A model that computes in a mode: inputs are cast, and floating-point outputs are returned in fp32 at least.

    :attr:`module` is the original model. On the earlier stages of the current context's pipeline, outputs stay in the
    compute dtype.
    """

    def __init__(self, model: nn.Module, compute: ComputeContext) -> None:
        context = current_context()
        super().__init__(
            model, compute.precision, compute.device, is_first=True, is_last=context is None or context.is_last_stage
        )
        self._compute = compute

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output."""
        with self._compute.enter():
            return super().forward(*args, **kwargs)


class AmpCriterion(nn.Module):
    """The criterion :attr:`loss`, computed as the model is: under autocast, if the mode has one."""

    def __init__(self, loss: Callable[..., Any], compute: ComputeContext, *, sharded: bool) -> None:
        """``sharded``: parameters of the model are DTensors, so that the vocabulary of the logits may be sharded."""
        super().__init__()
        self.loss = loss
        self._compute = compute
        self._sharded = sharded

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The criterion's loss."""
        vocabulary = vocab_parallel_loss() if self._sharded else nullcontext()
        with self._compute.enter(autocast=self._compute.precision.autocast), vocabulary:
            return self.loss(*args, **kwargs)


def convert_to_amp(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    criterion: Callable[..., Any] | None,
    mode: Mode,
    amp_config: Options | None = None,
) -> tuple[AmpModel, AmpOptimizer, AmpCriterion | None]:
    """Wrap ``model``, ``optimizer`` and ``criterion`` for a mode of precision, for a loop without an engine.

    The model's parameters are cast to the mode's weight dtype. The optimizer's groups then contain them, or their fp32
    masters, which are made from the values before the cast; a step takes up what a script has changed in the model's
    parameters or in the masters. Apply tensor parallelism before: parameters may be DTensors. Apply
    ``DistributedDataParallel`` after, to the returned model; until a step or a load, masters take the rounded weights
    that it broadcasts.

    Args:
        model: on the device on which it runs.
        optimizer: a new one over the model's parameters; afterwards it belongs to the :class:`AmpOptimizer`.
        criterion: called with the arguments of the wrapped one. None stays None.
        mode: an ``AMP_TYPE``, or any value that :meth:`paramp.Precision.parse` accepts.
        amp_config: the options of that mode, as in ``fp16=dict(mode=..., ...)``.

    Raises:
        ConfigError: an unknown mode or option, or the model and the optimizer cannot be converted, or already are, as
            long as the earlier :class:`AmpOptimizer` exists. Neither was changed then.
    """
    precision = _parse(mode, amp_config)
    _check_arguments(model, optimizer, criterion, precision)
    names_of = names_by_parameter(model)
    check_optimizer(optimizer, names_of)
    check_elementwise(optimizer, names_of)
    if why := why_weights_are_missed(optimizer, names_of, to_be_stepped(model, precision)):
        raise ConfigError(why)
    compute, sharded = _compute_context(model, precision), any(map(is_dtensor, model.parameters()))
    weights = Weights(model, precision)
    keep_routers_wide(model, precision)
    repoint(optimizer, names_of, weights)
    warn_of_eps(optimizer)
    wrapped = None if criterion is None else AmpCriterion(criterion, compute, sharded=sharded)
    converted = AmpOptimizer(optimizer, weights, compute)
    _optimizers.add(converted)
    return AmpModel(model, compute), converted, wrapped


def convert_to_torch_amp(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    criterion: Callable[..., Any] | None = None,
    amp_config: Options | None = None,
) -> tuple[AmpModel, AmpOptimizer, AmpCriterion | None]:
    """:func:`convert_to_amp` with ``AMP_TYPE.TORCH``: fp32 weights, autocast to fp16."""
    return convert_to_amp(model, optimizer, criterion, AMP_TYPE.TORCH, amp_config)


def convert_to_naive_amp(
    model: nn.Module, optimizer: torch.optim.Optimizer, amp_config: Options | None = None
) -> tuple[AmpModel, AmpOptimizer]:
    """:func:`convert_to_amp` with ``AMP_TYPE.NAIVE``: all in fp16, fp32 masters. Criteria are not wrapped."""
    return convert_to_amp(model, optimizer, None, AMP_TYPE.NAIVE, amp_config)[:2]


def convert_to_apex_amp(
    model: nn.Module, optimizer: torch.optim.Optimizer, amp_config: Options | None = None
) -> tuple[AmpModel, AmpOptimizer]:
    """:func:`convert_to_amp` with ``AMP_TYPE.APEX``, whose ``opt_level`` is O1 by default. Criteria are not wrapped."""
    return convert_to_amp(model, optimizer, None, AMP_TYPE.APEX, amp_config)[:2]


def _parse(mode: Mode, amp_config: Options | None) -> Precision:
    if isinstance(mode, (Precision, Mapping)):
        if amp_config:
            raise ConfigError(f"amp_config: got {dict(amp_config)!r} with a mode that has its options; put them there")
        return Precision.parse(mode)
    if not isinstance(amp_config, Mapping | None):
        raise ConfigError(f"amp_config: got {amp_config!r}, expected a dict of the mode's options, or None")
    options = amp_config or {}
    if options.get("mode", mode) != mode:
        raise ConfigError(f"amp_config: its mode {options['mode']!r} differs from the mode {mode!r}; leave one out")
    # The options of an AMP_TYPE have their own defaults; the name of a mode has none.
    has_options = options or isinstance(mode, AMP_TYPE)
    return Precision.parse({**options, "mode": mode} if has_options else mode)


def _compute_context(model: nn.Module, precision: Precision) -> ComputeContext:
    """That of ``model``, on the device of its first parameter, with the current ``emulate_fp16``."""
    context = current_context()
    first = next(model.parameters(), None)
    device = first.device if first is not None else context.device if context else torch.device("cpu")
    return ComputeContext(precision, device, context.config.emulate_fp16 if context else "auto")


def _check_arguments(model: Any, optimizer: Any, criterion: Any, precision: Precision) -> None:
    for name, value, kind, what in (
        ("model", model, nn.Module, "an nn.Module"),
        ("optimizer", optimizer, torch.optim.Optimizer, "a torch.optim.Optimizer over the model's parameters"),
    ):
        if not isinstance(value, kind):
            raise ConfigError(f"{name}: got {type(value).__name__}, expected {what}")
        if isinstance(value, (AmpModel, AmpOptimizer)):
            raise ConfigError(f"{name}: it is converted already; convert each model and optimizer once")
    if criterion is not None and not callable(criterion):
        raise ConfigError(f"criterion: got {criterion!r}, expected a function of output and target, or None")
    if precision.float8 is not None:
        raise ConfigError(f"mode: {precision.name!r} replaces layers of the model; use it with paramp.initialize")
    for name, value, expected in (("rounding", "stochastic", "nearest"), ("optimizer_state", "bf16", "full")):
        if getattr(precision, name) == value:
            raise ConfigError(
                f"{name}: got {value!r}, expected {expected!r}, because the optimizer's own step rounds; "
                "use paramp.initialize"
            )
    for name, module in model.named_modules():
        if isinstance(module, WRAPPERS):
            raise ConfigError(
                f"model: {name or 'it'} is wrapped in {type(module).__name__}, which would keep the old "
                "parameters; convert first, and wrap the returned model"
            )
        if is_unit(module) and precision.weights is not torch.float32:
            raise ConfigError(
                f"model: {name or 'it'} is sharded by fully_shard, whose parameters cannot be replaced by "
                f"{precision.weights} ones; use a mode with fp32 weights, such as '16-mixed'"
            )
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise ConfigError(f"model: {name!r} is on the meta device; materialize it first, or use paramp.initialize")
    if _optimizers:
        gc.collect()  # a scheduler holds a deleted optimizer in a cycle
    if known := _first_converted(model):
        raise ConfigError(
            f"model: {known!r} is converted already, with an optimizer that would unscale its gradients too; convert a "
            "model once, with one optimizer over all of its parameters, or delete the earlier AmpOptimizer first"
        )


def _first_converted(model: nn.Module) -> str | None:
    """The name of the first parameter of ``model`` that an :class:`AmpOptimizer` steps already, if there is one."""
    stepped = {parameter for optimizer in _optimizers for parameter in optimizer._weights.parameters}
    return next((name for name, parameter in model.named_parameters() if parameter in stepped), None)
