"""Batches of several inputs, in tuples and mappings, and outputs with names, against plain torch."""

import dataclasses
import functools
import re
from typing import NamedTuple

import pytest
import torch
from counting import Collectives
from families import cases, family, number
from masked_transformer import LENGTH, PLAN, Reply, assistant, dialogue
from pool import on_ranks, run_on_ranks
from reference import assert_follows, assert_strays
from torch import nn
from torch.nn import functional as F

import paramp
from paramp.parallel.batches import Batch

LAYOUTS = {
    "dp4": {"data": 4},
    "dp2-tp2": {"tensor": 2, "data": 2},
    "pp2": {"pipeline": {"size": 2, "microbatches": 4}, "data": 2},
    "pp2-tp2": {"pipeline": {"size": 2, "microbatches": 2}, "tensor": 2},
    "interleaved": {"pipeline": {"size": 2, "schedule": "interleaved-1f1b", "microbatches": 2}, "data": 2},
    "zbv": {"pipeline": {"size": 2, "schedule": "zbv", "microbatches": 4}, "data": 2},
}
adamw = functools.partial(torch.optim.AdamW, lr=1e-3, eps=1e-4)


def own(context, batch):
    """This data rank's part of a batch, with the mask of all rows marked."""
    size, rank = context.dp.size, context.dp.rank

    def part(value):
        if isinstance(value, dict):
            return {name: part(inner) for name, inner in value.items()}
        split = isinstance(value, torch.Tensor) and value.ndim and value.shape[0] > 1
        return value.chunk(size)[rank] if split else value

    return {**part(batch), "bias": paramp.whole(batch["bias"])}


def engine_for(context, *, optimizer=adamw, criterion=None):
    plan = PLAN if context.tp.size > 1 else None
    return paramp.initialize(assistant(), optimizer, criterion, plan=plan)[0]


@family
@pytest.mark.parametrize("layout", cases("any inputs", [*LAYOUTS], {"dp2-tp2", "pp2-tp2", "interleaved"}, 1))
@on_ranks(4)
def test_a_model_of_ones_own_follows_plain_torch_unchanged(world, layout):
    model = assistant()
    optimizer = adamw(model.parameters())
    with paramp.launch_from_torch({"parallel": LAYOUTS[layout]}) as context:
        engine = engine_for(context)
        for step in range(number(10, 20)):
            batch = dialogue(step)
            optimizer.zero_grad()
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            assert engine.forward_backward(own(context, batch)).item() == pytest.approx(loss.item(), abs=1e-5)
            assert engine.step().stepped
        for name, value in engine.full_state_dict().items():
            torch.testing.assert_close(value, model.state_dict()[name], atol=2e-5, rtol=0, msg=name)
        batch = dialogue(30)
        expected = model.eval()(**batch)
        assert engine.evaluate(own(context, batch)).item() == pytest.approx(expected.loss.item(), abs=1e-5)
        engine.eval()
        reply = engine({**batch, "bias": paramp.whole(batch["bias"])})
        assert isinstance(reply, Reply)
        torch.testing.assert_close(reply.logits, expected.logits.detach(), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(reply.hidden[0], expected.hidden[0].detach(), atol=1e-5, rtol=1e-5)
        assert reply.loss.item() == pytest.approx(expected.loss.item(), abs=1e-5)
        # Other inputs, for which other code runs: positional ones, without a mask, without labels.
        shown = engine(batch["ids"], batch["mask"])
        torch.testing.assert_close(shown.logits, model(batch["ids"], batch["mask"]).logits.detach(), atol=1e-5, rtol=0)
        assert shown.loss is None


def train(context, *, halve_on_rank=None):
    """As ``reference.train_engine``, on dialogues."""
    start = {name: value.detach().clone() for name, value in assistant().state_dict().items()}
    engine = engine_for(context, optimizer=functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9))
    losses = []
    for step in range(5):
        losses.append(engine.forward_backward(own(context, dialogue(step))).item())
        if context.rank == halve_on_rank:
            for _, parameter in engine.named_parameters():
                parameter.grad.mul_(0.5)
        assert engine.step().stepped
    return losses, {name: value - start[name] for name, value in engine.full_state_dict().items()}


def train_in(precision, parallel, **options):
    with paramp.launch_from_torch({"parallel": parallel, "precision": precision}) as context:
        return train(context, **options)


@on_ranks(4)
def follow(world, precision, expected):
    for layout in ("pp2-tp2", "interleaved"):
        # A batch has 32 labels only, over which rounding does not average out.
        assert_follows(train_in(precision, LAYOUTS[layout]), expected, precision, units=0.5)
    assert_strays(train_in(precision, LAYOUTS["pp2-tp2"], halve_on_rank=3), expected, precision)


