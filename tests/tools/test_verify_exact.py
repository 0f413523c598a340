"""Bit for bit against one process: what is equal is reported as equal, and of a fault of one ulp the place is named."""

import copy
import json
import math
import re
from dataclasses import asdict, replace

import faults
import pytest
import torch
from commands import ROOT, python
from families import cases, family, rarely
from layouts import layouts
from pool import on_ranks, run_on_ranks, shared_folder
from small_engines import engine_of, train_step
from small_mixture import PLAN, WIDTH, layers, tokens
from verified import gpt, mixtures

import paramp
from paramp.config.reproducible import Reproducible
from paramp.exact.verify_bits import tensor_trace as trace
from paramp.exact.verify_bits.bits_report import ExactReport
from paramp.exact.verify_bits.compare_bits import compare_exactly, different
from paramp.exact.verify_bits.exact_recorder import ExactRecorder
from paramp.exact.verify_bits.exact_run import train_exactly
from paramp.exact.verify_bits.tensor_trace import Entry, Key
from paramp.tools.cli import main
from paramp.tools.verify import two_runs
from paramp.tools.verify.activation_recorder import RankRecord
from paramp.tools.verify.options import Options, configure
from paramp.tools.verify.two_runs import compare_runs
from paramp.tools.verify.user_code import build_model

SAMPLES = 4
OPTIONS = Options(model="faults:faulty_gpt", criterion="faults:criterion", exact=True, steps=2, batch_size=SAMPLES)
LAYOUTS = layouts("tp2, dp2, dp2+zero, pp2, pp2·tp2, ep2, cp2·ep2, cp2, cp2·tp2, cp2·pp2, fsdp2·cp2")
LAYOUTS["dp2·tp2"] = {"data": 2, "tensor": 2, "sequence_parallel": True}
LAYOUTS["pp2 zero-bubble"] = {"pipeline": {"size": 2, "schedule": "interleaved-zero-bubble", "microbatches": 4}}


def run(world, folder, run):
    """One rank of a run, with what :mod:`faults` plants."""
    with faults.planted():
        return two_runs.main(folder, run)


@pytest.fixture(scope="module")
def verify(tmp_path_factory):
    """A function that runs both and compares; the single run is made once for each configuration of it."""
    singles = {}

    def in_folder(options, run_, size, folder):
        (folder / "options.json").write_text(json.dumps(asdict(options)), encoding="utf-8")
        assert set(run_on_ranks(size, __name__, "run", {"folder": folder, "run": run_})) == {0}

    def function(layout, precision="32-true", fault=None, options=OPTIONS, **settings):
        given = {"parallel": LAYOUTS[layout], "precision": precision, **settings}
        options = replace(options, settings=given | ({"FAULT": fault} if fault else {}))
        of_single = json.dumps({"model": options.model, "precision": precision, **settings})
        if fault and fault["kind"] == "weight gradient":
            of_single += " scaled"
        if "context" in LAYOUTS[layout]:
            of_single += " cut"
        if of_single not in singles:
            singles[of_single] = tmp_path_factory.mktemp("single")
            in_folder(options, "single", 1, singles[of_single])
        folder = tmp_path_factory.mktemp("sharded")
        in_folder(options, "sharded", configure(options, "sharded").parallel.least_world_size, folder)
        for file in singles[of_single].glob("single-*"):
            (folder / file.name).symlink_to(file)
        return compare_runs(options, folder)

    return function


EQUAL = [
    ("tp2", "32-true"),
    ("dp2+zero", "16-mixed"),
    ("pp2", "bf16-naive"),
    ("dp2·tp2", "bf16-mixed"),
    ("pp2·tp2", "16-naive"),
    ("pp2 zero-bubble", "32-true"),
    ("cp2·tp2", "32-true"),
    ("cp2·pp2", "bf16-naive"),
    ("cp2", "16-mixed"),
]
PART_EQUAL = [("cp2", "16-mixed")]


