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
from families import family, number
from matrix import LAYOUTS, MODES, from_small_scale
from pool import on_ranks, run_on_ranks
from reference import allowed_units, assert_losses_follow, batches, small_gpt, train_engine, units_apart
from small_engines import engine_of
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import paramp
from paramp.models import GPT

NUM_BLOCKS = 2
COUNTED = {"compile": {"backend": "counting"}}


def counting(inner="aot_eager"):
    """Register the backend ``counting``: ``inner``, with the numbers of graphs and of their calls."""
    from torch._dynamo import lookup_backend
    from torch._dynamo.backends.registry import _COMPILER_FNS, register_backend

    counts = SimpleNamespace(graphs=0, calls=0)

    def compile_(graph, inputs):
        counts.graphs += 1
        compiled = lookup_backend(inner)(graph, inputs)

        def run(*arguments):
            counts.calls += 1
            return compiled(*arguments)

        return run

    _COMPILER_FNS.pop("counting", None)
    register_backend(compile_, name="counting")  # by name, because ranks compare their configurations
    return counts


def gpt_engine(model=None, criterion=GPT.loss):
    return engine_of(model or small_gpt(num_layers=NUM_BLOCKS), criterion)


def batch(seed=0):
    return next(batches(1, size=4, seed=seed))


# ---------------------------------------------------------------------------------- the results of eager blocks


def train_both(world, parallel, mode, compiler, checkpointing="none"):
    """The cell compiled, and eager. In steps of one shape nothing is compiled after the first two."""
    from torch._dynamo.utils import counters

    counts, results = counting(), []
    before = counters["inductor"].total()
    for compiled in (compiler, False):
        precision, more = from_small_scale(mode), {"activation_checkpointing": checkpointing}
        config = {"parallel": parallel, "precision": precision, "compile": compiled, "clip_grad_norm": 1.0}
        with launch(config | more, "compile: .* eagerly") as context:
            build = functools.partial(small_gpt, num_layers=2, init_std=0.2)
            results.append(train_engine(context, build, GPT.loss, 6, lr=1.0, length=8, overflow_at=3))
    if compiler is True:
        assert counters["inductor"].total() > before or mode not in ("32-true", "bf16-mixed")
    else:
        assert 0 < counts.graphs <= 3  # in training, in evaluation, and when a pipeline looks for its shapes
        assert counts.calls >= 6
    return results


BY_INDUCTOR = [(layout, mode) for layout in ("1", "tp2") for mode in MODES] + [
    (layout, mode) for layout in ("pp2", "dp2·tp2", "pp2·tp2") for mode in ("32-true", "bf16-mixed", "bf16-naive")
]
COUNTED_CELLS = [
    *(("1", mode, "none") for mode in ("fp8-mixed", "64-true", "bf16-true")),
    *(("1", "32-true", how) for how in ("full", 2, "selective")),
    ("tp2", "32-true", "selective"),
    ("tp2 + sp", "bf16-mixed", "none"),
    ("pp2", "bf16-naive", "none"),
    ("dp2 + zero1", "bf16-naive", "none"),
    ("fsdp2", "bf16-naive", "full"),
    ("fsdp2", "32-true", "selective"),
    ("fsdp2·tp2", "32-true", "none"),
    ("fsdp2·pp2", "32-true", "none"),
]
PART = [("tp2 + sp", "bf16-mixed", "none")]


def assert_follows_eager(layout, mode, **given):
    size, parallel = LAYOUTS[layout]
    given |= {"parallel": parallel, "mode": mode}
    compiled, eager = run_on_ranks(size, __name__, "train_both", given, "cpu")[0]
    assert_losses_follow(compiled[0], eager[0], mode)
    # Twice what layouts are allowed: in fp32 the compiler's own exponentials and norms are 40 units off after one step.
    assert units_apart(compiled, eager, mode) <= 2 * allowed_units(mode)


@family
@needs_compiler
@pytest.mark.parametrize(("layout", "mode"), chosen("compiled blocks", BY_INDUCTOR, [("1", "bf16-mixed")], 2))
def test_a_compiled_mode_follows_the_eager_one(layout, mode):
    assert_follows_eager(layout, mode, compiler=True)


