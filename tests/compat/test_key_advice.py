"""What an error says to write in place of other libraries' keys and values, and its suggestions for mistyped ones."""

import ast
import functools
import random
import re
import string

import pytest
from train_app.settings import FLAGS, configure

import paramp
from paramp.compat.foreign_key_advice import NAMES, TOP, ByValue
from paramp.compat.key_advice import _filled
from paramp.config.files import load
from paramp.config.schema import COMPILE_OPTIONS, flatten
from paramp.precision.modes import PRESETS

DEFAULTS = flatten(load({}))
ONCE = "precision.scaling.init_scale"
TENSOR, PIPELINE, SHARD = "parallel.tensor.size", "parallel.pipeline.size", "parallel.data.shard"
MEANT = [
    (
        {"precision": "16-mixed"},
        "fp16=True amp=True use_amp=True half=1 grad_scaler={} precision=True precision.dtype='fp16' precision='half' "
        "precision='mixed_float16' dtype='fp16' dtype='torch.float16' mixed_precision='fp16' amp_backend='native' "
        "half_precision_backend='auto' amp_level='O1' "
        "fp16_opt_level='O1' fp16.enabled=True amp.enabled=True precision.enabled=True torch_autocast.enabled=True "
        "training.mixed_precision_param='float16' mixed_precision_param='float16'",
    ),
    (
        {"precision": "bf16-mixed"},
        "bf16=True bf16.enabled=True dtype='bfloat16' mixed_precision='bf16' training.dtype='bfloat16' "
        "training.mixed_precision_param='bfloat16' precision='mixed_bfloat16' dtype=torch",
    ),
    ({"precision": "32-true"}, "fp32=True mixed_precision='no' precision=False precision=None precision='full' "),
    ({"precision": "32-true"}, "dtype='float32' fp16_opt_level='O0' amp.opt_level='O0' amp_level='O0'"),
    ({"precision": "O2"}, "fp16_opt_level='O2' amp.opt_level='O2' amp_level='o2'"),
    ({"precision": "O3"}, "fp16_opt_level='O3' amp.opt_level='O3' amp_level='O3'"),
    ({"precision": "16-true"}, "fp16_full_eval=True fp16.fp16_master_weights_and_grads=True"),
    ({"precision": "bf16-true"}, "bf16_full_eval=True"),
    ({"precision": "fp8-mixed"}, "fp8=True fp8_format='hybrid' mixed_precision='fp8' fp8_recipe='delayed'"),
    ({"precision": "fp8-mixed"}, "float8.recipe_name='rowwise' float8.filter_fqns=['output']"),
    ({"precision": "transformer-engine"}, "transformer_impl='transformer_engine'"),
    ({"precision": "16-naive", "precision.grad_dtype": "float32"}, "accumulate_allreduce_grads_in_fp32=True"),
    ({"precision": "16-naive", "precision.grad_dtype": "float32"}, "grad_reduce_in_fp32=True"),
    ({"precision": "16-naive", "precision.grad_dtype": "float32"}, "data_types.grad_accum_dtype='fp32'"),
    ({"precision": "16-naive", "precision.optimizer_state": "bf16"}, "use_precision_aware_optimizer=True"),
    ({"precision.optimizer_state": "bf16"}, "exp_avg_dtype='bf16' exp_avg_sq_dtype='fp16'"),
    ({"precision.reduce_dtype.dp": "bfloat16"}, "communication_data_type='bf16' mixed_precision_reduce='bfloat16'"),
    ({"precision.reduce_dtype.dp": "float32"}, "training.mixed_precision_reduce='float32'"),
    ({"precision": "16-mixed", ONCE: 4096.0}, "init_scale=4096 initial_loss_scale=4096 fp16.initial_scale_power=12"),
    ({"precision": "16-mixed", ONCE: 1024.0}, "kwargs_handlers=[]"),
    # What is no number becomes the default of torch's GradScaler.
    ({"precision": "16-mixed", ONCE: 65536.0}, "init_scale='auto' initial_loss_scale='auto'"),
    ({"precision": "16-mixed", ONCE: 65536.0}, "fp16.initial_scale_power='auto'"),
    ({"precision.scaling.growth_interval": 2000, "precision": "16-mixed"}, "growth_interval='auto'"),
    ({"precision.scaling.growth_factor": 2.0, "precision": "16-mixed"}, "growth_factor='auto'"),
    ({"precision.scaling.backoff_factor": 0.5, "precision": "16-mixed"}, "backoff_factor='auto'"),
    ({ONCE: 128.0, "precision.scaling.min_scale": 128.0, "precision.scaling.max_scale": 128.0}, "loss_scale=128"),
    ({ONCE: 8.5, "precision.scaling.min_scale": 8.5, "precision.scaling.max_scale": 8.5}, "loss_scaling=8.5"),
    ({ONCE: 2.0**10, "precision.scaling.max_scale": 2.0**10}, "fp16.loss_scale='static'"),
    (
        {"precision.scaling.growth_interval": 500},
        "growth_interval=500 loss_scale_window=500 fp16.loss_scale_window=500",
    ),
    ({"precision.scaling.growth_factor": 4.0}, "growth_factor=4"),
    ({"precision.scaling.backoff_factor": 0.25}, "backoff_factor=0.25"),
    ({"precision.scaling.hysteresis": 3}, "hysteresis=3 fp16.hysteresis=3"),
    ({"precision.scaling.hysteresis": 2}, "fp16.consecutive_hysteresis=True"),
    ({"precision.scaling.min_scale": 2.0}, "min_scale=2.0 min_loss_scale=2.0 fp16.min_loss_scale=2"),
    ({"precision": "16-mixed", "precision.scaling.min_scale": 1.0}, "min_scale='auto' min_loss_scale='auto'"),
    ({"precision.scaling.max_scale": 2.0**20}, "max_scale=1048576"),
    ({"precision": "16-naive"}, "log_num_zeros_in_grad=True"),
    ({"clip_grad_norm": 0.5}, "gradient_clipping=0.5 grad_clip=0.5 clip_grad=0.5 clip_norm=0.5 max_norm=0.5"),
    ({"clip_grad_norm": 0.5}, "max_grad_norm=0.5 gradient_clip_val=0.5 training.max_norm=0.5"),
    ({"clip_grad_norm": 1.0}, "clip_grad_norm=True gradient_clipping='auto' gradient_clip_algorithm='norm'"),
    (
        {"gradient_accumulation": 8},
        "gradient_accumulation_steps=8 grad_accum=8 accumulation_steps=8 grad_accum_steps=8",
    ),
    ({"gradient_accumulation": 8}, "accumulate_grad_batches=8"),
    ({"gradient_accumulation": 4}, "gradient_accumulation_steps='auto'"),
    ({TENSOR: 4}, "tp=4 tensor=4 parallel.tp=4 tensor_parallel=4 tensor_parallel_size=4 tensor_model_parallel_size=4"),
    ({TENSOR: 4}, "tensor_parallel_degree=4 parallelism.tensor_parallel_degree=4 tp_size=4 tp_degree=4 autotp_size=4"),
    ({TENSOR: 2}, "tp=True tp=-1"),
    ({PIPELINE: 2}, "pp=True pp=-1"),
    ({"parallel.expert": 4}, "ep=4 expert_model_parallel_size=4 expert_parallel_degree=4"),
    ({"parallel.context.size": 2}, "cp=2 cp_size=2 context_parallel_size=2 context_parallel_degree=2"),
    ({TENSOR: 2, "parallel.sequence_parallel": True}, "sequence_parallel=True"),
    ({PIPELINE: 4}, "pp=4 pipeline=4 parallel.pp=4 pipeline_parallel=4 pipeline_parallel_size=4 pp_degree=4"),
    ({PIPELINE: 4}, "pipeline_model_parallel_size=4 pipeline_parallel_degree=4 parallelism.pipeline_parallel_degree=4"),
    ({PIPELINE: 2, "parallel.pipeline.microbatches": 6}, "microbatches=6 parallel.microbatches=6 num_microbatches=6"),
    ({PIPELINE: 2, "parallel.pipeline.microbatches": 4}, "micro_batch_size=8 device_train_microbatch_size=8"),
    ({PIPELINE: 2, "parallel.pipeline.microbatches": 4}, "pipeline_parallel_microbatch_size=1"),
    ({PIPELINE: 2, "parallel.pipeline.schedule": "gpipe"}, "schedule='gpipe' parallel.schedule='GPipe'"),
    ({PIPELINE: 2, "parallel.pipeline.schedule": "zbv"}, "pipeline_parallel_schedule='ZBVZeroBubble'"),
    ({PIPELINE: 2, "parallel.pipeline.stages_per_rank": 2}, "stages_per_rank=2 virtual_pipeline_model_parallel_size=2"),
    ({PIPELINE: 2, "parallel.pipeline.stages_per_rank": 2}, "num_layers_per_virtual_pipeline_stage=4"),
    ({PIPELINE: 2, "parallel.pipeline.stages_per_rank": 2}, "num_virtual_stages_per_pipeline_rank=2"),
    ({PIPELINE: 2, "parallel.pipeline.split": ["layers.4"]}, "split=['layers.4']"),
    ({PIPELINE: 2, "parallel.pipeline.split": ["layers.4"]}, "pipeline_parallel_split_points=['layers.4']"),
    ({"parallel.data": 4}, "dp=4 data=4 parallel.dp=4 data_parallel_size=4 ddp=4"),
    ({"parallel.zero": 1}, "zero=1 zero1=True zero=dict(stage=1) zero.level=1 parallel.zero=True zero_stage=1 stage=1"),
    ({"parallel.zero": 1}, "zero_optimization.stage=1 use_distributed_optimizer=True strategy='deepspeed_stage_1'"),
    ({SHARD: 4}, "zero=2 zero=3 zero=dict(stage=3) parallel.zero=2 parallel.zero=3 zero2=True zero3=True zero_stage=3"),
    ({SHARD: 4}, "zero_optimization.stage=2 zero_optimization.stage=3 deepspeed='ds.json' deepspeed_config={'x':1}"),
    ({SHARD: 4}, "fsdp=True fsdp='full_shard' fsdp2=True fsdp_plugin=True fsdp_config={'x':1} use_torch_fsdp2=True"),
    ({SHARD: 4}, "use_megatron_fsdp=True data_parallel_sharding_strategy='optim_grads_params' parallel.data='fsdp'"),
    ({SHARD: 4}, "strategy='fsdp' strategy='deepspeed_stage_3' distributed_type='FSDP' distributed_type='DEEPSPEED'"),
    ({SHARD: 4}, "fsdp_sharding_strategy='FULL_SHARD' parallelism_config={'fsdp':{'x':1}} deepspeed_plugin=True"),
    ({SHARD: 4}, "sharding_strategy='FULL_SHARD' fsdp_version=2"),
    ({SHARD: 4}, "zero=dict(model_config=1) data_parallel_shard_degree=-1 reshard_after_forward=True"),
    ({SHARD: 8}, "fsdp=8 shard=8 parallel.shard=8 dp_shard_size=8 mics_shard_size=8 data_parallel_shard_degree=8"),
    ({SHARD: 4, "parallel.data.replicate": 2}, "hsdp=True strategy='hybrid_shard' fsdp='hybrid_shard'"),
    ({SHARD: 4, "parallel.data.replicate": 2}, "zero_hpz_partition_size=4"),
    ({SHARD: 2, "parallel.data.replicate": 3}, "replicate=3 parallel.replicate=3 dp_replicate_size=3"),
    ({SHARD: 2, "parallel.data.replicate": 3}, "data_parallel_replicate_degree=3"),
    ({SHARD: 4, "parallel.data.reshard_after_forward": False}, "reshard_after_forward=False"),
    ({SHARD: 4, "parallel.data.reshard_after_forward": False}, "fsdp_reshard_after_forward='never'"),
    ({SHARD: 4, "parallel.data.prefetch": 1}, "stage3_prefetch_bucket_size=50000000"),
    ({TENSOR: 2, PIPELINE: 2}, "distributed_type='MEGATRON_LM'"),
    ({}, "strategy='ddp' parallel.data='ddp' distributed_type='MULTI_GPU'"),
    ({"activation_checkpointing": "full"}, "gradient_checkpointing=True activation_checkpointing=True"),
    ({"activation_checkpointing": "full"}, "recompute_granularity='full' fsdp_activation_checkpointing=True"),
    ({"activation_checkpointing": "full"}, "activation_checkpoint.mode='full' activation_checkpointing.mode='full'"),
    ({"activation_checkpointing": "full"}, "activation_checkpointing.partition_activations=True"),
    ({"activation_checkpointing": "selective"}, "recompute_granularity='selective' recompute_activations=True"),
    ({"activation_checkpointing": "selective"}, "activation_checkpoint.mode='selective' selective_ac_option='op'"),
    ({"activation_checkpointing": 2}, "activation_checkpoint.selective_ac_option='2'"),
    ({"activation_checkpointing": 2}, "activation_checkpointing.number_checkpoints=4"),
    ({"activation_checkpointing": 3}, "recompute_num_layers=3"),
    ({"compile": True}, "torch_compile=True compile.enable=True compile.enabled=True training.compile=True"),
    ({"compile": True}, "compile.components=['model']"),
    ({"compile.backend": "eager"}, "torch_compile_backend='eager' dynamo_backend='eager'"),
    ({"compile.mode": "max-autotune"}, "torch_compile_mode='max-autotune'"),
    ({"ema.decay": 0.99}, "ema_decay=0.99 decay=0.99 ema=0.99"),
    ({"ema.decay": 0.999}, "ema=True"),
    ({"reproducible.chunk": 1}, "deterministic=True full_determinism=True"),
    ({"hang_timeout": 1200.0}, "distributed_timeout_minutes=20"),
    ({"hang_timeout": 100.0}, "init_timeout_seconds=100 comm.init_timeout_seconds=100"),
]
"""Settings that differ from the defaults; and configurations with one foreign key or value that mean them."""
TEXTS = {
    "leave it out: that is the default": "fp16=False bf16=False tp=0 zero=0 zero=dict(stage=0) fsdp=False amp=None "
    "cp=1 ep=1 ddp=True gradient_checkpointing=False strategy='auto' distributed_type='NO' transformer_impl='local' "
    "compile.enable=False "
    "activation_checkpoint.mode='none' activation_checkpointing.mode='none' data_parallel_shard_degree=1 "
    "data_parallel_replicate_degree=1 disable_loss_parallel=True enable_async_tensor_parallel=True",
    "leave it out: it is always so": "overlap_comm=True contiguous_gradients=True prescale_gradients=True "
    "gradient_predivide_factor=2 overlap_grad_reduce=True overlap_param_gather=True ddp_find_unused_parameters=True "
    "bf16.immediate_grad_update=True fp16.auto_cast=True",
    "leave it out: the loss scale of 16-mixed is dynamic": "loss_scale='dynamic' loss_scale=0 "
    "precision.loss_scale=0 fp16.loss_scale=0",
    "leave it out: gradients are reduced from flat": "reduce_bucket_size=1 allgather_bucket_size=1 ddp_bucket_size=1",
    "pass a torch.optim optimizer to paramp.initialize": "optimizer={'type':'Adam'} optim='adamw' weight_decay=0.1",
    "scheduler to paramp.initialize": "scheduler={'type':1} lr_scheduler={} lr_scheduler_type='cosine' warmup_steps=1",
    "that of your DataLoader": "train_batch_size=8 train_micro_batch_size_per_gpu=8 per_device_train_batch_size=8 "
    "per_device_eval_batch_size=8 global_batch_size=8 local_batch_size=8 training.local_batch_size=8 batch_size=8",
    "build the model under with torch.device": "zero3_init_flag=True",
    "no offloading to the CPU": "offload_optimizer={'device':'cpu'} offload_param=True fsdp_offload_params=True "
    "enable_cpu_offload=True activation_checkpointing.cpu_checkpointing=True",
    "save with paramp.Checkpoints": "save_steps=5 save_total_limit=2 save_interval=5 save_folder='x' checkpoint={} "
    "enable_checkpointing=True",
    "the launcher decides it": "num_processes=4 num_machines=2 num_nodes=2 devices=4",
    "your script has it": "lr=0.1 learning_rate=0.1 epochs=3 num_train_epochs=3 max_epochs=3 max_steps=3 train_iters=3 "
    "max_duration='1ep' seq_len=8 training.seq_len=8 steps_per_print=1 steps=3",
    "call engine.load": "resume_from_checkpoint='x'",
    "engine.recording()": "wall_clock_breakdown=True",
    "paramp.launch_from_torch(config, ": "distributed_backend='nccl' accelerator='gpu'",
    "allow_tf32": "tf32=True",
    "convert_sync_batchnorm": "sync_batchnorm=True",
}
"""The same for what has no key here: a part of the text that says what to do."""
CASES = [(meant, case) for meant, cases in MEANT for case in cases.split()]
TEXT_CASES = [(text, case) for text, cases in TEXTS.items() for case in re.findall(r"\S+", cases)]