MODES = ["16-mixed", "16-naive", "bf16-mixed", "bf16-naive", "O2"]


@family
@pytest.mark.parametrize("precision", cases("any inputs in half", MODES, {"16-naive"}, 1))
def test_half_precision_follows_its_single_process_run(precision):
    expected = train_in(precision, {})
    run_on_ranks(4, __name__, "follow", {"precision": precision, "expected": expected})


class Gate(nn.Module):
    """Two inputs and a tuple of outputs; the second input, one of the keywords, is used on the last stage."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, pair, /, shift=None):
        left, right = pair
        y = self.two(torch.relu(self.one(x * left)))
        return {"sum": y + right if shift is None else y + right * shift, "sign": y > 0}


def gate_loss(output, target):
    return F.mse_loss(output["sum"], target["y"]) + (output["sum"] * target["weight"]).mean()


@pytest.mark.parametrize("layout", ["pp2", "interleaved"])
@on_ranks(4)
def test_tuples_go_to_the_first_stage_and_targets_are_trees(world, layout):
    def build():
        torch.manual_seed(3)
        return Gate()

    generator = torch.Generator().manual_seed(1)
    x, left, right, y = (torch.randn(8, 4, generator=generator) for _ in range(4))
    target = {"y": y, "weight": torch.tensor([0.1, 0.2, 0.3, 0.4]).reshape(1, 4)}
    model = build()
    expected = gate_loss(model(x, (left, right)), target)
    expected.backward()
    parallel = LAYOUTS[layout] if layout == "pp2" else {"pipeline": {"size": 2, "microbatches": 2}, "data": 2}
    with paramp.launch_from_torch({"parallel": parallel}) as context:
        engine, *_ = paramp.initialize(build(), lambda weights: torch.optim.SGD(weights, lr=0.1), gate_loss)

        def part(tensor):
            return tensor.chunk(2)[context.dp.rank]

        inputs = part(x), [part(left), part(right)]
        mine = {"y": part(y), "weight": target["weight"]}
        output, label, loss = engine.execute_schedule(iter([(inputs, mine)]))
        assert loss.item() == pytest.approx(expected.item(), abs=1e-6)
        if context.is_last_stage:
            torch.testing.assert_close(output["sum"], part(model(x, (left, right))["sum"].detach()))
            assert output["sign"].dtype is torch.bool
            assert torch.equal(label["y"], part(y))
        for name, parameter in engine.named_parameters():
            gradient = model.get_parameter(name).grad
            total = parameter.grad.clone()
            torch.distributed.all_reduce(total, group=context.dp.group)
            torch.testing.assert_close(total, gradient, atol=1e-6, rtol=0)
        engine.zero_grad()
        engine.eval()
        shift = torch.full((8, 1), 2.0)
        shown = engine(x, (left, right), shift=shift)
        torch.testing.assert_close(shown["sum"], model(x, (left, right), shift)["sum"].detach())


class Views(NamedTuple):
    x: torch.Tensor
    mask: torch.Tensor | None = None


@dataclasses.dataclass(frozen=True)
class Shown:
    y: torch.Tensor
    more: tuple


class Optional(Gate):
    """Asks for None inside an input, and returns containers inside a dataclass."""

    def forward(self, views):
        y = self.one(views.x)
        y = torch.tanh(y) if views.mask is None else y * views.mask
        y = self.two(y)
        return Shown(y, ({"sign": [y > 0, None]}, "name"))


@on_ranks(2)
def test_what_is_none_inside_an_input_chooses_the_code(world):
    torch.manual_seed(3)
    model = Optional()
    x, mask = torch.randn(4, 4), torch.rand(4, 1)
    with paramp.launch_from_torch({"parallel": {"pipeline": {"size": 2, "microbatches": 2}}}) as context:
        assert context.pp.size == 2
        mine = Optional()
        mine.load_state_dict(model.state_dict())
        engine, *_ = paramp.initialize(mine, functools.partial(torch.optim.SGD, lr=0.1), lambda shown: shown.y.mean())
        for views in (Views(x), Views(x, mask), Views(x)):
            expected = model(views)
            assert engine.forward_backward((views,)).item() == pytest.approx(expected.y.mean().item(), abs=1e-6)
            engine.zero_grad()
            engine.eval()
            shown = engine(views)
            engine.train()
            torch.testing.assert_close(shown.y, expected.y.detach())
            assert torch.equal(shown.more[0]["sign"][0], expected.y > 0)
            assert shown.more[1] == "name"


class Weighted(NamedTuple):
    name: str
    loss: tuple


class Uneven(nn.Linear):
    """Its loss is a sum and a count, which differ between the microbatches."""

    def forward(self, x, rows):
        error = (super().forward(x).squeeze(1) * rows).square()
        return {"dict": dict, "tuple": Weighted}[self.kind](name="y", loss=(error.sum(), rows.sum()))


@pytest.mark.parametrize("kind", ["dict", "tuple"])
def test_a_sum_and_a_count_in_the_output_are_those_of_the_batch(kind):
    x, rows = torch.randn(6, 3), torch.tensor([1, 1, 1, 1, 0, 0])
    model = Uneven(3, 1)
    model.kind = kind
    expected = model(x, rows)
    with paramp.launch_from_torch({"parallel": {"pipeline": {"microbatches": 3}}}):
        engine, *_ = paramp.initialize(model, adamw)
        output, label, _ = engine.execute_schedule(iter([{"x": x, "rows": rows}]), forward_only=True)
    assert label is None
    assert type(output) is type(expected)
    joined, whole = (one["loss"] if kind == "dict" else one.loss for one in (output, expected))
    assert joined[1] == whole[1] == 4
    torch.testing.assert_close(joined[0], whole[0].detach())


class Late(Gate):
    """Its second input is used on the last stage."""

    def forward(self, x, late):
        return self.two(torch.relu(self.one(x))) + late


@on_ranks(2)
def test_keyword_inputs_are_not_sent(world):
    x, late = torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(1))
    with paramp.launch_from_torch({"parallel": {"pipeline": {"size": 2, "microbatches": 2}}}) as context:
        for inputs, each in (((x, late), 2), ({"x": x, "late": late}, 1)):
            engine, *_ = paramp.initialize(Late(), functools.partial(torch.optim.SGD, lr=0.1), F.mse_loss)
            for _ in range(2):  # in the first, shapes are exchanged
                with Collectives() as sent:
                    engine.forward_backward(inputs, x, return_loss=False)
                engine.zero_grad()
            if context.is_first_stage:
                assert sent.counts["send"] == 2 * each


LOW = -1e9


class Scores(nn.Linear):
    """Attention of each position to the keys of a mask that is added to the scores."""

    def forward(self, x, mask):
        x = super().forward(x)
        return torch.softmax((x @ x.mT + mask).float(), -1)


@pytest.mark.parametrize("mode", ["16-mixed", "16-naive"])
def test_a_mask_beyond_fp16_is_minus_infinity(mode):
    """It means the same, but for a row of which all is masked: a softmax of it has no values."""
    torch.manual_seed(3)
    x, mask = torch.randn(2, 4, 8), torch.zeros(2, 4, 4)
    mask[:, :, 3] = mask[0, 2, :] = LOW
    model = Scores(8, 8)
    expected = model(x, mask).detach()
    with paramp.launch_from_torch({"precision": mode}):
        engine, *_ = paramp.initialize(model, functools.partial(torch.optim.SGD, lr=0.1))
        engine.eval()
        found = engine(x, mask).float()
    whole_row = torch.zeros(2, 4, dtype=torch.bool)
    whole_row[0, 2] = True
    torch.testing.assert_close(found[~whole_row], expected[~whole_row], atol=5e-3, rtol=0)
    assert not found[~whole_row][:, 3].any()
    assert found[whole_row].isnan().all()
    assert expected[whole_row].isfinite().all()


SIZES = {
    "the first positional tensor": (Batch((0.5, torch.zeros(4), torch.zeros(1)), {"y": torch.zeros(6)}), 4),
    "a nested one": (Batch(({"x": torch.zeros(4, 2)},), {}, torch.zeros(6)), 4),
    "that of 1 too": (Batch((torch.zeros(1, 4), torch.zeros(1))), 1),
    "the target": (Batch((torch.zeros(()),), {"y": torch.zeros(1, 6)}, [torch.zeros(4)]), 4),
    "the first keyword of more than 1": (Batch((), {"a": torch.zeros(1, 6), "b": torch.zeros(4, 2), "c": 3}), 4),
    "a keyword of 1 if there is no other": (Batch((), {"a": torch.zeros(1, 6), "b": torch.zeros(())}), 1),
}


@pytest.mark.parametrize("what", SIZES)
def test_the_size_of_a_batch_is_that_of(what):
    batch, size = SIZES[what]
    assert batch.size == size


def test_what_goes_whole_to_each_microbatch():
    rows, given = torch.arange(4.0), {"number": 3, "text": "a", "none": None}
    same = {"scalar": torch.tensor(2.0), "one": torch.ones(1, 3), "marked": paramp.whole(torch.ones(3, 3))}
    parts = Batch((rows,), given | same, {"labels": rows}).split(2)
    for index, part in enumerate(parts):
        own = rows[2 * index : 2 * index + 2]
        assert torch.equal(part.args[0], own)
        assert torch.equal(part.target["labels"], own)
        assert {name: part.kwargs[name] for name in given} == given
        assert part.kwargs["scalar"] is same["scalar"]
        assert part.kwargs["one"] is same["one"]
        assert torch.equal(part.kwargs["marked"], torch.ones(3, 3))


BAD = {
    "string": (
        "abc",
        None,
        "inputs: got str, expected a tensor, a tuple of the model's positional inputs or a mapping",
    ),
    "numbers": ({"causal": True}, None, "got no tensor with dims"),
    "sizes": (
        {"ids": torch.zeros(4, LENGTH, dtype=torch.long), "mask": torch.ones(3, LENGTH, dtype=torch.bool)},
        None,
        r"inputs\['mask'\]: got shape \(3, 8\), expected 4 samples in dim 0.*paramp\.whole",
    ),
    "nested": (
        {"ids": torch.zeros(4, LENGTH, dtype=torch.long), "extras": {"roles": torch.zeros(2, LENGTH)}},
        None,
        r"inputs\['extras'\]\['roles'\]: got shape \(2, 8\)",
    ),
    "target": ((torch.zeros(4, LENGTH, dtype=torch.long),), [torch.zeros(5)], r"target\[0\]: got shape \(5,\)"),
    "keywords and target": (
        {"ids": torch.zeros(4, LENGTH, dtype=torch.long)},
        [torch.zeros(2)],
        r"inputs\['ids'\]: got shape \(4, 8\), expected 2 samples in dim 0, as in target\[0\], or 1",
    ),
    "microbatches": (torch.zeros(3, LENGTH, dtype=torch.long), None, "got 3 samples .* multiple of the 2 microbatches"),
    "array": (
        {"ids": torch.zeros(4, LENGTH, dtype=torch.long), "mask": torch.ones(4, LENGTH).numpy()},
        None,
        r"inputs\['mask'\]: got ndarray, expected a tensor",
    ),
    "loss": (
        {"ids": torch.zeros(4, LENGTH, dtype=torch.long)},
        None,
        "initialize got none, and the model",
    ),
    "keyword": ({"idz": torch.zeros(4, LENGTH, dtype=torch.long)}, None, "ids|idz"),
}


@on_ranks(2)
def test_what_does_not_fit_is_an_error_on_every_rank(world):
    for parallel in ({"data": 2}, {"pipeline": {"size": 2, "microbatches": 2}}):
        with paramp.launch_from_torch({"parallel": parallel}) as context:
            engine = engine_for(context)
            for name, (inputs, target, message) in BAD.items():
                if name == "microbatches" and context.pp.size == 1:
                    continue
                with pytest.raises((ValueError, RuntimeError, TypeError), match=message):
                    engine.forward_backward(inputs, target)
                engine.zero_grad()
            batch = {**dialogue(0), "bias": paramp.whole(dialogue(0)["bias"])}
            assert engine.forward_backward(batch).isfinite()
            assert engine.step().stepped


FOUND = {"bias": r"inputs\['bias'\] of the batch", "weight": r"inputs\['extras'\]\['weight'\] of the batch"}
OVERFLOWS = [(name, layout) for name in FOUND for layout in ("dp4", "pp2", "pp2-tp2")]


@family
@pytest.mark.parametrize(
    ("name", "layout"), cases("overflow in an input", OVERFLOWS, {("bias", "dp4"), ("weight", "pp2-tp2")}, 1)
)
@on_ranks(4)
def test_an_overflow_in_an_input_is_named(world, name, layout):
    with paramp.launch_from_torch({"parallel": LAYOUTS[layout], "precision": "16-mixed"}) as context:
        engine = engine_for(context)
        batch = own(context, dialogue(0))
        if name == "bias":
            batch["bias"].tensor[2, 1] = float("nan")
        else:
            batch["extras"]["weight"] = torch.tensor(1e6)  # beyond fp16
        engine.forward_backward(batch)
        assert engine.step().overflow
        report = str(engine.diagnose_overflow())
        assert re.search(FOUND[name], report), report
