"""Batches whose sequences the context axis cuts."""

import torch

BATCH, LENGTH = 4, 32


def cut_batches(kind, steps, lowest=1, length=LENGTH):
    """Tokens and labels; those with a loss are unequally many in the parts of a sequence, and some parts have none.

    With the ``kind`` "packed" each sequence has two or three documents.
    """
    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        tokens = torch.randint(lowest, 100, (BATCH, length), generator=generator)
        labels = tokens.clone()
        labels[:, : 5 + step % 3] = labels[1, 10:] = -100
        batch = {"input_ids": tokens, "labels": labels}
        if kind == "packed":
            positions = torch.arange(length).repeat(BATCH, 1)
            positions[:, 11:] -= 11
            positions[1, 20:] -= 9
            batch["position_ids"] = positions
        yield batch
