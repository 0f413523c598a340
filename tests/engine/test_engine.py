"""The engine's loop, accumulation, counts, evaluation and results, against plain torch."""

import pytest
import torch
import torch.nn.functional as F
from counting import Collectives
from pool import on_ranks
from reference import (
    assert_trained,
    batches,
    local,
    plain_fp32_training,
    rank_slice,
    small_gpt,
    steep_gpt,
)
from torch import nn

import paramp
from paramp.compat.colossalai.amp import AMP_TYPE

LAYOUTS = {
    "pp2-tp2": {"pipeline": 2, "tensor": 2},
    "dp2-tp2": {"data": 2, "tensor": 2},
    "pp2-dp2": {"pipeline": 2, "data": 2},
    "dp4": {"data": 4},
}


def engine_for(context, model=None, optimizer=None, criterion=paramp.models.GPT.loss, **kwargs):
    model = model or small_gpt()
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-3)
    return paramp.initialize(model, optimizer, criterion, **kwargs)


CLIP = 2.0
"""Some of the steps below are clipped, and some are not, so that a wrong size of the gradients is not clipped away."""


def sgd(parameters):
    """Its steps are as large as the gradients are, which Adam's are not."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def my_slice(context, *tensors):
    return tuple(rank_slice(tensor, context.dp.rank, context.dp.size) for tensor in tensors)


# --------------------------------------------------------------------------------------------------- one process


def test_the_optimizer_is_stepped_by_the_engine_only():
    """Its own step would take gradients that carry the loss scale, and make all weights NaN."""
    with paramp.launch_from_torch({"precision": "16-mixed"}):
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine, *_ = paramp.initialize(model, optimizer, torch.nn.functional.mse_loss)
        x = torch.randn(2, 4)
        engine.forward_backward(x, x)
        with pytest.raises(RuntimeError, match=r"call engine\.step\(\)"):
            optimizer.step()
        assert engine.step().stepped


def test_the_documents_loop_is_plain_torch():
    losses, weights = plain_fp32_training(10, clip=None)
    with paramp.launch_from_torch() as context:
        engine, loader, _, _ = engine_for(context, train_dataloader=list(batches(10)))
        engine.train()
        for (x, y), expected in zip(loader, losses, strict=True):
            engine.zero_grad()
            output = engine(x)
            loss = engine.criterion(output, y)
            assert engine.backward(loss).item() == pytest.approx(expected, abs=1e-6)
            assert engine.step().stepped
        assert_trained(engine.full_state_dict(), weights, small_gpt().state_dict(), atol=1e-6)


def cleared(parameter):
    return parameter.grad is None or not local(parameter.grad).any()


def test_gradients_of_a_past_step_never_leak_into_the_next():
    """zero_grad may be forgotten; and masters' and weights' gradients are cleared together."""
    for precision in ("32-true", {"mode": "16-naive", "init_scale": 1024.0}):
        results = []
        for forget in (False, True):
            with paramp.launch_from_torch({"precision": precision}) as context:
                engine, *_ = engine_for(context)
                for x, y in batches(4):
                    engine.forward_backward(x, y)
                    assert engine.step().stepped
                    if not forget:
                        engine.zero_grad()
                        assert all(cleared(parameter) for _, parameter in engine.named_parameters())
                        assert all(cleared(p) for group in engine.optimizer.param_groups for p in group["params"])
                results.append(engine.full_state_dict())
        assert all(torch.equal(value, results[1][name]) for name, value in results[0].items())


def test_gradients_are_unscaled_by_the_scale_of_their_backward():
    """Not by the scale after its growth, which would halve every growth step."""
    for growth in (1, 1000):
        fp16 = {"mode": AMP_TYPE.TORCH, "init_scale": 1024.0, "growth_interval": growth}
        with paramp.launch_from_torch({"fp16": fp16}) as context:
            engine, *_ = engine_for(context, optimizer=None)
            norms = []
            for x, y in batches(3):
                engine.forward_backward(x, y)
                norms.append(engine.step().grad_norm)
        if growth == 1:
            growing = norms
    assert growing == pytest.approx(norms, rel=2e-3)


def test_masters_come_from_the_original_weights():
    with paramp.launch_from_torch({"precision": "16-naive"}) as context:
        model = small_gpt()
        original = {name: value.clone() for name, value in model.state_dict().items()}
        engine, *_ = engine_for(context, model)
        assert all(parameter.dtype is torch.float16 for _, parameter in engine.named_parameters())
        assert all(torch.equal(value, original[name]) for name, value in engine.full_state_dict().items())


def test_param_groups_and_their_options_are_kept():
    with paramp.launch_from_torch({"precision": "16-naive"}) as context:
        model = small_gpt(tied=False)
        matrices = [p for p in model.parameters() if p.ndim > 1]
        vectors = [p for p in model.parameters() if p.ndim == 1]
        optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": 0.5}, {"params": vectors, "weight_decay": 0.0, "lr": 7.0}], lr=1e-3
        )
        engine, *_ = engine_for(context, model, optimizer)
        assert engine.optimizer is optimizer
        assert [len(group["params"]) for group in optimizer.param_groups] == [len(matrices), len(vectors)]
        assert [group["lr"] for group in optimizer.param_groups] == [1e-3, 7.0]
        assert all(p.dtype is torch.float32 for group in optimizer.param_groups for p in group["params"])


def test_callables_build_model_optimizer_and_scheduler():
    with paramp.launch_from_torch():
        engine, _, _, scheduler = paramp.initialize(
            small_gpt,
            lambda parameters: torch.optim.SGD(parameters, lr=1.0),
            paramp.models.GPT.loss,
            lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1),
        )
        engine.forward_backward(*next(batches(1)))
        engine.step()
        scheduler.step()
        assert scheduler.get_last_lr() == [pytest.approx(0.1)]


def test_the_scheduler_stands_still_while_the_optimizer_does():
    config = {"fp16": {"mode": AMP_TYPE.TORCH, "init_scale": 4.0}, "gradient_accumulation": 2}
    with paramp.launch_from_torch(config) as context:
        model = small_gpt()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        engine, _, _, scheduler = engine_for(context, model, optimizer, lr_scheduler=schedule)
        rates = []
        for index, (x, y) in enumerate(batches(6)):
            engine.forward_backward(x, y)
            if index == 2:
                next(engine.named_parameters())[1].grad[0, 0] = float("inf")
            engine.step()
            scheduler.step()
            rates.append(scheduler.get_last_lr()[0])
        # windows: steps, overflows, steps
        assert rates == [1.0, 0.5, 0.5, 0.5, 0.5, 0.25]


def test_num_zeros_are_counted_when_asked_for():
    with paramp.launch_from_torch({"fp16": {"mode": AMP_TYPE.NAIVE, "initial_scale": 1.0}}) as context:
        engine, *_ = engine_for(context)
        engine.forward_backward(*next(batches(1)))
        assert engine.step().num_zeros is None
    fp16 = {"mode": AMP_TYPE.NAIVE, "initial_scale": 2.0**10, "log_num_zeros_in_grad": True}
    with paramp.launch_from_torch({"fp16": fp16}) as context:
        engine, *_ = engine_for(context)
        engine.forward_backward(*next(batches(1)))
        expected = sum(int((parameter.grad == 0).sum()) for _, parameter in engine.named_parameters())
        assert expected > 0
        assert engine.step().num_zeros == expected


@on_ranks(2)
def test_zeros_of_replicated_gradients_are_counted_once(world):
    fp16 = {"mode": AMP_TYPE.NAIVE, "initial_scale": 2.0**10, "log_num_zeros_in_grad": True}
    with paramp.launch_from_torch({"fp16": fp16, "parallel": {"tensor": 2}}):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4), nn.Linear(4, 4))
        plan = {"1": "colwise", "2": "rowwise"}
        engine, *_ = paramp.initialize(model, torch.optim.SGD(model.parameters()), F.mse_loss, plan=plan)
        engine.forward_backward(torch.tensor([1, 5]), torch.ones(2, 4))
        assert engine.step().num_zeros == 6 * 4  # of the embeddings that were not used


def test_mistakes_are_named():
    with paramp.launch_from_torch() as context:
        model = small_gpt()
        with pytest.raises(paramp.ConfigError, match="not a parameter of the model"):
            paramp.initialize(model, torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=0.1))
        with pytest.raises(paramp.ConfigError, match="an optimizer for a model that is yet to be built"):
            paramp.initialize(small_gpt, torch.optim.SGD(model.parameters(), lr=0.1))
        used = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        x, y = next(batches(1))
        model.loss(model(x), y).backward()
        used.step()
        with pytest.raises(paramp.ConfigError, match="it has stepped already"):
            paramp.initialize(model, used)
        other = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(other, 1)
        with pytest.raises(paramp.ConfigError, match="steps another optimizer"):
            paramp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), lr_scheduler=schedule)
        engine, *_ = engine_for(context, criterion=None)
        with pytest.raises(ValueError, match="criterion: initialize got none"):
            engine.forward_backward(x, y)
        engine, *_ = engine_for(context)
        with pytest.raises(paramp.ConfigError, match=r"target: got shape \(4, 16\), expected 8 samples"):
            engine.forward_backward(x, y[:4])
    with pytest.raises(RuntimeError, match=r"call paramp\.launch_from_torch"):
        paramp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1))


# ----------------------------------------------------------------------------------------------- several ranks


@pytest.mark.parametrize("layout", LAYOUTS)
@on_ranks(4, cuda=True)
def test_accumulated_windows_are_one_large_batch(world, layout):
    """Three calls of four samples, and a scale that cannot be folded exactly (1/3), against the batch of twelve."""
    config = {"parallel": LAYOUTS[layout], "gradient_accumulation": 3, "clip_grad_norm": CLIP}
    with paramp.launch_from_torch(config, device=world.device) as context:
        reference, norms = steep_gpt(), []
        plain = sgd(reference.parameters())
        engine, *_ = engine_for(context, steep_gpt(), sgd)
        for x, y in batches(4, size=12):
            plain.zero_grad()
            expected = F.cross_entropy(reference(x).flatten(0, 1), y.flatten())
            expected.backward()
            norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), CLIP)
            plain.step()
            for call, (part, target) in enumerate(zip(x.chunk(3), y.chunk(3), strict=True)):
                engine.zero_grad()  # as a plain loop does; within the window it must not drop anything
                loss = engine.forward_backward(*my_slice(context, part, target))
                result = engine.step()
                assert result.stepped == (call == 2)
                assert not result.overflow
            assert loss.item() == pytest.approx(expected.item(), abs=1e-5)
            assert result.grad_norm == pytest.approx(norm.item(), rel=1e-5)
            norms.append(norm)
        assert min(norms) < CLIP < max(norms)
        assert_trained(engine.full_state_dict(), reference.state_dict(), steep_gpt().state_dict(), atol=2e-6)


@on_ranks(4, cuda=True)
def test_one_overflow_anywhere_in_a_window_skips_the_whole_window(world):
    config = {
        "parallel": LAYOUTS["pp2-dp2"],
        "fp16": {"mode": AMP_TYPE.TORCH, "init_scale": 8.0},
        "gradient_accumulation": 3,
    }
    with paramp.launch_from_torch(config, device=world.device) as context:
        engine, *_ = engine_for(context)
        before = engine.full_state_dict()
        for call, (x, y) in enumerate(batches(3)):
            engine.forward_backward(*my_slice(context, x, y))
            if call == 0 and world.rank == 3:
                next(engine.named_parameters())[1].grad.view(-1)[0] = float("nan")
            result = engine.step()
            assert (result.stepped, result.overflow) == (False, call == 2)
        assert engine.scaler.get_scale() == 4.0
        assert all(torch.equal(value, before[name]) for name, value in engine.full_state_dict().items())


def masked_sum_and_count(output, target):
    """Only tokens below a limit count: another number in every microbatch and on every rank."""
    losses = F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="none")
    mask = target.flatten() < 70
    return (losses * mask).sum(), mask.sum()


@pytest.mark.parametrize("layout", ["pp2-dp2", "dp4"])
@on_ranks(4, cuda=True)
def test_sums_and_counts_weigh_ranks_by_their_counts(world, layout):
    config = {"parallel": LAYOUTS[layout], "gradient_accumulation": 2, "clip_grad_norm": CLIP}
    with paramp.launch_from_torch(config, device=world.device) as context:
        reference, norms = steep_gpt(), []
        plain = sgd(reference.parameters())
        engine, *_ = engine_for(context, steep_gpt(), sgd, masked_sum_and_count)
        for x, y in batches(4, size=16):
            plain.zero_grad()
            total, count = masked_sum_and_count(reference(x), y)
            (total / count).backward()
            norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), CLIP)
            plain.step()
            for part, target in zip(x.chunk(2), y.chunk(2), strict=True):
                loss = engine.forward_backward(*my_slice(context, part, target))
                result = engine.step()
            assert loss.item() == pytest.approx((total / count).item(), abs=1e-5)
            assert result.grad_norm == pytest.approx(norm.item(), rel=1e-5)
            norms.append(norm)
        assert min(norms) < CLIP < max(norms)
        assert_trained(engine.full_state_dict(), reference.state_dict(), steep_gpt().state_dict(), atol=2e-6)
        x, y = next(batches(1, seed=9))
        total, count = masked_sum_and_count(reference(x), y)
        assert engine.evaluate(*my_slice(context, x, y)).item() == pytest.approx((total / count).item(), abs=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
@on_ranks(4, cuda=True)
def test_evaluation_is_the_loss_and_leaves_everything_as_it_was(world, layout):
    with paramp.launch_from_torch({"parallel": LAYOUTS[layout]}, device=world.device) as context:
        reference = small_gpt(dropout=0.5).eval()
        engine, *_ = engine_for(context, small_gpt(dropout=0.5))
        x, y = next(batches(1))
        engine.train()
        random_state = torch.get_rng_state()
        loss = engine.evaluate(*my_slice(context, x, y)).item()
        assert loss == pytest.approx(reference.loss(reference(x), y).item(), abs=1e-5)
        assert torch.equal(torch.get_rng_state(), random_state)
        assert engine.module.training
        assert all(cleared(parameter) for _, parameter in engine.named_parameters())
        with pytest.raises(RuntimeError, match="no backward since the last step"):
            engine.step()  # nothing of the evaluation counts in the window


@on_ranks(4, cuda=True)
def test_outputs_under_a_pipeline(world):
    with paramp.launch_from_torch({"parallel": LAYOUTS["pp2-tp2"]}, device=world.device) as context:
        engine, *_ = engine_for(context)
        x, y = next(batches(1))
        engine.train()
        with pytest.raises(RuntimeError, match=r"engine\.forward_backward"):
            engine(x)
        engine.eval()
        reference = small_gpt()
        torch.testing.assert_close(engine(x).cpu(), reference(x), atol=1e-5, rtol=0)
        engine.train()
        assert engine.forward_backward(x, y).item() == pytest.approx(reference.loss(reference(x), y).item(), abs=1e-5)


class Conditional(nn.Module):
    """Its second layer is used only for batches of positive sum."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.never = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        x = self.first(x)
        return self.second(x) if x.detach().sum() > -1e9 and self.use else x


