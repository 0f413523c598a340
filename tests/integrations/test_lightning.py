"""The plugin for Lightning's Trainer, on real ranks: its strategies, checkpoints, hooks and refusals."""

import copy
import dataclasses
import gc
import itertools
import os
import pickle
import warnings
import weakref
from collections import OrderedDict
from contextlib import nullcontext
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from families import cases, family
from pages import difference_of
from pool import on_ranks, shared_folder
from small_engines import everywhere
from small_mlp import batch, build
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from torch.utils.data import DataLoader
from trained_by_lightning import (
    EPOCH,
    OVERFLOWS,
    QUIET,
    averaged,
    fit,
    lightning,
    model_parallel,
    shard,
    trained_module,
)
from trainer_runs import INF, LR, MAX_NORM, SCALE, STEPS, UNITS, check_weights, in_plain_torch, quiet

import paramp
from paramp.integrations.lightning import TrainerPrecision
from paramp.integrations.masters_for_users_optimizers import ModuleMasters

FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
SCALED = {"init_scale": SCALE}
NAIVE = {"mode": "16-naive", "hysteresis": 1, **SCALED}
TRUE = dataclasses.replace(paramp.Precision.parse("16-true"), scaling=paramp.LossScaling(**SCALED))
MODES = {
    "16-mixed": ({"mode": "16-mixed", **SCALED}, 2.0**-11),
    "16-naive": (NAIVE, 2.0**-11),
    "O2": ({"mode": "O2", **SCALED}, 2.0**-11),
    "16-true": (TRUE, 2.0**-9),
    "bf16-mixed": ("bf16-mixed", 2.0**-8),
    "bf16-naive": ("bf16-naive", 2.0**-8),
    "32-true": ("32-true", 2.0**-20),
}


def strategy_of(layout):
    data, tensor, kind = layout
    return "ddp" if kind == "ddp" else model_parallel(data, tensor, save_distributed_checkpoint=kind == "folder")


def check_module(module, expected, rounding):
    state = {name.removeprefix("model."): value for name, value in module.state_dict().items()}
    check_weights(state, expected, dict(build().named_parameters()), rounding)
    return {value.dtype for value in state.values()}


def check_layout(layout, name):
    """Losses, norms, weights, an overflow on one rank, and a resume, in one layout and mode."""
    mode, rounding = MODES[name]
    data, tensor, kind = layout
    precision = paramp.Precision.parse(mode)
    gathered = precision.compute if kind != "ddp" and precision.masters else None
    sizes = {"data": data, "tensor": tensor, "gathered": gathered}
    expected, norms, weights = in_plain_torch(overflow=OVERFLOWS, decay=0.9)
    close = partial(pytest.approx, rel=UNITS * rounding)

    module = trained_module()(**sizes, seed=4 + dist.get_rank() * (kind == "ddp"))  # DDP gives all ranks the first's
    module.save = shared_folder() / "after_one_epoch"
    trainer = fit(module, mode, strategy_of(layout), data * tensor)
    plugin = trainer.precision_plugin
    losses = averaged(module.losses)
    assert losses == close(expected)
    assert [norm for norm in module.norms if norm < INF] == close([norm for norm in norms if norm < INF])
    assert plugin.num_skipped == 1
    assert trainer.global_step == STEPS  # a skipped step counts, as with Lightning's plugin
    (schedule,) = trainer.lr_scheduler_configs
    assert schedule.scheduler.last_epoch == STEPS
    assert check_module(module, weights, rounding) == {FP16 if name == "16-true" else FP32}
    own = [value for value in module.state_dict().values() if kind == "ddp"]
    assert all(
        torch.equal(value, other) for others in everywhere(own) for value, other in zip(own, others, strict=True)
    )

    first, later = (SCALE, SCALE / 2) if plugin.mode.scaling else (1.0, 1.0)
    assert module.scales == [first] * (OVERFLOWS + 1) + [later] * (STEPS - 1 - OVERFLOWS)
    resumed = trained_module()(**sizes, seed=9)
    trainer = fit(resumed, mode, strategy_of(layout), data * tensor, ckpt_path=module.save)
    assert resumed.scales == [later] * EPOCH
    # DDP sums its first batch in other buckets than the later ones, and so in another order of more than two ranks.
    exact = kind != "ddp" or dist.get_world_size() == 2
    assert averaged(resumed.losses) == (losses[EPOCH:] if exact else pytest.approx(losses[EPOCH:], rel=rounding))
    assert trainer.precision_plugin.num_skipped == 0


