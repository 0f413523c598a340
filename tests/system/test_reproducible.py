"""``reproducible=True``: training with the same bits on every layout."""

from dataclasses import replace
from functools import partial
from itertools import combinations

import pytest
import torch
from exact_tasks import TASKS
from exact_training import LAYOUTS, Part, Run, assert_same_bits, reference, trained, trained_in_modes
from families import SEED, WHOLE, cases, family, number
from pool import on_ranks, run_on_ranks
from torch import nn

import paramp
from paramp.config.reproducible import MODES
from paramp.config.schedules import SCHEDULES

SKIPPED = {"16-mixed": 3, "16-naive": 3}
"""The least steps of the GPT that overflow."""
STEPS = 100 if WHOLE else 20
GPT = [(layout, mode) for layout in LAYOUTS for mode in MODES if layout != "1"]
IS_PART = not (WHOLE or SEED)
STEPS_OF_PART = {"32-true": 5, "16-mixed": 7, "bf16-naive": 5, "16-naive": 7, "bf16-mixed": 5}
"""Mode -> steps: 5 that are made, and for fp16 2 that overflow."""
PART = {
    "tp2": ("32-true", "16-mixed", "bf16-naive"),
    "tp2 + sp": ("bf16-naive",),
    "pp2": ("32-true",),
    "dp2": ("16-mixed", "bf16-naive"),
    "dp2 + zero1": ("32-true",),
    "fsdp2": ("32-true", "16-mixed"),
    "pp2 zero-bubble": ("16-mixed",),
    "hsdp2x2": ("16-mixed",),
    "dp2·tp2": ("bf16-mixed",),
    "pp2·tp2": ("16-naive",),
    "fsdp2·tp2": ("bf16-naive",),
    "pp2·fsdp2": ("32-true",),
}
"""Layout -> the modes of a default run, which one launch of ranks trains."""
SMALL_GPT = "small gpt of 4 layers"  # as many as there are stages
TIMEOUT = 1200.0
pytestmark = pytest.mark.timeout(2 * TIMEOUT)  # 100 steps take minutes, on one process and on a layout


def has_same_bits_in_part_of_modes(layout):
    task = SMALL_GPT if layout == "pp2 zero-bubble" else "small gpt"
    found = trained_in_modes(task, {mode: STEPS_OF_PART[mode] for mode in PART[layout]}, layout)
    for mode, trace in found.items():
        expected = reference(task, mode, STEPS_OF_PART[mode])
        made = [stepped for *_, stepped in expected["steps"]]
        assert (expected["num_skipped"], sum(made)) == (2 * mode.startswith("16"), 5)
        assert_same_bits(trace, expected)


@family
@pytest.mark.parametrize(
    ("layout", "mode"),
    [(layout, "part") for layout in PART] if IS_PART else cases("reproducible gpt", GPT, (), 3),
)
def test_a_gpt_has_the_same_bits(layout, mode):
    if mode == "part":
        has_same_bits_in_part_of_modes(layout)
        return
    expected = reference("gpt", mode, STEPS)
    assert expected["num_skipped"] >= SKIPPED.get(mode, 0)
    assert_same_bits(trained("gpt", mode, layout, Part(0, STEPS), TIMEOUT), expected)


def test_the_part_has_layouts_of_every_kind_and_every_mode():
    """Each axis alone, each with what it may have besides, and each two of them together."""
    assert {mode for modes in PART.values() for mode in modes} == {*MODES}
    kinds = [LAYOUTS[layout][1] for layout in PART]
    alone = [{"tensor": 2}, {"tensor": 2, "sequence_parallel": True}, {"pipeline": 2}, {"data": 2}]
    alone += [{"data": 2, "zero": 1}, {"data": {"shard": 2}}, {"data": {"replicate": 2, "shard": 2}}]
    assert [kind for kind in alone if kind not in kinds] == []
    schedules = [kind["pipeline"]["schedule"] for kind in kinds if isinstance(kind.get("pipeline"), dict)]
    assert any(SCHEDULES[name].splits_backward for name in schedules)
    axes = [{*kind} & {"tensor", "pipeline", "data"} for kind in kinds]
    assert [pair for pair in combinations(("tensor", "pipeline", "data"), 2) if {*pair} not in axes] == []


@pytest.mark.cuda
@pytest.mark.parametrize("mode", ["32-true", "16-mixed", "bf16-naive"])
@pytest.mark.parametrize("layout", ["tp2", "pp2", "dp2 + zero1"])
def test_ranks_on_gpus_have_the_same_bits(layout, mode):
    expected = reference("gpt", mode, 4, "cuda")
    assert_same_bits(trained("gpt", mode, layout, Part(0, 4), device="cuda"), expected)