@on_ranks(4)
def test_data_ranks_may_use_different_parameters(world):
    """A gradient that some data ranks lack counts as zero there; one that all lack is no gradient."""
    with paramp.launch_from_torch({"parallel": {"data": 4}}) as context:
        torch.manual_seed(0)
        model = Conditional()
        model.use = True
        reference = Conditional()
        reference.load_state_dict(model.state_dict())
        x, y = torch.randn(8, 4), torch.randn(8, 4)
        total = 0.0
        for rank in range(4):
            reference.use = rank == 2
            total = total + F.mse_loss(reference(rank_slice(x, rank, 4)), rank_slice(y, rank, 4)) / 4
        start = {name: value.clone() for name, value in reference.state_dict().items()}
        total.backward()
        torch.optim.SGD(reference.parameters(), lr=0.1, weight_decay=0.5).step()
        model.use = context.dp.rank == 2
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5)
        engine, *_ = engine_for(context, model, optimizer, F.mse_loss)
        engine.forward_backward(*my_slice(context, x, y))
        assert engine.step().stepped
        assert_trained(engine.full_state_dict(), reference.state_dict(), start, atol=1e-6, still="never")


@on_ranks(4)
def test_replicas_built_from_different_seeds_start_alike(world):
    with paramp.launch_from_torch({"parallel": LAYOUTS["dp2-tp2"]}) as context:
        engine, *_ = engine_for(context, small_gpt(seed=world.rank))
        expected = small_gpt(seed=0).state_dict()
        assert all(torch.equal(value, expected[name]) for name, value in engine.full_state_dict().items())


