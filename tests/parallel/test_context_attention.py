"""Attention over ranks that have parts of a sequence, against plain attention on one process."""

import functools
import itertools
import math
import statistics

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from families import rarely
from plain_attention import CASES, LENGTH, distance, documents_of, expected, inputs_of, results
from pool import on_ranks, run_on_ranks
from torch.utils._python_dispatch import TorchDispatchMode

import paramp
from paramp.parallel.context_axis.context_attention import METHODS, attention, default_method
from paramp.parallel.context_axis.tokens_of_ranks import CUTS, SequenceLayout
from paramp.parallel.context_axis.visible_keys import Documents

ONE = SequenceLayout(None, 0, 1, LENGTH)
HALVES = (torch.bfloat16, torch.float16)


def group_of(size):
    """Neighbours in the world."""
    world, rank = dist.get_world_size(), dist.get_rank()
    if size == world:
        return dist.group.WORLD
    groups = [dist.new_group(list(range(start, start + size))) for start in range(0, world, size)]
    return groups[rank // size]


def part(layout, name, x):
    """This rank's part of an input or a result."""
    return x if name == "sinks" else layout.shard(x, 2, layout.rank)


def computed(case, inputs, layout, method, dtype=torch.float64):
    """The results of the rank's part of the sequence; those of sinks summed over the ranks."""
    documents = documents_of(case)
    documents = None if documents is None else layout.shard(documents, 1, layout.rank)
    options = {"layout": layout, "method": method, "documents": documents, **case.arguments()}
    local = {name: part(layout, name, x).to(dtype) for name, x in inputs.items()}
    found = results(case, local, lambda q, k, v, sinks: attention(q, k, v, sinks=sinks, **options))
    if case.sinks and layout.size > 1:
        dist.all_reduce(found["sinks"], group=layout.group)
    return found


def compared(case, layout, method, dtype=torch.float64, seed=0):
    """By name, what was computed in ``dtype``, and what is right for the inputs as rounded to it."""
    found = computed(case, inputs_of(case, seed), layout, method, dtype)
    right = expected(case, seed, dtype)
    return {name: (found[name].double(), part(layout, name, x)) for name, x in right.items()}


def distances(pairs):
    largest = max(right.norm().item() for _, right in pairs.values())
    return {name: distance(*pair, largest) for name, pair in pairs.items()}


@pytest.mark.parametrize("name", CASES)
def test_one_process_matches_plain_attention(name):
    found = distances(compared(CASES[name], ONE, "ring"))
    assert max(found.values()) <= 1e-12, found


FEW = ("bidirectional", "window", "packed and padded", "GQA, padded", "everything")


@pytest.mark.parametrize(("size", "names"), rarely([(4, FEW), *((size, (*CASES,)) for size in (2, 4, 8))], (4, FEW)))
def test_every_method_matches_plain_attention_in_fp64(size, names):
    run_on_ranks(max(4, size), __name__, "every_method_in_fp64", {"size": size, "names": names})


def every_method_in_fp64(world, size, names):
    group = group_of(size)
    for name, cut in [*itertools.product(names, CUTS[:1]), ("packed and padded", CUTS[1])]:
        case, layout = CASES[name], SequenceLayout.over(group, LENGTH, cut)
        for method in METHODS if case.heads % size == 0 else METHODS[:2]:
            found = distances(compared(case, layout, method))
            assert max(found.values()) <= 1e-12, (size, cut, name, method, found)


@on_ranks(4)
def test_fp32_is_within_its_rounding(world):
    """Outputs by the tolerances of Transformer Engine's tests of context parallelism."""
    layout = SequenceLayout.over(dist.group.WORLD, LENGTH)
    for name in ("causal", "GQA, padded", "everything"):
        for method in METHODS:
            pairs = compared(CASES[name], layout, method, torch.float32)
            torch.testing.assert_close(*pairs["out"], rtol=1.3e-6, atol=1e-5)
            found = distances(pairs)
            assert max(found.values()) <= 1e-5, (name, method, found)


IN_HALVES = [*itertools.product((4, 8), HALVES, ("GQA", "packed and padded"))]


@pytest.mark.parametrize(("ranks", "dtype", "name"), rarely(IN_HALVES, IN_HALVES[0]))
def test_halves_are_as_right_over_ranks_as_on_one(ranks, dtype, name):
    """The median of 9 seeds, of each gradient: what is summed over the ring has not been rounded in between."""
    run_on_ranks(ranks, __name__, "errors_of_halves", {"dtype": dtype, "name": name})


def errors_of_halves(world, dtype, name):
    layout, case = SequenceLayout.over(dist.group.WORLD, LENGTH), CASES[name]
    alone = [compared(case, ONE, "ring", dtype, seed) for seed in range(9)]
    for method in METHODS if case.heads % world.size == 0 else METHODS[:2]:
        over_ranks = [compared(case, layout, method, dtype, seed) for seed in range(9)]
        for gradient in "qkv":
            ratios = []
            for pairs, others in zip(over_ranks, alone, strict=True):
                square = (pairs[gradient][0] - pairs[gradient][1]).square().sum()
                dist.all_reduce(square)
                ratios.append(square.sqrt().item() / (others[gradient][0] - others[gradient][1]).norm().item())
            median = statistics.median(ratios)
            assert median <= 1.1, (method, gradient, median)


class Sent(TorchDispatchMode):
    """``bytes``: what this rank has sent; ``order``: of what it has started to send, and computed."""

    def __init__(self):
        super().__init__()
        self.bytes, self.order = 0, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name.removeprefix("c10d::").removeprefix("aten::_scaled_dot_product_")
        size = dist.get_world_size()
        if name == "send":
            self.bytes += sum(x.nbytes for x in args[0])
        elif name == "_allgather_base_":
            self.bytes += args[1].nbytes * (size - 1)
        elif name in ("_reduce_scatter_base_", "alltoall_base_"):
            self.bytes += args[1].nbytes * (size - 1) // size
        if name == "send" or name.startswith("flash"):
            self.order.append(name.partition("_")[0])
        return function(*args, **(kwargs or {}))


@on_ranks(4)
def test_a_rank_sends_what_theory_says_and_computes_meanwhile(world):
    layout = SequenceLayout.over(dist.group.WORLD, LENGTH)
    for dtype, name in itertools.product((torch.float64, torch.bfloat16), ("bidirectional", "MLA", "GQA")):
        case = CASES[name]
        inputs = {key: part(layout, key, x).to(dtype) for key, x in inputs_of(case).items()}
        q, k, v = (inputs[key].requires_grad_() for key in "qkv")
        keys = k.nbytes + v.nbytes
        wide = (k.numel() + v.numel()) * max(4, dtype.itemsize)
        queries, others = q.nbytes + inputs["gradient"].nbytes, world.size - 1
        for method in METHODS:
            with Sent() as forward:
                out = attention(q, k, v, layout=layout, method=method, causal=case.causal)
            with Sent() as backward:
                out.backward(inputs["gradient"])
            expected = [others * keys, others * (keys + wide)]
            if method == "ulysses":
                repeats = world.size // math.gcd(case.key_heads, world.size)
                sums = keys if repeats == 1 else wide * repeats
                expected = [(queries + keys * repeats) * others // world.size, (queries + sums) * others // world.size]
            assert [forward.bytes, backward.bytes] == expected, (dtype, name, method)
            if (name, method) == ("bidirectional", "ring"):
                assert forward.order == ["send", "flash"] * others + ["flash"]
                # of keys before the computation, of the gradients of the step's keys after it
                assert backward.order == ["send", "flash", *["send", "flash", "send"] * (others - 1), "flash", "send"]


@on_ranks(4)
def test_a_forward_that_is_computed_again_in_the_backward(world):
    layout = SequenceLayout.over(dist.group.WORLD, LENGTH)
    case = CASES["sinks, padded"]
    documents = Documents(layout.shard(documents_of(case), 1, world.rank), layout)
    inputs = {name: part(layout, name, x) for name, x in inputs_of(case).items()}
    for method in METHODS:
        options = {"layout": layout, "method": method, "documents": documents, **case.arguments()}
        call = lambda q, k, v, sinks: attention(q, k, v, sinks=sinks, **options)  # noqa: B023, E731
        again = functools.partial(torch.utils.checkpoint.checkpoint, call, use_reentrant=False)
        right, found = results(case, inputs, call), results(case, inputs, again)
        assert all(torch.equal(found[name], x) for name, x in right.items())
        assert (
            torch.count_nonzero(found["out"][documents.of(layout.segments(world.rank))[:, None].expand(-1, 4, -1) == 0])
            == 0
        )


def test_autocast_casts_as_for_torchs_attention():
    q, k, v = (inputs_of(CASES["causal"])[name].float() for name in "qkv")
    with torch.autocast("cpu", torch.bfloat16):
        out = attention(q, k, v, layout=ONE, method="ring", causal=True)
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert out.dtype is expected.dtype is torch.bfloat16
    torch.testing.assert_close(out, expected, rtol=0.02, atol=0.02)


def test_the_default_method_depends_on_shapes():
    layout = SequenceLayout(dist.GroupMember.NON_GROUP_MEMBER, 0, 4, 64)
    assert default_method(8, 2, layout) == "all-gather"
    assert default_method(8, 8, layout) == "ulysses"
    assert default_method(6, 6, layout) == "ring"
    assert default_method(12, 6, layout) == "ring"


def test_what_does_not_fit_is_an_error_that_says_so():
    layout = SequenceLayout(dist.GroupMember.NON_GROUP_MEMBER, 1, 4, 64)
    with pytest.raises(paramp.ConfigError, match="got 60 tokens over 4 ranks, expected a multiple of 8; pad it"):
        SequenceLayout(dist.GroupMember.NON_GROUP_MEMBER, 1, 4, 60)
    with pytest.raises(paramp.ConfigError, match="got 'zigzag', expected one of head-to-tail, contiguous"):
        SequenceLayout(dist.GroupMember.NON_GROUP_MEMBER, 1, 4, 64, "zigzag")
    with pytest.raises(paramp.ConfigError, match="got 4 of 4 in"):
        SequenceLayout(dist.GroupMember.NON_GROUP_MEMBER, 4, 4, 64)

    def refused(message, *shapes, dtype=torch.float32, **options):
        tensors = [torch.zeros(shape, dtype=dtype) for shape in shapes or [(1, 6, 16, 4)] * 3]
        with pytest.raises(paramp.ConfigError, match=message):
            attention(*tensors, **{"layout": layout, "method": "ring", "causal": True, **options})

    refused("expected 16 tokens, the part of a rank of 4 of 64 tokens", *[(1, 6, 64, 4)] * 3)
    refused(r"expected \(B, Hq, T, D\)", (1, 6, 16, 4), (1, 6, 16, 3), (1, 6, 16, 4))
    refused("for each key head as many query heads", (1, 6, 16, 4), *[(1, 4, 16, 4)] * 2)
    refused("got queries, keys and values of torch.int64", dtype=torch.int64)
    refused(r"got 'rings', expected one of all-gather, ring, ulysses \(did you mean 'ring'\?\)", method="rings")
    refused("ulysses: got 6 heads and 6 key heads over 4 ranks, expected a multiple of 4", method="ulysses")
    refused("window: got 0", window=0)
    refused("softcap: got -1", softcap=-1)
    refused("dropout: got 1.0", dropout=1.0)
    refused("dropout_seed: got None", dropout=0.1)
    refused("sinks: got the shape", sinks=torch.zeros(5))
    refused("documents: got torch.float32", documents=torch.zeros(1, 16))
