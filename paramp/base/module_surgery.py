"""Taking models apart, and replacing their parameters, without losing names or what parameters have in common."""

from __future__ import annotations

import copyreg
import types
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize

__all__ = [
    "BATCH_NORMS",
    "Joined",
    "PassThrough",
    "cast_parameters",
    "keep_only",
    "keeping_buffers",
    "keeping_ties",
    "names_outside",
    "replace_class",
    "run_within",
    "shallow_copy",
    "stored_dtype",
    "with_forward",
]


class PassThrough(nn.Module):
    """Stands where a model calls a module that another pipeline stage has; hands on what it is given first."""

    def forward(self, x: Any = None, *args: Any, **kwargs: Any) -> Any:
        return kwargs.get("hidden_states", x)


def shallow_copy(module: nn.Module) -> nn.Module:
    """``copy.copy`` of ``module``, for modules that refuse to be serialised too, such as parametrized ones."""
    copied: nn.Module = type(module).__new__(type(module))
    copied.__dict__.update(module.__dict__)
    return copied


def with_forward(module: nn.Module, forward: Callable[..., Any]) -> nn.Module:
    """A copy of ``module``, sharing its modules and parameters under the same names, that computes ``forward``."""
    changed = shallow_copy(module)
    changed.__dict__["forward"] = forward
    return changed


def run_within(module: nn.Module, context: Callable[[nn.Module], AbstractContextManager[None]]) -> None:
    """Run the forward of ``module`` inside ``context(module)`` from now on.

    Unlike ``module.forward = ...`` this leaves open which forward that is: surgery may give the module another class.
    """
    module.__dict__["forward"] = _Within(module, context)


class _Within:
    def __init__(self, module: nn.Module, context: Callable[[nn.Module], AbstractContextManager[None]]) -> None:
        self.module = module
        self.context = context
        self.inner: Callable[..., Any] | None = module.__dict__.get("forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.context(self.module):
            if self.inner is not None:
                return self.inner(*args, **kwargs)
            return type(self.module).forward(self.module, *args, **kwargs)


def _set_forward(module: nn.Module) -> Callable[..., Any] | None:
    """The forward that was set on ``module`` itself in place of its class's, if any."""
    forward: Callable[..., Any] | None = module.__dict__.get("forward")
    while isinstance(forward, _Within):
        forward = forward.inner
    return forward


def keep_only(module: nn.Module, paths: Collection[str], prefix: str = "") -> nn.Module:
    """``module`` with only the modules, parameters and buffers called ``paths``, under the names that they have.

    What leads to them is copied, without its other contents; they themselves are shared.
    """
    part = shallow_copy(module)
    part._modules = {}
    for name, child in module._modules.items():  # named_children() would pass over a module that comes again
        path = f"{prefix}{name}"
        if child is None or path in paths:
            part._modules[name] = child
        elif any(wanted.startswith(f"{path}.") for wanted in paths):
            part._modules[name] = keep_only(child, paths, f"{path}.")
    part._parameters = {
        name: value for name, value in module._parameters.items() if value is None or f"{prefix}{name}" in paths
    }
    part._buffers = {
        name: value for name, value in module._buffers.items() if value is None or f"{prefix}{name}" in paths
    }
    return part


class Joined:
    """Parts of one model, as :func:`keep_only` makes them, put together for whoever looks at them as one model.

    :attr:`module` has the modules, parameters and buffers of all parts, under the names that they have in the model.
    What parts have in common is there once. It shares all of it with the parts: a parameter that is replaced in it is
    replaced in the parts. Modules that lead to others are one copy in each part and one in :attr:`module`, which share
    their own parameters, buffers and hooks. It cannot be called; the parts can.

    Attributes:
        parts: the parts; what they have changes with :attr:`module`.
        module: all of them; the part itself if there is one only.
    """

    def __init__(self, parts: Iterable[nn.Module]) -> None:
        self.parts = list(parts)
        self._copies: list[tuple[nn.Module, nn.Module, list[str]]] = []  # a part's own, the joint one, what they share
        self.module = self._join(self.parts)
        if len(self.parts) > 1:
            self.module.__dict__["forward"] = _refuse_to_run

    def _join(self, found: list[nn.Module]) -> nn.Module:
        """The one module for those that parts have by one name."""
        real = [module for module in found if not isinstance(module, PassThrough)] or found
        different = list({id(module): module for module in real}.values())
        if len(different) == 1 or isinstance(different[0], PassThrough):
            return different[0]
        joint = shallow_copy(different[0])
        joint._parameters = {name: value for copy in different for name, value in copy._parameters.items()}
        joint._buffers = {name: value for copy in different for name, value in copy._buffers.items()}
        joint._modules = {}
        for name in dict.fromkeys(name for copy in different for name in copy._modules):
            children = [child for copy in different if (child := copy._modules.get(name)) is not None]
            joint._modules[name] = self._join(children) if children else None
        for copy in different:
            copy._parameters, copy._buffers = joint._parameters, joint._buffers
            shared = [name for name, child in copy._modules.items() if child is joint._modules[name]]
            self._copies.append((copy, joint, shared))
        return joint

    def take_over(self, module: nn.Module) -> None:
        """Let the parts have the modules that were put into :attr:`module`; ``module`` stands in its own place."""
        if len(self.parts) == 1:
            self.parts = [module]
        self.module = module
        for copy, joint, shared in self._copies:
            for name in shared:
                copy._modules[name] = joint._modules[name]

    def align_modes(self) -> None:
        """Let the parts' own copies be in training or evaluation, as :attr:`module` is."""
        for copy, joint, _ in self._copies:
            copy.training = joint.training


def _refuse_to_run(*_: Any, **__: Any) -> Any:
    raise RuntimeError(
        "engine.module holds several stages of a pipeline, which do not follow one another; call engine.eval() and "
        "engine(x), or engine.forward_backward(x, y)"
    )


def names_outside(module: nn.Module, paths: Iterable[str]) -> list[str]:
    """The parameters and buffers of ``module`` that neither are among ``paths`` nor lie in a module that is."""
    known = set(paths)
    tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return [name for name, _ in tensors if known.isdisjoint(_prefixes(name))]


def _prefixes(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[: count + 1]) for count in range(len(parts))]


