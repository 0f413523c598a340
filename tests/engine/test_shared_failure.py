"""What fails on one rank is raised on every rank, in the same call, with its message and its rank; nothing hangs."""

import itertools
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from beside_plain import randn, seeded
from commands import torchrun
from families import cases, family
from pool import on_ranks, shared_folder
from reference import assert_trained
from small_engines import engine_of, own_part, sgd
from torch import nn
from torch.distributed.fsdp import FSDPModule

import paramp
from paramp.base.collectives import all_reduce_
from paramp.engine import shared_failure

BROKEN = "the (layer|backward|loss) is broken"


class Broken(ArithmeticError, RuntimeError):
    """A program's own error, with words that gloo's and NCCL's have when they lose a rank."""

    def __init__(self, what):
        super().__init__(f"no connection to a socket: the {what} is broken")


class Fragile(nn.Module):
    """A linear layer that may fail: in its forward, on real values only, or the backward of its output or weight."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.fault = ""
        self.good_backwards = 0  # before one that fails

    def forward(self, x):
        if self.fault == "forward" and x.detach().any():
            raise Broken("layer")
        output = self.linear(x)
        if output.requires_grad:
            output.register_hook(lambda _: self.check("backward"))
        return output

    def check(self, what):
        if self.fault == what:
            self.good_backwards -= 1
            if self.good_backwards < 0:
                raise Broken("backward")


class Loss:
    """A mean squared error that may fail."""

    fault = ""

    def __call__(self, output, target):
        if self.fault == "criterion":
            raise Broken("loss")
        return F.mse_loss(output, target)


def layers(count):
    return seeded(lambda: nn.Sequential(*(Fragile() for _ in range(count))), seed=5)


class Told:
    """Makes a part of this rank fail: its loss, or a layer, which is the last if it has no name."""

    def __init__(self, engine, loss):
        self.layers = {name: one for name, one in engine.module.named_modules() if isinstance(one, Fragile)}
        self.loss = loss

    def fail(self, what, layer="", good_backwards=0):
        self.loss.fault = what
        if what != "criterion":
            layer = self.layers[layer or [*self.layers][-1]]
            layer.fault, layer.good_backwards = what, good_backwards

    @contextmanager
    def failing(self, error, message, *what):
        """A context that raises, because of ``what`` if that is given."""
        self.fail(*what or [""])
        with pytest.raises(error, match=message):
            yield
        self.fail("", *what[1:])


@contextmanager
def started(parallel, num_layers=2, plan=None, **config):
    with paramp.launch_from_torch({"parallel": parallel, **config}) as context:
        loss = Loss()
        engine = engine_of(layers(num_layers), loss, plan=plan)
        yield context, engine, Told(engine, loss)


def batch(seed):
    return randn(2, 8, 4, seed=seed)


def run_window(context, engine, *seeds):
    for seed in seeds:
        engine.forward_backward(*own_part(context, *batch(seed)))
        result = engine.step()
    return result


def begin_window(context, engine):
    engine.zero_grad()
    run_window(context, engine, 3)


def end_window(context, engine, return_loss):
    """Run the second batch and step, where one rank fails; a step after a failure that was raised is refused."""
    try:
        engine.forward_backward(*own_part(context, *batch(4)), return_loss=return_loss)
    except Exception:
        with pytest.raises(RuntimeError, match=r"call engine\.zero_grad\(\)"):
            engine.step()
        raise
    assert not return_loss
    engine.step()


def check_weights(engine, *windows, num_layers=2):
    """They are those after steps of plain torch, each on the batches of one window."""
    model = layers(num_layers)
    optimizer = sgd(model.parameters())
    for seeds in windows:
        optimizer.zero_grad()
        for seed in seeds:
            x, y = batch(seed)
            (F.mse_loss(model(x), y) / len(seeds)).backward()
        optimizer.step()
    assert_trained(engine.full_state_dict(), model.state_dict(), layers(num_layers).state_dict(), atol=1e-6)


SCHEDULES = ("gpipe", "1f1b", "interleaved-1f1b", "looped-bfs", "interleaved-zero-bubble", "zbv", "dualpipev")
LAYOUTS = {"dp2": {"data": 2}, "dp2-zero1": {"data": 2, "zero": 1}}
LAYOUTS |= {name: {"pipeline": {"size": 2, "schedule": name, "microbatches": 4}} for name in SCHEDULES}
LAYOUTS["pp2-dp2"] = LAYOUTS["1f1b"] | {"data": 2}
PART = ["dp2-zero1", "zbv"]
PARTS = {"forward": "layer", "backward": "backward", "weight": "backward", "criterion": "loss"}


@family
@pytest.mark.parametrize("layout", cases("a failing batch", LAYOUTS, PART, 1))
@on_ranks(lambda layout: 4 if layout == "pp2-dp2" else 2)
def test_a_batch_that_fails_on_one_rank(world, layout):
    """The second of a window of two, of any layer; a backward of a pipeline in its second microbatch."""
    with started(LAYOUTS[layout], num_layers=4, gradient_accumulation=2) as (context, engine, told):
        pipeline = context.config.parallel.pipeline
        pipelined = pipeline.size > 1
        for layer in told.layers.values():
            layer.linear.weight.register_hook(lambda _, layer=layer: layer.check("weight"))
        run_window(context, engine, 1, 2)
        engine.evaluate(*own_part(context, *batch(4)))  # the first one tries the stages
        for index, what in itertools.product(range(4), PARTS):
            if what == "criterion" and index < 3:
                continue
            rank = pipeline.rank_of(index * pipeline.num_stages // 4) if pipelined else 0
            rank = rank * context.dp.size + index % context.dp.size
            expected = (RuntimeError, ValueError), rf"the {PARTS[what]} is broken; on rank {rank} \(pp"
            if world.rank == rank:
                error = expected[0] if pipelined else ArithmeticError
                good_backwards = int(pipelined and PARTS[what] == "backward")
                expected = error, f"the {PARTS[what]} is broken(?!; on rank)", what, str(index), good_backwards
            for return_loss in (True, False):
                begin_window(context, engine)
                with told.failing(*expected):
                    end_window(context, engine, return_loss)
            engine.zero_grad()
            if PARTS[what] != "backward":
                with told.failing(*expected):
                    engine.evaluate(*own_part(context, *batch(4)))
            if pipelined and what == "forward" and context.dp.size == 1:
                engine.eval()
                with told.failing(*expected):
                    engine(batch(4)[0])
                engine.train()
        assert run_window(context, engine, 5, 6).stepped
        check_weights(engine, [1, 2], [5, 6], num_layers=4)


@on_ranks(2)
def test_a_batch_of_the_wrong_size_on_one_rank(world):
    with started({"data": 2, "zero": 1}) as (context, engine, _):
        x, y = batch(1)
        message = r"target: got shape \(8, 4\), expected 3 samples.*" + "; on rank 1" * (1 - world.rank)
        with pytest.raises(paramp.ConfigError, match=message):
            engine.forward_backward(x[:3] if world.rank else x, y)  # the first call of all
        assert run_window(context, engine, 2).stepped  # without a window to keep, it begins anew
        check_weights(engine, [2])


@pytest.mark.parametrize("layout", ["dp2", "gpipe"])
@on_ranks(2)
def test_the_next_loss_that_is_returned_raises_for_a_batch_before(world, layout):
    """The window has failed, also if the call is an evaluation, of averaged weights too."""

    def evaluate_averages(x, y):
        with engine.ema.applied():
            engine.evaluate(x, y)

    def schedule(x, y):
        engine.execute_schedule(iter([(x, y)]), forward_only=True)

    with started(LAYOUTS[layout], gradient_accumulation=2, ema={"decay": 0.5}) as (context, engine, told):
        error = ArithmeticError if world.rank and layout == "dp2" else (RuntimeError, ValueError)
        for returns_loss in (engine.forward_backward, engine.evaluate, evaluate_averages, schedule):
            told.fail("criterion" if world.rank else "")
            engine.forward_backward(*own_part(context, *batch(1)), return_loss=False)
            assert not engine.step().stepped
            told.fail("")
            with pytest.raises(error, match="the loss is broken" + "; on rank 1" * (1 - world.rank)):
                returns_loss(*own_part(context, *batch(2)))
            with pytest.raises(RuntimeError, match=r"call engine\.zero_grad\(\)"):
                engine.step()
            engine.zero_grad()
        assert run_window(context, engine, 3, 4).stepped
        check_weights(engine, [3, 4])


@pytest.mark.parametrize("layout", ["dp2", "dp2-zero1", "gpipe"])
@on_ranks(2)
def test_a_parameter_that_a_step_cannot_take_on_one_rank(world, layout):
    with started(LAYOUTS[layout]) as (context, engine, _):
        engine.forward_backward(*own_part(context, *batch(1)))
        if world.rank:
            parameter = next(engine.module.parameters())
            parameter.data = parameter.data.clone()
        with pytest.raises(RuntimeError, match="was moved after initialize" + ".*; on rank 1" * (1 - world.rank)):
            engine.step()


def short_grace():
    """Ranks that wait for others in a model do so for less than the 5 s of the pages."""
    assert shared_failure.SECONDS_OF_GRACE == 5
    return mock.patch.object(shared_failure, "SECONDS_OF_GRACE", 0.3)


@pytest.mark.parametrize(
    ("parallel", "alone"),
    [({"tensor": 2}, "criterion"), ({"data": {"shard": 2}}, "criterion"), ({"data": {"shard": 2}}, "size")],
    ids=["tp2", "fsdp2", "fsdp2-size"],
)
@on_ranks(2)
def test_ranks_that_wait_in_the_model_fail_together_and_alone(world, parallel, alone):
    plan = {"0.linear": "colwise", "1.linear": "rowwise"} if "tensor" in parallel else None
    with short_grace(), started(parallel, plan=plan, ema={"decay": 0.9}) as (_, engine, told):
        told.fail("criterion")
        engine.forward_backward(*batch(1), return_loss=False)
        with pytest.raises(ArithmeticError):
            engine.step()
        told.fail("")
        engine.evaluate(*batch(1))  # from now on shards know the order of their collectives
        with told.failing(ArithmeticError, BROKEN, "criterion"):
            engine.evaluate(*batch(1))
        x, y = batch(1)
        if alone == "size":  # right after a batch that failed on both
            if world.rank:
                with pytest.raises(paramp.ConfigError, match="target: got shape"):
                    engine.evaluate(x[:3], y)
            return
        told.fail("criterion" if world.rank else "")
        if world.rank == 0:  # waits for the other rank, which never comes; here the test comes in its place
            engine.evaluate(x, y)
            return
        for _ in range(2):
            with pytest.raises((ArithmeticError, RuntimeError), match=r"loss is broken|failed on this rank alone"):
                engine.evaluate(x, y)
        later = lambda: engine.evaluate([(x, y)]), lambda: engine.count_tokens([]), lambda: engine.step()
        looks = engine.full_state_dict, engine.ema.full_state_dict, engine.check_replicas, engine.gradient_histogram
        saves = (lambda: engine.save("nowhere")), (lambda: engine.save_pretrained("nowhere"))
        for call in (*later, *looks, *saves, lambda: engine.execute_schedule(iter([(x, y)]))):
            with pytest.raises(RuntimeError, match="failed on this rank alone"):
                call()
        all_reduce_(torch.zeros(5, dtype=torch.float64))


@on_ranks(4)
def test_a_tensor_rank_of_a_pipeline_that_fails_alone(world):
    """It raises at once: where tensor ranks meet in what follows, it would not reach the end of the schedule."""
    parallel = {"tensor": 2, "pipeline": {"size": 2, "microbatches": 4, "schedule": "gpipe"}}
    with short_grace(), started(parallel, plan={}) as (context, engine, told):
        if world.rank != 1:
            engine.forward_backward(*batch(1))
            return
        told.fail("backward", good_backwards=1)
        with pytest.raises(RuntimeError, match="the backward is broken"):
            engine.forward_backward(*batch(1))
        assert told.layers["0"].good_backwards == -1
        engine.eval()
        with pytest.raises(RuntimeError, match="failed on this rank alone"):
            engine(batch(1)[0])
        for _ in range(2):  # the test comes in its place: two microbatches, and the loss
            torch.distributed.recv(torch.empty(2, 4), group=context.pp.group, group_src=1)
        all_reduce_(torch.zeros(5, dtype=torch.float64))


@pytest.mark.parametrize("resets", [True, False], ids=["reset", "own reset"])
@on_ranks(2)
def test_data_ranks_of_shards_that_fail_together_continue(world, resets):
    """In calls of forward_backward, and in a loop; also with a torch that cannot drop what a failed batch left."""
    with pytest.MonkeyPatch.context() as patch:
        if not resets:
            patch.delattr(FSDPModule, "reset_iter_state", raising=False)
        parallel = {"data": {"shard": 2}, "pipeline": {"microbatches": 2}}
        with started(parallel, num_layers=4) as (context, engine, told):
            fail_and_continue(context, engine, told, ArithmeticError, [True] * 3)
            x, y = own_part(context, *batch(1))
            value = engine.criterion(engine(x), y)
            with told.failing(ArithmeticError, BROKEN, "backward"):
                engine.backward(value)
            engine.zero_grad()
            assert run_window(context, engine, 3).stepped
            check_weights(engine, [0], [1], [2], [3], num_layers=4)


@pytest.mark.parametrize(("stage", "reduce_dtype"), [(0, "float64"), (1, "float32")])
@on_ranks(4)
def test_a_sharded_stage_that_fails_on_all_its_ranks(world, stage, reduce_dtype):
    """Also where torch adds gradients up apart from ``.grad``, as it reduces them in another dtype."""
    parallel = {"data": {"shard": 2}, "pipeline": {"size": 2, "microbatches": 2}}
    with started(parallel, num_layers=4, reduce_dtype=reduce_dtype) as (context, engine, told):
        own = context.pp.rank
        fail_and_continue(context, engine, told, (RuntimeError, ValueError), [own == stage, own == stage, own == 1])


def fail_and_continue(context, engine, told, error, mine):
    """Batches of which a forward, a second backward and the criterion fail on the ranks for which that is theirs."""
    for number, what in enumerate(("forward", "backward", "criterion")):
        with told.failing(error, BROKEN, *([what, "", 1] if mine[number] else [])):
            engine.forward_backward(*own_part(context, *batch(1)))
        engine.zero_grad()
        assert run_window(context, engine, number).stepped
        check_weights(engine, *[[good] for good in range(number + 1)], num_layers=4)


def broken(count, error):
    """The iterator of a loader that raises after so many batches."""
    for _ in range(count):
        yield tuple(batch(1))
    if error is not None:
        raise error


@pytest.mark.parametrize("parallel", [{"data": 2}, {"pipeline": 2}], ids=["dp2", "pp2"])
@on_ranks(2)
def test_an_iterator_that_fails_or_ends_on_one_rank(world, parallel):
    with started(parallel) as (_, engine, _):
        for error, raised, message in (
            (OSError("no such disk"), (OSError if world.rank else RuntimeError), "OSError: no such disk; on rank 1"),
            (RuntimeError("no connection"), RuntimeError, "no connection" + "; on rank 1" * (1 - world.rank)),
            (None, ValueError, "no further batch, but other ranks have one; on rank 1"),
        ):
            data = broken(1 if world.rank else 2, error if world.rank else None)
            engine.zero_grad()
            engine.execute_schedule(data)
            with pytest.raises(raised, match="no such disk" if raised is OSError else message):
                engine.execute_schedule(data)
        data = broken(1, None)
        engine.zero_grad()
        engine.execute_schedule(data)
        with pytest.raises(StopIteration):
            engine.execute_schedule(data)


@pytest.mark.parametrize("wait", [True, False])
@on_ranks(2)
def test_what_is_called_after_a_save_and_fails_on_one_rank(world, wait):
    def then():
        if world.rank == 0:
            raise OSError("the bucket is gone")

    with started({"data": 2}) as (_, engine, _):
        folder = shared_folder()
        with pytest.raises(paramp.CheckpointError, match="then: OSError: the bucket is gone; on rank 0"):
            engine.save(folder / "a", wait=wait, then=then) or engine.finish_saving()
        engine.load(folder / "a")


@family
@pytest.mark.parametrize("what", cases("an expert that fails", ["forward", "backward"], ["backward"], 1))
def test_an_expert_that_fails_on_one_rank_ends_all_and_is_shown_once(what):
    """The other rank waits for its rows, and ends as soon as it has left."""
    result = torchrun(2, "tests/support/scripts/an_expert_fails.py", what, timeout=100)
    assert result.returncode != 0
    lines = [line.removeprefix("[rank1]: ") for line in result.stderr.splitlines() if line.startswith("[rank")]
    assert lines.count("ArithmeticError: the expert is broken") == 1, result.stderr
    assert lines[-1].startswith("paramp: other ranks of the data and tensor axes did not fail, and wait for this one")
    assert not any("[rank0]: Traceback" in line for line in result.stderr.splitlines())
