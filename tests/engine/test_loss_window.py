"""Windows that fail, windows without counts or a backward, flush, and what a criterion takes."""

import copy
import functools
import warnings
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from beside_plain import plain_step, randn, seeded
from pool import on_ranks, shared_folder
from reference import assert_trained, batches, small_gpt
from small_engines import engine_of, own_part, train_step
from torch import nn

import paramp

X, Y = randn(2, 8, 8, 4)
"""Batches of eight samples."""
decaying = functools.partial(torch.optim.SGD, lr=0.1, weight_decay=0.1)
NO_BACKWARD = r"step\(\): no backward since the last step"


def linear():
    return seeded(nn.Linear, 4, 4)


def two_layers():
    return seeded(lambda: nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)))


def refuse(gradient):
    raise ArithmeticError("refused")


def interrupt(gradient):
    raise KeyboardInterrupt


class Breaking:
    """A mean squared error that fails at the ``place`` that it is set to."""

    place = ""

    def __call__(self, output, target):
        if self.place == "criterion":
            raise ArithmeticError("refused")
        loss = F.mse_loss(output, target)
        if "backward" in self.place:
            loss.register_hook(interrupt if "interrupted" in self.place else refuse)
        return loss


@pytest.mark.parametrize("precision", ["32-true", "16-naive", "16-mixed"])
@pytest.mark.parametrize("place", ["forward", "criterion", "backward", "forward_backward", "interrupted backward"])
def test_a_window_that_failed_is_dropped(precision, place):
    """Elsewhere gradients that wait for the rest of their window outlive zero_grad."""

    def run(x, y):
        if place == "forward_backward":
            engine.forward_backward(x, y)
        else:
            engine.backward(engine.criterion(engine(x), y))

    results = []
    for fails in (False, True):
        with paramp.launch_from_torch({"precision": precision, "gradient_accumulation": 2}):
            criterion = Breaking()
            engine = engine_of(linear(), criterion, decaying)
            if fails:
                run(X[0], Y[0])
                engine.step()
                criterion.place = place
                with pytest.raises(KeyboardInterrupt if "interrupted" in place else (ArithmeticError, RuntimeError)):
                    run(X[0, :, :3] if place == "forward" else X[0], Y[0])
                criterion.place = ""
                if "backward" in place:
                    with pytest.raises(RuntimeError, match="failed and left a part of its gradients"):
                        run(X[1], Y[1])
                engine.zero_grad()
            for index in (1, 2):
                engine.zero_grad()  # which within a window changes nothing
                run(X[index], Y[index])
                result = engine.step()
            results.append((result.grad_norm, result.loss, engine.num_steps))
    assert results[0] == results[1]


class Growing(nn.Linear):
    """Its second output has another width in each call."""

    width = 1

    def forward(self, x):
        self.width += 1
        return super().forward(x), x.new_ones(len(x), self.width)


def test_outputs_that_do_not_join_are_a_failure_of_the_window():
    with paramp.launch_from_torch({"parallel": {"pipeline": {"size": 1, "microbatches": 2}}}):
        engine = engine_of(Growing(4, 4), lambda output, y: F.mse_loss(output[0], y))
        with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
            engine.execute_schedule(iter([(X[0], Y[0])]))
        with pytest.raises(RuntimeError, match="failed and left a part of its gradients"):
            engine.step()


@pytest.mark.parametrize("size", [1, 2])
@on_ranks(lambda size: size)
def test_a_forward_that_failed_and_is_called_again_is_of_its_window(world, size):
    """On one rank, in a loop whose zero_grad changes nothing within a window."""
    with paramp.launch_from_torch({"gradient_accumulation": 2}):
        engine = engine_of(linear())
        for index in range(4):
            engine.zero_grad()
            if index == 0 and world.rank == world.size - 1:
                with pytest.raises(RuntimeError):
                    engine(X[0, :, :3])
            engine.backward(engine.criterion(engine(X[index]), Y[index]))
            assert engine.step().stepped == (index % 2 == 1)


