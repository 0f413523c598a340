"""The names of torch and of other trainers that paramp reaches into: what for, and in which versions they are known.

:data:`INVENTORY` has a row for each owner, a module or a class. Code takes functions and classes by :func:`take`, and
calls :func:`expect` where it begins to use attributes of a class; both raise an error that names what is missing.
:func:`warn_if_untested` warns once of a version of torch with which no test has run.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import warnings
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

OLDEST, NEWEST = "2.11", "2.15"
"""The versions of torch between which, both included, the tests have run (docs/versions.md)."""
TESTED_LIBRARIES = {
    "accelerate": "1.15",
    "datasets": "4.7",
    "lightning": "2.6",
    "torchtitan": "0.3",
    "transformers": "5.23",
}
"""The version of each other library that the tests run with."""


class Private(NamedTuple):
    """Private names of one module or class."""

    owner: str
    """Its full name."""
    names: str
    """Attributes of it or of its instances, with spaces between."""
    use: str
    """What they are used for: "paramp needs it for ..."."""
    since: str = OLDEST
    until: str = NEWEST
    """The first and the last version of torch that has them. :data:`OLDEST`, :data:`NEWEST`: older and newer ones too,
    as far as is known."""
    optional: bool = False
    """Whether some versions or some objects lack them, so that code asks whether they are there."""


C10D = "torch.distributed.distributed_c10d"
STATE = "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState"
GROUP = "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup"
PARAM = "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam"
STAGE = "torch.distributed.pipelining.stage._PipelineStageBase"

TO_FP32 = (
    # norms
    "layer_norm native_layer_norm rms_norm group_norm norm renorm frobenius_norm nuclear_norm linalg_vector_norm "
    "linalg_matrix_norm cosine_similarity dist pdist cdist "
    # softmax and sums
    "softmax log_softmax softplus logsumexp sum prod cumsum cumprod "
    # exponentials, logarithms, powers
    "exp expm1 log log10 log2 log1p pow rsqrt reciprocal acos asin cosh sinh tan erfinv "
    # losses
    "nll_loss nll_loss2d poisson_nll_loss hinge_embedding_loss cosine_embedding_loss kl_div l1_loss smooth_l1_loss "
    "huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss "
    "multi_margin_loss binary_cross_entropy_with_logits "
    # resampling
    "upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d "
    "upsample_trilinear3d upsample_bicubic2d"
)
"""The operators that torch's table for CUDA widens to fp32 (``AT_FORALL_FP32`` in ``ATen/autocast_mode.h``)."""
TO_WIDEST = "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add"
"""The operators that it casts to the widest dtype of their arguments (``AT_FORALL_PROMOTE``)."""

