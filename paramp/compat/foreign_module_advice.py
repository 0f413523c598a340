"""The modules of other libraries that have no file here: what is used of one is found in another, or says what to use.

A row of a table is a module, its submodules, and the alternative. A module under one that has a file, or that
:data:`SAME` has, finds that one's names: ``apex.normalization.fused_layer_norm.FusedLayerNorm`` is that of
``apex.normalization``. Any other name is an ImportError with the alternative.

The rows have what the libraries document, and the packages of their sources: Apex 22.04 to 25.05, Colossal-AI 0.1 to
0.4, Composer 0.10 to 0.32.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from .missing import missing

USE_AMP = "use amp.initialize(model, optimizer, opt_level='O2') and amp.scale_loss"
APEX_ITSELF = "install NVIDIA's Apex, which has its kernels, or write it on torch and call torch.compile"
CONTEXT = "paramp.launch_from_torch(config) makes the groups; paramp.get_context() has its axes tp, dp and pp"
PLAN = "use torch.nn's layers; paramp.initialize(..., plan={...}) shards them over parallel=dict(tensor=2)"
STAGES = "paramp.initialize partitions the model into the stages of parallel=dict(pipeline=2)"
ZERO = "use paramp.initialize with parallel=dict(zero=1), or parallel=dict(data=dict(shard=2)) for sharded weights too"
ENGINE = "use the engine that paramp.initialize(model, optimizer, criterion) returns"
OPTIMIZER = "use torch.optim.AdamW, which paramp.initialize steps in one fused pass"
SCHEDULER = "use torch.optim.lr_scheduler, or paramp.compat.colossalai.nn.lr_scheduler"
CHECKPOINT = "call engine.save(folder) and engine.load(folder) on each rank, or use paramp.Checkpoints"
LOOP = "write the loop yourself, with the engine that paramp.initialize(model, optimizer, criterion) returns"
LOG = "print in your loop, or write with paramp.Metrics"
ATTENTION = "use torch.nn.functional.scaled_dot_product_attention"
PROFILE = "use torch.profiler.profile"
TRACE = "paramp.initialize traces the model itself where it has to partition it; use torch.fx for your own graphs"
SEARCH = "nothing is searched: choose the layout in parallel=dict(tensor=2, pipeline=2) and a plan"
SERVE = "paramp trains; serve the model with the library that you serve others with"
META = "build the model in torch.device('meta') or with paramp.init_module; paramp.initialize fills its shards"
DATA = "use torch.utils.data.DataLoader; paramp.initialize shards it over the data ranks"
EXPERTS = "layers of experts are not sharded by Colossal-AI's names here; use torch.nn's layers"
MODEL = "pass any torch.nn.Module to paramp.initialize"
TESTING = "use torch.testing.assert_close"
LAUNCHER = "start the script with torchrun, or paramp.launch_from_slurm and the other launch functions"

APEX = {
    "use torch.nn.LSTM, torch.nn.GRU or torch.nn.RNN": "RNN{RNNBackend cells models}",
    USE_AMP: """
        amp{amp compat handle lists lists.functional_overrides lists.tensor_overrides lists.torch_overrides opt
        rnn_compat scaler utils wrap} contrib.optimizers.fp16_optimizer fp16_utils{fp16_optimizer fp16util
        loss_scaler}
    """,
    APEX_ITSELF: """
        contrib{bottleneck bottleneck.bottleneck bottleneck.halo_exchangers conv_bias_relu
        conv_bias_relu.conv_bias_relu focal_loss focal_loss.focal_loss gpu_direct_storage index_mul_2d
        index_mul_2d.index_mul_2d nccl_allocator nccl_allocator.nccl_allocator openfold_triton
        openfold_triton.fused_adam_swa openfold_triton.layer_norm openfold_triton.mha peer_memory
        peer_memory.peer_halo_exchanger_1d peer_memory.peer_memory torchsched torchsched.backend
        torchsched.config torchsched.inductor torchsched.ops torchsched.passes transducer transducer.transducer}
    """,
    "call paramp.clip_grad_norm_, or set clip_grad_norm in the configuration": "contrib.clip_grad{clip_grad}",
    ATTENTION: "contrib.fmha{fmha}",
    "use torch.nn.GroupNorm": "contrib.group_norm{group_norm}",
    "use torch.nn.BatchNorm2d, or apex.parallel.convert_syncbn_model": """
        contrib.cudnn_gbn{batch_norm} contrib.groupbn{batch_norm}
    """,
    "use apex.normalization.FusedLayerNorm or torch.nn.LayerNorm": """
        contrib.layer_norm{layer_norm} transformer.layers{layer_norm}
    """,
    "use torch.nn.MultiheadAttention": """
        contrib.multihead_attn{encdec_multihead_attn encdec_multihead_attn_func fast_encdec_multihead_attn_func
        fast_encdec_multihead_attn_norm_add_func fast_self_multihead_attn_func
        fast_self_multihead_attn_norm_add_func mask_softmax_dropout_func self_multihead_attn
        self_multihead_attn_func}
    """,
    ZERO: """
        contrib.optimizers{distributed_fused_adam distributed_fused_adam_v2 distributed_fused_adam_v3
        distributed_fused_lamb}
    """,
    "use apex.optimizers.FusedAdam": "contrib.optimizers.fused_adam",
    "use apex.optimizers.FusedAdam; torch has no LAMB": "contrib.optimizers.fused_lamb",
    "use apex.optimizers.FusedSGD": "contrib.optimizers.fused_sgd",
    "use torch.nn.utils.prune": "contrib.sparsity{asp permutation_lib permutation_search_kernels sparse_masklib}",
    "use torch.nn.CrossEntropyLoss": "contrib.xentropy{softmax_xentropy}",
    "use torch.nn.Linear and torch.nn.GELU, with torch.compile to fuse them": "fused_dense{fused_dense}",
    "use torch.nn.Sequential of torch.nn.Linear and torch.nn.ReLU, with torch.compile to fuse them": "mlp{mlp}",
    "import it from apex.multi_tensor_apply, where it is not available": "multi_tensor_apply{multi_tensor_apply}",
    "use torch.nn.InstanceNorm3d": "normalization{fused_layer_norm instance_norm}",
    OPTIMIZER: """
        optimizers{fused_adagrad fused_adam fused_lamb fused_mixed_precision_lamb fused_novograd fused_sgd}
    """,
    LAUNCHER: "parallel.multiproc",
    "use torch.nn.SyncBatchNorm, or apex.parallel.DistributedDataParallel": """
        parallel{LARC distributed optimized_sync_batchnorm optimized_sync_batchnorm_kernel sync_batchnorm
        sync_batchnorm_kernel}
    """,
    PROFILE: """
        pyprof{nvtx nvtx.nvmarker parse parse.db parse.kernel parse.nvvp parse.parse prof prof.activation
        prof.base prof.blas prof.conv prof.convert prof.data prof.dropout prof.embedding
        prof.index_slice_join_mutate prof.linear prof.loss prof.misc prof.normalization prof.optim prof.output
        prof.pointwise prof.pooling prof.prof prof.randomSample prof.recurrentCell prof.reduction prof.softmax
        prof.usage prof.utility}
    """,
    "use torch.nn.utils.parametrizations.weight_norm": "reparameterization{reparameterization weight_norm}",
    "use paramp.initialize(model, optimizer, criterion, plan={...})": "transformer{enums log_util utils}",
    "use paramp.DistributedGradScaler": "transformer.amp{grad_scaler}",
    "use torch.nn.functional.scaled_dot_product_attention, or torch.softmax": """
        transformer.functional{fused_rope fused_softmax}
    """,
    "set parallel=dict(pipeline=dict(size=2, microbatches=4)), or gradient_accumulation": """
        transformer.microbatches
    """,
    CONTEXT: "transformer.parallel_state",
    STAGES: "transformer.pipeline_parallel{p2p_communication schedules utils}",
    PLAN: "transformer.tensor_parallel{cross_entropy data layers mappings memory random utils}",
}
COLOSSALAI = {
    "use torch.device, or colossalai.utils.get_current_device()": """
        accelerator{api base_accelerator cpu_accelerator cuda_accelerator npu_accelerator}
    """,
    "use paramp.DistributedGradScaler, or convert_to_amp": """
        amp{amp_type apex_amp apex_amp.apex_amp naive_amp naive_amp.grad_scaler naive_amp.mixed_precision_mixin
        naive_amp.naive_amp torch_amp torch_amp.torch_amp}
    """,
    SEARCH: """
        auto_parallel{checkpoint meta_profiler offload offload.amp_optimizer offload.mem_optimize offload.solver
        passes pipeline_shard tensor_shard tensor_shard.initialize}
    """,
    "set activation_checkpointing='full' in the configuration to save memory": """
        autochunk{autochunk_codegen estimate_memory reorder_graph search_chunk select_chunk trace_flow
        trace_indice utils}
    """,
    ENGINE: """
        booster{accelerator booster} engine{schedule} interface{model optimizer pretrained}
        legacy.engine{gradient_handler schedule} nn.parallel{data_parallel layers layers.colo_module
        layers.embedding layers.linear layers.module_utils reducer} utils{common commons cuda data_sampler
        data_sampler.base_sampler data_sampler.data_parallel_sampler device gradient_accumulation model moe
        multi_tensor_apply multi_tensor_apply.multi_tensor_apply rank_recorder tensor_detector
        tensor_detector.tensor_detector timer}
    """,
    "set precision='16-mixed' or another paramp.Precision in the configuration": """
        booster.mixed_precision{bf16 fp16_apex fp16_naive fp16_torch fp8 mixed_precision_base} mixed_precision
    """,
    "set the layout in the configuration of paramp.launch_from_torch: parallel=dict(tensor=2, pipeline=2, zero=1)": """
        booster.plugin{dp_plugin_base gemini_plugin hybrid_parallel_plugin low_level_zero_plugin
        moe_hybrid_parallel_plugin plugin_base pp_plugin_base torch_ddp_plugin torch_fsdp_plugin}
    """,
    "make the objects yourself; paramp.initialize partitions the model over parallel=dict(pipeline=2)": """
        builder{builder pipeline} legacy.builder
    """,
    CHECKPOINT: """
        checkpoint_io{checkpoint_io_base general_checkpoint_io hybrid_parallel_checkpoint_io index_file
        moe_checkpoint utils} legacy.utils{activation_checkpoint checkpoint memory profiler}
        utils.checkpoint_io{backend constant convertor distributed io meta reader utils writer}
        utils.checkpointing utils.checkpoint{module_checkpoint utils} utils.safetensors
    """,
    LAUNCHER: """
        cli{benchmark benchmark.benchmark benchmark.models benchmark.utils check check.check_installation cli
        launcher launcher.hostinfo launcher.multinode_runner launcher.run} initialize legacy.initialize
    """,
    CONTEXT: """
        cluster{device_mesh_manager dist_coordinator process_group_manager process_group_mesh} constants
        context{config moe_context parallel_context parallel_mode process_group_initializer
        process_group_initializer.initializer_1d process_group_initializer.initializer_2d
        process_group_initializer.initializer_2p5d process_group_initializer.initializer_3d
        process_group_initializer.initializer_data process_group_initializer.initializer_model
        process_group_initializer.initializer_moe process_group_initializer.initializer_pipeline
        process_group_initializer.initializer_sequence process_group_initializer.initializer_tensor
        process_group_initializer.process_group_initializer random random.seed_manager singleton_meta}
        device{alpha_beta_profiler calc_pipeline_strategy device_mesh profile_alpha_beta} global_variables
        legacy.constants legacy.context{parallel_context parallel_mode random} legacy.core
        legacy.global_variables
    """,
    "use torch.distributed's collectives, on the groups of colossalai.core.global_context": """
        communication{collective p2p p2p_v2 ring utils}
    """,
    "set gradient_accumulation in the configuration": "engine.gradient_accumulation",
    "leave it out: the engine that paramp.initialize returns reduces gradients": "engine.gradient_handler{utils}",
    ZERO: """
        engine.ophooks{zero_hook} engine.paramhooks gemini{chunk chunk_mgr gemini_context gemini_mgr
        memory_tracer memory_tracer.async_memtracer memory_tracer.memory_monitor
        memory_tracer.memstats_collector memory_tracer.model_data_memtracer ophooks ophooks.utils paramhooks
        placement_policy stateful_tensor stateful_tensor_container stateful_tensor_mgr tensor_placement_policy
        tensor_utils update} legacy.zero{gemini init_ctx sharded_model sharded_optim}
        nn.optimizer.gemini_optimizer nn.optimizer.zero_optimizer zero{gemini gemini.chunk gemini.gemini_ddp
        gemini.gemini_optimizer init_ctx init_ctx.init_context legacy low_level shard_utils
        shard_utils.base_shard_strategy shard_utils.bucket_tensor_shard_strategy shard_utils.commons
        shard_utils.tensor_shard_strategy shard_utils.tensor_utils sharded_model sharded_model.reduce_scatter
        sharded_model.sharded_model_v2 sharded_model.utils sharded_optim sharded_optim.sharded_optim_v2
        sharded_param sharded_param.sharded_param sharded_param.sharded_tensor sharded_param.tensorful_state
        utils utils.gemini_hook utils.zero_hook utils.zero_hook_v2 wrapper zero_optimizer
        zero_redundancy_optimizer_level_2 zero_redundancy_optimizer_level_3}
    """,
    TRACE: """
        fx{codegen graph_module passes passes.adding_split_node_pass passes.meta_info_prop passes.shard_1d_pass
        passes.split_module passes.utils profiler proxy tracer tracer.tracer} nn.graph{graph_node utils}
    """,
    SERVE: """
        inference{batch_bucket config core core.engine executor flash_decoding_utils graph_runner kv_cache
        logit_processors modeling sampler server spec struct tensor_parallel tensor_parallel.engine utils}
        legacy.inference
    """,
    "set compile=True in the configuration, or use torch.nn.functional.scaled_dot_product_attention": """
        kernel{cuda_native cuda_native.layer_norm cuda_native.multihead_attention cuda_native.scaled_softmax jit
        jit.bias_dropout_add jit.bias_gelu jit.option kernel_loader op_builder triton}
    """,
    META: """
        lazy{construction lazy_init pretrained} utils.model.colo_init_context utils.model.lazy_init_context
        utils.model.utils
    """,
    "it is Colossal-AI 0.1's interface, whose names are in paramp.compat.colossalai": "legacy",
    "use convert_to_amp": "legacy.amp{naive_amp torch_amp}",
    "use torch.distributed's collectives": "legacy.communication",
    PLAN: """
        legacy.nn{layer layer.base_layer layer.utils layer.wrapper loss parallel} legacy.tensor
        nn.layer{base_layer colossalai_layer colossalai_layer.dropout colossalai_layer.embedding
        colossalai_layer.linear colossalai_layer.normalization layernorm parallel_1d parallel_1d.layers
        parallel_2d parallel_2d.layers parallel_2p5d parallel_2p5d.layers parallel_3d parallel_3d.layers
        parallel_sequence parallel_sequence.layers utils utils.common vanilla vanilla.layers wrapper
        wrapper.lambda_wrapper wrapper.pipeline_wrapper} shardformer{layer modeling shard shard.utils}
    """,
    "write a subclass of paramp.compat.colossalai.trainer.hooks.BaseHook": "legacy.nn.metric",
    STAGES: """
        legacy.pipeline{middleware pipelinable rpc utils} pipeline{layer_sepc layer_spec middleware
        middleware.adaptor p2p pipelinable pipeline_process_group rpc schedule schedule.v_schedule
        schedule.zero_bubble_pp stage_manager utils weight_grad_store}
    """,
    "pass the classes themselves to paramp.initialize": "legacy.registry registry{registry}",
    LOOP: "legacy.trainer",
    "write a subclass of BaseHook": "legacy.trainer.hooks",
    "use get_dist_logger": "logging{logger logging}",
    EXPERTS: """
        moe{checkpoint experts layers load_balance loss manager routers utils} nn.layer.moe{experts layers
        routers utils}
    """,
    "use torch.nn.init": "nn{init}",
    "use torch.nn.CrossEntropyLoss, which the engine of paramp.initialize also takes for sharded logits": """
        nn.loss{loss_1d loss_2d loss_2p5d loss_3d loss_moe}
    """,
    "use torch.optim.lr_scheduler": "nn.lr_scheduler{cosine delayed linear multistep onecycle poly torch}",
    "use paramp.compat.colossalai.nn.metric.Accuracy": "nn.metric{accuracy_2d accuracy_2p5d accuracy_3d}",
    MODEL: "nn.model{model_from_config}",
    OPTIMIZER: """
        nn.optimizer{adafactor colossalai_optimizer cpu_adam distributed_adafactor distributed_came
        distributed_galore distributed_lamb fused_adam fused_lamb fused_sgd galore hybrid_adam lamb lars utils}
    """,
    "set precision='fp8-mixed' in the configuration": "quantization{bnb bnb_config fp8 fp8_config fp8_hook utils}",
    "paramp.initialize takes the plans of models of transformers; write plan={...} for others": """
        shardformer.policies{auto_policy base_policy bert blip2 bloom chatglm2 falcon gpt2 gptj llama mistral
        opt qwen2 sam t5 vit whisper}
    """,
    "use torch.distributed.tensor.DTensor, which paramp.initialize makes of the parameters in the plan": """
        tensor{colo_parameter colo_tensor comm_spec compute_spec const d_tensor dist_spec dist_spec_mgr distspec
        graph moe_tensor moe_tensor.api op_wrapper optim padded_tensor param_op_hook process_group
        shape_consistency sharding_spec spec tensor_spec utils}
    """,
    TESTING: "testing{comparison pytest_wrapper random utils}",
    "set activation_checkpointing='full' in the configuration": "utils.activation_checkpoint",
    "use torch.cuda.memory_summary": "utils.memory utils.memory_tracer utils.memory_utils{memory_monitor utils}",
    PROFILE: """
        utils.profiler{comm_profiler extention legacy legacy.comm_profiler legacy.mem_profiler
        legacy.pcie_profiler legacy.prof_utils mem_profiler pcie_profiler prof_utils profiler
        stateful_tensor_mem_extention}
    """,
    "use paramp.DistributedGradScaler": "zero.loss_scaler",
}
COMPOSER = {
    "pass an object with apply(model, precision) to paramp.initialize(..., algorithms=[...])": """
        algorithms{algorithm_hparams_registry alibi alibi.gpt2_alibi augmix blurpool channels_last colout cutmix
        cutout ema factorize fused_layernorm gated_linear_units ghost_batchnorm gradient_clipping gyro_dropout
        label_smoothing layer_freezing low_precision_groupnorm low_precision_layernorm mixup no_op_model
        progressive_resizing qk_clip randaugment sam selective_backprop seq_length_warmup squeeze_excite
        stochastic_depth swa utils warnings weight_standardization}
    """,
    LOG: """
        callbacks{activation_monitor callback_hparams_registry early_stopper eval_output_logging_callback
        export_for_inference free_outputs generate health_checker image_visualizer lr_monitor memory_monitor
        memory_snapshot mlperf oom_observer runtime_estimator speed_monitor system_metrics_monitor
        threshold_stopper utils} loggers{cometml_logger console_logger file_logger in_memory_logger logger
        logger_destination logger_hparams_registry mlflow_logger mosaicml_logger neptune_logger
        object_store_logger progress_bar_logger remote_uploader_downloader slack_logger tensorboard_logger
        wandb_logger}
    """,
    CHECKPOINT: """
        callbacks.checkpoint_saver callbacks.load_checkpoint checkpoint{download load save state_dict upload}
        utils.checkpoint
    """,
    "read grad_norm of the paramp.StepResult that engine.step() returns": """
        callbacks.grad_monitor callbacks.optimizer_monitor
    """,
    "leave it out: engine.step() skips a step that is not finite, as paramp.StepResult says": """
        callbacks.nan_monitor
    """,
    LAUNCHER: "cli{launcher}",
    LOOP: """
        core{algorithm callback data_spec engine evaluator event passes serializable state time types}
        trainer{activation_checkpointing devices devices.device_gpu dist_strategy meta_safe_apply mosaic_fsdp
        mosaic_fsdp_utils trainer trainer_hparams}
    """,
    "set precision='amp_bf16' or another paramp.Precision in the configuration": "core.precision",
    DATA: """
        datasets{ade20k ade20k_hparams brats brats_hparams c4 c4_hparams cifar cifar_hparams coco coco_hparams
        dataset_hparams dataset_hparams_registry evaluator_hparams ffcv_utils glue_hparams imagenet
        imagenet_hparams in_context_learning_evaluation lm_dataset lm_dataset_hparams mnist mnist_hparams
        streaming synthetic synthetic_hparams synthetic_lm utils}
    """,
    "leave it out: paramp.launch_from_torch chooses the device; paramp.get_context().device is it": """
        devices{device device_cpu device_gpu device_hpu device_mps device_neuron device_tpu}
    """,
    ZERO: """
        distributed{activation_checkpointing deepspeed dist_strategy fsdp2 fsdp2_utils meta_safe_apply
        mosaic_parallelism param_init prepare_distributed shared_utils}
    """,
    "use torch.nn.functional's losses": "loss{loss utils}",
    "compute them from what engine.evaluate and the engine of paramp.initialize return": """
        metrics{map metrics nlp}
    """,
    "pass any torch.nn.Module to paramp.initialize; paramp.models has some": """
        models{base bert classify_mnist deeplabv3 deeplabv3.model efficientnetb0 gpt2 huggingface initializers
        mmdetection model_hparams nlp_metrics resnet resnet_cifar ssd tasks timm unet vit_small_patch16}
    """,
    OPTIMIZER: "optim{optimizer_hparams_registry}",
    "use torch.optim.AdamW, with weight_decay divided by lr": "optim.decoupled_weight_decay",
    SCHEDULER: "optim.scheduler optim.scheduler_hparams_registry",
    PROFILE: """
        profiler{json_trace_handler json_trace_merger marker profiler profiler_action profiler_hparams
        profiler_schedule system_profiler torch_profiler trace_handler utils}
    """,
    "it serves Composer's trainer; paramp.initialize needs nothing of it": """
        utils{auto_log_hparams batch_helpers collect_env compression eval_client file_helpers fx_utils
        import_helpers inference iter_helpers misc object_store object_store.object_store_hparams
        remote_uploader retrying string_enum warnings}
    """,
    "use tensor.to(paramp.get_context().device)": "utils.device",
    "use torch.distributed, or rank, world_size and is_main of paramp.get_context()": "utils.dist",
    "assign the new module yourself, before paramp.initialize": "utils.module_surgery",
    "set parallel=dict(tensor=2) in the configuration of paramp.launch_from_torch": "utils.parallelism",
    "set seed in the configuration of paramp.launch_from_torch, or call torch.manual_seed": """
        utils.reproducibility
    """,
}
TABLES = {"apex": APEX, "colossalai": COLOSSALAI, "composer": COMPOSER}
"""By library: an alternative, and the modules to which it belongs; in braces the submodules of the one before."""
SAME = {"colossalai.legacy": "colossalai", "colossalai.initialize": "colossalai"}
"""Modules without a file whose names another one has; and so their submodules."""


def alternatives(library: str) -> dict[str, str]:
    """Each module of the table of ``library``, as ``zero.low_level``, parents first, with what to use in its place."""
    found: dict[str, str] = {}
    for alternative, modules in TABLES[library].items():
        for package, children in re.findall(r"([\w.]+)(?:\{(.*?)\})?", modules, re.DOTALL):
            found |= dict.fromkeys([package, *(f"{package}.{child}" for child in children.split())], alternative)
    return dict(sorted(found.items()))


def add_modules(library: str) -> None:
    """Let the modules of the table of ``library`` be imported, whose package is being imported."""
    root = f"{__package__}.{library}"
    for path, alternative in alternatives(library).items():
        name = f"{root}.{path}"
        if name in sys.modules:  # it has a file
            continue
        module = ModuleType(name, f"{library}.{path}, which is not here: {alternative}.")
        module.__getattr__ = _attributes(name, _source(library, path), alternative)  # type: ignore[method-assign]
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent == root or not (_has_file(parent) and _is_known(sys.modules[parent], child)):
            vars(sys.modules[parent]).setdefault(child, module)


def _has_file(name: str) -> bool:
    return getattr(sys.modules.get(name), "__spec__", None) is not None


def _is_known(module: ModuleType, name: str) -> bool:
    """Whether ``module`` has ``name``, or says itself what to use in its place: ``from apex.parallel import LARC``."""
    try:
        return hasattr(module, name)
    except ImportError:
        return True


def _source(library: str, path: str) -> str | None:
    """The module whose names ``path`` has: the nearest with a file above it, or above its place by :data:`SAME`."""
    full, is_same = f"{library}.{path}", False
    for module, other in SAME.items():
        if f"{full}.".startswith(f"{module}."):
            full, is_same = other + full.removeprefix(module), True
    while is_same or full != library:
        if _has_file(f"{__package__}.{full}"):
            return f"{__package__}.{full}"
        full = full.rpartition(".")[0]
    return None


def _attributes(name: str, source: str | None, alternative: str) -> Callable[[str], Any]:
    """The ``__getattr__`` of the module ``name``."""
    otherwise = missing(name, {}, alternative)

    def getattribute(attribute: str) -> Any:
        if source is not None and not attribute.startswith("_"):
            module = importlib.import_module(source)
            if (found := getattr(module, attribute, None)) is not None:
                return found
        return otherwise(attribute)

    return getattribute