def tree_of(case):
    """``a.b=value`` as a configuration."""
    path, _, text = case.partition("=")
    value = object if text == "torch" else eval(text)  # the table's own literals
    return functools.reduce(lambda inner, key: {key: inner}, reversed(path.split(".")), value)


def message_of(tree):
    with pytest.raises(paramp.ConfigError) as caught:
        load(tree)
    return str(caught.value)


def written_in(message):
    """The configuration that an error says to write; None if it says none."""
    found = re.search(r" here, write (\{.*?\})(?:; |$)", message)
    return found and ast.literal_eval(found[1])


def test_each_foreign_key_or_value_gets_a_configuration_that_is_accepted_and_means_the_same():
    assert len(CASES) >= 120
    for meant, case in CASES:
        message = message_of(tree_of(case))
        path = case.partition("=")[0]  # of a key in a table that has none of ours, the error is the table's
        key = path if path.startswith("parallel.") else path.split(".")[0]
        assert message.startswith(f"{key}: got "), message
        settings = flatten(load(written_in(message)))
        assert meant.items() <= settings.items(), (case, message)
        changed = {key.split(".")[0] for key, value in settings.items() if DEFAULTS.get(key) != value}
        assert changed <= {key.split(".")[0] for key in meant}, (case, message)


def test_errors_in_our_own_tables_are_their_own():
    for tree, expected in (
        ({"ema": {"decay": 1.5}}, "ema.decay: got 1.5, expected a number of 0 or more, below 1"),
        ({"ema": {"decy": 0.9}}, "ema.decy: no such key, expected one of decay (did you mean 'decay'?)"),
    ):
        assert message_of(tree) == expected
    written = written_in(message_of({"fp16": {"initial_scale_power": 2000}}))
    assert written == {"precision": {"mode": "16-mixed", "init_scale": 65536}}  # 2 ** 2000 is no number of fp64


