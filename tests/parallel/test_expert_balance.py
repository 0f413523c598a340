"""Counts of the tokens of a step: the balance of the global batch, and biases of scores; on one rank and on several."""

import contextlib
import functools
from dataclasses import replace
from unittest import mock

import pytest
import torch
from counting import Collectives
from families import family, rarely
from pool import World, on_ranks, run_on_ranks
from reference import SMALL_MOE, batches, farthest, settled, small_moe
from small_engines import engine_of, everywhere, own_part, save
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import paramp
from paramp.models import MoEGPT, MoEGPTConfig
from paramp.parallel.expert_balance import TokenCounts, token_counts

LR = 8.0
"""So large that a weight's change shows its gradient to the last bits."""
RATE = 0.25
"""Of biases: a power of two, so that their sums are exact."""
BUFFER, WHOLE = "of the microbatches so far", "of all"


class GivenCounts(nn.Module):
    """Stands for the counts of a router on one process: records those of each microbatch, or replays others."""

    bias = None

    def __init__(self):
        super().__init__()
        self.found, self.given = [], iter(())

    def forward(self, index):
        self.found.append(torch.bincount(index.flatten(), minlength=4))
        return next(self.given, self.found[-1])

    def balance(self, counts, probabilities):
        return 4 * (counts / counts.sum() * probabilities.mean(0)).sum()


def expected_gradients(x, y, num_data, num_parts, rules):
    """In fp64 on one process, with the counts in each layer by its rule; those of each part are found before."""
    model = small_moe().double()
    routers = [block.mlp.router for block in model.blocks]
    for router in routers:
        router.counts = GivenCounts()
    rows = torch.arange(len(x)).view(num_data, num_parts, -1).transpose(0, 1).flatten(1)
    with torch.no_grad():
        for part in rows:
            model(x[part])
    for router, rule in zip(routers, rules, strict=True):
        found = torch.stack(router.counts.found)
        router.counts.given = iter(found.cumsum(0) if rule == BUFFER else found.sum(0).expand_as(found))
    for part in rows:
        (model.loss(model(x[part]), y[part]) / num_parts).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def check_gradients(rules, num_calls=1, **config):
    """One step of SGD from the same weights shows the expected gradients to 1e-5, and the norm to 1e-6."""
    x, y = next(batches(1, size=16))
    before = small_moe().state_dict()
    with paramp.launch_from_torch({"gradient_accumulation": num_calls, **config}) as context:
        num_data, num_parts = context.batch_axis.size, context.config.parallel.pipeline.num_microbatches * num_calls
        expected = expected_gradients(x, y, num_data, num_parts, rules)
        model = small_moe()
        engine = engine_of(model, model.loss, functools.partial(torch.optim.SGD, lr=LR))
        for inputs, targets in zip(*(part.chunk(num_calls) for part in own_part(context, x, y)), strict=True):
            engine.forward_backward(inputs, targets)
            result = engine.step()
        norm = torch.nn.utils.get_total_norm(expected.values())
        assert float(result.grad_norm) == pytest.approx(float(norm), rel=1e-6)
        found = {name: (before[name].double() - value) / LR for name, value in engine.full_state_dict().items()}
        assert (worst := farthest(found, expected))[0] < 1e-5, worst


@pytest.mark.parametrize("checkpointing", ["none", "full", "selective"])
def test_accumulated_batches_balance_over_those_so_far(checkpointing):
    check_gradients([BUFFER, BUFFER], 4, activation_checkpointing=checkpointing)


EXACT = {
    "gpipe": {"data": 2, "pipeline": {"size": 2, "schedule": "gpipe", "microbatches": 4}},
    "gpipe + ep2": {"data": 2, "expert": 2, "pipeline": {"size": 2, "schedule": "gpipe", "microbatches": 4}},
    "fsdp2": {"data": {"shard": 2}, "pipeline": {"size": 2, "schedule": "gpipe", "microbatches": 2}},
    "looped-bfs": {"data": 2, "pipeline": {"size": 2, "schedule": "looped-bfs", "microbatches": 4}},
}


