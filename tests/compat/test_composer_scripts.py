"""Scripts in the shape of Composer's documents, after the changes that docs/from-composer.md names, on two ranks."""

import pytest
import torch
from pool import on_ranks
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import paramp
from paramp.compat.composer import functional as cf
from paramp.compat.composer.algorithms import LowPrecisionLayerNorm

EPOCHS, LR, CLIP = 2, 0.2, 0.5


def network():
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 3))


def samples():
    x = torch.randn(48, 6, generator=torch.Generator().manual_seed(9))
    return TensorDataset(x, x[:, :3].argmax(1))


def plain(batch):
    """Plain torch in fp32: the weights, and the loss of the whole data at the end."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    for _ in range(EPOCHS):
        for x, y in DataLoader(samples(), batch_size=batch):
            optimizer.zero_grad()
            cross_entropy(model(x), y, label_smoothing=0.1).backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
    x, y = samples().tensors
    return dict(model.named_parameters()), cross_entropy(model(x), y, label_smoothing=0.1)


def check(found, expected):
    for name, first in network().named_parameters():
        way = (expected[name] - first).norm()
        assert 1e-5 * way < (found[name] - expected[name]).norm() < 24 * 2.0**-8 * way, name


@on_ranks(2)
def test_a_loop_in_place_of_the_trainer(world):
    """Trainer(precision="amp_bf16", algorithms=[...], max_duration="2ep", eval_interval="1ep")."""
    with paramp.launch_from_torch({"precision": "amp_bf16", "clip_grad_norm": CLIP, "seed": 17}):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
        loaders = [DataLoader(samples(), batch_size=4) for _ in ("train", "eval")]
        criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
        engine, train_loader, eval_loader, _ = paramp.initialize(
            model, optimizer, criterion, *loaders, algorithms=[LowPrecisionLayerNorm()]
        )
        assert type(engine.module[1]).__name__ == "LPLayerNorm"
        for _ in range(EPOCHS):
            for x, y in train_loader:
                engine.forward_backward(x, y)
                engine.step()
        losses = torch.stack([engine.evaluate(x, y) for x, y in eval_loader])
        weights, loss = plain(8)
        check(engine.full_state_dict(), weights)
        assert losses.mean().item() == pytest.approx(loss.item(), rel=2.0**-6)


@on_ranks(2)
def test_the_functional_loop_under_data_parallelism(world):
    """composer.functional in a loop of one's own, with torch's autocast and DistributedDataParallel around it."""
    model = network()
    assert cf.apply_low_precision_layernorm(model, precision="amp_bf16") == 1
    model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    for _ in range(EPOCHS):
        for x, y in DataLoader(samples(), batch_size=8):
            x, y = x.chunk(2)[world.rank], y.chunk(2)[world.rank]
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = cross_entropy(model(x), y, label_smoothing=0.1)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
    check(dict(model.module.named_parameters()), plain(8)[0])


@pytest.mark.parametrize(
    ("module", "name", "instead"),
    [
        ("composer", "Trainer", "paramp.initialize"),
        ("composer", "ComposerModel", "from-composer"),
        ("composer.functional", "apply_blurpool", "your own loop"),
        ("composer.algorithms", "EMA", "apply"),
    ],
)
def test_what_is_not_there_says_what_to_use(module, name, instead):
    with pytest.raises(ImportError, match=f"has no {name}: .*{instead}"):
        exec(f"from paramp.compat.{module} import {name}")
