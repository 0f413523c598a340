"""Each promise of README, docs and CHANGELOG has an entry in ``tests/claims.toml`` that names what shows it."""

import pytest
from claims import claims, entries, missing, pages, problem, skeleton


@pytest.mark.parametrize("page", pages())
def test_every_claim_has_an_entry(page):
    lacking = missing(page)
    assert not lacking, "\n" + "\n".join(map(skeleton, lacking))


def test_every_entry_is_a_claim_and_names_what_shows_it():
    of_page = {page: claims(page) for page in pages()}
    listed = [(page, says, shown) for page, lines in entries().items() for says, shown in lines.items()]
    assert not [entry for entry in listed if entry[1] not in of_page.get(entry[0], [])], "these do not stand there now"
    assert not [(page, says, why) for page, says, shown in listed if (why := problem(shown))]


@pytest.mark.parametrize(
    ("shown", "why"),
    [
        ([], "neither a test"),
        ("rhetoric", "expected a list, or one of"),
        (["benchmarks/none.py"], "no such file"),
        (["tests/system/test_claims.py"], "names no test"),
        (["system/test_claims::test_that_is_not_there"], "no such test"),
    ],
)
def test_an_entry_that_shows_nothing_is_found(shown, why):
    assert why in problem(shown)


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
