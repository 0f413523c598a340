"""torchtitan's ``context_parallel_degree``: paramp's context axis in place of torch's.

torchtitan gives all ranks of a sequence the same batch, divides losses by the tokens of all ranks, and sums gradients
over ``dp_shard`` and ``cp``. Three of its functions are replaced: what cuts a batch, in training and in validation, and
what changes the attention of a model. That attention calls ``F.scaled_dot_product_attention``, which then goes over the
whole sequence.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..base.errors import ConfigError, require
from ..base.replaced_in_torch import patched
from ..distributed.context import Axis
from ..parallel.context_axis.cut_sequences import SequenceAxis
from ..parallel.context_axis.stages_on_cut_sequences import SequenceInputs

CUT = "prepare_context_parallel_input"
"""What cuts a batch, in torchtitan's modules of the trainer and of the validation."""
ATTENTION = "apply_cp_to_forward"
"""What changes the attention of a model, in the module of its ``parallelize_fn``."""


def check_config(config: Any) -> None:
    """Raise a ConfigError for a configuration with ``context_parallel_degree`` over 1 that does not work."""
    parallelism, compiled = config.parallelism, config.compile
    why = "with context_parallel_degree over 1"
    require(
        parallelism.spmd_backend == "partial_dtensor",
        "parallelism.spmd_backend",
        parallelism.spmd_backend,
        f"'partial_dtensor' {why}: the others cut sequences for FlexAttention alone",
    )
    balancer = parallelism.context_parallel_load_balancer
    require(balancer == "headtail", "parallelism.context_parallel_load_balancer", balancer, "'headtail'")
    compiles = compiled.enable and "model" in compiled.components
    require(not compiles, "compile.enable", True, f"False {why}, as ranks exchange keys in the middle of a graph")
    graphs = not config.training.disable_cuda_graphs
    require(not graphs, "training.disable_cuda_graphs", False, f"True {why}, as the exchanges are in no graph")
    if config.model_spec is not None:
        _parallelizing(config)


def _parallelizing(config: Any) -> ModuleType:
    """The module that parallelizes the model of ``config``."""
    function = config.model_spec.parallelize_fn
    module = sys.modules[function.__module__]
    if not hasattr(module, ATTENTION):
        raise ConfigError(
            f"parallelism.context_parallel_degree: got {config.parallelism.context_parallel_degree}, but "
            f"{module.__name__}.{function.__name__} has no context parallelism; expected 1, or another model"
        )
    return module


@contextmanager
def building(config: Any) -> Iterator[None]:
    """A context in which the trainer of ``config`` is made, with the attention of one process."""
    with patched(_parallelizing(config), ATTENTION, _check_attention):
        yield


def _check_attention(modules: Sequence[nn.Module], mesh: Any) -> None:
    attention = importlib.import_module("torchtitan.models.common.attention")
    for module in modules:
        if not isinstance(module, attention.ScaledDotProductAttention):
            raise ConfigError(
                f"parallelism.context_parallel_degree: got a model with {type(module).__name__}, expected "
                "ScaledDotProductAttention, whose sequences are cut; configure that as its inner_attention, or set the "
                "degree to 1"
            )


class CutBatches:
    """The context axis of a trainer with ``context_parallel_degree`` over 1."""

    def __init__(self, trainer: Any) -> None:
        for part in trainer.model_parts:
            SequenceInputs().check(part, 1)
        group = trainer.parallel_dims.get_mesh("cp").get_group()
        self._axis = SequenceAxis(Axis(dist.get_rank(group), group.size(), group), trainer.device, "auto")
        self._cuts = 0
        if trainer.config.validator.enable:
            trainer.validator.validate = self._within(trainer.validator.validate)

    def _within(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            with self.running():
                return function(*args, **kwargs)

        return run

    @contextmanager
    def running(self) -> Iterator[None]:
        """A context for steps and validation."""
        trainer, validate = map(importlib.import_module, ("torchtitan.trainer", "torchtitan.components.validate"))
        before = self._cuts
        with patched(trainer, CUT, self._cut), patched(validate, CUT, self._cut), self._axis.computing():
            yield
        if self._cuts == before:
            raise RuntimeError(f"torchtitan did not call {CUT}, so each rank trained on whole sequences")

    def _cut(
        self, inputs: torch.Tensor, labels: torch.Tensor, options: dict[str, Any], *_: Any
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        """This rank's tokens of the batch; labels are shifted already."""
        self._cuts += 1
        length = inputs.shape[1]
        (inputs, labels), options = SequenceInputs().cut((inputs, labels), options, length, self._axis)
        if options.get("positions") is None:
            places = self._axis.positions(inputs.shape[1], inputs.device)
            options["positions"] = places.expand(len(inputs), -1)
        return inputs, labels, options