def test_what_has_no_key_here_gets_a_text():
    for text, case in TEXT_CASES:
        message = message_of(tree_of(case))
        assert written_in(message) is None, message
        assert message.partition("; here, ")[2].find(text) >= 0, (case, message)


def test_every_row_of_the_table_has_a_case():
    seen = {case.partition("=")[0] for _, case in [*CASES, *TEXT_CASES]}
    seen |= {path.rpartition(".")[2] for path in seen} | {"zero.stage", "zero_optimization"}
    assert {*TOP, *NAMES} - seen == set()


def configurations_of(row):
    if isinstance(row, ByValue):
        return [one for part in row.values() for one in configurations_of(part)]
    example = row[0] if isinstance(row, tuple) else row
    return [] if isinstance(example, str) else [_filled(example, ...)]


def test_every_configuration_of_the_table_is_accepted():
    rows = [*TOP.values(), *(row for _, row in NAMES.values())]
    examples = [one for row in rows for one in configurations_of(row)]
    assert len(examples) > 120
    for example in examples:
        load(example)


def test_a_whole_table_of_another_library_becomes_one_configuration():
    fp16 = {"enabled": True, "loss_scale": 0, "initial_scale_power": 12, "loss_scale_window": 500, "min_loss_scale": 1}
    options = {"mode": "16-mixed", "init_scale": 4096.0, "growth_interval": 500, "min_scale": 1}
    assert written_in(message_of({"fp16": fp16})) == {"precision": options}
    titan = {"data_parallel_shard_degree": 2, "tensor_parallel_degree": 2, "pipeline_parallel_degree": 4}
    parallel = {"data": {"shard": 2}, "tensor": 2, "pipeline": 4}
    assert written_in(message_of({"parallelism": titan})) == {"parallel": parallel}
    message = message_of({"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}})
    assert "as in DeepSpeed; here, write {'parallel': {'data': {'shard': 4}}}" in message
    assert "zero_optimization.offload_param: there is no offloading" in message


def test_colossalais_own_table_keeps_its_errors():
    for options in ({"mode": "naive", "loss_scale": 0}, {"mode": "torch", "hysteresis": 2}):
        assert "no such option of AMP_TYPE" in message_of({"fp16": options})


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        ("--fp16", "--precision 16-mixed"),
        ("--tensor-model-parallel-size 4", "--tp 4"),
        ("--max-grad-norm=0.5", "--clip-grad-norm 0.5"),
        ("--zero-stage 3", "--fsdp 4"),
        ("--initial-loss-scale 4096", "--precision 16-mixed --init-scale 4096"),
        ("--loss-scale-window 500", "--precision 16-mixed --set precision.growth_interval=500"),
        ("--torch-compile", "--compile"),
        ("--gradient-accumulation 4", "--set gradient_accumulation=4"),
        ("--weight-decay 0.2", "--set train.weight_decay=0.2"),
        ("--num-layers 3", "--set model.num_layers=3"),
    ],
)
def test_foreign_flags_of_the_train_script_get_its_own(arguments, meant):
    with pytest.raises(paramp.ConfigError, match=rf"write {re.escape(meant)}(; |$)"):
        configure(arguments.split())
    configure(meant.split())


