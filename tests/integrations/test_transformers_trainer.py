"""Hugging Face's Trainer with paramp's scaler, clipping and skipping, against plain torch."""

import functools
import importlib.util
import os
import re
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from families import cases, family
from pages import code_of, difference_of
from pool import on_ranks, shared_folder
from reference import whole
from small_engines import everywhere
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from trainer_runs import INF, MAX_NORM, SCALE, STEPS, UNITS, check_weights, quiet
from trainer_runs import ROUNDING as ROUNDINGS

import paramp

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

LR, OVERFLOWS, BATCH = 0.5, 3, 8
VOCABULARY, LENGTH = 32, 8
ROUNDING = ROUNDINGS | {"fp32": 4e-6}


@functools.cache
def samples():
    tokens = torch.randint(VOCABULARY, (STEPS * BATCH, LENGTH), generator=torch.Generator().manual_seed(5))
    return [{"input_ids": row, "labels": row} for row in tokens]


def build():
    from transformers.models.llama import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(4)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    options = {"vocab_size": VOCABULARY, "num_key_value_heads": 4, "max_position_embeddings": LENGTH}
    return LlamaForCausalLM(LlamaConfig(**shape, **options))


def loss_of(output, tokens):
    return F.cross_entropy(output.logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def batches():
    for step in range(STEPS):
        yield torch.stack([row["input_ids"] for row in samples()[step * BATCH : (step + 1) * BATCH]])


@functools.cache
def reference():
    """Plain torch in fp32 and one process, with the overflowing step left out: losses, norms, weights, rates."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / STEPS)
    losses, norms, rates = [], [], []
    for step, tokens in enumerate(batches()):
        optimizer.zero_grad()
        loss = loss_of(model(tokens), tokens)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        losses.append(loss.item())
        norms.append(INF if step == OVERFLOWS else norm.item())
        rates.append(schedule.get_last_lr()[0])
        if step != OVERFLOWS:
            optimizer.step()
            schedule.step()
    return losses, norms, {name: value.detach() for name, value in model.named_parameters()}, rates


def hosts():
    with quiet():
        from transformers import Trainer

        from paramp.integrations.transformers import ParampTrainer
    return Trainer, ParampTrainer


def planting(host, rank):
    """``host`` with an overflow in the gradients of rank 1, and another scale to begin with."""
    from accelerate.utils import GradScalerKwargs

    class Planting(host):
        def _build_accelerator_args(self, **kwargs):
            arguments = super()._build_accelerator_args(**kwargs)
            arguments["kwargs_handlers"] += [GradScalerKwargs(init_scale=SCALE)]
            return arguments

        def training_step(self, model, *args):
            loss = super().training_step(model, *args)
            if self.state.global_step == OVERFLOWS and rank == 1 and self.accelerator.sync_gradients:
                gradient = next(model.parameters()).grad
                getattr(gradient, "_local_tensor", gradient).fill_(INF)
            return loss

    return Planting


def arguments_of(folder, size=1, precision="fp16", accumulated=1, **options):
    from transformers import TrainingArguments

    with quiet():
        return TrainingArguments(str(folder), **defaults(size, precision, accumulated) | options)


def defaults(size, precision="fp16", accumulated=1):
    options = {"use_cpu": True, "fp16": precision == "fp16", "bf16": precision == "bf16", "max_steps": STEPS}
    options |= {"max_grad_norm": MAX_NORM, "logging_steps": 1, "optim": "sgd", "learning_rate": LR, "report_to": []}
    options |= {"per_device_train_batch_size": BATCH // size // accumulated, "save_strategy": "no"}
    options |= {"gradient_accumulation_steps": accumulated, "train_sampling_strategy": "sequential"}
    return options | {"disable_tqdm": True, "ddp_find_unused_parameters": False}


LAYOUTS = {
    "ddp": lambda size: {},
    "fsdp": lambda size: {},
    "loaded-fsdp": lambda size: {"fsdp_size": size},
    "tp": lambda size: {"tp_size": size},
    "fsdp-tp": lambda size: {"fsdp_size": size // 2, "tp_size": 2},
}
"""``DistributedConfig``'s sizes, with which transformers shards the model that it loads; ``fsdp`` is fsdp=True."""


def trainer_of(host, world, folder, layout, precision="fp16", **options):
    """A trainer of the model in ``folder``, in ``layout``."""
    from transformers.distributed import DistributedConfig
    from transformers.models.llama import LlamaForCausalLM

    sizes = LAYOUTS[layout](world.size)
    if layout == "fsdp":
        options["fsdp"] = True
    data = world.size // sizes.get("tp_size", 1)
    arguments = arguments_of(folder / layout, data, precision, **options)
    model = build()
    with quiet():
        if sizes:
            if world.rank == 0:
                model.save_pretrained(folder / "model")
            dist.barrier()
            model = LlamaForCausalLM.from_pretrained(folder / "model", distributed_config=DistributedConfig(**sizes))
        return host(model, arguments, train_dataset=samples(), eval_dataset=samples()[:BATCH])


def train(trainer, **options):
    """What was logged of each step."""
    with quiet():
        trainer.train(**options)
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def forget():
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)


