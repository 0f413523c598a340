"""Construction of models in their mode's weight dtype, and shard by shard if a model is too large for one process.

A model that does not fit into one process is built on ``meta``, where it takes no memory. Its layers are sharded there.
Then :func:`materialize` iterates over its submodules: it draws the full values of one on the CPU, from a seed derived
from its name, keeps this rank's shard, and frees the rest::

    outline   [embedding] [block 0] [block 1] [head]      whole, on meta
    shards    [emb]       [blo]     [blo]     [hea]       sharded, on meta
                ▲ draw the whole submodule, keep this rank's shard, continue with the next

A rank never holds more than its shards and one submodule, and the values are the same in every layout.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import MethodType

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)

from ..base.dtensor import is_dtensor, own_part, resolved, wrap
from ..base.errors import ConfigError
from ..base.module_surgery import BATCH_NORMS, carry_over, shallow_copy, stored_dtype
from ..distributed.context import current_context
from ..distributed.rng import derive_seed, forked
from ..precision.compute_context import default_dtype
from ..precision.modes import Mode, Precision


@contextmanager
def init_module(precision: Mode, device: torch.device | str | None = None) -> Iterator[None]:
    """A context in which ``Model()`` creates its parameters and buffers in the mode's weight dtype, on the device.

    Tensors that a model creates with an explicit dtype keep it; batch norms are in fp32 if the mode keeps them in it
    (O2). Contexts nest; the innermost applies. Masters (the naive modes, O2) of a model built in this context start
    from its half-precision weights; to start from fp32 weights, build it outside, or on ``meta`` in fp32.

    Args:
        precision: a value that :meth:`Precision.parse` accepts.
        device: None: the current context's device, else the GPU if there is one, else the CPU. ``"meta"``: no memory is
            allocated, and :func:`paramp.initialize` fills each rank's shards.

    Raises:
        ConfigError: an unknown mode.
    """
    mode = Precision.parse(precision)
    if device is None:
        context = current_context()
        device = context.device if context else torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with stored_as(mode), default_dtype(mode.weights), torch.device(device):
        yield


@contextmanager
def stored_as(mode: Precision) -> Iterator[None]:
    """A context in which batch norms register tensors of the mode's weight dtype in fp32, if ``mode`` requires it."""

    def in_fp32(module: nn.Module, _name: str, tensor: torch.Tensor | None) -> torch.Tensor | None:
        if tensor is None or tensor.dtype is not mode.weights or not isinstance(module, BATCH_NORMS):
            return None
        wide = tensor.detach().float()
        return _parameter_like(tensor, wide) if isinstance(tensor, nn.Parameter) else wide

    kinds = (register_module_parameter_registration_hook, register_module_buffer_registration_hook)
    with ExitStack() as stack:
        for register in kinds if mode.keep_batchnorm_fp32 else ():
            stack.callback(register(in_fp32).remove)  # type: ignore[arg-type]  # torch's hint lacks the return value
        yield


def reset_parameters(module: nn.Module) -> None:
    """Fill the parameters and buffers of ``module`` itself with its class's ``reset_parameters``."""
    module.reset_parameters()  # type: ignore[operator]


def check_materializable(module: nn.Module) -> None:
    """Raise a ValueError if a submodule has tensors on ``meta`` and no ``reset_parameters`` to fill them."""
    for name, child in module.named_modules():
        if is_on_meta(child) and not hasattr(child, "reset_parameters"):
            raise ValueError(
                f"model: {name or 'the model'} ({type(child).__name__}) is on the meta device and has no "
                "reset_parameters(); add one that fills its parameters and buffers, or build the model on the CPU"
            )


def is_on_meta(module: nn.Module) -> bool:
    """Whether tensors of ``module`` itself are on ``meta``."""
    return any(tensor.is_meta for tensor in _tensors(module).values())


def outline(module: nn.Module) -> nn.Module:
    """A copy of ``module`` with the same tensors, which stay when the tensors of ``module`` are replaced by shards."""
    copies = {original: _copy(original) for original in module.modules()}
    for copied in copies.values():
        copied._modules = {name: child and copies[child] for name, child in copied._modules.items()}
    return copies[module]


def _copy(module: nn.Module) -> nn.Module:
    """A module with the same tensors and children, in separate tables."""
    copied = shallow_copy(module)
    for table in (*TENSORS, "_modules"):
        setattr(copied, table, dict(getattr(module, table)))
    return copied


TENSORS = ("_parameters", "_buffers")


@dataclass(frozen=True)
class InitialValues:
    """Where the tensors of a model on ``meta`` get their values from."""

    fill: Callable[[nn.Module], None] = reset_parameters
    """Fills the tensors of one module itself, without its submodules."""
    stored: Callable[[str, Sequence[int]], torch.Tensor | None] = lambda *_: None
    """The full value of the tensor of a name, which may be a view of a file; None: ``fill`` makes it.

    It needs the values at the given indices of dim 0 only; others may be anything.
    """


