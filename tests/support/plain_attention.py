"""Attention in plain torch on one process, by its definition, and the cases that attention over ranks has to match."""

import functools
from dataclasses import dataclass
from typing import Any

import torch

from paramp.parallel.context_axis.attention_kernels import kept

SEED = 0x1234_5678_9ABC
BATCH, LENGTH = 2, 48


@dataclass(frozen=True)
class Case:
    """Shapes and options of attention."""

    heads: int = 4
    key_heads: int = 4
    features: int = 6
    value_features: int = 6
    causal: bool = True
    documents: str = ""
    options: tuple[tuple[str, Any], ...] = ()
    sinks: bool = False

    def arguments(self) -> dict[str, Any]:
        """What ``attention`` takes beside tensors."""
        return {"causal": self.causal, **dict(self.options)}


def _case(**given: Any) -> Case:
    shape = {name: given.pop(name) for name in [*given] if name in Case.__dataclass_fields__}
    return Case(**shape, options=tuple(given.items()))


LENGTHS = {
    "packed": [[5, 20, 1, 22], [17, 31]],
    "packed and padded": [[9, 14, 8, -17], [30, 13, -5]],
    "padded": [[48], [19, -29]],
    "left padded": [[-3, 45], [-26, 22]],
    "all padding": [[48], [-48]],
    "hidden": [[6, 23, 19], [40, -8]],
}
"""Of the documents of each row; negative: padding."""
HIDDEN = {0: [*range(4), *range(20, 31)], 1: [*range(5), *range(33, 40)]}
"""Of each row of ``hidden``, the tokens that nobody sees, though they see others."""

CASES = {
    "causal": _case(),
    "bidirectional": _case(causal=False),
    "window": _case(window=7),
    "a window of one": _case(window=1),
    "a window beyond the sequence": _case(window=60),
    "bidirectional window": _case(causal=False, window=5),
    **{name: _case(documents=name) for name in LENGTHS},
    "packed, bidirectional": _case(causal=False, documents="packed and padded"),
    "packed, window": _case(documents="packed and padded", window=4),
    "GQA": _case(key_heads=2),
    "GQA, padded": _case(heads=8, key_heads=2, documents="padded"),
    "MQA": _case(key_heads=1, causal=False),
    "sinks": _case(sinks=True, window=9),
    "sinks, padded": _case(sinks=True, documents="packed and padded", key_heads=2),
    "soft cap": _case(softcap=1.5, key_heads=2),
    "scale": _case(scale=0.9),
    "MLA": _case(features=9, value_features=5),
    "values wider than keys": _case(features=4, value_features=7, causal=False),
    "dropout": _case(dropout=0.3, dropout_seed=SEED, key_heads=2),
    "everything": _case(
        heads=8,
        key_heads=4,
        features=7,
        value_features=5,
        documents="packed and padded",
        sinks=True,
        window=11,
        softcap=2.0,
        scale=0.7,
        dropout=0.2,
        dropout_seed=SEED,
    ),
}


def documents_of(case: Case) -> torch.Tensor | None:
    """(B, length): the number of each token's document, negative where nobody sees it."""
    if not case.documents:
        return None
    rows = []
    for lengths in LENGTHS[case.documents]:
        numbers = [torch.full((abs(count),), 0 if count < 0 else n + 1) for n, count in enumerate(lengths)]
        rows.append(torch.cat(numbers))
    if case.documents == "hidden":
        for row, places in HIDDEN.items():
            rows[row][places] *= -1
    return torch.stack(rows)


def inputs_of(case: Case, seed: int = 0, length: int = LENGTH) -> dict[str, torch.Tensor]:
    """Queries, keys, values, the gradient of the output, and sinks, fp64."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "q": (BATCH, case.heads, length, case.features),
        "k": (BATCH, case.key_heads, length, case.features),
        "v": (BATCH, case.key_heads, length, case.value_features),
        "gradient": (BATCH, case.heads, length, case.value_features),
    }
    if case.sinks:
        shapes["sinks"] = (case.heads,)
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}


def plain_attention(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None) -> Any:
    """The output."""
    options, groups = dict(case.options), case.heads // case.key_heads
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * options.get("scale", case.features**-0.5)
    if cap := options.get("softcap"):
        scores = cap * torch.tanh(scores / cap)
    length = q.shape[2]
    query, key = torch.arange(length).view(-1, 1), torch.arange(length)
    visible = torch.ones(length, length, dtype=torch.bool)
    if case.causal:
        visible &= key <= query
    if window := options.get("window"):
        visible &= (key - query).abs() < window
    visible = visible.expand(q.shape[0], 1, length, length)
    documents = documents_of(case)
    if documents is not None:
        same = documents.abs().unsqueeze(2) == documents.unsqueeze(1)
        visible = visible & (same & (documents > 0).unsqueeze(1)).unsqueeze(1)
    scores = scores.masked_fill(~visible, -1e300)
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    probabilities = scores.softmax(-1)[..., :length] * visible
    if p := options.get("dropout"):
        places = [torch.arange(count) for count in probabilities.shape]
        probabilities = probabilities * kept(options["dropout_seed"], p, *places) / (1 - p)
    return torch.einsum("bhqk,bhkd->bhqd", probabilities, v)


def results(case: Case, inputs: dict[str, torch.Tensor], function: Any) -> dict[str, torch.Tensor]:
    """The output of ``function(q, k, v, sinks)``, and the gradients of its inputs."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in inputs.items() if name != "gradient"}
    out = function(leaves["q"], leaves["k"], leaves["v"], leaves.get("sinks"))
    out.backward(inputs["gradient"])
    return {"out": out.detach()} | {name: leaf.grad for name, leaf in leaves.items()}


@functools.cache
def expected(case: Case, seed: int = 0, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    """:func:`results` of plain attention, fp64, for the inputs as rounded to ``dtype``."""
    inputs = {name: x.to(dtype).double() for name, x in inputs_of(case, seed).items()}
    return results(case, inputs, functools.partial(plain_attention, case))


def distance(found: torch.Tensor, right: torch.Tensor, largest: float) -> float:
    """The norm of the difference over that of ``right``, or over a thousandth of the ``largest`` norm."""
    norm = max(right.norm().item(), 1e-3 * largest)
    return (found.double() - right).norm().item() / norm
