"""What shows the promises of README, docs and CHANGELOG: ``tests/claims.toml``.

A claim is a sentence with a word of :data:`WORDS` or a number, outside of code; of a table, the whole of it, named by
its first row. The list has a table for each page, and in it a line for each claim, with what shows it:

    ["docs/checkpoints.md"]
    "If it fails, they raise the error on every rank." = [
        "checkpoint/test_atomic_dir::test_a_rank_that_cannot_write_is_every_ranks_error",
    ]

That are tests (``file::function``, the file below ``tests/`` and without its ending), programs that print the figure
(``benchmarks/step.py``), and functions of ``tests/support`` that a command runs (``support/torch_versions::main``). A
sentence that promises nothing has one of :data:`KINDS` in their place.
"""

import json
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIST = ROOT / "tests" / "claims.toml"
WORDS = re.compile(r"\b(every\w*|any(thing|where|one)?|all|never|always|same|tested)\b", re.IGNORECASE)
NUMBER = re.compile(r"(?<![\w.*^/-])\d[\d,]*(\.\d+)*(e-?\d+)?(?![\w.-]*[\w-])")
KINDS = {
    "instruction": "it tells the reader what to do, and promises nothing",
    "definition": "it says what a word, a setting or a format means",
    "example": "its numbers are those of an example beside it",
    "elsewhere": "it is about another library or device, and names its source or its version",
}
WRITTEN_BY_A_RUN = ("docs/tested.md", "docs/versions.md")
"""Pages whose tables a test run writes; their sentences count."""


def pages() -> list[str]:
    docs = sorted((ROOT / "docs").rglob("*.md"))
    return ["README.md", *(path.relative_to(ROOT).as_posix() for path in docs), "CHANGELOG.md"]


def claims(page: str) -> list[str]:
    """The claims of ``page``, in their order, with blanks and links made plain."""
    text = re.sub(r"^(```|~~~).*?^\1$|^#.*?$", "", (ROOT / page).read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    found = []
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", text):
        plain = " ".join(block.split())
        if not plain.startswith("|"):
            sentences = re.split(r"(?<=[.!?;])\s+(?=[A-Z`*\"(])", re.sub(r"^(?:[-*]|\d+\.) ", "", plain))
            found += filter(_claims_something, sentences)
        elif page not in WRITTEN_BY_A_RUN and _claims_something(plain):
            found.append("table, any: " + " ".join(block.strip().splitlines()[0].split()))
    return list(dict.fromkeys(found))


def _claims_something(statement: str) -> bool:
    words = re.sub(r"`[^`]*`", "`code`", statement)
    return bool(WORDS.search(words) or NUMBER.search(words))


def entries() -> dict[str, dict[str, list[str] | str]]:
    """What shows each claim, by page and sentence."""
    return tomllib.loads(LIST.read_text(encoding="utf-8"))


def problem(shown: list[str] | str) -> str | None:
    """What is wrong with what an entry says; None if nothing."""
    if isinstance(shown, str):
        return None if shown in KINDS else f"{shown!r}: expected a list, or one of {', '.join(KINDS)}"
    if not shown:
        return "neither a test nor a program shows it; write one, or weaken or cut the sentence"
    for name in shown:
        file, _, function = name.partition("::")
        path = ROOT / "tests" / f"{file}.py" if function else ROOT / file
        if not path.is_file():
            return f"{name}: there is no such file"
        if function and not function.startswith("test_") and not file.startswith("support/"):
            return f"{name}: is no test"
        if function and not re.search(rf"^\s*(async )?def {function}\b", path.read_text("utf-8"), re.MULTILINE):
            return f"{name}: there is no such test"
        if not function and path.is_relative_to(ROOT / "tests"):
            return f"{name}: names no test"
    return None


def missing(page: str) -> list[str]:
    return [one for one in claims(page) if one not in entries().get(page, {})]


def skeleton(says: str) -> str:
    return f"{json.dumps(says, ensure_ascii=False)} = []"
