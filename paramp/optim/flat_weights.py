"""Trained parameters, gradients and masters of a rank in flat buffers.

All trained parameters of a rank are stored one after the other in :class:`~paramp.optim.flat_buffer.Buffer` s, by
dtype. The model's parameters and gradients are views of them, so that nothing is copied, the step runs over a few
ranges instead of hundreds of tensors, and a reduction over data ranks is one collective per buffer.

::

    weights    | head.bias ... | blocks.3.mlp ... blocks.0 ... embedding |     fp16, views: the model's parameters
    gradients  | the same                                                |     views: their .grad
    masters    | the same, or under ZeRO this rank's part                |     fp32, stepped by the optimizer

Each buffer has parameters of one optimizer, sorted by its groups and by norm weight, so that neighbours have the same
options and weight in the norm; within that, the last of the model come first, because their gradients are ready first.
ZeRO-1 (Rajbhandari et al., 2020) gives each data rank an equal part of every buffer. Only that rank has masters
and optimizer state for it; it receives the summed gradients of its part and sends its new weights to the others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from ..base import loop_block_sizes
from ..base.collectives import all_gather_single
from ..base.dtensor import is_dtensor, local, wrap
from ..base.module_surgery import cast_parameters, trained_and_frozen
from ..base.scratch_memory_cpu import Scratch
from ..distributed.context import Axis, ParallelContext
from ..distributed.exact_mode_protocol import Numerics
from ..distributed.replicated_axes import batch_axis_of
from ..precision.modes import Precision
from ..precision.stochastic_rounding import BitStream, key_of
from ..scaling.grad_norm import norm_weight
from .flat_buffer import Buffer, FlatParam, in_buckets
from .flat_gradients import FlatGradients, GradientReduction
from .matrices.matrix_exchange import MatrixExchange
from .replicated_gradients import ComparedGradients
from .user_changes.replaced_parameters import ModelParameters
from .user_changes.weights_changed_in_place import ChangedWeights, follow_loads

NO_GROUP = -1
"""The optimizer group of a parameter that is in none of the optimizers' groups."""
NO_GROUPS = (0, NO_GROUP)
"""The indices of such a parameter's optimizer, in whose buffers it is stored, and of its group."""


