"""Names of other libraries that are not there say what to use in their place."""

import pytest

from paramp import ConfigError
from paramp.compat.colossalai.trainer import Trainer

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
