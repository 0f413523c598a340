"""A value that is not finite in any expert, router or shared layer: all ranks skip, and the report names the expert."""

import pytest
import torch
from families import cases, family
from layouts import sized_layouts
from pool import run_on_ranks
from reference import local
from small_engines import Planted, engine_of, everywhere, own_part
from small_mixture import CHOICES, NUM_EXPERTS, PLAN, WIDTH, MixtureLayer, StackedExperts, layers, tokens

import paramp

VALUES = float("inf"), float("-inf"), float("nan")
SCALE = 2.0**6
NAIVE = {"mode": "16-naive", "init_scale": SCALE, "hysteresis": 1, "growth_interval": 1000}
LAYOUTS = sized_layouts("ep2, ep2·tp2, ep2·pp2, dp2·ep2·zero1, fsdp2·ep2")


class Spoilt(StackedExperts):
    """Stacked experts, of which one may spoil what it computes."""

    spoils = None  # the expert's index on this rank, the value, whether in the backward

    def forward(self, tokens, index, weights):
        output = super().forward(tokens, index, weights)
        if self.spoils is None:
            return output
        expert, value, backward = self.spoils
        rows = (index == expert).any(1).nonzero().flatten()
        return output.index_copy(0, rows, Planted.apply(output[rows], value, backward))


class ByName(MixtureLayer):
    """Gives its experts their inputs by name."""

    def forward(self, x):
        scores, index = self.router(x).softmax(-1).topk(CHOICES)
        return x + self.experts(index=index, tokens=x, weights=scores)


def started(parallel):
    config = {"parallel": parallel, "precision": NAIVE, "clip_grad_norm": 1.0, "ema": {"decay": 0.9}}
    return paramp.launch_from_torch(config | {"max_skipped_in_a_row": None})


def engine_on(parallel):
    plan = PLAN | ({"*.up": "colwise", "*.down": "rowwise"} if "tensor" in parallel else {})
    model = layers()
    for one in model.modules():
        if isinstance(one, StackedExperts):
            one.__class__ = Spoilt
    return engine_of(model, optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, eps=1e-4), plan=plan)


def given(context):
    return own_part(context, tokens().half(), torch.zeros(16, WIDTH))


def everything(engine):
    """Weights, masters, the optimizer's state and averages."""
    optimizer = engine.optimizer
    tensors = [*engine.parameters(), *(one for group in optimizer.param_groups for one in group["params"])]
    tensors += [value for state in optimizer.state.values() for value in state.values()]
    tensors += [*engine.full_state_dict().values(), *engine.ema.full_state_dict().values()]
    return [local(tensor).detach().clone() for tensor in tensors]


def scale_again(engine):
    engine.scaler.load_state_dict(engine.scaler.state_dict() | {"scale": SCALE})
    return SCALE


def plant_in_gradients(world, layout):
    """In each parameter that a rank holds, and in each expert of a stack."""
    parallel = LAYOUTS[layout][1]
    with started(parallel) as context:
        engine, scale = engine_on(parallel), SCALE
        engine.forward_backward(*given(context))
        assert engine.step().stepped
        own = dict(engine.named_parameters())
        places = [
            (name, index) for name, one in own.items() for index in range(len(local(one)) if one.ndim == 3 else 1)
        ]
        # A rank of the expert axis has half of the experts, of which ranks that shard them have half each.
        place = context.coordinates
        first = (2 * place["ep"] + place.get("efsdp", 0)) * NUM_EXPERTS // 4
        for rank, name, index in [
            (rank, *place) for rank, of_rank in enumerate(everywhere(places)) for place in of_rank
        ]:
            value = VALUES[(rank + index + len(name)) % 3]
            before = everything(engine)
            engine.zero_grad()
            engine.forward_backward(*given(context))
            if world.rank == rank:
                gradient = local(own[name].grad)
                (gradient[index] if gradient.ndim == 3 else gradient).view(-1)[-1] = value
            result = engine.step()
            assert (result.stepped, result.overflow, result.loss_scale) == (False, True, scale), (rank, name)
            scale /= 2
            assert everywhere(engine.scaler.get_scale()) == [scale] * world.size
            assert all(map(torch.equal, everything(engine), before)), (rank, name)
            report = engine.diagnose_overflow()
            experts = (everywhere(first)[rank] + index,) if "experts" in name else ()
            found = [one for one in report.gradients if one.name == name]
            assert {one.experts for one in found} == {experts}, (rank, name)
            if experts:
                tokens_of = report.tokens[name.rpartition(".")[0]]
                assert sum(tokens_of) == 16 * CHOICES
                assert f" elements, of expert {experts[0]} ({tokens_of[experts[0]]} tokens)" in str(report), str(report)
            if scale == 1:  # its floor
                scale = scale_again(engine)
        engine.zero_grad()
        engine.forward_backward(*given(context))
        assert engine.step().stepped
        assert engine.check_replicas() == []


