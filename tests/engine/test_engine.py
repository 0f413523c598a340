"""The engine's loop, accumulation, counts and results against plain torch, and what it refuses."""

import copy
import functools
import itertools
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from beside_plain import seeded
from counting import Collectives
from families import rarely
from layouts import layouts
from pool import on_ranks
from reference import assert_trained, batches, local, plain_fp32_training, small_gpt, steep_gpt
from small_engines import each_raises, engine_of, everywhere, gpt_engine, own_part, sgd, train_step
from torch import nn
from torch.profiler import ProfilerActivity, profile

import paramp
from paramp.base.dtensor import full_tensor
from paramp.compat.colossalai.amp import AMP_TYPE

LAYOUTS = layouts("pp2-tp2, dp2-tp2, pp2-dp2, dp4")
CLIP = 2.0
"""Some of the steps below are clipped, and some are not, so that a wrong size of the gradients is not clipped away."""
momentum = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
"""Its steps are as large as the gradients are, which Adam's are not."""
X = torch.ones(2, 4)


def two_layers():
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def test_the_documents_loop_is_plain_torch():
    losses, weights = plain_fp32_training(10, clip=None)
    with paramp.launch_from_torch():
        model = small_gpt()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        engine, loader, _, _ = paramp.initialize(model, optimizer, model.loss, list(batches(10)))
        engine.train()
        for (x, y), expected in zip(loader, losses, strict=True):
            engine.zero_grad()
            output = engine(x)
            loss = engine.criterion(output, y)
            assert engine.backward(loss).item() == pytest.approx(expected, abs=1e-6)
            assert engine.step().stepped
        assert_trained(engine.full_state_dict(), weights, small_gpt().state_dict(), atol=1e-6)


def test_masters_are_made_of_the_original_weights_and_take_their_place_in_param_groups():
    with paramp.launch_from_torch({"precision": "16-naive"}):
        model = small_gpt(tied=False)
        matrices, vectors = ([p for p in model.parameters() if (p.ndim > 1) is many] for many in (True, False))
        groups = [{"params": matrices, "weight_decay": 0.5}, {"params": vectors, "weight_decay": 0.0, "lr": 7.0}]
        optimizer = torch.optim.AdamW(groups, lr=1e-3)
        engine = engine_of(model, model.loss, optimizer)
        assert all(parameter.dtype is torch.float16 for _, parameter in engine.named_parameters())
        original = small_gpt(tied=False).state_dict()
        assert all(torch.equal(value, original[name]) for name, value in engine.full_state_dict().items())
        assert engine.optimizer is optimizer
        assert [len(group["params"]) for group in optimizer.param_groups] == [len(matrices), len(vectors)]
        assert [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == [(1e-3, 0.5), (7.0, 0.0)]
        assert all(p.dtype is torch.float32 for group in optimizer.param_groups for p in group["params"])


@pytest.mark.parametrize("asked", [True, False])
@on_ranks(2)
def test_zeros_of_replicated_gradients_are_counted_once(world, asked):
    fp16 = {"mode": AMP_TYPE.NAIVE, "initial_scale": 2.0**10, "log_num_zeros_in_grad": asked}
    with paramp.launch_from_torch({"fp16": fp16, "parallel": {"tensor": 2}}):
        model = seeded(lambda: nn.Sequential(nn.Embedding(8, 4), *two_layers()))
        engine = engine_of(model, plan={"1": "colwise", "2": "rowwise"})
        result = train_step(engine, torch.tensor([1, 5]), torch.ones(2, 4))
        assert result.num_zeros == (6 * 4 if asked else None)  # of the embeddings that were not used


def masked_sum_and_count(output, target):
    """Only tokens below a limit count: another number in every microbatch and on every rank."""
    losses = F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="none")
    mask = target.flatten() < 70
    return (losses * mask).sum(), mask.sum()


WINDOWS = [*((name, False) for name in LAYOUTS), ("pp2-dp2", True), ("dp4", True)]


