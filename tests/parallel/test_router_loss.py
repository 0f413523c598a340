"""The loss of routers of transformers' mixtures: over the tokens of the whole step, as of one forward of all."""

import functools
import itertools

import pytest
import torch
from families import cases, family
from mixtures import build
from pool import on_ranks, run_on_ranks
from reference import farthest, rank_slice
from small_engines import engine_of, own_part
from torch.nn import functional as F

import paramp
from paramp.pipeline.stage_output import StageOutput

EXPERTS, CHOSEN, COEFFICIENT = 4, 2, 0.5
LR = 8.0
"""So large that a weight's change in one step shows its gradient to the last bits."""
NAMES = ("Mixtral", "Qwen3-MoE", "GPT-OSS", "OLMoE")
GPIPE = {"size": 2, "schedule": "gpipe", "microbatches": 2}
LAYOUTS = {
    2: {
        "dp2": {"parallel": {"data": 2}},
        "dp2 + checkpointing": {"parallel": {"data": 2}, "activation_checkpointing": "full"},
        "ep2": {"parallel": {"expert": 2}},
        "fsdp2": {"parallel": {"data": {"shard": 2}}, "activation_checkpointing": "selective"},
        "pp2": {"parallel": {"pipeline": {**GPIPE, "schedule": "looped-bfs"}}},
        "cp2": {"parallel": {"context": 2}},
    },
    4: {
        "ep2·pp2": {"parallel": {"expert": 2, "pipeline": GPIPE}},
        "ep2·pp2 + checkpointing": {"parallel": {"expert": 2, "pipeline": GPIPE}, "activation_checkpointing": "full"},
        "ep2·tp2": {"parallel": {"expert": 2, "tensor": 2}},
        "fsdp2·ep2": {"parallel": {"data": {"shard": 4}, "expert": 2}},
        "fsdp2·pp2": {"parallel": {"data": {"shard": 2}, "pipeline": GPIPE}},
        "cp2·pp2": {"parallel": {"context": 2, "pipeline": GPIPE}},
        "dp2·cp2": {"parallel": {"data": 2, "context": 2}},
    },
}
"""By the number of ranks."""
PART = [("Mixtral", "dp2"), ("OLMoE", "pp2"), ("Qwen3-MoE", "ep2·pp2")]
CELLS = [
    (size, *cell)
    for size, layouts in LAYOUTS.items()
    for cell in cases(f"router losses {size}", [*itertools.product(NAMES, layouts)], PART, 2)
]


def balanced(name, coefficient=COEFFICIENT):
    model = build(name, num_experts=EXPERTS)
    model.config.output_router_logits, model.router_aux_loss_coef = True, coefficient
    return model


def batch(size=8, length=12):
    """Padded on the right, so that parts have other numbers of tokens and labels; a microbatch has none."""
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(3, 60, (size, length), generator=generator)
    lengths = torch.tensor([length, length - 1, 7, 9, length, length - 4, 4, 8])[:size, None]
    mask = (torch.arange(length) < lengths).long()
    labels = tokens.masked_fill(mask == 0, -100)
    labels[:, :3] = labels[4:6] = -100  # of prompts
    return {"input_ids": tokens * mask, "attention_mask": mask, "labels": labels}


@functools.cache
def reference(name):
    """Loss and gradients of the model's own forward of the whole batch, in fp64."""
    model = balanced(name).double()
    output = model(**batch())
    output.loss.backward()
    assert output.aux_loss.item() > 1
    return output.loss.item(), {key: value.grad for key, value in model.named_parameters() if value.grad is not None}


def check(name, expected, num_calls=1, **config):
    """One step's gradients are those ``expected``, and its loss, with the counts of the microbatches so far."""
    loss, grads = expected
    before = balanced(name).state_dict()
    with paramp.launch_from_torch({"gradient_accumulation": num_calls, **config}) as context:
        if context.stage_axis.size > 1:
            loss = of_those_so_far(name, context.dp.size, GPIPE["microbatches"])[0]
        engine = engine_of(balanced(name), None, functools.partial(torch.optim.SGD, lr=LR))
        keys = [*batch()]
        parts = zip(*(value.chunk(num_calls) for value in own_part(context, *batch().values())), strict=True)
        for part in parts:
            found = engine.forward_backward(dict(zip(keys, part, strict=True)))
            engine.step()
        after = engine.full_state_dict()
    assert found.item() == pytest.approx(loss, rel=1e-6)
    worst = farthest({key: (before[key].double() - after[key].double()) / LR for key in grads}, grads)
    assert worst[0] < 1e-5, worst


@family
@pytest.mark.parametrize(("size", "name", "layout"), CELLS)
def test_loss_and_gradients_are_those_of_one_forward_of_the_whole_batch(size, name, layout):
    run_on_ranks(size, __name__, "check_layout", {"name": name, "layout": layout})


def check_layout(world, name, layout):
    check(name, reference(name), **LAYOUTS[world.size][layout])


