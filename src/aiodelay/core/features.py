"""The layouts and optional features of stored data that this version knows.

A namespace records each feature that `aiodelay upgrade` has switched on. Before that, no process uses the feature, so
processes of this version and of the previous version can share the namespace. After that, a process that does not know
the feature claims nothing, because it would ignore the feature's rules. docs/decisions/0016-rolling-upgrades.md
explains why.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from aiodelay.errors import StoreTooNewError

from .values import WorkStatus
from .version import __version__

__all__ = [
    "KNOWN",
    "ON_DEMAND",
    "REDIS_LAYOUT",
    "SQLITE_LAYOUT",
    "VersionCheck",
    "check_known",
    "newer_layout",
    "too_new",
    "unknown",
]

KNOWN: frozenset[str] = frozenset({"limits", "append"})
"""Optional features that this version can use: names of lower-case letters, digits and `_`.

`limits`: lanes have limits. A store switches it on when it stores the first limit.
`append`: messages in flight may get items. A store switches it on when it carries out the first `Conflict.append()`.

Always read it as `features.KNOWN`, and never copy it: tests add features of their own here.
"""

ON_DEMAND: frozenset[str] = frozenset({"limits", "append"})
"""Features that a store switches on by itself when they are first used. `aiodelay upgrade` leaves them off."""

SQLITE_LAYOUT = 1
"""The schema version of a SQLite file."""
REDIS_LAYOUT = 1
"""The version of the keys of a Redis namespace. Kafka needs no such version: each record names its format."""


def unknown(recorded: Mapping[str, str]) -> dict[str, str]:
    """Return the recorded features that this version does not know, with the versions that switched them on."""
    return {name: version for name, version in sorted(recorded.items()) if name not in KNOWN}


def check_known(where: str, recorded: Mapping[str, str]) -> None:
    """Refuse data that use a feature which this version does not know.

    Args:
        where: The name of the data, for the error.
        recorded: The features in use, each with the version of aiodelay that switched it on.

    Raises:
        StoreTooNewError: The data use an unknown feature. The error names the features and both versions.
    """
    if found := unknown(recorded):
        raise too_new(where, found)


def too_new(where: str, found: Mapping[str, str]) -> StoreTooNewError:
    """Return the error for data that use features which this version does not know.

    Args:
        where: The name of the data, for the error.
        found: These features, each with the version of aiodelay that switched it on.
    """
    named = ", ".join(f"{name} (switched on by aiodelay {version})" for name, version in found.items())
    what = "which" if len(found) == 1 else "features that"
    value = f"uses {named}, {what} aiodelay {__version__} does not know"
    return StoreTooNewError(where, value, "upgrade this process, which claims nothing until then")


def newer_layout(where: str, found: object, known: int) -> StoreTooNewError:
    """Return the error for data whose layout has changed since this process opened them.

    Args:
        where: The name of the data, for the error.
        found: The layout of the data.
        known: The layout that this version knows.
    """
    value = f"has layout {found} now, and aiodelay {__version__} knows layout {known}"
    return StoreTooNewError(where, value, "upgrade this process, which changes nothing there until then")


class VersionCheck:
    """Remembers for `Work.status` whether a worker's last call found data that this version does not know."""

    def __init__(self) -> None:
        self._why = ""

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Remember whether the block raises `StoreTooNewError`. Any other error changes nothing."""
        try:
            yield
        except StoreTooNewError as error:
            self._why = str(error)
            raise
        self._why = ""

    def status(self) -> WorkStatus:
        """Return `ended` with the reason while the store holds data that this version does not know, else `ready`."""
        return WorkStatus("ended", why=self._why) if self._why else WorkStatus("ready")