def log_of(logs, name):
    return [entry[name] for entry in logs]


def check_training(trainer, logs, precision="fp16"):
    """Losses, norms, rates, weights and the scale of ``logs`` are those of ``reference``."""
    losses, norms, weights, rates = reference()
    close = functools.partial(pytest.approx, rel=UNITS * ROUNDING[precision])
    assert log_of(logs, "loss") == close(losses)
    assert log_of(logs, "grad_norm") == close(norms)
    # The rate that is logged is that of the step, before the schedule advances, which it does not when one is skipped.
    assert log_of(logs, "learning_rate") == pytest.approx(rates)
    assert log_of(logs, "skipped_steps") == [int(step >= OVERFLOWS) for step in range(STEPS)]
    scales = [SCALE / 2 if step >= OVERFLOWS else SCALE for step in range(STEPS)]
    assert log_of(logs, "loss_scale") == (scales if precision == "fp16" else [1.0] * STEPS)
    found = dict(trainer.accelerator.unwrap_model(trainer.model_wrapped).named_parameters())
    check_weights(found, weights, dict(build().named_parameters()), 2 * ROUNDING[precision])


def check_layout(world, layout, precision="fp16", accumulated=1):
    _, host = hosts()
    trainer = trainer_of(planting(host, world.rank), world, shared_folder(), layout, precision, accumulated=accumulated)
    try:
        check_training(trainer, train(trainer), precision)
        is_sharded = all(isinstance(one, DTensor) for one in trainer.model_wrapped.parameters())
        assert is_sharded or layout != "fsdp"  # else it is DDP
    finally:
        forget()


@on_ranks(2)
def test_the_trainer_trains_as_plain_torch(world):
    """Data parallel and tensor parallel, in one body, because importing transformers takes seconds."""
    check_layout(world, "ddp")
    check_layout(world, "tp")
    scaled_clip(world, "tp")
    stock_sharding(world)


TWO = [layout for layout in LAYOUTS if layout != "fsdp-tp"]
EVERYTHING = [
    *((2, layout, precision, 1) for layout in TWO for precision in ("fp16", "bf16", "fp32")),
    *((2, layout, "fp16", 2) for layout in TWO),
    *((4, layout, precision, 1) for layout in LAYOUTS for precision in ("fp16", "bf16")),
]
PART = [(4, "fsdp-tp", "fp16", 1)]


@family
@pytest.mark.parametrize(("size", "layout", "precision", "accumulated"), cases("trainer", EVERYTHING, PART, 2))
@on_ranks(lambda size, **_: size)
def test_layouts_and_precisions(world, size, layout, precision, accumulated):
    check_layout(world, layout, precision, accumulated)


