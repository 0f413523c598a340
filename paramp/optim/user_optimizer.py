"""The user's optimizers, made over the model's parameters: checks, and the replacement by the stepped tensors."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import combinations
from typing import Any, Protocol

import torch
from torch import nn

from ..base.collectives import first_difference_over_ranks
from ..base.dtensor import local
from ..base.errors import ConfigError, one_line
from ..base.trees import tensors
from ..precision.modes import Precision
from ..precision.stochastic_rounding import round_state
from .matrices.needs_whole_matrices import copies_weights, needs_whole_matrices


class NamedWeights(Protocol):
    """The tensors that an optimizer steps in place of a rank's parameters: flat buffers, or separate masters."""

    def by_name(self) -> Mapping[str, torch.Tensor]: ...


def groups_by_name(
    optimizers: Sequence[torch.optim.Optimizer], names_of: Mapping[nn.Parameter, list[str]]
) -> dict[str, tuple[int, int]]:
    """The indices of the optimizer and of its param group that have each parameter, by all of its names."""
    return {
        name: (number, index)
        for number, optimizer in enumerate(optimizers)
        for index, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
        for name in names_of[parameter]
    }


def check_optimizers(optimizers: Sequence[torch.optim.Optimizer], names_of: Mapping[nn.Parameter, list[str]]) -> None:
    """Check that an engine can use ``optimizers`` together.

    Raises:
        ConfigError: :func:`check_optimizer` refuses one, two have the same parameter, or none of several has one.
    """
    for optimizer in optimizers:
        check_optimizer(optimizer, names_of)
    held = [{parameter for group in one.param_groups for parameter in group["params"]} for one in optimizers]
    for (first, one), (second, other) in combinations(enumerate(held), 2):
        if both := one & other:
            name = min(names_of[parameter][0] for parameter in both)
            kinds = [type(optimizers[index]).__name__ for index in (first, second)]
            raise ConfigError(
                f"optimizer: {name!r} is a parameter of optimizers {first} and {second} ({kinds[0]} and {kinds[1]}), "
                "expected each parameter in exactly one"
            )
    trained = {parameter: names[0] for parameter, names in names_of.items() if parameter.requires_grad}
    left = sorted(name for parameter, name in trained.items() if not any(parameter in one for one in held))
    if left and len(optimizers) > 1:
        raise ConfigError(
            f"optimizer: {', '.join(map(repr, left[:5]))}{' ...' * (len(left) > 5)} are in none of the "
            f"{len(optimizers)} optimizers, expected each trained parameter in exactly one; add them "
            "to one, or freeze them"
        )


def check_optimizer(optimizer: torch.optim.Optimizer, names_of: Mapping[nn.Parameter, list[str]]) -> None:
    """Check that an engine or amp can use ``optimizer``.

    Raises:
        ConfigError: it has stepped, has state that does not count steps, needs a closure, is SparseAdam, or holds a
            tensor that is not in ``names_of``.
    """
    states: Mapping[Any, Any] = optimizer.state
    # Besides tensors torch accepts keys of the optimizer's own, whose values may be anything.
    of_tensors: dict[Any, Any] = {key: state for key, state in states.items() if isinstance(key, torch.Tensor)}
    if any(float(state.get("step", 0)) > 0 for state in of_tensors.values()):
        raise ConfigError("optimizer: it has stepped already; pass a fresh one, so that its state fits the shards")
    if isinstance(optimizer, torch.optim.LBFGS) or _needs_closure(optimizer):
        kind = type(optimizer).__name__
        raise ConfigError(f"optimizer: {kind} evaluates the model in its step, which engine.step() cannot do")
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise ConfigError("optimizer: SparseAdam needs sparse gradients, but an engine makes them dense; use Adam")
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in names_of:
                raise ConfigError(
                    f"optimizer: it holds a tensor of shape {tuple(parameter.shape)} that is not a parameter of the "
                    "model; make it from model.parameters(), and initialize each model and optimizer once"
                )
    for parameter, state in of_tensors.items():
        if state and "step" not in state:  # a method such as train() may have looked into it
            name = names_of[parameter][0] if parameter in names_of else str(parameter)
            raise ConfigError(
                f"optimizer: it has stepped already, or its constructor made state for {name!r} without a count of "
                "steps; pass a fresh one, which makes its state in step(), or with step=0 in it"
            )


