"""Windows that fail, windows without counts, and what a criterion takes."""

import copy

import pytest
import torch
import torch.nn.functional as F
from pool import on_ranks
from reference import assert_trained, batches, small_gpt
from torch import nn

import paramp


def engine_for(model, criterion=F.mse_loss, **options):
    options = {"lr": 0.1, "weight_decay": 0.1} | options
    return paramp.initialize(model, torch.optim.SGD(model.parameters(), **options), criterion, plan={})[0]


def linear():
    torch.manual_seed(5)
    return nn.Linear(4, 4)


class Refusing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ArithmeticError("refused")


@pytest.mark.parametrize("precision", ["32-true", "16-naive", "16-mixed"])
@pytest.mark.parametrize("place", ["forward", "criterion", "backward", "forward_backward"])
def test_a_window_that_failed_is_dropped(precision, place):
    """Elsewhere gradients that wait for the rest of their window outlive zero_grad."""

    broken = ""

    def criterion(output, target):
        if broken == "criterion":
            raise ArithmeticError("refused")
        return F.mse_loss(Refusing.apply(output) if "backward" in broken else output, target)

    def run(x, y):
        if place == "forward_backward":
            engine.forward_backward(x, y)
        else:
            engine.backward(engine.criterion(engine(x), y))

    x, y = torch.randn(2, 3, 8, 4, generator=torch.Generator().manual_seed(2))
    results = []
    for fails in (False, True):
        with paramp.launch_from_torch({"precision": precision, "gradient_accumulation": 2}):
            engine = engine_for(linear(), criterion)
            if fails:
                run(x[0], y[0])
                engine.step()
                broken = place
                with pytest.raises((ArithmeticError, RuntimeError)):
                    run(x[0, :, :3] if broken == "forward" else x[0], y[0])
                broken = ""
                engine.zero_grad()
            for index in (1, 2):
                engine.zero_grad()  # which within a window changes nothing
                run(x[index], y[index])
                result = engine.step()
            results.append((result.grad_norm, result.loss, engine.num_steps))
    assert results[0] == results[1]


def test_after_a_failure_within_a_window_a_call_is_refused_until_the_window_is_dropped():
    """A window that begins with the failure has nothing to lose: the next call begins it again."""
    broken = False

    def criterion(output, target):
        return F.mse_loss(Refusing.apply(output) if broken else output, target)

    x, y = torch.randn(2, 3, 8, 4, generator=torch.Generator().manual_seed(2))
    norms = []
    for fails in (False, True):
        with paramp.launch_from_torch({"gradient_accumulation": 2}):
            engine = engine_for(linear(), criterion)
            for index in (0, 1):
                if fails:
                    broken = True
                    with pytest.raises(ArithmeticError):
                        engine.forward_backward(x[2], y[2])
                    broken = False
                if fails and index == 1:
                    with pytest.raises(RuntimeError, match="failed and left a part of its gradients"):
                        engine.forward_backward(x[1], y[1])
                    engine.zero_grad()
                    engine.forward_backward(x[0], y[0])
                    engine.step()
                engine.forward_backward(x[index], y[index])
                result = engine.step()
            norms.append(result.grad_norm)
    assert norms[0] == norms[1]


@pytest.mark.parametrize("parallel", [{}, {"data": 2}, {"pipeline": 2}], ids=["tp2", "dp2", "pp2"])
@on_ranks(2)
def test_a_window_in_which_nothing_counts_makes_no_step(world, parallel):
    """Its loss is 0 / 0. Weight decay would change the weights all the same."""

    def criterion(output, target):
        return (output * target).sum(), target.count_nonzero()

    precision = {"mode": "16-mixed", "growth_interval": 1}
    with paramp.launch_from_torch({"parallel": parallel or {"tensor": 2}, "precision": precision}) as context:
        torch.manual_seed(5)
        engine = engine_for(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), criterion)
        before, scale = engine.full_state_dict(), engine.scaler.get_scale()
        for _ in range(2):
            engine.forward_backward(torch.ones(4, 4), torch.zeros(4, 4))
            result = engine.step()
            assert (result.stepped, result.overflow) == (False, False)
            assert result.loss != result.loss
            assert (engine.num_steps, engine.num_skipped, engine.scaler.get_scale()) == (0, 0, scale)
        assert all(torch.equal(value, before[name]) for name, value in engine.full_state_dict().items())
        # Nothing counts on one data rank only: the mean is that of the other.
        engine.forward_backward(torch.ones(4, 4), torch.full((4, 4), float(context.dp.rank == 0)))
        assert engine.step().stepped


