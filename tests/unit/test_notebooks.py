"""Notebooks show results as tables of HTML, in which every text is escaped."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from aiodelay import Scheduled, ScheduleOutcome, Scheduler
from aiodelay.core.values import LaneCounts, LoadBucket
from aiodelay.testing.clock import VirtualClock
from tests.support.clear_errors import Sink

LANE, ID = "<b>mail", "<script>"


def html_of(value: Any) -> str:  # noqa: ANN401 - a notebook asks any value
    return str(value._repr_html_())


@pytest.mark.asyncio
async def test_counts_load_and_what_was_scheduled_are_tables(clock: VirtualClock) -> None:
    async with Scheduler("memory://", clock=clock, sinks=[Sink()], dispatch=False) as scheduler:
        scheduled = await scheduler.schedule(b"x", to=f"handler:{LANE}", delay="1h", id=ID)
        counts, load = await scheduler.counts(), await scheduler.load(bucket="1h", buckets=2)
    header = "<tr><th>id</th><th>due</th><th>outcome</th></tr>"
    row = "<tr><td>&lt;script&gt;</td><td>2030-01-01 01:00:00.000Z</td><td>stored</td></tr>"
    assert html_of(scheduled) == f"<table>{header}{row}</table>"
    assert "<td>&lt;b&gt;mail</td><td>1</td><td>0</td>" in html_of(counts)
    assert "<td>no</td></tr>" in html_of(counts)
    assert "<td>2030-01-01 01:00:00.000Z</td><td>&lt;b&gt;mail</td><td>1</td>" in html_of(load)
    assert counts == {LANE: LaneCounts(scheduled=1, read_by_nobody=True)}
    assert [each.messages for each in load] == [1]
    assert json.loads(msgspec.json.encode([counts, load]))[0][LANE]["scheduled"] == 1


def test_where_nothing_is_stored_there_is_no_due_time() -> None:
    assert "<td>none</td>" in html_of(Scheduled("a", 0, 0, ScheduleOutcome.KEPT))


@pytest.mark.asyncio
async def test_a_long_table_is_cut(clock: VirtualClock) -> None:
    async with Scheduler("memory://", clock=clock, dispatch=False) as scheduler:
        load: Any = await scheduler.load(bucket="1h", buckets=1)
        load += [LoadBucket(n, "mail", 1) for n in range(207)]
    assert html_of(load).count("<tr>") == 201
    assert "and 7 more rows" in html_of(load)