@family
@pytest.mark.parametrize("layout", cases("slices", ["tp4", "dp2·tp2"], ["dp2·tp2"], 1))
def test_with_more_slices_than_ranks_the_bits_are_the_same(layout):
    task, steps = "gpt of 8 slices", number(1, 20)
    expected = reference(task, "32-true", steps)
    assert_same_bits(trained(task, "32-true", layout, Part(0, steps)), expected)
    four = {"chunk": 1, "slices": 4}
    other = trained(task, "32-true", "1", Part(0, steps), reproducible=four)["tensors"]  # the slices matter
    assert other.keys() == expected["tensors"].keys()
    assert other != expected["tensors"]


SMALL_MODES = ["32-true", "16-mixed", "bf16-mixed"]
LLAMAS = ["llama, own loss", "llama, dropout", "llama, dropout, own loss"]
OTHER_LAYOUTS = [layout for layout in LAYOUTS if layout != "1" and "sp" not in layout and "sdp" not in layout]
"""Images and transformers' models have no plan under sequence parallelism; other tests shard parameters."""
SMALL = [
    *(("llama", layout, mode) for layout in OTHER_LAYOUTS for mode in MODES),
    *((task, layout, mode) for task in LLAMAS for layout in ("tp2", "dp2", "pp2", "pp2·tp2") for mode in SMALL_MODES),
    *(("convolutional", layout, mode) for layout in OTHER_LAYOUTS for mode in MODES),
    *(("convolutional, no plan", layout, "16-mixed") for layout in ("dp2", "dp4", "dp2 + zero1", "pp2")),
]
PART_OF_SMALL = [
    ("llama, dropout, own loss", "tp2", "bf16-mixed"),
    ("convolutional", "dp2 + zero1", "16-mixed"),
]


@family
@pytest.mark.parametrize(("task", "layout", "mode"), cases("reproducible models", SMALL, PART_OF_SMALL, 4))
def test_other_models_have_the_same_bits(task, layout, mode):
    if not task.startswith("conv"):
        pytest.importorskip("transformers")
    steps = 10 if WHOLE or SEED else 3
    assert_same_bits(trained(task, mode, layout, Part(0, steps)), reference(task, mode, steps))


REFUSED_IN_TRAINING = {
    "own, shared module": "'4.other.bias', which is tied to '4.inner.bias', is used twice in a forward",
    "own, changing buffer": "the forward of '1', a Residual, changes its buffer 'seen'",
}
OTHERS = [
    *("lora", "gpt2", "llama, tied", "sgd", "adam"),
    *(task for task in TASKS if task.startswith(("gpt, ", "own, ", "vit")) and task not in REFUSED_IN_TRAINING),
]
USES = [
    *((task, layout) for task in OTHERS for layout in ("tp2", "dp2", "pp2")),
    ("gpt, checkpointed", "1"),
    ("gpt, every second checkpointed", "1"),
    ("vit without class token", "tp2 + sp"),
    ("lora", "pp2·tp2"),
    *((task, "dp2 + zero1") for task in ("sgd", "adam")),
    ("small gpt, counted", "dp2"),
]
PART_OF_USES = [
    ("small gpt, counted", "dp2"),
    ("own, called twice", "tp2"),
    ("own, shared parameter", "tp2"),
]
REFERENCES = {
    # What changes nothing in the training has the bits of training without it.
    "gpt, looked at": "gpt",
    "gpt, checkpointed": "gpt",
    "gpt, every second checkpointed": "gpt",
}


@family
@pytest.mark.parametrize(("task", "layout"), cases("reproducible uses", USES, PART_OF_USES, 5))
def test_other_uses_have_the_same_bits(task, layout):
    steps = 6 if task == "gpt, counted" else 5 if task.startswith("small gpt") else 4 if task.startswith("gpt, ") else 3
    mode = "16-mixed" if "gpt, " in task else "32-true"
    expected = reference(REFERENCES.get(task, task), mode, steps)
    assert expected["steps"][-1][-1]  # the last step is made
    assert_same_bits(trained(task, mode, layout, Part(0, steps)), expected)


