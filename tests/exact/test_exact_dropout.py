"""Dropout masks depend on where an element is in the unsharded global batch, and on nothing of the layout."""

import functools
from contextlib import contextmanager, nullcontext

import pytest
import torch
import torch.nn.functional as F
from beside_plain import randn, seeded
from small_engines import assert_same_tensors, engine_of
from test_exact_function_mode import SIZES, Calls, mode_for, of_each_dtype, part_of
from torch import nn
from torch.utils.checkpoint import checkpoint

import paramp
from paramp.base.errors import ConfigError
from paramp.distributed.random_across_tensor_ranks import replicated_random, sharded_random
from paramp.distributed.rng import derive_seed


def dropped(x, rank=0, size=1, function=F.dropout, context=nullcontext, name=0, **options):
    """``x`` after dropout in a module, which leaves torch's default generator as it was."""
    model = nn.Sequential(Calls(), Calls())
    before = torch.get_rng_state()
    with mode_for(rank, size, model, **options), context():
        output = model[name](function, x)
    assert torch.equal(before, torch.get_rng_state())
    return output


@contextmanager
def replicated():
    with sharded_random(), replicated_random():
        yield


LAYOUTS = {
    "features": ((2, 3, 16), 2, {"fused": 1}, nullcontext),
    "heads": ((2, 8, 3, 5), 1, {"fused": 1}, sharded_random),
    "sequence": ((2, 8, 5), 1, {"sequence_parallel": True}, sharded_random),
    "replicated": ((2, 8, 5), None, {}, nullcontext),
    "replicated in sharded random": ((2, 8, 5), None, {}, replicated),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_rank_has_its_part_of_the_mask(layout):
    shape, dim, options, context = LAYOUTS[layout]
    x = torch.randn(shape)
    whole = dropped(x, context=context, **options)
    for size in SIZES:
        for rank in range(size):
            own, expected = ((one if dim is None else part_of(one, dim, rank, size)) for one in (x, whole))
            assert torch.equal(dropped(own, rank, size, context=context, **options), expected), (size, rank)


def test_a_samples_mask_does_not_depend_on_its_chunk():
    x = torch.ones(4, 50)
    whole = dropped(x, microchunk=4, first_sample=8)
    for first in range(4):
        assert torch.equal(dropped(x[:1], microchunk=1, first_sample=8 + first), whole[first : first + 1])


def test_masks_differ_between_samples_steps_calls_names_seeds_draws_and_slices_of_the_sequence():
    x = torch.ones(2, 8, 64)
    others = ({"step": 1}, {"call": 1}, {"seed": 2}, {"name": 1}, {"first_sample": 2})
    outputs = [dropped(x), *(dropped(x, **options) for options in others)]
    outputs.append(dropped(x, function=lambda x: [F.dropout(x), F.dropout(x)][1]))
    outputs.append(dropped(x, 1, 2, context=sharded_random, sequence_parallel=True))
    masks = {tuple(sample.flatten().tolist()) for output in outputs for sample in output}
    assert len(masks) == 2 * len(outputs) == 16


def test_a_mask_is_drawn_from_the_seed_of_its_place():
    """A run that another version resumes goes on with its masks: forwards, draws and samples are counted from 0."""
    model = nn.Sequential(Calls())
    with mode_for(model=model, step=5, call=1, first_sample=2):
        outputs = [model[0](F.dropout, torch.ones(2, 64)) for _ in range(3)]
    for forward, output in enumerate(outputs):
        for sample, values in enumerate(output, 2):
            generator = torch.Generator().manual_seed(derive_seed(1, 5, 1, "0", forward, 0, sample))
            assert torch.equal(values, 2.0 * (torch.rand(64, generator=generator) >= 0.5)), (forward, sample)


class Records(nn.Linear):
    def forward(self, x):
        self.seen = x
        return super().forward(x)


def test_a_second_engine_has_masks_of_its_own():
    with paramp.launch_from_torch({"reproducible": True, "seed": 5}):
        engines = [engine_of(nn.Sequential(nn.Dropout(0.5), Records(64, 64))) for _ in range(2)]
        for engine in engines:
            engine.forward_backward(torch.ones(1, 64), torch.ones(1, 64))
    first, second = (engine.module[1].seen for engine in engines)
    generator = torch.Generator().manual_seed(derive_seed(5, 0, 0, "0", 0, 0, 0))
    assert torch.equal(first, 2.0 * (torch.rand(1, 64, generator=generator) >= 0.5))
    assert not torch.equal(first, second)


@of_each_dtype
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


SHARDED = {"fused": 1}


def attention(x):
    return F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)


@pytest.mark.parametrize(
    ("shape", "function", "options", "error", "message"),
    [
        ((3, 8), F.dropout, {}, ConfigError, r"'0' got a tensor of the shape \(3, 8\), expected the 2 samples"),
        ((2, 8), F.dropout, SHARDED, ConfigError, r"'0' got a tensor of the shape \(2, 8\) between sharded"),
        ((2, 3, 4, 8), F.dropout, SHARDED, ConfigError, "sharded_random"),
        ((2, 3, 8), F.dropout, {"sequence_parallel": True}, ConfigError, "'0' may get a slice of the sequence"),
        ((2, 3, 4), nn.Dropout1d(0.5), SHARDED, ConfigError, "whole channels in '0'"),
        ((2, 64), lambda x: torch.dropout(x, 1.5, True), {}, ValueError, "probability"),
        ((3, 2, 4, 8), attention, SHARDED, ConfigError, r"'0' got a tensor of the shape \(3, 2, 4, 8\), expected"),
    ],
)
def test_tensors_whose_samples_or_shards_are_not_known_are_refused(shape, function, options, error, message):
    with pytest.raises(error, match=message):
        dropped(torch.ones(shape), 0, 2, function, **options)


def test_dropout_outside_of_modules_is_refused():
    with mode_for(), pytest.raises(ConfigError, match="outside of the forward of a module"):
        F.dropout(torch.ones(2, 3))


@pytest.mark.parametrize("divided", [[], ["0"]])
def test_dropout_that_several_stages_have_is_refused(divided):
    model = nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5))
    refused = pytest.raises(ConfigError, match="'0' draws dropout masks, and several") if divided else nullcontext()
    with mode_for(model=model, divided=divided), refused:
        model(torch.ones(2, 3))


def test_a_module_that_runs_twice_and_is_computed_again_is_refused():
    layer = nn.Dropout(0.5)
    model, x = nn.Sequential(layer, layer), torch.ones(2, 64).requires_grad_()
    mode = mode_for(model=model)
    layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
    with pytest.raises(ConfigError, match=r"'0' draws .* activation_checkpointing to 'none'"), mode:
        model(x).sum().backward()


class Skippable(nn.Module):
    """Two blocks with one dropout, the first of which may be left out."""

    def __init__(self):
        super().__init__()
        dropout = nn.Dropout(0.5)
        self.blocks, self.first = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), dropout) for _ in range(2)), 0

    def forward(self, x):
        for block in self.blocks[self.first :]:
            x = block(x)
        return x


def test_what_is_computed_again_has_the_masks_of_its_own_forward():
    """The dropout's first mask in a step is the second block's, where the first one is left out."""

    def trained(how):
        with paramp.launch_from_torch({"reproducible": True, "activation_checkpointing": how}):
            engine = engine_of(seeded(Skippable))
            for first in (0, 1):
                engine.module.first = first
                engine.forward_backward(randn(4, 8), randn(4, 8, seed=3))
                engine.step()
            return engine.full_state_dict()

    assert_same_tensors(trained("full"), trained("none"))
