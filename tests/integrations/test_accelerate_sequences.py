"""Accelerate's loop with ``cp_size``, whose sequences paramp cuts, against plain torch in one process."""

from unittest import mock

import pytest
import torch
from accelerating import accelerating
from cut_batches import LENGTH, cut_batches
from families import cases, family
from pool import on_ranks, shared_folder
from reference import whole
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset
from trainer_runs import INF, quiet

import paramp
from paramp.integrations.accelerate import adopt

pytest.importorskip("transformers")

LR, MAX_NORM, ACCUMULATED, ROWS, TOLERANCE = 0.5, 1.0, 2, 2, 1e-4


class Own(nn.Module):
    """A decoder of one's own, whose loss is computed outside."""

    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(100, 16), nn.Embedding(LENGTH, 16)
        self.qkv, self.out, self.norm = nn.Linear(16, 48, bias=False), nn.Linear(16, 16), nn.LayerNorm(16)
        self.head = nn.Linear(16, 100)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.places(paramp.token_positions(tokens.shape[1], tokens.device))
        q, k, v = (part.unflatten(-1, (4, 4)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return self.head(x)


def build(kind):
    torch.manual_seed(0)
    if kind == "own":
        return Own()
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "max_position_embeddings": LENGTH}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=100, **sizes))
    if kind == "recomputed":
        model.activation_checkpointing_enable()
    return model


def samples():
    """Sixteen, which two data ranks see in two steps and one in four."""
    batches = list(cut_batches("", 4))
    return [{name: value[row] for name, value in one.items()} for one in batches for row in range(4)]


def loss_of(kind, model, rows):
    if kind == "own":
        logits = model(rows["input_ids"])
        shifted = F.pad(rows["labels"], (0, 1), value=-100)[:, 1:]
        return F.cross_entropy(logits.flatten(0, 1).float(), shifted.flatten())
    if kind == "shifted":
        shifted = F.pad(rows["labels"], (0, 1), value=-100)[:, 1:].contiguous()
        return model(rows["input_ids"], labels=rows["labels"], shift_labels=shifted).loss
    if kind == "counted":
        return model(**rows, num_items_in_batch=40).loss
    return model(**rows).loss


