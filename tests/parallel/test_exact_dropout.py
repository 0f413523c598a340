"""Dropout masks depend on where an element is in the unsharded global batch, and on nothing of the layout."""

from contextlib import contextmanager, nullcontext

import pytest
import torch
import torch.nn.functional as F
from test_exact_functions import SIZES, Calls, Ranks, mode_for, part_of
from torch import nn
from torch.utils.checkpoint import checkpoint

from paramp.base.errors import ConfigError
from paramp.distributed.reproducible.place import Place
from paramp.distributed.rng import replicated_random, sharded_random
from paramp.parallel.reproducible.functions import ExactFunctions


def dropped(x, rank=0, size=1, function=F.dropout, context=nullcontext, name=0, **options):
    """``x`` after dropout in a module, and whether torch's default generator is as before."""
    model = nn.Sequential(Calls(), Calls())
    before = torch.get_rng_state()
    with mode_for(rank, size, model, **options), context():
        output = model[name](function, x)
    assert torch.equal(before, torch.get_rng_state())
    return output


LAYOUTS = {
    "features": ((2, 3, 16), 2, {"sharded_features": True}, nullcontext),
    "heads": ((2, 8, 3, 5), 1, {"sharded_features": True}, sharded_random),
    "sequence": ((2, 8, 5), 1, {"sequence_parallel": True}, sharded_random),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_rank_has_its_part_of_the_mask(layout):
    shape, dim, options, context = LAYOUTS[layout]
    x = torch.randn(shape)
    whole = dropped(x, context=context, **options)
    for size in SIZES:
        for rank in range(size):
            own = dropped(part_of(x, dim, rank, size), rank, size, context=context, **options)
            assert torch.equal(own, part_of(whole, dim, rank, size)), (size, rank)


def test_replicated_activations_have_one_mask():
    x = torch.randn(2, 8, 5)

    @contextmanager
    def replicated():
        with sharded_random(), replicated_random():
            yield

    whole = dropped(x)
    for context in (nullcontext, replicated):
        assert torch.equal(dropped(x, 1, 2, context=context), whole)
    sharded = dropped(x, 1, 2, context=sharded_random, sequence_parallel=True)
    assert not torch.equal(sharded, whole)


def test_a_samples_mask_does_not_depend_on_its_chunk():
    x = torch.ones(4, 50)
    whole = dropped(x, chunk=4, first_sample=8)
    for first in range(4):
        assert torch.equal(dropped(x[:1], chunk=1, first_sample=8 + first), whole[first : first + 1])


def test_masks_differ_between_samples_steps_calls_names_seeds_and_draws():
    x = torch.ones(2, 64)
    masks = [
        *dropped(x),
        *dropped(x, step=1),
        *dropped(x, call=1),
        *dropped(x, seed=2),
        *dropped(x, name=1),
        *dropped(x, first_sample=2),
        *dropped(x, function=lambda x: [F.dropout(x), F.dropout(x)][1]),
    ]
    assert len({tuple(mask.tolist()) for mask in masks}) == len(masks) == 14


def test_a_modules_forwards_in_a_chunk_draw_other_masks_and_the_next_chunk_begins_again():
    model, x = nn.Sequential(Calls()), torch.ones(2, 64)
    mode = mode_for(model=model)
    with mode:
        first, second = model[0](F.dropout, x), model[0](F.dropout, x)
        mode.begin_chunk()
        again = model[0](F.dropout, x)
    assert torch.equal(first, again)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_rate_and_the_scale_are_torchs(dtype):
    x = torch.randn(2, 50000).to(dtype).requires_grad_()
    output = dropped(x, function=nn.Dropout(0.3))
    kept = output != 0
    assert abs(kept.float().mean() - 0.7) < 0.006  # 4 standard deviations
    torch.testing.assert_close(output[kept], x[kept] / 0.7)
    (gradient,) = torch.autograd.grad(output.sum(), x)
    assert torch.equal(gradient != 0, kept)
    assert output.dtype is dtype
    torch.testing.assert_close(gradient[kept], torch.full_like(gradient[kept], 1 / 0.7))


def test_a_probability_of_1_and_0_and_dropout_in_place():
    x = torch.ones(2, 64)
    assert not dropped(x, function=lambda x: F.dropout(x, 1.0)).any()
    assert dropped(x, function=lambda x: F.dropout(x, 0.0)).all()
    assert torch.equal(dropped(x, function=nn.Dropout(0.5).eval()), x)
    with pytest.raises(ValueError, match="probability"):
        dropped(x, function=lambda x: torch.dropout(x, 1.5, True))
    expected, changed = dropped(x), x.clone()
    dropped(changed, function=nn.Dropout(0.5, inplace=True))
    assert torch.equal(changed, expected)
    assert not torch.equal(changed, x)


@pytest.mark.parametrize(("kind", "ndim"), [(nn.Dropout1d, 3), (nn.Dropout2d, 4), (nn.Dropout3d, 5)])
def test_dropout_of_channels(kind, ndim):
    output = dropped(torch.ones(2, 64, *[3] * (ndim - 2)), function=kind(0.5))
    channels = output.flatten(2)
    assert torch.equal(channels, channels[..., :1].expand_as(channels))
    assert set(output.unique().tolist()) == {0, 2}
    assert not torch.equal(channels[0], channels[1])


def test_attention_weights_are_dropped_at_the_rate():
    keys = torch.zeros(2, 4, 50, 50)
    value = torch.eye(50).expand(2, 4, -1, -1)  # the output is the weights
    output = dropped(keys, function=lambda keys: F.scaled_dot_product_attention(keys, keys, value, dropout_p=0.25))
    kept = output != 0
    assert abs(kept.float().mean() - 0.75) < 0.0125
    torch.testing.assert_close(output[kept], torch.full_like(output[kept], 1 / 50 / 0.75))
    assert len({tuple(map(tuple, head.tolist())) for head in kept.flatten(0, 1)}) == 8


@pytest.mark.parametrize(
    ("shape", "options", "context", "message"),
    [
        ((3, 8), {}, nullcontext, r"'0' got a tensor of the shape \(3, 8\), expected the 2 samples"),
        ((2, 8), {"sharded_features": True}, nullcontext, r"'0' got a tensor of the shape \(2, 8\) between sharded"),
        ((2, 3, 4, 8), {"sharded_features": True}, nullcontext, "sharded_random"),
        ((2, 3, 8), {"sequence_parallel": True}, nullcontext, "'0' may get a slice of the sequence"),
    ],
)
def test_tensors_whose_samples_or_shards_are_not_known_are_refused(shape, options, context, message):
    with pytest.raises(ConfigError, match=message):
        dropped(torch.ones(shape), 0, 2, context=context, **options)


def test_dropout_of_channels_between_sharded_layers_is_refused():
    with pytest.raises(ConfigError, match="whole channels in '0'"):
        dropped(torch.ones(2, 3, 4), 0, 2, function=nn.Dropout1d(0.5), sharded_features=True)


def test_dropout_outside_of_modules_is_refused():
    with mode_for(), pytest.raises(ConfigError, match="outside of the forward of a module"):
        F.dropout(torch.ones(2, 3))


class Block(nn.Module):
    """Draws masks itself and in a submodule."""

    def __init__(self):
        super().__init__()
        self.dropout = nn.Dropout(0.5)

    def forward(self, x):
        return self.dropout(F.dropout(F.silu(x), 0.25)) * F.dropout(x, 0.5)


class Checkpointed(nn.Module):
    """Two blocks, whose forwards paramp computes again, or one that runs twice."""

    def __init__(self, shared):
        super().__init__()
        block = Block()
        self.blocks = nn.ModuleList([block, block if shared else Block()])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("shared", [False, True])
def test_masks_are_the_same_when_a_forward_is_computed_again(shared):
    from paramp.parallel.activation_checkpointing import CheckpointedBlocks

    gradients = []
    for again in (False, True):
        x = torch.ones(2, 64).requires_grad_()
        model = Checkpointed(shared)
        place = Place(1, 2, 8, Ranks(0, 1))
        mode = ExactFunctions(place, {module: name for name, module in model.named_modules()})
        mode.watch(model)
        if again and not shared:
            CheckpointedBlocks(model, "full").apply([model])
        elif again:
            block, own = model.blocks[0], model.blocks[0].forward
            block.forward = lambda x, own=own: checkpoint(own, x, use_reentrant=False)
        with mode:
            output = model(x)
            if again and shared:
                with pytest.raises(ConfigError, match=r"'blocks.0' draws .* activation_checkpointing to 'none'"):
                    output.sum().backward()
                return
            output.sum().backward()
        gradients.append((output.detach(), x.grad))
    (output, gradient), (again_output, again_gradient) = gradients
    assert torch.equal(output, again_output)
    assert torch.equal(gradient, again_gradient)
    assert gradient.any()