def scaled_clip(world, layout):
    """transformers #48208, as mended in 5.23: its clip for several meshes takes the gradients before unscaling."""
    stock, host = hosts()
    norm = reference()[1][0]

    class StockClip(planting(host, world.rank)):
        _clip_grad_norm = stock._clip_grad_norm
        _get_grad_norm = stock._get_grad_norm

    folder = shared_folder()
    for kind, expected in ((StockClip, SCALE * norm), (planting(host, world.rank), norm)):
        trainer = trainer_of(kind, world, folder, layout, max_steps=1)
        assert train(trainer)[0]["grad_norm"] == pytest.approx(expected, rel=UNITS * ROUNDING["fp16"])
        first = build().lm_head.weight.detach()
        moved = (whole(trainer.model.lm_head.weight.detach()) - first).norm()
        assert (moved < 1e-3 * LR * MAX_NORM) == (kind is StockClip)
        forget()


def stock_sharding(world):
    """On CPUs transformers' own trainer trains with DDP where FSDP2 is asked for, and refuses tensor parallelism."""
    stock, _ = hosts()
    trainer = trainer_of(stock, world, shared_folder(), "fsdp", "fp32", max_steps=1)
    train(trainer)
    assert type(trainer.model_wrapped) is nn.parallel.DistributedDataParallel
    forget()
    with pytest.raises(ValueError, match=r"ParallelismConfig is only compatible .*MULTI_CPU"):
        trainer_of(stock, world, shared_folder(), "tp", "fp32")
    forget()


# ------------------------------------------------------------------------------------- checkpoints and evaluation


@family
@pytest.mark.parametrize("layout", cases("trainer resumes", ["ddp", "fsdp"], ["ddp"], 1))
@on_ranks(2)
def test_a_resumed_run_has_the_scale_and_the_count_of_skipped_steps(world, layout):
    """A run that is resumed after its overflow goes on as the whole one does, bit for bit."""
    _, host = hosts()
    folder = shared_folder()
    checkpoint = folder / layout / f"checkpoint-{OVERFLOWS + 1}"
    # With a state, which torch cannot load for FSDP2 where an optimizer has none, as SGD without momentum.
    options = {"save_strategy": "steps", "save_steps": OVERFLOWS + 1, "optim": "adamw_torch", "learning_rate": 0.01}
    start = functools.partial(trainer_of, planting(host, world.rank), world, folder, layout, **options)
    trainer = start()
    logs = train(trainer)
    ended = trainer.accelerator.scaler.state_dict()
    assert (ended["scale"], ended["_growth_tracker"]) == (SCALE / 2, STEPS - OVERFLOWS - 1)
    assert (checkpoint / "skipped_steps.txt").read_text() == "1\n"
    assert torch.load(checkpoint / "scaler.pt").keys() >= torch.amp.GradScaler("cpu").state_dict().keys()
    forget()
    resumed = start()
    assert train(resumed, resume_from_checkpoint=str(checkpoint)) == logs
    assert resumed.skipped_steps == 1
    assert resumed.accelerator.scaler.state_dict() == ended
    pairs = zip(trainer.model_wrapped.parameters(), resumed.model_wrapped.parameters(), strict=True)
    assert all(torch.equal(whole(one), whole(other)) for one, other in pairs)
    forget()
    bf16 = start(precision="bf16")  # fp16's checkpoint, gone on with in bf16
    train(bf16, resume_from_checkpoint=str(checkpoint))
    assert bf16.skipped_steps == 1
    forget()


# ------------------------------------------------------------------------------------------------------- one process


@pytest.fixture
def alone():
    """Without a launcher's variables, and with a state of Accelerate's that is forgotten afterwards."""
    names = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    with mock.patch.dict(os.environ, names, clear=True):
        yield
        forget()


def one_process(host, folder, precision="fp16", model=None, **options):
    arguments = arguments_of(folder, 1, precision, **options)
    with quiet():
        data = {"train_dataset": samples(), "eval_dataset": samples()[:BATCH]}
        return planting(host, 1)(model or build(), arguments, **data)


