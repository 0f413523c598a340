"""The models: their published sizes, their arithmetic, and training under layouts, against plain torch."""

import functools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from beside_plain import randn, seeded, train_both
from families import rarely
from pool import on_ranks
from reference import local
from small_engines import engine_of

import paramp
from paramp.base.errors import ConfigError
from paramp.models import GPT, MoEGPT, ResNet, ResNetConfig, ViT, ViTConfig, resnet34


def size_of(build):
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in build().parameters())


def test_sizes_are_the_published_ones():
    assert size_of(resnet34) == 21_797_672
    assert size_of(lambda: ResNet.preset("resnet18")) == 11_689_512
    assert size_of(lambda: ViT.preset("vit-b16")) == 86_567_656


def test_weights_with_a_standard_deviation_of_0_are_0():
    assert not GPT.preset("tiny", init_std=0.0).head.weight.any()


def test_the_small_mixture_has_eight_experts_as_wide_as_its_blocks():
    width, experts = 128, 8 * 3 * 128**2
    block = 4 * (width**2 + width) + 4 * width + 8 * width + experts
    assert size_of(lambda: MoEGPT.preset("tiny-moe")) == 2 * 256 * width + 4 * block + 2 * width


def unsettle(model):
    """Tell apart what starts equal: norms and biases that do nothing would hide mistakes."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    return model


# ------------------------------------------------------------------------------------------------------------ ResNet


def resnet_by_hand(state, x, depths, small_images):
    """The output of a ResNet in training mode, in torchvision's names, from its state dict alone."""

    def norm(x, name):
        mean, variance = x.mean((0, 2, 3), keepdim=True), x.var((0, 2, 3), unbiased=False, keepdim=True)
        weight, bias = (state[f"{name}.{part}"].view(1, -1, 1, 1) for part in ("weight", "bias"))
        return (x - mean) / (variance + 1e-5).sqrt() * weight + bias

    def convolve(x, name, stride, padding):
        return F.conv2d(x, state[f"{name}.weight"], stride=stride, padding=padding)

    x = convolve(x, "conv1", 1, 1) if small_images else convolve(x, "conv1", 2, 3)
    x = norm(x, "bn1").clamp(min=0)
    x = x if small_images else F.max_pool2d(x, 3, 2, 1)
    for group, depth in enumerate(depths, 1):
        for index in range(depth):
            name, stride = f"layer{group}.{index}", 2 if group > 1 and index == 0 else 1
            shortcut = x
            if group > 1 and index == 0:
                shortcut = norm(convolve(x, f"{name}.downsample.0", stride, 0), f"{name}.downsample.1")
            x = norm(convolve(x, f"{name}.conv1", stride, 1), f"{name}.bn1").clamp(min=0)
            x = (norm(convolve(x, f"{name}.conv2", 1, 1), f"{name}.bn2") + shortcut).clamp(min=0)
    return x.mean((2, 3)) @ state["fc.weight"].T + state["fc.bias"]


@pytest.mark.parametrize("small_images", [False, True])
def test_a_resnet_equals_plain_torch(small_images):
    torch.manual_seed(0)
    config = ResNetConfig(depths=(2, 1, 1), width=4, num_classes=5, small_images=small_images)
    model = unsettle(ResNet(config).double())
    x = torch.randn(4, 3, 32, 32, dtype=torch.float64)
    assert model.conv1.weight.shape[2:] == ((3, 3) if small_images else (7, 7))
    expected = resnet_by_hand(model.state_dict(), x, config.depths, small_images)
    torch.testing.assert_close(model(x), expected, rtol=1e-10, atol=1e-10)


def tiny(kind, **changes):
    return lambda: kind.preset("tiny", **changes)


