"""Compiled blocks: the results of eager ones, code that has run compiled, and what is said where it cannot."""

import functools
import re
import warnings
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from beside_plain import launch_with_compiler as launch
from beside_plain import seeded
from compiler import needs_compiler
from families import cases as chosen
from families import family
from matrix import LAYOUTS, MODES, from_small_scale
from pool import on_ranks, run_on_ranks
from reference import allowed_units, assert_losses_follow, batches, small_gpt, train_engine, units_apart
from small_engines import engine_of
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import paramp
from paramp.config.files import load
from paramp.engine.model_setup import plain
from paramp.models import GPT

NUM_BLOCKS = 2
COUNTED = {"compile": {"backend": "counting"}}


def counting():
    """Register the backend ``counting``: ``aot_eager``, with the numbers of graphs and of their calls."""
    from torch._dynamo import lookup_backend
    from torch._dynamo.backends.registry import _COMPILER_FNS, register_backend

    counts = SimpleNamespace(graphs=0, calls=0)

    def compile_(graph, inputs):
        counts.graphs += 1
        compiled = lookup_backend("aot_eager")(graph, inputs)

        def run(*arguments):
            counts.calls += 1
            return compiled(*arguments)

        return run

    _COMPILER_FNS.pop("counting", None)
    register_backend(compile_, name="counting")  # by name, because ranks compare their configurations
    return counts


def gpt(dropout=0.0):
    return small_gpt(num_layers=NUM_BLOCKS, dropout=dropout)


def gpt_engine(model=None, criterion=GPT.loss):
    return engine_of(model or gpt(), criterion)


def batch(seed=0):
    return next(batches(1, size=4, seed=seed))


def train(counts, dropout=0.0, steps=4, **config):
    """The losses and norms of some steps, of which each is of two batches, and of an evaluation."""
    with launch({**(COUNTED if counts else {}), "gradient_accumulation": 2, **config}) as context:
        engine = gpt_engine(gpt(dropout))
        results = []
        for step in range(steps):
            for part in range(2):
                results.append(engine.forward_backward(*batch(4 * step + 2 * part + context.batch_axis.rank)).item())
                done = engine.step()
            results.append(float(done.grad_norm))
            if step == 2:
                results.append(engine.evaluate(*batch()).item())
                graphs = counts and counts.graphs
        assert not counts or counts.graphs == graphs, "compiled after the third step"
        return results


def assert_trains_as_eagerly(rel, **config):
    """And returns the counts."""
    counts = counting()
    assert train(counts, **config) == pytest.approx(train(None, **config), rel=rel)
    return counts


CALLS = NUM_BLOCKS * (4 * 2 + 1)
PP2 = {"pipeline": {"size": 2, "microbatches": 2}}
FSDP2 = {"data": {"shard": 2}}
OF_RANKS = {
    "tp2": {"parallel": {"tensor": 2}},
    "tp2 + sp": {"parallel": {"tensor": 2, "sequence_parallel": True}, "precision": "bf16-mixed"},
    "pp2": {"parallel": PP2, "precision": "bf16-naive"},
    "zero1": {"parallel": {"data": 2, "zero": 1}, "precision": "bf16-naive"},
    "fsdp2": {"parallel": FSDP2, "precision": "bf16-naive", "activation_checkpointing": "full"},
    "fsdp2, selective": {"parallel": FSDP2, "activation_checkpointing": "selective"},
    "tp2, selective": {"parallel": {"tensor": 2}, "activation_checkpointing": "selective"},
    "fsdp2·tp2": {"parallel": FSDP2 | {"tensor": 2}},
    "fsdp2·pp2": {"parallel": FSDP2 | PP2},
}


@family
@pytest.mark.parametrize("layout", chosen("compiled layouts", list(OF_RANKS), ["tp2 + sp", "fsdp2"], 1))
def test_layouts_train_as_eagerly(layout):
    run_on_ranks(4 if "·" in layout else 2, __name__, "train_layout", {"layout": layout})


def train_layout(world, layout):
    counts = assert_trains_as_eagerly(1e-4, **OF_RANKS[layout])
    assert counts.calls >= CALLS  # a pipeline has half of the blocks, two microbatches
    assert counts.graphs <= 3  # in training, in evaluation, and when a pipeline looks for its shapes


ALONE = [
    *({"activation_checkpointing": how, "dropout": 0.1} for how in ("none", "full", 2, "selective")),
    *({"precision": mode} for mode in ("fp8-mixed", "64-true", "bf16-true")),
]


@family
@pytest.mark.parametrize("config", chosen("compiled alone", ALONE, ALONE[-1:], 2))
def test_one_process_trains_as_eagerly(config, capsys):
    assert assert_trains_as_eagerly(1e-4, **config).calls == CALLS


