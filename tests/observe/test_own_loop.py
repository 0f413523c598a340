"""The diagnosis of a model in a loop of the user's own, without an engine: planted faults are named, on every rank."""

import contextlib
import itertools
import math
import warnings
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from families import family, long
from pool import on_ranks
from reference import local
from small_engines import Planted, each_raises, engine_of, everywhere, numpys, train_step
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import paramp

NAN, INF = math.nan, math.inf


class Layer(nn.Linear):
    """A linear layer that can spoil its output, the gradient of that, or its weight's gradient."""

    fault, value, calls, number = None, 0.0, (), 0

    def forward(self, x):
        spoils = self.fault is not None and (not self.calls or self.number in self.calls)
        self.number += 1
        if not spoils:
            return super().forward(x)
        if self.fault == "weight gradient":
            return nn.functional.linear(x, Planted.apply(self.weight, self.value, True), self.bias)
        return Planted.apply(super().forward(x), self.value, self.fault == "gradient")


class Scale(nn.Module):
    """A parameter that tensor parallelism leaves plain."""

    def __init__(self, size, dtype=torch.float32):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, dtype=dtype))

    def forward(self, x):
        return x * self.weight


def plain_model():
    """Weights of few bits: all sums are exact, in any order."""
    model = nn.Sequential(Scale(4), Layer(4, 8), nn.ReLU(), Layer(8, 4), Scale(4))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randint(-4, 5, parameter.shape, generator=generator) / 4)
    return model


def batches(num=2):
    generator = torch.Generator().manual_seed(3)
    return [{name: torch.randint(-2, 3, (4, 4), generator=generator).float() for name in "xy"} for _ in range(num)]


def loss_of(model):
    return lambda batch: nn.functional.mse_loss(model(batch["x"]).float(), batch["y"])


def on_mesh(**axes):
    """A context over a mesh of torch's own."""
    return paramp.ParallelContext.from_mesh(init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes)))


KINDS = {
    "ddp": {"dp": 2},
    "fsdp2": {"dp_shard": 2},
    "tp": {"tp": 2},
    "hsdp": {"dp_replicate": 2, "dp_shard": 2},
    "fsdp2-tp": {"dp_shard": 2, "tp": 2},
}
of_each_kind = pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[family, long] if len(axes) > 1 else ()) for kind, axes in KINDS.items()]
)
on_its_ranks = on_ranks(lambda kind: math.prod(KINDS[kind].values()))


@contextlib.contextmanager
def distributed(kind):
    """A context, and the model in it: in DDP, sharded or parallelised by torch alone."""
    with on_mesh(**KINDS[kind]) as context:
        model = plain_model()
        if "tp" in kind:
            parallelize_module(model, context.mesh["tp"], {"1": ColwiseParallel(), "3": RowwiseParallel()})
        if kind == "ddp":
            model = DistributedDataParallel(model)
        data = tuple(name for name in KINDS[kind] if name.startswith("dp_"))
        inside = [model[1]] if kind in ("fsdp2", "hsdp") else []  # of tensor parallelism, outputs are views
        for module in [*inside, model] if data else ():
            fully_shard(module, mesh=context.mesh[data])
        yield context, model


def inner(model, name):
    return model.get_submodule(f"module.{name}" if isinstance(model, DistributedDataParallel) else name)


def parameter_of(model, name):
    module, _, leaf = name.rpartition(".")
    return getattr(inner(model, module), leaf)


@contextlib.contextmanager
def unchanged(tensors):
    before = [local(tensor.detach()).clone() for tensor in tensors]
    yield
    assert all(torch.equal(local(tensor.detach()), old) for tensor, old in zip(tensors, before, strict=True))


class Loop:
    """A plain loop with the stand-alone scaler, which is told of every batch of a step."""

    def __init__(self, model):
        self.model, self.loss = model, loss_of(model)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        self.scaler = paramp.DistributedGradScaler(init_scale=4.0)

    def step(self, batches):
        """The diagnosis of a step that is skipped, equal on every rank; None for one that is not."""
        self.rewind()
        for batch in batches:
            self.scaler.scale(self.loss(batch)).backward()
        self.scaler.step(self.optimizer)
        report = None
        if self.scaler.has_overflowed(self.optimizer):
            self.rewind()
            report = paramp.trace_overflow(self.model, self.loss, batches, scale=self.scaler.get_scale())
            assert everywhere(report) == [report] * dist.get_world_size()
            assert all(parameter.grad is None for parameter in self.model.parameters())
        self.scaler.update()
        self.optimizer.zero_grad()
        return report

    def rewind(self):
        for module in self.model.modules():
            module.number = 0


