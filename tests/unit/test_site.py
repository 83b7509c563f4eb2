"""The navigation has every page, the reference every public name, and the texts for programs are complete."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from pathlib import Path

import pytest
from site_links import broken_in_markdown, broken_in_site
from site_pages import NavEntry, Page, expanded, full_text, overview, pages_of, summary

import aiodelay

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PROJECT = tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))["project"]


def test_the_navigation_has_every_page_once() -> None:
    pages = Counter(page.path for page in pages_of(PROJECT["nav"]))
    assert pages == Counter(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))


def test_the_list_of_decisions_has_every_decision() -> None:
    listed = re.findall(
        r"^\| (\d+) \| \[(.+)\]\((.+)\) \|$", (DOCS / "decisions" / "README.md").read_text(), re.MULTILINE
    )
    found = [
        (path.read_text().partition("\n")[0], path.name) for path in sorted((DOCS / "decisions").glob("[0-9]*.md"))
    ]
    assert [(f"# {number}. {title}", name) for number, title, name in listed] == found


def test_the_reference_has_every_public_name() -> None:
    text = "\n".join(path.read_text() for path in (DOCS / "python").glob("*.md"))
    shown = {name.rpartition(".")[2] for name in re.findall(r"^::: (\S+)$", text, re.MULTILINE)}
    errors = {
        name
        for name in aiodelay.__all__
        if isinstance(getattr(aiodelay, name), type(Exception)) and name.endswith("Error")
    }
    assert set(aiodelay.__all__) - shown - errors == {"__version__"}
    assert "::: aiodelay.errors" in text


NAV: list[NavEntry] = [{"Home": "index.md"}, {"Guides": [{"Kafka": "kafka.md"}, {"Deep": ["deep/more.md"]}]}]


def test_pages_keep_the_order_of_the_navigation() -> None:
    assert list(pages_of(NAV)) == [
        Page("Home", "Home", "index.md"),
        Page("Guides", "Kafka", "kafka.md"),
        Page("Guides", "", "deep/more.md"),
    ]


def test_included_files_and_docstrings_are_expanded(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("print(1)\n")
    text = '```python\n--8<-- "a.py"\n```\n\n::: aiodelay.Every\n'
    assert expanded(text, tmp_path, lambda name: f"## {name}") == "```python\nprint(1)\n```\n\n## aiodelay.Every\n"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("# T\n\nOne [link](a.md) here\nand more. Two.\n", "One link here and more."),
        ("# T\n\n| a |\n\nAfter a table: version 0.1.0 fits\n", "After a table: version 0.1.0 fits"),
        ("# T\n\n**Context.** Why. Then.\n", "Why."),
        ("# T\n\n::: aiodelay.Every\n", ""),
    ],
)
def test_a_summary_is_the_first_sentence(text: str, found: str) -> None:
    assert summary(text) == found


def test_the_texts_for_programs() -> None:
    texts = [(page, f"# Title of {page.path}\n\nFirst. Second.\n") for page in pages_of(NAV)]
    assert overview("x", "It is x.", texts).splitlines() == [
        *("# x", "", "> It is x.", "", "`llms-full.txt` has the texts of all these pages in one file."),
        *("", "## Home", "", "- [Home](index.md): First."),
        *("", "## Guides", "", "- [Kafka](kafka.md): First.", "- [Title of deep/more.md](deep/more.md): First."),
    ]
    assert full_text(texts[:1]) == "<!-- index.md -->\n\n# Title of index.md\n\nFirst. Second.\n"


def test_broken_links_are_found(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "index.html").write_text(
        '<a href="deep/a.html#there"><img src="/no.png"><a href="https://else.where/x">'
    )
    (tmp_path / "deep" / "a.html").write_text(
        '<p id="there"><a href="../index.html"><a href="#gone"><a href="../../b.html">'
    )
    assert list(broken_in_site(tmp_path)) == [
        "deep/a.html: #gone: the file has no such anchor",
        "deep/a.html: ../../b.html: there is no such file",
        "index.html: /no.png: there is no such file",
    ]
    (tmp_path / "A.md").write_text("[a](B.md#what-it-is) [b](B.md#what) [c](C.md) [d](deep)\n")
    (tmp_path / "B.md").write_text("# What `it` is?\n")
    assert list(broken_in_markdown(tmp_path, ["A.md"])) == [
        "A.md: B.md#what: the file has no such anchor",
        "A.md: C.md: there is no such file",
    ]