@family
@pytest.mark.parametrize(("layout", "precision"), cases("verify exact", EQUAL, PART_EQUAL, 1))
def test_equal_runs_are_reported_as_equal(layout, precision, verify):
    calls = 1 if "zero-bubble" in layout else 2  # it needs four microbatches in a call
    report = verify(layout, precision, gradient_accumulation=calls, clip_grad_norm=1.0)
    assert report.ok, "\n".join(report.lines())
    assert not report.not_compared
    assert report.num_different.total() == 0
    called = [module for module in gpt().modules() if not [*module.children()]]
    compared, parameters = report.num_compared, len([*gpt().parameters()])
    assert compared["backward"] == compared["forward"] >= len(called) * SAMPLES * 2
    assert compared["loss"] == (SAMPLES + calls) * 2
    assert (compared["weight"], compared["optimizer state"]) == (parameters * 2, parameters * 3 * 2)
    assert compared["weight gradient"] >= parameters * SAMPLES * 2
    assert compared["master"] == (parameters * 2 if "naive" in precision else 0)
    assert compared["norm"] == compared["decision"] == 2
    assert compared.keys() - {"master"} == set(trace.KINDS) - {"master"}
    assert [*report.lines()][-1].endswith(f"has the bits of the single process in 2 steps of {precision}")


@pytest.mark.parametrize(("layout", "rank"), rarely([("ep2", 1), ("cp2", 1), ("cp2·ep2", 2)], ("ep2", 1)))
def test_the_gradients_of_experts_over_ranks_are_compared(layout, rank, verify):
    """Of each microbatch, also those that arrive at once."""
    of_experts = replace(OPTIONS, model="verified:mixtures", criterion="paramp.models:MoEGPT.loss")
    report = verify(layout, options=of_experts, clip_grad_norm=1.0)
    assert report.ok, "\n".join(report.lines())
    assert not report.not_compared
    assert (
        report.num_compared["weight gradient"]
        == len([*mixtures().named_parameters(remove_duplicate=False)]) * SAMPLES * 2
    )
    fault = {"kind": "gradient", "rank": rank, "name": "blocks.1.mlp.experts.down_proj", "nth": 0}
    report = verify(layout, fault=fault, options=of_experts, clip_grad_norm=1.0)
    assert (report.first.key.kind, report.first.key.name, report.first.ranks) == (fault["kind"], fault["name"], [rank])


FAULTS = {
    # layout, precision, fault -> step, microbatch; a pipeline's first forward of a module finds shapes
    "forward tp2": ("tp2", "32-true", ("forward", 1, "blocks.0.mlp.down", 0), (1, 0)),
    "forward tp2 sharded": ("tp2", "16-mixed", ("forward", 1, "blocks.1.mlp.up", 6), (2, 2)),
    "forward dp2": ("dp2", "32-true", ("forward", 1, "blocks.0.attention.out", 0), (1, 2)),
    "forward pp2": ("pp2", "bf16-naive", ("forward", 1, "norm", 4), (1, 3)),
    "forward dp2·tp2": ("dp2·tp2", "32-true", ("forward", 3, "blocks.1.norm2", 1), (1, 3)),
    "backward tp2": ("tp2", "32-true", ("backward", 0, "blocks.0.norm2", 1), (1, 1)),
    "backward dp2": ("dp2", "bf16-naive", ("backward", 1, "blocks.1.mlp.down", 0), (1, 2)),
    "backward pp2·tp2": ("pp2·tp2", "32-true", ("backward", 1, "blocks.0.mlp.up", 3), (1, 2)),
    "backward zero-bubble": ("pp2 zero-bubble", "32-true", ("backward", 0, "embedding", 6), (2, 1)),
    "loss dp2": ("dp2", "32-true", ("loss", 1, "", 1), (1, 3)),
    # Of the second of two samples, whose sum is 60 times smaller; in the next microbatch it would be rounded away.
    "weight gradient dp2": ("dp2+zero", "32-true", ("weight gradient", 1, "blocks.1.dropout.1.weight", 1), (1, 2)),
    "weight gradient tp2": ("tp2", "16-mixed", ("weight gradient", 1, "blocks.1.dropout.1.weight", 0), (1, 0)),
    "gradient dp2": ("dp2", "32-true", ("gradient", 0, "norm.bias", 0), (1, None)),
    "master pp2": ("pp2", "bf16-naive", ("master", 1, "blocks.1.mlp.up.weight", 1), (1, None)),
    "master dp2+zero": ("dp2+zero", "bf16-naive", ("master", 1, "blocks.1.mlp.up.weight", 2), (2, None)),
    "state tp2": ("tp2", "32-true", ("optimizer state", 1, "blocks.0.mlp.down.weight.exp_avg", 1), (1, None)),
    "forward cp2": ("cp2", "32-true", ("forward", 1, "blocks.0.mlp.down", 4), (1, 1)),
    "forward cp2·tp2": ("cp2·tp2", "32-true", ("forward", 3, "blocks.1.mlp.up", 4), (1, 1)),
    "backward cp2·pp2": ("cp2·pp2", "32-true", ("backward", 0, "blocks.0.mlp.up", 3), (1, 1)),
    "backward cp2·tp2": ("cp2·tp2", "32-true", ("backward", 1, "blocks.0.attention.qkv", 2), (1, 2)),
    "loss cp2": ("cp2", "32-true", ("loss", 1, "", 4), (1, 3)),
    "gradient cp2": ("cp2", "32-true", ("gradient", 1, "norm.bias", 0), (1, None)),
    "weight fsdp2·cp2": ("fsdp2·cp2", "32-true", ("weight", 2, "blocks.1.attention.qkv.weight", 1), (1, None)),
    "weight dp2·tp2": ("dp2·tp2", "32-true", ("weight", 2, "blocks.1.attention.qkv.weight", 1), (1, None)),
}
PART = ["backward tp2"]


