"""The report page in a real browser: it loads nothing, has light and dark modes, and works with a screen reader."""

from __future__ import annotations

import re
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Browser, Page

from aiodelay.spark.report_page import ReportPage, render
from aiodelay.spark.report_plots import ms_text
from tests.spark.pages import look_at

FIRST = datetime(2026, 3, 28, 22, tzinfo=UTC)
NOTHING: dict[str, Any] = dict.fromkeys(
    ("delivered", "early", "unclaimed", "repeated", "again", "dropped", "skipped", "dead", "dead_late"), 0
) | dict.fromkeys(("p50_ms", "p95_ms", "p99_ms", "max_ms", "min_ms"))


def figures(late_ms: int, **given: object) -> dict[str, Any]:
    lateness = dict.fromkeys(("p50_ms", "p95_ms", "p99_ms", "max_ms", "min_ms"), late_ms)
    return {**NOTHING, **lateness, "delivered": 10, **given}


def hours() -> list[dict[str, Any]]:
    """Six hours with deliveries, one without any, none at all, and one more."""
    times = [figures(10 * n + 5, hour=FIRST + timedelta(hours=n), again=n) for n in range(6)]
    silent = NOTHING | {"hour": FIRST + timedelta(hours=6), "dead": 1, "dead_late": 1}
    return [*times, silent, figures(70_000, hour=FIRST + timedelta(hours=8))]


def report_page(**given: Any) -> ReportPage:  # noqa: ANN401 - fields
    fields: dict[str, Any] = {
        "source": "s3a://shop/archive",
        "within": "all of them",
        "where": None,
        "by": ("lane", "hour"),
        "total": figures(45, delivered=70, early=2, min_ms=-30, unclaimed=4, repeated=1, dead=1, dead_late=1, again=15),
        "lanes": [figures(45, lane="<b>kafka</b>"), NOTHING | {"lane": "broken", "dead": 1}],
        "times": hours(),
        "rows": [row | {"lane": "kafka"} for row in hours()],
        "most_rows": 2000,
    }
    return ReportPage(**fields | given)


def test_what_others_have_written_is_text_and_no_markup() -> None:
    evil = "</code><script>alert(1)</script>"
    page = render(report_page(source=evil, where=evil, lanes=[figures(1, lane=evil)]))
    assert "<script" not in page
    assert page.count("&lt;/code&gt;&lt;script&gt;") == 3


@pytest.mark.asyncio
async def test_a_browser_shows_it_and_asks_for_nothing_else(browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_text(render(report_page()), "utf-8")

    async def look(page: Page) -> object:
        assert await page.get_by_role("cell", name="1.17 min").first.is_visible()
        assert await page.get_by_role("rowheader", name="<b>kafka</b>").is_visible()
        return await page.evaluate("getComputedStyle(document.body).backgroundColor")

    await look_at(browser, file, ("Lateness", "Deliveries", "Failures and retries"), look)


def test_time_without_a_delivery_is_a_gap_and_a_lone_hour_is_seen() -> None:
    page = render(report_page())
    lines = re.findall(r"<polyline class='p50_ms' points='([^']*)'", page)
    assert [len(line.split()) for line in lines] == [6, 2]
    assert len(set(lines[1].split())) == 1
    assert page.count("<circle class='p50_ms") == 7


@pytest.mark.parametrize("n", [1, 2, 200])
def test_each_bar_stands_below_the_dot_of_its_hour(n: int) -> None:
    times = [figures(5, hour=FIRST + timedelta(hours=hour)) for hour in range(n)]
    page = render(report_page(times=times))
    dots = re.findall(r"<circle class='p50_ms mark' cx='([\d.]+)'", page)
    bars = re.findall(r"<rect class='delivered mark' x='([\d.]+)' [^>]*? width='([\d.]+)'", page)
    assert len(dots) == len(bars) == n
    for dot, (left, width) in zip(dots, bars, strict=True):
        assert float(dot) == pytest.approx(float(left) + float(width) / 2, abs=0.2)


def test_what_is_odd_is_said() -> None:
    page = render(report_page(rows=None))
    assert "Early: 2, by up to 30 ms." in page
    assert "No claim: 4." in page
    assert "Repeated: 1 successes" in page
    assert "By lane and hour: more than 2,000 rows, which are not shown" in page
    calm = render(report_page(total=figures(3)))
    assert "class='notice'" not in calm


def test_days_and_nothing_at_all_have_a_page_too() -> None:
    days = [figures(7, day=date(2026, 3, 28)), figures(9, day=date(2026, 3, 31))]
    page = render(report_page(by=("day",), lanes=(), times=days, rows=days))
    assert "<th scope='row' class='text'>2026-03-31</th>" in page
    assert "By lane" not in page
    empty = render(report_page(total=NOTHING, lanes=[], times=[], rows=[]))
    assert "Nothing happened" in empty
    assert "<svg" not in empty


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (None, "-"),
        (0, "0 ms"),
        (-30, "-30 ms"),
        (999, "999 ms"),
        (1_000, "1 s"),
        (12_345, "12.3 s"),
        (90_000, "1.5 min"),
        (86_400_000, "1 d"),
        (864_000_000_000, "10,000 d"),
    ],
)
def test_a_length_of_time_has_three_digits(ms: int | None, text: str) -> None:
    assert ms_text(ms) == text
