"""Every screen, in a real Chromium: dark, light, on a phone, without a script. Their pictures are those of the docs."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from tests.browser.conftest import Watch
from tests.support.scene import ORDER, SceneStore

pytestmark = pytest.mark.asyncio(loop_scope="session")

SCREENS = {
    "overview": "/",
    "overview-month": "/?span=month",
    "messages": "/messages?due_to=2026-11-21T12:30",
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
    "phone": {
        "viewport": {"width": 390, "height": 844},
        "device_scale_factor": 2,
        "is_mobile": True,
        "has_touch": True,
    },
    "plain": {"java_script_enabled": False},
}


@pytest.mark.parametrize("look", LOOKS)
async def test_every_screen(look: str, watch: Watch, store: SceneStore, screenshots: Path) -> None:
    async with watch(store, {"environment": "staging"}, LOOKS[look]) as viewer:
        page = await viewer.open()
        for name, path in SCREENS.items():
            if name == "letter":
                await page.get_by_role("link", name="card-000").click()
            else:
                await page.goto(viewer.base + path)
            if look != "plain" and name != "letter":
                await page.locator("#strip.is-live").wait_for()
            await page.screenshot(path=screenshots / f"{name}-{look}.png", full_page=True)
            assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"{name} is too wide"
