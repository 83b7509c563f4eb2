"""Find a Chromium, and set the preferences of a viewer in it."""

from __future__ import annotations

import os
import shutil

__all__ = ["NoBrowserError", "chromium"]

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome-stable", "google-chrome")


class NoBrowserError(Exception):
    """There is no Chromium."""


def chromium() -> str:
    """Return the path of a browser: the one that `AIODELAY_CHROMIUM` names, or an installed one."""
    found = os.environ.get("AIODELAY_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        raise NoBrowserError("no Chromium: apt-get install chromium-headless-shell, or name one in AIODELAY_CHROMIUM")
    if shutil.which(found) is None:
        raise NoBrowserError(f"AIODELAY_CHROMIUM is {found}, which is no program")
    return found
