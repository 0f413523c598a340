"""The code of docs/diagnosis.md for trainers names a planted fault in each of them."""

import contextlib
import io
import re
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from trainer_runs import run_code

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


def scaled(accelerator, optimizer):
    """As with an adopted accelerator: fp16's scaler on a CPU."""

    def called(*args, **kwargs):
        optimizer._accelerate_step_called = True
        return optimizer._optimizer_original_step_method(*args, **kwargs)

    accelerator.scaler = optimizer.scaler = paramp.DistributedGradScaler("cpu", init_scale=8.0)
    optimizer._accelerate_step_called = False
    optimizer._optimizer_original_step_method = optimizer.optimizer.step
    optimizer._optimizer_patched_step_method = called


def test_accelerate():
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    try:
        model = Model()
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
        scaled(accelerator, optimizer)
        batches = torch.utils.data.DataLoader(dataset(), batch_size=1)
        with one_report():
            code("train_with_accelerate")(accelerator, model, optimizer, batches, lambda batch: model(**batch)["loss"])
    finally:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def test_hugging_face_trainer(tmp_path):
    transformers = pytest.importorskip("transformers")

    class Callback(transformers.TrainerCallback):
        def on_train_begin(self, args, state, control, optimizer=None, **kwargs):
            scaled(trainer.accelerator, optimizer)

        def on_step_end(self, *args, **kwargs):
            trainer.diagnose()

    options = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2, "max_steps": 2, "use_cpu": True}
    options["optim"] = "adamw_torch"  # a fused optimizer hides from Accelerate that it skips
    arguments = transformers.TrainingArguments(str(tmp_path), report_to=[], save_strategy="no", **options)
    kind = code("diagnosing")(transformers.Trainer)
    trainer = kind(Model(), arguments, train_dataset=dataset(), callbacks=[Callback()])
    trainer._get_train_sampler = lambda *_: None
    with one_report():
        trainer.train()


@pytest.mark.filterwarnings("ignore")  # of Lightning, on the versions of what it imports
def test_lightning():
    lightning = pytest.importorskip("lightning")
    plugin = SimpleNamespace(num_skipped=0, loss_scale=1.0)

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = Model()

        def training_step(self, batch, index):
            loss = self.model(**batch)["loss"]
            self.log("loss", loss)
            return loss

        def optimizer_step(self, epoch, index, optimizer, closure):
            loss = closure()
            plugin.num_skipped += int(not loss.isfinite())
            if loss.isfinite():
                optimizer.optimizer.step()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.0)

    callback = code("diagnosing_callback")(lightning.Callback, plugin)()
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    alone = lightning.fabric.plugins.environments.LightningEnvironment()  # does not look for MPI
    trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", plugins=[alone], callbacks=[callback], **quiet)
    with one_report("model"):
        trainer.fit(Module(), torch.utils.data.DataLoader(dataset(), batch_size=1))
