"""What a model calls of torch has the same bits on a whole tensor and on each rank's part of it."""

import itertools
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from counting import Operators
from torch import nn

from paramp.base.errors import ConfigError
from paramp.base.uncompiled import unwatched
from paramp.distributed.random_across_tensor_ranks import sharded_random
from paramp.exact.dropout_masks import Masks
from paramp.exact.exact_function_mode import ExactFunctions
from paramp.exact.exact_layout import ExactLayout, Position
from paramp.exact.forwards_in_microchunk import Forwards

INTEGERS = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}
DTYPES = [*INTEGERS]
SIZES = [2, 4, 8]
of_each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


class Calls(nn.Module):
    """Calls a function inside a module."""

    def forward(self, function, *inputs):
        return function(*inputs)


def mode_for(rank=0, size=1, model=None, divided=(), fused=0, **options):
    """The mode of a rank; ``options``: of its layout, and of the position in the run."""
    group = SimpleNamespace(rank=lambda: rank, size=lambda: size)
    position = Position(**{name: options.pop(name) for name in ("step", "call", "first_sample") if name in options})
    layout = ExactLayout(**({"seed": 1, "microchunk": 2, "slices": 8, "tensor_group": group} | options))
    forwards = Forwards(layout, lambda: position)
    forwards.fused = fused
    if model is not None:
        forwards.watch(model, {one: name for name, one in model.named_modules()})
    return ExactFunctions(forwards, Masks(forwards, divided))


def same(first, second):
    """Whether two tensors have the same bits: 0 and -0 differ, NaN equals itself."""
    if first.dtype in INTEGERS:
        first, second = (one.contiguous().view(INTEGERS[first.dtype]) for one in (first, second))
    return first.dtype is second.dtype and torch.equal(first, second)


def run(mode, function, inputs, gradient):
    """The output of ``function`` and the gradients of ``inputs``."""
    inputs = [one.detach().requires_grad_() if one.is_floating_point() else one for one in inputs]
    with mode:
        output = function(*inputs)
        output.backward(gradient)
    return [output.detach(), *[one.grad for one in inputs if one.is_floating_point()]]


def part_of(tensor, dim, rank, size):
    return tensor.chunk(size, dim)[rank]


def assert_parts_have_the_bits(function, inputs, gradient, dims, sizes=SIZES):
    """Each rank computes its part of the whole, and of the gradients; the output is sharded over dim 1."""

    def run_on(rank, size):
        model = Calls()
        own = [part_of(one, dim, rank, size) for one, dim in zip(inputs, dims, strict=True)]
        mode = mode_for(rank, size, model, fused=1)
        return run(mode, lambda *values: model(function, *values), own, part_of(gradient, 1, rank, size))

    whole = run_on(0, 1)
    of_results = [1, *(dim for one, dim in zip(inputs, dims, strict=True) if one.is_floating_point())]
    for size in sizes:
        for rank in range(size):
            expected = [part_of(one, dim, rank, size) for one, dim in zip(whole, of_results, strict=True)]
            assert all(map(same, run_on(rank, size), expected)), (size, rank)
    return whole


def positive(x):
    return x.abs() + 0.1


def by_name(*functions):
    return {function.__name__: function for function in functions}


IMPORTANT = by_name(F.silu, torch.sigmoid, F.gelu, torch.Tensor.tanh) | {
    "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
    "rsqrt": lambda x: torch.rsqrt(positive(x)),
    "silu_": lambda x: F.silu(x * 1, inplace=True),
}
ELEMENTWISE = {
    **IMPORTANT,
    **by_name(F.mish, F.softplus, F.softsign, F.tanhshrink, F.selu, F.elu, F.celu, F.hardswish, F.logsigmoid),
    **by_name(torch.special.erf, torch.special.expit, torch.sin, torch.cos, torch.sqrt),  # NaN has the same bits, too
    "exp_": lambda x: (x * 1).exp_(),
    "log": lambda x: torch.log(positive(x)),
    "square": lambda x: x**2,
    "power": lambda x: positive(x) ** 1.7,
    "powers": lambda x: positive(x).pow(x),
    "exponent": lambda x: 2**x,
    "reciprocal": lambda x: 1 / x,
    "addcmul": lambda x: torch.addcmul(x, x, x, value=0.3),
    "alpha": lambda x: x.add(x * 3, alpha=0.3),
    "lerp": lambda x: torch.lerp(x, x * 2, 0.3),
    "remainder": lambda x: x % 0.7,
    "arithmetic": lambda x: (x - 0.3) * x / 3.3 + x * x,
    "clamp": lambda x: F.relu(x.clamp(-0.5, 0.5)).square().abs(),
}


