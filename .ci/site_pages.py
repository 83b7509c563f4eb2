"""Texts of the site for programs: llms.txt, llms-full.txt, and a Markdown copy of each page.

All of them come from the navigation in zensical.toml. So they have the same pages, in the same order, as the site.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

NavEntry = str | Mapping[str, Any]
"""One entry of the navigation: the path of a page, or a title with a path or with a list of entries."""

_SNIPPET = re.compile(r'^--8<-- "(?P<path>[^"]+)"$', re.MULTILINE)
_DIRECTIVE = re.compile(r"^::: (?P<name>[\w.]+)$", re.MULTILINE)
_LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
_SENTENCE_END = re.compile(r"(?<=[.?])\s")


class Page(NamedTuple):
    section: str
    """The title of the top-level entry that holds the page."""
    title: str
    """"" if the heading of the page is its title."""
    path: str
    """The path of the page's Markdown file, below docs/."""


def pages_of(nav: Sequence[NavEntry]) -> Iterator[Page]:
    """Yield the pages of a navigation in its order."""
    for entry in nav:
        section = "" if isinstance(entry, str) else next(iter(entry))
        yield from (Page(section, title, path) for title, path in _leaves([entry]))


def _leaves(nav: Sequence[NavEntry]) -> Iterator[tuple[str, str]]:
    for entry in nav:
        if isinstance(entry, str):
            yield "", entry
            continue
        for title, value in entry.items():
            yield from [(title, value)] if isinstance(value, str) else _leaves(value)


def expanded(text: str, root: Path, docstring: Callable[[str], str]) -> str:
    """Return the text of a page with the files that it includes, and with the docstrings of the names that it lists.

    Args:
        text: The Markdown of the page.
        root: The folder in which the paths of included files begin.
        docstring: Returns the Markdown of a public name, such as `aiodelay.Scheduler`.
    """
    text = _SNIPPET.sub(lambda found: (root / found["path"]).read_text(encoding="utf-8").rstrip("\n"), text)
    return _DIRECTIVE.sub(lambda found: docstring(found["name"]), text)


def summary(text: str) -> str:
    """Return the first sentence of a page, without links; "" if the page has no sentence."""
    for block in text.split("\n\n"):
        if block.strip() and not block.startswith(("#", "|", "```", "::: ", "![")):
            plain = _LINK.sub(r"\1", " ".join(block.split())).removeprefix("**Context.** ")
            return _SENTENCE_END.split(plain, maxsplit=1)[0]
    return ""


def overview(name: str, description: str, pages: Iterable[tuple[Page, str]]) -> str:
    """Return the text of llms.txt: a link to the copy of each page, with the page's first sentence."""
    lines = [f"# {name}", "", f"> {description}", "", "`llms-full.txt` has the texts of all these pages in one file."]
    section = None
    for page, text in pages:
        if page.section != section:
            section = page.section
            lines += ["", f"## {section}", ""]
        title = page.title or text.partition("\n")[0].lstrip("# ")
        about = summary(text)
        lines.append(f"- [{title}]({page.path})" + (f": {about}" if about else ""))
    return "\n".join(lines) + "\n"


def full_text(pages: Iterable[tuple[Page, str]]) -> str:
    """Return the text of llms-full.txt: all pages, each below a line that names its file."""
    return "\n".join(f"<!-- {page.path} -->\n\n{text.strip()}\n" for page, text in pages)
