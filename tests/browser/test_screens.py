"""Every screen, in a real Chromium: dark, light, on a phone, without a script. Their pictures are those of the docs."""

from __future__ import annotations

import re
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
    "phone": {
        "viewport": {"width": 390, "height": 844},
        "device_scale_factor": 2,
        "is_mobile": True,
        "has_touch": True,
    },
    "plain": {"java_script_enabled": False},
}


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
                await page.get_by_role("link", name="card-000").click()
            else:
                await page.goto(viewer.base + path)
            if look != "plain" and name != "letter":
                await page.locator("#strip.is-live").wait_for()
            if screenshots is not None and (name, look) in PICTURES:
                await page.screenshot(path=screenshots / f"{name}-{look}.png", full_page=look != "phone")
            assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"{name} is too wide"


async def test_the_docs_show_these_pictures() -> None:
    shown = set(re.findall(r"screenshots/([\w-]+\.png)", (DOCS / "page.md").read_text(encoding="utf-8")))
    assert shown == {f"{name}-{look}.png" for name, look in PICTURES}
    assert shown == {each.name for each in (DOCS / "screenshots").iterdir()}
