"""Pipeline stages of a Hugging Face model.

The model's own forward computes each stage, including masks and rotary embeddings::

    first stage    input_ids ──► embedding ──► its layers ──► (no norm, no head) ──► hidden states
    later stage    inputs_embeds = hidden states ──► its layers ──► ...
    last stage     inputs_embeds = hidden states ──► its layers ──► norm ──► head ──► logits, loss

Each stage gets the keyword inputs, such as attention_mask, that it does not get from the stage before; the last one the
labels.

A module of another stage is replaced by a :class:`~paramp.base.module_surgery.PassThrough`; each layer keeps its index
in the list, so that per-layer entries of the configuration still apply.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ...base.errors import ConfigError
from ...base.module_surgery import PassThrough, keep_only, named_tensors, names_outside, replace_forward
from ...distributed.trials import without_draws
from .missing_plans import HEAD, find_architecture
from .model_output import call_options, check_output, counting, label_count, main_output
from .router_loss import ROUTERS, RouterLoss, RouterSums
from .tokens_that_balance_experts import MASK, masked_by

FIRST = frozenset({"input_ids", "inputs_embeds"})
"""The inputs of the first stage only."""
LAST = frozenset({"labels", "num_items_in_batch", "shift_labels", "logits_to_keep"})
"""The inputs of the last stage only."""


class PretrainedPartition:
    """The partition of a Hugging Face model: between its embeddings, each of its layers, its norm and its head.

    ConfigError if the model has no pipeline plan, has parameters outside of its units, or does more than apply them.
    """

    opened: frozenset[str] = frozenset()

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        check_output(model)
        known, prefix = find_architecture(model)
        names = (
            {f"{prefix}{name}" for name in known.units} | {HEAD} if known else set(getattr(model, "_pp_plan", ()) or ())
        )
        if not names:
            raise no_plan(model)
        self.units: list[tuple[str, nn.Module]] = []
        for name, module in model.named_modules():
            if name in names and isinstance(module, nn.ModuleList):
                self.units += [(f"{name}.{index}", layer) for index, layer in module.named_children()]
            elif name in names:
                self.units.append((name, module))
        for name in (name for name, tensor in named_tensors(model) if tensor.is_meta):
            raise ConfigError(
                f"parallel.pipeline.size: {name!r} of {type(model).__name__} is on the meta device, but to partition a "
                "Hugging Face model it has to run; build it on the CPU"
            )
        check_parameters_are_in(model, dict(self.units))
        self._check_calls()

    def stages(self, plan: Sequence[Sequence[str]]) -> list[nn.Module]:
        last = len(plan) - 1
        return [self._stage(names, is_first=index == 0, is_last=index == last) for index, names in enumerate(plan)]

    def _stage(self, names: Sequence[str], *, is_first: bool, is_last: bool) -> nn.Module:
        model = self._model
        part = stage_of(model, names, dict(self.units))
        for name, _ in self.units:
            if name not in names:
                put_at(part, model, name, _Nothing() if name in self._embeddings else PassThrough())
        kind, options, counted = type(model), call_options(model), counting(model)
        count, routers = label_count(model), RouterLoss.of(model)

        def forward(stage: Any, x: Any = None, /, *more: Any, **kwargs: Any) -> Any:
            check_positional(kind, more)
            check_requests(kwargs, [stage.config], () if routers is None or not routers.is_wanted else (ROUTERS,))
            kwargs = counted((), {**options, **kwargs, "return_dict": True})
            x, before = x if isinstance(x, tuple) else (x, None)
            if not is_first:
                kwargs = {name: value for name, value in kwargs.items() if name not in FIRST} | {"inputs_embeds": x}
            elif x is not None:
                kwargs["input_ids"] = x
            if not is_last:
                kwargs = {name: kwargs[name] for name in kwargs.keys() - LAST}
            if routers is None or not routers.asked_in(kwargs):
                return run(stage, kwargs)
            with routers.taken_over(stage, count((), kwargs), before and RouterSums(*before)) as sums:
                output = run(stage, kwargs)
            return _without_router_logits(output) if is_last else (output, tuple(sums[0]))

        def run(stage: nn.Module, kwargs: dict[str, Any]) -> Any:
            with masked_by(kwargs.get(MASK)):
                output = kind.forward(stage, **kwargs)
            return output if is_last else main_output(output)

        replace_forward(part, forward)
        if routers is not None and is_last:
            routers.add_to(part)
        return part

    @property
    def _tokens(self) -> nn.Module:
        """The token embedding."""
        return self._model.get_input_embeddings()  # type: ignore[operator]

    @property
    def _embeddings(self) -> set[str]:
        """Units whose outputs are added to the hidden states: of positions, and of token types by the token embedding.

        Adapters may have wrapped the token embedding.
        """
        tokens = self._tokens
        return {name for name, module in self.units if isinstance(module, nn.Embedding) or module is tokens}

    @torch.no_grad()
    def _check_calls(self) -> None:
        """Sort the units in the order in which the forward calls them, which may differ from that of plan and modules.

        The model without its units has to return its input, or stages would apply some operation twice. It runs in
        training mode, in which it may compute more: ``from_pretrained`` returns models in evaluation mode.
        """
        first = next(self._model.parameters())
        calls: list[str] = []
        shell = self._stage([], is_first=False, is_last=False)
        for name, _ in self.units:
            shell.get_submodule(name).register_forward_pre_hook(lambda *_, name=name: calls.append(name))
        modes = {module: module.training for module in shell.modules()}  # of modules in no unit, which are the model's
        shell.train()
        with without_draws(first.device):
            hidden = torch.randn(1, 2, self._model.config.hidden_size)  # type: ignore[union-attr, arg-type]
            hidden = hidden.to(first.device, first.dtype)
            try:
                asked = {} if RouterLoss.of(self._model) is None else {ROUTERS: False}
                same = torch.equal(shell(hidden, **asked), hidden)
                reason = "in training mode it computes more, such as dropout"
            except Exception as error:
                same, reason = False, f"{type(error).__name__}: {error}"
            finally:
                for module, training in modes.items():
                    module.training = training
        tokens = self._tokens
        order = [name for name, module in self.units if module is tokens] + calls  # the shell gets embeddings as input
        known = dict(self.units)
        odd = [name for name in known if order.count(name) != 1]
        if same and odd:
            reason = f"it calls {', '.join(odd)} {order.count(odd[0])} times"
        if not same or odd:
            raise ConfigError(
                f"parallel.pipeline.size: {type(self._model).__name__} cannot be partitioned, because its forward does "
                f"not just apply {', '.join(known)} one after the other ({reason}); set the size to 1"
            )
        self.units = [(name, known[name]) for name in order]


OF_ALL_UNITS = {
    ROUTERS: "the last stage would return those of its own units alone, and has no loss of routers unless the model's "
    "configuration asks for it before initialize",
    "output_hidden_states": "the last stage would return those of its own units alone",
    "output_attentions": "the last stage would return those of its own units alone",
}
"""Inputs that ask for values of all units, and why a pipeline cannot return them."""


def check_requests(kwargs: Mapping[str, Any], configs: Iterable[Any], sent: Collection[str] = ()) -> None:
    """Raise a ConfigError if the inputs ``kwargs``, or else one of ``configs``, ask for values of all units.

    ``sent``: the names of :data:`OF_ALL_UNITS` that may be asked for.
    """
    for name, reason in OF_ALL_UNITS.items():
        asked = kwargs[name] if name in kwargs else any(getattr(config, name, False) for config in configs)
        if asked and name not in sent:
            raise ConfigError(
                f"inputs[{name!r}]: got True, expected False in a pipeline, because {reason}; set it to False, or "
                "parallel.pipeline.size to 1"
            )


def _without_router_logits(output: Any) -> Any:
    """``output`` without those that the last stage has of its own layers."""
    return type(output)(**{name: value for name, value in output.items() if name != "router_logits"})


class _Nothing(PassThrough):
    """The substitute for embeddings, which an earlier stage has added, or a later one will: returns 0."""

    def forward(self, x: Any = None, *args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.zeros((), device=x.device)


def no_plan(model: nn.Module) -> ConfigError:
    """The error for a model without a pipeline plan."""
    return ConfigError(
        f"parallel.pipeline.size: {type(model).__name__} has no pipeline plan (_pp_plan); set the size to 1, "
        "or add its units to paramp.parallel.huggingface.missing_plans.ARCHITECTURES"
    )


def check_parameters_are_in(model: nn.Module, units: Collection[str]) -> None:
    """Raise a ConfigError if ``model`` has parameters that are in none of its ``units``."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    if outside := [name for name in names_outside(model, units) if name in parameters]:
        raise ConfigError(
            f"parallel.pipeline.size: {type(model).__name__} has parameters that are not in its pipeline plan: "
            f"{', '.join(outside)}; set the size to 1"
        )