COLLECTIVES = {
    "pp2-tp2": ["the tied embedding", "control"],
    "pp2-tp2-sp": ["partial gradients of norms and biases", "the tied embedding", "control"],
    "dp2-tp2": ["data gradients", "control"],
    "pp2-dp2": ["the tied embedding", "data gradients", "control"],
}
"""Layout -> the all-reduces of a step, of which there is no other collective."""


@pytest.mark.real_sizes  # the number of buffers
@on_ranks(4)
def test_the_collectives_of_a_step_are_few(world):
    """One control all-reduce a step. Besides it: data gradients, tied embeddings and partial gradients, one each."""
    size = 9 + sum(1 for _ in small_gpt().parameters())  # which of them have gradients
    for layout, expected in COLLECTIVES.items():
        parallel = LAYOUTS[layout.removesuffix("-sp")] | {"sequence_parallel": layout.endswith("-sp")}
        with paramp.launch_from_torch({"parallel": parallel, "precision": "16-mixed"}) as context:
            engine, *_ = engine_for(context)
            x, y = my_slice(context, *next(batches(1)))
            for _ in range(2):
                engine.forward_backward(x, y, return_loss=False)
                with Collectives() as collectives:
                    engine.step()
                engine.zero_grad()
            assert collectives.counts == {"allreduce": len(expected)}, (layout, collectives.counts)
            assert collectives.elements.count(size) == 1, (layout, collectives.elements)
            assert collectives.elements[-1] == size