@of_each_dtype
@pytest.mark.parametrize(
    ("names", "step"), [([*IMPORTANT], 1), ([*set(ELEMENTWISE) - set(IMPORTANT)], 13)], ids=["1", "13"]
)
def test_an_elements_bits_do_not_depend_on_its_position(names, step, dtype):
    torch.manual_seed(0)
    values, gradients = torch.randn(2, 207).to(dtype)
    mode = mode_for()
    for name in names:
        whole = run(mode, ELEMENTWISE[name], [values], gradients)
        for size in range(1, 201, step):
            part = slice(size % 5, size % 5 + size)
            x, gradient = values[part], gradients[part]
            if size % 3 == 2:  # as of 128 elements, which need no padding
                x, gradient = torch.stack([x, x], 1)[:, 0], torch.stack([gradient, gradient], 1)[:, 1]
            for output, expected in zip(run(mode, ELEMENTWISE[name], [x], gradient), whole, strict=True):
                assert same(output, expected[part]), (name, size)


@pytest.mark.parametrize(("shape", "padded"), [((3,), 128), ((16, 8), 128), ((5, 31), 256), ((2, 3, 100), 640)])
def test_elementwise_functions_get_contiguous_memory_of_a_multiple_of_128_elements(shape, padded):
    """So does their backward, for an input and a gradient that are strided."""
    x, gradient = torch.randn(2, *shape[::-1]).transpose(1, -1)
    with Operators() as operators:
        run(mode_for(), torch.sigmoid, [x], gradient)
    found = [(function.name(), value) for function, value in operators.calls if "sigmoid" in function.name()]
    assert [name for name, _ in found] == ["aten::sigmoid", "aten::sigmoid_backward"]
    assert all(value.shape == (padded,) and value.is_contiguous() for _, value in found)


def one_head(*heads):
    return F.scaled_dot_product_attention(*heads, is_causal=True)


VALUES = [
    *((function, [(5, 7, 9)], dtype) for function in ELEMENTWISE.values() for dtype in DTYPES),
    (lambda x: F.glu(x, 1), [(4, 6, 10)], torch.float32),
    (torch.matmul, [(2, 4, 5, 7), (1, 7, 3)], torch.float32),  # the second is broadcast
    (lambda row, x: positive(row) ** x.bfloat16() + positive(x) ** 1.5, [(1, 5), (3, 5)], torch.bfloat16),
    (lambda row, x: torch.lerp(row, torch.exp(x), 0.3), [(1, 5), (3, 5)], torch.float32),
    (one_head, [(2, 5, 6)] * 3, torch.float32),  # without the dim of heads
]


def test_functions_have_torchs_values():
    torch.manual_seed(0)
    for function, shapes, dtype in VALUES:
        inputs = [torch.randn(shape).to(dtype) for shape in shapes]
        gradient = torch.randn(function(*inputs).shape).to(dtype)
        close = {"rtol": 4 * torch.finfo(dtype).eps, "atol": 1e-3 if dtype.itemsize < 4 else 1e-5, "equal_nan": True}
        found, expected = (run(mode, function, inputs, gradient) for mode in (mode_for(), nullcontext()))
        torch.testing.assert_close(found, expected, msg=lambda text, one=function: f"{one}: {text}", **close)


def test_the_gradient_of_a_broadcast_operand_is_rounded_once():
    row, gradient = torch.ones(3, dtype=torch.bfloat16, requires_grad=True), torch.rand(501, 3).bfloat16()
    with mode_for():
        row.expand(501, 3).backward(gradient)
    torch.testing.assert_close(row.grad, gradient.double().sum(0).bfloat16(), rtol=0, atol=0)


