"""What the plugins for Lightning's Fabric and for its Trainer have in common.

Lightning takes long to import, so it is imported when the first plugin is made: then an instance of a subclass is
created that also inherits from Lightning's class.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, ClassVar, Self
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn

from ..base.dtensor import is_dtensor
from ..base.errors import ConfigError
from ..base.module_surgery import stored_dtype
from ..distributed.launcher_variables import mpi_place
from ..parallel.materialize import stored_as
from ..precision.compute_context import ComputeContext, default_dtype, to_compute
from ..precision.fp32_routers import keep_routers_wide
from ..precision.modes import Mode, Precision, ReduceDtypes
from .gradient_for_torch_clipping import logical_parameter
from .multi_optimizer_scaler import SharedGradScaler, device_types


class LightningPrecision:
    """A mode of precision in a loop of Lightning's, with one loss scale for all models and optimizers."""

    LIGHTNING: ClassVar[str]
    """The module of Lightning's class ``Precision`` that a plugin also inherits from."""
    EXTRA: ClassVar[str]
    """The extra of paramp that installs Lightning."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        return super().__new__(_with_lightning(cls))  # type: ignore[arg-type,return-value]  # mypy: a class is no Hashable

    def __init__(
        self,
        precision: Mode = "32-true",
        *,
        emulate_fp16: bool | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.mode = Precision.parse(precision)
        self.precision = self.mode.name
        """The attribute that Lightning reads."""
        self._check_mode()
        self._emulate = emulate_fp16
        self._computes: dict[torch.device, ComputeContext] = {}
        self._group = group
        self._models: WeakSet[nn.Module] = WeakSet()
        self._scale = SharedGradScaler(self.mode.scaling, self._models, group=group)
        self._end_init()

    def _end_init(self) -> None:
        """For subclasses: what follows the construction."""

    def __reduce__(self) -> Any:
        """Pickle for strategies that start processes and send the plugin to them, before anything was set up.

        Raises:
            ConfigError: it has a group; without it the other processes would decide over the whole world.
        """
        if self._group is not None:
            raise ConfigError(
                f"{type(self).__name__}: group: a process group cannot be pickled; expected None, or a strategy that "
                "does not send the plugin to the processes it starts; make it in each process, as under torchrun"
            )
        return self._remade(), (self.mode,)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copy in this process, before anything was set up; it has the same group."""
        return self._remade()(self.mode, group=self._group)

    def _remade(self) -> functools.partial[Self]:
        without_lightning = type(self).__mro__[1]
        return functools.partial(without_lightning, emulate_fp16=self._emulate)

    def _check_mode(self) -> None:
        """Raise a ConfigError if Lightning's loop does not support the mode, or an option of it."""
        mode, kind = self.mode, type(self).__name__
        options = (
            ("rounding", mode.rounding, "nearest", "the optimizer's own step rounds"),
            ("optimizer_state", mode.optimizer_state, "full", "the optimizer's own step rounds"),
            ("grad_dtype", mode.grad_dtype or mode.weights, mode.weights, "autograd adds up gradients of weights"),
            ("reduce_dtype", mode.reduce_dtypes, ReduceDtypes(), "Lightning's strategy sums gradients"),
        )
        for name, value, expected, why in options:
            if value != expected:
                raise ConfigError(
                    f"{kind}: {name}: got {value!r}, expected {expected!r}, because {why}; use paramp.initialize"
                )
        if mode.float8 is not None:
            raise ConfigError(
                f"{kind}: mode {mode.name!r} replaces layers by float8 ones before the model is sharded, which only "
                "paramp.initialize does; expected one of 16-mixed, bf16-mixed, 16-true, bf16-true, 32-true, 64-true"
            )

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Store the weights in the mode's dtype, in place, because the optimizer may have the parameters already."""
        replaced: dict[tuple[torch.Tensor, torch.dtype], torch.Tensor] = {}  # so that shared buffers stay shared
        for child in module.modules():
            buffers = child.named_buffers(recurse=False, remove_duplicate=False)
            for name, tensor in (*child.named_parameters(recurse=False), *buffers):
                wanted = stored_dtype(
                    child, name, tensor, self.mode.weights, keep_batchnorm_fp32=self.mode.keep_batchnorm_fp32
                )
                if tensor.dtype is wanted:
                    continue
                if isinstance(tensor, nn.Parameter):
                    self._store(module, tensor, wanted)
                else:
                    child._buffers[name] = replaced.setdefault((tensor, wanted), tensor.detach().to(wanted))
        keep_routers_wide(module, self.mode)
        self._models.add(module)
        return module

    def _store(self, module: nn.Module, parameter: nn.Parameter, dtype: torch.dtype) -> None:
        """Change the dtype of ``parameter`` of ``module``; it stays the same object."""
        changed = parameter.detach().to(dtype)
        if is_dtensor(parameter):  # .data of a DTensor cannot be set
            torch.utils.swap_tensors(parameter, nn.Parameter(changed, parameter.requires_grad))
        else:
            parameter.data = changed

    def module_init_context(self) -> AbstractContextManager[Any]:
        """For Lightning's ``init_module()``, which adds the device: parameters are made in the mode's weight dtype."""
        stack = ExitStack()
        for context in (stored_as(self.mode.as_sharded), default_dtype(self.mode.as_sharded.weights)):
            stack.enter_context(context)
        return stack

    def tensor_init_context(self) -> AbstractContextManager[Any]:
        """For Lightning's ``init_tensor()``: tensors are made in the mode's weight dtype."""
        return default_dtype(self.mode.as_sharded.weights)

    def forward_context(self) -> AbstractContextManager[Any]:
        """A context in which the mode computes, on the devices of the models that were set up."""
        return self._computing(autocast=True)

    @contextmanager
    def _computing(self, *, autocast: bool) -> Iterator[None]:
        with ExitStack() as stack:
            for device in map(torch.device, device_types(self._models)):
                # Without autocast's cache, because loops step and compute again inside of forward_context().
                compute = ComputeContext(self.mode, device, self._emulate, cache=False)
                compute = self._computes.setdefault(device, compute)
                stack.enter_context(compute.enter(autocast=autocast))
            yield

    def convert_input(self, data: Any) -> Any:
        """Cast floating-point tensors to the compute dtype; in ``32-true``, as in Lightning, they are not changed."""
        return data if self.mode.compute is torch.float32 else map_tensors(to_compute, data, self.mode)

    @property
    def scaler(self) -> SharedGradScaler:
        """The scaler of the losses, which decides if steps are skipped. Without loss scaling its scale is 1."""
        self._scale.place()
        return self._scale

    @property
    def loss_scale(self) -> float:
        """The factor for the next loss; reading it synchronises with the device."""
        return self._scale.get_scale()

    @property
    def num_skipped(self) -> int:
        """The number of steps that were skipped because a gradient was not finite on some rank."""
        return self._scale.num_skipped

    def unscale_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients of ``optimizer`` by the loss scale, unless that was done since the last step."""
        self._scale.unscale_(optimizer)

    def _check_optimizer(self, optimizer: object) -> None:
        """Raise a ConfigError if ``optimizer`` evaluates its closure many times per step."""
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ConfigError(
                "optimizer: LBFGS evaluates the model many times per step, so it cannot skip a step; use another one"
            )

    def _refuse_deepspeed(self, value: object) -> None:
        """Raise a ConfigError if ``value`` is DeepSpeed's strategy or its engine."""
        if {kind.__name__ for kind in type(value).__mro__} & {"DeepSpeedStrategy", "DeepSpeedEngine"}:
            raise ConfigError(
                f"{type(self).__name__}: strategy: got DeepSpeedStrategy, which scales, clips and steps by itself; use "
                "ModelParallelStrategy or DDPStrategy, or Lightning's own precision"
            )

    def main_params(self, optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
        """The parameters that Lightning clips: one, whose gradient represents the whole model's."""
        stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        yield logical_parameter(stepped, device_types(self._models)[0])

    def state_dict(self) -> dict[str, Any]:
        """The scaler's state; empty without loss scaling."""
        return self._scale.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state from :meth:`state_dict`, or from the ``state_dict`` of torch's ``GradScaler``; settings stay."""
        self._scale.load_state_dict(state_dict)


@functools.cache
def _with_lightning(cls: type[LightningPrecision]) -> type[LightningPrecision]:
    """A subclass of ``cls`` and Lightning's class; a ConfigError if lightning is not installed."""
    try:
        base = importlib.import_module(cls.LIGHTNING).Precision
    except ImportError as error:
        raise ConfigError(
            f'{cls.__name__}: lightning cannot be imported ({error}); run pip install "paramp[{cls.EXTRA}]"'
        ) from None
    _detect_mpi_quietly()
    return type(cls.__name__, (cls, base), {"__doc__": cls.__doc__, "__new__": object.__new__})


@functools.cache
def _detect_mpi_quietly() -> None:
    """Make Lightning take mpi4py without an MPI library for a machine without MPI.

    Lightning asks mpi4py whether mpirun started the process, and expects an ImportError if there is no MPI, but mpi4py
    raises a RuntimeError. Under mpirun that error stays: there each process would train alone.
    """
    from lightning.fabric.plugins.environments.mpi import MPIEnvironment

    detect = MPIEnvironment.detect

    def detect_quietly() -> bool:
        try:
            return detect()
        except RuntimeError:
            if mpi_place() is not None:
                raise
            return False

    MPIEnvironment.detect = staticmethod(detect_quietly)  # type: ignore[method-assign]


def map_tensors(function: Callable[[torch.Tensor, Precision], torch.Tensor], data: Any, mode: Precision) -> Any:
    """Apply ``function`` to all tensors in ``data``, in the same collections as Lightning's own plugins."""
    from lightning_utilities.core.apply_func import apply_to_collection

    return apply_to_collection(data, torch.Tensor, function, mode)
