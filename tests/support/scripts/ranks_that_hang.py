"""Three ranks for each case named, all at once: one of them stops, fails or waits. Their output goes to a folder.

Started as ``ranks_that_hang.py FOLDER CASE...``. The ranks of a case write to ``FOLDER/CASE.RANK``; the exit codes,
None for a rank that was stopped, go to ``FOLDER/codes.json``. Ranks are forked, so that torch is imported only once.
Each case has a clock of its own (:mod:`shared_clock`), on which a busy machine makes no beat late.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
from shared_clock import SharedClock

import paramp
from paramp.distributed import first_failure
from paramp.distributed.rendezvous import free_port

SIZE = 3
PIPELINE = {"pipeline": {"size": 3, "microbatches": 4}}
LONG = 150.0
"""Real seconds: until the heartbeat ends the process."""
CLOCKS = {}
"""The clock of each case."""


def clock():
    """That of this process's case."""
    return CLOCKS[os.environ["CASE"]]


def stop():
    rank = int(os.environ["RANK"])
    clock().wait_for_beats(rank, 2)  # one with the phase
    for other in {*range(SIZE)} - {rank}:
        clock().wait_for_beats(other, 2)  # which has read it: rank 0 stops with the store
    os.kill(os.getpid(), signal.SIGSTOP)


def after(count, function):
    """A hook that calls ``function`` the ``count``-th time."""
    calls = iter(range(1, 100))
    return lambda *_: function() if next(calls) == count else None


def engine_and_layer():
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
    engine, *_ = paramp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.nn.functional.mse_loss)
    return engine, next(module for module in engine.module.modules() if isinstance(module, torch.nn.Linear))


def make_step(engine, size=8):
    engine.forward_backward(torch.ones(size, 4), torch.ones(size, 4))
    engine.step()
    engine.zero_grad()


def stopping(rank, arm):
    """A case of two steps; ``arm`` is called on ``rank`` with the engine and its first layer before the second."""

    def case(context):
        engine, layer = engine_and_layer()
        make_step(engine)
        if context.rank == rank:
            arm(engine, layer)
        make_step(engine)

    return case


forward = stopping(2, lambda _, layer: layer.register_forward_hook(after(3, stop)))
backward = stopping(1, lambda _, layer: layer.weight.register_hook(after(2, stop)))
step = stopping(2, lambda engine, _: engine.before_step.append(stop))
host = stopping(0, lambda _, layer: layer.register_forward_hook(after(1, stop)))


def checkpoint(context):
    with context.phase("checkpoint"):
        if context.rank == 1:
            stop()
        dist.barrier()


def failure(context, culprit=1):
    """The rank ``culprit`` fails; another one does not notice by itself, as in a collective of NCCL's."""
    if context.rank == culprit:
        raise ValueError("disk on fire")
    if context.rank == 1 - culprit:
        time.sleep(LONG)
    dist.barrier()


def leave(context):
    """Rank 0 leaves first, with the store that it hosts."""
    if context.rank > 0:
        clock().wait(PATIENCE["leave"] + 3)


def later_batch(context):
    """Rank 1 passes a later batch of another size."""
    engine, _ = engine_and_layer()
    for number in range(1, 7):
        make_step(engine, 4 if number == 5 and context.rank == 1 else 8)


def departure(context, leave=lambda: None):
    """Rank 1 leaves a step too early. Each other writes its errors, of which the program reports the last one alone."""
    first_failure.SECONDS_TO_READ = LONG  # on a busy machine rank 2 reads it later than a program would wait
    (engine, _), x = engine_and_layer(), torch.ones(8, 4)
    for _ in range(2):
        make_step(engine)
    if context.rank == 1:
        return leave()
    engine.forward_backward(x, x, return_loss=False)
    for waits in (engine.step, lambda: engine.evaluate(x, x), lambda: engine.forward_backward(x, x)):
        try:
            waits()
        except RuntimeError as error:
            print(error, file=sys.stderr, flush=True)
            last = error
    raise last


