"""Compiled blocks: the results of eager ones, code that has run compiled, and what is said where it cannot."""

import functools
import re
import warnings
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
from compiler import needs_compiler
from families import cases as chosen
from families import family
from matrix import LAYOUTS, MODES, from_small_scale
from pool import on_ranks, run_on_ranks
from reference import allowed_units, assert_losses_follow, small_gpt, train_engine, units_apart
from torch import nn

import paramp
from paramp.models import GPT, GPTConfig

NUM_BLOCKS = 2


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


COUNTED = {"backend": "counting"}


@contextmanager
def launch(config):
    """A context in which warnings that torch hides elsewhere, of its own compiler, are no errors."""
    with warnings.catch_warnings(), paramp.launch_from_torch(config) as context:
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
        warnings.filterwarnings("ignore", "`torch.jit.script_method` is deprecated", DeprecationWarning)
        warnings.filterwarnings("ignore", ".*Function'> should not be instantiated", DeprecationWarning)
        yield context


def gpt(dropout=0.0):
    torch.manual_seed(0)
    shape = {"num_layers": NUM_BLOCKS, "num_heads": 4, "width": 32, "max_seq_len": 16, "vocab_size": 128}
    return GPT(GPTConfig(**shape, dropout=dropout))


def initialize(model=None, criterion=GPT.loss, **options):
    return paramp.initialize(model or gpt(), functools.partial(torch.optim.SGD, lr=0.1), criterion, **options)[0]


def batch(seed=0):
    tokens = torch.randint(128, (4, 17), generator=torch.Generator().manual_seed(seed))
    return tokens[:, :-1], tokens[:, 1:].contiguous()


def train(counts, dropout=0.0, steps=4, **config):
    """The losses and norms of some steps, of which each is of two batches, and of an evaluation."""
    compiled = {"compile": COUNTED if counts else False, "gradient_accumulation": 2}
    with launch({**compiled, **config}) as context:
        engine = initialize(gpt(dropout))
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


PLACES = {
    "tp2": {"parallel": {"tensor": 2}},
    "tp2 + sp": {"parallel": {"tensor": 2, "sequence_parallel": True}, "precision": "bf16-mixed"},
    "pp2": {"parallel": {"pipeline": {"size": 2, "microbatches": 2}}, "precision": "bf16-naive"},
    "zero1": {"parallel": {"data": 2, "zero": 1}, "precision": "bf16-naive"},
    "fsdp2": {"parallel": {"data": {"shard": 2}}, "precision": "bf16-naive", "activation_checkpointing": "full"},
    "fsdp2, selective": {"parallel": {"data": {"shard": 2}}, "activation_checkpointing": "selective"},
    "tp2, selective": {"parallel": {"tensor": 2}, "activation_checkpointing": "selective"},
    "fsdp2·tp2": {"parallel": {"data": {"shard": 2}, "tensor": 2}},
    "fsdp2·pp2": {"parallel": {"data": {"shard": 2}, "pipeline": {"size": 2, "microbatches": 2}}},
}


@family
@pytest.mark.parametrize("layout", chosen("compiled layouts", list(PLACES), ["tp2 + sp", "fsdp2"], 2))
def test_layouts_train_as_eagerly(layout):
    run_on_ranks(4 if "·" in layout else 2, __name__, "trains_as_eagerly", {"layout": layout})


def trains_as_eagerly(world, layout):
    counts = counting()
    losses = train(counts, **PLACES[layout])
    assert losses == pytest.approx(train(None, **PLACES[layout]), rel=1e-5 if world.size == 4 else 1e-4)
    assert counts.calls >= NUM_BLOCKS * (4 * 2 + 1)  # a pipeline has half of the blocks, two microbatches
    assert counts.graphs <= 3  # in training, in evaluation, and when a pipeline looks for its shapes


@family
@pytest.mark.parametrize("how", chosen("compiled dropout", ["none", "full", 2, "selective"], ["full"], 1))
def test_dropout_and_checkpointing_in_one_process(how):
    config = {"activation_checkpointing": how, "dropout": 0.1}
    counts = counting()
    assert train(counts, **config) == pytest.approx(train(None, **config), rel=1e-5)
    assert counts.calls == NUM_BLOCKS * (4 * 2 + 1)