@pytest.mark.parametrize("parallel", [{"tensor": 2}, {"data": 2}, {"pipeline": 2}], ids=["tp2", "dp2", "pp2"])
@on_ranks(2)
def test_a_window_in_which_nothing_counts_makes_no_step(world, parallel):
    """Its loss is 0 / 0. Weight decay would change the weights all the same."""
    precision = {"mode": "16-mixed", "growth_interval": 1}
    with paramp.launch_from_torch({"parallel": parallel, "precision": precision}) as context:
        criterion = lambda output, target: ((output * target).sum(), target.count_nonzero())  # noqa: E731
        engine = engine_of(two_layers(), criterion, decaying, plan={})
        before, scale = engine.full_state_dict(), engine.scaler.get_scale()
        for _ in range(2):
            result = train_step(engine, torch.ones(4, 4), torch.zeros(4, 4))
            assert (result.stepped, result.overflow) == (False, False)
            assert result.loss != result.loss
            assert (engine.num_steps, engine.num_skipped, engine.scaler.get_scale()) == (0, 0, scale)
        assert all(torch.equal(value, before[name]) for name, value in engine.full_state_dict().items())
        # Nothing counts on one data rank only: the mean is that of the other.
        assert train_step(engine, torch.ones(4, 4), torch.full((4, 4), float(context.dp.rank == 0))).stepped


def test_gradients_that_add_up_by_mistake_are_a_warning_once():
    with paramp.launch_from_torch():
        model = linear()
        engine = engine_of(model, F.mse_loss, decaying)
        engine.forward_backward(X[0], Y[0])
        with pytest.warns(
            UserWarning, match=r"add up to a sum.*step\(\) after each batch.*gradient_accumulation=k"
        ) as seen:
            engine.forward_backward(X[1], Y[1])
        assert [warning.filename for warning in seen] == [__file__]
        engine.forward_backward(X[2], Y[2])
        plain = linear()
        sum(F.mse_loss(plain(X[index]), Y[index]) for index in range(3)).backward()
        torch.testing.assert_close(model.weight.grad, plain.weight.grad)
        engine = engine_of(linear(), F.mse_loss, decaying)
        for index in range(4):  # several losses of one step
            engine.backward(engine.criterion(engine(X[index]), Y[index]))
            engine.evaluate(X[0], Y[0])
    with paramp.launch_from_torch({"gradient_accumulation": 2}):
        engine = engine_of(linear(), F.mse_loss, decaying)
        for index in range(4):
            engine.forward_backward(X[index], Y[index])
            engine.step()
        engine.forward_backward(X[0], Y[0])
        with pytest.warns(UserWarning, match="the second batch before a step.*also with gradient_accumulation"):
            engine.forward_backward(X[1], Y[1])


def test_batches_without_any_step_are_a_warning_once():
    with paramp.launch_from_torch():
        for stepped in (True, False):
            engine = engine_of(linear(), F.mse_loss, decaying)
            for index in range(12):
                with (
                    pytest.warns(UserWarning, match="5 batches have run, and step.. was never called")
                    if (index == 5 and not stepped)
                    else nullcontext()
                ):
                    engine.forward_backward(X[0], Y[0])
                if index == 0 and stepped:
                    engine.step()
                engine.zero_grad()
        engine = engine_of(linear(), F.mse_loss, decaying)
        for _ in range(100):
            engine.backward(engine.criterion(engine(X[0]), Y[0]))
        with pytest.warns(UserWarning, match="100 batches have run"):
            engine.backward(engine.criterion(engine(X[0]), Y[0]))


@pytest.mark.parametrize("parallel", [{"data": 2}, {"data": 2, "zero": 1}], ids=str)
@on_ranks(2)
def test_gradients_that_the_user_clips_are_a_warning_once(world, parallel):
    """Of a norm of 1 a loss scale of 65536 leaves 1.5e-5: such a loop trains nothing. Without a scale each rank clips
    its own terms of a sum."""
    clips = {"clip": torch.nn.utils.clip_grad_norm_, "ours": paramp.clip_grad_norm_}
    for mode, how in (("16-mixed", "clip"), ("16-mixed", "ours"), ("16-mixed", "first"), ("bf16-mixed", "clip")):
        with paramp.launch_from_torch({"precision": mode, "parallel": parallel}) as context:
            engine = engine_of(linear(), F.mse_loss, decaying)
            for index in range(3):
                warns = how in clips and index == 1 and context.is_main
                engine.forward_backward(X[0], Y[0])
                if index and how in clips:
                    clips[how](engine.module.parameters(), 1.0)
                elif index:
                    next(engine.module.parameters()).grad.mul_(0.5)
                with (
                    pytest.warns(UserWarning, match=r"all gradients were changed.*such as a mask, is right")
                    if warns
                    else warnings.catch_warnings(action="error") as seen
                ):
                    engine.step()
                assert not warns or {warning.filename for warning in seen} == {__file__}, [*map(str, seen)]


