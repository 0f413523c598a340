"""``paramp verify``: the two runs on this machine, and their comparison.

Each rank is ``python -m paramp.tools.verify.two_runs FOLDER RUN``. It trains the user's model for a few steps and
writes a :class:`RankRecord` into the folder, one file a rank.
"""

import copy
import faulthandler
import hashlib
import importlib
import json
import math
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...base.dtensor import is_inexact
from ...base.errors import ConfigError, require
from ...base.trees import tensors
from ...distributed.context import ParallelContext
from ...distributed.error_report import report_failure
from ...distributed.launch_from_torch_mpi_slurm import launch_from_environment
from ...distributed.local_launcher import start_processes
from ...engine.engine import Engine
from ...engine.initialize import initialize
from ...engine.power_of_two_loss_divisor import Criterion
from ...optim.replicated_gradients import let_differ
from ...parallel.microbatches import Batch
from .activation_recorder import ActivationRecorder, RankRecord, gradient_of, perturb
from .compare import NUM_PERTURBED, compare, rounding
from .options import EXACT, NORMS, Options, adapts, configure
from .user_code import build_model, choose_criterion, cross_entropy, load_attribute, load_batches

MOMENTUM = 1e-30
"""So small that SGD keeps no more than the last gradient."""
LR = 0.1
"""Of gradients that are clipped to 1."""
LEAST_SCALE = 2.0**-14
LOWER = 16.0
"""What the loss scale is divided by after an overflow, so that no run is near the limit."""
AnyReport = Any
"""A :class:`.report.Report`; with ``exact`` that of the exact mode's comparison, with the same methods."""
STANDARD_ERROR = 2
"""The file descriptor, which is valid even if ``sys.stderr`` is replaced."""


def verify(options: Options, tolerance: float | None = None) -> AnyReport | int:
    """Run the model in one process and then sharded, on this machine, and compare.

    Returns the report, or the exit code of a run that failed and printed its error.

    Raises:
        ConfigError: the options are wrong, or the runs cannot be compared.
    """
    if tolerance is not None:
        require(0 <= tolerance < math.inf, "tolerance", tolerance, "a finite number of 0 or more")
        require(not options.exact, "tolerance", tolerance, "none with exact, which compares bits")
    config = configure(options, "sharded")
    sizes = {"sharded": config.parallel.least_world_size, "single": 1}  # which starts its steps where the other did
    with tempfile.TemporaryDirectory(prefix="paramp-verify-") as name:
        folder = Path(name)
        (folder / "options.json").write_text(json.dumps(asdict(options)), encoding="utf-8")
        for run, size in sizes.items():
            code = start_processes([sys.executable, "-m", "paramp.tools.verify.two_runs", name, run], size)
            if code:
                print(f"error: the {run} run failed ({size} process{'es' if size > 1 else ''})", file=sys.stderr)
                return 2 if code == 2 else 1
        return compare_runs(options, folder, tolerance)


def compare_runs(options: Options, folder: Path, tolerance: float | None = None) -> AnyReport:
    """Compare what the ranks of both runs have written to ``folder``."""
    config = configure(options, "sharded")
    sizes = {"single": 1, "sharded": config.parallel.least_world_size}
    records: dict[str, list[RankRecord]] = {}
    for run, size in sizes.items():
        number = size if options.exact or run == "sharded" else 1 + NUM_PERTURBED
        files = [torch.load(folder / f"{run}-{index}.pt", weights_only=True, mmap=True) for index in range(number)]
        records[run] = [RankRecord(**attributes) for attributes in files]
    if not options.exact:
        single, *perturbed = records["single"]
        return compare(single, perturbed, records["sharded"], config, tolerance)
    report: AnyReport = importlib.import_module(EXACT).compare_runs(options, folder, config, records)
    return report


def train(options: Options, context: ParallelContext, num_microbatches: int, folder: Path) -> RankRecord:
    """Train on this rank of the layout, and write the state before each step to ``folder``.

    ``num_microbatches`` is the total over all data ranks. After an overflow the step is made again with a lower scale.
    """
    engine, batches, record = _prepared(options, context, num_microbatches)
    if context.cp.size > 1:  # whose first batch has a trial, with outputs of some tokens
        engine.evaluate(local_rows(batches[0], context))
    with ActivationRecorder(engine, record):
        for step, batch in enumerate(batches, start=1):
            engine.save(folder / f"state-{step}")
            _step(engine, batch, record, context)
            while record.skipped[-1] and _lower_scale(engine):
                record.forget_step()
                engine.save(folder / f"state-{step}")
                _step(engine, batch, record, context)
            record.replicas += [f"after step {step}: {difference}" for difference in engine.check_replicas()]
    return record


def replay(options: Options, context: ParallelContext, num_microbatches: int, folder: Path) -> Iterator[RankRecord]:
    """Make the steps of :func:`train` in one process, from its states in ``folder``, and again from perturbed ones."""
    engine, batches, start = _prepared(options, context, num_microbatches)
    unit = 2.0 * rounding(context.config.precision)
    for index in range(1 + NUM_PERTURBED):
        record, generator = copy.deepcopy(start), torch.Generator().manual_seed(index)
        with ActivationRecorder(engine, record):
            for step, batch in enumerate(batches, start=1):
                engine.load(folder / f"state-{step}")
                if index:
                    perturb(engine, unit, generator)
                _step(engine, batch, record, context)
        yield record


