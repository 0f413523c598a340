"""A precision plugin for Lightning's Trainer: ``Trainer(plugins=TrainerPrecision("16-mixed"), ...)``.

The Trainer takes bf16 for ``precision="16-mixed"`` on a CPU, refuses it with ``ModelParallelStrategy``, and has no loss
scale for ``16-true``; plugins are not restricted. The Trainer's loop, strategies and checkpoints stay as they are. In
place of Lightning's plugin this one computes as an :class:`~paramp.Engine` does, see :mod:`paramp.integrations.fabric`.

In modes with masters, ``16-naive``, ``bf16-naive`` and ``O2``, the module's parameters are in half precision and its
optimizers step fp32 masters (:mod:`paramp.integrations.masters_for_users_optimizers`). Parameters that
``configure_model`` has sharded by ``fully_shard`` stay in fp32: they are the masters, which FSDP2 gathers in half
precision.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..base.dtensor import full_tensor, is_dtensor
from ..base.errors import ConfigError
from ..base.module_surgery import BATCH_NORMS
from ..base.wrapped_models import is_unit, plain_name
from ..optim.user_optimizer import warn_of_eps
from ..parallel.fsdp.fsdp2_internals import groups, held
from ..precision.compute_context import default_dtype_of
from ..precision.modes import Precision
from .gradient_for_torch_clipping import logical_parameter
from .lightning_plugin_base import LightningPrecision
from .masters_for_users_optimizers import ModuleMasters, calls_step_hooks
from .multi_optimizer_scaler import device_types


class TrainerPrecision(LightningPrecision):
    """A plugin for ``lightning.Trainer``; also an instance of ``lightning.pytorch.plugins.Precision``.

    It works with ``SingleDeviceStrategy``, ``DDPStrategy`` and ``ModelParallelStrategy`` (tensor parallelism, FSDP2,
    and both). All ranks of the world skip a step together, in every mode; the Trainer counts it, and steps learning
    rate schedulers, as with Lightning's own plugin. Several optimizers share one loss scale, which is updated once,
    when the next backward begins. Checkpoints hold the scale and, in modes with masters, the masters as the module's
    ``state_dict``.

    Args:
        precision: a value that :meth:`paramp.Precision.parse` accepts, except modes with float8 layers.
        emulate_fp16: compute fp16 products on the CPU in fp32 and round them. None: on CPUs without fp16 arithmetic.
        group: the ranks that decide together whether to step. None: the whole world.

    Raises:
        ConfigError: the mode is unknown or not supported in the Trainer, or lightning is not installed.
    """

    LIGHTNING = "lightning.pytorch.plugins.precision.precision"
    EXTRA = "lightning"

    _masters: ModuleMasters | None = None
    _has_scaled = False

    def _end_init(self) -> None:
        self._known: WeakSet[Any] = WeakSet()  # the optimizers of this fit
        self._hooks = ExitStack()  # removes those of the optimizers
        self._frozen: list[nn.Parameter] = []  # those that DistributedDataParallel does not reduce

    def _check_mode(self) -> None:
        super()._check_mode()
        if self.mode.masters == "remainder":
            raise ConfigError(
                f"TrainerPrecision: masters: got 'remainder', expected 'full', because the Trainer's checkpoints hold "
                f"masters (this is {self.mode.name}); use paramp.initialize"
            )

    def metrics(self) -> dict[str, float]:
        """``loss_scale`` and ``num_skipped``, for ``self.log_dict`` in a LightningModule; synchronises."""
        return {"loss_scale": self.loss_scale, "num_skipped": float(self.num_skipped)}

    # --------------------------------------------------------------------------------------------------------- setup

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Store the weights in the mode's dtype, in place, and keep what they were as masters if the mode has them.

        Raises:
            ConfigError: ``fully_shard`` gathers parameters in another dtype than the mode computes in.
        """
        check_sharded(module, self.mode)
        self._masters = ModuleMasters.of(module) if self.mode.masters else None
        self._frozen = [one for one in module.parameters() if not one.requires_grad]
        return super().convert_module(module)

    def _store(self, module: nn.Module, parameter: nn.Parameter, dtype: torch.dtype) -> None:
        if self._masters is not None and parameter in _sharded(module):
            return
        original = parameter.detach()
        if self._masters is not None and parameter.requires_grad:
            self._masters.add(parameter, original)
        super()._store(module, parameter, dtype)

    def connect(self, model: nn.Module, optimizers: list[Any], lr_schedulers: list[Any]) -> Any:
        """Called by the strategy when the optimizers are made. Raises ConfigError for DeepSpeed's."""
        self._refuse_deepspeed(getattr(getattr(model, "_trainer", None), "strategy", None))
        self._has_scaled = False  # in an earlier fit
        replicas = model.process_group if isinstance(model, DistributedDataParallel) else None
        if replicas is None or replicas.size() == 1:
            self._frozen = []
        for wrapped in optimizers:
            self._take(_bare(wrapped), replicas)
        return super().connect(model, optimizers, lr_schedulers)  # type: ignore[misc]

    def _take(self, optimizer: Any, replicas: dist.ProcessGroup | None = None) -> None:
        """Check ``optimizer``, and let it step masters if the mode has them; ``replicas``: of ModuleMasters.adopt."""
        self._check_optimizer(optimizer)
        if self._scale.is_enabled() and calls_step_hooks(optimizer):
            hook = functools.partial(self._refuse_scaled, optimizer)
            self._hooks.callback(optimizer.register_step_pre_hook(hook).remove)
        if self._masters is not None:
            self._masters.adopt(optimizer, replicas)
        else:
            warn_of_eps(optimizer)
        self._known.add(optimizer)

    def _refuse_scaled(self, optimizer: Any, *_: Any) -> None:
        """Before a step: raise a RuntimeError if the gradients may be scaled, as in a step without the plugin."""
        if not self._has_scaled or self._scale.has_unscaled(optimizer):
            return
        if any(group.get("lr", True) for group in optimizer.param_groups):  # torch makes states by a step with lr 0
            raise RuntimeError(
                "optimizer.step(): its gradients may be scaled; call self.manual_backward(loss), and step() of "
                "self.optimizers(), which unscales them, not of the optimizer inside"
            )

    def _refuse_unfrozen(self, optimizer: Any, model: nn.Module) -> None:
        """Raise a RuntimeError if ``optimizer`` trains parameters that DistributedDataParallel does not reduce."""
        unfrozen = {one for one in self._frozen if one.requires_grad}
        found = unfrozen and unfrozen.intersection(one for group in optimizer.param_groups for one in group["params"])
        if found:
            name = next(name for name, one in model.named_parameters() if one in found)
            raise RuntimeError(
                f"optimizer.step(): {name!r} was frozen when DDPStrategy wrapped the module, and is trained now: "
                "DistributedDataParallel would not average its gradient over ranks; unfreeze it in a second fit, or "
                "freeze it later, in on_train_start, with find_unused_parameters=True"
            )

    def convert_input(self, data: Any) -> Any:
        """Cast a batch to the compute dtype in modes without autocast, targets too, as Lightning's plugins do."""
        return data if self.mode.autocast else super().convert_input(data)

    def teardown(self) -> None:
        """Called at the end of a fit or an evaluation: store the masters as the module's parameters, in fp32."""
        self._scale.forget()  # the next fit makes other optimizers
        self._hooks.close()
        self._known.clear()
        self._frozen = []
        if self._masters is not None:
            self._masters.restore()
        super().teardown()  # type: ignore[misc]

    # ------------------------------------------------------------------------------------------------------ training

    def forward_context(self) -> AbstractContextManager[Any]:
        """A context in which the mode computes; weights have what was written to the module's ``state_dict`` before."""
        if self._masters is not None:
            self._masters.round_written()
        return super().forward_context()

    def pre_backward(self, tensor: torch.Tensor, module: Any) -> Any:
        """Scale the loss ``tensor``, 0-dim, in fp32 at least; then Lightning's hooks."""
        if self._masters is not None:
            self._masters.check_scaled()
        self._has_scaled = True
        loss = full_tensor(tensor)
        scaled = self._scale.scale(loss.to(torch.promote_types(loss.dtype, torch.float32)))
        return super().pre_backward(scaled, module)  # type: ignore[misc]

    def backward(self, tensor: torch.Tensor, model: Any, *args: Any, **kwargs: Any) -> None:
        """Run the backward of the scaled loss ``tensor``, by ``LightningModule.backward``."""
        with self._computing(autocast=False), default_dtype_of(self.mode):
            super().backward(tensor, model, *args, **kwargs)  # type: ignore[misc]

    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Call ``closure``, which runs the backward, clip, and step on every rank or on none.

        If there was no backward, as when ``training_step`` returns None, or in the pass of StochasticWeightAveraging
        for batch norms, nothing is stepped in automatic optimization, and no hook is called.

        Returns:
            The result of ``closure``.

        Raises:
            RuntimeError: in manual optimization, a backward without ``self.manual_backward``, in a mode that scales;
                or, under DDPStrategy, a parameter that was frozen when the fit began.
        """
        bare = _bare(optimizer)
        if bare not in self._known:
            self._take(bare)  # it was made after the fit began
        self._refuse_unfrozen(bare, model)
        if model.automatic_optimization:
            self._has_scaled = False
        result = closure()
        if model.automatic_optimization and not self._has_scaled:
            return result
        if self.mode.scaling is not None and not self._has_scaled:
            raise RuntimeError(
                "optimizer.step(): no loss was scaled before; call self.manual_backward(loss) instead of "
                "loss.backward()"
            )
        self.unscale_gradients(optimizer)
        self._after_closure(model, optimizer)  # type: ignore[attr-defined]  # Lightning's
        self._scale.step(optimizer, **kwargs)
        if self._masters is not None:
            self._masters.drop_gradients(optimizer)
        optimizer._opt_called = True  # else a scheduler's first step warns, if the optimizer's was skipped
        return result

    def unscale_gradients(self, optimizer: Any) -> None:
        """Divide the gradients of ``optimizer`` by the loss scale, unless that was done since the last step.

        Raises:
            RuntimeError: in modes with masters, another optimizer has divided one of them since the last backward.
        """
        bare = _bare(optimizer)
        if self._masters is None or self._scale.has_unscaled(bare):
            super().unscale_gradients(bare)
            return
        done = [one for one in self._scale.unscaled_of(bare) if one.grad is not None]
        if done and self._scale.is_enabled():
            raise RuntimeError(
                f"optimizer: a parameter of shape {tuple(done[0].shape)} is in another optimizer too, which has "
                "unscaled its gradient since the last backward; call self.manual_backward(loss) before the step of "
                "each, or keep each parameter in one"
            )
        with self._masters.unscaling(bare):
            super().unscale_gradients(bare)

    def main_params(self, optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
        """The parameters that are clipped: one, whose unscaled gradient represents the whole model's."""
        self.unscale_gradients(optimizer)  # in manual optimization users clip before the step
        if self._masters is None:
            yield from super().main_params(optimizer)
        else:
            self._masters.take_changes(_bare(optimizer))  # of hooks, which come first: later they would undo clipping
            yield logical_parameter(self._masters.stepped(_bare(optimizer)), device_types(self._models)[0])

    def clip_gradients(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """Clip as Lightning does; the gradients of half-precision weights become the clipped ones of their masters."""
        super().clip_gradients(optimizer, *args, **kwargs)  # type: ignore[misc]
        if self._masters is not None and self._scale.has_unscaled(_bare(optimizer)):
            self._masters.take_changes(_bare(optimizer))  # with a clip_val of 0 nothing has
            self._masters.give_gradients(_bare(optimizer))

    # --------------------------------------------------------------------------------------------------- checkpoints

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add what may be masters in a whole ``checkpoint``: the fp32 tensors of its ``state_dict``, without copies.

        ``ModelParallelStrategy`` loads that file into the half-precision weights themselves, so they are loaded again.
        """
        state = checkpoint.get("state_dict", {})
        if self._masters is not None and not any(map(is_dtensor, state.values())):
            tensors = {plain_name(name): value for name, value in state.items() if isinstance(value, torch.Tensor)}
            masters = {name: value for name, value in tensors.items() if value.dtype is torch.float32}
            checkpoint.setdefault(type(self).__qualname__, {})["masters"] = masters

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of :meth:`state_dict`, of a checkpoint, or of torch's ``GradScaler``."""
        rest = dict(state_dict)
        masters = rest.pop("masters", None)
        super().load_state_dict(rest)
        if self._masters is not None and masters is not None:
            self._masters.load_whole(masters)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take over the scale of Lightning's ``MixedPrecision`` from a ``checkpoint`` that was saved with it."""
        if type(self).__qualname__ not in checkpoint and (stock := checkpoint.get("MixedPrecision")):
            self.load_state_dict(stock)


def _sharded(module: nn.Module) -> set[nn.Parameter]:
    """The parameters of ``module`` that ``fully_shard`` has sharded."""
    units = filter(is_unit, module.modules())
    return {held(one) for unit in units for group in groups(unit) for one in group.fsdp_params}


def check_sharded(module: nn.Module, mode: Precision) -> None:
    """Check that the units of FSDP2 in ``module`` compute in ``mode``.

    Raises:
        ConfigError: a unit gathers its parameters in another dtype, or is to hold masters and is not in fp32.
    """
    norms = {one for child in module.modules() if isinstance(child, BATCH_NORMS) for one in child.parameters()}
    found = ((name, group) for name, unit in module.named_modules() if is_unit(unit) for group in groups(unit))
    for name, group in found:
        parameters = {held(one) for one in group.fsdp_params}
        where, gathered = repr(name) if name else "the module itself", group.fsdp_params[0].mp_policy.param_dtype
        allowed = [mode.compute] if mode.masters else [None, mode.compute, mode.weights]
        if mode.keep_batchnorm_fp32 and parameters <= norms:
            allowed = [None, torch.float32]
        if gathered not in allowed:
            raise ConfigError(
                f"TrainerPrecision: fully_shard gathers the parameters of {where} in {gathered}, expected "
                f"{allowed[0]} because the mode is {mode.name!r}; in configure_model pass "
                f"mp_policy=MixedPrecisionPolicy(param_dtype={allowed[0]}), or choose another mode"
            )
        stored = {one.dtype for one in parameters if one.is_floating_point()} - {torch.float32}
        if mode.masters and stored:
            raise ConfigError(
                f"TrainerPrecision: {where} was sharded with parameters in {stored.pop()}, expected torch.float32 "
                f"because they are the masters of mode {mode.name!r}; fully_shard gathers them in {mode.compute}"
            )


def _bare(optimizer: Any) -> Any:
    """The optimizer that ``configure_optimizers`` returned, without Lightning's wrapper."""
    from lightning.pytorch.core.optimizer import LightningOptimizer

    return optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