FAULTS = [("1", "activation", NAN), ("3", "activation", INF), ("3", "gradient", INF), ("1", "weight gradient", NAN)]


@of_each_kind
@on_its_ranks
def test_planted_faults_are_named(world, kind):
    """Each on the last rank, in the second batch of the step."""
    bad = world.size - 1
    with distributed(kind) as (context, model):
        loop = Loop(model)
        assert loop.step(batches()) is None
        for name, fault, value in FAULTS:
            layer = inner(model, name)
            if world.rank == bad:
                layer.fault, layer.value, layer.calls = fault, value, (1,)
            report = loop.step(batches())
            layer.fault = None
            origin = report.origin
            during = "forward" if fault == "activation" else "backward"
            parameter = f"{name}.weight" if fault == "weight gradient" else None
            found = (origin.module, origin.during, origin.parameter, origin.call, origin.place.rank)
            assert found == (name, during, parameter, 1, bad), report
            assert origin.kind == ("NaN" if math.isnan(value) else "inf")
            assert (report.scale, origin.weight) == (loop.scaler.get_scale() * 2, None)
            assert dict(origin.place.axes) == context.coordinates_of(bad)
            if kind == "ddp":  # which does not reduce in the rerun
                assert {gradient.place.rank for gradient in report.gradients} == {bad}
            assert loop.step(batches()) is None
        name_a_batch_and_a_weight(loop, context, bad)


def name_a_batch_and_a_weight(loop, context, bad):
    def alike(axis):
        """The ranks whose coordinates are those of the bad one on all other axes."""
        coordinates = [context.coordinates_of(rank) for rank in range(context.world_size)]
        others = [name for name in context.roles if name != axis]
        return [rank for rank, own in enumerate(coordinates) if all(own[x] == coordinates[bad][x] for x in others)]

    group = alike("tp")
    for leaf in "xy":
        given = batches()
        if context.rank in group:  # the ranks of a model group have the same batch
            given[1][leaf][2, 0] = NAN
        origin = loop.step(given).origin
        assert (origin.module, origin.call, origin.during) == (f"inputs[{leaf!r}] of the batch", 1, "forward")
        assert origin.place.rank == group[0]
    bias = local(inner(loop.model, "1").bias).detach()
    kept = bias.clone()
    if context.rank == bad:
        bias[0] = NAN
    report = loop.step(batches())
    origin = report.origin
    # Every rank of FSDP2 computes with the weights of all.
    assert (origin.module, origin.weight, origin.place.rank, origin.call) == ("1", "bias", alike("dp_shard")[0], 0)
    assert "its bias is not finite itself" in str(report)
    bias.copy_(kept)
    assert loop.step(batches()) is None


@of_each_kind
@on_its_ranks
def test_every_element_of_a_gradient_counts_once(world, kind):
    """Against numpy on the gradients of one process."""
    reference, batch = plain_model(), batches(1)[0]
    (loss_of(reference)(batch) * 64).backward()
    counts, *_, total = numpys(parameter.grad for parameter in reference.parameters())
    with distributed(kind) as (context, model):
        (loss_of(model)(batch) * 64).backward()
        with unchanged([*model.parameters(), *(parameter.grad for parameter in model.parameters())]):
            histogram = paramp.gradient_histogram(model, scale=64.0, context=context)
        assert histogram.counts == counts
        assert (histogram.total, histogram.scale, histogram.dtype) == (total, 64.0, torch.float16)
        assert histogram.largest == max(float(parameter.grad.abs().max()) for parameter in reference.parameters())
        if context.rank == 1:
            local(inner(model, "1").weight.grad).view(-1)[0] = INF
        copies = 2 if kind in ("ddp", "hsdp") else 1  # the replicas of the element, of which one is bad
        assert paramp.gradient_histogram(model, scale=64.0).non_finite == 1 / copies
        model.zero_grad()
        with pytest.raises(paramp.ConfigError, match="no parameter has a gradient; call it after backward"):
            paramp.gradient_histogram(model)


