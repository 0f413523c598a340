"""MoEGPT: its arithmetic by hand, and its gradients on layouts, with a balance over the tokens of the whole batch."""

import functools
import warnings
from contextlib import nullcontext
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from families import cases, family, rarely
from pool import on_ranks, run_on_ranks
from reference import SMALL_MOE, batches, farthest, small_moe
from small_engines import engine_of, own_part

import paramp
from paramp.base.dtensor import local
from paramp.models.moe_gpt import _has_grouped_product, product_by_group

LR = 8.0
"""So large that a weight's change shows its gradient to the last bits."""


def by_hand(state, tokens, targets):
    """The loss of ``small_moe`` in training, from its state dict: each expert on all tokens, masked."""
    x = state["embedding.tokens.weight"][tokens] + state["embedding.positions.weight"][: tokens.shape[1]]
    of_routers = 0.0
    for layer in range(SMALL_MOE.num_layers):
        at = {name.removeprefix(f"blocks.{layer}."): value for name, value in state.items()}
        heads = F.linear(norm(x, at, "norm1"), at["attention.qkv.weight"], at["attention.qkv.bias"])
        query, key, value = heads.unflatten(-1, (4, 3, 8)).permute(3, 0, 2, 1, 4)
        mixed = (query @ key.mT / 8**0.5 + torch.full((16, 16), -torch.inf).triu(1)).softmax(-1) @ value
        x = x + F.linear(mixed.transpose(1, 2).flatten(2), at["attention.out.weight"], at["attention.out.bias"])
        h = norm(x, at, "norm2").flatten(0, 1)
        logits = h @ at["mlp.router.scores.weight"].T
        shares = logits.exp() / logits.exp().sum(1, keepdim=True)
        chosen = torch.zeros_like(shares).scatter_(1, shares.argsort(1, descending=True)[:, :2], 1.0)
        weights = shares * chosen / (shares * chosen).sum(1, keepdim=True)
        outputs = []
        for up, down in zip(at["mlp.experts.gate_up_proj"], at["mlp.experts.down_proj"], strict=True):
            gate, value = (h @ up.T).chunk(2, 1)
            outputs.append((gate * gate.sigmoid() * value) @ down.T)
        x = x + (torch.stack(outputs, 1) * weights[..., None]).sum(1).view_as(x)
        balance = 4 * (chosen.mean(0) / 2 * shares.mean(0)).sum()
        of_routers = of_routers + 0.5 * balance + 0.05 * logits.exp().sum(1).log().square().mean()
    logits = norm(x, state, "norm") @ state["head.weight"].T
    return F.cross_entropy(logits[..., :120].flatten(0, 1), targets.flatten()) + of_routers


def norm(x, state, name):
    centred = x - x.mean(-1, keepdim=True)
    scaled = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    return scaled * state[f"{name}.weight"] + state[f"{name}.bias"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_loss_and_gradients_are_those_by_hand(dtype):
    """In fp32 by ``F.grouped_mm``, in fp64 by a product for each expert."""
    model = small_moe().to(dtype)
    x, y = next(batches(1))
    loss = model.loss(model(x), y)
    loss.backward()
    leaves = {name: value.detach().double().requires_grad_() for name, value in model.named_parameters()}
    expected = by_hand(leaves | {"head.weight": leaves["embedding.tokens.weight"]}, x, y)
    expected.backward()
    close = {"rtol": 1e-10, "atol": 1e-12} if dtype is torch.float64 else {"rtol": 1e-4, "atol": 1e-6}
    torch.testing.assert_close(loss.double(), expected, **close)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            parameter.grad.double(), leaves[name].grad, **close, msg=lambda m, n=name: f"{n} {m}"
        )


def test_there_are_no_losses_of_routers_in_evaluation():
    model = small_moe().eval()
    x, y = next(batches(1))
    logits, of_routers = model(x)
    assert of_routers == 0
    assert model.loss((logits, of_routers), y) == F.cross_entropy(logits.flatten(0, 1), y.flatten())


def test_a_product_by_group_takes_any_sizes_and_groups_without_rows():
    torch.manual_seed(0)
    rows, ends = torch.randn(7, 6), torch.tensor([3, 3, 7], dtype=torch.int32)
    weights = torch.randn(3, 5, 6)
    found = product_by_group(rows, weights, ends)
    torch.testing.assert_close(found, torch.cat([rows[:3] @ weights[0].T, rows[3:] @ weights[2].T]))


