"""Data ranks that shard parameters and run different blocks: each raises, names them, and can train on."""

import copy
from contextlib import contextmanager

import pytest
import torch
from beside_plain import assert_weights, randn, seeded
from families import cases, family, rarely
from pool import on_ranks
from small_engines import engine_of, own_part
from torch import nn
from torch.distributed import distributed_c10d

import paramp
import paramp.parallel.fsdp.unit_order_check as module
from paramp.parallel.fsdp.unit_order_check import UnitOrder


class Blocks(nn.Module):
    """Equal blocks, each of which may be skipped, run twice, or left out of the backward."""

    def __init__(self, num_blocks=4):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(num_blocks))
        self.order = [*range(num_blocks)]
        self.cut = None

    def forward(self, x):
        x = self.first(x)
        for index in self.order:
            y = self.blocks[index](x)
            x = x + y.detach() if index == self.cut else y
        return x


X, Y = randn(2, 8, 4)


def squares_and_count(output, target):
    return nn.functional.mse_loss(output, target, reduction="sum"), torch.tensor(target.numel())


class Trained:
    """An engine on shards, and plain training in one process beside it."""

    def __init__(self, context, criterion=nn.functional.mse_loss):
        model = seeded(Blocks)
        self.context = context
        self.part = own_part(context, X, Y)
        self.plain = copy.deepcopy(model)
        self.optimizer = torch.optim.SGD(self.plain.parameters(), lr=0.1)
        self.engine = engine_of(model, criterion)

    def step(self, order=(0, 1, 2, 3)):
        """A step on every rank, on equal blocks, and the plain one."""
        self.plain.order = self.engine.module.order = [*order]
        self.optimizer.zero_grad()
        nn.functional.mse_loss(self.plain(X), Y).backward()
        self.optimizer.step()
        self.engine.forward_backward(*self.part)
        assert self.engine.step().stepped
        assert_weights(self.engine.full_state_dict(), self.plain.state_dict(), atol=1e-6)

    def fail(self, deviating, call, order=None, cut=None):
        """The error of ``call`` where ranks ``deviating`` run blocks in another ``order``, or leave a backward out."""
        if self.context.batch_axis.rank in deviating:
            self.engine.module.order, self.engine.module.cut = [0, 1, 2, 3] if order is None else order, cut
        with pytest.raises(RuntimeError, match="data ranks ran different blocks of the model") as raised:
            call(*self.part)
        self.engine.module.order, self.engine.module.cut = [0, 1, 2, 3], None
        self.engine.zero_grad()
        return str(raised.value)


@contextmanager
def training(*args, **data):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "SECONDS_BETWEEN_QUESTIONS", 0.02)
        config = {"parallel": {"data": {"shard": 2} | data}, "hang_timeout": 10.0}  # in which the others answer
        with paramp.launch_from_torch(config) as context:
            yield Trained(context, *args)


def skipped(block, runs_on=0):
    place = f"(pp 0, dp_replicate 0, dp_shard {runs_on}, tp 0)"
    return f"'blocks.{block}' runs on rank {runs_on} {place}, but is skipped on rank {1 - runs_on}"


SKIPS = {1: ([0, 2, 3], [0, 2, 2, 3], [0, 2, 1, 3]), 3: ([0, 1, 2],), 0: ([],)}
"""By the first block that is skipped."""


@family
@pytest.mark.parametrize(
    "known",
    cases("skipped blocks", [False, True], [True], 1),
    ids=lambda known: "known order" if known else "first batch",
)
@on_ranks(2)
def test_a_block_that_one_rank_skips(world, known):
    with training() as trained:
        engine = trained.engine
        if known:
            trained.step()
            engine.evaluate(*trained.part)
        for call in (engine.forward_backward, engine.evaluate, lambda x, y: engine.backward((engine(x) - y).mean())):
            for block, order in ((block, order) for block, orders in SKIPS.items() for order in orders):
                error = trained.fail({1}, call, order)
                assert skipped(block) in error
                assert "run the same blocks on every data rank" in error
        trained.step()


