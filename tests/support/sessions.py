"""Shorten the sessions of Kafka groups, for tests in which a group waits for a killed or stopped process."""

from __future__ import annotations

import os

import pytest

from aiodelay.backends.kafka.store.partition import ownership
from aiodelay.backends.kafka.topics import group

__all__ = ["SESSION_MS", "shorten_sessions"]

SESSION_MS: int = 6_000 if os.environ.get("AIODELAY_TEST_KAFKA") else 3_000
"""Shorter than aiodelay's sessions of 10 s. Brokers of `tests/support/kafka.py` allow this; most others allow 6 s."""


def shorten_sessions(patch: pytest.MonkeyPatch | None = None) -> None:
    """Shorten the sessions of this process. With `patch`, only until the patch ends."""
    patch = patch or pytest.MonkeyPatch()
    for module in (group, ownership):
        patch.setattr(module, "SESSION_MS", SESSION_MS)
