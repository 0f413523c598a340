"""Colossal-AI's ``launch`` functions: as paramp's, but they also read ``NUM_MICRO_BATCHES`` from the configuration."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar, cast

from ...base.coerce import convert
from ...base.errors import ConfigError, shown
from ...config.files import load
from ...config.schema import Config
from ...distributed import launchers
from ...distributed.context import ParallelContext
from ...distributed.launchers import ConfigSource

Launch = TypeVar("Launch", bound=Callable[..., ParallelContext])


def _with_microbatches(config: ConfigSource) -> Config:
    """``config`` with ``NUM_MICRO_BATCHES`` as the number of microbatches of its pipeline, if it has both."""
    settings = load(config)
    count, pipeline = settings.user.get("NUM_MICRO_BATCHES"), settings.parallel.pipeline
    if count is None or pipeline.size == 1:
        return settings
    if pipeline.microbatches not in (None, count):
        raise ConfigError(
            f"NUM_MICRO_BATCHES: got {shown(count)}, but parallel.pipeline.microbatches is {pipeline.microbatches}; "
            "remove one of the two"
        )
    pipeline = replace(pipeline, microbatches=convert(count, int, "NUM_MICRO_BATCHES"))
    return replace(settings, parallel=replace(settings.parallel, pipeline=pipeline))


def _reading_microbatches(launch: Launch) -> Launch:
    @functools.wraps(launch)
    def launching(config: ConfigSource = None, *args: Any, **kwargs: Any) -> ParallelContext:
        return launch(_with_microbatches(config), *args, **kwargs)

    return cast(Launch, launching)


launch = _reading_microbatches(launchers.launch)
launch_from_openmpi = _reading_microbatches(launchers.launch_from_openmpi)
launch_from_slurm = _reading_microbatches(launchers.launch_from_slurm)
launch_from_torch = _reading_microbatches(launchers.launch_from_torch)