ON_TWO = (((1, 2, "file"), "16-naive"), ((2, 1, "folder"), "16-naive"), ((2, 1, "ddp"), "O2"), ((1, 2, "folder"), "O2"))
"""Each promise once: masters under tensor parallelism, sharded ones, and DDP."""
ON_FOUR = ((2, 2, "folder"), (2, 2, "file"), (1, 4, "file"), (4, 1, "folder"), (4, 1, "ddp"))


@family
@pytest.mark.parametrize("name", cases("lightning", ["two ranks", *MODES], ["two ranks"], 1))
@on_ranks(lambda name: 2 if name == "two ranks" else 4)
def test_lightnings_trainer_follows_plain_torch(world, name):
    """On two ranks several modes, else one mode on four."""
    for layout, mode in ON_TWO if name == "two ranks" else [(layout, name) for layout in ON_FOUR]:
        check_layout(layout, mode)


class Tiny:
    """The gradient of the product is 1e-8, which fp16 rounds to zero; that of the weight is 1e-4."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def train_dataloader(self):
        return DataLoader([torch.zeros(1)], batch_size=None)

    def training_step(self, data, index):
        return (self.weight * 1e4).sum() * 1e-8

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=100.0)


@on_ranks(2)
def test_what_lightning_refuses_or_trains_wrongly(world):
    """Lightning #19902 and #19973, without the plugin and with it."""
    plugin = TrainerPrecision("16-mixed")  # from now on mpi4py without an MPI library is no error
    kind = type("Tiny", (Tiny, lightning().LightningModule), {})
    with quiet():
        with pytest.raises(ValueError, match=r"`ModelParallelStrategy` does not support .*16-mixed"):
            lightning().Trainer(precision="16-mixed", strategy=model_parallel(1, 2), devices=2, **QUIET)
        lightning().Trainer(plugins=plugin, strategy=model_parallel(1, 2), devices=2, **QUIET)
        for name in ("FSDP", "XLA"):
            with pytest.raises(TypeError, match=f"The {name} strategy can only work with the `{name}Precision` plugin"):
                getattr(lightning().strategies, f"{name}Strategy").precision_plugin.fset(mock.Mock(), plugin)
        lightning().strategies.DeepSpeedStrategy.precision_plugin.fset(mock.Mock(), plugin)  # takes it
        for precision, expected in (
            ({"precision": "16-true"}, 1.0),
            ({"plugins": TrainerPrecision(TRUE)}, 0.99),
            ({"plugins": TrainerPrecision(NAIVE)}, 0.99),
        ):
            module = kind()
            lightning().Trainer(**precision, **QUIET, devices=1, max_epochs=1).fit(module)
            weight = module.state_dict()["weight"].float()
            torch.testing.assert_close(weight, torch.full((4,), expected), atol=1e-3 * (expected < 1), rtol=0)