def _prepared(
    options: Options, context: ParallelContext, num_microbatches: int
) -> tuple[Engine, list[Batch], RankRecord]:
    sgd = partial(torch.optim.SGD, lr=options.lr or LR, momentum=MOMENTUM)
    engine, checked, record = prepared(options, context, 2 * num_microbatches, num_microbatches, sgd)
    let_differ(engine._weights.gradients)  # no error in a step: the report says more of where runs diverge
    batches = [*checked]
    record.batches = [digest_of(batch) for batch in batches]
    record.microbatch_size = batches[0].size // num_microbatches
    return engine, batches, record


def _step(engine: Engine, batch: Batch, record: RankRecord, context: ParallelContext) -> None:
    """Make a step, and add all that is compared to ``record``."""
    before = engine.full_state_dict()
    loss = float(engine.forward_backward(local_rows(batch, context)))
    result = engine.step()
    change: dict[str, torch.Tensor] = {}
    gradient: dict[str, torch.Tensor] = {}
    if result.stepped:
        after = engine.full_state_dict()
        numbers = {name: value for name, value in after.items() if is_inexact(value)}
        change = {name: value - before[name] for name, value in numbers.items()}
        gradient = gradient_of(engine, result.grad_norm or 0.0)
    engine.zero_grad()
    keeps = context.stage_axis.rank == 0
    record.losses.append(loss)
    record.grad_norms.append(result.grad_norm or 0.0)
    record.skipped.append(result.overflow)
    record.gradients.append(gradient if keeps else {})
    record.steps.append(change if keeps else {})


def _lower_scale(engine: Engine) -> bool:
    """Lower the loss scale after an overflow. False: it cannot be lowered."""
    scaling, scale = engine.precision.scaling, engine.scaler.get_scale()
    if scaling is None or not adapts(scaling) or scale <= (scaling.min_scale or LEAST_SCALE):
        return False
    engine.scaler.update(scale / LOWER)
    return True


def prepared(
    options: Options,
    context: ParallelContext,
    size: int,
    multiple: int,
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
) -> tuple[Engine, Iterator[Batch], RankRecord]:
    """The engine, the global batches, by default of ``size`` samples, a ``multiple`` of, and a record of the start."""
    model = build_model(options, context.config.seed)
    batches = [*load_batches(options, model, context.config.seed, options.batch_size or size)]
    criterion = choose_criterion(options, model, batches[0])
    engine, *_ = initialize(
        model,
        optimizer(model.parameters()),
        criterion,
        plan=None if options.plan is None else load_attribute(options.plan, "plan"),
        algorithms=NORMS[options.norms],
    )
    record = RankRecord(context.dp.rank, context.tensor_axis.rank, context.stage_axis.rank, context.cp.rank)
    record.trained = [name for name, value in engine.module.named_parameters() if value.requires_grad]
    start = engine.full_state_dict()
    if context.stage_axis.rank == 0:  # all ranks of a pipeline have it
        record.start = start
    return engine, _checked(batches, criterion, multiple), record


def local_rows(batch: Batch, context: ParallelContext) -> Batch:
    """The part of a global batch that this data rank runs."""
    axis, samples = context.dp, batch.size // context.dp.size
    return batch.rows(slice(axis.rank * samples, (axis.rank + 1) * samples))


def _checked(batches: Iterable[Batch], criterion: Criterion | None, multiple: int) -> Iterator[Batch]:
    """``batches``; a ConfigError if one has no ``multiple`` of samples, or does not match the criterion."""
    for batch in batches:
        if batch.size % multiple:
            expected = f"a multiple of {multiple}, the microbatches of all data ranks"
            raise ConfigError(f"batch_size: got {batch.size}, expected {expected}")
        if criterion is cross_entropy and any(target.is_floating_point() for target in tensors(batch.target)):
            raise ConfigError(
                "criterion: the targets are floating-point numbers, for which there is no default criterion; pass one, "
                "such as --criterion torch.nn.functional:mse_loss"
            )
        yield batch


def digest_of(batch: Batch) -> str:
    """A hash of the tensors in ``batch``."""
    digest = hashlib.sha256()
    for path, leaf in batch.unwrapped().leaves():
        digest.update(path.encode())
        if isinstance(leaf, torch.Tensor):
            digest.update(f"{tuple(leaf.shape)} {leaf.dtype}".encode())
            digest.update(leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def main(folder: Path, run: str) -> int:
    """Run one rank of ``run``. Returns the exit code: 2 for a user error, 1 for any other failure."""
    options = Options(**json.loads((folder / "options.json").read_text(encoding="utf-8")))
    faulthandler.dump_traceback_later(options.timeout, exit=True, file=STANDARD_ERROR)
    torch.backends.cudnn.allow_tf32 = False
    try:
        config = configure(options, run)
        with launch_from_environment(config) as context:
            records: Iterable[RankRecord]
            num_microbatches = configure(options, "single").parallel.pipeline.num_microbatches
            if options.exact:
                run_exactly = importlib.import_module(EXACT).train_exactly
                records = [run_exactly(options, context, num_microbatches, folder / f"{run}-{context.rank}")]
            elif run == "sharded":
                records = [train(options, context, num_microbatches, folder)]
            else:
                records = replay(options, context, num_microbatches, folder)
            for index, record in enumerate(records, start=context.rank):
                torch.save(vars(record), folder / f"{run}-{index}.pt")
    except Exception as error:
        return report_failure(error)
    finally:
        faulthandler.cancel_dump_traceback_later()
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
