"""Slices of layers: how they are cut, joined and added up. ``system/test_reproducible`` trains models of them."""

import contextlib
from functools import partial

import pytest
import torch
from beside_plain import randn, seeded
from pool import on_ranks
from reference import batches, small_gpt
from small_engines import assert_same_tensors, engine_of, train_step
from torch import nn

import paramp
from paramp.exact.sums_over_slices import add_bias, fan_out, join, split, sum_slices


@pytest.mark.parametrize("parts", [1, 3])
def test_join_undoes_split(parts):
    x = randn(2, 3, 24).requires_grad_()
    cut = split(x, 4, -1, parts)
    assert [tuple(one.shape) for one in cut] == [(2, 3, 6)] * 4
    assert all(one.is_contiguous() and one.data_ptr() % 64 == 0 for one in cut)
    whole = join(cut, -1, parts)
    assert torch.equal(whole, x)
    weights = randn(2, 3, 24, seed=3)
    (whole * weights).sum().backward()
    assert torch.equal(x.grad, weights)


def test_aliases_get_the_trees_sum():
    x = randn(5).requires_grad_()
    a, b, c, d = fan_out(x, 4, None)
    (1e8 * a + 1.0 * b - 1e8 * c + 1.0 * d).sum().backward()
    expected = (torch.tensor(1e8) + 1.0) + (torch.tensor(-1e8) + 1.0)
    assert torch.equal(x.grad, expected.expand(5))


def test_the_gradient_of_an_fp16_input_is_added_in_fp32_and_rounded_once():
    x = torch.ones(5, dtype=torch.float16).requires_grad_()
    factors = (1.0, 2.0**-11, 2.0**-11, 0.0)
    sum(alias * factor for alias, factor in zip(fan_out(x, 4, None), factors, strict=True)).sum().backward()
    assert x.grad.dtype is torch.float16
    assert x.grad.tolist() == [1 + 2.0**-10] * 5  # in fp16 each addition would be lost


def test_terms_are_added_in_fp32_and_rounded_once():
    terms = [torch.tensor([1.0]).half(), torch.tensor([2.0**-11]).half(), torch.tensor([2.0**-11]).half()]
    total = sum_slices(terms, None)
    assert total.dtype is torch.float32
    assert float(total.half()) == 1 + 2.0**-10  # in fp16 each addition would be lost


def test_chunks_and_calls_are_added_in_fp32_and_rounded_once_a_call():
    """1 + (2**-8 + 2**-16): in bfloat16 the chunks would be 2**-8, and the sum with the earlier call 1."""
    config = {"precision": "bf16-naive", "reproducible": True, "gradient_accumulation": 2}
    with paramp.launch_from_torch(config):
        engine = engine_of(nn.Linear(1, 1, bias=False), lambda output, target: 4 * (output * target).sum())
        for given in ([[1.0], [0.0]], [[2.0**-8], [2.0**-16]]):
            result = train_step(engine, torch.ones(2, 1), torch.tensor(given))
        assert result.grad_norm == 1 + 2.0**-7


def test_a_bias_gets_the_sum_over_slices_of_the_sequence():
    total, bias = randn(2, 8, 3).requires_grad_(), randn(3, seed=3).requires_grad_()
    weights = randn(2, 8, 3, seed=2)
    (add_bias(total, bias, 4, None) * weights).sum().backward()
    a, b, c, d = (weights[:, start : start + 2].reshape(-1, 3).sum(0) for start in (0, 2, 4, 6))
    assert torch.equal(bias.grad, (a + b) + (c + d))
    assert torch.equal(total.grad, weights)


@on_ranks(2)
def test_norms_have_the_same_bits_whether_ranks_have_slices_of_the_sequence_or_all_of_it(world):
    tensor, found = {"tensor": 2}, []
    for parallel in (tensor, tensor | {"sequence_parallel": True}):
        with paramp.launch_from_torch({"reproducible": {"chunk": 1, "slices": 4}, "parallel": parallel}):
            model = small_gpt(num_layers=1)
            # Of so large a step the weights that it begins with are below the last bit.
            engine = engine_of(model, model.loss, partial(torch.optim.SGD, lr=2.0**40))
            assert train_step(engine, *next(batches(1, 2))).stepped
            state = engine.full_state_dict()
            found.append({name: value for name, value in state.items() if "norm" in name})
    assert len(found[0]) > 2
    assert_same_tensors(*found)


@on_ranks(2)
def test_a_sequence_that_slices_do_not_divide_is_refused_where_ranks_have_parts_of_it(world):
    """Elsewhere a norm is computed whole."""
    for tensor in ({"sequence_parallel": True}, {}):
        refused = pytest.raises(paramp.ConfigError, match=r"sequence of 14: expected a multiple of .* 4")
        with paramp.launch_from_torch({"reproducible": {"slices": 4}, "parallel": {"tensor": 2} | tensor}):
            model = small_gpt(num_layers=1)
            engine = engine_of(model, model.loss)
            with refused if tensor else contextlib.nullcontext():
                assert train_step(engine, *next(batches(1, 2, length=14))).stepped


def test_the_loss_is_added_up_in_fp64():
    with paramp.launch_from_torch({"reproducible": True}):
        engine = engine_of(nn.Linear(1, 1), lambda output, target: (0 * output + target).mean())
        given = torch.tensor([[2.0**25], [1.0], [1.0], [0.0]])
        assert train_step(engine, torch.ones(4, 1), given).loss == (2.0**25 + 2) / 4  # in fp32 each 1 would be lost


@pytest.mark.parametrize(
    ("precision", "terms", "expected"),
    [("32-true", [1e8, 1.0, -1e8, 1.0], 1.0), ("bf16-naive", [256.0, 1.0, 1.0, 0.0], 256.0)],
)
def test_the_gradient_of_an_embedding_adds_the_tokens_of_a_chunk_in_their_order(precision, terms, expected):
    """Not in a tree, which would give 0; and in the dtype of the weight: in fp32 1 and 1 would not be lost."""
    terms = torch.tensor(terms)
    with paramp.launch_from_torch({"reproducible": True, "precision": precision}):
        table = nn.Embedding(2, 1)
        nn.init.zeros_(table.weight)
        engine = engine_of(
            table, lambda output, target: (output[..., 0] * target).sum(), partial(torch.optim.SGD, lr=1.0)
        )
        assert train_step(engine, torch.zeros(1, 4, dtype=torch.int64), terms[None]).stepped
        assert engine.full_state_dict()["weight"].tolist() == [[-expected], [0.0]]


class Two(nn.Module):
    """Two layers, of which a batch may leave out the first."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, both):
        return self.second(self.first(x) if both else x)


@pytest.mark.parametrize("order", [(True, False), (False, True)])
def test_a_window_has_the_gradients_of_the_call_that_gave_any(order):
    x, y, plain = randn(4, 4), randn(4, 4, seed=1), seeded(Two)
    for both in order:
        (nn.functional.mse_loss(plain(x, both), y) / 2).backward()
    with paramp.launch_from_torch({"reproducible": True, "gradient_accumulation": 2, "clip_grad_norm": None}):
        engine = engine_of(seeded(Two), optimizer=partial(torch.optim.SGD, lr=1.0))
        for both in order:
            engine.forward_backward((x, both), y)
            engine.step()
        found = engine.full_state_dict()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(parameter.detach() - found[name], parameter.grad, rtol=1e-4, atol=1e-6, msg=name)
