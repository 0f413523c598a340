"""Other libraries' configuration keys and values, and what to write here in their place.

A table for :mod:`.key_advice`. A row is one of:

- a configuration of ours that does the same, in which :class:`Given` stands for the user's own value;
- a text, where there is no such key here;
- both;
- :class:`ByValue`: one of these for each value of the key.

The key is a dotted path, or in :data:`ANYWHERE` the last part of one: torchtitan's ``tensor_parallel_degree`` is
understood with and without its table. A value of False, None or 0 without a row of its own means :data:`OFF`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Given(NamedTuple):
    """The user's value, converted by ``of``; ``example`` in its place if that is not accepted."""

    example: Any
    of: Callable[[Any], Any] = lambda value: value


class ByValue(dict[Any, Any]):
    """Rows by the value of the key; ``...`` is any other value."""


def _mode(name: str, **options: Any) -> dict[str, Any]:
    return {"precision": {"mode": name, **options} if options else name}


def _scaling(**options: Any) -> dict[str, Any]:
    """Options of fp16's loss scaling."""
    return _mode("16-mixed", **options)


def _parallel(**sizes: Any) -> dict[str, Any]:
    return {"parallel": sizes}


OUT = "leave it out"
"""How a text begins for a key whose default is the same."""
OFF = f"{OUT}: that is the default"
DEFAULT = f"{OUT}: it is always so"
YOURS = "it is no key of the library; your script has it, or write it in capitals to find it in the configuration"
OPTIMIZER = "pass a torch.optim optimizer to paramp.initialize, not a configuration of one"
SCHEDULER = "pass a torch.optim.lr_scheduler scheduler to paramp.initialize as lr_scheduler"
BATCH = "the batch size is that of your DataLoader: the samples of one data rank in a call of forward_backward"
OFFLOAD = "there is no offloading to the CPU; shard instead"
META = 'build the model under with torch.device("meta"), so that each rank makes its shards alone'
BUCKETS = f"{OUT}: gradients are reduced from flat buffers, which have no buckets"
SAVING = "save with paramp.Checkpoints(folder, every=100)"
LAUNCHER = "the launcher decides it, such as torchrun --nnodes 2 --nproc-per-node 4"
FP16, BF16, FP8, FP32 = _mode("16-mixed"), _mode("bf16-mixed"), _mode("fp8-mixed"), _mode("32-true")
SHARD_4 = _parallel(data={"shard": 4})
SHARD = _parallel(data={"shard": Given(4)})
SHARDED = SHARD_4, "stages 2 and 3 of ZeRO are FSDP2's sharding"
HSDP = _parallel(data={"replicate": 2, "shard": 4})
REPLICATE = _parallel(data={"replicate": Given(2), "shard": 2})
_KEPT = _parallel(data={"shard": 4, "reshard_after_forward": False})
RESHARD = ByValue({False: _KEPT, "never": _KEPT, ...: SHARD_4})
ZERO_1 = _parallel(zero=1)
CONTEXT = ByValue({1: OFF, ...: _parallel(context=Given(2))})
EXPERTS = ByValue({1: OFF, ...: _parallel(expert=Given(2))})
TENSOR, PIPELINE = _parallel(tensor=Given(2)), _parallel(pipeline=Given(2))
REPLICAS = _parallel(data=Given(2)), "or leave it out: the ranks that are left replicate the model"
MICROBATCHES = _parallel(pipeline={"size": 2, "microbatches": Given(4)})
IN_MICROBATCHES = _parallel(pipeline={"size": 2, "microbatches": 4}), "the number of parts of a rank's batch"
SCHEDULE = _parallel(pipeline={"size": 2, "schedule": Given("1f1b")})
INTERLEAVED = _parallel(pipeline={"size": 2, "schedule": "interleaved-1f1b", "stages_per_rank": 2})
SPLIT = _parallel(pipeline={"size": 2, "split": Given(["blocks.2"])})
SEQUENCE = _parallel(tensor=2, sequence_parallel=True)
CLIP = {"clip_grad_norm": Given(1.0)}
ACCUMULATION = {"gradient_accumulation": Given(4)}
CHECKPOINTING, SELECTIVE = {"activation_checkpointing": "full"}, {"activation_checkpointing": "selective"}
COMPILE = {"compile": True}
FP32_GRADIENTS = {"precision": "16-naive", "grad_dtype": "float32"}
STATIC_SCALE = _scaling(init_scale=Given(1024.0), min_scale=Given(1024.0), max_scale=Given(1024.0))
DYNAMIC = f"{OUT}: the loss scale of 16-mixed is dynamic"
LOSS_SCALE = ByValue({"dynamic": DYNAMIC, 0: DYNAMIC, ...: (STATIC_SCALE, "a constant scale")})
STAGES = ByValue({0: OFF, 1: ZERO_1, ...: SHARDED})
LEVELS = ByValue({"O0": FP32, "O1": FP16, "O2": _mode("O2"), "O3": _mode("O3"), ...: FP16})
_DTYPES: dict[Any, Any] = {
    **dict.fromkeys(("fp16", "float16", "half", "mixed", "mixed_float16", "torch.float16"), FP16),
    **dict.fromkeys(("bf16", "bfloat16", "mixed_bfloat16", "torch.bfloat16"), BF16),
    **dict.fromkeys(("no", "fp32", "float32", "float", "full", "torch.float32"), FP32),
    "fp8": FP8,
}
ANY_DTYPE = ByValue({**_DTYPES, ...: (BF16, "a mode names the dtypes of weights, of products, and masters")})
_STRATEGIES: dict[Any, Any] = {
    **dict.fromkeys(("ddp", "ddp_spawn", "ddp_find_unused_parameters_true", "multi_gpu"), _parallel(data="auto")),
    **dict.fromkeys(("auto", "no", "no_shard"), OFF),
    **dict.fromkeys(("deepspeed", "deepspeed_stage_2", "deepspeed_stage_3"), SHARDED),
    "deepspeed_stage_1": ZERO_1,
    "hybrid_shard": HSDP,
    "megatron_lm": _parallel(tensor=2, pipeline=2),
    ...: SHARD_4,
}
STRATEGIES = ByValue(_STRATEGIES)