@family
@pytest.mark.parametrize("how", chosen("dropout over tensor ranks", ["none", "selective"], ["selective"], 1))
@on_ranks(2)
def test_dropout_over_tensor_ranks_breaks_the_graph_or_runs_eagerly_and_says_so(world, how):
    """Its random numbers differ between ranks inside attention, and are equal outside. Selective checkpointing needs
    whole graphs."""
    config = {"parallel": {"tensor": 2}, "dropout": 0.1, "steps": 3, "activation_checkpointing": how}
    counts = counting()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        results = train(counts, **config)
    said = [str(one.message) for one in found if str(one.message).startswith("compile: ")]
    assert len(said) == len(set(said))
    assert bool(said) == (world.rank == 0)
    if how == "selective":
        assert counts.calls == 0
        assert results == train(None, **config)
        eagerly = [one for one in said if "runs eagerly, because" in one]
        assert bool(eagerly) == (world.rank == 0)
        assert all("a Dropout, in it draws differently on tensor ranks" in one for one in eagerly)
    else:
        assert counts.calls > 0
        assert results == pytest.approx(train(None, **config), rel=1e-5)
        where = r"compile: the graph of 'blocks\.0', a Block, breaks at .*\.py:\d+, in "
        assert all(re.match(where, one) for one in said)


@family
@pytest.mark.parametrize("mode", chosen("compiled modes", ["fp8-mixed", "64-true", "bf16-true"], ["bf16-true"], 1))
def test_other_modes_train_as_eagerly(mode, capsys):
    counts = counting()
    assert train(counts, precision=mode) == pytest.approx(train(None, precision=mode), rel=1e-4)
    assert counts.calls == NUM_BLOCKS * (4 * 2 + 1)


def test_a_compiled_float8_layer_reports_an_infinite_gradient(capsys):
    """The cast to float8 would make it finite."""
    counting()
    with launch({"precision": "fp8-mixed", "compile": COUNTED}):
        engine = initialize(criterion=lambda output, _: output.sum())
        for factor, overflow in ((1.0, False), (float("inf"), True), (1.0, False)):
            hook = engine.module.norm.register_full_backward_hook(lambda *_, by=factor: (_[1][0] * by,))
            engine.forward_backward(*batch())
            hook.remove()
            assert engine.step().overflow is overflow


def test_hooks_that_come_later_run_and_the_block_eagerly():
    counts = counting()
    with launch({"compile": COUNTED}):
        engine, seen = initialize(), []
        engine.forward_backward(*batch())
        assert counts.calls == NUM_BLOCKS
        for register in ("register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"):
            handle = getattr(engine.module.blocks[1].mlp.up, register)(lambda *_: seen.append(1))
            engine.forward_backward(*batch())
            handle.remove()
        assert (len(seen), counts.calls) == (3, NUM_BLOCKS + 3 * (NUM_BLOCKS - 1))
        engine.forward_backward(*batch())
        assert (len(seen), counts.calls) == (3, NUM_BLOCKS + 3 * (NUM_BLOCKS - 1) + NUM_BLOCKS)


def test_a_block_that_came_with_a_hook_runs_eagerly_until_it_is_removed():
    model, seen = gpt(), []
    handle = model.blocks[0].mlp.register_forward_hook(lambda *_: seen.append(1))
    counts = counting()
    with launch({"compile": COUNTED}):
        with pytest.warns(UserWarning, match=r"^compile: 'blocks\.0' runs eagerly while 'mlp', a MLP, in it has hooks"):
            engine = initialize(model)
        engine.forward_backward(*batch())
        assert (len(seen), counts.calls) == (1, NUM_BLOCKS - 1)
        handle.remove()
        engine.forward_backward(*batch())
        assert (len(seen), counts.calls) == (1, 2 * NUM_BLOCKS - 1)


