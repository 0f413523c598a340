"""The diagnosis of a model in a loop of the user's own, without an engine: planted faults are named, on every rank."""

import contextlib
import math
import os

import numpy as np
import pytest
import torch
import torch.distributed as dist
from families import cases, family
from pool import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import paramp

NAN, INF = math.nan, math.inf


class Planted(torch.autograd.Function):
    """The identity; it adds a value to the output, or in the backward to the gradient."""

    @staticmethod
    def forward(ctx, x, value, backward):
        ctx.value = value if backward else 0.0
        return x.clone() if backward else x + value

    @staticmethod
    def backward(ctx, gradient):
        return gradient + ctx.value, None, None


class Layer(nn.Linear):
    """A linear layer that can spoil its output, the gradient of that, or its weight's gradient."""

    fault, value, calls, number = None, 0.0, (), 0

    def forward(self, x):
        spoils = not self.calls or self.number in self.calls
        self.number += 1
        if self.fault is None or not spoils:
            return super().forward(x)
        if self.fault == "weight gradient":
            return nn.functional.linear(x, Planted.apply(self.weight, self.value, True), self.bias)
        return Planted.apply(super().forward(x), self.value, self.fault == "gradient")


class Scale(nn.Module):
    """A parameter that tensor parallelism leaves plain."""

    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

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


KINDS = {
    "ddp": {"dp": 2},
    "fsdp2": {"dp_shard": 2},
    "tp": {"tp": 2},
    "hsdp": {"dp_replicate": 2, "dp_shard": 2},
    "fsdp2-tp": {"dp_shard": 2, "tp": 2},
}


@contextlib.contextmanager
def distributed(kind, dtype=None):
    """A context, and the model in it: in DDP, sharded or parallelised by torch alone."""
    axes = KINDS[kind]
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    with paramp.ParallelContext.from_mesh(mesh) as context:
        model = plain_model()
        if "tp" in axes:
            parallelize_module(model, mesh["tp"], {"1": ColwiseParallel(), "3": RowwiseParallel()})
        if kind == "ddp":
            model = DistributedDataParallel(model)
        data = tuple(name for name in axes if name.startswith("dp_"))
        inside = [model[1]] if kind in ("fsdp2", "hsdp") else []  # of tensor parallelism, outputs are views
        for module in [*inside, model] if data else ():
            fully_shard(module, mesh=mesh[data], mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
        yield context, model


def inner(model, name):
    return model.get_submodule(f"module.{name}" if isinstance(model, DistributedDataParallel) else name)


def local(tensor):
    return getattr(tensor, "_local_tensor", tensor)


class Loop:
    """A plain loop with the stand-alone scaler, which is told of every batch of a step."""

    def __init__(self, model, scale=4.0):
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        self.scaler = paramp.DistributedGradScaler(init_scale=scale)

    def loss(self, batch):
        return nn.functional.mse_loss(self.model(batch["x"]).float(), batch["y"])

    def step(self, batches):
        """The diagnosis of a step that is skipped, equal on every rank; None for one that is not."""
        for batch in batches:
            self.scaler.scale(self.loss(batch)).backward()
        self.scaler.step(self.optimizer)
        report = None
        if self.scaler.has_overflowed(self.optimizer):
            self.rewind()
            report = paramp.trace_overflow(self.model, self.loss, batches, scale=self.scaler.get_scale())
            everyone = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, report)
            assert everyone == [report] * len(everyone)
            assert all(parameter.grad is None for parameter in self.model.parameters())
        self.scaler.update()
        self.optimizer.zero_grad()
        self.rewind()
        return report

    def rewind(self):
        for module in self.model.modules():
            module.number = 0


def batches(num=2):
    generator = torch.Generator().manual_seed(3)
    return [{name: torch.randint(-2, 3, (4, 4), generator=generator).float() for name in "xy"} for _ in range(num)]