def attention_inputs(dtype, groups):
    query, gradient = torch.randn(2, 2, 8, 5, 6).to(dtype)
    key, value = torch.randn(2, 2, groups, 5, 6).to(dtype)
    gradient[:, :, ::2] = -0.0
    return [query, key, value], gradient


MASKS = {
    "none": lambda: None,
    "causal": lambda: None,
    "heads": lambda: torch.rand(2, 8, 5, 5) > 0.3,
    "shared": lambda: torch.randn(2, 1, 5, 5),
    "rows": lambda: torch.randn(5, 5).tril() + torch.eye(5),
}


def attend(kind, mask, dropout, groups):
    def function(query, key, value, own=None):
        given = mask if own is None else own
        if given is not None and given.is_floating_point():
            given = given.to(query.dtype)
        options = {"is_causal": kind == "causal", "scale": 0.3, "enable_gqa": groups != 8}
        with sharded_random():
            return F.scaled_dot_product_attention(query, key, value, given, dropout, **options)

    return function


CASES = [
    *itertools.product(DTYPES, MASKS, [8], [0.0]),
    *itertools.product(DTYPES, ["none", "heads", "causal"], [8], [0.4]),
    (torch.float32, "causal", 4, 0.0),
]


@pytest.mark.parametrize(("dtype", "kind", "groups", "dropout"), CASES)
def test_attention_has_the_same_bits_however_heads_are_sharded(dtype, kind, groups, dropout):
    torch.manual_seed(0)
    inputs, gradient = attention_inputs(dtype, groups)
    mask = MASKS[kind]()
    function = attend(kind, mask, dropout, groups)
    inputs = [*inputs, mask] if kind == "heads" else inputs
    assert_parts_have_the_bits(function, inputs, gradient, [1] * len(inputs), SIZES if groups == 8 else [2, 4])


