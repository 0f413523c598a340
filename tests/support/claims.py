"""The promises of README, docs and CHANGELOG, each with the test or the script that shows it: ``tests/claims.toml``.

A claim is a sentence with a word of :data:`WORDS` or a number, outside of code; of a table, the whole of it, named by
its first row. An entry says where it stands and what shows it:

    [[claim]]
    page = "docs/scaler.md"
    says = "Every rank takes the same decision."
    shown = ["tests/optim/test_loss_scaler.py::test_every_rank_takes_one_decision"]

``shown`` has tests (``file::function``) and programs that print the figure (``benchmarks/step.py``). A sentence that
promises nothing has ``kind`` in its place, one of :data:`KINDS`.

    python tests/support/claims.py docs/scaler.md    # prints an entry for each claim of the page that has none
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
LIST = ROOT / "tests" / "claims.toml"
WORDS = re.compile(r"\b(every\w*|any(thing|where|one)?|all|never|always|same|tested)\b", re.IGNORECASE)
NUMBER = re.compile(r"(?<![\w.*^/-])\d[\d,]*(\.\d+)*(?![\w.-]*[\w-])")
KINDS = {
    "instruction": "it tells the reader what to do, and promises nothing",
    "definition": "it says what a word, a setting or a format means",
    "example": "its numbers are those of an example beside it",
    "elsewhere": "it is about another library or device, and names its source or its version",
}
WRITTEN_BY_A_RUN = ("docs/matrix.md", "docs/versions.md")
"""Pages whose tables a test run writes; their sentences count."""


def pages() -> list[str]:
    docs = sorted((ROOT / "docs").rglob("*.md"))
    return ["README.md", *(path.relative_to(ROOT).as_posix() for path in docs), "CHANGELOG.md"]


def claims(page: str) -> list[str]:
    """The claims of ``page``, in their order, with blanks and links made plain."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return list(dict.fromkeys(one for one in _statements(page, text) if _claims_something(one)))


def _claims_something(statement: str) -> bool:
    words = re.sub(r"`[^`]*`", "`code`", statement)
    return bool(WORDS.search(words) or NUMBER.search(words))


def _statements(page: str, text: str) -> Iterator[str]:
    """The sentences and tables of a page in Markdown."""
    text = re.sub(r"^(```|~~~).*?^\1$", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^#.*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", text):
        plain = " ".join(block.split())
        if plain.startswith("|"):
            if page not in WRITTEN_BY_A_RUN and _claims_something(plain):
                yield "table, any: " + " ".join(block.strip().splitlines()[0].split())
        elif plain:
            yield from re.split(r"(?<=[.!?;])\s+(?=[A-Z`*\"(])", re.sub(r"^(?:[-*]|\d+\.) ", "", plain))


def entries() -> list[dict[str, Any]]:
    return tomllib.loads(LIST.read_text(encoding="utf-8"))["claim"]


def problem(entry: dict[str, Any]) -> str | None:
    """What is wrong with an entry; None if nothing."""
    shown, kind = entry.get("shown", []), entry.get("kind")
    if kind is not None and (kind not in KINDS or shown):
        return f"kind {kind!r}: expected one of {', '.join(KINDS)}, and nothing in shown"
    if kind is None and not shown:
        return "neither a test nor a program shows it; write one, or weaken or cut the sentence"
    for name in shown:
        path, _, function = name.partition("::")
        if not (ROOT / path).is_file():
            return f"{name}: there is no such file"
        if path.startswith("tests/"):
            code = (ROOT / path).read_text(encoding="utf-8")
            if not function or not re.search(rf"^\s*(async )?def {re.escape(function)}\b", code, re.MULTILINE):
                return f"{name}: there is no such test"
    return None


def missing(page: str) -> list[str]:
    listed = {entry["says"] for entry in entries() if entry["page"] == page}
    return [one for one in claims(page) if one not in listed]


def skeleton(page: str, says: str) -> str:
    return f"[[claim]]\npage = {json.dumps(page)}\nsays = {json.dumps(says, ensure_ascii=False)}\nshown = []\n"


if __name__ == "__main__":
    for name in sys.argv[1:] or pages():
        for one in missing(name):
            print(skeleton(name, one))
