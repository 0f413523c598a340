"""Models that torch has wrapped or changed: compiled ones are unwrapped, distributed ones are refused.

Nothing is imported to recognise them: a class that has not been loaded has no instances.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

from .dtensor import is_dtensor
from .errors import ConfigError

REFUSED = {
    ("torch.nn.parallel", "DataParallel"): "remove DataParallel(...): start one process for each GPU instead",
    ("torch.nn.parallel", "DistributedDataParallel"): (
        "remove DistributedDataParallel(...): the engine averages gradients over the data ranks itself"
    ),
    ("torch.distributed.fsdp", "FullyShardedDataParallel"): (
        "remove FullyShardedDataParallel(...): parallel.zero=1 shards masters and optimizer state over the data ranks"
    ),
    ("torch.distributed.fsdp", "FSDPModule"): (
        "remove fully_shard(...): parallel.zero=1 shards masters and optimizer state over the data ranks. To keep "
        "FSDP2, write the loop yourself, with paramp.DistributedGradScaler and paramp.clip_grad_norm_"
    ),
}
"""(module, class) -> the fix for a model with an instance of it."""


def check_plain(model: nn.Module) -> None:
    """Check that no module of ``model`` is distributed already.

    Raises:
        ConfigError: DataParallel, DDP or FSDP wraps a module, or a parameter is a DTensor.
    """
    for (home, name), fix in REFUSED.items():
        kind = getattr(sys.modules.get(home), name, None)
        for path, module in model.named_modules():
            if kind is not None and isinstance(module, kind):
                what = f"{path!r} is" if path else "it is"
                shown = "sharded by fully_shard" if name == "FSDPModule" else f"a {name}"
                raise ConfigError(f"model: {what} {shown}, expected the plain model; {fix}")
    for path, parameter in model.named_parameters():
        if is_dtensor(parameter):
            raise ConfigError(
                f"model: {path!r} is a DTensor already, with {parameter.placements}, expected a plain tensor; build "
                "a new model if initialize has had this one, or remove parallelize_module and distribute_tensor: "
                "initialize shards the model by plan={module name: style}"
            )


def without_compilation(model: nn.Module) -> tuple[nn.Module, bool]:
    """``model`` without ``torch.compile``, changed in place, and whether any of it was compiled."""
    kind: Any = getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizedModule", ())
    found = isinstance(model, kind)
    model = _original(model, kind)
    for module in model.modules():  # which goes on with the children that it finds after the loop's body
        for name, child in module._modules.items():
            if isinstance(child, kind):
                module._modules[name], found = _original(child, kind), True
        found |= _undo_own(module)
    return model, found


def _original(module: Any, kind: Any) -> nn.Module:
    return _original(module._orig_mod, kind) if isinstance(module, kind) else module


def _undo_own(module: nn.Module) -> bool:
    """Undo ``module.compile()`` and ``module.forward = torch.compile(module.forward)``; False if there was neither."""
    compiled = vars(module).get("forward")
    in_forward = hasattr(compiled, "_torchdynamo_orig_callable")
    if in_forward:
        original = compiled.__wrapped__  # type: ignore[union-attr]
        del module.__dict__["forward"]
        if getattr(original, "__func__", None) is not type(module).forward:  # itself an attribute of this module only
            module.__dict__["forward"] = original
    in_call = vars(module).pop("_compiled_call_impl", None) is not None
    return in_forward or in_call
