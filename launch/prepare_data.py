"""Convert text to token files for launch/train.py: train.bin, val.bin and meta.json.

python launch/prepare_data.py notes.txt books/ --output data/books                                    bytes
python launch/prepare_data.py books/ --output data/books --tokenizer tokenizer.json                   tokens
torchrun --standalone --nproc-per-node 4 launch/train.py --tp 2 --pp 2 --data data/books                trains on them

One file in twenty is held out, or the last twentieth of the tokens if there are too few files. The output files are
flat arrays of uint16, as in nanoGPT, or of uint32 if the vocabulary has more than 65,536 tokens. Memory use is constant
for text with lines. Each file gets its final name when it is complete.
"""

import argparse
import json
import os
import shutil
import sys
from pathlib import Path

from train_app.formats import FLAT_DTYPES
from train_app.text_to_tokens import HELD_OUT_ONE_IN, Encoder, TextFiles, find_text, read_text, split_by_name

from paramp import ConfigError
from paramp.base.values_checked_by_type import user_path


def write_tokens(files: TextFiles, encoder: Encoder, training: Path, held_out: Path, dtype: str) -> tuple[int, int]:
    """Encode ``files`` into the two token files. Returns their numbers of tokens."""
    split = split_by_name(files)
    for target, paths in zip((training, held_out), split, strict=True):
        with target.open("wb") as output:
            for tokens in encoder.encode(map(read_text, paths)):
                output.write(tokens.astype(dtype).tobytes())
    itemsize = int(dtype[-1])
    if not split[1]:
        count = training.stat().st_size // itemsize
        border = (count - count // HELD_OUT_ONE_IN) * itemsize
        with training.open("r+b") as source, held_out.open("wb") as output:
            source.seek(border)
            shutil.copyfileobj(source, output)
            source.truncate(border)
    return training.stat().st_size // itemsize, held_out.stat().st_size // itemsize


def prepare(inputs: list[Path], output: Path, tokenizer: Path | None, force: bool) -> dict[str, object]:
    """Write the three files into ``output``. Returns the content of ``meta.json``.

    Raises:
        ConfigError: there is no text or too little, or the tokenizer cannot be read.
        FileExistsError: a file exists already, and ``force`` is not given.
    """
    targets = [output / name for name in ("train.bin", "val.bin", "meta.json")]
    for target in targets:
        if target.exists() and not force:
            raise FileExistsError(f"output: {str(target)!r} exists; give another folder, or --force to replace it")
    for path in inputs:
        if not path.exists():
            raise ConfigError(f"input: {str(path)!r} does not exist; expected a text file or a folder of them")
    encoder = Encoder(tokenizer)
    found = [find_text(path, {target.resolve() for target in targets}) for path in inputs]
    files = [file for some, _ in found for file in some]
    dtype = "uint16" if encoder.vocab_size <= 2**16 else "uint32"

    output.mkdir(parents=True, exist_ok=True)
    unfinished = [target.with_name(f".{target.name}.{os.getpid()}") for target in targets]
    try:
        num_training, num_held_out = write_tokens(files, encoder, unfinished[0], unfinished[1], FLAT_DTYPES[dtype])
        if not num_training or not num_held_out:
            total = num_training + num_held_out
            raise ConfigError(f"input: {len(files)} files make {total} tokens, too few to hold some out")
        meta: dict[str, object] = {
            "dtype": dtype,
            "vocab_size": encoder.vocab_size,
            "unit": encoder.unit,
            "tokenizer": None if tokenizer is None else tokenizer.name,
            "training_tokens": num_training,
            "held_out_tokens": num_held_out,
            "files": len(files),
            "left_out": sum(left_out for _, left_out in found),
        }
        unfinished[2].write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")
        for source, target in zip(reversed(unfinished), reversed(targets), strict=True):
            source.replace(target)
    finally:
        for path in unfinished:
            path.unlink(missing_ok=True)
    return meta


def main() -> int:
    """Run the command line. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("inputs", nargs="+", type=user_path, metavar="PATH", help="a text file, or a folder of them")
    parser.add_argument("--output", required=True, type=user_path, metavar="DIR", help="where to write the files")
    parser.add_argument("--tokenizer", type=user_path, metavar="FILE", help="a tokenizer.json; without one, bytes")
    parser.add_argument("--force", action="store_true", help="replace existing files")
    given = parser.parse_args()
    try:
        meta = prepare(given.inputs, given.output, given.tokenizer, given.force)
    except (ConfigError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n".join(f"{name} = {value}" for name, value in meta.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
