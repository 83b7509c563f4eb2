"""docs/curl.md: each command runs against a service, in order, answers as shown, and no endpoint is missing."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from aiodelay import Scheduler
from aiodelay.service import admin
from aiodelay.service.api.application import ROUTERS
from aiodelay.service.api.schemas import openapi_of
from tests.support.service import Service, until_ready
from tests.support.waiting import until_sync

PAGE = (Path(__file__).parents[2] / "docs" / "curl.md").read_text()
STEPS = re.findall(r"```sh\n(curl .*?)```(?:\n\n```json\n(.*?)```)?", PAGE, re.DOTALL)
ENDPOINT = re.compile(r"^\*\*`([A-Z]+ /\S+)`\*\*", re.MULTILINE)
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")
REVISION = re.compile(r"\b1[79]\d{11}\b")


def run(command: str, names: dict[str, str]) -> str:
    done = subprocess.run(
        ["bash", "-c", command], env=os.environ | names, capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout


def answer_of(command: str, names: dict[str, str]) -> str:
    """Run a command. Wait for the dead letters, which the service makes once it has seen that `stdout` is resumed.

    For a moment, their messages are in flight, and so are the keys of their limits.
    """
    answer = ""

    def has_letters() -> bool:
        nonlocal answer
        answer = run(command, names)
        return '"letters":[]' not in answer and ("/limits/keys" not in command or '"keys":[]' in answer)

    until_sync(has_letters, command)
    return answer


def plain(text: str) -> Any:  # noqa: ANN401 - any JSON
    """Return an answer with the same time, revision and error texts on each run."""
    found = json.loads(REVISION.sub("0", TIME.sub("<time>", text)))
    return found | dict.fromkeys(found.keys() & {"detail", "value", "allowed"}, "…") if "error" in found else found


def learn(answer: str, names: dict[str, str]) -> None:
    """Keep the values that the page tells its reader to keep: an operation's token, a dead letter's revision."""
    found = json.loads(answer) if answer.startswith("{") and "\n" not in answer else {}
    if "confirm" in found:
        names["OPERATION"] = found["confirm"]
    for letter in found.get("letters", [])[:1]:
        names["REVISION"] = str(letter["revision"])


@pytest.mark.skipif(os.name == "nt", reason="the commands are for a POSIX shell")
def test_every_command_is_answered_as_the_page_shows(tmp_path: Path) -> None:
    (settings,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    with Service(tmp_path, settings) as service, service.client() as client:
        until_ready(client)
        names = {"URL": str(client.base_url).rstrip("/"), "no_proxy": "127.0.0.1"}
        for command, shown in STEPS:
            answer = answer_of(command, names)
            if shown:
                assert plain(answer) == plain(shown), command
            else:
                assert '"error":"' not in answer, (command, answer)
            assert answer or "/liveness" in command
            learn(answer, names)


def test_every_endpoint_is_on_the_page_with_a_command() -> None:
    paths = openapi_of(admin(Scheduler("memory://")), ROUTERS)["paths"]
    endpoints = [f"{method.upper()} {path}" for path, methods in paths.items() for method in methods]
    assert sorted(ENDPOINT.findall(PAGE)) == sorted(endpoints)
    for section in re.split(r"(?=^\*\*`)", PAGE, flags=re.MULTILINE)[1:]:
        assert "```sh\ncurl " in section, section.splitlines()[0]
