"""The loss over a loader: each sample once, whatever the batches, the layout and the microbatches."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from beside_plain import randn, seeded
from layouts import layouts
from loader_workers import WORKERS
from pool import on_ranks
from small_engines import engine_of
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

import paramp

SAMPLES = 11
X, Y = randn(2, SAMPLES, 4, seed=3)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(zip(X, Y, strict=True))


def counted(output, target):
    """The mean over positive targets, of which each sample has another number."""
    mask = target > 0
    return ((output - target).square() * mask).sum(), mask.sum()


class Wrapped:
    """What begins to iterate when it is iterated over itself, as tqdm does."""

    def __init__(self, loader):
        self.loader = loader

    def __iter__(self):
        yield from self.loader


def loader_for(name, context):
    own = slice(context.dp.rank, None, context.dp.size)
    if name == "list":  # of the user's own: the last data rank has a batch less
        sizes = [5, 1] if context.dp.rank == 0 else [5]
        return list(zip(X[own].split(sizes), Y[own].split(sizes), strict=True)) if context.dp.size > 1 else [(X, Y)]
    options = {"batch_size": 4, "shuffle": name == "shuffled"}
    if name == "sampler":
        options["sampler"] = DistributedSampler(X, context.dp.size, context.dp.rank)
    return DataLoader(Stream() if name == "stream" else TensorDataset(X, Y), **options)


class KeepingDropoutOff(nn.Sequential):
    def train(self, mode=True):
        super().train(mode)
        self[2].eval()
        return self


def build():
    return KeepingDropoutOff(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 4))


LAYOUTS = layouts("dp2, fsdp2, tp2, pp2", microbatches=4)
LAYOUTS["zbv"] = {"pipeline": {"size": 2, "microbatches": 4, "schedule": "zbv"}}


@pytest.mark.parametrize("parallel", LAYOUTS.values(), ids=LAYOUTS)
@on_ranks(2)
def test_the_loss_of_a_loader_is_the_mean_over_its_samples(world, parallel):
    """4 + 4 + 3 samples over two data ranks are 6 and 5; over four microbatches 3 are fewer than one each.

    It leaves modes of modules, random numbers and gradients as they were. A step can follow one in inference mode.
    """
    plain = seeded(build).eval()
    with torch.no_grad():
        means, (total, count) = F.mse_loss(plain(X), Y), counted(plain(X), Y)
    for name in ("plain", "shuffled", "stream", "sampler", "list"):
        with paramp.launch_from_torch({"parallel": parallel}) as context:
            for criterion, expected in ((F.mse_loss, means), (counted, total / count)):
                mine = seeded(build)
                mine[1].eval()
                engine, _, loader, _ = paramp.initialize(
                    mine,
                    torch.optim.SGD(mine.parameters(), lr=0.1),
                    criterion,
                    None,
                    loader_for(name, context),
                    plan={"0": "colwise", "3": "rowwise"} if context.tp.size > 1 else None,
                )
                before = [module.training for module in engine.module.modules()], torch.get_rng_state().tolist()
                for given, guard in ((loader, torch.inference_mode), (Wrapped(loader), nullcontext)):
                    with guard():
                        torch.testing.assert_close(engine.evaluate(given), expected, rtol=1e-5, atol=0)
                assert ([one.training for one in engine.module.modules()], torch.get_rng_state().tolist()) == before
                assert not any(one.grad is not None and one.grad.any() for one in engine.parameters())
                if name in ("shuffled", "sampler"):  # a later iteration fills the last round again
                    assert sum(len(x) for x, _ in loader) * context.dp.size == SAMPLES + (context.dp.size - 1)
                engine.forward_backward(X[:8], Y[:8])
                assert engine.step().stepped
                engine.train()
                assert all(one.training != isinstance(one, nn.Dropout) for one in engine.module.modules())


def test_a_sum_counts_once_where_its_count_is_0():
    """Such as a regulariser's, where the mask leaves nothing of a batch."""
    with paramp.launch_from_torch():
        engine = engine_of(build(), lambda output, target: (1 + 0 * output.sum(), (target > 0).sum()))
        assert engine.evaluate([(X, torch.ones(SAMPLES, 4)), (X, torch.zeros(SAMPLES, 4))]) == 2 / (4 * SAMPLES)


