"""What fails on one rank is raised on every rank, in the same call, with its message and its rank; nothing hangs."""

import pytest
import torch
import torch.nn.functional as F
from pool import on_ranks
from reference import assert_trained
from torch import nn

import paramp
from paramp.base.collectives import all_reduce_


class Fragile(nn.Module):
    """A linear layer that fails when it is told to, on real values only."""

    def __init__(self, size=4):
        super().__init__()
        self.linear = nn.Linear(size, size)
        self.fails = False
        self.refuses = ""  # in the backward: the gradient of the "activation", or of the "weight"
        self.good_backwards = 0  # before that

    def forward(self, x):
        if self.fails and x.detach().any():
            raise ArithmeticError("the layer is broken")
        return Refusing.apply(self.linear(x), self)

    def check(self, what):
        if self.refuses == what:
            self.good_backwards -= 1
            if self.good_backwards < 0:
                raise ArithmeticError("the backward is broken")


class Refusing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, layer):
        ctx.layer = layer
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.layer.check("activation")
        return gradient, None


class Loss:
    """A mean squared error that fails when it is told to."""

    fails = False

    def __call__(self, output, target):
        if self.fails:
            raise ArithmeticError("the loss is broken")
        return F.mse_loss(output, target)


def build(parallel, num_layers=2, **config):
    context = paramp.launch_from_torch({"parallel": parallel, **config})
    torch.manual_seed(5)
    model, loss = nn.Sequential(*(Fragile() for _ in range(num_layers))), Loss()
    engine, *_ = paramp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), loss)
    return context, engine, loss


