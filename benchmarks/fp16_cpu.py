"""One fp16 training step of the main job on a CPU: emulated products, torch's own, and fp32, in turn.

    torchrun --standalone --nproc-per-node 4 benchmarks/fp16_cpu.py

The three take turns in one run; medians are reported. On a CPU with fp16 arithmetic torch's own products are the
better choice, and paramp takes them by itself.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from contextlib import ExitStack
from pathlib import Path

import torch

import paramp
from paramp.config import load, merge, read_file
from paramp.data import load_corpus, training_windows
from paramp.emulation import has_native_fp16

VARIANTS: dict[str, dict[str, object]] = {
    "fp16, emulated": {"precision": "16-mixed", "emulate_fp16": True},
    "fp16, torch's products": {"precision": "16-mixed", "emulate_fp16": False},
    "fp32": {"precision": "32-true"},
}


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default=str(Path(__file__).parents[1] / "launch" / "tiny.toml"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", help="write the result to this file")
    options = parser.parse_args()
    job = read_file(options.config)

    with ExitStack() as stack:
        engines = {}
        for name, changes in VARIANTS.items():
            context = stack.enter_context(paramp.launch_from_torch(load(merge(job, changes)), device="cpu"))
            model = paramp.models.GPT.preset(context.config.train.model)
            optimizer = torch.optim.AdamW(model.parameters(), lr=context.config.train.lr)
            engines[name], *_ = paramp.initialize(model, optimizer, model.loss)
        settings = context.config.train
        corpus = load_corpus(settings.data)
        size = settings.batch_size // context.dp.size
        seconds: dict[str, list[float]] = {name: [] for name in engines}
        for step in range(options.rounds + 1):
            batch = training_windows(corpus.training, settings.seq_len, 0, step, context.dp.rank * size, size)
            for name, engine in engines.items():
                torch.distributed.barrier()
                start = time.perf_counter()
                engine.forward_backward(*batch)
                engine.step()
                if step:  # the first round finds shapes and warms caches
                    seconds[name].append(time.perf_counter() - start)
        if not context.is_main:
            return
        medians = {name: statistics.median(values) for name, values in seconds.items()}
        emulated, own, full = (medians[name] for name in VARIANTS)
        result = {
            "machine": f"{cpu_name()}, {torch.get_num_threads()} thread(s) in each of {context.world_size} processes",
            "torch": torch.__version__,
            "native_fp16": has_native_fp16("cpu"),
            "rounds": options.rounds,
            "median_seconds": medians,
            "torchs_products_over_emulated": own / emulated,
            "emulated_over_fp32": emulated / full,
        }
        print(f"{result['machine']}, torch {torch.__version__}")
        for name, value in medians.items():
            print(f"{name:24} {value:8.3f} s a step   {value / full:6.2f} x fp32")
        print(f"emulated is {own / emulated:.1f} times as fast as torch's fp16 products")
        print(json.dumps(result))
        if options.json:
            Path(options.json).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