@on_ranks(2)
def test_loops_of_the_trainer(world):
    """On one device a rank, which decide together: manual optimization, clipping by value, hooks, accumulation."""
    module_class = trained_module()
    one = {"max_epochs": 1, "reload_dataloaders_every_n_epochs": 1}

    class Manual(module_class):
        """Two optimizers of one backward; the second clips, doubles what it clipped, and steps through a closure."""

        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, data, index):
            first, second = self.optimizers()
            loss = super().training_step(data, index)
            first.zero_grad()
            second.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(second, gradient_clip_val=1e-3, gradient_clip_algorithm="value")
            self.model.down.weight.grad.data.mul_(2)
            self.model.down.bias.grad.mul_(2)
            self.clip_gradients(second, gradient_clip_val=0.0)
            first.step()
            assert second.step(closure=lambda: loss) is loss

        def configure_optimizers(self):
            groups = (self.model.up, self.model.norm), (self.model.down,)
            return [torch.optim.SGD([p for part in parts for p in part.parameters()], lr=0.1) for parts in groups]

    class Hooked(module_class):
        """Multiplies gradients by 8, or replaces them, before they are clipped; changes a weight; unfreezes others.

        Its optimizer is made anew after the fit began.
        """

        def __init__(self):
            super().__init__()
            self.model.norm.requires_grad_(False)

        def configure_optimizers(self):
            return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=LR, momentum=0.9)

        def on_train_start(self):
            self.trainer.optimizers = [self.configure_optimizers()]
            self.model.norm.requires_grad_(True)
            self.optimizers().optimizer.add_param_group({"params": [*self.model.norm.parameters()]})
            with torch.no_grad():
                self.model.up.bias.fill_(2.0)

        def on_after_backward(self):
            pass

        def on_before_optimizer_step(self, optimizer):
            for index, parameter in enumerate(self.model.parameters()):
                gradient = parameter.grad
                parameter.grad = gradient * 8 if index % 3 == 1 else gradient
                if index % 3 != 1:
                    (gradient.data if index % 3 else gradient).mul_(8)

    # An overflow on one rank, with the static scale of O3.
    module = module_class()
    assert fit(module, "O3", "auto", 1).precision_plugin.metrics() == {"loss_scale": 1.0, "num_skipped": 1.0}
    check_module(module, in_plain_torch(overflow=OVERFLOWS, decay=0.9)[2], MODES["16-true"][1])

    for name in ("16-mixed", "O2"):
        mode, rounding = MODES[name]
        module = Manual()
        plugin = fit(module, mode, "auto", 1, **one, gradient_clip_val=None).precision_plugin
        assert plugin.metrics() == {"loss_scale": SCALE / 2, "num_skipped": 1.0}  # the scale moved once, not twice
        reference = build()
        for step in range(EPOCH):
            reference.zero_grad()
            x, y = batch(step)
            nn.functional.mse_loss(reference(x), y).backward()
            nn.utils.clip_grad_value_(reference.down.parameters(), 1e-3)
            for key, parameter in reference.named_parameters():
                if step != OVERFLOWS or not key.startswith("down"):
                    parameter.data.add_(parameter.grad, alpha=-0.2 if key.startswith("down") else -0.1)
        check_module(module, dict(reference.named_parameters()), rounding)

        # Accumulation over two batches, of three: the last one of an epoch is stepped alone.
        module = Hooked()
        fit(module, mode, "auto", 1, **one, accumulate_grad_batches=2)
        reference = build()
        reference.up.bias.data.fill_(2.0)
        optimizer = torch.optim.SGD(reference.parameters(), lr=LR, momentum=0.9)
        for step in range(EPOCH):
            x, y = batch(step)
            (4 * nn.functional.mse_loss(reference(x), y)).backward()
            if step != 0:
                nn.utils.clip_grad_norm_(reference.parameters(), MAX_NORM)
                optimizer.step()
                optimizer.zero_grad()
        check_module(module, dict(reference.named_parameters()), rounding)
        assert not any(torch.equal(value, value.half().float()) for value in module.state_dict().values())

    class Averaged(module_class):
        """The last epoch, which has no backward, computes statistics with the averaged weights."""

        def __init__(self):
            super().__init__()
            self.model.norm = nn.BatchNorm1d(8)

        def on_train_epoch_start(self):
            self.begun = copy.deepcopy(dict(self.named_parameters()))

    for mode in ("16-mixed", "bf16-mixed"):
        module = Averaged()
        swa = lightning().callbacks.StochasticWeightAveraging(LR, swa_epoch_start=1)
        assert fit(module, mode, "auto", 1, callbacks=[swa]).current_epoch == 3
        torch.testing.assert_close(dict(module.named_parameters()), module.begun, rtol=0, atol=0)


