"""The recipes of docs/recipes.md: verl's engines, FSDP2 in RL, Ray Train."""

import contextlib
import re
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from families import family, long
from pages import code_of, read, run_code
from pool import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from trainer_runs import check_weights, quiet

import paramp


class Engine:
    """The methods that ``verl.workers.engine.base.BaseEngine`` and its FSDP engines have in verl 0.9.1."""

    def __init__(self, module, lr):
        self.module, self.optimizer = module, torch.optim.SGD(module.parameters(), lr=lr, momentum=0.9)
        self.optimizer_config = SimpleNamespace(clip_grad=0.5)

    def optimizer_zero_grad(self):
        self.optimizer.zero_grad()

    def forward_step(self, micro_batch, loss_function, forward_only):
        x, y = micro_batch
        loss = loss_function(self.module(x).float(), y)
        return loss, {"loss": loss.detach().item()}

    def forward_backward_batch(self, data, loss_function, forward_only=False):
        outputs = []
        for micro_batch in data:
            loss, output = self.forward_step(micro_batch, loss_function=loss_function, forward_only=forward_only)
            if not forward_only:
                loss.backward()
            outputs.append(output)
        return outputs

    def optimizer_step(self):
        norm = nn.utils.clip_grad_norm_(self.module.parameters(), self.optimizer_config.clip_grad)
        self.optimizer.step()
        return norm.item()

    def train_batch(self, data, loss_function):
        self.optimizer_zero_grad()
        outputs = self.forward_backward_batch(data, loss_function, forward_only=False)
        return [output["loss"] for output in outputs], self.optimizer_step()


def policy():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))


def batches(step, rank, num_ranks):
    """Two micro-batches of this rank's; those of all ranks, in one process."""
    torch.manual_seed(100 + step)
    whole = torch.randn(2, 8, 8)
    return [(part, part.roll(1, dims=1)) for part in (one.chunk(num_ranks)[rank] for one in whole)]


def half_of_mean_square(output, target):
    return nn.functional.mse_loss(output, target) / 2  # two micro-batches


@on_ranks(2)
def test_verls_engines_train_in_fp16_as_one_process_in_fp32(world):
    mixin = run_code("recipes.md", "class InFp16")["InFp16"]
    fp16 = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)
    module = policy()
    for layer in (module[0], module):
        fully_shard(layer, mesh=init_device_mesh("cpu", (2,)), mp_policy=fp16)
    engine = type("InFp16", (mixin, Engine), {})(module, lr=0.1)
    plain = Engine(policy(), lr=0.1)
    for step in range(4):
        data = batches(step, world.rank, 2)
        before = [parameter.to_local().clone() for parameter in module.parameters()]
        if step == 2:  # overflows on one rank, and is skipped by both
            data = [(x * (1e4 if world.rank == 1 else 1.0), y) for x, y in data]
            engine.train_batch(data, half_of_mean_square)
            assert engine.scaler.get_scale() == 2.0**15
            after = [parameter.to_local() for parameter in module.parameters()]
            assert all(map(torch.equal, after, before))
            continue
        losses, norm = engine.train_batch(data, half_of_mean_square)
        expected, expected_norm = plain.train_batch(batches(step, 0, 1), half_of_mean_square)
        mean = torch.tensor(losses)
        dist.all_reduce(mean)
        torch.testing.assert_close(mean / 2, torch.tensor(expected), rtol=5e-3, atol=0)  # the loss that is reported
        assert norm == pytest.approx(expected_norm, rel=5e-3)
    found, expected, start = (dict(one.named_parameters()) for one in (module, plain.module, policy()))
    check_weights(found, expected, start, 2.0**-11)


def log_probabilities(model, tokens):
    """Of each token but the first, fp32."""
    logits = model(tokens[:, :-1]).float()
    return logits.log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]


@torch.no_grad()
def mismatch(dtype):
    """The mean difference between the log-probabilities of a training and an inference forward, and their spread."""
    torch.manual_seed(0)
    trained = paramp.models.GPT.preset("tiny")
    for parameter in trained.parameters():
        parameter.mul_(1.5)  # a policy that prefers some tokens, as after training
    tokens = torch.randint(0, 64, (4, 33))
    sampled = paramp.models.GPT.preset("tiny")
    sampled.load_state_dict(trained.state_dict())
    sampled.to(dtype)  # as an inference engine stores weights
    with torch.autocast("cpu", dtype):
        training = log_probabilities(trained, tokens)
    one_by_one = [log_probabilities(sampled, tokens[:, : end + 1])[:, -1] for end in range(1, tokens.shape[1])]
    return (training - torch.stack(one_by_one, dim=1)).abs().mean().item(), training.std().item()


def test_fp16_brings_training_and_inference_closer_than_bf16():
    (fp16, spread), (bf16, _) = mismatch(torch.float16), mismatch(torch.bfloat16)
    print(f"mean difference of log-probabilities: fp16 {fp16:.2e}, bf16 {bf16:.2e}, {bf16 / fp16:.1f} times")
    assert spread > 0.1
    assert 0 < 3 * fp16 < bf16


def test_a_diff_of_the_page_has_at_most_ten_lines_and_its_calls_exist():
    texts = re.findall(r"^```text\n(.*?)^```$", read("docs/recipes.md"), re.M | re.S)
    diffs = [body for body in texts if re.search(r"^[+-] ", body, re.M)]
    assert len(diffs) == 2
    for diff in diffs:
        assert len(diff.splitlines()) <= 10
        for name in re.findall(r"paramp\.(\w+)", diff):
            assert hasattr(paramp, name)


@family
@long
def test_the_script_for_ray_train_runs(tmp_path):
    with quiet():
        ray = pytest.importorskip("ray", reason='Ray is not installed: pip install "ray[train]"', exc_type=ImportError)
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
        try:
            source = code_of("recipes.md", "TorchTrainer(", "text")
            exec(compile(source, "docs/recipes.md", "exec"), {"FOLDER": str(tmp_path), "__name__": "ray_recipe"})
        finally:
            with contextlib.suppress(Exception):
                ray.shutdown()
    assert any((tmp_path / "checkpoint").iterdir())  # rank 0 of two wrote it
