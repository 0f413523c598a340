"""A LightningModule, and its trainings by the Trainer."""

import functools
import importlib
import os
import warnings
from unittest import mock

import torch
import torch.distributed as dist
from small_mlp import batch, build, tensor_parallel
from torch import nn
from torch.utils.data import DataLoader
from trainer_runs import MAX_NORM, STEPS, quiet, sgd, spoil

from paramp.integrations.lightning import TrainerPrecision

OVERFLOWS = 1
EPOCH = STEPS // 2

SWITCHES = ("enable_checkpointing", "enable_progress_bar", "enable_model_summary", "use_distributed_sampler")
QUIET = {"accelerator": "cpu", "logger": False} | dict.fromkeys(SWITCHES, False)


def shard(model, mesh, dtype):
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=dtype, cast_forward_inputs=dtype is not None)
    for child in (model.up, model.down, model):
        fully_shard(child, mesh=mesh, mp_policy=policy)


@functools.cache
def lightning():
    with quiet():
        return importlib.import_module("lightning.pytorch")


@functools.cache
def trained_module():
    """The class of the module, which is made when Lightning is imported."""

    class Module(lightning().LightningModule):
        def __init__(self, data=1, tensor=1, gathered=None, seed=4):
            super().__init__()
            self.model, self.data, self.tensor, self.gathered = build(seed), data, tensor, gathered
            self.losses, self.norms, self.scales, self.save = [], [], [], None

        def configure_model(self):
            if self.device_mesh is None or hasattr(self.model.up.weight, "device_mesh"):
                return
            if self.tensor > 1:
                tensor_parallel(self.model, self.device_mesh["tensor_parallel"])
            if self.data > 1:
                shard(self.model, self.device_mesh["data_parallel"], self.gathered)

        def train_dataloader(self):
            first = self.trainer.current_epoch * EPOCH
            rank = self.trainer.global_rank // self.tensor if self.data > 1 else 0
            batches = [batch(step, rank, self.data) for step in range(first, first + EPOCH)]
            return DataLoader(batches, batch_size=None)

        def training_step(self, data, index):
            self.scales.append(self.trainer.precision_plugin.loss_scale)
            x, y = data
            loss = nn.functional.mse_loss(self.model(x).float(), y.float())
            self.losses.append(loss.detach())
            return loss

        def on_after_backward(self):
            step = self.trainer.fit_loop.epoch_loop.total_batch_idx
            if step == OVERFLOWS and dist.get_rank() == dist.get_world_size() - 1:
                spoil(self.model.down.weight.grad)

        def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
            (whole,) = self.trainer.precision_plugin.main_params(optimizer)
            self.norms.append(float(torch.linalg.vector_norm(whole.grad)))
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

        def configure_optimizers(self):
            optimizer = sgd(self.parameters())
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

        def on_train_epoch_end(self):
            if self.save is not None and self.trainer.current_epoch == 0:
                self.trainer.save_checkpoint(self.save)

    return Module


def model_parallel(data, tensor, **options):
    strategy = lightning().strategies.ModelParallelStrategy
    return strategy(data_parallel_size=data, tensor_parallel_size=tensor, **options)


def fit(module, mode, strategy, devices, *, ckpt_path=None, plugin=None, **options):
    """Train ``module``; the Trainer, whose plugin has the ``mode``."""
    plugin = plugin or TrainerPrecision(mode)
    defaults = {"max_epochs": 2, "reload_dataloaders_every_n_epochs": 1, "gradient_clip_val": MAX_NORM}
    with warnings.catch_warnings(), mock.patch.dict(os.environ):  # from which Lightning takes WORLD_SIZE
        warnings.filterwarnings("ignore", module=r"lightning|torch\.distributed")  # of Lightning's, about the machine
        warnings.filterwarnings("ignore", message=".*(num_workers|available but not used|isinstance.treespec).*")
        trainer = lightning().Trainer(plugins=plugin, strategy=strategy, devices=devices, **QUIET | defaults | options)
        trainer.fit(module, ckpt_path=ckpt_path)
    return trainer


def averaged(losses):
    """The losses of the whole batches, from those of each rank."""
    total = torch.stack(losses).double()
    dist.all_reduce(total)
    return (total / dist.get_world_size()).tolist()
