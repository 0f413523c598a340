"""Local tensors of DTensors in autograd's graph, while a batch runs, so that gradients pass by DTensor's Python.

To add the gradient of a parameter to its ``.grad`` takes autograd some 0.1 ms where both are DTensors. So a parameter
has a leaf, a plain tensor with the memory of its local tensor, whose ``.grad`` is the local tensor of the parameter's:
layers that compute on the leaf accumulate the same gradient. In the same way a DTensor that a layer returns keeps the
local tensor that it was made from. This holds in the context :func:`using` only, in which nobody but the model and the
criterion sees a graph: there are no edges to the DTensors in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch

from .dtensor import local, wrap

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Leaves: TypeAlias = Mapping[int, tuple[torch.Tensor, torch.Tensor]]
"""By the id of a parameter: its leaf, and the ``.grad`` of the parameter that has the memory of the leaf's."""
SOURCE = "_paramp_local_in_graph"
"""The attribute of a DTensor with the local tensor that it was made from, and its ``grad_fn`` then."""
SPECS = "_paramp_specs"
"""The attribute of a DTensor with the layouts of others that were made as it was, by what they were made from."""
_in_use: Leaves | None = None
"""The leaves of the context :func:`using`. Of the process, not of a thread: on a GPU autograd runs the backward in a
thread of the device, which sees no context variables, and computes again there what was checkpointed."""


def make_leaf(parameter: DTensor, gradient: DTensor) -> torch.Tensor:
    """The leaf of ``parameter`` for its ``gradient``, which has the same placements."""
    leaf = parameter._local_tensor.detach().requires_grad_()
    local_gradient = gradient._local_tensor
    if local_gradient.dtype is not leaf.dtype:
        leaf.grad_dtype = local_gradient.dtype
    leaf.grad = local_gradient
    return leaf


@contextmanager
def using(leaves: Leaves) -> Iterator[None]:
    """A context for a forward and its backward, in which ``leaves`` stand for their parameters."""
    global _in_use
    outer, _in_use = _in_use, leaves
    try:
        yield
    finally:
        _in_use = outer


def remember(whole: torch.Tensor, part: torch.Tensor) -> None:
    """Let :func:`local_in_graph` return ``part``, of which the DTensor ``whole`` was made."""
    if _in_use is not None:
        vars(whole)[SOURCE] = part, whole.grad_fn


def local_in_graph(whole: torch.Tensor) -> torch.Tensor | None:
    """The tensor that stands for the local tensor of the DTensor ``whole`` here; None if gradients have to pass it.

    That is where it has hooks or was changed in place, or is a parameter that is frozen or has another ``.grad``.
    """
    if _in_use is None or whole._backward_hooks:
        return None
    leaf, gradient = _in_use.get(id(whole), (None, None))
    if leaf is not None:
        valid = whole.grad is gradient and whole.requires_grad and not whole._post_accumulate_grad_hooks
        return leaf if valid else None
    part, node = vars(whole).get(SOURCE, (None, None))
    return part if whole.grad_fn is node and not whole.retains_grad else None


def with_local(whole: DTensor, part: torch.Tensor) -> DTensor:
    """A DTensor as ``whole``, whose local tensor is ``part``, which :func:`local_in_graph` returns for it."""
    made = wrap(part, whole)
    if SPECS in vars(whole):
        vars(made)[SPECS] = vars(whole)[SPECS]
    remember(made, part)
    return made


def on_local(function: Callable[[torch.Tensor], torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
    """``function(tensor)``; it is elementwise, so a DTensor's local tensor, if it is in the graph, is enough."""
    part = local_in_graph(tensor)
    if part is None:
        return function(tensor)
    result = function(part)
    return tensor if result is part else with_local(cast("DTensor", tensor), result)


def register_hook(call: Callable[..., Any], whole: DTensor, hook: Callable[[torch.Tensor], torch.Tensor | None]) -> Any:
    """``torch.Tensor.register_hook``, which is ``call``, also of an activation whose local tensor is in use already."""
    part = local_in_graph(whole)
    if part is None or part.is_leaf:
        return call(whole, hook)
    like = cast("DTensor", whole.detach())  # without the part, whose hooks the garbage collector does not traverse

    def on_part(gradient: torch.Tensor) -> torch.Tensor | None:
        changed = hook(wrap(gradient, like))
        return None if changed is None else local(changed)

    return part.register_hook(on_part)


def grad(
    call: Callable[..., tuple[torch.Tensor | None, ...]],
    outputs: Any,
    inputs: torch.Tensor | Sequence[torch.Tensor],
    *args: Any,
    allow_unused: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor | None, ...]:
    """``torch.autograd.grad``, which is ``call``, also for ``inputs`` whose local tensors are in the graph instead."""
    wholes = [inputs] if isinstance(inputs, torch.Tensor) else [*inputs]
    pairs = [(whole, part) for whole in wholes if (part := local_in_graph(whole)) is not None]
    if not pairs:
        return call(outputs, inputs, *args, allow_unused=allow_unused, **kwargs)
    found = call(outputs, [*wholes, *(part for _, part in pairs)], *args, allow_unused=True, **kwargs)
    by_id = dict(zip(map(id, wholes), found, strict=False))
    for (whole, part), gradient in zip(pairs, found[len(wholes) :], strict=True):
        own = by_id[id(whole)]
        if gradient is not None:
            # What reaches an activation passes on to the tensor that it was made from.
            summed = wrap(gradient, cast("DTensor", whole))
            by_id[id(whole)] = summed if own is None or not part.is_leaf else own + summed
    if not allow_unused and any(gradient is None for gradient in by_id.values()):
        raise RuntimeError("autograd.grad: an input is not used in the graph; pass allow_unused=True for a None")
    return tuple(by_id[id(whole)] for whole in wholes)
