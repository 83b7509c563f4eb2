"""`Backoff` logs a row of failures once at its start and once at its end (C10)."""

from __future__ import annotations

import logging

import pytest

from aiodelay import StoreUnavailableError
from aiodelay.engine.backoff import Backoff
from aiodelay.testing import VirtualClock

log = logging.getLogger("aiodelay.test")


@pytest.mark.asyncio
async def test_24_failures_in_a_row_are_two_lines(clock: VirtualClock, caplog: pytest.LogCaptureFixture) -> None:
    backoff = Backoff()
    for _ in range(2):  # a second row of failures is logged like the first one
        caplog.clear()
        backoff.succeeded(log, "claiming")
        for _ in range(24):
            await backoff.failed(log, "claiming", StoreUnavailableError("redis://host", "no answer"))
        backoff.succeeded(log, "claiming")
        backoff.succeeded(log, "claiming")
        assert [(each.levelname, each.getMessage()) for each in caplog.records] == [
            ("WARNING", "claiming failed: redis://host is unavailable: no answer; trying again"),
            ("WARNING", "claiming works again after 24 failures"),
        ]