@pytest.mark.parametrize(("layout", "counts"), rarely(WINDOWS, ("pp2-tp2", False), ("pp2-dp2", True)))
@on_ranks(4, cuda=True)
def test_accumulated_windows_are_one_large_batch(world, layout, counts):
    """Three calls of four samples, and a scale that cannot be folded exactly (1/3), against the batch of twelve."""
    config = {"parallel": LAYOUTS[layout], "gradient_accumulation": 3, "clip_grad_norm": CLIP}
    with paramp.launch_from_torch(config, device=world.device) as context:
        reference, norms = steep_gpt(), []
        plain = momentum(reference.parameters())
        engine = engine_of(steep_gpt(), masked_sum_and_count if counts else reference.loss, momentum)

        def loss_of(x, y):
            if not counts:
                return F.cross_entropy(reference(x).flatten(0, 1), y.flatten())
            total, count = masked_sum_and_count(reference(x), y)
            return total / count

        for x, y in batches(4, size=12):
            plain.zero_grad()
            expected = loss_of(x, y)
            expected.backward()
            norms.append(torch.nn.utils.clip_grad_norm_(reference.parameters(), CLIP).item())
            plain.step()
            for call, (part, target) in enumerate(zip(x.chunk(3), y.chunk(3), strict=True)):
                engine.zero_grad()  # as a plain loop does; within the window it must not drop anything
                loss = engine.forward_backward(*own_part(context, part, target))
                result = engine.step()
                assert (result.stepped, result.overflow) == (call == 2, False)
            assert loss.item() == pytest.approx(expected.item(), abs=1e-5)
            assert result.grad_norm == pytest.approx(norms[-1], rel=1e-5)
        assert min(norms) < CLIP < max(norms)
        assert_trained(engine.full_state_dict(), reference.state_dict(), steep_gpt().state_dict(), atol=2e-6)
        x, y = next(batches(1, seed=9))
        assert engine.evaluate(*own_part(context, x, y)).item() == pytest.approx(loss_of(x, y).item(), abs=1e-5)


@on_ranks(4)
def test_after_a_step_each_gradient_is_that_of_the_whole_batch(world):
    """Also that of a norm, of which a rank had the part of its own tokens and samples."""
    (x, y), plain = next(batches(1)), small_gpt(num_layers=1)
    plain.loss(plain(x), y).backward()
    with paramp.launch_from_torch({"parallel": LAYOUTS["dp2-tp2"] | {"sequence_parallel": True}}) as context:
        engine = gpt_engine(num_layers=1)
        engine.forward_backward(*own_part(context, x, y))
        assert engine.step().stepped
        for name, parameter in engine.named_parameters():
            expected = plain.get_parameter(name).grad
            torch.testing.assert_close(full_tensor(parameter.grad), expected, rtol=1e-4, atol=1e-6)


PARTIAL, TIED = "partial gradients of norms and biases", "the tied embedding"
DATA, CONTROL = "data gradients", "control"
COLLECTIVES = {
    "pp2-tp2": (LAYOUTS["pp2-tp2"], [TIED, CONTROL]),
    "pp2-tp2-sp": (LAYOUTS["pp2-tp2"] | {"sequence_parallel": True}, [PARTIAL, TIED, CONTROL]),
    "dp2-tp2": (LAYOUTS["dp2-tp2"], [DATA, CONTROL]),
    "pp2-dp2": (LAYOUTS["pp2-dp2"], [TIED, DATA, CONTROL]),
    "cp2-tp2": ({"context": 2, "tensor": 2}, [DATA, CONTROL]),
    "tp4": ({"tensor": 4}, [CONTROL]),
    "pp2-dp2-zero1": (LAYOUTS["pp2-dp2"] | {"zero": 1}, ["the tied embedding over data ranks", TIED, CONTROL]),
}
"""Layout -> its options, and the all-reduces of a step. There are no other collectives but ZeRO's two."""


