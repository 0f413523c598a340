"""paramp inside Hugging Face Accelerate: ``accelerator = adopt(Accelerator(mixed_precision="fp16"))``.

Accelerate's loop stays. What differs after :func:`adopt`:

- One :class:`~paramp.DistributedGradScaler` that all ranks share takes the place of torch's, which decides from the
  gradients of one rank. Several optimizers share its scale, which changes when the next backward begins. Without loss
  scaling (``"bf16"``, ``"no"``) a gradient that is not finite skips the step on every rank too.
- ``clip_grad_norm_`` clips by the norm of the whole model, for any mix of plain tensors and DTensors.
- ``"fp16"`` works on CPUs, which Accelerate ignores without a word, with the same norms and softmax as on CUDA.
- ``save_state`` and ``load_state`` leave the scale as it is.
- ``ParallelismConfig(cp_size=...)`` cuts sequences by paramp's context axis (:mod:`.accelerate_sequences`).

The accelerator stays the same object, because models, loaders and optimizers that were prepared before hold it. It
becomes an instance of a subclass of its own class, as do its optimizers: methods that were set on the objects would be
lost by pickles and bound to the original by copies, and the new properties need a class.
"""

from __future__ import annotations

import atexit
import functools
import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import MethodType
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..base.errors import ConfigError, shown
from ..precision.compute_context import ComputeContext
from ..precision.fp32_routers import keep_routers_wide
from ..precision.modes import Precision
from ..scaling.loss_scaling_options import LossScaling
from .accelerate_sequences import CutSequences, begin_sequences
from .gradient_for_torch_clipping import logical_parameter
from .multi_optimizer_scaler import SharedGradScaler

log = logging.getLogger(__name__)
OLDEST = (1, 10)
"""The first version of Accelerate that is supported."""
MODES = {"fp16": "16-mixed", "bf16": "bf16-mixed", "no": "32-true"}
"""The mode of each ``mixed_precision``."""


def adopt(accelerator: Any) -> Any:
    """Make the loss scale, clipping, skipped steps and checkpointed scale of ``accelerator`` paramp's.

    Every rank calls it, before or after ``accelerator.prepare``; a second call has no effect. It supports one process,
    DDP, FSDP2, tensor parallelism and their products, on CPUs and CUDA, and, before ``prepare``, context parallelism.
    The loss scale follows ``GradScalerKwargs``.

    Args:
        accelerator: an ``accelerate.Accelerator`` with ``mixed_precision`` ``"fp16"``, ``"bf16"`` or ``"no"``.

    Returns:
        ``accelerator`` itself, with two more properties: ``loss_scale`` and ``num_skipped``.

    Raises:
        ConfigError: accelerate is not installed or too old, ``accelerator`` is no ``Accelerator``, or it uses what
            steps or scales by itself: DeepSpeed, Megatron-LM, FSDP1, XLA, fp8, LBFGS or LOMO; or DeepSpeed's sequence
            parallelism, or another device.
    """
    _check_installed()
    from accelerate import Accelerator  # type: ignore[import-untyped]

    if isinstance(accelerator, AdoptedAccelerator):
        return accelerator
    if not isinstance(accelerator, Accelerator):
        raise ConfigError(f"accelerator: got {shown(accelerator)}, expected an accelerate.Accelerator")
    _check_supported(accelerator)
    for optimizer in accelerator._optimizers:
        _check_optimizer(optimizer.optimizer)
    mode, cuts = _mode(accelerator), getattr(accelerator.parallelism_config, "cp_size", 1) > 1
    if cuts:
        begin_sequences(accelerator, MODES[accelerator.mixed_precision])
    accelerator.__class__ = _combined(CutAccelerator if cuts else AdoptedAccelerator, accelerator.__class__)
    accelerator._take_over(mode)
    _end_group_at_exit()
    return accelerator


@functools.cache
def _end_group_at_exit() -> None:
    """End the process group, which Accelerate leaves open, with the process; not after an error: ranks may be in it."""

    def end() -> None:
        if torch.distributed.is_initialized() and not hasattr(sys, "last_value"):
            torch.distributed.destroy_process_group()

    atexit.register(end)


class _Adopted:
    """Of a class that :func:`_combined` has made."""

    original: type
    """The class of Accelerate's."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle and copy by the two classes, because no module holds the combined one."""
        return _blank, (type(self).__mro__[1], self.original), self.__getstate__()


