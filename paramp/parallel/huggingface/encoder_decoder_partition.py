"""Pipeline stages of a Hugging Face model that is not one chain of hidden states: encoders with decoders, towers.

Every stage runs the model's whole forward on all inputs, with other modules in the place of other stages' units::

    units of earlier stages      do not run; they return zeros of the shapes that their outputs had there
    the last of them             returns what it returned there
    own units                    run
    the first later one called   does not run; it ends the forward

So masks and position tables, which are computed from inputs and shapes between units, are computed in each stage. What
depends on weights crosses the boundary: the output of the last unit before it, and arguments of the first one behind
it, which are written into the tensors that this stage's forward passes to that unit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from ...base.errors import ConfigError
from ...base.module_surgery import PassThrough, copy_on_meta, with_forward
from ...base.trees import leaves, map_tensors, tensors
from .decoder_partition import check_parameters_are_in, check_positional, check_requests, no_plan, put_at, stage_of
from .missing_plans import find_architecture
from .model_output import call_options, check_output, counting
from .router_loss import ROUTERS, asks_for_loss
from .tokens_that_balance_experts import MASK, masked_by


class CalledUnitsPartition:
    """The partition of a model at the calls of its units, which its row of ``ARCHITECTURES`` or its plan names.

    It runs nothing, so the model may be on ``meta``. ConfigError if the model has parameters outside of its units.
    """

    opened: frozenset[str] = frozenset()

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        check_output(model)
        known, prefix = find_architecture(model)
        planned = [name for name in getattr(model, "_pp_plan", None) or () if name.startswith(prefix)]
        names = [f"{prefix}{name}" for name in known.units] if known else planned
        if not names:
            raise no_plan(model)
        self.units: list[tuple[str, nn.Module]] = [unit for name in names for unit in _modules_at(model, name)]
        bodies = {name.partition(".")[0] for name, _ in self.units}
        heads = [(name, module) for name, module in model.named_children() if name not in bodies]
        self._companions = _tied_to(dict(self.units), heads)
        self.units += [
            (name, module)
            for name, module in heads
            if next(module.parameters(), None) is not None and name not in self._companions
        ]
        self._known = {*dict(self.units), *self._companions}
        check_parameters_are_in(model, self._known)

    def stages(self, plan: Sequence[Sequence[str]]) -> list[nn.Module]:
        model = self._model
        stages = []
        for index, names in enumerate(plan):
            companions = [name for name, unit in self._companions.items() if unit in names]
            part = stage_of(model, [*names, *companions], self._known)
            forward = _StageForward(model, names, is_first=index == 0, is_last=index == len(plan) - 1)
            earlier = {name for before in plan[:index] for name in before}
            for name, unit in self.units:
                if name not in names:
                    role = forward.skip if name in earlier else forward.end
                    put_at(part, model, name, _substitute(unit, name, role))
            forward.stage = with_forward(part, forward.run)
            stages.append(forward.stage)
        return stages


def _modules_at(model: nn.Module, name: str) -> list[tuple[str, nn.Module]]:
    """The module ``name``, each layer of it if it is a list; none if the model has no such module."""
    try:
        module = model.get_submodule(name)
    except AttributeError:
        return []
    if isinstance(module, nn.ModuleList):
        return [(f"{name}.{index}", layer) for index, layer in module.named_children()]
    return [(name, module)]


def _tied_to(units: Mapping[str, nn.Module], heads: Sequence[tuple[str, nn.Module]]) -> dict[str, str]:
    """The embeddings among ``heads`` that only name a weight of a unit, such as T5's ``shared``, by that unit."""
    owners: dict[torch.Tensor, str] = {
        parameter: name for name in reversed(list(units)) for parameter in units[name].parameters()
    }
    return {
        name: owners[module.weight]
        for name, module in heads
        if isinstance(module, nn.Embedding) and module.weight in owners
    }


class _Shape(NamedTuple):
    """A tensor in the output of a unit."""

    shape: torch.Size
    dtype: torch.dtype


class _Ended(BaseException):
    """Ends the forward of a stage, at the call of a unit of a later one; not an Exception, which models may catch."""

    def __init__(self, name: str, arguments: Any) -> None:
        super().__init__()
        self.name = name
        self.arguments = arguments


