"""Cutting sequential models into stages."""

import itertools

import pytest
import torch
from pool import on_ranks
from reference import small_gpt
from torch import nn
from traceable import awkward_model

import paramp
from paramp.parallel.batches import Batch
from paramp.parallel.partition import SequentialPartition, is_sequential, plan_stages, units


def chain(*widths):
    return nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in itertools.pairwise(widths)))


def test_units_open_nested_sequences_only():
    assert [name for name, _ in units(small_gpt(num_layers=2))] == ["embedding", "blocks.0", "blocks.1", "norm", "head"]


def test_a_sequence_with_its_own_forward_is_no_sequence():
    class Own(nn.Sequential):
        def forward(self, x):
            return super().forward(x) + x

    assert is_sequential(nn.Sequential())
    assert not is_sequential(Own(nn.Linear(2, 2)))
    assert not is_sequential(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("widths", "stages", "expected"),
    [
        ((8, 8, 8, 8, 8), 2, [["0", "1"], ["2", "3"]]),
        ((8, 64, 8, 8, 8), 2, [["0"], ["1", "2", "3"]]),
        ((2, 2, 2, 64, 64), 3, [["0", "1"], ["2"], ["3"]]),
        ((8, 8, 8, 8), 3, [["0"], ["1"], ["2"]]),
    ],
)
def test_the_heaviest_stage_is_as_light_as_can_be(widths, stages, expected):
    model = chain(*widths)
    plan = plan_stages(list(units(model)), stages)
    assert [name for stage in plan for name in stage] == [str(i) for i in range(len(widths) - 1)]
    assert all(plan)
    weight = {str(i): layer.weight.numel() + 1 for i, layer in enumerate(model)}

    def heaviest(stages):
        return max(sum(weight[name] for name in stage) for stage in stages)

    assert heaviest(plan) == heaviest(expected)


def test_looking_up_an_embedding_costs_nothing():
    model = nn.Sequential(nn.Embedding(10_000, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    assert [len(stage) for stage in plan_stages(list(units(model)), 3)] == [2, 1, 1]


def test_names_choose_the_stages():
    found = list(units(small_gpt(num_layers=3)))
    assert plan_stages(found, 2, ["blocks.2"]) == [["embedding", "blocks.0", "blocks.1"], ["blocks.2", "norm", "head"]]
    assert plan_stages(found, 2, ["blocks"])[0] == ["embedding"]


@pytest.mark.parametrize(
    ("split", "message"),
    [
        (["blocks.9"], r"split: got 'blocks\.9', expected one of embedding, blocks\.0.*did you mean 'blocks\.2'"),
        (["embedding"], "leaves the stage before it empty"),
    ],
)
def test_names_that_begin_no_stage(split, message):
    with pytest.raises(paramp.ConfigError, match=message):
        plan_stages(list(units(small_gpt(num_layers=3))), 2, split)


def test_more_stages_than_modules():
    with pytest.raises(paramp.ConfigError, match="got 6 stages, but the model has 5 modules in sequence"):
        plan_stages(list(units(small_gpt(num_layers=2))), 6)


def test_stages_keep_names_weights_and_add_up_to_the_model():
    model = small_gpt(num_layers=3)
    parts = SequentialPartition(model).stages(plan_stages(list(units(model)), 3))
    tokens = torch.randint(0, 120, (2, 5))
    x = tokens
    for part in parts:
        x = part(x)
    assert torch.equal(x, model(tokens))
    whole = dict(model.named_parameters(remove_duplicate=False))
    seen = [name for part in parts for name, _ in part.named_parameters(remove_duplicate=False)]
    assert sorted(seen) == sorted(whole)
    for part in parts:
        assert all(whole[name] is value for name, value in part.named_parameters())


def test_a_sequence_is_cut_between_any_two_of_its_modules():
    """Nested ones included."""
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Tanh(), nn.Linear(4, 4)))
    model = nn.Sequential(nn.Linear(4, 4), inner, nn.ReLU(), nn.Sequential(nn.Linear(4, 4)))
    names = [name for name, _ in units(model)]
    assert names == ["0", "1.0", "1.1.0", "1.1.1", "2", "3.0"]
    x = torch.randn(2, 4)
    for index, name in enumerate(names[1:], start=1):
        plan = plan_stages(list(units(model)), 2, [name])
        assert plan == [names[:index], names[index:]]
        first, second = SequentialPartition(model).stages(plan)
        assert torch.equal(second(first(x)), model(x))


