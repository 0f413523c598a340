"""``paramp verify``: the two runs on this machine, and their comparison.

Each rank is ``python -m paramp.tools.verify.launch FOLDER RUN``. It trains the user's model for a few steps and writes
a :class:`RankRecord` into the folder, one file a rank.
"""

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

from ...base.errors import ConfigError, require
from ...base.trees import tensors
from ...distributed.context import ParallelContext
from ...distributed.error_report import report_failure
from ...distributed.launchers import launch_from_environment
from ...distributed.local_launcher import start_processes
from ...engine.compute_context import Criterion
from ...engine.engine import Engine
from ...engine.initialize import initialize
from ...parallel.batches import Batch
from .activation_recorder import ActivationRecorder, RankRecord, first_gradient
from .compare import compare
from .options import EXACT, NORMS, Options, configure
from .user_code import build_model, choose_criterion, cross_entropy, load_attribute, load_batches

MOMENTUM = 0.9
LR = 0.1
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
    sizes = {"single": 1, "sharded": config.parallel.least_world_size}
    with tempfile.TemporaryDirectory(prefix="paramp-verify-") as name:
        folder = Path(name)
        (folder / "options.json").write_text(json.dumps(asdict(options)), encoding="utf-8")
        for run, size in sizes.items():
            code = start_processes([sys.executable, "-m", "paramp.tools.verify.launch", name, run], size)
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
        files = [torch.load(folder / f"{run}-{rank}.pt", weights_only=True, mmap=True) for rank in range(size)]
        records[run] = [RankRecord(**attributes) for attributes in files]
    if not options.exact:
        return compare(records["single"][0], records["sharded"], config, tolerance)
    report: AnyReport = importlib.import_module(EXACT).compare_runs(options, folder, config, records)
    return report


def train(options: Options, context: ParallelContext, num_microbatches: int) -> RankRecord:
    """Train on this rank; ``num_microbatches`` is the total over all data ranks of the sharded run."""
    # SGD with momentum: its state after one step is the gradient, and it does not normalise the gradient's size.
    sgd = partial(torch.optim.SGD, lr=options.lr or LR, momentum=MOMENTUM)
    engine, batches, record = prepared(options, context, 2 * num_microbatches, num_microbatches, sgd)
    for step, batch in enumerate(batches, start=1):
        record.microbatch_size = batch.size // num_microbatches
        record.batches.append(digest_of(batch))
        local = local_rows(batch, context)
        if step == 1:
            with ActivationRecorder(engine, record):
                _step(engine, local, record)
            _keep(record, "gradient", first_gradient(engine), context)
            _keep(record, "after_first", engine.full_state_dict(), context)
        else:
            _step(engine, local, record)
        engine.zero_grad()
    _keep(record, "end", engine.full_state_dict(), context)
    return record


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
    record = RankRecord(context.batch_axis.rank, context.tensor_axis.rank)
    record.trained = [name for name, value in engine.module.named_parameters() if value.requires_grad]
    _keep(record, "start", engine.full_state_dict(), context)
    return engine, _checked(batches, criterion, multiple), record


def local_rows(batch: Batch, context: ParallelContext) -> Batch:
    """The part of a global batch that this data rank runs."""
    axis, samples = context.batch_axis, batch.size // context.batch_axis.size
    return batch.rows(slice(axis.rank * samples, (axis.rank + 1) * samples))


def _step(engine: Engine, batch: Batch, record: RankRecord) -> None:
    record.losses.append(float(engine.forward_backward(batch)))
    result = engine.step()
    record.grad_norms.append(result.grad_norm or 0.0)
    record.skipped.append(result.overflow)


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


def _keep(record: RankRecord, name: str, tensors: dict[str, torch.Tensor], context: ParallelContext) -> None:
    """Record the whole model on the first rank of each pipeline, because all of them have it."""
    if context.stage_axis.rank == 0:
        setattr(record, name, tensors)


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
            num_microbatches, name = (
                configure(options, "single").parallel.pipeline.num_microbatches,
                f"{run}-{context.rank}",
            )
            if options.exact:
                run_exactly = importlib.import_module(EXACT).train_exactly
                record = run_exactly(options, context, num_microbatches, folder / name)
            else:
                record = train(options, context, num_microbatches)
            torch.save(vars(record), folder / f"{name}.pt")
    except Exception as error:
        return report_failure(error)
    finally:
        faulthandler.cancel_dump_traceback_later()
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
