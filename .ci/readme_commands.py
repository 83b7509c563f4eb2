"""Print one of the README's two commands. With this program, the gate runs exactly the commands of the README.

Usage: python3 .ci/readme_commands.py {demo,tests} [README.md]
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import NamedTuple

HEADING = "## Two commands"
_SECTION = re.compile(rf"^{re.escape(HEADING)}[ \t]*\n(?P<body>.*?)(?=^#{{1,2}} |\Z)", re.MULTILINE | re.DOTALL)
_BLOCK = re.compile(r"^```sh[ \t]*\n(?P<body>.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)


class ReadmeError(ValueError):
    """The README does not contain the two commands in the agreed form."""


class Commands(NamedTuple):
    demo: str
    tests: str


def extract(readme: str) -> Commands:
    """Return the two commands in the order of the README: the demo, then all tests.

    Raises:
        ReadmeError: The README must have exactly one section "Two commands", with two `sh` blocks of one line each.
    """
    lines = [_only_line(block) for block in _BLOCK.findall(_only_section(readme))]
    if len(lines) != 2:
        raise ReadmeError(f"{HEADING!r} holds {len(lines)} ```sh blocks; it must hold exactly two")
    return Commands(*lines)


def _only_section(readme: str) -> str:
    sections: list[str] = _SECTION.findall(readme)
    if len(sections) != 1:
        raise ReadmeError(f"{len(sections)} sections are headed {HEADING!r}; there must be exactly one")
    return sections[0]


def _only_line(block: str) -> str:
    lines = block.splitlines()
    if len(lines) != 1 or not lines[0].strip():
        raise ReadmeError(f"a ```sh block under {HEADING!r} must hold exactly one line, not {len(lines)}: {block!r}")
    return lines[0].strip()


def main() -> None:
    parser = argparse.ArgumentParser(description="Print one of the README's two commands.")
    parser.add_argument("command", choices=Commands._fields)
    parser.add_argument("readme", nargs="?", type=Path, default=Path("README.md"))
    args = parser.parse_args()
    try:
        commands = extract(args.readme.read_text(encoding="utf-8"))
    except (OSError, ReadmeError) as error:
        sys.exit(f"readme_commands: {args.readme}: {error}")
    print(getattr(commands, args.command))


if __name__ == "__main__":
    main()