@on_ranks(2)
def test_the_loss_comes_with_the_step_too(world):
    for parallel in ({"data": 2}, {"pipeline": 2}):
        with paramp.launch_from_torch({"parallel": parallel, "gradient_accumulation": 2}) as context:
            engine, *_ = engine_for(context)
            for start in (0, 1):
                x, y = my_slice(context, *list(batches(2))[start])
                loss = engine.forward_backward(x, y)
                result = engine.step()
                assert (result.loss is None) == (start == 0)
            engine.zero_grad()
            assert result.loss == pytest.approx(loss.item(), rel=1e-6)
            assert "stepped=True" in repr(result)
            for returned in (False, True):
                with Collectives() as collectives:
                    loss = engine.forward_backward(x, y, return_loss=returned)
                assert (loss is not None) == returned
                assert collectives.counts["allreduce"] == returned


# ------------------------------------------------------------------------------------------------ mistakes, and edges


def test_two_backwards_before_a_step_add_up():
    with paramp.launch_from_torch():
        model = nn.Linear(1, 1, bias=False)
        start = model.weight.item()
        engine, *_ = paramp.initialize(model, torch.optim.SGD(model.parameters(), lr=1.0), lambda out, _: out.mean())
        for _ in range(2):
            engine.backward(engine.criterion(engine(torch.ones(1, 1)), torch.ones(1)))
        engine.step()
        assert engine.full_state_dict()["weight"].item() == pytest.approx(start - 2.0)


