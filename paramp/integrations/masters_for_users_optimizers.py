"""fp32 masters of a module's half-precision weights, in a loop whose optimizers stay the user's.

Between steps the groups and the state of an optimizer belong to the weights, as the loop's checkpoints and its freezing
of parameters expect. While it steps, and while a state is loaded, they belong to the masters::

    weights, in half ── forward, backward ─► their gradients, in half and scaled
        ▲                                              │ in fp32, unscaled, clipped
        └── rounded ── masters, in fp32 ◄── step ◄─────┘

The module's ``state_dict`` holds the masters in place of the weights, so that any checkpoint of it does.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..base.dtensor import is_dtensor, local, own_part, refusing_changes, version
from ..base.errors import ConfigError
from ..base.module_surgery import names_by_parameter
from ..base.wrapped_models import plain_name
from ..optim.masters import follow
from ..optim.masters_outside_buffers import ParameterMasters, drop_gradients, follow_changes, write_back
from ..optim.user_changes.refused_changes import changed_in_step


class ModuleMasters:
    """The masters of the weights of one module; :meth:`of` finds or makes it."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._weights: dict[torch.Tensor, ParameterMasters] = {}
        # The gradients of weights that are unscaled, with their versions, until the step.
        self._given: dict[torch.Tensor, tuple[torch.Tensor | None, int]] = {}
        self._rounded: set[torch.Tensor] = set()  # the weights of which they were rounded from the masters' gradients
        # The weights whose masters state_dict() has returned, with the versions that these had when last rounded.
        self._returned: dict[torch.Tensor, int] = {}
        self._names: dict[torch.Tensor, str] = {}  # what errors call parameters
        self._adopted = ExitStack()  # releases the optimizers

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_adopted": ExitStack(), "_returned": {}}  # a copy has none

    @staticmethod
    def of(module: nn.Module) -> ModuleMasters:
        """The masters of ``module``, which its copies copy; without any at first."""
        found = vars(module).get("_paramp_masters")
        if not isinstance(found, ModuleMasters):
            found = ModuleMasters(module)
            module._paramp_masters = found  # type: ignore[assignment]  # no module or tensor
            module.register_state_dict_post_hook(functools.partial(found._save))
            module.register_load_state_dict_pre_hook(functools.partial(found._load))
            module.register_forward_pre_hook(functools.partial(found._before_forward))
        return found

    def add(self, weight: nn.Parameter, value: torch.Tensor) -> None:
        """Give ``weight`` a master of this ``value``, of its shape and layout, which it is about to be rounded from."""
        # .data, because detach() keeps the counter of changes, which may be the weight's
        master = (value.detach() if is_dtensor(value) else value.data).to(weight.device, torch.float32)
        self._weights[weight] = ParameterMasters(weight, nn.Parameter(master, weight.requires_grad))

    def adopt(self, optimizer: torch.optim.Optimizer, replicas: dist.ProcessGroup | None = None) -> None:
        """Let ``optimizer``, over the module's weights, step the masters from now on, on the device of the weights.

        ``replicas``: the ranks of DistributedDataParallel, which has broadcast the weights of the first of them,
        rounded. The masters are broadcast here.

        Raises:
            ConfigError: ``optimizer`` does not call torch's hooks of a step.
        """
        if not calls_step_hooks(optimizer):
            raise ConfigError(
                f"optimizer: step() of {type(optimizer).__name__} does not call torch's step hooks, by which it would "
                "step fp32 masters; its constructor has to call torch.optim.Optimizer's, or use a mode without masters "
                "(16-mixed, bf16-mixed)"
            )
        self._names = {one: repr(names[0]) for one, names in names_by_parameter(self._module).items()}
        for one in self._held(optimizer):
            one.stepped.data = one.stepped.data.to(one.weight.device)
            if replicas is not None and not is_dtensor(one.stepped):
                value = one.stepped.detach().contiguous()
                dist.broadcast(value, group=replicas, group_src=0)
                one.stepped.detach().copy_(value)
                self._note_rounding([one])
        # Not an attribute, because copies of the module, which hooks of a step may make, copy those.
        steps: list[ExitStack] = []
        self._adopted.callback(self._release, weakref.ref(optimizer))
        for hook in (
            optimizer.register_step_pre_hook(lambda *given: steps.append(self._begin_step(*given))),
            optimizer.register_step_post_hook(lambda *_: steps.pop().close()),
            optimizer.register_load_state_dict_pre_hook(lambda one, _: self._put_masters(one)),
            optimizer.register_load_state_dict_post_hook(self._put_weights),
        ):
            self._adopted.callback(hook.remove)
        if optimizer.state:  # which some constructors make, in the weights' dtype
            optimizer.load_state_dict(optimizer.state_dict())

    def stepped(self, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        """The tensors that ``optimizer`` steps."""
        weights = (weight for group in optimizer.param_groups for weight in group["params"])
        return [self._weights[weight].stepped if weight in self._weights else weight for weight in weights]

    @contextmanager
    def unscaling(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """A context in which the masters' gradients are those of the weights; afterwards both are unscaled."""
        self._put_masters(optimizer)
        try:
            held = self._held(optimizer)
            for one in held:
                one.take_gradient()
            yield
            self.give_gradients(optimizer)
        finally:
            self._put_weights(optimizer)

    def give_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Round the masters' gradients to those of the weights, which a hook of the user's may change from here on."""
        for one in self._held(optimizer):
            gradient = one.stepped.grad
            one.weight.grad = None if gradient is None else gradient.to(one.weight.dtype)
            self._given[one.weight] = one.weight.grad, _version(one.weight.grad)
            self._rounded.add(one.weight)

    def take_changes(self, optimizer: torch.optim.Optimizer) -> None:
        """Give the masters those gradients of weights that a hook of the user's has changed since the last call.

        An edit through ``.data`` moves no version. It is found where a master's gradient does not round to the
        weight's, as it did after :meth:`give_gradients`.
        """
        for one in self._held(optimizer):
            gradient, count = self._given.get(one.weight, (None, 0))
            if gradient is not one.weight.grad or count != _version(gradient):
                one.take_gradient()
                self._given[one.weight] = one.weight.grad, _version(one.weight.grad)
            elif one.weight in self._rounded and gradient is not None and not gradient.is_sparse:
                assert one.stepped.grad is not None
                follow(local(gradient), local(one.stepped.grad))
            self._rounded.discard(one.weight)

    def check_scaled(self) -> None:
        """Raise a RuntimeError if weights have unscaled gradients: in half precision they cannot be scaled again."""
        for weight, (gradient, _) in self._given.items():
            if gradient is not None and gradient is weight.grad and bool(local(gradient).any()):
                raise RuntimeError(
                    "backward: the gradients of an optimizer are unscaled already, as for clipping, so that scaled "
                    "ones cannot be added; call its step() or zero_grad() before the next backward"
                )

    @torch.no_grad()
    def load_whole(self, masters: Mapping[str, torch.Tensor]) -> None:
        """Take over the whole tensors ``masters``, by :func:`plain_name`, where a weight is the rounding of its own.

        Only in a module with DTensors: ``ModelParallelStrategy`` loads into the rounded weights. Other strategies load
        before weights are rounded; there a callback may have loaded other values, such as averages.
        """
        if not any(map(is_dtensor, self._module.parameters())):
            return
        for name, one in self._named(self._module, ""):
            value = masters.get(plain_name(name))
            if value is not None and value.shape == one.weight.shape:
                local(one.stepped).copy_(own_part(value, one.stepped) if is_dtensor(one.stepped) else value)
                follow_changes([one])
                self._note_rounding([one])

    def round_written(self) -> None:
        """Round those masters to their weights that were written to, in the tensors that ``state_dict`` returned."""
        versions = ((self._weights[weight], then) for weight, then in self._returned.items())
        written = [one for one, then in versions if version(one.stepped) != then]
        write_back(written)
        self._note_rounding(written)

    @torch.no_grad()
    def restore(self) -> None:
        """Put the masters into the parameters in place of the rounded weights, forget them, and release the optimizers.

        A module with DTensors keeps its masters: ``data`` of a DTensor cannot be set.
        """
        self._adopted.close()
        if any(map(is_dtensor, self._module.parameters())):
            return
        for one in filter(lambda one: one.has_master, self._weights.values()):
            weight, gradient = one.weight, one.weight.grad
            one.stepped.data = one.stepped.data.to(weight.device)  # Lightning has moved the module to the CPU
            self._follow_changes([one])
            weight.grad = None  # of another dtype than the weight would be
            weight.data = one.stepped.detach()
            weight.grad = None if gradient is None else gradient.to(weight.dtype)
        self._weights.clear()
        self._given.clear()
        self._rounded.clear()
        self._returned.clear()
        self._names.clear()

    def drop_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Free the masters' gradients, also if the step was skipped."""
        for one in self._held(optimizer):
            self._given.pop(one.weight, None)
            self._rounded.discard(one.weight)
            drop_gradients([one])

    def _begin_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> ExitStack:
        """Prepare a step of ``optimizer``; the stack is to be closed after it."""
        if any(closure is not None for closure in (*args, *kwargs.values()) if callable(closure)):
            raise ConfigError(
                "optimizer.step(): got a closure, whose gradients would not reach the fp32 masters; step the optimizer "
                "of self.optimizers(), or leave the closure out"
            )
        self._put_masters(optimizer)
        self.take_changes(optimizer)
        held = self._held(optimizer)
        self._follow_changes(held)
        named = [(self._names.get(one.weight, "a parameter of another module"), one.weight) for one in held]
        stepping = ExitStack()
        stepping.callback(self._end_step, optimizer)
        stepping.enter_context(refusing_changes(named, changed_in_step))
        return stepping

    def _end_step(self, optimizer: torch.optim.Optimizer) -> None:
        held = self._held(optimizer)
        write_back(held)
        self._note_rounding(held)
        self.drop_gradients(optimizer)
        self._put_weights(optimizer)

    def _release(self, optimizer: weakref.ref[torch.optim.Optimizer]) -> None:
        """Put the weights back into an ``optimizer`` that still exists; after a step that failed it has masters."""
        if (one := optimizer()) is not None:
            self._put_weights(one)

    def _follow_changes(self, parameters: Collection[ParameterMasters]) -> None:
        """Bring weights and masters together where either was changed in place; call it before masters are read."""
        self.round_written()
        follow_changes(parameters)
        self._note_rounding(parameters)

    def _note_rounding(self, parameters: Iterable[ParameterMasters]) -> None:
        """Record that the weights are the roundings of their masters now."""
        for one in parameters:
            if one.weight in self._returned:
                self._returned[one.weight] = version(one.stepped)

    def _held(self, optimizer: torch.optim.Optimizer) -> list[ParameterMasters]:
        """The weights with masters whose weight or master is in the groups of ``optimizer``."""
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        found = (one for one in self._weights.values() if id(one.weight) in held or id(one.stepped) in held)
        return [one for one in found if one.has_master]

    def _put_masters(self, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            for weight in group["params"]:
                if weight not in self._weights and weight.is_floating_point() and weight.dtype.itemsize < 4:
                    self.add(weight, weight)  # it was frozen when the module was converted
        _replace(optimizer, {one.weight: one.stepped for one in self._held(optimizer)})

    def _put_weights(self, optimizer: torch.optim.Optimizer) -> None:
        _replace(optimizer, {one.stepped: one.weight for one in self._held(optimizer)})

    def _named(self, module: nn.Module, prefix: str) -> Iterator[tuple[str, ParameterMasters]]:
        for name, parameter in module.named_parameters(prefix.removesuffix("."), remove_duplicate=False):
            one = self._weights.get(parameter)
            if one is not None and one.has_master:
                yield name, one

    def _save(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        named = list(self._named(module, prefix))
        self._follow_changes([one for _, one in named])
        self._returned.update({one.weight: version(one.stepped) for _, one in named})
        state.update({name: one.stepped.detach() for name, one in named if name in state})

    @torch.no_grad()
    def _load(self, module: nn.Module, state: Mapping[str, Any], prefix: str, *_: Any) -> None:
        for name, one in self._named(module, prefix):
            value = state.get(name)
            if not isinstance(value, torch.Tensor) or value.shape != one.weight.shape:
                continue  # torch reports it
            if is_dtensor(value) == is_dtensor(one.stepped):
                one.stepped.copy_(value)
                self._note_rounding([one])  # torch loads the weight

    def _before_forward(self, *_: Any) -> None:
        if not torch.compiler.is_compiling():
            self.round_written()


def calls_step_hooks(optimizer: Any) -> bool:
    """Whether ``optimizer.step()`` calls torch's hooks: the constructor of torch's class lets the step call them."""
    holder = getattr(getattr(optimizer, "register_step_pre_hook", None), "__self__", None)  # a wrapper may hand it on
    return getattr(getattr(type(holder), "step", None), "hooked", False)


def _version(gradient: torch.Tensor | None) -> int:
    return 0 if gradient is None else version(gradient)


def _replace(optimizer: torch.optim.Optimizer, new: Mapping[torch.Tensor, torch.Tensor]) -> None:
    """Replace parameters of ``optimizer`` in its groups and as the keys of its state."""
    for group in optimizer.param_groups:
        group["params"] = [new.get(parameter, parameter) for parameter in group["params"]]
    for old in [old for old in optimizer.state if old in new]:
        optimizer.state[new[old]] = optimizer.state.pop(old)
