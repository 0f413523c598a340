"""fp16 products computed in fp32 and rounded: what they give, and that everything else passes through."""

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from paramp.precision.capabilities import has_native_fp16
from paramp.precision.fp16_emulation import emulate_fp16


def rounded(tensor):
    return tensor.to(torch.float16)


def is_emulated(product):
    """Whether ``product`` of fp16 tensors converts them."""
    with torch.profiler.profile(acc_events=True) as profile:  # torch 2.11 warns without
        product()
    return "aten::_to_copy" in {event.name for event in profile.events()}


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


def test_products_outside_and_in_other_threads_are_torchs():
    x = torch.ones(8, 8).half()
    seen = {}

    def look(name):
        seen[name] = is_emulated(lambda: x @ x), is_emulated(lambda: torch.mm(x, x, out=torch.empty_like(x)))

    context = emulate_fp16()
    with context:
        with context:
            look("inner")
        look("outer")
        thread = threading.Thread(target=look, args=["thread"])
        thread.start()
        thread.join()
    look("behind")
    assert seen == {
        "inner": (True, True),
        "outer": (True, True),
        "thread": (False, False),
        "behind": (False, False),
    }


@pytest.mark.parametrize("name", ["mm", "addmm", "bmm", "baddbmm"])
def test_a_product_into_a_given_tensor_is_the_same(name):
    generator = torch.Generator().manual_seed(4)
    dims = (2,) if "bmm" in name else ()
    a, b, c = (torch.randn(*dims, 16, 16, generator=generator).half() for _ in range(3))
    given = (c, a, b) if "add" in name else (a, b)
    options = {"beta": 0.5, "alpha": 2.0} if "add" in name else {}
    function = getattr(torch, name)
    out = torch.empty(0).half()
    with emulate_fp16():
        expected = function(*given, **options)
        assert function(*given, out=out, **options) is out
    assert torch.equal(out, expected)
    exact = a.double() @ b.double()
    exact = 2 * exact + 0.5 * c.double() if options else exact
    torch.testing.assert_close(out.double(), exact, rtol=1e-3, atol=1e-3)


def test_a_context_that_another_thread_leaves_is_left_by_the_thread_that_entered_it():
    context, x, entered, left, seen = emulate_fp16(), torch.ones(8, 8).half(), threading.Event(), threading.Event(), []

    def enter():
        context.__enter__()
        entered.set()
        left.wait()
        seen.append(is_emulated(lambda: x @ x))

    thread = threading.Thread(target=enter)
    with emulate_fp16():
        thread.start()
        entered.wait()
        context.__exit__(None, None, None)
        seen.append(is_emulated(lambda: x @ x))
        left.set()
        thread.join()
    seen.append(is_emulated(lambda: x @ x))
    assert seen == [True, False, False]


def test_what_torch_refuses_is_refused():
    x, wide = torch.ones(4, 4).half(), torch.ones(4, 4)

    def message(call):
        with pytest.raises(RuntimeError, match=r"dtype|scalar type") as refused:
            call()
        return str(refused.value)

    for call in (
        lambda: torch.mm(x, x, out=torch.empty(4, 4)),
        lambda: torch.mm(x, x, out=torch.empty(4, 4, dtype=torch.int32)),
        lambda: torch.mm(x, wide),
        lambda: torch.mv(x, wide[0]),
        lambda: torch.dot(x[0], wide[0]),
        lambda: torch.addmm(wide, x, x),
    ):
        expected = message(call)
        with emulate_fp16():
            assert message(call) == expected
    with emulate_fp16(), pytest.warns(UserWarning, match="was resized"):
        torch.mm(x, x, out=torch.empty(2, 2).half())


def test_autocast_does_not_change_a_product_into_a_given_tensor():
    generator = torch.Generator().manual_seed(5)
    x, y = (torch.randn(64, 64, generator=generator).half() for _ in range(2))
    with emulate_fp16():
        expected = x @ y
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(torch.mm(x, y, out=torch.empty_like(x)), expected)


def test_dispatch_modes_and_subclasses_see_fp16_products():
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    x = torch.ones(8, 8).half()
    with emulate_fp16(), Watch():
        x @ x
    assert seen == ["aten.mm.default"]
    with emulate_fp16(), FakeTensorMode():
        product = torch.empty(8, 4, dtype=torch.float16) @ torch.empty(4, 2, dtype=torch.float16)
    assert product.shape == (8, 2)
    assert product.dtype is torch.float16


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