@family
@pytest.mark.parametrize("layout", rarely(EXACT, "gpipe + ep2"))
@pytest.mark.parametrize("checkpointing", rarely(["none", "full"], "full"))
@on_ranks(4)
def test_schedules_of_all_forwards_first_balance_over_the_global_batch(world, layout, checkpointing):
    check_gradients([WHOLE, WHOLE], parallel=EXACT[layout], activation_checkpointing=checkpointing)


@on_ranks(4)
def test_1f1b_balances_over_the_forwards_before_each_backward(world):
    """Of two microbatches the first stage runs both forwards first, the last stage each backward after its forward."""
    check_gradients([WHOLE, BUFFER], parallel={"expert": 2, "pipeline": 2}, activation_checkpointing="full")


@on_ranks(2)
def test_data_ranks_balance_over_all_of_their_accumulated_batches(world):
    for checkpointing in ("none", "full"):
        check_gradients([BUFFER, BUFFER], 2, parallel={"expert": 2}, activation_checkpointing=checkpointing)


@on_ranks(2)
def test_a_forward_adds_up_counts_by_one_all_reduce_a_layer(world):
    x, y = next(batches(1))
    with paramp.launch_from_torch({"parallel": {"data": 2}, "activation_checkpointing": "full"}) as context:
        engine, counts = counting_engine()
        with Collectives() as forward:
            loss = engine.criterion(engine(own_part(context, x)[0]), own_part(context, y)[0])
        assert (forward.counts, forward.elements) == ({"allreduce": 2}, [4, 4])
        assert all(one.total.sum() == x.numel() * SMALL_MOE.experts_per_token for one in counts)
        with Collectives() as backward:
            engine.backward(loss)
        assert 4 not in backward.elements


# ------------------------------------------------------------------------------------------------- windows and copies


def test_the_whole_batch_is_one_microbatch_where_all_forwards_come_first():
    """What the expected gradients of this file call exact, from one forward of a plain model."""
    x, y = next(batches(1, size=16))
    model = small_moe().double()
    model.loss(model(x), y).backward()
    for name, grad in expected_gradients(x, y, 2, 4, [WHOLE, WHOLE]).items():
        torch.testing.assert_close(grad, model.get_parameter(name).grad, rtol=1e-9, atol=1e-12)


def test_how_far_the_gradient_of_the_microbatches_so_far_is_from_that_of_all():
    assert SMALL_MOE.balance_weight == 50 * MoEGPTConfig.balance_weight
    x, y = next(batches(1, size=16))
    for num_parts, distance in ((2, 0.04), (4, 0.07), (16, 0.08)):
        buffer, whole = (
            torch.cat([grad.flatten() for grad in expected_gradients(x, y, 1, num_parts, [rule] * 2).values()])
            for rule in (BUFFER, WHOLE)
        )
        assert (buffer - whole).norm() / whole.norm() == pytest.approx(distance, abs=0.005)


def counting_engine(**config):
    engine = engine_of(model := biased_moe(), model.loss, functools.partial(torch.optim.SGD, lr=0.0), **config)
    return engine, token_counts(engine.module)


def biased_moe():
    torch.manual_seed(7)
    return settled(MoEGPT(replace(SMALL_MOE, bias_rate=RATE)))


def chosen(state, *parts):
    """How many tokens of ``parts`` choose each expert in each layer, by a plain model in evaluation."""
    model = biased_moe().eval()
    model.load_state_dict(state)
    found = [[] for _ in model.blocks]
    for block, seen in zip(model.blocks, found, strict=True):
        block.mlp.experts.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[1].flatten()))
    with torch.no_grad():
        for part in parts:
            model(part)
    return [torch.bincount(torch.cat(seen), minlength=4) for seen in found]


