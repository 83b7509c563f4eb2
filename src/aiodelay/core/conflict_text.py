"""The form of `Conflict` as text: `debounce:5s:1m`. JSON, the command line and records use it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from aiodelay.errors import ConfigurationError, shortened

from .values import Conflict

__all__ = ["CONFLICT_TEXTS", "read_conflict"]

CONFLICT_TEXTS = (
    '"replace", "keep", "error", "earlier", "later", "newer:7", "if_revision:7", "debounce:5s" (quiet),'
    ' "debounce:5s:1m" (quiet, max_wait), "throttle:1h" (window), "throttle:1h:last", "append" or "append:50"'
    " (max_items)"
)
"""The texts that `read_conflict` knows, for error messages."""

_MOST_DIGITS = 20


def read_conflict(text: str) -> Conflict:
    """Return the conflict rule that a text names.

    Raises:
        ConfigurationError: The text names no rule, or one of its values is wrong.
    """
    mode, *values = text.split(":")
    read = _READERS.get((mode, len(values)))
    conflict = None if read is None else read(*values)
    if conflict is None:
        raise ConfigurationError("conflict", shortened(text), CONFLICT_TEXTS)
    return conflict


def _newer(version: str) -> Conflict | None:
    return Conflict.newer(int(version)) if _is_number(version) else None


def _if_revision(revision: str) -> Conflict | None:
    return Conflict.if_revision(int(revision)) if _is_number(revision) else None


def _append(max_items: str) -> Conflict | None:
    return Conflict.append(int(max_items)) if _is_number(max_items) else None


def _throttle_last(window: str, last: str) -> Conflict | None:
    return Conflict.throttle(window, last=True) if last == "last" else None


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS


_READERS: Mapping[tuple[str, int], Callable[..., Conflict | None]] = {
    ("replace", 0): Conflict.replace,
    ("keep", 0): Conflict.keep,
    ("error", 0): Conflict.error,
    ("earlier", 0): Conflict.earlier,
    ("later", 0): Conflict.later,
    ("newer", 1): _newer,
    ("if_revision", 1): _if_revision,
    ("debounce", 1): Conflict.debounce,
    ("debounce", 2): Conflict.debounce,
    ("throttle", 1): Conflict.throttle,
    ("throttle", 2): _throttle_last,
    ("append", 0): Conflict.append,
    ("append", 1): _append,
}
"""The rules by mode and number of values."""
