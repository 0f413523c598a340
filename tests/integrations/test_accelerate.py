"""Accelerate with paramp's scaler, clipping and skipping, against plain torch in one process."""

import copy
import gc
import pickle
import warnings
import weakref
from contextlib import contextmanager
from unittest import mock

import pytest
import small_mlp
import torch
from accelerating import LAYOUTS, accelerating
from families import cases, family
from pages import code_of, difference_of
from pool import World, on_ranks, shared_folder
from reference import whole
from small_mlp import batch, tensor_parallel
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from trainer_runs import INF, LR, MAX_NORM, ROUNDING, SCALE, STEPS, check_weights, in_plain_torch, spoil

import paramp
from paramp.integrations.accelerate import adopt

OVERFLOWS = 3
ALONE = World(0, 1, "cpu")
arguments = pytest.mark.parametrize


class MLP(small_mlp.MLP):
    """With a residual connection, without which FSDP2 warns of a view."""

    def forward(self, x):
        return x + super().forward(x)


def build():
    torch.manual_seed(4)
    return MLP()


def sharded(accelerator, model):
    """``model`` as it is given to ``prepare``: with a tensor axis, two of its layers are sharded."""
    config = accelerator.parallelism_config
    if config is not None and config.tp_enabled:
        tensor_parallel(model, accelerator.torch_device_mesh["tp"])
        model.tp_size = config.tp_size
    return model


def data_place(accelerator, world):
    """Which part of the batch this rank has, and of how many."""
    config = accelerator.parallelism_config
    tensor = config.tp_size if config is not None else 1
    return world.rank // tensor, world.size // tensor


def weights(model):
    return {name.removeprefix("module."): whole(value.detach()).clone() for name, value in model.named_parameters()}


def unchanged(model, before):
    return all(torch.equal(before[name], value) for name, value in weights(model).items())


def scaling(**options):
    from accelerate.utils import GradScalerKwargs

    return {"kwargs_handlers": [GradScalerKwargs(init_scale=SCALE, growth_interval=2, **options)]}


def dtypes_of_layer(model):
    """The dtypes that its first layer will return."""
    seen = []
    getattr(model, "module", model).up.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    return seen


def train(accelerator, world, *, adopt_late=False):
    """Losses of the whole batch, norms before clipping, scales and whole weights."""
    if not adopt_late:
        adopt(accelerator)
    model = sharded(accelerator, build())
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    assert adopt(accelerator) is adopt(accelerator) is accelerator
    seen = dtypes_of_layer(model)
    losses, norms, scales, skipped = [], [], [], []
    for step in range(STEPS):
        x, y = batch(step, *data_place(accelerator, world))
        output = model(x)
        assert output.dtype is torch.float32
        loss = nn.functional.mse_loss(output, y)
        accelerator.backward(loss)
        if step == OVERFLOWS and world.rank == world.size - 1:
            spoil(next(iter(optimizer.param_groups[0]["params"])).grad)
        norms.append(accelerator.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        before = weights(model)
        optimizer.step()
        schedule.step()
        skipped.append(accelerator.optimizer_step_was_skipped)
        assert not skipped[-1] or unchanged(model, before)
        optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach().view(1)).mean().item())
        scales.append(accelerator.loss_scale)
    dtypes = {"fp16": torch.float16, "bf16": torch.bfloat16, "no": torch.float32}
    assert set(seen) == {dtypes[accelerator.mixed_precision]}
    assert skipped == [step == OVERFLOWS for step in range(STEPS)]
    assert accelerator.num_skipped == 1
    assert schedule.scheduler.last_epoch == (STEPS - 1) * world.size
    return losses, norms, scales, weights(model)


