"""The user's own loaders over the data axis: every sample once, the same in a model group, as many batches on all."""

import copy
import itertools
import math
import random
from contextlib import nullcontext
from functools import partial
from unittest import mock

import pytest
import torch
from families import rarely
from loader_workers import WORKERS
from pool import on_ranks
from reference import batches, plain_fp32_training, small_gpt
from small_engines import everywhere
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

import paramp
from paramp import ConfigError
from paramp.data.dataloader import num_repeated, shard_loader, shard_loaders


def few_cores(test):
    """For tests with workers, on machines with fewer cores than those."""
    return pytest.mark.filterwarnings("ignore:This DataLoader will create")(test)


class Numbers(Dataset):
    """The whole numbers, each with a random one, as an augmentation would draw it in a worker."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return index, int(torch.randint(10**9, ())) if get_worker_info() else 0


class Stream(IterableDataset):
    """The numbers, sharded over workers as torch's documentation does it."""

    def __init__(self, count):
        self.count = count

    def __iter__(self):
        worker = get_worker_info()
        return iter(range(worker.id if worker else 0, self.count, worker.num_workers if worker else 1))


class SizedStream(Stream):
    """One that knows how many numbers it has."""

    def __len__(self):
        return self.count


BLOCKS = [[0], [1, 2], [3, 4, 5], [6], [7, 8], [9, 10, 11], [12]]
"""Batches of a size that varies."""


class Shuffled(Sampler):
    """A sampler of the user's that draws from torch's default stream, one number at a time."""

    def __iter__(self):
        left = list(range(20))
        while left:
            yield left.pop(int(torch.randint(len(left), ())))

    def __len__(self):
        return 20


