"""fp16 products computed in fp32 and rounded: what they give, and that everything else passes through."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from paramp.precision.capabilities import has_native_fp16
from paramp.precision.fp16_emulation import emulate_fp16


def rounded(tensor):
    return tensor.to(torch.float16)


def test_a_product_is_the_rounding_of_the_exact_one():
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(64, 64, generator=generator).half() for _ in range(2))
    with emulate_fp16():
        product = a @ b
    assert product.dtype is torch.float16
    exact = a.double() @ b.double()
    spacing = torch.finfo(torch.float16).eps * exact.abs().clamp(min=2.0**-14)
    assert ((product.double() - exact).abs() <= 0.51 * spacing).all()


@pytest.mark.parametrize("name", ["linear", "linear_without_bias", "batched", "einsum", "attention", "causal", "conv"])
def test_forward_and_backward_of_each_kind(name):
    generator = torch.Generator().manual_seed(1)

    def draw(*shape):
        return torch.randn(*shape, generator=generator).half()

    functions = {
        "linear": (lambda x, w, b: F.linear(x, w, b), (draw(5, 3, 16), draw(8, 16), draw(8))),
        "linear_without_bias": (lambda x, w: F.linear(x, w), (draw(5, 3, 16), draw(8, 16))),
        "batched": (torch.bmm, (draw(3, 4, 16), draw(3, 16, 5))),
        "einsum": (lambda x, w: torch.einsum("bij,bkj->bik", x, w), (draw(2, 4, 16), draw(2, 3, 16))),
        "attention": (F.scaled_dot_product_attention, (draw(2, 2, 6, 8), draw(2, 2, 6, 8), draw(2, 2, 6, 8))),
        "causal": (
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
            (draw(2, 2, 6, 8), draw(2, 2, 6, 8), draw(2, 2, 6, 8)),
        ),
        "conv": (lambda x, w, b: F.conv2d(x, w, b, padding=1), (draw(2, 3, 8, 8), draw(4, 3, 3, 3), draw(4))),
    }
    function, inputs = functions[name]
    results = []
    for emulated in (True, False):
        leaves = [value.clone() if emulated else value.double() for value in inputs]
        for leaf in leaves:
            leaf.requires_grad_()
        with emulate_fp16(emulated):
            output = function(*leaves)
            output.backward(torch.ones_like(output))
        assert output.dtype is (torch.float16 if emulated else torch.float64)
        results.append([output.detach(), *(leaf.grad for leaf in leaves)])
    for low, exact in zip(*results, strict=True):
        # one rounding of the result, and, in the backward of attention, of what was saved
        torch.testing.assert_close(low.double(), exact, rtol=4e-3, atol=4e-3)


def test_results_beyond_fp16_become_infinite_and_small_ones_vanish():
    with emulate_fp16():
        large = torch.full((4, 4), 200.0).half() @ torch.full((4, 4), 200.0).half()
        small = torch.full((4, 4), 2.0**-14).half() @ torch.full((4, 4), 2.0**-14).half()
    assert large.isinf().all()
    assert (small == 0).all()


def test_other_dtypes_and_operations_pass_through():
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(2))
    with emulate_fp16():
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            inside = x.to(dtype) @ x.to(dtype)
            assert inside.dtype is dtype
        half = x.half()
        total = half + half
    assert torch.equal(inside, x.bfloat16() @ x.bfloat16())
    assert torch.equal(total, half + half)


def test_it_works_below_autocast():
    torch.manual_seed(0)
    layer = nn.Linear(16, 8)
    x = torch.randn(4, 16)
    with emulate_fp16(), torch.autocast("cpu", dtype=torch.float16):
        output = layer(x)
    assert output.dtype is torch.float16
    exact = F.linear(rounded(x).double(), rounded(layer.weight).double(), rounded(layer.bias).double())
    torch.testing.assert_close(output.double(), exact, rtol=1e-3, atol=1e-3)


def test_what_is_saved_for_the_backward_stays_fp16():
    saved = []

    def record(tensor):
        saved.append(tensor.dtype)
        return tensor

    x, w = (torch.randn(4, 4).half().requires_grad_() for _ in range(2))
    with emulate_fp16(), torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        x @ w
    assert saved
    assert set(saved) == {torch.float16}


def test_disabled_it_is_nothing():
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(3)).half()
    with emulate_fp16(False):
        inside = x @ x
    assert torch.equal(inside, x @ x)


def test_detection_says_yes_for_gpus():
    assert has_native_fp16("cuda")
    assert isinstance(has_native_fp16("cpu"), bool)
