"""One bit in one copy: found, named, and repaired; and nothing is found where nothing is wrong."""

import pytest
import torch
import torch.distributed as dist
from counting import Collectives
from pool import on_ranks
from reference import batches, local, rank_slice, small_gpt

import paramp
from paramp.base import sizes
from paramp.observe.bit_hash import _multipliers, hash_bits

CONFIG = {"clip_grad_norm": 1.0}


def build(context, optimizer=torch.optim.AdamW, **options):
    """A small GPT after one step."""
    model = small_gpt(num_layers=2)
    engine, *_ = paramp.initialize(model, optimizer(model.parameters(), lr=1e-2, **options), model.loss)
    train(engine, 1)
    return engine


def train(engine, steps, overflow_at=None):
    dp = engine.context.dp
    for step, (x, y) in enumerate(batches(steps)):
        engine.forward_backward(rank_slice(x, dp.rank, dp.size), rank_slice(y, dp.rank, dp.size))
        if step == overflow_at and engine.context.rank == 0:
            local(next(engine.module.parameters()).grad).view(-1)[0] = float("inf")
        engine.step()
        engine.zero_grad()


def flip(tensor, index=-1, bit=0):
    """Turn one bit, the lowest, of one element."""
    words = tensor.detach().view(-1).view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize])
    words[index] ^= 1 << bit


def parameter(engine, ending):
    return next((name, value) for name, value in engine.named_parameters() if name.endswith(ending))


def master(engine, ending):
    """The part of a master, or of a remainder, that this rank steps; None if it steps none of it."""
    for param, _, buffer in engine._weights.pairs():
        if param.name.endswith(ending):
            (stored,) = buffer.masters.state
            return stored[buffer.own_range(param)]
    return None


# ------------------------------------------------------------------------------------------------------- the hash


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int16])
def test_a_hash_changes_with_every_single_bit(dtype):
    tensor = torch.arange(13).to(dtype)
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


