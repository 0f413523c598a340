"""Layer by layer against one process: right models pass, and of wrong ones the layer that is wrong is named."""

import pytest
from pool import World, run_on_ranks

import paramp
from paramp.verify import compare
from paramp.verify_run import Options, configure, train


def see(world, options, run):
    config = configure(options, run)
    with paramp.launch_from_torch(config, device=world.device) as context:
        return train(options, context, configure(options, "single").parallel.pipeline.num_microbatches)


def report_of(model, layout, precision="16-mixed", size=4, **options):
    settings = {"parallel": layout, "precision": precision}
    options = Options(model=f"verified:{model}", settings=settings, **options)
    single = see(World(0, 1, "cpu"), options, "single")
    sharded = run_on_ranks(size, __name__, "see", {"options": options, "run": "sharded"})
    return compare(single, sharded, configure(options, "sharded"))


def of_blocks(model="blocks", plan="RIGHT", layout=None, **options):
    layout = layout or {"tensor": 2, "pipeline": 2}
    own = {"plan": f"verified:{plan}", "batches": "verified:batches", "criterion": "torch.nn.functional:mse_loss"}
    return report_of(model, layout, **(own | options))


LAYOUTS = {
    "pp2·tp2": {"tensor": 2, "pipeline": 2},
    "dp2·tp2": {"tensor": 2, "data": 2, "zero": 1, "sequence_parallel": True},
    "pp2·dp2": {"data": 2, "pipeline": {"size": 2, "schedule": "interleaved-1f1b", "microbatches": 4}},
}


@pytest.mark.parametrize(
    ("layout", "precision"),
    [("pp2·tp2", "16-mixed"), ("pp2·tp2", "16-naive"), ("dp2·tp2", "bf16-naive"), ("pp2·dp2", "32-true")],
)
def test_a_gpt_follows(layout, precision):
    report = report_of("gpt", LAYOUTS[layout], precision)
    assert report.ok, "\n".join(report.lines())
    assert report.layout == layout
    assert report.random_in is None  # dropout is off
    layers = {layer.name: layer for layer in report.layers}
    for name in ("embedding.tokens", "blocks.0.attention.qkv", "blocks.1.attention.out", "blocks.1.mlp.down", "norm"):
        assert None not in (layers[name].forward, layers[name].gradient, layers[name].weights), name
    assert layers["head"].forward is not None
    assert all(layer.problem is None for layer in report.layers)
    assert 0 < max(layer.forward for layer in report.layers) < report.tolerance
    assert 0 < layers["norm"].gradient < report.tolerance
    assert "blocks" not in layers or "pp" not in layout  # it is cut


@pytest.mark.parametrize("precision", ["16-mixed", "16-naive"])
def test_own_blocks_follow(precision):
    report = of_blocks(precision=precision)
    assert report.ok, "\n".join(report.lines())


@pytest.mark.parametrize("precision", ["16-mixed", "bf16-naive"])
@pytest.mark.parametrize(
    ("wrong", "layer", "what"),
    [
        ({"plan": "NO_ALL_REDUCE"}, "block2.down", "forward"),
        ({"plan": "BIAS_ON_EACH_RANK"}, "block1.down", "forward"),
        ({"model": "normalized"}, "block0.activation", "forward"),
        ({"plan": "HALF_GRADIENT"}, "block1.down", "gradient"),
    ],
)
def test_the_layer_that_is_wrong_is_named(wrong, layer, what, precision):
    report = of_blocks(precision=precision, **wrong)
    assert not report.ok
    first, where = report.first
    assert (first.name, where) == (layer, what), "\n".join(report.lines())
    assert f"the first layer that diverges: {layer} ({what}" in [*report.lines()][-1]