EVERYTHING = [
    (size, layout, precision, late)
    for size in (2, 4)
    for layout in LAYOUTS
    for precision in ("fp16", "bf16", "no")
    for late in (False, True)
    if (size == 4 or layout in ("ddp", "fsdp", "tp")) and not (layout == "fsdp-tp" and late)  # which it cannot
]
PART = [(2, "ddp", "fp16", True), (2, "fsdp", "fp16", False), (2, "tp", "bf16", False), (4, "fsdp-tp", "fp16", False)]


@family
@arguments(("size", "layout", "precision", "late"), cases("accelerate", EVERYTHING, PART, 2))
@on_ranks(lambda size, **_: size)
def test_losses_norms_and_weights_are_those_of_one_process(world, size, layout, precision, late):
    with accelerating(world, layout, precision, **scaling()) as accelerator:
        losses, norms, scales, found = train(accelerator, world, adopt_late=late)
    expected_losses, expected_norms, expected = in_plain_torch(build, overflow=OVERFLOWS)
    tolerance = {"fp16": 2e-3, "bf16": 2e-2, "no": 1e-5}[precision]
    torch.testing.assert_close(losses, expected_losses, rtol=tolerance, atol=tolerance)
    norms.pop(OVERFLOWS), expected_norms.pop(OVERFLOWS)
    torch.testing.assert_close(norms, expected_norms, rtol=5 * tolerance, atol=tolerance)
    check_weights(found, expected, dict(build().named_parameters()), ROUNDING[precision])
    fp16 = [SCALE, 2 * SCALE, 2 * SCALE, SCALE, SCALE, 2 * SCALE]
    assert scales == (fp16 if precision == "fp16" else [1.0] * STEPS)


class Loss(MLP):
    """Computes its loss itself, as Hugging Face models do."""

    def forward(self, x):
        return super().forward(x).float().square().mean() / 4096


@on_ranks(2)
def test_a_loss_of_the_model_does_not_overflow_at_65536_under_fsdp2(world):
    """Accelerate lets FSDP2 cast it to fp16, and so its gradient, which is the scale."""
    with accelerating(world, "fsdp", "fp16") as accelerator:
        torch.manual_seed(4)
        model = Loss()
        adopt(accelerator).prepare_model(model, evaluation_mode=True)  # it is not sharded yet
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=LR))
        accelerator.backward(model(batch(0, world.rank, world.size)[0]))
        optimizer.step()
        assert (accelerator.loss_scale, accelerator.num_skipped) == (65536, 0)


# ------------------------------------------------------------------------------------------------- checkpoints


def prepared(accelerator, **options):
    model = sharded(accelerator, build())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **options)
    return accelerator.prepare(model, optimizer)


def steps(accelerator, world, model, optimizer, which):
    for step in which:
        x, y = batch(step, *data_place(accelerator, world))
        output = model(x).float()  # of plain Accelerate in fp16 with FSDP2 it is fp16
        accelerator.backward(nn.functional.mse_loss(output, y))
        optimizer.step()
        optimizer.zero_grad()


def quietly():
    """Without the warnings that torch gives of what Accelerate does for checkpoints under FSDP2."""
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
    warnings.filterwarnings("ignore", category=UserWarning, module="torch|accelerate")
    warnings.filterwarnings("ignore", "TypedStorage is deprecated")


RESUMES = [*((2, layout) for layout in ("ddp", "fsdp")), *((4, layout) for layout in LAYOUTS if layout != "tp")]


@family
@arguments(("size", "layout"), cases("accelerate-resume", RESUMES, [(2, "fsdp")], 1))
@on_ranks(lambda size, **_: size)
def test_resume_at_the_same_scale(world, size, layout):
    folder = str(shared_folder())
    with accelerating(world, layout, "fp16", **scaling()) as accelerator:
        quietly()
        model, optimizer = prepared(adopt(accelerator))
        steps(accelerator, world, model, optimizer, range(3))
        accelerator.save_state(folder)
        accelerator.wait_for_everyone()  # other ranks return before the main one has written
        saved = accelerator.scaler.state_dict()
        assert (saved["scale"], saved["_growth_tracker"]) == (2 * SCALE, 1)
        steps(accelerator, world, model, optimizer, range(3, 5))
        expected = weights(model)
    with accelerating(world, layout, "fp16", **scaling()) as accelerator:
        quietly()
        model, optimizer = prepared(adopt(accelerator))
        for _ in range(2):  # in a new process, and in one that has trained
            accelerator.load_state(folder)
            assert accelerator.scaler.state_dict() == saved
            steps(accelerator, world, model, optimizer, range(3, 5))
            assert accelerator.scaler.state_dict() == saved | {"scale": 4 * SCALE}
            assert unchanged(model, expected)


