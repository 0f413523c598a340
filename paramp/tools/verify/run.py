"""One of the two runs of ``python -m paramp verify``, on one of its ranks: ``python -m paramp.tools.verify.run FOLDER RUN``.

It trains the user's model for a few steps and writes what it saw into the folder, one file a rank.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import hashlib
import importlib
import importlib.util
import inspect
import json
import random
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from ...base.errors import ConfigError, LaunchError, nearest, shown
from ...compat.composer.algorithms import FusedLayerNorm, LowPrecisionLayerNorm
from ...config.files import load, merge, read_file
from ...config.schema import Config, ParallelConfig, PipelineConfig
from ...distributed.context import ParallelContext
from ...distributed.failures import is_echo
from ...distributed.launcher_env import rank_by_any_variable
from ...distributed.launchers import launch_from_environment
from ...distributed.local_launcher import reported_by_rank_0
from ...engine.initialize import initialize
from ...engine.loss_window import Criterion
from .activation_recorder import ActivationRecorder, first_gradient

__all__ = ["RUNS", "Options", "Seen", "configure", "load_attribute", "main"]

RUNS = ("single", "sharded")
"""The names of the two runs: in one process, and on the layout asked for."""
INIT_SCALE = 2.0**10
"""At most. From 2**16 or 2**32 a run of a few steps would skip most of them."""
MOMENTUM = 0.9
STANDARD_ERROR = 2
"""Its descriptor, which is there whatever stands in the place of ``sys.stderr``."""
ALGORITHMS: dict[str, list[Any]] = {
    "plain": [],
    "low-precision": [LowPrecisionLayerNorm()],
    "fused": [FusedLayerNorm()],
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """What ``python -m paramp verify`` was asked for; plain values, as they are handed to the ranks."""

    model: str
    """``module:attribute`` or ``file.py:attribute``: a module, or a callable that builds one. So are the next three."""
    batches: str | None = None
    criterion: str | None = None
    plan: str | None = None
    config: str | None = None
    """A ``.toml`` or ``.py`` file."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What wins over the file, a tree like it."""
    norms: str = "plain"
    steps: int = 3
    batch_size: int | None = None
    """Samples a step. None: two for each microbatch of each data rank."""
    seq_len: int = 16
    lr: float = 0.1
    timeout: float = 600.0
    """Seconds that a run may take."""

    def __post_init__(self) -> None:
        for name in ("model", "batches", "criterion", "plan"):
            if getattr(self, name) is not None:
                _check_target(getattr(self, name), name)
        for name in ("steps", "seq_len", "batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}: got {value}, expected an integer of 1 or more")
        for name in ("lr", "timeout"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(f"{name}: got {getattr(self, name)}, expected a finite number above 0")


@dataclass(eq=False)
class Seen:
    """What one rank of a run saw; its attributes are what is written."""

    place: dict[str, int]
    """The rank on each axis."""
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)
    batches: list[str] = field(default_factory=list)
    """A hash of each step's whole batch."""
    microbatch_size: int = 0
    notes: list[dict[str, Any]] = field(default_factory=list)
    modules: list[str] = field(default_factory=list)
    packed: list[int] = field(default_factory=list)
    random_in: str | None = None
    trained: list[str] = field(default_factory=list)
    """This rank's parameters that are trained."""
    start: dict[str, torch.Tensor] = field(default_factory=dict)
    """The whole model's weights before the first step, its gradient in the first step, and its weights after that and
    after the last; on the first pipeline rank."""
    gradient: dict[str, torch.Tensor] = field(default_factory=dict)
    after_first: dict[str, torch.Tensor] = field(default_factory=dict)
    end: dict[str, torch.Tensor] = field(default_factory=dict)


def configure(options: Options, run: str) -> Config:
    """The configuration of a run.

    The single one has a microbatch for each that any data rank of the sharded one has, so that both see the same
    samples together.

    Raises:
        ConfigError: the options or the file are wrong.
    """
    config = load(merge(read_file(options.config) if options.config else {}, options.settings))
    precision = config.precision
    if precision.masters:  # remainders come to the same values
        precision = dataclasses.replace(precision, masters=True)
    if (scaling := precision.scaling) is not None and scaling.min_scale != scaling.max_scale:
        first = max(min(INIT_SCALE, scaling.init_scale), scaling.min_scale or 0.0)
        precision = dataclasses.replace(precision, scaling=dataclasses.replace(scaling, init_scale=first))
    data = 1 if config.parallel.data == "auto" else config.parallel.data
    parallel = dataclasses.replace(config.parallel, data=data)
    if run == "single":
        chunks = data * config.parallel.pipeline.num_microbatches
        parallel = ParallelConfig(data=1, pipeline=PipelineConfig(microbatches=chunks))
    return dataclasses.replace(
        config,
        parallel=parallel,
        precision=precision,
        masters=None,
        gradient_accumulation=1,
        train=type(config.train)(),
    )


