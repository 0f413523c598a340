"""Models whose parameters FSDP2 shards, in forwards of unusual kinds, against a plain loop on the whole batch."""

import pytest
import torch
from pool import on_ranks
from reference import rank_slice
from torch import nn

import paramp

FSDP2 = {"data": {"shard": 2}}


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def batches(width, count=3):
    generator = torch.Generator().manual_seed(4)
    return [torch.randn(8, width, generator=generator) for _ in range(count)]


def plain_training(make, width):
    torch.manual_seed(1)
    model = make()
    optimizer = sgd(model.parameters())
    for x in batches(width):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), torch.ones(8, width)).backward()
        optimizer.step()
    return model.state_dict()


def follows(make, width=6, **parallel):
    """Three steps; the engine's model has the weights of the plain one."""
    with paramp.launch_from_torch({"parallel": FSDP2 | parallel}) as context:
        torch.manual_seed(1)
        engine, *_ = paramp.initialize(make(), sgd, nn.functional.mse_loss)
        for x in batches(width):
            own = rank_slice(x, context.dp.rank, context.dp.size)
            engine.forward_backward(own, torch.ones_like(own))
            assert engine.step().stepped
            engine.zero_grad()
        actual = engine.full_state_dict()
    for name, value in plain_training(make, width).items():
        torch.testing.assert_close(actual[name], value, atol=1e-6, rtol=1e-5, msg=lambda text, n=name: f"{n}: {text}")


class Block(nn.Module):
    def __init__(self, width=6, inner=5):
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class InPlace(nn.Module):
    """Blocks whose outputs it changes in place."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Transposing() for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
            x += 1
        return x


class Transposing(Block):
    """Its output is a view."""

    def forward(self, x):
        return super().forward(x).T.contiguous().T


@on_ranks(2)
def test_an_output_that_is_a_view_may_be_changed_in_place(world):
    follows(InPlace)


class Carrier:
    """Of a class that torch's hooks do not look into."""

    __slots__ = ("hidden",)

    def __init__(self, hidden):
        self.hidden = hidden


class Carrying(Transposing):
    def forward(self, carrier):
        return Carrier(super().forward(carrier.hidden))


class Carriers(nn.Module):
    """Blocks that pass objects, whose tensors are views that it changes in place."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Carrying() for _ in range(2))

    def forward(self, x):
        carrier = Carrier(x)
        for block in self.blocks:
            carrier = block(carrier)
            carrier.hidden += 1
        return carrier.hidden


class Beside(Carriers):
    """Blocks that also return a tensor that nothing uses."""

    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.register_forward_hook(lambda _, __, carrier: (carrier.hidden.sum(), carrier))

    def forward(self, x):
        carrier = Carrier(x)
        for block in self.blocks:
            _, carrier = block(carrier)
        return carrier.hidden


@pytest.mark.parametrize("model", [Carriers, Beside])
@on_ranks(2)
def test_a_block_may_return_an_object_of_any_class(world, model):
    """Without a hook on its tensors the backward reads parameters that were freed, and may end the process."""
    follows(model)


class Looked(nn.Module):
    """Rows of a table, whose gradients autograd makes sparse."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(5, 6, sparse=True)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        x = x + self.table((x[:, 0] > 0).long())
        for block in self.blocks:
            x = block(x)
        return x


@on_ranks(2)
def test_sparse_gradients_are_made_dense(world):
    follows(Looked)


class Twice(nn.Module):
    """Runs its first block before and after the second, and on an input without a gradient."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        first, second = self.blocks
        return first(second(first(x)))


@pytest.mark.parametrize("others", [{}, {"data": {"shard": 2, "reshard_after_forward": False}}])
@on_ranks(2)
def test_a_block_may_run_twice_in_a_forward(world, others):
    follows(Twice, **others)


class Sizes(nn.Module):
    """Parameters of 1 and 3 elements, which two ranks do not divide, and of none."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block(inner=inner) for inner in (1, 3))
        self.gain = nn.Parameter(torch.ones(1))
        self.nothing = nn.Parameter(torch.ones(0, 4))
        self.fixed = nn.Parameter(torch.tensor(2.0), requires_grad=False)

    def forward(self, x):
        for block in self.blocks:
            x = block(x) * self.gain
        return x * self.fixed + self.nothing.sum()


@on_ranks(2)
def test_shards_of_any_size_are_trained(world):
    follows(Sizes)


@on_ranks(2)
def test_a_trained_parameter_without_dims_is_refused_by_name(world):
    model = Sizes()
    model.fixed.requires_grad_(True)
    with (
        paramp.launch_from_torch({"parallel": FSDP2}),
        pytest.raises(paramp.ConfigError, match=r"'fixed' has no dims.*parallel.data.shard is 2"),
    ):
        paramp.initialize(model, sgd, nn.functional.mse_loss)


class Held(nn.Module):
    """The first and the last stage use a parameter of the model itself, and each has one of its own there."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.both, self.first, self.last = (nn.Parameter(torch.full((6,), value)) for value in (1.1, 0.9, 0.8))

    def forward(self, x):
        x = x * self.both * self.first
        for block in self.blocks:
            x = block(x)
        return x * self.last * self.both


@on_ranks(4)
def test_stages_of_one_rank_may_use_parameters_of_the_model_itself(world):
    """Rank 0 has the first and the third stage, or with three stages the first and the last."""
    interleaved = {"size": 2, "schedule": "interleaved-1f1b", "microbatches": 4}
    follows(Held, pipeline={"size": 2, "microbatches": 2})
    follows(Held, pipeline=interleaved)


class ReadsWeights(nn.Module):
    """Computes with the weights of a block without calling it."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        return self.blocks[1](self.blocks[0].up(x) @ self.blocks[0].up.weight)


@on_ranks(2)
def test_weights_of_a_block_that_is_not_called_are_an_error(world):
    with paramp.launch_from_torch({"parallel": FSDP2}):
        engine, *_ = paramp.initialize(ReadsWeights(), sgd, nn.functional.mse_loss)
        x = batches(6, 1)[0]
        with pytest.raises(RuntimeError, match="DTensor") as raised:
            engine.forward_backward(x, x)
        assert "gathered while it is called" in raised.value.__notes__[0]


def small_resnet():
    from paramp.models.resnet import ResNet, ResNetConfig

    torch.manual_seed(3)
    return ResNet(ResNetConfig(num_classes=4, depths=(2, 2), width=8, small_images=True))


def train_images(parallel):
    generator = torch.Generator().manual_seed(2)
    with paramp.launch_from_torch({"parallel": parallel, "precision": "O2"}) as context:
        engine, *_ = paramp.initialize(small_resnet(), sgd, nn.functional.cross_entropy)
        for _ in range(3):
            x, y = torch.randn(8, 3, 8, 8, generator=generator), torch.randint(0, 4, (8,), generator=generator)
            x, y = (rank_slice(value, context.dp.rank, context.dp.size) for value in (x, y))
            loss = engine.forward_backward(x, y)
            assert engine.step().stepped
            engine.zero_grad()
        return loss.item(), engine.full_state_dict()


@on_ranks(2)
def test_batch_norms_in_fp32_train_as_beside_whole_copies(world):
    """Each data rank normalizes its part of the batch, sharded or not."""
    expected_loss, expected = train_images({"data": 2})
    loss, actual = train_images(FSDP2)
    assert loss == pytest.approx(expected_loss, rel=1e-3)
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, atol=2e-3, rtol=2e-3, msg=lambda text, n=name: f"{n}: {text}")
