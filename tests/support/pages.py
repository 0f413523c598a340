"""The code blocks of README and docs."""

import contextlib
import io
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def blocks(page: str, *languages: str) -> list[str]:
    return [body for language, body in BLOCK.findall(read(page)) if language in languages]


def outputs(page: str) -> list[str | None]:
    """What the page says that each Python block prints: a text block, before which a line ends in "prints:"."""
    text, shown = read(page), []
    for block in BLOCK.finditer(text):
        if block[1] == "python":
            between, _, body = text[block.end() :].partition("```text\n")
            is_output = between.endswith("prints:\n\n") and "```" not in between
            shown.append(body.partition("```")[0] if is_output else None)
    return shown


def functions_of(page: str) -> dict[str, Any]:
    """What the first Python block of ``page`` defines."""
    names: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()):
        exec(compile(blocks(page, "python")[0], page, "exec"), names)
    return names


def code_of(page: str, containing: str, language: str = "python") -> str:
    """The block of a page of ``docs`` that contains the words."""
    (found,) = (body for body in blocks(f"docs/{page}", language) if containing in body)
    return found


def run_code(page: str, containing: str, **names: Any) -> dict[str, Any]:
    """The names after that block has run."""
    exec(compile(code_of(page, containing), page, "exec"), names)
    return names


def difference_of(page: str) -> list[str]:
    """The lines of the page's difference between a script before and after, which has at most ten."""
    lines = blocks(f"docs/{page}", "text")[0].splitlines()
    assert len(lines) <= 10
    return lines
