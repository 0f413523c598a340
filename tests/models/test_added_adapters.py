"""LoRA adapters of PEFT over tensor and pipeline ranks, against a plain torch loop."""

import importlib.util

import pytest
import torch
from pool import on_ranks, shared_folder

import paramp

pytest.importorskip("transformers")

from pretrained import batches, build

pytestmark = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")
LAYOUTS = {"tp2": {"tensor": 2}, "pp2": {"pipeline": {"size": 2, "microbatches": 2}}}
LAYERS = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]


def adapted():
    from peft import LoraConfig

    model = build("Llama")
    torch.manual_seed(1)
    model.add_adapter(LoraConfig(r=4, lora_alpha=8, target_modules=LAYERS))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:  # zeros, behind which A would get no gradient
                parameter.normal_(std=0.1)
    return model.train()


def sgd(parameters):
    return torch.optim.SGD([parameter for parameter in parameters if parameter.requires_grad], lr=0.5, momentum=0.9)


def plain_training():
    model = adapted()
    optimizer = sgd(model.parameters())
    losses = []
    for batch in batches("Llama", 3):
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: value.detach() for name, value in model.named_parameters() if "lora" in name}


@pytest.mark.parametrize("layout", LAYOUTS)
@on_ranks(2)
def test_adapters_follow_plain_torch_and_are_saved_alone(world, layout):
    losses, weights = plain_training()
    folder = shared_folder()
    with paramp.launch_from_torch({"parallel": LAYOUTS[layout]}):
        engine, *_ = paramp.initialize(adapted(), sgd)
        for batch, loss in zip(batches("Llama", 3), losses, strict=True):
            assert engine.forward_backward(batch).item() == pytest.approx(loss, abs=1e-5)
            assert engine.step().stepped
            engine.zero_grad()
        actual = engine.full_state_dict()
        for name, value in weights.items():
            torch.testing.assert_close(actual[name], value, atol=2e-5, rtol=0)
        engine.save_pretrained(folder)
        assert not list(folder.glob("model*"))
        model = build("Llama").eval()
        model.load_adapter(folder)
        engine.eval()
        batch = next(batches("Llama", 1))
        torch.testing.assert_close(engine(**batch).logits, model(**batch).logits.detach(), atol=2e-5, rtol=0)