def test_stock_trainer_ignores_fp16_on_a_cpu_and_takes_infinite_gradients(tmp_path, alone):
    stock, host = hosts()
    for precision in ("fp16", "bf16"):
        trainer = one_process(stock, tmp_path, precision)
        logs = train(trainer)
        assert trainer.accelerator.scaler is None
        assert logs[-1]["loss"] != pytest.approx(reference()[0][-1], rel=0.01)
        if precision == "fp16":  # trained in fp32
            exact = pytest.approx(reference()[0][:OVERFLOWS], rel=UNITS * ROUNDING["fp32"])
            assert log_of(logs, "loss")[:OVERFLOWS] == exact
        assert not all(parameter.isfinite().all() for parameter in trainer.model.parameters())
        forget()
    trainer, seen = one_process(host, tmp_path), set()
    trainer.model.lm_head.register_forward_hook(lambda layer, inputs, output: seen.add(output.dtype))
    check_training(trainer, train(trainer))
    assert seen == {torch.float16}


def test_the_schedule_does_not_advance_on_a_skipped_step(tmp_path, alone):
    """Accelerate takes the call of a fused optimizer, the default here, for a step. The reference counts by hand."""
    stock, host = hosts()
    trainer = one_process(stock, tmp_path, optim="adamw_torch_fused")
    assert type(trainer.args).optim == "adamw_torch_fused"  # the class has the default
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    trainer.accelerator.native_amp = True
    train(trainer)
    assert trainer.lr_scheduler.last_epoch == STEPS
    forget()
    trainer = one_process(host, tmp_path, optim="adamw_torch_fused")
    logs = train(trainer)
    assert trainer.lr_scheduler.last_epoch == STEPS - 1
    assert [entry["learning_rate"] for entry in logs] == pytest.approx(reference()[3])
    assert {int(state["step"]) for state in trainer.optimizer.state.values()} == {STEPS - 1}


def test_evaluation_and_prediction_are_as_in_plain_torch(tmp_path, alone):
    _, host = hosts()
    model = build()
    tokens = next(batches())
    with torch.no_grad():
        logits = model(tokens).logits
    trainer = one_process(host, tmp_path, model=model, per_device_eval_batch_size=BATCH)
    with quiet():
        metrics = trainer.evaluate()
        prediction = trainer.predict(samples()[:BATCH])
    assert metrics["eval_loss"] == pytest.approx(loss_of(mock.Mock(logits=logits), tokens).item(), rel=1e-3)
    assert torch.from_numpy(prediction.predictions).sub(logits).norm() < 1e-2 * logits.norm()
    assert prediction.predictions.dtype == "float32"
    check_training(trainer, train(trainer))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_fp16_weights_are_refused_for_training(tmp_path, alone):
    _, host = hosts()
    with pytest.raises(paramp.ConfigError, match=r"got fp16 weights .*embed_tokens.* load the model with dtype="):
        train(one_process(host, tmp_path, model=build().half()))
    forget()
    trainer = one_process(host, tmp_path, fp16_full_eval=True, per_device_eval_batch_size=BATCH)
    with quiet():
        assert trainer.evaluate()["eval_loss"] == pytest.approx(reference()[0][0], rel=0.01)
    with pytest.raises(paramp.ConfigError, match=r"evaluate\(\) with fp16_full_eval=True"):
        train(trainer)


ADAPTORS = [f"{one}_layerwise" for one in ("galore_adamw", "galore_adamw_8bit", "galore_adafactor", "apollo_adamw")]
EARLY = ["lomo", "adalomo", *ADAPTORS]
"""Optimizers that step during the backward."""