@family
@pytest.mark.parametrize("name", cases("verify exact faults", [*FAULTS], PART, 1))
def test_a_fault_of_one_ulp_on_one_rank_is_named(name, verify):
    layout, precision, (kind, rank, where, nth), (step, microbatch) = FAULTS[name]
    report = verify(layout, precision, {"kind": kind, "rank": rank, "name": where, "nth": nth})
    assert not report.ok
    found = report.first
    named = (found.key.kind, found.key.name, found.key.step, found.key.microbatch)
    assert named == (kind, where, step, microbatch), found
    if kind != "weight gradient":  # a sum
        assert found.num_different == 1
        assert found.ranks == [rank]
    if kind not in ("weight gradient", "loss"):  # a number of another dtype
        bits = [int(re.search(r"0x([0-9a-f]+)", value)[1], 16) for value in (found.single, found.sharded)]
        assert bits[1] - bits[0] == 1
    last = [*report.lines()][-1]
    assert last.startswith("the first tensor that differs: ")
    assert microbatch is None or f"microbatch {microbatch} of step {step}" in last
    assert where in last


def test_the_command_prints_the_report_and_exits_with_0_or_1(tmp_path, monkeypatch):
    equal = ExactReport("tp2", "16-mixed", 3, None)
    with monkeypatch.context() as patch:
        patch.setattr(two_runs, "verify", lambda options, tolerance: equal)
        assert main(["verify", "a:b", "--exact"]) == 0
    settings, written = tmp_path / "own.toml", tmp_path / "report.json"
    settings.write_text('[FAULT]\nkind = "backward"\nrank = 1\nname = "blocks.0.mlp.down"\nnth = 1\n')
    own = f"--exact --criterion faults:criterion --config {settings} --steps 1 --tp 2 --json {written}".split()
    path = f"{ROOT}:{ROOT / 'tests' / 'support'}"
    result = python("-m", "paramp", "verify", "faults:faulty_gpt", *own, PYTHONPATH=path)
    assert result.returncode == 1, result.stdout + result.stderr
    where = "blocks.0.mlp.down (backward, gradient of the output, microbatch 1 of step 1): 1 of 512 elements"
    last = result.stdout.splitlines()[-1]
    assert re.fullmatch(
        f"the first tensor that differs: {re.escape(where)}, first at "
        r"\[\d.*\]: \S+ \(0x\w+\) single, \S+ \(0x\w+\) on rank 1",
        last,
    )
    found = json.loads(written.read_text())
    assert (found["ok"], found["first"]["key"]["name"]) == (False, "blocks.0.mlp.down")
    assert found["num_different"]["backward"] <= found["num_compared"]["backward"]


