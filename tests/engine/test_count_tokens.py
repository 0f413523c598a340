"""The balance of a mixture over a whole step, of which ``count_tokens`` has run all batches before.

In fp64, against one loss of the global batch, which is written here.
"""

import functools
import random
from contextlib import contextmanager
from dataclasses import replace

import numpy
import pytest
import torch
from beside_plain import launch_with_compiler as launch
from families import family, rarely
from layouts import layouts
from mixtures import build
from pool import on_ranks
from reference import SMALL_MOE, batches, settled, small_moe
from small_engines import each_raises, engine_of, own_part
from torch import nn
from torch.nn import functional as F

import paramp
from paramp.config.pipeline_schedules import SCHEDULES
from paramp.models import MoEGPT
from paramp.parallel.expert_balance import TokenCounts, token_counts

LR = 8.0
"""So large that a weight's change in one step shows its gradient to the last bits."""
CLOSE = 1e-12
ACCUMULATED = 3
SIZE = 24
"""Divides into two data ranks, three accumulated batches and four microbatches."""


# ------------------------------------------------------------------------------------------------------ the reference


def of_routers(all_logits, shown, num_chosen=2):
    """Counts of choices and sums of probabilities, of the tokens that are ``shown``, for each router."""
    for logits in all_logits:
        shares = logits[shown].softmax(-1)
        yield F.one_hot(shares.topk(num_chosen).indices, shares.shape[1]).sum((0, 1)).double(), shares.sum(0)