def test_all_optimizers_that_step_during_the_backward_are_known():
    from transformers.training_args import OptimizerNames

    assert {one.value for one in OptimizerNames if re.search("lomo|layerwise", one.value)} == set(EARLY)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        *(("optim", name, f"optim='{name}', which steps during the backward") for name in EARLY),
        ("deepspeed", {"zero_optimization": {"stage": 2}}, "deepspeed, which scales, clips and steps by itself"),
        ("fsdp_plugin_args", {"fsdp_version": 1}, "version 1.*version"),
        ("n_gpu", 2, "nn.DataParallel on 2 GPUs.*torchrun"),
        ("device", torch.device("meta"), "device: got 'meta'"),
        ("parallelism_config", mock.Mock(cp_size=2), r"cp_size over 1.*accelerate\.adopt"),
        ("distributed_config", mock.Mock(pp_size=2), r"DistributedConfig\(pp_size"),
    ],
)
def test_what_cannot_work_is_refused_by_name(tmp_path, alone, name, value, message):
    _, host = hosts()
    arguments, model = arguments_of(tmp_path), build()
    if name == "distributed_config":
        model.config.distributed_config = value
    else:
        getattr(arguments, name)  # there is such an argument
        vars(arguments).pop(name, None)
    refuses = pytest.raises(paramp.ConfigError, match=message)
    with mock.patch.object(type(arguments), name, value, create=True), quiet(), refuses:
        host(model, arguments, train_dataset=samples())


def test_the_mixin_needs_a_trainer_after_it():
    from paramp.integrations.transformers import ParampTrainerMixin

    with pytest.raises(paramp.ConfigError, match="Alone: its bases after ParampTrainerMixin lack create_accelerator"):
        type("Alone", (ParampTrainerMixin,), {})


# --------------------------------------------------------------------------------------------- TRL and the migration


def test_the_migration_is_a_diff_of_at_most_10_lines_that_runs(tmp_path, alone, monkeypatch):
    script = code_of("from-transformers.md", "TrainingArguments")
    changed = [line for line in difference_of("from-transformers.md") if line[:1] in "+-"]
    assert all(f"{line[1:]}\n" in script for line in changed if line[0] == "+")
    before = script.replace("from transformers import TrainingArguments", changed[0][1:])
    before = before.replace(changed[2][1:], "").replace(changed[4][1:], changed[3][1:])
    monkeypatch.chdir(tmp_path)
    with quiet():
        names = {}
        exec(script, names)
        assert names["trainer"].accelerator.loss_scale == 65536.0
        forget()
        with pytest.raises(AttributeError, match="loss_scale"):  # the script's last line is of the trainer after it
            exec(before, names)
    assert names["trainer"].state.global_step == 4


@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="trl is not installed (pip install trl)")
@on_ranks(2)
def test_the_mixin_in_trls_trainer(world):
    """An overflow on one rank is skipped by both, and a resumed run ends as the whole one."""
    with quiet():
        from datasets import Dataset
        from tokenizers import Tokenizer, models
        from transformers import PreTrainedTokenizerFast
        from trl import SFTConfig, SFTTrainer

        from paramp.integrations.transformers import ParampTrainerMixin

    folder, host = shared_folder(), planting(type("Tuner", (ParampTrainerMixin, SFTTrainer), {}), world.rank)
    words = Tokenizer(models.WordLevel({str(word): word for word in range(VOCABULARY)}, unk_token="0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="1")
    rows = Dataset.from_list([{"input_ids": row["input_ids"].tolist()} for row in samples()])
    options = defaults(2) | {"save_strategy": "steps", "save_steps": OVERFLOWS + 1, "learning_rate": 0.01}
    options |= {"optim": "adamw_torch_fused", "max_length": LENGTH, "gradient_checkpointing": False}
    found = []
    for resumed in (None, str(folder / f"checkpoint-{OVERFLOWS + 1}")):
        with mock.patch.dict(os.environ, {"HF_HUB_OFFLINE": "1"}), quiet():
            arguments = SFTConfig(str(folder), **options)
            trainer = host(build(), arguments, train_dataset=rows, processing_class=tokenizer)
        logs = train(trainer, resume_from_checkpoint=resumed)
        forget()
        assert log_of(logs, "skipped_steps") == [int(step >= OVERFLOWS) for step in range(STEPS)]
        assert logs[-1]["loss_scale"] == trainer.accelerator.loss_scale == SCALE / 2
        assert "mean_token_accuracy" in logs[-1]
        assert trainer.lr_scheduler.last_epoch == STEPS - 1
        found += everywhere(torch.cat([value.detach().flatten() for value in trainer.model.parameters()]))
    assert len(found) == 4
    assert all(torch.equal(one, found[0]) for one in found)