def test_a_block_with_a_hook_of_its_own_is_named_once():
    model = gpt()
    model.blocks[1].register_forward_hook(lambda *_: None)
    with (
        launch({"compile": COUNTED}),
        pytest.warns(UserWarning, match=r"^compile: 'blocks\.1' runs eagerly while it, a \w+, has hooks"),
    ):
        initialize(model)


@on_ranks(2)
def test_the_diagnosis_of_an_overflow_runs_eagerly_and_says_so(world):
    counts = counting()
    with launch({"parallel": {"tensor": 2}, "compile": COUNTED}):
        model = gpt()
        with torch.no_grad():
            model.blocks[1].mlp.down.bias[0] = torch.inf
        engine = initialize(model)
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


def test_a_break_in_the_graph_is_reported_once_by_name():
    counting()
    with launch({"compile": COUNTED}):
        engine = initialize(nn.Sequential(Branching(), Branching()), nn.functional.mse_loss)
        x = torch.randn(4, 8)
        with pytest.warns(UserWarning, match=r"^compile: the graph of '0', a Branching, breaks at .*:\d+, in forward"):
            engine.forward_backward(x, x)
        engine.forward_backward(x, x)  # a second warning would be an error


@on_ranks(2)
def test_layers_on_dtensors_run_eagerly_and_say_so(world):
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    plan = {"*.up": ColwiseParallel(), "*.down": RowwiseParallel()}
    counts = counting()
    with launch({"parallel": {"tensor": 2}, "compile": COUNTED}):
        torch.manual_seed(0)
        message = "^compile: '0' runs eagerly, because 'up', a Linear, in it computes on DTensors"
        with pytest.warns(UserWarning, match=message) if world.rank == 0 else nullcontext():
            engine = initialize(nn.Sequential(Branching(), Branching()), nn.functional.mse_loss, plan=plan)
        engine.forward_backward(torch.randn(4, 8), torch.randn(4, 8))
        assert counts.calls == 0


def test_what_runs_eagerly_says_so():
    counts = counting()
    with launch({"compile": COUNTED}):
        with pytest.warns(UserWarning, match="^compile: Sequential has no repeated blocks"):
            engine = initialize(nn.Sequential(nn.Linear(8, 8)), nn.functional.mse_loss)
        engine.forward_backward(torch.randn(4, 8), torch.randn(4, 8))
    emulated = {"precision": "16-mixed", "emulate_fp16": True, "compile": COUNTED}
    with launch(emulated):
        with pytest.warns(UserWarning, match="^compile: '16-mixed' computes fp16 products in fp32 on this CPU"):
            engine = initialize()
        engine.forward_backward(*batch())
    assert counts.graphs == 0


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])  # of the second, only the optimizer step is compiled
def test_without_a_compiler_initialize_names_the_fix(precision, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    fix = r'on rank 0 no C\+\+ compiler no-such-compiler .*; install it, or choose .*: compile={"backend": "aot_eager"}'
    with (
        launch({"compile": True, "precision": precision}),
        pytest.raises(paramp.ConfigError, match=f"^compile: .*{fix}"),
    ):
        initialize()


@on_ranks(2)
def test_a_model_compiled_on_one_rank_without_a_compiler_is_an_error_on_every_rank(world):
    with pytest.MonkeyPatch.context() as patch, launch({"hang_timeout": 20}):
        patch.setenv("CXX", "no-such-compiler")
        with pytest.raises(paramp.ConfigError, match=r"^compile: on rank 1 no C\+\+ compiler"):
            initialize(torch.compile(gpt()) if world.rank else gpt())


def test_a_compiled_model_is_refused_by_schedules_that_split_backwards():
    split = {"pipeline": {"size": 2, "microbatches": 4, "schedule": "zbv"}}
    from paramp.config.files import load
    from paramp.engine.model_setup import plain

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

    before, results = counters["inductor"].total(), []
    for compiled in (True, False):
        config = {"parallel": parallel, "precision": from_small_scale(mode), "compile": compiled, "clip_grad_norm": 1.0}
        with launch(config) as context, warnings.catch_warnings():
            warnings.filterwarnings("ignore", "compile: .* eagerly")
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
