"""Cross-entropy over a sharded vocabulary, against torch's on whole logits."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from pool import on_ranks

import paramp
from paramp.parallel.tensor.loss import vocab_parallel_loss


@on_ranks(2)
def test_labels_are_smoothed_as_torch_does(world):
    from torch.distributed.tensor import Shard, distribute_tensor

    torch.manual_seed(3)
    with paramp.launch_from_torch({"parallel": {"tensor": 2}}) as context:
        mesh = context.mesh["tp"]
        for shape, weighted, reduction in itertools.product(
            [(6, 8), (6, 7), (2, 7, 3)], [False, True], ["mean", "sum", "none"]
        ):
            logits = torch.randn(shape, dtype=torch.float64, requires_grad=True)
            target = torch.randint(shape[1], (shape[0], *shape[2:]))
            target[0] = -100
            weight = torch.rand(shape[1], dtype=torch.float64) if weighted else None
            options = {"weight": weight, "reduction": reduction, "label_smoothing": 0.2}
            expected = F.cross_entropy(logits, target, **options)
            factor = torch.rand(expected.shape, dtype=torch.float64)
            (expected * factor).sum().backward()
            shards = distribute_tensor(logits.detach(), mesh, [Shard(1)]).requires_grad_()
            with vocab_parallel_loss():
                loss = F.cross_entropy(shards, target, **options)
                (loss * factor).sum().backward()
            torch.testing.assert_close(loss, expected, atol=1e-12, rtol=0)
            torch.testing.assert_close(shards.grad.full_tensor(), logits.grad, atol=1e-12, rtol=0)
        with vocab_parallel_loss():
            half = F.cross_entropy(shards.detach().half(), target)
            torch.testing.assert_close(half, F.cross_entropy(logits.detach().half().float(), target))
            with pytest.warns(UserWarning, match="size_average"):
                summed = F.cross_entropy(shards, target, size_average=False)
            torch.testing.assert_close(summed, F.cross_entropy(logits, target, reduction="sum"), atol=1e-12, rtol=0)
            for wrong in (shape[1], -1):
                with pytest.raises((IndexError, RuntimeError), match=f"index {wrong} is out of bounds"):
                    F.cross_entropy(shards, target.clamp(min=0) * 0 + wrong)
            shards = shards.detach()
            if world.rank == 1:
                shards.to_local()[0, 0, 0] = float("nan")
            assert F.cross_entropy(shards, target.clamp(min=0), reduction="none").isnan().sum() == 1
            with pytest.raises(paramp.ConfigError, match="got probabilities as target"):
                F.cross_entropy(shards, torch.rand(shape))


@on_ranks(2)
def test_losses_are_masked_and_added_to_others(world):
    from torch.distributed.tensor import Shard, distribute_tensor

    torch.manual_seed(3)
    target, mask = torch.tensor([0, 6, 3, 3]), torch.tensor([True, False, True, True])
    with paramp.launch_from_torch({"parallel": {"tensor": 2}}) as context:
        for smoothing in (0.0, 0.1):

            def criterion(logits):
                losses = F.cross_entropy(logits, target, reduction="none", label_smoothing=smoothing)  # noqa: B023
                mean = F.cross_entropy(logits, target)
                right = logits.max(-1).indices == target
                masked = (losses * (mask & ~right)).sum() / mask.sum() + logits.logsumexp(-1).square().mean()
                entropy = (F.softmax(logits, -1) * logits.log_softmax(-1)).sum(-1).mean()
                halved = F.nll_loss(F.log_softmax(logits, -1) / 2, target)
                return mean + masked + entropy + halved

            logits = torch.randn(4, 7, dtype=torch.float64, requires_grad=True)
            expected = criterion(logits)
            expected.backward()
            shards = distribute_tensor(logits.detach(), context.mesh["tp"], [Shard(1)]).requires_grad_()
            with vocab_parallel_loss():
                loss = criterion(shards)
                loss.backward()
            torch.testing.assert_close(loss, expected, atol=1e-12, rtol=0)
            torch.testing.assert_close(shards.grad.full_tensor(), logits.grad, atol=1e-12, rtol=0)


@on_ranks(2)
def test_a_criterion_smooths_labels_of_a_plan_that_keeps_logits_sharded(world):
    losses = []
    for tensor in (1, 2):
        with paramp.launch_from_torch({"parallel": {"tensor": tensor, "data": 2 // tensor}}):
            torch.manual_seed(3)
            model, criterion = (
                torch.nn.Sequential(torch.nn.Linear(4, 8)),
                torch.nn.CrossEntropyLoss(label_smoothing=0.1),
            )
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
            engine, *_ = paramp.initialize(model, optimizer, criterion, plan={"0": "vocab_logits"})
            for _ in range(2):
                losses.append(engine.forward_backward(torch.eye(4), torch.arange(4)).item())
                engine.step()
    assert losses[2:] == pytest.approx(losses[:2], abs=1e-6)


@on_ranks(2)
def test_a_loss_of_ones_own_has_the_gradients_of_one_process(world):
    """Outside of ``engine.criterion``, where no function of torch is another."""
    weights = []
    for tensor in (1, 2):
        with paramp.launch_from_torch({"parallel": {"tensor": tensor, "data": 2 // tensor}}):
            torch.manual_seed(3)
            model = torch.nn.Sequential(torch.nn.Linear(4, 8)).double()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
            engine, *_ = paramp.initialize(model, optimizer, plan={"0": "vocab_logits"})
            engine.backward(engine(torch.eye(4, dtype=torch.float64)).log_softmax(-1).square().mean())
            engine.step()
            weights.append(engine.full_state_dict())
    for name, value in weights[0].items():
        torch.testing.assert_close(weights[1][name], value, atol=1e-6, rtol=0)
