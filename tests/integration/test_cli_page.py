"""docs/cli.md: its blocks show the real output, and it lists every option of every command."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from aiodelay.cli.app import INTERRUPTED, app
from aiodelay.cli.commands import COMMANDS, name_of
from aiodelay.cli.errors import FAILED, NOT_FOUND, NOT_UNDERSTOOD, TOO_LATE, UNAVAILABLE, UNKNOWN
from tests.support.cli import Cli
from tests.support.command import absolute_path

PAGE = (Path(__file__).parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")
BLOCKS: list[str] = re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL)
VERBS = [name_of(place) for place, group, _ in COMMANDS if group not in ("Run", "Bulk")]


def plain(text: str) -> str:
    """Leave out what differs each time, and how columns are laid out."""
    text = re.sub(r"\d{4}-\d\d-\d\d( at)? \d\d:\d\d:\d\d\.\d{3}Z", "TIME", text)
    text = re.sub(r"in \d[\dhms.]*", "in SOON", text)
    return "\n".join(" ".join(line.split()) for line in text.splitlines())


def test_what_the_page_shows_happens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands run in this process, pipelines in a shell."""
    monkeypatch.chdir(tmp_path)
    cli = Cli("sqlite:///delay.db", tmp_path)
    (tmp_path / "aiodelay").write_text(f'#!/bin/sh\nexec {sys.executable} -m aiodelay "$@"\n')
    (tmp_path / "aiodelay").chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PYTHONPATH": absolute_path(os.environ.get("PYTHONPATH", "")),
        "AIODELAY_STORE": "sqlite:///delay.db",
    }
    shown = 0
    for block in BLOCKS:
        for command, wanted in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block, re.MULTILINE):
            if "|" in command:
                said = subprocess.run(
                    ["/bin/sh", "-c", f"{command} 2>&1"], env=environment, capture_output=True, text=True, check=False
                ).stdout
            else:
                name, *arguments = shlex.split(command)
                assert name == "aiodelay"
                run = cli(*arguments)
                said = run.out + run.err
            assert plain(said) == plain(wanted), command
            shown += 1
    assert shown >= 10


@pytest.mark.parametrize("verb", VERBS)
def test_every_option_stands_on_the_page(verb: str) -> None:
    command = app[verb]
    commands = [command, *(command[name] for name in command if not name.startswith("-"))]
    options = {
        name
        for each in commands
        if each.default_command is not None
        for argument in each.assemble_argument_collection()
        for name in argument.names
        if name.startswith("--") and name != "--yes"
    }
    assert options, "it has those that all share"
    missing = {name for name in options if f"{name}`" not in PAGE and f"{name} " not in PAGE}
    assert missing == set()
    assert f"aiodelay {verb}" in PAGE or f"`{verb}" in PAGE


def test_exit_codes_are_those_of_the_page() -> None:
    codes = {int(code) for code in re.findall(r"^\| (\d+) \|", PAGE, re.MULTILINE)}
    assert codes == {0, FAILED, NOT_UNDERSTOOD, NOT_FOUND, TOO_LATE, UNAVAILABLE, UNKNOWN, INTERRUPTED}
