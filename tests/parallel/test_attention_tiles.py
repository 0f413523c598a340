"""What attention over ranks is made of: tiles of queries and keys, dropout by position, and CUDA's kernels."""

import itertools
import math

import pytest
import torch
import torch.distributed as dist
from parallel.test_context_attention import HALVES, ONE, compared, distances
from plain_attention import CASES, LENGTH, documents_of

from paramp.parallel.context_axis import attention_kernels, merged_attention
from paramp.parallel.context_axis.attention_kernels import CudaKernel, kept
from paramp.parallel.context_axis.tokens_of_ranks import CUTS, SequenceLayout
from paramp.parallel.context_axis.visible_keys import Documents, Sees, VisibleKeys

RULES = [
    *(VisibleKeys(causal, window, None) for causal in (True, False) for window in (None, 1, 5, 13, 100)),
    *(VisibleKeys(causal, window, True) for causal in (True, False) for window in (None, 5)),
]


@pytest.mark.parametrize("kind", ["packed and padded", "hidden"])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_tiles_have_each_visible_pair_once(rule, kind):
    documents = None
    if rule.documents:
        documents = Documents(documents_of(CASES[kind]), ONE)
        rule = VisibleKeys(rule.causal, rule.window, documents)
    for cut, size, join in itertools.product(CUTS, (2, 4), (True, False)):
        layout = SequenceLayout(dist.GroupMember.NON_GROUP_MEMBER, 0, size, LENGTH, cut)
        for queries, keys in itertools.product([layout.segments(rank) for rank in range(size)], repeat=2):
            at_query, at_key = (torch.cat([torch.arange(*one) for one in segments]) for segments in (queries, keys))
            right = by_definition(rule, at_query, at_key)
            found = torch.zeros_like(right, dtype=torch.int)
            for tile in rule.tiles(queries, keys, 5, join):
                rows, columns = at_query[tile.queries], at_key[tile.keys]
                assert join or max(len(rows), len(columns)) <= 5
                mask = torch.ones(1, 1, len(rows), len(columns), dtype=torch.bool)
                if tile.sees is Sees.CAUSAL:
                    mask = mask.tril()
                if tile.sees is Sees.MASKED:
                    assert max(len(rows), len(columns)) <= 5
                    mask = rule.mask(tile, torch.device("cpu"))
                    assert mask.any()
                    assert not mask.all()
                found[:, tile.queries, tile.keys] += mask[:, 0]
            if documents is not None:  # what padding sees is discarded
                found *= (documents.of(queries) != 0).unsqueeze(2)
            assert torch.equal(found, right.int())


def by_definition(rule, query, key):
    distance = query.view(-1, 1) - key
    visible = distance >= 0 if rule.causal else distance == distance
    if rule.window:
        visible = visible & (distance.abs() < rule.window)
    if rule.documents is None:
        return visible.unsqueeze(0)
    theirs, others = rule.documents.whole[:, query], rule.documents.whole[:, key]
    return visible & (theirs.abs().unsqueeze(2) == others.unsqueeze(1)) & (others > 0).unsqueeze(1)


def test_a_causal_mask_gives_each_rank_the_same_work_and_needs_no_tensor():
    rule, work = VisibleKeys(True, None, None), []
    for rank in range(4):
        layout = SequenceLayout(dist.GroupMember.NON_GROUP_MEMBER, rank, 4, 64)
        steps = [rule.tiles(layout.segments(rank), layout.segments(other), 4, True) for other in range(4)]
        assert [len(tiles) for tiles in steps] == [1] * 4  # one call a step
        assert {tile.sees for tiles in steps for tile in tiles} == {Sees.CAUSAL, Sees.ALL}
        work.append(sum(pairs(tile) for tiles in steps for tile in tiles))
        (everything,) = [rule.tiles(layout.segments(rank), ((0, 64),), 4, True)]
        assert sum(map(pairs, everything)) == work[-1]
        own = layout.segments(rank)
        wide = VisibleKeys(True, own[-1][1] - own[0][0], None)  # its window hides nothing of these tokens
        assert wide.tiles(own, own, 4, True) == steps[rank]
    assert sum(work) == 64 * 65 / 2
    assert max(work) - min(work) <= 0


def pairs(tile):
    count = tile.queries.stop - tile.queries.start
    return count * (count + 1) // 2 if tile.sees is Sees.CAUSAL else count * (tile.keys.stop - tile.keys.start)