class _StageForward:
    """The forward of one stage."""

    def __init__(self, model: nn.Module, names: Sequence[str], *, is_first: bool, is_last: bool) -> None:
        self.stage: nn.Module = model
        self._names = names
        self._is_first, self._is_last = is_first, is_last
        self._kind = type(model)
        self._main_input: str = model.main_input_name  # type: ignore[assignment]
        self._options, self._counted = call_options(model), counting(model)
        configs = (getattr(module, "config", None) for module in model.modules())
        self._configs = list({id(config): config for config in configs}.values())
        """That of the model, and those of its parts, which may differ."""
        self._sent_arguments: dict[Any, list[str]] = {}
        """For each set of inputs, the paths of the arguments that are sent."""
        self._lost: dict[Any, set[str]] = {}
        """For each set of inputs, the fields of the model's output that this stage cannot compute."""

    def run(self, x: Any = None, /, *more: Any, **kwargs: Any) -> Any:
        """The model's output on the last stage, on the others what is sent; ``x``: received, or a positional input."""
        check_positional(self._kind, more)
        self._received: dict[str, Any] = {"inputs": {}, "shapes": {}, "last": (None, {}), "next": (None, {})}
        if not self._is_first:
            self._received = x
        elif x is not None:
            self._received["inputs"] = {self._main_input: x}
        self._shapes = dict(self._received["shapes"])
        self._called: list[str] = []
        self._last_output: Any = None
        self._looked_up = False
        kwargs = self._counted((), {**self._options, **kwargs, **self._received["inputs"], "return_dict": True})
        if asks_for_loss(self.stage.config, kwargs):
            raise ConfigError(
                f"inputs[{ROUTERS!r}]: got True, expected False in a pipeline of a model on meta, or of one that is no "
                "chain of layers; build it on the CPU, set it to False, or parallel.pipeline.size to 1"
            )
        check_requests(kwargs, self._configs, (ROUTERS,))
        self._device = next(tensors(kwargs)).device
        self._kind_of_inputs = tuple(sorted(name for name, value in kwargs.items() if value is not None))
        # The first run with gradients, on zeros, finds out which values depend on weights.
        self._is_probe = torch.is_grad_enabled() and self._kind_of_inputs not in self._sent_arguments
        hooks = [hook for name in self._names for hook in self._hooks(name)]
        try:
            with masked_by(kwargs.get(MASK)):
                output = self._kind.forward(self.stage, **kwargs)
        except _Ended as end:
            output = self._to_send(end)
        finally:
            for hook in hooks:
                hook.remove()
        return self._checked(output)

    def _hooks(self, name: str) -> list[Any]:
        unit = self.stage.get_submodule(name)

        def enter(_module: nn.Module, args: Any, kwargs: Any) -> None:
            wanted, values = self._received["next"]
            if name == wanted:
                for path, value in leaves((args, kwargs)):
                    if path in values:
                        if value.requires_grad and not value._is_view():
                            value.detach_()  # nothing depends on how this stage computed it
                        value.copy_(values[path])

        def leave(_module: nn.Module, _args: Any, output: Any) -> None:
            self._called.append(name)
            self._last_output = output
            self._shapes[name] = _described(output)
            for tensor in tensors(output) if self._is_probe else ():
                if tensor.is_floating_point() and not tensor.requires_grad:
                    tensor.requires_grad_()  # frozen units count as weights

        return [unit.register_forward_pre_hook(enter, with_kwargs=True), unit.register_forward_hook(leave)]

    def skip(self, name: str, _unit: nn.Module, _args: Any, _kwargs: Any) -> Any:
        """The output of the unit ``name`` of an earlier stage."""
        last, values = self._received["last"]
        with torch.device(self._device):
            return _filled(self._shapes[name], torch.nan if self._is_probe else 0, values if name == last else {})

    def end(self, name: str, unit: nn.Module, args: Any, kwargs: Any) -> Any:
        """The call of the unit ``name`` of a later stage."""
        missing = [own for own in self._names if own not in self._called]
        if not missing:
            raise _Ended(name, (args, kwargs))
        if isinstance(unit, nn.Embedding):  # of tokens, which a model may look up before it runs another tower
            self._looked_up = True
            ids = [*args, *kwargs.values()][0]
            return torch.zeros(*ids.shape, unit.embedding_dim, device=ids.device)
        raise ConfigError(
            f"parallel.pipeline.split: {self._kind.__name__} calls {name} before {missing[0]}, which is on an earlier "
            "stage; split elsewhere, or set parallel.pipeline.size to 1"
        )

    def _to_send(self, end: _Ended) -> dict[str, Any]:
        last = {path: value for path, value in leaves(self._last_output) if isinstance(value, torch.Tensor)}
        arguments = {path: value for path, value in leaves(end.arguments) if isinstance(value, torch.Tensor)}
        if self._is_probe:
            known = {id(value) for value in last.values()}
            self._sent_arguments[self._kind_of_inputs] = [
                path
                for path, value in arguments.items()
                if value.requires_grad
                and id(value) not in known
                and not self._looked_up  # the next stage looks them up
            ]
        return {
            "inputs": self._received["inputs"],
            "shapes": self._shapes,
            "last": (self._called[-1], last),
            "next": (end.name, {path: arguments[path] for path in self._sent_arguments[self._kind_of_inputs]}),
        }

    def _checked(self, output: Any) -> Any:
        """``output`` without what this stage has no values for, such as the encoder's last hidden state."""
        missing = [name for name in self._names if self._called.count(name) != 1]
        if missing or (not self._is_last and not isinstance(output, dict)):
            raise ConfigError(
                f"parallel.pipeline.size: {self._kind.__name__} calls {(missing or ['later units'])[0]} "
                f"{self._called.count(missing[0]) if missing else 0} times, expected once; set the size to 1"
            )
        self._received, self._last_output = {}, None
        if self._is_probe:
            self._sent_arguments.setdefault(self._kind_of_inputs, [])
            self._lost[self._kind_of_inputs] = {
                name for name, value in output.items() if any(map(_has_nan, tensors(value)))
            }
        lost = self._lost.get(self._kind_of_inputs, set())
        if lost & {"last", "next", "loss", "logits", "last_hidden_state"}:
            raise ConfigError(
                f"parallel.pipeline.split: {self._kind.__name__} uses outputs of earlier stages that are not sent "
                f"to the stage of {self._names[0]}; split elsewhere"
            )
        return type(output)(**{name: value for name, value in output.items() if name not in lost}) if lost else output