@pytest.mark.parametrize("mode", ["16-mixed", "32-true"])
def test_gradients_of_a_backward_without_the_engine_are_a_warning_once_if_there_is_a_scale(mode):
    with paramp.launch_from_torch({"precision": mode}):
        engine = engine_of(two_layers(), F.mse_loss, decaying)
        for index in range(3):
            F.mse_loss(engine.module(X[0]), Y[0]).backward()
            warns = mode == "16-mixed" and index == 0
            with (
                pytest.warns(UserWarning, match="from no backward of the engine")
                if warns
                else warnings.catch_warnings(action="error")
            ):
                engine.step()


def test_a_criterion_takes_what_the_users_takes():
    with paramp.launch_from_torch():
        engine = engine_of(linear(), lambda x: x.sum())
        engine.backward(engine.criterion(engine(torch.ones(2, 4))))
        assert engine.step().stepped
        engine = engine_of(
            linear(), lambda x, y=None, *, scale=1.0: x.mean() * scale if y is None else F.mse_loss(x, y)
        )
        output = engine(torch.ones(2, 4))
        assert engine.criterion(output, None) == output.mean()
        assert engine.criterion(output, scale=2.0) == 2 * output.mean()


@on_ranks(2)
def test_the_mode_of_the_module_is_that_of_the_engine(world):
    """In evaluation outputs are whole on every rank; in training they stay sharded, and a pipeline has none."""
    x = torch.ones(2, 4)
    with paramp.launch_from_torch({"parallel": {"tensor": 2}}):
        engine = engine_of(nn.Sequential(linear()), plan={"0": "vocab_logits"})
        engine.module.eval()
        torch.testing.assert_close(engine(x), linear()(x))
        engine.module.train()
        assert type(engine(x)) is not torch.Tensor
    with paramp.launch_from_torch({"parallel": {"pipeline": 2}}):
        engine = engine_of(two_layers())
        engine.module.eval()
        torch.testing.assert_close(engine(x), two_layers()(x))
        engine.module.train()
        with pytest.raises(RuntimeError, match=r"cannot train under pipeline.*engine\.forward_backward"):
            engine(x)


@on_ranks(2)
def test_engines_of_one_context_draw_different_masks(world):
    """And go on after a load; on a second data rank, which begins streams of its own, they differ too."""
    folder, saved = shared_folder(), None

    def masks(load):
        engines = [engine_of(nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5)), plan={}) for _ in range(2)]
        for name, engine in zip("ab", engines, strict=True):
            engine.load(folder / name) if load else engine.save(folder / name)
        return [engine(torch.ones(4, 64)).detach() != 0 for engine in engines]  # the biases differ

    for tensor, load in ((2, False), (2, True), (1, True)):
        with paramp.launch_from_torch({"parallel": {"tensor": tensor}}):
            found = masks(load)
            assert not torch.equal(*found)
            saved = saved or found
            assert tensor == 1 or all(map(torch.equal, found, saved))


class First(nn.Linear):
    """Also multiplies by a weight that another layer has too, if it ``uses`` it."""

    uses = True

    def __init__(self):
        super().__init__(4, 4)
        self.shared = nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        return super().forward(x @ self.shared if self.uses else x)


TIED_IN = {"pp2": {"pipeline": 2}, "dp2": {"data": 2, "zero": 1}, "pp2-dp2": {"pipeline": 2, "data": 2, "zero": 1}}