class Counting(nn.Module):
    """Counts its calls in a buffer and notes a random number in each."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.register_buffer("calls", torch.zeros(()))
        self.drawn = []

    def forward(self, x):
        self.calls += 1
        self.drawn.append(torch.rand(()).item())
        return x * self.weight


@on_ranks(4)
def test_finding_shapes_leaves_no_trace(world):
    """torch's own inference would count a call of garbage and move the random state (FACTS 5)."""
    config = {"parallel": {"pipeline": {"size": 4, "microbatches": 4}}}
    with paramp.launch_from_torch(config) as context:
        model = nn.Sequential(*(Counting() for _ in range(4)))
        engine, *_ = paramp.initialize(
            model, torch.optim.SGD(model.parameters(), lr=0.1), lambda out, y: (out - y).mean()
        )
        torch.manual_seed(5)
        engine.forward_backward(torch.ones(8, 2), torch.zeros(8, 2))
        counter = next(module for module in engine.module.modules() if isinstance(module, Counting))
        assert counter.calls == 4
        with context.activation_stream():
            assert counter.drawn[-4:] == [torch.rand(()).item() for _ in range(4)]
        state = torch.get_rng_state()
        torch.manual_seed(5)
        assert torch.equal(state, torch.get_rng_state())


@on_ranks(4)
def test_batches_of_several_shapes(world):
    config = {"parallel": {"pipeline": {"size": 4, "microbatches": 4}}}
    with paramp.launch_from_torch(config):
        model = chain(3, 3, 3, 3, 3)
        reference = chain(3, 3, 3, 3, 3)
        reference.load_state_dict(model.state_dict())
        engine, *_ = paramp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.functional.mse_loss)
        for size in (4, 8, 4, 12):
            generator = torch.Generator().manual_seed(size)
            x, y = torch.randn(size, 3, generator=generator), torch.randn(size, 3, generator=generator)
            expected = nn.functional.mse_loss(reference(x), y).item()
            assert engine.forward_backward(x, y).item() == pytest.approx(expected, abs=1e-6)
            assert engine.evaluate(x, y).item() == pytest.approx(expected, abs=1e-6)
            engine.zero_grad()


@on_ranks(4)
def test_activations_travel_in_the_compute_dtype(world):
    import torch.distributed as dist

    sent = []
    original = dist.isend

    for precision, dtype in (("16-mixed", torch.float16), ("bf16-naive", torch.bfloat16), ("32-true", torch.float32)):
        config = {"parallel": {"pipeline": 4}, "precision": precision}
        with paramp.launch_from_torch(config):
            model = chain(3, 3, 3, 3, 3)
            engine, *_ = paramp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.functional.mse_loss)
            x = torch.ones(8, 3)
            engine.forward_backward(x, x)  # finds shapes first
            from torch.distributed.pipelining import stage

            class Spy(stage.dist.P2POp):
                def __new__(cls, op, tensor, *args, **kwargs):
                    if op is original:
                        sent.append(tensor.dtype)
                    return super().__new__(cls, op, tensor, *args, **kwargs)

            saved, stage.dist.P2POp = stage.dist.P2POp, Spy
            try:
                sent.clear()
                engine.forward_backward(x, x)
            finally:
                stage.dist.P2POp = saved
        assert set(sent) == {dtype}