def check_same_settings(
    optimizers: Sequence[torch.optim.Optimizer], names_of: Mapping[nn.Parameter, list[str]], device: torch.device
) -> None:
    """Check that every rank has the same param groups, and step hooks or none. A collective.

    Raises:
        ConfigError: on every rank, with the first difference.
    """
    from .fused_step import num_step_hooks  # with which an optimizer steps in another way

    local = [(f"step hooks of optimizer[{i}]", str(num_step_hooks(one) > 0)) for i, one in enumerate(optimizers)]
    for place, _, group, key in settings_of(optimizers):
        value = [names_of[one][0] for one in group["params"]] if key == "params" else group[key]
        local.append((place, _comparable(value)))
    if found := first_difference_over_ranks(local, device, end=("nothing more", None)):
        rank, (key, value), (other_key, other) = found
        raise ConfigError(
            f"optimizer: rank 0 has {key} = {one_line(str(value))}, but rank {rank} {other_key} = "
            f"{one_line(str(other))}; make it with the same groups and settings on every rank"
        )


def settings_of(
    optimizers: Sequence[torch.optim.Optimizer],
) -> Iterator[tuple[str, torch.optim.Optimizer, dict[str, Any], str]]:
    """Of each setting where it stands, as in Python, and its optimizer, param group and key."""
    for number, optimizer in enumerate(optimizers):
        for index, group in enumerate(optimizer.param_groups):
            for key in group:
                place = f"optimizer[{number}]." * (len(optimizers) > 1) + f"param_groups[{index}][{key!r}]"
                yield place, optimizer, group, key


def _comparable(value: Any) -> str:
    """``value`` of a param group as text that is equal where the values are."""
    if isinstance(value, torch.Tensor):
        return repr(value.tolist())
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_comparable, value))})"
    return repr(value) if isinstance(value, (bool, int, float, str, type(None))) else type(value).__name__


def _needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``step()`` has an argument without a default."""
    own = [*inspect.signature(type(optimizer).step).parameters.values()][1:]  # the first one is the optimizer
    return any(one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD for one in own)


def check_elementwise(optimizer: torch.optim.Optimizer, parameters: Iterable[torch.Tensor]) -> None:
    """Raise a ConfigError if the optimizer needs whole matrices, but this rank has shards of some ``parameters``."""
    sharded = [one for one in parameters if one.requires_grad and one.shape != local(one).shape]
    if sharded and needs_whole_matrices(optimizer, sharded[0].device):
        raise ConfigError(
            f"optimizer: {type(optimizer).__name__} needs whole matrices, but under tensor parallelism each rank has "
            "shards of them; use paramp.initialize, which brings them together, or an elementwise optimizer such as "
            "AdamW"
        )


def check_narrow_state(
    optimizer: torch.optim.Optimizer, precision: Precision, device: torch.device, why_own: str
) -> None:
    """Check that the state of ``optimizer``, which runs its own step because ``why_own``, can be :class:`NarrowState`.

    Raises:
        ConfigError: on every rank: it cannot.
    """
    kind, problem = type(optimizer).__name__, None
    if precision.weights.itemsize < 4 and not precision.masters:
        problem = f"the optimizer steps half-precision weights itself: {why_own}"
    elif any(group.get("centered") for group in optimizer.param_groups):
        problem = f"{kind} with centered=True subtracts states from each other"
    elif type(optimizer) is not torch.optim.Muon and needs_whole_matrices(optimizer, device):
        problem = f"{kind} needs whole matrices, so that its state may not be elementwise"
    elif copies_weights(optimizer, device):
        problem = f"{kind} keeps weights in its state, whose small changes bf16 would lose in noise"
    if problem:
        raise ConfigError(f"optimizer_state: got 'bf16', expected 'full', because {problem}")


class NarrowState:
    """``with`` it an optimizer makes its own step with fp32 state, which is stored in bfloat16 between steps.

    That is its state of the shape and dtype of a stepped tensor. It is rounded stochastically after each step.

    Args:
        bits: for each tensor that it steps the random bits of its elements, as a function of a word.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, bits: Mapping[nn.Parameter, Callable[[int], torch.Tensor]]
    ) -> None:
        self._optimizer = optimizer
        self._bits = bits
        self._round_to_nearest(optimizer)  # what its constructor has made
        optimizer.register_load_state_dict_post_hook(self._round_to_nearest)

    def __enter__(self) -> None:
        for _, state, values in self._elementwise(torch.bfloat16):
            state.update({key: value.float() for key, value in values.items()})

    @torch.no_grad()
    def __exit__(self, *_: object) -> None:
        for stepped, state, values in self._elementwise(torch.float32):
            stored = {key: value.new_empty(value.shape, dtype=torch.bfloat16) for key, value in values.items()}
            flat = [one.reshape(-1) for one in values.values()]
            round_state([one.view(-1) for one in stored.values()], flat, self._bits[stepped])
            state.update(stored)

    def _round_to_nearest(self, _: torch.optim.Optimizer) -> None:
        for __, state, values in self._elementwise(torch.float32):
            state.update({key: value.bfloat16() for key, value in values.items()})

    def _elementwise(
        self, dtype: torch.dtype
    ) -> Iterator[tuple[nn.Parameter, dict[str, Any], dict[str, torch.Tensor]]]:
        """Each tensor that is stepped, its state, and the elementwise ones of ``dtype`` in it, by key."""
        for stepped in self._bits:
            state = self._optimizer.state.get(stepped, {})
            found = {key: value for key, value in sorted(state.items()) if getattr(value, "dtype", None) is dtype}
            if stepped.ndim and stepped.numel():  # a number of steps has the shape of a 0-dim weight
                yield stepped, state, {key: value for key, value in found.items() if value.shape == stepped.shape}


