"""Hugging Face Accelerate on ranks that are CPUs."""

import os
import warnings
from contextlib import contextmanager
from unittest import mock

import torch

# The layouts: sizes of ParallelismConfig by the number of ranks. Accelerate has DDP on CPUs; for the others these tests
# let it take the CPUs for GPUs.
LAYOUTS = {
    "ddp": lambda size: {},
    "fsdp": lambda size: {"dp_shard_size": size},
    "tp": lambda size: {"tp_size": size},
    "fsdp-tp": lambda size: {"dp_shard_size": size // 2, "tp_size": 2},
    "hsdp": lambda size: {"dp_replicate_size": 2, "dp_shard_size": size // 2},
}
CUT = {
    "cp": lambda size: {"dp_shard_size": 1, "cp_size": size},
    "fsdp-cp": lambda size: {"dp_shard_size": size // 2, "cp_size": 2},
}
"""Those that cut sequences."""


@contextmanager
def accelerating(world, layout, precision, **options):
    """An Accelerator on the ranks of ``world``; its global state is removed at the end."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from accelerate.utils import DistributedType

    def forget():
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()

    sizes = (LAYOUTS | CUT)[layout](world.size)
    environment = {"OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": str(world.size)}
    with mock.patch.dict(os.environ, environment), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Slicing a flattened dim from root mesh")  # Accelerate does
        for name in [name for name in os.environ if name.startswith(("ACCELERATE_USE_", "FSDP_"))]:
            del os.environ[name]  # of another trainer in this process
        forget()
        try:
            if layout == "ddp":
                yield Accelerator(cpu=True, mixed_precision=precision, **options)
                return
            gpus = ("gloo", DistributedType.MULTI_GPU)
            with (
                mock.patch.object(PartialState, "_prepare_backend", return_value=gpus),
                mock.patch.object(
                    PartialState, "set_device", lambda self: setattr(self, "device", torch.device("cpu"))
                ),
            ):
                if "dp_shard_size" in sizes:
                    options["fsdp_plugin"] = FullyShardedDataParallelPlugin(
                        fsdp_version=2, cpu_ram_efficient_loading=False, auto_wrap_policy="no_wrap"
                    )
                config = ParallelismConfig(**sizes)
                yield Accelerator(mixed_precision=precision, parallelism_config=config, **options)
        finally:
            forget()
