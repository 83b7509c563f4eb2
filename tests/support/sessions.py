"""Sessions of Kafka's groups that end soon, for tests in which a killed or stopped process keeps others waiting."""

from __future__ import annotations

import os

import pytest

from aiodelay.backends.kafka.store.partition import ownership
from aiodelay.backends.kafka.topics import group

__all__ = ["SESSION_MS", "shorten_sessions"]

SESSION_MS: int = 6_000 if os.environ.get("AIODELAY_TEST_KAFKA") else 3_000
"""Shorter than ours, which are 10 s. Brokers of `tests/support/kafka.py` allow it; others allow 6 s as a rule."""


def shorten_sessions(patch: pytest.MonkeyPatch | None = None) -> None:
    """Let the sessions of this process end soon; for good, or as long as the patch lasts."""
    patch = patch or pytest.MonkeyPatch()
    for module in (group, ownership):
        patch.setattr(module, "SESSION_MS", SESSION_MS)