def test_no_key_is_suggested_for_another_type_or_from_afar():
    for value in (True, None, [], "precise"):
        assert "did you mean" not in message_of({"precision": {"mode": "16-mixed", "init_scale": value}})
        assert "did you mean" not in message_of({"parallel": {"pipeline": {"schedule": value}}})
    for key in ("attention", "user", "usr", "loader", "x"):
        assert "did you mean" not in message_of({key: 1})
    with pytest.raises(paramp.ConfigError) as caught:
        paramp.Precision.parse(True)
    assert "did you mean" not in str(caught.value)


def places():
    """Each table of a configuration: what is around it, and its keys with a value that is accepted."""
    top = {"precision": "16-mixed", "parallel": {}, "clip_grad_norm": 1.0, "gradient_accumulation": 2, "compile": True}
    top |= {"activation_checkpointing": "full", "masters": "full", "grad_dtype": "fp32", "reduce_dtype": "fp32"}
    top |= {"rounding": "nearest", "optimizer_state": "bf16", "ema": {}, "reproducible": True, "seed": 3}
    top |= {"max_skipped_in_a_row": 3, "trace_overflow": True, "check_replicas_every": 3, "repair_replicas": False}
    top |= {"hang_timeout": 3.0, "hang_end_after": 3, "emulate_fp16": False}
    assert top.keys() | {"user"} == {*paramp.Config.__dataclass_fields__}
    yield "", top
    yield "parallel", {"tensor": 2, "pipeline": 2, "data": 2, "zero": 1, "sequence_parallel": False}
    yield "parallel.tensor", {"size": 2, "mode": "1d"}
    stages = {"size": 2, "schedule": "1f1b", "microbatches": 4, "stages_per_rank": 1, "split": None}
    yield "parallel.pipeline", stages
    yield "parallel.data", {"replicate": 2, "shard": 2, "reshard_after_forward": False, "prefetch": 1}
    yield "ema", {"decay": 0.9}
    yield "reproducible", {"chunk": 2, "slices": 4}
    yield "compile", dict(zip(COMPILE_OPTIONS, ("eager", None, None, False, None), strict=True))
    scaling = {"init_scale": 2.0, "growth_factor": 3.0, "backoff_factor": 0.25, "growth_interval": 3, "hysteresis": 2}
    scaling |= {"min_scale": 1.0, "max_scale": 8.0, "enabled": True, "masters": "full", "grad_dtype": "fp32"}
    yield "precision", scaling | {"reduce_dtype": "fp32", "rounding": "nearest", "optimizer_state": "bf16"}


