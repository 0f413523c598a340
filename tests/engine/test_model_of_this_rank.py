"""Every rank starts with the first rank's tensors, however they lie in memory and whatever their dtype."""

import pytest
import torch
from pool import on_ranks, shared_folder
from reference import whole
from small_engines import engine_of, train_step
from torch import nn
from torch.distributed.tensor import DTensor

import paramp
from paramp.base.torch_internals import older_than

DTYPES = (torch.int16, torch.uint16, torch.float8_e4m3fn, torch.bool, torch.complex64, torch.float64)
LAYOUTS = {"dp2": {"data": 2}, "zero1": {"data": 2, "zero": 1}, "tp2": {"tensor": 2}, "pp2": {"pipeline": 2}}
LAYOUTS |= {"fsdp2": {"data": {"shard": 2}}, "cp2": {"context": 2}}
NAIVE = {"mode": "16-naive", "init_scale": 1.0}


class Odd(nn.Linear):
    """A layer whose tensors are views, of many dtypes; other values for each ``seed``."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        super().__init__(8, 4)
        self.weight = nn.Parameter(torch.randn(4, 24)[:, 8:16])
        self.frozen = nn.Parameter(torch.randn(8, 4).t(), requires_grad=False)
        self.spread = nn.Parameter(torch.randn(1).expand(8), requires_grad=False)
        self.register_buffer("strided", torch.randn(6, 4)[::2, 1:3])
        self.register_buffer("expanded", torch.randn(2, 1).expand(2, 4096))
        self.register_buffer("sliding", torch.randn(6).unfold(0, 3, 1))
        self.register_buffer("conjugate", torch.randn(3, dtype=torch.complex64).conj())
        self.register_buffer("scalar", torch.randn(()))
        for dtype in DTYPES:
            self.register_buffer(str(dtype).replace(".", "_"), torch.randint(-9, 9, (5, 3)).to(dtype)[:, :2])
        for dtype in (*DTYPES, torch.uint32, torch.uint64):
            values = torch.randint(-9, 9, (5, 3)).to(dtype)[:, :2]  # of unsigned integers some of the largest
            self.register_parameter(f"frozen {dtype}".replace(".", "_"), nn.Parameter(values, requires_grad=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.read = self.get_parameter("frozen torch_complex64").clone()
        return super().forward(x) + self.expanded[:1, :1] + self.strided[0, 0] + self.frozen[0, 0] * self.spread[0]


def tied(seed: int) -> nn.Sequential:
    """The last layer has the first one's weight, a view in both."""
    model = nn.Sequential(Odd(seed), nn.Linear(4, 8), nn.Linear(8, 4))
    model[2].weight = model[0].weight
    return model


@pytest.mark.parametrize(
    ("layout", "mode"),
    [*((layout, "32-true") for layout in LAYOUTS), pytest.param("fsdp2", NAIVE, id="fsdp2-16-naive")],
)
@on_ranks(2)
def test_views_and_rare_dtypes_start_as_the_first_rank_has_them(world, layout, mode):
    expected = tied(0).state_dict()
    with paramp.launch_from_torch({"parallel": LAYOUTS[layout], "precision": mode}) as context:
        model = tied(seed=world.rank if context.pp.size == 1 else 0)
        if world.rank:  # the copy of another stage
            model[2].weight.data.zero_()
        engine = engine_of(model, plan={"[02]": "colwise_gather"})
        if layout == "fsdp2":
            unusual = [one for one in engine.module.parameters() if not one.is_floating_point()]
            assert {isinstance(one, DTensor) for one in unusual} == {not older_than("2.12")}  # docs/versions.md
        folder = shared_folder()
        for loaded in (False, True):
            if loaded:
                engine.save(folder / "saved")
                for tensor in engine.module.state_dict().values():
                    tensor.zero_()
                engine.load(folder / "saved")
            for values in (engine.module.state_dict(), engine.full_state_dict()):
                for name, value in values.items():
                    is_integer = not (value.is_complex() or value.is_floating_point())
                    wide = torch.complex128 if value.is_complex() else torch.int64 if is_integer else torch.float64
                    if mode != NAIVE or wide is not torch.float64:
                        assert torch.equal(whole(value.to(wide)), expected[name].to(wide)), (name, loaded)
            assert values.keys() == expected.keys()
        odd = [layer for layer in engine.module.children() if isinstance(layer, Odd)]  # of this stage
        for layer in odd:
            layer.expanded.mul_(2.0)  # each element has memory of its own now
        assert train_step(engine, torch.ones(2, 4, 8), torch.ones(2, 4, 4)).stepped
        for layer in odd:
            assert torch.equal(whole(layer.read), expected["0.frozen torch_complex64"])


@on_ranks(2)
def test_buffers_that_are_not_alike_are_an_error_on_every_rank(world):
    """The first rank's values would be written past the end of the others'."""
    other = [torch.zeros(400), torch.zeros(4, dtype=torch.float64), torch.zeros(4, device="meta")]
    with paramp.launch_from_torch({"parallel": {"data": 2}}):
        for buffer in other:
            model = nn.Linear(2, 2)
            model.register_buffer("table", buffer if world.rank else torch.zeros(4))
            message = r"model: rank 0 has \('table', .*but rank 1 has \('table', "
            with pytest.raises(paramp.ConfigError, match=message):
                engine_of(model)


class Table(nn.Linear):
    """A layer with a buffer under two names, and a view of it."""

    def __init__(self, table: torch.Tensor) -> None:
        super().__init__(2, 2)
        self.register_buffer("table", table)
        self.register_buffer("again", table)
        self.register_buffer("part", table[::2, 1:3])


@pytest.mark.parametrize("precision", ["16-naive", "bf16-true", "O2", "32-true"])
@pytest.mark.parametrize("parallel", ["data", "tensor"])
@on_ranks(2)
def test_a_buffer_of_several_names_stays_one(world, precision, parallel):
    """In fp32, where nothing is converted, its views are views of it after a load too."""
    with paramp.launch_from_torch({"parallel": {parallel: 2}, "precision": precision}) as context:
        table, folder = torch.arange(24.0).view(6, 4), shared_folder()
        engine = engine_of(nn.Sequential(Table(table), Table(table)), plan={"*": "colwise_gather"})
        engine.save(folder / "saved")
        first = engine.module.get_submodule("0")
        first.table.zero_()
        engine.load(folder / "saved")
        named = dict(engine.module.named_buffers(remove_duplicate=False))
        assert all(buffer is first.table for name, buffer in named.items() if "part" not in name)
        assert first.table.dtype is context.config.precision.weights
        assert first.part[1, 0] == 9.0
        first.table.zero_()
        assert first.part.any() == (precision != "32-true")


@pytest.mark.parametrize(("mode", "dtype"), [("16-naive", torch.float32), ("64-true", torch.float64)])
def test_the_full_state_is_in_fp32_or_fp64(mode, dtype):
    model = nn.Linear(4, 4)
    model.register_buffer("times", torch.ones(1, dtype=torch.float64))
    model.register_buffer("calls", torch.ones(1, dtype=torch.int16))
    with paramp.launch_from_torch({"precision": mode}):
        state = engine_of(model).full_state_dict()
    assert {name: value.dtype for name, value in state.items()} == {
        "weight": dtype,
        "bias": dtype,
        "times": dtype,
        "calls": torch.int16,
    }