TOP: dict[str, Any] = {
    # our own keys, in the wrong table
    "tensor": TENSOR,
    "pipeline": PIPELINE,
    "data": REPLICAS,
    "shard": SHARD,
    "replicate": REPLICATE,
    "reshard_after_forward": RESHARD,
    "microbatches": MICROBATCHES,
    "schedule": SCHEDULE,
    "split": SPLIT,
    "stages_per_rank": INTERLEAVED,
    "sequence_parallel": SEQUENCE,
    "init_scale": _scaling(init_scale=Given(65536.0)),
    "growth_interval": _scaling(growth_interval=Given(2000)),
    "growth_factor": _scaling(growth_factor=Given(2.0)),
    "backoff_factor": _scaling(backoff_factor=Given(0.5)),
    "hysteresis": _scaling(hysteresis=Given(2)),
    "min_scale": _scaling(min_scale=Given(1.0)),
    "max_scale": _scaling(max_scale=Given(2.0**24)),
    "decay": {"ema": {"decay": Given(0.999)}},
    "parallel.shard": SHARD,
    "parallel.replicate": REPLICATE,
    "parallel.microbatches": MICROBATCHES,
    "parallel.schedule": SCHEDULE,
    # our own keys, with values of others
    "parallel.zero": ByValue({2: SHARDED, 3: SHARDED, True: ZERO_1, False: _parallel(zero=0)}),
    "parallel.data": ByValue({"fsdp": SHARD_4, "ddp": _parallel(data="auto")}),
    "precision": ByValue({**_DTYPES, True: FP16, False: FP32, None: FP32}),
    "precision.enabled": FP16,
    "precision.dtype": ANY_DTYPE,
    "precision.loss_scale": LOSS_SCALE,
    "clip_grad_norm": ByValue({True: {"clip_grad_norm": 1.0}}),
    "activation_checkpointing": ByValue({True: CHECKPOINTING}),
    "activation_checkpointing.mode": ByValue({"none": OFF, "selective": SELECTIVE, ...: CHECKPOINTING}),
    "activation_checkpointing.partition_activations": (CHECKPOINTING, "activations are not divided over tensor ranks"),
    "activation_checkpointing.cpu_checkpointing": OFFLOAD,
    "activation_checkpointing.number_checkpoints": {"activation_checkpointing": 2},
    "compile.enable": COMPILE,
    "compile.enabled": COMPILE,
    "compile.components": (COMPILE, "repeated blocks and the optimizer step are compiled"),
    "ema": ByValue({True: {"ema": {"decay": 0.999}}, ...: {"ema": {"decay": Given(0.999)}}}),
    # tables of others
    "fp16": ByValue({True: FP16, False: OFF}),
    "fp16.enabled": FP16,
    "fp16.auto_cast": DEFAULT,
    "fp16.initial_scale_power": _scaling(init_scale=Given(65536, lambda power: 2.0**power)),
    "fp16.hysteresis": _scaling(hysteresis=Given(2)),
    "fp16.consecutive_hysteresis": (_scaling(hysteresis=2), "it counts overflows since the last growth"),
    "fp16.fp16_master_weights_and_grads": (_mode("16-true"), "fp16 weights that are stepped themselves"),
    "bf16.enabled": BF16,
    "bf16.immediate_grad_update": DEFAULT,
    "amp.enabled": FP16,
    "amp.opt_level": LEVELS,
    "torch_autocast.enabled": FP16,
    "data_types.grad_accum_dtype": FP32_GRADIENTS,
    "zero": STAGES,
    "zero.level": STAGES,
    "optimizer": OPTIMIZER,
    "scheduler": SCHEDULER,
    "lr_scheduler": SCHEDULER,
    "checkpoint": SAVING,
    "training.compile": COMPILE,
    "activation_checkpoint.mode": ByValue({"none": OFF, "selective": SELECTIVE, ...: CHECKPOINTING}),
    "float8.recipe_name": _mode("fp8-mixed", recipe=Given("rowwise")),
    "float8.filter_fqns": _mode("fp8-mixed", skip=Given(["**.output"])),
    "strategy": STRATEGIES,
    "devices": LAUNCHER,
    "steps": YOURS,
}
"""By the whole path."""