def mistyped(word, draw):
    """``word`` with one or two letters left out, added, replaced or swapped."""
    for _ in range(draw.choice((1, 1, 2))):
        at, letter = draw.randrange(len(word)), draw.choice(string.ascii_lowercase + "_-")
        word = draw.choice(
            (
                word[:at] + word[at + 1 :],
                word[:at] + letter + word[at:],
                word[:at] + letter + word[at + 1 :],
                word[:at] + word[at + 1 : at + 2] + word[at : at + 1] + word[at + 2 :],
            )
        )
    return word


def test_two_thousand_typing_mistakes_get_no_suggestion_that_is_not_a_key_there():
    draw, found = random.Random(20261125), []
    tables = [(place, keys, key) for place, keys in places() for key in keys]
    for place, keys, key in tables:
        load(around(place, {key: keys[key]} | ({"precision": "16-naive"} if key == "masters" and not place else {})))
    while len(found) < 2000:
        place, keys, key = draw.choice(tables)
        word = mistyped(key, draw)
        if word in keys or not word or word.isupper() or word in ("fp16", "user"):
            continue
        message = message_of(around(place, {word: keys[key]}))
        suggested = re.search(r"did you mean '(.*?)'", message)
        if (written := written_in(message)) is not None:
            load(written)
        assert suggested is None or suggested[1] in {*keys, "fp16"}, message
        found.append(suggested is not None and suggested[1] == key)
    assert sum(found) > 0.9 * len(found)


def around(place, table):
    """A configuration with ``table`` at the dotted path ``place``."""
    if place == "precision":
        table = {"mode": "16-naive", **table}
    return functools.reduce(lambda inner, key: {key: inner}, reversed(place.split(".")), table) if place else table


def test_mistyped_flags_get_flags():
    draw, known = random.Random(3), {flag.name for flag in FLAGS} | {"--config", "--set"}
    for _ in range(60):
        word = "--" + mistyped(draw.choice([flag.name for flag in FLAGS])[2:], draw)
        if any(name.startswith(word) for name in known):
            continue
        with pytest.raises(paramp.ConfigError) as caught:
            configure([word, "1"])
        suggested = re.search(r"did you mean '(.*?)'", str(caught.value))
        assert suggested is None or suggested[1] in {*known, *PRESETS}, caught.value