LOADERS = {
    "shuffled": {"dataset": TensorDataset(X, Y), "shuffle": True},
    "stream": {"dataset": Stream()},
    "sampler": {"dataset": TensorDataset(X, Y), "sampler": DistributedSampler(X, 1, 0)},
    "workers": {
        "dataset": TensorDataset(X, Y),
        "shuffle": True,
        "num_workers": 1,
        "persistent_workers": True,
        **WORKERS,
    },
}


@pytest.mark.parametrize("name", LOADERS)
@on_ranks(1)
def test_evaluating_the_training_loader_leaves_its_position_as_it_was(world, name):
    """Before, between, in and after epochs, after a load, and beside an iterator that is not used yet."""
    with paramp.launch_from_torch():

        def make():
            model = seeded(build)
            options = torch.optim.SGD(model.parameters(), lr=0.1), F.mse_loss
            return paramp.initialize(model, *options, DataLoader(batch_size=2, **LOADERS[name]))[:2]

        def read(batches):
            return [x.tolist() for x, _ in batches]

        expected = [read(loader) for loader in make()[1:] for _ in range(3)]
        engine, loader = make()
        whole = F.mse_loss(seeded(build).eval()(X), Y).detach()

        def evaluate():
            before = loader.epoch, loader.state_dict()
            for given in (loader, Wrapped(loader))[name == "workers" :]:  # whose processes start anew in each
                torch.testing.assert_close(engine.evaluate(given), whole, rtol=1e-5, atol=0)
            assert (loader.epoch, loader.state_dict()) == before

        evaluate()
        batches = iter(loader)
        evaluate()
        found = []
        for x, _ in batches:
            found.append(x.tolist())
            if name != "workers" or len(found) == 2:
                evaluate()
        assert found == expected[0]
        evaluate()
        assert read(loader) == expected[1]
        for epoch, given in ((1, 4), (2, 8)):
            loader.load_state_dict({"epoch": epoch, "given": given})
            evaluate()
            iter(loader)  # and again: it was not used
            evaluate()
            assert read(loader) == expected[epoch][given // 2 :]


@on_ranks(4)
def test_data_ranks_that_shard_parameters_run_as_many_batches(world):
    """One of them has a batch of two samples, the other one of three."""
    with paramp.launch_from_torch({"parallel": {"pipeline": {"size": 2}, "data": {"shard": 2}}}) as context:
        model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
        expected = F.mse_loss(model(X[:5]), Y[:5]).detach()
        engine = engine_of(model)
        mine = [slice(0, 2)] if context.dp.rank == 0 else [slice(2, 5)]
        torch.testing.assert_close(engine.evaluate([(X[own], Y[own]) for own in mine]), expected)
        with pytest.raises(paramp.ConfigError, match="loader: yielded no batch on data rank 1, expected at least one"):
            engine.evaluate([(X[:2], Y[:2])] * (1 - context.dp.rank))


def broken(rank):
    yield X[:4], Y[:4]
    if rank == 1:
        raise ArithmeticError("unreadable")
    yield X[:4], Y[:4]


@on_ranks(2)
def test_what_a_loader_lacks_is_an_error_on_every_rank(world):
    good = X[:4], Y[:4]
    cases = [
        (paramp.ConfigError, "loader: yielded no batch", iter([])),
        (paramp.ConfigError, "loader: 1 of the 2 ranks of data rank 0's .* a batch 1", [good] * (1 + world.rank)),
        (paramp.ConfigError, "loader: yielded tuple of 3, expected a pair", [(*good, X)]),
        ((ArithmeticError, RuntimeError), "unreadable", broken(world.rank)),
        ((ValueError, RuntimeError), "mat1 and mat2", [good, (X[:4, :3], Y[:4])]),
        (ValueError, r"target: got shape \(3, 4\), expected 4 samples", [good, (X[:4], Y[:3])]),
    ]
    with paramp.launch_from_torch({"parallel": {"pipeline": 2}}):
        engine = engine_of(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)))
        for kind, message, loader in cases:
            with pytest.raises(kind, match=message):
                engine.evaluate(loader)
        assert engine.evaluate([good]) == engine.evaluate(*good)
