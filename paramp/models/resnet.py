"""Residual networks of basic blocks (He et al. 2016, *Deep residual learning for image recognition*).

:class:`ResNet` is an ``nn.Sequential``: stem, groups of blocks, pooling, classifier. Parameters have the names of
torchvision's, so state dicts of its ``resnet18`` and ``resnet34`` load. Images are (batch, channels, height, width).

**BatchNorm** computes mean and variance over one microbatch of one data rank, as under torch's DDP and in GPipe. Two
layouts agree only if their microbatches hold the same images. Use microbatches of eight images or more. Each data rank
has its own running statistics; ``engine.full_state_dict()`` returns those of the first.

**Tensor parallelism** shards the classifier by its inputs. Every tensor rank computes all other layers in full, so use
data and pipeline ranks to make a ResNet faster. On CUDA, also set ``torch.backends.cudnn.deterministic = True``:
otherwise cuDNN may sum a gradient in a different order on each tensor rank, and the replicated weights diverge.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from ..base.errors import ConfigError, require
from .preset_model import PresetModel, check_counts, equal_stages, is_count


@dataclass(frozen=True, kw_only=True)
class ResNetConfig:
    """The shape of a :class:`ResNet`."""

    depths: tuple[int, ...]
    """Blocks in each group. Each group after the first halves the image's sides and doubles the channels."""
    width: int = 64
    """Channels of the first group."""
    num_classes: int = 1000
    in_channels: int = 3
    small_images: bool = False
    """True: the stem for images up to about 32 x 32, one 3 x 3 convolution. False: a 7 x 7 convolution and a max-pool,
    which together quarter the image's sides."""

    def __post_init__(self) -> None:
        check_counts(self)
        counts = isinstance(self.depths, (tuple, list)) and self.depths and all(map(is_count, self.depths))
        require(bool(counts), "depths", self.depths, "a number of blocks of 1 or more for each group")

    @property
    def num_features(self) -> int:
        """Input features of the classifier."""
        return self.width * 2 ** (len(self.depths) - 1)


PRESETS = {
    "tiny": ResNetConfig(depths=(1, 1, 1), width=16, num_classes=10, in_channels=1, small_images=True),
    "resnet18": ResNetConfig(depths=(2, 2, 2, 2)),
    "resnet34": ResNetConfig(depths=(3, 4, 6, 3)),
}


class Convolution(nn.Conv2d):
    """``nn.Conv2d`` without bias, with "same" padding at stride 1 and He initialisation (He et al. 2015)."""

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int, stride: int = 1) -> None:
        super().__init__(in_channels, out_channels, kernel_size, stride, padding=kernel_size // 2, bias=False)

    def reset_parameters(self) -> None:
        nn.init.kaiming_normal_(self.weight, mode="fan_out", nonlinearity="relu")


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions and a shortcut; ``downsample`` projects the shortcut to the output's shape."""

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = Convolution(in_channels, channels, 3, stride)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = Convolution(channels, channels, 3)
        self.bn2 = nn.BatchNorm2d(channels)
        changes = stride != 1 or in_channels != channels
        self.downsample = (
            nn.Sequential(Convolution(in_channels, channels, 1, stride), nn.BatchNorm2d(channels)) if changes else None
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        x = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(x)) + shortcut)


class ResNet(PresetModel):
    """Images (batch, channels, height, width) to logits (batch, classes).

    Presets: ``tiny``, ``resnet18``, ``resnet34``.
    """

    presets = PRESETS

    def __init__(self, config: ResNetConfig) -> None:
        size, stride = (3, 1) if config.small_images else (7, 2)
        layers: dict[str, nn.Module] = {
            "conv1": Convolution(config.in_channels, config.width, size, stride),
            "bn1": nn.BatchNorm2d(config.width),
            "relu": nn.ReLU(),
        }
        if not config.small_images:
            layers["maxpool"] = nn.MaxPool2d(3, stride=2, padding=1)
        in_channels = config.width
        for group, depth in enumerate(config.depths):
            channels = config.width * 2**group
            first = BasicBlock(in_channels, channels, stride=2 if group else 1)
            rest = (BasicBlock(channels, channels, stride=1) for _ in range(depth - 1))
            layers[f"layer{group + 1}"] = nn.Sequential(first, *rest)
            in_channels = channels
        layers |= {"avgpool": nn.AdaptiveAvgPool2d(1), "flatten": nn.Flatten()}
        super().__init__(config, {**layers, "fc": nn.Linear(config.num_features, config.num_classes)})

    def pipeline_split(self, num_stages: int) -> list[str] | None:
        """As :func:`~paramp.models.preset_model.equal_stages` of the blocks.

        Stages have equal numbers of blocks, because all blocks cost about the same FLOPs: channels double where the
        image's area quarters. Balanced by parameters, the first stage would have nearly all the work.
        """
        names = [f"layer{group}.{index}" for group, depth in enumerate(self.config.depths, 1) for index in range(depth)]
        return equal_stages(names, num_stages)

    def tensor_parallel_plan(self, tensor_size: int, sequence_parallel: bool) -> dict[str, str]:
        """Shard the classifier by its inputs, which divide for any number of classes; replicate all other layers.

        Raises:
            ConfigError: ``sequence_parallel`` is True, or the features do not divide evenly.
        """
        if sequence_parallel:
            raise ConfigError("parallel.sequence_parallel: got True, but a ResNet has no sequence; expected False")
        if self.config.num_features % tensor_size:
            raise ConfigError(
                f"parallel.tensor.size: got {tensor_size}, expected a divisor of the model's "
                f"{self.config.num_features} features"
            )
        return {"fc": "rowwise_scatter"}


def resnet34(num_classes: int = 1000, *, in_channels: int = 3, small_images: bool = False) -> ResNet:
    """ResNet-34, with the names and shapes of torchvision's; 21,797,672 parameters at 1000 classes.

    Args:
        in_channels: 3 for colour.
        small_images: see :class:`ResNetConfig`. The default takes images of any size from about 32 x 32.
    """
    return ResNet.preset("resnet34", num_classes=num_classes, in_channels=in_channels, small_images=small_images)