def materialize(
    module: nn.Module,
    seed: int,
    device: torch.device,
    *,
    whole: nn.Module | None = None,
    values: InitialValues | None = None,
    precision: Precision | None = None,
) -> None:
    """Give the parameters and buffers of ``module`` that are on ``meta`` their initial values, on ``device``.

    The random state is seeded from ``seed`` and the name of each submodule; the caller's is restored. Tied parameters
    stay tied: the first module that has one fills it. No collective is used.

    Args:
        whole: the :func:`outline` of ``module``, made before it was sharded. None: it is not sharded.
        values: None: those that each module's ``reset_parameters`` draws.
        precision: the mode in whose weight dtype floating-point tensors are. None: their dtype on ``meta``.

    Raises:
        ValueError: a submodule has tensors on ``meta`` and no ``reset_parameters`` to fill them.
    """
    values = values or InitialValues()
    if values.fill is reset_parameters:
        check_materializable(module)
    filled: dict[torch.Tensor, torch.Tensor] = {}

    def keep(child: nn.Module, name: str, value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        if like not in filled:  # a tied tensor is filled once
            dtype = like.dtype
            if precision is not None:
                keep_batchnorm_fp32 = precision.keep_batchnorm_fp32
                dtype = stored_dtype(child, name, value, precision.weights, keep_batchnorm_fp32=keep_batchnorm_fp32)
            filled[like] = _shard(value, like, dtype, device)
        return filled[like]

    with forked(torch.device("cpu")) as seed_cpu:
        for name, original in (whole or outline(module)).named_modules():
            if is_on_meta(original):
                seed_cpu(derive_seed(seed, name))
                child = module.get_submodule(name)
                _fill(child, original, _stored_values(name, original, child, values.stored), values.fill, keep)


def _tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters and buffers of ``module`` itself, by name."""
    return {name: value for table in TENSORS for name, value in getattr(module, table).items() if value is not None}


def _stored_values(
    prefix: str, original: nn.Module, child: nn.Module, stored: Callable[[str, Sequence[int]], torch.Tensor | None]
) -> dict[str, torch.Tensor]:
    """The stored values of the tensors of the module ``original``, which is called ``prefix`` and sharded ``child``."""
    values: dict[str, torch.Tensor] = {}
    shards = _tensors(child)
    for name, tensor in _tensors(original).items():
        value = stored(f"{prefix}.{name}".lstrip("."), _kept(shards.get(name, tensor), tensor))
        if value is not None and value.shape != tensor.shape:
            raise ConfigError(
                f"model: {f'{prefix}.{name}'!r} is {tuple(value.shape)} in its file, expected {tuple(tensor.shape)}"
            )
        if value is not None:
            values[name] = value
    return values


def _kept(shard: torch.Tensor, tensor: torch.Tensor) -> Sequence[int]:
    """The indices along dim 0 of which this rank keeps values of ``tensor``, which is sharded as ``shard``."""
    indices = range(len(tensor) if tensor.ndim else 0)
    if not is_dtensor(shard) or shard.shape[:1] != tensor.shape[:1] or not indices:
        return indices  # a style may have split dim 0 in two
    at = own_part(torch.arange(len(indices)).view(-1, *[1] * (shard.ndim - 1)).expand(shard.shape), shard)
    kept: list[int] = at.reshape(len(at), -1)[:, 0].tolist() if at.numel() else []
    return kept


def _fill(
    child: nn.Module,
    original: nn.Module,
    values: dict[str, torch.Tensor],
    fill: Callable[[nn.Module], None],
    keep: Callable[[nn.Module, str, torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    """Put this rank's shards of ``values`` into ``child``; other full values are drawn on the CPU, in ``original``."""
    drawn = _copy(original)
    if _tensors(original).keys() - values.keys():
        for table in TENSORS:
            tensors = getattr(drawn, table)
            tensors.update({name: _empty_on_cpu(tensor) for name, tensor in tensors.items() if tensor is not None})
        fill(drawn)
        _check_filled(drawn)
        values = _tensors(drawn) | values
    for table in TENSORS:
        tensors = getattr(child, table)
        for name, tensor in tensors.items():
            if tensor is not None and tensor.is_meta:
                tensors[name] = keep(child, name, values[name], tensor)
    for name, value in drawn.__dict__.items():  # attributes that ``fill`` computed
        is_copied = name in (*TENSORS, "_modules") or isinstance(value, MethodType)
        if not is_copied and value is not original.__dict__.get(name):
            child.__dict__[name] = value


def _check_filled(drawn: nn.Module) -> None:
    """Check that no tensor still holds the NaNs of :func:`_empty_on_cpu`."""
    for name, value in _tensors(drawn).items():
        if value.is_floating_point() and value.numel() and bool(value.isnan().all()):
            raise ValueError(
                f"model: reset_parameters() of {type(drawn).__name__} does not fill {name!r}; "
                "fill it there, or build the model on the CPU instead of the meta device"
            )


def _empty_on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    nothing = math.nan if tensor.is_floating_point() else 0  # NaN marks elements that were not filled
    empty = torch.full_like(tensor, nothing, device="cpu", requires_grad=False)
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def _shard(value: torch.Tensor, like: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """If ``like`` is a DTensor on ``meta``, a copy of this rank's shard of ``value``; else all of ``value``."""
    if is_dtensor(like):
        part = own_part(value.detach().reshape(like.shape), like)  # a packed weight has one more dim than the layer's
        value = wrap(part.to(device, dtype, copy=True, memory_format=torch.contiguous_format), like)
    else:
        value = resolved(value.detach().to(device, dtype))
    return _parameter_like(like, value) if isinstance(like, nn.Parameter) else value


def _parameter_like(old: nn.Parameter, value: torch.Tensor) -> nn.Parameter:
    return carry_over(old, nn.Parameter(value, old.requires_grad))
