"""One model of more than three blocks a buffer, with the sizes that users have, against plain fp64.

Its gradients are known: those of ``(linear(x) * y).sum()`` are ``y x^T`` and ``y``, exact in half precision for the
numbers chosen here. The reference is torch's optimizer on whole fp64 tensors, with the norm, the clipping, the averages
and the changes of weights written out. Steps, averages, remainders, roundings, gathers and checkpoints of the package
go over the buffer in blocks; a mistake in any of them leaves elements far off.
"""

import math
from functools import partial

import pytest
import torch
from compiler import needs_compiler
from families import cases, family
from pool import World, run_on_ranks
from reference import local, whole
from small_engines import assert_same_tensors
from torch import nn

import paramp
from paramp.base import loop_block_sizes
from paramp.precision.stochastic_rounding import key_of, random_bits, rounded

pytestmark = [
    pytest.mark.real_sizes,
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning"),  # torch's import of Inductor
]

LR, CLIP, DECAY = 2.0**-6, 300.0, 0.75
STEPS, OVERFLOW, EDIT = range(5), 1, 3
OUT, IN = 1021, 1541
"""1,574,382 parameters: three blocks of 2**19 and a rest of no multiple of anything."""
FP16 = {"mode": "16-naive", "init_scale": 1024.0}
MODES = {
    "fp32": {"precision": "32-true"},
    "bf16-mixed": {"precision": "bf16-mixed"},
    "fp16": {"precision": FP16},
    "bf16": {"precision": "bf16-naive"},
    "fp16-remainder": {"precision": FP16, "masters": "remainder"},
    "bf16-remainder": {"precision": "bf16-naive", "masters": "remainder"},
    "bf16-state": {"precision": {"mode": "bf16-naive", "optimizer_state": "bf16"}},
    "exact": {"precision": "bf16-naive", "reproducible": True},
}


ADAMW = partial(torch.optim.AdamW, lr=LR, eps=1e-3, weight_decay=0.5)
OWN_STEP = partial(ADAMW, foreach=True)
"""Not in the fused kernels."""


