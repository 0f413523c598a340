"""Every schedule of a pipeline, with several stages a rank, in every kind of mode."""

import contextlib
import dataclasses
import functools
import itertools
import re
import weakref
from types import SimpleNamespace

import pytest
import torch
from beside_plain import assert_gradients, assert_weights, randn, seeded, train_both
from families import cases as chosen
from families import family
from matrix import PAGE, SCHEDULE_MODES, check_table, from_small_scale
from pages import read
from pool import World, on_ranks, run_on_ranks
from reference import assert_follows, assert_strays, batches, small_gpt, train_engine
from small_engines import engine_of, everywhere
from torch import nn
from torch.distributed import pipelining
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.nn import functional as F
from traceable import awkward_model

import paramp
from paramp.config.pipeline_schedules import SCHEDULES
from paramp.models import GPT


@pytest.mark.parametrize("name", SCHEDULES)
def test_names_are_torchs_too(name):
    option = SCHEDULES[name].torch_name
    kind = get_schedule_class(option).__name__
    for given in (name, name.upper(), name.replace("-", "_"), option, option.lower(), kind):
        assert pipeline_of(size=2, schedule=given).schedule == name


def test_every_schedule_of_torch_has_a_name():
    torchs = {name for name in pipelining.__all__ if name.startswith("Schedule")}
    assert {get_schedule_class(row.torch_name).__name__ for row in SCHEDULES.values()} == torchs


def pipeline_of(**values):
    return paramp.Config(parallel={"pipeline": values}).parallel.pipeline


def test_what_follows_from_a_schedule():
    loop, v = pipeline_of(size=3, schedule="looped-bfs"), pipeline_of(size=3, schedule="dualpipev")
    plain = pipeline_of(size=3)
    assert [loop.stages_of(rank) for rank in range(3)] == [[0, 3], [1, 4], [2, 5]]
    assert [v.stages_of(rank) for rank in range(3)] == [[0, 5], [1, 4], [2, 3]]
    assert [plain.stages_of(rank) for rank in range(3)] == [[0], [1], [2]]
    assert (loop.num_microbatches, v.num_microbatches, plain.num_microbatches) == (3, 6, 3)
    assert pipeline_of(schedule="zbv").num_stages == 1


class Kept:
    """A tensor that autograd has saved, without the node that made it, which may be the one that holds it."""

    def __init__(self, tensor):
        self.tensor = tensor.detach()


@on_ranks(2)
def test_activations_are_freed_as_in_the_order(world):
    """All that a batch saves is there at once, or not half of it."""
    x, alive = randn(24, 3), weakref.WeakSet()
    for name in SCHEDULES:
        made = most = 0

        def pack(tensor):
            nonlocal made, most
            alive.add(kept := Kept(tensor))
            made, most = made + 1, max(most, len(alive))
            return kept

        with paramp.launch_from_torch({"parallel": {"pipeline": {"size": 2, "schedule": name, "microbatches": 12}}}):
            engine = engine_of(nn.Sequential(*(nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(4))))
            engine.forward_backward(x, x)  # which tries the stages
            engine.zero_grad()
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept.tensor):
                engine.forward_backward(x, x)
            assert not alive
            assert most == made if name in ("gpipe", "looped-bfs") else 2 * most < made, name


SECONDS = {"F": 1, "B": 2, "I": 1, "W": 1}


def torchs_order(name, ranks, stages_per_rank, microbatches):
    """torch's own schedule object, on stages that cannot run, and what each of its ranks does in turn."""

    def stage(index):
        kinds = {"is_first": index == 0, "is_last": index == num_stages - 1}
        return SimpleNamespace(
            stage_index=index, num_stages=num_stages, group_size=ranks, group_rank=0, submod=None, **kinds
        )

    # 1F1B's order is that of the interleaved one with one stage; torch writes down another than it runs.
    row = SCHEDULES["interleaved-1f1b" if name == "1f1b" else name]
    num_stages = ranks * stages_per_rank
    own = [stage(index) for index in range(num_stages) if row.rank_of(index, ranks) == 0]
    schedule = get_schedule_class(row.torch_name)(own[0] if name == "gpipe" else own, microbatches, loss_fn=print)
    order = {
        rank: [
            (one.stage_index, one.computation_type.value, one.microbatch_index)
            for action in actions
            if action is not None
            for one in action.sub_actions or (action,)
            if one.computation_type.value in SECONDS
        ]
        for rank, actions in schedule.pipeline_order.items()
    }
    return schedule, order