class Told(Shuffled):
    """One whose order is that of the epoch that it was told, as of a ``DistributedSampler``."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return order_of(self.epoch)


def order_of(epoch):
    return iter(torch.randperm(20, generator=torch.Generator().manual_seed(epoch)).tolist())


class Hidden(Told):
    """One that shards by itself, shows a count of its own as ``epoch``, and not what it was told."""

    num_replicas, rank = 1, 0

    def set_epoch(self, epoch):
        self.told = epoch

    def __iter__(self):
        self.epoch += 1
        return order_of(self.told)


class HiddenAtTheEnd(Hidden):
    """One that counts a pass once its last item was read."""

    def __iter__(self):
        yield from order_of(self.told)
        self.epoch += 1


class Once(Stream):
    """A data set or a sampler that is its own iterator, and used up by the first iteration."""

    def __init__(self, count):
        super().__init__(count)
        self.left = iter(range(count))

    def __iter__(self):
        return self.left


class SizedOnce(Once):
    """One that knows how many numbers it had."""

    def __len__(self):
        return self.count


def epoch(loader, count=None):
    """The first batches of an epoch, or all, as lists of numbers."""
    batches = (batch[0] if isinstance(batch, (list, tuple)) else batch for batch in loader)
    return [numbers.tolist() for numbers in itertools.islice(batches, count)]


def on_all(make, size, seed=5):
    """The loader of each of ``size`` data ranks, whose random numbers are in different states."""
    loaders = []
    for rank in range(size):
        torch.manual_seed(rank)
        loaders.append(shard_loader(make(), rank, size, seed))
    return loaders


def flat(found):
    return [number for batch in found for number in batch]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
def test_an_epoch_has_every_sample_once_and_equally_many_batches_on_all_ranks(size, shuffle, drop_last):
    loaders = on_all(lambda: DataLoader(Numbers(50), batch_size=4, shuffle=shuffle, drop_last=drop_last), size)
    orders = []
    for _ in range(2):
        found = [epoch(loader) for loader in loaders]
        assert [len(part) for part in found] == [len(loaders[0])] * size
        assert {len(batch) for part in found for batch in part[:-1]} == {4}
        assert len({len(part[-1]) for part in found}) == 1
        sharded = [number for round_ in zip(*map(flat, found), strict=True) for number in round_]
        if drop_last:
            assert len(sharded) == len(set(sharded)) == 50 // (4 * size) * 4 * size
        else:
            assert set(sharded) == set(range(50))
            assert len(sharded) == -(-50 // size) * size
            assert sharded[50:] == sharded[: len(sharded) - 50]  # filled up from the beginning
        if not shuffle:
            assert sharded[:48] == list(range(48))
        orders.append(sharded)
        assert sum(map(num_repeated, loaders)) == max(len(sharded) - 50, 0)
    assert (orders[0] != orders[1]) == shuffle


def test_fewer_samples_than_ranks_are_repeated():
    numbers, stream = on_all(lambda: DataLoader(Numbers(2)), 5), on_all(lambda: DataLoader(Stream(2)), 4)
    assert [epoch(loader) for loader in numbers] == [[[0]], [[1]], [[0]], [[1]], [[0]]]
    assert [epoch(loader) for loader in stream] == [[[0]], [[1]], [[0]], [[0]]]
    assert [epoch(loader) for loader in on_all(lambda: DataLoader(Stream(0)), 2)] == [[], []]


DROPPED = {"batch_size": 2000, "shuffle": True, "drop_last": True}
WITHOUT = [
    (
        Numbers(3000),
        DROPPED,
        "^batch_size 2000, but a data rank has 1500 samples, so drop_last leaves no.*at most 1500$",
    ),
    (Numbers(1), {"drop_last": True}, "its 1 samples do not fill a batch of 1 for each of 2 data"),
    *((empty, {}, "its dataset is empty; expected at least one sample") for empty in (Numbers(0), SizedStream(0))),
    (Numbers(0), {"drop_last": True}, "its dataset is empty"),
    (Numbers(0), {"batch_size": None}, "its dataset is empty"),
    (Numbers(4), {"sampler": SubsetRandomSampler([])}, "yields none of its dataset's 4 samples"),
    (SizedStream(4), {"batch_size": 4, "drop_last": True}, "4 samples do not fill a batch of 4 for"),
    (Numbers(9), {"batch_sampler": BatchSampler(range(9), 8, True)}, "^batch_size 8, but a data rank has 4 samples"),
    (Numbers(8), {"num_workers": 2, "in_order": False}, "in_order=False yields batches in the order in which work"),
]


@pytest.mark.parametrize(("dataset", "options", "message"), WITHOUT)
@few_cores
def test_a_loader_without_a_batch_for_a_rank_or_without_an_order_is_an_error(dataset, options, message):
    for rank in range(2):
        with pytest.raises(ConfigError, match=message):
            shard_loader(DataLoader(dataset, **options), rank, 2, 0)


def test_an_iteration_without_a_batch_is_not_silent():
    """Its end, and that of one without any left, is an end as before."""
    loader = shard_loader(DataLoader(range(8), batch_size=2, sampler=SizedOnce(8)), 0, 2, 5)
    batches = iter(loader)
    assert [len([*batches]) for _ in range(2)] == [2, 0]
    with pytest.raises(ConfigError, match="this iteration gave no batch; its sampler or dataset may be used up"):
        epoch(loader)
    stream = shard_loader(DataLoader(Once(8), batch_size=2), 0, 2, 5)
    assert len(epoch(stream)) == 2
    with pytest.warns(UserWarning, match="this iteration gave no batch"):
        assert epoch(stream) == []


@pytest.mark.parametrize(
    "sampler",
    [
        lambda: RandomSampler(Numbers(20)),
        lambda: RandomSampler(Numbers(20), replacement=True, num_samples=30),
        lambda: SubsetRandomSampler(range(3, 15)),
        lambda: WeightedRandomSampler([1.0, 5.0, 2.0] * 5, 40),
        lambda: RandomSampler(Numbers(20), generator=torch.Generator().manual_seed(random.randrange(10**6))),
        Shuffled,
    ],
)
def test_the_random_order_does_not_depend_on_the_ranks_random_state(sampler):
    def loader():
        return DataLoader(Numbers(20), batch_size=3, sampler=sampler())

    whole = shard_loader(loader(), 0, 1, 5)
    parts = on_all(loader, 2)
    for _ in range(2):
        torch.manual_seed(random.randrange(10**6))
        before = torch.get_rng_state()
        order = flat(epoch(whole))
        sharded = [flat(epoch(part)) for part in parts]
        assert [number for pair in zip(*sharded, strict=True) for number in pair][: len(order)] == order
        assert torch.equal(torch.get_rng_state(), before)
    assert flat(epoch(whole)) != order
    whole.sampler.set_epoch(1)
    assert flat(epoch(whole)) == order  # as after a resume
    assert flat(epoch(shard_loader(loader(), 0, 1, 6))) != flat(epoch(shard_loader(loader(), 0, 1, 5)))


def test_custom_batch_samplers_are_sharded_by_batch():
    loaders = on_all(lambda: DataLoader(Numbers(13), batch_sampler=BLOCKS), 2)
    assert [epoch(loader) for loader in loaders] == [
        [[0], [3, 4, 5], [7, 8], [12]],
        [[1, 2], [6], [9, 10, 11], [0]],  # filled up with the first
    ]
    assert [len(loader) for loader in loaders] == [4, 4]
    assert [num_repeated(loader) for loader in loaders] == [0, math.inf]
    explicit = on_all(lambda: DataLoader(Numbers(9), batch_sampler=BatchSampler(range(9), 2, drop_last=True)), 2)
    assert [epoch(loader) for loader in explicit] == [[[0, 2], [4, 6]], [[1, 3], [5, 7]]]
    single = on_all(lambda: DataLoader(Numbers(4), batch_size=None, collate_fn=lambda item: [item[0]]), 2)
    assert [list(loader) for loader in single] == [[[0], [2]], [[1], [3]]]


def test_the_users_loader_is_not_changed_and_the_copy_keeps_its_class():
    class Own(DataLoader):
        def __init__(self, name):
            super().__init__(Numbers(8), batch_size=2)
            self.name = name
            self.epoch = 7  # of its own meaning

    own = Own("mine")
    sharded = shard_loader(own, 1, 2, 5)
    assert isinstance(sharded, Own)
    assert (sharded.name, sharded.epoch, sharded.batch_size, sharded.dataset) == ("mine", 7, 2, own.dataset)
    assert epoch(own) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert epoch(sharded) == [[1, 3], [5, 7]]
    other = [1, 2]
    assert shard_loader(other, 1, 2, 5) is other
    assert shard_loader(None, 1, 2, 5) is None


@few_cores
@pytest.mark.parametrize("persistent", rarely([False, True], True))
def test_worker_seeds_are_equal_in_a_model_group_and_differ_between_data_ranks(persistent):
    def make():
        return DataLoader(Numbers(12), 2, shuffle=True, num_workers=2, persistent_workers=persistent, **WORKERS)

    torch.manual_seed(1)
    first = shard_loader(make(), 0, 2, 5)
    torch.manual_seed(2)
    twin, other = shard_loader(make(), 0, 2, 5), shard_loader(make(), 1, 2, 5)
    orders = []
    for _ in range(2):
        mine, same, theirs = ([torch.stack(batch, 1) for batch in loader] for loader in (first, twin, other))
        assert torch.equal(torch.cat(mine), torch.cat(same))
        assert set(torch.cat(mine)[:, 0].tolist()) | set(torch.cat(theirs)[:, 0].tolist()) == set(range(12))
        assert not set(torch.cat(mine)[:, 1].tolist()) & set(torch.cat(theirs)[:, 1].tolist())
        orders.append(torch.cat(mine)[:, 0].tolist())
    assert orders[0] != orders[1]


@few_cores
@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("drop_last", [False, True])
def test_iterable_datasets_are_sharded_by_batch(size, drop_last):
    loaders = on_all(lambda: DataLoader(SizedStream(14), batch_size=2, drop_last=drop_last), size)
    for _ in range(2):
        found = [epoch(loader) for loader in loaders]
        whole = [[index, index + 1] for index in range(0, 14, 2)]
        rounds = 7 // size if drop_last else -(-7 // size)
        assert [len(part) for part in found] == [len(loader) for loader in loaders] == [rounds] * size
        sharded = [batch for round_ in zip(*found, strict=True) for batch in round_]
        assert sharded[:7] == whole[: len(sharded)]
        assert all(batch == found[index % size][0] for index, batch in enumerate(sharded[7:], 7))  # filled up
    if size == 2 and not drop_last:
        loaders = on_all(lambda: DataLoader(Stream(24), 3, num_workers=2, persistent_workers=True, **WORKERS), 2)
        for _ in range(2):
            assert sorted(flat(batch for loader in loaders for batch in epoch(loader))) == list(range(24))


def test_samplers_that_shard_themselves_are_kept_or_refused():
    def loader(replicas, rank):
        sampler = DistributedSampler(Numbers(8), num_replicas=replicas, rank=rank, shuffle=False)
        return DataLoader(Numbers(8), batch_size=2, sampler=sampler)

    right = loader(2, 1)
    sharded = shard_loader(right, 1, 2, 5)
    assert sharded.sampler is right.sampler
    assert epoch(sharded) == [[1, 3], [5, 7]]
    odd = DistributedSampler(Numbers(9), num_replicas=2, rank=1)
    for drop_last in (False, True):  # dropped with the last batch
        for options in (
            {"batch_size": 2, "sampler": odd, "drop_last": drop_last},
            {"batch_sampler": BatchSampler(odd, 2, drop_last)},
        ):
            assert num_repeated(shard_loader(DataLoader(Numbers(9), **options), 1, 2, 5)) == (not drop_last)
    slots = type("Slots", (), {"__slots__": (), "num_replicas": 2, "rank": 1, "set_epoch": print, "__iter__": print})
    with pytest.raises(ConfigError, match="its Slots has __slots__, so that calls of its set_epoch cannot be seen"):
        shard_loader(DataLoader(Numbers(8), sampler=slots()), 1, 2, 5)
    for replicas, rank in ((4, 1), (2, 0)):
        message = rf"DistributedSampler gives samples to rank {rank} of {replicas}, but this is data rank 1 of 2"
        with pytest.raises(ConfigError, match=message):
            shard_loader(loader(replicas, rank), 1, 2, 5)
        hidden = DataLoader(Numbers(8), batch_sampler=BatchSampler(loader(replicas, rank).sampler, 2, False))
        with pytest.raises(ConfigError, match=message):
            shard_loader(hidden, 1, 2, 5)


def test_a_sampler_that_shards_itself_keeps_what_the_script_has_told_it_since_the_last_pass():
    sampler, told = DistributedSampler(Numbers(8), 1, 0), []
    loader = shard_loader(DataLoader(Numbers(8), sampler=sampler), 0, 1, 5)
    for number in (None, 7, 8, None, None, 9, 9):
        if number is not None:
            sampler.set_epoch(number)
        with loader.position.aside():  # an evaluation, which changes nothing
            flat(epoch(loader))
        flat(epoch(loader))
        told.append(sampler.epoch)
    assert told == [0, 7, 8, 3, 4, 9, 9]
    sampler.epoch = 5  # without a call
    flat(epoch(loader))
    assert sampler.epoch == 5
    sampler.epoch = 6
    with loader.position.aside():
        flat(epoch(loader))
    flat(epoch(loader))
    assert sampler.epoch == 6
    sampler.epoch = 7
    loader.load_state_dict({"epoch": 2, "given": 0})
    flat(epoch(loader))
    assert sampler.epoch == 2
    batches = iter(loader)
    next(batches)
    sampler.epoch = 9  # in a pass, for the next one
    assert len([*batches]) == 7
    flat(epoch(loader))
    assert sampler.epoch == 9
    for kind in (Hidden, HiddenAtTheEnd):  # their own count is no call of the script's
        own = kind()
        loader = shard_loader(DataLoader(Numbers(20), sampler=own), 0, 1, 5)
        assert [(epoch(loader), own.told)[1] for _ in range(3)] == [0, 1, 2]


def test_the_rest_of_an_epoch_has_the_number_that_it_began_with():
    """In the same process or another, of copies too, and whether or not the script tells it again."""

    def loader_of(sampler):
        return shard_loader(DataLoader(Numbers(20), 2, sampler=sampler), 0, 1, 5)

    first = loader_of(Hidden())
    first.sampler.set_epoch(1)
    given = epoch(first, 3)
    state = first.state_dict()
    for loader in (first, loader_of(Hidden()), loader_of(copy.deepcopy(first.sampler))):
        for number in (None, 1):
            loader.sampler.set_epoch(4)  # for a pass that is not made
            loader.load_state_dict(state)
            if number is not None:
                loader.sampler.set_epoch(number)
            more = epoch(loader, 1)
            loader.load_state_dict(loader.state_dict())
            iter(loader)  # it is not used
            assert flat(given + more + epoch(loader)) == [*order_of(1)]


def engine_with(train, test=None):
    model = small_gpt()
    return paramp.initialize(model, partial(torch.optim.AdamW, lr=1e-3), model.loss, train, test)


@on_ranks(4)
def test_training_from_a_sharded_loader_equals_training_on_the_union(world):
    """dp 2 x tp 2 with batches of 4 against plain torch with the same samples in batches of 8."""
    steps = list(batches(4))
    data = TensorDataset(*(torch.cat(part) for part in zip(*steps, strict=True)))
    with paramp.launch_from_torch({"parallel": {"tensor": 2, "data": 2}, "clip_grad_norm": 1.0}):
        torch.manual_seed(world.rank)
        engine, train, test, _ = engine_with(DataLoader(data, batch_size=4), [1])
        assert test == [1]
        losses = []
        for x, y in train:
            losses.append(float(engine.forward_backward(x, y)))
            engine.step()
            engine.zero_grad()
        expected, _ = plain_fp32_training(4)
        assert losses == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("parallel", "places"),
    [({"tensor": 2, "data": 2}, [0, 0, 1, 1]), ({"data": {"shard": 2, "replicate": 2}}, [0, 1, 2, 3])],
)
@on_ranks(4)
def test_ranks_of_shards_and_of_replicas_take_different_samples(world, parallel, places):
    """And those of a model group the same; two loaders have an order each."""
    torch.manual_seed(world.rank)
    with paramp.launch_from_torch({"parallel": parallel}):
        shuffled = [DataLoader(range(16), batch_size=2, shuffle=True) for _ in range(2)]
        _, train, test, _ = engine_with(*shuffled)
        found = everywhere([flat(epoch(train)), flat(epoch(test))])
    by_place = dict(zip(places, found, strict=True))
    assert found == [by_place[place] for place in places]
    orders = [flat(one[index] for one in by_place.values()) for index in (0, 1)]
    assert [sorted(order) for order in orders] == [[*range(16)]] * 2
    assert orders[0] != orders[1]


@on_ranks(4)
def test_wrong_loaders_are_an_error_on_every_rank(world):
    numbers = Numbers(8)
    uneven = DataLoader(Numbers(8 + world.rank // 2), batch_size=2)
    over_all_four = DataLoader(numbers, sampler=DistributedSampler(numbers))
    wrong_on_two = DataLoader(numbers, sampler=DistributedSampler(numbers, 2, rank=world.rank % 2))
    with paramp.launch_from_torch({"parallel": {"tensor": 2, "data": 2}}):
        for message, loaders in {
            "train_dataloader: its DistributedSampler gives samples to rank 0 of 4, but this is": [over_all_four],
            "gives samples to rank 1 of 2, but this is data rank 0 of 2": [wrong_on_two],
            "test_dataloader: rank 0 has 8 samples in batches of 2, drop_last False, but rank 2": [None, uneven],
            "train_dataloader: batch_size 8, but a data rank has 4": [DataLoader(numbers, 8, drop_last=True)],
        }.items():
            with pytest.raises(ConfigError, match=message):
                engine_with(*loaders)
        engine_with(DataLoader(numbers) if world.rank == 0 else None)


class Own(BatchSampler):
    """A batch sampler of the user's."""


