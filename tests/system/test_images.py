"""CIFAR-10's binary records and scikit-learn's digits."""

import sys

import numpy as np
import pytest
import torch
from images import load_images

from paramp.base.errors import ConfigError


def save_cifar10(folder, training=40, held_out=8):
    """Files in the form of CIFAR-10's, in two batches, and their labels: each class has a brightness of its own."""
    folder = folder / "cifar-10-batches-bin"
    folder.mkdir()
    generator = np.random.default_rng(0)
    labels = np.arange(training + held_out) % 10
    pixels = generator.integers(0, 30, (len(labels), 3072)) + labels[:, None] * 20
    records = np.column_stack([labels, pixels]).astype(np.uint8)
    parts = np.split(records, [training // 2, training])
    for name, part in zip(("data_batch_1", "data_batch_2", "test_batch"), parts, strict=True):
        part.tofile(folder / f"{name}.bin")
    return records


def test_cifar10_is_read_from_its_binary_records(tmp_path):
    records = save_cifar10(tmp_path)
    training, held_out = load_images(tmp_path)
    assert (len(training), len(held_out), training.num_channels, training.side) == (40, 8, 3, 32)
    whole = records[:40, 1:].reshape(40, 3, 32, 32) / 255
    mean, std = whole.mean((0, 2, 3)), whole.std((0, 2, 3))
    for images, index, record in ((training, 3, 3), (training, 25, 25), (held_out, 5, 45)):
        image, label = images[index]
        assert label == records[record, 0]
        # the record's bytes by hand: 1 label, then planes of 1024, rows of 32
        value = records[record, 1 + 2 * 1024 + 7 * 32 + 9] / 255
        assert image[2, 7, 9].item() == pytest.approx((value - mean[2]) / std[2], abs=1e-4)
    assert load_images(tmp_path / "cifar-10-batches-bin")[0].labels.equal(training.labels)
    changed, _ = load_images(tmp_path, transform=lambda image: image * 0)
    assert changed[0][0].eq(0).all()


def test_the_digits_fit_a_script_for_cifar10():
    pytest.importorskip("sklearn")
    training, held_out = load_images()
    assert (len(training), len(held_out)) == (1500, 297)
    assert training[0][0].shape == (1, 8, 8)
    assert int(training.pixels.max()) == 255
    stacked = torch.stack([training[index][0] for index in range(1500)])
    assert (stacked.mean().item(), stacked.std().item()) == pytest.approx((0, 1), abs=1e-4)
    large, _ = load_images(side=32, channels=3)
    image, label = large[5]
    assert label == training[5][1]
    assert image.shape == (3, 32, 32)
    assert torch.allclose(image[:, ::4, ::4], training[5][0].expand(3, -1, -1))
    assert torch.equal(image[0, 8:12, 4:8], image[0, 8, 4].expand(4, 4))


def test_images_that_cannot_be_had_are_errors(tmp_path, monkeypatch):
    def refused(message, *arguments, **options):
        with pytest.raises(ConfigError, match=message):
            load_images(*arguments, **options)

    refused(r"lacks data_batch_\*\.bin .*Python version is a pickle", tmp_path)
    save_cifar10(tmp_path)
    refused("side: got 48, expected a multiple of the images' 32 pixels", tmp_path, side=48)
    refused("channels: got 1, expected 3", tmp_path, channels=1)
    with (tmp_path / "cifar-10-batches-bin" / "data_batch_2.bin").open("ab") as file:
        file.write(b"x")
    refused(r"data_batch_2\.bin' has 61461 bytes, expected records of 3073", tmp_path)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    refused(r'pip install "paramp\[examples\]"')
