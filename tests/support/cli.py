"""Run the command line in this process, through the function that `aiodelay` calls, and keep its output."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from aiodelay.cli.app import run_app


@dataclass(frozen=True)
class Ran:
    """A command that has ended."""

    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()

    @property
    def objects(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.splitlines()]

    @property
    def object(self) -> dict[str, Any]:
        (only,) = self.objects
        return only

    @property
    def error(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.err)
        return found


def ran(*arguments: str) -> Ran:
    """Run a command."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run_app(arguments)
    return Ran(code, out.getvalue(), err.getvalue())


class Cli:
    """Runs commands on one store.

    Args:
        url: The URL of the store.
        folder: The folder for files that commands read as stdin.
    """

    def __init__(self, url: str, folder: Path) -> None:
        self.url, self._folder = url, folder
        self.namespace = "default"

    def __call__(self, *arguments: str, stdin: bytes = b"", store: str | None = None) -> Ran:
        path = self._folder / "stdin"
        path.write_bytes(stdin)
        environment = {"AIODELAY_STORE": store or self.url, "AIODELAY_NAMESPACE": self.namespace}
        with (
            mock.patch.dict(os.environ, {**environment, "COLUMNS": "120"}),
            path.open(encoding="utf-8") as file,
            mock.patch.object(sys, "stdin", file),
        ):
            return ran(*arguments)
