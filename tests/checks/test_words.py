"""Words that were given up for the field's own stand nowhere."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PLACES = ["paramp", "launch", "examples", "benchmarks", "docs", "tests", "README.md", "CONTRIBUTING.md"]
SUFFIXES = {".py", ".md", ".toml", ".sh", ".sbatch"}

RETIRED = ["parcel", "slate", "obituary", "obituaries", "witness", "whereabouts", "spelling", "verdict", "ears"]


def files():
    for place in PLACES:
        path = ROOT / place
        yield from [path] if path.is_file() else sorted(found for found in path.rglob("*") if found.suffix in SUFFIXES)


def words_of(text):
    """The words of a text, those of snake_case and CamelCase apart, in lower case."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", text)]


def test_retired_words_are_not_used():
    retired = {form for word in RETIRED for form in (word, f"{word}s", f"{word}es")}
    places = ((path, path.read_text(encoding="utf-8")) for path in files() if path != Path(__file__))
    found = {path.relative_to(ROOT): retired.intersection(words_of(text)) for path, text in places}
    assert {path: words for path, words in found.items() if words} == {}
