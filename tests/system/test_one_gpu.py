"""What one GPU shows beside the matrix of modes and layouts; without a GPU, the same on the CPU.

No GPU case has run yet; ``make gpu`` runs them.
"""

import contextlib
import functools
import warnings

import pytest
import torch
from families import cases, family
from pool import on_each_device, on_ranks
from reference import assert_follows, batches, small_gpt, train_engine

import paramp
from paramp.models import GPT

OPTIONS = {
    "remainders": ("16-naive", {"masters": "remainder"}),
    "remainders in bf16": ("bf16-naive", {"masters": "remainder"}),
    "checkpointed": ("bf16-mixed", {"activation_checkpointing": "full"}),
    "selective": ("16-mixed", {"activation_checkpointing": "selective"}),
    "compiled": ("32-true", {"compile": True}),
    "zero": ("bf16-mixed", {}),
}
"""A mode and what is added to its configuration, which changes how a step is computed and not what."""
LAYOUTS = {"tp2": {"tensor": 2}, "dp2": {"data": 2}, "pp2": {"pipeline": {"size": 2, "microbatches": 2}}}


def scaled(mode):
    """The precision of ``mode``, with a scale that does not overflow at first."""
    return {"mode": mode, "init_scale": 2.0**10} if mode.startswith("16") else mode


def train(device, mode, options, parallel, steps=5):
    """Losses and ways of the weights; the third step overflows, and is skipped."""
    if "compile" in options and device == "cpu":
        options = {"compile": {"backend": "eager"}}  # inductor takes long there
    config = {"precision": scaled(mode), "parallel": parallel, "clip_grad_norm": 1.0, **options}
    build = functools.partial(small_gpt, num_layers=2, init_std=0.2)
    with warnings.catch_warnings(), paramp.launch_from_torch(config, device=device) as context:
        if "compile" in options:
            warnings.simplefilter("ignore")  # those of torch's own compiler
        return train_engine(context, build, GPT.loss, steps, lr=1.0, length=8, overflow_at=2)


CASES = [(layout, name) for layout in LAYOUTS for name in OPTIONS if name != "zero" or layout == "dp2"]
PART = [("tp2", "remainders"), ("tp2", "selective"), ("pp2", "compiled"), ("dp2", "zero")]


@family
@pytest.mark.parametrize(("layout", "name"), CASES if torch.cuda.is_available() else cases("one gpu", CASES, PART, 3))
@on_ranks(2, cuda=True)
def test_two_ranks_with_an_option_follow_those_without_it(world, layout, name):
    """On one GPU they share it, over gloo."""
    mode, options = OPTIONS[name]
    parallel = LAYOUTS[layout]
    with_option = train(world.device, mode, options, {**parallel, "zero": 1} if name == "zero" else parallel)
    assert_follows(with_option, train(world.device, mode, {}, parallel), mode)


NEVER_WAITING = {
    "32-true": {},
    "16-mixed": {},
    "bf16-mixed": {},
    "16-naive": {},
    "bf16-naive": {},
    "remainders": {"masters": "remainder"},
    "checkpointed": {"activation_checkpointing": "full"},
    "accumulated": {"gradient_accumulation": 2},
    "pinned": {"gradient_accumulation": 1},
}
"""Modes, and options of ``16-naive``. ``pinned``: the batches are in the host's pinned memory."""


@contextlib.contextmanager
def waits_are_errors(device):
    """An operation that waits for the GPU raises. torch warns once that it does not see all of them."""

    def set_mode(mode):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype feature")
            torch.cuda.set_sync_debug_mode(mode)

    if device == "cuda":
        set_mode("error")
    try:
        yield
    finally:
        if device == "cuda":
            set_mode("default")


@on_each_device
@pytest.mark.parametrize("name", NEVER_WAITING)
def test_a_step_never_waits_for_the_gpu(name, device):
    """Nor does one that is skipped for an overflow."""
    precision = scaled("16-naive" if NEVER_WAITING[name] else name)
    config = {"precision": precision, "clip_grad_norm": 1.0, **NEVER_WAITING[name]}
    with paramp.launch_from_torch(config, device=device) as context:
        model = small_gpt(num_layers=2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        engine, _, _, scheduler = paramp.initialize(model, optimizer, GPT.loss, lr_scheduler=schedule)
        window = engine.config.gradient_accumulation
        place = torch.Tensor.pin_memory if name == "pinned" and device == "cuda" else lambda one: one.to(context.device)
        results = []
        for number, batch in enumerate([tuple(map(place, batch)) for batch in batches(6 * window)]):
            # the first steps make what stays
            with waits_are_errors(device if number >= 2 * window else "cpu"):
                engine.forward_backward(*batch)
                if number == 4 * window:
                    next(iter(engine.parameters())).grad.fill_(torch.inf)
                results.append(engine.step())
                engine.zero_grad()
                scheduler.step()
        ends = results[window - 1 :: window]
        assert [result.stepped for result in ends] == [True, True, True, True, False, True]
        assert [result.overflow for result in ends] == [not result.stepped for result in ends]
        assert scheduler.get_last_lr() == [1e-3 * 0.5**5]


@pytest.mark.cuda
@pytest.mark.parametrize(("source", "target"), [("cuda", "cpu"), ("cpu", "cuda")])
@pytest.mark.parametrize("mode", ["16-mixed", "16-naive"])
def test_a_checkpoint_moves_between_devices(mode, source, target, tmp_path):
    def train(engine):
        for batch in batches(2):
            loss = engine.forward_backward(*(part.to(paramp.get_context().device) for part in batch))
            assert engine.step().stepped
            engine.zero_grad()
        return loss.item()

    for device in (source, target):
        with paramp.launch_from_torch({"precision": scaled(mode)}, device=device):
            model = small_gpt(7 if device == source else 8, num_layers=1)
            engine, *_ = paramp.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-2), GPT.loss)
            if device == source:
                train(engine)
                engine.save(tmp_path / "saved", wait=source == "cuda")
                engine.finish_saving()
                weights, loss = engine.full_state_dict(), train(engine)
            else:
                engine.load(tmp_path / "saved")
                assert all(torch.equal(value, weights[name]) for name, value in engine.full_state_dict().items())
                assert train(engine) == pytest.approx(loss, rel=1e-2)