def test_only_exact_is_reproducible_and_accumulates():
    settings = {"reproducible": {"slices": 4}, "gradient_accumulation": 2}
    for run_ in ("single", "sharded"):
        for given, exact, expected in (
            (settings, True, (Reproducible(slices=4), 2)),
            ({}, True, (Reproducible(), 1)),
            (settings, False, (False, 1)),
        ):
            found = configure(Options(model="a:b", settings=given, exact=exact), run_)
            assert (found.reproducible, found.gradient_accumulation) == expected


def test_a_batch_runs_only_in_its_step_if_sequences_are_whole(tmp_path, monkeypatch):
    """One of cut sequences has a trial before."""
    options, calls = Options(model="verified:blocks", batches="verified:batches", exact=True, steps=2), []

    def criterion(output, target):
        calls.append(len(output))
        return torch.nn.functional.mse_loss(output, target)

    monkeypatch.setattr(two_runs, "choose_criterion", lambda *_: criterion)
    with paramp.launch_from_torch(configure(options, "single"), device="cpu") as context:
        train_exactly(options, context, 4, tmp_path / "trace")
    assert calls == [1] * 8 * 2  # samples, steps


def test_dropout_is_on_only_in_exact():
    for exact, expected in ((True, 0.1), (False, 0.0)):
        model = build_model(Options(model="verified:gpt", exact=exact), seed=1)
        assert model.get_submodule("blocks.1.attention").dropout == expected
        rates = [module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)]
        everything = [item for module in model.modules() for item in vars(module).items()]
        numbers = [value for name, value in everything if "dropout" in name and isinstance(value, float)]
        assert set(rates) == set(numbers) == {expected}
        assert min(len(rates), len(numbers)) > 1


def test_bits_differ_where_numbers_are_equal():
    floats = torch.tensor([0.0, 1.0, math.nan])
    assert different(floats, torch.tensor([-0.0, 1.0, math.nan])).tolist() == [True, False, False]
    other_nan = (floats.view(torch.int32) + torch.tensor([0, 0, 1], dtype=torch.int32)).view(torch.float32)
    assert different(floats, other_nan).tolist() == [False, False, True]


WHOLE = torch.arange(8.0).view(2, 4)


def by_hand(single, *sharded, spans_stages=False, context_ranks=None):
    """The report on traces of (kind, name, microbatch, values, and offsets or what else an entry has)."""

    def entries_of(given):
        for kind, name, microbatch, values, *others in given:
            yield Entry(Key(step=1, kind=kind, name=name, microbatch=microbatch), values, *others)

    records = [RankRecord(0, rank, modules=["", "up", "down"]) for rank in range(-1, len(sharded))]
    for record in records[1:] if spans_stages else ():
        record.modules = ["", "up"]
    for record, rank in zip(records[1:], context_ranks or [0] * len(sharded), strict=True):
        record.context_rank = rank
    report = ExactReport("tp2", "32-true", 1)
    traces = {"single": [entries_of(single)], "sharded": [entries_of(given) for given in sharded]}
    compare_exactly(records[0], records[1:], traces, report)
    return report


def recorded(path, model, *factors, **config):
    """By kind, name and step, what is recorded of a step for each of ``factors``, of its targets."""
    written, x = trace.TraceWriter(path), torch.randn(4, 4)
    with paramp.launch_from_torch({"reproducible": True} | config):
        engine = engine_of(model)
        with ExactRecorder(engine, [], written) as recorder:
            for step, factor in enumerate(factors, 1):
                recorder.begin(step, 0, 4)
                recorder.end_step(train_step(engine, x, x * factor))
                engine.zero_grad()
    written.close()
    return {(entry.key.kind, entry.key.name, entry.key.step): entry.values for entry in trace.read(path)}


def test_of_a_step_the_masters_are_recorded_beside_the_weights_that_are_rounded(tmp_path):
    model = torch.nn.Linear(4, 4)
    start = copy.deepcopy(model.state_dict())
    found = recorded(tmp_path / "trace", model, 1.0, precision="bf16-naive")
    for name, value in start.items():
        moved = value - 0.1 * found["gradient", name, 1].float()
        torch.testing.assert_close(found["master", name, 1].view_as(value), moved)
        assert torch.equal(found["weight", name, 1], found["master", name, 1].bfloat16())
        assert not torch.equal(found["weight", name, 1].float(), found["master", name, 1])