COPIES = {  # the ranks that hold an element of the last one's
    "ddp": {"1.weight": (0, 1), "0.weight": (0, 1)},
    "fsdp2": {"1.weight": (1,)},
    "tp": {"0.weight": (0, 1), "3.bias": (0, 1), "3.weight": (1,)},
    "hsdp": {"1.weight": (1, 3), "0.weight": (1, 3)},
    "fsdp2-tp": {"0.weight": (2, 3), "1.weight": (3,)},
}


@of_each_kind
@on_its_ranks
def test_a_copy_that_differs_in_a_bit_is_found(world, kind):
    bad = world.size - 1
    with distributed(kind) as (context, model):
        optimizer, scaler = torch.optim.AdamW(model.parameters()), paramp.DistributedGradScaler()
        loss_of(model)(batches(1)[0]).backward()
        optimizer.step()
        optimizer.param_groups[0]["lr"] *= 1 + world.rank  # a setting, which is not compared
        model.requires_grad_(world.size > 2)  # frozen weights are, on two ranks
        state = [value for one in optimizer.state.values() for value in one.values()]
        with unchanged([*model.parameters(), *(parameter.grad for parameter in model.parameters()), *state]):
            assert paramp.check_replicas(model, optimizer, scaler) == []
        for name, holders in COPIES[kind].items():
            parameter = parameter_of(model, name)
            for what, tensor in (("weight", parameter), ("optimizer state", optimizer.state[parameter]["exp_avg"])):
                words = local(tensor.detach()).view(-1).view(torch.int32)
                words[0] ^= world.rank == bad
                found = paramp.check_replicas(model, optimizer, scaler, context=context)
                expected = [(what, name, (bad,), holders[:-1])] if len(holders) > 1 else []
                assert [(one.kind, one.parameter, one.ranks, one.others) for one in found] == expected
                words[0] ^= world.rank == bad
        for tensor in scaler.tensors():
            tensor.add_(int(world.rank == bad))
            (found,) = paramp.check_replicas(model, optimizer, scaler)
            assert (found.kind, found.parameter, found.ranks) == ("loss scale", "", (bad,))
            tensor.sub_(int(world.rank == bad))
        assert paramp.check_replicas(model, optimizer, scaler) == []


@on_ranks(4)
def test_a_rank_without_copies_takes_part(world):
    """It has a pipeline stage without parameters."""
    with on_mesh(pp=2, dp=2) as context:
        model = nn.ReLU() if context.is_first_stage else plain_model()
        assert paramp.check_replicas(model) == []
        if world.rank == 3:
            model[1].bias.detach()[0] += 1.0
        (found,) = paramp.check_replicas(model)
        assert (found.parameter, found.ranks, found.others) == ("1.bias", (3,), (2,))


# ----------------------------------------------------------------------------------------------------- one process


@pytest.mark.parametrize("fault", ["activation", "gradient", "weight gradient"])
def test_the_report_is_the_engines(fault):
    """The same record, value for value."""
    batch, model = batches(1)[0], plain_model()
    model[3].fault, model[3].value = fault, INF
    with paramp.launch_from_torch() as context:
        own = paramp.trace_overflow(model, loss_of(model), [batch], scale=1.0, context=context)
        engine = engine_of(model, optimizer=partial(torch.optim.SGD, lr=0.0))
        assert train_step(engine, batch["x"], batch["y"]).overflow
        assert engine.diagnose_overflow() == own
        assert own.origin.module == "3"