INVENTORY = (
    # torch: kernels and the dispatcher
    Private("torch.ops.aten", f"{TO_FP32} {TO_WIDEST} lstm", "kernels that are replaced: autocast as on CUDA"),
    Private(
        "torch.ops.aten",
        "mm addmm bmm baddbmm addbmm mv addmv dot convolution convolution_backward",
        "kernels that are replaced: fp16 products computed in fp32 on CPUs",
    ),
    Private("torch.ops.aten", "_grouped_mm", "kernels that are replaced: products of experts"),
    Private(
        "torch.ops.transformers",
        "grouped_mm_fallback",
        "kernels that are replaced: products of experts in transformers",
        optional=True,
    ),
    Private("torch", "_foreach_add_ _foreach_copy_ _foreach_mul_ _foreach_norm _foreach_zero_", "lists of tensors"),
    Private("torch", "_fused_adam_ _fused_adamw_ _fused_sgd_", "the optimizer's step over flat buffers"),
    Private("torch", "_amp_foreach_non_finite_check_and_unscale_", "unscaling gradients"),
    Private("torch", "_debug_has_internal_overlap", "copies of expanded tensors"),
    Private("torch", "_safe_softmax", "attention with the same bits on every layout"),
    Private("torch.utils._python_dispatch", "TorchDispatchMode", "refusing random numbers in experts"),
    Private("torch._compile", "_disable_dynamo", "products and exchanges of experts outside of compiled graphs"),
    Private("torch", "_native_multi_head_attention _transformer_encoder_layer_fwd", "refusing whole layers"),
    Private("torch.backends.mha", "_is_fastpath_enabled", "attention over the context axis in evaluation"),
    Private("torch.cpu", "_is_amx_tile_supported _is_avx512_bf16_supported", "what the CPU computes in"),
    Private("torch.ops.mkldnn", "_is_mkldnn_bf16_supported _is_mkldnn_fp16_supported", "what the CPU computes in"),
    Private(
        "torch.ops.aten",
        "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward",
        "attention over the context axis, and kernels that are replaced: fp16 attention computed in fp32 on CPUs",
    ),
    Private(
        "torch.ops.aten",
        "_scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention "
        "_scaled_dot_product_cudnn_attention _flash_attention_forward",
        "what selective activation checkpointing keeps",
    ),
    Private(
        "torch.ops.aten",
        "_scaled_dot_product_flash_attention_backward _scaled_dot_product_efficient_attention_backward",
        "attention over the context axis",
    ),
    Private(
        "torch._C",
        "DispatchKey DispatchKeySet _ExcludeDispatchKeyGuard _dispatch_has_kernel "
        "_dispatch_has_kernel_for_dispatch_key _dispatch_keyset_full_after",
        "autocast on CPUs with the same list of operators as on CUDA",
    ),
    Private("torch._C", "_storage_address", "a parameter's memory that was replaced by .data"),
    Private("torch._C", "DisableTorchFunction", "random numbers that no mode records"),
    Private("torch._C", "_current_graph_task_id", "whether a backward is running"),
    Private("torch._C._autograd", "_get_sequence_nr", "which module has made a node of the graph"),
    Private("torch._C._autograd", "_profiler_enabled", "names of spans in a profile"),
    Private("torch._ops", "OpOverload", "the functions that a mode sees"),
    Private("torch.utils._pytree", "tree_leaves tree_map tree_map_only", "tensors in the arguments of operators"),
    Private("torch.utils._python_dispatch", "is_in_torch_dispatch_mode", "compiling no step under a dispatch mode"),
    Private("torch._dynamo.utils", "graph_break_reasons", "the report of graph breaks"),
    Private("torch._dynamo.eval_frame.OptimizedModule", "_orig_mod dynamo_ctx", "the model inside torch.compile"),
    Private(
        "torch._dynamo.eval_frame",
        "_torchdynamo_disable _torchdynamo_orig_backend _torchdynamo_orig_callable",
        "undoing torch.compile",
        optional=True,
    ),
    Private("torch.fx.Tracer", "_tensor_constant", "constants that a trace has made", optional=True),
    Private("torch.fx.proxy.Attribute", "_node", "telling the attributes of a traced value from its tensor's"),
    # torch: tensors, modules, optimizers
    Private("torch.Tensor", "_base _is_view _values _version", "views, and changes in place"),
    Private("torch.Tensor", "_backward_hooks _post_accumulate_grad_hooks", "carrying hooks to a replaced parameter"),
    Private("torch.autograd.graph.Node", "_sequence_nr", "which module has made a node of the graph"),
    Private("torch.autograd.Function", "_backward_cls", "tracing calls of autograd functions"),
    Private("torch.nn.Module", "_parameters _buffers _modules", "replacing parameters and submodules"),
    Private("torch.nn.Module", "_non_persistent_buffers_set", "state that several pipeline stages have"),
    Private(
        "torch.nn.Module",
        "_backward_hooks _backward_pre_hooks _forward_hooks _forward_hooks_always_called _forward_hooks_with_kwargs "
        "_forward_pre_hooks _forward_pre_hooks_with_kwargs _state_dict_pre_hooks",
        "modules whose hooks have to run",
    ),
    Private("torch.nn.Module", "_extra_state", "values of get_extra_state in a state_dict", optional=True),
    Private("torch.nn.Module", "_load_from_state_dict", "buffers of other shapes in a checkpoint"),
    Private("torch.nn.Module", "_apply _call_impl _compiled_call_impl", "compiled blocks, and moving a module"),
    Private("torch.nn.modules.module", "_has_any_global_hook", "compiling no block while there are global hooks"),
    Private("torch.nn.modules.batchnorm", "_BatchNorm", "the batch norms that stay in fp32"),
    Private("torch.nn.modules.dropout", "_DropoutNd", "switching dropout off in verify"),
    Private("torch.nn", "_reduction", "the losses' old arguments"),
    Private("torch.optim.Optimizer", "_optimizer_step_pre_hooks _optimizer_step_post_hooks", "hooks of a step"),
    Private("torch.optim.optimizer", "_global_optimizer_pre_hooks _global_optimizer_post_hooks", "hooks of a step"),
    Private(
        "torch.amp.GradScaler",
        "_backoff_factor _check_scale_growth_tracker _enabled _get_growth_tracker _growth_factor _growth_interval "
        "_growth_tracker _per_optimizer_states _scale _unscale_grads_",
        "one loss scale for all ranks",
    ),
    Private("torch.optim.Optimizer", "_opt_called", "no warning of a skipped first step", optional=True),
    Private("torch.optim.Optimizer.step", "_wrapped_by_lr_sched", "a step that a scheduler wraps", optional=True),
    Private("torch.optim.Optimizer.step", "hooked", "whether a step calls hooks", optional=True),
    Private(
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.CheckpointWrapper",
        "_checkpoint_wrapped_module",
        "names of parameters in it",
    ),
    Private("torch.utils.data.DataLoader", "_iterator", "workers that stay from epoch to epoch"),
    # torch: processes and meshes
    Private("torch.ops", "_c10d_functional", "kernels replaced in a context: gathering CUDA tensors over gloo"),
    Private(C10D, "_get_default_group _get_default_store", "the store of the world, and how its groups are made"),
    Private(C10D, "_process_group_name", "patched while a group is made: a name that is equal on every rank"),
    Private(C10D, "_resolve_process_group", "gathering CUDA tensors over gloo"),
    Private("torch.distributed.ProcessGroup", "_get_backend bound_device_id", "whether NCCL splits groups"),
    Private("torch.distributed.device_mesh.DeviceMesh", "_get_root_mesh", "the mesh that a parameter's is a part of"),
    Private("torch.distributed.device_mesh.DeviceMesh", "_pg_registry", "letting go of groups that are destroyed"),
    Private("torch.distributed._functional_collectives", "all_gather_tensor all_reduce", "collectives with a backward"),
    Private("torch.distributed._functional_collectives", "reduce_scatter_tensor wait_tensor", "the same"),
    # torch: DTensor
    Private("torch.distributed.tensor.DTensor", "_local_tensor _spec", "the memory and the layout of a shard"),
    Private("torch.distributed.tensor._dtensor_spec", "DTensorSpec", "shards without the time that from_local takes"),
    Private("torch.distributed.tensor._utils", "compute_local_shape_and_global_offset", "where a shard begins"),
    Private("torch.distributed.tensor.placement_types", "_StridedShard", "FSDP2 over tensor shards"),
    Private("torch.distributed.tensor.parallel.ParallelStyle", "_apply", "styles of the tensor plan"),
    Private("torch.distributed.tensor", "_collective_utils _redistribute _sharding_prop", "releasing closed meshes"),
    Private("torch.distributed.tensor.DTensor", "_op_dispatcher", "releasing closed meshes"),
    Private("torch._C", "_clear_DTensor_sharding_propagator_cache", "releasing closed meshes", optional=True),
    Private(
        "torch.distributed.tensor._redistribute",
        "clear_redistribute_planner_cache _gen_transform_infos _gen_transform_infos_non_cached",
        "releasing closed meshes",
        optional=True,
    ),
    Private(
        "torch.distributed.tensor._sharding_prop.ShardingPropagator",
        "_propagate_tensor_meta_cached",
        "releasing closed meshes",
        optional=True,
    ),
    # torch: FSDP2
    Private("torch.distributed.fsdp.FSDPModule", "_get_fsdp_state", "torch's records of sharded parameters"),
    Private("torch.distributed.fsdp._fully_shard._fsdp_common", "TrainingState", "a failed batch", until="2.12"),
    Private("torch.distributed.fsdp.FSDPModule", "reset_iter_state", "a failed batch", since="2.13"),
    Private(STATE, "_fsdp_param_group", "the parameters of a unit", until="2.11"),
    Private(STATE, "_fsdp_param_groups", "the parameters of a unit", since="2.12"),
    Private(
        STATE,
        "_comm_ctx _device _is_root _mp_policy _register_pre_backward_hook _root_post_backward_final_callback "
        "_state_ctx _training_state",
        "reducing gradients after a pipeline's last backward, and resetting a failed batch",
    ),
    Private(
        GROUP,
        "_all_gather_result _all_reduce_state _partial_reduce_output _post_forward_indices _post_reduce_event "
        "_reshard_after_forward_event _training_state fsdp_params is_sharded post_backward reduce_grads "
        "wait_for_unshard",
        "gathering what a step has written, and completing gradients before they are reduced",
    ),
    Private(
        PARAM,
        "_module_info _sharded_param_data _unsharded_param fsdp_placement init_dtype_attrs mesh_info mp_policy "
        "orig_dtype padded_sharded_param_size param_dtype reduce_dtype sharded_param unsharded_accumulated_grad",
        "the memory, the dtypes and the gradient of a sharded parameter",
    ),
    Private(PARAM, "_tp_spec", "the placements of a gradient over tensor ranks", until="2.11"),
    Private(PARAM, "_unsharded_dtensor_spec", "the placements of a gradient over tensor ranks", since="2.12"),
    Private(PARAM, "accumulate_unsharded_grad_if_needed to_accumulated_grad_if_needed", "adding up", until="2.14"),
    Private(PARAM, "unsharded_grad_dtype", "the dtype in which autograd adds gradients up", since="2.15"),
    # torch: tracing
    Private(
        "torch",
        "arange empty eye full linspace ones tensor tril_indices triu_indices zeros normal rand randint randn randperm",
        "patched while a forward is traced: numbers that are proxies, and random tensors",
    ),
    # torch: pipelines
    Private(
        STAGE,
        "forward_one_chunk backward_one_chunk backward_weight_one_chunk backward_maybe_with_nosync get_fwd_send_ops",
        "observing a pipeline's stages, their backward in two halves, and sends that keep no graph",
    ),
    Private(STAGE, "_get_init_p2p_neighbors_ops", "stages of one rank that are neighbours", until="2.14"),
    Private(
        "torch.distributed.pipelining.PipelineStage",
        "_post_metadata_inference_cleanup",
        "keeping gradients of earlier batches",
        since="2.13",
    ),
    Private("torch.distributed.pipelining.schedules", "get_schedule_class", "the schedules by their names"),
    Private(
        "torch.distributed.pipelining.schedules._PipelineScheduleRuntime", "pipeline_order_with_comms", "evaluation"
    ),
    Private("torch.distributed.pipelining.schedules._Action", "computation_type sub_actions", "evaluation"),
    # other libraries
    Private("accelerate.Accelerator", "_models _optimizers _prepare_tp", "what was prepared before adopt"),
    Private("accelerate.Accelerator", "_dataloaders _prepare_cp", "the context axis in place of torch's"),
    Private("accelerate.accelerator", "gather_object", "patched: metrics of one rank of each sequence"),
    Private(
        "accelerate.Accelerator",
        "_original_forward _is_accelerate_prepared",
        "a model that was prepared before adopt",
        optional=True,
    ),
    Private("accelerate.optimizer.AcceleratedOptimizer", "_is_overflow", "reporting skipped steps"),
    Private(
        "accelerate.parallelism_config.ParallelismConfig",
        "_validate_accelerator",
        "patched: tp on CPUs",
    ),
    Private("accelerate.state.PartialState", "_shared_state", "FSDP2 on CPUs"),
    Private("datasets.Dataset", "_indices", "rows in the order of their memory"),
    Private("lightning.pytorch.plugins.precision.precision.Precision", "_after_closure", "a step of the Trainer"),
    Private("lightning.fabric.plugins.environments.mpi.MPIEnvironment", "detect", "patched: machines without MPI"),
    Private("torchtitan.trainer.Trainer.Config", "_owner", "the trainer of a configuration"),
    Private("torchtitan.trainer", "prepare_context_parallel_input", "patched: cutting batches"),
    Private("torchtitan.components.validate", "prepare_context_parallel_input", "patched: cutting batches"),
    Private("torchtitan.models.llama3.parallelize", "apply_cp_to_forward", "patched: attention of other families too"),
    Private("torchtitan.distributed.utils", "clip_grad_norm_", "patched in a step: unscaling and clipping"),
    Private("torchtitan.components.optimizer.OptimizersContainer", "step", "patched in a step: skipping it"),
    Private(
        "torchtitan.components.optimizer.lr_scheduler.LRSchedulersContainer", "step", "patched in a step: skipping it"
    ),
    Private("torchtitan.components.metrics.MetricsProcessor", "log", "patched in a step: the scale in the metrics"),
    Private("transformers.PreTrainedModel", "_init_weights _pp_plan", "a model on meta, and its pipeline plan"),
    Private("transformers.PreTrainedModel", "_weight_conversions", "saving as it was loaded", optional=True),
    Private(
        "transformers.models.mixtral.modeling_mixtral",
        "load_balancing_loss_func",
        "patched in a forward: the loss of routers, in each file of a model that has it",
    ),
    Private("transformers.PreTrainedConfig", "_name_or_path", "the folder that a model came from"),
    Private("transformers.PreTrainedModel", "_can_set_attn_implementation", "whether its attention is looked up"),
    Private("transformers.PreTrainedConfig", "_attn_implementation", "the attention that is replaced over ranks"),
    Private("transformers.PreTrainedConfig", "_experts_implementation", "which products experts call"),
    Private("transformers.PreTrainedConfig", "_commit_hash", "the folder that a model came from", optional=True),
    Private(
        "transformers.Trainer",
        "_build_accelerator_args _clip_grad_norm _get_grad_norm _load_scaler _prepare_for_training _save_scaler",
        "clipping, and the loss scale in checkpoints",
    ),
)
"""Private names, and public ones of classes that are no part of torch's documented interface."""


