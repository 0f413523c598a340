"""The exact mode as the rest of the package sees it: :class:`~paramp.distributed.exact_mode_protocol.Numerics`."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from ..base.errors import ConfigError
from ..base.module_surgery import PassThrough
from ..config.reproducible import Reproducible, check_data_ranks
from ..config.schema import Config
from ..distributed.context import ParallelContext
from ..distributed.exact_mode_protocol import Numerics
from ..distributed.rng import derive_seed
from ..engine.accumulation_window import AccumulationWindow
from ..engine.state.model_tensors import ParamChunks
from ..optim.choose_step import why_not_fused
from ..optim.flat_gradients import GradientReduction
from ..optim.gradient_reduction import UnitReduction
from ..parallel.expert_balance import token_counts
from ..parallel.microbatches import Batch
from ..parallel.model_families import ModelAdapter
from ..pipeline.stage import Stages
from .dropout_masks import Masks
from .exact_function_mode import ExactFunctions
from .exact_layout import ExactLayout, Position, SequenceSlices
from .exact_model_checks import check_buffers, check_modules, check_stages, check_ties
from .forwards_in_microchunk import Forwards
from .gradient_taps import Tap
from .microchunk_gradients import MicrochunkGradients, ShardedMicrochunkGradients
from .microchunk_run import MicrochunkRun
from .sum_of_squares import squares_over_world

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle

    from .exact_experts import ExactExperts
    from .exact_sequence_axis import ExactSequenceAxis

VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
VALUES = ":4096:8", ":16:8"
"""Those with which cuBLAS adds in one order; the first is the faster one. It reads the variable once in a process, at
its first call. Set later it has no effect."""
WHOLE_BATCH = (
    "engine(x) and engine.backward(loss) cannot train with reproducible, which runs each batch in chunks; call "
    "engine.forward_backward(x, y), or engine.eval() first to look at outputs"
)


class ExactNumerics(Numerics):
    """The numerics of one engine whose results have the same bits on every layout."""

    consecutive_samples = True
    keeps_dtypes = True
    units_reduce = False
    counts_first_rank = True
    computes_cross_entropy = True
    depends_on_accumulation = True

    _experts: Mapping[str, ExactExperts]
    _forwards: Forwards
    _functions: ExactFunctions
    _run: MicrochunkRun
    _sequences: ExactSequenceAxis | None

    def __init__(self, config: Config) -> None:
        assert isinstance(config.reproducible, Reproducible)
        self._config, self._how, self._sequences = config, config.reproducible, None

    def batch_divisor(self, config: Config) -> tuple[str, int]:
        """The samples of a microchunk."""
        return "reproducible.chunk", self._how.chunk

    def prepare_process(self) -> None:
        """Let cuBLAS add in one order."""
        choose_workspace()

    def prepare(self, context: ParallelContext, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Set torch to one thread, and on GPUs to its deterministic algorithms until the context is closed.

        Raises:
            ConfigError: the number of data ranks is no power of two, the results of a module or an optimizer depend on
                the layout, or cuBLAS may have read another workspace (:func:`choose_workspace`).
        """
        check_data_ranks(context.batch_axis.size)
        check_modules(model)
        check_ties(model)
        for reason in filter(None, map(why_not_fused, optimizers)):
            raise ConfigError(
                "optimizer: expected torch's AdamW, Adam or SGD in fused kernels, which step each element alone, "
                f"because reproducible is set, but {reason}"
            )
        torch.set_num_threads(1)  # kernels split their work, and some sums, by the number of threads
        if context.device.type == "cuda":
            choose_workspace()  # launched contexts have; those over a mesh of others' have not
            _use_deterministic_algorithms(context)
        tensor, config = context.tensor_axis, self._config
        group = tensor.group if tensor.size > 1 else None
        sequence_parallel = config.parallel.sequence_parallel
        seed, number = context.config.seed, context.num_engines  # of the engine under construction
        layout = ExactLayout(
            seed=derive_seed(seed, "engine", number) if number else seed,
            microchunk=self._how.chunk,
            slices=self._how.slices,
            tensor_group=group,
            sequence_parallel=sequence_parallel,
            sequences=SequenceSlices(self._how.sequence_slices, context.cp.group if context.cp.size > 1 else None),
        )
        self._forwards = Forwards(layout, self._position)
        if layout.cuts_sequences:
            from .exact_sequence_axis import ExactSequenceAxis
            from .sliced_sequences import check_sequences

            check_sequences(model)
            self._sequences = ExactSequenceAxis(context, self._forwards, self.computing)

    def _position(self) -> Position:
        return self._run.position

    def plan(
        self, adapter: ModelAdapter, plan: Mapping[str, Any] | None, context: ParallelContext
    ) -> dict[str, ParallelStyle]:
        """The style of each module in slices, on one tensor rank too, and of experts, which tensor ranks have whole."""
        from .exact_experts import exact_experts
        from .plan_of_sliced_layers import sliced_plan

        layout, size = self._forwards.layout, self._config.parallel.expert
        self._experts = exact_experts(adapter.model, adapter.resolved_experts(plan), size, self._forwards)
        if self._experts and layout.cuts_sequences:
            _check_router_loss(adapter.model)
        own = adapter.resolved(plan if plan is not None else _plan_of(adapter, layout, layout.sequence_parallel))
        is_known = plan is not None or layout.cuts_sequences  # slices of sequences are cut already
        with_sequence = own if is_known else adapter.resolved(_plan_of(adapter, layout, True))
        own, with_sequence = (
            {name: style for name, style in styles.items() if name not in self._experts}
            for styles in (own, with_sequence)
        )
        return sliced_plan(adapter.model, own, with_sequence, self._forwards) | self._experts

    def sequence_axis(self) -> ExactSequenceAxis | None:
        """Sequences are cut into slices on one rank of the context axis too."""
        return self._sequences

    def watch(
        self, all_stages: Sequence[nn.Module], local: Sequence[nn.Module], styles: Mapping[str, ParallelStyle]
    ) -> None:
        """Watch what the stages call of torch.

        Raises:
            ConfigError: several stages have a trained parameter under one name.
        """
        from ..parallel.tensor.styles import ScatterSequence
        from .exact_cross_entropy import cross_entropy  # imports DTensor

        check_stages(all_stages)
        names: dict[nn.Module, str] = {}
        stages_of: defaultdict[str, set[int]] = defaultdict(set)
        for index, stage in enumerate(all_stages):
            for name, module in stage.named_modules():
                if not isinstance(module, PassThrough):
                    stages_of[names.setdefault(module, name)].add(index)
        masks = Masks(
            self._forwards,
            divided={name for name, found in stages_of.items() if len(found) > 1},
            unsliced=[name for name, style in styles.items() if isinstance(style, ScatterSequence)],
        )
        loss: Callable[..., torch.Tensor] = partial(cross_entropy, self._forwards.layout)
        replaced = {F.cross_entropy: loss if self._sequences is None else self._sequences.of_whole_rows(loss)}
        self._functions = ExactFunctions(self._forwards, masks, replaced, self._sequences)
        if self._sequences is not None:
            self._sequences.masks = masks
        for stage in local:
            self._forwards.watch(stage, names)

    def apply_styles(self, module: nn.Module, styles: Mapping[str, ParallelStyle]) -> None:
        """Cut layers on one tensor rank too."""
        from .plan_of_sliced_layers import apply_sliced_plan

        apply_sliced_plan(module, styles)

    def gradient_reduction(self, default: type[GradientReduction]) -> type[GradientReduction]:
        """Gradients are added up in a tree over microchunks."""
        return ShardedMicrochunkGradients if default is UnitReduction else MicrochunkGradients

    def connect(
        self,
        stages: Stages,
        params: ParamChunks,
        window: AccumulationWindow,
        step_counts: Callable[[], list[int]],
    ) -> None:
        """Watch buffers, tied parameters and losses."""
        gradients, context = params.weights.gradients.reduction, params.context
        assert isinstance(gradients, MicrochunkGradients)
        own = dict(zip(context.local_stages, (stage.module for stage in stages), strict=True))
        shared = self._experts if context.config.parallel.expert > 1 else {}
        ties, of_experts = gradients.assign_stages(own, params.first_names, shared)
        if self._sequences is not None:
            from .sliced_sequences import slice_sequences

            slice_sequences(stages.module, self._forwards, self._experts)
        _attach(stages.module, ties)
        for name, taps in of_experts.items():
            module, _, parameter = name.rpartition(".")
            self._experts[module].taps[parameter] = taps
        for counts in token_counts(stages.module):
            counts.join(context.batch_axis.group, apart=True)
        check_buffers(own)
        self._run = MicrochunkRun(self._forwards.layout, gradients, window, step_counts)

    def computing(self) -> AbstractContextManager[Any]:
        """Functions of torch have the same bits on every layout."""
        self._forwards.begin()
        return self._functions

    def check_own_forward(self) -> None:
        """Raise a RuntimeError."""
        raise RuntimeError(WHOLE_BATCH)

    def num_microbatches(self, num_samples: int, default: int) -> int:
        """The microchunks of a batch."""
        return self._run.count(num_samples)

    def begin_batch(self, microbatches: list[Batch]) -> list[Batch]:
        """``microbatches``; none if data ranks have different numbers of them, which is recorded as a failure."""
        return self._run.begin(microbatches)

    def begin_rerun(self, call: int) -> None:
        """Draw the masks of that call."""
        self._run.begin_again(call)

    def begin_forward(self, microbatch: int) -> None:
        """A microchunk begins."""
        self._run.move_to(microbatch)
        self._forwards.begin()

    def begin_backward(self, microbatch: int) -> None:
        """The microchunk's forwards may be computed again."""
        self._run.move_to(microbatch)
        if self._sequences is not None:
            self._sequences.compare_modules()

    def end_backward(self, stage: int, microbatch: int) -> None:
        """Add the gradients to the tree."""
        self._run.add_gradients(stage, microbatch)

    @staticmethod
    def norm_power(
        gradients: Sequence[torch.Tensor],
        norm_weights: Sequence[float],
        norm_type: float,
        device: torch.device,
        sums: Any = None,
    ) -> torch.Tensor:
        """The exact sum of squares of all ranks on the first one; two collectives of the world."""
        return squares_over_world(gradients, norm_weights, device)


