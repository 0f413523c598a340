"""Optimizers of whole matrices on the expert axis, against one process that has each expert as a 2-dim parameter."""

import pytest
import torch
from counting import Collectives
from families import cases, family
from lamb import Lamb, adafactor, lamb
from layouts import layouts
from pages import blocks
from pool import on_ranks, shared_folder
from reference import assert_trained, local
from small_engines import engine_of, own_part
from small_mixture import NUM_EXPERTS, PLAN, WIDTH, layers, tokens
from torch import nn
from torch.nn import functional as F

import paramp

STEPS = 2
"""Of Muon's iteration, whose products in bf16 are slow on CPUs: a trial of the optimizer makes thousands."""


class_of_the_page = {}
exec(next(block for block in blocks("docs/step.md", "python") if "class StackedMuon" in block), class_of_the_page)


class StackedMuon(class_of_the_page["StackedMuon"]):
    """Of so few steps."""

    def __init__(self, params, lr):
        super().__init__(params, lr)
        for options in (self.defaults, *self.param_groups):
            options["ns_steps"] = STEPS


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="the page says it of torch 2.13")
def test_torchs_muon_takes_no_stacks():
    with pytest.raises(ValueError, match="2D"):
        torch.optim.Muon([nn.Parameter(torch.ones(2, 4, 4))])


def split(model):
    """The vectors, the matrices, and the stacks of these."""
    return [[one for one in model.parameters() if one.ndim == ndim] for ndim in (1, 2, 3)]


def muon(model):
    vectors, matrices, stacks = split(model)
    adamw = torch.optim.AdamW(vectors, lr=1e-3, eps=1e-4)
    return [StackedMuon(stacks, lr=0.02), torch.optim.Muon(matrices, lr=0.02, ns_steps=STEPS), adamw]


def one_process(make, steps):
    """The weights after a plain loop in fp64; Muon has each expert as a parameter of its own."""
    model = layers().double()
    stacks = {name: one for name, one in model.named_parameters() if one.ndim == 3}
    experts = {name: [nn.Parameter(matrix.detach().clone()) for matrix in stack] for name, stack in stacks.items()}
    if make is muon:
        vectors, matrices, _ = split(model)
        matrices += [one for stack in experts.values() for one in stack]
        optimizers = [
            torch.optim.Muon(matrices, lr=0.02, ns_steps=STEPS),
            torch.optim.AdamW(vectors, lr=1e-3, eps=1e-4),
        ]
    else:
        optimizers, experts = make(model), {}
    for step in range(steps):
        model.zero_grad()
        F.mse_loss(model(tokens(seed=step).double()), torch.zeros(16, WIDTH, dtype=torch.float64)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        for name, matrices in experts.items():
            for index, matrix in enumerate(matrices):
                matrix.grad = stacks[name].grad[index]
        for optimizer in optimizers:
            optimizer.step()
        for name, matrices in experts.items():
            stacks[name].data.copy_(torch.stack([one.detach() for one in matrices]))
    return model.state_dict()


def train(engine, steps):
    """The number of all-to-alls in the last step."""
    for step in steps:
        engine.zero_grad()
        engine.forward_backward(*own_part(engine.context, tokens(seed=step).double(), torch.zeros(16, WIDTH).double()))
        with Collectives() as collectives:
            assert engine.step().stepped
    return collectives.counts["alltoall"]


LAYOUTS = layouts("ep4, dp2·ep2, dp2·ep2 + zero1, ep2·tp2, ep2·pp2, fsdp2·ep2, fsdp·ep2·tp2")
TENSOR = {"*.up": "colwise", "*.down": "rowwise"}
MAKES = {"muon": muon, "lamb": lamb, "adafactor": adafactor}
EVERYTHING = [(one, other, make) for one in LAYOUTS for other in LAYOUTS for make in MAKES if one != other]
PART = [("ep4", "ep2·tp2", "lamb")]


@family
@pytest.mark.parametrize(("first", "second", "make"), cases("whole matrices of experts", EVERYTHING, PART, 1))
@on_ranks(4)
def test_stacks_are_stepped_as_on_one_process(world, first, second, make):
    """Two steps in one layout, and after a checkpoint two in another."""
    folder = shared_folder()
    for number, layout in enumerate((first, second)):
        parallel = LAYOUTS[layout]
        config = {"parallel": parallel, "precision": "64-true", "clip_grad_norm": 0.1}
        with paramp.launch_from_torch(config):
            model = layers()
            plan = PLAN | (TENSOR if "tensor" in parallel else {})
            engine = engine_of(model, optimizer=MAKES[make](model), plan=plan)
            if number:
                train(engine, [20])  # what it has done before a load does not matter
                engine.load(f"{folder}/saved")
            exchanged = train(engine, range(2 * number, 2 * number + 2))
            assert make != "lamb" or exchanged == 3, layout  # to the owners of the stacks, and back
            assert engine.check_replicas() == []
            engine.save(f"{folder}/saved")
            found = engine.full_state_dict()
    assert_trained(found, one_process(MAKES[make], 4), layers().state_dict(), atol=1e-12, what=make)


class Moving(Lamb):
    """It scales each matrix of a stack by itself, and gives each parameter other memory."""

    def ratio(self, parameter, update):
        return torch.linalg.matrix_norm(parameter, keepdim=True) / torch.linalg.matrix_norm(update, keepdim=True)

    def step_one(self, parameter, group, state):
        super().step_one(parameter, group, state)
        parameter.data = parameter.data.clone()


@on_ranks(4)
def test_a_stack_that_a_step_moves_is_an_error(world):
    """Where a stack is stepped as it lies in its buffer, beside matrices that came for the step only."""
    with paramp.launch_from_torch({"parallel": {"expert": 2, "tensor": 2}}):
        model = layers()
        vectors, matrices, stacks = split(model)
        optimizers = [Moving([*matrices, *stacks], lr=0.02), torch.optim.SGD(vectors, lr=0.1)]
        engine = engine_of(model, optimizer=optimizers, plan=PLAN | TENSOR)
        engine.forward_backward(*own_part(engine.context, tokens(), torch.zeros(16, WIDTH)))
        with pytest.raises(RuntimeError, match=r"the step of Moving gave '0\.experts\.weight' other memory"):
            engine.step()


@on_ranks(4)
def test_each_rank_orthogonalizes_its_experts_whole(world):
    """A stack that is stepped matrix by matrix does not travel; here with masters of half-precision weights."""
    config = {"parallel": {"expert": 2, "tensor": 2}, "precision": {"mode": "16-naive", "init_scale": 128.0}}
    with paramp.launch_from_torch(config | {"clip_grad_norm": 0.1}):
        model = layers()
        engine = engine_of(model, optimizer=muon(model), plan=PLAN | TENSOR)
        engine.forward_backward(*own_part(engine.context, tokens(seed=0).half(), torch.zeros(16, WIDTH).half()))
        assert engine.step().stepped
        momenta = [state["momentum_buffer"].shape for state in engine.optimizer[0].state.values()]
        assert momenta == [(NUM_EXPERTS // 2, WIDTH, WIDTH)] * 2
        found = engine.full_state_dict()
        for name, weight in engine.named_parameters():
            master = found[name].chunk(2)[engine.context.coordinates["ep"]] if "experts" in name else None
            assert master is None or torch.equal(local(weight), master.half())
    begun, expected = layers().state_dict(), one_process(muon, 1)
    for name in ("0.experts.weight", "1.experts.weight"):  # from gradients in half precision
        assert (found[name] - expected[name]).norm() < 0.1 * (begun[name] - expected[name]).norm(), name