def test_without_a_context_in_one_process_all_four_work():
    model = plain_model()
    loop = Loop(model)
    loop.loss(batches(1)[0]).backward()
    counts, *_, total = numpys(parameter.grad for parameter in model.parameters())
    histogram = paramp.gradient_histogram(model)
    assert (histogram.counts, histogram.total) == (counts, total)
    assert paramp.check_replicas(model, loop.optimizer, loop.scaler) == []
    model[1].weight.grad[0] = INF
    assert [str(found.place) for found in loop.scaler.diagnose(model.named_parameters()).gradients] == ["rank 0"]
    with paramp.start_heartbeat(5.0) as heartbeat:
        assert not heartbeat.is_running
    for loss, name in (
        (lambda batch: model(batch["x"] * INF).mean(), "the model's input"),
        (lambda batch: loop.loss(batch) * NAN, "the criterion"),
    ):
        assert paramp.trace_overflow(model, loss, batches(1), scale=2.0).origin.module == name
    model[1].fault, model[1].value = "activation", NAN
    origin = paramp.trace_overflow(model, loop.loss, batches(1), scale=2.0).origin
    assert (origin.module, origin.place.rank, origin.place.axes) == ("1", 0, ())


class Trap(nn.Module):
    """Infinite where dropout drops the first element."""

    def __init__(self):
        super().__init__()
        self.norm, self.dropout = nn.BatchNorm1d(2), nn.Dropout(0.5)

    def forward(self, x):
        return 1.0 / self.dropout(torch.ones_like(self.norm(x)))[0, 0] + x.sum() * self.norm.weight.sum()


def drops(seed):
    torch.manual_seed(seed)
    return [bool(nn.functional.dropout(torch.ones(4, 2), 0.5)[0, 0] == 0) for _ in range(2)]


def test_a_recorded_batch_runs_with_the_random_numbers_of_its_step():
    model, x = Trap(), torch.arange(8.0).view(4, 2)
    torch.manual_seed(next(seed for seed in range(100) if drops(seed) == [True, False]))
    recorded = paramp.record_batch(x)
    assert not model(x).isfinite()
    states = torch.get_rng_state()
    with unchanged([model.norm.running_mean]):
        report = paramp.trace_overflow(model, model, [recorded], scale=1.0)
    assert torch.equal(torch.get_rng_state(), states)
    assert (report.kind, report.origin.kind) == ("forward", "inf")
    bare = paramp.trace_overflow(model, model, [x], scale=1.0)
    assert "a rerun of the batch gave finite values" in str(bare)
    assert "scale or batches are not those of the step" in str(bare)


def test_a_compiled_checkpointed_and_scripted_model_is_run_eagerly_under_its_own_names():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = plain_model()
    model[3].fault, model[3].value = "activation", NAN
    model[3] = checkpoint_wrapper(model[3])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a FutureWarning from torch 2.15 on
        model.append(torch.jit.script(nn.Linear(4, 4)))
    model[1].compile(backend="eager")
    compiled = torch.compile(model, backend="eager")
    report = paramp.trace_overflow(compiled, loss_of(compiled), batches(1), scale=1.0)
    assert report.origin.module == "3"
    assert {found.name for found in report.gradients} >= {"3.weight", "3.bias"}
    assert "ran eagerly" in str(report)


@on_ranks(2)
def test_an_overflow_in_the_sum_over_ranks_or_batches_is_named(world):
    with on_mesh(dp=2):
        model = nn.Sequential(Scale(1, torch.float16))
        x = torch.full((2, 1), 1.5, dtype=torch.float16)  # times the scale: 49152, of 65504, or more
        for given, during in (([x], "sum over ranks"), ([x, x], "sum over microbatches")):
            report = paramp.trace_overflow(model, lambda x: model(x).mean(), given, scale=2.0**15)
            assert (report.origin.during, report.origin.parameter) == (during, "0.weight")
        report = paramp.trace_overflow(model, lambda x: model(x).mean(), [x], scale=2.0**17)
        assert (report.kind, report.origin.helped_by_scale) == ("backward", True)


# ---------------------------------------------------------------------------------------------------------- errors


