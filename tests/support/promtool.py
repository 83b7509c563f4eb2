"""Find `promtool`, which checks the alert rules for Prometheus."""

from __future__ import annotations

import os
import shutil

__all__ = ["promtool"]


def promtool() -> str:
    """Return the path of promtool: the path in `AIODELAY_PROMTOOL`, else the program on PATH.

    Raises:
        AssertionError: There is no such program. The text says what to install.
    """
    found = os.environ.get("AIODELAY_PROMTOOL") or shutil.which("promtool")
    assert found, (
        "no promtool: install Prometheus (Debian: apt-get install prometheus), or name one in AIODELAY_PROMTOOL"
    )
    return found
