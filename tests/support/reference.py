"""What runs are compared with: a small GPT, its batches, a plain loop, and how far two runs of a mode may be apart."""

import functools
from dataclasses import replace

import torch
from torch.distributed.tensor import DTensor

import paramp
from paramp.models import GPT, GPTConfig, MoEGPT, MoEGPTConfig
from paramp.optim.replicated_gradients import let_differ
from paramp.precision.modes import Precision

SMALL = GPTConfig(num_layers=4, num_heads=4, width=32, max_seq_len=16, vocab_size=120)


SMALL_MOE = MoEGPTConfig(
    **vars(SMALL) | {"num_layers": 2, "init_std": 0.2},
    num_experts=4,
    expert_width=16,
    balance_weight=0.5,
    z_weight=0.05,
)
"""Its balance weighs so much that one of each data rank's tokens alone has other gradients."""


def small_gpt(seed: int = 7, **changes: object) -> GPT:
    torch.manual_seed(seed)
    return settled(GPT(replace(SMALL, **changes)))


def small_moe() -> GPT:
    torch.manual_seed(7)
    return settled(MoEGPT(SMALL_MOE))


def sgd_in_plain_torch(model, loss_of, steps, *, skipped, length, lr=1.0):
    """Losses of SGD with clipping, and how far each weight has gone; the batch ``skipped`` makes no step."""
    start = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    losses = []
    for step, (x, y) in enumerate(batches(steps, length=length)):
        optimizer.zero_grad()
        loss = loss_of(model(x), y)
        losses.append(loss.item())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if step != skipped:
            optimizer.step()
    return losses, {name: value - start[name] for name, value in model.state_dict().items()}


def settled(model: GPT) -> GPT:
    """``model`` with norms and biases that do something: others would hide mistakes in their gradients."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def steep_gpt(**changes: object) -> GPT:
    """Its gradients are so large that SGD moves every weight far beyond its rounding."""
    return small_gpt(init_std=0.2, **changes)


def batches(count: int, size: int = 8, seed: int = 3, vocab: int = 120, length: int = 16):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        tokens = torch.randint(0, vocab, (size, length + 1), generator=generator)
        yield tokens[:, :-1], tokens[:, 1:]


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def rank_slice(tensor: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    return tensor.chunk(size)[rank]


PLAIN_OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}


def plain_fp32_training(steps: int, num_layers: int = 4, clip: float | None = 1.0, kind: str = "adamw", **changes):
    """Losses and final weights of an ordinary torch loop, without any paramp."""
    model = small_gpt(num_layers=num_layers, **changes)
    optimizer = PLAIN_OPTIMIZERS[kind](model.parameters())
    losses = []
    for x, y in batches(steps):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: value.detach().clone() for name, value in model.state_dict().items()}


def assert_trained(actual, expected, start, *, atol=0.0, rtol=0.0, of_way=None, still=(), what=""):
    """Each tensor of ``actual`` is near that of ``expected``, which is ten times as far from ``start`` as is allowed.

    A training without a step is then beyond the tolerance; so is one of SGD with gradients of half the size, which Adam
    hides. The way and what is allowed are norms of a tensor.

    Args:
        atol: with ``rtol``, of each element, as ``torch.testing.assert_close`` takes them.
        of_way: in their place, the relative distance of a tensor's way, for low precision; at most a tenth.
        still: how the names of weights begin that are not trained. They have to be those of ``start``.
    """
    assert actual.keys() == expected.keys()
    assert of_way is None or of_way <= 0.1
    for name, value in expected.items():
        found, value, before = (local(one).detach().cpu().double() for one in (actual[name], value, start[name]))
        where = f"{what} {name}".strip()
        if still and name.startswith(still):
            assert torch.equal(found, before), where
            continue
        way = (value - before).norm().item()
        assert way > 0, f"{where}: not trained"
        if of_way is None:
            torch.testing.assert_close(found, value, atol=atol, rtol=rtol, msg=lambda text, at=where: f"{at}: {text}")
            allowed = (atol + rtol * value.abs()).norm().item()
            assert way >= 10 * allowed, f"{where}: the way is only {way / allowed:.2g} times what is allowed"
        else:
            apart = (found - value).norm().item() / way
            assert apart <= of_way, f"{where}: {apart:.2g} of the way apart, allowed {of_way}"


# --------------------------------------------------------------------------------------- a mode against itself
#
# A mode on several ranks is compared with the same mode in one process. Both round to the mode's dtype, at other
# places and in another order. Each gradient then differs by a few units of the dtype's rounding error (2**-11 for
# fp16, 2**-8 for bf16), and so does the way that each weight has gone. SGD makes the test sharp: Adam would hide a
# gradient of half the size.

ROUNDING = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
FLOAT8_ROUNDING = 2.0**-4
"""Of e4m3. Tensors are rounded with a scale for their largest element, which a part of a batch does not have, so that
runs on several ranks round otherwise in every element."""
UNITS_WEIGHTS = 32
"""Allowed relative distance of a weight's way, in rounding errors: 1.6 % for fp16, 12.5 % for bf16. 3 to 6 units are
measured where weights or masters are in fp32, up to 28 where the weights themselves are rounded at each step, and 25 in
fp32 and fp64, where nothing but the order of sums differs."""
UNITS_TOGETHER = 16
"""Of all weights' ways as one vector, in which the errors of small tensors average out: up to 6 are measured in half
precision and 10 in fp32 and fp64. Where one rank's gradient was halved, 41 or more are."""
UNITS_FLOAT8 = (6, 3)
"""Both where linear layers multiply in float8: up to 5.4 and 2.7 are measured. A gradient of half the size is 8 away,
and 3.2 or more where one rank's gradient was halved, of eight."""
UNITS_LOSS = 0.25
"""Of a loss, in reduced precision; it is an average over many tokens."""
UNITS_LOSS_FP32 = 8
"""In fp32, and in fp64, whose losses are reported in fp32: up to 3.1 are measured."""