def in_one_process(kind, data_ranks):
    """Losses of each accumulated batch, norms before clipping, and weights."""
    model = build(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    loader = list(DataLoader(samples(), batch_size=ROWS))
    losses, norms = [], []
    for number in range(len(loader) // data_ranks):
        given = loader[number * data_ranks : (number + 1) * data_ranks]
        loss = sum(loss_of(kind, model, rows) for rows in given) / data_ranks
        (loss / ACCUMULATED).backward()
        losses.append(loss.item())
        if (number + 1) % ACCUMULATED == 0:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
            optimizer.step()
            optimizer.zero_grad()
    return losses, norms, {name: value.detach() for name, value in model.named_parameters()}


def prepared(accelerator, kind, data=None):
    model = build(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    return accelerator.prepare(model, optimizer, DataLoader(data or samples(), batch_size=ROWS))


def ended(accelerator):
    """Its training, but for the world of the tests' ranks."""
    with mock.patch.object(type(accelerator.state), "destroy_process_group"):
        accelerator.end_training()
    assert accelerator._context not in paramp.distributed.context.OPEN


def train(accelerator, kind):
    adopt(accelerator)
    model, optimizer, loader = prepared(accelerator, kind)
    losses, norms, lengths = [], [], []
    inside = model.norm if kind == "own" else model.model.layers[0].mlp
    for number, rows in enumerate(loader):
        if number == 1:  # the first batch is tried out whole and cut
            inside.register_forward_pre_hook(lambda _, given: lengths.append(given[0].shape[1]))
        buffers = {"buffers": [*rows.values()], "buffer_seq_dims": [1] * len(rows)}
        with accelerator.accumulate(model), accelerator.maybe_context_parallel(**buffers):
            loss = loss_of(kind, model, rows)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norms.append(accelerator.clip_grad_norm_(model.parameters(), MAX_NORM).item())
            optimizer.step()
            optimizer.zero_grad()
        everyone = accelerator.gather(loss.detach())
        losses.append(everyone.mean().item())
        torch.testing.assert_close(accelerator.reduce(loss.detach(), "mean"), everyone.mean())
        (own,) = [rank for rank in range(len(everyone)) if rank == accelerator.process_index]
        assert everyone[own] == everyone[own ^ 1], "the ranks of one sequence have its loss"
    assert set(lengths) == {LENGTH // accelerator.parallelism_config.cp_size}
    return losses, norms, {name: whole(value.detach()).clone() for name, value in model.named_parameters()}


KINDS = ("Llama", "own", "shifted", "counted", "recomputed")
CELLS = [(size, layout, kind) for size, layout in ((2, "cp"), (4, "cp"), (4, "fsdp-cp")) for kind in KINDS]
PART = [(2, "cp", "own"), (4, "fsdp-cp", "Llama")]


@family
@pytest.mark.parametrize(("size", "layout", "kind"), cases("accelerate-cp", CELLS, PART, 1))
@on_ranks(lambda size, **_: size)
def test_losses_norms_and_weights_are_those_of_whole_sequences(world, size, layout, kind):
    with accelerating(world, layout, "no", gradient_accumulation_steps=ACCUMULATED) as accelerator:
        losses, norms, found = train(accelerator, kind)
        ended(accelerator)
    expected_losses, expected_norms, expected = in_one_process(kind, 2 if layout == "fsdp-cp" else 1)
    torch.testing.assert_close(losses, expected_losses, rtol=TOLERANCE, atol=0)
    torch.testing.assert_close(norms, expected_norms, rtol=TOLERANCE, atol=0)
    start = dict(build(kind).named_parameters())
    for name, value in expected.items():
        way = (value - start[name]).norm()
        assert way > 1e-3, name
        assert (found[name] - value).norm() < TOLERANCE * way, name


# ------------------------------------------------------------------------------------ overflows, checkpoints, metrics


def overflowing(module, args, output):
    """The gradient of the first row of its weight, which rank 0 has, and nothing else."""
    args[0].register_hook(lambda gradient: gradient.nan_to_num(0, 0, 0))
    output.register_hook(lambda gradient: gradient.index_fill(-1, torch.tensor([0]), INF))


@on_ranks(2)
def test_an_overflow_in_one_part_of_a_sequence_skips_the_step_on_all_ranks_and_a_run_resumes(world):
    from accelerate.utils import GradScalerKwargs

    options = {"kwargs_handlers": [GradScalerKwargs(init_scale=1024.0)]}
    rows, folder = next(cut_batches("", 1)), str(shared_folder())
    with accelerating(world, "cp", "fp16", **options) as accelerator, quiet():
        model, optimizer, _ = prepared(adopt(accelerator), "Llama")

        def step():
            loss = model(**rows).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            return loss.item()

        def weights():
            return [whole(value.detach()).clone() for value in model.parameters()]

        torch.testing.assert_close(step(), build("Llama")(**rows).loss.item(), rtol=2e-3, atol=0)
        before = weights()
        hook = model.lm_head.register_forward_hook(overflowing) if world.rank == 1 else None
        step()
        if hook is not None:
            hook.remove()
        assert (accelerator.loss_scale, accelerator.num_skipped) == (512, 1)
        assert all(map(torch.equal, weights(), before))
        accelerator.save_state(folder)
        accelerator.wait_for_everyone()
        losses = [step(), step()]
        assert losses[1] < losses[0]
        accelerator.load_state(folder)
        assert [step(), step()] == losses
        ended(accelerator)


@pytest.mark.parametrize("layout", ["cp", "fsdp-cp"])
@on_ranks(4)
def test_metrics_have_each_sample_once(world, layout):
    """Seven samples on one data rank of four, or two of two, where the last batch is filled up with the first."""
    with accelerating(world, layout, "no") as accelerator:
        model, _, loader = prepared(adopt(accelerator), "Llama", samples()[:7])
        seen, losses, names = [], [], []
        with torch.no_grad():
            for rows in loader:
                output = model.eval()(**rows)
                assert output.logits.shape[:2] == rows["input_ids"].shape
                seen.append(accelerator.gather_for_metrics(rows["input_ids"]))
                losses.append(accelerator.gather_for_metrics(output.logits.logsumexp(-1).mean(1)))
                names += accelerator.gather_for_metrics([str(one) for one in rows["input_ids"].tolist()])
        expected = torch.stack([one["input_ids"] for one in samples()[:7]])
        assert torch.equal(torch.cat(seen), expected)
        assert names == [str(one) for one in expected.tolist()]
        logits = build("Llama")(expected).logits
        torch.testing.assert_close(torch.cat(losses), logits.logsumexp(-1).mean(1))
        ended(accelerator)


# ------------------------------------------------------------------------------------------------------ what is refused


class Endless(IterableDataset):
    def __iter__(self):
        yield from samples()


class Pooled(Own):
    def forward(self, tokens):
        return super().forward(tokens).mean()


@on_ranks(2)
def test_what_would_train_wrongly_is_refused(world):
    with accelerating(world, "cp", "no") as accelerator:
        accelerator.prepare(DataLoader(Endless(), batch_size=ROWS))
        with pytest.raises(paramp.ConfigError, match=r"dispatches batches.*dispatch_batches=False"):
            adopt(accelerator)
    with accelerating(world, "cp", "no") as accelerator:
        model = build("Llama")
        accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=LR))
        with pytest.raises(paramp.ConfigError, match=r"call adopt before accelerator\.prepare"):
            adopt(accelerator)
    with accelerating(world, "cp", "no") as accelerator:
        accelerator.state.dynamo_plugin.backend = mock.Mock(value="INDUCTOR")
        with pytest.raises(paramp.ConfigError, match="got dynamo_backend 'inductor', expected 'no'"):
            adopt(accelerator)
    with accelerating(world, "cp", "no") as accelerator:
        with mock.patch.object(type(accelerator.parallelism_config), "sp_size", 2, create=True):
            accelerator.parallelism_config.sp_size = 2
            with pytest.raises(paramp.ConfigError, match=r"sp_size over 1, which is DeepSpeed's.*use cp_size"):
                adopt(accelerator)
            accelerator.parallelism_config.sp_size = 1
        adopt(accelerator)
        rows = next(cut_batches("", 1))
        with pytest.raises(paramp.ConfigError, match="dispatches batches"):
            accelerator.prepare(DataLoader(Endless(), batch_size=ROWS))
        model = Pooled()
        model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=LR))
        with pytest.raises(paramp.ConfigError, match=r"Pooled: got output of shape \(\), expected tokens in dim 1"):
            model(rows["input_ids"])
        accelerator.free_memory()
        model, _, _ = prepared(accelerator, "Llama")
        with pytest.raises(paramp.ConfigError, match=r"past_key_values.*expected none.*not cut"):
            model.generate(rows["input_ids"], max_new_tokens=2)
        with pytest.raises(paramp.ConfigError, match=r"output_router_logits.*outside of paramp's engine"):
            model(rows["input_ids"], output_router_logits=True)
        with pytest.raises(paramp.ConfigError, match=r"has other values.*need the same batch"):
            model(rows["input_ids"] + world.rank)
        ended(accelerator)