def name_faults(kind, world):
    """Faults on the last rank, each in the second batch of the step; the place is known, because it is planted there.

    A rank of FSDP2 computes with the weights of all, so that a weight is not finite on the lowest one too.
    """
    bad = world.size - 1
    with distributed(kind) as (context, model):
        loop = Loop(model)
        assert loop.step(batches()) is None
        for name, fault, value in (
            ("1", "activation", NAN),
            ("3", "activation", INF),
            ("3", "gradient", INF),
            ("1", "weight gradient", NAN),
        ):
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
    group = [rank for rank in range(context.world_size) if alike(context, rank, bad, "tp")]
    for leaf in "xy":
        given = batches()
        if context.rank in group:  # the ranks of a model group have the same batch
            given[1][leaf][2, 0] = NAN
        origin = loop.step(given).origin
        assert (origin.module, origin.call, origin.during) == (f"inputs[{leaf!r}] of the batch", 1, "forward")
        assert origin.place.rank == group[0]
    bias = inner(loop.model, "1").bias
    kept = local(bias).detach().clone()
    if context.rank == bad:
        local(bias).detach()[0] = NAN
    origin = loop.step(batches()).origin
    gathered_by = [rank for rank in range(context.world_size) if alike(context, rank, bad, "dp_shard")]
    assert (origin.module, origin.weight, origin.place.rank, origin.call) == ("1", "bias", gathered_by[0], 0)
    local(bias).detach().copy_(kept)
    assert loop.step(batches()) is None


def alike(context, rank, other, axis):
    """Whether two ranks have the same coordinates on all axes but one."""
    own, others = context.coordinates_of(rank), context.coordinates_of(other)
    return all(own[name] == others[name] for name in context.roles if name != axis)


@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "tp"])
@on_ranks(2)
def test_planted_faults_are_named_on_two_ranks(world, kind):
    name_faults(kind, world)


@family
@pytest.mark.parametrize("kind", cases("own loop faults", ["hsdp", "fsdp2-tp"], ["fsdp2-tp"], 1))
@on_ranks(4)
def test_planted_faults_are_named_on_four_ranks(world, kind):
    name_faults(kind, world)


def test_the_report_is_the_engines():
    """The same record, value for value, of a fault planted in the forward and in the backward."""
    batch = batches(1)[0]
    for fault in ("activation", "gradient", "weight gradient"):
        model = plain_model()
        model[3].fault, model[3].value = fault, INF
        with paramp.launch_from_torch() as context:
            own = paramp.trace_overflow(model, Loop(model).loss, [batch], scale=1.0, context=context)
            sgd = torch.optim.SGD(model.parameters(), lr=0.0)
            engine, *_ = paramp.initialize(model, sgd, nn.functional.mse_loss)
            engine.forward_backward(batch["x"], batch["y"])
            assert engine.step().overflow
            assert engine.diagnose_overflow() == own
            assert own.origin.module == "3"


def test_without_a_context_in_one_process_all_four_work():
    model = plain_model()
    loop = Loop(model)
    loop.loss(batches(1)[0]).backward()
    counts, total = numpys([parameter.grad for parameter in model.parameters()])
    histogram = paramp.gradient_histogram(model)
    assert (histogram.counts, histogram.total) == (counts, total)
    assert paramp.check_replicas(model, loop.optimizer, loop.scaler) == []
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
        self.norm = nn.BatchNorm1d(2)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x):
        return 1.0 / self.dropout(torch.ones_like(self.norm(x)))[0, 0] + x.sum() * self.norm.weight.sum()


def drops(seed):
    torch.manual_seed(seed)
    return [bool(nn.functional.dropout(torch.ones(4, 2), 0.5)[0, 0] == 0) for _ in range(2)]


