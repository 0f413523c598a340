"""The report on a skipped step names positions in whole sequences, where the context axis cuts them."""

import pytest
import torch
from exact_tasks import mixtures, tokens
from families import rarely
from pool import on_ranks
from reference import batches
from small_engines import engine_of, gpt_engine, own_part, train_step

import paramp
from paramp.models import MoEGPT
from paramp.tools.run_events import event_of

TWO, EXACT = {"microbatches": 2}, {"chunk": 4, "slices": 4, "sequence_slices": 4}
LAYOUTS = {
    "cp2·pp2": (4, {"context": 2, "pipeline": {"size": 2, **TWO}}, False),
    "cp2·tp2 + sp": (4, {"context": 2, "tensor": 2, "sequence_parallel": True, "pipeline": TWO}, False),
    "fsdp2·cp2": (4, {"context": 2, "data": {"shard": 2}, "pipeline": TWO}, False),
    "cp4": (4, {"context": 4, "pipeline": TWO}, False),
    "exact": (1, {}, EXACT),
    "exact cp2": (2, {"context": 2}, EXACT),
    "exact tp2": (2, {"tensor": 2}, EXACT),
    "exact cp2·tp2": (4, {"context": 2, "tensor": 2}, EXACT),
    "exact cp2·pp2": (4, {"context": 2, "pipeline": 2}, EXACT),
    "exact fsdp2·cp2": (4, {"context": 2, "data": {"shard": 2}}, {**EXACT, "chunk": 2}),
}
# Of 16 tokens two ranks have 0 to 3 and 12 to 15, and 4 to 11; four ranks 0, 1, 14, 15; 2, 3, 12, 13; and so on. In the
# exact mode two ranks have 0 to 7, and 8 to 15.
PLACES = [  # module, rank of the axis, its tokens, whether in the backward
    ("blocks.0.mlp.down", 1, [0, 2, 3], False),
    ("blocks.2.attention.out", 0, [1, 3], True),
    ("blocks.3.norm2", 1, [1], False),
]
POSITIONS = {  # whether exact, ranks of the axis -> for each of these, as ranges and in the report
    (False, 2): [
        (((4, 5), (6, 8)), "positions 4 and 6 to 7"),
        (((1, 2), (3, 4)), "positions 1 and 3"),
        (((5, 6),), "position 5"),
    ],
    (False, 4): [
        (((2, 3), (12, 14)), "positions 2 and 12 to 13"),
        (((1, 2), (15, 16)), "positions 1 and 15"),
        (((3, 4),), "position 3"),
    ],
    (True, 1): [
        (((0, 1), (2, 4)), "positions 0 and 2 to 3"),
        (((1, 2), (3, 4)), "positions 1 and 3"),
        (((1, 2),), "position 1"),
    ],
    (True, 2): [
        (((8, 9), (10, 12)), "positions 8 and 10 to 11"),
        (((1, 2), (3, 4)), "positions 1 and 3"),
        (((9, 10),), "position 9"),
    ],
}


class Spoilt(torch.autograd.Function):
    """The identity, but that some tokens of one sample, or of its gradient, become NaN."""

    @staticmethod
    def forward(ctx, x, tokens, backward):
        ctx.tokens, ctx.backward_ = tokens, backward
        return x.clone() if backward else _spoil(x, tokens)

    @staticmethod
    def backward(ctx, gradient):
        return _spoil(gradient, ctx.tokens) if ctx.backward_ else gradient, None, None


def _spoil(x, tokens):
    x = x.clone()
    x[1, tokens, 3] = float("nan")
    return x


def plant(engine, name, tokens, backward):
    """In every second forward of a module: of the second microbatch."""
    calls = []

    def hook(module, inputs, output):
        calls.append(None)
        return None if len(calls) % 2 else Spoilt.apply(output, tokens, backward)

    if name in dict(engine.module.named_modules()):
        return engine.module.get_submodule(name).register_forward_hook(hook)
    return torch.nn.Identity().register_forward_hook(hook)


@pytest.mark.parametrize("layout", rarely(LAYOUTS, "cp2·pp2"))
@on_ranks(lambda layout: LAYOUTS[layout][0])
def test_positions_of_values_that_are_not_finite_are_those_in_whole_sequences(world, layout):
    _, parallel, exact = LAYOUTS[layout]
    mode = "32-true" if exact else "16-mixed"
    config = {"parallel": parallel, "precision": mode, "reproducible": exact}
    with paramp.launch_from_torch(config) as context:
        engine = gpt_engine()
        (batch,) = batches(1)
        batch = own_part(context, *batch)
        train_step(engine, *batch)
        everywhere = POSITIONS[bool(exact), context.cp.size]
        for (name, rank, tokens, backward), (positions, text) in zip(PLACES, everywhere, strict=True):
            rank %= context.cp.size
            last = context.dp.rank == context.dp.size - 1
            here = context.cp.rank == rank and last and context.tp.rank == 0
            planted = plant(engine, name, tokens, backward) if here else None
            assert train_step(engine, *batch).overflow
            report = engine.diagnose_overflow()
            if planted is not None:
                planted.remove()
            assert (report.origin.module, report.origin.microbatch) == (name, 1), str(report)
            assert report.origin.positions == positions, (name, report.origin)
            assert dict(report.origin.place.axes).get("cp", 0) == rank
            assert f"{text} of the sequence" in str(report)
            assert event_of(1, report)["positions"] == [*positions]


@on_ranks(2)
def test_a_slice_of_a_mixture_is_not_taken_for_the_tokens_of_a_tensor_rank(world):
    """Of two slices each is as long as a part of two tensor ranks; which of them had the value is not reported."""
    cut = {"chunk": 4, "slices": 4, "sequence_slices": 2}
    config = {"parallel": {"tensor": 2}, "precision": "32-true", "reproducible": cut}
    with paramp.launch_from_torch(config):
        engine = engine_of(mixtures(), MoEGPT.loss)
        batch, router = tokens()(0), "blocks.1.mlp.router"
        train_step(engine, *batch)

        def spoil(_, inputs, output):
            index, weights, loss = output
            return index, torch.full_like(weights, float("nan")), loss

        planted = engine.module.get_submodule(router).register_forward_hook(spoil)
        assert train_step(engine, *batch).overflow
        report = engine.diagnose_overflow()
        planted.remove()
        assert (report.origin.module, report.origin.positions) == (router, ())