@functools.cache
def take(name: str) -> Any:
    """The function, class or module of a private full name of :data:`INVENTORY`; imports the module that it is in.

    Raises:
        RuntimeError: what is installed has no such name.
    """
    owner, _, last = name.rpartition(".")
    row = next(row for row in INVENTORY if row.owner == owner and last in row.names.split())
    try:
        return getattr(_resolved(owner), last)
    except (ImportError, AttributeError):
        raise _error(row, last) from None


def expect(*names: str) -> None:
    """Check that what is installed has ``names`` of :data:`INVENTORY`: full names, or owners for all that they have.

    Raises:
        RuntimeError: it lacks one.
    """
    owners = {name.rpartition(".")[0] for name in names} | set(names)
    for row in INVENTORY:
        for name in lacks(row) if row.owner in owners else ():
            if row.owner in names or f"{row.owner}.{name}" in names:
                raise _error(row, name)


def lacks(row: Private) -> list[str]:
    """The names of a row that this torch, or this library, ought to have and has not. Imports what they are in."""
    if row.optional or not _applies(row):
        return []
    try:
        owner = _resolved(row.owner)
    except (ImportError, AttributeError):
        return row.names.split()
    return [name for name in row.names.split() if not _has(owner, name)]


def older_than(version: str) -> bool:
    """Whether the installed torch is older than ``version``, such as ``"2.12"``."""
    return _number(torch.__version__) < _number(version)


