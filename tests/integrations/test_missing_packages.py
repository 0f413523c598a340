"""Without another trainer's package an error names the extra that installs it."""

import importlib

import pytest
from trainer_runs import hide

import paramp
from paramp.integrations import accelerate, lightning_plugin_base, torchtitan, transformers
from paramp.integrations.lightning import TrainerPrecision

CALLS = {
    "accelerate": ("accelerate", lambda: accelerate.adopt(object())),
    "transformers": ("transformers", lambda: transformers.ParampTrainer),
    "lightning": ("lightning", lambda: TrainerPrecision("16-mixed")),
    "fabric": ("lightning", lambda: paramp.FabricPrecision("16-mixed")),
    "torchtitan": ("torchtitan", lambda: torchtitan.adopt(object())),
}


@pytest.mark.parametrize("extra", CALLS)
def test_without_its_package_an_error_names_the_extra(extra, monkeypatch):
    package, call = CALLS[extra]
    lightning_plugin_base._with_lightning.cache_clear()
    transformers._trainer.cache_clear()
    hide(monkeypatch, package)
    with pytest.raises(paramp.ConfigError, match=rf'{package} cannot be imported .*pip install "paramp\[{extra}\]"'):
        call()


def test_an_accelerate_that_is_too_old_and_names_that_are_not_there(monkeypatch):
    installed = pytest.importorskip("accelerate")
    for version, message in (
        ("1.9.0", r"got accelerate 1\.9\.0, expected 1\.10 or newer"),
        ("1.10.0", r"expected an accelerate\.Accelerator"),
    ):
        monkeypatch.setattr(installed, "__version__", version)
        with pytest.raises(paramp.ConfigError, match=message):
            accelerate.adopt(object())
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = importlib.import_module("paramp.integrations.transformers").Nothing