def test_modules_that_come_again_are_kept():
    shared = nn.ReLU()
    again = nn.Linear(3, 3)
    model = nn.Sequential(again, shared, again, shared, nn.Linear(3, 3), shared)
    assert [name for name, _ in units(model)] == list("012345")
    parts = SequentialPartition(model).stages(plan_stages(list(units(model)), 2, ["3"]))
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    assert torch.equal(parts[1](parts[0](x)), model(x))


@on_ranks(4)
def test_awkward_stages_follow_plain_torch(world):
    split = ["2", "4", "5"]
    config = {"parallel": {"pipeline": {"size": 4, "microbatches": 4, "split": split}}}
    reference = awkward_model()
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    with paramp.launch_from_torch(config):
        model = awkward_model()
        engine, *_ = paramp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.functional.mse_loss)
        generator = torch.Generator().manual_seed(1)
        for _ in range(3):
            x, y = (torch.randn(8, 4, 4, generator=generator) for _ in range(2))
            plain.zero_grad()
            loss = nn.functional.mse_loss(reference(x), y)
            loss.backward()
            plain.step()
            assert engine.forward_backward(x, y).item() == pytest.approx(loss.item(), abs=1e-6)
            engine.step()
        for name, value in engine.full_state_dict().items():
            torch.testing.assert_close(value, reference.state_dict()[name], atol=1e-6, rtol=0)


@on_ranks(2)
def test_two_engines_in_one_context_keep_their_own_ties(world):
    def tied():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.ReLU(), nn.Linear(4, 4, bias=False))
        model[2].weight = model[0].weight
        return model

    with paramp.launch_from_torch({"parallel": {"pipeline": 2}}):
        models = [tied(), tied(), chain(4, 4, 4)]
        engines = [
            paramp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.5), nn.functional.mse_loss)[0]
            for model in models
        ]
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))
        for engine in engines:
            for _ in range(3):
                engine.forward_backward(x, x)
                engine.step()
        for engine in engines[:2]:
            weights = engine.full_state_dict()
            assert torch.equal(weights["0.weight"], weights["2.weight"])


@on_ranks(4)
def test_a_tie_that_the_plan_shards_differently_is_an_error_on_every_rank(world):
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    for parallel in ({"pipeline": 2, "tensor": 2}, {"data": 2, "tensor": 2}):
        with paramp.launch_from_torch({"parallel": parallel}):
            model = chain(4, 4, 4)
            model[1].weight = model[0].weight
            plan = {"0": ColwiseParallel(), "1": RowwiseParallel(input_layouts=Shard(-1))}
            with pytest.raises(paramp.ConfigError, match=r"0\.weight and 1\.weight are one parameter"):
                paramp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), plan=plan)


class Adding(nn.Module):
    """Changes its input in place, and grows a buffer."""

    def __init__(self):
        super().__init__()
        self.linear, self.position = nn.Linear(4, 4), nn.Parameter(torch.ones(4))
        self.register_buffer("cache", torch.zeros(0, 4), persistent=False)

    def forward(self, x):
        if len(self.cache) < len(x):
            self.register_buffer("cache", torch.full((len(x), 4), 0.5), persistent=False)
        x += self.position
        return self.linear(x) + self.cache[: len(x)]


@on_ranks(2)
def test_stages_may_change_what_they_receive_and_grow_buffers(world):
    def build():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), Adding(), Adding())

    reference = build()
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))
    loss = nn.functional.mse_loss(reference(x), x)
    loss.backward()
    with paramp.launch_from_torch({"parallel": {"pipeline": {"size": 2, "microbatches": 2, "split": ["1"]}}}):
        model = build()
        engine, *_ = paramp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.functional.mse_loss)
        engine._runner.pipeline._probe(Batch((torch.ones(2, 4),)))
        assert not any(len(buffer) for buffer in engine.module.buffers())
        assert engine.forward_backward(x, x).item() == pytest.approx(loss.item(), abs=1e-6)
        for name, parameter in engine.named_parameters():
            torch.testing.assert_close(parameter.grad, reference.get_parameter(name).grad, atol=1e-6, rtol=0)


