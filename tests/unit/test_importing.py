"""Programs that tests start import the same aiodelay as the tests."""

from __future__ import annotations

from pathlib import Path

import pytest

import aiodelay
from tests.support.command import Program
from tests.support.processes import Crew

WHERE = "import aiodelay; print('from', aiodelay.__file__)"


@pytest.mark.parametrize("environment", [{}, {"PYTHONPATH": "elsewhere"}], ids=["", "with a path of its own"])
def test_a_program_runs_the_aiodelay_of_its_test(tmp_path: Path, environment: dict[str, str]) -> None:
    with Program("-c", WHERE, cwd=tmp_path, environment=environment) as program:
        assert program.out.wait_for("from ") == f"from {aiodelay.__file__}"


def test_a_worker_runs_the_aiodelay_of_its_test(tmp_path: Path) -> None:
    with Crew(tmp_path) as crew:
        assert crew.run(["-c", WHERE], name="worker").line("from") == aiodelay.__file__


def test_a_forked_worker_runs_the_aiodelay_of_its_test(tmp_path: Path) -> None:
    with Crew(tmp_path) as crew:
        forked = crew.run(["-m", "tests.faults.programs.where"], name="forked", forks=True)
        assert forked.line("from") == aiodelay.__file__
