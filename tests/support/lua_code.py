"""Read the Lua scripts as text: their code without comments, and the arguments of calls."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.resources import files

from aiodelay.backends.redis.connection.scripts import source_of

__all__ = ["LUA", "arguments_at", "calls", "code_of"]

LUA = sorted(each.name.removesuffix(".lua") for each in files("aiodelay.backends.redis").joinpath("lua").iterdir())
"""The names of all files, scripts and parts of scripts."""


def code_of(name: str) -> str:
    """Return a file of `lua/` without its comments."""
    return re.sub(r"--.*$", "", source_of(name), flags=re.MULTILINE)


def calls(code: str, *functions: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the calls of these functions: the name of the function, and the text of each argument."""
    for found in re.finditer(rf"(?<![\w.])({'|'.join(map(re.escape, functions))})\(", code):
        yield found[1], arguments_at(code, found.end())


def arguments_at(code: str, at: int) -> list[str]:
    """Return the arguments of a call whose parenthesis opens just before `at`."""
    depth, arguments = 0, [""]
    for token in re.findall(r"'(?:\\.|[^'\\])*'|.", code[at:], re.DOTALL):
        if token == ")" and depth == 0:
            break
        depth += (token in "([{") - (token in ")]}")
        if token == "," and depth == 0:
            arguments.append("")
        else:
            arguments[-1] += token
    return [each.strip() for each in arguments]