@functools.cache
def warn_if_untested() -> None:
    """Warn, once in a process, of a version of torch with which no test has run, and of private names that it lacks."""
    if _number(OLDEST) <= _number(torch.__version__) <= _number(NEWEST):
        return
    missing = [f"{row.owner}.{name}" for row in INVENTORY if row.owner.startswith("torch.") for name in lacks(row)]
    found = f"it lacks {', '.join(missing)}" if missing else "it has all private names that paramp uses"
    tested = f"paramp was tested with torch {OLDEST} to {NEWEST} only (docs/versions.md)"
    warnings.warn(f"torch {torch.__version__}: {tested}; {found}", stacklevel=2)


def _error(row: Private, name: str) -> RuntimeError:
    library = row.owner.split(".")[0]
    known = f"{row.since} to {row.until}" if library == "torch" else TESTED_LIBRARIES[library]
    installed = torch.__version__ if library == "torch" else importlib.metadata.version(library)
    return RuntimeError(
        f"{library} {installed} has no {row.owner}.{name}, which paramp needs for {row.use}; it is "
        f"known in {library} {known}: install such a version, or report this error"
    )


def _applies(row: Private) -> bool:
    """Whether the row is of the installed version."""
    if row.owner.split(".")[0] != "torch":
        return True
    installed = _number(torch.__version__)
    begun = _number(row.since) <= installed or row.since == OLDEST
    return begun and (installed <= _number(row.until) or row.until == NEWEST)


def _number(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")[:2]))


@functools.cache
def _resolved(name: str) -> Any:
    """The module or class of that full name."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            module = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue  # a class, or something in it
        return functools.reduce(getattr, parts[end:], module)
    raise ModuleNotFoundError(name)


def _has(owner: Any, name: str) -> bool:
    """Whether ``owner``, or each instance of it, has that attribute: in the class, annotated, or used in a method."""
    if hasattr(owner, name) or not isinstance(owner, type):
        return hasattr(owner, name)
    return any(name in names for kind in owner.__mro__ for names in _attributes(kind))


def _attributes(kind: type) -> Iterable[Iterable[str]]:
    yield vars(kind).get("__annotations__", ())
    yield from (member.__code__.co_names for member in vars(kind).values() if hasattr(member, "__code__"))
