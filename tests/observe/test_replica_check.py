"""One bit in one copy: found, named, and repaired; and nothing is found where nothing is wrong."""

from functools import partial
from unittest import mock

import pytest
import torch
from counting import Collectives
from families import rarely
from pool import on_ranks
from reference import batches, local, small_gpt
from small_engines import engine_of, own_part

import paramp
from paramp.base import loop_block_sizes
from paramp.observe import replica_check
from paramp.observe.bit_hash import hash_bits

HSDP = {"data": {"replicate": 2, "shard": 2}}


def launch(parallel, precision="32-true", **config):
    return paramp.launch_from_torch({"parallel": parallel, "precision": precision, "clip_grad_norm": 1.0, **config})


def build(frozen=""):
    """A small GPT after one step."""
    model = small_gpt(num_layers=2)
    if frozen:
        model.get_parameter(frozen).requires_grad_(False)
    engine = engine_of(model, model.loss, partial(torch.optim.AdamW, lr=1e-2))
    train(engine, 1)
    return engine


def train(engine, steps, overflow_at=None):
    for step, batch in enumerate(batches(steps)):
        engine.forward_backward(*own_part(engine.context, *batch))
        if step == overflow_at and engine.context.rank == 0:
            local(next(engine.module.parameters()).grad).view(-1)[0] = float("inf")
        engine.step()


def flip(tensor, bit=0):
    """Turn one bit of the last element."""
    words = tensor.detach().view(-1).view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize])
    words[-1] ^= 1 << bit


def weight_of(engine, ending):
    """None if this rank's stage does not have it."""
    found = (local(value).detach() for name, value in engine.named_parameters() if name.endswith(ending))
    return next(found, None)


# ------------------------------------------------------------------------------------------------------- the hash


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int16])
def test_a_hash_changes_with_every_single_bit(dtype):
    tensor = torch.arange(149 if dtype is torch.float64 else 299).to(dtype)
    assert tensor.nbytes > 5 * loop_block_sizes.HASHED_WORDS["cpu"]  # bytes, of which a word has four
    expected = hash_bits(tensor)
    assert expected == hash_bits(tensor.clone())
    octets = tensor.view(torch.uint8)
    seen = set()
    for octet in range(octets.numel()):
        for bit in range(8):
            octets[octet] ^= 1 << bit
            seen.add(int(hash_bits(tensor)))
            octets[octet] ^= 1 << bit
    assert len(seen) == octets.numel() * 8
    assert int(expected) not in seen


def test_tensors_of_any_strides_are_hashed():
    matrix = torch.randn(3, 6)
    column = matrix[:, -1]  # such as the labels in a table
    complex_numbers = torch.view_as_complex(matrix.view(3, 3, 2)).conj()
    for view in (matrix.T, column, matrix[:, ::2], column[:1].expand(4), complex_numbers):
        assert hash_bits(view) == hash_bits(view.resolve_conj().clone(memory_format=torch.contiguous_format))
    assert hash_bits(matrix[:0]) == 0
    assert hash_bits(matrix.to("meta")).device.type == "meta"  # as on devices that have no size of their own


# ------------------------------------------------------------------------------------------------------ one bit


def stepped_here(engine, ending):
    return [one for one in engine._weights.params if one.stepped is not None and one.name.endswith(ending)]


def master_of(engine, ending):
    """The part of it, or of its remainder, that this rank steps, if any."""
    return next((param.buffer.masters.state[0][param.own_range] for param in stepped_here(engine, ending)), None)


def state_of(engine, ending):
    return next((engine.optimizer.state[one.stepped]["exp_avg_sq"] for one in stepped_here(engine, ending)), None)


