"""docs/debugging.md explains every cause that `aiodelay why` can give, and names only alerts that exist."""

import re
from pathlib import Path
from typing import get_args

from aiodelay.operations.diagnosis import Cause

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "debugging.md").read_text()


def test_every_cause_is_explained() -> None:
    table = PAGE.partition("\n## What `aiodelay why` answers\n")[2].partition("\n## ")[0]
    causes = [
        name for row in re.findall(r"^\| (`.+?`) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)
    ]
    assert sorted(causes) == sorted(get_args(Cause))


def test_every_alert_is_named() -> None:
    alerts = re.findall(r"- alert: (\w+)", (DOCS / "telemetry" / "alerts.yml").read_text())
    assert set(re.findall(r"Aiodelay\w+", PAGE)) == set(alerts)