@family
@pytest.mark.parametrize(("layout", "mode", "how"), chosen("compiled layouts", COUNTED_CELLS, PART, 2))
def test_a_compiled_layout_follows_the_eager_one(layout, mode, how):
    assert_follows_eager(layout, mode, compiler={"backend": "counting"}, checkpointing=how)


def losses_of(config):
    with launch(config | {"parallel": {"tensor": 2}}):
        engine = gpt_engine(small_gpt(num_layers=NUM_BLOCKS, dropout=0.1))
        losses = []
        for seed in range(number(2, 3)):
            losses.append(engine.forward_backward(*batch(seed)).item())
            engine.step()
        return losses


@pytest.mark.parametrize("how", ["none", "selective"])
@on_ranks(2)
def test_dropout_over_tensor_ranks_breaks_the_graph_or_runs_eagerly_and_says_so(world, how):
    """Its random numbers differ between ranks inside attention, and are equal outside. Selective checkpointing needs
    whole graphs."""
    counts, checkpointing = counting("eager"), {"activation_checkpointing": how}
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        compiled = losses_of(COUNTED | checkpointing)
    said = [str(one.message) for one in found if re.search("compile: |runs eagerly, because", str(one.message))]
    assert len(said) == len(set(said))
    assert bool(said) == (world.rank == 0)
    where = r"compile: the graph of 'blocks\.0', a Block, breaks at .*\.py:\d+, in "
    expected = where if how == "none" else "compile: .* a Dropout, in it draws differently on tensor ranks"
    assert all(re.match(expected, one) for one in said)
    assert (counts.calls > 0) == (how == "none")
    assert compiled == pytest.approx(losses_of(checkpointing), rel=1e-5)


def test_equal_blocks_share_one_compilation():
    counts = counting("eager")
    with launch(COUNTED):
        kinds = [nn.Sequential(*(nn.Linear(8, 8) for _ in range(size))) for size in (1, 2, 1, 2)]
        engine_of(nn.Sequential(nn.Linear(8, 8), *kinds)).forward_backward(X, X)
    assert (counts.graphs, counts.calls) == (2, 4)


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


# ------------------------------------------------------------------------------------------ what runs eagerly


def test_hooks_that_come_later_run_and_the_block_eagerly():
    counts, seen = counting("eager"), []
    with launch(COUNTED):
        engine = gpt_engine()
        engine.forward_backward(*batch())
        assert counts.calls == NUM_BLOCKS
        for register in ("register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"):
            handle = getattr(engine.module.blocks[1].mlp.up, register)(lambda *_: seen.append(1))
            engine.zero_grad()
            engine.forward_backward(*batch())
            handle.remove()
        assert (len(seen), counts.calls) == (3, NUM_BLOCKS + 3 * (NUM_BLOCKS - 1))
        engine.zero_grad()
        engine.forward_backward(*batch())
        assert (len(seen), counts.calls) == (3, NUM_BLOCKS + 3 * (NUM_BLOCKS - 1) + NUM_BLOCKS)


def test_a_block_that_came_with_a_hook_runs_eagerly_until_it_is_removed():
    """It is named once."""
    model, seen, counts = small_gpt(num_layers=NUM_BLOCKS), [], counting("eager")
    inside, itself = (model.get_submodule(name) for name in ("blocks.0.mlp", "blocks.1"))
    handles = [one.register_forward_hook(lambda *_: seen.append(1)) for one in (inside, itself)]
    with launch(COUNTED):
        with (
            pytest.warns(UserWarning, match=r"^compile: 'blocks\.0' runs eagerly while 'mlp', a MLP, in it has hooks"),
            pytest.warns(UserWarning, match=r"^compile: 'blocks\.1' runs eagerly while it, a \w+, has hooks"),
        ):
            engine = gpt_engine(model)
        engine.forward_backward(*batch())
        assert (len(seen), counts.calls) == (2, 0)
        handles.pop().remove()
        handles.pop().remove()
        engine.zero_grad()
        engine.forward_backward(*batch())
        assert (len(seen), counts.calls) == (2, NUM_BLOCKS)