@pytest.mark.real_sizes  # the number of buffers
@on_ranks(4)
def test_the_collectives_of_a_step_are_few(world):
    """One control all-reduce a step. Besides it: data gradients, tied embeddings and partial gradients, one each."""
    size = 9 + sum(1 for _ in small_gpt(num_layers=2).parameters())  # which of them have gradients
    for layout, (parallel, expected) in COLLECTIVES.items():
        fp16 = {"mode": AMP_TYPE.NAIVE, "initial_scale": 2.0**10, "log_num_zeros_in_grad": True}
        with paramp.launch_from_torch({"parallel": parallel, "fp16": fp16, "clip_grad_norm": 1.0}) as context:
            engine = gpt_engine(num_layers=2)
            for overflows in (False, False, True):
                engine.forward_backward(*own_part(context, *next(batches(1))), return_loss=False)
                if overflows and world.rank == 3:
                    local(next(engine.parameters()).grad).view(-1)[0] = math.inf
                with Collectives() as collectives:
                    result = engine.step()
                    assert (result.stepped, result.overflow) == (not overflows, overflows)
                    assert min(result.grad_norm, result.num_zeros, result.loss) > 0
                engine.zero_grad()
                if engine.num_steps == 1:
                    looks = context.tp.size > 1 and 1 + 2 * (context.batch_axis.size > 1)  # at replicas and placements
                    assert collectives.counts["allreduce"] == len(expected) + looks, (layout, collectives.elements)
                if engine.num_steps == 2:
                    others = {"reduce_scatter": 1, "allgather": 1} if parallel.get("zero") else {}
                    assert collectives.counts == {"allreduce": len(expected)} | others, (layout, collectives.counts)
                    assert collectives.elements.count(size) == 1, (layout, collectives.elements)
                    assert collectives.elements[-1] == size


@pytest.mark.parametrize("parallel", [{"data": 2}, {"pipeline": 2}], ids=["dp2", "pp2"])
@on_ranks(2)
def test_the_loss_comes_with_the_step_too(world, parallel):
    with paramp.launch_from_torch({"parallel": parallel, "gradient_accumulation": 2}) as context:
        engine = gpt_engine()
        for call, given in enumerate(batches(2)):
            x, y = own_part(context, *given)
            loss = engine.forward_backward(x, y)
            result = engine.step()
            assert (result.loss is None) == (call == 0)
        engine.zero_grad()
        assert result.loss == pytest.approx(loss.item(), rel=1e-6)
        assert "stepped=True" in repr(result)
        for returned in (False, True):
            with Collectives() as collectives:
                loss = engine.forward_backward(x, y, return_loss=returned)
            assert (loss is not None) == returned
            assert collectives.counts["allreduce"] == returned
            engine.zero_grad()


def test_a_parametrized_layer_trains():
    with paramp.launch_from_torch({"precision": "16-mixed"}):
        engine = engine_of(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)))
        losses = [train_step(engine, X).loss for _ in range(2)]
        assert losses[1] < losses[0]


@on_ranks(2)
def test_running_statistics_are_those_of_the_first_data_rank(world):
    with paramp.launch_from_torch({"parallel": {"data": 2}}):
        engine = engine_of(nn.BatchNorm1d(2))
        train_step(engine, torch.full((4, 2), float(world.rank + 1)))
        state = {name: value.tolist() for name, value in engine.full_state_dict().items()}
        assert state["running_mean"] == pytest.approx([0.1, 0.1])
        assert everywhere(state) == [state, state]


@on_ranks(2)
def test_algorithms_change_the_model_before_it_is_partitioned(world):
    class Wider:
        def apply(self, model, precision):
            assert precision.name == "32-true"
            model[1] = nn.Linear(4, 5)

    with paramp.launch_from_torch({"parallel": {"pipeline": 2}}):
        engine = engine_of(two_layers(), algorithms=[Wider()])
        assert engine.full_state_dict()["1.weight"].shape == (5, 4)