def test_a_recorded_batch_runs_with_the_random_numbers_of_its_step():
    model = Trap()
    seed = next(seed for seed in range(100) if drops(seed) == [True, False])
    torch.manual_seed(seed)
    x = torch.arange(8.0).view(4, 2)
    recorded = paramp.record_batch(x)
    assert not model(x).isfinite()
    states, mean = torch.get_rng_state(), model.norm.running_mean.clone()
    report = paramp.trace_overflow(model, model, [recorded], scale=1.0)
    assert (report.kind, report.origin.kind) == ("forward", "inf")
    assert torch.equal(torch.get_rng_state(), states)
    assert torch.equal(model.norm.running_mean, mean)
    bare = paramp.trace_overflow(model, model, [x], scale=1.0)
    assert "a rerun of the batch gave finite values" in str(bare)
    assert "scale or batches are not those of the step" in str(bare)


def test_a_compiled_and_checkpointed_model_is_run_eagerly_under_its_own_names():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = plain_model()
    model[3].fault, model[3].value = "activation", NAN
    model[3] = checkpoint_wrapper(model[3])
    model[1].compile(backend="eager")
    compiled = torch.compile(model, backend="eager")
    report = paramp.trace_overflow(compiled, Loop(compiled).loss, batches(1), scale=1.0)
    assert report.origin.module == "3"
    assert {found.name for found in report.gradients} >= {"3.weight", "3.bias"}
    assert "ran eagerly" in str(report)


class Half(nn.Module):
    """Its gradient is the scale times the mean of x, in fp16."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, dtype=torch.float16))

    def forward(self, x):
        return (x * self.weight).mean()


@on_ranks(2)
def test_an_overflow_in_the_sum_over_ranks_or_batches_is_named(world):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    with paramp.ParallelContext.from_mesh(mesh):
        model, x = Half(), torch.full((2, 1), 1.5, dtype=torch.float16)
        for scale, given, during in (
            (2.0**15, [x], "sum over ranks"),  # 49152 on each, of 65504
            (2.0**15, [x, x], "sum over microbatches"),
        ):
            report = paramp.trace_overflow(model, model, given, scale=scale)
            assert (report.origin.during, report.origin.parameter) == (during, "weight")
        report = paramp.trace_overflow(model, model, [x], scale=2.0**17)
        assert (report.kind, report.origin.helped_by_scale) == ("backward", True)


# ------------------------------------------------------------------------------------------------------- histogram


def numpys(gradients):
    """Counts of the exponents of whole gradients, and of their elements."""
    values = np.concatenate([gradient.detach().double().numpy().ravel() for gradient in gradients])
    finite = values[np.isfinite(values) & (values != 0)]
    exponents, counts = np.unique(np.floor(np.log2(np.abs(finite))).astype(int), return_counts=True)
    return dict(zip(exponents.tolist(), counts.tolist(), strict=True)), values.size


def count_gradients(kind):
    """The histogram of a distributed model, against numpy on the gradients of one process; one of them is planted."""
    reference = plain_model()
    batch = batches(1)[0]
    (nn.functional.mse_loss(reference(batch["x"]), batch["y"]) * 64).backward()
    with distributed(kind) as (context, model):
        (Loop(model).loss(batch) * 64).backward()
        everything = [*model.parameters(), *(parameter.grad for parameter in model.parameters())]
        before = [local(tensor.detach()).clone() for tensor in everything]
        histogram = paramp.gradient_histogram(model, scale=64.0, context=context)
        assert all(torch.equal(local(tensor.detach()), old) for tensor, old in zip(everything, before, strict=True))
        counts, total = numpys([parameter.grad for parameter in reference.parameters()])
        assert histogram.counts == counts
        assert (histogram.total, histogram.scale, histogram.dtype) == (total, 64.0, torch.float16)
        assert histogram.largest == max(float(parameter.grad.abs().max()) for parameter in reference.parameters())
        if context.rank == 1:
            local(inner(model, "1").weight.grad).view(-1)[0] = INF
        copies = {"ddp": 2, "hsdp": 2}.get(kind, 1)  # the replicas of the element, of which one is bad
        assert paramp.gradient_histogram(model, scale=64.0).non_finite == 1 / copies
        model.zero_grad()
        with pytest.raises(paramp.ConfigError, match="no parameter has a gradient; call it after backward"):
            paramp.gradient_histogram(model)


@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "tp"])
@on_ranks(2)
def test_every_element_of_a_gradient_counts_once_on_two_ranks(world, kind):
    count_gradients(kind)


@family
@pytest.mark.parametrize("kind", cases("own loop gradients", ["hsdp", "fsdp2-tp"], ["fsdp2-tp"], 1))
@on_ranks(4)
def test_every_element_of_a_gradient_counts_once_on_four_ranks(world, kind):
    count_gradients(kind)


# -------------------------------------------------------------------------------------------------------- replicas


def find_replicas(kind, changes):
    """A bit of one rank's copy is found: ``changes`` has its parameter, and the ranks that hold the element."""
    with distributed(kind) as (context, model):
        optimizer = torch.optim.AdamW(model.parameters())
        Loop(model).loss(batches(1)[0]).backward()
        optimizer.step()
        scaler = paramp.DistributedGradScaler()
        state = [value for one in optimizer.state.values() for value in one.values()]
        everything = [*model.parameters(), *(parameter.grad for parameter in model.parameters()), *state]
        before = [local(tensor.detach()).clone() for tensor in everything]
        assert paramp.check_replicas(model, optimizer, scaler) == []
        assert all(torch.equal(local(tensor.detach()), old) for tensor, old in zip(everything, before, strict=True))
        for name, holders in changes.items():
            module, _, leaf = name.rpartition(".")
            parameter = getattr(inner(model, module), leaf)
            for what, tensor in (
                ("weight", local(parameter).detach()),
                ("optimizer state", local(optimizer.state[parameter]["exp_avg"])),
            ):
                bad = context.world_size - 1
                kept = tensor.clone()
                if context.rank == bad:
                    tensor.view(-1).view(torch.int32)[0] ^= 1
                found = paramp.check_replicas(model, optimizer, scaler, context=context)
                expected = [(what, name, (bad,), tuple(sorted(set(holders) - {bad})))] if len(holders) > 1 else []
                assert [(one.kind, one.parameter, one.ranks, one.others) for one in found] == expected
                tensor.copy_(kept)
        assert paramp.check_replicas(model, optimizer, scaler) == []


