"""``--plant-overflow``: a real overflow of one rank, which the diagnosis finds by itself."""

import json
import re

import pytest
import torch
from pool import on_ranks
from small_engines import engine_of
from train import train
from train_app.planted_overflow import planted_overflow
from train_app.settings import Job, TrainConfig

import paramp
from paramp.models import GPT

CONFIG = {"parallel": {"tensor": 2, "pipeline": {"size": 2, "microbatches": 4}}, "precision": "16-mixed"}
SMALL = {"batch_size": 8, "seq_len": 16, "steps": 3, "eval_every": 3, "eval_sequences": 8}


@on_ranks(4)
def test_the_report_names_parameter_rank_and_stage_of_what_was_planted(world, tmp_path):
    with paramp.launch_from_torch(CONFIG | {"trace_overflow": True}, device=world.device) as context:
        job = TrainConfig(**SMALL, plant_overflow=2, data="LICENSE", log_dir=str(tmp_path))
        assert train(context, Job(train=job, model={"num_layers": 4, "width": 32})) == 0
    if world.rank:
        return
    log = (tmp_path / "train.log").read_text()
    assert "step 2: by --plant-overflow, the gradient of one weight on rank 3 alone, in microbatch 2" in log
    found = re.search(r"step 2 was skipped: backward overflow in \S+: inf in the gradient of (\S+) in (.*): lower", log)
    where = "rank 3 (pp 1, dp 0, tp 1, stage 1)"
    assert found is not None, log
    assert found.groups() == ("blocks.2.attention.qkv.weight", f"microbatch 2 on {where} at a loss scale of 65536")
    assert re.findall(r"^  gradient of (\S+) on (.*?): inf, \d+ of", log, re.M) == [
        (found[1], where)  # and no other
    ]
    assert "all 4 ranks skipped step 2; the loss scale was 65536, now 32768" in log
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(record["skipped"], record["loss_scale"]) for record in records] == [(0, 65536), (1, 65536), (0, 32768)]


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"precision": "bf16-mixed"}, "the precision 'bf16-mixed' does not scale the loss"),
        ({"precision": "16-mixed", "reproducible": True}, "reproducible sums"),
    ],
)
def test_where_nothing_can_be_planted_is_an_error(config, why):
    with paramp.launch_from_torch(config, device="cpu"):
        model = GPT.preset("tiny", num_layers=1, width=8, num_heads=2)
        engine = engine_of(model, model.loss, torch.optim.AdamW)
        with pytest.raises(paramp.ConfigError, match=f"plant_overflow.*{why}"), planted_overflow(engine):
            pass