@on_ranks(2)
def test_what_the_plugin_refuses(world):
    """Each by name, on every rank, before a collective."""
    from torch.distributed.device_mesh import init_device_mesh

    for mode, option, value, message in (
        ("O2", "masters", "remainder", "masters: got 'remainder', expected 'full'"),
        ("bf16-true", "rounding", "stochastic", "rounding: got 'stochastic', expected 'nearest'"),
        ("16-true", "grad_dtype", "float32", "grad_dtype: got torch.float32, expected torch.float16"),
        ("16-mixed", "reduce_dtype", "float32", "reduce_dtype: got ReduceDtypes"),
        ("fp8-mixed", "recipe", "tensorwise", "float8"),
    ):
        with pytest.raises(paramp.ConfigError, match=message):
            TrainerPrecision({"mode": mode, option: value})

    mesh = init_device_mesh("cpu", (2,))
    for mode, gathered in (("16-naive", None), ("O2", BF16), ("16-mixed", BF16), ("32-true", FP16)):
        model = build()
        shard(model, mesh, gathered)
        with pytest.raises(paramp.ConfigError, match=rf"of the module itself in {gathered}, expected .*{mode}"):
            TrainerPrecision(mode).convert_module(model)
    model = build().half()
    shard(model, mesh, FP16)
    with pytest.raises(paramp.ConfigError, match=r"itself was sharded with parameters in torch\.float16"):
        TrainerPrecision("16-naive").convert_module(model)

    deepspeed = type("DeepSpeedStrategy", (lightning().strategies.SingleDeviceStrategy,), {})  # the package is missing
    with pytest.raises(paramp.ConfigError, match="got DeepSpeedStrategy, which scales, clips and steps by itself"):
        fit(trained_module()(), None, deepspeed("cpu"), 1, plugin=TrainerPrecision("16-mixed"))

    class Wrong(trained_module()):
        automatic_optimization = False

        def training_step(self, data, index):
            loss = super().training_step(data, index)
            if self.wrong == "inner":
                inner = self.optimizers(use_pl_optimizer=False)
                self.manual_backward(loss)
                with mock.patch.dict(inner.param_groups[0], lr=0.0):
                    inner.step()  # as torch makes states
                self.wrong = "stepped"
                inner.step()
            if self.wrong == "clips":
                self.manual_backward(loss, retain_graph=True)
                self.clip_gradients(self.optimizers(), 1.0, "norm")
                self.manual_backward(loss)
            loss.backward()
            self.optimizers().step()

    cannot, missing = "scaled ones cannot be added", r"call self\.manual_backward\(loss\)"
    inside = r"gradients may be scaled; .* and step\(\) of self\.optimizers\(\)"
    for mode, wrong, message in (
        ("16-naive", "clips", cannot),
        ("16-mixed", "", missing),
        ("16-mixed", "inner", inside),
        ("O2", "inner", inside),
    ):
        used = fit(trained_module()(), MODES[mode][0], "auto", 1, max_epochs=1).precision_plugin
        module = Wrong()
        module.wrong = wrong
        with pytest.raises(RuntimeError, match=message):
            fit(module, None, "auto", 1, gradient_clip_val=None, plugin=used)
        assert module.wrong != "inner"

    class Shared(trained_module()):
        """Two optimizers of the same parameters step after each backward, or after each other backward."""

        automatic_optimization = False

        def training_step(self, data, index):
            for number, optimizer in enumerate(self.optimizers()):
                if number == 0 or self.is_each:
                    self.zero_grad()
                    self.manual_backward(super().training_step(data, index))
                optimizer.step()

        def configure_optimizers(self):
            return [torch.optim.SGD(self.parameters(), lr=LR) for _ in range(2)]

    for mode, is_each, cannot in (
        (NAIVE, False, pytest.raises(RuntimeError, match=r"parameter of shape .* is in another optimizer too")),
        (NAIVE, True, nullcontext()),
        ("16-mixed", False, nullcontext()),
        ("bf16-naive", False, nullcontext()),
    ):
        module = Shared()
        module.is_each = is_each
        with cannot:
            fit(module, mode, "auto", 1, max_epochs=1, gradient_clip_val=None)

    class Clearing(trained_module()):
        """A change in a hook that Lightning's own plugins would keep."""

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=LR)
            optimizer.register_step_post_hook(lambda *_: nn.init.zeros_(self.model.up.weight))
            return optimizer

    with pytest.raises(RuntimeError, match=r"'model\.up\.weight' was changed in its step\(\), as by a step hook"):
        fit(Clearing(), NAIVE, "auto", 1)

    module = trained_module()()
    module.configure_optimizers = lambda: torch.optim.LBFGS(module.parameters())
    with pytest.raises(paramp.ConfigError, match="LBFGS"):
        fit(module, "16-mixed", "auto", 1)

    class Lookahead(torch.optim.Optimizer):
        """As timm's, whose constructor does not call torch's."""

        def __init__(self, inner):
            vars(self).update(vars(inner), inner=inner)
            vars(self).update({name: OrderedDict() for name in vars(inner) if name.endswith("_hooks")})

        def step(self, closure=None):
            return self.inner.step(closure)

    module = trained_module()()
    module.configure_optimizers = lambda: Lookahead(torch.optim.SGD(module.parameters(), lr=LR))
    with pytest.raises(paramp.ConfigError, match=r"step\(\) of Lookahead does not call torch's step hooks"):
        fit(module, "O2", "auto", 1)

    class Unfreezing(trained_module()):
        def __init__(self):
            super().__init__()
            self.model.norm.requires_grad_(False)

        def on_train_epoch_start(self):
            self.model.norm.requires_grad_(self.trainer.current_epoch == 1)

    module = Unfreezing()
    with pytest.raises(RuntimeError, match=r"'model\.norm\.weight' was frozen when DDPStrategy wrapped the module"):
        fit(module, "16-mixed", "ddp", 2)
    assert module.trainer.current_epoch == 1