def test_evaluation_leaves_frozen_modules_frozen():
    with paramp.launch_from_torch():
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        model[1].eval()
        engine, *_ = paramp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), F.mse_loss)
        engine.evaluate(torch.ones(4, 3), torch.ones(4, 3))
        assert engine.module[0].training
        assert not engine.module[1].training


def test_optimizers_with_state_from_the_start():
    """Adagrad makes its state in the constructor."""

    def adagrad(parameters):
        return torch.optim.Adagrad(parameters, lr=0.1, initial_accumulator_value=0.1)

    model = steep_gpt()
    plain = adagrad(model.parameters())
    for x, y in batches(3):
        plain.zero_grad()
        model.loss(model(x), y).backward()
        plain.step()
    for precision, tolerance in (("32-true", {"atol": 1e-6}), ("bf16-naive", {"of_way": 0.1})):
        with paramp.launch_from_torch({"precision": precision}) as context:
            engine, *_ = engine_for(context, steep_gpt(), adagrad)
            for x, y in batches(3):
                engine.forward_backward(x, y)
                assert engine.step().stepped
            assert_trained(engine.full_state_dict(), model.state_dict(), steep_gpt().state_dict(), **tolerance)


@pytest.mark.parametrize(
    ("criterion", "message"),
    [
        (lambda out, y: 0.5, "got 0.5"),
        (lambda out, y: None, "got None"),
        (lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten(), reduction="none"), r"got \(128,\)"),
        (lambda out, y: {"loss": out.mean()}, "got {'loss'"),
    ],
)
def test_criteria_that_return_something_else(criterion, message):
    with paramp.launch_from_torch() as context:
        engine, *_ = engine_for(context, criterion=criterion)
        with pytest.raises(ValueError, match=f"criterion: expected a tensor of one element.*{message}"):
            engine.forward_backward(*next(batches(1)))


