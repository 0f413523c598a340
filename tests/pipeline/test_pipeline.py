"""Stages in a schedule: their shapes are found without a trace, what they send, what fails."""

import itertools
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from beside_plain import randn, seeded, train_both
from pool import on_ranks, run_on_ranks
from small_engines import engine_of
from torch import nn
from torch.distributed.pipelining import stage as torchs_stage
from torch.nn.utils.parametrizations import spectral_norm
from traceable import awkward_model

import paramp
from paramp.pipeline.torch_stage import LinkedStage, RecordedStage
from paramp.precision.modes import Precision


def chain(*widths):
    return nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in itertools.pairwise(widths)))


class Counting(nn.Module):
    """Counts its calls in a buffer, notes a random number in each, and changes its input."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.register_buffer("calls", torch.zeros(()))
        self.drawn = []

    def forward(self, x):
        self.calls += 1
        self.drawn.append((torch.rand(()).item(), random.random(), np.random.random()))
        x.data.add_(1)
        return x * self.weight


class CountingThroughData(Counting):
    def forward(self, x):
        self.calls.data.add_(1)
        return x * self.weight


class CountingAside(Counting):
    """Counts in a buffer that is in no state dict."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()), persistent=False)


class CountingLater(Counting):
    """Counts from its second call on, after the one that finds shapes."""

    def forward(self, x):
        self.drawn.append(x)
        if len(self.drawn) > 1:
            self.calls += 1
        return x * self.weight


class ReadingStatistics(nn.Sequential):
    """Reads those of a norm on another stage, in the code between modules."""

    def forward(self, x):
        return super().forward(x) + self[1].running_mean


class SetUp(nn.Module):
    """Its first batch sets up a parameter in place and another one anew, as a layer's that depend on data do."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(1))
        self.offset = nn.Parameter(torch.zeros(()), requires_grad=False)
        self.is_set = False

    def forward(self, x):
        if not self.is_set:
            self.is_set = True
            self.scale.data.fill_(2 * x.any() - 1)
            self.offset = nn.Parameter(x.any().float(), requires_grad=False)
        return x * self.scale[0] + self.offset


def seed_all(number):
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(number)


@on_ranks(4)
def test_finding_shapes_leaves_no_trace(world):
    """torch's own inference would count a call of garbage and move the random state."""
    with paramp.launch_from_torch({"parallel": {"pipeline": {"size": 4, "microbatches": 4}}}) as context:
        engine = engine_of(nn.Sequential(*(Counting() for _ in range(4))), lambda out, y: (out - y).mean())
        seed_all(5)
        engine.forward_backward(x := torch.ones(8, 2), torch.zeros(8, 2))
        assert x.eq(1 if context.pp.rank else 2).all()
        counter = next(module for module in engine.module.modules() if isinstance(module, Counting))
        assert counter.calls == 4
        with context.activation_stream():
            assert [drawn[0] for drawn in counter.drawn[-4:]] == [torch.rand(()).item() for _ in range(4)]
        state = torch.get_rng_state()
        seed_all(5)
        assert torch.equal(state, torch.get_rng_state())
        assert [drawn[1:] for drawn in counter.drawn[-4:]] == [(random.random(), np.random.random()) for _ in range(4)]


def pairs(*sizes):
    """Batches of ``sizes``, given without the last dim, which is 4."""
    return [[randn(*size, 4, seed=seed + 10 * index) for index in range(2)] for seed, size in enumerate(sizes)]


@pytest.mark.parametrize(
    ("precision", "dtype"), [("16-mixed", torch.float16), ("bf16-naive", torch.bfloat16), ("32-true", torch.float32)]
)
@on_ranks(4)
def test_activations_travel_in_the_compute_dtype(world, precision, dtype):
    sent, original = [], dist.isend

    class Spy(dist.P2POp):
        def __new__(cls, op, tensor, *args, **kwargs):
            if op is original:
                sent.append(tensor.dtype)
            return super().__new__(cls, op, tensor, *args, **kwargs)

    with (
        paramp.launch_from_torch({"parallel": {"pipeline": 4}, "precision": precision}),
        pytest.MonkeyPatch.context() as patch,
    ):
        engine, x = engine_of(chain(3, 3, 3, 3, 3)), torch.ones(8, 3)
        engine.forward_backward(x, x)  # finds shapes first
        engine.zero_grad()
        patch.setattr(torchs_stage.dist, "P2POp", Spy)
        engine.forward_backward(x, x)
    assert set(sent) == {dtype}


class Adding(nn.Module):
    """Changes its input in place, and grows a buffer."""

    def __init__(self):
        super().__init__()
        self.linear, self.position = nn.Linear(4, 4), nn.Parameter(torch.ones(4))
        self.register_buffer("cache", torch.zeros(0, 4), persistent=False)

    def forward(self, x):
        if len(self.cache) < len(x):
            self.register_buffer("cache", torch.full((len(x), 4), 0.5), persistent=False)
        x += self.position
        return self.linear(x) + self.cache[: len(x)]


