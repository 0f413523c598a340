"""A small GPT, its batches, and the plain single-process loop that sharded runs are compared with."""

from __future__ import annotations

import torch

from paramp.models import GPT, GPTConfig

SMALL = GPTConfig(num_layers=4, num_heads=4, width=32, max_seq_len=16, vocab_size=120)


def small_gpt(seed: int = 7, **changes: object) -> GPT:
    from dataclasses import replace

    torch.manual_seed(seed)
    model = GPT(replace(SMALL, **changes))
    with torch.no_grad():  # norms and biases that do nothing would hide mistakes in their gradients
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def batches(count: int, size: int = 8, seed: int = 3, vocab: int = 120, length: int = 16):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        tokens = torch.randint(0, vocab, (size, length + 1), generator=generator)
        yield tokens[:, :-1], tokens[:, 1:]


def rank_slice(tensor: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    return tensor.chunk(size)[rank]


def plain_fp32_training(steps: int, lr: float = 1e-3, clip: float | None = 1.0):
    """Losses and final weights of an ordinary torch loop, without any paramp."""
    model = small_gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    losses = []
    for x, y in batches(steps):
        optimizer.zero_grad()
        logits = model(x)
        loss = torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), y.reshape(-1))
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: value.detach().clone() for name, value in model.state_dict().items()}