def test_changes_of_the_scale_are_printed_when_verbose(capsys):
    fp16 = {"mode": AMP_TYPE.NAIVE, "initial_scale": 8.0, "hysteresis": 1, "verbose": True}
    with paramp.launch_from_torch({"fp16": fp16}):
        train_step(engine_of(two_layers()), X * torch.nan)
    assert "loss scale changes from 8 to 4" in capsys.readouterr().out


@on_ranks(2)
def test_an_engine_shows_its_model_and_layout(world):
    with paramp.launch_from_torch({"parallel": {"pipeline": 2}, "precision": "16-naive"}) as context:
        model = two_layers()
        model[1].weight = model[0].weight
        engine = engine_of(model)
        assert repr(engine) == "Engine(Sequential, 24 parameters, 16-naive, pp 2 x dp 1 x tp 1)"
        assert engine.config is context.config
        assert [name for name, _ in engine.named_parameters()] == [f"{world.rank}.weight", f"{world.rank}.bias"]
        assert all(map(torch.equal, engine.parameters(), engine.module.parameters()))
        state = engine.state_dict()
        assert list(state) == ["0.weight", "0.bias", "1.weight", "1.bias"]
        assert all(torch.equal(state[name], value) for name, value in engine.full_state_dict().items())


@pytest.mark.parametrize("parallel", [{"pipeline": {"size": 2, "microbatches": 2}}, {"tensor": 2}], ids=["pp2", "tp2"])
@on_ranks(2)
def test_torchs_profiler_sees_stages_and_microbatches(world, parallel):
    with paramp.launch_from_torch({"parallel": parallel}) as context:
        engine, x = engine_of(two_layers(), plan={"0": "colwise", "1": "rowwise"}), torch.ones(4, 4)
        with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:  # torch 2.11 warns without
            train_step(engine, x)
            engine.evaluate(x, x)
            if context.tp.size > 1:
                engine.backward(engine.criterion(engine(x), x))
    names = {event.key for event in profiler.key_averages() if event.key.startswith("paramp")}
    expected = {"paramp batch", "paramp step", "paramp evaluation"}
    for microbatch in range(2 // context.tp.size):
        kinds = ["forward", "backward"] + ["loss"] * context.is_last_stage
        expected |= {f"paramp {kind} (stage {context.pp.rank}, microbatch {microbatch})" for kind in kinds}
    assert names == expected | ({"paramp forward", "paramp backward"} if context.tp.size > 1 else set())


# --------------------------------------------------------------------------------------------------------- mistakes


def test_what_initialize_refuses():
    def start(optimizer=sgd, model=None, **options):
        return functools.partial(engine_of, model or two_layers(), None, optimizer, **options)

    def used(parameters, make=momentum):
        optimizer = make(parameters)
        parameters[0].grad = torch.ones_like(parameters[0])
        optimizer.step()
        return optimizer

    def begun(parameters):
        optimizer = sgd(parameters)
        optimizer.state[parameters[0]]["slow"] = torch.zeros_like(parameters[0])
        return optimizer

    other = sgd([nn.Parameter(torch.ones(3))])
    model = two_layers()
    with paramp.launch_from_torch():
        each_raises(
            paramp.ConfigError,
            {
                "optimizer: got 5": start(5),
                "not a parameter of the model": start(other),
                "an optimizer for a model that is yet to be built": start(other, two_layers),
                "it has stepped already": start(used([*model.parameters()]), model),
                "it has stepped already; ": start(used([*model.parameters()], torch.optim.AdamW), model),
                "made state for '0.weight' without a count of steps": start(begun([*model.parameters()]), model),
                "lr_scheduler: got 5": start(lr_scheduler=5),
                "steps another optimizer": start(lr_scheduler=torch.optim.lr_scheduler.StepLR(other, 1)),
                "plan: got list": start(plan=["colwise"]),
                "criterion: got the optimizer SGD": functools.partial(engine_of, two_layers(), other, F.mse_loss),
                "algorithms: got None, expected a list of objects with apply": start(algorithms=None),
                "algorithms: got .*LayerNorm": start(algorithms=[paramp.algorithms.LowPrecisionLayerNorm]),
            },
        )
        engine = engine_of(model, optimizer=sgd(model.parameters()))
        each_raises(
            paramp.ConfigError,
            {
                "'0.weight' is trained by an engine already": start(engine.optimizer, model),
                "'0.0.weight' is trained by an engine already": start(sgd, nn.Sequential(model)),
                "not a parameter of the model": start(engine.optimizer),
            },
        )
        assert train_step(engine, X).stepped
    each_raises(RuntimeError, {r"call paramp\.launch_from_torch": start()})
    with paramp.launch_from_torch():
        assert train_step(engine_of(model), X).stepped  # the engine that has trained it is closed


def test_the_optimizer_is_stepped_by_the_engine_only():
    """Its own step would take gradients that carry the loss scale, and make all weights NaN."""
    with paramp.launch_from_torch({"precision": "16-mixed"}):
        engine = engine_of(two_layers())
        engine.forward_backward(X, X)
        with pytest.raises(RuntimeError, match=r"call engine\.step\(\)"):
            engine.optimizer.step()
        assert engine.step().stepped


@on_ranks(2)
def test_what_a_layout_refuses_on_every_rank(world):
    with paramp.launch_from_torch({"parallel": {"tensor": 2, "sequence_parallel": True}}):
        call = functools.partial(gpt_engine().forward_backward, *next(batches(1, length=15)))
        each_raises(paramp.ConfigError, {"sequence of 15: expected a multiple of": call})
    with paramp.launch_from_torch({"parallel": {"pipeline": 2}}):
        engine = engine_of(model := two_layers())
        engine.eval()
        each_raises(
            paramp.ConfigError,
            {
                "argument 'mask'": lambda: engine(X, mask=None),
                "takes 2 pos": lambda: engine(X, X),
                "no tensor": engine,
                "batch: got 3 samples on each data rank": lambda: engine(torch.ones(3, 4)),
            },
        )
        assert engine(X).shape == (2, 4)
        trained = rf"another stage trains '{1 - world.rank}.weight'.*"
        calls = {f"{trained}engine.full_state_dict": model.state_dict, f"{trained}engine.x": lambda: model(X)}
        calls |= {trained: lambda: pickle.dumps(model), f"{trained}full": lambda: model[1 - world.rank](X)}
        each_raises(RuntimeError, calls)
        assert model[world.rank](X).shape == (2, 4)
        assert pickle.loads(pickle.dumps(engine.module)).state_dict().keys() == engine.module.state_dict().keys()
        again = copy.deepcopy(model)
        assert again(X).shape == (2, 4)
    for one, parallel in itertools.product((again, model), ({"pipeline": 2}, {"data": 2})):
        with paramp.launch_from_torch({"parallel": parallel}):
            assert train_step(engine_of(one), X).stepped
    assert model(X).shape == (2, 4)


class OwnWeight(nn.MSELoss):
    """A criterion with a weight of its own, which is not trained if it ``is_teacher``."""

    is_teacher = False

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, output, target):
        return super().forward(output, target) * (self.weight.detach() if self.is_teacher else self.weight)