@functools.cache
def moe_reference():
    """Loss and gradients of a plain :class:`MoEGPT`, with E · Σ f P and z of each layer over all tokens."""
    x, y = next(batches(1, size=SIZE))
    model, all_logits = small_moe().double().eval(), []
    for block in model.blocks:
        block.mlp.router.scores.register_forward_hook(lambda _, args, output: all_logits.append(output))
    loss = F.cross_entropy(model(x)[0].flatten(0, 1), y.flatten())
    for logits, (counts, sums) in zip(all_logits, of_routers(all_logits, slice(None)), strict=True):
        loss = loss + SMALL_MOE.balance_weight * 4 * (counts / counts.sum() * sums / len(logits)).sum()
        loss = loss + SMALL_MOE.z_weight * logits.logsumexp(-1).square().mean()
    loss.backward()
    return loss.item(), {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_close(found, expected):
    norm = torch.nn.utils.get_total_norm(expected.values())
    for name, grad in expected.items():
        assert (found[name] - grad).norm() < CLOSE * max(grad.norm(), 1e-2 * norm), name


# ------------------------------------------------------------------------------------------------------------ MoEGPT


def check_moe(num_calls=1, **config):
    """A step is that of the reference: its loss and its gradients."""
    loss, grads = moe_reference()
    before = small_moe().double().state_dict()
    x, y = next(batches(1, size=SIZE))
    config |= {"precision": "64-true", "gradient_accumulation": num_calls}
    with launch(config, "compile: the graph of .* breaks") as context:
        model = small_moe().double()
        engine = engine_of(model, model.loss, functools.partial(torch.optim.SGD, lr=LR))
        parts = [*zip(*(part.chunk(num_calls) for part in own_part(context, x, y)), strict=True)]
        engine.count_tokens(parts)
        for part in parts:
            engine.forward_backward(*part)
            assert all(torch.equal(one.known, one.announced) for one in token_counts(engine.module))
            result = engine.step()
        assert result.loss == pytest.approx(loss, rel=CLOSE)
        after = engine.full_state_dict()
    assert_close({name: (before[name] - after[name]) / LR for name in grads}, grads)


WAYS = {
    "none": {},
    "full": {"activation_checkpointing": "full"},
    "selective": {"activation_checkpointing": "selective"},
    "compile": {"compile": {"backend": "aot_eager"}},
}


@family
@pytest.mark.parametrize("way", rarely(WAYS, "none", "full"))
def test_accumulated_batches_balance_over_all_of_them(way):
    check_moe(ACCUMULATED, **WAYS[way])


TWO = {name: {"pipeline": {"size": 2, "microbatches": 4, "schedule": name}} for name in SCHEDULES}
TWO |= layouts("dp2, ep2, cp2, fsdp2, tp2")
CASES = [(layout, num_calls, way) for layout in TWO for num_calls in (1, ACCUMULATED) for way in ("none", "full")]
BY_DEFAULT = [("dp2", ACCUMULATED, "none"), ("1f1b", 1, "full"), ("ep2", ACCUMULATED, "full"), ("cp2", 3, "none")]


@family
@pytest.mark.parametrize(("layout", "num_calls", "way"), rarely(CASES, *BY_DEFAULT))
@on_ranks(2)
def test_accumulated_batches_of_two_ranks_balance_over_all_of_them(world, layout, num_calls, way):
    check_moe(num_calls, parallel=TWO[layout], **WAYS[way])


FOUR = layouts("ep2·pp2, ep2·tp2, fsdp2·pp2, cp2·pp2, dp2·cp2", microbatches=4)


@family
@pytest.mark.parametrize("layout", rarely(FOUR, "ep2·pp2"))
@on_ranks(4)
def test_accumulated_batches_of_four_ranks_balance_over_all_of_them(world, layout):
    check_moe(ACCUMULATED, parallel=FOUR[layout], **WAYS["full"])


# ------------------------------------------------------------------------------------------------------- transformers


@contextmanager
def in_double():
    """A context in which transformers computes in fp64 what it has in fp32 in each mode: norms, scores and losses."""

    def to_wide(tensor, *args, **kwargs):
        return to(tensor, *(torch.float64 if value is torch.float32 else value for value in args), **kwargs)

    to, narrow = torch.Tensor.to, torch.Tensor.float
    torch.Tensor.to, torch.Tensor.float = to_wide, torch.Tensor.double
    try:
        yield
    finally:
        torch.Tensor.to, torch.Tensor.float = to, narrow


COEFFICIENT = 0.5


def mixtral():
    model = build("Mixtral", num_experts=4).double()
    model.config.output_router_logits, model.router_aux_loss_coef = True, COEFFICIENT
    return model


def padded(size=SIZE, length=12):
    """A batch padded on the right: its parts have other numbers of tokens and of labels."""
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(3, 60, (size, length), generator=generator)
    mask = (torch.arange(length) < torch.randint(4, length + 1, (size, 1), generator=generator)).long()
    labels = tokens.masked_fill(mask == 0, -100)
    labels[:, :2] = -100
    return {"input_ids": tokens * mask, "attention_mask": mask, "labels": labels}


@functools.cache
def mixtral_reference():
    """Loss and gradients, with E · Σ f P of the tokens of all layers that the mask shows."""
    model, whole = mixtral(), padded()
    with in_double():
        output = model(**{name: value for name, value in whole.items() if name != "labels"})
        found = zip(*of_routers(output.router_logits, whole["attention_mask"].flatten().bool()), strict=True)
        counts, sums = (sum(of_layers) for of_layers in found)
        tokens = whole["attention_mask"].sum() * len(output.router_logits)
        loss = F.cross_entropy(output.logits[:, :-1].flatten(0, 1), whole["labels"][:, 1:].flatten())
        loss = loss + COEFFICIENT * 4 * (counts / tokens * sums / tokens).sum()
        loss.backward()
    return loss.item(), {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


def check_mixtral(num_calls, **config):
    loss, grads = mixtral_reference()
    before = mixtral().state_dict()
    with paramp.launch_from_torch({"precision": "64-true", "gradient_accumulation": num_calls, **config}) as context:
        engine = engine_of(mixtral(), None, functools.partial(torch.optim.SGD, lr=LR))
        parts = [part.chunk(num_calls) for part in own_part(context, *padded().values())]
        batches_of_step = [dict(zip(padded(), part, strict=True)) for part in zip(*parts, strict=True)]
        with in_double():
            engine.count_tokens(batches_of_step)
        for part in batches_of_step:
            with in_double():
                engine.forward_backward(part)
            assert all(torch.equal(one.known, one.announced) for one in token_counts(engine.module))
            result = engine.step()
        assert result.loss == pytest.approx(loss, rel=CLOSE)
        after = engine.full_state_dict()
    assert_close({name: (before[name] - after[name]) / LR for name in grads}, grads)


@pytest.mark.parametrize("way", ["none", "full"])
def test_accumulated_batches_of_mixtral_balance_over_all_of_them(way):
    check_mixtral(ACCUMULATED, **WAYS[way])


@family
@pytest.mark.parametrize(("layout", "num_calls", "way"), rarely(CASES, ("1f1b", 1, "none"), ("ep2", 3, "full")))
@on_ranks(2)
def test_accumulated_batches_of_mixtral_balance_on_two_ranks(world, layout, num_calls, way):
    check_mixtral(num_calls, parallel=TWO[layout], **WAYS[way])


@family
@pytest.mark.parametrize("layout", rarely(FOUR, "cp2·pp2"))
@on_ranks(4)
def test_accumulated_batches_of_mixtral_balance_on_four_ranks(world, layout):
    check_mixtral(ACCUMULATED, parallel=FOUR[layout], **WAYS["full"])


# ------------------------------------------------------------------------------------------------- steps and failures


def moe_engine(lr=LR, **changes):
    torch.manual_seed(7)
    model = settled(MoEGPT(replace(SMALL_MOE, **changes))).double()
    return engine_of(model, model.loss, functools.partial(torch.optim.SGD, lr=lr))


def launch_in_fp64(num_calls=2, **layout):
    return paramp.launch_from_torch({"precision": "64-true", "parallel": layout, "gradient_accumulation": num_calls})


def halves(context, size=8, seed=3):
    x, y = next(batches(1, size=size, seed=seed))
    return [*zip(*(part.chunk(2) for part in own_part(context, x, y)), strict=True)]


@on_ranks(2)
def test_it_changes_no_weight_and_no_random_number_and_biases_move_alike(world):
    """With dropout, and a loss that does not depend on the counts: the same bits as without it."""
    for layout in ({"data": 2}, {"pipeline": 2}):
        states = []
        for num_counted in (0, 1, 2):
            with launch_in_fp64(**layout) as context:
                engine = moe_engine(0.1, dropout=0.3, balance_weight=0.0, bias_rate=2.0**-8)
                for seed in (3, 4, 5):  # an odd number, after which no bias is 0
                    parts = halves(context, seed=seed)
                    for _ in range(num_counted):
                        engine.count_tokens(parts)
                    for part in parts:
                        engine.forward_backward(*part)
                        found = [(one.known.tolist(), one.total.tolist()) for one in token_counts(engine.module)]
                        engine.step()
                    assert all(known == total for known, total in found)
                states.append(engine.full_state_dict())
        biases = [value for name, value in states[0].items() if name.endswith("bias") and "counts" in name]
        assert len(biases) == 2
        assert all(bias.any() for bias in biases)
        assert all(torch.equal(states[0][name], one[name]) for one in states[1:] for name in one)


class Normalised(nn.Module):
    """Running statistics, counts of its calls, numbers of Python's and NumPy's streams, and a router."""

    def __init__(self):
        super().__init__()
        self.norm, self.scores, self.counts = nn.BatchNorm1d(4), nn.Linear(4, 3), TokenCounts(3)
        self.calls, self.num_calls = nn.Parameter(torch.zeros(()), requires_grad=False), 0

    def forward(self, x):
        self.calls.data.add_(1)
        self.num_calls += 1
        probabilities = self.scores(self.norm(x) * random.random() * numpy.random.rand()).softmax(-1)
        return self.counts.balance(self.counts(probabilities.topk(1).indices), probabilities)


def test_running_statistics_and_pythons_and_numpys_streams_are_put_back():
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    with paramp.launch_from_torch():
        engine = engine_of(Normalised(), lambda loss, _: loss)
        before, numpys = random.getstate(), numpy.random.get_state()[2]
        engine.count_tokens([(x, x)])
        assert (random.getstate(), numpy.random.get_state()[2]) == (before, numpys)
        assert not engine.module.norm.running_mean.any()
        assert engine.module.calls == engine.module.num_calls == 0
        assert engine.module.counts.announced.sum() == 6


def test_a_skipped_step_forgets_the_counts_and_the_next_one_has_its_own():
    loss, grads = moe_reference()
    x, y = next(batches(1, size=SIZE))
    with launch_in_fp64():
        engine = moe_engine()
        before = engine.full_state_dict()
        for spoilt in (True, False):
            parts = [*zip(x.chunk(2), y.chunk(2), strict=True)]
            engine.count_tokens(parts)
            for part in parts:
                engine.forward_backward(*part)
                if spoilt:
                    next(engine.parameters()).grad[0] = torch.inf
                result = engine.step()
            assert result.overflow == spoilt
            assert all(one.announced is None for one in token_counts(engine.module))
        assert result.loss == pytest.approx(loss, rel=CLOSE)
        after = engine.full_state_dict()
    assert_close({name: (before[name] - after[name]) / LR for name in grads}, grads)


def train_on(engine, *parts):
    for part in parts:
        engine.forward_backward(*part)
        result = engine.step()
    return result if result.stepped else engine.flush()


def train_in_a_loop(engine, *parts):
    for x, y in parts:
        engine.backward(engine.criterion(engine(x), y))
        engine.step()


@pytest.mark.parametrize("layout", ["data", "pipeline"])
@on_ranks(2)
def test_batches_that_were_not_announced_are_an_error_on_every_rank(world, layout):
    """Before the update, also where one data rank alone has another batch; the step of equal ones after is as ever."""
    with launch_in_fp64(**{layout: 2}) as context:
        engine, (one, other) = moe_engine(), halves(context)
        before = engine.full_state_dict()
        is_last = context.dp.rank == context.dp.size - 1
        smaller = [tensor[: len(tensor) // 2] for tensor in other]
        complaints = {
            "got 2 batches, but the step has 1": (train_on, one),
            "batch 1 has other inputs": (train_on, *((other, other) if is_last else (one, other))),
            "batch 2 has other inputs": (train_on, one, smaller),
            r"have \[256\] choices of experts .* the step have \[192\]": (train_in_a_loop, one, smaller),
        }
        for words, (train, *parts) in complaints.items():
            if train is train_on or layout == "data":
                engine.count_tokens([one, other])
                with pytest.raises(ValueError, match=words):
                    train(engine, *parts)
        after = engine.full_state_dict()
        assert all(torch.equal(before[name], after[name]) for name in before)
        engine.count_tokens([[tensor.clone() for tensor in part] for part in (one, other)])
        assert train_on(engine, one, other).stepped


@on_ranks(2)
def test_calls_that_cannot_be_served_are_errors_on_every_rank(world):
    with launch_in_fp64(data=2) as context:
        engine, parts = moe_engine(), halves(context)
        engine.forward_backward(*parts[0])
        each_raises(RuntimeError, {"after a batch of this step": lambda: engine.count_tokens(parts)})
        engine.step()
        each_raises(RuntimeError, {"after a batch of this step": lambda: engine.count_tokens(parts)})
        engine.flush()
        each_raises(
            ValueError, {"got 1 batches on one rank, and 2": lambda: engine.count_tokens(parts[context.rank :])}
        )
        spoilt = [parts[0], [tensor.double() for tensor in parts[1]]]
        each_raises(RuntimeError, {"indices": lambda: engine.count_tokens(spoilt)})
        assert all(one.announced is None for one in token_counts(engine.module))
        each_raises(paramp.ConfigError, {"count_tokens: got Tensor": lambda: engine.count_tokens(parts[0][0])})
        each_raises(paramp.ConfigError, {"counts no tokens": lambda: engine_of(nn.Linear(4, 4)).count_tokens([])})
    with paramp.launch_from_torch({"parallel": {"pipeline": 2}, "reproducible": True}):
        each_raises(paramp.ConfigError, {"with reproducible": lambda: moe_engine().count_tokens([])})


def test_a_window_that_was_dropped_takes_the_counts_with_it():
    with launch_in_fp64() as context:
        engine, parts = moe_engine(), halves(context)
        engine.count_tokens(parts)
        engine.zero_grad()  # before the first batch it drops nothing
        assert all(one.announced is not None for one in token_counts(engine.module))
        hook = engine.module.blocks[1].register_forward_pre_hook(lambda *_: 1 // 0)  # the first router has counted
        with pytest.raises(ZeroDivisionError):
            engine(parts[0][0])
        hook.remove()
        train_in_a_loop(engine, *parts)
        engine.count_tokens(parts)
        engine.forward_backward(*parts[0])
        engine.zero_grad()
        assert all(one.announced is None for one in token_counts(engine.module))
        engine.forward_backward(*parts[0])
        assert engine.flush().stepped
