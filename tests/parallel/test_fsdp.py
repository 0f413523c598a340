"""Units of FSDP2: which are gathered when, ahead of time and over the stages of a rank."""

import functools
from types import SimpleNamespace

import pytest
import torch
from beside_plain import assert_gradients, randn, seeded
from counting import Collectives
from pool import on_ranks
from small_engines import engine_of, own_part
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.func import functional_call

import paramp
from paramp.base.wrapped_models import is_unit
from paramp.parallel.fsdp.fsdp2_internals import drop_prefetched, groups

X, Y = torch.ones(2, 4), torch.zeros(2, 4)


def block(width=4):
    return nn.Sequential(nn.Linear(width, width), nn.Tanh())


def chain(count, width=4):
    return nn.Sequential(*(block(width) for _ in range(count)))


def sharded(**options):
    return {"parallel": {"data": {"shard": 2, **options}}}


def units_of(engine):
    """By name; "" is the rest of the model, of each stage one."""
    return {name: module for name, module in engine.module.named_modules() if is_unit(module)}


def gathered_early(engine):
    """A list that gets, when a block begins a forward or backward, its name and those gathered or about to be."""
    blocks = {name: module for name, module in units_of(engine).items() if name}
    seen = []

    def see(name, *_):
        found = (other for other, block in blocks.items() for group in groups(block) if group._all_gather_result)
        seen.append((name, [*found]))

    def see_backward(name, module, inputs, output):
        if output.requires_grad:
            output.register_hook(lambda _: see(name))

    for name, one in blocks.items():
        one[0].register_forward_pre_hook(functools.partial(see, name))
        one[0].register_forward_hook(functools.partial(see_backward, name))
    return seen


@on_ranks(2)
def test_prefetch_gathers_the_next_blocks_while_one_computes(world):
    following = ["1", "2", "3"]
    for count in (0, 1, 2):
        with paramp.launch_from_torch(sharded(prefetch=count)):
            engine = engine_of(chain(4))
            seen = gathered_early(engine)
            engine.evaluate(X, Y)
            forward = [(str(index), following[index : index + count]) for index in range(4)]
            assert seen == forward
            for _ in range(3):  # the first batches are compared between ranks
                seen.clear()
                engine.zero_grad()
                engine.forward_backward(X, Y)
            backward = [(str(index), [*map(str, range(max(0, index - count), index))]) for index in (3, 2, 1, 0)]
            if count:
                assert seen == forward + backward
                continue
            for unit in units_of(engine).values():  # torch's own order, as these are empty
                state = unit._get_fsdp_state()
                assert (state._states_to_forward_prefetch, state._states_to_backward_prefetch) == ([], [])


def test_a_dropped_all_gather_is_waited_for_on_the_stream_of_its_device(monkeypatch):
    """``wait_event`` of a ``torch.Stream`` does not wait for a ``torch.cuda.Event``, which FSDP2 records on a GPU."""
    waited = []

    def stream(kind):
        return SimpleNamespace(wait_event=lambda event: waited.append((kind, event)))

    monkeypatch.setattr(torch.accelerator, "current_stream", lambda: stream("torch.Stream"))
    handle = SimpleNamespace(current_stream=lambda: stream("torch.cuda.Stream"))
    result = SimpleNamespace(all_gather_work=None, all_gather_event="event")
    group = SimpleNamespace(_all_gather_result=result, device_handle=handle)
    drop_prefetched(group)
    assert waited == [("torch.cuda.Stream", "event")]
    assert group._all_gather_result is None


def gathered_now(engine):
    """The units whose parameters this rank has in whole."""
    return {name for name, unit in units_of(engine).items() if any(group.is_unsharded for group in groups(unit))}