def repoint(
    optimizer: torch.optim.Optimizer, names_of: Mapping[nn.Parameter, list[str]], weights: NamedWeights
) -> None:
    """Replace the model's parameters in the groups by this rank's stepped tensors; the groups' options stay.

    Raises:
        ConfigError: the constructor has made state that cannot be made for these. The groups were not changed then.
    """
    stepped = weights.by_name()
    replaced = []
    for group in optimizer.param_groups:
        found = [next((stepped[name] for name in names_of[old] if name in stepped), None) for old in group["params"]]
        kept = [(index, tensor) for index, tensor in enumerate(found) if tensor is not None]
        changes: dict[str, Any] = {"params": [tensor for _, tensor in kept]}
        if "param_names" in group:
            changes["param_names"] = [group["param_names"][index] for index, _ in kept]
        replaced.append((group, changes, [(group["params"][index], tensor) for index, tensor in kept]))
    pairs = [pair for *_, of_group in replaced for pair in of_group]
    made = _made_state(optimizer, pairs, [{**group, **changes} for group, changes, _ in replaced])
    for group, changes, _ in replaced:
        group.update(changes)
    for key in [key for key in optimizer.state if isinstance(key, torch.Tensor)]:
        del optimizer.state[key]
    optimizer.state.update(made)


def _made_state(
    optimizer: torch.optim.Optimizer,
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
    groups: list[dict[str, Any]],
) -> Mapping[torch.Tensor, dict[str, Any]]:
    """The state that some constructors make, such as Adagrad's, for the second ones of ``pairs``, those of ``groups``.

    The constructor makes it again, if it takes ``defaults`` as keywords.

    Raises:
        ConfigError: it does not, and state cannot be taken over.
    """
    if not any(optimizer.state.get(old) for old, _ in pairs):
        return {}
    try:
        again = type(optimizer)(groups, **optimizer.defaults).state
        return {key: state for key, state in again.items() if isinstance(key, torch.Tensor)}
    except TypeError as error:
        made = {
            new: {key: _taken_over(key, value, old, new) for key, value in optimizer.state.get(old, {}).items()}
            for old, new in pairs
        }
        if left := {key for state in made.values() for key, value in state.items() if value is NotImplemented}:
            raise ConfigError(
                f"optimizer: the constructor of {type(optimizer).__name__} made the state {min(left)!r}, which has to "
                "be made again for the tensors that are stepped, but it does not take the optimizer's `defaults` as "
                f"keywords ({error}); make that state in step(), or let the constructor take them"
            ) from error
        return made


