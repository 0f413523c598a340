"""fp16 products computed in fp32 and rounded: what they give, and that everything else passes through."""

import platform
import threading
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from paramp.precision.capabilities import has_bf16_on_cpu, has_native_fp16
from paramp.precision.fp16_emulation_cpu import emulate_fp16


def drawn(*shapes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(shape, generator=generator).half() for shape in shapes)


def is_emulated(product):
    """Whether ``product`` of fp16 tensors converts them."""
    with torch.profiler.profile(acc_events=True) as profile:  # torch 2.11 warns without
        product()
    return "aten::_to_copy" in {event.name for event in profile.events()}


def test_a_product_is_the_rounding_of_the_exact_one():
    a, b = drawn((64, 64), (64, 64))
    with emulate_fp16():
        product = a @ b
        large = torch.full((4, 4), 200.0).half() @ torch.full((4, 4), 200.0).half()
        small = torch.full((4, 4), 2.0**-14).half() @ torch.full((4, 4), 2.0**-14).half()
    assert product.dtype is torch.float16
    exact = a.double() @ b.double()
    spacing = torch.finfo(torch.float16).eps * exact.abs().clamp(min=2.0**-14)
    assert ((product.double() - exact).abs() <= 0.51 * spacing).all()
    assert large.isinf().all()
    assert (small == 0).all()


OFFS = torch.tensor([5, 5, 16], dtype=torch.int32)


def grouped(x, w):
    if x.dtype is torch.float64:  # torch has none
        return torch.cat([x[:5] @ w[0], x[5:] @ w[2] + 0 * w[1].sum()])
    return F.grouped_mm(x, w, offs=OFFS)


ATTENTION = ((2, 2, 6, 8),) * 3
KINDS = {
    "linear": (F.linear, ((5, 3, 16), (8, 16), (8,))),
    "linear_without_bias": (F.linear, ((5, 3, 16), (8, 16))),
    "grouped": (grouped, ((16, 16), (3, 16, 8))),
    "batched": (torch.bmm, ((3, 4, 16), (3, 16, 5))),
    "einsum": (lambda x, w: torch.einsum("bij,bkj->bik", x, w), ((2, 4, 16), (2, 3, 16))),
    "attention": (F.scaled_dot_product_attention, ATTENTION),
    "causal": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), ATTENTION),
    "conv": (lambda x, w, b: F.conv2d(x, w, b, padding=1), ((2, 3, 8, 8), (4, 3, 3, 3), (4,))),
}


@pytest.mark.parametrize("name", KINDS)
def test_forward_and_backward_of_each_kind_and_what_is_saved_between_stays_fp16(name):
    function, shapes = KINDS[name]
    results, saved = [], []

    def record(tensor):
        if tensor.is_floating_point():
            saved.append(tensor.dtype)
        return tensor

    for emulated in (True, False):
        leaves = [value if emulated else value.double() for value in drawn(*shapes, seed=1)]
        for leaf in leaves:
            leaf.requires_grad_()
        with emulate_fp16() if emulated else nullcontext():
            with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
                output = function(*leaves)
            output.backward(torch.ones_like(output))
        assert output.dtype is (torch.float16 if emulated else torch.float64)
        results.append([output.detach(), *(leaf.grad for leaf in leaves)])
    for low, exact in zip(*results, strict=True):
        # one rounding of the result, and, in the backward of attention, of what was saved
        torch.testing.assert_close(low.double(), exact, rtol=4e-3, atol=4e-3)
    sums = {torch.float32} if shapes == ATTENTION else set()  # of exponentials
    assert set(saved) == {torch.float16, torch.float64} | sums


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

    with emulate_fp16():
        with emulate_fp16():
            look("inner")
        look("outer")
        thread = threading.Thread(target=look, args=["thread"])
        thread.start()
        thread.join()
    look("behind")
    inside, outside = (True, True), (False, False)
    assert seen == {"inner": inside, "outer": inside} | dict.fromkeys(("thread", "behind"), outside)


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


@pytest.mark.parametrize("name", ["mm", "addmm", "bmm", "baddbmm"])
def test_a_product_into_a_given_tensor_is_the_same_under_autocast_too(name):
    dims = (2,) if "bmm" in name else ()
    a, b, c = drawn(*[(*dims, 16, 16)] * 3, seed=4)
    given = (c, a, b) if "add" in name else (a, b)
    options = {"beta": 0.5, "alpha": 2.0} if "add" in name else {}
    function = getattr(torch, name)
    out = torch.empty(0).half()
    with emulate_fp16():
        expected = function(*given, **options)
        assert function(*given, out=out, **options) is out
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(function(*given, out=torch.empty_like(a), **options), expected)
    assert torch.equal(out, expected)
    exact = a.double() @ b.double()
    exact = 2 * exact + 0.5 * c.double() if options else exact
    torch.testing.assert_close(out.double(), exact, rtol=1e-3, atol=1e-3)


def test_each_group_of_a_grouped_product_is_emulated():
    x, w = drawn((16, 16), (3, 16, 8))
    with emulate_fp16():
        assert is_emulated(lambda: F.grouped_mm(x, w, offs=OFFS))
    assert not is_emulated(lambda: F.grouped_mm(x, w, offs=OFFS))


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


def test_detection_says_yes_for_gpus():
    assert has_native_fp16("cuda")
    assert isinstance(has_native_fp16("cpu"), bool)


def test_detection_of_bfloat16_asks_onednn_and_on_x86_also_the_cpu(monkeypatch):
    def found(*, built=True, onednn=True, machine="x86_64", avx512=False, amx=False):
        monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: built)
        monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: onednn)
        monkeypatch.setattr(platform, "machine", lambda: machine)
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512)
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
        return has_bf16_on_cpu()

    assert (found(avx512=True), found(amx=True), found(machine="aarch64")) == (True, True, True)
    assert (found(), found(machine="AMD64"), found(built=False, avx512=True)) == (False, False, False)
    assert not found(onednn=False, avx512=True)
