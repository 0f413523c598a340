"""``apex.parallel``: torch's data parallelism and synchronised batch norms, with Apex's names and arguments."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..missing import missing

__all__ = ["DistributedDataParallel", "SyncBatchNorm", "convert_syncbn_model"]

SyncBatchNorm = nn.SyncBatchNorm


class DistributedDataParallel(nn.parallel.DistributedDataParallel):
    """torch's ``DistributedDataParallel`` with Apex's arguments. Wrap the model after ``amp.initialize``.

    Apex's arguments on buckets and streams (``message_size``, ``delay_allreduce``, ``shared_param``, ...) have no
    effect: torch chooses these itself, and results do not depend on them.

    Args:
        module: the model, on its device.
        gradient_average, allreduce_always_fp32: Apex's defaults only.
        options: torch's own arguments, such as ``find_unused_parameters=True``, which Apex's class does not need.

    Raises:
        ValueError: ``gradient_average=False`` or ``allreduce_always_fp32=True``, which torch's does not have.
    """

    def __init__(
        self,
        module: nn.Module,
        message_size: int = 10_000_000,
        delay_allreduce: bool = False,
        shared_param: bool | None = None,
        allreduce_trigger_params: Any = None,
        retain_allreduce_buffers: bool = False,
        allreduce_always_fp32: bool = False,
        num_allreduce_streams: int = 1,
        allreduce_communicators: Any = None,
        gradient_average: bool = True,
        gradient_predivide_factor: float = 1.0,
        **options: Any,
    ) -> None:
        if allreduce_always_fp32:
            raise ValueError(
                "allreduce_always_fp32: got True, but gradients are summed in their own dtype; use opt_level='O1', "
                "whose gradients are fp32, or paramp.initialize with reduce_dtype='float32'"
            )
        if not gradient_average:
            raise ValueError(
                "gradient_average: got False, but torch averages over the ranks; multiply the loss by their number"
            )
        super().__init__(module, **options)


def convert_syncbn_model(module: nn.Module, process_group: Any = None, channel_last: bool = False) -> nn.Module:
    """``module`` with each batch norm replaced by :class:`SyncBatchNorm`; call it before ``amp.initialize``.

    Args:
        process_group: the ranks that share their statistics. None: all.
        channel_last: no effect: torch's norm takes either memory format.
    """
    converted: nn.Module = SyncBatchNorm.convert_sync_batchnorm(module, process_group)
    return converted


__getattr__ = missing(
    __name__,
    {
        "LARC": "torch has no LARC; clip with torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), max_norm)",
        "Reducer": "use DistributedDataParallel with no_sync(), or torch.distributed.all_reduce",
        "create_syncbn_process_group": "pass torch.distributed.new_group(ranks) to convert_syncbn_model",
        "multiproc": "start the script with torchrun",
    },
)