ITSELF = DistributedSampler(Numbers(24), 1, 0)
WHOLE = {
    "a batch sampler of the user's, with workers": {
        "dataset": Numbers(24),
        "batch_size": 1,  # torch's default
        "batch_sampler": Own(RandomSampler(Numbers(24)), 2, False),
    },
    "a dataset of batches, with workers": {
        "dataset": torch.arange(24).view(12, 2),
        "batch_size": None,
        "shuffle": True,
    },
}
"""Batches that are not put together of samples of the sampler's."""
RESUMED = {
    "shuffled": {"dataset": Numbers(24), "shuffle": True},
    "a sampler of the user's": {"dataset": Numbers(20), "sampler": Shuffled()},
    "a sampler that is told the epoch": {"dataset": Numbers(20), "sampler": Told()},
    "a batch sampler of torch's": {
        "dataset": Numbers(24),
        "batch_size": 1,  # torch's default
        "batch_sampler": BatchSampler(RandomSampler(Numbers(24)), 2, False),
    },
    "with workers": {"dataset": Numbers(24), "shuffle": True, "num_workers": 1, **WORKERS},
    "a stream": {"dataset": Stream(24)},
    "a sampler that shards by itself": {"dataset": Numbers(24), "sampler": ITSELF},
    **{name: options | {"num_workers": 1, **WORKERS} for name, options in WHOLE.items()},
}