def test_criteria_that_are_modules_with_a_target_of_classes():
    with paramp.launch_from_torch({"precision": "bf16-mixed"}):
        model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(144, 10))
        criterion = nn.CrossEntropyLoss(weight=torch.ones(10), label_smoothing=0.1)
        engine, *_ = paramp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), criterion)
        x, y = torch.randn(8, 1, 8, 8), torch.arange(8)
        losses = []
        for _ in range(20):
            losses.append(engine.forward_backward(x, y).item())
            engine.step()
        assert losses[-1] < losses[0] - 0.5


@on_ranks(2)
def test_outputs_in_evaluation_are_whole(world):
    with paramp.launch_from_torch({"parallel": {"tensor": 2}}) as context:
        engine, *_ = engine_for(context)
        x, _ = next(batches(1))
        engine.eval()
        reference = small_gpt()
        with torch.no_grad():
            torch.testing.assert_close(engine(x), reference(x), atol=1e-5, rtol=0)


@on_ranks(2)
def test_shapes_that_do_not_shard_are_an_error_on_every_rank(world):
    with paramp.launch_from_torch({"parallel": {"tensor": 2}}):
        model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 4))
        with pytest.raises(paramp.ConfigError, match="'0' has out_features 5, expected a multiple of"):
            paramp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), plan={"0": "colwise", "1": "rowwise"})
    with paramp.launch_from_torch({"parallel": {"tensor": 2, "sequence_parallel": True}}) as context:
        engine, *_ = engine_for(context)
        x, y = next(batches(1, length=15))
        with pytest.raises(paramp.ConfigError, match="sequence of 15: expected a multiple of"):
            engine.forward_backward(x, y)
    with paramp.launch_from_torch({"parallel": {"pipeline": 2}}) as context:
        engine, *_ = engine_for(context)
        engine.eval()
        with pytest.raises(paramp.ConfigError, match="batch: got 3 samples on each data rank"):
            engine(torch.zeros(3, 4, dtype=torch.long))


@on_ranks(2)
def test_running_statistics_are_those_of_the_first_data_rank(world):
    import torch.distributed as dist

    with paramp.launch_from_torch({"parallel": {"data": 2}}):
        model = nn.BatchNorm1d(2)
        engine, *_ = paramp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), F.mse_loss)
        x = torch.full((4, 2), float(world.rank + 1))
        engine.forward_backward(x, x)
        state = engine.full_state_dict()
        assert state["running_mean"].tolist() == pytest.approx([0.1, 0.1])
        states = [None, None]
        dist.all_gather_object(states, {name: value.tolist() for name, value in state.items()})
        assert states[0] == states[1]


@on_ranks(2)
def test_algorithms_change_the_model_before_it_is_partitioned(world):
    class Wider:
        def apply(self, model, precision):
            assert precision.name == "32-true"
            model[1] = nn.Linear(3, 5)

    with paramp.launch_from_torch({"parallel": {"pipeline": 2}}):
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        engine, *_ = paramp.initialize(
            model, lambda parameters: torch.optim.SGD(parameters, lr=0.1), F.mse_loss, algorithms=[Wider()]
        )
        assert engine.full_state_dict()["1.weight"].shape == (5, 3)


