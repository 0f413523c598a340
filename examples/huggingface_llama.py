"""A small random Llama of the transformers library, tensor-parallel and pipelined by its own plans, in fp16.

python examples/huggingface_llama.py                                            one process
torchrun --standalone --nproc-per-node 4 examples/huggingface_llama.py 2 2      tensor 2 x pipeline 2

It learns the bytes of this file. Needs pip install "paramp[hf]".
"""

import sys
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from transformers.models.llama import LlamaConfig, LlamaForCausalLM

import paramp

tensor, pipeline = (int(argument) for argument in sys.argv[1:] or ("1", "1"))
config = {"parallel": {"tensor": tensor, "pipeline": pipeline}, "precision": "16-mixed", "clip_grad_norm": 1.0}
shape = LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)
text = torch.tensor(list(Path(__file__).read_bytes()))


def loss_of(output: Any, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy in nats per byte of the logits (batch, sequence, 256) in the model's output."""
    return F.cross_entropy(output.logits.flatten(0, 1), targets.flatten())


with paramp.launch_from_torch(config) as context:
    model = LlamaForCausalLM(shape)
    engine, *_ = paramp.initialize(model, lambda weights: torch.optim.AdamW(weights, lr=5e-4), loss_of)
    for step in range(1, 21):
        generator = torch.Generator().manual_seed(step * context.dp.size + context.dp.rank)  # this data rank's samples
        starts = torch.randint(len(text) - 64, (8,), generator=generator)
        batch = torch.stack([text[start : start + 65] for start in starts.tolist()])
        loss = engine.forward_backward(batch[:, :-1], batch[:, 1:])
        result = engine.step()
        engine.zero_grad()
        if context.is_main and step % 5 == 0:
            print(f"step {step}: loss {loss.item():.4f}, grad norm {result.grad_norm:.3f}, scale {result.loss_scale:g}")
