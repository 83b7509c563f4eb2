"""Run `aiodelay serve` in a separate process, and call it over HTTP."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx

from tests.support.command import DEADLINE_S, Program

__all__ = ["Service", "text_at", "until", "until_ready"]

READY_S = 50.0
PROGRAM = """
from importlib import import_module
from aiodelay.cli import main
for name, value in {periods}.items():
    module, _, constant = name.rpartition(".")
    assert hasattr(import_module(module), constant), name
    setattr(import_module(module), constant, value)
main()
"""


class Service(Program):
    """The service. The end of its block kills it if it still runs.

    Args:
        folder: The working directory.
        text: The text of the configuration file; None = no file.
        environment: Environment variables in addition to those of this process.
        arguments: The arguments after `serve`.
        periods: Other values for constants of modules, such as `{"aiodelay.service.health.AGAIN_S": 0.1}`.
    """

    def __init__(
        self,
        folder: Path,
        text: str | None = None,
        environment: Mapping[str, str] | None = None,
        *arguments: str,
        periods: Mapping[str, float] | None = None,
    ) -> None:
        if text is not None:
            (folder / "aiodelay.toml").write_text(text)
            (folder / "aiodelay.toml").chmod(0o600)
        port = () if "--port" in arguments else ("--port", "0")
        program = ("-c", PROGRAM.format(periods=periods)) if periods else ("-m", "aiodelay")
        super().__init__(*program, "serve", *port, *arguments, cwd=folder, environment=environment)

    def client(self, token: str = "") -> httpx.Client:
        """Wait until the service listens. Return a client."""
        line = next((line for line in self.err.seen if "listening on" in line), "") or self.err.wait_for("listening on")
        found = re.search(r"http://[^\s\"]+", line)
        assert found is not None, line
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        return httpx.Client(base_url=found[0], headers=headers, timeout=30, trust_env=False)

    def logged(self) -> list[dict[str, Any]]:
        """Return the log lines up to the last one that a test waited for."""
        return [json.loads(line) for line in self.err.seen]


def until(client: httpx.Client, is_so: Callable[[httpx.Response], bool], within_s: float = READY_S) -> httpx.Response:
    """Call `/readyz` until the answer satisfies a condition. Return the answer."""
    ends = time.monotonic() + within_s
    while True:
        answer = client.get("/readyz")
        if is_so(answer):
            return answer
        assert answer.status_code != 500, answer.text
        assert time.monotonic() < ends, answer.text
        time.sleep(0.05)


def until_ready(client: httpx.Client) -> None:
    """Wait until the service is ready."""
    until(client, lambda answer: answer.status_code == 200)


def text_at(url: str) -> str:
    """Return the text that a server gives at a URL."""
    return httpx.get(url, timeout=DEADLINE_S, trust_env=False).text