# ------------------------------------------------------------------------------------------------ what the user names


def _check_target(text: str, option: str) -> None:
    where, _, name = text.rpartition(":")
    if not where or not name:
        raise ConfigError(f"{option}: got {shown(text)}, expected module:attribute or path/to/file.py:attribute")


def load_attribute(text: str, option: str) -> Any:
    """What ``module:attribute`` or ``path/to/file.py:attribute`` names.

    Raises:
        ConfigError: there is no such module, file or attribute.
    """
    _check_target(text, option)
    where, _, name = text.rpartition(":")
    module = _load_file(Path(where), option) if where.endswith(".py") else _import(where, option)
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            raise ConfigError(f"{option}: {where!r} has no {name!r}{nearest(part, vars(module))}")
        found = getattr(found, part)
    return found


def _import(name: str, option: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # a module that the user's own imports
        raise ConfigError(
            f"{option}: no module {name!r} on Python's path; run it in the folder that has it, or name its file"
        ) from None


def _load_file(path: Path, option: str) -> Any:
    if not path.is_file():
        raise ConfigError(f"{option}: no file {str(path)!r}")
    name = f"verified {path.resolve()}"  # like no other module's
    if name in sys.modules:
        return sys.modules[name]
    sys.path.insert(0, str(path.resolve().parent))  # as for a script
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _build(options: Options, seed: int) -> nn.Module:
    """The user's model, without dropout: its masks are others in each layout."""
    found = load_attribute(options.model, "model")
    for generator in (torch.manual_seed, random.seed, lambda seed: np.random.seed(seed % 2**32)):
        generator(seed)
    model = found if isinstance(found, nn.Module) else found() if _takes(found, 0) else None
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"model: {options.model!r} is {type(found).__name__}, expected an nn.Module, or a callable without "
            "arguments that returns one"
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(f"model: {options.model!r} has no parameter to train, expected at least one")
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in vars(module).items():
            if "dropout" in name and isinstance(value, float):
                setattr(module, name, 0.0)
    return model.train()


def _takes(found: Any, num_arguments: int) -> bool:
    """Whether ``found`` can be called with so many arguments, as far as its signature says."""
    if not callable(found):
        return False
    try:
        inspect.signature(found).bind(*[None] * num_arguments)
    except TypeError:
        return False
    except ValueError:  # it has no signature, as some that are built in
        return True
    return True


def _criterion(options: Options, model: nn.Module) -> Criterion:
    if options.criterion is not None:
        found: Criterion = load_attribute(options.criterion, "criterion")
        return found
    own = getattr(model, "loss", None)
    return own if callable(own) else _cross_entropy


def _cross_entropy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


def _batches(
    options: Options, model: nn.Module, config: Config, size: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The whole batch of each step."""
    if options.batches is None:
        yield from _random_tokens(_vocabulary(model), options, config.seed, size)
        return
    found = load_attribute(options.batches, "batches")
    if not (_takes(found, 1) if callable(found) else isinstance(found, Iterable)):
        raise ConfigError(
            f"batches: {options.batches!r} is {type(found).__name__}, expected a function of the step, or an iterable"
        )
    iterator = None if callable(found) else iter(found)
    for step in range(1, options.steps + 1):
        batch = found(step) if iterator is None else next(iterator, None)
        if batch is None:
            raise ConfigError(f"batches: {options.batches!r} has {step - 1} batches, expected {options.steps}")
        tensors = isinstance(batch, (tuple, list)) and all(isinstance(item, torch.Tensor) for item in batch)
        if not tensors or len(batch) != 2 or not batch[0].ndim or not batch[1].ndim or len(batch[0]) != len(batch[1]):
            raise ConfigError(
                f"batches: {options.batches!r} gave {type(batch).__name__} for step {step}, expected a pair of tensors "
                "(inputs, targets) with as many samples in dim 0"
            )
        yield batch[0], batch[1]


def _random_tokens(
    vocabulary: int, options: Options, seed: int, size: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(options.steps):
        tokens = torch.randint(0, vocabulary, (size, options.seq_len + 1), generator=generator)
        yield tokens[:, :-1], tokens[:, 1:]


def _vocabulary(model: nn.Module) -> int:
    """How many tokens the model knows whose first layer is an embedding.

    Raises:
        ConfigError: it is not.
    """
    first = next((module for module in model.modules() if module._parameters), None)
    if not isinstance(first, nn.Embedding):
        what = "no layer with weights" if first is None else f"a {type(first).__name__} as its first layer"
        raise ConfigError(
            f"batches: {type(model).__name__} has {what} and no Embedding, so nothing says what its inputs are; pass "
            "--batches module:function, a function of the step that returns (inputs, targets)"
        )
    known = getattr(getattr(model, "config", None), "vocab_size", None)
    return known if isinstance(known, int) else first.num_embeddings


# ------------------------------------------------------------------------------------------------------- the training


def train(options: Options, context: ParallelContext, chunks: int) -> Seen:
    """Train, on this rank.

    Args:
        pieces: how many microbatches all data ranks of the sharded run have together.
    """
    model = _build(options, context.config.seed)
    criterion = _criterion(options, model)
    batches = _batches(options, model, context.config, options.batch_size or 2 * chunks)
    engine, *_ = initialize(
        model,
        torch.optim.SGD(model.parameters(), lr=options.lr, momentum=MOMENTUM),
        criterion,
        plan=None if options.plan is None else load_attribute(options.plan, "plan"),
        algorithms=ALGORITHMS[options.norms],
    )
    seen = Seen({axis: getattr(context, axis).rank for axis in ("pp", "dp", "tp")})
    seen.trained = [name for name, value in engine.module.named_parameters() if value.requires_grad]
    keep = _keeping(context)
    seen.start = keep(engine.full_state_dict())
    for step, (x, y) in enumerate(batches, start=1):
        if len(x) % chunks:
            raise ConfigError(
                f"batch_size: got {len(x)}, expected a multiple of {chunks}, the microbatches of all data ranks"
            )
        if criterion is _cross_entropy and y.is_floating_point():
            raise ConfigError(
                "criterion: the targets are floating-point numbers, for which there is none by default; pass one, such "
                "as --criterion torch.nn.functional:mse_loss"
            )
        seen.microbatch_size = len(x) // chunks
        seen.batches.append(_hash(x, y))
        recorder = ActivationRecorder(engine) if step == 1 else None
        x, y = (tensor.chunk(context.dp.size)[context.dp.rank] for tensor in (x, y))
        seen.losses.append(float(engine.forward_backward(x, y)))
        result = engine.step()
        seen.grad_norms.append(result.grad_norm or 0.0)
        seen.skipped.append(result.overflow)
        if recorder is not None:
            recorder.close()
            seen.notes = [vars(note) for note in recorder.notes]
            seen.modules, seen.packed, seen.random_in = recorder.modules, recorder.packed, recorder.random_in
            seen.gradient = keep(first_gradient(engine))
            seen.after_first = keep(engine.full_state_dict())
        engine.zero_grad()
    seen.end = keep(engine.full_state_dict())
    return seen


def _keeping(context: ParallelContext) -> Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    """Every rank has the whole model; those of one pipeline would write the same."""
    return (lambda tensors: tensors) if context.pp.rank == 0 else lambda tensors: {}


def _hash(*tensors: torch.Tensor) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def main(folder: Path, run: str) -> int:
    """One rank of ``run``; the exit code: 2 for a mistake of the user's, 1 for any other failure."""
    options = Options(**json.loads((folder / "options.json").read_text(encoding="utf-8")))
    faulthandler.dump_traceback_later(options.timeout, exit=True, file=STANDARD_ERROR)
    torch.backends.cudnn.allow_tf32 = False
    launched = False
    try:
        config = configure(options, run)
        with launch_from_environment(config) as context:
            launched = True
            seen = train(options, context, configure(options, "single").parallel.pipeline.num_microbatches)
            torch.save(vars(seen), folder / f"{run}-{context.rank}.pt")
    except Exception as error:
        return _report(error, launched)
    finally:
        faulthandler.cancel_dump_traceback_later()
    return 0


def _report(error: Exception, launched: bool) -> int:
    """Print what went wrong, once over all ranks; the exit code."""
    mistake = isinstance(error, (ConfigError, LaunchError, FileNotFoundError))
    rank = rank_by_any_variable()
    if not is_echo(error) and (launched or not reported_by_rank_0(str(error), rank)):
        details = str(error) if mistake else f"rank {rank} failed\n{''.join(traceback.format_exception(error))}"
        print(f"error: {details}", file=sys.stderr, flush=True)
    return 2 if mistake else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
