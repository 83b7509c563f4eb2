"""The pages that jobs write, as a browser shows them, for the tests of those jobs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from playwright.async_api import Browser, Page

__all__ = ["look_at"]


async def look_at(
    browser: Browser, file: Path, plots: Sequence[str], look: Callable[[Page], Awaitable[object]]
) -> None:
    """Show a page in light and dark on a telephone; it asks for nothing else, says nothing, and all of it is seen.

    Args:
        browser: A real one.
        file: The page.
        plots: The titles of its plots: each has marks, and can be read without being seen.
        look: What else to look at; returns what must differ between light and dark.
    """
    said, asked, looks = list[str](), list[str](), list[object]()
    for scheme in ("light", "dark"):
        page = await browser.new_page(color_scheme=scheme, viewport={"width": 360, "height": 740})
        page.on("console", lambda message: said.append(message.text))
        page.on("request", lambda request: asked.append(request.url))
        await page.goto(file.as_uri())
        for title in plots:
            plot = page.get_by_role("img", name=title, exact=True)
            assert await plot.locator("desc").text_content()
            assert await plot.locator(".mark").count() > 0
        await page.locator("summary").first.click()
        looks.append(await look(page))
        assert await page.evaluate("document.documentElement.scrollWidth") == 360
        await page.close()
    assert (said, set(asked)) == ([], {file.as_uri()})
    assert looks[0] != looks[1]