REPLICAS = {
    "ddp": {"1.weight": (0, 1), "0.weight": (0, 1)},
    "fsdp2": {"1.weight": (1,)},  # each element has one copy
    "tp": {"0.weight": (0, 1), "3.bias": (0, 1), "3.weight": (1,)},
    "hsdp": {"1.weight": (1, 3), "0.weight": (1, 3)},
    "fsdp2-tp": {"0.weight": (2, 3), "1.weight": (3,)},
}


@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "tp"])
@on_ranks(2)
def test_a_copy_that_differs_is_found_on_two_ranks(world, kind):
    find_replicas(kind, REPLICAS[kind])


@family
@pytest.mark.parametrize("kind", cases("own loop copies", ["hsdp", "fsdp2-tp"], ["fsdp2-tp"], 1))
@on_ranks(4)
def test_a_copy_that_differs_is_found_on_four_ranks(world, kind):
    find_replicas(kind, REPLICAS[kind])


@on_ranks(4)
def test_a_rank_without_copies_takes_part(world):
    """It has a pipeline stage without parameters."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    with paramp.ParallelContext.from_mesh(mesh) as context:
        model = nn.ReLU() if context.is_first_stage else plain_model()
        assert paramp.check_replicas(model) == []
        if world.rank == 3:
            model[1].bias.detach()[0] += 1.0
        (found,) = paramp.check_replicas(model)
        assert (found.parameter, found.ranks, found.others) == ("1.bias", (3,), (2,))


# ---------------------------------------------------------------------------------------------------------- errors


def raises(match, call, *args, **kwargs):
    with pytest.raises(ValueError, match=match):
        call(*args, **kwargs)


@on_ranks(2)
def test_a_mistake_on_one_rank_raises_on_every_rank(world):
    model, (batch, other) = plain_model(), batches()
    loop = Loop(model)
    raises("got no context in a world of 2 ranks", paramp.check_replicas, model)
    raises("from_mesh", paramp.trace_overflow, model, loop.loss, [batch], scale=1.0)
    raises("from_mesh", paramp.gradient_histogram, model)
    raises("from_mesh", paramp.start_heartbeat)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    first = world.rank == 0
    with paramp.ParallelContext.from_mesh(mesh) as context:
        on_zero = "" if first else "rank 0: "
        raises(f"^{on_zero}model: got list", paramp.check_replicas, [] if first else model)
        raises(
            f"^{on_zero}loss: got str", paramp.trace_overflow, model, "loss" if first else loop.loss, [batch], scale=1.0
        )
        raises("scale: got 0.0, expected", paramp.gradient_histogram, model, scale=0.0 if first else 1.0)
        raises("scale: got nan, expected", paramp.trace_overflow, model, loop.loss, [batch], scale=NAN)
        raises("dtype: got torch.int64", paramp.gradient_histogram, model, dtype=torch.int64)
        raises("batches: got dict", paramp.trace_overflow, model, loop.loss, batch, scale=1.0)
        raises("batches: got none", paramp.trace_overflow, model, loop.loss, [], scale=1.0)
        raises("optimizer: got .*expected a torch.optim", paramp.check_replicas, model, "sgd")
        raises("scaler: got .*expected a paramp.Dist", paramp.check_replicas, model, None, torch.amp.GradScaler("cpu"))
        raises("timeout: got -1", paramp.start_heartbeat, -1)
        raises("timeout: rank 0 has '5.0', but rank 1 has '6.0'", paramp.start_heartbeat, 5.0 + world.rank)
        given = [batch, other] if first else [batch]
        raises("number of batches: rank 0 has 2", paramp.trace_overflow, model, loop.loss, given, scale=1.0)
        small = nn.Linear(4, 4)
        raises("the parameters of rank 0 .6, hash", paramp.check_replicas, model if first else small)
        raises("context: got 'dp', expected", paramp.check_replicas, model, context="dp")
        wrapped = nn.DataParallel(nn.Linear(2, 2))
        raises("start one process for each GPU", paramp.gradient_histogram, wrapped)
        if first:
            raises("rank 0 calls check_replicas, but rank 1 gradient_histogram", paramp.check_replicas, model)
        else:
            raises("rank 0 calls check_replicas, but rank 1 gradient_histogram", paramp.gradient_histogram, model)
        assert paramp.check_replicas(model) == []
    raises("this one was closed", paramp.check_replicas, model, context=context)
    staged = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    with paramp.ParallelContext.from_mesh(staged):
        raises("2 pipeline stages", paramp.trace_overflow, model, loop.loss, [batch], scale=1.0)


@on_ranks(2)
def test_a_rank_that_calls_alone_raises_in_bounded_time(world):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    with paramp.ParallelContext.from_mesh(mesh):  # whose next call on all ranks is as any other
        if world.rank == 0:
            os.environ["PARAMP_LAUNCH_TIMEOUT"] = "0.3"
            try:
                with pytest.raises(paramp.LaunchError, match=r"every rank has to call it; .* 1 did not join"):
                    paramp.check_replicas(plain_model())
            finally:
                del os.environ["PARAMP_LAUNCH_TIMEOUT"]
        dist.barrier()
        assert paramp.check_replicas(plain_model()) == []


@on_ranks(2)
def test_a_batch_that_fails_on_one_rank_is_reported_on_every_rank(world):
    with distributed("ddp") as (_, model):
        batch = batches(1)[0] if world.rank == 0 else {"x": torch.ones(1, 3), "y": torch.ones(1, 4)}
        report = paramp.trace_overflow(model, Loop(model).loss, [batch], scale=1.0)
        assert "the rerun failed: RuntimeError: The size of tensor a (3)" in str(report)
        assert paramp.trace_overflow(model, lambda _: 1.0, [batch], scale=1.0).unknown == (
            "the rerun failed: ConfigError: loss: returned float, expected a tensor of one element with a gradient"
        )
