"""A precision plugin for Lightning Fabric: ``Fabric(plugins=paramp.FabricPrecision("16-mixed"), ...)``.

Fabric does not support ``precision="16-mixed"`` on the CPU, nor with ``ModelParallelStrategy``, because torch's
``GradScaler`` decides from the gradients of one rank whether to skip a step; plugins are not restricted. This plugin
keeps Fabric's loop and computes as an :class:`~paramp.Engine` does: the mode's dtypes, norms and softmax that are the
same on CPU and CUDA, fp16 products on CPUs without fp16, a :class:`~paramp.DistributedGradScaler` that all ranks share,
and in every mode a step that all ranks skip if a gradient of any rank is not finite.

:class:`~paramp.integrations.lightning.TrainerPrecision` does the same for Lightning's Trainer.
"""

from __future__ import annotations

import functools
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from ..base.errors import ConfigError
from ..optim.user_optimizer import warn_of_eps
from ..precision.compute_context import default_dtype_of, to_outputs
from .lightning_plugin_base import LightningPrecision, map_tensors

STEPPED: WeakSet[Any] = WeakSet()
"""The optimizers that a plugin of this module has stepped."""


class FabricPrecision(LightningPrecision):
    """A plugin for ``lightning.fabric.Fabric``; also an instance of Lightning's ``Precision``.

    Every rank of the world trains one model: tensor-parallel (DTensor parameters, as ``ModelParallelStrategy`` makes
    them, or made before ``fabric.setup``), data-parallel, or both. Several models and optimizers share one loss scale,
    which is updated when the next backward begins, so that all of them are unscaled with the scale of their backward.

    Save the plugin as ``{"precision": plugin}``: its :meth:`state_dict` holds the scale.

    Args:
        precision: a value that :meth:`Precision.parse` accepts, except modes with fp32 masters, which Fabric's
            optimizers do not support, and modes with float8 layers.
        emulate_fp16: compute fp16 products on the CPU in fp32 and round them. None: on CPUs without fp16 arithmetic.
        group: the ranks that decide together whether to step. None: the whole world.

    Raises:
        ConfigError: the mode is unknown or not supported in Fabric, or lightning is not installed.
    """

    LIGHTNING = "lightning.fabric.plugins.precision.precision"
    EXTRA = "fabric"

    def _end_init(self) -> None:
        if not self.mode.autocast and self.mode.scaling is None:
            # If the method is overridden, Fabric rejects a plain loss.backward(), which is correct here, only slower
            # with fp16 products on CPUs.
            backward = functools.partial(self.backward)
            self.backward = functools.update_wrapper(backward, super().backward)  # type: ignore[method-assign,misc]

    def _check_mode(self) -> None:
        if self.mode.masters:
            raise ConfigError(
                f"FabricPrecision: mode {self.mode.name!r} steps fp32 masters, which Fabric's optimizers do not "
                "support; expected a mode without (16-mixed, bf16-mixed, 16-true, bf16-true, 32-true, 64-true), or use "
                "paramp.initialize"
            )
        super()._check_mode()

    def convert_output(self, data: Any) -> Any:
        """Cast floating-point tensors to fp32 at least."""
        return map_tensors(to_outputs, data, self.mode)

    def backward(self, tensor: torch.Tensor, model: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        """Scale the loss ``tensor``, 0-dim, and run its backward. Raises ConfigError for a ``model`` of DeepSpeed."""
        self._refuse_deepspeed(model)
        scaled = self._scale.scale(tensor)
        with self._computing(autocast=False), default_dtype_of(self.mode):
            scaled.backward(*args, **kwargs)

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Step ``optimizer``, on every rank or on none. A ``closure`` is called once, before.

        Raises:
            ConfigError: ``optimizer`` evaluates its closure many times per step (LBFGS).
        """
        self._check_optimizer(optimizer)
        if optimizer not in STEPPED:  # Fabric tells a plugin of an optimizer only in its steps
            STEPPED.add(optimizer)
            warn_of_eps(optimizer)
        closure = kwargs.pop("closure", None)
        if closure is None:
            return self._scale.step(optimizer, **kwargs)
        with torch.enable_grad():
            output = closure()
        self._scale.step(optimizer, **kwargs)
        return output
