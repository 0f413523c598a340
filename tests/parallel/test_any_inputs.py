"""Batches of several inputs, in tuples and mappings, and outputs with names, against plain torch."""

import functools
from collections import OrderedDict, UserDict
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pytest
import torch
from beside_plain import adamw, assert_gradients, assert_moved, assert_weights, randn, seeded
from counting import Collectives
from families import cases, family, number
from masked_transformer import LENGTH, PLAN, Reply, assistant, dialogue
from pool import on_ranks
from reference import rank_slice
from small_engines import engine_of
from torch import nn
from torch.nn import functional as F

import paramp
from paramp.base.trees import map_tensors
from paramp.parallel.loss_and_outputs_of_batch import join
from paramp.parallel.microbatches import Batch

LAYOUTS = {
    "dp4": {"data": 4},
    "dp2-tp2": {"tensor": 2, "data": 2},
    "pp2": {"pipeline": {"size": 2, "microbatches": 4}, "data": 2},
    "pp2-tp2": {"pipeline": {"size": 2, "microbatches": 2}, "tensor": 2},
    "interleaved": {"pipeline": {"size": 2, "schedule": "interleaved-1f1b", "microbatches": 2}, "data": 2},
    "zbv": {"pipeline": {"size": 2, "schedule": "zbv", "microbatches": 4}, "data": 2},
}
TWO_STAGES = {"pipeline": {"size": 2, "microbatches": 2}}


def whole(batch):
    """The batch with its mask of all rows marked."""
    return {**batch, "bias": paramp.whole(batch["bias"])}


def own(context, batch):
    """This data rank's part of a batch."""

    def part(value):
        if isinstance(value, dict):
            return {name: part(inner) for name, inner in value.items()}
        split = isinstance(value, torch.Tensor) and value.ndim and value.shape[0] > 1
        return value.chunk(context.dp.size)[context.dp.rank] if split else value

    return {**part(batch), "bias": paramp.whole(batch["bias"])}


def assistant_engine(context):
    return engine_of(assistant(), None, adamw, plan=PLAN if context.tp.size > 1 else None)


