"""The report on a skipped step names positions in whole sequences, where the context axis cuts them."""

import pytest
import torch
from families import rarely
from pool import on_ranks
from reference import batches
from small_engines import gpt_engine, own_part, train_step

import paramp
from paramp.tools.run_events import event_of

LAYOUTS = {
    "cp2·pp2": {"context": 2, "pipeline": {"size": 2, "microbatches": 2}},
    "cp2·tp2 + sp": {"context": 2, "tensor": 2, "sequence_parallel": True, "pipeline": {"microbatches": 2}},
    "fsdp2·cp2": {"context": 2, "data": {"shard": 2}, "pipeline": {"microbatches": 2}},
    "cp4": {"context": 4, "pipeline": {"microbatches": 2}},
}
# Of 16 tokens two ranks have 0 to 3 and 12 to 15, and 4 to 11; four ranks 0, 1, 14, 15; 2, 3, 12, 13; and so on.
PLACES = [  # module, rank of the axis, its tokens, whether in the backward; their positions for two ranks and for four
    ("blocks.0.mlp.down", 1, [0, 2, 3], False, ((4, 5), (6, 8)), ((2, 3), (12, 14)), "positions {} of the sequence"),
    ("blocks.2.attention.out", 0, [1, 3], True, ((1, 2), (3, 4)), ((1, 2), (15, 16)), "positions {} of the sequence"),
    ("blocks.3.norm2", 1, [1], False, ((5, 6),), ((3, 4),), "position {} of the sequence"),
]
LISTED = {((4, 5), (6, 8)): "4 and 6 to 7", ((2, 3), (12, 14)): "2 and 12 to 13", ((5, 6),): "5", ((3, 4),): "3"}
LISTED |= {((1, 2), (3, 4)): "1 and 3", ((1, 2), (15, 16)): "1 and 15"}


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
@on_ranks(4)
def test_positions_of_values_that_are_not_finite_are_those_in_whole_sequences(world, layout):
    with paramp.launch_from_torch({"parallel": LAYOUTS[layout], "precision": "16-mixed"}) as context:
        engine = gpt_engine()
        (batch,) = batches(1)
        batch = own_part(context, *batch)
        train_step(engine, *batch)
        for name, rank, tokens, backward, of_two, of_four, text in PLACES:
            last = context.dp.rank == context.dp.size - 1
            here = context.cp.rank == rank and last and context.tp.rank == 0
            planted = plant(engine, name, tokens, backward) if here else None
            assert train_step(engine, *batch).overflow
            report = engine.diagnose_overflow()
            if planted is not None:
                planted.remove()
            positions = of_four if context.cp.size == 4 else of_two
            assert (report.origin.module, report.origin.microbatch) == (name, 1)
            assert report.origin.positions == positions, (name, report.origin)
            assert dict(report.origin.place.axes)["cp"] == rank
            assert text.format(LISTED[positions]) in str(report)
            assert event_of(1, report)["positions"] == [*positions]
