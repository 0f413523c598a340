"""As :mod:`test_overflow`, with parameters that data ranks shard: in what one rank adds to the sum, and in the sum."""

import pytest
from families import family, offset, rarely
from pool import on_ranks
from reference import batches, local, small_gpt
from small_engines import everywhere, own_part
from test_overflow import VALUES, Watched, config

import paramp

LAYOUTS = {"fsdp2-tp2": {"data": {"shard": 2}, "tensor": 2}, "hsdp2x2": {"data": {"replicate": 2, "shard": 2}}}
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


ROWS = [(*case, offset("sharded overflow", number, 11)) for number, case in enumerate(CASES)]


@family
@pytest.mark.parametrize(("layout", "mode", "chosen"), rarely(ROWS, ROWS[1]), ids=map("-".join, CASES))
@on_ranks(4, cuda=True)
def test_one_bad_value_makes_all_ranks_skip_that_step_and_no_other(world, layout, mode, chosen):
    """In every parameter of every rank; ``make test`` takes every eleventh, another in each case."""
    with paramp.launch_from_torch(config(mode, LAYOUTS[layout]), device=world.device) as context:
        watched = Watched(mode, small_gpt(num_layers=1))
        engine, own = watched.engine, watched.own
        x, y = own_part(context, *next(batches(1)))
        engine.forward_backward(x, y)
        watched.step("first", is_good=True)  # the optimizer has state
        for rank, name in [(rank, name) for rank in range(4) for name in own][chosen]:
            for value in VALUES:  # in the summand
                undo = plant_in_summand(engine, name, value) if world.rank == rank else None
                engine.forward_backward(x, y)
                if undo is not None:
                    undo()
                watched.step((rank, name, value), is_good=False)
                engine.zero_grad()
            engine.forward_backward(x, y)
            gradients = watched.gradients()
            watched.step((rank, name), is_good=True)
            for value in VALUES:  # in the sum
                planted = {key: gradient.clone() for key, gradient in gradients.items()}
                is_here = world.rank == rank and local(own[name]).numel() > 0
                if is_here:
                    local(planted[name]).view(-1)[-1] = value
                watched.step((rank, name, value), planted, is_good=not any(everywhere(is_here)))
            watched.step((rank, name), gradients, is_good=True)
            engine.zero_grad()
        watched.assert_ranks_agree()