ANYWHERE: dict[str, dict[str, Any]] = {
    "": {
        "tp": TENSOR,
        "tensor_parallel": TENSOR,
        "tensor_parallel_size": TENSOR,
        "pp": PIPELINE,
        "pipeline_parallel": PIPELINE,
        "pipeline_parallel_size": PIPELINE,
        "dp": REPLICAS,
        "data_parallel_size": REPLICAS,
        "ddp": ByValue({True: OFF, ...: REPLICAS}),
        "fsdp": ByValue({True: SHARD_4, "hybrid_shard": HSDP, ...: SHARD}),
        "fsdp2": SHARD_4,
        "hsdp": HSDP,
        "zero1": ZERO_1,
        "zero2": SHARDED,
        "zero3": SHARDED,
        "cp": CONTEXT,
        "ep": EXPERTS,
        "bf16": BF16,
        "fp8": FP8,
        "fp32": FP32,
        "tf32": "set torch.backends.cuda.matmul.allow_tf32 in your script",
        "amp": FP16,
        "use_amp": FP16,
        "half": FP16,
        "dtype": ANY_DTYPE,
        "grad_scaler": FP16,
        "loss_scale": LOSS_SCALE,
        "loss_scaling": LOSS_SCALE,
        "grad_clip": CLIP,
        "clip_grad": CLIP,
        "clip_norm": CLIP,
        "max_norm": CLIP,
        "grad_accum": ACCUMULATION,
        "grad_accum_steps": ACCUMULATION,
        "accumulation_steps": ACCUMULATION,
        "num_microbatches": MICROBATCHES,
        "batch_size": BATCH,
        "lr": YOURS,
        "learning_rate": YOURS,
        "epochs": YOURS,
        "seq_len": YOURS,
        "ema_decay": {"ema": {"decay": Given(0.999)}},
        "deterministic": ({"reproducible": True}, "the same bits on every layout"),
    },
    "DeepSpeed": {
        "zero_optimization": SHARDED,
        "stage": STAGES,
        "zero_stage": STAGES,
        "gradient_clipping": CLIP,
        "gradient_accumulation_steps": ACCUMULATION,
        "train_batch_size": BATCH,
        "train_micro_batch_size_per_gpu": BATCH,
        "loss_scale_window": _scaling(growth_interval=Given(1000)),
        "min_loss_scale": _scaling(min_scale=Given(1.0)),
        "prescale_gradients": DEFAULT,
        "gradient_predivide_factor": DEFAULT,
        "communication_data_type": {"reduce_dtype": Given("float32")},
        "offload_optimizer": OFFLOAD,
        "offload_param": OFFLOAD,
        "overlap_comm": DEFAULT,
        "contiguous_gradients": DEFAULT,
        "reduce_bucket_size": BUCKETS,
        "allgather_bucket_size": BUCKETS,
        "zero_hpz_partition_size": HSDP,
        "mics_shard_size": SHARD,
        "stage3_prefetch_bucket_size": _parallel(data={"shard": 4, "prefetch": 1}),
        "autotp_size": TENSOR,
        "steps_per_print": YOURS,
        "wall_clock_breakdown": "record one step with engine.recording(), or with --trace STEP in launch/train.py",
    },
    "Accelerate": {
        "mixed_precision": ANY_DTYPE,
        "distributed_type": STRATEGIES,
        "deepspeed_plugin": SHARDED,
        "fsdp_plugin": SHARD_4,
        "fsdp_config": SHARD_4,
        "fsdp_sharding_strategy": STRATEGIES,
        "sharding_strategy": STRATEGIES,
        "fsdp_version": SHARD_4,
        "zero3_init_flag": META,
        "fsdp_activation_checkpointing": CHECKPOINTING,
        "fsdp_offload_params": OFFLOAD,
        "tp_degree": TENSOR,
        "pp_degree": PIPELINE,
        "tp_size": TENSOR,
        "cp_size": CONTEXT,
        "dp_shard_size": SHARD,
        "dp_replicate_size": REPLICATE,
        "dynamo_backend": {"compile": {"backend": Given("inductor")}},
        "kwargs_handlers": (_scaling(init_scale=1024.0), "options of the loss scaling are keys"),
        "num_processes": LAUNCHER,
        "num_machines": LAUNCHER,
    },
    "Hugging Face's Trainer": {
        "fp16_opt_level": LEVELS,
        "fp16_full_eval": _mode("16-true"),
        "bf16_full_eval": _mode("bf16-true"),
        "half_precision_backend": FP16,
        "max_grad_norm": CLIP,
        "gradient_checkpointing": CHECKPOINTING,
        "per_device_train_batch_size": BATCH,
        "per_device_eval_batch_size": BATCH,
        "torch_compile": COMPILE,
        "torch_compile_backend": {"compile": {"backend": Given("inductor")}},
        "torch_compile_mode": {"compile": {"mode": Given("default")}},
        "deepspeed": SHARDED,
        "optim": OPTIMIZER,
        "weight_decay": OPTIMIZER,
        "lr_scheduler_type": SCHEDULER,
        "warmup_steps": SCHEDULER,
        "num_train_epochs": YOURS,
        "max_steps": YOURS,
        "save_steps": SAVING,
        "save_total_limit": SAVING,
        "resume_from_checkpoint": "call engine.load(path)",
        "full_determinism": {"reproducible": True},
        "ddp_find_unused_parameters": DEFAULT,
    },
    "Megatron-LM": {
        "tensor_model_parallel_size": TENSOR,
        "pipeline_model_parallel_size": PIPELINE,
        "virtual_pipeline_model_parallel_size": INTERLEAVED,
        "num_layers_per_virtual_pipeline_stage": INTERLEAVED,
        "num_virtual_stages_per_pipeline_rank": INTERLEAVED,
        "context_parallel_size": CONTEXT,
        "expert_model_parallel_size": EXPERTS,
        "use_distributed_optimizer": ZERO_1,
        "use_torch_fsdp2": SHARD_4,
        "use_megatron_fsdp": SHARD_4,
        "data_parallel_sharding_strategy": SHARD_4,
        "micro_batch_size": IN_MICROBATCHES,
        "global_batch_size": BATCH,
        "initial_loss_scale": _scaling(init_scale=Given(65536.0)),
        "accumulate_allreduce_grads_in_fp32": FP32_GRADIENTS,
        "grad_reduce_in_fp32": FP32_GRADIENTS,
        "recompute_activations": SELECTIVE,
        "recompute_granularity": ByValue({"selective": SELECTIVE, ...: CHECKPOINTING}),
        "recompute_num_layers": {"activation_checkpointing": Given(2)},
        "fp8_format": FP8,
        "fp8_recipe": _mode("fp8-mixed", recipe=Given("rowwise")),
        "transformer_impl": ByValue({"transformer_engine": _mode("transformer-engine"), ...: OFF}),
        "use_precision_aware_optimizer": {"precision": "16-naive", "masters": "remainder", "optimizer_state": "bf16"},
        "exp_avg_dtype": {"optimizer_state": "bf16"},
        "exp_avg_sq_dtype": {"optimizer_state": "bf16"},
        "overlap_grad_reduce": DEFAULT,
        "overlap_param_gather": DEFAULT,
        "ddp_bucket_size": BUCKETS,
        "distributed_backend": 'pass it to the launch: paramp.launch_from_torch(config, backend="gloo")',
        "distributed_timeout_minutes": {"hang_timeout": Given(10, lambda minutes: 60.0 * minutes)},
        "log_num_zeros_in_grad": ({"fp16": {"mode": "naive", "log_num_zeros_in_grad": True}}, "Colossal-AI's table"),
        "train_iters": YOURS,
        "save_interval": SAVING,
    },
    "torchtitan": {
        "tensor_parallel_degree": TENSOR,
        "pipeline_parallel_degree": PIPELINE,
        "pipeline_parallel_schedule": SCHEDULE,
        "pipeline_parallel_microbatch_size": IN_MICROBATCHES,
        "pipeline_parallel_split_points": SPLIT,
        "data_parallel_shard_degree": ByValue({1: OFF, -1: SHARD_4, ...: SHARD}),
        "data_parallel_replicate_degree": ByValue({1: OFF, ...: REPLICATE}),
        "context_parallel_degree": CONTEXT,
        "expert_parallel_degree": EXPERTS,
        "fsdp_reshard_after_forward": RESHARD,
        "mixed_precision_param": ANY_DTYPE,
        "mixed_precision_reduce": {"reduce_dtype": Given("float32")},
        "local_batch_size": BATCH,
        "selective_ac_option": ByValue({"op": SELECTIVE, ...: {"activation_checkpointing": 2}}),
        "enable_cpu_offload": OFFLOAD,
        "disable_loss_parallel": OFF,
        "enable_async_tensor_parallel": OFF,
        "init_timeout_seconds": {"hang_timeout": Given(300.0)},
    },
    "Lightning": {
        "gradient_clip_val": CLIP,
        "gradient_clip_algorithm": ({"clip_grad_norm": 1.0}, "gradients are clipped by the norm of the whole model"),
        "accumulate_grad_batches": ACCUMULATION,
        "amp_backend": FP16,
        "amp_level": LEVELS,
        "accelerator": 'pass it to the launch: paramp.launch_from_torch(config, device="cpu")',
        "num_nodes": LAUNCHER,
        "sync_batchnorm": "call torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) before paramp.initialize",
        "max_epochs": YOURS,
        "enable_checkpointing": SAVING,
    },
    "Composer": {
        "device_train_microbatch_size": IN_MICROBATCHES,
        "max_duration": YOURS,
        "parallelism_config": SHARD_4,
        "deepspeed_config": SHARDED,
        "save_folder": SAVING,
    },
}
"""By the last part of the path, under the library that has it; "" is several of them."""

NAMES = {name: (library, row) for library, rows in ANYWHERE.items() for name, row in rows.items()}
"""By the last part of the path: the library, and the row."""
