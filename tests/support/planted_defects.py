"""Defects that :mod:`test_verify_models` plants into the sharded run: in the library's functions, or in a plan."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pkgutil import resolve_name
from typing import Any
from unittest import mock

import right_models
import torch
from verified import Identity

import paramp
from paramp.tools.verify.options import Options

TP, PP, DP = {"tensor": 2}, {"pipeline": 2}, {"data": 2}
CP, RING = {"context": 2}, {"context": {"size": 2, "method": "ring"}}
Wrap = Callable[[Any], Any]
"""From a function of the library to the wrong one."""


def nothing(_):
    return lambda *_, **__: None


def of_rank_1(axis: str, before: Callable[..., None]) -> Wrap:
    """Call ``before`` with the arguments, on the second rank of an axis only."""

    def wrap(function):
        def wrong(*args, **kwargs):
            if getattr(paramp.get_context(), axis).rank == 1:
                before(*args, **kwargs)
            return function(*args, **kwargs)

        return wrong

    return wrap


def set_to_zero(gradients, context):
    torch._foreach_zero_([gradient for _, gradient in gradients])


def summed_gradients_of(change):
    def wrap(function):
        def wrong(gradients, context):
            gradients = [*gradients]
            function(gradients, context)
            change([gradient for _, gradient in gradients])

        return wrong

    return wrap


def keep_own(function):
    def wrong(context, parameters, *args, **kwargs):
        own = [tie.parameter.grad.clone() for tie in context.ties]
        function(context, parameters, *args, **kwargs)
        if context.pp.rank == 1:
            for tie, gradient in zip(context.ties, own, strict=True):
                tie.parameter.grad.copy_(gradient)

    return wrong


def every_second(factor):
    def wrap(function):
        calls = []

        def wrong(*args):
            calls.append(None)
            return function(*args) * (1.0 if len(calls) % 2 else factor)

        return wrong

    return wrap


def times(factor):
    return lambda function: lambda *args, **kwargs: function(*args, **kwargs) * factor


def gradient_times(factor):
    """A gradient, or those of several tensors, by a factor; the values stay."""

    def changed(result):
        if isinstance(result, torch.Tensor) and result.is_floating_point():
            return Identity.apply(result, None, factor)
        return type(result)(map(changed, result)) if isinstance(result, (tuple, list)) else result

    return lambda function: lambda *args, **kwargs: changed(function(*args, **kwargs))


def counts_all(function):
    def wrong(self):
        function(self)
        gradients, weights = self.for_norm
        self.for_norm = gradients, [1.0] * len(weights)

    return wrong


def half_steps(function):
    def wrong(*args):
        decision = function(*args)
        return replace(decision, divisor=decision.divisor * 2) if torch.distributed.get_rank() else decision

    return wrong


def rows_shifted(function):
    def wrong(module, tokens, group):
        rows = function(module, tokens, group)
        return rows.roll(1, 1) if group.rank() else rows

    return wrong


def in_eval_mode(function):
    def wrong(x, mean, variance, weight, bias, training, *args):
        return function(x, mean, variance, weight, bias, training and not torch.distributed.get_rank(), *args)

    return wrong


def weighted(function):
    return lambda *args: function(*args) * (1.0 + 0.5 * torch.distributed.get_rank())


def alone(x, weight, bias, group):
    return torch.nn.functional.linear(x, weight, bias)


def of_previous_keys(function):
    def wrong(self, k, v, visit):
        known = []

        def stale(segments, keys, values):
            known.append((keys, values))
            return visit(segments, *known[max(0, len(known) - 2)])

        return function(self, k, v, stale)

    return wrong


def averaged(function):
    """A gradient that is not multiplied by the ranks over which it is averaged."""
    return lambda ctx, gradient: (function(ctx, gradient)[0] / ctx.axis.size, None, None)


def unweighted(function):
    def wrong(self, tile, out, lse):
        merged = self.out[:, :, tile.queries]
        before = merged.clone()
        function(self, tile, out, lse)
        merged.copy_(before + out[..., : merged.shape[-1]])

    return wrong


def shifted_after_the_cut(function):
    """Where there are gradients: in its trial, which has none, the library refuses it."""

    def wrong(self, args, kwargs, length, axis):
        args, found = function(self, args, kwargs, length, axis)
        if "labels" in found and torch.is_grad_enabled():
            labels = torch.nn.functional.pad(axis.cut(kwargs["labels"], 1), (0, 1), value=-100)[:, 1:].contiguous()
            found |= {"labels": labels, "shift_labels": labels}
        return args, found

    return wrong


SUMMED_TWICE = {
    "blocks.*.attention.qkv": "colwise",
    "blocks.*.attention.out": "rowwise",
    "blocks.*.mlp.up": "colwise",
    "blocks.*.mlp.down": "rowwise",
    "blocks.*.norm1": "partial_gradient",
}
GATHERED = right_models.PLAN | {"source": "vocab", "target": "vocab"}
FLAT, STAGE = "paramp.optim", "paramp.pipeline.stage.Stage.forward"
SUM = f"{FLAT}.gradient_reduction._sum_over_data_ranks"
SCALED = "paramp.engine.accumulation_window.WindowLosses.scaled"
TIES = f"{FLAT}.flat_gradients.sum_tied_gradients"
LINEAR = "paramp.parallel.tensor.colwise_and_rowwise"
CONTEXT = "paramp.parallel.context_axis"

DEFECTS: dict[str, tuple[str, dict[str, Any], str | None, Wrap | str]] = {
    "a data rank's gradients are lost": ("residual MLP", DP, SUM, of_rank_1("dp", set_to_zero)),
    "gradients are not summed over data ranks": ("batch norms", DP, SUM, nothing),
    "gradients are averaged once too often": ("ViT", DP, SUM, summed_gradients_of(lambda g: torch._foreach_div_(g, 2))),
    "a tied weight counts on its own stage only": ("tied GPT", PP, TIES, nothing),
    "the last stage steps a tied weight with its own gradient": ("tied GPT", PP, TIES, keep_own),
    "a microbatch's loss is not differentiated": ("Llama", PP, SCALED, every_second(0.0)),
    "the loss is divided by the microbatches twice": ("T5", PP, SCALED, times(0.5)),
    "a data rank's loss has a wrong weight": ("experts", DP, SCALED, weighted),
    "norms on slices of a sequence keep their own gradient": (
        "tied GPT",
        {**TP, "sequence_parallel": True},
        "paramp.parallel.tensor.styles.local_shard",
        lambda function: lambda weight, **_: function(weight),
    ),
    "a replicated bias has twice its gradient": ("two outputs", TP, f"{LINEAR}.on_first_rank", gradient_times(2.0)),
    "inputs of sharded layers get a rank's part of the gradient": (
        "Llama",
        TP,
        f"{LINEAR}.enter",
        lambda _: lambda x, group: x,
    ),
    "outputs of sharded layers are not summed": ("LSTM", TP, f"{LINEAR}._summed_linear", lambda _: alone),
    "the norm counts replicas": (
        "encoder-decoder",
        TP,
        f"{FLAT}.flat_gradients.FlatGradients.begin_window",
        counts_all,
    ),
    "ZeRO does not gather weights": (
        "group norms",
        {**DP, "zero": 1},
        f"{FLAT}.flat_weights.OptimizerWeights.gather_weights",
        nothing,
    ),
    "a rank makes half a step": ("ViT", DP, "paramp.engine.step.decide", half_steps),
    "a stage sends back half the gradient": (
        "encoder-decoder",
        PP,
        STAGE,
        gradient_times(0.5),
    ),
    "a stage has running statistics": ("batch norms", PP, "torch.nn.functional.batch_norm", in_eval_mode),
    "attention scales by this rank's heads": (
        "dropout",
        TP,
        "right_models.F.scaled_dot_product_attention",
        lambda function: lambda query, *args, **kwargs: function(query * 2**0.5, *args, **kwargs),
    ),
    "a rank looks up other rows": ("encoder-decoder", TP, f"{LINEAR}.look_up", rows_shifted),
    "the ring's backward has the keys of the step before": (
        "Llama",
        RING,
        f"{CONTEXT}.key_exchange.Ring.backward",
        of_previous_keys,
    ),
    "joined tokens have an average of their gradients": (
        "tied GPT",
        CP,
        f"{CONTEXT}.cut_sequences._JoinTokens.backward",
        averaged,
    ),
    "parts of attention are merged without weights": (
        "tied GPT",
        RING,
        f"{CONTEXT}.merged_attention._Merged.add",
        unweighted,
    ),
    "labels are shifted after the cut": (
        "Llama",
        CP,
        "paramp.parallel.huggingface.context_inputs.PretrainedInputs.cut",
        shifted_after_the_cut,
    ),
    "a norm's gradient is added up though every rank has it": ("tied GPT", TP, None, f"{__name__}:SUMMED_TWICE"),
}
"""By name: the model, the layout, and the function of the library with what makes it wrong, or a wrong plan."""


def options(name: str, **settings: Any) -> Options:
    """Of ``paramp verify`` for a defect of :data:`DEFECTS`."""
    model, layout, _, wrong = DEFECTS[name]
    given = right_models.options(model, parallel=layout, **settings)
    if isinstance(wrong, str):
        return replace(given, plan=wrong)
    return replace(given, plan=f"{__name__}:GATHERED") if "look_up" in (DEFECTS[name][2] or "") else given


@contextmanager
def planted(name: str | None) -> Iterator[None]:
    """A context with the defect ``name`` in the library."""
    with ExitStack() as stack:
        if name is not None and (target := DEFECTS[name][2]) is not None:
            wrap = DEFECTS[name][3]
            assert callable(wrap)
            stack.enter_context(mock.patch(target, wrap(resolve_name(target))))
        yield
