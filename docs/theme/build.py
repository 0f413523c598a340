"""What `make docs` adds to mkdocs: links in docstrings, colours of code, a search that works from the disk.

mkdocs loads this file for the functions (``hooks``), mkdocstrings for the class (``extensions``); see ``mkdocs.yml``.
"""

import json
import re
from pathlib import Path
from textwrap import dedent
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from pygments.formatters import HtmlFormatter

ROLE = re.compile(r":(?:attr|class|data|func|meth|mod):`~?([\w.]+)`")
LITERAL_BLOCK = re.compile(r"(?<=:):\n\n((?: {4}.*\n|\n)+ {4}.*)|^::\n\n((?: {4}.*(?:\n+|$))+)", re.MULTILINE)


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


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the style sheet of highlighted code."""
    rules = HtmlFormatter(style="default").get_style_defs([".codehilite", ".highlight"])
    files.append(File.generated(config, "css/pygments.css", content=rules))
    return files


def on_post_build(config: MkDocsConfig) -> None:
    """Write the search index as a script: a page opened from the disk may not fetch JSON, nor start a worker."""
    folder = Path(config.site_dir, "search")
    index = json.loads((folder / "search_index.json").read_text(encoding="utf-8"))
    (folder / "search_index.js").write_text(f"var search_index = {json.dumps(index['docs'])};\n", encoding="utf-8")
    for unused in ("search_index.json", "worker.js"):
        (folder / unused).unlink()
