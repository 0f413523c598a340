"""Gradients of tensor-parallel parameters in a batch's graph, in which leaves stand for them, against one process."""

import pytest
import torch
import torch.nn.functional as F
from pool import on_ranks
from torch.utils._python_dispatch import TorchDispatchMode

import paramp
from paramp.models import GPT, GPTConfig

SHAPE = GPTConfig(num_layers=2, num_heads=2, width=8, max_seq_len=8, vocab_size=100, tied=False, init_std=0.5)
DOUBLED, ZEROED = "blocks.0.mlp.up.weight", "blocks.1.attention.out.weight"
BALANCED = "blocks.0.mlp.down.weight"


def gpt():
    torch.manual_seed(3)
    return GPT(SHAPE).double()


def zero_gradient(parameter):
    parameter.grad.zero_()


def with_hooks(model):
    model.get_parameter(DOUBLED).register_hook(lambda gradient: gradient * 2)
    model.get_parameter(ZEROED).register_post_accumulate_grad_hook(zero_gradient)
    return model


def batches():
    tokens = torch.randint(100, (3, 4, 9), generator=torch.Generator().manual_seed(4))
    return [(part[:, :-1], part[:, 1:]) for part in tokens]


def full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


class CountDTensors(TorchDispatchMode):
    """Counts operators that get DTensors, but views and detach, which only wrap."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        from torch.distributed.tensor import DTensor

        if DTensor in types and not any(name in str(func) for name in ("detach", "view", "alias")):
            self.found.append(str(func))
        return NotImplemented if DTensor in types else func(*args, **(kwargs or {}))


def engine_of(model, criterion):
    return paramp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), criterion)[0]


@pytest.mark.parametrize("hooked", [False, True])
@on_ranks(2)
def test_gradients_of_a_second_window_are_those_of_one_process(world, hooked):
    with paramp.launch_from_torch(
        {"parallel": {"tensor": 2}, "precision": "64-true", "gradient_accumulation": 2}, device="cpu"
    ):
        model, plain = gpt(), gpt()
        if hooked:
            with_hooks(model), with_hooks(plain)
        engine = engine_of(model, GPT.loss)
        parameters = dict(engine.named_parameters())
        first, *others = batches()
        engine.forward_backward(*first)
        engine.step()
        engine.flush()
        with torch.no_grad():
            for name, parameter in plain.named_parameters():
                parameter.copy_(full(parameters[name]))
        engine.zero_grad()
        for batch in others:
            with CountDTensors() as count:
                engine.forward_backward(*batch, return_loss=False)
            assert hooked or not count.found, count.found
            (GPT.loss(plain(batch[0]), batch[1]) / 2).backward()
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(full(parameters[name].grad), parameter.grad, atol=1e-13, rtol=1e-9, msg=name)


@on_ranks(2)
def test_a_criterion_may_ask_for_gradients_of_parameters_and_logits(world):
    """As where losses are balanced by the norms of their gradients."""

    def balanced(parameter):
        def criterion(logits, target):
            loss = GPT.loss(logits, target)
            other = F.cross_entropy(logits.view(-1, logits.shape[-1]), target.reshape(-1), label_smoothing=0.3)
            norms = [
                sum(
                    full(one).square().sum()
                    for one in torch.autograd.grad(value, [parameter(), logits], retain_graph=True)
                )
                for value in (loss, other)
            ]
            return loss * (norms[1] / norms[0]).sqrt() + other

        return criterion

    with paramp.launch_from_torch({"parallel": {"tensor": 2}, "precision": "64-true"}, device="cpu"):
        plain = gpt()
        engine = engine_of(gpt(), balanced(lambda: engine.module.get_parameter(BALANCED)))
        expected = balanced(lambda: plain.get_parameter(BALANCED))
        x, y = batches()[0]
        engine.forward_backward(x, y)  # finds gradients with other placements
        engine.step()
        engine.zero_grad()
        with torch.no_grad():
            for name, parameter in plain.named_parameters():
                parameter.copy_(full(engine.module.get_parameter(name)))
        engine.forward_backward(x, y)
        expected(plain(x), y).backward()
        for name, parameter in plain.named_parameters():
            gradient = full(engine.module.get_parameter(name).grad)
            torch.testing.assert_close(gradient, parameter.grad, atol=1e-13, rtol=1e-9, msg=name)


@on_ranks(2)
def test_autograd_grad_goes_through_an_engine_s_forward(world):
    with paramp.launch_from_torch({"parallel": {"tensor": 2}, "precision": "64-true"}, device="cpu"):
        plain, engine = gpt(), engine_of(gpt(), GPT.loss)
        for x, y in batches():
            engine.forward_backward(x, y)
            engine.step()
            engine.zero_grad()
        with torch.no_grad():
            for name, parameter in plain.named_parameters():
                parameter.copy_(full(engine.module.get_parameter(name)))
        x, y = batches()[0]
        names = [name for name, _ in plain.named_parameters()]
        found = torch.autograd.grad(
            engine.criterion(engine(x), y), [engine.module.get_parameter(name) for name in names]
        )
        expected = torch.autograd.grad(GPT.loss(plain(x), y), list(plain.parameters()))
        for name, one, other in zip(names, found, expected, strict=True):
            torch.testing.assert_close(full(one), other, atol=1e-13, rtol=1e-9, msg=name)


def doubled_late(logits, target):
    loss = GPT.loss(logits, target)
    logits.register_hook(lambda gradient: gradient * 2)
    return loss


def changed_under_a_view(logits, target):
    rows = logits.view(-1, logits.shape[-1])
    logits.div_(2)
    return F.cross_entropy(rows, target.reshape(-1))


def changed_through_a_view(logits, target):
    logits.flatten(0, 1).mul_(2)
    return F.cross_entropy(logits.transpose(1, 2), target)


@pytest.mark.parametrize("criterion", [doubled_late, changed_under_a_view, changed_through_a_view])
@on_ranks(2)
def test_a_criterion_that_changes_logits_after_they_were_used(world, criterion):
    """Gradients are those of one process, or there is an error."""
    with paramp.launch_from_torch({"parallel": {"tensor": 2}, "precision": "64-true"}, device="cpu"):
        plain, engine = gpt(), engine_of(gpt(), criterion)
        (x, y), *_ = batches()
        if criterion is not doubled_late:
            with pytest.raises(RuntimeError, match=r"changed in place .* logits = logits / 2"):
                engine.forward_backward(x, y)
            return
        engine.forward_backward(x, y)
        engine.zero_grad()
        engine.forward_backward(x, y)
        criterion(plain(x), y).backward()
        for name, parameter in plain.named_parameters():
            gradient = full(engine.module.get_parameter(name).grad)
            torch.testing.assert_close(gradient, parameter.grad, atol=1e-13, rtol=1e-9, msg=name)