def test_a_criterion_takes_what_the_users_takes():
    with paramp.launch_from_torch():
        engine = engine_for(linear(), lambda x: x.sum())
        engine.backward(engine.criterion(engine(torch.ones(2, 4))))
        assert engine.step().stepped
        engine = engine_for(
            linear(), lambda x, y=None, *, scale=1.0: x.mean() * scale if y is None else F.mse_loss(x, y)
        )
        output = engine(torch.ones(2, 4))
        assert engine.criterion(output, None) == output.mean()
        assert engine.criterion(output, scale=2.0) == 2 * output.mean()


@on_ranks(2)
def test_the_mode_of_the_module_is_that_of_the_engine(world):
    with paramp.launch_from_torch({"parallel": {"tensor": 2}}):
        model = nn.Sequential(nn.Linear(4, 8))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine, *_ = paramp.initialize(model, optimizer, plan={"0": "vocab_logits"})
        engine.module.eval()
        assert type(engine(torch.ones(2, 4))) is torch.Tensor  # gathered, as engine.eval() promises
        engine.module.train()
        assert type(engine(torch.ones(2, 4))) is not torch.Tensor
    with paramp.launch_from_torch({"parallel": {"pipeline": 2}}):
        engine = engine_for(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
        engine.module.eval()
        assert engine(torch.ones(2, 4)).shape == (2, 4)
        engine.module.train()
        with pytest.raises(RuntimeError, match="cannot train under pipeline"):
            engine(torch.ones(2, 4))


@on_ranks(2)
def test_engines_of_one_context_draw_different_masks(world, tmp_path):
    x = torch.ones(4, 64)

    def masks(engine):
        return engine(x).detach() != 0  # the biases differ

    def two(parallel):
        return [engine_for(nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5))) for _ in range(2)]

    with paramp.launch_from_torch({"parallel": {"tensor": 2}}) as context:
        first, second = two(context)
        for engine in (first, second):
            nn.init.ones_(engine.module[0].weight)
        with context.activation_stream():
            alone = F.dropout(torch.ones(4, 64), 0.5)
        drawn = [masks(first), masks(second)]
        assert torch.equal(drawn[0], alone != 0)  # as if it were the only one
        assert not torch.equal(drawn[0], drawn[1])
        second.save(tmp_path / "second")
        first.save(tmp_path / "first")
        after = [masks(first), masks(second)]
    for parallel in ({"tensor": 2}, {"data": 2}):  # the second data rank begins streams of its own
        with paramp.launch_from_torch({"parallel": parallel}) as context:
            engines = two(context)
            for name, engine in zip(("first", "second"), engines, strict=True):
                engine.load(tmp_path / name)
            again = [masks(engine) for engine in engines]
            assert not torch.equal(*again)
            if context.tp.size == 2:
                assert all(map(torch.equal, after, again))


class First(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.shared = nn.Linear(4, 4), nn.Parameter(torch.randn(4, 4))
        self.uses = True

    def forward(self, x):
        return self.linear(x @ self.shared if self.uses else x)


@on_ranks(2)
def test_a_tied_parameter_without_a_gradient_is_not_stepped(world):
    """In turn it is used in both stages, in none, in the last and in the first only."""
    turns = [(True, True), (False, False), (False, True), (False, False), (True, False)]

    def build():
        torch.manual_seed(5)
        model = nn.Sequential(First(), First())
        model[1].shared = model[0].shared
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.5)

    x, y = torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(2))
    model, optimizer = build()
    for uses in turns:
        model[0].uses, model[1].uses = uses
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    for parallel in ({"pipeline": 2}, {"data": 2, "zero": 1}):
        with paramp.launch_from_torch({"parallel": parallel}):
            mine, optimizer = build()
            stages = list(mine)
            engine, *_ = paramp.initialize(mine, optimizer, F.mse_loss)
            for uses in turns:
                stages[0].uses, stages[1].uses = uses
                engine.forward_backward(x, y)
                engine.step()
            assert_trained(engine.full_state_dict(), model.state_dict(), build()[0].state_dict(), atol=1e-6)