def moved(counts):
    """By how much a step moves biases, by hand."""
    return RATE * (counts.double().mean() - counts).sign()


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_biases_move_by_each_token_of_a_step_once(checkpointing, tmp_path):
    (x, y), (x2, y2), (x3, y3) = batches(3)
    with paramp.launch_from_torch({"gradient_accumulation": 2, "activation_checkpointing": checkpointing}):
        engine, counts = counting_engine()
        assert all(torch.equal(one.bias, torch.zeros(4)) for one in counts)
        of_step = chosen(engine.full_state_dict(), x, x2)
        expected = [moved(one) for one in of_step]
        for inputs, targets in ((x, y), (x2, y2)):
            engine.forward_backward(inputs, targets)
            engine.evaluate(x3, y3)
            found = [one.total.tolist() for one in counts]
            engine.step()
        assert found == [one.tolist() for one in of_step]
        for one, bias in zip(counts, expected, strict=True):
            assert torch.equal(one.bias, bias.float())
            assert bias.any()
        save(engine, tmp_path / "saved")
        again, loaded = counting_engine()
        again.load(tmp_path / "saved")
        assert [one.bias.tolist() for one in loaded] == [one.bias.tolist() for one in counts]
        expected = [bias + moved(one) for bias, one in zip(expected, chosen(again.state_dict(), x3), strict=True)]
        again.forward_backward(x3, y3)
        again.flush()
        assert [one.bias.tolist() for one in loaded] == [bias.tolist() for bias in expected]


def refuse():
    raise ArithmeticError("refused")


def test_a_skipped_step_and_a_dropped_one_leave_biases_and_count_no_more():
    (x, y), (x2, y2) = batches(2)
    with paramp.launch_from_torch({"precision": {"mode": "16-mixed", "init_scale": 2.0**4}}):
        engine, counts = counting_engine()
        engine.forward_backward(x, y)
        next(engine.parameters()).grad[0] = torch.inf
        assert engine.step().overflow
        assert not any(one.bias.any() for one in counts)
        engine.before_step.append(refuse)
        engine.forward_backward(x, y)
        with pytest.raises(ArithmeticError):
            engine.step()
        with pytest.raises(RuntimeError, match=r"^a batch of this step, or the step\(\) itself, failed"):
            engine.flush()
        engine.before_step.clear()
        engine.zero_grad()
        assert not any(one.total.any() for one in counts)
        engine.forward_backward(x, y)
        engine.zero_grad()
        with torch.no_grad():
            engine.execute_schedule(iter([(x, y)]), forward_only=True)
        engine.forward_backward(x2, y2)
        assert [one.total.sum() for one in counts] == [x2.numel() * SMALL_MOE.experts_per_token] * 2
        totals = [one.total.clone() for one in counts]
        assert engine.step().stepped
        assert [one.bias.tolist() for one in counts] == [moved(total).tolist() for total in totals]


def test_a_rerun_after_an_overflow_counts_nothing():
    x, y = next(batches(1))
    with paramp.launch_from_torch({"precision": {"mode": "16-mixed", "init_scale": 2.0**4}}):
        engine, counts = counting_engine()
        with torch.no_grad():
            engine.module.head.weight[3] = torch.inf
        engine.forward_backward(x, y)
        assert engine.step().overflow
        engine.diagnose_overflow()
        assert not any(one.total.any() or one.bias.any() for one in counts)


@on_ranks(4)
def test_biases_are_equal_on_all_ranks_and_of_the_tokens_of_all(world):
    x, y = next(batches(1))
    for layout in ({"expert": 2, "tensor": 2}, {"data": 2, "pipeline": 2}):
        with paramp.launch_from_torch({"parallel": layout, "activation_checkpointing": "full"}) as context:
            engine, counts = counting_engine()
            expected = [moved(one).tolist() for one in chosen(biased_moe().state_dict(), x)]
            engine.forward_backward(*own_part(context, x, y))
            engine.step()
            here = expected if len(counts) == 2 else [expected[context.stage_axis.rank]]
            assert [one.bias.tolist() for one in counts] == here
            state = engine.full_state_dict()
            assert [state[f"blocks.{layer}.mlp.router.counts.bias"].tolist() for layer in range(2)] == expected


