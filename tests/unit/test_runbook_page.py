"""docs/runbook.md has every alert, and the commands of the runbook and of the how-tos exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from aiodelay.cli.app import app

DOCS = Path(__file__).parents[2] / "docs"
RUNBOOK = DOCS / "runbook.md"


def commands() -> list[str]:
    texts = [path.read_text() for path in (RUNBOOK, *sorted((DOCS / "how-to").glob("*.md")))]
    return sorted({line for text in texts for line in re.findall(r"^\$ aiodelay (.+)$", text, re.MULTILINE)})


def test_every_alert_has_a_section() -> None:
    alerts = re.findall(r"- alert: (\w+)", (DOCS / "telemetry" / "alerts.yml").read_text())
    assert sorted(re.findall(r"^## (Aiodelay\w+)$", RUNBOOK.read_text(), re.MULTILINE)) == sorted(alerts)


@pytest.mark.parametrize("command", commands())
def test_a_command_has_only_known_options(command: str) -> None:
    app.parse_args(shlex.split(command), exit_on_error=False, print_error=False)