MESSAGE = r"step\(\): no backward since the last step"


@on_ranks(2)
def test_each_step_needs_a_backward_of_its_own(world):
    """Gradients that were reduced once would be reduced again; those of half a window would count as whole ones."""
    pipeline = {"pipeline": {"size": 2, "microbatches": 2}}
    for parallel in ({}, {"zero": 1}, pipeline):
        for accumulation in (1, 2):
            with paramp.launch_from_torch({"parallel": parallel, "gradient_accumulation": accumulation}):
                torch.manual_seed(0)
                model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
                start, plain = copy.deepcopy(model.state_dict()), copy.deepcopy(model)
                engine, *_ = paramp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), F.mse_loss)
                reference = torch.optim.SGD(plain.parameters(), lr=0.1)
                x, y = torch.ones(2, 4), torch.zeros(2, 4)
                for _ in range(2):
                    for call in range(accumulation):
                        with pytest.raises(RuntimeError, match=MESSAGE):
                            engine.step()
                        engine.forward_backward(x, y)
                        assert engine.step().stepped == (call == accumulation - 1)
                    reference.zero_grad()
                    F.mse_loss(plain(x), y).backward()
                    reference.step()
                assert_trained(engine.full_state_dict(), plain.state_dict(), start, atol=1e-6, rtol=1e-6)


@on_ranks(2)
def test_so_does_each_under_sequence_parallelism(world):
    """Each rank has a part of a norm's gradient there, which is in no buffer until the window ends."""
    config = {"parallel": {"tensor": 2, "sequence_parallel": True}, "gradient_accumulation": 4}
    with paramp.launch_from_torch(config):
        model = small_gpt(num_layers=1)
        engine, *_ = paramp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), model.loss)
        for _ in range(2):
            engine.forward_backward(*next(batches(1)))
            assert not engine.step().stepped
            with pytest.raises(RuntimeError, match=MESSAGE):
                engine.step()
        norms = [parameter for name, parameter in engine.named_parameters() if "norm" in name]
        for parameter in norms:
            parameter.grad.mul_(2.0)  # by hand, in its place
        assert not engine.step().stepped
        for parameter in norms:
            parameter.grad = parameter.grad * 2.0
        assert engine.step().stepped


def test_a_dropped_backward_is_none():
    with paramp.launch_from_torch():
        model = nn.Linear(4, 4)
        engine, *_ = paramp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), F.mse_loss)
        engine.forward_backward(torch.ones(2, 4), torch.ones(2, 4))
        engine.zero_grad()
        with pytest.raises(RuntimeError, match=MESSAGE):
            engine.step()
        engine.evaluate(torch.ones(2, 4), torch.ones(2, 4))
        with pytest.raises(RuntimeError, match=MESSAGE):
            engine.step()
        for parameter in model.parameters():  # gradients of the user's own are gradients
            parameter.grad = torch.ones_like(parameter)
        before = model.bias.detach().clone()
        assert engine.step().stepped
        torch.testing.assert_close(model.bias.detach(), before - 0.1)


@pytest.mark.parametrize("precision", ["32-true", "16-naive"])
@pytest.mark.parametrize("another", [False, True])
def test_a_backward_past_the_engine_is_an_error(precision, another):
    """Its gradients lack the loss scale, and are not divided by the size of the window."""
    x, y = torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(2))
    results = []
    for mistaken in (False, True):
        with paramp.launch_from_torch({"precision": precision}):
            engine = engine_for(linear(), F.mse_loss)
            if mistaken:
                engine.criterion(engine(x), y).backward()
                with pytest.raises(RuntimeError, match=r"loss\.backward\(\) was called on an output of the engine"):
                    engine.backward(engine.criterion(engine(x), y)) if another else engine.step()
                engine.zero_grad()
            engine.backward(engine.criterion(engine(x), y))
            results.append(engine.step().grad_norm)
    assert results[0] == results[1]


def test_gradients_of_autograd_grad_may_be_set_by_hand():
    x, y = torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(2))
    x.requires_grad_()
    with paramp.launch_from_torch():
        engine = engine_for(linear(), F.mse_loss)
        parameters = [parameter for _, parameter in engine.named_parameters()]
        of_x, *gradients = torch.autograd.grad(engine.criterion(engine(x), y), [x, *parameters])
        assert of_x.norm() > 0
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        expected = torch.stack([gradient.norm() for gradient in gradients]).norm()
        assert engine.step().grad_norm == pytest.approx(float(expected), rel=1e-6)


