"""Models, plans and hooks that are refused, by name and on every rank."""

import warnings
from contextlib import nullcontext
from types import MethodType

import pytest
import torch
from pool import run_on_ranks
from small_engines import engine_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Shard, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn.utils import parametrize, prune
from traceable import Nested, UNet

import paramp
from paramp.parallel.tensor.sharding_plan import check_divisible, resolve_plan


def layers(count=2, **options):
    return nn.Sequential(*(nn.Linear(4, 4, **options) for _ in range(count)))


def tied(first, second, count):
    """A chain of layers, of which two have one weight."""
    model = layers(count)
    model[second].weight = model[first].weight
    return model


def with_hook(model, name=None, parameter=None, after=False):
    """A hook that is a lambda before the forward of a module, or on a parameter."""
    if parameter is None:
        model.get_submodule(name).register_forward_pre_hook(lambda module, inputs: (inputs[0] * 0.1,))
    elif after:
        model.get_parameter(parameter).register_post_accumulate_grad_hook(print)
    else:
        model.get_parameter(parameter).register_hook(print)
    return model


def hook_on_one_rank():
    return with_hook(layers(), parameter="1.bias") if torch.distributed.get_rank() == 1 else layers()


def other_tie_on_each_rank():
    return tied(torch.distributed.get_rank(), 2, 3)


def nested():
    return nn.Sequential(nn.Linear(4, 4), layers())


def norm_twice():
    norm = nn.BatchNorm1d(4)
    return nn.Sequential(nn.Linear(4, 4), norm, nn.Linear(4, 4), norm)


class NotFilled(nn.Module):
    """It has no reset_parameters."""

    def __init__(self):
        super().__init__()
        self.position = nn.Parameter(torch.ones(4))