@on_ranks(2)
def test_a_mistake_on_one_rank_raises_on_every_rank(world):
    model, (batch, other), first = plain_model(), batches(), world.rank == 0
    check, count, beat, loss = paramp.check_replicas, paramp.gradient_histogram, paramp.start_heartbeat, loss_of(model)
    sgd, scaler = torch.optim.SGD(model.parameters(), lr=1.0), paramp.DistributedGradScaler()

    def trace(loss=loss, batches=(batch,), scale=1.0):
        return paramp.trace_overflow(model, loss, batches, scale=scale)

    def one_each():
        return check(model) if first else count(model)

    each_raises(ValueError, {"got no context in a world of 2 ranks": lambda: check(model)})
    for call in (trace, lambda: count(model), beat):
        each_raises(ValueError, {"from_mesh": call})
    on_zero = "" if first else "rank 0: "
    with on_mesh(dp=2) as context:
        each_raises(
            ValueError,
            {
                f"^{on_zero}model: got list": lambda: check([] if first else model),
                f"^{on_zero}loss: got str": lambda: trace("loss" if first else loss),
                "scale: got 0.0, expected": lambda: count(model, scale=0.0 if first else 1.0),
                "scale: got nan, expected": lambda: trace(scale=NAN),
                "dtype: got torch.int64": lambda: count(model, dtype=torch.int64),
                "batches: got dict": lambda: trace(batches=batch),
                "batches: got none": lambda: trace(batches=[]),
                "optimizer: got .*expected a torch.optim": lambda: check(model, "sgd"),
                "scaler: got .*expected a paramp.Dist": lambda: check(model, None, torch.amp.GradScaler("cpu")),
                "optimizer: rank 0 has False, but rank 1 has True": lambda: check(model, None if first else sgd),
                "scaler: rank 0 has False, but rank 1 has True": lambda: check(model, None, None if first else scaler),
                "timeout: got -1": lambda: beat(-1),
                "timeout: rank 0 has '5.0', but rank 1 has '6.0'": lambda: beat(5.0 + world.rank),
                "number of batches: rank 0 has 2": lambda: trace(batches=[batch, other] if first else [batch]),
                "the parameters of rank 0 .6, hash": lambda: check(model if first else nn.Linear(4, 4)),
                "context: got 'dp', expected": lambda: check(model, context="dp"),
                "start one process for each GPU": lambda: count(nn.DataParallel(nn.Linear(2, 2))),
                "rank 0 calls check_replicas, but rank 1 gradient_histogram": one_each,
            },
        )
        assert check(model) == []
    each_raises(ValueError, {"this one was closed": lambda: check(model, context=context)})
    with on_mesh(pp=2):
        each_raises(ValueError, {"2 pipeline stages": trace})


@on_ranks(2)
def test_a_rank_that_calls_alone_raises_in_bounded_time(world):
    with on_mesh(dp=2):  # whose next call on all ranks is as any other
        if world.rank == 0:
            error = pytest.raises(paramp.LaunchError, match=r"every rank has to call it; .* 1 did not join")
            with mock.patch.dict("os.environ", PARAMP_LAUNCH_TIMEOUT="0.3"), error:
                paramp.check_replicas(plain_model())
        dist.barrier()
        assert paramp.check_replicas(plain_model()) == []


@on_ranks(2)
def test_each_call_leaves_text_in_the_store(world):
    with distributed("ddp") as (_, model):
        store, counts, loss = dist.distributed_c10d._get_default_store(), [], loss_of(model)
        loss(batches(1)[0]).backward()
        check, count = partial(paramp.check_replicas, model), partial(paramp.gradient_histogram, model)
        trace = partial(paramp.trace_overflow, model, loss, batches(1), scale=1.0)

        def watch():
            paramp.start_heartbeat(60.0).stop()

        for call in (lambda: None, check, check, count, count, trace, trace, watch, watch):
            call()
            if call is count:
                loss(batches(1)[0]).backward()
            dist.barrier()
            counts.append(store.num_keys())
            dist.barrier()
        assert all(before < after for before, after in itertools.pairwise(counts)), counts


@on_ranks(2)
def test_a_batch_that_fails_on_one_rank_is_reported_on_every_rank(world):
    with distributed("ddp") as (_, model):
        batch = batches(1)[0] if world.rank == 0 else {"x": torch.ones(1, 3), "y": torch.ones(1, 4)}
        report = paramp.trace_overflow(model, loss_of(model), [batch], scale=1.0)
        assert "the rerun failed: RuntimeError: The size of tensor a (3)" in str(report)
        assert paramp.trace_overflow(model, lambda _: 1.0, [batch], scale=1.0).unknown == (
            "the rerun failed: ConfigError: loss: returned float, expected a tensor of one element with a gradient"
        )
