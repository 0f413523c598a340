"""A value that is not finite, anywhere, in any one rank's gradient: every rank skips that step, and no other."""

import functools

import pytest
import torch
from families import family, offset, rarely
from pool import on_ranks
from reference import batches, local, small_gpt
from small_engines import engine_of, everywhere, own_part

import paramp

LAYOUTS = {
    "pp2-tp2": {"pipeline": 2, "tensor": 2},
    "pp2-tp2-sp": {"pipeline": 2, "tensor": 2, "sequence_parallel": True},
    "dp2-tp2": {"data": 2, "tensor": 2},
}
SCALE = 2.0**10
HOVERS = {"init_scale": SCALE, "growth_interval": 1, "growth_factor": 8.0}
"""Three overflows, then a good step after which the scale grows by as much."""
SCALED = {"16-mixed": HOVERS, "16-naive": HOVERS | {"hysteresis": 1}}
CASES = [*((layout, "16-mixed") for layout in LAYOUTS), ("pp2-tp2", "16-naive")]
CASES += [("pp2-tp2", mode) for mode in ("32-true", "bf16-mixed", "bf16-naive")]
SAMPLED = [(*case, offset("overflow", number, 7)) for number, case in enumerate(CASES)]
VALUES = float("inf"), float("-inf"), float("nan")


class Watched:
    """An engine whose steps change everything on this rank, or nothing at all."""

    def __init__(self, mode, model):
        self.engine = engine_of(model, model.loss, functools.partial(torch.optim.AdamW, lr=1e-3, eps=1e-4))
        self.scale, self.good, self.bad = (SCALE, 8.0, 0.5) if mode in SCALED else (1.0, 1.0, 1.0)
        self.own = dict(self.engine.named_parameters())

    def everything(self):
        """Copies of weights, masters and the optimizer's state."""
        optimizer = self.engine.optimizer
        tensors = [*self.own.values(), *(one for group in optimizer.param_groups for one in group["params"])]
        tensors += [value for state in optimizer.state.values() for value in state.values()]
        return [local(tensor).detach().clone() for tensor in tensors]

    def gradients(self):
        return {key: one.grad.clone() for key, one in self.own.items() if one.grad is not None}

    def step(self, case, gradients=None, *, is_good):
        """With ``gradients`` in place of those that are there, if given."""
        for key, gradient in (gradients or {}).items():
            self.own[key].grad = gradient
        before = self.everything()
        result = self.engine.step()
        assert (result.stepped, result.overflow, result.loss_scale) == (is_good, not is_good, self.scale), case
        after = self.everything()
        assert (len(after) == len(before) and all(map(torch.equal, after, before))) is not is_good, case
        self.scale *= self.good if is_good else self.bad
        assert self.engine.scaler.get_scale() == self.scale, case

    def assert_ranks_agree(self):
        assert everywhere(self.engine.scaler.state_dict()) == [self.engine.scaler.state_dict()] * 4
        assert self.engine.check_replicas() == []


def config(mode, parallel):
    return {"parallel": parallel, "precision": {"mode": mode} | SCALED.get(mode, {}), "clip_grad_norm": 1.0}


@family
@pytest.mark.parametrize(
    ("layout", "mode", "chosen"),
    rarely(SAMPLED, *(case for case in SAMPLED if case[:2] == ("pp2-tp2", "16-mixed")), SAMPLED[-1]),
    ids=map("-".join, CASES),
)
@on_ranks(4, cuda=True)
def test_one_bad_gradient_makes_all_ranks_skip_that_step_and_no_other(world, layout, mode, chosen):
    """In every parameter of every rank; ``make test`` takes every seventh, another in each case."""
    with paramp.launch_from_torch(config(mode, LAYOUTS[layout]), device=world.device) as context:
        # two blocks so that each stage has one; elsewhere one has every kind of parameter
        watched = Watched(mode, small_gpt(num_layers=2 if layout == "pp2-tp2" else 1))
        if context.is_first_stage and context.pp.size > 1:
            assert "embedding.tokens.weight" in watched.own  # tied to head.weight of the last stage
        names = everywhere(list(watched.own))
        x, y = own_part(context, *next(batches(1)))
        cases = [(rank, name) for rank in range(4) for name in names[rank]][chosen]
        for rank, name in cases:
            watched.engine.forward_backward(x, y)
            gradients = watched.gradients()
            for value in VALUES:
                planted = {key: gradient.clone() for key, gradient in gradients.items()}
                if world.rank == rank:
                    local(planted[name]).view(-1)[-1] = value
                watched.step((rank, name, value), planted, is_good=False)
            watched.step((rank, name), gradients, is_good=True)  # finite, if of another scale by now
            watched.engine.zero_grad()
        assert (watched.engine.num_skipped, watched.engine.num_steps) == (3 * len(cases), len(cases))
        watched.assert_ranks_agree()