def simulated_bubble(order, num_stages):
    """What ranks idle if each begins an operation as soon as it is free and what that needs is there."""
    done, free, left = {}, dict.fromkeys(order, 0), {rank: list(actions) for rank, actions in order.items()}
    while any(left.values()):
        for rank, actions in left.items():
            while actions:
                stage, kind, microbatch = actions[0]
                needs = {"F": ("F", stage - 1), "W": ("I", stage)}.get(kind, ("G", stage + 1))
                if kind in "BI" and stage == num_stages - 1:
                    needs = ("F", stage)
                needed = 0 if (kind, stage) == ("F", 0) else done.get((*needs, microbatch))
                if needed is None:
                    break
                free[rank] = max(free[rank], needed) + SECONDS[kind]
                done[kind, stage, microbatch] = free[rank]
                if kind in "BI":
                    done["G", stage, microbatch] = free[rank]
                actions.pop(0)
    busy = sum(SECONDS[kind] for actions in order.values() for _, kind, _ in actions)
    return 1 - busy / (len(order) * max(free.values()))


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_theoretical_bubble_is_that_of_torchs_order(name):
    row = SCHEDULES[name]
    checked = 0
    for ranks, stages, microbatches in itertools.product((2, 3, 4), (1, 2, 3), range(1, 13)):
        try:
            config = pipeline_of(schedule=name, stages_per_rank=stages, microbatches=microbatches, size=ranks)
        except paramp.ConfigError:
            continue  # what torch does not take is refused
        if name == "1f1b" and microbatches % (microbatches // ranks):
            continue  # the interleaved one, which stands for it, does not take these
        schedule, order = torchs_order(name, ranks, stages, microbatches)
        if name != "gpipe":
            places = {stage: row.rank_of(stage, ranks) for stage in range(config.num_stages)}
            assert schedule.stage_index_to_group_rank == places
        first = {"gpipe": 1, "zbv": 2 * ranks - 1}.get(name, ranks)
        assert (config.theoretical_bubble is not None) == (microbatches >= first)
        if config.theoretical_bubble is not None:
            assert simulated_bubble(order, config.num_stages) == pytest.approx(config.theoretical_bubble)
            checked += 1
    assert checked >= 12


MICROBATCHES = {
    "any number": lambda p, m: True,
    "p or more": lambda p, m: m >= p,
    "2 p or more": lambda p, m: m >= 2 * p,
    "a multiple of the rounds": lambda p, m: m % max(1, m // p) == 0,
}
"""As the page says it."""


def test_the_table_of_the_page_is_what_schedules_are():
    lines = re.findall(r"^\| `(.*) \|$", read("docs/schedules.md"), re.MULTILINE)
    rows = {row[0].split("`")[0]: row for row in (re.split(r" *\| *", line) for line in lines)}
    assert list(rows) == list(SCHEDULES)
    assert [name for name, row in rows.items() if "(the default)" in row[0]] == [pipeline_of(size=2).schedule]
    for name, (_, stages, placement, allowed, bubble) in rows.items():
        assert pipeline_of(size=3, schedule=name).num_local_stages == int(stages[0])
        assert placement == ("V" if SCHEDULES[name].v_shaped else "loop" if stages[0] == "2" else "")
        formula = re.sub(r"(?<=\w) (?=\w)", " * ", bubble)
        for p, v, m in itertools.product((2, 3, 4), (1, 2, 3), range(1, 13)):
            try:
                config = pipeline_of(schedule=name, stages_per_rank=v, microbatches=m, size=p)
            except paramp.ConfigError:
                config = None
            fits, case = v == int(stages[0]) or "as many as you set" in stages, {"p": p, "v": v, "m": m}
            assert (config is not None) == (fits and MICROBATCHES[allowed](p, m)), (name, case)
            if config is not None and config.theoretical_bubble is not None:
                assert config.theoretical_bubble == pytest.approx(eval(formula, case)), (name, case)


@pytest.mark.parametrize("name", SCHEDULES)
def test_two_schedules_keep_the_activations_of_all_microbatches_at_once(name):
    """On the rank that keeps the most; a backward in two halves keeps until its first what it has not computed with."""
    microbatches = 12
    stages = SCHEDULES[name].stages_per_rank
    _, order = torchs_order(name, 3, stages, microbatches)
    steps = {"F": 1, "B": -1, "I": -1, "W": 0}
    kept = [max(itertools.accumulate(steps[kind] for _, kind, _ in actions)) for actions in order.values()]
    assert (max(kept) == stages * microbatches) == (name in ("gpipe", "looped-bfs"))


PAGE_CELLS = [(schedule, mode) for schedule in SCHEDULES for mode in SCHEDULE_MODES]
EVERYTHING = [*PAGE_CELLS, ("interleaved-1f1b", "fp8-mixed"), ("zbv", "fp8-mixed")]
IN_TURN = {(schedule, SCHEDULE_MODES[number % 3]) for number, schedule in enumerate(SCHEDULES)}
TOLERANCE_REJECTS = [("zbv", "bf16-mixed"), ("interleaved-zero-bubble", "16-naive")]
CELLS = chosen("schedules", EVERYTHING, IN_TURN | {("zbv", "fp8-mixed")}, 2)
HALVED = [cell for cell in TOLERANCE_REJECTS if cell in CELLS]
WHOLE_BACKWARD = [name for name, row in SCHEDULES.items() if not row.splits_backward]
SHARDED = chosen(
    "sharded schedules",
    [(schedule, mode) for schedule in WHOLE_BACKWARD for mode in SCHEDULE_MODES],
    {(schedule, SCHEDULE_MODES[number % 3]) for number, schedule in enumerate(WHOLE_BACKWARD)},
    2,
)
STEPS = 3
OVERFLOW_AT = 1


build = functools.partial(small_gpt, num_layers=2, init_std=0.2)
"""With tied embeddings: on one rank in V shape, on two in loops."""


def train_all(world, cells, halved=(), axes=None):
    """What each of ``cells``, pairs of a schedule (None: no pipeline) and a mode, comes to; one context serves all.

    ``axes``: beside the pipeline.
    """
    alone = world.size == 1
    parallel = {} if alone else {"pipeline": {"size": 2, "microbatches": 4}} | axes
    results = {}
    with paramp.launch_from_torch({"parallel": parallel, "clip_grad_norm": 1.0}, device=world.device) as context:
        for schedule, mode in cells:
            layout = context.config.parallel
            if not alone:
                layout = dataclasses.replace(layout, pipeline=dataclasses.replace(layout.pipeline, schedule=schedule))
            context.config = dataclasses.replace(context.config, precision=from_small_scale(mode), parallel=layout)
            train = functools.partial(
                train_engine, context, build, GPT.loss, STEPS, lr=1.0, length=8, overflow_at=OVERFLOW_AT
            )
            results[schedule, mode] = train()
            if (schedule, mode) in halved:
                results[schedule, mode, "halved"] = train(halve_on_rank=world.size - 1)
    return results if world.rank == 0 else None


@pytest.fixture(scope="module")
def alone():
    return train_all(World(0, 1, "cpu"), [(None, mode) for mode in dict.fromkeys(mode for _, mode in CELLS + SHARDED)])


@pytest.fixture(scope="module")
def cells(alone):
    return alone | run_on_ranks(4, __name__, "train_all", {"cells": CELLS, "halved": HALVED, "axes": {"tensor": 2}})[0]


@pytest.fixture(scope="module")
def sharded_cells(alone):
    arguments = {"cells": SHARDED, "halved": SHARDED[:1], "axes": {"data": {"shard": 2}}}
    return alone | run_on_ranks(4, __name__, "train_all", arguments)[0]


@pytest.fixture(scope="module")
def green():
    """The cells whose test has passed."""
    return set()


@family
@pytest.mark.parametrize(("schedule", "mode"), CELLS)
def test_a_schedule_on_pp2_tp2_follows_the_single_process(schedule, mode, cells, green):
    assert_follows(cells[schedule, mode], cells[None, mode], mode)
    green.add((schedule, mode))


@family
@pytest.mark.parametrize(("schedule", "mode"), SHARDED)
def test_a_schedule_on_fsdp2_pp2_follows_the_single_process(schedule, mode, sharded_cells):
    assert_follows(sharded_cells[schedule, mode], sharded_cells[None, mode], mode)


@family
@pytest.mark.parametrize(("schedule", "mode"), SHARDED[:1])
def test_the_tolerance_rejects_one_shards_gradient_halved(schedule, mode, sharded_cells):
    assert_strays(sharded_cells[schedule, mode, "halved"], sharded_cells[None, mode], mode)


@on_ranks(4)
def test_schedules_that_split_backwards_refuse_sharded_parameters(world):
    """The first four of the page's table do not."""
    assert [*SCHEDULES][:4] == WHOLE_BACKWARD
    for schedule in SCHEDULES.keys() - WHOLE_BACKWARD:
        parallel = {"data": {"shard": 2}, "pipeline": {"size": 2, "schedule": schedule}}
        with pytest.raises(paramp.ConfigError, match=f"got '{schedule}', expected 1f1b, gpipe"):
            paramp.launch_from_torch({"parallel": parallel})


def test_the_table_of_the_page_is_what_came_out(green, request):
    """After the cells. ``make matrix``, which runs all of them, writes the table anew."""
    write = request.config.getoption("--write-matrix")
    check_table(PAGE, "schedules", "schedule", [*SCHEDULES], SCHEDULE_MODES, green, write)


@family
@pytest.mark.parametrize(("schedule", "mode"), HALVED)
def test_the_tolerance_rejects_one_ranks_gradient_halved(schedule, mode, cells):
    assert_strays(cells[schedule, mode, "halved"], cells[None, mode], mode)


@contextlib.contextmanager
def pipelined(model, schedule, criterion=F.mse_loss, **pipeline):
    """An engine that steps by SGD, on two ranks."""
    with paramp.launch_from_torch({"parallel": {"pipeline": {"size": 2, "schedule": schedule} | pipeline}}):
        yield engine_of(model, criterion)


@on_ranks(2)
def test_in_fp32_schedules_agree_in_training_evaluation_and_dropout(world):
    """Against one process without dropout, and against each other with it: the stream belongs to the stage."""
    ((x, y),) = batches(1)
    reference = small_gpt(num_layers=3)
    loss = GPT.loss(reference(x), y)
    loss.backward()
    dropped = {}
    for schedule, row in SCHEDULES.items():
        with pipelined(small_gpt(num_layers=3), schedule, GPT.loss, microbatches=4) as engine:
            context = paramp.get_context()
            assert context.is_last_stage == (context.rank == (0 if row.v_shaped else 1))
            assert context.is_first_stage == (context.rank == 0)
            assert engine.evaluate(x, y).item() == pytest.approx(loss.item(), rel=1e-6)
            assert engine.forward_backward(x, y).item() == pytest.approx(loss.item(), rel=1e-6)
            for name, parameter in engine.named_parameters():
                # Of tied ones in a loop each rank has its part of the sum until the step.
                if name not in ("embedding.tokens.weight", "head.weight") or row.v_shaped:
                    gradient = reference.get_parameter(name).grad
                    torch.testing.assert_close(parameter.grad, gradient, atol=1e-6, rtol=1e-5)
            assert engine.evaluate(x, y).item() == pytest.approx(loss.item(), rel=1e-6)
            engine.eval()
            torch.testing.assert_close(engine(x), reference(x).detach(), atol=1e-5, rtol=1e-5)
            output, label, mean = engine.execute_schedule(iter([(x, y)]), forward_only=True)
            assert mean.item() == pytest.approx(loss.item(), rel=1e-6)
            assert (output is not None) == (label is not None) == context.is_last_stage
            engine.train()
            assert engine.step().stepped
            expected = {name: one.detach() - 0.1 * one.grad for name, one in reference.named_parameters()}
            expected["head.weight"] = expected["embedding.tokens.weight"]
            assert_weights(engine.full_state_dict(), expected, atol=1e-6, rtol=1e-5)

            losses = []
            engine = engine_of(small_gpt(num_layers=3, dropout=0.2), GPT.loss)
            for _ in range(2):
                losses.append(engine.forward_backward(x, y).item())
                engine.step()
            dropped.setdefault(row.stages_per_rank, []).append(losses)
    for losses in dropped.values():
        assert losses[0][0] != pytest.approx(loss.item(), rel=1e-4)
        for other in losses[1:]:
            assert other == pytest.approx(losses[0], rel=1e-6)


SEVERAL = [name for name, row in SCHEDULES.items() if row.stages_per_rank > 1]


class Glue(nn.Module):
    """Not sequential: parameters and a buffer of its own, used between modules, and one module that is called twice."""

    def __init__(self):
        super().__init__()
        self.inner = nn.ModuleDict({name: nn.Linear(4, 4) for name in "abcd"})
        self.scale, self.shift = nn.Parameter(torch.full((4,), 1.5)), nn.Parameter(torch.ones(4))
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
        self.register_buffer("offset", torch.full((4,), 0.5))

    def forward(self, x):
        first = self.inner["a"](x * self.scale)
        second = self.inner["b"](first).relu() + self.offset
        third = self.inner["c"](second * self.scale + first + self.shift).transpose(0, 1)
        return self.inner["d"](self.inner["a"](third.transpose(0, 1)) * self.shift * self.frozen)


@pytest.mark.parametrize(
    ("build", "split"), [(awkward_model, ["2", "4", "5"]), (Glue, ["inner.b", "inner.c", "inner.d"])]
)
@on_ranks(2)
def test_awkward_models_follow_plain_torch(world, build, split):
    """Stages that begin in place and end in a view, that call one module and share parameters, on one rank or two."""
    given = [randn(2, 8, 4, 4, seed=step) for step in range(3)]
    for schedule in SEVERAL:
        model = seeded(build)
        names = dict(model.named_parameters(remove_duplicate=False))
        with pipelined(model, schedule, microbatches=4, split=split) as engine:
            train_both(paramp.get_context(), engine, seeded(build), given)
            own = [name for name, _ in engine.named_parameters()]
            assert own == [name for name, _ in engine.module.named_parameters()]
            assert len(set(own)) == len(own)
            assert set(own) <= names.keys()
            of_both = {names[name] for part in everywhere(own) for name in part}
            assert of_both == {*names.values()}
            with pytest.raises(RuntimeError, match="several pipeline stages that are not consecutive"):
                engine.module(given[0][0])


class Dropping(nn.Sequential):
    """Drops out between its modules, as its own mode says."""

    def forward(self, x):
        for layer in self:
            x = F.dropout(layer(x), 0.5, self.training)
        return x


@pytest.mark.parametrize("schedule", ["looped-bfs", "dualpipev"])
@on_ranks(2)
def test_the_module_of_several_stages_sets_their_modes(world, schedule):
    x = randn(8, 4)
    with pipelined(Dropping(*(nn.Linear(4, 4) for _ in range(4))), schedule) as engine:
        losses = []
        for mode in (False, False, True, True):
            engine.module.train(mode)
            losses.append(engine.forward_backward(x, x).item())
            engine.zero_grad()
        assert losses[0] == losses[1]
        assert len(set(losses)) == 3


def assert_one_call_is_plain_torchs(build, x, y, schedule, **pipeline):
    """In its loss, its gradients and its evaluation."""
    plain = seeded(build)
    loss = F.mse_loss(plain(x), y)
    loss.backward()
    with pipelined(seeded(build), schedule, **pipeline) as engine:
        assert engine.forward_backward(x, y).item() == pytest.approx(loss.item(), rel=1e-5)
        assert_gradients(engine, plain, rtol=1e-5, where=schedule)
        assert engine.evaluate(x, y).item() == pytest.approx(loss.item(), rel=1e-5)


def chain():
    return nn.Sequential(*(nn.Linear(3, 3) for _ in range(8)))


@on_ranks(2)
def test_uneven_numbers_of_stages_and_microbatches(world):
    for schedule, stages, microbatches in (
        ("gpipe", 1, 1),
        ("interleaved-1f1b", 3, 3),
        ("interleaved-1f1b", 1, 1),
        ("looped-bfs", 4, 5),
        ("interleaved-zero-bubble", 3, 6),
        ("interleaved-zero-bubble", 1, 2),
        ("zbv", 2, 1),
        ("zbv", 2, 3),
        ("dualpipev", 2, 5),
    ):
        numbers = {"stages_per_rank": stages, "microbatches": microbatches}
        assert_one_call_is_plain_torchs(chain, *randn(2, 30, 3), schedule, **numbers)


class Offsets(nn.Module):
    """Two parameters whose gradients are one tensor, the output's, where a microbatch is one sample."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.first, self.second = nn.Parameter(torch.zeros(1, 4)), nn.Parameter(torch.ones(1, 4))

    def forward(self, x):
        return self.linear(x) + self.first + self.second


@on_ranks(2)
def test_gradients_that_come_as_one_tensor_are_added_up_apart(world):
    def build_offsets():
        return nn.Sequential(*(Offsets() for _ in range(4)))

    for schedule in [name for name in SEVERAL if SCHEDULES[name].splits_backward]:
        assert_one_call_is_plain_torchs(build_offsets, *randn(2, 4, 4), schedule, microbatches=4)
