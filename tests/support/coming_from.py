"""The programs of docs/coming-from-*.md: on each page one of another library, and one of aiodelay."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

__all__ = ["OURS", "PAGES", "PEERS", "Shown"]

_PREFIX = "coming-from-"
PAGES = {
    path.stem.removeprefix(_PREFIX): path.read_text(encoding="utf-8")
    for path in sorted((Path(__file__).parents[2] / "docs").glob(f"{_PREFIX}*.md"))
}
"""The text of each page, by the library in lower case."""
_PROGRAM = re.compile(
    r"^```(?:python|js)\n(?:#|//) (?P<file>[\w.]+)\n(?P<code>.*?)^```$\n\n"
    r"```console\n(?P<commands>.*?)^```$\n\n```text\n(?P<shown>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


class Shown(NamedTuple):
    """A program of a page.

    Attributes:
        library: The library of its page, in lower case.
        file: The name of its file.
        code: Its source.
        commands: The commands that run it, in order. They run at the same time.
        lines: The lines that the commands print together.
    """

    library: str
    file: str
    code: str
    commands: list[str]
    lines: list[str]


def _programs() -> list[Shown]:
    return [
        Shown(
            library,
            found["file"],
            found["code"],
            [line.removeprefix("$ ") for line in found["commands"].splitlines()],
            found["shown"].splitlines(),
        )
        for library, page in PAGES.items()
        for found in _PROGRAM.finditer(page)
    ]


OURS = [program for program in _programs() if program.file == "shop.py"]
PEERS = [program for program in _programs() if program.file != "shop.py"]
