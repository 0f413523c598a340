"""AdamW and SGD in fp32 against a plain single-process loop (other modes and layouts: test_matrix.py)."""

import pytest
from families import number, rarely
from pool import on_ranks
from reference import PLAIN_OPTIMIZERS, assert_trained, batches, plain_fp32_training, rank_slice, small_gpt

import paramp

LAYOUTS_4 = {
    "pp2-tp2": {"pipeline": {"size": 2, "microbatches": 4}, "tensor": 2},
    "pp2-tp2-gpipe": {"pipeline": {"size": 2, "microbatches": 4, "schedule": "gpipe"}, "tensor": 2},
    "pp2-tp2-sp": {"pipeline": {"size": 2, "microbatches": 4}, "tensor": 2, "sequence_parallel": True},
    "pp4": {"pipeline": {"size": 4, "microbatches": 4}},
    "tp4": {"tensor": 4},
}


def train(world, parallel, steps, make, clip, **changes):
    config = {"parallel": parallel, "clip_grad_norm": clip}
    with paramp.launch_from_torch(config, device=world.device) as context:
        model = small_gpt(**changes)
        engine, *_ = paramp.initialize(model, make(model.parameters()), paramp.models.GPT.loss)
        losses = []
        for x, y in batches(steps):
            x, y = (rank_slice(t, context.dp.rank, context.dp.size) for t in (x, y))
            losses.append(engine.forward_backward(x, y).item())
            assert engine.step().stepped
            engine.zero_grad()
        return losses, engine.full_state_dict()


@pytest.mark.parametrize("steps", [number(6, 20)])
@pytest.mark.parametrize("layout", rarely(LAYOUTS_4, "pp2-tp2-sp"))
@on_ranks(4, cuda=True)
def test_fp32_follows_plain_torch_on_four_ranks(world, layout, steps):
    """AdamW with clipping; and SGD without, since neither of the former feels a factor of the gradients."""
    for kind, clip, init_std, close in (("adamw", 1.0, 0.02, {"atol": 2e-5}), ("sgd", None, 0.2, {"of_way": 1e-4})):
        changes = {"num_layers": 4 if layout == "pp4" else 2, "init_std": init_std}
        losses, weights = train(world, LAYOUTS_4[layout], steps, PLAIN_OPTIMIZERS[kind], clip, **changes)
        expected_losses, expected = plain_fp32_training(steps, clip=clip, kind=kind, **changes)
        assert losses == pytest.approx(expected_losses, rel=0, abs=1e-5)
        assert_trained(weights, expected, small_gpt(**changes).state_dict(), what=kind, **close)