def test_a_sum_and_its_count_are_their_mean_to_the_bit():
    """Where the count is a power of two, so that no division rounds."""
    x, y = torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(2))
    criteria = F.mse_loss, lambda output, target: (F.mse_loss(output, target, reduction="sum"), target.numel())
    weights = []
    for criterion in criteria:
        with paramp.launch_from_torch({"gradient_accumulation": 2}):
            engine = engine_for(linear(), criterion)
            for part in (slice(4), slice(4, 8)):
                engine.forward_backward(x[part], y[part])
                engine.step()
            weights.append(engine.full_state_dict())
    assert_trained(*weights, linear().state_dict())


@pytest.mark.parametrize("counts", [False, True], ids=["means", "counts"])
@pytest.mark.parametrize(
    ("parallel", "precision"),
    [({"zero": 1}, "32-true"), ({"pipeline": {"size": 2, "microbatches": 2}}, "16-naive"), ({"tensor": 2}, "16-mixed")],
    ids=["dp2", "pp2", "tp2"],
)
@on_ranks(2)
def test_flush_steps_with_the_calls_that_were_made(world, parallel, precision, counts):
    """Windows of four calls, of two, and of one for which step() was not called."""

    def criterion(output, target):
        if counts:
            return F.mse_loss(output, target, reduction="sum"), target.numel()
        return F.mse_loss(output, target)

    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    start, plain = copy.deepcopy(model.state_dict()), copy.deepcopy(model)
    reference = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    x, y = torch.randn(2, 7, 16, 4, generator=torch.Generator().manual_seed(2))
    expected = []
    for calls in ([0, 1, 2, 3], [4, 5], [6]):
        reference.zero_grad()
        losses = [F.mse_loss(plain(x[call]), y[call]) / len(calls) for call in calls]
        sum(losses).backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        expected.append((float(sum(losses).detach()), float(norm)))
        reference.step()
    config = {"parallel": parallel, "precision": precision, "gradient_accumulation": 4, "clip_grad_norm": 0.1}
    tolerance, of_way = (1e-5, 1e-5) if precision == "32-true" else (5e-3, 0.02)
    with paramp.launch_from_torch(config) as context:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        engine, *_ = paramp.initialize(
            model, optimizer, criterion, plan={"0": "colwise", "1": "rowwise"} if context.tp.size > 1 else None
        )
        own = slice(context.dp.rank, None, context.dp.size)
        results = []
        for call in range(7):
            engine.forward_backward(x[call, own], y[call, own])
            result = engine.step() if call < 6 else None
            if call in (5, 6):
                result = engine.flush()
            if call in (3, 5, 6):
                results.append((result.loss, result.grad_norm))
                assert result.stepped
                empty = engine.flush()  # now the window is empty
                assert (empty.stepped, empty.overflow, empty.loss, empty.loss_scale) == (
                    *(False, False, None),
                    result.loss_scale,
                )
        assert engine.num_steps == 3
        assert results == [pytest.approx(pair, rel=tolerance) for pair in expected]
        assert_trained(engine.full_state_dict(), plain.state_dict(), start, of_way=of_way)


@on_ranks(2)
def test_flush_skips_on_every_rank_and_leaves_a_state_to_save(world, tmp_path):
    """An overflow of one rank in one of two calls; the next window has its whole length again."""
    x = torch.ones(4, 4)
    with paramp.launch_from_torch({"precision": "16-mixed", "gradient_accumulation": 3}) as context:
        engine = engine_for(linear())
        for call in range(2):
            engine.forward_backward(x * (torch.inf if context.rank == 1 and call == 0 else 1.0), x)
            engine.step()
        with pytest.raises(paramp.CheckpointError, match="2 of 3 calls"):
            engine.save("anywhere")
        result = engine.flush()
        assert (result.stepped, result.overflow, result.loss_scale) == (False, True, 2.0**16)
        assert engine.scaler.get_scale() == 2.0**15
        folders = [str(tmp_path)]
        torch.distributed.broadcast_object_list(folders)
        engine.save(folders[0] + "/saved")
        stepped = []
        for _ in range(3):
            engine.forward_backward(x, x)
            stepped.append(engine.step().stepped)
        assert stepped == [False, False, True]
