"""The job of the train script: model, data, and output files."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from ..base.errors import require


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The job of ``launch/train.py``. The library itself does not read it."""

    model: str = "tiny"
    """A preset of :class:`paramp.models.GPT`. The table ``model`` of the configuration replaces fields of it."""
    data: str = "stdlib"
    """``stdlib``: the source of Python's standard library on this machine, as bytes. Else the path of a text file or a
    folder of text, a ``.bin`` of tokens or a folder with ``train.bin`` and ``val.bin``, Megatron's ``.bin`` and
    ``.idx``, or a folder that ``datasets`` has saved (:func:`paramp.data.corpus.load_corpus`)."""
    validation_data: str | None = None
    """Data to evaluate on, a path of the same kinds. None: a part of ``data`` is held out."""
    tokenizer: str | None = None
    """The path of a Hugging Face ``tokenizer.json``, or of a folder with one. None: text is read as bytes."""
    vocab_size: int | None = None
    """The size of the vocabulary. None: that of the tokenizer or the data, else the model preset's."""
    data_dtype: Literal["auto", "uint16", "uint32"] = "auto"
    """The dtype of a ``.bin``. ``auto``: that in the ``meta.json`` beside it, else uint16."""
    norms: Literal["plain", "low-precision", "fused"] = "plain"
    """``low-precision``: norms take and return autocast's dtype. ``fused``: the same, with Apex's kernels where they
    are installed (:mod:`paramp.precision.norms`)."""
    seq_len: int = 256
    """Tokens of a sequence."""
    batch_size: int = 32
    """Sequences of an optimizer step over all ranks, accumulation included."""
    steps: int = 300
    """Optimizer steps to train."""
    lr: float = 2e-3
    """The highest learning rate: linear warm-up over 5 % of the steps, then a cosine down to a tenth of it."""
    weight_decay: float = 0.1
    """AdamW's decay of the weight matrices."""
    eval_every: int = 100
    """Steps between evaluations; the last step is always followed by one."""
    eval_sequences: int = 64
    """Held-out sequences of an evaluation; always the same ones."""
    checkpoint_dir: str | None = None
    """The folder of checkpoints (:mod:`paramp.engine.checkpoint_manager`). The last step is always saved."""
    checkpoint_every: int | None = None
    """Steps between checkpoints. None: only after the last step and before a requested stop."""
    checkpoint_keep_last: int = 3
    """How many of the newest checkpoints are kept."""
    checkpoint_keep_every: int | None = None
    """Checkpoints of steps that are multiples of this are never deleted."""
    checkpoint_keep_best: bool = False
    """Also save after an evaluation whose ``val_loss`` is the lowest so far, and keep that checkpoint."""
    resume: str | None = None
    """``auto``: resume from the newest whole checkpoint in ``checkpoint_dir``, or start at step 1 if there is none.
    Else the path of a checkpoint."""
    log_dir: str | None = None
    """The folder of ``metrics.jsonl``, ``train.log`` and ``config.json``. None: these are not written."""
    tensorboard: bool = False
    """Also write scalars for TensorBoard, to the folder ``tensorboard`` in ``log_dir``."""
    trace: int | None = None
    """A step whose timeline is written to ``log_dir`` as ``trace.json``, for ``ui.perfetto.dev``."""
    histogram: int | None = None
    """A step whose gradients are counted by their exponents, in ``gradients.json`` and ``gradients.png`` in
    ``log_dir``."""
    peak_tflops: float | None = None
    """One device's peak in 10**12 dense FLOPs a second, for the utilisation (``mfu``). None: from a table of GPUs
    (:mod:`paramp.observe.mfu`); no utilisation for a device that is not in it."""

    def __post_init__(self) -> None:
        for name in ("seq_len", "batch_size", "steps", "eval_every", "eval_sequences", "vocab_size"):
            self._require_count(name)
        self._require(self.lr > 0 and math.isfinite(self.lr), "lr", "a finite number above 0")
        self._require(self.weight_decay >= 0, "weight_decay", "a number of 0 or more")
        peak = self.peak_tflops
        self._require(peak is None or 0 < peak < math.inf, "peak_tflops", "a finite number above 0, or None")
        for name in ("checkpoint_every", "checkpoint_keep_last", "checkpoint_keep_every"):
            self._require_count(name)
        there = self.checkpoint_dir is not None
        missing, fix = "because there is no checkpoint_dir to", "set it with --checkpoint-dir DIR"
        writes = there or self.checkpoint_every is None
        self._require(writes, "checkpoint_every", f"None, {missing} write to; {fix}")
        best = there or not self.checkpoint_keep_best
        self._require(best, "checkpoint_keep_best", f"False, {missing} write to; {fix}")
        for name in ("checkpoint_dir", "resume"):
            self._require(getattr(self, name) != "", name, "a path")
        looks = there or self.resume != "auto"
        self._require(looks, "resume", f"the path of a checkpoint, {missing} look in; {fix}")
        missing, there = "because there is no log_dir to write to; set it with --log-dir DIR", self.log_dir is not None
        self._require(there or not self.tensorboard, "tensorboard", f"False, {missing}")
        for name in ("trace", "histogram"):
            step = getattr(self, name)
            self._require(step is None or 1 <= step <= self.steps, name, f"a step from 1 to {self.steps}")
            self._require(there or step is None, name, f"None, {missing}")

    def _require(self, condition: bool, name: str, allowed: str) -> None:
        require(condition, name, getattr(self, name), allowed)

    def _require_count(self, name: str) -> None:
        value = getattr(self, name)
        require(value is None or value >= 1, name, value, "an integer of 1 or more")
