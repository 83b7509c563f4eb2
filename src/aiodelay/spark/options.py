"""Reading the options of the data sources, on the driver. An error names the wrong option."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import cast, get_args

from aiodelay.errors import ConfigurationError, shortened

from .schemas import Table

__all__ = ["Options", "checked_folder", "read_table", "store_url"]

_MOST_DIGITS = 18
_PATTERNS = frozenset("*?[]{}\\")
TABLES: tuple[Table, ...] = get_args(Table)


class Options:
    """Reads Spark's options, whose names are not case-sensitive. `finish` refuses options that were not read."""

    def __init__(self, given: Mapping[str, str]) -> None:
        self._left = {name.lower(): text for name, text in given.items()}
        self._known: list[str] = []

    def text(self, name: str, default: str | None = None) -> str | None:
        """Return the text of an option; a blank text counts as not given."""
        self._known.append(name)
        return (self._left.pop(name.lower(), "") or "").strip() or default

    def has(self, name: str) -> bool:
        """Return whether an option is given, even if it is blank."""
        return self._left.get(name.lower()) is not None

    def required(self, name: str, example: str) -> str:
        """Return the text of a required option.

        Raises:
            ConfigurationError: The option is missing.
        """
        found = self.text(name)
        if found is None:
            raise ConfigurationError(f"option {name!r}", "missing", f"a value such as {example}")
        return found

    def choice(self, name: str, allowed: tuple[str, ...], default: str) -> str:
        """Return the value of an option that allows only some values.

        Raises:
            ConfigurationError: The option has another value.
        """
        found = self.text(name) or default
        if found not in allowed:
            raise ConfigurationError(f"option {name!r}", shortened(found), ", ".join(allowed))
        return found

    def integer(self, name: str, default: int, least: int, most: int) -> int:
        """Return the value of an option as an integer.

        Raises:
            ConfigurationError: The option is not an integer from `least` to `most`.
        """
        found = self.text(name)
        if found is None:
            return default
        is_number = found.isascii() and found.isdigit() and len(found) <= _MOST_DIGITS
        if not is_number or not least <= int(found) <= most:
            raise ConfigurationError(f"option {name!r}", shortened(found), f"an integer from {least:,} to {most:,}")
        return int(found)

    def flag(self, name: str, *, default: bool = False) -> bool:
        """Return whether an option is `true`.

        Raises:
            ConfigurationError: The option is neither `true` nor `false`.
        """
        return self.choice(name, ("true", "false"), str(default).lower()) == "true"

    def finish(self) -> None:
        """Check that all given options have been read.

        Raises:
            ConfigurationError: An option is unknown. The error names it and the known options.
        """
        for name in self._left:
            raise ConfigurationError("option", shortened(name), ", ".join(self._known))


def read_table(given: Mapping[str, str]) -> Table:
    """Return the table that the options name; `messages` by default.

    Raises:
        ConfigurationError: There is no such table.
    """
    return cast("Table", Options(given).choice("table", TABLES, "messages"))


def checked_folder(field: str, folder: str) -> str:
    """Return the name of a folder that a job writes and reads, without a slash at its end.

    Raises:
        ConfigurationError: The name is blank, or has a character that Spark reads as a pattern.
    """
    if not folder.strip("/ ") or not _PATTERNS.isdisjoint(folder):
        allowed = "a folder, such as /data/cold or s3a://bucket/cold, without any of *?[]{}\\"
        raise ConfigurationError(field, shortened(folder), allowed)
    return folder.rstrip("/")


def store_url(given: str) -> str:
    """Return the URL of a store from a URL, `env:NAME` or `file:PATH`.

    `env:NAME` and `file:PATH` keep passwords out of plans, logs and process lists. The process that calls this function
    reads the variable or the file: the driver, and each executor.

    Raises:
        ConfigurationError: The variable is not set, or the file cannot be read or is empty.
    """
    kind, _, name = given.partition(":")
    if kind == "env":
        url = os.environ.get(name, "").strip()
        if not url:
            raise ConfigurationError("store", shortened(given), "an environment variable that is set on every machine")
        return url
    if kind == "file":
        try:
            url = Path(name).read_text(encoding="utf-8").strip()
        except (OSError, ValueError) as error:
            raise ConfigurationError(
                "store", f"{shortened(given)} ({error})", "a file that can be read on every machine"
            ) from None
        if not url:
            raise ConfigurationError("store", f"{shortened(given)}, which is empty", "a file that holds a store's URL")
        return url
    return given
