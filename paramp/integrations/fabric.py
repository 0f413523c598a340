"""A precision plugin for Lightning Fabric: ``Fabric(plugins=paramp.FabricPrecision("16-mixed"), ...)``.

Fabric refuses ``precision="16-mixed"`` with ``ModelParallelStrategy``, because torch's ``GradScaler`` decides from the
gradients of one rank whether to skip a step, and on the CPU. It asks a plugin's strategy no such question. This plugin
keeps Fabric's loop and computes as an :class:`~paramp.Engine` does: the mode's dtypes, norms and softmax that are the
same on CPU and CUDA, fp16 products on CPUs without fp16, a :class:`~paramp.DistributedGradScaler` that all ranks share,
and in every mode a step that is skipped everywhere where a gradient of any rank is not finite.

Lightning takes half a minute to import, so it is imported when the first plugin is made: :class:`FabricPrecision` makes
an instance of a subclass that is also Lightning's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import OptState
from torch.distributed.tensor import DTensor, Replicate

from ..base.dtensor import local
from ..base.errors import ConfigError
from ..base.module_surgery import stored_dtype
from ..optim.grad_norm import total_norm
from ..optim.grad_reduce import align_gradients
from ..optim.loss_scaler import DistributedGradScaler
from ..parallel.materialize import stored_as
from ..precision.autocast import computing, default_dtype, to_compute, to_outputs, widening
from ..precision.capabilities import has_native_fp16
from ..precision.fp16_emulation import emulate_fp16
from ..precision.policy import AMP_TYPE, LossScaling, Precision

__all__ = ["FabricPrecision"]


class FabricPrecision:
    """A plugin for ``lightning.fabric.Fabric``; an instance of Lightning's ``Precision`` too.

    Every rank of the world trains one model: tensor-parallel (DTensor parameters, as ``ModelParallelStrategy`` makes
    them, or made before ``fabric.setup``), data-parallel, or both. Several models and optimizers share one loss scale,
    which moves when the next backward begins, so that all of them are unscaled with the scale of their backward.

    Args:
        precision: what :meth:`Precision.parse` takes. Not the modes with fp32 masters, which Fabric's optimizers know
            nothing of, nor those with float8 layers.
        emulate_fp16: compute fp16 products on the CPU in fp32 and round them. None: on CPUs without fp16 arithmetic.
        group: the ranks that decide together whether to step. None: the whole world.

    Raises:
        ConfigError: the mode is unknown or none for Fabric, or lightning is not installed.
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
        """The name that Lightning asks for."""
        _check_mode(self.mode)
        self._emulate = emulate_fp16
        self._group = group
        self._models: WeakSet[nn.Module] = WeakSet()
        self._scaler: DistributedGradScaler | None = None
        self._stepped: dict[int, torch.optim.Optimizer] = {}  # since the scale moved last
        self._unscaled: dict[int, torch.optim.Optimizer] = {}  # also before their step
        self._skipped = torch.zeros((), dtype=torch.int64)

    def __reduce__(self) -> Any:
        """For strategies that start processes and send the plugin to them, before anything was set up."""
        return _rebuild, (self.mode, self._emulate)

    # ------------------------------------------------------------------------------------------------ the model

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Store the weights in the mode's dtype. In place, as the optimizer may have the parameters already."""
        replaced: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by id: the old buffer, kept alive, and the new
        for child in module.modules():
            buffers = child.named_buffers(recurse=False, remove_duplicate=False)
            for name, tensor in (*child.named_parameters(recurse=False), *buffers):
                wanted = stored_dtype(
                    child, name, tensor, self.mode.weights, keep_batchnorm_fp32=self.mode.keep_batchnorm_fp32
                )
                shared = replaced.get(id(tensor), (tensor, None))[1]
                if shared is not None and shared.dtype is wanted:
                    child._buffers[name] = shared
                elif tensor.dtype is not wanted:
                    _store(child, name, tensor, wanted)
                    stored = child._buffers.get(name)
                    if stored is not None:
                        replaced[id(tensor)] = tensor, stored
        self._models.add(module)
        return module

    def module_init_context(self) -> AbstractContextManager[Any]:
        """For ``fabric.init_module()``, which adds the device: parameters are made in the mode's weight dtype."""
        stack = ExitStack()
        stack.enter_context(stored_as(self.mode))
        stack.enter_context(default_dtype(self.mode.weights))
        return stack

    def tensor_init_context(self) -> AbstractContextManager[Any]:
        """For ``fabric.init_tensor()``: tensors are made in the mode's weight dtype."""
        return default_dtype(self.mode.weights)

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        """The mode's computation, on the devices of the models that were set up."""
        with ExitStack() as stack:
            for device_type in self._device_types():
                stack.enter_context(computing(self.mode, device_type))
            stack.enter_context(emulate_fp16(self._emulates()))
            yield

    def convert_input(self, data: Any) -> Any:
        """Floating-point tensors in the compute dtype."""
        return _map_tensors(lambda tensor: to_compute(tensor, self.mode), data)

    def convert_output(self, data: Any) -> Any:
        """Floating-point tensors in fp32 at the least."""
        return _map_tensors(lambda tensor: to_outputs(tensor, self.mode), data)

    # ------------------------------------------------------------------------------------------------ the step

    @property
    def scaler(self) -> DistributedGradScaler:
        """What scales the losses and decides about steps. In modes that do not scale, its scale stays 1."""
        if self._scaler is None:
            scaling = self.mode.scaling or LossScaling.static(1.0)
            device = torch.device(self._device_types()[0])
            self._scaler = DistributedGradScaler(device, **asdict(scaling), group=self._group)
        return self._scaler

    @property
    def loss_scale(self) -> float:
        """What the next loss is multiplied by; reading it costs a device synchronisation."""
        self._settle()
        return self.scaler.get_scale()

    @property
    def num_skipped(self) -> int:
        """Steps that were skipped so far because a gradient was not finite on some rank; costs a synchronisation."""
        return int(self._skipped)

    def pre_backward(self, tensor: torch.Tensor, module: nn.Module | None) -> None:
        """Nothing is to be done."""

    def backward(self, tensor: torch.Tensor, model: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        """Scale the loss ``tensor``, 0-dim, and run its backward."""
        self._settle()
        with emulate_fp16(self._emulates()), ExitStack() as stack:
            for device_type in self._device_types():
                stack.enter_context(widening(self.mode, device_type))
            self.scaler.scale(tensor).backward(*args, **kwargs)

    def post_backward(self, tensor: torch.Tensor, module: nn.Module | None) -> None:
        """Nothing is to be done."""

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Step ``optimizer``, on every rank or on none. A ``closure`` is called once, before.

        Raises:
            ConfigError: ``optimizer`` evaluates its closure many times a step (LBFGS).
        """
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ConfigError(
                "optimizer: LBFGS evaluates the model many times a step, of which none could be skipped; use another"
            )
        closure, output = kwargs.pop("closure", None), None
        if closure is not None:
            with torch.enable_grad():
                output = closure()
        if id(optimizer) in self._stepped:
            self._settle()
        stepped = self.scaler.step(optimizer, **kwargs)
        self._stepped[id(optimizer)] = self._unscaled[id(optimizer)] = optimizer
        flags = self.scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values()
        self._skipped = self._skipped + sum(flag.to(torch.int64).cpu() for flag in flags)
        return stepped if closure is None else output

    def _settle(self) -> None:
        """Let the scale follow the steps since the last backward, once all optimizers have had theirs.

        What an optimizer with a slower cadence goes on adding up is brought to the new scale.
        """
        if not self._stepped:
            return
        if self.mode.scaling is None:
            self.scaler.update()
        else:
            assert self.scaler._scale is not None
            before = self.scaler._scale.clone()
            self.scaler.update()
            ratio = self.scaler._scale / before
            for gradient in self._scaled_gradients():
                gradient.mul_(ratio.to(gradient.device))
        self._stepped.clear()
        self._unscaled.clear()

    def _scaled_gradients(self) -> list[torch.Tensor]:
        """The gradients, plain and local, that no optimizer has unscaled since the scale moved last."""
        groups = (group for optimizer in self._unscaled.values() for group in optimizer.param_groups)
        unscaled = {id(parameter) for group in groups for parameter in group["params"]}
        parameters = {parameter for model in self._models for parameter in model.parameters()}
        return [
            local(parameter.grad)
            for parameter in parameters
            if parameter.grad is not None and id(parameter) not in unscaled
        ]

    def unscale_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients of ``optimizer`` by the loss scale, unless that was done since the last step."""
        if id(optimizer) in self._stepped:
            self._settle()
        if self.scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY:
            self.scaler.unscale_(optimizer)
        self._unscaled[id(optimizer)] = optimizer

    def main_params(self, optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
        """What ``fabric.clip_gradients`` hands to torch: one tensor whose gradient stands for that of the whole model.

        torch's own functions refuse a mix of plain tensors and DTensors, and know of one mesh only.
        """
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        align_gradients(parameters)
        held = [parameter for parameter in parameters if parameter.grad is not None]
        logical = LogicalGradient.of(held, self._device_types()[0])
        surrogate = torch.zeros_like(logical).as_subclass(torch.Tensor).requires_grad_()
        surrogate.grad = logical
        yield surrogate

    # ------------------------------------------------------------------------------------------------ checkpoints

    def state_dict(self) -> dict[str, Any]:
        """The scaler's state; empty in modes that do not scale. Save it as ``{"precision": plugin}``, say."""
        self._settle()
        return self.scaler.state_dict() if self.mode.scaling is not None else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up what :meth:`state_dict` gave, or what torch's ``GradScaler`` did."""
        if self.mode.scaling is not None:
            self._stepped.clear()
            self._unscaled.clear()
            self.scaler.load_state_dict(state_dict)

    # ------------------------------------------------------------------------------------------------ inner parts

    def _device_types(self) -> list[str]:
        """Where the models that were set up are; before that, wherever they may come to be."""
        first = (next(model.parameters(), None) for model in self._models)
        found = {parameter.device.type for parameter in first if parameter is not None} - {"meta"}
        return sorted(found or {"cpu", *(["cuda"] if torch.cuda.is_available() else [])}, reverse=True)

    def _emulates(self) -> bool:
        if self.mode.compute is not torch.float16:
            return False
        return not has_native_fp16("cpu") if self._emulate is None else self._emulate


@functools.cache
def _with_lightning(cls: type[FabricPrecision]) -> type[FabricPrecision]:
    """The subclass of ``cls`` that is also Lightning's.

    Raises:
        ConfigError: lightning is not installed.
    """
    try:
        from lightning.fabric.plugins.precision.precision import Precision as LightningPrecision
    except ImportError as error:
        raise ConfigError(
            f'FabricPrecision: lightning cannot be imported ({error}); run pip install "paramp[fabric]"'
        ) from None
    return type(cls.__name__, (cls, LightningPrecision), {"__doc__": cls.__doc__, "__new__": object.__new__})


def _rebuild(mode: Precision, emulate: bool | None) -> FabricPrecision:
    return FabricPrecision(mode, emulate_fp16=emulate)


def _check_mode(mode: Precision) -> None:
    without = ", ".join(("16-mixed", "bf16-mixed", "16-true", "bf16-true", "32-true", "64-true"))
    if mode.masters:
        raise ConfigError(
            f"FabricPrecision: mode {mode.name!r} steps fp32 masters, which Fabric's optimizers know nothing of; "
            f"expected a mode without ({without}), or use paramp.initialize"
        )
    if mode.float8 is not None:
        raise ConfigError(
            f"FabricPrecision: mode {mode.name!r} replaces layers by float8 ones before the model is shared out, which "
            f"only paramp.initialize does; expected one of {without}"
        )


def _map_tensors(function: Callable[[torch.Tensor], torch.Tensor], data: Any) -> Any:
    """``data`` with ``function`` of its tensors, in all collections that Lightning's own plugins look into."""
    from lightning_utilities.core.apply_func import apply_to_collection

    return apply_to_collection(data, torch.Tensor, function)


def _store(module: nn.Module, name: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
    """Change the dtype of a module's own tensor, which stays the same object where it is a parameter."""
    changed = tensor.detach().to(dtype)
    if not isinstance(tensor, nn.Parameter):
        module._buffers[name] = changed
    elif isinstance(tensor, DTensor):  # it takes no other tensor's data
        torch.utils.swap_tensors(tensor, nn.Parameter(changed, tensor.requires_grad))
    else:
        tensor.data = changed


class LogicalGradient(torch.Tensor):
    """The gradient of the whole model, spread over the ranks, for torch's clipping functions; see :meth:`of`.

    Its own content is of no meaning. What is done to it is done to each part, and its norm is that of the whole.
    """

    parts: list[torch.Tensor]
    norm_weights: list[float]

    @staticmethod
    def of(parameters: list[torch.Tensor], device_type: str) -> LogicalGradient:
        """The gradient of ``parameters``, this rank's. Plain ones are the same on every rank."""
        parts = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
        device = parts[0].device if parts else torch.device(device_type)
        logical = torch.zeros((), device=device).as_subclass(LogicalGradient)
        logical.parts = parts
        logical.norm_weights = [1.0 / _num_copies(parameter) for parameter in parameters]
        return logical

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        logical = args[0] if args else None
        if func is torch.linalg.vector_norm and isinstance(logical, LogicalGradient):
            norm_type = float(args[1]) if len(args) > 1 else 2.0
            return total_norm(logical.parts, logical.norm_weights, norm_type, logical.device).float()
        if getattr(func, "__name__", "") in ELEMENTWISE and isinstance(logical, LogicalGradient):
            for part in logical.parts:
                getattr(part, func.__name__)(*args[1:], **kwargs)
            return logical
        return super().__torch_function__(func, types, args, kwargs)


ELEMENTWISE = ("mul_", "clamp_", "clamp_min_", "clamp_max_")
"""The methods with which torch clips."""


def _num_copies(parameter: torch.Tensor) -> int:
    """How many ranks hold each element of ``parameter``. Fabric has no axis along which models differ."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    if not isinstance(parameter, DTensor):
        return world
    sizes = zip(parameter.device_mesh.mesh.shape, parameter.placements, strict=True)
    shards = 1
    for size, placement in sizes:
        shards *= 1 if isinstance(placement, Replicate) else size
    return world // shards
