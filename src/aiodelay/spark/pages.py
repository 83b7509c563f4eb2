"""What HTML pages of jobs are made of: one file that loads nothing, light and dark, without a script."""

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
        title: Its name.
        about: HTML of what it tells of.
        parts: HTML of its sections, in order.
        explained: How its figures are to be read.
    """
    template, css = (files(__package__).joinpath(f"report_page.{kind}").read_text("utf-8") for kind in ("html", "css"))
    given = {"title": escape(title), "about": about, "parts": "".join(parts), "explained": escape(explained)}
    return Template(template).substitute(given, css=css)


def section(head: str, *content: str) -> str:
    """Return a section of HTML under a heading."""
    return f"<section><h2>{escape(head)}</h2>{''.join(content)}</section>"


def notice(text: str) -> str:
    """Return what the reader must not miss."""
    return f"<p class='notice'>{escape(text)}</p>"


def strip(figures: Mapping[str, str]) -> str:
    """Return the figures that matter most, by their names."""
    items = "".join(f"<div><dt>{escape(head)}</dt><dd>{escape(text)}</dd></div>" for head, text in figures.items())
    return f"<dl class='strip'>{items}</dl>"


def folded(summary: str, content: str) -> str:
    """Return HTML that is shown when its summary is asked for."""
    return f"<details><summary>{escape(summary)}</summary>{content}</details>"


def table(caption: str, names: Mapping[str, str], figures: Mapping[str, str], rows: Sequence[Figures]) -> str:
    """Return a table.

    Args:
        caption: What it shows.
        names: Columns that say what a row stands for, with their heads.
        figures: Columns of figures, likewise: counts, lengths of time where the name ends in `_ms`, or text.
        rows: By column.
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