def test_of_a_step_the_norm_is_recorded_and_whether_it_is_skipped_with_the_scale_before_and_after(tmp_path):
    scaling = {"mode": "16-mixed", "init_scale": 16.0, "hysteresis": 1}
    options = {"precision": scaling, "clip_grad_norm": 1.0}
    found = recorded(tmp_path / "trace", torch.nn.Linear(4, 4), 1.0, math.inf, **options)
    gradients = torch.cat([found["gradient", name, 1].flatten() for name in ("weight", "bias")])
    torch.testing.assert_close(found["norm", "", 1].float(), gradients.norm().view(1) / 16)
    assert (found["decision", "", 1].tolist(), found["decision", "", 2].tolist()) == ([0, 16, 16], [1, 16, 8])


@on_ranks(4)
def test_of_sharded_experts_a_rank_records_only_its_shard_of_the_windows_gradient(world):
    """The gradient of a microbatch is that of whole experts, which has no place in a shard."""
    x, y, plain = tokens(), torch.zeros(16, WIDTH), layers()
    torch.nn.functional.mse_loss(plain(x), y).backward()
    written = trace.TraceWriter(path := shared_folder() / f"trace-{world.rank}")
    parallel = {"expert": 2, "data": {"shard": 4}}
    with paramp.launch_from_torch({"reproducible": True, "parallel": parallel}):
        engine = engine_of(layers(), plan=PLAN)
        with ExactRecorder(engine, [], written) as recorder:
            recorder.begin(1, 0, 4)
            engine.forward_backward(*(one.chunk(4)[world.rank] for one in (x, y)))
            engine.step()
    written.close()
    found = [entry for entry in trace.read(path) if "experts" in entry.key.name]
    assert {entry.key.kind for entry in found} == {"gradient"}
    for entry in found:
        whole = plain.get_parameter(entry.key.name).grad
        at = tuple(slice(first, first + size) for first, size in zip(entry.offsets, entry.values.shape, strict=True))
        torch.testing.assert_close(entry.values, whole[at])


def test_the_first_difference_is_that_of_the_step_and_not_of_the_schedule():
    """A single process runs the backward of a microbatch before the forward of the next."""
    order = ("forward up 0", "forward down 0", "backward down 0", "backward up 0", "forward up 1", "forward down 1")
    single = [(*line.split()[:2], int(line[-1]), WHOLE) for line in order]
    wrong = [(*entry[:3], entry[3] + 1) for entry in single]
    for changed, expected in (((1, 4), 1), ((2, 5), 5), ((2, 3), 2), ((0, 1, 2, 3, 4, 5), 0)):
        rank = [wrong[index] if index in changed else entry for index, entry in enumerate(single)]
        report = by_hand(single, rank)
        kind, name, microbatch, _ = single[expected]
        assert (report.first.key.kind, report.first.key.name, report.first.key.microbatch) == (kind, name, microbatch)
        assert report.num_different.total() == len(changed)


ORDER = [("forward", "up", 0), ("loss", "", 0), ("backward", "up", 0), ("weight gradient", "up.weight", 0)]
ORDER += [("gradient", "up.weight", None), ("norm", "", None), ("decision", "", None)]
ORDER += [(kind, "up.weight", None) for kind in ("master", "optimizer state", "weight")]
"""In which a step computes, and the trace of a run does not have to be."""


def test_what_differs_first_is_what_a_step_computes_first():
    assert [kind for kind, *_ in ORDER] == [*trace.KINDS]
    for first in range(len(ORDER)):
        whole = [(*entry, WHOLE) for entry in reversed(ORDER)]
        rank = [(*entry, WHOLE + (ORDER.index(entry) >= first)) for entry in reversed(ORDER)]
        found = by_hand(whole, rank).first.key
        assert (found.kind, found.name, found.microbatch) == ORDER[first]


