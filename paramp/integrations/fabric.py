"""A precision plugin for Lightning Fabric: ``Fabric(plugins=paramp.FabricPrecision("16-mixed"), ...)``.

Fabric does not support ``precision="16-mixed"`` on the CPU, nor with ``ModelParallelStrategy``, because torch's
``GradScaler`` decides from the gradients of one rank whether to skip a step; plugins are not restricted. This plugin
keeps Fabric's loop and computes as an :class:`~paramp.Engine` does: the mode's dtypes, norms and softmax that are the
same on CPU and CUDA, fp16 products on CPUs without fp16, a :class:`~paramp.DistributedGradScaler` that all ranks share,
and in every mode a step that all ranks skip if a gradient of any rank is not finite.

Lightning takes half a minute to import, so it is imported when the first plugin is made: :class:`FabricPrecision`
creates an instance of a subclass that also inherits from Lightning's class.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn

from ..base.dtensor import is_dtensor
from ..base.errors import ConfigError
from ..base.module_surgery import stored_dtype
from ..distributed.launcher_env import mpi_place
from ..engine.compute_context import ComputeContext
from ..optim.loss_scaler import DistributedGradScaler
from ..parallel.materialize import stored_as
from ..precision.autocast import default_dtype, to_compute, to_outputs
from ..precision.foreign_options import AMP_TYPE
from ..precision.policy import Precision
from .logical_gradient import logical_parameter
from .shared_scale import SharedScale, device_types


class FabricPrecision:
    """A plugin for ``lightning.fabric.Fabric``; also an instance of Lightning's ``Precision``.

    Every rank of the world trains one model: tensor-parallel (DTensor parameters, as ``ModelParallelStrategy`` makes
    them, or made before ``fabric.setup``), data-parallel, or both. Several models and optimizers share one loss scale,
    which is updated when the next backward begins, so that all of them are unscaled with the scale of their backward.

    Args:
        precision: a value that :meth:`Precision.parse` accepts, except modes with fp32 masters, which Fabric's
            optimizers do not support, and modes with float8 layers.
        emulate_fp16: compute fp16 products on the CPU in fp32 and round them. None: on CPUs without fp16 arithmetic.
        group: the ranks that decide together whether to step. None: the whole world.

    Raises:
        ConfigError: the mode is unknown or not supported in Fabric, or lightning is not installed.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> FabricPrecision:
        return super().__new__(_with_lightning(cls))  # type: ignore[arg-type]  # classes are hashable

    def __init__(
        self,
        precision: Precision | str | int | AMP_TYPE | Mapping[str, Any] = "32-true",
        *,
        emulate_fp16: bool | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.mode = Precision.parse(precision)
        self.precision = self.mode.name
        """The attribute that Lightning reads."""
        _check_mode(self.mode)
        self._emulate = emulate_fp16
        self._models: WeakSet[nn.Module] = WeakSet()
        self._scale = SharedScale(self.mode, self._models, group)
        if not self.mode.autocast and self.mode.scaling is None:
            # If the method is overridden, Fabric rejects a plain loss.backward(), which is correct here, only slower
            # with fp16 products on CPUs.
            own = functools.partial(self.backward)
            self.backward = functools.update_wrapper(own, super().backward)  # type: ignore[method-assign,misc]

    def __reduce__(self) -> Any:
        """Pickle for strategies that start processes and send the plugin to them, before anything was set up."""
        return functools.partial(FabricPrecision, emulate_fp16=self._emulate), (self.mode,)

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
                    _store(tensor, wanted)
                else:
                    child._buffers[name] = replaced.setdefault((tensor, wanted), tensor.detach().to(wanted))
        self._models.add(module)
        return module

    def module_init_context(self) -> AbstractContextManager[Any]:
        """For ``fabric.init_module()``, which adds the device: parameters are made in the mode's weight dtype."""
        stack = ExitStack()
        for context in (stored_as(self.mode), default_dtype(self.mode.weights)):
            stack.enter_context(context)
        return stack

    def tensor_init_context(self) -> AbstractContextManager[Any]:
        """For ``fabric.init_tensor()``: tensors are made in the mode's weight dtype."""
        return default_dtype(self.mode.weights)

    def forward_context(self) -> AbstractContextManager[Any]:
        """A context in which the mode computes, on the devices of the models that were set up."""
        return self._computing(autocast=True)

    @contextmanager
    def _computing(self, *, autocast: bool) -> Iterator[None]:
        with ExitStack() as stack:
            for device in map(torch.device, device_types(self._models)):
                stack.enter_context(ComputeContext(self.mode, device, self._emulate).enter(autocast=autocast))
            yield

    def convert_input(self, data: Any) -> Any:
        """Cast floating-point tensors to the compute dtype; in ``32-true``, as in Fabric, they are not changed."""
        if self.mode.compute is torch.float32:
            return data
        return _map_tensors(to_compute, data, self.mode)

    def convert_output(self, data: Any) -> Any:
        """Cast floating-point tensors to fp32 at least."""
        return _map_tensors(to_outputs, data, self.mode)

    @property
    def scaler(self) -> DistributedGradScaler:
        """The scaler of the losses, which decides if steps are skipped. Without loss scaling its scale is 1."""
        return self._scale.scaler

    @property
    def loss_scale(self) -> float:
        """The factor for the next loss; reading it synchronises with the device."""
        self._scale.update()
        return self.scaler.get_scale()

    @property
    def num_skipped(self) -> int:
        """The number of steps that were skipped because a gradient was not finite on some rank."""
        return self._scale.num_skipped

    def backward(self, tensor: torch.Tensor, model: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        """Scale the loss ``tensor``, 0-dim, and run its backward."""
        scaled = self._scale.scale(tensor)
        with self._computing(autocast=False):
            scaled.backward(*args, **kwargs)

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Step ``optimizer``, on every rank or on none. A ``closure`` is called once, before.

        Raises:
            ConfigError: ``optimizer`` evaluates its closure many times per step (LBFGS).
        """
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ConfigError(
                "optimizer: LBFGS evaluates the model many times per step, so it cannot skip a step; use another one"
            )
        closure = kwargs.pop("closure", None)
        if closure is None:
            return self._scale.step(optimizer, **kwargs)
        with torch.enable_grad():
            output = closure()
        self._scale.step(optimizer, **kwargs)
        return output

    def unscale_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients of ``optimizer`` by the loss scale, unless that was done since the last step."""
        self._scale.unscale(optimizer)

    def main_params(self, optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
        """The parameters that ``fabric.clip_gradients`` clips: one, whose gradient represents the whole model's."""
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        yield logical_parameter(parameters, device_types(self._models)[0])

    def state_dict(self) -> dict[str, Any]:
        """The scaler's state; empty without loss scaling. Save it as ``{"precision": plugin}``."""
        return self._scale.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state from :meth:`state_dict`, or from the ``state_dict`` of torch's ``GradScaler``."""
        self._scale.load_state_dict(state_dict)


@functools.cache
def _with_lightning(cls: type[FabricPrecision]) -> type[FabricPrecision]:
    """A subclass of ``cls`` and Lightning's class; a ConfigError if lightning is not installed."""
    try:
        from lightning.fabric.plugins.precision.precision import Precision as LightningPrecision
    except ImportError as error:
        raise ConfigError(
            f'FabricPrecision: lightning cannot be imported ({error}); run pip install "paramp[fabric]"'
        ) from None
    _detect_mpi_quietly()
    return type(cls.__name__, (cls, LightningPrecision), {"__doc__": cls.__doc__, "__new__": object.__new__})


def _detect_mpi_quietly() -> None:
    """Make Lightning take mpi4py without an MPI library for a machine without MPI.

    ``Fabric()`` asks mpi4py whether mpirun started the process. Lightning expects an ImportError if there is no MPI,
    but mpi4py raises a RuntimeError. Under mpirun that error stays: there each process would train alone.
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


def _check_mode(mode: Precision) -> None:
    without = "16-mixed, bf16-mixed, 16-true, bf16-true, 32-true, 64-true"
    if mode.masters:
        raise ConfigError(
            f"FabricPrecision: mode {mode.name!r} steps fp32 masters, which Fabric's optimizers do not support; "
            f"expected a mode without ({without}), or use paramp.initialize"
        )
    for name, value, expected in (("rounding", "stochastic", "nearest"), ("optimizer_state", "bf16", "full")):
        if getattr(mode, name) == value:
            raise ConfigError(
                f"FabricPrecision: {name}: got {value!r}, expected {expected!r}, because the optimizer's own step "
                "rounds; use paramp.initialize"
            )
    if mode.float8 is not None:
        raise ConfigError(
            f"FabricPrecision: mode {mode.name!r} replaces layers by float8 ones before the model is sharded, which "
            f"only paramp.initialize does; expected one of {without}"
        )


def _map_tensors(function: Callable[[torch.Tensor, Precision], torch.Tensor], data: Any, mode: Precision) -> Any:
    """Apply ``function`` to all tensors in ``data``, in the same collections as Lightning's own plugins."""
    from lightning_utilities.core.apply_func import apply_to_collection

    return apply_to_collection(data, torch.Tensor, function, mode)


def _store(parameter: nn.Parameter, dtype: torch.dtype) -> None:
    """Change the dtype of ``parameter``, which stays the same object."""
    changed = parameter.detach().to(dtype)
    if is_dtensor(parameter):  # .data of a DTensor cannot be set
        torch.utils.swap_tensors(parameter, nn.Parameter(changed, parameter.requires_grad))
    else:
        parameter.data = changed