def test_changes_of_the_scale_are_printed_when_verbose(capsys):
    fp16 = {"mode": AMP_TYPE.NAIVE, "initial_scale": 8.0, "hysteresis": 1, "verbose": True}
    with paramp.launch_from_torch({"fp16": fp16}) as context:
        engine, *_ = engine_for(context)
        engine.forward_backward(*next(batches(1)))
        next(engine.named_parameters())[1].grad[0, 0] = float("nan")
        engine.step()
    assert "loss scale changes from 8 to 4" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("criterion", "message"),
    [
        (lambda out, y: out.detach().mean(), "criterion: got a loss without a gradient"),
        (lambda out, y: (out.sum(), 3, 4), "criterion: expected a tensor of one element"),
        (5, "criterion: got 5, expected a function"),
    ],
)
def test_criteria_that_cannot_be_learned_from(criterion, message):
    def use(context):
        engine, *_ = engine_for(context, criterion=criterion)
        engine.forward_backward(*next(batches(1)))

    with paramp.launch_from_torch() as context, pytest.raises(ValueError, match=message):
        use(context)


@on_ranks(2)
def test_ranks_that_were_given_different_things_raise_on_every_rank(world):
    other = {"precision": "16-mixed"} if world.rank else {}
    with pytest.raises(paramp.ConfigError, match="precision: rank 0 has '32-true', but rank 1 has '16-mixed'"):
        paramp.launch_from_torch({"parallel": {"data": 2}, **other})
    for parallel in ({"data": 2}, {"pipeline": 2}, {"tensor": 2}):
        with paramp.launch_from_torch({"parallel": parallel}) as context:
            message = r"model: rank 0 has \('blocks.2.*but rank 1 has"
            with pytest.raises(paramp.ConfigError, match=message):
                engine_for(context, small_gpt(num_layers=3 - world.rank))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"optimizer": 5}, "optimizer: got 5"),
        ({"lr_scheduler": 5}, "lr_scheduler: got 5"),
        ({"plan": ["colwise"]}, "plan: got list"),
    ],
)
def test_arguments_of_the_wrong_kind(arguments, message):
    with paramp.launch_from_torch() as context, pytest.raises(paramp.ConfigError, match=message):
        engine_for(context, **arguments)


@on_ranks(4)
def test_a_criterion_that_fails_is_an_error_on_every_rank_of_a_pipeline(world):
    """Only the last stage calls it; the others would wait for its gradients."""
    x = torch.ones(4, 4)
    with paramp.launch_from_torch({"parallel": {"pipeline": 2, "data": 2}}) as context:
        calls = []

        def fragile(output, target):
            calls.append(output)
            if len(calls) > 4:
                raise RuntimeError("no more")
            return F.mse_loss(output, target)

        for criterion, message, good in (
            (nn.MSELoss(reduction="none"), r"expected a tensor of one element, .* got \(2, 4\)", 0),
            (lambda output, target: output.detach().mean(), "got a loss without a gradient", 0),
            (fragile, "criterion: it failed on the last stage: RuntimeError: no more", 2),
        ):
            model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
            engine, *_ = engine_for(context, model, criterion=criterion)
            for _ in range(good):
                engine.forward_backward(x, x)
                engine.step()
            with pytest.raises(ValueError, match=message):
                engine.forward_backward(x, x)
            if criterion is fragile:
                with pytest.raises(ValueError, match=message):
                    engine.evaluate(x, x)


@on_ranks(2)
def test_a_sequential_pipeline_takes_one_input_only(world):
    with paramp.launch_from_torch({"parallel": {"pipeline": 2}}) as context:
        engine, *_ = engine_for(context, nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
        engine.eval()
        x = torch.ones(2, 4)
        calls = (((x,), {"mask": None}, "argument 'mask'"), ((x, x), {}, "takes 2 pos"), ((), {}, "no tensor"))
        for args, kwargs, message in calls:
            with pytest.raises(paramp.ConfigError, match=message):
                engine(*args, **kwargs)
        assert engine(x).shape == (2, 4)


@pytest.mark.parametrize("precision", ["32-true", "16-naive"])
def test_a_parameter_that_was_frozen_is_not_left_behind_silently(precision):
    with paramp.launch_from_torch({"precision": precision}):
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        model[0].requires_grad_(False)
        engine, *_ = paramp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.nn.functional.mse_loss)
        engine.forward_backward(torch.ones(2, 4), torch.ones(2, 4))
        engine.step()
        engine.zero_grad()
        for parameter in engine.module[0].parameters():
            parameter.requires_grad_(True)
        engine.forward_backward(torch.ones(2, 4), torch.ones(2, 4))
        with pytest.raises(RuntimeError, match=r"'0\.weight' was frozen when the optimizer was set up"):
            engine.step()