def reference(batches, num_layers=2):
    """The weights after steps of plain torch, each on the batches of one window."""
    torch.manual_seed(5)
    model = nn.Sequential(*(Fragile() for _ in range(num_layers)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for window in batches:
        optimizer.zero_grad()
        for x, y in window:
            (F.mse_loss(model(x), y) / len(window)).backward()
        optimizer.step()
    return model.state_dict()


def batch(seed):
    return torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(seed))


def check_weights(engine, batches, num_layers=2):
    start, expected = reference([], num_layers), reference(batches, num_layers)
    assert_trained(engine.full_state_dict(), expected, start, atol=1e-6)


def my_part(context, *tensors):
    return [tensor.chunk(context.dp.size)[context.dp.rank] for tensor in tensors]


def run_window(context, engine, *seeds):
    for seed in seeds:
        engine.forward_backward(*my_part(context, *batch(seed)))
        result = engine.step()
    return result


def start_window(context, engine):
    engine.zero_grad()
    run_window(context, engine, 3)


def end_window(context, engine, return_loss):
    """Run the second batch and step, where one rank fails; a step after a failure that was raised is refused."""
    try:
        engine.forward_backward(*my_part(context, *batch(4)), return_loss=return_loss)
    except Exception:
        with pytest.raises(RuntimeError, match=r"call engine\.zero_grad\(\)"):
            engine.step()
        raise
    assert not return_loss
    engine.step()


CASES = {
    "dp2": {"data": 2},
    "dp2-zero1": {"data": 2, "zero": 1},
    "pp2": {"pipeline": {"size": 2, "microbatches": 2}},
    "pp2-zb": {"pipeline": {"size": 2, "schedule": "interleaved-zero-bubble", "microbatches": 2, "stages_per_rank": 1}},
}


@pytest.mark.parametrize("layout", CASES)
@on_ranks(2)
def test_a_batch_that_fails_on_one_rank(world, layout):
    """In a window of two batches, of which the second fails; with the loss asked for, and without."""
    context, engine, loss = build(CASES[layout], gradient_accumulation=2)
    with context:
        pipelined = context.pp.size > 1
        run_window(context, engine, 1, 2)
        for what, rank in (("loss", 1), ("layer", 0), ("layer", 1)):
            mine = world.rank == rank
            failing = loss if what == "loss" else getattr(engine.module, str(rank), None)
            message = f"{what} is broken" + ("" if mine else rf"; on rank {rank} \(pp")
            raised = ArithmeticError if mine and not pipelined else (RuntimeError, ValueError)
            for return_loss in (True, False):
                start_window(context, engine)
                if mine:
                    failing.fails = True
                with pytest.raises(raised, match=message):
                    end_window(context, engine, return_loss)
                if mine:
                    failing.fails = False
            engine.zero_grad()
            if mine:
                failing.fails = True
            with pytest.raises(raised, match=message):
                engine.evaluate(*my_part(context, *batch(4)))
            if pipelined and what == "layer":
                engine.eval()
                with pytest.raises(raised, match=message):
                    engine(batch(4)[0])
                engine.train()
            if mine:
                failing.fails = False
        assert run_window(context, engine, 5, 6).stepped
        check_weights(engine, [[batch(1), batch(2)], [batch(5), batch(6)]])


SCHEDULES = ("gpipe", "1f1b", "interleaved-1f1b", "looped-bfs", "interleaved-zero-bubble", "zbv", "dualpipev")


@pytest.mark.parametrize("layout", ["dp2", "dp2-zero1", *SCHEDULES])
@on_ranks(2)
def test_a_backward_that_fails_on_one_rank(world, layout):
    """In the last batch of a window of two, in its second microbatch where there are four."""
    parallel = CASES.get(layout, {"pipeline": {"size": 2, "schedule": layout, "microbatches": 4}})
    context, engine, _ = build(parallel, num_layers=4, gradient_accumulation=2)
    with context:
        pipeline = context.config.parallel.pipeline
        layers = {name: layer for name, layer in engine.module.named_children() if isinstance(layer, Fragile)}
        for layer in layers.values():
            layer.linear.weight.register_hook(lambda _, layer=layer: layer.check("weight"))
        run_window(context, engine, 1, 2)
        for index in range(4):
            rank = pipeline.rank_of(index * pipeline.num_stages // 4) if pipeline.size > 1 else index % 2
            mine = world.rank == rank
            raised = ArithmeticError if mine and pipeline.size == 1 else RuntimeError
            message = "ArithmeticError: the backward is broken; on rank" if not mine else "the backward is broken$"
            for return_loss, refused in enumerate(("activation", "weight")):
                start_window(context, engine)
                if mine:
                    layers[str(index)].refuses = refused
                    layers[str(index)].good_backwards = int(pipeline.size > 1)
                with pytest.raises(raised, match=message):
                    end_window(context, engine, return_loss)
                if mine:
                    layers[str(index)].refuses = ""
        engine.zero_grad()
        assert run_window(context, engine, 5, 6).stepped
        check_weights(engine, [[batch(1), batch(2)], [batch(5), batch(6)]], num_layers=4)


@on_ranks(2)
def test_a_batch_of_the_wrong_size_on_one_rank(world):
    context, engine, _ = build({"data": 2, "zero": 1})
    with context:
        x, y = batch(1)
        message = r"target: got shape \(8, 4\), expected 3 samples.*" + "; on rank 1" * (1 - world.rank)
        with pytest.raises(paramp.ConfigError, match=message):
            engine.forward_backward(x[:3] if world.rank else x, y)  # the first call of all
        engine.forward_backward(*my_part(context, *batch(2)))  # without a window to keep, it begins anew
        assert engine.step().stepped
        check_weights(engine, [[batch(2)]])


@pytest.mark.parametrize("layout", ["dp2", "dp2-zero1", "pp2"])
@on_ranks(2)
def test_a_parameter_that_a_step_cannot_take_on_one_rank(world, layout):
    context, engine, _ = build(CASES[layout])
    with context:
        engine.forward_backward(*my_part(context, *batch(1)))
        if world.rank:
            parameter = next(engine.module.parameters())
            parameter.data = parameter.data.clone()
        with pytest.raises(RuntimeError, match="was moved after initialize" + ".*; on rank 1" * (1 - world.rank)):
            engine.step()


@on_ranks(2)
def test_tensor_ranks_that_fail_together_and_alone(world):
    import paramp.engine.shared_failure as module

    grace, module.SECONDS_OF_GRACE = module.SECONDS_OF_GRACE, 0.3
    assert grace == 5  # as the pages say
    try:
        context = paramp.launch_from_torch({"parallel": {"tensor": 2}})
        with context:
            torch.manual_seed(5)
            model, loss = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), Loss()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            engine, *_ = paramp.initialize(model, optimizer, loss, plan={"0": "colwise", "1": "rowwise"})
            loss.fails = True
            engine.forward_backward(*batch(1), return_loss=False)
            with pytest.raises(ArithmeticError):
                engine.step()
            loss.fails = world.rank == 1
            if world.rank == 0:  # waits for the other rank, which never comes; here the test comes in its place
                engine.evaluate(*batch(1))
                return
            for _ in range(2):
                with pytest.raises((ArithmeticError, RuntimeError), match=r"loss is broken|failed on this rank alone"):
                    engine.evaluate(*batch(1))
            all_reduce_(torch.zeros(5, dtype=torch.float64))
    finally:
        module.SECONDS_OF_GRACE = grace


@on_ranks(4)
def test_a_tensor_rank_of_a_pipeline_that_fails_alone(world):
    """It raises at once: where tensor ranks meet in what follows, it would not reach the end of the schedule."""
    import paramp.engine.shared_failure as module

    grace, module.SECONDS_OF_GRACE = module.SECONDS_OF_GRACE, 0.3
    try:
        pipeline = {"size": 2, "microbatches": 4, "schedule": "gpipe"}
        with paramp.launch_from_torch({"parallel": {"tensor": 2, "pipeline": pipeline}}) as context:
            model = nn.Sequential(Fragile(), Fragile())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            engine, *_ = paramp.initialize(model, optimizer, Loss(), plan={})
            if world.rank != 1:
                engine.forward_backward(*batch(1))
                return
            layer = engine.module.get_submodule("0")
            layer.refuses, layer.good_backwards = "activation", 1
            with pytest.raises(RuntimeError, match="the backward is broken"):
                engine.forward_backward(*batch(1))
            assert layer.good_backwards == -1
            for _ in range(2):  # the test comes in its place: two microbatches, and the loss
                torch.distributed.recv(torch.empty(2, 4), group=context.pp.group, group_src=1)
            all_reduce_(torch.zeros(5, dtype=torch.float64))
    finally:
        module.SECONDS_OF_GRACE = grace


class Told:
    """Makes the parts of a rank fail, one after the other."""

    def __init__(self, engine, loss):
        self.layers = [layer for layer in engine.module.modules() if isinstance(layer, Fragile)]
        self.loss = loss

    def fail(self, what):
        last = self.layers[-1]
        last.fails, self.loss.fails = what == "forward", what == "criterion"
        last.refuses, last.good_backwards = "activation" * (what == "backward"), 0


@pytest.mark.parametrize("reset", [True, False], ids=["reset", "own reset"])
@on_ranks(2)
def test_data_ranks_of_shards_that_fail_together_continue(world, reset):
    """In calls of forward_backward, and in a loop; also with a torch that cannot drop what a failed batch left."""
    from torch.distributed.fsdp import FSDPModule

    removed = vars(FSDPModule).get("reset_iter_state")
    if removed is not None and not reset:
        del FSDPModule.reset_iter_state
    try:
        context, engine, loss = build({"data": {"shard": 2}, "pipeline": {"microbatches": 2}}, num_layers=3)
        with context:
            told, good = Told(engine, loss), []
            for number, what in enumerate(("forward", "backward", "criterion", "backward in a loop")):
                told.fail(what.split()[0])
                x, y = my_part(context, *batch(1))
                message = "the (layer|backward|loss) is broken"
                if "loop" in what:
                    value = engine.criterion(engine(x), y)
                    with pytest.raises(ArithmeticError, match=message):
                        engine.backward(value)
                else:
                    with pytest.raises(ArithmeticError, match=message):
                        engine.forward_backward(x, y)
                told.fail("")
                engine.zero_grad()
                good.append([batch(number)])
                assert run_window(context, engine, number).stepped
                check_weights(engine, good, num_layers=3)
    finally:
        if removed is not None:
            FSDPModule.reset_iter_state = removed


@pytest.mark.parametrize("stage", [0, 1])
@on_ranks(4)
def test_a_sharded_stage_that_fails_on_all_its_ranks(world, stage):
    context, engine, loss = build({"data": {"shard": 2}, "pipeline": {"size": 2, "microbatches": 2}}, num_layers=4)
    with context:
        told, good = Told(engine, loss), []
        for number, what in enumerate(("forward", "backward", "criterion")):
            if context.pp.rank == (1 if what == "criterion" else stage):
                told.fail(what)
            with pytest.raises((RuntimeError, ValueError), match=r"the (layer|backward|loss) is broken"):
                engine.forward_backward(*my_part(context, *batch(1)))
            told.fail("")
            engine.zero_grad()
            good.append([batch(number)])
            assert run_window(context, engine, number).stepped
            check_weights(engine, good, num_layers=4)


class Broken:
    """A loader's iterator that raises after so many batches."""

    def __init__(self, count, error):
        self.count, self.error = count, error

    def __iter__(self):
        return self

    def __next__(self):
        self.count -= 1
        if self.count < 0:
            raise self.error
        return tuple(batch(1))


@pytest.mark.parametrize("parallel", [{"data": 2}, {"pipeline": 2}], ids=["dp2", "pp2"])
@on_ranks(2)
def test_an_iterator_that_fails_or_ends_on_one_rank(world, parallel):
    context, engine, _ = build(parallel)
    with context:
        own, other = (OSError("no such disk"), StopIteration()), StopIteration()
        for error, raised, message in (
            (own[0], (OSError if world.rank else RuntimeError), "OSError: no such disk; on rank 1"),
            (own[1], ValueError, "no further batch, but other ranks have one; on rank 1"),
        ):
            data = Broken(1 if world.rank else 2, error if world.rank else other)
            engine.execute_schedule(data)
            with pytest.raises(raised, match="no such disk" if raised is OSError else message):
                engine.execute_schedule(data)
        data = iter([tuple(batch(1))])
        engine.execute_schedule(data)
        with pytest.raises(StopIteration):
            engine.execute_schedule(data)


@pytest.mark.parametrize("wait", [True, False])
@on_ranks(2)
def test_what_is_called_after_a_save_and_fails_on_one_rank(world, wait, tmp_path):
    context, engine, _ = build({"data": 2})
    with context:

        def then():
            if world.rank == 0:
                raise OSError("the bucket is gone")

        with pytest.raises(paramp.CheckpointError, match="then: OSError: the bucket is gone; on rank 0"):
            engine.save(tmp_path / "a", wait=wait, then=then) or engine.finish_saving()
        engine.load(tmp_path / "a")


class Event:
    """Stands in for ``torch.cuda.Event``; remembers how many batches had begun when it was recorded and waited for."""

    def __init__(self):
        self.recorded, self.waits, self.num_batches = 0, [], 0

    def record(self):
        self.recorded = self.num_batches

    def synchronize(self):
        self.waits.append((self.recorded, self.num_batches))


@pytest.mark.parametrize("what", ["layer", "loss"])
@pytest.mark.parametrize("layout", CASES)
@on_ranks(2)
def test_on_a_gpu_the_host_waits_for_a_past_step_only_and_the_next_raises(world, layout, what):
    """In a pipeline too, on each stage: the layer of the first fails, or the criterion on the last."""
    context, engine, loss = build(CASES[layout])
    with context:
        engine._failure.is_shared = True
        event = engine._failure._copied = Event()
        rank = 0 if what == "layer" else 1
        mine = world.rank == rank
        failing = (engine.module.get_submodule("0") if what == "layer" else loss) if mine else None
        outcomes = []
        for number in range(5):
            event.num_batches += 1
            if failing is not None:
                failing.fails = number == 1
            engine.zero_grad()
            assert engine.forward_backward(*my_part(context, *batch(number))).shape == ()
            try:
                outcomes.append(engine.step().stepped)
            except (ArithmeticError, RuntimeError, ValueError) as error:
                outcomes.append(str(error))
        assert outcomes[:2] == [True, False]
        assert f"the {what} is broken" in outcomes[2]
        assert (f"on rank {rank} (pp" in outcomes[2]) is not mine
        assert outcomes[3:] == [True, True]
        assert all(recorded < now for recorded, now in event.waits)
        check_weights(engine, [[batch(0)], [batch(3)], [batch(4)]])
