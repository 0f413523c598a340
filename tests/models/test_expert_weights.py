"""Folders of mixtures of transformers, in most of which each expert is a tensor: read by the ranks that have it."""

import json
import re
from collections import defaultdict

import pytest
import torch
import torch.distributed as dist
from families import cases, family
from mixtures import FAMILIES, build
from pool import run_on_ranks, shared_folder
from test_pretrained_weights import on_meta, reloaded_as, sgd

import paramp
from paramp.parallel.huggingface.pretrained_weights import PretrainedFiles

NUM_EXPERTS = 12
"""So many that their order as names is not that of their indices."""
LAYOUTS = {
    "ep2": (2, {"expert": 2}),
    "fsdp2·ep2": (4, {"data": {"shard": 4}, "expert": 2}),
    "ep2·tp2": (4, {"expert": 2, "tensor": 2}),
}
CELLS = [(name, layout) for layout in LAYOUTS for name in FAMILIES]
ONE_BY_ONE = [name for name in FAMILIES if name != "GPT-OSS"]
"""Of GPT-OSS stacks are stored, which are views of a file."""


def counting_reads(monkeypatch):
    """The bytes that this rank reads of each expert, by its index."""
    counts, read = defaultdict(int), PretrainedFiles._read

    def counted(files, stored):
        tensor = read(files, stored)
        if found := re.search(r"experts\.(\d+)\.", stored):
            counts[int(found[1])] += tensor.nbytes
        return tensor

    monkeypatch.setattr(PretrainedFiles, "_read", counted)
    return counts


def check_folder(world, name, layout):
    folder, parallel = shared_folder(), LAYOUTS[layout][1]
    source = build(name, num_experts=NUM_EXPERTS)
    if world.rank == 0:
        source.save_pretrained(folder, max_shard_size="50KB")
    dist.barrier()
    stored = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert any(f"experts.{NUM_EXPERTS - 1}." in key for key in stored) == (name in ONE_BY_ONE)
    with paramp.launch_from_torch({"parallel": parallel}) as context, pytest.MonkeyPatch.context() as patch:
        counts = counting_reads(patch)
        engine, *_ = paramp.initialize(on_meta(source, folder), sgd)
        expected = source.state_dict()
        found = engine.full_state_dict()
        assert [key for key, value in found.items() if not torch.equal(value, expected[key])] == []
        stacks = [value for key, value in expected.items() if "experts." in key and value.ndim == 3]
        place = context.coordinates
        first = place["ep"] * NUM_EXPERTS // 2 + place.get("efsdp", 0) * NUM_EXPERTS // 4
        count = NUM_EXPERTS // parallel.get("data", {"shard": 2})["shard"]  # whole experts, also where ranks slice them
        own = range(first, first + count) if name in ONE_BY_ONE else ()
        size = sum(value.nbytes for value in stacks) // NUM_EXPERTS
        assert dict(counts) == dict.fromkeys(own, size)
        engine.save_pretrained(folder / "again")
        dist.barrier()
        again = reloaded_as(source, folder / "again").state_dict()
        assert [key for key, value in expected.items() if not torch.equal(again[key], value)] == []


@family
@pytest.mark.parametrize(("name", "layout"), cases("expert folders", CELLS, [("Mixtral", "ep2")], 2))
def test_ranks_read_their_experts_only_and_write_all(name, layout):
    run_on_ranks(LAYOUTS[layout][0], __name__, "check_folder", {"name": name, "layout": layout})


def test_of_a_stack_the_experts_that_are_kept_are_read(tmp_path, monkeypatch):
    source = build("Mixtral", num_experts=NUM_EXPERTS)
    source.save_pretrained(tmp_path)
    files, counts = PretrainedFiles(on_meta(source, tmp_path)), counting_reads(monkeypatch)
    name, value = next((key, value) for key, value in source.state_dict().items() if key.endswith("gate_up_proj"))
    for kept in ([10], [2, 10], range(NUM_EXPERTS)):
        counts.clear()
        assert torch.equal(files(name, kept)[list(kept)], value[list(kept)])
        assert dict(counts) == dict.fromkeys(kept, value[0].nbytes)