def _taken_over(key: str, value: Any, old: torch.Tensor, new: torch.Tensor) -> Any:
    """``value`` of the state of ``old`` as one of ``new``; NotImplemented if only the constructor can make that.

    It is not where elements differ, as in a copy of a weight: replicas may have got the values of another rank since.
    """
    if key == "step":
        return value
    if not isinstance(value, torch.Tensor):
        return NotImplemented if any(True for _ in tensors(value)) else value
    if value.is_meta:
        return NotImplemented
    if value.shape != old.shape:
        is_of_part = value.ndim > 0 and new.shape != old.shape
        return NotImplemented if is_of_part else value.to(new.device) if value.ndim else value
    elements = local(value).flatten()
    if (elements != elements[:1]).any():
        return NotImplemented
    dtype = new.dtype if value.is_floating_point() or value.is_complex() else value.dtype
    return torch.full_like(new.detach(), elements[0].item() if len(elements) else 0, dtype=dtype)


def why_weights_are_missed(
    optimizer: torch.optim.Optimizer, names_of: Mapping[nn.Parameter, list[str]], stepped: Mapping[str, torch.Tensor]
) -> str | None:
    """Why the own step of ``optimizer`` would go wrong after :func:`repoint`, which is yet to be called; else None.

    An attribute of it holds a parameter in whose place another tensor is stepped, or lists a tensor for each parameter,
    where the groups lose some parameters or get shards. ``stepped`` has the tensors that are stepped, by name.
    """
    groups = optimizer.param_groups
    given = [parameter for group in groups for parameter in group["params"]]
    before = [parameter.shape for parameter in given]
    after = [next((stepped[name].shape for name in names_of[one] if name in stepped), None) for one in given]
    are_paired = after == before or all(shape is None for shape in after)  # with none, the step does nothing
    for one in with_inner(optimizer):
        kind = type(one).__name__
        for attribute, value in own_attributes(one).items():
            held = [leaf for leaf in _leaves(value, groups) if isinstance(leaf, torch.Tensor)]
            parameters = [tensor for tensor in held if isinstance(tensor, nn.Parameter) and tensor in names_of]
            for parameter in parameters:
                names = names_of[parameter]
                if any(stepped.get(name, parameter) is not parameter for name in names):
                    return (
                        f"optimizer: {kind} holds {names[0]!r} in its attribute {attribute!r}, but in this mode and "
                        "layout its step has to change another tensor, which param_groups has in place of the "
                        "parameter; let it take parameters from param_groups in each step"
                    )
            is_list = isinstance(value, (list, tuple)) and not parameters
            if is_list and not are_paired and [tensor.shape for tensor in held] == before:
                return (
                    f"optimizer: {kind} has a list of a tensor for each parameter, its attribute {attribute!r}, but "
                    "param_groups lose parameters that are frozen or on other ranks, or get shards; let step() make "
                    "and find each tensor in self.state[parameter]; for frozen ones alone, leave them out of the "
                    "optimizer"
                )
    return None