ONE_ELEMENT = "criterion: expected a tensor of one element.*got "
NO_GRADIENT = "criterion: got a loss without a gradient"


class HasDiscriminator(nn.Module):
    """Its method is a criterion that gives gradients to a network which something else trains."""

    def __init__(self):
        super().__init__()
        self.discriminator = nn.Linear(4, 1)

    def loss(self, output, target):
        return self.discriminator(output).mean()


CRITERIA = [
    (lambda output, target: 0.5, f"{ONE_ELEMENT}0.5"),
    (lambda output, target: None, f"{ONE_ELEMENT}None"),
    (lambda output, target: {"loss": output.mean()}, f"{ONE_ELEMENT}{{'loss'"),
    (lambda output, target: (output.sum(), 3, 4), rf"{ONE_ELEMENT}\(\), 3, 4"),
    (nn.MSELoss(reduction="none"), rf"{ONE_ELEMENT}\(1, 4\)"),
    (lambda output, target: output.detach().mean(), NO_GRADIENT),
    (lambda output, target: (output.mean(), output.sum()), "a count of a tensor that requires a gradient"),
    (OwnWeight(), "criterion: its parameter 'weight' got a gradient"),
    (functools.partial(OwnWeight().forward), "criterion: its parameter 'weight' got a gradient"),
    (nn.MSELoss, "criterion: got the class MSELoss"),
    (None, "criterion: initialize got none"),
    (5, "criterion: got 5, expected a function"),
]


