"""An overflow on purpose: in one step, the gradient of one weight on the last rank is made to leave the range of fp16.

It is for demonstrations and drills (``--plant-overflow STEP``). The weight's gradient of one microbatch is multiplied
by a number that makes its largest elements larger than any of the compute dtype, and rounded to that dtype. So
it overflows at the loss scale of the step and not at a scale of 1, as a gradient does whose scale is too large. The
hook stays in place while the batch runs again for the diagnosis, which finds it as it finds any other overflow.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from paramp import ConfigError, Engine
from paramp.base.dtensor import local

BEYOND = 4.0
"""How many times the largest number of the compute dtype the largest element becomes."""


class PlantedOverflow:
    """The observer of an engine, and the hook of one weight: it knows which microbatch a gradient is of."""

    def __init__(self, engine: Engine) -> None:
        config = engine.context.config
        self._dtype = engine.precision.compute
        self.microbatch = config.parallel.pipeline.num_microbatches // 2
        self._num_calls, self._accumulation = 0, config.gradient_accumulation
        self._running: int | None = None
        self._factor: float | None = None  # from the step; that of its rerun has another loss scale

    def begin_call(self) -> None:
        """Count a batch: of a window with accumulation, the first one is planted in."""
        self._num_calls += 1

    @contextmanager
    def span(self, kind: str, stage: int | None = None, microbatch: int | None = None) -> Iterator[None]:
        """Note the microbatch that runs."""
        self._running = microbatch
        yield

    def multiply(self, gradient: torch.Tensor) -> torch.Tensor | None:
        """The gradient to use in place of ``gradient``, of one microbatch; None: as it is."""
        first_call = (self._num_calls - 1) % self._accumulation == 0
        if self._running != self.microbatch or not first_call:
            return None
        if self._factor is None:
            largest = max(float(local(gradient).abs().max()), torch.finfo(self._dtype).tiny)
            self._factor = BEYOND * torch.finfo(self._dtype).max / largest
        return (gradient * self._factor).to(self._dtype).to(gradient.dtype)


@contextmanager
def planted_overflow(engine: Engine) -> Iterator[str]:
    """Plant an overflow in the step that runs inside. Every rank enters it. Yields what is planted, in words.

    Raises:
        ConfigError: on every rank: in this mode or layout no weight's gradient of one rank can be made to overflow.
    """
    context, config = engine.context, engine.context.config
    for fits, why in (
        (engine.precision.scaling is not None, f"the precision {engine.precision.name!r} does not scale the loss"),
        (config.parallel.shard == 1, "parallel.data.shard sums gradients over ranks before one can be changed"),
        (not config.reproducible, "reproducible sums gradients in a way of its own"),
    ):
        if not fits:
            raise ConfigError(f"train.plant_overflow: expected None, because {why}; remove --plant-overflow")
    planted, last, handle = PlantedOverflow(engine), context.world_size - 1, None
    if context.rank == last:
        matrices = {name: value for name, value in engine.named_parameters() if value.ndim == 2}
        name = next((name for name in matrices if name.startswith("blocks.")), next(iter(matrices)))
        handle = matrices[name].register_hook(planted.multiply)
    engine.observers.append(planted)
    try:
        yield f"the gradient of one weight on rank {last} alone, in microbatch {planted.microbatch},"
    finally:
        engine.observers.remove(planted)
        if handle is not None:
            handle.remove()
