"""The pages that `make docs` builds, read as files: links, names, search."""

import json
import re
from types import ModuleType

import pytest
from commands import COLD, python, succeeded

import paramp

pytest.importorskip("mkdocstrings")


class Page:
    """The ids and the links of a page, and what it loads."""

    def __init__(self, text):
        text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
        text = re.sub(r"(<script\b[^>]*>).*?</script>", r"\1", text, flags=re.DOTALL)
        self.ids = set(re.findall(r'<\w[^>]* id="([^"]*)"', text))
        self.links = re.findall(r'<a\b[^>]* href="([^"]+)"', text)
        self.loaded = re.findall(r'<(?:script|img|link)\b[^>]* (?:src|href)="([^"]+)"', text)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    succeeded(python("-m", "mkdocs", "build", "--strict", "--site-dir", str(folder), timeout=240, **COLD))
    return folder


@pytest.fixture(scope="module")
def pages(site):
    """But for the one of error 404, which is for a server, with absolute links."""
    files = [path for path in site.rglob("*.html") if path.name != "404.html"]
    return {path: Page(path.read_text(encoding="utf-8")) for path in files}


def test_links_lead_to_an_existing_place(pages):
    """And what a page loads is a file of the site."""
    for path, page in pages.items():
        for link in page.links:
            target, _, place = link.partition("#")
            if not re.match(r"\w+:", link):
                file = (path.parent / target).resolve() if target not in ("", ".") else path
                assert file.exists(), f"{path.name}: {link}"
                assert not place or place in pages[file].ids, f"{path.name}: {link}"
        for file in filter(None, page.loaded):
            assert (path.parent / file).exists(), f"{path.name}: {file}"


def test_the_reference_has_every_public_name(pages):
    ids = set().union(*(page.ids for path, page in pages.items() if path.parent.name == "reference"))
    names = {name for name in paramp.__all__ if not isinstance(getattr(paramp, name), (str, ModuleType))}
    assert len(names) > 15
    assert {f"paramp.{name}" for name in names} <= ids


def test_the_search_reads_a_script(pages, site):
    """A page opened from the disk may load scripts, but not request files."""
    script = (site / "search" / "search_index.js").read_text(encoding="utf-8")
    entries = json.loads(script.removeprefix("var search_index = ").removesuffix(";\n"))
    for entry in entries:
        file, _, place = entry["location"].partition("#")
        assert not place or place in pages[site / (file or "index.html")].ids, entry["location"]
    assert "clip_grad_norm_" in {entry["title"] for entry in entries}
    assert "XMLHttpRequest" not in (site / "search" / "main.js").read_text(encoding="utf-8")
