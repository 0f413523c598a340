"""A ResNet or a ViT on images, in any layout: the model's own tensor plan and stages.

python examples/vision.py                                                       a small ResNet on digits, one process
python examples/vision.py --model vit                                           a small ViT
torchrun --standalone --nproc-per-node 4 examples/vision.py 2 2                 tensor 2 x pipeline 2
torchrun --standalone --nproc-per-node 4 examples/vision.py 2 2 --model vit
python examples/vision.py --preset resnet34 --images FOLDER                     ResNet-34 on CIFAR-10
python examples/vision.py --model vit --preset vit-b16 --images FOLDER

FOLDER has CIFAR-10's binary version. Without --images, the data is scikit-learn's digits (pip install
"paramp[examples]").
"""

import argparse
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from images import ImageSet, load_images
from torch.utils.data import DataLoader

import paramp
from paramp.models import ResNet, ViT
from paramp.parallel.partition import units


def resnet(preset: str, data: ImageSet) -> ResNet:
    """A ResNet for small images."""
    return ResNet.preset(preset, in_channels=data.num_channels, num_classes=data.num_classes, small_images=True)


def vit(preset: str, data: ImageSet) -> ViT:
    """A ViT with patches of 2 x 2 pixels for digits, of 4 x 4 for CIFAR-10."""
    patch_size = max(2, data.side // 8)
    shape = {"image_size": data.side, "patch_size": patch_size, "in_channels": data.num_channels}
    return ViT.preset(preset, num_classes=data.num_classes, **shape)


def endless(loader: Iterable[Any]) -> Iterator[Any]:
    """The batches of all epochs, without end."""
    while True:
        yield from loader


def recognised(engine: paramp.Engine, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Whether the predicted class of each of ``images`` is right: bool (images)."""
    missing = -len(images) % MICROBATCHES
    whole = torch.cat([images, images[:1].expand(missing, -1, -1, -1)])  # a multiple of the microbatches
    return engine(whole)[: len(images)].argmax(1).cpu() == labels


# A batch norm's statistics are over one microbatch, so layouts agree only with equal numbers of microbatches.
MICROBATCHES = 2

MODELS: dict[str, Callable[[str, ImageSet], ResNet | ViT]] = {"resnet": resnet, "vit": vit}

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("tensor", type=int, nargs="?", default=1)
parser.add_argument("pipeline", type=int, nargs="?", default=1)
parser.add_argument("--model", choices=MODELS, default="resnet")
parser.add_argument("--preset", default="tiny")
parser.add_argument("--images", metavar="FOLDER")
parser.add_argument("--precision", default="16-mixed")
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--batch-size", type=int, default=64, help="of all data ranks together")
options = parser.parse_args()

pipeline = {"size": options.pipeline, "microbatches": MICROBATCHES}
config = {
    "parallel": {"tensor": options.tensor, "pipeline": pipeline},
    "precision": options.precision,
    "clip_grad_norm": 1.0,
}

with paramp.launch_from_torch(config) as context:
    training, held_out = load_images(options.images)
    model = MODELS[options.model](options.preset, training)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loader = DataLoader(training, options.batch_size // context.dp.size, shuffle=True, drop_last=True)
    engine, loader, *_ = paramp.initialize(model, optimizer, model.loss, loader)
    print(f"rank {context.rank} has {', '.join(name for name, _ in units(engine.module))}", flush=True)
    for step, (images, labels) in zip(range(1, options.steps + 1), endless(loader), strict=False):
        loss = engine.forward_backward(images, labels)
        result = engine.step()
        engine.zero_grad()
        if context.is_main and step % 10 == 0:
            print(f"step {step}: loss {loss.item():.4f}, grad norm {result.grad_norm:.3f}, scale {result.loss_scale:g}")
    engine.eval()
    right = torch.cat([recognised(engine, *batch) for batch in DataLoader(held_out, 64)])
    if context.is_main:
        print(f"{right.float().mean():.1%} of {len(right)} held-out images are recognised")