@on_ranks(2)
def test_a_run_resumes_in_another_mode_from_its_masters(world):
    """After a fit the parameters are the masters, in fp32, and the plugin releases the optimizer.

    The scale begins as it was saved, if it was.
    """
    folder, begun = shared_folder(), {}

    class Resumed(trained_module()):
        def on_train_start(self):
            begun.update({name: value.clone() for name, value in self.state_dict().items()})

    for before, after, scale in (
        ("O2", "16-mixed", SCALE / 2),
        ("16-mixed", "16-naive", SCALE / 2),
        ("16-naive", "32-true", 1.0),
        ("bf16-naive", "16-naive", SCALE),
        ("bf16-naive", "16-mixed", SCALE),
    ):
        path = folder / f"{before}-{world.rank}"
        module = trained_module()()
        trainer = fit(module, MODES[before][0], "auto", 1, max_epochs=1)
        trainer.save_checkpoint(path)
        saved = torch.load(path, weights_only=False)["state_dict"]
        assert any(not torch.equal(value, value.half().float()) for value in saved.values())
        torch.testing.assert_close(dict(copy.deepcopy(module).named_parameters()), dict(saved), rtol=0, atol=0)
        held, plugin, module.trainer = weakref.ref(trainer.optimizers[0]), trainer.precision_plugin, None
        del trainer
        gc.collect()
        assert plugin.num_skipped == 1
        assert held() is None
        resumed = Resumed(seed=9)
        fit(resumed, MODES[after][0], "auto", 1, ckpt_path=path)
        torch.testing.assert_close(begun, dict(saved), rtol=0, atol=0)
        assert resumed.scales[0] == scale


def test_masters_of_a_checkpoint_do_not_replace_what_was_loaded():
    """As with callbacks that average weights: the ``state_dict`` is loaded first, and its values are others."""
    model, loaded = build(), build(seed=8).state_dict()
    model.load_state_dict(loaded)
    plugin = TrainerPrecision("O2")
    plugin.convert_module(model)
    model.state_dict()["up.weight"].copy_(loaded["up.weight"].mul_(2))
    with plugin.forward_context():
        assert torch.equal(model.up.weight, loaded["up.weight"].half())
    for others in (build().state_dict(), {key: value * (1 + 2.0**-20) for key, value in loaded.items()}, {}):
        plugin.load_state_dict({**plugin.state_dict(), "masters": others})
    torch.testing.assert_close(dict(model.state_dict()), dict(loaded), rtol=0, atol=0)
    assert torch.equal(model.up.weight, loaded["up.weight"].half())


@pytest.mark.parametrize(("mode", "kept"), [("O2", torch.float32), ("16-naive", FP16)])
def test_batch_norms_of_o2_stay_in_fp32(mode, kept):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    plugin = TrainerPrecision(mode, emulate_fp16=True)
    plugin.convert_module(model)
    held = itertools.chain(model.named_parameters(), model.named_buffers())
    dtypes = {name: value.dtype for name, value in held if value.is_floating_point()}
    linear, norm = ("0.weight", "0.bias"), ("1.weight", "1.bias", "1.running_mean", "1.running_var")
    assert dtypes == dict.fromkeys(linear, FP16) | dict.fromkeys(norm, kept)


def test_an_eps_that_rounds_to_nothing_is_warned_of():
    model = build().half()
    with pytest.warns(UserWarning, match="eps 1e-08 is below"):
        TrainerPrecision("16-true").connect(model, [torch.optim.Adam(model.parameters())], [])


