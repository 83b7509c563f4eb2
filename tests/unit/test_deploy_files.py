"""The files in docs/deploy start the service and give it time to end. The workflows run what the noxfile has."""

from __future__ import annotations

import ast
import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from configparser import RawConfigParser
from pathlib import Path

import pytest
import yaml

from aiodelay.cli.app import app
from aiodelay.engine.subscriptions import CANCEL_S, CLOSE_S
from aiodelay.service.config import Limits
from aiodelay.service.connections import REQUESTS_END_S
from aiodelay.service.reading import read_configuration

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
    assert service["SupplementaryGroups"] != "aiodelay", "systemd refuses a dynamic user with the name of a group"
    assert (service["CapabilityBoundingSet"], service["UMask"], service["ProtectSystem"]) == ("", "0077", "strict")


def test_the_container_file() -> None:
    text = (DEPLOY / "Containerfile").read_text()
    entry, command = (
        json.loads(re.findall(rf"^{word} (.*)$", text, re.MULTILINE)[0]) for word in ("ENTRYPOINT", "CMD")
    )
    assert entry == ["aiodelay"]
    assert parsed(command) == "serve"
    extras = set(re.findall(r"/src\[(.*?)\]", text)[0].split(","))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert extras <= project["optional-dependencies"].keys()


def test_the_kubernetes_manifests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    objects = {each["kind"]: each for each in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())}
    pod = objects["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    values = {each["name"]: each.get("value") for each in container["env"]}
    leave = int(values["AIODELAY_LIMITS__LEAVE"].removesuffix("s"))
    assert pod["terminationGracePeriodSeconds"] > END_S + leave
    assert container["readinessProbe"]["timeoutSeconds"] > LIMITS.probe_timeout.total_seconds()
    file = tmp_path / "aiodelay.toml"
    file.write_text(objects["ConfigMap"]["data"]["aiodelay.toml"])
    file.chmod(0o440)
    for name, value in values.items():
        monkeypatch.setenv(name, value or "redis://redis.example")
    settings = read_configuration(file, {("api", "host"): ("--host", "0.0.0.0")}).settings()
    assert [token.name for token in settings.api.tokens] == ["operators"]
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    assert ports == {"http": settings.api.port, "metrics": settings.telemetry.prometheus_port}


def test_kubernetes_waits_long_enough_for_an_application() -> None:
    page = (ROOT / "docs" / "how-to" / "kubernetes.md").read_text()
    graces = re.findall(r"terminationGracePeriodSeconds: (\d+)", page)
    assert len(graces) == page.count("kind: Deployment")
    assert all(int(grace) > END_S for grace in graces)
    (command,) = re.findall(r"command: \[aiodelay, (.*)\]", page)
    app.parse_args([word.strip(' "') for word in command.split(",")], exit_on_error=False)


def test_the_nightly_workflow_runs_every_nightly_session() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "nightly.yml").read_text())
    matrix = workflow["jobs"]["session"]["strategy"]["matrix"]["include"]
    assert {each["session"] for each in matrix} == set(nightly_sessions())


def nightly_sessions() -> Iterator[str]:
    for function in ast.parse((ROOT / "noxfile.py").read_text()).body:
        for decorator in getattr(function, "decorator_list", ()):
            given = {each.arg: ast.literal_eval(each.value) for each in getattr(decorator, "keywords", ())}
            if "nightly" in given.get("tags", ()):
                assert isinstance(function, ast.FunctionDef)
                pythons = given.get("python", ())
                yield from (f"{function.name}-{python}" for python in pythons) if pythons else [function.name]
