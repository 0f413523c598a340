"""Partitioning modules and replacing parameters; names and ties are kept. Globs over names of modules."""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import MethodType
from typing import Any, TypeAlias

import torch
from torch import nn

from .errors import ConfigError
from .torch_internals import expect

expect("torch.nn.modules.batchnorm._BatchNorm")

NamedParameters: TypeAlias = list[tuple[str, nn.Parameter]]


class PassThrough(nn.Module):
    """Replaces a module that is on another pipeline stage; returns its first argument."""

    def forward(self, x: Any = None, *args: Any, **kwargs: Any) -> Any:
        return kwargs.get("hidden_states", x)


def shallow_copy(module: nn.Module) -> nn.Module:
    """A shallow copy; unlike ``copy.copy``, also of modules that refuse to be pickled, such as parametrized ones."""
    copied: nn.Module = type(module).__new__(type(module))
    copied.__dict__.update(module.__dict__)
    for name in ("forward", "train"):
        method = vars(module).get(name)
        if isinstance(method, MethodType) and method.__self__ is module:
            copied.__dict__[name] = MethodType(method.__func__, copied)
    return copied


def copy_on_meta(module: nn.Module) -> nn.Module:
    """A copy of ``module``, whose tensors are on ``meta``: its structure, without its memory."""
    copied = shallow_copy(module)
    copied._modules = {name: child and copy_on_meta(child) for name, child in module._modules.items()}
    for table in ("_parameters", "_buffers"):
        tensors = getattr(module, table).items()
        setattr(copied, table, {name: None if value is None else value.detach().to("meta") for name, value in tensors})
    return copied


def with_forward(module: nn.Module, forward: Callable[..., Any]) -> nn.Module:
    """A shallow copy of ``module``, with the same submodules and parameters, whose forward is ``forward``."""
    changed = shallow_copy(module)
    changed.__dict__["forward"] = forward
    return changed


def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> nn.Module:
    """``module``, whose forward is ``forward(module, ...)`` from now on, also in copies of it."""
    module.__dict__["forward"] = MethodType(forward, module)
    return module


