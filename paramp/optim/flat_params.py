"""What the engine trains, in a few long tensors.

All trained parameters of a rank lie one after the other in :class:`Buffer` s, one for each dtype of weights: the
weights, their gradients, and what only the optimizer needs (fp32 masters, or the remainders that complete the weights
to them). The model's parameters and gradients are views, so that nothing is copied on the way, the step runs over a
few ranges instead of hundreds of tensors, and a reduction over data ranks is one collective.

::

    weights    | head.bias ... | blocks.3.mlp ... blocks.0 ... embedding |     fp16, views: the model's parameters
    gradients  | the same                                                |     views: their .grad
    masters    | the same, or under ZeRO this rank's part                |     fp32, what the optimizer steps

Parameters are sorted by their optimizer group and by how many ranks hold them, so that neighbours are stepped and
counted alike; within that, the last of the model first, because their gradients are ready first.

ZeRO-1 (Rajbhandari et al., 2020) gives each data rank an equal part of every buffer. It alone has masters
and optimizer state for it, receives its gradients summed, and sends its new weights to the others.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..base.dtensor import local, wrap
from ..base.module_surgery import cast_parameters
from ..distributed.collectives import all_gather_shards, sum_
from ..distributed.context import ParallelContext, TiedParameter
from ..precision.policy import Precision
from .grad_norm import norm_weight, unscale_and_check_
from .grad_reduce import align_gradients, sum_tied_gradients
from .master_residuals import join, split
from .master_weights import check_frozen, follow, install_follower, trained_and_frozen
from .param_buffer import Buffer, FlatParam, StepRange, _in_buckets
from .zero import OverlappedReduceScatter

__all__ = ["FlatWeights"]

NO_GROUP = -1
"""The optimizer group of a parameter that the optimizer was not given."""


@torch.no_grad()
def _move(param: FlatParam, buffer: Buffer, original: torch.Tensor | None) -> nn.Parameter | None:
    """Let a parameter lie in ``buffer``, and its master, which is made from ``original``.

    Returns:
        What the optimizer is to step in its place; None if that is another rank's.
    """
    parameter, weight = param.parameter, buffer.view(buffer.weights, param)
    weight.copy_(local(parameter))
    if isinstance(parameter, DTensor):
        parameter._local_tensor = weight
    else:
        parameter.data = weight
    own, flat = buffer.own_range(param), buffer.flat_range(param)
    part = (weight if original is None else original).reshape(-1)[slice(*param.own)]
    if buffer.masters is not None:
        buffer.masters[own].copy_(part)
    elif buffer.remainders is not None:
        split(part.float(), buffer.weights[flat], buffer.remainders[own])
    if buffer.num_parts > 1:
        if param.own[0] == param.own[1]:
            return None
        return nn.Parameter(buffer.weights[flat] if buffer.masters is None else buffer.masters[own])
    if buffer.masters is not None:
        return nn.Parameter(buffer.view(buffer.masters, param))
    # What is stepped has gradients of its own dtype.
    apart = isinstance(parameter, DTensor) or buffer.gradient_dtype is not weight.dtype
    return nn.Parameter(weight) if apart else parameter


class FlatWeights:
    """The trained parameters of one rank, and the tensors that the optimizer steps in their place.

    Attributes:
        slots: one for each parameter, in the model's order.
        buffers: where they lie.
        early: the reductions over data ranks that run beside the backward; None without ZeRO.
        names, parameters: the model's own, under the whole model's names.
        stepped: what the optimizer steps, in the same order; plain and local. Under ZeRO it is one-dimensional: the
            part of a parameter that this rank steps, None where it has no part of it.
    """

    def __init__(
        self,
        module: nn.Module,
        precision: Precision,
        context: ParallelContext,
        group_of: Mapping[str, int],
        ties: Sequence[TiedParameter] = (),
    ) -> None:
        """``module`` holds full-precision weights on their device; it is cast to the mode's dtype here.

        Args:
            group_of: the optimizer's param group of each parameter, by any of its names.
            ties: those of ``module``, as recorded in the context.
        """
        self._context = context
        self._precision = precision
        originals = {
            name: local(parameter).detach() for name, parameter in module.named_parameters() if precision.masters
        }
        cast_parameters(module, precision.weights, keep_batchnorm_fp32=precision.keep_batchnorm_fp32)
        for tie in ties:
            tie.parameter = module.get_parameter(tie.name)  # rounding made new parameters
        self._tied = {tie.parameter for tie in ties}
        trained, self._frozen = trained_and_frozen(module)
        zero = context.config.parallel.zero > 0 and context.dp.size > 1
        parts = context.dp.size if zero else 1
        self.params = [
            FlatParam(
                name,
                parameter,
                group_of.get(name, NO_GROUP),
                norm_weight(parameter, context) * parts,
            )
            for name, parameter in trained
        ]
        self.names = [param.name for param in self.params]
        self.parameters = [param.parameter for param in self.params]
        by_dtype: dict[torch.dtype, list[FlatParam]] = defaultdict(list)
        # The small groups and shares, such as those of norms, come last: they wait for a collective of their own.
        last_first = self.params[::-1]
        for param in sorted(last_first, key=lambda param: (param.group == NO_GROUP, param.group, -param.norm_weight)):
            by_dtype[param.parameter.dtype].append(param)
        self.buffers: list[Buffer] = []
        stepped: dict[FlatParam, nn.Parameter | None] = {}
        for params in by_dtype.values():
            for together in _in_buckets(params):
                buffer = Buffer(together, precision, parts, context.dp.rank if zero else 0)
                self.buffers.append(buffer)
                # One by one, so that what a parameter had before is free as soon as it lies in its buffer.
                stepped |= {param: _move(param, buffer, originals.pop(param.name, None)) for param in together}
        self.stepped = [stepped[param] for param in self.params]
        self._buffer_of = {param: buffer for buffer in self.buffers for param in buffer.params}
        self._param_of = {param.parameter: param for param in self.params}
        self._with_gradients = False
        self._without: list[FlatParam] = []
        self._presence: tuple[tuple[str, ...], torch.Tensor] | None = None
        self._missed: dict[FlatParam, int] = {}  # equal for parameters that have missed the same steps
        self._histories = itertools.count(1)
        self._absent: tuple[FlatParam, ...] = ()
        self._stepped_runs = self._all = self._all_runs()
        self._hooks = [
            param.parameter.register_hook(_Placements(param))
            for param in self.params
            if isinstance(param.parameter, DTensor)
        ]
        self.overlapped = (
            OverlappedReduceScatter(self.buffers, context, precision.reduce_dtypes.dp, self._tied) if zero else None
        )

    @property
    def device(self) -> torch.device:
        return self._context.device

    def by_name(self) -> dict[str, nn.Parameter]:
        pairs = zip(self.names, self.stepped, strict=True)
        return {name: stepped for name, stepped in pairs if stepped is not None}

    # ------------------------------------------------------------------------------------------------ gradients

    def zero_grad(self) -> None:
        """Make every gradient zero: one fill for each buffer."""
        for buffer in self.buffers:
            buffer.gradients.zero_()
        for param in self.params:
            gradient = None if param.placement_mismatch else param.gradient
            if param.parameter.grad is not gradient:
                param.parameter.grad = gradient
            param.seen = param.version
        for _, parameter in self._frozen:  # one that was unfrozen since has a gradient too
            parameter.grad = None

    def begin_window(self) -> None:
        """Make room for gradients, if there is none yet. A backward that finds none leaves its own, which move in."""
        if self._with_gradients:
            self._take_back()
            return
        self._with_gradients = True
        for buffer in self.buffers:
            buffer.make_gradients()
        for param in self.params:
            param.seen = param.version
        self._take_back()

    @torch.no_grad()
    def _take_back(self) -> None:
        """Let gradients lie in their buffers again that were taken away or replaced by hand: ZeRO reduces buffers."""
        for param in self.params:
            given = param.parameter.grad
            if given is param.gradient or (param.placement_mismatch and given is not None):
                continue
            if given is None:
                if param.version != param.seen:
                    param.local_gradient.zero_()
                    param.seen = param.version
                if param.placement_mismatch:
                    continue
            elif isinstance(given, DTensor) and given.placements != cast(DTensor, param.parameter).placements:
                continue
            else:
                param.local_gradient.copy_(local(given).to_dense())
            param.parameter.grad = param.gradient

    def _check_places(self) -> None:
        """Refuse parameters and gradients that were moved out of their buffers: the step would pass them by.

        Raises:
            RuntimeError: naming one.
        """
        for param, buffer in self._buffer_of.items():
            for tensor, flat in ((local(param.parameter), buffer.weights), (param.local_gradient, buffer.gradients)):
                if param.size and tensor.data_ptr() != flat.data_ptr() + param.start * flat.element_size():
                    raise RuntimeError(
                        f"{param.name!r} was moved after initialize (its .data was replaced, or its module was cast or "
                        "given another memory format), so that steps would not reach it; do that before initialize, "
                        "and change values in place (copy_, load_state_dict)"
                    )

    @torch.no_grad()
    def collect(self, found_inf: torch.Tensor) -> None:
        """Bring every gradient into its buffer, complete over tensor ranks.

        Args:
            found_inf: set to 1 if an element was not finite that is left out here. (Those that stay are judged later.)

        Raises:
            RuntimeError: a parameter that was frozen when the optimizer was taken over has a gradient, or a parameter
                or gradient was moved out of its buffer.
        """
        check_frozen(self._frozen)
        self.begin_window()
        self._check_places()
        if self.overlapped is not None:
            unscale_and_check_(self.overlapped.touched(), torch.ones_like(found_inf), found_inf)
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        elsewhere = [param for param in self.params if param.parameter.grad is not param.gradient]
        arrived = [param for param in elsewhere if param.parameter.grad is not None]
        partition = align_gradients([param.parameter for param in arrived], self._precision.reduce_dtypes.tp)
        unscale_and_check_(partition, torch.ones_like(found_inf), found_inf)
        if arrived:
            torch._foreach_copy_(
                [param.local_gradient for param in arrived],
                [local(cast(torch.Tensor, param.parameter.grad)) for param in arrived],
            )
        for param in elsewhere:
            if param.parameter.grad is not None or param.parameter in self._tied:
                param.parameter.grad = param.gradient
        self._without = [
            param for param in self.params if param.parameter not in self._tied and param.version == param.seen
        ]

    def absent(self) -> list[FlatParam]:
        """The parameters that had no gradient on this rank when :meth:`collect` was called."""
        return self._without

    def presence(self, names: Iterable[str]) -> torch.Tensor:
        """1 for each of ``names`` that is a parameter with a gradient on this rank, else 0; 1-dim float64."""
        key = tuple(param.name for param in self._without)
        if self._presence is None or self._presence[0] != key:
            have = set(self.names).difference(key)
            values = torch.tensor([float(name in have) for name in names], dtype=torch.float64)
            self._presence = key, values.to(self._context.device)
        return self._presence[1]

    @torch.no_grad()
    def reduce(self) -> None:
        """Sum the gradients over data ranks, and then those of tied parameters over the stages that hold a copy.

        One all-reduce for each buffer. Under ZeRO one reduce-scatter for each that the backward has not seen to, which
        leaves this rank with the sums of its own part.

        A sum over data ranks is made in an order that depends on the place in the buffer, which is another on each
        stage. The sum over stages has to be the last one, or copies of a tied parameter would part by rounding.
        """
        dtypes, data = self._precision.reduce_dtypes, self._context.dp
        tied = [param.local_gradient for param in self.params if param.parameter in self._tied]
        whole = [buffer.gradients for buffer in self.buffers] if self.overlapped is None else tied
        for gradients in whole:
            sum_([gradients], data.group, dtypes.dp)
        sum_tied_gradients(self._context, self.parameters, dtypes.pp)
        if self.overlapped is not None:
            if tied and data.rank > 0:  # what is complete counts once in what is still to be summed
                torch._foreach_zero_(tied)
            self.overlapped.reduce_the_rest()

    def begin_last_backward(self) -> None:
        """Let the reductions of ZeRO begin beside the backward, which is the last of a window."""
        # The first window shows which gradients have other placements than their parameters.
        if self.overlapped is not None and not self._hooks:
            self.overlapped.begin()

    def end_last_backward(self) -> None:
        """Wait for the reductions, where any have begun."""
        if self.overlapped is not None:
            self.overlapped.end()

    def judged(self) -> tuple[list[torch.Tensor], list[float]]:
        """The gradients that this rank answers for, flat, and what an element of each counts in sums over the world."""
        parts = [(part, run.norm_weight) for run in self._all for part in run.in_blocks()]
        return [part for part, _ in parts], [norm_weight for _, norm_weight in parts]

    def counted(self) -> tuple[list[torch.Tensor], list[float]]:
        """As :meth:`judged`, one parameter each, without what lies between them."""
        parts = [(param, self._buffer_of[param]) for param in self.params if param.own[0] < param.own[1]]
        return [buffer.gradients[buffer.flat_range(param)] for param, buffer in parts], [
            param.norm_weight for param, _ in parts
        ]

    def arrived(self) -> Iterator[tuple[torch.Tensor, float]]:
        """Each gradient that this rank has before a step, as autograd left it, and what an element of it counts.

        In sums over the world each element of the logical model counts once: over data ranks as an average, under ZeRO
        as the rank that steps it has it.
        """
        for param in self.params:
            gradient, buffer = param.parameter.grad, self._buffer_of[param]
            if gradient is not param.gradient:
                if gradient is not None and gradient.numel():  # it may have as many elements as the whole parameter
                    yield gradient, param.norm_weight / buffer.num_parts * param.size / local(gradient).numel()
            elif param.version != param.seen and param.own[0] < param.own[1]:
                yield buffer.gradients[buffer.flat_range(param)], param.norm_weight

    # ----------------------------------------------------------------------------------------------------- the step

    def runs(self, absent: Sequence[FlatParam] = ()) -> list[StepRange]:
        """What is to be stepped, where no rank has a gradient for the parameters in ``absent``."""
        if tuple(absent) != self._absent:
            self._absent = tuple(absent)
            self._stepped_runs = self._all_runs(self._absent)
        # Whether this step is skipped is not known here, so what has missed others may not be counted as equal.
        missed: dict[int, int] = {}
        for param in absent:
            before = self._missed.get(param, 0)
            if before not in missed:
                missed[before] = next(self._histories)
            self._missed[param] = missed[before]
        return self._stepped_runs

    def _all_runs(self, absent: Sequence[FlatParam] = ()) -> list[StepRange]:
        return [run for buffer in self.buffers for run in buffer.runs(absent, self._missed)]

    def differ_in_steps(self, steps: Mapping[FlatParam, int]) -> None:
        """Note after loading a state that parameters have been stepped ``steps`` times; they run together if equal."""
        most = max(steps.values(), default=0)
        self._missed = {param: count - most for param, count in steps.items()}  # histories made later are above 0
        self._stepped_runs = self._all_runs(self._absent)

    def pairs(self) -> Iterator[tuple[FlatParam, nn.Parameter, Buffer]]:
        """Each parameter that this rank steps (a part of), what the optimizer has for it, and its buffer."""
        for param, stepped in zip(self.params, self.stepped, strict=True):
            if stepped is not None:
                yield param, stepped, self._buffer_of[param]

    @torch.no_grad()
    def write_back(self) -> None:
        """Round the stepped masters to the weights, and send them to the ranks that do not step them."""
        for buffer in self.buffers:
            if buffer.masters is not None:
                buffer.own(buffer.weights).copy_(buffer.masters)
        self.gather_weights()

    @torch.no_grad()
    def gather_weights(self) -> None:
        """Under ZeRO, give every data rank the weights that the others have stepped."""
        for buffer in self.buffers:
            if buffer.num_parts > 1:
                all_gather_shards(buffer.weights, buffer.own(buffer.weights), self._context.dp.group)

    # ---------------------------------------------------------------------------------------------- what is saved

    def exact(self, param: FlatParam) -> torch.Tensor:
        """The part of ``slot`` that this rank steps, flat: of the master where there is one, else of the weight.

        It shares storage with what is stepped, but for remainder masters, which are put together anew.
        """
        buffer = self._buffer_of[param]
        weight = buffer.weights[buffer.flat_range(param)]
        if buffer.masters is not None:
            return buffer.masters[buffer.own_range(param)]
        if buffer.remainders is None:
            return weight
        master = join(weight, buffer.remainders[buffer.own_range(param)])
        # Below fp16's normal numbers a master that lay just beside a tie may come back as the tie, which rounds to the
        # weight's other neighbour.
        beside = torch.nextafter(master, weight.float())
        return torch.where((master.to(weight.dtype) == weight) | ~weight.isfinite(), master, beside)

    def has_remainder(self, param: FlatParam) -> bool:
        """Whether the master of ``slot`` is kept as a remainder."""
        return self._buffer_of[param].remainders is not None

    @torch.no_grad()
    def take_masters(self, masters: Mapping[FlatParam, torch.Tensor]) -> None:
        """Take up ``masters`` in place of what :meth:`exact` gave as a copy, and round all masters to the weights.

        Under ZeRO every data rank has to call it.
        """
        for param, master in masters.items():
            buffer = self._buffer_of[param]
            weight, remainder = buffer.weights[buffer.flat_range(param)], buffer.remainders
            assert remainder is not None
            split(master, weight, remainder[buffer.own_range(param)])
        self.write_back()

    @property
    def frozen(self) -> list[tuple[str, nn.Parameter]]:
        """The parameters that are not trained."""
        return self._frozen

    def follow_loads(self, module: nn.Module) -> None:
        """Let masters follow weights that are loaded into ``module`` or into any module in it."""
        if any(buffer.masters is not None or buffer.remainders is not None for buffer in self.buffers):
            install_follower(module, self)

    @torch.no_grad()
    def follow_weights(self, weights: Iterable[nn.Parameter]) -> None:
        """Give the masters of those ``weights`` that were changed from outside, by loading them, their values.

        A master that rounds to its weight stays as it is, so that weights and masters may be loaded in any order; but
        where remainders are kept, weights have to come first.
        """
        for weight in weights:
            param = self._param_of.get(weight)
            if param is None:
                continue
            buffer = self._buffer_of[param]
            value = buffer.weights[buffer.flat_range(param)]
            if buffer.masters is not None:
                follow(value, buffer.masters[buffer.own_range(param)])
            elif buffer.remainders is not None:  # what was left of the weight before says nothing of this one
                buffer.remainders[buffer.own_range(param)].zero_()

    @torch.no_grad()
    def full_precision(self) -> dict[str, torch.Tensor]:
        """Each trained weight as the optimizer knows it, whole over data ranks, a DTensor where the weight is one.

        Under ZeRO every data rank has to call it.
        """
        full: dict[str, torch.Tensor] = {}
        for buffer in self.buffers:
            exact = self._exact(buffer)
            for param in buffer.params:
                value = buffer.view(exact, param)
                full[param.name] = wrap(value, param.parameter) if isinstance(param.parameter, DTensor) else value
        return full

    def _exact(self, buffer: Buffer) -> torch.Tensor:
        """The weights of ``buffer``, or the whole of its masters."""
        if buffer.masters is None and buffer.remainders is None:
            return buffer.weights
        if buffer.num_parts == 1 and buffer.masters is not None:
            return buffer.masters
        exact = torch.empty_like(buffer.weights, dtype=torch.float32)
        own = buffer.own(exact)
        if buffer.masters is not None:
            own.copy_(buffer.masters)
        elif buffer.remainders is not None:
            own.copy_(join(buffer.own(buffer.weights), buffer.remainders))
        if buffer.num_parts > 1:
            all_gather_shards(exact, own, self._context.dp.group)
        return exact


class _Placements:
    """The hook that finds gradients whose placements are not their parameter's, before they are added up."""

    def __init__(self, param: FlatParam) -> None:
        self.param = param

    def __call__(self, gradient: torch.Tensor) -> None:
        param = self.param
        if isinstance(gradient, DTensor) and gradient.placements != cast(DTensor, param.parameter).placements:
            param.placement_mismatch = True
            if (
                param.parameter.grad is param.gradient and param.version == param.seen
            ):  # nothing has been added up there
                param.parameter.grad = None