def choose_workspace() -> None:
    """Set the variable of cuBLAS, for a process that will compute on a GPU; call it before CUDA is initialised.

    Raises:
        ConfigError: the variable has another value, or is not set where CUDA is initialised already, so that cuBLAS may
            have read it.
    """
    value = os.environ.get(VARIABLE)
    if value in VALUES:
        return
    if value is not None:
        raise ConfigError(
            f"{VARIABLE}: got {value!r}, expected {' or '.join(map(repr, VALUES))}, because reproducible is set, and "
            "with other workspaces cuBLAS adds in an order that changes from run to run"
        )
    if torch.cuda.is_initialized():
        raise ConfigError(
            f"{VARIABLE}: it is not set, but CUDA is in use already, and reproducible needs it before cuBLAS is first "
            f"called; set {VARIABLE}={VALUES[0]} in the environment of the process, or call paramp.launch_from_torch "
            "before anything runs on a GPU"
        )
    os.environ[VARIABLE] = VALUES[0]


def _use_deterministic_algorithms(context: ParallelContext) -> None:
    was, warned = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    context.before_close.append(partial(torch.use_deterministic_algorithms, was, warn_only=warned))


def _check_router_loss(model: Any) -> None:
    """Raise a ConfigError if the configuration of ``model``, one of transformers', asks for the loss of its routers."""
    from ..parallel.huggingface.router_loss import wants_loss

    if wants_loss(model):
        raise ConfigError(
            "reproducible.sequence_slices: model.config.output_router_logits is True, expected False, because the loss "
            "of routers is that of the tokens that a rank has; or set it to 1"
        )


def _plan_of(adapter: ModelAdapter, layout: ExactLayout, sequence_parallel: bool) -> Mapping[str, str | ParallelStyle]:
    """The model's own plan; none if it has none and the layout needs none."""
    try:
        return adapter.plan(layout.tensor_size, sequence_parallel)
    except ConfigError:
        if layout.tensor_size > 1 and sequence_parallel == layout.sequence_parallel:
            raise
        return {}


def _attach(module: nn.Module, taps: Mapping[str, Tap]) -> None:
    """Let the submodules of ``module`` use tied parameters through ``taps``, by the parameters' names."""
    by_module: defaultdict[str, dict[str, Tap]] = defaultdict(dict)
    for name, tap in taps.items():
        owner, _, own = name.rpartition(".")
        by_module[owner][own] = tap
    for owner, own_taps in by_module.items():
        from .styles_of_sliced_layers import use_through

        use_through(module.get_submodule(owner), own_taps)
