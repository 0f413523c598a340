"""The auxiliary loss of a mixture of experts, against one process on the same microbatches."""

import pytest
import torch
from pool import on_ranks
from pretrained import batches, build
from reference import rank_slice

import paramp

pytest.importorskip("transformers")


def mixtral():
    model = build("Mixtral")
    model.router_aux_loss_coef = 0.5  # of 0.001 the gradient would be within the tolerance
    return model


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3, eps=1e-4)


@on_ranks(4)
def test_it_is_weighted_by_the_labels_of_each_microbatch(world):
    plain = mixtral()
    optimizer = adamw(plain.parameters())
    window = list(batches("Mixtral", 2))
    with paramp.launch_from_torch({"parallel": {"tensor": 2, "data": 2}, "gradient_accumulation": 2}) as context:
        engine, *_ = paramp.initialize(mixtral(), adamw)
        for _ in range(3):
            parts = [
                {key: rank_slice(value, rank, 2) for key, value in batch.items()} for batch in window for rank in (0, 1)
            ]
            counts = [int((part["labels"][:, 1:] != -100).sum()) for part in parts]
            assert len(set(counts)) > 1
            optimizer.zero_grad()
            losses = [plain(**part, output_router_logits=True).loss for part in parts]
            sum(count * loss / sum(counts) for count, loss in zip(counts, losses, strict=True)).backward()
            optimizer.step()
            for index, batch in enumerate(window):
                own = {key: rank_slice(value, context.dp.rank, 2) for key, value in batch.items()}
                found = engine.forward_backward(own | {"output_router_logits": True}).item()
                assert engine.step().stepped == (index == 1)
            mean = sum(count * loss.item() for count, loss in zip(counts, losses, strict=True)) / sum(counts)
            assert found == pytest.approx(mean, abs=1e-5)  # of the last call: over the window
            engine.zero_grad()
        actual = engine.full_state_dict()
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(actual[key], value, atol=2e-5, rtol=0, msg=lambda text, key=key: f"{key}: {text}")