@pytest.mark.parametrize("cast", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("kind", "groups"), [*[(kind, 8) for kind in MASKS], ("causal", 4), ("heads", 2)])
def test_attention_has_torchs_values(kind, groups, cast):
    torch.manual_seed(0)
    inputs, gradient = attention_inputs(torch.float32, groups)
    if kind == "heads" and cast is None:
        inputs = [one.double() for one in inputs]
        gradient = gradient.double()
    gradient = gradient.to(cast)
    mask = MASKS[kind]()
    if kind == "heads":
        mask[0, 3, 2] = False  # a query without keys
    model = Calls()
    with torch.autocast("cpu", cast, enabled=cast is not None):
        plain = run(nullcontext(), attend(kind, mask, 0.0, groups), inputs, gradient)
        for dropout in (0.0, 1e-12):  # makes its own mask, which keeps everything
            function = attend(kind, mask, dropout, groups)
            with Operators() as operators:
                found = run(mode_for(model=model), lambda *values: model(function, *values), inputs, gradient)  # noqa: B023
            calls = [(one.name(), got) for one, got in operators.calls if "backward" not in one.name()]
            heads = [got[0].shape[1] for name, got in calls if "scaled_dot_product" in name]
            assert heads == ([] if dropout else [8 // groups] * groups)  # one call for each key/value head
            torch.testing.assert_close(found, plain, rtol=3e-2 if cast else 1e-5, atol=3e-2 if cast else 1e-5)


HEADS, LEFT, RIGHT, PRODUCT = (2, 8, 3, 5), (2, 8, 5, 7), (2, 8, 3, 7), (2, 8, 5, 3)


def scaled_sum(one, other):
    sums = torch.baddbmm(one.new_ones(1, 3), one.flatten(0, 1), other.flatten(0, 1).mT, beta=0.5, alpha=2)
    return sums.unflatten(0, one.shape[:2])


OF_HEADS = {
    "@": (lambda one, other: one @ other.mT, {LEFT: 1, RIGHT: 1}, PRODUCT),
    "matmul": (lambda one, other: torch.matmul(one, other=other.mT), {LEFT: 1, RIGHT: 1}, PRODUCT),
    "bmm": (
        lambda one, other: torch.bmm(one.flatten(0, 1), other.flatten(0, 1).mT).unflatten(0, one.shape[:2]),
        {LEFT: 1, RIGHT: 1},
        PRODUCT,
    ),
    "baddbmm": (scaled_sum, {LEFT: 1, RIGHT: 1}, PRODUCT),
    "repeated": (
        lambda heads, scale: (heads * scale)[:, :, None].expand(-1, -1, 7, -1, -1),
        {HEADS: 1, (8, 1, 1): 0},
        (2, 8, 7, 3, 5),
    ),
    "copied": (lambda heads: heads.repeat_interleave(7, 1), {HEADS: 1}, (2, 56, 3, 5)),
    "softmax of rows": (lambda x: x.softmax(-1), {(2, 8, 5, 37): 1}, (2, 8, 5, 37)),
    "softmax": (lambda x: F.softmax(x, dim=3), {(2, 8, 5, 37): 1}, (2, 8, 5, 37)),
}
"""The function; the shapes of its inputs, and the dim of the heads of each; the shape of its output."""


@of_each_dtype
@pytest.mark.parametrize("name", OF_HEADS)
def test_functions_of_heads_have_the_same_bits_however_heads_are_sharded(name, dtype):
    torch.manual_seed(0)
    function, shapes, output = OF_HEADS[name]
    inputs, gradient = [torch.randn(shape).to(dtype) for shape in shapes], torch.randn(output).to(dtype)
    whole = assert_parts_have_the_bits(function, inputs, gradient, [*shapes.values()])
    exact = run(nullcontext(), function, [one.double() for one in inputs], gradient.double())
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 5e-2, "atol": 5e-2}
    torch.testing.assert_close(whole, [one.to(dtype) for one in exact], **close)


GATE, GATE_OF_HEADS = (torch.ones(2, *[1] * dims, requires_grad=True) for dims in (2, 3))
GAMMA = nn.Parameter(torch.ones(4))
REFUSED_WHEN_SHARDED = {
    "sum": lambda x: x.sum(),
    "mean": lambda x: x.mean(-1),
    "linalg_vector_norm": lambda x: x.norm(),
    "cumsum": lambda x: x.cumsum(1),
    "einsum": lambda x: torch.einsum("btd,bsd->bts", x, x),
    "softmax": lambda x: x.softmax(1),
    "matmul": lambda x: x @ torch.ones(4, 3),
    "layer_norm": lambda x: F.layer_norm(x, (4,)),
    "conv1d": lambda x: F.conv1d(x, torch.ones(1, 3, 1)),
    "max": lambda x: x.max(),
    # A parameter of its own, or a trained operand that is broadcast over the features.
    "gamma": lambda x: x * GAMMA,
    "gamma first": lambda x: torch.mul(GAMMA, x),
    "gamma in a view": lambda x: x + GAMMA[None],
    "gamma alone": lambda x: F.silu(GAMMA),
    "gate": lambda x: x * GATE,
    "gate of heads": lambda x: torch.ones(2, 3, 4, 8) * GATE_OF_HEADS,
}


@pytest.mark.parametrize("name", REFUSED_WHEN_SHARDED)
def test_what_depends_on_the_layout_is_refused_between_sharded_layers(name):
    x, function, model = torch.ones(2, 3, 4), REFUSED_WHEN_SHARDED[name], nn.Sequential(Calls())
    is_parameter = name.startswith(("gamma", "gate"))
    message = (
        "its gradient would be a part" if is_parameter else f"{name} in '0' got activations that are sharded over 2"
    )
    mode = mode_for(0, 2, model, fused=1)
    with mode, pytest.raises(ConfigError, match=message):
        model[0](function, x)
    with mode, unwatched():
        expected = function(x)
    for whole in (mode_for(0, 1, fused=1), mode_for(0, 2)):
        with whole:
            torch.testing.assert_close(function(x), expected)


def test_a_module_that_runs_in_the_backward_only_is_not_between_sharded_layers():
    """As a hook of a gradient may call it, whatever the forward ended with."""
    model, x = nn.Sequential(Calls()), torch.ones(2, 3, 4).requires_grad_()
    x.register_hook(lambda gradient: model[0](F.normalize, gradient, 2.0, 2))
    output = x.sum()
    with mode_for(0, 2, model, fused=1):
        output.backward()
    torch.testing.assert_close(x.grad, torch.full((2, 3, 4), 0.5))


ATTENTION = nn.MultiheadAttention(8, 2)
RANDOM = by_name(torch.rand_like, torch.bernoulli, torch.Tensor.uniform_, nn.init.normal_) | {
    "rand": lambda x: torch.rand(3),
    "randn": lambda x: torch.randn(3),
    "randint": lambda x: torch.randint(3, (3,)),
    "randperm": lambda x: torch.randperm(3),
    "multinomial": lambda x: torch.multinomial(x, 1),
    "exponential_": F.gumbel_softmax,
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.1, training=True),
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x, 0.1, training=True),
    "rrelu": nn.RReLU(),
    "multi_head_attention_forward": lambda x: ATTENTION(x, x, x),
}