def expected_counts():
    """The tokens of each expert in each layer on one process."""
    model, counts = layers().half(), {}
    for name, module in model.named_modules():
        if isinstance(module, StackedExperts):
            module.register_forward_pre_hook(
                lambda _, args, name=name: counts.update(
                    {name: tuple(args[1].flatten().bincount(minlength=4).tolist())}
                )
            )
    model(tokens().half())
    return counts


def plant_in_computation(world, layout):
    """In the forward and the backward of an expert, of its router and of a shared layer."""
    parallel, counts = LAYOUTS[layout][1], expected_counts()
    assert all(sum(of_stack) == 16 * CHOICES for of_stack in counts.values())
    with started(parallel) as context:
        engine = engine_on(parallel)
        modules = dict(engine.module.named_modules())
        own_experts = context.coordinates["ep"] * NUM_EXPERTS // 2
        for number, (layer, expert, backward) in enumerate(
            (layer, expert, backward) for layer in (0, 1) for expert in range(NUM_EXPERTS) for backward in (False, True)
        ):
            name, value = f"{layer}.experts", VALUES[number % 3]
            spoils = name in modules and 0 <= expert - own_experts < NUM_EXPERTS // 2
            if spoils:
                modules[name].spoils = expert - own_experts, value, backward
            engine.zero_grad()
            engine.forward_backward(*given(context), return_loss=False)
            assert engine.step().overflow
            report = engine.diagnose_overflow()
            scale_again(engine)
            if spoils:
                modules[name].spoils = None
            origin = report.origin
            assert (origin.module, origin.during) == (name, "backward" if backward else "forward"), str(report)
            assert origin.experts == (expert,), str(report)
            assert report.tokens[name] == counts[name]
            assert report.tokens == counts or not backward  # tokens that are not finite go anywhere
            count = counts[name][expert]
            assert f"{name} in expert {expert} ({count} tokens)" in str(report)
        for name in ("0.router", "1.up"):
            handle = None
            if name in modules:
                handle = modules[name].register_forward_hook(lambda _, __, out: Planted.apply(out, float("nan"), False))
            engine.forward_backward(*given(context), return_loss=False)
            assert engine.step().overflow
            report = engine.diagnose_overflow()
            assert (report.origin.module, report.origin.experts) == (name, ())
            if handle is not None:
                handle.remove()
            engine.zero_grad()


@family
@pytest.mark.parametrize("layout", cases("overflows of experts", [*LAYOUTS], ["ep2"], 1))
@pytest.mark.parametrize("body", [plant_in_gradients, plant_in_computation])
def test_the_expert_is_named_and_all_ranks_skip(layout, body):
    run_on_ranks(LAYOUTS[layout][0], __name__, body.__name__, {"layout": layout})


def test_on_one_process_an_expert_is_named_by_its_weights_or_by_the_tokens_that_it_got():
    """By those that all bad tokens share; all of them, if these share none."""
    with paramp.launch_from_torch({"precision": "16-mixed"}):
        engine = engine_of(layers(1))
        stack = engine.module[0].experts
        stack.__class__ = Spoilt
        stack.spoils = 2, float("inf"), False
        for engine.module[0].__class__ in (ByName, MixtureLayer):
            engine.forward_backward(tokens(), torch.zeros(16, WIDTH))
            assert engine.step().overflow
            report = engine.diagnose_overflow()
            assert (report.origin.module, report.origin.experts) == ("0.experts", (2,))
            assert sum(report.tokens["0.experts"]) == 16 * CHOICES
        stack.spoils, chosen = None, []
        for count in (1, 16):
            bad = torch.zeros(16, 1)
            bad[:count] = float("nan")

            def spoil(_, args, output, bad=bad):
                chosen[:] = args[1].tolist()
                return output + bad

            handle = stack.register_forward_hook(spoil)
            engine.forward_backward(tokens(), torch.zeros(16, WIDTH))
            assert engine.step().overflow
            experts = engine.diagnose_overflow().origin.experts
            handle.remove()
            assert not set.intersection(*map(set, chosen))
            assert experts == tuple(sorted(chosen[0]) if count == 1 else range(NUM_EXPERTS))
        with torch.no_grad():
            stack.weight[[1, 3], 0, 0] = float("nan")
        engine.forward_backward(tokens(), torch.zeros(16, WIDTH))
        assert engine.step().overflow
        assert engine.diagnose_overflow().origin.experts == (1, 3)  # no expert is that of all bad tokens
