"""Each sentence of README, docs and CHANGELOG that counts as a claim has an entry that names what shows it."""

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
        (["tests/checks/test_claims.py"], "names no test"),
        (["checks/test_claims::test_that_is_not_there"], "no such test"),
        (["system/test_launch_commands::expected"], "is no test"),
    ],
)
def test_an_entry_that_shows_nothing_is_found(shown, why):
    assert why in problem(shown)
