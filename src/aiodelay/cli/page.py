"""The page that the demo serves for its store."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import webbrowser
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from importlib.util import find_spec

from aiodelay import Scheduler

__all__ = ["MISSING", "beside", "listening_for_page"]

NEEDS = ("fastapi", "jinja2", "pydantic_settings", "uvicorn")
MISSING = "no page: pip install 'aiodelay[cli,service]'"


@contextmanager
def listening_for_page(*, is_wanted: bool) -> Iterator[tuple[socket.socket | None, str]]:
    """Yield a listening socket for the page and a text with its URL. Without a page, the socket is None."""
    if not is_wanted:
        yield None, ""
    elif not all(find_spec(name) for name in NEEDS):
        yield None, MISSING
    else:
        from aiodelay.service.serve import listening, url_of  # noqa: PLC0415 - its packages may be missing

        with listening("127.0.0.1", 0) as listener:
            yield listener, f"page {url_of(listener)}"


@asynccontextmanager
async def beside(scheduler: Scheduler, listener: socket.socket | None) -> AsyncIterator[None]:
    """Serve the page until the block ends. If stdout is a terminal and there is a display, open a browser."""
    if listener is None:
        yield
        return
    from aiodelay.service.serve import serving_page, url_of  # noqa: PLC0415 - as above

    async with serving_page(scheduler, listener):
        if sys.stdout.isatty() and _has_display(os.environ):
            await asyncio.to_thread(webbrowser.open, url_of(listener))
        yield


def _has_display(environment: Mapping[str, str]) -> bool:
    """Whether a browser can open a window. Without a display, a text browser would take over the terminal."""
    is_windowed = sys.platform in ("darwin", "win32")
    return is_windowed or bool(environment.get("DISPLAY") or environment.get("WAYLAND_DISPLAY"))