def rounding(precision) -> float:
    """The rounding error of the lowest dtype in a mode's matrix products."""
    mode = Precision.parse(precision)
    return ROUNDING[mode.compute] if mode.float8 is None else FLOAT8_ROUNDING


def allowed_units(precision) -> float:
    """For :func:`units_apart`."""
    return UNITS_WEIGHTS if Precision.parse(precision).float8 is None else UNITS_FLOAT8[0]


def allowed_together(precision) -> float:
    """For :func:`units_together`."""
    return UNITS_TOGETHER if Precision.parse(precision).float8 is None else UNITS_FLOAT8[1]


def train_engine(
    context, build, loss, steps, *, lr=0.1, length=16, overflow_at=None, halve_on_rank=None, optimizer=None
):
    """Losses of ``steps`` steps of the model that ``build`` makes, and how far each weight has gone.

    At the step ``overflow_at`` one gradient of the last rank is infinite.
    """
    model, optimizer = build(), optimizer or functools.partial(torch.optim.SGD, lr=lr, momentum=0.9)
    start = {name: value.detach().clone() for name, value in model.state_dict().items()}
    engine, *_ = paramp.initialize(model, optimizer(model.parameters()), loss)
    if halve_on_rank is not None:
        let_differ(engine._weights.gradients)  # else the first step refuses it
    losses = []
    for step, (x, y) in enumerate(batches(steps, length=length)):
        x, y = (rank_slice(t, context.dp.rank, context.dp.size) for t in (x, y))
        losses.append(engine.forward_backward(x, y).item())
        gradients = [parameter.grad for _, parameter in engine.named_parameters()]
        for gradient in gradients if context.rank == halve_on_rank else ():
            gradient.mul_(0.5)
        if step == overflow_at and context.rank == context.world_size - 1:
            local(gradients[0]).view(-1)[0] = float("inf")
        result = engine.step()
        assert (result.stepped, result.overflow) == (step != overflow_at, step == overflow_at), (step, result)
        engine.zero_grad()
    assert engine.num_skipped == (overflow_at is not None)
    return losses, {name: value - start[name] for name, value in engine.full_state_dict().items()}


def units_apart(actual, expected, precision):
    """The largest relative distance of a weight's way, in rounding errors of the mode's dtype."""
    ways = expected[1].items()
    return max(((actual[1][name] - way).norm() / way.norm()).item() for name, way in ways) / rounding(precision)


def units_together(actual, expected, precision):
    """The same of all weights' ways as one vector."""
    apart = torch.nn.utils.get_total_norm([actual[1][name] - way for name, way in expected[1].items()])
    return (apart / torch.nn.utils.get_total_norm(expected[1].values())).item() / rounding(precision)


def farthest(found, expected):
    """The distance of the tensor that is farthest from the expected one, in units of its norm, and the tensor's name.

    A tensor counts for at least 1e-3 of the largest: the gradient of a key's bias is zero but for rounding.
    """
    least = 1e-3 * max(value.norm() for value in expected.values())
    distances = [(found[name].double() - value).norm() / max(value.norm(), least) for name, value in expected.items()]
    distance, index = torch.stack(distances).max(0)  # NaN, if there is one
    return distance.item(), [*expected][index]


def assert_losses_follow(actual, expected, precision, units=UNITS_LOSS):
    """Losses are reported in fp32 whatever the mode, so they are not counted in anything smaller.

    ``units``: rounding errors allowed in half precision.
    """
    unit = max(rounding(precision), ROUNDING[torch.float32])
    allowed = units if unit > ROUNDING[torch.float32] else UNITS_LOSS_FP32
    apart = max(abs(a - b) / b for a, b in zip(actual, expected, strict=True)) / unit
    assert apart <= allowed, f"losses {apart:.2f} units apart, allowed {allowed}"


def assert_follows(actual, expected, precision, *, ways=None, **tolerance):
    """``actual`` is within the tolerance of ``expected``, each as :func:`train_engine` returns it.

    ``ways``: in place of :func:`allowed_units`.
    """
    assert_losses_follow(actual[0], expected[0], precision, **tolerance)
    way, allowed = units_apart(actual, expected, precision), ways or allowed_units(precision)
    assert way <= allowed, f"weights {way:.2f} units apart, allowed {allowed}"
    way, allowed = units_together(actual, expected, precision), allowed_together(precision)
    assert way <= allowed, f"all weights together {way:.2f} units apart, allowed {allowed}"


def assert_strays(actual, expected, precision):
    """``actual`` is beyond the tolerance (by far, where rounding is finer than float8's): a mistake would be seen."""
    way = units_together(actual, expected, precision)
    least = allowed_together(precision) * (1 if Precision.parse(precision).float8 else 2)
    assert way > least, f"all weights together only {way:.2f} units apart, expected more than {least}"
