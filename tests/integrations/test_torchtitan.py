"""torchtitan's own Trainer in fp16, on CPUs (``tests/support/titan.py``), against the stock Trainer in fp32."""

import importlib
import math
import re
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import get_args, get_type_hints
from unittest import mock

import pytest
import titan
import torch
from families import cases, family
from pages import difference_of, run_code
from pool import on_ranks, run_on_ranks, shared_folder
from torch.distributed.tensor import Shard, distribute_tensor
from trainer_runs import spoil

import paramp
from paramp.base.errors import ConfigError
from paramp.integrations.torchtitan import WORKS_WITH, ParampTrainer, adopt


@pytest.fixture
def torchtitan():
    titan.needs_torchtitan()


def adopted(precision="float16", scaling=None, **options):
    scaling = scaling or paramp.LossScaling(init_scale=2.0**12)
    return adopt(titan.tiny_config(**options), precision=precision, loss_scaling=scaling)


def losses_and_norms(logged):
    return [(metrics["loss_metrics/global_avg_loss"], metrics["grad_norm"]) for metrics in logged]


def weights(trainer):
    named = (pair for part in trainer.model_parts for pair in part.named_parameters())
    return {name: parameter.detach().to_local().clone() for name, parameter in named}


def plant(trainer, here):
    """Let the next backward overflow: one element of one gradient, on this rank only if ``here``."""
    forward_backward = trainer.forward_backward_step

    def planted(**kwargs):
        loss = forward_backward(**kwargs)
        if here:
            spoil(next(trainer.model_parts[0].parameters()).grad)
        trainer.forward_backward_step = forward_backward
        return loss

    trainer.forward_backward_step = planted


EVERYTHING = [(layout, chunked) for layout in titan.LAYOUTS for chunked in (True, False)]
PART = [("dp_shard", True)]


@family
@pytest.mark.parametrize(("layout", "chunked"), cases("torchtitan", EVERYTHING, PART, 2))
@pytest.mark.usefixtures("torchtitan")
@on_ranks(lambda layout, **_: titan.ranks_of(layout))
def test_fp16_trains_to_the_losses_and_norms_of_stock_fp32(world, layout, chunked):
    options = {"chunked": chunked, **titan.LAYOUTS[layout]}
    stock = titan.tiny_config(chunked=chunked, **titan.WHOLE.get(layout, titan.LAYOUTS[layout]))
    stock.training.mixed_precision_param = "float32"
    expected = losses_and_norms(titan.train(titan.fill(titan.build(stock)), 3))
    # torch's own norm, in fp32 on a CPU, is off by 2e-4
    for precision, tolerance in (("float32", 5e-4), ("float16", 5e-3)):
        trainer = titan.fill(titan.build(adopted(precision, **options)))
        logged = titan.train(trainer, 3)
        found = [(max(loss, -1.0), norm) for loss, norm in losses_and_norms(logged)]  # -1 on each rank of a first stage
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
        assert logged[-1]["loss_scale"] == (1.0 if precision == "float32" else 2.0**12)
        assert logged[-1]["skipped_steps"] == 0
        assert trainer.model_parts[0]._get_fsdp_state()._mp_policy.param_dtype is getattr(torch, precision)
        trainer.close()


@pytest.mark.usefixtures("torchtitan")
@on_ranks(2)
def test_a_context_is_made_over_its_meshes(world):
    titan.prepare("cpu")
    from torchtitan.distributed.parallel_dims import ParallelDims

    old, new = "partial_dtensor", "full_dtensor"
    meshes = [(old, ["fsdp"], 2), (old, ["tp"], 1), (new, ["dp_shard"], 2), (new, ["dp_shard", "tp"], 1)]
    for backend, axes, shard in meshes:
        sizes = {"dp_shard": shard, "tp": 2 // shard, **dict.fromkeys(("dp_replicate", "cp", "pp", "ep"), 1)}
        mesh = ParallelDims(**sizes, world_size=2, spmd_backend=backend).get_mesh(axes)
        with paramp.ParallelContext.from_mesh(mesh) as context:
            assert (context.mesh.mesh_dim_names, context.dp.size, context.tp.size) == (tuple(axes), shard, 2 // shard)
            parameter = torch.nn.Parameter(distribute_tensor(torch.zeros(4), mesh, [Shard(0)] * mesh.ndim))
            parameter.grad = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)] * mesh.ndim)
            assert paramp.clip_grad_norm_([parameter], 1e9).item() == pytest.approx(math.sqrt(14))


