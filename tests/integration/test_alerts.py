"""The Prometheus alert rules, run by Prometheus's own tester on series as aiodelay exports them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from tests.support.promtool import promtool

HERE = Path(__file__).parent
RULES = HERE.parents[1] / "docs" / "telemetry" / "alerts.yml"


def test_each_alert_fires_when_it_should_and_only_then(tmp_path: Path) -> None:
    for file in (RULES, HERE / "alerts_test.yml"):
        shutil.copy(file, tmp_path)
    for arguments in (["check", "rules", RULES.name], ["test", "rules", "alerts_test.yml"]):
        ran = subprocess.run([promtool(), *arguments], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stdout + ran.stderr