class FlatWeights:
    """The trained parameters of one rank, and the tensors that the optimizer steps in their place.

    Attributes:
        params: one for each parameter, in the model's order, with the whole model's names.
        buffers: the flat buffers that hold the parameters.
        changes: whether weights were changed in place, so that masters have to follow.
        gradients: the gradients of the parameters, from the backward to the step.
        by_optimizer: the weights of each optimizer.
        frozen: the parameters that are not trained, by name.
        is_partitioned: whether each data rank steps only its part (ZeRO).
        numerics: of the engine.
        group_of: the indices of the optimizer and of its param group of each parameter of the whole model, by any name.
        put_back: :meth:`~.replaced_parameters.ModelParameters.put_back` of the model's parameters.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        group_of: Mapping[str, tuple[int, int]],
        reduction: GradientReduction,
        numerics: Numerics,
        context: ParallelContext,
    ) -> None:
        """``module`` holds full-precision weights on their device; it is cast to the mode's dtype here.

        Args:
            group_of: the indices of the optimizer and of its param group of each parameter, by any of its names.
            reduction: how gradients are summed, also of the tied parameters of ``module`` and FSDP2's units in it.
        """
        self._context, units = context, reduction.units
        self.numerics, self.group_of, precision = numerics, group_of, context.config.precision
        stored = precision if units is None else precision.as_sharded
        if units is not None and not numerics.units_reduce:
            stored = replace(stored, grad_dtype=precision.weights)  # gradients are rounded as in other layouts
        originals = cast_weights(module, stored, untrained=precision.weights)
        for tie in reduction.ties:
            tie.parameter = module.get_parameter(tie.name)  # the cast replaces DTensors
        trained, self.frozen = trained_and_frozen(module)
        self.is_partitioned = context.config.parallel.zero > 0 and context.batch_axis.size > 1
        sizes = {} if units is None else units.padded_sizes()
        self.params = [
            self._flat_param(name, one, *group_of.get(name, NO_GROUPS), sizes.get(one, 0)) for name, one in trained
        ]
        self.buffers = self._filled_buffers(stored, originals)
        self._units = units
        if units is not None:
            units.use_memory(self._memory())
        self._param_of = {param.parameter: param for param in self.params}
        self.changes = ChangedWeights(self.buffers, context.device)
        self.by_optimizer = [OptimizerWeights(one, index, self, context) for index, one in enumerate(optimizers)]
        self._model_parameters = ModelParameters(module)
        if any(buffer.masters.state for buffer in self.buffers):
            follow_loads(module, self.follow_weights)
        kind = ComparedGradients if context.tensor_axis.size > 1 else FlatGradients
        self.gradients: FlatGradients = kind(self.params, self.buffers, self.frozen, reduction, context)
        self._model_parameters.replaced = self._follow_replaced
        own = self._model_parameters.put_back
        self.gradients.before_batch = self.put_back = own if units is None else units.after_reshard(own)

    def _flat_param(self, name: str, parameter: nn.Parameter, optimizer: int, group: int, reserved: int) -> FlatParam:
        """The trained ``parameter``, which has no place in a buffer yet."""
        axis = batch_axis_of(parameter, self._context)
        return FlatParam(
            name=name,
            parameter=parameter,
            optimizer=optimizer,
            group=group,
            norm_weight=norm_weight(parameter, self._context) * (axis.size if self.is_partitioned else 1),
            data_axis=axis,
            reserved=reserved,
        )

    def _filled_buffers(self, stored: Precision, originals: dict[str, torch.Tensor]) -> list[Buffer]:
        """Move all parameters into buffers, with the masters that they have in ``stored``; empties ``originals``."""
        buffers = []
        for params in _bucketed(self.params):
            buffers.append(Buffer(params, stored, is_partitioned=self.is_partitioned))
            # One by one, so that a parameter's old memory is freed as soon as it is copied to its buffer.
            for param in params:
                param.stepped = _move(param, originals.pop(param.name, None))
        return buffers

    @property
    def device(self) -> torch.device:
        return self._context.device

    @torch.no_grad()
    def write_back(self) -> None:
        """Round the stepped masters to the weights, and send these to the ranks that do not step them."""
        for weights in self.by_optimizer:
            weights.write_back()

    def round_stochastically(self, first_names: Mapping[str, str], step: torch.Tensor) -> None:
        """Give what is rounded stochastically its random bits; ``step``: the number of steps made, 0-dim."""
        for param in self.params:
            param.bits = BitStream(key_of(self._context.config.seed, first_names[param.name]), step)

    @torch.no_grad()
    def gather_weights(self) -> None:
        """Under ZeRO, all-gather the stepped weights over data ranks."""
        for weights in self.by_optimizer:
            weights.gather_weights()

    def exact(self, param: FlatParam) -> torch.Tensor:
        """The part of ``param`` that this rank steps, 1-dim: of its master if it has one, else of the weight.

        It shares storage with the stepped tensor, except for masters stored as remainders, which are a new tensor.
        """
        return param.buffer.masters.read(param.own_range)

    @torch.no_grad()
    def take_masters(self, masters: Mapping[FlatParam, torch.Tensor]) -> None:
        """Store ``masters``, of the shapes that :meth:`exact` returns, and round them to the weights.

        Under ZeRO every data rank has to call it.
        """
        for param, master in masters.items():
            param.buffer.masters.write(param.own_range, master)
        self.gather_weights()

    @torch.no_grad()
    def follow_weights(self, weights: Iterable[nn.Parameter]) -> None:
        """Update the masters of those ``weights`` whose values were changed by a load."""
        for param in map(self._param_of.get, weights):
            if param is not None:
                param.buffer.masters.follow_load(param.own_range)

    def _follow_replaced(self, replaced: Sequence[nn.Parameter]) -> None:
        """Follow parameters that were put back into the model with the values of their replacements."""
        if self._units is not None:
            self._units.put_back(self._memory())
        self.follow_weights(replaced)

    def _memory(self) -> dict[nn.Parameter, torch.Tensor]:
        """The memory of each parameter, with its padding."""
        return {param.parameter: param.buffer.memory(param) for param in self.params}

    @torch.no_grad()
    def full_precision(self, *, averages: bool = False) -> dict[str, torch.Tensor]:
        """Each trained weight at its master's precision, complete over data ranks, a DTensor if the weight is one.

        With ``averages`` the averages in their place, which the buffers must have.
        Under ZeRO every data rank has to call it.
        """
        full: dict[str, torch.Tensor] = {}
        for buffer in self.buffers:
            whole = self._whole(buffer, averages=averages)
            for param in buffer.params:
                value = buffer.view(whole, param)
                full[param.name] = wrap(value, param.parameter) if is_dtensor(param.parameter) else value
        return full

    def _whole(self, buffer: Buffer, *, averages: bool) -> torch.Tensor:
        """The masters of ``buffer`` from all data ranks, its weights if it has no masters, or its averages. 1-dim."""
        if not averages and not buffer.masters.state:
            return buffer.weights
        own = buffer.average if averages else buffer.masters.read(slice(None))
        assert own is not None
        if buffer.num_parts == 1:
            return own
        whole = torch.empty_like(buffer.weights, dtype=own.dtype)
        buffer.own(whole).copy_(own)
        all_gather_single(whole, buffer.own(whole), group=buffer.data_axis.group)
        return whole


class OptimizerWeights:
    """The trained parameters of one optimizer on this rank, and the tensors that it steps in their place.

    Attributes:
        optimizer: the user's.
        params: its parameters, in the model's order.
        buffers: the buffers that hold them; no other optimizer's.
        changes: those of all weights.
        followed: all weights with masters, also those of other optimizers, as an error calls them, and the parameters.
        is_partitioned: whether each data rank steps only its part (ZeRO).
        exchange: if ranks have shards of the matrices that it needs whole: how matrices get to their owners and back.
        why_missed: why its own step would not reach these tensors; None if it would.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, index: int, weights: FlatWeights, context: ParallelContext
    ) -> None:
        self.optimizer = optimizer
        self.params = [param for param in weights.params if param.optimizer == index]
        self.buffers = [buffer for buffer in weights.buffers if buffer.params[0].optimizer == index]
        self.changes = weights.changes
        with_masters = (param for param in weights.params if param.buffer.masters.has_master)
        self.followed = [(repr(param.name), param.parameter) for param in with_masters]
        self.exchange: MatrixExchange | None = None
        self.why_missed: str | None = None
        self.is_partitioned = weights.is_partitioned
        self._context = context

    @property
    def device(self) -> torch.device:
        return self._context.device

    @property
    def precision(self) -> Precision:
        return self._context.config.precision

    def random_bits(self) -> dict[nn.Parameter, Callable[[int], torch.Tensor]]:
        """For each tensor that the optimizer steps the random bits of its elements, as a function of a word."""
        return {stepped: partial(self._bits, param) for param, stepped in self.pairs()}

    def _bits(self, param: FlatParam, word: int) -> torch.Tensor:
        if self.exchange is None or param in self.exchange.stay:
            return next(param.buffer.random_bits(param.own_range))[1](word)
        assert param.bits is not None
        return param.bits(torch.arange(param.parameter.numel(), device=self.device), word)

    def pairs(self) -> Iterable[tuple[FlatParam, nn.Parameter]]:
        """(parameter, tensor that is stepped in its place) of each parameter of which this rank steps a part or all."""
        if self.exchange is not None:
            return self.exchange.pairs()
        return ((param, param.stepped) for param in self.params if param.stepped is not None)

    def stepped(self) -> set[nn.Parameter]:
        """The tensors in the optimizer's groups on this rank."""
        return {stepped for param, stepped in self.pairs() if param.group != NO_GROUP}

    def exchanged_axes(self, param: FlatParam) -> Sequence[str]:
        """The mesh's axes along which shards of ``param`` come here, of which this rank steps all; else none."""
        return self.exchange.axes if self.exchange is not None and param in self.exchange.owned else ()

    def by_name(self) -> dict[str, nn.Parameter]:
        """The tensors that the optimizer steps on this rank, by the whole model's names."""
        return {param.name: stepped for param, stepped in self.pairs()}

    def follow_changes(self) -> None:
        """Update the masters of weights that were changed in place, block by block."""
        size, scratch = loop_block_sizes.STEP_BLOCK[self.device.type], Scratch()
        for buffer in self.buffers:
            for start in range(0, buffer.own_size, size):
                buffer.masters.read(slice(start, start + size), scratch)

    @torch.no_grad()
    def write_back(self) -> None:
        """Round the stepped masters to the weights, and send these to the ranks that do not step them."""
        for buffer in self.buffers:
            if buffer.masters.has_master:
                buffer.masters.weight.copy_(buffer.masters.stepped)
        self.gather_weights()

    @torch.no_grad()
    def gather_weights(self) -> None:
        """Under ZeRO, all-gather the stepped weights over data ranks: one all-gather for each buffer."""
        for buffer in self.buffers:
            if buffer.num_parts > 1:
                all_gather_single(buffer.weights, buffer.own(buffer.weights), group=buffer.data_axis.group)


