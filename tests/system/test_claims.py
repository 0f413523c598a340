"""Each promise of README, docs and CHANGELOG has an entry in ``tests/claims.toml`` that names what shows it."""

from collections import Counter

import pytest
from claims import claims, entries, missing, pages, problem, skeleton


@pytest.mark.parametrize("page", pages())
def test_every_claim_has_an_entry(page):
    lacking = missing(page)
    assert not lacking, "\n" + "\n".join(skeleton(page, one) for one in lacking)


def test_every_entry_is_a_claim_and_names_what_shows_it():
    of_page = {page: claims(page) for page in pages()}
    stale = [entry for entry in entries() if entry["says"] not in of_page.get(entry["page"], [])]
    assert not stale, "these do not stand in the page any more"
    wrong = [(entry["page"], entry["says"], why) for entry in entries() if (why := problem(entry))]
    assert not wrong


def test_an_entry_stands_once():
    counts = Counter((entry["page"], entry["says"]) for entry in entries())
    assert not [one for one, count in counts.items() if count > 1]


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        ({"shown": []}, "neither a test"),
        ({"kind": "rhetoric"}, "expected one of"),
        ({"kind": "example", "shown": ["benchmarks/step.py"]}, "nothing in shown"),
        ({"shown": ["benchmarks/none.py"]}, "no such file"),
        ({"shown": ["tests/system/test_claims.py"]}, "no such test"),
        ({"shown": ["tests/system/test_claims.py::test_that_is_not_there"]}, "no such test"),
    ],
)
def test_an_entry_that_shows_nothing_is_found(entry, why):
    assert why in problem(entry)


def test_a_claim_is_a_word_or_a_number_outside_of_code(tmp_path, monkeypatch):
    text = """# Every title
Ranks agree. *All* of them, by `any()`. It takes 0.94 of the time. See [every page](x.md). With fp16 and `16-mixed`.

- It never waits
  for a rank.

```python
every = 1
```

| mode | ratio |
|---|---|
| a | 0.5 |

| mode | dtype |
|---|---|
| a | half |
"""
    (tmp_path / "page.md").write_text(text)
    monkeypatch.setattr("claims.ROOT", tmp_path)
    assert claims("page.md") == [
        "*All* of them, by `any()`.",
        "It takes 0.94 of the time.",
        "See every page.",
        "It never waits for a rank.",
        "table, any: | mode | ratio |",
    ]