class Chain(nn.Module):
    """Four equal blocks between two layers, which are the rest of the model."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.blocks = chain(4)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


@pytest.mark.parametrize(("kept", "calls"), [(False, False), (False, True), (True, False), (True, True)])
@on_ranks(2)
def test_blocks_are_gathered_one_after_another_and_freed(world, kept, calls):
    """By ``forward_backward``, or by ``engine(x)`` and ``engine.backward(loss)``."""
    names, forward, backward, reduced = [f"blocks.{index}" for index in range(4)], [], [], []
    with paramp.launch_from_torch(sharded(reshard_after_forward=not kept)):
        model = Chain()
        engine = engine_of(model)

        def see(module, inputs, output, index):
            forward.append(gathered_now(engine))
            output.register_hook(lambda _: backward.append((index, gathered_now(engine))))
            output.register_hook(lambda _: reduced.append(collectives.counts["reduce_scatter"]))

        for index, one in enumerate(model.blocks):
            one[0].register_forward_hook(functools.partial(see, index=index))
        for _ in range(4):  # the first batches are compared between ranks
            forward.clear()
            backward.clear()
            reduced.clear()
            with Collectives() as collectives:
                if calls:
                    engine.backward(engine.criterion(engine(X), Y))
                else:
                    engine.forward_backward(X, Y, return_loss=False)
            assert not gathered_now(engine)
            engine.step()
            engine.zero_grad()
        assert collectives.counts["allgather"] == 5 + (5 if calls else 0 if kept else 4)
        assert reduced == [0, 1, 2, 3]  # the gradients of a block before the backward of the next
        if kept:
            assert forward == [{"", *names[: index + 1]} for index in range(4)]
        else:
            assert forward == [{"", name} for name in names]
        if not kept or calls:
            assert backward == [(index, {"", names[index]}) for index in (3, 2, 1, 0)]


@pytest.mark.parametrize(
    ("schedule", "split", "of_ranks", "alone"), [("1f1b", "2", ("01", "23"), 1), ("looped-bfs", "123", ("02", "13"), 3)]
)
@on_ranks(4)
def test_under_a_pipeline_a_stage_stays_gathered_for_a_batch(world, schedule, split, of_ranks, alone):
    """From its own first microbatch on: ``alone`` forwards of a rank's first block precede the first of the other."""
    pipeline = {"size": 2, "microbatches": 3, "schedule": schedule, "split": [f"blocks.{index}" for index in split]}
    with paramp.launch_from_torch({"parallel": {"pipeline": pipeline, "data": {"shard": 2}}}) as context:
        engine = engine_of(Chain())
        first, last = mine = [f"blocks.{index}" for index in of_ranks[context.pp.rank]]
        rest = {""} & units_of(engine).keys()  # of one stage; that of two has no name here
        x, seen = torch.ones(3, 4), {name: [] for name in mine}
        for _ in range(4):  # the first finds shapes, and several are compared between ranks
            engine.forward_backward(x, x)
            engine.zero_grad()
        for name, found in seen.items():
            layer = engine.module.get_submodule(name)[0]
            layer.register_forward_hook(lambda *_, found=found: found.append(gathered_now(engine)))
            layer.register_full_backward_hook(lambda *_, found=found: found.append(gathered_now(engine)))
        with Collectives() as collectives:
            engine.forward_backward(x, x)
        both = {*mine} | rest
        assert seen == {first: [{first} | rest] * alone + [both] * (6 - alone), last: [both] * 6}
        assert collectives.counts["allgather"] == collectives.counts["reduce_scatter"] == 3  # two blocks and the rest
        assert not gathered_now(engine)


@on_ranks(4)
def test_a_batch_of_another_shape_drops_no_gradients_of_the_window(world):
    """torch's pipeline prepares for the shape of each batch, and drops gradients of sharded parameters as it does."""
    model = seeded(chain, 4, 8)
    batches = [tuple(randn(2, 8, length, 8)) for length in (3, 5)]
    (sum(nn.functional.mse_loss(model(x), y) for x, y in batches) / 2).backward()
    expected = torch.nn.utils.get_total_norm([parameter.grad.double() for parameter in model.parameters()])
    config = {"parallel": {"pipeline": 2, "data": {"shard": 2}}, "gradient_accumulation": 2}
    with paramp.launch_from_torch(config) as context:
        engine = engine_of(model)
        for batch in batches:
            engine.forward_backward(*own_part(context, *batch))
            result = engine.step()
        assert float(result.grad_norm) == pytest.approx(float(expected), rel=1e-5)


class Changing(nn.Module):
    """A layer, and a frozen one, whose forward changes or replaces the weight ``name``, as a momentum encoder's."""

    name = ""

    def __init__(self):
        super().__init__()
        self.layer, self.frozen = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            if self.name == "layer.weight":
                self.layer.weight.mul_(0.5)
            elif self.name == "layer.bias":
                self.layer.bias = nn.Parameter(self.layer.bias * 0.5)
            elif self.name == "frozen.weight":
                self.frozen.weight[0].mul_(0.5)  # that of one rank's shard
            elif self.name:
                self.frozen.bias.data = self.frozen.bias.data * 0.5
        return self.layer(x) - self.frozen(x)