def with_inner(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """``optimizer``, and the optimizers that attributes of it and of these hold."""
    found = [optimizer]
    for one in found:
        for leaf in _leaves(own_attributes(one)):
            if isinstance(leaf, torch.optim.Optimizer) and leaf not in found:
                found.append(leaf)
    return found


def own_attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The attributes of a user's class; those that a user has added to one of torch's optimizers are not read."""
    if type(optimizer).__module__.startswith("torch.optim."):
        return {}
    return {key: value for key, value in vars(optimizer).items() if key not in ("param_groups", "state", "defaults")}


def _leaves(value: Any, followed: Sequence[dict[str, Any]] = ()) -> Iterator[Any]:
    """What ``value`` and containers in it hold, and the param groups of optimizers; without the groups ``followed``."""
    if isinstance(value, torch.optim.Optimizer):
        yield value
        yield from _leaves(value.param_groups, followed)
    elif any(value is group for group in followed):
        return
    elif isinstance(value, (list, tuple, set, Mapping)):
        for one in (*value, *value.values()) if isinstance(value, Mapping) else value:
            yield from _leaves(one, followed)
    else:
        yield value


class SteppedInPlace:
    """Checks that an optimizer's own step has changed each of its tensors in place."""

    def __init__(self, optimizer: torch.optim.Optimizer, stepped: Mapping[str, torch.Tensor]) -> None:
        """``stepped``: the tensors, by the names of the parameters in whose place they are."""
        self._kind, self._stepped = type(optimizer).__name__, stepped
        self._addresses = {name: tensor.data_ptr() for name, tensor in stepped.items()}

    def check(self) -> None:
        """Raise a RuntimeError for a tensor with other memory, which is not that of the weights."""
        for name, tensor in self._stepped.items():
            if tensor.data_ptr() != self._addresses[name]:
                raise RuntimeError(
                    f"optimizer: the step of {self._kind} gave {name!r} other memory, as `p.data = ...` does, so that "
                    "its update would be lost; let it change parameters in place (p.data.copy_, p.add_)"
                )


def warn_of_eps(optimizer: torch.optim.Optimizer) -> None:
    """Warn if updates would divide by zero: the state of half-precision weights is in half precision too, where a small
    ``eps`` rounds to 0 or a subnormal number."""
    for group in optimizer.param_groups:
        eps = group.get("eps")
        for dtype in {tensor.dtype for tensor in group["params"] if tensor.dtype.itemsize < 4}:
            if isinstance(eps, float) and 0 < eps < torch.finfo(dtype).smallest_normal:
                warnings.warn(
                    f"optimizer: eps {eps:g} is below the smallest normal number of the weights' {dtype}, "
                    f"{torch.finfo(dtype).smallest_normal:g}, so that updates divide by (nearly) zero; set eps=1e-4, "
                    "or use a mode with fp32 masters",
                    stacklevel=4,
                )


ONLY_THE_ENGINE_STEPS = (
    "optimizer.step(): the optimizer belongs to an engine; call engine.step(), which first completes, unscales and "
    "checks the gradients"
)


def warn_of_vanished_gradient(num_steps: int, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Warn of the step before, the ``num_steps``-th: the gradient of its loss had a norm of 0."""
    names = " and ".join(type(optimizer).__name__ for optimizer in optimizers)
    warnings.warn(
        f"step {num_steps} of {names} was made with a gradient whose norm is exactly 0, though the loss depends on "
        "the model: half-precision gradients may have underflowed. Look at engine.gradient_histogram() between "
        "forward_backward and step, at the loss scale (engine.scaler.get_scale()), at the count that a "
        "criterion returns beside its sum, and at the criterion, whose gradient may be 0",
        stacklevel=2,
    )


def warn_of_schedule(optimizers: Sequence[torch.optim.Optimizer]) -> bool:
    """Warn that the learning rate has changed after a skipped step, if it is a scheduler of torch's; whether it is."""
    is_torchs = any("initial_lr" in group for optimizer in optimizers for group in optimizer.param_groups)
    if is_torchs:
        warnings.warn(
            "the learning rate has changed after a step that was skipped: a scheduler that steps after each batch runs "
            "ahead of the optimizer. Pass it to paramp.initialize, whose scheduler waits for skipped steps, or call "
            "scheduler.step() only `if result.stepped`, the result of engine.step()",
            stacklevel=2,
        )
    return is_torchs


def replace_zero_grad(optimizer: torch.optim.Optimizer, zero_grad: Callable[[], None]) -> None:
    """Make ``optimizer.zero_grad()`` call ``zero_grad``: the optimizer's own does not reach the flat gradients."""

    def zero_all(set_to_none: bool = True) -> None:
        zero_grad()

    optimizer.zero_grad = zero_all  # type: ignore[method-assign]


class StepGuard:
    """Raises a ``RuntimeError`` with ``message`` for each ``step()`` of ``optimizer`` outside ``with guard:``.

    So for each step of the optimizers in it, such as that which a SAM calls in a method of its own. Their ``train()``
    and ``eval()``, by which schedule-free ones change what they step, run within ``changing()``.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        message: str,
        changing: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._message = message
        self._stepping = False
        self._changing = changing
        for one in with_inner(optimizer):
            one.register_step_pre_hook(self._check)
            for name in ("train", "eval"):
                own = getattr(one, name, None)
                if callable(own):
                    setattr(one, name, functools.wraps(own)(functools.partial(self._switch, own)))

    def __enter__(self) -> None:
        self._stepping = True

    def __exit__(self, *_: object) -> None:
        self._stepping = False

    def _check(self, *_: Any) -> None:
        if not self._stepping:
            raise RuntimeError(self._message)

    def _switch(self, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._stepping:  # of an optimizer around it too
            return own(*args, **kwargs)
        with self._changing(), self:
            return own(*args, **kwargs)