def sample(step, rank=0, width=IN):
    """The input and the factors of the output of a data rank: quarters, whose products have 6 bits."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    x, y = (torch.randint(-7, 8, (1, size), generator=generator) / 4 for size in (width, OUT))
    return x, y


def gradients(step, ranks, width):
    """The mean over ``ranks`` data ranks, in fp64."""
    pairs = [sample(step, rank, width) for rank in range(ranks)]
    weight = sum(y.double().T @ x.double() for x, y in pairs) / ranks
    return {"weight": weight, "bias": sum(y.double()[0] for _, y in pairs) / ranks}


def loss(output, y):
    return (output.float() * y.float()).sum()


def model_of(width):
    torch.manual_seed(11)
    return nn.Linear(width, OUT)


class Reference:
    """The training in fp64, over whole tensors."""

    def __init__(self, width, ranks, make):
        self.width, self.ranks = width, ranks
        self.weights = {name: nn.Parameter(one.detach().double()) for name, one in model_of(width).named_parameters()}
        self.optimizer = make(self.weights.values())
        self.averages = {name: one.detach().clone() for name, one in self.weights.items()}

    @torch.no_grad()
    def step(self, step):
        """Returns the norm of the gradient."""
        found = gradients(step, self.ranks, self.width)
        norm = math.sqrt(sum(float(one.square().sum()) for one in found.values()))
        for name, one in found.items():
            self.weights[name].grad = one * min(1.0, CLIP / (norm + 1e-6))
        self.optimizer.step()
        for name, one in self.weights.items():
            self.averages[name] += (1 - DECAY) * (one - self.averages[name])
        return norm


def assert_close(found, expected, atol, rtol):
    assert found.keys() == expected.keys()
    for name, value in found.items():
        torch.testing.assert_close(value.double(), expected[name].detach(), atol=atol, rtol=rtol, msg=name)


def check_training(world, mode, make, parallel, folder, **config):
    """Train beside the reference: with a step that overflows in its last element, and a weight changed in place."""
    width = 2 * IN if parallel else IN  # each rank has three blocks
    # A state in bf16 has 8 bits.
    close = {"atol": LR / 20 if mode == "bf16-state" else 2e-6, "rtol": 1e-6}
    config |= MODES[mode] | {"clip_grad_norm": CLIP, "ema": {"decay": DECAY}, "parallel": parallel}
    with paramp.launch_from_torch(config):
        reference = Reference(width, world.size, make)
        engine, *_ = paramp.initialize(model_of(width), make, loss)
        assert 3 * loop_block_sizes.STEP_BLOCK["cpu"] < (IN + 1) * OUT
        for step in STEPS:
            if step == EDIT:
                with torch.no_grad():
                    engine.module.weight.mul_(0.5)
                halved = whole(engine.module.weight)
                if mode.endswith("remainder"):  # it belongs to any weight: followed to half a unit
                    followed = engine.full_state_dict()["weight"]
                    torch.testing.assert_close(followed, halved.float(), atol=1e-6, rtol=2.0**-8)
                    halved = followed
                reference.weights["weight"].data.copy_(halved)
            x, y = sample(step, world.rank, width)
            engine.forward_backward(x, y)
            if step == OVERFLOW:
                local(engine.module.bias.grad)[-1:] = math.inf
            result = engine.step()
            engine.zero_grad()
            assert result.stepped == (step != OVERFLOW)
            if result.stepped:
                assert result.grad_norm == pytest.approx(reference.step(step), rel=1e-9 if mode == "exact" else 1e-6)
            assert_close(engine.full_state_dict(), reference.weights, **close)
        assert_close(engine.ema.full_state_dict(), reference.averages, **close)
        assert engine.check_replicas() == []
        engine.save(folder)
        other, *_ = paramp.initialize(nn.Linear(width, OUT), make, loss)
        other.load(folder)
        for one, loaded in ((engine, other), (engine.ema, other.ema)):
            assert_same_tensors(loaded.full_state_dict(), one.full_state_dict())
        with engine.ema.applied():
            pass
        assert_close(engine.full_state_dict(), reference.weights, **close)


LAYOUTS = {"1": {}, "dp2": {}, "zero": {"zero": 1}, "fsdp2": {"data": {"shard": 2}}}
CELLS = [("1", mode, "fused") for mode in MODES] + [("1", mode, "own") for mode in ("fp32", "bf16", "fp16")]
CELLS += [("1", mode, "compiled") for mode in ("fp32", "fp16", "bf16-remainder", "fp16-remainder")]
CELLS += [(layout, mode, "fused") for layout in ("dp2", "zero", "fsdp2") for mode in ("fp16", "exact")]
CELLS += [("dp2", "bf16-remainder", "fused"), ("zero", "bf16-remainder", "fused")]
PART = {("1", "fp16", "fused"), ("1", "bf16-remainder", "fused"), ("1", "bf16", "own"), ("dp2", "fp16", "fused")}


def marked(layout, mode, way):
    return pytest.param(layout, mode, way, marks=[needs_compiler] if way == "compiled" else [])


@family
@pytest.mark.filterwarnings("ignore:compile.*run.* eagerly")  # the model, which is not tested here
@pytest.mark.parametrize(("layout", "mode", "way"), [marked(*cell) for cell in cases("blocks", CELLS, PART, 3)])
def test_weights_masters_and_averages_are_those_of_fp64_in_every_block(layout, mode, way, tmp_path):
    given = {"mode": mode, "make": OWN_STEP if way == "own" else ADAMW, "parallel": LAYOUTS[layout]}
    given |= {"folder": tmp_path / "saved", "compile": way == "compiled"}
    if layout == "1":
        check_training(World(0, 1, "cpu"), **given)
    else:
        run_on_ranks(2, __name__, "check_training", given)


RATE = {"bf16-true": 2.0**-14, "16-true": 2.0**-17}
"""With which most gradients move weights by parts of a unit in their last place."""


@family
@pytest.mark.parametrize("mode", cases("stochastic blocks", ["bf16-true", "16-true"], ["bf16-true"], 1))
def test_stochastic_rounding_draws_for_each_element_of_every_block(mode):
    """Each weight is rounded by the bits of its index in the whole tensor. What is rounded is exact in fp32."""
    config = {"precision": mode, "rounding": "stochastic", "seed": 7}
    with paramp.launch_from_torch(config):
        engine, *_ = paramp.initialize(model_of(IN), lambda own: torch.optim.SGD(own, lr=RATE[mode]), loss)
        dtype = engine.precision.weights
        expected = {name: one.detach().to(dtype) for name, one in model_of(IN).named_parameters()}
        for step in range(2):
            x, y = sample(step)
            engine.forward_backward(x, y)
            assert engine.step().stepped
            engine.zero_grad()
            for name, gradient in gradients(step, 1, IN).items():
                before = expected[name]
                moved = (before.double() - RATE[mode] * gradient).float().view(-1)
                drawn = random_bits(torch.arange(len(moved)), key_of(7, name), torch.tensor(step))
                expected[name] = rounded(moved, drawn, dtype).view(before.shape)
                nearest = moved.to(dtype)
                assert 0.05 < float((expected[name].view(-1) != nearest).float().mean()) < 0.5
        for name, value in engine.full_state_dict().items():
            assert torch.equal(value, expected[name].float()), name