class Calling(nn.Sequential):
    """It calls its second block with a bias that it computes."""

    def forward(self, x):
        first, second = self
        x = first(x)
        return functional_call(second, {"layer.bias": x.detach().mean(0)}, (x,))


def own_loop(engine, x, y):
    engine.zero_grad()
    engine.train()
    return engine.backward(engine.criterion(engine(x), y))


@pytest.mark.parametrize("parallel", [{"data": {"shard": 4}}, {"data": {"shard": 2}, "tensor": 2}], ids=["4", "2-tp2"])
@on_ranks(4)
def test_what_gathered_weights_cannot_do(world, parallel):
    plan = {"*.layer": ColwiseParallel(output_layouts=Replicate())} if "tensor" in parallel else None
    for name in ("layer.weight", "layer.bias", "frozen.weight", "frozen.bias"):
        with paramp.launch_from_torch({"parallel": parallel}):
            engine = engine_of(nn.Sequential(Changing(), Changing()), plan=plan)
            engine.module.get_submodule("1").name = name
            calls = [engine.forward_backward, engine.evaluate, functools.partial(own_loop, engine)]
            for call in calls:
                with pytest.raises(paramp.ConfigError, match=f"the model's forward changes '1.{name}', which is gath"):
                    call(X, Y)
    with paramp.launch_from_torch({"parallel": parallel}):
        engine = engine_of(Calling(Changing(), Changing()), plan=plan)
        for call in [engine.forward_backward, engine.evaluate, functools.partial(own_loop, engine)]:
            with pytest.raises(
                paramp.ConfigError, match=r"'1\.layer\.bias' has another tensor in its place, as by torch"
            ):
                call(X, Y)
    with paramp.launch_from_torch({"parallel": parallel}):
        model = nn.Sequential(Changing(), Changing())
        engine = engine_of(
            model, lambda output, y: (output - y).square().mean() + model[0].layer.weight.norm(), plan=plan
        )
        with pytest.raises(paramp.ConfigError, match="criterion: it uses a weight of which this rank has a shard"):
            engine.forward_backward(X, Y)
        assert engine.evaluate(X, Y) > 0
    with paramp.launch_from_torch({"parallel": parallel}):
        engine, x = engine_of(nn.Sequential(Changing(), Changing()), plan=plan), X.clone().requires_grad_()
        with pytest.raises(paramp.ConfigError, match="got create_graph=True, expected gradients of the first order"):
            torch.autograd.grad(engine(x).sum(), x, create_graph=True)
        (gradient,) = torch.autograd.grad(engine(x).sum(), x)
        assert gradient.any()
        engine.forward_backward(X, Y)
        assert engine.step().stepped


class Twice(Chain):
    """Its blocks run before, for a value that passes no gradient on, or with a backward of its own."""

    def __init__(self, how):
        super().__init__()
        self.how = how

    def forward(self, x):
        with torch.set_grad_enabled(self.how != "no_grad" and torch.is_grad_enabled()):
            start = x.detach().requires_grad_()
            before = super().forward(start)
        if self.how == "backward":
            (before,) = torch.autograd.grad(before.sum(), start)
        return super().forward(x + before.detach())


@on_ranks(2)
def test_blocks_that_have_run_before_get_the_gradients_of_the_last_run(world):
    """Autocast would use casts from before, whose gradients come after the unit's are reduced."""
    x, y = randn(2, 4, 4)
    for how in ("no_grad", "detach"):
        with paramp.launch_from_torch({"precision": "bf16-mixed"} | sharded()) as context:
            engine, plain = engine_of(seeded(Twice, how)), seeded(Twice, how)
            engine.forward_backward(*own_part(context, x, y))
            nn.functional.mse_loss(plain(x), y).backward()
            assert_gradients(engine, plain, atol=0.005)
    with paramp.launch_from_torch(sharded()):
        engine = engine_of(Twice("backward"))
        with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor") as raised:
            engine.forward_backward(X, Y)
        assert "freed if the forward calls torch.autograd.grad" in raised.value.__notes__[0]