def warned_of(text, rank, rel, **config):
    """The calls of compiled blocks in a training with dropout on two tensor ranks, and warnings, of the first rank."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        counts = assert_trains_as_eagerly(rel, parallel={"tensor": 2}, dropout=0.1, **config)
    said = [str(one.message) for one in found if text in str(one.message)]
    assert len(said) == len(set(said))
    assert bool(said) == (rank == 0)
    return counts.calls, said


@family
@pytest.mark.parametrize("how", chosen("dropout over tensor ranks", ["none", "selective"], ["selective"], 1))
@on_ranks(2)
def test_dropout_over_tensor_ranks_breaks_the_graph_or_runs_eagerly_and_says_so(world, how):
    """Its random numbers differ between ranks inside attention, and are equal outside. Selective checkpointing needs
    whole graphs."""
    if how == "none":
        calls, said = warned_of("compile: ", world.rank, 1e-5)
        where = r"compile: the graph of 'blocks\.0', a Block, breaks at .*\.py:\d+, in "
        assert calls > 0
        assert all(re.match(where, one) for one in said)
    else:
        calls, said = warned_of("runs eagerly, because", world.rank, 0, steps=3, activation_checkpointing="selective")
        assert calls == 0
        assert all("a Dropout, in it draws differently on tensor ranks" in one for one in said)


def test_a_compiled_float8_layer_reports_an_infinite_gradient(capsys):
    """The cast to float8 would make it finite."""
    counting()
    with launch({"precision": "fp8-mixed", **COUNTED}):
        engine = gpt_engine(criterion=lambda output, _: output.sum())
        for factor, overflow in ((1.0, False), (float("inf"), True), (1.0, False)):
            hook = engine.module.norm.register_full_backward_hook(lambda *_, by=factor: (_[1][0] * by,))
            engine.forward_backward(*batch())
            hook.remove()
            assert engine.step().overflow is overflow


def test_hooks_that_come_later_run_and_the_block_eagerly():
    counts, seen = counting(), []
    with launch(COUNTED):
        engine = gpt_engine()
        engine.forward_backward(*batch())
        assert counts.calls == NUM_BLOCKS
        for register in ("register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"):
            handle = getattr(engine.module.blocks[1].mlp.up, register)(lambda *_: seen.append(1))
            engine.forward_backward(*batch())
            handle.remove()
        assert (len(seen), counts.calls) == (3, NUM_BLOCKS + 3 * (NUM_BLOCKS - 1))
        engine.forward_backward(*batch())
        assert (len(seen), counts.calls) == (3, NUM_BLOCKS + 3 * (NUM_BLOCKS - 1) + NUM_BLOCKS)


@pytest.mark.parametrize(
    ("name", "said"),
    [("blocks.0.mlp", "while 'mlp', a MLP, in it has hooks"), ("blocks.0", r"while it, a \w+, has hooks")],
)
def test_a_block_that_came_with_a_hook_runs_eagerly_until_it_is_removed(name, said):
    """It is named once."""
    model, seen = gpt(), []
    handle = model.get_submodule(name).register_forward_hook(lambda *_: seen.append(1))
    counts = counting()
    with launch(COUNTED):
        with pytest.warns(UserWarning, match=rf"^compile: 'blocks\.0' runs eagerly {said}"):
            engine = gpt_engine(model)
        engine.forward_backward(*batch())
        assert (len(seen), counts.calls) == (1, NUM_BLOCKS - 1)
        handle.remove()
        engine.forward_backward(*batch())
        assert (len(seen), counts.calls) == (1, 2 * NUM_BLOCKS - 1)


@on_ranks(2)
def test_the_diagnosis_of_an_overflow_runs_eagerly_and_says_so(world):
    counts = counting()
    with launch({"parallel": {"tensor": 2}, **COUNTED}):
        model = gpt()
        with torch.no_grad():
            model.blocks[1].mlp.down.bias[0] = torch.inf
        engine = gpt_engine(model)
        engine.forward_backward(*batch())
        assert engine.step().overflow
        calls = counts.calls
        report = engine.diagnose_overflow()
        assert counts.calls == calls > 0
        assert report.origin.module == "blocks.1.mlp.down"
        assert "compiled blocks ran eagerly in the rerun" in str(report)


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        hidden = self.up(x).relu()
        if hidden.sum().item() < 0:
            hidden = -hidden
        return x + self.down(hidden)


def branches():
    return nn.Sequential(Branching(), Branching())


X = torch.ones(4, 8)


def test_a_break_in_the_graph_is_reported_once_by_name():
    counting()
    with launch(COUNTED):
        engine = engine_of(branches())
        with pytest.warns(UserWarning, match=r"^compile: the graph of '0', a Branching, breaks at .*:\d+, in forward"):
            engine.forward_backward(X, X)
        engine.forward_backward(X, X)  # a second warning would be an error


@on_ranks(2)
def test_layers_on_dtensors_run_eagerly_and_say_so(world):
    plan = {"*.up": ColwiseParallel(), "*.down": RowwiseParallel()}
    counts = counting()
    with launch({"parallel": {"tensor": 2}, **COUNTED}):
        message = "^compile: '0' runs eagerly, because 'up', a Linear, in it computes on DTensors"
        with pytest.warns(UserWarning, match=message) if world.rank == 0 else nullcontext():
            engine = engine_of(seeded(branches), plan=plan)
        engine.forward_backward(X, X)
        assert counts.calls == 0


@pytest.mark.parametrize(
    ("config", "model", "given", "message"),
    [
        ({}, lambda: nn.Sequential(nn.Linear(8, 8)), (X, X), "Sequential has no repeated blocks"),
        (
            {"precision": "16-mixed", "emulate_fp16": True},
            gpt,
            batch(),
            "'16-mixed' computes fp16 products in fp32 on this CPU",
        ),
    ],
)
def test_what_runs_eagerly_says_so(config, model, given, message):
    counts = counting()
    with launch(COUNTED | config):
        with pytest.warns(UserWarning, match=f"^compile: {message}"):
            engine = engine_of(model(), GPT.loss if config else nn.functional.mse_loss)
        engine.forward_backward(*given)
    assert counts.graphs == 0


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])  # of the second, only the optimizer step is compiled
def test_without_a_compiler_initialize_names_the_fix(precision, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    fix = r'on rank 0 no C\+\+ compiler no-such-compiler .*; install it, or choose .*: compile={"backend": "aot_eager"}'
    refused = pytest.raises(paramp.ConfigError, match=f"^compile: .*{fix}")
    with launch({"compile": True, "precision": precision}), refused:
        gpt_engine()


@on_ranks(2)
def test_a_model_compiled_on_one_rank_without_a_compiler_is_an_error_on_every_rank(world):
    with pytest.MonkeyPatch.context() as patch, launch({"hang_timeout": 20}):
        patch.setenv("CXX", "no-such-compiler")
        with pytest.raises(paramp.ConfigError, match=r"^compile: on rank 1 no C\+\+ compiler"):
            gpt_engine(torch.compile(gpt()) if world.rank else gpt())


def test_a_compiled_model_is_refused_by_schedules_that_split_backwards():
    split = {"pipeline": {"size": 2, "microbatches": 4, "schedule": "zbv"}}
    with launch({}) as context:
        context.config = load({"parallel": split})
        with pytest.raises(paramp.ConfigError, match=r"^compile: got True, expected False, because the schedule 'zbv'"):
            plain(torch.compile(gpt(), backend="eager"), context)


COMPILED = [(layout, mode) for layout in ("1", "tp2") for mode in MODES] + [
    (layout, mode) for layout in ("pp2", "dp2·tp2", "pp2·tp2") for mode in ("32-true", "bf16-mixed", "bf16-naive")
]


def train_both(world, parallel, mode):
    """The cell compiled by torch's default backend, and eager."""
    from torch._dynamo.utils import counters

    results, before = [], counters["inductor"].total()
    for compiled in (True, False):
        config = {"parallel": parallel, "precision": from_small_scale(mode), "compile": compiled, "clip_grad_norm": 1.0}
        with launch(config, "compile: .* eagerly") as context:
            build = functools.partial(small_gpt, num_layers=2, init_std=0.2)
            results.append(train_engine(context, build, GPT.loss, 6, lr=1.0, length=8, overflow_at=3))
        assert counters["inductor"].total() > before or mode not in ("32-true", "bf16-mixed")
    return results


@family
@needs_compiler
@pytest.mark.parametrize(("layout", "mode"), chosen("compiled blocks", COMPILED, [("1", "bf16-mixed")], 2))
def test_a_compiled_mode_follows_the_eager_one(layout, mode):
    size, parallel = LAYOUTS[layout]
    compiled, eager = run_on_ranks(size, __name__, "train_both", {"parallel": parallel, "mode": mode}, "cpu")[0]
    assert_losses_follow(compiled[0], eager[0], mode)
    # Twice what layouts are allowed: in fp32 the compiler's own exponentials and norms are 40 units off after one step.
    assert units_apart(compiled, eager, mode) <= 2 * allowed_units(mode)