MORE_LAYOUTS = {
    **{name: ("pp2", {"pipeline": {"size": 2, "schedule": name}}) for name in SCHEDULES},
    "pp2·dp2 + zero1": ("pp2·tp2", {"pipeline": 2, "data": 2, "zero": 1}),
    "dp2·tp2 + zero1": ("dp2·tp2", {"data": 2, "tensor": 2, "zero": 1}),
}
"""Schedules, and products with ZeRO-1: a layout of as many ranks, and the configuration's ``parallel``."""


@family
@pytest.mark.parametrize("name", cases("reproducible layouts", [*MORE_LAYOUTS], ["zbv"], 1))
def test_every_schedule_and_zero_beside_others_have_the_same_bits(name):
    layout, parallel = MORE_LAYOUTS[name]
    task, steps = (SMALL_GPT, 7) if IS_PART else ("gpt", 4)
    found = trained(task, "16-mixed", layout, Part(0, steps), parallel=parallel)
    assert_same_bits(found, reference(task, "16-mixed", steps))


RESUMED = [
    (before, after, mode)
    for before, after in (("tp2", "pp2"), ("dp2", "1"), ("1", "dp2·tp2"), ("dp2 + zero1", "tp2"))
    for mode in ("16-mixed", "bf16-mixed", "16-naive")
]


@family
@pytest.mark.parametrize(
    ("before", "after", "mode"), cases("resumed", RESUMED, [("dp2 + zero1", "tp2", "16-mixed")], 1)
)
def test_a_run_that_was_stopped_goes_on_in_another_layout(before, after, mode, tmp_path):
    steps, path = number(7, 10), str(tmp_path / "checkpoint")
    task, stop = "small gpt" if IS_PART else "gpt", steps // 2
    first = trained(task, mode, before, Part(0, stop, save=path))
    expected = reference(task, mode, steps)
    assert first["steps"] == expected["steps"][:stop]
    assert_same_bits(trained(task, mode, after, Part(stop, steps, load=path)), expected)


@pytest.mark.parametrize("task", REFUSED_IN_TRAINING)
def test_what_a_first_batch_shows_is_refused(task):
    with pytest.raises(AssertionError, match="ConfigError") as caught:
        trained(task, "32-true", "dp2", Part(0, 2))
    assert REFUSED_IN_TRAINING[task] in str(caught.value)