def sums(name, model, part):
    """By hand: of ``part`` the cross-entropy, its labels, and of all layers counts, probabilities and tokens."""
    output, targets = model(**part), part["labels"][:, 1:]
    cross_entropy = F.cross_entropy(output.logits[:, :-1].flatten(0, 1), targets.flatten(), reduction="sum")
    shown = part["attention_mask"].flatten().bool()
    probabilities = torch.cat([layer.softmax(-1)[shown] for layer in output.router_logits])
    chosen = F.one_hot(probabilities.topk(CHOSEN).indices, EXPERTS).sum((0, 1))
    return cross_entropy, (targets != -100).sum(), chosen, probabilities.sum(0), len(probabilities)


@functools.cache
def of_those_so_far(name, num_data, num_calls):
    """In fp64, with the counts of the microbatches so far in the loss of each; the weight of each is that of its tokens
    among them."""
    model, total, counts, labels, tokens = balanced(name).double(), 0, 0, 0, 0
    shares = [
        {key: rank_slice(value, rank, num_data).chunk(num_calls)[call] for key, value in batch().items()}
        for call in range(num_calls)
        for rank in range(num_data)
    ]
    for call in range(num_calls):
        found = [sums(name, model, one) for one in shares[call * num_data : (call + 1) * num_data]]
        cross_entropy, of_call, chosen, probabilities, shown = map(sum, zip(*found, strict=True))
        labels, counts, tokens = labels + of_call, counts + chosen, tokens + shown
        share = EXPERTS * (counts * probabilities).sum() / tokens**2
        total = total + cross_entropy + COEFFICIENT * labels * share
    (total / labels).backward()
    return (total / labels).item(), {key: one.grad for key, one in model.named_parameters() if one.grad is not None}


@pytest.mark.parametrize("checkpointing", ["none", "full"])
@on_ranks(2)
def test_accumulated_batches_have_the_counts_of_those_so_far(world, checkpointing):
    expected = of_those_so_far("Mixtral", 2, 2)
    check("Mixtral", expected, 2, parallel={"expert": 2}, activation_checkpointing=checkpointing)


def test_one_call_by_hand_is_the_models_own_loss():
    """What accumulated batches are compared with."""
    (loss, grads), (expected, of_model) = of_those_so_far("Mixtral", 2, 1), reference("Mixtral")
    assert loss == pytest.approx(expected, rel=1e-6)  # transformers adds up in fp32
    assert farthest(grads, of_model)[0] < 1e-6


@on_ranks(2)
def test_a_loss_scale_does_not_change_its_share(world):
    """A coefficient so large that the gradients are those of this loss: a scale of 1 / 2**10 would be seen."""
    model = balanced("Mixtral", 1000.0)
    model(**batch()).loss.backward()
    expected = {key: value.grad for key, value in model.named_parameters() if value.grad is not None}
    precision = {"mode": "16-mixed", "init_scale": 2.0**10}
    for layout in ({"data": 2}, {"pipeline": GPIPE}):
        with paramp.launch_from_torch({"parallel": layout, "precision": precision}) as context:
            engine = engine_of(balanced("Mixtral", 1000.0), None, functools.partial(torch.optim.SGD, lr=1.0))
            before = engine.full_state_dict()
            engine.forward_backward(part_of(context))
            assert engine.step().stepped
            after = engine.full_state_dict()
        found = {key: before[key].double() - after[key].double() for key in expected}
        assert farthest(found, expected)[0] < 0.01


def part_of(context, **options):
    return dict(zip(batch(), own_part(context, *batch().values()), strict=True)) | options


@on_ranks(2)
def test_a_loop_of_calls_and_a_criterion_of_ones_own_have_it(world):
    loss, grads = reference("Mixtral")
    norm = torch.nn.utils.get_total_norm(grads.values()).item()
    with paramp.launch_from_torch({"parallel": {"data": 2}}) as context:
        engine = engine_of(balanced("Mixtral"), None)
        assert engine.backward(engine(part_of(context)).loss).item() == pytest.approx(loss, rel=1e-6)
        assert engine.step().grad_norm == pytest.approx(norm, rel=1e-6)
        if context.rank == 0:  # in evaluation no rank waits for another
            with torch.no_grad():
                assert engine.eval()(part_of(context)).aux_loss > 1

        def criterion(output):
            return COEFFICIENT * output.aux_loss

        model = balanced("Mixtral")
        of_routers = COEFFICIENT * model(**batch()).aux_loss
        of_routers.backward()
        norm = torch.nn.utils.get_total_norm([one.grad for one in model.parameters() if one.grad is not None]).item()
        for left_out in ("labels", None):  # which do not weigh it
            engine = engine_of(balanced("Mixtral"), criterion)
            inputs = {key: value for key, value in part_of(context).items() if key != left_out}
            assert engine.forward_backward(inputs).item() == pytest.approx(of_routers.item(), rel=1e-6)
            assert engine.step().grad_norm == pytest.approx(norm, rel=1e-6)
    with paramp.launch_from_torch({"parallel": {"pipeline": GPIPE}}):
        engine = engine_of(balanced("Mixtral"), criterion)
        engine.forward_backward(batch())
        assert engine.step().grad_norm == pytest.approx(norm, rel=1e-6)


