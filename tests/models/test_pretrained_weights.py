"""Folders of Hugging Face models: written from every layout, and read shard by shard."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from pool import on_ranks, shared_folder
from torch import nn
from trainer_runs import quiet

import paramp

pytest.importorskip("transformers")

from pretrained import batches, build

LAYOUTS = {
    "tp2": {"tensor": 2},
    "pp2": {"pipeline": {"size": 2, "microbatches": 2}},
    "zero": {"data": 2, "zero": 1},
    "fsdp2": {"data": {"shard": 2}},
    "cp2": {"context": 2},
}


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05)


def reloaded(name, folder):
    return reloaded_as(build(name), folder)


def reloaded_as(model, folder):
    with quiet():
        return type(model).from_pretrained(folder)


SAVED = [("Mixtral", "tp2"), ("T5", "pp2"), ("Qwen2", "zero"), ("T5", "fsdp2"), ("Qwen2", "cp2")]


@pytest.mark.parametrize(("name", "layout"), SAVED)
@on_ranks(2)
def test_logits_after_reload_are_the_engines(world, name, layout):
    """With fused experts, which are stored one by one, and with tied weights on two stages."""
    folder, mode = (
        shared_folder() / "model",
        "32-true" if layout == "pp2" or name == "Mixtral" else "16-naive",
    )  # rounding changes the routing
    batch = next(batches(name, 1))
    with paramp.launch_from_torch({"parallel": LAYOUTS[layout], "precision": mode}):
        given = build(name)
        engine, *_ = paramp.initialize(given, sgd)
        engine.forward_backward(batch)
        engine.step()
        engine.save_pretrained(folder)
        engine.eval()
        model = reloaded(name, folder)
        assert model.dtype == torch.float32
        for key, value in engine.full_state_dict().items():
            assert torch.equal(model.state_dict()[key], value), key
        tolerance = 2e-5 if mode == "32-true" else 2e-2
        torch.testing.assert_close(engine(**batch).logits, model(**batch).logits.detach(), atol=tolerance, rtol=0)
        if layout not in ("zero", "cp2"):
            with pytest.raises(RuntimeError, match=r"part of the model only; call engine\.save_pretrained\(folder\)"):
                engine.module.save_pretrained(folder)
            with pytest.raises(RuntimeError, match=r"engine\.save_pretrained\(folder\)"):
                given.save_pretrained(folder / "given")
            given.save_pretrained(folder / f"given{world.rank}", state_dict=engine.full_state_dict())
        engine.save_pretrained(folder, dtype=torch.float16)
        assert reloaded(name, folder).dtype == torch.float16


@on_ranks(2)
def test_errors_of_saving_are_on_every_rank(world):
    folder = shared_folder()
    with paramp.launch_from_torch({"parallel": {"tensor": 2}}):
        model = build("Llama")
        model.model.norm.weight.data[0] = 1e5
        engine, *_ = paramp.initialize(model, sgd)
        with pytest.raises(paramp.ConfigError, match=r"dtype: got torch\.int8"):
            engine.save_pretrained(folder, dtype=torch.int8)
        engine.save_pretrained(folder / "kept", dtype=torch.bfloat16)
        with pytest.raises(
            paramp.ConfigError, match=r"dtype: model.norm.weight has values up to 100000, which overflow"
        ):
            engine.save_pretrained(folder / "kept", dtype=torch.float16)
        assert reloaded("Llama", folder / "kept").model.norm.weight[0] == torch.tensor(1e5).bfloat16()
        (folder / "file").touch()
        with pytest.raises(OSError if world.rank == 0 else RuntimeError, match="file"):
            engine.save_pretrained(folder / "file" / "model")
    with paramp.launch_from_torch():
        engine, *_ = paramp.initialize(nn.Sequential(nn.Linear(2, 2)), sgd)
        with pytest.raises(paramp.ConfigError, match="got Sequential, expected a Hugging Face model"):
            engine.save_pretrained(folder)


def on_meta(model, folder):
    """What ``from_pretrained(folder, device_map="meta")`` of the class of ``model`` returns, which needs accelerate."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    kind = type(model)
    config = type(model.config).from_pretrained(folder)
    config.name_or_path = str(folder)
    with torch.device("meta"):
        model = kind(config)
    model._weight_conversions = get_model_conversion_mapping(model)
    return model


@pytest.mark.parametrize(("name", "layout"), [("Mixtral", "tp2"), ("Qwen2", "pp2"), ("LLaVA", "pp2")])
@on_ranks(2)
def test_a_model_on_meta_gets_its_files_values(world, name, layout):
    folder = shared_folder()
    source = build(name)
    if world.rank == 0:
        source.save_pretrained(folder, max_shard_size="100KB")
    dist.barrier()
    assert len(list(Path(folder).glob("*.safetensors"))) > 1
    with paramp.launch_from_torch({"parallel": LAYOUTS[layout]}):
        engine, *_ = paramp.initialize(on_meta(source, folder), sgd)
        actual = engine.full_state_dict()
        for key, value in source.state_dict().items():
            assert torch.equal(actual[key], value), key
        for key, value in engine.module.named_buffers():  # tables of positions, which are in no file
            assert torch.equal(value, source.get_buffer(key)), key
        batch = next(batches(name, 1))
        loss = source.eval()(**batch).loss.item()
        assert engine.evaluate(batch).item() == pytest.approx(loss, abs=1e-5)


def test_a_tensor_that_is_in_no_file_is_initialised_and_a_missing_file_named(tmp_path):
    build("Llama").model.save_pretrained(tmp_path)  # without the head
    with paramp.launch_from_torch():
        engine, *_ = paramp.initialize(on_meta(build("Llama"), tmp_path), sgd)
        assert engine.module.lm_head.weight.std().item() == pytest.approx(0.02, rel=0.1)
        expected = build("Llama").model.layers[0].mlp.up_proj.weight
        assert torch.equal(engine.module.model.layers[0].mlp.up_proj.weight, expected)
        model = on_meta(build("Llama"), tmp_path)
        (tmp_path / "model.safetensors").unlink()
        with pytest.raises(paramp.ConfigError, match=r"LlamaForCausalLM is on the meta device, and was loaded from '/"):
            paramp.initialize(model, sgd)
