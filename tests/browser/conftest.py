from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from playwright.async_api import Browser, BrowserContext, ConsoleMessage, Page, async_playwright, expect

from aiodelay import Scheduler
from aiodelay.memory import MemoryStore
from aiodelay.service import admin
from aiodelay.service.page import live
from tests.support.api import serving_app
from tests.support.chromium import chromium
from tests.support.scene import SceneStore, scene
from tests.support.sinks import BadSink

# As root a browser has no sandbox of its own; it shows nothing but pages of ours.
ARGUMENTS = ["--no-sandbox", "--disable-dev-shm-usage", "--force-color-profile=srgb", "--font-render-hinting=none"]
DEADLINE_MS = 30_000
EVERY_S = 0.5
"""How often a page is told what is new, in the place of 2 s."""
EMPTY: Mapping[str, Any] = {}
DESK: Mapping[str, Any] = {"timezone_id": "UTC", "locale": "en-GB", "viewport": {"width": 1280, "height": 900}}


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def browser() -> AsyncIterator[Browser]:
    expect.set_options(timeout=DEADLINE_MS)
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=chromium(), args=ARGUMENTS)
        yield browser
        await browser.close()


class Contexts:
    """Contexts of a browser by how a viewer looks: tests share them, since Chromium starts a process for each.

    Args:
        browser: Whose.
    """

    def __init__(self, browser: Browser) -> None:
        self._browser = browser
        self._made: dict[str, BrowserContext] = {}

    @asynccontextmanager
    async def context(self, looks: Mapping[str, Any]) -> AsyncIterator[BrowserContext]:
        """Yield a context without pages, cookies and routes for the length of a block."""
        name = json.dumps(looks, sort_keys=True)
        if name not in self._made:
            self._made[name] = await self._browser.new_context(**{**DESK, **looks})
        context = self._made[name]
        try:
            yield context
        finally:
            for page in context.pages:
                await page.close()
            await context.unroute_all()
            await context.clear_cookies()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def contexts(browser: Browser) -> Contexts:
    return Contexts(browser)


class Viewer:
    """Pages of one browser; what goes wrong in them is an error here.

    Args:
        base: Where the service is.
        context: The browser's.
    """

    def __init__(self, base: str, context: BrowserContext) -> None:
        self.base, self.context = base, context
        self.errors: list[str] = []
        context.set_default_timeout(DEADLINE_MS)

    async def open(self, path: str = "/") -> Page:
        """Open a page."""
        page = await self.context.new_page()
        page.on("console", self._console)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        await page.goto(self.base + path)
        return page

    def _console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.errors.append(message.text)


Watch = Callable[..., AbstractAsyncContextManager[Viewer]]


@pytest.fixture
def watch(contexts: Contexts, monkeypatch: pytest.MonkeyPatch) -> Watch:
    """Serve a store, and look at it: `async with watch(store, looks={"java_script_enabled": False}) as viewer`.

    Webhooks are sent from here, unless `dispatch` is False.
    """

    monkeypatch.setattr(live, "EVERY_S", EVERY_S)

    @asynccontextmanager
    async def watching(
        store: MemoryStore,
        options: Mapping[str, Any] = EMPTY,
        looks: Mapping[str, Any] = EMPTY,
        *,
        dispatch: bool = True,
    ) -> AsyncIterator[Viewer]:
        async with AsyncExitStack() as stack:
            webhook = BadSink()
            webhook.name = "webhook"
            scheduler = await stack.enter_async_context(Scheduler(store, sinks=[webhook], dispatch=dispatch))
            given: dict[str, Any] = {"read_only": False, "allowed_targets": ["handler:*"], **options}
            app = admin(scheduler, **given)
            base = await stack.enter_async_context(serving_app(app))
            stack.callback(app.state.page.closing.set)
            context = await stack.enter_async_context(contexts.context(looks))
            viewer = Viewer(base, context)
            yield viewer
            assert viewer.errors == []

    return watching


@pytest_asyncio.fixture(loop_scope="session")
async def store() -> AsyncIterator[SceneStore]:
    """The scene of `tests/support/scene.py`."""
    async with scene() as store:
        yield store


@pytest.fixture
def screenshots() -> Path | None:
    """Where pictures go, if they are taken: `AIODELAY_SCREENSHOTS=docs/screenshots` renews those of the docs."""
    if not (named := os.environ.get("AIODELAY_SCREENSHOTS")):
        return None
    folder = Path(named)
    folder.mkdir(parents=True, exist_ok=True)
    return folder
