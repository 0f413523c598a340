"""Families of Hugging Face models over tensor and pipeline ranks, against the model itself in one plain fp32 loop.

Each cell trains a small random model for three steps on padded batches, with the loss of its own forward. Losses and
the way of every weight are compared. The optimizer is SGD, because Adam hides a gradient of half the size. What comes
out is the table in ``docs/models.md``.
"""

import functools
from pathlib import Path

import pytest
import torch
from families import cases as chosen
from families import family
from matrix import check_table, from_small_scale
from pool import on_ranks, run_on_ranks
from reference import UNITS_WEIGHTS, rank_slice, rounding

import paramp
from paramp.optim.replicated_gradients import let_differ
from paramp.parallel.huggingface.pretrained_plan import pretrained_plan
from paramp.parallel.model_families import adapter_for
from paramp.parallel.partition import plan_stages

pytest.importorskip("transformers")

from pretrained import FAMILIES, batches, build, plain_losses

DOCUMENT = Path(__file__).parents[2] / "docs" / "models.md"
STEPS = 3
UNITS_LOSS = 2
"""Allowed relative distance of a loss from that in fp32, in rounding errors of the mode's dtype; up to 0.7 is measured.
Of a weight's way up to 17 are, of 32 allowed."""
LAYOUTS = {
    "tp2": (2, {"tensor": 2}),
    "pp2": (2, {"pipeline": {"size": 2, "microbatches": 2}}),
    "tp2·pp2": (4, {"tensor": 2, "pipeline": {"size": 2, "microbatches": 2}}),
    "fsdp2": (2, {"data": {"shard": 2}}),
    "hsdp2x2": (4, {"data": {"replicate": 2, "shard": 2}}),
    "fsdp2·tp2": (4, {"data": {"shard": 2}, "tensor": 2}),
    "fsdp2·pp2": (4, {"data": {"shard": 2}, "pipeline": {"size": 2, "microbatches": 2}}),
}
MODES = ("16-mixed", "16-naive")
COLUMNS = [(layout, mode) for layout in ("tp2", "pp2", "tp2·pp2") for mode in MODES] + [
    ("fsdp2", "16-mixed"),
    *((layout, "16-naive") for layout in ("hsdp2x2", "fsdp2·tp2", "fsdp2·pp2")),
]
EVERYTHING = [(name, layout, mode) for layout, mode in COLUMNS for name in FAMILIES]
PART = {
    ("Mixtral", "tp2", "16-mixed"),
    ("T5", "tp2", "16-naive"),
    ("BERT", "pp2", "16-naive"),
    ("Qwen3", "tp2·pp2", "16-mixed"),
    ("GPT-2", "fsdp2·pp2", "16-naive"),
}
CELLS = chosen("huggingface", EVERYTHING, PART, 6)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


@functools.cache
def plain_training(name):
    """Losses, and how far each trained weight has gone, in a plain loop."""
    model = build(name)
    start = {key: value.detach().clone() for key, value in model.named_parameters() if value.requires_grad}
    losses = plain_losses(model, name, STEPS, sgd(model.parameters()))
    return losses, {key: model.get_parameter(key).detach() - value for key, value in start.items()}


def train(name, plan=None, *, compared=True):
    model = build(name)
    start = {key: value.detach().clone() for key, value in model.named_parameters()}
    engine, *_ = paramp.initialize(model, sgd, plan=plan)
    if not compared:
        let_differ(engine._weights.gradients)  # else the first step refuses it
    losses = []
    axis = engine.context.dp
    for batch in batches(name, STEPS):
        own = {key: rank_slice(value, axis.rank, axis.size) for key, value in batch.items()}
        losses.append(engine.forward_backward(own).item())
        assert engine.step().stepped
        engine.zero_grad()
    return losses, {key: value - start[key] for key, value in engine.full_state_dict().items() if key in start}


def train_all(world, parallel, mode, names):
    """The cells of one layout and mode: one launch serves all of them."""
    with paramp.launch_from_torch({"parallel": parallel, "precision": from_small_scale(mode)}):
        cells = {name: train(name) for name in names}
    return cells if world.rank == 0 else None


