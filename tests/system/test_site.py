"""The pages that `make docs` builds, read as files: links, links in docstrings, colours, search."""

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from types import ModuleType

import pytest
from commands import ROOT

import paramp

pytest.importorskip("mkdocstrings")


class Page(HTMLParser):
    """The ids, the links, the text and the number of highlighted words of a page."""

    def __init__(self, text):
        super().__init__()
        self.ids, self.links, self.loaded, self.words, self.highlighted = set(), [], [], [], 0
        self.in_script = False
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.in_script = tag == "script"
        self.ids.add(attributes.get("id"))
        self.highlighted += tag == "span" and attributes.get("class") in ("k", "kn", "nb", "s2")
        if tag in ("script", "img", "link"):
            self.loaded.append(attributes.get("src") or attributes.get("href"))
        elif tag == "a" and attributes.get("href"):
            self.links.append(attributes["href"])

    def handle_endtag(self, tag):
        self.in_script = False

    def handle_data(self, text):
        if not self.in_script:
            self.words.append(text)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site):
    found = {path: Page(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}
    del found[site / "404.html"]  # for a server, with absolute links
    return found


def test_links_lead_to_an_existing_place(pages):
    for path, page in pages.items():
        for link in page.links:
            target, _, place = link.partition("#")
            if re.match(r"\w+:", link):
                continue
            file = (path.parent / target).resolve() if target not in ("", ".") else path
            assert file.exists(), f"{path.name}: {link}"
            if place:
                assert place in pages[file].ids, f"{path.name}: {link}"


def test_nothing_is_fetched(pages):
    for path, page in pages.items():
        for file in filter(None, page.loaded):
            assert (path.parent / file).exists(), f"{path.name}: {file}"


def test_docstrings_link_to_what_they_name(pages, site):
    for path, page in pages.items():
        assert not re.search(r":(class|func|meth|attr|mod|data):|(?m:^\s*::\s*$)", "".join(page.words)), path
    training = pages[site / "reference" / "training.html"]
    assert "#paramp.Engine.forward_backward" in training.links
    assert "standalone.html#paramp.DistributedGradScaler" in training.links


def test_the_reference_has_every_public_name(pages):
    ids = set().union(*(page.ids for path, page in pages.items() if path.parent.name == "reference"))
    names = {name for name in paramp.__all__ if not isinstance(getattr(paramp, name), (str, ModuleType))}
    assert len(names) > 15
    assert {f"paramp.{name}" for name in names} <= ids


def test_code_has_colours(pages, site):
    assert pages[site / "index.html"].highlighted > 5
    colours = (site / "css" / "pygments.css").read_text(encoding="utf-8")
    assert ".codehilite .kn, .highlight .kn { color" in colours


def test_the_search_reads_a_script(pages, site):
    """A page opened from the disk may load scripts, but not request files."""
    script = (site / "search" / "search_index.js").read_text(encoding="utf-8")
    entries = json.loads(script.removeprefix("var search_index = ").removesuffix(";\n"))
    for entry in entries:
        file, _, place = entry["location"].partition("#")
        assert not place or place in pages[site / (file or "index.html")].ids, entry["location"]
    assert "clip_grad_norm_" in {entry["title"] for entry in entries}
    assert "XMLHttpRequest" not in (site / "search" / "main.js").read_text(encoding="utf-8")