@contextmanager
def keeping_buffers(module: nn.Module) -> Iterator[None]:
    """Afterwards the buffers of ``module`` are what they were before, whatever a forward has done to them."""
    buffers = [(submodule, dict(submodule._buffers.items())) for submodule in module.modules()]
    values = {buffer: buffer.clone() for _, own in buffers for buffer in own.values() if buffer is not None}
    try:
        yield
    finally:
        for submodule, own in buffers:  # the forward may have put others in their place
            if isinstance(submodule, torch.jit.ScriptModule):  # not in this one's
                continue
            submodule._buffers.clear()
            submodule._buffers.update(own)
        with torch.no_grad():
            for buffer, value in values.items():
                if buffer.shape == value.shape:
                    buffer.copy_(value)
                else:  # resized in place
                    buffer.data = value


@contextmanager
def keeping_ties(module: nn.Module) -> Iterator[list[tuple[str, ...]]]:
    """Parameters that have several names in ``module`` are one parameter again afterwards: the first name's.

    Yields:
        The names of each such parameter.
    """
    names_of: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names_of.setdefault(id(parameter), []).append(name)
    shared = [tuple(names) for names in names_of.values() if len(names) > 1]
    yield shared
    for first, *others in shared:
        parameter = module.get_parameter(first)
        for name in others:
            owner, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(owner), leaf, parameter)


BATCH_NORMS = (nn.modules.batchnorm._BatchNorm,)


def cast_parameters(module: nn.Module, dtype: torch.dtype, *, keep_batchnorm_fp32: bool = False) -> None:
    """Store the floating-point parameters and buffers of ``module`` in ``dtype``; tied ones stay tied.

    Those of batch norms go to fp32 instead, if they are to be kept there.
    Parameters are replaced, not changed in place, because assigning ``.data`` does not work for DTensors.
    """
    with keeping_ties(module):
        for submodule in module.modules():
            for name, parameter in list(submodule.named_parameters(recurse=False)):
                wanted = stored_dtype(submodule, name, parameter, dtype, keep_batchnorm_fp32=keep_batchnorm_fp32)
                if parameter.dtype is not wanted:
                    setattr(submodule, name, _in_dtype(parameter, wanted))
            for name, buffer in list(submodule.named_buffers(recurse=False)):
                wanted = stored_dtype(submodule, name, buffer, dtype, keep_batchnorm_fp32=keep_batchnorm_fp32)
                submodule._buffers[name] = buffer.to(wanted)


