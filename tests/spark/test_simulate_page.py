"""The simulation page in a real browser: it loads nothing, has light and dark modes, and is accessible."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from playwright.async_api import Browser, Page

from aiodelay.spark.forecast import HOUR_MS, Arrivals, Span, forecast
from aiodelay.spark.simulate_page import SimulationPage, render
from tests.spark.pages import look_at

FROM_MS = 1_900_000_000_000 // HOUR_MS * HOUR_MS
SPAN = Span(FROM_MS, FROM_MS + 6 * HOUR_MS)


def simulation(*rates: int) -> str:
    """Render four hours with messages, a million of them at once, and two without."""
    arrivals = Arrivals(np.array([0, HOUR_MS, 2 * HOUR_MS, 5 * HOUR_MS]), np.array([7, 1_000_000, 3, 40]))
    forecasts = [forecast(arrivals, rate * 1000, SPAN) for rate in rates]
    return render(
        SimulationPage(source="parquet:<b>", span=SPAN, slot_ms=100, overdue=7, scale=1.0, forecasts=forecasts)
    )


@pytest.mark.asyncio
async def test_a_browser_shows_it_and_asks_for_nothing_else(browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "simulate.html"
    file.write_text(simulation(40, 100, 1_000, 2_000, 3_000, 4_000), "utf-8")

    async def look(page: Page) -> object:
        lines = page.get_by_role("img", name="Backlog", exact=True).locator("polyline")
        strokes = await lines.evaluate_all("all => all.map(each => getComputedStyle(each).stroke)")
        assert len(set(strokes)) == 6
        ends = await page.locator("svg text[text-anchor=end]").evaluate_all("all => all.map(each => each.getBBox().x)")
        assert min(ends) >= 0  # no number begins outside of its plot
        assert await page.get_by_role("rowheader", name="2030-03-17 18:00").first.is_visible()
        return strokes

    await look_at(browser, file, ("Lateness: p99", "Backlog", "Messages due"), look)


def test_what_a_rate_does_not_hold_up_to_is_said() -> None:
    page = simulation(40, 50)
    too_low = "40/s is too low: on average 46.3 messages a second are due, including overdue messages. "
    assert re.search(re.escape(too_low) + r"[\d,]+ messages are left at the end\. They take ", page)
    assert "<td>never</td>" in page
    assert "50/s is too low" not in page
    assert "50/s: " in page
    assert "if no more come." in page
    assert "parquet:&lt;b&gt;" in page
    assert "class='notice'" not in simulation(1_000)
