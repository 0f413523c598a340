"""The report of ``paramp verify --exact``: the first tensor whose bits differ, and what was compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from .tensor_trace import KINDS, OF_MODULES, Key

SHOWN = 8
"""Names that are listed of what was not compared."""


@dataclass(frozen=True, kw_only=True)
class TensorDifference:
    """A tensor that has other bits in the sharded run."""

    key: Key
    ranks: list[int]
    """Ranks of the sharded run that have them; of copies one rank."""
    num_different: int
    num_elements: int
    index: tuple[int, ...]
    """Of the first element that differs. ``single``, ``sharded``: its values in the runs, and their bits."""
    single: str
    sharded: str

    def __str__(self) -> str:
        at = f" at {[*self.index]}" if self.index else ""
        return (
            f"{described(self.key)}: {self.num_different} of {self.num_elements} elements, first{at}: {self.single} "
            f"single, {self.sharded} on rank{'s' if len(self.ranks) > 1 else ''} {', '.join(map(str, self.ranks))}"
        )


def described(key: Key) -> str:
    """The tensor's name, and where it is computed."""
    call = f" of call {key.call}" if key.call else ""
    where = f"microbatch {key.microbatch}{call} of step {key.step}"
    if key.kind in OF_MODULES:
        what = "forward, output" if key.kind == "forward" else "backward, gradient of the output"
        several = f", call {key.index[0]} of the module" if key.index[0] else ""
        return f"{key.name or '(model)'} ({what}, {where}{several})"
    if key.kind == "loss":
        return f"the loss of {where}" if key.microbatch is not None else f"the loss{call} of step {key.step}"
    if key.kind in ("norm", "decision"):
        what = {"norm": "the gradient norm", "decision": "the decision to skip, or the loss scale,"}[key.kind]
        return f"{what} of step {key.step}"
    if key.kind == "weight gradient":
        return f"{key.name} (weight gradient, {where})"
    if key.kind == "gradient":
        return f"{key.name} (weight gradient, sum over microbatches and ranks, step {key.step})"
    return f"{key.name} ({key.kind} after step {key.step})"


@dataclass
class ExactReport:
    """The comparison of the bits of two runs."""

    layout: str
    precision: str
    steps: int
    first: TensorDifference | None = None
    """In the order in which a step computes (:data:`~.trace.KINDS`), step by step."""
    num_compared: Counter[str] = field(init=False, default_factory=Counter)
    """Tensors by kind. ``num_different``: those of them whose bits differ."""
    num_different: Counter[str] = field(init=False, default_factory=Counter)
    not_compared: dict[str, str] = field(init=False, default_factory=dict)
    """Outputs of modules, their gradients, and weight gradients of one microbatch, that could not be compared; why."""
    incomplete: list[str] = field(init=False, default_factory=list)
    """What one run lacks, such as optimizer state, or has in another dtype."""

    @property
    def ok(self) -> bool:
        """Whether all bits are equal, as far as they were compared."""
        return self.first is None and not self.incomplete

    def leave_out(self, key: Key, reason: str) -> None:
        """Record that a tensor was not compared."""
        if key.kind in OF_MODULES or key.kind == "weight gradient":  # FSDP2 has those of a microbatch elsewhere
            self.not_compared.setdefault(f"{key.name or '(model)'} ({key.kind})", reason)
        else:
            self.incomplete.append(f"{described(key)}: {reason}")

    def as_json(self) -> dict[str, Any]:
        """Plain values for JSON."""
        counts = {"num_compared": dict(self.num_compared), "num_different": dict(self.num_different)}
        return {"ok": self.ok} | asdict(self) | counts  # asdict counts the items of a Counter

    def lines(self) -> Iterator[str]:
        """The report as a table and a conclusion."""
        width = max(map(len, KINDS))
        yield f"{'tensors':<{width}}  compared    differ"
        for kind in KINDS:
            if self.num_compared[kind]:
                yield f"{kind:<{width}}  {self.num_compared[kind]:>8}  {self.num_different[kind]:>8}"
        for name, reason in [*self.not_compared.items()][:SHOWN]:
            yield f"not compared: {name}: {reason}"
        if len(self.not_compared) > SHOWN:
            yield f"not compared: {len(self.not_compared) - SHOWN} others"
        yield from (f"not the same in both runs: {text}" for text in self.incomplete[:SHOWN])
        if self.first is not None:
            yield f"the first tensor that differs: {self.first}"
            return
        if self.incomplete:
            yield f"{self.layout} does not have the tensors of the single process: {self.incomplete[0]}"
            return
        steps = f"{self.steps} step{'s' if self.steps > 1 else ''}"
        yield f"{self.layout} has the bits of the single process in {steps} of {self.precision}"