@pytest.mark.parametrize("parallel", TIED_IN.values(), ids=TIED_IN)
@on_ranks(lambda parallel: 4 if len(parallel) == 3 else 2)
def test_a_tied_parameter_without_a_gradient_is_not_stepped(world, parallel):
    """In turn it is used in both stages, in none, in the last and in the first only; the tied bias always."""

    def build():
        model = seeded(lambda: nn.Sequential(First(), First()))
        model[1].shared, model[1].bias = model[0].shared, model[0].bias
        return model

    make = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.5)
    plain, mine = build(), build()
    stages, optimizer = [*zip(plain, mine, strict=True)], make(plain.parameters())
    with paramp.launch_from_torch({"parallel": parallel}):
        engine = engine_of(mine, optimizer=make)
        for uses in [(True, True), (False, False), (False, True), (False, False), (True, False)]:
            for pair, use in zip(stages, uses, strict=True):
                pair[0].uses = pair[1].uses = use
            plain_step(plain, optimizer, X[0], Y[0])
            assert train_step(engine, X[0], Y[0]).stepped
        assert_trained(engine.full_state_dict(), plain.state_dict(), build().state_dict(), atol=1e-6)


@on_ranks(2)
def test_a_change_by_hand_under_sequence_parallelism_is_a_gradient_of_the_step(world):
    """Each rank has a part of a norm's gradient there, which is in no buffer until the window ends."""
    config = {"parallel": {"tensor": 2, "sequence_parallel": True}, "gradient_accumulation": 3}
    with paramp.launch_from_torch(config):
        model = small_gpt(num_layers=1)
        engine = engine_of(model, model.loss)
        train_step(engine, *next(batches(1)))
        norms = [parameter for name, parameter in engine.named_parameters() if "norm" in name]
        for change in (lambda one: one.grad.mul_(2.0), lambda one: setattr(one, "grad", one.grad * 2.0)):
            with pytest.raises(RuntimeError, match=NO_BACKWARD):
                engine.step()
            for parameter in norms:
                change(parameter)
            result = engine.step()
        assert result.stepped


@pytest.mark.parametrize("parallel", [{}, {"zero": 1}, {"pipeline": {"size": 2, "microbatches": 2}}])
@on_ranks(2)
def test_each_step_needs_a_backward_of_its_own(world, parallel):
    """Or gradients of the user's own: not one that was dropped, nor an evaluation."""
    with paramp.launch_from_torch({"parallel": parallel}) as context:
        engine = engine_of(two_layers())
        engine.forward_backward(X[0], Y[0])
        engine.zero_grad()
        for call in (None, functools.partial(engine.evaluate, X[0], Y[0]), functools.partial(train_step, engine, X[0])):
            if call is not None:
                call()
            with pytest.raises(RuntimeError, match=NO_BACKWARD):
                engine.step()
        parameters = dict(engine.named_parameters())
        before = {name: value.detach().clone() for name, value in parameters.items()}
        for parameter in parameters.values():
            parameter.grad = torch.full_like(parameter, 1 / context.dp.size)
        assert engine.step().stepped
        for name, value in parameters.items():
            torch.testing.assert_close(value.detach(), before[name] - 0.1)


@pytest.mark.parametrize("precision", ["32-true", "16-naive"])
@pytest.mark.parametrize("another", [False, True])
def test_a_backward_past_the_engine_is_an_error(precision, another):
    """Its gradients lack the loss scale, and are not divided by the size of the window."""
    results = []
    for mistaken in (False, True):
        with paramp.launch_from_torch({"precision": precision}):
            engine = engine_of(linear())
            if mistaken:
                x = X[0].clone().requires_grad_()
                engine.module.requires_grad_(False)  # as in a GAN
                torch.autograd.grad(engine(x).sum(), x)
                engine.module.requires_grad_()
                engine.criterion(engine(X[0]), Y[0]).backward()
                with pytest.raises(RuntimeError, match=r"loss\.backward\(\) was called on an output of the engine"):
                    engine.backward(engine.criterion(engine(X[0]), Y[0])) if another else engine.step()
                engine.zero_grad()
            engine.backward(engine.criterion(engine(X[0]), Y[0]))
            results.append(engine.step().grad_norm)
    assert results[0] == results[1]


def sum_and_count(output, target):
    return F.mse_loss(output, target, reduction="sum"), target.numel()


