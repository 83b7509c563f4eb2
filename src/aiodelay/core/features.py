"""What this version knows of stored data: their layouts, and the optional features that a namespace may use.

A namespace records each feature that `aiodelay upgrade` has switched on. Until then no process uses the feature, so
that processes of this version and of the one before share the namespace. From then on a process that does not know
the feature claims nothing: it would ignore the feature's rules. docs/decisions/0016-rolling-upgrades.md tells why.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from aiodelay.errors import StoreTooNewError

from .values import WorkStatus
from .version import __version__

__all__ = [
    "KNOWN",
    "REDIS_LAYOUT",
    "SQLITE_LAYOUT",
    "VersionCheck",
    "check_known",
    "newer_layout",
    "too_new",
    "unknown",
]

KNOWN: frozenset[str] = frozenset()
"""Optional features that this version can use: names of lower-case letters, digits and `_`. The set is empty so far.

Read it where it is needed, as `features.KNOWN`, and never copy it: tests register features of their own here.
"""

SQLITE_LAYOUT = 1
"""The schema version of a SQLite file."""
REDIS_LAYOUT = 1
"""The version of a Redis namespace's keys. Of Kafka, every record names its format instead."""


def unknown(recorded: Mapping[str, str]) -> dict[str, str]:
    """Return the recorded features that this version does not know, with the versions that switched them on."""
    return {name: version for name, version in sorted(recorded.items()) if name not in KNOWN}


def check_known(where: str, recorded: Mapping[str, str]) -> None:
    """Refuse data that use a feature which this version does not know.

    Args:
        where: Names the data in the error.
        recorded: The features in use, each with the version of aiodelay that switched it on.

    Raises:
        StoreTooNewError: Names the features and both versions.
    """
    if found := unknown(recorded):
        raise too_new(where, found)


def too_new(where: str, found: Mapping[str, str]) -> StoreTooNewError:
    """Return the error for data that use features which this version does not know.

    Args:
        where: Names the data.
        found: These features, each with the version of aiodelay that switched it on.
    """
    named = ", ".join(f"{name} (switched on by aiodelay {version})" for name, version in found.items())
    what = "which" if len(found) == 1 else "features that"
    value = f"uses {named}, {what} aiodelay {__version__} does not know"
    return StoreTooNewError(where, value, "upgrade this process, which claims nothing until then")


def newer_layout(where: str, found: object, known: int) -> StoreTooNewError:
    """Return the error for data whose layout has changed since this process opened them.

    Args:
        where: Names the data.
        found: Their layout.
        known: The layout of this version.
    """
    value = f"has layout {found} now, and aiodelay {__version__} knows layout {known}"
    return StoreTooNewError(where, value, "upgrade this process, which changes nothing there until then")


class VersionCheck:
    """Remembers whether a worker's last call met data that this version does not know, for `Work.status`."""

    def __init__(self) -> None:
        self._why = ""

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note whether the block raises `StoreTooNewError`; another error does not change the note."""
        try:
            yield
        except StoreTooNewError as error:
            self._why = str(error)
            raise
        self._why = ""

    def status(self) -> WorkStatus:
        """Return `ended`, with the reason, while the store holds data that this version does not know."""
        return WorkStatus("ended", why=self._why) if self._why else WorkStatus("ready")
