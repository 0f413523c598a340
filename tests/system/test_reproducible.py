"""``reproducible=True``: training with the same bits on every layout."""

import contextlib
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
from paramp.config.pipeline_schedules import SCHEDULES
from paramp.config.reproducible import MODES
from paramp.precision.modes import PRESETS

SKIPPED = {"16-mixed": 3, "16-naive": 3}
"""The least steps of the GPT that overflow."""
LONG = {"pp2·dp2·tp2": "16-mixed", "fsdp2·tp2": "bf16-naive", "hsdp2x2": "32-true"}
LONG |= {"pp2 interleaved": "bf16-mixed", "dp2 + zero1": "16-naive"}
"""Layout -> the mode that a whole run trains there for 100 steps; each takes minutes."""
GPT = [(layout, mode) for layout in LAYOUTS for mode in MODES if layout != "1"]
IS_PART = not (WHOLE or SEED)
STEPS_OF_PART = {"32-true": 5, "16-mixed": 7, "bf16-naive": 5, "16-naive": 7, "bf16-mixed": 5}
"""Mode -> steps: 5 that are made, and for fp16 2 that overflow."""
PART = {
    "tp2": ("32-true", "16-mixed"),
    "tp2 + sp": ("bf16-naive",),
    "pp2": ("32-true",),
    "dp2": ("16-mixed",),
    "dp2 + zero1": ("32-true",),
    "fsdp2": ("16-mixed",),
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
pytestmark = pytest.mark.timeout(2 * TIMEOUT)


@family
@pytest.mark.parametrize(
    ("layout", "mode"),
    [(layout, "part") for layout in PART] if IS_PART else cases("reproducible gpt", GPT, (), 2),
)
def test_a_gpt_has_the_same_bits(layout, mode):
    if mode != "part":
        steps = number(8, 100 if LONG.get(layout) == mode else 12)
        expected = reference("gpt", mode, steps)
        assert expected["num_skipped"] >= SKIPPED.get(mode, 0)
        assert_same_bits(trained("gpt", mode, layout, Part(0, steps), TIMEOUT), expected)
        return
    task = SMALL_GPT if layout == "pp2 zero-bubble" else "small gpt"
    found = trained_in_modes(task, {mode: STEPS_OF_PART[mode] for mode in PART[layout]}, layout)
    for mode, trace in found.items():
        expected = reference(task, mode, STEPS_OF_PART[mode])
        made = sum(stepped for *_, stepped in expected["steps"])
        assert (expected["num_skipped"], made) == (2 * mode.startswith("16"), 5)
        assert_same_bits(trace, expected)


def test_the_part_has_every_mode_and_each_two_axes_together():
    assert {mode for modes in PART.values() for mode in modes} == {*MODES}
    assert len(MODES) == 5  # as docs/index.md says
    axes = [{*LAYOUTS[layout][1]} & {"tensor", "pipeline", "data"} for layout in PART]
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
@pytest.mark.parametrize(("task", "layout", "mode"), cases("reproducible models", SMALL, PART_OF_SMALL, 2))
def test_other_models_have_the_same_bits(task, layout, mode):
    if not task.startswith("conv"):
        pytest.importorskip("transformers")
    steps = 10 if WHOLE else 3
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
@pytest.mark.parametrize(("task", "layout"), cases("reproducible uses", USES, PART_OF_USES, 2))
def test_other_uses_have_the_same_bits(task, layout):
    late = task in ("gpt, counted", "gpt, flushed")  # whose first steps overflow more often
    steps = 6 if late else 5 if task.startswith("small gpt") else 4 if task.startswith("gpt, ") else 3
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
    task, steps = ("gpt", 4) if WHOLE else (SMALL_GPT, 7)
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
    task, stop = "gpt" if WHOLE else "small gpt", steps // 2
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


def samples_of_forwards(world, layout):
    counts = []
    with paramp.launch_from_torch({"reproducible": {"chunk": 2}, "parallel": LAYOUTS[layout][1]}) as context:
        model, x = small(nn.Linear(8, 8)), torch.randn(8 // context.dp.size, 8)
        for layer in model:
            layer.register_forward_pre_hook(lambda _, inputs: counts.append(len(inputs[0])))
        engine_for(lambda: model, plan={"0": "colwise", "1": "rowwise"}).forward_backward(x, x)
    return {*counts}


@pytest.mark.parametrize("layout", ["1", "dp2", "tp2", "pp2", "fsdp2", "dp2 + zero1", "dp2·tp2"])
def test_a_forward_has_the_samples_of_a_chunk(layout):
    ranks = LAYOUTS[layout][0]
    assert run_on_ranks(ranks, __name__, "samples_of_forwards", {"layout": layout}) == [{2}] * ranks


class Noisy(nn.Linear):
    def forward(self, x):
        return super().forward(x) + torch.rand(8)


class SumOfShards(nn.Module):
    """Adds up activations that are sharded over tensor ranks, in a way of its own."""

    def __init__(self, width=16):
        super().__init__()
        self.up, self.down = nn.Linear(8, width), nn.Linear(width, 8)

    def forward(self, x):
        hidden = self.up(x)
        return self.down(hidden / hidden.norm(dim=-1, keepdim=True))


class Gated(SumOfShards):
    """A layer that is computed whole on each tensor rank, and used with features that they share."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(8, 1)

    def forward(self, x):
        gate, hidden = self.gate(x), self.up(x)
        return self.down(hidden * gate.expand(*gate.shape[:-1], hidden.shape[-1]))


class Conv1D(nn.Module):
    """transformers' layer of GPT-2, whose weight is (inputs, outputs)."""

    def __init__(self, outputs, inputs):
        super().__init__()
        self.nf, self.weight, self.bias = outputs, nn.Parameter(torch.ones(inputs, outputs)), None


class Fused(nn.Module):
    def __init__(self, outputs):
        super().__init__()
        self.up = Conv1D(outputs, 16)


class Strided(nn.Module):
    def forward(self, x):
        return x.transpose(1, 2).contiguous().transpose(1, 2)


def small(*layers):
    return nn.Sequential(nn.Linear(8, 8), *layers)


def hooked(parameters):
    optimizer = torch.optim.AdamW(parameters)
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


COLWISE = {"up": "colwise", "down": "rowwise"}
CUT = {"size": 2, "split": ["2"]}


def config(parallel=None, **values):
    return {"config": ({"parallel": parallel} if parallel else {}) | values}


def adamw(**options):
    return {"optimizer": partial(torch.optim.AdamW, **options)}


REFUSED = {
    **{
        mode: (1, config(precision=mode), [f"precision: got {mode!r}", "16-mixed"])
        for mode in PRESETS
        if mode not in MODES
    },
    "compile": (1, config(compile=True), ["compile: got True, expected False"]),
    "slices": (1, config(reproducible={"slices": 6}), ["slices: got 6, expected a power of two"]),
    "tp3": (3, config({"tensor": 3}), ["parallel.tensor.size: got 3, expected a power of two"]),
    "slices < tp": (
        2,
        config({"tensor": 2}, reproducible={"slices": 1}),
        ["parallel.tensor.size: got 2", "at most reproducible.slices 1"],
    ),
    "dp3": (3, config({"data": 3}), ["parallel.data: got 3 data ranks, expected a power of two"]),
    "reduce_dtype": (1, config(reduce_dtype="fp16"), ["reduce_dtype: got ", "expected None"]),
    "grad_dtype": (1, config(precision="16-naive", grad_dtype="fp32"), ["grad_dtype: got ", "expected None"]),
    "BatchNorm": (1, {"build": lambda: small(nn.BatchNorm1d(8))}, ["'1' is a BatchNorm1d", "GroupNorm"]),
    "LBFGS": (1, {"optimizer": torch.optim.LBFGS}, ["LBFGS"]),
    "Adagrad": (1, {"optimizer": torch.optim.Adagrad}, ["Adagrad"]),
    "foreach": (1, adamw(foreach=True), ["foreach"]),
    "not fused": (1, adamw(fused=False), ["fused=False or foreach=True"]),
    "dampening": (1, {"optimizer": partial(torch.optim.SGD, momentum=0.9, dampening=0.5)}, ["its dampening"]),
    "step hooks": (1, {"optimizer": hooked}, ["it has step hooks"]),
    "size": (
        1,
        {"build": lambda: SumOfShards(12), "plan": COLWISE},
        ["reproducible.slices: got 8, but 'up' has 12 outputs, expected a multiple of 8"],
    ),
    "fused size": (
        1,
        {"build": partial(Fused, 24), "plan": {"up": "packed_colwise_2"}},
        ["reproducible.slices: got 8, but 'up' has 24 outputs, expected a multiple of 16"],
    ),
    "chunk": (
        1,
        config(reproducible={"chunk": 4}) | {"batch": (6, 8)},
        ["batch: got 6 samples on each data rank, expected a multiple of reproducible.chunk 4"],
    ),
    "chunks of a schedule": (
        2,
        config({"pipeline": 2}, reproducible={"chunk": 4}) | {"build": lambda: small(nn.Linear(8, 8))},
        ["which are 1 chunks of reproducible.chunk 4", "microbatches: got 1, expected at least 2"],
    ),
    "random": (1, {"build": lambda: Noisy(8, 8)}, ["rand", "draws random numbers that depend on the layout"]),
    "sum of shards": (
        2,
        config({"tensor": 2}) | {"build": SumOfShards, "plan": COLWISE},
        ["norm", "sharded over 2 tensor ranks"],
    ),
    "strided": (
        2,
        config({"pipeline": CUT}) | {"build": lambda: small(Strided(), nn.Linear(8, 8)), "batch": (2, 3, 8)},
        ["a pipeline stage returns a strided tensor"],
    ),
}
"""Ranks, what differs from a training of a small model, and parts of the message."""


def engine_for(build=small, optimizer=torch.optim.AdamW, plan=None):
    model = build()
    return paramp.initialize(model, optimizer(model.parameters()), nn.MSELoss(), plan=plan)[0]


def refuse(world, name):
    """The message of the ConfigError that the case ``name`` raises on this rank."""
    case = dict(REFUSED[name][1])
    values, batch = case.pop("config", {}), case.pop("batch", (4, 8))
    with pytest.raises(paramp.ConfigError) as caught, paramp.launch_from_torch({"reproducible": True, **values}):
        engine_for(**case).forward_backward(torch.randn(batch), torch.zeros(batch))
    return str(caught.value)


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_depend_on_the_layout_is_refused(name):
    ranks, _, parts = REFUSED[name]
    for message in run_on_ranks(ranks, __name__, "refuse", {"name": name}):
        assert [part for part in parts if part not in message] == [], message


@on_ranks(2)
def test_batches_of_different_sizes_are_refused_on_every_rank(world):
    with paramp.launch_from_torch({"reproducible": True, "parallel": {"data": 2}, "gradient_accumulation": 2}):
        engine = engine_for()

        def train(*shape):
            engine.forward_backward(torch.zeros(shape), torch.zeros(shape))

        own = 2 + world.rank
        with pytest.raises(Exception, match=f"got {own} chunks of 1 samples on this data rank, but from 2 to 3"):
            train(own, 8)
        engine.zero_grad()
        train(2, 8)
        engine.step()
        with pytest.raises(Exception, match="got 3 chunks of 1 samples on this data rank, but 2 in the call before"):
            train(3, 8)
        engine.zero_grad()
        train(3, 8)
        engine.zero_grad()
        with pytest.raises(Exception, match="pad all samples to one length"):
            train(2, own, 8)


@on_ranks(1)
def test_a_forward_of_its_own_cannot_be_trained_on(world):
    with paramp.launch_from_torch({"reproducible": True}):
        model, x = small(), torch.randn(2, 8)
        engine = engine_for(lambda: model)
        with pytest.raises(RuntimeError, match=r"call engine\.forward_backward"):
            engine(x)
        engine.eval()
        torch.testing.assert_close(engine(x), model(x))
        with pytest.raises(RuntimeError, match=r"call engine\.forward_backward"):
            engine.backward(engine.criterion(engine(x), x))


@pytest.mark.parametrize("zeros", [False, True])
@on_ranks(2)
def test_parts_of_a_gradient_are_noticed_on_every_rank(world, zeros):
    """In the second step behind a layer of zeros."""

    def build():
        model = Gated()
        if zeros:
            nn.init.zeros_(model.down.weight)
        return model

    words = r"tensor ranks have different gradients of 'gate\.weight'.* behind the rowwise layer"
    with paramp.launch_from_torch({"reproducible": True, "parallel": {"tensor": 2}}):
        engine = engine_for(build, plan=COLWISE)
        for _ in range(zeros):
            engine.forward_backward(torch.ones(2, 3, 8), torch.ones(2, 3, 8))
            engine.step()
            engine.zero_grad()
        engine.forward_backward(torch.ones(2, 3, 8), torch.zeros(2, 3, 8))
        with pytest.raises(paramp.ConfigError if zeros else RuntimeError, match=words):
            engine.step()


@on_ranks(2)
def test_other_functions_of_sharded_logits_are_refused_on_every_rank(world):
    task = TASKS["gpt"]
    with paramp.launch_from_torch({"reproducible": {"slices": 4}, "parallel": {"tensor": 2}}):
        model = task.build()
        engine, *_ = paramp.initialize(model, task.optimizer(model), lambda logits, _: logits.logsumexp(-1).mean())
        with pytest.raises(paramp.ConfigError, match=r"logsumexp in .* expected cross_entropy or elementwise arith"):
            engine.forward_backward(*task.batch(0))


@on_ranks(1)
def test_the_gradient_of_a_tied_parameter_is_not_changed_by_hand(world):
    with paramp.launch_from_torch({"reproducible": True}):
        model = small(nn.Linear(8, 8), nn.Linear(8, 8))
        model[2].weight = model[0].weight
        engine = engine_for(lambda: model)
        for changed, error in ((1, None), (0, r"'0.weight', a tied parameter, was changed by hand")):
            engine.forward_backward(torch.randn(2, 8), torch.zeros(2, 8))
            engine.module[changed].weight.grad.mul_(0.5)
            with pytest.raises(RuntimeError, match=error) if error else contextlib.nullcontext():
                assert engine.step().stepped
