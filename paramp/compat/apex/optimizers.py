"""Apex's fused Adam and SGD if NVIDIA's Apex is installed with its kernels, else torch's under the same names.

Both step all parameters of a group in a few kernels. The arguments are Apex's. ``FusedLAMB``, ``FusedNovoGrad`` and
``FusedAdagrad`` are Apex's own; without its kernels, importing one is an ImportError.
"""

import importlib
from collections.abc import Iterable
from typing import Any

import torch

from ...base.installed_packages import find_apex
from ..missing import missing

Params = Iterable[torch.Tensor] | Iterable[dict[str, Any]]


def FusedAdam(
    params: Params,
    lr: float = 1e-3,
    bias_correction: bool = True,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    adam_w_mode: bool = True,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
    set_grad_none: bool = True,
) -> torch.optim.Optimizer:
    """Adam; with ``adam_w_mode`` decoupled weight decay (AdamW).

    Raises:
        ValueError: ``amsgrad``, which Apex's does not have; or, without Apex, ``bias_correction=False``, which torch's
            Adam does not have.
    """
    if amsgrad:
        raise ValueError("amsgrad: got True, but Apex's FusedAdam does not have it; use torch.optim.AdamW")
    arguments = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
    if find_apex().fused_optimizers:
        own = {"bias_correction": bias_correction, "adam_w_mode": adam_w_mode, "set_grad_none": set_grad_none}
        made: torch.optim.Optimizer = importlib.import_module("apex.optimizers").FusedAdam(params, **arguments, **own)
        return made
    if not bias_correction:
        raise ValueError("bias_correction: got False, which torch's Adam does not have; install NVIDIA's Apex")
    return (torch.optim.AdamW if adam_w_mode else torch.optim.Adam)(params, **arguments)  # type: ignore[arg-type]


def FusedSGD(
    params: Params,
    lr: float,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    wd_after_momentum: bool = False,
    materialize_master_grads: bool = True,
    set_grad_none: bool = False,
) -> torch.optim.Optimizer:
    """SGD with momentum.

    ``materialize_master_grads`` and ``set_grad_none`` have no effect on results: gradients of masters are always made,
    and torch's ``zero_grad()`` drops gradients by default.

    Raises:
        ValueError: without Apex, ``wd_after_momentum`` with a weight decay, which torch's SGD does not have.
    """
    arguments = {"lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay}
    if find_apex().fused_optimizers:
        own = {"wd_after_momentum": wd_after_momentum, "materialize_master_grads": True, "set_grad_none": set_grad_none}
        kind = importlib.import_module("apex.optimizers").FusedSGD
        made: torch.optim.Optimizer = kind(params, nesterov=nesterov, **arguments, **own)
        return made
    made = torch.optim.SGD(params, nesterov=nesterov, **arguments)  # type: ignore[arg-type]
    if wd_after_momentum and any(group["weight_decay"] for group in made.param_groups):
        raise ValueError("wd_after_momentum: got True, which torch's SGD does not have; install NVIDIA's Apex")
    return made


_WITHOUT_APEX = missing(
    __name__,
    {
        "FusedLAMB": "torch has no LAMB; install NVIDIA's Apex with --cuda_ext, or use FusedAdam and tune lr for it",
        "FusedNovoGrad": "torch has no NovoGrad; install NVIDIA's Apex with --cuda_ext, or use FusedAdam",
        "FusedAdagrad": "use torch.optim.Adagrad, or install NVIDIA's Apex with --cuda_ext",
        "FusedMixedPrecisionLamb": "use amp.initialize(..., opt_level='O2') with FusedLAMB, which keeps fp32 masters",
        "FP16_Optimizer": "use amp.initialize(model, optimizer, opt_level='O2')",
    },
)


def __getattr__(name: str) -> Any:
    if name in ("FusedLAMB", "FusedNovoGrad", "FusedAdagrad") and find_apex().fused_optimizers:
        return getattr(importlib.import_module("apex.optimizers"), name)
    return _WITHOUT_APEX(name)