@pytest.mark.parametrize(
    ("dtype", "width", "gpu", "grouped"),
    [
        (torch.float32, 16, None, True),
        (torch.bfloat16, 16, (8, 0), True),
        (torch.float64, 16, None, False),
        (torch.float32, 12, None, False),
        (torch.bfloat16, 16, (7, 5), False),
    ],
)
def test_there_is_one_product_for_each_expert_where_torch_has_no_grouped_one(monkeypatch, dtype, width, gpu, grouped):
    """For GPUs, which are not here, by what torch says of them."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: gpu)
    rows = SimpleNamespace(dtype=dtype, device=torch.device("cuda:1" if gpu else "cpu"))
    assert _has_grouped_product(rows, torch.empty(3, 8, width)) is grouped
    assert not _has_grouped_product(rows, torch.empty(3, 12, width))
    if gpu is None:
        whole, single = (mock.patch.object(F, name, wraps=getattr(F, name)) for name in ("grouped_mm", "linear"))
        ends = torch.tensor([3, 3, 7], dtype=torch.int32)
        with whole as of_all, single as of_one:
            product_by_group(torch.ones(7, width, dtype=dtype), torch.ones(3, 8, width, dtype=dtype), ends)
        assert (of_all.call_count, of_one.call_count) == ((1, 0) if grouped else (0, 3))


@pytest.mark.parametrize("backend", rarely(["eager", "aot_eager"], "eager"))
def test_compiled_blocks_have_the_gradients_of_others(backend):
    """torch compiles the product of groups in bf16 only, so that it runs outside of the graphs, which is said."""
    x, y = next(batches(1))
    gradients = []
    for compiled in (False, {"backend": backend}):
        with paramp.launch_from_torch({"compile": compiled}):
            model = small_moe()
            engine = engine_of(model, model.loss)
            with pytest.warns(UserWarning, match="a MixtureBlock, breaks at") if compiled else nullcontext():
                engine.forward_backward(x, y)
            gradients.append({name: parameter.grad.clone() for name, parameter in engine.named_parameters()})
    for name, expected in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], expected, rtol=1e-4, atol=1e-6, msg=name)


LAYOUTS = {
    "dp4": {"data": 4},
    "ep2": {"data": 2, "expert": 2},
    "ep4": {"expert": 4},
    "dp2·ep2 + zero1": {"data": 4, "expert": 2, "zero": 1},
    "tp2": {"data": 1, "tensor": 2},
    "dp2·tp2 + sp": {"data": 2, "tensor": 2, "sequence_parallel": True},
    "ep2·tp2": {"expert": 2, "tensor": 2},
    "ep2·tp2 + sp": {"expert": 2, "tensor": 2, "sequence_parallel": True},
    "ep2·pp2": {"expert": 2, "pipeline": {"size": 2, "schedule": "gpipe"}},
    "dp2·pp2": {"data": 2, "pipeline": {"size": 2, "schedule": "gpipe"}},
    "fsdp4": {"data": {"shard": 4}},
    "fsdp2·tp2": {"data": {"shard": 2}, "tensor": 2},
    "fsdp2·pp2": {"data": {"shard": 2}, "pipeline": {"size": 2, "schedule": "gpipe"}},
    "fsdp2·ep2": {"data": {"shard": 4}, "expert": 2},
}
RANKS_OF_TWO = ("ep2", "tp2")


def expected_gradients(x, y):
    """In fp64 on one process, with the whole batch as one microbatch."""
    model = small_moe().double()
    model.loss(model(x), y).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def check_gradients(layout, **options):
    x, y = next(batches(1))
    before = small_moe().state_dict()
    with paramp.launch_from_torch({"parallel": LAYOUTS[layout], **options}) as context:
        expected = expected_gradients(x, y)
        model = small_moe()
        engine = engine_of(model, model.loss, functools.partial(torch.optim.SGD, lr=LR))
        engine.forward_backward(*own_part(context, x, y))
        norm = torch.nn.utils.get_total_norm(expected.values()).item()
        assert float(engine.step().grad_norm) == pytest.approx(norm, rel=1e-6), layout
        found = {key: (before[key].double() - value.double()) / LR for key, value in engine.full_state_dict().items()}
        assert (worst := farthest(found, expected))[0] < 1e-5, (layout, worst)
        stacks = [one for key, one in engine.module.named_parameters() if key.endswith("experts.down_proj")]
        size = 4 if layout == "fsdp2·ep2" else LAYOUTS[layout].get("expert", 1)
        assert all(local(one).shape[0] * size == one.shape[0] == 4 for one in stacks if size > 1)


COMPILED = [
    (layout, mode)
    for layout in ("ep2", "dp4", "ep2·tp2", "ep2·pp2", "dp2·ep2 + zero1", "fsdp2·ep2")
    for mode in ("32-true", "bf16-mixed")
]


def check_compiled(world, layout, mode):
    """Experts over ranks break the graph, which is said once, and the rest of each block is compiled."""
    gradients, x_y = [], next(batches(1))
    for compiled in (False, {"backend": "aot_eager"}):
        options = {"parallel": LAYOUTS[layout], "precision": mode, "compile": compiled}
        with paramp.launch_from_torch(options) as context, warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            model = small_moe()
            engine = engine_of(model, model.loss)
            engine.forward_backward(*own_part(context, *x_y))
            text = "\n".join(str(one.message) for one in warned)
            reports = compiled and context.batch_axis.rank == 0 and context.tensor_axis.rank == 0
            assert ("a MixtureBlock, breaks at" in text) == bool(reports), text
            assert "runs eagerly" not in text, text
            gradients.append({name: local(one.grad).float() for name, one in engine.named_parameters()})
    of_size = {"32-true": 1e-5, "bf16-mixed": 1e-2}[mode]
    for name, expected in gradients[0].items():
        assert (gradients[1][name] - expected).norm() <= of_size * expected.norm() + 1e-9, name


@family
@pytest.mark.parametrize(("layout", "mode"), cases("compiled experts", COMPILED, [("ep2", "bf16-mixed")], 1))
def test_compiled_blocks_with_experts_over_ranks_have_the_gradients_of_others(layout, mode):
    run_on_ranks(2 if layout == "ep2" else 4, __name__, "check_compiled", {"layout": layout, "mode": mode})


ON_FOUR = [name for name in LAYOUTS if name not in RANKS_OF_TWO]


@family
@pytest.mark.parametrize("layout", cases("moe layouts", ON_FOUR, ["dp2·ep2 + zero1", "ep2·pp2", "dp2·tp2 + sp"], 2))
@on_ranks(4)
def test_gradients_are_those_of_one_process(world, layout):
    check_gradients(layout)


@on_ranks(2)
def test_gradients_are_those_of_one_process_on_two_ranks(world):
    for layout in RANKS_OF_TWO:
        check_gradients(layout)
    check_gradients("ep2", activation_checkpointing="full")