def test_a_hook_of_a_step_may_copy_a_module_with_masters():
    """Also in a second fit with the same optimizer, after a step that failed.

    What is written to the tensors of a ``state_dict`` is computed with and stepped, in a copy too, as of an average.
    """
    module, copies = nn.Linear(2, 1, bias=False), []
    masters, optimizer = ModuleMasters.of(module), torch.optim.SGD(module.parameters(), lr=1.0)
    optimizer.register_step_post_hook(lambda *_: copies.extend((copy.deepcopy(module), pickle.dumps(module))))
    for count in (2, 4):
        nn.init.ones_(module.bfloat16().weight)
        masters.add(module.weight, torch.ones(1, 2))
        masters.adopt(optimizer)
        module.state_dict()["weight"].mul_(2)
        module.weight.grad = torch.full_like(module.weight, 2)
        with masters.unscaling(optimizer):
            pass
        optimizer.step()
        assert len(copies) == count
        assert not module.weight.any()
        average = copy.deepcopy(module)
        for total in (1 + 2.0**-20, 2 + 2.0**-19):
            average.state_dict()["weight"].add_(1 + 2.0**-20)
            assert average(torch.ones(2).bfloat16()) == 2 * round(total)
            assert torch.equal(average.state_dict()["weight"], torch.full((1, 2), total))
        nn.init.ones_(module.weight)  # after a state_dict and a step
        assert module(torch.ones(2).bfloat16()) == 2
        failing = optimizer.register_step_pre_hook(lambda *_: [].pop())
        with pytest.raises(IndexError):
            optimizer.step()
        failing.remove()
        masters.restore()
        assert optimizer.param_groups[0]["params"][0] is module.weight
    optimizer.step(lambda: None)  # a closure, as without masters


def test_copies_of_a_plugin_keep_its_group_and_a_scale_of_lightnings_plugin_is_taken_over():
    group = mock.Mock(spec=dist.ProcessGroup)
    plugin = TrainerPrecision(NAIVE, emulate_fp16=True, group=group)
    assert copy.deepcopy(plugin).mode == plugin.mode
    assert copy.deepcopy(plugin).scaler._group is group
    with pytest.raises(paramp.ConfigError, match="group: a process group cannot be pickled"):
        pickle.dumps(plugin)
    assert pickle.loads(pickle.dumps(TrainerPrecision(NAIVE))).mode == paramp.Precision.parse(NAIVE)

    plugin = TrainerPrecision("16-mixed")  # the checkpoint is of the Trainer's own, whose plugin has torch's scaler
    state = torch.amp.GradScaler("cpu", init_scale=2.0**9).state_dict()
    plugin.on_load_checkpoint({"MixedPrecision": {**state, "scale": 2.0**9}})
    assert plugin.loss_scale == 2.0**9
    plugin.on_load_checkpoint({"MixedPrecision": state, "TrainerPrecision": plugin.state_dict()})
    assert plugin.loss_scale == 2.0**9


@on_ranks(2)
def test_the_difference_on_the_page_is_all_that_a_script_changes(world):
    """Both sides of the page's difference run; on the new one the same module trains."""
    TrainerPrecision("16-mixed")  # from now on mpi4py without an MPI library is no error
    difference = difference_of("from-lightning.md")
    assert all(line[0] in "-+" for line in difference)
    for sign in "-+":
        trainer = partial(lightning().Trainer, devices=2, max_epochs=1, **QUIET)
        names = {"Trainer": trainer, "ModelParallelStrategy": partial(model_parallel, 1, 2)}
        with quiet(), mock.patch.dict(os.environ):
            exec("\n".join(line[1:] for line in difference if line[0] == sign), names)
            if sign == "+":
                module = trained_module()(tensor=2)
                names["trainer"].fit(module)
    assert names["trainer"].precision_plugin.loss_scale == 2.0**15
    assert averaged(module.losses[:1]) == pytest.approx(in_plain_torch()[0][:1], rel=1e-3)