@pytest.mark.parametrize("parallel", [{"data": 2}, {"pipeline": 2}], ids=["dp2", "pp2"])
@on_ranks(2)
def test_criteria_that_cannot_be_learned_from_are_an_error_on_every_rank(world, parallel):
    """Of a pipeline too, where only the last stage calls it."""
    with paramp.launch_from_torch({"parallel": parallel}) as context:
        x = torch.ones(context.pp.size, 4)  # one sample in each microbatch
        for criterion, message in CRITERIA:
            with pytest.raises(ValueError, match=message):
                engine_of(two_layers(), criterion).forward_backward(x, x)
        assert train_step(engine_of(two_layers(), OwnWeight().eval()), x).stepped
        assert train_step(engine_of(two_layers(), HasDiscriminator().loss), x).stepped
        criterion = OwnWeight()
        criterion.weight.grad = torch.ones(())  # of another backward
        engine, criterion.is_teacher = engine_of(two_layers(), criterion), True
        assert train_step(engine, x).stepped
        if context.pp.size == 1:
            criterion.is_teacher = False
            with pytest.raises(paramp.ConfigError, match="'weight' got a gradient"):
                engine.backward(engine.criterion(engine(x), x))
            engine.zero_grad()
            other = engine_of(criterion)  # which drops that gradient before its next window
            assert train_step(engine, x).stepped
            assert other.num_steps == 0


@on_ranks(2)
def test_ranks_that_were_given_different_things_raise_on_every_rank(world):
    other = {"precision": "16-mixed"} if world.rank else {}
    with pytest.raises(paramp.ConfigError, match="precision: rank 0 has '32-true', but rank 1 has '16-mixed'"):
        paramp.launch_from_torch({"parallel": {"data": 2}, **other})
    for parallel in ({"data": 2}, {"pipeline": 2}, {"tensor": 2}):
        with paramp.launch_from_torch({"parallel": parallel}):
            message = r"model: rank 0 has \('blocks.2.*but rank 1 has"
            with pytest.raises(paramp.ConfigError, match=message):
                gpt_engine(num_layers=3 - world.rank)
            message = r"optimizer: rank 0 has param_groups\[0\]\['lr'\] = 0.1, but rank 1 .*'lr'\] = 0.2; make it"
            with pytest.raises(paramp.ConfigError, match=message):
                engine_of(two_layers(), optimizer=functools.partial(torch.optim.SGD, lr=0.1 * (1 + world.rank)))
            message = r"rank 0 has param_groups.0.*'params'\] = .*0.bias.*, but rank 1 param_groups.0.*'params'"
            with pytest.raises(paramp.ConfigError, match=message):
                engine_of(two_layers(), optimizer=lambda weights: sgd([*weights][world.rank :]))
            engine = engine_of(model := two_layers(), plan={})
            with pytest.raises(paramp.ConfigError, match=r"'\d\.weight' is trained by an engine already"):
                engine_of(model, plan={})
            assert engine.num_steps == 0
