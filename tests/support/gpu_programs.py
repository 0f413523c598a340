"""Training loops without an engine on the fake device: one's own, and those of other libraries with paramp in them.

Each function trains ``model`` by ``optimizer``, both on the device, for a few steps, and says when a step begins and
ends. torchtitan makes a model and an optimizer of its own, in the layout of the current context.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
from fake_cuda import waits
from torch import nn
from torch.utils.data import DataLoader

import paramp
from paramp.distributed.context import current_context
from paramp.models import GPT

STEPS = 3
MAX_NORM = 1.0


def tokens() -> torch.Tensor:
    """A batch, on the CPU."""
    return torch.randint(0, 64, (8, 16))


def _train(model: nn.Module, optimizer: Any, backward: Callable[..., Any], clip: Callable[[], Any] | None) -> None:
    for _ in range(STEPS):
        x = tokens().cuda()
        waits.begin_step()
        backward(GPT.loss(model(x), x))
        if clip is not None:
            clip()
        optimizer.step()
        optimizer.zero_grad()
        waits.end_step()


def scaler(model: nn.Module, optimizer: Any) -> None:
    """A loop of one's own with the parts that stand alone."""
    scaler = paramp.DistributedGradScaler()
    for _ in range(STEPS):
        x = tokens().cuda()
        waits.begin_step()
        with torch.autocast("cuda", torch.float16):
            loss = GPT.loss(model(x), x)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        paramp.clip_grad_norm_(model.parameters(), MAX_NORM)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        waits.end_step()


def fabric(model: nn.Module, optimizer: Any, *, clips: bool = False) -> None:
    from lightning.fabric import Fabric

    host = Fabric(accelerator="cuda", devices=1, plugins=[paramp.FabricPrecision("16-mixed")])
    host.launch()
    model, optimizer = host.setup(model, optimizer, move_to_device=False)
    clip = partial(host.clip_gradients, model, optimizer, max_norm=MAX_NORM, error_if_nonfinite=False)
    _train(model, optimizer, host.backward, clip if clips else None)


def accelerate(model: nn.Module, optimizer: Any, *, clips: bool = False) -> None:
    from accelerate import Accelerator

    from paramp.integrations.accelerate import adopt

    host = adopt(Accelerator(mixed_precision="fp16", device_placement=False))
    model, optimizer = host.prepare(model, optimizer)
    clip = partial(host.clip_grad_norm_, list(model.parameters()), MAX_NORM)
    _train(model, optimizer, host.backward, clip if clips else None)


class _WithLoss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": GPT.loss(self.model(x), x)}


def transformers(model: nn.Module, optimizer: Any) -> None:
    """Hugging Face's Trainer."""
    from transformers import TrainerCallback, TrainingArguments

    from paramp.integrations.transformers import ParampTrainer

    class Steps(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            waits.begin_step()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            waits.end_step()

    # Without the filter, which reads each loss.
    options = {"fp16": True, "max_grad_norm": MAX_NORM, "max_steps": STEPS, "logging_nan_inf_filter": False}
    options |= {"logging_strategy": "no", "save_strategy": "no", "report_to": [], "disable_tqdm": True}
    options |= {"per_device_train_batch_size": 8, "remove_unused_columns": False}
    samples = [{"x": row} for _ in range(STEPS) for row in tokens()]
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    given = {"train_dataset": samples, "optimizers": (optimizer, schedule), "callbacks": [Steps()]}
    with tempfile.TemporaryDirectory() as folder:
        ParampTrainer(_WithLoss(model), TrainingArguments(folder, **options), **given).train()


def lightning(model: nn.Module, optimizer: Any, *, mode: str = "16-mixed") -> None:
    """Lightning's Trainer."""
    from lightning.pytorch import LightningModule, Trainer

    from paramp.integrations.lightning import TrainerPrecision

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, x: torch.Tensor, index: int) -> torch.Tensor:
            return GPT.loss(self.model(x), x)

        def cpu(self) -> Module:
            return self  # Lightning calls it at the end, and torch does not move these parameters

        def configure_optimizers(self) -> Any:
            return optimizer

        def train_dataloader(self) -> DataLoader:
            return DataLoader([tokens().cuda() for _ in range(STEPS)], batch_size=None)

        def on_train_batch_start(self, *_: Any) -> None:
            waits.begin_step()

        def on_train_batch_end(self, *_: Any) -> None:
            waits.end_step()

    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    device = {"accelerator": "cuda", "devices": 1, "plugins": TrainerPrecision(mode)}
    Trainer(max_epochs=1, gradient_clip_val=MAX_NORM, **device, **quiet).fit(Module())


def torchtitan(_: nn.Module, __: Any) -> None:
    """torchtitan's Trainer, with a small Llama."""
    import titan

    from paramp.integrations.torchtitan import adopt

    context = current_context()
    shards, tensor = context.config.parallel.shard, context.tensor_axis.size
    degrees = {"shard": shards, "replicate": context.batch_axis.size // shards}
    layout = {f"data_parallel_{name}_degree": size for name, size in degrees.items()}
    config = titan.tiny_config(device="cuda", tensor_parallel_degree=tensor, **layout)
    from torchtitan.protocols.model import BaseModel

    config.metrics.log_freq = 10**6  # what it logs, it reads
    launched = {"WORLD_SIZE": str(context.world_size), "RANK": str(context.rank), "LOCAL_RANK": "0"}
    # Random weights of DTensors are made under torch's own modes, for which the fake device is not known.
    with mock.patch.dict(os.environ, launched), mock.patch.object(BaseModel, "init_weights"):
        trainer = titan.build(adopt(config))
    batches = trainer.batch_generator(trainer.dataloader)
    for _ in range(STEPS):
        waits.begin_step()
        trainer.step += 1
        trainer.train_step(batches)
        waits.end_step()
    trainer.close()


PROGRAMS: dict[str, Callable[[nn.Module, Any], None]] = {
    "scaler": scaler,
    "fabric": fabric,
    "fabric, clipped": partial(fabric, clips=True),
    "accelerate": accelerate,
    "accelerate, clipped": partial(accelerate, clips=True),
    "transformers": transformers,
    "lightning": lightning,
    "lightning, masters": partial(lightning, mode="16-naive"),
    "torchtitan": torchtitan,
}