DTYPES = {
    "32-true": (FP32, FP32, FP32, False),
    "64-true": (FP64, FP64, FP64, False),
    "16-mixed": (FP32, FP16, FP32, True),
    "bf16-mixed": (FP32, BF16, FP32, True),
    "16-true": (FP16, FP16, FP16, False),
    "bf16-true": (BF16, BF16, BF16, False),
    "16-naive": (FP16, FP16, FP32, False),
    "O2": (FP16, FP16, FP32, False),
    "bf16-naive": (BF16, BF16, FP32, False),
}
"""Of batches, of products, of tensors that are made without one, and whether autocast is on."""


@on_ranks(2)
def test_lightnings_own_tests_of_precision(world):
    """The promises of ``tests/tests_pytorch/plugins/precision`` and ``models/test_amp.py`` in lightning 2.6's
    repository (its source distribution has no tests) that no other test has."""
    host = pytest.importorskip("lightning.pytorch.demos.boring_classes")
    options = {**QUIET, "devices": 1, "max_epochs": 1, "limit_train_batches": 4, "limit_val_batches": 1}
    options |= {"limit_test_batches": 1, "limit_predict_batches": 1}

    layer, x = nn.Linear(2, 1), torch.randn(1, 2)
    for without in (torch.no_grad, torch.inference_mode):  # autocast's cache must not keep what has no gradient
        with TrainerPrecision("bf16-mixed").forward_context():
            with without():
                layer(x)
            layer(x).mean().backward()
    for kind in (TrainerPrecision, paramp.FabricPrecision):  # nor what a step changes before the next forward
        with kind("bf16-mixed").forward_context():
            nn.init.ones_(layer.weight)
            layer(x)
            nn.init.zeros_(layer.weight)
            assert torch.equal(layer(x)[0], layer.bias.bfloat16())

    class Recording(host.BoringModel):
        """Records dtypes in all four kinds of steps, also in forwards that a backward repeats.

        The gradient of the third batch overflows on one rank. Every step but that one moves the weights.
        """

        def __init__(self):
            super().__init__()
            self.found, self.moved = set(), []

        def forward(self, data):
            with set_checkpoint_early_stop(False):
                return checkpoint(self.record, data, use_reentrant=False)

        def record(self, data):
            output = super().forward(data)
            self.found.add((data.dtype, output.dtype, torch.tensor([0.0]).dtype, torch.is_autocast_enabled("cpu")))
            return output.float() if output.dtype.itemsize < 4 else output

        def on_train_epoch_end(self):
            assert torch.tensor([0.0]).dtype is FP32

        def on_after_backward(self):
            assert self.layer.weight.grad.dtype is self.layer.weight.dtype
            if self.trainer.global_step == 2 and world.rank == 1:
                self.layer.weight.grad[0, 0] = INF

        def on_train_batch_start(self, *_):
            self.before = self.state_dict()["layer.weight"].clone()

        def on_train_batch_end(self, *_):
            self.moved.append(not torch.equal(self.state_dict()["layer.weight"], self.before))

    class Skipping(host.BoringModel):
        def training_step(self, data, index):
            return None if index % 2 else super().training_step(data, index)

    with warnings.catch_warnings(), mock.patch.dict(os.environ):
        warnings.simplefilter("ignore")
        for mode, found in DTYPES.items():
            scaled = mode in ("16-mixed", "16-naive", "O2")
            plugin = TrainerPrecision({"mode": mode, "init_scale": 2.0**6} if scaled else mode)
            with plugin.module_init_context():
                assert nn.Linear(2, 2).weight.dtype is plugin.mode.as_sharded.weights
            model, trainer = Recording(), lightning().Trainer(plugins=plugin, **options)
            trainer.fit(model)
            assert (model.moved, plugin.num_skipped) == ([True, True, False, True], 1)
            pickle.dumps(plugin.convert_module(nn.Linear(2, 2)))
            trainer.test(model)
            trainer.predict(model, DataLoader(torch.randn(2, 32)))
            assert model.found == {found}
            assert model.state_dict()["layer.weight"].dtype is found[2]  # of the masters, if there are any
            if not scaled:
                assert plugin.loss_scale == 1.0
            elif mode != "16-naive":  # in which it falls from the second overflow on
                assert plugin.loss_scale == 2.0**5

        trainer = lightning().Trainer(plugins=TrainerPrecision("16-mixed"), **options, gradient_clip_val=0.5)
        with mock.patch.object(trainer.precision_plugin.scaler, "step") as step:
            trainer.fit(Skipping())
        assert step.call_count == 2