class HalfFilled(NotFilled):
    """It forgets the buffer that its constructor made."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.ones(3))

    def reset_parameters(self):
        nn.init.zeros_(self.position)


def unfilled(kind=NotFilled):
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(4, 4), kind())


def norm_last():
    return nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))


def table():
    return nn.Sequential(nn.Embedding(4, 4, max_norm=1.0))


def alone(value):
    return nn.ParameterDict({"alone": nn.Parameter(value)})


def scripted():
    model = layers()
    with pytest.warns((DeprecationWarning, FutureWarning), match="script"):
        model[1] = torch.jit.script(model[1])
    return model


def ddp():
    return nn.parallel.DistributedDataParallel(layers())


def fsdp():
    with warnings.catch_warnings(action="ignore"):
        return FullyShardedDataParallel(layers(), device_id=torch.device("cpu"))


def fsdp2():
    model = layers()
    fully_shard(model[1], mesh=init_device_mesh("cpu", (2,)))
    return model


def pp2(*split, **options):
    return {"pipeline": {"size": 2, "split": [*split] or None, **options}}


def case(build, message, *layouts, plan=None):
    """Without a message there is no error."""
    return build, message, layouts, plan


DP2, FSDP2, TP2 = {"data": 2}, {"data": {"shard": 2}}, {"tensor": 2}
TWO_WAYS = {"0": ColwiseParallel(), "1": RowwiseParallel(input_layouts=Shard(-1))}
HOOKED_TIE = r"0\.weight and 3\.weight are one parameter with hooks"
OTHER_TIES = r"has \('2\.weight', .* 'tied to 0\.weight'\), but rank 1 has \('2\.weight', .* 'tied to 1\.weight'\)"
ON_RANK_1 = r"rank 1 has \('1\.bias', \(4,\), torch\.float32, True, '1 hooks'\)"
TWO_STAGES = "'0.weight' and '2.weight' are one parameter, in two stages of pipeline rank 0, expected one stage"
BY_FSDP2 = r"^model: '1' is sharded by fully_shard, .*remove fully_shard.*data\.shard does.*DistributedGradScaler"
BY_HAND = r"^model: '0.weight' is a DTensor already, .*build a new model .*or remove parallelize_module"
OF_RANKS = {
    "hooks of a model": case(lambda: with_hook(nested(), ""), r"the model has hooks \(.*<lambda>\), but", pp2("1.1")),
    "hooks of a sequence": case(lambda: with_hook(nested(), "1"), r"1 has hooks \(.*<lambda>\)", pp2("1.1")),
    "hooks within a stage": case(lambda: with_hook(nested(), "1.0"), None, pp2("1.1")),
    "norm of two stages": case(norm_twice, r"'1' \(BatchNorm1d\) is called on several stages", pp2("2")),
    "no plan": case(UNet, r"UNet has no tensor_parallel_plan\(\); pass plan=", TP2),
    "half filled": case(lambda: unfilled(HalfFilled), r"reset_parameters\(\) of HalfFilled does not fill 'mask'", DP2),
    "no values": case(unfilled, r"model: 1 \(NotFilled\) is on the meta device", pp2("1")),
    "opened": case(Nested, "plan: 'inside' is split by the pipeline", pp2() | TP2, plan={"inside": "sharded_random"}),
    "no layer": case(norm_twice, "plan: '1' is a BatchNorm1d: Colwise supports Linear", TP2, plan={"1": "colwise"}),
    "no layer of a stage": case(
        norm_last, "plan: '1' is a LayerNorm: Colwise supports Linear an", pp2("1") | TP2, plan={"1": "colwise"}
    ),
    "parametrized": case(
        lambda: nn.Sequential(computed(nn.Linear(4, 4), "weight_norm"), nn.Linear(4, 4)),
        r"plan: '0' computes its weight .* by the parametrization WeightNorm",
        TP2,
        plan={"0": "colwise", "1": "rowwise"},
    ),
    "output of an attention": case(
        lambda: nn.Sequential(nn.TransformerEncoderLayer(4, 2, 4)),
        "plan: '0.self_attn.out_proj' is the output layer of an nn.MultiheadAttention, which computes with its weight",
        *(TP2,),
        plan={"0.self_attn.out_proj": "rowwise"},
    ),
    "packed norm": case(norm_last, "expected a Linear or a Conv1D", TP2, plan={"1": "packed_colwise_2"}),
    "tie": case(
        lambda: tied(0, 1, 2), r"0\.weight and 1\.weight are one parameter", pp2() | TP2, DP2 | TP2, plan=TWO_WAYS
    ),
    "tie of two stages": case(
        lambda: tied(0, 2, 4), TWO_STAGES, pp2("1", "2", "3", schedule="interleaved-1f1b") | FSDP2
    ),
    "other ties": case(other_tie_on_each_rank, OTHER_TIES, pp2("2"), DP2, FSDP2, TP2),
    "hooked tie": case(
        lambda: with_hook(tied(0, 3, 4), parameter="0.weight"), HOOKED_TIE, pp2("1"), pp2("1", "2", "3", schedule="zbv")
    ),
    "hook on one rank": case(hook_on_one_rank, ON_RANK_1, pp2(), TP2, plan={"0": "colwise", "1": "rowwise"}),
    "hook on one data rank": case(hook_on_one_rank, None, DP2),
    "hook after": case(
        lambda: with_hook(layers(), parameter="0.weight", after=True),
        r"'0\.weight' has a hook that runs after the accumulation",
        TP2,
        plan={"0": "packed_colwise_2"},
    ),
    "lazy": case(
        lambda: nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 4)), r"'0' is a LazyLinear, whose .*call the model", DP2
    ),
    "max_norm": case(table, r"'0' has max_norm=1, expected none, because each of 2 data", DP2, FSDP2),
    "complex": case(
        lambda: alone(torch.ones(3) * 1j), r"'alone' has the dtype torch.complex64, expected a real", FSDP2
    ),
    "no dims": case(lambda: alone(torch.tensor(2.0)), r"'alone' has no dims.*parallel.data.shard is 2", FSDP2),
    "scripted": case(
        scripted,
        r"model: '1' is a module of torch.jit, expected a plain one",
        FSDP2,
        {"precision": "bf16-naive"},
        {"precision": "16-true"},
    ),
    "scripted without either": case(scripted, None, DP2),
    "DDP": case(ddp, r"^model: it is a DistributedDataParallel, .* remove DistributedDataParallel\(", DP2),
    "DDP compiled": case(lambda: torch.compile(ddp(), backend="eager"), "^model: it is a DistributedDataParallel", DP2),
    "FSDP1": case(fsdp, r"^model: it is a FullyShardedDataParallel, .*parallel\.data\.shard shards", DP2),
    "FSDP2": case(fsdp2, BY_FSDP2, DP2),
    "DTensors": case(lambda: distribute_module(layers(), init_device_mesh("cpu", (2,))), BY_HAND, DP2),
}


@pytest.mark.parametrize("what", OF_RANKS)
def test_models_that_are_refused_on_every_rank(what):
    _, _, layouts, _ = OF_RANKS[what]
    for index, layout in enumerate(layouts):
        run_on_ranks(2 * max(len(layout), 1), __name__, "start", {"what": what, "index": index})


def start(world, what, index):
    build, message, layouts, plan = OF_RANKS[what]
    layout = layouts[index]
    with paramp.launch_from_torch({"parallel": DP2} | layout if "precision" in layout else {"parallel": layout}):
        model = build()
        with nullcontext() if message is None else pytest.raises(ValueError, match=message):
            engine_of(model, plan=plan if "tensor" in layout else None)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (["0"], "plan: got list, expected a dict of module names and styles"),
        ({"0": "colwize"}, r"plan\['0'\]: got 'colwize', expected one of .*did you mean 'colwise'.*or a ParallelStyle"),
        ({"0": nn.Linear}, r"plan\['0'\]: got <class .*Linear'>, expected a style's name or a ParallelStyle"),
        ({"blocks.*.quv": "colwise"}, r"plan\['blocks\.\*\.quv'\]: no module of the model matches"),
        ({"blocks.0.qvk": "colwise"}, "no module of the model matches.*did you mean 'blocks.0.qkv'"),
    ],
)
def test_mistakes_in_a_plan(plan, message):
    with pytest.raises(paramp.ConfigError, match=message):
        resolve_plan(plan, ["blocks", "blocks.0", "blocks.0.qkv"])


class Doubling(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def with_forward(layer):
    layer.forward = MethodType(Doubling.forward, layer)
    return layer


@pytest.mark.parametrize(
    ("layer", "style", "message"),
    [
        (nn.Linear(4, 6), "colwise", "'0' has out_features 6, expected a multiple of parallel.tensor.size 4"),
        (nn.Linear(6, 4), "rowwise", "'0' has in_features 6, expected a multiple of parallel.tensor.size 4"),
        (nn.Linear(4, 12), "packed_colwise_2", "'0' has 12 outputs, expected a multiple of 2 parts x .* 4"),
        (Doubling(4, 16), "packed_colwise_2", "'0' is a Doubling with a forward of its own, expected that of a Linear"),
        (with_forward(nn.Linear(4, 16)), "packed_colwise_2", "'0' is a Linear with a forward of its own"),
        (nn.Linear(4, 8), "colwise", None),
        (nn.Linear(8, 4), "rowwise", None),
        (nn.Embedding(8, 4), "rowwise", None),
        (nn.Linear(4, 16), "packed_colwise_2", None),
    ],
)
def test_layers_that_a_style_cannot_shard(layer, style, message):
    found = resolve_plan({"0": style}, ["0"])
    with nullcontext() if message is None else pytest.raises(paramp.ConfigError, match=message):
        check_divisible(nn.Sequential(layer), found, 4)


def computed(layer, kind):
    """A layer whose weight is computed from other parameters."""
    if kind == "negated":
        return parametrize.register_parametrization(layer, "weight", nn.Tanh())
    return (getattr(nn.utils.parametrizations, kind, None) or OLD[kind])(layer)


OLD = {"old_weight_norm": nn.utils.weight_norm, "old_spectral_norm": nn.utils.spectral_norm}


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ("weight_norm", "parametrization WeightNorm"),
        ("spectral_norm", "parametrization SpectralNorm"),
        ("orthogonal", "parametrization Orthogonal"),
        ("negated", "parametrization Tanh"),
        ("old_weight_norm", "hook WeightNorm"),
        ("old_spectral_norm", "hook SpectralNorm"),
    ],
)
def test_layers_whose_weights_are_computed_cannot_be_sharded(kind, what):
    warnings.filterwarnings("ignore", "`torch.nn.utils.weight_norm` is deprecated", FutureWarning)
    model = nn.Sequential(computed(nn.Linear(4, 4), kind), nn.Sequential(computed(nn.Linear(4, 4), kind)))
    for name, styles in {"0": ("colwise", "rowwise"), "1": ("sequence",)}.items():
        for style in styles:
            found = resolve_plan({name: style}, ["0", "1"])
            full = {"0": "0", "1": "1.0"}[name]
            with pytest.raises(paramp.ConfigError, match=f"'{full}' computes its weight .* by the {what}, expected a"):
                check_divisible(model, found, 2)
    check_divisible(model, resolve_plan({"0": "sharded_random"}, ["0"]), 2)
    if not kind.startswith("old"):
        parametrize.remove_parametrizations(model[0], "weight")
        check_divisible(model, resolve_plan({"0": "colwise"}, ["0"]), 2)


@pytest.mark.parametrize("pruned", ["weight", "bias"])
def test_pruned_layers_cannot_be_sharded_until_their_masks_are_applied(pruned):
    model, found = layers(1), resolve_plan({"0": "colwise"}, ["0"])
    prune.l1_unstructured(model[0], pruned, 0.5)
    with pytest.raises(paramp.ConfigError, match=f"'0' computes its {pruned} .* by the hook L1Unstructured, expected"):
        check_divisible(model, found, 2)
    prune.remove(model[0], pruned)
    check_divisible(model, found, 2)


ZBV = {"pipeline": {"size": 2, "microbatches": 4, "schedule": "zbv"}}
CONFIGURATIONS = [
    ({"activation_checkpointing": 0}, "activation_checkpointing: got 0, expected"),
    ({"activation_checkpointing": "some"}, "activation_checkpointing: got 'some', expected"),
    (
        {"activation_checkpointing": "selective", "parallel": ZBV},
        "got 'selective', expected 'full' or 'none', because the schedule",
    ),
    ({"activation_checkpointing": "full"}, "'full', but Sequential has no repeated blocks, expected modules"),
]


@pytest.mark.parametrize(("config", "message"), CONFIGURATIONS)
def test_blocks_that_cannot_be_computed_again(config, message):
    with pytest.raises(paramp.ConfigError, match=message), paramp.launch_from_torch(config):
        engine_of(layers())
