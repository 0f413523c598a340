"""What a model calls of torch has the same bits on a whole tensor and on each rank's part of it."""

import itertools
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from paramp.base.errors import ConfigError
from paramp.distributed import rng
from paramp.distributed.reproducible.place import Place
from paramp.distributed.rng import replicated_random, sharded_random
from paramp.parallel.reproducible.functions import ExactFunctions, unwatched

INTEGERS = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}
DTYPES = [*INTEGERS]
SIZES = [2, 4, 8]


class Ranks:
    """Stands in for a process group."""

    def __init__(self, rank, size):
        self._rank, self._size = rank, size

    def size(self):
        return self._size

    def rank(self):
        return self._rank


def place_of(rank=0, size=1, **options):
    return Place(**({"seed": 1, "chunk": 2, "slices": 8, "tensor_group": Ranks(rank, size)} | options))


def mode_for(rank=0, size=1, model=None, **options):
    mode = ExactFunctions(
        place_of(rank, size, **options), {} if model is None else {one: name for name, one in model.named_modules()}
    )
    if model is not None:
        mode.watch(model)
    return mode


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


def positive(x):
    return x.abs() + 0.1


IMPORTANT = {
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "gelu": F.gelu,
    "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
    "rsqrt": lambda x: torch.rsqrt(positive(x)),
    "tanh": torch.Tensor.tanh,
    "silu_": lambda x: F.silu(x * 1, inplace=True),
}
ELEMENTWISE = IMPORTANT | {
    "mish": F.mish,
    "softplus": F.softplus,
    "exp_": lambda x: (x * 1).exp_(),
    "log": lambda x: torch.log(positive(x)),
    "erf": torch.special.erf,
    "square": lambda x: x**2,
    "power": lambda x: positive(x) ** 1.7,
    "powers": lambda x: positive(x).pow(x),
    "exponent": lambda x: 2**x,
    "reciprocal": lambda x: 1 / x,
    "sqrt": torch.sqrt,  # NaN, too, has the same bits
    "sin": torch.sin,
    "cos": torch.cos,
    "softsign": F.softsign,
    "tanhshrink": F.tanhshrink,
    "selu": F.selu,
    "elu": F.elu,
    "celu": F.celu,
    "hardswish": F.hardswish,
    "logsigmoid": F.logsigmoid,
    "expit": torch.special.expit,
    "addcmul": lambda x: torch.addcmul(x, x, x, value=0.3),
    "alpha": lambda x: x.add(x * 3, alpha=0.3),
    "lerp": lambda x: torch.lerp(x, x * 2, 0.3),
    "remainder": lambda x: x % 0.7,
    "arithmetic": lambda x: (x - 0.3) * x / 3.3 + x * x,
    "clamp": lambda x: F.relu(x.clamp(-0.5, 0.5)).square().abs(),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_elementwise_functions_have_torchs_values(dtype):
    torch.manual_seed(0)
    x, gradient = torch.randn(2, 5, 7, 9).to(dtype)
    close = {"rtol": 4 * torch.finfo(dtype).eps, "atol": 1e-3 if dtype.itemsize < 4 else 1e-5, "equal_nan": True}
    for name, function in ELEMENTWISE.items():
        for output, expected in zip(
            run(mode_for(), function, [x], gradient), run(nullcontext(), function, [x], gradient), strict=True
        ):
            torch.testing.assert_close(output, expected, msg=lambda text, name=name: f"{name}: {text}", **close)


def test_operands_are_broadcast_and_promoted_as_by_torch():
    row, scalar, whole = torch.rand(1, 5), torch.tensor(2.0), torch.rand(3, 5, dtype=torch.bfloat16)
    row.requires_grad_(), scalar.requires_grad_()
    gradients = []
    for mode in (mode_for(), nullcontext()):
        with mode:
            output = torch.pow(row, whole) + torch.pow(whole, scalar)
            assert torch.pow(whole, scalar.detach()).dtype is torch.pow(whole, scalar).dtype is torch.bfloat16
            empty = torch.exp(torch.empty(0, 3))
        assert output.dtype is torch.float32
        assert output.shape == (3, 5)
        assert empty.shape == (0, 3)
        gradients.append([output.detach(), *torch.autograd.grad(output.sum(), [row, scalar])])
    torch.testing.assert_close(gradients[0], gradients[1], rtol=2e-2, atol=1e-3)


def test_glu_is_a_gated_half():
    x = torch.randn(4, 6, 10)
    expected = F.glu(x, 1)
    with mode_for():
        torch.testing.assert_close(F.glu(x, 1), expected)


def test_a_function_in_place_changes_its_argument():
    x, view = torch.randn(2, 3, 64)[:, ::2]
    expected = torch.exp(view.clone())
    with mode_for():
        assert view.exp_() is view
        assert torch.ops.aten.sigmoid_.default(x).max() < 1
    torch.testing.assert_close(view, expected)


def test_the_gradient_of_a_broadcast_operand_is_rounded_once():
    row, gradient = torch.ones(3, dtype=torch.bfloat16, requires_grad=True), torch.rand(501, 3).bfloat16()
    with mode_for():
        row.expand(501, 3).backward(gradient)
    torch.testing.assert_close(row.grad, gradient.double().sum(0).bfloat16(), rtol=0, atol=0)


class Shapes(TorchDispatchMode):
    """Records the shapes of the operands of products."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default):
            self.seen.add((func, tuple((*one.shape, one.stride(), one.dtype) for one in args)))
        return func(*args, **(kwargs or {}))


def test_a_product_of_batches_is_one_call_of_one_shape_however_many_heads_there_are():
    left, right = torch.randn(2, 8, 5, 7), torch.randn(2, 8, 3, 7).transpose(2, 3)
    seen = []
    for heads in (8, 2, 1):
        with Shapes() as shapes:
            run(mode_for(), torch.matmul, [left[:, :heads], right[:, :heads]], torch.randn(2, heads, 5, 3))
        seen.append(shapes.seen)
    assert seen[0] == seen[1] == seen[2]
    assert len(seen[0]) == 3  # the product and its two gradients


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
    def function(query, key, value):
        with sharded_random():
            return F.scaled_dot_product_attention(
                query,
                key,
                value,
                None if mask is None else mask if mask.dtype is torch.bool else mask.to(query.dtype),
                dropout,
                is_causal=kind == "causal",
                scale=0.3,
                enable_gqa=groups != 8,
            )

    return function


class Calls(nn.Module):
    """Calls a function inside a module."""

    def forward(self, function, *inputs):
        return function(*inputs)


def run_in_module(rank, size, function, inputs, gradient, **options):
    model = Calls()
    mode = mode_for(rank, size, model, **options)
    return run(mode, lambda *values: model(function, *values), inputs, gradient)


def part_of(tensor, dim, rank, size):
    return tensor.chunk(size, dim)[rank]


CASES = [
    *itertools.product(DTYPES, MASKS, [8], [0.0]),
    *itertools.product(DTYPES, ["none", "heads", "causal"], [8], [0.4]),
    (torch.bfloat16, "heads", 8, 0.4),
]


@pytest.mark.parametrize(("dtype", "kind", "groups", "dropout"), [*CASES, (torch.float32, "causal", 4, 0.0)])
def test_attention_has_the_same_bits_however_heads_are_sharded(dtype, kind, groups, dropout):
    torch.manual_seed(0)
    inputs, gradient = attention_inputs(dtype, groups)
    mask = MASKS[kind]()
    whole = run_in_module(0, 1, attend(kind, mask, dropout, groups), inputs, gradient, sharded_features=True)
    for size in SIZES if groups == 8 else [2, 4]:
        for rank in range(size):
            own = part_of(mask, 1, rank, size) if kind == "heads" else mask
            parts = run_in_module(
                rank,
                size,
                attend(kind, own, dropout, groups),
                [part_of(one, 1, rank, size) for one in inputs],
                part_of(gradient, 1, rank, size),
                sharded_features=True,
            )
            assert all(map(same, parts, [part_of(one, 1, rank, size) for one in whole])), (size, rank)


@pytest.mark.parametrize("cast", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("kind", "groups"), [*[(kind, 8) for kind in MASKS], ("causal", 4), ("heads", 2)])
def test_attention_has_torchs_values(kind, groups, cast):
    torch.manual_seed(0)
    inputs, gradient = attention_inputs(torch.float32, groups)
    if kind == "heads" and cast is None:
        inputs = [one.double() for one in inputs]
        gradient = gradient.double()
    mask = MASKS[kind]()
    if kind == "heads":
        mask[0, 3, 2] = False  # a query without keys
    results = []
    with torch.autocast("cpu", cast, enabled=cast is not None):
        plain = run(nullcontext(), attend(kind, mask, 0.0, groups), inputs, gradient.to(cast))
        for dropout in (0.0, 1e-12):  # makes its own mask, which keeps everything
            results.append(run_in_module(0, 1, attend(kind, mask, dropout, groups), inputs, gradient.to(cast)))
    for result in results:
        torch.testing.assert_close(result, plain, rtol=3e-2 if cast else 1e-5, atol=3e-2 if cast else 1e-5)


def test_attention_of_one_head_without_its_dim():
    query, key, value = torch.randn(3, 2, 5, 6)
    with mode_for():
        output = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        with pytest.raises(ConfigError, match="expected 4 dims"):
            F.scaled_dot_product_attention(query[None, None], key[None, None], value[None, None])
    torch.testing.assert_close(output, F.scaled_dot_product_attention(query, key, value, is_causal=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_of_batches_have_the_same_bits_however_heads_are_sharded(dtype):
    torch.manual_seed(0)
    left, right = torch.randn(2, 8, 5, 7).to(dtype), torch.randn(2, 8, 3, 7).to(dtype).transpose(2, 3)
    gradient = torch.randn(2, 8, 5, 3).to(dtype)
    functions = {
        "@": lambda one, other: one @ other,
        "matmul": lambda one, other: torch.matmul(one, other=other),
        "bmm": lambda one, other: torch.bmm(one.flatten(0, 1), other.flatten(0, 1)).unflatten(0, one.shape[:2]),
        "baddbmm": lambda one, other: torch.baddbmm(
            other[:1, 0, :3].new_ones(1, 3), one.flatten(0, 1), other.flatten(0, 1), beta=0.5, alpha=2
        ).unflatten(0, one.shape[:2]),
    }
    for name, function in functions.items():
        whole = run(mode_for(), function, [left, right], gradient)
        torch.testing.assert_close(whole, run(nullcontext(), function, [left, right], gradient))
        for size in SIZES:
            own = [part_of(one, 1, size - 1, size) for one in (left, right, gradient)]
            parts = run(mode_for(size - 1, size, sharded_features=True), function, own[:2], own[2])
            assert all(map(same, parts, [part_of(one, 1, size - 1, size) for one in whole])), (name, size)


def test_a_broadcast_operand_of_a_product_gets_torchs_gradient():
    torch.manual_seed(0)
    left, right, gradient = torch.randn(2, 4, 5, 7), torch.randn(1, 7, 3), torch.randn(2, 4, 5, 3)
    result = run(mode_for(), torch.matmul, [left, right], gradient)
    torch.testing.assert_close(result, run(nullcontext(), torch.matmul, [left, right], gradient))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_of_repeated_heads_have_the_same_bits_however_they_are_sharded(dtype):
    torch.manual_seed(0)
    heads, scale = torch.randn(2, 8, 3, 5).to(dtype), torch.randn(8, 1, 1).to(dtype)
    gradient = torch.randn(2, 8, 7, 3, 5).to(dtype)

    def function(heads, scale):
        return (heads * scale)[:, :, None].expand(-1, -1, 7, -1, -1)

    whole = run(mode_for(sharded_features=True), function, [heads, scale], gradient)
    plain = run(nullcontext(), function, [heads.float(), scale.float()], gradient.float())
    torch.testing.assert_close(whole, [one.to(dtype) for one in plain], rtol=5e-2, atol=5e-2)
    for size in SIZES:
        for rank in range(size):
            own = [part_of(heads, 1, rank, size), part_of(scale, 0, rank, size)]
            parts = run(mode_for(rank, size, sharded_features=True), function, own, part_of(gradient, 1, rank, size))
            expected = [part_of(one, dim, rank, size) for one, dim in zip(whole, (1, 1, 0), strict=True)]
            assert all(map(same, parts, expected)), (size, rank)


def test_gradients_of_copied_heads_have_the_same_bits_however_they_are_sharded():
    torch.manual_seed(0)
    for dtype in DTYPES:
        heads, gradient = torch.randn(2, 8, 3, 5).to(dtype), torch.randn(2, 56, 3, 5).to(dtype)
        whole = run(mode_for(sharded_features=True), lambda one: one.repeat_interleave(7, 1), [heads], gradient)
        for size in SIZES:
            for rank in range(size):
                own = [part_of(heads, 1, rank, size)], part_of(gradient, 1, rank, size)
                parts = run(mode_for(rank, size, sharded_features=True), lambda one: one.repeat_interleave(7, 1), *own)
                assert all(map(same, parts, [part_of(one, 1, rank, size) for one in whole])), (dtype, size, rank)


def test_softmax_of_rows_has_the_same_bits_however_heads_are_sharded():
    torch.manual_seed(0)
    for dtype in DTYPES:
        scores, gradient = torch.randn(2, 2, 8, 5, 37).to(dtype)
        whole = run(mode_for(), lambda x: x.softmax(-1), [scores], gradient)
        for size in SIZES:
            own = [part_of(one, 1, 1, size) for one in (scores, gradient)]
            parts = run(mode_for(1, size, sharded_features=True), lambda x: F.softmax(x, dim=3), own[:1], own[1])
            assert all(map(same, parts, [part_of(one, 1, 1, size) for one in whole]))


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
}


@pytest.mark.parametrize("name", REFUSED_WHEN_SHARDED)
def test_what_depends_on_the_layout_is_refused_between_sharded_layers(name):
    x, function, model = torch.ones(2, 3, 4), REFUSED_WHEN_SHARDED[name], nn.Sequential(Calls())
    mode = mode_for(0, 2, model, sharded_features=True)
    with mode, pytest.raises(ConfigError, match=f"{name} in '0' got activations that are sharded over 2"):
        model[0](function, x)
    with mode, unwatched():
        expected = function(x)
    for whole in (mode_for(0, 1, sharded_features=True), mode_for(0, 2)):
        with whole:
            torch.testing.assert_close(function(x), expected)


def test_a_parameter_of_its_own_is_refused_between_sharded_layers():
    gamma, x = nn.Parameter(torch.ones(8)), torch.ones(2, 4, 8)
    for call in (lambda: x * gamma, lambda: torch.mul(gamma, x), lambda: x + gamma[None], lambda: F.silu(gamma)):
        with mode_for(0, 2, sharded_features=True), pytest.raises(ConfigError, match="its gradient would be a part"):
            call()
        for size, sharded in ((1, True), (2, False)):
            with mode_for(0, size, sharded_features=sharded):
                call()
    frozen = nn.Parameter(torch.ones(8), requires_grad=False)
    with mode_for(0, 2, sharded_features=True):
        assert torch.equal(x * frozen, x)


@pytest.mark.parametrize("shape", [(2, 4, 8), (2, 3, 4, 8)])
def test_a_trained_operand_broadcast_over_sharded_features_is_refused(shape):
    gate = torch.ones(2, *[1] * (len(shape) - 1), requires_grad=True)
    for size in (1, 2):
        refused = pytest.raises(ConfigError, match="its gradient would be a part") if size > 1 else nullcontext()
        with mode_for(0, size, sharded_features=True), refused:
            torch.ones(shape) * gate
        with mode_for(0, size, sharded_features=True):
            torch.ones(shape) * gate.detach()


def test_shapes_casts_and_exact_arithmetic_run_between_sharded_layers():
    x = torch.randn(2, 3, 4)
    with mode_for(1, 2, sharded_features=True):
        heads = x.view(2, 3, 2, -1).transpose(1, 2)
        rotated = torch.cat([-heads[..., 1:], heads[..., :1]], -1) * 2 + heads.float()
        masked = rotated.masked_fill(rotated > 0, 0.5).to(torch.bfloat16)
        output = (
            torch.where(masked.isnan(), masked, F.relu(masked))
            .flatten(2)
            .unflatten(-1, (-1, 2))
            .repeat_interleave(2, 0)
        )
        assert output.shape == (4, 2, 3, 2)
        assert x.mT.shape == (2, 4, 3)
        assert len([*output]) == 4
        F.linear(x, torch.ones(5, 4))
        torch.max(x, x)


RANDOM = {
    "rand": lambda x: torch.rand(3),
    "rand_like": lambda x: torch.rand_like(x),
    "randn": lambda x: torch.randn(3),
    "randint": lambda x: torch.randint(3, (3,)),
    "randperm": lambda x: torch.randperm(3),
    "bernoulli": lambda x: torch.bernoulli(x),
    "multinomial": lambda x: torch.multinomial(x, 1),
    "normal_": lambda x: nn.init.normal_(x),
    "uniform_": lambda x: x.uniform_(),
    "exponential_": lambda x: F.gumbel_softmax(x),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.1, training=True),
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x, 0.1, training=True),
    "rrelu": lambda x: nn.RReLU()(x),
    "multi_head_attention_forward": lambda x: nn.MultiheadAttention(8, 2)(x, x, x),
}


@pytest.mark.parametrize("name", RANDOM)
def test_random_numbers_of_torchs_generator_are_refused(name):
    model = nn.Sequential(Calls())
    mode = mode_for(model=model)
    x = torch.ones(3, 8)
    if name.startswith("multi_"):
        attention = nn.MultiheadAttention(8, 2)
        RANDOM[name] = lambda x: attention(x, x, x)
    with mode, pytest.raises(ConfigError, match=f"reproducible: {name} in '0' .*use F."):
        model[0](RANDOM[name], x)


def test_functions_that_are_random_in_training_only_run_in_evaluation():
    x = torch.randn(3, 8)
    with mode_for():
        assert torch.equal(F.alpha_dropout(x, 0.1), x)
        assert torch.equal(F.dropout(x, training=False), x)
        torch.testing.assert_close(F.rrelu(x), F.leaky_relu(x, (1 / 8 + 1 / 3) / 2))


def test_replaced_functions_are_called_instead():
    mode = ExactFunctions(place_of(), {}, {F.cross_entropy: lambda *args, **kwargs: (args, kwargs)})
    with mode:
        args, kwargs = F.cross_entropy(1, 2, reduction="sum")
    assert args == (1, 2)
    assert kwargs["reduction"] == "sum"


def test_arguments_that_cannot_be_exact_are_refused():
    x = torch.ones(3)
    with mode_for(), pytest.raises(ConfigError, match=r"exp in .* got out="):
        torch.exp(x, out=x)
    mask = torch.zeros(5, 5, requires_grad=True)
    with mode_for(0, 2, sharded_features=True), pytest.raises(ConfigError, match="requires gradients"):
        F.scaled_dot_product_attention(*torch.ones(3, 2, 2, 5, 4), attn_mask=mask)


def test_a_forward_that_is_checkpointed_runs_the_same_functions():
    torch.manual_seed(0)
    x, gradient = torch.randn(2, 3, 40)
    block = nn.Sequential(nn.SiLU(), nn.GELU())
    plain = run(mode_for(), block, [x], gradient)
    again = run(mode_for(), lambda x: checkpoint(block, x, use_reentrant=False), [x], gradient)
    assert all(map(same, plain, again))


@pytest.mark.parametrize("size", [1, 2])
def test_sharded_and_replicated_random_nest(monkeypatch, size):
    monkeypatch.setattr(rng, "TENSOR_PLACES", [(0, size, torch.device("cpu"))])
    in_sharded_random = rng.in_sharded_random
    seen = [in_sharded_random()]
    with sharded_random():
        seen.append(in_sharded_random())
        with replicated_random():
            seen.append(in_sharded_random())
        seen.append(in_sharded_random())
    assert [*seen, in_sharded_random()] == [False, True, False, True, False]


X = torch.arange(2.0 * 4 * 6).view(2, 4, 6)
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
    "heads": (None, lambda: X.unflatten(-1, (2, 3)).unbind(2)),
    "halves of heads": (None, lambda: X.view(2, 4, 2, 3)[..., :1]),
}


@pytest.mark.parametrize("name", DIVIDING)
def test_features_are_divided_into_the_parts_of_the_layer_only(name):
    parts, call = DIVIDING[name]
    for own in (1, 2, 3):
        allowed = parts in (None, own)
        refused = nullcontext() if allowed else pytest.raises(ConfigError, match="divides or reorders features")
        with mode_for(0, 2, sharded_features=True, parts=own), refused:
            call()
    with mode_for(0, 2):
        call()
    with mode_for(0, 1, sharded_features=True):
        call()