# ------------------------------------------------------------- what Accelerate does without paramp (tested: 1.15.0)
# If one of these fails, Accelerate has mended it, and docs/from-accelerate.md has to say so.


def with_torchs_scaler(accelerator):
    """Give ``accelerator`` what it has with fp16 on GPUs."""
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=2)
    accelerator.native_amp = True


@on_ranks(2)
def test_accelerate_4289_plain_accelerate_changes_the_scale_at_load(world):
    folder, states = str(shared_folder()), []
    for run in (0, 1):
        with accelerating(world, "fsdp", "fp16") as accelerator:
            quietly()
            with_torchs_scaler(accelerator)
            model, optimizer = prepared(accelerator)
            if run == 0:
                steps(accelerator, world, model, optimizer, range(3))
                accelerator.save_state(folder)
                accelerator.wait_for_everyone()
            else:
                accelerator.load_state(folder)
            states.append(accelerator.scaler.state_dict())
    one_more = {"scale": 4 * SCALE, "_growth_tracker": 0}  # the second good step at a scale that grows after two
    assert (states[0]["scale"], states[0]["_growth_tracker"]) == (2 * SCALE, 1)
    assert states[1] == states[0] | one_more, "accelerate #4289 is mended: say so in the docs"


@on_ranks(2)
def test_accelerate_4219_plain_accelerate_cannot_clip_plain_tensors_beside_dtensors(world):
    with accelerating(world, "tp", "fp16") as accelerator:
        with_torchs_scaler(accelerator)
        model, _ = prepared(accelerator)
        accelerator.backward(model(batch(0)[0]).square().mean())
        with pytest.raises(RuntimeError, match=r"got mixed torch\.Tensor and DTensor"):
            accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
        refuses = r"save_state: with tensor parallelism alone.*accelerator\.scaler\.state"
        with pytest.raises(paramp.ConfigError, match=refuses):
            adopt(accelerator).save_state("nowhere")


@on_ranks(4)
def test_plain_accelerate_cannot_prepare_tensor_parallelism_with_fsdp2(world):
    with accelerating(world, "fsdp-tp", "no") as accelerator, pytest.raises(ImportError, match="ReplicateParallel"):
        prepared(accelerator)


@contextmanager
def alone(precision="fp16", *, adopted=True, optimizer=None, **options):
    """In one process: the accelerator, a model and its optimizer."""
    with accelerating(ALONE, "ddp", precision, **scaling() | options) as accelerator:
        if adopted:
            adopt(accelerator)
        yield accelerator, *prepared(accelerator, **optimizer or {})


def backward(accelerator, model, *, factor=1.0, spoilt=None):
    """One backward; ``spoilt`` is written into one element of its gradients."""
    accelerator.backward(model(batch(0)[0]).sum() * factor)
    if spoilt is not None:
        model.up.bias.grad[0] = spoilt


def test_plain_accelerate_ignores_fp16_on_cpus_and_steps_on_nan_in_bf16():
    with alone(adopted=False) as (accelerator, model, _):
        seen = dtypes_of_layer(model)
        model(batch(0)[0])
        assert (accelerator.scaler, seen) == (None, [torch.float32])
    with alone("bf16", adopted=False) as (accelerator, model, optimizer):
        backward(accelerator, model, factor=INF)
        optimizer.step()
        assert not accelerator.optimizer_step_was_skipped
        assert model.down.bias.isnan().any()