@on_ranks(2)
def test_a_hook_in_a_sharded_block_is_named_and_one_of_the_block_itself_runs_around_what_is_compiled(world):
    model, seen, counts = small_gpt(num_layers=NUM_BLOCKS), [], counting("eager")
    for name in ("blocks.0.mlp", "blocks.1"):
        model.get_submodule(name).register_forward_hook(lambda *_, name=name: seen.append(name))
    message = r"^compile: 'blocks\.0' runs eagerly while 'mlp', a MLP, in it has hooks"
    with launch(COUNTED | {"parallel": {"data": {"shard": 2}}}):
        with pytest.warns(UserWarning, match=message) if world.rank == 0 else nullcontext():
            engine = gpt_engine(model)
        engine.forward_backward(*batch())
    assert (seen, counts.calls) == (["blocks.0.mlp", "blocks.1"], 1)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        hidden = self.up(x).relu()
        if hidden.sum().item() < 0:
            hidden = -hidden
        return x + self.down(hidden)


def blocks():
    return nn.Sequential(Block(), Block())


X = torch.ones(4, 8)
TORCHS = {"*.up": ColwiseParallel(), "*.down": RowwiseParallel()}
EAGER = [
    (1, {}, lambda: nn.Sequential(nn.Linear(8, 8)), None, "Sequential has no repeated blocks"),
    (1, {"precision": "16-mixed", "emulate_fp16": True}, blocks, None, "'16-mixed' computes fp16 products in fp32 on"),
    (2, {"parallel": {"tensor": 2}}, blocks, TORCHS, "'0' runs eagerly, because 'up', a Linear, in it computes on DT"),
]


@pytest.mark.parametrize("case", range(len(EAGER)))
def test_what_runs_eagerly_says_so(case):
    run_on_ranks(EAGER[case][0], __name__, "run_eagerly", {"case": case}, "cpu")


def run_eagerly(world, case):
    _, config, build, plan, message = EAGER[case]
    counts = counting()
    with launch(COUNTED | config):
        with pytest.warns(UserWarning, match=f"^compile: {message}") if world.rank == 0 else nullcontext():
            engine = engine_of(seeded(build), plan=plan)
        engine.forward_backward(X, X)
    assert counts.graphs == 0


def test_a_break_in_the_graph_is_reported_once_by_name():
    counting("eager")
    with launch(COUNTED):
        engine = engine_of(blocks())
        with pytest.warns(UserWarning, match=r"^compile: the graph of '0', a Block, breaks at .*:\d+, in forward"):
            engine.forward_backward(X, X)
        engine.zero_grad()
        engine.forward_backward(X, X)  # a second warning would be an error


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])  # of the second, only the optimizer step is compiled
def test_without_a_compiler_initialize_names_the_fix(precision, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    fix = r'on rank 0 no C\+\+ compiler no-such-compiler .*; install it, or choose .*: compile={"backend": "aot_eager"}'
    refused = pytest.raises(paramp.ConfigError, match=f"^compile: .*{fix}")
    with launch({"compile": True, "precision": precision}), refused:
        gpt_engine()


@on_ranks(2)
def test_a_model_compiled_on_one_rank_without_a_compiler_is_an_error_on_every_rank(world):
    model = small_gpt(num_layers=NUM_BLOCKS)
    with pytest.MonkeyPatch.context() as patch, launch({"hang_timeout": 20}):
        patch.setenv("CXX", "no-such-compiler")
        with pytest.raises(paramp.ConfigError, match=r"^compile: on rank 1 no C\+\+ compiler"):
            gpt_engine(torch.compile(model) if world.rank else model)


@on_ranks(2)
def test_a_compiled_model_is_refused_by_schedules_that_split_backwards(world):
    pipeline = {"size": 2, "microbatches": 4, "schedule": "zbv"}
    refused = pytest.raises(paramp.ConfigError, match=r"^compile: got True, expected False, because the schedule 'zbv'")
    with launch({"parallel": {"pipeline": pipeline}}), refused:
        gpt_engine(torch.compile(small_gpt(), backend="eager"))