INTEGERS = {
    GPT: (("num_layers", "num_heads", "width", "max_seq_len", "vocab_size"), (0, 1.0, "4", True)),
    ViT: (("num_heads", "image_size", "patch_size", "in_channels", "num_classes"), (-1,)),
    ResNet: (("width", "in_channels", "num_classes"), (2.5,)),
}
IMPOSSIBLE = [
    *(
        (tiny(kind, **{name: value}), f"^{name}: got {value!r}, expected an integer of 1 or more$")
        for kind, (names, values) in INTEGERS.items()
        for name in names
        for value in values
    ),
    (tiny(ResNet, depths=(1, 2.0)), r"^depths: got \(1, 2.0\), expected a number of blocks of 1"),
    (tiny(ResNet, depths=3), "^depths: got 3, expected a number of blocks of 1 or more for each"),
    (tiny(ResNet, num_class=1), r"^num_class: got 1, but ResNetConfig has no such field; .*mean 'num_classes'\?\)$"),
    (tiny(GPT, seq_len=1), r"\(did you mean 'max_seq_len'\?\)$"),
    (lambda: ResNetConfig(depths=(2, 0)), r"depths: got \(2, 0\), expected a number of blocks of 1 or more"),
    (lambda: resnet34(num_classes=0), "num_classes: got 0"),
    (lambda: ResNet.preset("resnet43"), r"model: got 'resnet43', expected one of .*\(did you mean 'resnet34'\?\)"),
    (lambda: ViT.preset("vit-b"), "model: got 'vit-b', expected one of tiny, vit-b16"),
    (
        lambda: replace(SMALL_VIT, image_size=30, patch_size=16),
        "image_size: got 30, expected a multiple of patch_size 16",
    ),
]


@pytest.mark.parametrize(("build", "message"), IMPOSSIBLE)
def test_impossible_shapes_are_errors(build, message):
    with pytest.raises(ConfigError, match=message):
        build()


@pytest.mark.parametrize(
    ("kind", "preset", "layout", "message"),
    [
        (ResNet, "tiny", (2, True), "a ResNet has no sequence"),
        (ResNet, "tiny", (3, False), "got 3, expected a divisor of the model's 64 features"),
        (ViT, "vit-b16", (8, False), "the model's 12 heads do not divide"),
        (ViT, "vit-b16", (2, True), r"sequence of 197 .*size 2; expected False, .*class_token=False, of 196$"),
        (ViT, "vit-b16", (3, True), r"sequence of 197 .*size 3; expected False$"),
    ],
)
def test_impossible_layouts_of_a_vit_are_errors(kind, preset, layout, message):
    with torch.device("meta"):
        model = kind.preset(preset)
    with pytest.raises(ConfigError, match=message):
        model.tensor_parallel_plan(*layout)


def test_a_resnets_plan_shards_its_classifier_only():
    model = ResNet.preset("tiny")
    (name,) = model.tensor_parallel_plan(2, False)
    assert model.get_submodule(name) is model.fc


def test_a_resnet_is_partitioned_into_equal_numbers_of_blocks():
    model = ResNet.preset("resnet34", width=4)
    assert model.pipeline_split(2) == ["layer3.1"]  # 8 of 16 blocks
    assert model.pipeline_split(4) == ["layer2.1", "layer3.1", "layer3.5"]
    assert len({*model.pipeline_split(16)}) == 15  # a stage begins at each but the first
    assert model.pipeline_split(17) is None


# --------------------------------------------------------------------------------------------------------------- ViT

SMALL_VIT = ViTConfig(num_layers=2, num_heads=4, width=16, image_size=8, patch_size=2, in_channels=2, num_classes=5)


def vit_by_hand(state, x, config):
    """The output of a ViT from its state dict alone, head by head."""

    def linear(x, name):
        return x @ state[f"{name}.weight"].T + state[f"{name}.bias"]

    def norm(x, name):
        centred = x - x.mean(-1, keepdim=True)
        scaled = centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
        return scaled * state[f"{name}.weight"] + state[f"{name}.bias"]

    # a convolution whose stride is its size takes every patch once, row by row
    kernel = state["embedding.patches.weight"].unflatten(1, (config.in_channels, config.patch_size, config.patch_size))
    x = F.conv2d(x, kernel, state["embedding.patches.bias"], stride=config.patch_size).flatten(2).transpose(1, 2)
    if config.class_token:
        x = torch.cat([state["embedding.token"].expand(len(x), 1, -1), x], 1)
    x = x + state["embedding.positions"]
    size = config.width // config.num_heads
    for block in range(config.num_layers):
        name = f"blocks.{block}"
        packed = linear(norm(x, f"{name}.norm1"), f"{name}.attention.qkv")
        heads = []
        for head in range(config.num_heads):
            query, key, value = packed[..., 3 * size * head : 3 * size * (head + 1)].split(size, -1)
            heads.append((query @ key.transpose(1, 2) / size**0.5).softmax(-1) @ value)
        x = x + linear(torch.cat(heads, -1), f"{name}.attention.out")
        hidden = linear(norm(x, f"{name}.norm2"), f"{name}.mlp.up")
        hidden = hidden * 0.5 * (1 + torch.erf(hidden / 2**0.5))
        x = x + linear(hidden, f"{name}.mlp.down")
    x = norm(x, "norm")
    return linear(x[:, 0] if config.class_token else x.mean(1), "head")


