"""The Lua scripts of the Redis backend. This module composes each script from the files under `lua/`.

Each script has a Lua file with its name. A line `--@` in the Lua file names the files of shared code, which come before
the script's own code. In all these files, values replace two kinds of names:

- Layout constants, such as `VALUE.DUE_MS_FIRST`, become the numbers and strings of the module `layouts`.
- `MARKER` constants become the layout and the features that this version knows, and the marks of a store. So a script
  itself can refuse newer data.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files

import hiredis
from msgspec import Struct

from aiodelay.backends.redis.records.keys import GUARD, MARKS
from aiodelay.backends.redis.records.layouts import NAMESPACES, lua_constants
from aiodelay.core import features
from aiodelay.core.record_format import FIELDS

__all__ = [
    "MODULES",
    "NAMES",
    "RARE",
    "STANDALONE",
    "Arg",
    "Script",
    "filled",
    "packed",
    "part_of",
    "script",
    "source_of",
]

Arg = bytes | str | int

NAMES = (
    "apply",
    "back",
    "beat",
    "blocked",
    "bury",
    "claim",
    "counts",
    "graves",
    "hold",
    "limited_keys",
    "load",
    "look",
    "present",
    "pulse",
    "range",
    "redrive",
    "renew",
    "scan",
    "series",
    "set_limits",
    "settle",
    "switch_on",
    "tidy",
    "transfer",
    "transfer_logs",
    "transfer_topics",
)
"""The scripts of a store."""
STANDALONE = (
    "again",
    "again_log",
    "append",
    "beat_source",
    "drop",
    "drop_log",
    "find_log",
    "keep",
    "lag",
    "lag_log",
    "move",
    "publish",
    "push",
    "register",
    "register_log",
    "seek_log",
    "take",
    "take_log",
    "trim_log",
    "unregister",
    "unregister_log",
)
"""The scripts of lists, topics and logs, and of `aiodelay reshard`. They do not take the keys of a store."""

MODULES = (
    "fields",
    "memory",
    "tokens",
    "trials",
    "parts",
    "occurrences",
    "superseded",
    "conflicts",
    "appending",
    "dead",
    "attempts",
    "lapsing",
    "pulses",
    "limits",
)
"""The parts whose functions a script makes only if it uses one of them. Each is a table with the name of its file."""
RARE = ("requeue", "rounds")
"""Parts of the same kind that only some scripts have. Their line `--@` names them."""

_PARTS = re.compile(r"^--@ (.+)$", re.MULTILINE)
_CONSTANT = re.compile(rf"\b(?:{'|'.join((*NAMESPACES, 'MARKER'))})\.[A-Z0-9_]+\b")
_CONSTANTS = lua_constants(FIELDS)


class Script(Struct, frozen=True):
    """A Lua script. The server keeps scripts by `sha`, the SHA-1 of the text."""

    name: str
    text: bytes
    sha: bytes


def source_of(name: str) -> str:
    """Return the text of a file under `lua/` as it is: values have not yet replaced the names of the constants."""
    return files("aiodelay.backends.redis").joinpath("lua", f"{name}.lua").read_text(encoding="utf-8")


def filled(source: str, constants: Mapping[str, str]) -> str:
    """Return Lua source in which values have replaced the names of the constants.

    Raises:
        KeyError: The source names a constant that no layout has.
    """
    return _CONSTANT.sub(lambda found: constants[found[0]], source)


def part_of(name: str) -> str:
    """Return the text of a file under `lua/`, in which values have replaced the names of the constants."""
    return _part(name, features.KNOWN)


def _part(name: str, known: frozenset[str]) -> str:
    marker = {
        "MARKER.LAYOUT": f"'{features.REDIS_LAYOUT}'",
        "MARKER.KNOWN": "{" + ", ".join(f"['{each}'] = true" for each in sorted(known)) + "}",
        "MARKER.GUARD": f"'{GUARD}'",
        "MARKER.MARKS": ", ".join(f"'{each}'" for each in MARKS),
    }
    return filled(source_of(name), _CONSTANTS | marker)


def script(name: str) -> Script:
    """Return the script with this name. A process composes each script only once."""
    return _put_together(name, features.KNOWN)


@cache
def _put_together(name: str, known: frozenset[str]) -> Script:
    first, *others = [*_parts_of(name), name]
    lines = [_part(first, known)]
    if others:
        # A script makes its functions again in each call. For each variable that a function uses, Lua searches the
        # variables of the surrounding function. They are few if the first part is outside.
        lines.append("return (function()")
        lines += [f"local {each} = {{}}" for each in others if each in MODULES + RARE]
        lines += [_module(each, known) if each in MODULES + RARE else _part(each, known) for each in others]
        lines.append("end)()")
    text = "\n".join(lines).encode()
    return Script(name, text, hashlib.sha1(text, usedforsecurity=False).hexdigest().encode())


def _parts_of(name: str) -> list[str]:
    """Return the names of the shared parts of a script, in order."""
    found = _PARTS.search(source_of(name))
    parts = found[1].split() if found else []
    if "moves" in parts:  # Its functions use all modules.
        at = parts.index("moves") + 1
        parts[at:at] = MODULES
    return parts


def _module(name: str, known: frozenset[str]) -> str:
    return f"lazily({name}, function()\n{_part(name, known)}\nend)"


def packed(arguments: Sequence[Arg]) -> bytes:
    """Return a command as bytes of the Redis protocol."""
    command: bytes = hiredis.pack_command(tuple(arguments))  # type: ignore[arg-type] # its stub allows only 1 argument
    return command