@pytest.mark.parametrize("name", RANDOM)
def test_random_numbers_of_torchs_generator_are_refused(name):
    model = nn.Sequential(Calls())
    with mode_for(model=model), pytest.raises(ConfigError, match=f"reproducible: {name} in '0' .*use F."):
        model[0](RANDOM[name], torch.ones(3, 8))


def test_arguments_that_cannot_be_exact_are_refused():
    x, (query, key, value) = torch.ones(3), torch.randn(3, 1, 1, 2, 5, 6)
    with mode_for():
        with pytest.raises(ConfigError, match=r"exp in .* got out="):
            torch.exp(x, out=x)
        with pytest.raises(ConfigError, match="expected 4 dims"):
            F.scaled_dot_product_attention(query, key, value)
    mask = torch.zeros(5, 5, requires_grad=True)
    with mode_for(0, 2, fused=1), pytest.raises(ConfigError, match="requires gradients"):
        F.scaled_dot_product_attention(query[0], key[0], value[0], attn_mask=mask)


X = torch.arange(2.0 * 4 * 6).view(2, 4, 6).requires_grad_()
DIVIDING = {
    "chunk": (2, lambda: X.chunk(2, -1)),
    "chunk of the sequence": (None, lambda: X.chunk(2, 1)),
    "split": (3, lambda: torch.split(X, 2, dim=2)),
    "split into uneven ones": (0, lambda: X.split([2, 4], -1)),
    "glu": (2, lambda: F.glu(X)),
    "flip": (0, lambda: X.flip(2)),
    "roll": (0, lambda: X.roll(1, -1)),
    "narrow": (0, lambda: X.narrow(2, 0, 3)),
    "a slice": (0, lambda: X[..., 1:]),
    "a slice of all dims": (0, lambda: X[:, :, :3]),
    "a slice of the sequence": (None, lambda: X[:, 1:]),
    "all": (None, lambda: X[..., :]),
    "cat": (0, lambda: torch.cat([X, X], -1)),
    "dstack": (0, lambda: torch.dstack([X, X])),
    "cat of the sequence": (None, lambda: torch.concatenate([X, X], axis=1)),
    "cat of a table": (None, lambda: torch.cat([X.detach(), X.detach()], -1)),
    "view": (3, lambda: X.view(2, 4, 3, -1, 2)),
    "reshape into heads": (2, lambda: torch.reshape(X, (2, 4, 2, -1))),
    "unflatten": (3, lambda: X.unflatten(-1, (3, -1))),
    "a number of heads": (None, lambda: X.view(2, 4, -1, 3)),
    "of flat tokens": (None, lambda: X.view(8, 2, -1)),
    "heads": (None, lambda: X.unflatten(-1, (2, 3)).unbind(2)),
    "halves of heads": (None, lambda: X.view(2, 4, 2, 3)[..., :1]),
}


@pytest.mark.parametrize("name", DIVIDING)
def test_features_are_divided_into_the_parts_of_the_layer_only(name):
    parts, call = DIVIDING[name]
    for own in (1, 2, 3):
        allowed = parts in (None, own)
        refused = nullcontext() if allowed else pytest.raises(ConfigError, match="divides or reorders features")
        with mode_for(0, 2, fused=own), refused:
            call()
    for mode in (mode_for(0, 2), mode_for(0, 1, fused=1)):
        with mode:
            call()
