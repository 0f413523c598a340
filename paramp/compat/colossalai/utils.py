"""Colossal-AI's ``utils``: its data loader, current device and timers, and questions about this rank's place."""

from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from ...config.schema import DEFAULT_SEED
from ...data.dataloader import shard_loader
from ...distributed.context import current_context, get_context
from ...distributed.rng import derive_seed
from ..missing import missing
from .core import global_context
from .timer import MultiTimer, Timer

__all__ = [
    "MultiTimer",
    "Timer",
    "get_current_device",
    "get_dataloader",
    "is_dp_rank_0",
    "is_no_pp_or_last_stage",
    "is_tp_rank_0",
    "is_using_ddp",
    "is_using_pp",
    "print_rank_0",
]


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
        add_sampler: False: every rank reads all of the data, such as a test set of which rank 0 prints the accuracy.
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
    if context is None:
        return loader
    if not add_sampler:
        loader.is_whole = True  # then initialize does not shard it
        return loader
    return shard_loader(loader, context.dp.rank, context.dp.size, seed)


def get_current_device() -> torch.device:
    """The device of the current context; without one, the GPU if there is one, else the CPU."""
    context = current_context()
    if context is not None:
        return context.device
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def print_rank_0(message: object) -> None:
    """Print ``message`` on rank 0 of the world."""
    if global_context.get_global_rank() == 0:
        print(message, flush=True)


def is_dp_rank_0() -> bool:
    """Whether this is the first data rank."""
    return get_context().batch_axis.rank == 0


def is_tp_rank_0() -> bool:
    """Whether this is the first tensor-parallel rank."""
    return get_context().tensor_axis.rank == 0


def is_no_pp_or_last_stage() -> bool:
    """Whether this rank has the model's output."""
    return get_context().is_last_stage


def is_using_ddp() -> bool:
    """Whether there are several data ranks."""
    return global_context.data_parallel_size > 1


def is_using_pp() -> bool:
    """Whether there are several pipeline ranks."""
    return global_context.pipeline_parallel_size > 1


__getattr__ = missing(
    __name__,
    {
        "save_checkpoint": "call engine.save(folder) on every rank; it saves the optimizer and the scheduler too",
        "load_checkpoint": "call engine.load(folder) on every rank",
        "checkpoint": "use torch.utils.checkpoint.checkpoint",
        "clip_grad_norm_fp32": "set clip_grad_norm in the configuration, or call paramp.clip_grad_norm_",
        "report_memory_usage": "use torch.cuda.memory_summary(), or trainer.hooks.LogMemoryByEpochHook",
        "sync_model_param": "leave it out: initialize gives all data ranks the same weights",
    },
)