def test_a_bias_chooses_and_does_not_weigh():
    router = biased_moe().blocks[0].mlp.router.eval()
    x = torch.randn(32, 32)
    plain = router.scores(x).softmax(-1)
    router.counts.bias.copy_(torch.tensor([8.0, 0.0, 0.0, -8.0]))
    index, weights, _ = router(x)
    assert torch.equal(index[:, 0], torch.zeros(32, dtype=torch.int64))
    assert not (index == 3).any()
    expected = plain.gather(1, index)
    torch.testing.assert_close(weights, expected / expected.sum(1, keepdim=True))
    bias = torch.tensor([0.1, 0.0, 0.0, -0.1])
    router.counts.bias.copy_(bias)
    assert torch.equal(router(x)[0], (plain + bias).topk(index.shape[1]).indices)


def test_without_an_engine_each_call_counts_alone():
    counts, index = TokenCounts(3), torch.tensor([[0, 1], [0, 2]])
    probabilities = torch.tensor([[0.5, 0.25, 0.25], [0.75, 0.0, 0.25]], requires_grad=True)
    for _ in range(2):
        found = counts(index)
        assert found.tolist() == [2, 1, 1]
        loss = counts.balance(found, probabilities)
        assert loss.item() == 3 * (0.5 * 0.625 + 0.25 * 0.125 + 0.25 * 0.25)
    loss.backward()
    assert torch.equal(probabilities.grad, torch.tensor([[0.75, 0.375, 0.375]] * 2))


def test_padding_of_a_router_of_ones_own_does_not_count():
    """Of two tokens and two of padding; with these the first expert would have more than the mean."""
    counts, index = TokenCounts(3, RATE), torch.tensor([[1, 2], [0, 1], [0, 1], [0, 2]])
    counts.join(None)
    assert counts(index, torch.tensor([True, True, False, False])).tolist() == [1, 2, 1]
    counts.end_step(torch.tensor(False))
    assert counts.bias.tolist() == [RATE, -RATE, RATE]
    assert counts(index).tolist() == [3, 3, 2]
    counts.end_step(torch.tensor(False))
    assert counts.bias.tolist() == [0.0, -2 * RATE, 2 * RATE]


def test_in_a_step_a_call_returns_the_counts_so_far():
    counts, index = TokenCounts(3), torch.tensor([[0, 1], [0, 2]])
    counts.join(None)
    found = [counts(index), counts(index)]
    with torch.no_grad():
        found.append(counts(index))
    found.append(counts(index))
    counts.end_step(torch.tensor(False))
    assert [one.tolist() for one in (*found, counts(index))] == [[2, 1, 1], [4, 2, 2], [2, 1, 1], [6, 3, 3], [2, 1, 1]]


class Choosing(nn.Module):
    def __init__(self, use_reentrant=False):
        super().__init__()
        self.scores, self.counts, self.use_reentrant = nn.Linear(4, 3), TokenCounts(3), use_reentrant

    def forward(self, x):
        return checkpoint(self.balance, x, use_reentrant=self.use_reentrant)

    def balance(self, x):
        probabilities = self.scores(x).softmax(-1)
        return self.counts.balance(self.counts(probabilities.topk(2).indices), probabilities)


def test_a_repeated_forward_whose_balance_is_of_its_counts_alone_has_these_again():
    """As with ``reproducible``. Its two batches choose differently: counts so far would give other gradients."""
    torch.manual_seed(2)
    model, batches = Choosing(), torch.randn(2, 5, 4)

    def gradients(balance):
        model.zero_grad()
        for x in batches:
            balance(x).backward()
        return [one.grad.clone() for one in model.parameters()]

    expected = gradients(model.balance)  # without an engine
    model.counts.join(None, apart=True)
    torch.testing.assert_close(gradients(model), expected, rtol=0, atol=0)


