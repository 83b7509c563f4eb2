"""The page: every screen in a real Chromium, dark, light, on a phone and without a script. Makes the docs' pictures."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote
from uuid import uuid4

import pytest
from playwright.async_api import Page

from aiodelay import Every, Retry, Scheduler, UnsupportedByStoreError
from aiodelay.service import admin
from tests.browser.conftest import Contexts, Watch
from tests.support.api import serving_app
from tests.support.kafka import new_name
from tests.support.scene import ORDER, SceneStore
from tests.support.servers import Found, redis_products
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="session")

SCREENS = {
    "overview": "/",
    "overview-month": "/?span=month",
    "messages": "/messages?due_to=2026-11-21T12:03",
    "message": f"/messages/{quote(ORDER, safe='')}",
    "recurring": "/recurring",
    "dead": "/dead",
    "letter": "",
    "sinks": "/sinks",
    "instances": "/instances",
    "consumers": "/consumers",
}
PHONE = {"viewport": {"width": 390, "height": 844}, "device_scale_factor": 2, "is_mobile": True, "has_touch": True}
LOOKS: dict[str, dict[str, Any]] = {
    "light": {"color_scheme": "light"},
    "dark": {"color_scheme": "dark"},
    "phone": PHONE,
    "plain": {"java_script_enabled": False},
}


LONG = "w" * 120
"""A word without a place to break it."""


async def too_wide(page: Page) -> list[str]:
    """Return what can be scrolled sideways with the whole page, by its tag and class.

    A phone widens its `innerWidth` to what overflows: the viewport's own width is what counts.
    """
    size = page.viewport_size
    assert size is not None
    found: list[str] = await page.evaluate(TOO_WIDE, size["width"])
    return found


TOO_WIDE = """(width) => document.documentElement.scrollWidth <= width ? [] : [
    `${document.documentElement.scrollWidth} of ${width}`,
    ...[...document.body.querySelectorAll("*")]
        .filter((each) => each.getBoundingClientRect().right > width + 1)
        .map((each) => `${each.tagName}.${each.className}: ${each.textContent.slice(0, 20)}`)]"""


@asynccontextmanager
async def long_words(url: str) -> AsyncIterator[Scheduler]:
    """Open a store in which ids, names, addresses, headers, errors and payloads are long words; and too much of all."""
    own = f"phone{uuid4().hex[:8]}"
    scheduler = Scheduler(url) if url.startswith("kafka") else Scheduler(url, namespace=own)

    @scheduler.handler(name=f"Refused{LONG[:80]}", retry=Retry(attempts=1))
    async def refuse(event: bytes) -> None:
        raise ValueError(LONG * 3)

    async with scheduler:
        for n in range(3):
            await scheduler.schedule(LONG.encode(), to=f"handler:Refused{LONG[:80]}", delay="0s", id=f"dead-{n}-{LONG}")
        kept = {"x-" + LONG[:60]: LONG.encode(), "x-short": b"1"}
        to = f"handler:{LONG[:80]}"
        await scheduler.schedule(LONG.encode() * 9, to=to, delay="1h", id=ONE, key=LONG.encode(), headers=kept)
        await scheduler.schedule(b"r", to=f"handler:{LONG[:80]}", every=Every("90m"), id=f"series-{LONG}")
        for n in range(12):
            await scheduler.schedule(b"{}", to=f"handler:NobodyServes{n}{LONG[:60]}", delay="0s")
        with suppress(UnsupportedByStoreError):
            await scheduler.pause(LONG[:80])
        yield scheduler


ONE = f"one-{LONG}"


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
async def test_no_screen_scrolls_sideways_on_a_phone(kind: str, contexts: Contexts, tmp_path: Path) -> None:
    url = "memory://" if kind == "memory" else f"sqlite:///{tmp_path / 'delay.db'}"
    await look_at_all_screens(f"{url}?journal=1000", contexts)


@pytest.mark.parametrize("product", redis_products()[:1], ids=str)
async def test_no_screen_of_redis_scrolls_sideways_on_a_phone(
    product: Found, contexts: Contexts, shared_redis: Callable[[Found], str]
) -> None:
    await look_at_all_screens(f"{shared_redis(product)}?journal=1000", contexts)


async def test_no_screen_of_kafka_scrolls_sideways_on_a_phone(kafka: str, contexts: Contexts) -> None:
    await look_at_all_screens(f"kafka://{kafka}/{new_name('phone')}?create_topic=true&members=1", contexts)


async def look_at_all_screens(url: str, contexts: Contexts) -> None:
    async with long_words(url) as scheduler, contexts.context(PHONE) as context:
        await until(lambda: has_letters(scheduler, 3), "three dead letters")
        app = admin({"the-first-of-two": scheduler, "other": scheduler}, read_only=False, environment="staging-eu-1")
        async with serving_app(app) as base:
            page = await context.new_page()
            paths = [path for name, path in SCREENS.items() if name not in ("message", "letter")]
            letter = await anext(aiter(scheduler.dead_letters(limit=1)))
            paths += [f"/messages/{ONE}", "/messages?due_from=soon"]
            paths += [f"/dead/{letter.record.revision}/{letter.record.id}"]
            for path in paths:
                await page.goto(base + path)
                assert await too_wide(page) == [], path
            await page.goto(base + f"/messages/{ONE}")
            await page.get_by_role("button", name="Cancel").click()
            await page.get_by_role("heading", name="Cancel 1 message?").wait_for()
            assert await too_wide(page) == [], "confirm"
            await page.get_by_role("button", name="Cancel 1 message").click()
            await page.get_by_role("heading", name="Cancel: 1 message, done").wait_for()
            assert await too_wide(page) == [], "operation"
            await page.close()


async def has_letters(scheduler: Scheduler, n: int) -> bool:
    return len([each async for each in scheduler.dead_letters()]) >= n


DOCS = Path(__file__).parents[2] / "docs"
PICTURES = [
    *((name, "light") for name in SCREENS if name not in ("overview-month", "letter")),
    *(("overview", "dark"), ("overview", "phone"), ("message", "phone")),
]
"""Those of the docs."""


@pytest.mark.parametrize("look", LOOKS)
async def test_every_screen(look: str, watch: Watch, store: SceneStore, screenshots: Path | None) -> None:
    async with watch(store, {"environment": "staging"}, LOOKS[look]) as viewer:
        page = await viewer.open()
        for name, path in SCREENS.items():
            if name == "letter":
                async with page.expect_navigation():
                    await page.get_by_role("link", name="card-000").click()
            else:
                await page.goto(viewer.base + path)
            if look != "plain" and name != "letter":
                await page.locator("#strip.is-live").wait_for()
            if screenshots is not None and (name, look) in PICTURES:
                await page.screenshot(path=screenshots / f"{name}-{look}.png", full_page=look != "phone")
            assert await too_wide(page) == [], f"{name} is too wide"


async def test_the_docs_show_these_pictures() -> None:
    shown = set(re.findall(r"screenshots/([\w-]+\.png)", (DOCS / "page.md").read_text(encoding="utf-8")))
    assert shown == {f"{name}-{look}.png" for name, look in PICTURES}
    assert shown == {each.name for each in (DOCS / "screenshots").iterdir()}