@pytest.mark.parametrize("class_token", [True, False])
def test_a_vit_equals_plain_torch(class_token):
    torch.manual_seed(0)
    config = replace(SMALL_VIT, class_token=class_token)
    model = unsettle(ViT(config).double())
    x = torch.randn(3, 2, 8, 8, dtype=torch.float64)
    torch.testing.assert_close(model(x), vit_by_hand(model.state_dict(), x, config), rtol=1e-10, atol=1e-10)
    with pytest.raises(ValueError, match=r"images: got \(1, 2, 9, 8\), expected \(batch, 2, 8, 8\)"):
        ViT(SMALL_VIT)(torch.zeros(1, 2, 9, 8))


# ------------------------------------------------------------------------------------------------------ under layouts


MODELS = {
    "resnet": lambda: ResNet(ResNetConfig(depths=(1, 2), width=4, num_classes=5, in_channels=2, small_images=True)),
    "vit": lambda: ViT(SMALL_VIT),
    "vit-mean": lambda: ViT(replace(SMALL_VIT, class_token=False)),
}
PP2_TP2 = {"pipeline": {"size": 2, "microbatches": 2}, "tensor": 2}
LAYOUTS = {"pp2-tp2": PP2_TP2, "dp2-tp2": {"data": 2, "tensor": 2}, "pp2-tp2-sp": PP2_TP2 | {"sequence_parallel": True}}
CELLS = [("resnet", "pp2-tp2"), ("vit", "pp2-tp2"), ("vit", "dp2-tp2"), ("vit-mean", "pp2-tp2-sp")]


def in_two_parts(model):
    """As microbatches, so that a BatchNorm sees the same images together."""
    whole = model.forward
    model.forward = lambda x: torch.cat([whole(part) for part in x.chunk(2)])
    return model


@pytest.mark.parametrize(("kind", "layout"), rarely(CELLS, CELLS[0], CELLS[3]))
@on_ranks(4)
def test_training_in_every_layout_equals_plain_torch(world, kind, layout):
    plain, model = (unsettle(seeded(MODELS[kind])) for _ in range(2))
    sgd = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    given = [(randn(8, 2, 8, 8, seed=seed), (torch.arange(8) + seed) % 5) for seed in range(6)]
    with paramp.launch_from_torch({"parallel": LAYOUTS[layout], "clip_grad_norm": 1.0}) as context:
        engine = engine_of(model, model.loss, sgd)
        if kind == "resnet":
            own = {name: local(parameter).shape for name, parameter in engine.named_parameters()}
            cut = [name for name, shape in own.items() if shape != plain.get_parameter(name).shape]
            assert cut == (["fc.weight"] if context.is_last_stage else [])
            assert next(iter(own)).startswith(model.pipeline_split(2)[0] if context.is_last_stage else "conv1")
        train_both(context, engine, in_two_parts(plain), given, F.cross_entropy, sgd, clip=1.0, atol=2e-5, rtol=1e-4)


def test_a_batch_norm_sees_one_microbatch():
    """In one process too. Another division of the images has another loss."""
    plain, model, other = (unsettle(seeded(MODELS["resnet"])) for _ in range(3))
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    x, y = randn(8, 2, 8, 8), torch.arange(8) % 5
    with paramp.launch_from_torch({"parallel": {"pipeline": {"size": 1, "microbatches": 2}}}) as context:
        engine = engine_of(model, model.loss, sgd)
        train_both(context, engine, in_two_parts(plain), [(x, y)] * 3, F.cross_entropy, sgd, atol=2e-5, rtol=1e-4)
    whole = F.cross_entropy(other(x), y).item()
    assert F.cross_entropy(in_two_parts(other)(x), y).item() != pytest.approx(whole, rel=1e-3)


@pytest.mark.parametrize("kind", ["resnet", "vit"])
def test_a_model_on_meta_is_filled(kind):
    with paramp.launch_from_environment({"seed": 3}):
        with torch.device("meta"):
            model = MODELS[kind]()
        state = engine_of(model).full_state_dict()
    start = MODELS[kind]().state_dict()  # of other random numbers, distributed alike
    assert state.keys() == start.keys()
    for name, value in state.items():
        if value.numel() >= 64 and value.is_floating_point():
            assert value.std().item() == pytest.approx(start[name].std().item(), rel=0.35)
        elif start[name].numel() == 1 or start[name].unique().numel() == 1:
            assert torch.equal(value, start[name]), name