def resumable(name, size=1, batch_size=2):
    return on_all(lambda: DataLoader(**{"batch_size": batch_size} | RESUMED[name]), size)


@pytest.mark.parametrize("name", RESUMED)
def test_a_loader_resumes_in_the_middle_of_an_epoch(name):
    unit = 1 if name in WHOLE else 2  # what a batch counts for
    whole, stopped, *others, last = (loader for _ in range(5) for loader in resumable(name))
    expected = [epoch(whole) for _ in range(3)]
    assert (expected[0] == expected[1]) == (name == "a stream")
    assert stopped.state_dict() == {"epoch": 0, "given": 0}
    assert epoch(stopped) == expected[0]
    assert stopped.state_dict() == {"epoch": 1, "given": 0}
    given = epoch(stopped, 3)
    state = stopped.state_dict()
    assert state == {"epoch": 1, "given": 3 * unit, "order": state["order"]}
    for resumed in others:  # two times in one epoch
        resumed.load_state_dict(state)
        assert resumed.state_dict() == state
        given += epoch(resumed, 2)
        state = resumed.state_dict()
    assert state == {"epoch": 1, "given": 7 * unit, "order": state["order"]}
    last.load_state_dict(state)
    iter(last)  # it is not used, and counts for nothing
    assert given + epoch(last) == expected[1]
    assert last.state_dict() == {"epoch": 2, "given": 0}
    assert epoch(last) == expected[2]
    if name == "with workers":  # which draw other numbers in each epoch
        first, second = ({number for _, drawn in whole for number in drawn.tolist()} for _ in range(2))
        assert not first & second