# ---------------------------------------------------------------------------------------------------- clipping


@family
@arguments("layout", cases("accelerate-clip", ["tp", "fsdp-tp", "hsdp"], ["fsdp-tp"], 1))
@on_ranks(4)
def test_clipping_is_that_of_one_process(world, layout):
    single = build()
    nn.functional.mse_loss(single(batch(0)[0]), batch(0)[1]).backward()
    with accelerating(world, layout, "fp16", **scaling()) as accelerator:
        model, _ = prepared(adopt(accelerator))
        x, y = batch(0, *data_place(accelerator, world))

        def gradients(part):
            model.zero_grad()
            accelerator.backward(nn.functional.mse_loss(model(x), y))
            return [*model.parameters()][part], [one.grad.clone() for one in [*single.parameters()][part]]

        def check(parameters, expected):
            for parameter, gradient in zip(parameters, expected, strict=True):
                torch.testing.assert_close(whole(parameter.grad), gradient, rtol=1e-2, atol=2e-4)

        for part in (slice(None), slice(1, 4)):
            for norm_type in (2, 1.0, INF):
                parameters, expected = gradients(part)
                norm = accelerator.clip_grad_norm_(parameters, 0.05, norm_type)
                reference = nn.utils.get_total_norm(expected, norm_type)
                assert norm.item() == pytest.approx(reference.item(), rel=5e-3)
                check(parameters, [gradient * (0.05 / reference).clamp(max=1) for gradient in expected])
        parameters, expected = gradients(slice(None))
        accelerator.clip_grad_value_(parameters, 0.01)
        check(parameters, [gradient.clamp(-0.01, 0.01) for gradient in expected])


@on_ranks(2)
def test_gradients_that_ranks_have_not_exchanged_are_clipped_by_their_own_norm(world):
    """As in LocalSGD."""
    with accelerating(world, "ddp", "fp16", **scaling()) as accelerator:
        model, _ = prepared(adopt(accelerator))
        with accelerator.no_sync(model):
            accelerator.backward((1 + world.rank) * model(batch(0)[0]).square().mean())
        accelerator.unscale_gradients()
        for norm_type in (2, INF):
            own = nn.utils.get_total_norm([one.grad for one in model.parameters()], norm_type)
            assert accelerator.clip_grad_norm_(model.parameters(), 0.1 * own.item(), norm_type) == pytest.approx(own)
        if world.rank == 1:
            next(model.parameters()).grad.fill_(INF)
        for norm_type in (2, INF):  # a norm that is not finite is every rank's
            assert not accelerator.clip_grad_norm_(model.parameters(), 1.0, norm_type).isfinite()


# ------------------------------------------------------------------------------------------------- one process


def test_fp16_on_a_cpu_is_reported_once(caplog):
    from paramp.integrations import accelerate

    accelerate._report_cpu.cache_clear()
    for _ in range(2):
        with alone() as (accelerator, model, _):
            seen = dtypes_of_layer(model)
            output = model(batch(0)[0])
            assert (seen, output.dtype) == ([torch.float16], torch.float32)
            with accelerator.autocast():
                assert nn.functional.linear(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.float16
                assert torch.ones(2, 2).half().softmax(0).dtype is torch.float32  # as on CUDA
            assert accelerator.unwrap_model(model, keep_fp32_wrapper=False) is model
            model(batch(0)[0])
            assert seen[-1] is torch.float32
    (message,) = (record.message for record in caplog.records if record.name.startswith("paramp"))
    assert "mixed_precision='fp16' on a CPU" in message


@contextmanager
def two_of_one_scale():
    """An adopted accelerator, two models of one output, and an optimizer of each."""
    with accelerating(ALONE, "ddp", "fp16", **scaling()) as accelerator:
        models = nn.Linear(2, 1), nn.Linear(2, 1)
        optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for model in models]
        yield adopt(accelerator), *accelerator.prepare(*models, *optimizers)