# One case with full DTensors: torchtitan makes only one trainer in a process over the same mesh of them.
OVERFLOWS = [
    *((layout, "partial_dtensor", "float16") for layout in titan.LAYOUTS if "·" not in layout),
    ("tp", "full_dtensor", "float16"),
    *(("dp_shard", "partial_dtensor", precision) for precision in ("bfloat16", "float32")),
]


@family
@pytest.mark.parametrize(("layout", "backend", "precision"), cases("torchtitan overflow", OVERFLOWS, OVERFLOWS[3:4], 1))
def test_an_overflow_on_one_rank_skips_the_step_on_all(torchtitan, layout, backend, precision):
    titan.prepare("cpu")
    if not titan.has_backend(backend):
        pytest.skip(f"this torchtitan has no spmd_backend={backend!r}")
    run_on_ranks(2, __name__, "one_overflow", {"layout": layout, "backend": backend, "precision": precision})


def stopping_like_main(clip):
    """``clip`` with the check of the norm that torchtitan's main branch has behind it, and 0.3.0 has not."""

    def checked(*args, **kwargs):
        norm = clip(*args, **kwargs)
        assert torch.isfinite(norm)
        return norm

    return checked


def one_overflow(world, layout, backend, precision):
    trainer = titan.build(adopted(precision, backend=backend, **titan.LAYOUTS[layout]))
    utils = importlib.import_module("torchtitan.distributed.utils")
    clip = utils.clip_grad_norm_
    titan.train(trainer, 1)
    assert utils.clip_grad_norm_ is clip  # for other trainers in this process
    before, schedule = weights(trainer), trainer.lr_schedulers.state_dict()
    plant(trainer, here=world.rank == 1)
    with mock.patch.object(ParampTrainer, "_clip", stopping_like_main(ParampTrainer._clip)):
        (logged,) = titan.train(trainer, 1)
    assert (logged["loss_scale"], logged["skipped_steps"]) == (2.0**11 if precision == "float16" else 1.0, 1)
    assert not math.isfinite(logged["grad_norm"])
    assert trainer.lr_schedulers.state_dict() == schedule
    for name, value in weights(trainer).items():
        assert torch.equal(value, before[name]), name
    (logged,) = titan.train(trainer, 1)
    assert logged["skipped_steps"] == 1
    assert not all(torch.equal(value, before[name]) for name, value in weights(trainer).items())
    for weight in trainer.model_parts[0].parameters():
        weight.detach().fill_(math.nan)
    knows_no_loss = layout == "pp" and world.rank == 0
    with nullcontext() if knows_no_loss else pytest.raises(RuntimeError, match="Loss is not finite"):
        titan.train(trainer, 1)
    assert trainer.num_skipped == 2
    trainer.close()


CHECKPOINTS = ["a_resumed_run_goes_on", "a_checkpoint_without_a_scale_is_loaded"]


@family
@pytest.mark.parametrize("body", cases("torchtitan bodies", CHECKPOINTS, CHECKPOINTS[:1], 1))
def test_a_checkpoint_is_loaded(torchtitan, body):
    run_on_ranks(2, __name__, body, {})


def a_resumed_run_goes_on(world):
    """With its scale, as if it was never interrupted."""
    options = {"folder": shared_folder(), **titan.LAYOUTS["dp_shard"]}
    trainer = titan.build(adopted(**options))
    plant(trainer, here=world.rank == 0)
    titan.train(trainer, 2)
    trainer.checkpointer.save(2)
    expected = titan.train(trainer, 2)
    trainer.close()
    again = titan.build(adopted(**options))
    assert again.scaler.get_scale() == 2.0**12
    titan.resume(again)
    assert (again.step, again.scaler.get_scale()) == (2, 2.0**11)
    assert losses_and_norms(titan.train(again, 2)) == losses_and_norms(expected)
    again.close()