@pytest.mark.parametrize("criterion", [F.mse_loss, sum_and_count])
@pytest.mark.parametrize(
    ("parallel", "precision"),
    [({"zero": 1}, "32-true"), ({"pipeline": {"size": 2, "microbatches": 2}}, "16-naive"), ({"tensor": 2}, "16-mixed")],
    ids=["dp2", "pp2", "tp2"],
)
@on_ranks(2)
def test_flush_steps_with_the_calls_that_were_made(world, parallel, precision, criterion):
    """Windows of four calls, of two, and of one for which step() was not called."""
    plain = two_layers()
    make = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    reference, expected, results = make(plain.parameters()), [], []
    for calls in ([0, 1, 2, 3], [4, 5], [6]):
        reference.zero_grad()
        loss = sum(F.mse_loss(plain(X[call]), Y[call]) for call in calls) / len(calls)
        loss.backward()
        expected.append((loss.item(), nn.utils.clip_grad_norm_(plain.parameters(), 0.1).item()))
        reference.step()
    config = {"parallel": parallel, "precision": precision, "gradient_accumulation": 4, "clip_grad_norm": 0.1}
    tolerance, of_way = (1e-5, 1e-5) if precision == "32-true" else (5e-3, 0.02)
    with paramp.launch_from_torch(config) as context:
        engine = engine_of(two_layers(), criterion, make, plan={"0": "colwise", "1": "rowwise"})
        for call in range(7):
            engine.forward_backward(*own_part(context, X[call], Y[call]))
            result = engine.step() if call < 6 else None
            if call in (5, 6):
                result = engine.flush()
            if call in (3, 5, 6):
                results.append((result.loss, result.grad_norm))
                assert result.stepped
                empty = engine.flush()  # now the window is empty
                assert (empty.stepped, empty.overflow, empty.loss) == (False, False, None)
                assert empty.loss_scale == result.loss_scale
        assert engine.num_steps == 3
        assert results == [pytest.approx(pair, rel=tolerance) for pair in expected]
        assert_trained(engine.full_state_dict(), plain.state_dict(), two_layers().state_dict(), of_way=of_way)


@pytest.mark.parametrize("criterion", [F.mse_loss, sum_and_count])
@on_ranks(2)
def test_the_loss_of_an_own_loop_is_that_of_all_microbatches(world, criterion):
    """Windows of such losses alone, of some beside forward_backward, and of one that is flushed."""
    plain, results, expected = two_layers(), [], []
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    config = {"parallel": {"pipeline": {"size": 1, "microbatches": 4}}, "gradient_accumulation": 2}
    with paramp.launch_from_torch(config | {"clip_grad_norm": 0.5}) as context:
        engine = engine_of(two_layers(), criterion)
        for calls in ([0, 1], [2, -3], [-4, 5], [6]):
            reference.zero_grad()
            loss = sum(F.mse_loss(plain(X[abs(call)]), Y[abs(call)]) for call in calls) / len(calls)
            loss.backward()
            expected += [loss.item(), loss.item(), nn.utils.clip_grad_norm_(plain.parameters(), 0.5).item()]
            reference.step()
            for call in calls:
                x, y = own_part(context, X[abs(call)], Y[abs(call)])
                found = engine.forward_backward(x, y) if call < 0 else engine.backward(engine.criterion(engine(x), y))
                result = engine.step()
            result = result if len(calls) > 1 else engine.flush()
            results += [found.item(), result.loss, result.grad_norm]
        assert results == pytest.approx(expected, rel=1e-5)
        assert_trained(engine.full_state_dict(), plain.state_dict(), two_layers().state_dict(), atol=1e-6)


@on_ranks(2)
def test_flush_skips_on_every_rank_and_leaves_a_state_to_save(world):
    """An overflow of one rank in one of two calls; the next window has its whole length again."""
    x = torch.ones(4, 4)
    with paramp.launch_from_torch({"precision": "16-mixed", "gradient_accumulation": 3}):
        engine = engine_of(linear())
        before = copy.deepcopy(engine.full_state_dict())
        for call in range(2):
            train_step(engine, x * (torch.inf if world.rank == 1 and call == 0 else 1.0), x)
        with pytest.raises(paramp.CheckpointError, match="2 of 3 calls"):
            engine.save("anywhere")
        result = engine.flush()
        assert (result.stepped, result.overflow, result.loss_scale) == (False, True, 2.0**16)
        assert engine.scaler.get_scale() == 2.0**15
        assert all(torch.equal(value, before[name]) for name, value in engine.full_state_dict().items())
        engine.save(shared_folder() / "saved")
        assert [train_step(engine, x).stepped for _ in range(3)] == [False, False, True]
