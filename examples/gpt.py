"""A GPT on bytes, in any layout: the model's own tensor plan and stages.

python examples/gpt.py                                                          one process
torchrun --standalone --nproc-per-node 4 examples/gpt.py 2 2                    tensor 2 x pipeline 2
torchrun --standalone --nproc-per-node 4 examples/gpt.py 2 2 --sequence-parallel
python examples/gpt.py --preset gpt2-124m --data FOLDER                         GPT-2 on the text in a folder

For real runs use launch/train.py, which adds data formats, checkpoints and logs.
"""

import argparse
import sysconfig
from pathlib import Path

import torch

import paramp
from paramp.models import GPT
from paramp.parallel.partition import units

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("tensor", type=int, nargs="?", default=1)
parser.add_argument("pipeline", type=int, nargs="?", default=1)
parser.add_argument("--sequence-parallel", action="store_true")
parser.add_argument("--preset", default="tiny")
parser.add_argument("--data", type=Path, help="a file or a folder; by default the source of Python's standard library")
parser.add_argument("--precision", default="16-mixed")
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--batch-size", type=int, default=8, help="of all data ranks together")
parser.add_argument("--seq-len", type=int, default=64)
options = parser.parse_args()

folder = options.data.expanduser() if options.data else Path(sysconfig.get_paths()["stdlib"])
paths = [folder] if folder.is_file() else sorted(folder.rglob("*") if options.data else folder.glob("*.py"))
text = b"\n".join(path.read_bytes() for path in paths if path.is_file())
tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()

config = {
    "parallel": {
        "tensor": options.tensor,
        "pipeline": options.pipeline,
        "sequence_parallel": options.sequence_parallel,
    },
    "precision": options.precision,
    "clip_grad_norm": 1.0,
}

with paramp.launch_from_torch(config) as context:
    model = GPT.preset(options.preset, max_seq_len=options.seq_len, vocab_size=256)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, *_ = paramp.initialize(model, optimizer, model.loss)
    print(f"rank {context.rank} has {', '.join(name for name, _ in units(engine.module))}", flush=True)
    size = options.batch_size // context.dp.size
    for step in range(1, options.steps + 1):
        generator = torch.Generator().manual_seed(step)  # the same batch on every rank, which takes its part
        starts = torch.randint(len(tokens) - options.seq_len, (options.batch_size,), generator=generator)
        windows = torch.stack([tokens[start : start + options.seq_len + 1] for start in starts])
        windows = windows[context.dp.rank * size : (context.dp.rank + 1) * size]
        x, y = windows[:, :-1], windows[:, 1:]
        loss = engine.forward_backward(x, y)
        result = engine.step()
        engine.zero_grad()
        if context.is_main and step % 10 == 0:
            print(f"step {step}: loss {loss.item():.4f}, grad norm {result.grad_norm:.3f}, scale {result.loss_scale:g}")