def check_positional(kind: type[nn.Module], more: Sequence[Any]) -> None:
    """Raise a ConfigError for positional inputs of a stage behind the first one."""
    if more:
        raise ConfigError(
            f"inputs: got {1 + len(more)} positional inputs for {kind.__name__}, expected at most one in a pipeline, "
            'whose later stages need the others too; pass a mapping, such as {"input_ids": x, "attention_mask": mask}'
        )


def stage_of(model: nn.Module, names: Sequence[str], units: Collection[str]) -> nn.Module:
    """``model`` with the modules ``names``, and what is in none of its ``units``, such as tables of positions."""
    leaves = [name for name, module in model.named_modules() if name and not any(module.children())]
    inside = [name for name in leaves if not any(f"{name}.".startswith(f"{unit}.") for unit in units)]
    return keep_only(model, [*names, *names_outside(model, units), *inside])


def put_at(part: nn.Module, model: nn.Module, name: str, substitute: nn.Module) -> None:
    """Put ``substitute`` at ``name`` of ``part``, keeping the order of its siblings in ``model``."""
    *owners, leaf = name.split(".")
    for owner in owners:
        model = model.get_submodule(owner)
        if owner not in part._modules:
            part._modules[owner] = keep_only(model, ())
        part = part.get_submodule(owner)
    modules = {**part._modules, leaf: substitute}
    part._modules = {key: modules[key] for key in model._modules if key in modules}
