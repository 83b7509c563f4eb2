"""What the tests of faults share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.processes import Crew


@pytest.fixture
def crew(tmp_path: Path) -> Iterator[Crew]:
    """Processes of this test; none is left at its end."""
    with Crew(tmp_path) as crew:
        yield crew


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The store's file."""
    return tmp_path / "delay.db"
