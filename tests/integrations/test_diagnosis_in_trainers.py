"""The code of docs/diagnosis.md for trainers names a planted fault in each of them."""

import contextlib
import io
import re

import pytest
import torch
from pages import run_code
from torch import nn
from trainer_runs import quiet

import paramp


def code(function):
    """The function of the page."""
    return run_code("diagnosis.md", f"def {function}(", paramp=paramp)[function]


@contextlib.contextmanager
def one_report(module=r"the model's \w+"):
    """What is printed inside has one report, which names the layer."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        yield
    found = re.findall(
        r"no scale helps: (.*) produced NaN in the forward of microbatch 0 on rank 0$", out.getvalue(), re.M
    )
    assert len(found) == out.getvalue().count("no scale helps") == 1, out.getvalue()
    assert re.fullmatch(module, found[0])


class Model(nn.Module):
    """Its second layer spoils the third batch."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x, labels=None):
        out = self.second(self.first(x))
        out = out * torch.where(x.sum() > 100, torch.nan, 1.0)
        return {"loss": (out - labels).square().mean(), "logits": out}


def dataset():
    return [{"x": torch.full((4,), 1e3 if index == 2 else 1.0), "labels": torch.ones(1)} for index in range(4)]


@pytest.fixture
def accelerate():
    yield pytest.importorskip("accelerate")
    pytest.importorskip("accelerate").state.AcceleratorState._reset_state(reset_partial_state=True)


def test_a_loop_with_accelerate_reports_its_overflow(accelerate):
    from paramp.integrations.accelerate import adopt

    accelerator = adopt(accelerate.Accelerator(cpu=True, mixed_precision="fp16"))
    model = Model()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    batches = torch.utils.data.DataLoader(dataset(), batch_size=1)
    with one_report():
        code("train_with_accelerate")(accelerator, model, optimizer, batches, lambda batch: model(**batch)["loss"])


def test_hugging_faces_trainer_reports_its_overflow(tmp_path, accelerate):
    transformers = pytest.importorskip("transformers")
    from paramp.integrations.transformers import ParampTrainer

    class Callback(transformers.TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            trainer.diagnose()

    options = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2, "max_steps": 2, "use_cpu": True}
    options |= {"fp16": True, "train_sampling_strategy": "sequential", "report_to": [], "save_strategy": "no"}
    with quiet():
        arguments = transformers.TrainingArguments(str(tmp_path), **options)
        kind = code("diagnosing")(ParampTrainer)
        trainer = kind(Model(), arguments, train_dataset=dataset(), callbacks=[Callback()])
        with one_report():
            trainer.train()


def test_lightnings_trainer_reports_its_overflow():
    lightning = pytest.importorskip("lightning")
    from paramp.integrations.lightning import TrainerPrecision

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = Model()

        def training_step(self, batch, index):
            return self.model(**batch)["loss"]

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.0)

    plugin = TrainerPrecision("16-mixed")
    callback = code("diagnosing_callback")(lightning.Callback, plugin)()
    options = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    with quiet():
        trainer = lightning.Trainer(
            max_epochs=1, accelerator="cpu", plugins=[plugin], callbacks=[callback], devices=1, **options
        )
        with one_report("model"):
            trainer.fit(Module(), torch.utils.data.DataLoader(dataset(), batch_size=1))
