"""What the tests of faults share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.scene import Scene
from tests.support.processes import Crew


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    """One file and its processes; none is left at the end."""
    with Crew(tmp_path) as crew:
        yield Scene(crew, tmp_path)
