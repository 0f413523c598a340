"""Colossal-AI's ``utils``: its data loader and current device."""

from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from ...config.schema import DEFAULT_SEED
from ...data.dataloader import shard_loader
from ...distributed.context import current_context
from ...distributed.rng import derive_seed


def get_dataloader(
    dataset: Dataset[Any],
    shuffle: bool = False,
    seed: int | None = None,
    add_sampler: bool = True,
    drop_last: bool = False,
    pin_memory: bool = False,
    num_workers: int = 0,
    **options: Any,
) -> Any:
    """A loader that gives each data rank its part of ``dataset``, the same on all ranks of a model group.

    It may be passed to :func:`paramp.initialize`, which then does not change it. The order differs between epochs, and
    depends on the seed (:mod:`paramp.data.dataloader`). Call it after launching; before, it returns a loader for a
    single process.

    Args:
        dataset: the same on every rank.
        seed: the seed of the order with ``shuffle``. None: the configuration's.
        add_sampler: False: every rank reads all of the data. ``initialize`` would shard such a loader, so do not pass
            it there.
        pin_memory: no effect without a GPU.
        drop_last, num_workers, options: arguments of ``torch.utils.data.DataLoader``; ``batch_size`` is per data rank.

    Raises:
        ConfigError: the loader cannot be sharded (:func:`paramp.data.dataloader.shard_loader`).
    """
    context = current_context()
    seed = seed if seed is not None else context.config.seed if context else DEFAULT_SEED
    generator = torch.Generator().manual_seed(derive_seed(seed, "get_dataloader"))
    options = {"generator": generator, "shuffle": shuffle or None, **options}
    pin_memory = pin_memory and torch.cuda.is_available()
    loader: DataLoader[Any] = DataLoader(
        dataset, drop_last=drop_last, pin_memory=pin_memory, num_workers=num_workers, **options
    )
    if context is None or not add_sampler:
        return loader
    return shard_loader(loader, context.batch_axis.rank, context.batch_axis.size, seed)


def get_current_device() -> torch.device:
    """The device of the current context; without one, the GPU if there is one, else the CPU."""
    context = current_context()
    if context is not None:
        return context.device
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
