"""Model FLOPs utilisation: the model's FLOPs against torch's own counter, and the peaks of devices by name."""

import pytest
import torch
from reference import batches, small_gpt, small_moe
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from train_app.mfu import mfu, peak_flops, world_peak_flops

import paramp


@pytest.mark.parametrize("build", [small_gpt, small_moe])
def test_the_models_flops_equal_torchs_flop_counter(build):
    model = build().double()  # torch counts no product of groups, and has none in fp64
    x, y = next(batches(1))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):  # the flash kernel is not counted
        model.loss(model(x), y).backward()
    config = model.config
    padding = 6 * (config.padded_vocab_size - config.vocab_size) * config.width  # computed, but not needed
    assert (model.flops_per_token(x.shape[1]) + padding) * x.numel() == counter.get_total_flops()


def test_the_flops_of_gpt2_equal_hand_arithmetic():
    model = paramp.models.GPT(paramp.models.GPTConfig(num_layers=2, num_heads=2, width=8, max_seq_len=4, vocab_size=10))
    assert model.flops_per_token(4) == 6 * (2 * 12 * 64 + 10 * 8) + 12 * 2 * 2 * 4 * 4


HALF, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
PEAKS = {  # in teraflops
    "NVIDIA A100-SXM4-80GB": {BF16: 312.0, FP32: 19.5},
    "NVIDIA H100 80GB HBM3": {HALF: 989.4, FP64: None},
    "NVIDIA H100 PCIe": {HALF: 756.0},
    "NVIDIA H100 NVL": {HALF: 835.5},
    "NVIDIA H200": {BF16: 989.4},
    "NVIDIA B200": {BF16: 2250.0},
    "Tesla V100-PCIE-16GB": {HALF: 112.0},
    "Tesla V100-SXM2-32GB": {HALF: 125.0, BF16: None},
    "NVIDIA A10G": {HALF: 70.0},
    "NVIDIA A10": {HALF: 125.0},
    "NVIDIA L40S": {HALF: 362.05},
    "NVIDIA L40": {HALF: None},
    "NVIDIA GeForce RTX 4090": {HALF: 165.2},
    "NVIDIA GeForce RTX 4090 Laptop GPU": {HALF: None},
    "NVIDIA A100-SXM4-40GB MIG 1g.5gb": {HALF: None},
    "AMD Instinct MI300X": {BF16: 1307.4},
    "Something else": {HALF: None},
}


@pytest.mark.parametrize("name", PEAKS)
def test_the_peak_of_a_device_is_found_by_its_name(name):
    for dtype, teraflops in PEAKS[name].items():
        assert peak_flops(name, dtype) == (None if teraflops is None else pytest.approx(teraflops * 1e12))


def test_the_tf32_peak_is_used_where_torch_may_use_tf32():
    assert peak_flops("NVIDIA A100-SXM4-80GB", FP32, tf32=True) == pytest.approx(156e12)
    assert peak_flops("Tesla T4", FP32, tf32=True) == pytest.approx(8.1e12)


def test_a_cpu_has_a_peak_only_if_it_is_given():
    with paramp.launch_from_torch({}, device="cpu") as context:
        assert world_peak_flops(context) is None
        assert world_peak_flops(context, 2e12) == 2e12
    assert mfu(1e12, 2.0, 1e12) == 0.5
    assert mfu(1e12, 2.0, None) is None
