"""The files in docs/deploy start the service and give it time to end."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from configparser import RawConfigParser
from pathlib import Path

from aiodelay.cli.app import app
from aiodelay.engine.subscriptions import CANCEL_S, CLOSE_S
from aiodelay.service.config import Limits
from aiodelay.service.connections import REQUESTS_END_S

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "docs" / "deploy"
LIMITS = Limits()
CLOSING_S = CANCEL_S + CLOSE_S
HARDENED = {
    *("DynamicUser", "LockPersonality", "MemoryDenyWriteExecute", "NoNewPrivileges", "PrivateDevices", "PrivateMounts"),
    *("PrivateTmp", "PrivateUsers", "ProtectClock", "ProtectControlGroups", "ProtectHome", "ProtectHostname"),
    *("ProtectKernelLogs", "ProtectKernelModules", "ProtectKernelTunables", "RemoveIPC", "RestrictNamespaces"),
    *("RestrictRealtime", "RestrictSUIDSGID"),
}
"""What `systemd-analyze security` asks of a service that needs the network and a directory."""
END_S = LIMITS.leave.total_seconds() + LIMITS.drain.total_seconds() + REQUESTS_END_S + CLOSING_S


def parsed(command: list[str]) -> str:
    """Return the name of the command that the arguments are understood as."""
    function, bound, _ = app.parse_args(command, exit_on_error=False)
    assert bound.arguments["config"] == Path("/etc/aiodelay/aiodelay.toml")
    return str(function.__name__)


def test_the_unit() -> None:
    unit = RawConfigParser(strict=False)
    unit.optionxform = str  # type: ignore[method-assign,assignment]
    unit.read(DEPLOY / "aiodelay.service")
    service = unit["Service"]
    program, *arguments = shlex.split(service["ExecStart"])
    assert program == "/opt/aiodelay/bin/aiodelay"
    assert parsed(arguments) == "serve"
    assert int(service["TimeoutStopSec"]) > END_S
    assert {name for name in HARDENED if service.get(name) != "yes"} == set()
    assert (service["CapabilityBoundingSet"], service["UMask"], service["ProtectSystem"]) == ("", "0077", "strict")


def test_the_container_file() -> None:
    text = (DEPLOY / "Containerfile").read_text()
    entry, command = (
        json.loads(re.findall(rf"^{word} (.*)$", text, re.MULTILINE)[0]) for word in ("ENTRYPOINT", "CMD")
    )
    assert entry[0] == "aiodelay"
    assert parsed([*entry[1:], *command]) == "serve"
    extras = set(re.findall(r"aiodelay\[(.*?)\]", text)[0].split(","))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert extras <= project["optional-dependencies"].keys()


def test_kubernetes_waits_long_enough_for_an_application() -> None:
    page = (ROOT / "docs" / "how-to" / "kubernetes.md").read_text()
    graces = re.findall(r"terminationGracePeriodSeconds: (\d+)", page)
    assert len(graces) == page.count("kind: Deployment")
    assert all(int(grace) > END_S for grace in graces)
    (command,) = re.findall(r"command: \[aiodelay, (.*)\]", page)
    app.parse_args([word.strip(' "') for word in command.split(",")], exit_on_error=False)


def test_kubernetes_waits_long_enough() -> None:
    page = (ROOT / "docs" / "operate.md").read_text()
    (grace,) = re.findall(r"terminationGracePeriodSeconds: (\d+)", page)
    (leave,) = re.findall(r"AIODELAY_LIMITS__LEAVE, value: (\d+)s", page)
    assert int(grace) > END_S + int(leave)
