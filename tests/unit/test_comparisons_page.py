"""docs/comparisons.md: each column of a table has a version and a date, and each cell has a link that is defined."""

from __future__ import annotations

import re
from datetime import date
from pathlib import Path

import pytest

import aiodelay
from benchmarks.peers.sides import PEERS, requirements

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "comparisons.md").read_text(encoding="utf-8")
TABLE = re.compile(r"^\| \| .*\n(?:\|.*\n)+", re.MULTILINE)
HEAD = re.compile(r"(?P<name>.+?)(?: (?P<version>\d+(?:\.\d+)+))?<br>(?P<date>\d{4}-\d\d-\d\d)")
LINK = re.compile(r"\[[^][]+\]\[([\w-]+)\]")
TARGETS = dict(re.findall(r"^\[([\w-]+)\]: (\S+)$", PAGE, re.MULTILINE))
SERVICES = {"SQS", "EventBridge Scheduler"}
"""What has no versions."""


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def columns() -> dict[str, list[str]]:
    """Return the columns of all tables: for each head, its cells, each with the name of its row."""
    found = dict[str, list[str]]()
    for table in TABLE.findall(PAGE):
        head, _, *rows = map(cells, table.splitlines())
        assert all(len(row) == len(head) for row in rows), f"a row has more or fewer cells than {head}"
        for at in range(1, len(head)):
            found.setdefault(head[at], []).extend(f"{row[0]}: {row[at]}" for row in rows)
    return found


COLUMNS = columns()


def named(head: str) -> re.Match[str]:
    found = HEAD.fullmatch(head)
    assert found is not None, f"{head!r} is not a name and a version, <br> and a date"
    return found


def test_the_page_has_the_tables() -> None:
    assert len(TABLE.findall(PAGE)) == 3
    assert {named(head)["name"] for head in COLUMNS} > {"docket", "arq", "Celery", "BullMQ", "procrastinate", *SERVICES}


@pytest.mark.parametrize("head", COLUMNS)
def test_a_column_is_dated_and_its_cells_have_links(head: str) -> None:
    found = named(head)
    assert date.fromisoformat(found["date"]) >= date(2026, 11, 27)
    assert (found["version"] is None) == (found["name"] in SERVICES)
    for cell in COLUMNS[head]:
        targets = LINK.findall(cell.partition(": ")[2])
        assert targets, f"no link in {cell!r}"
        assert set(targets) <= TARGETS.keys(), f"a link is not defined in {cell!r}"
        is_ours = {target.startswith("our-") for target in targets}
        assert is_ours == {found["name"] == "aiodelay"}, f"{cell!r} links to the pages of another column"


def test_each_link_is_used_and_leads_to_a_page_of_its_side() -> None:
    assert set(LINK.findall(PAGE)) == TARGETS.keys()
    for name, target in TARGETS.items():
        if name.startswith("our-"):
            assert (DOCS / target.partition("#")[0]).is_file(), target
        else:
            assert target.startswith("https://"), target


def test_the_versions_are_those_that_are_measured() -> None:
    shown = {named(head)["name"].lower(): named(head)["version"] for head in COLUMNS}
    assert shown["aiodelay"] == aiodelay.__version__
    measured = {peer.name: re.split("==|@", requirements(peer)[0])[1] for peer in PEERS[1:] if peer.name in shown}
    assert measured == {name: shown[name] for name in ("docket", "arq", "celery", "bullmq")}
