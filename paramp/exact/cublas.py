"""The workspace of cuBLAS, with which its matrix products add in one order.

cuBLAS reads the variable ``CUBLAS_WORKSPACE_CONFIG`` once, at its first call in a process. Set later it has no effect.
"""

from __future__ import annotations

import os

import torch

from ..base.errors import ConfigError

VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
VALUES = ":4096:8", ":16:8"
"""Those with which it adds in one order; the first is the faster one."""


def choose_workspace() -> None:
    """Set the variable, for a process that will compute on a GPU; call it before CUDA is initialised.

    Raises:
        ConfigError: the variable has another value, or is not set where CUDA is initialised already, so that cuBLAS may
            have read it.
    """
    value = os.environ.get(VARIABLE)
    if value in VALUES:
        return
    if value is not None:
        raise ConfigError(
            f"{VARIABLE}: got {value!r}, expected {' or '.join(map(repr, VALUES))}, because reproducible is set, and "
            "with other workspaces cuBLAS adds in an order that changes from run to run"
        )
    if torch.cuda.is_initialized():
        raise ConfigError(
            f"{VARIABLE}: it is not set, but CUDA is in use already, and reproducible needs it before cuBLAS is first "
            f"called; set {VARIABLE}={VALUES[0]} in the environment of the process, or call paramp.launch_from_torch "
            "before anything runs on a GPU"
        )
    os.environ[VARIABLE] = VALUES[0]