class AdoptedAccelerator(_Adopted):
    """What :func:`adopt` adds to the class of an accelerator."""

    _shared: SharedGradScaler
    _compute: ComputeContext

    def _take_over(self: Any, mode: Precision) -> None:
        self._compute = ComputeContext(mode, self.device)
        self._shared = SharedGradScaler(mode.scaling, WeakSet(), device=self.device)
        fp16 = self.mixed_precision == "fp16"
        if fp16 and not self.native_amp and self.is_main_process:
            _report_cpu(self._compute.emulate)
        self.native_amp = self.native_amp or fp16
        self.scaler = self._shared if fp16 else None
        for model in self._models:
            self._take_model(model)
        for optimizer in self._optimizers:
            self._take_optimizer(optimizer)

    @property
    def loss_scale(self) -> float:
        """The factor for the next loss; reading it synchronises with the device."""
        return self._shared.get_scale()

    @property
    def num_skipped(self) -> int:
        """The number of steps that were skipped because a gradient was not finite on some rank."""
        return self._shared.num_skipped

    def prepare(self: Any, *args: Any, **kwargs: Any) -> Any:
        """As Accelerate's."""
        prepared = super().prepare(*args, **kwargs)  # type: ignore[misc]
        for model in self._models:  # with FSDP2 none passes through prepare_model
            self._take_model(model)
        return prepared

    def prepare_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        """As Accelerate's."""
        model = super().prepare_model(*args, **kwargs)  # type: ignore[misc]
        self._take_model(model)
        return model

    def prepare_optimizer(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """As Accelerate's. Raises ConfigError for an optimizer that cannot skip a step."""
        _check_optimizer(getattr(optimizer, "optimizer", optimizer))
        prepared = super().prepare_optimizer(optimizer, *args, **kwargs)  # type: ignore[misc]
        self._take_optimizer(prepared)
        return prepared

    def _prepare_tp(self: Any, *args: Any) -> Any:
        """Under FSDP2, leave parameters without a tensor plan plain until FSDP2 shards them.

        Accelerate replicates them over the tensor axis, because torch's clipping needs one mesh for all, with a class
        that transformers 5 does not have any more.
        """
        return args if self.is_fsdp2 else super()._prepare_tp(*args)  # type: ignore[misc]

    def _take_model(self: Any, model: nn.Module) -> None:
        if self.is_fsdp2:  # also of a model that was not sharded yet when it was seen first
            _widen_outputs(model)
        if model in self._shared.models:
            return
        self._shared.models.add(model)
        keep_routers_wide(model, self._compute.precision)
        if self.is_fsdp2:
            from accelerate.utils import convert_to_fp32  # type: ignore[import-untyped]

            model.register_forward_hook(lambda _, args, output: convert_to_fp32(output))
        elif self.native_amp:
            self._autocast_forward(model)
        if self._compute.precision.autocast and self.device.type == "cpu":
            while isinstance(model, DistributedDataParallel):
                model = model.module
            self._compute_forward(model)

    def _autocast_forward(self: Any, model: nn.Module) -> None:
        """Do what ``prepare_model`` does in mixed precision, for a model that went through it before :func:`adopt`."""
        from accelerate import utils

        inner: Any = utils.extract_model_from_parallel(model, keep_torch_compile=False)
        if "_original_forward" not in vars(inner):
            inner._original_forward = inner.forward
            autocast = utils.get_mixed_precision_context_manager(True, self.autocast_handler)
            function = getattr(inner.forward, "__func__", inner.forward)
            wrapped = utils.convert_outputs_to_fp32(autocast(function))
            inner.forward = wrapped if function is inner.forward else MethodType(wrapped, inner)

    def _compute_forward(self, model: nn.Module) -> None:
        """Let ``forward`` compute in the mode; bound, so that deep copies of ``model`` use their own weights."""
        forward: Any = model.forward
        is_bound = getattr(forward, "__self__", None) is model
        function = forward.__func__ if is_bound else forward

        @functools.wraps(function)
        def compute(*args: Any, **kwargs: Any) -> Any:
            with self._compute.enter():
                return function(*args, **kwargs)

        model.forward = MethodType(compute, model) if is_bound else compute

    def _take_optimizer(self, optimizer: Any) -> None:
        optimizer.scaler = self._shared
        if not isinstance(optimizer, AdoptedOptimizer):
            optimizer.__class__ = _combined(AdoptedOptimizer, optimizer.__class__)

    def join_uneven_inputs(self: Any, joinables: Any, even_batches: bool | None = None) -> Any:
        """As Accelerate's. Raises ConfigError if some ranks would finish before others."""
        even = self.even_batches if even_batches is None else even_batches
        if self.num_processes > 1 and not even:
            raise ConfigError(
                "join_uneven_inputs: got even_batches=False, with which ranks that have finished would not decide with "
                "the others whether to step, which would wait for ever; pass even_batches=True, or drop_last=True to "
                "the data loader"
            )
        return super().join_uneven_inputs(joinables, even_batches)  # type: ignore[misc]

    def save_state(self: Any, *args: Any, **kwargs: Any) -> Any:
        """As Accelerate's. Raises ConfigError for tensor parallelism alone, of which that saves one rank's."""
        if self.parallelism_config is not None and self.parallelism_config.tp_enabled and not self.is_fsdp2:
            raise ConfigError(
                "save_state: with tensor parallelism alone Accelerate saves the shards of one rank for all; save the "
                "model and the optimizer with torch.distributed.checkpoint, and accelerator.scaler.state_dict()"
            )
        return super().save_state(*args, **kwargs)  # type: ignore[misc]

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """As Accelerate's, also of fp16 products on CPUs without fp16 arithmetic."""
        with self._compute.enter():
            super().backward(loss, **kwargs)  # type: ignore[misc]

    def free_memory(self, *objects: Any) -> Any:
        """As Accelerate's, of the optimizers that the loss scale holds too; the scale stays."""
        self._shared.forget()
        return super().free_memory(*objects)  # type: ignore[misc]

    @contextmanager
    def autocast(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        """As Accelerate's, with the norms and softmax of CUDA on CPUs."""
        with ExitStack() as stack:
            stack.enter_context(self._compute.enter())
            stack.enter_context(super().autocast(*args, **kwargs))  # type: ignore[misc]
            yield

    def unscale_gradients(self: Any, optimizer: Any = None) -> None:
        """Divide the gradients of ``optimizer``, one or several, by the loss scale, if that was not done; None: of all.

        A backward before their step scales them again.
        """
        if self.scaler is None:
            return
        optimizers = self._optimizers if optimizer is None else optimizer
        for wrapped in optimizers if isinstance(optimizers, (list, tuple)) else [optimizers]:
            self._shared.unscale_(wrapped)

    def clip_grad_norm_(
        self: Any, parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2
    ) -> torch.Tensor:
        """Scale the gradients of the whole model down to ``max_norm``, and return their norm before, on every rank."""
        logical = self._logical_parameter(parameters)
        return nn.utils.clip_grad_norm_(logical, max_norm, norm_type=norm_type)

    def clip_grad_value_(self: Any, parameters: torch.Tensor | Iterable[torch.Tensor], clip_value: float) -> None:
        """Clamp each element of the gradients to ``clip_value`` in magnitude; with FSDP2 too."""
        nn.utils.clip_grad_value_(self._logical_parameter(parameters), clip_value)

    def _logical_parameter(self: Any, parameters: torch.Tensor | Iterable[torch.Tensor]) -> torch.Tensor:
        """All ``parameters`` as one, after those optimizers that step them were unscaled."""
        clipped = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        scaled = {id(parameter) for parameter in clipped if parameter.grad is not None}
        for optimizer in self._optimizers:
            stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
            if not stepped.isdisjoint(map(id, clipped)):
                self.unscale_gradients(optimizer)
            scaled -= stepped
        if scaled and self.scaler is not None:
            raise ConfigError(
                f"parameters: {len(scaled)} of {len(clipped)} have scaled gradients, because no prepared optimizer "
                "steps them; give their optimizer to accelerator.prepare, or freeze them by requires_grad_(False)"
            )
        return logical_parameter(clipped, self.device.type)


class CutAccelerator(CutSequences, AdoptedAccelerator):
    """What :func:`adopt` adds to that of an accelerator with ``cp_size`` over 1."""


class AdoptedOptimizer(_Adopted):
    """What :func:`adopt` adds to the class of a prepared optimizer."""

    scaler: SharedGradScaler

    def step(self: Any, closure: Callable[[], Any] | None = None) -> None:
        """Step on every rank or on none, when gradients are synchronised. A ``closure`` is called once, before."""
        if not self.gradient_state.sync_gradients:
            return
        if closure is not None:
            with torch.enable_grad():
                closure()
        if self.scaler.is_enabled():
            _check_weights(self)
        self.scaler.step(self.optimizer)
        # torch's fused optimizers are also called for a step that they skip, so calls say nothing.
        self._is_overflow = self.scaler.skipped(self.optimizer)


@functools.cache
def _combined(addition: type, original: type) -> type:
    return type(original.__name__, (addition, original), {"__doc__": original.__doc__, "original": original})


def _blank(addition: type, original: type) -> Any:
    """An instance of both classes, for pickle to fill."""
    combined: Any = _combined(addition, original)
    return combined.__new__(combined)


def _widen_outputs(model: nn.Module) -> None:
    """Let the units of FSDP2 in ``model`` return tensors as they are; the model then casts them to fp32.

    Accelerate's policy casts them to half precision, and so the gradient of the scaled loss, which overflows in fp16
    from a scale of 65536 on.
    """
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            state._mp_policy = replace(state._mp_policy, output_dtype=None)


def _mode(accelerator: Any) -> Precision:
    mode = Precision.parse(MODES[accelerator.mixed_precision])
    handler = accelerator.scaler_handler
    if mode.scaling is None or handler is None:
        return mode
    scaling = LossScaling(**{name: getattr(handler, name) for name in vars(handler)})
    return replace(mode, scaling=scaling if scaling.enabled else None)


@functools.cache
def _report_cpu(emulated: bool) -> None:
    """Warn once in a process."""
    how = "fp16 products are computed in fp32 and rounded" if emulated else "the CPU's own fp16 arithmetic is used"
    log.warning(f"mixed_precision='fp16' on a CPU: Accelerate ignores it; with paramp it applies, and {how}")


def _check_installed() -> None:
    fix = 'run pip install "paramp[accelerate]"'
    try:
        from accelerate import __version__
    except ImportError as error:
        raise ConfigError(f"adopt: accelerate cannot be imported ({error}); {fix}") from None
    if tuple(int(part) for part in __version__.split(".")[:2]) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise ConfigError(f"adopt: got accelerate {__version__}, expected {oldest} or newer; {fix}")


def _check_supported(accelerator: Any) -> None:
    kind, device = accelerator.distributed_type.value, accelerator.device.type
    for is_used, what, instead in (
        (kind == "DEEPSPEED", "DeepSpeed, which scales, clips and steps by itself", "use FSDP2 or DDP"),
        (kind == "MEGATRON_LM", "Megatron-LM, which scales, clips and steps by itself", "use FSDP2 or DDP"),
        (kind == "FSDP" and not accelerator.is_fsdp2, "FSDP1", "pass FullyShardedDataParallelPlugin(fsdp_version=2)"),
        (
            accelerator.fp8_enabled,
            "mixed_precision='fp8', whose backends change the model",
            "use 'fp16', 'bf16' or 'no', or paramp.initialize for float8",
        ),
        (device not in ("cpu", "cuda"), f"the device {device!r}", "use 'cpu' or 'cuda'"),
        (
            getattr(accelerator.parallelism_config, "sp_size", 1) > 1,
            "ParallelismConfig with sp_size over 1, which is DeepSpeed's",
            "use cp_size",
        ),
    ):
        if is_used:
            raise ConfigError(f"accelerator: it uses {what}; adopt does not support it; {instead}")


def _check_weights(optimizer: Any) -> None:
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    if any(parameter.requires_grad and parameter.dtype is torch.float16 for parameter in parameters):
        raise ConfigError(
            "optimizer: got trained parameters in float16, expected float32 for mixed_precision='fp16', because steps "
            "are lost in their rounding; load the model with dtype=torch.float32"
        )


def _check_optimizer(optimizer: Any) -> None:
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError("optimizer: LBFGS evaluates the model many times per step, so it cannot skip a step")
    if name in ("Lomo", "AdaLomo"):
        raise ConfigError(f"optimizer: {name} steps during the backward, so it cannot skip a step")