class Sum(nn.Module):
    """Its input's gradient is expanded."""

    def forward(self, x):
        return x.sum(1, keepdim=True).repeat(1, 4)


class Transposed(nn.Linear):
    """Its input's gradient is transposed."""

    def forward(self, x):
        return (self.weight @ x.t()).t()


def strided():
    layers = [nn.Linear(4, 4), Sum(), nn.Linear(4, 4), Transposed(4, 4, bias=False), Sum(), nn.Linear(4, 4)]
    return nn.Sequential(*layers)


FOLLOWED = {
    "batches of several shapes": (4, lambda: chain(4, 4, 4, 4, 4), "1f1b", ["1", "2", "3"], [(4,), (8,), (4,), (12,)]),
    "awkward stages": (4, awkward_model, "1f1b", ["2", "4", "5"], [(8, 4)] * 3),
    "changed inputs": (2, lambda: nn.Sequential(nn.Linear(4, 4), Adding(), Adding()), "1f1b", ["1"], [(4,)]),
    "a cache of both stages": (2, lambda: nn.Sequential(nn.Linear(4, 4), *[Adding()] * 2), "1f1b", ["2"], [(4,), (8,)]),
    "what zeros do not set up": (2, lambda: nn.Sequential(nn.Linear(4, 4), SetUp()), "1f1b", ["1"], [(4,), (8,)]),
    "strides": (2, strided, "1f1b", ["3"], [(8,)]),
    "strides, zero-bubble": (2, strided, "interleaved-zero-bubble", ["1", "3", "4"], [(8,)]),
    "strides, zbv": (2, strided, "zbv", ["1", "3", "4"], [(8,)]),
    "strides, dualpipev": (2, strided, "dualpipev", ["1", "3", "4"], [(8,)]),
}
"""The ranks, the model, the schedule, where it is split, and the sizes of batches."""


@pytest.mark.parametrize("which", FOLLOWED)
def test_stages_follow_plain_torch(which):
    """Whatever they change, share or reorder; and batches of several shapes, in training and in evaluation."""
    run_on_ranks(FOLLOWED[which][0], __name__, "follow", {"which": which})


def follow(world, which):
    size, build, schedule, split, sizes = FOLLOWED[which]
    pipeline = {"size": size, "microbatches": 4, "schedule": schedule, "split": split}
    with paramp.launch_from_torch({"parallel": {"pipeline": pipeline}}) as context:
        plain, engine = seeded(build), engine_of(seeded(build))
        train_both(context, engine, plain, pairs(*sizes))
        for x, y in pairs(*sizes):
            expected = nn.functional.mse_loss(plain(x), y).item()
            assert engine.evaluate(x, y).item() == pytest.approx(expected, abs=1e-6)


@on_ranks(2)
def test_a_stage_that_fails_is_an_error_on_every_rank(world):
    """The error is plain torch's, which does not pass over a module that is None either."""
    with paramp.launch_from_torch({"parallel": {"pipeline": {"size": 2, "split": ["2"]}}}):
        for stage, middle, error in ((0, None, "TypeError: 'NoneType'"), (1, nn.ReLU(), "RuntimeError: ")):
            engine = engine_of(nn.Sequential(nn.Linear(4, 4), middle, nn.Linear(3, 3)))
            message = rf"stage {stage} of 2 fails on a microbatch of inputs\[0\] \(2, 4\): {error}"
            with pytest.raises(paramp.ConfigError, match=message):
                engine.forward_backward(torch.ones(4, 4), torch.ones(4, 3))
        counting = Counting(), CountingThroughData(), CountingAside(), CountingLater()
        for shared in (*counting, spectral_norm(nn.Linear(4, 4))):
            first = "[02]" if isinstance(shared, CountingLater) else "0"  # after the trial each rank has its own
            name = rf"{first}\.(calls|parametrizations\.weight\.0\._u)"
            engine = engine_of(nn.Sequential(shared, nn.Linear(4, 4), shared))
            with pytest.raises(paramp.ConfigError, match=f"the forward changes the buffer '{name}', of which several"):
                engine.forward_backward(torch.ones(4, 4), torch.ones(4, 4))
        engine = engine_of(ReadingStatistics(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)))
        with pytest.raises(paramp.ConfigError, match=r"changes the buffer '1\.running_mean', of which several"):
            engine.forward_backward(torch.ones(4, 4), torch.ones(4, 4))


@on_ranks(4)
def test_sharded_logits_between_stages_are_an_error_on_every_rank(world):
    """The next stage would take a rank's part of the vocabulary for the whole."""
    with paramp.launch_from_torch({"parallel": {"tensor": 2, "pipeline": {"size": 2, "split": ["1"]}}}):
        engine = engine_of(chain(4, 8, 8), plan={"0": "vocab_logits"})
        with pytest.raises(
            paramp.ConfigError,
            match="a tensor that is sharded over ranks, as logits of 'vocab_logits' and outputs of torch's Seq",
        ):
            engine.forward_backward(torch.ones(4, 4), torch.ones(4, 8))


