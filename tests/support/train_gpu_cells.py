"""Trains cells on the fake device, one after another: a cell is a line of JSON on stdin, what came of it one on stdout.

Run by :mod:`gpu_cells`, which describes the cells.
"""

from __future__ import annotations

# isort: off
import fake_cuda  # before torch
from fake_cuda import waits

# isort: on
import json
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from gpu_programs import PROGRAMS, STEPS, tokens
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode

import paramp
from paramp.engine.shared_failure import SharedFailure
from paramp.models import GPT, GPTConfig


def _agree(self: SharedFailure, error: Exception | None, group: Any = None) -> None:
    waits.add("exchange of failures (SharedFailure.agree)")
    if error is not None:
        raise error


# Other ranks are not there to fail, and a rank that fails does not wait for them.
SharedFailure.agree = _agree
SharedFailure._peers_failed_too = lambda self: False

SHAPE = {"num_layers": 2, "num_heads": 2, "width": 32, "max_seq_len": 16, "vocab_size": 64}


def adamw(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, eps=1e-4, **options)


def by_shape(of_matrices: Callable[..., Any], of_vectors: Callable[..., Any]) -> Callable[[Any], Any]:
    def make(parameters: Any) -> list[torch.optim.Optimizer]:
        matrices, vectors = [], []
        for parameter in parameters:
            (matrices if parameter.ndim > 1 else vectors).append(parameter)
        return [of_matrices(matrices), of_vectors(vectors)]

    return make


def sum_and_count(logits: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, int]:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum"), target.numel()


SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
OPTIMIZERS = {
    "adamw": adamw,
    "sgd": SGD,
    "two": by_shape(partial(torch.optim.Adam, lr=1e-3, eps=1e-4), SGD),
    "foreach": partial(adamw, foreach=True),
    "fused": partial(adamw, fused=True),
    "matrices": by_shape(partial(torch.optim.Muon, lr=1e-2), adamw),
}
CRITERIA = {"mean": GPT.loss, "sum and count": sum_and_count}
LOOPS: dict[str, Callable[[Any, torch.Tensor], None]] = {
    "forward_backward": lambda engine, x: engine.forward_backward(x, x),
    "without the loss": lambda engine, x: engine.forward_backward(x, x, return_loss=False),
    "by hand": lambda engine, x: engine.backward(engine.criterion(engine(x), x)),
}


def train(cell: dict[str, Any], rank: int, objects: fake_cuda.Objects) -> None:
    """Three steps of ``cell`` on ``rank``, which leave in ``waits`` what the host waited for in the last one."""
    counters.clear()
    config = paramp.Config(**{"clip_grad_norm": 1.0, "hang_timeout": None} | cell["config"])
    if cell.get("num_zeros"):
        config = replace(config, precision=replace(config.precision, log_num_zeros=True))
    batch_of = LOOPS[cell.get("loop", "forward_backward")]
    with (
        fake_cuda.world(rank, cell["size"], objects),
        paramp.launch(config, rank, cell["size"], "localhost", 1, device="cuda") as context,
        fake_cuda.Device(),
    ):
        with torch.device("cuda" if "program" in cell else "cpu"):
            model = GPT(GPTConfig(**SHAPE | cell.get("model", {})))
        optimizer = OPTIMIZERS[cell.get("optimizer", "adamw")](model.parameters())
        if "program" in cell:
            PROGRAMS[cell["program"]](model, optimizer)
            return
        engine, *_ = paramp.initialize(model, optimizer, CRITERIA[cell.get("criterion", "mean")])
        for _ in range(STEPS):
            x = tokens()
            x = x.pin_memory() if cell.get("batches") == "pinned" else x.cuda()
            waits.begin_step()
            for _ in range(context.config.gradient_accumulation):
                batch_of(engine, x)
                engine.step()
                engine.zero_grad()
            waits.end_step()
    if config.compile and not counters["stats"]["unique_graphs"] and context.tensor_axis.size == 1:
        raise AssertionError("nothing was compiled")


def outcome(cell: dict[str, Any]) -> dict[str, Any]:
    """What the first and the last rank of the cell waited for in their last step, and the error of one that failed."""
    start, objects, found = time.process_time(), fake_cuda.Objects(), {}
    torch._dynamo.reset()  # what other cells compiled, and what their operators returned, is not this one's
    FakeTensorMode.cache_clear()
    for rank in sorted({0, cell["size"] - 1}):
        waits.begin_step()
        error = None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                train(cell, rank, objects)
        except Exception as raised:
            error = "".join(traceback.format_exception(raised))
        found[rank] = {"waits": waits[:], "error": error}
    return {"ranks": found, "seconds": time.process_time() - start}


if __name__ == "__main__":
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        print(json.dumps(outcome(json.loads(line))), file=answers, flush=True)
