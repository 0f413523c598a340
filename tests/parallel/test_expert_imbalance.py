"""Tokens that all go to the experts of one rank, experts that get none, and scores that are equal."""

import torch
import torch.nn.functional as F
from pool import on_ranks
from small_engines import engine_of, everywhere, own_part
from small_mixture import NUM_EXPERTS, PLAN, WIDTH, layers, tokens

import paramp
from paramp.base.dtensor import local
from paramp.optim.replicated_gradients import let_differ

LAYOUTS = {
    "ep4": {"expert": 4},
    "ep2·tp2": {"expert": 2, "tensor": 2},
    "ep2·pp2": {"expert": 2, "pipeline": {"size": 2, "microbatches": 2}},
    "dp2·ep2 + zero1": {"data": 4, "expert": 2, "zero": 1},
}


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=1.0)


def crowd(model, experts):
    """Let the routers of ``model`` choose among ``experts`` only."""
    others = [index for index in range(NUM_EXPERTS) if index not in experts]
    for name, module in model.named_modules():
        if name.endswith("router"):
            module.register_forward_hook(lambda _, __, scores: scores.index_fill(1, torch.tensor(others), -1e3))
    return model


@on_ranks(4)
def test_gradients_are_those_of_one_process_if_all_tokens_go_to_one_rank(world):
    """Two experts, which one rank has; and three of four, where a token's two experts are on two ranks."""
    x, y = tokens().double(), torch.zeros(16, WIDTH).double()
    for experts in ((2, 3), (0, 1, 3)):
        plain = crowd(layers().double(), experts)
        optimizer = sgd(plain.parameters())
        F.mse_loss(plain(x), y).backward()
        optimizer.step()
        for layout, parallel in LAYOUTS.items():
            with paramp.launch_from_torch({"parallel": parallel, "precision": "64-true"}) as context:
                plan = PLAN | ({"*.up": "colwise", "*.down": "rowwise"} if "tensor" in parallel else {})
                engine = engine_of(crowd(layers(), experts), optimizer=sgd, plan=plan)
                for _ in range(2):  # the second finds buffers that were used
                    engine.zero_grad()
                    engine.forward_backward(*own_part(context, x, y))
                first = context.coordinates["ep"] * NUM_EXPERTS // parallel["expert"]
                for name, parameter in engine.named_parameters():
                    busy = [bool(one.any()) for one in local(parameter.grad)] if "experts" in name else []
                    assert busy == [first + index in experts for index in range(len(busy))], (layout, name)
                assert engine.step().stepped
                found = engine.full_state_dict()
                for name, value in plain.state_dict().items():
                    torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-12, msg=f"{layout} {name}")


@on_ranks(4)
def test_tensor_ranks_break_ties_alike_and_what_breaks_them_otherwise_is_found(world):
    """Each data rank chooses for tokens of its own. Tensor ranks choose for the same, from the same bits."""
    plan = PLAN | {"*.up": "colwise", "*.down": "rowwise"}
    first: list[int] = []
    for apart in (False, True):
        with paramp.launch_from_torch({"parallel": LAYOUTS["ep2·tp2"]}) as context:
            model, chosen = layers(), []
            for layer in model:
                torch.nn.init.zeros_(layer.router.weight)  # all scores are equal
                layer.experts.register_forward_pre_hook(
                    lambda _, args, chosen=chosen: chosen.append([one.tolist() for one in args])
                )
            if apart and context.tp.rank == 1:
                crowd(model, {*range(NUM_EXPERTS)}.difference(first))
            engine = engine_of(model, optimizer=sgd, plan=plan)
            engine.forward_backward(*own_part(context, tokens(), torch.zeros(16, WIDTH)))
            of_rank = everywhere((context.dp.rank, chosen))
            first = chosen[0][1][0]
            pairs = [[one for data, one in of_rank if data == rank] for rank in range(2)]
            assert [one == two for one, two in pairs] == [not apart] * 2
            if apart:
                let_differ(engine._weights.gradients)  # else the step refuses the routers' gradients
            assert engine.step().stepped
            found = {one.parameter for one in engine.check_replicas()}
            assert {"0.experts.weight", "1.experts.weight"} <= found if apart else not found