def stored_dtype(
    module: nn.Module, name: str, tensor: torch.Tensor, dtype: torch.dtype, *, keep_batchnorm_fp32: bool = False
) -> torch.dtype:
    """What the parameter or buffer ``name`` of ``module`` itself is stored in, where weights are stored in ``dtype``.

    Integers stay what they are. Batch norms are in fp32, if they are to be kept there.
    """
    if not tensor.is_floating_point() or _is_frequencies(module, name):
        return tensor.dtype
    return torch.float32 if keep_batchnorm_fp32 and isinstance(module, BATCH_NORMS) else dtype


def _in_dtype(parameter: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
    """A copy of ``parameter`` in ``dtype``, with the hooks and attributes that it was given."""
    copied = nn.Parameter(parameter.detach().to(dtype), parameter.requires_grad)
    vars(copied).update(vars(parameter))
    for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if getattr(parameter, hooks) is not None:
            setattr(copied, hooks, getattr(parameter, hooks))
    return copied


def _is_frequencies(module: nn.Module, name: str) -> bool:
    """Whether a buffer holds the frequencies of a Hugging Face rotary embedding.

    They are multiplied by positions in fp32 and their rounding errors too, so these models keep them in fp32.
    """
    return "inv_freq" in name and type(module).__module__.startswith("transformers.")


def replace_class(
    model: nn.Module,
    old: type[nn.Module],
    new: type[nn.Module],
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
) -> list[str]:
    """Make the modules of ``model`` that compute as ``old`` does compute as ``new``, a subclass of it, in place.

    Each stays the object that it is, with another class: its parameters, buffers, hooks, attributes, mode, names and
    all references to it hold, optimizers and their states too, and one that has several names is changed once. So it
    works on DTensor parameters, and after a plan has put hooks on a module. A module of a subclass of ``old`` gets a
    class made of ``new`` and that subclass. Modules with a forward of their own, from a subclass or set on the
    instance, are left alone.

    Args:
        new: it adds nothing to an instance that ``old`` does not have.
        filter_fn: ``(module, its first name) -> bool``, which modules to change. None: all.

    Returns:
        The first name of each module changed.

    Raises:
        TypeError: ``model`` is no module, or it or a module in it is wrapped in DDP or FSDP.
    """
    _check_bare(model)
    assert issubclass(new, old)
    names = []
    for name, module in model.named_modules():
        if _computes_as(module, old) and (filter_fn is None or filter_fn(module, name)):
            _change_class(module, old, new)
            names.append(name)
    return names


def _change_class(module: nn.Module, old: type[nn.Module], new: type[nn.Module]) -> None:
    kind = type(module)
    # torch's parametrizations give a module a class of its own, derived from its real one, to which they return.
    own = kind.__bases__[0] if parametrize.is_parametrized(module) else kind
    changed = new if own is old else _combined(new, own, old)
    if own is kind:
        module.__class__ = changed
    else:
        kind.__bases__ = (changed,)


def _check_bare(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: got {type(model).__name__}, expected an nn.Module")
    for name, module in model.named_modules():
        if isinstance(module, (DistributedDataParallel, FullyShardedDataParallel)):
            raise TypeError(
                f"{name or 'the model'} is wrapped in {type(module).__name__}, which has taken note of the modules as "
                "they are; change the model (wrapper.module) before it is wrapped"
            )


def _computes_as(module: nn.Module, kind: type[nn.Module]) -> bool:
    return isinstance(module, kind) and type(module).forward is kind.forward and _set_forward(module) is None


_COMBINED: dict[tuple[type, type, type], type] = {}


def _combined(new: type, own: type, old: type) -> type:
    """``own``, a subclass of ``old``, with what ``new`` overrides of ``old``; the same class each time."""
    if (new, own, old) in _COMBINED:
        return _COMBINED[new, own, old]
    name = new.__name__.replace(old.__name__, own.__name__)
    namespace = {"__reduce_ex__": _reduce_combined, "_combined_from": (new, own, old), "__module__": own.__module__}
    _COMBINED[new, own, old] = types.new_class(name, (new, own), exec_body=lambda body: body.update(namespace))
    return _COMBINED[new, own, old]


def _reduce_combined(module: nn.Module, protocol: int) -> Any:
    """For pickle and copy, which look a class up by its name; a combined one has none in any module."""
    reduced: Any = object.__reduce_ex__(module, max(2, protocol))
    constructor, arguments, *state = reduced
    if constructor is not copyreg.__newobj__:  # type: ignore[attr-defined]
        return reduced  # the user's class has a way of its own
    return _new_combined, (module._combined_from, *arguments[1:]), *state


def _new_combined(made_from: tuple[type, type, type], *arguments: Any) -> Any:
    kind = _combined(*made_from)
    return kind.__new__(kind, *arguments)