def test_a_parametrized_layer_trains():
    with paramp.launch_from_torch({"precision": "16-mixed"}):
        model = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(4, 4))
        engine, *_ = paramp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.nn.functional.mse_loss)
        first = engine.forward_backward(torch.ones(2, 4), torch.ones(2, 4))
        engine.step()
        engine.zero_grad()
        assert engine.forward_backward(torch.ones(2, 4), torch.ones(2, 4)) < first


@pytest.mark.parametrize("algorithms", [None, "norms", [paramp.algorithms.LowPrecisionLayerNorm], [3]])
def test_what_is_no_list_of_algorithms(algorithms):
    with paramp.launch_from_torch({}):
        model = torch.nn.Linear(4, 4)
        with pytest.raises(paramp.ConfigError, match=r"algorithms: got .* expected a list of objects with apply"):
            paramp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), algorithms=algorithms)


def test_masters_follow_weights_that_are_loaded_into_a_module():
    with paramp.launch_from_torch({"precision": {"mode": "16-naive", "init_scale": 4.0}}):
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        engine, *_ = paramp.initialize(model, optimizer, torch.nn.functional.mse_loss)
        halves = {name: torch.full_like(value, 0.5) for name, value in engine.module[0].state_dict().items()}
        engine.module[0].load_state_dict(halves)
        engine.forward_backward(torch.ones(2, 4), torch.ones(2, 4))
        assert engine.step().stepped
        assert (engine.module[0].weight.float() - 0.5).abs().max() < 0.1


@on_ranks(2)
def test_an_engine_shows_its_model_and_layout(world):
    with paramp.launch_from_torch({"parallel": {"pipeline": 2}, "precision": "16-naive"}) as context:
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        model[1].weight = model[0].weight
        engine, *_ = paramp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.nn.functional.mse_loss)
        assert repr(engine) == "Engine(Sequential, 24 parameters, 16-naive, pp 2 x dp 1 x tp 1)"
        assert engine.config is context.config
        own = list(engine.parameters())
        assert [name for name, _ in engine.named_parameters()] == [f"{context.rank}.weight", f"{context.rank}.bias"]
        assert all(map(torch.equal, own, engine.module.parameters()))
        state = engine.state_dict()
        assert list(state) == ["0.weight", "0.bias", "1.weight", "1.bias"]
        assert all(torch.equal(state[name], value) for name, value in engine.full_state_dict().items())


@on_ranks(2)
def test_torchs_profiler_sees_stages_and_microbatches(world):
    from torch.profiler import ProfilerActivity, profile

    x = torch.ones(4, 4)
    for parallel in ({"pipeline": {"size": 2, "microbatches": 2}}, {"tensor": 2}):
        with paramp.launch_from_torch({"parallel": parallel}) as context:
            model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
            plan = {"0": "colwise", "1": "rowwise"} if context.tp.size > 1 else None
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            engine, *_ = paramp.initialize(model, optimizer, torch.nn.functional.mse_loss, plan=plan)
            with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:  # torch 2.11 warns without
                engine.forward_backward(x, x)
                engine.step()
                engine.evaluate(x, x)
                if context.tp.size > 1:
                    engine.backward(engine.criterion(engine(x), x))
            names = {event.key for event in profiler.key_averages() if event.key.startswith("paramp")}
            place, expected = context.pp.rank, {"paramp batch", "paramp step", "paramp evaluation"}
            for microbatch in range(2 // context.tp.size):
                kinds = ["forward", "backward"] + ["loss"] * context.is_last_stage
                expected |= {f"paramp {kind} (stage {place}, microbatch {microbatch})" for kind in kinds}
            assert names == expected | ({"paramp forward", "paramp backward"} if context.tp.size > 1 else set())
