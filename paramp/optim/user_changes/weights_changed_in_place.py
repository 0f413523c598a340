"""Weights with fp32 masters that are changed in place between steps: when to compare them with their masters.

A step rounds each master to its weight, so a weight that was changed since has to become its master's value before. To
compare all of them takes four passes over memory, on a CPU a sixth of the step. So a step compares only

- if a version counter of a parameter has moved: torch counts every change in place, but for those through ``.data``
  and from outside of torch. The engine's own steps write to the flat buffers, which have other counters;
- after :meth:`ChangedWeights.announce`, for edits that move no counter;
- once a sample has found a change that neither has announced, then and from then on.

The sample is one row of 64 elements in each run of 256 rows of every parameter, another one in each step. So all
elements of a parameter are looked at in 256 steps, those of one with n < 2**14 elements in n/64, and an edit of a whole
weight, such as a clamp or a mask, is found in its first step. All ranks agree on what is found: replicas of which some
follow an edit would diverge. On a GPU the host does not wait for the finding, so it counts from the next step on.

Masters follow what ``load_state_dict`` changes at once (:func:`follow_loads`).
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

from ...base import loop_block_sizes
from ...base.dtensor import is_dtensor, version
from ...scaling.step_decision import HostCopy
from ..flat_buffer import ALIGNMENT, Buffer, FlatParam

VERSION = operator.attrgetter("_version")
LOCAL = operator.attrgetter("_local_tensor")
Follow: TypeAlias = Callable[[Iterable[nn.Parameter]], None]
"""Updates the masters of parameters."""


class ChangedWeights:
    """Whether the next step compares all weights with their masters. One for each engine.

    Attributes:
        due: it does.
        watches: there are masters that have to follow.
    """

    def __init__(self, buffers: Sequence[Buffer], device: torch.device) -> None:
        self.due = False
        self._always = self._postponed = False
        self._device = device
        self._samples = [_Sample(buffer) for buffer in buffers if buffer.masters.has_master]
        self._found: list[tuple[_Sample, torch.Tensor]] = []
        self._num_steps = 0
        self._num_found = HostCopy(1, torch.float64, device)
        self.watches = bool(self._samples)
        parameters = [param.parameter for sample in self._samples for param in sample.buffer.params]
        self._plain, self._sharded = (
            [one for one in parameters if is_dtensor(one) is sharded] for sharded in (False, True)
        )
        self._versions = self._current_versions()

    def _current_versions(self) -> list[int]:
        """The counters of every parameter: of a DTensor those of the wrapper and of its local tensor."""
        local_tensors = map(LOCAL, self._sharded)
        return [*map(VERSION, self._plain), *map(VERSION, self._sharded), *map(VERSION, local_tensors)]

    def leave_out(self, buffers: Collection[Buffer]) -> None:
        """Take no sample of ``buffers``, of which every step compares what it steps anyway."""
        self._samples = [sample for sample in self._samples if sample.buffer not in buffers]

    def announce(self) -> None:
        """Compare all weights in the next step."""
        self.due = True
        self.watches = True

    def postpone(self) -> None:
        """Leave what is due to the next step, because this one is skipped before it compares."""
        self._postponed = self.due

    def look(self) -> torch.Tensor:
        """Begin a step: 1 if this rank's sample has found a change that was not announced, else 0; 1-dim float64."""
        if self._num_found.take():  # in the last step; the device has run on to this one's backward
            self._compare_always()
        found = torch.zeros(1, dtype=torch.float64, device=self._device)
        versions = self._current_versions()
        if versions != self._versions:
            self._versions, self.due = versions, True
        self._found = []
        if not self.due:
            self._found = [(sample, sample.changed_rows(self._num_steps)) for sample in self._samples]
            for _, changed in self._found:
                found += changed.any()
        self._num_steps += 1
        return found

    def agree(self, num_found: torch.Tensor) -> None:
        """Take the sum over all ranks of what :meth:`look` returned, 0-dim float64 on the device.

        On a CPU what was found is due in this step; on a GPU, whose host does not wait, from the next one on.
        """
        if self._always or not self._samples:
            return
        if self._num_found.is_late:
            self._num_found.start(num_found)
        elif num_found:
            self._compare_always()

    def end_step(self) -> None:
        """The masters have followed, unless :meth:`postpone` was called."""
        self.due = self._always or self._postponed
        self._postponed = False

    def _compare_always(self) -> None:
        self.due = self._always = True
        names = [repr(sample.name_of(changed)) for sample, changed in self._found if changed.any()]
        self._found = []
        late = "" if not self._num_found.is_late else " It is followed from the next change on."
        warnings.warn(
            f"{names[0] if names else 'a weight of another rank'} was changed in place without moving its version "
            f"counter, as through .data.{late} From now on every step compares all weights with their masters, which "
            "takes time; change weights under torch.no_grad() and without .data, or call engine.weights_changed() "
            "after each change",
            stacklevel=2,
        )


