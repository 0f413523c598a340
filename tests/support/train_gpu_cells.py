"""Trains cells on the fake device, one after another: a cell is a line of JSON on stdin, what came of it one on stdout.

Run by :mod:`gpu_cells`, which describes the cells. Programs are training loops without an engine: one's own, and those
of other libraries with paramp in them. Each trains ``model`` by ``optimizer``, both on the device, for a few steps, and
says when a step begins and ends.
"""

# isort: off
import fake_cuda  # before torch
from fake_cuda import waits

# isort: on
import json
import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode

import paramp
from paramp.distributed.context import current_context
from paramp.engine.shared_failure import SharedFailure
from paramp.models import GPT, GPTConfig


def _agree(self: SharedFailure, error: Exception | None, group: Any = None) -> None:
    waits.add("exchange of failures (SharedFailure.agree)")
    if error is not None:
        raise error


# Other ranks are not there to fail, and a rank that fails does not wait for them.
SharedFailure.agree = _agree
SharedFailure._peers_failed_too = lambda self: False

STEPS = 3
MAX_NORM = 1.0
SHAPE = {"num_layers": 2, "num_heads": 2, "width": 32, "max_seq_len": 16, "vocab_size": 64}


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


class Programs:
    """By name. The words behind a comma in a cell's program choose a variant of it."""

    @staticmethod
    def scaler(model: nn.Module, optimizer: Any, _: str) -> None:
        """A loop of one's own with the parts that stand alone."""
        scaler = paramp.DistributedGradScaler()

        def clip() -> None:
            scaler.unscale_(optimizer)
            paramp.clip_grad_norm_(model.parameters(), MAX_NORM)

        class Step:
            zero_grad = optimizer.zero_grad

            @staticmethod
            def step() -> None:
                scaler.step(optimizer)
                scaler.update()

        def forward(x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cuda", torch.float16):
                return model(x)

        _train(forward, Step, lambda loss: scaler.scale(loss).backward(), clip)

    @staticmethod
    def fabric(model: nn.Module, optimizer: Any, clipped: str) -> None:
        from lightning.fabric import Fabric

        host = Fabric(accelerator="cuda", devices=1, plugins=[paramp.FabricPrecision("16-mixed")])
        host.launch()
        model, optimizer = host.setup(model, optimizer, move_to_device=False)
        clip = partial(host.clip_gradients, model, optimizer, max_norm=MAX_NORM, error_if_nonfinite=False)
        _train(model, optimizer, host.backward, clip if clipped else None)

    @staticmethod
    def accelerate(model: nn.Module, optimizer: Any, clipped: str) -> None:
        from accelerate import Accelerator

        from paramp.integrations.accelerate import adopt

        host = adopt(Accelerator(mixed_precision="fp16", device_placement=False))
        model, optimizer = host.prepare(model, optimizer)
        clip = partial(host.clip_grad_norm_, list(model.parameters()), MAX_NORM)
        _train(model, optimizer, host.backward, clip if clipped else None)

    @staticmethod
    def transformers(model: nn.Module, optimizer: Any, _: str) -> None:
        from transformers import TrainerCallback, TrainingArguments

        from paramp.integrations.transformers import ParampTrainer

        class Steps(TrainerCallback):
            def on_step_begin(self, *_: Any, **__: Any) -> None:
                waits.begin_step()

            def on_step_end(self, *_: Any, **__: Any) -> None:
                waits.end_step()

        class WithLoss(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.model = model

            def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
                return {"loss": GPT.loss(self.model(x), x)}

        # Without the filter, which reads each loss.
        options = {"fp16": True, "max_grad_norm": MAX_NORM, "max_steps": STEPS, "logging_nan_inf_filter": False}
        options |= {"logging_strategy": "no", "save_strategy": "no", "report_to": [], "disable_tqdm": True}
        options |= {"per_device_train_batch_size": 8, "remove_unused_columns": False}
        samples = [{"x": row} for _ in range(STEPS) for row in tokens()]
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
        given = {"train_dataset": samples, "optimizers": (optimizer, schedule), "callbacks": [Steps()]}
        with tempfile.TemporaryDirectory() as folder:
            ParampTrainer(WithLoss(), TrainingArguments(folder, **options), **given).train()

    @staticmethod
    def lightning(model: nn.Module, optimizer: Any, masters: str) -> None:
        from lightning.pytorch import LightningModule, Trainer

        from paramp.integrations.lightning import TrainerPrecision

        class Module(LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.model = model

            def training_step(self, x: torch.Tensor, index: int) -> torch.Tensor:
                return GPT.loss(self.model(x), x)

            def cpu(self) -> "Module":
                return self  # Lightning calls it at the end, and torch does not move these parameters

            def configure_optimizers(self) -> Any:
                return optimizer

            def on_train_batch_start(self, *_: Any) -> None:
                waits.begin_step()

            def on_train_batch_end(self, *_: Any) -> None:
                waits.end_step()

        quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
        plugin = TrainerPrecision("16-naive" if masters else "16-mixed")
        options = {"accelerator": "cuda", "devices": 1, "plugins": plugin, **dict.fromkeys(quiet, False)}
        batches = torch.utils.data.DataLoader([tokens().cuda() for _ in range(STEPS)], batch_size=None)
        Trainer(max_epochs=1, gradient_clip_val=MAX_NORM, **options).fit(Module(), batches)

    @staticmethod
    def torchtitan(_: nn.Module, __: Any, ___: str) -> None:
        """It makes a small Llama and an optimizer of its own, in the layout of the current context."""
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


def by_shape(of_matrices: Callable[..., Any], of_vectors: Callable[..., Any]) -> Callable[[Any], Any]:
    def make(parameters: Any) -> list[torch.optim.Optimizer]:
        kinds: tuple[list[Any], list[Any]] = ([], [])
        for parameter in parameters:
            kinds[parameter.ndim > 1].append(parameter)
        return [of_matrices(kinds[1]), of_vectors(kinds[0])]

    return make


def sum_and_count(logits: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, int]:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum"), target.numel()


SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ADAMW = partial(torch.optim.AdamW, lr=1e-3, eps=1e-4)
OPTIMIZERS = {
    "adamw": ADAMW,
    "sgd": SGD,
    "two": by_shape(partial(torch.optim.Adam, lr=1e-3, eps=1e-4), SGD),
    "foreach": partial(ADAMW, foreach=True),
    "fused": partial(ADAMW, fused=True),
    "matrices": by_shape(partial(torch.optim.Muon, lr=1e-2), ADAMW),
}
CRITERIA = {"mean": GPT.loss, "sum and count": sum_and_count}
LOOPS: dict[str, Callable[[Any, torch.Tensor], None]] = {
    "forward_backward": lambda engine, x: engine.forward_backward(x, x),
    "without the loss": lambda engine, x: engine.forward_backward(x, x, return_loss=False),
    "by hand": lambda engine, x: engine.backward(engine.criterion(engine(x), x)),
}


def train(cell: dict[str, Any], rank: int, objects: fake_cuda.Objects) -> None:
    """Three steps of ``cell`` on ``rank``, which leave in ``waits`` what the host waited for in the last one."""
    counters.clear()
    config = paramp.Config(**{"clip_grad_norm": 1.0, "hang_timeout": None} | cell["config"])
    if cell.get("num_zeros"):
        config = replace(config, precision=replace(config.precision, log_num_zeros=True))
    with (
        fake_cuda.world(rank, cell["size"], objects),
        paramp.launch(config, rank, cell["size"], "localhost", 1, device="cuda") as context,
        fake_cuda.Device(),
    ):
        with torch.device("cuda" if "program" in cell else "cpu"):
            model = GPT(GPTConfig(**SHAPE | cell.get("model", {})))
        optimizer = OPTIMIZERS[cell.get("optimizer", "adamw")](model.parameters())
        if "program" in cell:
            name, _, variant = cell["program"].partition(", ")
            getattr(Programs, name)(model, optimizer, variant)
            return
        engine, *_ = paramp.initialize(model, optimizer, CRITERIA[cell.get("criterion", "mean")])
        if "frozen" in cell:
            engine.module.get_parameter(cell["frozen"]).requires_grad_(False)
        for _ in range(STEPS):
            x = tokens()
            x = x.pin_memory() if cell.get("batches") == "pinned" else x.cuda()
            waits.begin_step()
            for _ in range(context.config.gradient_accumulation):
                LOOPS[cell.get("loop", "forward_backward")](engine, x)
                engine.step()
                engine.zero_grad()
            waits.end_step()
    if config.compile and not counters["stats"]["unique_graphs"] and context.tensor_axis.size == 1:
        raise AssertionError("nothing was compiled")


def outcome(cell: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """What the first and the last rank of the cell waited for in their last step, and the error of one that failed."""
    objects, found = fake_cuda.Objects(), {}
    torch._dynamo.reset()  # what other cells compiled, and what their operators returned, is not this one's
    FakeTensorMode.cache_clear()
    for rank in sorted({0, cell["size"] - 1}):
        waits.begin_step()
        error = None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                train(cell, rank, objects)
        except Exception as raised:
            error = "".join(traceback.format_exception(raised))
        found[rank] = {"waits": waits[:], "error": error}
    return found


if __name__ == "__main__":
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        print(json.dumps(outcome(json.loads(line))), file=answers, flush=True)