def run_within(module: nn.Module, context: Callable[[nn.Module], AbstractContextManager[Any] | None]) -> None:
    """Run each forward of ``module`` inside a new ``context(module)``, if that is not None, from now on.

    It is the forward of the class that it has then: :func:`~paramp.base.replace_class.replace_class` may change that.
    Hooks of ``module`` run outside.
    """
    replaced = vars(module).get("forward")
    own = type(module).forward if replaced is None else unbound(replaced, module)

    @functools.wraps(own)
    def forward(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        run = type(module).forward if replaced is None else own
        entered = context(module)
        if entered is None:
            return run(module, *args, **kwargs)
        with entered:
            return run(module, *args, **kwargs)

    setattr(forward, OF_CLASS, runs_forward_of_class(module))
    replace_forward(module, forward)


def turn_off_fast_path(module: nn.Module, layers: Iterable[str]) -> None:
    """Let torch's encoder layers call the ``layers`` inside, by their names in ``module``, in evaluation too: else one
    kernel computes with their parameters."""
    names = list(layers)
    for name, child in module.named_modules(remove_duplicate=False):
        if any(inner.startswith(f"{name}." if name else "") for inner in names):
            if isinstance(child, nn.TransformerEncoderLayer):
                child.activation_relu_or_gelu = 0
            elif isinstance(child, nn.TransformerEncoder):
                child.use_nested_tensor = False


def unbound(forward: Callable[..., Any], module: nn.Module) -> Callable[..., Any]:
    """``forward``, the value of that attribute of ``module``, as a function of the module and the inputs."""
    if isinstance(forward, MethodType) and forward.__self__ is module:
        return forward.__func__

    @functools.wraps(forward)
    def run(_: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    return run


OF_CLASS = "_runs_forward_of_class"


def runs_forward_of_class(module: nn.Module) -> bool:
    """Whether the forward of ``module`` is that of any class it is given, perhaps inside a :func:`run_within`."""
    replaced = vars(module).get("forward")
    return replaced is None or getattr(replaced, OF_CLASS, False)


def has_own_forward(module: nn.Module) -> bool:
    """Whether a forward was set on the object ``module`` that is not just that of its class, as one in a context."""
    replaced = vars(module).get("forward")
    return replaced is not None and getattr(replaced, "__func__", None) is not type(module).forward


def check_forward_of_class(
    name: str, module: nn.Module, who: str = "copies of it with a part of its modules, or without a cache,"
) -> None:
    """Raise a ConfigError if ``module``, called ``name``, has a forward of its own, which ``who`` would not run."""
    if has_own_forward(module):
        kind = type(module).__name__
        if str(getattr(module.forward, "__module__", "")).startswith("paramp."):
            raise ConfigError(
                f"model: {name or kind!r} has a forward that was set on the object by paramp, as on an engine's module "
                "and its copies; build the model anew, and load engine.full_state_dict() into it"
            )
        raise ConfigError(
            f"model: {name or kind!r} has a forward that was set on the object, expected that of its class, {kind}, "
            f"because {who} run that; define the forward in a subclass, and set __class__ of the object to it"
        )


@contextmanager
def with_parameters(module: nn.Module, values: Mapping[str, torch.Tensor | None]) -> Iterator[None]:
    """A context in which the parameters of ``module`` are ``values``."""
    own = module._parameters
    module._parameters = {**own, **values}  # type: ignore[dict-item]
    try:
        yield
    finally:
        module._parameters = own


def keep_only(module: nn.Module, paths: Collection[str], prefix: str = "", *, in_own_train: bool = False) -> nn.Module:
    """A copy of ``module`` with only the modules, parameters and buffers ``paths``, under their names in it.

    The modules that contain them are copied; the named ones are shared. A ``train`` that a class defines may set the
    modes of other modules in it, and gets stand-ins of these without memory. ``in_own_train``: there is one further up.
    """
    part = shallow_copy(module)
    own_train = type(module).train
    # transformers' sets no modes, and may ask for the device of the first parameter.
    has_own_train = own_train is not nn.Module.train and own_train.__module__ != "transformers.modeling_utils"
    if has_own_train:
        part.__dict__["train"] = MethodType(_train_with_absent, part)
    in_own_train |= has_own_train
    part._modules = {}
    for name, child in module._modules.items():  # named_children() skips a module's second name
        path = f"{prefix}{name}"
        if child is None or path in paths:
            part._modules[name] = child
        elif any(wanted.startswith(f"{path}.") for wanted in paths):
            part._modules[name] = keep_only(child, paths, f"{path}.", in_own_train=in_own_train)
    if in_own_train:
        children = module._modules.items()
        part.__dict__[ABSENT] = {
            name: None if child is None or name in part._modules else copy_on_meta(child) for name, child in children
        }
    for kind in ("_parameters", "_buffers"):
        tensors = getattr(module, kind).items()
        kept = {name: value for name, value in tensors if value is None or f"{prefix}{name}" in paths}
        part.__dict__[kind] = kept
    return part


ABSENT = "_paramp_absent"
"""The attribute of a part of a module with all names of its children, in their order, and stand-ins of absent ones."""


def _train_with_absent(part: nn.Module, mode: bool = True) -> nn.Module:
    """Call the ``train`` of the class of ``part`` as if it and the parts in it had all of their children."""
    incomplete = [(one, one._modules) for one in part.modules() if ABSENT in vars(one)]
    try:
        for one, own in incomplete:
            one._modules = {**vars(one)[ABSENT], **own}
        type(part).train(part, mode)
    finally:
        for one, own in incomplete:
            one._modules = own
    return part


def named_tensors(module: nn.Module, *, remove_duplicate: bool = True) -> list[tuple[str, torch.Tensor]]:
    """The parameters, then the buffers, by name; without ``remove_duplicate``, each under all of its names."""
    return [
        *module.named_parameters(remove_duplicate=remove_duplicate),
        *module.named_buffers(remove_duplicate=remove_duplicate),
    ]


def names_outside(module: nn.Module, paths: Iterable[str]) -> list[str]:
    """Names of the parameters and buffers of ``module`` that are not in ``paths``, and not in a module in ``paths``."""
    known = set(paths)
    return [name for name, _ in named_tensors(module, remove_duplicate=False) if known.isdisjoint(_prefixes(name))]


def _prefixes(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[: count + 1]) for count in range(len(parts))]


def matches(name: str, pattern: str) -> bool:
    """Whether ``name`` matches ``pattern``.

    ``*`` matches any characters of one part between dots, ``**`` any number of parts.
    """
    return _match(name.split("."), pattern.split("."))


def _match(parts: Sequence[str], patterns: Sequence[str]) -> bool:
    if not patterns:
        return not parts
    if patterns[0] == "**":
        return any(_match(parts[skipped:], patterns[1:]) for skipped in range(len(parts) + 1))
    return bool(parts) and fnmatch.fnmatchcase(parts[0], patterns[0]) and _match(parts[1:], patterns[1:])


@contextmanager
def keeping_ties(module: nn.Module) -> Iterator[list[tuple[str, ...]]]:
    """On exit, tie the parameters of ``module`` again that were tied on entry, to the one of the first name.

    Yields:
        The names of each tied parameter.
    """
    shared = [tuple(names) for names in names_by_parameter(module).values() if len(names) > 1]
    yield shared
    for first, *others in shared:
        parameter = module.get_parameter(first)
        for name in others:
            owner, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(owner), leaf, parameter)