def test_dropout_is_a_hash_of_the_position():
    """Against the same function of Python's integers; elements fall independently, with their probability."""
    seed, places = 0x9_8765_4321, ((0, 3), (7, 11), (0, 5, 1000), (0, 2, 99999))
    found = kept(seed, 0.25, *map(torch.tensor, places))

    def mixed(x):
        x = (x ^ x >> 16) * 0x85EBCA6B & 0xFFFFFFFF
        x = (x ^ x >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
        return x ^ x >> 16

    for index in itertools.product(*map(range, (2, 2, 3, 3))):
        *row, key = (place[i] for place, i in zip(places, index, strict=True))
        state = 0x9E3779B9
        for word in (seed & 0xFFFFFFFF, seed >> 32, *row):
            state = mixed(state ^ word)
        drawn = mixed(mixed(state ^ key) ^ mixed(state + 0x9E3779B9 & 0xFFFFFFFF))
        drawn -= 2**32 if drawn >= 2**31 else 0
        assert found[index] == (drawn >= 2**30 - 2**31)
    many = kept(5, 0.1, torch.arange(2), torch.arange(4), torch.arange(256), torch.arange(256)).double()
    deviation = math.sqrt(0.1 * 0.9)
    assert abs(many.mean() - 0.9) < 5 * deviation / math.sqrt(many.numel())
    rows = (many.flatten(0, 2) - 0.9) / deviation
    correlations = (rows @ rows.T / 256).fill_diagonal_(0)
    assert correlations.abs().max() < 7 / math.sqrt(256)
    assert (rows.T @ rows / len(rows)).fill_diagonal_(0).abs().max() < 6 / math.sqrt(len(rows))
    other = kept(6, 0.1, torch.arange(2), torch.arange(4), torch.arange(256), torch.arange(256)).double()
    assert abs((other * many).mean() - 0.81) < 5 * math.sqrt(0.81 * 0.19 / many.numel())


class LikeCuda:
    """CUDA's operators with the results of the CPU's, what they want, and their rounding to halves."""

    @staticmethod
    def forward(q, k, v, bias=None, causal=False, scale=None):
        q, k, v = (x.float() for x in (q, k, v))
        value_features = v.shape[-1]
        features = max(q.shape[-1], value_features)
        q, k, v = (torch.nn.functional.pad(x, (0, features - x.shape[-1])) for x in (q, k, v))
        bias = None if bias is None else bias.float()
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = flash(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)
        return out[..., :value_features], lse

    @staticmethod
    def backward(gradient, q, k, v, bias, out, lse, causal, scale):
        bias = None if bias is None else bias.float()
        wide = [x.float() for x in (gradient, q, k, v, out)]
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        return [x.to(q.dtype) for x in flash(*wide, lse, 0.0, causal, attn_mask=bias, scale=scale)]

    def _scaled_dot_product_flash_attention(self, q, k, v, dropout, causal, debug, scale):
        assert q.dtype in HALVES
        assert (dropout, debug) == (0, False)
        assert q.shape[-1] % 8 == 0
        out, lse = self.forward(q, k, v, None, causal, scale)
        return out.to(q.dtype), lse, None

    def _scaled_dot_product_flash_attention_backward(self, *args, scale):
        gradient, q, k, v, out, lse, _, _, longest_q, longest_k, dropout, causal, _, _ = args
        assert (longest_q, longest_k, dropout, lse.is_contiguous()) == (q.shape[2], k.shape[2], 0, True)
        return self.backward(gradient, q, k, v, None, out, lse, causal, scale)

    def _scaled_dot_product_efficient_attention(self, q, k, v, bias, with_lse, dropout, causal, scale):
        self.check(q, k, bias)
        assert (with_lse, dropout) == (True, 0)
        out, lse = self.forward(q, k, v, bias, causal, scale)
        return out.to(q.dtype), torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32), value=math.inf), None, None

    def _scaled_dot_product_efficient_attention_backward(self, *args, scale):
        gradient, q, k, v, bias, out, lse, _, _, dropout, _, causal = args
        self.check(q, k, bias)
        assert dropout == 0
        assert lse.shape[-1] % 32 == 0
        return *self.backward(gradient, q, k, v, bias, out, lse[..., : q.shape[2]].contiguous(), causal, scale), None

    @staticmethod
    def check(q, k, bias):
        assert q.shape[1] == k.shape[1]
        if bias is not None:
            assert (bias.dtype, bias.shape) == (q.dtype, (*q.shape[:3], k.shape[2]))
            assert bias.stride(-2) % 16 == 0


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_cudas_operators_get_what_they_want(monkeypatch, dtype):
    """As far as a CPU can show: the arguments, and what is made of the results."""
    monkeypatch.setattr(attention_kernels, "_aten", LikeCuda())
    monkeypatch.setattr(merged_attention, "kernel_for", lambda *_: CudaKernel())
    limit = 1e-5 if dtype is torch.float32 else 0.02
    for name, case in CASES.items():
        if not {"softcap", "dropout"} & dict(case.options).keys() and name != "a window of one":
            found = distances(compared(case, ONE, "ring", dtype))
            assert max(found.values()) <= limit, (name, found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cudas_operators_take_the_arguments(dtype):
    """On meta tensors: torch's own signatures and shapes."""
    rule = VisibleKeys(True, 3, None)
    scores = attention_kernels.Scores(visible=rule, scale=0.5)
    q = torch.empty(2, 4, 16, 8, dtype=dtype, device="meta")
    k = v = q[:, :2]
    for tile in rule.tiles(((0, 8),), ((0, 8),), 16, True) + VisibleKeys(True, None, None).tiles(
        ((0, 16),), ((0, 16),), 16, True
    ):
        parts = q[:, :, tile.queries], k[:, :, tile.keys], v[:, :, tile.keys]
        out, lse = CudaKernel().forward(*parts, tile, scores)
        assert (out.shape, lse.shape) == (parts[0].shape, parts[0].shape[:3])
        found = CudaKernel().backward(out, parts, out, lse, tile, scores)
        assert [x.shape for x in found] == [x.shape for x in parts]
