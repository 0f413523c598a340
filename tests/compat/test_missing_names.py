"""Names of other libraries that are not there say what to use in their place."""

import importlib
import re

import pytest
import torch
import torch.distributed.tensor
import torch.nn.utils.prune

import paramp
from paramp import ConfigError
from paramp.compat import apex, colossalai, composer
from paramp.compat.apex.multi_tensor_apply import multi_tensor_applier  # as the example on ImageNet does
from paramp.compat.colossalai.trainer import Trainer
from paramp.compat.foreign_module_advice import SAME, TABLES, alternatives
from paramp.config.files import load

MISSING = [
    ("apex.optimizers", "FusedLAMB", "FusedAdam"),
    ("apex.optimizers", "FusedNovoGrad", "FusedAdam"),
    ("apex.optimizers", "FusedAdagrad", "torch.optim.Adagrad"),
    ("apex.optimizers", "FP16_Optimizer", "amp.initialize"),
    ("apex.parallel", "LARC", "clip_grad_norm_"),
    ("apex.parallel", "Reducer", "no_sync"),
    ("apex.fp16_utils", "network_to_half", "opt_level='O2'"),
    ("colossalai.utils", "save_checkpoint", r"engine\.save\(folder\)"),
    ("colossalai.nn", "Linear", r"initialize\(\.\.\., plan"),
    ("colossalai.nn", "Lamb", "AdamW"),
    ("colossalai.trainer.hooks", "ThroughputHook", "BaseHook"),
    ("composer", "Trainer", "paramp.initialize"),
    ("composer", "ComposerModel", "from-composer"),
    ("composer.functional", "apply_blurpool", "your own loop"),
    ("composer.algorithms", "EMA", "apply"),
    ("composer.algorithms", "GradientClipping", "clip_grad_norm"),
    # Of modules that are not there either, but can be imported.
    ("apex.contrib.xentropy", "SoftmaxCrossEntropyLoss", "use torch.nn.CrossEntropyLoss"),
    ("apex.transformer.tensor_parallel.layers", "ColumnParallelLinear", "plan"),
    ("apex.normalization.instance_norm", "InstanceNorm3dNVFuser", "InstanceNorm3d"),
    ("apex.parallel.LARC", "LARC", "clip_grad_norm_"),
    ("colossalai.zero", "ZeroOptimizer", r"parallel=dict\(zero=1\)"),
    ("colossalai.zero.sharded_model", "ShardedModelV2", r"data=dict\(shard=2\)"),
    ("colossalai.booster", "Booster", "paramp.initialize"),
    ("colossalai.nn.optimizer", "HybridAdam", "nothing is offloaded"),
    ("colossalai.builder", "build_pipeline_model", "pipeline=2"),
    ("composer.trainer", "Trainer", "write the loop"),
    ("composer.core.callback", "Callback", "write the loop"),
]


@pytest.mark.parametrize(("module", "name", "instead"), MISSING)
def test_what_is_not_there_says_what_to_use(module, name, instead):
    with pytest.raises(ImportError, match=f"has no {name}: .*{instead}"):
        exec(f"from paramp.compat.{module} import {name}")


def test_other_names_are_as_elsewhere():
    with pytest.raises(ImportError, match="cannot import name 'Linaer'"):
        exec("from paramp.compat.colossalai.nn import Linaer")
    with pytest.raises(ConfigError, match="hooks: got 'loss', expected objects of"):
        Trainer(engine=None).fit([], 1, hooks=["loss"])


# ---------------------------------------------------------------------------------------------------- whole modules

LIBRARIES = {"apex": apex, "colossalai": colossalai, "composer": composer}
FOUND = [
    ("apex.normalization.fused_layer_norm", "FusedLayerNorm", apex.normalization.FusedLayerNorm),
    ("apex.parallel.distributed", "DistributedDataParallel", apex.parallel.DistributedDataParallel),
    ("apex.multi_tensor_apply.multi_tensor_apply", "multi_tensor_applier", multi_tensor_applier),
    ("colossalai.nn", "FusedAdam", apex.optimizers.FusedAdam),
    ("colossalai.nn", "FusedSGD", apex.optimizers.FusedSGD),
    ("colossalai.initialize", "launch_from_torch", colossalai.launch_from_torch),
    ("colossalai.context.parallel_mode", "ParallelMode", colossalai.context.ParallelMode),
    ("colossalai.legacy.core", "global_context", colossalai.core.global_context),
    ("colossalai.legacy.nn.metric", "Accuracy", colossalai.nn.Accuracy),
    ("composer.algorithms.low_precision_layernorm", "LowPrecisionLayerNorm", paramp.algorithms.LowPrecisionLayerNorm),
]
PLACES = {"paramp": paramp, "torch": torch, "engine": paramp.Engine, "amp": apex.amp, **LIBRARIES}
NAMES = rf"\b(?:{'|'.join(PLACES)})\.[\w.]*\w"
SETTINGS = r"\b(parallel|precision|activation_checkpointing|compile)=(dict\((?:[^()]|\([^()]*\))*\)|'.*?'|\w+)"


@pytest.mark.parametrize(("module", "name", "value"), FOUND)
def test_a_submodule_has_the_names_that_are_here(module, name, value):
    names = {}
    exec(f"from paramp.compat.{module} import {name}", names)
    assert names[name] is value


@pytest.mark.parametrize("library", TABLES)
def test_the_modules_of_the_table_are_there_and_none_hides_a_file(library):
    package = LIBRARIES[library].__name__
    for path in alternatives(library):
        module = importlib.import_module(f"{package}.{path}")
        parent, _, child = module.__name__.rpartition(".")
        if module.__spec__ is not None:  # a package with a file, whose other submodules the row names
            continue
        with pytest.raises((ImportError, AttributeError)):
            _ = module.NotAName
        if importlib.import_module(parent).__spec__ is None:
            assert getattr(importlib.import_module(parent), child) is module
        with pytest.raises(AttributeError):
            _ = module._private
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(f"{package}.zreo")


@pytest.mark.parametrize("library", TABLES)
def test_what_an_alternative_names_is_there(library):
    for text in TABLES[library]:
        for name in re.findall(NAMES, text):
            first, *rest = name.split(".")
            value = PLACES[first]
            for part in rest:
                value = getattr(value, part)  # raises what is wrong
        for key, value in re.findall(SETTINGS, text):
            load({key: eval(value)})
        for key in re.findall(r"set (\w+)", text):
            assert key in {*paramp.Config.__dataclass_fields__, "the"}, text


def test_modules_with_the_names_of_others_name_modules_that_are_there():
    for module, other in SAME.items():
        library, _, path = module.partition(".")
        assert path in alternatives(library)
        assert importlib.import_module(f"paramp.compat.{other}").__spec__ is not None


def test_apexs_applier_is_not_available_and_says_what_to_use():
    assert multi_tensor_applier.available is False
    with pytest.raises(ImportError, match=r"paramp\.clip_grad_norm_"):
        multi_tensor_applier(None, None, [])