@on_ranks(1)
def test_it_trains_as_plain_torch_does(world):
    """Equal bits alone would also be those of a mistake that every layout makes."""
    sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)  # Adam would blow up the rounding of gradients that are zero
    task = replace(
        TASKS["gpt"], build=partial(TASKS["gpt"].build, dropout=0.0), optimizer=lambda model: sgd(model.parameters())
    )
    config = {"reproducible": {"chunk": 1, "slices": 4}, "gradient_accumulation": 2, "clip_grad_norm": 1.0}
    with paramp.launch_from_torch(config) as context:
        run = Run(context, task)
        for step in range(5):
            assert run.step(step)[-1]
        actual = run.engine.full_state_dict()
    torch.manual_seed(7)
    model = task.build()
    start = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = task.optimizer(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    for step in range(5):
        optimizer.zero_grad()
        for call in range(2):
            x, y = task.batch(2 * step + call)
            (task.criterion(model(x), y) / 2).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    for name, value in model.state_dict().items():
        way, other = value - start[name], actual[name] - start[name]
        assert (way - other).norm() <= 1e-3 * way.norm() + 1e-7, name


def unfit(build=None, *, config=(), optimizer=torch.optim.AdamW, batch=4, plan=None):
    """A training that is refused, by what differs from a small model's; ``batch`` is a number of samples."""
    return {"build": build, "config": dict(config), "optimizer": optimizer, "batch": batch, "plan": plan}


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return self.layer(x) + torch.rand(8)


class SumOfShards(nn.Module):
    """Adds up activations that are sharded over tensor ranks, in a way of its own."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        hidden = self.up(x)
        return self.down(hidden / hidden.norm(dim=-1, keepdim=True))


def small(*layers):
    return nn.Sequential(nn.Linear(8, 8), *layers)


def hooked(parameters):
    optimizer = torch.optim.AdamW(parameters)
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


COLWISE = {"up": "colwise", "down": "rowwise"}
REFUSED = {
    **{
        mode: (1, unfit(config={"precision": mode}), [f"precision: got {mode!r}", "16-mixed"])
        for mode in ("O2", "O3", "fp8-mixed", "16-true", "bf16-true", "64-true")
    },
    "compile": (1, unfit(config={"compile": True}), ["compile: got True, expected False"]),
    "slices": (1, unfit(config={"reproducible": {"slices": 6}}), ["slices: got 6, expected a power of two"]),
    "tp3": (
        3,
        unfit(config={"parallel": {"tensor": 3}}),
        ["parallel.tensor.size: got 3, expected a power of two"],
    ),
    "slices < tp": (
        2,
        unfit(config={"parallel": {"tensor": 2}, "reproducible": {"slices": 1}}),
        ["parallel.tensor.size: got 2", "at most reproducible.slices 1"],
    ),
    "dp3": (
        3,
        unfit(config={"parallel": {"data": 3}}),
        ["parallel.data: got 3 data ranks, expected a power of two"],
    ),
    "reduce_dtype": (1, unfit(config={"reduce_dtype": "fp16"}), ["reduce_dtype: got ", "expected None"]),
    "BatchNorm": (1, unfit(lambda: small(nn.BatchNorm1d(8))), ["'1' is a BatchNorm1d", "GroupNorm"]),
    "LBFGS": (1, unfit(optimizer=torch.optim.LBFGS), ["LBFGS"]),
    "foreach": (1, unfit(optimizer=partial(torch.optim.AdamW, foreach=True)), ["foreach"]),
    "Adagrad": (1, unfit(optimizer=torch.optim.Adagrad), ["Adagrad"]),
    "not fused": (1, unfit(optimizer=partial(torch.optim.AdamW, fused=False)), ["fused=False or foreach=True"]),
    "dampening": (1, unfit(optimizer=partial(torch.optim.SGD, momentum=0.9, dampening=0.5)), ["its dampening"]),
    "step hooks": (1, unfit(optimizer=hooked), ["it has step hooks"]),
    "grad_dtype": (
        1,
        unfit(config={"precision": "16-naive", "grad_dtype": "fp32"}),
        ["grad_dtype: got ", "expected None"],
    ),
    "size": (
        1,
        unfit(lambda: SizedBadly(), plan=COLWISE),
        ["reproducible.slices: got 8, but 'up' has 12 outputs, expected a multiple of 8"],
    ),
    "chunk": (
        1,
        unfit(config={"reproducible": {"chunk": 4}}, batch=6),
        ["batch: got 6 samples on each data rank, expected a multiple of reproducible.chunk 4"],
    ),
    "chunks of a schedule": (
        2,
        unfit(
            lambda: small(nn.Linear(8, 8)),
            config={"reproducible": {"chunk": 4}, "parallel": {"pipeline": 2}},
        ),
        ["which are 1 chunks of reproducible.chunk 4", "microbatches: got 1, expected at least 2"],
    ),
    "random": (1, unfit(Noisy), ["rand", "draws random numbers that depend on the layout"]),
    "sum of shards": (
        2,
        unfit(SumOfShards, config={"parallel": {"tensor": 2}}, plan=COLWISE),
        ["norm", "sharded over 2 tensor ranks"],
    ),
}


class SizedBadly(SumOfShards):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)


def refuse(world, name):
    """The message of the ConfigError that the case ``name`` raises on this rank."""
    _, case, _ = REFUSED[name]
    with pytest.raises(paramp.ConfigError) as caught:
        train_refused(case)
    return str(caught.value)


def train_refused(case):
    with paramp.launch_from_torch({"reproducible": True, **case["config"]}):
        model = (case["build"] or small)()
        optimizer = case["optimizer"](model.parameters())
        engine, *_ = paramp.initialize(model, optimizer, nn.MSELoss(), plan=case["plan"])
        engine.forward_backward(torch.randn(case["batch"], 8), torch.zeros(case["batch"], 8))


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_depend_on_the_layout_is_refused(name):
    ranks, _, parts = REFUSED[name]
    for message in run_on_ranks(ranks, __name__, "refuse", {"name": name}):
        assert [part for part in parts if part not in message] == [], message


@on_ranks(2)
def test_batches_of_different_sizes_are_refused_on_every_rank(world):
    with paramp.launch_from_torch({"reproducible": True, "parallel": {"data": 2}, "gradient_accumulation": 2}):
        model = small()
        engine, *_ = paramp.initialize(model, torch.optim.AdamW(model.parameters()), nn.MSELoss())
        own = 2 + world.rank
        with pytest.raises(Exception, match=f"got {own} chunks of 1 samples on this data rank, but from 2 to 3"):
            engine.forward_backward(torch.randn(own, 8), torch.zeros(own, 8))
        engine.zero_grad()
        engine.forward_backward(torch.randn(2, 8), torch.zeros(2, 8))
        engine.step()
        with pytest.raises(Exception, match="got 3 chunks of 1 samples on this data rank, but 2 in the call before"):
            engine.forward_backward(torch.randn(3, 8), torch.zeros(3, 8))
        engine.zero_grad()
        engine.forward_backward(torch.randn(3, 8), torch.zeros(3, 8))


@on_ranks(1)
def test_a_forward_of_its_own_cannot_be_trained_on(world):
    with paramp.launch_from_torch({"reproducible": True}):
        model = small()
        engine, *_ = paramp.initialize(model, torch.optim.AdamW(model.parameters()), nn.MSELoss())
        with pytest.raises(RuntimeError, match=r"call engine\.forward_backward"):
            engine(torch.randn(2, 8))
        engine.eval()
        x = torch.randn(2, 8)
        torch.testing.assert_close(engine(x), model(x))
        with pytest.raises(RuntimeError, match=r"call engine\.forward_backward"):
            engine.backward(engine.criterion(engine(x), x))


@on_ranks(2)
def test_chunks_of_different_shapes_are_refused_on_every_rank(world):
    with paramp.launch_from_torch({"reproducible": True, "parallel": {"data": 2}}):
        model = small()
        engine, *_ = paramp.initialize(model, torch.optim.AdamW(model.parameters()), nn.MSELoss())
        own = torch.zeros(2, 3 + world.rank, 8)
        with pytest.raises(Exception, match="pad all samples to one length"):
            engine.forward_backward(own, own)


class Gated(nn.Module):
    """A layer that is computed whole on each tensor rank, and used with features that they share."""

    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(8, 1), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        gate = self.gate(x)
        hidden = self.up(x)
        return self.down(hidden * gate.expand(*gate.shape[:-1], hidden.shape[-1]))


@on_ranks(2)
def test_parts_of_a_gradient_are_noticed_on_every_rank(world):
    with paramp.launch_from_torch({"reproducible": True, "parallel": {"tensor": 2}}):
        model = Gated()
        engine, *_ = paramp.initialize(model, torch.optim.AdamW(model.parameters()), nn.MSELoss(), plan=COLWISE)
        engine.forward_backward(torch.ones(2, 3, 8), torch.zeros(2, 3, 8))
        with pytest.raises(RuntimeError, match=r"tensor ranks have different gradients of 'gate\.weight'"):
            engine.step()


@on_ranks(2)
def test_other_functions_of_sharded_logits_are_refused_on_every_rank(world):
    task = TASKS["gpt"]
    with paramp.launch_from_torch({"reproducible": {"slices": 4}, "parallel": {"tensor": 2}}):
        model = task.build()
        engine, *_ = paramp.initialize(model, task.optimizer(model), lambda logits, _: logits.logsumexp(-1).mean())
        with pytest.raises(paramp.ConfigError, match=r"logsumexp in .* expected cross_entropy or elementwise arith"):
            engine.forward_backward(*task.batch(0))


class Strided(nn.Module):
    def forward(self, x):
        return x.transpose(1, 2).contiguous().transpose(1, 2)


@on_ranks(2)
def test_a_stage_that_returns_a_strided_tensor_is_refused_on_every_rank(world):
    with paramp.launch_from_torch({"reproducible": True, "parallel": {"pipeline": {"size": 2, "split": ["2"]}}}):
        model = small(Strided(), nn.Linear(8, 8))
        engine, *_ = paramp.initialize(model, torch.optim.AdamW(model.parameters()), nn.MSELoss())
        with pytest.raises(paramp.ConfigError, match="a pipeline stage returns a strided tensor"):
            engine.forward_backward(torch.ones(2, 3, 8), torch.zeros(2, 3, 8))


@on_ranks(1)
def test_the_gradient_of_a_tied_parameter_is_not_changed_by_hand(world):
    with paramp.launch_from_torch({"reproducible": True}):
        model = small(nn.Linear(8, 8), nn.Linear(8, 8))
        model[2].weight = model[0].weight
        engine, *_ = paramp.initialize(model, torch.optim.AdamW(model.parameters()), nn.MSELoss())
        for change, index in ((True, 1), (False, 0), (True, 0)):
            engine.forward_backward(torch.randn(2, 8), torch.zeros(2, 8))
            if change:
                engine.module[index].weight.grad.mul_(0.5)
            if change and not index:
                with pytest.raises(RuntimeError, match=r"'0.weight', a tied parameter, was changed by hand"):
                    engine.step()
            else:
                assert engine.step().stepped