BATCH_NORMS = (nn.modules.batchnorm._BatchNorm,)


def is_router(module: nn.Module) -> bool:
    """Whether ``module`` is what chooses the experts of a token, in a model of transformers, torchtitan or paramp."""
    kinds = (kind for kind in type(module).__mro__ if kind.__module__.partition(".")[0] in ROUTED)
    return any(part in kind.__name__ for kind in kinds for part in ROUTERS)


ROUTED = ("transformers", "transformers_modules", "torchtitan", "paramp")
ROUTERS = ("Router", "TopKGating", "MoEV1Gate")
"""Parts of the names of routers' classes; the last two are JetMoe's and HunYuan's."""


SCORE_BIAS = "e_score_correction_bias"
"""The name of such a bias in transformers' routers, or in the blocks around them."""


def cast_parameters(
    module: nn.Module,
    dtype: torch.dtype,
    *,
    keep_batchnorm_fp32: bool = False,
    untrained: torch.dtype | None = None,
    replace: bool = False,
) -> None:
    """Store the floating-point parameters and buffers of ``module`` in ``dtype``; those of several names stay one.

    Trained parameters stay the same objects, as in ``module.half()``, but lose their gradients. DTensors and parameters
    of other classes of tensors are replaced, because ``.data`` of these cannot be assigned.

    Args:
        keep_batchnorm_fp32: store those of batch norms in fp32.
        untrained: another dtype for frozen parameters and for buffers.
        replace: replace all parameters, so that the old ones keep their values.
    """
    seen: set[nn.Parameter] = set()  # those that have several names
    cast: dict[tuple[torch.Tensor, torch.dtype], torch.Tensor] = {}  # and such buffers
    with keeping_ties(module):
        for submodule in module.modules():
            for name, parameter in list(submodule.named_parameters(recurse=False)):
                in_dtype = dtype if parameter.requires_grad else untrained or dtype
                wanted = stored_dtype(submodule, name, parameter, in_dtype, keep_batchnorm_fp32=keep_batchnorm_fp32)
                if parameter.dtype is not wanted and parameter not in seen:
                    value = parameter.detach().to(wanted)
                    # A frozen one may be shared with a model that is not cast, such as a teacher.
                    if replace or not parameter.requires_grad or type(value) is not torch.Tensor:
                        new = nn.Parameter(value, parameter.requires_grad)
                        setattr(submodule, name, carry_over(parameter, new))
                    else:
                        parameter.data, parameter.grad = value, None
                seen.add(parameter)
            for name, buffer in list(submodule.named_buffers(recurse=False, remove_duplicate=False)):
                in_dtype = untrained or dtype
                wanted = stored_dtype(submodule, name, buffer, in_dtype, keep_batchnorm_fp32=keep_batchnorm_fp32)
                submodule._buffers[name] = cast.setdefault((buffer, wanted), buffer.to(wanted))


