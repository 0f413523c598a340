"""How often a process aborts at its end: the Hugging Face examples of the pages, each many times on two ranks.

    python benchmarks/process_ends.py --runs 50
    python benchmarks/process_ends.py --runs 50 --examples trainer accelerate --seconds 500

Each rank is forked from a process that has imported the libraries, which takes longer than an example. It runs the
example as its main program and ends as any Python process does. Needs pip install "paramp[transformers]", and trl.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import shutil
import sys
import tempfile
import time
import types
from collections import Counter
from pathlib import Path
from typing import NoReturn

from common import table

from paramp.distributed.rendezvous import free_port

ROOT = Path(__file__).parents[1]
LIBRARIES = (
    *("torch.distributed.tensor", "torch.distributed.pipelining", "torch.distributed.fsdp", "accelerate"),
    *("transformers.trainer", "transformers.models.llama.modeling_llama", "transformers.integrations", "paramp"),
)
ABORTED = "terminate called"
RANKS = 2


def block(page: str, containing: str) -> str:
    """The block of Python in the documentation's page that contains the words."""
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs" / page).read_text(encoding="utf-8"), re.M | re.S)
    (found,) = (body for body in blocks if containing in body)
    return found


def replaced(text: str, *changes: tuple[str, str]) -> str:
    for old, new in changes:
        if old not in text:
            raise ValueError(f"the example has no {old!r} any more")
        text = text.replace(old, new)
    return text


def examples() -> dict[str, tuple[str, list[str]]]:
    """The source and the arguments of each example, with few steps: it is their end that matters."""
    trainer = block("from-transformers.md", "trainer = ParampTrainer(")
    llama = replaced(
        (ROOT / "examples/huggingface_llama.py").read_text(encoding="utf-8"), ("range(1, 21)", "range(1, 3)")
    )
    tokenizer = (
        "from tokenizers import Tokenizer, models\nfrom transformers import PreTrainedTokenizerFast\n"
        "words = Tokenizer(models.WordLevel({str(word): word for word in range(32)}, unk_token='0'))\n"
        "tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token='0', eos_token='1')\n"
    )
    mixin = "import ParampTrainerMixin\n\n\nclass ParampSFTTrainer(ParampTrainerMixin, SFTTrainer):\n    pass\n"
    trl = (
        ("from transformers import Tr", "from datasets import Dataset\nfrom trl import SFTConfig, SFTTrainer  # Tr"),
        ("import ParampTrainer\n", mixin),
        (
            "trainer = ParampTrainer(model,",
            tokenizer + "trainer = ParampSFTTrainer(model, processing_class=tokenizer, args=",
        ),
        ("TrainingArguments(", "SFTConfig("),
        ("data = [", "data = Dataset.from_list(["),
        ("row in tokens]", "row in tokens.tolist()])"),
    )
    return {
        "trainer": (trainer, []),
        "trainer-fsdp": (replaced(trainer, ('"out", ', '"out", fsdp=True, ')), []),
        "trl": (replaced(trainer, *trl), []),
        "accelerate": (
            block("from-accelerate.md", "def train_with_accelerate") + "\nprint(train_with_accelerate())\n",
            [],
        ),
        "llama-tp2": (llama, ["2", "1"]),
        "llama-pp2": (llama, ["1", "2"]),
    }


def run_rank(rank: int, port: int, path: Path, words: list[str], log: Path) -> NoReturn:
    """Run the program at ``path`` in this process, as a launcher's rank with its output in ``log``."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.chdir(path.parent)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    program = sys.modules["__main__"] = types.ModuleType("__main__")  # which lives until the interpreter ends
    program.__file__, sys.argv = str(path), [str(path), *words]
    exec(compile(path.read_bytes(), path, "exec", dont_inherit=True), program.__dict__)
    sys.exit()


def run_once(path: Path, words: list[str]) -> tuple[list[int], str]:
    """The exit codes of all ranks, negative for a signal's, and what they printed."""
    port, logs = free_port(), [path.with_suffix(f".{rank}") for rank in range(RANKS)]
    pids = []
    for rank, log in enumerate(logs):
        if not (pid := os.fork()):
            run_rank(rank, port, path, words, log)
        pids.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    return codes, "\n".join(log.read_text(encoding="utf-8", errors="replace") for log in logs)


def main() -> None:
    known = examples()
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=5, help="of each example (5)")
    parser.add_argument("--examples", nargs="+", choices=known, default=list(known), help="(all of them)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no run after this time")
    options = parser.parse_args()
    for name in (*LIBRARIES, *(["trl.trainer.sft_trainer"] if "trl" in options.examples else [])):
        importlib.import_module(name)
    begin, rows, failures = time.monotonic(), [], []
    folder = Path(tempfile.mkdtemp())  # no context, which would remove it at the end of each rank
    for name in options.examples:
        source, words = known[name]
        path = folder / f"{name}.py"
        path.write_text(source, encoding="utf-8")
        counts: Counter[int] = Counter()
        aborts = runs = 0
        while runs < options.runs and time.monotonic() - begin < options.seconds:
            codes, printed = run_once(path, words)
            counts.update(codes)
            runs += 1
            aborts += min(codes) < 0 or ABORTED in printed
            failures += [printed] if any(codes) else []
        rows.append([name, str(runs), str(aborts), ", ".join(f"{code}: {counts[code]}" for code in sorted(counts))])
        print(f"{name}: {runs} runs, {aborts} aborted", file=sys.stderr, flush=True)
    shutil.rmtree(folder)
    print(table(["example", "runs", "aborted", "exit codes"], rows))
    if failures:
        sys.exit(f"the first failure:\n{failures[0]}")


if __name__ == "__main__":
    main()
