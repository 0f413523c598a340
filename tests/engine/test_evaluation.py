"""The loss over a loader: each sample once, whatever the batches, the layout and the microbatches."""

import pytest
import torch
import torch.nn.functional as F
from pool import on_ranks
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import paramp

SAMPLES = 11
X, Y = torch.randn(2, SAMPLES, 4, generator=torch.Generator().manual_seed(3))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(zip(X, Y, strict=True))


def counted(output, target):
    """The mean over positive targets, of which each sample has another number."""
    mask = target > 0
    return ((output - target).square() * mask).sum(), mask.sum()


def loader_for(name, context):
    own = slice(context.dp.rank, None, context.dp.size)
    if name == "list":  # of the user's own: the last data rank has a batch less
        sizes = [5, 1] if context.dp.rank == 0 else [5]
        return list(zip(X[own].split(sizes), Y[own].split(sizes), strict=True)) if context.dp.size > 1 else [(X, Y)]
    return DataLoader(Stream() if name == "stream" else TensorDataset(X, Y), batch_size=4, shuffle=name == "shuffled")


LAYOUTS = {
    "dp2": {},
    "fsdp2": {"data": {"shard": 2}},
    "tp2": {"tensor": 2},
    "pp2": {"pipeline": {"size": 2, "microbatches": 4}},
    "zbv": {"pipeline": {"size": 2, "microbatches": 4, "schedule": "zbv"}},
}


@pytest.mark.parametrize("parallel", LAYOUTS.values(), ids=LAYOUTS)
@on_ranks(2)
def test_the_loss_of_a_loader_is_the_mean_over_its_samples(world, parallel):
    """4 + 4 + 3 samples over two data ranks are 6 and 5; over four microbatches 3 are fewer than one each."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 4))
    plain = model.eval()
    with torch.no_grad():
        means, (total, count) = F.mse_loss(plain(X), Y), counted(plain(X), Y)
    model.train()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    for criterion, expected in ((F.mse_loss, means), (counted, total / count)):
        for name in ("plain", "shuffled", "stream", "list"):
            with paramp.launch_from_torch({"parallel": parallel}) as context:
                mine = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 4))
                mine.load_state_dict(state)
                engine, _, loader, _ = paramp.initialize(
                    mine,
                    torch.optim.SGD(mine.parameters(), lr=0.1),
                    criterion,
                    None,
                    loader_for(name, context),
                    plan={"0": "colwise", "3": "rowwise"} if context.tp.size > 1 else None,
                )
                found = engine.evaluate(loader)
                torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
                assert engine.module.training
                if name == "shuffled":  # a later iteration fills the last round again
                    assert sum(len(x) for x, _ in loader) * context.dp.size == SAMPLES + (context.dp.size - 1)


@on_ranks(4)
def test_data_ranks_that_shard_parameters_run_as_many_batches(world):
    """Of four samples in microbatches of two, two and one: the data ranks run one, two and, at first, no parts."""
    with paramp.launch_from_torch({"parallel": {"pipeline": {"size": 2}, "data": {"shard": 2}}}) as context:
        model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
        expected = F.mse_loss(model(X[:5]), Y[:5]).detach()
        engine, *_ = paramp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), F.mse_loss)
        mine = [slice(0, 2)] if context.dp.rank == 0 else [slice(2, 5)]
        torch.testing.assert_close(engine.evaluate([(X[own], Y[own]) for own in mine]), expected)
        with pytest.raises(paramp.ConfigError, match="loader: yielded no batch on data rank 1, expected at least one"):
            engine.evaluate([(X[:2], Y[:2])] * (1 - context.dp.rank))


class Broken(Dataset):
    def __init__(self, rank):
        self.rank = rank

    def __len__(self):
        return 8

    def __getitem__(self, index):
        if index == 5 and self.rank == 1:
            raise ArithmeticError("unreadable")
        return X[index], Y[index]


@on_ranks(2)
def test_what_a_loader_lacks_is_an_error_on_every_rank(world):
    with paramp.launch_from_torch({"parallel": {"pipeline": 2}}) as context:
        model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
        engine, *_ = paramp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), F.mse_loss)
        batch = X[:4], Y[:4]
        with pytest.raises(paramp.ConfigError, match="loader: yielded no batch"):
            engine.evaluate(iter([]))
        with pytest.raises(
            paramp.ConfigError, match="loader: 1 of the 2 ranks of data rank 0's model group have a batch 1"
        ):
            engine.evaluate([batch] * (1 + context.rank))
        with pytest.raises(paramp.ConfigError, match=r"loader: yielded tuple of 3, expected a pair"):
            engine.evaluate([(*batch, X)])
        with pytest.raises((ArithmeticError, RuntimeError), match="unreadable"):
            engine.evaluate(DataLoader(Broken(context.rank), batch_size=4))
        with pytest.raises((ValueError, RuntimeError), match=r"mat1 and mat2"):
            engine.evaluate([batch, (X[:4, :3], Y[:4])])
        with pytest.raises(ValueError, match=r"target: got shape \(3, 4\), expected 4 samples"):
            engine.evaluate([batch, (X[:4], Y[:3])])
        assert engine.evaluate([batch]) == engine.evaluate(*batch)