@pytest.mark.parametrize("known", [False, True], ids=["first batch", "known order"])
@on_ranks(2)
def test_the_last_block_before_a_loss_with_a_count(world, known):
    """The data ranks add up counts between the forward and the backward."""
    with training(squares_and_count) as trained:
        if known:
            trained.step()
        error = trained.fail({1}, trained.engine.forward_backward, [0, 1, 2])
        assert skipped(3) in error
        assert "which is at the loss" in error
        assert skipped(3, runs_on=1) in trained.fail({1}, trained.engine.forward_backward, [0, 1, 2, 3, 3])
        trained.step()


@on_ranks(2)
def test_a_block_that_one_rank_runs_once_more_and_a_backward_that_one_leaves_out(world):
    """The other rank is in its backward by then."""
    with training() as trained:
        trained.step()
        assert skipped(3, runs_on=1) in trained.fail({1}, trained.engine.forward_backward, [0, 1, 2, 3, 3, 2])
        for _ in range(2):
            error = trained.fail({1}, trained.engine.forward_backward, cut=2)
            assert "the reduction of the gradients of 'blocks.2' runs on rank 0" in error
            trained.step()


class Pausing(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.computes = nn.Linear(4, 4), True

    def forward(self, x):
        return self.linear(x).tanh() if self.computes else x


@on_ranks(2)
def test_a_block_that_computes_nothing_on_one_rank(world):
    """Its parameters have no gradient there. Of the first block that is trained, it is the place where the backward
    ends: that of the other rank has one more block."""
    with paramp.launch_from_torch({"parallel": {"data": {"shard": 2}}}) as context:
        model = seeded(lambda: nn.Sequential(*(Pausing() for _ in range(3))))
        plain, part = copy.deepcopy(model), own_part(context, X, Y)
        engine = engine_of(model)
        engine.module[0].computes = world.rank == 0
        with pytest.raises(RuntimeError, match=r"the reduction of the gradients of '1' runs on .* but is skipped on"):
            engine.forward_backward(*part)
        engine.zero_grad()

        engine.module[0].computes, engine.module[1].computes = True, world.rank == 0
        engine.forward_backward(*part)
        assert engine.step().stepped
        for rank, (x, y) in enumerate(zip(X.chunk(2), Y.chunk(2), strict=True)):
            plain[1].computes = rank == 0
            (nn.functional.mse_loss(plain(x), y) / 2).backward()
        torch.optim.SGD(plain.parameters(), lr=0.1).step()
        assert_weights(engine.full_state_dict(), plain.state_dict(), atol=1e-6)


@on_ranks(2)
def test_blocks_that_all_ranks_choose_alike_train(world):
    """Orders that part again and again, more of them than are remembered."""
    choose = torch.Generator().manual_seed(3)
    with pytest.MonkeyPatch.context() as patch, training() as trained:
        patch.setattr(module, "MAX_KNOWN", 30)
        for _ in range(8):
            trained.step(index for index in range(4) if torch.rand((), generator=choose) > 0.4)


@on_ranks(2)
def test_a_rank_that_comes_late_is_waited_for(world):
    """It comes once the other, which waits for it, has looked where it is."""
    posted = UnitOrder._posted
    with pytest.MonkeyPatch.context() as patch, training() as trained:
        store, looked = distributed_c10d._get_default_store(), f"looked/{trained.context.serial}"
        if world.rank == 0:
            patch.setattr(UnitOrder, "_posted", lambda *args: store.set(looked, "") or posted(*args))
        else:
            trained.engine.module.blocks[1].register_forward_hook(lambda *_: store.wait([looked]))
        trained.step()


@pytest.mark.parametrize("fails", [False, True])
def test_a_collective_that_ends_just_after_a_wait_for_it_raises_its_own_error_only(fails):
    class Work:
        def wait(self, timeout=None):
            if timeout is not None or fails:
                raise RuntimeError("Operation timed out!" if timeout is not None else "connection lost")

        def is_completed(self):
            return True

    waiting = module._Waiting(Work(), has_timeout=True)
    if fails:
        with pytest.raises(RuntimeError, match="connection lost"):
            waiting.is_done()
    else:
        assert waiting.is_done()


@on_ranks(2)
def test_known_orders_need_no_messages(world):
    posts, post = [], UnitOrder._post
    with pytest.MonkeyPatch.context() as patch, training() as trained:
        patch.setattr(UnitOrder, "_post", lambda self, tag: posts.append(tag) or post(self, tag))
        for _ in range(3):
            before = len(posts)
            trained.step()
            trained.engine.evaluate(*trained.part)
    assert len(posts) == before > 0


@on_ranks(2)
def test_without_a_loss_the_step_raises_and_changes_nothing(world):
    """Each of the orders is known. Blocks 1 and 2 have equal shapes: unnoticed, ranks would compute with halves."""
    orders = [0, 1, 3], [0, 2, 3]
    with training() as trained:
        for order in orders:
            trained.step(order)
        trained.engine.module.order = orders[world.rank]
        trained.engine.forward_backward(*trained.part, return_loss=False)
        with pytest.raises(RuntimeError, match="data ranks ran different blocks of the model"):
            trained.engine.step()
        assert_weights(trained.engine.full_state_dict(), trained.plain.state_dict(), atol=1e-6)


@on_ranks(2)
def test_what_was_gathered_early_and_not_used_is_gathered_again(world):
    """The forward of the first block begins to gather the second, which the evaluation leaves out."""
    with training(prefetch=1) as trained:
        trained.engine.module.order = [0, 2, 3]
        trained.engine.evaluate(*trained.part)
        with torch.no_grad():
            for parameter in (*trained.engine.parameters(), *trained.plain.parameters()):
                getattr(parameter, "_local_tensor", parameter).mul_(2.0)
        trained.step()


@pytest.mark.parametrize("replicate", rarely([1, 2], 2))
@on_ranks(4)
def test_several_ranks_that_skip_a_block(world, replicate):
    with training(shard=4 // replicate, replicate=replicate) as trained:
        # A second time, in a known order, with one replica only: of more, some ranks wait in the sum over replicas.
        for _ in range(2 if replicate == 1 else 1):
            for deviating in ({1}, {2, 3}, {3, 0, 2}):
                error = trained.fail(deviating, trained.engine.forward_backward, [0, 2, 3])
                assert "'blocks.1' runs on rank" in error
            trained.step()


def frozen(trained, *names):
    for name in ("first.weight", "blocks.2.0.bias"):
        trained.engine.module.get_parameter(name).requires_grad_(name not in names)


@pytest.mark.parametrize("known", [True, False])
@on_ranks(2)
def test_parameters_that_are_frozen_on_one_rank_or_others_on_each(world, known):
    """Each rank raises before the batch, and names them; what is frozen on all is no error, and they can train on."""
    with training() as trained:
        if known:
            trained.step()
        for names in (("first.weight",) * world.rank, (("first.weight", "blocks.2.0.bias")[world.rank],)):
            frozen(trained, *names)
            with pytest.raises(RuntimeError, match=r"requires_grad was .* rank 1 .* has changed '(first|blocks)\."):
                trained.engine.forward_backward(*trained.part)
            trained.engine.zero_grad()
        frozen(trained, "first.weight")
        trained.plain.first.weight.requires_grad_(False)
        before = trained.plain.first.weight.clone()
        trained.step()
        assert torch.equal(trained.plain.first.weight, before)
        frozen(trained)
        trained.plain.first.weight.requires_grad_(True)
        trained.step()