@on_ranks(2)
def test_in_evaluation_it_is_that_of_each_microbatch(world):
    model = balanced("Mixtral").eval()
    with paramp.launch_from_torch({"parallel": {"pipeline": GPIPE}}), torch.no_grad():
        engine = engine_of(balanced("Mixtral"), None)
        halves = [{key: value.chunk(2)[half] for key, value in batch().items()} for half in (0, 1)]
        counts = [(one["labels"][:, 1:] != -100).sum() for one in halves]
        expected = sum(count * model(**one).loss for count, one in zip(counts, halves, strict=True)) / sum(counts)
        assert engine.evaluate(batch()).item() == pytest.approx(expected.item(), rel=1e-6)
        assert engine.eval()(batch()).aux_loss is not None


@on_ranks(2)
def test_batches_that_ask_for_it_alone_and_models_on_meta_in_pipelines_are_errors(world):
    with paramp.launch_from_torch({"parallel": {"data": 2}}) as context:
        engine = engine_of(build("Mixtral"), None)
        with pytest.raises(paramp.ConfigError, match="in the model's configuration before initialize"):
            engine.forward_backward(part_of(context, output_router_logits=True))
        own = part_of(context, output_router_logits=True)
        expected = build("Mixtral")(**own).aux_loss.item()  # where no gradient is trained, it is the model's own
        for trains in (True, False):
            engine.train(trains)
            with torch.set_grad_enabled(not trains):
                assert engine(own).aux_loss.item() == pytest.approx(expected, rel=1e-6)
    with paramp.launch_from_torch({"parallel": {"pipeline": 2}}):
        engine = engine_of(build("Mixtral"), None)
        with pytest.raises(paramp.ConfigError, match="asks for it before initialize"):
            engine.forward_backward(batch() | {"output_router_logits": True})
        with torch.device("meta"):
            on_meta = balanced("Mixtral")
        with pytest.raises(paramp.ConfigError, match="a pipeline of a model on meta"):
            engine_of(on_meta, None).forward_backward(batch())


@pytest.mark.parametrize("expert", [1, 2])
@on_ranks(4)
def test_data_ranks_of_a_pipeline_may_have_batches_of_other_lengths(world, expert):
    """A stage is tried with each new shape: on the data rank that has it, or on those that share experts."""
    rows = torch.tensor([0, 1, 4, 5, 2, 3, 6, 7])
    grads = reference("Mixtral")[1].values()
    with paramp.launch_from_torch({"parallel": {"data": 2, "expert": expert, "pipeline": GPIPE}}) as context:
        engine = engine_of(balanced("Mixtral"), None)
        for length in (12, 9):
            inputs = {key: own_part(context, value[rows])[0] for key, value in batch().items()}
            if context.dp.rank == 1:  # whose longest sequence has 9 tokens
                inputs = {key: value[:, :length] for key, value in inputs.items()}
            engine.forward_backward(inputs)
            if length == 12:
                engine.zero_grad()
        assert engine.step().grad_norm == pytest.approx(torch.nn.utils.get_total_norm(grads).item(), rel=1e-6)


def test_sums_in_fp64_and_losses_cross_stages_in_their_dtype():
    hidden, sums = torch.randn(2, 3, requires_grad=True), torch.tensor([2.0**20 + 1.0, 1e-9]).double().requires_grad_()
    loss = torch.tensor(2.0**20 + 1.0, requires_grad=True)  # nor does fp16 hold it
    described = StageOutput.describe((hidden, sums, loss), torch.float16)
    assert [meta.dtype for meta in described.metas(True)] == [torch.float16, torch.float64, torch.float32]
    packed = described.pack((hidden, sums, loss), torch.device("cpu"))
    received, *there = described.unpack(packed, torch.device("cpu"), torch.float16)
    assert received.dtype == torch.float16
    assert all(map(torch.equal, there, (sums, loss)))


def test_tensors_that_share_memory_are_known_on_each_later_stage():
    table = torch.randn(4, 6)
    values = table, table[:, 0], torch.ones(2), *torch.randn(4, 6).chunk(2, 1)
    described = StageOutput.describe(values, torch.float16)
    received = described.unpack(described.pack(values, torch.device("cpu")), torch.device("cpu"), torch.float16)
    overlapping = described.overlapping(received)
    assert [*map(torch.equal, overlapping, values[:2])] == [True, True]
    assert len(overlapping) == 2
    for sent, marks in (
        ((received[2], received[0].T, received[1]), [False, True, True]),
        ((received[2], received[0].T), [False, False]),  # its view goes no further
    ):
        later = StageOutput.describe(sent, torch.float16, overlapping)
        assert [leaf.overlaps for leaf in later.tree] == marks
