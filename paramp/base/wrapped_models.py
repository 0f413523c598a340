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
        "remove FullyShardedDataParallel(...): parallel.data.shard shards the parameters over that many data ranks"
    ),
    ("torch.distributed.fsdp", "FSDPModule"): (
        "remove fully_shard(...): parallel.data.shard does it, over that many data ranks. To keep your own, write the "
        "loop yourself, with paramp.DistributedGradScaler and paramp.clip_grad_norm_"
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


def class_name(module: nn.Module) -> str:
    """The name of the class of ``module``; of the user's, if ``fully_shard`` has derived another from it."""
    kind, derived = type(module), getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
    return (kind.__bases__[-1] if isinstance(module, derived) else kind).__name__


UNUSABLE = {
    ("torch.nn.parallel", "DataParallel"): "start one process for each GPU, with DistributedDataParallel",
    ("torch.distributed.fsdp", "FullyShardedDataParallel"): "shard the model with fully_shard (FSDP2)",
}
"""(module, class) -> the fix for a model of another's loop, whose parameters are not those of its modules."""
SEGMENTS = ("_orig_mod", "_checkpoint_wrapped_module")
"""What wrappers of torch add to the names of modules inside them; distributed checkpoints leave it out."""


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside DDP and ``torch.compile``; ``model`` itself if it is in neither.

    Raises:
        ConfigError: it is no module, or one of :data:`UNUSABLE` has its parameters.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model: got {type(model).__name__}, expected a torch.nn.Module")
    for module in model.modules():
        for (home, name), fix in UNUSABLE.items():
            if _is(module, home, name):
                raise ConfigError(f"model: got a {name}, whose parameters are not those of its modules; {fix}")
    while True:
        if is_ddp(model):
            model = model.module  # type: ignore[assignment]
        elif _is(model, "torch._dynamo.eval_frame", "OptimizedModule"):
            model = model._orig_mod  # type: ignore[assignment]
        else:
            return model


def is_ddp(module: nn.Module) -> bool:
    """Whether ``module`` is a ``DistributedDataParallel``."""
    return _is(module, "torch.nn.parallel", "DistributedDataParallel")


def is_unit(module: nn.Module) -> bool:
    """Whether ``module`` is a unit of FSDP2."""
    return _is(module, "torch.distributed.fsdp", "FSDPModule")


def is_compiled(module: nn.Module) -> bool:
    """Whether ``torch.compile`` has compiled ``module`` itself."""
    return module._compiled_call_impl is not None or _is(module, "torch._dynamo.eval_frame", "OptimizedModule")


def plain_name(name: str) -> str:
    """The name of a module or parameter without what wrappers inside the model add to it."""
    return ".".join(part for part in name.split(".") if part not in SEGMENTS)


def _is(module: nn.Module, home: str, name: str) -> bool:
    return isinstance(module, getattr(sys.modules.get(home), name, ()))


def without_compilation(model: nn.Module) -> tuple[nn.Module, dict[str, Any] | None]:
    """``model`` without ``torch.compile``, changed in place, and the options with which it was compiled.

    They are those of the outermost module that was; None if nothing was compiled.
    """
    kind: Any = getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizedModule", ())
    found: list[Any] = []  # torch's contexts, the outermost first
    model = _original(model, kind, found)
    for module in model.modules():  # which goes on with the children that it finds after the loop's body
        _undo_own(module, found)
        for name, child in module._modules.items():
            if isinstance(child, kind):
                module._modules[name] = _original(child, kind, found)
    return model, _options(found[0]) if found else None


def _original(module: Any, kind: Any, found: list[Any]) -> nn.Module:
    if not isinstance(module, kind):
        return module
    if module.dynamo_ctx.callback is None:  # torch.compiler.disable(module), which stays so within a compiled block
        module._orig_mod.forward = module.dynamo_ctx(module._orig_mod.forward)
    else:
        found.append(module.dynamo_ctx)
    return _original(module._orig_mod, kind, found)


def _undo_own(module: nn.Module, found: list[Any]) -> None:
    """Undo ``module.compile()`` and ``module.forward = torch.compile(module.forward)``."""
    compiled = vars(module).get("forward")
    if hasattr(compiled, "_torchdynamo_orig_callable") and not hasattr(compiled, "_torchdynamo_disable"):
        found.append(_context(compiled))
        original = compiled.__wrapped__  # type: ignore[union-attr]
        del module.__dict__["forward"]
        if getattr(original, "__func__", None) is not type(module).forward:  # itself an attribute of this module only
            module.__dict__["forward"] = original
    called = vars(module).pop("_compiled_call_impl", None)
    if called is not None:
        found.append(_context(called))


def _context(compiled: Any) -> Any:
    """torch's context of the function that ``torch.compile`` has returned, which is a closure over it."""
    names = compiled.__code__.co_freevars
    return compiled.__closure__[names.index("self")].cell_contents if "self" in names else None


def _options(context: Any) -> dict[str, Any]:
    """The options of ``torch.compile`` in its ``context``. The backend includes ``mode`` and ``options``."""
    backend: Any = getattr(context, "callback", None)
    while hasattr(backend, "_torchdynamo_orig_backend"):
        backend = backend._torchdynamo_orig_backend
    if backend is None:
        return {}
    dynamic, fullgraph = getattr(backend, "dynamic", None), getattr(context, "fullgraph", False)
    return {"backend": backend, "dynamic": dynamic, "fullgraph": fullgraph}