def test_parts_are_brought_together():
    left, right = WHOLE.chunk(2, 1)
    entry = ("forward", "up", 0)
    assert by_hand([(*entry, WHOLE)], [(*entry, left)], [(*entry, right)]).ok
    report = by_hand([(*entry, WHOLE)], [(*entry, left)], [(*entry, right + torch.tensor([[0, 0], [1, 0]]))])
    assert (report.first.index, report.first.ranks, report.first.num_different) == ((1, 2), [1], 1)
    assert (report.first.single, report.first.sharded) == ("6 (0x40c00000)", "7 (0x40e00000)")
    weight = ("weight", "up.weight", None)
    top, bottom = WHOLE.chunk(2)
    assert by_hand([(*weight, WHOLE, (0, 0))], [(*weight, top, (0, 0))], [(*weight, bottom, (1, 0))]).ok
    copies = [(*weight, WHOLE, (0, 0))], [(*weight, WHOLE, (0, 0))], [(*weight, WHOLE + 1, (0, 0))]
    for ranks, wrong in (((1, 2), 1), ((2, 1), 0)):
        report = by_hand(copies[0], *(copies[index] for index in ranks))
        assert (report.first.num_different, report.first.ranks) == (8, [wrong])


def test_tokens_of_context_ranks_are_brought_together_behind_channels_that_they_do_not_divide():
    """Two samples of three channels, four tokens and two features, on two context ranks of two tensor ranks each."""
    whole, entry = torch.arange(48.0).view(2, 3, 4, 2), ("forward", "up", 0)
    parts = [part.clone() for half in whole.chunk(2, 2) for part in half.chunk(2, 3)]
    for error in (0, 1):
        parts[3][1, 2, 0, 0] += error  # the third token's second feature
        report = by_hand([(*entry, whole)], *([(*entry, part)] for part in parts), context_ranks=(0, 0, 1, 1))
        assert report.num_compared["forward"] == 1
        assert report.ok == (not error)
    assert (report.first.index, report.first.ranks, report.first.num_different) == ((1, 2, 2, 1), [3], 1)
    parts = [part for tokens in WHOLE.chunk(2) for part in tokens.chunk(2, 1)]  # of the one sample in a microbatch
    report = by_hand([(*entry, WHOLE)], *([(*entry, part)] for part in parts), context_ranks=(0, 0, 1, 1))
    assert (report.ok, report.num_compared["forward"]) == (True, 1)


def test_what_cannot_be_compared_is_listed():
    entry = ("forward", "up", 0)
    column = [(*entry, WHOLE[:, :1])]
    for ranks, reason in (
        ([[], []], "only the single run has it"),
        ([column, column], "its ranks have shapes (2, 1), (2, 1), which do not make"),
        ([[(*entry, WHOLE, None, True)], [(*entry, WHOLE)]], "its ranks have terms of a sum"),
    ):
        report = by_hand([(*entry, WHOLE)], *ranks)
        assert report.ok
        assert report.not_compared["up (forward)"].startswith(reason)
        assert any(line.startswith(f"not compared: up (forward): {reason}") for line in report.lines())
    assert "only the sharded run has it" in by_hand([], [(*entry, WHOLE)]).not_compared.values()
    assert not by_hand([("forward", "", 0, WHOLE)], [("forward", "", 0, WHOLE + 1)], spans_stages=True).not_compared


def test_state_that_only_one_run_has_and_another_dtype_are_differences():
    state = ("optimizer state", "up.weight.exp_avg", None)
    whole, half = (*state, WHOLE, (0, 0)), (*state, WHOLE[:1], (0, 0))
    for runs in (([whole], []), ([], [whole]), ([whole], [half])):
        report = by_hand(*runs)
        assert not report.ok
        last = [*report.lines()][-1]
        where = "up.weight.exp_avg (optimizer state after step 1)"
        assert last.startswith(f"tp2 does not have the tensors of the single process: {where}: ")
    report = by_hand([("forward", "up", 0, WHOLE)], [("forward", "up", 0, WHOLE.half())])
    assert not report.ok
    assert [*report.lines()][-1].endswith("step 1): its dtypes are torch.float16, torch.float32")