class Skipped(nn.Linear):
    """A layer that the first batches leave out."""

    left_out = True

    def forward(self, x):
        return x if self.left_out else super().forward(x)


@on_ranks(2)
def test_a_gradient_that_the_first_batch_had_not_is_an_error(world):
    """It would not be sent back, and the stage not be trained. An evaluation needs none."""
    x, layer = torch.ones(4, 4), Skipped(4, 4)
    with paramp.launch_from_torch({"parallel": {"pipeline": 2}}):
        engine = engine_of(nn.Sequential(layer, nn.Linear(4, 4)))
        engine.evaluate(x, x)
        engine.evaluate(x.clone().requires_grad_(), x)
        engine.forward_backward(x, x)
        engine.zero_grad()
        layer.left_out = False
        engine.evaluate(x, x)
        with pytest.raises(paramp.ConfigError, match="or a tensor has a gradient that the first one had not"):
            engine.forward_backward(x, x)


@pytest.mark.parametrize(("schedule", "mode"), [("1f1b", "32-true"), ("interleaved-zero-bubble", "bf16-naive")])
@on_ranks(2)
def test_a_criterion_of_weights_of_another_stage_is_an_error_on_every_rank(world, schedule, mode):
    with paramp.launch_from_torch({"parallel": {"pipeline": {"size": 2, "schedule": schedule}}, "precision": mode}):
        model, x, used = chain(4, 4, 4, 4, 4), torch.ones(4, 4), []
        last = model[3].weight
        engine = engine_of(model, lambda output, _: output.mean() + sum(weight.square().sum() for weight in used))
        used.append(model[0].weight)
        with pytest.raises(
            paramp.ConfigError, match=r"criterion: it uses '0\.weight' of the model that initialize was"
        ):
            engine.forward_backward(x, x)
        engine.zero_grad()
        used[0] = last  # of the last stage
        engine.forward_backward(x, x)
        assert (last.grad is None) == ("3.weight" not in dict(engine.named_parameters()))
        assert engine.step().stepped
        model[0].register_forward_hook(lambda _, inputs, output: output + used[0].sum())  # on the other rank
        with pytest.raises(paramp.ConfigError, match=r"it uses '3\.weight' of the model"):
            engine.forward_backward(x, x)


def test_the_loss_of_a_batch_that_has_failed_is_zero_and_so_are_its_gradients():
    linked, model = LinkedStage(SimpleNamespace(device=torch.device("cpu")), pytest.fail), nn.Linear(4, 4)
    linked.output = {"logits": model(torch.ones(2, 4)), "labels": torch.zeros(2)}
    loss = linked.no_loss(torch.zeros(1))
    loss.backward()
    assert loss == 0.0
    assert not any(parameter.grad.any() for parameter in model.parameters())


def cut(*_):
    torch._assert_async(torch.zeros(()), "Connection closed by peer")  # from C++, as gloo's error is


def wrapped(*_):
    try:
        cut()
    except RuntimeError as error:
        raise RuntimeError(f"my layer: {error}") from error


@pytest.mark.parametrize("run_backward", [cut, wrapped])
def test_a_backward_that_has_lost_its_connection_ends_the_schedule(run_backward):
    """Any other failure is kept, and the schedule continues: no rank would answer to what it sends."""
    of_rank = SimpleNamespace(precision=Precision.parse("32-true"))
    linked = SimpleNamespace(failed=lambda error: None, stage=of_rank)
    stage = SimpleNamespace(_run_backward=run_backward, linked=linked)
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        RecordedStage.backward_maybe_with_nosync(stage, "full", {})


class WithLoss(nn.Module):
    """Multiplies by its weight, whose square it adds to the loss that it was given."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), 0.5))

    def forward(self, pair):
        x, loss = pair if isinstance(pair, tuple) else (pair, 0.0)
        return x * self.weight, loss + self.weight.square().sum()


@on_ranks(2)
def test_a_loss_between_stages_has_the_loss_scale_as_its_gradient(world):
    """Beyond the range of fp16, which the hidden states are sent in."""
    config = {"precision": {"mode": "16-mixed", "init_scale": 2.0**18}, "parallel": {"pipeline": 2}}
    with paramp.launch_from_torch(config) as context:
        model = nn.Sequential(WithLoss(), WithLoss())
        engine = engine_of(model, lambda pair, y: 2.0**-20 * (pair[0] - y).mean() + pair[1])
        engine.forward_backward(torch.ones(4, 4), torch.zeros(4, 4))
        (parameter,) = engine.parameters()
        scale = engine.scaler.get_scale()
        expected = torch.full((4,), 1.0 + 2.0**-20 * 0.5 / 4)
        torch.testing.assert_close(parameter.grad / scale, expected, rtol=1e-6, atol=0.0)
        assert engine.step().stepped, context.rank