def names_by_parameter(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Every name of each parameter, in the model's order; a shared parameter has several names."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return names


def stored_dtype(
    module: nn.Module, name: str, tensor: torch.Tensor, dtype: torch.dtype, *, keep_batchnorm_fp32: bool = False
) -> torch.dtype:
    """The dtype in which ``tensor``, the parameter or buffer ``name`` of ``module``, is stored; ``dtype`` for most.

    Integers keep their dtype. With ``keep_batchnorm_fp32``, batch norms are stored in fp32. A router's buffers, and
    :data:`SCORE_BIAS`, are not narrowed: biases that balance the experts change by less than half precision resolves.
    """
    if not tensor.is_floating_point() or _is_frequencies(module, name):
        return tensor.dtype
    if not isinstance(tensor, nn.Parameter) and (is_router(module) or name == SCORE_BIAS):
        return torch.promote_types(dtype, tensor.dtype)
    return torch.float32 if keep_batchnorm_fp32 and isinstance(module, BATCH_NORMS) else dtype


def carry_over(old: nn.Parameter, new: nn.Parameter) -> nn.Parameter:
    """Give ``new``, which replaces ``old`` and has its layout, the attributes and hooks that that was given; return it.

    They share the hooks, so that what removes one from ``old`` removes it from ``new``.
    """
    vars(new).update(vars(old))
    for hooks in HOOKS:
        if getattr(old, hooks) is not None:
            setattr(new, hooks, getattr(old, hooks))
    return new


HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def unfrozen(name: str, problem: str) -> str:
    """The message for the parameter ``name``, which is trained now, as ``problem`` says, but was frozen at setup."""
    return (
        f"{name!r} was frozen when the optimizer was set up, so nothing steps it, but it {problem} now; unfreeze "
        "parameters before that, and freeze them again until they are to be trained"
    )


def thawed_since(frozen: Iterable[tuple[str, nn.Parameter]]) -> ValueError | None:
    """The error for a parameter that was ``frozen`` at setup and requires a gradient now; None without one."""
    names = (name for name, parameter in frozen if parameter.requires_grad)
    return next((ValueError(unfrozen(name, "requires a gradient")) for name in names), None)


def trained_and_frozen(module: nn.Module) -> tuple[NamedParameters, NamedParameters]:
    """The parameters of ``module`` that require gradients, and those that do not."""
    named = list(module.named_parameters())
    return [pair for pair in named if pair[1].requires_grad], [pair for pair in named if not pair[1].requires_grad]


def check_frozen(frozen: NamedParameters) -> None:
    """Raise a RuntimeError for gradients of frozen parameters, which no optimizer steps."""
    for name, parameter in frozen:
        if parameter.grad is not None:
            raise RuntimeError(unfrozen(name, "has a gradient"))


def moved(name: str, after: str = "initialize") -> str:
    """An error's text: the parameter ``name``, or its gradient, is in other memory than a step changes."""
    return (
        f"{name!r} was moved after {after} (its .data was replaced, or its module was cast or given another memory "
        f"format), so that steps would not change it; do that before {after}, and change values in place (copy_, "
        "load_state_dict)"
    )


def num_hooks(parameter: torch.Tensor) -> int:
    """How many hooks on its gradient ``parameter`` has."""
    number = 0
    for hooks in HOOKS:
        number += len(getattr(parameter, hooks) or ())
    return number


def _is_frequencies(module: nn.Module, name: str) -> bool:
    """Whether a buffer holds the frequencies of a Hugging Face rotary embedding.

    They are multiplied by positions, which also multiplies their rounding error, so they stay in fp32.
    """
    return "inv_freq" in name and type(module).__module__.startswith("transformers.")
