"""What ``make docs`` adds to Material for MkDocs: links in docstrings, tables for phones, the version, no network.

mkdocs loads this file for the functions (``hooks``), mkdocstrings for the class (``extensions``); see ``mkdocs.yml``.
"""

import logging
import re
import tomllib
from pathlib import Path
from textwrap import dedent
from typing import Any
from xml.etree.ElementTree import Element

import griffe
from markdown import Extension, Markdown
from markdown.treeprocessors import Treeprocessor
from mkdocs.config.defaults import MkDocsConfig

ROOT = Path(__file__).parents[2]
ROLE = re.compile(r":(?:attr|class|data|func|meth|mod):`~?([\w.]+)`")
LITERAL_BLOCK = re.compile(r"(?<=:):\n\n((?: {4}.*\n|\n)+ {4}.*)|^::\n\n((?: {4}.*(?:\n+|$))+)", re.MULTILINE)
LOADED = re.compile(r"<(?:script|img|iframe)[^>]*\ssrc=\"(?:https?:)?//[^>]*>|<link[^>]*\shref=\"(?:https?:)?//[^>]*>")


class SphinxMarkup(griffe.Extension):
    """Turns the Sphinx markup of docstrings into Markdown: roles become links, literal blocks become Python code."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of ``obj``."""
        if obj.docstring is not None:
            text = ROLE.sub(lambda match: _link(obj, match), obj.docstring.value)
            obj.docstring.value = LITERAL_BLOCK.sub(_code_block, text)


def _link(obj: griffe.Object, match: re.Match[str]) -> str:
    """A link, or code without a link where no page describes the target."""
    target = match[1]
    shown = target.rpartition(".")[2] if "`~" in match[0] else target.lstrip(".")
    first, dot, rest = target.lstrip(".").partition(".")
    try:
        target = obj.resolve(first) + dot + rest
    except griffe.NameResolutionError:
        target = target.lstrip(".")
    return f'<autoref optional identifier="{target}"><code>{shown}</code></autoref>'


def _code_block(match: re.Match[str]) -> str:
    return f"\n\n```python\n{dedent(match[1] or match[2]).rstrip()}\n```\n\n"


class LabelledTables(Extension, Treeprocessor):
    """Gives each cell of a table the text of its column's head: on a phone, ``site.css`` shows rows as cards."""

    def extendMarkdown(self, md: Markdown) -> None:
        md.treeprocessors.register(self, "labelled-tables", 5)

    def run(self, root: Element) -> None:
        for table in root.iter("table"):
            heads = ["".join(head.itertext()) for head in table.iter("th")]
            for row in table.iterfind("tbody/tr"):
                for head, cell in zip(heads, row, strict=True):
                    if head:
                        cell.set("data-label", head)


def on_config(config: MkDocsConfig) -> None:
    """Put the version into each page's head, and a tab for the repository, once ``pyproject.toml`` names one.

    Not as ``repo_url``, for which Material asks GitHub how many stars there are.
    """
    version = re.search(r'^__version__ = "(.*?)"', (ROOT / "paramp/__init__.py").read_text("utf-8"), re.MULTILINE)
    assert version is not None
    config.site_name += f" {version[1]}"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    if repository := project.get("urls", {}).get("Repository"):
        config.nav = [*(config.nav or []), {"Repository": repository}]
    config.markdown_extensions.append(LabelledTables())


def on_post_page(output: str, **_: Any) -> None:
    """Warn, which ``--strict`` makes an error, of a page that loads something over the network."""
    for found in LOADED.findall(output):
        logging.getLogger("mkdocs.hooks").warning("a page opened from the disk must not load %s", found)