CHANGED = {
    "weight": weight_of,
    "master": master_of,
    "optimizer state": state_of,
    "loss scale": lambda engine, _: engine.scaler.tensors()[engine.context.rank % 3],  # or one of its counters
}
NAIVE, REMAINDER = {"precision": "16-naive"}, {"precision": "16-naive", "masters": "remainder"}
TP2, PP2_TP2, FSDP2_TP2 = {"tensor": 2}, {"tensor": 2, "pipeline": 2}, {"data": {"shard": 2}, "tensor": 2}
MLP = "mlp.up.weight"
CHANGES = [  # parallel, configuration, what is changed, of which parameter, on which rank; which differs, from which
    (TP2, {}, "weight", "norm.weight", 3, (3,), (0, 1, 2)),
    (PP2_TP2, {}, "weight", "head.weight", 3, (3,), (1,)),  # tied to the embedding of rank 1's stage
    (PP2_TP2, {}, "optimizer state", "head.weight", 3, (3,), (1,)),
    (PP2_TP2, NAIVE, "master", "head.weight", 3, (3,), (1,)),
    ({"data": 2}, {"precision": "64-true"}, "weight", MLP, 0, (1,), (0,)),  # of two the lower one counts
    ({"data": 2}, {"precision": "bf16-naive"}, "weight", "norm.weight", 0, (1,), (0,)),
    ({"data": 2}, {}, "weight", "blocks.1.norm1.bias", 1, (1,), (0,)),  # which is frozen
    (TP2, NAIVE, "master", "norm.weight", 3, (3,), (0, 1, 2)),
    (TP2, REMAINDER, "master", "norm.weight", 3, (3,), (0, 1, 2)),
    (TP2 | {"zero": 1}, NAIVE, "master", "norm.weight", 3, (3,), (2,)),  # each data rank has a part of its own
    (TP2 | {"zero": 1}, REMAINDER, "master", "norm.weight", 3, (3,), (2,)),
    (TP2 | {"zero": 1}, REMAINDER, "optimizer state", "norm.weight", 3, (3,), (2,)),
    ({"pipeline": 2}, {"precision": "16-mixed"}, "optimizer state", "norm.weight", 2, (3,), (2,)),
    ({"pipeline": 2}, {"precision": "16-mixed"}, "loss scale", "", 1, (1,), (0, 2, 3)),
    (FSDP2_TP2, {}, "weight", "norm1.weight", 2, (3,), (2,)),
    (FSDP2_TP2, {}, "weight", MLP, 2, None, None),  # of which there is one copy
    ({"context": 2, "data": 2}, {}, "weight", "norm.weight", 2, (2,), (0, 1, 3)),
    (HSDP, NAIVE, "loss scale", "", 2, (2,), (0, 1, 3)),
    (HSDP, NAIVE, "loss scale", "", 0, (0,), (1, 2, 3)),
]
for mode in ("32-true", "16-naive", "bf16-true"):  # in 16-naive the shards are the masters
    for victim, same in ((3, 1), (1, 3), (2, 0)):
        pair = (max(victim, same),), (min(victim, same),)
        CHANGES += [(HSDP, {"precision": mode}, what, MLP, victim, *pair) for what in ("weight", "optimizer state")]
CASES = [(parallel, config) for parallel, config, *_ in CHANGES]
CASES = [case for index, case in enumerate(CASES) if case not in CASES[:index]]
BY_DEFAULT = [(TP2, {}), (PP2_TP2, {}), (TP2 | {"zero": 1}, REMAINDER), (FSDP2_TP2, {}), (HSDP, NAIVE)]
BY_DEFAULT += [
    ({"data": 2}, {}),
    ({"data": 2}, {"precision": "bf16-naive"}),
    ({"pipeline": 2}, {"precision": "16-mixed"}),
]


@pytest.mark.real_sizes  # a small part of a small buffer would be another data rank's
@pytest.mark.parametrize(("parallel", "config"), rarely(CASES, *BY_DEFAULT), ids=str)
@on_ranks(lambda parallel, **_: 2 if parallel == {"data": 2} else 4, cuda=True)
def test_a_change_on_one_rank_is_found_and_repaired(world, parallel, config):
    """Those of one layout: this is what differs, and all; every rank sees it; and it is repaired."""
    with launch(parallel, **config):
        engine = build(frozen="blocks.1.norm1.bias")
        for what, name, victim, ranks, others in [case[2:] for case in CHANGES if case[:2] == (parallel, config)]:
            tensor = CHANGED[what](engine, name)
            before = None if tensor is None else tensor.clone()
            if world.rank == victim:
                flip(tensor)
            found = engine.check_replicas()
            if ranks is None:
                assert found == []
                continue
            (one,) = found
            assert (one.kind, one.ranks, one.others) == (what, ranks, others), one
            assert one.parameter.endswith(name)
            of = f" of {one.parameter!r}" if name else ""
            assert str(one).startswith(f"the {what}{of} on rank {ranks[0]} (pp ")
            if (parallel, others) == (TP2, (0, 1, 2)):
                places = [f"rank {rank} (pp 0, dp {rank // 2}, tp {rank % 2})" for rank in range(4)]
                assert str(one) == f"the {what}{of} on {places[3]} differs from {', '.join(places[:3])}"
            engine._replicas.repair(found)
            assert engine.check_replicas() == []
            # The lowest rank's is copied, but a weight is rounded from its master.
            right = victim != min(*ranks, *others) or (what, config) == ("weight", {"precision": "bf16-naive"})
            if tensor is not None and world.rank in (victim, *ranks):
                assert torch.equal(tensor, before) == right
        train(engine, 2)
        assert ranks is None or engine.check_replicas() == []