ONES = torch.ones(1, 2)


READINGS = (lambda one: one.loss_scale, lambda one: one.scaler.get_scale(), lambda one: one.scaler.state_dict())


@arguments("overflow", [None, 0, 1])
@arguments("reading", READINGS)
def test_reading_the_scale_between_two_steps_changes_nothing(reading, overflow):
    with two_of_one_scale() as (accelerator, one, two, first, second):
        for count in (1, 2, 3):
            before = two.weight.detach().clone()
            accelerator.backward((one(ONES) + two(ONES)).sum())
            if overflow is not None and count == 2:
                (one, two)[overflow].weight.grad.fill_(INF)
            gradient = two.weight.grad.clone()
            first.step()
            reading(accelerator)
            assert torch.equal(two.weight.grad, gradient)
            second.step()
            assert [first.step_was_skipped, second.step_was_skipped] == [count == 2 and overflow == i for i in (0, 1)]
            torch.testing.assert_close(two.weight.detach(), before - float(not second.step_was_skipped))
            first.zero_grad()
            second.zero_grad()
        # It grows after 2 steps without an overflow, and each backward counts once.
        expected = (2 * SCALE, 1) if overflow is None else (SCALE / 2, 1)
        state = accelerator.scaler.state_dict()
        assert (state["scale"], state["_growth_tracker"], accelerator.num_skipped) == (*expected, overflow is not None)


def test_two_optimizers_share_one_scale():
    """The gradients of one, unscaled before the scale changes, are not divided again; backwards may follow clipping."""
    with two_of_one_scale() as (accelerator, one, two, first, second):
        before = two.weight.detach().clone()
        accelerator.backward((one(ONES) + two(ONES)).sum())
        two.weight.grad.fill_(SCALE)
        one.weight.grad.fill_(INF)
        accelerator.clip_grad_norm_(two.parameters(), 100.0)
        first.step()
        assert (first.step_was_skipped, accelerator.loss_scale) == (True, SCALE / 2)
        second.step()
        torch.testing.assert_close(two.weight.detach(), before - 1)
        first.zero_grad()
        second.zero_grad()
        for _ in range(2):
            accelerator.backward(two(ONES).sum())
            norm = accelerator.clip_grad_norm_(two.parameters(), 100.0)
        torch.testing.assert_close(two.weight.grad, 2 * ONES)
        assert norm.item() == pytest.approx(12**0.5)
        second.zero_grad()
        accelerator.backward(two(ONES).sum())
        accelerator.clip_grad_value_(two.weight, 0.5)
        torch.testing.assert_close(two.weight.grad, 0.5 * ONES)


def test_an_optimizer_that_steps_after_three_backwards_has_the_sum_of_them():
    """The scale has grown before the third, as another one has stepped after each."""
    with two_of_one_scale() as (accelerator, one, two, first, second):
        before = two.weight.detach().clone()
        for _ in range(3):
            accelerator.backward((one(ONES) + two(ONES)).sum())
            first.step()
            first.zero_grad()
        second.step()
        assert (first.step_was_skipped, second.step_was_skipped) == (False, False)
        torch.testing.assert_close(two.weight.detach(), before - 3)


@arguments("free", ["free_memory", "clear"])
def test_freed_optimizers_are_released_and_the_scale_stays(free):
    with alone() as (accelerator, model, optimizer):
        backward(accelerator, model, factor=INF)
        optimizer.step()
        held = weakref.ref(optimizer.optimizer)
        model, optimizer = getattr(accelerator, free)(model, optimizer)
        gc.collect()
        assert held() is None
        assert accelerator.loss_scale == SCALE / 2


