"""A value that is not finite, anywhere, in any one rank's gradient: every rank skips that step, and no other."""

import pytest
import torch
import torch.distributed as dist
from families import family, offset
from pool import on_ranks
from reference import batches, local, rank_slice, small_gpt
from small_engines import everywhere
from torch.distributed.tensor import DTensor, Replicate

import paramp
from paramp.compat.colossalai.amp import AMP_TYPE

LAYOUTS = {
    "pp2-tp2": {"pipeline": 2, "tensor": 2},
    "pp2-tp2-sp": {"pipeline": 2, "tensor": 2, "sequence_parallel": True},
    "dp2-tp2": {"data": 2, "tensor": 2},
}
MODES = {
    # Three overflows, then a good step after which the scale grows by as much: it hovers.
    "mixed": {"mode": AMP_TYPE.TORCH, "init_scale": 2.0**10, "growth_interval": 1, "growth_factor": 8.0},
    "naive": {
        "mode": AMP_TYPE.NAIVE,
        "initial_scale": 2.0**10,
        "growth_interval": 1,
        "growth_factor": 8.0,
        "hysteresis": 1,
    },
}


CASES = [*((layout, "mixed") for layout in LAYOUTS), ("pp2-tp2", "naive")]


@family
@pytest.mark.parametrize(
    ("layout", "mode", "chosen"),
    [(*case, offset("overflow", number, 7)) for number, case in enumerate(CASES)],
    ids=map("-".join, CASES),
)
@on_ranks(4, cuda=True)
def test_one_bad_gradient_makes_all_ranks_skip_that_step_and_no_other(world, layout, mode, chosen):
    """In every parameter of every rank; ``make test`` takes every seventh, another in each case."""
    config = {"parallel": LAYOUTS[layout], "fp16": MODES[mode], "clip_grad_norm": 1.0}
    with paramp.launch_from_torch(config, device=world.device) as context:
        # two blocks so that each stage has one; elsewhere one has every kind of parameter
        model = small_gpt(num_layers=2 if layout == "pp2-tp2" else 1)
        engine, *_ = paramp.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4), model.loss)
        own = dict(engine.named_parameters())
        if context.is_first_stage and context.pp.size > 1:
            assert "embedding.tokens.weight" in own  # tied to head.weight of the last stage
        names = everywhere(list(own))
        x, y = (rank_slice(t, context.dp.rank, context.dp.size) for t in next(batches(1)))
        values = (float("inf"), float("-inf"), float("nan"))
        scale = 2.0**10
        cases = [(rank, name) for rank in range(4) for name in names[rank]][chosen]
        for rank, name in cases:
            engine.forward_backward(x, y)
            gradients = {key: parameter.grad.clone() for key, parameter in own.items() if parameter.grad is not None}
            before = [local(parameter).detach().clone() for parameter in own.values()]
            for value in values:
                for key, gradient in gradients.items():
                    own[key].grad = gradient.clone()
                if world.rank == rank:
                    local(own[name].grad).view(-1)[-1] = value
                result = engine.step()
                assert (result.stepped, result.overflow, result.loss_scale) == (False, True, scale), (rank, name, value)
                for parameter, old in zip(own.values(), before, strict=True):
                    assert torch.equal(local(parameter), old), (rank, name, value)
                scale /= 2
                assert engine.scaler.get_scale() == scale
            for key, gradient in gradients.items():
                own[key].grad = gradient  # finite, if of another scale by now
            result = engine.step()
            assert (result.stepped, result.overflow, result.loss_scale) == (True, False, scale), (rank, name)
            engine.zero_grad()
            scale *= 8
        assert (engine.num_skipped, engine.num_steps) == (3 * len(cases), len(cases))
        assert everywhere(engine.scaler.state_dict()) == [engine.scaler.state_dict()] * 4
        for name, parameter in own.items():
            if not isinstance(parameter, DTensor) or Replicate() in parameter.placements:
                copies = [torch.empty_like(local(parameter)) for _ in range(context.tp.size)]
                dist.all_gather(copies, local(parameter).detach().contiguous(), group=context.tp.group)
                assert all(torch.equal(copy, copies[0]) for copy in copies), name
        for tie in context.ties:
            copies = [torch.empty_like(local(tie.parameter)) for _ in range(2)]
            dist.all_gather(copies, local(tie.parameter).detach().contiguous(), group=tie.group)
            assert torch.equal(*copies)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-naive"])
@on_ranks(4, cuda=True)
def test_modes_that_do_not_scale_skip_as_well(world, precision):
    with paramp.launch_from_torch({"parallel": LAYOUTS["pp2-tp2"], "precision": precision}, device=world.device):
        model = small_gpt(num_layers=2)
        engine, *_ = paramp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), model.loss)
        before = engine.full_state_dict()
        engine.forward_backward(*next(batches(1)))
        if world.rank == 2:
            local(next(engine.named_parameters())[1].grad).view(-1)[0] = float("nan")
        result = engine.step()
        assert (result.stepped, result.overflow, result.loss_scale) == (False, True, 1.0)
        assert all(torch.equal(value, before[name]) for name, value in engine.full_state_dict().items())


@on_ranks(4, cuda=True)
def test_a_real_overflow_in_the_backward_finds_a_scale_that_works(world):
    """Nothing is planted: from 2**32 the first steps overflow by themselves, and then training goes on."""
    config = {"parallel": LAYOUTS["pp2-tp2"], "fp16": {"mode": AMP_TYPE.NAIVE}}
    with paramp.launch_from_torch(config, device=world.device):
        model = small_gpt(num_layers=2)
        engine, *_ = paramp.initialize(model, torch.optim.AdamW(model.parameters(), lr=3e-3), model.loss)
        x, y = next(batches(1))
        first = None
        for _ in range(26):
            loss = engine.forward_backward(x, y).item()
            result = engine.step()
            engine.zero_grad()
            first = first or loss
        assert result.stepped
        assert engine.num_skipped >= 8  # hysteresis tolerates the first
        assert engine.scaler.get_scale() < 2.0**32
        assert loss < first - 0.5