def a_checkpoint_without_a_scale_is_loaded(world):
    """Of a run in bf16, if the scale is excluded, or of an adopted one, whose scale is fixed."""
    for before, excluded in ((titan.tiny_config, ["loss_scaler"]), (partial(adopted, "bfloat16"), [])):
        options = {"folder": shared_folder(), **titan.LAYOUTS["dp_shard"]}
        in_bf16 = titan.build(before(**options))
        titan.train(in_bf16, 2)
        in_bf16.checkpointer.save(2)
        in_bf16.close()
        config = adopted(**options)
        config.checkpoint.exclude_from_loading = excluded
        trainer = titan.build(config)
        begun = trainer.scaler.state_dict()
        titan.resume(trainer)
        assert (trainer.step, trainer.scaler.state_dict()) == (2, begun)
        assert trainer.scaler.get_scale() == 2.0**12
        assert titan.train(trainer, 1)[0]["skipped_steps"] == 0
        trainer.close()


def test_what_does_not_fit_is_refused(torchtitan):
    """torchtitan itself has no fp16."""
    config = titan.tiny_config()
    assert get_args(get_type_hints(type(config.training))["mixed_precision_param"]) == ("bfloat16", "float32")
    with pytest.raises(ConfigError, match="precision: got 'fp16', expected one of float16"):
        adopt(config, precision="fp16")
    for other in (config.training, adopt(config)):
        with pytest.raises(ConfigError, match=r"expected a Trainer\.Config of torchtitan's"):
            adopt(other)
    config.training.dtype = "bfloat16"
    with pytest.raises(ConfigError, match=r"training\.dtype: got 'bfloat16' with precision 'float16'"):
        adopt(config)


VALIDATIONS = ["cp", "dp_shard·cp"]


@family
@pytest.mark.parametrize("layout", cases("torchtitan validation", VALIDATIONS, VALIDATIONS[:1], 1))
@pytest.mark.usefixtures("torchtitan")
@on_ranks(lambda layout: titan.ranks_of(layout))
def test_validation_cuts_sequences_too(world, layout):
    found = []
    for options in (titan.LAYOUTS[layout], titan.WHOLE[layout]):
        config = titan.tiny_config(**options)
        config.validator.enable, config.validator.steps, config.validator.dataloader = True, 2, config.dataloader
        trainer = titan.fill(titan.build(adopt(config, precision="float32")))
        trainer.metrics_processor.log_validation = lambda loss, step: found.append(loss)
        trainer.validator.validate(trainer.model_parts, 1)
        trainer.close()
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def flex_attention_is_refused(world):
    config = titan.tiny_config(context_parallel_degree=2)
    from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention

    for _, _, owner, name in list(config.model_spec.model.traverse(ScaledDotProductAttention.Config)):
        setattr(owner, name, FlexAttention.Config())
    with pytest.raises(ConfigError, match=r"got a model with FlexAttention, expected ScaledDotProductAttention"):
        titan.build(adopt(config))


def test_what_cannot_cut_sequences_is_refused(torchtitan):
    run_on_ranks(2, __name__, "flex_attention_is_refused", {})
    for part, name, value, message in (
        ("parallelism", "spmd_backend", "spmd_types", "got 'spmd_types', expected 'partial_dtensor'"),
        ("parallelism", "context_parallel_load_balancer", None, "got None, expected 'headtail'"),
        ("compile", "enable", True, "got True, expected False"),
        ("training", "disable_cuda_graphs", False, "got False, expected True"),
    ):
        config = titan.tiny_config(context_parallel_degree=2)
        setattr(getattr(config, part), name, value)
        with pytest.raises(ConfigError, match=rf"{part}\.{name}: {message}"):
            adopt(config)
    config = titan.tiny_config(context_parallel_degree=2)
    config.model_spec.parallelize_fn = adopt  # of a module that has no context parallelism
    with pytest.raises(ConfigError, match=r"torchtitan\.adopt has no context parallelism; expected 1"):
        adopt(config)