def _bucketed(params: Sequence[FlatParam]) -> Iterator[list[FlatParam]]:
    """The parameters of each buffer, in buffer order."""
    alike: dict[tuple[int, torch.dtype, Axis], list[FlatParam]] = defaultdict(list)
    # Parameters with a small norm weight, such as those of norms, come last: they need a separate collective.
    last_first = params[::-1]
    for param in sorted(last_first, key=lambda param: (param.group == NO_GROUP, param.group, -param.norm_weight)):
        alike[param.optimizer, param.parameter.dtype, param.data_axis].append(param)
    for of_one_kind in alike.values():
        yield from in_buckets(of_one_kind)


@torch.no_grad()
def _move(param: FlatParam, original: torch.Tensor | None) -> nn.Parameter | None:
    """Move a parameter into its buffer; its master starts as ``original``, its local part before rounding, if not None.

    Returns:
        The tensor that the optimizer steps in its place; None if only other ranks step it.
    """
    parameter, buffer = param.parameter, param.buffer
    weight = buffer.view(buffer.weights, param)
    weight.copy_(local(parameter))
    if is_dtensor(parameter):
        parameter._local_tensor = weight
    else:
        parameter.data = weight
    own, masters = param.own_range, buffer.masters
    masters.write(own, (weight if original is None else original).reshape(-1)[slice(*param.own)])
    if param.own[0] == param.own[1]:
        return None
    # An optimizer that steps the weight itself reads the gradient from it, which has to be plain and of its dtype.
    stepped = parameter
    if buffer.num_parts > 1:
        # The optimizer's state of a 0-dim weight is 0-dim too, also in checkpoints.
        stepped = nn.Parameter(masters.stepped[own].view([-1] * bool(parameter.ndim)))
    elif masters.has_master:
        stepped = nn.Parameter(buffer.view(masters.stepped, param))
    elif is_dtensor(parameter) or buffer.gradient_dtype is not weight.dtype:
        stepped = nn.Parameter(weight)
    vars(stepped).update(vars(parameter))  # some optimizers read attributes
    return stepped


def cast_weights(
    module: nn.Module, precision: Precision, *, untrained: torch.dtype | None = None
) -> dict[str, torch.Tensor]:
    """Cast the weights of ``module`` to the mode's dtype.

    ``untrained``: another dtype for frozen weights and for buffers.

    Returns:
        If the mode has masters, the local part of each weight before the cast, by name: the masters' initial values.
    """
    named = module.named_parameters() if precision.masters else ()
    originals = {name: local(parameter).data for name, parameter in named}  # with version counters of their own
    keep = precision.keep_batchnorm_fp32
    cast_parameters(module, precision.weights, keep_batchnorm_fp32=keep, untrained=untrained)
    return originals
