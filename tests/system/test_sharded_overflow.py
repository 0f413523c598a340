"""As :mod:`test_overflow`, with parameters that data ranks shard: in what one rank adds to the sum, and in the sum."""

import pytest
import torch
from families import family, offset
from pool import on_ranks
from reference import batches, local, rank_slice, small_gpt
from small_engines import everywhere

import paramp

LAYOUTS = {"fsdp2-tp2": {"data": {"shard": 2}, "tensor": 2}, "hsdp2x2": {"data": {"replicate": 2, "shard": 2}}}
VALUES = float("inf"), float("-inf"), float("nan")
SCALE = 2.0**10
MODES = {
    # Three overflows, then a good step after which the scale grows by as much.
    "16-mixed": {"mode": "16-mixed", "init_scale": SCALE, "growth_interval": 1, "growth_factor": 8.0},
    "16-naive": {"mode": "16-naive", "init_scale": SCALE, "growth_interval": 1, "growth_factor": 8.0, "hysteresis": 1},
}
CASES = [("fsdp2-tp2", "16-mixed"), ("hsdp2x2", "16-naive")]


def plant_in_summand(engine, name, value):
    """Let the gradient that this rank computes of the parameter ``name`` end in ``value``, in the next batch."""
    owner, _, leaf = name.rpartition(".")
    module = engine.module.get_submodule(owner)

    def spoil(gradient):
        gradient = gradient.clone()
        local(gradient).view(-1)[-1] = value
        return gradient

    def before(module, inputs):  # the module has the gathered parameter now
        handle.remove()
        hooks.append(getattr(module, leaf).register_hook(spoil))

    hooks = []
    handle = module.register_forward_pre_hook(before)
    return lambda: hooks.pop().remove()


def everything(engine):
    """Copies of all that a step changes on this rank."""
    states = [state for one in engine._weights.by_optimizer for state in one.optimizer.state.values()]
    tensors = [local(parameter) for parameter in engine.parameters()]
    tensors += [value for state in states for value in state.values()]
    tensors += [one for buffer in engine._weights.buffers for one in buffer.masters.state]
    return [tensor.detach().clone() for tensor in tensors]


@family
@pytest.mark.parametrize(
    ("layout", "mode", "chosen"),
    [(*case, offset("sharded overflow", number, 11)) for number, case in enumerate(CASES)],
    ids=map("-".join, CASES),
)
@on_ranks(4, cuda=True)
def test_one_bad_value_makes_all_ranks_skip_that_step_and_no_other(world, layout, mode, chosen):
    """In every parameter of every rank; ``make test`` takes every seventh, another in each case."""
    config = {"parallel": LAYOUTS[layout], "precision": MODES[mode], "clip_grad_norm": 1.0}
    with paramp.launch_from_torch(config, device=world.device) as context:
        model = small_gpt(num_layers=1)
        engine, *_ = paramp.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4), model.loss)
        own = dict(engine.named_parameters())
        axis = context.batch_axis
        x, y = (rank_slice(t, axis.rank, axis.size) for t in next(batches(1)))
        engine.forward_backward(x, y)
        assert engine.step().stepped  # the optimizer has state
        scale = SCALE * 8
        cases = [(rank, name) for rank in range(4) for name in own][chosen]

        def step(case, *, is_good):
            nonlocal scale
            before = everything(engine)
            result = engine.step()
            assert (result.stepped, result.overflow, result.loss_scale) == (is_good, not is_good, scale), case
            assert all(map(torch.equal, everything(engine), before)) is not is_good, case
            scale *= 8 if is_good else 0.5
            assert engine.scaler.get_scale() == scale

        for rank, name in cases:
            for value in VALUES:  # in the summand
                undo = plant_in_summand(engine, name, value) if world.rank == rank else None
                engine.forward_backward(x, y)
                if undo is not None:
                    undo()
                step((rank, name, value), is_good=False)
                engine.zero_grad()
            engine.forward_backward(x, y)
            gradients = {key: parameter.grad.clone() for key, parameter in own.items()}
            step((rank, name), is_good=True)
            for value in VALUES:  # in the sum
                for key, gradient in gradients.items():
                    own[key].grad = gradient.clone()
                if world.rank == rank and local(own[name]).numel():
                    local(own[name].grad).view(-1)[-1] = value
                has_it = any(everywhere(world.rank == rank and local(own[name]).numel() > 0))
                step((rank, name, value), is_good=not has_it)
            for key, gradient in gradients.items():
                own[key].grad = gradient
            step((rank, name), is_good=True)
            engine.zero_grad()
            assert scale == SCALE * 8
        assert everywhere(engine.scaler.state_dict()) == [engine.scaler.state_dict()] * 4
        assert engine.check_replicas() == []