def apart(actual, expected, mode):
    """The largest relative distances of a loss and of a weight's way, in rounding errors of the mode's dtype."""
    losses = max(abs(a - b) / b for a, b in zip(actual[0], expected[0], strict=True))
    # Some gradients are zero but for rounding, as those of keys' biases: they count as 2 % of the largest.
    least = 0.02 * max(way.square().mean().sqrt() for way in expected[1].values())
    ways = max(
        ((actual[1][key] - way).norm() / (way.norm() + least * way.numel() ** 0.5)).item()
        for key, way in expected[1].items()
    )
    return losses / rounding(mode), ways / rounding(mode)


@pytest.fixture(scope="module")
def cells():
    """``cells(name, layout, mode)``: what it came to; those of one layout and mode are run together."""

    @functools.cache
    def compute(layout, mode):
        size, parallel = LAYOUTS[layout]
        names = [name for name, *place in CELLS if place == [layout, mode]]
        return run_on_ranks(size, __name__, "train_all", {"parallel": parallel, "mode": mode, "names": names})[0]

    return lambda name, layout, mode: compute(layout, mode)[name]


@pytest.fixture(scope="module")
def green():
    """The cells whose test has passed, as row and column of the table."""
    return set()


@family
@pytest.mark.parametrize(("name", "layout", "mode"), CELLS)
def test_a_family_follows_plain_torch(name, layout, mode, cells, green):
    losses, ways = apart(cells(name, layout, mode), plain_training(name), mode)
    assert losses <= UNITS_LOSS, f"losses {losses:.2f} units apart"
    assert ways <= UNITS_WEIGHTS, f"weights {ways:.2f} units apart"
    green.add((name, f"{layout} {mode}"))


@on_ranks(2)
def test_the_tolerance_rejects_a_gradient_of_one_ranks_heads(world):
    """Without its style the norm of queries gets the gradient of each rank's own heads."""
    with paramp.launch_from_torch({"parallel": {"tensor": 2}, "precision": from_small_scale("16-naive")}):
        plan = pretrained_plan(build("Qwen3"), 2, False)
        plan = {key: style for key, style in plan.items() if not key.endswith("0.self_attn.q_norm")}
        halved = train("Qwen3", plan, compared=False)
    assert apart(halved, plain_training("Qwen3"), "16-naive")[1] > 2 * UNITS_WEIGHTS


def stages_of(model, num_stages, split):
    partition = adapter_for(model).partition(num_stages, None if num_stages == 2 else split)
    return partition.stages(plan_stages(partition.units, num_stages, split))


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("T5", ["encoder.block.1", "decoder.embed_tokens", "decoder.block.1"]),
        ("T5", ["encoder.final_layer_norm", "decoder.block.0", "lm_head"]),
        ("LLaVA", ["model.vision_tower.encoder.layers.3", "model.language_model.embed_tokens", "lm_head"]),
        ("Whisper", ["encoder.conv2", "encoder.embed_positions", "encoder.layers.0"]),
    ],
)
def test_stages_one_after_another_are_the_model(name, split):
    """Wherever it is split: between towers, within one, and where several values cross."""
    model, expected = build(name), build(name)
    stages = stages_of(model, 4, split)
    held = {key for stage in stages for key, _ in stage.named_parameters(remove_duplicate=False)}
    assert held == {key for key, _ in model.named_parameters(remove_duplicate=False)}
    batch = next(batches(name, 1))
    for _ in range(2):  # the first run finds out what is sent
        value = stages[0](**batch)
        for stage in stages[1:]:
            value = stage(value, **batch)
    output = expected(**batch)
    torch.testing.assert_close(value.logits, output.logits)
    output.loss.backward()
    value.loss.backward()
    for key, parameter in expected.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(model.get_parameter(key).grad, parameter.grad, atol=1e-5, rtol=1e-4)


def test_a_split_that_loses_a_value_is_an_error():
    """The hidden states before the last vision layer are used behind the tower."""
    first, second = stages_of(build("LLaVA"), 2, ["model.vision_tower.post_layernorm"])
    batch = next(batches("LLaVA", 1))
    with pytest.raises(paramp.ConfigError, match=r"uses outputs of earlier stages .*post_layernorm"):
        second(first(**batch), **batch)


@family
def test_the_documents_table_is_what_came_out(green, request):
    """Last in the file, so that the cells have run. ``make matrix``, which runs all of them, writes the table anew."""
    columns, write = [f"{layout} {mode}" for layout, mode in COLUMNS], request.config.getoption("--write-matrix")
    check_table(DOCUMENT, "families", "family", [*FAMILIES], columns, green, write)