@pytest.mark.parametrize(("size", "other"), [(4, 2), (2, 4), (1, 2), (2, 1)])
@pytest.mark.parametrize("name", [name for name in RESUMED if "itself" not in name])
def test_another_number_of_data_ranks_resumes_after_the_same_samples(name, size, other):
    def read(loaders, count):
        return sorted(flat(batch for loader in loaders for batch in epoch(loader, count)))

    order, given = flat(epoch(resumable(name)[0])), 8
    before, after = resumable(name, size), resumable(name, other)
    assert read(before, given // 2 // size) == sorted(order[:given])
    for loader in after:
        loader.load_state_dict(before[0].state_dict())
    assert read(after, 1) == sorted(order[given : given + 2 * other])
    assert read(after, None) == sorted(order)  # the next epoch


def test_another_number_of_data_ranks_that_does_not_divide_what_was_read_warns():
    before = resumable("shuffled", 4)
    for loader in before:
        epoch(loader, 2)
    with pytest.warns(UserWarning, match="had read 16 samples of its epoch, not a multiple of the 10"):
        resumable("shuffled", 2, batch_size=5)[0].load_state_dict(before[0].state_dict())


@pytest.mark.parametrize(
    ("first", "options", "changes"),
    [
        ({"shuffle": True}, {"dataset": Numbers(26)}, "samples 26, was 24; length of its sampler 26, was 24"),
        ({"batch_sampler": Own(range(24), 2, False)}, {"batch_sampler": Own(range(24), 3, False)}, "sampler 8, was 12"),
        ({"dataset": Stream(24), "batch_size": 2}, {"num_workers": 2}, r"\(workers 2, was 1\)"),
        ({"shuffle": True}, {"seed": 1}, r"\(seed 1, was 0\)"),
        ({"batch_size": 2}, {"seed": 1, "dataset": Numbers(26), "batch_size": 4}, None),
    ],
)
@few_cores
def test_a_resume_in_an_epoch_that_began_in_another_order_warns(first, options, changes):
    def start(seed=0, **options):
        with paramp.launch_from_torch({"seed": seed}) as context:
            loader = DataLoader(**{"dataset": Numbers(24)} | options)
            return shard_loaders(context, train_dataloader=loader)[0]

    before, resumed, anew = start(**first), start(**first | options), start(**first | options)
    anew.load_state_dict(before.state_dict())
    epoch(before, 2)
    with pytest.warns(UserWarning, match=changes) if changes else nullcontext():
        resumed.load_state_dict(before.state_dict())


def test_an_iterator_made_before_a_load_is_an_error():
    (loader,) = resumable("shuffled")
    batches = iter(loader)
    loader.load_state_dict({"epoch": 3, "given": 4})
    with pytest.raises(RuntimeError, match=r"was made before a checkpoint was loaded.*weights_only=True"):
        next(batches)


def test_skipping_batches_draws_no_random_numbers():
    (loader,) = resumable("a sampler that shards by itself")
    loader.load_state_dict({"epoch": 0, "given": 6})
    before = torch.get_rng_state()
    with mock.patch.object(Numbers, "__getitem__", lambda _, index: (index, torch.rand(()))):
        _, drawn = next(iter(loader))
    torch.set_rng_state(before)
    assert drawn.tolist() == [torch.rand(()).item() for _ in range(2)]


def consecutive(dataset, batch_size, size, in_sampler=False, **options):
    """The batches of each rank, where ranks get consecutive parts of each global batch."""
    options |= {"batch_sampler": BatchSampler(dataset, batch_size, False)} if in_sampler else {"batch_size": batch_size}
    loader = DataLoader(dataset, **options)
    loaders = [shard_loader(loader, rank, size, 7, consecutive=True) for rank in range(size)]
    parts = [list(one) for one in loaders]
    assert sum(map(num_repeated, loaders)) == max(sum(len(one) for part in parts for one in part) - len(dataset), 0)
    return parts


@pytest.mark.parametrize("count", [48, 21])
@pytest.mark.parametrize("options", [{}, {"shuffle": True}, {"drop_last": True}, {"in_sampler": True}])
def test_consecutive_parts_join_to_the_batches_of_one_rank(count, options):
    """An incomplete last batch is filled up, or dropped on all ranks."""
    (whole,) = consecutive(range(count), 8, 1, **options)
    for size in (2, 4):
        parts = consecutive(range(count), 8 // size, size, **options)
        joined = [torch.cat(batch).tolist() for batch in zip(*parts, strict=True)]
        assert joined == [one.tolist() for one in whole]
    assert len(whole) == (count // 8 if "drop_last" in options else -(-count // 8))
    if not options and count == 21:
        assert joined[-1] == [16, 17, 18, 19, 20, 0, 1, 2]