# -------------------------------------------------------------------------------------------------- in training


@on_ranks(4)
def test_training_stops_at_the_next_check(world):
    """Skipped steps count, too."""
    with launch(TP2, "16-mixed", check_replicas_every=3):
        engine = build()
        if world.rank == 1:
            flip(weight_of(engine, "norm.bias"), bit=20)  # the lowest might be rounded away in the step
        train(engine, 1, overflow_at=0)
        assert engine.num_skipped == 1
        with pytest.raises(paramp.ReplicaDrift, match=r"the weight of '.*norm.bias' on rank 1 \(pp 0, dp 0, tp 1\)"):
            train(engine, 1)


@on_ranks(2)
def test_a_learning_rate_that_one_rank_has_changed_is_named_first(world):
    """It is never repaired, because the next step would make the weights differ again."""
    for parallel, key in (({"tensor": 2}, "lr"), ({"pipeline": 2}, "lr"), ({"data": 2}, "weight_decay")):
        with launch(parallel, check_replicas_every=2, repair_replicas=True):
            engine = build()
            engine.optimizer.param_groups[0][key] = 1e-2 * (1 + world.rank)
            message = rf"""replicas: the setting of "param_groups\[0\]\['{key}'\]" on rank 1 .* differs from rank 0"""
            with pytest.raises(paramp.ReplicaDrift, match=message):
                train(engine, 1)


@on_ranks(4)
@pytest.mark.parametrize("parallel", [PP2_TP2, HSDP], ids=["pp2-tp2", "hsdp2x2"])
def test_training_continues_after_a_repair(world, parallel):
    """A whole weight is wrong, so that all that follows from it differs as well."""
    with launch(parallel, check_replicas_every=2, repair_replicas=True) as context:
        engine = build()
        if world.rank == 1:
            weight_of(engine, "norm1.weight").mul_(3.0)
        if context.is_main:
            with pytest.warns(UserWarning, match=r"replicas: .* copied from the lowest rank that holds it"):
                train(engine, 1)
        else:
            train(engine, 1)
        train(engine, 3)
        assert engine.check_replicas() == []


WITHOUT_A_FAULT = [
    ("16-mixed", TP2 | {"sequence_parallel": True}, {}),
    ("16-naive", TP2 | {"zero": 1}, {}),
    ("bf16-naive", PP2_TP2, {"masters": "remainder"}),
    ("16-naive", {"data": {"shard": 2}, "pipeline": 2}, {}),
    ("16-naive", HSDP, {}),
]


@pytest.mark.parametrize(("precision", "parallel", "options"), rarely(WITHOUT_A_FAULT, WITHOUT_A_FAULT[2]))
@on_ranks(4)
def test_no_difference_is_found_without_a_fault(world, precision, parallel, options):
    """With an overflow on the way; a comparison is one all-gather of a few sums."""
    with launch(parallel, precision, check_replicas_every=2, **options):
        engine = build()
        train(engine, 5, overflow_at=2)
        assert engine.num_skipped >= 1
        with Collectives() as collectives:
            assert engine.check_replicas() == []
        assert collectives.counts == {"allgather": 1}
    with launch(parallel, precision, **options):  # before the first one, ranks exchange what they hold
        engine = build()
        with (
            Collectives() as first,
            mock.patch.object(replica_check, "all_gather_single", wraps=replica_check.all_gather_single) as gathered,
        ):
            assert engine.check_replicas() == []
        assert first.counts["allgather"] > 1
        ((_, sums),) = (call.args for call in gathered.call_args_list)
        assert sums.dtype is torch.int64
        assert sums.numel() < 10


@on_ranks(8)
def test_no_difference_is_found_with_deterministic_sums(world):
    """Four data ranks, whose sums depend on a gradient's place in its buffer, and a tied embedding on two stages, in
    buffers of other sizes."""
    for zero in (0, 1):
        with launch({"pipeline": {"size": 2, "split": ["blocks.0"]}, "zero": zero}, check_replicas_every=1):
            train(build(), 2)
