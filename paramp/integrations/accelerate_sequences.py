"""An adopted accelerator with ``ParallelismConfig(cp_size=...)``: paramp's context axis in place of torch's.

Accelerate's loader gives all ranks of a sequence the same batch, and its FSDP2 shards over ``dp_shard`` and ``cp``,
and averages gradients over both. The model cuts its inputs itself (:mod:`.context_axis_models`), so that the buffers of
``maybe_context_parallel`` stay whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..base.errors import ConfigError
from ..base.replaced_in_torch import patched
from ..distributed.context import ParallelContext

if TYPE_CHECKING:
    from .context_axis_models import AddedAxis

METHODS = {"allgather": "all-gather", "alltoall": "ring"}
"""How attention exchanges keys and values, by ``cp_comm_strategy``."""


def begin_sequences(accelerator: Any, precision: str) -> None:
    """Give ``accelerator`` what :class:`CutSequences` needs. A collective; ConfigError for what cannot be cut."""
    from .context_axis_models import AddedAxis

    if accelerator._models:
        raise ConfigError(
            "adopt: got an accelerator that has prepared a model for torch's context parallelism, expected one that "
            "has not; with cp_size over 1 call adopt before accelerator.prepare"
        )
    if (dynamo := accelerator.state.dynamo_plugin.backend.value) != "NO":
        raise ConfigError(
            f"accelerator: got dynamo_backend {dynamo.lower()!r}, expected 'no' with cp_size over 1, because ranks "
            "exchange keys in the middle of a forward"
        )
    for loader in accelerator._dataloaders:
        _check_loader(loader)
    context = ParallelContext.from_mesh(accelerator.torch_device_mesh, {"precision": precision})
    method = METHODS[accelerator.parallelism_config.cp_handler.cp_comm_strategy]
    accelerator._context, accelerator._sequences = context, AddedAxis(context.cp, context.device, method)


class CutSequences:
    """What the class of an adopted accelerator with ``cp_size`` over 1 has in addition."""

    _context: ParallelContext
    _sequences: AddedAxis
    _is_once = False

    def _prepare_cp(self: Any, *args: Any) -> Any:
        """Cut the sequences of models; Accelerate's drops their masks, which torch's attention cannot take."""
        from .context_axis_models import cut_sequences

        for model in args:
            if isinstance(model, nn.Module) and not getattr(model, "_is_accelerate_prepared", False):
                cut_sequences(model, self._sequences, self._context)
        return args

    def prepare_data_loader(self: Any, *args: Any, **kwargs: Any) -> Any:
        """As Accelerate's. Raises ConfigError for one that dispatches batches."""
        loader = super().prepare_data_loader(*args, **kwargs)  # type: ignore[misc]
        _check_loader(loader)
        return loader

    @contextmanager
    def maybe_context_parallel(
        self,
        buffers: list[torch.Tensor] | None = None,
        buffer_seq_dims: list[int] | None = None,
        no_restore_buffers: set[torch.Tensor] | None = None,
    ) -> Iterator[None]:
        """Nothing: the model takes whole sequences, and ``buffers`` stay as they are."""
        yield

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """As Accelerate's, also of blocks that are computed again in it."""
        with self._sequences.computing():
            super().backward(loss, **kwargs)  # type: ignore[misc]

    def gather(self: Any, tensor: Any) -> Any:
        """As Accelerate's, where it comes from the ranks of one sequence several times."""
        gathered = super().gather(tensor)  # type: ignore[misc]
        if not self._is_once:
            return gathered
        from accelerate.utils import recursively_apply  # type: ignore[import-untyped]

        def once(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.unflatten(0, (self._context.world_size, -1))[self._firsts()].flatten(0, 1)

        return recursively_apply(once, gathered)

    def gather_for_metrics(self: Any, input_data: Any, use_gather_object: bool = False) -> Any:
        """As Accelerate's, of one rank of each sequence: the others have the same samples."""
        from accelerate import accelerator as module  # type: ignore[import-untyped]

        gather_object = module.gather_object

        def once(data: Any) -> Any:
            return gather_object(data if self._context.rank in self._firsts() else [])

        self._is_once = True
        try:
            with patched(module, "gather_object", once):
                return super().gather_for_metrics(input_data, use_gather_object)  # type: ignore[misc]
        finally:
            self._is_once = False

    def _firsts(self) -> list[int]:
        """The first rank of each data rank, whose samples are the same."""
        return self._context.mesh.mesh.view(self._context.dp.size, -1)[:, 0].tolist()

    def end_training(self) -> None:
        """As Accelerate's; ends the context, too."""
        self._context.close()
        super().end_training()  # type: ignore[misc]


def _check_loader(loader: Any) -> None:
    from accelerate.data_loader import DataLoaderDispatcher  # type: ignore[import-untyped]

    if isinstance(loader, DataLoaderDispatcher):
        raise ConfigError(
            "prepare: got a data loader that dispatches batches, expected one that does not with cp_size over 1, "
            "because ranks of one sequence would get different ones; pass "
            "DataLoaderConfiguration(dispatch_batches=False) to the accelerator"
        )
