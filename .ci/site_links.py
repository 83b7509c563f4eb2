"""Finds links that lead nowhere: in the built site, and in Markdown files outside docs/."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from html import unescape
from pathlib import Path
from urllib.parse import unquote

_HTML_LINK = re.compile(r'\s(?:href|src)="?([^"\s>]+)')
_HTML_ID = re.compile(r'\sid="?([^"\s>]+)')
_MARKDOWN_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
_ELSEWHERE = re.compile(r"[a-z][a-z+.-]*:|//", re.IGNORECASE)


def broken_in_site(site: Path) -> Iterator[str]:
    """Yield a text for each internal link of a built site whose file or anchor does not exist."""
    for page in sorted(site.rglob("*.html")):
        links = (unescape(link) for link in _HTML_LINK.findall(_text(page)))
        yield from _broken(page, site, links, _html_ids)


def broken_in_markdown(root: Path, names: Iterable[str]) -> Iterator[str]:
    """Yield a text for each internal link of Markdown files whose file or heading does not exist."""
    for name in names:
        yield from _broken(root / name, root, _MARKDOWN_LINK.findall(_text(root / name)), _heading_ids)


def _broken(page: Path, root: Path, links: Iterable[str], ids_of: Callable[[Path], frozenset[str]]) -> Iterator[str]:
    for link in dict.fromkeys(links):
        if _ELSEWHERE.match(link):
            continue
        path, _, anchor = link.partition("#")
        place = root if path.startswith("/") else page.parent
        target = (place / unquote(path.partition("?")[0]).lstrip("/")).resolve() if path else page.resolve()
        if target.is_dir() and page.suffix == ".html":
            target /= "index.html"
        if not target.exists() or not target.is_relative_to(root.resolve()):
            yield f"{page.relative_to(root)}: {link}: there is no such file"
        elif anchor and target.suffix == page.suffix and unquote(anchor) not in ids_of(target):
            yield f"{page.relative_to(root)}: {link}: the file has no such anchor"


@cache
def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@cache
def _html_ids(path: Path) -> frozenset[str]:
    return frozenset(unescape(found) for found in _HTML_ID.findall(_text(path)))


@cache
def _heading_ids(path: Path) -> frozenset[str]:
    """Return the anchors that code hosts, and the site, give to the headings of a Markdown file."""
    headings = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in _HEADING.findall(_text(path)))
    return frozenset(heading.strip().replace(" ", "-") for heading in headings)