@family
@pytest.mark.parametrize("layout", cases("any inputs", [*LAYOUTS], {"pp2-tp2"}, 1))
@on_ranks(4)
def test_a_model_of_ones_own_follows_plain_torch_unchanged(world, layout):
    model, start = assistant(), assistant().state_dict()
    optimizer = adamw(model.parameters())
    with paramp.launch_from_torch({"parallel": LAYOUTS[layout]}) as context:
        engine = assistant_engine(context)
        for step in range(number(4, 20)):
            batch = dialogue(step)
            optimizer.zero_grad()
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            assert engine.forward_backward(own(context, batch)).item() == pytest.approx(loss.item(), abs=1e-5)
            assert engine.step().stepped
        assert_weights(engine.full_state_dict(), model.state_dict(), atol=2e-5)
        for name, parameter in model.named_parameters():
            assert_moved(name, parameter, start[name], 2e-4)
        batch = dialogue(30)
        expected = model.eval()(**batch)
        assert engine.evaluate(own(context, batch)).item() == pytest.approx(expected.loss.item(), abs=1e-5)
        engine.eval()
        *_, found = engine.execute_schedule(iter([own(context, batch)]), forward_only=True)
        assert found.item() == pytest.approx(expected.loss.item(), abs=1e-5)
        reply = engine(whole(batch))
        assert isinstance(reply, Reply)
        torch.testing.assert_close(reply.logits, expected.logits.detach(), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(reply.hidden[0], expected.hidden[0].detach(), atol=1e-5, rtol=1e-5)
        assert reply.loss.item() == pytest.approx(expected.loss.item(), abs=1e-5)
        # Other inputs, for which other code runs: positional ones, without a mask, without labels.
        shown = engine(batch["ids"], batch["mask"])
        torch.testing.assert_close(shown.logits, model(batch["ids"], batch["mask"]).logits.detach(), atol=1e-5, rtol=0)
        assert shown.loss is None


class Gate(nn.Module):
    """Two inputs and a mapping of outputs; the second input, one of the keywords, is used on the last stage."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, pair, /, part=None):  # as a function of paramp's calls the module
        left, right = pair
        y = self.two(torch.relu(self.one(x * left)))
        return {"sum": y + right if part is None else y + right * part, "sign": y > 0}


def gate_loss(output, target):
    return F.mse_loss(output["sum"], target["y"]) + (output["sum"] * target["weight"]).mean()


@on_ranks(4)
def test_tuples_go_to_the_first_stage_and_targets_are_trees(world):
    x, left, right, y = (randn(8, 4, seed=seed) for seed in range(4))
    target = {"y": y, "weight": torch.tensor([0.1, 0.2, 0.3, 0.4]).reshape(1, 4)}
    model = seeded(Gate)
    whole_output = model(x, (left, right))
    loss = gate_loss(whole_output, target)
    loss.backward()
    with paramp.launch_from_torch({"parallel": LAYOUTS["pp2"]}) as context:
        engine = engine_of(seeded(Gate), gate_loss)
        part = functools.partial(rank_slice, rank=context.dp.rank, size=2)
        inputs, mine = (part(x), [part(left), part(right)]), target | {"y": part(y)}
        output, label, found = engine.execute_schedule(iter([(inputs, mine)]))
        assert found.item() == pytest.approx(loss.item(), abs=1e-6)
        if context.is_last_stage:
            torch.testing.assert_close(output["sum"], part(whole_output["sum"].detach()))
            assert output["sign"].dtype is torch.bool
            assert torch.equal(label["y"], part(y))
        for parameter in engine.parameters():
            torch.distributed.all_reduce(parameter.grad, group=context.dp.group)
        assert_gradients(engine, model)
        assert engine.evaluate(inputs, mine).item() == pytest.approx(loss.item(), abs=1e-6)
        engine.zero_grad()
        assert engine.forward_backward(inputs, mine).item() == pytest.approx(loss.item(), abs=1e-6)
        engine.zero_grad()
        engine.eval()
        shift = torch.full((8, 1), 2.0)
        shown = engine(x, (left, right), part=shift)
        torch.testing.assert_close(shown["sum"], model(x, (left, right), shift)["sum"].detach())
        for batch in ((x, (left, right)), [x, [left, right]]):
            torch.testing.assert_close(engine(batch)["sum"], whole_output["sum"].detach())


@dataclass
class Pair:
    half: torch.Tensor
    double: torch.Tensor


def model_output(half, double):
    return pytest.importorskip("transformers.utils").ModelOutput(half=half, double=double)


OUTPUTS = {
    "tensor": (lambda half, _: half, lambda output: (output, None)),
    "tree": (lambda half, double: ({"half": half}, [double]), lambda output: (output[0]["half"], output[1][0])),
    "dataclass": (Pair, lambda output: (output.half, output.double)),
    "ModelOutput": (model_output, lambda output: (output["half"], output.double)),
}


@pytest.mark.parametrize("kind", OUTPUTS)
def test_the_criterion_gets_each_kind_of_output_in_fp32_and_fp64_as_it_is(kind):
    make, parts = OUTPUTS[kind]

    class Model(nn.Linear):
        def forward(self, x):
            self.half = super().forward(x)
            return make(self.half, self.half.detach().double() / 3)

    def criterion(output, _):
        half, double = parts(output)
        assert half.dtype is torch.float32
        assert torch.equal(half, model.half.float())
        assert double is None or torch.equal(double, model.half.double() / 3)
        return half.sum()

    with paramp.launch_from_torch({"precision": "16-naive"}):
        model = Model(4, 4)
        engine = engine_of(model, criterion)
        engine.forward_backward(randn(2, 4), randn(2, 4))
        assert model.half.dtype is torch.float16


class Weighted(NamedTuple):
    name: str
    loss: tuple


class Uneven(nn.Linear):
    """Its loss is a sum and a count, which differ between the microbatches."""

    def forward(self, x, rows):
        error = (super().forward(x).squeeze(1) * rows).square()
        return self.kind(name="y", loss=(error.sum(), rows.sum()))


@pytest.mark.parametrize("kind", [dict, Weighted])
def test_a_sum_and_a_count_in_the_output_are_those_of_the_batch(kind):
    x, rows = randn(6, 3), torch.tensor([1, 1, 1, 1, 0, 0])
    model = Uneven(3, 1)
    model.kind = kind
    expected = model(x, rows)
    with paramp.launch_from_torch({"parallel": {"pipeline": {"microbatches": 3}}}):
        batch = iter([{"x": x, "rows": rows}])
        output, label, _ = engine_of(model, None).execute_schedule(batch, forward_only=True)
    assert label is None
    assert type(output) is type(expected)
    joined, total = (one["loss"] if kind is dict else one.loss for one in (output, expected))
    assert joined[1] == total[1] == 4
    torch.testing.assert_close(joined[0], total[0].detach())


class Late(Gate):
    """Its second input is used on the last stage."""

    def forward(self, x, late):
        return self.two(torch.relu(self.one(x))) + late


@on_ranks(2)
def test_keyword_inputs_are_not_sent(world):
    x, late = randn(2, 4, 4)
    with paramp.launch_from_torch({"parallel": TWO_STAGES}) as context:
        for inputs, each in (((x, late), 2), ({"x": x, "late": late}, 1)):
            engine = engine_of(Late())
            for _ in range(2):  # in the first, shapes are exchanged
                with Collectives() as sent:
                    engine.forward_backward(inputs, x, return_loss=False)
                engine.zero_grad()
            if context.is_first_stage:
                assert sent.counts["send"] == 2 * each


class Scores(nn.Linear):
    """Attention of each position to the keys of a mask that is added to the scores."""

    def forward(self, x, mask):
        x = super().forward(x)
        return torch.softmax((x @ x.mT + mask).float(), -1)


@pytest.mark.parametrize("mode", ["16-mixed", "16-naive"])
def test_a_mask_beyond_fp16_is_minus_infinity(mode):
    """It means the same, but for a row of which all is masked: a softmax of it has no values."""
    x, mask, row = randn(2, 4, 8), torch.zeros(2, 4, 4), torch.zeros(2, 4, dtype=torch.bool)
    mask[:, :, 3] = mask[0, 2, :] = -1e9
    row[0, 2] = True
    model = seeded(Scores, 8, 8)
    expected = model(x, mask).detach()
    with paramp.launch_from_torch({"precision": mode}):
        found = engine_of(model).eval()(x, mask).float()
    torch.testing.assert_close(found[~row], expected[~row], atol=5e-3, rtol=0)
    assert not found[~row][:, 3].any()
    assert found[row].isnan().all()
    assert expected[row].isfinite().all()


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
    numpys = {"share": np.float32(0.25), "words": np.str_("a"), "count": np.array(2)}
    parts = Batch((rows,), given | same | numpys, {"labels": rows}).split(2)
    for index, part in enumerate(parts):
        mine = rows[2 * index : 2 * index + 2]
        assert torch.equal(part.args[0], mine)
        assert torch.equal(part.target["labels"], mine)
        assert {name: part.kwargs[name] for name in given} == given
        assert {name: part.kwargs[name] for name in numpys} == numpys
        assert [type(part.kwargs[name]) for name in numpys] == [float, str, int]
        assert part.kwargs["scalar"] is same["scalar"]
        assert part.kwargs["one"] is same["one"]
        assert torch.equal(part.kwargs["marked"], torch.ones(3, 3))


class Bag(MutableMapping):
    """Holds its values in a dict."""

    def __init__(self, held):
        self.held = held

    def __getitem__(self, key):
        return self.held[key]

    def __setitem__(self, key, value):
        self.held[key] = value

    def __delitem__(self, key):
        del self.held[key]

    def __iter__(self):
        return iter(self.held)

    def __len__(self):
        return len(self.held)


@pytest.mark.parametrize("kind", [dict, OrderedDict, UserDict, Bag])
def test_a_nested_mapping_is_cast_in_a_copy_of_its_class(kind):
    x, mask = torch.ones(2, requires_grad=True) * 2, torch.ones(2, dtype=torch.bool)
    given = kind({"x": x, "mask": mask})
    cast = map_tensors(lambda tensor: tensor.bfloat16() if tensor.is_floating_point() else tensor, given)
    assert given["x"] is x
    assert type(cast) is kind
    assert cast["x"].dtype is torch.bfloat16
    assert cast["mask"] is mask


IDS = torch.zeros(4, LENGTH, dtype=torch.long)
KINDS = "inputs: got str, expected a tensor, a tuple of the model's positional inputs or a mapping"
OTHER_TARGET = r"inputs\['ids'\]: got shape \(4, 8\), expected 2 samples in dim 0, as in target\[0\], or 1"
OTHER_MASK = r"inputs\['mask'\]: got shape \(3, 8\), expected 4 samples in dim 0.*paramp\.whole"
BAD = {
    "string": ("abc", None, KINDS),
    "numbers": ({"causal": True}, None, "got no tensor with dims"),
    "sizes": ({"ids": IDS, "mask": torch.ones(3, LENGTH, dtype=torch.bool)}, None, OTHER_MASK),
    "nested": (
        {"ids": IDS, "extras": {"roles": torch.zeros(2, LENGTH)}},
        None,
        r"inputs\['extras'\]\['roles'\]: got shape \(2, 8\)",
    ),
    "target": (IDS, [torch.zeros(5)], r"target\[0\]: got shape \(5,\)"),
    "keywords and target": ({"ids": IDS}, [torch.zeros(2)], OTHER_TARGET),
    "microbatches": (IDS[:3], None, "got 3 samples .* multiple of the 2 microbatches"),
    "array": ({"ids": IDS, "mask": IDS.numpy()}, None, r"inputs\['mask'\]: got ndarray, expected a tensor"),
    "set": ({"ids": IDS, "causal": {True}}, None, r"inputs\['causal'\]: got set, expected tensors, numbers, strings"),
    "object": ((IDS, object()), None, r"inputs\[1\]: got object, expected tensors, numbers, strings"),
    "loss": ({"ids": IDS}, None, "initialize got none, and the model"),
    "keyword": ({"idz": IDS}, None, "ids|idz"),
}


@pytest.mark.parametrize("parallel", [{"data": 2}, TWO_STAGES])
@on_ranks(2)
def test_what_does_not_fit_is_an_error_on_every_rank(world, parallel):
    with paramp.launch_from_torch({"parallel": parallel}) as context:
        engine = assistant_engine(context)
        for name, (inputs, target, message) in BAD.items():
            if name in ("microbatches", "set", "object") and context.pp.size == 1:
                continue
            with pytest.raises((ValueError, RuntimeError, TypeError), match=message):
                engine.forward_backward(inputs, target)
            engine.zero_grad()
        assert engine.forward_backward(whole(dialogue(0))).isfinite()
        assert engine.step().stepped


@pytest.mark.parametrize("layout", ["dp4", "pp2-tp2"])
@on_ranks(4)
def test_an_overflow_in_an_input_is_named(world, layout):
    with paramp.launch_from_torch({"parallel": LAYOUTS[layout], "precision": "16-mixed"}) as context:
        engine = assistant_engine(context)
        batch = own(context, dialogue(0))
        if layout == "dp4":
            batch["bias"].tensor[2, 1] = float("nan")
        else:
            batch["extras"]["weight"] = torch.tensor(1e6)  # beyond fp16
        engine.forward_backward(batch)
        assert engine.step().overflow
        name = "['bias']" if layout == "dp4" else "['extras']['weight']"
        assert f"inputs{name} of the batch" in str(engine.diagnose_overflow())


def test_of_values_without_dims_floats_are_averaged_and_others_the_first_microbatchs():
    parts = [{"tokens": torch.tensor(tokens), "loss": torch.tensor(loss)} for tokens, loss in ((3, 1.0), (5, 2.0))]
    assert join(parts) == {"tokens": 3, "loss": 1.5}