@arguments("precision", ["fp16", "bf16", "no"])
def test_value_clipping_does_not_hide_an_overflow(precision):
    """In a step, in the first backward of an accumulation; a batch that is left out is forgotten."""
    with alone(precision) as (accelerator, model, optimizer):
        for overflows, left_out in (([True], False), ([True, False], False), ([True, False], True)):
            before = weights(model)
            for overflow in overflows:
                backward(accelerator, model, spoilt=-INF if overflow else None)
                accelerator.clip_grad_value_(model.parameters(), 1.0)
                if overflow and left_out:
                    optimizer.zero_grad()
            optimizer.step()
            optimizer.zero_grad()
            assert optimizer.step_was_skipped is unchanged(model, before) is not left_out


@arguments("late", [False, True])
def test_a_deep_copy_computes_with_its_own_weights(late):
    with alone(adopted=not late) as (accelerator, model, _):
        adopt(accelerator)
        copied = copy.deepcopy(model)
        before = copied(batch(0)[0])
        with torch.no_grad():
            model.down.bias.fill_(100.0)
        assert torch.equal(copied(batch(0)[0]), before)
        assert model(batch(0)[0]).min() > 50
        inner = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
        assert (inner.forward.__self__, inner.forward.__func__) == (model, MLP.forward)


def test_a_closure_is_called_once_and_its_gradients_are_checked():
    with alone("no") as (accelerator, model, optimizer):
        calls = []

        def closure():
            calls.append(optimizer.zero_grad())
            backward(accelerator, model, factor=INF if len(calls) == 1 else 1.0)

        for count in (1, 2):
            optimizer.step(closure)
            assert (len(calls), accelerator.num_skipped) == (count, 1)
            assert accelerator.optimizer_step_was_skipped == (count == 1)


def test_a_step_without_a_scaled_loss_does_not_change_the_scale():
    """torch's get_optimizer_state_dict steps once with zeros; that is how accelerate #4289 comes about."""
    with alone() as (accelerator, model, optimizer):
        before = accelerator.scaler.state_dict()
        for _ in range(3):
            get_optimizer_state_dict(model, optimizer)
            optimizer.optimizer.state.clear()
        assert accelerator.scaler.state_dict() == before
        steps(accelerator, ALONE, model, optimizer, range(1))
        assert accelerator.scaler.state_dict() == before | {"_growth_tracker": 1}


def test_options_of_grad_scaler_kwargs_apply():
    """As in Accelerate's tests/test_kwargs_handlers.py, test_grad_scaler_kwargs, which needs a GPU."""
    with alone(**scaling(growth_factor=3.0, backoff_factor=0.25)) as (accelerator, *_):
        scaler = accelerator.scaler
        assert (scaler._init_scale, scaler._growth_factor, scaler._backoff_factor) == (SCALE, 3.0, 0.25)
        assert (scaler._growth_interval, scaler._enabled, scaler.is_enabled()) == (2, True, True)
    with alone(**scaling(enabled=False)) as (accelerator, model, optimizer):
        assert not accelerator.scaler.is_enabled()
        assert accelerator.scaler.scale(torch.ones(())) == 1
        backward(accelerator, model, factor=INF)
        optimizer.step()
        assert accelerator.optimizer_step_was_skipped


def test_copies_of_an_optimizer_skip_too():
    with alone() as (accelerator, _, optimizer):
        for copied in (pickle.loads(pickle.dumps(optimizer)), copy.deepcopy(optimizer)):
            assert type(copied) is type(optimizer)
            assert copied.scaler.get_scale() == accelerator.loss_scale
            parameter = copied.param_groups[0]["params"][0]
            parameter.grad = torch.full_like(parameter, INF)
            copied.step()
            assert copied.step_was_skipped


# ------------------------------------------------------------------------------------------------------ refusals