def _has_nan(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and bool(tensor.isnan().any())


def _described(output: Any) -> Any:
    return map_tensors(lambda tensor: _Shape(tensor.shape, tensor.dtype), output)  # type: ignore[arg-type,return-value]


def _filled(shapes: Any, value: float, given: Mapping[str, torch.Tensor], path: str = "") -> Any:
    """The output of a unit from its ``shapes``: the tensors ``given`` by path, others full of ``value``."""
    if isinstance(shapes, _Shape):
        if path in given:
            return given[path]
        return torch.full(shapes.shape, value if shapes.dtype.is_floating_point else 0, dtype=shapes.dtype)
    if isinstance(shapes, (tuple, list)):
        return type(shapes)(_filled(child, value, given, f"{path}[{index}]") for index, child in enumerate(shapes))
    return shapes


Role = Callable[[str, nn.Module, Any, Any], Any]


def _substitute(unit: nn.Module, name: str, role: Role) -> nn.Module:
    """A module in place of ``unit``, of its class and with its attributes, but without tensors, calling ``role``."""
    kind, outlined = type(unit), copy_on_meta(unit)
    made: nn.Module = PassThrough.__new__(type(kind.__name__, (PassThrough, kind), {}))
    nn.Module.__init__(made)  # hooks of its own
    made.__dict__ |= {key: value for key, value in unit.__dict__.items() if key not in made.__dict__}
    made.training = unit.training
    # Models read attributes of units, such as the dtype of a weight.
    made.__dict__ |= outlined._modules | outlined._parameters | outlined._buffers
    for hook in unit._forward_hooks.values():
        if getattr(hook, "__module__", "").startswith("transformers."):  # it records hidden states
            made.register_forward_hook(hook)
    made.__dict__["forward"] = lambda *args, **kwargs: role(name, made, args, kwargs)
    return made
