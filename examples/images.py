"""Labelled images to train on: CIFAR-10 from a folder, or the digits in scikit-learn.

CIFAR-10 (Krizhevsky 2009) is read from its *binary version*, the folder ``cifar-10-batches-bin``: ``data_batch_1.bin``
to ``data_batch_5.bin`` and ``test_batch.bin``. Each file has records of 3073 bytes: a label, and the red, green and
blue planes of 32 x 32 pixels, row by row. The Python version is a pickle, which can run any code, and is not read. The
digits are the 1797 handwritten digits of UCI's *Optical Recognition of Handwritten Digits*, 8 x 8 grey pixels each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset

from paramp import ConfigError

__all__ = ["ImageSet", "load_images"]

RECORD = 1 + 3 * 32 * 32
NUM_HELD_OUT_DIGITS = 297


@dataclass(frozen=True)
class ImageSet(Dataset[tuple[torch.Tensor, int]]):
    """A map-style data set of ``(image, label)``: float32 (channels, side, side), and the index of the class."""

    pixels: torch.Tensor
    """uint8 (images, channels, side, side)."""
    labels: torch.Tensor
    """int64 (images,)."""
    mean: torch.Tensor
    """float32 (channels, 1, 1), over the training images with pixels from 0 to 1."""
    std: torch.Tensor
    num_classes: int
    transform: Callable[[torch.Tensor], torch.Tensor] | None = None
    """Applied to the normalised image, for example a random crop in training."""

    @property
    def num_channels(self) -> int:
        return self.pixels.shape[1]

    @property
    def side(self) -> int:
        return self.pixels.shape[2]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = (self.pixels[index] / 255 - self.mean) / self.std
        return image if self.transform is None else self.transform(image), int(self.labels[index])


def load_images(
    folder: str | Path | None = None,
    *,
    side: int | None = None,
    channels: int | None = None,
    transform: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> tuple[ImageSet, ImageSet]:
    """Images to train on, and images held out.

    Args:
        folder: has CIFAR-10's binary version, directly or in ``cifar-10-batches-bin``. None: the digits, of which the
            last 297 are held out (by other writers).
        side: enlarge to this many pixels a side, by repeating each. None: as they are.
        channels: 3 makes grey images colour. None: as they are.
        transform: applied to each training image.

    Raises:
        ConfigError: the folder does not have CIFAR-10's binary version, the images cannot be enlarged to ``side``, or
            scikit-learn is not installed.
    """
    (pixels, labels), held_out = _digits() if folder is None else _cifar10(Path(folder).expanduser())
    own = pixels.shape[2]
    if side is not None and (side < own or side % own):
        raise ConfigError(f"side: got {side}, expected a multiple of the images' {own} pixels")
    if channels not in (None, pixels.shape[1]) and (pixels.shape[1], channels) != (1, 3):
        raise ConfigError(f"channels: got {channels}, expected {pixels.shape[1]}{', or 3' * (pixels.shape[1] == 1)}")

    def fit(images: torch.Tensor) -> torch.Tensor:
        factor = 1 if side is None else side // own
        images = images.repeat_interleave(factor, 2).repeat_interleave(factor, 3)
        return images if channels is None else images.expand(-1, channels, -1, -1)

    pixels = fit(pixels)
    std, mean = _statistics(pixels)
    training = ImageSet(pixels, labels, mean, std, num_classes=10, transform=transform)
    return training, ImageSet(fit(held_out[0]), held_out[1], mean, std, num_classes=10)


def _statistics(pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Standard deviation and mean of each channel, pixels going from 0 to 1."""
    # From the counts of the 256 pixel values: exact, with little memory.
    counts = torch.stack([torch.bincount(channel.flatten(), minlength=256) for channel in pixels.transpose(0, 1)])
    weights = counts.double() / counts.sum(1, keepdim=True)
    values = torch.arange(256, dtype=torch.float64) / 255
    mean = weights @ values
    std = (weights @ values**2 - mean**2).clamp(min=1e-12).sqrt()
    return std.float().view(-1, 1, 1), mean.float().view(-1, 1, 1)


def _digits() -> Sequence[tuple[torch.Tensor, torch.Tensor]]:
    try:
        from sklearn.datasets import load_digits  # type: ignore[import-untyped]
    except ImportError:
        raise ConfigError(
            'images: the digits come with scikit-learn, which is not installed: pip install "paramp[examples]", or '
            "give a folder with CIFAR-10's binary version"
        ) from None
    digits = load_digits()
    pixels = torch.from_numpy(np.rint(digits.images * (255 / 16)).astype(np.uint8)).unsqueeze(1)
    labels = torch.from_numpy(digits.target.astype(np.int64))
    num_training = len(labels) - NUM_HELD_OUT_DIGITS
    return (pixels[:num_training], labels[:num_training]), (pixels[num_training:], labels[num_training:])


def _cifar10(folder: Path) -> Sequence[tuple[torch.Tensor, torch.Tensor]]:
    inner = folder / "cifar-10-batches-bin"
    folder = inner if inner.is_dir() else folder
    training = sorted(folder.glob("data_batch_*.bin"))
    held_out = folder / "test_batch.bin"
    if not training or not held_out.is_file():
        raise ConfigError(
            f"images: {str(folder)!r} lacks data_batch_*.bin or test_batch.bin; expected the binary version of "
            "CIFAR-10 (cifar-10-binary.tar.gz, unpacked); the Python version is a pickle, which is not read"
        )
    return _records(training), _records([held_out])


def _records(paths: Sequence[Path]) -> tuple[torch.Tensor, torch.Tensor]:
    files = []
    for path in paths:
        data = np.fromfile(path, np.uint8)
        if data.size == 0 or data.size % RECORD or data[::RECORD].max() > 9:
            raise ConfigError(
                f"images: {str(path)!r} has {data.size} bytes, expected records of {RECORD}, each of a label from 0 to "
                "9 and 3 x 32 x 32 pixels"
            )
        files.append(torch.from_numpy(data).view(-1, RECORD))
    records = torch.cat(files)
    return records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0].long()
