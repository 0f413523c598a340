"""torchtitan's own ``Trainer`` on CPUs over gloo, with a tiny Llama 3 and random tokens.

It runs torchtitan 0.3.0, which is written for a GPU and for a torch after 2.13. What is put in its place here, and why:

- The device module: on a machine without an accelerator torchtitan takes ``torch.cuda``, whose ``set_device`` fails.
- ``torch.distributed.set_timeout``, which torch 2.13 lacks.
- A pipeline schedule's ``step`` with microbatches (``arg_mbs=...``), where torch's takes whole batches only (2.13).
- FSDP's sum without a factor: gloo has no ``PREMUL_SUM``.
- The attention: flex attention is compiled, and slow on CPUs.
- Tokenizer and data set: files that its wheel lacks. Of the labels, each data rank leaves another number out.
"""

import dataclasses
import functools
import importlib
import inspect
import types
import warnings
import zlib
from dataclasses import dataclass
from typing import get_args, get_type_hints

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import distribute_tensor

VOCABULARY = 256
LAYOUTS = {
    "dp_shard": {"data_parallel_shard_degree": 2},
    "dp_replicate": {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 1},
    "tp": {"tensor_parallel_degree": 2},
    "pp": {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "1F1B"},
    "cp": {"context_parallel_degree": 2},
    "dp_shard·cp": {"context_parallel_degree": 2, "data_parallel_shard_degree": 2},
    "tp·cp": {"context_parallel_degree": 2, "tensor_parallel_degree": 2},
    "pp·cp": {"context_parallel_degree": 2, "pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "1F1B"},
}
WHOLE = {
    "cp": LAYOUTS["tp"],
    "dp_shard·cp": {**LAYOUTS["dp_shard"], **LAYOUTS["tp"]},
    "tp·cp": {"tensor_parallel_degree": 4},
    "pp·cp": {**LAYOUTS["pp"], **LAYOUTS["tp"]},
}
"""The layouts with the same batches in place of those that cut sequences, which torchtitan does not have on CPUs."""


def ranks_of(layout):
    """How many ranks the ``layout`` has."""
    return 4 if "·" in layout else 2


def needs_torchtitan():
    """Skip the test where torchtitan is not installed."""
    pytest.importorskip(
        "torchtitan", reason='torchtitan is not installed: pip install "paramp[torchtitan]"', exc_type=ImportError
    )


@functools.cache
def prepare(device: str) -> None:
    """Put in torchtitan and in torch what is missing, and import torchtitan for ``device``, ``"cpu"`` or ``"cuda"``."""
    if device == "cpu":  # before anything else of torchtitan is imported
        stand_in = types.ModuleType("torch.cpu with what torchtitan asks of a GPU")
        for name in ("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats"):
            setattr(stand_in, name, lambda *_: None)
        properties = types.SimpleNamespace(total_memory=2**34)
        values = {"current_device": 0, "get_device_name": "CPU", "get_device_properties": properties}
        for name, value in (values | {"memory_stats": {}, "is_available": False}).items():
            setattr(stand_in, name, lambda *_, value=value: value)
        utils = importlib.import_module("torchtitan.tools.utils")
        utils.device_type, utils.device_module = "cpu", stand_in
    if not hasattr(dist, "set_timeout"):
        dist.set_timeout = lambda timeout, group=None: None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's compiler, which torchtitan imports
        importlib.import_module("torchtitan.models.llama3.config_registry")
    from torch.distributed.pipelining import schedules

    for kind in (schedules.PipelineScheduleSingle, schedules.PipelineScheduleMulti):
        if "arg_mbs" not in inspect.signature(kind.step).parameters:
            kind.step = taking_microbatches(kind.step)


def taking_microbatches(step):
    """``step`` of a pipeline, which other tests call in this process too, also with torchtitan's arguments: what later
    versions of torch have, a step over microbatches that are there already."""

    @functools.wraps(step)
    def either(self, *args, **kwargs):
        if "arg_mbs" not in kwargs:
            return step(self, *args, **kwargs)
        for stage in getattr(self, "_stages", None) or [self._stage]:
            stage.clear_runtime_states()
            stage.has_backward = True
        microbatches = [kwargs.pop(name) for name in ("arg_mbs", "kwarg_mbs", "target_mbs", "losses")]
        return self._step_microbatches(*microbatches, **kwargs)

    return either


def tiny_config(folder=None, chunked=True, backend="partial_dtensor", device="cpu", **layout):
    """torchtitan's configuration of its debug model, with :func:`tiny_llama` in its place."""
    prepare(device)
    from torchtitan.components.optimizer import default_adamw
    from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    config = llama3_debugmodel()
    model = config.model_spec.model = tiny_llama()
    config.loss.loss_fn.global_vocab_size = model.vocab_size
    for _, _, owner, name in list(model.traverse(FlexAttention.Config)):
        setattr(owner, name, ScaledDotProductAttention.Config())
    config.tokenizer, config.dataloader = components()
    config.activation_checkpoint = None
    config.validator.enable = False
    config.loss = config.loss if chunked else config.loss.loss_fn
    config.optimizer = default_adamw(lr=1e-3)
    config.optimizer.implementation = "for-loop"
    training = config.training
    training.seq_len, training.local_batch_size = 16, 4
    training.steps, training.max_norm = 6, 0.5
    training.disable_cuda_graphs = True
    config.lr_scheduler.warmup_steps, config.lr_scheduler.decay_ratio = 1, None
    config.debug.seed = 0
    for name, value in layout.items():
        setattr(config.parallelism, name, value)
    config.parallelism.spmd_backend = backend
    config.checkpoint.enable = folder is not None
    config.checkpoint.interval = 2
    config.dump_folder = str(folder or "unused")
    return config


def tiny_llama():
    """The configuration of a Llama 3 of two layers, so narrow that its products are quick in fp16 on a CPU."""
    from torchtitan.models.llama3 import _build_llama3_layers, llama3_configs

    width, num_heads = 64, 4
    model = llama3_configs["debugmodel"](attn_backend="flex")
    rope = dataclasses.replace(model.layers[0].attention.rope, dim=width // num_heads)
    sizes = {"n_layers": 2, "dim": width, "n_heads": num_heads, "hidden_dim": 2 * width}
    model.layers = _build_llama3_layers(**sizes, rope=rope, attn_backend="flex")
    model.dim, model.vocab_size = width, VOCABULARY
    model.norm.normalized_shape = model.lm_head.in_features = model.tok_embeddings.embedding_dim = width
    model.lm_head.out_features = model.tok_embeddings.num_embeddings = VOCABULARY
    return model


def has_backend(name):
    """Whether this torchtitan has the ``spmd_backend`` called ``name``."""
    from torchtitan.config import ParallelismConfig

    return name in get_args(get_type_hints(ParallelismConfig)["spmd_backend"])


def build(config):
    """The trainer of ``config``; where gradients are summed, gloo can do it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "DTensor .* may not have complete support on cpu")
        trainer = config.build()
    for part in trainer.model_parts:
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
    trainer.logged = []
    trainer.metrics_processor.logger.log = lambda metrics, step: trainer.logged.append(metrics)
    return trainer


def fill(trainer):
    """Give the weights values that do not depend on the layout; ``trainer`` again."""
    for part in trainer.model_parts:
        for name, weight in part.named_parameters():
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            value = 0.02 * torch.randn(weight.shape, generator=generator) + (weight.ndim == 1)
            with torch.no_grad():
                weight.copy_(distribute_tensor(value, weight.device_mesh, weight.placements, src_data_rank=None))
    return trainer


def resume(trainer):
    """Load the newest checkpoint, as ``trainer.train()`` does first."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "To get the last learning rate")  # of torchtitan's schedule
        assert trainer.checkpointer.load(step=-1)


def train(trainer, num_steps):
    """The first ``num_steps`` of ``trainer.train()``; returns the metrics that torchtitan logged."""
    batches = trainer.batch_generator(trainer.dataloader)
    for _ in range(num_steps):
        trainer.step += 1
        trainer.train_step(batches)
    return trainer.logged[-num_steps:]


@functools.cache
def components():
    """The configurations of a tokenizer without a file and of random tokens."""
    from torchtitan.components.tokenizer import BaseTokenizer
    from torchtitan.trainer import BaseDataLoader

    class Tokenizer(BaseTokenizer):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseTokenizer.Config):
            pass

        def __init__(self, config, *, tokenizer_path=None):
            super().__init__()

        def encode(self, *args, **kwargs):
            return []

        def decode(self, *args, **kwargs):
            return ""

        def get_vocab_size(self):
            return VOCABULARY

    class Tokens(BaseDataLoader):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseDataLoader.Config):
            infinite: bool = True  # for torchtitan's validation

        def __init__(self, config, *, dp_rank, seq_len, local_batch_size, **_):
            self.shape, self.place, self.count = (local_batch_size, seq_len + 1), dp_rank, 0

        def __iter__(self):
            while True:
                generator = torch.Generator().manual_seed(100 * self.count + self.place)
                self.count += 1
                tokens = torch.randint(0, VOCABULARY, self.shape, generator=generator)
                labels = tokens[..., 1:].clone()
                labels[..., : 3 + 2 * self.place] = -100  # left out of the loss: ranks have other numbers of labels
                yield {"input": tokens[..., :-1].contiguous()}, labels

        def state_dict(self):
            return {"count": self.count}

        def load_state_dict(self, state):
            self.count = state["count"]

    return Tokenizer.Config(), Tokens.Config()