class _Sample:
    """The rows of ``buffer``, in this rank's part of it, that a step looks at."""

    def __init__(self, buffer: Buffer) -> None:
        self.buffer = buffer
        runs = [(param, *run) for param in buffer.params for run in _runs(param)]
        self._params = [param for param, _, _ in runs]
        first_rows, lengths = [first for _, first, _ in runs], [length for _, _, length in runs]
        self._first_rows = torch.tensor(first_rows, dtype=torch.int64, device=buffer.weights.device)
        self._lengths = torch.tensor(lengths, dtype=torch.int64, device=buffer.weights.device)

    def changed_rows(self, step: int) -> torch.Tensor:
        """For each run whether the row of ``step`` has a weight that is not its master's rounding; 1-dim bool."""
        masters, rows = self.buffer.masters, self._first_rows + step % self._lengths
        weights = masters.weight.view(-1, ALIGNMENT).index_select(0, rows)
        rounded = masters.stepped.view(-1, ALIGNMENT).index_select(0, rows).to(weights.dtype)
        differ = rounded.view(torch.int16) != weights.view(torch.int16)
        return (differ & ~(rounded.isnan() & weights.isnan())).any(1)  # there are many bits of NaN

    def name_of(self, changed: torch.Tensor) -> str:
        """The name of the first parameter with a changed row."""
        return self._params[int(changed.nonzero()[0])].name


def _runs(param: FlatParam) -> Iterator[tuple[int, int]]:
    """(first row, number of rows) of each run of ``param`` in this rank's part of the buffer."""
    own = param.own_range
    if own.start < own.stop:
        first, stop = own.start // ALIGNMENT, -(-own.stop // ALIGNMENT)
        for row in range(first, stop, loop_block_sizes.SAMPLED_RUN):
            yield row, min(loop_block_sizes.SAMPLED_RUN, stop - row)


def follow_loads(model: nn.Module, follow: Follow) -> None:
    """Call ``follow`` with what was loaded, after each load into ``model`` or into any module in it."""
    hook = _FollowLoads(follow)
    for module in model.modules():
        if next(module.parameters(recurse=False), None) is not None:
            module.register_load_state_dict_pre_hook(hook.begin)
            module.register_load_state_dict_post_hook(hook)


class _FollowLoads:
    """The hooks of :func:`follow_loads`. In a copied model, which has no masters, they do nothing."""

    def __init__(self, follow: Follow | None = None) -> None:
        self._follow = follow
        self._before: dict[nn.Module, dict[nn.Parameter, int]] = {}

    def begin(self, module: nn.Module, state_dict: Mapping[str, Any], prefix: str, *_: Any) -> None:
        """Note the versions of the parameters that ``state_dict`` lacks: a module may load them by other names."""
        if self._follow is not None:
            own = module.named_parameters(recurse=False)
            self._before[module] = {one: version(one) for name, one in own if prefix + name not in state_dict}

    def __call__(self, module: nn.Module, _incompatible: Any) -> None:
        if self._follow is not None:
            before, own = self._before.pop(module, {}), module.parameters(recurse=False)
            self._follow([one for one in own if one not in before or version(one) != before[one]])

    def __reduce__(self) -> Any:
        return _FollowLoads, ()