class Sum(nn.Module):
    """Its input's gradient is expanded."""

    def forward(self, x):
        return x.sum(1, keepdim=True).repeat(1, 4)


class Transposed(nn.Linear):
    """Its input's gradient is transposed."""

    def forward(self, x):
        return (self.weight @ x.t()).t()


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-zero-bubble", "zbv"])
@on_ranks(2)
def test_gradients_of_any_strides_are_sent(world, schedule):
    def build():
        torch.manual_seed(0)
        layers = [nn.Linear(4, 4), Sum(), nn.Linear(4, 4), Transposed(4, 4, bias=False), Sum(), nn.Linear(4, 4)]
        return nn.Sequential(*layers)

    reference = build().double()
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    nn.functional.mse_loss(reference(x.double()), x.double()).backward()
    split = ["3"] if schedule == "1f1b" else ["1", "3", "4"]
    pipeline = {"size": 2, "microbatches": 4, "schedule": schedule, "split": split}
    with paramp.launch_from_torch({"parallel": {"pipeline": pipeline}, "precision": "64-true"}):
        model = build()
        engine, *_ = paramp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.functional.mse_loss)
        engine.forward_backward(x, x.double())  # torch 2.11 has no backward of a loss of two dtypes
        for name, parameter in engine.named_parameters():
            torch.testing.assert_close(parameter.grad, reference.get_parameter(name).grad, atol=1e-12, rtol=0)


@on_ranks(2)
def test_a_stage_that_fails_is_an_error_on_every_rank(world):
    with paramp.launch_from_torch({"parallel": {"pipeline": {"size": 2, "split": ["2"]}}}):
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(3, 3))
        engine, *_ = paramp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.functional.mse_loss)
        with pytest.raises(
            paramp.ConfigError, match=r"stage 1 of 2 fails on a microbatch of inputs\[0\] \(2, 4\): RuntimeError: "
        ):
            engine.forward_backward(torch.ones(4, 4), torch.ones(4, 3))


@on_ranks(2)
def test_models_that_a_partition_would_change_are_an_error_on_every_rank(world):
    def hooked(name):
        model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
        model.get_submodule(name).register_forward_pre_hook(lambda module, inputs: (inputs[0] * 0.1,))
        return model

    norm = nn.BatchNorm1d(4)
    twice = nn.Sequential(nn.Linear(4, 4), norm, nn.Linear(4, 4), norm)
    with torch.device("meta"):
        absent = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), Adding())
    for model, message in (
        (hooked(""), r"the model has hooks \(.*<lambda>\), but is split into stages"),
        (hooked("1"), r"1 has hooks \(.*<lambda>\)"),
        (hooked("1.0"), None),
        (twice, r"'1' \(BatchNorm1d\) is called on several stages"),
        (absent, r"model: 3 \(Adding\) is on the meta device"),
    ):
        split = ["1.1" if len(model) == 2 else "2"]
        with paramp.launch_from_torch({"parallel": {"pipeline": {"size": 2, "split": split}}}):

            def start(model=model):
                paramp.initialize(model, lambda parameters: torch.optim.SGD(parameters, lr=0.1))

            if message is None:
                start()
                continue
            with pytest.raises(ValueError, match=message):
                start()


@on_ranks(4)
def test_a_style_that_does_not_fit_a_module_is_an_error_on_every_rank(world):
    with paramp.launch_from_torch({"parallel": {"pipeline": {"size": 2, "split": ["1"]}, "tensor": 2}}):
        model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        with pytest.raises(paramp.ConfigError, match="plan: '1' is a LayerNorm: Colwise supports Linear an"):
            paramp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), plan={"1": "colwise"})