@arguments(
    ("attribute", "value", "message"),
    [
        ("distributed_type", "DEEPSPEED", "DeepSpeed, which scales.*use FSDP2 or DDP"),
        ("distributed_type", "MEGATRON_LM", "Megatron-LM, which scales"),
        ("distributed_type", "FSDP", r"FSDP1.*fsdp_version=2"),
        ("fp8_enabled", True, "mixed_precision='fp8'"),
        ("device", torch.device("xpu"), "the device 'xpu'.*use 'cpu' or 'cuda'"),
    ],
)
def test_what_cannot_work_is_refused(attribute, value, message):
    from accelerate.utils import DistributedType

    with accelerating(ALONE, "ddp", "no") as accelerator:
        accelerator.state.__dict__["fsdp_plugin"] = mock.Mock(fsdp_version=1)
        holder = accelerator if attribute == "fp8_enabled" else accelerator.state
        setattr(holder, attribute, DistributedType[value] if attribute == "distributed_type" else value)
        with pytest.raises(paramp.ConfigError, match=message):
            adopt(accelerator)


def test_optimizers_and_weights_that_cannot_work_are_refused():
    with pytest.raises(paramp.ConfigError, match=r"accelerator: got 3, expected an accelerate\.Accelerator"):
        adopt(3)
    for late in (False, True):
        with alone("no", adopted=False) as (accelerator, model, _):
            lbfgs = torch.optim.LBFGS(model.parameters())
            if late:
                accelerator.prepare(lbfgs)
            with pytest.raises(paramp.ConfigError, match="LBFGS evaluates the model many times"):
                adopt(accelerator).prepare(lbfgs)
    for name in ("Lomo", "AdaLomo"):
        with alone("no") as (accelerator, model, _):
            early = type(name, (torch.optim.SGD,), {})(model.parameters(), lr=LR)
            with pytest.raises(paramp.ConfigError, match=f"{name} steps during the backward"):
                accelerator.prepare(early)
    with alone() as (accelerator, model, optimizer):
        first, *_ = optimizer.param_groups[0]["params"]
        first.data = first.requires_grad_(False).half()
        backward(accelerator, model)
        optimizer.step()
        assert not optimizer.step_was_skipped  # a frozen weight may be
        first.requires_grad_(True)
        with pytest.raises(paramp.ConfigError, match=r"parameters in float16, expected float32.*dtype=torch\.float32"):
            optimizer.step()
    with accelerating(ALONE, "ddp", "fp16") as accelerator:
        first, *_ = (model := build()).parameters()
        model, _ = adopt(accelerator).prepare(model, torch.optim.SGD([first], lr=LR))
        backward(accelerator, model)
        accelerator.clip_grad_norm_([first], 1.0)
        with pytest.raises(paramp.ConfigError, match=r"parameters: 5 of 6 have scaled gradients.*freeze them"):
            accelerator.clip_grad_norm_(model.parameters(), 1.0)


def test_ranks_may_not_finish_before_others():
    with alone("no") as (accelerator, model, _):
        with accelerator.join_uneven_inputs([model], even_batches=False):  # one rank has nobody to wait for
            pass
        with mock.patch.object(type(accelerator), "num_processes", 2):
            with accelerator.join_uneven_inputs([model]):
                pass
            accelerator.even_batches = False
            with pytest.raises(paramp.ConfigError, match=r"even_batches=False.*pass even_batches=True, or drop_last"):
                accelerator.join_uneven_inputs([model])


@on_ranks(2)
def test_the_documented_migration_runs_before_and_after(world):
    after = before = code_of("from-accelerate.md", "def train_with_accelerate")
    for line in difference_of("from-accelerate.md"):
        if line.startswith("+") and "import" in line:
            before = before.replace(line[1:], "")
    before = before.replace("adopt(Accelerator(", "(Accelerator(")
    assert "adopt" not in before
    with accelerating(world, "ddp", "fp16"):  # for its environment; the script makes its own
        names = {}
        exec(before, names)
        with pytest.raises(AttributeError, match="loss_scale"):  # it has trained by then
            names["train_with_accelerate"]()
        exec(after, names)
        assert names["train_with_accelerate"]() == (2.0**16, 0)
