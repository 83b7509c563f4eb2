"""Building blocks of the HTML pages of jobs. A page is one file without scripts that loads nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from html import escape
from importlib.resources import files
from string import Template

from .report_plots import Figures, count_text, ms_text, slot_text

__all__ = ["folded", "notice", "page", "section", "strip", "table"]


def page(title: str, about: str, parts: Iterable[str], explained: str) -> str:
    """Return a page's HTML.

    Args:
        title: The title of the page.
        about: HTML of the line below the title.
        parts: HTML of the sections, in order.
        explained: Text that explains the figures.
    """
    template, css = (files(__package__).joinpath(f"report_page.{kind}").read_text("utf-8") for kind in ("html", "css"))
    given = {"title": escape(title), "about": about, "parts": "".join(parts), "explained": escape(explained)}
    return Template(template).substitute(given, css=css)


def section(head: str, *content: str) -> str:
    """Return the HTML of a section with a heading."""
    return f"<section><h2>{escape(head)}</h2>{''.join(content)}</section>"


def notice(text: str) -> str:
    """Return the HTML of a highlighted notice."""
    return f"<p class='notice'>{escape(text)}</p>"


def strip(figures: Mapping[str, str]) -> str:
    """Return the HTML of a row of key figures, by name."""
    items = "".join(f"<div><dt>{escape(head)}</dt><dd>{escape(text)}</dd></div>" for head, text in figures.items())
    return f"<dl class='strip'>{items}</dl>"


def folded(summary: str, content: str) -> str:
    """Return HTML that opens when the reader clicks its summary."""
    return f"<details><summary>{escape(summary)}</summary>{content}</details>"


def table(caption: str, names: Mapping[str, str], figures: Mapping[str, str], rows: Sequence[Figures]) -> str:
    """Return the HTML of a table.

    Args:
        caption: The caption of the table.
        names: Columns that identify a row, with their headings.
        figures: Columns of figures, with their headings: counts, text, or durations if the name ends in `_ms`.
        rows: The rows, as values by column.
    """
    heads = "".join(f"<th scope='col' class='text'>{escape(head)}</th>" for head in names.values())
    heads += "".join(f"<th scope='col'>{escape(head)}</th>" for head in figures.values())
    body = "".join(
        f"<tr>{_names(names, row)}{''.join(_cell(name, row[name]) for name in figures)}</tr>" for row in rows
    )
    return (
        f"<div class='scroll' tabindex='0' role='group' aria-label='{escape(caption)}'><table>"
        f"<caption>{escape(caption)}</caption><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _names(names: Iterable[str], row: Figures) -> str:
    texts = (slot_text(row[name]) if isinstance(row[name], date) else row[name] for name in names)
    return "".join(f"<th scope='row' class='text'>{escape(text)}</th>" for text in texts)


def _cell(name: str, value: int | str | None) -> str:
    if isinstance(value, str):
        return f"<td>{escape(value)}</td>"
    text = ms_text(value) if name.endswith("_ms") else count_text(value or 0)
    return f"<td>{text}</td>" if value else f"<td class='zero'>{text}</td>"
