"""What the tests of other trainers share: plain torch's training of a small model, how far a run is from it.

One step of a run overflows, on one rank; the plain training leaves it out.
"""

import sys
import warnings
from contextlib import contextmanager

import small_mlp
import torch
from reference import whole
from torch import nn
from torch.utils.data import TensorDataset

SCALE, LR, STEPS, MAX_NORM = 1024.0, 0.2, 6, 0.5
INF = float("inf")
ROUNDING = {"fp16": 2.0**-11, "bf16": 2.0**-8, "fp32": 2.0**-20, "no": 2.0**-20}  # fp32's of a sum
UNITS = 24
"""Rounding errors by which a loss, a norm or a weight's way may differ."""


def spoil(gradient, place=0):
    """Make one element infinite, of this rank's part."""
    getattr(gradient, "_local_tensor", gradient).view(-1)[place] = INF


def in_plain_torch(build=small_mlp.build, *, overflow=3, decay=1.0):
    """Losses, norms before clipping, and weights, in fp32 and one process; the step ``overflow`` has no norm."""
    model = build()
    optimizer = sgd(model.parameters())
    losses, norms = [], []
    for step in range(STEPS):
        x, y = small_mlp.batch(step)
        optimizer.param_groups[0]["lr"] = LR * decay**step  # also counts the step that is left out
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        losses.append(loss.item())
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        if step == overflow:
            norms[-1] = INF
            continue
        optimizer.step()
    return losses, norms, {name: value.detach() for name, value in model.named_parameters()}


def check_weights(found, expected, start, rounding, *, least=0.0):
    """Each weight has gone the way of the expected one, and is at least ``least`` of it apart."""
    for name, value in expected.items():
        first = start[name].detach()
        way = value.detach() - first
        apart = (whole(found[name]).detach().float() - first - way).norm() / way.norm()
        assert least <= apart < UNITS * rounding, (name, apart)


# --------------------------------------------------------------------------------------- a classifier of three classes


def classifier(seed=5):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 3))


def samples(count=40, seed=9):
    x = torch.randn(count, 6, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, x[:, :3].argmax(1))


def in_batches(size, dataset=None):
    return list(zip(*(part.split(size) for part in (dataset or samples()).tensors), strict=True))


def sgd(parameters, lr=LR):
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)


def plain_epochs(epochs, make=sgd, *, rates=None, clip=None, criterion=nn.functional.cross_entropy, accumulate=1):
    """Plain torch's training of the classifier in fp32, on lists of batches; after each the model, and the mean loss.

    ``rates``: the learning rate of each.
    """
    model = classifier()
    optimizer = make(model.parameters(), lr=LR)
    for index, batches in enumerate(epochs):
        if rates is not None:
            optimizer.param_groups[0]["lr"] = rates[index]
        losses = []
        for number, (x, y) in enumerate(batches, 1):
            loss = criterion(model(x), y)
            (loss / accumulate).backward()
            losses.append(loss.item())
            if number % accumulate == 0:
                if clip is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                optimizer.zero_grad()
        yield model, sum(losses) / len(losses)


def check_classifier(found, expected, rounding=ROUNDING["fp16"], least=1e-5):
    """The weights ``found`` are nearly those of the model ``expected``."""
    found = {name.removeprefix("module."): value for name, value in found.items()}
    expected, start = (dict(model.named_parameters()) for model in (expected, classifier()))
    check_weights(found, expected, start, rounding, least=least)


# ------------------------------------------------------------------------------------------------------------- packages


@contextmanager
def quiet():
    """Without the warnings of another library's own code, most of them about the machine."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def hide(monkeypatch, package, *also):
    """Importing ``package`` fails, also where another test has imported it."""
    for name in [name for name in sys.modules if name == package or name.startswith(f"{package}.")]:
        monkeypatch.delitem(sys.modules, name)
    for name in (package, *also):
        monkeypatch.setitem(sys.modules, name, None)
