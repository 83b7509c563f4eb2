"""The scripts: one file each under `lua/`, put together from the parts that their line `--@` names."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from functools import cache
from importlib.resources import files

import hiredis
from msgspec import Struct

__all__ = ["NAMES", "Arg", "Script", "packed", "script", "source_of"]

Arg = bytes | str | int

NAMES = (
    "apply",
    "back",
    "blocked",
    "claim",
    "counts",
    "hold",
    "load",
    "look",
    "range",
    "redrive",
    "renew",
    "settle",
    "tidy",
    "transfer",
)
"""All scripts of a store."""

_PARTS = re.compile(r"^--@ (.+)$", re.MULTILINE)


class Script(Struct, frozen=True):
    """A script: its whole text, and the name under which a server caches it."""

    name: str
    text: bytes
    sha: bytes


def source_of(name: str) -> str:
    """Return a file of `lua/`."""
    return files(__package__).joinpath("lua", f"{name}.lua").read_text(encoding="utf-8")


@cache
def script(name: str) -> Script:
    """Return a script by name; read once per process."""
    own = source_of(name)
    found = _PARTS.search(own)
    parts = found[1].split() if found else []
    text = "\n".join([*map(source_of, parts), own]).encode()
    return Script(name, text, hashlib.sha1(text, usedforsecurity=False).hexdigest().encode())


def packed(arguments: Sequence[Arg]) -> bytes:
    """Write a command as Redis reads it."""
    command: bytes = hiredis.pack_command(tuple(arguments))  # type: ignore[arg-type] # its stub knows tuples of one alone
    return command