def early_exit(context):
    """Rank 1 leaves a step too early, and its program ends there."""
    departure(context, lambda: sys.exit(0))


def save_alone(context):
    """Rank 1 saves, and the others go on."""
    engine, _ = engine_and_layer()
    make_step(engine)
    if context.rank == 1:
        engine.save("/nowhere")
    make_step(engine)


def left_out(context):
    """Rank 1 leaves out the first ``step()``; losses that are not reduced would not hold it up before the last one."""
    engine, _ = engine_and_layer()
    for number in range(2):
        engine.forward_backward(torch.ones(8, 4), torch.ones(8, 4), return_loss=False)
        if number or context.rank != 1:
            engine.step()


def step_alone(context):
    """Rank 1 steps twice."""
    engine, _ = engine_and_layer()
    make_step(engine)
    if context.rank == 1:
        engine.step()
    make_step(engine)


def plain(context):
    """A loop of plain torch, in a process group that it made itself."""
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    with paramp.start_heartbeat(3.0, context=context):
        for number in (1, 2):
            with context.phase("data"):
                if number == 2 and context.rank == 1:
                    stop()
            with context.phase("backward"):
                model(torch.ones(8, 4)).sum().backward()
            with context.phase("step"):
                model.zero_grad()


def plain_failure(context, culprit=1):
    with paramp.start_heartbeat(3.0):
        failure(context, culprit)


def failure_of_host(context):
    failure(context, 0)


def plain_failure_of_host(context):
    plain_failure(context, 0)


def from_mesh(config, device):
    """A context over a mesh of torch's own."""
    dist.init_process_group("gloo")
    return paramp.ParallelContext.from_mesh(dist.device_mesh.init_device_mesh(device, (SIZE,), mesh_dim_names=("dp",)))


LAYOUTS = {"forward": PIPELINE, "backward": PIPELINE, "host": PIPELINE, "later_batch": PIPELINE}
PATIENCE = {"leave": 6.0, "save_alone": 6.0}
PATIENCE |= dict.fromkeys(("later_batch", "departure", "early_exit", "left_out", "step_alone"), 30.0)
PATIENCE |= dict.fromkeys(("forward", "backward", "step", "checkpoint", "host"), 15.0)
"""The time-outs of cases in which ranks train, which on a busy machine takes long on the clock too."""


def run(case, rank, port, folder):
    """The life of one rank."""
    output = os.open(folder / f"{case}.{rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 2)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(SIZE), "LOCAL_RANK": str(rank), "MASTER_PORT": str(port)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "CASE": case}
    clock().adopt(rank)
    config = {"hang_timeout": PATIENCE.get(case, 3.0), "hang_end_after": 1, "parallel": LAYOUTS.get(case, {})}
    try:
        launch = from_mesh if case.startswith("plain") else paramp.launch_from_torch
        with launch(config, device="cpu") as context:
            globals()[case](context)
        code = 0
    except SystemExit as error:
        code = int(bool(error.code))
    except Exception:
        sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
        code = 1
    os._exit(code)


def main():
    folder, cases = Path(sys.argv[1]), sys.argv[2:]
    ranks = {}
    for case in cases:
        CLOCKS[case] = SharedClock(SIZE)
        port = free_port()
        for rank in range(SIZE):
            process = os.fork()
            if not process:
                run(case, rank, port, folder)
            ranks[process] = case, rank
    codes, stopped = {case: [None] * SIZE for case in cases}, set()
    while ranks:
        process, status = os.waitpid(-1, os.WUNTRACED | os.WNOHANG)
        if process:
            case, rank = ranks.pop(process)
            if os.WIFSTOPPED(status):
                stopped.add(process)
            else:
                codes[case][rank] = os.waitstatus_to_exitcode(status)
            continue
        for case, its_clock in CLOCKS.items():
            its_clock.tick([rank for of, rank in ranks.values() if of == case])
        time.sleep(0.005)
    for process in stopped:
        os.kill(process, signal.SIGKILL)
    (folder / "codes.json").write_text(json.dumps(codes))


if __name__ == "__main__":
    main()
