"""Scripts in the shape of Composer's documents, after the changes that docs/from-composer.md names, on two ranks."""

from functools import partial

import pytest
import torch
from pool import on_ranks
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from trainer_runs import check_classifier, classifier, in_batches, plain_epochs, samples, sgd

import paramp
from paramp.compat.composer.algorithms import LowPrecisionLayerNorm

EPOCHS, CLIP = 2, 0.5
smoothed = partial(cross_entropy, label_smoothing=0.1)


def plain():
    """Plain torch in fp32 on batches of both ranks."""
    *_, (model, _) = plain_epochs([in_batches(8)] * EPOCHS, clip=CLIP, criterion=smoothed)
    return model


@on_ranks(2)
def test_a_loop_in_place_of_the_trainer(world):
    """Trainer(precision="amp_bf16", algorithms=[...], max_duration="2ep", eval_interval="1ep")."""
    with paramp.launch_from_torch({"precision": "amp_bf16", "clip_grad_norm": CLIP, "seed": 17}):
        model = classifier()
        loaders = [DataLoader(samples(), batch_size=4) for _ in ("train", "eval")]
        criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
        engine, train_loader, eval_loader, _ = paramp.initialize(
            model, sgd(model.parameters()), criterion, *loaders, algorithms=[LowPrecisionLayerNorm()]
        )
        assert type(engine.module[1]).__name__ == "LPLayerNorm"
        for _ in range(EPOCHS):
            for x, y in train_loader:
                engine.forward_backward(x, y)
                engine.step()
        losses = torch.stack([engine.evaluate(x, y) for x, y in eval_loader])
        expected = plain()
        check_classifier(engine.full_state_dict(), expected, 2.0**-8)
        x, y = samples().tensors
        assert losses.mean().item() == pytest.approx(smoothed(expected(x), y).item(), rel=2.0**-6)