def test_a_repeated_forward_that_was_not_counted_is_an_error():
    x = torch.randn(5, 4, requires_grad=True)
    with paramp.launch_from_torch():
        engine = engine_of(Choosing(use_reentrant=True), lambda loss, _: loss)
        with pytest.raises(RuntimeError, match="use_reentrant=False"):
            engine.forward_backward(x, x)


def test_counts_that_were_dropped_before_a_backward_are_an_error():
    x = torch.randn(5, 4)
    with paramp.launch_from_torch({"gradient_accumulation": 2}):
        engine = engine_of(Choosing(), lambda loss, _: loss)
        engine.forward_backward(x, x)
        loss = engine.criterion(engine(x), x)
        engine.zero_grad()
        with pytest.raises(RuntimeError, match=r"zero_grad\(\) before the forward"):
            engine.backward(loss)


def test_a_users_loop_may_drop_gradients_between_forward_and_backward():
    (x, y), (x2, y2) = batches(2)
    with paramp.launch_from_torch():
        engine, counts = counting_engine()
        for inputs, targets in ((x, y), (x2, y2)):
            loss = engine.criterion(engine(inputs), targets)
            engine.zero_grad()
            engine.backward(loss)
            expected = [one.bias + moved(one.total) for one in counts]
            assert [one.total.sum() for one in counts] == [x.numel() * SMALL_MOE.experts_per_token] * 2
            engine.step()
            assert [one.bias.tolist() for one in counts] == [bias.tolist() for bias in expected]


def check_failed_forward(world):
    (x, y), (x2, y2) = batches(2)
    with paramp.launch_from_torch({"gradient_accumulation": 2}):
        engine, counts = counting_engine()
        engine.backward(engine.criterion(engine(x), y))
        engine.step()
        expected = [one.total.tolist() for one in counts]
        hook = engine.module.blocks[1].register_forward_pre_hook(lambda *_: refuse())  # the first router has counted
        with pytest.raises(ArithmeticError):
            engine(x2)
        hook.remove()
        assert [one.total.tolist() for one in counts] == expected
        engine.criterion(engine(x2), y2)
        assert [one.total.sum() for one in counts] == [2 * world.size * x.numel() * SMALL_MOE.experts_per_token] * 2


def test_a_forward_that_failed_on_all_ranks_counts_nothing_in_a_loop_that_goes_on():
    check_failed_forward(World(0, 1, "cpu"))
    run_on_ranks(2, __name__, "check_failed_forward", {})


@on_ranks(2)
def test_a_forward_that_failed_on_one_rank_leaves_the_counts_of_all_equal(world):
    ((x, _),) = batches(1)
    with (
        paramp.launch_from_torch({"parallel": {"data": 2}}),
        mock.patch("paramp.engine.shared_failure.SECONDS_OF_GRACE", 0.2),
    ):
        engine, counts = counting_engine()
        if world.rank:
            engine.module.norm.register_forward_pre_hook(lambda *_: refuse())  # behind all routers
        with pytest.raises(ArithmeticError) if world.rank else contextlib.nullcontext():
            engine(x)
        assert len({*everywhere(str([one.total.tolist() for one in counts]))}) == 1


def test_a_balance_of_equal_shares_is_1_and_has_no_gradient_in_the_scores():
    """The loss's least value, where experts have equal probabilities."""
    counts, scores = TokenCounts(4), torch.zeros(8, 4, requires_grad=True)
    index = torch.arange(8).view(-1, 1) % 4
    loss = counts.balance(counts(index), F.softmax(scores, -1))
    loss.backward()
    assert loss.item() == 1
    assert not scores.grad.any()
    half = F.softmax(scores.detach().half(), -1)  # in which the counts would overflow
    assert [counts.balance(torch.full((4,), number), half).item() for number in (2**17, 0)] == [1, 0]
