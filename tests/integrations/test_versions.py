"""The versions of other trainers that the tests ran with: pinned, installed, and named on their pages."""

import importlib.metadata
import re

import pytest
from commands import ROOT

PAGES = {
    "accelerate": ("from-accelerate", "from-transformers"),
    "lightning": ("from-lightning",),
    "ray": ("recipes",),
    "torchtitan": ("from-torchtitan",),
    "transformers": ("from-transformers",),
    "trl": ("from-transformers",),
}
PINNED = dict(re.findall(r"^(\w+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))


@pytest.mark.parametrize("name", PAGES)
def test_the_pinned_version_of_a_trainer_is_installed_and_named_on_its_page(name):
    try:
        installed = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{name} is not installed")
    assert installed == PINNED[name], f"another version of {name} than paramp was tested with"
    for page in PAGES[name]:
        text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
        assert re.search(rf"\b{name} {re.escape(PINNED[name])}\b", text, re.IGNORECASE), page