@pytest.mark.parametrize(
    ("kind", "model", "name"),
    [
        ("GroupedExperts", "deepseek_v3", "deepseek_v3_debugmodel"),
        ("VarlenAttention", "llama3", "llama3_debugmodel_varlen_attn"),
    ],
)
def test_modules_that_compute_in_bf16_are_refused_in_fp16(torchtitan, kind, model, name):
    titan.prepare("cpu")
    config = getattr(importlib.import_module(f"torchtitan.models.{model}.config_registry"), name)()
    with pytest.raises(ConfigError, match=rf"{kind} computes in bfloat16 .* \(layers\.\d.*use precision='bfloat16'"):
        adopt(config)
    for precision in ("bfloat16", "float32"):
        assert adopt(config, precision=precision).precision == precision


def test_auxiliary_losses_without_the_loss_scale_are_refused_in_fp16(torchtitan, monkeypatch):
    """torchtitan has them after 0.3.0. A norm's configuration stands for that of such a loss."""
    titan.prepare("cpu")
    config = importlib.import_module("torchtitan.models.llama3.config_registry").llama3_debugmodel()
    later = ModuleType("torchtitan.models.common.aux_loss")
    later.__spec__ = importlib.machinery.ModuleSpec(later.__name__, None)
    norm = type(config.model_spec.model.norm)
    later.AuxLoss = SimpleNamespace(Config=norm)
    monkeypatch.setitem(sys.modules, later.__name__, later)
    common = importlib.import_module("torchtitan.models.common")
    monkeypatch.setattr(common, "aux_loss", later, raising=False)
    with pytest.raises(ConfigError, match=r"auxiliary losses without the loss scale \(.*use precision='bfloat16'"):
        adopt(config)
    assert adopt(config, precision="bfloat16").precision == "bfloat16"


CONFIGURED = "Trainer.Config.training.mixed_precision_param"
NAMES = ("distributed.utils.clip_grad_norm_", "components.loss.ChunkedLossWrapper.Config.loss_fn")


@pytest.mark.parametrize("name", [*NAMES, CONFIGURED])
def test_a_name_that_torchtitan_lacks_is_an_error_that_names_it(torchtitan, monkeypatch, name):
    config = titan.tiny_config()
    if name == CONFIGURED:
        config.training = SimpleNamespace(dtype="float32")
    else:
        monkeypatch.delattr(f"torchtitan.{name}")
        name = f"torchtitan.{name}"
    lacks = rf"torchtitan \S+ has no {re.escape(name)}; expected a version that has, as {WORKS_WITH}"
    with pytest.raises(ConfigError, match=lacks):
        adopt(config)


def test_names_that_its_trainer_lacks_are_in_the_error_too(torchtitan, tmp_path):
    class Other:
        def __init__(self, config):
            self.device = "cpu"

    made = type("Made", (ParampTrainer, Other), {})
    for folder, last in ((None, r"get_optional_mesh"), (tmp_path, r"get_optional_mesh, Trainer\.checkpointer\.states")):
        with pytest.raises(ConfigError, match=rf"has no Trainer\.loss_fn, .*\.{last}; expected a version that has"):
            made(adopted(folder=folder))


def test_the_diff_of_the_page_runs(torchtitan):
    diff = difference_of("from-torchtitan.md")
    before, after = ("\n".join(line[1:] for line in diff if line[:1] in (sign, " ")) for sign in "-+")
    titan.prepare("cpu")
    for source, name in ((before, "Trainer"), (after, "ParampTrainer")):
        names = {}
        exec(compile(source, "docs/from-torchtitan.md", "exec"), names)
        assert type(names["llama3_fp16"]())._owner.__name__ == name


def test_the_long_sequences_of_the_page_are_adopted(torchtitan):
    titan.prepare("cpu")
    config = run_code("from-torchtitan.md", "def llama3_of_long_sequences")["llama3_of_long_sequences"]()
    assert (config.parallelism.context_parallel_degree, config.precision) == (2, "float16")


def test_a_trainer_derived_from_torchtitans_stays_one(torchtitan):
    titan.prepare("cpu")
    from torchtitan.trainer import Trainer

    class Mine(Trainer):
        @dataclass(kw_only=True, slots=True)
        class Config(Trainer.Config):
            colour: str = "red"

    config = adopt(Mine.Config(colour="blue"))
    assert config.colour == "blue"
    assert issubclass(type(config)._owner, Mine)
    assert issubclass(type(config)._owner, ParampTrainer)