def test_a_hash_equals_the_formula_of_its_docstring(monkeypatch):
    """In chunks as in one, in Python's integers."""
    monkeypatch.setitem(sizes.HASHED_WORDS, "cpu", 4)
    values = torch.randn(10, generator=torch.Generator().manual_seed(1))
    odd = _multipliers(values.device, 4).tolist()
    assert len(odd) == 4
    assert all(number % 2 == 1 for number in odd)
    words = values.view(torch.int32).tolist()
    expected = sum(word * odd[place % 4] * (2 * (place // 4) + 1) for place, word in enumerate(words))
    assert int(hash_bits(values)) % 2**64 == expected % 2**64


def test_tensors_of_any_strides_are_hashed():
    matrix = torch.randn(3, 6)
    column = matrix[:, -1]  # such as the labels in a table
    complex_numbers = torch.view_as_complex(matrix.view(3, 3, 2)).conj()
    for view in (matrix.T, column, matrix[:, ::2], column[:1].expand(4), complex_numbers):
        assert hash_bits(view) == hash_bits(view.resolve_conj().clone(memory_format=torch.contiguous_format))
    assert hash_bits(matrix[:0]) == 0


# ------------------------------------------------------------------------------------------------------ one bit


def assert_found(engine, kind, name, ranks, others):
    """This is what differs, and all; every rank sees it; and it can be repaired."""
    (found,) = engine.check_replicas()
    assert (found.kind, found.ranks, found.others) == (kind, ranks, others), found
    assert found.parameter.endswith(name), found
    what = f"the {kind} of {found.parameter!r}" if name else f"the {kind}"
    assert str(found).startswith(f"{what} on rank {ranks[0]} (pp "), found
    engine._replicas.repair([found])
    assert engine.check_replicas() == []


@on_ranks(4, cuda=True)
def test_a_changed_norm_weight_on_one_tensor_rank_is_found(world):
    """In fp32, where the weight is what is stepped: dp2·tp2, so that three are right."""
    with paramp.launch_from_torch({"parallel": {"tensor": 2}, **CONFIG}, device=world.device) as context:
        engine = build(context)
        if world.rank == 3:
            flip(local(parameter(engine, "norm.weight")[1]))
        (found,) = engine.check_replicas()
        assert (found.kind, found.ranks, found.others) == ("weight", (3,), (0, 1, 2))
        assert found.parameter == parameter(engine, "norm.weight")[0]
        assert str(found) == (
            f"the weight of {found.parameter!r} on rank 3 (pp 0, dp 1, tp 1) differs from rank 0 (pp 0, dp 0, tp 0), "
            "rank 1 (pp 0, dp 0, tp 1), rank 2 (pp 0, dp 1, tp 0)"
        )


@on_ranks(4)
def test_a_changed_tied_embedding_on_one_stage_is_found(world):
    with paramp.launch_from_torch({"parallel": {"tensor": 2, "pipeline": 2}, **CONFIG}) as context:
        engine = build(context)
        (tie,) = context.ties
        if world.rank == 3:
            flip(local(tie.parameter))
        # Rank 3 and rank 1 have the same shard; of two the lower one counts.
        assert_found(engine, "weight", "head.weight", (3,), (1,))


@on_ranks(2)
def test_a_changed_shard_on_one_data_rank_is_found(world):
    with paramp.launch_from_torch({"parallel": {"data": 2}, "precision": "64-true", **CONFIG}) as context:
        engine = build(context)
        if world.rank == 0:
            flip(local(parameter(engine, "mlp.up.weight")[1]), 5)
        assert_found(engine, "weight", "mlp.up.weight", (1,), (0,))


@on_ranks(4)
@pytest.mark.parametrize("masters", ["full", "remainder"])
@pytest.mark.parametrize("zero", [0, 1])
def test_a_changed_master_on_one_rank_is_found(world, masters, zero):
    """Of a norm, which tensor ranks share; under ZeRO each data rank has a part of its own."""
    config = {"precision": "16-naive", "masters": masters, "parallel": {"tensor": 2, "zero": zero}, **CONFIG}
    with paramp.launch_from_torch(config) as context:
        engine = build(context)
        has_it = [None] * 4
        dist.all_gather_object(has_it, master(engine, "norm.weight") is not None)
        victim = max(rank for rank in range(4) if has_it[rank])
        if world.rank == victim:
            flip(master(engine, "norm.weight"))
        same = [victim - 1] if zero else [0, 1, 2]
        assert_found(engine, "master", "norm.weight", (victim,), tuple(same))
        train(engine, 2)
        assert engine.check_replicas() == []


HSDP = {"data": {"replicate": 2, "shard": 2}}


@on_ranks(4)
@pytest.mark.parametrize("precision", ["32-true", "16-naive", "bf16-true"])
def test_changes_on_one_replica_of_shards_are_found(world, precision):
    """Ranks 1 and 3 have the same shards; in 16-naive the shards are the masters."""
    with paramp.launch_from_torch({"precision": precision, "parallel": HSDP, **CONFIG}) as context:
        engine = build(context)
        for victim, same in ((3, 1), (1, 3), (2, 0)):
            if world.rank == victim:
                flip(local(parameter(engine, "mlp.up.weight")[1]))
            assert_found(engine, "weight", "mlp.up.weight", (max(victim, same),), (min(victim, same),))
            if world.rank == victim:
                stepped = next(one for param, one, _ in engine._weights.pairs() if param.name.endswith("mlp.up.weight"))
                flip(engine.optimizer.state[stepped]["exp_avg_sq"])
            assert_found(engine, "optimizer state", "mlp.up.weight", (max(victim, same),), (min(victim, same),))
        if engine.scaler.is_enabled():
            if world.rank == 2:
                flip(engine.scaler.tensors()[0])
            assert_found(engine, "loss scale", "", (2,), (0, 1, 3))
        train(engine, 2)
        assert engine.check_replicas() == []


@on_ranks(4)
def test_pure_shards_have_no_replicas_but_over_tensor_ranks(world):
    """Those of norms, which both tensor ranks hold."""
    with paramp.launch_from_torch({"parallel": {"data": {"shard": 2}, "tensor": 2}, **CONFIG}) as context:
        engine = build(context)
        if world.rank == 2:
            flip(local(parameter(engine, "mlp.up.weight")[1]))
            flip(local(parameter(engine, "norm1.weight")[1]))
        assert_found(engine, "weight", "norm1.weight", (3,), (2,))


@on_ranks(2)
def test_a_repaired_weight_is_rounded_from_its_master(world):
    """The lowest rank's weight is the wrong one, but its master is right."""
    with paramp.launch_from_torch({"precision": "bf16-naive", "parallel": {"data": 2}, **CONFIG}) as context:
        engine = build(context)
        right = local(parameter(engine, "norm.weight")[1]).detach().clone()
        if world.rank == 0:
            flip(local(parameter(engine, "norm.weight")[1]))
        assert_found(engine, "weight", "norm.weight", (1,), (0,))
        assert torch.equal(local(parameter(engine, "norm.weight")[1]), right)


@on_ranks(4)
def test_changes_of_optimizer_state_and_loss_scale_are_found(world):
    with paramp.launch_from_torch({"precision": "16-mixed", "parallel": {"pipeline": 2}, **CONFIG}) as context:
        engine = build(context)
        if world.rank == 2:
            flip(engine.optimizer.state[parameter(engine, "norm.weight")[1]]["exp_avg_sq"])
        assert_found(engine, "optimizer state", "norm.weight", (3,), (2,))
        if world.rank == 1:
            flip(engine.scaler.tensors()[0])
        assert_found(engine, "loss scale", "", (1,), (0, 2, 3))


@on_ranks(2)
def test_a_changed_frozen_weight_is_found(world):
    with paramp.launch_from_torch({"parallel": {"data": 2}}):
        model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 1))
        model[0].requires_grad_(False)
        optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
        engine, *_ = paramp.initialize(model, optimizer, torch.nn.functional.mse_loss)
        if world.rank == 1:
            flip(engine.module.get_parameter("0.bias"))
        assert_found(engine, "weight", "0.bias", (1,), (0,))


# -------------------------------------------------------------------------------------------------- in training


@on_ranks(4)
def test_training_stops_at_the_next_check(world):
    """Skipped steps count, too."""
    config = {"precision": "16-mixed", "parallel": {"tensor": 2}, "check_replicas_every": 3, **CONFIG}
    with paramp.launch_from_torch(config) as context:
        engine = build(context)
        if world.rank == 1:
            flip(local(parameter(engine, "norm.bias")[1]), bit=20)  # the lowest might be rounded away in the step
        train(engine, 1, overflow_at=0)
        assert engine.num_skipped == 1
        with pytest.raises(paramp.ReplicaDrift, match=r"the weight of '.*norm.bias' on rank 1 \(pp 0, dp 0, tp 1\)"):
            train(engine, 1)


@on_ranks(4)
@pytest.mark.parametrize("parallel", [{"tensor": 2, "pipeline": 2}, HSDP], ids=["pp2-tp2", "hsdp2x2"])
def test_training_continues_after_a_repair(world, parallel):
    """A whole weight is wrong, so that all that follows from it differs as well."""
    settings = {"check_replicas_every": 2, "repair_replicas": True}
    with paramp.launch_from_torch({"parallel": parallel, **settings, **CONFIG}) as context:
        engine = build(context)
        if world.rank == 1:
            with torch.no_grad():
                local(parameter(engine, "norm1.weight")[1]).mul_(3.0)
        if context.is_main:
            with pytest.warns(UserWarning, match=r"replicas: .* copied from the lowest rank that holds it"):
                train(engine, 1)
        else:
            train(engine, 1)
        train(engine, 3)
        assert engine.check_replicas() == []


@on_ranks(4)
@pytest.mark.parametrize(
    ("precision", "parallel", "options"),
    [
        ("32-true", {"tensor": 2, "pipeline": 2}, {}),
        ("16-mixed", {"tensor": 2, "sequence_parallel": True}, {}),
        ("16-naive", {"tensor": 2, "zero": 1}, {}),
        ("16-naive", {"pipeline": 2, "zero": 1}, {}),
        ("bf16-naive", {"data": 4}, {"masters": "remainder"}),
        ("O2", {"pipeline": 2}, {}),
        ("bf16-true", {"tensor": 4}, {}),
        ("16-naive", {"data": {"shard": 2}}, {}),
        ("16-mixed", {"data": {"shard": 2}, "tensor": 2}, {}),
        ("16-mixed", {"data": {"shard": 2}, "pipeline": 2}, {}),
    ],
)
def test_no_difference_is_found_without_a_fault(world, precision, parallel, options):
    """With an overflow on the way."""
    settings = {"precision": precision, "parallel": parallel, "check_replicas_every": 2}
    with paramp.launch_from_torch({**settings, **options, **CONFIG}) as context:
        engine = build(context)
        train(engine, 5, overflow_at=2)
        assert engine.num_skipped >= 1
        assert engine.check_replicas() == []


@on_ranks(8)
def test_no_difference_is_found_with_deterministic_sums(world):
    """Four data ranks, whose sums depend on a gradient's place in its buffer, and a tied embedding on two stages, in
    buffers of other sizes."""
    for zero in (0, 1):
        parallel = {"pipeline": {"size": 2, "split": ["blocks.0"]}, "zero": zero}
        with paramp.launch_from_torch({"parallel": parallel, "check_replicas_every": 1, **CONFIG}) as context:
            train(build(context), 2)


@on_ranks(4)
@pytest.mark.parametrize("parallel", [{"tensor": 2, "pipeline": 2}, {"tensor": 2, "zero": 1}, HSDP])
def test_a_comparison_is_one_all_gather_of_a_few_sums(world, parallel):
    with paramp.launch_from_torch({"precision": "16-naive", "parallel": parallel, **CONFIG}) as context:
        engine = build(context)
        engine.check_replicas()  # the first one exchanges which ranks hold the same
        with Collectives() as collectives:
            assert engine.check_replicas() == []
        assert collectives.counts == {"allgather": 1}


def test_a_world_of_one_compares_nothing():
    with paramp.launch_from_torch({"check_replicas_every": 1, **CONFIG}) as context:
        assert build(context).check_replicas() == []
